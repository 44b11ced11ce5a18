"""Several chunks of a source at a time, each archived by a process of its own: one is packed while
another is sent.

A worker is told a chunk, tells how far it is, and says how the chunk's run ended. Processes and no
threads: packing small objects takes a whole core of Python, and Ctrl-C reaches nothing but the main
thread of a process.
"""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait
from types import TracebackType
from typing import Final, Self

from caf_pipeline.dagster_host import worker
from caf_pipeline.dagster_host.source_runs import Archived, RunListener
from caf_pipeline.errors import CafError, StagingError
from caf_pipeline.ledger.records import Chunk
from caf_pipeline.settings import Settings

AT_ONCE: Final = 2
"""Chunks at a time where nothing else is asked for: one is packed, one is sent.

Each takes room in staging.
"""

WORTH_BYTES: Final = 1 << 30
"""Objects beside the largest chunk, below which one chunk after the other is as fast: a process
takes about 2 s to start.
"""


def workers_worth(chunks: Sequence[Chunk]) -> int:
    """Return at how many chunks at a time these are archived soonest."""
    sizes = [chunk.object_bytes for chunk in chunks]
    return AT_ONCE if sizes and sum(sizes) - max(sizes) >= WORTH_BYTES else 1


class _Worker:
    """One of the processes, as the command sees it. It is idle while it has no chunk."""

    def __init__(self, settings: Settings, source: str, told: RunListener) -> None:
        self.told = told
        self.chunk: Chunk | None = None
        self.is_packing = False
        self._ready = False
        self.connection, theirs = Pipe()
        with theirs:
            # A group of its own: at a terminal, Ctrl-C goes to the whole group, and the command
            # passes it on once.
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "caf_pipeline.entry",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        self.connection.send((settings, source))

    def begin(self, chunk: Chunk) -> None:
        """Let it archive a chunk."""
        self.chunk, self.is_packing = chunk, True
        with suppress(OSError):  # where it is dead, `take` says so
            self.connection.send(chunk.name)

    def take(self) -> Archived | None:
        """Take the next message; return how the chunk's run ended, where it is that.

        Raises:
            CafError: the process cannot begin at all.
        """
        try:
            name, arguments, named = self.connection.recv()
        except (EOFError, OSError):
            return Archived(self._died())
        if name == worker.READY:
            self._ready = True
        elif name == worker.BROKEN:
            raise arguments[0]
        elif name == worker.ARCHIVED:
            self.is_packing = False
            return Archived(*arguments)
        else:
            self.is_packing = self.is_packing and name != worker.SEALED
            getattr(self.told, name)(*arguments, **named)
        return None

    def interrupt(self) -> None:
        """Pass Ctrl-C on; a process that is not ready to take it has begun nothing."""
        self.process.send_signal(signal.SIGINT if self._ready else signal.SIGKILL)

    def finish(self) -> None:
        """Wait for its end; what it still tells goes nowhere."""
        with suppress(OSError):
            self.connection.send(None)
        with suppress(EOFError, OSError):
            while True:
                self.connection.recv()
        self.process.wait()

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self.process.poll() is not None

    def _died(self) -> CafError:
        code = self.process.wait()
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with status {code}"
        )
        return CafError(
            f"the process that archived {f'chunk {self.chunk.name}' if self.chunk else 'chunks'} "
            f"{how}",
            hint="run it again: it goes on where it stopped. Where the machine ran out of memory, "
            "archive with --workers 1",
        )


class Workers:
    """Archives chunks of a source, several at a time; a context in which the processes live.

    Of the chunks at a time, all but one are packed: of two, one is packed while the other is sent.
    """

    def __init__(
        self, count: int, settings: Settings, source: str, tell: Callable[[], RunListener]
    ) -> None:
        """Set what is archived.

        Args:
            count: chunks at a time, at least 2.
            settings: for the processes.
            source: whose chunks they are.
            tell: returns whom a worker tells how far its chunks are.
        """
        self._count = count
        self._packing = max(count - 1, 1)
        self._settings, self._source, self._tell = settings, source, tell
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        """Start the processes; the second is loaded while the first begins."""
        self._workers = [self._started() for _ in range(self._count)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the processes, and wait for them; another Ctrl-C meanwhile kills them."""
        try:
            for each in self._workers:
                if error is not None and not each.has_ended:
                    each.interrupt()
            for each in self._workers:
                each.finish()
        except BaseException:
            for each in self._workers:
                each.process.kill()
            raise

    def archive(
        self, waiting: deque[Chunk], *, no_room: Callable[[StagingError], None]
    ) -> Iterator[tuple[Chunk, Archived]]:
        """Yield each chunk when its run ended, until none is waiting and none is under way.

        A chunk for which staging has no room beside the others waits until they are archived.

        Args:
            waiting: chunks are taken from its left; who clears it lets no further one begin.
            no_room: told why from now on there is one chunk at a time.
        """
        while waiting or any(each.chunk for each in self._workers):
            self._hand_out(waiting)
            for ready in wait([each.connection for each in self._workers]):
                each = next(each for each in self._workers if each.connection is ready)
                archived, chunk = each.take(), each.chunk
                if archived is None:
                    continue
                each.chunk = None
                if each.has_ended:
                    self._workers[self._workers.index(each)] = self._started()
                if chunk is None:  # it died while it had nothing to do
                    continue
                if isinstance(archived.error, StagingError) and any(
                    one.chunk for one in self._workers
                ):
                    self._count = self._packing = 1
                    waiting.appendleft(chunk)
                    no_room(archived.error)
                    continue
                yield chunk, archived

    def _hand_out(self, waiting: deque[Chunk]) -> None:
        """Let idle workers begin, as long as not too many chunks are under way."""
        for each in self._workers:
            under_way = sum(one.chunk is not None for one in self._workers)
            packing = sum(one.is_packing for one in self._workers)
            if not waiting or under_way >= self._count or packing >= self._packing:
                return
            if each.chunk is None:
                each.begin(waiting.popleft())

    def _started(self) -> _Worker:
        return _Worker(self._settings, self._source, self._tell())
