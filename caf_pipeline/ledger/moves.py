"""Guarded moves of a chunk and its copy, by state and epoch, in the caller's transaction.

A move locks the chunk's row and compares the epoch before it reads the states: a statement that
waits for a lock reads copies from before the wait. Source: "Promises" in
docs/explanation/design.md.
"""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Text,
    bindparam,
    cast,
    delete,
    func,
    literal,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

from caf_pipeline.chunk_state import ChunkState, CopyState, copy_after, require_move, stored_state
from caf_pipeline.errors import (
    IllegalMove,
    IntegrityError,
    LeaseLost,
    LedgerError,
    NotLocated,
)
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.ledger.tables import CAF_FILES, CHUNK_COPIES
from caf_pipeline.ledger.views import CHUNKS
from caf_pipeline.records import Lease, PostRecord, Sample

_CHUNK: Final = CHUNKS.c.caf_file_id == bindparam("id")
_STATE: Final = select(CHUNKS.c.state, CHUNKS.c.copy_state).where(_CHUNK)
_ROW: Final = select(
    *(
        CHUNKS.c[name]
        for name in (
            "caf_file_id",
            "source_id",
            "state",
            "member_count",
            "merkle_root",
            "stored_size_bytes",
        )
    )
).where(_CHUNK)
_LOCK: Final = (
    select(CAF_FILES.c.caf_file_id, CAF_FILES.c.epoch)
    .where(CAF_FILES.c.name == bindparam("chunk"))
    .with_for_update(key_share=True)  # NO KEY UPDATE: others may insert rows that refer to it
)


def move_row(
    connection: Connection,
    lease: Lease,
    chunk: str,
    before: ChunkState,
    after: ChunkState,
    *,
    changes: Mapping[str, Any] = MappingProxyType({}),
    copy_changes: Mapping[str, Any] = MappingProxyType({}),
) -> Row[Any]:
    """Make a guarded move; return the chunk's ids and sizes after it. A seal inserts the copy.

    Raises LedgerError if the view shows another state than was written.
    """
    require_move(chunk, before, after)
    caf_file_id = guarded(connection, lease, chunk)
    row = connection.execute(_STATE, {"id": caf_file_id}).one()
    if row.state != before:
        raise IllegalMove(
            f"chunk {chunk} cannot go to '{after}': it is '{row.state}', not '{before}'"
        )
    copy = CopyState(row.copy_state) if row.copy_state else None
    copy_state = copy_after(chunk, before, after, copy)
    time = {"updated_at": func.now()} if before is not after else {}
    values = {**changes, **time, "state": stored_state(after)}
    connection.execute(
        update(CAF_FILES).where(CAF_FILES.c.caf_file_id == caf_file_id).values(values)
    )
    if copy is not None and copy_state is None:
        connection.execute(delete(CHUNK_COPIES).where(CHUNK_COPIES.c.caf_file_id == caf_file_id))
    elif copy is not None:
        values = {**copy_changes, **time, "state": copy_state}
        connection.execute(
            update(CHUNK_COPIES).where(CHUNK_COPIES.c.caf_file_id == caf_file_id).values(values)
        )
    moved = chunk_row(connection, caf_file_id)
    if moved.state != after:
        raise LedgerError(
            f"chunk {chunk} went to '{after}', but the view 'chunks' shows it as '{moved.state}': "
            "the view is damaged, and nothing was written",
            hint="restore a backup with 'caf backup --restore'",
        )
    return moved


def chunk_row(connection: Connection, caf_file_id: int) -> Row[Any]:
    """Return the chunk's ids and sizes."""
    return connection.execute(_ROW, {"id": caf_file_id}).one()


def guarded(connection: Connection, lease: Lease, chunk: str) -> int:
    """Lock the chunk's row and return its id. Raises LeaseLost if another run holds it."""
    if lease.name != chunk_lease(chunk):
        raise LeaseLost(f"the lease on {lease.name} gives no right to move chunk {chunk}")
    row = connection.execute(_LOCK, {"chunk": chunk}).one_or_none()
    if row is None:
        raise NotLocated(f"the ledger has no chunk {chunk}")
    if row.epoch != lease.epoch:
        raise LeaseLost(f"another run holds chunk {chunk} now; this run's move was not written")
    return int(row.caf_file_id)


def require_state(
    connection: Connection, lease: Lease, chunk: str, states: Sequence[ChunkState], done: str
) -> int:
    """Like `guarded`. Raises IllegalMove in any other state."""
    caf_file_id = guarded(connection, lease, chunk)
    state = connection.execute(_STATE, {"id": caf_file_id}).one().state
    if state not in states:
        raise IllegalMove(
            f"chunk {chunk} cannot be {done}: it is '{state}', not {' or '.join(states)}"
        )
    return caf_file_id


def require_sealed_bytes(chunk: str, row: Row[Any], posting: PostRecord) -> None:
    """Raise IntegrityError if other bytes were posted."""
    if (row.merkle_root, row.stored_size_bytes) != (posting.merkle_root, posting.stored_size_bytes):
        raise IntegrityError(
            f"chunk {chunk} was sealed as {row.merkle_root.hex()} ({row.stored_size_bytes} bytes), "
            f"but posted as {posting.merkle_root.hex()} ({posting.stored_size_bytes} bytes)"
        )


def samples_as_json(samples: Sequence[Sample]) -> str:
    """Return samples as `caf_files.samples` holds them."""
    return json.dumps(
        [
            {"offset": sample.offset, "length": sample.length, "sha256": sample.sha256.hex()}
            for sample in samples
        ]
    )


def as_jsonb(samples: Sequence[Sample]) -> ColumnElement[Any]:
    """Return samples as the value of a column."""
    return cast(literal(samples_as_json(samples), Text), JSONB)
