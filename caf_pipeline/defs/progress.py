"""The progress bar of `caf run`: objects, bytes, rate and chunks of one source, and what was sent to the store.

Not here: what is counted (the steps tell it), when it is shown (`command`).
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from caf_pipeline.interfaces import Chunk

BAR_WIDTH: Final = 16
"""Columns: with all that stands beside it, the line still fits into a terminal of 100."""

GIB: Final = 1 << 30


class ChunkProgress:
    """Shows how far the chunks of a source are; a context that draws on the console while it lasts."""

    def __init__(self, console: Console, source: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=BAR_WIDTH),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TextColumn("{task.fields[objects]:,}/{task.fields[all_objects]:,} objects"),
            TextColumn("{task.fields[chunks]}/{task.fields[all_chunks]} chunks"),
            TextColumn("{task.fields[sent]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task(source, total=None, objects=0, all_objects=0, chunks=0, all_chunks=0, sent="")
        self._finished = (0, 0, 0)  # objects, bytes and chunks of those that are done with
        self._objects = 0
        self._sent_bytes = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._progress.stop()

    def plan(self, chunks: Sequence[Chunk]) -> None:
        """Show how much there is to do, beside what is done."""
        objects, size_bytes, done = self._finished
        objects += sum(chunk.object_count for chunk in chunks)
        size_bytes += sum(chunk.object_bytes for chunk in chunks)
        self._progress.update(self._task, total=size_bytes, all_objects=objects, all_chunks=done + len(chunks))

    def packed(self, objects: int, size_bytes: int) -> None:
        """Count objects and bytes, as differences; called from the steps."""
        self._objects += objects
        self._progress.update(self._task, advance=size_bytes, objects=self._objects)

    def sent(self, size_bytes: int) -> None:
        """Count bytes sent, as differences, every copy; called from the steps, by several threads at once."""
        self._sent_bytes += size_bytes
        self._progress.update(self._task, sent=f"{self._sent_bytes / GIB:.2f} GiB sent")

    def finish(self, chunk: Chunk) -> None:
        """Count a chunk as done with: exactly its objects and bytes, however often they were packed or skipped."""
        objects, size_bytes, chunks = self._finished
        self._finished = objects + chunk.object_count, size_bytes + chunk.object_bytes, chunks + 1
        self._objects, done_bytes, done_chunks = self._finished
        self._progress.update(self._task, completed=done_bytes, objects=self._objects, chunks=done_chunks)
