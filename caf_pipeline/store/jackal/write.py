"""The ChunkStore on Jackal: what it costs, what it admits, and the parts that do the work.

Source: docs/explanation/jackal.md.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Final

from caf_pipeline.errors import (
    ChunkTooLarge,
    EmptyWallet,
    NoStoragePlan,
    NotPublic,
    PlanExpired,
    PlanTooSmall,
)
from caf_pipeline.settings import JackalSettings
from caf_pipeline.store.jackal import LEAST_BYTES, LEAST_DAYS
from caf_pipeline.store.jackal.accepting_providers import AcceptingProviders
from caf_pipeline.store.jackal.answers import ChainFile
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.names import DENOM, archive_of, is_ours
from caf_pipeline.store.jackal.posting import GAS_BASE, GAS_MARGIN, GAS_POST, Poster
from caf_pipeline.store.jackal.read import JackalReader, open_chain
from caf_pipeline.store.jackal.upload import Uploads
from caf_pipeline.store.jackal.wallet import Wallet, read_mnemonic
from caf_pipeline.store.protocol import (
    ArchiveFiles,
    ChunkToStore,
    Copy,
    ListedFile,
    ListedProof,
    PostedFile,
    PostRecord,
    ProviderRecords,
    StorageCost,
    TransactionLog,
)
from caf_pipeline.system.quantities import show_size
from caf_pipeline.throttle import Throttle
from caf_pipeline.waits import Waits

INTERVALS_KEPT: Final = 1024
"""Files whose proof window is remembered: a look at a file needs it for each copy, and some times
more.
"""


class JackalStore(JackalReader):
    """Keeps chunks on Jackal. Safe for several threads.

    Attributes:
        wallet: who pays and owns.
        poster: what pays.
    """

    def __init__(  # noqa: PLR0917 - the parts, each a type of its own
        self,
        settings: JackalSettings,
        wallet: Wallet,
        chain: Chain,
        poster: Poster,
        records: ProviderRecords,
        throttle: Throttle,
        waits: Waits | None = None,
    ) -> None:
        super().__init__(settings, chain, records, waits)
        self.wallet = wallet
        self.poster = poster
        self.proof_type: int = settings.proof_type
        self._uploads = Uploads(
            chain, settings, records, self._selection, throttle, waits or Waits()
        )
        self._accepting = AcceptingProviders(settings, self._selection, self._uploads)
        self._interval = lru_cache(INTERVALS_KEPT)(self._ask_interval)

    # --- before anything is sent
    # --------------------------------------------------------------------------------

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
                f"a chunk of {show_size(stored_size_bytes)} cannot be uploaded in the "
                f"{self.settings.upload_seconds:.0f} s that a"
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
                f"all copies of what is to be posted need {show_size(needed_bytes)}; of the "
                f"{show_size(plan.space_bytes)} that"
                f" {address} bought, {show_size(max(plan.free_bytes, 0))} are free",
                fitting_bytes=max(plan.free_bytes, 0) // self.settings.copies,
                hint=_to_buy(plan.used_bytes + needed_bytes),
            )

    def _require_fee(self) -> None:
        fee = math.ceil(math.ceil((GAS_BASE + GAS_POST) * GAS_MARGIN) * self.settings.gas_price)
        balance = self.chain.balance(self.wallet.address)
        if balance < fee:
            raise EmptyWallet(
                f"{self.wallet.address} has {balance}{DENOM}, a post costs a fee of about "
                f"{fee}{DENOM}",
                hint="send some JKL to this address",
            )

    def require_here(self) -> None:
        """Do nothing: only a request can show that the network is away."""

    def largest_chunk_bytes(self) -> int | None:
        """Return what the slowest of the required copies is through with in time; None where fewer
        providers are measured.
        """
        return self._selection.fitting_bytes(
            self.settings.copies_required, self.settings.upload_seconds
        )

    def cost(self, stored_size_bytes: int, chunks: int, days: int = 0) -> StorageCost:
        """Return what the chain asks for the space now; each post counted in a transaction of its
        own.
        """
        charged = stored_size_bytes * self.settings.copies
        days = days or LEAST_DAYS
        price = self.chain.price(days, max(charged, LEAST_BYTES)) if charged else 0
        fee = math.ceil((GAS_BASE + GAS_POST) * GAS_MARGIN * Fraction(str(self.settings.gas_price)))
        return StorageCost(self.settings.copies, charged, days, price, chunks * fee, LEAST_BYTES)

    def staging_hold_seconds(self) -> float:
        """Return how long the set number of proof windows is."""
        windows = self.settings.keep_staged_windows
        return windows * self.chain.proof_window() * self.chain.block_seconds() if windows else 0.0

    # --- a chunk
    # --------------------------------------------------------------------------------

    def bind(self) -> None:
        """Do nothing: the wallet's address says whose files these are."""

    def post(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord:
        """Announce the chunk on the chain, once enough providers would take it: see
        `Poster.post`.
        """
        _require_public(chunk.public)
        return self.poster.post(
            chunk, log, ready=lambda: self._accepting.require(chunk.stored_size_bytes)
        )

    def posted_already(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord | None:
        """Return the chunk's post where there is one; what is pending is settled first, and nothing
        is signed.
        """
        return self.poster.found(chunk, log)

    def unknown_posts(self, archive_id: str, log: TransactionLog) -> Sequence[bytes]:
        """Return the roots of the wallet's posts of an archive that the ledger does not know: see
        `Poster.unknown_posts`.
        """
        return self.poster.unknown_posts(archive_id, log)

    def put(
        self,
        posting: PostRecord,
        staged: Path,
        progress: Callable[[int], None],
        *,
        wrong: Collection[str] = (),
    ) -> None:
        """Bring the staged file to providers: see `ChunkStore.put`."""
        self._uploads.put(posting, staged, progress, wrong=wrong)

    def proof_window(self, posting: PostRecord, copy: Copy) -> int | None:
        """Return the number of the proof window since the post: windows of a file begin with its
        start.
        """
        if copy.last_proven is None:
            return None
        return max(copy.last_proven - posting.start, 0) // self._window_blocks(posting)

    def current_window(self, posting: PostRecord) -> int | None:
        """Return the number of the proof window that the file is in now."""
        return max(self.chain.height() - posting.start, 0) // self._window_blocks(posting)

    def window_ends_in(self, posting: PostRecord) -> float | None:
        """Return how long the blocks that are left of the window take, at the present pace."""
        blocks = self._window_blocks(posting)
        passed = max(self.chain.height() - posting.start, 0) % blocks
        return (blocks - passed) * self.chain.block_seconds()

    def _window_blocks(self, posting: PostRecord) -> int:
        return self._interval(posting) or self.chain.proof_window()

    def _ask_interval(self, posting: PostRecord) -> int:
        """Return how long a window of this file is, which keeps the one that it was posted with; 0
        where it is not known.
        """
        file = self.chain.file(posting.merkle_root, posting.owner, posting.start)
        return file.proof_interval if file else 0

    def listed_at(self) -> int:
        """Return the chain's height: no page that is asked for later is of an older state."""
        return self.chain.height()

    def file_pages(self, archive_id: str | None) -> Iterator[Sequence[ListedFile]]:
        """Yield the pages of the chain's list of an archive's files, or of all."""
        usual = self.chain.proof_window()
        for page in self.chain.file_pages(archive_id):
            yield [
                ListedFile(
                    one.merkle_root,
                    one.owner,
                    one.start,
                    one.providers,
                    one.proof_interval or usual,
                )
                for one in page
            ]

    def proof_pages(self, provider: str) -> Iterator[Sequence[ListedProof]]:
        """Yield the pages of the chain's list of a provider's proofs."""
        for page in self.chain.proof_pages(provider):
            yield [
                ListedProof(one.merkle_root, one.owner, one.start, one.last_proven)
                for one in page
                if one.provider in ("", provider)
            ]

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
        """Return the wallet's files by the archive that their note names: see
        `ChunkStore.archives`.

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

        return {
            archive: ArchiveFiles(len(of), at(min(of)), at(max(of)))
            for archive, of in starts.items()
        }

    def listed(self, archive_id: str, owners: Collection[str]) -> Iterator[ChainFile]:
        """Yield what the chain lists for an archive and these owners."""
        return (
            file for file in self.chain.files_of_archive(None, archive_id) if file.owner in owners
        )


def _posted(file: ChainFile) -> PostedFile:
    return PostedFile(
        PostRecord(file.merkle_root, file.owner, file.start, file.size_bytes), file.proof_type
    )


def _to_buy(size_bytes: int) -> str:
    least = max(size_bytes, LEAST_BYTES)
    return (
        "'caf jackal price SOURCE' tells what all of it takes; 'caf jackal buy --bytes "
        f"{least} "
        f"--days {LEAST_DAYS}' is the least"
    )


def _require_public(public: bool) -> None:
    if not public:
        raise NotPublic(
            "what is stored on Jackal can be read by anybody, and this source is not marked as "
            "public",
            hint="set public = true for the source if every byte of it may be read by anybody",
        )


def open_jackal_store(
    settings: JackalSettings,
    log: TransactionLog,
    records: ProviderRecords,
    throttle: Throttle,
    waits: Waits | None = None,
) -> JackalStore:
    """Open the store that the settings describe. The wallet is opened when something is to be paid.

    Raises:
        SettingsError: no LCD is set.
    """
    given = settings.mnemonic.get_secret_value() if settings.mnemonic else None
    wallet = Wallet(lambda: read_mnemonic(given, settings.mnemonic_file))
    chain = open_chain(settings, log, waits)
    poster = Poster(
        chain,
        wallet,
        settings,
        spend_cap=throttle.spend_cap,
        wait_while_paused=throttle.wait_while_paused,
        waits=waits,
    )
    return JackalStore(settings, wallet, chain, poster, records, throttle, waits)
