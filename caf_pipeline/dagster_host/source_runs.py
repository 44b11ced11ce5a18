"""Executes runs of one source's jobs in this process."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from dagster import (
    AssetCheckSeverity,
    DagsterError,
    DagsterEvent,
    DagsterInstance,
    DagsterRunStatus,
    Definitions,
    ExecuteInProcessResult,
)
from sqlalchemy.exc import SQLAlchemyError

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host.code_location import CodeLocation
from caf_pipeline.dagster_host.executing import execute_here
from caf_pipeline.dagster_host.home import prepare_dagster_home
from caf_pipeline.dagster_host.sigint import InterruptWatch
from caf_pipeline.dagster_host.storage import require_database
from caf_pipeline.dagster_host.team_project import team_project
from caf_pipeline.dagster_private import (
    InstanceRef,
    NoOpComputeLogManager,
)
from caf_pipeline.defs.resources import RunResource, SharedLedger
from caf_pipeline.errors import CafError, IntegrityError, SettingsError, first_line
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.naming import HELD_TAG, LEDGER, PACK, RUN, JobKind, job_name
from caf_pipeline.settings import Settings
from caf_pipeline.waits import UNANSWERED_SECONDS, Waits

_QUIET: Final = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
"""The command prints the error instead of Dagster's traceback."""

_NO_COMPUTE_LOGS: Final = {
    "compute_logs": {
        "module": NoOpComputeLogManager.__module__,
        "class": NoOpComputeLogManager.__name__,
    }
}
"""Capturing would need four processes per run, and redirect the progress bar to a file."""


@contextmanager
def open_instance(settings: Settings, waits: Waits | None = None) -> Iterator[DagsterInstance]:
    """Open Dagster's instance, or raise a SettingsError.

    `waits` reports a slow database.
    """
    home = prepare_dagster_home(settings)
    if team_project(settings.folder) is None:
        with (waits or Waits()).waiting(
            "Dagster's database",
            ends_by="its answer or the connection timeout ends it",
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
            hint=f"check {home}/dagster.yaml and CAF_DAGSTER_DATABASE_URL",
        ) from error
    with instance:
        yield instance


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    """How the run of a chunk ended.

    Attributes:
        holder: the live run that holds the chunk.
        ended: `located` or `empty`; None if another run moved the chunk there.
    """

    error: CafError | None = None
    holder: str = ""
    ended: ChunkState | None = None


class SourceRuns:
    """Executes a source's runs, one after the other."""

    def __init__(
        self,
        settings: Settings,
        instance: DagsterInstance,
        ledger: Ledger,
        source: str,
        *,
        location: CodeLocation,
        watch: InterruptWatch,
        sealed: Callable[[], None] = lambda: None,
    ) -> None:
        """`sealed` is called when a chunk is packed."""
        self._source = source
        self._instance = instance
        self._watch = watch
        self._sealed = sealed
        self._errors: list[CafError] = []
        self._ended: list[ChunkState] = []
        run = RunResource(
            settings=settings,
            ended=self._ended.append,
            on_error=self._errors.append,
            asset_keys=location.keys,
            executes=location.executes,
        )
        self._location_name = location.name
        self._defs: Definitions = location.with_resources(
            **{LEDGER: SharedLedger(settings=settings, shared=ledger), RUN: run}
        )

    def archive(self, chunk: str) -> ChunkOutcome:
        """On Ctrl-C, the run is marked as canceled."""

        def on_event(event: DagsterEvent) -> None:
            if event.is_step_success and str(event.step_key).endswith(PACK):
                self._sealed()

        self._ended.clear()
        try:
            result = self.execute("archive", partition_key=chunk, on_event=on_event)
        except CafError as error:
            return ChunkOutcome(error)
        if self._ended:  # even if another run took the lease for the remaining steps
            return ChunkOutcome(ended=self._ended[-1])
        return ChunkOutcome(holder=self.holder(result))

    def execute(
        self,
        what: JobKind,
        *,
        partition_key: str | None = None,
        config: Mapping[str, object] | None = None,
        on_event: Callable[[DagsterEvent], None] = lambda _: None,
    ) -> ExecuteInProcessResult:
        """Execute one run of a job; raise a CafError if a step or a check failed.

        On Ctrl-C, the run is marked as canceled.
        """
        job = job_name(self._source, what)

        def on_each(event: DagsterEvent) -> None:
            # Dagster retries a step that a second interrupt stops while it handles the first.
            # Interrupt that attempt, too.
            if event.is_step_up_for_retry and self._watch.has_signal():
                signal.raise_signal(signal.SIGINT)
            on_event(event)

        self._errors.clear()
        result = execute_here(
            self._defs.resolve_job_def(job),
            self._instance,
            location_name=self._location_name,
            run_config={**_QUIET, **(config or {})},
            partition_key=partition_key,
            on_event=on_each,
        )
        # Dagster keeps an interrupt to itself if it is asked not to raise errors.
        self._watch.raise_seen()
        run = self._instance.get_run_by_id(result.run_id)
        if run is not None and run.status is DagsterRunStatus.CANCELED:
            raise KeyboardInterrupt
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
                f"{check.description or 'its metadata shows why'}",
                hint=f"run {result.run_id} in the UI shows the details",
            )
        if not result.success:
            raise CafError(
                f"run {result.run_id} of {job} failed for {partition_key or self._source}",
                hint="this is a bug in the pipeline; the run's page in the UI shows its log",
            )
        return result

    def holder(self, result: ExecuteInProcessResult) -> str:
        run = self._instance.get_run_by_id(result.run_id)
        return run.tags.get(HELD_TAG, "") if run else ""
