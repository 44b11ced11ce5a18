"""Runs that Dagster believes to be going on though their process is dead, and how they are ended.

A run carries the tags of the process that works on it, written when it starts (`caf run`) or with its first step. Not here:
leases of the ledger, which is told of a dead holder by the same marks; the daemon's checks (`launcher`).
"""

from enum import Enum
from typing import Final

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from caf_pipeline.defs.naming import BOOT_TAG, PID_TAG, STARTED_TAG
from caf_pipeline.interfaces import Holder
from caf_pipeline.processes import is_alive

_GOING_ON: Final = [
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]


class Worker(Enum):
    """What is known here of the process behind a run."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


def process_tags(holder: Holder) -> dict[str, str]:
    """Return the run tags that say which process this holder is."""
    return {BOOT_TAG: holder.boot_id, PID_TAG: str(holder.pid), STARTED_TAG: repr(holder.process_started)}


def worker_of(run: DagsterRun) -> Worker:
    """Tell whether the process behind a run lives; UNKNOWN where the run has no marks or those of another machine or boot."""
    boot_id, pid, started = (run.tags.get(tag, "") for tag in (BOOT_TAG, PID_TAG, STARTED_TAG))
    if not pid:
        return Worker.UNKNOWN
    alive = is_alive(boot_id, int(pid), float(started))
    if alive is None:
        return Worker.UNKNOWN
    return Worker.ALIVE if alive else Worker.DEAD


def reap_dead_runs(instance: DagsterInstance) -> list[str]:
    """End every run whose process on this machine is dead, free its pool slots, and return the ids of those runs."""
    dead = [run for run in instance.get_runs(RunsFilter(statuses=_GOING_ON)) if worker_of(run) is Worker.DEAD]
    for run in dead:
        if run.status is DagsterRunStatus.CANCELING:
            instance.report_run_canceled(run, message="The run's process was gone before it could say that it was canceled.")
        else:
            instance.report_run_failed(run, message="The run's process is gone: it was killed, or the machine was restarted.")
        instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
    return [run.run_id for run in dead]
