"""`ObjectTarget` on S3: a bucket that objects are restored to.

An object is written with its SHA-256, which S3 compares before the object appears, and on the
condition that no other object has its key. Source: "Checking object integrity" and "Conditional
writes" in the Amazon S3 User Guide.
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
    build_client,
    endpoint_of_environment,
    unusable,
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
"""Of one request, as by default of those to a source."""

PART_BYTES: Final = 8 << 20
"""Of an object that is written in parts: two are in memory, and S3 takes at least 5 MiB."""

MAX_PARTS: Final = 10_000
"""Of one object: "Amazon S3 multipart upload limits"."""

MAX_KEY_BYTES: Final = 1024

MAX_PAGES: Final = 8
"""Of 1,000 keys, listed to learn which of some thousand are there: then a HEAD of each costs
less.
"""

_READ_BYTES: Final = 1 << 20
_ALGORITHM: Final = {
    "ChecksumAlgorithm": "SHA256"
}  # some servers keep a checksum only where this names it, too
_NOT_TOLD: Final = (400, 403, 501)
_IN_COLD_STORAGE: Final = "InvalidObjectState"
_TAKEN: Final = (409, 412)  # a write of the same key was under way; there is an object
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
    """A bucket to restore to: its hints name options of `caf restore`, config of the job and
    variables of AWS, not settings.
    """

    def setting(self, name: str) -> str:
        """Return which option or variable sets this."""
        given = {
            "endpoint_url": _ENDPOINT_FROM,
            "region": "AWS_DEFAULT_REGION",
            "profile": _PROFILE,
        }
        return given.get(name, f"s3://{self.bucket}")

    @property
    def credentials_hint(self) -> str:
        """Where credentials come from."""
        return f"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile with {_PROFILE}"

    def key_hint(self, name: str) -> str:
        """Return where half a pair of keys comes from."""
        return f"AWS_{name}, or where that is not set the profile's"


class BucketTarget:
    """A bucket and a key prefix that objects are restored to.

    Safe for several threads, as its client is.
    """

    def __init__(
        self, client: S3Client, bucket: str, prefix: str = "", waits: Waits | None = None
    ) -> None:
        """Take a client of its own, with no retries."""
        self._client: Any = client  # its methods take what is put together here by name
        self._bucket = bucket
        self._prefix = prefix
        self._at = TargetAddress("", bucket, client.meta.endpoint_url)
        self._asking = RequestPolicy(self._at, ATTEMPTS, waits or Waits())
        self._has_bucket = False
        for name in ("PutObject", "CreateMultipartUpload"):
            client.meta.events.register_first(f"before-parameter-build.s3.{name}", _take_own)
            client.meta.events.register(f"before-call.s3.{name}", _give_own)

    def place(self, key: str) -> str:
        """See `ObjectTarget.place`."""
        return self._at.of(self._named(key)["Key"].encode())

    def keys_between(self, first: str, last: str) -> Collection[str] | None:
        """See `ObjectTarget.keys_between`."""
        after, until = self._prefix + first, (self._prefix + last).encode()
        found: list[str] = []
        for _ in range(MAX_PAGES):
            try:
                asked = {"Bucket": self._bucket, "Prefix": self._prefix, "StartAfter": after}
                page = self._asking.attempt(partial(self._client.list_objects_v2, **asked))
            except REQUEST_ERRORS as error:
                if (
                    isinstance(error, ClientError)
                    and status_of(error) in _NOT_TOLD
                    and not concerns_source(error, self._at)
                ):
                    return None
                self._refuse(error, first, "read")
            self._has_bucket = True
            for key in (one["Key"] for one in page.get("Contents", ())):
                if key.encode() <= after.encode():
                    return None
                after = key
                if key.encode() <= until:
                    found.append(key.removeprefix(self._prefix))
            if page.get("IsTruncated") is False or after.encode() >= until:
                return frozenset(found)
            if "IsTruncated" not in page:
                return None
        return None

    def find(self, key: str) -> ExistingObject | None:
        """See `ObjectTarget.find`."""
        try:
            answer = self._asking.attempt(
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
        whole = answer.get("ChecksumType", FULL_OBJECT) == FULL_OBJECT
        sha256 = _digest(answer.get("ChecksumSHA256", "")) if whole else None
        return ExistingObject(
            answer.get("ContentLength"), answer.get("ETag", ""), headers_of(answer), sha256
        )

    def read(self, key: str, there: ExistingObject) -> Iterator[bytes]:
        """See `ObjectTarget.read`. Where a body breaks off, the rest is asked for."""
        body: Any = None
        position = 0

        def begun() -> Any:  # noqa: ANN401
            rest = {"Range": f"bytes={position}-"} if position else {}
            same = {"IfMatch": there.etag} if there.etag else {}
            answer = self._client.get_object(**self._named(key), **same, **rest)
            if rest and not answer.get("ContentRange", "").startswith(f"bytes {position}-"):
                answer["Body"].close()
                raise WrongBody(f"gives no rest of an object from byte {position} on")
            return answer["Body"]

        def next_piece() -> bytes:
            nonlocal body
            try:
                body = body or begun()
                return bytes(body.read(_READ_BYTES))
            except REQUEST_ERRORS:
                if body:
                    body.close()
                body = None
                raise

        try:
            while piece := self._asking.attempt(next_piece):
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
        """See `ObjectTarget.put`."""
        checksum = _encoded(sha256)
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
        """See `ObjectTarget.upload`."""
        answer = self._write(
            key,
            lambda: self._client.create_multipart_upload(
                **self._named(key), **_parameters(headers, self.place(key)), **_ALGORITHM
            ),
        )
        if "UploadId" not in answer:
            raise self._takes_no_parts("begins one without an id")
        named = {**self._named(key), "UploadId": answer["UploadId"]}
        return PartsUpload(
            self._client,
            named,
            part_bytes(size_bytes),
            lambda call: self._write(key, call),
            self._takes_no_parts,
        )

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def _takes_no_parts(self, found: str) -> SourceError:
        return SourceError(
            f"bucket '{self._bucket}' takes no object in parts: the server {found}",
            hint="look at the server, or at a proxy in front of it",
        )

    def _named(self, key: str) -> dict[str, str]:
        whole = self._prefix + key
        if len(whole.encode()) > MAX_KEY_BYTES:
            raise NotRestored(
                f"{key!r} was not written: with what its key begins with there, it is longer than "
                "1,024 bytes"
            )
        return {"Bucket": self._bucket, "Key": whole}

    def _require_bucket(self, key: str) -> None:
        """Raise BucketMissing where there is no bucket: a HEAD of an object says 404 of both."""
        if self._has_bucket:
            return
        try:
            self._asking.attempt(lambda: self._client.head_bucket(Bucket=self._bucket))
        except REQUEST_ERRORS as error:
            if isinstance(error, ClientError) and status_of(error) == 403:
                # the listing of a bucket may be forbidden, and the write of an object allowed
                return
            self._refuse(error, key, "read")
        self._has_bucket = True

    def _write(self, key: str, call: Callable[[], T]) -> T:
        try:
            return self._asking.attempt(call)
        except REQUEST_ERRORS as error:
            if isinstance(error, ClientError) and (
                status_of(error) in _TAKEN or code_of(error) == "NoSuchUpload"
            ):
                raise KeyTaken from error  # the last is what the second answer to one request says
            self._refuse(error, key, "written")

    def _refuse(self, error: Exception, key: str, done: str) -> NoReturn:
        named = (self._prefix + key).encode()
        if (
            self._has_bucket
            and isinstance(error, ClientError)
            and status_of(error) == 404
            and not concerns_source(error, self._at)
        ):
            # Of this key alone, as from a server that does not take a line feed in it.
            raise NotRestored(
                f"{self._at.of(named)} was not {done}: the server answers {code_of(error)}"
            ) from error
        raise _translated(error, self._at, named, done) from error


@dataclass(frozen=True, slots=True)
class PartsMark:
    """Where an upload is: how many parts were sent, and the bytes behind them."""

    parts: int
    filled: bytes


class PartsUpload:
    """See `ObjectUpload`: an upload in parts, of which one is sent while the next one is filled.

    Not for several threads.
    """

    def __init__(
        self,
        client: Any,  # noqa: ANN401
        named: Mapping[str, str],
        size_bytes: int,
        write: Callable[[Callable[[], Any]], Any],
        takes_none: Callable[[str], SourceError],
    ) -> None:
        """Take the upload that was begun, the size of its parts, what asks and translates, and what
        an answer that is none is.
        """
        self._client = client
        self._named = named
        self._part_bytes = size_bytes
        self._write = write
        self._takes_none = takes_none
        self._parts: list[dict[str, Any]] = []
        self._filled = bytearray()
        self._thread = ThreadPoolExecutor(1, "part")
        self._sending: Future[dict[str, Any]] | None = None
        self._checked = True

    def write(self, piece: bytes) -> None:
        """See `ObjectUpload.write`."""
        self._filled += piece
        while len(self._filled) >= self._part_bytes:
            self._send(bytes(self._filled[: self._part_bytes]))
            del self._filled[: self._part_bytes]

    def mark(self) -> PartsMark:
        """See `ObjectUpload.mark`."""
        self._take_sent()
        return PartsMark(len(self._parts), bytes(self._filled))

    def rewind(self, mark: object) -> None:
        """See `ObjectUpload.rewind`. A part that is sent again replaces the one of its number."""
        self._take_sent()
        assert isinstance(mark, PartsMark)
        del self._parts[mark.parts :]
        self._filled = bytearray(mark.filled)

    def complete(self, *, replace: bool) -> bool:
        """See `ObjectUpload.complete`."""
        if self._filled or not (self._parts or self._sending):
            self._send(bytes(self._filled))
        self._take_sent()
        self._write(
            lambda: self._client.complete_multipart_upload(
                **self._named, **_condition(replace), MultipartUpload={"Parts": self._parts}
            )
        )
        self._thread.shutdown()
        return self._checked

    def abort(self) -> None:
        """See `ObjectUpload.abort`."""
        self._thread.shutdown()
        with suppress(CafError, KeyTaken):
            self._write(lambda: self._client.abort_multipart_upload(**self._named))

    def _send(self, body: bytes) -> None:
        self._take_sent()
        number, checksum = len(self._parts) + 1, _encoded(hashlib.sha256(body).digest())

        def send() -> dict[str, Any]:
            answer = self._write(
                lambda: self._client.upload_part(
                    **self._named,
                    PartNumber=number,
                    Body=body,
                    **_ALGORITHM,
                    ChecksumSHA256=checksum,
                )
            )
            self._checked = self._checked and answer.get("ChecksumSHA256") == checksum
            if "ETag" not in answer:  # by which the parts are put together
                raise self._takes_none("answers a part without an ETag")
            return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": checksum}

        self._sending = self._thread.submit(send)

    def _take_sent(self) -> None:
        if self._sending:
            sending, self._sending = self._sending, None
            self._parts.append(sending.result())


def open_bucket_target(
    address: str, *, profile: str, endpoint_url: str, waits: Waits
) -> BucketTarget:
    """Return the target of an address `s3://BUCKET/PREFIX`; `/` is put behind a prefix that does
    not end so.

    Endpoint, region and credentials are looked for where the AWS tools do. Nothing is asked of the
    network.

    Raises: UsageError: the address names no bucket, or an option is of no use. SettingsError: the
        environment is of no use.
    """
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    try:
        settings = SourceSettings(
            bucket=bucket, endpoint_url=endpoint_url or endpoint_of_environment(), profile=profile
        )
        prefix.encode()
    except ValidationError as error:
        hint = "give s3://BUCKET or s3://BUCKET/PREFIX"
        raise unusable(
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
    """Return the size of the parts of an object of so many bytes: S3 takes 10,000 of them."""
    return max(PART_BYTES, -(-size_bytes // MAX_PARTS))


def _translated(error: Exception, at: BucketAddress, key: bytes, done: str) -> CafError:
    """Return what a failure is to the user: NotRestored where it is this object's alone."""
    if isinstance(error, ParamValidationError):
        return NotRestored(f"{at.of(key)} was not written: {str(error).splitlines()[-1]}")
    if not isinstance(error, ClientError) or concerns_source(error, at) or is_transient(error):
        return source_error(error, at)
    said, status = f"{code_of(error)} (HTTP status {status_of(error)})", status_of(error)
    if status == 403 and code_of(error) != _IN_COLD_STORAGE:
        return SourceDenied(
            f"{at.of(key)} may not be {done} with these credentials: {said}",
            hint=f"grant s3:ListBucket, s3:GetObject and s3:PutObject on '{at.bucket}', or check "
            "the credentials",
        )
    if status == 404 and code_of(error) != "NoSuchKey":
        return missing_bucket(at)
    if 400 <= status < 500:
        return NotRestored(f"{at.of(key)} was not {done}: the server answers {said}")
    return SourceError(
        f"{at} takes no more: the server answers {said}",
        hint="mend the server, then run the same command again",
    )


def _parameters(headers: ObjectHeaders, place: str) -> dict[str, Any]:
    given = {
        parameter: _sent(parameter, getattr(headers, name), place)
        for name, parameter in _PARAMETERS.items()
    }
    metadata = {
        name: _sent(f"x-amz-meta-{name}", value, place)
        for name, value in headers.user_metadata.items()
    }
    return {name: value for name, value in given.items() if value} | {"Metadata": metadata}


def _sent(name: str, value: str, place: str) -> str:
    """Return the text of which botocore sends the bytes that the header had: it sends UTF-8, and
    reads ISO 8859-1.
    """
    try:
        return value if value.isascii() else value.encode("iso-8859-1").decode()
    except UnicodeError as error:
        raise NotRestored(
            f"{place} was not written: its {name} {value!r} is not UTF-8, and cannot be sent"
        ) from error


def _take_own(params: dict[str, Any], context: dict[str, Any], **_: object) -> None:
    """Keep from botocore the text of Expires, of which it takes times only, and user metadata in
    which it takes ASCII only.
    """
    metadata = params.get("Metadata", {})
    odd = [name for name, value in metadata.items() if not value.isascii()]
    context["caf_own"] = {f"x-amz-meta-{name}": metadata.pop(name) for name in odd}
    if expires := params.pop("Expires", ""):
        context["caf_own"]["Expires"] = expires


def _give_own(params: dict[str, Any], context: dict[str, Any], **_: object) -> None:
    for name, value in context.get("caf_own", {}).items():
        params["headers"][name] = value


def _condition(replace: bool) -> dict[str, str]:
    return {} if replace else {"IfNoneMatch": "*"}


def _encoded(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _digest(encoded: str) -> bytes | None:
    """Return the SHA-256 that S3 says, None where it says none of the whole object."""
    with suppress(binascii.Error):
        digest = base64.b64decode(encoded, validate=True)
        return digest if len(digest) == hashlib.sha256().digest_size else None
    return None
