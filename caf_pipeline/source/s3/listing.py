"""Listings of a bucket, page by page, with keys as exact bytes.

boto3's decoding is lossy: `bad%FF` and `bad%FE` become one key. An explicit encoding type switches
it off. Source: ListObjectsV2, ListObjectVersions and GetBucketVersioning in the Amazon S3 API
Reference.
"""

import heapq
import operator
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import pairwise
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from botocore.exceptions import ClientError

from caf_pipeline.errors import ListingRefused, ListingUnordered, SettingsError
from caf_pipeline.inventory.key_split import text_of
from caf_pipeline.inventory.objects import CONTROLS, MAX_IDENTITY_BYTES, MAX_SIZE_BYTES, S3Object
from caf_pipeline.source.protocol import LastPage
from caf_pipeline.source.s3.client_type import S3Client
from caf_pipeline.source.s3.errors import (
    REQUEST_ERRORS,
    BucketAddress,
    RequestPolicy,
    concerns_source,
    is_transient,
    not_s3,
    source_error,
)

PAGE_KEYS: Final = 1000
"""S3's limit."""

_BAD_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")

_CONTROL: Final = re.compile(CONTROLS)

_MARKER_DEFAULTS: Final = {"ETag": "", "Size": 0}

MIN_REFUSAL: Final = 400  # the lowest status of a refusal (RFC 9110, 15.5)

S3Answer = Mapping[str, Any]
Markers = Mapping[str, str]


class Undecodable(ValueError):
    """A listed key has an invalid percent-encoding."""


def decode_key(text: str, encoding: str | None) -> bytes:
    """Return the bytes of a key in a listing; raises Undecodable for an invalid `%`.

    If `encoding` is "url", `%XX` is a byte and `+` a space, as AWS writes it. All known servers
    write a plus sign as `%2B`. None: the server does not encode keys.
    """
    raw = text.encode("utf-8", "surrogatepass")
    if encoding != "url":
        return raw
    if _BAD_ESCAPE.search(raw):
        raise Undecodable(text)
    return unquote_to_bytes(raw.replace(b"+", b" "))


class CycleDetector:
    """Detects a cycle of any period in constant memory (Brent's algorithm)."""

    def __init__(self) -> None:
        self._saved: Markers | None = None
        self._steps = 0
        self._power = 1

    def closes(self, marker: Markers) -> bool:
        """Return whether the markers repeat; detects a cycle within three periods."""
        if marker == self._saved:
            return True
        self._steps += 1
        if self._steps == self._power:
            self._saved, self._steps, self._power = marker, 0, self._power * 2
        return False


class RequestRate:
    """Limits all threads' requests; 0: no limit. Unused time does not accumulate."""

    def __init__(self, per_second: float = 0) -> None:
        self._seconds = 1 / per_second if per_second else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            now = time.monotonic()
            slot = max(now, self._next)
            self._next = slot + self._seconds
        time.sleep(slot - now)


@dataclass(frozen=True)
class Listing:
    """Lists one source. `rate` limits all requests, retries included."""

    client: S3Client
    policy: RequestPolicy
    prefix: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    page_keys: int = PAGE_KEYS
    all_versions: bool = False
    rate: RequestRate = field(default_factory=RequestRate)

    @property
    def at(self) -> BucketAddress:
        return self.policy.at

    def pages(
        self,
        after: bytes,
        max_pages: int | None,
        *,
        in_order: bool = False,
        versions: bool = False,
        by_version: bool | None = None,
    ) -> Iterator[Sequence[S3Object]]:
        if by_version is None:
            by_version = self.keeps_versions()
        begin = text_of(after)  # boto3 takes text; keys up to `after` are filtered out below
        if by_version:
            start = {"KeyMarker": begin} if begin else {}
            answers = self._answers(self.client.list_object_versions, _next_version, start)
        else:
            start = {"StartAfter": begin} if begin else {}
            answers = self._answers(self.client.list_objects_v2, _next_token, start)
        repeats = bool(by_version) and versions
        yielded = 0
        last = begin.encode()
        # The last key of a bounded listing. Pages with its other versions follow.
        through: bytes | None = None
        previous: Sequence[S3Object] = ()
        for number, answer in enumerate(self._begun(answers) if in_order and last else answers):
            page_objects = self._objects(answer)
            objects, previous = _without_overlap(previous, page_objects), page_objects
            if not versions:
                objects = [obj for obj in objects if obj.is_latest and not obj.is_delete_marker]
            if in_order and objects:
                self._require_order(last, objects, begins=number == 0, repeats=repeats)
                last = objects[-1].key
            page = [obj for obj in objects if obj.key > after]  # a server may ignore the start
            if through is not None:
                if more := [obj for obj in page if obj.key == through]:
                    yield more
                if len(more) < len(objects):
                    return
                continue
            # A page without remaining objects does not count: a bounded listing is continued after
            # its last key, and would never advance. For the same reason it ends with the last
            # version of a key.
            if page:
                yield page if answer.get("IsTruncated") else LastPage(page)
                yielded += 1
            if yielded == max_pages:
                if not repeats:
                    return
                through = page[-1].key

    def _objects(self, answer: S3Answer) -> Sequence[S3Object]:
        encoding = answer.get("EncodingType")
        objects = [
            self._object(entry, encoding)
            for kind in ("Contents", "Versions")
            for entry in answer.get(kind, ())
        ]
        markers = [
            self._object({**_MARKER_DEFAULTS, **entry}, encoding, is_marker=True)
            for entry in answer.get("DeleteMarkers", ())
        ]
        # KeyCount is 0 or missing on some servers, and on s3ninja the number of all keys. S3Proxy
        # counts prefixes that were not requested. A page of versions has no KeyCount.
        expected = answer.get("KeyCount", 0)
        if len(objects) + len(answer.get("CommonPrefixes", ())) < expected <= self.page_keys:
            raise ListingRefused(
                f"the listing of {self.at} has a page of {len(objects)} keys whose KeyCount is "
                f"{expected}",
                hint="look for a proxy in front of the server that leaves keys out",
            )
        return list(heapq.merge(objects, markers, key=lambda obj: obj.key)) if markers else objects

    def _begun(self, answers: Iterator[S3Answer]) -> Iterator[S3Answer]:
        try:
            first = next(answers)
        except ListingRefused as error:
            raise ListingUnordered(f"{self.at} cannot be listed from a key on: {error}") from error
        yield first
        yield from answers

    def _require_order(
        self, last: bytes, objects: Sequence[S3Object], *, begins: bool, repeats: bool
    ) -> None:
        """A server may repeat the first key. `repeats`: keys may have versions."""
        keys = [obj.key for obj in objects]
        out_of_order = operator.gt if repeats else operator.ge
        begins_before = keys[0] < last if begins or repeats else keys[0] <= last
        if begins_before or any(out_of_order(*pair) for pair in pairwise(keys)):
            raise ListingUnordered(
                f"the listing of {self.at} is not in the order of the keys' bytes"
            )

    def keeps_versions(self) -> bool | None:
        answer = self._versioning()
        keeps = answer.get("Status") in ("Enabled", "Suspended")
        refused = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 200) >= MIN_REFUSAL
        if self.all_versions and not keeps:
            why = "does not say whether it keeps versions" if refused else "keeps no versions"
            setting = self.at.setting("versions")
            raise SettingsError(
                f"{self.at} {why}, and {setting} is 'all'",
                hint=f"grant s3:GetBucketVersioning, or set {setting} to 'current'"
                if refused
                else f"set {setting} to 'current'",
            )
        return None if refused else keeps

    def clock(self) -> datetime:
        """To the second; this machine's time if an answer has no Date."""
        try:
            date = self._versioning()["ResponseMetadata"]["HTTPHeaders"]["date"]
            return parsedate_to_datetime(date).astimezone(UTC)
        except (KeyError, ValueError):  # a server without a clock sends no Date (RFC 9110, 6.6.1)
            return datetime.now(UTC)

    def _versioning(self) -> S3Answer:
        def ask() -> S3Answer:
            self.rate.wait()
            answer: S3Answer = self.client.get_bucket_versioning(Bucket=self.at.bucket)
            return answer

        try:
            return self.policy.attempt(ask)
        except ClientError as error:
            if is_transient(error) or concerns_source(error, self.at):
                raise source_error(error, self.at) from error
            # Forbidden or not implemented. The bucket is then listed without versions, and If-Match
            # pins the content.
            return {"ResponseMetadata": error.response.get("ResponseMetadata", {})}
        except REQUEST_ERRORS as error:
            raise source_error(error, self.at) from error

    def _answers(
        self,
        ask: Callable[..., Any],
        following: Callable[[S3Answer, BucketAddress], dict[str, str]],
        start: Markers,
    ) -> Iterator[S3Answer]:
        cycle = CycleDetector()
        markers: Markers = start
        while True:
            answer = self._ask(ask, markers)
            yield answer
            if not answer.get("IsTruncated"):
                return
            markers = following(answer, self.at)
            if not markers:
                raise ListingRefused(
                    f"the listing of {self.at} is truncated and has no continuation marker"
                )
            if cycle.closes(markers):
                raise ListingRefused(
                    f"the listing of {self.at} goes in circles: a continuation marker repeats"
                )

    def _ask(self, ask: Callable[..., Any], markers: Markers) -> S3Answer:
        parameters = {
            "Bucket": self.at.bucket,
            "Prefix": self.prefix,
            "EncodingType": "url",
            "MaxKeys": self.page_keys,
        }

        def page() -> S3Answer:
            self.rate.wait()
            answer: S3Answer = ask(**parameters, **markers, **self.extra)
            return answer

        try:
            answer = self.policy.attempt(page)
        except REQUEST_ERRORS as error:
            raise source_error(error, self.at) from error
        except (ValueError, OverflowError, RuntimeError) as error:
            # botocore raises these for an invalid number or time.
            raise ListingRefused(
                f"the listing of {self.at} has a value that cannot be read: {error}"
            ) from error
        if "IsTruncated" not in answer:
            # boto3 parses any XML, such as a login page, as an empty listing.
            raise not_s3("its answer is not a listing", self.at)
        return answer

    def _object(
        self, entry: S3Answer, encoding: str | None, *, is_marker: bool = False
    ) -> S3Object:
        try:
            key = decode_key(entry["Key"], encoding)
            etag = entry["ETag"]
            algorithms = entry.get("ChecksumAlgorithm") or ()
            kinds = [entry["ChecksumType"]] if algorithms and "ChecksumType" in entry else []
            obj = S3Object(
                key=key,
                # "null" is not a version id: a PUT without versioning overwrites that version.
                version_id=None
                if entry.get("VersionId") in ("", "null")
                else entry.get("VersionId"),
                etag=etag[1:-1] if len(etag) > 1 and etag[0] == etag[-1] == '"' else etag,
                size_bytes=entry["Size"],
                last_modified=entry["LastModified"].astimezone(UTC),
                storage_class="" if is_marker else entry.get("StorageClass") or "STANDARD",
                checksum="/".join([*algorithms[:1], *kinds]),
                is_latest=entry.get("IsLatest", True),
                is_delete_marker=is_marker,
            )
        except Undecodable as error:
            raise ListingRefused(
                f"the listing of {self.at} has a key that is not percent-encoded: {entry['Key']!r}"
            ) from error
        except KeyError as error:
            raise self._missing_field(str(error.args[0]), entry) from error
        except OverflowError as error:
            raise ListingRefused(
                f"the listing of {self.at} has an object with an impossible LastModified: {key!r}"
            ) from error
        if not key:
            raise self._missing_field("Key", entry)
        if not 0 <= obj.size_bytes <= MAX_SIZE_BYTES:
            raise ListingRefused(
                f"the listing of {self.at} has an object with an impossible Size, "
                f"{obj.size_bytes}: {key!r}"
            )
        for name, value in (("ETag", obj.etag), ("VersionId", obj.version_id)):
            if value and (len(value) > MAX_IDENTITY_BYTES or _CONTROL.search(value)):
                raise ListingRefused(
                    f"the listing of {self.at} has an object with an impossible {name}: {key!r}"
                )
        if not key.startswith(self.prefix.encode()):
            raise ListingRefused(
                f"the listing of {self.at} for prefix '{self.prefix}' has the key {key!r}"
            )
        return obj

    def _missing_field(self, name: str, entry: S3Answer) -> ListingRefused:
        return ListingRefused(
            f"the listing of {self.at} has an object without {name}: {entry.get('Key', '?')!r}",
            hint="the server must list Key, ETag, Size and LastModified of every object",
        )


def _without_overlap(
    previous: Sequence[S3Object], objects: Sequence[S3Object]
) -> Sequence[S3Object]:
    """Drop objects of the previous page: a server may repeat its last version."""
    if not previous or not objects or objects[0].key != previous[-1].key:
        return objects
    listed = {(obj.key, obj.version_id, obj.is_delete_marker) for obj in previous}
    return [obj for obj in objects if (obj.key, obj.version_id, obj.is_delete_marker) not in listed]


def _next_token(answer: S3Answer, _: BucketAddress) -> dict[str, str]:
    token = answer.get("NextContinuationToken")
    return {"ContinuationToken": token} if token else {}


def _next_version(answer: S3Answer, at: BucketAddress) -> dict[str, str]:
    if not answer.get("NextKeyMarker"):
        return {}
    try:
        key = decode_key(answer["NextKeyMarker"], answer.get("EncodingType")).decode()
    except ValueError as error:
        raise ListingRefused(
            f"the listing of {at} continues at a key that cannot be requested"
        ) from error
    version = answer.get("NextVersionIdMarker")
    return {"KeyMarker": key, "VersionIdMarker": version} if version else {"KeyMarker": key}
