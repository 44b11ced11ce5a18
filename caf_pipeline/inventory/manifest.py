"""The two members that we add to a chunk: the head names it, the manifest describes it.

The head has a fixed size, so that no two chunks share a root or leading blocks. The manifest has a
Parquet row for each planned object, in plan order. Source: "Manifest" in
docs/reference/chunk-format.md.
"""

import io
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any, Final, NamedTuple, Self

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.errors import MalformedArchive
from caf_pipeline.inventory.headers import HEADERS, ObjectHeaders, headers_of
from caf_pipeline.inventory.location_row import LocationRow
from caf_pipeline.inventory.objects import PartRange, object_version
from caf_pipeline.inventory.snapshot import object_versions

HEAD_MEMBER: Final = ".caf/chunk"
MANIFEST_MEMBER: Final = ".caf/manifest.parquet"

ARCHIVE_ID: Final = re.compile("[0-9a-f]{32}")

HEAD_SIZE_BYTES: Final = 512
"""Room for an archive id (32), a chunk id (50), a version, and later fields."""

CHUNK_FORMAT: Final = "caf-pipeline/6"
"""Covers head, manifest columns and member names. No other version is read."""

MANIFEST_GROUP_ROWS: Final = 4_000
"""Some 10 MB as Python objects."""

MANIFEST_FIXED_BYTES: Final = 8 * 1024
"""Upper bound without rows. Measured: 4,202 bytes (pyarrow 26)."""

MANIFEST_GROUP_BYTES: Final = 8 * 1024
"""Upper bound of footer and page headers. Measured: 5,134 bytes for 27 columns."""

MANIFEST_ROW_BYTES: Final = 170
"""Upper bound without texts: 32 + 7 × 8 of fixed width, 16 lengths and levels of 5."""

REWRITTEN_BYTES: Final = 8

PART_BYTES: Final = 24
"""2 × 4 and 2 × 8."""

HEADERS_ALLOWANCE_BYTES: Final = 96
"""Reserved for headers, user metadata and S3's checksum, which listings lack. A chunk that needs
more is larger than planned.
"""

MANIFEST_SCHEMA: Final = pa.schema(
    [
        pa.field("member", pa.string()),  # null: skipped
        pa.field("key", pa.string(), nullable=False),
        pa.field("version_id", pa.string()),
        pa.field("etag", pa.string(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),  # of the whole object
        # null: not archived before with this ETag and size
        pa.field("rewritten_at", pa.timestamp("us", tz="UTC")),
        pa.field("part", pa.int32()),  # from 1
        pa.field("part_count", pa.int32()),
        pa.field("part_start_byte", pa.int64()),  # of the object
        pa.field("part_end_byte", pa.int64()),  # exclusive
        pa.field("start_byte", pa.int64()),
        pa.field("end_byte", pa.int64()),  # exclusive
        pa.field("sha256", pa.binary(32)),
        pa.field("crc64nvme", pa.binary(8)),  # of the member's bytes, big-endian
        # Of the whole object, as `Checksum.text`; null: S3 returned none.
        pa.field("s3_checksum", pa.string()),
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

PART_COLUMNS: Final = ("part", "part_count", "part_start_byte", "part_end_byte")
"""Null for a whole object."""

CHECKSUM_COLUMNS: Final = ("crc64nvme", "s3_checksum")

LOCATION_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("version_id", pa.string()),
        MANIFEST_SCHEMA.field("rewritten_at"),
        pa.field("start_byte", pa.int64(), nullable=False),
        pa.field("end_byte", pa.int64(), nullable=False),  # exclusive
        pa.field("etag", pa.string(), nullable=False),
        pa.field("last_modified", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("sha256", pa.binary(32), nullable=False),
        *(MANIFEST_SCHEMA.field(name) for name in (*CHECKSUM_COLUMNS, *HEADERS, "user_metadata")),
    ]
)

METADATA_KEY: Final = b"caf-pipeline"

LOGS_KEY: Final = b"caf-pipeline-clps"
"""The times of clp-s archives: a JSON list of LogTimes."""

LOG_BYTES: Final = 64
"""Upper bound of a LogTimes: three numbers of at most 20 digits."""

MAX_FOOTER_BYTES: Final = 256 << 20
"""A corrupt footer may declare any length. A million rows take 250 groups of 4 KB."""

MAX_TEXT_BYTES: Final = 64 << 10
"""Keys have 1,024 bytes, and all headers 8 KiB."""

MAX_GROUP_BYTES: Final = 256 << 20
"""4,000 rows of two keys of 1 KiB, eight texts and 2 KiB of metadata take less than 100 MB."""


@dataclass(frozen=True, slots=True)
class ChunkIdentity:
    """The identity of a chunk.

    The manifest has the share of the plan only with `plan_sha256`, the plan's full hash.
    """

    archive_id: str
    source: str
    chunk: str
    plan: str
    snapshot: str
    inventory_time: datetime
    plan_sha256: bytes | None = None
    planned_objects: int = 0
    planned_bytes: int = 0


_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class LogTimes(NamedTuple):
    """The start of a clp-s member, and the times of its first and last record.

    Milliseconds since 1970, both inclusive; None if the archive lacks them or is damaged.
    """

    start_byte: _Int64
    first_ms: _Int64 | None
    last_ms: _Int64 | None


def head_bytes(identity: ChunkIdentity) -> bytes:
    """Return the head member: JSON, padded with spaces and a newline to 512 bytes."""
    text = json.dumps(
        {"format": CHUNK_FORMAT, "archive": identity.archive_id, "chunk": identity.chunk},
        separators=(",", ":"),
    )
    return text.encode().ljust(HEAD_SIZE_BYTES - 1) + b"\n"


def manifest_row_bound(key: bytes, version_id: str | None, etag: str) -> int:
    """Return the bytes reserved for a row, with a member name as long as the key."""
    return (
        2 * len(key)
        + len(version_id or "")
        + len(etag)
        + MANIFEST_ROW_BYTES
        + HEADERS_ALLOWANCE_BYTES
    )


IDENTITY_COLUMNS: Final = ("version_id", "etag", "size_bytes", "rewritten_at")


def row_identity(row: Mapping[str, Any]) -> str:
    """Return a manifest row's object version."""
    return object_version(*(row[name] for name in IDENTITY_COLUMNS))


def identities(batch: pa.RecordBatch) -> pa.Array:
    """Return `row_identity` of each row."""
    if batch["rewritten_at"].null_count == batch.num_rows:
        return object_versions(batch)
    return pa.array(
        [row_identity(row) for row in batch.select(IDENTITY_COLUMNS).to_pylist()], pa.string()
    )


class ManifestWriter:
    """Writes manifest rows, with at most one row group in memory.

    Missing columns are null. `bound_bytes` is an upper bound of the finished file's size.
    """

    def __init__(self, file: IO[bytes] | io.RawIOBase | Path, identity: ChunkIdentity) -> None:
        self._logs: list[LogTimes] = []
        self.row_count = 0
        self.bound_bytes = MANIFEST_FIXED_BYTES
        self._inventory_time = identity.inventory_time
        self._rows: list[dict[str, Any]] = []
        described: dict[str, str | int] = {
            "format": CHUNK_FORMAT,
            "archive": identity.archive_id,
            "source": identity.source,
            "chunk": identity.chunk,
            "plan": identity.plan,
            "snapshot": identity.snapshot,
        }
        if identity.plan_sha256 is not None:
            described |= {
                "plan_sha256": identity.plan_sha256.hex(),
                "planned_objects": identity.planned_objects,
                "planned_bytes": identity.planned_bytes,
            }
        self._writer = pq.ParquetWriter(
            file,
            MANIFEST_SCHEMA.with_metadata({METADATA_KEY: json.dumps(described).encode()}),
            compression="zstd",
        )

    def row_bound(self, row: Mapping[str, Any]) -> int:
        texts = sum(len(value.encode()) for value in row.values() if isinstance(value, str))
        pairs = sum(
            len(k.encode()) + len(v.encode()) + 16
            for k, v in (row.get("user_metadata") or {}).items()
        )
        group = MANIFEST_GROUP_BYTES if self.row_count % MANIFEST_GROUP_ROWS == 0 else 0
        fixed = sum(
            size
            for name, size in (("rewritten_at", REWRITTEN_BYTES), ("part", PART_BYTES))
            if row.get(name) is not None
        )
        return texts + pairs + MANIFEST_ROW_BYTES + fixed + group

    def add(self, row: dict[str, Any]) -> None:
        self.bound_bytes += self.row_bound(row)
        row["inventory_time"] = self._inventory_time
        self._rows.append(row)
        self.row_count += 1
        if len(self._rows) == MANIFEST_GROUP_ROWS:
            self._flush()

    def add_log(self, log: LogTimes) -> None:
        self._logs.append(log)
        self.bound_bytes += LOG_BYTES

    def _flush(self) -> None:
        if self._rows:
            for row in self._rows:
                row["user_metadata"] = sorted((row.get("user_metadata") or {}).items())
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=MANIFEST_SCHEMA))
            self._rows = []

    def close(self) -> None:
        self._flush()
        self._writer.add_key_value_metadata({LOGS_KEY: msgspec.json.encode(self._logs)})
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer.is_open and kind is None:
            self.close()
        elif self._writer.is_open:
            with suppress(OSError):  # keep the original error
                self._writer.close()


@dataclass(frozen=True, slots=True)
class PartLocation:
    """A part's location, and its object's size."""

    row: LocationRow
    object_bytes: int
    part: PartRange
    crc64nvme: bytes | None
    s3_checksum: str | None
    headers: ObjectHeaders


@dataclass(frozen=True, slots=True)
class OpenedManifest:
    """An open manifest. Only the format in its metadata, `described`, was checked.

    Methods raise MalformedArchive for what packing never writes.
    """

    described: Mapping[str, Any]
    row_count: int
    _parquet: pq.ParquetFile

    def batches(
        self, columns: Collection[str] | None = None, *, between: tuple[str, str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows in order, at most `MANIFEST_GROUP_ROWS` at a time.

        `between` skips row groups without keys from the first to the second, both inclusive.
        """
        names = list(columns) if columns else None
        with _as_malformed():
            column = self._parquet.schema_arrow.get_field_index("key")
            groups = []
            for number in range(self._parquet.num_row_groups):
                keys = self._parquet.metadata.row_group(number).column(column).statistics
                is_known = keys is not None and keys.has_min_max
                if between and is_known and (keys.max < between[0] or keys.min > between[1]):
                    continue
                groups.append(number)
            for batch in self._parquet.iter_batches(
                batch_size=MANIFEST_GROUP_ROWS, columns=names, row_groups=groups
            ):
                batch.validate(full=True)  # a Parquet reader accepts any bytes as text
                yield batch

    def rows(
        self, columns: Collection[str] | None = None, *, between: tuple[str, str] | None = None
    ) -> Iterator[dict[str, Any]]:
        for batch in self.batches(columns, between=between):
            with _as_malformed():
                rows = batch.to_pylist()
            yield from rows

    def locations(self) -> Iterator[pa.RecordBatch]:
        return iter(()) if self._part_row() else self.members()

    def part(self) -> "PartLocation | None":
        """Return the chunk's part; None for whole objects, or if the part was skipped."""
        row = self._part_row()
        if row is None:
            return None
        members = [member for batch in self.members() for member in batch.to_pylist()]
        if not members:
            return None
        member = members[0]
        headers = headers_of({name: member.pop(name) for name in (*HEADERS, "user_metadata")})
        version = object_version(
            member["version_id"], member["etag"], row["size_bytes"], member.pop("rewritten_at")
        )
        part = PartRange(*(row[name] for name in PART_COLUMNS))
        checksums = {name: member.pop(name) for name in ("crc64nvme", "s3_checksum")}
        place = LocationRow(object_version=version, **member, header_set=headers.id)
        return PartLocation(place, row["size_bytes"], part, **checksums, headers=headers)

    def _part_row(self) -> dict[str, Any] | None:
        for batch in self.batches(PART_COLUMNS):
            if all(batch[name].null_count == batch.num_rows for name in PART_COLUMNS):
                continue
            if self.row_count != 1:
                raise MalformedArchive(
                    f"the manifest of a chunk of a part has {self.row_count} rows"
                )
            return next(self.rows(("size_bytes", *PART_COLUMNS)))
        return None

    def logs(self) -> Sequence[LogTimes]:
        encoded = (self._parquet.metadata.metadata or {}).get(LOGS_KEY)
        if encoded is None:
            raise MalformedArchive("the manifest has no times of logs")
        if len(encoded) > 2 + LOG_BYTES * self.row_count:
            raise MalformedArchive(
                f"the manifest has {len(encoded)} bytes of times of logs for {self.row_count} rows"
            )
        with _as_malformed():
            logs = msgspec.json.decode(encoded, type=list[LogTimes])
        starts = {log.start_byte for log in logs}
        if len(starts) < len(logs) or any(
            (log.first_ms is None) != (log.last_ms is None) for log in logs
        ):
            raise MalformedArchive("the manifest has contradictory times of logs")
        return logs

    def members(self) -> Iterator[pa.RecordBatch]:
        for batch in self.batches({*LOCATION_SCHEMA.names, "skip_reason"}):
            members = batch.filter(pc.is_null(batch["skip_reason"]))
            yield pa.record_batch(
                [members[name] for name in LOCATION_SCHEMA.names], schema=LOCATION_SCHEMA
            )


def open_manifest(file: IO[bytes] | Path) -> OpenedManifest:
    """Open a manifest, with no more memory than the file's own size justifies.

    Raises MalformedArchive for another format, or what packing never writes.
    """
    limits = {
        "thrift_string_size_limit": MAX_FOOTER_BYTES,
        "thrift_container_size_limit": MAX_FOOTER_BYTES,
    }
    with _as_malformed():
        parquet = pq.ParquetFile(file, **limits)
        schema = parquet.schema_arrow
        described = json.loads((schema.metadata or {}).get(METADATA_KEY, b"{}"))
        groups = [parquet.metadata.row_group(number) for number in range(parquet.num_row_groups)]
        row_count = parquet.metadata.num_rows
    if not isinstance(described, dict) or described.get("format") != CHUNK_FORMAT:
        raise unknown_format(
            "manifest", described.get("format") if isinstance(described, dict) else None
        )
    if not schema.remove_metadata().equals(MANIFEST_SCHEMA):
        raise MalformedArchive("the manifest's columns are not those of its format")
    if any(
        not 0 <= group.num_rows <= MANIFEST_GROUP_ROWS or group.total_byte_size > MAX_GROUP_BYTES
        for group in groups
    ):
        raise MalformedArchive(
            "the manifest has a row group that is larger than packing ever writes"
        )
    return OpenedManifest(described, row_count, parquet)


def unknown_format(member: str, chunk_format: object) -> MalformedArchive:
    """Return the error for an unknown format."""
    return MalformedArchive(
        f"its {member} has the format {chunk_format!r:.60}, and this version reads only "
        f"'{CHUNK_FORMAT}'",
        hint="`caf list` and `caf extract` read the chunk as a CAF file",
    )


def refuse_long_texts(file: Path) -> None:
    """Raise MalformedArchive if a text is longer than packing ever writes.

    In Parquet one long text may stand for thousands of rows.
    """
    with _as_malformed():
        texts = [column.name for column in pq.read_schema(file) if column.type == pa.string()]
        parquet = pq.ParquetFile(file, read_dictionary=texts)
        for batch in parquet.iter_batches(batch_size=MANIFEST_GROUP_ROWS, columns=texts):
            lengths = [
                pc.max(pc.binary_length(column.dictionary)).as_py() or 0 for column in batch.columns
            ]
            if max(lengths) > MAX_TEXT_BYTES:
                raise MalformedArchive(f"the manifest has a text of {max(lengths)} bytes")


@contextmanager
def _as_malformed() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, ValueError, OSError, OverflowError, RecursionError) as error:
        raise MalformedArchive(
            f"the chunk's manifest cannot be read: {str(error)[:200]}"
        ) from error
