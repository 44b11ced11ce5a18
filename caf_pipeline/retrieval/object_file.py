"""One object as a file for other programs: read, sought, never written; see `ObjectFile` for what
is compared when.

Source: io.RawIOBase in Python's library reference.
"""

import hashlib
import io
import operator
import os
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import IO, Final

from typing_extensions import Buffer

from caf_pipeline.errors import CafError, IntegrityError
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.holders import RangeHolders, holders_of, pieces_between
from caf_pipeline.store.protocol import ChunkReader

IN_MEMORY_BYTES: Final = 8 << 20
"""An object is compared in memory up to this size, in a temporary file or as it passes beyond
it.
"""

BLOCK_BYTES: Final = 1 << 20
"""What is asked for at least where a large object is read from its middle: who reads columns or
lines comes back for more.
"""


class ObjectFile(io.RawIOBase):
    """An object as a file that is read and sought. Not for several threads at once.

    What is compared. The ledger has the SHA-256 of each object, of one in parts that of each part;
    nothing tells whether less than that is right, and a provider may give any bytes. So:

    - An object of up to 8 MiB is read as a whole and compared before its first byte is handed out,
      whatever is asked for. No wrong byte of it is ever handed out.
    - A larger one that is read from its beginning on, without a `seek`, streams. What is handed out
      is not compared yet: the last piece of the object, or of each part, is held back until all of
      it was. Who reaches the end (`read` returns b"") has read what was archived. Else an error
      comes in place of the end: what was handed out has to be thrown away. After `seek(0)` it can
      be read again; a provider that alone gave wrong bytes is asked no more.
    - Of a range read after a `seek` into the middle of a larger object only the length is certain,
      and that a provider which the store lists gave it; `compared` is False then.

    Who may act on no byte before all are compared takes `Found.pieces` or `Found.write_to`.

    A holder that breaks off is followed by another at the same byte. Memory is bounded by 8 MiB, or
    twice what is asked for at once. From a middle at least 1 MiB is asked for.

    Raises on reading: ObjectMissing, StoreUnreachable, IntegrityError; of a stream, again on each
    reading until a `seek`.
    """

    def __init__(self, location: Location, store: ChunkReader) -> None:
        """Prepare to read; raises IntegrityError where the parts of the object are not as long as
        it is.
        """
        self.location = location
        self._ranges = holders_of(location, store)
        self._starts = list(accumulate((one.size_bytes for one in self._ranges), initial=0))
        self._position = 0
        self._block = memoryview(b"")
        self._block_at = 0  # the block's first byte, of the object
        self._passing: Iterator[bytes] | None = (
            None  # a range from its first byte on; the block is of it
        )
        self._is_whole = False  # the block is the whole object
        self._pending = (
            False  # bytes of a range that is not compared yet were handed out, since the last seek
        )
        self._refused: CafError | None = None  # of a stream, which has no end then

    @property
    def compared(self) -> bool:
        """Whether all bytes that were handed out since the last `seek` are of ranges that were
        compared as a whole.
        """
        return not self._pending

    def readable(self) -> bool:
        """Return True."""
        self._require_open()
        return True

    def seekable(self) -> bool:
        """Return True."""
        self._require_open()
        return True

    def tell(self) -> int:
        """Return the position."""
        self._require_open()
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move, also behind the end, where there is nothing to read. No provider is asked.

        Raises: io.UnsupportedOperation: before the beginning, or `whence` is unknown. It is an
            OSError, as of a file, by which
                zipfile knows what is too short for it, and a ValueError, as of fsspec's files and
                those in memory.
        """
        self._require_open()
        offset = operator.index(offset)
        begin = {
            os.SEEK_SET: 0,
            os.SEEK_CUR: self._position,
            os.SEEK_END: self.location.size_bytes,
        }.get(whence)
        if begin is None or begin + offset < 0:
            raise io.UnsupportedOperation(f"an object has no byte {offset} from {whence}")
        if begin + offset != self._position or self._refused:
            self._stop_passing()
            self._pending, self._refused = False, None
        self._position = begin + offset
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        """Read at most what the buffer holds; 0 at the end."""
        self._require_open()
        if self._refused:
            raise self._refused
        view = memoryview(buffer).cast("B")
        if not self._is_whole and self.location.size_bytes <= IN_MEMORY_BYTES:
            self._read_whole()
        if not len(view) or self._position >= self.location.size_bytes:
            return 0
        if not self._block_at <= self._position < self._block_at + len(self._block):
            self._next_block(len(view))
        given = self._block[self._position - self._block_at :][: len(view)]
        view[: len(given)] = given
        self._position += len(given)
        self._pending |= not self._is_whole and self._passing is None
        return len(given)

    def close(self) -> None:
        """End a request that is under way."""
        self._stop_passing()
        super().close()

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError("the object is closed")

    def _read_whole(self) -> None:
        whole = io.BytesIO()
        for one, start_byte in zip(self._ranges, self._starts, strict=False):
            one.copy(whole.write, partial(cut, whole, start_byte))
        self._block, self._block_at, self._is_whole = whole.getbuffer(), 0, True

    def _next_block(self, wanted: int) -> None:
        """Let the block begin at the position, which is before the end."""
        at = self._position
        if at in self._starts:
            self._passing = self._pass(self._ranges[self._starts.index(at)])
        if self._passing:
            try:
                block = next(self._passing)
            except CafError as error:
                self._refused = error
                raise
        else:
            end = min(at + max(wanted, BLOCK_BYTES), self.location.size_bytes)
            block = b"".join(pieces_between(self._ranges, at, end))
        self._block, self._block_at = memoryview(block), at

    def _pass(self, one: RangeHolders) -> Iterator[bytes]:
        """Yield a range as it comes, its last piece when it was compared."""
        digest, held = hashlib.sha256(), b""
        pending, self._pending = self._pending, True
        for piece in one.pieces(0, one.size_bytes):
            digest.update(piece)
            if held:
                yield held
            held = piece
        if not one.compare(digest.digest()):
            raise IntegrityError(
                f"what was read of '{self.location.row.key}' is not what was archived: its SHA-256 "
                "differs",
                hint="throw away what was read, and read it from the beginning: another provider "
                "is asked",
            )
        self._pending = pending
        yield held

    def _stop_passing(self) -> None:
        """End the request for the range that passes."""
        if self._passing is not None:
            self._passing = None
            self._block = memoryview(b"")


def cut(file: IO[bytes], size_bytes: int) -> None:
    """Let a file have so many bytes, and be written from there on."""
    file.seek(size_bytes)
    file.truncate()
