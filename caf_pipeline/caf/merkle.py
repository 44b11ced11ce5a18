"""The Jackal Merkle root of a file, streaming.

The file is cut into blocks of 10,240 bytes, the last one short. A leaf hashes the hash of the
block's number in decimal followed by its bytes as lower-case hex; leaves are padded with zero
hashes to a power of two; a node hashes its two children. Proof type 0 takes SHA-256 for the block
and SHA3-512 for the tree, type 3 BLAKE3-256 for both.

Full subtrees of up to 64 blocks are the compiled module's work where it is installed (`native/`),
else `merkle_reference`'s; what is above them is done here. Source: the trees of canine-chain v5;
vectors in the tests.
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
except ImportError:  # not built: `make setup` does it where cargo is

    def subtree_root(blocks: "memoryview[int]", first_number: int, proof_type: int, /) -> bytes:
        """See `merkle_reference`."""
        from caf_pipeline.caf import merkle_reference  # noqa: PLC0415  numpy: a tenth of a second that who only reads can save

        return merkle_reference.subtree_root(blocks, first_number, proof_type)

    IMPLEMENTATION = "Python"

_BATCH_LEVEL: Final = (
    6  # 64 blocks at once: below 16 numpy's overhead shows, above 100 the batch leaves the cache
)
_BATCH_BLOCKS: Final = 1 << _BATCH_LEVEL
_BATCH_BYTES: Final = _BATCH_BLOCKS * BLOCK_BYTES
_PART_BLOCKS: Final = (
    16 * _BATCH_BLOCKS
)  # of a file, by one thread: a few ms of work, beside which handing it out is nothing
_PART_BYTES: Final = _PART_BLOCKS * BLOCK_BYTES
_STATE: Final = struct.Struct(
    "<4sBQHQ"
)  # magic, proof type, leaves, bytes of the open block, bit set of stacked levels
_STATE_MAGIC: Final = b"cMT1"


class MerkleTree:
    """Takes a file's bytes in order, in pieces of any size, and knows the root of what it has
    taken.

    Memory is one hash a level and two batches of 64 blocks. Pieces of a MiB and more are mostly
    hashed without being copied, and without the interpreter's lock. One thread at a time.
    """

    def __init__(self, proof_type: int) -> None:
        """Begin an empty tree; raises UsageError for a proof type other than 0 and 3."""
        if proof_type not in HASHES:
            raise UsageError(f"There is no proof type {proof_type}.", hint="Jackal knows 0 and 3.")
        self.proof_type = proof_type
        self._hashes = HASHES[proof_type]
        self._leaf_count = 0
        self._pending = (
            bytearray()
        )  # less than a batch that is not hashed yet, from a block's beginning on
        self._levels: list[
            bytes | None
        ] = []  # a binary counter: the full subtree of 2**n leaves that waits for another

    @property
    def size_bytes(self) -> int:
        """How many bytes were taken."""
        return self._leaf_count * BLOCK_BYTES + len(self._pending)

    def update(self, data: Buffer) -> None:
        """Take the file's next bytes."""
        view = memoryview(data).cast("B")
        position = 0
        # A batch begins at a multiple of 64 blocks: there it is one subtree.
        begun_bytes = self._leaf_count % _BATCH_BLOCKS * BLOCK_BYTES + len(self._pending)
        if begun_bytes:
            position = min(_BATCH_BYTES - begun_bytes, len(view))
            self._pending += view[:position]
            if begun_bytes + position < _BATCH_BYTES:
                return
            self._hash_pending()
        end = position + (len(view) - position) // _BATCH_BYTES * _BATCH_BYTES
        self._add_blocks(view[position:end])
        self._pending += view[end:]

    def root(self) -> bytes:
        """Return the root of the bytes taken so far: 64 bytes for type 0, 32 for type 3.

        More may be taken afterwards.

        Raises:
            ArchiveError: nothing was taken; an empty file has no root.
        """
        if not self.size_bytes:
            raise ArchiveError(
                "An empty file has no Merkle root.", hint="Jackal cannot store a file of no bytes."
            )
        self._hash_pending()
        if self._pending:
            finished = self.copy()
            finished._add_blocks(memoryview(self._pending))
            finished._pending.clear()
            return finished.root()
        tree_hash = self._hashes.tree
        depth = (self._leaf_count - 1).bit_length()
        padding = bytes(
            self._hashes.size_bytes
        )  # stands at the leaves' level and is not hashed itself
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

        Without its open block it is at most 4 KB: the tree as it was at the last whole block, which
        takes the bytes after that once more.
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
        """Add whole blocks, or the file's short last one alone, as the largest full subtrees that
        begin where they do.
        """
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
        """Add the root of a full subtree of `2**level` leaves: carry it up through the levels that
        are taken.
        """
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

    def _append(self, part: "MerkleTree") -> None:
        """Take what a tree has taken that began, at a part's beginning, where this one ends."""
        for level, node in reversed([*enumerate(part._levels)]):
            if node is not None:
                self._push(node, level)
        self._pending += part._pending


def merkle_root(path: Path, proof_type: int) -> bytes:
    """Return the root of a file, in constant memory; raises OSError where it cannot be read."""
    return merkle_roots(path, proof_type)[0]


def merkle_roots(path: Path, *proof_types: int) -> list[bytes]:
    """Return the roots of a file by several types of tree, of bytes that are read once; constant
    memory, raises OSError.
    """
    with FileRoots(path, *proof_types) as roots:
        return roots.finish()


class FileRoots:
    """The roots of a file by several types of tree, taken on all cores; of a file, too, to which
    others still append.

    A context manager, which gives the file and the threads back.
    """

    def __init__(self, path: Path, *proof_types: int) -> None:
        """Open the file; raises OSError."""
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  closed by __exit__
        self._roots = _Roots(self._read, *proof_types)

    def follow(self) -> None:
        """Begin with the whole parts of what the file has by now, which may not change
        afterwards.
        """
        self._roots.take(self._size_bytes())

    def finish(self) -> list[bytes]:
        """Return the roots of what the file has now; raises OSError where it cannot be read."""
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
            if not size_bytes:  # cut off meanwhile: the roots are of what was there
                return
            start_byte += size_bytes
            yield buffer[:size_bytes]


def roots_of(
    stream: Callable[[int, int, int], Iterable[Buffer]],
    size_bytes: int,
    *proof_types: int,
    done: Callable[[int], None] = lambda size_bytes: None,
) -> list[bytes]:
    """Return the roots of a file by several types of tree, taken on all cores.

    `stream` yields a file's bytes from a start to an end, in pieces of at most the third number; it
    is called by several threads, a MiB of memory each. `done` is called by this one with numbers of
    bytes as they are hashed, in order.
    """
    roots = _Roots(stream, *proof_types, done=done)
    try:
        return roots.finish(size_bytes)
    finally:
        roots.close()


class _Roots:
    """Trees over a file whose parts are hashed by a thread a core."""

    def __init__(
        self,
        stream: Callable[[int, int, int], Iterable[Buffer]],
        *proof_types: int,
        done: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        self._stream = stream
        self._trees = [MerkleTree(proof_type) for proof_type in proof_types]
        self._done = done
        self._end_byte = 0  # of the last part that was handed out
        self._parts: deque[Future[list[MerkleTree]]] = deque()
        cores = _cores()
        self._most_parts = 2 * cores  # one at work and one waiting each
        self._pool = ThreadPoolExecutor(cores, thread_name_prefix="merkle")

    def take(self, size_bytes: int) -> None:
        """Hand out the whole parts before an end, as fast as they are hashed."""
        while self._end_byte + _PART_BYTES <= size_bytes:
            self._hand_out(self._end_byte + _PART_BYTES)

    def finish(self, size_bytes: int) -> list[bytes]:
        """Return the roots of the bytes before an end."""
        self.take(size_bytes)
        if self._end_byte < size_bytes:
            self._hand_out(size_bytes)
        while self._parts:
            self._append_one()
        return [tree.root() for tree in self._trees]

    def close(self) -> None:
        """End the threads; what they have not begun is left undone."""
        self._pool.shutdown(cancel_futures=True)

    def _hand_out(self, end_byte: int) -> None:
        if len(self._parts) == self._most_parts:
            self._append_one()
        self._parts.append(self._pool.submit(self._part, self._end_byte, end_byte))
        self._end_byte = end_byte

    def _append_one(self) -> None:
        before_bytes = self._trees[0].size_bytes
        for tree, its_part in zip(self._trees, self._parts.popleft().result(), strict=True):
            tree._append(its_part)
        self._done(self._trees[0].size_bytes - before_bytes)

    def _part(self, start_byte: int, end_byte: int) -> list[MerkleTree]:
        trees = [MerkleTree(tree.proof_type) for tree in self._trees]
        for tree in trees:
            tree._leaf_count = start_byte // BLOCK_BYTES
        for piece in self._stream(start_byte, end_byte, _BATCH_BYTES):
            for tree in trees:
                tree.update(piece)
        return trees


def _cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


def type_of_root(root: bytes) -> int:
    """Return the proof type that a root is of, by its size; raises UsageError where no type has
    such roots.
    """
    for proof_type, hashes in HASHES.items():
        if hashes.size_bytes == len(root):
            return proof_type
    raise UsageError(f"A Merkle root has 32 or 64 bytes, not {len(root)}.")
