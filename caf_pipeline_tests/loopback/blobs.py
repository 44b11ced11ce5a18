"""The bytes of one provider: complete files by their root.

A real provider splits files into shared blocks. This one only imitates the visible effect: deleting
a file damages others that begin with the same 2 MiB pieces, until they are uploaded again.
"""

import os
import threading
from pathlib import Path
from typing import Final

PIECE: Final = 2 << 20
_DAMAGED: Final = ".damaged"
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
        """Return whether a root's bytes are here and fully readable."""
        return self.path(root).exists() and not self.lost_bytes(root)

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
            self._damaged(root).unlink(missing_ok=True)
            self._lost(root).unlink(missing_ok=True)
            self._used += size_bytes - before

    def lost_bytes(self, root: str) -> int:
        """Return how many bytes at the beginning are no longer readable."""
        file = self._damaged(root)
        return int(file.read_text()) if file.exists() else 0

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
        """Delete a root's bytes and the pieces that other files share with its beginning."""
        with self._lock:
            gone = self.path(root)
            if not gone.exists():
                return
            for other in self.roots():
                if other != root and (shared := _shared_bytes(gone, self.path(other))):
                    self._damaged(other).write_text(str(max(shared, self.lost_bytes(other))))
            self._used -= gone.stat().st_size
            gone.unlink()
            self._damaged(root).unlink(missing_ok=True)
            self._lost(root).unlink(missing_ok=True)

    def _damaged(self, root: str) -> Path:
        return self._folder / f"{root}{_DAMAGED}"

    def _lost(self, root: str) -> Path:
        return self._folder / f"{root}{_LOST}"


def _shared_bytes(first: Path, second: Path) -> int:
    """Return the length of the whole pieces at the beginning that both files share."""
    shared = 0
    with open(first, "rb") as first_file, open(second, "rb") as second_file:
        while len(piece := first_file.read(PIECE)) == PIECE and piece == second_file.read(PIECE):
            shared += PIECE
    return shared
