"""Compares a chunk's manifest with its part of the plan and with its index.

Memory is one batch of manifest and plan. Source: promise 2 in docs/explanation/design.md.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from caf_pipeline.inventory.manifest import IDENTITY_COLUMNS, PART_COLUMNS, identities
from caf_pipeline.inventory.plan import (
    PLAN_SCHEMA,
    count_chunk_objects,
    holds_part,
    read_chunk_batches,
    read_chunk_objects,
)
from caf_pipeline.reading.chunk_reader import ChunkFile
from caf_pipeline.records import Chunk
from caf_pipeline.system.quantities import counted

ACCOUNT_COLUMNS: Final = (
    "member",
    "key",
    *IDENTITY_COLUMNS,
    *PART_COLUMNS,
    "start_byte",
    "end_byte",
    "skip_reason",
)
"""The manifest's columns for `ChunkAuditor`."""

LARGEST_SHOWN: Final = 10

_PLAN_COLUMNS: Final = ("key", "object_version")
_PLAN_SCHEMA: Final = pa.schema([PLAN_SCHEMA.field(name) for name in _PLAN_COLUMNS])


@dataclass(frozen=True, slots=True)
class ChunkAccount:
    """The fate of a chunk's planned objects. `explanation` is the first contradiction, or ""."""

    planned: int
    members: int
    skipped: int
    released: int
    explanation: str

    @property
    def agrees(self) -> bool:
        """True if each planned object is a member, skipped or released, exactly once."""
        return not self.explanation


class ChunkAuditor:
    """Compares a chunk with its part of the plan: the same objects, order and ranges."""

    def __init__(self, chunk: Chunk, chunk_file: ChunkFile) -> None:
        """Raise CafError if the plan cannot be read."""
        folder = Path(chunk.plan_folder)
        self.explanation = ""
        self._chunk = chunk
        self._chunk_file = chunk_file
        self._planned = count_chunk_objects(folder, chunk.number)
        self._part = (
            next(read_chunk_objects(folder, chunk.number)).part
            if holds_part(folder, chunk.number)
            else None
        )
        self._plan = _PlanRows(read_chunk_batches(folder, chunk.number, _PLAN_COLUMNS))
        self._members = 0
        self._skipped = 0

    def take(self, batch: pa.RecordBatch) -> None:
        """Compare the next manifest rows, with `ACCOUNT_COLUMNS`, up to the first contradiction."""
        if not self.explanation:
            self.explanation = self._contradicts_plan(batch) or self._contradicts_index(batch)
            self._skipped += batch.num_rows - batch["skip_reason"].null_count
            self._members += batch["skip_reason"].null_count

    def finish(self, *, members: int, skipped: int, released: int) -> ChunkAccount:
        released_count = self._planned - self._members - self._skipped
        if not self.explanation:
            if self._planned != self._chunk.object_count:
                planned = counted(self._chunk.object_count, "object")
                self.explanation = f"{planned} planned, {self._planned} accounted for"
            elif (self._members, self._skipped, released_count) != (members, skipped, released):
                self.explanation = (
                    f"the ledger has {counted(members, 'member')}, {skipped} skipped and "
                    f"{released} released, the chunk {counted(self._members, 'member')}, "
                    f"{self._skipped} skipped and {released_count} released"
                )
            else:
                self.explanation = self._chunk_file.member_count_fault(self._members)
        return ChunkAccount(
            self._chunk.object_count,
            self._members,
            self._skipped,
            max(released_count, 0),
            self.explanation,
        )

    def released(self) -> Iterator[tuple[str, str]]:
        """Yield key and object version of objects behind those taken."""
        for rows in self._plan.rest():
            yield from zip(
                rows["key"].cast(pa.string()).to_pylist(),
                rows["object_version"].to_pylist(),
                strict=True,
            )

    def _contradicts_plan(self, batch: pa.RecordBatch) -> str:
        planned = self._plan.take(batch.num_rows)
        rows = batch.slice(0, planned.num_rows)
        same_key = pc.equal(rows["key"].cast(pa.binary()), planned["key"])
        first = pc.index(
            pc.and_(same_key, pc.equal(identities(rows), planned["object_version"])), False
        ).as_py()
        if first >= 0:
            return (
                f"the plan has {planned['key'][first].as_py()!r}, but the chunk has "
                f"{batch['key'][first].as_py()!r}"
            )
        if planned.num_rows < batch.num_rows:
            return (
                f"{batch['key'][planned.num_rows].as_py()!r} is in the chunk, but not in the plan"
            )
        return ""

    def _contradicts_index(self, batch: pa.RecordBatch) -> str:
        members = batch.filter(pc.is_null(batch["skip_reason"]))
        sizes = members["size_bytes"]
        planned = astuple(self._part) if self._part else (None,) * len(PART_COLUMNS)
        for name, value in zip(PART_COLUMNS, planned, strict=True):
            if any(part != value for part in members[name].unique().to_pylist()):
                return "the chunk has another part of the object than the plan"
        if self._part:
            sizes = pc.subtract(members["part_end_byte"], members["part_start_byte"])
        columns = (
            column.to_pylist()
            for column in (*(members[name] for name in ("member", "start_byte", "end_byte")), sizes)
        )
        return next(filter(None, map(self._chunk_file.range_fault, *columns)), "")


class _PlanRows:
    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._remaining = pa.RecordBatch.from_pylist([], _PLAN_SCHEMA)

    def take(self, count: int) -> pa.Table:
        taken = []
        for batch in self.rest():
            taken.append(batch.slice(0, count))
            self._remaining = batch.slice(count)
            count -= taken[-1].num_rows
            if not count:
                break
        return pa.Table.from_batches(taken, _PLAN_SCHEMA)

    def rest(self) -> Iterator[pa.RecordBatch]:
        remaining, self._remaining = self._remaining, self._remaining.slice(0, 0)
        yield remaining.select(_PLAN_COLUMNS)
        for batch in self._batches:
            yield batch.select(_PLAN_COLUMNS)
