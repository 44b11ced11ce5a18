"""The copies of a chunk in the ledger, and what looks at them found over time.

Functions over the caller's transaction, which has locked the chunk's row. Not here: who looks and what a finding means
(`proofs`), which states allow it (`ledger`).
"""

from collections.abc import Sequence
from datetime import UTC

from sqlalchemy import Connection, text

from caf_pipeline.errors import IllegalMove
from caf_pipeline.interfaces import Copy, CopyCheck, KnownCopy

_VERIFIED = text(
    """
    INSERT INTO copies AS old (caf_file_id, provider, proof, last_proven) VALUES (:id, :provider, :proof, :last_proven)
    ON CONFLICT (caf_file_id, provider) DO UPDATE SET proof = excluded.proof, listed = true, fault = '', checked_at = now(),
        last_proven = coalesce(excluded.last_proven, old.last_proven)
    """
)
# A window counts once, and one that is not later than the last one seen says nothing new.
_LOOKED_AT = text(
    """
    INSERT INTO copies AS old (caf_file_id, provider, proof, last_proven, last_window, windows, fault)
    VALUES (:id, :provider, :proof, :last_proven, :window, CASE WHEN CAST(:window AS bigint) IS NULL THEN 0 ELSE 1 END, :fault)
    ON CONFLICT (caf_file_id, provider) DO UPDATE SET
        proof = excluded.proof, listed = true, fault = excluded.fault, checked_at = now(),
        last_proven = coalesce(excluded.last_proven, old.last_proven),
        last_window = greatest(excluded.last_window, old.last_window),
        windows = old.windows + CASE WHEN excluded.last_window > coalesce(old.last_window, -1) THEN 1 ELSE 0 END
    """
)
_KNOWN = text(
    """
    SELECT provider, proof, listed, last_proven, windows, fault, copies.checked_at
    FROM copies JOIN caf_files USING (caf_file_id) WHERE name = :chunk ORDER BY provider
    """
)


def record_verified(connection: Connection, caf_file_id: int, copies: Sequence[Copy]) -> None:
    """Write the copies that were read back; others that were known are listed no more."""
    _unlist(connection, caf_file_id)
    for copy in copies:
        facts = {"id": caf_file_id, "provider": copy.provider, "proof": copy.proof, "last_proven": copy.last_proven}
        connection.execute(_VERIFIED, facts)


def record_look(connection: Connection, caf_file_id: int, checks: Sequence[CopyCheck]) -> None:
    """Write what a look found; copies that it did not find are listed no more."""
    _unlist(connection, caf_file_id)
    for check in checks:
        connection.execute(
            _LOOKED_AT,
            {
                "id": caf_file_id,
                "provider": check.copy.provider,
                "proof": check.copy.proof,
                "last_proven": check.copy.last_proven,
                "window": check.window,
                "fault": check.fault,
            },
        )
    connection.execute(text("UPDATE caf_files SET checked_at = now() WHERE caf_file_id = :id"), {"id": caf_file_id})


def end_listing(connection: Connection, caf_file_id: int) -> None:
    """List no copy any more: those that are known are of a post that the chain no longer has."""
    _unlist(connection, caf_file_id)


def require_right_copy(connection: Connection, caf_file_id: int, chunk: str) -> None:
    """Raise IllegalMove where the last look found no listed copy with right bytes."""
    statement = text("SELECT EXISTS (SELECT FROM copies WHERE caf_file_id = :id AND listed AND fault = '')")
    if not connection.execute(statement, {"id": caf_file_id}).scalar_one():
        raise IllegalMove(
            f"chunk {chunk} cannot be located again: no copy of it was seen listed and right", hint="repair it first"
        )


def known_copies(connection: Connection, chunk: str) -> Sequence[KnownCopy]:
    """Return the copies that were ever recorded of a chunk, by provider."""
    rows = connection.execute(_KNOWN, {"chunk": chunk}).all()
    return [KnownCopy(**{**row._asdict(), "checked_at": row.checked_at.astimezone(UTC)}) for row in rows]


def _unlist(connection: Connection, caf_file_id: int) -> None:
    connection.execute(text("UPDATE copies SET listed = false, checked_at = now() WHERE caf_file_id = :id"), {"id": caf_file_id})
