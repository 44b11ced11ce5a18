"""Runs in the storage of a test's pipeline, and the results of its checks."""

from contextlib import suppress
from dataclasses import replace

from dagster import AssetCheckKey, AssetKey, DagsterRunStatus

from caf_pipeline.dagster_private import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from caf_pipeline.errors import CafError
from caf_pipeline.steps.chunk_steps import lease_chunk

SOURCE = "my-source"
ARCHIVE = "caf_archive_my_source"


def with_settings(pipeline, **changes):
    return replace(pipeline, settings=pipeline.settings.model_copy(update=changes))


def with_source(pipeline, **changes):
    source = pipeline.settings.sources[SOURCE].model_copy(update=changes)
    return with_settings(pipeline, sources={SOURCE: source})


def start_run(pipeline, job: str, status: DagsterRunStatus, **tags: str) -> str:
    repository = RemoteRepositoryOrigin(
        RegisteredCodeLocationOrigin("caf-pipeline"), "__repository__"
    )
    run = pipeline.instance.create_run_for_job(
        pipeline.defs.resolve_job_def(job),
        status=status,
        tags=tags,
        remote_job_origin=RemoteJobOrigin(repository, job),
    )
    return run.run_id


def failure_of(result):
    """Return the failure that the only failed step shows its user."""
    (failed,) = [event for event in result.all_events if event.is_step_failure]
    return failed.step_failure_data.user_failure_data


def fail_run(pipeline, chunk: str, *, begun: bool = True) -> None:
    run_id = start_run(pipeline, ARCHIVE, DagsterRunStatus.STARTED, **{"dagster/partition": chunk})
    if begun:
        with suppress(CafError), lease_chunk(pipeline.run_context(run_id), chunk):
            raise CafError("its first step failed")
    pipeline.instance.report_run_failed(pipeline.instance.get_run_by_id(run_id))


def reported_checks(pipeline) -> dict[str, str]:
    """Return the last status of each check of a condition, by the check's name."""
    names = (
        "caf_no_chunk_is_damaged",
        "caf_no_chunk_is_parked",
        "caf_source_keeps_up",
        "caf_few_objects_are_skipped",
    )
    keys = {name: AssetCheckKey(AssetKey([SOURCE, "chunk_plan"]), name) for name in names}
    records = pipeline.instance.event_log_storage.get_latest_asset_check_execution_by_key(
        list(keys.values())
    )
    return {name: records[key].status.value for name, key in keys.items() if key in records}
