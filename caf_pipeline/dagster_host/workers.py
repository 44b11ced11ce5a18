"""Archives several chunks of a source concurrently, in one process each.

Threads would not do: packing small objects takes a whole core of Python, and Ctrl-C reaches only a
process's main thread.
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
from typing import Final, Self, cast

from caf_pipeline.dagster_host import worker
from caf_pipeline.dagster_host.setup import Machine
from caf_pipeline.dagster_host.source_runs import ChunkOutcome
from caf_pipeline.dagster_host.team_project import team_project
from caf_pipeline.errors import CafError, StagingError
from caf_pipeline.records import Chunk
from caf_pipeline.settings import Settings
from caf_pipeline.system.child_environment import Need, child_environment

MOST_PACKING: Final = 8
WORKER_BYTES: Final = 500 << 20
"""Memory of a worker that packs many small objects."""

CONCURRENT_MIN_BYTES: Final = 1 << 30
"""Bytes of all chunks but the largest, below which one worker is as fast. A start takes 2 s."""

_NEEDS: Final = Need.SETTINGS | Need.NETWORK | Need.S3 | Need.WALLET | Need.STORAGE | Need.POSTGRES
"""The settings, with the worker key and the ledger's URL, reach a worker by its pipe."""


def best_worker_count(chunks: Sequence[Chunk], machine: Machine) -> int:
    """Return how many workers archive these chunks fastest: one sends, the others pack.

    At least one packs. Two cores, room in staging and memory are needed for each further worker.
    """
    sizes = [chunk.object_bytes for chunk in chunks]
    if not sizes or sum(sizes) - max(sizes) < CONCURRENT_MIN_BYTES:
        return 1
    largest = max(chunk.expected_size_bytes for chunk in chunks)
    return max(
        2,
        min(
            1 + min(machine.cores // 2, MOST_PACKING),
            machine.staging_bytes // max(largest, 1),
            machine.memory_bytes // WORKER_BYTES,
        ),
    )


class _Worker:
    def __init__(self, settings: Settings, source: str) -> None:
        self.chunk: Chunk | None = None
        self.is_packing = False
        self._ready = False
        self.connection, child_end = Pipe()
        # The check `caf_chunk_reads_back` of a private chunk may need the passphrase.
        is_public = settings.source(source).public
        needs = _NEEDS if is_public else _NEEDS | Need.IDENTITY
        # A team's definitions may read any variable.
        is_teams = team_project(settings.folder) is not None
        with child_end:
            # The process has its own group: a terminal sends Ctrl-C to the command's whole group,
            # and the command passes it on once.
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "caf_pipeline.entry",
                    str(child_end.fileno()),
                    str(os.getpid()),
                ],
                env=dict(os.environ) if is_teams else child_environment(needs),
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        self.connection.send((settings, source))

    def begin(self, chunk: Chunk) -> None:
        self.chunk, self.is_packing = chunk, True
        with suppress(OSError):  # if the process is dead, `receive` reports it
            self.connection.send(chunk.name)

    def receive(self) -> ChunkOutcome | None:
        """Handle the next message; return the outcome if the chunk's run has ended.

        Raises a CafError if the process can archive no chunk at all.
        """
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            how = f"ended with status {code}"
            if code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
            task = f"chunk {self.chunk.name}" if self.chunk else "chunks"
            return ChunkOutcome(
                CafError(
                    f"the process that archived {task} {how}",
                    hint="run the command again: it resumes. If the machine ran out of memory, use "
                    "--workers 1",
                )
            )
        if isinstance(message, CafError):
            raise message
        if message == worker.READY:
            self._ready = True
            return None
        self.is_packing = False
        return None if message == worker.SEALED else cast(ChunkOutcome, message)

    def interrupt(self) -> None:
        """Send SIGINT, or SIGKILL if the process is not ready and thus has begun nothing."""
        self.process.send_signal(signal.SIGINT if self._ready else signal.SIGKILL)

    def finish(self) -> None:
        with suppress(OSError):
            self.connection.send(None)
        with suppress(EOFError, OSError):
            while True:
                self.connection.recv()
        self.process.wait()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None


class Workers:
    """Several concurrent worker processes.

    `count` is at least 2. At most `count` - 1 chunks are packed while another is sent.
    """

    def __init__(self, count: int, settings: Settings, source: str) -> None:
        self._count = count
        self._max_packing = max(count - 1, 1)
        self._settings, self._source = settings, source
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        self._workers = [self._start() for _ in range(self._count)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the processes; another Ctrl-C kills them."""
        try:
            for process in self._workers:
                if error is not None and not process.has_ended:
                    process.interrupt()
            for process in self._workers:
                process.finish()
        except BaseException:
            for process in self._workers:
                process.process.kill()
            raise

    def archive(
        self, waiting: deque[Chunk], *, no_room: Callable[[StagingError], None]
    ) -> Iterator[tuple[Chunk, ChunkOutcome]]:
        """Yield each chunk when its run has ended.

        If staging has no room beside other chunks, `no_room` is called, and from then on one chunk
        is archived at a time. Clearing `waiting` keeps further chunks from starting.
        """
        while waiting or any(process.chunk for process in self._workers):
            for process in self._workers:
                under_way = sum(item.chunk is not None for item in self._workers)
                packing = sum(item.is_packing for item in self._workers)
                if not waiting or under_way >= self._count or packing >= self._max_packing:
                    break
                if process.chunk is None:
                    process.begin(waiting.popleft())
            for connection in wait([process.connection for process in self._workers]):
                process = next(item for item in self._workers if item.connection is connection)
                outcome, chunk = process.receive(), process.chunk
                if outcome is None:
                    continue
                process.chunk = None
                if process.has_ended:
                    self._workers[self._workers.index(process)] = self._start()
                if chunk is None:  # the process died while idle
                    continue
                others_under_way = any(item.chunk for item in self._workers)
                if isinstance(outcome.error, StagingError) and others_under_way:
                    self._count = self._max_packing = 1
                    waiting.appendleft(chunk)
                    no_room(outcome.error)
                    continue
                yield chunk, outcome

    def pids(self) -> list[int]:
        """Thread-safe."""
        return [item.process.pid for item in self._workers]

    def _start(self) -> _Worker:
        return _Worker(self._settings, self._source)
