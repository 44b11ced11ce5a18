"""`caf run`: takes an inventory, plans, and archives every chunk of a source through Dagster.

It executes the UI's jobs in the same storage, so the UI shows the runs.
"""

import os
import re
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from json import dumps as dump_json
from typing import Final

from dagster import DagsterExecutionInterruptedError, DagsterInstance
from rich.console import Console

from caf_pipeline.automation.dead_runs import reap_dead_runs
from caf_pipeline.automation.launching import chunks_with_work
from caf_pipeline.chunk_state import IN_GOOD_STANDING, ChunkState
from caf_pipeline.dagster_host.code_location import CodeLocation, code_location
from caf_pipeline.dagster_host.home import dagster_home
from caf_pipeline.dagster_host.progress_bar import ChunkProgress, object_of
from caf_pipeline.dagster_host.setup import this_machine
from caf_pipeline.dagster_host.sigint import InterruptWatch
from caf_pipeline.dagster_host.source_runs import ChunkOutcome, SourceRuns, open_instance
from caf_pipeline.dagster_host.summary import InventoryTotals, Summary, exit_status, sentence
from caf_pipeline.dagster_host.workers import Workers, best_worker_count
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
from caf_pipeline.defs.partitions import register_chunks
from caf_pipeline.errors import (
    HITS_EVERY_CHUNK,
    CafError,
    ChunkTooLarge,
    NotLocated,
    SettingsError,
    StagingError,
    UsageError,
    exit_code_of,
    one_line,
)
from caf_pipeline.inventory.filters import FILTERS
from caf_pipeline.inventory.objects import SkipReason, VersionCounts
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import LiveWork
from caf_pipeline.naming import op_name
from caf_pipeline.records import Chunk
from caf_pipeline.run_context import RunContext
from caf_pipeline.settings import Settings
from caf_pipeline.source.protocol import UnavailableSource
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.store.jackal.storage_forecast import space_warning
from caf_pipeline.system.ending import interrupted_status
from caf_pipeline.system.processes import this_process
from caf_pipeline.system.quantities import counted
from caf_pipeline.waits import Announcer, Waits
from caf_pipeline.wiring import open_ledger, open_run_context, record_space

MAX_EQUAL_ERRORS: Final = 3
"""Chunks with the same permanent error until no further chunk is tried."""

_NUMBER: Final = re.compile(r"[0-9a-f]{8,}|[0-9]+")


def run_command(
    source: str | None,
    *,
    settings: Settings,
    new_archive: bool = False,
    inventory: Mapping[str, object] | None = None,
    workers: int = 0,
    json: bool = False,
) -> int:
    """Execute `run_source`; return the exit status.

    The last line on stdout is a JSON summary if `json`, even after an error.
    """
    done: list[Summary] = []
    ended: dict[str, object] = {"exit_status": CafError.exit_code}
    try:
        run_source(
            source,
            settings=settings,
            new_archive=new_archive,
            inventory=inventory,
            workers=workers,
            done=done,
        )
        ended = {"exit_status": exit_status(done)}
    except CafError as error:
        ended = {"exit_status": error.exit_code, "error": str(error), "hint": error.hint or None}
        raise
    except KeyboardInterrupt:
        ended = {"exit_status": interrupted_status(), "error": "interrupted"}
        raise
    except Exception as error:
        ended = {"exit_status": exit_code_of(error), "error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        if json:
            report = {**ended, "sources": [summary.as_json() for summary in done]}
            sys.stdout.write(dump_json(report) + "\n")
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
    """Archive new objects of one source, or of all.

    `done` receives each summary, with the errors of single chunks. `inventory` is config of
    `s3_inventory`, `new_archive` of `chunk_plan`. 0 `workers`: as many as the chunks' sizes
    justify. On Ctrl-C the run is marked as canceled, or as failed between two steps.

    Raises:
        CafError: an inventory or a plan failed, or every chunk would fail.
    """
    names = sorted(settings.sources) if source is None else [source]
    if not names:
        raise UsageError("there is no source to archive", hint="add [sources.NAME] to caf.toml")
    for name in names:
        settings.source(name)
    dagster_home(settings)  # in a team's project it must be set
    location = code_location(settings, names)
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
                        location=location,
                        watch=watch,
                        new_archive=new_archive,
                        inventory=inventory or {},
                        workers=workers,
                    )
                    summaries.append(command.run())
                for summary in summaries:
                    _say(console, sentence(summary))
                for warning in {summary.space_warning for summary in summaries} - {""}:
                    _say(console, warning, style="red")
        except DagsterExecutionInterruptedError as interrupt:
            raise KeyboardInterrupt from interrupt
        except Exception:
            # The error may be the result of an interrupt.
            watch.raise_seen()
            raise
    return summaries


class _Command:
    def __init__(
        self,
        settings: Settings,
        instance: DagsterInstance,
        ledger: Ledger,
        *,
        console: Console,
        source: str,
        location: CodeLocation,
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
        self._progress = ChunkProgress(console, source, self._live)
        self._settings = settings
        self._pids: Callable[[], Sequence[int]] = tuple  # of workers
        self._runs = SourceRuns(
            settings,
            instance,
            ledger,
            source,
            location=location,
            watch=watch,
        )
        self._summary = Summary(source)
        self._errors: Counter[str] = Counter()
        # Chunks with a part of an object that this command archived.
        self._parts: set[str] = set()
        # Whether a chunk was closed before its last planned object, so the rest must be planned.
        self._released = False

    def run(self) -> Summary:
        with self._run_context(register=False) as context:
            if withdrawn := chunk_steps.correct_address(context):
                self._say(
                    f"{counted(len(withdrawn), 'chunk')} of another address withdrawn; nothing was "
                    f"stored of it. The source is {context.address} now",
                    style="yellow",
                )
        with self._run_context() as context:
            context.store.require_here()
            if reading := record_space(self._settings, self._ledger, context.store):
                self._summary.space_warning = space_warning(
                    reading, reading.read_at, self._settings.jackal.warn_days
                )
        with self._progress:
            snapshot = self._plan()
            self._archive_under_way()
            # If providers were too slow for large chunks, plan smaller ones. Withdrawn chunks do
            # not count as failed. Do so only once, since a single object may be too large.
            too_large = [
                name
                for name, error in self._summary.failed.items()
                if isinstance(error, ChunkTooLarge)
                and self._ledger.chunks.get(name).state is ChunkState.WITHDRAWN
            ]
            for name in too_large:
                del self._summary.failed[name]
                self._summary.chunks.remove(name)
                self._progress.forget(name)
            replan = bool(too_large)
            while replan or self._released:
                snapshot = self._plan()
                self._archive_under_way()
                replan = False
            self._summary.totals = self._totals(snapshot) if snapshot else None
        self._summary.objects += self._count_split_objects()
        self._summary.parked = len(self._ledger.chunks.list(self._source, [ChunkState.PARKED]))
        self._summary.damaged = len(self._ledger.chunks.list(self._source, [ChunkState.DAMAGED]))
        account = self._ledger.chunks.account(self._source)
        self._summary.waiting, self._summary.ever_planned = account.waiting, bool(account.chunks)
        self._summary.retried_at = account.retried_at
        return self._summary

    def _plan(self) -> str:
        # Returns the name of the inventory; "" if another run lists or plans the source.
        configs = {
            "s3_inventory": self._inventory,
            "chunk_plan": {"new_archive": self._new_archive},
        }
        ops = {op_name(self._source, asset): {"config": item} for asset, item in configs.items()}
        self._planned = planned = self._runs.execute("plan", config={"ops": ops})
        self._summary.planning = self._runs.holder(planned)
        if self._summary.planning:
            self._say(
                f"run {self._summary.planning} is listing or planning this source; going on with "
                "the chunks that are already planned"
            )
        metadata = [
            event.step_materialization_data.materialization.metadata
            for event in planned.all_events
            if event.is_step_materialization
        ]

        def values(name: str) -> list[str]:
            return [str(item[name].value) for item in metadata if name in item]

        for report, age in zip(values(REPORT), values(REPORT_AGE), strict=True):
            self._say(f"the inventory is that of {report}, which was {age} old")
        for warning in values(WARNING):
            self._say(warning, style="yellow")
        register_chunks(self._instance, self._ledger, self._source)
        return next(iter(values(SNAPSHOT)), "")

    def _archive_under_way(self) -> None:
        # Archives each chunk with work that this command has not tried yet.
        self._released = False
        chunks = [
            chunk
            for chunk in chunks_with_work(self._ledger, self._source)
            if chunk.name not in self._summary.chunks
        ]
        split = any(chunk.part for chunk in chunks)
        self._progress.plan(
            chunks,
            located=self._ledger.chunks.list(self._source, IN_GOOD_STANDING) if split else (),
        )
        waiting = deque(chunks)
        with closing(self._outcomes(waiting)) as outcomes:
            for chunk, outcome in outcomes:
                self._summary.chunks.append(chunk.name)
                done = self._record(chunk, outcome)
                self._progress.end(chunk.name, done, held=bool(outcome.holder))
                released = self._ledger.chunks.get(chunk.name).released_count
                self._released |= released > chunk.released_count
                if self._hits_next_chunk(outcome.error, chunk.name) and waiting:
                    self._summary.not_tried += [item.name for item in waiting]
                    self._say(
                        "the next chunk would fail with the same error: "
                        f"{counted(len(waiting), 'more chunk')} not tried",
                        style="yellow",
                    )
                    waiting.clear()
        if self._summary.not_tried:
            self._released = False  # a new chunk would fail with the same error

    def _outcomes(self, waiting: deque[Chunk]) -> Generator[tuple[Chunk, ChunkOutcome], None, None]:
        # Yields each chunk when its run has ended. Clearing `waiting` keeps others from starting.
        def say_no_room(error: StagingError) -> None:
            self._say(f"{error}; from now on one chunk after the other", style="yellow")

        best = best_worker_count(waiting, this_machine(self._settings))
        count = min(self._workers or best, len(waiting))
        if count > 1:
            with Workers(count, self._settings, self._source) as workers:
                self._pids = workers.pids
                yield from workers.archive(waiting, no_room=say_no_room)
            reap_dead_runs(self._instance)
        while waiting:
            chunk = waiting.popleft()
            yield chunk, self._runs.archive(chunk.name)

    def _live(self) -> list[LiveWork]:
        # The work of this command's processes.
        here, pids = this_process("").boot_id, {os.getpid(), *self._pids()}
        return [
            item
            for item in self._ledger.progress.live()
            if item.source == self._source
            and item.holder.boot_id == here
            and item.holder.pid in pids
        ]

    def _hits_next_chunk(self, error: CafError | None, chunk: str) -> bool:
        if error is None or not error.permanent or isinstance(error, ChunkTooLarge):
            return False
        pattern = f"{type(error).__name__}: {_NUMBER.sub('#', str(error).replace(chunk, '#'))}"
        self._errors[pattern] += 1
        return isinstance(error, HITS_EVERY_CHUNK) or self._errors[pattern] >= MAX_EQUAL_ERRORS

    def _record(self, chunk: Chunk, outcome: ChunkOutcome) -> Chunk | None:
        # Returns the chunk after its run; None if it failed or is held.
        if isinstance(outcome.error, SettingsError):
            raise outcome.error
        if outcome.error:
            self._summary.failed[chunk.name] = outcome.error
            self._say(f"chunk {chunk.name} failed: {outcome.error}", style="red")
            if outcome.error.hint:
                self._say(f"hint: {outcome.error.hint}")
            return None
        if outcome.holder:
            self._summary.held.append(chunk.name)
            self._say(f"chunk {chunk.name} is held by run {outcome.holder}", style="yellow")
            return None
        done = self._ledger.chunks.get(chunk.name)
        self._summary.empty += outcome.ended is ChunkState.EMPTY
        if outcome.ended is ChunkState.LOCATED:  # not if another run located or withdrew the chunk
            self._summary.archived += 1
            self._summary.objects += 0 if done.part else done.member_count
            self._summary.size_bytes += done.member_bytes
            if done.part:
                self._parts.add(done.name)
        return done

    def _count_split_objects(self) -> int:
        # Counts located objects in parts whose last part this command archived.
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
        # `caf_source_is_complete` has the totals unless another inventory is later. The run of the
        # plan has evaluated it; chunks that were archived since then change its result.
        result = self._runs.execute("audit") if self._summary.chunks else self._planned
        checks = [
            {name: value.value for name, value in evaluation.metadata.items()}
            for evaluation in result.get_asset_check_evaluations()
        ]
        latest = next((_totals_of(check) for check in checks if SNAPSHOT in check), None)
        if latest is not None and latest.snapshot == snapshot:
            return latest
        try:
            with self._run_context() as context:
                taken = inventories.open_snapshot(context, snapshot)
                accounting = planning.account_for(context, taken)
        except NotLocated:
            # Other runs took so many inventories that this one was removed. A later one will do.
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
    def _run_context(self, *, register: bool = True) -> Iterator[RunContext]:
        objects = UnavailableSource("this command reads the bucket only in runs of Dagster")
        context = open_run_context(
            self._settings,
            self._source,
            run="caf run",
            ledger=self._ledger,
            objects=objects,
            register=register,
        )
        try:
            yield context
        finally:
            context.close()

    def _say(self, line: str, style: str | None = None) -> None:
        _say(self._console, f"{self._source}: {line}", style=style)


def _totals_of(shown: Mapping[str, object]) -> InventoryTotals:
    # From the metadata of `caf_source_is_complete`.
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
