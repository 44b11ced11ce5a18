"""Rows that the doctor reads and removes: unsettled transactions, and rows without a chunk."""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import bindparam, delete, func, select
from sqlalchemy.dialects.postgresql import insert

from caf_pipeline.chunk_state import CLAIMING, EVER_LOCATED, MAY_BE_PENDING, ChunkState
from caf_pipeline.ledger.copy import KEY, end_claims, forget_pending
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.query_files import query
from caf_pipeline.ledger.records import ChunkRows
from caf_pipeline.ledger.tables import (
    CAF_FILES,
    CLAIMS,
    FILE_LOCATIONS,
    PENDING_LOCATIONS,
    TRANSACTIONS,
)
from caf_pipeline.ledger.transactions import UNSETTLED
from caf_pipeline.store.protocol import SignedTransaction

# A load of locations holds the row from its move on. Ids are never reused, so a missing row stays
# missing. The stored state suffices: a copy does not change whether a chunk claims or was located.
_CHUNK_STATE: Final = (
    select(CAF_FILES.c.state)
    .where(CAF_FILES.c.caf_file_id == bindparam("id"))
    .with_for_update(key_share=True)
)
_CLAIM: Final = ("caf_file_id", "last_modified", *KEY)
_CLAIM_SEALED: Final = (
    insert(CLAIMS)
    .from_select(
        _CLAIM,
        select(*(PENDING_LOCATIONS.c[name] for name in _CLAIM)).where(
            PENDING_LOCATIONS.c.caf_file_id == bindparam("id")
        ),
    )
    .on_conflict_do_nothing()
)
_ARE_CLAIMED: Final = select(
    select(func.count()).where(CLAIMS.c.caf_file_id == bindparam("id")).scalar_subquery()
    == select(CAF_FILES.c.member_count)
    .where(CAF_FILES.c.caf_file_id == bindparam("id"))
    .scalar_subquery()
)


class StrayRows(LedgerPart):
    """Finds and removes rows that no run needs. Safe at any time, and concurrently."""

    def unsettled(self) -> Sequence[SignedTransaction]:
        return [
            SignedTransaction(**row._asdict())
            for row in self._rows(
                UNSETTLED.order_by(TRANSACTIONS.c.account, TRANSACTIONS.c.sequence)
            )
        ]

    def by_chunk(self, source: str) -> Sequence[ChunkRows]:
        """Count a source's rows and claims by chunk, at one moment.

        Includes chunks without rows. An object in parts has one claim, which counts for each of its
        chunks. Reads each table once.
        """
        rows = self._rows(query("rows_by_chunk"), source=source, claiming=sorted(CLAIMING))
        return [
            ChunkRows(**{**row._asdict(), "state": row.state and ChunkState(row.state)})
            for row in rows
        ]

    def claim_again(self, caf_file_id: int) -> bool:
        """Claim the objects of a sealed chunk; return whether all of them are claimed now.

        Objects that another chunk claims stay with that chunk.
        """
        with self._engine.begin() as connection:
            connection.execute(_CLAIM_SEALED, {"id": caf_file_id})
            return bool(connection.execute(_ARE_CLAIMED, {"id": caf_file_id}).scalar_one())

    def drop(self, caf_file_id: int) -> int:
        """Remove rows without a chunk or against its state; return their number.

        Locations that it has or had stay.
        """
        dropped = 0
        with self._engine.begin() as connection:
            state = connection.execute(_CHUNK_STATE, {"id": caf_file_id}).scalar_one_or_none()
            if state not in CLAIMING:
                dropped += end_claims(connection, caf_file_id)
            if state not in EVER_LOCATED:
                dropped += connection.execute(
                    delete(FILE_LOCATIONS).where(FILE_LOCATIONS.c.caf_file_id == caf_file_id)
                ).rowcount
            if state not in MAY_BE_PENDING:
                dropped += forget_pending(connection, caf_file_id)
        return dropped
