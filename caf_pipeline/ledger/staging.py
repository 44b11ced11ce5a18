"""Reservations of bytes in staging folders, and the secrets of packings."""

import secrets
from collections.abc import Sequence
from typing import Final

from sqlalchemy import bindparam, delete, func, select
from sqlalchemy.dialects.postgresql import insert

from caf_pipeline.chunk_state import CLAIMING, ChunkState
from caf_pipeline.errors import StagingError
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.moves import guarded, require_state
from caf_pipeline.ledger.records import Reservation
from caf_pipeline.ledger.tables import CAF_FILES, PACKING_SECRETS, STAGING_RESERVATIONS
from caf_pipeline.ledger.views import CHUNKS
from caf_pipeline.store.protocol import Lease

_OF_OTHERS: Final = (
    select(func.coalesce(func.sum(STAGING_RESERVATIONS.c.size_bytes), 0))
    .join_from(STAGING_RESERVATIONS, CAF_FILES)
    .where(
        STAGING_RESERVATIONS.c.folder == bindparam("folder"),
        CAF_FILES.c.caf_file_id != bindparam("caf_file_id"),
        CAF_FILES.c.state.in_(sorted(CLAIMING)),
    )
)
_ALL: Final = (
    select(
        CHUNKS.c.name.label("chunk"),
        CHUNKS.c.state,
        STAGING_RESERVATIONS.c.folder,
        STAGING_RESERVATIONS.c.size_bytes,
    )
    .join(CHUNKS, CHUNKS.c.caf_file_id == STAGING_RESERVATIONS.c.caf_file_id)
    .order_by(CHUNKS.c.name)
)
_INSERT: Final = insert(STAGING_RESERVATIONS)
_RESERVE: Final = _INSERT.on_conflict_do_update(
    index_elements=[STAGING_RESERVATIONS.c.caf_file_id],
    set_={"folder": _INSERT.excluded.folder, "size_bytes": _INSERT.excluded.size_bytes},
)
_RELEASE: Final = delete(STAGING_RESERVATIONS).where(
    STAGING_RESERVATIONS.c.caf_file_id == CAF_FILES.c.caf_file_id,
    CAF_FILES.c.name == bindparam("chunk"),
)
_NEW_SECRET: Final = insert(PACKING_SECRETS).on_conflict_do_nothing()
_SECRET: Final = select(PACKING_SECRETS.c.secret).where(
    PACKING_SECRETS.c.caf_file_id == bindparam("id")
)

SECRET_BYTES: Final = 32


class Staging(LedgerPart):
    """Reserves room in staging, and keeps the secrets of packings."""

    def reserve(
        self, lease: Lease, chunk: str, folder: str, size_bytes: int, limit_bytes: int
    ) -> None:
        """Reserve bytes for a chunk, replacing its earlier reservation.

        Raises StagingError if all reservations would exceed `limit_bytes` (0: no limit).
        """
        with self._engine.begin() as connection:
            # Two runs must not both take the last room. The lock ends with the transaction.
            connection.exec_driver_sql(
                "LOCK TABLE staging_reservations IN SHARE ROW EXCLUSIVE MODE"
            )
            caf_file_id = guarded(connection, lease, chunk)
            others = connection.execute(
                _OF_OTHERS, {"folder": folder, "caf_file_id": caf_file_id}
            ).scalar_one()
            if limit_bytes and others + size_bytes > limit_bytes:
                raise StagingError(
                    f"chunk {chunk} needs {size_bytes} bytes of {folder}, but other chunks hold "
                    f"{others} of {limit_bytes}",
                    hint="wait for other chunks to be archived, or raise packing.staging_limit",
                )
            connection.execute(
                _RESERVE, {"caf_file_id": caf_file_id, "folder": folder, "size_bytes": size_bytes}
            )

    def release(self, chunk: str) -> None:
        self._execute(_RELEASE, chunk=chunk)

    def packing_secret(self, lease: Lease, chunk: str) -> bytes:
        """Return the random secret of the chunk's packing, and make it first if there is none.

        All runs get the same secret, until the seal deletes it.
        """
        with self._engine.begin() as connection:
            states = (ChunkState.PACKING,)
            caf_file_id = require_state(connection, lease, chunk, states, "packed")
            made = {"caf_file_id": caf_file_id, "secret": secrets.token_bytes(SECRET_BYTES)}
            connection.execute(_NEW_SECRET, made)
            return bytes(connection.execute(_SECRET, {"id": caf_file_id}).scalar_one())

    def list(self) -> Sequence[Reservation]:
        return [
            Reservation(row.chunk, ChunkState(row.state), row.folder, row.size_bytes)
            for row in self._rows(_ALL)
        ]
