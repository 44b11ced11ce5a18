"""What the ledger tells of a source's objects, as columns of the Parquet files that it is exported
to.
"""

from typing import Final

import pyarrow as pa

STANDING_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("object_version", pa.string(), nullable=False),
        pa.field("standing", pa.string(), nullable=False),  # "located", "claimed", "skipped"
        pa.field("reason", pa.string()),  # of a skip
        pa.field(
            "due", pa.bool_(), nullable=False
        ),  # a skip that may be planned again now; False for the others
        pa.field("last_modified", pa.timestamp("us", tz="UTC")),
    ]
)
"""What the ledger knows of a source's objects.

For an unsupported key, `key` holds its percent-encoded form.
"""

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
        pa.field("header_set", pa.binary()),  # null: not known
    ]
)
"""The locations of a source's objects, as the ledger has them.

A whole object has `part` and `part_count` 0; parts count from 1.
"""

EXCEPTION_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("stated_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("object_version", pa.string()),  # null: the key was gone
        pa.field(
            "last_modified", pa.timestamp("us", tz="UTC")
        ),  # the headers of this LastModified are those archived
    ]
)
"""What the bucket had as current, where the locations' LastModified tell otherwise (`current`)."""
