"""A plan: what it is cut by, and what its files say of its chunks.

    objects.parquet     the objects, sorted by chunk, then key; row groups of bounded size. Those
                        that wait come after, under the number that follows the last chunk's. One
                        that is split is in the chunk of its first part
    chunks.parquet      one row a chunk: counts, expected size, names of our two members
    parts.parquet       only where objects are split: the parts, one a chunk, from chunk 1 on
    too_large.parquet   objects that cannot be split either
    SHA256SUMS          the SHA-256 of each file, as sha256sum writes it

`cutting` writes them.
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
"""How often the same objects may have been planned for a plan's full hash to be found from its
short name: a run an hour that withdraws all that it planned takes a year for it.
"""

ROWS_PER_BATCH: Final = 65_536
"""Rows in memory at once, and of a row group: some 10 MB with keys of 100 bytes."""

OBJECTS_PER_BATCH: Final = 2_048
"""Objects that are in memory as Python has them, where they are read one by one: some 3 MB."""

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
"""The parts of objects that are split, each with all that is known of its object."""

PART_FIELDS: Final = tuple(PLANNED_PARTS_SCHEMA.names[len(PLAN_SCHEMA.names) :])
"""The fields of a PartRange, in their order."""

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
    """What, beside the objects, a plan's bytes depend on.

    `inventory_time` and `snapshot` are told, not hashed.

    Attributes: target_size_bytes: of a chunk of several objects without its manifest. limits: of
        every chunk, the hard ones of the format and of Jackal. limit_size_bytes: of a chunk of
        several objects with its manifest; 0: as `limits` say. max_chunks: of the plan, 0 for
        MAX_CHUNKS; what is beyond is left over. min_chunk_size_bytes: a last chunk that is smaller
        without its manifest waits, unless it has an object last modified
            up to `waits_since`.
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
        """The most bytes of a chunk of several objects, for plan and packing alike."""
        return self.limit_size_bytes or self.limits.max_bytes


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One chunk of a plan, as `chunks.parquet` has it.

    `expected_size_bytes` is the whole file, the manifest counted by its upper bound for headers of
    usual length.
    """

    chunk_number: int
    object_count: int
    object_bytes: int
    expected_size_bytes: int
    head_member: str
    manifest_member: str


@dataclass(frozen=True, slots=True)
class WaitingTail:
    """What of a plan waits for the next one: `chunk` as it would be now, and since when its oldest
    object is there.
    """

    chunk: ChunkPlan
    oldest: datetime


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan as it was written to `folder`.

    `leftover_count` objects are beyond its last chunk and in no list of it. `waiting` is in no
    chunk: `read_waiting` has it. `split_count` objects are in `part_count` parts.
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
        """Return the plan's full hash: over what it plans and, where the same was planned before,
        how often.

        The same objects are planned again after their chunk was withdrawn or they were skipped.
        """
        return _full_hash(self.content_sha256, generation)

    @property
    def object_count(self) -> int:
        """Objects in all chunks, one that is split counted once."""
        return sum(chunk.object_count for chunk in self.chunks) - self.part_count + self.split_count

    @property
    def object_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(chunk.object_bytes for chunk in self.chunks)


def _full_hash(content_sha256: bytes, generation: int) -> bytes:
    return hashlib.sha256(content_sha256 + b"%d" % generation).digest()


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """One object of a chunk and the name that it has in it; where the object is split, which part
    of it the chunk has.
    """

    object: S3Object
    member: str
    part: PartRange | None = None

    @property
    def start_byte(self) -> int:
        """Where in the object the member's bytes begin."""
        return self.part.start_byte if self.part else 0

    @property
    def size_bytes(self) -> int:
        """The member's length."""
        return self.part.size_bytes if self.part else self.object.size_bytes


def read_terms(folder: Path) -> dict[str, str]:
    """Return what a plan's files say of it.

    That is format (of its chunks), source, archive, snapshot, inventory_time (ISO 8601),
    target_size and limit_size (bytes) and content_sha256 (hex).

    Raises:
        CafError: there is no readable plan in `folder`.
    """
    with _opened(folder / CHUNKS_FILE) as file:
        return _terms_of(file)


def plan_hash(terms: Mapping[str, str], name: str) -> bytes | None:
    """Return the full hash of the plan of this short name, from what its files say (`read_terms`).

    None if the same objects were planned more than MAX_GENERATIONS times.
    """
    content_sha256 = bytes.fromhex(terms["content_sha256"])
    hashes = (_full_hash(content_sha256, generation) for generation in range(MAX_GENERATIONS))
    return next((found for found in hashes if found.hex().startswith(name)), None)


def read_chunk_plan(folder: Path, number: int) -> ChunkPlan:
    """Return one chunk of a plan.

    Raises:
        CafError: there is no readable plan in `folder`, or no such chunk in it.
    """
    with _opened(folder / CHUNKS_FILE) as file:
        table = file.read()
    rows = table.filter(pc.equal(table["chunk_number"], number)).to_pylist()
    if len(rows) != 1:
        raise CafError(f"the plan in {folder} has no chunk {number}")
    return ChunkPlan(**rows[0])


def read_chunk_objects(folder: Path, number: int) -> Iterator[PlannedObject]:
    """Yield the objects of one chunk in plan order, a row group at most in memory, as Parquet has
    it.

    Raises:
        CafError: there is no readable plan in `folder`.
    """
    if (part := _read_part(folder, number, PLANNED_PARTS_SCHEMA.names)) is not None:
        yield from map(_planned_object, part.to_pylist())
        return
    for batch in read_chunk_batches(folder, number, PLAN_SCHEMA.names):
        yield from map(_planned_object, batch.to_pylist())


def holds_part(folder: Path, number: int) -> bool:
    """Tell whether a chunk of a plan is one of a part; as `read_chunk_objects`."""
    return _read_part(folder, number, ("chunk_number",)) is not None


def read_parts(folder: Path) -> Iterator[tuple[int, PlannedObject]]:
    """Yield each part that a plan has, with its chunk's number, in order; as
    `read_chunk_objects`.
    """
    if (folder / PARTS_FILE).exists():
        with _opened(folder / PARTS_FILE) as file:
            for batch in file.iter_batches(batch_size=OBJECTS_PER_BATCH):
                for row in batch.to_pylist():
                    yield row["chunk_number"], _planned_object(row)


def split_counts(folder: Path) -> tuple[int, int]:
    """Return how many objects of a plan are split, and into how many parts; as
    `read_chunk_objects`.
    """
    if not (folder / PARTS_FILE).exists():
        return 0, 0
    with _opened(folder / PARTS_FILE) as file:
        numbers = file.read(columns=["part"])["part"]
    return pc.sum(pc.equal(numbers, 1)).as_py(), len(numbers)


def _read_part(folder: Path, number: int, columns: Sequence[str]) -> pa.RecordBatch | None:
    """Return a chunk's part as a row with these columns of PLANNED_PARTS_SCHEMA; None where the
    chunk is one of whole objects.
    """
    if not (folder / PARTS_FILE).exists():
        return None
    with _opened(folder / PARTS_FILE) as file:
        if not 1 <= number <= file.metadata.num_rows:
            return None
        groups = [group for group, _ in _groups_of(file, number)]
        for batch in file.iter_batches(
            row_groups=groups, columns=list(dict.fromkeys([*columns, "chunk_number"]))
        ):
            found = batch.filter(pc.equal(batch["chunk_number"], number))
            if found.num_rows:
                return found
    raise CafError(f"the plan in {folder} has no chunk {number}")


def read_chunk_batches(
    folder: Path, number: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield the objects of one chunk in plan order, with these columns of PLAN_SCHEMA; as
    `read_chunk_objects`.
    """
    if (part := _read_part(folder, number, columns)) is not None:
        yield part
        return
    with _opened(folder / OBJECTS_FILE) as file:
        yield from chunk_batches(file, number, columns)


def chunk_batches(
    file: pq.ParquetFile, number: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield the whole objects of one chunk from a plan's open file of objects, with these columns
    of PLAN_SCHEMA.
    """
    groups = [group for group, _ in _groups_of(file, number)]
    named = dict.fromkeys([*columns, "chunk_number"])
    for batch in file.iter_batches(
        batch_size=OBJECTS_PER_BATCH, row_groups=groups, columns=list(named)
    ):
        yield batch.filter(pc.equal(batch["chunk_number"], number))


def count_chunk_objects(folder: Path, number: int) -> int:
    """Return how many objects of one chunk the plan's files hold.

    Only row groups shared with another chunk are read.

    Raises:
        CafError: there is no readable plan in `folder`.
    """
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


OF_CLAIMS: Final = [
    "chunk_number",
    "key",
    "object_version",
    "version_id",
    "etag",
    "size_bytes",
    "last_modified",
]


def read_identities(folder: Path) -> Iterator[pa.RecordBatch]:
    """Yield number of the chunk, key and identity (OF_CLAIMS) of every object in a chunk of the
    plan, in one pass.

    An object in parts is there once, in the chunk of its first part.
    """
    with _opened(folder / CHUNKS_FILE) as file:
        last = file.metadata.num_rows
    with _opened(folder / OBJECTS_FILE) as file:
        for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=OF_CLAIMS):
            yield batch.filter(pc.less_equal(batch["chunk_number"], last))


def require_undamaged(folder: Path) -> None:
    """Compare a plan's files with their checksums, which DuckDB does not do; raises as
    `read_chunk_objects`.
    """
    if (folder / PARTS_FILE).exists():
        with _opened(folder / PARTS_FILE):
            pass
    with _opened(folder / CHUNKS_FILE), _opened(folder / OBJECTS_FILE) as file:
        for _ in file.iter_batches(batch_size=ROWS_PER_BATCH):
            pass


def read_waiting(plan: Plan) -> Iterator[S3Object]:
    """Yield the objects that wait for the next plan, in key order; as `read_chunk_objects`."""
    if plan.waiting:
        yield from (
            planned.object
            for planned in read_chunk_objects(plan.folder, plan.waiting.chunk.chunk_number)
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Open one of a plan's files; damage found while it is read raises the plan's error, as does
    another format.
    """
    try:
        _require_sum(path)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if (found := _terms_of(file).get("format")) != CHUNK_FORMAT:
                raise ValueError(
                    f"it is of the format {found!r:.60}, and this version reads only "
                    f"'{CHUNK_FORMAT}'"
                )
            yield file
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise unreadable(f"the plan's file {path}", error) from error


def _terms_of(file: pq.ParquetFile) -> dict[str, str]:
    terms: dict[str, str] = json.loads(file.schema_arrow.metadata[PLAN_METADATA_KEY])
    return terms


def write_sums(folder: Path) -> None:
    """Write the SHA-256 of each of a plan's files, which are complete, beside them."""
    sums = [f"{_sha256(path)}  {path.name}\n" for path in sorted(folder.glob("*.parquet"))]
    (folder / SUMS_FILE).write_text("".join(sums))


def _require_sum(path: Path) -> None:
    """Raise ValueError or KeyError if one of a plan's files differs from what was written."""
    lines = (line.partition("  ") for line in path.with_name(SUMS_FILE).read_text().splitlines())
    written = {name: sha256 for sha256, _, name in lines}
    now = path.stat()
    if written[path.name] != _sha256_of(path, now.st_ino, now.st_mtime_ns, now.st_size):
        raise ValueError(f"its SHA-256 is not the one in {SUMS_FILE}")


@lru_cache(64)
def _sha256_of(path: Path, inode: int, modified_ns: int, size_bytes: int) -> str:
    """Return the SHA-256 of a file that has not changed since: packing a chunk opens each of a
    plan's files several times.
    """
    return _sha256(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unreadable(what: str, error: BaseException) -> CafError:
    """Return the error of a plan's files that are gone or damaged; `what` names them."""
    return CafError(
        f"{what} cannot be read: {first_line(error)}",
        hint="restore the folder of plans, or withdraw the plan's chunks so that their objects are "
        "planned again",
    )


def _groups_of(file: pq.ParquetFile, number: int) -> Iterator[tuple[int, bool]]:
    """Yield the row groups that may hold objects of a chunk, and whether they are known to hold
    nothing else.
    """
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
