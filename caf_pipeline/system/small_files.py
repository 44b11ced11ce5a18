"""Many small files found, read and written at once: by the compiled module where it is installed
(`native/`), else in Python.

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
    """See `list_folder_reference`, which says why a folder cannot be listed."""
    found = _list_folder(path)
    return list_folder_reference(path) if found is None else found


def list_folder_reference(path: str) -> list[tuple[str, int, int]]:
    """Return name, size in bytes, and time of modification in ns of the epoch of all in a folder;
    raise OSError.

    The size is -1 of what is not plainly a file, and has to be looked at singly: a folder, a link,
    a pipe, what is gone by now, a name that is not UTF-8, a time behind 2262, which 64 bits do not
    hold. All come in the byte order of the paths below them: `a.b` before what is in the folder
    `a`.
    """
    with os.scandir(path) as entries:
        found = [
            (os.fsencode(entry.name) + b"/" * _is_folder(entry), entry.name, *_size_and_time(entry))
            for entry in entries
        ]
    return [(name, size_bytes, modified_ns) for _, name, size_bytes, modified_ns in sorted(found)]


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
    """Put the bodies of the first files back to back; return how many files they are, and SHA-256
    of each where `hashed`.

    It ends before the first file that cannot be read, has another size in bytes, or was modified at
    another time in ns of the epoch; why, whoever reads that one alone is told. The buffer must have
    a byte more than all bodies. No other thread may use it meanwhile.
    """
    count = end = 0
    digests = []
    with memoryview(buffer) as view:
        for path, size_bytes, modified in zip(paths, sizes, modified_ns, strict=True):
            room = view[end : end + size_bytes + 1]  # a byte more: a file that has grown shows it
            if len(room) <= size_bytes or not _is_read_as_found(path, modified, room):
                break
            if hashed:
                digests.append(hashlib.sha256(room[:size_bytes]).digest())
            count, end = count + 1, end + size_bytes
    return count, digests


def _is_read_as_found(path: str, modified_ns: int, room: memoryview) -> bool:
    """Read a file; tell whether it has exactly one byte less than `room`, and was last modified
    when it was found.
    """
    size_bytes, taken = len(room) - 1, 0
    try:
        # Something else may be there by now: a pipe must not be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while more := os.readv(descriptor, [room[taken:]]):
                taken += more
                if taken >= size_bytes:  # nothing is behind it where the file has this size
                    break
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return taken == found.st_size == size_bytes and found.st_mtime_ns == modified_ns


def write_files_reference(
    folder: int, first: int, names: Sequence[bytes], bodies: Sequence[memoryview]
) -> list[bool]:
    """Write files into a folder that is open; tell which of them are there now, in their order.

    Each is whole when it appears, and replaces nothing. Of one that cannot be written nothing is
    left; why, whoever writes that one alone is told. Until then they are called `.caf-<16
    hexadecimal digits>.partial`, numbered from `first`, below 2**64.
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
            os.close(descriptor)  # some file systems tell only here that no room was left
        os.link(
            temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False
        )  # unlike `replace`, over nothing
    except (OSError, ValueError):  # ValueError: a NUL in its name
        return False
    finally:
        with contextlib.suppress(OSError):  # what has its name is whole, whatever is left beside it
            os.unlink(temporary, dir_fd=folder)
    return True


try:
    from caf_native import list_folder as _list_folder
    from caf_native import read_files, write_files
except ImportError:  # not built: `make setup` does it where cargo is
    _list_folder, read_files, write_files = (
        list_folder_reference,
        read_files_reference,
        write_files_reference,
    )
