"""GETs of exactly one identity, and HEADs if no body is needed.

A plain GET of a whole object requests S3's checksum if there may be one. An object that is read in
parts costs a HEAD for it. Source: GetObject and HeadObject in the Amazon S3 API Reference.
"""

import base64
import binascii
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from botocore.exceptions import ClientError, FlexibleChecksumError

from caf_pipeline.inventory.headers import HEADERS, ObjectHeaders
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

_METADATA: Final = "x-amz-meta-"

STALLED_SECONDS: Final = 20.0
"""Seconds of waiting for a GET before it is reported. A part takes long on a slow line."""


@dataclass(frozen=True)
class S3ObjectReader:
    """Reads the objects of one source, whose keys must be text.

    `has_reports`: listings may lack checksums, since reports need not have that column.
    """

    client: S3Client
    gets: GetClient
    policy: RequestPolicy
    extra: Mapping[str, Any] = field(default_factory=dict)
    has_reports: bool = False

    @property
    def at(self) -> BucketAddress:
        return self.policy.at

    def part(self, obj: S3Object, start_byte: int, end_byte: int) -> ObjectPart:
        with self.policy.waiting(STALLED_SECONDS) as wait:
            try:
                part = self.policy.retried(lambda: self._read_once(obj, start_byte, end_byte))
            except REQUEST_ERRORS as error:
                raise object_error(error, self.at, obj.key) from error
            wait.moved()
            return part

    def begin(
        self, obj: S3Object, start_byte: int, end_byte: int, ended: Callable[[], None]
    ) -> "PendingPart | None":
        try:
            get = self._begin_get(obj, start_byte, end_byte)
        except REQUEST_ERRORS:
            return None
        get.finished.add_done_callback(lambda _: ended())
        return PendingPart(self, obj, start_byte, end_byte, get)

    def _read_once(self, obj: S3Object, start_byte: int, end_byte: int) -> ObjectPart:
        try:
            answer = self._begin_get(obj, start_byte, end_byte).answer()
        except UnreadableHeader:
            answer = self._read_by_boto3(obj, start_byte, end_byte)
        return self.checked(obj, start_byte, end_byte, answer)

    def _read_by_boto3(self, obj: S3Object, start_byte: int, end_byte: int) -> GetAnswer:
        more: dict[str, Any] = {}
        if not _is_whole(obj, start_byte, end_byte):
            more["Range"] = _range(start_byte, end_byte)
        elif self._algorithms(obj):
            more["ChecksumMode"] = "ENABLED"
        response: Any = self.client.get_object(**self._identity(obj), **more)
        # The body's own context manager yields a stream whose errors are not botocore's.
        with closing(response["Body"]) as stream:
            try:
                body = stream.read()
            except (FlexibleChecksumError, binascii.Error) as error:
                raise WrongBody(f"the answer does not match its checksum: {error}") from error
        return GetAnswer(response["ResponseMetadata"]["HTTPHeaders"], body)

    def _begin_get(self, obj: S3Object, start_byte: int, end_byte: int) -> PendingGet:
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
        """Raises WrongBody if the answer has other bytes."""
        whole = _is_whole(obj, start_byte, end_byte)
        if whole:
            size_bytes = len(answer.body)
        else:
            total = answer.headers.get("content-range", "").rpartition("/")[2]
            size_bytes = int(total) if total.isdecimal() else -1
        if len(answer.body) != end_byte - start_byte or size_bytes != obj.size_bytes:
            raise WrongBody(
                f"the answer has {len(answer.body)} bytes of {size_bytes}, and "
                f"{end_byte - start_byte} of {obj.size_bytes} were requested"
            )
        etag = answer.headers.get("etag")
        if etag not in (None, _quoted(obj.etag), obj.etag):
            raise WrongBody(f"the answer has ETag {etag}, and {_quoted(obj.etag)} was requested")
        checksums = (
            _checksum(algorithm, answer.headers)
            for algorithm in (self._algorithms(obj) if whole else ())
        )
        return ObjectPart(
            answer.body, _object_headers(answer.headers), next(filter(None, checksums), None)
        )

    def _algorithms(self, obj: S3Object) -> Collection[str]:
        if obj.checksum in CHECKSUMS:
            return (CHECKSUMS[obj.checksum],)
        return _ALGORITHMS if self.has_reports and not obj.checksum else ()

    def read_headers(self, obj: S3Object) -> ObjectHead:
        answer = self._head(obj, ChecksumMode="ENABLED")
        if isinstance(answer, ClientError):
            raise object_error(answer, self.at, obj.key) from answer
        # To the second, which is the resolution of HTTP; a listing may have fractions.
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
        algorithm = CHECKSUMS.get(obj.checksum, "")
        answer = self._head(obj, ChecksumMode="ENABLED") if algorithm else None
        if answer is None or isinstance(answer, ClientError):
            return None
        return _checksum(algorithm, answer["ResponseMetadata"]["HTTPHeaders"])

    def _head(self, obj: S3Object, **more: Any) -> Any:  # noqa: ANN401 - botocore's calls and answers are made at run time
        try:
            return self.policy.attempt(
                lambda: self.client.head_object(**self._identity(obj), **more)
            )
        except REQUEST_ERRORS as error:
            if (
                not isinstance(error, ClientError)
                or is_transient(error)
                or concerns_source(error, self.at)
            ):
                raise object_error(error, self.at, obj.key) from error
            # An answer to a HEAD has no error code. A GET raises the exact error, or succeeds.
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
    start_byte: int
    end_byte: int
    get: PendingGet

    def waiting(self) -> AbstractContextManager[object]:
        return self.reader.policy.waiting(STALLED_SECONDS)

    def has_failed(self) -> bool:
        return self.get.has_failed()

    def was_refused(self) -> bool:
        return self.get.was_refused()

    def cancel(self) -> None:
        self.get.cancel()

    def part(self) -> ObjectPart | None:
        try:
            with nullcontext() if self.get.is_done else self.waiting():
                answer = self.get.answer()
            return self.reader.checked(self.obj, self.start_byte, self.end_byte, answer)
        except (*REQUEST_ERRORS, UnreadableHeader):
            return None


def _version(obj: S3Object) -> str | None:
    # S3 returns a key's version `null` without a version id only while it is the latest.
    return obj.version_id if obj.version_id is not None or obj.is_latest else "null"


def _is_whole(obj: S3Object, start_byte: int, end_byte: int) -> bool:
    return end_byte - start_byte == obj.size_bytes


def _range(start_byte: int, end_byte: int) -> str:
    return f"bytes={start_byte}-{end_byte - 1}"


def _checksum(algorithm: str, headers: Mapping[str, str]) -> Checksum | None:
    value = headers.get(f"x-amz-checksum-{algorithm.lower()}", "") if algorithm else ""
    if headers.get("x-amz-checksum-type", FULL_OBJECT) != FULL_OBJECT or "-" in value:
        return None  # a checksum of the parts' checksums
    try:
        digest = base64.b64decode(value, validate=True)
    except binascii.Error:
        return None
    return Checksum(algorithm.lower(), digest) if digest else None


def _quoted(etag: str) -> str:
    return f'"{etag}"'


def headers_of(answer: Mapping[str, Any]) -> ObjectHeaders:
    """Return an object's headers from botocore's answer to a HEAD.

    botocore moves an Expires that is not a time out of the headers.
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
        **{name: headers.get(name.replace("_", "-"), "") for name in HEADERS},
        user_metadata=metadata,
    )
