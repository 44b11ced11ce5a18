"""`ObjectTarget` on S3: a bucket that objects are restored to.

S3 compares an object's SHA-256, and that its key is free, before the object appears. Source:
"Checking object integrity" and "Conditional writes" in the Amazon S3 User Guide.
"""

import base64
import binascii
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

from botocore.exceptions import ClientError, ParamValidationError
from pydantic import ValidationError

from caf_pipeline.errors import CafError, SourceDenied, SourceError, UsageError
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.settings import SourceSettings
from caf_pipeline.source.protocol import ExistingObject, KeyTaken
from caf_pipeline.source.s3.client_type import S3Client
from caf_pipeline.source.s3.clients import (
    ENDPOINT_VARIABLES,
    address_error,
    build_client,
    endpoint_of_environment,
)
from caf_pipeline.source.s3.errors import (
    REQUEST_ERRORS,
    BucketAddress,
    RequestPolicy,
    WrongBody,
    code_of,
    concerns_source,
    is_transient,
    missing_bucket,
    source_error,
    status_of,
)
from caf_pipeline.source.s3.get import FULL_OBJECT, headers_of
from caf_pipeline.system.files_below import NotRestored
from caf_pipeline.waits import Waits

ATTEMPTS: Final = 6

PART_BYTES: Final = 8 << 20
"""Two are in memory, and S3 requires at least 5 MiB."""

MAX_PARTS: Final = 10_000
""""Amazon S3 multipart upload limits" in the Amazon S3 User Guide."""

MAX_KEY_BYTES: Final = 1024

MAX_PAGES: Final = 8
"""Beyond that, a HEAD for each object costs less."""

_READ_BYTES: Final = 1 << 20
_ALGORITHM: Final = {"ChecksumAlgorithm": "SHA256"}  # some servers keep no checksum without it
_LISTING_REFUSED: Final = (400, 403, 501)
_IN_COLD_STORAGE: Final = "InvalidObjectState"
_KEY_TAKEN: Final = (409, 412)  # a concurrent write of the key; an existing object
_PARAMETERS: Final = {
    "content_type": "ContentType",
    "content_encoding": "ContentEncoding",
    "content_language": "ContentLanguage",
    "content_disposition": "ContentDisposition",
    "cache_control": "CacheControl",
    "expires": "Expires",
}

T = TypeVar("T")

_ENDPOINT_FROM: Final = f"--endpoint-url (of the job: `endpoint_url`), {ENDPOINT_VARIABLES}"
_PROFILE: Final = "--profile (of the job: `profile`)"


@dataclass(frozen=True, slots=True)
class TargetAddress(BucketAddress):
    """Its hints name options, job config and AWS variables."""

    def setting(self, name: str) -> str:
        options = {
            "endpoint_url": _ENDPOINT_FROM,
            "region": "AWS_DEFAULT_REGION",
            "profile": _PROFILE,
        }
        return options.get(name, f"s3://{self.bucket}")

    @property
    def credentials_hint(self) -> str:
        return f"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile with {_PROFILE}"

    def key_hint(self, name: str) -> str:
        return f"AWS_{name}, or else the profile"


class BucketTarget:
    """See `ObjectTarget`."""

    def __init__(
        self, client: S3Client, bucket: str, prefix: str = "", waits: Waits | None = None
    ) -> None:
        """Take ownership of a client that does not retry."""
        self._client: Any = client  # the stubs reject arguments that are built as mappings
        self._bucket = bucket
        self._prefix = prefix
        self._at = TargetAddress("", bucket, client.meta.endpoint_url)
        self._policy = RequestPolicy(self._at, ATTEMPTS, waits or Waits())
        self._has_bucket = False
        for name in ("PutObject", "CreateMultipartUpload"):
            client.meta.events.register_first(f"before-parameter-build.s3.{name}", _hide_headers)
            client.meta.events.register(f"before-call.s3.{name}", _add_headers)

    def place(self, key: str) -> str:
        return self._at.of(self._named(key)["Key"].encode())

    def keys_between(self, first: str, last: str) -> Collection[str] | None:
        after, until = self._prefix + first, (self._prefix + last).encode()
        keys: list[str] = []
        for _ in range(MAX_PAGES):
            try:
                parameters = {"Bucket": self._bucket, "Prefix": self._prefix, "StartAfter": after}
                page = self._policy.attempt(partial(self._client.list_objects_v2, **parameters))
            except REQUEST_ERRORS as error:
                if (
                    isinstance(error, ClientError)
                    and status_of(error) in _LISTING_REFUSED
                    and not concerns_source(error, self._at)
                ):
                    return None
                self._refuse(error, first, "read")
            self._has_bucket = True
            for key in (entry["Key"] for entry in page.get("Contents", ())):
                if key.encode() <= after.encode():
                    return None
                after = key
                if key.encode() <= until:
                    keys.append(key.removeprefix(self._prefix))
            if page.get("IsTruncated") is False or after.encode() >= until:
                return frozenset(keys)
            if "IsTruncated" not in page:
                return None
        return None

    def find(self, key: str) -> ExistingObject | None:
        try:
            answer = self._policy.attempt(
                lambda: self._client.head_object(**self._named(key), ChecksumMode="ENABLED")
            )
        except REQUEST_ERRORS as error:
            if (
                isinstance(error, ClientError)
                and status_of(error) == 404
                and not concerns_source(error, self._at)
            ):
                self._require_bucket(key)
                return None
            self._refuse(error, key, "read")
        sha256 = None
        if answer.get("ChecksumType", FULL_OBJECT) == FULL_OBJECT:
            with suppress(binascii.Error):
                digest = base64.b64decode(answer.get("ChecksumSHA256", ""), validate=True)
                sha256 = digest if len(digest) == hashlib.sha256().digest_size else None
        return ExistingObject(
            answer.get("ContentLength"), answer.get("ETag", ""), headers_of(answer), sha256
        )

    def read(self, key: str, existing: ExistingObject) -> Iterator[bytes]:
        """If a body breaks off, request the rest."""
        body: Any = None
        position = 0

        def open_body() -> Any:  # noqa: ANN401
            rest = {"Range": f"bytes={position}-"} if position else {}
            condition = {"IfMatch": existing.etag} if existing.etag else {}
            answer = self._client.get_object(**self._named(key), **condition, **rest)
            if rest and not answer.get("ContentRange", "").startswith(f"bytes {position}-"):
                answer["Body"].close()
                raise WrongBody(f"does not return the object from byte {position} on")
            return answer["Body"]

        def next_piece() -> bytes:
            nonlocal body
            try:
                body = body or open_body()
                return bytes(body.read(_READ_BYTES))
            except REQUEST_ERRORS:
                if body:
                    body.close()
                body = None
                raise

        try:
            while piece := self._policy.attempt(next_piece):
                position += len(piece)
                yield piece
        except REQUEST_ERRORS as error:
            self._refuse(error, key, "read")
        finally:
            if body:
                body.close()

    def put(
        self, key: str, body: bytes, sha256: bytes, headers: ObjectHeaders, *, replace: bool
    ) -> bool:
        checksum = _base64(sha256)
        answer = self._write(
            key,
            lambda: self._client.put_object(
                **self._named(key),
                **_parameters(headers, self.place(key)),
                **_condition(replace),
                Body=body,
                **_ALGORITHM,
                ChecksumSHA256=checksum,
            ),
        )
        return bool(answer.get("ChecksumSHA256") == checksum)

    def upload(self, key: str, size_bytes: int, headers: ObjectHeaders) -> "PartsUpload":
        answer = self._write(
            key,
            lambda: self._client.create_multipart_upload(
                **self._named(key), **_parameters(headers, self.place(key)), **_ALGORITHM
            ),
        )
        if "UploadId" not in answer:
            raise self._takes_no_parts("begins an upload without an id")
        named = {**self._named(key), "UploadId": answer["UploadId"]}
        return PartsUpload(
            self._client,
            named,
            part_bytes(size_bytes),
            lambda call: self._write(key, call),
            self._takes_no_parts,
        )

    def close(self) -> None:
        self._client.close()

    def _takes_no_parts(self, answer: str) -> SourceError:
        return SourceError(
            f"bucket '{self._bucket}' takes no object in parts: the server {answer}",
            hint="check the server, or a proxy in front of it",
        )

    def _named(self, key: str) -> dict[str, str]:
        whole = self._prefix + key
        if len(whole.encode()) > MAX_KEY_BYTES:
            raise NotRestored(
                f"{key!r} was not written: with the target's prefix, the key is longer than "
                "1,024 bytes"
            )
        return {"Bucket": self._bucket, "Key": whole}

    def _require_bucket(self, key: str) -> None:
        """Raise BucketMissing; a HEAD of an object is 404, too."""
        if self._has_bucket:
            return
        try:
            self._policy.attempt(lambda: self._client.head_bucket(Bucket=self._bucket))
        except REQUEST_ERRORS as error:
            if isinstance(error, ClientError) and status_of(error) == 403:
                return  # the credentials may be able to write objects all the same
            self._refuse(error, key, "read")
        self._has_bucket = True

    def _write(self, key: str, call: Callable[[], T]) -> T:
        try:
            return self._policy.attempt(call)
        except REQUEST_ERRORS as error:
            if isinstance(error, ClientError) and (
                status_of(error) in _KEY_TAKEN or code_of(error) == "NoSuchUpload"
            ):
                raise KeyTaken from error  # NoSuchUpload: the retry of a request that succeeded
            self._refuse(error, key, "written")

    def _refuse(self, error: Exception, key: str, done: str) -> NoReturn:
        named = (self._prefix + key).encode()
        if (
            self._has_bucket
            and isinstance(error, ClientError)
            and status_of(error) == 404
            and not concerns_source(error, self._at)
        ):
            # The key alone is refused, e.g. by a server that does not support a line feed in it.
            raise NotRestored(
                f"{self._at.of(named)} was not {done}: the server answers {code_of(error)}"
            ) from error
        raise _translated(error, self._at, named, done) from error


@dataclass(frozen=True, slots=True)
class PartsMark:
    """The parts sent, and the bytes after them."""

    parts: int
    buffered: bytes


class PartsUpload:
    """Sends one part while the next is filled. Not safe to call from several threads."""

    def __init__(
        self,
        client: Any,  # noqa: ANN401
        parameters: Mapping[str, str],
        part_bytes: int,
        write: Callable[[Callable[[], Any]], Any],
        takes_no_parts: Callable[[str], SourceError],
    ) -> None:
        self._client = client
        self._parameters = parameters
        self._part_bytes = part_bytes
        self._write = write
        self._takes_no_parts = takes_no_parts
        self._parts: list[dict[str, Any]] = []
        self._buffer = bytearray()
        self._thread = ThreadPoolExecutor(1, "part")
        self._sending: Future[dict[str, Any]] | None = None
        self._checked = True

    def write(self, piece: bytes) -> None:
        self._buffer += piece
        while len(self._buffer) >= self._part_bytes:
            self._send(bytes(self._buffer[: self._part_bytes]))
            del self._buffer[: self._part_bytes]

    def mark(self) -> PartsMark:
        self._take_sent()
        return PartsMark(len(self._parts), bytes(self._buffer))

    def rewind(self, mark: object) -> None:
        """A new part replaces an earlier part with its number."""
        self._take_sent()
        assert isinstance(mark, PartsMark)
        del self._parts[mark.parts :]
        self._buffer = bytearray(mark.buffered)

    def complete(self, *, replace: bool) -> bool:
        if self._buffer or not (self._parts or self._sending):
            self._send(bytes(self._buffer))
        self._take_sent()
        self._write(
            lambda: self._client.complete_multipart_upload(
                **self._parameters, **_condition(replace), MultipartUpload={"Parts": self._parts}
            )
        )
        self._thread.shutdown()
        return self._checked

    def abort(self) -> None:
        self._thread.shutdown()
        with suppress(CafError, KeyTaken):
            self._write(lambda: self._client.abort_multipart_upload(**self._parameters))

    def _send(self, body: bytes) -> None:
        self._take_sent()
        number, checksum = len(self._parts) + 1, _base64(hashlib.sha256(body).digest())

        def send() -> dict[str, Any]:
            answer = self._write(
                lambda: self._client.upload_part(
                    **self._parameters,
                    PartNumber=number,
                    Body=body,
                    **_ALGORITHM,
                    ChecksumSHA256=checksum,
                )
            )
            self._checked = self._checked and answer.get("ChecksumSHA256") == checksum
            if "ETag" not in answer:  # needed to complete the upload
                raise self._takes_no_parts("answers a part without an ETag")
            return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": checksum}

        self._sending = self._thread.submit(send)

    def _take_sent(self) -> None:
        if self._sending:
            sending, self._sending = self._sending, None
            self._parts.append(sending.result())


def open_bucket_target(
    address: str, *, profile: str, endpoint_url: str, waits: Waits
) -> BucketTarget:
    """Return the target at `s3://BUCKET/PREFIX`, with `/` appended to the prefix if missing.

    Endpoint, region and credentials are those of the AWS tools. Sends no request. Raises UsageError
    and SettingsError.
    """
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    try:
        settings = SourceSettings(
            bucket=bucket, endpoint_url=endpoint_url or endpoint_of_environment(), profile=profile
        )
        prefix.encode()
    except ValidationError as error:
        hint = "give s3://BUCKET or s3://BUCKET/PREFIX"
        raise address_error(
            error, f"{address!r} cannot be restored to", hint=hint, endpoint_from=_ENDPOINT_FROM
        ) from error
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{address!r} cannot be restored to: its prefix is not UTF-8",
            hint="give a prefix in UTF-8",
        ) from error
    client = build_client(settings, profile_from=f"{_PROFILE} or AWS_PROFILE")
    return BucketTarget(
        client, bucket, f"{prefix}/" if prefix and not prefix.endswith("/") else prefix, waits
    )


def part_bytes(size_bytes: int) -> int:
    """Return the part size for an object of this size."""
    return max(PART_BYTES, -(-size_bytes // MAX_PARTS))


def _translated(error: Exception, at: BucketAddress, key: bytes, done: str) -> CafError:
    if isinstance(error, ParamValidationError):
        return NotRestored(f"{at.of(key)} was not written: {str(error).splitlines()[-1]}")
    if not isinstance(error, ClientError) or concerns_source(error, at) or is_transient(error):
        return source_error(error, at)
    status = status_of(error)
    answer = f"{code_of(error)} (HTTP status {status})"
    if status == 403 and code_of(error) != _IN_COLD_STORAGE:
        return SourceDenied(
            f"{at.of(key)} may not be {done} with these credentials: {answer}",
            hint=f"grant s3:ListBucket, s3:GetObject and s3:PutObject on '{at.bucket}', or check "
            "the credentials",
        )
    if status == 404 and code_of(error) != "NoSuchKey":
        return missing_bucket(at)
    if 400 <= status < 500:
        return NotRestored(f"{at.of(key)} was not {done}: the server answers {answer}")
    return SourceError(
        f"{at} takes no more: the server answers {answer}",
        hint="repair the server, then run the same command again",
    )


def _parameters(headers: ObjectHeaders, place: str) -> dict[str, Any]:
    parameters = {
        parameter: _sent(parameter, getattr(headers, name), place)
        for name, parameter in _PARAMETERS.items()
    }
    metadata = {
        name: _sent(f"x-amz-meta-{name}", value, place)
        for name, value in headers.user_metadata.items()
    }
    return {name: value for name, value in parameters.items() if value} | {"Metadata": metadata}


def _sent(name: str, value: str, place: str) -> str:
    """botocore reads headers as ISO 8859-1, and sends them as UTF-8."""
    try:
        return value if value.isascii() else value.encode("iso-8859-1").decode()
    except UnicodeError as error:
        raise NotRestored(
            f"{place} was not written: its {name} {value!r} is not UTF-8, and cannot be sent"
        ) from error


def _hide_headers(params: dict[str, Any], context: dict[str, Any], **_: object) -> None:
    """botocore accepts only times and ASCII."""
    metadata = params.get("Metadata", {})
    not_ascii = [name for name, value in metadata.items() if not value.isascii()]
    context["caf_own"] = {f"x-amz-meta-{name}": metadata.pop(name) for name in not_ascii}
    if expires := params.pop("Expires", ""):
        context["caf_own"]["Expires"] = expires


def _add_headers(params: dict[str, Any], context: dict[str, Any], **_: object) -> None:
    for name, value in context.get("caf_own", {}).items():
        params["headers"][name] = value


def _condition(replace: bool) -> dict[str, str]:
    return {} if replace else {"IfNoneMatch": "*"}


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
