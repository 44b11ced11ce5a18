"""The bytes of an encrypted chunk, opened by range. Every segment is authenticated first."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Final

from caf_pipeline.caf.archive import RangeSource
from caf_pipeline.encryption.identities import Identity
from caf_pipeline.errors import DamagedPayload, IntegrityError, NoMatchingIdentity
from caf_pipeline.formats import age
from caf_pipeline.ledger.records import ChunkHeader

PIECE_BYTES: Final = 1 << 20


class OpenedChunk:
    """An encrypted chunk with its payload key. Ranges are of the CAF, end exclusive.

    Thread-safe. Knows the size from the ledger, so a truncated file is noticed.

    Attributes:
        opened_with: recipient of the identity that opened it; "" if no identity was needed.
    """

    def __init__(self, header: ChunkHeader, payload: age.Payload, opened_with: str = "") -> None:
        self._payload = payload
        self._payload_start = header.payload_start
        self._header_sha256 = header.sha256
        self.size_bytes = header.caf_size_bytes
        self.opened_with = opened_with

    @classmethod
    def open(cls, header: ChunkHeader, identities: Sequence[Identity]) -> "OpenedChunk":
        """Raises NoMatchingIdentity, DamagedHeader, or ForgedHeader."""
        parsed = age.parse_header(header.header)
        for identity in identities:
            with suppress(NoMatchingIdentity):
                payload = age.Payload(age.open_header(parsed, [identity]), header.nonce)
                return cls(header, payload, str(identity.recipient))
        recipients = ", ".join(map(age.shortened, header.recipients)) or "not recorded"
        tried = ", ".join(age.shortened(str(identity.recipient)) for identity in identities)
        raise NoMatchingIdentity(
            f"no identity opens the chunk; its recipients: {recipients}; tried: the identity of "
            f"{tried}",
            hint="configure the identity of one of its recipients, such as in "
            "encryption.identity_file",
        )

    def stored_range(self, start_byte: int, end_byte: int) -> tuple[int, int]:
        """Return the range of the stored bytes with the segments of a range."""
        first, last = age.sealed_range(start_byte, end_byte, self.size_bytes)
        return self._payload_start + first, self._payload_start + last

    def caf_range(self, start_byte: int, end_byte: int) -> tuple[int, int]:
        """Return the range of the CAF in the segments that a range of stored bytes touches."""
        first = max(start_byte - self._payload_start, 0) // age.SEALED_SEGMENT_BYTES
        last = -(-max(end_byte - self._payload_start, 0) // age.SEALED_SEGMENT_BYTES)
        return first * age.SEGMENT_BYTES, min(last * age.SEGMENT_BYTES, self.size_bytes)

    def pieces(self, sealed: Iterable[bytes], start_byte: int, end_byte: int) -> Iterator[bytes]:
        """Yield a range, of at least a byte, from the bytes of its `stored_range`.

        Pieces have at most 1 MiB. Raises IntegrityError for a segment that is not authentic, and
        at the end if there were fewer or more bytes.
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
            requested = plain[max(start_byte - position, 0) : max(end_byte - position, 0)]
            for at in range(0, len(requested), PIECE_BYTES):
                yield bytes(requested[at : at + PIECE_BYTES])
        if left_bytes or pending:
            raise IntegrityError("it has fewer or more bytes than were sealed")

    def whole(self, stored: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the CAF from all stored bytes, as `pieces`.

        Raises IntegrityError for another header than the ledger's, too.
        """
        remaining, begin = iter(stored), b""
        for piece in remaining:
            begin += piece
            if len(begin) >= self._payload_start:
                break
        header, rest = begin[: self._payload_start], begin[self._payload_start :]
        if hashlib.sha256(header).digest() != self._header_sha256:
            raise IntegrityError("its header is not the header in the ledger")
        yield from self.pieces(chain([rest], remaining), 0, self.size_bytes)


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
