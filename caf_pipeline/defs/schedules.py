"""Schedules: what happens by the clock.

Each source has a daily plan of a whole inventory, a daily check of completeness, and an hourly look
at stored chunks. On Jackal it has an hourly look at the bought space, too. The plan runs by itself
only if the source is automatic; it checks completeness, too. Sensors see new objects soon after
they are put. Only a whole listing sees objects that the sensors missed, e.g. while the daemon was
down.
"""

import zlib
from functools import partial
from typing import Final

from dagster import (
    DefaultScheduleStatus,
    RunRequest,
    RunsFilter,
    ScheduleDefinition,
    ScheduleEvaluationContext,
    SkipReason,
)

from caf_pipeline.automation.launching import UNFINISHED
from caf_pipeline.defs.naming import PRUNE_JOB, JobKind, identifier, job_name, reconcile_name

_HOUR: Final = 3


def _unless_under_way(job: str, context: ScheduleEvaluationContext) -> RunRequest | SkipReason:
    """Ask for a run of a job, or skip while one is under way: it takes longer than an hour, and two
    would do the same.
    """
    if busy := context.instance.get_runs(RunsFilter(job_name=job, statuses=UNFINISHED), limit=1):
        return SkipReason(f"Run {busy[0].run_id} of {job} is under way.")
    return RunRequest()


def source_schedules(source: str, *, automatic: bool, on_jackal: bool) -> list[ScheduleDefinition]:
    """Return the schedules of one source, at a minute of its own so that sources spread."""
    minute = zlib.crc32(source.encode()) % 60

    def schedule(
        name: str,
        job: JobKind,
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
            cron_schedule=f"{minute} {hour} * * *",
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
            "A whole inventory, a plan of what is not yet archived, and whether the source is "
            "complete. "
            f"On if [sources.{source}] says `automatic = true`, or if you switch it on here.",
            running=automatic,
        ),
        schedule(
            f"audit_{identifier(source)}_daily",
            "audit",
            _HOUR + 2,
            "Whether the source is complete, by its latest whole inventory. Plans and archives "
            "nothing. "
            "Off if the source is automatic: its daily plan asks the same.",
            running=not automatic,
        ),
        schedule(
            f"prove_{identifier(source)}_hourly",
            "prove",
            "*",
            "A look at the stored chunks that were looked at longest ago: proofs, and pieces read "
            "back.",
            # A folder proves nothing by itself; who keeps chunks in one may still want to have them
            # read now and then.
            running=on_jackal,
            one_at_a_time=True,
        ),
    ]
    if on_jackal:
        said = "Whether the bought space ends, or will be full, within `jackal.warn_days`."
        schedules.append(
            schedule(
                f"storage_plan_{identifier(source)}_hourly",
                "storage_plan",
                "*",
                said,
                one_at_a_time=True,
            )
        )
    return schedules


def prune_schedule(days: int) -> ScheduleDefinition:
    """Return the schedule: daily, at an hour of its own; off if the events of all days are kept."""
    return ScheduleDefinition(
        name=f"{PRUNE_JOB}_daily",
        job_name=PRUNE_JOB,
        cron_schedule="30 1 * * *",
        execution_timezone="UTC",
        default_status=DefaultScheduleStatus.RUNNING if days else DefaultScheduleStatus.STOPPED,
        description="Keeps Dagster's event log small, if `runs.keep_events_days` is set.",
    )
