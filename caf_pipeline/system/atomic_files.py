"""Files that are whole or not there, also after a loss of power.

Source: fsync(2), which does not speak for the folder that a file is in; rename(2), which replaces
in one step.
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
"""What the kernel is given at once.

Of a MiB, Linux makes large folios, which took it two to three times as long to find and to fill
(6.18, ext4; docs/decisions/0030-measured-limits.md).
"""


BEGIN_BYTES: Final = 32 << 20  # a tenth of a second of a fast disk's time

BLOCK_BYTES: Final = (
    2 << 20
)  # as many as 1 or 4 MiB take the same time (docs/decisions/0030-measured-limits.md)

PRIVATE: Final = 0o600
"""The mode of a file that will replace another, until it has the rights of that one."""


class PiecewiseFile(io.FileIO):
    """A file of which each write is a piece; a writer with a buffer goes on with the rest.

    The disk begins early with it.
    """

    begins_early = True
    _begun_byte = 0

    def write(self, data: Buffer) -> int:
        """Write at most `WRITE_BYTES`, and return how many bytes they were."""
        written = super().write(memoryview(data)[:WRITE_BYTES])
        self.begin_writing_back(self.tell())
        return written

    def begin_writing_back(self, end_byte: int) -> None:
        """Let the disk begin with what the kernel holds up to there, for which fsync would have to
        wait, where it is enough.
        """
        size_bytes = end_byte - self._begun_byte
        if (
            self.begins_early and size_bytes >= BEGIN_BYTES and hasattr(os, "posix_fadvise")
        ):  # not on macOS
            # Linux then begins to write what is dirty, and forgets only what the disk has already.
            os.posix_fadvise(self.fileno(), self._begun_byte, size_bytes, os.POSIX_FADV_DONTNEED)
            self._begun_byte = end_byte


class DirectFile(PiecewiseFile):
    """A file that goes to the disk past the page cache, which costs more time than SHA-256, for
    what is large and not read soon.

    It takes all that `write` is given, and holds up to `BLOCK_BYTES` of it until more follows or it
    is flushed. Where the file system has no such way, the bytes take the usual one. Source: open(2)
    on O_DIRECT, which aligns memory and offset.
    """

    def __init__(
        self, file: Path | int, mode: str, opener: Callable[[str, int], int] | None = None
    ) -> None:
        super().__init__(file, mode, opener=opener)
        self._block = mmap.mmap(-1, BLOCK_BYTES)  # pages, so that it is aligned
        self._held = 0

    def write(self, data: Buffer) -> int:
        """Take all bytes, and return how many they are; an error may be of bytes that were taken
        before.
        """
        view, taken = memoryview(data).cast("B"), 0
        while taken < len(view):
            some = view[taken : taken + BLOCK_BYTES - self._held]
            self._block[self._held : self._held + len(some)] = some
            self._held += len(some)
            taken += len(some)
            if self._held == BLOCK_BYTES:
                self.flush()
        return taken

    def flush(self) -> None:
        """Write what is held."""
        held, self._held = memoryview(self._block)[: self._held], 0
        written = self._write_directly(held) if len(held) == BLOCK_BYTES else 0
        while written < len(held):
            written += super().write(held[written:])

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move, behind what is held."""
        self.flush()
        return super().seek(offset, whence)

    def tell(self) -> int:
        """Return the position behind what is held."""
        return super().tell() + self._held

    def truncate(self, size: int | None = None, /) -> int:
        """Cut the file, with what is held in it."""
        self.flush()
        return super().truncate(size)

    def _write_directly(self, block: memoryview) -> int:
        """Return how many bytes of it the disk took so: none where the file system refuses, or the
        offset is not aligned.
        """
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
    """A file while it is written, under a temporary name beside `path`; at `path` it appears whole
    and durable, or not at all.

    Where it is not `durable`, that holds for the death of a process, not of the machine: for what
    nobody reads after that. Where it replaces a file, it may be read and written by those who could
    that one; by its owner alone while it is written. What is `direct` is a `DirectFile`. As a
    context manager, it is published where the context ends without an error. The temporary file is
    removed in any case.
    """

    def __init__(
        self,
        path: Path,
        temporary: Path | None = None,
        *,
        durable: bool = True,
        direct: bool = False,
    ) -> None:
        """Open the temporary file; raises OSError where the folder cannot be written, or `path` is
        a pipe, a device or such.
        """
        if path.exists() and not (path.is_file() or path.is_dir()):  # root may replace /dev/null
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        self.path = path
        self._is_durable = durable
        self.temporary = temporary or path.with_name(f".caf-{secrets.token_hex(8)}.partial")
        # From before the file exists until it has its name: Ctrl-C may come between here and the
        # caller's `with`.
        self._removal = weakref.finalize(self, _remove, self.temporary)
        self._replaces = path.is_file()
        opener = partial(os.open, mode=PRIVATE) if self._replaces else None
        self.raw = (DirectFile if direct else PiecewiseFile)(self.temporary, "w", opener=opener)
        # nothing waits for the disk otherwise, and what it has is read from there again
        self.raw.begins_early = durable
        self.file: IO[bytes] = self.raw if direct else io.BufferedWriter(self.raw, WRITE_BYTES)

    def seal(self) -> None:
        """End the file, and make it durable if it is to be, still under the temporary name; does
        nothing the second time.
        """
        if not self.file.closed:
            self.file.flush()
            if self._replaces:
                with contextlib.suppress(
                    FileNotFoundError
                ):  # it is gone by now: this one stays its owner's
                    give_rights(os.stat(self.path), self.file.fileno())
            if self._is_durable:
                os.fsync(self.file.fileno())
            self.file.close()

    def publish(self) -> None:
        """Seal the file and give it its name; an older file there is replaced."""
        self.seal()
        if self._is_durable:
            rename_durably(self.temporary, self.path)
        else:
            os.replace(self.temporary, self.path)
        self._removal.detach()

    def abort(self) -> None:
        """Remove the temporary file; does nothing after `publish`."""
        with contextlib.suppress(
            OSError
        ):  # a full disk fails the last flush too; its bytes are being removed anyway
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
    with contextlib.suppress(
        OSError
    ):  # it never was, or cannot be removed, as on a file system that is read-only
        path.unlink()


def give_rights(old: os.stat_result, file: int | str, folder: int | None = None) -> None:
    """Give a new file owner, group and mode of the one that it is to replace; `folder` is open, and
    the one that a name is in.

    Where it cannot have that owner or group, or the file system keeps no mode, it is open to fewer
    than the old one was.
    """
    with contextlib.suppress(OSError):
        os.chown(file, old.st_uid, old.st_gid, dir_fd=folder)
    mode = old.st_mode & (stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)
    if os.stat(file, dir_fd=folder).st_gid != old.st_gid:
        mode &= ~stat.S_IRWXG | (mode & stat.S_IRWXO) << 3  # its group was among the others
    with contextlib.suppress(OSError):
        os.chmod(file, mode, dir_fd=folder)


def rename_durably(file: Path, path: Path) -> None:
    """Give a durable file or folder its name, in place of any file there."""
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
    """Return a folder's descriptor, which is closed when the context ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
