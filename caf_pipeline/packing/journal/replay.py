"""Replays an earlier run's journal, and accepts only what the staged bytes confirm.

The first mismatch ends the replay. An open object that was rolled back later is not compared, since
other bytes have replaced it.

Source: docs/decisions/0010-the-packing-journal.md.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from caf_pipeline.inventory.plan import PlannedObject
from caf_pipeline.packing.journal.format import (
    Checkpoint,
    Journal,
    JournalPosition,
    PackedMember,
    SkippedObject,
    add_to_digest,
)
from caf_pipeline.packing.journal.writer import OpenObject
from caf_pipeline.packing.sink import Mark, StagingSink
from caf_pipeline.system.hashes import RunningHash

Outcomes = Sequence[tuple[PlannedObject, PackedMember | SkippedObject]]


@dataclass(frozen=True, slots=True)
class ReplayState:
    """How far the staged bytes are confirmed and read into the sink.

    Attributes:
        boundary: end of the last whole member.
        end: of the sink; 0 if nothing is resumed.
        open: the next object, if the sink has a part of it.
    """

    position: JournalPosition
    boundary: Mark
    end: Mark
    objects_digest: RunningHash
    open: OpenObject | None = None


class ObjectQueue:
    """Objects of a plan in order, with a look-ahead."""

    def __init__(self, objects: Iterator[PlannedObject]) -> None:
        self._objects = objects
        self._peeked: deque[PlannedObject] = deque()

    def __iter__(self) -> Iterator[PlannedObject]:
        return self

    def __next__(self) -> PlannedObject:
        return self._peeked.popleft() if self._peeked else next(self._objects)

    def peek(self, count: int) -> Sequence[PlannedObject]:
        while len(self._peeked) < count and (planned := next(self._objects, None)) is not None:
            self._peeked.append(planned)
        return list(self._peeked)[:count]


def replay(
    journal: Journal,
    sink: StagingSink,
    *,
    objects: ObjectQueue,
    head: bytes,
    take: Callable[[Outcomes], None],
    renewed: Journal | None = None,
) -> tuple[ReplayState, str]:
    """Read confirmed bytes into the sink, then cut part and journal behind them, durably.

    An encrypted part and its `journal` stay unchanged: the sink seals their bytes again, and the
    accepted entries are copied to the `renewed` journal.

    Also returns why not all of the journal was accepted, or "". Accepted objects are taken from
    `objects`, and reported to `take` for each checkpoint. If `take` raises, the files stay
    unchanged.
    """
    start = sink.mark()
    reached = nothing = ReplayState(JournalPosition(), start, start, hashlib.sha256())
    fault = ""
    given_up = _given_up(journal)
    if b"".join(bytes(piece) for piece in sink.reread(len(head))) == head:
        first = sink.mark()
        previous = ReplayState(JournalPosition(), first, first, hashlib.sha256())
        for position, recorded in journal.checkpoints():
            checkpoint = recorded
            if position.number in given_up:
                checkpoint = msgspec.structs.replace(recorded, open=None)
            state = _verified(previous, position, checkpoint, objects, sink)
            if state is None:
                fault = f"its bytes do not match entry {position.number - 1} of its journal"
                break
            reached = previous = state
            take([(next(objects), outcome) for outcome in checkpoint.outcomes])
            if renewed:
                renewed.append(
                    msgspec.structs.replace(checkpoint, durable_bytes=state.end.offset, sealed=None)
                )
        if reached is nothing:
            fault = fault or journal.broken
    elif journal.file_bytes():
        fault = "its part does not begin like this chunk"
    sink.roll_back(reached.end)
    if renewed is None:
        journal.continue_at(reached.position)
        sink.cut()
    return reached, fault


def _given_up(journal: Journal) -> set[int]:
    """Return the entries whose open object was rolled back later."""
    given_up: set[int] = set()
    open_since: list[int] = []
    for position, checkpoint in journal.checkpoints():
        outcomes = checkpoint.outcomes
        if isinstance(outcomes[0], SkippedObject) if outcomes else not checkpoint.open:
            given_up.update(open_since)
        if outcomes or not checkpoint.open:
            open_since.clear()
        if checkpoint.open:
            open_since.append(position.number)
    return given_up


def _verified(
    previous: ReplayState,
    position: JournalPosition,
    checkpoint: Checkpoint,
    objects: ObjectQueue,
    sink: StagingSink,
) -> ReplayState | None:
    outcomes, open_member = checkpoint.outcomes, checkpoint.open
    planned = objects.peek(len(outcomes) + 1)
    if len(planned) < len(outcomes) + bool(open_member):
        return None
    resumed = previous.open
    digest = previous.objects_digest.copy()
    for outcome, planned_object in zip(outcomes, planned, strict=False):
        if isinstance(outcome, PackedMember):
            is_whole = outcome.end_byte - outcome.start_byte == planned_object.size_bytes
            running = _hash_to(outcome.end_byte, resumed, sink) if is_whole else None
            if running is None or running.digest() != outcome.sha256:
                return None
        resumed = None
        add_to_digest(digest, planned_object)
    boundary = previous.boundary if resumed else sink.mark()
    if digest.digest() != checkpoint.objects_sha256:
        return None
    if sink.segments is None and boundary.closed_state() != checkpoint.tree:
        return None
    opened = None
    if open_member:
        end_byte = boundary.offset + open_member.size_bytes
        is_part = 0 < open_member.size_bytes < planned[len(outcomes)].size_bytes
        running = _hash_to(end_byte, resumed, sink) if is_part else None
        if running is None or running.digest() != open_member.sha256:
            return None
        opened = OpenObject(boundary, running, open_member.headers)
    return ReplayState(position, boundary, sink.mark(), digest, opened)


def _hash_to(end_byte: int, resumed: OpenObject | None, sink: StagingSink) -> RunningHash | None:
    """Hash a member, after its resumed bytes; None if the file is shorter."""
    running = resumed.sha256.copy() if resumed else hashlib.sha256()
    for piece in sink.reread(end_byte):
        running.update(piece)
    return running if sink.size_bytes == end_byte else None
