"""Passes through a store's lists: when a pass is due, and which chunks it suspects."""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from sys import intern
from typing import Final

from sqlalchemy import BigInteger, Interval, any_, bindparam, func, null, or_, select, update
from sqlalchemy.dialects.postgresql import ARRAY, insert

from caf_pipeline.ledger.engine import LedgerPart, driver_connection
from caf_pipeline.ledger.query_files import query
from caf_pipeline.ledger.records import LocatedCopies
from caf_pipeline.ledger.tables import CAF_FILES, CHAIN_LISTINGS, CHUNK_COPIES, SOURCES, TIMESTAMPTZ
from caf_pipeline.ledger.views import CHUNKS

_ROWS: Final = 10_000
_MARKED: Final = 1_000  # rows that one statement locks; a chunk's run may wait for them

_PASS: Final = insert(CHAIN_LISTINGS).values(
    next_at=func.now() + bindparam("again_in", type_=Interval)
)
# A pass is due at most an hour after the last. A later time was written while the clock was wrong.
_BEGIN: Final = _PASS.on_conflict_do_update(
    index_elements=[CHAIN_LISTINGS.c.store],
    set_={"next_at": _PASS.excluded.next_at},
    where=or_(
        CHAIN_LISTINGS.c.next_at <= func.now(),
        CHAIN_LISTINGS.c.next_at > func.now() + timedelta(hours=1),
    ),
).returning(CHAIN_LISTINGS.c.store)
_BEGAN: Final = bindparam("began", type_=TIMESTAMPTZ)
# A later check or move is more recent than the list.
_SUSPECT: Final = (
    update(CHUNK_COPIES)
    .where(
        CHUNK_COPIES.c.caf_file_id == any_(bindparam("ids", type_=ARRAY(BigInteger))),
        CAF_FILES.c.caf_file_id == CHUNK_COPIES.c.caf_file_id,
        CAF_FILES.c.state == "located",
        CHUNK_COPIES.c.state == "verified",
        func.greatest(CHUNK_COPIES.c.updated_at, CHUNK_COPIES.c.checked_at) < _BEGAN,
    )
    .values(suspected_at=_BEGAN)
)
_CLEAR: Final = (
    update(CHUNK_COPIES).where(CHUNK_COPIES.c.suspected_at < _BEGAN).values(suspected_at=null())
)
_END: Final = (
    update(CHAIN_LISTINGS)
    .where(CHAIN_LISTINGS.c.store == bindparam("name"))
    .values(next_at=_BEGAN + bindparam("again_in", type_=Interval))
)
_END_WHOLE: Final = _END.values(whole_at=_BEGAN)
_WHOLE: Final = select(CHAIN_LISTINGS.c.store, CHAIN_LISTINGS.c.whole_at).where(
    CHAIN_LISTINGS.c.whole_at.is_not(None)
)
_SUSPICIONS: Final = select(
    select(CHAIN_LISTINGS.c.whole_at)
    .where(CHAIN_LISTINGS.c.store == bindparam("store"))
    .scalar_subquery()
    .label("whole_at"),
    select(func.count())
    .join_from(CHUNKS, SOURCES, SOURCES.c.source_id == CHUNKS.c.source_id)
    .where(
        SOURCES.c.name == bindparam("source"),
        CHUNKS.c.chunk_state == "located",
        CHUNKS.c.copy_state == "verified",
        CHUNKS.c.suspected_at.is_not(None),
    )
    .scalar_subquery()
    .label("suspected"),
)


class ChainListings(LedgerPart):
    """Records passes through a store's lists."""

    def begin(self, store: str, again_in: float) -> bool:
        """Begin a pass if one is due; return whether it was.

        If the pass never ends, the next is due in `again_in` seconds.
        """
        begun = self._scalar(_BEGIN, store=store, again_in=timedelta(seconds=again_in))
        return begun is not None

    def located_copies(self) -> tuple[datetime, list[LocatedCopies]]:
        """At the returned time. Needs about 500 bytes of memory a chunk."""
        copies: list[LocatedCopies] = []
        with self._engine.begin() as connection:
            began: datetime = connection.execute(select(func.now())).scalar_one()
            with driver_connection(connection).cursor("located", binary=True) as cursor:
                cursor.execute(query("located_copies"))
                while rows := cursor.fetchmany(_ROWS):
                    for caf_file_id, archive_id, merkle_root, owner, start, providers in rows:
                        place = (merkle_root, intern(owner), start)
                        archive = archive_id and intern(archive_id)
                        copies.append(
                            LocatedCopies(
                                caf_file_id, archive, place, tuple(map(intern, providers))
                            )
                        )
        return began, copies

    def suspect(self, began: datetime, caf_file_ids: Collection[int]) -> None:
        """Mark chunks to be checked first, except those moved or checked since the pass began."""
        ids = sorted(caf_file_ids)
        for first in range(0, len(ids), _MARKED):
            self._execute(_SUSPECT, began=began, ids=ids[first : first + _MARKED])

    def end(self, store: str, began: datetime, again_in: float, *, whole: bool) -> None:
        """The next pass is due `again_in` seconds after this one began.

        After a whole pass, only chunks that it suspected remain suspected.
        """
        with self._engine.begin() as connection:
            if whole:
                connection.execute(_CLEAR, {"began": began})
            values = {"name": store, "began": began, "again_in": timedelta(seconds=again_in)}
            connection.execute(_END_WHOLE if whole else _END, values)

    def whole(self) -> Mapping[str, datetime]:
        return {row.store: row.whole_at for row in self._rows(_WHOLE)}

    def suspicions(self, store: str, source: str) -> tuple[datetime | None, int]:
        """When the last whole pass began, and the number of suspected chunks."""
        (row,) = self._rows(_SUSPICIONS, store=store, source=source)
        return row.whole_at, row.suspected
