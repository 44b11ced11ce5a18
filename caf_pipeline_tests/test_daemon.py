"""What only a real daemon shows: crashed runs found and retried, backfills that end. Slow: a daemon takes 10 s to come up."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from dagster import DagsterInstance, DagsterRunStatus

from caf_pipeline.defs.home import prepare_dagster_home
from caf_pipeline.defs.naming import S3_POOL

pytest_plugins = ["caf_pipeline_tests.dagster_home"]

ROOT = Path(__file__).parents[1]
PATIENCE_SECONDS = 150


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.2)


def impatient_home(settings) -> Path:
    """Our dagster.yaml, with monitoring that looks each second."""
    home = prepare_dagster_home(settings)
    instance = yaml.safe_load((ROOT / "dagster.yaml").read_text())
    instance["run_monitoring"] |= {"poll_interval_seconds": 1, "free_slots_after_run_end_seconds": 1}
    (home / "dagster.yaml").unlink()
    (home / "dagster.yaml").write_text(yaml.safe_dump(instance))
    return home


@contextmanager
def daemon(module: str, folder: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon, its code server and its runs, in a process group of their own that is killed at the end."""
    with (folder / "daemon.log").open("ab") as log:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("dagster-daemon"), "run", "-m", module, "-d", str(ROOT)],
            env=os.environ | environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow_dagster
def test_a_run_that_died_with_its_machine_is_found_retried_from_its_first_step_and_ends_well(home_settings, tmp_path):
    home = impatient_home(home_settings)
    begun = tmp_path / "begun"
    with DagsterInstance.from_config(str(home)) as instance:
        instance.event_log_storage.set_concurrency_slots(S3_POOL, 1)
        with daemon("caf_pipeline_tests.sleeper", tmp_path, CAF_TEST_BEGUN=str(begun)):
            wait_for(begun.exists)
        (run,) = instance.get_runs()
        assert run.status is DagsterRunStatus.STARTED

        with daemon("caf_pipeline_tests.sleeper", tmp_path, CAF_TEST_BEGUN=str(begun)):
            wait_for(lambda: any(run.is_success for run in instance.get_runs()))
        retry, first = instance.get_runs()
        assert (first.run_id, first.status) == (run.run_id, DagsterRunStatus.FAILURE)
        assert retry.parent_run_id == first.run_id
        assert retry.tags["dagster/retry_strategy"] == "ALL_STEPS"
        assert len(begun.read_text().split()) == 2
        assert not instance.event_log_storage.get_concurrency_info(S3_POOL).claimed_slots
