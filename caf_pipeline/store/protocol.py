"""What a store of chunks is: it takes a chunk, says what that costs, proves that it has it, and
gives ranges of it back.

Retrieval needs a `ChunkReader`, archiving a `ChunkStore`, which is also a reader. The ledger gives
a store what it must not forget: what it signed (`TransactionLog`), and how fast each provider is
(`ProviderRecords`); it knows no database. Ends are exclusive, times are aware and in UTC. Every
implementation passes the contract suite `caf_pipeline_tests/contracts/chunk_store.py`.
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
    """A piece of the stored bytes, taken when the chunk was sealed, that a read-back is compared
    with.
    """

    offset: int
    length: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class ChunkToStore:
    """A sealed chunk as a store sees it: its stored bytes and what proves them."""

    name: str
    archive_id: str
    public: bool
    stored_size_bytes: int
    proof_type: int
    merkle_root: bytes


@dataclass(frozen=True, slots=True)
class PostRecord:
    """Where a store keeps a chunk: (merkle root, owner, start) on Jackal.

    `start` is the block height of the post.
    """

    merkle_root: bytes
    owner: str
    start: int
    stored_size_bytes: int


@dataclass(frozen=True, slots=True)
class PostedFile:
    """What a store lists under an archive's id.

    Anybody may post anything under it: only its owner cannot be made up.
    """

    posting: PostRecord
    proof_type: int


@dataclass(frozen=True, slots=True)
class Copy:
    """One provider's copy, listed by the chain with its proof.

    Attributes: provider: its address on the chain, or whatever names it in another store. proof:
        what the chain lists. last_proven: block height of the last proof, or of the provider's
        joining; None where the chain does not tell. verified: whether that was a verified proof for
        certain; False says nothing: it may have been one, too.
    """

    provider: str
    proof: str
    last_proven: int | None = None
    verified: bool = False


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file in a store's list: whoever claims a copy of it, and of how many blocks its proof
    windows are, from its start on.
    """

    merkle_root: bytes
    owner: str
    start: int
    providers: Sequence[str]
    window_blocks: int


@dataclass(frozen=True, slots=True)
class ListedProof:
    """A proof in a provider's list: `last_proven` as in `Copy`."""

    merkle_root: bytes
    owner: str
    start: int
    last_proven: int


@dataclass(frozen=True, slots=True)
class SignedTransaction:
    """A transaction as it was signed: what a retry sends again, byte for byte.

    `hash` is known before it is sent.

    Attributes:
        hash: upper-case hex SHA-256 of `body`.
        body: the bytes that are sent.
        account: "<chain id>/<address>".
        sequence: the account's, which one included transaction uses up.
        timeout_height: the last block that may include it.
        purpose: "post" or "buy".
        cost: what it may spend at most, fee included, in ujkl.
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
    """A chunk's message that waits for a transaction of its account; `charged_bytes` counts every
    copy.
    """

    chunk: str
    message: bytes
    charged_bytes: int


@dataclass(frozen=True, slots=True)
class ProviderRecord:
    """What was measured of a provider: bytes a second or None, and failures in a row with the time
    of the last one.
    """

    provider: str
    upload_rate: float | None
    download_rate: float | None
    failures: int
    failed_at: datetime | None


@dataclass(frozen=True, slots=True)
class StorageCost:
    """What space for chunks costs for some days: its bytes, every copy counted, its price, and at
    most the fees of the posts.

    The price is of `least_bytes`, where so much is the least that is sold and the chunks take less.
    """

    copies: int
    charged_bytes: int
    days: int
    price_ujkl: int
    fees_ujkl: int
    least_bytes: int = 0

    @property
    def priced_as(self) -> str:
        """Say of which space the price is, where it is more than the chunks take; "" where it is
        not.
        """
        return (
            f"{self.least_bytes:,} bytes, the least that is sold"
            if 0 < self.charged_bytes < self.least_bytes
            else ""
        )


@dataclass(frozen=True, slots=True)
class ArchiveFiles:
    """The files of one archive in a store: how many there are, and about when the first and the
    last were posted.
    """

    count: int
    first_at: datetime
    last_at: datetime


def refuse_unknown_posts(roots: Sequence[bytes]) -> None:
    """Raise StoredAlready if there are posts that the ledger does not know: their objects would be
    stored and paid for again.
    """
    if roots:
        raise StoredAlready(
            f"the store has {counted(len(roots), 'post')} of this source that the ledger does not "
            "know, as after an older backup"
            " of the ledger was restored: nothing is planned, packed or posted, since it might be "
            "stored and paid for again",
            hint="'caf doctor' takes them into the ledger; 'caf run NAME --new-archive' archives "
            "their objects again",
        )


class Lease(Protocol):
    """The right to move one thing; renewed in the background until released.

    `epoch` grows with each new holder.
    """

    name: str
    epoch: int

    def check(self) -> None:
        """Raise LeaseLost where the lease is known to have been taken over or could not be renewed
        in time.
        """
        ...


class ChainHeights(Protocol):
    """The greatest height seen of each chain, by whichever process."""

    def seen_height(self, chain_id: str) -> int:
        """Return the greatest block height ever seen of a chain; 0 if there is none."""
        ...

    def see_height(self, chain_id: str, height: int) -> None:
        """Remember a height if it is greater than the remembered one."""
        ...


class TransactionLog(ChainHeights, Protocol):
    """The transactions of accounts, for one holder: `ledger.transactions` has the contract of each
    method.
    """

    def lease(self, account: str) -> AbstractContextManager[Lease]:
        """Hold the account's sequence while the context lasts: one run at a time signs."""
        ...

    def ask(self, account: str, chunk: str, message: bytes, charged_bytes: int) -> None:
        """Let the chunk's message wait for the account's next transaction, in place of an earlier
        one.
        """
        ...

    def other_accounts(self, chunk: str, account: str) -> Sequence[str]:
        """End what other accounts asked for the chunk; return those that have a live post of it."""
        ...

    def waiting(self, account: str) -> Sequence[WaitingPost]:
        """Return the posts that wait for a transaction, oldest first."""
        ...

    def pending(self, account: str) -> Sequence[SignedTransaction]:
        """Return the account's transactions whose outcome is not known, by sequence."""
        ...

    def commit(self, lease: Lease, transaction: SignedTransaction, chunks: Sequence[str]) -> None:
        """Write a transaction with the chunks that it posts, in the order of its messages; durable
        when this returns.
        """
        ...

    def settle(
        self,
        lease: Lease,
        hash: str,
        outcome: str,
        *,
        starts: Sequence[int] = (),
        cost: int | None = None,
    ) -> None:
        """Close a transaction; the same outcome again changes nothing."""
        ...

    def start_of(self, account: str, chunk: str) -> int | None:
        """Return the start of the chunk's latest included post; None if it has none."""
        ...

    def spent(self, account: str) -> int:
        """Return the cost in ujkl of the account's transactions that were included, failed or may
        be included.
        """
        ...

    def at_list_price(self, account: str) -> int:
        """Return how many purchases that are or may be included are counted at their list price."""
        ...

    def explains(self, account: str, archive_id: str, sequence: int) -> bool:
        """Return whether this log has each transaction that the account sent since the last look at
        an archive.
        """
        ...

    def unknown_roots(self, roots: Sequence[bytes], *, signed: bool) -> Sequence[bytes]:
        """Return the Merkle roots of a store that the ledger neither posted nor left aside."""
        ...

    def record_look(self, account: str, archive_id: str, sequence: int, unknown: int) -> None:
        """Remember a look at an archive's posts: the account's sequence before it, and the number
        of unknown posts.
        """
        ...


class ProviderRecords(Protocol):
    """Measured rates and failures by provider, kept over runs."""

    def all(self) -> Mapping[str, ProviderRecord]:
        """Return the records by provider."""
        ...

    def uploaded(self, provider: str, size_bytes: int, seconds: float) -> None:
        """Count a finished upload."""
        ...

    def downloaded(self, provider: str, size_bytes: int, seconds: float) -> None:
        """Count a finished download."""
        ...

    def failed(self, provider: str) -> None:
        """Count a failure."""
        ...


class ChunkReader(Protocol):
    """Reads stored chunks. Ends are exclusive.

    Attributes:
        name: the kind of the store.
        required_copies: of each chunk.
    """

    name: str
    required_copies: int

    def close(self) -> None:
        """Close the connections."""
        return

    def copies(self, posting: PostRecord) -> Sequence[Copy]:
        """Return the copies that the store lists now; an empty sequence for an unknown chunk."""
        ...

    def holders(self, posting: PostRecord) -> Sequence[str]:
        """Return the providers to read the chunk from, the best first; empty for an unknown
        chunk.
        """
        ...

    def urls(self, posting: PostRecord) -> Mapping[str, str]:
        """Return, for each of `holders` in their order, the URL at which any program reads ranges
        of the stored bytes.

        Holders without one are left out.
        """
        return {}

    def read(
        self, posting: PostRecord, start_byte: int, end_byte: int, *, provider: str | None = None
    ) -> Iterator[bytes]:
        """Yield `[start_byte, end_byte)` of the stored bytes in pieces of at most 1 MiB, from any
        or one provider.

        From any: the next holder goes on where one breaks off. From one: only that one is asked.

        Raises: StoredChunkMissing: no provider has it. StoreUnreachable. IntegrityError: fewer
            bytes than asked for.
        """
        ...

    def has_lost(
        self, posting: PostRecord, start_byte: int, end_byte: int, *, provider: str
    ) -> bool:
        """Return whether a provider answers other requests, but again gives nothing of a range that
        it just did not give.

        False if the provider gives the range this time, answers with an error of its own, or does
        not answer at all.
        """
        return False


class ChunkStore(ChunkReader, Protocol):
    """Keeps chunks by their Merkle root.

    Every call may be repeated: the second does nothing that the first did.

    What has a body here is what a store answers that measures nothing and proves nothing over time.
    """

    proof_type: int

    def admit(self, *, public: bool, stored_size_bytes: int, waiting_bytes: int) -> None:
        """Raise what would keep a chunk of this size from being posted; asked before it is packed
        and before it is posted.

        Args: public: whether its source may go out in the clear. stored_size_bytes: its size, or
            what is expected. waiting_bytes: stored bytes of other chunks that are being packed and
            are to be posted, too.

        Raises: NotPublic, NoStoragePlan, PlanExpired, PlanTooSmall, ChunkTooLarge, EmptyWallet,
            UploadsRefused, StoreUnreachable. NoProvider: no provider could be sent it now, so that
            it is not paid for. SettingsError: the store would not prove what is posted.
        """
        ...

    def require_here(self) -> None:
        """Raise StoreAway if the folder that has the ledger's chunks is away.

        A store on a network is not asked.
        """
        return

    def largest_chunk_bytes(self) -> int | None:
        """Return the largest stored size that enough providers take in the time they give; None
        where nothing is measured.
        """
        return None

    def cost(self, stored_size_bytes: int, chunks: int, days: int = 0) -> StorageCost | None:
        """Return what keeping so many bytes in so many chunks would cost now; None where nothing is
        paid for.

        `days` 0: for as long as the shortest purchase.

        Raises:
            StoreUnreachable. MnemonicRefused: there is no wallet.
        """
        return None

    def staging_hold_seconds(self) -> float:
        """Return for how long a located chunk should stay in staging where space allows; 0 for not
        at all.
        """
        return 0.0

    def bind(self) -> None:
        """Let the ledger know this store for good, before it has a chunk in it.

        A store on a chain is known by its owner.

        Raises:
            StoreAway: the ledger's chunks are in another store.
        """
        return

    def post(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord:
        """Announce the chunk; a root that the store already has from us is reused and costs
        nothing.

        Raises:
            What `admit` raises; SpendCapReached, TransactionRefused, StoreUnreachable, StoreError.
        """
        ...

    def posted_already(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord | None:
        """Return the chunk's post where the store has it; None where it was never posted, and no
        post of it is under way.

        Raises:
            StoreUnreachable, StoreError.
        """
        ...

    def unknown_posts(self, archive_id: str, log: TransactionLog) -> Sequence[bytes]:
        """Return the Merkle roots of the owner's posts of an archive that the ledger does not know.

        There are such posts after an older backup of the ledger was restored.

        Raises:
            MnemonicRefused: there is no wallet, and so no owner. StoreUnreachable. StoreError.
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
        """Bring the staged file to as many providers as copies are asked, until each is listed and
        gives pieces back right.

        `progress` gets the bytes sent, as differences, and may raise to end the upload. The
        providers in `wrong` returned other bytes, or lost some: they get the whole file even if the
        pieces that are read back are right.

        Raises:
            NoProvider, NotProven, RootRefused, ChunkTooLarge, StoreUnreachable, StoreError.
        """
        ...

    def owner(self) -> str:
        """Return who owns what this store posts.

        Raises:
            MnemonicRefused: there is no wallet.
        """
        ...

    def posted(self, archive_id: str) -> Iterator[PostedFile]:
        """Yield the files that are listed under an archive's id, of any owner and any content, in
        any order.
        """
        ...

    def posted_as(self, merkle_root: bytes) -> Sequence[PostedFile]:
        """Return the files of a Merkle root, of any owner and whichever program posted them."""
        ...

    def posted_by(self, owner: str) -> Iterator[PostedFile]:
        """Yield the files of an owner, whichever program posted them.

        Goes through all that the store lists, so ask seldom.
        """
        ...

    def archives(self) -> "Mapping[str | None, ArchiveFiles]":
        """Return the files that the store's owner posted, by the archive that their note names;
        None: a note that cannot be read.

        What other programs of the owner posted does not count. Goes through all that the store
        lists, so ask seldom.

        Raises:
            MnemonicRefused: there is no wallet, and so no owner. StoreUnreachable. StoreError.
        """
        ...

    def proof_window(self, posting: PostRecord, copy: Copy) -> int | None:
        """Return the number, from 0, of the proof window since the post that the copy's
        `last_proven` fell into.

        None where the store tells of no proofs over time.
        """
        return None

    def current_window(self, posting: PostRecord) -> int | None:
        """Return the number of the proof window that the chunk is in now; None where the store has
        none.
        """
        return None

    def window_ends_in(self, posting: PostRecord) -> float | None:
        """Return about how many seconds the present proof window of the chunk still lasts; None
        where the store has none.
        """
        return None

    def listed_at(self) -> int | None:
        """Return the block height that the store's lists are not older than if read from now on;
        None where it has no lists.
        """
        return None

    def file_pages(self, archive_id: str | None) -> Iterator[Sequence[ListedFile]]:
        """Yield what is listed under an archive's id, or all that is (None), by pages; other files
        may be among them.

        Raises:
            StoreUnreachable: the list is not whole, whatever was yielded.
        """
        return iter(())

    def proof_pages(self, provider: str) -> Iterator[Sequence[ListedProof]]:
        """Yield what is listed of a provider's proofs, whoever owns the files, by pages; raises as
        `file_pages`.
        """
        return iter(())
