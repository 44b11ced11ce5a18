"""Rows that runs share: staging folders, orders, progress, chunks to launch, and dead runs."""

import secrets
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Text, and_, any_, bindparam, case, delete, func, or_, select
from sqlalchemy.dialects.postgresql import ARRAY, insert

from caf_pipeline.chunk_state import CLAIMING, EVER_LOCATED, GOOD, MAY_BE_PENDING, ChunkState
from caf_pipeline.errors import CafError, StagingError, UsageError
from caf_pipeline.ledger.claims import end_claims, forget_pending
from caf_pipeline.ledger.engine import SOURCE_ID, LedgerPart
from caf_pipeline.ledger.moves import guarded, require_state
from caf_pipeline.ledger.records import (
    ChunkRows,
    ChunkSums,
    ForeignUse,
    LaunchableChunk,
    LiveWork,
    OperatorControls,
    Reservation,
    SourceProgress,
    chunk_lease,
)
from caf_pipeline.ledger.sql_files import query
from caf_pipeline.ledger.tables import (
    CAF_FILES,
    FILE_LOCATIONS,
    ORDERS,
    PACKING_SECRETS,
    REPLICAS,
    RUN_PROGRESS,
    SOURCES,
    STAGING_RESERVATIONS,
    TRANSACTIONS,
)
from caf_pipeline.ledger.transactions import UNSETTLED
from caf_pipeline.ledger.views import CHUNKS
from caf_pipeline.records import Lease, SignedTransaction
from caf_pipeline.system.processes import Holder, is_alive
from caf_pipeline.system.quantities import show_size
from caf_pipeline.waits import RENEW_SECONDS, Wait, Work

_OF_OTHERS: Final = (
    select(func.coalesce(func.sum(STAGING_RESERVATIONS.c.size_bytes), 0))
    .join_from(STAGING_RESERVATIONS, CAF_FILES)
    .where(
        STAGING_RESERVATIONS.c.folder == bindparam("folder"),
        CAF_FILES.c.caf_file_id != bindparam("caf_file_id"),
        CAF_FILES.c.state.in_(sorted(CLAIMING)),
    )
)
_ALL: Final = (
    select(
        CHUNKS.c.name.label("chunk"),
        CHUNKS.c.state,
        STAGING_RESERVATIONS.c.folder,
        STAGING_RESERVATIONS.c.size_bytes,
    )
    .join(CHUNKS, CHUNKS.c.caf_file_id == STAGING_RESERVATIONS.c.caf_file_id)
    .order_by(CHUNKS.c.name)
)
_INSERT: Final = insert(STAGING_RESERVATIONS)
_RESERVE: Final = _INSERT.on_conflict_do_update(
    index_elements=[STAGING_RESERVATIONS.c.caf_file_id],
    set_={"folder": _INSERT.excluded.folder, "size_bytes": _INSERT.excluded.size_bytes},
)
_RELEASE: Final = delete(STAGING_RESERVATIONS).where(
    STAGING_RESERVATIONS.c.caf_file_id == CAF_FILES.c.caf_file_id,
    CAF_FILES.c.name == bindparam("chunk"),
)
_NEW_SECRET: Final = insert(PACKING_SECRETS).on_conflict_do_nothing()
_SECRET: Final = select(PACKING_SECRETS.c.secret).where(
    PACKING_SECRETS.c.caf_file_id == bindparam("id")
)

SECRET_BYTES: Final = 32


class Staging(LedgerPart):
    """Reserves room in staging, and keeps the secrets of packings."""

    def reserve(
        self, lease: Lease, chunk: str, folder: str, size_bytes: int, limit_bytes: int
    ) -> None:
        """Reserve bytes for a chunk, replacing its earlier reservation.

        Raises StagingError if all reservations would exceed `limit_bytes` (0: no limit).
        """
        with self._engine.begin() as connection:
            # Two runs must not both take the last room. The lock ends with the transaction.
            connection.exec_driver_sql(
                "LOCK TABLE staging_reservations IN SHARE ROW EXCLUSIVE MODE"
            )
            caf_file_id = guarded(connection, lease, chunk)
            others = connection.execute(
                _OF_OTHERS, {"folder": folder, "caf_file_id": caf_file_id}
            ).scalar_one()
            if limit_bytes and others + size_bytes > limit_bytes:
                raise StagingError(
                    f"chunk {chunk} needs {show_size(size_bytes)} of {folder}, but other chunks "
                    f"hold {show_size(others)} of {show_size(limit_bytes)}",
                    hint="wait for other chunks to be archived, or raise packing.staging_limit",
                )
            connection.execute(
                _RESERVE, {"caf_file_id": caf_file_id, "folder": folder, "size_bytes": size_bytes}
            )

    def release(self, chunk: str) -> None:
        self._execute(_RELEASE, chunk=chunk)

    def packing_secret(self, lease: Lease, chunk: str) -> bytes:
        """Return the random secret of the chunk's packing, and make it first if there is none.

        All runs get the same secret, until the seal deletes it.
        """
        with self._engine.begin() as connection:
            states = (ChunkState.PACKING,)
            caf_file_id = require_state(connection, lease, chunk, states, "packed")
            made = {"caf_file_id": caf_file_id, "secret": secrets.token_bytes(SECRET_BYTES)}
            connection.execute(_NEW_SECRET, made)
            return bytes(connection.execute(_SECRET, {"id": caf_file_id}).scalar_one())

    def list(self) -> Sequence[Reservation]:
        return [
            Reservation(row.chunk, ChunkState(row.state), row.folder, row.size_bytes)
            for row in self._rows(_ALL)
        ]


_LEAST: Final = {"bandwidth": 0, "spend_cap": -1}

_MOST: Final = 10**18 - 1  # limit of the table

_SENDING: Final = [ChunkState.UPLOADING, ChunkState.DAMAGED]

_UNVERIFIED: Final = "unverified"  # a restored backup without a hash

_VALUE: Final = select(ORDERS.c.value).where(ORDERS.c.name == bindparam("name"))
_ORDER: Final = insert(ORDERS)
_GIVE: Final = _ORDER.on_conflict_do_update(
    index_elements=[ORDERS.c.name], set_={"value": _ORDER.excluded.value, "ordered_at": func.now()}
)


class Controls(LedgerPart):
    """Keeps the operator's orders: pause, bandwidth and spend cap.

    Runs obey them within seconds. Safe in threads.
    """

    def current(self) -> OperatorControls:
        (row,) = self._rows(query("operator_controls"), prefix=chunk_lease(""), states=_SENDING)
        orders = row.orders
        return OperatorControls(
            paused=orders.get("paused", "") or orders.get(_UNVERIFIED, ""),
            bandwidth=int(orders["bandwidth"]) if "bandwidth" in orders else None,
            spend_cap=int(orders["spend_cap"]) if "spend_cap" in orders else None,
            uploads=max(1, row.uploads),
        )

    def set(self, name: str, value: str | None) -> None:
        """Set "paused" (to the reason), "bandwidth" or "spend_cap". None removes the order."""
        if name != "paused" and name not in _LEAST:
            raise UsageError(f"'{name}' is not an order", hint=f"set paused, {', '.join(_LEAST)}")
        if value is None:
            if name == "paused" and (unverified := self.unverified()):
                raise CafError(
                    f"the pause cannot end yet: {unverified}",
                    hint="run 'caf doctor' for all sources: if it finds that the ledger fits the "
                    "store, the pause may end. Otherwise restore another backup, or set an empty "
                    "database and run 'caf rebuild'",
                )
            self._execute(delete(ORDERS).where(ORDERS.c.name == name))
            return
        if name == "paused":
            if not value.strip():
                raise UsageError("a pause needs a reason")
        else:
            try:
                number = int(value)
            except ValueError:
                number = _LEAST[name] - 1
            if not _LEAST[name] <= number <= _MOST:
                raise UsageError(
                    f"{name} cannot be '{value}'",
                    hint=f"give a whole number from {_LEAST[name]} up",
                )
            value = str(number)
        self._execute(_GIVE, name=name, value=value)

    def unverified(self) -> str:
        """Return why the restored ledger must be compared with the store first, or ""."""
        return str(self._scalar(_VALUE, name=_UNVERIFIED) or "")

    def accept(self) -> None:
        """Record that the restored ledger fits the store. The pause goes on."""
        self._execute(delete(ORDERS).where(ORDERS.c.name == _UNVERIFIED))


# A load of locations holds the row from its move on. Ids are never reused, so a missing row stays
# missing. The stored state suffices: a copy does not change whether a chunk claims or was located.
_CHUNK_STATE: Final = (
    select(CAF_FILES.c.state)
    .where(CAF_FILES.c.caf_file_id == bindparam("id"))
    .with_for_update(key_share=True)
)


class StrayRows(LedgerPart):
    """Finds and removes rows that no run needs. Safe at any time, and concurrently."""

    def unsettled(self) -> Sequence[SignedTransaction]:
        return [
            SignedTransaction(**row._asdict())
            for row in self._rows(
                UNSETTLED.order_by(TRANSACTIONS.c.account, TRANSACTIONS.c.sequence)
            )
        ]

    def by_chunk(self, source: str) -> Sequence[ChunkRows]:
        """Count a source's rows and claims by chunk, at one moment.

        Includes chunks without rows. An object in parts has one claim, which counts for each of its
        chunks.
        """
        # A constant shows the planner how small the source is.
        source_id = self._scalar(SOURCE_ID, name=source)
        rows = self._rows(query("rows_by_chunk"), source_id=source_id, claiming=sorted(CLAIMING))
        return [
            ChunkRows(**{**row._asdict(), "state": row.state and ChunkState(row.state)})
            for row in rows
        ]

    def claim_again(self, caf_file_id: int) -> bool:
        """Claim the objects of a sealed chunk; return whether all of them are claimed now.

        Objects that another chunk claims stay with that chunk.
        """
        with self._engine.begin() as connection:
            connection.exec_driver_sql(query("claim_pending"), {"id": caf_file_id})
            return bool(
                connection.exec_driver_sql(
                    query("claims_all"), {"id": caf_file_id}
                ).scalar_one_or_none()
            )

    def drop(self, caf_file_id: int) -> int:
        """Remove rows without a chunk or against its state; return their number.

        Locations that it has or had stay.
        """
        dropped = 0
        with self._engine.begin() as connection:
            state = connection.execute(_CHUNK_STATE, {"id": caf_file_id}).scalar_one_or_none()
            if state not in CLAIMING:
                dropped += end_claims(connection, caf_file_id)
            if state not in EVER_LOCATED:
                dropped += connection.execute(
                    delete(FILE_LOCATIONS).where(FILE_LOCATIONS.c.caf_file_id == caf_file_id)
                ).rowcount
            if state not in MAY_BE_PENDING:
                dropped += forget_pending(connection, caf_file_id)
        return dropped


_LAST_LOCATED: Final = select(
    SOURCES.c.name,
    select(func.max(CAF_FILES.c.located_at))
    .where(CAF_FILES.c.source_id == SOURCES.c.source_id)
    .scalar_subquery()
    .label("at"),
).where(SOURCES.c.name == any_(bindparam("sources", type_=ARRAY(Text))))


class LaunchableChunks(LedgerPart):
    """Finds chunks that need a run."""

    def chunks(self, after: Mapping[str, int], limit: int) -> Sequence[LaunchableChunk]:
        """Return chunks under way, oldest first, at most `limit` of each source.

        Each source's chunks begin after its `caf_file_id` in `after`. Up to `limit` chunks come
        before them whose run died after the last move, before it released staging.
        """
        values = {"sources": list(after), "limit": limit, "prefix": chunk_lease("")}
        unreleased = self._rows(query("unreleased_chunks"), **values)
        under_way = self._rows(query("launchable_chunks"), **values, after=list(after.values()))
        return [
            LaunchableChunk(**{**row._asdict(), "state": ChunkState(row.state)})
            for row in (*unreleased, *under_way)
        ]

    def last_located(self, sources: Sequence[str]) -> Mapping[str, datetime]:
        rows = self._rows(_LAST_LOCATED, sources=list(sources))
        return {row.name: row.at for row in rows if row.at is not None}


WINDOW_SECONDS: Final = 3600
"""A chunk of 30 GiB takes minutes. Yesterday's rate says little about now."""


_COPIES: Final = (
    select(
        SOURCES.c.name.label("source"),
        case(
            (REPLICAS.c.fault != "", "faulty"), (REPLICAS.c.listed, "listed"), else_="unlisted"
        ).label("status"),
        func.count().label("copies"),
    )
    .join_from(
        REPLICAS,
        CHUNKS,
        and_(REPLICAS.c.caf_file_id == CHUNKS.c.caf_file_id, REPLICAS.c.store == CHUNKS.c.store),
    )
    .join(SOURCES, CHUNKS.c.source_id == SOURCES.c.source_id)
    .where(
        SOURCES.c.name == any_(bindparam("sources", type_=ARRAY(Text))),
        CHUNKS.c.state == any_(bindparam("good", type_=ARRAY(Text))),
    )
    .group_by("source", "status")
)


_KEY: Final = [column.name for column in RUN_PROGRESS.primary_key]


_EXPIRES: Final = func.clock_timestamp() + timedelta(seconds=3 * RENEW_SECONDS)
"""Two renewals may fail in a row."""


_RECORD: Final = insert(RUN_PROGRESS).values(expires_at=_EXPIRES)


_REPLACE: Final = _RECORD.on_conflict_do_update(
    index_elements=_KEY,
    set_={name: value for name, value in _RECORD.excluded.items() if name not in _KEY},
)


# Removes rows of killed processes, too.
_REMOVE: Final = delete(RUN_PROGRESS).where(
    or_(
        and_(*(RUN_PROGRESS.c[name] == bindparam(name) for name in _KEY)),
        RUN_PROGRESS.c.expires_at < func.clock_timestamp() - timedelta(days=1),
    )
)


_LIVE: Final = (
    select(RUN_PROGRESS)
    .where(RUN_PROGRESS.c.expires_at > func.clock_timestamp())
    .order_by(RUN_PROGRESS.c.source, RUN_PROGRESS.c.chunk, RUN_PROGRESS.c.run)
)


_UNKNOWN: Final[dict[str, Any]] = {
    "oldest_planned_at": None,
    "skipped_objects": 0,
    "registered_at": None,
    "queue_read_at": None,
    "inventory_at": None,
    "noticed_at": None,
    "noticed_keys": 0,
    "messages_set_apart": 0,
    "suspected_chunks": 0,
    "unknown_posts": 0,
}


class Progress(LedgerPart):
    """Sums over the chunks of sources, and the work of live runs."""

    def record(self, holder: Holder, source: str, work: Work) -> None:
        """Replace the work that this process recorded for the run and source.

        Call it again within 30 s. Empty work removes the record.
        """
        values = {**asdict(holder), "source": source}
        with self._engine.begin() as connection:
            connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
            if work.is_empty:
                connection.execute(_REMOVE, values)
            else:
                waits = [{**asdict(wait), "since": wait.since.isoformat()} for wait in work.waits]
                connection.execute(_REPLACE, {**values, **asdict(work), "waits": waits})

    def live(self) -> Sequence[LiveWork]:
        """By source and chunk, without dead processes of this machine."""
        return [
            LiveWork(
                row.source,
                Holder(row.run, row.boot_id, row.pid, row.process_started),
                Work(
                    row.chunk,
                    row.packed_objects,
                    row.packed_bytes,
                    row.read_bytes,
                    row.sent_bytes,
                    tuple(
                        Wait(**wait | {"since": datetime.fromisoformat(wait["since"])})
                        for wait in row.waits
                    ),
                ),
            )
            for row in self._rows(_LIVE)
            if is_alive(row.boot_id, row.pid, row.process_started) is not False
        ]

    def of(self, sources: Sequence[str]) -> Sequence[SourceProgress]:
        """In the sources' order, at one moment. Takes about 0.1 s for 10^5 chunks."""
        states: defaultdict[str, dict[ChunkState, ChunkSums]] = defaultdict(dict)
        moved: dict[str, datetime] = {}
        times: dict[str, tuple[datetime | None, datetime | None]] = {}
        attempts: Counter[str] = Counter()
        live = self.live()
        with self._engine.begin() as connection:
            at = connection.execute(select(func.now())).scalar_one()
            for row in connection.exec_driver_sql(query("chunk_sums"), {"sources": list(sources)}):
                states[row.source][ChunkState(row.state)] = ChunkSums(
                    row.chunks, int(row.objects), int(row.size_bytes)
                )
                attempts[row.source] += int(row.attempts)
                if row.located_at:
                    times[row.source] = row.looked_at, row.located_at
                if row.moved_at:
                    moved[row.source] = max(row.moved_at, moved.get(row.source, row.moved_at))
            values = {"sources": list(sources), "window": WINDOW_SECONDS}
            rows = connection.exec_driver_sql(query("recent_chunk_sums"), values)
            recent = {row.source: row for row in rows}
            rows = connection.exec_driver_sql(query("source_facts"), {"sources": list(sources)})
            facts = {row.source: row._asdict() for row in rows}
        return [
            SourceProgress(
                at=at,
                states=states[source],
                window_seconds=recent[source].seconds if source in recent else 0.0,
                recent=ChunkSums(
                    recent[source].chunks,
                    int(recent[source].objects),
                    int(recent[source].size_bytes),
                )
                if source in recent
                else ChunkSums(),
                moved_at=moved.get(source),
                attempts=attempts[source],
                looked_at=times.get(source, (None, None))[0],
                located_at=times.get(source, (None, None))[1],
                live=Work.total(item.work for item in live if item.source == source),
                **facts.get(source, {"source": source, **_UNKNOWN}),
            )
            for source in sources
        ]

    def foreign_use(self) -> ForeignUse | None:
        """None before this ledger's first transaction."""
        rows = self._rows(query("foreign_use"))
        return ForeignUse(**rows[0]._asdict()) if rows else None

    def copy_counts(self, sources: Sequence[str]) -> Mapping[tuple[str, str], int]:
        """By source and `listed`, `unlisted` or `faulty` at the last check."""
        rows = self._rows(_COPIES, sources=list(sources), good=GOOD)
        return {(row.source, row.status): row.copies for row in rows}
