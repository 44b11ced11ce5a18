"""A killed or interrupted run does not stay STARTED, frees its slot, and is not retried."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import DagsterInstance, DagsterRunStatus

from caf_pipeline.automation import instance_calls
from caf_pipeline.automation.dead_runs import reap_dead_runs
from caf_pipeline.defs.naming import S3_POOL
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS, wait_for

pytestmark = pytest.mark.thorough

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    return tmp_path / "begun"


@pytest.fixture
def sleeping(instance: DagsterInstance, begun: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process within an op that holds a slot of the pool."""
    instance.event_log_storage.set_concurrency_slots(S3_POOL, 1)
    process = subprocess.Popen(
        [sys.executable, "-m", "caf_pipeline_tests.support.sleeper", str(begun)],
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(begun.exists)
        yield process
    finally:
        process.kill()
        process.wait()


def slots_taken(instance: DagsterInstance) -> int:
    return len(instance.event_log_storage.get_concurrency_info(S3_POOL).claimed_slots)


def test_the_next_start_fails_a_killed_run(instance, sleeping):
    (run,) = instance.get_runs()
    sleeping.kill()
    sleeping.wait()
    assert (instance.get_run_by_id(run.run_id).status, slots_taken(instance)) == (
        DagsterRunStatus.STARTED,
        1,
    )

    assert reap_dead_runs(instance) == [run.run_id]
    assert (instance.get_run_by_id(run.run_id).status, slots_taken(instance)) == (
        DagsterRunStatus.FAILURE,
        0,
    )


def test_a_run_whose_process_lives_is_left_alone(instance, sleeping):
    assert reap_dead_runs(instance) == []
    assert instance.get_runs()[0].status is DagsterRunStatus.STARTED


def test_ctrl_c_ends_a_run_without_a_retry(instance, sleeping, begun):
    sleeping.send_signal(signal.SIGINT)
    sleeping.wait(PATIENCE_SECONDS)
    assert instance.get_runs()[0].status is DagsterRunStatus.CANCELED
    assert begun.read_text().split() == [str(sleeping.pid)]
    assert slots_taken(instance) == 0


def test_run_monitoring_ends_dead_runs_in_our_own_instance(instance):
    assert instance_calls.ends_dead_runs(instance)
