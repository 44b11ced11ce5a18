"""Cuts the objects to archive into chunks, greedily in key order.

A chunk ends before the object that would lift its size, without the manifest, over the target. The
manifest's size is an estimate, since listings have no headers, so it ends a chunk at the hard limit
only. An object that no chunk can hold is split over the first chunks. Files and hash are a pure
function of delta, source and terms. Source: "A chunk" in docs/explanation/design.md.
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
from caf_pipeline.inventory.chunk_sizes import (
    MAX_HEADERS_BYTES,
    NameCollisions,
    OpenChunk,
    PlanRows,
    fit_alone,
)
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
from caf_pipeline.system.pipeline_threads import prefetch_next

MAX_CHUNKS: Final = 99_999
"""A chunk's number has five digits."""

# Values in the place of a chunk number.
_TOO_LARGE: Final = 0
_LEFT_OVER: Final = -1  # beyond the plan's last chunk
_IN_PARTS: Final = -2

_MAX_OVERHEAD_BYTES: Final = 1 << 20
"""Upper bound of the size beside a chunk's only object."""

_Flags = np.ndarray[Any, np.dtype[np.bool_]]
_ChunkNumbers = np.ndarray[Any, np.dtype[np.int32]]


def _free_name(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "~"
    return name


def _part_member(obj: S3Object, part: PartRange) -> str:
    return f"{obj.key.decode()}~caf-p-{part.number}-{part.count}"


def _part_manifest_bound(obj: S3Object, part: PartRange) -> int:
    row = manifest_row_bound(obj.key, obj.version_id, obj.etag)
    row += len(_part_member(obj, part)) - len(obj.key)
    row += REWRITTEN_BYTES if obj.rewritten_at else 0
    return MANIFEST_FIXED_BYTES + MANIFEST_GROUP_BYTES + PART_BYTES + row


def _chunk_of_part(obj: S3Object, part: PartRange, number: int) -> tuple[ChunkPlan, str]:
    member, index = _part_member(obj, part), IndexBuilder()
    end_byte = HEAD_SIZE_BYTES + part.size_bytes
    manifest_end_byte = end_byte + _part_manifest_bound(obj, part)
    index.add(HEAD_MEMBER, 0, HEAD_SIZE_BYTES)
    index.add(member, HEAD_SIZE_BYTES, end_byte)
    index.add(MANIFEST_MEMBER, end_byte, manifest_end_byte)
    size_bytes = manifest_end_byte + index.index_size_bytes + FOOTER_SIZE_BYTES
    return ChunkPlan(number, 1, part.size_bytes, size_bytes, HEAD_MEMBER, MANIFEST_MEMBER), member


_MIN_ROWS: Final = 64
"""Tried at a chunk's beginning and end. In between, the number grows fourfold."""


class _Cutter:
    def __init__(self, terms: PlanTerms) -> None:
        self.chunks: list[ChunkPlan] = []
        self.too_large_count = 0
        self.leftover_count = 0
        self.part_count = 0
        self.last_size_bytes = 0  # of the last chunk, without its manifest
        self.max_bytes = max(terms.limits.max_bytes, terms.limit_bytes)
        # Every object up to this size fits in a chunk.
        self._safe_bytes = terms.limits.max_bytes - _MAX_OVERHEAD_BYTES
        self._terms = terms
        self._max_chunks = terms.max_chunks or MAX_CHUNKS
        self._number = 1
        self._chunk = OpenChunk(terms.limits)
        self._names = NameCollisions()
        settings = {
            "format": CHUNK_FORMAT,
            "source": terms.source,
            "archive": terms.archive_id,
            "target_size_bytes": terms.target_size_bytes,
            "limit_size_bytes": terms.limit_bytes,
        }
        self._hash = hashlib.sha256(json.dumps(settings, sort_keys=True).encode() + b"\n")
        self._hash_before_last = self._hash  # without the last chunk
        self._split: set[tuple[bytes, str]] = set()  # keys and object versions

    @property
    def split_count(self) -> int:
        return len(self._split)

    @property
    def only_parts(self) -> bool:
        return not self.chunks or self.chunks[-1].chunk_number == self.part_count

    def groups_with_larger(self, file: pq.ParquetFile) -> list[int]:
        column = file.schema_arrow.get_field_index("size_bytes")
        statistics = (
            file.metadata.row_group(group).column(column).statistics
            for group in range(file.num_row_groups)
        )
        return [
            group
            for group, sizes in enumerate(statistics)
            if sizes is None or not sizes.has_min_max or sizes.max > self._safe_bytes
        ]

    def larger(self, batch: pa.RecordBatch) -> list[dict[str, Any]]:
        candidates = batch.filter(pc.greater(batch["size_bytes"], self._safe_bytes))
        rows = PlanRows(candidates, None, self.max_bytes)
        return rows.of(np.flatnonzero(~fit_alone(rows, self._terms.limits))) if rows.count else []

    def split(self, obj: S3Object) -> list[dict[str, Any]]:
        """Assign a chunk to each part; returns the columns that PLANNED_PARTS_SCHEMA adds.

        No rows if this plan cannot split the object. All calls precede `cut`.
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
        """Return parts whose chunks stay within the limits; empty if impossible.

        They exceed the target only if it needs more than MAX_CHUNKS chunks.
        """
        terms = self._terms
        limits = terms.limits
        # The part with the longest numbers has the most bytes beside the object's.
        longest = PartRange(MAX_CHUNKS, MAX_CHUNKS, 0, limits.max_bytes)
        chunk, _ = _chunk_of_part(obj, longest, MAX_CHUNKS)
        overhead = chunk.expected_size_bytes - longest.size_bytes
        manifest = _part_manifest_bound(obj, longest)
        max_bytes = min(terms.limit_bytes, limits.max_bytes) - MAX_HEADERS_BYTES
        room = min(
            max(terms.target_size_bytes + manifest - overhead, -(-obj.size_bytes // MAX_CHUNKS)),
            max_bytes - overhead,
        )
        index_bytes = overhead - manifest - HEAD_SIZE_BYTES - FOOTER_SIZE_BYTES
        if (
            not 0 < obj.size_bytes <= room * MAX_CHUNKS
            or index_bytes > limits.max_index_bytes
            or limits.max_members < 3
        ):
            return []
        return cut_into_parts(obj.size_bytes, room)

    def cut(self, rows: PlanRows) -> _ChunkNumbers:
        numbers: _ChunkNumbers = np.empty(rows.count, np.int32)
        fits = fit_alone(rows, self._terms.limits)
        oversized = []
        for row in rows.of(np.flatnonzero(~fits)):
            obj = s3_object(row)
            if (obj.key, obj.object_version) in self._split:
                oversized.append(_IN_PARTS)
            else:
                oversized.append(_LEFT_OVER if self._ranges(obj) else _TOO_LARGE)
        self._names.add_batch(rows)
        position, size = 0, _MIN_ROWS
        # Stops at oversized rows, although the open chunk might have room for them.
        for stop in (*np.flatnonzero(~fits), rows.count):
            while position < stop and self._number <= self._max_chunks:
                count = self._take(rows, position, min(stop, position + size))
                if count:
                    numbers[position : position + count] = self._number
                    position += count
                    size = 4 * size if count == size else _MIN_ROWS
                else:
                    self.close()
                    size = _MIN_ROWS
            if self._number > self._max_chunks:
                break
            position = int(stop) + 1
        numbers[position:] = _LEFT_OVER
        numbers[~fits] = oversized
        self.too_large_count += int(np.count_nonzero(numbers == _TOO_LARGE))
        self.leftover_count += int(np.count_nonzero(numbers == _LEFT_OVER))
        self._names.keep(rows, numbers == self._number)
        return numbers

    def _take(self, rows: PlanRows, first: int, stop: int) -> int:
        if self._names.collides(rows, first):
            return 0
        stop = self._names.next_after(first, otherwise=stop)
        sizes = self._chunk.sizes_with(rows, first, stop)
        count = self._chunk.fitting(sizes, self._terms.target_size_bytes, self._terms.limit_bytes)
        if not self._chunk.object_count:
            count = max(count, 1)  # an object larger than the target has a chunk to itself
            self._hash_before_last = self._hash.copy()
        if count:
            self._chunk.take(sizes, rows, first, count)
            self._names.take(rows, first)
            ends, hashed = rows.hashed
            self._hash.update(hashed[ends[first] : ends[first + count]])
        return count

    def close(self) -> None:
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
        self._chunk = OpenChunk(self._terms.limits)
        self._names.clear()

    def digest(self) -> bytes:
        return self._hash.digest()

    def take_last(self) -> ChunkPlan:
        self._hash = self._hash_before_last
        return self.chunks.pop()


_WRITER_OPTIONS: Final[dict[str, Any]] = {
    "compression": "zstd",
    "use_dictionary": ["storage_class", "checksum", "chunk_number"],
    "write_page_checksum": True,
}
"""Page checksums, because chunks may be packed weeks later. Columns of distinct values have no
dictionary, which saves a quarter of the time.
"""


def write_plan(delta: Path, folder: Path, terms: PlanTerms) -> Plan:
    """Cut `delta` into the files of a plan in `folder`, which exists.

    `delta` has SNAPSHOT_SCHEMA, sorted, with supported keys. Memory is bounded by three row groups,
    plus chunks and the identities of split objects.
    """
    cutter = _Cutter(terms)
    metadata = {PLAN_METADATA_KEY: json.dumps(_described(terms)).encode()}
    with (
        pq.ParquetFile(delta) as file,
        pq.ParquetWriter(
            folder / OBJECTS_FILE, PLAN_SCHEMA.with_metadata(metadata), **_WRITER_OPTIONS
        ) as objects,
        pq.ParquetWriter(
            folder / TOO_LARGE_FILE, SNAPSHOT_SCHEMA.with_metadata(metadata), **_WRITER_OPTIONS
        ) as too_large,
    ):
        _split_all(cutter, file, folder, objects, metadata)
        batches = file.iter_batches(batch_size=ROWS_PER_BATCH)
        for planned, oversized in prefetch_next(_assigned(cutter, batches)):
            if planned.num_rows:
                objects.write_batch(planned)
            if oversized.num_rows:
                too_large.write_batch(oversized)
    cutter.close()
    # The last chunk waits if it is small, and has no object that is older than `waits_since`.
    tail: WaitingTail | None = None
    last_is_whole = not cutter.leftover_count and not cutter.only_parts
    if last_is_whole and cutter.last_size_bytes < terms.min_chunk_size_bytes:
        with pq.ParquetFile(folder / OBJECTS_FILE) as file:
            times = chunk_batches(file, cutter.chunks[-1].chunk_number, ["last_modified"])
            oldest: datetime = min(
                pc.min(batch["last_modified"]).as_py() for batch in times if batch.num_rows
            )
        if terms.waits_since is None or oldest > terms.waits_since:
            tail = WaitingTail(cutter.take_last(), oldest)
    content_sha256 = cutter.digest()
    described = _described(terms) | {"content_sha256": content_sha256.hex()}
    metadata = {PLAN_METADATA_KEY: json.dumps(described).encode()}
    chunks = pa.Table.from_pylist(
        [asdict(chunk) for chunk in cutter.chunks], schema=CHUNKS_SCHEMA.with_metadata(metadata)
    )
    pq.write_table(chunks, folder / CHUNKS_FILE, **_WRITER_OPTIONS)
    write_sums(folder)
    return Plan(
        folder,
        content_sha256,
        cutter.chunks,
        cutter.too_large_count,
        cutter.leftover_count,
        tail,
        cutter.split_count,
        cutter.part_count,
    )


def _split_all(
    cutter: _Cutter,
    file: pq.ParquetFile,
    folder: Path,
    objects: pq.ParquetWriter,
    metadata: Mapping[bytes, bytes],
) -> None:
    with contextlib.ExitStack() as opened:
        parts: pq.ParquetWriter | None = None
        for batch in file.iter_batches(
            batch_size=ROWS_PER_BATCH, row_groups=cutter.groups_with_larger(file)
        ):
            for row in cutter.larger(batch):
                new_parts = cutter.split(s3_object(dict(row)))
                if not new_parts:
                    continue
                if parts is None:
                    schema = PLANNED_PARTS_SCHEMA.with_metadata(metadata)
                    parts = opened.enter_context(
                        pq.ParquetWriter(folder / PARTS_FILE, schema, **_WRITER_OPTIONS)
                    )
                parts.write_table(
                    pa.Table.from_pylist([row | part for part in new_parts], PLANNED_PARTS_SCHEMA)
                )
                whole = row | {
                    "chunk_number": new_parts[0]["chunk_number"],
                    "member": row["key"].decode(),
                }
                objects.write_table(pa.Table.from_pylist([whole], PLAN_SCHEMA))


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


def _assigned(
    cutter: _Cutter, batches: Iterator[pa.RecordBatch]
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    # A batch is held back until the row that follows its last one is known.
    held = empty = pa.RecordBatch.from_pylist([], PLAN_SCHEMA)
    for batch, following in pairwise(
        chain((batch for batch in batches if batch.num_rows), (None,))
    ):
        if batch is None:
            raise AssertionError("only the last of each pair can be missing")
        next_key = None if following is None else following["key"][0].as_py()
        rows = PlanRows(batch, next_key, cutter.max_bytes)
        numbers = cutter.cut(rows)
        assigned = pa.record_batch(
            [*batch.columns, pa.array(numbers), rows.members], schema=PLAN_SCHEMA
        )
        too_large = assigned.filter(pa.array(numbers == _TOO_LARGE)).select(SNAPSHOT_SCHEMA.names)
        if not (planned := numbers > _TOO_LARGE).all():
            assigned = assigned.filter(pa.array(planned))
        if assigned.num_rows:
            yield _with_names(held, assigned), too_large
            held = assigned
        else:
            yield empty, too_large
    yield _with_names(held, empty), empty.select(SNAPSHOT_SCHEMA.names)


def _with_names(rows: pa.RecordBatch, following: pa.RecordBatch) -> pa.RecordBatch:
    """Name the newest version of a key in each chunk by the key itself."""
    if not rows.num_rows:
        return rows
    is_older = pa.array(np.ones(rows.num_rows, np.bool_))
    for name in ("key", "chunk_number"):
        after = following[name][:1] if following.num_rows else pa.nulls(1, rows[name].type)
        next_values = pa.concat_arrays([rows[name][1:], after])
        is_older = pc.and_(is_older, pc.equal(rows[name], next_values))
    members = pc.if_else(is_older.fill_null(False), rows["member"], rows["key"].cast(pa.string()))
    return rows.set_column(
        rows.schema.get_field_index("member"), PLAN_SCHEMA.field("member"), members
    )
