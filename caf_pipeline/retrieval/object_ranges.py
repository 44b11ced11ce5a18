"""`ObjectRanges`: an archived object for code that reads a file by ranges."""

import io
from collections.abc import Iterator

from caf_pipeline.retrieval.holders import holders_of, pieces_between
from caf_pipeline.retrieval.object_file import IN_MEMORY_BYTES
from caf_pipeline.retrieval.reader import ArchivedObject
from caf_pipeline.system.ranges import FileRanges


class ObjectRanges(FileRanges):
    """Ranges of an archived object, without read-ahead.

    Only objects of up to 8 MiB are verified. Raises like `ObjectFile`.
    """

    def __init__(self, archived: ArchivedObject) -> None:
        self.name = archived.location.row.key
        self._archived = archived
        self._size_bytes = archived.location.size_bytes
        self._ranges = holders_of(archived.location, archived.store)
        self._whole: bytes | None = None

    def read_suffix(self, size_bytes: int) -> tuple[bytes, int]:
        return self.read(max(0, self._size_bytes - size_bytes), self._size_bytes), self._size_bytes

    def read_prefix(self, size_bytes: int) -> tuple[bytes, int]:
        return self.read(0, min(size_bytes, self._size_bytes)), self._size_bytes

    def stream(self, start_byte: int, end_byte: int, piece_bytes: int) -> Iterator[bytes]:
        if self._size_bytes > IN_MEMORY_BYTES:
            pieces = pieces_between(self._ranges, start_byte, end_byte)
        else:
            if self._whole is None:
                body = io.BytesIO()
                self._archived.write_to(body)
                self._whole = body.getvalue()
            pieces = iter((self._whole[start_byte:end_byte],))
        for piece in pieces:
            yield from (piece[at : at + piece_bytes] for at in range(0, len(piece), piece_bytes))

    def close(self) -> None:
        """Do nothing: the caller closes the store."""
