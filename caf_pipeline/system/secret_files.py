"""Files with a secret, and folders, which only their owner can access."""

import os
import pwd
import stat
from pathlib import Path
from typing import Final

from caf_pipeline.errors import SettingsError
from caf_pipeline.system.atomic_files import PRIVATE, sync_folder

MAX_SECRET_BYTES: Final = 1 << 20
"""A key has a few hundred bytes. The limit keeps a wrong file out of memory."""

OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
"""The permissions of everybody but the owner."""


def read_secret(path: Path, refused: type[SettingsError], *, hint: str) -> bytes:
    """Return a file of at most 1 MiB.

    Raises `refused` if other users can access the file, if it is larger, or with the hint.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & OTHERS:
                raise refused(f"{path} can be read by other users", hint=f"run: chmod 600 {path}")
            secret = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise refused(f"{path} cannot be read: {error.strerror}", hint=hint) from None
    if len(secret) > MAX_SECRET_BYTES:
        raise refused(f"{path} has more than {MAX_SECRET_BYTES} bytes", hint=hint)
    return secret


def write_secret(path: Path, secret: bytes) -> None:
    """Create a durable file of mode 600. Raises FileExistsError if the path exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE)
    try:
        with open(descriptor, "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)
    except BaseException:
        path.unlink()
        raise


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents with mode 700. Existing ones keep their mode."""
    if not folder.parent.exists():
        make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def owner_of(path: Path) -> str:
    """Return the user who owns a path, or its nearest parent that exists and may be seen."""
    try:
        return user_name(path.stat().st_uid)
    except OSError:
        return owner_of(path.parent)


def user_name(uid: int) -> str:
    """Return a user's name, or the number as text if there is no such user."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
