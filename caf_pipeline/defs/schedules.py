"""Schedules: daily plans, and looks at what is stored.

The daily plan finds objects that the sensors missed.
"""

import zlib
from collections.abc import Iterable
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

from caf_pipeline.automation.launching import UNFINISHED
from caf_pipeline.naming import LOOK_JOB, PRUNE_JOB, job_name, new_objects_name, reconcile_name

_HOUR: Final = 3

ScheduledJob = Literal["plan", "look"]


def _unless_under_way(job: str, context: ScheduleEvaluationContext) -> RunRequest | SkipReason:
    # A run may take longer than an hour, and a second one would do the same work.
    unfinished = RunsFilter(job_name=job, statuses=UNFINISHED)
    if busy := context.instance.get_runs(unfinished, limit=1):
        return SkipReason(f"Run {busy[0].run_id} of {job} is under way.")
    return RunRequest()


def plan_schedule(source: str, *, automatic: bool, cron: str | None) -> ScheduleDefinition:
    """Return a source's daily plan, whose minute its name determines without `cron`."""
    return ScheduleDefinition(
        name=reconcile_name(source),
        job_name=job_name(source, "plan"),
        cron_schedule=cron or f"{_minute(source)} {_HOUR} * * *",
        execution_timezone="UTC",
        default_status=DefaultScheduleStatus.RUNNING
        if automatic
        else DefaultScheduleStatus.STOPPED,
        description="Takes a whole inventory, plans the objects that are not archived yet, and "
        f"checks whether the source is complete. On by default if [sources.{source}] says "
        "'automatic = true'. You may switch it off: then objects that the sensor "
        f"{new_objects_name(source)} missed are not noticed.",
    )


def look_schedule(
    sources: Iterable[str], *, has_wallet: bool, cron: str | None
) -> ScheduleDefinition:
    """Return the schedule of looks at all sources."""
    hour = "*" if has_wallet else _HOUR + 2
    also = "proofs and samples of some stored chunks and the bought space, and daily " * has_wallet
    return ScheduleDefinition(
        name=f"{LOOK_JOB}_at_sources",
        job_name=LOOK_JOB,
        execution_fn=partial(_unless_under_way, LOOK_JOB),
        cron_schedule=cron or f"{_minute(min(sources))} {hour} * * *",
        execution_timezone="UTC",
        default_status=DefaultScheduleStatus.RUNNING,
        description=f"Checks {also}whether all objects of the latest whole inventories are "
        "located. Archives and pays nothing. You may switch it off: then damage is "
        "noticed only when an object is read, or by 'caf prove'.",
    )


def _minute(source: str) -> int:
    return zlib.crc32(source.encode()) % 60


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
