"""What became of the objects that a plan put into a chunk: its manifest, held against its part of
the plan and its index.

Both classes take the manifest in batches, in one pass, and may take the same one: memory is a batch
of it and of the plan. Which steps do so, and when, is in `chunk_steps` and `audit`. Source: promise
2 in docs/explanation/design.md.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from caf_pipeline.inventory.manifest import IDENTITY_COLUMNS, PART_COLUMNS, identities
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.inventory.plan import (
    PLAN_SCHEMA,
    count_chunk_objects,
    holds_part,
    read_chunk_batches,
    read_chunk_objects,
)
from caf_pipeline.ledger.records import Chunk
from caf_pipeline.packing.chunk_reader import ChunkFile
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
REPORT_COLUMNS: Final = ("key", "size_bytes", "skip_reason")
"""The columns of the manifest that `ChunkAuditor` and `ManifestReport` need."""

LARGEST_SHOWN: Final = 10

_PLAN_COLUMNS: Final = ("key", "object_version")
_PLAN_SCHEMA: Final = pa.schema([PLAN_SCHEMA.field(name) for name in _PLAN_COLUMNS])


@dataclass(frozen=True, slots=True)
class ChunkAccount:
    """What became of the objects that the plan put into a chunk; `explanation` says where it does
    not agree.
    """

    planned: int
    members: int
    skipped: int
    released: int
    explanation: str

    @property
    def agrees(self) -> bool:
        """Whether each planned object is a member, skipped or released, exactly once."""
        return not self.explanation


class ChunkAuditor:
    """Holds a chunk against its part of the plan: the same objects in the same order, each at the
    range that it claims.

    Attributes: explanation: the first thing that does not agree in what was taken so far; "" where
        all of it does.
    """

    def __init__(self, chunk: Chunk, chunk_file: ChunkFile) -> None:
        """Raise CafError where there is no readable plan."""
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
        """Take the next rows of the manifest, with `ACCOUNT_COLUMNS`; what follows a contradiction
        is not looked at.
        """
        if not self.explanation:
            self.explanation = self._of_another_object(batch) or self._misplaced(batch)
            self._skipped += batch.num_rows - batch["skip_reason"].null_count
            self._members += batch["skip_reason"].null_count

    def finish(self, *, members: int, skipped: int, released: int) -> ChunkAccount:
        """Return the account once all rows were taken, which is to be of these counts."""
        left = self._planned - self._members - self._skipped
        if not self.explanation:
            found = (
                f"{counted(self._members, 'member')}, {self._skipped} skipped and {left} released"
            )
            if self._planned != self._chunk.object_count:
                self.explanation = (
                    f"{counted(self._chunk.object_count, 'object')} planned, "
                    f"{self._planned} accounted for"
                )
            elif (self._members, self._skipped, left) != (members, skipped, released):
                expected = (
                    f"{counted(members, 'member')}, {skipped} skipped and {released} released"
                )
                self.explanation = f"the ledger has {expected}, the chunk {found}"
            else:
                self.explanation = self._chunk_file.miscounted(self._members)
        return ChunkAccount(
            self._chunk.object_count, self._members, self._skipped, max(left, 0), self.explanation
        )

    def released(self) -> Iterator[tuple[str, str]]:
        """Yield key and object version of the plan's objects that follow those taken so far."""
        for rows in self._plan.rest():
            yield from zip(
                rows["key"].cast(pa.string()).to_pylist(),
                rows["object_version"].to_pylist(),
                strict=True,
            )

    def _of_another_object(self, batch: pa.RecordBatch) -> str:
        """Say which row is none of the plan at its place; "" where all are."""
        planned = self._plan.take(batch.num_rows)
        rows = batch.slice(0, planned.num_rows)
        same_key = pc.equal(rows["key"].cast(pa.binary()), planned["key"])
        first = pc.index(
            pc.and_(same_key, pc.equal(identities(rows), planned["object_version"])), False
        ).as_py()
        if first >= 0:
            return (
                f"the plan has {planned['key'][first].as_py()!r} where the chunk has "
                f"{batch['key'][first].as_py()!r}"
            )
        if planned.num_rows < batch.num_rows:
            return f"{batch['key'][planned.num_rows].as_py()!r} is in the chunk and not in the plan"
        return ""

    def _misplaced(self, batch: pa.RecordBatch) -> str:
        members = batch.filter(pc.is_null(batch["skip_reason"]))
        sizes = members["size_bytes"]
        planned = astuple(self._part) if self._part else (None,) * len(PART_COLUMNS)
        for name, value in zip(PART_COLUMNS, planned, strict=True):
            if any(found != value for found in members[name].unique().to_pylist()):
                return "the chunk has another part of the object than was planned"
        if self._part:
            sizes = pc.subtract(members["part_end_byte"], members["part_start_byte"])
        columns = (
            column.to_pylist()
            for column in (*(members[name] for name in ("member", "start_byte", "end_byte")), sizes)
        )
        return next(filter(None, map(self._chunk_file.misplaced, *columns)), "")


class _PlanRows:
    """A chunk's part of the plan, taken in pieces of any length."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._left = pa.RecordBatch.from_pylist([], _PLAN_SCHEMA)

    def take(self, count: int) -> pa.Table:
        """Return the next rows, fewer at the end."""
        taken = []
        for batch in self.rest():
            taken.append(batch.slice(0, count))
            self._left = batch.slice(count)
            count -= taken[-1].num_rows
            if not count:
                break
        return pa.Table.from_batches(taken, _PLAN_SCHEMA)

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows that are left."""
        left, self._left = self._left, self._left.slice(0, 0)
        yield left.select(_PLAN_COLUMNS)
        for batch in self._batches:
            yield batch.select(_PLAN_COLUMNS)


class ManifestReport:
    """What is told of a chunk's manifest.

    Attributes:
        skipped: objects by the reason why they were skipped.
        largest: keys and sizes of the largest members, the largest first.
    """

    def __init__(self) -> None:
        self.skipped: Counter[SkipReason] = Counter()
        self.largest: list[tuple[str, int]] = []

    def take(self, batch: pa.RecordBatch) -> None:
        """Take the next rows, with `REPORT_COLUMNS`."""
        for reason in batch["skip_reason"].drop_null().value_counts():
            self.skipped[SkipReason(reason["values"].as_py())] += reason["counts"].as_py()
        members = pa.Table.from_batches([batch.filter(pc.is_null(batch["skip_reason"]))])
        order = [("size_bytes", "descending"), ("key", "descending")]
        some = members.take(pc.select_k_unstable(members, LARGEST_SHOWN, order))
        found = zip(some["key"].to_pylist(), some["size_bytes"].to_pylist(), strict=True)
        self.largest = sorted(
            [*self.largest, *found], key=lambda one: (one[1], one[0]), reverse=True
        )[:LARGEST_SHOWN]
