"""What the sensor that launches chunks asks of the ledger: of many sources at once, some chunks of each, by an index."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from caf_pipeline.chunk_state import UNDER_WAY, ChunkState, stored_state
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.records import LaunchableChunk, chunk_lease

_COLUMNS: Final = """sources.name AS source, sources.address, found.caf_file_id, found.name, found.state,
    CASE WHEN found.stored_size_bytes > 0 THEN found.stored_size_bytes ELSE found.expected_size_bytes END AS size_bytes,
    EXISTS (SELECT FROM leases WHERE leases.name = %(prefix)s || found.name AND expires_at > clock_timestamp()) AS held"""

# The states are written out: an index of some states serves a question that names them. And the source is a range: where it is a
# constant, the order is that of the primary key as well, which Postgres would go through from the oldest chunk on.
_UNDER_WAY: Final = ", ".join(f"'{state}'" for state in dict.fromkeys(map(stored_state, UNDER_WAY)))
_LAUNCHABLE: Final = f"""
    SELECT {_COLUMNS} FROM unnest(CAST(%(sources)s AS text[]), CAST(%(after)s AS bigint[])) AS asked (name, after)
    JOIN sources ON sources.name = asked.name
    CROSS JOIN LATERAL (SELECT caf_file_id FROM caf_files
        WHERE (caf_files.source_id, caf_file_id) > (sources.source_id, asked.after) AND caf_files.source_id <= sources.source_id
            AND state IN ({_UNDER_WAY})
        ORDER BY caf_files.source_id, caf_file_id LIMIT %(limit)s) AS first
    CROSS JOIN LATERAL (SELECT * FROM chunks WHERE chunks.caf_file_id = first.caf_file_id LIMIT 1) AS found
    ORDER BY found.caf_file_id
    """
_UNRELEASED: Final = f"""
    SELECT {_COLUMNS} FROM staging_reservations AS reserved
    CROSS JOIN LATERAL (SELECT * FROM chunks WHERE chunks.caf_file_id = reserved.caf_file_id LIMIT 1) AS found
    JOIN sources USING (source_id)
    WHERE state IN ('located', 'empty') AND sources.name = ANY(%(sources)s) ORDER BY found.caf_file_id LIMIT %(limit)s
    """
_LAST_LOCATED: Final = """
    SELECT name, (SELECT max(located_at) FROM caf_files WHERE caf_files.source_id = sources.source_id) AS at
    FROM sources WHERE name = ANY(%(sources)s)
    """


class LaunchableChunks(LedgerPart):
    """Chunks that have work to do."""

    def chunks(self, after: Mapping[str, int], limit: int) -> Sequence[LaunchableChunk]:
        """Return chunks under way, the oldest first, at most `limit` of each source.

        Before them come those, at most `limit` in all, whose run died after their last move, before it gave staging back.

        Args:
            after: for each source that is asked for, the `caf_file_id` that its chunks come after; 0 for the first.
            limit: see above.
        """
        asked = {"sources": list(after), "limit": limit, "prefix": chunk_lease("")}
        with self._engine.begin() as connection:
            unreleased = connection.exec_driver_sql(_UNRELEASED, asked).fetchall()
            under_way = connection.exec_driver_sql(_LAUNCHABLE, asked | {"after": list(after.values())}).fetchall()
        return [LaunchableChunk(**{**row._asdict(), "state": ChunkState(row.state)}) for row in (*unreleased, *under_way)]

    def last_located(self, sources: Sequence[str]) -> Mapping[str, datetime]:
        """Return when a chunk of each source was last located; sources without one are left out."""
        with self._engine.begin() as connection:
            rows = connection.exec_driver_sql(_LAST_LOCATED, {"sources": list(sources)}).fetchall()
        return {row.name: row.at for row in rows if row.at is not None}
