"""A chunk's transactions in the ledger: committed before they are sent, settled when their fate is known.

Not here: what is in them, and when one may be given up (the store).
Source: promise 3 in docs/design.md.
"""

from collections.abc import Sequence
from typing import Final

import sqlalchemy.exc
from sqlalchemy import text

from caf_pipeline.database import Database
from caf_pipeline.errors import LedgerError, NotLocated
from caf_pipeline.interfaces import SignedTransaction

OUTCOMES: Final = ("included", "expired", "superseded")

_PENDING = text(
    "SELECT hash, body, account, sequence, timeout_height FROM transactions JOIN caf_files USING (caf_file_id)"
    " WHERE name = :chunk AND outcome IS NULL ORDER BY transactions.created_at, sequence"
)
_COMMIT = text(
    "INSERT INTO transactions (hash, caf_file_id, account, sequence, timeout_height, body)"
    " SELECT :hash, caf_file_id, :account, :sequence, :timeout_height, :body FROM caf_files WHERE name = :chunk"
)
_SETTLE = text(
    "UPDATE transactions SET outcome = :outcome FROM caf_files WHERE transactions.caf_file_id = caf_files.caf_file_id"
    " AND name = :chunk AND hash = :hash AND (outcome IS NULL OR outcome = :outcome)"
)


class ChunkTransactions:
    """The transactions of one chunk."""

    def __init__(self, database: Database, chunk: str) -> None:
        self._database = database
        self._chunk = chunk

    def pending(self) -> Sequence[SignedTransaction]:
        """Return those that are neither included nor given up, oldest first."""
        with self._database.transaction() as connection:
            rows = connection.execute(_PENDING, {"chunk": self._chunk}).all()
        return [SignedTransaction(row.hash, bytes(row.body), row.account, row.sequence, row.timeout_height) for row in rows]

    def commit(self, transaction: SignedTransaction) -> None:
        """Write a transaction; it is durable when this returns.

        Raises:
            LedgerError: the account's sequence is taken by a transaction that is or may be included.
        """
        try:
            with self._database.transaction() as connection:
                # A server that is set up to answer before it has written would break the promise.
                connection.execute(text("SET LOCAL synchronous_commit = on"))
                written = connection.execute(
                    _COMMIT,
                    {
                        "chunk": self._chunk,
                        "hash": transaction.hash,
                        "body": transaction.body,
                        "account": transaction.account,
                        "sequence": transaction.sequence,
                        "timeout_height": transaction.timeout_height,
                    },
                ).rowcount
        except LedgerError as error:
            if isinstance(error.__cause__, sqlalchemy.exc.IntegrityError):
                raise LedgerError(
                    f"chunk {self._chunk}: sequence {transaction.sequence} of account {transaction.account} has a"
                    " transaction already",
                    hint="settle that one first",
                ) from error
            raise
        if not written:
            raise NotLocated(f"the ledger has no chunk {self._chunk}")

    def settle(self, hash: str, outcome: str) -> None:
        """Close a transaction with one of `OUTCOMES`; the same outcome again changes nothing.

        Raises:
            LedgerError: the chunk has no such transaction, or it was closed otherwise.
        """
        with self._database.transaction() as connection:
            settled = connection.execute(_SETTLE, {"chunk": self._chunk, "hash": hash, "outcome": outcome}).rowcount
        if not settled:
            raise LedgerError(f"chunk {self._chunk} has no transaction {hash} that could still be '{outcome}'")
