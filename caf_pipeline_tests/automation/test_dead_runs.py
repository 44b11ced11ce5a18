"""A killed run in a team's instance, which has no run monitoring, ends as failed."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from dagster import DagsterInstance, DagsterRunStatus, build_sensor_context, job

from caf_pipeline.automation.dead_runs import reap_dead_runs
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host.home import HOME_VARIABLE
from caf_pipeline.defs.naming import LAUNCH_SENSOR, PROCESS_TAG, partitions_name
from caf_pipeline.defs.sensors import dead_runs_sensor
from caf_pipeline_tests.defs.test_library import write_settings
from caf_pipeline_tests.support.multiprocess_job import EXECUTOR_VARIABLE, EXECUTORS
from caf_pipeline_tests.support.patience import wait_for
from caf_pipeline_tests.support.s3_server import KEY_ID, SECRET
from caf_pipeline_tests.support.ticks import evaluate_tick

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

SOURCE = "my-source"


@job
def theirs():
    """A job of the team."""


@pytest.fixture
def team(tmp_path):
    """An instance with Dagster's defaults."""
    home = tmp_path / "team"
    home.mkdir()
    (home / "dagster.yaml").touch()
    with DagsterInstance.from_config(str(home)) as instance:
        yield instance


@pytest.fixture(params=EXECUTORS)
def under_way(request, pipeline, team, tmp_path):
    """A process with a run of a chunk in the team's instance, held up by a pause."""
    pipeline.put(2)
    (chunk,) = pipeline.plan()
    team.add_dynamic_partitions(partitions_name(SOURCE), [chunk])
    pipeline.ledger.controls.set("paused", "a test")
    settings = tmp_path / "caf.toml"
    write_settings(pipeline, settings)
    process = subprocess.Popen(
        [sys.executable, "-m", "caf_pipeline_tests.support.multiprocess_job", chunk],
        env=os.environ
        | {
            HOME_VARIABLE: str(tmp_path / "team"),
            EXECUTOR_VARIABLE: request.param,
            "CAF_CONFIG": str(settings),
            "CAF_DATABASE_URL": pipeline.settings.database_url.get_secret_value(),
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        },
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: any(PROCESS_TAG in run.tags for run in team.get_runs()))
        yield process
    finally:
        kill(process)


def kill(process):
    """Kill a process and its children by SIGKILL."""
    if process.poll() is None:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.send_signal(signal.SIGKILL)
        process.wait()


def tick(instance):
    with build_sensor_context(instance=instance) as context:
        dead_runs_sensor(context)


@pytest.mark.thorough
def test_a_killed_run_fails_and_its_chunk_continues(pipeline, team, under_way, monkeypatch):
    tick(team)
    (run,) = team.get_runs()
    assert run.status is DagsterRunStatus.STARTED

    kill(under_way)
    assert team.get_run_by_id(run.run_id).status is DagsterRunStatus.STARTED
    tick(team)
    assert team.get_run_by_id(run.run_id).status is DagsterRunStatus.FAILURE

    pipeline.ledger.controls.set("paused", None)
    monkeypatch.setattr("caf_pipeline.automation.launching.FIRST_WAIT_SECONDS", 0)

    def launched():  # once the dead process's lease has ended
        result = evaluate_tick(replace(pipeline, instance=team), LAUNCH_SENSOR)
        chunks = [request.partition_key for request in result.run_requests]
        return chunks == pipeline.chunks(ChunkState.PLANNED)

    wait_for(launched)


def test_a_run_of_the_team_is_left_alone(team):
    run = team.create_run_for_job(theirs, status=DagsterRunStatus.STARTED)
    tick(team)
    assert team.get_run_by_id(run.run_id).status is DagsterRunStatus.STARTED


def test_a_run_that_ends_meanwhile_keeps_its_end(team, monkeypatch):
    run = team.create_run_for_job(theirs, status=DagsterRunStatus.STARTED)

    def ends(seen):
        team.report_run_failed(seen)
        team.delete_run(seen.run_id)
        return False

    monkeypatch.setattr("caf_pipeline.automation.dead_runs.process_lives", ends)
    assert reap_dead_runs(team) == []
    assert team.get_run_by_id(run.run_id) is None
