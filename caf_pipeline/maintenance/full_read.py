"""Reads a whole chunk back from one provider and verifies it, in one pass and constant memory."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from caf_pipeline.caf.merkle import MerkleTree
from caf_pipeline.encryption.opened_chunk import OpenedChunk
from caf_pipeline.errors import (
    IntegrityError,
    PrivateAddress,
    StoredChunkMissing,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.packing.staging import proof_type_of
from caf_pipeline.reading.samples import CopyFinding, SampleCheck, lost_range
from caf_pipeline.records import Chunk, Copy, Lease, PostRecord
from caf_pipeline.run_context import RunContext

Range = tuple[int, int, bytes]
"""A range, the end exclusive, and the SHA-256 of its bytes."""

OTHER_ROWS: Final = "a rebuild made its rows from other bytes than those with its Merkle root"
"""A contradiction of a restored chunk: its providers gave the rebuild other bytes.

Neither a provider nor a repair ends it: the rows are wrong.
"""

_EMPTY: Final = hashlib.sha256().digest()


class RangeCheck:
    """Counts the ranges of a file that do not match their SHA-256.

    They are ordered by start. A range that overlaps the one before it counts as differing.
    """

    def __init__(self, ranges: Iterable[Range]) -> None:
        self.differing = 0
        self._ranges = iter(ranges)
        self._position = 0
        self._taken_to = 0
        self._range: Range | None = None
        self._digest = hashlib.sha256()
        self._advance()

    def update(self, piece: bytes) -> None:
        view, begin = memoryview(piece), self._position
        self._position += len(view)
        while self._range is not None and self._range[0] < self._position:
            _, end_byte, sha256 = self._range
            upto = min(end_byte, self._position)
            self._digest.update(view[self._taken_to - begin : upto - begin])
            self._taken_to = upto
            if upto < end_byte:
                return
            self.differing += self._digest.digest() != sha256
            self._advance()

    def finish(self) -> int:
        """Ranges beyond the end of the file differ, too."""
        while self._range is not None:
            self.differing += 1
            self._advance()
        return self.differing

    def _advance(self) -> None:
        last_end = self._taken_to
        self._digest = hashlib.sha256()
        for start_byte, end_byte, sha256 in self._ranges:
            if start_byte == end_byte:
                self.differing += sha256 != _EMPTY
            elif last_end <= start_byte < end_byte:
                self._range, self._taken_to = (start_byte, end_byte, sha256), start_byte
                return
            else:
                self.differing += 1
        self._range = None


def read_back(
    context: RunContext,
    lease: Lease,
    chunk: Chunk,
    posting: PostRecord,
    provider: str,
    *,
    opened: OpenedChunk | None = None,
    ranges: Iterable[Range] = (),
    progress: Callable[[int], None] | None = None,
) -> str:
    """Read the chunk from one provider; return how it contradicts the ledger, or "".

    Also compares what a rebuild read of an unread chunk. `ranges` are of the CAF: those of an
    encrypted chunk are only compared if it is `opened`.

    Raises IntegrityError for other or fewer bytes, StoredChunkMissing, or StoreUnreachable.
    """
    tree, unread = MerkleTree(proof_type_of(chunk)), SampleCheck(chunk.unread)
    is_closed = chunk.encrypted and opened is None
    check, contradiction = RangeCheck(() if is_closed else ranges), ""

    def read() -> Iterator[bytes]:
        for piece in context.store.read(posting, 0, chunk.stored_size_bytes, provider=provider):
            context.wait_while_paused(lease.check)
            tree.update(piece)
            unread.update(piece)
            if progress:
                progress(len(piece))
            yield piece

    stored = read()
    try:
        try:
            for piece in opened.whole(stored) if opened else stored:
                check.update(piece)
        except IntegrityError as error:
            if opened is None:
                raise
            contradiction = f"its bytes have the right Merkle root, but do not open: {error}"
            for _ in stored:
                pass  # the Merkle root shows whether the provider or the chunk is wrong
    except StoreUnreachable as error:
        if lost := lost_range(
            context.store, posting, provider, tree.size_bytes, chunk.stored_size_bytes
        ):
            raise StoredChunkMissing(lost) from error
        raise
    if tree.size_bytes != chunk.stored_size_bytes or tree.root() != chunk.merkle_root:
        raise IntegrityError("its bytes do not match the chunk's Merkle root")
    if not unread.matches():
        return OTHER_ROWS
    if not contradiction and (differing := check.finish()):
        return f"{differing} of its objects' rows have another SHA-256 than the stored bytes"
    return contradiction


def check_whole_copy(
    context: RunContext, lease: Lease, chunk: Chunk, posting: PostRecord, copy: Copy
) -> CopyFinding:
    """Verify all of one copy."""
    try:
        contradiction = read_back(context, lease, chunk, posting, copy.provider)
    except (StoreError, IntegrityError) as error:
        return unreadable_copy(copy, error)
    return CopyFinding(copy, whole=True, contradiction=contradiction)


def unreadable_copy(copy: Copy, error: StoreError | IntegrityError) -> CopyFinding:
    """Return a copy's finding: only a permanent error is a fault."""
    if not error.permanent:
        private = isinstance(error, PrivateAddress)
        return CopyFinding(copy, unanswered=str(error), private=private, whole=True)
    return CopyFinding(copy, fault=str(error), whole=True)
