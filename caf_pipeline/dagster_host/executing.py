"""Executes a run in this process, recorded as the UI would have recorded one that it had launched.

`JobDefinition.execute_in_process` creates its run without saying which code location it is of: the
UI's timeline leaves such a run out and cannot execute it again. Here the run is created first, with
that. Source: `core_execute_in_process` and `execute_run_iterator` of Dagster 1.13.27.
"""

import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

from dagster import DagsterEvent, DagsterInstance, ExecuteInProcessResult, JobDefinition

from caf_pipeline.automation.dead_runs import process_tags
from caf_pipeline.dagster_host.dagster_private import (
    InMemoryJob,
    RegisteredCodeLocationOrigin,
    RemoteRepositoryOrigin,
    execute_run_iterator,
    merge_run_tags,
)
from caf_pipeline.defs.naming import (
    COMMAND,
    COMMAND_TAG,
    LOCATION_NAME,
    MAX_RETRIES_TAG,
    REPOSITORY_NAME,
)
from caf_pipeline.ledger.processes import this_process

_REPOSITORY: Final = RemoteRepositoryOrigin(
    RegisteredCodeLocationOrigin(LOCATION_NAME), REPOSITORY_NAME
)
"""Our definitions, by name alone: who serves the UI knows how that code location is loaded."""


def execute_here(
    job: JobDefinition,
    instance: DagsterInstance,
    *,
    run_config: Mapping[str, Any],
    partition_key: str | None = None,
    on_event: Callable[[DagsterEvent], None] = lambda _: None,
) -> ExecuteInProcessResult:
    """Execute one run of a job here, with the executor of the job; an error of a step fails the run
    and is not raised.

    `on_event` is told each event as it comes.
    """
    run_id = str(uuid.uuid4())
    own = {
        COMMAND_TAG: COMMAND,
        MAX_RETRIES_TAG: "0",  # who interrupted it does not want the daemon to begin it again
        **process_tags(this_process(run_id)),
    }
    run = instance.create_run_for_job(
        job,
        run_id=run_id,
        run_config=run_config,
        tags=merge_run_tags(job, partition_key, own, None, instance, run_config),
        remote_job_origin=_REPOSITORY.get_job_origin(job.name),
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
