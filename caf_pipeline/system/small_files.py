"""Many small files read at once: by the compiled module where it is installed (`native/`), else in Python.

Source: `native/src/files.rs`, which does the same without the interpreter's lock.
"""

import hashlib
import os
from collections.abc import Sequence

__all__ = ["read_files", "read_files_reference"]


def read_files_reference(
    buffer: bytearray, paths: Sequence[str], sizes: Sequence[int], modified_ns: Sequence[int], hashed: bool
) -> tuple[int, list[bytes]]:
    """Put the bodies of the first files back to back; return how many files they are, and SHA-256 of each where `hashed`.

    It ends before the first file that cannot be read, has another size in bytes, or was modified at another time in ns of the
    epoch; why, whoever reads that one alone is told. The buffer must have a byte more than all bodies. No other thread may
    use it meanwhile.
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
    """Read a file; tell whether it has exactly one byte less than `room`, and was last modified when it was found."""
    taken = 0
    try:
        # Something else may be there by now: a pipe must not be waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            while size_bytes := file.readinto(room[taken:]):
                taken += size_bytes
            found = os.fstat(file.fileno())
    except OSError:
        return False
    return taken + 1 == len(room) and found.st_mtime_ns == modified_ns


try:
    from caf_native import read_files
except ImportError:  # not built: `make setup` does it where cargo is
    read_files = read_files_reference
