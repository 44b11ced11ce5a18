"""Guarded moves of a chunk: `UPDATE … WHERE name = … AND state = … AND epoch = …`.

Functions over the caller's transaction. When a move finds no row, the reason is looked up.
Source: "Promises" in docs/design.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from caf_pipeline.chunk_state import ChunkState, require_move
from caf_pipeline.errors import IllegalMove, IntegrityError, LeaseLost, NotLocated
from caf_pipeline.ledger.database import Connection, Row
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.store.protocol import Lease, Posting


def move_row(
    connection: Connection,
    lease: Lease,
    chunk: str,
    before: ChunkState,
    after: ChunkState,
    *,
    changes: str,
    facts: Mapping[str, Any] | None = None,
) -> Row:
    """Make a guarded move with `changes` to the row's columns; return the row's ids and sizes as they are after it."""
    require_move(chunk, before, after)
    statement = (
        f"UPDATE caf_files SET {changes}, state = %(after)s,"
        " updated_at = CASE WHEN state = %(after)s THEN updated_at ELSE now() END"
        " WHERE name = %(chunk)s AND state = %(before)s AND epoch = %(epoch)s"
        " RETURNING caf_file_id, source_id, member_count, merkle_root, stored_size_bytes"
    )
    _require_lease_of(lease, chunk)
    guard = {"chunk": chunk, "before": before, "after": after, "epoch": lease.epoch}
    moved = connection.execute(statement, {**(facts or {}), **guard}).fetchone()
    if moved is None:
        guarded(connection, lease, chunk)
        found = connection.execute("SELECT state FROM caf_files WHERE name = %(chunk)s", {"chunk": chunk}).scalar_one()
        raise IllegalMove(f"chunk {chunk} cannot go to '{after}': it is '{found}', not '{before}'")
    return moved


def guarded(connection: Connection, lease: Lease, chunk: str) -> int:
    """Return the chunk's id, its row locked; raise LeaseLost where another run has it now."""
    _require_lease_of(lease, chunk)
    statement = "SELECT caf_file_id, epoch FROM caf_files WHERE name = %(chunk)s FOR NO KEY UPDATE"
    row = connection.execute(statement, {"chunk": chunk}).fetchone()
    if row is None:
        raise NotLocated(f"the ledger has no chunk {chunk}")
    if row.epoch != lease.epoch:
        raise LeaseLost(f"another run holds chunk {chunk} now; this run's move was not written")
    return int(row.caf_file_id)


def require_state(connection: Connection, lease: Lease, chunk: str, states: Sequence[ChunkState], done: str) -> int:
    """Return the chunk's id, its row locked; raise IllegalMove where it is in none of these states."""
    caf_file_id = guarded(connection, lease, chunk)
    statement = "SELECT state FROM caf_files WHERE caf_file_id = %(id)s"
    state = connection.execute(statement, {"id": caf_file_id}).scalar_one()
    if state not in states:
        raise IllegalMove(f"chunk {chunk} cannot be {done}: it is '{state}', not {' or '.join(states)}")
    return caf_file_id


def require_sealed_bytes(chunk: str, row: Row, posting: Posting) -> None:
    """Raise IntegrityError where a posting is of other bytes than those of the row, which were sealed."""
    if (row.merkle_root, row.stored_size_bytes) != (posting.merkle_root, posting.stored_size_bytes):
        raise IntegrityError(
            f"chunk {chunk} was sealed as {row.merkle_root.hex()} ({row.stored_size_bytes} bytes), but"
            f" posted as {posting.merkle_root.hex()} ({posting.stored_size_bytes} bytes)"
        )


def _require_lease_of(lease: Lease, chunk: str) -> None:
    if lease.name != chunk_lease(chunk):
        raise LeaseLost(f"the lease on {lease.name} gives no right to move chunk {chunk}")
