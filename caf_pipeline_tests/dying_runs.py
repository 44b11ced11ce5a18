"""Runs a chunk's steps in a process of its own that kills itself, by SIGKILL, at a chosen moment.

A moment is the n-th call of anything that leaves a trace: a write, an fsync, a rename, a transaction of the ledger.
"""

import multiprocessing
import os
import random
import signal
from pathlib import Path

from caf_pipeline.database import Database, parse_url
from caf_pipeline.ledger import PostgresLedger
from caf_pipeline_tests.memory_source import MemorySource
from caf_pipeline_tests.plans import MOMENT
from caf_pipeline_tests.workplaces import StoreMaker, a_workplace, archive_chunk

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["caf_pipeline_tests.dying_runs"])

_LEDGER_MOVES = ("move", "seal", "record_posting", "record_copies", "load_locations", "reserve_staging", "release_staging")
_SYSTEM_CALLS = ("replace", "fsync", "write", "ftruncate", "posix_fallocate")


class SteadySource(MemorySource):
    """The same objects in every process."""

    def object(self, key):
        from caf_pipeline.inventory import S3Object

        return S3Object(key.encode(), None, f"etag-{key}", len(self.bodies[key]), MOMENT)


def a_steady_source() -> SteadySource:
    chance = random.Random(7)
    return SteadySource({f"key-{number:03d}": chance.randbytes(chance.randrange(90_000)) for number in range(60)})


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
    counted: "multiprocessing.Queue[int]",
) -> None:
    moments = [0]
    ledger = PostgresLedger(Database(parse_url(url)))
    work = a_workplace(Path(folder), a_steady_source(), ledger, run=f"run-{os.getpid()}", store=store, **settings)
    for name in _LEDGER_MOVES:
        _count_and_die(ledger, name, moments, fatal)
    for name in _SYSTEM_CALLS:
        if hasattr(os, name):
            _count_and_die(os, name, moments, fatal)
    archive_chunk(work, chunk)
    counted.put(moments[0])


def run(
    folder: Path, url: str, chunk: str, *, fatal: int = 0, store: StoreMaker | None = None, settings: dict | None = None
) -> int | None:
    """Run the chunk's steps; return the moments that passed, or None where the process was killed at `fatal`.

    `store` and `settings` are those of `a_workplace`; a function of a module, since another process is to find it.
    """
    counted = _PROCESSES.Queue()
    named = {"fatal": fatal, "store": store, "settings": settings or {}, "counted": counted}
    process = _PROCESSES.Process(target=_run, args=(str(folder), url, chunk), kwargs=named)
    process.start()
    process.join(120)
    if process.exitcode == -signal.SIGKILL:
        return None
    assert process.exitcode == 0, process.exitcode
    return counted.get(timeout=10)
