"""Behaviour that needs a real daemon: backfills, run monitoring, sensors, freshness."""

import pytest
from dagster import AssetKey, DagsterInstance, DagsterRunStatus

from caf_pipeline.naming import ASSETS, S3_POOL
from caf_pipeline_tests.support.dagster_daemon import daemon, impatient_home, settings_of
from caf_pipeline_tests.support.event_queue import Queue
from caf_pipeline_tests.support.patience import wait_for
from caf_pipeline_tests.support.pipeline_runs import reported_checks

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


def sleeper(begun):
    """Run a daemon with a job that writes to the file `begun` and sleeps."""
    return daemon("caf_pipeline_tests.support.sleeper", begun.parent, CAF_TEST_BEGUN=str(begun))


def freshness(pipeline) -> dict[str, str]:
    """Return the freshness states of the source's assets."""
    keys = [AssetKey(["my-source", name]) for name in ASSETS]
    result = pipeline.instance.get_freshness_state_records(keys)
    return {key.path[1]: record.freshness_state.value for key, record in result.items()}
