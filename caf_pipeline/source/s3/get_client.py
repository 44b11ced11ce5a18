"""The awscrt client for all GETs: body, S3's checksum and every header in one request.

It follows no redirects and never retries. Proxy variables apply as in boto3. Source: awscrt 0.38's
`S3Client`; docs/decisions/0017-one-client-for-gets.md.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

from awscrt.auth import AwsCredentialsProvider, AwsSigningConfig
from awscrt.exceptions import AwsCrtError
from awscrt.http import HttpHeaders, HttpRequest
from awscrt.io import ClientTlsContext, TlsConnectionOptions, TlsContextOptions
from awscrt.s3 import (
    S3Client,
    S3Request,
    S3RequestTlsMode,
    S3RequestType,
    S3ResponseError,
    S3RetryConfig,
    S3RetryMode,
    create_default_s3_signing_config,
)
from botocore import UNSIGNED
from botocore.exceptions import ClientError, NoCredentialsError
from botocore.httpsession import get_cert_path
from botocore.parsers import create_parser
from botocore.utils import check_dns_name

from caf_pipeline.errors import SettingsError
from caf_pipeline.source.s3.client_type import S3Client as Boto3Client
from caf_pipeline.source.s3.clients import CA_BUNDLE, CONNECT_TIMEOUT, is_aws

MEMORY_LIMIT_BYTES: Final = 2 << 30
"""awscrt refuses less than 1 GiB, and defaults to up to 24. GETs use near 200 MB."""

CONNECTION_GBPS: Final = 0.4
"""awscrt opens a connection per 0.4 Gbit/s of its target, and 25 by default.

`max_active_connections_override` only lowers that number.
"""

_SAFE: Final = "/~"
"""Not encoded in keys: "URI-encoding" in Signature Version 4."""

_CLOCK_WRONG: Final = "AWS_ERROR_S3_REQUEST_TIME_TOO_SKEWED"
_SLOW_DOWN: Final = "AWS_ERROR_S3_SLOW_DOWN"
"""Any answer with status 503. awscrt drops the status and the body."""

_TOO_MANY_REQUESTS: Final = 429
_UNREADABLE_HEADER: Final = "AWS_ERROR_CRT_CALLBACK_EXCEPTION"


class UnreadableHeader(Exception):
    """awscrt cannot pass on a header that is not UTF-8."""


@dataclass(frozen=True, slots=True)
class GetAnswer:
    """Header names are in lower case, values in ISO 8859-1 like botocore's."""

    headers: Mapping[str, str]
    body: bytes


class GetClient:
    """Sends GETs for the objects of one bucket. Safe to call from several threads."""

    def __init__(
        self,
        client: Boto3Client,
        bucket: str,
        *,
        requester_pays: bool = False,
        region: str | None = None,
        connections: int | None = None,
    ) -> None:
        """Copy endpoint, path style, credentials and certificates from a boto3 client.

        Sends no request. `connections` limits concurrent GETs; None leaves the limit to awscrt.
        Raises SettingsError.
        """
        self.endpoint, self.path = _bucket_url(client, bucket, region)
        self.region = region or client.meta.region_name
        parts = urlsplit(self.endpoint)
        self._headers = [
            ("host", parts.netloc),
            *([("x-amz-request-payer", "requester")] if requester_pays else []),
        ]
        # boto3 has no public access to either.
        self._credentials: Any = client._get_credentials()  # type: ignore[attr-defined]
        ca_file = client._endpoint.http_session._verify  # type: ignore[attr-defined]
        self._unsigned = getattr(client.meta.config, "signature_version", None) is UNSIGNED
        self._signing: tuple[object, AwsSigningConfig | None] = (None, None)
        # Holds a request until it is finished. awscrt may call Python when it frees a request, and
        # during an exception that would raise SystemError.
        self._under_way: dict[Future[None], S3Request] = {}
        self._parser = create_parser("rest-xml")
        self._shape: Any = client.meta.service_model.operation_model("GetObject").output_shape
        is_tls = parts.scheme == "https"
        self._awscrt = S3Client(
            region=self.region,
            tls_mode=S3RequestTlsMode.ENABLED if is_tls else S3RequestTlsMode.DISABLED,
            tls_connection_options=_tls_options(ca_file) if is_tls else None,
            memory_limit=MEMORY_LIMIT_BYTES,
            throughput_target_gbps=CONNECTION_GBPS * connections if connections else None,
            max_active_connections_override=connections,
            # `RequestPolicy` retries, by S3's error codes.
            retry_config=S3RetryConfig(retry_mode=S3RetryMode.NONE),
            connect_timeout_ms=int(CONNECT_TIMEOUT.total_seconds() * 1000),
        )

    def begin(
        self, key: str, *, version_id: str | None, headers: Mapping[str, str], size_bytes: int
    ) -> "PendingGet":
        """Start a GET. A request with a `Range` receives at most `size_bytes`.

        Raises AwsCrtError, NoCredentialsError or CredentialRetrievalError.
        """
        query = f"?versionId={quote(version_id, safe='')}" if version_id is not None else ""
        request = HttpRequest(
            "GET",
            f"{self.path}/{quote(key, safe=_SAFE)}{query}",
            HttpHeaders([*self._headers, *headers.items()]),
        )
        is_range = "Range" in headers
        answer_headers: list[list[tuple[str, str]]] = []
        pieces: list[bytes] = []
        crt_request = self._awscrt.make_request(
            # GET_OBJECT takes its buffer from the client's pool and receives no more than fits. But
            # it adds a range if the request has none, and S3 returns no checksum with a range.
            type=S3RequestType.GET_OBJECT if is_range else S3RequestType.DEFAULT,
            operation_name="GetObject",
            part_size=size_bytes if is_range else None,
            request=request,
            signing_config=self._signing_config(),
            on_headers=lambda headers, **_: answer_headers.append(headers),
            on_body=lambda chunk, **_: pieces.append(chunk),
        )
        finished = crt_request.finished_future
        self._under_way[finished] = crt_request
        del crt_request
        finished.add_done_callback(self._under_way.pop)
        return PendingGet(self, finished, answer_headers, pieces)

    def cancel(self, finished: "Future[None]") -> None:
        if crt_request := self._under_way.get(finished):
            crt_request.cancel()

    def _signing_config(self) -> AwsSigningConfig | None:
        if self._unsigned:
            return None
        if self._credentials is None:
            raise NoCredentialsError
        current = self._credentials.get_frozen_credentials()
        previous, signing = self._signing
        if current != previous:
            provider = AwsCredentialsProvider.new_static(
                current.access_key, current.secret_key, current.token
            )
            signing = create_default_s3_signing_config(
                region=self.region, credential_provider=provider
            )
            self._signing = (current, signing)
        return signing

    def refusal(self, error: S3ResponseError) -> ClientError:
        answer = {
            "headers": _in_lower_case(error.headers),
            "status_code": error.status_code,
            "body": error.body or b"",
        }
        return ClientError(self._parser.parse(answer, self._shape), "GetObject")


@dataclass(frozen=True, slots=True)
class PendingGet:
    """`answer_headers` receives the headers of each answer, and `pieces` the body of the last."""

    gets: GetClient
    finished: "Future[None]"
    answer_headers: Sequence[list[tuple[str, str]]]
    pieces: Sequence[bytes]

    @property
    def is_done(self) -> bool:
        return self.finished.done()

    def has_failed(self) -> bool:
        return self.is_done and self.finished.exception() is not None

    def was_refused(self) -> bool:
        """Return whether the server asked for fewer requests."""
        error = self.finished.exception() if self.is_done else None
        if isinstance(error, S3ResponseError):
            return bool(error.status_code == _TOO_MANY_REQUESTS)
        return isinstance(error, AwsCrtError) and error.name == _SLOW_DOWN

    def cancel(self) -> None:
        """`answer` then raises."""
        self.gets.cancel(self.finished)

    def answer(self) -> GetAnswer:
        """Wait for the answer; raises ClientError, AwsCrtError or UnreadableHeader."""
        try:
            self.finished.result()
        except S3ResponseError as error:
            raise self.gets.refusal(error) from error
        except AwsCrtError as error:
            if error.name == _UNREADABLE_HEADER:
                raise UnreadableHeader from error
            if error.name == _CLOCK_WRONG:
                raise ClientError(
                    {"Error": {"Code": "RequestTimeTooSkewed"}}, "GetObject"
                ) from error
            raise
        except OSError as error:  # awscrt raises some of its errors as Python's, e.g. a broken pipe
            raise AwsCrtError(
                0, "AWS_IO_SOCKET_CLOSED", f"the connection broke ({type(error).__name__})"
            ) from error
        return GetAnswer(
            _in_lower_case(self.answer_headers[-1]),
            self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces),
        )


def _bucket_url(client: Boto3Client, bucket: str, region: str | None) -> tuple[str, str]:
    endpoint = client.meta.endpoint_url.rstrip("/")
    if region and is_aws(client):
        # boto3 uses the endpoint without a region for us-east-1.
        endpoint = endpoint.replace("//s3.amazonaws.", f"//s3.{region}.amazonaws.").replace(
            f".{client.meta.region_name}.", f".{region}."
        )
    scheme, _, rest = endpoint.partition("://")
    host, slash, path = rest.partition("/")
    style = (getattr(client.meta.config, "s3", None) or {}).get("addressing_style", "auto")
    by_path = style == "path" or not check_dns_name(bucket) or "." in bucket
    with suppress(ValueError):  # an IP address cannot have a bucket's name before it
        ip_address(urlsplit(endpoint).hostname or "")
        by_path = True
    if by_path:
        return f"{scheme}://{host}", f"{slash}{path}/{bucket}"
    return f"{scheme}://{bucket}.{host}", slash + path


def _tls_options(ca_file: object) -> TlsConnectionOptions:
    path = str(get_cert_path(ca_file))  # type: ignore[arg-type]  # also takes a path
    options = TlsContextOptions()
    try:
        options.override_default_trust_store(Path(path).read_bytes())
    except OSError as error:
        raise SettingsError(
            f"{CA_BUNDLE} names {path}, which cannot be read: {error.strerror}"
        ) from error
    return ClientTlsContext(options).new_connection_options()


def _in_lower_case(headers: list[tuple[str, str]]) -> dict[str, str]:
    result: dict[str, str] = {}
    for name, value in headers:
        # awscrt decodes UTF-8; botocore's HEADs decode ISO 8859-1 (RFC 9112, appendix).
        text = value if value.isascii() else value.encode().decode("iso-8859-1")
        lower = name.lower()
        result[lower] = f"{result[lower]}, {text}" if lower in result else text
    return result
