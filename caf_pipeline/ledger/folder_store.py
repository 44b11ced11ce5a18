"""The folder that has the ledger's chunks, by the id in its marker file."""

from typing import Final

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert

from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.tables import FOLDER_STORE

_MARK: Final = insert(FOLDER_STORE).on_conflict_do_nothing(index_elements=[FOLDER_STORE.c.only_row])
_READ: Final = select(FOLDER_STORE.c.id)


class FolderStores(LedgerPart):
    """Keeps the id of the folder store."""

    def folder_store(self) -> str | None:
        """None before `mark_folder_store`."""
        folder_id: str | None = self._scalar(_READ)
        return folder_id

    def mark_folder_store(self, folder_id: str) -> str:
        """Record a folder's id, unless there is one; return the recorded id."""
        with self._engine.begin() as connection:
            connection.execute(_MARK, {"only_row": True, "id": folder_id})
            return str(connection.execute(_READ).scalar_one())
