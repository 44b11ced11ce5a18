"""What providers have of a chunk's copy, in the ledger, and what looks at them found over time.

The functions are over the caller's transaction, which has locked the chunk's row.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import Connection

from caf_pipeline.chunk_state import GOOD, ChunkState
from caf_pipeline.errors import IllegalMove
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.moves import move_row, require_state
from caf_pipeline.ledger.records import WINDOWS_REQUIRED, CopyCheck, KnownCopy
from caf_pipeline.store.protocol import Copy, Lease, Sample

_VERIFIED = """
    INSERT INTO replicas AS old (caf_file_id, store, provider, proof, last_proven)
    SELECT caf_file_id, store, %(provider)s, %(proof)s, CAST(%(last_proven)s AS bigint)
    FROM chunk_copies WHERE caf_file_id = %(id)s
    ON CONFLICT (caf_file_id, store, provider) DO UPDATE SET
        proof = excluded.proof, listed = true, fault = '', checked_at = now(),
        last_proven = coalesce(excluded.last_proven, old.last_proven)
    """
# A window counts once, and one that is not later than the last one seen says nothing new. One that does not follow it begins
# the count again, except for windows that count apart. They are counted from the last trouble on: what a copy proved before it
# was found wrong, or was listed no more, says nothing of what it is now.
_LOOKED_AT = """
    INSERT INTO replicas AS old (caf_file_id, store, provider, proof, last_proven, last_window, windows, fault)
    SELECT caf_file_id, store, %(provider)s, %(proof)s, CAST(%(last_proven)s AS bigint),
        CASE WHEN %(fault)s = '' THEN CAST(%(window)s AS bigint) END,
        CASE WHEN %(fault)s = '' AND CAST(%(window)s AS bigint) IS NOT NULL THEN 1 ELSE 0 END, %(fault)s
    FROM chunk_copies WHERE caf_file_id = %(id)s
    ON CONFLICT (caf_file_id, store, provider) DO UPDATE SET
        proof = excluded.proof, listed = true, fault = excluded.fault, checked_at = now(),
        last_proven = coalesce(excluded.last_proven, old.last_proven),
        last_window = CASE WHEN excluded.fault <> '' THEN NULL WHEN old.listed AND old.fault = ''
            THEN greatest(excluded.last_window, old.last_window) ELSE excluded.last_window END,
        windows = CASE WHEN excluded.fault <> '' THEN 0 WHEN NOT old.listed OR old.fault <> '' THEN excluded.windows
            WHEN excluded.last_window IS NULL OR excluded.last_window <= old.last_window THEN old.windows
            WHEN %(apart)s OR excluded.last_window = old.last_window + 1 THEN old.windows + 1 ELSE 1 END
    """
_SEEN = """
    UPDATE chunk_copies SET checked_at = now(), suspected_at = NULL, unanswered_at = CASE WHEN %(unanswered)s THEN now() END,
        look_again_at = CASE WHEN %(enough)s > (SELECT count(*) FROM replicas WHERE caf_file_id = %(id)s AND listed AND fault = ''
            AND windows >= %(required)s) THEN now() + make_interval(secs => CAST(%(again_in)s AS double precision)) END
    WHERE caf_file_id = %(id)s
    """
# What came back from a copy counts as long as that copy does.
_END_FULL_READ = """
    DELETE FROM full_reads WHERE caf_file_id = %(id)s AND NOT EXISTS (SELECT FROM replicas
        WHERE replicas.caf_file_id = %(id)s AND replicas.provider = full_reads.provider AND listed AND fault = '')
    """
_FULL_READ = """
    INSERT INTO full_reads (caf_file_id, store, provider)
    SELECT caf_file_id, store, %(provider)s FROM chunk_copies WHERE caf_file_id = %(id)s
    ON CONFLICT (caf_file_id, store) DO UPDATE SET provider = excluded.provider, read_at = now()
    """
_KNOWN = """
    SELECT provider, proof, listed, last_proven, windows, fault, replicas.checked_at, last_window
    FROM replicas JOIN caf_files USING (caf_file_id) WHERE name = %(chunk)s ORDER BY provider
    """


class Replicas(LedgerPart):
    """The copies of chunks."""

    def known_copies(self, chunk: str) -> Sequence[KnownCopy]:
        """Return the copies that were ever recorded of a chunk, by provider."""
        with self._engine.begin() as connection:
            rows = connection.exec_driver_sql(_KNOWN, {"chunk": chunk}).fetchall()
        return [KnownCopy(**row._asdict()) for row in rows]

    def record_copies(self, lease: Lease, chunk: str, copies: Sequence[Copy]) -> None:
        """uploading → verified, with the copies that proved it; others that were known are listed no more."""
        with self._engine.begin() as connection:
            states = ChunkState.UPLOADING, ChunkState.VERIFIED
            moved = move_row(connection, lease, chunk, *states, copy_changes="verified_at = now()")
            record_verified(connection, moved.caf_file_id, copies)

    def record_checks(
        self, lease: Lease, chunk: str, checks: Sequence[CopyCheck], *, again_in: float | None = None, enough: int = 0
    ) -> None:
        """Write what a look at a located or damaged chunk's copies found; copies that it did not find are listed no more.

        Args:
            lease: on the chunk.
            chunk: its name.
            checks: one for each copy that is listed.
            again_in: seconds after which a look can see the window after those that count; None where there are no windows.
            enough: no such look is waited for where so many copies have `WINDOWS_REQUIRED` windows.
        """
        with self._engine.begin() as connection:
            caf_file_id = require_state(connection, lease, chunk, GOOD, "looked at")
            unlist(connection, caf_file_id, but=[check.copy.provider for check in checks])
            for check in checks:
                facts = {**asdict(check.copy), "id": caf_file_id, "window": check.window, "fault": check.fault}
                connection.exec_driver_sql(_LOOKED_AT, {**facts, "apart": check.apart})
            unanswered = any(check.unanswered for check in checks)
            facts = {"id": caf_file_id, "again_in": again_in, "enough": enough, "required": WINDOWS_REQUIRED}
            facts |= {"unanswered": unanswered}
            connection.exec_driver_sql(_SEEN, facts)
            connection.exec_driver_sql(_END_FULL_READ, {"id": caf_file_id})

    def record_unanswered(self, lease: Lease, chunk: str) -> None:
        """Record that no copy of a located or damaged chunk answered. Nothing else of the chunk changes."""
        with self._engine.begin() as connection:
            caf_file_id = require_state(connection, lease, chunk, GOOD, "looked at")
            statement = "UPDATE chunk_copies SET unanswered_at = now() WHERE caf_file_id = %(id)s"
            connection.exec_driver_sql(statement, {"id": caf_file_id})

    def record_read_back(self, lease: Lease, chunk: str, provider: str) -> None:
        """Remember that all stored bytes of a located or damaged chunk came back from a provider just now with its root.

        Forgotten when the chunk becomes damaged, is located again, or is posted again, and when that copy counts no more.
        """
        with self._engine.begin() as connection:
            caf_file_id = require_state(connection, lease, chunk, GOOD, "read back")
            connection.exec_driver_sql(_FULL_READ, {"id": caf_file_id, "provider": provider})


def forget_full_read(connection: Connection, caf_file_id: int) -> None:
    """Let what came back of the chunk count no more."""
    connection.exec_driver_sql("DELETE FROM full_reads WHERE caf_file_id = %(id)s", {"id": caf_file_id})


def record_verified(connection: Connection, caf_file_id: int, copies: Sequence[Copy]) -> None:
    """Write the copies that were read back; others that were known are listed no more."""
    unlist(connection, caf_file_id)
    for copy in copies:
        connection.exec_driver_sql(_VERIFIED, {**asdict(copy), "id": caf_file_id})


def unlist(connection: Connection, caf_file_id: int, *, but: Sequence[str] = ()) -> None:
    """List no copy any more, except those of these providers."""
    statement = (
        "UPDATE replicas SET listed = false, checked_at = now(), windows = 0, last_window = NULL"
        " WHERE caf_file_id = %(id)s AND provider <> ALL(CAST(%(but)s AS text[]))"
    )
    connection.exec_driver_sql(statement, {"id": caf_file_id, "but": list(but)})


def require_right_copy(connection: Connection, caf_file_id: int, chunk: str) -> None:
    """Raise IllegalMove where the last look found no listed copy with right bytes."""
    statement = "SELECT EXISTS (SELECT FROM replicas WHERE caf_file_id = %(id)s AND listed AND fault = '')"
    if not connection.exec_driver_sql(statement, {"id": caf_file_id}).scalar_one():
        raise IllegalMove(
            f"chunk {chunk} cannot be located again: no copy of it was seen listed and right", hint="repair it first"
        )


def samples_as_json(samples: Sequence[Sample]) -> str:
    """Return what copies are compared with, as `caf_files.samples` holds it."""
    return json.dumps([{"offset": one.offset, "length": one.length, "sha256": one.sha256.hex()} for one in samples])
