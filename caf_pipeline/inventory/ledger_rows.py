"""The columns of the Parquet files that the ledger exports about a source's objects."""

from typing import Final

import pyarrow as pa

STANDING_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("object_version", pa.string(), nullable=False),
        pa.field("standing", pa.string(), nullable=False),  # "located", "claimed", "skipped"
        pa.field("reason", pa.string()),  # of a skip
        # A skipped object that may be planned again now. False for located and claimed objects.
        pa.field("due", pa.bool_(), nullable=False),
        pa.field("last_modified", pa.timestamp("us", tz="UTC")),
    ]
)
"""For an unsupported key, `key` is percent-encoded."""

LOCATED_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("object_version", pa.string(), nullable=False),
        pa.field("part", pa.int32(), nullable=False),
        pa.field("part_count", pa.int32(), nullable=False),
        pa.field("caf_file_id", pa.int64(), nullable=False),
        pa.field("start_byte", pa.int64(), nullable=False),  # CAF coordinates
        pa.field("end_byte", pa.int64(), nullable=False),  # exclusive
        pa.field("version_id", pa.string()),
        pa.field("etag", pa.string(), nullable=False),
        pa.field("sha256", pa.binary(), nullable=False),
        pa.field("last_modified", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("crc64nvme", pa.binary()),
        pa.field("s3_checksum", pa.string()),
        pa.field("header_set", pa.binary()),  # null: unknown
    ]
)
"""A whole object has `part` and `part_count` 0; parts count from 1."""

EXCEPTION_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("stated_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("object_version", pa.string()),  # null: the key was deleted
        # The object that was written at this time has the archived headers.
        pa.field("last_modified", pa.timestamp("us", tz="UTC")),
    ]
)
"""Current contents that the locations' LastModified does not show; see `current`."""
