"""How far `caf run` is with one source: a bar on a terminal, else a line every minute, for cron and
CI.

Objects and bytes count once they are packed or skipped. If a chunk fails, its objects stay counted:
they are in staging, and the next run goes on from there. The line has three numbers of chunks:
archived, all, and failed. While the command runs, the counts never decrease, even if a step packs a
chunk again from an earlier point. The last line has exact counts. A rate is that of the whole
transfer: of packing while a chunk is packed, and of sending while it is sent. Bytes that an earlier
run packed count as done, but not for the rate.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from caf_pipeline.chunk_state import UNDER_WAY, ChunkState
from caf_pipeline.ledger.records import Chunk
from caf_pipeline.system.quantities import show_size
from caf_pipeline.waits import LINE_SECONDS, Wait

BAR_WIDTH: Final = 16
"""Columns: with all that is beside it, the line still fits into a terminal of 100."""

SHOWN_SECONDS: Final = 0.1
"""Between two changes of the bar: thousands of objects a second are told."""


class Rate:
    """The rate of one kind of transfer: its bytes over the time that it took, all chunks
    together.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._seconds = 0.0
        self._bytes = 0

    def begin(self) -> None:
        """Begin to count time, of a further chunk."""
        self._since = self._clock()

    def end(self) -> None:
        """Count no time until the next telling."""
        self._since = None

    def told(self, size_bytes: int) -> None:
        """Count bytes, and the time since the last telling."""
        now = self._clock()
        if self._since is not None:
            self._seconds += now - self._since
            self._bytes += size_bytes
        self._since = now

    @property
    def per_second(self) -> float | None:
        """Bytes a second; None before there are any."""
        return self._bytes / self._seconds if self._bytes and self._seconds > 0 else None


class ChunkProgress:
    """Shows how far the chunks of a source are while the context lasts.

    Attributes:
        waits: returns what is waited for, which is said again with each line.
    """

    def __init__(
        self, console: Console, source: str, *, line_seconds: float = LINE_SECONDS
    ) -> None:
        self.waits: Callable[[], Sequence[Wait]] = tuple
        self._console = console
        self._source = source
        self._line_seconds = line_seconds
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=BAR_WIDTH),
            TextColumn("{task.fields[text]}"),
            console=console,
        )
        self._task = self._bar.add_task(f"{source}: planning", total=None, text="")
        self._planned: dict[str, Chunk] = {}
        self._all = (0, 0)  # objects and bytes of those
        self._done = (0, 0, 0)  # objects, bytes and chunks whose run ended well
        self._parts = defaultdict[tuple[str, int], set[str]](
            set
        )  # chunks that are archived of each object in parts
        self._now: dict[
            str, tuple[int, int]
        ] = {}  # objects and bytes of each chunk under way, or that failed
        self._most = (0, 0)  # objects and bytes that were shown
        self._packing: set[str] = set()  # those of them that are packed now
        self._failed = self._held = self._skipped = 0
        self._reading, self._sending = Rate(), Rate()
        self._sent_bytes = 0
        self._shown_at = 0.0
        self._began = time.monotonic()
        self._over = threading.Event()
        self._lines = threading.Thread(target=self._say_lines, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self._console.is_terminal:
            self._bar.start()
        else:
            self._lines.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._most = 0, 0
        if self._console.is_terminal:
            self._show()
            if not self._planned:
                self._bar.update(self._task, visible=False)
            self._bar.stop()
        elif self._planned:
            self._say(self.line())

    def plan(self, chunks: Sequence[Chunk], *, located: Iterable[Chunk] = ()) -> None:
        """Show these chunks, too, but for those that are not under way and have only to be cleared
        away.

        `located` names at least the located chunks with a part of an object whose other parts are
        still to be archived.
        """
        for chunk in located:
            if chunk.part:
                self._parts[object_of(chunk)].add(chunk.name)
        self._planned |= {chunk.name: chunk for chunk in chunks if chunk.state in UNDER_WAY}
        self._count_planned()

    def forget(self, name: str) -> None:
        """Show a chunk no longer: its objects are planned again.

        The sums of all chunks change with the next plan.
        """
        if self._planned.pop(name, None):
            self._failed -= 1
        self._now.pop(name, None)
        self._show()

    def begin(self, name: str) -> None:
        """Begin to pack a chunk, for the first time or again."""
        self._now[name] = 0, 0
        self._packing.add(name)
        self._reading.begin()
        self._sending.end()

    def packed(self, name: str, objects: int, size_bytes: int, *, resumed: bool = False) -> None:
        """Count objects and bytes of a chunk, as differences; `resumed`: an earlier run packed
        them.
        """
        before = self._now[name]
        if self._is_part(name):
            objects = 0
        self._now[name] = before[0] + objects, before[1] + size_bytes
        self._reading.told(0 if resumed else size_bytes)
        self._show(seldom=True)

    def sealed(self, name: str) -> None:
        """Count no more of a chunk: it is packed."""
        self._packing.discard(name)

    def sent(self, size_bytes: int) -> None:
        """Count bytes sent, as differences, every copy; called from the steps, by several threads
        at once.
        """
        self._sent_bytes += size_bytes
        self._sending.told(size_bytes)
        self._show(seldom=True)

    def end(self, name: str, done: Chunk | None, *, held: bool = False) -> None:
        """End a chunk.

        `done` is the chunk after a run that ended well; None if its run failed, or another run
        holds it.

        Objects and bytes stay counted if the chunk failed or is held.
        """
        if done is None:
            self._held += held
            self._failed += not held
        else:
            self._now.pop(name, None)
        if done is not None and name in self._planned:
            objects, size_bytes, chunks = self._done
            whole = (
                self._is_last_part(done) if done.part else done.member_count + done.skipped_count
            )
            # The ledger has no size of the skipped objects. If objects were given back, the rest is
            # not only skipped objects.
            all_bytes = (
                done.object_bytes
                if done.skipped_count and not done.released_count
                else done.member_bytes
            )
            self._done = objects + whole, size_bytes + all_bytes, chunks + 1
            self._skipped += done.skipped_count
        self._packing.discard(name)
        self._show()

    def line(self) -> str:
        """Return all of it as one line."""
        if not self._planned:
            minutes = int((time.monotonic() - self._began) / 60)
            return f"{self._source}: taking an inventory and planning, for {minutes} min"
        return f"{self._source}: {self._text(', ')}"

    def _count_planned(self) -> None:
        chunks = self._planned.values()
        objects = sum(chunk.object_count for chunk in chunks if not chunk.part)
        in_parts = len({object_of(chunk) for chunk in chunks if chunk.part})
        self._all = objects + in_parts, sum(chunk.object_bytes for chunk in chunks)
        self._show()

    def _is_part(self, name: str) -> bool:
        """Whether a chunk has a part of an object, which is counted once all its parts are
        archived.
        """
        chunk = self._planned.get(name)
        return chunk is not None and chunk.part > 0

    def _is_last_part(self, done: Chunk) -> bool:
        """Note that a run of a part's chunk ended; tell whether all parts of its object are
        archived now.
        """
        if done.state is not ChunkState.LOCATED or done.part_abandoned:
            return False
        parts = self._parts[object_of(done)]
        parts.add(done.name)
        return len(parts) == done.part_count

    def _counts(self) -> tuple[int, int]:
        """Return the objects and bytes that are done, and never fewer than were shown before."""
        objects, size_bytes, _ = self._done
        for name, (packed, packed_bytes) in list(self._now.items()):
            chunk = self._planned.get(name)
            objects += min(packed, chunk.object_count) if chunk else packed
            size_bytes += min(packed_bytes, chunk.object_bytes) if chunk else packed_bytes
        self._most = max(objects, self._most[0]), max(size_bytes, self._most[1])
        return min(self._most[0], self._all[0]), min(self._most[1], self._all[1])

    def _text(self, separator: str) -> str:
        (objects, size_bytes), (all_objects, all_bytes) = self._counts(), self._all
        rate = (self._reading if self._packing else self._sending).per_second
        return separator.join(
            part
            for part in (
                f"{show_size(size_bytes)} of {show_size(all_bytes)}",
                f"{show_size(round(rate))}/s" if rate else "",
                f"{objects:,}/{all_objects:,} objects",
                f"{self._skipped:,} skipped" if self._skipped else "",
                f"{self._done[2]}/{len(self._planned)} chunks",
                f"{self._failed} failed" if self._failed else "",
                f"{self._held} held by other runs" if self._held else "",
                f"{show_size(self._sent_bytes)} sent" if self._sent_bytes else "",
            )
            if part
        )

    def _show(self, *, seldom: bool = False) -> None:
        """Bring the bar up to date; `seldom`: only where that was not done just now."""
        now = time.monotonic()
        if not self._console.is_terminal or (seldom and now - self._shown_at < SHOWN_SECONDS):
            return
        self._shown_at = now
        size_bytes, total = self._counts()[1], max(self._all[1], 1)
        self._bar.update(
            self._task,
            description=self._source,
            total=total,
            completed=size_bytes,
            text=self._text("  "),
        )

    def _say_lines(self) -> None:
        while not self._over.wait(self._line_seconds):
            self._say(self.line())
            for wait in self.waits():
                self._say(f"{self._source}: {wait.sentence}")

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def object_of(chunk: Chunk) -> tuple[str, int]:
    """Return what the chunks of an object's parts have in common, which follow each other in their
    plan.
    """
    return chunk.plan, chunk.number - chunk.part
