"""The bytes of an encrypted chunk, opened by range. Every segment is authenticated first."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from caf_pipeline.caf.archive import RangeSource
from caf_pipeline.errors import DamagedPayload, IntegrityError
from caf_pipeline.formats import age
from caf_pipeline.ledger.records import ChunkHeader

PIECE_BYTES: Final = 1 << 20


class OpenedChunk:
    """An encrypted chunk with its payload key. Ranges are of the CAF, end exclusive.

    Thread-safe. Knows the size from the ledger, so a truncated file is noticed.
    """

    def __init__(self, header: ChunkHeader, payload: age.Payload) -> None:
        self._payload = payload
        self._payload_start = header.payload_start
        self.size_bytes = header.caf_size_bytes

    @classmethod
    def open(cls, header: ChunkHeader, identities: Sequence[age.Identity]) -> "OpenedChunk":
        """Raises NoMatchingIdentity, DamagedHeader, or ForgedHeader."""
        file_key = age.open_header(age.parse_header(header.header), identities)
        return cls(header, age.Payload(file_key, header.nonce))

    def stored_range(self, start_byte: int, end_byte: int) -> tuple[int, int]:
        """Return the range of the stored bytes with the segments of a range."""
        first, last = age.sealed_range(start_byte, end_byte, self.size_bytes)
        return self._payload_start + first, self._payload_start + last

    def pieces(self, sealed: Iterable[bytes], start_byte: int, end_byte: int) -> Iterator[bytes]:
        """Yield a range, of at least a byte, from the bytes of its `stored_range`.

        Pieces have at most 1 MiB. Raises IntegrityError for a segment that is not authentic.
        """
        first, last = age.sealed_range(start_byte, end_byte, self.size_bytes)
        number, left_bytes = first // age.SEALED_SEGMENT_BYTES, last - first
        has_last = last == age.sealed_size(self.size_bytes)
        pending = b""
        for piece in sealed:
            data = pending + piece if pending else piece
            is_end = len(data) == left_bytes
            whole = len(data) if is_end else len(data) - len(data) % age.SEALED_SEGMENT_BYTES
            pending = data[whole:]
            if not whole:
                continue
            try:
                plain = memoryview(
                    self._payload.open(number, memoryview(data)[:whole], is_end=is_end and has_last)
                )
            except DamagedPayload as error:
                raise IntegrityError(f"other bytes were sealed: {error}") from error
            position = number * age.SEGMENT_BYTES
            number, left_bytes = number + whole // age.SEALED_SEGMENT_BYTES, left_bytes - whole
            wanted = plain[max(start_byte - position, 0) : max(end_byte - position, 0)]
            for at in range(0, len(wanted), PIECE_BYTES):
                yield bytes(wanted[at : at + PIECE_BYTES])
        if left_bytes:
            raise IntegrityError(f"the chunk is truncated: {left_bytes} bytes are missing")


class OpenedSource:
    """The CAF in a file of stored bytes, as a `RangeSource`. Raises IntegrityError."""

    def __init__(self, stored: RangeSource, chunk: OpenedChunk) -> None:
        self._stored = stored
        self._chunk = chunk

    def read(self, start_byte: int, end_byte: int) -> bytes:
        """Return fewer bytes if the CAF ends earlier."""
        end_byte = min(end_byte, self._chunk.size_bytes)
        if start_byte >= end_byte:
            return b""
        sealed = self._stored.read(*self._chunk.stored_range(start_byte, end_byte))
        return b"".join(self._chunk.pieces([sealed], start_byte, end_byte))

    def read_suffix(self, size_bytes: int) -> tuple[bytes, int]:
        total = self._chunk.size_bytes
        return self.read(max(total - size_bytes, 0), total), total
