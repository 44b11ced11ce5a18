"""S3's checksum algorithms. Digests are big-endian.

Source: "Checking object integrity" in the Amazon S3 User Guide.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from awscrt import checksums as awscrt_checksums
from typing_extensions import Buffer


class Digest(Protocol):
    """A running checksum."""

    def update(self, data: Buffer, /) -> None: ...

    def digest(self) -> bytes: ...


class _Crc:
    def __init__(self, function: Callable[[Buffer, int], int], size_bytes: int) -> None:
        self._function = function
        self._size_bytes = size_bytes
        self._value = 0

    def update(self, data: Buffer, /) -> None:
        self._value = self._function(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._size_bytes, "big")


def new_crc64nvme() -> Digest:
    """Return a running CRC-64/NVME."""
    return _Crc(awscrt_checksums.crc64nvme, 8)


def combine_crc64nvme(parts: Iterable[tuple[bytes, int]]) -> bytes:
    """Return the CRC-64/NVME of consecutive parts from digests and sizes in bytes."""
    value = 0
    for digest, size_bytes in parts:
        value = awscrt_checksums.combine_crc64nvme(value, int.from_bytes(digest, "big"), size_bytes)
    return value.to_bytes(8, "big")


_ALGORITHMS: Final[dict[str, Callable[[], Digest]]] = {
    "sha256": hashlib.sha256,
    "sha1": hashlib.sha1,
    "crc32": lambda: _Crc(zlib.crc32, 4),
    "crc32c": lambda: _Crc(awscrt_checksums.crc32c, 4),
    "crc64nvme": new_crc64nvme,
}


def new_digest(algorithm: str) -> Digest | None:
    """Return a running checksum, or None for an unknown algorithm."""
    make = _ALGORITHMS.get(algorithm)
    return make() if make else None
