"""A source that is the same in every process, and processes that archive its chunk.

Checkpoints are frequent, so that kills fall before, in and behind them.
"""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.inventory.objects import S3Object
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.packing import packer
from caf_pipeline.packing.journal.writer import CheckpointPace
from caf_pipeline.retrieval.reader import fetch
from caf_pipeline.steps.audit import account_for_chunk
from caf_pipeline_tests.support.kills import Fatal, Moments, Process
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.plans import MOMENT
from caf_pipeline_tests.support.run_contexts import CHUNK_STEPS, a_run_context

OFTEN = CheckpointPace(due_bytes=200_000, due_outcomes=7, ahead_bytes=400_000)
"""The pace of checkpoints for chunks of some megabytes."""


class SteadySource(MemorySource):
    """The same objects in every process."""

    def object(self, key):
        return S3Object(key.encode(), None, f"etag-{key}", len(self.bodies[key]), MOMENT)


def a_steady_source() -> SteadySource:
    chance = random.Random(7)
    return SteadySource(
        {f"key-{number:03d}": chance.randbytes(chance.randrange(90_000)) for number in range(60)}
    )


def a_split_source() -> SteadySource:
    """Return a source of one object of several 128 KiB chunks, and a small one."""
    return SteadySource({"huge": random.Random(5).randbytes(400_000), "k": b"small"})


def _archive(
    moments: Moments,
    *,
    folder: Path,
    url: str,
    chunk: str,
    source: Callable[[], SteadySource],
    lease_seconds: float,
    settings: dict[str, Any],
) -> None:
    packer.pace_of = lambda settings: OFTEN
    ledger = Ledger(Database(url), lease_seconds=lease_seconds)
    context = a_run_context(folder, source(), ledger, run="run-dead", **settings)
    for step in CHUNK_STEPS:
        with moments.step(step.__name__):
            step(context, chunk)


def start_run(
    folder: Path,
    url: str,
    chunk: str,
    *,
    fatal: Fatal | None = None,
    source: Callable[[], SteadySource] = a_steady_source,
    lease_seconds: float = 60,
    **settings: Any,
) -> Process:
    """Start a process that runs the chunk's steps; `settings` are those of `a_run_context`."""
    action = functools.partial(
        _archive,
        folder=folder,
        url=url,
        chunk=chunk,
        source=source,
        lease_seconds=lease_seconds,
        settings={"target": "8MiB"} | settings,
    )
    return Process(action, fatal=fatal)


def run(folder: Path, url: str, chunk: str, **options: Any) -> int:
    """Run the chunk's steps as `start_run` does; return the exit status, negative for a signal."""
    return start_run(folder, url, chunk, **options).wait()


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
