"""Whether a process writes into a folder right now: a lock on the folder that ends with the process that has it.

Writers of temporary files share it; who removes what they left takes it alone.
Source: flock(2), which is released when a process dies, however it dies.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from caf_pipeline.system.atomic_files import opened_folder


@contextlib.contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Tell that temporary files in `folder` are in use while the context lasts. Any number of writers may."""
    with opened_folder(folder) as descriptor:
        # Where a file system has no such locks, nobody can have it alone either, and what is left stays.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """Give True, and keep writers out while the context lasts, where no process writes into `folder`; False where one may."""
    with opened_folder(folder) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except OSError:
            alone = False
        yield alone
