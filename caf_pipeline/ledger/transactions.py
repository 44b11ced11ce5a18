"""An account's transactions: requested, committed before they are sent, and settled.

A commit locks the account's lease and its chunks' rows, so that no chunk in it is withdrawn. Two
unique indexes also prevent a second payment for a sequence or chunk. A post is *live* while it is
or may be on the chain. Source: promise 3 in docs/explanation/design.md.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Connection,
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
    text,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert

from caf_pipeline.chunk_state import MAY_BE_POSTED, ChunkState
from caf_pipeline.errors import IllegalMove, LeaseLost, LedgerError, NotLocated
from caf_pipeline.inventory.manifest import ARCHIVE_ID
from caf_pipeline.ledger.engine import LedgerEngine, LedgerPart
from caf_pipeline.ledger.leases import HeldLease, lock_lease
from caf_pipeline.ledger.moves import guarded
from caf_pipeline.ledger.records import account_lease
from caf_pipeline.ledger.sql_files import query
from caf_pipeline.ledger.tables import (
    ARCHIVE_LOOKS,
    CAF_FILES,
    CHAIN_HEIGHTS,
    LEASES,
    POSTS,
    STORAGE_PLANS,
    TRANSACTION_POSTS,
    TRANSACTIONS,
)
from caf_pipeline.ledger.views import CHUNKS
from caf_pipeline.records import Lease, SignedTransaction, WaitingPost
from caf_pipeline.system.processes import Holder

OUTCOMES: Final = ("included", "failed", "expired", "superseded")

_S = ChunkState

_FORGETTING: Final = frozenset({_S.PLANNED, _S.PACKING, _S.WITHDRAWN, _S.ABANDONED})
"""Afterwards objects are packed again, and a live post would be paid twice."""

_MAY_BE_POSTED: Final = sorted(MAY_BE_POSTED)

# The promise needs a durable commit, even if the server is configured otherwise.
_DURABLY: Final = "SET LOCAL synchronous_commit = on"

# A fixed order keeps two commits from a deadlock. The states are read after locking: a statement
# that waits for a lock reads copies from before the wait.
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
# A new request for a damaged chunk means that the post in the chunk's row is gone from the chain.
# Other posts of the chunk stay live.
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
# The file of an encrypted chunk may be lost with the run that asked, and cannot be made again.
_MAY_BE_LOST: Final = (
    exists()
    .where(
        CAF_FILES.c.caf_file_id == POSTS.c.caf_file_id,
        CAF_FILES.c.header.is_not(None),
        ~exists().where(
            LEASES.c.name == "chunk/" + CAF_FILES.c.name,
            LEASES.c.epoch == POSTS.c.epoch,
            LEASES.c.expires_at > func.now(),
        ),
    )
    .correlate(POSTS)
)
_WAITING: Final = (
    select(CHUNKS.c.name.label("chunk"), POSTS.c.message, POSTS.c.charged_bytes)
    .join_from(POSTS, CHUNKS, CHUNKS.c.caf_file_id == POSTS.c.caf_file_id)
    .where(
        POSTS.c.account == bindparam("account"),
        CHUNKS.c.state == any_(bindparam("states", type_=ARRAY(Text))),
        ~_HAS_LIVE_POST,
        ~_MAY_BE_LOST,
    )
    .order_by(POSTS.c.asked_at, POSTS.c.caf_file_id)
)
_REQUESTS: Final = select(POSTS.c.caf_file_id, _HAS_LIVE_POST.label("taken")).where(
    POSTS.c.account == bindparam("account"),
    POSTS.c.caf_file_id == any_(bindparam("ids", type_=ARRAY(BigInteger))),
    ~_MAY_BE_LOST,
)
_END_OTHER_REQUESTS: Final = delete(POSTS).where(
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
# SQLAlchemy does not count the rows of an INSERT; RETURNING shows whether a row was inserted.
_COMMIT: Final = (
    insert(TRANSACTIONS)
    .on_conflict_do_nothing(
        index_elements=[TRANSACTIONS.c.account, TRANSACTIONS.c.sequence],
        index_where=text("outcome IS NULL OR outcome IN ('included', 'failed')"),
    )
    .returning(TRANSACTIONS.c.hash)
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
# A purchase may set an earlier end. The next reading shows the end.
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
_HEIGHT: Final = insert(CHAIN_HEIGHTS)
_SEE_HEIGHT: Final = _HEIGHT.on_conflict_do_update(
    index_elements=[CHAIN_HEIGHTS.c.chain_id],
    set_={"height": _HEIGHT.excluded.height},
    where=CHAIN_HEIGHTS.c.height < _HEIGHT.excluded.height,
)
_LIST: Final = insert(ARCHIVE_LOOKS).values(
    account=bindparam("account"),
    sequence=bindparam("sequence"),
    archives=bindparam("archives"),
)
_ARCHIVES_LISTED: Final = _LIST.on_conflict_do_update(
    index_elements=[ARCHIVE_LOOKS.c.account],
    set_={
        "sequence": _LIST.excluded.sequence,
        "archives": _LIST.excluded.archives,
        "looked_at": func.now(),
    },
)


class TransactionLog(LedgerPart):
    """The transactions of accounts, for one holder. Safe in threads.

    Runs request posts. The holder of the account's sequence commits one transaction for all of
    them, sends it, and settles it.
    """

    def __init__(self, engine: LedgerEngine, holder: Holder, *, lease_seconds: float) -> None:
        super().__init__(engine)
        self._holder = holder
        self._lease_seconds = lease_seconds

    def lease(self, account: str) -> HeldLease:
        """One run at a time signs."""
        return HeldLease(
            self._engine, account_lease(account), self._holder, seconds=self._lease_seconds
        )

    def ask(
        self, account: str, chunk: str, message: bytes, charged_bytes: int, *, epoch: int = 0
    ) -> None:
        """Request a post of the chunk, replacing a request.

        Nothing changes if the chunk has a live post. For a damaged chunk, the post in its row
        counts as gone from the chain. The request of an encrypted chunk waits only while its lease
        of `epoch` is live. Raises IllegalMove if the chunk's state allows no post.
        """
        with self._engine.begin() as connection:
            row = next(iter(_locked(connection, [chunk])), None)
            if row is None:
                raise NotLocated(f"the ledger has no chunk {chunk}")
            if row.state not in _MAY_BE_POSTED:
                raise IllegalMove(f"chunk {chunk} is '{row.state}' and may not be posted")
            if row.state == _S.DAMAGED:
                first_post = {"id": row.caf_file_id, "signer": account, "first_start": row.start}
                connection.execute(_END_FIRST_POST, first_post)
            post = {
                "id": row.caf_file_id,
                "account": account,
                "message": message,
                "charged_bytes": charged_bytes,
                "epoch": epoch,
            }
            connection.exec_driver_sql(query("ask_for_post"), post)

    def end_requests(self, lease: Lease, chunk: str) -> None:
        """Raises LeaseLost."""
        with self._engine.begin() as connection:
            end_waiting(connection, guarded(connection, lease, chunk))

    def other_accounts(self, chunk: str, account: str) -> Sequence[str]:
        """End other accounts' requests for the chunk; return accounts with a live post of it.

        While the caller holds the chunk's lease, no other account gets one.
        """
        with self._engine.begin() as connection:
            row = next(iter(_locked(connection, [chunk])), None)
            if row is None:
                return ()
            facts = {"id": row.caf_file_id, "account": account}
            connection.execute(_END_OTHER_REQUESTS, facts)
            return connection.execute(_OTHER_POSTS, facts).scalars().all()

    def waiting(self, account: str) -> Sequence[WaitingPost]:
        """Requests that may be posted and have no live post, oldest first."""
        rows = self._rows(_WAITING, account=account, states=_MAY_BE_POSTED)
        return [WaitingPost(**row._asdict()) for row in rows]

    def pending(self, account: str) -> Sequence[SignedTransaction]:
        """Transactions with unknown outcome, by sequence."""
        rows = self._rows(_PENDING, account=account)
        return [SignedTransaction(**row._asdict()) for row in rows]

    def commit(self, lease: Lease, transaction: SignedTransaction, chunks: Sequence[str]) -> None:
        """Write a transaction and the chunks that it posts, in the order of its messages.

        It is durable when this returns. If an error is raised, nothing was written.

        Raises:
            LeaseLost: another run holds the sequence.
            LedgerError: the sequence or a chunk is or may be in another transaction, or a chunk was
                not requested or may not be posted.
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
                    hint="settle that transaction first",
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
        """Record the outcome of a transaction. Idempotent.

        The outcome is "included"; "failed" (included with an error code: sequence and fee are
        used); "expired" (not known past its timeout height); or "superseded" (another transaction
        has its sequence). `starts` are of an included transaction's posts, in order. `cost` is the
        charge in ujkl, if known.

        Raises LedgerError, and writes nothing, if the transaction is unknown, has another outcome,
        or another number of posts.
        """
        if outcome not in OUTCOMES:
            raise LedgerError(
                f"a transaction cannot end as '{outcome}'",
                hint=f"it ends as one of {', '.join(OUTCOMES)}",
            )
        with self._engine.begin() as connection:
            connection.exec_driver_sql(_DURABLY)
            lock_lease(connection, lease)  # before the transaction: a commit locks in that order
            row = connection.execute(_TRANSACTION, {"hash": hash}).one_or_none()
            if row is None:
                raise LedgerError(f"the ledger has no transaction {hash}")
            _require_lease_of(
                lease, row.account, f"settle transaction {hash} of account {row.account}"
            )
            if row.outcome == outcome:
                return
            if row.outcome is not None:
                raise LedgerError(
                    f"transaction {hash} is '{row.outcome}' and cannot become '{outcome}'"
                )
            connection.execute(
                _SETTLE, {"transaction": hash, "outcome": outcome, "reported_cost": cost}
            )
            if outcome == "included":
                positions = connection.execute(_POSITIONS, {"hash": hash}).scalars().all()
                if len(positions) != len(starts):
                    raise LedgerError(
                        f"transaction {hash} has {len(positions)} posts, but {len(starts)} starts"
                    )
                for position, start in zip(positions, starts, strict=True):
                    values = {"transaction": hash, "number": position, "start": start}
                    connection.execute(_START, values)
                connection.execute(_END_INCLUDED, {"hash": hash})
                connection.execute(_FORGET_LATEST_END, {"transaction": hash})
            else:
                connection.execute(_END_POSTS, {"transaction": hash})

    def start_of(self, account: str, chunk: str) -> int | None:
        start: int | None = self._scalar(_START_OF, account=account, chunk=chunk)
        return start

    def spent(self, account: str) -> int:
        """Return the ujkl of transactions that are or may be in a block."""
        return int(self._scalar(_SPENT, account=account))

    def at_list_price(self, account: str) -> int:
        """Return how many purchases that are or may be included count at their list price."""
        return int(self._scalar(_AT_LIST_PRICE, account=account))

    def explains(self, account: str, archive_id: str | None, sequence: int) -> bool:
        """True if the ledger knows all posts and sequences since the last search.

        None stands for the account's whole list of archives.
        """
        values = {"account": account, "archive": archive_id, "sequence": sequence}
        return bool(self._scalar(query("explains_sequences"), **values))

    def unknown_roots(self, roots: Sequence[bytes], *, signed: bool) -> Sequence[bytes]:
        """Return the Merkle roots that the ledger neither posted nor left aside.

        `signed`: the store's posts are transactions of this log.
        """
        rows = self._rows(query("unknown_roots"), roots=list(roots), signed=signed)
        return [bytes(root) for (root,) in rows]

    def lost_posts(self, archive_id: str) -> Sequence[str]:
        """Return posted chunks of the archive's source whose objects could be paid for again."""
        return [row.name for row in self._rows(query("lost_posts"), archive=archive_id)]

    def has_post(self, archive_id: str) -> bool:
        """True if a chunk of the archive was or may be posted."""
        return bool(self._scalar(query("has_post"), archive=archive_id))

    def unknown_archives(self, account: str, archive_id: str) -> Sequence[str]:
        """Return archives of the last whole list that no source has.

        Archives that were set aside for the source of `archive_id` are left out.
        """
        rows = self._rows(query("unknown_archives"), account=account, archive=archive_id)
        return [unknown for (unknown,) in rows]

    def record_archives(self, account: str, sequence: int, archive_ids: Collection[str]) -> None:
        """`sequence` is the account's before the archives were listed.

        Ids that no ledger makes are left out.
        """
        ids = sorted(filter(ARCHIVE_ID.fullmatch, archive_ids))
        self._execute(_ARCHIVES_LISTED, account=account, sequence=sequence, archives=ids)

    def record_look(self, account: str, archive_id: str, sequence: int, unknown: int) -> None:
        """`sequence` is the account's before the search."""
        self._execute(
            query("record_store_look"),
            account=account,
            archive=archive_id,
            sequence=sequence,
            unknown=unknown,
        )

    def seen_height(self, chain_id: str) -> int:
        return int(
            self._scalar(select(CHAIN_HEIGHTS.c.height).where(CHAIN_HEIGHTS.c.chain_id == chain_id))
            or 0
        )

    def see_height(self, chain_id: str, height: int) -> None:
        self._execute(_SEE_HEIGHT, chain_id=chain_id, height=height)


def before_move(
    connection: Connection, caf_file_id: int, chunk: str, before: ChunkState, after: ChunkState
) -> None:
    """Refuse a move that would forget a live post; delete messages that need no post now."""
    if after in _FORGETTING:
        # The post in the row of a damaged chunk is known to be lost. The cost of a post that is
        # abandoned is reported.
        known_post_counts = before is not _S.DAMAGED and (
            after is not _S.ABANDONED or before is _S.POSTING
        )
        starts = _LIVE_STARTS if known_post_counts else _UNKNOWN_LIVE_STARTS
        post = connection.execute(starts, {"id": caf_file_id}).one_or_none()
        if post is not None:
            fact = "has a transaction under way" if post.start is None else "was posted"
            raise IllegalMove(
                f"chunk {chunk} cannot go to '{after}': it {fact}; run it again first"
            )
    if after not in (_S.POSTING, _S.PARKED):
        end_waiting(connection, caf_file_id)


def require_no_post(connection: Connection, caf_file_id: int, chunk: str, what: str) -> None:
    """Raise IllegalMove if a transaction posts the chunk, or may."""
    if connection.execute(_HAS_POST, {"id": caf_file_id}).scalar_one():
        raise IllegalMove(f"chunk {chunk} cannot {what}: a transaction posts it, or may")


def end_waiting(connection: Connection, caf_file_id: int) -> None:
    """Delete the chunk's waiting messages."""
    connection.execute(delete(POSTS).where(POSTS.c.caf_file_id == caf_file_id))


def _locked(connection: Connection, chunks: Sequence[str]) -> Sequence[Row[*tuple[Any, ...]]]:
    """Unknown chunks have no row."""
    connection.execute(_LOCK_CHUNKS, {"chunks": list(chunks)})
    return connection.execute(_CHUNK_ROWS, {"chunks": list(chunks)}).all()


def _require_lease_of(lease: Lease, account: str, what: str) -> None:
    if lease.name != account_lease(account):
        raise LeaseLost(f"the lease on {lease.name} gives no right to {what}")


def _free_chunks(connection: Connection, account: str, chunks: Sequence[str]) -> Mapping[str, int]:
    rows = _locked(connection, chunks)
    posts = connection.execute(
        _REQUESTS, {"account": account, "ids": [row.caf_file_id for row in rows]}
    )
    taken = {post.caf_file_id: post.taken for post in posts}
    states = {row.name: (row.caf_file_id, row.state) for row in rows}
    for number, chunk in enumerate(chunks):
        if chunk in chunks[:number]:
            raise LedgerError(f"chunk {chunk} is in the transaction twice")
        caf_file_id, state = states.get(chunk, (0, "unknown"))
        if state not in _MAY_BE_POSTED:
            raise LedgerError(f"chunk {chunk} is '{state}' and may not be posted")
        if caf_file_id not in taken:
            raise LedgerError(f"no run asked account {account} to post chunk {chunk}")
        if taken[caf_file_id]:
            raise LedgerError(
                f"chunk {chunk} is in another transaction of account {account} that is or may be "
                "included",
                hint="settle that transaction first",
            )
    return {name: caf_file_id for name, (caf_file_id, _) in states.items()}
