"""The bytes that one provider has, by their root: files, whole or not there.

A real provider keeps a file as blocks that files share. Of that this one keeps what shows: when a
file is deleted, others that begin with the same 2 MiB pieces have lost those, until they are
uploaded again.
"""

import os
import threading
from pathlib import Path
from typing import Final

PIECE: Final = 2 << 20
_DAMAGED: Final = ".damaged"
_LOST: Final = ".lost"


class BlobStore:
    """A folder of files, each named after its root in hex."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._uploads = folder / "uploads"
        self._lock = threading.Lock()
        self._uploads.mkdir(parents=True, exist_ok=True)
        for left in self._uploads.iterdir():
            left.unlink()
        self._used = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())

    @property
    def uploads(self) -> Path:
        """Where uploads are written before they are whole."""
        return self._uploads

    @property
    def used_bytes(self) -> int:
        """How much is stored."""
        return self._used

    def path(self, root: str) -> Path:
        """Return where a root's bytes are or would be."""
        return self._folder / root

    def has(self, root: str) -> bool:
        """Whether a root's bytes are here and all of them can be read."""
        return self.path(root).exists() and not self.lost_bytes(root)

    def roots(self) -> list[str]:
        """Return all that is here."""
        return sorted(
            file.name for file in self._folder.iterdir() if file.is_file() and not file.suffix
        )

    def put(self, upload: Path, root: str) -> None:
        """Take an upload's bytes over."""
        with self._lock:
            before = self.path(root).stat().st_size if self.path(root).exists() else 0
            size_bytes = upload.stat().st_size
            os.replace(upload, self.path(root))
            self._damaged(root).unlink(missing_ok=True)
            self._lost(root).unlink(missing_ok=True)
            self._used += size_bytes - before

    def lost_bytes(self, root: str) -> int:
        """Return how many bytes at the beginning cannot be read any more."""
        file = self._damaged(root)
        return int(file.read_text()) if file.exists() else 0

    def lose_range(self, root: str, start_byte: int, end_byte: int) -> None:
        """Lose `[start_byte, end_byte)` of a root's bytes until they are uploaded again."""
        with self._lock:
            self._lost(root).write_text(f"{start_byte} {end_byte}")

    def lost_range(self, root: str) -> tuple[int, int] | None:
        """Return the range that is lost, end exclusive; None if all bytes are here."""
        try:
            start_byte, end_byte = self._lost(root).read_text().split()
        except FileNotFoundError:
            return None
        return int(start_byte), int(end_byte)

    def delete(self, root: str) -> None:
        """Take a root's bytes away, and with them the pieces that other files begin with, too."""
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


def _shared_bytes(left: Path, right: Path) -> int:
    """Return the length of the whole pieces that both files begin with."""
    shared = 0
    with open(left, "rb") as one, open(right, "rb") as other:
        while len(piece := one.read(PIECE)) == PIECE and piece == other.read(PIECE):
            shared += PIECE
    return shared
