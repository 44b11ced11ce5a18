"""The two members of a chunk that are ours: its head, which names the chunk, and its manifest,
which describes it.

The head is the first member, a fixed 512 bytes, so that no two chunks share a root or leading
blocks. The manifest is the last, a Parquet file with one row for each object that the plan named
and the chunk accounts for, in plan order; with it the archive can be rebuilt, checked and queried
from the stored chunks alone. Source: "A chunk" in docs/reference/chunk-format.md.
"""

import json
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

HEAD_SIZE_BYTES: Final = 512
"""Room for an archive id (32), a chunk's id (50) and a version, with space for what later formats
add.
"""

CHUNK_FORMAT: Final = "caf-pipeline/6"
"""The version of what we put into a CAF: the head, the manifest's columns, the names of members.

No other version is read.
"""

MANIFEST_GROUP_ROWS: Final = 4_000
"""Rows of the manifest that are in memory at once: some 10 MB as Python has them."""

MANIFEST_FIXED_BYTES: Final = 8 * 1024
"""Upper bound of a manifest without rows: schema and key-value metadata; 4,202 bytes measured
(pyarrow 26).
"""

MANIFEST_GROUP_BYTES: Final = 8 * 1024
"""Upper bound of what a row group adds to the footer and as page headers: 27 columns, 5,134 bytes
measured.
"""

MANIFEST_ROW_BYTES: Final = 170
"""Upper bound of a row without texts: 32 + 7 × 8 of fixed width, 16 lengths and levels of 5."""

REWRITTEN_BYTES: Final = 8
"""What `rewritten_at` adds to a row that has it."""

PART_BYTES: Final = 24
"""What the columns of a part add to a row that has them: 2 × 4 and 2 × 8."""

HEADERS_ALLOWANCE_BYTES: Final = 96
"""Room that a plan leaves in each row for content type, other headers, user metadata and S3's
checksum, which no listing shows. Where they take more, the chunk is larger than planned; only at
its limit it closes earlier, see `packing.packer`.
"""

MANIFEST_SCHEMA: Final = pa.schema(
    [
        pa.field("member", pa.string()),  # null: skipped
        pa.field("key", pa.string(), nullable=False),
        pa.field("version_id", pa.string()),
        pa.field("etag", pa.string(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),  # of the whole object
        pa.field(
            "rewritten_at", pa.timestamp("us", tz="UTC")
        ),  # null: not archived before with this ETag and size
        pa.field("part", pa.int32()),  # from 1
        pa.field("part_count", pa.int32()),
        pa.field("part_start_byte", pa.int64()),  # of the object
        pa.field("part_end_byte", pa.int64()),  # exclusive
        pa.field("start_byte", pa.int64()),
        pa.field("end_byte", pa.int64()),  # exclusive
        pa.field("sha256", pa.binary(32)),
        pa.field("crc64nvme", pa.binary(8)),  # of the member's bytes, big-endian
        pa.field(
            "s3_checksum", pa.string()
        ),  # of the whole object, as `Checksum.text`; null: S3 gave none
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
"""The fields of a PartRange, in their order. All are null if the member is a whole object."""

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
"""What a manifest tells of where a chunk's objects are: a row for each member that is a whole
object.
"""

METADATA_KEY: Final = b"caf-pipeline"

LOGS_KEY: Final = b"caf-pipeline-clps"
"""The key in the Parquet file's own metadata under which the times of clp-s archives are: a JSON
list of LogTimes.
"""

LOG_BYTES: Final = 64
"""Upper bound of what one of them adds: three numbers of at most 20 digits, in brackets."""

MAX_FOOTER_BYTES: Final = 256 << 20
"""Of texts and lists in a Parquet footer: a million rows make 250 row groups of 4 KB each, and a
bad footer claims any length.
"""

MAX_TEXT_BYTES: Final = 64 << 10
"""Of one value: keys have 1,024 bytes, headers 8 KiB in all, and why an object was skipped is a
sentence.
"""

MAX_GROUP_BYTES: Final = 256 << 20
"""Of a row group as it is in memory: 4,000 rows of two keys of 1 KiB, eight texts, and S3's 2 KiB
of user metadata are below 100 MB.
"""


@dataclass(frozen=True, slots=True)
class ChunkIdentity:
    """What the head and the manifest's metadata say of a chunk.

    `plan_sha256` is the plan's full hash, `planned_objects` and `planned_bytes` are the chunk's
    part of it. If the hash is None, the manifest has none of the three.
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
    """A member that clp-s packed: where it begins in the chunk, and the first and the last time of
    its records.

    Times are milliseconds since 1970, both inclusive; None where the archive does not tell them, or
    is damaged.
    """

    start_byte: _Int64
    first_ms: _Int64 | None
    last_ms: _Int64 | None


def head_bytes(identity: ChunkIdentity) -> bytes:
    """Return the head member: one line of JSON, padded with spaces and a newline to 512 bytes."""
    text = json.dumps(
        {"format": CHUNK_FORMAT, "archive": identity.archive_id, "chunk": identity.chunk},
        separators=(",", ":"),
    )
    return text.encode().ljust(HEAD_SIZE_BYTES - 1) + b"\n"


def manifest_row_bound(key: bytes, version_id: str | None, etag: str) -> int:
    """Return the bytes that a plan reserves for one row; the member's name counted as long as the
    key.
    """
    return (
        2 * len(key)
        + len(version_id or "")
        + len(etag)
        + MANIFEST_ROW_BYTES
        + HEADERS_ALLOWANCE_BYTES
    )


IDENTITY_COLUMNS: Final = ("version_id", "etag", "size_bytes", "rewritten_at")
"""The columns that `row_identity` and `identities` need."""


def row_identity(row: Mapping[str, Any]) -> str:
    """Return the object version of a manifest's row."""
    return object_version(*(row[name] for name in IDENTITY_COLUMNS))


def identities(batch: pa.RecordBatch) -> pa.Array:
    """Return `row_identity` of each row of a batch."""
    if batch["rewritten_at"].null_count == batch.num_rows:
        return object_versions(batch)
    return pa.array(
        [row_identity(row) for row in batch.select(IDENTITY_COLUMNS).to_pylist()], pa.string()
    )


class ManifestWriter:
    """Writes rows to a Parquet file as they come, holding at most one row group in memory.

    Rows are dicts by column name; columns that are left out are null. `bound_bytes` is an upper
    bound of the finished file's size, so that a chunk can be closed before the manifest no longer
    fits. The file's metadata has the times of clp-s archives, which `add_log` takes.
    """

    def __init__(self, path: Path, identity: ChunkIdentity) -> None:
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
            path,
            MANIFEST_SCHEMA.with_metadata({METADATA_KEY: json.dumps(described).encode()}),
            compression="zstd",
        )

    def row_bound(self, row: Mapping[str, Any]) -> int:
        """Return the most bytes that this row can add to the file."""
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
        """Add one row."""
        self.bound_bytes += self.row_bound(row)
        row["inventory_time"] = self._inventory_time
        self._rows.append(row)
        self.row_count += 1
        if len(self._rows) == MANIFEST_GROUP_ROWS:
            self._flush()

    def add_log(self, log: LogTimes) -> None:
        """Add the times of a clp-s archive."""
        self._logs.append(log)
        self.bound_bytes += LOG_BYTES

    def _flush(self) -> None:
        if self._rows:
            for row in self._rows:
                row["user_metadata"] = sorted((row.get("user_metadata") or {}).items())
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=MANIFEST_SCHEMA))
            self._rows = []

    def close(self) -> None:
        """Finish the file."""
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
            with suppress(OSError):  # the error that ended the writing is the one to tell
                self._writer.close()


@dataclass(frozen=True, slots=True)
class PartLocation:
    """What a manifest has of a part: where it is, the size of the whole object, and which bytes of
    it these are.
    """

    row: LocationRow
    object_bytes: int
    part: PartRange
    crc64nvme: bytes | None
    s3_checksum: str | None
    headers: ObjectHeaders


@dataclass(frozen=True, slots=True)
class OpenedManifest:
    """A manifest that was opened and is of this format; its rows are not yet read.

    Attributes: described: the JSON object in its metadata, as it was found; nothing of it is
        believed but the format. row_count: as its footer says.
    """

    described: Mapping[str, Any]
    row_count: int
    _parquet: pq.ParquetFile

    def batches(
        self, columns: Collection[str] | None = None, *, between: tuple[str, str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows in order, at most `MANIFEST_GROUP_ROWS` at a time.

        With `between`, row groups without a key from the first to the second, both included, are
        left out.

        Raises:
            MalformedArchive: a row cannot be read; those before it were yielded.
        """
        names = list(columns) if columns else None
        with _as_malformed():
            groups = [
                number
                for number in range(self._parquet.num_row_groups)
                if between is None or self._has(number, *between)
            ]
            for batch in self._parquet.iter_batches(
                batch_size=MANIFEST_GROUP_ROWS, columns=names, row_groups=groups
            ):
                batch.validate(full=True)  # a Parquet reader takes any bytes for text
                yield batch

    def _has(self, number: int, first: str, last: str) -> bool:
        """Tell whether a row group may have a key from the first to the last."""
        keys = (
            self._parquet.metadata.row_group(number)
            .column(self._parquet.schema_arrow.get_field_index("key"))
            .statistics
        )
        return keys is None or not keys.has_min_max or (keys.min <= last and first <= keys.max)

    def rows(
        self, columns: Collection[str] | None = None, *, between: tuple[str, str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows as dicts; as `batches`."""
        for batch in self.batches(columns, between=between):
            with _as_malformed():
                rows = batch.to_pylist()
            yield from rows

    def locations(self) -> Iterator[pa.RecordBatch]:
        """Yield the members that are whole objects in batches of LOCATION_SCHEMA; as `batches`."""
        return iter(()) if self._part_row() else self.members()

    def part(self) -> "PartLocation | None":
        """Return the part that the chunk has; None where it has whole objects, or skipped the part.

        Raises:
            MalformedArchive: it is of a part and has another row, which no packing of ours writes.
        """
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
        """Return the only row of a chunk of a part; None if the chunk is one of whole objects.

        Raises as `part`.
        """
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
        """Return the times of its clp-s archives.

        Raises:
            MalformedArchive: they are nothing that a packing of ours writes.
        """
        told = (self._parquet.metadata.metadata or {}).get(LOGS_KEY)
        if told is None:
            raise MalformedArchive("the manifest has no times of logs")
        if len(told) > 2 + LOG_BYTES * self.row_count:
            raise MalformedArchive(
                f"the manifest has {len(told)} bytes of times of logs for {self.row_count} rows"
            )
        with _as_malformed():
            logs = msgspec.json.decode(told, type=list[LogTimes])
        starts = {one.start_byte for one in logs}
        if len(starts) < len(logs) or any(
            (one.first_ms is None) != (one.last_ms is None) for one in logs
        ):
            raise MalformedArchive("the manifest's times of logs are none that packing writes")
        return logs

    def members(self) -> Iterator[pa.RecordBatch]:
        """Yield all members, a part among them, in batches of LOCATION_SCHEMA: which bytes have
        which SHA-256; as `batches`.
        """
        for batch in self.batches({*LOCATION_SCHEMA.names, "skip_reason"}):
            members = batch.filter(pc.is_null(batch["skip_reason"]))
            yield pa.record_batch(
                [members[name] for name in LOCATION_SCHEMA.names], schema=LOCATION_SCHEMA
            )


def open_manifest(file: IO[bytes] | Path) -> OpenedManifest:
    """Open a manifest.

    Raises: MalformedArchive: it is no manifest of a format that this version knows, or one that no
        packing of ours writes: other
            columns, row groups too large for memory. Nothing was allocated that the file's own size
            does not cover.
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
            "the manifest has a row group that is larger than any that was ever written"
        )
    return OpenedManifest(described, row_count, parquet)


def unknown_format(member: str, found: object) -> MalformedArchive:
    """Return the error for a chunk whose head or manifest (`member`) names another format."""
    return MalformedArchive(
        f"its {member} has the format {found!r:.60}, and this version reads only '{CHUNK_FORMAT}'",
        hint="`caf list` and `caf extract` read the chunk as a CAF file",
    )


def refuse_bloated(file: Path) -> None:
    """Raise MalformedArchive where a text is longer than any that is ever written.

    In a Parquet file one long text may stand for thousands of rows; as rows they would fill the
    memory.
    """
    with _as_malformed():
        texts = [one.name for one in pq.read_schema(file) if one.type == pa.string()]
        parquet = pq.ParquetFile(file, read_dictionary=texts)
        for batch in parquet.iter_batches(batch_size=MANIFEST_GROUP_ROWS, columns=texts):
            lengths = [
                pc.max(pc.binary_length(column.dictionary)).as_py() or 0 for column in batch.columns
            ]
            if max(lengths) > MAX_TEXT_BYTES:
                raise MalformedArchive(f"the manifest has a text of {max(lengths)} bytes")


@contextmanager
def _as_malformed() -> Iterator[None]:
    """Turn every error that a Parquet reader raises on bad bytes into MalformedArchive."""
    try:
        yield
    except (pa.ArrowException, ValueError, OSError, OverflowError, RecursionError) as error:
        raise MalformedArchive(
            f"the chunk's manifest cannot be read: {str(error)[:200]}"
        ) from error
