"""GETs of exactly one identity, and HEADs where no body is wanted.

A GET brings S3's own checksum along where it is of the whole object and the listing named one, or
the source has reports, which need not name them; an object that is read in parts and has a named
one costs a HEAD for it. Source: GetObject and HeadObject in the Amazon S3 API Reference.
"""

import base64
import binascii
from collections.abc import Collection, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from botocore.exceptions import ClientError

from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.objects import CHECKSUMS, S3Object, SkipReason
from caf_pipeline.source.protocol import Checksum, ObjectHead, ObjectPart
from caf_pipeline.source.s3.client_type import S3Client
from caf_pipeline.source.s3.errors import (
    REQUEST_ERRORS,
    BucketAddress,
    RequestPolicy,
    WrongBody,
    concerns_source,
    is_transient,
    object_error,
    unavailable,
)
from caf_pipeline.source.s3.get_client import GetAnswer, GetClient, PendingGet, UnreadableHeader

FULL_OBJECT: Final = "FULL_OBJECT"

_ALGORITHMS: Final = frozenset(CHECKSUMS.values())

_KEPT: Final = (
    "content_type",
    "content_encoding",
    "content_language",
    "content_disposition",
    "cache_control",
    "expires",
)
"""The headers of `ObjectHeaders`, which are HTTP's with `_` for `-`."""

_METADATA: Final = "x-amz-meta-"

STALLED_SECONDS: Final = 20.0
"""Without the end of any GET of the source, it is said that an answer is waited for: one part takes
long on a slow line.
"""


@dataclass(frozen=True)
class S3ObjectReader:
    """How objects of one source are read.

    Attributes: client: of the HEADs. gets: of the GETs. asking: of one request. extra: parameters
        of every request of boto3, e.g. who pays. has_reports: whether an object of which no
        checksum is named may have one: a report need not have that column.
    """

    client: S3Client
    gets: GetClient
    asking: RequestPolicy
    extra: Mapping[str, Any] = field(default_factory=dict)
    has_reports: bool = False

    @property
    def at(self) -> BucketAddress:
        """Where it is."""
        return self.asking.at

    def part(self, obj: S3Object, start_byte: int, end_byte: int) -> ObjectPart:
        """See `ObjectSource.read`; the key is text."""
        with self.asking.waiting(STALLED_SECONDS) as wait:
            try:
                part = self.asking.retried(lambda: self._part(obj, start_byte, end_byte))
            except REQUEST_ERRORS as error:
                raise object_error(error, self.at, obj.key) from error
            wait.moved()
            return part

    def begin(self, obj: S3Object) -> "PendingPart | None":
        """See `ObjectSource.begin`; the key is text."""
        try:
            return PendingPart(self, obj, self._ask(obj, 0, obj.size_bytes))
        except REQUEST_ERRORS:
            return None

    def _part(self, obj: S3Object, start_byte: int, end_byte: int) -> ObjectPart:
        try:
            answer = self._ask(obj, start_byte, end_byte).answer()
        except UnreadableHeader:
            more: dict[str, Any] = (
                {}
                if _is_whole(obj, start_byte, end_byte)
                else {"Range": _range(start_byte, end_byte)}
            )
            given: Any = self.client.get_object(**self._identity(obj), **more)
            with closing(
                given["Body"]
            ) as stream:  # the body's own context gives a stream whose errors are not botocore's
                answer = GetAnswer(given["ResponseMetadata"]["HTTPHeaders"], stream.read())
        return self.checked(obj, start_byte, end_byte, answer)

    def _ask(self, obj: S3Object, start_byte: int, end_byte: int) -> PendingGet:
        headers = {"If-Match": _quoted(obj.etag)} if obj.version_id is None else {}
        if not _is_whole(obj, start_byte, end_byte):
            headers["Range"] = _range(start_byte, end_byte)
        elif self._algorithms(obj):
            headers["x-amz-checksum-mode"] = "ENABLED"
        return self.gets.begin(
            obj.key.decode(),
            version_id=_version(obj),
            headers=headers,
            size_bytes=end_byte - start_byte,
        )

    def checked(
        self, obj: S3Object, start_byte: int, end_byte: int, answer: GetAnswer
    ) -> ObjectPart:
        """Return the part that was asked for; raises WrongBody where the answer is of other
        bytes.
        """
        whole = _is_whole(obj, start_byte, end_byte)
        _require_bytes(obj, start_byte, end_byte, answer)
        found = (
            _checksum(algorithm, answer.headers)
            for algorithm in (self._algorithms(obj) if whole else ())
        )
        return ObjectPart(
            answer.body, _object_headers(answer.headers), next(filter(None, found), None)
        )

    def _algorithms(self, obj: S3Object) -> Collection[str]:
        """Return the algorithms of which the object may have a checksum over all of it."""
        if obj.checksum in CHECKSUMS:
            return (CHECKSUMS[obj.checksum],)
        return _ALGORITHMS if self.has_reports and not obj.checksum else ()

    def read_headers(self, obj: S3Object) -> ObjectHead:
        """See `ObjectSource.read_headers`; the key is text."""
        answer = self._head(obj, ChecksumMode="ENABLED")
        if isinstance(answer, ClientError):
            raise object_error(answer, self.at, obj.key) from answer
        # To the second: HTTP tells no less of a time, and a listing may.
        if answer["LastModified"].replace(microsecond=0) != obj.last_modified.replace(
            microsecond=0
        ):
            raise unavailable(SkipReason.CHANGED, self.at, obj.key)
        checksums = (
            _checksum(algorithm, answer["ResponseMetadata"]["HTTPHeaders"])
            for algorithm in _ALGORITHMS
        )
        return ObjectHead(
            headers_of(answer),
            {checksum.algorithm: checksum.digest for checksum in checksums if checksum},
        )

    def checksum(self, obj: S3Object) -> Checksum | None:
        """See `ObjectSource.full_object_checksum`; the key is text."""
        algorithm = CHECKSUMS.get(obj.checksum, "")
        answer = self._head(obj, ChecksumMode="ENABLED") if algorithm else None
        if answer is None or isinstance(answer, ClientError):
            return None
        return _checksum(algorithm, answer["ResponseMetadata"]["HTTPHeaders"])

    def _head(self, obj: S3Object, **more: Any) -> Any:  # noqa: ANN401 - botocore's calls and answers are made at run time
        """Return the answer to a HEAD, or what refuses it while the object itself can be read."""
        try:
            return self.asking.attempt(
                lambda: self.client.head_object(**self._identity(obj), **more)
            )
        except REQUEST_ERRORS as error:
            if (
                not isinstance(error, ClientError)
                or is_transient(error)
                or concerns_source(error, self.at)
            ):
                raise object_error(error, self.at, obj.key) from error
            # The answer to a HEAD has no body and so no code: a GET says what is wrong, or that
            # only the HEAD is.
            self.part(obj, 0, min(1, obj.size_bytes))
            return error

    def _identity(self, obj: S3Object) -> dict[str, Any]:
        pinned = {"IfMatch": _quoted(obj.etag)} if obj.version_id is None else {}
        if version := _version(obj):
            pinned["VersionId"] = version
        return {"Bucket": self.at.bucket, "Key": obj.key.decode(), **pinned, **self.extra}


@dataclass(frozen=True, slots=True)
class PendingPart:
    """See `PendingRead`."""

    reader: S3ObjectReader
    obj: S3Object
    get: PendingGet

    def has_failed(self) -> bool:
        """See `PendingRead.has_failed`."""
        return self.get.has_failed()

    def cancel(self) -> None:
        """See `PendingRead.cancel`."""
        self.get.cancel()

    def part(self) -> ObjectPart | None:
        """See `PendingRead.part`."""
        try:
            with nullcontext() if self.get.is_done else self.reader.asking.waiting(STALLED_SECONDS):
                return self.reader.checked(self.obj, 0, self.obj.size_bytes, self.get.answer())
        except (*REQUEST_ERRORS, UnreadableHeader):
            return None


def _version(obj: S3Object) -> str | None:
    """Return the version id to ask for: a key's version `null` is found without one only while it
    is the latest.
    """
    return obj.version_id if obj.version_id is not None or obj.is_latest else "null"


def _is_whole(obj: S3Object, start_byte: int, end_byte: int) -> bool:
    return end_byte - start_byte == obj.size_bytes


def _range(start_byte: int, end_byte: int) -> str:
    return f"bytes={start_byte}-{end_byte - 1}"


def _require_bytes(obj: S3Object, start_byte: int, end_byte: int, answer: GetAnswer) -> None:
    whole = _is_whole(obj, start_byte, end_byte)
    size_bytes = len(answer.body) if whole else _size_of_range(answer.headers)
    if len(answer.body) != end_byte - start_byte or size_bytes != obj.size_bytes:
        raise WrongBody(
            f"{len(answer.body)} bytes of {size_bytes} came where {end_byte - start_byte} of "
            f"{obj.size_bytes} were promised"
        )
    etag = answer.headers.get("etag")
    if etag not in (None, _quoted(obj.etag), obj.etag):
        raise WrongBody(
            f"the bytes of ETag {etag} came where those of {_quoted(obj.etag)} were asked for"
        )


def _checksum(algorithm: str, headers: Mapping[str, str]) -> Checksum | None:
    value = headers.get(f"x-amz-checksum-{algorithm.lower()}", "") if algorithm else ""
    if headers.get("x-amz-checksum-type", FULL_OBJECT) != FULL_OBJECT or "-" in value:
        return None  # of the parts' checksums, and not of the bytes
    try:
        digest = base64.b64decode(value, validate=True)
    except binascii.Error:
        return None  # nothing that bytes could be compared with
    return Checksum(algorithm.lower(), digest) if digest else None


def _quoted(etag: str) -> str:
    return f'"{etag}"'


def _size_of_range(headers: Mapping[str, str]) -> int:
    """Return the object's whole size as the answer to a ranged GET has it; -1 where it has none."""
    total = headers.get("content-range", "").rpartition("/")[2]
    return int(total) if total.isdecimal() else -1


def headers_of(answer: Mapping[str, Any]) -> ObjectHeaders:
    """Return an object's headers from botocore's answer to a HEAD, which has an Expires that is not
    a time beside the headers.
    """
    return _object_headers(
        {**answer["ResponseMetadata"]["HTTPHeaders"], "expires": answer.get("ExpiresString", "")}
    )


def _object_headers(headers: Mapping[str, str]) -> ObjectHeaders:
    metadata = {
        name.removeprefix(_METADATA): value
        for name, value in sorted(headers.items())
        if name.startswith(_METADATA)
    }
    return ObjectHeaders(
        **{name: headers.get(name.replace("_", "-"), "") for name in _KEPT}, user_metadata=metadata
    )
