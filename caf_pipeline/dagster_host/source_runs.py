"""Runs of one source's jobs, executed in this process, and what became of a chunk that was archived
by one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from dagster import (
    AssetCheckSeverity,
    DagsterError,
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    DagsterRunStatus,
    Definitions,
    ExecuteInProcessResult,
)
from sqlalchemy.exc import SQLAlchemyError

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host.dagster_private import (
    RUN_FAILURE_REASON_TAG,
    InstanceRef,
    NoOpComputeLogManager,
    RunFailureReason,
)
from caf_pipeline.dagster_host.executing import execute_here
from caf_pipeline.dagster_host.home import prepare_dagster_home
from caf_pipeline.dagster_host.sigint import InterruptWatch
from caf_pipeline.dagster_host.storage import require_database
from caf_pipeline.defs.build import build_defs
from caf_pipeline.defs.failures import RETRY_TRANSIENT
from caf_pipeline.defs.naming import HELD_TAG, LEDGER, RUN, JobKind, job_name
from caf_pipeline.defs.ops import PACK, seal_chunk
from caf_pipeline.defs.resources import RunResource, SharedLedger
from caf_pipeline.errors import CafError, IntegrityError, SettingsError, first_line
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.settings import Settings
from caf_pipeline.waits import UNANSWERED_SECONDS, Wait, Waits

_QUIET: Final = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
"""Dagster's console log prints tracebacks; what a user needs of them is the error that the command
ends with.
"""

_NO_COMPUTE_LOGS: Final = {
    "compute_logs": {
        "module": NoOpComputeLogManager.__module__,
        "class": NoOpComputeLogManager.__name__,
    }
}
"""Capturing output would take four more processes a run and draw the progress bar into a file."""


@contextmanager
def open_instance(settings: Settings, waits: Waits | None = None) -> Iterator[DagsterInstance]:
    """Open Dagster's instance in our DAGSTER_HOME; `waits` says it while its database does not
    answer.

    Raises:
        SettingsError: the folder or the storage cannot be used.
    """
    home = prepare_dagster_home(settings)
    with (waits or Waits()).waiting(
        "Dagster's database",
        ends_by="its answer ends it, or the time limit of a connection",
        grace=UNANSWERED_SECONDS,
    ):
        require_database()
    try:
        instance = DagsterInstance.from_ref(
            InstanceRef.from_dir(str(home), overrides=dict(_NO_COMPUTE_LOGS))
        )
        instance.get_runs(limit=1)
    except (DagsterError, SQLAlchemyError, OSError) as error:
        raise SettingsError(
            f"Dagster's storage cannot be opened: {first_line(error)}",
            hint=f"see {home}/dagster.yaml and CAF_DAGSTER_DATABASE_URL",
        ) from error
    with instance:
        yield instance


class RunListener(Protocol):
    """What shows how far a source's runs are, while they go on."""

    def begin(self, chunk: str) -> None:
        """Take the chunk that all that follows is about; also if its packing begins again after an
        error.
        """

    def packed(self, objects: int, size_bytes: int, *, resumed: bool) -> None:
        """Take objects and bytes that were packed, as differences; `resumed`: by an earlier run."""

    def sealed(self) -> None:
        """Take it that the chunk is packed."""

    def sent(self, size_bytes: int) -> None:
        """Take bytes that were sent, as a difference; called by several threads at once."""

    def waiting(self, waits: Sequence[Wait]) -> None:
        """Take what is waited for now."""

    def say(self, line: str, style: str | None = None) -> None:
        """Take a line for the user."""


@dataclass(frozen=True, slots=True)
class Archived:
    """How the run of a chunk ended: by an error, by another live run that holds the chunk, or else
    well.

    `ended`: where the run itself moved the chunk to, `located` or `empty`; None where another run
    did, before or meanwhile.
    """

    error: CafError | None = None
    holder: str = ""
    ended: ChunkState | None = None


class SourceRuns:
    """Executes runs of one source's jobs in this process, one after the other."""

    def __init__(
        self,
        settings: Settings,
        instance: DagsterInstance,
        ledger: Ledger,
        source: str,
        *,
        watch: InterruptWatch,
        told: RunListener,
    ) -> None:
        self._source = source
        self._instance = instance
        self._watch = watch
        self._told = told
        self._errors: list[CafError] = []
        self._ended: list[ChunkState] = []
        run = RunResource(
            settings=settings,
            # The packer reports bytes that it reads with 0 objects. Bytes beside objects were
            # staged by an earlier run.
            progress=lambda objects, size_bytes: told.packed(
                objects, size_bytes, resumed=bool(objects and size_bytes)
            ),
            upload_progress=told.sent,
            ended=self._ended.append,
            on_error=self._note_error,
            waiting=told.waiting,
        )
        self._defs: Definitions = build_defs(
            settings,
            resource_overrides={LEDGER: SharedLedger(settings=settings, shared=ledger), RUN: run},
        )

    def archive(self, chunk: str) -> Archived:
        """Archive a chunk.

        Raises:
            KeyboardInterrupt: Ctrl-C; the run is marked as canceled.
        """

        def look(event: DagsterEvent) -> None:
            if event.is_step_success and str(event.step_key).endswith(seal_chunk.name):
                self._told.sealed()
            elif event.event_type is DagsterEventType.STEP_RESTARTED and str(
                event.step_key
            ).endswith(PACK):
                self._told.begin(chunk)

        self._told.begin(chunk)
        self._ended.clear()
        try:
            result = self.execute("archive", partition_key=chunk, on_event=look)
        except CafError as error:
            return Archived(error)
        if self._ended:  # also where another run took the lease for what is left to do
            return Archived(ended=self._ended[-1])
        return Archived(holder=self.holder(result))

    def execute(
        self,
        what: JobKind,
        *,
        partition_key: str | None = None,
        config: Mapping[str, object] | None = None,
        on_event: Callable[[DagsterEvent], None] = lambda _: None,
    ) -> ExecuteInProcessResult:
        """Execute one run of a job here.

        Raises:
            CafError: what ended it.
            KeyboardInterrupt: Ctrl-C; the run is marked as canceled.
        """
        job = job_name(self._source, what)
        self._errors.clear()
        result = execute_here(
            self._defs.resolve_job_def(job),
            self._instance,
            run_config={**_QUIET, **(config or {})},
            partition_key=partition_key,
            on_event=on_event,
        )
        _raise_interrupt(self._instance, result.run_id)
        self._watch.raise_seen()
        failed = [
            check
            for check in result.get_asset_check_evaluations()
            if not check.passed and check.severity is AssetCheckSeverity.ERROR
        ]
        if not result.success and self._errors:
            raise self._errors[-1]
        if failed:
            check = failed[0]
            raise IntegrityError(
                f"check {check.check_name} failed for {partition_key or self._source}: "
                f"{check.description or 'see its numbers'}",
                hint=f"run {result.run_id} in the UI has the details",
            )
        if not result.success:
            raise CafError(
                f"run {result.run_id} of {job} failed for {partition_key or self._source}",
                hint="this is a fault of the pipeline itself; the run's page in the UI has its log",
            )
        return result

    def holder(self, result: ExecuteInProcessResult) -> str:
        """Return the live run that has what this one was to work on; "" where there is none."""
        run = self._instance.get_run_by_id(result.run_id)
        return run.tags.get(HELD_TAG, "") if run else ""

    def _note_error(self, error: CafError) -> None:
        """Keep an error of a step, and say where the step is tried again."""
        self._errors.append(error)
        alike = next(
            (n for n, one in enumerate(reversed(self._errors)) if type(one) is not type(error)),
            len(self._errors),
        )
        if not error.permanent and alike <= RETRY_TRANSIENT.max_retries:
            self._told.say(f"{error}; the step is tried again in some seconds", style="yellow")


def _raise_interrupt(instance: DagsterInstance, run_id: str) -> None:
    """Raise KeyboardInterrupt where the run ended by one: Dagster itself keeps it when told not to
    raise errors.
    """
    run = instance.get_run_by_id(run_id)
    if run is None:
        return
    reason = run.tags.get(RUN_FAILURE_REASON_TAG)
    if (
        run.status is DagsterRunStatus.CANCELED
        or reason == RunFailureReason.UNEXPECTED_TERMINATION.value
    ):
        raise KeyboardInterrupt
