"""Lists, reads and writes many small files: in native code if it is installed, else in Python.

Source: `native/src/files.rs`, which does the same without the interpreter's lock.
"""

import contextlib
import hashlib
import os
from collections.abc import Sequence

__all__ = [
    "list_folder",
    "list_folder_reference",
    "read_files",
    "read_files_reference",
    "write_files",
    "write_files_reference",
]


def list_folder(path: str) -> list[tuple[str, int, int]]:
    """List a folder. `list_folder_reference` raises the error of a failure."""
    entries = _list_folder(path)
    return list_folder_reference(path) if entries is None else entries


def list_folder_reference(path: str) -> list[tuple[str, int, int]]:
    """Return name, size in bytes, and mtime in ns of all entries of a folder.

    The size is -1 if the entry must be examined: a folder, link, pipe or removed file, a name that
    is not UTF-8, or an mtime after 2262, which exceeds 64 bits. The order is the byte order of the
    paths below: `a.b` comes before the files in the folder `a`.

    Raises:
        OSError: The folder cannot be listed.
    """
    with os.scandir(path) as entries:
        rows = [
            (os.fsencode(entry.name) + b"/" * _is_folder(entry), entry.name, *_size_and_time(entry))
            for entry in entries
        ]
    return [(name, size_bytes, modified_ns) for _, name, size_bytes, modified_ns in sorted(rows)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _size_and_time(entry: os.DirEntry[str]) -> tuple[int, int]:
    try:
        entry.name.encode()
        if entry.is_file(follow_symlinks=False):
            status = entry.stat(follow_symlinks=False)
            if status.st_mtime_ns < 1 << 63:
                return status.st_size, status.st_mtime_ns
    except (OSError, UnicodeEncodeError):
        pass
    return -1, 0


def read_files_reference(
    buffer: bytearray,
    paths: Sequence[str],
    sizes: Sequence[int],
    modified_ns: Sequence[int],
    hashed: bool,
) -> tuple[int, list[bytes]]:
    """Read files back to back into an unshared buffer.

    Returns the number of files, and the SHA-256 of each if `hashed`. Stops before the first file
    that is unreadable, or has another size or mtime; the caller reads it alone to learn the reason.
    The buffer must be 1 byte larger than all files.
    """
    count = end = 0
    digests = []
    with memoryview(buffer) as view:
        for path, size_bytes, modified in zip(paths, sizes, modified_ns, strict=True):
            room = view[end : end + size_bytes + 1]  # 1 byte more, to detect growth
            if len(room) <= size_bytes or not _is_read_as_found(path, modified, room):
                break
            if hashed:
                digests.append(hashlib.sha256(room[:size_bytes]).digest())
            count, end = count + 1, end + size_bytes
    return count, digests


def _is_read_as_found(path: str, modified_ns: int, room: memoryview) -> bool:
    """The size must be 1 less than `room`, and the mtime unchanged."""
    size_bytes, taken = len(room) - 1, 0
    try:
        # The file may have become a pipe, which must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while more := os.readv(descriptor, [room[taken:]]):
                taken += more
                if taken >= size_bytes:
                    break
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return taken == status.st_size == size_bytes and status.st_mtime_ns == modified_ns


def write_files_reference(
    folder: int, first: int, names: Sequence[bytes], bodies: Sequence[memoryview]
) -> list[bool]:
    """Write files into an open folder. Returns which of them were written, in order.

    Each file appears complete, and replaces nothing. The caller writes a failed file alone to learn
    the reason. Temporary names are `.caf-<16 hex digits>.partial`, from `first` on, modulo 2**64.
    """
    temporaries = (
        f".caf-{(first + number) % (1 << 64):016x}.partial" for number in range(len(names))
    )
    return [_is_written(folder, *file) for file in zip(temporaries, names, bodies, strict=True)]


def _is_written(folder: int, temporary: str, name: bytes, body: memoryview) -> bool:
    try:
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder
        )
    except OSError:
        return False
    try:
        try:
            while body:
                body = body[os.write(descriptor, body) :]
        finally:
            os.close(descriptor)  # some file systems report a full disk only here
        # Unlike `os.replace`, a link replaces nothing.
        os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except (OSError, ValueError):  # ValueError: a NUL in its name
        return False
    finally:
        with contextlib.suppress(OSError):  # the file itself is complete
            os.unlink(temporary, dir_fd=folder)
    return True


try:
    from caf_native import list_folder as _list_folder
    from caf_native import read_files, write_files
except ImportError:  # not built: `make setup` builds it if cargo is installed
    _list_folder, read_files, write_files = (
        list_folder_reference,
        read_files_reference,
        write_files_reference,
    )
