"""The protocols of a chunk store, and the records that they exchange.

A store knows no database: the ledger implements `TransactionLog` and `ProviderRecords`. Ends are
exclusive; times are aware and in UTC.
"""

import hmac
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

from caf_pipeline.errors import StoredAlready
from caf_pipeline.records import Copy, PostedFile, PostRecord, TransactionLog
from caf_pipeline.system.quantities import counted, show_coins


@dataclass(frozen=True, slots=True)
class ChunkToStore:
    """A sealed chunk. Size and Merkle root are those of its stored bytes.

    Attributes:
        header_sha256: SHA-256 of the header and nonce of an encrypted chunk; None: plain.
        mac: see `post_mac`; None: the ledger cannot vouch for the content.
        epoch: of the lease on the chunk. An encrypted chunk is posted only while it is live.
    """

    name: str
    archive_id: str
    stored_size_bytes: int
    proof_type: int
    merkle_root: bytes
    header_sha256: bytes | None = None
    mac: bytes | None = None
    epoch: int = 0


_MAC_LABEL: Final = b"caf-pipeline post 1"


def post_mac(
    key: bytes,
    *,
    archive_id: str,
    merkle_root: bytes,
    stored_size_bytes: int,
    proof_type: int,
    header_sha256: bytes | None,
) -> bytes:
    """Return the MAC of a post: only a ledger with the source's key can make it.

    HMAC-SHA-256 over a label and the fields, each with its length in front.
    """
    fields = (
        _MAC_LABEL,
        archive_id.encode(),
        merkle_root,
        stored_size_bytes.to_bytes(8, "big"),
        proof_type.to_bytes(1, "big"),
        header_sha256 or b"",
    )
    message = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return hmac.digest(key, message, "sha256")


def has_right_mac(key: bytes | None, archive_id: str, file: PostedFile) -> bool:
    """Return whether a ledger with this key posted the file."""
    if key is None or file.mac is None:
        return False
    right = post_mac(
        key,
        archive_id=archive_id,
        merkle_root=file.posting.merkle_root,
        stored_size_bytes=file.posting.stored_size_bytes,
        proof_type=file.proof_type,
        header_sha256=file.header_sha256,
    )
    return hmac.compare_digest(right, file.mac)


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file in a store's list. `window_blocks` is the length of its proof windows."""

    merkle_root: bytes
    owner: str
    start: int
    providers: Sequence[str]
    window_blocks: int


@dataclass(frozen=True, slots=True)
class ListedProof:
    """A proof in a provider's list. For `last_proven` see `Copy`."""

    merkle_root: bytes
    owner: str
    start: int
    last_proven: int


@dataclass(frozen=True, slots=True)
class StorageCost:
    """The cost of space for some chunks and days.

    `charged_bytes` counts every copy. `fees_ujkl` is an upper bound. The price is for
    `least_bytes`, the smallest amount on sale, if the chunks take less. `list_usd` is the same
    price in US dollars before discounts, None if unknown.
    """

    copies: int
    charged_bytes: int
    days: int
    price_ujkl: int
    fees_ujkl: int
    least_bytes: int = 0
    list_usd: float | None = None

    @property
    def price_sentence(self) -> str:
        """The price in coins and US dollars, for how long, and for which space if that is more."""
        usd = "price in USD not known"
        if self.list_usd is not None:
            cents = math.ceil(round(self.list_usd * 100, 6))
            usd = f"at most {cents / 100:,.2f} USD"
        priced = f"{show_coins(self.price_ujkl)}, {usd}, for {self.days} days"
        if 0 < self.charged_bytes < self.least_bytes:
            priced += f" of {self.least_bytes:,} bytes, the least that is sold"
        return priced


@dataclass(frozen=True, slots=True)
class ArchiveFiles:
    """The number of an archive's files, and about when they were posted."""

    count: int
    first_at: datetime
    last_at: datetime


def refuse_unknown_posts(roots: Sequence[bytes]) -> None:
    """Raise StoredAlready for unknown posts: their objects would be paid for twice."""
    if roots:
        raise StoredAlready(
            f"the store has {counted(len(roots), 'post')} of this source that the ledger does not "
            "know: an older backup of the ledger was restored, or somebody else posts with your "
            "wallet. Nothing is planned, packed or posted, because objects could be stored and "
            "paid for twice",
            hint="run 'caf doctor': it adds the posts that this ledger made, and lists others, "
            "which 'caf doctor --leave-unknown-posts' sets aside; 'caf run NAME --new-archive' "
            "archives objects of lost posts again",
        )


def refuse_lost_posts(chunks: Sequence[str]) -> None:
    """Raise StoredAlready for posted chunks whose objects are neither claimed nor archived."""
    if chunks:
        more = f" and {len(chunks) - 1:,} others" if len(chunks) > 1 else ""
        raise StoredAlready(
            f"chunk {chunks[0]}{more} was posted, but the ledger neither claims its objects nor "
            "has them as archived. Nothing is planned, packed or posted, because objects could be "
            "stored and paid for twice",
            hint="run 'caf doctor'",
        )


def refuse_unknown_archives(archive_ids: Sequence[str]) -> None:
    """Raise StoredAlready before the first post of an archive beside unknown archives."""
    if archive_ids:
        raise StoredAlready(
            f"the store has {counted(len(archive_ids), 'archive')} that no source of this ledger "
            f"has: {', '.join(archive_ids)}. Another ledger may archive the same objects. This "
            "would be the first post of its source, so nothing is posted",
            hint="if another ledger archives this source, run 'caf withdraw NAME', then 'caf "
            "rebuild NAME'; otherwise run 'caf run NAME --new-archive'",
        )


class ChunkReader(Protocol):
    """Reads stored chunks."""

    name: str
    required_copies: int

    def close(self) -> None:
        return

    def copies(self, posting: PostRecord) -> Sequence[Copy]:
        """Return the copies that are listed now, none for an unknown chunk."""

    def holders(self, posting: PostRecord) -> Sequence[str]:
        """Return the providers of the chunk, the best to read from first."""

    def urls(self, posting: PostRecord) -> Mapping[str, str]:
        """URLs that support ranges, in the order of `holders`."""
        return {}

    def read(
        self, posting: PostRecord, start_byte: int, end_byte: int, *, provider: str | None = None
    ) -> Iterator[bytes]:
        """Yield `[start_byte, end_byte)` of the stored bytes in pieces of at most 1 MiB.

        If a holder breaks off, the next one continues, unless `provider` restricts the read to one.

        Raises:
            StoredChunkMissing: no provider has the chunk.
            StoreUnreachable: no provider answers.
            IntegrityError: there are fewer bytes than requested.
        """

    def has_lost(
        self, posting: PostRecord, start_byte: int, end_byte: int, *, provider: str
    ) -> bool:
        """Return whether a provider that failed to return a range fails again, but is online.

        False also if it answers with an error.
        """
        return False


class ChunkStore(ChunkReader, Protocol):
    """Keeps chunks by their Merkle root. Every call is idempotent.

    Every method may raise StoreUnreachable or StoreError, or MnemonicRefused if it needs the owner
    and there is no wallet.
    """

    proof_type: int

    def admit(self, *, stored_size_bytes: int, waiting_bytes: int) -> None:
        """Raise the reason why a chunk of this size cannot be posted.

        Called before the chunk is packed, and again before it is posted. `waiting_bytes` are the
        stored bytes of the other chunks that are being packed.

        Raises:
            NoStoragePlan, PlanExpired, PlanTooSmall, ChunkTooLarge, SpendCapReached,
            EmptyWallet, UploadsRefused.
            NoProvider: no provider would take the chunk now, so it must not be paid for.
            SettingsError: the store would not prove the chunk.
        """

    def require_here(self) -> None:
        """Raise StoreAway if the folder with the ledger's chunks is away."""
        return

    def largest_chunk_bytes(self) -> int | None:
        """Return the size that enough providers accept in time. None if unmeasured."""
        return None

    def cost(self, stored_size_bytes: int, chunks: int, days: int = 0) -> StorageCost | None:
        """Return the current cost, or None if storing is free. 0 days: the shortest purchase."""
        return None

    def staging_hold_seconds(self) -> float:
        """How long a located chunk should stay in staging if there is space."""
        return 0.0

    def bind(self) -> None:
        """Record this store in the ledger, or raise StoreAway if its chunks are in another."""
        return

    def post(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord:
        """Announce the chunk. An existing post is reused at no cost.

        Raises like `admit`. Raises StoredAlready if the ledger does not know a post of the archive.
        Before the archive's first post, an unknown archive in the store has the same effect.
        """

    def posted_already(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord | None:
        """Return the chunk's post. None if no post exists or is pending."""

    def unknown_posts(self, archive_id: str, log: TransactionLog) -> Sequence[bytes]:
        """Return the owner's posted roots that the ledger does not know.

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

        `progress` receives the bytes sent since its last call, and may raise to end the upload. The
        providers in `wrong` lost bytes or returned others. They get the whole file even if it reads
        back correctly.

        Raises:
            NoProvider, NotProven, RootRefused, ChunkTooLarge.
        """

    def possible_holders(self, posting: PostRecord) -> Sequence[str]:
        """Return all providers that may have the chunk, whether or not the chain lists them."""
        return self.holders(posting)

    def owner(self) -> str: ...

    def posted(self, archive_id: str) -> Iterator[PostedFile]:
        """Yield the files under an archive's id, of any owner and content, in any order."""

    def posted_as(self, merkle_root: bytes) -> Sequence[PostedFile]:
        """Return the files with this root, of any owner and program."""

    def posted_by(self, owner: str) -> Iterator[PostedFile]:
        """Yield the owner's files of any program. Reads the store's whole list."""

    def posted_at(self, postings: Sequence[PostRecord]) -> Sequence[datetime]:
        """Return about when the files were posted."""

    def archives(
        self, owner: str | None = None, *, log: TransactionLog | None = None
    ) -> "Mapping[str | None, ArchiveFiles]":
        """Return the posts of `owner()` by the archive id in the note, None if unreadable.

        `log` remembers them. Another `owner` needs no wallet, and nothing is remembered. Files of
        other programs are left out. Reads the store's whole list.
        """

    def proof_window(self, posting: PostRecord, copy: Copy) -> int | None:
        """Return the window of `last_proven`, from 0 at the post. None without windows."""
        return None

    def current_window(self, posting: PostRecord, height: int | None = None) -> int | None:
        """Return the window of a height (None: the present one). None without windows."""
        return None

    def window_ends_in(self, posting: PostRecord, height: int | None = None) -> float | None:
        """In seconds from a height (None: the present one), about. None without windows."""
        return None

    def listed_at(self) -> int | None:
        """Return a height that is not newer than lists read from now on. None without lists."""
        return None

    def file_pages(self, archive_id: str | None) -> Iterator[Sequence[ListedFile]]:
        """Yield pages of an archive's files, possibly among others, or of all files if None.

        After StoreUnreachable the list is incomplete.
        """
        return iter(())

    def proof_pages(self, provider: str) -> Iterator[Sequence[ListedProof]]:
        """Yield pages of a provider's proofs of any owner's files. See `file_pages`."""
        return iter(())
