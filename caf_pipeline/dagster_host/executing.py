"""Executes a run in this process, and records it like a run that the UI launches.

The UI omits a run of `JobDefinition.execute_in_process` from its timeline, and cannot execute it
again. Source: `core_execute_in_process` and `execute_run_iterator` of Dagster 1.13.27.
"""

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from dagster import DagsterEvent, DagsterInstance, ExecuteInProcessResult, JobDefinition

from caf_pipeline.automation.dead_runs import process_tags
from caf_pipeline.dagster_private import (
    InMemoryJob,
    RegisteredCodeLocationOrigin,
    RemoteRepositoryOrigin,
    execute_run_iterator,
    merge_run_tags,
)
from caf_pipeline.naming import (
    COMMAND,
    COMMAND_TAG,
    LOCATION_NAME,
    MAX_RETRIES_TAG,
    REPOSITORY_NAME,
)
from caf_pipeline.system.processes import this_process


def execute_here(
    job: JobDefinition,
    instance: DagsterInstance,
    *,
    location_name: str = LOCATION_NAME,
    run_config: Mapping[str, Any],
    partition_key: str | None = None,
    on_event: Callable[[DagsterEvent], None] = lambda _: None,
) -> ExecuteInProcessResult:
    """Execute a job's run with its executor.

    A step's error fails the run and is not raised.
    """
    run_id = str(uuid.uuid4())
    repository = RemoteRepositoryOrigin(
        RegisteredCodeLocationOrigin(location_name), REPOSITORY_NAME
    )
    tags = {
        COMMAND_TAG: COMMAND,
        MAX_RETRIES_TAG: "0",  # the daemon must not retry a run that the user interrupted
        **process_tags(this_process(run_id)),
    }
    run = instance.create_run_for_job(
        job,
        run_id=run_id,
        run_config=run_config,
        tags=merge_run_tags(job, partition_key, tags, None, instance, run_config),
        remote_job_origin=repository.get_job_origin(job.name),
    )
    events = []
    for event in execute_run_iterator(InMemoryJob(job), run, instance):
        events.append(event)
        on_event(event)
    return ExecuteInProcessResult(
        job_def=job,
        event_list=events,
        dagster_run=instance.get_run_by_id(run_id) or run,
        output_capture=None,
    )
