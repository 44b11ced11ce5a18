"""Run launchers: Dagster's, that also tag runs as ours are retried, and can tell whether a run's
process is still there.

The default launcher has no health check, so run monitoring leaves a run whose process was killed as
STARTED for ever, its pool slots held. The launchers for other machines have one, which knows
nothing of runs that `caf run` executes itself.
"""

from abc import abstractmethod
from typing import Final

from dagster import DagsterInstance, DagsterRun, DefaultRunLauncher, deserialize_value

from caf_pipeline.automation.dead_runs import process_lives
from caf_pipeline.dagster_host.dagster_private import (
    CanCancelExecutionRequest,
    CanCancelExecutionResult,
    CheckRunHealthResult,
    DagsterUserCodeUnreachableError,
    LaunchRunContext,
    RunLauncher,
    WorkerStatus,
)
from caf_pipeline.defs.naming import COMMAND_TAG, HELD_TAG, MAX_RETRIES_TAG, RETRY_STRATEGY_TAG

ASK_SECONDS: Final = 10
"""How long a code server may take to answer.

It answers from memory; a busy one was seen to need up to two seconds.
"""


class CheckedRuns(RunLauncher[DagsterInstance]):
    """What each of our launchers does, in front of the one of Dagster's that it is made of."""

    def launch_run(self, context: LaunchRunContext) -> None:
        """Launch, after tagging the run with how it is retried and taking back what it inherited
        and is not so.

        A run retry begins with all steps, since staging may be gone with the machine; asset
        backfills take no tags, so it is done here. A re-execution inherits every tag: it is no run
        of `caf run`, may be retried, and is held by no other run.
        """
        run, tags = context.dagster_run, {RETRY_STRATEGY_TAG: "ALL_STEPS"}
        if run.tags.get(COMMAND_TAG):
            tags |= {COMMAND_TAG: "", MAX_RETRIES_TAG: str(self._instance.run_retries_max_retries)}
        if run.tags.get(HELD_TAG):
            tags |= {HELD_TAG: ""}
        self._instance.add_run_tags(run.run_id, tags)
        super().launch_run(context)  # type: ignore[safe-super]  # of the launcher that this is made of

    @property
    def supports_check_run_worker_health(self) -> bool:
        """Whether run monitoring may ask: yes."""
        return True

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        """Tell whether the run's process lives: by its tags where it ran on this machine, else by
        who runs it.
        """
        lives = process_lives(run)
        if lives is False:
            return CheckRunHealthResult(WorkerStatus.NOT_FOUND, "the run's process is gone")
        if lives:
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        if run.tags.get(COMMAND_TAG):
            return CheckRunHealthResult(
                WorkerStatus.RUNNING, "a run of `caf run` on another machine, which alone can tell"
            )
        return self.ask_worker(run)

    @abstractmethod
    def ask_worker(self, run: DagsterRun) -> CheckRunHealthResult:
        """Ask who runs it."""


class CheckedRunLauncher(CheckedRuns, DefaultRunLauncher):
    """Launches runs in the code server's processes and checks on them."""

    def ask_worker(self, run: DagsterRun) -> CheckRunHealthResult:
        """Ask the run's code server whether it has its process."""
        client = self._get_grpc_client_for_termination(run.run_id)  # type: ignore[no-untyped-call]
        if client is None:
            # Finished in the meantime, which monitoring sees for itself, or launched by another
            # launcher.
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
            WorkerStatus.NOT_FOUND, "the run's code server knows no process of it"
        )
