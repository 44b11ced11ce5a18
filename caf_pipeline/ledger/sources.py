"""The bucket and prefix of each source, and the ids of its archives in the store."""

import secrets
from collections.abc import Collection, Sequence, Set
from typing import Final

from sqlalchemy import LargeBinary, bindparam, delete, exists, func, or_, select, union, update
from sqlalchemy.dialects.postgresql import insert

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import LedgerError
from caf_pipeline.ledger.engine import LedgerPart, Lock, source_id_of
from caf_pipeline.ledger.leases import lock_lease, require_free
from caf_pipeline.ledger.records import KnownArchive, plan_lease
from caf_pipeline.ledger.removal import OF_AN_ADDRESS
from caf_pipeline.ledger.tables import (
    CAF_FILES,
    CHUNK_COPIES,
    METADATA,
    POST_KEYS,
    SOURCES,
    STORE_LOOKS,
)
from caf_pipeline.store.protocol import Lease

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
_NEW_KEY: Final = (
    insert(POST_KEYS)
    .from_select(
        ["source_id", "key"],
        select(SOURCES.c.source_id, bindparam("key", type_=LargeBinary)).where(_OF_NAME),
    )
    .on_conflict_do_nothing()
)
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
            connection.execute(_NEW_KEY, {"source": name, "key": key})
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
