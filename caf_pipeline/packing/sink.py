"""The one sink through which a chunk's stored bytes go: into the staged file and into the Merkle
root.

Stored bytes are the CAF itself; encryption would come before this sink. The root is computed on a
thread of its own, a bounded distance behind the file. What is in the file already, from a packing
that ended early, is read again instead of written. As long as a file is written it is locked, so
that another process knows whether its writer still lives. Source: "Room to leave" in
docs/explanation/design.md.
"""

import errno
import fcntl
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from typing_extensions import Buffer

from caf_pipeline.caf.merkle import MerkleTree
from caf_pipeline.errors import StagingError
from caf_pipeline.system.atomic_files import WRITE_BYTES

GATHER_BYTES: Final = 1 << 20
"""Small writes are gathered to this size: a write and a hash call each 16 KiB would cost more than
the work itself.
"""

BEHIND_BYTES: Final = 16 << 20
"""How far the root may be behind the file; bounds what is in memory between the two."""

_REREAD_BYTES: Final = 4 << 20  # of one read of what is staged already


class PartFile:
    """A staged file open for writing, and locked by this process for as long as it is open.

    The lock is of the open file, not of its name: it ends with the process, and a process that
    sleeps keeps it.
    """

    def __init__(self, path: Path, descriptor: int, *, locked: bool) -> None:
        self.path = path
        self.descriptor = descriptor
        self.locked = locked

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create `path`, which must not exist; raises StagingError."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise staging_error(path, error) from error
        return cls(path, descriptor, locked=_lock(descriptor))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a file that is there; `locked` tells whether no other process has it.

        Raises OSError.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        return cls(path, descriptor, locked=_lock(descriptor))

    @property
    def size_bytes(self) -> int:
        """The file's length."""
        return os.fstat(self.descriptor).st_size

    @property
    def allocated_bytes(self) -> int:
        """What the file takes on the disk."""
        return os.fstat(self.descriptor).st_blocks * 512  # stat(2): always of 512 bytes

    def is_named(self) -> bool:
        """Tell whether the name still belongs to this file."""
        try:
            return os.path.samestat(
                self.path.stat(follow_symlinks=False), os.fstat(self.descriptor)
            )
        except FileNotFoundError:
            return False

    def rename(self, path: Path) -> None:
        """Give the file another name; raises OSError."""
        os.rename(self.path, path)
        self.path = path

    def cut(self, size_bytes: int) -> None:
        """Make the file so long, durably, and give back what was reserved beyond; never by its
        name. Raises OSError.
        """
        os.ftruncate(self.descriptor, size_bytes)
        os.fsync(self.descriptor)

    def close(self) -> None:
        """Give the file and its lock back."""
        os.close(self.descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (
            errno.EWOULDBLOCK,
            errno.EACCES,
            errno.ENOLCK,
            errno.EOPNOTSUPP,
            errno.ENOSYS,
        ):
            return False  # taken, or a file system without locks, where it counts as taken
        raise
    return True


@dataclass(frozen=True, slots=True)
class Mark:
    """A place to come back to: the offset, and the tree of the bytes before it, which the hashing
    thread hands out.
    """

    offset: int
    _tree: "Future[MerkleTree]"

    def tree(self) -> MerkleTree:
        """Wait for the tree of the bytes before the offset, and return a copy of it."""
        return self._tree.result().copy()

    def closed_state(self) -> bytes:
        """Wait for the tree, and return its state at its last whole block."""
        return self._tree.result().state(open_block=False)


class StagingSink:
    """An append-only staged file with the Merkle root over it.

    Raises StagingError where the disk is full or the file cannot be written; the file is left for
    the caller to remove.
    """

    def __init__(self, part: PartFile, *, proof_type: int) -> None:
        """Begin at the start of a file."""
        self.part = part
        self.size_bytes = 0
        self._tree = MerkleTree(proof_type)
        self._gathered: list[Buffer] = []
        self._gathered_bytes = 0
        self._behind: deque[tuple[int, Future[None]]] = deque()
        self._behind_bytes = 0
        self._block = memoryview(
            b""
        )  # read again and not yet hashed, from `size_bytes - _block_taken` on
        self._block_taken = 0
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="merkle")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def reserve(self, size_bytes: int) -> None:
        """Reserve the space of the finished file on the disk."""
        if not hasattr(os, "posix_fallocate"):  # macOS; there a full disk shows while writing
            return
        try:
            os.posix_fallocate(self.part.descriptor, 0, max(size_bytes, 1))
        except OSError as error:
            raise staging_error(self.part.path, error, size_bytes) from error

    # --- what is written
    # --------------------------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        """Append bytes. The buffer is kept until it is written: it may not change afterwards."""
        size_bytes = memoryview(data).nbytes
        self.size_bytes += size_bytes
        self._gathered.append(data)
        self._gathered_bytes += size_bytes
        if self._gathered_bytes >= GATHER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand what was gathered to the operating system, and to the hashing thread."""
        if not self._gathered_bytes:
            return
        data = self._gathered[0] if len(self._gathered) == 1 else b"".join(self._gathered)
        self._gathered, self._gathered_bytes = [], 0
        view = memoryview(data).cast("B")
        self._hash(view)
        try:
            written = 0
            while written < len(view):
                written += os.write(self.part.descriptor, view[written : written + WRITE_BYTES])
        except OSError as error:
            raise staging_error(self.part.path, error) from error
        self._stay_close()

    def read_staged(self, start_byte: int, end_byte: int) -> bytes:
        """Return bytes that were written, or read again, before `size_bytes`."""
        self.flush()
        try:
            data = os.pread(self.part.descriptor, end_byte - start_byte, start_byte)
        except OSError as error:
            raise staging_error(self.part.path, error) from error
        return data

    def finish(self) -> bytes:
        """Write out everything, cut the file to its size, fsync it, and return the Merkle root."""
        self._settle()
        try:
            self.part.cut(self.size_bytes)
        except OSError as error:
            raise staging_error(self.part.path, error) from error
        return self._tree.root()

    # --- what is there already
    # --------------------------------------------------------------------------------

    def reread(self, end_byte: int) -> Iterator[memoryview]:
        """Yield what the file holds up to `end_byte`, and count it as written; less where the file
        cannot give so much.
        """
        while self.size_bytes < end_byte:
            if self._block_taken == len(self._block):
                self._hash_block()
                self._block = self._read_block()
                if not self._block:
                    return
            taken = min(end_byte - self.size_bytes, len(self._block) - self._block_taken)
            piece = self._block[self._block_taken : self._block_taken + taken]
            self._block_taken += taken
            self.size_bytes += taken
            yield piece

    def _read_block(self) -> memoryview:
        try:
            return memoryview(os.pread(self.part.descriptor, _REREAD_BYTES, self.size_bytes))
        except OSError:  # a bad place on the disk: what is before it is all there is
            return memoryview(b"")

    def _hash_block(self) -> None:
        if self._block_taken:
            self._hash(self._block[: self._block_taken])
            self._stay_close()
        self._block = self._block[self._block_taken :]
        self._block_taken = 0

    def cut(self) -> None:
        """Cut the file to what was read again, durably, and append from there on."""
        self._settle()
        self._block = memoryview(b"")
        try:
            self.part.cut(self.size_bytes)
            os.lseek(self.part.descriptor, self.size_bytes, os.SEEK_SET)
        except OSError as error:
            raise staging_error(self.part.path, error) from error

    # --- places
    # --------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """Return the present end as a place to come back to; what was gathered is flushed."""
        self.flush()
        self._hash_block()
        return Mark(self.size_bytes, self._hasher.submit(self._tree.copy))

    def roll_back(self, mark: Mark) -> None:
        """Forget everything after the mark."""
        self._gathered, self._gathered_bytes = [], 0
        self._block, self._block_taken = memoryview(b""), 0
        self._settle()
        os.lseek(self.part.descriptor, mark.offset, os.SEEK_SET)
        self.size_bytes = mark.offset
        self._tree = mark.tree()

    def close(self) -> None:
        """Give the file and the thread back."""
        self._hasher.shutdown(cancel_futures=True)
        self.part.close()

    # --- the tree
    # --------------------------------------------------------------------------------

    def _hash(self, view: memoryview) -> None:
        self._behind.append((len(view), self._hasher.submit(self._tree.update, view)))
        self._behind_bytes += len(view)

    def _stay_close(self) -> None:
        while self._behind_bytes > BEHIND_BYTES:
            self._wait_for_one()

    def _settle(self) -> None:
        self.flush()
        self._hash_block()
        while self._behind:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        size_bytes, future = self._behind.popleft()
        future.result()
        self._behind_bytes -= size_bytes


def sync_data(descriptor: int) -> None:
    """Make a file's bytes durable, and of what describes it what is needed to read them again."""
    getattr(os, "fdatasync", os.fsync)(descriptor)  # macOS has none


def staging_error(path: Path, error: OSError, size_bytes: int = 0) -> StagingError:
    """Return a StagingError for what the operating system said of a file in staging."""
    wanted = f" ({size_bytes} bytes are needed)" if size_bytes else ""
    return StagingError(
        f"the staging folder {path.parent} cannot take the chunk: {error.strerror}{wanted}",
        hint="make room there, or set 'staging' to a folder on a larger disk",
    )
