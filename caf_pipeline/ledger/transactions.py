"""An account's transactions in the ledger: requested, committed before they are sent, settled when
their outcome is known.

A commit locks the account's lease and the rows of its chunks: a run that lost the lease writes
nothing, and a chunk that is withdrawn at the same moment is either in the transaction, and stays,
or is gone, and is not in it. That a sequence, and a chunk, is paid for once is held by two unique
indexes too.

A post is *live* while it is or may be on the chain.
Source: promise 3 in docs/explanation/design.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Connection,
    Integer,
    Row,
    Text,
    any_,
    bindparam,
    delete,
    exists,
    false,
    func,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert

from caf_pipeline.chunk_state import MAY_BE_POSTED, ChunkState
from caf_pipeline.errors import IllegalMove, LeaseLost, LedgerError, NotLocated
from caf_pipeline.ledger.engine import LedgerEngine
from caf_pipeline.ledger.leases import HeldLease, lock_lease
from caf_pipeline.ledger.query_files import query
from caf_pipeline.ledger.records import Holder, account_lease
from caf_pipeline.ledger.tables import (
    CAF_FILES,
    CHAIN_HEIGHTS,
    POSTS,
    SOURCES,
    STORAGE_PLANS,
    STORE_LOOKS,
    TRANSACTION_POSTS,
    TRANSACTIONS,
)
from caf_pipeline.ledger.views import CHUNKS
from caf_pipeline.store.protocol import Lease, SignedTransaction, WaitingPost

OUTCOMES: Final = ("included", "failed", "expired", "superseded")

_S = ChunkState

_FORGETTING: Final = frozenset({_S.PLANNED, _S.PACKING, _S.WITHDRAWN, _S.ABANDONED})
"""States after which a chunk, or its objects, are packed again: with a live post, they would be
paid for twice.
"""

_MAY_BE_POSTED: Final = sorted(MAY_BE_POSTED)

# A server that is set up to answer before it has written would break the promise.
_DURABLY: Final = "SET LOCAL synchronous_commit = on"

# In one order, so that two commits cannot wait for each other. The states are read afterwards: a
# statement that waited for a lock sees the copies as they were before it waited.
_NAMES: Final = bindparam("chunks", type_=ARRAY(Text))
_LOCK_CHUNKS: Final = (
    select()
    .select_from(CAF_FILES)
    .where(CAF_FILES.c.name == any_(_NAMES))
    .order_by(CAF_FILES.c.caf_file_id)
    .with_for_update(key_share=True)
)
_CHUNK_ROWS: Final = select(
    CHUNKS.c.caf_file_id, CHUNKS.c.name, CHUNKS.c.state, CHUNKS.c.start
).where(CHUNKS.c.name == any_(_NAMES))

_HAS_LIVE_POST: Final = (
    exists()
    .where(
        TRANSACTION_POSTS.c.caf_file_id == POSTS.c.caf_file_id,
        TRANSACTION_POSTS.c.account == POSTS.c.account,
        TRANSACTION_POSTS.c.live,
    )
    .correlate(POSTS)
)
# Asked for again, the post that the chunk's row knows is gone from the chain; one that it does not
# know is not.
_END_FIRST_POST: Final = (
    update(TRANSACTION_POSTS)
    .where(
        TRANSACTION_POSTS.c.caf_file_id == bindparam("id"),
        TRANSACTION_POSTS.c.account == bindparam("signer"),
        TRANSACTION_POSTS.c.live,
        TRANSACTION_POSTS.c.start == bindparam("first_start"),
    )
    .values(live=false())
)
_WAITING: Final = (
    select(CHUNKS.c.name.label("chunk"), POSTS.c.message, POSTS.c.charged_bytes)
    .join_from(POSTS, CHUNKS, CHUNKS.c.caf_file_id == POSTS.c.caf_file_id)
    .where(
        POSTS.c.account == bindparam("account"),
        CHUNKS.c.state == any_(bindparam("states", type_=ARRAY(Text))),
        ~_HAS_LIVE_POST,
    )
    .order_by(POSTS.c.asked_at, POSTS.c.caf_file_id)
)
_ASKED_AND_FREE: Final = select(POSTS.c.caf_file_id, _HAS_LIVE_POST.label("taken")).where(
    POSTS.c.account == bindparam("account"),
    POSTS.c.caf_file_id == any_(bindparam("ids", type_=ARRAY(BigInteger))),
)
_END_OTHER_ASKS: Final = delete(POSTS).where(
    POSTS.c.caf_file_id == bindparam("id"), POSTS.c.account != bindparam("account")
)
_OTHER_POSTS: Final = (
    select(TRANSACTION_POSTS.c.account)
    .distinct()
    .where(
        TRANSACTION_POSTS.c.caf_file_id == bindparam("id"),
        TRANSACTION_POSTS.c.account != bindparam("account"),
        TRANSACTION_POSTS.c.live,
    )
    .order_by(TRANSACTION_POSTS.c.account)
)
_END_WAITING: Final = delete(POSTS).where(POSTS.c.caf_file_id == bindparam("id"))
_HAS_POST: Final = select(
    exists().where(TRANSACTION_POSTS.c.caf_file_id == bindparam("id"), TRANSACTION_POSTS.c.live)
)
_LIVE_STARTS: Final = (
    select(TRANSACTION_POSTS.c.start)
    .join(CHUNKS, CHUNKS.c.caf_file_id == TRANSACTION_POSTS.c.caf_file_id)
    .where(TRANSACTION_POSTS.c.caf_file_id == bindparam("id"), TRANSACTION_POSTS.c.live)
    .order_by(TRANSACTION_POSTS.c.start.nulls_first())
    .limit(1)
)
_UNKNOWN_LIVE_STARTS: Final = _LIVE_STARTS.where(
    TRANSACTION_POSTS.c.start.is_distinct_from(CHUNKS.c.start)
)

UNSETTLED: Final = select(
    TRANSACTIONS.c.hash,
    TRANSACTIONS.c.body,
    TRANSACTIONS.c.account,
    TRANSACTIONS.c.sequence,
    TRANSACTIONS.c.timeout_height,
    TRANSACTIONS.c.purpose,
    TRANSACTIONS.c.cost,
).where(TRANSACTIONS.c.outcome.is_(None))
_PENDING: Final = UNSETTLED.where(TRANSACTIONS.c.account == bindparam("account")).order_by(
    TRANSACTIONS.c.sequence
)
_OPEN: Final = next(index for index in TRANSACTIONS.indexes if index.name == "transactions_open")
# SQLAlchemy does not count the rows of an INSERT: RETURNING shows whether there is one.
_COMMIT: Final = (
    insert(TRANSACTIONS).on_conflict_do_nothing(constraint=_OPEN).returning(TRANSACTIONS.c.hash)
)
_COMMIT_POST: Final = insert(TRANSACTION_POSTS)
_TRANSACTION: Final = (
    select(TRANSACTIONS.c.account, TRANSACTIONS.c.outcome)
    .where(TRANSACTIONS.c.hash == bindparam("hash"))
    .with_for_update(key_share=True)
)
_REPORTED_COST: Final = bindparam("reported_cost", type_=BigInteger)
_SETTLE: Final = (
    update(TRANSACTIONS)
    .where(TRANSACTIONS.c.hash == bindparam("transaction"))
    .values(
        outcome=bindparam("outcome"),
        settled_at=func.now(),
        cost=func.coalesce(_REPORTED_COST, TRANSACTIONS.c.cost),
        cost_told=_REPORTED_COST.is_not(None),
    )
)
# A purchase of ours may set an earlier end: the next reading says which.
_FORGET_LATEST_END: Final = (
    update(STORAGE_PLANS)
    .where(
        STORAGE_PLANS.c.account.in_(
            select(TRANSACTIONS.c.account).where(
                TRANSACTIONS.c.hash == bindparam("transaction"), TRANSACTIONS.c.purpose == "buy"
            )
        )
    )
    .values(latest_end=null(), latest_end_space=null())
)
_POSITIONS: Final = (
    select(TRANSACTION_POSTS.c.position)
    .where(TRANSACTION_POSTS.c.hash == bindparam("hash"))
    .order_by(TRANSACTION_POSTS.c.position)
)
_START: Final = (
    update(TRANSACTION_POSTS)
    .where(
        TRANSACTION_POSTS.c.hash == bindparam("transaction"),
        TRANSACTION_POSTS.c.position == bindparam("number"),
    )
    .values(start=bindparam("start"))
)
_END_INCLUDED: Final = delete(POSTS).where(
    TRANSACTION_POSTS.c.hash == bindparam("hash"),
    TRANSACTION_POSTS.c.caf_file_id == POSTS.c.caf_file_id,
    TRANSACTION_POSTS.c.account == POSTS.c.account,
)
_END_POSTS: Final = (
    update(TRANSACTION_POSTS)
    .where(TRANSACTION_POSTS.c.hash == bindparam("transaction"))
    .values(live=false())
)
_START_OF: Final = (
    select(TRANSACTION_POSTS.c.start)
    .join(TRANSACTIONS)
    .join(CAF_FILES)
    .where(
        TRANSACTION_POSTS.c.account == bindparam("account"),
        CAF_FILES.c.name == bindparam("chunk"),
        TRANSACTIONS.c.outcome == "included",
    )
    .order_by(TRANSACTION_POSTS.c.start.desc(), TRANSACTIONS.c.sequence.desc())
    .limit(1)
)
_SPENT: Final = select(func.coalesce(func.sum(TRANSACTIONS.c.cost), 0)).where(
    TRANSACTIONS.c.account == bindparam("account"),
    or_(TRANSACTIONS.c.outcome.is_(None), TRANSACTIONS.c.outcome.in_(("included", "failed"))),
)
_AT_LIST_PRICE: Final = (
    select(func.count())
    .select_from(TRANSACTIONS)
    .where(
        TRANSACTIONS.c.account == bindparam("account"),
        TRANSACTIONS.c.purpose == "buy",
        ~TRANSACTIONS.c.cost_told,
        or_(TRANSACTIONS.c.outcome.is_(None), TRANSACTIONS.c.outcome == "included"),
    )
)
_SEEN_HEIGHT: Final = select(CHAIN_HEIGHTS.c.height).where(
    CHAIN_HEIGHTS.c.chain_id == bindparam("chain_id")
)
_HEIGHT: Final = insert(CHAIN_HEIGHTS)
_SEE_HEIGHT: Final = _HEIGHT.on_conflict_do_update(
    index_elements=[CHAIN_HEIGHTS.c.chain_id],
    set_={"height": _HEIGHT.excluded.height},
    where=CHAIN_HEIGHTS.c.height < _HEIGHT.excluded.height,
)
_LOOK: Final = insert(STORE_LOOKS).from_select(
    ["source_id", "account", "sequence", "unknown"],
    select(
        SOURCES.c.source_id,
        bindparam("account", type_=Text),
        bindparam("sequence", type_=BigInteger),
        bindparam("unknown", type_=Integer),
    ).where(SOURCES.c.archive_id == bindparam("archive")),
)
_LOOKED: Final = _LOOK.on_conflict_do_update(
    index_elements=[STORE_LOOKS.c.source_id, STORE_LOOKS.c.account],
    set_={
        "sequence": _LOOK.excluded.sequence,
        "unknown": _LOOK.excluded.unknown,
        "looked_at": func.now(),
    },
)


class TransactionLog:
    """The transactions of accounts, for one holder. Safe in threads.

    A chunk's message is asked for first. Whoever owns the account's sequence takes those that wait,
    commits one transaction of them, sends it, and settles it; the runs of the other chunks find
    their result here.
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
        return HeldLease(
            self._engine, account_lease(account), self._holder, seconds=self._lease_seconds
        )

    def ask(self, account: str, chunk: str, message: bytes, charged_bytes: int) -> None:
        """Let the chunk's message wait for the account's next transaction, in place of an earlier
        one.

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
            if row.state == _S.DAMAGED:
                first_post = {"id": row.caf_file_id, "signer": account, "first_start": row.start}
                connection.execute(_END_FIRST_POST, first_post)
            post = {
                "id": row.caf_file_id,
                "account": account,
                "message": message,
                "charged_bytes": charged_bytes,
            }
            connection.exec_driver_sql(query("ask_for_post"), post)

    def other_accounts(self, chunk: str, account: str) -> Sequence[str]:
        """End what other accounts asked for the chunk; return those that have a live post of it.

        Afterwards no other account comes to have one, as long as the caller has the chunk's lease.
        """
        with self._engine.begin() as connection:
            row = next(iter(_locked(connection, [chunk])), None)
            if row is None:
                return ()
            facts = {"id": row.caf_file_id, "account": account}
            connection.execute(_END_OTHER_ASKS, facts)
            return connection.execute(_OTHER_POSTS, facts).scalars().all()

    def waiting(self, account: str) -> Sequence[WaitingPost]:
        """Return, oldest first, what was asked for, has no live post, and is of a chunk that is
        still to be posted.

        That is one that is `posting`, or `damaged` and to be posted again.
        """
        with self._engine.begin() as connection:
            rows = connection.execute(
                _WAITING, {"account": account, "states": _MAY_BE_POSTED}
            ).all()
        return [WaitingPost(**row._asdict()) for row in rows]

    def pending(self, account: str) -> Sequence[SignedTransaction]:
        """Return the account's transactions whose fate is not known, by sequence."""
        with self._engine.begin() as connection:
            rows = connection.execute(_PENDING, {"account": account}).all()
        return [SignedTransaction(**row._asdict()) for row in rows]

    def commit(self, lease: Lease, transaction: SignedTransaction, chunks: Sequence[str]) -> None:
        """Write a transaction with the chunks that it posts, in the order of its messages; durable
        when this returns.

        Raises: LeaseLost: another run owns the sequence now. LedgerError: the sequence is used or
            may be; or a chunk was not asked for, is not to be posted, or has a live post. Nothing
            was written.
        """
        with self._engine.begin() as connection:
            connection.exec_driver_sql(_DURABLY)
            _require_lease_of(lease, transaction.account, f"sign for account {transaction.account}")
            lock_lease(connection, lease)
            ids = _free_chunks(connection, transaction.account, chunks)
            if connection.execute(_COMMIT, asdict(transaction)).one_or_none() is None:
                raise LedgerError(
                    f"sequence {transaction.sequence} of account {transaction.account} has a "
                    "transaction already",
                    hint="settle that one first",
                )
            for position, chunk in enumerate(chunks):
                post = {
                    "hash": transaction.hash,
                    "account": transaction.account,
                    "position": position,
                }
                connection.execute(_COMMIT_POST, {**post, "caf_file_id": ids[chunk]})

    def settle(
        self,
        lease: Lease,
        hash: str,
        outcome: str,
        *,
        starts: Sequence[int] = (),
        cost: int | None = None,
    ) -> None:
        """Close a transaction; the same outcome again changes nothing.

        Args: lease: of the account. hash: the transaction's. outcome: "included", "failed"
            (included with a code, so that its sequence and fee are gone), "expired" (past its
                timeout height and not known) or "superseded" (another transaction has its
                sequence).
            starts: of an included one, the start of each post in order.
            cost: what it came to in ujkl, where that is known: a failed purchase costs its fee, and
                the chain takes what is left of a running plan off a purchase's list price.

        Raises: LeaseLost. LedgerError: there is no such transaction, it was closed otherwise, or it
            has another number of posts than starts are given. Nothing was written.
        """
        if outcome not in OUTCOMES:
            raise LedgerError(
                f"a transaction cannot end as '{outcome}'",
                hint=f"it ends as one of {', '.join(OUTCOMES)}",
            )
        with self._engine.begin() as connection:
            connection.exec_driver_sql(_DURABLY)
            known = _held_transaction(connection, lease, hash)
            if known.outcome == outcome:
                return
            if known.outcome is not None:
                raise LedgerError(
                    f"transaction {hash} is '{known.outcome}' and cannot become '{outcome}'"
                )
            connection.execute(
                _SETTLE, {"transaction": hash, "outcome": outcome, "reported_cost": cost}
            )
            if outcome == "included":
                _record_starts(connection, hash, starts)
                connection.execute(_FORGET_LATEST_END, {"transaction": hash})
            else:
                connection.execute(_END_POSTS, {"transaction": hash})

    def start_of(self, account: str, chunk: str) -> int | None:
        """Return the start of the chunk's latest included post; None where it has none."""
        with self._engine.begin() as connection:
            start: int | None = connection.execute(
                _START_OF, {"account": account, "chunk": chunk}
            ).scalar_one_or_none()
        return start

    def spent(self, account: str) -> int:
        """Return the cost in ujkl of the account's transactions that were included, failed or may
        be included.
        """
        with self._engine.begin() as connection:
            return int(connection.execute(_SPENT, {"account": account}).scalar_one())

    def at_list_price(self, account: str) -> int:
        """Return how many purchases that are or may be included are counted at their list price."""
        with self._engine.begin() as connection:
            return int(connection.execute(_AT_LIST_PRICE, {"account": account}).scalar_one())

    def explains(self, account: str, archive_id: str, sequence: int) -> bool:
        """Return whether this ledger has a transaction for each sequence that the account used
        since the last look at an archive.

        Also returns False if the last look found posts that the ledger does not know.
        """
        with self._engine.begin() as connection:
            facts = {"account": account, "archive": archive_id, "sequence": sequence}
            return bool(connection.exec_driver_sql(query("explains_sequences"), facts).scalar_one())

    def unknown_roots(self, roots: Sequence[bytes], *, signed: bool) -> Sequence[bytes]:
        """Return the Merkle roots of a store that the ledger neither posted nor left aside.

        `signed`: whether the store's posts are transactions of this log.
        """
        with self._engine.begin() as connection:
            rows = connection.exec_driver_sql(
                query("unknown_roots"), {"roots": list(roots), "signed": signed}
            )
            return [bytes(root) for root in rows.scalars().all()]

    def record_look(self, account: str, archive_id: str, sequence: int, unknown: int) -> None:
        """Remember a look at an archive's posts: the account's sequence before it, and how many
        unknown posts it found.
        """
        with self._engine.begin() as connection:
            facts = {
                "account": account,
                "archive": archive_id,
                "sequence": sequence,
                "unknown": unknown,
            }
            connection.execute(_LOOKED, facts)

    def seen_height(self, chain_id: str) -> int:
        """Return the greatest block height ever seen of a chain; 0 where none was."""
        with self._engine.begin() as connection:
            return int(
                connection.execute(_SEEN_HEIGHT, {"chain_id": chain_id}).scalar_one_or_none() or 0
            )

    def see_height(self, chain_id: str, height: int) -> None:
        """Remember a height, where it is greater than the one known."""
        with self._engine.begin() as connection:
            connection.execute(_SEE_HEIGHT, {"chain_id": chain_id, "height": height})


# --- what a move of the chunk means for its posts, in the transaction of the move
# --------------------------------------


def before_move(
    connection: Connection, caf_file_id: int, chunk: str, before: ChunkState, after: ChunkState
) -> None:
    """Refuse a move that would forget a live post; end the wait of a message that is not to be
    posted any more.

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
    if connection.execute(_HAS_POST, {"id": caf_file_id}).scalar_one():
        raise IllegalMove(f"chunk {chunk} cannot {what}: a transaction posts it, or may")


def end_waiting(connection: Connection, caf_file_id: int) -> None:
    """Forget the chunk's messages that wait: it is posted, or is not to be posted any more."""
    connection.execute(_END_WAITING, {"id": caf_file_id})


def _live_post(
    connection: Connection, caf_file_id: int, before: ChunkState, after: ChunkState
) -> str:
    """Return why the chunk's post may not be forgotten, or ""."""
    # A damaged chunk's own post is known, and so is that of one to be abandoned: its cost is
    # reported.
    known_counts = before is not _S.DAMAGED and after is not _S.ABANDONED
    row = connection.execute(
        _LIVE_STARTS if known_counts else _UNKNOWN_LIVE_STARTS, {"id": caf_file_id}
    ).one_or_none()
    if row is None:
        return ""
    return "has a transaction under way" if row.start is None else "was posted"


# --- what the log's methods share
# ---------------------------------------------------------------------------------------


def _locked(connection: Connection, chunks: Sequence[str]) -> Sequence[Row[*tuple[Any, ...]]]:
    """Return the rows of chunks that the ledger has, which are locked."""
    connection.execute(_LOCK_CHUNKS, {"chunks": list(chunks)})
    return connection.execute(_CHUNK_ROWS, {"chunks": list(chunks)}).all()


def _require_lease_of(lease: Lease, account: str, what: str) -> None:
    if lease.name != account_lease(account):
        raise LeaseLost(f"the lease on {lease.name} gives no right to {what}")


def _held_transaction(connection: Connection, lease: Lease, hash: str) -> Row[*tuple[Any, ...]]:
    """Return the transaction's row, locked, with the lease of its account."""
    # The lease first: a commit locks in that order.
    lock_lease(connection, lease)
    row = connection.execute(_TRANSACTION, {"hash": hash}).one_or_none()
    if row is None:
        raise LedgerError(f"the ledger has no transaction {hash}")
    _require_lease_of(lease, row.account, f"settle transaction {hash} of account {row.account}")
    return row


def _free_chunks(connection: Connection, account: str, chunks: Sequence[str]) -> Mapping[str, int]:
    """Return the ids of chunks that may be posted by this account now, their rows locked; raise
    LedgerError for any other.
    """
    rows = _locked(connection, chunks)
    posts = connection.execute(
        _ASKED_AND_FREE, {"account": account, "ids": [row.caf_file_id for row in rows]}
    )
    asked = {post.caf_file_id: post.taken for post in posts}
    states = {row.name: (row.caf_file_id, row.state) for row in rows}
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
                f"chunk {chunk} is in another transaction of account {account} that is or may be "
                "included",
                hint="settle that one first",
            )
    return {name: caf_file_id for name, (caf_file_id, _) in states.items()}


def _record_starts(connection: Connection, hash: str, starts: Sequence[int]) -> None:
    """Write the start of each post; what waited for them waits no more."""
    positions = connection.execute(_POSITIONS, {"hash": hash}).scalars().all()
    if len(positions) != len(starts):
        raise LedgerError(
            f"transaction {hash} has {len(positions)} posts, and {len(starts)} starts were given"
        )
    for position, start in zip(positions, starts, strict=True):
        connection.execute(_START, {"transaction": hash, "number": position, "start": start})
    connection.execute(_END_INCLUDED, {"hash": hash})
