"""Schedules: what happens by the clock.

Of each source a daily reconciling of bucket and ledger, an hourly look at stored chunks and, on Jackal, a daily look at the
bought space. The sensors see what is new soon after it is put; only a whole listing sees what they missed, e.g. while the
daemon was down.
"""

import zlib
from typing import Final

from dagster import DefaultScheduleStatus, ScheduleDefinition

from caf_pipeline.defs.naming import identifier, plan_job, prove_job, storage_plan_job

_HOUR: Final = 3


def source_schedules(source: str, *, on_jackal: bool) -> list[ScheduleDefinition]:
    """Return the schedules of one source, at a minute of its own so that sources spread."""
    minute = zlib.crc32(source.encode()) % 60
    schedules = [_reconcile(source, minute), _prove(source, minute, on_jackal)]
    return [*schedules, _storage_plan(source, minute)] if on_jackal else schedules


def _reconcile(source: str, minute: int) -> ScheduleDefinition:
    return ScheduleDefinition(
        name=f"reconcile_{identifier(source)}_daily",
        job_name=plan_job(source),
        cron_schedule=f"{minute} {_HOUR} * * *",
        execution_timezone="UTC",
        default_status=DefaultScheduleStatus.RUNNING,
        description="A whole inventory, a plan of what is not yet archived, and whether the source is complete.",
    )


def _prove(source: str, minute: int, on_jackal: bool) -> ScheduleDefinition:
    return ScheduleDefinition(
        name=f"prove_{identifier(source)}_hourly",
        job_name=prove_job(source),
        cron_schedule=f"{minute} * * * *",
        execution_timezone="UTC",
        # A folder proves nothing by itself; who keeps chunks in one may still want to have them read now and then.
        default_status=DefaultScheduleStatus.RUNNING if on_jackal else DefaultScheduleStatus.STOPPED,
        description="A look at the stored chunks that were looked at longest ago: proofs, and pieces read back.",
    )


def _storage_plan(source: str, minute: int) -> ScheduleDefinition:
    return ScheduleDefinition(
        name=f"storage_plan_{identifier(source)}_daily",
        job_name=storage_plan_job(source),
        cron_schedule=f"{minute} {_HOUR + 1} * * *",
        execution_timezone="UTC",
        default_status=DefaultScheduleStatus.RUNNING,
        description="Whether the bought space ends, or will be full, within `jackal.warn_days`.",
    )
