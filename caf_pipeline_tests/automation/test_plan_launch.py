"""The run of a plan launches its chunks as the sensor would, and no chunk is launched twice."""

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import dagster
import pytest
from dagster import DagsterError, DagsterRunStatus

from caf_pipeline.asset_keys import DEFAULT_KEYS
from caf_pipeline.automation.launch_tick import LaunchTick
from caf_pipeline.automation.plan_launch import launch_planned, queue_run_of_sensor
from caf_pipeline.dagster_host.code_location import code_location
from caf_pipeline.dagster_host.executing import execute_here
from caf_pipeline.dagster_private import InstigatorStatus
from caf_pipeline.defs.resources import build_resources
from caf_pipeline.naming import (
    COMMAND,
    COMMAND_TAG,
    LAUNCH_SENSOR,
    PARTITION_TAG,
    RUN_KEY_TAG,
    SENSOR_TAG,
    SOURCE_TAG,
)
from caf_pipeline.settings import PackingSettings
from caf_pipeline.system.deadline import Deadline
from caf_pipeline_tests.support.dagster_private import InstigatorState, InstigatorType
from caf_pipeline_tests.support.pipeline_runs import (
    ARCHIVE,
    SOURCE,
    fail_run,
    start_run,
    with_settings,
    with_source,
)
from caf_pipeline_tests.support.ticks import evaluate_tick

pytestmark = pytest.mark.thorough

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

PLAN = "caf_plan_my_source"


@pytest.fixture
def planned(pipeline):
    """An automatic source with one planned chunk."""
    pipeline = with_source(pipeline, automatic=True)
    pipeline.put(1)
    pipeline.plan()
    return pipeline


@contextmanager
def context_of(pipeline, **tags: str):
    """The context of a started run of the plan, as `launch_planned` uses it."""
    run_id = start_run(pipeline, PLAN, DagsterRunStatus.STARTED, **tags)
    with dagster.build_resources(build_resources(pipeline.settings)) as resources:
        yield SimpleNamespace(
            instance=pipeline.instance,
            run=pipeline.instance.get_run_by_id(run_id),
            repository_def=pipeline.defs.get_repository_def(),
            job_def=pipeline.defs.resolve_job_def(PLAN),
            resources=resources,
            log=logging.getLogger(__name__),
        )


def launch(pipeline) -> list[str]:
    with context_of(pipeline) as context:
        return launch_planned(context, pipeline.settings, SOURCE, DEFAULT_KEYS)


def archive_runs(pipeline):
    return [run for run in pipeline.instance.get_runs() if run.job_name == ARCHIVE]


def switch(pipeline, status: str) -> None:
    """Switch the launching sensor as the UI does."""
    with context_of(pipeline) as context:
        origin = context.run.remote_job_origin.repository_origin
    pipeline.instance.add_instigator_state(
        InstigatorState(
            origin.get_instigator_origin(LAUNCH_SENSOR),
            InstigatorType.SENSOR,
            InstigatorStatus(status),
        )
    )


def test_the_run_of_a_plan_launches_its_chunk_once(planned):
    (chunk,) = planned.chunks()
    assert launch(planned) == [chunk]
    (run,) = archive_runs(planned)
    assert run.status is DagsterRunStatus.QUEUED
    assert run.remote_job_origin.job_name == ARCHIVE
    assert run.tags[PARTITION_TAG] == chunk
    assert run.tags.items() >= planned.defs.resolve_job_def(ARCHIVE).run_tags.items()
    assert run.tags[SOURCE_TAG] == SOURCE
    assert launch(planned) == []
    assert not evaluate_tick(planned, LAUNCH_SENSOR).run_requests


def test_sensor_and_plan_at_once_have_one_run_key(planned):
    (request,) = evaluate_tick(planned, LAUNCH_SENSOR).run_requests
    assert launch(planned) == [request.partition_key]
    (run,) = archive_runs(planned)
    # Dagster's daemon then skips the sensor's request.
    assert (run.tags[RUN_KEY_TAG], run.tags[SENSOR_TAG]) == (request.run_key, LAUNCH_SENSOR)


def test_a_run_the_sensor_just_created_is_not_repeated(planned):
    with context_of(planned) as context:
        tick = LaunchTick(context, planned.settings, Deadline(60), DEFAULT_KEYS)
        (request,) = tick.requests_of(SOURCE)
        start_run(planned, ARCHIVE, DagsterRunStatus.QUEUED, **{RUN_KEY_TAG: request.run_key})
        assert not queue_run_of_sensor(context, request)


def test_a_failed_chunk_gets_another_run_key(planned, monkeypatch):
    monkeypatch.setattr("caf_pipeline.automation.launching.FIRST_WAIT_SECONDS", 0)
    (first,) = evaluate_tick(planned, LAUNCH_SENSOR).run_requests
    fail_run(planned, first.partition_key)
    (second,) = evaluate_tick(planned, LAUNCH_SENSOR).run_requests
    assert second.partition_key == first.partition_key
    assert second.run_key != first.run_key


def off(pipeline):
    switch(pipeline, "STOPPED")
    return pipeline


def not_automatic(pipeline):
    return with_source(pipeline, automatic=False)


def paused(pipeline):
    pipeline.ledger.controls.set("paused", "a test")
    return pipeline


def without_room(pipeline):
    return with_settings(pipeline, packing=PackingSettings(staging_limit=1))


def with_failed_run(pipeline):
    fail_run(pipeline, *pipeline.chunks())
    return pipeline


@pytest.mark.parametrize("change", [off, not_automatic, paused, without_room, with_failed_run])
def test_a_plan_launches_only_what_the_sensor_would(planned, change):
    assert launch(change(planned)) == []


def test_chunks_queued_before_an_error_are_told(planned, monkeypatch):
    planned.put(1, prefix="later")
    planned.plan()
    create_run_for_job = planned.instance.create_run_for_job

    def create_one(*args, **options):
        if archive_runs(planned):
            raise DagsterError("the storage is away")
        return create_run_for_job(*args, **options)

    monkeypatch.setattr(planned.instance, "create_run_for_job", create_one)
    queued = launch(planned)
    assert queued == [run.tags[PARTITION_TAG] for run in archive_runs(planned)]
    assert len(planned.chunks()) > len(queued) == 1


def test_a_sensor_that_was_switched_on_counts_as_on(planned):
    pipeline = not_automatic(planned)
    switch(pipeline, "RUNNING")
    assert launch(pipeline) == pipeline.chunks()


def test_caf_run_leaves_its_chunks_to_itself(planned):
    with context_of(planned, **{COMMAND_TAG: COMMAND}) as context:
        assert launch_planned(context, planned.settings, SOURCE, DEFAULT_KEYS) == []
    location = code_location(planned.settings, [SOURCE])
    planned.put(1, prefix="later")
    plan = location.with_resources().resolve_job_def(PLAN)
    assert execute_here(plan, planned.instance, run_config={}).success
    assert archive_runs(planned) == []
