"""Run launchers that set retry tags and check whether a run's process is alive.

Dagster's default launcher does not check, so a killed run keeps its pool slots. Its other
launchers' checks fail for runs of `caf run`.
"""

from abc import abstractmethod
from typing import Final

from dagster import DagsterInstance, DagsterRun, DefaultRunLauncher, deserialize_value

from caf_pipeline.automation.dead_runs import process_lives
from caf_pipeline.dagster_private import (
    CanCancelExecutionRequest,
    CanCancelExecutionResult,
    CheckRunHealthResult,
    DagsterUserCodeUnreachableError,
    LaunchRunContext,
    RunLauncher,
    WorkerStatus,
)
from caf_pipeline.naming import COMMAND_TAG, HELD_TAG, MAX_RETRIES_TAG, RETRY_STRATEGY_TAG

ASK_SECONDS: Final = 10
"""A busy code server took up to two seconds to answer."""


class CheckedRuns(RunLauncher[DagsterInstance]):
    """Mixin in front of one of Dagster's launchers."""

    def launch_run(self, context: LaunchRunContext) -> None:
        """Set the run's tags, and launch it.

        A retry repeats all steps, since staging may be lost with its machine. A re-execution
        inherits the tags of `caf run` and of a held chunk, so they are reset. A run that cannot be
        launched is not retried: all retries would follow within seconds, and sensors launch again.
        """
        run, tags = context.dagster_run, {RETRY_STRATEGY_TAG: "ALL_STEPS"}
        if run.tags.get(COMMAND_TAG):
            tags |= {COMMAND_TAG: "", MAX_RETRIES_TAG: str(self._instance.run_retries_max_retries)}
        if run.tags.get(HELD_TAG):
            tags |= {HELD_TAG: ""}
        self._instance.add_run_tags(run.run_id, tags)
        try:
            super().launch_run(context)  # type: ignore[safe-super]  # of Dagster's launcher
        except Exception:
            self._instance.add_run_tags(run.run_id, {MAX_RETRIES_TAG: "0"})
            raise

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        lives = process_lives(run)
        if lives is False:
            return CheckRunHealthResult(WorkerStatus.NOT_FOUND, "the run's process is gone")
        if lives:
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        if run.tags.get(COMMAND_TAG):
            return CheckRunHealthResult(
                WorkerStatus.RUNNING, "a run of `caf run` on another machine, which may be alive"
            )
        return self.ask_worker(run)

    @abstractmethod
    def ask_worker(self, run: DagsterRun) -> CheckRunHealthResult: ...


class CheckedRunLauncher(CheckedRuns, DefaultRunLauncher):
    """Launches runs in processes of the code server."""

    def ask_worker(self, run: DagsterRun) -> CheckRunHealthResult:
        client = self._get_grpc_client_for_termination(run.run_id)  # type: ignore[no-untyped-call]
        if client is None:
            # The run has finished meanwhile, or another launcher launched it.
            return CheckRunHealthResult(WorkerStatus.RUNNING, "the run has no code server to ask")
        try:
            reply = client.can_cancel_execution(
                CanCancelExecutionRequest(run_id=run.run_id), timeout=ASK_SECONDS
            )
        except DagsterUserCodeUnreachableError:
            return CheckRunHealthResult(WorkerStatus.NOT_FOUND, "the run's code server is gone")
        if deserialize_value(reply, CanCancelExecutionResult).can_cancel:
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        return CheckRunHealthResult(
            WorkerStatus.NOT_FOUND, "the run's code server has no process of the run"
        )
