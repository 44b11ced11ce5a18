"""What names an object: the record that a listing gives, its identity, which keys can be archived,
and why one was not.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from caf_pipeline.system.quantities import counted

MAX_KEY_BYTES: Final = 1024
"""S3's own limit on a key, in bytes of UTF-8 (S3 User Guide, "Object key naming guidelines")."""

MAX_SIZE_BYTES: Final = 1 << 53
"""A size beyond is damage: an object in S3 has at most 50 TB, and programs that read sizes as
doubles round what is larger.
"""


MAX_IDENTITY_BYTES: Final = 1024
"""Of an ETag or a version id: S3's own limit on the latter.

A longer one is damage, and no server takes it as a header.
"""

CONTROLS: Final = r"[\x00-\x1f\x7f]"
"""What an ETag or a version id never has, as an expression: no request could have it, and no
database a NUL.
"""

VERSION_MARK: Final = "~caf-v-"
"""Stands between key and version in the name of an older version.

Two names can be equal only if they have this mark.
"""


class SkipReason(StrEnum):
    """Why an object that the plan or the inventory named was not archived.

    The values are what the ledger stores.
    """

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
    # An identity that is still listed after it was seen changed or gone is a listing that lags:
    # soon, but not at once, or every tick of the sensor would plan it again.
    SkipReason.CHANGED: timedelta(hours=1),
    SkipReason.DELETED: timedelta(hours=1),
    # These wait for somebody to restore, permit or repair something.
    SkipReason.COLD_STORAGE: timedelta(days=1),
    SkipReason.ACCESS_DENIED: timedelta(days=1),
    SkipReason.NEEDS_KEY: timedelta(days=1),
    SkipReason.UNREADABLE: timedelta(days=1),
    # The same bytes were written again, and no provider returned the archived headers: an outage,
    # most likely.
    SkipReason.NOT_COMPARED: timedelta(minutes=10),
    # Nothing that time could mend.
    SkipReason.UNSUPPORTED_KEY: None,
    SkipReason.TOO_LARGE: None,
    # Any plan may take it; until when it waits at most stands in its row.
    SkipReason.WAITING: timedelta(0),
}
"""How long after a first skip the object may be planned again (None: not by itself); doubles each
time, up to 30 days.
"""


MAX_RETRY_AFTER: Final = timedelta(days=30)


CHECKSUMS: Final[Mapping[str, str]] = {
    f"{algorithm}{kind}": algorithm
    for algorithm in ("SHA256", "SHA1", "CRC32", "CRC32C", "CRC64NVME")
    for kind in ("", "/FULL_OBJECT")
}
"""What inventories say of an object whose checksum may be compared, and S3's name of the algorithm:
in lower case the end of its headers' names. Where no type is named, as in reports, it may be of the
parts' checksums; S3 tells when it is asked.
"""


@dataclass(frozen=True, slots=True)
class S3Object:
    """One object as a listing shows it.

    Attributes: key: the exact bytes of the key, at most 1,024, whatever they are. version_id: None
        where the bucket keeps no versions, and for S3's "null" version, which can be overwritten.
        etag: without its quotes; an identity, never a hash. last_modified: aware, in UTC. checksum:
        "<algorithm>/<type>" as listed, e.g. "CRC64NVME/FULL_OBJECT", or "<algorithm>" where the
        listing names no
            type; "" where it names no checksum.
        rewritten_at: when it was written, if the same ETag and size are located with another time:
            part of the identity. None otherwise.
        is_latest: whether it is what the key has now; an older version otherwise.
        is_delete_marker: it is not an object, and says that the key was deleted then: no ETag, no
        bytes.
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
        """What, beside source and key, makes up the object's identity."""
        return object_version(self.version_id, self.etag, self.size_bytes, self.rewritten_at)


@dataclass(frozen=True, slots=True)
class VersionCounts:
    """What keys have beside their current versions.

    Attributes:
        older: versions that are not their key's latest, without delete markers.
        markers: delete markers, the latest of their key or not.
        deleted_keys: keys whose latest version is a delete marker.
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
        """Say what there is beside current objects, "" without any; `all_versions`: older versions
        are objects, too.
        """
        said = [
            f"{counted(self.older, 'older version')} "
            f"{'among the objects' if all_versions else 'left out'}"
            if self.older
            else "",
            counted(self.markers, "delete marker") if self.markers else "",
            f"{counted(self.deleted_keys, 'key')} deleted" if self.deleted_keys else "",
        ]
        return ", ".join(filter(None, said))

    @classmethod
    def of(cls, listed: Iterable[S3Object]) -> "VersionCounts":
        """Count what of a listing is no current object."""
        rest = [obj for obj in listed if obj.is_delete_marker or not obj.is_latest]
        markers = [obj for obj in rest if obj.is_delete_marker]
        return cls(len(rest) - len(markers), len(markers), sum(obj.is_latest for obj in markers))


def versions_as_json(
    beside: VersionCounts | None, *, all_versions: bool
) -> dict[str, str | int | None]:
    """Return which versions are objects of an inventory, and what else there was, as a program
    reads it; None: not counted.
    """
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
    """A part of an object that is split over chunks: its `number` of `count`, from 1, and its bytes
    of the object.

    `end_byte` is exclusive, and greater than `start_byte`.
    """

    number: int
    count: int
    start_byte: int
    end_byte: int

    @property
    def size_bytes(self) -> int:
        """The part's length."""
        return self.end_byte - self.start_byte


def cut_into_parts(size_bytes: int, most_bytes: int) -> list[PartRange]:
    """Return the fewest parts of an object of which none is larger than this, in order; their sizes
    differ by a byte at most.
    """
    count = -(-size_bytes // most_bytes)
    ends = [size_bytes * number // count for number in range(count + 1)]
    return [
        PartRange(number, count, *ends[number - 1 : number + 1]) for number in range(1, count + 1)
    ]


def object_version(
    version_id: str | None, etag: str, size_bytes: int, rewritten_at: datetime | None = None
) -> str:
    """Return the version id, or `etag:<ETag>:<size>` where the bucket has no versions.

    The identity of an object that was written again with the same ETag and size is
    `etag:<ETag>:<size>:<LastModified>`, with a time in UTC as `2026-11-21T23:10:05.000000Z`.
    """
    version = version_id if version_id is not None else f"etag:{etag}:{size_bytes}"
    return version if rewritten_at is None else rewritten_version(version, rewritten_at)


def version_id_of(object_version: str) -> str:
    """Return the version id of an identity; "" if it has none."""
    return "" if object_version.startswith("etag:") else object_version


def is_rewritten(version: str, etag: str, size_bytes: int) -> bool:
    """Return whether an identity has the time of a rewrite."""
    return not version_id_of(version) and version != object_version(None, etag, size_bytes)


def rewritten_version(version: str, rewritten_at: datetime) -> str:
    """Return `object_version` of an object that was written again, by that of the bytes that it had
    before.
    """
    # Python's strftime gives a year before 1000 fewer digits than DuckDB's.
    return f"{version}:{rewritten_at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"  # noqa: E501


TIME_FORMAT: Final = "%Y-%m-%dT%H:%M:%S.%fZ"
"""The form of that LastModified, as DuckDB's strftime takes it."""


def is_supported(key: bytes) -> bool:
    """Tell whether a key can be archived: valid UTF-8, at most 1,024 bytes, no NUL (which Postgres
    text cannot hold).
    """
    if not key or len(key) > MAX_KEY_BYTES or b"\0" in key:
        return False
    try:
        key.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def can_be_stored(text: str) -> bool:
    """Tell whether the database can hold a key or a name; a lone surrogate stands for a byte that
    is not UTF-8.
    """
    return is_supported(text.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, slots=True)
class CurrentException:
    """At `stated_at` the bucket had this identity of the key as its current one; None: the key was
    gone.

    `last_modified`: the object written at this time has the archived bytes and headers. None if
    they were not compared.
    """

    key: str
    stated_at: datetime
    object_version: str | None
    last_modified: datetime | None = None
