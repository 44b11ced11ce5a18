"""Schedules: what happens by the clock. One a source: the daily reconciling of bucket and ledger.

The sensors see what is new soon after it is put; only a whole listing sees what they missed, e.g. while the daemon was down.
"""

import zlib

from dagster import DefaultScheduleStatus, ScheduleDefinition

from caf_pipeline.defs.naming import identifier, reconcile_job

_HOUR = 3


def reconcile_schedule(source: str) -> ScheduleDefinition:
    """Return the daily schedule of a source, between 03:00 and 04:00 UTC, at a minute of its own so that they spread."""
    minute = zlib.crc32(source.encode()) % 60
    return ScheduleDefinition(
        name=f"reconcile_{identifier(source)}_daily",
        job_name=reconcile_job(source),
        cron_schedule=f"{minute} {_HOUR} * * *",
        execution_timezone="UTC",
        default_status=DefaultScheduleStatus.RUNNING,
        description="A whole inventory, a plan of what is not yet archived, and whether the source is complete.",
    )
