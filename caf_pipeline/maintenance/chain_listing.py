"""Compares the located chunks of all sources with the store's lists.

The result only makes chunks suspect (see `scrub`): a node may list too little or too much.

Source: docs/explanation/jackal.md.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from sys import intern
from typing import Final, TypeVar

from caf_pipeline.errors import HeldByOther, LeaseLost, StoreError
from caf_pipeline.ledger.records import LocatedCopies, lists_lease
from caf_pipeline.maintenance.scrub import WINDOWS_BEHIND
from caf_pipeline.run_context import RunContext
from caf_pipeline.system.quantities import counted

AGAIN_SECONDS: Final = 50 * 60.0
"""Seconds between passes: less than the hour between runs of the watch."""

RETRY_SECONDS: Final = 10 * 60.0
"""Seconds to the next pass after a failure, so that not all sources repeat it."""

FILE_PAGES: Final = 10_000
PROOF_PAGES: Final = 10_000
PROVIDER_PAGES: Final = 2_000
"""Page limits of one pass: for files, for all proofs, and for the proofs of one provider.

A page takes about 0.1 s at a distant node: half an hour in total.
"""

T = TypeVar("T")
_Place = tuple[bytes, str, int]


@dataclass
class ChainListing:
    """The result of one pass, for all sources.

    `listed` and `copies` count chunks and proofs in the lists. `left_out` lists have more pages
    than the limit. `trouble` cut the pass off.
    """

    began: datetime | None = None
    chunks: int = 0
    listed: int = 0
    copies: int = 0
    suspected: set[int] = field(default_factory=set)
    pages: int = 0
    left_out: list[str] = field(default_factory=list)
    trouble: str = ""

    def described(self) -> str:
        line = (
            f"{counted(self.pages, 'page')} of the chain's lists cover {self.listed:,} of "
            f"{counted(self.chunks, 'located chunk')} of all sources and the proofs of "
            f"{counted(self.copies, 'copy', 'copies')}; {self.suspected_chunks:,} suspected"
        )
        if self.left_out:
            line += f"; left out: {', '.join(self.left_out)}"
        return f"{line}; cut off: {self.trouble}" if self.trouble else line

    @property
    def suspected_chunks(self) -> int:
        return len(self.suspected)


def check_chain_listing(context: RunContext) -> ChainListing | None:
    """Mark suspect chunks if a pass is due.

    A chunk is suspect if:

    - A complete list of files does not have it, or has too few providers.
    - A copy is not listed any more.
    - The last proof of a copy is more than `WINDOWS_BEHIND` windows old.
    - A complete list of a provider's proofs has no proof of the copy.

    Returns None if no pass is due or possible. Memory: about 1 KB for each located chunk.
    """
    listings = context.ledger.chain_listings
    if not listings.begin(context.store.name, RETRY_SECONDS):
        return None
    listing = ChainListing()
    try:
        height = context.store.listed_at()
        if height is None:
            return None
        with context.lease(lists_lease(context.store.name)) as lease:
            listing.began, located = listings.located_copies()
            listing.chunks = len(located)
            before_page = partial(context.wait_while_paused, lease.check)
            files = _check_files(context, located, listing, before_page) if located else {}
            listings.suspect(listing.began, listing.suspected)  # the list of proofs may fail
            _check_proofs(context, height, files, listing, before_page)
            listings.suspect(listing.began, listing.suspected)
            lease.check()
            whole = not listing.left_out
            listings.end(context.store.name, listing.began, AGAIN_SECONDS, whole=whole)
    except HeldByOther:
        return None
    except (StoreError, LeaseLost) as error:
        listing.trouble = str(error)
    return listing


@dataclass(frozen=True, slots=True)
class _ListedFile:
    caf_file_id: int
    providers: tuple[str, ...]
    window_blocks: int


def _check_files(
    context: RunContext,
    located: Sequence[LocatedCopies],
    listing: ChainListing,
    before_page: Callable[[], None],
) -> Mapping[_Place, _ListedFile]:
    unlisted = {chunk.place: chunk for chunk in located}
    complete: dict[_Place, _ListedFile] = {}
    suspected = set[int]()
    archives = {chunk.archive_id for chunk in located}
    pages = context.store.file_pages(archives.pop() if len(archives) == 1 else None)
    for page in _bounded("files", pages, FILE_PAGES, listing, before_page):
        for file in page:
            chunk = unlisted.pop((file.merkle_root, file.owner, file.start), None)
            if chunk is None:
                continue
            listing.listed += 1
            providers = tuple(intern(provider) for provider in dict.fromkeys(file.providers))
            if len(providers) < context.store.required_copies or not set(providers).issuperset(
                chunk.providers
            ):
                suspected.add(chunk.caf_file_id)
            else:
                complete[chunk.place] = _ListedFile(
                    chunk.caf_file_id, providers, file.window_blocks
                )
    listing.suspected |= suspected  # not if the list failed
    if not listing.left_out:
        listing.suspected.update(chunk.caf_file_id for chunk in unlisted.values())
    return complete


def _check_proofs(
    context: RunContext,
    height: int,
    files: Mapping[_Place, _ListedFile],
    listing: ChainListing,
    before_page: Callable[[], None],
) -> None:
    """Providers of most copies come first."""
    pages_before = listing.pages
    unproven = defaultdict[str, set[int]](set)
    for file in files.values():
        for provider in file.providers:
            unproven[provider].add(file.caf_file_id)
    for provider, ids in sorted(unproven.items(), key=lambda item: len(item[1]), reverse=True):
        limit = min(PROVIDER_PAGES, PROOF_PAGES - (listing.pages - pages_before))
        left_out = len(listing.left_out)
        pages = context.store.proof_pages(provider)
        for page in _bounded(f"proofs of {provider}", pages, limit, listing, before_page):
            for proof in page:
                entry = files.get((proof.merkle_root, proof.owner, proof.start))
                if entry is None or provider not in entry.providers:
                    continue
                listing.copies += 1
                ids.discard(entry.caf_file_id)
                proven = max(proof.last_proven - proof.start, 0) // entry.window_blocks
                if max(height - proof.start, 0) // entry.window_blocks - proven > WINDOWS_BEHIND:
                    listing.suspected.add(entry.caf_file_id)
        if len(listing.left_out) == left_out:
            listing.suspected |= ids


def _bounded(
    what: str,
    pages: Iterator[Sequence[T]],
    limit: int,
    listing: ChainListing,
    before_page: Callable[[], None],
) -> Iterator[Sequence[T]]:
    """A list that reaches the limit counts as left out."""
    for _ in range(limit):
        before_page()
        page = next(pages, None)
        if page is None:
            return
        listing.pages += 1
        yield page
    listing.left_out.append(f"{what} after {counted(limit, 'page')}")
