"""What makes files survive a loss of power: fsync of bytes, and of the folders that name them.

Source: fsync(2), which does not speak for the folder that a file is in.
"""

import os
from pathlib import Path


def sync_file(path: Path) -> None:
    """Make a file's bytes durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
