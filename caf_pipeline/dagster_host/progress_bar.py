"""Shows the progress of `caf run`: a bar on a terminal, otherwise a line every minute.

Objects and bytes count once packed or skipped, even if their chunk fails later: the next run
resumes there. The counts never decrease.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from caf_pipeline.chunk_state import UNDER_WAY, ChunkState
from caf_pipeline.errors import CafError, one_line
from caf_pipeline.ledger.records import LiveWork
from caf_pipeline.records import Chunk
from caf_pipeline.system.processes import Holder
from caf_pipeline.system.quantities import show_size
from caf_pipeline.waits import LINE_SECONDS, Announcer, Work

BAR_WIDTH: Final = 16
"""Columns, for a line of 100."""

POLL_SECONDS: Final = 1.0
"""Seconds between two looks at the ledger, which runs update as often."""


class Rate:
    """The rate of packing or of sending, over the time in which bytes moved."""

    def __init__(self) -> None:
        self.per_second: float | None = None
        self._seconds = 0.0
        self._bytes = 0

    def add(self, size_bytes: int, seconds: float) -> None:
        if size_bytes > 0 and seconds > 0:
            self._bytes += size_bytes
            self._seconds += seconds
            self.per_second = self._bytes / self._seconds


class ChunkProgress:
    """Shows the progress of a source's chunks."""

    def __init__(
        self,
        console: Console,
        source: str,
        live: Callable[[], Sequence[LiveWork]],
        *,
        line_seconds: float = LINE_SECONDS,
    ) -> None:
        """`live` reads the work of the command's processes from the ledger."""
        self._live = live
        self._works: dict[Holder, Work] = {}
        self._announcer = Announcer(lambda line: self._print(f"{source}: {one_line(line)}"))
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
        self._total = (0, 0)  # objects and bytes of the planned chunks
        self._done = (0, 0, 0)  # objects, bytes and chunks whose run succeeded
        # Of each object in parts, the chunks that are archived.
        self._parts = defaultdict[tuple[str, int], set[str]](set)
        # Packed objects and bytes of chunks.
        self._partial: dict[str, tuple[int, int]] = {}
        self._ended: set[str] = set()  # chunks whose run succeeded
        self._shown = (0, 0)  # the largest objects and bytes that were shown
        self._failed = self._held = self._skipped = 0
        self._reading, self._sending = Rate(), Rate()
        self._rate = self._reading
        self._began = self._looked_at = self._planned_at = time.monotonic()
        self._moved_bytes = 0  # read and sent, by this command's processes
        self._over = threading.Event()
        self._looks = threading.Thread(target=self._look_repeatedly, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self._console.is_terminal:
            self._bar.start()
        self._looks.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        # A look under way has a connection of the ledger, which is closed next. It may hang.
        self._looks.join(None if error is None else POLL_SECONDS)
        self._shown = 0, 0
        if self._console.is_terminal:
            self._update()
            if not self._planned:
                self._bar.update(self._task, visible=False)
            self._bar.stop()
        elif self._planned:
            self._print(self.line())

    def plan(self, chunks: Sequence[Chunk], *, located: Iterable[Chunk] = ()) -> None:
        """`located` must contain the located chunks that share a split object with them."""
        for chunk in located:
            if chunk.part:
                self._parts[object_of(chunk)].add(chunk.name)
        if not self._planned:
            self._planned_at = time.monotonic()
        self._planned |= {chunk.name: chunk for chunk in chunks if chunk.state in UNDER_WAY}
        planned = self._planned.values()
        whole_objects = sum(chunk.object_count for chunk in planned if not chunk.part)
        split_objects = len({object_of(chunk) for chunk in planned if chunk.part})
        self._total = whole_objects + split_objects, sum(chunk.object_bytes for chunk in planned)
        self._update()

    def forget(self, name: str) -> None:
        if self._planned.pop(name, None):
            self._failed -= 1
        self._partial.pop(name, None)
        self._update()

    def look(self) -> None:
        """Read from the ledger how far the processes are, and announce their waits."""
        now = time.monotonic()
        works = {item.holder: item.work for item in self._live()}
        read_bytes = sent_bytes = 0
        for holder, work in works.items():
            before = self._works.get(holder, Work())
            read_bytes += max(work.read_bytes - before.read_bytes, 0)
            sent_bytes += max(work.sent_bytes - before.sent_bytes, 0)
            chunk = self._planned.get(work.chunk)
            if chunk is not None:
                # An object in parts counts when all its parts are archived.
                objects = 0 if chunk.part else work.packed_objects
                self._partial[work.chunk] = objects, work.packed_bytes
        self._moved_bytes += read_bytes + sent_bytes
        self._reading.add(read_bytes, now - self._looked_at)
        self._sending.add(sent_bytes, now - self._looked_at)
        if read_bytes or sent_bytes:
            self._rate = self._reading if read_bytes else self._sending
        self._works, self._looked_at = works, now
        self._announcer([wait for work in works.values() for wait in work.waits])
        self._update()

    def end(self, name: str, done: Chunk | None, *, held: bool = False) -> None:
        """`done` is None if the run failed or the chunk is held."""
        if done is None:
            self._held += held
            self._failed += not held
        else:
            self._ended.add(name)
        if done is not None and name in self._planned:
            objects, size_bytes, chunks = self._done
            if not done.part:
                objects += done.member_count + done.skipped_count
            elif done.state is ChunkState.LOCATED and not done.part_abandoned:
                parts = self._parts[object_of(done)]
                parts.add(done.name)
                objects += len(parts) == done.part_count
            # The ledger has no size of skipped objects. If no object was released, it is the rest
            # of the chunk.
            adds_skipped = done.skipped_count and not done.released_count
            size_bytes += done.object_bytes if adds_skipped else done.member_bytes
            self._done = objects, size_bytes, chunks + 1
            self._skipped += done.skipped_count
        self._update()

    def line(self) -> str:
        if not self._planned:
            minutes = int((time.monotonic() - self._began) / 60)
            return f"{self._source}: taking an inventory and planning, for {minutes} min"
        return f"{self._source}: {self._text(', ')}"

    def _counts(self) -> tuple[int, int]:
        # Returns finished objects and bytes, never fewer than were shown before.
        objects, size_bytes, _ = self._done
        for name, (packed, packed_bytes) in list(self._partial.items()):
            chunk = self._planned.get(name)
            if chunk is not None and name not in self._ended:
                objects += min(packed, chunk.object_count)
                size_bytes += min(packed_bytes, chunk.object_bytes)
        self._shown = max(objects, self._shown[0]), max(size_bytes, self._shown[1])
        return min(self._shown[0], self._total[0]), min(self._shown[1], self._total[1])

    def _text(self, separator: str) -> str:
        (objects, size_bytes), (all_objects, all_bytes) = self._counts(), self._total
        rate = self._rate.per_second
        works = list(self._works.values())
        sent_bytes = sum(work.sent_bytes for work in works if work.chunk not in self._ended)
        # Each byte is packed and sent, so it counts twice.
        bytes_left = max(2 * all_bytes - size_bytes - self._done[1] - sent_bytes, 0)
        time_left = ""
        if self._moved_bytes and bytes_left and not self._over.is_set():
            seconds = (time.monotonic() - self._planned_at) * bytes_left / self._moved_bytes
            time_left = f"{timedelta(seconds=round(seconds))} left"
        return separator.join(
            part
            for part in (
                f"{show_size(size_bytes)} of {show_size(all_bytes)}",
                f"{show_size(round(rate))}/s" if rate else "",
                time_left,
                f"{objects:,}/{all_objects:,} objects",
                f"{self._skipped:,} skipped" if self._skipped else "",
                f"{self._done[2]}/{len(self._planned)} chunks",
                f"{self._failed} failed" if self._failed else "",
                f"{self._held} held by other runs" if self._held else "",
                f"{show_size(sent_bytes)} sent of chunks under way" if sent_bytes else "",
            )
            if part
        )

    def _update(self) -> None:
        if not self._console.is_terminal:
            return
        size_bytes, total = self._counts()[1], max(self._total[1], 1)
        self._bar.update(
            self._task,
            description=self._source,
            total=total,
            completed=size_bytes,
            text=self._text("  "),
        )

    def _look_repeatedly(self) -> None:
        printed_at = self._began
        while not self._over.wait(min(POLL_SECONDS, self._line_seconds)):
            with suppress(CafError):  # the runs report the same
                self.look()
            if not self._console.is_terminal and (
                time.monotonic() - printed_at >= self._line_seconds
            ):
                printed_at = time.monotonic()
                self._print(self.line())
                for wait in self._announcer.waits:
                    self._print(f"{self._source}: {wait.sentence}")

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def object_of(chunk: Chunk) -> tuple[str, int]:
    """Return a key shared by all chunks with parts of an object."""
    return chunk.plan, chunk.number - chunk.part
