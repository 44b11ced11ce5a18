"""Marks runs as failed if their process on this machine is dead.

`caf run` tags a run with its process at the start, other runs with their first step.
"""

import json
from typing import Final

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from caf_pipeline.automation import instance_calls
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
    """Return a run's process tag, with the run's id, since a re-execution inherits tags."""
    return {
        PROCESS_TAG: json.dumps([holder.run, holder.boot_id, holder.pid, holder.process_started])
    }


def process_lives(run: DagsterRun) -> bool | None:
    """Return whether a run's process lives; None if unknown, e.g. on another machine or boot."""
    if PROCESS_TAG not in run.tags:
        return None
    run_id, boot_id, pid, started = json.loads(run.tags[PROCESS_TAG])
    return is_alive(boot_id, pid, started) if run_id == run.run_id else None


def reap_dead_runs(instance: DagsterInstance) -> list[str]:
    """End all runs whose process is dead and free their pool slots; return their ids."""
    dead = [
        run
        for run in instance_calls.get_runs(instance, RunsFilter(statuses=_GOING_ON))
        if process_lives(run) is False
    ]
    for run in dead:
        if run.status is DagsterRunStatus.CANCELING:
            message = "The run's process ended before it could report the cancellation."
            instance_calls.report_run_canceled(instance, run, message)
        else:
            message = "The run's process is gone: it was killed, or the machine was restarted."
            instance_calls.report_run_failed(instance, run, message)
        instance_calls.free_pool_slots(instance, run.run_id)
    return [run.run_id for run in dead]
