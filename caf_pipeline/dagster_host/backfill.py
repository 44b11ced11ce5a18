"""`caf backfill`: chunks under way as one asset backfill of Dagster's, which its daemon submits,
and what becomes of it.

The command asks for the backfill in one write and then only looks on: ended at any moment it
changes nothing, and the daemon goes on. Source: "Backfills" in Dagster's documentation;
`PartitionBackfill` is what its UI makes of the same request.
"""

import secrets
import string
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from json import dumps as dump_json
from typing import Any, Final

from dagster import AssetKey, DagsterInstance, DagsterRunStatus, RunsFilter
from rich.console import Console

from caf_pipeline.automation.launching import UNFINISHED, Backfills, failed_runs, runs_of
from caf_pipeline.automation.pod_size import pod_tags
from caf_pipeline.chunk_state import IN_GOOD_STANDING, UNDER_WAY, ChunkState
from caf_pipeline.dagster_host.dagster_private import (
    BULK_ACTION_TERMINAL_STATUSES,
    PartitionBackfill,
)
from caf_pipeline.dagster_host.home import dagster_home
from caf_pipeline.dagster_host.source_runs import open_instance
from caf_pipeline.dagster_host.summary import CHUNKS_FAILED, HELD_BY_OTHERS
from caf_pipeline.defs.build import build_defs
from caf_pipeline.defs.naming import ASSETS, BACKFILL_TAG, PRIORITY_TAG, SOURCE_TAG, asset_key
from caf_pipeline.defs.partitions import register_chunks
from caf_pipeline.errors import HeldByOther, NoDaemon, NotLocated, UsageError
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import Chunk, chunk_of_lease
from caf_pipeline.run_wiring import open_ledger, open_run_context
from caf_pipeline.settings import Settings
from caf_pipeline.source.protocol import UnavailableSource
from caf_pipeline.steps import chunk_steps
from caf_pipeline.system.quantities import counted

DAEMON: Final = "BACKFILL"
"""What the part of Dagster's daemon that submits backfills calls itself in its heartbeats."""

LIVE_SECONDS: Final = 120.0
"""A daemon whose last heartbeat is older counts as ended; it sends one every 30 s."""

LOOK_SECONDS: Final = 2.0
SAY_SECONDS: Final = 15.0
"""How often the command looks, and how often it says what it sees, where that has changed."""

PAGE: Final = 200
"""Chunks whose runs are read at once."""

BEHIND_NEW_RUNS: Final = "-1"
"""The priority of a backfill's runs: a chunk's run that a person begins in the UI has 0; see
`BEFORE_BACKFILLS`.
"""

_RUNNING: Final = (
    "it begins with `dagster-daemon run -w workspace.yaml` (or `dg dev`) and DAGSTER_HOME={home}"
)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which chunks are asked for: of a plan, from one to another, both included, or only those that
    failed; "" for any.
    """

    plan: str = ""
    first: str = ""
    last: str = ""
    failed: bool = False


@dataclass
class Chosen:
    """What is to be submitted, and what is not.

    Attributes:
        chunks: to be submitted, the oldest first.
        held: chunks that a run or another process works on.
        backfills: unfinished backfills that have chunks of these, with these.
        parked: chunks that are left out since an operator is to look at them.
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
    """Submit a backfill of the chunks that are wanted (`Selection`) and follow it to its end;
    return the exit status.

    Where all of them are in an unfinished backfill already, that one is followed.

    Raises: NoDaemon: nothing was submitted, since nothing would begin. UsageError, NotLocated: of
        the selection. KeyboardInterrupt: the backfill goes on.
    """
    settings.source(source)
    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    _require_daemon_home(settings)
    with open_instance(settings) as instance, closing(open_ledger(settings)) as ledger:
        chosen = choose(instance, ledger, source, Selection(**wanted))
        for line in _said_of(chosen, source):
            console.print(line)
        names = [chunk.name for chunk in chosen.chunks]
        if dry_run:
            _print(
                json,
                {
                    "backfill": None,
                    "chunks": names,
                    "held": chosen.held,
                    "backfills": list(chosen.backfills),
                },
            )
            console.print(f"would submit {counted(len(names), 'chunk')}; nothing was changed")
            return 0
        if names or chosen.backfills:
            require_daemon(instance, settings)
        backfill_id = new_id()
        try:
            if names:
                names = _unparked(settings, ledger, chosen.chunks)
                submit(settings, instance, ledger, source, names, backfill_id)
                console.print(
                    f"backfill {backfill_id} has {counted(len(names), 'chunk')} of {source}; "
                    "Dagster's daemon runs them"
                )
            elif chosen.backfills:
                backfill_id, names = max(chosen.backfills.items(), key=lambda one: len(one[1]))
                console.print(f"following backfill {backfill_id}")
            else:
                _print(json, {"backfill": None, "chunks": [], "held": chosen.held, "backfills": []})
                return HELD_BY_OTHERS if chosen.held else 0
            status = follow(instance, backfill_id, len(names), console)
        except KeyboardInterrupt:
            if instance.get_backfill(backfill_id):
                console.print(
                    f"backfill {backfill_id} goes on in Dagster's daemon; `caf backfill {source}` "
                    "follows it again"
                )
            raise
        left = _not_archived(ledger, source, names)
        for chunk in left:
            console.print(
                f"{chunk.name} is {chunk.state}{f': {chunk.reason}' if chunk.reason else ''}"
            )
        _print(
            json,
            {
                "backfill": backfill_id,
                "status": status,
                "chunks": names,
                "left": [chunk.name for chunk in left],
            },
        )
        done = len(names) - len(left)
        console.print(
            f"backfill {backfill_id} ended ({status}): {done} of {counted(len(names), 'chunk')} "
            "done"
        )
        return CHUNKS_FAILED if left else 0


def choose(instance: DagsterInstance, ledger: Ledger, source: str, wanted: Selection) -> Chosen:
    """Return the chunks of the source that are wanted and that nothing works on.

    Raises: NotLocated: there is no such plan or chunk. UsageError: an end is of another source or
        plan, or the ends are the wrong way
            round.
    """
    if source not in ledger.lookup.sources():
        raise NotLocated(
            f"nothing of '{source}' is planned yet", hint=f"`caf run {source}` plans it"
        )
    if wanted.plan and not any(one.record.name == wanted.plan for one in ledger.plans.list(source)):
        raise NotLocated(
            f"source '{source}' has no plan '{wanted.plan}'",
            hint=f"`caf plans {source}` lists them",
        )
    first, last = (
        _position(ledger, source, name, wanted.plan) for name in (wanted.first, wanted.last)
    )
    if first is not None and last is not None and first > last:
        raise UsageError(
            f"{wanted.first} comes after {wanted.last}", hint="--from names the older one"
        )
    within = [
        chunk
        for chunk in sorted(
            ledger.chunks.list(source, [*UNDER_WAY, ChunkState.PARKED]),
            key=lambda chunk: chunk.caf_file_id,
        )
        if (not wanted.plan or chunk.plan == wanted.plan)
        and (first is None or chunk.caf_file_id >= first)
        and (last is None or chunk.caf_file_id <= last)
    ]
    return _free(instance, ledger, within, failed=wanted.failed)


def _position(ledger: Ledger, source: str, name: str, plan: str) -> int | None:
    if not name:
        return None
    chunk = ledger.chunks.get(name)
    if chunk.source != source:
        raise UsageError(f"{name} is a chunk of source '{chunk.source}', not of '{source}'")
    if plan and chunk.plan != plan:
        raise UsageError(
            f"{name} is a chunk of plan {chunk.plan}, not of {plan}",
            hint="leave --plan out, or name chunks of it",
        )
    return chunk.caf_file_id


def _free(
    instance: DagsterInstance, ledger: Ledger, chunks: Sequence[Chunk], *, failed: bool
) -> Chosen:
    """Put each chunk where it belongs."""
    chosen, backfills = Chosen(), Backfills(instance)
    leased = {chunk_of_lease(lease.name) for lease in ledger.leases.list() if lease.live}
    for page in (chunks[start : start + PAGE] for start in range(0, len(chunks), PAGE)):
        runs = runs_of(instance, [chunk.name for chunk in page])
        for chunk in page:
            its = runs.get(chunk.name, [])
            if backfill := backfills.having(chunk.source, chunk.name, its):
                chosen.backfills.setdefault(backfill, []).append(chunk.name)
            elif chunk.name in leased or any(
                record.dagster_run.status in UNFINISHED for record in its
            ):
                chosen.held.append(chunk.name)
            elif chunk.state is ChunkState.PARKED and not failed:
                chosen.parked += 1
            elif not failed or chunk.state is ChunkState.PARKED or failed_runs(its):
                chosen.chunks.append(chunk)
    return chosen


def _said_of(chosen: Chosen, source: str) -> list[str]:
    said = [
        f"{counted(len(names), 'chunk')} left to backfill {backfill}, which is not finished"
        for backfill, names in chosen.backfills.items()
    ]
    if chosen.held:
        said.append(
            f"{counted(len(chosen.held), 'chunk')} left out: runs are queued or work on them"
        )
    if chosen.parked:
        said.append(
            f"{counted(chosen.parked, 'chunk')} left out as parked; `caf backfill {source} "
            "--failed` tries them again"
        )
    if not chosen.chunks and not chosen.backfills and not chosen.held:
        said.append(f"nothing to submit: no chunk of {source} that was asked for has work to do")
    return said


def new_id() -> str:
    """Return an id for a backfill, as the UI makes them."""
    return "".join(secrets.choice(string.ascii_lowercase) for _ in range(8))


def submit(  # noqa: PLR0917 - what it takes
    settings: Settings,
    instance: DagsterInstance,
    ledger: Ledger,
    source: str,
    names: Sequence[str],
    backfill_id: str,
) -> None:
    """Ask Dagster for a backfill of these chunks. The daemon submits the runs."""
    register_chunks(instance, ledger, source)
    wanted = set(names)
    largest = max(
        (chunk.expected_size_bytes for chunk in ledger.chunks.list(source) if chunk.name in wanted),
        default=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dagster calls a name of its own that it calls deprecated
        backfill = PartitionBackfill.from_asset_partitions(
            backfill_id,
            asset_graph=build_defs(settings).resolve_asset_graph(),
            partition_names=list(names),
            asset_selection=[AssetKey(asset_key(source, name)) for name in ASSETS[2:]],
            backfill_timestamp=time.time(),
            tags={
                SOURCE_TAG: source,
                PRIORITY_TAG: BEHIND_NEW_RUNS,
                **pod_tags(instance, settings, largest),
            },
            dynamic_partitions_store=instance,
            all_partitions=False,
            title=f"caf backfill {source}",
            description=None,
            run_config=None,
        )
    instance.add_backfill(backfill)


def follow(instance: DagsterInstance, backfill_id: str, left: int, console: Console) -> str:
    """Say how far a backfill is, of which so many chunks are left to do, until it has ended; return
    its status.
    """
    began, done_before, said, said_at, lost = time.monotonic(), -1, "", 0.0, False
    while True:
        backfill = instance.get_backfill(backfill_id)
        if backfill is None:
            raise NotLocated(f"Dagster has no backfill {backfill_id} any more")
        counts = _runs(instance, backfill_id)
        done_before = counts["well"] if done_before < 0 else done_before
        total = left + done_before
        line = (
            f"backfill {backfill_id}: "
            f"{_progress(counts, total, counts['well'] - done_before, time.monotonic() - began)}"
        )
        ended = backfill.status in BULK_ACTION_TERMINAL_STATUSES
        if line != said and (ended or time.monotonic() - said_at >= SAY_SECONDS):
            console.print(line)
            said, said_at = line, time.monotonic()
        if ended:
            return backfill.status.value
        if lost is not (lost := not _daemon_lives(instance)):
            console.print(
                "Dagster's daemon has ended; the backfill goes on when it runs again"
                if lost
                else "the daemon is back"
            )
        time.sleep(LOOK_SECONDS)


def _runs(instance: DagsterInstance, backfill_id: str) -> Mapping[str, int]:
    """Return how many runs of the backfill ended well, failed, were canceled, and are under way."""
    states = {
        "well": [DagsterRunStatus.SUCCESS],
        "failed": [DagsterRunStatus.FAILURE],
        "canceled": [DagsterRunStatus.CANCELED],
        "going": UNFINISHED,
    }
    return {
        name: instance.get_runs_count(
            RunsFilter(tags={BACKFILL_TAG: backfill_id}, statuses=statuses)
        )
        for name, statuses in states.items()
    }


def _progress(counts: Mapping[str, int], total: int, done: int, seconds: float) -> str:
    """Say how many chunks have a run that ended well, the rate of those `done` in so many seconds,
    and the time left by it.
    """
    well = min(counts["well"], total)
    ended = "".join(
        f", {counted(counts[how], 'run')} {how}" for how in ("failed", "canceled") if counts[how]
    )
    said = (
        f"runs of {well} of {counted(total, 'chunk')} ended well{ended}, "
        f"{counted(counts['going'], 'run')} queued or going"
    )
    if not done or well == total or not counts["going"]:
        return said
    left = (total - well) * seconds / done
    return (
        f"{said}; {done / seconds * 60:.1f} a minute, about {timedelta(seconds=round(left))} left"
    )


def _not_archived(ledger: Ledger, source: str, names: Sequence[str]) -> list[Chunk]:
    """Return those of the chunks that are not archived: they have work to do still, are parked, or
    were given up meanwhile.
    """
    wanted, others = set(names), [state for state in ChunkState if state not in IN_GOOD_STANDING]
    return [chunk for chunk in ledger.chunks.list(source, others) if chunk.name in wanted]


def _unparked(settings: Settings, ledger: Ledger, chunks: Sequence[Chunk]) -> list[str]:
    """Send parked chunks on their way again; return the names of all that can be submitted."""
    parked = {chunk.name for chunk in chunks if chunk.state is ChunkState.PARKED}
    if parked:
        nothing = UnavailableSource("a backfill is only submitted")
        context = open_run_context(
            settings, chunks[0].source, run="caf backfill", ledger=ledger, objects=nothing
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


def _require_daemon_home(settings: Settings) -> None:
    """Raise where no Dagster ever kept anything here; nothing is made."""
    home = dagster_home(settings)
    if not home.is_dir():
        raise NoDaemon(
            f"no Dagster daemon runs here: there is no {home} yet", hint=_RUNNING.format(home=home)
        )


def require_daemon(instance: DagsterInstance, settings: Settings) -> None:
    """Raise where no daemon would submit a backfill."""
    if not _daemon_lives(instance):
        home = dagster_home(settings)
        raise NoDaemon(
            f"no Dagster daemon works on {home}, so that a backfill would not begin",
            hint=_RUNNING.format(home=home),
        )


def _daemon_lives(instance: DagsterInstance) -> bool:
    heartbeat = instance.get_daemon_heartbeats().get(DAEMON)
    # One that is ahead was written while a clock was wrong; those of two machines may differ a
    # little.
    return heartbeat is not None and abs(time.time() - heartbeat.timestamp) < LIVE_SECONDS


def _print(json: bool, summary: Mapping[str, object]) -> None:
    if json:
        sys.stdout.write(dump_json(summary) + "\n")
        sys.stdout.flush()
