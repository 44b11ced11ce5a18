"""GETs of exactly one identity: by obstore where it takes the key as it is, by boto3 otherwise, and after obstore failed.

obstore costs a tenth of boto3 and its errors carry no code of S3's, so that a failed GET is asked again by boto3: the answer
says what is wrong, or there is none any more. Both give the same bytes and the same headers.
Source: GetObject and HeadObject in the Amazon S3 API Reference; obstore 0.12's parsing of paths, tried on a server.
"""

import base64
import binascii
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import obstore
from botocore.exceptions import ClientError
from obstore.exceptions import BaseError, PreconditionError
from obstore.store import S3Store

from caf_pipeline.inventory.snapshot import S3Object, SkipReason
from caf_pipeline.source.protocol import Checksum, ObjectHeaders, ObjectPart
from caf_pipeline.source.s3.errors import (
    ASKING_FAILED,
    Asking,
    BucketAddress,
    WrongBody,
    concerns_all,
    is_transient,
    object_error,
    unavailable,
)

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from obstore import GetOptions, GetResult

FULL_OBJECT: Final = "FULL_OBJECT"

_CHECKSUMS: Final[dict[str, str]] = {
    "SHA256": "ChecksumSHA256",
    "SHA1": "ChecksumSHA1",
    "CRC32": "ChecksumCRC32",
    "CRC32C": "ChecksumCRC32C",
    "CRC64NVME": "ChecksumCRC64NVME",
}
"""S3's name of an algorithm, and of the field that has its value."""

_HEADERS: Final[dict[str, tuple[str, str]]] = {
    "content_type": ("Content-Type", "ContentType"),
    "content_encoding": ("Content-Encoding", "ContentEncoding"),
    "content_language": ("Content-Language", "ContentLanguage"),
    "content_disposition": ("Content-Disposition", "ContentDisposition"),
    "cache_control": ("Cache-Control", "CacheControl"),
}
"""Our name of a header, obstore's and boto3's. obstore does not tell Expires, so that it is not kept for any object."""

_NOT_METADATA: Final = frozenset({"Storage-Class", *(theirs for theirs, _ in _HEADERS.values())})
"""obstore gives headers and user metadata in one dict; the latter's names are in lower case."""

STALLED_SECONDS: Final = 20.0
"""Without the end of any GET of the source, it is said that an answer is waited for: one part takes long on a slow line."""

_OBSTORE_FAILED: Final = (BaseError, OSError, ValueError)


def is_bent(key: bytes) -> bool:
    """Tell whether obstore would ask for another key than this, or refuse it.

    It drops a slash at either end, and refuses empty, `.` and `..` segments and ASCII control characters.
    """
    return any(segment in (b"", b".", b"..") for segment in key.split(b"/")) or any(byte < 0x20 or byte == 0x7F for byte in key)


@dataclass(frozen=True)
class ObjectReader:
    """How objects of one source are read.

    Attributes:
        asking: of one GET by boto3, after that of obstore.
        extra: parameters of every request of boto3, e.g. who pays.
    """

    client: "S3Client"
    store: S3Store
    asking: Asking
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def at(self) -> BucketAddress:
        """Where it is."""
        return self.asking.at

    def part(self, obj: S3Object, start_byte: int, end_byte: int) -> ObjectPart:
        """See `ObjectSource.read`; the key is text."""
        with self.asking.waiting(STALLED_SECONDS) as wait:
            part = self._part(obj, start_byte, end_byte)
            wait.moved()
            return part

    def _part(self, obj: S3Object, start_byte: int, end_byte: int) -> ObjectPart:
        part = None if is_bent(obj.key) else self._by_obstore(obj, start_byte, end_byte)
        if part is not None:
            return part
        try:
            return self.asking.attempt(lambda: self._by_boto3(obj, start_byte, end_byte))
        except ASKING_FAILED as error:
            raise object_error(error, self.at, obj.key) from error

    def _by_obstore(self, obj: S3Object, start_byte: int, end_byte: int) -> ObjectPart | None:
        """Return the part, or None where boto3 is to read it."""
        options: GetOptions = {"if_match": _quoted(obj.etag)} if obj.version_id is None else {"version": obj.version_id}
        if end_byte - start_byte < obj.size_bytes:
            options["range"] = (start_byte, end_byte)
        try:
            result = obstore.get(self.store, obj.key.decode(), options=options)
            body = result.bytes()
        except PreconditionError as error:
            raise unavailable(SkipReason.CHANGED, self.at, obj.key) from error
        except _OBSTORE_FAILED:
            return None
        if len(body) != end_byte - start_byte or result.meta["size"] != obj.size_bytes:
            return None
        # obstore follows redirects to whichever host and cannot be told not to; boto3 does not follow them.
        if result.meta["e_tag"] != _quoted(obj.etag):
            return None
        return ObjectPart(body, _headers_of_obstore(result))

    def _by_boto3(self, obj: S3Object, start_byte: int, end_byte: int) -> ObjectPart:
        whole = end_byte - start_byte == obj.size_bytes
        asked: dict[str, Any] = {} if whole else {"Range": f"bytes={start_byte}-{end_byte - 1}"}
        answer: Any = self.client.get_object(**self._identity(obj), **asked)
        with closing(answer["Body"]) as stream:  # the body's own context gives a stream whose errors are not botocore's
            body: bytes = stream.read()
        size_bytes = len(body) if whole else _size_of_range(answer)
        if len(body) != end_byte - start_byte or size_bytes != obj.size_bytes:
            raise WrongBody(
                f"{len(body)} bytes of {size_bytes} came where {end_byte - start_byte} of {obj.size_bytes} were promised"
            )
        etag = answer.get("ETag")
        if etag not in (None, _quoted(obj.etag), obj.etag):
            raise WrongBody(f"the bytes of ETag {etag} came where those of {_quoted(obj.etag)} were asked for")
        return ObjectPart(body, _headers_of_boto3(answer))

    def read_headers(self, obj: S3Object) -> ObjectHeaders:
        """See `ObjectSource.read_headers`; the key is text."""
        answer = self._head(obj)
        if isinstance(answer, ClientError):
            raise object_error(answer, self.at, obj.key) from answer
        # To the second: HTTP tells no less of a time, and a listing may.
        if answer["LastModified"].replace(microsecond=0) != obj.last_modified.replace(microsecond=0):
            raise unavailable(SkipReason.CHANGED, self.at, obj.key)
        return _headers_of_boto3(answer)

    def _head(self, obj: S3Object, **more: Any) -> Any:  # noqa: ANN401 - botocore's calls and answers are made at run time
        """Return the answer to a HEAD, or what refuses it while the object itself can be read."""
        try:
            return self.asking.attempt(lambda: self.client.head_object(**self._identity(obj), **more))
        except ASKING_FAILED as error:
            if not isinstance(error, ClientError) or is_transient(error) or concerns_all(error, self.at):
                raise object_error(error, self.at, obj.key) from error
            # The answer to a HEAD has no body and so no code: a GET says what is wrong, or that only the HEAD is.
            self.part(obj, 0, min(1, obj.size_bytes))
            return error

    def _identity(self, obj: S3Object) -> dict[str, Any]:
        pinned = {"IfMatch": _quoted(obj.etag)} if obj.version_id is None else {"VersionId": obj.version_id}
        return {"Bucket": self.at.bucket, "Key": obj.key.decode(), **pinned, **self.extra}

    def checksum(self, obj: S3Object) -> Checksum | None:
        """See `ObjectSource.full_object_checksum`; the key is text."""
        algorithm, _, kind = obj.checksum.partition("/")
        if algorithm not in _CHECKSUMS or kind not in ("", FULL_OBJECT):
            return None
        answer = self._head(obj, ChecksumMode="ENABLED")
        if isinstance(answer, ClientError):
            return None
        value = answer.get(_CHECKSUMS[algorithm], "")
        if answer.get("ChecksumType", FULL_OBJECT) != FULL_OBJECT or "-" in value:
            return None  # of the parts' checksums, and not of the bytes
        return _decoded(algorithm, value)


def _decoded(algorithm: str, value: str) -> Checksum | None:
    try:
        digest = base64.b64decode(value, validate=True)
    except binascii.Error:
        return None  # nothing that bytes could be compared with
    return Checksum(algorithm.lower(), digest) if digest else None


def _quoted(etag: str) -> str:
    return f'"{etag}"'


def _size_of_range(answer: Mapping[str, Any]) -> int:
    """Return the object's whole size as the answer to a ranged GET has it; -1 where it has none."""
    total = str(answer.get("ContentRange", "")).rpartition("/")[2]
    return int(total) if total.isdecimal() else -1


def _headers_of_obstore(result: "GetResult") -> ObjectHeaders:
    found = result.attributes
    return ObjectHeaders(
        **{ours: found.get(theirs, "") for ours, (theirs, _) in _HEADERS.items()},
        user_metadata={name: value for name, value in sorted(found.items()) if name not in _NOT_METADATA},
    )


def _headers_of_boto3(answer: Mapping[str, Any]) -> ObjectHeaders:
    return ObjectHeaders(
        **{ours: answer.get(theirs, "") for ours, (_, theirs) in _HEADERS.items()},
        user_metadata={name.lower(): value for name, value in sorted(answer.get("Metadata", {}).items())},
    )
