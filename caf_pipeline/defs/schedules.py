"""Schedules: daily plans and audits, and hourly checks of stored chunks and bought space.

The daily plan finds objects that the sensors missed.
"""

import zlib
from collections.abc import Mapping
from functools import partial
from typing import Final, Literal

from dagster import (
    DefaultScheduleStatus,
    RunRequest,
    RunsFilter,
    ScheduleDefinition,
    ScheduleEvaluationContext,
    SkipReason,
)

from caf_pipeline.automation import instance_calls
from caf_pipeline.automation.launching import UNFINISHED
from caf_pipeline.naming import PRUNE_JOB, job_name, reconcile_name

_HOUR: Final = 3

ScheduledJob = Literal["plan", "audit", "prove", "storage_plan"]


def _unless_under_way(job: str, context: ScheduleEvaluationContext) -> RunRequest | SkipReason:
    # A run may take longer than an hour, and a second one would do the same work.
    unfinished = RunsFilter(job_name=job, statuses=UNFINISHED)
    if busy := instance_calls.get_runs(context.instance, unfinished, limit=1):
        return SkipReason(f"Run {busy[0].run_id} of {job} is under way.")
    return RunRequest()


def source_schedules(
    source: str,
    *,
    automatic: bool,
    on_jackal: bool,
    has_nodes: bool,
    crons: Mapping[ScheduledJob, str],
) -> list[ScheduleDefinition]:
    """Return a source's schedules, whose minute its name determines unless `crons` has the job.

    Schedules that need the network are off until the settings name nodes.
    """
    minute = zlib.crc32(source.encode()) % 60

    def schedule(
        name: str,
        job: ScheduledJob,
        hour: int | str,
        description: str,
        *,
        running: bool = True,
        one_at_a_time: bool = False,
    ) -> ScheduleDefinition:
        return ScheduleDefinition(
            execution_fn=partial(_unless_under_way, job_name(source, job))
            if one_at_a_time
            else None,
            name=name,
            job_name=job_name(source, job),
            cron_schedule=crons.get(job, f"{minute} {hour} * * *"),
            execution_timezone="UTC",
            default_status=DefaultScheduleStatus.RUNNING
            if running
            else DefaultScheduleStatus.STOPPED,
            description=description,
        )

    schedules = [
        schedule(
            reconcile_name(source),
            "plan",
            _HOUR,
            "Takes a whole inventory, plans the objects that are not archived yet, and checks "
            f"whether the source is complete. On by default if [sources.{source}] says "
            "'automatic = true'.",
            running=automatic,
        ),
        schedule(
            f"{job_name(source, 'audit')}_daily",
            "audit",
            _HOUR + 2,
            "Checks whether all objects of the latest whole inventory are located. Plans and "
            "archives nothing. Off by default if the source is automatic, since its daily plan "
            "checks the same.",
            running=not automatic,
        ),
        schedule(
            f"{job_name(source, 'prove')}_hourly",
            "prove",
            "*",
            "Checks the proofs of stored chunks and reads samples back, starting with the chunks "
            "checked longest ago.",
            # A folder has no proofs, but reading chunks back is useful there, too.
            running=on_jackal and has_nodes,
            one_at_a_time=True,
        ),
    ]
    if on_jackal:
        schedules.append(
            schedule(
                f"{job_name(source, 'storage_plan')}_hourly",
                "storage_plan",
                "*",
                "Checks whether the bought space expires or fills up within jackal.warn_days.",
                running=has_nodes,
                one_at_a_time=True,
            )
        )
    return schedules


def prune_schedule(days: int) -> ScheduleDefinition:
    """Return the daily pruning; off if all events are kept."""
    return ScheduleDefinition(
        name=f"{PRUNE_JOB}_daily",
        job_name=PRUNE_JOB,
        cron_schedule="30 1 * * *",
        execution_timezone="UTC",
        default_status=DefaultScheduleStatus.RUNNING if days else DefaultScheduleStatus.STOPPED,
        description="Removes old events from Dagster's storage if runs.keep_events_days is set.",
    )
