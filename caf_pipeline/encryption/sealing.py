"""Seals the bytes of one chunk while they are packed.

The file key is random. It is in memory, and in a sealed journal. One nonce never meets two
plaintexts: a writer only appends. To replace sealed bytes, a new writer seals everything again.

Source: "Packing" in docs/explanation/encryption.md.
"""

import io
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from typing_extensions import Buffer

from caf_pipeline.caf.archive import DEFAULT_LIMITS
from caf_pipeline.formats import age

MAX_PRIVATE_CAF_BYTES: Final = 34_350_303_456
"""Largest CAF whose encrypted form, with a header of 1 MiB, has at most 32 GiB."""

PRIVATE_LIMITS: Final = replace(DEFAULT_LIMITS, max_bytes=MAX_PRIVATE_CAF_BYTES)

assert (
    age.MAX_HEADER_BYTES + age.NONCE_BYTES + age.sealed_size(MAX_PRIVATE_CAF_BYTES)
    == DEFAULT_LIMITS.max_bytes
)

_SEALED_AT_ONCE: Final = 16 * age.SEGMENT_BYTES
"""The processor's cache holds them, and a heap gives the same memory again."""

ReadAt = Callable[[int, int], bytes]
"""Returns bytes `[start, end)` of a file."""


class SegmentWriter:
    """Seals plaintext that arrives in order. The open segment, up to 64 KiB, stays in memory."""

    def __init__(self) -> None:
        self.file_key = secrets.token_bytes(age.FILE_KEY_BYTES)
        self.nonce = secrets.token_bytes(age.NONCE_BYTES)
        self.payload = age.Payload(self.file_key, self.nonce)
        self._segment_count = 0
        self._open = b""

    @property
    def position(self) -> tuple[int, bytes]:
        """The number of sealed segments, and the plaintext of the open one."""
        return self._segment_count, self._open

    def write(self, plaintext: Buffer) -> Iterator[bytearray]:
        """Yield the segments that are full and certainly not the last, at most 1 MiB at a time."""
        plain = memoryview(plaintext).cast("B")
        # The last segment of a file has another nonce, so a full one waits for the next byte.
        missing = age.SEGMENT_BYTES - len(self._open)
        if len(plain) <= missing:
            self._open += plain
            return
        if self._open:
            begun, self._open = self._open + plain[:missing], b""
            yield self._seal(begun)
            plain = plain[missing:]
        while len(plain) > age.SEGMENT_BYTES:
            whole = (len(plain) - 1) // age.SEGMENT_BYTES * age.SEGMENT_BYTES
            taken = min(whole, _SEALED_AT_ONCE)
            yield self._seal(plain[:taken])
            plain = plain[taken:]
        self._open = bytes(plain)

    def _seal(self, plain: Buffer) -> bytearray:
        first = self._segment_count
        self._segment_count += len(memoryview(plain)) // age.SEGMENT_BYTES
        return self.payload.seal(first, plain, is_end=False)

    def finish(self) -> bytearray:
        """Return the last segment. Nothing may be written afterwards."""
        last, self._open = self._open, b""
        self._segment_count += 1
        return self.payload.seal(self._segment_count - 1, last, is_end=True)

    def reopen(self, open_segment: bytes) -> None:
        """Replace the open segment, which was never sealed."""
        self._open = open_segment

    def read(self, read_sealed: ReadAt, start_byte: int, end_byte: int) -> bytes:
        """Return written plaintext. `read_sealed` reads the payload's file."""
        return read_unfinished(self.payload, self.position, read_sealed, start_byte, end_byte)


def read_unfinished(
    payload: age.Payload,
    position: tuple[int, bytes],
    read_sealed: ReadAt,
    start_byte: int,
    end_byte: int,
) -> bytes:
    """Return plaintext that a `SegmentWriter` has written up to its `position`.

    Raises DamagedPayload if the file does not have the segments.
    """
    segment_count, open_segment = position
    sealed_end = segment_count * age.SEGMENT_BYTES
    pieces: list[bytes | bytearray] = []
    if start_byte < min(end_byte, sealed_end):
        first = start_byte // age.SEGMENT_BYTES
        last = (min(end_byte, sealed_end) - 1) // age.SEGMENT_BYTES
        sealed = read_sealed(
            first * age.SEALED_SEGMENT_BYTES, (last + 1) * age.SEALED_SEGMENT_BYTES
        )
        begin = first * age.SEGMENT_BYTES
        plain = payload.open(first, sealed, is_end=False)
        pieces.append(plain[start_byte - begin : min(end_byte, sealed_end) - begin])
    if end_byte > sealed_end:
        pieces.append(open_segment[max(0, start_byte - sealed_end) : end_byte - sealed_end])
    return b"".join(pieces)


def sealed_bytes(size_bytes: int) -> int:
    """Return the bytes of whole segments after `size_bytes` of plaintext."""
    return max(0, size_bytes - 1) // age.SEGMENT_BYTES * age.SEALED_SEGMENT_BYTES


class SealedSpool(io.RawIOBase):
    """A new temporary file, written in order, whose key stays in memory."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._path = path
        self._segments = SegmentWriter()
        self._size_bytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size_bytes

    def write(self, data: Buffer, /) -> int:
        size_bytes = memoryview(data).nbytes
        self._file.writelines(self._segments.write(data))
        self._size_bytes += size_bytes
        return size_bytes

    def pieces(self, piece_bytes: int) -> Iterator[bytes]:
        self._file.flush()
        with self._path.open("rb") as file:
            for start in range(0, self._size_bytes, piece_bytes):
                end = min(start + piece_bytes, self._size_bytes)
                yield self._segments.read(partial(read_at, file.fileno()), start, end)

    def close(self) -> None:
        self._file.close()
        super().close()


def read_at(descriptor: int, start_byte: int, end_byte: int) -> bytes:
    """Return bytes of an open file."""
    return os.pread(descriptor, end_byte - start_byte, start_byte)
