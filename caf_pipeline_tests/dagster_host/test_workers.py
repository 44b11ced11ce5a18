"""Concurrent workers, with real processes that are interrupted and killed."""

import contextlib
import io
import os
import pickle
import signal
from collections import deque
from itertools import pairwise

import psutil
import pytest
from dagster import RunsFilter
from pydantic import ByteSize, SecretStr
from rich.console import Console

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host.run_source import run_source
from caf_pipeline.dagster_host.setup import Machine
from caf_pipeline.dagster_host.workers import CONCURRENT_MIN_BYTES as GIB
from caf_pipeline.dagster_host.workers import Workers, best_worker_count
from caf_pipeline.encryption.identities import IDENTITY_VARIABLE
from caf_pipeline.errors import (
    ChunkTooLarge,
    HeldByOther,
    LedgerUnreachable,
    ObjectUnavailable,
    TransactionRefused,
)
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.naming import PARTITION_TAG
from caf_pipeline.settings import PASSPHRASE_VARIABLE, PackingSettings
from caf_pipeline_tests.support.chunk_rows import a_chunk
from caf_pipeline_tests.support.command_line import KEYS, CommandLine, source_text
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS, wait_for

pytestmark = pytest.mark.thorough

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

SOURCE = "my-source"
OBJECTS = 30


@pytest.fixture
def run(pipeline):
    """Run the command with two workers; `run.printed` has its output."""

    def command(**options):
        command.printed = io.StringIO()
        options = {
            "settings": pipeline.settings,
            "workers": 2,
            "console": Console(file=command.printed, width=200),
        } | options
        (summary,) = run_source(SOURCE, **options)
        return summary

    return command


def test_of_two_chunks_at_a_time_one_is_packed(pipeline, run):
    pipeline.put(36)
    run()
    packed = sorted(_packing_time(pipeline.instance, chunk) for chunk in pipeline.chunks())
    assert len(packed) == 6
    assert all(before[1] <= after[0] for before, after in pairwise(packed))


def _packing_time(instance, chunk):
    """Return when packing a chunk began and ended."""
    (run,) = instance.get_runs(RunsFilter(tags={PARTITION_TAG: chunk}))
    (packing,) = [
        step
        for step in instance.get_run_step_stats(run.run_id)
        if step.step_key.endswith(".caf_pack_chunk")
    ]
    return packing.start_time, packing.end_time


def test_chunks_are_sequential_if_staging_has_room_for_one(pipeline, run):
    pipeline.put(36)
    pipeline.plan()
    most = max(chunk.expected_size_bytes for chunk in pipeline.ledger.chunks.list(SOURCE))
    packing = PackingSettings(staging_limit=ByteSize(most * 1.5))
    store = pipeline.settings.store
    summary = run(
        settings=pipeline.settings.model_copy(update={"packing": packing, "store": store}),
        workers=3,
    )
    assert (summary.objects, summary.failed, summary.exit_status) == (36, {}, 0)
    assert "after the other" in run.printed.getvalue()


@pytest.fixture
def caf(tmp_path, database_url, s3_server, new_bucket):
    """A command line for a source with five chunks."""
    for number in range(OBJECTS):
        new_bucket.put(f"key-{number:03}", os.urandom(3_000))
    caf = CommandLine(tmp_path, KEYS | {"CAF_DATABASE_URL": database_url})
    caf.settings(source_text(s3_server, new_bucket.name, target_size="20000"))
    return caf


@pytest.fixture
def command(caf, ledger, database):
    """A command with two workers, paused while both have a chunk."""
    process = caf.start("run", "--source", "src", "--workers", "2")
    try:
        wait_for(
            lambda: any(chunk.state is ChunkState.LOCATED for chunk in ledger.chunks.list()),
            process,
        )
        Ledger(database).controls.set("paused", "a test")
        wait_for(lambda: chunks_that_wait(ledger), process)
        yield process
    finally:
        process.kill()
        process.communicate()


def chunks_that_wait(ledger):
    """Return unlocated chunks that wait for the pause's end.

    A wait for S3 or the store ends by itself, and a located chunk's last steps may wait, too.
    """
    located = {chunk.name for chunk in ledger.chunks.list(states=[ChunkState.LOCATED])}
    return [
        wait.chunk
        for item in ledger.progress.live()
        for wait in item.work.waits
        if wait.chunk and wait.chunk not in located and "a test" in wait.what
    ]


def our_workers(pid=None):
    """Return the worker processes of a process; default: this one."""
    return [
        child for child in psutil.Process(pid).children() if "caf_pipeline.entry" in child.cmdline()
    ]


def is_alive(process):
    """Return whether a process runs; a zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def finished_by_the_next(caf, ledger, database):
    Ledger(database).controls.set("paused", None)
    assert caf.process("run", "--source", "src").status == 0
    assert ledger.chunks.account("src").located_objects == OBJECTS
    assert {chunk.state for chunk in ledger.chunks.list()} == {ChunkState.LOCATED}


def test_ctrl_c_ends_the_workers_and_the_next_resumes(caf, command, ledger, database):
    workers = our_workers(command.pid)
    assert len(workers) == 2
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=PATIENCE_SECONDS)
    assert command.returncode == 130
    assert b"Traceback" not in err
    assert b"interrupted" in err
    assert not any(is_alive(worker) for worker in workers)
    finished_by_the_next(caf, ledger, database)


def test_workers_end_with_a_killed_command(caf, command, ledger, database):
    workers = our_workers(command.pid)
    command.kill()
    command.wait()
    wait_for(lambda: not any(is_alive(worker) for worker in workers))
    finished_by_the_next(caf, ledger, database)


def test_a_worker_that_is_killed_fails_its_chunk_alone(caf, command, ledger, database):
    (waiting, *_) = chunks_that_wait(ledger)
    (lease,) = [lease for lease in ledger.leases.list() if lease.name == chunk_lease(waiting)]
    psutil.Process(lease.holder.pid).kill()
    Ledger(database).controls.set("paused", None)
    _, err = command.communicate(timeout=PATIENCE_SECONDS)
    assert command.returncode == 12
    assert f"chunk {waiting} was killed".encode() in err
    assert {
        chunk.name for chunk in ledger.chunks.list() if chunk.state is not ChunkState.LOCATED
    } == {waiting}
    finished_by_the_next(caf, ledger, database)


def test_a_general_error_is_raised_and_ends_all_workers(pipeline):
    settings = pipeline.settings.model_copy(
        update={"database_url": SecretStr("postgresql://nobody@127.0.0.1:1/none")}
    )
    with pytest.raises(LedgerUnreachable) as raised, Workers(2, settings, SOURCE) as workers:
        list(workers.archive(deque([a_chunk("src-1-1")]), no_room=print))
    assert raised.value.hint
    assert our_workers() == []


@pytest.mark.parametrize("is_public", [True, False])
def test_a_worker_has_only_the_secrets_that_it_uses(pipeline, monkeypatch, is_public):
    for name in (IDENTITY_VARIABLE, PASSPHRASE_VARIABLE, "CAF_WORKER_KEY", "CAF_DATABASE_URL"):
        monkeypatch.setenv(name, "a secret")
    source = pipeline.settings.source(SOURCE).model_copy(update={"public": is_public})
    settings = pipeline.settings.model_copy(update={"sources": {SOURCE: source}})
    with Workers(2, settings, SOURCE):
        environments = [worker.environ() for worker in our_workers()]
    secret = {name for each in environments for name, value in each.items() if value == "a secret"}
    assert secret == (set() if is_public else {IDENTITY_VARIABLE, PASSPHRASE_VARIABLE})


@pytest.mark.parametrize(
    ("cores", "memory_bytes", "staging_bytes", "count"),
    [
        (1, 8 << 30, 900 * GIB, 2),
        (4, 8 << 30, 900 * GIB, 3),
        (64, 8 << 30, 900 * GIB, 9),
        (64, 2 << 30, 900 * GIB, 4),
        (64, 8 << 30, 5 * GIB, 5),
    ],
)
def test_workers_follow_cores_memory_and_staging(cores, memory_bytes, staging_bytes, count):
    machine = Machine(cores, memory_bytes, staging_bytes)
    assert best_worker_count(chunks_of(*[GIB] * 20), machine) == count


def chunks_of(*sizes):
    return [
        a_chunk(f"src-1-{number}", object_bytes=size, expected_size_bytes=size)
        for number, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("sizes", [(), (30 * GIB,), (GIB - 1, GIB)])
def test_one_worker_archives_small_plans(sizes):
    machine = Machine(64, 8 << 30, 900 * GIB)
    assert best_worker_count(chunks_of(*sizes), machine) == 1


@pytest.mark.parametrize(
    "error",
    [
        LedgerUnreachable("it is away", hint="wait"),
        HeldByOther("it is held", holder="a run", hint="wait"),
        ChunkTooLarge("it is too large", fitting_bytes=7, hint="cut"),
        TransactionRefused("it is refused", code=5, codespace="sdk"),
        ObjectUnavailable("it is gone", reason=SkipReason.DELETED),
    ],
)
def test_an_error_is_the_same_in_another_process(error):
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there), vars(there)) == (type(error), str(error), vars(error))
