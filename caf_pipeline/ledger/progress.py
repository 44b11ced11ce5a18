"""How far the chunks of sources are, and how fast they get there: sums of what the ledger recorded, nothing estimated."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from sqlalchemy import text

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.ledger.database import LedgerPart
from caf_pipeline.ledger.records import ChunkSums, SourceProgress

WINDOW_SECONDS: Final = 3600
"""Of a rate, at most. A chunk of 30 GiB takes minutes, so that an hour has several; what was so yesterday says little of now."""

_STATES: Final = text(
    """
    SELECT sources.name AS source, state, count(*) AS chunks,
        sum(CASE WHEN state IN ('located', 'damaged') THEN member_count ELSE object_count END) AS objects,
        sum(CASE WHEN state IN ('located', 'damaged') THEN member_bytes ELSE object_bytes END) AS size_bytes
    FROM caf_files JOIN sources USING (source_id) WHERE sources.name = ANY(:sources) GROUP BY sources.name, state
    """
)
# The first chunk of the window only begins it: when it was begun is not of the window. A rebuild packed nothing.
_RECENT: Final = text(
    """
    WITH recent AS (SELECT sources.name AS source, located_at, member_count, member_bytes,
            row_number() OVER (PARTITION BY source_id ORDER BY located_at, caf_file_id) > 1 AS counts
        FROM caf_files JOIN sources USING (source_id)
        WHERE sources.name = ANY(:sources) AND located_at > now() - make_interval(secs => :window) AND attempts > 0)
    SELECT source, CAST(extract(epoch FROM now() - min(located_at)) AS double precision) AS seconds,
        count(*) FILTER (WHERE counts) AS chunks, coalesce(sum(member_count) FILTER (WHERE counts), 0) AS objects,
        coalesce(sum(member_bytes) FILTER (WHERE counts), 0) AS size_bytes
    FROM recent GROUP BY source
    """
)


class Progress(LedgerPart):
    """Sums over the chunks of sources."""

    def progress(self, sources: Sequence[str]) -> Sequence[SourceProgress]:
        """Return how far each of these sources is, all at one moment, in the order asked for."""
        states: defaultdict[str, dict[ChunkState, ChunkSums]] = defaultdict(dict)
        with self._database.transaction() as connection:
            at = connection.execute(text("SELECT now()")).scalar_one()
            for row in connection.execute(_STATES, {"sources": list(sources)}):
                states[row.source][ChunkState(row.state)] = ChunkSums(row.chunks, int(row.objects), int(row.size_bytes))
            facts = {"sources": list(sources), "window": WINDOW_SECONDS}
            recent = {row.source: row for row in connection.execute(_RECENT, facts)}
        return [
            SourceProgress(
                source=source,
                at=at,
                states=states[source],
                window_seconds=recent[source].seconds if source in recent else 0.0,
                recent=ChunkSums(recent[source].chunks, int(recent[source].objects), int(recent[source].size_bytes))
                if source in recent
                else ChunkSums(),
            )
            for source in sources
        ]
