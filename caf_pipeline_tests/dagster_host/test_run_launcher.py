"""The launcher's health check finds dead runs and leaves live runs alone."""

import subprocess
import sys
from dataclasses import replace

import pytest
from dagster import DagsterRunStatus, DefaultRunLauncher, job, op

from caf_pipeline.automation.dead_runs import process_tags
from caf_pipeline.dagster_private import LaunchRunContext, WorkerStatus
from caf_pipeline.system.processes import Holder, boot_id, this_process
from caf_pipeline_tests.support.dagster_private import GRPC_INFO_TAG

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]


RUN = "0f0f0f0f-0000-4000-8000-000000000000"


@op
def nothing() -> None: ...


@job
def a_job() -> None:
    nothing()


@pytest.fixture
def health(instance):
    """Return the status of a started run with these tags for run monitoring."""

    def ask(tags: dict[str, str]) -> WorkerStatus:
        run = instance.create_run_for_job(
            a_job, run_id=RUN, status=DagsterRunStatus.STARTED, tags=tags
        )
        return instance.run_launcher.check_run_worker_health(run).status

    return ask


def dead_process() -> Holder:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return Holder(run=RUN, boot_id=boot_id(), pid=process.pid, process_started=0.0)


def test_a_run_whose_process_lives_is_running(health):
    assert health(process_tags(this_process(RUN))) is WorkerStatus.RUNNING


def test_a_run_whose_process_is_gone_is_not_found(health):
    assert health(process_tags(dead_process())) is WorkerStatus.NOT_FOUND


def test_a_run_whose_code_server_is_gone_is_not_found(health, tmp_path):
    assert (
        health({GRPC_INFO_TAG: f'{{"host": "localhost", "socket": "{tmp_path}/gone"}}'})
        is WorkerStatus.NOT_FOUND
    )


def test_a_run_without_a_code_server_is_left_alone(health):
    assert (
        health(process_tags(replace(dead_process(), boot_id="another machine")))
        is WorkerStatus.RUNNING
    )


def test_a_reexecuted_run_of_caf_run_may_be_retried(instance, monkeypatch):
    monkeypatch.setattr(DefaultRunLauncher, "launch_run", lambda *_: None)
    inherited = {"caf/command": "caf run", "caf/held_by": "another run", "dagster/max_retries": "0"}
    run = instance.create_run_for_job(a_job, run_id=RUN, tags=inherited)
    instance.run_launcher.launch_run(LaunchRunContext(run, None))
    tags = instance.get_run_by_id(RUN).tags
    assert (tags["caf/command"], tags["caf/held_by"], tags["dagster/max_retries"]) == ("", "", "3")
