"""The ChunkStore on Jackal: prices, admission checks, and the modules that do the work.

Source: docs/explanation/jackal.md.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Final

from caf_pipeline.errors import (
    ChainUnreachable,
    ChunkTooLarge,
    NoStoragePlan,
    PlanExpired,
    PlanTooSmall,
)
from caf_pipeline.records import Copy, PostedFile, PostRecord, ProviderRecords, TransactionLog
from caf_pipeline.settings import JackalSettings
from caf_pipeline.store.jackal import LEAST_BYTES, LEAST_DAYS, LIST_PRICE_BYTES
from caf_pipeline.store.jackal.accepting_providers import AcceptingProviders
from caf_pipeline.store.jackal.answers import ChainFile
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.names import header_of, mac_of
from caf_pipeline.store.jackal.posting import Poster, post_gas
from caf_pipeline.store.jackal.read import JackalReader, open_chain
from caf_pipeline.store.jackal.upload import Uploads
from caf_pipeline.store.jackal.wallet import Wallet, read_mnemonic
from caf_pipeline.store.protocol import (
    ArchiveFiles,
    ChunkToStore,
    ListedFile,
    ListedProof,
    StorageCost,
)
from caf_pipeline.system.quantities import show_size
from caf_pipeline.throttle import Throttle
from caf_pipeline.waits import Waits

CACHED_INTERVALS: Final = 1 << 17
"""Files whose proof window is cached, because each check needs it for every copy.

`caf safe-to-delete` asks for all chunks again, right before it writes the list.
"""


class JackalStore(JackalReader):
    """Keeps chunks on Jackal. Safe for several threads."""

    def __init__(  # noqa: PLR0917 - each argument has its own type
        self,
        settings: JackalSettings,
        wallet: Wallet,
        chain: Chain,
        poster: Poster,
        log: TransactionLog,
        records: ProviderRecords,
        throttle: Throttle,
        waits: Waits | None = None,
    ) -> None:
        super().__init__(settings, chain, records, waits)
        self.wallet = wallet
        self.poster = poster
        self._log = log
        self.proof_type: int = settings.proof_type
        self._uploads = Uploads(
            chain, settings, records, self._selection, throttle, waits or Waits()
        )
        self._accepting = AcceptingProviders(settings, self._selection, self._uploads)

        def interval(posting: PostRecord) -> int:  # fixed when the file was posted; 0 if unknown
            file = self.chain.file(posting.merkle_root, posting.owner, posting.start)
            return file.proof_interval if file else 0

        self._interval = lru_cache(CACHED_INTERVALS)(interval)

    def admit(self, *, stored_size_bytes: int, waiting_bytes: int) -> None:
        self.chain.require_verified(self.proof_type)
        largest = self.largest_chunk_bytes()
        if largest is not None and stored_size_bytes > largest:
            raise ChunkTooLarge(
                f"a chunk of {show_size(stored_size_bytes)} cannot be uploaded in the "
                f"{self.settings.upload_seconds:.0f} s that a provider allows; the measured rates "
                f"allow about {show_size(largest)}",
                fitting_bytes=largest,
                hint=f"set the source's target_size to {largest} or less",
            )
        self._require_space((stored_size_bytes + waiting_bytes) * self.settings.copies)
        self.poster.require_fee(self._log)
        self._accepting.require(stored_size_bytes)

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
                f"all copies of the waiting chunks need {show_size(needed_bytes)}, but of the "
                f"{show_size(plan.space_bytes)} that {address} bought only "
                f"{show_size(plan.free_bytes)} are free",
                fitting_bytes=plan.free_bytes // self.settings.copies,
                hint=_to_buy(plan.used_bytes + needed_bytes),
            )

    def require_here(self) -> None:
        """Do nothing. Only a request can show that the network is away."""

    def largest_chunk_bytes(self) -> int | None:
        return self._selection.fitting_bytes(
            self.settings.copies_required, self.settings.upload_seconds
        )

    def cost(self, stored_size_bytes: int, chunks: int, days: int = 0) -> StorageCost:
        """Counts a transaction for each post."""
        charged = stored_size_bytes * self.settings.copies
        days = days or LEAST_DAYS
        sold = max(charged, LEAST_BYTES) if charged else 0
        price = self.chain.price(days, sold) if sold else 0
        list_usd = None
        with suppress(ChainUnreachable):  # the price in coins is useful without it
            if (list_price := self.chain.list_price()) > 0:
                list_usd = list_price * sold / LIST_PRICE_BYTES * days / LEAST_DAYS
        fee = math.ceil(post_gas(1) * Fraction(str(self.settings.gas_price)))
        return StorageCost(
            self.settings.copies, charged, days, price, chunks * fee, LEAST_BYTES, list_usd
        )

    def staging_hold_seconds(self) -> float:
        windows = self.settings.keep_staged_windows
        return windows * self.chain.proof_window() * self.chain.block_seconds() if windows else 0.0

    def bind(self) -> None:
        """Do nothing. The wallet's address identifies the files."""

    def post(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord:
        """First checks that enough providers would take the chunk."""
        return self.poster.post(
            chunk, log, ready=lambda: self._accepting.require(chunk.stored_size_bytes)
        )

    def posted_already(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord | None:
        """Settles pending transactions first; signs nothing."""
        return self.poster.find(chunk, log)

    def unknown_posts(self, archive_id: str, log: TransactionLog) -> Sequence[bytes]:
        return self.poster.unknown_posts(archive_id, log)

    def put(
        self,
        posting: PostRecord,
        staged: Path,
        progress: Callable[[int], None],
        *,
        wrong: Collection[str] = (),
    ) -> None:
        self._uploads.put(posting, staged, progress, wrong=wrong)

    def proof_window(self, posting: PostRecord, copy: Copy) -> int | None:
        if copy.last_proven is None:
            return None
        return max(copy.last_proven - posting.start, 0) // self._window_blocks(posting)

    def current_window(self, posting: PostRecord, height: int | None = None) -> int | None:
        if height is None:
            height = self.chain.height()
        return max(height - posting.start, 0) // self._window_blocks(posting)

    def window_ends_in(self, posting: PostRecord, height: int | None = None) -> float | None:
        """Assumes the current block time."""
        if height is None:
            height = self.chain.height()
        blocks = self._window_blocks(posting)
        passed = max(height - posting.start, 0) % blocks
        return (blocks - passed) * self.chain.block_seconds()

    def _window_blocks(self, posting: PostRecord) -> int:
        return self._interval(posting) or self.chain.proof_window()

    def listed_at(self) -> int:
        return self.chain.height()

    def file_pages(self, archive_id: str | None) -> Iterator[Sequence[ListedFile]]:
        default_window = self.chain.proof_window()
        for page in self.chain.file_pages(archive_id):
            yield [
                ListedFile(
                    file.merkle_root,
                    file.owner,
                    file.start,
                    file.providers,
                    file.proof_interval or default_window,
                )
                for file in page
            ]

    def proof_pages(self, provider: str) -> Iterator[Sequence[ListedProof]]:
        for page in self.chain.proof_pages(provider):
            yield [
                ListedProof(proof.merkle_root, proof.owner, proof.start, proof.last_proven)
                for proof in page
                if proof.provider in ("", provider)
            ]

    def owner(self) -> str:
        return self.wallet.address

    def posted(self, archive_id: str) -> Iterator[PostedFile]:
        return map(_posted, self.chain.files_of_archive(None, archive_id))

    def posted_as(self, merkle_root: bytes) -> Sequence[PostedFile]:
        return [_posted(file) for file in self.chain.files_of_root(merkle_root)]

    def posted_by(self, owner: str) -> Iterator[PostedFile]:
        return map(_posted, self.chain.files_of_owner(owner))

    def archives(
        self, owner: str | None = None, *, log: TransactionLog | None = None
    ) -> Mapping[str | None, ArchiveFiles]:
        """Times are estimated from heights, because nodes prune old blocks."""
        if log is not None and owner is None:
            starts = self.poster.list_archives(log, self.poster.sequence())
        else:
            starts = self.chain.archives_of(owner or self.wallet.address)
        if not starts:
            return {}
        at = self._time_of_block()
        return {
            archive: ArchiveFiles(len(heights), at(min(heights)), at(max(heights)))
            for archive, heights in starts.items()
        }

    def posted_at(self, postings: Sequence[PostRecord]) -> Sequence[datetime]:
        at = self._time_of_block()
        return [at(posting.start) for posting in postings]

    def _time_of_block(self) -> Callable[[int], datetime]:
        moment, height, seconds = self.chain.now(), self.chain.height(), self.chain.block_seconds()
        return lambda start: moment - timedelta(seconds=max(height - start, 0) * seconds)

    def listed(self, archive_id: str, owners: Collection[str]) -> Iterator[ChainFile]:
        return (
            file for file in self.chain.files_of_archive(None, archive_id) if file.owner in owners
        )


def _posted(file: ChainFile) -> PostedFile:
    return PostedFile(
        PostRecord(file.merkle_root, file.owner, file.start, file.size_bytes),
        file.proof_type,
        header_of(file.note),
        mac_of(file.note),
    )


def _to_buy(size_bytes: int) -> str:
    least = max(size_bytes, LEAST_BYTES)
    return (
        "'caf jackal price SOURCE' shows what the whole source needs; 'caf jackal buy --bytes "
        f"{least} --days {LEAST_DAYS}' buys the minimum"
    )


def open_jackal_store(
    settings: JackalSettings,
    log: TransactionLog,
    records: ProviderRecords,
    throttle: Throttle,
    waits: Waits | None = None,
) -> JackalStore:
    """Open the configured store. The wallet is opened when it is first needed.

    Raises:
        SettingsError: no LCD is set.
    """
    mnemonic = settings.mnemonic.get_secret_value() if settings.mnemonic else None
    wallet = Wallet(lambda: read_mnemonic(mnemonic, settings.mnemonic_file))
    chain = open_chain(settings, log, waits)
    poster = Poster(
        chain,
        wallet,
        settings,
        spend_cap=throttle.spend_cap,
        wait_while_paused=throttle.wait_while_paused,
        waits=waits,
    )
    return JackalStore(settings, wallet, chain, poster, log, records, throttle, waits)
