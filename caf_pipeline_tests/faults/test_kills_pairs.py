"""Two runs of one chunk: concurrent, one killed, or one paused until its lease is taken."""

import signal

import pytest

from caf_pipeline.errors import HeldByOther
from caf_pipeline_tests.faults.world import ONE_CHUNK
from caf_pipeline_tests.support.kills import KILLED, Fatal

HELD = HeldByOther.exit_code

PAUSED_AT = {
    "packing": Fatal("pack_chunk", 60, signal.SIGSTOP),
    "posting": Fatal("post_file", 60, signal.SIGSTOP),
    "uploading": Fatal("upload_chunk", 40, signal.SIGSTOP),
    "loading": Fatal("load_locations", 7, signal.SIGSTOP),
}
GROUP = "Two runs of one chunk"


@pytest.fixture
def hasty(new_world):
    """A world with short leases, so that a paused run's is taken over."""
    world = new_world(lease_seconds=2.0, source={"target_size": ONE_CHUNK})
    world.fill(small=10, large=2)
    return world


def test_one_of_two_runs_finishes_other_names_holder(fault, world):
    with fault(GROUP, "at once") as case:
        for chunk in world.plan():
            runs = world.start(chunk), world.start(chunk)
            statuses = {run.wait() for run in runs}
            assert 0 in statuses
            assert statuses <= {0, HELD}
        case.check(world)


def test_run_beside_killed_one_finishes_or_names_holder(fault, world):
    with fault(GROUP, "at once, the first killed in its middle") as case:
        for chunk in world.plan():
            first, second = world.start(chunk, counted=True), world.start(chunk)
            first.wait_for_moments(200)
            assert first.kill() in (KILLED, 0, HELD)
            assert second.wait() in (0, HELD)
        world.finish()
        case.check(world)


@pytest.mark.parametrize(
    "phase", [pytest.param("packing", marks=pytest.mark.sample), *list(PAUSED_AT)[1:]]
)
def test_run_resumed_after_another_finished_changes_nothing(fault, hasty, phase):
    with fault(GROUP, f"the first paused while {phase}, awake after the second has ended") as case:
        (chunk,) = hasty.plan()
        first = hasty.start(chunk, fatal=PAUSED_AT[phase])
        first.wait_until_paused()
        assert hasty.start(chunk).ended_in_order  # at worst by a lost lease, on a slow machine
        first.resume()
        assert first.ended_in_order
        hasty.finish()
        case.check(hasty)


@pytest.mark.parametrize("phase", PAUSED_AT)
def test_run_resumed_while_another_works_changes_nothing(fault, hasty, phase):
    with fault(GROUP, f"the first paused while {phase}, awake in the middle of the second") as case:
        (chunk,) = hasty.plan()
        first = hasty.start(chunk, fatal=PAUSED_AT[phase])
        first.wait_until_paused()
        second = hasty.start(chunk, fatal=PAUSED_AT[phase])
        second.wait_until_paused()
        first.resume()
        assert first.ended_in_order
        second.resume()
        assert second.ended_in_order
        hasty.finish()
        case.check(hasty)


def test_run_suspended_in_transaction_releases_its_locks_eventually(fault, hasty):
    with fault(GROUP, "the first paused in the middle of a transaction, its locks held") as case:
        (chunk,) = hasty.plan()
        first = hasty.start(
            chunk, fatal=Fatal("load_batch", 2, signal.SIGSTOP)
        )  # the lease is taken but not committed
        first.wait_until_paused()
        assert hasty.start(chunk).ended_in_order
        first.resume()
        assert first.ended_in_order
        assert first.answer.error == "LedgerUnreachable"
        hasty.finish()
        case.check(hasty)
