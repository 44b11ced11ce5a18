"""What the sensor that launches chunks asks of the ledger: of many sources at once, some chunks of
each, by an index.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from sqlalchemy import ARRAY, Text, any_, bindparam, func, select

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.query_files import query
from caf_pipeline.ledger.records import LaunchableChunk, chunk_lease
from caf_pipeline.ledger.tables import CAF_FILES, SOURCES

_LAST_LOCATED: Final = select(
    SOURCES.c.name,
    select(func.max(CAF_FILES.c.located_at))
    .where(CAF_FILES.c.source_id == SOURCES.c.source_id)
    .scalar_subquery()
    .label("at"),
).where(SOURCES.c.name == any_(bindparam("sources", type_=ARRAY(Text))))


class LaunchableChunks(LedgerPart):
    """Chunks that have work to do."""

    def chunks(self, after: Mapping[str, int], limit: int) -> Sequence[LaunchableChunk]:
        """Return chunks under way, the oldest first, at most `limit` of each source.

        Before them come those, at most `limit` in all, whose run died after their last move, before
        it gave staging back.

        Args: after: for each source that is asked for, the `caf_file_id` that its chunks come
            after; 0 for the first. limit: see above.
        """
        asked = {"sources": list(after), "limit": limit, "prefix": chunk_lease("")}
        with self._engine.begin() as connection:
            unreleased = connection.exec_driver_sql(query("unreleased_chunks"), asked).fetchall()
            under_way = connection.exec_driver_sql(
                query("launchable_chunks"), asked | {"after": list(after.values())}
            ).fetchall()
        return [
            LaunchableChunk(**{**row._asdict(), "state": ChunkState(row.state)})
            for row in (*unreleased, *under_way)
        ]

    def last_located(self, sources: Sequence[str]) -> Mapping[str, datetime]:
        """Return when a chunk of each source was last located; sources without one are left out."""
        with self._engine.begin() as connection:
            rows = connection.execute(_LAST_LOCATED, {"sources": list(sources)}).fetchall()
        return {row.name: row.at for row in rows if row.at is not None}
