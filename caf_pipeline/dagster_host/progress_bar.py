"""Shows the progress of `caf run`: a bar on a terminal, otherwise a line every minute.

Objects and bytes count once packed or skipped, even if their chunk fails later: the next run
resumes there. The counts never decrease.
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
"""Columns, for a line of 100."""

UPDATE_SECONDS: Final = 0.1
"""Minimum between updates: thousands of objects finish per second."""


class Rate:
    """The rate of packing or of sending."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._seconds = 0.0
        self._bytes = 0

    def begin(self) -> None:
        self._since = self._clock()

    def end(self) -> None:
        self._since = None

    def add(self, size_bytes: int) -> None:
        now = self._clock()
        if self._since is not None:
            self._seconds += now - self._since
            self._bytes += size_bytes
        self._since = now

    @property
    def per_second(self) -> float | None:
        return self._bytes / self._seconds if self._bytes and self._seconds > 0 else None


class ChunkProgress:
    """Shows the progress of a source's chunks."""

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
        self._total = (0, 0)  # objects and bytes of the planned chunks
        self._done = (0, 0, 0)  # objects, bytes and chunks whose run succeeded
        # Of each object in parts, the chunks that are archived.
        self._parts = defaultdict[tuple[str, int], set[str]](set)
        # Objects and bytes of each chunk that is under way or failed.
        self._partial: dict[str, tuple[int, int]] = {}
        self._shown = (0, 0)  # the largest objects and bytes that were shown
        self._packing: set[str] = set()  # chunks that are being packed
        self._failed = self._held = self._skipped = 0
        self._reading, self._sending = Rate(), Rate()
        self._sent_bytes = 0
        self._updated_at = 0.0
        self._began = time.monotonic()
        self._over = threading.Event()
        self._lines = threading.Thread(target=self._print_lines, name="progress", daemon=True)

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

    def begin(self, name: str) -> None:
        self._partial[name] = 0, 0
        self._packing.add(name)
        self._reading.begin()
        self._sending.end()

    def packed(self, name: str, objects: int, size_bytes: int, *, resumed: bool = False) -> None:
        before = self._partial[name]
        chunk = self._planned.get(name)
        if chunk is not None and chunk.part:
            objects = 0  # an object counts when all its parts are archived
        self._partial[name] = before[0] + objects, before[1] + size_bytes
        self._reading.add(0 if resumed else size_bytes)
        self._update(throttle=True)

    def sealed(self, name: str) -> None:
        self._packing.discard(name)

    def sent(self, size_bytes: int) -> None:
        """Thread-safe."""
        self._sent_bytes += size_bytes
        self._sending.add(size_bytes)
        self._update(throttle=True)

    def end(self, name: str, done: Chunk | None, *, held: bool = False) -> None:
        """`done` is None if the run failed or the chunk is held."""
        if done is None:
            self._held += held
            self._failed += not held
        else:
            self._partial.pop(name, None)
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
        self._packing.discard(name)
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
            objects += min(packed, chunk.object_count) if chunk else packed
            size_bytes += min(packed_bytes, chunk.object_bytes) if chunk else packed_bytes
        self._shown = max(objects, self._shown[0]), max(size_bytes, self._shown[1])
        return min(self._shown[0], self._total[0]), min(self._shown[1], self._total[1])

    def _text(self, separator: str) -> str:
        (objects, size_bytes), (all_objects, all_bytes) = self._counts(), self._total
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

    def _update(self, *, throttle: bool = False) -> None:
        now = time.monotonic()
        is_recent = throttle and now - self._updated_at < UPDATE_SECONDS
        if is_recent or not self._console.is_terminal:
            return
        self._updated_at = now
        size_bytes, total = self._counts()[1], max(self._total[1], 1)
        self._bar.update(
            self._task,
            description=self._source,
            total=total,
            completed=size_bytes,
            text=self._text("  "),
        )

    def _print_lines(self) -> None:
        while not self._over.wait(self._line_seconds):
            self._print(self.line())
            for wait in self.waits():
                self._print(f"{self._source}: {wait.sentence}")

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def object_of(chunk: Chunk) -> tuple[str, int]:
    """Return a key shared by all chunks with parts of an object."""
    return chunk.plan, chunk.number - chunk.part
