"""The chain: a mempool, and a block at regular intervals.

A transaction is checked on arrival, waits, and is executed in the next block. After each block, the
mempool drops transactions that have become impossible (sequence used, timeout height passed), as
Tendermint's recheck does. A transaction that is included too late fails with its code at no cost.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from caf_pipeline_tests.loopback import proving
from caf_pipeline_tests.loopback.chain_state import (
    WORLD_KINDS,
    Account,
    Changes,
    Database,
    Draft,
    Holding,
    Pending,
    Plan,
    PostedFile,
    Proof,
    World,
    utc_now,
)
from caf_pipeline_tests.loopback.misbehaviour import Orders
from caf_pipeline_tests.loopback.options import Options
from caf_pipeline_tests.loopback.transactions import (
    Refused,
    SignedTransaction,
    check,
    deliver,
    parse,
    transaction_hash,
)

KEPT_WORLDS: Final = 500  # the most blocks that a node can lag
CACHED_HASHES: Final = 10_000  # Tendermint's mempool.cache_size


class Chain:
    """The chain and its state. Readers use `world`; writers hold the lock.

    Attributes:
        world: the state after the newest block.
    """

    def __init__(
        self,
        options: Options,
        database: Database,
        orders: Orders,
        can_prove: Callable[[Holding, int], bool],
    ) -> None:
        self.options = options
        self.database = database
        self.orders = orders
        self._can_prove = can_prove
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pending: dict[str, Pending] = {}
        # In memory only: a restarted node has an empty cache.
        self._cache: OrderedDict[str, None] = OrderedDict()
        self._foreign: list[str] = []
        self._order = 0
        self.holdings: dict[str, Holding] = database.load("holding", Holding)
        self._unlisted: dict[str, Holding] = {}
        self.world = self._load()
        self._worlds: deque[World] = deque([self.world], maxlen=KEPT_WORLDS)
        self.purge: Callable[[Holding], None] = lambda holding: None
        """Called when a provider notices that its file is gone from the chain."""

    # --- memory ---

    def _load(self) -> World:
        height = self.database.last_block()
        if height == 0:
            self._begin()
            height = 1
        time = self.database.block_time(height)
        assert time is not None
        world = World(
            height,
            time,
            {kind: self.database.load(kind, type_) for kind, type_ in WORLD_KINDS.items()},
        )
        self._unlisted = {
            key: holding
            for key, holding in self.holdings.items()
            if holding.file in world.files
            and holding.provider not in world.files[holding.file].provers
        }
        self._load_mempool()
        return world

    def _load_mempool(self) -> None:
        pending = self.database.load("pending", Pending)
        if self.orders.chain().forget_mempool:
            self.database.save({("pending", hash_): None for hash_ in pending})
            return
        self._pending = dict(sorted(pending.items(), key=lambda item: item[1].order))
        self._order = max((transaction.order for transaction in pending.values()), default=0)
        for hash_ in self._pending:
            self._cache[hash_] = None

    def _begin(self) -> None:
        """Write the first block: the accounts and plans of the options."""
        now = self.now()
        options = self.options
        changes: Changes = {}
        for number, address in enumerate(dict.fromkeys([*options.fund, *options.space])):
            changes["account", address] = Account(
                address, number, balance=options.fund.get(address, 0)
            )
        for address, size_bytes in options.space.items():
            end = now + timedelta(days=options.space_days)
            changes["plan", address] = Plan(address, size_bytes, 0, now, end)
        self.database.save(changes, block=(1, now))

    def now(self) -> datetime:
        """Return the time of the chain's clock."""
        return utc_now() + timedelta(days=self.options.clock_days)

    def start(self) -> None:
        """Start making blocks."""
        self._thread = threading.Thread(target=self._run, name="blocks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop making blocks. Returns when the last one is complete."""
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self.options.block_seconds):
            if not self.orders.chain().halted:
                self.make_block()

    def world_behind(self, blocks: int) -> World:
        """Return the state of so many blocks ago, or the oldest kept one."""
        worlds = self._worlds
        return worlds[max(0, len(worlds) - 1 - blocks)] if blocks > 0 else self.world

    @property
    def pending(self) -> Mapping[str, Pending]:
        """Waiting transactions, in order."""
        with self._lock:
            return dict(self._pending)

    # --- the mempool ---

    def broadcast(self, raw: bytes, node_world: World) -> str:
        """Accept a transaction at a node with the state `node_world`. Returns its hash.

        Raises:
            Refused.
        """
        with self._lock:
            conduct = self.orders.chain()
            hash_ = transaction_hash(raw)
            if hash_ in self._cache:
                raise Refused(19, "")  # a real node's answer has no text
            if conduct.mempool_full:
                raise Refused(20, "")
            transaction = parse(raw)
            self._check(transaction, node_world)
            if conduct.swallow_broadcast:
                return hash_
            self._order += 1
            due = self.world.height + 1 + conduct.delay_inclusion
            pending = Pending(hash_, raw, transaction.signer, self._order, due)
            self.database.save({("pending", hash_): pending})
            self._pending[hash_] = pending
            self._remember(hash_)
            return hash_

    def _check(self, transaction: SignedTransaction, node_world: World) -> None:
        """Check after the signer's waiting transactions."""
        draft = Draft(node_world)
        for pending in self._pending.values():
            if transaction.messages and pending.address == transaction.signer:
                self._still_good(pending, draft, node_world.height)
        check(transaction, draft, self.options, height=node_world.height, minimum_fee=True)

    def _still_good(self, pending: Pending, draft: Draft, height: int) -> bool:
        nested = Draft(draft)
        try:
            check(parse(pending.body), nested, self.options, height=height, minimum_fee=True)
        except Refused:
            return False
        nested.merge()
        return True

    def _remember(self, hash_: str) -> None:
        self._cache[hash_] = None
        self._cache.move_to_end(hash_)
        while len(self._cache) > CACHED_HASHES:
            self._cache.popitem(last=False)

    # --- blocks ---

    def make_block(self) -> World:
        """Make one block and return its state."""
        with self._lock:
            height = self.world.height + 1
            time = max(self.now(), self.world.time + timedelta(milliseconds=1))
            draft = Draft(self.world)
            spent = self._spend_foreign(draft)
            done = self._include(draft, height, time, spent)
            gone = self._prove(draft, height)
            world = self.world.after(draft.changes, height=height, time=time)
            remaining = {
                hash_: pending for hash_, pending in self._pending.items() if hash_ not in done
            }
            evicted = self._recheck(remaining, world)
            changes = draft.changes | {("pending", hash_): None for hash_ in [*done, *evicted]}
            changes |= {("holding", key): None for key in gone}
            self.database.save(changes, block=(height, time))
            self._let_go(gone)
            self._pending = {
                hash_: pending for hash_, pending in remaining.items() if hash_ not in evicted
            }
            self._worlds.append(world)
            self.world = world
            return world

    def _include(
        self, draft: Draft, height: int, time: datetime, spent: Collection[str]
    ) -> list[str]:
        """Do what is due.

        What lost its sequence to another program is not: no proposer would have both.
        """
        done = []
        for pending in self._pending.values():
            if pending.due_height > height or pending.address in spent:
                continue
            included = deliver(parse(pending.body), draft, self.options, height=height, time=time)
            draft.put("transaction", included.hash, included)
            done.append(included.hash)
            if included.code:
                self._cache.pop(included.hash, None)
        return done

    def _recheck(self, left: Mapping[str, Pending], world: World) -> list[str]:
        """Return waiting transactions that have become impossible."""
        draft = Draft(world)
        evicted = [
            pending.hash
            for pending in left.values()
            if not self._still_good(pending, draft, world.height)
        ]
        for hash_ in evicted:
            self._cache.pop(hash_, None)
        return evicted

    def _prove(self, draft: Draft, height: int) -> list[str]:
        """Let providers prove. Returns the keys of holdings without a file.

        Dropped providers wait to join again.
        """
        settled = proving.list_new(
            draft, list(self._unlisted.values()), self._can_prove, self.options, height=height
        )
        for holding in settled:
            del self._unlisted[holding.key]
        deleted = [
            key for key, holding in self.holdings.items() if draft.get("file", holding.file) is None
        ]
        dropped = proving.renew(
            draft, self.world, self.holdings, self._can_prove, self.options, height=height
        )
        self._unlisted |= {key: self.holdings[key] for key in dropped if key in self.holdings}
        return deleted

    def _let_go(self, gone: Iterable[str]) -> None:
        """Forget holdings and purge their bytes, even if another file has the same root."""
        for key in gone:
            holding = self.holdings.pop(key, None)
            self._unlisted.pop(key, None)
            if holding:
                self.purge(holding)

    def _spend_foreign(self, draft: Draft) -> set[str]:
        """Use up sequences for another program. Returns its addresses."""
        spent = set(self._foreign)
        for address in self._foreign:
            account: Account = draft.get("account", address)
            draft.put("account", address, replace(account, sequence=account.sequence + 1))
        self._foreign.clear()
        return spent

    # --- providers and tests ---

    def hold(self, provider: str, file: PostedFile, *, delay: int = 0) -> None:
        """Record that a provider took a file.

        It proves the file `delay` blocks later than it could.
        """
        with self._lock:
            holding = Holding(provider, file.key, file.merkle.hex(), self.world.height + 1 + delay)
            self.database.save({("holding", holding.key): holding})
            self.holdings[holding.key] = holding
            self._unlisted[holding.key] = holding

    def spend_sequence(self, address: str) -> None:
        """Use up a sequence of this address in the next block, as another program would."""
        with self._lock:
            if address not in self.world.accounts:
                raise ValueError(f"there is no account {address}")
            self._foreign.append(address)

    def change(self, kind: str, key: str, value: Any) -> None:
        """Write a record directly, in a separate block."""
        self._change({(kind, key): value})

    def fund(self, address: str, amount: int) -> None:
        """Pay an address."""
        with self._lock:
            account = self.world.accounts.get(address) or Account(address, len(self.world.accounts))
            self.change("account", address, replace(account, balance=account.balance + amount))

    def drop_proofs(self, file: PostedFile, provider: str | None) -> None:
        """Remove one or all providers from a file for good. Their bytes stay."""
        with self._lock:
            draft = Draft(self.world)
            for prover in file.provers:
                if provider in (None, prover):
                    proof: Proof = draft.get("proof", f"{prover}/{file.key}")
                    proving.drop(draft, proof)
                    self.holdings.pop(proof.key, None)
                    draft.put("holding", proof.key, None)
            self._change(draft.changes)

    def _change(self, changes: Changes) -> None:
        with self._lock:
            height = self.world.height + 1
            time = max(self.now(), self.world.time + timedelta(milliseconds=1))
            self.database.save(changes, block=(height, time))
            visible = {name: value for name, value in changes.items() if name[0] in WORLD_KINDS}
            self.world = self.world.after(visible, height=height, time=time)
            self._worlds.append(self.world)
