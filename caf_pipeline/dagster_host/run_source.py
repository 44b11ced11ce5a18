"""`caf run`: inventory, plan and every chunk of a source in this process, through Dagster.

Each step of it is a run of the job that the UI would launch, in the same storage, so it is on the job's own page. One
process for all of them, since a new one takes ten seconds a run.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from json import dumps as dump_json
from typing import Final

from dagster import (
    AssetCheckSeverity,
    DagsterError,
    DagsterExecutionInterruptedError,
    DagsterInstance,
    DagsterRunStatus,
    Definitions,
    ExecuteInProcessResult,
)
from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

from caf_pipeline.chunk_state import UNDER_WAY, ChunkState
from caf_pipeline.dagster_host.executing import execute_here
from caf_pipeline.dagster_host.home import prepare_dagster_home
from caf_pipeline.dagster_host.progress_bar import ChunkProgress
from caf_pipeline.dagster_host.sigint import InterruptWatch
from caf_pipeline.dagster_host.storage import require_database
from caf_pipeline.defs.build import build_defs
from caf_pipeline.defs.dagster_private import RUN_FAILURE_REASON_TAG, InstanceRef, NoOpComputeLogManager, RunFailureReason
from caf_pipeline.defs.dead_runs import reap_dead_runs
from caf_pipeline.defs.failures import HITS_EVERY_CHUNK, RETRY_TRANSIENT
from caf_pipeline.defs.launching import chunks_with_work
from caf_pipeline.defs.metadata import REPORT, REPORT_AGE, SKIPPED, SNAPSHOT, WARNING
from caf_pipeline.defs.naming import HELD_TAG, LEDGER, RUN, job_name, op_name
from caf_pipeline.defs.partitions import register_chunks
from caf_pipeline.defs.resources import RunResource, SharedLedger
from caf_pipeline.errors import (
    INTERRUPTED,
    CafError,
    ChunkTooLarge,
    IntegrityError,
    NotLocated,
    SettingsError,
    UsageError,
    first_line,
    one_line,
)
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.postgres import Ledger
from caf_pipeline.ledger.records import Chunk, WaitingObjects
from caf_pipeline.settings import Settings
from caf_pipeline.source.protocol import UnaskedObjects
from caf_pipeline.steps import planning
from caf_pipeline.system.quantities import counted, show_size
from caf_pipeline.waits import UNANSWERED_SECONDS, Announcer, Waits
from caf_pipeline.wiring import close_store, open_ledger, open_workplace

_QUIET: Final = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
"""Dagster's console log prints tracebacks; what a user needs of them is the error that this command ends with."""

_NO_COMPUTE_LOGS: Final = {"compute_logs": {"module": NoOpComputeLogManager.__module__, "class": NoOpComputeLogManager.__name__}}
"""Capturing output would take four more processes a run and draw the progress bar into a file."""


MOST_ALIKE: Final = 3
"""Chunks that fail for good by the same error, after which no further chunk is tried."""

CHUNKS_FAILED: Final = 12
HELD_BY_OTHERS: Final = 13
TO_BE_TRIED_AGAIN: Final = 14
WAITING: Final = 15
"""Exit statuses of a command that came to its end, where not everything is located; the first that applies."""

NOT_ARCHIVABLE: Final = frozenset({SkipReason.UNSUPPORTED_KEY, SkipReason.TOO_LARGE})
"""Reasons of skips that no later run could do anything about."""

_SOME: Final = re.compile(r"[0-9a-f]{8,}|[0-9]+")


@dataclass(frozen=True, slots=True)
class Standing:
    """How many objects of one inventory are located, claimed or skipped in the ledger.

    Attributes:
        snapshot: the inventory's name.
        unaccounted: objects that are neither located, nor claimed by a chunk, nor skipped: no plan has them yet.
        skipped: numbers by reason.
    """

    snapshot: str
    objects: int
    located: int
    claimed: int
    unaccounted: int
    skipped: dict[str, int]

    @property
    def waiting(self) -> int:
        """How many objects wait for more, so that their chunk is not too small."""
        return self.skipped.get(SkipReason.WAITING, 0)

    @property
    def again(self) -> int:
        """How many objects a later run tries again, or for the first time; those that wait are not among them."""
        left = {SkipReason.WAITING, *NOT_ARCHIVABLE}
        return self.unaccounted + sum(count for reason, count in self.skipped.items() if reason not in left)

    @property
    def only_waits(self) -> bool:
        """Whether nothing but objects that wait keeps the source from being complete."""
        return bool(self.waiting) and not self.claimed and not self.again

    @property
    def complete(self) -> bool:
        """Whether everything is located that can be."""
        not_archivable = sum(count for reason, count in self.skipped.items() if reason in NOT_ARCHIVABLE)
        return not self.claimed and not self.again and not self.waiting and self.located + not_archivable == self.objects


@dataclass(slots=True)
class Summary:
    """What the command came to for one source.

    Attributes:
        chunks: names of those that had work to do and were tried.
        failed: those of them that failed, with the error of each.
        held: those that another live run works on.
        not_tried: those that were left alone, since the same error would have met them.
        planning: the live run that plans this source; "" where this command planned it.
        parked: how many chunks wait for an operator.
        objects: located by this command.
        size_bytes: of those objects.
        standing: of this command's own whole inventory, asked for at the end.
        waiting: what of the source waits for the next plan; None where nothing does.
    """

    source: str
    chunks: list[str] = field(default_factory=list)
    failed: dict[str, CafError] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)
    planning: str = ""
    parked: int = 0
    objects: int = 0
    size_bytes: int = 0
    standing: Standing | None = None
    waiting: WaitingObjects | None = None

    @property
    def complete(self) -> bool:
        """Whether everything that the inventory has is located, but for what cannot be archived at all."""
        return self.standing is not None and self.standing.complete

    @property
    def exit_status(self) -> int:
        """0 only where everything is located that can be, and nothing failed."""
        if self.failed:
            return CHUNKS_FAILED
        if self.complete:
            return 0
        if self.held or self.planning:
            return HELD_BY_OTHERS
        return WAITING if self.standing and self.standing.only_waits else TO_BE_TRIED_AGAIN

    def as_json(self) -> dict[str, object]:
        """Return all of it in numbers, and the errors in words."""
        standing = self.standing
        return {
            "source": self.source,
            "exit_status": self.exit_status,
            "complete": self.complete,
            "inventory": standing.snapshot if standing else None,
            "objects": standing.objects if standing else None,
            "located": standing.located if standing else None,
            "claimed": standing.claimed if standing else None,
            "to_be_tried_again": standing.again if standing else None,
            "skipped": standing.skipped if standing else {},
            "waiting": self.waiting and self.waiting.as_json(),
            "archived_objects": self.objects,
            "archived_bytes": self.size_bytes,
            "chunks": {
                "archived": len(self.chunks) - len(self.failed) - len(self.held),
                "failed": len(self.failed),
                "held": len(self.held),
                "not_tried": len(self.not_tried),
                "parked": self.parked,
            },
            "planned_by": self.planning or None,
            "errors": [{"chunk": name, "error": str(error), "hint": error.hint or None} for name, error in self.failed.items()],
        }


def exit_status(summaries: Sequence[Summary]) -> int:
    """Return the exit status of the command: of all its sources, the first that applies."""
    return min((summary.exit_status for summary in summaries if summary.exit_status), default=0)


def run_command(
    source: str | None,
    *,
    settings: Settings,
    second_copy: bool = False,
    inventory: Mapping[str, object] | None = None,
    json: bool = False,
) -> int:
    """Return the exit status of `run_source`.

    With `json`, the last line on standard output is a JSON object that sums it up, also where it ends by an error.
    """
    done: list[Summary] = []
    ended: dict[str, object] = {}
    try:
        run_source(source, settings=settings, second_copy=second_copy, inventory=inventory, done=done)
    except CafError as error:
        ended = {"exit_status": error.exit_code, "error": str(error), "hint": error.hint or None}
        raise
    except KeyboardInterrupt:
        ended = {"exit_status": INTERRUPTED, "error": "interrupted"}
        raise
    finally:
        if json:
            summary = {"exit_status": exit_status(done), "sources": [one.as_json() for one in done], **ended}
            sys.stdout.write(dump_json(summary) + "\n")
            sys.stdout.flush()
    return exit_status(done)


def run_source(
    source: str | None,
    *,
    settings: Settings,
    second_copy: bool = False,
    inventory: Mapping[str, object] | None = None,
    console: Console | None = None,
    done: list[Summary] | None = None,
) -> list[Summary]:
    """Archive what is new of one source, or of all.

    Args:
        source: its name; None for every source of the settings, in order of their names.
        settings: as loaded.
        second_copy: plan also what the store may have, where the ledger knows nothing of the source.
        inventory: which inventory is taken, as the config of `s3_inventory`; its defaults where it is not given.
        console: where progress and notes go; a new one on stderr by default.
        done: where each source's summary is added as soon as there is one; a new list by default.

    Returns:
        A summary for each source; it has the errors of single chunks.

    Raises:
        CafError: an inventory or a plan cannot be taken, or a setting is wrong: what every chunk would meet just the same.
        KeyboardInterrupt: Ctrl-C; the run under way is marked as canceled, or failed where it came between two steps.
    """
    names = sorted(settings.sources) if source is None else [source]
    if not names:
        raise UsageError("there is no source to archive", hint="add [sources.NAME] to caf.toml")
    for name in names:
        settings.source(name)
    console = console or Console(stderr=True)
    summaries = [] if done is None else done
    with InterruptWatch() as watch:
        try:
            waits = Waits(Announcer(partial(_say, console)))
            with open_instance(settings, waits) as instance, closing(open_ledger(settings, waits)) as ledger:
                for run in reap_dead_runs(instance):
                    _say(console, f"run {run} was killed earlier; it is marked as failed", style="yellow")
                for name in names:
                    command = _Command(
                        settings,
                        instance,
                        ledger,
                        console=console,
                        source=name,
                        watch=watch,
                        second_copy=second_copy,
                        inventory=inventory or {},
                    )
                    summaries.append(command.run())
                for summary in summaries:
                    _say(console, _sentence(summary))
        except DagsterExecutionInterruptedError as interrupt:
            raise KeyboardInterrupt from interrupt
        except Exception:
            watch.raise_seen()  # an interrupt in the wrong place becomes whatever the place makes of it
            raise
    return summaries


@contextmanager
def open_instance(settings: Settings, waits: Waits | None = None) -> Iterator[DagsterInstance]:
    """Open Dagster's instance in our DAGSTER_HOME; `waits` says it while its database does not answer.

    Raises:
        SettingsError: the folder or the storage cannot be used.
    """
    home = prepare_dagster_home(settings)
    with (waits or Waits()).waiting(
        "Dagster's database", ends_by="its answer ends it, or the time limit of a connection", grace=UNANSWERED_SECONDS
    ):
        require_database()
    try:
        instance = DagsterInstance.from_ref(InstanceRef.from_dir(str(home), overrides=dict(_NO_COMPUTE_LOGS)))
        instance.get_runs(limit=1)
    except (DagsterError, SQLAlchemyError, OSError) as error:
        raise SettingsError(
            f"Dagster's storage cannot be opened: {first_line(error)}",
            hint=f"see {home}/dagster.yaml and CAF_DAGSTER_DATABASE_URL",
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
        inventory: Mapping[str, object],
    ) -> None:
        self._source = source
        self._inventory = inventory
        self._second_copy = second_copy
        self._watch = watch
        self._instance = instance
        self._ledger = ledger
        self._console = console
        self._progress = ChunkProgress(console, source)
        self._errors: list[CafError] = []
        self._settings = settings
        announcer = Announcer(self._say)
        self._progress.waits = lambda: announcer.waits
        run = RunResource(
            settings=settings,
            progress=self._progress.packed,
            upload_progress=self._progress.sent,
            on_error=self._note_error,
            waiting=announcer,
        )
        self._defs: Definitions = build_defs(
            settings, resource_overrides={LEDGER: SharedLedger(settings=settings, shared=ledger), RUN: run}
        )
        self._summary = Summary(source)
        self._alike: Counter[str] = Counter()
        self._gave_back = False  # a chunk tried last closed before its last planned object, so that the rest is to be planned

    def run(self) -> Summary:
        """Plan, archive every chunk under way, and count the objects of the inventory by what became of them."""
        with self._progress:
            snapshot = self._plan()
            self._archive_under_way()
            # Providers may turn out to be slower than the chunks are large. Once: an object alone may be too large for them.
            again = self._withdrawn_as_too_large()
            while again or self._gave_back:
                snapshot = self._plan()
                self._archive_under_way()
                again = False
        self._summary.parked = len(self._ledger.chunks(self._source, [ChunkState.PARKED]))
        self._summary.standing = self._standing(snapshot)
        self._summary.waiting = self._ledger.account(self._source).waiting
        return self._summary

    def _plan(self) -> str:
        """Take an inventory and plan what is new of it; return its name."""
        terms = {"s3_inventory": self._inventory, "chunk_plan": {"second_copy": self._second_copy}}
        config = {"ops": {op_name(self._source, asset): {"config": values} for asset, values in terms.items()}}
        planned = self._execute(job_name(self._source, "plan"), config=config)
        self._summary.planning = self._holder(planned) or ""
        if self._summary.planning:
            self._say(f"run {self._summary.planning} is planning this source; going on with what is planned already")
        for report, age in zip(_shown_in(planned, REPORT), _shown_in(planned, REPORT_AGE), strict=True):
            self._say(f"the inventory is that of {report}, which was {age} old")
        for warning in _shown_in(planned, WARNING):
            self._say(warning, style="yellow")
        register_chunks(self._instance, self._ledger, self._source)
        return _shown_in(planned, SNAPSHOT)[0]

    def _archive_under_way(self) -> None:
        """Archive each chunk that has work and that this command has not tried yet; see whether any gave objects back."""
        self._gave_back = False
        chunks = [chunk for chunk in chunks_with_work(self._ledger, self._source) if chunk.name not in self._summary.chunks]
        self._progress.plan(chunks)
        for number, chunk in enumerate(chunks):
            self._summary.chunks.append(chunk.name)
            self._progress.begin()
            archived = self._archive(chunk)
            self._progress.end(archived, held=chunk.name in self._summary.held)
            self._gave_back |= self._ledger.chunk(chunk.name).released_count > chunk.released_count
            rest = [one.name for one in chunks[number + 1 :]]
            if self._is_hopeless(self._summary.failed.get(chunk.name), chunk.name) and rest:
                self._gave_back = False  # what is planned now would fail by it, too
                self._summary.not_tried += rest
                self._say(
                    f"the next chunk would fail by the same error: {counted(len(rest), 'more chunk')} not tried",
                    style="yellow",
                )
                return

    def _is_hopeless(self, error: CafError | None, chunk: str) -> bool:
        """Tell whether the next chunk would meet the same error: by its kind, or since three chunks met it."""
        if error is None or not error.permanent or isinstance(error, ChunkTooLarge):
            return False
        alike = f"{type(error).__name__}: {_SOME.sub('#', str(error).replace(chunk, '#'))}"
        self._alike[alike] += 1
        return isinstance(error, HITS_EVERY_CHUNK) or self._alike[alike] >= MOST_ALIKE

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
            self._progress.forget(name)
        return bool(withdrawn)

    def _archive(self, chunk: Chunk) -> Chunk | None:
        """Archive a chunk; return it as it is then, or None where it failed or is held."""
        try:
            result = self._execute(job_name(self._source, "archive"), partition_key=chunk.name)
        except SettingsError:
            raise
        except CafError as error:
            self._summary.failed[chunk.name] = error
            self._say(f"chunk {chunk.name} failed: {error}", style="red")
            if error.hint:
                self._say(f"hint: {error.hint}")
            return None
        if holder := self._holder(result):
            self._summary.held.append(chunk.name)
            self._say(f"chunk {chunk.name} is held by run {holder}", style="yellow")
            return None
        done = self._ledger.chunk(chunk.name)
        if chunk.state in UNDER_WAY:  # else it was located before, and only had something left in staging
            self._summary.objects += done.member_count
            self._summary.size_bytes += done.member_bytes
        return done

    def _standing(self, snapshot: str) -> Standing:
        """Return what became of the objects of this command's own inventory; evaluates the check of the source, too."""
        result = self._execute(job_name(self._source, "audit"))
        seen = [{name: value.value for name, value in one.metadata.items()} for one in result.get_asset_check_evaluations()]
        latest = next((_standing_of(shown) for shown in seen if SNAPSHOT in shown), None)
        if latest is not None and latest.snapshot == snapshot:
            return latest
        objects = UnaskedObjects("objects are counted without their source")
        work = open_workplace(self._settings, self._source, run="caf run", ledger=self._ledger, objects=objects)
        try:
            found = planning.account_for(work, planning.open_snapshot(work, snapshot))
        except NotLocated:
            # Others took so many inventories meanwhile that this one was removed: theirs are later, and say as much.
            if latest is None or latest.snapshot < snapshot:
                raise
            return latest
        finally:
            close_store(work.store)
        return Standing(snapshot, found.objects, found.located, found.claimed, found.unaccounted, dict(found.skipped))

    def _holder(self, result: ExecuteInProcessResult) -> str | None:
        run = self._instance.get_run_by_id(result.run_id)
        return run.tags.get(HELD_TAG) if run else None

    def _note_error(self, error: CafError) -> None:
        """Keep an error of a step, and say where the step is tried again."""
        self._errors.append(error)
        alike = next((n for n, one in enumerate(reversed(self._errors)) if type(one) is not type(error)), len(self._errors))
        if not error.permanent and alike <= RETRY_TRANSIENT.max_retries:
            self._say(f"{error}; the step is tried again in some seconds", style="yellow")

    def _say(self, line: str, style: str | None = None) -> None:
        _say(self._console, f"{self._source}: {line}", style=style)

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


def _shown_in(result: ExecuteInProcessResult, name: str) -> list[str]:
    """Return what the assets of a run have under this name in their metadata."""
    shown = [
        event.step_materialization_data.materialization.metadata for event in result.all_events if event.is_step_materialization
    ]
    return [str(each[name].value) for each in shown if name in each]


def _standing_of(shown: Mapping[str, object]) -> Standing:
    """Read a standing from the metadata of `source_is_complete`."""

    def number(name: str) -> int:
        return int(str(shown[name]))

    skipped = {str(reason): number(f"{SKIPPED}{reason}") for reason in SkipReason if f"{SKIPPED}{reason}" in shown}
    return Standing(str(shown[SNAPSHOT]), number("objects"), number("located"), number("claimed"), number("unaccounted"), skipped)


def _sentence(summary: Summary) -> str:
    chunks = len(summary.chunks) - len(summary.failed) - len(summary.held)
    located = show_size(summary.size_bytes)
    done = f"{summary.source}: {counted(chunks, 'chunk')} archived, {counted(summary.objects, 'object')}, {located}"
    if not summary.chunks:
        done = f"{summary.source}: nothing new" if summary.complete else f"{summary.source}: nothing to do now"
    counts = [
        f"{len(summary.failed)} failed" if summary.failed else "",
        f"{len(summary.held)} held by other runs" if summary.held else "",
        f"{len(summary.not_tried)} not tried" if summary.not_tried else "",
        f"{summary.parked} parked ('caf status' says why)" if summary.parked else "",
        _where_all_is(summary),
    ]
    return "; ".join([done, *(count for count in counts if count)])


def _where_all_is(summary: Summary) -> str:
    standing = summary.standing
    if standing is None:
        return "not everything is located yet"
    skips = sorted((reason, count) for reason, count in standing.skipped.items() if count and reason != SkipReason.WAITING)
    skipped = ", ".join(f"{count:,} skipped as {reason}" for reason, count in skips)
    if standing.complete:
        return f"the source is complete but for {skipped}" if skipped else "the source is complete"
    claimed = f"{standing.claimed:,} claimed by chunks" if standing.claimed else ""
    unaccounted = f"{standing.unaccounted:,} not planned" if standing.unaccounted else ""
    waiting = _who_waits(summary.waiting) if standing.waiting and summary.waiting else ""
    return f"not everything is located yet: {', '.join(part for part in (claimed, skipped, unaccounted, waiting) if part)}"


def _who_waits(waiting: WaitingObjects) -> str:
    return (
        f"{counted(waiting.objects, 'object')} ({show_size(waiting.size_bytes)}) wait until the source has more for a chunk of"
        f" min_chunk_size; the first plan after {waiting.until:%Y-%m-%d %H:%M:%S} UTC takes what waits in any case"
    )


def _say(console: Console, line: str, style: str | None = None) -> None:
    console.print(one_line(line), style=style, soft_wrap=True, highlight=False, markup=False)


def _raise_interrupt(instance: DagsterInstance, run_id: str) -> None:
    """Raise KeyboardInterrupt where the run ended by one: Dagster itself keeps it when told not to raise errors."""
    run = instance.get_run_by_id(run_id)
    if run is None:
        return
    reason = run.tags.get(RUN_FAILURE_REASON_TAG)
    if run.status is DagsterRunStatus.CANCELED or reason == RunFailureReason.UNEXPECTED_TERMINATION.value:
        raise KeyboardInterrupt
