"""The bulk look: holds all located chunks against the store's own lists, a page at a time, for all
sources at once.

What a list says, or does not say, of a chunk makes it suspect and nothing else: the proof watch
(`scrub`) then looks at the chunk itself first, which alone counts windows and finds damage. A node
that lists too little, or too much, proves nothing.

Source: docs/explanation/jackal.md.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from sys import intern
from typing import Final, TypeVar

from caf_pipeline.errors import HeldByOther, LeaseLost, StoreError
from caf_pipeline.ledger.records import LocatedCopies, lists_lease
from caf_pipeline.maintenance.scrub import WINDOWS_BEHIND
from caf_pipeline.run_context import RunContext
from caf_pipeline.store.protocol import Lease
from caf_pipeline.system.quantities import counted

AGAIN_SECONDS: Final = 50 * 60.0
"""A pass is due so long after the last one began: within the hour, after which the same source's
watch runs again.
"""

RETRY_SECONDS: Final = 10 * 60.0
"""A pass is due so long after one that was cut off or whose process died; 100 sources must not each
read what one could not.
"""

FILE_PAGES: Final = 10_000
PROOF_PAGES: Final = 10_000
PROVIDER_PAGES: Final = 2_000
"""Pages that one pass reads at most: of files, of proofs in all, of proofs of one provider.

A page is 500 entries and two requests, some 0.1 s at a node of some distance: together they are
half an hour.
"""

T = TypeVar("T")
_Place = tuple[bytes, str, int]


@dataclass
class ChainListing:
    """What a pass through the store's lists found, of all sources.

    Attributes:
        began: the time of which the ledger's chunks are; None where it ended before.
        chunks: located ones, all of which it is to look for.
        listed: those of them that it found in the list of files.
        copies: of them, whose last proof it saw in a provider's list.
        suspected: chunks to be looked at first.
        pages: that were read.
        left_out: what it did not go through, since that has more pages than it may read.
        trouble: what cut it off; "" where nothing did.
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
        """Say in a line what was looked at, and what was not."""
        said = (
            f"the lists of {self.listed:,} of {counted(self.chunks, 'located chunk')} of all "
            "sources and the proofs of"
            f" {counted(self.copies, 'copy', 'copies')} were looked at, by "
            f"{counted(self.pages, 'page')};"
            f" {self.suspected_chunks:,} suspected"
        )
        if self.left_out:
            said += f"; left out: {', '.join(self.left_out)}"
        return f"{said}; cut off: {self.trouble}" if self.trouble else said

    @property
    def suspected_chunks(self) -> int:
        """How many chunks are suspected."""
        return len(self.suspected)


def look_in_bulk(context: RunContext) -> ChainListing | None:
    """Go through the store's lists, where that is due, and let chunks be looked at first of which
    they say something amiss.

    Suspected is a chunk that a whole list of files does not have, that has fewer providers there
    than copies are required, that has lost a copy which was listed before, or whose last proof of a
    copy is more than `WINDOWS_BEHIND` windows old or is missing in a whole list of the provider's
    proofs. A list that breaks off says nothing of what it did not get to. No chunk's state changes.

    One pass an hour serves all sources of the ledger. None where another run's is less than that
    ago or under way, and where the store has no lists. Memory: some 1 KB a located chunk. A store
    that fails is reported in the result, and the single looks may go on.

    Raises:
        LedgerError: the ledger failed.
    """
    if not context.ledger.chain_listings.begin(context.store.name, RETRY_SECONDS):
        return None
    found = ChainListing()
    try:
        height = context.store.listed_at()
        if height is None:
            return None
        with context.lease(lists_lease(context.store.name)) as lease:
            _go_through(context, lease, height, found)
    except HeldByOther:
        return None
    except (StoreError, LeaseLost) as error:
        found.trouble = str(error)
    return found


def _go_through(context: RunContext, lease: Lease, height: int, found: ChainListing) -> None:
    found.began, located = context.ledger.chain_listings.located_copies()
    found.chunks = len(located)

    def before_page() -> None:
        context.wait_while_paused(lease.check)

    listed = _look_for_files(context, located, found, before_page) if located else {}
    context.ledger.chain_listings.suspect(
        found.began, found.suspected
    )  # before the proofs, which may be cut off
    _look_at_proofs(context, height, listed, found, before_page)
    context.ledger.chain_listings.suspect(found.began, found.suspected)
    lease.check()
    context.ledger.chain_listings.end(
        context.store.name, found.began, AGAIN_SECONDS, whole=not found.left_out
    )


@dataclass(frozen=True, slots=True)
class _Listed:
    caf_file_id: int
    providers: tuple[str, ...]
    window_blocks: int


def _look_for_files(
    context: RunContext,
    located: Sequence[LocatedCopies],
    found: ChainListing,
    before_page: Callable[[], None],
) -> Mapping[_Place, _Listed]:
    """Look for the chunks in the list of files; return those whose copies are all there."""
    unseen = {chunk.place: chunk for chunk in located}
    listed: dict[_Place, _Listed] = {}
    amiss = set[int]()
    archives = {chunk.archive_id for chunk in located}
    pages = context.store.file_pages(archives.pop() if len(archives) == 1 else None)
    for page in _bounded("files", pages, FILE_PAGES, found, before_page):
        for file in page:
            chunk = unseen.pop((file.merkle_root, file.owner, file.start), None)
            if chunk is None:
                continue
            found.listed += 1
            providers = tuple(intern(one) for one in dict.fromkeys(file.providers))
            if len(providers) < context.store.required_copies or not set(providers).issuperset(
                chunk.providers
            ):
                amiss.add(chunk.caf_file_id)
            else:
                listed[chunk.place] = _Listed(chunk.caf_file_id, providers, file.window_blocks)
    found.suspected |= amiss  # only where the list did not break off
    if not found.left_out:
        found.suspected.update(chunk.caf_file_id for chunk in unseen.values())
    return listed


def _look_at_proofs(
    context: RunContext,
    height: int,
    listed: Mapping[_Place, _Listed],
    found: ChainListing,
    before_page: Callable[[], None],
) -> None:
    """Look at the last proof of each copy in its provider's list, of those first that have most of
    the copies.
    """
    before = found.pages
    unseen = defaultdict[str, set[int]](set)
    for one in listed.values():
        for provider in one.providers:
            unseen[provider].add(one.caf_file_id)
    for provider, its in sorted(unseen.items(), key=lambda item: len(item[1]), reverse=True):
        most, left_out = (
            min(PROVIDER_PAGES, PROOF_PAGES - (found.pages - before)),
            len(found.left_out),
        )
        for page in _bounded(
            f"proofs of {provider}", context.store.proof_pages(provider), most, found, before_page
        ):
            for proof in page:
                chunk = listed.get((proof.merkle_root, proof.owner, proof.start))
                if chunk is None or provider not in chunk.providers:
                    continue
                found.copies += 1
                its.discard(chunk.caf_file_id)
                proven = max(proof.last_proven - proof.start, 0) // chunk.window_blocks
                if max(height - proof.start, 0) // chunk.window_blocks - proven > WINDOWS_BEHIND:
                    found.suspected.add(chunk.caf_file_id)
        if len(found.left_out) == left_out:
            found.suspected |= its


def _bounded(
    what: str,
    pages: Iterator[Sequence[T]],
    most: int,
    found: ChainListing,
    before_page: Callable[[], None],
) -> Iterator[Sequence[T]]:
    """Yield pages, at most so many, and tell in `found` of what is left out."""
    for _ in range(most):  # a list of just as many pages counts as one of more
        before_page()
        page = next(pages, None)
        if page is None:
            return
        found.pages += 1
        yield page
    found.left_out.append(f"{what} after {counted(most, 'page')}")
