"""Restores chunks that only the store knows: plan, chunk, locations, skips and copies.

Memory does not grow with the number of objects. The order of restores does not matter, except that
an object in two chunks stays in the first.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    Connection,
    Text,
    Update,
    bindparam,
    delete,
    exists,
    func,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import Insert, insert

from caf_pipeline.chunk_state import GOOD, IN_GOOD_STANDING, NOT_POSTED, ChunkState, CopyState
from caf_pipeline.errors import ClaimConflict, IllegalMove, IntegrityError, LedgerError
from caf_pipeline.inventory.manifest import LogTimes
from caf_pipeline.ledger.claims import (
    Batches,
    copy_location_batches,
    end_claims,
    forget_log_times,
    forget_pending,
    load_skips,
    record_header_sets,
    record_log_times,
    same_object,
    write_locations,
)
from caf_pipeline.ledger.engine import LedgerEngine, LedgerPart, Lock
from caf_pipeline.ledger.moves import as_jsonb, require_state
from caf_pipeline.ledger.parts import follow_move, has_part, import_part, record_part
from caf_pipeline.ledger.records import RemoteChunk, Skip
from caf_pipeline.ledger.sql_files import query
from caf_pipeline.ledger.stores import forget_full_read, record_verified
from caf_pipeline.ledger.tables import (
    CAF_FILES,
    CHUNK_COPIES,
    CLAIMS,
    LEFT_POSTS,
    PENDING_LOCATIONS,
    PLANS,
    REBUILDS,
    SKIPPED_OBJECTS,
    SOURCES,
    STORE_LOOKS,
    TRANSACTION_POSTS,
)
from caf_pipeline.ledger.transactions import before_move
from caf_pipeline.ledger.views import CHUNKS
from caf_pipeline.records import Lease

UNKNOWN_PLAN: Final = b"restored"
"""Prefix of the 40 bytes for an unknown hash of a plan. A real hash has 32."""

_PLAN: Final = select(PLANS.c.plan_id, PLANS.c.sha256).where(
    PLANS.c.source_id == bindparam("source_id"), PLANS.c.name == bindparam("name")
)
_OTHER_PLAN: Final = select(PLANS.c.name).where(
    PLANS.c.sha256 == bindparam("sha256"),
    or_(PLANS.c.source_id != bindparam("source_id"), PLANS.c.name != bindparam("name")),
)
_CLAIMED_PART: Final = (
    select(CLAIMS.c.file_path, CAF_FILES.c.name)
    .join_from(CLAIMS, CAF_FILES, CLAIMS.c.caf_file_id == CAF_FILES.c.caf_file_id)
    .where(
        CLAIMS.c.source_id == bindparam("source_id"),
        CLAIMS.c.file_path == bindparam("key"),
        func.object_version(
            CLAIMS.c.version_id, CLAIMS.c.etag, CLAIMS.c.size_bytes, CLAIMS.c.rewritten_at
        )
        == bindparam("object_version", type_=Text),
        CAF_FILES.c.plan_id != bindparam("plan_id"),
    )
)
_END_SKIPS: Final = delete(SKIPPED_OBJECTS).where(
    PENDING_LOCATIONS.c.caf_file_id == bindparam("id"),
    same_object(SKIPPED_OBJECTS, PENDING_LOCATIONS),
)
_DELETE_COPY: Final = delete(CHUNK_COPIES).where(
    CHUNK_COPIES.c.caf_file_id == bindparam("id"), CHUNK_COPIES.c.start.is_(None)
)
_PLAN_OF: Final = select(CAF_FILES.c.plan_id).where(CAF_FILES.c.caf_file_id == bindparam("id"))
_COUNT_LOCATED: Final = (
    update(CAF_FILES)
    .where(CAF_FILES.c.caf_file_id == bindparam("id"))
    .values(located_count=bindparam("count"))
)
_HAS_LIVE_POST: Final = select(
    exists()
    .where(TRANSACTION_POSTS.c.caf_file_id == CAF_FILES.c.caf_file_id)
    .where(CAF_FILES.c.name == bindparam("chunk"), TRANSACTION_POSTS.c.live)
)
_OF_SOURCE: Final = SOURCES.c.name == bindparam("source")
_BEGAN_AT: Final = select(REBUILDS.c.began_at).join(SOURCES).where(_OF_SOURCE)
_LEFT_POSTS: Final = select(LEFT_POSTS.c.merkle_root).join(SOURCES).where(_OF_SOURCE)
_UNKNOWN_POSTS: Final = (
    select(func.coalesce(func.max(STORE_LOOKS.c.unknown), 0))
    .join_from(STORE_LOOKS, SOURCES)
    .where(_OF_SOURCE)
)


@dataclass(frozen=True, slots=True)
class RestoredRows:
    """Numbers of restored and of altered locations, and the key of an altered location, or ""."""

    restored: int
    altered: int
    altered_key: str


class _Superseded(Exception):
    """All objects are in other chunks."""


class ChunkImport(LedgerPart):
    """Restores chunks."""

    def __init__(self, engine: LedgerEngine, store: str) -> None:
        super().__init__(engine)
        self._store = store

    def begin(self, source: str) -> None:
        with self._of_source(source) as (connection, source_id):
            connection.execute(
                insert(REBUILDS).values(source_id=source_id).on_conflict_do_nothing()
            )

    def end(self, source: str) -> None:
        with self._of_source(source) as (connection, source_id):
            connection.execute(delete(REBUILDS).where(REBUILDS.c.source_id == source_id))

    def began_at(self, source: str) -> datetime | None:
        began_at: datetime | None = self._scalar(_BEGAN_AT, source=source)
        return began_at

    def leave_posts(self, source: str, roots: Sequence[bytes], *, superseded: bool) -> None:
        """Record that these Merkle roots need not be chunks of this ledger.

        `superseded`: other chunks have all their objects; else an operator ordered a copy.
        """
        with self._of_source(source) as (connection, source_id):
            values = {"source_id": source_id, "roots": list(roots), "superseded": superseded}
            connection.exec_driver_sql(query("leave_posts"), values)

    def left_posts(self, source: str) -> Set[bytes]:
        return {row.merkle_root for row in self._rows(_LEFT_POSTS, source=source)}

    def unknown_posts(self, source: str) -> int:
        """They stop all posting."""
        return int(self._scalar(_UNKNOWN_POSTS, source=source))

    def has_live_post(self, chunk: str) -> bool:
        return bool(self._scalar(_HAS_LIVE_POST, chunk=chunk))

    def restore_chunk(
        self,
        chunk: RemoteChunk,
        rows: Batches,
        skips: Iterable[Skip],
        *,
        plan_folder: str,
        fault: str = "",
        logs: Collection[LogTimes] | None = None,
        lease: Lease | None = None,
    ) -> int:
        """Write a chunk that the ledger does not have, with its plan, rows and skips.

        Objects that a chunk in good standing has keep their location, and are no longer skipped.
        A chunk from an unknown post takes no place of content that this ledger packed, and its
        skips are not written: its manifest may be forged.
        Returns the number of locations, or 0 if other chunks have all objects. Then, and if an
        error is raised, nothing was written.

        `rows` returns batches of LOCATION_SCHEMA. `plan_folder` is for a missing plan. A `fault`
        makes the chunk `damaged`. `logs` is None if packing did not look for logs. `lease` is on
        the ledger's chunk of this name, which was never posted and is replaced.

        Raises:
            LedgerError: the ledger has the chunk; or rows or skips do not fit its counts, or name
                an object twice.
            ClaimConflict: a chunk under way claims one of its objects.
            IntegrityError: the ledger has another plan of this name.
        """
        # The lock of a new plan: the two must not take the same object concurrently.
        with (
            suppress(_Superseded),
            self._of_source(chunk.source, lock=Lock.NO_KEY_UPDATE) as (connection, source_id),
        ):
            state = connection.execute(
                select(CHUNKS.c.state).where(CHUNKS.c.name == chunk.name)
            ).scalar_one_or_none()
            if state is not None and lease is not None:
                _make_way(connection, lease, chunk.name)
            elif state is not None:
                raise LedgerError(
                    f"the ledger already has chunk {chunk.name}, which is '{state}'",
                    hint="it need not be restored",
                )
            plan_id = _plan_id(connection, source_id, chunk, plan_folder)
            caf_file_id = _write_chunk(
                connection, source_id, plan_id, chunk, replaces=lease is not None
            )
            archive_id = (
                select(SOURCES.c.archive_id)
                .where(SOURCES.c.source_id == source_id)
                .scalar_subquery()
            )
            copy = {
                "caf_file_id": caf_file_id,
                "store": self._store,
                "state": CopyState.DAMAGED if fault else CopyState.VERIFIED,
                "damage": fault,
                "merkle_root": chunk.file.posting.merkle_root,
                "proof_type": chunk.file.proof_type,
                "archive_id": func.nullif(chunk.archive_id, archive_id),
                "owner": chunk.file.posting.owner,
                "start": chunk.file.posting.start,
                "posted_at": func.now(),
                "verified_at": func.now(),
            }
            connection.execute(insert(CHUNK_COPIES).values(copy))
            row_count = copy_location_batches(
                connection, "pending_locations", source_id, caf_file_id, rows()
            )
            _require_count(
                chunk, "members", chunk.member_count, row_count + (chunk.part is not None)
            )
            if chunk.from_unknown_post:
                _keep_own(connection, source_id, caf_file_id, chunk)
            else:
                _refuse_claimed(connection, source_id, plan_id, caf_file_id, chunk)
            written = write_locations(connection, caf_file_id, twice=_twice(chunk))
            if chunk.member_count and not written and not chunk.part:
                raise _Superseded
            if chunk.part is not None:
                if has_part(connection, caf_file_id):
                    record_part(connection, "file_locations", caf_file_id, chunk.part)
                    follow_move(connection, caf_file_id, ChunkState.LOCATED)
                else:
                    import_part(connection, source_id, plan_id, caf_file_id, chunk.part)
                written = 1
            if not chunk.from_unknown_post:
                _replace_skips(connection, source_id, caf_file_id, chunk, skips)
            forget_pending(connection, caf_file_id)
            record_log_times(connection, caf_file_id, logs)
            record_header_sets(connection, rows(), chunk.part)
            record_verified(connection, caf_file_id, chunk.copies)
            connection.exec_driver_sql(query("count_plan"), {"plan_id": plan_id})
            connection.execute(_COUNT_LOCATED, {"id": caf_file_id, "count": written})
            return written
        return 0

    def restore_rows(self, lease: Lease, chunk: RemoteChunk, rows: Batches) -> RestoredRows:
        """Write the locations that a chunk in good standing lacks. Altered rows stay.

        Objects that another chunk in good standing has keep their location. A chunk with new
        locations counts as unread if its `unread` has bytes. `rows` returns batches of
        LOCATION_SCHEMA. If an error is raised, nothing was written.

        Raises:
            LedgerError: the rows do not fit the chunk's counts.
            ClaimConflict: a chunk under way claims one of its objects.
            IllegalMove: the chunk is not in good standing.
        """
        with self._of_source(chunk.source, lock=Lock.NO_KEY_UPDATE) as (connection, source_id):
            states = sorted(IN_GOOD_STANDING)
            caf_file_id = require_state(connection, lease, chunk.name, states, "given rows")
            plan_id = connection.execute(_PLAN_OF, {"id": caf_file_id}).scalar_one()
            if chunk.part is not None:
                record_part(connection, "pending_locations", caf_file_id, chunk.part)
                row_count = 1
            else:
                row_count = copy_location_batches(
                    connection, "pending_locations", source_id, caf_file_id, rows()
                )
            _require_count(chunk, "members", chunk.member_count, row_count)
            _refuse_claimed(connection, source_id, plan_id, caf_file_id, chunk)
            written = write_locations(connection, caf_file_id, twice=_twice(chunk))
            compared = connection.exec_driver_sql(
                query("compare_rows"), {"caf_file_id": caf_file_id}
            ).one()
            connection.execute(_COUNT_LOCATED, {"id": caf_file_id, "count": compared.located})
            connection.execute(_END_SKIPS, {"id": caf_file_id})
            forget_pending(connection, caf_file_id)
            record_header_sets(connection, rows(), chunk.part)
            if written:  # a full read did not compare them
                forget_full_read(connection, caf_file_id)
                if chunk.unread:
                    before = func.coalesce(CAF_FILES.c.unread, as_jsonb(()))
                    connection.execute(
                        update(CAF_FILES)
                        .where(CAF_FILES.c.caf_file_id == caf_file_id)
                        .values(unread=before.op("||")(as_jsonb(chunk.unread)))
                    )
                follow_move(connection, caf_file_id, ChunkState.LOCATED)
            return RestoredRows(written, compared.altered, compared.altered_key or "")


def _twice(chunk: RemoteChunk) -> LedgerError:
    return LedgerError(
        f"chunk {chunk.name} names an object twice",
        hint="'caf list' and 'caf extract' read it as a file",
    )


def _plan_id(connection: Connection, source_id: int, chunk: RemoteChunk, folder: str) -> int:
    names = {"source_id": source_id, "name": chunk.plan}
    plan = connection.execute(_PLAN, names).one_or_none()
    unknown = UNKNOWN_PLAN + hashlib.sha256(f"{source_id}\0{chunk.plan}".encode()).digest()
    sha256 = chunk.plan_sha256 or (unknown if plan is None else plan.sha256)
    if plan is not None and sha256 == plan.sha256:
        return int(plan.plan_id)
    other = connection.execute(_OTHER_PLAN, {**names, "sha256": sha256}).one_or_none()
    if other is not None or (plan is not None and plan.sha256 != unknown):
        raise IntegrityError(
            f"chunk {chunk.name} gives its plan {chunk.plan} the hash {sha256.hex()}, but the "
            "ledger has another hash"
        )
    if plan is None:
        values = {
            "sha256": sha256,
            "snapshot": chunk.snapshot,
            "folder": folder,
            "object_count": 0,
            "object_bytes": 0,
        }
        statement = insert(PLANS).values(**names, **values).returning(PLANS.c.plan_id)
        return int(connection.execute(statement).scalar_one())
    connection.execute(update(PLANS).where(PLANS.c.plan_id == plan.plan_id).values(sha256=sha256))
    return int(plan.plan_id)


def _make_way(connection: Connection, lease: Lease, chunk: str) -> None:
    caf_file_id = require_state(
        connection, lease, chunk, (*NOT_POSTED, ChunkState.PARKED), "replaced by a stored file"
    )
    before_move(connection, caf_file_id, chunk, ChunkState.PARKED, ChunkState.WITHDRAWN)
    connection.execute(_DELETE_COPY, {"id": caf_file_id})
    if connection.execute(
        select(exists().where(CHUNK_COPIES.c.caf_file_id == caf_file_id))
    ).scalar_one():
        raise IllegalMove(
            f"chunk {chunk} cannot be replaced by a stored file: it was posted",
            hint=f"'caf unpark {chunk}'",
        )
    forget_pending(connection, caf_file_id)
    forget_log_times(connection, caf_file_id)
    if not has_part(connection, caf_file_id):
        end_claims(connection, caf_file_id)


def _write_chunk(
    connection: Connection, source_id: int, plan_id: int, chunk: RemoteChunk, *, replaces: bool
) -> int:
    decided_count = chunk.member_count + chunk.skipped_count
    object_count = decided_count if chunk.object_count is None else chunk.object_count
    stored_size_bytes = chunk.file.posting.stored_size_bytes
    header = chunk.header
    caf_size_bytes = header.caf_size_bytes if header else stored_size_bytes
    facts: dict[str, Any] = {
        "state": ChunkState.LOCATED,
        "reason": "",
        "object_count": object_count,
        "object_bytes": chunk.member_bytes if chunk.object_bytes is None else chunk.object_bytes,
        "caf_size_bytes": caf_size_bytes,
        "stored_size_bytes": stored_size_bytes,
        "member_count": chunk.member_count,
        "member_bytes": chunk.member_bytes,
        "skipped_count": chunk.skipped_count,
        "released_count": object_count - decided_count,
        "samples": as_jsonb(chunk.samples),
        "unread": as_jsonb(chunk.unread) if chunk.unread else null(),
        "sealed_at": func.now(),
        "located_at": func.now(),
        "restored_at": func.now(),
        "header": header.header if header else None,
        "nonce": header.nonce if header else None,
        "recipients": None,  # a header does not name all of them
        "from_unknown_post": chunk.from_unknown_post,
    }
    statement: Insert | Update
    if replaces:
        facts |= {"attempts": 0, "tail_start": None, "tail_sha256": None, "updated_at": func.now()}
        statement = update(CAF_FILES).where(CAF_FILES.c.name == chunk.name).values(facts)
    else:
        facts |= {
            "name": chunk.name,
            "source_id": source_id,
            "plan_id": plan_id,
            "number": chunk.number,
            "expected_size_bytes": caf_size_bytes,
            "adopted_at": func.now() if chunk.manifest is None else None,
        }
        statement = insert(CAF_FILES).values(facts)
    return int(connection.execute(statement.returning(CAF_FILES.c.caf_file_id)).scalar_one())


def _refuse_claimed(
    connection: Connection, source_id: int, plan_id: int, caf_file_id: int, chunk: RemoteChunk
) -> None:
    if not connection.execute(select(exists().where(CLAIMS.c.source_id == source_id))).scalar_one():
        return
    if chunk.part is not None:
        names = {
            "source_id": source_id,
            "plan_id": plan_id,
            "key": chunk.part.row.key,
            "object_version": chunk.part.row.object_version,
        }
        claimed = connection.execute(_CLAIMED_PART, names).first()
    else:
        claimed = connection.exec_driver_sql(
            query("claims_of_restored"), {"caf_file_id": caf_file_id}
        ).one_or_none()
    if claimed is not None:
        raise ClaimConflict(
            f"'{claimed.file_path}' of chunk {chunk.name} is claimed by chunk {claimed.name}, "
            "which is under way",
            hint="finish or withdraw that chunk, then restore again",
        )


def _keep_own(connection: Connection, source_id: int, caf_file_id: int, chunk: RemoteChunk) -> None:
    """Leave out objects that this ledger packed, adopted or claimed itself."""
    if chunk.part is not None:
        row = chunk.part.row
        named = {"source_id": source_id, "key": row.key, "version": row.object_version}
        if connection.exec_driver_sql(query("owns_object"), named).scalar_one():
            raise _Superseded
    connection.exec_driver_sql(query("drop_own_pending"), {"caf_file_id": caf_file_id})


def _replace_skips(
    connection: Connection,
    source_id: int,
    caf_file_id: int,
    chunk: RemoteChunk,
    skips: Iterable[Skip],
) -> None:
    connection.execute(_END_SKIPS, {"id": caf_file_id})
    skip_count = load_skips(connection, skips)
    _require_count(chunk, "skipped objects", chunk.skipped_count, skip_count)
    values = {
        "source_id": source_id,
        "caf_file_id": caf_file_id,
        "start": chunk.file.posting.start,
        "good": GOOD,
    }
    for statement in ("skip_later", "skip_earlier", "skip_new") if skip_count else ():
        connection.exec_driver_sql(query(statement), values)


def _require_count(chunk: RemoteChunk, what: str, expected: int, count: int) -> None:
    if expected != count:
        raise LedgerError(f"chunk {chunk.name} counts {expected} {what}, but has {count}")
