"""The ledger on Postgres: sources, plans, chunks and their guarded moves, locations, and questions about them.

Each method is one transaction. A move is `UPDATE … WHERE name = … AND state = … AND epoch = …` together with all that
belongs to it; when it finds no row, nothing of it is written and the reason is looked up.

Its parts are the other modules of this folder.
Source: "Database" and "Promises" in docs/design.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from sqlalchemy import Connection, Row, text

from caf_pipeline.chunk_state import CLAIMING, ChunkState, require_move
from caf_pipeline.errors import IllegalMove, IntegrityError, LeaseLost, LedgerError, NotLocated, StagingError
from caf_pipeline.inventory.snapshot import CurrentException, SkipReason, is_supported
from caf_pipeline.ledger import current_content, leases
from caf_pipeline.ledger import maintenance as upkeep
from caf_pipeline.ledger.controls import Controls
from caf_pipeline.ledger.copy import (
    GOOD,
    copy_claims,
    copy_locations,
    copy_rows,
    record_skips,
    refuse_located,
    release_claims,
)
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.export import write_exceptions, write_located, write_standing
from caf_pipeline.ledger.import_chunk import Superseded, restore
from caf_pipeline.ledger.leases import LEASE_SECONDS, HeldLease
from caf_pipeline.ledger.provider_stats import ProviderRecords
from caf_pipeline.ledger.records import (
    Chunk,
    ChunkRows,
    CopyCheck,
    Holder,
    InventoryRecord,
    KnownCopy,
    LeaseRecord,
    ListedIdentity,
    LocatedVersion,
    Location,
    LocationRow,
    PlannedChunk,
    PlanRecord,
    Reservation,
    RestoredChunk,
    RunWait,
    Seal,
    Skip,
    SourceAccount,
    chunk_lease,
)
from caf_pipeline.ledger.replicas import (
    end_listing,
    known_copies,
    record_look,
    record_verified,
    require_right_copy,
    samples_as_json,
)
from caf_pipeline.ledger.transactions import PostgresTransactionLog, before_move, end_waiting
from caf_pipeline.ledger.waits import live_waits, record_waits
from caf_pipeline.store.protocol import Copy, Lease, Posting, Sample, SignedTransaction
from caf_pipeline.system.quantities import counted
from caf_pipeline.waits import Wait, Waits

_S = ChunkState

_OWN_METHOD: Final = {
    (_S.PACKING, _S.SEALED): "seal",
    (_S.PACKING, _S.EMPTY): "seal",
    (_S.POSTING, _S.POSTED): "record_posting",
    (_S.UPLOADING, _S.VERIFIED): "record_copies",
    (_S.VERIFIED, _S.LOCATED): "load_locations",
}
"""Moves that write more than the state, by the method that makes them; `move` refuses them."""

_KEEPS_REASON: Final = frozenset({_S.PARKED, _S.DAMAGED, _S.WITHDRAWN})

KEYS_PER_QUESTION: Final = 10_000  # a few MB of parameters

_PLANNED_CHUNK: Final = {
    "name": "text",
    "source_id": "int4",
    "plan_id": "int8",
    "number": "int4",
    "object_count": "int8",
    "object_bytes": "int8",
    "expected_size_bytes": "int8",
}
_PLAN = (
    "SELECT sources.name AS source, plans.sha256, plans.name, snapshot, folder, object_count, object_bytes"
    " FROM plans JOIN sources USING (source_id)"
)
_CHUNK: Final = """
    SELECT caf_file_id, caf_files.name, sources.name AS source, archive_id, plans.name AS plan, folder AS plan_folder,
        number, state, epoch, attempts, caf_files.object_count, caf_files.object_bytes, expected_size_bytes,
        caf_size_bytes, stored_size_bytes, member_count, member_bytes, skipped_count, released_count, merkle_root,
        proof_type, owner, start, {samples} AS samples, reason, updated_at, located_at, checked_at, read_back_at,
        tail_start, tail_sha256
    FROM caf_files JOIN sources USING (source_id) JOIN plans USING (plan_id)
"""
# The exception in force comes first. Else S3 tells times to the second: of two versions of one second that is current which was
# listed later (a snapshot's name ends with its time), whichever was planned or loaded first; a rebuilt ledger says the same.
_LOCATE: Final = """
    WITH found AS (
        SELECT file_locations.source_id, file_path, object_version, version_id, start_byte, end_byte, etag, last_modified,
            file_locations.sha256, part, caf_files.name AS chunk, merkle_root, owner, start, stored_size_bytes, snapshot,
            max(last_modified) OVER () AS latest
        FROM file_locations JOIN caf_files USING (caf_file_id) JOIN plans USING (plan_id)
        JOIN sources ON sources.source_id = file_locations.source_id
        WHERE sources.name = :source AND file_path = :key AND state = ANY(:good) AND part = 0
    ), said AS (
        SELECT stated_at, object_version, inventory FROM current_exceptions
        WHERE source_id = (SELECT source_id FROM sources WHERE name = :source) AND file_path = :key
        ORDER BY stated_at DESC LIMIT 1
    )
    SELECT found.*, said.stated_at AS said_at, said.object_version AS said_version, inventory
    FROM found LEFT JOIN said ON said.stated_at >= latest {version}
    ORDER BY coalesce(found.object_version = said.object_version, false) DESC, last_modified DESC, snapshot COLLATE "C" DESC,
        found.object_version DESC LIMIT 1
"""
_WAITING: Final = """SELECT caf_file_id FROM caf_files JOIN sources USING (source_id)
    WHERE sources.name = :source AND state = :located AND look_again_at <= now()
    ORDER BY look_again_at, caf_file_id LIMIT :waiting"""
_ANY_OBJECT = text(
    """
    SELECT start_byte, end_byte, sha256 FROM file_locations
    WHERE caf_file_id = (SELECT caf_file_id FROM caf_files WHERE name = :chunk) AND end_byte - start_byte BETWEEN 1 AND :most
    ORDER BY random() LIMIT 1
    """
)
_SUMS = text(
    """
    SELECT state, count(*) AS chunks, sum(member_count) AS members, sum(member_bytes) AS bytes,
        sum(object_count - skipped_count - released_count) AS claimed
    FROM caf_files WHERE source_id = :source_id GROUP BY state
    """
)
_RESERVED_BY_OTHERS = text(
    "SELECT coalesce(sum(size_bytes), 0) FROM staging_reservations JOIN caf_files USING (caf_file_id)"
    " WHERE staging_reservations.folder = :folder AND caf_file_id <> :caf_file_id AND state = ANY(:claiming)"
)


_VERSIONS: Final = text(
    """
    SELECT file_path, object_version, version_id, start_byte, end_byte, etag, last_modified, file_locations.sha256, part,
        count(*) OVER () AS versions
    FROM file_locations JOIN caf_files USING (caf_file_id) JOIN sources ON sources.source_id = file_locations.source_id
    WHERE sources.name = :source AND file_path = :key AND state = ANY(:good) AND part = 0
    ORDER BY last_modified DESC, object_version DESC LIMIT :limit
    """
)


class Ledger:
    """What is known, in one database. Each method is one transaction; what it wrote is durable when it returns. Safe in threads.

    Raises everywhere: LedgerUnreachable. Methods that take a lease raise LeaseLost, and write nothing, where it was taken
    over, and IllegalMove where the chunk is in no state from which the move is legal.
    """

    def __init__(self, database: Database, *, lease_seconds: float = LEASE_SECONDS) -> None:
        self._database = database
        self._lease_seconds = lease_seconds

    def close(self) -> None:
        """Close the idle connections; a later call opens new ones."""
        self._database.close()

    # --- leases ---

    def lease(self, name: str, holder: Holder, *, waits: Waits | None = None) -> HeldLease:
        """Hold `name` while the context lasts; the name of a chunk's lease (`chunk_lease`) sets the chunk's epoch.

        A holder on this machine whose process is dead is replaced at once; any other is waited for until its lease is seen
        renewed or has run out (at most one lease time).

        Args:
            name: of the lease.
            holder: who takes it.
            waits: where it is said while another run's lease is waited for.

        Raises:
            HeldByOther: a live run has it.
        """
        return HeldLease(self._database, name, holder, seconds=self._lease_seconds, waits=waits)

    # --- plans ---

    def register_source(self, name: str, archive_id: str, address: str) -> None:
        """Make the source known. `address` says which bucket and prefix it is; another one under the same name is refused.

        Raises:
            LedgerError: the ledger has another address under this name.
        """
        with self._database.transaction() as connection:
            connection.execute(
                text(
                    "INSERT INTO sources (name, archive_id, address) VALUES (:name, :archive_id, :address)"
                    " ON CONFLICT (name) DO NOTHING"
                ),
                {"name": name, "archive_id": archive_id, "address": address},
            )
            known = connection.execute(text("SELECT address FROM sources WHERE name = :name"), {"name": name}).scalar_one()
        if known != address:
            raise LedgerError(
                f"source '{name}' is {known} in the ledger, and {address} in the settings",
                hint="give the new address a source of another name",
            )

    def addresses(self) -> Mapping[str, str]:
        """Return the address of each source ever registered, by its archive's id."""
        with self._database.transaction() as connection:
            return {row.archive_id: row.address for row in connection.execute(text("SELECT archive_id, address FROM sources"))}

    def export_standing(self, source: str, path: Path) -> int:
        """Write what is known of the source's objects as Parquet (`inventory.STANDING_SCHEMA`); return the rows written.

        An object may have several rows, e.g. skipped by one chunk and claimed by the next. Constant memory.
        """
        source_id = self._source_id(source)
        with self._database.transaction() as connection:
            return write_standing(connection, source_id, path)

    # --- what is current ---

    def export_exceptions(self, source: str, path: Path) -> int:
        """Write the exceptions of the source as Parquet (`inventory.EXCEPTION_SCHEMA`); return the rows written.

        Constant memory.
        """
        with self._database.transaction() as connection:
            return write_exceptions(connection, _source_id(connection, source), path)

    def later_inventories(self, inventory: InventoryRecord) -> Sequence[tuple[bytes, bytes | None]]:
        """Return the ranges of keys (greater than, up to and including) of planned inventories that were taken after this one."""
        with self._database.transaction() as connection:
            source_id = _source_id(connection, inventory.source)
            return current_content.later_inventories(connection, source_id, inventory.taken_at, inventory.name)

    def record_planned(self, inventory: InventoryRecord, exceptions: Iterable[CurrentException]) -> None:
        """Write that an inventory is planned, and the exceptions that it states, at once; as `record_exceptions`."""
        with self._database.transaction() as connection:
            source_id = _source_id(connection, inventory.source)
            current_content.record_inventory(connection, source_id, inventory)
            current_content.record_exceptions(connection, source_id, inventory.name, exceptions)

    def record_exceptions(self, inventory: InventoryRecord, exceptions: Iterable[CurrentException]) -> None:
        """Write exceptions that an inventory states; one of the same key and time is replaced."""
        with self._database.transaction() as connection:
            source_id = _source_id(connection, inventory.source)
            current_content.record_exceptions(connection, source_id, inventory.name, exceptions)

    def record_content(self, inventory: InventoryRecord, *, current: int, older: int, gone: int) -> None:
        """Write how many located objects were current, older and gone as of an inventory that is planned."""
        with self._database.transaction() as connection:
            source_id = _source_id(connection, inventory.source)
            current_content.record_content(connection, source_id, inventory.name, current=current, older=older, gone=gone)

    def located_versions(self, source: str, keys: Sequence[str]) -> Sequence[LocatedVersion]:
        """Return every identity without a version id that is located of these keys, in chunks in good standing."""
        with self._database.transaction() as connection:
            return current_content.located_versions(connection, _source_id(connection, source), keys)

    def find_plan(self, sha256: bytes) -> PlanRecord | None:
        """Return the plan of this full hash."""
        with self._database.transaction() as connection:
            row = connection.execute(text(f"{_PLAN} WHERE sha256 = :sha256"), {"sha256": sha256}).one_or_none()
        return None if row is None else PlanRecord(**{**row._asdict(), "sha256": bytes(row.sha256)})

    def plan_name_taken(self, source: str, short: str) -> bool:
        """Tell whether another plan of the source already has this short name."""
        with self._database.transaction() as connection:
            found = connection.execute(
                text(f"{_PLAN} WHERE sources.name = :source AND plans.name = :short"), {"source": source, "short": short}
            )
            return found.first() is not None

    def register_plan(
        self,
        plan: PlanRecord,
        chunks: Sequence[PlannedChunk],
        claims: Iterable[tuple[int, str, str, datetime | None]],
        skips: Iterable[Skip],
    ) -> None:
        """Write the plan, its chunks as `planned`, its claims as (chunk number, key, object version, last modified), and skips.

        A plan of the same hash that is registered already changes nothing. Plans of one source are registered one by one.

        Raises:
            ClaimConflict: an object is claimed or located already; nothing was written.
        """
        with self._database.transaction() as connection:
            # NO KEY: loads of locations and skips of the source go on.
            source_id = _source_id(connection, plan.source, lock="FOR NO KEY UPDATE")
            plan_id = _insert_plan(connection, source_id, plan)
            if plan_id is None:
                return
            ids = _insert_chunks(connection, source_id, plan_id, chunks)
            copy_claims(connection, source_id, ((ids[number], *claim) for number, *claim in claims))
            refuse_located(connection, source_id, plan_id)
            record_skips(connection, source_id, None, skips)

    def record_skips(self, source: str, skips: Iterable[Skip]) -> None:
        """Write skips that belong to no chunk; a skip of the same object replaces the older one."""
        with self._database.transaction() as connection:
            record_skips(connection, _source_id(connection, source), None, skips)

    # --- chunks ---

    def chunk(self, name: str) -> Chunk:
        """Return the chunk's row, or raise NotLocated."""
        with self._database.transaction() as connection:
            statement = text(f"{_CHUNK.format(samples='samples')} WHERE caf_files.name = :name")
            row = connection.execute(statement, {"name": name}).one_or_none()
        if row is None:
            raise NotLocated(f"the ledger has no chunk {name}", hint="caf status lists the chunks")
        return _chunk(row)

    def chunks(self, source: str | None = None, states: Iterable[ChunkState] | None = None) -> Sequence[Chunk]:
        """Return chunks by name, without their samples."""
        wanted = [*states] if states is not None else [*ChunkState]
        statement = f"{_CHUNK.format(samples='NULL')} WHERE state = ANY(:states)"
        if source is not None:
            statement += " AND sources.name = :source"
        with self._database.transaction() as connection:
            rows = connection.execute(text(f"{statement} ORDER BY caf_files.name"), {"states": wanted, "source": source})
            return [_chunk(row) for row in rows]

    def move(self, lease: Lease, chunk: str, before: ChunkState, after: ChunkState, *, reason: str = "") -> None:
        """Move a chunk and nothing else.

        Moving to `packing` counts an attempt; `reason` stays with a chunk that is parked, damaged or withdrawn.

        Moving to a state that claims nothing (`withdrawn`, `abandoned`) ends the chunk's claims; moving back from `sealed` to
        `packing` claims again what the seal skipped, where no other chunk has taken it. Moves that have a method of their own
        below are illegal here.

        Raises:
            IllegalMove: also where the move would forget a post that is or may be on the chain (`transactions`), or where a
                damaged chunk has no copy that was seen right.
        """
        method = _OWN_METHOD.get((before, after))
        if method is not None:
            raise IllegalMove(f"chunk {chunk} goes from '{before}' to '{after}' by {method}() only")
        changes = f"reason = :reason, attempts = attempts + {int(after is _S.PACKING)}"
        if (before, after) == (_S.SEALED, _S.PACKING):  # what was sealed is gone, and its root must never be posted
            changes += ", sealed_at = NULL, merkle_root = NULL, tail_start = NULL, tail_sha256 = NULL"
        if before in GOOD:  # what came back once says nothing of a chunk that was found damaged since
            changes += ", read_back_at = NULL, read_back_from = NULL, look_again_at = NULL"
        facts = {"reason": reason if after in _KEEPS_REASON else ""}
        with self._database.transaction() as connection:
            moved = _move(connection, lease, chunk, before, after, changes=changes, facts=facts)
            before_move(connection, moved.caf_file_id, chunk, before, after)
            if (before, after) == (_S.DAMAGED, _S.LOCATED):
                require_right_copy(connection, moved.caf_file_id, chunk)
            if after not in CLAIMING:
                _end_claims(connection, moved.caf_file_id)
            elif before is _S.SEALED and after is _S.PACKING:
                connection.execute(_CLAIM_SKIPPED_AGAIN, {"id": moved.caf_file_id, "good": GOOD})

    def seal(self, lease: Lease, chunk: str, seal: Seal, skips: Iterable[Skip], released: Iterable[tuple[str, str]]) -> None:
        """packing → sealed, or → empty where the seal counts no member, with the facts and the skips.

        Ends the claims of the skipped objects and of those released (key, object version) to be planned again.

        Raises:
            LedgerError: the claims that are left are not as many as the members; nothing was written.
        """
        changes = """sealed_at = now(), caf_size_bytes = :caf_size_bytes, stored_size_bytes = :stored_size_bytes,
            member_count = :member_count, member_bytes = :member_bytes, skipped_count = :skipped_count,
            released_count = :released_count, merkle_root = :merkle_root, proof_type = :proof_type,
            samples = CAST(:samples AS jsonb), tail_start = :tail_start, tail_sha256 = :tail_sha256"""
        facts = {
            "caf_size_bytes": seal.caf_size_bytes,
            "stored_size_bytes": seal.stored_size_bytes,
            "member_count": seal.member_count,
            "member_bytes": seal.member_bytes,
            "skipped_count": seal.skipped_count,
            "released_count": seal.released_count,
            "merkle_root": seal.merkle_root,
            "proof_type": seal.proof_type,
            "samples": samples_as_json(seal.samples),
            "tail_start": seal.tail_start,
            "tail_sha256": seal.tail_sha256,
        }
        after = _S.SEALED if seal.member_count else _S.EMPTY
        with self._database.transaction() as connection:
            moved = _move(connection, lease, chunk, _S.PACKING, after, changes=changes, facts=facts)
            record_skips(connection, moved.source_id, moved.caf_file_id, skips)
            release_claims(connection, moved.caf_file_id, released)
            left = connection.execute(
                text("SELECT count(*) FROM claims WHERE caf_file_id = :id"), {"id": moved.caf_file_id}
            ).scalar_one()
            # An object without a claim may by now be in another plan; archiving it here too would be doing it twice.
            if left != seal.member_count:
                raise LedgerError(
                    f"chunk {chunk} has {counted(seal.member_count, 'member')}, but claims"
                    f" {counted(left, 'object')} after its skips",
                    hint="withdraw the chunk; the next plan has its objects again",
                )

    def record_samples(self, lease: Lease, chunk: str, samples: Sequence[Sample]) -> None:
        """Replace the samples of a chunk that is posting, posted or uploading: its file was packed again with its root."""
        with self._database.transaction() as connection:
            states = (_S.POSTING, _S.POSTED, _S.UPLOADING)
            caf_file_id = _require_state(connection, lease, chunk, states, "sampled again")
            statement = text("UPDATE caf_files SET samples = CAST(:samples AS jsonb) WHERE caf_file_id = :id")
            connection.execute(statement, {"samples": samples_as_json(samples), "id": caf_file_id})

    def record_root(self, lease: Lease, chunk: str, merkle_root: bytes, proof_type: int, samples: Sequence[Sample]) -> None:
        """Give a `sealed` chunk, which was never posted, the root and samples of another type of tree over the same bytes."""
        with self._database.transaction() as connection:
            caf_file_id = _require_state(connection, lease, chunk, (_S.SEALED,), "given another root")
            statement = text(
                "UPDATE caf_files SET merkle_root = :root, proof_type = :proof_type, samples = CAST(:samples AS jsonb),"
                " updated_at = now() WHERE caf_file_id = :id"
            )
            facts = {"root": merkle_root, "proof_type": proof_type, "samples": samples_as_json(samples), "id": caf_file_id}
            connection.execute(statement, facts)

    def record_posting(self, lease: Lease, chunk: str, posting: Posting) -> None:
        """posting → posted.

        Raises:
            IntegrityError: the posting is of other bytes than those that were sealed; nothing was written.
        """
        with self._database.transaction() as connection:
            facts = {"owner": posting.owner, "start": posting.start}
            changes = "posted_at = now(), owner = :owner, start = :start"
            moved = _move(connection, lease, chunk, _S.POSTING, _S.POSTED, changes=changes, facts=facts)
            _require_sealed_bytes(chunk, moved, posting)
            end_waiting(connection, moved.caf_file_id)

    def record_copies(self, lease: Lease, chunk: str, copies: Sequence[Copy]) -> None:
        """uploading → verified, with the copies that proved it; others that were known are listed no more."""
        with self._database.transaction() as connection:
            moved = _move(connection, lease, chunk, _S.UPLOADING, _S.VERIFIED, changes="verified_at = now()")
            record_verified(connection, moved.caf_file_id, copies)

    def load_locations(self, lease: Lease, chunk: str, rows: Iterable[pa.RecordBatch]) -> int:
        """verified → located: write the rows, batches of LOCATION_SCHEMA, and end the chunk's claims, at once.

        Returns the rows written.

        Raises:
            LedgerError: the rows are not as many as the chunk's members; nothing was written.
        """
        with self._database.transaction() as connection:
            moved = _move(connection, lease, chunk, _S.VERIFIED, _S.LOCATED, changes="located_at = now()")
            written = copy_locations(connection, moved.source_id, moved.caf_file_id, rows)
            connection.execute(_END_OLD_SKIPS, {"id": moved.caf_file_id})
            claimed = _end_claims(connection, moved.caf_file_id)
            if not written == claimed == moved.member_count:
                raise LedgerError(
                    f"chunk {chunk} has {counted(moved.member_count, 'member')} and {counted(claimed, 'claim')}, but"
                    f" {counted(written, 'location')}",
                    hint="its archive is not what was sealed: check the staged file",
                )
        return written

    def record_repost(self, lease: Lease, chunk: str, posting: Posting) -> None:
        """Give a `damaged` chunk the place of its new post, where the chain no longer has the first.

        The copies known of the first are listed no more.

        Raises:
            IntegrityError: the posting is of other bytes than those that were sealed; nothing was written.
        """
        with self._database.transaction() as connection:
            _require_state(connection, lease, chunk, (_S.DAMAGED,), "posted again")
            statement = text(
                "UPDATE caf_files SET owner = :owner, start = :start, posted_at = now(), updated_at = now(),"
                " read_back_at = NULL, read_back_from = NULL, look_again_at = NULL"
                " WHERE name = :chunk"
                " RETURNING caf_file_id, merkle_root, stored_size_bytes"
            )
            row = connection.execute(statement, {"chunk": chunk, "owner": posting.owner, "start": posting.start}).one()
            _require_sealed_bytes(chunk, row, posting)
            end_waiting(connection, row.caf_file_id)
            end_listing(connection, row.caf_file_id)

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
        with self._database.transaction() as connection:
            caf_file_id = _require_state(connection, lease, chunk, GOOD, "looked at")
            record_look(connection, caf_file_id, checks, again_in=again_in, enough=enough)

    def restore_chunk(self, source: str, chunk: RestoredChunk, rows: Iterable[pa.RecordBatch], skips: Iterable[Skip]) -> int:
        """Write a chunk that the ledger does not know, with its plan where that is missing, rows and skips, at once.

        Rows come in batches of LOCATION_SCHEMA.

        It is `located`, or `damaged` where it has a fault. Objects that are located already in a chunk in good standing keep
        that location, and are skipped no more. Returns the location rows written; 0 where other chunks have all of its objects:
        then nothing at all was written.

        Raises:
            LedgerError: the ledger has a chunk of this name, or the rows and skips are not as many as the chunk says, or name an
                object twice; nothing was written.
            ClaimConflict: a chunk under way claims one of its objects; nothing was written.
            IntegrityError: the plan that it names is another one in the ledger; nothing was written.
        """
        with suppress(Superseded), self._database.transaction() as connection:
            # As for a new plan: the two must not take the same object, each unseen by the other.
            source_id = _source_id(connection, source, lock="FOR NO KEY UPDATE")
            return restore(connection, source_id, chunk, rows, skips)
        return 0

    def known_copies(self, chunk: str) -> Sequence[KnownCopy]:
        """Return the copies that were ever recorded of a chunk, by provider."""
        with self._database.transaction() as connection:
            return known_copies(connection, chunk)

    def chunks_to_prove(self, source: str, limit: int, *, waiting: int = 0) -> Sequence[Chunk]:
        """Return located chunks, those first that were looked at longest ago (or located, where never looked at).

        Before them come up to `waiting` of those that wait for a look in their next proof window, which has begun.
        """
        statement = text(
            f"{_CHUNK.format(samples='samples')} WHERE sources.name = :source AND state = :located"
            f" ORDER BY caf_file_id IN ({_WAITING}) DESC, coalesce(checked_at, located_at), caf_file_id LIMIT :limit"
        )
        facts = {"source": source, "located": _S.LOCATED, "limit": limit, "waiting": waiting}
        with self._database.transaction() as connection:
            return [_chunk(row) for row in connection.execute(statement, facts)]

    def any_object(self, chunk: str, most_bytes: int) -> Sample | None:
        """Return where one of the chunk's objects is, chosen at random from those of 1 to this many bytes; None without any.

        Reads the chunk's rows, some 0.5 s for a million.
        """
        with self._database.transaction() as connection:
            row = connection.execute(_ANY_OBJECT, {"chunk": chunk, "most": most_bytes}).one_or_none()
        return None if row is None else Sample(row.start_byte, row.end_byte - row.start_byte, bytes(row.sha256))

    def record_read_back(self, lease: Lease, chunk: str, provider: str) -> None:
        """Remember that all stored bytes of a located or damaged chunk came back from a provider just now with its root.

        Forgotten when the chunk becomes damaged, is located again, or is posted again, and when that copy counts no more.
        """
        with self._database.transaction() as connection:
            caf_file_id = _require_state(connection, lease, chunk, GOOD, "read back")
            statement = text("UPDATE caf_files SET read_back_at = now(), read_back_from = :provider WHERE caf_file_id = :id")
            connection.execute(statement, {"id": caf_file_id, "provider": provider})

    # --- what stores keep here ---

    def transactions(self, holder: Holder) -> PostgresTransactionLog:
        """Return the log of what stores signed, for this holder."""
        return PostgresTransactionLog(self._database, holder, lease_seconds=self._lease_seconds)

    def providers(self) -> ProviderRecords:
        """Return what was measured of providers."""
        return ProviderRecords(self._database)

    def controls(self) -> Controls:
        """Return what the operator orders."""
        return Controls(self._database)

    # --- failures ---

    def count_read_failure(self, chunk: str, key: str, object_version: str, run: str) -> int:
        """Count a run of the chunk that failed on this object, once; return how many runs there were."""
        with self._database.transaction() as connection:
            times = connection.execute(
                text(
                    "INSERT INTO read_failures AS old (caf_file_id, file_path, object_version, last_run)"
                    " SELECT caf_file_id, :key, :version, :run FROM caf_files WHERE name = :chunk"
                    " ON CONFLICT (caf_file_id, file_path, object_version) DO UPDATE SET"
                    " times = old.times + CASE WHEN old.last_run = excluded.last_run THEN 0 ELSE 1 END,"
                    " last_run = excluded.last_run RETURNING times"
                ),
                {"chunk": chunk, "key": key, "version": object_version, "run": run},
            ).scalar_one_or_none()
        if times is None:
            raise NotLocated(f"the ledger has no chunk {chunk}")
        return int(times)

    # --- staging ---

    def reserve_staging(self, lease: Lease, chunk: str, folder: str, size_bytes: int, limit_bytes: int) -> None:
        """Reserve bytes of a staging folder for a chunk, replacing its earlier reservation. `limit_bytes` 0: no limit.

        Raises:
            StagingError: with those of other chunks it would pass the limit.
        """
        with self._database.transaction() as connection:
            # Two runs must not both find the last of the room; a lock of the transaction, not of the session.
            connection.execute(text("LOCK TABLE staging_reservations IN SHARE ROW EXCLUSIVE MODE"))
            caf_file_id = _guarded(connection, lease, chunk)
            others = connection.execute(
                _RESERVED_BY_OTHERS, {"folder": folder, "caf_file_id": caf_file_id, "claiming": sorted(CLAIMING)}
            ).scalar_one()
            if limit_bytes and others + size_bytes > limit_bytes:
                raise StagingError(
                    f"chunk {chunk} needs {size_bytes} bytes of {folder}, where other chunks hold {others} of {limit_bytes}",
                    hint="wait for other chunks to be archived, or raise packing.staging_limit",
                )
            connection.execute(
                text(
                    "INSERT INTO staging_reservations (caf_file_id, folder, size_bytes) VALUES (:id, :folder, :size)"
                    " ON CONFLICT (caf_file_id) DO UPDATE SET folder = excluded.folder, size_bytes = excluded.size_bytes"
                ),
                {"id": caf_file_id, "folder": folder, "size": size_bytes},
            )

    def release_staging(self, chunk: str) -> None:
        """Give the chunk's reservation back; does nothing where there is none."""
        with self._database.transaction() as connection:
            connection.execute(
                text(
                    "DELETE FROM staging_reservations USING caf_files"
                    " WHERE staging_reservations.caf_file_id = caf_files.caf_file_id AND name = :chunk"
                ),
                {"chunk": chunk},
            )

    # --- waits ---

    def record_waits(self, holder: Holder, source: str, waits: Sequence[Wait]) -> None:
        """Put what the run waits for now in place of what it wrote before; to be repeated within 30 s while it waits."""
        with self._database.transaction() as connection:
            record_waits(connection, holder, source, waits)

    def waits(self) -> Sequence[RunWait]:
        """Return what live runs wait for, by source."""
        with self._database.transaction() as connection:
            return live_waits(connection)

    # --- care ---

    def leases(self) -> Sequence[LeaseRecord]:
        """Return all leases that were not given back, by name."""
        with self._database.transaction() as connection:
            return leases.leases(connection)

    def end_lease(self, name: str, epoch: int) -> bool:
        """Give back a lease that its holder left.

        False where it is another holder's by now, was given back, or may still be held: by a live process of this machine, or
        by one that cannot be seen from here and has not let it run out.
        """
        with self._database.transaction() as connection:
            return leases.end_lease(connection, name, epoch)

    def reservations(self) -> Sequence[Reservation]:
        """Return all reservations of staging folders, by chunk."""
        with self._database.transaction() as connection:
            return upkeep.reservations(connection)

    def unsettled(self) -> Sequence[SignedTransaction]:
        """Return the transactions of every account whose fate is not known, by account and sequence."""
        with self._database.transaction() as connection:
            return upkeep.unsettled(connection)

    def rows_by_chunk(self, source: str) -> Sequence[ChunkRows]:
        """Count a source's location rows and claims by chunk, all at one moment; chunks without any are there, too.

        Empty for a source that is not known. Reads both tables once.
        """
        with self._database.transaction() as connection:
            return upkeep.rows_by_chunk(connection, source)

    def drop_stray_rows(self, caf_file_id: int) -> int:
        """Remove claims of a chunk that claims nothing or is unknown, and locations of one that never was located or is unknown.

        What a chunk claims by its state, and locations that it has or had, stay. Returns the rows removed.
        """
        with self._database.transaction() as connection:
            return upkeep.drop_stray_rows(connection, caf_file_id)

    # --- questions ---

    def export_located(self, source: str, path: Path) -> int:
        """Write every location of the source as Parquet (`inventory.LOCATED_SCHEMA`); return the rows written.

        Of chunks in good standing only; constant memory, in no order.
        """
        source_id = self._source_id(source)
        with self._database.transaction() as connection:
            return write_located(connection, source_id, path)

    def locate(self, source: str, key: str, object_version: str | None = None) -> Location | None:
        """Return the current location of a key, or that of one version.

        Current is what the latest exception names, or the greatest last_modified where that is later. Where the current content
        is not located, or the key is gone, it is the located content of greatest last_modified, and its `currency` says so.
        Only chunks in good standing count.
        """
        if not is_supported(key.encode("utf-8", "surrogatepass")):
            return None
        condition = "" if object_version is None else "WHERE found.object_version = :version"
        with self._database.transaction() as connection:
            row = connection.execute(
                text(_LOCATE.format(version=condition)),
                {"source": source, "key": key, "version": object_version, "good": GOOD},
            ).one_or_none()
            if row is None:
                return None
            known = None if object_version else current_content.currency(connection, row.source_id, key, row)
        posting = Posting(bytes(row.merkle_root), row.owner, row.start, row.stored_size_bytes)
        return Location(_location_row(row), row.chunk, posting, known)

    def versions(self, source: str, key: str, limit: int) -> tuple[Sequence[LocationRow], int]:
        """Return the located versions of a key, the latest first and at most `limit`, and how many there are."""
        if not is_supported(key.encode("utf-8", "surrogatepass")):
            return [], 0
        with self._database.transaction() as connection:
            rows = connection.execute(_VERSIONS, {"source": source, "key": key, "good": GOOD, "limit": limit}).all()
        return [_location_row(row) for row in rows], rows[0].versions if rows else 0

    def settled_objects(self, source: str, listed: Sequence[ListedIdentity]) -> set[tuple[str, str]]:
        """Of these, return (key, object version) of those of which a plan has nothing to do.

        They are claimed, skipped and not due, or located and what a look-up of the key gives out, with the listed LastModified
        or headers that were compared.
        """
        found: set[tuple[str, str]] = set()
        with self._database.transaction() as connection:
            source_id = _source_id(connection, source)
            for at in range(0, len(listed), KEYS_PER_QUESTION):
                found |= current_content.settled(connection, source_id, listed[at : at + KEYS_PER_QUESTION])
        return found

    def account(self, source: str) -> SourceAccount:
        """Return the sums of a source, from its chunks' counts."""
        source_id = self._source_id(source)
        with self._database.transaction() as connection:
            sums = connection.execute(_SUMS, {"source_id": source_id}).all()
            skipped = connection.execute(
                text("SELECT reason, count(*) FROM skipped_objects WHERE source_id = :id GROUP BY reason"), {"id": source_id}
            ).all()
            content = current_content.content(connection, source_id)
        return SourceAccount(
            source=source,
            chunks={ChunkState(row.state): row.chunks for row in sums},
            located_objects=sum(int(row.members) for row in sums if row.state in GOOD),
            located_bytes=sum(int(row.bytes) for row in sums if row.state in GOOD),
            claimed_objects=sum(int(row.claimed) for row in sums if row.state in CLAIMING),
            skipped={SkipReason(reason): count for reason, count in skipped},
            content=content,
        )

    def sources(self) -> Sequence[str]:
        """Return the names of all sources ever registered."""
        with self._database.transaction() as connection:
            return list(connection.execute(text("SELECT name FROM sources ORDER BY name")).scalars())

    def _source_id(self, source: str) -> int:
        with self._database.transaction() as connection:
            return _source_id(connection, source)


# Packed again, an object may turn out to be readable. Where another chunk took it meanwhile, the next seal fails.
_CLAIM_SKIPPED_AGAIN = text(
    """
    INSERT INTO claims (source_id, file_path, object_version, caf_file_id, last_modified)
    SELECT source_id, file_path, object_version, caf_file_id, last_modified FROM skipped_objects AS s
    WHERE caf_file_id = :id AND NOT EXISTS (
        SELECT FROM file_locations AS l JOIN caf_files AS f ON f.caf_file_id = l.caf_file_id
        WHERE l.source_id = s.source_id AND l.file_path = s.file_path AND l.object_version = s.object_version
            AND f.state = ANY(:good))
    ON CONFLICT DO NOTHING
    """
)

# A skip of an object that is located now says nothing any more.
_END_OLD_SKIPS = text(
    "DELETE FROM skipped_objects AS old USING claims WHERE claims.caf_file_id = :id AND old.source_id = claims.source_id"
    " AND old.file_path = claims.file_path AND old.object_version = claims.object_version"
)


def _move(
    connection: Connection,
    lease: Lease,
    chunk: str,
    before: ChunkState,
    after: ChunkState,
    *,
    changes: str,
    facts: Mapping[str, Any] | None = None,
) -> Row[Any]:
    """Make a guarded move with `changes` to the row's columns; return the row's ids and sizes as they are after it."""
    require_move(chunk, before, after)
    statement = text(
        f"UPDATE caf_files SET state = :after, updated_at = now(), {changes}"
        " WHERE name = :chunk AND state = :before AND epoch = :epoch"
        " RETURNING caf_file_id, source_id, member_count, merkle_root, stored_size_bytes"
    )
    _require_lease_of(lease, chunk)
    guard = {"chunk": chunk, "before": before, "after": after, "epoch": lease.epoch}
    moved = connection.execute(statement, {**(facts or {}), **guard}).one_or_none()
    if moved is None:
        _guarded(connection, lease, chunk)
        found = connection.execute(text("SELECT state FROM caf_files WHERE name = :chunk"), {"chunk": chunk}).scalar_one()
        raise IllegalMove(f"chunk {chunk} cannot go to '{after}': it is '{found}', not '{before}'")
    return moved


def _guarded(connection: Connection, lease: Lease, chunk: str) -> int:
    """Return the chunk's id, its row locked; raise LeaseLost where another run has it now."""
    _require_lease_of(lease, chunk)
    statement = text("SELECT caf_file_id, epoch FROM caf_files WHERE name = :chunk FOR NO KEY UPDATE")
    row = connection.execute(statement, {"chunk": chunk}).one_or_none()
    if row is None:
        raise NotLocated(f"the ledger has no chunk {chunk}")
    if row.epoch != lease.epoch:
        raise LeaseLost(f"another run holds chunk {chunk} now; this run's move was not written")
    return int(row.caf_file_id)


def _require_state(connection: Connection, lease: Lease, chunk: str, states: Sequence[ChunkState], done: str) -> int:
    """Return the chunk's id, its row locked; raise IllegalMove where it is in none of these states."""
    caf_file_id = _guarded(connection, lease, chunk)
    statement = text("SELECT state FROM caf_files WHERE caf_file_id = :id")
    state = connection.execute(statement, {"id": caf_file_id}).scalar_one()
    if state not in states:
        raise IllegalMove(f"chunk {chunk} cannot be {done}: it is '{state}', not {' or '.join(states)}")
    return caf_file_id


def _require_sealed_bytes(chunk: str, row: Row[Any], posting: Posting) -> None:
    if (bytes(row.merkle_root), row.stored_size_bytes) != (posting.merkle_root, posting.stored_size_bytes):
        raise IntegrityError(
            f"chunk {chunk} was sealed as {bytes(row.merkle_root).hex()} ({row.stored_size_bytes} bytes), but"
            f" posted as {posting.merkle_root.hex()} ({posting.stored_size_bytes} bytes)"
        )


def _require_lease_of(lease: Lease, chunk: str) -> None:
    if lease.name != chunk_lease(chunk):
        raise LeaseLost(f"the lease on {lease.name} gives no right to move chunk {chunk}")


def _end_claims(connection: Connection, caf_file_id: int) -> int:
    return connection.execute(text("DELETE FROM claims WHERE caf_file_id = :id"), {"id": caf_file_id}).rowcount


def _source_id(connection: Connection, source: str, *, lock: str = "") -> int:
    statement = text(f"SELECT source_id FROM sources WHERE name = :name {lock}")
    found = connection.execute(statement, {"name": source}).scalar_one_or_none()
    if found is None:
        raise NotLocated(f"the ledger has no source '{source}'", hint="take an inventory of it first")
    return int(found)


def _insert_plan(connection: Connection, source_id: int, plan: PlanRecord) -> int | None:
    """Return the new plan's id, None where a plan of this hash is there already."""
    statement = text(
        "INSERT INTO plans (source_id, name, sha256, snapshot, folder, object_count, object_bytes)"
        " VALUES (:source_id, :name, :sha256, :snapshot, :folder, :object_count, :object_bytes)"
        " ON CONFLICT (sha256) DO NOTHING RETURNING plan_id"
    )
    values = {
        "source_id": source_id,
        "name": plan.name,
        "sha256": plan.sha256,
        "snapshot": plan.snapshot,
        "folder": plan.folder,
        "object_count": plan.object_count,
        "object_bytes": plan.object_bytes,
    }
    return connection.execute(statement, values).scalar_one_or_none()


def _insert_chunks(connection: Connection, source_id: int, plan_id: int, chunks: Sequence[PlannedChunk]) -> Mapping[int, int]:
    """Return the new chunks' ids by number."""
    rows = (
        (one.name, source_id, plan_id, one.number, one.object_count, one.object_bytes, one.expected_size_bytes) for one in chunks
    )
    copy_rows(connection, "caf_files", _PLANNED_CHUNK, rows)
    found = connection.execute(text("SELECT number, caf_file_id FROM caf_files WHERE plan_id = :id"), {"id": plan_id})
    return {number: caf_file_id for number, caf_file_id in found}


def _location_row(row: Row[Any]) -> LocationRow:
    return LocationRow(
        key=row.file_path,
        object_version=row.object_version,
        version_id=row.version_id,
        start_byte=row.start_byte,
        end_byte=row.end_byte,
        etag=row.etag,
        last_modified=row.last_modified.astimezone(UTC),
        sha256=bytes(row.sha256),
        part=row.part,
    )


def _chunk(row: Row[Any]) -> Chunk:
    values = row._asdict()
    values["state"] = ChunkState(row.state)
    for name in ("merkle_root", "tail_sha256"):
        values[name] = None if values[name] is None else bytes(values[name])
    values["samples"] = tuple(
        Sample(offset=one["offset"], length=one["length"], sha256=bytes.fromhex(one["sha256"])) for one in row.samples or ()
    )
    for name in ("updated_at", "located_at", "checked_at", "read_back_at"):
        values[name] = values[name] and values[name].astimezone(UTC)
    return Chunk(**values)
