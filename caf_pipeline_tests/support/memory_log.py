"""A TransactionLog in memory, as strict as the ledger's. Both pass the contract suite."""

import contextlib
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from caf_pipeline.errors import HeldByOther, LeaseLost, LedgerError
from caf_pipeline.records import Lease, SignedTransaction, WaitingPost

OUTCOMES = {"included", "failed", "expired", "superseded"}
MAY_HOLD = {None, "included"}
"""Outcomes with which a transaction's post is or may be on the chain."""


@dataclass
class _Entry:
    transaction: SignedTransaction
    chunks: tuple[str, ...]
    outcome: str | None = None
    starts: tuple[int, ...] = ()
    cost_told: bool = False


@dataclass
class MemoryLease:
    """The right to sign for an account until it is taken away."""

    name: str
    epoch: int
    lost: bool = False

    def check(self) -> None:
        if self.lost:
            raise LeaseLost(f"the lease on {self.name} is lost: another run took it over")


@dataclass
class MemoryLog:
    """Shared by the runs of one process. Safe for several threads.

    `posting` are the names of chunks in state posting; None means all chunks.
    """

    posting: set[str] | None = None
    entries: list[_Entry] = field(default_factory=list)
    queued: dict[tuple[str, str], WaitingPost] = field(default_factory=dict)
    heights: dict[str, int] = field(default_factory=dict)
    _leases: dict[str, MemoryLease] = field(default_factory=dict)
    _epoch: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @contextlib.contextmanager
    def lease(self, account: str) -> Iterator[Lease]:
        with self._lock:
            if account in self._leases:
                raise HeldByOther(f"account {account} is held by run other", holder="other")
            self._epoch += 1
            lease = self._leases[account] = MemoryLease(f"account/{account}", self._epoch)
        try:
            yield lease
        finally:
            with self._lock:
                if self._leases.get(account) is lease:
                    del self._leases[account]

    def take_over(self, account: str) -> None:
        """Take an account's lease from its holder, as after a long pause."""
        with self._lock:
            self._leases.pop(account).lost = True

    def ask(
        self, account: str, chunk: str, message: bytes, charged_bytes: int, *, epoch: int = 0
    ) -> None:
        with self._lock:
            if not self._held(account, chunk):
                before = self.queued.get((account, chunk))
                if before is None or before.message != message:
                    self.queued[account, chunk] = WaitingPost(chunk, message, charged_bytes)

    def other_accounts(self, chunk: str, account: str) -> Sequence[str]:
        with self._lock:
            for other in [key for key in self.queued if key[0] != account and key[1] == chunk]:
                del self.queued[other]
            posted = {
                entry.transaction.account
                for entry in self.entries
                if chunk in entry.chunks and entry.outcome in MAY_HOLD
            }
            return sorted(posted - {account})

    def waiting(self, account: str) -> Sequence[WaitingPost]:
        with self._lock:
            return [
                post
                for (owner, chunk), post in self.queued.items()
                if owner == account
                and not self._held(account, chunk)
                and (self.posting is None or chunk in self.posting)
            ]

    def pending(self, account: str) -> Sequence[SignedTransaction]:
        with self._lock:
            transactions = [
                entry.transaction for entry in self._of(account) if entry.outcome is None
            ]
        return sorted(transactions, key=lambda one: one.sequence)

    def commit(self, lease: Lease, transaction: SignedTransaction, chunks: Sequence[str]) -> None:
        with self._lock:
            lease.check()
            account = transaction.account
            if any(
                entry.transaction.sequence == transaction.sequence
                and entry.outcome in {None, "included", "failed"}
                for entry in self._of(account)
            ):
                raise LedgerError(
                    f"sequence {transaction.sequence} of account {account} has a transaction "
                    "already"
                )
            if held := [chunk for chunk in chunks if self._held(account, chunk)]:
                raise LedgerError(f"{', '.join(held)} is in a transaction already")
            if unknown := [chunk for chunk in chunks if (account, chunk) not in self.queued]:
                raise LedgerError(f"no message is queued for {', '.join(unknown)}")
            self.entries.append(_Entry(transaction, tuple(chunks)))

    def settle(
        self,
        lease: Lease,
        hash: str,
        outcome: str,
        *,
        starts: Sequence[int] = (),
        cost: int | None = None,
    ) -> None:
        with self._lock:
            lease.check()
            entry = next((entry for entry in self.entries if entry.transaction.hash == hash), None)
            if entry is None or outcome not in OUTCOMES or entry.outcome not in (None, outcome):
                raise LedgerError(f"there is no transaction {hash} that could still be '{outcome}'")
            if outcome == "included" and len(starts) != len(entry.chunks):
                raise LedgerError(f"{len(entry.chunks)} posts have {len(starts)} starts")
            entry.outcome, entry.starts = outcome, tuple(starts)
            if cost is not None:
                entry.transaction, entry.cost_told = replace(entry.transaction, cost=cost), True

    def start_of(self, account: str, chunk: str) -> int | None:
        with self._lock:
            for entry in reversed(self._of(account)):
                if entry.outcome == "included" and chunk in entry.chunks:
                    return entry.starts[entry.chunks.index(chunk)]
        return None

    def explains(self, account: str, archive_id: str | None, sequence: int) -> bool:
        return True  # each test's log is a new ledger, next to other tests' posts

    def unknown_roots(self, roots: Sequence[bytes], *, signed: bool) -> Sequence[bytes]:
        return []

    def lost_posts(self, archive_id: str) -> Sequence[str]:
        return []

    def record_look(self, account: str, archive_id: str, sequence: int, unknown: int) -> None:
        """Do nothing."""

    def has_post(self, archive_id: str) -> bool:
        return True  # as above

    def unknown_archives(self, account: str, archive_id: str) -> Sequence[str]:
        return []

    def record_archives(self, account: str, sequence: int, archive_ids: Collection[str]) -> None:
        """Do nothing."""

    def spent(self, account: str) -> int:
        with self._lock:
            return sum(
                entry.transaction.cost
                for entry in self._of(account)
                if entry.outcome in {None, "included", "failed"}
            )

    def at_list_price(self, account: str) -> int:
        with self._lock:
            bought = [
                entry
                for entry in self._of(account)
                if entry.transaction.purpose == "buy" and entry.outcome in MAY_HOLD
            ]
            return sum(not entry.cost_told for entry in bought)

    def seen_height(self, chain_id: str) -> int:
        with self._lock:
            return self.heights.get(chain_id, 0)

    def see_height(self, chain_id: str, height: int) -> None:
        with self._lock:
            self.heights[chain_id] = max(height, self.heights.get(chain_id, 0))

    def _of(self, account: str) -> list[_Entry]:
        return [entry for entry in self.entries if entry.transaction.account == account]

    def _held(self, account: str, chunk: str) -> bool:
        return any(
            chunk in entry.chunks and entry.outcome in MAY_HOLD for entry in self._of(account)
        )
