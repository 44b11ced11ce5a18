"""Runs in a process of their own that is killed or interrupted: nothing stays STARTED, no slot stays taken, no retry."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dagster import DagsterInstance, DagsterRunStatus

from caf_pipeline.defs.naming import PID_TAG, S3_POOL
from caf_pipeline.defs.reaping import reap_dead_runs

pytest_plugins = ["caf_pipeline_tests.dagster_home"]

PATIENCE_SECONDS = 180


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    return tmp_path / "begun"


@pytest.fixture
def sleeping(instance: DagsterInstance, begun: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the middle of an op that holds a slot of the pool."""
    instance.event_log_storage.set_concurrency_slots(S3_POOL, 1)
    process = subprocess.Popen([sys.executable, "-m", "caf_pipeline_tests.sleeper", str(begun)], stderr=subprocess.DEVNULL)
    try:
        wait_for(begun.exists)
        yield process
    finally:
        process.kill()
        process.wait()


def slots_taken(instance: DagsterInstance) -> int:
    return len(instance.event_log_storage.get_concurrency_info(S3_POOL).claimed_slots)


def test_a_killed_run_is_failed_and_its_slot_freed_by_the_next_start(instance, sleeping):
    (run,) = instance.get_runs()
    sleeping.kill()
    sleeping.wait()
    assert (instance.get_run_by_id(run.run_id).status, slots_taken(instance)) == (DagsterRunStatus.STARTED, 1)

    assert reap_dead_runs(instance) == [run.run_id]
    assert (instance.get_run_by_id(run.run_id).status, slots_taken(instance)) == (DagsterRunStatus.FAILURE, 0)


def test_a_run_whose_process_lives_is_left_alone(instance, sleeping):
    assert reap_dead_runs(instance) == []
    assert instance.get_runs()[0].status is DagsterRunStatus.STARTED


def test_ctrl_c_in_an_op_with_a_retry_policy_ends_the_run_without_a_retry(instance, sleeping, begun):
    sleeping.send_signal(signal.SIGINT)
    sleeping.wait(PATIENCE_SECONDS)
    assert instance.get_runs()[0].status is DagsterRunStatus.CANCELED
    assert begun.read_text().split() == [str(sleeping.pid)]
    assert slots_taken(instance) == 0


def test_a_run_that_another_machine_works_on_is_left_alone(instance, sleeping):
    (run,) = instance.get_runs()
    sleeping.kill()
    sleeping.wait()
    instance.add_run_tags(run.run_id, {"caf/boot_id": "another machine"})
    assert reap_dead_runs(instance) == []


def test_a_pid_that_was_given_to_another_process_is_not_taken_for_the_run(instance, sleeping):
    (run,) = instance.get_runs()
    sleeping.kill()
    sleeping.wait()
    instance.add_run_tags(run.run_id, {PID_TAG: str(os.getpid())})
    assert reap_dead_runs(instance) == [run.run_id]
