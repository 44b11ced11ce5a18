"""Posts chunks and buys space. Each post is paid for once, whatever breaks.

    queue    a chunk's message is queued in the log
    sign     the run that leases the account's sequence settles pending transactions, signs up to
             eight queued messages in one transaction, and commits it to the log
    settle   the same bytes are sent until the transaction is in a block, or can no longer be

A transaction is given up only if a node past its timeout height reports its sequence as unused, or
if the sequence is used and, some blocks later, the node knows neither the transaction nor its
effect. A new wallet first settles what the old one signed for a chunk.

Source: promise 3 in docs/explanation/design.md; "Messages" of the notes on Jackal's protocol;
errors.go of Cosmos SDK 0.45.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from copy import copy
from dataclasses import dataclass, replace
from datetime import timedelta
from fractions import Fraction
from math import ceil
from typing import Final

from caf_pipeline.errors import (
    ChainUnreachable,
    EmptyWallet,
    HeldByOther,
    LeaseLost,
    LedgerError,
    LedgerUnreachable,
    NoStoragePlan,
    PlanExpired,
    PlanTooSmall,
    SpendCapReached,
    StoredAlready,
    StoreError,
    TransactionRefused,
)
from caf_pipeline.records import Lease, PostRecord, SignedTransaction, TransactionLog, WaitingPost
from caf_pipeline.settings import JackalSettings
from caf_pipeline.store.jackal.answers import ChainFile, IncludedTransaction
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.messages import (
    BUY_STORAGE,
    POST_FILE,
    ChainMessage,
    TransactionTerms,
    buy_storage,
    decode,
    post_file,
    post_starts,
    sign_transaction,
    transaction_fee,
    transaction_messages,
)
from caf_pipeline.store.jackal.names import archive_note, archive_of, transaction_hash
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline.store.protocol import (
    ChunkToStore,
    refuse_lost_posts,
    refuse_unknown_archives,
    refuse_unknown_posts,
)
from caf_pipeline.system.quantities import counted, show_coins
from caf_pipeline.waits import BRIEF_SECONDS, Waits

MOST_POSTS: Final = 8
"""Posts in one transaction: the largest measured batch, which fails as a whole."""

GAS_BASE: Final = 55_500
GAS_POST: Final = 49_600
"""Measured: 105,000 for one post and 452,000 for eight."""

GAS_BUY: Final = 200_000
"""Not measured. If it is too little, the purchase is signed again with more."""

GAS_MARGIN: Final = Fraction(3, 2)
"""For longer notes and larger accounts. Unused gas is paid for, too."""

TAKEN_BLOCKS: Final = 5
"""Blocks until an included transaction must be in a node's index."""

EXPIRY_BLOCKS: Final = 1  # past the timeout height

SIGNINGS: Final = 10
"""Transactions that one call may sign, each after one without effect. More would only cost fees."""

_MOST_GAS_FACTOR: Final = 8  # after three doublings, something else is wrong

LEAST_WAIT_SECONDS: Final = 0.05
MOST_WAIT_SECONDS: Final = 2.0
"""Bounds of the wait between two polls: a quarter of a block."""

_CLOCK_SLACK: Final = timedelta(hours=1)
"""The error of a block's time that is estimated from its height."""

# Codes of the codespace "sdk", unless noted.
_UNAUTHORIZED: Final = 4  # also from the storage module, if a plan is too small or has ended
_INSUFFICIENT_FUNDS: Final = 5
_UNKNOWN_ADDRESS: Final = 9
_OUT_OF_GAS: Final = 11
_INSUFFICIENT_FEE: Final = 13
_BAD_JSON: Final = 17
_IN_MEMPOOL: Final = 19
_MEMPOOL_FULL: Final = 20
_KEY_NOT_FOUND: Final = 22  # no plan
_PAST_TIMEOUT: Final = 30
_WRONG_SEQUENCE: Final = 32

_WAITED_OUT: Final = frozenset({0, _IN_MEMPOOL, _MEMPOOL_FULL, _PAST_TIMEOUT, _WRONG_SEQUENCE})
"""Broadcast answers that are not final: a block, or the timeout height, decides."""


@dataclass(frozen=True, slots=True)
class Purchase:
    """Bought space.

    Attributes:
        cost: in ujkl, fee included.
        height: its block, or the height at which its effect was seen.
        earlier: an earlier call sent it. This call bought nothing.
        cost_told: `cost` was charged. Otherwise it is an upper bound.
    """

    hash: str
    cost: int
    height: int
    earlier: bool = False
    cost_told: bool = True


@dataclass(frozen=True, slots=True)
class TransactionOutcome:
    """The outcome of a transaction.

    Attributes:
        outcome: "included", "failed", "expired" or "superseded".
        height: its block, or the height at which the outcome was seen.
        cost: the amount charged in ujkl, if known.
    """

    transaction: SignedTransaction
    outcome: str
    height: int
    answer: IncludedTransaction | None = None
    cost: int | None = None


@dataclass(slots=True)
class _Attempts:
    signings: int = 0
    gas_factor: int = 1
    alone: bool = False


class Poster:
    """Posts chunks and buys space for one wallet on one chain.

    `wait_while_paused` is called before signing and blocks until the operator's pause ends.
    """

    def __init__(
        self,
        chain: Chain,
        wallet: Wallet,
        settings: JackalSettings,
        *,
        spend_cap: Callable[[], int | None],
        wait_while_paused: Callable[[Callable[[], None]], object] = lambda check: None,
        waits: Waits | None = None,
    ) -> None:
        self._chain = chain
        self._wallet = wallet
        self._other_address = ""
        self._settings = settings
        self._spend_cap = spend_cap
        self._wait_while_paused = wait_while_paused
        self._waits = waits or Waits()

    @property
    def _address(self) -> str:
        return self._other_address or self._wallet.address

    @property
    def account(self) -> str:
        """The log's name of the account: `<chain id>/<address>`."""
        return f"{self._chain.chain_id}/{self._address}"

    def post(
        self, chunk: ChunkToStore, log: TransactionLog, *, ready: Callable[[], None] = lambda: None
    ) -> PostRecord:
        """Post the chunk unless it is posted. Returns once the post is in a block.

        `ready` is called before anything is signed. It raises if nothing should be paid now.

        Raises:
            NoStoragePlan, PlanTooSmall, EmptyWallet, SpendCapReached, SettingsError: nothing was
            signed.
            StoredAlready: the ledger does not know a post of the archive, or this is the archive's
            first post and the account has an unknown archive; nothing was signed.
            TransactionRefused: no other error covers the code.
            StoreError: our post of this root has another size or too few copies.
        """
        posting = self._posted(chunk.merkle_root, chunk.stored_size_bytes)
        if posting is not None:
            # The chain lists the file, so a pending transaction that posts this root is in a block.
            if self._is_pending(chunk.merkle_root, log):
                with suppress(HeldByOther):  # the holder of the sequence settles it
                    self.settle(log)
            return posting
        posting = self._post_of_other_wallet(chunk, log)
        if posting is not None:
            return posting
        message = post_file(
            self._address,
            chunk.merkle_root,
            chunk.stored_size_bytes,
            copies=self._settings.copies,
            proof_type=chunk.proof_type,
            note=archive_note(chunk.archive_id, chunk.header_sha256, chunk.mac),
        ).value
        waiting_post = WaitingPost(
            chunk.name, message, chunk.stored_size_bytes * self._settings.copies
        )
        log.ask(self.account, chunk.name, message, waiting_post.charged_bytes, epoch=chunk.epoch)
        attempts = _Attempts()
        with ExitStack() as waiting:
            waiting.enter_context(self._waiting_for_turn())
            while True:
                try:
                    with log.lease(self.account) as lease:
                        waiting.close()
                        self._settle_pending(lease, log)
                        posting = self._posted(chunk.merkle_root, chunk.stored_size_bytes)
                        if posting is None:
                            self._chain.require_verified(chunk.proof_type)
                            ready()
                            self._sign_posts(waiting_post, lease, log, attempts)
                except HeldByOther:
                    self._wait()
                if posting is None:
                    # Another run's transaction, or our last one, may have posted the chunk.
                    start = log.start_of(self.account, chunk.name)
                    if start is not None and self._chain.file(
                        chunk.merkle_root, self._address, start
                    ):
                        posting = PostRecord(
                            chunk.merkle_root, self._address, start, chunk.stored_size_bytes
                        )
                if posting is not None:
                    return posting

    def require_fee(self, log: TransactionLog) -> None:
        """Raise SpendCapReached or EmptyWallet if one post more than requested cannot be paid."""
        self._require_funds(self._fee(post_gas(len(log.waiting(self.account)) + 1)), log)

    def _fee(self, gas: int) -> int:
        return ceil(gas * Fraction(str(self._settings.gas_price)))

    def _require_funds(self, cost: int, log: TransactionLog) -> None:
        cap, spent = self._spend_cap(), log.spent(self.account)
        if cap is not None and spent + cost > cap:
            raise SpendCapReached(
                f"{show_coins(cost)} more would make {show_coins(spent + cost)}; the limit is "
                f"{show_coins(cap)}, and {show_coins(spent)} are spent",
                hint="raise the limit with `caf limit` or jackal.spend_cap",
            )
        balance = self._chain.balance(self._address)
        if balance < cost:
            raise EmptyWallet(
                f"{self._address} has {show_coins(balance)}, but {show_coins(cost)} are needed",
                hint=f"send at least {show_coins(cost - balance)} to it",
            )

    def find(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord | None:
        """Return the chunk's post once no pending transaction may post it. Signs nothing."""
        return self._post_of_other_wallet(chunk, log) or self._find_own(chunk, log)

    def sequence(self) -> int:
        """Return the account's sequence."""
        try:
            return self._chain.account(self._address).sequence
        except EmptyWallet:  # an account that never received anything has posted nothing
            return 0

    def list_archives(
        self, log: TransactionLog, sequence: int
    ) -> Mapping[str | None, Sequence[int]]:
        """List the account's archives, and remember them. `sequence` was read before."""
        starts = self._chain.archives_of(self._address)
        log.record_archives(self.account, sequence, {*filter(None, starts)})
        return starts

    def _refuse_unknown_archives(self, archive_id: str, log: TransactionLog, sequence: int) -> None:
        """Two ledgers that begin at once see nothing of each other when they plan."""
        if log.has_post(archive_id):
            return
        if not log.explains(self.account, None, sequence):
            self.list_archives(log, sequence)
        refuse_unknown_archives(log.unknown_archives(self.account, archive_id))

    def unknown_posts(
        self, archive_id: str, log: TransactionLog, *, sequence: int | None = None
    ) -> Sequence[bytes]:
        """Read the chain's list only if the log does not explain the account's `sequence`."""
        if sequence is None:
            sequence = self.sequence()
        if log.explains(self.account, archive_id, sequence):
            return []
        # Read after the sequence, the list has every post of the sequences used before.
        roots = [
            file.merkle_root for file in self._chain.files_of_archive(self._address, archive_id)
        ]
        unknown = log.unknown_roots(roots, signed=True)
        log.record_look(self.account, archive_id, sequence, len(unknown))
        return unknown

    def _find_own(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord | None:
        while self._is_pending(chunk.merkle_root, log):
            try:
                self.settle(log)
            except HeldByOther:  # the holder of the sequence settles it
                self._wait()
        return self._posted(chunk.merkle_root, chunk.stored_size_bytes)

    def _post_of_other_wallet(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord | None:
        for account in log.other_accounts(chunk.name, self.account):
            chain_id, _, address = account.rpartition("/")
            if chain_id != self._chain.chain_id:
                continue
            other = copy(self)
            other._other_address = address
            with other._waiting_for_turn():
                posting = other._find_own(chunk, log)
            if posting is not None:
                return posting
        return None

    def buy(self, size_bytes: int, days: int, log: TransactionLog) -> Purchase:
        """Buy space for the wallet.

        An earlier purchase with an unknown outcome is settled first. If it was included, it is
        returned and nothing is bought.

        Raises:
            EmptyWallet, SpendCapReached, SettingsError: nothing was signed.
            TransactionRefused.
        """
        attempts = _Attempts()
        message = buy_storage(self._address, size_bytes, days)
        with ExitStack() as waiting:
            waiting.enter_context(self._waiting_for_turn())
            while True:
                try:
                    with log.lease(self.account) as lease:
                        waiting.close()
                        for result in self._settle_pending(lease, log):
                            if result.transaction.purpose == "buy" and result.outcome == "included":
                                return _purchase(result, earlier=True)
                        while True:
                            if purchase := self._buy_once(
                                message, lease, log, attempts, size_bytes=size_bytes, days=days
                            ):
                                return purchase
                except HeldByOther:
                    self._wait()

    def settle(self, log: TransactionLog) -> None:
        """Store the outcome of every pending transaction. Raises HeldByOther if a live run does."""
        with log.lease(self.account) as lease:
            self._settle_pending(lease, log)

    def _is_pending(self, merkle_root: bytes, log: TransactionLog) -> bool:
        return any(
            message.type_url == POST_FILE and _root_of(message.value) == merkle_root
            for transaction in log.pending(self.account)
            for message in transaction_messages(transaction.body)
        )

    def _own_files(self, merkle_root: bytes) -> list[ChainFile]:
        """Files that last as long as the plan, by start."""
        files = self._chain.files_of_root(merkle_root, self._address)
        return sorted((file for file in files if not file.expires), key=lambda file: file.start)

    def _posted(self, merkle_root: bytes, size_bytes: int) -> PostRecord | None:
        files = self._own_files(merkle_root)
        required = self._settings.copies_required
        for file in files:
            if file.size_bytes == size_bytes and file.max_proofs >= required:
                return PostRecord(merkle_root, self._address, file.start, size_bytes)
        if files:
            first = files[0]
            raise StoreError(
                f"root {merkle_root.hex()[:16]}… was posted at block {first.start} with"
                f" {counted(first.max_proofs, 'copy', 'copies')} of {first.size_bytes} bytes, but"
                f" {required} of {size_bytes} bytes are required",
                hint="lower jackal.required_copies, or delete that post with its own program",
            )
        return None

    def _sign_posts(
        self, own: WaitingPost, lease: Lease, log: TransactionLog, attempts: _Attempts
    ) -> None:
        posts = self._batch(own, [] if attempts.alone else log.waiting(self.account))
        gas = post_gas(len(posts)) * attempts.gas_factor
        messages = [ChainMessage(POST_FILE, post.message) for post in posts]
        self._wait_while_paused(lease.check)
        try:
            transaction = self._signed(messages, log, attempts, gas=gas, purpose="post")
        except (StoredAlready, SpendCapReached, EmptyWallet):
            if len(posts) == 1:
                raise
            attempts.alone = True  # the reason may be another chunk's archive, or its fee
            return
        try:
            log.commit(lease, transaction, [post.chunk for post in posts])
        except (LeaseLost, LedgerUnreachable):
            raise
        except LedgerError:
            if len(posts) == 1:
                raise
            attempts.alone = True  # another chunk was withdrawn, or its own run was faster
            return
        result = self._settled(transaction, lease, log, ours=True)
        self._learn(result, attempts, batch=len(posts) > 1)

    def _batch(self, own: WaitingPost, waiting: Iterable[WaitingPost]) -> list[WaitingPost]:
        plan = self._chain.plan(self._address)
        if plan is None:
            raise NoStoragePlan(
                f"{self._address} has bought no space", hint="buy some with `caf jackal buy`"
            )
        if plan.ends_at <= self._chain.now():
            raise PlanExpired(
                f"the space of {self._address} ended on {plan.ends_at:%Y-%m-%d %H:%M} UTC",
                hint="buy again with `caf jackal buy`",
            )
        free_bytes = plan.free_bytes - own.charged_bytes
        if free_bytes < 0:
            raise PlanTooSmall(
                f"the copies of chunk {own.chunk} need {own.charged_bytes} bytes, but only "
                f"{plan.free_bytes} are free",
                hint="buy more space with `caf jackal buy`",
            )
        posts, roots = [own], {_root_of(own.message)}
        for post in waiting:
            if len(posts) == MOST_POSTS:
                break
            root = _root_of(post.message)
            # Two posts of one root would pay twice. A root that is on the chain is found by its own
            # run. A root of another proof type needs its own run's check of the chain's version.
            fits = post.charged_bytes <= free_bytes and len(root) == len(_root_of(own.message))
            if fits and root not in roots and not self._own_files(root):
                posts.append(post)
                roots.add(root)
                free_bytes -= post.charged_bytes
        return posts

    def _signed(
        self,
        messages: Sequence[ChainMessage],
        log: TransactionLog,
        attempts: _Attempts,
        *,
        gas: int,
        purpose: str,
        price: int = 0,
    ) -> SignedTransaction:
        """Only this sequence can include it: no post comes between it and the check of posts."""
        if attempts.signings == SIGNINGS:
            raise StoreError(
                f"{SIGNINGS} transactions of {self._address} in a row had no effect",
                hint="another program may use the same wallet: stop it, or give it another wallet",
            )
        fee = self._fee(gas)
        cost = fee + price
        self._require_funds(cost, log)
        account = self._chain.account(self._address)
        notes = {
            decode("PostFile", message.value).note
            for message in messages
            if message.type_url == POST_FILE
        }
        for archive_id in sorted(filter(None, map(archive_of, notes))):
            refuse_unknown_posts(self.unknown_posts(archive_id, log, sequence=account.sequence))
            refuse_lost_posts(log.lost_posts(archive_id))
            self._refuse_unknown_archives(archive_id, log, account.sequence)
        timeout_height = self._chain.height() + self._settings.timeout_blocks
        terms = TransactionTerms(
            self._chain.chain_id, account.number, account.sequence, timeout_height, gas, fee
        )
        body = sign_transaction(self._wallet, messages, terms)
        attempts.signings += 1
        return SignedTransaction(
            transaction_hash(body),
            body,
            self.account,
            account.sequence,
            timeout_height,
            purpose=purpose,
            cost=cost,
        )

    def _buy_once(
        self,
        message: ChainMessage,
        lease: Lease,
        log: TransactionLog,
        attempts: _Attempts,
        *,
        size_bytes: int,
        days: int,
    ) -> Purchase | None:
        self._chain.require_verified(self._settings.proof_type)
        gas = ceil(GAS_BUY * GAS_MARGIN) * attempts.gas_factor
        price = self._chain.price(days, size_bytes)
        plan = self._chain.plan(self._address)
        if plan is not None and size_bytes < plan.used_bytes:
            raise PlanTooSmall(
                f"{size_bytes} bytes are less than the {plan.used_bytes} bytes in use",
                hint="a purchase replaces the plan and adds nothing to it: buy at least what is "
                "in use",
            )
        self._wait_while_paused(lease.check)
        transaction = self._signed([message], log, attempts, gas=gas, purpose="buy", price=price)
        log.commit(lease, transaction, [])
        result = self._settled(transaction, lease, log, ours=True)
        self._learn(result, attempts, batch=False)
        return _purchase(result) if result.outcome == "included" else None

    def _learn(self, result: TransactionOutcome, attempts: _Attempts, *, batch: bool) -> None:
        if result.outcome != "failed" or result.answer is None:
            return
        if result.answer.code == _OUT_OF_GAS and attempts.gas_factor < _MOST_GAS_FACTOR:
            attempts.gas_factor *= 2
        elif batch:
            attempts.alone = True
        else:
            raise _failure(result.answer.code, result.answer.codespace, result.answer.log)

    def _settle_pending(self, lease: Lease, log: TransactionLog) -> list[TransactionOutcome]:
        return [
            self._settled(transaction, lease, log, ours=False)
            for transaction in log.pending(self.account)
        ]

    def _settled(
        self, transaction: SignedTransaction, lease: Lease, log: TransactionLog, *, ours: bool
    ) -> TransactionOutcome:
        """Send a committed transaction until its outcome is known, and store the outcome.

        `ours`: this call signed it, so a refused broadcast is an error and the transaction stays
        pending. A refused one of an earlier call waits for its timeout height.
        """
        messages = transaction_messages(transaction.body)
        sent_at, taken_at = -1, -1  # heights
        with self._waits.waiting(
            f"a block with transaction {transaction.hash[:12]}…",
            ends_by="ends with that block, or with block "
            f"{transaction.timeout_height + EXPIRY_BLOCKS + 1}",
            grace=BRIEF_SECONDS,
        ):
            while True:
                lease.check()
                if sent_at >= 0 and (result := self._included(transaction)):
                    return self._stored(result, messages, lease, log)
                height, sequence = self._chain.height(), self._chain.account(self._address).sequence
                if sequence > transaction.sequence:
                    taken_at = height if taken_at < 0 else taken_at
                    result = self._overtaken(
                        transaction, messages, last=height >= taken_at + TAKEN_BLOCKS
                    )
                    if result is not None:
                        return self._stored(result, messages, lease, log)
                elif height > transaction.timeout_height + EXPIRY_BLOCKS:
                    # No later block may include it. An earlier one would have used the sequence.
                    result = self._included(transaction) or TransactionOutcome(
                        transaction, "expired", height
                    )
                    return self._stored(result, messages, lease, log)
                elif height > sent_at:
                    try:
                        answer = self._chain.broadcast(transaction.body)
                    except ChainUnreachable:
                        pass  # it may have been sent: the next poll shows it, or raises
                    else:
                        if ours and answer.code not in _WAITED_OUT:
                            raise _failure(
                                answer.code, answer.codespace, answer.log, before_block=True
                            )
                    sent_at = height
                self._wait()

    def _included(self, transaction: SignedTransaction) -> TransactionOutcome | None:
        answer = self._chain.transaction(transaction.hash)
        if answer is None:
            return None
        if answer.code == 0:
            return TransactionOutcome(transaction, "included", answer.height, answer)
        # A transaction that the block refused before its messages ran used neither fee nor
        # sequence, and may be included later.
        if answer.code == _WRONG_SEQUENCE and answer.codespace == "sdk":
            return None
        if self._chain.account(self._address).sequence <= transaction.sequence:
            return None
        return TransactionOutcome(transaction, "failed", answer.height, answer)

    def _overtaken(
        self, transaction: SignedTransaction, messages: Sequence[ChainMessage], *, last: bool
    ) -> TransactionOutcome | None:
        """A node may index it late or never, so only the last look proves anything (`last`)."""
        if result := self._included(transaction):
            return result
        height = self._chain.height()
        # Only the index has a purchase's actual cost, so it gets its time. No post is signed for a
        # root that the chain has, so a listed root is the transaction's effect.
        if (last or transaction.purpose != "buy") and any(
            (message.type_url == POST_FILE and self._own_files(_root_of(message.value)))
            or (
                message.type_url == BUY_STORAGE and self._bought(transaction, message.value, height)
            )
            for message in messages
        ):
            return TransactionOutcome(transaction, "included", height)
        return TransactionOutcome(transaction, "superseded", height) if last else None

    def _bought(self, transaction: SignedTransaction, message: bytes, height: int) -> bool:
        purchase = decode("BuyStorage", message)
        plan = self._chain.plan(self._address)
        if plan is None or plan.space_bytes != purchase.bytes:
            return False
        blocks = max(0, height - (transaction.timeout_height - self._settings.timeout_blocks))
        signed_at = self._chain.now() - timedelta(seconds=blocks * self._chain.block_seconds())
        return plan.ends_at >= signed_at + timedelta(days=purchase.duration_days) - _CLOCK_SLACK

    def _stored(
        self,
        result: TransactionOutcome,
        messages: Sequence[ChainMessage],
        lease: Lease,
        log: TransactionLog,
    ) -> TransactionOutcome:
        starts: list[int] = []
        cost: int | None = None
        if result.outcome == "included":
            starts = self._starts(
                result, [message.value for message in messages if message.type_url == POST_FILE]
            )
            moved = (result.answer.moved if result.answer else None) or {}
            if result.transaction.purpose == "buy" and self._address in moved:
                cost = transaction_fee(result.transaction.body) + max(0, -moved[self._address])
        elif result.outcome == "failed":
            cost = transaction_fee(result.transaction.body)
        log.settle(lease, result.transaction.hash, result.outcome, starts=starts, cost=cost)
        return replace(result, cost=cost)

    def _starts(self, result: TransactionOutcome, posts: Sequence[bytes]) -> list[int]:
        if result.answer is not None:
            starts = post_starts(result.answer.data)
            if len(starts) != len(posts):
                raise StoreError(
                    f"transaction {result.transaction.hash} has {counted(len(posts), 'post')}, but"
                    f" the chain returned {counted(len(starts), 'start')}"
                )
            return starts
        if not posts:
            return []
        starts = [files[0].start for post in posts if (files := self._own_files(_root_of(post)))]
        # All posts of a transaction are in one block and have the same start.
        return [min(starts)] * len(posts)

    def _waiting_for_turn(self) -> AbstractContextManager[object]:
        return self._waits.waiting(
            f"another run that sends transactions of {self._address}",
            ends_by="ends when that run's transactions are in a block or have expired",
            grace=BRIEF_SECONDS,
        )

    def _wait(self) -> None:
        time.sleep(max(LEAST_WAIT_SECONDS, min(MOST_WAIT_SECONDS, self._chain.block_seconds() / 4)))


def post_gas(posts: int) -> int:
    """Return the gas limit of a transaction with so many posts."""
    return ceil((GAS_BASE + GAS_POST * posts) * GAS_MARGIN)


def _purchase(result: TransactionOutcome, *, earlier: bool = False) -> Purchase:
    cost = result.transaction.cost if result.cost is None else result.cost
    return Purchase(
        result.transaction.hash,
        cost,
        result.height,
        earlier=earlier,
        cost_told=result.cost is not None,
    )


def _root_of(message: bytes) -> bytes:
    return bytes(decode("PostFile", message).merkle)


def _failure(code: int, codespace: str, log: str, *, before_block: bool = False) -> StoreError:
    reason = log[:200]
    if not before_block and code == _KEY_NOT_FOUND:
        return NoStoragePlan(
            f"the wallet has bought no space: {reason}", hint="buy some with `caf jackal buy`"
        )
    if not before_block and code == _UNAUTHORIZED and "expired" in log:
        return PlanExpired(
            f"the bought space has ended: {reason}", hint="buy again with `caf jackal buy`"
        )
    if not before_block and code == _UNAUTHORIZED:
        return PlanTooSmall(
            f"the bought space is too small: {reason}", hint="buy more with `caf jackal buy`"
        )
    if code in (_INSUFFICIENT_FUNDS, _UNKNOWN_ADDRESS):
        return EmptyWallet(f"the wallet cannot pay: {reason}", hint="send coins to it")
    hints = {
        _INSUFFICIENT_FEE: "raise jackal.gas_price; this transaction expires at its timeout "
        "height, and is then signed again",
        _OUT_OF_GAS: "raise jackal.gas_price",
        _BAD_JSON: "the note must be JSON",
        _UNAUTHORIZED: "check jackal.chain_id and the wallet",
    }
    return TransactionRefused(
        f"the chain refused a transaction with code {code} of {codespace or 'sdk'}: {reason}",
        code=code,
        codespace=codespace,
        hint=hints.get(code, ""),
    )
