"""Marks runs as failed if their process on this machine is dead.

`caf run` tags a run with its process at the start, other runs with their first step. A step that
outlives the process keeps its chunk's lease; nothing starts the run's next step.
"""

import json
from datetime import UTC, datetime, timedelta
from typing import Final

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from caf_pipeline.automation.launching import ENDED
from caf_pipeline.naming import PROCESS_TAG, S3_POOL, UPLOAD_POOL
from caf_pipeline.system.processes import Holder, is_alive

GOING_ON: Final = [
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]

FREE_SLOTS_SECONDS: Final = 60
"""A run that has just ended frees its slots itself."""


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
    ended = []
    for listed in instance.get_runs(RunsFilter(statuses=GOING_ON)):
        if process_lives(listed) is not False:
            continue
        # Read the status after the process: the run may have ended since it was listed.
        run = instance.get_run_by_id(listed.run_id)
        if run is None or run.status not in GOING_ON or process_lives(run) is not False:
            continue
        if run.status is DagsterRunStatus.CANCELING:
            message = "The run's process ended before it could report the cancellation."
            instance.report_run_canceled(run, message)
        else:
            message = "The run's process is gone: it was killed, or the machine was restarted."
            instance.report_run_failed(run, message)
        instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
        ended.append(run.run_id)
    return ended


def ends_dead_runs(instance: DagsterInstance) -> bool:
    """Return whether run monitoring is on, with a launcher that knows whether a run is alive."""
    launcher = instance.run_launcher
    return bool(instance.run_monitoring_enabled and launcher.supports_check_run_worker_health)


def free_slots_of_ended_runs(instance: DagsterInstance) -> None:
    """Free slots of our pools that an ended run still holds, e.g. one that a code server ended."""
    pools = [
        instance.event_log_storage.get_concurrency_info(pool) for pool in (S3_POOL, UPLOAD_POOL)
    ]
    runs = {slot.run_id for pool in pools for slot in pool.claimed_slots}
    runs |= {step.run_id for pool in pools for step in pool.pending_steps}
    if runs:
        long_ago = datetime.now(UTC) - timedelta(seconds=FREE_SLOTS_SECONDS)
        ended = RunsFilter(run_ids=[*runs], statuses=ENDED, updated_before=long_ago)
        for run in instance.get_runs(ended):
            instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
