"""Files that are complete or missing, even after a power failure.

Source: fsync(2), which does not cover the folder of the file; rename(2), which replaces atomically.
"""

import contextlib
import errno
import fcntl
import io
import mmap
import os
import secrets
import stat
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from typing_extensions import Buffer

WRITE_BYTES: Final = 128 * 1024
"""Bytes of one write.

Linux allocates large folios for 1 MiB, which took two to three times as long (6.18, ext4).
"""


BEGIN_BYTES: Final = 32 << 20  # 0.1 s of a fast disk

BLOCK_BYTES: Final = 2 << 20  # 1 MiB and 4 MiB were as fast

PRIVATE: Final = 0o600


class PiecewiseFile(io.FileIO):
    """A file that accepts part of a write, and starts writing to the disk early."""

    begins_early = True
    _begun_byte = 0

    def write(self, data: Buffer) -> int:
        written = super().write(memoryview(data)[:WRITE_BYTES])
        self.begin_writing_back(self.tell())
        return written

    def begin_writing_back(self, end_byte: int) -> None:
        """Start to write what is before `end_byte`: the final fsync would wait for all of it."""
        size_bytes = end_byte - self._begun_byte
        can_advise = hasattr(os, "posix_fadvise")  # not on macOS
        if self.begins_early and size_bytes >= BEGIN_BYTES and can_advise:
            # Linux starts to write dirty pages, and drops only pages that are on the disk.
            os.posix_fadvise(self.fileno(), self._begun_byte, size_bytes, os.POSIX_FADV_DONTNEED)
            self._begun_byte = end_byte


class DirectFile(PiecewiseFile):
    """A file that bypasses the page cache, if possible, for large data that is not read soon.

    Copying through the cache takes more CPU time than SHA-256. Up to BLOCK_BYTES stay in memory
    until more data follows or a flush. Source: open(2) on O_DIRECT, which needs aligned memory and
    offsets.
    """

    def __init__(
        self, file: Path | int, mode: str, opener: Callable[[str, int], int] | None = None
    ) -> None:
        super().__init__(file, mode, opener=opener)
        self._block = mmap.mmap(-1, BLOCK_BYTES)  # aligned to pages
        self._held = 0

    def write(self, data: Buffer) -> int:
        """Accept all bytes. An error may concern bytes of an earlier call."""
        view, taken = memoryview(data).cast("B"), 0
        while taken < len(view):
            piece = view[taken : taken + BLOCK_BYTES - self._held]
            self._block[self._held : self._held + len(piece)] = piece
            self._held += len(piece)
            taken += len(piece)
            if self._held == BLOCK_BYTES:
                self.flush()
        return taken

    def flush(self) -> None:
        held, self._held = memoryview(self._block)[: self._held], 0
        written = self._write_directly(held) if len(held) == BLOCK_BYTES else 0
        while written < len(held):
            written += super().write(held[written:])

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self.flush()
        return super().seek(offset, whence)

    def tell(self) -> int:
        return super().tell() + self._held

    def truncate(self, size: int | None = None, /) -> int:
        self.flush()
        return super().truncate(size)

    def _write_directly(self, block: memoryview) -> int:
        """Return 0 if the file system refuses, or the offset is not aligned."""
        flags = fcntl.fcntl(self, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))  # macOS has none
            return io.FileIO.write(self, block)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0
        finally:
            fcntl.fcntl(self, fcntl.F_SETFL, flags)


class WholeFile:
    """A file under a temporary name, which appears at `path` complete and durable, or not at all.

    If it is not `durable`, this holds for a crash of the process, but not of the machine. A file
    that replaces another gets its permissions; until then only the owner can access it. The context
    manager publishes it unless there is an error.
    """

    def __init__(
        self,
        path: Path,
        temporary: Path | None = None,
        *,
        durable: bool = True,
        direct: bool = False,
    ) -> None:
        if path.exists() and not (path.is_file() or path.is_dir()):  # root may replace /dev/null
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        self.path = path
        self._is_durable = durable
        self.temporary = temporary or path.with_name(f".caf-{secrets.token_hex(8)}.partial")
        # Ctrl-C may come between here and the caller's `with`.
        self._removal = weakref.finalize(self, _remove, self.temporary)
        self._replaces = path.is_file()
        opener = partial(os.open, mode=PRIVATE) if self._replaces else None
        self.raw = (DirectFile if direct else PiecewiseFile)(self.temporary, "w", opener=opener)
        # Without fsync nothing waits for the disk, and dropped pages would be read again.
        self.raw.begins_early = durable
        self.file: IO[bytes] = self.raw if direct else io.BufferedWriter(self.raw, WRITE_BYTES)

    def seal(self) -> None:
        if not self.file.closed:
            self.file.flush()
            if self._replaces:
                # If the old file is gone, the new file stays private.
                with contextlib.suppress(FileNotFoundError):
                    give_rights(os.stat(self.path), self.file.fileno())
            if self._is_durable:
                os.fsync(self.file.fileno())
            self.file.close()

    def publish(self) -> None:
        self.seal()
        if self._is_durable:
            rename_durably(self.temporary, self.path)
        else:
            os.replace(self.temporary, self.path)
        self._removal.detach()

    def abort(self) -> None:
        """No effect after `publish`."""
        # The last flush fails on a full disk, too; its bytes are removed anyway.
        with contextlib.suppress(OSError):
            self.file.close()
        self._removal()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.publish()
        finally:
            self.abort()


def _remove(path: Path) -> None:
    # The file may not exist yet, or the file system may be read-only.
    with contextlib.suppress(OSError):
        path.unlink()


def overwrite(path: Path) -> None:
    """Write zeros over a regular file, durably. Does nothing if that fails.

    A file system that copies on write, and an SSD, may keep the old bytes nevertheless.
    """
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError), open(os.open(path, flags), "wb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            return  # a link to another file must not destroy it
        for position in range(0, status.st_size, WRITE_BYTES):
            file.write(bytes(min(WRITE_BYTES, status.st_size - position)))
        os.fsync(file.fileno())


def give_rights(old: os.stat_result, file: int | str, folder: int | None = None) -> None:
    """Give a new file the owner, group and mode of the file that it replaces.

    If the owner or group cannot be set, fewer users can access the file. `file` is relative to the
    open `folder`.
    """
    with contextlib.suppress(OSError):
        os.chown(file, old.st_uid, old.st_gid, dir_fd=folder)
    mode = old.st_mode & (stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)
    if os.stat(file, dir_fd=folder).st_gid != old.st_gid:
        mode &= ~stat.S_IRWXG | (mode & stat.S_IRWXO) << 3  # its group had the rights of others
    with contextlib.suppress(OSError):
        os.chmod(file, mode, dir_fd=folder)


def rename_durably(file: Path, path: Path) -> None:
    """Move a durable file or folder to `path`, durably, replacing a file."""
    os.replace(file, path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Make a file's bytes durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    with opened_folder(folder) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def opened_folder(folder: Path) -> Iterator[int]:
    """Return a folder's descriptor while the context lasts."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
