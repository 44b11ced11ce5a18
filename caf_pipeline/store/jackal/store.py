"""The ChunkStore on Jackal: what it costs, what it admits, and the parts that do the work.

Source: docs/jackal.md.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from caf_pipeline.errors import ChunkTooLarge, EmptyWallet, NoStoragePlan, NotPublic, PlanExpired, PlanTooSmall
from caf_pipeline.ledger.records import Holder
from caf_pipeline.settings import JackalSettings, Settings
from caf_pipeline.store.jackal import LEAST_BYTES, LEAST_DAYS
from caf_pipeline.store.jackal.accepting_providers import AcceptingProviders
from caf_pipeline.store.jackal.answers import ChainFile
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.download import Downloads
from caf_pipeline.store.jackal.messages import DENOM, archive_of, is_ours
from caf_pipeline.store.jackal.nodes import Nodes
from caf_pipeline.store.jackal.posting import GAS_BASE, GAS_MARGIN, GAS_POST, Poster
from caf_pipeline.store.jackal.provider_selection import ProviderSelection
from caf_pipeline.store.jackal.upload import Uploads
from caf_pipeline.store.jackal.wallet import Wallet, read_mnemonic
from caf_pipeline.store.protocol import (
    ArchiveFiles,
    ChunkToStore,
    Copy,
    ListedFile,
    ListedProof,
    PostedFile,
    Posting,
    StorageCost,
)
from caf_pipeline.system.quantities import show_size
from caf_pipeline.throttle import Throttle, open_throttle
from caf_pipeline.waits import Waits

if TYPE_CHECKING:
    from caf_pipeline.ledger.postgres import Ledger
    from caf_pipeline.ledger.provider_stats import ProviderRecords
    from caf_pipeline.ledger.transactions import TransactionLog


INTERVALS_KEPT: Final = 1024
"""Files whose proof window is remembered: a look at a file needs it for each copy, and some times more."""


class JackalStore:
    """Keeps chunks on Jackal. Safe for several threads.

    Attributes:
        chain: the network's nodes.
        wallet: who pays and owns.
        poster: what pays.
        settings: of the network.
    """

    name = "jackal"

    def __init__(  # noqa: PLR0917 - the parts, each a type of its own
        self,
        settings: JackalSettings,
        wallet: Wallet,
        chain: Chain,
        poster: Poster,
        records: "ProviderRecords",
        throttle: Throttle,
        waits: Waits | None = None,
    ) -> None:
        self.settings = settings
        self.wallet = wallet
        self.chain = chain
        self.poster = poster
        self.required_copies = settings.copies_required
        self.proof_type: int = settings.proof_type
        self._selection = ProviderSelection(chain, records, allow_private_addresses=settings.allow_private_addresses)
        self._uploads = Uploads(chain, settings, records, self._selection, throttle, waits or Waits())
        self._accepting = AcceptingProviders(settings, self._selection, self._uploads)
        self._downloads = Downloads(chain, records, self._selection, waits)
        self._interval = lru_cache(INTERVALS_KEPT)(self._ask_interval)

    def close(self) -> None:
        """Close all connections."""
        self._selection.close()
        self.chain.close()

    # --- before anything is sent ---------------------------------------------------------------------------------------

    def admit(self, *, public: bool, stored_size_bytes: int, waiting_bytes: int) -> None:
        """Raise what would keep a chunk of this size from being posted: see `ChunkStore.admit`.

        Raises:
            MnemonicRefused: there is no wallet, or not one.
            SettingsError: the chain may not verify proofs of the type that is set.
        """
        _require_public(public)
        self.chain.require_verified(self.proof_type)
        self._require_uploadable(stored_size_bytes)
        self._require_space((stored_size_bytes + waiting_bytes) * self.settings.copies)
        self._require_fee()
        self._accepting.require(stored_size_bytes)

    def _require_uploadable(self, stored_size_bytes: int) -> None:
        largest = self.largest_chunk_bytes()
        if largest is not None and stored_size_bytes > largest:
            raise ChunkTooLarge(
                f"a chunk of {show_size(stored_size_bytes)} cannot be uploaded in the {self.settings.upload_seconds:.0f} s that a"
                f" provider allows; at the measured rates about {show_size(largest)} can",
                fitting_bytes=largest,
                hint=f"set the source's target_size to {largest} or less",
            )

    def _require_space(self, needed_bytes: int) -> None:
        address = self.wallet.address
        plan = self.chain.plan(address)
        if plan is None:
            raise NoStoragePlan(
                f"{address} has bought no space on Jackal; {show_size(needed_bytes)} are needed",
                hint=_to_buy(needed_bytes),
            )
        if plan.ends_at <= self.chain.now():
            raise PlanExpired(
                f"the space that {address} bought ended on {plan.ends_at:%Y-%m-%d}",
                hint=_to_buy(plan.used_bytes + needed_bytes),
            )
        if needed_bytes > plan.free_bytes:
            raise PlanTooSmall(
                f"all copies of what is to be posted need {show_size(needed_bytes)}; of the {show_size(plan.space_bytes)} that"
                f" {address} bought, {show_size(max(plan.free_bytes, 0))} are free",
                fitting_bytes=max(plan.free_bytes, 0) // self.settings.copies,
                hint=_to_buy(plan.used_bytes + needed_bytes),
            )

    def _require_fee(self) -> None:
        fee = math.ceil(math.ceil((GAS_BASE + GAS_POST) * GAS_MARGIN) * self.settings.gas_price)
        balance = self.chain.balance(self.wallet.address)
        if balance < fee:
            raise EmptyWallet(
                f"{self.wallet.address} has {balance}{DENOM}, a post costs a fee of about {fee}{DENOM}",
                hint="send some JKL to this address",
            )

    def require_here(self) -> None:
        """Do nothing: only a request can show that the network is away."""

    def largest_chunk_bytes(self) -> int | None:
        """Return what the slowest of the required copies is through with in time; None where fewer providers are measured."""
        return self._selection.fitting_bytes(self.settings.copies_required, self.settings.upload_seconds)

    def cost(self, stored_size_bytes: int, chunks: int, days: int = 0) -> StorageCost:
        """Return what the chain asks for the space now; each post counted in a transaction of its own."""
        charged = stored_size_bytes * self.settings.copies
        days = days or LEAST_DAYS
        price = self.chain.price(days, max(charged, LEAST_BYTES)) if charged else 0
        fee = math.ceil((GAS_BASE + GAS_POST) * GAS_MARGIN * Fraction(str(self.settings.gas_price)))
        return StorageCost(self.settings.copies, charged, days, price, chunks * fee, LEAST_BYTES)

    def staging_hold_seconds(self) -> float:
        """Return how long the set number of proof windows is."""
        windows = self.settings.keep_staged_windows
        return windows * self.chain.proof_window() * self.chain.block_seconds() if windows else 0.0

    # --- a chunk ---------------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Do nothing: the wallet's address says whose files these are."""

    def post(self, chunk: ChunkToStore, log: "TransactionLog") -> Posting:
        """Announce the chunk on the chain, once enough providers would take it: see `Poster.post`."""
        _require_public(chunk.public)
        return self.poster.post(chunk, log, ready=lambda: self._accepting.require(chunk.stored_size_bytes))

    def posted_already(self, chunk: ChunkToStore, log: "TransactionLog") -> Posting | None:
        """Return the chunk's post where there is one; what is pending is settled first, and nothing is signed."""
        return self.poster.found(chunk, log)

    def unknown_posts(self, archive_id: str, log: "TransactionLog") -> Sequence[bytes]:
        """Return the roots of the wallet's posts of an archive that the ledger does not know: see `Poster.unknown_posts`."""
        return self.poster.unknown_posts(archive_id, log)

    def put(self, posting: Posting, staged: Path, progress: Callable[[int], None], *, wrong: Collection[str] = ()) -> None:
        """Bring the staged file to providers: see `ChunkStore.put`."""
        self._uploads.put(posting, staged, progress, wrong=wrong)

    def copies(self, posting: Posting) -> Sequence[Copy]:
        """Return what the chain lists, with what it keeps of each copy's proofs."""
        merkle_root, owner, start = posting.merkle_root, posting.owner, posting.start
        file = self.chain.file(merkle_root, owner, start)
        if file is None:
            return []
        copies = []
        for provider, listed in zip(file.providers, file.proofs, strict=True):
            proof = self.chain.proof(provider, merkle_root, owner, start)
            height, verified = (proof.last_proven, proof.verified) if proof else (None, False)
            copies.append(Copy(provider, listed, height, verified))
        return copies

    def holders(self, posting: Posting) -> Sequence[str]:
        """Return the providers that the chain lists, fastest first, those that failed of late last."""
        return self._downloads.holders(posting)

    def urls(self, posting: Posting) -> Mapping[str, str]:
        """Return where providers give the file to whoever asks, by the address of each on the chain."""
        return self._downloads.urls(posting)

    def proof_window(self, posting: Posting, copy: Copy) -> int | None:
        """Return the number of the proof window since the post: windows of a file begin with its start."""
        if copy.last_proven is None:
            return None
        return max(copy.last_proven - posting.start, 0) // self._window_blocks(posting)

    def current_window(self, posting: Posting) -> int | None:
        """Return the number of the proof window that the file is in now."""
        return max(self.chain.height() - posting.start, 0) // self._window_blocks(posting)

    def window_ends_in(self, posting: Posting) -> float | None:
        """Return how long the blocks that are left of the window take, at the present pace."""
        blocks = self._window_blocks(posting)
        passed = max(self.chain.height() - posting.start, 0) % blocks
        return (blocks - passed) * self.chain.block_seconds()

    def _window_blocks(self, posting: Posting) -> int:
        return self._interval(posting) or self.chain.proof_window()

    def _ask_interval(self, posting: Posting) -> int:
        """Return how long a window of this file is, which keeps the one that it was posted with; 0 where it is not known."""
        file = self.chain.file(posting.merkle_root, posting.owner, posting.start)
        return file.proof_interval if file else 0

    def listed_at(self) -> int:
        """Return the chain's height: no page that is asked for later is of an older state."""
        return self.chain.height()

    def file_pages(self, archive_id: str | None) -> Iterator[Sequence[ListedFile]]:
        """Yield the pages of the chain's list of an archive's files, or of all."""
        usual = self.chain.proof_window()
        for page in self.chain.file_pages(archive_id):
            yield [ListedFile(one.merkle_root, one.owner, one.start, one.providers, one.proof_interval or usual) for one in page]

    def proof_pages(self, provider: str) -> Iterator[Sequence[ListedProof]]:
        """Yield the pages of the chain's list of a provider's proofs."""
        for page in self.chain.proof_pages(provider):
            yield [
                ListedProof(one.merkle_root, one.owner, one.start, one.last_proven)
                for one in page
                if one.provider in ("", provider)
            ]

    def read(self, posting: Posting, start_byte: int, end_byte: int, *, provider: str | None = None) -> Iterator[bytes]:
        """Yield a range of the stored bytes: see `ChunkStore.read`."""
        return self._downloads.read(posting, start_byte, end_byte, provider=provider)

    def has_lost(self, posting: Posting, start_byte: int, end_byte: int, *, provider: str) -> bool:
        """Return whether a provider that answers sends nothing of a range: see `ChunkStore.has_lost`."""
        return self._downloads.has_lost(posting, start_byte, end_byte, provider=provider)

    def owner(self) -> str:
        """Return the wallet's address."""
        return self.wallet.address

    def posted(self, archive_id: str) -> Iterator[PostedFile]:
        """Yield what the chain lists under the archive's note, of any owner."""
        return map(_posted, self.chain.files_of_archive(None, archive_id))

    def posted_as(self, merkle_root: bytes) -> Sequence[PostedFile]:
        """Return what the chain lists under a root, of any owner."""
        return [_posted(file) for file in self.chain.files_of_root(merkle_root)]

    def posted_by(self, owner: str) -> Iterator[PostedFile]:
        """Yield what the chain lists of an owner, among all that it lists."""
        return map(_posted, self.chain.files_of_owner(owner))

    def archives(self) -> Mapping[str | None, ArchiveFiles]:
        """Return the wallet's files by the archive that their note names: see `ChunkStore.archives`.

        Times are estimated from heights, since nodes forget the times of old blocks.
        """
        starts = defaultdict[str | None, list[int]](list)
        for file in self.chain.files_of_owner(self.wallet.address):
            if is_ours(file.note):
                starts[archive_of(file.note)].append(file.start)
        if not starts:
            return {}
        moment, height, seconds = self.chain.now(), self.chain.height(), self.chain.block_seconds()

        def at(start: int) -> datetime:
            return moment - timedelta(seconds=max(height - start, 0) * seconds)

        return {archive: ArchiveFiles(len(of), at(min(of)), at(max(of))) for archive, of in starts.items()}

    def listed(self, archive_id: str, owners: Collection[str]) -> Iterator[ChainFile]:
        """Yield what the chain lists for an archive and these owners."""
        return (file for file in self.chain.files_of_archive(None, archive_id) if file.owner in owners)


def _posted(file: ChainFile) -> PostedFile:
    return PostedFile(Posting(file.merkle_root, file.owner, file.start, file.size_bytes), file.proof_type)


def _to_buy(size_bytes: int) -> str:
    least = max(size_bytes, LEAST_BYTES)
    return (
        f"'caf jackal price SOURCE' tells what all of it takes; 'caf jackal buy --bytes {least} --days {LEAST_DAYS}' is the least"
    )


def _require_public(public: bool) -> None:
    if not public:
        raise NotPublic(
            "what is stored on Jackal can be read by anybody, and this source is not marked as public",
            hint="set public = true for the source if every byte of it may be read by anybody",
        )


def open_jackal_store(settings: Settings, ledger: "Ledger", holder: Holder, waits: Waits | None = None) -> JackalStore:
    """Open the store that the settings describe. The wallet is opened when something is to be paid: reading needs none.

    Raises:
        SettingsError: no LCD is set.
    """
    jackal = settings.jackal
    given = jackal.mnemonic.get_secret_value() if jackal.mnemonic else None
    wallet = Wallet(lambda: read_mnemonic(given, jackal.mnemonic_file))
    log = ledger.transactions(holder)
    throttle = open_throttle(jackal, ledger.controls(), waits)
    chain = Chain(
        Nodes(
            jackal.lcd,
            jackal.chain_id,
            seen_height=lambda: log.seen_height(jackal.chain_id),
            see_height=lambda height: log.see_height(jackal.chain_id, height),
            waits=waits,
        )
    )
    poster = Poster(
        chain, wallet, jackal, spend_cap=throttle.spend_cap, wait_while_paused=throttle.wait_while_paused, waits=waits
    )
    return JackalStore(jackal, wallet, chain, poster, ledger.providers(), throttle, waits)
