"""Writes the packing journal while packing continues.

A thread fsyncs the staged bytes, then appends a checkpoint. Packing waits if a crash would lose too
much.

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
    SealedPart,
    SkippedObject,
    add_to_digest,
)
from caf_pipeline.packing.sink import Mark, StagingSink, staging_errors, sync_data
from caf_pipeline.settings import PackingSettings
from caf_pipeline.system.hashes import RunningHash

MAX_LOST_BYTES: Final = 256 << 20
"""Bytes that a kill may cost, pending GETs included: seconds of fetching."""

MIN_AHEAD_BYTES: Final = 64 << 20
"""Bytes that packing may always be ahead of the journal without waiting."""


MAX_PART_BYTES: Final = 32 << 20
"""A kill loses each pending GET as a whole.

Two such parts, `MIN_AHEAD_BYTES`, and a window of four parts make `MAX_LOST_BYTES`.
"""


@dataclass(frozen=True, slots=True)
class CheckpointPace:
    """When a checkpoint is due, and when packing waits for it.

    Attributes:
        due_bytes: unsafe bytes. On a disk of 200 MiB/s, at most three fsyncs a second.
        due_seconds: since the last checkpoint. A kill costs about 10 s of work in all.
        due_outcomes: objects without an entry; about 1 MB.
        due_outcomes_bytes: of their entries, since headers may be long.
        ahead_bytes: unsafe bytes at which packing waits.
        ahead_seconds: duration of a checkpoint after which packing waits.
    """

    due_bytes: int = 64 << 20
    due_seconds: float = 3.0
    due_outcomes: int = 10_000
    due_outcomes_bytes: int = 4 << 20
    ahead_bytes: int = MIN_AHEAD_BYTES
    ahead_seconds: float = 8.0


def pace_of(settings: PackingSettings) -> CheckpointPace:
    """Return the pace that keeps `MAX_LOST_BYTES`."""
    return CheckpointPace(
        ahead_bytes=MAX_LOST_BYTES - window_of(settings) - _fetched_unwritten_bytes(settings)
    )


def window_of(settings: PackingSettings) -> int:
    """Return the window of pending GETs, limited by `MAX_LOST_BYTES`."""
    return min(
        settings.window_size, MAX_LOST_BYTES - MIN_AHEAD_BYTES - _fetched_unwritten_bytes(settings)
    )


def part_of(settings: PackingSettings) -> int:
    """Return the size of one ranged GET, at most `MAX_PART_BYTES`."""
    return min(settings.part_size, MAX_PART_BYTES)


def _fetched_unwritten_bytes(settings: PackingSettings) -> int:
    """Two parts, one of them being written."""
    return 2 * part_of(settings)


@dataclass(frozen=True, slots=True)
class OpenObject:
    """A large object, partly in the sink, with its SHA-256 so far."""

    mark: Mark
    sha256: RunningHash
    headers: ObjectHeaders | None


@dataclass(slots=True)
class _PendingCheckpoint:
    since: float
    durable_bytes: int
    holds: bool
    done: "Future[None]"


class Checkpoints:
    """The journal of one packing, or none. The packer reports events in order.

    `kept_bytes` are safe. `holds`: there is anything to resume.
    """

    def __init__(
        self,
        journal: Journal | None,
        sink: StagingSink,
        pace: CheckpointPace,
        *,
        objects_digest: RunningHash,
        resumed_bytes: int,
    ) -> None:
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
        self._pending: _PendingCheckpoint | None = None
        self._failed = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")

    @property
    def resumable_bytes(self) -> int:
        return self.kept_bytes if self.holds else 0

    # --- what happens -----------------------------------------------------------------------------

    def begin_member(self, opened: OpenObject) -> None:
        self._open = opened

    def done(self, planned: PlannedObject, outcome: PackedMember | SkippedObject) -> None:
        self._open = None
        add_to_digest(self._objects_digest, planned)
        self._outcomes.append(outcome)
        self._outcomes_bytes += len(msgspec.msgpack.encode(outcome))

    def roll_back(self, mark: Mark) -> None:
        """Roll the sink back, then call `rolled_back`.

        If the sink seals its bytes again, the journal has a checkpoint of the new part before this
        part replaces the old one.
        """
        part = self._sink.part
        if self._sink.segments:
            self._wait()  # a pending checkpoint may fsync the old part
        self._sink.roll_back(mark)
        if self._sink.part is not part:
            self._open = None
            self.save()
            self._sink.publish()

    def rolled_back(self) -> None:
        """If the journal lists bytes that are gone, add an entry that says so."""
        self._open = None
        if self._pending or self.kept_bytes > self._sink.size_bytes:
            self.save()

    def reached(self) -> None:
        """Take a checkpoint if one is due, and wait while too many bytes are unsafe.

        Raises StagingError if a checkpoint failed.
        """
        if self._pending and self._pending.done.done():
            self._wait()
        if not self._pending and self._due():
            self._take()
        while self._pending and self._must_wait():
            self._wait()
            if self._due():
                self._take()

    def save(self) -> None:
        """Make everything so far safe; raise StagingError if that fails."""
        self._wait()
        self._take()
        self._wait()

    def end(self, *, save: bool) -> None:
        """End the journal after a failure; with `save`, try a last checkpoint."""
        try:
            self._wait()
            if (
                save
                and not self._failed
                and (self._outcomes or self._sink.size_bytes > self.kept_bytes)
            ):
                self.save()
        except StagingError:
            # The packing already has an error, and the journal is valid up to its last entry.
            self._failed = True
        if self._failed and self._journal:
            self._journal.cut()

    def close(self) -> None:
        self._writer.shutdown(cancel_futures=True)

    # --- checkpoints ------------------------------------------------------------------------------

    def _due(self) -> bool:
        if self._journal is None:
            return False
        pace = self._pace
        safe_bytes = self._pending.durable_bytes if self._pending else self.kept_bytes
        size_bytes = self._sink.size_bytes - safe_bytes
        if not self._outcomes and size_bytes <= 0:
            return False
        return (
            size_bytes >= pace.due_bytes
            or len(self._outcomes) >= pace.due_outcomes
            or self._outcomes_bytes >= pace.due_outcomes_bytes
            or time.monotonic() - self._since >= pace.due_seconds
        )

    def _must_wait(self) -> bool:
        pace = self._pace
        return (
            self._sink.size_bytes - self.kept_bytes > pace.ahead_bytes
            or len(self._outcomes) >= 2 * pace.due_outcomes
            or self._outcomes_bytes >= 2 * pace.due_outcomes_bytes
            or (
                self._pending is not None
                and time.monotonic() - self._pending.since > pace.ahead_seconds
            )
        )

    def _take(self) -> None:
        journal = self._journal
        if journal is None:
            return
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
        sealed = self._sealed_part(now)

        def make_durable() -> None:
            with staging_errors(self._sink.part.path):
                sync_data(self._sink.part.descriptor)
            journal.append(
                Checkpoint(
                    outcomes,
                    objects_sha256,
                    boundary.offset,
                    b"" if sealed else boundary.closed_state(),
                    now.offset,
                    inside,
                    sealed,
                )
            )

        self._pending = _PendingCheckpoint(
            self._since, now.offset, holds, self._writer.submit(make_durable)
        )
        self._since = time.monotonic()

    def _sealed_part(self, mark: Mark) -> SealedPart | None:
        segments = self._sink.segments
        if segments is None or mark.segments is None:
            return None
        _, open_segment = mark.segments
        return SealedPart(segments.file_key, segments.nonce, self._sink.payload_start, open_segment)

    def _wait(self) -> None:
        pending = self._pending
        if pending is None:
            return
        wait([pending.done])  # after a Ctrl-C here it is still pending
        self._pending = None
        self._failed = pending.done.exception() is not None
        pending.done.result()
        self.kept_bytes, self.holds = pending.durable_bytes, pending.holds
