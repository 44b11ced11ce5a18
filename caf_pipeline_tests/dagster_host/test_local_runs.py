"""A killed or interrupted run does not stay STARTED, frees its slot, and is not retried."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus

from caf_pipeline.automation import instance_calls
from caf_pipeline.automation.dead_runs import process_tags, reap_dead_runs
from caf_pipeline.defs.naming import PROCESS_TAG, S3_POOL
from caf_pipeline.ledger.records import Holder
from caf_pipeline_tests.support import sleeper
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


def changed_mark(run: DagsterRun, **changes: Any) -> dict[str, str]:
    run_id, boot, pid, started = json.loads(run.tags[PROCESS_TAG])
    holder = Holder(run=run_id, boot_id=boot, pid=pid, process_started=started)
    return process_tags(replace(holder, **changes))


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


def test_a_run_that_another_machine_works_on_is_left_alone(instance, sleeping):
    (run,) = instance.get_runs()
    sleeping.kill()
    sleeping.wait()
    instance.add_run_tags(run.run_id, changed_mark(run, boot_id="another machine"))
    assert reap_dead_runs(instance) == []


def test_a_reused_pid_is_not_the_runs_process(instance, sleeping):
    (run,) = instance.get_runs()
    sleeping.kill()
    sleeping.wait()
    instance.add_run_tags(run.run_id, changed_mark(run, pid=os.getpid()))
    assert reap_dead_runs(instance) == [run.run_id]


def test_a_run_with_an_inherited_process_tag_is_left_alone(instance, sleeping):
    (run,) = instance.get_runs()
    sleeping.kill()
    sleeping.wait()
    tags = {PROCESS_TAG: run.tags[PROCESS_TAG]}
    instance.create_run_for_job(
        sleeper.sleeper, tags=tags, parent_run_id=run.run_id, root_run_id=run.run_id
    )
    assert reap_dead_runs(instance) == [run.run_id]


def test_run_monitoring_ends_dead_runs_in_our_own_instance(instance):
    assert instance_calls.ends_dead_runs(instance)
