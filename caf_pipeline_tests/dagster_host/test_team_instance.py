"""The doctor examines the instance of a team's project."""

from dataclasses import replace

import pytest
from dagster import DagsterInstance, DagsterRunStatus, job, op

from caf_pipeline.automation.dead_runs import process_tags
from caf_pipeline.dagster_host.team_instance import instance_findings
from caf_pipeline.dagster_host.team_project import HOME_VARIABLE
from caf_pipeline.maintenance.doctor.findings import Actor, Kind
from caf_pipeline.naming import S3_POOL, SOURCE_TAG, UPLOAD_POOL
from caf_pipeline.settings import load_settings
from caf_pipeline.system.processes import this_process

COMPLETE = """
run_monitoring: {enabled: true}
run_retries: {enabled: true}
concurrency: {pools: {default_limit: 3}}
"""


@op
def nothing() -> None: ...


@job
def any_job() -> None:
    nothing()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The folder of a project with caf.toml. DAGSTER_HOME is its folder `home`."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dagster.yaml").write_text("")
    (tmp_path / "pyproject.toml").write_text('[tool.dg.project]\nroot_module = "team"\n')
    (tmp_path / "caf.toml").write_text('[sources.photos]\nbucket = "my-photos"\n')
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def found(project, ledger):
    """Returns the findings by name."""
    return lambda: {
        finding.name: finding
        for finding in instance_findings(
            settings=load_settings(project / "caf.toml"), ledger=ledger
        )
    }


def test_default_instance_lacks_what_would_help(found):
    names = found().keys()
    assert names == {"run_monitoring", "run_retries", S3_POOL, UPLOAD_POOL}


def test_complete_instance_needs_no_advice(project, found):
    (project / "home" / "dagster.yaml").write_text(COMPLETE)
    assert found() == {}


def test_folder_without_a_project_needs_no_advice(project, found):
    (project / "pyproject.toml").unlink()
    assert found() == {}


def test_missing_dagster_home_is_named(found, monkeypatch):
    monkeypatch.delenv(HOME_VARIABLE)
    (finding,) = found().values()
    assert (finding.name, finding.actor) == (HOME_VARIABLE, Actor.NOBODY)


def test_unreadable_instance_is_not_checked(project, found):
    (project / "home" / "dagster.yaml").write_text("run_monitoring: 7\n")
    (finding,) = found().values()
    assert finding.kind is Kind.UNSEEN


@pytest.mark.parametrize("holds_lease", [False, True])
def test_run_of_another_machine_is_named_unless_it_lives(project, found, ledger, holds_lease):
    with DagsterInstance.get() as instance:
        tags = {SOURCE_TAG: "photos"}
        run = instance.create_run_for_job(any_job, status=DagsterRunStatus.STARTED, tags=tags)
        holder = replace(this_process(run.run_id), boot_id="another machine")
        instance.add_run_tags(run.run_id, process_tags(holder))
        mine = instance.create_run_for_job(any_job, status=DagsterRunStatus.STARTED, tags=tags)
        instance.add_run_tags(mine.run_id, process_tags(this_process(mine.run_id)))
        with ledger.leases.hold("plan/photos", holder if holds_lease else this_process("other")):
            runs = {name for name, finding in found().items() if finding.kind is Kind.RUN}
    assert runs == (set() if holds_lease else {run.run_id})
