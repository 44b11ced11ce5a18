"""How far the chunks of sources are, and how fast they get there: sums of what the ledger recorded, nothing estimated."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from caf_pipeline.chunk_state import UNDER_WAY, ChunkState, stored_state
from caf_pipeline.ledger.current_content import last_whole, still_skipped
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.records import ChunkSums, SourceProgress

WINDOW_SECONDS: Final = 3600
"""Of a rate, at most. A chunk of 30 GiB takes minutes, so that an hour has several; what was so yesterday says little of now."""

# An object over several chunks counts with the last of them that is not archived, and with its last one where all are. Parts
# that were given up are of no object; what is archived of them is lost. LATERAL with LIMIT: as in the view objects_in_parts. What
# is asked for with IN is looked up in a hash table.
_COUNTS_ELSEWHERE: Final = """caf_file_id IN (SELECT caf_file_id FROM (
        SELECT parts.caf_file_id, abandoned OR row_number() OVER (
            PARTITION BY plan_id, file_path, version_id, etag, object_bytes, rewritten_at
            ORDER BY its.state IN ('located', 'damaged'), part DESC) > 1 AS is_other
        FROM object_parts AS parts
        CROSS JOIN LATERAL (SELECT state FROM chunks WHERE chunks.caf_file_id = parts.caf_file_id LIMIT 1) AS its
        WHERE source_id IN (SELECT source_id FROM sources WHERE name = ANY(%(sources)s))) AS counted WHERE is_other)"""
_IS_GIVEN_UP: Final = "caf_file_id IN (SELECT caf_file_id FROM object_parts WHERE abandoned)"
# Each attempt to pack a chunk is a change of its row: while S3 is away all are tried again and again, and nothing moves. Nor
# does anything where chunks are only planned.
_STATES: Final = f"""
    SELECT sources.name AS source, state, count(*) AS chunks,
        sum(CASE WHEN {_COUNTS_ELSEWHERE} THEN 0 WHEN state IN ('located', 'damaged') THEN member_count ELSE object_count END)
            AS objects,
        sum(CASE WHEN state NOT IN ('located', 'damaged') THEN object_bytes WHEN {_IS_GIVEN_UP} THEN 0 ELSE member_bytes END)
            AS size_bytes,
        max(updated_at) FILTER (WHERE state NOT IN ('planned', 'packing')) AS moved_at, sum(attempts) AS attempts,
        max(checked_at) FILTER (WHERE state = 'located') AS looked_at,
        min(located_at) FILTER (WHERE state = 'located') AS located_at
    FROM chunks JOIN sources USING (source_id) WHERE sources.name = ANY(%(sources)s) GROUP BY sources.name, state
    """
# The first chunk of the window only begins it: when it was begun is not of the window. A rebuild packed nothing.
_RECENT: Final = f"""
    WITH recent AS (SELECT sources.name AS source, located_at, member_bytes,
            CASE WHEN {_COUNTS_ELSEWHERE} THEN 0 ELSE member_count END AS member_count,
            row_number() OVER (PARTITION BY source_id ORDER BY located_at, caf_file_id) > 1 AS counts
        FROM caf_files JOIN sources USING (source_id)
        WHERE sources.name = ANY(%(sources)s) AND located_at > now() - make_interval(secs => %(window)s) AND attempts > 0)
    SELECT source, CAST(extract(epoch FROM now() - min(located_at)) AS double precision) AS seconds,
        count(*) FILTER (WHERE counts) AS chunks, coalesce(sum(member_count) FILTER (WHERE counts), 0) AS objects,
        coalesce(sum(member_bytes) FILTER (WHERE counts), 0) AS size_bytes
    FROM recent GROUP BY source
    """
# The oldest chunk under way is the first by its id: see `launchable`.
_UNDER_WAY: Final = ", ".join(f"'{state}'" for state in dict.fromkeys(map(stored_state, UNDER_WAY)))
_FACTS: Final = f"""
    SELECT sources.name AS source,
        (SELECT created_at FROM caf_files WHERE (caf_files.source_id, caf_file_id) > (sources.source_id, 0)
            AND caf_files.source_id <= sources.source_id AND state IN ({_UNDER_WAY})
            ORDER BY caf_files.source_id, caf_file_id LIMIT 1) AS oldest_planned_at,
        (SELECT count(*) FROM skipped_objects AS skipped WHERE skipped.source_id = sources.source_id
            AND {still_skipped("sources.source_id")}) AS skipped_objects,
        sources.created_at AS registered_at,
        (SELECT read_at FROM queue_reads WHERE queue_reads.source_id = sources.source_id) AS queue_read_at,
        ({last_whole("sources.source_id")}) AS inventory_at,
        (SELECT min(noticed_at) FROM noticed_keys WHERE noticed_keys.source_id = sources.source_id) AS noticed_at,
        (SELECT count(*) FROM noticed_keys WHERE noticed_keys.source_id = sources.source_id) AS noticed_keys,
        (SELECT count(*) FROM messages_set_apart AS apart WHERE apart.source_id = sources.source_id) AS messages_set_apart,
        (SELECT count(*) FROM chunks WHERE chunks.source_id = sources.source_id AND chunk_state = 'located'
            AND copy_state = 'verified' AND suspected_at IS NOT NULL) AS suspected_chunks,
        (SELECT coalesce(max(unknown), 0) FROM store_looks WHERE store_looks.source_id = sources.source_id) AS unknown_posts
    FROM sources WHERE sources.name = ANY(%(sources)s)
    """
_COPIES: Final = """
    SELECT sources.name AS source, CASE WHEN fault <> '' THEN 'faulty' WHEN listed THEN 'listed' ELSE 'unlisted' END AS status,
        count(*) AS copies
    FROM replicas JOIN chunks USING (caf_file_id, store) JOIN sources USING (source_id)
    WHERE sources.name = ANY(%(sources)s) AND state IN ('located', 'damaged') GROUP BY 1, 2
    """
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
    """Sums over the chunks of sources."""

    def of(self, sources: Sequence[str]) -> Sequence[SourceProgress]:
        """Return how far each of these sources is, all at one moment, in the order asked for.

        Reads the rows of their chunks, some 0.1 s for 10^5.
        """
        states: defaultdict[str, dict[ChunkState, ChunkSums]] = defaultdict(dict)
        moved: dict[str, datetime] = {}
        looks: dict[str, tuple[datetime | None, datetime | None]] = {}
        attempts: Counter[str] = Counter()
        with self._engine.begin() as connection:
            at = connection.exec_driver_sql("SELECT now()").scalar_one()
            for row in connection.exec_driver_sql(_STATES, {"sources": list(sources)}):
                states[row.source][ChunkState(row.state)] = ChunkSums(row.chunks, int(row.objects), int(row.size_bytes))
                attempts[row.source] += int(row.attempts)
                if row.located_at:
                    looks[row.source] = row.looked_at, row.located_at
                if row.moved_at:
                    moved[row.source] = max(row.moved_at, moved.get(row.source, row.moved_at))
            facts = {"sources": list(sources), "window": WINDOW_SECONDS}
            recent = {row.source: row for row in connection.exec_driver_sql(_RECENT, facts)}
            known = {row.pop("source"): row for row in (row._asdict() for row in connection.exec_driver_sql(_FACTS, facts))}
        return [
            SourceProgress(
                source=source,
                at=at,
                states=states[source],
                window_seconds=recent[source].seconds if source in recent else 0.0,
                recent=ChunkSums(recent[source].chunks, int(recent[source].objects), int(recent[source].size_bytes))
                if source in recent
                else ChunkSums(),
                moved_at=moved.get(source),
                attempts=attempts[source],
                looked_at=looks.get(source, (None, None))[0],
                located_at=looks.get(source, (None, None))[1],
                **known.get(source, _UNKNOWN),
            )
            for source in sources
        ]

    def copy_counts(self, sources: Sequence[str]) -> Mapping[tuple[str, str], int]:
        """Return how many copies of archived chunks there are, by source and as last looked at: listed, unlisted or faulty."""
        with self._engine.begin() as connection:
            return {
                (row.source, row.status): row.copies for row in connection.exec_driver_sql(_COPIES, {"sources": list(sources)})
            }
