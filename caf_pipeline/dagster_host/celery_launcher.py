"""The run launcher for Celery: a run is a task, which one `celery_worker` executes as a whole."""

import time
import warnings
from collections.abc import Mapping
from typing import Any, Final, cast

from celery.exceptions import DuplicateTaskNameWarning
from dagster import DagsterRun, Field
from dagster_celery.launcher import CeleryRunLauncher
from dagster_celery.tags import DAGSTER_CELERY_TASK_ID_TAG

from caf_pipeline.dagster_host.run_launcher import CheckedRuns
from caf_pipeline.dagster_private import CheckRunHealthResult, WorkerStatus

# dagster-celery 0.29.27 registers its task again for each run.
warnings.simplefilter("ignore", DuplicateTaskNameWarning)

ANSWER_SECONDS: Final = 2.0
"""Celery always waits the full time for the workers' lists."""

TASKS_CACHE_SECONDS: Final = 10.0
"""Run monitoring checks one run after the other."""

LOST_SECONDS: Final = 120
"""Default of `lost_seconds`; brokers restart faster."""

CELERY_CONFIG: Final = {
    # By default a worker ends when the broker has been away for an hour.
    "broker_connection_max_retries": None,
    "broker_connection_retry_on_startup": True,
    "task_ignore_result": True,  # a run's state is in Dagster's storage
    # With Redis, a busy worker otherwise reserves tasks that another worker could start.
    "worker_disable_prefetch": True,
    # A process for each run frees its memory and reads the current settings.
    "worker_max_tasks_per_child": 1,
    "worker_redirect_stdouts": False,  # Dagster's compute logs have the output of steps
}


class CheckedCeleryRunLauncher(CheckedRuns, CeleryRunLauncher):
    """Launches runs as Celery tasks, and asks the workers for run monitoring.

    Dagster's own launcher asks the result backend, where a killed worker's run stays started for
    ever, and a long run becomes unknown, which ends it.
    """

    def __init__(
        self,
        lost_seconds: int = LOST_SECONDS,
        config_source: Mapping[str, Any] | None = None,
        **config: Any,  # noqa: ANN401 - Dagster's own
    ) -> None:
        super().__init__(config_source={**CELERY_CONFIG, **(config_source or {})}, **config)
        self._lost_seconds = lost_seconds
        self._missing_since: dict[str, float] = {}
        self._tasks: frozenset[str] = frozenset()
        self._tasks_read_at = float("-inf")

    @classmethod
    def config_type(cls) -> Mapping[str, Any]:
        return {
            **cast("Mapping[str, Any]", CeleryRunLauncher.config_type()),
            "lost_seconds": Field(
                int,
                is_required=False,
                default_value=LOST_SECONDS,
                description="Seconds without the run's task on any worker, after which the run "
                "fails as lost and is retried.",
            ),
        }

    def ask_worker(self, run: DagsterRun) -> CheckRunHealthResult:
        """Report a run as lost if no worker has had its task for `lost_seconds`.

        Raises:
            kombu.exceptions.OperationalError: the broker does not answer (its client may raise its
                own error).
        """
        task = run.tags.get(DAGSTER_CELERY_TASK_ID_TAG)
        if not task:
            return CheckRunHealthResult(WorkerStatus.RUNNING, "the run was not launched by Celery")
        if time.monotonic() - self._tasks_read_at >= TASKS_CACHE_SECONDS:
            # `inspect` would keep one answer of workers that have the same name.
            answers = self.celery.control.broadcast("active", reply=True, timeout=ANSWER_SECONDS)
            self._tasks = frozenset(
                task["id"] for answer in answers for tasks in answer.values() for task in tasks
            )
            self._tasks_read_at = time.monotonic()
        if task in self._tasks:
            self._missing_since.pop(task, None)
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        now = time.monotonic()
        if now - self._missing_since.setdefault(task, now) < self._lost_seconds:
            return CheckRunHealthResult(
                WorkerStatus.RUNNING, "no worker has the run's task; its worker may be unreachable"
            )
        del self._missing_since[task]
        return CheckRunHealthResult(
            WorkerStatus.NOT_FOUND, f"no worker has had the run's task for {self._lost_seconds} s"
        )

    def get_run_worker_debug_info(
        self, run: DagsterRun, include_container_logs: bool | None = True
    ) -> str:
        return (
            f"No worker started its task {run.tags.get(DAGSTER_CELERY_TASK_ID_TAG, '')}. Check "
            "that workers run, and that together they have at least max_concurrent_runs "
            "(dagster.yaml) processes."
        )

    def terminate(self, run_id: str) -> bool:
        """Interrupt the run like Ctrl-C, or keep it from starting.

        Returns False if it has ended or has no task. Dagster's own launcher kills the process
        without marking the run as canceled, so it is retried.
        """
        run = self._instance.get_run_by_id(run_id)
        task = run.tags.get(DAGSTER_CELERY_TASK_ID_TAG) if run and not run.is_finished else None
        if run is None or task is None:
            return False
        self._instance.report_run_canceling(run)
        self.celery.control.revoke(task, terminate=True, signal="SIGINT")
        return True
