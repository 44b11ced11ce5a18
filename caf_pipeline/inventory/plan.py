"""A plan's terms and files. Functions that read a plan raise CafError if they cannot.

objects.parquet     objects sorted by chunk, then key. Objects that wait for the next plan
                    have the number after the last chunk's. A split object is in the chunk
                    of its first part.
chunks.parquet      a row for each chunk.
parts.parquet       the parts of split objects, in chunks from 1 on; missing without any.
too_large.parquet   objects that cannot be split either.
SHA256SUMS          as sha256sum writes it.

Source: "A chunk" in docs/explanation/design.md.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.caf.archive import DEFAULT_LIMITS, Limits
from caf_pipeline.errors import CafError, first_line
from caf_pipeline.inventory.manifest import CHUNK_FORMAT
from caf_pipeline.inventory.objects import PartRange, S3Object
from caf_pipeline.inventory.snapshot import SNAPSHOT_SCHEMA, s3_object

MAX_GENERATIONS: Final = 10_000
"""Hashes tried for a plan's short name: a year of a plan and withdrawal every hour."""

ROWS_PER_BATCH: Final = 65_536
"""Some 10 MB with keys of 100 bytes."""

OBJECTS_PER_BATCH: Final = 2_048
"""Some 3 MB as Python objects."""

OBJECTS_FILE: Final = "objects.parquet"
CHUNKS_FILE: Final = "chunks.parquet"
PARTS_FILE: Final = "parts.parquet"
TOO_LARGE_FILE: Final = "too_large.parquet"
SUMS_FILE: Final = "SHA256SUMS"

PLAN_SCHEMA: Final = SNAPSHOT_SCHEMA.append(
    pa.field("chunk_number", pa.int32(), nullable=False)
).append(pa.field("member", pa.string(), nullable=False))
PLANNED_PARTS_SCHEMA: Final = pa.schema(
    [
        *PLAN_SCHEMA,
        pa.field("part", pa.int32(), nullable=False),
        pa.field("part_count", pa.int32(), nullable=False),
        pa.field("part_start_byte", pa.int64(), nullable=False),  # of the object
        pa.field("part_end_byte", pa.int64(), nullable=False),  # exclusive
    ]
)

PART_FIELDS: Final = tuple(PLANNED_PARTS_SCHEMA.names[len(PLAN_SCHEMA.names) :])

CHUNKS_SCHEMA: Final = pa.schema(
    [
        pa.field("chunk_number", pa.int32(), nullable=False),
        pa.field("object_count", pa.int64(), nullable=False),
        pa.field("object_bytes", pa.int64(), nullable=False),
        pa.field("expected_size_bytes", pa.int64(), nullable=False),
        pa.field("head_member", pa.string(), nullable=False),
        pa.field("manifest_member", pa.string(), nullable=False),
    ]
)

PLAN_METADATA_KEY: Final = b"caf-pipeline"


@dataclass(frozen=True, slots=True)
class PlanTerms:
    """The inputs of a plan beside the objects.

    `inventory_time` and `snapshot` are not part of the hash.

    Attributes:
        target_size_bytes: of a chunk of several objects, without its manifest.
        limits: the hard limits of the format and of Jackal.
        limit_size_bytes: with the manifest; 0: the hard limit.
        max_chunks: 0: MAX_CHUNKS. Further objects are left over.
        min_chunk_size_bytes: a smaller last chunk waits for the next plan,
        waits_since: unless it has an object last modified up to this time.
    """

    source: str
    archive_id: str
    target_size_bytes: int
    snapshot: str
    inventory_time: datetime
    limits: Limits = DEFAULT_LIMITS
    limit_size_bytes: int = 0
    min_chunk_size_bytes: int = 0
    waits_since: datetime | None = None
    max_chunks: int = 0

    @property
    def limit_bytes(self) -> int:
        return self.limit_size_bytes or self.limits.max_bytes


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A row of `chunks.parquet`.

    `expected_size_bytes` has an upper bound of the manifest, for headers of usual length.
    """

    chunk_number: int
    object_count: int
    object_bytes: int
    expected_size_bytes: int
    head_member: str
    manifest_member: str


@dataclass(frozen=True, slots=True)
class WaitingTail:
    """A last chunk that waits for the next plan, and its oldest object's time."""

    chunk: ChunkPlan
    oldest: datetime


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan that was written to `folder`.

    `leftover_count` objects beyond the last chunk are in no file. `split_count` objects have
    `part_count` parts.
    """

    folder: Path
    content_sha256: bytes
    chunks: Sequence[ChunkPlan]
    too_large_count: int
    leftover_count: int
    waiting: WaitingTail | None = None
    split_count: int = 0
    part_count: int = 0

    def sha256(self, generation: int = 0) -> bytes:
        """Return the hash over the content and how often it was planned before."""
        return _full_hash(self.content_sha256, generation)

    @property
    def object_count(self) -> int:
        return sum(chunk.object_count for chunk in self.chunks) - self.part_count + self.split_count

    @property
    def object_bytes(self) -> int:
        return sum(chunk.object_bytes for chunk in self.chunks)


def _full_hash(content_sha256: bytes, generation: int) -> bytes:
    return hashlib.sha256(content_sha256 + b"%d" % generation).digest()


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """An object of a chunk, or a `part` of it, and its name there."""

    object: S3Object
    member: str
    part: PartRange | None = None

    @property
    def start_byte(self) -> int:
        return self.part.start_byte if self.part else 0

    @property
    def size_bytes(self) -> int:
        return self.part.size_bytes if self.part else self.object.size_bytes


def read_terms(folder: Path) -> dict[str, str]:
    """Return the metadata in a plan's files."""
    with _opened(folder / CHUNKS_FILE) as file:
        return _terms_of(file)


def plan_hash(terms: Mapping[str, str], name: str) -> bytes | None:
    """Return the full hash for a short name; None after MAX_GENERATIONS plans of it."""
    content_sha256 = bytes.fromhex(terms["content_sha256"])
    hashes = (_full_hash(content_sha256, generation) for generation in range(MAX_GENERATIONS))
    return next((sha256 for sha256 in hashes if sha256.hex().startswith(name)), None)


def read_chunk_plan(folder: Path, number: int) -> ChunkPlan:
    """Return one chunk of a plan."""
    with _opened(folder / CHUNKS_FILE) as file:
        table = file.read()
    rows = table.filter(pc.equal(table["chunk_number"], number)).to_pylist()
    if len(rows) != 1:
        raise CafError(f"the plan in {folder} has no chunk {number}")
    return ChunkPlan(**rows[0])


def read_chunk_objects(folder: Path, number: int) -> Iterator[PlannedObject]:
    """Yield a chunk's objects in plan order."""
    if (part := _read_part(folder, number, PLANNED_PARTS_SCHEMA.names)) is not None:
        yield from map(_planned_object, part.to_pylist())
        return
    for batch in read_chunk_batches(folder, number, PLAN_SCHEMA.names):
        yield from map(_planned_object, batch.to_pylist())


def holds_part(folder: Path, number: int) -> bool:
    """Return whether a chunk has a part of an object."""
    return _read_part(folder, number, ("chunk_number",)) is not None


def read_parts(folder: Path) -> Iterator[tuple[int, PlannedObject]]:
    """Yield each part with its chunk's number, in order."""
    if (folder / PARTS_FILE).exists():
        with _opened(folder / PARTS_FILE) as file:
            for batch in file.iter_batches(batch_size=OBJECTS_PER_BATCH):
                for row in batch.to_pylist():
                    yield row["chunk_number"], _planned_object(row)


def split_counts(folder: Path) -> tuple[int, int]:
    """Count split objects and their parts."""
    if not (folder / PARTS_FILE).exists():
        return 0, 0
    with _opened(folder / PARTS_FILE) as file:
        numbers = file.read(columns=["part"])["part"]
    return pc.sum(pc.equal(numbers, 1)).as_py(), len(numbers)


def _read_part(folder: Path, number: int, columns: Sequence[str]) -> pa.RecordBatch | None:
    if not (folder / PARTS_FILE).exists():
        return None
    with _opened(folder / PARTS_FILE) as file:
        if not 1 <= number <= file.metadata.num_rows:
            return None
        groups = [group for group, _ in _groups_of(file, number)]
        for batch in file.iter_batches(
            row_groups=groups, columns=list(dict.fromkeys([*columns, "chunk_number"]))
        ):
            part = batch.filter(pc.equal(batch["chunk_number"], number))
            if part.num_rows:
                return part
    raise CafError(f"the plan in {folder} has no chunk {number}")


def read_chunk_batches(
    folder: Path, number: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield these columns of a chunk's objects in plan order."""
    if (part := _read_part(folder, number, columns)) is not None:
        yield part
        return
    with _opened(folder / OBJECTS_FILE) as file:
        yield from chunk_batches(file, number, columns)


def chunk_batches(
    file: pq.ParquetFile, number: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield a chunk's whole objects from a plan's open file."""
    groups = [group for group, _ in _groups_of(file, number)]
    needed = dict.fromkeys([*columns, "chunk_number"])
    for batch in file.iter_batches(
        batch_size=OBJECTS_PER_BATCH, row_groups=groups, columns=list(needed)
    ):
        yield batch.filter(pc.equal(batch["chunk_number"], number))


def count_chunk_objects(folder: Path, number: int) -> int:
    """Count a chunk's objects."""
    if holds_part(folder, number):
        return 1
    with _opened(folder / OBJECTS_FILE) as file:
        groups = list(_groups_of(file, number))
        shared = [group for group, whole in groups if not whole]
        batches = file.iter_batches(row_groups=shared, columns=["chunk_number"])
        counts = [file.metadata.row_group(group).num_rows for group, whole in groups if whole]
        counts += [
            pc.sum(pc.equal(batch["chunk_number"], number)).as_py() or 0 for batch in batches
        ]
    return sum(counts)


CLAIM_COLUMNS: Final = [
    "chunk_number",
    "key",
    "object_version",
    "version_id",
    "etag",
    "size_bytes",
    "last_modified",
]


def read_identities(folder: Path) -> Iterator[pa.RecordBatch]:
    """Yield CLAIM_COLUMNS of every object in a plan's chunks.

    A split object appears once, in the chunk of its first part.
    """
    with _opened(folder / CHUNKS_FILE) as file:
        last = file.metadata.num_rows
    with _opened(folder / OBJECTS_FILE) as file:
        for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=CLAIM_COLUMNS):
            yield batch.filter(pc.less_equal(batch["chunk_number"], last))


def verify_plan(folder: Path) -> None:
    """Compare a plan's files with their checksums, which DuckDB does not do."""
    if (folder / PARTS_FILE).exists():
        with _opened(folder / PARTS_FILE):
            pass
    with _opened(folder / CHUNKS_FILE), _opened(folder / OBJECTS_FILE) as file:
        for _ in file.iter_batches(batch_size=ROWS_PER_BATCH):
            pass


def read_waiting(plan: Plan) -> Iterator[S3Object]:
    """Yield the objects that wait, in key order."""
    if plan.waiting:
        yield from (
            planned.object
            for planned in read_chunk_objects(plan.folder, plan.waiting.chunk.chunk_number)
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        lines = path.with_name(SUMS_FILE).read_text().splitlines()
        sums = {name: sha256 for sha256, _, name in (line.partition("  ") for line in lines)}
        stat = path.stat()
        if sums[path.name] != _sha256_of(path, stat.st_ino, stat.st_mtime_ns, stat.st_size):
            raise ValueError(f"its SHA-256 is not the one in {SUMS_FILE}")
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if (plan_format := _terms_of(file).get("format")) != CHUNK_FORMAT:
                raise ValueError(
                    f"its format is {plan_format!r:.60}, and this version reads only "
                    f"'{CHUNK_FORMAT}'"
                )
            yield file
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise unreadable(f"the plan's file {path}", error) from error


def _terms_of(file: pq.ParquetFile) -> dict[str, str]:
    terms: dict[str, str] = json.loads(file.schema_arrow.metadata[PLAN_METADATA_KEY])
    return terms


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS for finished files."""
    sums = [f"{_sha256(path)}  {path.name}\n" for path in sorted(folder.glob("*.parquet"))]
    (folder / SUMS_FILE).write_text("".join(sums))


@lru_cache(64)
def _sha256_of(path: Path, inode: int, modified_ns: int, size_bytes: int) -> str:
    """Cached, because packing a chunk opens each plan file several times."""
    return _sha256(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unreadable(what: str, error: BaseException) -> CafError:
    """Return the error for missing or damaged files."""
    return CafError(
        f"{what} cannot be read: {first_line(error)}",
        hint="restore the folder of plans, or withdraw the plan's chunks so that their objects are "
        "planned again",
    )


def _groups_of(file: pq.ParquetFile, number: int) -> Iterator[tuple[int, bool]]:
    """Yield groups that may have a chunk's objects, and whether they have no others."""
    column = file.schema_arrow.get_field_index("chunk_number")
    for group in range(file.metadata.num_row_groups):
        statistics = file.metadata.row_group(group).column(column).statistics
        if statistics is None or not statistics.has_min_max:
            yield group, False
        elif statistics.min <= number <= statistics.max:
            yield group, statistics.min == statistics.max


def _planned_object(row: dict[str, Any]) -> PlannedObject:
    row.pop("chunk_number")
    member = row.pop("member")
    part = PartRange(*(row.pop(name) for name in PART_FIELDS)) if "part" in row else None
    return PlannedObject(s3_object(row), member, part)
