"""Writes the packing journal while packing goes on, and makes packing wait only where a crash would
lose too much.

A checkpoint is taken when enough bytes, objects or seconds have passed. A thread of its own makes
the staged bytes durable, then appends the entry; packing goes on meanwhile, until more than a
bounded amount of work is not yet safe.

Source: docs/decisions/0010-the-packing-journal.md.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final

import msgspec

from caf_pipeline.errors import StagingError
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.plan import PlannedObject
from caf_pipeline.packing.journal.format import (
    Checkpoint,
    Journal,
    OpenMember,
    PackedMember,
    SkippedObject,
    add_to_digest,
)
from caf_pipeline.packing.sink import Mark, StagingSink, staging_error, sync_data
from caf_pipeline.settings import PackingSettings
from caf_pipeline.system.hashes import RunningHash

LOST_BYTES: Final = 256 << 20
"""What a kill may cost at most, GETs under way included: fetched in a few seconds wherever it
matters.
"""

LEAST_AHEAD_BYTES: Final = 64 << 20
"""How far packing may always be ahead of the journal: a checkpoint's worth, so that it need not
wait for each.
"""


LARGEST_PART_BYTES: Final = 32 << 20
"""A GET that a kill ends is lost as a whole: two of these, the least ahead and a window of four are
`LOST_BYTES`.
"""


@dataclass(frozen=True, slots=True)
class CheckpointPace:
    """When a checkpoint is due, and when packing waits for it.

    Attributes:
        due_bytes: not yet safe. On a disk of 200 MiB/s that is three fsyncs a second at most.
        due_seconds: since the last; so that with the waiting below at most 10 s of work are lost.
        due_outcomes: objects of which nothing is journaled: some 1 MB of them.
        due_outcomes_bytes: of these as they are journaled: headers and reasons may be long.
        ahead_bytes: packing waits before more are not safe.
        ahead_seconds: packing waits where a checkpoint takes longer than this.
    """

    due_bytes: int = 64 << 20
    due_seconds: float = 3.0
    due_outcomes: int = 10_000
    due_outcomes_bytes: int = 4 << 20
    ahead_bytes: int = LEAST_AHEAD_BYTES
    ahead_seconds: float = 8.0


def pace_of(settings: PackingSettings) -> CheckpointPace:
    """Return the pace by which a kill costs at most `LOST_BYTES`, the window of GETs under way
    included.
    """
    return CheckpointPace(
        ahead_bytes=LOST_BYTES - window_of(settings) - _fetched_unwritten_bytes(settings)
    )


def window_of(settings: PackingSettings) -> int:
    """Return the window of GETs under way: as set, but no more than may be lost."""
    return min(
        settings.window_size, LOST_BYTES - LEAST_AHEAD_BYTES - _fetched_unwritten_bytes(settings)
    )


def part_of(settings: PackingSettings) -> int:
    """Return the size of one ranged GET: as set, but no more than what may be lost has room for,
    beside window and pace.
    """
    return min(settings.part_size, LARGEST_PART_BYTES)


def _fetched_unwritten_bytes(settings: PackingSettings) -> int:
    """Return the bytes outside the window that are fetched and not yet safe: a part that left it,
    and one being written.
    """
    return 2 * part_of(settings)


@dataclass(frozen=True, slots=True)
class OpenObject:
    """A large object that is partly in the sink: where it begins, and the running SHA-256 of what
    is there.
    """

    mark: Mark
    sha256: RunningHash
    headers: ObjectHeaders | None


@dataclass(slots=True)
class _UnderWay:
    """A checkpoint that is being made durable."""

    since: float
    durable_bytes: int
    holds: bool
    done: "Future[None]"


class Checkpoints:
    """The journal of one packing, as the packer sees it: it tells what happened, in order.

    Attributes:
        kept_bytes: so many bytes of the staged file are safe by the journal.
        holds: whether anything is in the journal that a next run would resume.
    """

    def __init__(
        self,
        journal: Journal,
        sink: StagingSink,
        pace: CheckpointPace,
        *,
        objects_digest: RunningHash,
        resumed_bytes: int,
    ) -> None:
        """Go on behind `resumed_bytes` of the sink, which the journal holds already, and the
        objects in the digest.
        """
        self.kept_bytes = resumed_bytes
        self.holds = resumed_bytes > 0
        self._journal = journal
        self._sink = sink
        self._pace = pace
        self._objects_digest = objects_digest
        self._outcomes: list[PackedMember | SkippedObject] = []
        self._outcomes_bytes = 0
        self._open: OpenObject | None = None
        self._since = time.monotonic()
        self._under_way: _UnderWay | None = None
        self._failed = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")

    @property
    def resumable_bytes(self) -> int:
        """Bytes of the staged file that a next run would keep; 0 where it would begin again."""
        return self.kept_bytes if self.holds else 0

    # --- what happens
    # --------------------------------------------------------------------------------

    def begin_member(self, opened: OpenObject) -> None:
        """A large object is written, from its mark on."""
        self._open = opened

    def done(self, planned: PlannedObject, outcome: PackedMember | SkippedObject) -> None:
        """An object is whole in the sink, or it is left out and nothing of it is in the sink any
        more.
        """
        self._open = None
        add_to_digest(self._objects_digest, planned)
        self._outcomes.append(outcome)
        self._outcomes_bytes += len(msgspec.msgpack.encode(outcome))

    def rolled_back(self) -> None:
        """The sink was rolled back: where the journal lists bytes that are gone, an entry says so
        before others follow.
        """
        self._open = None
        if self._under_way or self.kept_bytes > self._sink.size_bytes:
            self.save()

    def reached(self) -> None:
        """Take a checkpoint if one is due, and wait while too much is not safe.

        Raises StagingError where one failed.
        """
        if self._under_way and self._under_way.done.done():
            self._wait()
        if not self._under_way and self._due():
            self._take()
        while self._under_way and self._too_far():
            self._wait()
            if self._due():
                self._take()

    def save(self) -> None:
        """Make all that happened safe, and return when it is. Raises StagingError."""
        self._wait()
        self._take()
        self._wait()

    def end(self, *, save: bool) -> None:
        """End the journal after a failure.

        With `save`, a last checkpoint is written, if that is still possible.
        """
        try:
            self._wait()
            if (
                save
                and not self._failed
                and (self._outcomes or self._sink.size_bytes > self.kept_bytes)
            ):
                self.save()
        except StagingError:
            # the packing has its error already, and the journal holds up to where it stands
            self._failed = True
        if self._failed:
            self._journal.cut()

    def close(self) -> None:
        """Give the thread back; waits for a checkpoint under way."""
        self._writer.shutdown(cancel_futures=True)

    # --- checkpoints
    # --------------------------------------------------------------------------------

    def _due(self) -> bool:
        pace = self._pace
        size_bytes = self._sink.size_bytes - self._begun_bytes()
        if not self._outcomes and size_bytes <= 0:
            return False
        return (
            size_bytes >= pace.due_bytes
            or len(self._outcomes) >= pace.due_outcomes
            or self._outcomes_bytes >= pace.due_outcomes_bytes
            or time.monotonic() - self._since >= pace.due_seconds
        )

    def _begun_bytes(self) -> int:
        return self._under_way.durable_bytes if self._under_way else self.kept_bytes

    def _too_far(self) -> bool:
        pace = self._pace
        return (
            self._sink.size_bytes - self.kept_bytes > pace.ahead_bytes
            or len(self._outcomes) >= 2 * pace.due_outcomes
            or self._outcomes_bytes >= 2 * pace.due_outcomes_bytes
            or (
                self._under_way is not None
                and time.monotonic() - self._under_way.since > pace.ahead_seconds
            )
        )

    def _take(self) -> None:
        now = self._sink.mark()
        opened = self._open
        boundary = opened.mark if opened else now
        inside = None
        if opened and now.offset > boundary.offset:
            inside = OpenMember(
                now.offset - boundary.offset, opened.sha256.digest(), opened.headers
            )
        outcomes, self._outcomes, self._outcomes_bytes = self._outcomes, [], 0
        objects_sha256 = self._objects_digest.digest()
        holds = bool(outcomes or inside) or self.holds

        def make_durable() -> None:
            try:
                sync_data(self._sink.part.descriptor)
            except OSError as error:
                raise staging_error(self._sink.part.path, error) from error
            state = boundary.closed_state()
            self._journal.append(
                Checkpoint(outcomes, objects_sha256, boundary.offset, state, now.offset, inside)
            )

        self._under_way = _UnderWay(
            self._since, now.offset, holds, self._writer.submit(make_durable)
        )
        self._since = time.monotonic()

    def _wait(self) -> None:
        under_way = self._under_way
        if under_way is None:
            return
        wait([under_way.done])  # Ctrl-C may come here: then it is still under way
        self._under_way = None
        self._failed = under_way.done.exception() is not None
        under_way.done.result()
        self.kept_bytes, self.holds = under_way.durable_bytes, under_way.holds
