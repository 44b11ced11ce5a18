"""The copies of a chunk in the ledger, and what looks at them found over time.

Functions over the caller's transaction, which has locked the chunk's row.
"""

import json
from collections.abc import Sequence
from datetime import UTC

from sqlalchemy import Connection, text

from caf_pipeline.errors import IllegalMove
from caf_pipeline.ledger.records import WINDOWS_REQUIRED, CopyCheck, KnownCopy
from caf_pipeline.store.protocol import Copy, Sample

_VERIFIED = text(
    """
    INSERT INTO copies AS old (caf_file_id, provider, proof, last_proven) VALUES (:id, :provider, :proof, :last_proven)
    ON CONFLICT (caf_file_id, provider) DO UPDATE SET proof = excluded.proof, listed = true, fault = '', checked_at = now(),
        last_proven = coalesce(excluded.last_proven, old.last_proven)
    """
)
# A window counts once, and one that is not later than the last one seen says nothing new. One that does not follow it begins
# the count again, except for windows that count apart. They are counted from the last trouble on: what a copy proved before it
# was found wrong, or was listed no more, says nothing of what it is now.
_LOOKED_AT = text(
    """
    INSERT INTO copies AS old (caf_file_id, provider, proof, last_proven, last_window, windows, fault)
    VALUES (:id, :provider, :proof, :last_proven, CASE WHEN :fault = '' THEN CAST(:window AS bigint) END,
        CASE WHEN :fault = '' AND CAST(:window AS bigint) IS NOT NULL THEN 1 ELSE 0 END, :fault)
    ON CONFLICT (caf_file_id, provider) DO UPDATE SET
        proof = excluded.proof, listed = true, fault = excluded.fault, checked_at = now(),
        last_proven = coalesce(excluded.last_proven, old.last_proven),
        last_window = CASE WHEN excluded.fault <> '' THEN NULL WHEN old.listed AND old.fault = ''
            THEN greatest(excluded.last_window, old.last_window) ELSE excluded.last_window END,
        windows = CASE WHEN excluded.fault <> '' THEN 0 WHEN NOT old.listed OR old.fault <> '' THEN excluded.windows
            WHEN excluded.last_window IS NULL OR excluded.last_window <= old.last_window THEN old.windows
            WHEN :apart OR excluded.last_window = old.last_window + 1 THEN old.windows + 1 ELSE 1 END
    """
)
# What came back from a copy counts as long as that copy does.
_SEEN = text(
    """
    UPDATE caf_files SET checked_at = now(),
        look_again_at = CASE WHEN :enough > (SELECT count(*) FROM copies WHERE caf_file_id = :id AND listed AND fault = ''
            AND windows >= :required) THEN now() + make_interval(secs => CAST(:again_in AS double precision)) END,
        read_back_at = CASE WHEN read_back_from IS NULL OR EXISTS (SELECT FROM copies WHERE caf_file_id = :id
            AND provider = read_back_from AND listed AND fault = '') THEN read_back_at END
    WHERE caf_file_id = :id
    """
)
_KNOWN = text(
    """
    SELECT provider, proof, listed, last_proven, windows, fault, copies.checked_at, last_window
    FROM copies JOIN caf_files USING (caf_file_id) WHERE name = :chunk ORDER BY provider
    """
)


def record_verified(connection: Connection, caf_file_id: int, copies: Sequence[Copy]) -> None:
    """Write the copies that were read back; others that were known are listed no more."""
    _unlist(connection, caf_file_id)
    for copy in copies:
        facts = {"id": caf_file_id, "provider": copy.provider, "proof": copy.proof, "last_proven": copy.last_proven}
        connection.execute(_VERIFIED, facts)


def record_look(
    connection: Connection, caf_file_id: int, checks: Sequence[CopyCheck], *, again_in: float | None, enough: int
) -> None:
    """Write what a look found, and when the next one is due; copies that it did not find are listed no more."""
    _unlist(connection, caf_file_id, but=[check.copy.provider for check in checks])
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
                "apart": check.apart,
            },
        )
    connection.execute(_SEEN, {"id": caf_file_id, "again_in": again_in, "enough": enough, "required": WINDOWS_REQUIRED})


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


def samples_as_json(samples: Sequence[Sample]) -> str:
    """Return what copies are compared with, as `caf_files.samples` holds it."""
    return json.dumps([{"offset": one.offset, "length": one.length, "sha256": one.sha256.hex()} for one in samples])


def _unlist(connection: Connection, caf_file_id: int, *, but: Sequence[str] = ()) -> None:
    statement = text(
        "UPDATE copies SET listed = false, checked_at = now(), windows = 0, last_window = NULL"
        " WHERE caf_file_id = :id AND provider <> ALL(CAST(:but AS text[]))"
    )
    connection.execute(statement, {"id": caf_file_id, "but": list(but)})
