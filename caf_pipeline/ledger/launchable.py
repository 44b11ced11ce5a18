"""Chunks that the launching sensor may start runs for."""

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
