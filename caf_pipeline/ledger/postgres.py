"""The ledger on Postgres: sources, plans, and the steps of chunks. The other methods are in the parts that it inherits.

A move is an UPDATE guarded by state and epoch (`moves`) together with all that belongs to it.

Source: "Database" and "Promises" in docs/design.md.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection

from caf_pipeline.chunk_state import CLAIMING, GOOD, ChunkState
from caf_pipeline.errors import IllegalMove, LedgerError, StagingError
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.ledger.bulk_looks import BulkLooks
from caf_pipeline.ledger.chunks import Lookups
from caf_pipeline.ledger.controls import Controls
from caf_pipeline.ledger.copy import (
    TWICE,
    copy_claims,
    copy_location_batches,
    copy_rows,
    end_claims,
    end_skips,
    forget_pending,
    locate_pending,
    record_skips,
    record_waiting,
    refuse_located,
    release_claims,
    waiting_since,
    withdraw_claims,
)
from caf_pipeline.ledger.current_content import CurrentContent
from caf_pipeline.ledger.database import Database, database_of, describe_database
from caf_pipeline.ledger.engine import LedgerEngine, source_id_of
from caf_pipeline.ledger.export import Exports
from caf_pipeline.ledger.folder_store import FolderStores
from caf_pipeline.ledger.header_sets import Batches, record_header_sets
from caf_pipeline.ledger.import_chunk import ChunkImport
from caf_pipeline.ledger.launchable import LaunchableChunks
from caf_pipeline.ledger.leases import LEASE_SECONDS, HeldLease, Leases, lock_lease, require_free
from caf_pipeline.ledger.log_times import forget_log_times, record_log_times
from caf_pipeline.ledger.lookup import Lookup
from caf_pipeline.ledger.maintenance import StrayRows
from caf_pipeline.ledger.moves import chunk_row, guarded, move_row, require_sealed_bytes, require_state
from caf_pipeline.ledger.notices import Notices
from caf_pipeline.ledger.parts import follow_move, record_part, register_parts
from caf_pipeline.ledger.progress import Progress
from caf_pipeline.ledger.provider_stats import ProviderRecords
from caf_pipeline.ledger.records import Holder, PlanRecord, ReadFailures, Seal, Skip, plan_lease
from caf_pipeline.ledger.removal import OF_AN_ADDRESS, SourceRemoval
from caf_pipeline.ledger.replicas import Replicas, forget_full_read, require_right_copy, samples_as_json, unlist
from caf_pipeline.ledger.storage_plans import StoragePlans
from caf_pipeline.ledger.transactions import TransactionLog, before_move, end_waiting, require_no_post
from caf_pipeline.ledger.waits import RunWaits
from caf_pipeline.settings import Settings
from caf_pipeline.store.protocol import Lease, Posting, Sample
from caf_pipeline.system.quantities import counted
from caf_pipeline.waits import UNANSWERED_SECONDS, Waits

if TYPE_CHECKING:
    import pyarrow as pa

    from caf_pipeline.inventory.manifest import LogTimes, PartLocation
    from caf_pipeline.inventory.plan import ChunkPlan, PlannedObject

_S = ChunkState

_OWN_METHOD: Final = {
    (_S.PACKING, _S.SEALED): "seal",
    (_S.PACKING, _S.EMPTY): "seal",
    (_S.POSTING, _S.POSTED): "record_posting",
    (_S.UPLOADING, _S.VERIFIED): "record_copies",
    (_S.VERIFIED, _S.LOCATED): "load_locations",
}
"""Moves that write more than the state, by the method that makes them; `move` refuses them."""

_KEEPS_REASON: Final = frozenset({_S.PARKED, _S.WITHDRAWN})

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
_RESERVED_BY_OTHERS = (
    "SELECT coalesce(sum(size_bytes), 0) FROM staging_reservations JOIN caf_files USING (caf_file_id)"
    " WHERE staging_reservations.folder = %(folder)s AND caf_file_id <> %(caf_file_id)s AND state = ANY(%(claiming)s)"
)


def open_ledger(settings: Settings, waits: Waits | None = None) -> "Ledger":
    """Return the ledger that the settings name, with its tables.

    `waits` says it while the database does not answer, and while its tables are made.

    Raises:
        LedgerUnreachable, LedgerError: it cannot be used; the message says where it is, without the password.
    """
    waits = waits or Waits()
    with waits.waiting(
        describe_database(settings), ends_by="its answer ends it, or the time limit of a connection", grace=UNANSWERED_SECONDS
    ):
        ledger = Ledger(database_of(settings), store=settings.store.kind)
        ledger.bring_up(waits)
    return ledger


class Ledger(
    Leases,
    RunWaits,
    StrayRows,
    Lookups,
    LaunchableChunks,
    Progress,
    Notices,
    CurrentContent,
    Exports,
    Replicas,
    BulkLooks,
    ChunkImport,
    FolderStores,
    StoragePlans,
    SourceRemoval,
):
    """What is known, in one database. Each method is one transaction; what it wrote is durable when it returns. Safe in threads.

    Raises everywhere: LedgerUnreachable. Methods that take a lease raise LeaseLost, and write nothing, where it was taken
    over, and IllegalMove where the chunk is in no state from which the move is legal.
    """

    def __init__(self, database: Database, *, store: str = "jackal", lease_seconds: float = LEASE_SECONDS) -> None:
        """`store` is the kind of the store in the settings: its name in the ledger."""
        self.lookup = Lookup(database)
        self._engine = LedgerEngine(database)
        self._store = store
        self._lease_seconds = lease_seconds

    @property
    def database(self) -> Database:
        """The ledger's database."""
        return self._engine.database

    def bring_up(self, waits: Waits) -> None:
        """Make the tables that the database lacks: see `Database.bring_up`."""
        self._engine.bring_up(waits)

    def close(self) -> None:
        """Close the idle connections; a later call opens new ones."""
        self.lookup.close()
        self._engine.close()

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
        return HeldLease(self._engine, name, holder, seconds=self._lease_seconds, waits=waits)

    # --- plans ---

    def register_source(self, name: str, archive_id: str, address: str, *, lease: Lease | None = None) -> None:
        """Make the source known. `address` says which bucket and prefix it is.

        Another address replaces the recorded one until the source has its first chunk. Inventories, skips and other rows of the
        replaced address are removed. `lease` is the caller's on the source's plan.

        Raises:
            LedgerError: the ledger has another address under this name, and chunks of it.
            HeldByOther: another address is recorded, and a run plans the source under it now.
        """
        facts = {"name": name, "archive_id": archive_id, "address": address}
        with self._engine.begin() as connection:
            connection.exec_driver_sql(
                (
                    "INSERT INTO sources (name, archive_id, address) VALUES (%(name)s, %(archive_id)s, %(address)s)"
                    " ON CONFLICT (name) DO NOTHING"
                ),
                facts,
            )
            recorded = connection.exec_driver_sql("SELECT address FROM sources WHERE name = %(name)s", facts).scalar_one()
            if recorded == address:
                return
            source_id = source_id_of(connection, name, lock="FOR UPDATE")
            has_chunks = "SELECT EXISTS (SELECT FROM caf_files WHERE source_id = %(id)s)"
            if not connection.exec_driver_sql(has_chunks, {"id": source_id}).scalar_one():
                if lease is None:
                    require_free(connection, plan_lease(name))
                else:
                    lock_lease(connection, lease)
                for table in OF_AN_ADDRESS:
                    connection.exec_driver_sql(f"DELETE FROM {table} WHERE source_id = %(id)s", {"id": source_id})
                statement = "UPDATE sources SET address = %(address)s, archive_id = %(archive_id)s WHERE name = %(name)s"
                connection.exec_driver_sql(statement, facts)
                return
            raise LedgerError(
                f"source '{name}' is {recorded} in the ledger, and {address} in the settings",
                hint=(
                    "give the new address a source of another name;"
                    f" 'caf remove {name}' removes the old source if nothing of it was stored"
                ),
            )

    def find_plan(self, sha256: bytes) -> PlanRecord | None:
        """Return the plan of this full hash."""
        with self._engine.begin() as connection:
            row = connection.exec_driver_sql(f"{_PLAN} WHERE sha256 = %(sha256)s", {"sha256": sha256}).fetchone()
        return None if row is None else PlanRecord(**row._asdict())

    def plan_name_taken(self, source: str, short: str) -> bool:
        """Tell whether another plan of the source already has this short name."""
        with self._engine.begin() as connection:
            found = connection.exec_driver_sql(
                f"{_PLAN} WHERE sources.name = %(source)s AND plans.name = %(short)s", {"source": source, "short": short}
            )
            return found.fetchone() is not None

    def register_plan(
        self,
        lease: Lease,
        plan: PlanRecord,
        chunks: "Sequence[ChunkPlan]",
        claims: "Iterable[pa.RecordBatch]",
        parts: "Iterable[tuple[int, PlannedObject]]" = (),
    ) -> None:
        """Write the plan, its chunks as `planned`, its claims, batches as of `plan.read_identities`, and `plan.read_parts`.

        A plan of the same hash that is registered already changes nothing. Plans of one source are registered one by one.

        Raises:
            ClaimConflict: an object is claimed or located already; nothing was written.
            LeaseLost: another run has the lease on the source's plan now, and removed what it found of this one.
        """
        # NO KEY: loads of locations and skips of the source go on.
        with self._of_source(plan.source, lock="FOR NO KEY UPDATE") as (connection, source_id):
            plan_id = _insert_plan(connection, source_id, plan)
            if plan_id is None:
                return
            ids = _insert_chunks(connection, source_id, plan_id, plan, chunks)
            copy_claims(connection, source_id, ids, claims)
            register_parts(connection, source_id, plan_id, ids, parts)
            refuse_located(connection, source_id, plan_id)
            lock_lease(connection, lease)  # last: its own renewal waits for it

    def record_skips(self, source: str, skips: Iterable[Skip]) -> None:
        """Write skips that belong to no chunk; a skip of the same object replaces the older one."""
        with self._of_source(source) as (connection, source_id):
            record_skips(connection, source_id, None, skips)

    def end_skips(self, source: str, skips: Sequence[tuple[str, str]], *, listed_at: datetime, silent_from: datetime) -> None:
        """Let skips no longer count, of objects that a whole inventory did not list; one that is listed again is planned again.

        Args:
            source: of the objects.
            skips: key, encoded where it is unsupported, and object version.
            listed_at: when the inventory was taken.
            silent_from: what was modified from then on the inventory may lack; it stays as it is.
        """
        with self._of_source(source) as (connection, source_id):
            end_skips(connection, source_id, skips, listed_at=listed_at, silent_from=silent_from)

    def record_waiting(self, source: str, skips: Iterable[Skip], until: datetime | None, *, whole: bool) -> None:
        """Write which objects wait for the next plan, as skips of reason `waiting`.

        Args:
            source: of the objects.
            skips: those that wait.
            until: the sensor finds them as new from then on; None where none wait.
            whole: what the source has was planned, so that no other object of it waits any more.
        """
        with self._of_source(source) as (connection, source_id):
            record_waiting(connection, source_id, skips, until, whole=whole)

    def waiting_since(self, source: str, skips: Iterable[Skip]) -> datetime | None:
        """Return when the first of these objects began to wait that waits already; None where none does."""
        with self._of_source(source) as (connection, source_id):
            return waiting_since(connection, source_id, skips)

    # --- chunks ---

    def move(self, lease: Lease, chunk: str, before: ChunkState, after: ChunkState, *, reason: str = "") -> None:
        """Move a chunk and nothing else.

        Moving to `packing` counts an attempt; `reason` stays with a chunk that is parked, damaged or withdrawn.

        Moving to a state that claims nothing (`withdrawn`, `abandoned`) ends the chunk's claims; moving back from `sealed` to
        `packing` claims again what the seal skipped, where no other chunk has taken it. Moves that have a method of their own
        below are illegal here.

        Raises:
            IllegalMove: also where the move would forget a post that is or may be on the chain (`transactions`), where a
                damaged chunk has no copy that was seen right, or where the copy of a parked one does not allow it.
        """
        method = _OWN_METHOD.get((before, after))
        if method is not None:
            raise IllegalMove(f"chunk {chunk} goes from '{before}' to '{after}' by {method}() only")
        changes = f"reason = %(reason)s, attempts = attempts + {int(after is _S.PACKING)}"
        if (before, after) == (_S.SEALED, _S.PACKING):  # what was sealed is gone, and its root must never be posted
            changes += ", sealed_at = NULL, tail_start = NULL, tail_sha256 = NULL"
        of_copy = []
        if (before, after) == (_S.SEALED, _S.POSTING):
            of_copy.append("store = %(store)s")  # the settings may name another one than when the chunk was sealed
        if before in GOOD:  # what came back once says nothing of a chunk that was found damaged since
            of_copy.append("look_again_at = NULL")
        if before in GOOD and after is not _S.WITHDRAWN:
            of_copy.append("damage = %(damage)s")
        facts = {
            "reason": reason if after in _KEEPS_REASON else "",
            "damage": reason if after is _S.DAMAGED else "",
            "store": self._store,
        }
        with self._engine.begin() as connection:
            moved = move_row(
                connection, lease, chunk, before, after, changes=changes, copy_changes=", ".join(of_copy), facts=facts
            )
            before_move(connection, moved.caf_file_id, chunk, before, after)
            if before in GOOD:
                forget_full_read(connection, moved.caf_file_id)
            if (before, after) == (_S.DAMAGED, _S.LOCATED):
                require_right_copy(connection, moved.caf_file_id, chunk)
            if after is _S.PACKING or (after not in CLAIMING and before not in GOOD):
                forget_pending(connection, moved.caf_file_id)
                forget_log_times(connection, moved.caf_file_id)
            if not follow_move(connection, moved.caf_file_id, after) and after not in CLAIMING:
                withdraw_claims(connection, [moved.caf_file_id])
            elif before is _S.SEALED and after is _S.PACKING:
                connection.exec_driver_sql(_CLAIM_SKIPPED_AGAIN, {"id": moved.caf_file_id, "good": GOOD})

    def seal(
        self,
        lease: Lease,
        chunk: str,
        seal: Seal,
        skips: Iterable[Skip],
        released: Iterable[tuple[str, str]],
        *,
        rows: Batches = tuple,
        part: "PartLocation | None" = None,
        logs: "Collection[LogTimes]" = (),
    ) -> None:
        """packing → sealed, or → empty if the seal counts no member, with the facts, the skips and the rows of the members.

        Ends the claims of the skipped objects and of those released (key, object version) to be planned again.

        Args:
            lease: on the chunk.
            chunk: which.
            seal: its facts.
            skips: objects that were not packed.
            released: objects that are to be planned again.
            rows: returns the whole objects, batches of LOCATION_SCHEMA.
            part: instead, the part that it has.
            logs: the times of its clp-s archives.

        Raises:
            LedgerError: the claims that are left, or the rows, are not as many as the members; or the part is another one than
                was planned. Nothing was written.
        """
        changes = """sealed_at = now(), caf_size_bytes = %(caf_size_bytes)s, stored_size_bytes = %(stored_size_bytes)s,
            member_count = %(member_count)s, member_bytes = %(member_bytes)s, skipped_count = %(skipped_count)s,
            released_count = %(released_count)s,
            samples = CAST(%(samples)s AS jsonb), tail_start = %(tail_start)s, tail_sha256 = %(tail_sha256)s"""
        facts = {**asdict(seal), "samples": samples_as_json(seal.samples)}
        after = _S.SEALED if seal.member_count else _S.EMPTY
        with self._engine.begin() as connection:
            moved = move_row(connection, lease, chunk, _S.PACKING, after, changes=changes, facts=facts)
            if after is _S.SEALED:
                connection.exec_driver_sql(_WANT_COPY, {**facts, "id": moved.caf_file_id, "store": self._store})
            record_skips(connection, moved.source_id, moved.caf_file_id, skips)
            release_claims(connection, moved.caf_file_id, released)
            record_log_times(connection, moved.caf_file_id, logs)
            record_header_sets(connection, rows(), part)
            written = copy_location_batches(connection, "pending_locations", moved.source_id, moved.caf_file_id, rows())
            if part is not None:
                record_part(connection, "pending_locations", moved.caf_file_id, part)
                written += 1
            if written != seal.member_count:
                raise LedgerError(
                    f"chunk {chunk} has {counted(seal.member_count, 'member')}, but {counted(written, 'location')}",
                    hint="the packed file is not the one that was recorded: check the disk",
                )
            if follow_move(connection, moved.caf_file_id, after):
                return
            left = connection.exec_driver_sql(
                ("SELECT count(*) FROM claims WHERE caf_file_id = %(id)s"), {"id": moved.caf_file_id}
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
        with self._engine.begin() as connection:
            states = (_S.POSTING, _S.POSTED, _S.UPLOADING)
            caf_file_id = require_state(connection, lease, chunk, states, "sampled again")
            connection.exec_driver_sql(_NEW_SAMPLES, {"samples": samples_as_json(samples), "id": caf_file_id})

    def record_root(self, lease: Lease, chunk: str, merkle_root: bytes, proof_type: int, samples: Sequence[Sample]) -> None:
        """Give a chunk that was never posted the root and samples of another type of tree over the same bytes.

        It is `sealed`, or `posting` and known by the store never to have been posted. What waits to be posted has the old root,
        and is forgotten.

        Raises:
            IllegalMove: a transaction posts it, or may.
        """
        with self._engine.begin() as connection:
            caf_file_id = require_state(connection, lease, chunk, (_S.SEALED, _S.POSTING), "given another root")
            require_no_post(connection, caf_file_id, chunk, "get another root")
            end_waiting(connection, caf_file_id)
            facts = {"root": merkle_root, "type": proof_type, "samples": samples_as_json(samples), "id": caf_file_id}
            for statement in (_NEW_ROOT, _NEW_SAMPLES, _CHANGED):
                connection.exec_driver_sql(statement, facts)

    def record_posting(self, lease: Lease, chunk: str, posting: Posting) -> None:
        """posting → posted.

        Raises:
            IntegrityError: the posting is of other bytes than those that were sealed; nothing was written.
            IllegalMove: it is in another store than the ledger's copy, of which a transaction is or may be included.
        """
        with self._engine.begin() as connection:
            facts = {"owner": posting.owner, "start": posting.start, "store": self._store}
            changes = "posted_at = now(), owner = %(owner)s, start = %(start)s, store = %(store)s"
            store = connection.exec_driver_sql(
                "SELECT store FROM chunks WHERE name = %(chunk)s", {"chunk": chunk}
            ).scalar_one_or_none()
            moved = move_row(connection, lease, chunk, _S.POSTING, _S.POSTED, copy_changes=changes, facts=facts)
            if store != self._store:
                require_no_post(connection, moved.caf_file_id, chunk, f"be posted in store '{self._store}'")
            require_sealed_bytes(chunk, moved, posting)
            end_waiting(connection, moved.caf_file_id)

    def load_locations(self, lease: Lease, chunk: str) -> int:
        """verified → located: move the rows that the seal wrote to the locations, and end the chunk's claims, at once.

        A part's object is located, and its claim ends, once all parts are. Returns the rows written.

        Raises:
            LedgerError: another chunk in good standing has one of the objects; nothing was written.
        """
        with self._engine.begin() as connection:
            moved = move_row(connection, lease, chunk, _S.VERIFIED, _S.LOCATED, changes="located_at = now()")
            written = locate_pending(connection, moved.caf_file_id)
            if written != moved.member_count:
                raise LedgerError(
                    f"chunk {chunk} has {counted(moved.member_count, 'member')}, but {counted(written, 'object')} of it"
                    " can be located",
                    hint=TWICE,
                )
            if follow_move(connection, moved.caf_file_id, _S.LOCATED):
                return written
            connection.exec_driver_sql(_END_OLD_SKIPS, {"id": moved.caf_file_id})
            claimed = end_claims(connection, moved.caf_file_id)
            if claimed != written:
                raise LedgerError(
                    f"chunk {chunk} has {counted(written, 'location')}, but {counted(claimed, 'claim')}", hint=TWICE
                )
        return written

    def record_repost(self, lease: Lease, chunk: str, posting: Posting) -> None:
        """Give a `damaged` chunk the place of its new post, where the chain no longer has the first.

        The copies known of the first are listed no more.

        Raises:
            IntegrityError: the posting is of other bytes than those that were sealed; nothing was written.
        """
        with self._engine.begin() as connection:
            caf_file_id = require_state(connection, lease, chunk, (_S.DAMAGED,), "posted again")
            facts = {"id": caf_file_id, "owner": posting.owner, "start": posting.start}
            connection.exec_driver_sql(_POSTED_AGAIN, facts)
            connection.exec_driver_sql(_CHANGED, facts)
            require_sealed_bytes(chunk, chunk_row(connection, caf_file_id), posting)
            end_waiting(connection, caf_file_id)
            forget_full_read(connection, caf_file_id)
            unlist(connection, caf_file_id)  # those that are known are of a post that the chain no longer has

    # --- what stores keep here ---

    def transactions(self, holder: Holder) -> TransactionLog:
        """Return the log of what stores signed, for this holder."""
        return TransactionLog(self._engine, holder, lease_seconds=self._lease_seconds)

    def providers(self) -> ProviderRecords:
        """Return what was measured of providers."""
        return ProviderRecords(self._engine)

    def controls(self) -> Controls:
        """Return what the operator orders."""
        return Controls(self._engine)

    # --- failures ---

    def read_failures(self, chunk: str) -> Mapping[tuple[str, str], ReadFailures]:
        """Return the objects of the chunk that runs failed on, by key and version."""
        with self._engine.begin() as connection:
            rows = connection.exec_driver_sql(
                (
                    "SELECT file_path, object_version, times, last_run FROM read_failures"
                    " JOIN caf_files USING (caf_file_id) WHERE name = %(chunk)s"
                ),
                {"chunk": chunk},
            ).fetchall()
        return {(key, version): ReadFailures(times, last_run) for key, version, times, last_run in rows}

    def count_read_failures(self, chunk: str, objects: Sequence[tuple[str, str]], run: str) -> None:
        """Count a run of the chunk that failed on these objects, by key and version; a run counts once for each object."""
        with self._engine.begin() as connection:
            connection.exec_driver_sql(
                (
                    "INSERT INTO read_failures AS old (caf_file_id, file_path, object_version, last_run)"
                    " SELECT DISTINCT caf_file_id, key, version, %(run)s FROM caf_files,"
                    " unnest(CAST(%(keys)s AS text[]), CAST(%(versions)s AS text[])) AS failed (key, version)"
                    " WHERE name = %(chunk)s"
                    " ON CONFLICT (caf_file_id, file_path, object_version) DO UPDATE SET"
                    " times = old.times + CASE WHEN old.last_run = excluded.last_run THEN 0 ELSE 1 END,"
                    " last_run = excluded.last_run"
                ),
                {
                    "chunk": chunk,
                    "keys": [key for key, _ in objects],
                    "versions": [version for _, version in objects],
                    "run": run,
                },
            )

    # --- staging ---

    def reserve_staging(self, lease: Lease, chunk: str, folder: str, size_bytes: int, limit_bytes: int) -> None:
        """Reserve bytes of a staging folder for a chunk, replacing its earlier reservation. `limit_bytes` 0: no limit.

        Raises:
            StagingError: with those of other chunks it would pass the limit.
        """
        with self._engine.begin() as connection:
            # Two runs must not both find the last of the room; a lock of the transaction, not of the session.
            connection.exec_driver_sql("LOCK TABLE staging_reservations IN SHARE ROW EXCLUSIVE MODE")
            caf_file_id = guarded(connection, lease, chunk)
            others = connection.exec_driver_sql(
                _RESERVED_BY_OTHERS, {"folder": folder, "caf_file_id": caf_file_id, "claiming": sorted(CLAIMING)}
            ).scalar_one()
            if limit_bytes and others + size_bytes > limit_bytes:
                raise StagingError(
                    f"chunk {chunk} needs {size_bytes} bytes of {folder}, where other chunks hold {others} of {limit_bytes}",
                    hint="wait for other chunks to be archived, or raise packing.staging_limit",
                )
            connection.exec_driver_sql(
                (
                    "INSERT INTO staging_reservations (caf_file_id, folder, size_bytes) VALUES (%(id)s, %(folder)s, %(size)s)"
                    " ON CONFLICT (caf_file_id) DO UPDATE SET folder = excluded.folder, size_bytes = excluded.size_bytes"
                ),
                {"id": caf_file_id, "folder": folder, "size": size_bytes},
            )

    def release_staging(self, chunk: str) -> None:
        """Give the chunk's reservation back; does nothing where there is none."""
        with self._engine.begin() as connection:
            connection.exec_driver_sql(
                (
                    "DELETE FROM staging_reservations USING caf_files"
                    " WHERE staging_reservations.caf_file_id = caf_files.caf_file_id AND name = %(chunk)s"
                ),
                {"chunk": chunk},
            )


_WANT_COPY = """
    INSERT INTO chunk_copies (caf_file_id, store, merkle_root, proof_type)
    VALUES (%(id)s, %(store)s, %(merkle_root)s, %(proof_type)s)
    """
_NEW_ROOT = """
    UPDATE chunk_copies SET merkle_root = %(root)s, proof_type = %(type)s, updated_at = now() WHERE caf_file_id = %(id)s
    """
_NEW_SAMPLES = "UPDATE caf_files SET samples = CAST(%(samples)s AS jsonb) WHERE caf_file_id = %(id)s"
_CHANGED = "UPDATE caf_files SET updated_at = now() WHERE caf_file_id = %(id)s"
_POSTED_AGAIN = """
    UPDATE chunk_copies SET owner = %(owner)s, start = %(start)s, posted_at = now(), updated_at = now(), look_again_at = NULL
    WHERE caf_file_id = %(id)s
    """

# Packed again, an object may turn out to be readable. Where another chunk took it meanwhile, the next seal fails.
_CLAIM_SKIPPED_AGAIN = """
    INSERT INTO claims (source_id, file_path, version_id, etag, size_bytes, rewritten_at, caf_file_id, last_modified)
    SELECT source_id, file_path, version_id, etag, size_bytes, rewritten_at, caf_file_id, last_modified FROM skipped_objects AS s
    WHERE caf_file_id = %(id)s AND NOT EXISTS (
        SELECT FROM file_locations AS l JOIN chunks AS f ON f.caf_file_id = l.caf_file_id
        WHERE l.source_id = s.source_id AND l.file_path = s.file_path AND l.version_id = s.version_id AND l.etag = s.etag
            AND l.size_bytes = s.size_bytes AND l.rewritten_at = s.rewritten_at AND l.part = 0 AND f.state = ANY(%(good)s))
    ON CONFLICT DO NOTHING
    """

# A skip of an object that is located now says nothing any more.
_END_OLD_SKIPS = (
    "DELETE FROM skipped_objects AS old USING claims WHERE claims.caf_file_id = %(id)s AND old.source_id = claims.source_id"
    " AND old.file_path = claims.file_path AND old.version_id = claims.version_id AND old.etag = claims.etag"
    " AND old.size_bytes = claims.size_bytes AND old.rewritten_at = claims.rewritten_at"
)


def _insert_plan(connection: Connection, source_id: int, plan: PlanRecord) -> int | None:
    """Return the new plan's id, None where a plan of this hash is there already."""
    statement = (
        "INSERT INTO plans (source_id, name, sha256, snapshot, folder, object_count, object_bytes)"
        " VALUES (%(source_id)s, %(name)s, %(sha256)s, %(snapshot)s, %(folder)s, %(object_count)s, %(object_bytes)s)"
        " ON CONFLICT (sha256) DO NOTHING RETURNING plan_id"
    )
    plan_id: int | None = connection.exec_driver_sql(statement, {**asdict(plan), "source_id": source_id}).scalar_one_or_none()
    return plan_id


def _insert_chunks(
    connection: Connection, source_id: int, plan_id: int, plan: PlanRecord, chunks: "Sequence[ChunkPlan]"
) -> Mapping[int, int]:
    """Return the new chunks' ids by number."""
    rows = (
        (
            str(ChunkId(plan.source, plan.name, one.chunk_number)),
            source_id,
            plan_id,
            one.chunk_number,
            one.object_count,
            one.object_bytes,
            one.expected_size_bytes,
        )
        for one in chunks
    )
    copy_rows(connection, "caf_files", _PLANNED_CHUNK, rows)
    found = connection.exec_driver_sql("SELECT number, caf_file_id FROM caf_files WHERE plan_id = %(id)s", {"id": plan_id})
    return {number: caf_file_id for number, caf_file_id in found}
