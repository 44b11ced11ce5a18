"""Pruning of old runs, with both of Dagster's storages."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import pytest
from dagster import (
    AssetCheckKey,
    AssetCheckResult,
    AssetKey,
    AssetRecordsFilter,
    DagsterEventType,
    DagsterInstance,
    DagsterRunStatus,
    DynamicPartitionsDefinition,
    MaterializeResult,
    asset,
    asset_check,
    job,
    materialize,
    op,
)

from caf_pipeline.automation import pruning
from caf_pipeline.automation.pruning import PRUNED
from caf_pipeline.dagster_host.home import prepare_dagster_home
from caf_pipeline.dagster_host.run_source import open_instance
from caf_pipeline.dagster_host.storage import URL_VARIABLE
from caf_pipeline.defs import maintenance_jobs
from caf_pipeline.defs.build import build_own_defs
from caf_pipeline.naming import SOURCE_TAG
from caf_pipeline.settings import Settings, SourceSettings

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

LATER = timedelta(hours=1)
REMOVED = {None, *PRUNED}
OURS = {SOURCE_TAG: "a"}


def prune(instance, until):
    return pruning.prune(instance, until, ["a"])


@asset(partitions_def=DynamicPartitionsDefinition(name="chunks"))
def stored(context):
    context.log.info("said")
    return MaterializeResult(metadata={"bytes": 7})


@asset_check(asset=stored)
def stored_is_right():
    return AssetCheckResult(passed=True, metadata={"copies": 3})


@op
def fail():
    raise ValueError("why it failed")


@job
def failing():
    fail()


@pytest.fixture(params=["SQLite", "Postgres"])
def instance(request, home_settings, empty_database_url, monkeypatch):
    """A Dagster instance with each storage."""
    if request.param == "Postgres":
        monkeypatch.setenv(URL_VARIABLE, empty_database_url)
    with open_instance(home_settings) as instance:
        yield instance


def run(instance, tags=OURS) -> str:
    instance.add_dynamic_partitions("chunks", ["c-1"])
    return materialize(
        [stored, stored_is_right], instance=instance, partition_key="c-1", tags=tags
    ).run_id


def types(instance, run_id) -> list:
    return [
        entry.dagster_event and entry.dagster_event.event_type
        for entry in instance.all_logs(run_id)
    ]


def all_that_is_shown(instance):
    """Return everything that pages, sensors and checks need."""
    asset_key, check = AssetKey("stored"), AssetCheckKey(AssetKey("stored"), "stored_is_right")
    latest = instance.get_latest_materialization_event(asset_key)
    return (
        instance.fetch_materializations(AssetRecordsFilter(asset_key=asset_key), limit=10).records,
        latest.asset_materialization.metadata,
        instance.get_materialized_partitions(asset_key),
        instance.get_dynamic_partitions("chunks"),
        instance.event_log_storage.get_asset_check_partition_info([check]),
        [
            (item.dagster_run.run_id, item.dagster_run.status, item.end_time)
            for item in instance.get_run_records()
        ],
        [
            len(instance.fetch_run_status_changes(kind, limit=10).records)
            for kind in (DagsterEventType.RUN_SUCCESS,)
        ],
    )


def test_pruning_removes_steps_and_keeps_what_pages_show(instance):
    run_id = run(instance)
    before, shown = types(instance, run_id), all_that_is_shown(instance)
    runs, events = prune(instance, datetime.now(UTC) + LATER)
    after = types(instance, run_id)
    assert (runs, events) == (1, len(before) - len(after))
    assert after == [item for item in before if item not in REMOVED]
    assert len(after) < len(before) / 2
    assert DagsterEventType.ASSET_MATERIALIZATION in after
    assert DagsterEventType.ASSET_CHECK_EVALUATION in after
    assert all_that_is_shown(instance) == shown
    assert instance.get_run_stats(run_id).end_time


def test_what_old_runs_printed_goes_and_what_others_printed_stays(home_settings):
    with DagsterInstance.from_config(str(prepare_dagster_home(home_settings))) as instance:
        going_on = instance.create_run_for_job(failing, status=DagsterRunStatus.STARTED, tags=OURS)
        logs = instance.compute_log_manager
        runs = [run(instance), going_on.run_id, run(instance, {})]  # the last is another project's
        keys = [[run_id, "compute_logs", "a_step"] for run_id in runs]
        for key in keys:
            with logs.capture_logs(key):
                pass
        files = [Path(logs.get_captured_local_path(key, "out")) for key in keys]
        assert all(file.exists() for file in files)
        prune(instance, datetime.now(UTC) + LATER)
        assert [file.exists() for file in files] == [False, True, True]


@pytest.mark.parametrize("tags", [{}, {SOURCE_TAG: "of-another-project"}])
def test_runs_of_other_projects_keep_their_events(instance, tags):
    archiving, others = run(instance), run(instance, tags)
    before = types(instance, others)
    assert prune(instance, datetime.now(UTC) + LATER)[0] == 1
    assert types(instance, others) == before
    assert not set(types(instance, archiving)) & REMOVED


def test_a_new_source_is_pruned_from_its_first_run(instance):
    later = run(instance, {SOURCE_TAG: "b"})
    until = datetime.now(UTC) + LATER
    prune(instance, until)
    assert pruning.prune(instance, until, ["a", "b"])[0] == 1
    assert not set(types(instance, later)) & REMOVED


@pytest.mark.parametrize(("days", "status"), [(0, "STOPPED"), (30, "RUNNING")])
def test_pruning_is_off_unless_its_setting_is_set(days, status):
    settings = Settings(
        sources={"a": SourceSettings(bucket="b")},
        **({"runs": {"keep_events_days": days}} if days else {}),
    )
    schedules = {
        schedule.name: schedule.default_status.value
        for schedule in build_own_defs(settings).schedules
    }
    assert schedules["caf_prune_events_daily"] == status


def test_the_reason_of_a_failure_stays(instance):
    run_id = failing.execute_in_process(instance=instance, raise_on_error=False, tags=OURS).run_id
    prune(instance, datetime.now(UTC) + LATER)
    assert instance.get_run_by_id(run_id).status is DagsterRunStatus.FAILURE
    (failed,) = [
        entry
        for entry in instance.all_logs(run_id)
        if entry.dagster_event and entry.dagster_event.is_step_failure
    ]
    assert "why it failed" in failed.dagster_event.step_failure_data.error.to_string()


def test_runs_that_ended_since_or_go_on_are_left_alone(instance):
    recent = run(instance)
    going_on = instance.create_run_for_job(
        failing, status=DagsterRunStatus.STARTED, tags=OURS
    ).run_id
    instance.report_engine_event("it goes on", run_id=going_on, job_name="failing")
    before = [types(instance, recent), types(instance, going_on)]
    prune(instance, datetime.now(UTC) - LATER)
    assert [types(instance, recent), types(instance, going_on)] == before
    prune(instance, datetime.now(UTC) + LATER)
    assert types(instance, going_on) == before[1]
    assert types(instance, recent) != before[0]


def test_pruned_runs_are_not_read_again(instance, monkeypatch):
    monkeypatch.setattr(pruning, "_RUNS_PER_PAGE", 2)
    ended = [
        failing.execute_in_process(instance=instance, raise_on_error=False, tags=OURS).run_id
        for _ in range(3)
    ]
    until = datetime.now(UTC)
    assert prune(instance, until)[0] == 3
    assert not any(set(types(instance, run_id)) & REMOVED for run_id in ended)
    new = run(instance)
    assert prune(instance, until)[1] == 0
    assert (
        prune(instance, until + LATER)[1] > 0
    )  # of the new run: the clock is not trusted to a second
    assert not set(types(instance, new)) & REMOVED
    assert prune(instance, until + 2 * LATER) == (0, 0)
    assert prune(instance, until) == (
        3,
        0,
    )  # the time that was kept is yet to come: the clock was wrong


def test_a_run_whose_file_is_lost_keeps_no_other(home_settings):
    with open_instance(home_settings) as instance:
        lost, other = run(instance), run(instance)
        for file in (home_settings.home / "dagster" / "history" / "runs").glob(f"{lost}.db*"):
            file.unlink()
        assert prune(instance, datetime.now(UTC) + LATER)[0] == 2
        assert not set(types(instance, other)) & REMOVED
        assert not list((home_settings.home / "dagster" / "history" / "runs").glob(f"{lost}.db"))


def test_the_room_on_the_disk_is_given_back(home_settings):
    with open_instance(home_settings) as instance:
        run_id = run(instance)
        for number in range(200):
            instance.report_engine_event("x" * 1000, run_id=run_id, job_name=f"job-{number}")
        (file,) = (home_settings.home / "dagster" / "history" / "runs").glob(f"{run_id}.db")
        before = file.stat().st_size
        prune(instance, datetime.now(UTC) + LATER)
        assert file.stat().st_size < before - 100_000


@pytest.mark.parametrize(
    ("setting", "days_later", "kept"), [(0, 400, True), (30, 29, True), (30, 31, False)]
)
def test_the_job_keeps_what_the_setting_says(home_settings, monkeypatch, setting, days_later, kept):
    settings = Settings(
        sources={"a": SourceSettings(bucket="b")}, runs={"keep_events_days": setting}
    )
    with open_instance(home_settings) as instance:
        run_id = run(instance)
        before = types(instance, run_id)
        later = mock.Mock(
            wraps=datetime, now=lambda zone: datetime.now(zone) + timedelta(days=days_later)
        )
        monkeypatch.setattr(maintenance_jobs, "datetime", later)
        done = (
            build_own_defs(settings)
            .resolve_job_def("caf_prune_events")
            .execute_in_process(instance=instance)
        )
        assert done.success
        assert (types(instance, run_id) == before) is kept
