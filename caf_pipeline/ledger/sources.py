"""The bucket and prefix of each source."""

from collections.abc import Mapping
from typing import Final

from sqlalchemy import bindparam, delete, exists, select, update
from sqlalchemy.dialects.postgresql import insert

from caf_pipeline.errors import LedgerError
from caf_pipeline.ledger.engine import LedgerPart, Lock, source_id_of
from caf_pipeline.ledger.leases import lock_lease, require_free
from caf_pipeline.ledger.records import plan_lease
from caf_pipeline.ledger.removal import OF_AN_ADDRESS
from caf_pipeline.ledger.tables import CAF_FILES, METADATA, SOURCES
from caf_pipeline.store.protocol import Lease

_OF_NAME: Final = SOURCES.c.name == bindparam("source")
_HAS_CHUNKS: Final = exists().where(CAF_FILES.c.source_id == SOURCES.c.source_id)
_NEW: Final = insert(SOURCES).on_conflict_do_nothing(index_elements=[SOURCES.c.name])
_ADDRESS: Final = select(SOURCES.c.address).where(_OF_NAME)
_FIXED_ADDRESS: Final = _ADDRESS.where(_HAS_CHUNKS)


class Sources(LedgerPart):
    """Registers sources."""

    def register(
        self, name: str, archive_id: str, address: str, *, lease: Lease | None = None
    ) -> None:
        """`address` is endpoint, bucket and prefix. `lease` is on the source's plan.

        Until the source has its first chunk, another address replaces the recorded one, and removes
        its inventories, skips and other rows.

        Raises:
            LedgerError: the source has another address, and chunks.
            HeldByOther: a run plans the source under another address.
        """
        facts = {"name": name, "archive_id": archive_id, "address": address}
        with self._engine.begin() as connection:
            connection.execute(_NEW, facts)
            recorded = connection.execute(_ADDRESS, {"source": name}).scalar_one()
            if recorded == address:
                return
            source_id = source_id_of(connection, name, lock=Lock.UPDATE)
            if connection.execute(_FIXED_ADDRESS, {"source": name}).one_or_none() is not None:
                raise LedgerError(
                    f"source '{name}' is {recorded} in the ledger, and {address} in the settings",
                    hint="give the new address a source of another name; "
                    f"'caf remove {name}' removes the old source if nothing of it was stored",
                )
            if lease is None:
                require_free(connection, plan_lease(name))
            else:
                lock_lease(connection, lease)
            for table in OF_AN_ADDRESS:
                rows = METADATA.tables[table]
                connection.execute(delete(rows).where(rows.c.source_id == source_id))
            change = update(SOURCES).where(SOURCES.c.source_id == source_id)
            connection.execute(change.values(address=address, archive_id=archive_id))

    def address(self, source: str) -> str | None:
        """None while the source has no chunk and may get another address."""
        address: str | None = self._scalar(_FIXED_ADDRESS, source=source)
        return address

    def addresses(self) -> Mapping[str, str]:
        """By archive id."""
        return {
            row.archive_id: row.address
            for row in self._rows(select(SOURCES.c.archive_id, SOURCES.c.address))
        }
