"""`ObjectFile`: an archived object as a read-only, seekable file."""

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
"""Larger objects are streamed, or verified in a temporary file."""

BLOCK_BYTES: Final = 1 << 20
"""Bytes read at least after a seek: readers of columns or lines go on there."""


class ObjectFile(io.RawIOBase):
    """An archived object as a read-only, seekable file. Not safe for concurrent threads.

    The ledger has a SHA-256 of each object, or of each part of a split object. Smaller ranges
    cannot be verified. Therefore:

    - An object of up to 8 MiB is verified as a whole before `read` returns its first byte.
    - A larger object that is read from the beginning, without a `seek`, is streamed: bytes are
      returned before they are verified, but not the last piece of the object, or of each part. If
      you reach the end (`read` returns b""), you have read the archived bytes. Otherwise an error
      is raised, and you must discard what you read. You can read again after `seek(0)`.
    - After a `seek` into the middle of a larger object, only the length of the bytes is certain.
      `compared` is then False.

    To avoid unverified bytes, use `ArchivedObject.pieces` or `ArchivedObject.write_to`.

    If a provider fails, the next provider continues at the same byte. Memory: 8 MiB, or twice the
    size of one read if that is more.

    Reading raises ObjectMissing, StoreUnreachable or IntegrityError, again on each read until the
    next `seek`.
    """

    def __init__(self, location: Location, store: ChunkReader) -> None:
        """Raises IntegrityError if the sizes of the parts do not add up."""
        self.location = location
        self._ranges = holders_of(location, store)
        self._starts = list(accumulate((part.size_bytes for part in self._ranges), initial=0))
        self._position = 0
        self._block = memoryview(b"")
        self._block_at = 0  # position of the block in the object
        self._stream: Iterator[bytes] | None = None  # of one range; the block is its last piece
        self._is_whole = False  # the block is the whole object
        self._pending = False  # unverified bytes were returned since the last seek
        self._error: CafError | None = None  # that ended the stream

    @property
    def compared(self) -> bool:
        """True if all bytes returned since the last `seek` belong to verified ranges."""
        return not self._pending

    def readable(self) -> bool:
        self._require_open()
        return True

    def seekable(self) -> bool:
        self._require_open()
        return True

    def tell(self) -> int:
        self._require_open()
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move to a position, which may be behind the end. No provider is asked.

        Raises io.UnsupportedOperation: zipfile expects an OSError, fsspec a ValueError.
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
        if begin + offset != self._position or self._error:
            self._end_stream()
            self._pending, self._error = False, None
        self._position = begin + offset
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        self._require_open()
        if self._error:
            raise self._error
        view = memoryview(buffer).cast("B")
        if not self._is_whole and self.location.size_bytes <= IN_MEMORY_BYTES:
            whole = io.BytesIO()
            for part, start_byte in zip(self._ranges, self._starts, strict=False):
                part.copy(whole.write, partial(cut, whole, start_byte))
            self._block, self._block_at, self._is_whole = whole.getbuffer(), 0, True
        if not len(view) or self._position >= self.location.size_bytes:
            return 0
        if not self._block_at <= self._position < self._block_at + len(self._block):
            at = self._position
            if at in self._starts:
                self._stream = self._verified_pieces(self._ranges[self._starts.index(at)])
            if self._stream:
                try:
                    block = next(self._stream)
                except CafError as error:
                    self._error = error
                    raise
            else:
                end = min(at + max(len(view), BLOCK_BYTES), self.location.size_bytes)
                block = b"".join(pieces_between(self._ranges, at, end))
            self._block, self._block_at = memoryview(block), at
        piece = self._block[self._position - self._block_at :][: len(view)]
        view[: len(piece)] = piece
        self._position += len(piece)
        self._pending |= not self._is_whole and self._stream is None
        return len(piece)

    def close(self) -> None:
        self._end_stream()
        super().close()

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError("the object is closed")

    def _verified_pieces(self, part: RangeHolders) -> Iterator[bytes]:
        """Hold back the last piece until all is verified."""
        digest, last_piece = hashlib.sha256(), b""
        pending, self._pending = self._pending, True
        for piece in part.pieces(0, part.size_bytes):
            digest.update(piece)
            if last_piece:
                yield last_piece
            last_piece = piece
        if not part.compare(digest.digest()):
            raise IntegrityError(
                f"the bytes read of '{self.location.row.key}' do not match its SHA-256",
                hint="discard them and read again from the beginning: another provider is asked",
            )
        self._pending = pending
        yield last_piece

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream = None
            self._block = memoryview(b"")


def cut(file: IO[bytes], size_bytes: int) -> None:
    """Truncate a file and go to its end."""
    file.seek(size_bytes)
    file.truncate()
