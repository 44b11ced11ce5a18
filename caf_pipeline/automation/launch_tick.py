"""One tick of the sensor that launches chunks: what it asks of ledger, Dagster and store, and what
it does with the answers.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from dagster import RunRecord, RunRequest, SensorEvaluationContext, SensorResult, SkipReason

from caf_pipeline.automation.launching import (
    PAGE,
    Backfills,
    Choice,
    audits_due,
    choose_chunks,
    end_unsubmitted_runs,
    give_up_lost_retries,
)
from caf_pipeline.automation.pod_size import pod_tags
from caf_pipeline.automation.tick import TickResult, ask_in_time, pause_reason
from caf_pipeline.chunk_state import BEGUN_NOT_POSTED, NOT_POSTED
from caf_pipeline.defs.naming import BEFORE_BACKFILLS, PARKED_TAG, job_name, partitions_name
from caf_pipeline.errors import (
    HITS_EVERY_CHUNK,
    ChunkTooLarge,
    HeldByOther,
    NoProvider,
    PlanTooSmall,
    StoreUnreachable,
    with_hint,
)
from caf_pipeline.ledger.database import describe_database
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import LaunchableChunk
from caf_pipeline.run_context import RunContext, address_of
from caf_pipeline.settings import Settings
from caf_pipeline.steps import chunk_steps
from caf_pipeline.store.protocol import ChunkStore
from caf_pipeline.system.deadline import Deadline, Overdue
from caf_pipeline.system.quantities import counted

ENOUGH: Final = 0.5
"""Of the deadline that is left: below it a look goes on with no further page and no further source,
and the next one does.
"""

MOST_LAUNCHED: Final = 100
"""Runs that one look asks for; Dagster's daemon makes some ten a second of them."""

MOST_PARKED: Final = 20
"""Chunks that one look parks; each is a few statements."""

MOST_ASKED: Final = 3
"""How often one look asks the store, each time for smaller chunks."""

T = TypeVar("T")


@dataclass(frozen=True)
class LaunchCursor:
    """Where the next look goes on: after which chunk of a source, and with which source; empty
    where nothing was left.

    One that was written by hand and is none is empty, too.
    """

    after: Mapping[str, int] = field(default_factory=dict)
    source: str = ""

    @classmethod
    def read(cls, written: str | None) -> "LaunchCursor":
        """Return the cursor of the tick before."""
        try:
            said = json.loads(written or "{}")
            after = {source: int(at) for source, at in said["after"].items()}
            return cls(
                {source: at for source, at in after.items() if 0 <= at < 2**63}, str(said["source"])
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return cls()

    def written(self) -> str:
        """Return the cursor for the next tick."""
        return json.dumps({"after": self.after, "source": self.source})


@dataclass
class LaunchTick:
    """One tick.

    Attributes:
        context: Dagster's.
        settings: all.
        deadline: for all questions to servers.
        notes: sentences on what is held back.
    """

    context: SensorEvaluationContext
    settings: Settings
    deadline: Deadline
    notes: list[str] = field(default_factory=list)

    def result(self) -> TickResult:
        """Launch, park and audit what is due.

        Raises:
            Overdue: the ledger did not answer in time.
        """
        ledger: Ledger = self._of_ledger(self.context.resources.ledger.get)
        if paused := self._of_ledger(partial(pause_reason, ledger)):
            return SkipReason(paused)
        backfills = Backfills(self.context.instance)
        give_up_lost_retries(self.context.instance, backfills.ids, self.settings.sources)
        end_unsubmitted_runs(self.context.instance, self.settings.sources)
        cursor, sources = LaunchCursor.read(self.context.cursor), self._launched_sources(ledger)
        after = {source: cursor.after.get(source, 0) for source in sources}
        pages: defaultdict[str, list[LaunchableChunk]] = defaultdict(list)
        for chunk in self._of_ledger(lambda: ledger.launchable.chunks(after, PAGE)):
            pages[chunk.source].append(chunk)
        choices, next_source = self._choices(pages, backfills, cursor.source)
        next_after = {
            source: choices[source].next_after if source in choices else after[source]
            for source in pages
        }
        parked = self._park([one for choice in choices.values() for one in choice.give_up])
        audits = self._audits(
            ledger, [source for source in sources if source not in pages and not after[source]]
        )
        # The store comes last: where it hangs, nothing is left of the deadline.
        launch = self._admitted(
            ledger, [chunk for choice in choices.values() for chunk in choice.launch]
        )
        self._register(launch)
        requests = [self._request(chunk) for chunk in launch] + audits
        written = LaunchCursor(
            {source: at for source, at in next_after.items() if at}, next_source
        ).written()
        if requests:
            for note in self.notes:
                self.context.log.warning(note)
            return SensorResult(requests, cursor=written)
        counts = _counts(choices.values(), parked)
        return SensorResult(skip_reason=" ".join([counts, *self.notes]), cursor=written)

    def _work(self, source: str) -> RunContext:
        run_context: RunContext = self.context.resources.run.open(self.context, source)
        return run_context

    def _of_ledger(self, question: Callable[[], T]) -> T:
        return ask_in_time(self.context, self.deadline, describe_database(self.settings), question)

    def _launched_sources(self, ledger: Ledger) -> list[str]:
        """Return the names of the sources whose chunks are launched: the automatic sources.

        If no source is automatic, this sensor is off by default. Then an operator switched it on,
        for all sources.
        """
        automatic = sorted(
            name for name, source in self.settings.sources.items() if source.automatic
        )
        others = sorted(self.settings.sources.keys() - automatic)
        if not automatic:
            return others
        waiting = (
            self._of_ledger(lambda: ledger.launchable.chunks(dict.fromkeys(others, 0), 1))
            if others
            else ()
        )
        self.notes += [
            f"Source '{source}' has chunks to archive and is left out: set automatic = true in "
            f"[sources.{source}]."
            for source in sorted({chunk.source for chunk in waiting})
        ]
        return automatic

    def _choices(
        self, pages: Mapping[str, Sequence[LaunchableChunk]], backfills: Backfills, first: str
    ) -> tuple[dict[str, Choice], str]:
        """Return what is chosen of each source's page, from source `first` on, and with which the
        next look begins; "": any.
        """
        choices: dict[str, Choice] = {}
        for source in sorted(pages, key=lambda one: (one < first, one)):
            if self.deadline.left() < self.deadline.seconds * ENOUGH:
                return choices, source
            address, known = address_of(self.settings.sources[source]), pages[source][0].address
            if address != known:
                self.notes.append(
                    f"Source '{source}' is left out: it is {known} in the ledger, and {address} in "
                    "the settings."
                )
            else:
                choices[source] = choose_chunks(
                    self.context.instance, source, pages[source], backfills, self.settings.runs
                )
        return choices, ""

    def _park(self, give_up: Sequence[tuple[LaunchableChunk, RunRecord]]) -> int:
        """Park chunks that failed too often; return how many."""
        parked = 0
        for chunk, last in give_up[:MOST_PARKED]:
            run_id = last.dagster_run.run_id
            try:
                self._of_ledger(
                    partial(
                        self._park_one,
                        chunk,
                        f"its runs failed too often, the last one was {run_id}",
                    )
                )
            except HeldByOther:
                continue
            # Failures before this one count no more once an operator has sent the chunk on its way
            # again.
            self.context.instance.add_run_tags(run_id, {PARKED_TAG: run_id})
            parked += 1
        return parked

    def _park_one(self, chunk: LaunchableChunk, reason: str) -> None:
        chunk_steps.park(self._work(chunk.source), chunk.name, reason)

    def _admitted(
        self, ledger: Ledger, chosen: Sequence[LaunchableChunk]
    ) -> Sequence[LaunchableChunk]:
        """Return those that are launched now, the oldest first.

        What the store would refuse of any chunk is asked here: else every chunk of the source would
        be launched and fail, one after the other, because a wallet was empty.
        """
        launch = sorted(chosen, key=lambda chunk: chunk.caf_file_id)
        for public in (True, False):
            unposted = [
                one
                for one in launch
                if one.state in NOT_POSTED and self.settings.sources[one.source].public is public
            ]
            if not unposted:
                continue
            names = {one.name for one in unposted}
            waiting = self._of_ledger(
                partial(chunk_steps.bytes_to_post, ledger, BEGUN_NOT_POSTED, beside=names)
            )
            try:
                refused, why = ask_in_time(
                    self.context,
                    self.deadline,
                    self._store(),
                    partial(self._refused, unposted, waiting, public=public),
                )
            except (Overdue, StoreUnreachable) as error:
                self.notes.append(
                    f"No chunk is launched: {with_hint(error)}. The next look asks again."
                )
                return []
            if refused:
                self.notes.append(why)
            launch = [one for one in launch if one.name not in refused]
        return self._with_room_in_staging(ledger, launch)[:MOST_LAUNCHED]

    def _with_room_in_staging(
        self, ledger: Ledger, launch: Sequence[LaunchableChunk]
    ) -> Sequence[LaunchableChunk]:
        """Return those that have their room in staging, or find it beside what is reserved; see
        `Staging.reserve`.
        """
        limit = self.settings.packing.staging_limit
        if not limit:
            return launch
        folder = str(self.settings.staging_folder)
        held = {
            one.chunk: one.size_bytes
            for one in self._of_ledger(ledger.staging.list)
            if one.folder == folder
        }
        new = [one for one in launch if one.name not in held and one.state in NOT_POSTED]
        fitting = _first_fitting(new, limit - sum(held.values()))
        if left_out := {one.name for one in new} - {one.name for one in fitting}:
            waiting, full = (
                counted(len(left_out), "chunk"),
                f"{limit} bytes, of which others hold {sum(held.values())}",
            )
            self.notes.append(
                f"{waiting} left out until staging has room: packing.staging_limit is {full}."
            )
        return [one for one in launch if one.name not in left_out]

    def _refused(
        self, unposted: Sequence[LaunchableChunk], waiting: int, *, public: bool
    ) -> tuple[set[str], str]:
        store = self._work(unposted[0].source).store
        return refused_chunks(store, unposted, public=public, waiting_bytes=waiting)

    def _store(self) -> str:
        """Return the store as it is named where it does not answer."""
        if self.settings.store.kind == "jackal":
            return (
                f"the chain at {', '.join(self.settings.jackal.lcd)}, or a provider that it lists,"
            )
        return f"the folder {self.settings.store.folder}"

    def _request(self, chunk: LaunchableChunk) -> RunRequest:
        tags = {
            **BEFORE_BACKFILLS,
            **pod_tags(self.context.instance, self.settings, chunk.size_bytes),
        }
        return RunRequest(
            job_name=job_name(chunk.source, "archive"), partition_key=chunk.name, tags=tags
        )

    def _register(self, chunks: Sequence[LaunchableChunk]) -> None:
        """See to it that Dagster knows these chunks.

        A plan's run adds them, but it may have been killed before that.
        """
        names: defaultdict[str, list[str]] = defaultdict(list)
        for chunk in chunks:
            names[chunk.source].append(chunk.name)
        for source, its in names.items():
            self.context.instance.add_dynamic_partitions(partitions_name(source), its)

    def _audits(self, ledger: Ledger, idle: Sequence[str]) -> list[RunRequest]:
        """Return the requests for the question whether sources without work are complete, where it
        is due.
        """
        if not idle:
            return []
        located = self._of_ledger(partial(ledger.launchable.last_located, idle))
        return [
            RunRequest(job_name=job_name(source, "audit"))
            for source in audits_due(self.context.instance, idle, located)
        ]


def refused_chunks(
    store: ChunkStore, unposted: Sequence[LaunchableChunk], *, public: bool, waiting_bytes: int
) -> tuple[set[str], str]:
    """Return the names of the chunks that the store would not take now, one beside the other, and
    why.

    Those that are too large for it are not among them: their own runs withdraw them.

    Args:
        store: where they go.
        unposted: the chunks; where there is no room for all, the first that fit go.
        public: of their sources.
        waiting_bytes: what other chunks will take.

    Raises:
        StoreUnreachable: it cannot be asked. CafError: what nobody but an operator can mend.
    """
    left, too_large, why = list(unposted), set[str](), ""
    for _ in range(MOST_ASKED):
        if not left:
            break
        largest = max(chunk.size_bytes for chunk in left)
        beside = waiting_bytes + sum(chunk.size_bytes for chunk in left) - largest
        try:
            store.admit(public=public, stored_size_bytes=largest, waiting_bytes=beside)
            break
        except ChunkTooLarge as error:
            fitting = min(error.fitting_bytes, largest - 1)
            too_large |= {chunk.name for chunk in left if chunk.size_bytes > fitting}
            left = [chunk for chunk in left if chunk.size_bytes <= fitting]
        except PlanTooSmall as error:
            why, room = f"{with_hint(error)}.", error.fitting_bytes - waiting_bytes
            left = _first_fitting(left, min(room, largest + beside - waiting_bytes - 1))
        except (*HITS_EVERY_CHUNK, NoProvider) as error:
            why, left = f"{with_hint(error)}.", []
    else:
        left = []
    return {chunk.name for chunk in unposted} - {chunk.name for chunk in left} - too_large, why


def _first_fitting(chunks: Iterable[LaunchableChunk], room: int) -> list[LaunchableChunk]:
    """Return the first that fit together; what does not lets smaller ones go."""
    fitting = []
    for chunk in chunks:
        if chunk.size_bytes <= room:
            fitting.append(chunk)
            room -= chunk.size_bytes
    return fitting


def _counts(choices: Iterable[Choice], parked: int) -> str:
    choices = list(choices)
    active, waiting = (
        sum(choice.active for choice in choices),
        sum(choice.waiting for choice in choices),
    )
    return f"{active} under way, {waiting} waiting, {parked} parked now, none to launch."
