"""Writes a chunk's stored bytes to the staged file and computes their Merkle root.

For a private chunk, these are its header, nonce and sealed segments. A thread computes the root, a
bounded distance behind the file.
"""

import contextlib
import errno
import fcntl
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from typing_extensions import Buffer

from caf_pipeline.caf.merkle import MerkleTree
from caf_pipeline.encryption.sealing import SegmentWriter, read_at, sealed_bytes
from caf_pipeline.errors import StagingError
from caf_pipeline.formats import age
from caf_pipeline.system.atomic_files import WRITE_BYTES, sync_folder
from caf_pipeline.system.quantities import show_size

BUFFER_BYTES: Final = 1 << 20
"""Bytes buffered before a write. Calls for each 16 KiB cost more."""

MAX_UNHASHED_BYTES: Final = 16 << 20
"""Bytes that the root may be behind the file; bounds the memory."""

ReadEarlier = Callable[[int, int], memoryview]
"""Returns plaintext of an earlier run from a byte on, at most up to another; empty at its end."""

_REREAD_BYTES: Final = 4 << 20
_SEALED_AGAIN_SEGMENTS: Final = 16


class PartFile:
    """A staged file, locked until it is closed, which shows that its writer is alive.

    The lock belongs to the open file, not to its name. A suspended process keeps it.
    """

    def __init__(self, path: Path, descriptor: int, *, locked: bool) -> None:
        self.path = path
        self.descriptor = descriptor
        self.locked = locked

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create `path`; raise StagingError if that fails or `path` exists."""
        with staging_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        return cls(path, descriptor, locked=_lock(descriptor))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing file. `locked` is False if another process holds the lock."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        return cls(path, descriptor, locked=_lock(descriptor))

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    @property
    def allocated_bytes(self) -> int:
        return os.fstat(self.descriptor).st_blocks * 512  # stat(2): always of 512 bytes

    def is_named(self) -> bool:
        try:
            return os.path.samestat(
                self.path.stat(follow_symlinks=False), os.fstat(self.descriptor)
            )
        except FileNotFoundError:
            return False

    def rename(self, path: Path) -> None:
        os.rename(self.path, path)
        self.path = path

    def cut(self, size_bytes: int) -> None:
        """Truncate the file and fsync it."""
        os.ftruncate(self.descriptor, size_bytes)
        os.fsync(self.descriptor)

    def close(self) -> None:
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
            return False  # locked by another process, or a file system without locks
        raise
    return True


@dataclass(frozen=True, slots=True)
class Mark:
    """A position to return to, and the tree of the stored bytes up to it.

    Attributes:
        offset: in the CAF.
        segments: `SegmentWriter.position`; None for a plain chunk.
    """

    offset: int
    _tree: "Future[MerkleTree]"
    segments: tuple[int, bytes] | None = None

    def tree(self) -> MerkleTree:
        """Wait for the hashing thread; return a copy of the tree."""
        return self._tree.result().copy()

    def closed_state(self) -> bytes:
        """Wait for the tree; return its state at its last whole block."""
        return self._tree.result().state(open_block=False)


class StagingSink:
    """Appends a CAF to a part and its Merkle tree, sealed if there are recipients.

    It also reads back the existing bytes of a plain part, and seals an earlier run's encrypted
    bytes again into a new part. `size_bytes` is that of the CAF.
    """

    def __init__(
        self,
        part: PartFile,
        *,
        proof_type: int,
        recipients: Sequence[age.Recipient] = (),
        read_earlier: ReadEarlier | None = None,
    ) -> None:
        self.part = part
        self.size_bytes = 0
        self.segments: SegmentWriter | None = None
        self.header = b""
        self._recipients = recipients
        self._read_earlier = read_earlier
        self._proof_type = proof_type
        self._tree = MerkleTree(proof_type)
        self._buffered: list[Buffer] = []
        self._buffered_bytes = 0
        self._unhashed: deque[tuple[int, Future[None]]] = deque()
        self._unhashed_bytes = 0
        # Read back and not yet hashed. Its first byte is at `size_bytes - _block_taken`.
        self._block = memoryview(b"")
        self._block_taken = 0
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="merkle")

    def __enter__(self) -> Self:
        if self._recipients:
            self._begin_sealing()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hasher.shutdown(cancel_futures=True)
        self.part.close()

    def reserve(self, size_bytes: int) -> None:
        if self.segments:
            size_bytes = self.payload_start + age.sealed_size(size_bytes)
        if hasattr(os, "posix_fallocate"):  # on macOS, a full disk fails a write
            with staging_errors(self.part.path, size_bytes):
                os.posix_fallocate(self.part.descriptor, 0, max(size_bytes, 1))

    # --- what is written --------------------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        """Append bytes. The caller must not change the buffer afterwards."""
        size_bytes = memoryview(data).nbytes
        self.size_bytes += size_bytes
        self._buffered.append(data)
        self._buffered_bytes += size_bytes
        if self._buffered_bytes >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Pass buffered bytes to the operating system and to the hashing thread."""
        if not self._buffered_bytes:
            return
        data = self._buffered[0] if len(self._buffered) == 1 else b"".join(self._buffered)
        self._buffered, self._buffered_bytes = [], 0
        for piece in self.segments.write(data) if self.segments else (data,):
            self._store(piece)

    def _store(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        if not view:
            return
        self._hash(view)
        with staging_errors(self.part.path):
            written = 0
            while written < len(view):
                written += os.write(self.part.descriptor, view[written : written + WRITE_BYTES])
        self._limit_unhashed()

    def read_staged(self, start_byte: int, end_byte: int) -> bytes:
        self.flush()
        with staging_errors(self.part.path):
            if self.segments:
                return self.segments.read(self._read_sealed, start_byte, end_byte)
            return read_at(self.part.descriptor, start_byte, end_byte)

    def _read_sealed(self, start_byte: int, end_byte: int) -> bytes:
        start = self.payload_start
        return read_at(self.part.descriptor, start + start_byte, start + end_byte)

    def finish(self) -> bytes:
        """Truncate the file to its size, fsync it, and return the Merkle root."""
        self._settle()
        if self.segments:
            self._store(self.segments.finish())
            self._settle()
        with staging_errors(self.part.path):
            self.part.cut(self._tree.size_bytes)
        return self._tree.root()

    @property
    def stored_size_bytes(self) -> int:
        return self._tree.size_bytes

    def stored_bytes(self, end_byte: int) -> int:
        """Return the bytes of the file with the CAF up to `end_byte`, without an open segment."""
        if self.segments and end_byte:
            return self.payload_start + sealed_bytes(end_byte)
        return end_byte

    # --- sealing ----------------------------------------------------------------------------------

    @property
    def payload_start(self) -> int:
        return len(self.header) + age.NONCE_BYTES

    def _begin_sealing(self) -> None:
        self.segments = SegmentWriter()
        self.header = age.make_header(self._recipients, self.segments.file_key)
        self._tree = MerkleTree(self._proof_type)
        self._store(self.header + self.segments.nonce)

    def _seal_again(self, sealed: SegmentWriter, count: int, open_segment: bytes) -> None:
        """Seal `count` segments and an open one again, under a new file key and into a new file.

        Other bytes must not get the nonces of segments that were written: a snapshot of the disk
        may have them. `publish` gives the file its name. Raises StagingError if there is no room.
        """
        old_part, old_start = self.part, self.payload_start
        copy = old_part.path.with_suffix(".copy")
        copy.unlink(missing_ok=True)
        new_part = PartFile.create(copy)
        try:
            self.part, self.size_bytes = new_part, 0
            self._begin_sealing()
            for number in range(0, count, _SEALED_AGAIN_SEGMENTS):
                taken = min(_SEALED_AGAIN_SEGMENTS, count - number)
                start = old_start + number * age.SEALED_SEGMENT_BYTES
                with staging_errors(copy):
                    piece = read_at(
                        old_part.descriptor, start, start + taken * age.SEALED_SEGMENT_BYTES
                    )
                self.write(sealed.payload.open(number, piece, is_end=False))
            self.write(open_segment)
            self._settle()
        except BaseException:
            copy.unlink(missing_ok=True)
            raise
        finally:
            old_part.close()

    def publish(self) -> None:
        """Give a part that was sealed again the name of a part, durably.

        Until then, the older part counts. The journal must have a checkpoint of the new part.
        """
        with staging_errors(self.part.path):
            self.part.rename(self.part.path.with_suffix(".part"))
            sync_folder(self.part.path.parent)

    # --- what is there already --------------------------------------------------------------------

    def reread(self, end_byte: int) -> Iterator[memoryview]:
        """Yield existing bytes up to `end_byte` and count them as written.

        Stops early if the file is shorter or cannot be read.
        """
        if self._read_earlier:
            yield from self._seal_earlier(self._read_earlier, end_byte)
            return
        while self.size_bytes < end_byte:
            if self._block_taken == len(self._block):
                self._hash_block()
                try:
                    block = os.pread(self.part.descriptor, _REREAD_BYTES, self.size_bytes)
                except OSError:  # a bad sector: resume only what precedes it
                    block = b""
                self._block = memoryview(block)
                if not block:
                    return
            taken = min(end_byte - self.size_bytes, len(self._block) - self._block_taken)
            piece = self._block[self._block_taken : self._block_taken + taken]
            self._block_taken += taken
            self.size_bytes += taken
            yield piece

    def _seal_earlier(self, read: ReadEarlier, end_byte: int) -> Iterator[memoryview]:
        while self.size_bytes < end_byte and (piece := read(self.size_bytes, end_byte)):
            self.write(piece)
            yield piece

    def _hash_block(self) -> None:
        if self._block_taken:
            self._hash(self._block[: self._block_taken])
            self._limit_unhashed()
        self._block = self._block[self._block_taken :]
        self._block_taken = 0

    def cut(self) -> None:
        """Truncate the file, durably, to the bytes that were read back."""
        self._settle()
        self._block = memoryview(b"")
        with staging_errors(self.part.path):
            self.part.cut(self.size_bytes)
            os.lseek(self.part.descriptor, self.size_bytes, os.SEEK_SET)

    # --- places -----------------------------------------------------------------------------------

    def mark(self) -> Mark:
        self.flush()
        self._hash_block()
        segments = self.segments.position if self.segments else None
        return Mark(self.size_bytes, self._hasher.submit(self._tree.copy), segments)

    def roll_back(self, mark: Mark) -> None:
        """Return to a mark. If `part` is another one then, it must be published."""
        self._buffered, self._buffered_bytes = [], 0
        self._block, self._block_taken = memoryview(b""), 0
        self._settle()
        if self.segments and mark.segments:
            count, open_segment = mark.segments
            if self.segments.position[0] != count:
                self._seal_again(self.segments, count, open_segment)
                return
            self.segments.reopen(open_segment)
            self.size_bytes = mark.offset
            return
        os.lseek(self.part.descriptor, mark.offset, os.SEEK_SET)
        self.size_bytes = mark.offset
        self._tree = mark.tree()

    # --- the tree ---------------------------------------------------------------------------------

    def _hash(self, view: memoryview) -> None:
        self._unhashed.append((len(view), self._hasher.submit(self._tree.update, view)))
        self._unhashed_bytes += len(view)

    def _limit_unhashed(self, max_bytes: int = MAX_UNHASHED_BYTES) -> None:
        while self._unhashed_bytes > max_bytes:
            size_bytes, future = self._unhashed.popleft()
            future.result()
            self._unhashed_bytes -= size_bytes

    def _settle(self) -> None:
        self.flush()
        self._hash_block()
        self._limit_unhashed(0)


def sync_data(descriptor: int) -> None:
    """Flush a file's data, and the metadata needed to read it."""
    getattr(os, "fdatasync", os.fsync)(descriptor)  # macOS has no fdatasync


@contextlib.contextmanager
def staging_errors(path: Path, size_bytes: int = 0) -> Iterator[None]:
    """Translate the operating system's errors for a staged file."""
    try:
        yield
    except OSError as error:
        raise staging_error(path, error, size_bytes) from error


def staging_error(path: Path, error: OSError, size_bytes: int = 0) -> StagingError:
    """Translate an error for a staged file."""
    needed = f" ({show_size(size_bytes)} are needed)" if size_bytes else ""
    return StagingError(
        f"the staging folder {path.parent} cannot take the chunk: {error.strerror}{needed}",
        hint="make room there, or set 'staging' to a folder on a larger disk",
    )
