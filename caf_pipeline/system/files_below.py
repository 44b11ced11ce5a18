"""Writes members below a folder, and never outside of it.

Each part of a path is opened relative to its parent without following links.
"""

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Final, Self

from typing_extensions import Buffer

from caf_pipeline.errors import CafError, HeldByOther, StagingError
from caf_pipeline.system.atomic_files import (
    PRIVATE,
    WRITE_BYTES,
    DirectFile,
    PiecewiseFile,
    give_rights,
)
from caf_pipeline.system.small_files import write_files

# Errors that concern the whole folder.
_FATAL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)
_PARTIAL: Final = re.compile(r"\.caf-[0-9a-f]{16}.{0,2}\.partial")
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe does not block
_SWEPT_KEPT: Final = 65_536

_AT_ONCE_BYTES: Final = 4 << 20
"""Bytes of small members in memory that one call writes: 256 of 16 KiB take 10 ms."""

# Another name may work.
_REASONS: Final = {
    errno.ELOOP: "a part of its path is a symbolic link",
    errno.ENOTDIR: "a part of its path is not a folder",
    errno.ENXIO: "its path is not a regular file",
    errno.ENAMETOOLONG: "a part of its path is too long for the file system",
    errno.EILSEQ: "the file system does not accept the name",
    errno.EINVAL: "the file system does not accept the name",
}


Body = tuple[Buffer] | Iterator[Buffer]
"""A member's bytes: complete in one piece, or an iterator of pieces."""


class NotRestored(CafError):
    """One member cannot be written here. Others can."""


class NameRefused(NotRestored):
    """The member's name is not possible here. Another name may be."""


class UnfinishedFile:
    """A file under a temporary name, which the context manager removes."""

    def __init__(self, folder: int, *, may_replace: bool = False, direct: bool = False) -> None:
        """Create the file in an open folder, which must stay open.

        With `may_replace`, only the owner can access it until `give_mode`. `direct` selects
        DirectFile.
        """
        self.folder = folder
        self.name = f".caf-{secrets.token_hex(8)}.partial"
        descriptor = os.open(
            self.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder
        )
        self._mode: int | None = None
        if may_replace:
            with contextlib.suppress(OSError):  # the file system has no modes
                mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
                os.fchmod(descriptor, PRIVATE)
                self._mode = mode
        self.file: IO[bytes] = (
            DirectFile(descriptor, "w")
            if direct
            else io.BufferedWriter(PiecewiseFile(descriptor, "w"))
        )
        self._error: CafError | OSError | None = None

    def fill(self, fill: Callable[[IO[bytes]], object]) -> None:
        try:
            fill(self.file)
        except (CafError, OSError) as error:
            self._error = error

    def seal(self, modified_ns: int | None) -> os.stat_result:
        """Close the file and return its status, or raise the error of `fill`."""
        if self._error:
            raise self._error
        self.file.flush()
        if modified_ns is not None:
            os.utime(self.file.fileno(), ns=(modified_ns, modified_ns))
        status = os.fstat(self.file.fileno())
        self.file.close()
        return status

    def give_mode(self, old: os.stat_result | None) -> None:
        """`old` is the status of the replaced file; None sets the mode of a new file."""
        if old:
            give_rights(old, self.name, self.folder)
        elif self._mode is not None:
            os.chmod(self.name, self._mode, dir_fd=self.folder)

    def remove(self) -> None:
        """A thread that still fills the file gets a ValueError."""
        # The last flush fails on a full disk, too; its bytes are removed anyway.
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.name, dir_fd=self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class FilesBelow:
    """A folder to write members below, each under a temporary name until it is complete."""

    def __init__(self, path: Path, *, force: bool) -> None:
        """Open the folder, or create it. It may be a symbolic link.

        `force` replaces existing files, but none written by this object, which remembers a number
        for each file (after `own`, only if two names may be the same file).

        Raises:
            StagingError: The folder cannot be opened or created.
        """
        self._path = path
        self._force = force
        self._is_tracked = force
        self._takes_many = True
        self._taken: set[int] = set()
        self._swept: set[int] = set()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._root = os.open(path, _FOLDER)
        except OSError as error:
            raise _not_writable(path, error) from error
        self._parent_parts: Sequence[bytes] = []
        self._parent = os.dup(self._root)
        self._is_own = False
        self._above: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for folder in (*self._above, self._parent, self._root):
            os.close(folder)

    def write(
        self, members: Iterable[tuple[str, Body]], advance: Callable[[int], None]
    ) -> Iterator[tuple[str, NotRestored | None]]:
        """Write each member at its key. Yields each key with the error of its member, or None.

        A failed member leaves no file. The next member is requested once an iterator of pieces is
        exhausted.

        Raises:
            StagingError: The folder accepts no more files.
        """
        for group in _small_neighbours(members):
            for (key, body), is_written in zip(group, self._write_at_once(group), strict=True):
                try:
                    if is_written:
                        advance(_size_bytes(body))
                    else:
                        self._write(key, body, advance)
                except NotRestored as error:
                    yield key, error
                else:
                    yield key, None

    def _write_at_once(self, members: Sequence[tuple[str, Body]]) -> Sequence[bool]:
        if len(members) > 1 and not self._is_tracked and self._takes_many:
            with contextlib.suppress(NotRestored, OSError):
                names = [_parts(key)[-1] for key, _ in members]
                bodies = [memoryview(piece) for _, body in members for piece in body]
                parent = self._open_parent(_parts(members[0][0])[:-1])
                written = write_files(parent, secrets.randbits(64), names, bodies)
                # If none is written, the file system may have no links. All would be written twice.
                self._takes_many = any(written)
                return written
        return [False] * len(members)

    def _write(self, key: str, pieces: Body, advance: Callable[[int], None]) -> None:
        def fill(file: IO[bytes]) -> None:
            for piece in pieces:
                file.write(piece)
                advance(memoryview(piece).nbytes)

        self.fill(key, _parts(key), fill)

    def fill(
        self,
        key: str,
        parts: Sequence[bytes],
        fill: Callable[[IO[bytes]], object],
        modified_ns: int | None = None,
    ) -> None:
        """`modified_ns` is the file's mtime in ns of the epoch. Raises like `write`."""
        with self._translated(key):
            parent = self._open_parent(parts[:-1])
            old = self._check_free(parent, parts[-1], key)
            with UnfinishedFile(parent, may_replace=old is not None) as unfinished:
                fill(unfinished.file)
                status = unfinished.seal(modified_ns)
                unfinished.give_mode(old)
                self._give_name(unfinished, parent, parts[-1], key, status)

    def begin(self) -> UnfinishedFile:
        """Return a large member's file, for `finish`."""
        try:
            return UnfinishedFile(self._root, may_replace=self._force, direct=True)
        except OSError as error:
            raise _not_writable(self._path, error) from error

    def finish(
        self,
        unfinished: UnfinishedFile,
        key: str,
        parts: Sequence[bytes],
        modified_ns: int | None = None,
    ) -> None:
        with self._translated(key):
            status = unfinished.seal(modified_ns)
            parent = self._open_parent(parts[:-1])
            if status.st_dev != os.fstat(parent).st_dev:  # Another disk is mounted there.
                descriptor = os.open(unfinished.name, _FILE, dir_fd=unfinished.folder)
                with open(descriptor, "rb") as filled:
                    self.fill(key, parts, partial(shutil.copyfileobj, filled), modified_ns)
                return
            unfinished.give_mode(self._check_free(parent, parts[-1], key))
            self._give_name(unfinished, parent, parts[-1], key, status)

    def open(self, key: str, parts: Sequence[bytes]) -> IO[bytes] | None:
        """Raises NameRefused if no file is possible there."""
        with self._translated(key):
            try:
                descriptor = os.open(
                    parts[-1], _FILE, dir_fd=self._open_parent(parts[:-1], make=False)
                )
            except FileNotFoundError:
                return None
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise NameRefused(f"{key!r} was not written: its path is not a regular file.")
            return open(descriptor, "rb")

    def may_be_folder(self, key: str, parts: Sequence[bytes]) -> bool:
        try:
            with self._translated(key), contextlib.suppress(FileNotFoundError):
                self._open_parent(parts, make=False)
        except NameRefused:
            return False
        return True

    def take(self, key: str, file: IO[bytes]) -> None:
        """Count an existing file as written. Raises NotRestored."""
        status = os.fstat(file.fileno())
        # A file with several links has several names, which cannot be told apart by its status.
        if self._is_tracked and status.st_nlink == 1:
            self._check_not_taken(status, key)
            self._taken.add(_number(status))

    def own(self) -> None:
        """Lock the folder, and remove leftovers of killed processes from each folder written to.

        Raises:
            HeldByOther: Another process has locked this folder, a parent, or a subfolder.
        """
        for folder in Path(os.path.realpath(self._path)).parents:
            # The folder may be unreadable, or its file system may have no locks.
            with contextlib.suppress(OSError):
                self._above.append(os.open(folder, _FOLDER))
                if os.fstat(self._above[-1]).st_uid == os.geteuid():  # any user may lock /tmp
                    _lock(self._above[-1], fcntl.LOCK_SH, folder)
        _lock(self._root, fcntl.LOCK_EX, self._path)
        self._is_own = True
        self._sweep(self._root)
        self._is_tracked = self._has_one_file_for_two_names()

    def _has_one_file_for_two_names(self) -> bool:
        """Whether the file system ignores case or Unicode normalization."""
        name = f".caf-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for mark, created, similar in (
            ("", name, name.upper()),
            ("e\u0301", f"{name}e\u0301", f"{name}\u00e9"),
        ):
            try:
                os.close(os.open(f"{created}.partial", flags, 0o666, dir_fd=self._root))
            except OSError as error:
                if mark:
                    return False  # The file system does not accept such names.
                raise _not_writable(self._path, error) from error
            is_same = os.access(f"{similar}.partial", os.F_OK, dir_fd=self._root)
            os.unlink(f"{created}.partial", dir_fd=self._root)
            if is_same:
                return True
        return False

    def _sweep(self, folder: int) -> None:
        if not self._is_own or (number := _number(os.fstat(folder))) in self._swept:
            return
        if len(self._swept) >= _SWEPT_KEPT:
            # The root is not searched again: it has unfinished files of this process.
            self._swept = {_number(os.fstat(self._root))}
        self._swept.add(number)
        for name in os.listdir(folder):
            if _PARTIAL.fullmatch(name):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FATAL:
                raise StagingError(
                    f"{key!r} cannot be written to {str(self._path)!r}: {error.strerror}."
                ) from error
            reason = _REASONS.get(error.errno or 0)
            kind = NameRefused if reason else NotRestored
            raise kind(f"{key!r} was not written: {reason or error.strerror}.") from error

    def _open_parent(self, parts: Sequence[bytes], *, make: bool = True) -> int:
        """The last folder stays open, since neighbours share it."""
        if parts == self._parent_parts:
            return self._parent
        folder = os.dup(self._root)
        try:
            for part in parts:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=folder)
                inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = inner
        except BaseException:
            os.close(folder)
            raise
        os.close(self._parent)
        self._parent, self._parent_parts = folder, parts
        self._sweep(folder)
        return folder

    def _check_free(self, parent: int, name: bytes, key: str) -> os.stat_result | None:
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(status.st_mode):
            raise NotRestored(f"{key!r} was not written: its path is a folder.")
        self._check_not_taken(status, key)
        if not self._force:
            raise NotRestored(
                f"{key!r} was not written: the file exists already.", hint="--force replaces files."
            )
        return status if stat.S_ISREG(status.st_mode) else None

    def _check_not_taken(self, status: os.stat_result, key: str) -> None:
        if _number(status) in self._taken:
            raise NotRestored(
                f"{key!r} was not written: on this file system, another member has the same name."
            )

    def _give_name(
        self, sealed: UnfinishedFile, parent: int, name: bytes, key: str, status: os.stat_result
    ) -> None:
        self._rename(sealed, parent, name, key)
        if self._is_tracked:
            self._taken.add(_number(status))

    def _rename(self, unfinished: UnfinishedFile, parent: int, name: bytes, key: str) -> None:
        """Without `force`, replaces no file that appeared meanwhile."""
        folder, temporary = unfinished.folder, unfinished.name
        if not self._force:
            try:
                os.link(
                    temporary, name, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False
                )
            except FileExistsError:
                self._check_free(parent, name, key)
                raise
            except OSError:  # no hard links; file systems report this by various errors
                self._check_free(parent, name, key)
            else:
                return
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=parent)


def is_folder(path: Path) -> bool:
    """Return whether the folder exists.

    Raises:
        StagingError: FilesBelow could not create it.
    """
    missing: list[str] = []
    try:
        for above in (path, *path.parents):
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISDIR(os.lstat(above).st_mode) and not above.is_dir():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                # A name that is too long is too long in every folder of the file system.
                for name in missing:
                    with contextlib.suppress(FileNotFoundError):
                        os.lstat(above / name)
                return not missing
            missing.append(above.name)
    except OSError as error:
        raise _not_writable(path, error) from error
    return False


def _not_writable(path: Path, error: OSError) -> StagingError:
    return StagingError(f"The folder {str(path)!r} cannot be written to: {error.strerror}.")


def _small_neighbours(members: Iterable[tuple[str, Body]]) -> Iterator[list[tuple[str, Body]]]:
    """Group consecutive small members of one folder."""
    group: list[tuple[str, Body]] = []
    group_folder, group_bytes = "", 0
    for key, body in members:
        folder = key.rpartition("/")[0]
        size_bytes = _size_bytes(body) if isinstance(body, tuple) else _AT_ONCE_BYTES
        if group and (
            folder != group_folder
            or size_bytes > WRITE_BYTES
            or group_bytes + size_bytes > _AT_ONCE_BYTES
        ):
            yield group
            group, group_bytes = [], 0
        group.append((key, body))
        group_folder, group_bytes = folder, group_bytes + size_bytes
        if size_bytes > WRITE_BYTES:
            yield group
            group, group_bytes = [], 0
    if group:
        yield group


def _size_bytes(body: Iterable[Buffer]) -> int:
    return sum(memoryview(piece).nbytes for piece in body)


def _lock(folder: int, kind: int, path: Path) -> None:
    try:
        fcntl.flock(folder, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise HeldByOther(
            f"another process restores into {str(path)!r}", holder="", hint="wait until it ends"
        ) from error


def _number(status: os.stat_result) -> int:
    """Return a file's identity: one number takes a third of the memory of two."""
    return status.st_dev << 64 | status.st_ino


def _parts(key: str) -> list[bytes]:
    parts = key.encode().split(b"/")
    if "\0" in key:
        reason = "its key holds a NUL"
    elif parts[0] == b"" and len(parts) > 1:
        reason = "its key is an absolute path"
    elif parts[-1] == b"":
        reason = "its key names a folder, not a file" if key else "its key is empty"
    elif b"" in parts:
        reason = "its key has an empty part"
    elif b"." in parts or b".." in parts:
        reason = "its key holds a part that is '.' or '..'"
    else:
        return parts
    raise NotRestored(
        f"{key!r} was not written: {reason}.", hint="`caf cat FILE KEY` writes it to stdout."
    )
