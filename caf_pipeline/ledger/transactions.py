"""An account's transactions in the ledger: requested, committed before they are sent, settled when their outcome is known.

A commit locks the account's lease and the rows of its chunks: a run that lost the lease writes nothing, and a chunk that is
withdrawn at the same moment is either in the transaction, and stays, or is gone, and is not in it. That a sequence, and a
chunk, is paid for once is held by two unique indexes too.

A post is *live* while it is or may be on the chain.
Source: promise 3 in docs/design.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from sqlalchemy import Connection, Row

from caf_pipeline.chunk_state import MAY_BE_POSTED, ChunkState
from caf_pipeline.errors import IllegalMove, LeaseLost, LedgerError, NotLocated
from caf_pipeline.ledger.engine import LedgerEngine
from caf_pipeline.ledger.leases import HeldLease, lock_lease
from caf_pipeline.ledger.records import Holder, account_lease
from caf_pipeline.store.protocol import Lease, SignedTransaction, WaitingPost

OUTCOMES: Final = ("included", "failed", "expired", "superseded")

_S = ChunkState

_FORGETTING: Final = frozenset({_S.PLANNED, _S.PACKING, _S.WITHDRAWN, _S.ABANDONED})
"""States after which a chunk, or its objects, are packed again: with a live post, they would be paid for twice."""

_MAY_BE_POSTED: Final = sorted(MAY_BE_POSTED)

# A server that is set up to answer before it has written would break the promise.
_DURABLY: Final = "SET LOCAL synchronous_commit = on"

# The lock keeps others from taking the lease over until this transaction ends. A lease that was given back has expiry 0.

# In one order, so that two commits cannot wait for each other. The states are read afterwards: a statement that waited for a lock
# sees the copies as they were before it waited.
_LOCK_CHUNKS = "SELECT FROM caf_files WHERE name = ANY(%(chunks)s) ORDER BY caf_file_id FOR NO KEY UPDATE"
_CHUNK_ROWS = "SELECT caf_file_id, name, state, start FROM chunks WHERE name = ANY(%(chunks)s)"
# Asked for again, the post that the chunk's row knows is gone from the chain; one that it does not know is not.
_END_FIRST_POST = (
    "UPDATE transaction_posts SET live = false"
    " WHERE caf_file_id = %(id)s AND account = %(account)s AND live AND start = %(start)s"
)
_ASK = """
    INSERT INTO posts AS old (caf_file_id, account, message, charged_bytes)
    SELECT %(id)s, %(account)s, %(message)s, %(charged_bytes)s WHERE NOT EXISTS (
        SELECT FROM transaction_posts WHERE caf_file_id = %(id)s AND account = %(account)s AND live)
    ON CONFLICT (caf_file_id, account) DO UPDATE SET
        message = excluded.message, charged_bytes = excluded.charged_bytes, asked_at = excluded.asked_at
    WHERE (old.message, old.charged_bytes) <> (excluded.message, excluded.charged_bytes)
    """
_WAITING = """
    SELECT name AS chunk, message, charged_bytes FROM posts JOIN chunks USING (caf_file_id)
    WHERE account = %(account)s AND state = ANY(%(states)s) AND NOT EXISTS (
        SELECT FROM transaction_posts AS known
        WHERE known.caf_file_id = posts.caf_file_id AND known.account = posts.account AND live)
    ORDER BY asked_at, caf_file_id
    """
_END_OTHER_ASKS = "DELETE FROM posts WHERE caf_file_id = %(id)s AND account <> %(account)s"
_OTHER_POSTS = (
    "SELECT DISTINCT account FROM transaction_posts WHERE caf_file_id = %(id)s AND account <> %(account)s AND live ORDER BY 1"
)
SIGNED: Final = "SELECT hash, body, account, sequence, timeout_height, purpose, cost FROM transactions"
_PENDING = f"{SIGNED} WHERE account = %(account)s AND outcome IS NULL ORDER BY sequence"
_ASKED_AND_FREE = """
    SELECT caf_file_id, EXISTS (SELECT FROM transaction_posts AS known WHERE known.caf_file_id = posts.caf_file_id
        AND known.account = posts.account AND live) AS taken
    FROM posts WHERE account = %(account)s AND caf_file_id = ANY(%(ids)s)
    """
_COMMIT = """
    INSERT INTO transactions (hash, account, sequence, timeout_height, body, purpose, cost)
    VALUES (%(hash)s, %(account)s, %(sequence)s, %(timeout_height)s, %(body)s, %(purpose)s, %(cost)s)
    ON CONFLICT (account, sequence) WHERE outcome IS NULL OR outcome IN ('included', 'failed') DO NOTHING
    """
_COMMIT_POST = (
    "INSERT INTO transaction_posts (hash, account, position, caf_file_id) VALUES (%(hash)s, %(account)s, %(position)s, %(id)s)"
)
_TRANSACTION = "SELECT account, outcome FROM transactions WHERE hash = %(hash)s FOR NO KEY UPDATE"
_SETTLE = (
    "UPDATE transactions SET outcome = %(outcome)s, settled_at = now(), cost = coalesce(CAST(%(cost)s AS bigint), cost),"
    " cost_told = CAST(%(cost)s AS bigint) IS NOT NULL WHERE hash = %(hash)s"
)
# A purchase of ours may set an earlier end: the next reading says which.
_FORGET_LATEST_END: Final = """
    UPDATE storage_plans SET latest_end = NULL, latest_end_space = NULL
    WHERE account IN (SELECT account FROM transactions WHERE hash = %(hash)s AND purpose = 'buy')
    """
_POSITIONS = "SELECT position FROM transaction_posts WHERE hash = %(hash)s ORDER BY position"
_START = "UPDATE transaction_posts SET start = %(start)s WHERE hash = %(hash)s AND position = %(position)s"
_END_INCLUDED = (
    "DELETE FROM posts USING transaction_posts AS included WHERE included.hash = %(hash)s"
    " AND included.caf_file_id = posts.caf_file_id AND included.account = posts.account"
)
_END_POSTS = "UPDATE transaction_posts SET live = false WHERE hash = %(hash)s"
_START_OF = """
    SELECT transaction_posts.start
    FROM transaction_posts JOIN transactions USING (hash, account) JOIN caf_files USING (caf_file_id)
    WHERE account = %(account)s AND name = %(chunk)s AND outcome = 'included'
    ORDER BY transaction_posts.start DESC, sequence DESC LIMIT 1
    """
_SPENT = (
    "SELECT coalesce(sum(cost), 0) FROM transactions WHERE account = %(account)s"
    " AND (outcome IS NULL OR outcome IN ('included', 'failed'))"
)
_AT_LIST_PRICE = (
    "SELECT count(*) FROM transactions WHERE account = %(account)s AND purpose = 'buy' AND NOT cost_told"
    " AND (outcome IS NULL OR outcome = 'included')"
)
_SEE_HEIGHT = """
    INSERT INTO chain_heights AS old (chain_id, height) VALUES (%(chain_id)s, %(height)s)
    ON CONFLICT (chain_id) DO UPDATE SET height = excluded.height WHERE old.height < excluded.height
    """

# Each sequence since the last look needs a transaction of this ledger. A sequence below the last one is never explained.
_EXPLAINS = """
    SELECT looked.unknown = 0 AND (SELECT count(DISTINCT sequence) FROM transactions WHERE account = %(account)s
            AND sequence >= looked.sequence AND sequence < %(sequence)s
            AND (outcome IS NULL OR outcome IN ('included', 'failed'))) = %(sequence)s - looked.sequence
    FROM (SELECT coalesce(max(sequence), 0) AS sequence, coalesce(max(unknown), 0) AS unknown
        FROM store_looks JOIN sources USING (source_id)
        WHERE archive_id = %(archive)s AND account = %(account)s) AS looked
    """
_LOOKED = """
    INSERT INTO store_looks (source_id, account, sequence, unknown)
    SELECT source_id, %(account)s, %(sequence)s, %(unknown)s FROM sources WHERE archive_id = %(archive)s
    ON CONFLICT (source_id, account) DO UPDATE SET sequence = excluded.sequence, unknown = excluded.unknown, looked_at = now()
    """
# A chunk that is sealed, or was to be posted when the backup was made, may be packed again with another root.
_UNKNOWN_ROOTS = """
    SELECT DISTINCT root FROM unnest(CAST(%(roots)s AS bytea[])) AS listed (root)
    WHERE NOT EXISTS (SELECT FROM chunk_copies AS copies WHERE merkle_root = root AND (start IS NOT NULL
            OR state = 'posting' AND NOT %(signed)s
            OR EXISTS (SELECT FROM transaction_posts WHERE transaction_posts.caf_file_id = copies.caf_file_id AND live)))
        AND NOT EXISTS (SELECT FROM left_posts WHERE left_posts.merkle_root = root)
    ORDER BY root
    """


class TransactionLog:
    """The transactions of accounts, for one holder. Safe in threads.

    A chunk's message is asked for first. Whoever owns the account's sequence takes those that wait, commits one transaction
    of them, sends it, and settles it; the runs of the other chunks find their result here.
    """

    def __init__(self, engine: LedgerEngine, holder: Holder, *, lease_seconds: float) -> None:
        self._engine = engine
        self._holder = holder
        self._lease_seconds = lease_seconds

    def lease(self, account: str) -> HeldLease:
        """Hold the account's sequence while the context lasts: one run at a time signs.

        Raises:
            HeldByOther: a live run has it.
        """
        return HeldLease(self._engine, account_lease(account), self._holder, seconds=self._lease_seconds)

    def ask(self, account: str, chunk: str, message: bytes, charged_bytes: int) -> None:
        """Let the chunk's message wait for the account's next transaction, in place of an earlier one.

        Nothing changes where it has a live post.

        Asked for a damaged chunk, the post that its row knows counts as gone from the chain.

        Raises:
            IllegalMove: the chunk is not to be posted. NotLocated: there is no such chunk.
        """
        with self._engine.begin() as connection:
            row = next(iter(_locked(connection, [chunk])), None)
            if row is None:
                raise NotLocated(f"the ledger has no chunk {chunk}")
            if row.state not in _MAY_BE_POSTED:
                raise IllegalMove(f"chunk {chunk} is '{row.state}' and is not to be posted")
            facts = {"id": row.caf_file_id, "account": account, "message": message, "charged_bytes": charged_bytes}
            if row.state == _S.DAMAGED:
                connection.exec_driver_sql(_END_FIRST_POST, {**facts, "start": row.start})
            connection.exec_driver_sql(_ASK, facts)

    def other_accounts(self, chunk: str, account: str) -> Sequence[str]:
        """End what other accounts asked for the chunk; return those that have a live post of it.

        Afterwards no other account comes to have one, as long as the caller has the chunk's lease.
        """
        with self._engine.begin() as connection:
            row = next(iter(_locked(connection, [chunk])), None)
            if row is None:
                return ()
            facts = {"id": row.caf_file_id, "account": account}
            connection.exec_driver_sql(_END_OTHER_ASKS, facts)
            return connection.exec_driver_sql(_OTHER_POSTS, facts).scalars().all()

    def waiting(self, account: str) -> Sequence[WaitingPost]:
        """Return, oldest first, what was asked for, has no live post, and is of a chunk that is still to be posted.

        That is one that is `posting`, or `damaged` and to be posted again.
        """
        with self._engine.begin() as connection:
            rows = connection.exec_driver_sql(_WAITING, {"account": account, "states": _MAY_BE_POSTED}).fetchall()
        return [WaitingPost(**row._asdict()) for row in rows]

    def pending(self, account: str) -> Sequence[SignedTransaction]:
        """Return the account's transactions whose fate is not known, by sequence."""
        with self._engine.begin() as connection:
            rows = connection.exec_driver_sql(_PENDING, {"account": account}).fetchall()
        return [SignedTransaction(**row._asdict()) for row in rows]

    def commit(self, lease: Lease, transaction: SignedTransaction, chunks: Sequence[str]) -> None:
        """Write a transaction with the chunks that it posts, in the order of its messages; durable when this returns.

        Raises:
            LeaseLost: another run owns the sequence now.
            LedgerError: the sequence is used or may be; or a chunk was not asked for, is not to be posted, or has a live
            post. Nothing was written.
        """
        with self._engine.begin() as connection:
            connection.exec_driver_sql(_DURABLY)
            _require_lease_of(lease, transaction.account, f"sign for account {transaction.account}")
            lock_lease(connection, lease)
            ids = _free_chunks(connection, transaction.account, chunks)
            if not connection.exec_driver_sql(_COMMIT, asdict(transaction)).rowcount:
                raise LedgerError(
                    f"sequence {transaction.sequence} of account {transaction.account} has a transaction already",
                    hint="settle that one first",
                )
            for position, chunk in enumerate(chunks):
                facts = {"hash": transaction.hash, "account": transaction.account, "position": position, "id": ids[chunk]}
                connection.exec_driver_sql(_COMMIT_POST, facts)

    def settle(self, lease: Lease, hash: str, outcome: str, *, starts: Sequence[int] = (), cost: int | None = None) -> None:
        """Close a transaction; the same outcome again changes nothing.

        Args:
            lease: of the account.
            hash: the transaction's.
            outcome: "included", "failed" (included with a code, so that its sequence and fee are gone), "expired" (past its
                timeout height and not known) or "superseded" (another transaction has its sequence).
            starts: of an included one, the start of each post in order.
            cost: what it came to in ujkl, where that is known: a failed purchase costs its fee, and the chain takes what is left
                of a running plan off a purchase's list price.

        Raises:
            LeaseLost. LedgerError: there is no such transaction, it was closed otherwise, or it has another number of posts
            than starts are given. Nothing was written.
        """
        if outcome not in OUTCOMES:
            raise LedgerError(f"a transaction cannot end as '{outcome}'", hint=f"it ends as one of {', '.join(OUTCOMES)}")
        with self._engine.begin() as connection:
            connection.exec_driver_sql(_DURABLY)
            known = _held_transaction(connection, lease, hash)
            if known.outcome == outcome:
                return
            if known.outcome is not None:
                raise LedgerError(f"transaction {hash} is '{known.outcome}' and cannot become '{outcome}'")
            connection.exec_driver_sql(_SETTLE, {"hash": hash, "outcome": outcome, "cost": cost})
            if outcome == "included":
                _record_starts(connection, hash, starts)
                connection.exec_driver_sql(_FORGET_LATEST_END, {"hash": hash})
            else:
                connection.exec_driver_sql(_END_POSTS, {"hash": hash})

    def start_of(self, account: str, chunk: str) -> int | None:
        """Return the start of the chunk's latest included post; None where it has none."""
        with self._engine.begin() as connection:
            found = connection.exec_driver_sql(_START_OF, {"account": account, "chunk": chunk}).scalar_one_or_none()
        return None if found is None else int(found)

    def spent(self, account: str) -> int:
        """Return the cost in ujkl of the account's transactions that were included, failed or may be included."""
        with self._engine.begin() as connection:
            return int(connection.exec_driver_sql(_SPENT, {"account": account}).scalar_one())

    def at_list_price(self, account: str) -> int:
        """Return how many purchases that are or may be included are counted at their list price."""
        with self._engine.begin() as connection:
            return int(connection.exec_driver_sql(_AT_LIST_PRICE, {"account": account}).scalar_one())

    def explains(self, account: str, archive_id: str, sequence: int) -> bool:
        """Return whether this ledger has a transaction for each sequence that the account used since the last look at an archive.

        Also returns False if the last look found posts that the ledger does not know.
        """
        with self._engine.begin() as connection:
            facts = {"account": account, "archive": archive_id, "sequence": sequence}
            return bool(connection.exec_driver_sql(_EXPLAINS, facts).scalar_one())

    def unknown_roots(self, roots: Sequence[bytes], *, signed: bool) -> Sequence[bytes]:
        """Return the Merkle roots of a store that the ledger neither posted nor left aside.

        `signed`: whether the store's posts are transactions of this log.
        """
        with self._engine.begin() as connection:
            rows = connection.exec_driver_sql(_UNKNOWN_ROOTS, {"roots": list(roots), "signed": signed})
            return [bytes(root) for root in rows.scalars().all()]

    def record_look(self, account: str, archive_id: str, sequence: int, unknown: int) -> None:
        """Remember a look at an archive's posts: the account's sequence before it, and how many unknown posts it found."""
        with self._engine.begin() as connection:
            facts = {"account": account, "archive": archive_id, "sequence": sequence, "unknown": unknown}
            connection.exec_driver_sql(_LOOKED, facts)

    def seen_height(self, chain_id: str) -> int:
        """Return the greatest block height ever seen of a chain; 0 where none was."""
        with self._engine.begin() as connection:
            statement = "SELECT height FROM chain_heights WHERE chain_id = %(chain_id)s"
            return int(connection.exec_driver_sql(statement, {"chain_id": chain_id}).scalar_one_or_none() or 0)

    def see_height(self, chain_id: str, height: int) -> None:
        """Remember a height, where it is greater than the one known."""
        with self._engine.begin() as connection:
            connection.exec_driver_sql(_SEE_HEIGHT, {"chain_id": chain_id, "height": height})


# --- what a move of the chunk means for its posts, in the transaction of the move --------------------------------------


def before_move(connection: Connection, caf_file_id: int, chunk: str, before: ChunkState, after: ChunkState) -> None:
    """Refuse a move that would forget a live post; end the wait of a message that is not to be posted any more.

    Args:
        connection: in the transaction of the move, which has locked the chunk's row.
        caf_file_id: the chunk's.
        chunk: its name.
        before: the state that it leaves.
        after: the state that it gets.

    Raises:
        IllegalMove: it has a transaction under way, or was posted.
    """
    if after in _FORGETTING and (live := _live_post(connection, caf_file_id, before, after)):
        raise IllegalMove(f"chunk {chunk} cannot go to '{after}': it {live}; run it again first")
    if after not in (_S.POSTING, _S.PARKED):
        end_waiting(connection, caf_file_id)


def require_no_post(connection: Connection, caf_file_id: int, chunk: str, what: str) -> None:
    """Raise IllegalMove if a transaction posts the chunk, or may."""
    statement = "SELECT EXISTS (SELECT FROM transaction_posts WHERE caf_file_id = %(id)s AND live)"
    if connection.exec_driver_sql(statement, {"id": caf_file_id}).scalar_one():
        raise IllegalMove(f"chunk {chunk} cannot {what}: a transaction posts it, or may")


def end_waiting(connection: Connection, caf_file_id: int) -> None:
    """Forget the chunk's messages that wait: it is posted, or is not to be posted any more."""
    connection.exec_driver_sql("DELETE FROM posts WHERE caf_file_id = %(id)s", {"id": caf_file_id})


def _live_post(connection: Connection, caf_file_id: int, before: ChunkState, after: ChunkState) -> str:
    """Return why the chunk's post may not be forgotten, or ""."""
    # A damaged chunk's own post is known, and so is that of one to be abandoned: its cost is reported.
    known_counts = before is not _S.DAMAGED and after is not _S.ABANDONED
    statement = (
        "SELECT transaction_posts.start FROM transaction_posts JOIN chunks USING (caf_file_id) WHERE caf_file_id = %(id)s"
        " AND live AND (%(known_counts)s OR transaction_posts.start IS DISTINCT FROM chunks.start)"
        " ORDER BY transaction_posts.start NULLS FIRST LIMIT 1"
    )
    row = connection.exec_driver_sql(statement, {"id": caf_file_id, "known_counts": known_counts}).fetchone()
    if row is None:
        return ""
    return "has a transaction under way" if row.start is None else "was posted"


# --- what the log's methods share ---------------------------------------------------------------------------------------


def _locked(connection: Connection, chunks: Sequence[str]) -> Sequence[Row[Any]]:
    """Return the rows of chunks that the ledger has, which are locked."""
    connection.exec_driver_sql(_LOCK_CHUNKS, {"chunks": list(chunks)})
    return connection.exec_driver_sql(_CHUNK_ROWS, {"chunks": list(chunks)}).fetchall()


def _require_lease_of(lease: Lease, account: str, what: str) -> None:
    if lease.name != account_lease(account):
        raise LeaseLost(f"the lease on {lease.name} gives no right to {what}")


def _held_transaction(connection: Connection, lease: Lease, hash: str) -> Row[Any]:
    """Return the transaction's row, locked, with the lease of its account."""
    # The lease first: a commit locks in that order.
    lock_lease(connection, lease)
    row = connection.exec_driver_sql(_TRANSACTION, {"hash": hash}).fetchone()
    if row is None:
        raise LedgerError(f"the ledger has no transaction {hash}")
    _require_lease_of(lease, row.account, f"settle transaction {hash} of account {row.account}")
    return row


def _free_chunks(connection: Connection, account: str, chunks: Sequence[str]) -> Mapping[str, int]:
    """Return the ids of chunks that may be posted by this account now, their rows locked; raise LedgerError for any other."""
    found = _locked(connection, chunks)
    rows = connection.exec_driver_sql(_ASKED_AND_FREE, {"account": account, "ids": [row.caf_file_id for row in found]})
    asked = {row.caf_file_id: row.taken for row in rows}
    states = {row.name: (row.caf_file_id, row.state) for row in found}
    for number, chunk in enumerate(chunks):
        if chunk in chunks[:number]:
            raise LedgerError(f"chunk {chunk} is in the transaction twice")
        caf_file_id, state = states.get(chunk, (0, "unknown"))
        if state not in _MAY_BE_POSTED:
            raise LedgerError(f"chunk {chunk} is '{state}' and is not to be posted")
        if caf_file_id not in asked:
            raise LedgerError(f"no run asked account {account} to post chunk {chunk}")
        if asked[caf_file_id]:
            raise LedgerError(
                f"chunk {chunk} is in another transaction of account {account} that is or may be included",
                hint="settle that one first",
            )
    return {name: caf_file_id for name, (caf_file_id, _) in states.items()}


def _record_starts(connection: Connection, hash: str, starts: Sequence[int]) -> None:
    """Write the start of each post; what waited for them waits no more."""
    positions = connection.exec_driver_sql(_POSITIONS, {"hash": hash}).scalars().all()
    if len(positions) != len(starts):
        raise LedgerError(f"transaction {hash} has {len(positions)} posts, and {len(starts)} starts were given")
    for position, start in zip(positions, starts, strict=True):
        connection.exec_driver_sql(_START, {"hash": hash, "position": position, "start": start})
    connection.exec_driver_sql(_END_INCLUDED, {"hash": hash})
