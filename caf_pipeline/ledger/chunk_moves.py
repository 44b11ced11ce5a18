"""Moves of chunks. Each move and everything that belongs to it are one transaction.

Source: "Database" and "Promises" in docs/explanation/design.md.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Table, bindparam, delete, func, insert, select, update

from caf_pipeline.chunk_state import CLAIMING, GOOD, UNDER_WAY, ChunkState, CopyState
from caf_pipeline.errors import IllegalMove, LedgerError
from caf_pipeline.inventory.manifest import LogTimes, PartLocation
from caf_pipeline.ledger.claims import (
    TWICE,
    Batches,
    copy_location_batches,
    end_claims,
    forget_log_times,
    forget_pending,
    locate_pending,
    record_header_sets,
    record_log_times,
    record_skips,
    release_claims,
    same_object,
    withdraw_claims,
)
from caf_pipeline.ledger.engine import LedgerEngine, LedgerPart
from caf_pipeline.ledger.moves import (
    as_jsonb,
    chunk_row,
    move_row,
    require_sealed_bytes,
    require_state,
)
from caf_pipeline.ledger.parts import follow_move, record_part
from caf_pipeline.ledger.records import CopyCheck, SealRecord, Skip
from caf_pipeline.ledger.sql_files import query
from caf_pipeline.ledger.stores import forget_full_read, record_check, require_right_copy, unlist
from caf_pipeline.ledger.tables import CAF_FILES, CHUNK_COPIES, CLAIMS, SKIPPED_OBJECTS
from caf_pipeline.ledger.transactions import before_move, end_waiting, require_no_post
from caf_pipeline.ledger.views import CHUNKS
from caf_pipeline.records import Lease, PostRecord, Sample
from caf_pipeline.system.quantities import counted

_S = ChunkState

_OWN_METHOD: Final = {
    (_S.PACKING, _S.SEALED): "seal",
    (_S.PACKING, _S.EMPTY): "seal",
    (_S.POSTING, _S.POSTED): "record_posting",
    (_S.UPLOADING, _S.VERIFIED): "record_verified",
    (_S.VERIFIED, _S.LOCATED): "load_locations",
}
"""Moves that write more than the state. `move` refuses them."""

_SEALED: Final = (
    "caf_size_bytes",
    "stored_size_bytes",
    "member_count",
    "member_bytes",
    "skipped_count",
    "released_count",
    "tail_start",
    "tail_sha256",
)
_KEEPS_REASON: Final = frozenset({_S.PARKED, _S.WITHDRAWN})

_STORE: Final = select(CHUNKS.c.store).where(CHUNKS.c.name == bindparam("chunk"))
_POSTING_IN: Final = _STORE.where(CHUNKS.c.copy_state == CopyState.POSTING)
# A skip of an object that is now located no longer counts.
_END_OLD_SKIPS: Final = delete(SKIPPED_OBJECTS).where(
    CLAIMS.c.caf_file_id == bindparam("id"), same_object(SKIPPED_OBJECTS, CLAIMS)
)


class ChunkMoves(LedgerPart):
    """Moves chunks. Methods write nothing if they raise.

    They raise LeaseLost if the lease was taken over, and IllegalMove if the state forbids the move.
    """

    def __init__(self, engine: LedgerEngine, store: str) -> None:
        super().__init__(engine)
        self._store = store

    def move(  # noqa: PLR0912 - one for each kind of move
        self,
        lease: Lease,
        chunk: str,
        before: ChunkState,
        after: ChunkState,
        *,
        reason: str = "",
        fault: CopyCheck | None = None,
    ) -> None:
        """Make a move that has no method of its own.

        `packing` counts an attempt. A parked, damaged or withdrawn chunk keeps `reason`. `fault` is
        recorded for the copy that made the chunk damaged.
        `withdrawn` and `abandoned` end the chunk's claims. From `sealed` back to `packing`, skipped
        objects are claimed again, unless another chunk has taken them.

        Before a chunk whose copy is `posting` is withdrawn, the caller asks the store whether it
        has the post.

        Raises IllegalMove also if the move would forget a live post or a post in another store. A
        damaged chunk without a copy that was seen right is not located.
        """
        method = _OWN_METHOD.get((before, after))
        if method is not None:
            raise IllegalMove(
                f"chunk {chunk} goes from '{before}' to '{after}' only through {method}()"
            )
        changes: dict[str, Any] = {"reason": reason if after in _KEEPS_REASON else ""}
        copy_changes: dict[str, Any] = {}
        if after is _S.PACKING:
            changes["attempts"] = CAF_FILES.c.attempts + 1
        if before is _S.PARKED and after in UNDER_WAY:
            changes["failures"] = []
        if (before, after) == (_S.SEALED, _S.PACKING):
            # The sealed file is lost, and its root must never be posted.
            changes |= dict.fromkeys(
                ("sealed_at", "tail_start", "tail_sha256", "header", "nonce", "recipients")
            )
        if (before, after) == (_S.SEALED, _S.POSTING):
            # The settings may name another store than at the seal.
            copy_changes["store"] = self._store
        if before in GOOD:
            copy_changes["look_again_at"] = None
        if before in GOOD and after is not _S.WITHDRAWN:
            copy_changes["damage"] = reason if after is _S.DAMAGED else ""
        with self._engine.begin() as connection:
            _require_no_other_store(connection, chunk, after, self._store)
            moved = move_row(
                connection, lease, chunk, before, after, changes=changes, copy_changes=copy_changes
            )
            before_move(connection, moved.caf_file_id, chunk, before, after)
            if before in GOOD:  # an earlier full read proves nothing about damage found later
                forget_full_read(connection, moved.caf_file_id)
            if fault:
                record_check(connection, moved.caf_file_id, fault)
            if (before, after) == (_S.DAMAGED, _S.LOCATED):
                require_right_copy(connection, moved.caf_file_id, chunk)
            if after is _S.PACKING or (after not in CLAIMING and before not in GOOD):
                forget_pending(connection, moved.caf_file_id)
                forget_log_times(connection, moved.caf_file_id)
            if not follow_move(connection, moved.caf_file_id, after) and after not in CLAIMING:
                withdraw_claims(connection, [moved.caf_file_id])
            elif before is _S.SEALED and after is _S.PACKING:
                connection.exec_driver_sql(
                    query("claim_skipped_again"), {"id": moved.caf_file_id, "good": GOOD}
                )

    def seal(
        self,
        lease: Lease,
        chunk: str,
        seal: SealRecord,
        skips: Iterable[Skip],
        released: Iterable[tuple[str, str]],
        *,
        rows: Batches = tuple,
        part: PartLocation | None = None,
        logs: Collection[LogTimes] = (),
    ) -> None:
        """Move packing → sealed, or → empty without members, and write the seal, skips and rows.

        Ends the claims of skipped objects, and of `released` (key, object version) objects, which
        are planned again. `rows` returns batches of LOCATION_SCHEMA; a chunk of a `part` has none.
        Raises LedgerError if members, remaining claims and rows differ in number.
        """
        facts = {name: getattr(seal, name) for name in _SEALED}
        facts |= {"sealed_at": func.now(), "samples": as_jsonb(seal.samples)}
        after = _S.SEALED if seal.member_count else _S.EMPTY
        if seal.header and after is _S.SEALED:
            facts |= {
                "header": seal.header.header,
                "nonce": seal.header.nonce,
                "recipients": list(seal.recipients),
            }
        with self._engine.begin() as connection:
            moved = move_row(connection, lease, chunk, _S.PACKING, after, changes=facts)
            if after is _S.SEALED:
                root = {"merkle_root": seal.merkle_root, "proof_type": seal.proof_type}
                connection.execute(
                    insert(CHUNK_COPIES),
                    {**root, "caf_file_id": moved.caf_file_id, "store": self._store},
                )
            record_skips(connection, moved.source_id, moved.caf_file_id, skips)
            release_claims(connection, moved.caf_file_id, released)
            record_log_times(connection, moved.caf_file_id, logs)
            record_header_sets(connection, rows(), part)
            written = copy_location_batches(
                connection, "pending_locations", moved.source_id, moved.caf_file_id, rows()
            )
            if part is not None:
                record_part(connection, "pending_locations", moved.caf_file_id, part)
                written += 1
            if written != seal.member_count:
                raise LedgerError(
                    f"chunk {chunk} has {counted(seal.member_count, 'member')}, but "
                    f"{counted(written, 'location')}",
                    hint="the packed file differs from its records: check the disk",
                )
            if follow_move(connection, moved.caf_file_id, after):
                return
            claims = connection.execute(
                select(func.count())
                .select_from(CLAIMS)
                .where(CLAIMS.c.caf_file_id == moved.caf_file_id)
            ).scalar_one()
            # An object without a claim may be in another plan by now, and would be archived twice.
            if claims != seal.member_count:
                raise LedgerError(
                    f"chunk {chunk} has {counted(seal.member_count, 'member')}, but claims"
                    f" {counted(claims, 'object')} after its skips",
                    hint="withdraw the chunk; the next plan takes its objects again",
                )

    def record_samples(self, lease: Lease, chunk: str, samples: Sequence[Sample]) -> None:
        """Replace the samples of a chunk that was packed again to its root after the post began."""
        with self._engine.begin() as connection:
            states = (_S.POSTING, _S.POSTED, _S.UPLOADING)
            caf_file_id = require_state(connection, lease, chunk, states, "sampled again")
            _change(connection, CAF_FILES, caf_file_id, {"samples": as_jsonb(samples)})

    def record_root(
        self,
        lease: Lease,
        chunk: str,
        merkle_root: bytes,
        proof_type: int,
        samples: Sequence[Sample],
    ) -> None:
        """Give a chunk that was never posted the root of another type of tree.

        A waiting message with the old root is deleted.
        """
        with self._engine.begin() as connection:
            caf_file_id = require_state(
                connection, lease, chunk, (_S.SEALED, _S.POSTING), "given another root"
            )
            require_no_post(connection, caf_file_id, chunk, "get another root")
            end_waiting(connection, caf_file_id)
            root = {"merkle_root": merkle_root, "proof_type": proof_type, "updated_at": func.now()}
            _change(connection, CHUNK_COPIES, caf_file_id, root)
            _change(
                connection,
                CAF_FILES,
                caf_file_id,
                {"samples": as_jsonb(samples), "updated_at": func.now()},
            )

    def record_posting(self, lease: Lease, chunk: str, posting: PostRecord) -> None:
        """Move posting → posted. Raises IntegrityError for other bytes than the sealed."""
        with self._engine.begin() as connection:
            store = connection.execute(_STORE, {"chunk": chunk}).scalar_one_or_none()
            changes = {
                "posted_at": func.now(),
                "owner": posting.owner,
                "start": posting.start,
                "store": self._store,
            }
            moved = move_row(connection, lease, chunk, _S.POSTING, _S.POSTED, copy_changes=changes)
            if store != self._store:
                require_no_post(
                    connection, moved.caf_file_id, chunk, f"be posted in store '{self._store}'"
                )
            require_sealed_bytes(chunk, moved, posting)
            end_waiting(connection, moved.caf_file_id)

    def load_locations(self, lease: Lease, chunk: str) -> int:
        """Move verified → located: write the seal's rows as locations, and end the claims.

        An object in parts is located when all its parts are. Returns the number of rows. Raises
        LedgerError if another chunk in good standing has one of the objects.
        """
        with self._engine.begin() as connection:
            moved = move_row(
                connection,
                lease,
                chunk,
                _S.VERIFIED,
                _S.LOCATED,
                changes={"located_at": func.now(), "located_count": CAF_FILES.c.member_count},
            )
            written = locate_pending(connection, moved.caf_file_id)
            if written != moved.member_count:
                raise LedgerError(
                    f"chunk {chunk} has {counted(moved.member_count, 'member')}, but "
                    f"only {counted(written, 'object')} can be located",
                    hint=TWICE,
                )
            if follow_move(connection, moved.caf_file_id, _S.LOCATED):
                return written
            connection.execute(_END_OLD_SKIPS, {"id": moved.caf_file_id})
            claimed = end_claims(connection, moved.caf_file_id)
            if claimed != written:
                raise LedgerError(
                    f"chunk {chunk} has {counted(written, 'location')}, but "
                    f"{counted(claimed, 'claim')}",
                    hint=TWICE,
                )
        return written

    def record_repost(self, lease: Lease, chunk: str, posting: PostRecord) -> None:
        """Give a `damaged` chunk a new post, after the chain lost the first.

        Copies of the first are no longer listed. Raises IntegrityError for other bytes.
        """
        with self._engine.begin() as connection:
            caf_file_id = require_state(connection, lease, chunk, (_S.DAMAGED,), "posted again")
            if connection.execute(_STORE, {"chunk": chunk}).scalar_one() != self._store:
                raise IllegalMove(
                    f"chunk {chunk} cannot be posted again in store '{self._store}': its copy is "
                    "in another store",
                    hint="repair it with the settings of the store that has its copy",
                )
            post = {
                "owner": posting.owner,
                "start": posting.start,
                "posted_at": func.now(),
                "look_again_at": None,
            }
            _change(connection, CHUNK_COPIES, caf_file_id, {**post, "updated_at": func.now()})
            _change(connection, CAF_FILES, caf_file_id, {"updated_at": func.now()})
            require_sealed_bytes(chunk, chunk_row(connection, caf_file_id), posting)
            end_waiting(connection, caf_file_id)
            forget_full_read(connection, caf_file_id)
            unlist(connection, caf_file_id)


def _require_no_other_store(
    connection: Connection, chunk: str, after: ChunkState, own_store: str
) -> None:
    """Refuse to withdraw a chunk that another store than that of the settings may have."""
    store = connection.execute(_POSTING_IN, {"chunk": chunk}).scalar_one_or_none()
    if after is _S.WITHDRAWN and store not in (None, own_store):
        raise IllegalMove(
            f"chunk {chunk} cannot be withdrawn: store '{store}' may have its post, and the "
            f"settings name store '{own_store}'",
            hint=f"withdraw it with the settings of store '{store}'",
        )


def _change(
    connection: Connection, table: Table, caf_file_id: int, values: Mapping[str, Any]
) -> None:
    connection.execute(update(table).where(table.c.caf_file_id == caf_file_id).values(values))
