"""The client of all GETs: awscrt's, which gives body, S3's own checksum and every header in one
request.

It is made of the boto3 client of the same source: the same endpoint, credentials and certificates.
It follows no redirect and tries nothing again; `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY` count as
they do for boto3. Source: awscrt 0.38's `S3Client`, tried on a server;
docs/decisions/0017-one-client-for-gets.md.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
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
"""Of what the client may hold; its own default is up to 24 GiB, and less than 1 GiB it refuses.

The window of GETs keeps it to some 200 MB.
"""

_SAFE: Final = "/~"
"""What of a key is not percent-encoded, beside letters, digits, `_`, `.` and `-`: "URI-encoding" in
Signature Version 4.
"""

_CLOCK_WRONG: Final = "AWS_ERROR_S3_REQUEST_TIME_TOO_SKEWED"
_UNREADABLE_HEADER: Final = "AWS_ERROR_CRT_CALLBACK_EXCEPTION"


class UnreadableHeader(Exception):
    """An answer has a header that is not UTF-8, which awscrt cannot hand over."""


@dataclass(frozen=True, slots=True)
class GetAnswer:
    """A body and its headers; their names are in lower case, their values ISO 8859-1 as in
    botocore's.
    """

    headers: Mapping[str, str]
    body: bytes


class GetClient:
    """GETs of the objects of one bucket. Safe to call from several threads."""

    def __init__(
        self,
        client: Boto3Client,
        bucket: str,
        *,
        requester_pays: bool = False,
        region: str | None = None,
        connections: int | None = None,
    ) -> None:
        """Take endpoint, path style, credentials and certificates of boto3's `client`; nothing is
        asked of the network.

        `region` is the bucket's, where it is another than the client's. Of more than `connections`
        GETs at once the later wait.

        Raises:
            SettingsError: the file of certificates cannot be read.
        """
        self.endpoint, self.path = _place(client, bucket, region)
        self.region = region or client.meta.region_name
        parts = urlsplit(self.endpoint)
        self._headers = [
            ("host", parts.netloc),
            *([("x-amz-request-payer", "requester")] if requester_pays else []),
        ]
        # There is no public way from a client to either.
        self._credentials: Any = client._get_credentials()  # type: ignore[attr-defined]
        verified_by = client._endpoint.http_session._verify  # type: ignore[attr-defined]
        self._unsigned = getattr(client.meta.config, "signature_version", None) is UNSIGNED
        self._signing: tuple[object, AwsSigningConfig | None] = (None, None)
        # What awscrt frees may call Python. While an exception passes, that would make it a
        # SystemError.
        self._under_way: dict[Future[None], S3Request] = {}
        self._parser = create_parser("rest-xml")
        self._shape: Any = client.meta.service_model.operation_model("GetObject").output_shape
        is_tls = parts.scheme == "https"
        self._awscrt = S3Client(
            region=self.region,
            tls_mode=S3RequestTlsMode.ENABLED if is_tls else S3RequestTlsMode.DISABLED,
            tls_connection_options=_trusting(verified_by) if is_tls else None,
            memory_limit=MEMORY_LIMIT_BYTES,
            max_active_connections_override=connections,
            retry_config=S3RetryConfig(
                retry_mode=S3RetryMode.NONE
            ),  # `RequestPolicy` has retries, which see S3's code
            connect_timeout_ms=int(CONNECT_TIMEOUT.total_seconds() * 1000),
        )

    def begin(
        self, key: str, *, version_id: str | None, headers: Mapping[str, str], size_bytes: int
    ) -> "PendingGet":
        """Ask for an object with these headers, and return at once.

        `size_bytes` are those that are asked for; where `Range` is among the headers, no more is
        taken.

        Raises: AwsCrtError: it cannot be asked. NoCredentialsError, CredentialRetrievalError: there
            is nothing to sign with.
        """
        query = f"?versionId={quote(version_id, safe='')}" if version_id is not None else ""
        request = HttpRequest(
            "GET",
            f"{self.path}/{quote(key, safe=_SAFE)}{query}",
            HttpHeaders([*self._headers, *headers.items()]),
        )
        is_range = "Range" in headers
        got: list[list[tuple[str, str]]] = []
        pieces: list[bytes] = []
        asked = self._awscrt.make_request(
            # A GET_OBJECT takes its buffer from the client's pool, and no more than fits into it;
            # without a range of ours it would add one of its own, and S3 gives no checksum with a
            # part.
            type=S3RequestType.GET_OBJECT if is_range else S3RequestType.DEFAULT,
            operation_name="GetObject",
            part_size=size_bytes if is_range else None,
            request=request,
            signing_config=self._signing_config(),
            on_headers=lambda headers, **_: got.append(headers),
            on_body=lambda chunk, **_: pieces.append(chunk),
        )
        finished = asked.finished_future
        self._under_way[finished] = asked
        del asked
        finished.add_done_callback(self._under_way.pop)
        return PendingGet(self, finished, got, pieces)

    def cancel(self, finished: "Future[None]") -> None:
        """End the request that this future is of, where it is under way."""
        if asked := self._under_way.get(finished):
            asked.cancel()

    def _signing_config(self) -> AwsSigningConfig | None:
        """Return what signs by the credentials as they are now; botocore renews those that are
        temporary.
        """
        if self._unsigned:
            return None
        if self._credentials is None:
            raise NoCredentialsError
        current = self._credentials.get_frozen_credentials()
        signed_by, signing = self._signing
        if current != signed_by:
            provider = AwsCredentialsProvider.new_static(
                current.access_key, current.secret_key, current.token
            )
            signing = create_default_s3_signing_config(
                region=self.region, credential_provider=provider
            )
            self._signing = (current, signing)
        return signing

    def refusal(self, error: S3ResponseError) -> ClientError:
        """Return S3's refusal as boto3 tells one."""
        answer = {
            "headers": _in_lower_case(error.headers),
            "status_code": error.status_code,
            "body": error.body or b"",
        }
        return ClientError(self._parser.parse(answer, self._shape), "GetObject")


@dataclass(frozen=True, slots=True)
class PendingGet:
    """A GET under way.

    `got` and `pieces` fill up with the headers of its answers and the body of the last.
    """

    gets: GetClient
    finished: "Future[None]"
    got: Sequence[list[tuple[str, str]]]
    pieces: Sequence[bytes]

    @property
    def is_done(self) -> bool:
        """Whether `answer` need not wait."""
        return self.finished.done()

    def has_failed(self) -> bool:
        """Tell whether `answer` raises, without waiting for it."""
        return self.is_done and self.finished.exception() is not None

    def cancel(self) -> None:
        """End it; `answer` raises."""
        self.gets.cancel(self.finished)

    def answer(self) -> GetAnswer:
        """Wait for the answer, and return it.

        Raises: ClientError: S3 refuses. AwsCrtError: there is no answer, or none that is of use.
            UnreadableHeader.
        """
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
        except (
            OSError
        ) as error:  # awscrt makes some of its errors Python's own: a pipe that is broken
            raise AwsCrtError(
                0, "AWS_IO_SOCKET_CLOSED", f"the connection broke ({type(error).__name__})"
            ) from error
        return GetAnswer(
            _in_lower_case(self.got[-1]),
            self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces),
        )


def _place(client: Boto3Client, bucket: str, region: str | None) -> tuple[str, str]:
    """Return the endpoint of a bucket, and the path in front of its keys."""
    endpoint = client.meta.endpoint_url.rstrip("/")
    if region and is_aws(client):
        # boto3 uses the endpoint without a region for us-east-1.
        endpoint = endpoint.replace("//s3.amazonaws.", f"//s3.{region}.amazonaws.").replace(
            f".{client.meta.region_name}.", f".{region}."
        )
    scheme, _, rest = endpoint.partition("://")
    host, slash, path = rest.partition("/")
    if (
        _style(client) != "path"
        and check_dns_name(bucket)
        and "." not in bucket
        and not _is_ip_address(endpoint)
    ):
        return f"{scheme}://{bucket}.{host}", slash + path
    return f"{scheme}://{host}", f"{slash}{path}/{bucket}"


def _is_ip_address(endpoint: str) -> bool:
    """Return whether the endpoint's host is an IP address, which cannot have a bucket's name in
    front of it.
    """
    try:
        ip_address(urlsplit(endpoint).hostname or "")
    except ValueError:
        return False
    return True


def _style(client: Boto3Client) -> str:
    return str((getattr(client.meta.config, "s3", None) or {}).get("addressing_style", "auto"))


def _trusting(verified_by: object) -> TlsConnectionOptions:
    """Return options that trust the certificates of a file, or those that come with boto3."""
    path = str(get_cert_path(verified_by))  # type: ignore[arg-type]  # it takes a path as well
    options = TlsContextOptions()
    try:
        options.override_default_trust_store(Path(path).read_bytes())
    except OSError as error:
        raise SettingsError(
            f"{CA_BUNDLE} names {path}, which cannot be read: {error.strerror}"
        ) from error
    return ClientTlsContext(options).new_connection_options()


def _in_lower_case(headers: list[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in headers:
        # awscrt decodes UTF-8; botocore, which reads the same headers by HEAD, ISO 8859-1 (RFC
        # 9112, appendix).
        text = value if value.isascii() else value.encode().decode("iso-8859-1")
        lower = name.lower()
        found[lower] = f"{found[lower]}, {text}" if lower in found else text
    return found
