"""Full, missing or read-only disks: one error, nothing half-written, and the next run ends right.

The disks are real file systems of a chosen size. The database that runs full is a server of its
own.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack

import psycopg
import pytest

from caf_pipeline.chunk_state import UNDER_WAY, ChunkState
from caf_pipeline.errors import CafError, LedgerError, StagingError
from caf_pipeline.ledger.database import embedded_url
from caf_pipeline.ledger.embedded import embedded_server
from caf_pipeline.settings import Settings
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline_tests.faults.world import SOURCE
from caf_pipeline_tests.support.disks import a_disk, files_of_at_most
from caf_pipeline_tests.support.payers import then
from caf_pipeline_tests.support.run_contexts import CHUNK_STEPS, archive_chunk, archive_everything

GROUP = "A disk is full, gone or read-only"
MIB = 1 << 20
DATABASE_DISK_BYTES = (
    256 * MIB
)  # a new server takes some 60 MiB, and 64 MiB of log before its first checkpoint
START = """
import sys
from pathlib import Path
from caf_pipeline.ledger.database import embedded_url
from caf_pipeline.settings import Settings
embedded_url(Settings(home=Path(sys.argv[1])))
"""
"""Every run first starts the server, if needed."""

ONE_THREAD = {"max_requests": 1}  # so that "while the n-th object is read" is the same in every run


@pytest.fixture
def staged_on(new_world, new_disk, unruly_s3, new_bucket):
    """A world of one chunk with staging on a separate disk."""
    disk = new_disk(16 * MIB)
    world = new_world(
        bucket=unruly_s3.in_front_of(new_bucket),
        staging=str(disk.folder / "staging"),
        packing=ONE_THREAD,
    )
    world.fill(small=6, large=1)
    return world, disk


def fails_clearly(error, kind, code):
    """Require one CafError with a hint."""
    assert isinstance(error, kind), repr(error)
    assert error.exit_code == code
    assert "\n" not in str(error)
    assert error.hint


def run_here(world, name):
    """Run all steps of a chunk in this process; return its error, or None."""
    try:
        with world.run_context() as context:
            archive_chunk(context, name)
    except CafError as error:
        return error
    return None


def nothing_is_claimed_by_a_row(world):
    assert world.query("SELECT count(*) FROM file_locations") == [(0,)]


# --- staging --------------------------------------------------------------------------------------


def test_a_staging_disk_that_is_too_small_by_whatever_amount(fault, staged_on):
    """Sizes from zero up, page by page around the sizes of chunk, journal, manifest and record."""
    world, disk = staged_on
    (name,) = world.plan()
    expected = world.chunks()[0].expected_size_bytes
    leaves = [
        0,
        4096,
        expected // 2,
        expected - 4096,
        *range(expected, expected + 16 * 4096, 3 * 4096),
        8 * MIB,
    ]
    with fault(GROUP, "staging too small for the chunk, its journal or its manifest") as case:
        case.tried = 0
        for leave_bytes in leaves:
            disk.fill(leave_bytes=leave_bytes)
            case.tried += 1
            error = run_here(world, name)
            if error is None:
                break
            fails_clearly(error, StagingError, 8)
            nothing_is_claimed_by_a_row(world)
        assert case.tried > 4
        disk.make_room()
        world.finish()
        case.check(world)


@pytest.mark.parametrize("read", [1, 10])
def test_staging_disk_runs_full_during_packing(fault, staged_on, unruly_s3, read):
    """The chunk's own space is reserved, so only journal and manifest fail."""
    world, disk = staged_on
    (name,) = world.plan()
    with fault(GROUP, "staging runs full while packing and journalling") as case:
        unruly_s3.meanwhile(disk.fill, when=lambda asked: asked.number == read, times=1)
        error = run_here(world, name)
        assert unruly_s3.struck
        if error is not None:
            fails_clearly(error, StagingError, 8)
            nothing_is_claimed_by_a_row(world)
        disk.make_room()
        world.finish()
        case.check(world)


@pytest.mark.parametrize("limit_bytes", [0, 20_000])
def test_file_size_limit_is_reported_like_full_disk(fault, staged_on, limit_bytes):
    world, _ = staged_on
    (name,) = world.plan()
    with fault(GROUP, "no file may be larger than a limit") as case:
        with files_of_at_most(limit_bytes):
            fails_clearly(run_here(world, name), StagingError, 8)
        nothing_is_claimed_by_a_row(world)
        world.finish()
        case.check(world)


BEFORE = (
    "load_batch",
    "seal_chunk",
    "post_file",
    "upload_chunk",
    "verify_stored",
    "load_locations",
    "release_staging",
)


def test_staging_folder_is_removed_before_steps(fault, staged_on):
    """Lost files are packed again if they are needed; nothing is posted twice."""
    world, _ = staged_on
    (name,) = world.plan()
    with ExitStack() as stack:
        cases = [stack.enter_context(fault(GROUP, f"staging removed before {n}")) for n in BEFORE]
        with world.run_context() as context:
            for step in CHUNK_STEPS:
                if step.__name__ in BEFORE:
                    shutil.rmtree(world.staging, ignore_errors=True)
                step(context, name)
        world.finish()
        cases[0].check(world)


def test_staging_folder_is_removed_during_packing(fault, staged_on, unruly_s3):
    world, _ = staged_on
    (name,) = world.plan()
    with fault(GROUP, "staging removed while packing") as case:
        unruly_s3.meanwhile(
            lambda: shutil.rmtree(world.staging), when=lambda asked: asked.number == 5, times=1
        )
        error = run_here(world, name)
        assert unruly_s3.struck
        if error is not None:
            fails_clearly(error, StagingError, 8)
        world.finish()
        case.check(world)


READ_ONLY_BEFORE = ("load_batch", "pack_chunk", "seal_chunk", "post_file", "load_locations")


def test_staging_disk_becomes_read_only_before_steps(fault, staged_on):
    world, disk = staged_on
    world.staging.mkdir()
    (name,) = world.plan()
    with ExitStack() as stack:
        cases = [
            stack.enter_context(fault(GROUP, f"staging made read-only before {step}"))
            for step in READ_ONLY_BEFORE
        ]
        for step in CHUNK_STEPS:
            if step.__name__ in READ_ONLY_BEFORE:
                disk.read_only()
                fails_clearly(run_here(world, name), StagingError, 8)
                disk.writable()
            with world.run_context() as context:
                step(context, name)
        assert run_here(world, name) is None  # even if it was located before staging failed
        world.finish()
        cases[0].check(world)


@pytest.mark.sample
def test_a_staging_folder_that_is_a_file_is_told(fault, staged_on):
    world, _ = staged_on
    (name,) = world.plan()
    with fault(GROUP, "a file where staging should be") as case:
        world.staging.write_bytes(b"")
        fails_clearly(run_here(world, name), StagingError, 8)
        world.staging.unlink()
        world.finish()
        case.check(world)


# --- home -----------------------------------------------------------------------------------------


def test_home_is_full_during_inventory_or_plan(fault, new_world, new_disk, tmp_path):
    disk = new_disk(16 * MIB)
    world = new_world(home=str(disk.folder / "home"), staging=str(tmp_path / "staging"))
    world.fill(small=6, large=1)
    with (
        fault(GROUP, "home full while an inventory is taken or planned") as case,
        world.run_context() as context,
    ):
        case.tried = 0
        for leave_bytes in range(0, 14 * 4096, 4096):
            disk.fill(leave_bytes=leave_bytes)
            case.tried += 1
            try:
                planning.cut_plan(context, inventories.take_inventory(context))
            except CafError as error:
                fails_clearly(error, StagingError, 8)
                assert world.query("SELECT count(*) FROM plans") == [(0,)]
                assert not [
                    path for path in context.plans().iterdir() if path.name.startswith(".cutting")
                ]
                continue
            break
        assert case.tried > 1
        disk.make_room()
        world.finish()
        case.check(world)


# --- the database ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def database_disk():
    """A disk with a server on it."""
    with a_disk(DATABASE_DISK_BYTES) as disk:
        url = embedded_url(Settings(home=disk.folder))
        yield disk, url
        disk.make_room()
        server = int((disk.folder / "postgres" / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(server, signal.SIGQUIT)  # immediately: its data is not needed
        embedded_server(disk.folder / "postgres").close()


@pytest.fixture
def kept_on(new_world, database_disk, request, unruly_s3, new_bucket):
    """A world of one chunk with its ledger on a separate disk."""
    disk, server = database_disk
    name = f"full_{abs(hash(request.node.name))}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    url = server.replace("/postgres?", f"/{name}?")
    assert name in url
    world = new_world(
        database_url=url, bucket=unruly_s3.in_front_of(new_bucket), packing=ONE_THREAD
    )
    world.fill(small=6, large=1)
    yield world, disk
    disk.make_room()


@pytest.mark.parametrize("method", ["register_plan", "seal", "load_locations"])
def test_database_runs_out_of_disk_during_write(fault, kept_on, unruly_s3, method):
    world, disk = kept_on
    unruly_s3.fail(403, "AccessDenied", key="some/key-001")  # a skip is what the seal writes
    with fault(GROUP, f"the database's disk full in {method}") as case:
        with world.run_context() as context:
            owner, call = {
                "register_plan": (context.ledger.plans, "register"),
                "seal": (context.ledger.moves, "seal"),
                "load_locations": (context.ledger.moves, "load_locations"),
            }[method]
            then(owner, call, disk.fill, before=True)
            with pytest.raises(CafError) as failed:
                archive_everything(context)
        fails_clearly(failed.value, LedgerError, 6)
        disk.make_room()
        nothing_is_claimed_by_a_row(world)
        assert len(world.chunks()) == (0 if method == "register_plan" else 1)
        world.finish()
        case.check(world)


def test_a_database_that_cannot_extend_its_log_and_crashes(
    fault, kept_on, database_disk, unruly_s3
):
    """Postgres stops if its log finds no space; the next run starts it."""
    world, disk = kept_on
    _, server = database_disk
    with psycopg.connect(server, autocommit=True) as connection:
        for statement in (
            "ALTER SYSTEM SET wal_recycle = off",
            "SELECT pg_reload_conf()",
            "SELECT pg_switch_wal()",
            "CHECKPOINT",
        ):
            connection.execute(statement)
    (name,) = world.plan()
    with fault(GROUP, "the database's disk full, so that it crashes") as case:
        with world.run_context() as context:
            archive_chunk(context, name, until=chunk_steps.verify_stored)
            with psycopg.connect(server, autocommit=True) as connection:
                disk.fill()
                connection.execute("SELECT pg_switch_wal()")
            with pytest.raises(LedgerError) as failed:
                archive_chunk(context, name)
        fails_clearly(failed.value, LedgerError, 6)
        disk.make_room()
        subprocess.run([sys.executable, "-c", START, str(disk.folder)], check=True)
        assert {chunk.state for chunk in world.chunks()} <= {*UNDER_WAY, ChunkState.LOCATED}
        world.finish()
        case.check(world)
        assert world.query("SELECT name FROM sources") == [(SOURCE,)]
