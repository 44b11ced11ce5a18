"""Removes a source if none of its chunks was ever posted or located.

The caller first withdraws chunks that a run wanted to post, which asks the store. Rows in `leases`
stay, so that a chunk planned again under the same name gets a greater epoch.
"""

from typing import Final

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
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.exc import OperationalError

from caf_pipeline.chunk_state import ChunkState, CopyState
from caf_pipeline.errors import HeldByOther, IllegalMove, LedgerError
from caf_pipeline.ledger.engine import LedgerPart, Lock, source_id_of
from caf_pipeline.ledger.leases import lock_lease, require_free
from caf_pipeline.ledger.records import RemovableSource, chunk_lease, plan_lease
from caf_pipeline.ledger.tables import (
    CAF_FILES,
    FILE_LOCATIONS,
    LEASES,
    METADATA,
    PLANS,
    POSTS,
    REBUILDS,
    SOURCES,
    TRANSACTION_POSTS,
)
from caf_pipeline.ledger.views import CHUNKS
from caf_pipeline.store.protocol import Lease

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
_COUNTS: Final = select(
    SOURCES.c.address,
    select(func.count())
    .where(PLANS.c.source_id == SOURCES.c.source_id)
    .scalar_subquery()
    .label("plans"),
    select(func.count())
    .where(CAF_FILES.c.source_id == SOURCES.c.source_id)
    .scalar_subquery()
    .label("chunks"),
).where(SOURCES.c.source_id == _SOURCE_ID)


class SourceRemoval(LedgerPart):
    """Removes a source."""

    def removable(self, source: str) -> RemovableSource:
        """Return what `remove` would remove once the intended chunks are withdrawn.

        Raises IllegalMove if a chunk is or may be stored, LedgerError during a rebuild, and
        HeldByOther if a run works on the source.
        """
        with self._of_source(source, lock=Lock.UPDATE) as (connection, source_id):
            require_free(connection, plan_lease(source))
            _require_removable(connection, source_id, source, beside=_INTENDED)
            counts = connection.execute(_COUNTS, {"id": source_id}).one()._asdict()
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
