"""The two members of a chunk that are ours: its head, which names the chunk, and its manifest, which describes it.

The head is the first member, a fixed 512 bytes, so that no two chunks share a root or leading blocks. The manifest is the
last, a Parquet file with one row for each object that the plan named and the chunk accounts for, in plan order; with it
the archive can be rebuilt, checked and queried from the stored chunks alone.
Not here: which objects a chunk holds (`plan`), their bytes (`pack`).
Source: "A chunk" in docs/format.md.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from caf_pipeline.errors import MalformedArchive

HEAD_MEMBER: Final = ".caf/chunk"
MANIFEST_MEMBER: Final = ".caf/manifest.parquet"

HEAD_SIZE_BYTES: Final = 512
"""Room for an archive id (32), a chunk's id (50) and a version, with space for what later formats add."""

CHUNK_FORMAT: Final = "caf-pipeline/1"
"""The version of what we put into a CAF: the head, the manifest's columns, the names of members."""

ROWS_PER_GROUP: Final = 4_000
"""Rows of the manifest that stand in memory at once: some 10 MB as Python has them."""

MANIFEST_FIXED_BYTES: Final = 8 * 1024
"""Upper bound of a manifest without rows: schema and key-value metadata; 2,884 bytes measured (pyarrow 26)."""

MANIFEST_GROUP_BYTES: Final = 8 * 1024
"""Upper bound of what a row group adds to the footer and as page headers: 20 columns, 4,100 bytes measured."""

MANIFEST_ROW_BYTES: Final = 150
"""Upper bound of a row without its texts: 32 + 6 × 8 of fixed width, 14 lengths and levels of 5."""

HEADERS_ALLOWANCE_BYTES: Final = 64
"""Room that a plan leaves in each row for content type, other headers and user metadata, which no listing shows.
Where they take more, the chunk closes earlier; see `pack`."""

MANIFEST_SCHEMA: Final = pa.schema(
    [
        pa.field("member", pa.string()),  # null: skipped
        pa.field("key", pa.string(), nullable=False),
        pa.field("version_id", pa.string()),
        pa.field("etag", pa.string(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("start_byte", pa.int64()),
        pa.field("end_byte", pa.int64()),  # exclusive
        pa.field("sha256", pa.binary(32)),
        pa.field("last_modified", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("storage_class", pa.string(), nullable=False),
        pa.field("content_type", pa.string()),
        pa.field("content_encoding", pa.string()),
        pa.field("content_language", pa.string()),
        pa.field("content_disposition", pa.string()),
        pa.field("cache_control", pa.string()),
        pa.field("expires", pa.string()),
        pa.field("user_metadata", pa.map_(pa.string(), pa.string())),
        pa.field("skip_reason", pa.string()),
        pa.field("skip_detail", pa.string()),
        pa.field("inventory_time", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)

METADATA_KEY: Final = b"caf-pipeline"


@dataclass(frozen=True, slots=True)
class ChunkIdentity:
    """What the head and the manifest's metadata say of a chunk."""

    archive_id: str
    source: str
    chunk: str
    plan: str
    snapshot: str
    inventory_time: datetime


def head_bytes(identity: ChunkIdentity) -> bytes:
    """Return the head member: one line of JSON, padded with spaces and a newline to 512 bytes."""
    text = json.dumps({"format": CHUNK_FORMAT, "archive": identity.archive_id, "chunk": identity.chunk}, separators=(",", ":"))
    return text.encode().ljust(HEAD_SIZE_BYTES - 1) + b"\n"


def manifest_row_bound(key: bytes, version_id: str | None, etag: str) -> int:
    """Return the bytes that a plan reserves for one row; the member's name counted as long as the key."""
    return 2 * len(key) + len(version_id or "") + len(etag) + MANIFEST_ROW_BYTES + HEADERS_ALLOWANCE_BYTES


class ManifestWriter:
    """Writes rows to a Parquet file as they come, holding at most one row group in memory.

    Rows are dicts by column name; columns that are left out are null. `bound_bytes` is an upper bound of the finished
    file's size, so that a chunk can be closed before the manifest no longer fits.
    """

    def __init__(self, path: Path, identity: ChunkIdentity) -> None:
        self.row_count = 0
        self.bound_bytes = MANIFEST_FIXED_BYTES
        self._inventory_time = identity.inventory_time
        self._rows: list[dict[str, Any]] = []
        described = {
            "format": CHUNK_FORMAT,
            "archive": identity.archive_id,
            "source": identity.source,
            "chunk": identity.chunk,
            "plan": identity.plan,
            "snapshot": identity.snapshot,
        }
        self._writer = pq.ParquetWriter(
            path, MANIFEST_SCHEMA.with_metadata({METADATA_KEY: json.dumps(described).encode()}), compression="zstd"
        )

    def row_bound(self, row: Mapping[str, Any]) -> int:
        """Return the most bytes that this row can add to the file."""
        texts = sum(len(value.encode()) for value in row.values() if isinstance(value, str))
        pairs = sum(len(k.encode()) + len(v.encode()) + 16 for k, v in (row.get("user_metadata") or {}).items())
        group = MANIFEST_GROUP_BYTES if self.row_count % ROWS_PER_GROUP == 0 else 0
        return texts + pairs + MANIFEST_ROW_BYTES + group

    def add(self, row: dict[str, Any]) -> None:
        """Add one row."""
        self.bound_bytes += self.row_bound(row)
        row["inventory_time"] = self._inventory_time
        self._rows.append(row)
        self.row_count += 1
        if len(self._rows) == ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            for row in self._rows:
                row["user_metadata"] = sorted((row.get("user_metadata") or {}).items())
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=MANIFEST_SCHEMA))
            self._rows = []

    def close(self) -> None:
        """Finish the file."""
        self._flush()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._writer.is_open:
            self.close()


def read_manifest(file: IO[bytes] | Path, *, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a manifest in order, as dicts, one row group in memory at a time.

    Raises:
        MalformedArchive: it is no manifest of a format that this version knows.
    """
    try:
        parquet = pq.ParquetFile(file)
        described = json.loads((parquet.schema_arrow.metadata or {}).get(METADATA_KEY, b"{}"))
    except (pa.ArrowInvalid, pa.ArrowException, ValueError, OSError) as error:
        raise MalformedArchive(f"the chunk's manifest cannot be read: {error}") from error
    if described.get("format") != CHUNK_FORMAT:
        raise MalformedArchive(
            f"the manifest's format is '{described.get('format')}', expected '{CHUNK_FORMAT}'",
            hint="a newer version of caf-pipeline may know it",
        )
    for batch in parquet.iter_batches(batch_size=ROWS_PER_GROUP, columns=list(columns) if columns else None):
        yield from batch.to_pylist()
