"""Posts a chunk and pays once: a transaction is logged, sent until its outcome is known, and only
then signed again.

    ask      a chunk's message waits in the log own      one run at a time has the account's
    sequence; it settles what is pending before it signs sign     all messages that wait, up to
    eight, in one transaction, which is committed to the log settle   the same bytes are sent again
    until the transaction is in a block, or cannot come into one any more

A transaction is given up only where a node past its timeout height says that its sequence is
unused, or where the sequence is used and, some blocks later, the node knows neither the transaction
nor what it would have done.

A wallet that takes the place of another one settles what that one signed for a chunk before it
signs anything for it.

Source: promise 3 in docs/explanation/design.md; the codes in "Messages" of the notes on Jackal's
protocol, and errors.go of Cosmos SDK 0.45.
"""

import time
from collections.abc import Callable, Iterable, Sequence
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
from caf_pipeline.settings import JackalSettings
from caf_pipeline.store.jackal.answers import ChainFile, IncludedTransaction, StoragePlan
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
    Lease,
    PostRecord,
    SignedTransaction,
    TransactionLog,
    WaitingPost,
    refuse_unknown_posts,
)
from caf_pipeline.system.quantities import counted
from caf_pipeline.waits import BRIEF_SECONDS, Waits

MOST_POSTS: Final = 8
"""In one transaction: as many as were measured.

A transaction of more saves little and fails as a whole.
"""

GAS_BASE: Final = 55_500
GAS_POST: Final = 49_600
"""By the measured 105,000 for one post and 452,000 for eight."""

GAS_BUY: Final = 200_000
"""Not measured: it writes a plan, a payment gauge and some transfers of coins.

Out of gas, it is signed again with more.
"""

GAS_MARGIN: Final = Fraction(
    3, 2
)  # longer notes, larger accounts; what is not used is paid for all the same

TAKEN_BLOCKS: Final = 5
"""For so many blocks after a sequence is seen used, its transaction may still be missing in a
node's index, which is written after the block.
"""

EXPIRY_BLOCKS: Final = 1  # past the timeout height

SIGNINGS: Final = 10
"""In one call.

Each one more means that the last was superseded, expired or failed; where nothing is learnt of why,
every further one would only cost its fee.
"""

_MOST_GAS_FACTOR: Final = (
    8  # three times twice as much: what needs still more is something else than a post
)

LEAST_WAIT_SECONDS: Final = 0.05
MOST_WAIT_SECONDS: Final = 2.0
"""Between two looks at a transaction, and at a log that another run writes: a quarter of a block,
within these.
"""

_CLOCK_SLACK: Final = timedelta(hours=1)
"""By how much the time of an earlier block may be misjudged from its number."""

# Codes of the codespace "sdk", except where another is named.
_UNAUTHORIZED: Final = 4  # also the storage module's answer where a plan is too small or has ended
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
"""Answers to a broadcast after which the transaction may be, or come to be, in a block, or its
timeout height decides.
"""


@dataclass(frozen=True, slots=True)
class Purchase:
    """Space that was bought.

    Attributes: hash: of the transaction. cost: ujkl, fee included. height: of its block, or of the
        block by which it was found in effect. earlier: it was sent by an earlier call whose end was
        not seen; this call bought nothing. cost_told: the cost is what the chain took, and not the
        list price, which is the most that it can have taken.
    """

    hash: str
    cost: int
    height: int
    earlier: bool = False
    cost_told: bool = True


@dataclass(frozen=True, slots=True)
class TransactionOutcome:
    """What became of a transaction.

    `answer` is the chain's, where it is in a block and the node told.

    `cost` is what it came to in ujkl, where that is known to differ from what was feared, or to be
    just that.
    """

    transaction: SignedTransaction
    outcome: str
    height: int
    answer: IncludedTransaction | None = None
    cost: int | None = None


@dataclass(slots=True)
class _Attempts:
    """What one call learnt from the transactions that it signed."""

    signings: int = 0
    gas_factor: int = 1
    alone: bool = False


class Poster:
    """Posts chunks and buys space for one wallet on one chain.

    `wait_while_paused` keeps it from signing during a pause.
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
        """What the log knows it by: "<chain id>/<address>"."""
        return f"{self._chain.chain_id}/{self._address}"

    # what is asked of it

    def post(
        self, chunk: ChunkToStore, log: TransactionLog, *, ready: Callable[[], None] = lambda: None
    ) -> PostRecord:
        """Post the chunk, or find that it is posted; returns once the post is in a block.

        `ready` is called before anything is signed, and raises what stands against paying now.

        Raises: NoStoragePlan, PlanTooSmall, EmptyWallet, SpendCapReached: nothing was signed.
            SettingsError: nor here; the chain may
                not verify proofs of the chunk's type. StoredAlready: nor here; the ledger does not
                know a post of the archive.
            TransactionRefused: by a code that no other error stands for.
            StoreError: the root is posted by us in a way that does not serve. StoreUnreachable.
            LeaseLost.
        """
        found = self._posted(chunk.merkle_root, chunk.stored_size_bytes)
        if found is not None:
            self._settle_post(chunk.merkle_root, log)
            return found
        found = self._found_of_others(chunk, log)
        if found is not None:
            return found
        message = post_file(
            self._address,
            chunk.merkle_root,
            chunk.stored_size_bytes,
            copies=self._settings.copies,
            proof_type=chunk.proof_type,
            note=archive_note(chunk.archive_id),
        ).value
        mine = WaitingPost(chunk.name, message, chunk.stored_size_bytes * self._settings.copies)
        log.ask(self.account, mine.chunk, mine.message, mine.charged_bytes)
        attempts = _Attempts()
        with ExitStack() as waiting:
            waiting.enter_context(self._for_turn())
            while True:
                try:
                    with log.lease(self.account) as lease:
                        waiting.close()
                        self._settle_pending(lease, log)
                        found = self._posted(chunk.merkle_root, chunk.stored_size_bytes)
                        if found is None:
                            self._chain.require_verified(chunk.proof_type)
                            ready()
                            self._sign_posts(mine, lease, log, attempts)
                except HeldByOther:
                    self._wait()
                found = found or self._posted_by_other(chunk, log)
                if found is not None:
                    return found

    def found(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord | None:
        """Return the chunk's post where the chain has it, once none is pending that may become one;
        signs nothing.

        Raises:
            What `post` raises of a chain and of posts that do not serve.
        """
        return self._found_of_others(chunk, log) or self._found(chunk, log)

    def unknown_posts(
        self, archive_id: str, log: TransactionLog, *, sequence: int | None = None
    ) -> Sequence[bytes]:
        """Return the Merkle roots of the wallet's posts of an archive that the ledger does not
        know.

        The chain's list is read only if the account's sequence is another than the ledger's
        transactions explain.

        Args:
            archive_id: of the archive.
            log: of the ledger.
            sequence: the account's, if it is known already.
        """
        if sequence is None:
            try:
                sequence = self._chain.account(self._address).sequence
            except EmptyWallet:  # an account that never received anything has posted nothing
                return []
        if log.explains(self.account, archive_id, sequence):
            return []
        # The list comes second: it has every post of a sequence that was used before.
        listed = [
            file.merkle_root for file in self._chain.files_of_archive(self._address, archive_id)
        ]
        unknown = log.unknown_roots(listed, signed=True)
        log.record_look(self.account, archive_id, sequence, len(unknown))
        return unknown

    def _found(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord | None:
        while self._is_pending(chunk.merkle_root, log):
            try:
                self.settle(log)
            except HeldByOther:  # who has the sequence does just that
                self._wait()
        return self._posted(chunk.merkle_root, chunk.stored_size_bytes)

    def _found_of_others(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord | None:
        """Return the chunk's post by a wallet that was used before, once none of its transactions
        may become one.

        What was signed is sent again and looked for, which takes no key.
        """
        for account in log.other_accounts(chunk.name, self.account):
            chain_id, _, address = account.rpartition("/")
            if chain_id != self._chain.chain_id:
                continue
            other = copy(self)
            other._other_address = address
            with other._for_turn():
                found = other._found(chunk, log)
            if found is not None:
                return found
        return None

    def buy(self, size_bytes: int, days: int, log: TransactionLog) -> Purchase:
        """Buy space for the wallet; a purchase whose fate was not known is settled first, and if it
        came through, is the answer.

        Raises: EmptyWallet, SpendCapReached: nothing was signed. SettingsError: nor here; the chain
            may not verify proofs of the type
                that is set. TransactionRefused, StoreError, StoreUnreachable, LeaseLost.
        """
        attempts = _Attempts()
        message = buy_storage(self._address, size_bytes, days)
        with ExitStack() as waiting:
            waiting.enter_context(self._for_turn())
            while True:
                try:
                    with log.lease(self.account) as lease:
                        waiting.close()
                        for fate in self._settle_pending(lease, log):
                            if fate.transaction.purpose == "buy" and fate.outcome == "included":
                                return _purchase(fate, earlier=True)
                        while True:
                            if bought := self._buy_once(
                                message, lease, log, attempts, size_bytes=size_bytes, days=days
                            ):
                                return bought
                except HeldByOther:
                    self._wait()

    def settle(self, log: TransactionLog) -> None:
        """Wait until the fate of every pending transaction of the account is known, and write it.

        Raises:
            HeldByOther: a live run does that already. StoreUnreachable, LeaseLost.
        """
        with log.lease(self.account) as lease:
            self._settle_pending(lease, log)

    def _settle_post(self, merkle_root: bytes, log: TransactionLog) -> None:
        """Settle what is pending where a post of this root is in it, which is in a block as the
        chain's list shows.
        """
        if self._is_pending(merkle_root, log):
            with suppress(HeldByOther):  # who has the sequence does just that
                self.settle(log)

    def _is_pending(self, merkle_root: bytes, log: TransactionLog) -> bool:
        """Tell whether a transaction whose fate is not known posts this root."""
        bodies = [one.body for one in log.pending(self.account)]
        posted = {
            _root_of(one.value)
            for body in bodies
            for one in transaction_messages(body)
            if one.type_url == POST_FILE
        }
        return merkle_root in posted

    # what the chain has

    def _ours(self, merkle_root: bytes) -> list[ChainFile]:
        """Return our posts of a root that last as long as the plan, the first first."""
        listed = self._chain.files_of_root(merkle_root, self._address)
        return sorted((one for one in listed if not one.expires), key=lambda one: one.start)

    def _posted(self, merkle_root: bytes, size_bytes: int) -> PostRecord | None:
        """Return our post of a root that the chain has, which costs nothing more.

        Raises:
            StoreError: it asks for fewer copies than required, or for another size.
        """
        ours = self._ours(merkle_root)
        required = self._settings.copies_required
        fit = [one for one in ours if one.size_bytes == size_bytes and one.max_proofs >= required]
        if fit:
            return PostRecord(merkle_root, self._address, fit[0].start, size_bytes)
        if ours:
            first = ours[0]
            raise StoreError(
                f"root {merkle_root.hex()[:16]}… is posted already at block {first.start}, with"
                f" {counted(first.max_proofs, 'copy', 'copies')} of"
                f" {first.size_bytes} bytes; {required} of {size_bytes} bytes are wanted",
                hint="lower jackal.required_copies, or delete that post with whatever made it",
            )
        return None

    def _posted_by_other(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord | None:
        """Return the chunk's post where another run's transaction, or our last, made it and the
        chain still has it.
        """
        start = log.start_of(self.account, chunk.name)
        if start is None or self._chain.file(chunk.merkle_root, self._address, start) is None:
            return None
        return PostRecord(chunk.merkle_root, self._address, start, chunk.stored_size_bytes)

    # signing

    def _sign_posts(
        self, mine: WaitingPost, lease: Lease, log: TransactionLog, attempts: _Attempts
    ) -> None:
        """Sign one transaction with our post and others that wait, and settle it."""
        posts = self._batch(mine, [] if attempts.alone else log.waiting(self.account))
        gas = ceil((GAS_BASE + GAS_POST * len(posts)) * GAS_MARGIN) * attempts.gas_factor
        messages = [ChainMessage(POST_FILE, post.message) for post in posts]
        self._wait_while_paused(lease.check)
        try:
            transaction = self._signed(messages, log, attempts, gas=gas, purpose="post")
        except StoredAlready:
            if len(posts) == 1:
                raise
            attempts.alone = True  # it may be the archive of another chunk
            return
        try:
            log.commit(lease, transaction, [post.chunk for post in posts])
        except (LeaseLost, LedgerUnreachable):
            raise
        except LedgerError:
            if len(posts) == 1:
                raise
            attempts.alone = True  # another chunk was withdrawn, or its own run was quicker
            return
        fate = self._settled(transaction, lease, log, ours=True)
        self._learn(fate, attempts, batch=len(posts) > 1)

    def _batch(self, mine: WaitingPost, waiting: Iterable[WaitingPost]) -> list[WaitingPost]:
        """Return our post and those that go with it: what fits the space and is not on the chain
        yet.

        Raises:
            NoStoragePlan, PlanExpired, PlanTooSmall: for ours.
        """
        free_bytes = self._usable_plan().free_bytes - mine.charged_bytes
        if free_bytes < 0:
            raise PlanTooSmall(
                f"chunk {mine.chunk} takes {mine.charged_bytes} bytes in all; "
                f"{free_bytes + mine.charged_bytes} are free",
                hint="buy more space with `caf jackal buy`",
            )
        posts, roots = [mine], {_root_of(mine.message)}
        for post in waiting:
            if len(posts) == MOST_POSTS:
                break
            root = _root_of(post.message)
            # Its own run finds a root that is posted; and two posts of one would be one too many.
            # Whether the chain verifies another type of proof is for that run to ask.
            fits = post.charged_bytes <= free_bytes and len(root) == len(_root_of(mine.message))
            if fits and root not in roots and not self._ours(root):
                posts.append(post)
                roots.add(root)
                free_bytes -= post.charged_bytes
        return posts

    def _usable_plan(self) -> StoragePlan:
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
        return plan

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
        """Sign with the sequence that the chain names, once nothing of the account is pending.

        The transaction can only be included if this sequence is the account's. So no post of the
        account comes between the look at the archives' posts and this transaction.

        Raises: SpendCapReached, EmptyWallet: it would cost too much. StoreError: this call signed
            too often. StoredAlready: the
                ledger does not know a post of one of the archives.
        """
        if attempts.signings == SIGNINGS:
            raise StoreError(
                f"{SIGNINGS} transactions of {self._address} in a row had no effect",
                hint="another program may be using the same wallet: stop it, or give it a wallet "
                "of its own",
            )
        fee = ceil(gas * Fraction(str(self._settings.gas_price)))
        self._check_money(fee + price, log)
        account = self._chain.account(self._address)
        notes = {
            decode("PostFile", message.value).note
            for message in messages
            if message.type_url == POST_FILE
        }
        for archive_id in sorted(filter(None, map(archive_of, notes))):
            refuse_unknown_posts(self.unknown_posts(archive_id, log, sequence=account.sequence))
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
            cost=fee + price,
        )

    def _check_money(self, cost: int, log: TransactionLog) -> None:
        cap = self._spend_cap()
        spent = log.spent(self.account)
        if cap is not None and spent + cost > cap:
            raise SpendCapReached(
                f"{cost} ujkl more would come to {spent + cost} ujkl; the limit is {cap} ujkl and "
                f"{spent} ujkl are spent",
                hint="raise it with `caf limit` or jackal.spend_cap",
            )
        balance = self._chain.balance(self._address)
        if balance < cost:
            raise EmptyWallet(
                f"{self._address} has {balance} ujkl, and {cost} ujkl are needed",
                hint=f"send at least {cost - balance} ujkl to it",
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
        """Sign and settle one purchase; None where it came to nothing and may be tried again."""
        self._chain.require_verified(self._settings.proof_type)
        gas = ceil(GAS_BUY * GAS_MARGIN) * attempts.gas_factor
        price = self._chain.price(days, size_bytes)
        plan = self._chain.plan(self._address)
        if plan is not None and size_bytes < plan.used_bytes:
            raise PlanTooSmall(
                f"{size_bytes} bytes are fewer than the {plan.used_bytes} that are used",
                hint="a purchase is the whole plan from then on, not an addition to the one "
                "before: buy at least what is used",
            )
        self._wait_while_paused(lease.check)
        transaction = self._signed([message], log, attempts, gas=gas, purpose="buy", price=price)
        log.commit(lease, transaction, [])
        fate = self._settled(transaction, lease, log, ours=True)
        self._learn(fate, attempts, batch=False)
        return _purchase(fate) if fate.outcome == "included" else None

    def _learn(self, fate: TransactionOutcome, attempts: _Attempts, *, batch: bool) -> None:
        """Change the next attempt by why this one failed: more gas, or no batch.

        Raise what only a person can mend.
        """
        if fate.outcome != "failed" or fate.answer is None:
            return
        if fate.answer.code == _OUT_OF_GAS and attempts.gas_factor < _MOST_GAS_FACTOR:
            attempts.gas_factor *= 2
        elif batch:
            attempts.alone = True
        else:
            raise _failure(fate.answer.code, fate.answer.codespace, fate.answer.log)

    # settling

    def _settle_pending(self, lease: Lease, log: TransactionLog) -> list[TransactionOutcome]:
        """Settle what earlier calls left, by sequence."""
        return [self._settled(one, lease, log, ours=False) for one in log.pending(self.account)]

    def _settled(
        self, transaction: SignedTransaction, lease: Lease, log: TransactionLog, *, ours: bool
    ) -> TransactionOutcome:
        """Send a transaction until its fate is known, and write it.

        Args: transaction: committed, not settled. lease: of the account. log: where it stands.
            ours: whether this call signed it, so that a refusal is this call's failure. One of an
            earlier call is waited for.

        Raises: StoreError: this call's was refused before any block; it stays pending.
            StoreUnreachable. LeaseLost.
        """
        with self._waits.waiting(
            f"a block with transaction {transaction.hash[:12]}…",
            ends_by="that block ends it, or block "
            f"{transaction.timeout_height + EXPIRY_BLOCKS + 1} without it",
            grace=BRIEF_SECONDS,
        ):
            return self._outcome(transaction, lease, log, ours=ours)

    def _outcome(
        self, transaction: SignedTransaction, lease: Lease, log: TransactionLog, *, ours: bool
    ) -> TransactionOutcome:
        messages = transaction_messages(transaction.body)
        sent_at, taken_at = -1, -1  # heights
        while True:
            lease.check()
            if sent_at >= 0 and (fate := self._included(transaction)):
                return self._written(fate, messages, lease, log)
            height, sequence = self._chain.height(), self._chain.account(self._address).sequence
            if sequence > transaction.sequence:
                taken_at = height if taken_at < 0 else taken_at
                fate = self._overtaken(
                    transaction, messages, last=height >= taken_at + TAKEN_BLOCKS
                )
                if fate is not None:
                    return self._written(fate, messages, lease, log)
            elif height > transaction.timeout_height + EXPIRY_BLOCKS:
                # It may not come into a later block; and had it been in one, the sequence would be
                # used.
                fate = self._included(transaction) or TransactionOutcome(
                    transaction, "expired", height
                )
                return self._written(fate, messages, lease, log)
            elif height > sent_at:
                self._send(transaction, ours=ours)
                sent_at = height
            self._wait()

    def _included(self, transaction: SignedTransaction) -> TransactionOutcome | None:
        """Return a transaction's fate where it is in a block and took its sequence."""
        answer = self._chain.transaction(transaction.hash)
        if answer is None:
            return None
        if answer.code == 0:
            return TransactionOutcome(transaction, "included", answer.height, answer)
        # One that was refused in the block before its messages ran has taken neither fee nor
        # sequence, and could come again.
        if answer.code == _WRONG_SEQUENCE and answer.codespace == "sdk":
            return None
        if self._chain.account(self._address).sequence <= transaction.sequence:
            return None
        return TransactionOutcome(transaction, "failed", answer.height, answer)

    def _overtaken(
        self, transaction: SignedTransaction, messages: Sequence[ChainMessage], *, last: bool
    ) -> TransactionOutcome | None:
        """Return the fate of one whose sequence is used: by itself or by another.

        Asked after that was seen, of a node as far.

        The index alone does not tell: a node may write it later, or keep none.

        Args:
            transaction: whose sequence is used.
            messages: in it.
            last: whether the index has had its time.
        """
        if fate := self._included(transaction):
            return fate
        height = self._chain.height()
        # What a purchase really cost only the index tells, so that it is given its time.
        if (last or transaction.purpose != "buy") and self._took_effect(
            transaction, messages, height
        ):
            return TransactionOutcome(transaction, "included", height)
        return TransactionOutcome(transaction, "superseded", height) if last else None

    def _took_effect(
        self, transaction: SignedTransaction, messages: Sequence[ChainMessage], height: int
    ) -> bool:
        """Whether the chain has what the messages ask for.

        No post is signed for a root that it had before.
        """
        posts = [one.value for one in messages if one.type_url == POST_FILE]
        if any(self._ours(_root_of(post)) for post in posts):
            return True
        return any(
            self._bought(transaction, one.value, height)
            for one in messages
            if one.type_url == BUY_STORAGE
        )

    def _bought(self, transaction: SignedTransaction, message: bytes, height: int) -> bool:
        """Whether the wallet's plan is one that this purchase would have made: as large, and ending
        no earlier.
        """
        wanted = decode("BuyStorage", message)
        plan = self._chain.plan(self._address)
        if plan is None or plan.space_bytes != wanted.bytes:
            return False
        blocks = max(0, height - (transaction.timeout_height - self._settings.timeout_blocks))
        signed_at = self._chain.now() - timedelta(seconds=blocks * self._chain.block_seconds())
        return plan.ends_at >= signed_at + timedelta(days=wanted.duration_days) - _CLOCK_SLACK

    def _written(
        self,
        fate: TransactionOutcome,
        messages: Sequence[ChainMessage],
        lease: Lease,
        log: TransactionLog,
    ) -> TransactionOutcome:
        """Write a fate to the log."""
        starts: list[int] = []
        if fate.outcome == "included":
            starts = self._starts(
                fate, [one.value for one in messages if one.type_url == POST_FILE]
            )
        fate = replace(fate, cost=self._cost(fate))
        log.settle(lease, fate.transaction.hash, fate.outcome, starts=starts, cost=fate.cost)
        return fate

    def _cost(self, fate: TransactionOutcome) -> int | None:
        """Return what a transaction came to: a failed one its fee, a purchase what the chain took.

        None where nothing tells.
        """
        fee = transaction_fee(fate.transaction.body)
        if fate.outcome == "failed":
            return fee
        moved = fate.answer.moved if fate.answer else None
        if (
            fate.transaction.purpose == "buy"
            and fate.outcome == "included"
            and moved
            and self._address in moved
        ):
            return fee + max(0, -moved[self._address])
        return None

    def _starts(self, fate: TransactionOutcome, posts: Sequence[bytes]) -> list[int]:
        """Return the start of each post: from the transaction's data, or, without it, from the
        chain's list of files.
        """
        if fate.answer is not None:
            starts = post_starts(fate.answer.data)
            if len(starts) != len(posts):
                raise StoreError(
                    f"transaction {fate.transaction.hash} has {counted(len(posts), 'post')}, and"
                    f" {counted(len(starts), 'start')} came back"
                )
            return starts
        if not posts:
            return []
        listed = [ours[0].start for post in posts if (ours := self._ours(_root_of(post)))]
        # All posts of a transaction are in one block, so that the start of any is that of all.
        return [min(listed)] * len(posts)

    def _send(self, transaction: SignedTransaction, *, ours: bool) -> None:
        """Send, or send again.

        Raises:
            StoreError: a node refused what this call signed.
        """
        try:
            said = self._chain.broadcast(transaction.body)
        except ChainUnreachable:
            # it may have been sent, which the next look tells; if no node answers, that look raises
            return
        if ours and said.code not in _WAITED_OUT:
            raise _failure(said.code, said.codespace, said.log, before_block=True)

    def _for_turn(self) -> AbstractContextManager[object]:
        """Say that another run has the account's sequence."""
        return self._waits.waiting(
            f"another run that sends transactions of {self._address}",
            ends_by="it ends when what that run has sent is in a block or has expired",
            grace=BRIEF_SECONDS,
        )

    def _wait(self) -> None:
        time.sleep(max(LEAST_WAIT_SECONDS, min(MOST_WAIT_SECONDS, self._chain.block_seconds() / 4)))


def _purchase(fate: TransactionOutcome, *, earlier: bool = False) -> Purchase:
    cost = fate.transaction.cost if fate.cost is None else fate.cost
    return Purchase(
        fate.transaction.hash, cost, fate.height, earlier=earlier, cost_told=fate.cost is not None
    )


def _root_of(message: bytes) -> bytes:
    return bytes(decode("PostFile", message).merkle)


def _failure(code: int, codespace: str, log: str, *, before_block: bool = False) -> StoreError:
    """Return the error that a code stands for."""
    told = log[:200]
    if not before_block and code == _KEY_NOT_FOUND:
        return NoStoragePlan(
            f"the chain knows no bought space: {told}", hint="buy some with `caf jackal buy`"
        )
    if not before_block and code == _UNAUTHORIZED and "expired" in log:
        return PlanExpired(
            f"the bought space has ended: {told}", hint="buy again with `caf jackal buy`"
        )
    if not before_block and code == _UNAUTHORIZED:
        return PlanTooSmall(
            f"the bought space is too small: {told}", hint="buy more with `caf jackal buy`"
        )
    if code in (_INSUFFICIENT_FUNDS, _UNKNOWN_ADDRESS):
        return EmptyWallet(f"the wallet cannot pay: {told}", hint="send coins to it")
    hints = {
        _INSUFFICIENT_FEE: "raise jackal.gas_price; this transaction is given up at its timeout "
        "height, and signed again then",
        _OUT_OF_GAS: "raise jackal.gas_price",
        _BAD_JSON: "the note must be JSON",
        _UNAUTHORIZED: "check jackal.chain_id and the wallet",
    }
    return TransactionRefused(
        f"the chain refused a transaction with code {code} of {codespace or 'sdk'}: {told}",
        code=code,
        codespace=codespace,
        hint=hints.get(code, ""),
    )
