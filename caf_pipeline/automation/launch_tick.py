"""One tick of the sensor that launches chunks, and the same for a source that a run has planned."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from dagster import RunRequest, SensorResult, SkipReason

from caf_pipeline.asset_keys import AssetKeys
from caf_pipeline.automation.launching import (
    PAGE,
    Backfills,
    ChunkSelection,
    audits_due,
    end_unsubmitted_runs,
    give_up_lost_retries,
    select_chunks,
)
from caf_pipeline.automation.pod_size import pod_tags
from caf_pipeline.automation.tick import TickContext, TickResult, ask_in_time, pause_reason
from caf_pipeline.chunk_state import BEGUN_NOT_POSTED, NOT_POSTED
from caf_pipeline.errors import (
    HITS_EVERY_CHUNK,
    ChunkTooLarge,
    HeldByOther,
    NoProvider,
    NotPublic,
    PlanTooSmall,
    StoreUnreachable,
    with_hint,
)
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import LaunchableChunk
from caf_pipeline.naming import BEFORE_BACKFILLS, job_name, partitions_name
from caf_pipeline.run_context import RunContext, address_of
from caf_pipeline.settings import Settings
from caf_pipeline.store.protocol import ChunkStore
from caf_pipeline.system.deadline import Deadline, Overdue
from caf_pipeline.system.quantities import counted

MIN_TIME_LEFT: Final = 0.5
"""Share of the deadline below which a tick reads no further page or source. The next tick does."""

MAX_LAUNCHED: Final = 100
"""Runs per tick. Dagster's daemon creates some ten per second."""

MAX_PARKED: Final = 20
"""Chunks parked per tick, each in a few statements."""

MAX_STORE_REQUESTS: Final = 3
"""Each time for smaller chunks."""

T = TypeVar("T")


@dataclass(frozen=True)
class LaunchCursor:
    """The position at which the next tick continues, at `source`; empty: at the beginning.

    `after` has, by source, the `caf_file_id` of the last chunk that was read.
    """

    after: Mapping[str, int] = field(default_factory=dict)
    source: str = ""

    @classmethod
    def read(cls, written: str | None) -> "LaunchCursor":
        """An invalid cursor is empty."""
        try:
            cursor = json.loads(written or "{}")
            after = {source: int(caf_file_id) for source, caf_file_id in cursor["after"].items()}
            valid = {source: number for source, number in after.items() if 0 <= number < 2**63}
            return cls(valid, str(cursor["source"]))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return cls()

    def written(self) -> str:
        return json.dumps({"after": self.after, "source": self.source})


@dataclass
class LaunchTick:
    """One tick of the sensor; `notes` are about chunks and sources that are held back."""

    context: TickContext
    settings: Settings
    deadline: Deadline
    keys: AssetKeys
    notes: list[str] = field(default_factory=list)

    def requests_of(self, source: str) -> list[RunRequest]:
        """Return runs of this source's chunks that `result` would request. Raises Overdue."""
        ledger: Ledger = self._ask_ledger(self.context.resources.caf_ledger.get)
        if self._ask_ledger(partial(pause_reason, ledger)):
            return []
        if source not in self._launched_sources(ledger):
            return []
        page = self._ask_ledger(lambda: ledger.launchable.chunks({source: 0}, PAGE))
        backfills = Backfills(self.context.instance, self.keys)
        selections, _ = self._select({source: page} if page else {}, backfills, source)
        return self._requests(ledger, selections.values())

    def result(self, cursor_written: str | None) -> TickResult:
        """Launch, park and audit what is due. Raises Overdue if the ledger is late."""
        instance = self.context.instance
        ledger: Ledger = self._ask_ledger(self.context.resources.caf_ledger.get)
        if paused := self._ask_ledger(partial(pause_reason, ledger)):
            return SkipReason(paused)
        backfills = Backfills(instance, self.keys)
        give_up_lost_retries(instance, backfills.ids, self.settings.sources, self.keys)
        end_unsubmitted_runs(instance, self.settings.sources)
        cursor, sources = LaunchCursor.read(cursor_written), self._launched_sources(ledger)
        after = {source: cursor.after.get(source, 0) for source in sources}
        pages: defaultdict[str, list[LaunchableChunk]] = defaultdict(list)
        for chunk in self._ask_ledger(lambda: ledger.launchable.chunks(after, PAGE)):
            pages[chunk.source].append(chunk)
        selections, next_source = self._select(pages, backfills, cursor.source)
        next_after = {
            source: selections[source].next_after if source in selections else after[source]
            for source in pages
        }
        parked = self._park(
            [chunk for selection in selections.values() for chunk in selection.give_up]
        )
        audits = []
        if idle := [source for source in sources if source not in pages and not after[source]]:
            located = self._ask_ledger(partial(ledger.launchable.last_located, idle))
            audits = [
                RunRequest(job_name=job_name(source, "audit"))
                for source in audits_due(instance, idle, located, self.keys)
            ]
        # The store comes last: if it hangs, no time is left.
        requests = self._requests(ledger, selections.values()) + audits
        written = LaunchCursor(
            {source: number for source, number in next_after.items() if number}, next_source
        ).written()
        if requests:
            for note in self.notes:
                self.context.log.warning(note)
            return SensorResult(requests, cursor=written)
        active = sum(selection.active for selection in selections.values())
        waiting = sum(selection.waiting for selection in selections.values())
        counts = f"{active} under way, {waiting} waiting, {parked} parked now, none to launch."
        return SensorResult(skip_reason=" ".join([counts, *self.notes]), cursor=written)

    def _requests(self, ledger: Ledger, selections: Iterable[ChunkSelection]) -> list[RunRequest]:
        selections, instance = list(selections), self.context.instance
        run_keys: dict[str, str | None] = {}
        for selection in selections:
            run_keys |= selection.run_keys
        launch = self._admitted(
            ledger, [chunk for selection in selections for chunk in selection.launch]
        )
        # The run of a plan adds partitions, but may have been killed before.
        names: defaultdict[str, list[str]] = defaultdict(list)
        for chunk in launch:
            names[chunk.source].append(chunk.name)
        for source, source_names in names.items():
            instance.add_dynamic_partitions(partitions_name(source), source_names)
        return [
            RunRequest(
                run_key=run_keys[chunk.name],
                job_name=job_name(chunk.source, "archive"),
                partition_key=chunk.name,
                tags={**BEFORE_BACKFILLS, **pod_tags(instance, self.settings, chunk.size_bytes)},
            )
            for chunk in launch
        ]

    def _open(self, source: str) -> RunContext:
        run_context: RunContext = self.context.resources.caf_run.open(self.context, source)
        return run_context

    def _ask_ledger(self, question: Callable[[], T]) -> T:
        from caf_pipeline.ledger.database import describe_database

        return ask_in_time(self.context, self.deadline, describe_database(self.settings), question)

    def _launched_sources(self, ledger: Ledger) -> list[str]:
        # If no source is automatic, the sensor is off by default, so an operator has switched it
        # on for all sources.
        automatic = sorted(
            name for name, source in self.settings.sources.items() if source.automatic
        )
        others = sorted(self.settings.sources.keys() - automatic)
        if not automatic or not others:
            return automatic or others
        waiting = self._ask_ledger(lambda: ledger.launchable.chunks(dict.fromkeys(others, 0), 1))
        self.notes += [
            f"Source '{source}' has chunks to archive and is left out: set automatic = true in "
            f"[sources.{source}]."
            for source in sorted({chunk.source for chunk in waiting})
        ]
        return automatic

    def _select(
        self, pages: Mapping[str, Sequence[LaunchableChunk]], backfills: Backfills, first: str
    ) -> tuple[dict[str, ChunkSelection], str]:
        # Begins with the source `first`. The second result is the source to begin with in the next
        # tick; "" for any.
        selections: dict[str, ChunkSelection] = {}
        for source in sorted(pages, key=lambda name: (name < first, name)):
            if self.deadline.left() < self.deadline.seconds * MIN_TIME_LEFT:
                return selections, source
            address = address_of(self.settings.sources[source])
            recorded = pages[source][0].address
            if address != recorded:
                self.notes.append(
                    f"Source '{source}' is left out: its address is {recorded} in the ledger, but "
                    f"{address} in the settings."
                )
            else:
                selections[source] = select_chunks(
                    self.context.instance, source, pages[source], backfills, self.settings.runs
                )
        return selections, ""

    def _park(self, failed: Sequence[LaunchableChunk]) -> int:
        from caf_pipeline.steps import chunk_steps

        parked = 0
        for chunk in failed[:MAX_PARKED]:

            def park(chunk: LaunchableChunk = chunk) -> None:
                run_context = self._open(chunk.source)
                why = run_context.ledger.chunks.get(chunk.name).reason
                reason = f"its runs failed too often, the last one was {chunk.failures[-1]}"
                reason += f"; {why}" if why else ""
                chunk_steps.park(run_context, chunk.name, reason)

            try:
                self._ask_ledger(park)
            except HeldByOther:
                continue
            parked += 1
        return parked

    def _admitted(
        self, ledger: Ledger, selected: Sequence[LaunchableChunk]
    ) -> Sequence[LaunchableChunk]:
        # Returns the chunks to launch now, the oldest first. Asks here what the store would refuse
        # to every chunk. Otherwise all chunks would be launched and fail because, for example, a
        # wallet is empty.
        from caf_pipeline.steps import chunk_steps

        launch = sorted(selected, key=lambda chunk: chunk.caf_file_id)
        launch = [chunk for chunk in launch if self._may_be_stored(chunk.source)]
        unposted = [chunk for chunk in launch if chunk.state in NOT_POSTED]
        if unposted:
            names = {chunk.name for chunk in unposted}
            waiting = self._ask_ledger(
                partial(chunk_steps.one_copy_bytes, ledger, BEGUN_NOT_POSTED, beside=names)
            )
            store_name = f"the folder {self.settings.store.folder}"
            if self.settings.store.kind == "jackal":
                lcd = ", ".join(self.settings.jackal.lcd)
                store_name = f"the chain at {lcd}, or a provider that it lists,"

            def ask_store() -> tuple[set[str], str]:
                store = self._open(unposted[0].source).store
                return refused_chunks(store, unposted, waiting_bytes=waiting)

            try:
                refused, reason = ask_in_time(self.context, self.deadline, store_name, ask_store)
            except (Overdue, StoreUnreachable) as error:
                self.notes.append(
                    f"No chunk is launched: {with_hint(error)}. The next tick tries again."
                )
                return []
            if refused:
                self.notes.append(reason)
            launch = [chunk for chunk in launch if chunk.name not in refused]
        return self._with_room_in_staging(ledger, launch)[:MAX_LAUNCHED]

    def _may_be_stored(self, source: str) -> bool:
        from caf_pipeline.encryption.identities import require_recipients

        try:
            require_recipients(self.settings, source)
        except NotPublic as error:
            note = f"{with_hint(error)}."
            if note not in self.notes:
                self.notes.append(note)
            return False
        return True

    def _with_room_in_staging(
        self, ledger: Ledger, launch: Sequence[LaunchableChunk]
    ) -> Sequence[LaunchableChunk]:
        # Keeps chunks that have reserved their room, and those that fit beside the reservations;
        # see `Staging.reserve`.
        limit = self.settings.packing.staging_limit
        if not limit:
            return launch
        folder = str(self.settings.staging_folder)
        reserved = {
            reservation.chunk: reservation.size_bytes
            for reservation in self._ask_ledger(ledger.staging.list)
            if reservation.folder == folder
        }
        used = sum(reserved.values())
        new = [
            chunk for chunk in launch if chunk.name not in reserved and chunk.state in NOT_POSTED
        ]
        left_out = {chunk.name for chunk in new} - {
            chunk.name for chunk in _first_fitting(new, limit - used)
        }
        if left_out:
            self.notes.append(
                f"{counted(len(left_out), 'chunk')} left out until staging has room: "
                f"packing.staging_limit is {limit} bytes, of which {used} are reserved."
            )
        return [chunk for chunk in launch if chunk.name not in left_out]


def refused_chunks(
    store: ChunkStore, unposted: Sequence[LaunchableChunk], *, waiting_bytes: int
) -> tuple[set[str], str]:
    """Return the names of the chunks that the store has no room for now, and the reason.

    The first chunks that fit are accepted, and any that never fits: its own run withdraws it.
    `waiting_bytes` is the size of other chunks that will be stored.

    Raises:
        StoreUnreachable: the store does not answer.
        CafError: an operator must act.
    """
    accepted, too_large, reason = list(unposted), set[str](), ""
    for _ in range(MAX_STORE_REQUESTS):
        if not accepted:
            break
        largest = max(chunk.size_bytes for chunk in accepted)
        others = sum(chunk.size_bytes for chunk in accepted) - largest
        try:
            store.admit(stored_size_bytes=largest, waiting_bytes=waiting_bytes + others)
            break
        except ChunkTooLarge as error:
            fitting = min(error.fitting_bytes, largest - 1)
            too_large |= {chunk.name for chunk in accepted if chunk.size_bytes > fitting}
            accepted = [chunk for chunk in accepted if chunk.size_bytes <= fitting]
        except PlanTooSmall as error:
            reason, room = f"{with_hint(error)}.", error.fitting_bytes - waiting_bytes
            accepted = _first_fitting(accepted, min(room, largest + others - 1))
        except (*HITS_EVERY_CHUNK, NoProvider) as error:
            reason, accepted = f"{with_hint(error)}.", []
    else:
        accepted = []
    names = {chunk.name for chunk in unposted} - {chunk.name for chunk in accepted} - too_large
    return names, reason


def _first_fitting(chunks: Iterable[LaunchableChunk], room: int) -> list[LaunchableChunk]:
    # A chunk that does not fit leaves its room to smaller chunks after it.
    fitting = []
    for chunk in chunks:
        if chunk.size_bytes <= room:
            fitting.append(chunk)
            room -= chunk.size_bytes
    return fitting
