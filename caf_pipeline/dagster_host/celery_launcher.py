"""The run launcher for Celery: a run is a task, which one process of one worker executes from its
first step to its last.

The worker's side is `celery_worker`. Both are configured by the `run_launcher` of dagster.yaml.
"""

import time
import warnings
from collections.abc import Mapping
from typing import Any, Final, cast

from celery.exceptions import DuplicateTaskNameWarning
from dagster import DagsterRun, Field
from dagster_celery.launcher import CeleryRunLauncher
from dagster_celery.tags import DAGSTER_CELERY_TASK_ID_TAG

from caf_pipeline.dagster_host.dagster_private import CheckRunHealthResult, WorkerStatus
from caf_pipeline.dagster_host.run_launcher import CheckedRuns

warnings.simplefilter(
    "ignore", DuplicateTaskNameWarning
)  # dagster-celery 0.29.27 registers its task for each run again

ANSWER_SECONDS: Final = 2.0
"""How long workers may take to say which tasks they have.

Each answers from memory; all of the time is waited for.
"""

LOOK_AGAIN_SECONDS: Final = 10.0
"""For so long one answer counts for all runs that monitoring asks for, one after the other."""

LOST_SECONDS: Final = 120
"""By default, how long no worker may say that it has a run's task: longer than a restart of the
broker.
"""

OURS: Final = {
    # else a worker ends when the broker was away for an hour
    "broker_connection_max_retries": None,
    "broker_connection_retry_on_startup": True,
    "task_ignore_result": True,  # a run's state is in Dagster's storage
    # of Redis: else a busy worker takes tasks from the queue that another could begin
    "worker_disable_prefetch": True,
    # a process for each run: its memory goes back, it reads the settings as they are now
    "worker_max_tasks_per_child": 1,
    "worker_redirect_stdouts": False,  # what a step prints is in Dagster's compute logs
}
"""What of Celery's configuration depends on how runs are executed, with the reason."""


class CheckedCeleryRunLauncher(CheckedRuns, CeleryRunLauncher):
    """Launches runs as tasks of Celery's workers and checks on them.

    Dagster's own asks the result backend, which says of a run whose worker was killed or lost that
    it is started, for ever, and of one that takes longer than results are kept that it is unknown,
    which ends it. Here the workers are asked.
    """

    def __init__(
        self,
        lost_seconds: int = LOST_SECONDS,
        config_source: Mapping[str, Any] | None = None,
        **config: Any,  # noqa: ANN401 - Dagster's own
    ) -> None:
        super().__init__(config_source={**OURS, **(config_source or {})}, **config)
        self._lost_seconds = lost_seconds
        self._missed_since: dict[str, float] = {}
        self._seen: frozenset[str] = frozenset()
        self._seen_at = float("-inf")

    @classmethod
    def config_type(cls) -> Mapping[str, Any]:
        """Return the config's schema: Dagster's, and one field more."""
        described = "A run whose task no worker has had for so long is ended as lost, and retried."
        return {
            **cast("Mapping[str, Any]", CeleryRunLauncher.config_type()),
            "lost_seconds": Field(
                int, is_required=False, default_value=LOST_SECONDS, description=described
            ),
        }

    def ask_worker(self, run: DagsterRun) -> CheckRunHealthResult:
        """Ask all workers which tasks they have; a run is lost when none has had its task for a
        while.

        Raises: kombu's OperationalError or its client's own: the broker does not answer, which says
            nothing about runs.
        """
        task = run.tags.get(DAGSTER_CELERY_TASK_ID_TAG)
        if not task:
            return CheckRunHealthResult(WorkerStatus.RUNNING, "the run was not launched by Celery")
        if task in self._tasks():
            self._missed_since.pop(task, None)
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        now = time.monotonic()
        if now - self._missed_since.setdefault(task, now) < self._lost_seconds:
            return CheckRunHealthResult(
                WorkerStatus.RUNNING, "no worker has the run's task; it may be out of touch"
            )
        del self._missed_since[task]
        return CheckRunHealthResult(
            WorkerStatus.NOT_FOUND, f"no worker has had the run's task for {self._lost_seconds} s"
        )

    def _tasks(self) -> frozenset[str]:
        """Return the ids of the tasks that workers execute."""
        if time.monotonic() - self._seen_at >= LOOK_AGAIN_SECONDS:
            answers = self.celery.control.inspect(timeout=ANSWER_SECONDS).active() or {}
            self._seen = frozenset(task["id"] for tasks in answers.values() for task in tasks)
            self._seen_at = time.monotonic()
        return self._seen

    def get_run_worker_debug_info(
        self, run: DagsterRun, include_container_logs: bool | None = True
    ) -> str:
        """Return what to look at where a run was not begun in time."""
        return (
            f"No worker began its task {run.tags.get(DAGSTER_CELERY_TASK_ID_TAG, '')}. Workers "
            "have to run, and to execute"
            " together at least as many runs at once as dagster.yaml's max_concurrent_runs lets go "
            "on."
        )

    def terminate(self, run_id: str) -> bool:
        """Interrupt the run as Ctrl-C does; one that has not begun never does.

        False where it has ended or has no task.

        Dagster's own kills the run's process and does not say that it was asked to, so that the run
        fails and is retried.
        """
        run = self._instance.get_run_by_id(run_id)
        task = run.tags.get(DAGSTER_CELERY_TASK_ID_TAG) if run and not run.is_finished else None
        if run is None or task is None:
            return False
        self._instance.report_run_canceling(run)
        self.celery.control.revoke(task, terminate=True, signal="SIGINT")
        return True
