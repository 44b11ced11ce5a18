"""Runs on Celery workers, each on its own machine, when a machine is lost."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
import yaml
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter
from kombu.exceptions import OperationalError

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host import celery_launcher, celery_worker
from caf_pipeline.dagster_host.backfill import ENDED
from caf_pipeline.dagster_host.celery_launcher import CheckedCeleryRunLauncher
from caf_pipeline.dagster_host.home import dagster_home
from caf_pipeline.dagster_host.storage import URL_VARIABLE
from caf_pipeline.dagster_host.team_project import HOME_VARIABLE
from caf_pipeline.dagster_private import WorkerStatus
from caf_pipeline.errors import SettingsError
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.naming import PARTITION_TAG
from caf_pipeline.settings import Settings
from caf_pipeline_tests.faults.dagster_world import settings_of_world, submit_backfill
from caf_pipeline_tests.support.dagster_daemon import ROOT, daemon
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS, wait_for
from caf_pipeline_tests.support.redis_server import running_redis

pytestmark = pytest.mark.thorough

_ALLOWED = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
NAMESPACE = ["unshare", *_ALLOWED, "--pid", "--fork", "--kill-child", "--mount-proc"]
"""A machine in its own process namespace: all its processes end with the first."""

BROKER = "CAF_CELERY_BROKER"
TASK = "dagster-celery/task_id"
ALIVE = {WorkerStatus.RUNNING}
BACKFILL = "a-backfill"


@pytest.fixture
def world(new_world):
    world = new_world()
    world.fill(small=6, large=6)
    return world


@pytest.fixture
def environment(world, tmp_path, empty_database_url, monkeypatch):
    """What all machines share: the example's dagster.yaml, Postgres, and a broker."""
    if (
        shutil.which("unshare") is None
        or subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip(
            "no process may make namespaces here, by which the workers are on other machines"
        )
    home = dagster_home(Settings.model_validate(world.values))
    home.mkdir(parents=True)
    described = yaml.safe_load((ROOT / "deploy" / "celery" / "dagster.yaml").read_text())
    described["run_monitoring"] |= {
        "poll_interval_seconds": 1,
        "free_slots_after_run_end_seconds": 1,
    }
    described["run_launcher"]["config"]["lost_seconds"] = 15
    described["concurrency"]["runs"]["max_concurrent_runs"] = (
        2  # both workers together: no run waits in the broker for long
    )
    described["run_monitoring"]["start_timeout_seconds"] = (
        PATIENCE_SECONDS // 3
    )  # what a worker took and had not begun
    (home / "dagster.yaml").write_text(yaml.safe_dump(described))
    with running_redis(tmp_path) as broker:
        values = settings_of_world(world, tmp_path) | {
            BROKER: broker,
            URL_VARIABLE: empty_database_url,
            HOME_VARIABLE: str(home),
        }
        for name in (HOME_VARIABLE, URL_VARIABLE, BROKER):
            monkeypatch.setenv(name, values[name])
        yield values


@contextmanager
def worker(
    name: str, folder: Path, environment: dict[str, str], *options: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a machine with a worker that executes one run at a time."""
    program = [sys.executable, "-m", celery_worker.__name__]
    command = [*NAMESPACE, *program, "--concurrency", "1", *options]
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=os.environ | environment, cwd=folder, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def was_lost(instance, run):
    return any(
        "no worker has had the run's task" in (event.message or "")
        for event in instance.all_logs(run.run_id)
    )


def test_a_lost_workers_run_is_retried_and_paid_once(world, environment, database, tmp_path):
    chunks = world.plan()
    assert len(chunks) > 2
    Ledger(database).controls.set(
        "paused", "a test"
    )  # each run stops where it would fetch or send next
    with (
        DagsterInstance.get() as instance,
        worker("one", tmp_path, environment, "--hostname", "same@name") as item,
        worker("two", tmp_path, environment, "--hostname", "same@name"),
        daemon("caf_pipeline.definitions", tmp_path, **environment),
    ):
        submit_backfill(world, instance, chunks, BACKFILL)

        def waiting():
            with world.run_context() as context:
                return {
                    item.holder.run
                    for item in context.ledger.progress.live()
                    if any(wait.chunk and "a test" in wait.what for wait in item.work.waits)
                }

        wait_for(lambda: len(waiting()) == 2)
        tasks = [instance.get_run_by_id(run).tags[TASK] for run in waiting()]
        wait_for(lambda: {health(environment[BROKER], **{TASK: task}) for task in tasks} == ALIVE)
        item.kill()
        Ledger(database).controls.set("paused", None)
        # Dagster calls a backfill failed if a run failed, also if its retry succeeded.
        wait_for(lambda: instance.get_backfill(BACKFILL).status.value in ENDED)
        runs = instance.get_runs(RunsFilter(tags={"dagster/backfill": BACKFILL}))
        (lost,) = [
            run
            for run in runs
            if run.status is DagsterRunStatus.FAILURE and was_lost(instance, run)
        ]
        (retry,) = [run for run in runs if run.parent_run_id == lost.run_id]
        assert retry.tags["dagster/retry_strategy"] == "ALL_STEPS"
        assert sorted(run.tags[PARTITION_TAG] for run in runs if run.is_success) == chunks
    wait_for(
        lambda: not world.query("SELECT name FROM leases WHERE expires_at > now()")
    )  # of a sensor's run that was killed
    assert {chunk.state for chunk in world.chunks()} == {ChunkState.LOCATED}
    world.check()


def test_workers_of_one_host_have_names_of_their_own(environment, tmp_path):
    app = CheckedCeleryRunLauncher(broker=environment[BROKER], default_queue="dagster").celery
    with worker("one", tmp_path, environment), worker("two", tmp_path, environment):
        wait_for(lambda: len({name for answer in app.control.ping() for name in answer}) == 2)


def health(broker, *, lost_seconds=0, **tags):
    launcher = CheckedCeleryRunLauncher(lost_seconds, broker=broker, default_queue="dagster")
    return launcher.check_run_worker_health(DagsterRun("a_job", tags=tags)).status


def test_a_run_is_lost_after_its_task_was_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(celery_launcher, "ANSWER_SECONDS", 0.1)
    task = {TASK: "a-task"}
    with running_redis(tmp_path) as broker:
        assert health(broker, **task) is WorkerStatus.NOT_FOUND
        assert health(broker, lost_seconds=60, **task) is WorkerStatus.RUNNING
        assert health(broker) is WorkerStatus.RUNNING  # another launcher's
        assert health(broker, **{"caf/command": "caf run"}, **task) is WorkerStatus.RUNNING
    with pytest.raises((OperationalError, redis.ConnectionError)):
        health(broker, **task)


def test_a_worker_without_our_celery_launcher_says_what_to_copy(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(HOME_VARIABLE, "to be put back")
    (tmp_path / "caf.toml").write_text('home = "home"\n')
    monkeypatch.chdir(tmp_path)
    assert celery_worker.main([]) == SettingsError.exit_code
    output = capsys.readouterr().err
    assert "deploy/celery/dagster.yaml" in output
    assert str(tmp_path / "home" / "dagster") in output
