"""What the doctor reads and removes in a ledger: reservations, unsettled transactions, and rows without a chunk.

What writes looks again under a lock, and may be called at any moment, by any number.
"""

from collections.abc import Sequence
from typing import Final

from caf_pipeline.chunk_state import CLAIMING, EVER_LOCATED, MAY_BE_PENDING, ChunkState
from caf_pipeline.ledger.copy import end_claims, forget_pending
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.records import ChunkRows
from caf_pipeline.ledger.tables import TRANSACTIONS
from caf_pipeline.ledger.transactions import UNSETTLED
from caf_pipeline.store.protocol import SignedTransaction

_UNSETTLED: Final = UNSETTLED.order_by(TRANSACTIONS.c.account, TRANSACTIONS.c.sequence)
# One statement sees one moment: a load of locations is in all of it or in none.
_ROWS_BY_CHUNK = """
    WITH source AS (SELECT source_id FROM sources WHERE name = %(source)s),
        located AS (SELECT caf_file_id, count(*) AS locations FROM file_locations
            WHERE source_id = (SELECT source_id FROM source) GROUP BY caf_file_id),
        claimed AS (SELECT caf_file_id, count(*) AS claims FROM claims
            WHERE source_id = (SELECT source_id FROM source) GROUP BY caf_file_id),
        sealed AS (SELECT caf_file_id, count(*) AS pending FROM pending_locations
            WHERE source_id = (SELECT source_id FROM source) GROUP BY caf_file_id),
        of_source AS (SELECT caf_file_id, name, state, member_count, restored_at FROM chunks
            WHERE source_id = (SELECT source_id FROM source))
    SELECT caf_file_id, name AS chunk, state, coalesce(locations, 0) AS locations, coalesce(pending, 0) AS pending,
        CASE WHEN object_parts.part IS NULL THEN coalesce(claims, 0) WHEN state = ANY(%(claiming)s) THEN member_count ELSE 0 END
            AS claims,
        coalesce(member_count, 0) AS member_count, restored_at IS NOT NULL AS restored
    FROM of_source FULL JOIN located USING (caf_file_id) FULL JOIN claimed USING (caf_file_id)
        FULL JOIN sealed USING (caf_file_id)
        LEFT JOIN object_parts USING (caf_file_id)
    ORDER BY caf_file_id
    """
# A load of locations holds the row from its move on. What has no row can get none: ids are never given again.
# What is stored of the state is enough: whether a chunk claims or ever was located does not depend on its copy.
_CHUNK_STATE = "SELECT state FROM caf_files WHERE caf_file_id = %(id)s FOR NO KEY UPDATE"
_DROP_LOCATIONS = "DELETE FROM file_locations WHERE caf_file_id = %(id)s"


class StrayRows(LedgerPart):
    """What the doctor reads and removes."""

    def unsettled(self) -> Sequence[SignedTransaction]:
        """Return the transactions of every account whose fate is not known, by account and sequence."""
        with self._engine.begin() as connection:
            rows = connection.execute(_UNSETTLED).all()
        return [SignedTransaction(**row._asdict()) for row in rows]

    def by_chunk(self, source: str) -> Sequence[ChunkRows]:
        """Count a source's location rows, pending ones and claims by chunk, all at one moment; chunks without any are there, too.

        A part counts as claimed by its chunk, whose object has one claim for all of them.

        Empty for a source that is not known. Reads each table once.
        """
        with self._engine.begin() as connection:
            rows = connection.exec_driver_sql(_ROWS_BY_CHUNK, {"source": source, "claiming": sorted(CLAIMING)}).fetchall()
        return [ChunkRows(**{**row._asdict(), "state": None if row.state is None else ChunkState(row.state)}) for row in rows]

    def drop(self, caf_file_id: int) -> int:
        """Remove rows that a chunk in its state, or an unknown one, cannot have: claims, locations and pending locations.

        What a chunk claims by its state, and locations that it has or had, stay. Returns the rows removed.
        """
        dropped = 0
        with self._engine.begin() as connection:
            state = connection.exec_driver_sql(_CHUNK_STATE, {"id": caf_file_id}).scalar_one_or_none()
            if state not in CLAIMING:
                dropped += end_claims(connection, caf_file_id)
            if state not in EVER_LOCATED:
                dropped += connection.exec_driver_sql(_DROP_LOCATIONS, {"id": caf_file_id}).rowcount
            if state not in MAY_BE_PENDING:
                dropped += forget_pending(connection, caf_file_id)
        return dropped
