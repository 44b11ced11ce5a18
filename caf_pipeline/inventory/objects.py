"""Objects as listings show them: identity, supported keys, parts, and skip reasons."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from caf_pipeline.system.quantities import counted

MAX_KEY_BYTES: Final = 1024
"""S3's limit in UTF-8 (S3 User Guide, "Object key naming guidelines")."""

MAX_SIZE_BYTES: Final = 1 << 53
"""Objects in S3 have at most 50 TB, and doubles round larger sizes."""


MAX_IDENTITY_BYTES: Final = 1024
"""Limits an ETag or version id; S3's limit for version ids."""

CONTROLS: Final = r"[\x00-\x1f\x7f]"
"""No request can send these characters in an ETag or version id."""

VERSION_MARK: Final = "~caf-v-"
"""Precedes the version in an older version's name. Names can be equal only if one has it."""


class SkipReason(StrEnum):
    """Why an object was not archived. The ledger stores the values."""

    CHANGED = "changed"
    DELETED = "deleted"
    COLD_STORAGE = "cold_storage"
    ACCESS_DENIED = "access_denied"
    NEEDS_KEY = "needs_key"
    UNREADABLE = "unreadable"
    NOT_COMPARED = "not_compared"
    UNSUPPORTED_KEY = "unsupported_key"
    TOO_LARGE = "too_large"
    WAITING = "waiting"


RETRY_AFTER: Final[dict[SkipReason, timedelta | None]] = {
    # A listing may lag behind a change or deletion. Without a delay, every tick of the sensor would
    # plan the object again.
    SkipReason.CHANGED: timedelta(hours=1),
    SkipReason.DELETED: timedelta(hours=1),
    # The operator must restore, permit or repair something.
    SkipReason.COLD_STORAGE: timedelta(days=1),
    SkipReason.ACCESS_DENIED: timedelta(days=1),
    SkipReason.NEEDS_KEY: timedelta(days=1),
    SkipReason.UNREADABLE: timedelta(days=1),
    # The same bytes were written again, and no provider returned the archived headers. The likely
    # cause is an outage.
    SkipReason.NOT_COMPARED: timedelta(minutes=10),
    # Waiting does not help.
    SkipReason.UNSUPPORTED_KEY: None,
    SkipReason.TOO_LARGE: None,
    # Any plan may take it. Its row has the latest time.
    SkipReason.WAITING: timedelta(0),
}
"""Before a skipped object may be planned again; None: never automatically. Doubles with each skip,
up to MAX_RETRY_AFTER.
"""


MAX_RETRY_AFTER: Final = timedelta(days=30)


CHECKSUMS: Final[Mapping[str, str]] = {
    f"{algorithm}{kind}": algorithm
    for algorithm in ("SHA256", "SHA1", "CRC32", "CRC32C", "CRC64NVME")
    for kind in ("", "/FULL_OBJECT")
}
"""S3's algorithm by an inventory's checksum; in lower case it ends header names. Reports name no
type, so the checksum may be one of the parts' checksums.
"""


@dataclass(frozen=True, slots=True)
class S3Object:
    """One object in a listing.

    Attributes:
        key: exact bytes, at most 1,024.
        version_id: None without versions, and for S3's "null" version, which can be overwritten.
        etag: without quotes; an identity, never a hash.
        last_modified: aware, in UTC.
        checksum: "<algorithm>/<type>", e.g. "CRC64NVME/FULL_OBJECT"; "<algorithm>" if the listing
            names no type; or "".
        rewritten_at: the object's time, as part of its identity, if the same ETag and size are
            located with another time.
    """

    key: bytes
    version_id: str | None
    etag: str
    size_bytes: int
    last_modified: datetime
    storage_class: str = "STANDARD"
    checksum: str = ""
    rewritten_at: datetime | None = None
    is_latest: bool = True
    is_delete_marker: bool = False

    @property
    def object_version(self) -> str:
        return object_version(self.version_id, self.etag, self.size_bytes, self.rewritten_at)


@dataclass(frozen=True, slots=True)
class VersionCounts:
    """Counts of versions that are not current objects.

    `older` excludes delete markers; `markers` includes those that are not the latest. The latest
    version of `deleted_keys` is a delete marker.
    """

    older: int = 0
    markers: int = 0
    deleted_keys: int = 0

    def __add__(self, other: "VersionCounts") -> "VersionCounts":
        return VersionCounts(
            self.older + other.older,
            self.markers + other.markers,
            self.deleted_keys + other.deleted_keys,
        )

    def sentence(self, *, all_versions: bool) -> str:
        """`all_versions`: older versions are among the objects."""
        where = "among the objects" if all_versions else "left out"
        phrases = []
        if self.older:
            phrases.append(f"{counted(self.older, 'older version')} {where}")
        if self.markers:
            phrases.append(counted(self.markers, "delete marker"))
        if self.deleted_keys:
            phrases.append(f"{counted(self.deleted_keys, 'key')} deleted")
        return ", ".join(phrases)

    @classmethod
    def of(cls, listed: Iterable[S3Object]) -> "VersionCounts":
        rest = [obj for obj in listed if obj.is_delete_marker or not obj.is_latest]
        markers = [obj for obj in rest if obj.is_delete_marker]
        return cls(len(rest) - len(markers), len(markers), sum(obj.is_latest for obj in markers))


def versions_as_json(
    beside: VersionCounts | None, *, all_versions: bool
) -> dict[str, str | int | None]:
    """Return kind and counts of versions as JSON fields."""
    counts = (
        (None, None, None)
        if beside is None
        else (beside.older, beside.markers, beside.deleted_keys)
    )
    names = ("older_versions", "delete_markers", "deleted_keys")
    return {
        "versions": "all" if all_versions else "current",
        **dict(zip(names, counts, strict=True)),
    }


@dataclass(frozen=True, slots=True)
class PartRange:
    """Part `number` of `count`, from 1, of a split object.

    `[start_byte, end_byte)` are bytes of the object, at least one.
    """

    number: int
    count: int
    start_byte: int
    end_byte: int

    @property
    def size_bytes(self) -> int:
        return self.end_byte - self.start_byte


def cut_into_parts(size_bytes: int, max_bytes: int) -> list[PartRange]:
    """Return the fewest parts, in order. Sizes differ by at most one byte."""
    count = -(-size_bytes // max_bytes)
    ends = [size_bytes * number // count for number in range(count + 1)]
    return [
        PartRange(number, count, *ends[number - 1 : number + 1]) for number in range(1, count + 1)
    ]


def object_version(
    version_id: str | None, etag: str, size_bytes: int, rewritten_at: datetime | None = None
) -> str:
    """Return the version id, or `etag:<ETag>:<size>` if the bucket keeps no versions.

    A rewrite with the same ETag and size is `etag:<ETag>:<size>:<LastModified>`, with a time in UTC
    such as `2026-11-21T23:10:05.000000Z`.
    """
    version = version_id if version_id is not None else f"etag:{etag}:{size_bytes}"
    return version if rewritten_at is None else rewritten_version(version, rewritten_at)


def version_id_of(object_version: str) -> str:
    """Return an identity's version id, or ""."""
    return "" if object_version.startswith("etag:") else object_version


def is_rewritten(version: str, etag: str, size_bytes: int) -> bool:
    """Return whether an identity has a rewrite's time."""
    return not version_id_of(version) and version != object_version(None, etag, size_bytes)


def rewritten_version(version: str, rewritten_at: datetime) -> str:
    """Return the identity of a rewrite of `version`."""
    # Python's strftime writes a year before 1000 with fewer digits than DuckDB's.
    time = rewritten_at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds")
    return f"{version}:{time}Z"


TIME_FORMAT: Final = "%Y-%m-%dT%H:%M:%S.%fZ"
"""For DuckDB's strftime."""


def is_supported(key: bytes) -> bool:
    """Return whether a key can be archived. Postgres cannot store NUL."""
    if not key or len(key) > MAX_KEY_BYTES or b"\0" in key:
        return False
    try:
        key.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def can_be_stored(text: str) -> bool:
    """`is_supported` for text; a lone surrogate stands for a byte that is not UTF-8."""
    return is_supported(text.encode("utf-8", "surrogatepass"))


LEAST: Final = "\x01"
"""A key with this character appended is the least text greater than the key."""

BEHIND_ALL: Final = "\U0010ffff" * (MAX_KEY_BYTES // 4 + 1)
"""Greater than every key."""


@dataclass(frozen=True, slots=True)
class CurrentException:
    """The key had this identity at `stated_at`; None: it was deleted.

    The object written at `last_modified` has the archived bytes and headers; None: not compared.
    """

    key: str
    stated_at: datetime
    object_version: str | None
    last_modified: datetime | None = None
