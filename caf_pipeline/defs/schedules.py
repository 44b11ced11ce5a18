"""Schedules: what happens by the clock.

Of each source a daily reconciling of bucket and ledger, an hourly look at stored chunks and, on Jackal, a daily look at the
bought space. The sensors see what is new soon after it is put; only a whole listing sees what they missed, e.g. while the
daemon was down.
"""

import zlib
from typing import Final

from dagster import DefaultScheduleStatus, ScheduleDefinition

from caf_pipeline.defs.naming import JobKind, identifier, job_name

_HOUR: Final = 3


def source_schedules(source: str, *, on_jackal: bool) -> list[ScheduleDefinition]:
    """Return the schedules of one source, at a minute of its own so that sources spread."""
    minute = zlib.crc32(source.encode()) % 60

    def schedule(name: str, job: JobKind, hour: int | str, description: str, *, running: bool = True) -> ScheduleDefinition:
        return ScheduleDefinition(
            name=name,
            job_name=job_name(source, job),
            cron_schedule=f"{minute} {hour} * * *",
            execution_timezone="UTC",
            default_status=DefaultScheduleStatus.RUNNING if running else DefaultScheduleStatus.STOPPED,
            description=description,
        )

    schedules = [
        schedule(
            f"reconcile_{identifier(source)}_daily",
            "plan",
            _HOUR,
            "A whole inventory, a plan of what is not yet archived, and whether the source is complete.",
        ),
        schedule(
            f"prove_{identifier(source)}_hourly",
            "prove",
            "*",
            "A look at the stored chunks that were looked at longest ago: proofs, and pieces read back.",
            # A folder proves nothing by itself; who keeps chunks in one may still want to have them read now and then.
            running=on_jackal,
        ),
    ]
    if on_jackal:
        said = "Whether the bought space ends, or will be full, within `jackal.warn_days`."
        schedules.append(schedule(f"storage_plan_{identifier(source)}_daily", "storage_plan", _HOUR + 1, said))
    return schedules
