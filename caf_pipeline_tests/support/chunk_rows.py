"""Chunks for tests: records without a ledger, and rows put into a state without moves."""

from datetime import UTC, datetime
from typing import Any

from caf_pipeline.chunk_state import COPY_STATES, ChunkState, stored_state
from caf_pipeline.records import Chunk

_CHUNK = """
    UPDATE caf_files SET state = %(state)s, sealed_at = coalesce(sealed_at, now()),
        located_at = CASE WHEN %(state)s = 'located' THEN coalesce(located_at, now())
            ELSE located_at END
    WHERE {where}
    """
_END_ROWS = (
    "DELETE FROM {table} WHERE caf_file_id IN (SELECT caf_file_id FROM caf_files WHERE {where})"
)
_COPY = """
    INSERT INTO chunk_copies (caf_file_id, store, merkle_root, proof_type)
    SELECT caf_file_id, 'jackal', sha256(CAST(name AS bytea)), 0 FROM caf_files
    WHERE ({where}) AND NOT EXISTS (
        SELECT FROM chunk_copies WHERE chunk_copies.caf_file_id = caf_files.caf_file_id)
    """
_COPY_STATE = """
    UPDATE chunk_copies SET state = %(copy)s, damage = '',
        owner = CASE WHEN %(posted)s THEN coalesce(owner, 'jkl1owner') END,
        start = CASE WHEN %(posted)s THEN coalesce(start, 1) END,
        posted_at = CASE WHEN %(posted)s THEN coalesce(posted_at, now()) END,
        verified_at = coalesce(verified_at, now())
    WHERE caf_file_id IN (SELECT caf_file_id FROM caf_files WHERE {where})
    """


def set_state(connection: Any, state: str, where: str = "true") -> None:
    """Put the chunks for which `where` holds into a state. A parked chunk keeps its copy."""
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


def a_chunk(name: str = "demo-00000000-00001", **changes: Any) -> Chunk:
    """Return a located chunk of 1,000 stored bytes, posted in block 7, with these `changes`."""
    fields: dict[str, Any] = {
        "caf_file_id": 1,
        "name": name,
        "source": "demo",
        "archive_id": "a",
        "plan": "00000000",
        "plan_folder": "/nowhere",
        "number": 1,
        "state": ChunkState.LOCATED,
        "epoch": 1,
        "attempts": 1,
        "failures": (),
        "object_count": 1,
        "object_bytes": 900,
        "expected_size_bytes": 1_100,
        "caf_size_bytes": 1_000,
        "stored_size_bytes": 1_000,
        "member_count": 1,
        "member_bytes": 900,
        "skipped_count": 0,
        "released_count": 0,
        "merkle_root": b"r" * 32,
        "proof_type": 3,
        "owner": "jkl1owner",
        "start": 7,
        "samples": (),
        "reason": "",
        "updated_at": datetime(2026, 1, 1, tzinfo=UTC),
    }
    return Chunk(**fields | changes)
