"""Puts chunks of a ledger straight into a state, past the moves, with the copy that belongs to it."""

from typing import Any

from caf_pipeline.chunk_state import COPY_STATES, ChunkState, stored_state

_CHUNK = """
    UPDATE caf_files SET state = %(state)s, sealed_at = coalesce(sealed_at, now()),
        located_at = CASE WHEN %(state)s = 'located' THEN coalesce(located_at, now()) ELSE located_at END
    WHERE {where}
    """
_END_ROWS = "DELETE FROM {table} WHERE caf_file_id IN (SELECT caf_file_id FROM caf_files WHERE {where})"
_COPY = """
    INSERT INTO chunk_copies (caf_file_id, store, merkle_root, proof_type)
    SELECT caf_file_id, 'jackal', sha256(CAST(name AS bytea)), 0 FROM caf_files
    WHERE ({where}) AND NOT EXISTS (SELECT FROM chunk_copies WHERE chunk_copies.caf_file_id = caf_files.caf_file_id)
    """
_COPY_STATE = """
    UPDATE chunk_copies SET state = %(copy)s, damage = '',
        owner = CASE WHEN %(posted)s THEN coalesce(owner, 'jkl1owner') END,
        start = CASE WHEN %(posted)s THEN coalesce(start, 1) END,
        posted_at = CASE WHEN %(posted)s THEN coalesce(posted_at, now()) END, verified_at = coalesce(verified_at, now())
    WHERE caf_file_id IN (SELECT caf_file_id FROM caf_files WHERE {where})
    """


def set_state(connection: Any, state: str, where: str = "true") -> None:
    """Put the chunks of `caf_files` for which `where` holds into a state; a parked one keeps the copy that it has."""
    state = ChunkState(state)
    copy = COPY_STATES.get(state)
    connection.execute(_CHUNK.format(where=where), {"state": stored_state(state)})
    if state is ChunkState.PARKED:
        return
    if copy is None:
        for table in ("replicas", "full_reads", "chunk_copies"):
            connection.execute(_END_ROWS.format(table=table, where=where))
        return
    connection.execute(_COPY.format(where=where))
    facts = {"copy": copy, "posted": copy not in ("wanted", "posting")}
    connection.execute(_COPY_STATE.format(where=where), facts)
