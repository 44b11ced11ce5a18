"""`caf backfill`: archives chunks by one backfill of their job, which Dagster's daemon executes.

The command creates the backfill in one write, and then only watches it.
"""

import secrets
import string
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from json import dumps as dump_json
from typing import Any, Final

from dagster import DagsterInstance, DagsterRunStatus, RunsFilter
from rich.console import Console

from caf_pipeline.asset_keys import DEFAULT_KEYS, AssetKeys
from caf_pipeline.automation.launching import UNFINISHED, Backfills, runs_of
from caf_pipeline.automation.pod_size import pod_tags
from caf_pipeline.chunk_state import IN_GOOD_STANDING, UNDER_WAY, ChunkState
from caf_pipeline.dagster_host.code_location import CodeLocation, code_location
from caf_pipeline.dagster_host.home import dagster_home
from caf_pipeline.dagster_host.source_runs import open_instance
from caf_pipeline.dagster_host.summary import CHUNKS_FAILED, HELD_BY_OTHERS
from caf_pipeline.dagster_private import (
    BulkActionStatus,
    PartitionBackfill,
    RegisteredCodeLocationOrigin,
    RemotePartitionSetOrigin,
    RemoteRepositoryOrigin,
)
from caf_pipeline.defs.partitions import register_chunks
from caf_pipeline.errors import HeldByOther, NoDaemon, NotLocated, UsageError
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import chunk_of_lease
from caf_pipeline.naming import BACKFILL_TAG, PRIORITY_TAG, REPOSITORY_NAME, SOURCE_TAG, job_name
from caf_pipeline.records import Chunk
from caf_pipeline.settings import Settings
from caf_pipeline.source.protocol import UnavailableSource
from caf_pipeline.steps import chunk_steps
from caf_pipeline.system.quantities import counted, show_size
from caf_pipeline.waits import Work
from caf_pipeline.wiring import open_ledger, open_run_context

DAEMON: Final = "BACKFILL"

ENDED: Final = {"COMPLETED", "COMPLETED_SUCCESS", "COMPLETED_FAILED", "FAILED", "CANCELED"}
"""Statuses of a backfill that has ended, by the names in Dagster's API."""

LIVE_SECONDS: Final = 120.0
"""Age of the last heartbeat after which a daemon counts as dead; it sends one every 30 s."""

POLL_SECONDS: Final = 2.0
REPORT_SECONDS: Final = 15.0

BEGIN_SECONDS: Final = 60.0
"""Dagster's daemon looks for backfills every 30 s. It retries without end, and without an error in
the backfill, while the code location does not load.
"""

PAGE: Final = 200

LOW_PRIORITY: Final = "-1"
"""Below runs that a person starts in the UI (0)."""

_START_HINT: Final = (
    "start `dagster-daemon run -w workspace.yaml` (or `dg dev`) with DAGSTER_HOME={home}"
)


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects chunks with work to do.

    Attributes:
        plan: "" for any.
        first, last: chunks (inclusive); "" for no limit.
        failed: only failed and parked chunks.
    """

    plan: str = ""
    first: str = ""
    last: str = ""
    failed: bool = False


@dataclass
class SelectedChunks:
    """The selected chunks.

    Attributes:
        chunks: to be submitted, the oldest first.
        held: a run or another process works on them.
        backfills: chunks in unfinished backfills, by backfill.
        parked: number of chunks left out.
    """

    chunks: list[Chunk] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    backfills: dict[str, list[str]] = field(default_factory=dict)
    parked: int = 0


def backfill_command(
    source: str,
    *,
    settings: Settings,
    wanted: Mapping[str, Any],
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Submit and follow a backfill; return the exit status.

    If all selected chunks are in unfinished backfills, the backfill with most of them is followed.
    `wanted` has the fields of a `Selection`. On Ctrl-C the backfill goes on.

    Raises:
        NoDaemon: no daemon would execute the backfill; nothing was submitted.
        UsageError, NotLocated: see `select`.
    """
    settings.source(source)
    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    home = dagster_home(settings)
    if not home.is_dir():
        raise NoDaemon(
            f"no Dagster daemon runs here: there is no {home} yet",
            hint=_START_HINT.format(home=home),
        )

    location = code_location(settings, [source])

    def print_json(**summary: object) -> None:
        if json:
            sys.stdout.write(dump_json(summary) + "\n")
            sys.stdout.flush()

    with open_instance(settings) as instance, closing(open_ledger(settings)) as ledger:
        selected = select(instance, ledger, source, Selection(**wanted), location.keys)
        _print_left_out(console, selected, source)
        names = [chunk.name for chunk in selected.chunks]
        backfills = list(selected.backfills)
        if dry_run:
            print_json(backfill=None, chunks=names, held=selected.held, backfills=backfills)
            console.print(f"would submit {counted(len(names), 'chunk')}; nothing was changed")
            return 0
        if names or backfills:
            require_daemon(instance, settings)
        backfill_id = new_id()
        try:
            if names:
                names = _unpark(settings, ledger, selected.chunks)
                submit(settings, instance, ledger, source, names, backfill_id, location)
                console.print(
                    f"backfill {backfill_id} has {counted(len(names), 'chunk')} of {source}; "
                    "Dagster's daemon runs them"
                )
            elif backfills:
                backfill_id, names = max(
                    selected.backfills.items(), key=lambda backfill: len(backfill[1])
                )
                console.print(f"following backfill {backfill_id}")
            else:
                print_json(backfill=None, chunks=[], held=selected.held, backfills=[])
                return HELD_BY_OTHERS if selected.held else 0
            status = follow(instance, ledger, backfill_id, set(names), console)
        except KeyboardInterrupt:
            if instance.get_backfill(backfill_id):
                console.print(
                    f"backfill {backfill_id} goes on in Dagster's daemon; `caf backfill {source}` "
                    "follows it again"
                )
            raise
        other_states = [state for state in ChunkState if state not in IN_GOOD_STANDING]
        submitted = set(names)
        unfinished = [
            chunk for chunk in ledger.chunks.list(source, other_states) if chunk.name in submitted
        ]
        for chunk in unfinished:
            reason = f": {chunk.reason}" if chunk.reason else ""
            console.print(f"{chunk.name} is {chunk.state}{reason}")
        print_json(
            backfill=backfill_id,
            status=status,
            chunks=names,
            left=[chunk.name for chunk in unfinished],
        )
        done = len(names) - len(unfinished)
        console.print(
            f"backfill {backfill_id} ended ({status}): {done} of {counted(len(names), 'chunk')} "
            "done"
        )
        return CHUNKS_FAILED if unfinished else 0


def select(
    instance: DagsterInstance,
    ledger: Ledger,
    source: str,
    selection: Selection,
    keys: AssetKeys = DEFAULT_KEYS,
) -> SelectedChunks:
    """Select chunks with work to do.

    Raises:
        NotLocated: there is no such plan or chunk.
        UsageError: an end is of another source or plan, or the first is newer than the last.
    """
    if source not in ledger.lookup.sources():
        raise NotLocated(
            f"nothing of '{source}' is planned yet", hint=f"`caf run {source}` plans it"
        )
    plans = {plan.record.name for plan in ledger.plans.list(source)}
    if selection.plan and selection.plan not in plans:
        raise NotLocated(
            f"source '{source}' has no plan '{selection.plan}'",
            hint=f"`caf plans {source}` lists the plans",
        )

    def position(name: str) -> int | None:
        if not name:
            return None
        chunk = ledger.chunks.get(name)
        if chunk.source != source:
            raise UsageError(f"{name} is a chunk of source '{chunk.source}', not of '{source}'")
        if selection.plan and chunk.plan != selection.plan:
            raise UsageError(
                f"{name} is a chunk of plan {chunk.plan}, not of {selection.plan}",
                hint="leave --plan out, or name chunks of it",
            )
        return chunk.caf_file_id

    first, last = position(selection.first), position(selection.last)
    if first is not None and last is not None and first > last:
        raise UsageError(
            f"{selection.first} comes after {selection.last}", hint="--from names the older chunk"
        )
    chunks = sorted(
        (
            chunk
            for chunk in ledger.chunks.list(source, [*UNDER_WAY, ChunkState.PARKED])
            if (not selection.plan or chunk.plan == selection.plan)
            and (first is None or chunk.caf_file_id >= first)
            and (last is None or chunk.caf_file_id <= last)
        ),
        key=lambda chunk: chunk.caf_file_id,
    )
    selected, backfills = SelectedChunks(), Backfills(instance, keys)
    leased = {chunk_of_lease(lease.name) for lease in ledger.leases.list() if lease.live}
    for page in (chunks[start : start + PAGE] for start in range(0, len(chunks), PAGE)):
        runs = runs_of(instance, [chunk.name for chunk in page])
        for chunk in page:
            records = runs.get(chunk.name, [])
            statuses = [record.dagster_run.status for record in records]
            is_parked = chunk.state is ChunkState.PARKED
            if backfill := backfills.covering(chunk.source, chunk.name, records):
                selected.backfills.setdefault(backfill, []).append(chunk.name)
            elif chunk.name in leased or any(status in UNFINISHED for status in statuses):
                selected.held.append(chunk.name)
            elif is_parked and not selection.failed:
                selected.parked += 1
            elif not selection.failed or is_parked or statuses[:1] == [DagsterRunStatus.FAILURE]:
                selected.chunks.append(chunk)
    return selected


def _print_left_out(console: Console, selected: SelectedChunks, source: str) -> None:
    for backfill, names in selected.backfills.items():
        number = counted(len(names), "chunk")
        console.print(f"{number} left to backfill {backfill}, which is not finished")
    if selected.held:
        number = counted(len(selected.held), "chunk")
        console.print(f"{number} left out: runs are queued or work on them")
    if selected.parked:
        console.print(
            f"{counted(selected.parked, 'chunk')} left out as parked; `caf backfill {source} "
            "--failed` tries them again"
        )
    if not selected.chunks and not selected.backfills and not selected.held:
        console.print(f"nothing to submit: no selected chunk of {source} has work to do")


def new_id() -> str:
    """Return a backfill id in the UI's form."""
    return "".join(secrets.choice(string.ascii_lowercase) for _ in range(8))


def submit(  # noqa: PLR0917
    settings: Settings,
    instance: DagsterInstance,
    ledger: Ledger,
    source: str,
    names: Sequence[str],
    backfill_id: str,
    location: CodeLocation,
) -> None:
    """Create a backfill, which Dagster's daemon executes."""
    register_chunks(instance, ledger, source)
    submitted = set(names)
    sizes = [
        chunk.expected_size_bytes for chunk in ledger.chunks.list(source) if chunk.name in submitted
    ]
    repository = RemoteRepositoryOrigin(
        RegisteredCodeLocationOrigin(location.name), REPOSITORY_NAME
    )
    backfill = PartitionBackfill(
        backfill_id,
        BulkActionStatus.REQUESTED,
        from_failure=False,
        tags={
            SOURCE_TAG: source,
            PRIORITY_TAG: LOW_PRIORITY,
            **pod_tags(instance, settings, max(sizes, default=0)),
        },
        backfill_timestamp=time.time(),
        title=f"caf backfill {source}",
        partition_set_origin=RemotePartitionSetOrigin(
            repository_origin=repository,
            partition_set_name=f"{job_name(source, 'archive')}_partition_set",
        ),
        partition_names=list(names),
    )
    instance.add_backfill(backfill)


def follow(
    instance: DagsterInstance,
    ledger: Ledger,
    backfill_id: str,
    left: Collection[str],
    console: Console,
) -> str:
    """Print a backfill's progress; return its final status.

    `left` are its chunks that are not archived yet.
    """
    began, done_before, printed, printed_at = time.monotonic(), -1, "", 0.0
    lost = is_late = False
    run_statuses = {
        "well": [DagsterRunStatus.SUCCESS],
        "failed": [DagsterRunStatus.FAILURE],
        "canceled": [DagsterRunStatus.CANCELED],
        "going": UNFINISHED,
    }
    while True:
        backfill = instance.get_backfill(backfill_id)
        if backfill is None:
            raise NotLocated(f"Dagster has no backfill {backfill_id} any more")
        counts = {
            name: instance.get_runs_count(
                RunsFilter(tags={BACKFILL_TAG: backfill_id}, statuses=statuses)
            )
            for name, statuses in run_statuses.items()
        }
        done_before = counts["well"] if done_before < 0 else done_before
        done = counts["well"] - done_before
        work = Work.total(item.work for item in ledger.progress.live() if item.work.chunk in left)
        progress = describe_progress(
            counts, len(left) + done_before, done, time.monotonic() - began, work
        )
        line = f"backfill {backfill_id}: {progress}"
        ended = backfill.status.value in ENDED
        if line != printed and (ended or time.monotonic() - printed_at >= REPORT_SECONDS):
            console.print(line)
            printed, printed_at = line, time.monotonic()
        if ended:
            if backfill.error:
                console.print(f"Dagster could not run it: {backfill.error.message.strip()}")
            return backfill.status.value
        if lost is not (lost := not _daemon_lives(instance)):
            console.print(
                "Dagster's daemon has ended, or submits many runs; the backfill goes on when it "
                "answers again"
                if lost
                else "the daemon is back"
            )
        has_begun = any(counts.values()) or time.monotonic() - began < BEGIN_SECONDS
        if not has_begun and not lost and not is_late:
            is_late = True
            console.print(
                "Dagster's daemon has not begun the backfill; its log shows why, such as a code "
                "location that does not load"
            )
        time.sleep(POLL_SECONDS)


def describe_progress(
    counts: Mapping[str, int], total: int, done: int, seconds: float, work: Work
) -> str:
    """Describe a backfill with its rate and the time left.

    `counts` are numbers of runs: "well", "failed", "canceled" and "going". `done` chunks succeeded
    in the last `seconds`. `work` is that of the live runs.
    """
    well = min(counts["well"], total)
    ended = "".join(
        f", {counted(counts[how], 'run')} {how}" for how in ("failed", "canceled") if counts[how]
    )
    line = (
        f"runs of {well} of {counted(total, 'chunk')} succeeded{ended}, "
        f"{counted(counts['going'], 'run')} queued or under way"
    )
    if not work.is_empty:
        line += f" ({show_size(work.packed_bytes)} packed, {show_size(work.sent_bytes)} sent)"
    if not done or well == total or not counts["going"]:
        return line
    remaining = timedelta(seconds=round((total - well) * seconds / done))
    return f"{line}; {done / seconds * 60:.1f} per minute, about {remaining} left"


def _unpark(settings: Settings, ledger: Ledger, chunks: Sequence[Chunk]) -> list[str]:
    # Returns the names of all chunks that can be submitted.
    parked = {chunk.name for chunk in chunks if chunk.state is ChunkState.PARKED}
    if parked:
        objects = UnavailableSource("submitting a backfill does not read the bucket")
        context = open_run_context(
            settings, chunks[0].source, run="caf backfill", ledger=ledger, objects=objects
        )
        try:
            for name in sorted(parked):
                try:
                    chunk_steps.unpark(context, name)
                except HeldByOther:
                    continue
                parked.remove(name)
        finally:
            context.close()
    return [chunk.name for chunk in chunks if chunk.name not in parked]


def require_daemon(instance: DagsterInstance, settings: Settings) -> None:
    """Raise NoDaemon if no daemon would execute a backfill."""
    if not _daemon_lives(instance):
        home = dagster_home(settings)
        raise NoDaemon(
            f"no Dagster daemon serves {home}, so a backfill would not start",
            hint=_START_HINT.format(home=home),
        )


def _daemon_lives(instance: DagsterInstance) -> bool:
    heartbeat = instance.get_daemon_heartbeats().get(DAEMON)
    # Clocks of two machines may differ a little. A time far ahead was written by a wrong clock.
    return heartbeat is not None and abs(time.time() - heartbeat.timestamp) < LIVE_SECONDS
