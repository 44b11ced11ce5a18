"""A chunk that only the store knew, written into the ledger: its row, its plan's, its locations, skips and copies.

Objects come in by COPY into a table of the
transaction's own, and from there past what the ledger has already: memory does not grow with their number, and the order in
which chunks are restored does not matter, except that of two chunks with the same object the first one keeps it.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import psycopg
from sqlalchemy import Connection

from caf_pipeline.chunk_state import GOOD, NOT_POSTED, ChunkState, CopyState
from caf_pipeline.errors import ClaimConflict, IllegalMove, IntegrityError, LedgerError
from caf_pipeline.ledger.copy import LOCATE_RESTORED, copy_location_batches, end_claims, forget_pending, load_skips
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.header_sets import Batches, record_header_sets
from caf_pipeline.ledger.log_times import forget_log_times, record_log_times
from caf_pipeline.ledger.moves import require_state
from caf_pipeline.ledger.parts import follow_move, has_part, import_part, record_part
from caf_pipeline.ledger.records import RemoteChunk, Skip
from caf_pipeline.ledger.replicas import record_verified, samples_as_json
from caf_pipeline.ledger.transactions import before_move
from caf_pipeline.store.protocol import Lease

if TYPE_CHECKING:
    from caf_pipeline.inventory.manifest import LogTimes

UNKNOWN_PLAN: Final = b"restored"
"""Begins the hash of a plan whose own is not known: with 40 bytes it is none of the 32 that a plan's hash has."""

_KNOWN: Final = "SELECT state FROM chunks WHERE name = %(name)s"
_PLAN: Final = "SELECT plan_id, sha256 FROM plans WHERE source_id = %(source_id)s AND name = %(name)s"
_OTHER_PLAN: Final = "SELECT name FROM plans WHERE sha256 = %(sha256)s AND (source_id, name) <> (%(source_id)s, %(name)s)"
_NEW_PLAN: Final = """
    INSERT INTO plans (source_id, name, sha256, snapshot, folder, object_count, object_bytes)
    VALUES (%(source_id)s, %(name)s, %(sha256)s, %(snapshot)s, %(folder)s, 0, 0) RETURNING plan_id
    """
_TELL_HASH: Final = "UPDATE plans SET sha256 = %(sha256)s WHERE plan_id = %(plan_id)s"
# A plan that was restored is as large as its chunks that are known; of one that was registered all of them are.
_COUNT_PLAN: Final = """
    UPDATE plans SET object_count = greatest(plans.object_count, sums.objects),
        object_bytes = greatest(plans.object_bytes, sums.bytes)
    FROM (SELECT coalesce(sum(object_count) FILTER (WHERE part IS NULL), 0)
            + count(DISTINCT (file_path, version_id, etag, object_parts.object_bytes, rewritten_at))
            FILTER (WHERE part IS NOT NULL) AS objects, sum(caf_files.object_bytes) AS bytes
        FROM caf_files LEFT JOIN object_parts USING (caf_file_id) WHERE caf_files.plan_id = %(plan_id)s) AS sums
    WHERE plan_id = %(plan_id)s
    """
_NEW_CHUNK: Final = """
    INSERT INTO caf_files (name, source_id, plan_id, number, state, reason, object_count, object_bytes, expected_size_bytes,
        caf_size_bytes, stored_size_bytes, member_count, member_bytes, skipped_count, released_count, samples, sealed_at,
        located_at, restored_at, adopted_at)
    VALUES (%(name)s, %(source_id)s, %(plan_id)s, %(number)s, 'located', '', %(object_count)s, %(object_bytes)s,
        %(stored_size_bytes)s, %(stored_size_bytes)s, %(stored_size_bytes)s, %(member_count)s, %(member_bytes)s,
        %(skipped_count)s, %(released_count)s, CAST(%(samples)s AS jsonb), now(), now(), now(),
        CASE WHEN %(adopted)s THEN now() END)
    RETURNING caf_file_id
    """
_REPLACE_CHUNK: Final = """
    UPDATE caf_files SET state = 'located', reason = '', attempts = 0, object_count = %(object_count)s,
        object_bytes = %(object_bytes)s, caf_size_bytes = %(stored_size_bytes)s, stored_size_bytes = %(stored_size_bytes)s,
        member_count = %(member_count)s, member_bytes = %(member_bytes)s, skipped_count = %(skipped_count)s,
        released_count = %(released_count)s, samples = CAST(%(samples)s AS jsonb), tail_start = NULL, tail_sha256 = NULL,
        updated_at = now(), sealed_at = now(), located_at = now(), restored_at = now()
    WHERE name = %(name)s RETURNING caf_file_id
    """
_NEW_COPY: Final = """
    INSERT INTO chunk_copies (caf_file_id, store, state, damage, merkle_root, proof_type, owner, start, posted_at, verified_at)
    VALUES (%(id)s, %(store)s, %(copy_state)s, %(damage)s, %(merkle_root)s, %(proof_type)s, %(owner)s, %(start)s, now(), now())
    """
_HAS_CLAIMS: Final = "SELECT EXISTS (SELECT FROM claims WHERE source_id = %(source_id)s)"
# LATERAL with LIMIT: one look-up an object, whatever the planner knows of the table just filled.
_CLAIMED: Final = """
    SELECT restoring.file_path, claimed.name
    FROM restoring CROSS JOIN LATERAL (
        SELECT caf_files.name FROM claims JOIN caf_files ON caf_files.caf_file_id = claims.caf_file_id
        WHERE claims.source_id = restoring.source_id AND claims.file_path = restoring.file_path
            AND claims.version_id = restoring.version_id AND claims.etag = restoring.etag
            AND claims.size_bytes = restoring.size_bytes AND claims.rewritten_at = restoring.rewritten_at LIMIT 1) AS claimed
    LIMIT 1
    """
_CLAIMED_PART: Final = """
    SELECT file_path, name FROM claims JOIN caf_files USING (caf_file_id)
    WHERE claims.source_id = %(source_id)s AND file_path = %(key)s
        AND object_version(version_id, etag, size_bytes, rewritten_at) = %(object_version)s AND plan_id <> %(plan_id)s
    """
_END_SKIPS: Final = (
    "DELETE FROM skipped_objects AS old USING restoring WHERE old.source_id = restoring.source_id"
    " AND old.file_path = restoring.file_path AND old.version_id = restoring.version_id AND old.etag = restoring.etag"
    " AND old.size_bytes = restoring.size_bytes AND old.rewritten_at = restoring.rewritten_at"
)
_SAME: Final = (
    "old.source_id = %(source_id)s AND old.file_path = skipping.file_path AND old.version_id = skipping.version_id"
    " AND old.etag = skipping.etag AND old.size_bytes = skipping.size_bytes AND old.rewritten_at = skipping.rewritten_at"
)
# Of several chunks that skipped an object the one posted last tells why. One that is not posted yet, and a plan, came later.
_SKIP_LATER: Final = f"""
    UPDATE skipped_objects AS old SET times = old.times + 1, reason = skipping.reason, detail = skipping.detail,
        last_modified = skipping.last_modified, caf_file_id = %(caf_file_id)s,
        retry_at = coalesce(now() + retry_after, 'infinity')
    FROM skipping, chunk_copies AS copies WHERE {_SAME} AND copies.caf_file_id = old.caf_file_id AND copies.start < %(start)s
    """
_SKIP_EARLIER: Final = f"""
    UPDATE skipped_objects AS old SET times = old.times + 1
    FROM skipping WHERE {_SAME} AND old.caf_file_id IS DISTINCT FROM %(caf_file_id)s
    """
_SKIP_NEW: Final = """
    INSERT INTO skipped_objects (source_id, file_path, version_id, etag, size_bytes, rewritten_at, reason, detail, last_modified,
        caf_file_id, retry_at)
    SELECT %(source_id)s, file_path, version_id, etag, size_bytes, rewritten_at, reason, detail, last_modified, %(caf_file_id)s,
        coalesce(now() + retry_after, 'infinity')
    FROM skipping WHERE NOT EXISTS (
        SELECT FROM file_locations AS known JOIN chunks ON chunks.caf_file_id = known.caf_file_id
        WHERE known.source_id = %(source_id)s AND known.file_path = skipping.file_path
            AND known.version_id = skipping.version_id AND known.etag = skipping.etag AND known.size_bytes = skipping.size_bytes
            AND known.rewritten_at = skipping.rewritten_at AND known.part = 0 AND state = ANY(%(good)s))
    ON CONFLICT DO NOTHING
    """


class _Superseded(Exception):
    """Rolls the transaction back where other chunks have every object of this one already, so that nothing of it is written.

    It never leaves `restore_chunk`.
    """


class ChunkImport(LedgerPart):
    """Restores chunks."""

    def begin_rebuild(self, source: str) -> None:
        """Write that the source is being restored, until `end_rebuild`."""
        with self._of_source(source) as (connection, source_id):
            statement = "INSERT INTO rebuilds (source_id) VALUES (%(source_id)s) ON CONFLICT (source_id) DO NOTHING"
            connection.exec_driver_sql(statement, {"source_id": source_id})

    def end_rebuild(self, source: str) -> None:
        """Write that all was restored, or that the rest is not to be."""
        with self._of_source(source) as (connection, source_id):
            connection.exec_driver_sql("DELETE FROM rebuilds WHERE source_id = %(source_id)s", {"source_id": source_id})

    def rebuild_began_at(self, source: str) -> datetime | None:
        """Return when the rebuild of the source began that has not restored all; None where there is none such, or no source."""
        statement = "SELECT began_at FROM rebuilds JOIN sources USING (source_id) WHERE name = %(source)s"
        with self._engine.begin() as connection:
            found: datetime | None = connection.exec_driver_sql(statement, {"source": source}).scalar_one_or_none()
            return found

    def leave_posts(self, source: str, roots: Sequence[bytes], *, superseded: bool) -> None:
        """Write that posts of these Merkle roots are no chunks of this ledger, and need not be.

        `superseded`: other chunks have all of their objects; else an operator ordered a second copy.
        """
        with self._of_source(source) as (connection, source_id):
            connection.exec_driver_sql(
                "INSERT INTO left_posts (source_id, merkle_root, superseded)"
                " SELECT %(source_id)s, root, %(superseded)s FROM unnest(CAST(%(roots)s AS bytea[])) AS left_now (root)"
                " ON CONFLICT (source_id, merkle_root) DO UPDATE SET superseded = excluded.superseded",
                {"source_id": source_id, "roots": list(roots), "superseded": superseded},
            )

    def left_posts(self, source: str) -> Set[bytes]:
        """Return the Merkle roots that `leave_posts` wrote; none of an unknown source."""
        statement = "SELECT merkle_root FROM left_posts JOIN sources USING (source_id) WHERE name = %(source)s"
        with self._engine.begin() as connection:
            return {bytes(root) for root in connection.exec_driver_sql(statement, {"source": source}).scalars().all()}

    def unknown_posts(self, source: str) -> int:
        """Return how many posts the last look found that the ledger does not know: while there are some, nothing is posted."""
        statement = "SELECT coalesce(max(unknown), 0) FROM store_looks JOIN sources USING (source_id) WHERE name = %(source)s"
        with self._engine.begin() as connection:
            return int(connection.exec_driver_sql(statement, {"source": source}).scalar_one())

    def has_live_post(self, chunk: str) -> bool:
        """Tell whether a transaction of this ledger posts the chunk, or may."""
        statement = (
            "SELECT EXISTS (SELECT FROM transaction_posts JOIN caf_files USING (caf_file_id) WHERE name = %(chunk)s AND live)"
        )
        with self._engine.begin() as connection:
            return bool(connection.exec_driver_sql(statement, {"chunk": chunk}).scalar_one())

    def restore_chunk(
        self,
        chunk: RemoteChunk,
        rows: Batches,
        skips: Iterable[Skip],
        *,
        plan_folder: str,
        fault: str = "",
        logs: "Collection[LogTimes] | None" = None,
        lease: Lease | None = None,
    ) -> int:
        """Write a chunk that the ledger does not know, with its plan where that is missing, rows and skips, at once.

        Objects that are located already in a chunk in good standing keep that location, and are skipped no more. Returns the
        location rows written; 0 where other chunks have all of its objects: then nothing at all was written.

        Args:
            chunk: as it was read from the store.
            rows: returns batches of LOCATION_SCHEMA.
            skips: of the chunk.
            plan_folder: where a plan that is missing is said to be.
            fault: why the chunk is `damaged`; "" where it is `located`.
            logs: the times of its clp-s archives; None where its packing did not look for any.
            lease: of the chunk of this name that the ledger has and never posted: this one takes its place.

        Raises:
            LeaseLost: of `lease`.
            LedgerError: the ledger has a chunk of this name, or the rows and skips are not as many as the chunk says, or name an
                object twice; nothing was written.
            ClaimConflict: a chunk under way claims one of its objects; nothing was written.
            IntegrityError: the plan that it names is another one in the ledger; nothing was written.
        """
        # The lock as for a new plan: the two must not take the same object, each unseen by the other.
        with suppress(_Superseded), self._of_source(chunk.source, lock="FOR NO KEY UPDATE") as (connection, source_id):
            state = connection.exec_driver_sql(_KNOWN, {"name": chunk.name}).scalar_one_or_none()
            if state is not None and lease is not None:
                _make_way(connection, lease, chunk.name)
            elif state is not None:
                raise LedgerError(
                    f"the ledger already has chunk {chunk.name}, which is '{state}'", hint="it is not to be restored"
                )
            plan_id = _plan_id(connection, source_id, chunk, plan_folder)
            caf_file_id = _write_chunk(connection, source_id, plan_id, chunk, replaces=lease is not None)
            _write_copy(connection, caf_file_id, self._store, chunk, fault)
            connection.exec_driver_sql("CREATE TEMPORARY TABLE restoring (LIKE file_locations INCLUDING DEFAULTS) ON COMMIT DROP")
            row_count = copy_location_batches(connection, "restoring", source_id, caf_file_id, rows())
            _require_count(chunk, "members", chunk.member_count, row_count + (chunk.part is not None))
            _refuse_claimed(connection, source_id, plan_id, chunk)
            written = _locate(connection, chunk)
            if chunk.part is not None:
                if has_part(connection, caf_file_id):
                    record_part(connection, "file_locations", caf_file_id, chunk.part)
                    follow_move(connection, caf_file_id, ChunkState.LOCATED)
                else:
                    import_part(connection, source_id, plan_id, caf_file_id, chunk.part)
                written = 1
            connection.exec_driver_sql(_END_SKIPS)
            _skip(connection, source_id, caf_file_id, chunk, skips)
            record_log_times(connection, caf_file_id, logs)
            record_header_sets(connection, rows(), chunk.part)
            record_verified(connection, caf_file_id, chunk.copies)
            connection.exec_driver_sql(_COUNT_PLAN, {"plan_id": plan_id})
            return written
        return 0


def _plan_id(connection: Connection, source_id: int, chunk: RemoteChunk, folder: str) -> int:
    """Return the chunk's plan, written where the ledger does not have it; its hash where that was not known so far."""
    names = {"source_id": source_id, "name": chunk.plan}
    found = connection.exec_driver_sql(_PLAN, names).fetchone()
    unknown = UNKNOWN_PLAN + hashlib.sha256(f"{source_id}\0{chunk.plan}".encode()).digest()
    sha256 = chunk.plan_sha256 or (unknown if found is None else found.sha256)
    if found is not None and sha256 == found.sha256:
        return int(found.plan_id)
    other = connection.exec_driver_sql(_OTHER_PLAN, {**names, "sha256": sha256}).fetchone()
    if other is not None or (found is not None and found.sha256 != unknown):
        raise IntegrityError(
            f"chunk {chunk.name} gives its plan {chunk.plan} the hash {sha256.hex()}, but the ledger has another"
        )
    if found is None:
        values = {**names, "sha256": sha256, "snapshot": chunk.snapshot, "folder": folder}
        return int(connection.exec_driver_sql(_NEW_PLAN, values).scalar_one())
    connection.exec_driver_sql(_TELL_HASH, {"sha256": sha256, "plan_id": found.plan_id})
    return int(found.plan_id)


def _make_way(connection: Connection, lease: Lease, chunk: str) -> None:
    """End what a chunk that was never posted claims and asks for.

    Raises:
        LeaseLost. IllegalMove: it was posted meanwhile, or a transaction that posts it may be included.
    """
    caf_file_id = require_state(connection, lease, chunk, (*NOT_POSTED, ChunkState.PARKED), "replaced by a stored file")
    before_move(connection, caf_file_id, chunk, ChunkState.PARKED, ChunkState.WITHDRAWN)
    connection.exec_driver_sql("DELETE FROM chunk_copies WHERE caf_file_id = %(id)s AND start IS NULL", {"id": caf_file_id})
    was_posted = "SELECT EXISTS (SELECT FROM chunk_copies WHERE caf_file_id = %(id)s)"
    if connection.exec_driver_sql(was_posted, {"id": caf_file_id}).scalar_one():
        raise IllegalMove(f"chunk {chunk} cannot be replaced by a stored file: it was posted", hint=f"'caf unpark {chunk}'")
    forget_pending(connection, caf_file_id)
    forget_log_times(connection, caf_file_id)
    if not has_part(connection, caf_file_id):
        end_claims(connection, caf_file_id)


def _write_chunk(connection: Connection, source_id: int, plan_id: int, chunk: RemoteChunk, *, replaces: bool) -> int:
    here = chunk.member_count + chunk.skipped_count
    object_count = here if chunk.object_count is None else chunk.object_count
    values: dict[str, Any] = {
        **asdict(chunk),
        "stored_size_bytes": chunk.file.posting.stored_size_bytes,
        "source_id": source_id,
        "plan_id": plan_id,
        "object_count": object_count,
        "object_bytes": chunk.member_bytes if chunk.object_bytes is None else chunk.object_bytes,
        "released_count": object_count - here,
        "adopted": chunk.manifest is None,
        "samples": samples_as_json(chunk.samples),
    }
    return int(connection.exec_driver_sql(_REPLACE_CHUNK if replaces else _NEW_CHUNK, values).scalar_one())


def _write_copy(connection: Connection, caf_file_id: int, store: str, chunk: RemoteChunk, fault: str) -> None:
    values = {
        **asdict(chunk.file.posting),
        "proof_type": chunk.file.proof_type,
        "id": caf_file_id,
        "store": store,
        "copy_state": CopyState.DAMAGED if fault else CopyState.VERIFIED,
        "damage": fault,
    }
    connection.exec_driver_sql(_NEW_COPY, values)


def _refuse_claimed(connection: Connection, source_id: int, plan_id: int, chunk: RemoteChunk) -> None:
    if not connection.exec_driver_sql(_HAS_CLAIMS, {"source_id": source_id}).scalar_one():
        return
    if chunk.part is not None:
        names = {"source_id": source_id, "plan_id": plan_id, "key": chunk.part.key, "object_version": chunk.part.object_version}
        claimed = connection.exec_driver_sql(_CLAIMED_PART, names).fetchone()
    else:
        claimed = connection.exec_driver_sql(_CLAIMED).fetchone()
    if claimed is not None:
        raise ClaimConflict(
            f"'{claimed.file_path}' of chunk {chunk.name} is claimed by chunk {claimed.name}, which is under way",
            hint="let that chunk be finished, or withdraw it; then restore again",
        )


def _locate(connection: Connection, chunk: RemoteChunk) -> int:
    try:
        written = connection.exec_driver_sql(LOCATE_RESTORED, {"good": GOOD}).rowcount
    except psycopg.errors.CardinalityViolation as error:
        raise LedgerError(
            f"chunk {chunk.name} names an object twice", hint="'caf list' and 'caf extract' read it as a file"
        ) from error
    if chunk.member_count and not written and not chunk.part:
        raise _Superseded
    return written


def _skip(connection: Connection, source_id: int, caf_file_id: int, chunk: RemoteChunk, skips: Iterable[Skip]) -> None:
    count = load_skips(connection, skips)
    _require_count(chunk, "skipped objects", chunk.skipped_count, count)
    if count:
        values = {"source_id": source_id, "caf_file_id": caf_file_id, "start": chunk.file.posting.start, "good": GOOD}
        connection.exec_driver_sql(_SKIP_LATER, values)
        connection.exec_driver_sql(_SKIP_EARLIER, values)
        connection.exec_driver_sql(_SKIP_NEW, values)


def _require_count(chunk: RemoteChunk, what: str, said: int, found: int) -> None:
    if said != found:
        raise LedgerError(f"chunk {chunk.name} has {said} {what} by its own count, but {found} were found")
