"""Which folder has the ledger's chunks, if they are kept in a folder: the id in its marker file."""

from typing import Final

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert

from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.tables import FOLDER_STORE

_MARK: Final = insert(FOLDER_STORE).on_conflict_do_nothing(index_elements=[FOLDER_STORE.c.only_row])
_READ: Final = select(FOLDER_STORE.c.id)


class FolderStores(LedgerPart):
    """The id of the folder store."""

    def folder_store(self) -> str | None:
        """Return the id of the folder that has the chunks; None before `mark_folder_store`."""
        with self._engine.begin() as connection:
            folder_id: str | None = connection.execute(_READ).scalar_one_or_none()
        return folder_id

    def mark_folder_store(self, folder_id: str) -> str:
        """Record that the folder with this id has the chunks.

        Return the id that counts: one that was marked before stays.
        """
        with self._engine.begin() as connection:
            connection.execute(_MARK, {"id": folder_id})
            return str(connection.execute(_READ).scalar_one())
