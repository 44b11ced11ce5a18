"""The protocols of a chunk store, and the records that they exchange.

Retrieval needs a `ChunkReader`. Archiving needs a `ChunkStore`, which is also a reader. A store
knows no database: it keeps its signed transactions in a `TransactionLog`, and the measured rates of
providers in `ProviderRecords`. The ledger implements both. Ends are exclusive; times are aware and
in UTC. Every implementation passes the contract suite in
`caf_pipeline_tests/contracts/chunk_store.py`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from caf_pipeline.errors import StoredAlready
from caf_pipeline.system.quantities import counted


@dataclass(frozen=True, slots=True)
class Sample:
    """A piece of the stored bytes, hashed when the chunk was sealed.

    Read-backs are compared with it.
    """

    offset: int
    length: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class ChunkToStore:
    """A sealed chunk as a store sees it: the size and the Merkle root of its stored bytes."""

    name: str
    archive_id: str
    public: bool
    stored_size_bytes: int
    proof_type: int
    merkle_root: bytes


@dataclass(frozen=True, slots=True)
class PostRecord:
    """The place of a chunk in a store: (merkle root, owner, start) on Jackal.

    `start` is the block height of the post.
    """

    merkle_root: bytes
    owner: str
    start: int
    stored_size_bytes: int


@dataclass(frozen=True, slots=True)
class PostedFile:
    """A file that a store lists under an archive's id.

    Any wallet may post any file under any id. Only the owner cannot be forged.
    """

    posting: PostRecord
    proof_type: int


@dataclass(frozen=True, slots=True)
class Copy:
    """One provider's copy, as the chain lists it.

    Attributes:
        provider: its address on the chain, or the folder of a `DirectoryStore`.
        proof: the chain's entry.
        last_proven: block height of the last proof, or of the provider's joining. None if unknown.
        verified: True if `last_proven` is certainly a verified proof. False leaves it open.
    """

    provider: str
    proof: str
    last_proven: int | None = None
    verified: bool = False


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file in a store's list, with the providers that claim a copy.

    `window_blocks` is the length of its proof windows, counted from its start.
    """

    merkle_root: bytes
    owner: str
    start: int
    providers: Sequence[str]
    window_blocks: int


@dataclass(frozen=True, slots=True)
class ListedProof:
    """A proof in a provider's list. `last_proven` means the same as in `Copy`."""

    merkle_root: bytes
    owner: str
    start: int
    last_proven: int


@dataclass(frozen=True, slots=True)
class SignedTransaction:
    """A signed transaction. A retry sends the same bytes again.

    Attributes:
        hash: upper-case hex SHA-256 of `body`.
        account: "<chain id>/<address>".
        sequence: of the account. One included transaction uses it up.
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
    """A chunk's message that waits for the next transaction of its account.

    `charged_bytes` counts every copy.
    """

    chunk: str
    message: bytes
    charged_bytes: int


@dataclass(frozen=True, slots=True)
class ProviderRecord:
    """Measured rates of a provider in bytes a second, and its consecutive failures.

    A rate is None before the first measurement. `failed_at` is the time of the last failure.
    """

    provider: str
    upload_rate: float | None
    download_rate: float | None
    failures: int
    failed_at: datetime | None


@dataclass(frozen=True, slots=True)
class StorageCost:
    """The cost of space for some chunks and days.

    `charged_bytes` counts every copy. `fees_ujkl` is the most that the posts may cost in fees. If
    the chunks take less than `least_bytes`, the smallest amount on sale, the price is for
    `least_bytes`.
    """

    copies: int
    charged_bytes: int
    days: int
    price_ujkl: int
    fees_ujkl: int
    least_bytes: int = 0

    @property
    def priced_as(self) -> str:
        """The space that the price is for if it exceeds what the chunks take; otherwise ""."""
        return (
            f"{self.least_bytes:,} bytes, the least that is sold"
            if 0 < self.charged_bytes < self.least_bytes
            else ""
        )


@dataclass(frozen=True, slots=True)
class ArchiveFiles:
    """The number of files of one archive, and about when the first and the last were posted."""

    count: int
    first_at: datetime
    last_at: datetime


def refuse_unknown_posts(roots: Sequence[bytes]) -> None:
    """Raise StoredAlready if the ledger does not know some posts of the store.

    Their objects would be stored and paid for twice.
    """
    if roots:
        raise StoredAlready(
            f"the store has {counted(len(roots), 'post')} of this source that the ledger does not "
            "know, probably because an older backup of the ledger was restored. Nothing is "
            "planned, packed or posted, because objects could be stored and paid for twice",
            hint="run 'caf doctor' to add the posts to the ledger, or 'caf run NAME --new-archive' "
            "to archive the objects again",
        )


class Lease(Protocol):
    """The right to change one thing. It is renewed in the background until it is released.

    `epoch` grows with each new holder.
    """

    name: str
    epoch: int

    def check(self) -> None:
        """Raise LeaseLost if another process took the lease, or a renewal was late."""


class ChainHeights(Protocol):
    """The greatest height that any process has seen of each chain."""

    def seen_height(self, chain_id: str) -> int:
        """Return the greatest height seen of a chain, 0 if there is none."""

    def see_height(self, chain_id: str, height: int) -> None:
        """Store the height if it is greater than the stored one."""


class TransactionLog(ChainHeights, Protocol):
    """The transactions of accounts. `ledger.transactions` documents the contract of each method."""

    def lease(self, account: str) -> AbstractContextManager[Lease]:
        """Hold the right to sign for the account while the context lasts.

        One run holds it at a time.
        """

    def ask(self, account: str, chunk: str, message: bytes, charged_bytes: int) -> None:
        """Queue the chunk's message for the account's next transaction.

        It replaces an earlier message of the chunk.
        """

    def other_accounts(self, chunk: str, account: str) -> Sequence[str]:
        """Cancel the chunk's messages in other accounts.

        Return the accounts with a live post of it.
        """

    def waiting(self, account: str) -> Sequence[WaitingPost]:
        """Return the queued messages, oldest first."""

    def pending(self, account: str) -> Sequence[SignedTransaction]:
        """Return the transactions without a known outcome, by sequence."""

    def commit(self, lease: Lease, transaction: SignedTransaction, chunks: Sequence[str]) -> None:
        """Store a transaction and the chunks that it posts, in the order of its messages.

        It is durable when this method returns.
        """

    def settle(
        self,
        lease: Lease,
        hash: str,
        outcome: str,
        *,
        starts: Sequence[int] = (),
        cost: int | None = None,
    ) -> None:
        """Close a transaction. Closing it again with the same outcome changes nothing."""

    def start_of(self, account: str, chunk: str) -> int | None:
        """Return the start of the chunk's latest included post, or None."""

    def spent(self, account: str) -> int:
        """Return the cost in ujkl of the transactions that were, or may be, included or failed."""

    def at_list_price(self, account: str) -> int:
        """Return how many included or pending purchases are counted at their list price."""

    def explains(self, account: str, archive_id: str, sequence: int) -> bool:
        """Return whether this log has all transactions that led to the account's sequence.

        Only transactions since the last check of the archive count.
        """

    def unknown_roots(self, roots: Sequence[bytes], *, signed: bool) -> Sequence[bytes]:
        """Return the roots among these that the ledger neither posted nor set aside."""

    def record_look(self, account: str, archive_id: str, sequence: int, unknown: int) -> None:
        """Record a check of an archive's posts.

        `sequence` is the account's sequence before the check. `unknown` is the number of unknown
        posts.
        """


class ProviderRecords(Protocol):
    """Measured rates and failures of providers, kept between runs."""

    def all(self) -> Mapping[str, ProviderRecord]:
        """Return the records by provider."""

    def uploaded(self, provider: str, size_bytes: int, seconds: float) -> None:
        """Record a finished upload."""

    def downloaded(self, provider: str, size_bytes: int, seconds: float) -> None:
        """Record a finished download."""

    def failed(self, provider: str) -> None:
        """Record a failure."""


class ChunkReader(Protocol):
    """Reads stored chunks. Ends are exclusive.

    Attributes:
        name: the kind of store.
        required_copies: how many copies each chunk needs.
    """

    name: str
    required_copies: int

    def close(self) -> None:
        """Close the connections."""
        return

    def copies(self, posting: PostRecord) -> Sequence[Copy]:
        """Return the copies that the store lists now, none for an unknown chunk."""

    def holders(self, posting: PostRecord) -> Sequence[str]:
        """Return the providers that hold the chunk, the best to read from first."""

    def urls(self, posting: PostRecord) -> Mapping[str, str]:
        """Return a URL for each holder, in the order of `holders`.

        Any program can read ranges of the stored bytes there. Holders without a URL are left out.
        """
        return {}

    def read(
        self, posting: PostRecord, start_byte: int, end_byte: int, *, provider: str | None = None
    ) -> Iterator[bytes]:
        """Yield `[start_byte, end_byte)` of the stored bytes in pieces of at most 1 MiB.

        If a holder breaks off, the next one continues. `provider` restricts the read to one
        provider.

        Raises:
            StoredChunkMissing: no provider has the chunk.
            StoreUnreachable: no provider answers.
            IntegrityError: there are fewer bytes than requested.
        """

    def has_lost(
        self, posting: PostRecord, start_byte: int, end_byte: int, *, provider: str
    ) -> bool:
        """Return whether a provider that failed to return a range fails again, but is online.

        False if the provider returns the range this time, answers with an error, or does not
        answer.
        """
        return False


class ChunkStore(ChunkReader, Protocol):
    """Keeps chunks by their Merkle root. Every call is idempotent.

    Every method may raise StoreUnreachable or StoreError. A method that needs the owner raises
    MnemonicRefused if there is no wallet.
    """

    proof_type: int

    def admit(self, *, public: bool, stored_size_bytes: int, waiting_bytes: int) -> None:
        """Raise the reason why a chunk of this size cannot be posted.

        Called before the chunk is packed, and again before it is posted. `waiting_bytes` are the
        stored bytes of the other chunks that are being packed.

        Raises:
            NotPublic, NoStoragePlan, PlanExpired, PlanTooSmall, ChunkTooLarge, EmptyWallet,
            UploadsRefused.
            NoProvider: no provider would take the chunk now, so it must not be paid for.
            SettingsError: the store would not prove the chunk.
        """

    def require_here(self) -> None:
        """Raise StoreAway if the folder with the ledger's chunks is away.

        Network stores always pass.
        """
        return

    def largest_chunk_bytes(self) -> int | None:
        """Return the largest size that enough providers accept within their time limit.

        None if no rates were measured.
        """
        return None

    def cost(self, stored_size_bytes: int, chunks: int, days: int = 0) -> StorageCost | None:
        """Return the current cost of so many bytes in so many chunks. None if storing is free.

        `days` = 0 means the shortest purchase.
        """
        return None

    def staging_hold_seconds(self) -> float:
        """Return how long a located chunk should stay in staging if there is space."""
        return 0.0

    def bind(self) -> None:
        """Record this store in the ledger before it holds a chunk. A chain's owner needs no record.

        Raises:
            StoreAway: the ledger's chunks are in another store.
        """
        return

    def post(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord:
        """Announce the chunk.

        If the store already has our post of this root, reuse it at no cost.

        Raises:
            SpendCapReached, TransactionRefused, and what `admit` raises.
        """

    def posted_already(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord | None:
        """Return the chunk's post. None if it was never posted and no post is pending."""

    def unknown_posts(self, archive_id: str, log: TransactionLog) -> Sequence[bytes]:
        """Return the roots of the owner's posts of an archive that the ledger does not know.

        They appear after an older backup of the ledger was restored.
        """
        return []

    def put(
        self,
        posting: PostRecord,
        staged: Path,
        progress: Callable[[int], None],
        *,
        wrong: Collection[str] = (),
    ) -> None:
        """Upload the staged file until the required providers are listed and return correct pieces.

        `progress` receives the number of bytes sent since its last call, and may raise to end the
        upload. The providers in `wrong` returned other bytes, or lost some. They get the whole file
        even if the pieces that are read back are correct.

        Raises:
            NoProvider, NotProven, RootRefused, ChunkTooLarge.
        """

    def owner(self) -> str:
        """Return the owner of the posts that this store makes."""

    def posted(self, archive_id: str) -> Iterator[PostedFile]:
        """Yield the files listed under an archive's id, of any owner and content, in any order."""

    def posted_as(self, merkle_root: bytes) -> Sequence[PostedFile]:
        """Return the files with this Merkle root, of any owner and program."""

    def posted_by(self, owner: str) -> Iterator[PostedFile]:
        """Yield the owner's files, posted by any program. Reads the store's whole list."""

    def archives(self) -> "Mapping[str | None, ArchiveFiles]":
        """Return what this store's owner posted, by the archive id in the note.

        The key None stands for notes that cannot be read. Files of other programs are left out.
        Reads the store's whole list.
        """

    def proof_window(self, posting: PostRecord, copy: Copy) -> int | None:
        """Return the proof window of the copy's `last_proven`, counted from 0 at the post.

        None if the store has no proof windows.
        """
        return None

    def current_window(self, posting: PostRecord) -> int | None:
        """Return the number of the chunk's current proof window.

        None if the store has no windows.
        """
        return None

    def window_ends_in(self, posting: PostRecord) -> float | None:
        """Return about how many seconds the chunk's current proof window lasts.

        None if there is none.
        """
        return None

    def listed_at(self) -> int | None:
        """Return a block height that is not newer than lists read from now on.

        None without lists.
        """
        return None

    def file_pages(self, archive_id: str | None) -> Iterator[Sequence[ListedFile]]:
        """Yield pages of the files listed under an archive's id, or of all files if it is None.

        Other files may be among them. After StoreUnreachable the list is incomplete.
        """
        return iter(())

    def proof_pages(self, provider: str) -> Iterator[Sequence[ListedProof]]:
        """Yield pages of a provider's proofs, of files of any owner. See `file_pages`."""
        return iter(())
