"""Objects of a source, snapshots of them, and which of them are not yet archived.

Holds the records that name an object, the Parquet schemas of snapshots and standings, and the set arithmetic between
them. Not here: listing a bucket (`s3`), cutting into chunks (`plan`), what the ledger knows (`ledger`).
Source: "Which objects are to be archived" in docs/design.md.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

import pyarrow as pa

MAX_KEY_BYTES: Final = 1024
"""S3's own limit on a key, in bytes of UTF-8 (S3 User Guide, "Object key naming guidelines")."""


class SkipReason(StrEnum):
    """Why an object that the plan or the inventory named was not archived. The values are what the ledger stores."""

    CHANGED = "changed"
    DELETED = "deleted"
    COLD_STORAGE = "cold_storage"
    ACCESS_DENIED = "access_denied"
    NEEDS_KEY = "needs_key"
    UNREADABLE = "unreadable"
    UNSUPPORTED_KEY = "unsupported_key"
    TOO_LARGE = "too_large"


RETRY_AFTER: Final[dict[SkipReason, timedelta | None]] = {
    # An identity that is still listed after it was seen changed or gone is a listing that lags: soon, but not at once,
    # or every tick of the sensor would plan it again.
    SkipReason.CHANGED: timedelta(hours=1),
    SkipReason.DELETED: timedelta(hours=1),
    # These wait for somebody to restore, permit or repair something.
    SkipReason.COLD_STORAGE: timedelta(days=1),
    SkipReason.ACCESS_DENIED: timedelta(days=1),
    SkipReason.NEEDS_KEY: timedelta(days=1),
    SkipReason.UNREADABLE: timedelta(days=1),
    # Nothing that time could mend.
    SkipReason.UNSUPPORTED_KEY: None,
    SkipReason.TOO_LARGE: None,
}
"""How long after a first skip the object may be planned again (None: not by itself); doubles each time, up to 30 days."""

MAX_RETRY_AFTER: Final = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class S3Object:
    """One object as a listing shows it.

    Attributes:
        key: the exact bytes of the key, at most 1,024, whatever they are.
        version_id: None where the bucket keeps no versions, and for S3's "null" version, which can be overwritten.
        etag: without its quotes; an identity, never a hash.
        last_modified: aware, in UTC.
        checksum: "<algorithm>/<type>" as listed, e.g. "CRC64NVME/FULL_OBJECT"; "" where the listing names none.
    """

    key: bytes
    version_id: str | None
    etag: str
    size_bytes: int
    last_modified: datetime
    storage_class: str = "STANDARD"
    checksum: str = ""

    @property
    def object_version(self) -> str:
        """What, beside source and key, makes up the object's identity."""
        return object_version(self.version_id, self.etag, self.size_bytes)


def object_version(version_id: str | None, etag: str, size_bytes: int) -> str:
    """Return the version id, or `etag:<ETag>:<size>` where the bucket has no versions."""
    return version_id if version_id is not None else f"etag:{etag}:{size_bytes}"


def is_supported(key: bytes) -> bool:
    """Tell whether a key can be archived: valid UTF-8, at most 1,024 bytes, no NUL (which Postgres text cannot hold)."""
    if not key or len(key) > MAX_KEY_BYTES or b"\0" in key:
        return False
    try:
        key.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


SNAPSHOT_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("version_id", pa.string()),
        pa.field("etag", pa.string(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("last_modified", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("storage_class", pa.string(), nullable=False),
        pa.field("checksum", pa.string(), nullable=False),
        pa.field("object_version", pa.string(), nullable=False),
    ]
)
"""A snapshot: sorted by key (bytes), then last_modified. Fields as in `S3Object`."""

STANDING_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("object_version", pa.string(), nullable=False),
        pa.field("standing", pa.string(), nullable=False),  # "located", "claimed", "skipped"
        pa.field("reason", pa.string()),  # of a skip
        pa.field("due", pa.bool_(), nullable=False),  # a skip that may be planned again now; False for the others
    ]
)
"""What the ledger knows of a source's objects. For an unsupported key, `key` holds its percent-encoded form."""
