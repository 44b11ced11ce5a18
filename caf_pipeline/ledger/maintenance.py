"""What the doctor reads and removes in a ledger: reservations, unsettled transactions, and rows
without a chunk.

What writes looks again under a lock, and may be called at any moment, by any number.
"""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import bindparam, delete, select

from caf_pipeline.chunk_state import CLAIMING, EVER_LOCATED, MAY_BE_PENDING, ChunkState
from caf_pipeline.ledger.copy import end_claims, forget_pending
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.query_files import query
from caf_pipeline.ledger.records import ChunkRows
from caf_pipeline.ledger.tables import CAF_FILES, FILE_LOCATIONS, TRANSACTIONS
from caf_pipeline.ledger.transactions import UNSETTLED
from caf_pipeline.store.protocol import SignedTransaction

_UNSETTLED: Final = UNSETTLED.order_by(TRANSACTIONS.c.account, TRANSACTIONS.c.sequence)
# A load of locations holds the row from its move on. What has no row can get none: ids are never
# given again. What is stored of the state is enough: whether a chunk claims or ever was located
# does not depend on its copy.
_CHUNK_STATE: Final = (
    select(CAF_FILES.c.state)
    .where(CAF_FILES.c.caf_file_id == bindparam("id"))
    .with_for_update(key_share=True)
)
_DROP_LOCATIONS: Final = delete(FILE_LOCATIONS).where(
    FILE_LOCATIONS.c.caf_file_id == bindparam("id")
)


class StrayRows(LedgerPart):
    """What the doctor reads and removes."""

    def unsettled(self) -> Sequence[SignedTransaction]:
        """Return the transactions of every account whose fate is not known, by account and
        sequence.
        """
        with self._engine.begin() as connection:
            rows = connection.execute(_UNSETTLED).fetchall()
        return [SignedTransaction(**row._asdict()) for row in rows]

    def by_chunk(self, source: str) -> Sequence[ChunkRows]:
        """Count a source's location rows, pending ones and claims by chunk, all at one moment;
        chunks without any are there, too.

        A part counts as claimed by its chunk, whose object has one claim for all of them.

        Empty for a source that is not known. Reads each table once.
        """
        with self._engine.begin() as connection:
            values = {"source": source, "claiming": sorted(CLAIMING)}
            rows = connection.exec_driver_sql(query("rows_by_chunk"), values).fetchall()
        return [
            ChunkRows(
                **{**row._asdict(), "state": None if row.state is None else ChunkState(row.state)}
            )
            for row in rows
        ]

    def drop(self, caf_file_id: int) -> int:
        """Remove rows that a chunk in its state, or an unknown one, cannot have: claims, locations
        and pending locations.

        What a chunk claims by its state, and locations that it has or had, stay. Returns the rows
        removed.
        """
        dropped = 0
        with self._engine.begin() as connection:
            state = connection.execute(_CHUNK_STATE, {"id": caf_file_id}).scalar_one_or_none()
            if state not in CLAIMING:
                dropped += end_claims(connection, caf_file_id)
            if state not in EVER_LOCATED:
                dropped += connection.execute(_DROP_LOCATIONS, {"id": caf_file_id}).rowcount
            if state not in MAY_BE_PENDING:
                dropped += forget_pending(connection, caf_file_id)
        return dropped
