"""Replays what an earlier run packed of a chunk: takes from its journal only what the staged bytes
confirm.

Each checkpoint is compared with the plan's objects and with the bytes themselves: lengths, SHA-256
of every member and of what is staged of an open one, the Merkle tree. The first that does not agree
ends it; part and journal are cut behind the one before, and packing goes on there. What was open
and rolled back later is not looked for: other bytes are there since. Memory is one checkpoint's,
and a number for each that was open.

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
    OpenMember,
    PackedMember,
    Place,
    SkippedObject,
    add_to_digest,
)
from caf_pipeline.packing.journal.writer import OpenObject
from caf_pipeline.packing.sink import Mark, StagingSink
from caf_pipeline.system.hashes import RunningHash

Outcomes = Sequence[tuple[PlannedObject, PackedMember | SkippedObject]]


@dataclass(frozen=True, slots=True)
class Reached:
    """How far what an earlier run left is right, and is in the sink.

    Attributes:
        place: the one in the journal to go on from.
        boundary: where the last whole member ends.
        end: of the sink; at 0 where nothing is resumed.
        objects_digest: over the objects that are accounted for.
        open: the next object, where the sink holds some of it.
    """

    place: Place
    boundary: Mark
    end: Mark
    objects_digest: RunningHash
    open: OpenObject | None = None


class ObjectQueue:
    """Objects of a plan in order, some of which may be looked at before they are taken."""

    def __init__(self, objects: Iterator[PlannedObject]) -> None:
        self._objects = objects
        self._seen: deque[PlannedObject] = deque()

    def __iter__(self) -> Iterator[PlannedObject]:
        return self

    def __next__(self) -> PlannedObject:
        return self._seen.popleft() if self._seen else next(self._objects)

    def look(self, count: int) -> Sequence[PlannedObject]:
        """Return the next `count` objects, or as many as there are; they stay."""
        while len(self._seen) < count and (planned := next(self._objects, None)) is not None:
            self._seen.append(planned)
        return list(self._seen)[:count]


def replay(
    journal: Journal,
    sink: StagingSink,
    *,
    objects: ObjectQueue,
    head: bytes,
    take: Callable[[Outcomes], None],
) -> tuple[Reached, str]:
    """Read what is staged into the sink as far as it is right, and cut part and journal there,
    durably.

    Returns how far that is, and why it is nothing, or not all that the journal speaks of; "" where
    nothing is wrong.

    Args: journal: of the part that the sink has opened. sink: at its start; at the end of what is
        right when this returns. objects: of the chunk, from its first; those that are accounted for
        are taken from it. head: the head member's bytes, with which the part begins. take: told the
        outcomes of each checkpoint that holds; may raise to end it all, and then both files are as
        they were.

    Raises:
        StagingError: a file cannot be read or cut.
    """
    start = sink.mark()
    reached = nothing = Reached(Place(), start, start, hashlib.sha256())
    fault = ""
    given_up = _given_up(journal)
    if b"".join(bytes(piece) for piece in sink.reread(len(head))) == head:
        first = sink.mark()
        before = Reached(Place(), first, first, hashlib.sha256())
        for place, told in journal.checkpoints():
            said = msgspec.structs.replace(told, open=None) if place.number in given_up else told
            following = _verified(before, place, said, objects, sink)
            if following is None:
                fault = (
                    f"its bytes are not those that entry {place.number - 1} of its journal "
                    "describes"
                )
                break
            reached = before = following
            take([(next(objects), outcome) for outcome in said.outcomes])
        if reached is nothing:
            fault = fault or journal.broken
    elif journal.found_bytes():
        fault = "its part does not begin like this chunk"
    sink.roll_back(reached.end)
    journal.go_on(reached.place)
    sink.cut()
    return reached, fault


def _given_up(journal: Journal) -> set[int]:
    """Return the places, by number, of checkpoints whose open object was rolled back later: their
    bytes may be replaced.
    """
    given_up: set[int] = set()
    open_since: list[int] = []
    for place, said in journal.checkpoints():
        if isinstance(said.outcomes[0], SkippedObject) if said.outcomes else not said.open:
            given_up.update(open_since)
        if said.outcomes or not said.open:
            open_since.clear()
        if said.open:
            open_since.append(place.number)
    return given_up


def _verified(
    before: Reached, place: Place, said: Checkpoint, objects: ObjectQueue, sink: StagingSink
) -> Reached | None:
    """Read the bytes of a checkpoint into the sink; None where they, or the plan, do not agree with
    it.
    """
    planned = objects.look(len(said.outcomes) + 1)
    if len(planned) < len(said.outcomes) + bool(said.open):
        return None
    going_on = before.open
    digest = before.objects_digest.copy()
    for number, outcome in enumerate(said.outcomes):
        if not _outcome_holds(outcome, planned[number], going_on, sink):
            return None
        going_on = None
        add_to_digest(digest, planned[number])
    boundary = before.boundary if going_on else sink.mark()
    if digest.digest() != said.objects_sha256 or boundary.closed_state() != said.tree:
        return None
    opened = None
    if said.open:
        opened = _open_holds(said.open, planned[len(said.outcomes)], going_on, boundary, sink)
        if opened is None:
            return None
    return Reached(place, boundary, sink.mark(), digest, opened)


def _outcome_holds(
    outcome: PackedMember | SkippedObject,
    planned: PlannedObject,
    going_on: OpenObject | None,
    sink: StagingSink,
) -> bool:
    if isinstance(outcome, SkippedObject):
        return True
    if outcome.end_byte - outcome.start_byte != planned.size_bytes:
        return False
    running = _read_into(
        going_on.sha256.copy() if going_on else hashlib.sha256(), sink, outcome.end_byte
    )
    return running is not None and running.digest() == outcome.sha256


def _open_holds(
    said: OpenMember,
    planned: PlannedObject,
    going_on: OpenObject | None,
    boundary: Mark,
    sink: StagingSink,
) -> OpenObject | None:
    if not 0 < said.size_bytes < planned.size_bytes:
        return None
    running = _read_into(
        going_on.sha256.copy() if going_on else hashlib.sha256(),
        sink,
        boundary.offset + said.size_bytes,
    )
    if running is None or running.digest() != said.sha256:
        return None
    return OpenObject(boundary, running, said.headers)


def _read_into(running: RunningHash, sink: StagingSink, end_byte: int) -> RunningHash | None:
    for piece in sink.reread(end_byte):
        running.update(piece)
    return running if sink.size_bytes == end_byte else None
