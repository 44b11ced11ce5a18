"""The one sink through which a chunk's stored bytes go: into the staged file and into the Merkle root.

Stored bytes are the CAF itself; encryption would stand in front of this sink. The root is computed on a thread of its own,
a bounded distance behind the file.
Not here: what the bytes mean (`pack`). Source: "Room to leave" in docs/design.md.
"""

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from typing_extensions import Buffer

from caf_pipeline.errors import StagingError
from caf_pipeline.merkle import MerkleTree

GATHER_BYTES: Final = 1 << 20
"""Small writes are gathered to this size: a write and a hash call each 16 KiB would cost more than the work itself."""

BEHIND_BYTES: Final = 16 << 20
"""How far the root may be behind the file; bounds what stands in memory between the two."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place to come back to: the offset, and the tree of the bytes before it."""

    offset: int
    tree: MerkleTree


class StoredBytes:
    """An append-only staged file with the Merkle root over it.

    Raises StagingError where the disk is full or the file cannot be written; the file is left for the caller to remove.
    """

    def __init__(self, path: Path, *, proof_type: int, reserve_bytes: int) -> None:
        """Create `path`, which must not exist, and reserve its space on the disk."""
        self.path = path
        self.size_bytes = 0
        self._tree = MerkleTree(proof_type)
        self._gathered: list[Buffer] = []
        self._gathered_bytes = 0
        self._behind: deque[tuple[int, Future[None]]] = deque()
        self._behind_bytes = 0
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="merkle")
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._hasher.shutdown()
            raise staging_error(path, error) from error
        try:
            self._reserve(reserve_bytes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _reserve(self, size_bytes: int) -> None:
        if not hasattr(os, "posix_fallocate"):  # macOS; there a full disk shows while writing
            return
        try:
            os.posix_fallocate(self._fd, 0, max(size_bytes, 1))
        except OSError as error:
            raise staging_error(self.path, error, size_bytes) from error

    def write(self, data: Buffer) -> None:
        """Append bytes. The buffer is kept until it is written: it may not change afterwards."""
        size_bytes = memoryview(data).nbytes
        self.size_bytes += size_bytes
        self._gathered.append(data)
        self._gathered_bytes += size_bytes
        if self._gathered_bytes >= GATHER_BYTES:
            self._flush()

    def mark(self) -> Mark:
        """Return the present end as a place to come back to."""
        self._settle()
        return Mark(self.size_bytes, self._tree.copy())

    def roll_back(self, mark: Mark) -> None:
        """Forget everything after the mark."""
        self._gathered, self._gathered_bytes = [], 0
        self._settle()
        os.lseek(self._fd, mark.offset, os.SEEK_SET)
        self.size_bytes = mark.offset
        self._tree = mark.tree

    def finish(self) -> bytes:
        """Write out everything, cut the file to its size, fsync it, and return the Merkle root."""
        self._settle()
        try:
            os.ftruncate(self._fd, self.size_bytes)
            os.fsync(self._fd)
        except OSError as error:
            raise staging_error(self.path, error) from error
        return self._tree.root()

    def close(self) -> None:
        """Give the file and the thread back."""
        self._hasher.shutdown(cancel_futures=True)
        os.close(self._fd)

    def _flush(self) -> None:
        if not self._gathered_bytes:
            return
        data = self._gathered[0] if len(self._gathered) == 1 else b"".join(self._gathered)
        self._gathered, self._gathered_bytes = [], 0
        view = memoryview(data).cast("B")
        self._behind.append((len(view), self._hasher.submit(self._tree.update, view)))
        self._behind_bytes += len(view)
        try:
            written = 0
            while written < len(view):
                written += os.write(self._fd, view[written:])
        except OSError as error:
            raise staging_error(self.path, error) from error
        while self._behind_bytes > BEHIND_BYTES:
            self._wait_for_one()

    def _settle(self) -> None:
        self._flush()
        while self._behind:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        size_bytes, future = self._behind.popleft()
        future.result()
        self._behind_bytes -= size_bytes


def staging_error(path: Path, error: OSError, size_bytes: int = 0) -> StagingError:
    """Return a StagingError for what the operating system said of a file in staging."""
    wanted = f" ({size_bytes} bytes are needed)" if size_bytes else ""
    return StagingError(
        f"the staging folder {path.parent} cannot take the chunk: {error.strerror}{wanted}",
        hint="make room there, or set 'staging' to a folder on a larger disk",
    )
