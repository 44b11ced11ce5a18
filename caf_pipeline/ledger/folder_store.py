"""Which folder has the ledger's chunks, if they are kept in a folder: the id in its marker file."""

from typing import Final

from caf_pipeline.ledger.engine import LedgerPart

_MARK: Final = "INSERT INTO folder_store (id) VALUES (%(id)s) ON CONFLICT (only_row) DO NOTHING"
_READ: Final = "SELECT id FROM folder_store"


class FolderStores(LedgerPart):
    """The id of the folder store."""

    def folder_store(self) -> str | None:
        """Return the id of the folder that has the chunks; None before `mark_folder_store`."""
        with self._engine.begin() as connection:
            folder_id: str | None = connection.exec_driver_sql(_READ).scalar_one_or_none()
        return folder_id

    def mark_folder_store(self, folder_id: str) -> str:
        """Record that the folder with this id has the chunks. Return the id that counts: one that was marked before stays."""
        with self._engine.begin() as connection:
            connection.exec_driver_sql(_MARK, {"id": folder_id})
            return str(connection.exec_driver_sql(_READ).scalar_one())
