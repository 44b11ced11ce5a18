"""Cuts what is to be archived into chunks: which objects go in which chunk, under which names, and how large it gets.

In key order, greedy under the target: a chunk takes objects until the next one would lift its size, index and footer included
and the manifest not, over the target. The manifest comes on top: its size is known only when all headers are, so that the plan
estimates it, and only the limit ends a chunk for it. An object that is larger than the target has a chunk to itself; one that no
chunk can hold is listed apart. The last chunk may wait for the next plan, see `PlanTerms`.

    objects.parquet     the objects, sorted by chunk, then key; row groups of bounded size. Those that wait come after, under the
                        number that follows the last chunk's
    chunks.parquet      one row a chunk: counts, expected size, names of our two members
    too_large.parquet   objects that no chunk can hold

Pure over its input: the same delta, source and target give the same files and the same hash.
Source: "A chunk" in docs/design.md.
"""

import contextlib
import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.caf.archive import DEFAULT_LIMITS, Limits
from caf_pipeline.caf.index import EMPTY_INDEX_SIZE_BYTES, FOOTER_SIZE_BYTES, index_entry_size_bytes
from caf_pipeline.errors import CafError, first_line
from caf_pipeline.inventory.manifest import (
    CHUNK_FORMAT,
    HEAD_MEMBER,
    HEAD_SIZE_BYTES,
    IDENTITY_COLUMNS,
    MANIFEST_FIXED_BYTES,
    MANIFEST_GROUP_BYTES,
    MANIFEST_MEMBER,
    ROWS_PER_GROUP,
    manifest_row_bound,
)
from caf_pipeline.inventory.objects import S3Object, object_version
from caf_pipeline.inventory.snapshot import SNAPSHOT_SCHEMA, object_versions, s3_object

MAX_CHUNKS: Final = 99_999
"""Of one plan, so that a chunk's number has five digits; more objects are several plans."""

MAX_GENERATIONS: Final = 10_000
"""How often the same objects may have been planned for a plan's full hash to be found from its short name: a run an hour that
withdraws all that it planned takes a year for it."""

ROWS_PER_BATCH: Final = 65_536
"""Rows in memory at once, and of a row group: some 10 MB with keys of 100 bytes."""

OBJECTS_PER_BATCH: Final = 2_048
"""Objects that are in memory as Python has them, where they are read one by one: some 3 MB."""

OBJECTS_FILE: Final = "objects.parquet"
CHUNKS_FILE: Final = "chunks.parquet"
TOO_LARGE_FILE: Final = "too_large.parquet"

PLAN_SCHEMA: Final = SNAPSHOT_SCHEMA.append(pa.field("chunk_number", pa.int32(), nullable=False)).append(
    pa.field("member", pa.string(), nullable=False)
)
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

_METADATA_KEY: Final = b"caf-pipeline"
_TOO_LARGE: Final = 0  # a chunk number that no chunk has
_OVER: Final = -1  # past the plan's last chunk: left for the next plan


@dataclass(frozen=True, slots=True)
class PlanTerms:
    """What, beside the objects, a plan's bytes depend on. `inventory_time` and `snapshot` are told, not hashed.

    Attributes:
        target_size_bytes: of a chunk of several objects without its manifest.
        limits: of every chunk, the hard ones of the format and of Jackal.
        limit_size_bytes: of a chunk of several objects with its manifest; 0: as `limits` say.
        max_chunks: of the plan, 0 for MAX_CHUNKS; what is beyond is left over.
        min_chunk_size_bytes: a last chunk that is smaller without its manifest waits, unless it has an object last modified
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

    `expected_size_bytes` is the whole file, the manifest counted by its upper bound for headers of usual length.
    """

    chunk_number: int
    object_count: int
    object_bytes: int
    expected_size_bytes: int
    head_member: str
    manifest_member: str


@dataclass(frozen=True, slots=True)
class WaitingTail:
    """What of a plan waits for the next one: `chunk` as it would be now, and the LastModified of its oldest object."""

    chunk: ChunkPlan
    oldest: datetime


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan as it was written to `folder`.

    `leftover_count` objects are beyond its last chunk and in no list of it. `waiting` is in no chunk: `read_waiting` has it.
    """

    folder: Path
    content_sha256: bytes
    chunks: Sequence[ChunkPlan]
    too_large_count: int
    leftover_count: int
    waiting: WaitingTail | None = None

    def sha256(self, generation: int = 0) -> bytes:
        """Return the plan's full hash: over what it plans and, where the same was planned before, how often.

        The same objects are planned again after their chunk was withdrawn or they were skipped.
        """
        return _full_hash(self.content_sha256, generation)

    @property
    def object_count(self) -> int:
        """Objects in all chunks."""
        return sum(chunk.object_count for chunk in self.chunks)

    @property
    def object_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(chunk.object_bytes for chunk in self.chunks)


def _full_hash(content_sha256: bytes, generation: int) -> bytes:
    return hashlib.sha256(content_sha256 + b"%d" % generation).digest()


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """One object of a chunk and the name that it has in it."""

    object: S3Object
    member: str


_Row = tuple[bytes, str | None, str, int, str]  # key, version id, ETag, size, object version
_Sizes = tuple[int, int, int]  # end of the bodies, index, manifest


class _Chunk:
    """A chunk while it is filled: its exact size so far, and what the next object would make of it."""

    def __init__(self, number: int, limits: Limits) -> None:
        self.number = number
        self.object_count = 0
        self.object_bytes = 0
        self.labels: set[str] = set()  # of older versions: the only names that a later key could meet
        self.taken: set[str] = set()  # names like our own two
        self._position = HEAD_SIZE_BYTES
        self._manifest = MANIFEST_FIXED_BYTES
        most = limits.max_bytes
        self._index = (
            EMPTY_INDEX_SIZE_BYTES
            + index_entry_size_bytes(HEAD_MEMBER, 0, HEAD_SIZE_BYTES)
            + 1
            + index_entry_size_bytes(MANIFEST_MEMBER, most, most)
        )

    def grown(self, row: _Row, member: str) -> _Sizes:
        """Return position, index and manifest sizes as they would be with this object."""
        key, version_id, etag, size_bytes, identity = row
        end = self._position + size_bytes
        # Our own names may have to give way to this one, by a character each.
        giving_way = 2 if _is_like_ours(member) else 0
        index = self._index + index_entry_size_bytes(member, self._position, end) + 1 + giving_way
        group = MANIFEST_GROUP_BYTES if self.object_count % ROWS_PER_GROUP == 0 else 0
        told_apart = 0 if identity == object_version(version_id, etag, size_bytes) else len(identity)
        return end, index, self._manifest + group + manifest_row_bound(key, version_id, etag) + told_apart

    def fits(self, grown: _Sizes, target_bytes: int, most_bytes: int, limits: Limits) -> bool:
        """Tell whether the chunk of these sizes stays within the target but for its manifest, `most_bytes`, and the limits."""
        end, index, _ = grown
        return (
            end + index + FOOTER_SIZE_BYTES <= target_bytes
            and sum(grown) + FOOTER_SIZE_BYTES <= most_bytes
            and index <= limits.max_index_bytes
            and self.object_count + 3 <= limits.max_members
        )

    def take(self, grown: _Sizes, row: _Row, member: str) -> None:
        """Count an object in."""
        self._position, self._index, self._manifest = grown
        self.object_count += 1
        self.object_bytes += row[3]
        if "~caf-v-" in member:
            self.labels.add(member)
        if _is_like_ours(member):
            self.taken.add(member)

    @property
    def size_bytes(self) -> int:
        """Bodies, index and footer: what counts towards a target."""
        return self._position + self._index + FOOTER_SIZE_BYTES

    def finished(self) -> ChunkPlan:
        """Return the chunk as the plan records it."""
        return ChunkPlan(
            chunk_number=self.number,
            object_count=self.object_count,
            object_bytes=self.object_bytes,
            expected_size_bytes=self.size_bytes + self._manifest,
            head_member=_free_name(HEAD_MEMBER, self.taken),
            manifest_member=_free_name(MANIFEST_MEMBER, self.taken),
        )


def _is_like_ours(member: str) -> bool:
    return member.startswith(".caf/") and member.rstrip("~") in (HEAD_MEMBER, MANIFEST_MEMBER)


def _free_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "~"
    return name


class _Cutter:
    """Gives each object, in order, its chunk number and its name, and hashes what it gives."""

    def __init__(self, terms: PlanTerms) -> None:
        self.chunks: list[ChunkPlan] = []
        self.too_large_count = 0
        self.leftover_count = 0
        self._terms = terms
        self._limit_bytes = terms.limit_bytes
        self._max_chunks = terms.max_chunks or MAX_CHUNKS
        self._chunk = _Chunk(1, terms.limits)
        settings = {
            "format": CHUNK_FORMAT,
            "source": terms.source,
            "archive": terms.archive_id,
            "target_size_bytes": terms.target_size_bytes,
            "limit_size_bytes": terms.limit_bytes,
        }
        self._hash = hashlib.sha256(json.dumps(settings, sort_keys=True).encode() + b"\n")
        self._hash_before_last = self._hash  # of all chunks but the last
        self.last_size_bytes = 0  # of the last chunk, as it counts towards the target

    def cut(self, rows: Iterator[_Row]) -> Iterator[tuple[int, str]]:
        """Yield (chunk number, member) for each row."""
        earlier: tuple[int, str, str] | None = None  # chunk number, key, label of a version that has a successor
        for row, following in pairwise(chain(rows, (None,))):
            if row is None:
                raise AssertionError("only the last of each pair can be missing")
            key = row[0].decode()
            label = f"{key}~caf-v-{row[1] or row[2]}" if following is not None and following[0] == row[0] else ""
            number = self._place(row, label or key)
            if earlier:
                # The newest version that a chunk holds keeps its key, so the label waits for where the successor goes.
                yield earlier[0], earlier[2] if number == earlier[0] else earlier[1]
                earlier = None
            if label:
                earlier = number, key, label
            else:
                yield number, key

    def finish(self) -> None:
        """Close the last chunk."""
        self._close()

    def digest(self) -> bytes:
        """Return the plan's hash."""
        return self._hash.digest()

    def take_last(self) -> ChunkPlan:
        """Take the last chunk out of the finished plan."""
        self._hash = self._hash_before_last
        return self.chunks.pop()

    def _close(self) -> None:
        if self._chunk.object_count:
            self.chunks.append(self._chunk.finished())
            self.last_size_bytes = self._chunk.size_bytes
            self._chunk = _Chunk(self._chunk.number + 1, self._terms.limits)

    def _place(self, row: _Row, member: str) -> int:
        key, _, _, size_bytes, identity = row
        terms, limits = self._terms, self._terms.limits
        grown = self._chunk.grown(row, member)
        if member in self._chunk.labels or not self._chunk.fits(grown, terms.target_size_bytes, self._limit_bytes, limits):
            alone = _Chunk(0, limits)
            if not alone.fits(alone.grown(row, member), limits.max_bytes, limits.max_bytes, limits):
                self.too_large_count += 1
                return _TOO_LARGE
            self._close()
            grown = self._chunk.grown(row, member)
        if self._chunk.number > self._max_chunks:
            self.leftover_count += 1
            return _OVER
        if not self._chunk.object_count:
            self._hash_before_last = self._hash.copy()
        self._chunk.take(grown, row, member)
        self._hash.update(b"%b\0%b\0%d\0" % (key, identity.encode(), size_bytes))
        return self._chunk.number


_WRITTEN: Final[dict[str, Any]] = {"compression": "zstd", "write_page_checksum": True}
"""A page of Parquet has a CRC-32 only where it is asked for; a chunk may be packed weeks after it was planned."""


def write_plan(delta: Path, folder: Path, terms: PlanTerms) -> Plan:
    """Cut the objects of `delta` (`inventory.SNAPSHOT_SCHEMA`, sorted, supported keys only) into `folder`, which exists.

    Memory is bounded by two row groups, whatever the number of objects; the chunks themselves are listed in memory.
    """
    cutter = _Cutter(terms)
    metadata = {_METADATA_KEY: json.dumps(_described(terms)).encode()}
    waiting: deque[pa.RecordBatch] = deque()  # batches some of whose rows have no place yet
    places: list[tuple[int, str]] = []
    with (
        pq.ParquetFile(delta) as file,
        pq.ParquetWriter(folder / OBJECTS_FILE, PLAN_SCHEMA.with_metadata(metadata), **_WRITTEN) as objects,
        pq.ParquetWriter(folder / TOO_LARGE_FILE, SNAPSHOT_SCHEMA.with_metadata(metadata), **_WRITTEN) as too_large,
    ):
        for place in cutter.cut(_rows(file, waiting)):
            places.append(place)
            if len(places) == waiting[0].num_rows:
                _write_batch(waiting.popleft(), places, objects, too_large)
                places = []
    cutter.finish()
    tail = _waiting_tail(cutter, folder, terms)
    content_sha256 = cutter.digest()
    described = _described(terms) | {"content_sha256": content_sha256.hex()}
    metadata = {_METADATA_KEY: json.dumps(described).encode()}
    chunks = pa.Table.from_pylist([asdict(chunk) for chunk in cutter.chunks], schema=CHUNKS_SCHEMA.with_metadata(metadata))
    pq.write_table(chunks, folder / CHUNKS_FILE, **_WRITTEN)
    return Plan(folder, content_sha256, cutter.chunks, cutter.too_large_count, cutter.leftover_count, tail)


def _waiting_tail(cutter: _Cutter, folder: Path, terms: PlanTerms) -> WaitingTail | None:
    """Take the last chunk out of a plan where it is to wait for the next one."""
    if cutter.leftover_count or not cutter.chunks or cutter.last_size_bytes >= terms.min_chunk_size_bytes:
        return None
    batches = read_chunk_batches(folder, cutter.chunks[-1].chunk_number, ["last_modified"])
    oldest: datetime = min(pc.min(batch["last_modified"]).as_py() for batch in batches if batch.num_rows)
    if terms.waits_since is not None and oldest <= terms.waits_since:
        return None
    return WaitingTail(cutter.take_last(), oldest)


def _described(terms: PlanTerms) -> dict[str, str]:
    return {
        "source": terms.source,
        "archive": terms.archive_id,
        "snapshot": terms.snapshot,
        "inventory_time": terms.inventory_time.isoformat(),
        "target_size": str(terms.target_size_bytes),
        "limit_size": str(terms.limit_bytes),
    }


def _rows(file: pq.ParquetFile, waiting: deque[pa.RecordBatch]) -> Iterator[_Row]:
    for batch in file.iter_batches(batch_size=ROWS_PER_BATCH):
        if batch.num_rows:
            waiting.append(batch)
            names = ("key", "version_id", "etag", "size_bytes", "object_version")
            yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)


def _write_batch(
    batch: pa.RecordBatch, places: Sequence[tuple[int, str]], objects: pq.ParquetWriter, too_large: pq.ParquetWriter
) -> None:
    numbers = pa.array([number for number, _ in places], pa.int32())
    members = pa.array([member for _, member in places], pa.string())
    table = pa.Table.from_batches([batch]).append_column(PLAN_SCHEMA.field("chunk_number"), numbers)
    table = table.append_column(PLAN_SCHEMA.field("member"), members)
    objects.write_table(table.filter(pc.greater(numbers, _TOO_LARGE)).cast(PLAN_SCHEMA))
    refused = table.filter(pc.equal(numbers, _TOO_LARGE)).select(SNAPSHOT_SCHEMA.names)
    too_large.write_table(refused.cast(SNAPSHOT_SCHEMA))


def read_terms(folder: Path) -> dict[str, str]:
    """Return what a plan's files say of it.

    That is source, archive, snapshot, inventory_time (ISO 8601), target_size and limit_size (bytes) and content_sha256 (hex).
    Plans that were written before these were kept have no target_size, no content_sha256 or no limit_size.

    Raises:
        CafError: there is no readable plan in `folder`.
    """
    with _opened(folder / CHUNKS_FILE) as file:
        described: dict[str, str] = json.loads(file.schema_arrow.metadata[_METADATA_KEY])
    return described


def plan_hash(terms: Mapping[str, str], name: str) -> bytes | None:
    """Return the full hash of the plan of this short name, from what its files say (`read_terms`).

    None for a plan whose files do not tell, as those of earlier versions: what is packed of it must stay as it was.
    """
    if "content_sha256" not in terms:
        return None
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
    """Yield the objects of one chunk in plan order, a row group at most in memory, as Parquet has it.

    Raises:
        CafError: there is no readable plan in `folder`.
    """
    for batch in read_chunk_batches(folder, number, PLAN_SCHEMA.names):
        yield from map(_planned_object, batch.to_pylist())


def read_chunk_batches(folder: Path, number: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the objects of one chunk in plan order, with these columns of PLAN_SCHEMA; as `read_chunk_objects`."""
    with _opened(folder / OBJECTS_FILE) as file:
        groups = [group for group, _ in _groups_of(file, number)]
        named = dict.fromkeys([*columns, "chunk_number"])
        for batch in file.iter_batches(batch_size=OBJECTS_PER_BATCH, row_groups=groups, columns=list(named)):
            yield batch.filter(pc.equal(batch["chunk_number"], number))


def count_chunk_objects(folder: Path, number: int) -> int:
    """Return how many objects of one chunk the plan's files hold. Only row groups shared with another chunk are read.

    Raises:
        CafError: there is no readable plan in `folder`.
    """
    with _opened(folder / OBJECTS_FILE) as file:
        groups = list(_groups_of(file, number))
        shared = [group for group, whole in groups if not whole]
        batches = file.iter_batches(row_groups=shared, columns=["chunk_number"])
        counts = [file.metadata.row_group(group).num_rows for group, whole in groups if whole]
        counts += [pc.sum(pc.equal(batch["chunk_number"], number)).as_py() or 0 for batch in batches]
    return sum(counts)


def has_rewritten(folder: Path, number: int) -> bool:
    """Tell whether an object of one chunk has an identity that version id, ETag and size do not tell; as `read_chunk_objects`."""
    batches = read_chunk_batches(folder, number, IDENTITY_COLUMNS)
    return any(pc.any(pc.not_equal(batch["object_version"], object_versions(batch))).as_py() for batch in batches)


def read_identities(folder: Path) -> Iterator[pa.RecordBatch]:
    """Yield `chunk_number`, `key`, `object_version` and `last_modified` of every object in a chunk of the plan, in one pass."""
    columns = ["chunk_number", "key", "object_version", "last_modified"]
    with _opened(folder / CHUNKS_FILE) as file:
        last = file.metadata.num_rows
    with _opened(folder / OBJECTS_FILE) as file:
        for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=columns):
            yield batch.filter(pc.less_equal(batch["chunk_number"], last))


def read_waiting(plan: Plan) -> Iterator[S3Object]:
    """Yield the objects that wait for the next plan, in key order; as `read_chunk_objects`."""
    if plan.waiting:
        yield from (planned.object for planned in read_chunk_objects(plan.folder, plan.waiting.chunk.chunk_number))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Open one of a plan's files; damage found while it is read raises the plan's error."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise CafError(
            f"the plan's file {path} cannot be read: {first_line(error)}",
            hint="restore the folder of plans, or withdraw the plan's chunks so that their objects are planned again",
        ) from error


def _groups_of(file: pq.ParquetFile, number: int) -> Iterator[tuple[int, bool]]:
    """Yield the row groups that may hold objects of a chunk, and whether they are known to hold nothing else."""
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
    return PlannedObject(s3_object(row), member)
