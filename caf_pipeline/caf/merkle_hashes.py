"""The block size and the hash functions of the Jackal Merkle tree."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import blake3
from typing_extensions import Buffer

BLOCK_BYTES: Final = 10_240


def _hash_by(make: Callable[[Buffer], Any]) -> Callable[[Buffer], bytes]:
    return lambda data: make(data).digest()


@dataclass(frozen=True, slots=True)
class Hashes:
    """The hash functions of a proof type, and the size of its nodes."""

    block: Callable[[Buffer], bytes]
    tree: Callable[[Buffer], bytes]
    size_bytes: int


HASHES: Final = {
    0: Hashes(_hash_by(hashlib.sha256), _hash_by(hashlib.sha3_512), 64),
    3: Hashes(_hash_by(blake3.blake3), _hash_by(blake3.blake3), 32),
}
