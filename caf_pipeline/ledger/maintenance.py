"""What the doctor reads and removes in a ledger: reservations, unsettled transactions, and rows without a chunk.

Functions over the caller's transaction; each that writes looks again under a lock, and may be called at any moment, by any
number.
"""

from collections.abc import Sequence

from sqlalchemy import Connection, text

from caf_pipeline.chunk_state import CLAIMING, EVER_LOCATED, ChunkState
from caf_pipeline.ledger.records import ChunkRows, Reservation
from caf_pipeline.store.protocol import SignedTransaction

_RESERVATIONS = text(
    "SELECT caf_files.name AS chunk, state, folder, size_bytes FROM staging_reservations JOIN caf_files USING (caf_file_id)"
    " ORDER BY caf_files.name"
)
_UNSETTLED = text(
    "SELECT hash, body, account, sequence, timeout_height, purpose, cost FROM transactions WHERE outcome IS NULL"
    " ORDER BY account, sequence"
)
# One statement sees one moment: a load of locations is in all of it or in none.
_ROWS_BY_CHUNK = text(
    """
    WITH source AS (SELECT source_id FROM sources WHERE name = :source),
        located AS (SELECT caf_file_id, count(*) AS locations FROM file_locations
            WHERE source_id = (SELECT source_id FROM source) AND part = 0 GROUP BY caf_file_id),
        claimed AS (SELECT caf_file_id, count(*) AS claims FROM claims
            WHERE source_id = (SELECT source_id FROM source) GROUP BY caf_file_id),
        chunks AS (SELECT caf_file_id, name, state, member_count, restored_at FROM caf_files
            WHERE source_id = (SELECT source_id FROM source))
    SELECT caf_file_id, name AS chunk, state, coalesce(locations, 0) AS locations, coalesce(claims, 0) AS claims,
        coalesce(member_count, 0) AS member_count, restored_at IS NOT NULL AS restored
    FROM chunks FULL JOIN located USING (caf_file_id) FULL JOIN claimed USING (caf_file_id)
    ORDER BY caf_file_id
    """
)
# A load of locations holds the row from its move on. What has no row can get none: ids are never given again.
_CHUNK_STATE = text("SELECT state FROM caf_files WHERE caf_file_id = :id FOR NO KEY UPDATE")
_DROP_CLAIMS = text("DELETE FROM claims WHERE caf_file_id = :id")
_DROP_LOCATIONS = text("DELETE FROM file_locations WHERE caf_file_id = :id")


def reservations(connection: Connection) -> Sequence[Reservation]:
    """Return all reservations of staging folders, by chunk."""
    rows = connection.execute(_RESERVATIONS)
    return [Reservation(row.chunk, ChunkState(row.state), row.folder, row.size_bytes) for row in rows]


def unsettled(connection: Connection) -> Sequence[SignedTransaction]:
    """Return the transactions of every account whose fate is not known, by account and sequence."""
    return [SignedTransaction(**{**row._asdict(), "body": bytes(row.body)}) for row in connection.execute(_UNSETTLED)]


def rows_by_chunk(connection: Connection, source: str) -> Sequence[ChunkRows]:
    """Count a source's location rows and claims by chunk, all at one moment. Reads both tables once."""
    return [
        ChunkRows(**{**row._asdict(), "state": None if row.state is None else ChunkState(row.state)})
        for row in connection.execute(_ROWS_BY_CHUNK, {"source": source})
    ]


def drop_stray_rows(connection: Connection, caf_file_id: int) -> int:
    """Remove claims of a chunk that claims nothing and locations of one that was never located; return how many there were."""
    state = connection.execute(_CHUNK_STATE, {"id": caf_file_id}).scalar_one_or_none()
    dropped = 0
    if state not in CLAIMING:
        dropped += connection.execute(_DROP_CLAIMS, {"id": caf_file_id}).rowcount
    if state not in EVER_LOCATED:
        dropped += connection.execute(_DROP_LOCATIONS, {"id": caf_file_id}).rowcount
    return dropped
