"""`caf` in a team's Dagster project, whose instance and definitions it uses."""

import contextlib
import json
import signal
import time

import pytest
from dagster import AssetKey, DagsterInstance

from caf_pipeline.dagster_host.backfill import DAEMON
from caf_pipeline.dagster_private import WorkspaceFileTarget
from caf_pipeline.naming import ASSETS, job_name
from caf_pipeline_tests.support.command_line import KEYS, CommandLine, expect_error
from caf_pipeline_tests.support.dagster_private import DaemonHeartbeat, WorkspaceProcessContext
from caf_pipeline_tests.support.dagster_project import make_project
from caf_pipeline_tests.support.patience import wait_for
from caf_pipeline_tests.support.s3_server import make_bucket
from caf_pipeline_tests.support.webserver import Webserver

pytestmark = pytest.mark.thorough

LOCATION = "the-lake"
INSTANCE = "telemetry:\n  enabled: false\n"
COMPONENT = """
type: team.components.archive.TeamArchive
attributes:
  config: caf.toml
  sources: [second]
  translation:
    key: "lake/{{ source }}/{{ asset }}"
"""
SUBCLASS = """
import os
from pathlib import Path

import pandas

from caf_pipeline import S3ArchiveComponent


class TeamArchive(S3ArchiveComponent):
    def execute(self, context, step):
        Path(os.environ["TEAM_FILE"]).touch()
        return step()
"""


@pytest.fixture(scope="module")
def bucket(s3_server):
    bucket = make_bucket(s3_server)
    for name in ("a.txt", "b.txt"):
        bucket.put(name, name.encode() * 200_000)
    return bucket


@pytest.fixture(scope="module")
def project(tmp_path_factory, bucket):
    """A project with a subclass of the component, translated keys, and a location name."""
    project = make_project(tmp_path_factory.mktemp("project"))
    pyproject = project.root / "pyproject.toml"
    named = f'[tool.dg.project]\ncode_location_name = "{LOCATION}"'
    pyproject.write_text(pyproject.read_text().replace("[tool.dg.project]", named))
    (project.defs / "archive").mkdir()
    (project.defs / "archive" / "defs.yaml").write_text(COMPONENT)
    (project.defs.parent / "components" / "archive.py").write_text(SUBCLASS)
    (project.home / "dagster.yaml").write_text(INSTANCE)
    (project.root / ".env").write_text(f"TEAM_FILE={project.root / 'executed'}\n")
    (project.root / "caf.toml").write_text(
        '[store]\nkind = "directory"\nfolder = "kept"\n'
        + "".join(
            f'[sources.{name}]\nbucket = "{bucket.name}"\nendpoint_url = "{bucket.endpoint}"\n'
            "public = true\ntarget_size = '1MiB'\n"
            for name in ("second", "third")
        )
    )
    entry = {
        "working_directory": str(project.root / "src"),
        "module_name": "team.definitions",
        "location_name": LOCATION,
    }
    workspace = {"load_from": [{"python_module": entry}]}
    (project.root / "workspace.yaml").write_text(json.dumps(workspace))
    return project


@pytest.fixture(scope="module")
def caf(project):
    """`caf` in a subfolder."""
    environment = KEYS | {"PYTHONPATH": str(project.root / "src")}
    return CommandLine(project.defs, environment | {"DAGSTER_HOME": str(project.home)})


@pytest.fixture(scope="module")
def archived(caf):
    """The same, after a run."""
    done = caf.process("run", "second", "--workers", "2")
    assert done.status == 0, done.err
    return caf


@contextlib.contextmanager
def opened(project):
    with DagsterInstance.from_config(str(project.home)) as instance:
        yield instance


def test_run_is_recorded_in_the_projects_instance(project, archived):
    assert archived("get", "second", "b.txt").out == b"b.txt" * 200_000
    assert (project.root / "executed").exists()  # by the subclass, with a variable of .env
    with opened(project) as instance:
        for name in ASSETS:
            assert instance.get_latest_materialization_event(AssetKey(["lake", "second", name]))
        jobs = {record.dagster_run.job_name for record in instance.get_run_records()}
        assert jobs >= {job_name("second", what) for what in ("plan", "archive", "audit")}
    assert [file.name for file in project.home.iterdir() if file.is_symlink()] == []
    assert (project.home / "dagster.yaml").read_text() == INSTANCE
    assert not (project.root / ".caf" / "dagster").exists()


RUNS = """
{ runsOrError { ... on Runs { results {
    runId repositoryOrigin { repositoryLocationName }
} } } }
"""
REPEAT = """
mutation Repeat($run: String!) {
    launchRunReexecution(reexecutionParams: {parentRunId: $run, strategy: ALL_STEPS}) {
        ... on LaunchRunSuccess { run { runId } }
        ... on Error { message }
    }
}
"""


def test_ui_shows_and_repeats_a_run(project, archived):
    variables = {"TEAM_FILE": str(project.root / "executed")}
    with archived.surroundings(**variables), opened(project) as instance:
        target = WorkspaceFileTarget([str(project.root / "workspace.yaml")])
        with WorkspaceProcessContext(instance, target) as context:
            ui = Webserver(context)
            (run, *_) = ui.ask(RUNS)["runsOrError"]["results"]
            assert run["repositoryOrigin"]["repositoryLocationName"] == LOCATION
            answer = ui.ask(REPEAT, run=run["runId"])["launchRunReexecution"]
            assert "run" in answer, answer
        context._grpc_server_registry.wait_for_processes()
        repeated = instance.get_run_by_id(answer["run"]["runId"])
    assert repeated.status.value == "QUEUED"  # until a daemon starts it


def test_backfill_is_of_the_projects_job(project, archived, bucket):
    caf = archived
    bucket.put("later.txt", b"later")
    project.dg("launch", "--job", job_name("second", "plan"))
    expect_error(caf.process("backfill", "second"), 16, str(project.home), "dg dev")
    with opened(project) as instance:
        instance.add_daemon_heartbeat(DaemonHeartbeat(time.time(), DAEMON, "a daemon"))
        process = caf.start("backfill", "second")
        try:
            wait_for(instance.get_backfills)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()
        (backfill,) = instance.get_backfills()
    job = backfill.partition_set_origin.selector
    assert job.location_name == LOCATION
    assert job.partition_set_name == f"{job_name('second', 'archive')}_partition_set"


def test_home_may_come_from_the_env_file(project, archived):
    file = project.root / ".env"
    before = file.read_text()
    file.write_text(f"{before}DAGSTER_HOME={project.home}\n")
    try:
        assert b"success" in archived("runs", "second", DAGSTER_HOME="").out
    finally:
        file.write_text(before)


@pytest.mark.parametrize("command", ["run", "backfill", "runs"])
def test_without_a_home_nothing_is_written(project, caf, command):
    before = sorted(project.root.rglob("*"))
    expect_error(caf(command, "second", DAGSTER_HOME=""), 3, "DAGSTER_HOME", "dg launch")
    assert sorted(project.root.rglob("*")) == before


def test_source_outside_the_component_is_refused(caf):
    error = caf.process("run", "third").err
    assert "third" in error
    assert "defs.yaml" in error


def test_another_ledger_is_refused(project, caf):
    file = project.root / ".env"
    before = file.read_text()
    file.write_text(f"{before}CAF_HOME={project.root / 'elsewhere'}\n")
    try:
        done = caf.process("run", "second")
    finally:
        file.write_text(before)
    assert done.status == 3, done.err
    assert ".env" in done.err


@pytest.mark.parametrize("command", ["ui", "setup"])
def test_instance_is_not_set_up(caf, command):
    assert caf(command).status == 2
