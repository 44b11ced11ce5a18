"""Ranges of an archived object, for what reads a file by ranges: each is one range read of its
chunk.

An object as a file that is sought is `object_file.ObjectFile`, made for reading columns and lines:
it reads ahead of what is asked for.
"""

import io
from collections.abc import Iterator

from caf_pipeline.retrieval.holders import holders_of, pieces_between
from caf_pipeline.retrieval.object_file import IN_MEMORY_BYTES
from caf_pipeline.retrieval.reader import Found
from caf_pipeline.system.ranges import FileRanges


class ObjectRanges(FileRanges):
    """An object of up to 8 MiB is read as a whole and compared first; of a larger one a range's
    length is certain, no more.

    Its methods raise ObjectMissing, StoreUnreachable and IntegrityError beside what `FileRanges`
    does.
    """

    def __init__(self, found: Found) -> None:
        """Prepare to read; nothing is asked for yet."""
        self.name = found.location.row.key
        self._found = found
        self._size_bytes = found.location.size_bytes
        self._ranges = holders_of(found.location, found.store)
        self._whole: bytes | None = None

    def read_suffix(self, size_bytes: int) -> tuple[bytes, int]:
        """See `FileRanges`."""
        return self.read(max(0, self._size_bytes - size_bytes), self._size_bytes), self._size_bytes

    def read_prefix(self, size_bytes: int) -> tuple[bytes, int]:
        """See `FileRanges`."""
        return self.read(0, min(size_bytes, self._size_bytes)), self._size_bytes

    def stream(self, start_byte: int, end_byte: int, piece_bytes: int) -> Iterator[bytes]:
        """See `FileRanges`."""
        if self._size_bytes <= IN_MEMORY_BYTES:
            wanted: Iterator[bytes] = iter((self._compared()[start_byte:end_byte],))
        else:
            wanted = pieces_between(self._ranges, start_byte, end_byte)
        for piece in wanted:
            yield from (piece[at : at + piece_bytes] for at in range(0, len(piece), piece_bytes))

    def close(self) -> None:
        """See `FileRanges`; who opened the store closes it."""

    def _compared(self) -> bytes:
        if self._whole is None:
            whole = io.BytesIO()
            self._found.write_to(whole)
            self._whole = whole.getvalue()
        return self._whole
