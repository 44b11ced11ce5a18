"""Behaviour that needs a real daemon: backfills, run monitoring, sensors, freshness."""

import time
from datetime import UTC, datetime, timedelta

import pytest
from dagster import AssetKey, DagsterInstance, DagsterRunStatus, RunsFilter

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host.dagster_private import PartitionBackfill
from caf_pipeline.defs.naming import ASSETS, REPORT_TAG, S3_POOL
from caf_pipeline_tests.support.dagster_daemon import (
    daemon,
    impatient_home,
    settings_of,
    wait_for_backfill,
)
from caf_pipeline_tests.support.event_queue import Queue
from caf_pipeline_tests.support.inventory_reports import ReportWriter
from caf_pipeline_tests.support.patience import wait_for
from caf_pipeline_tests.support.pipeline_runs import reported_checks
from caf_pipeline_tests.support.s3_server import make_bucket

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]


@pytest.mark.thorough
def test_a_run_of_a_dead_machine_is_retried_completely(home_settings, tmp_path):
    home = impatient_home(home_settings)
    begun = tmp_path / "begun"
    with DagsterInstance.from_config(str(home)) as instance:
        instance.event_log_storage.set_concurrency_slots(S3_POOL, 1)
        with sleeper(begun) as running:
            wait_for(begun.exists, running)
        (run,) = instance.get_runs()
        assert run.status is DagsterRunStatus.STARTED

        with sleeper(begun) as running:
            wait_for(lambda: any(run.is_success for run in instance.get_runs()), running)
        retry, first = instance.get_runs()
        assert (first.run_id, first.status) == (run.run_id, DagsterRunStatus.FAILURE)
        assert retry.parent_run_id == first.run_id
        assert retry.tags["dagster/retry_strategy"] == "ALL_STEPS"
        assert len(begun.read_text().split()) == 2
        assert not instance.event_log_storage.get_concurrency_info(S3_POOL).claimed_slots


@pytest.mark.thorough
@pytest.mark.filterwarnings(
    "ignore:Function `AssetSelection.sources` is deprecated"
)  # Dagster's own call
def test_an_asset_backfill_archives_its_partitions_in_process_and_ends(pipeline, tmp_path):
    pipeline.put(7)
    chunks = pipeline.plan()
    assert len(chunks) == 2
    environment = settings_of(pipeline, tmp_path)
    impatient_home(pipeline.settings)
    assets = [AssetKey(["my-source", name]) for name in ASSETS[2:]]
    backfill = PartitionBackfill.from_asset_partitions(
        "a-backfill",
        asset_graph=pipeline.defs.resolve_asset_graph(),
        partition_names=chunks,
        asset_selection=assets,
        backfill_timestamp=time.time(),
        tags={},
        dynamic_partitions_store=pipeline.instance,
        all_partitions=False,
        title=None,
        description=None,
        run_config=None,
    )
    pipeline.instance.add_backfill(backfill)
    with daemon("caf_pipeline.definitions", tmp_path, **environment) as running:
        wait_for_backfill(pipeline.instance, "a-backfill", running)
    assert pipeline.chunks(ChunkState.LOCATED) == chunks
    runs = pipeline.instance.get_runs(RunsFilter(tags={"dagster/backfill": "a-backfill"}))
    assert len(runs) == len(chunks)  # the sensor that launches chunks has left them to the backfill
    log = pipeline.instance.all_logs(runs[0].run_id)
    assert any("steps in process" in (entry.user_message or "") for entry in log)


@pytest.mark.thorough
@pytest.mark.filterwarnings(
    "ignore:Function `AssetSelection.sources` is deprecated"
)  # Dagster's own call
def test_new_objects_are_archived_despite_a_killed_daemon(pipeline, tmp_path):
    queue = Queue(pipeline)
    queue.notify()
    environment = settings_of(pipeline, tmp_path)
    described = (tmp_path / "caf.toml").read_text()
    watched = described.replace(
        "watch_interval_seconds = 0", f'watch_interval_seconds = 2\nqueue = "{queue.url}"'
    )
    (tmp_path / "caf.toml").write_text(watched)
    impatient_home(pipeline.settings)
    pipeline.put(7, prefix="first")
    with daemon("caf_pipeline.definitions", tmp_path, **environment) as running:
        wait_for(lambda: pipeline.chunks() != [], running)
    pipeline.put(7, prefix="second")
    with daemon("caf_pipeline.definitions", tmp_path, **environment) as running:
        wait_for(lambda: pipeline.ledger.chunks.account("my-source").located_objects == 14, running)
        wait_for(lambda: queue.left() == 0 and queue.noticed() == [], running)
        # The sensor that sends alerts reports these.
        wait_for(lambda: set(reported_checks(pipeline).values()) == {"SUCCEEDED"}, running)
        made_daily = {"s3_inventory": "PASS", "chunk_plan": "PASS"}
        wait_for(
            lambda: freshness(pipeline) == dict.fromkeys(ASSETS[2:], "NOT_APPLICABLE") | made_daily,
            running,
        )


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Function `AssetSelection.sources` is deprecated")
def test_a_new_report_is_planned_once_despite_a_killed_daemon(pipeline, tmp_path):
    reports = ReportWriter(
        pipeline.bucket.client, pipeline.bucket.name, make_bucket(pipeline.bucket.endpoint).name
    )
    environment = settings_of(pipeline, tmp_path)
    described = (tmp_path / "caf.toml").read_text()
    # A sensor without a queue lists the bucket if the report is late, as on a busy machine. That
    # listing is newer than the report, which then stays unplanned. No event reaches this queue.
    watched = described.replace(
        "watch_interval_seconds = 0",
        "watch_interval_seconds = 2\n"
        f'inventory = "{reports.folder}"\nqueue = "{Queue(pipeline).url}"',
    )
    (tmp_path / "caf.toml").write_text(watched)
    impatient_home(pipeline.settings)
    pipeline.put(7)
    moment = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)
    name = reports.write(moment)
    of_report = RunsFilter(job_name="caf_plan_my_source", tags={REPORT_TAG: name})
    with daemon("caf_pipeline.definitions", tmp_path, **environment) as running:
        wait_for(lambda: pipeline.instance.get_runs(of_report) != [], running)
    with daemon("caf_pipeline.definitions", tmp_path, **environment) as running:
        wait_for(lambda: pipeline.ledger.chunks.account("my-source").located_objects == 7, running)
    assert pipeline.ledger.content.last_inventory("my-source") == moment
    succeeded = [
        run
        for run in pipeline.instance.get_runs(of_report)
        if run.status is DagsterRunStatus.SUCCESS
    ]
    assert len(succeeded) == 1


def sleeper(begun):
    """Run a daemon with a job that writes to the file `begun` and sleeps."""
    return daemon("caf_pipeline_tests.support.sleeper", begun.parent, CAF_TEST_BEGUN=str(begun))


def freshness(pipeline) -> dict[str, str]:
    """Return the freshness states of the source's assets."""
    keys = [AssetKey(["my-source", name]) for name in ASSETS]
    result = pipeline.instance.get_freshness_state_records(keys)
    return {key.path[1]: record.freshness_state.value for key, record in result.items()}
