"""Cuts what is to be archived into chunks: which objects go in which chunk, under which names, and
how large it gets.

In key order, greedy under the target: a chunk takes objects until the next one would lift its size,
index and footer included and the manifest not, over the target. The manifest comes on top: its size
is known only when all headers are, so that the plan estimates it, and only the limit ends a chunk
for it. An object that is larger than the target has a chunk to itself; one that no chunk can hold
is split over the first chunks of the plan, a part each. The last chunk may wait for the next plan,
see `PlanTerms`.

Pure over its input: the same delta, source and target give the same files and the same hash.
Source: "A chunk" in docs/explanation/design.md.
"""

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, astuple
from datetime import datetime
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.caf.index import FOOTER_SIZE_BYTES, IndexBuilder
from caf_pipeline.inventory.filling import MOST_HEADERS_BYTES, EqualNames, Filling, Rows, fit_alone
from caf_pipeline.inventory.manifest import (
    CHUNK_FORMAT,
    HEAD_MEMBER,
    HEAD_SIZE_BYTES,
    MANIFEST_FIXED_BYTES,
    MANIFEST_GROUP_BYTES,
    MANIFEST_MEMBER,
    PART_BYTES,
    REWRITTEN_BYTES,
    manifest_row_bound,
)
from caf_pipeline.inventory.objects import PartRange, S3Object, cut_into_parts
from caf_pipeline.inventory.plan import (
    CHUNKS_FILE,
    CHUNKS_SCHEMA,
    OBJECTS_FILE,
    PART_FIELDS,
    PARTS_FILE,
    PLAN_METADATA_KEY,
    PLAN_SCHEMA,
    PLANNED_PARTS_SCHEMA,
    ROWS_PER_BATCH,
    TOO_LARGE_FILE,
    ChunkPlan,
    Plan,
    PlanTerms,
    WaitingTail,
    chunk_batches,
    write_sums,
)
from caf_pipeline.inventory.snapshot import SNAPSHOT_SCHEMA, s3_object
from caf_pipeline.system.ahead import one_ahead

MAX_CHUNKS: Final = 99_999
"""Of one plan, so that a chunk's number has five digits; more objects are several plans."""

_TOO_LARGE: Final = 0  # a chunk number that no chunk has
_IN_PARTS: Final = -2  # in chunks of its own, a part each
_OVER: Final = -1  # past the plan's last chunk: left for the next plan

_MOST_BESIDE_BYTES: Final = 1 << 20
"""More than a chunk of one object takes beside the object: our members, an index of three entries,
a manifest of one row.
"""

_Flags = np.ndarray[Any, np.dtype[np.bool_]]
_Places = np.ndarray[Any, np.dtype[np.int32]]
"""Chunk numbers."""


def _free_name(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "~"
    return name


def _part_member(obj: S3Object, part: PartRange) -> str:
    return f"{obj.key.decode()}~caf-p-{part.number}-{part.count}"


def _part_manifest_bound(obj: S3Object, part: PartRange) -> int:
    """Return an upper bound of the manifest of a chunk that has this part, for headers of usual
    length.
    """
    row = (
        manifest_row_bound(obj.key, obj.version_id, obj.etag)
        + len(_part_member(obj, part))
        - len(obj.key)
    )
    return (
        MANIFEST_FIXED_BYTES
        + MANIFEST_GROUP_BYTES
        + PART_BYTES
        + row
        + (REWRITTEN_BYTES if obj.rewritten_at else 0)
    )


def _chunk_of_part(obj: S3Object, part: PartRange, number: int) -> tuple[ChunkPlan, str]:
    """Return the chunk that has this part and nothing else, and the part's name in it."""
    member, end_byte, index = (
        _part_member(obj, part),
        HEAD_SIZE_BYTES + part.size_bytes,
        IndexBuilder(),
    )
    manifest_end_byte = end_byte + _part_manifest_bound(obj, part)
    index.add(HEAD_MEMBER, 0, HEAD_SIZE_BYTES)
    index.add(member, HEAD_SIZE_BYTES, end_byte)
    index.add(MANIFEST_MEMBER, end_byte, manifest_end_byte)
    size_bytes = manifest_end_byte + index.index_size_bytes + FOOTER_SIZE_BYTES
    return ChunkPlan(number, 1, part.size_bytes, size_bytes, HEAD_MEMBER, MANIFEST_MEMBER), member


_FIRST_LOOK: Final = 64
"""Rows that are looked at at once where a chunk begins, and about where it ends; four times as many
each time between.
"""


class _Cutter:
    """Gives each object, in order, its chunk number, and hashes what it gives."""

    def __init__(self, terms: PlanTerms) -> None:
        self.chunks: list[ChunkPlan] = []
        self.too_large_count = 0
        self.leftover_count = 0
        self.part_count = 0
        self.last_size_bytes = 0  # of the last chunk, as it counts towards the target
        self.most_bytes = max(
            terms.limits.max_bytes, terms.limit_bytes
        )  # no chunk has a larger object
        self._least_bytes = (
            terms.limits.max_bytes - _MOST_BESIDE_BYTES
        )  # a chunk has any object up to this size
        self._terms = terms
        self._max_chunks = terms.max_chunks or MAX_CHUNKS
        self._number = 1
        self._chunk = Filling(terms.limits)
        self._names = EqualNames()
        settings = {
            "format": CHUNK_FORMAT,
            "source": terms.source,
            "archive": terms.archive_id,
            "target_size_bytes": terms.target_size_bytes,
            "limit_size_bytes": terms.limit_bytes,
        }
        self._hash = hashlib.sha256(json.dumps(settings, sort_keys=True).encode() + b"\n")
        self._hash_before_last = self._hash  # of all chunks but the last
        self._split: set[tuple[bytes, str]] = set()  # key and object version of objects in parts

    @property
    def split_count(self) -> int:
        """Objects in parts."""
        return len(self._split)

    @property
    def only_parts(self) -> bool:
        """Whether no chunk is one of whole objects."""
        return not self.chunks or self.chunks[-1].chunk_number == self.part_count

    def groups_with_larger(self, file: pq.ParquetFile) -> list[int]:
        """Return the row groups of a delta that may have objects which no chunk can hold."""
        column = file.schema_arrow.get_field_index("size_bytes")
        statistics = (
            file.metadata.row_group(group).column(column).statistics
            for group in range(file.num_row_groups)
        )
        return [
            at
            for at, one in enumerate(statistics)
            if one is None or not one.has_min_max or one.max > self._least_bytes
        ]

    def larger(self, batch: pa.RecordBatch) -> list[dict[str, Any]]:
        """Return the rows of a delta's batch that no chunk can hold."""
        some = batch.filter(pc.greater(batch["size_bytes"], self._least_bytes))
        rows = Rows(some, None, self.most_bytes)
        return rows.of(np.flatnonzero(~fit_alone(rows, self._terms.limits))) if rows.count else []

    def split(self, obj: S3Object) -> list[dict[str, Any]]:
        """Give each part of an object that no chunk can hold a chunk; return what
        PLANNED_PARTS_SCHEMA has beside the object.

        An object that cannot be split, or not within this plan, has none. All are split before the
        first `cut`.
        """
        ranges = self._ranges(obj)
        if not ranges or self._number + len(ranges) - 1 > self._max_chunks:
            return []
        self._split.add((obj.key, obj.object_version))
        described = b"%b\0%b\0%d\0" % (obj.key, obj.object_version.encode(), obj.size_bytes)
        self._hash.update(described + b"in %d parts\0" % len(ranges))
        self._hash_before_last = self._hash.copy()
        rows = []
        for part in ranges:
            chunk, member = _chunk_of_part(obj, part, self._number)
            self.chunks.append(chunk)
            rows.append(
                {"chunk_number": self._number, "member": member}
                | dict(zip(PART_FIELDS, astuple(part), strict=True))
            )
            self._number += 1
        self.part_count += len(ranges)
        return rows

    def _ranges(self, obj: S3Object) -> list[PartRange]:
        """Return the parts of an object, none of whose chunks passes the limits; none where there
        are no such.

        None passes the target either, unless it is so small that one plan has not enough chunks for
        them.
        """
        terms = self._terms
        most = PartRange(
            MAX_CHUNKS, MAX_CHUNKS, 0, terms.limits.max_bytes
        )  # whose numbers are longest
        beside = _chunk_of_part(obj, most, MAX_CHUNKS)[0].expected_size_bytes - most.size_bytes
        manifest, limits = _part_manifest_bound(obj, most), terms.limits
        most_bytes = min(terms.limit_bytes, limits.max_bytes) - MOST_HEADERS_BYTES
        room = min(
            max(terms.target_size_bytes + manifest - beside, -(-obj.size_bytes // MAX_CHUNKS)),
            most_bytes - beside,
        )
        index_bytes = beside - manifest - HEAD_SIZE_BYTES - FOOTER_SIZE_BYTES
        if (
            not 0 < obj.size_bytes <= room * MAX_CHUNKS
            or index_bytes > limits.max_index_bytes
            or limits.max_members < 3
        ):
            return []
        return cut_into_parts(obj.size_bytes, room)

    def cut(self, rows: Rows) -> _Places:
        """Return the chunk number of each row."""
        numbers: _Places = np.empty(rows.count, np.int32)
        alone = fit_alone(rows, self._terms.limits)
        beyond = self._beyond(rows, alone)
        self._names.look_at(rows)
        at, look = 0, _FIRST_LOOK
        for stop in (
            *np.flatnonzero(~alone),
            rows.count,
        ):  # a chunk under way may have room for what none is to hold
            while at < stop and self._number <= self._max_chunks:
                count = self._take_some(rows, at, min(stop, at + look))
                if count:
                    numbers[at : at + count] = self._number
                    at, look = at + count, 4 * look if count == look else _FIRST_LOOK
                else:
                    self.close()
                    look = _FIRST_LOOK
            if self._number > self._max_chunks:
                break
            at = int(stop) + 1
        numbers[at:] = _OVER
        numbers[~alone] = beyond
        self.too_large_count += int(np.count_nonzero(numbers == _TOO_LARGE))
        self.leftover_count += int(np.count_nonzero(numbers == _OVER))
        self._names.keep(rows, numbers == self._number)
        return numbers

    def _beyond(self, rows: Rows, alone: _Flags) -> _Places:
        """Return what becomes of the rows that no chunk can hold."""
        found = []
        for row in rows.of(np.flatnonzero(~alone)):
            obj = s3_object(row)
            if (obj.key, obj.object_version) in self._split:
                found.append(_IN_PARTS)
            else:
                found.append(_OVER if self._ranges(obj) else _TOO_LARGE)
        return np.array(found, np.int32)

    def _take_some(self, rows: Rows, at: int, stop: int) -> int:
        """Let the chunk under way take rows from this one on; return how many, 0 where it cannot
        have this one.
        """
        if self._names.meets(rows, at):
            return 0
        stop = self._names.next_after(at, otherwise=stop)
        grown = self._chunk.grown(rows, at, stop)
        count = self._chunk.fitting(grown, self._terms.target_size_bytes, self._terms.limit_bytes)
        if not self._chunk.object_count:
            count = max(count, 1)  # an object larger than the target has a chunk to itself
            self._hash_before_last = self._hash.copy()
        if count:
            self._chunk.take(grown, rows, at, count)
            self._names.take(rows, at)
            ends, hashed = rows.hashed
            self._hash.update(hashed[ends[at] : ends[at + count]])
        return count

    def close(self) -> None:
        """End the chunk under way, where it has objects."""
        chunk = self._chunk
        if not chunk.object_count:
            return
        planned = ChunkPlan(
            chunk_number=self._number,
            object_count=chunk.object_count,
            object_bytes=chunk.object_bytes,
            expected_size_bytes=chunk.size_bytes + chunk.manifest,
            head_member=_free_name(HEAD_MEMBER, chunk.taken),
            manifest_member=_free_name(MANIFEST_MEMBER, chunk.taken),
        )
        self.chunks.append(planned)
        self.last_size_bytes = chunk.size_bytes
        self._number += 1
        self._chunk = Filling(self._terms.limits)
        self._names.clear()

    def digest(self) -> bytes:
        """Return the plan's hash."""
        return self._hash.digest()

    def take_last(self) -> ChunkPlan:
        """Take the last chunk out of the finished plan."""
        self._hash = self._hash_before_last
        return self.chunks.pop()


_WRITTEN: Final[dict[str, Any]] = {
    "compression": "zstd",
    "use_dictionary": ["storage_class", "checksum", "chunk_number"],
    "write_page_checksum": True,
}
"""A page of Parquet has a CRC-32 only where it is asked for; a chunk may be packed weeks after it
was planned. Values that hardly ever repeat are written without a dictionary, in a quarter less
time.
"""


def write_plan(delta: Path, folder: Path, terms: PlanTerms) -> Plan:
    """Cut the objects of `delta` (`inventory.SNAPSHOT_SCHEMA`, sorted, supported keys only) into
    `folder`, which exists.

    Memory is bounded by three row groups, whatever the number of objects; the chunks themselves,
    and the identities of objects that are split, are listed in memory.
    """
    cutter = _Cutter(terms)
    metadata = {PLAN_METADATA_KEY: json.dumps(_described(terms)).encode()}
    with (
        pq.ParquetFile(delta) as file,
        pq.ParquetWriter(
            folder / OBJECTS_FILE, PLAN_SCHEMA.with_metadata(metadata), **_WRITTEN
        ) as objects,
        pq.ParquetWriter(
            folder / TOO_LARGE_FILE, SNAPSHOT_SCHEMA.with_metadata(metadata), **_WRITTEN
        ) as too_large,
    ):
        _split_all(cutter, file, folder, objects, metadata)
        for pieces in one_ahead(_placed(cutter, file.iter_batches(batch_size=ROWS_PER_BATCH))):
            for piece, writer in zip(pieces, (objects, too_large), strict=True):
                if piece.num_rows:
                    writer.write_batch(piece)
    cutter.close()
    tail = _waiting_tail(cutter, folder, terms)
    content_sha256 = cutter.digest()
    described = _described(terms) | {"content_sha256": content_sha256.hex()}
    metadata = {PLAN_METADATA_KEY: json.dumps(described).encode()}
    chunks = pa.Table.from_pylist(
        [asdict(chunk) for chunk in cutter.chunks], schema=CHUNKS_SCHEMA.with_metadata(metadata)
    )
    pq.write_table(chunks, folder / CHUNKS_FILE, **_WRITTEN)
    write_sums(folder)
    counts = cutter.too_large_count, cutter.leftover_count
    return Plan(
        folder, content_sha256, cutter.chunks, *counts, tail, cutter.split_count, cutter.part_count
    )


def _split_all(
    cutter: _Cutter,
    file: pq.ParquetFile,
    folder: Path,
    objects: pq.ParquetWriter,
    metadata: Mapping[bytes, bytes],
) -> None:
    """Split the objects that no chunk can hold, and write the files' rows of them.

    Row groups that have none are not read.
    """
    with contextlib.ExitStack() as opened:
        parts: pq.ParquetWriter | None = None
        for batch in file.iter_batches(
            batch_size=ROWS_PER_BATCH, row_groups=cutter.groups_with_larger(file)
        ):
            for row in cutter.larger(batch):
                found = cutter.split(s3_object(dict(row)))
                if not found:
                    continue
                if parts is None:
                    schema = PLANNED_PARTS_SCHEMA.with_metadata(metadata)
                    parts = opened.enter_context(
                        pq.ParquetWriter(folder / PARTS_FILE, schema, **_WRITTEN)
                    )
                parts.write_table(
                    pa.Table.from_pylist([row | part for part in found], PLANNED_PARTS_SCHEMA)
                )
                whole = row | {
                    "chunk_number": found[0]["chunk_number"],
                    "member": row["key"].decode(),
                }
                objects.write_table(pa.Table.from_pylist([whole], PLAN_SCHEMA))


def _waiting_tail(cutter: _Cutter, folder: Path, terms: PlanTerms) -> WaitingTail | None:
    """Take the last chunk out of a plan where it is to wait for the next one."""
    if (
        cutter.leftover_count
        or cutter.only_parts
        or cutter.last_size_bytes >= terms.min_chunk_size_bytes
    ):
        return None
    with pq.ParquetFile(folder / OBJECTS_FILE) as file:
        batches = chunk_batches(file, cutter.chunks[-1].chunk_number, ["last_modified"])
        oldest: datetime = min(
            pc.min(batch["last_modified"]).as_py() for batch in batches if batch.num_rows
        )
    if terms.waits_since is not None and oldest <= terms.waits_since:
        return None
    return WaitingTail(cutter.take_last(), oldest)


def _described(terms: PlanTerms) -> dict[str, str]:
    return {
        "format": CHUNK_FORMAT,
        "source": terms.source,
        "archive": terms.archive_id,
        "snapshot": terms.snapshot,
        "inventory_time": terms.inventory_time.isoformat(),
        "target_size": str(terms.target_size_bytes),
        "limit_size": str(terms.limit_bytes),
    }


def _placed(
    cutter: _Cutter, batches: Iterator[pa.RecordBatch]
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Yield the rows of PLAN_SCHEMA, batch by batch, and those that are too large
    (SNAPSHOT_SCHEMA); either may be none.
    """
    before = none = pa.RecordBatch.from_pylist(
        [], PLAN_SCHEMA
    )  # what follows its last row in a chunk is not known yet
    for batch, following in pairwise(
        chain((batch for batch in batches if batch.num_rows), (None,))
    ):
        if batch is None:
            raise AssertionError("only the last of each pair can be missing")
        rows = Rows(
            batch, following["key"][0].as_py() if following is not None else None, cutter.most_bytes
        )
        numbers = cutter.cut(rows)
        placed = pa.record_batch(
            [*batch.columns, pa.array(numbers), rows.members], schema=PLAN_SCHEMA
        )
        too_large = placed.filter(pa.array(numbers == _TOO_LARGE)).select(SNAPSHOT_SCHEMA.names)
        if not (planned := numbers > _TOO_LARGE).all():
            placed = placed.filter(pa.array(planned))
        done, before = (_named(before, placed), placed) if placed.num_rows else (none, before)
        yield done, too_large
    yield _named(before, none), none.select(SNAPSHOT_SCHEMA.names)


def _named(rows: pa.RecordBatch, following: pa.RecordBatch) -> pa.RecordBatch:
    """Let the newest version that a chunk has of a key have the key itself: all rows have names of
    older versions.

    Only rows that are in chunks tell it: between two versions in one chunk there may be some that
    are in others, or in none.
    """
    if not rows.num_rows:
        return rows
    with_next = pa.array(np.ones(rows.num_rows, np.bool_))
    for name in ("key", "chunk_number"):
        after = following[name][:1] if following.num_rows else pa.nulls(1, rows[name].type)
        with_next = pc.and_(
            with_next, pc.equal(rows[name], pa.concat_arrays([rows[name][1:], after]))
        )
    members = pc.if_else(with_next.fill_null(False), rows["member"], rows["key"].cast(pa.string()))
    return rows.set_column(
        rows.schema.get_field_index("member"), PLAN_SCHEMA.field("member"), members
    )
