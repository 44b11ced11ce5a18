"""How far the chunks of sources and live runs are: recorded facts, no estimates."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Text, and_, any_, bindparam, case, delete, func, or_, select
from sqlalchemy.dialects.postgresql import ARRAY, insert

from caf_pipeline.chunk_state import GOOD, ChunkState
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.processes import is_alive
from caf_pipeline.ledger.query_files import query
from caf_pipeline.ledger.records import ChunkSums, ForeignUse, Holder, LiveWork, SourceProgress
from caf_pipeline.ledger.tables import REPLICAS, RUN_PROGRESS, SOURCES
from caf_pipeline.ledger.views import CHUNKS
from caf_pipeline.waits import RENEW_SECONDS, Wait, Work

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
