"""The Jackal Merkle root of a file, streaming.

The file is cut into blocks of 10,240 bytes, the last one short. A leaf hashes the hash of the block's number in decimal
followed by its bytes as lower-case hex; leaves are padded with zero hashes to a power of two; a node hashes its two
children. Proof type 0 takes SHA-256 for the block and SHA3-512 for the tree, type 3 BLAKE3-256 for both.

Source: the trees of canine-chain v5; vectors in the tests.
"""

import hashlib
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

import blake3
import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from caf_pipeline.errors import ArchiveError, UsageError

BLOCK_BYTES: Final = 10_240

ProofType = Literal[0, 3]

_BATCH_BLOCKS: Final = 64  # made hex at once: below 16 numpy's overhead shows, above 100 the batch leaves the cache
_BATCH_BYTES: Final = _BATCH_BLOCKS * BLOCK_BYTES
_NUMBER_BYTES: Final = 20  # room before a block's hex for any 64-bit number in decimal
_STATE: Final = struct.Struct("<4sBQHQ")  # magic, proof type, leaves, bytes of the open block, bit set of stacked levels
_STATE_MAGIC: Final = b"cMT1"


def _hash_by(make: Callable[[Buffer], Any]) -> Callable[[Buffer], bytes]:
    return lambda data: make(data).digest()


@dataclass(frozen=True, slots=True)
class _Hashes:
    block: Callable[[Buffer], bytes]
    tree: Callable[[Buffer], bytes]
    size_bytes: int


_HASHES: Final = {
    0: _Hashes(_hash_by(hashlib.sha256), _hash_by(hashlib.sha3_512), 64),
    3: _Hashes(_hash_by(blake3.blake3), _hash_by(blake3.blake3), 32),
}


class MerkleTree:
    """Takes a file's bytes in order, in pieces of any size, and knows the root of what it has taken.

    Memory is one hash a level and two batches of 64 blocks. Pieces of a MiB and more are hashed without being copied, and
    most of the time without the interpreter's lock. One thread at a time.
    """

    def __init__(self, proof_type: int) -> None:
        """Begin an empty tree; raises UsageError for a proof type other than 0 and 3."""
        if proof_type not in _HASHES:
            raise UsageError(f"There is no proof type {proof_type}.", hint="Jackal knows 0 and 3.")
        self.proof_type = proof_type
        self._hashes = _HASHES[proof_type]
        self._leaf_count = 0
        self._pending = bytearray()  # less than a batch that is not hashed yet, from a block's beginning on
        self._levels: list[bytes | None] = []  # a binary counter: the full subtree of 2**n leaves that waits for another
        self._text = _HexText()

    @property
    def size_bytes(self) -> int:
        """How many bytes were taken."""
        return self._leaf_count * BLOCK_BYTES + len(self._pending)

    def update(self, data: Buffer) -> None:
        """Take the file's next bytes."""
        view = memoryview(data).cast("B")
        position = 0
        if self._pending:
            position = min(_BATCH_BYTES - len(self._pending), len(view))
            self._pending += view[:position]
            if len(self._pending) < _BATCH_BYTES:
                return
            self._hash_pending()
        end = position + (len(view) - position) // _BATCH_BYTES * _BATCH_BYTES
        for start in range(position, end, _BATCH_BYTES):
            self._add_blocks(view[start : start + _BATCH_BYTES])
        self._pending += view[end:]

    def root(self) -> bytes:
        """Return the root of the bytes taken so far: 64 bytes for type 0, 32 for type 3. More may be taken afterwards.

        Raises:
            ArchiveError: nothing was taken; an empty file has no root.
        """
        if not self.size_bytes:
            raise ArchiveError("An empty file has no Merkle root.", hint="Jackal cannot store a file of no bytes.")
        self._hash_pending()
        if self._pending:
            finished = self.copy()
            finished._add_blocks(memoryview(self._pending))
            finished._pending.clear()
            return finished.root()
        tree_hash = self._hashes.tree
        depth = (self._leaf_count - 1).bit_length()
        padding = bytes(self._hashes.size_bytes)  # stands at the leaves' level and is not hashed itself
        right: bytes | None = None
        for left in self._levels[:depth]:
            if left is not None:
                right = tree_hash(left + (right or padding))
            elif right is not None:
                right = tree_hash(right + padding)
            padding = tree_hash(padding + padding)
        root = right or self._levels[depth]
        assert root is not None
        return root

    def copy(self) -> Self:
        """Return an independent tree that has taken the same bytes."""
        return self.from_state(self.state())

    def state(self, *, open_block: bool = True) -> bytes:
        """Return all that is needed to go on later, in another process too: at most some 15 KB.

        Without its open block it is at most 4 KB: the tree as it was at the last whole block, which takes the bytes after
        that once more.
        """
        self._hash_pending()
        present = sum(1 << level for level, node in enumerate(self._levels) if node is not None)
        pending = self._pending if open_block else b""
        head = _STATE.pack(_STATE_MAGIC, self.proof_type, self._leaf_count, len(pending), present)
        return head + pending + b"".join(node for node in self._levels if node is not None)

    @classmethod
    def from_state(cls, state: bytes) -> Self:
        """Return the tree whose `state()` this was; raises ArchiveError where it was none."""
        if len(state) < _STATE.size or not state.startswith(_STATE_MAGIC):
            raise ArchiveError("This is not the state of a Merkle tree.")
        _, proof_type, leaf_count, open_bytes, present = _STATE.unpack_from(state)
        tree = cls(proof_type)
        nodes_from = _STATE.size + open_bytes
        width = tree._hashes.size_bytes
        if present != leaf_count or len(state) != nodes_from + present.bit_count() * width:
            raise ArchiveError("The state of a Merkle tree is damaged.")
        tree._leaf_count = leaf_count
        tree._pending += state[_STATE.size : nodes_from]
        for level in range(present.bit_length()):
            node = state[nodes_from : nodes_from + width] if present >> level & 1 else None
            tree._levels.append(node)
            nodes_from += width if node is not None else 0
        return tree

    def _hash_pending(self) -> None:
        """Hash the whole blocks that wait."""
        end = len(self._pending) // BLOCK_BYTES * BLOCK_BYTES
        if end:
            with memoryview(self._pending) as view:
                self._add_blocks(view[:end])
            del self._pending[:end]

    def _add_blocks(self, blocks: memoryview) -> None:
        """Add a batch of whole blocks, or the file's short last one alone."""
        block_hash, tree_hash = self._hashes.block, self._hashes.tree
        for text in self._text.of(blocks, self._leaf_count):
            self._push(tree_hash(block_hash(text)))

    def _push(self, node: bytes) -> None:
        """Add a leaf: carry it up through the levels that are taken."""
        self._leaf_count += 1
        for level, left in enumerate(self._levels):
            if left is None:
                self._levels[level] = node
                return
            node = self._hashes.tree(left + node)
            self._levels[level] = None
        self._levels.append(node)


class _HexText:
    """What the leaves hash: decimal number and lower-case hex of each block of a batch, by arithmetic on 16-bit lanes.

    Nearly twice as fast as binascii.hexlify, which also holds the interpreter's lock; numpy does not. Number and hex lie
    together, since hashing them in one call takes half the time of two where BLAKE3 is concerned.
    """

    def __init__(self) -> None:
        self._lanes: NDArray[np.uint16] = np.empty((0, 0), np.uint16)
        self._scratch: NDArray[np.uint16] = np.empty((0, 0), np.uint16)

    def of(self, blocks: memoryview, first_number: int) -> Iterator[memoryview]:
        """Yield the text of each block, overwritten by the next call. All are whole, or it is a single short one."""
        count = max(1, len(blocks) // BLOCK_BYTES)
        width = min(len(blocks), BLOCK_BYTES)
        if len(self._lanes) < count:
            self._lanes = np.empty((count, _NUMBER_BYTES // 2 + BLOCK_BYTES), np.uint16)
            self._scratch = np.empty((count, BLOCK_BYTES), np.uint16)
        first_lane = _NUMBER_BYTES // 2
        _to_hex(
            np.frombuffer(blocks, np.uint8).reshape(count, width),
            self._lanes[:count, first_lane : first_lane + width],
            self._scratch[:count, :width],
        )
        text = self._lanes.data.cast("B")
        for n in range(count):
            hex_from = n * (_NUMBER_BYTES + 2 * BLOCK_BYTES) + _NUMBER_BYTES
            number = b"%d" % (first_number + n)
            text[hex_from - len(number) : hex_from] = number
            yield text[hex_from - len(number) : hex_from + 2 * width]


def _to_hex(blocks: NDArray[np.uint8], lanes: NDArray[np.uint16], scratch: NDArray[np.uint16]) -> None:
    """Write two digits for each byte, the high one into a lane's low byte: the first in memory on little-endian machines."""
    np.copyto(lanes, blocks)
    np.left_shift(lanes, 8, out=scratch)
    np.right_shift(lanes, 4, out=lanes)
    np.bitwise_or(lanes, scratch, out=lanes)
    np.bitwise_and(lanes, 0x0F0F, out=lanes)
    # Digits above 9 carry into bit 4 when 6 is added; their letters lie further on in ASCII.
    np.add(lanes, 0x0606, out=scratch)
    np.right_shift(scratch, 4, out=scratch)
    np.bitwise_and(scratch, 0x0101, out=scratch)
    np.multiply(scratch, ord("a") - ord("9") - 1, out=scratch)
    np.add(lanes, scratch, out=lanes)
    np.add(lanes, 0x3030, out=lanes)
    if sys.byteorder == "big":
        lanes.byteswap(inplace=True)


def merkle_root(path: Path, proof_type: int) -> bytes:
    """Return the root of a file, in constant memory; raises OSError where it cannot be read."""
    return merkle_roots(path, proof_type)[0]


def merkle_roots(path: Path, *proof_types: int) -> list[bytes]:
    """Return the roots of a file by several types of tree, of bytes that are read once; constant memory, raises OSError."""
    trees = [MerkleTree(proof_type) for proof_type in proof_types]
    buffer = memoryview(bytearray(2 * _BATCH_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size_bytes := file.readinto(buffer):
            for tree in trees:
                tree.update(buffer[:size_bytes])
    return [tree.root() for tree in trees]


def type_of_root(root: bytes) -> int:
    """Return the proof type that a root is of, by its size; raises UsageError where no type has such roots."""
    for proof_type, hashes in _HASHES.items():
        if hashes.size_bytes == len(root):
            return proof_type
    raise UsageError(f"A Merkle root has 32 or 64 bytes, not {len(root)}.")
