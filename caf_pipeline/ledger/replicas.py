"""Providers' copies of a chunk, and the results of checks over time.

Functions run in the caller's transaction, which has locked the chunk's row.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from sqlalchemy import (
    BigInteger,
    Connection,
    Text,
    all_,
    bindparam,
    delete,
    exists,
    false,
    func,
    null,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert

from caf_pipeline.chunk_state import GOOD, ChunkState
from caf_pipeline.errors import IllegalMove
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.moves import move_row, require_state
from caf_pipeline.ledger.query_files import query
from caf_pipeline.ledger.records import WINDOWS_REQUIRED, CopyCheck, KnownCopy
from caf_pipeline.ledger.tables import CAF_FILES, CHUNK_COPIES, FULL_READS, REPLICAS
from caf_pipeline.store.protocol import Copy, Lease

_VERIFIED_REPLICA: Final = insert(REPLICAS).from_select(
    ["caf_file_id", "store", "provider", "proof", "last_proven"],
    select(
        CHUNK_COPIES.c.caf_file_id,
        CHUNK_COPIES.c.store,
        bindparam("provider", type_=Text),
        bindparam("proof", type_=Text),
        bindparam("last_proven", type_=BigInteger),
    ).where(CHUNK_COPIES.c.caf_file_id == bindparam("id")),
)
_VERIFIED: Final = _VERIFIED_REPLICA.on_conflict_do_update(
    index_elements=[REPLICAS.c.caf_file_id, REPLICAS.c.store, REPLICAS.c.provider],
    set_={
        "proof": _VERIFIED_REPLICA.excluded.proof,
        "listed": true(),
        "fault": "",
        "checked_at": func.now(),
        "last_proven": func.coalesce(
            _VERIFIED_REPLICA.excluded.last_proven, REPLICAS.c.last_proven
        ),
    },
)
_UNANSWERED: Final = (
    update(CHUNK_COPIES)
    .where(CHUNK_COPIES.c.caf_file_id == bindparam("id"))
    .values(unanswered_at=func.now())
)
# A full read counts as long as its copy does.
_END_FULL_READ: Final = delete(FULL_READS).where(
    FULL_READS.c.caf_file_id == bindparam("id"),
    ~exists().where(
        REPLICAS.c.caf_file_id == bindparam("id"),
        REPLICAS.c.provider == FULL_READS.c.provider,
        REPLICAS.c.listed,
        REPLICAS.c.fault == "",
    ),
)
_FULL_READ: Final = insert(FULL_READS).from_select(
    ["caf_file_id", "store", "provider", "opened_with"],
    select(
        CHUNK_COPIES.c.caf_file_id,
        CHUNK_COPIES.c.store,
        bindparam("provider", type_=Text),
        bindparam("opened_with", type_=Text),
    ).where(CHUNK_COPIES.c.caf_file_id == bindparam("id")),
)
_READ_BACK: Final = _FULL_READ.on_conflict_do_update(
    index_elements=[FULL_READS.c.caf_file_id, FULL_READS.c.store],
    set_={
        "provider": _FULL_READ.excluded.provider,
        "opened_with": _FULL_READ.excluded.opened_with,
        "read_at": func.now(),
    },
)
_READ_WHOLE: Final = (
    update(CAF_FILES).where(CAF_FILES.c.caf_file_id == bindparam("id")).values(unread=null())
)
_UNLIST: Final = (
    update(REPLICAS)
    .where(
        REPLICAS.c.caf_file_id == bindparam("id"),
        REPLICAS.c.provider != all_(bindparam("but", type_=ARRAY(Text))),
    )
    .values(listed=false(), checked_at=func.now(), windows=0, last_window=null())
)
_HAS_RIGHT_COPY: Final = select(
    exists().where(
        REPLICAS.c.caf_file_id == bindparam("id"), REPLICAS.c.listed, REPLICAS.c.fault == ""
    )
)
_COPIES: Final = (
    select(
        REPLICAS.c.provider,
        REPLICAS.c.proof,
        REPLICAS.c.listed,
        REPLICAS.c.last_proven,
        REPLICAS.c.windows,
        REPLICAS.c.fault,
        REPLICAS.c.checked_at,
        REPLICAS.c.last_window,
    )
    .join(CAF_FILES, CAF_FILES.c.caf_file_id == REPLICAS.c.caf_file_id)
    .where(CAF_FILES.c.name == bindparam("chunk"))
    .order_by(REPLICAS.c.provider)
)


class Replicas(LedgerPart):
    """Records the copies of chunks."""

    def list(self, chunk: str) -> Sequence[KnownCopy]:
        return [KnownCopy(**row._asdict()) for row in self._rows(_COPIES, chunk=chunk)]

    def record_verified(self, lease: Lease, chunk: str, copies: Sequence[Copy]) -> None:
        """Move uploading → verified. Unlist other copies."""
        with self._engine.begin() as connection:
            states = ChunkState.UPLOADING, ChunkState.VERIFIED
            changes = {"verified_at": func.now()}
            moved = move_row(connection, lease, chunk, *states, copy_changes=changes)
            record_verified(connection, moved.caf_file_id, copies)

    def record_checks(
        self,
        lease: Lease,
        chunk: str,
        checks: Sequence[CopyCheck],
        *,
        again_in: float | None = None,
        enough: int = 0,
    ) -> None:
        """Write the results of a check of a located or damaged chunk's copies.

        Copies without a result are no longer listed. The next proof window is due for a check in
        `again_in` seconds (None: never), unless `enough` copies have `WINDOWS_REQUIRED` windows.
        """
        with self._engine.begin() as connection:
            caf_file_id = require_state(connection, lease, chunk, GOOD, "checked")
            unlist(connection, caf_file_id, but=[check.copy.provider for check in checks])
            for check in checks:
                record_check(connection, caf_file_id, check)
            values = {
                "id": caf_file_id,
                "again_in": again_in,
                "enough": enough,
                "required": WINDOWS_REQUIRED,
                "unanswered": any(check.unanswered for check in checks),
            }
            connection.exec_driver_sql(query("record_copy_check"), values)
            connection.execute(_END_FULL_READ, {"id": caf_file_id})

    def record_fault(self, lease: Lease, chunk: str, check: CopyCheck) -> None:
        """Write a copy's fault before the other copies are known. They keep what they have."""
        with self._engine.begin() as connection:
            caf_file_id = require_state(connection, lease, chunk, GOOD, "checked")
            record_check(connection, caf_file_id, check)
            connection.execute(_END_FULL_READ, {"id": caf_file_id})

    def record_unanswered(self, lease: Lease, chunk: str) -> None:
        """No copy answered. Nothing else changes."""
        with self._engine.begin() as connection:
            caf_file_id = require_state(connection, lease, chunk, GOOD, "checked")
            connection.execute(_UNANSWERED, {"id": caf_file_id})

    def record_full_read(
        self, lease: Lease, chunk: str, provider: str, *, opened_with: str | None = None
    ) -> None:
        """Record that a provider returned all stored bytes, with the right Merkle root.

        `opened_with` is the recipient of the identity that opened them. The record ends with the
        copy, or when the chunk becomes damaged, or is located or posted again.
        """
        with self._engine.begin() as connection:
            caf_file_id = require_state(connection, lease, chunk, GOOD, "read back")
            values = {"id": caf_file_id, "provider": provider, "opened_with": opened_with}
            connection.execute(_READ_BACK, values)
            connection.execute(_READ_WHOLE, {"id": caf_file_id})

    def record_whole(self, lease: Lease, chunk: str) -> None:
        """Record that a restored chunk's bytes have its root, and are those that made its rows."""
        with self._engine.begin() as connection:
            caf_file_id = require_state(connection, lease, chunk, GOOD, "read as a whole")
            connection.execute(_READ_WHOLE, {"id": caf_file_id})


def record_check(connection: Connection, caf_file_id: int, check: CopyCheck) -> None:
    """Write the result of a check of one copy."""
    values = {
        **asdict(check.copy),
        "id": caf_file_id,
        "window": check.window,
        "fault": check.fault,
        "apart": check.apart,
    }
    connection.exec_driver_sql(query("record_replica_check"), values)


def forget_full_read(connection: Connection, caf_file_id: int) -> None:
    """Delete the record of the chunk's full read."""
    connection.execute(delete(FULL_READS).where(FULL_READS.c.caf_file_id == caf_file_id))


def record_verified(connection: Connection, caf_file_id: int, copies: Sequence[Copy]) -> None:
    """Write copies that were read back. Unlist others."""
    unlist(connection, caf_file_id)
    for copy in copies:
        replica = {"provider": copy.provider, "proof": copy.proof, "last_proven": copy.last_proven}
        connection.execute(_VERIFIED, {**replica, "id": caf_file_id})


def unlist(connection: Connection, caf_file_id: int, *, but: Sequence[str] = ()) -> None:
    """Mark copies as no longer listed."""
    connection.execute(_UNLIST, {"id": caf_file_id, "but": list(but)})


def require_right_copy(connection: Connection, caf_file_id: int, chunk: str) -> None:
    """Raise IllegalMove if no listed copy had right bytes at the last check."""
    if not connection.execute(_HAS_RIGHT_COPY, {"id": caf_file_id}).scalar_one():
        raise IllegalMove(
            f"chunk {chunk} cannot be located again: no listed copy has the right bytes",
            hint="repair it first",
        )
