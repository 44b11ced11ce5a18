"""Members written below a folder, and never outside it.

Every part of a path is opened in the folder before it without following links, so that no key and
no link that lies in the folder leads out.
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

# The whole folder's trouble, not one member's.
_FATAL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)
_PARTIAL: Final = re.compile(r"\.caf-[0-9a-f]{16}.{0,2}\.partial")
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE: Final = (
    os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
)  # a pipe is not waited for
_SWEPT_KEPT: Final = (
    65_536  # folders that are known to be looked through; one more is looked through again
)
_AT_ONCE_BYTES: Final = (
    4 << 20
)  # of small members, which are in memory; 256 of 16 KiB take ten milliseconds or more
_REASONS: Final = {  # for which another name may do
    errno.ELOOP: "a part of its path is a symbolic link",
    errno.ENOTDIR: "a part of its path is not a folder",
    errno.ENXIO: "what is at its path is not a file",
    errno.ENAMETOOLONG: "a part of its path is too long for the file system",
    errno.EILSEQ: "the file system does not take such names",
    errno.EINVAL: "the file system does not take such names",
}


Body = tuple[Buffer] | Iterator[Buffer]
"""A member's bytes: whole, in one piece, or as they come."""


class NotRestored(CafError):
    """One member cannot be written here; others can."""


class NameRefused(NotRestored):
    """A member cannot have this name here; another one may do."""


class UnfinishedFile:
    """A file that does not have its name yet.

    A context manager, which removes it where it did not get one.
    """

    def __init__(self, folder: int, *, may_replace: bool = False, direct: bool = False) -> None:
        """Make it in an open folder, which stays open while it has no name; raises OSError.

        Where it `may_replace` a file, it is its owner's alone until `give_mode`. What is `direct`
        is a `DirectFile`.
        """
        self.folder = folder
        self.name = f".caf-{secrets.token_hex(8)}.partial"
        descriptor = os.open(
            self.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder
        )
        self._mode: int | None = None
        if may_replace:
            with contextlib.suppress(OSError):  # a file system that keeps no modes
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
        """Fill the file, in any thread. An error is kept, and raised by `seal`."""
        try:
            fill(self.file)
        except (CafError, OSError) as error:
            self._error = error

    def seal(self, modified_ns: int | None) -> os.stat_result:
        """End it, and return what the system says of it; raises what `fill` met, or OSError."""
        if self._error:
            raise self._error
        self.file.flush()
        if modified_ns is not None:
            os.utime(self.file.fileno(), ns=(modified_ns, modified_ns))
        status = os.fstat(self.file.fileno())
        self.file.close()
        return status

    def give_mode(self, old: os.stat_result | None) -> None:
        """Give it the rights of the file that it replaces; those that any new file has here, where
        there is none.
        """
        if old:
            give_rights(old, self.name, self.folder)
        elif self._mode is not None:
            os.chmod(self.name, self._mode, dir_fd=self.folder)

    def remove(self) -> None:
        """Remove it, where it has no other name; a thread that still fills it meets a
        ValueError.
        """
        with contextlib.suppress(
            OSError
        ):  # a full disk fails the last flush too; its bytes are being removed anyway
            self.file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.name, dir_fd=self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class FilesBelow:
    """A folder below which members are written, each under a temporary name until it is whole.

    A context manager.
    """

    def __init__(self, path: Path, *, force: bool) -> None:
        """Open the folder, which is made if it is missing, and may be a symbolic link; raises
        StagingError where it cannot.

        With `force`, files that are there already are replaced, but never one of this run: memory
        takes a number for each. A folder that is owned (`own`) takes none, but where its file
        system has one file for several names.
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
        """Write members below the folder, each at its key; yield each key with why nothing is
        there, or None.

        Of one that is not, nothing is left. The next member is asked for when an iterator was taken
        to its end.

        Raises:
            StagingError: the folder takes no more; nothing is left of the member that it names.
        """
        for some in _small_neighbours(members):
            for (key, body), is_written in zip(some, self._write_at_once(some), strict=True):
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
        """Write small members of one folder as far as they can be; tell which are there.

        Why others are not, `_write` says.
        """
        if len(members) > 1 and not self._is_tracked and self._takes_many:
            with contextlib.suppress(NotRestored, OSError):
                names = [_parts(key)[-1] for key, _ in members]
                bodies = [memoryview(piece) for _, body in members for piece in body]
                parent = self._open_parent(_parts(members[0][0])[:-1])
                written = write_files(parent, secrets.randbits(64), names, bodies)
                self._takes_many = any(
                    written
                )  # else the file system may have no links, and all would be written twice
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
        """Write a file of these parts below the folder, by what fills it; `modified_ns` is its
        mtime. Raises as `write`.
        """
        with self._translated(key):
            parent = self._open_parent(parts[:-1])
            old = self._check_free(parent, parts[-1], key)
            with UnfinishedFile(parent, may_replace=old is not None) as unfinished:
                fill(unfinished.file)
                status = unfinished.seal(modified_ns)
                unfinished.give_mode(old)
                self._give_name(unfinished, parent, parts[-1], key, status)

    def begin(self) -> UnfinishedFile:
        """Return a file for a large member, that `finish` gives its name when it is filled; raises
        StagingError.
        """
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
        """Give a file that was filled its name below the folder.

        Raises what `fill` raises, and what filling it raised.
        """
        with self._translated(key):
            status = unfinished.seal(modified_ns)
            parent = self._open_parent(parts[:-1])
            if (
                status.st_dev != os.fstat(parent).st_dev
            ):  # another disk is mounted there: it takes a copy
                with open(
                    os.open(unfinished.name, _FILE, dir_fd=unfinished.folder), "rb"
                ) as filled:
                    self.fill(key, parts, partial(shutil.copyfileobj, filled), modified_ns)
                return
            unfinished.give_mode(self._check_free(parent, parts[-1], key))
            self._give_name(unfinished, parent, parts[-1], key, status)

    def open(self, key: str, parts: Sequence[bytes]) -> IO[bytes] | None:
        """Return the file that is at these parts, None where nothing is.

        Raises: NameRefused: no regular file can be there. NotRestored: it cannot be read.
            StagingError: as `write`.
        """
        with self._translated(key):
            try:
                descriptor = os.open(
                    parts[-1], _FILE, dir_fd=self._open_parent(parts[:-1], make=False)
                )
            except FileNotFoundError:
                return None
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise NameRefused(f"{key!r} was not written: what is at its path is not a file.")
            return open(descriptor, "rb")

    def may_be_folder(self, key: str, parts: Sequence[bytes]) -> bool:
        """Tell whether a folder is at these parts, or can be made there; raises as `open`, but for
        NameRefused.
        """
        try:
            with self._translated(key), contextlib.suppress(FileNotFoundError):
                self._open_parent(parts, make=False)
        except NameRefused:
            return False
        return True

    def take(self, key: str, file: IO[bytes]) -> None:
        """Count a file that is there as a member's; raises NotRestored where it is another one's,
        whose name is the same here.
        """
        status = os.fstat(file.fileno())
        # Names that are links of one file are told apart; which of them this is, nothing says.
        if self._is_tracked and status.st_nlink == 1:
            self._check_not_taken(status, key)
            self._taken.add(_number(status))

    def own(self) -> None:
        """Keep other processes that call this out of the folder, and remove what killed ones left,
        wherever something is written.

        Raises: HeldByOther: another one has it, or one that it is in, or one in it. StagingError:
            no file can be made in it.
        """
        for folder in Path(os.path.realpath(self._path)).parents:
            with contextlib.suppress(
                OSError
            ):  # it may not be read, or its file system has no such locks
                self._above.append(os.open(folder, _FOLDER))
                if os.fstat(self._above[-1]).st_uid == os.geteuid():  # anybody may lock /tmp
                    _lock(self._above[-1], fcntl.LOCK_SH, folder)
        _lock(self._root, fcntl.LOCK_EX, self._path)
        self._is_own = True
        self._sweep(self._root)
        self._is_tracked = self._has_one_file_for_two_names()

    def _has_one_file_for_two_names(self) -> bool:
        """Tell whether names that differ in case, or in Unicode's normal form only, are one file
        here, by trying it.
        """
        name = f".caf-{secrets.token_hex(8)}"
        for mark, one, other in (
            ("", name, name.upper()),
            ("e\u0301", f"{name}e\u0301", f"{name}\u00e9"),
        ):
            try:
                os.close(
                    os.open(
                        f"{one}.partial",
                        os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                        0o666,
                        dir_fd=self._root,
                    )
                )
            except OSError as error:
                if mark:
                    return False  # it takes no such names
                raise _not_writable(self._path, error) from error
            is_other = os.access(f"{other}.partial", os.F_OK, dir_fd=self._root)
            os.unlink(f"{one}.partial", dir_fd=self._root)
            if is_other:
                return True
        return False

    def _sweep(self, folder: int) -> None:
        """Remove unfinished files of killed processes; a folder is looked through once, however
        often one comes back to it.
        """
        if not self._is_own or (number := _number(os.fstat(folder))) in self._swept:
            return
        if len(self._swept) >= _SWEPT_KEPT:
            self._swept = {
                _number(os.fstat(self._root))
            }  # it has files of this process, which are begun before their turn
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
        """Return the folder of these parts, made where it is missing and `make`.

        The last one stays open: neighbours share it.
        """
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
        """Return what the system says of the file that may be replaced there, None where none
        is.
        """
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(status.st_mode):
            raise NotRestored(f"{key!r} was not written: a folder has its path.")
        self._check_not_taken(status, key)
        if not self._force:
            raise NotRestored(
                f"{key!r} was not written: the file exists already.", hint="--force replaces files."
            )
        return status if stat.S_ISREG(status.st_mode) else None

    def _check_not_taken(self, status: os.stat_result, key: str) -> None:
        if _number(status) in self._taken:
            raise NotRestored(
                f"{key!r} was not written: this file system does not distinguish its name from "
                "another member's."
            )

    def _give_name(
        self, sealed: UnfinishedFile, parent: int, name: bytes, key: str, status: os.stat_result
    ) -> None:
        self._rename(sealed, parent, name, key)
        if self._is_tracked:
            self._taken.add(_number(status))

    def _rename(self, unfinished: UnfinishedFile, parent: int, name: bytes, key: str) -> None:
        """Give a whole file its name; without `force` no file is replaced that appeared while it
        was filled.
        """
        folder, temporary = unfinished.folder, unfinished.name
        if not self._force:
            try:
                os.link(
                    temporary, name, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False
                )
            except FileExistsError:
                self._check_free(parent, name, key)
                raise
            except OSError:  # a file system that has no hard links says so by many numbers
                self._check_free(parent, name, key)
            else:
                return
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=parent)


def is_folder(path: Path) -> bool:
    """Tell whether a folder is there; raise StagingError, as `FilesBelow`, where none is and none
    can be made. Makes nothing.
    """
    missing: list[str] = []
    try:
        for above in (path, *path.parents):
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISDIR(os.lstat(above).st_mode) and not above.is_dir():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                for name in (
                    missing
                ):  # what is too long for a name is too long in any folder of the file system
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
    """Group what is written at once: small members, one after the other, of one folder.

    Any other one is alone.
    """
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
            f"another process restores into {str(path)!r}", holder="", hint="wait for it to end"
        ) from error


def _number(status: os.stat_result) -> int:
    """Return what no other file has: one number takes a third of the memory of two."""
    return status.st_dev << 64 | status.st_ino


def _parts(key: str) -> list[bytes]:
    """Split a key into the names that lead to its file; raise NotRestored where it names none."""
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
