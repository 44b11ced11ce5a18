"""Files with a secret, which only their owner can access."""

import os
import stat
from pathlib import Path
from typing import Final

from caf_pipeline.errors import SettingsError
from caf_pipeline.system.atomic_files import PRIVATE, sync_folder

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def read_secret(path: Path, refused: type[SettingsError], *, hint: str) -> bytes:
    """Raise `refused` if other users can access the file, or with the hint."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & _OTHERS:
                raise refused(f"{path} can be read by other users", hint=f"run: chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise refused(f"{path} cannot be read: {error.strerror}", hint=hint) from None


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
