"""An interrupted run does not stay STARTED, frees its slot, and is not retried."""

import signal
import subprocess
import sys

import pytest
from dagster import DagsterRunStatus

from caf_pipeline.automation.dead_runs import ends_dead_runs
from caf_pipeline.naming import S3_POOL
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS, wait_for

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]


@pytest.mark.thorough
def test_ctrl_c_ends_a_run_without_a_retry(instance, tmp_path):
    storage, begun = instance.event_log_storage, tmp_path / "begun"
    storage.set_concurrency_slots(S3_POOL, 1)
    command = [sys.executable, "-m", "caf_pipeline_tests.support.sleeper", str(begun)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(begun.exists, process)
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_SECONDS)
        finally:
            process.kill()
    assert instance.get_runs()[0].status is DagsterRunStatus.CANCELED
    assert begun.read_text().split() == [str(process.pid)]
    assert not storage.get_concurrency_info(S3_POOL).claimed_slots


def test_run_monitoring_ends_dead_runs_in_our_own_instance(instance):
    assert ends_dead_runs(instance)
