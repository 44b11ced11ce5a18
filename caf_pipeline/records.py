"""Records and protocols of store and ledger: chunks, posts, transactions, leases.

Ends are exclusive; times are aware and in UTC.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

from caf_pipeline.chunk_state import ChunkState, CopyState
from caf_pipeline.errors import StoredChunkMissing


@dataclass(frozen=True, slots=True)
class Sample:
    """A piece of the stored bytes, hashed at sealing, which read-backs must match."""

    offset: int
    length: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class PostRecord:
    """A chunk's place in a store. `start` is the block height of the post."""

    merkle_root: bytes
    owner: str
    start: int
    stored_size_bytes: int


@dataclass(frozen=True, slots=True)
class PostedFile:
    """A listed file. Any wallet may post any file; only owner and MAC cannot be forged.

    For `header_sha256` and `mac` see `ChunkToStore`.
    """

    posting: PostRecord
    proof_type: int
    header_sha256: bytes | None = None
    mac: bytes | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """One provider's copy, as the chain lists it.

    Attributes:
        provider: its address, or the folder of a `DirectoryStore`.
        last_proven: block height of the last proof, or of the provider's joining.
        verified: `last_proven` is certainly a verified proof. False leaves it open.
    """

    provider: str
    proof: str
    last_proven: int | None = None
    verified: bool = False


@dataclass(frozen=True, slots=True)
class SignedTransaction:
    """A signed transaction. A retry sends the same bytes again.

    Attributes:
        hash: upper-case hex SHA-256 of `body`.
        account: "<chain id>/<address>".
        timeout_height: the last block that may include the transaction.
        purpose: "post" or "buy".
        cost: the most that it may spend in ujkl, fee included.
    """

    hash: str
    body: bytes
    account: str
    sequence: int
    timeout_height: int
    purpose: str = "post"
    cost: int = 0


@dataclass(frozen=True, slots=True)
class WaitingPost:
    """A queued message that posts a chunk. `charged_bytes` counts every copy."""

    chunk: str
    message: bytes
    charged_bytes: int


@dataclass(frozen=True, slots=True)
class ProviderRecord:
    """Consecutive failures, and rates in bytes a second, None before the first measurement."""

    provider: str
    upload_rate: float | None
    download_rate: float | None
    failures: int
    failed_at: datetime | None


LEASE_SECONDS: Final = 30.0
"""Longer than a failover of the database. A run waits as long after a crash elsewhere."""


class Lease(Protocol):
    """The right to change one thing, renewed in the background. `epoch` grows with each holder."""

    name: str
    epoch: int

    def check(self) -> None:
        """Raise LeaseLost if another process took the lease, or a renewal was late."""


class ChainHeights(Protocol):
    """The greatest height that any process has seen of each chain."""

    def seen_height(self, chain_id: str) -> int: ...

    def see_height(self, chain_id: str, height: int) -> None:
        """Store the height if it is greater than the stored one."""


class TransactionLog(ChainHeights, Protocol):
    """The transactions of accounts. `ledger.transactions` documents the methods."""

    def lease(self, account: str) -> AbstractContextManager[Lease]: ...

    def ask(
        self, account: str, chunk: str, message: bytes, charged_bytes: int, *, epoch: int = 0
    ) -> None: ...

    def other_accounts(self, chunk: str, account: str) -> Sequence[str]: ...

    def waiting(self, account: str) -> Sequence[WaitingPost]: ...

    def pending(self, account: str) -> Sequence[SignedTransaction]: ...

    def commit(
        self, lease: Lease, transaction: SignedTransaction, chunks: Sequence[str]
    ) -> None: ...

    def settle(
        self,
        lease: Lease,
        hash: str,
        outcome: str,
        *,
        starts: Sequence[int] = (),
        cost: int | None = None,
    ) -> None: ...

    def start_of(self, account: str, chunk: str) -> int | None: ...

    def spent(self, account: str) -> int: ...

    def at_list_price(self, account: str) -> int: ...

    def explains(self, account: str, archive_id: str | None, sequence: int) -> bool: ...

    def unknown_roots(self, roots: Sequence[bytes], *, signed: bool) -> Sequence[bytes]: ...

    def lost_posts(self, archive_id: str) -> Sequence[str]: ...

    def record_look(self, account: str, archive_id: str, sequence: int, unknown: int) -> None: ...

    def has_post(self, archive_id: str) -> bool: ...

    def unknown_archives(self, account: str, archive_id: str) -> Sequence[str]: ...

    def record_archives(
        self, account: str, sequence: int, archive_ids: Collection[str]
    ) -> None: ...


class ProviderRecords(Protocol):
    """Rates and failures of providers, kept between runs."""

    def all(self) -> Mapping[str, ProviderRecord]: ...

    def uploaded(self, provider: str, size_bytes: int, seconds: float) -> None: ...

    def downloaded(self, provider: str, size_bytes: int, seconds: float) -> None: ...

    def failed(self, provider: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk's row. Fields of later steps are None, counts and sizes 0.

    Attributes:
        read_back_at: when all stored bytes last came back, from a copy that has been right since.
        opened_with: recipient of the identity that opened all these bytes.
        read_tail_sha256: of manifest, index and footer among these bytes.
        agreed_sha256: of the chunk's rows, sizes and header when this manifest agreed with them.
        unanswered_at: when a copy did not answer a check; None once all answered.
        failures: ids of runs in a step, killed or failed since the chunk was planned or unparked.
        tail_start: None if the chunk was rebuilt.
        part: number of the object part that is the only member, from 1; 0: whole objects.
        part_abandoned: the object is never complete.
        adopted: another program wrote the file, without head and manifest.
        unread: stored bytes that a rebuild read, until all bytes are compared with the root.
        from_unknown_post: it was restored, and nothing shows that this ledger posted it.
    """

    caf_file_id: int
    name: str
    source: str
    archive_id: str
    plan: str
    plan_folder: str
    number: int
    state: ChunkState
    epoch: int
    attempts: int
    failures: Sequence[str]
    object_count: int
    object_bytes: int
    expected_size_bytes: int
    caf_size_bytes: int
    stored_size_bytes: int
    member_count: int
    member_bytes: int
    skipped_count: int
    released_count: int
    merkle_root: bytes | None
    proof_type: int | None
    owner: str | None
    start: int | None
    samples: Sequence[Sample]
    reason: str
    updated_at: datetime
    located_at: datetime | None = None
    checked_at: datetime | None = None
    read_back_at: datetime | None = None
    tail_start: int | None = None
    tail_sha256: bytes | None = None
    part: int = 0
    part_count: int = 0
    part_abandoned: bool = False
    adopted: bool = False
    unanswered_at: datetime | None = None
    copy_state: CopyState | None = None
    encrypted: bool = False
    opened_with: str | None = None
    read_tail_sha256: bytes | None = None
    agreed_sha256: bytes | None = None
    unread: Sequence[Sample] = ()
    from_unknown_post: bool = False

    @property
    def was_packed_here(self) -> bool:
        """True unless it was adopted or restored from the store."""
        return self.tail_start is not None

    @property
    def was_read_back(self) -> bool:
        """True if all bytes came back, and were opened if the chunk is encrypted."""
        return self.read_back_at is not None and (not self.encrypted or bool(self.opened_with))

    @property
    def was_given_up(self) -> bool:
        """True if the chunk ended without a post, which would leave a retired copy."""
        ended = self.state in (ChunkState.WITHDRAWN, ChunkState.EMPTY)
        return ended and self.copy_state is None

    @property
    def was_sealed(self) -> bool:
        """An empty or withdrawn chunk keeps its seal's counts."""
        return self.merkle_root is not None or self.tail_sha256 is not None


def posting_of(chunk: Chunk) -> PostRecord:
    """Return a posted chunk's place in the store, or raise StoredChunkMissing."""
    if chunk.merkle_root is None or chunk.owner is None or chunk.start is None:
        raise StoredChunkMissing(f"chunk {chunk.name} is '{chunk.state}' and was not posted")
    return PostRecord(chunk.merkle_root, chunk.owner, chunk.start, chunk.stored_size_bytes)


@dataclass(frozen=True, slots=True)
class StoragePlanRow:
    """The last reading of an account's space and coins (ujkl). None: no plan.

    `latest_end` is the latest since our last purchase; a `purchase_pending` may set an earlier one.
    """

    account: str
    read_at: datetime
    balance: int
    space_bytes: int | None
    used_bytes: int | None
    starts_at: datetime | None
    ends_at: datetime | None
    latest_end: datetime | None
    latest_end_space: int | None
    purchase_pending: bool
