"""`caf run`: inventory, plan and every chunk of a source, through Dagster.

Each step of it is a run of the job that the UI would launch, in the same storage, so it is on the
job's own page. Runs are executed in this process, and where several chunks are archived at a time
in processes that do many: a new one takes seconds.
"""

import re
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from json import dumps as dump_json
from typing import Final

from dagster import DagsterExecutionInterruptedError, DagsterInstance, ExecuteInProcessResult
from rich.console import Console

from caf_pipeline.automation.dead_runs import reap_dead_runs
from caf_pipeline.automation.launching import chunks_with_work
from caf_pipeline.chunk_state import IN_GOOD_STANDING, ChunkState
from caf_pipeline.dagster_host.progress_bar import ChunkProgress, object_of
from caf_pipeline.dagster_host.sigint import InterruptWatch
from caf_pipeline.dagster_host.source_runs import Archived, SourceRuns, open_instance
from caf_pipeline.dagster_host.summary import InventoryTotals, Summary, exit_status, sentence
from caf_pipeline.dagster_host.workers import Workers, workers_worth
from caf_pipeline.defs.metadata import (
    DELETE_MARKERS,
    DELETED_KEYS,
    LEFT_OUT,
    OLDER_VERSIONS,
    REPORT,
    REPORT_AGE,
    SKIPPED,
    SNAPSHOT,
    VERSIONS,
    WARNING,
)
from caf_pipeline.defs.naming import op_name
from caf_pipeline.defs.partitions import register_chunks
from caf_pipeline.errors import (
    HITS_EVERY_CHUNK,
    CafError,
    ChunkTooLarge,
    NotLocated,
    SettingsError,
    StagingError,
    UsageError,
    one_line,
)
from caf_pipeline.inventory.filters import FILTERS
from caf_pipeline.inventory.objects import SkipReason, VersionCounts
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import Chunk
from caf_pipeline.run_context import RunContext
from caf_pipeline.run_wiring import open_ledger, open_run_context
from caf_pipeline.settings import Settings
from caf_pipeline.source.protocol import UnavailableSource
from caf_pipeline.steps import inventories, planning
from caf_pipeline.system.ending import interrupted_status
from caf_pipeline.system.quantities import counted
from caf_pipeline.waits import Announcer, Wait, Waits

MOST_ALIKE: Final = 3
"""Chunks that fail for good by the same error, after which no further chunk is tried."""

_SOME: Final = re.compile(r"[0-9a-f]{8,}|[0-9]+")


def run_command(
    source: str | None,
    *,
    settings: Settings,
    new_archive: bool = False,
    inventory: Mapping[str, object] | None = None,
    workers: int = 0,
    json: bool = False,
) -> int:
    """Return the exit status of `run_source`.

    With `json`, the last line on standard output is a JSON object that sums it up, also where it
    ends by an error.
    """
    done: list[Summary] = []
    ended: dict[str, object] = {}
    try:
        run_source(
            source,
            settings=settings,
            new_archive=new_archive,
            inventory=inventory,
            workers=workers,
            done=done,
        )
    except CafError as error:
        ended = {"exit_status": error.exit_code, "error": str(error), "hint": error.hint or None}
        raise
    except KeyboardInterrupt:
        ended = {"exit_status": interrupted_status(), "error": "interrupted"}
        raise
    finally:
        if json:
            summary = {
                "exit_status": exit_status(done),
                "sources": [one.as_json() for one in done],
                **ended,
            }
            sys.stdout.write(dump_json(summary) + "\n")
            sys.stdout.flush()
    return exit_status(done)


def run_source(
    source: str | None,
    *,
    settings: Settings,
    new_archive: bool = False,
    inventory: Mapping[str, object] | None = None,
    workers: int = 0,
    console: Console | None = None,
    done: list[Summary] | None = None,
) -> list[Summary]:
    """Archive what is new of one source, or of all.

    Args: source: its name; None for every source of the settings, in order of their names.
        settings: as loaded. new_archive: plan also what the store may have, where the ledger knows
        nothing of the source. inventory: which inventory is taken, as the config of `s3_inventory`;
        its defaults where it is not given. workers: chunks at a time; 0 for as many as their sizes
        are worth. console: where progress and notes go; a new one on stderr by default. done: where
        each source's summary is added as soon as there is one; a new list by default.

    Returns:
        A summary for each source; it has the errors of single chunks.

    Raises: CafError: an inventory or a plan cannot be taken, or a setting is wrong: what every
        chunk would meet just the same. KeyboardInterrupt: Ctrl-C; the run under way is marked as
        canceled, or failed where it came between two steps.
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
            with (
                open_instance(settings, waits) as instance,
                closing(open_ledger(settings, waits)) as ledger,
            ):
                for run in reap_dead_runs(instance):
                    _say(
                        console,
                        f"run {run} was killed earlier; it is marked as failed",
                        style="yellow",
                    )
                for name in names:
                    command = _Command(
                        settings,
                        instance,
                        ledger,
                        console=console,
                        source=name,
                        watch=watch,
                        new_archive=new_archive,
                        inventory=inventory or {},
                        workers=workers,
                    )
                    summaries.append(command.run())
                for summary in summaries:
                    _say(console, sentence(summary))
        except DagsterExecutionInterruptedError as interrupt:
            raise KeyboardInterrupt from interrupt
        except Exception:
            # an interrupt in the wrong place becomes whatever the place makes of it
            watch.raise_seen()
            raise
    return summaries


class _Shown:
    """Shows what runs tell of the chunks that they archive one after the other; see
    `source_runs.RunListener`.
    """

    def __init__(self, progress: ChunkProgress, say: Callable[..., None]) -> None:
        self._progress = progress
        self._announcer = Announcer(say)
        self._chunk = ""
        self.say = say

    @property
    def waits(self) -> Sequence[Wait]:
        """What is waited for now."""
        return self._announcer.waits

    def begin(self, chunk: str) -> None:
        self._chunk = chunk
        self._progress.begin(chunk)

    def packed(self, objects: int, size_bytes: int, *, resumed: bool) -> None:
        self._progress.packed(self._chunk, objects, size_bytes, resumed=resumed)

    def sealed(self) -> None:
        self._progress.sealed(self._chunk)

    def sent(self, size_bytes: int) -> None:
        self._progress.sent(size_bytes)

    def waiting(self, waits: Sequence[Wait]) -> None:
        self._announcer(waits)


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
        new_archive: bool,
        inventory: Mapping[str, object],
        workers: int,
    ) -> None:
        self._source = source
        self._new_archive = new_archive
        self._inventory = inventory
        self._workers = workers
        self._instance = instance
        self._ledger = ledger
        self._console = console
        self._progress = ChunkProgress(console, source)
        self._settings = settings
        self._shown: list[_Shown] = []
        self._progress.waits = lambda: [wait for one in self._shown for wait in one.waits]
        self._here = self._show()
        self._runs = SourceRuns(settings, instance, ledger, source, watch=watch, told=self._here)
        self._summary = Summary(source)
        self._alike: Counter[str] = Counter()
        self._parts: set[str] = (
            set()
        )  # chunks that this command archived, of a part of an object each
        # a chunk tried last closed before its last planned object, so that the rest is to be
        # planned
        self._gave_back = False

    def run(self) -> Summary:
        """Plan, archive every chunk under way, and count the objects of the inventory by what
        became of them.
        """
        with self._run_context() as context:
            context.store.require_here()
        with self._progress:
            snapshot = self._plan()
            self._archive_under_way()
            # Providers may turn out to be slower than the chunks are large. Once: an object alone
            # may be too large for them.
            again = self._withdrawn_as_too_large()
            while again or self._gave_back:
                snapshot = self._plan()
                self._archive_under_way()
                again = False
        self._summary.objects += self._whole_by_parts()
        self._summary.parked = len(self._ledger.chunks.list(self._source, [ChunkState.PARKED]))
        self._summary.damaged = len(self._ledger.chunks.list(self._source, [ChunkState.DAMAGED]))
        self._summary.totals = self._totals(snapshot)
        account = self._ledger.chunks.account(self._source)
        self._summary.waiting, self._summary.ever_planned = account.waiting, bool(account.chunks)
        return self._summary

    def _plan(self) -> str:
        """Take an inventory and plan what is new of it; return its name."""
        terms = {"s3_inventory": self._inventory, "chunk_plan": {"new_archive": self._new_archive}}
        config = {
            "ops": {
                op_name(self._source, asset): {"config": values} for asset, values in terms.items()
            }
        }
        planned = self._runs.execute("plan", config=config)
        self._summary.planning = self._runs.holder(planned)
        if self._summary.planning:
            self._say(
                f"run {self._summary.planning} is planning this source; going on with what is "
                "planned already"
            )
        for report, age in zip(
            _shown_in(planned, REPORT), _shown_in(planned, REPORT_AGE), strict=True
        ):
            self._say(f"the inventory is that of {report}, which was {age} old")
        for warning in _shown_in(planned, WARNING):
            self._say(warning, style="yellow")
        register_chunks(self._instance, self._ledger, self._source)
        return _shown_in(planned, SNAPSHOT)[0]

    def _archive_under_way(self) -> None:
        """Archive each chunk that has work and that this command has not tried yet; see whether any
        gave objects back.
        """
        self._gave_back = False
        chunks = [
            chunk
            for chunk in chunks_with_work(self._ledger, self._source)
            if chunk.name not in self._summary.chunks
        ]
        in_parts = any(chunk.part for chunk in chunks)
        self._progress.plan(
            chunks,
            located=self._ledger.chunks.list(self._source, IN_GOOD_STANDING) if in_parts else (),
        )
        waiting = deque(chunks)
        with closing(self._archived(waiting)) as ended:
            for chunk, archived in ended:
                self._summary.chunks.append(chunk.name)
                done = self._note(chunk, archived)
                self._progress.end(chunk.name, done, held=bool(archived.holder))
                self._gave_back |= (
                    self._ledger.chunks.get(chunk.name).released_count > chunk.released_count
                )
                if self._is_hopeless(archived.error, chunk.name) and waiting:
                    self._summary.not_tried += [one.name for one in waiting]
                    self._say(
                        "the next chunk would fail by the same error: "
                        f"{counted(len(waiting), 'more chunk')} not tried",
                        style="yellow",
                    )
                    waiting.clear()
        if self._summary.not_tried:
            self._gave_back = False  # what is planned now would fail by it, too

    def _archived(self, waiting: deque[Chunk]) -> Generator[tuple[Chunk, Archived], None, None]:
        """Yield each chunk when its run ended; none begins once `waiting` is empty."""
        count = min(self._workers or workers_worth(list(waiting)), len(waiting))
        if count > 1:
            with Workers(count, self._settings, self._source, self._show) as workers:
                yield from workers.archive(waiting, no_room=self._say_no_room)
            reap_dead_runs(self._instance)
        while waiting:
            chunk = waiting.popleft()
            yield chunk, self._runs.archive(chunk.name)

    def _say_no_room(self, error: StagingError) -> None:
        self._say(f"{error}; from now on one chunk after the other", style="yellow")

    def _show(self) -> _Shown:
        self._shown.append(_Shown(self._progress, self._say))
        return self._shown[-1]

    def _is_hopeless(self, error: CafError | None, chunk: str) -> bool:
        """Tell whether the next chunk would meet the same error: by its kind, or since three chunks
        met it.
        """
        if error is None or not error.permanent or isinstance(error, ChunkTooLarge):
            return False
        alike = f"{type(error).__name__}: {_SOME.sub('#', str(error).replace(chunk, '#'))}"
        self._alike[alike] += 1
        return isinstance(error, HITS_EVERY_CHUNK) or self._alike[alike] >= MOST_ALIKE

    def _withdrawn_as_too_large(self) -> bool:
        """Take chunks that were withdrawn as too large out of the failed ones; tell whether there
        were any.
        """
        withdrawn = [
            name
            for name, error in self._summary.failed.items()
            if isinstance(error, ChunkTooLarge)
            and self._ledger.chunks.get(name).state is ChunkState.WITHDRAWN
        ]
        for name in withdrawn:
            del self._summary.failed[name]
            self._summary.chunks.remove(name)
            self._progress.forget(name)
        return bool(withdrawn)

    def _note(self, chunk: Chunk, archived: Archived) -> Chunk | None:
        """Note how the run of a chunk ended; return the chunk as it is then, or None where it
        failed or is held.
        """
        if isinstance(archived.error, SettingsError):
            raise archived.error
        if archived.error:
            self._summary.failed[chunk.name] = archived.error
            self._say(f"chunk {chunk.name} failed: {archived.error}", style="red")
            if archived.error.hint:
                self._say(f"hint: {archived.error.hint}")
            return None
        if archived.holder:
            self._summary.held.append(chunk.name)
            self._say(f"chunk {chunk.name} is held by run {archived.holder}", style="yellow")
            return None
        done = self._ledger.chunks.get(chunk.name)
        self._summary.empty += archived.ended is ChunkState.EMPTY
        if (
            archived.ended is ChunkState.LOCATED
        ):  # else also where another run archived it, or it was withdrawn with other parts
            self._summary.archived += 1
            self._summary.objects += 0 if done.part else done.member_count
            self._summary.size_bytes += done.member_bytes
            if done.part:
                self._parts.add(done.name)
        return done

    def _whole_by_parts(self) -> int:
        """Return how many objects in parts are located of which this command archived the part that
        was the last.
        """
        if not self._parts:
            return 0
        objects = defaultdict[tuple[str, int], list[Chunk]](list)
        for chunk in self._ledger.chunks.list(self._source, IN_GOOD_STANDING):
            if chunk.part and not chunk.part_abandoned:
                objects[object_of(chunk)].append(chunk)
        whole = [parts for parts in objects.values() if len(parts) == parts[0].part_count]
        lasts = (
            max(parts, key=lambda chunk: (chunk.located_at or chunk.updated_at, chunk.number))
            for parts in whole
        )
        return sum(chunk.name in self._parts for chunk in lasts)

    def _totals(self, snapshot: str) -> InventoryTotals:
        """Return what became of the objects of this command's own inventory; evaluates the check of
        the source, too.
        """
        result = self._runs.execute("audit")
        seen = [
            {name: value.value for name, value in one.metadata.items()}
            for one in result.get_asset_check_evaluations()
        ]
        latest = next((_totals_of(shown) for shown in seen if SNAPSHOT in shown), None)
        if latest is not None and latest.snapshot == snapshot:
            return latest
        try:
            with self._run_context() as context:
                taken = inventories.open_snapshot(context, snapshot)
                accounting = planning.account_for(context, taken)
        except NotLocated:
            # Others took so many inventories meanwhile that this one was removed: theirs are later,
            # and say as much.
            if latest is None or latest.snapshot < snapshot:
                raise
            return latest
        return InventoryTotals(
            snapshot,
            accounting.objects,
            accounting.located,
            accounting.claimed,
            accounting.unaccounted,
            dict(accounting.skipped),
            dict(accounting.left_out),
            taken.all_versions,
            taken.beside,
        )

    @contextmanager
    def _run_context(self) -> Iterator[RunContext]:
        """Open the source's store and ledger. The source itself is not asked."""
        objects = UnavailableSource("this command asks the source only in runs of Dagster")
        context = open_run_context(
            self._settings, self._source, run="caf run", ledger=self._ledger, objects=objects
        )
        try:
            yield context
        finally:
            context.close()

    def _say(self, line: str, style: str | None = None) -> None:
        _say(self._console, f"{self._source}: {line}", style=style)


def _shown_in(result: ExecuteInProcessResult, name: str) -> list[str]:
    """Return what the assets of a run have under this name in their metadata."""
    shown = [
        event.step_materialization_data.materialization.metadata
        for event in result.all_events
        if event.is_step_materialization
    ]
    return [str(each[name].value) for each in shown if name in each]


def _totals_of(shown: Mapping[str, object]) -> InventoryTotals:
    """Read the totals from the metadata of `source_is_complete`."""

    def number(name: str) -> int:
        return int(str(shown[name]))

    skipped = {
        str(reason): number(f"{SKIPPED}{reason}")
        for reason in SkipReason
        if f"{SKIPPED}{reason}" in shown
    }
    left_out = {
        name: number(f"{LEFT_OUT}{name}") for name in FILTERS if f"{LEFT_OUT}{name}" in shown
    }
    objects, located, claimed, unaccounted = map(
        number, ("objects", "located", "claimed", "unaccounted")
    )
    beside = VersionCounts(*map(number, (OLDER_VERSIONS, DELETE_MARKERS, DELETED_KEYS)))
    all_versions = shown.get(VERSIONS) == "all"
    return InventoryTotals(
        str(shown[SNAPSHOT]),
        objects,
        located,
        claimed,
        unaccounted,
        skipped,
        left_out,
        all_versions,
        beside,
    )


def _say(console: Console, line: str, style: str | None = None) -> None:
    console.print(one_line(line), style=style, soft_wrap=True, highlight=False, markup=False)
