"""Runs that Dagster shows as under way though their process is dead, and how they are marked as
failed.

A run carries the tags of the process that works on it, written when it starts (`caf run`) or with
its first step.
"""

import json
from typing import Final

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from caf_pipeline.defs.naming import PROCESS_TAG
from caf_pipeline.ledger.processes import is_alive
from caf_pipeline.ledger.records import Holder

_GOING_ON: Final = [
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]


def process_tags(holder: Holder) -> dict[str, str]:
    """Return the run tag that says which process this holder is, and of which run: a re-execution
    inherits all tags.
    """
    return {
        PROCESS_TAG: json.dumps([holder.run, holder.boot_id, holder.pid, holder.process_started])
    }


def process_lives(run: DagsterRun) -> bool | None:
    """Tell whether the process behind a run lives; None where the run has no mark or one of another
    machine or boot.
    """
    mark = _mark(run)
    return is_alive(*mark) if mark else None


def _mark(run: DagsterRun) -> tuple[str, int, float] | None:
    """Return boot, pid and start of the run's own process, where its tags tell them."""
    if PROCESS_TAG not in run.tags:
        return None
    run_id, boot_id, pid, started = json.loads(run.tags[PROCESS_TAG])
    return (boot_id, pid, started) if run_id == run.run_id else None


def reap_dead_runs(instance: DagsterInstance) -> list[str]:
    """End every run whose process on this machine is dead, free its pool slots, and return the ids
    of those runs.
    """
    dead = [
        run
        for run in instance.get_runs(RunsFilter(statuses=_GOING_ON))
        if process_lives(run) is False
    ]
    for run in dead:
        if run.status is DagsterRunStatus.CANCELING:
            instance.report_run_canceled(
                run, message="The run's process was gone before it could say that it was canceled."
            )
        else:
            instance.report_run_failed(
                run,
                message="The run's process is gone: it was killed, or the machine was restarted.",
            )
        instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
    return [run.run_id for run in dead]
