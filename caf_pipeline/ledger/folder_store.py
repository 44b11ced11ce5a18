"""Which folder has the ledger's chunks, if they are kept in a folder: the id in its marker file."""

import secrets
from collections.abc import Mapping
from typing import Final

from caf_pipeline.ledger.database import LedgerPart
from caf_pipeline.ledger.records import FolderStore

# A ledger of an earlier version has chunks in a folder without an id.
_GIVE_ID: Final = """
    INSERT INTO folder_store (id, marked)
    SELECT %(id)s, false WHERE EXISTS (SELECT FROM chunk_copies WHERE owner = %(owner)s)
    ON CONFLICT (only_row) DO NOTHING
    """
_MARK: Final = """
    INSERT INTO folder_store AS old (id, marked) VALUES (%(id)s, true)
    ON CONFLICT (only_row) DO UPDATE SET id = excluded.id, marked = true WHERE NOT old.marked
    """
_READ: Final = "SELECT id, marked FROM folder_store"


class FolderStores(LedgerPart):
    """The id of the folder store."""

    def folder_store(self, owner: str) -> FolderStore | None:
        """Return the folder store; None while no chunk of this owner was posted. An old ledger gets a new id, not yet marked."""
        with self._database.transaction() as connection:
            row = connection.execute(_READ).fetchone()
            if row is None:
                connection.execute(_GIVE_ID, {"id": new_folder_id(), "owner": owner})
                row = connection.execute(_READ).fetchone()
        return None if row is None else FolderStore(row.id, row.marked)

    def mark_folder_store(self, folder_id: str) -> str:
        """Record that the folder with this id has the chunks. Return the id that counts: one that was marked before stays."""
        with self._database.transaction() as connection:
            connection.execute(_MARK, {"id": folder_id})
            return str(connection.execute(_READ).one().id)

    def posted_sizes(self, owner: str) -> Mapping[bytes, int]:
        """Return the stored size of each chunk that this owner posted, by Merkle root."""
        statement = "SELECT merkle_root, stored_size_bytes FROM chunks WHERE owner = %(owner)s"
        with self._database.transaction() as connection:
            rows = connection.execute(statement, {"owner": owner})
            return {bytes(row.merkle_root): row.stored_size_bytes for row in rows}


def new_folder_id() -> str:
    """Return a random id."""
    return secrets.token_hex(16)
