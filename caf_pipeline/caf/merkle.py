"""The Jackal Merkle root of a file, computed from a stream.

The file is cut into blocks of 10,240 bytes; the last one may be short. A leaf hashes the hash of
the block's decimal number followed by the block's bytes in lower-case hex. Leaves are padded with
zero hashes to a power of two. A node hashes its two children. Proof type 0 uses SHA-256 for blocks
and SHA3-512 for the tree, type 3 BLAKE3-256 for both.

The compiled module (`native/`), or else `merkle_reference`, hashes full subtrees of up to 64
blocks. Source: canine-chain v5.
"""

import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from typing_extensions import Buffer

from caf_pipeline.caf.merkle_hashes import BLOCK_BYTES, HASHES
from caf_pipeline.errors import ArchiveError, UsageError

try:
    from caf_native import subtree_root

    IMPLEMENTATION = "native"
except ImportError:  # not built: `make setup` builds it if cargo is installed

    def subtree_root(blocks: "memoryview[int]", first_number: int, proof_type: int, /) -> bytes:
        # Importing numpy takes 0.1 s, which readers do not need.
        """See `merkle_reference`."""
        from caf_pipeline.caf import merkle_reference  # noqa: PLC0415

        return merkle_reference.subtree_root(blocks, first_number, proof_type)

    IMPLEMENTATION = "Python"

# 64 blocks: below 16 numpy's overhead shows, above 100 the batch exceeds the cache.
_BATCH_LEVEL: Final = 6
_BATCH_BLOCKS: Final = 1 << _BATCH_LEVEL
_BATCH_BYTES: Final = _BATCH_BLOCKS * BLOCK_BYTES
# A thread's share: a few ms of work, far more than the cost of submitting it.
_PART_BLOCKS: Final = 16 * _BATCH_BLOCKS
_PART_BYTES: Final = _PART_BLOCKS * BLOCK_BYTES
# Magic, proof type, leaves, bytes of the open block, bit set of stacked levels.
_STATE: Final = struct.Struct("<4sBQHQ")
_STATE_MAGIC: Final = b"cMT1"


class MerkleTree:
    """Computes the root of bytes that arrive in order, in pieces of any size.

    Memory is one hash per level and two batches of 64 blocks. Pieces of a MiB and more are mostly
    hashed without a copy and without the interpreter's lock. Not safe for several threads.
    """

    def __init__(self, proof_type: int) -> None:
        """Raises UsageError for a proof type other than 0 and 3."""
        if proof_type not in HASHES:
            raise UsageError(f"There is no proof type {proof_type}.", hint="Jackal has 0 and 3.")
        self.proof_type = proof_type
        self._hashes = HASHES[proof_type]
        self._leaf_count = 0
        # Less than a batch of unhashed bytes. Begins at a block's start.
        self._pending = bytearray()
        # A binary counter: entry n is a full subtree of 2**n leaves that waits for its sibling.
        self._levels: list[bytes | None] = []

    @property
    def size_bytes(self) -> int:
        return self._leaf_count * BLOCK_BYTES + len(self._pending)

    def update(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        position = 0
        # A batch that begins at a multiple of 64 blocks is one subtree.
        batch_bytes = self._leaf_count % _BATCH_BLOCKS * BLOCK_BYTES + len(self._pending)
        if batch_bytes:
            position = min(_BATCH_BYTES - batch_bytes, len(view))
            self._pending += view[:position]
            if batch_bytes + position < _BATCH_BYTES:
                return
            self._hash_pending()
        end = position + (len(view) - position) // _BATCH_BYTES * _BATCH_BYTES
        self._add_blocks(view[position:end])
        self._pending += view[end:]

    def root(self) -> bytes:
        """More bytes may follow. Raises ArchiveError if there are none."""
        if not self.size_bytes:
            raise ArchiveError(
                "An empty file has no Merkle root.", hint="Jackal cannot store empty files."
            )
        self._hash_pending()
        if self._pending:
            finished = self.copy()
            finished._add_blocks(memoryview(self._pending))
            finished._pending.clear()
            return finished.root()
        tree_hash = self._hashes.tree
        depth = (self._leaf_count - 1).bit_length()
        padding = bytes(self._hashes.size_bytes)  # at leaf level it is not hashed
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
        return self.from_state(self.state())

    def state(self, *, open_block: bool = True) -> bytes:
        """Return at most about 15 KB for `from_state`, in this or another process.

        At most 4 KB without its open block, whose bytes the restored tree then needs again.
        """
        self._hash_pending()
        present = sum(1 << level for level, node in enumerate(self._levels) if node is not None)
        pending = self._pending if open_block else b""
        head = _STATE.pack(_STATE_MAGIC, self.proof_type, self._leaf_count, len(pending), present)
        return head + pending + b"".join(node for node in self._levels if node is not None)

    @classmethod
    def from_state(cls, state: bytes) -> Self:
        """Restore a tree. Raises ArchiveError for an invalid state."""
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
        end = len(self._pending) // BLOCK_BYTES * BLOCK_BYTES
        if end:
            with memoryview(self._pending) as view:
                self._add_blocks(view[:end])
            del self._pending[:end]

    def _add_blocks(self, blocks: memoryview) -> None:
        position = 0
        while position < len(blocks):
            number = self._leaf_count
            level = max(0, ((len(blocks) - position) // BLOCK_BYTES).bit_length() - 1)
            level = min(
                level, ((number | _BATCH_BLOCKS) & -(number | _BATCH_BLOCKS)).bit_length() - 1
            )
            end = position + (BLOCK_BYTES << level)
            self._push(subtree_root(blocks[position:end], number, self.proof_type), level)
            position = end

    def _push(self, node: bytes, level: int) -> None:
        """Add the root of `2**level` leaves, and carry it up like in addition."""
        self._leaf_count += 1 << level
        self._levels += [None] * (level - len(self._levels))
        for above in range(level, len(self._levels)):
            left = self._levels[above]
            if left is None:
                self._levels[above] = node
                return
            node = self._hashes.tree(left + node)
            self._levels[above] = None
        self._levels.append(node)


def merkle_root(path: Path, proof_type: int) -> bytes:
    """Return the root of a file in constant memory. Raises OSError."""
    return merkle_roots(path, proof_type)[0]


def merkle_roots(path: Path, *proof_types: int) -> list[bytes]:
    """Return a root for each proof type, reading once in constant memory. Raises OSError."""
    with FileRoots(path, *proof_types) as roots:
        return roots.finish()


class FileRoots:
    """Computes a file's roots on all cores, even while it grows. Raises OSError."""

    def __init__(self, path: Path, *proof_types: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  closed by __exit__
        self._roots = _Roots(self._read, *proof_types)

    def follow(self) -> None:
        """Hash the whole parts so far. They may not change afterwards."""
        self._roots.take(self._size_bytes())

    def finish(self) -> list[bytes]:
        return self._roots.finish(self._size_bytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._roots.close()
        self._file.close()

    def _size_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _read(self, start_byte: int, end_byte: int, piece_bytes: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(piece_bytes))
        while start_byte < end_byte:
            size_bytes = os.preadv(
                self._file.fileno(), [buffer[: end_byte - start_byte]], start_byte
            )
            if not size_bytes:  # truncated meanwhile: the roots cover the rest
                return
            start_byte += size_bytes
            yield buffer[:size_bytes]


def roots_of(
    stream: Callable[[int, int, int], Iterable[Buffer]],
    size_bytes: int,
    *proof_types: int,
    done: Callable[[int], None] = lambda size_bytes: None,
) -> list[bytes]:
    """Return a file's roots for several proof types, computed on all cores.

    Several threads call `stream` with a start, an end and the largest piece; each needs a MiB. This
    thread calls `done` with the number of newly hashed bytes, in order.
    """
    roots = _Roots(stream, *proof_types, done=done)
    try:
        return roots.finish(size_bytes)
    finally:
        roots.close()


class _Roots:
    def __init__(
        self,
        stream: Callable[[int, int, int], Iterable[Buffer]],
        *proof_types: int,
        done: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        self._stream = stream
        self._trees = [MerkleTree(proof_type) for proof_type in proof_types]
        self._done = done
        self._end_byte = 0  # of the last submitted part
        self._parts: deque[Future[list[MerkleTree]]] = deque()
        affinity = getattr(os, "sched_getaffinity", None)  # missing on macOS
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        self._max_parts = 2 * cores  # each core has one part running and one waiting
        self._pool = ThreadPoolExecutor(cores, thread_name_prefix="merkle")

    def take(self, size_bytes: int) -> None:
        """Submit the whole parts. Waits while too many are unfinished."""
        while self._end_byte + _PART_BYTES <= size_bytes:
            self._submit(self._end_byte + _PART_BYTES)

    def finish(self, size_bytes: int) -> list[bytes]:
        self.take(size_bytes)
        if self._end_byte < size_bytes:
            self._submit(size_bytes)
        while self._parts:
            self._append_one()
        return [tree.root() for tree in self._trees]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, end_byte: int) -> None:
        if len(self._parts) == self._max_parts:
            self._append_one()
        self._parts.append(self._pool.submit(self._hash_part, self._end_byte, end_byte))
        self._end_byte = end_byte

    def _append_one(self) -> None:
        before_bytes = self._trees[0].size_bytes
        for tree, part in zip(self._trees, self._parts.popleft().result(), strict=True):
            # The part began where the tree ends, at a multiple of the part size.
            for level, node in reversed([*enumerate(part._levels)]):
                if node is not None:
                    tree._push(node, level)
            tree._pending += part._pending
        self._done(self._trees[0].size_bytes - before_bytes)

    def _hash_part(self, start_byte: int, end_byte: int) -> list[MerkleTree]:
        trees = [MerkleTree(tree.proof_type) for tree in self._trees]
        for tree in trees:
            tree._leaf_count = start_byte // BLOCK_BYTES
        for piece in self._stream(start_byte, end_byte, _BATCH_BYTES):
            for tree in trees:
                tree.update(piece)
        return trees


def type_of_root(root: bytes) -> int:
    """Return a root's proof type by its size. Raises UsageError for other sizes."""
    for proof_type, hashes in HASHES.items():
        if hashes.size_bytes == len(root):
            return proof_type
    raise UsageError(f"A Merkle root has 32 or 64 bytes, not {len(root)}.")
