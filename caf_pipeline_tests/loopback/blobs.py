"""The bytes of one provider: complete files by their root.

A real provider splits files into shared blocks, so that deleting a file damages others that begin
with the same 2 MiB. This one does not imitate that.
"""

import os
import threading
from pathlib import Path
from typing import Final

_LOST: Final = ".lost"


class BlobStore:
    """A folder of files, named after their roots in hex."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._uploads = folder / "uploads"
        self._lock = threading.Lock()
        self._uploads.mkdir(parents=True, exist_ok=True)
        for leftover in self._uploads.iterdir():
            leftover.unlink()
        self._used = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())

    @property
    def uploads(self) -> Path:
        """The folder of incomplete uploads."""
        return self._uploads

    @property
    def used_bytes(self) -> int:
        """The number of stored bytes."""
        return self._used

    def path(self, root: str) -> Path:
        """Return the path of a root's bytes."""
        return self._folder / root

    def has(self, root: str) -> bool:
        """Return whether a root's bytes are here."""
        return self.path(root).exists()

    def roots(self) -> list[str]:
        """Return the roots of all files."""
        return sorted(
            file.name for file in self._folder.iterdir() if file.is_file() and not file.suffix
        )

    def put(self, upload: Path, root: str) -> None:
        """Move an upload to its root's path."""
        with self._lock:
            before = self.path(root).stat().st_size if self.path(root).exists() else 0
            size_bytes = upload.stat().st_size
            os.replace(upload, self.path(root))
            self._lost(root).unlink(missing_ok=True)
            self._used += size_bytes - before

    def lose_range(self, root: str, start_byte: int, end_byte: int) -> None:
        """Lose `[start_byte, end_byte)` of a root's bytes until they are uploaded again."""
        with self._lock:
            self._lost(root).write_text(f"{start_byte} {end_byte}")

    def lost_range(self, root: str) -> tuple[int, int] | None:
        """Return the lost range, end exclusive, or None."""
        try:
            start_byte, end_byte = self._lost(root).read_text().split()
        except FileNotFoundError:
            return None
        return int(start_byte), int(end_byte)

    def delete(self, root: str) -> None:
        """Delete a root's bytes."""
        with self._lock:
            gone = self.path(root)
            if not gone.exists():
                return
            self._used -= gone.stat().st_size
            gone.unlink()
            self._lost(root).unlink(missing_ok=True)

    def _lost(self, root: str) -> Path:
        return self._folder / f"{root}{_LOST}"
