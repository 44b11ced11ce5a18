"""Whether a process writes into a folder, or reads a file, right now: a lock that ends with the
process that has it.

Writers of temporary files share that of their folder, readers that of their file; who removes what
is left takes it alone. Source: flock(2), which is released when a process dies, however it dies.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from caf_pipeline.system.atomic_files import opened_folder


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Keep `remove_unread` from removing a file while the context lasts; one that is not there is
    no error.
    """
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(
            OSError
        ):  # where a file system has no such locks, the file may be removed
            fcntl.flock(opened.enter_context(file.open("rb")), fcntl.LOCK_SH)
        yield


def remove_unread(file: Path) -> None:
    """Remove a file, unless a process reads it."""
    with contextlib.suppress(FileNotFoundError), file.open("rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:  # a file system without such locks
            pass
        file.unlink()


@contextlib.contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Tell that temporary files in `folder` are in use while the context lasts.

    Any number of writers may.
    """
    with opened_folder(folder) as descriptor:
        # Where a file system has no such locks, nobody can have it alone either, and what is left
        # stays.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """Give True, and keep writers out while the context lasts, where no process writes into
    `folder`; False where one may.
    """
    with opened_folder(folder) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except OSError:
            alone = False
        yield alone
