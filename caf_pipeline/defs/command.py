"""`caf run`: inventory, plan and every chunk of a source in this process, through Dagster.

Each step of it is a run of the job that the UI would launch, in the same storage, so it stands on the job's own page. One
process for all of them, since a new one takes ten seconds a run. Not here: what a run does (`jobs`), how an error is
printed and made an exit status (`cli`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Final

from dagster import AssetCheckSeverity, DagsterInstance, DagsterRunStatus, Definitions, ExecuteInProcessResult
from dagster._core.events import RunFailureReason
from dagster._core.instance.ref import InstanceRef
from dagster._core.storage.tags import RUN_FAILURE_REASON_TAG
from dagster_shared.error import DagsterError
from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

from caf_pipeline.assembly import open_ledger
from caf_pipeline.defs.build import build_defs
from caf_pipeline.defs.executing import execute_here
from caf_pipeline.defs.failures import HITS_EVERY_CHUNK
from caf_pipeline.defs.home import prepare_dagster_home
from caf_pipeline.defs.interrupts import InterruptWatch
from caf_pipeline.defs.launching import chunks_with_work
from caf_pipeline.defs.metadata import WARNING
from caf_pipeline.defs.naming import HELD_TAG, archive_job, audit_job, plan_job, plan_op
from caf_pipeline.defs.partitions import register_chunks
from caf_pipeline.defs.progress import ChunkProgress
from caf_pipeline.defs.reaping import reap_dead_runs
from caf_pipeline.defs.resources import Pipeline, SharedLedger
from caf_pipeline.defs.storage import require_database
from caf_pipeline.errors import CafError, ChunkTooLarge, IntegrityError, NotPublic, SettingsError, UsageError
from caf_pipeline.interfaces import Chunk, Ledger
from caf_pipeline.lifecycle import UNDER_WAY, ChunkState
from caf_pipeline.plurals import counted
from caf_pipeline.settings import Settings

_QUIET: Final = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
"""Dagster's console log prints tracebacks; what a user needs of them is the error that this command ends with."""

_NO_COMPUTE_LOGS: Final = {
    "compute_logs": {"module": "dagster._core.storage.noop_compute_log_manager", "class": "NoOpComputeLogManager"}
}
"""Capturing output would take four more processes a run and draw the progress bar into a file."""


@dataclass(slots=True)
class Summary:
    """What the command came to for one source.

    Attributes:
        chunks: names of those that had work to do.
        failed: those of them that failed, with the error of each.
        held: those that another live run works on.
        objects: located by this command.
        size_bytes: of those objects.
        complete: whether every object of the latest whole inventory is located.
    """

    source: str
    chunks: list[str] = field(default_factory=list)
    failed: dict[str, CafError] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    objects: int = 0
    size_bytes: int = 0
    complete: bool = False


def run_source(
    source: str | None, *, settings: Settings, second_copy: bool = False, console: Console | None = None
) -> list[Summary]:
    """Archive what is new of one source, or of all.

    Args:
        source: its name; None for every source of the settings, in order of their names.
        settings: as loaded.
        second_copy: plan also what the store may have, where the ledger knows nothing of the source.
        console: where progress and notes go; a new one on stderr by default.

    Returns:
        A summary for each source, where nothing failed.

    Raises:
        CafError: the first error, after everything else was tried; a failure to take inventory or to plan ends it at once,
            and so does what every other chunk would meet just the same, e.g. an empty wallet.
        KeyboardInterrupt: Ctrl-C; the run under way is marked as canceled, or failed where it came between two steps.
    """
    names = sorted(settings.sources) if source is None else [source]
    if not names:
        raise UsageError("there is no source to archive", hint="add [sources.NAME] to caf.toml")
    for name in names:
        settings.source(name)
    console = console or Console(stderr=True)
    with InterruptWatch() as watch, open_instance(settings) as instance, closing(open_ledger(settings)) as ledger:
        for run in reap_dead_runs(instance):
            console.print(f"run {run} was killed earlier; it is marked as failed", style="yellow")
        summaries = [
            _Command(settings, instance, ledger, console=console, source=name, watch=watch, second_copy=second_copy).run()
            for name in names
        ]
        for summary in summaries:
            console.print(_sentence(summary), highlight=False)
    errors = [error for summary in summaries for error in summary.failed.values()]
    if errors:
        raise errors[0]
    return summaries


@contextmanager
def open_instance(settings: Settings) -> Iterator[DagsterInstance]:
    """Open Dagster's instance in our DAGSTER_HOME.

    Raises:
        SettingsError: the folder or the storage cannot be used.
    """
    home = prepare_dagster_home(settings)
    require_database()
    try:
        instance = DagsterInstance.from_ref(InstanceRef.from_dir(str(home), overrides=dict(_NO_COMPUTE_LOGS)))
        instance.get_runs(limit=1)
    except (DagsterError, SQLAlchemyError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise SettingsError(
            f"Dagster's storage cannot be opened: {reason}", hint=f"see {home}/dagster.yaml and CAF_DAGSTER_DATABASE_URL"
        ) from error
    with instance:
        yield instance


class _Command:
    """One source's part of the command."""

    def __init__(
        self,
        settings: Settings,
        instance: DagsterInstance,
        ledger: Ledger,
        *,
        console: Console,
        source: str,
        watch: InterruptWatch,
        second_copy: bool,
    ) -> None:
        self._source = source
        self._second_copy = second_copy
        self._watch = watch
        self._instance = instance
        self._ledger = ledger
        self._console = console
        self._progress = ChunkProgress(console, source)
        self._errors: list[CafError] = []
        pipeline = Pipeline(
            settings=settings,
            ledger=SharedLedger(settings=settings, shared=ledger),
            progress=self._progress.packed,
            upload_progress=self._progress.sent,
            on_error=self._errors.append,
        )
        self._defs: Definitions = build_defs(settings, resource_overrides={"pipeline": pipeline})
        self._summary = Summary(source)

    def run(self) -> Summary:
        """Plan, archive every chunk under way, and ask whether the source is complete."""
        planned = self._plan()
        chunks = self._archive_under_way()
        if self._withdrawn_as_too_large():
            # Providers turned out to be slower than the chunks are large: the objects are cut again, to what fits now.
            self._plan()
            chunks = [*chunks, *self._archive_under_way()]
        if chunks or not self._holder(planned):
            self._summary.complete = self._is_complete()
        return self._summary

    def _plan(self) -> ExecuteInProcessResult:
        terms = {"ops": {plan_op(self._source): {"config": {"second_copy": self._second_copy}}}}
        planned = self._execute(plan_job(self._source), config=terms)
        if holder := self._holder(planned):
            self._console.print(f"run {holder} is planning '{self._source}'; going on with what is planned already")
        for warning in _warnings(planned):
            self._console.print(f"{self._source}: {warning}", style="yellow", highlight=False)
        register_chunks(self._instance, self._ledger, self._source)
        return planned

    def _archive_under_way(self) -> Sequence[Chunk]:
        """Archive each chunk that has work and that this command has not tried yet; return them."""
        chunks = [chunk for chunk in chunks_with_work(self._ledger, self._source) if chunk.name not in self._summary.chunks]
        if not chunks:
            return chunks
        with self._progress:
            self._progress.plan(chunks)
            for chunk in chunks:
                self._summary.chunks.append(chunk.name)
                self._archive(chunk)
                self._progress.finish(chunk)
                if isinstance(self._summary.failed.get(chunk.name), NotPublic):
                    break  # none of this source may go out; another source may
        return chunks

    def _withdrawn_as_too_large(self) -> bool:
        """Take chunks that were withdrawn as too large out of the failed ones; tell whether there were any."""
        withdrawn = [
            name
            for name, error in self._summary.failed.items()
            if isinstance(error, ChunkTooLarge) and self._ledger.chunk(name).state is ChunkState.WITHDRAWN
        ]
        for name in withdrawn:
            del self._summary.failed[name]
            self._summary.chunks.remove(name)
        return bool(withdrawn)

    def _archive(self, chunk: Chunk) -> None:
        try:
            result = self._execute(archive_job(self._source), partition_key=chunk.name)
        except CafError as error:
            if isinstance(error, HITS_EVERY_CHUNK) and not isinstance(error, NotPublic):
                raise
            self._summary.failed[chunk.name] = error
            self._console.print(f"chunk {chunk.name} failed: {error}", style="red", highlight=False)
            return
        if holder := self._holder(result):
            self._summary.held.append(chunk.name)
            self._console.print(f"chunk {chunk.name} is held by run {holder}", style="yellow")
            return
        if chunk.state in UNDER_WAY:  # else it was located before, and only had something left in staging
            done = self._ledger.chunk(chunk.name)
            self._summary.objects += done.member_count
            self._summary.size_bytes += done.member_bytes

    def _is_complete(self) -> bool:
        result = self._execute(audit_job(self._source))
        return all(check.passed for check in result.get_asset_check_evaluations())

    def _holder(self, result: ExecuteInProcessResult) -> str | None:
        run = self._instance.get_run_by_id(result.run_id)
        return run.tags.get(HELD_TAG) if run else None

    def _execute(
        self, job: str, *, partition_key: str | None = None, config: Mapping[str, object] | None = None
    ) -> ExecuteInProcessResult:
        """Execute one run of a job here; raise the error that ended it, or KeyboardInterrupt."""
        self._errors.clear()
        result = execute_here(
            self._defs.resolve_job_def(job),
            self._instance,
            run_config={**_QUIET, **(config or {})},
            partition_key=partition_key,
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
                f"check {check.check_name} failed for {partition_key or self._source}: {check.description or 'see its numbers'}",
                hint=f"run {result.run_id} in the UI has the details",
            )
        if not result.success:
            raise CafError(
                f"run {result.run_id} of {job} failed for {partition_key or self._source}",
                hint="this is a fault of the pipeline itself; the run's page in the UI has its log",
            )
        return result


def _warnings(result: ExecuteInProcessResult) -> list[str]:
    """Return what the assets of a run warn of in their metadata."""
    shown = [
        event.step_materialization_data.materialization.metadata for event in result.all_events if event.is_step_materialization
    ]
    return [str(each[WARNING].value) for each in shown if WARNING in each]


def _sentence(summary: Summary) -> str:
    chunks = len(summary.chunks) - len(summary.failed) - len(summary.held)
    size = f"{summary.size_bytes / (1 << 20):,.1f} MiB"
    done = f"{summary.source}: {counted(chunks, 'chunk')} archived, {counted(summary.objects, 'object')}, {size}"
    if not summary.chunks:
        done = f"{summary.source}: nothing new"
    failed = f"; {len(summary.failed)} failed" if summary.failed else ""
    held = f"; {len(summary.held)} held by other runs" if summary.held else ""
    return done + failed + held + ("; the source is complete" if summary.complete else "; not everything is located yet")


def _raise_interrupt(instance: DagsterInstance, run_id: str) -> None:
    """Raise KeyboardInterrupt where the run ended by one: Dagster itself keeps it when told not to raise errors."""
    run = instance.get_run_by_id(run_id)
    if run is None:
        return
    reason = run.tags.get(RUN_FAILURE_REASON_TAG)
    if run.status is DagsterRunStatus.CANCELED or reason == RunFailureReason.UNEXPECTED_TERMINATION.value:
        raise KeyboardInterrupt
