"""Listings of a bucket, page by page, with keys as exact bytes.

boto3's own decoding of keys is lossy (`bad%FF` and `bad%FE` become one key), so the encoding is
asked for explicitly, which switches it off, and decoded here. A bucket with versions is listed by
versions, so that each object has its version id. Source: ListObjectsV2, ListObjectVersions and
GetBucketVersioning in the Amazon S3 API Reference.
"""

import heapq
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
"""S3's limit of keys in a page."""

_NO_BYTE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")

_CONTROL: Final = re.compile(CONTROLS)

_MARKER: Final = {"ETag": "", "Size": 0}
"""What a delete marker has not."""

REFUSED: Final = 400  # and above: an answer's status where it says no (RFC 9110, 15.5)

S3Answer = Mapping[str, Any]
Markers = Mapping[str, str]


class Undecodable(ValueError):
    """A key of a listing that is not percent-encoded as it says."""


def decode_key(text: str, encoding: str | None) -> bytes:
    """Return the bytes of a key as a listing shows it.

    Args: text: the key. encoding: what the answer says of it. "url": `%XX` is a byte and `+` a
        space (AWS writes it so; all known servers
            write a plus sign as `%2B`). None: a server that does not know the parameter wrote the
            key as it is.

    Raises:
        Undecodable: a `%` that two hexadecimal digits do not follow.
    """
    raw = text.encode("utf-8", "surrogatepass")
    if encoding != "url":
        return raw
    if _NO_BYTE.search(raw):
        raise Undecodable(text)
    return unquote_to_bytes(raw.replace(b"+", b" "))


class CycleDetector:
    """Finds out that a sequence of markers repeats, whatever its period, in constant memory
    (Brent's algorithm).
    """

    def __init__(self) -> None:
        self._kept: Markers | None = None
        self._steps = 0
        self._power = 1

    def closes(self, marker: Markers) -> bool:
        """Take the next marker; tell whether it was seen before (at the latest after three
        periods).
        """
        if marker == self._kept:
            return True
        self._steps += 1
        if self._steps == self._power:
            self._kept, self._steps, self._power = marker, 0, self._power * 2
        return False


class RequestRate:
    """Spaces the requests of all threads out: at most so many a second, 0 for no limit.

    What was not used is not saved up.
    """

    def __init__(self, per_second: float = 0) -> None:
        self._seconds = 1 / per_second if per_second else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return once the next request may be sent."""
        with self._lock:
            now = time.monotonic()
            mine = max(now, self._next)
            self._next = mine + self._seconds
        time.sleep(mine - now)


@dataclass(frozen=True)
class Listing:
    """How one source is listed.

    Attributes: extra: parameters of every request, e.g. who pays. page_keys: in a page.
        all_versions: whether the settings ask for every version, so that a bucket without versions
        is refused. rate: of all requests, those that are sent again included.
    """

    client: S3Client
    asking: RequestPolicy
    prefix: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    page_keys: int = PAGE_KEYS
    all_versions: bool = False
    rate: RequestRate = field(default_factory=RequestRate)

    @property
    def at(self) -> BucketAddress:
        """Where it is."""
        return self.asking.at

    def pages(
        self,
        after: bytes,
        max_pages: int | None,
        *,
        in_order: bool = False,
        versions: bool = False,
        by_version: bool | None = None,
    ) -> Iterator[Sequence[S3Object]]:
        """Yield pages, none of them empty; see `ObjectSource.list_pages`."""
        if by_version is None:
            by_version = self.keeps_versions()
        if by_version:
            asked = self._each(
                self.client.list_object_versions, _next_version, _key_marker("KeyMarker", after)
            )
        else:
            asked = self._each(
                self.client.list_objects_v2, _next_token, _key_marker("StartAfter", after)
            )
        repeats = bool(by_version) and versions
        yielded = 0
        last = text_of(after).encode()
        through: bytes | None = (
            None  # the last key of a bounded listing, whose other versions are still to come
        )
        before: Sequence[S3Object] = ()  # the page before
        for number, answer in enumerate(self._begun(asked) if in_order and last else asked):
            listed = self._objects(answer)
            objects, before = _not_in(before, listed), listed
            if not versions:
                objects = [obj for obj in objects if obj.is_latest and not obj.is_delete_marker]
            if in_order and objects:
                self._require_order(last, objects, begins=number == 0, repeats=repeats)
                last = objects[-1].key
            page = [
                obj for obj in objects if obj.key > after
            ]  # a server may not know where to start
            if through is not None:
                if more := [obj for obj in page if obj.key == through]:
                    yield more
                if len(more) < len(objects):
                    return
                continue
            # Pages of nothing but what is left out are no progress: whoever looks at a bounded
            # listing goes on after its last key, and would look at them for ever. For the same
            # reason it ends with the last version of a key.
            if page:
                yield page if answer.get("IsTruncated") else LastPage(page)
                yielded += 1
            if yielded == max_pages:
                if not repeats:
                    return
                through = page[-1].key

    def _objects(self, answer: S3Answer) -> Sequence[S3Object]:
        """Return what a page has, delete markers among the versions, in the order of the page's
        keys.
        """
        encoding = answer.get("EncodingType")
        objects = [
            self._object(entry, encoding)
            for kind in ("Contents", "Versions")
            for entry in answer.get(kind, ())
        ]
        markers = [
            self._object({**_MARKER, **entry}, encoding, is_marker=True)
            for entry in answer.get("DeleteMarkers", ())
        ]
        self._require_count(answer, len(objects))
        return list(heapq.merge(objects, markers, key=lambda obj: obj.key)) if markers else objects

    def _require_count(self, answer: S3Answer, found: int) -> None:
        """Refuse a page that has fewer keys than it says.

        What counts otherwise is no lie: some servers say 0, or nothing, or the number of all keys
        (s3ninja); prefixes that nobody asked for count as keys (S3Proxy). A page of versions says
        no number.
        """
        said = answer.get("KeyCount", 0)
        if found + len(answer.get("CommonPrefixes", ())) < said <= self.page_keys:
            raise ListingRefused(
                f"the listing of {self.at} has a page of {found} keys that says it has {said}",
                hint="look for a proxy in front of the server that leaves keys out",
            )

    def _begun(self, answers: Iterator[S3Answer]) -> Iterator[S3Answer]:
        """Yield answers to a listing that begins at a key, which the first may refuse."""
        try:
            first = next(answers)
        except ListingRefused as error:
            raise ListingUnordered(f"{self.at} cannot be listed from a key on: {error}") from error
        yield first
        yield from answers

    def _require_order(
        self, last: bytes, objects: Sequence[S3Object], *, begins: bool, repeats: bool
    ) -> None:
        """Raise where keys do not ascend from the last one on, which a server may repeat where the
        listing begins there.

        `repeats`: a key may have several versions.
        """
        keys = [obj.key for obj in objects]
        descends = (
            any(one > two for one, two in pairwise(keys))
            if repeats
            else any(one >= two for one, two in pairwise(keys))
        )
        if (keys[0] < last if begins or repeats else keys[0] <= last) or descends:
            raise ListingUnordered(
                f"the listing of {self.at} is not in the order of the keys' bytes"
            )

    def keeps_versions(self) -> bool | None:
        """Tell whether the bucket keeps versions; None where it may not be asked.

        Raises: SettingsError: it keeps none, or may not be asked, and the settings ask for every
            version.
        """
        answer = self._versioning()
        keeps = answer.get("Status") in ("Enabled", "Suspended")
        refused = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 200) >= REFUSED
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
        """Return the time of S3's clock, to the second; this machine's where an answer has no
        Date.
        """
        try:
            date = self._versioning()["ResponseMetadata"]["HTTPHeaders"]["date"]
            return parsedate_to_datetime(date).astimezone(UTC)
        except (
            KeyError,
            ValueError,
        ):  # a server without a clock need not send it (RFC 9110, 6.6.1)
            return datetime.now(UTC)

    def _versioning(self) -> S3Answer:
        """Return the answer to GetBucketVersioning, also where that is one that says no."""

        def asked() -> S3Answer:
            self.rate.wait()
            said: S3Answer = self.client.get_bucket_versioning(Bucket=self.at.bucket)
            return said

        try:
            answer = self.asking.attempt(asked)
        except ClientError as error:
            if is_transient(error) or concerns_source(error, self.at):
                raise source_error(error, self.at) from error
            # not permitted to ask, or not implemented: listed without versions, which If-Match
            # makes up for
            return {"ResponseMetadata": error.response.get("ResponseMetadata", {})}
        except REQUEST_ERRORS as error:
            raise source_error(error, self.at) from error
        return answer

    def _each(
        self,
        ask: Callable[..., Any],
        following: Callable[[S3Answer, BucketAddress], dict[str, str]],
        start: Markers,
    ) -> Iterator[S3Answer]:
        """Yield the answers to one request after another."""
        loop = CycleDetector()
        markers: Markers = start
        while True:
            answer = self._asked(ask, markers)
            yield answer
            if not answer.get("IsTruncated"):
                return
            markers = following(answer, self.at)
            if not markers:
                raise ListingRefused(
                    f"the listing of {self.at} is cut off, and does not say where it continues"
                )
            if loop.closes(markers):
                raise ListingRefused(
                    f"the listing of {self.at} goes in circles: it continues where it has been "
                    "before"
                )

    def _asked(self, ask: Callable[..., Any], markers: Markers) -> S3Answer:
        asked = {
            "Bucket": self.at.bucket,
            "Prefix": self.prefix,
            "EncodingType": "url",
            "MaxKeys": self.page_keys,
        }

        def page() -> S3Answer:
            self.rate.wait()
            answer: S3Answer = ask(**asked, **markers, **self.extra)
            return answer

        try:
            answer = self.asking.attempt(page)
        except REQUEST_ERRORS as error:
            raise source_error(error, self.at) from error
        except (
            ValueError,
            OverflowError,
            RuntimeError,
        ) as error:  # what botocore raises for a number or a time that is none
            raise ListingRefused(
                f"the listing of {self.at} has a value that cannot be read: {error}"
            ) from error
        if "IsTruncated" not in answer:
            # boto3 reads any XML, a page that asks to log in too, as a listing of nothing.
            raise not_s3("it answers with something that is not a listing", self.at)
        return answer

    def _object(
        self, entry: S3Answer, encoding: str | None, *, is_marker: bool = False
    ) -> S3Object:
        try:
            key = decode_key(entry["Key"], encoding)
            etag = entry["ETag"]
            obj = S3Object(
                key=key,
                version_id=_version_id(entry),
                etag=etag[1:-1] if len(etag) > 1 and etag[0] == etag[-1] == '"' else etag,
                size_bytes=entry["Size"],
                last_modified=entry["LastModified"].astimezone(UTC),
                storage_class="" if is_marker else entry.get("StorageClass") or "STANDARD",
                checksum=_checksum(entry),
                is_latest=entry.get("IsLatest", True),
                is_delete_marker=is_marker,
            )
        except Undecodable as error:
            raise ListingRefused(
                f"the listing of {self.at} has a key that is not percent-encoded: {entry['Key']!r}"
            ) from error
        except KeyError as error:
            raise self._without(str(error.args[0]), entry) from error
        except OverflowError as error:
            raise ListingRefused(
                f"the listing of {self.at} has an object with an impossible LastModified: {key!r}"
            ) from error
        if not key:
            raise self._without("Key", entry)
        if not 0 <= obj.size_bytes <= MAX_SIZE_BYTES:
            raise ListingRefused(
                f"the listing of {self.at} has an object with an impossible Size, "
                f"{obj.size_bytes}: {key!r}"
            )
        for name, said in (("ETag", obj.etag), ("VersionId", obj.version_id)):
            if said and (len(said) > MAX_IDENTITY_BYTES or _CONTROL.search(said)):
                raise ListingRefused(
                    f"the listing of {self.at} has an object with an impossible {name}: {key!r}"
                )
        if not key.startswith(self.prefix.encode()):
            raise ListingRefused(
                f"the listing of {self.at} was asked for prefix '{self.prefix}' and has {key!r}"
            )
        return obj

    def _without(self, name: str, entry: S3Answer) -> ListingRefused:
        return ListingRefused(
            f"the listing of {self.at} has an object without its {name}: {entry.get('Key', '?')!r}",
            hint="the server must list Key, ETag, Size and LastModified of every object",
        )


def _not_in(before: Sequence[S3Object], objects: Sequence[S3Object]) -> Sequence[S3Object]:
    """Return what of a page the one before has not: servers may begin with the version that it
    ended with.
    """
    if not before or not objects or objects[0].key != before[-1].key:
        return objects
    listed = {(obj.key, obj.version_id, obj.is_delete_marker) for obj in before}
    return [obj for obj in objects if (obj.key, obj.version_id, obj.is_delete_marker) not in listed]


def _checksum(entry: S3Answer) -> str:
    algorithms = entry.get("ChecksumAlgorithm") or ()
    return "/".join(
        (
            *algorithms[:1],
            *([entry["ChecksumType"]] if algorithms and "ChecksumType" in entry else ()),
        )
    )


def _version_id(entry: S3Answer) -> str | None:
    version_id: str | None = entry.get(
        "VersionId"
    )  # which a listing without versions does not have
    # "null" is no version: a PUT without versioning overwrites it.
    return None if version_id in (None, "", "null") else version_id


def _key_marker(name: str, after: bytes) -> Markers:
    """Return where to start, which boto3 takes as text; of a key that is none, the part before, and
    the rest is filtered.
    """
    text = text_of(after)
    return {name: text} if text else {}


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
            f"the listing of {at} continues at a key that cannot be asked for"
        ) from error
    version = answer.get("NextVersionIdMarker")
    return {"KeyMarker": key, "VersionIdMarker": version} if version else {"KeyMarker": key}
