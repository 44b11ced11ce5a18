"""Runs a chunk's steps in a process that kills itself by SIGKILL at a chosen moment.

A moment is the n-th call that leaves a trace: a write, an fsync, a rename, a lock, a transaction.
Checkpoints are frequent, so that kills fall before, in and behind them.
"""

import fcntl
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.packing import packer
from caf_pipeline.packing.journal.writer import CheckpointPace
from caf_pipeline.retrieval.reader import fetch
from caf_pipeline.steps.audit import account_for_chunk
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.plans import MOMENT
from caf_pipeline_tests.support.run_contexts import StoreMaker, a_run_context, archive_chunk

_PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = [
    f"caf_pipeline_tests.support.{name}" for name in ("dying_runs", "crashes", "process_template")
]
_PROCESSES.set_forkserver_preload(PRELOADED)

_LEDGER_CALLS = {
    "moves": ("move", "seal", "record_posting", "load_locations"),
    "replicas": ("record_verified",),
    "staging": ("reserve", "release", "packing_secret"),
}
_SYSTEM_CALLS = (
    *(
        "replace",
        "rename",
        "unlink",
        "fsync",
        "fdatasync",
        "write",
        "pwrite",
        "ftruncate",
        "posix_fallocate",
        "copy_file_range",
    ),
)

OFTEN = CheckpointPace(due_bytes=200_000, due_outcomes=7, ahead_bytes=400_000)
"""The pace of checkpoints for chunks of some megabytes."""


class SteadySource(MemorySource):
    """The same objects in every process. Reads are counted in the file `log`, if set."""

    log: Path | None = None

    def read(self, obj, start_byte, end_byte):
        if self.log:
            with self.log.open("ab", buffering=0) as file:
                file.write(b"%b %d %d\n" % (obj.key, start_byte, end_byte))
        return super().read(obj, start_byte, end_byte)

    def object(self, key):
        from caf_pipeline.inventory.objects import S3Object

        return S3Object(key.encode(), None, f"etag-{key}", len(self.bodies[key]), MOMENT)


def a_steady_source() -> SteadySource:
    chance = random.Random(7)
    return SteadySource(
        {f"key-{number:03d}": chance.randbytes(chance.randrange(90_000)) for number in range(60)}
    )


def a_split_source() -> SteadySource:
    """Return a source of one object of several 128 KiB chunks, and a small one.

    Test modules take seconds to import, so it is here.
    """
    return SteadySource({"huge": random.Random(5).randbytes(400_000), "k": b"small"})


SourceMaker = Callable[[], SteadySource]


def _count_and_die(owner: object, name: str, moments: list[int], fatal: int) -> None:
    original = getattr(owner, name)

    def counted(*arguments, **named):
        moments[0] += 1
        if moments[0] == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **named)
        moments[0] += 1
        if moments[0] == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)


def _run(
    folder: str,
    url: str,
    chunk: str,
    *,
    fatal: int,
    store: StoreMaker | None,
    settings: dict,
    source: SourceMaker,
    pace: CheckpointPace,
    counted: "multiprocessing.Queue[int]",
) -> None:
    moments = [0]
    packer.pace_of = lambda settings: pace
    ledger = Ledger(Database(url))
    context = a_run_context(
        Path(folder), source(), ledger, run=f"run-{os.getpid()}", store=store, **settings
    )
    for topic, names in _LEDGER_CALLS.items():
        for name in names:
            _count_and_die(getattr(ledger, topic), name, moments, fatal)
    for name in _SYSTEM_CALLS:
        if hasattr(os, name):
            _count_and_die(os, name, moments, fatal)
    _count_and_die(fcntl, "flock", moments, fatal)
    archive_chunk(context, chunk)
    counted.put(moments[0])


def run(
    folder: Path,
    url: str,
    chunk: str,
    *,
    fatal: int = 0,
    store: StoreMaker | None = None,
    settings: dict | None = None,
    source: SourceMaker = a_steady_source,
    pace: CheckpointPace = OFTEN,
) -> int | None:
    """Run the chunk's steps; return the number of moments, or None after a kill at `fatal`.

    `store` and `settings` are those of `a_run_context`; `source` makes its source. Functions must
    be at the top of a module in support/, which the other process imports.
    """
    counted = _PROCESSES.Queue()
    named = {
        "fatal": fatal,
        "store": store,
        "settings": settings or {},
        "source": source,
        "pace": pace,
        "counted": counted,
    }
    process = _PROCESSES.Process(target=_run, args=(str(folder), url, chunk), kwargs=named)
    process.start()
    process.join(PATIENCE_SECONDS)
    if process.exitcode == -signal.SIGKILL:
        return None
    assert process.exitcode == 0, process.exitcode
    return counted.get(timeout=PATIENCE_SECONDS)


def ends_right(context, name):
    chunk = context.ledger.chunks.get(name)
    account = context.ledger.chunks.account("src")
    assert chunk.state is ChunkState.LOCATED
    assert account_for_chunk(context, name).agrees
    assert (account.located_objects, account.claimed_objects) == (chunk.object_count, 0)
    assert list(context.staging().iterdir()) == []
    assert len(list((context.store.folder / "chunks").iterdir())) == 1
    for key, body in context.objects.bodies.items():
        assert b"".join(fetch(context.ledger.lookup, context.store, "src", key).pieces) == body
