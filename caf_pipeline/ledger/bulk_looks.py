"""Passes through the store's own lists: when the next one is due, what they are held against, and which chunks they suspect."""

from collections.abc import Collection, Mapping
from datetime import datetime
from sys import intern
from typing import Final

from caf_pipeline.ledger.engine import LedgerPart, driver_connection
from caf_pipeline.ledger.records import LocatedCopies

_ROWS: Final = 10_000
_MARKED: Final = 1_000  # rows that one statement locks, for which a chunk's run may wait

# A pass is due an hour after the last one at most. A time beyond that was written while the clock was wrong.
_BEGIN = """
    INSERT INTO bulk_looks AS old (store, next_at) VALUES (%(store)s, now() + make_interval(secs => %(seconds)s))
    ON CONFLICT (store) DO UPDATE SET next_at = excluded.next_at
    WHERE old.next_at <= now() OR old.next_at > now() + interval '1 hour' RETURNING true
    """
_LOCATED: Final = """
    SELECT caf_file_id, CASE WHEN adopted_at IS NULL THEN archive_id END, merkle_root, owner, start,
        ARRAY(SELECT provider FROM replicas WHERE replicas.caf_file_id = chunks.caf_file_id AND listed)
    FROM chunks JOIN sources USING (source_id) WHERE chunk_state = 'located' AND copy_state = 'verified'
"""
# A look that was made since tells more than a list that may be older, and so does a move.
_SUSPECT = """
    UPDATE chunk_copies AS copies SET suspected_at = %(began)s FROM caf_files WHERE copies.caf_file_id = ANY(%(ids)s)
        AND caf_files.caf_file_id = copies.caf_file_id AND caf_files.state = 'located' AND copies.state = 'verified'
        AND greatest(copies.updated_at, checked_at) < %(began)s
    """
_END = """
    UPDATE bulk_looks SET next_at = CAST(%(began)s AS timestamptz) + make_interval(secs => %(seconds)s),
        whole_at = CASE WHEN %(whole)s THEN %(began)s ELSE whole_at END
    WHERE store = %(store)s
    """


class BulkLooks(LedgerPart):
    """What passes through the store's lists leave."""

    def begin(self, store: str, again_in: float) -> bool:
        """Begin a pass where one is due, and tell whether it was. If it never ends, the next one is due in `again_in` seconds."""
        with self._engine.begin() as connection:
            return bool(connection.exec_driver_sql(_BEGIN, {"store": store, "seconds": again_in}).scalar_one_or_none())

    def located_copies(self) -> tuple[datetime, list[LocatedCopies]]:
        """Return the located chunks of all sources, and the time of which that is. Takes some 500 bytes a chunk."""
        found: list[LocatedCopies] = []
        with self._engine.begin() as connection:
            began: datetime = connection.exec_driver_sql("SELECT now()").scalar_one()
            with driver_connection(connection).cursor("located", binary=True) as cursor:
                cursor.execute(_LOCATED)
                while rows := cursor.fetchmany(_ROWS):
                    for caf_file_id, archive_id, merkle_root, owner, start, providers in rows:
                        place = (merkle_root, intern(owner), start)
                        archive = archive_id and intern(archive_id)
                        found.append(LocatedCopies(caf_file_id, archive, place, tuple(map(intern, providers))))
        return began, found

    def suspect(self, began: datetime, caf_file_ids: Collection[int]) -> None:
        """Let these chunks be looked at first, but for those that were moved or looked at since the pass began."""
        ids = sorted(caf_file_ids)
        for first in range(0, len(ids), _MARKED):
            with self._engine.begin() as connection:
                connection.exec_driver_sql(_SUSPECT, {"began": began, "ids": ids[first : first + _MARKED]})

    def end(self, store: str, began: datetime, again_in: float, *, whole: bool) -> None:
        """End a pass; the next is due so many seconds after it began. After a whole one, what it did not suspect is not."""
        clear = "UPDATE chunk_copies SET suspected_at = NULL WHERE suspected_at < %(began)s"
        with self._engine.begin() as connection:
            if whole:
                connection.exec_driver_sql(clear, {"began": began})
            connection.exec_driver_sql(_END, {"store": store, "began": began, "seconds": again_in, "whole": whole})

    def whole(self) -> Mapping[str, datetime]:
        """Return when the last whole pass began, by store; stores without one are left out."""
        statement = "SELECT store, whole_at FROM bulk_looks WHERE whole_at IS NOT NULL"
        with self._engine.begin() as connection:
            return {row.store: row.whole_at for row in connection.exec_driver_sql(statement)}

    def suspicions(self, store: str, source: str) -> tuple[datetime | None, int]:
        """Return when the last whole pass began, None where there was none, and how many chunks of a source are suspected."""
        statement = """
            SELECT (SELECT whole_at FROM bulk_looks WHERE store = %(store)s) AS whole_at, (SELECT count(*)
                FROM chunks JOIN sources USING (source_id)
                WHERE sources.name = %(source)s AND chunk_state = 'located' AND copy_state = 'verified'
                    AND suspected_at IS NOT NULL) AS suspected
            """
        with self._engine.begin() as connection:
            row = connection.exec_driver_sql(statement, {"store": store, "source": source}).one()
        return row.whole_at, row.suspected
