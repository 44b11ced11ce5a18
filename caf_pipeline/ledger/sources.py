"""Sources: their addresses, ids of archives, plans, and removal."""

import secrets
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import asdict
from typing import Final

import pyarrow as pa
from psycopg.errors import LockNotAvailable
from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Text,
    all_,
    and_,
    bindparam,
    delete,
    exists,
    func,
    or_,
    select,
    union,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.exc import OperationalError

from caf_pipeline.chunk_state import ChunkState, CopyState
from caf_pipeline.errors import HeldByOther, IllegalMove, LedgerError
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.inventory.plan import ChunkPlan, PlannedObject
from caf_pipeline.ledger.claims import copy_claims, copy_rows, refuse_located
from caf_pipeline.ledger.engine import LedgerPart, Lock, source_id_of
from caf_pipeline.ledger.leases import lock_lease, require_free
from caf_pipeline.ledger.parts import register_parts
from caf_pipeline.ledger.records import (
    KnownArchive,
    PlanRecord,
    PlanRow,
    RemovableSource,
    chunk_lease,
    plan_lease,
)
from caf_pipeline.ledger.sql_files import query
from caf_pipeline.ledger.tables import (
    CAF_FILES,
    CHUNK_COPIES,
    FILE_LOCATIONS,
    LEASES,
    METADATA,
    PLANS,
    POST_KEYS,
    POSTS,
    REBUILDS,
    SOURCES,
    STORE_LOOKS,
    TRANSACTION_POSTS,
)
from caf_pipeline.ledger.views import CHUNKS
from caf_pipeline.records import Lease

ARCHIVE_ID_BYTES: Final = 16
"""Random bytes, so that nobody can test a guess at a bucket's name against the chain."""

POST_KEY_BYTES: Final = 32

_OF_NAME: Final = SOURCES.c.name == bindparam("source")
_HAS_CHUNKS: Final = exists().where(
    CAF_FILES.c.source_id == SOURCES.c.source_id,
    or_(
        CAF_FILES.c.state.not_in([ChunkState.WITHDRAWN, ChunkState.EMPTY]),
        exists().where(CHUNK_COPIES.c.caf_file_id == CAF_FILES.c.caf_file_id),
    ),
)
"""Withdrawn and empty chunks count only if they were posted, which leaves a retired copy."""

_NEW: Final = insert(SOURCES).on_conflict_do_nothing(index_elements=[SOURCES.c.name])
_ADDRESS: Final = select(SOURCES.c.address).where(_OF_NAME)
_FIXED_ADDRESS: Final = _ADDRESS.where(_HAS_CHUNKS)
_ARCHIVE_ID: Final = select(SOURCES.c.archive_id).where(_OF_NAME)
_POST_KEY: Final = select(POST_KEYS.c.key).join(SOURCES).where(_OF_NAME)
_ARCHIVES: Final = union(
    select(SOURCES.c.archive_id, SOURCES.c.name, SOURCES.c.address),
    select(CHUNK_COPIES.c.archive_id, SOURCES.c.name, SOURCES.c.address)
    .join_from(CHUNK_COPIES, CAF_FILES)
    .join(SOURCES, CAF_FILES.c.source_id == SOURCES.c.source_id)
    .where(CHUNK_COPIES.c.archive_id.is_not(None)),
)
_SET_ASIDE: Final = select(func.unnest(SOURCES.c.ids_set_aside)).where(_OF_NAME)


class Sources(LedgerPart):
    """Registers sources."""

    def register(self, name: str, address: str, *, lease: Lease | None = None) -> None:
        """Record the source. Its first registration makes a random archive id and post key.

        `address` is endpoint, bucket and prefix. `lease` is on the source's plan. Another address
        replaces the recorded one, and removes its inventories, skips and other rows. Withdrawn and
        empty chunks that were never posted do not prevent this.

        Raises:
            LedgerError: the source has another address, and chunks.
            HeldByOther: a run plans the source under another address.
        """
        facts = {
            "name": name,
            "archive_id": secrets.token_hex(ARCHIVE_ID_BYTES),
            "address": address,
        }
        with self._engine.begin() as connection:
            connection.execute(_NEW, facts)
            key = secrets.token_bytes(POST_KEY_BYTES)
            connection.exec_driver_sql(query("add_post_key"), {"source": name, "key": key})
            recorded = connection.execute(_ADDRESS, {"source": name}).scalar_one()
            if recorded == address:
                return
            source_id = source_id_of(connection, name, lock=Lock.UPDATE)
            if connection.execute(_FIXED_ADDRESS, {"source": name}).one_or_none() is not None:
                raise LedgerError(
                    f"source '{name}' is {recorded} in the ledger, and {address} in the settings",
                    hint=f"if nothing of it was stored, 'caf run {name}' takes the new address, "
                    f"and 'caf remove {name}' frees the name; otherwise give the new address a "
                    "source of another name",
                )
            if lease is None:
                require_free(connection, plan_lease(name))
            else:
                lock_lease(connection, lease)
            for table in OF_AN_ADDRESS:
                rows = METADATA.tables[table]
                connection.execute(delete(rows).where(rows.c.source_id == source_id))
            change = update(SOURCES).where(SOURCES.c.source_id == source_id)
            connection.execute(change.values(address=address, ids_set_aside=None))

    def address(self, source: str) -> str | None:
        """None while the source may get another address. See `register`."""
        address: str | None = self._scalar(_FIXED_ADDRESS, source=source)
        return address

    def archive_id(self, source: str) -> str | None:
        """None before the source is registered."""
        archive_id: str | None = self._scalar(_ARCHIVE_ID, source=source)
        return archive_id

    def post_key(self, source: str) -> bytes | None:
        """Return the secret of `post_mac`. None before the source is registered."""
        key: bytes | None = self._scalar(_POST_KEY, source=source)
        return key

    def archives(self) -> Sequence[KnownArchive]:
        """A restored source may have several."""
        return [
            KnownArchive(archive_id=row.archive_id, source=row.name, address=row.address)
            for row in self._rows(_ARCHIVES)
        ]

    def archive_ids(self, source: str) -> Set[str]:
        return {archive.archive_id for archive in self.archives() if archive.source == source}

    def restore_archive_id(self, source: str, archive_id: str) -> None:
        """Replace the id of a source by that of its archive in the store.

        Nothing changes if the source has chunks other than withdrawn and empty ones that were never
        posted.
        """
        with self._of_source(source, lock=Lock.UPDATE) as (connection, source_id):
            change = update(SOURCES).where(SOURCES.c.source_id == source_id, ~_HAS_CHUNKS)
            if connection.execute(change.values(archive_id=archive_id)).rowcount:
                # They are about the posts of the replaced id.
                looks = delete(STORE_LOOKS).where(STORE_LOOKS.c.source_id == source_id)
                connection.execute(looks)

    def set_aside(self, source: str, archive_ids: Collection[str]) -> None:
        """Record that these archives in the store do not stop plans of the source."""
        with self._of_source(source, lock=Lock.UPDATE) as (connection, source_id):
            recorded = connection.execute(_SET_ASIDE, {"source": source}).scalars()
            ids = sorted({*recorded, *archive_ids})
            change = update(SOURCES).where(SOURCES.c.source_id == source_id)
            connection.execute(change.values(ids_set_aside=ids or None))

    def ids_set_aside(self, source: str) -> Set[str]:
        return {archive_id for (archive_id,) in self._rows(_SET_ASIDE, source=source)}


_S = ChunkState

REMOVABLE: Final = (_S.PLANNED, _S.PACKING, _S.SEALED, _S.EMPTY, _S.PARKED, _S.WITHDRAWN)
"""Such a chunk may never have been posted. Other columns show whether it was."""

OF_AN_ADDRESS: Final = (
    "skipped_objects",
    "current_exceptions",
    "inventories",
    "noticed_keys",
    "messages_set_apart",
    "queue_reads",
    "rebuilds",
    "store_looks",
    "left_posts",
)
"""Tables about a source's bucket with rows before its first chunk."""

OF_A_CHUNK: Final = (
    "staging_reservations",
    "packing_secrets",
    "replicas",
    "full_reads",
    "chunk_copies",
    "transaction_posts",
    "read_failures",
    "object_parts",
    "log_times",
    "pending_locations",
)
"""Rows of a chunk in `posts` and `file_locations` forbid a removal."""

_SOURCE_ID: Final = bindparam("id", type_=Integer)
_LOCK_CHUNKS: Final = (
    select()
    .select_from(CAF_FILES)
    .where(CAF_FILES.c.source_id == _SOURCE_ID)
    .with_for_update(nowait=True)
)
# A run wanted to post such a chunk, and this ledger knows no transaction of it. The store may still
# have its post.
_INTENDED: Final = and_(
    CHUNKS.c.copy_state.is_not_distinct_from(CopyState.POSTING),
    ~exists().where(TRANSACTION_POSTS.c.caf_file_id == CHUNKS.c.caf_file_id),
)
_INTENDED_NAMES: Final = (
    select(CHUNKS.c.name).where(CHUNKS.c.source_id == _SOURCE_ID, _INTENDED).order_by(CHUNKS.c.name)
)
_POSTED_OR_LOCATED: Final = (
    select(CHUNKS.c.name, CHUNKS.c.state, CHUNKS.c.copy_state)
    .where(
        CHUNKS.c.source_id == _SOURCE_ID,
        or_(
            CHUNKS.c.state != all_(bindparam("removable", type_=ARRAY(Text))),
            CHUNKS.c.copy_state != "wanted",
            CHUNKS.c.located_at.is_not(None),
            CHUNKS.c.restored_at.is_not(None),
            CHUNKS.c.adopted_at.is_not(None),
            exists().where(POSTS.c.caf_file_id == CHUNKS.c.caf_file_id),
            exists().where(
                TRANSACTION_POSTS.c.caf_file_id == CHUNKS.c.caf_file_id,
                or_(TRANSACTION_POSTS.c.live, TRANSACTION_POSTS.c.start.is_not(None)),
            ),
        ),
    )
    .order_by(CHUNKS.c.name)
    .limit(1)
)
_HAS_LOCATIONS: Final = select(exists().where(FILE_LOCATIONS.c.source_id == _SOURCE_ID))
_IS_REBUILT: Final = select(exists().where(REBUILDS.c.source_id == _SOURCE_ID))
_HELD: Final = (
    select(LEASES.c.name)
    .join(CAF_FILES, LEASES.c.name == bindparam("prefix", type_=Text) + CAF_FILES.c.name)
    .where(CAF_FILES.c.source_id == _SOURCE_ID, LEASES.c.expires_at > func.clock_timestamp())
    .order_by(LEASES.c.name)
)


class SourceRemoval(LedgerPart):
    """Removes a source if none of its chunks was ever posted or located.

    The caller first withdraws chunks that a run wanted to post, which asks the store. Rows in
    `leases` stay, so that a chunk planned again under the same name gets a greater epoch.
    """

    def removable(self, source: str) -> RemovableSource:
        """Return what `remove` would remove once the intended chunks are withdrawn.

        Raises IllegalMove if a chunk is or may be stored, LedgerError during a rebuild, and
        HeldByOther if a run works on the source.
        """
        with self._of_source(source, lock=Lock.UPDATE) as (connection, source_id):
            require_free(connection, plan_lease(source))
            _require_removable(connection, source_id, source, beside=_INTENDED)
            counts = (
                connection.exec_driver_sql(query("count_source"), {"id": source_id}).one()._asdict()
            )
            intended = connection.execute(_INTENDED_NAMES, {"id": source_id}).scalars().all()
            return RemovableSource(**counts, intended=intended)

    def remove(self, lease: Lease, source: str) -> None:
        """Raises the errors of `removable`. `lease` is on the source's plan."""
        with self._engine.begin() as connection:
            source_id = source_id_of(connection, source, lock=Lock.UPDATE)
            _require_removable(connection, source_id, source)
            for name in OF_A_CHUNK:
                table = METADATA.tables[name]
                of_chunks = delete(table).where(
                    table.c.caf_file_id == CAF_FILES.c.caf_file_id,
                    CAF_FILES.c.source_id == source_id,
                )
                connection.execute(of_chunks)
            for name in ("claims", *OF_AN_ADDRESS, "caf_files", "plans", "post_keys", "sources"):
                table = METADATA.tables[name]
                connection.execute(delete(table).where(table.c.source_id == source_id))
            lock_lease(connection, lease)  # last: the lease's renewal waits for it


def _require_removable(
    connection: Connection,
    source_id: int,
    source: str,
    *,
    beside: ColumnElement[bool] | None = None,
) -> None:
    """Also lock the source's chunks. Chunks that match `beside` do not count."""
    values = {"id": source_id}
    try:
        connection.execute(_LOCK_CHUNKS, values)
    except OperationalError as error:
        if not isinstance(error.orig, LockNotAvailable):
            raise
        raise HeldByOther(
            f"a run works on a chunk of source '{source}' now",
            holder="",
            hint="wait for that run, or end it first",
        ) from error
    reason, hint = "", ""
    stored = _POSTED_OR_LOCATED if beside is None else _POSTED_OR_LOCATED.where(~beside)
    chunk = connection.execute(stored, {**values, "removable": [*REMOVABLE]}).one_or_none()
    if chunk is not None:
        reason = f"chunk {chunk.name} is '{chunk.state}', and is or may be stored"
        if chunk.copy_state == CopyState.POSTING:
            hint = f"'caf withdraw {chunk.name}' asks the store, and gives up an unposted chunk"
    elif connection.execute(_HAS_LOCATIONS, values).scalar_one():
        reason = "the ledger has locations of its objects"
    if reason:
        raise IllegalMove(
            f"source '{source}' cannot be removed: {reason}",
            hint=hint
            or "keep the source in the ledger; to stop archiving it, remove it from caf.toml",
        )
    if connection.execute(_IS_REBUILT, values).scalar_one():
        raise LedgerError(
            f"source '{source}' cannot be removed: its rebuild is not complete, so the store may "
            "have chunks of it",
            hint=f"complete it with 'caf rebuild {source}'",
        )
    for name in connection.execute(_HELD, {**values, "prefix": chunk_lease("")}).scalars().all():
        require_free(connection, name)


_PLANNED_CHUNK: Final = {
    "name": "text",
    "source_id": "int4",
    "plan_id": "int8",
    "number": "int4",
    "object_count": "int8",
    "object_bytes": "int8",
    "expected_size_bytes": "int8",
}
_PLAN: Final = select(
    SOURCES.c.name.label("source"),
    PLANS.c.sha256,
    PLANS.c.name,
    PLANS.c.snapshot,
    PLANS.c.folder,
    PLANS.c.object_count,
    PLANS.c.object_bytes,
).join_from(PLANS, SOURCES)
_NEW_PLAN: Final = (
    insert(PLANS).on_conflict_do_nothing(index_elements=[PLANS.c.sha256]).returning(PLANS.c.plan_id)
)
_CHUNK_IDS: Final = select(CAF_FILES.c.number, CAF_FILES.c.caf_file_id).where(
    CAF_FILES.c.plan_id == bindparam("plan_id")
)


class Plans(LedgerPart):
    """Registers and lists plans: which new objects of an inventory go into which chunk."""

    def find(self, sha256: bytes) -> PlanRecord | None:
        rows = self._rows(_PLAN.where(PLANS.c.sha256 == sha256))
        return PlanRecord(**rows[0]._asdict()) if rows else None

    def is_name_taken(self, source: str, short: str) -> bool:
        return bool(self._rows(_PLAN.where(SOURCES.c.name == source, PLANS.c.name == short)))

    def register(
        self,
        lease: Lease,
        plan: PlanRecord,
        chunks: Sequence[ChunkPlan],
        claims: Iterable[pa.RecordBatch],
        parts: Iterable[tuple[int, PlannedObject]] = (),
    ) -> None:
        """Write a plan, its chunks as `planned`, its claims and its parts.

        Does nothing if the same hash is registered. If an error is raised, nothing was written.

        Raises:
            ClaimConflict: an object is already claimed or located.
            LeaseLost: another run holds the plan's lease, and removed this plan's files.
        """
        # NO KEY: locations and skips of the source may still be written.
        with self._of_source(plan.source, lock=Lock.NO_KEY_UPDATE) as (connection, source_id):
            values = {**asdict(plan), "source_id": source_id}
            del values["source"]
            plan_id = connection.execute(_NEW_PLAN, values).scalar_one_or_none()
            if plan_id is None:
                return
            rows = (
                (
                    str(ChunkId(plan.source, plan.name, chunk.chunk_number)),
                    source_id,
                    plan_id,
                    chunk.chunk_number,
                    chunk.object_count,
                    chunk.object_bytes,
                    chunk.expected_size_bytes,
                )
                for chunk in chunks
            )
            copy_rows(connection, "caf_files", _PLANNED_CHUNK, rows)
            new_chunks = connection.execute(_CHUNK_IDS, {"plan_id": plan_id})
            ids = {row.number: row.caf_file_id for row in new_chunks}
            copy_claims(connection, source_id, ids, claims)
            register_parts(connection, source_id, plan_id, ids, parts)
            refuse_located(connection, source_id, plan_id)
            lock_lease(connection, lease)  # last: the lease's renewal waits for it

    def list(self, source: str | None = None, limit: int | None = None) -> Sequence[PlanRow]:
        """Latest first, without adopted files."""
        plans = []
        for row in self._rows(query("plans"), source=source, limit=limit):
            columns = row._asdict()
            states, created_at = columns.pop("chunks") or {}, columns.pop("created_at")
            chunks = {ChunkState(state): states[state] for state in sorted(states)}
            plans.append(PlanRow(PlanRecord(**columns), created_at, chunks))
        return plans
