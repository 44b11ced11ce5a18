"""Locks that show whether a process writes into a folder or reads a file.

They end with the process. Writers share a lock on the folder, readers on the file; a process that
removes leftovers locks exclusively. Source: flock(2).
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from caf_pipeline.system.atomic_files import opened_folder


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Protect a file from `remove_unread` while the context lasts. It may be missing."""
    with contextlib.ExitStack() as opened:
        # Some file systems have no locks; there the file may be removed.
        with contextlib.suppress(OSError):
            fcntl.flock(opened.enter_context(file.open("rb")), fcntl.LOCK_SH)
        yield


def remove_unread(file: Path) -> None:
    """Remove a file unless a process reads it."""
    with contextlib.suppress(FileNotFoundError), file.open("rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:  # a file system without locks
            pass
        file.unlink()


@contextlib.contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Mark temporary files in `folder` as used while the context lasts."""
    with opened_folder(folder) as descriptor:
        # Without locks, `alone_in` yields False, and leftovers stay.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """Yield whether no other process writes into `folder`.

    If True, writers are kept out.
    """
    with opened_folder(folder) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except OSError:
            alone = False
        yield alone
