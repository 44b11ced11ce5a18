"""Gives one object back: one look-up, one range read, and its SHA-256 compared.

Not here: whole chunks (`chunk_file`), what a terminal shows (`cli`).
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from caf_pipeline.errors import IntegrityError, NotLocated, UsageError
from caf_pipeline.interfaces import ChunkStore, Ledger, Location


@dataclass(frozen=True, slots=True)
class Found:
    """A located object. `pieces` ends with IntegrityError where the whole was not what the row says."""

    location: Location
    pieces: Iterator[bytes]

    @property
    def size_bytes(self) -> int:
        """The object's length."""
        return self.location.row.end_byte - self.location.row.start_byte


def fetch(ledger: Ledger, store: ChunkStore, source: str, key: str, object_version: str | None = None) -> Found:
    """Look one object up; its bytes are read as `pieces` is iterated.

    Args:
        ledger: where its location is looked up.
        store: where its chunk is kept.
        source: the source's name.
        key: the object's key.
        object_version: the version id (or object version) of one version; the current one where None.

    Raises:
        NotLocated: there is no row for it.
    """
    location = ledger.locate(source, key, object_version)
    if location is None:
        raise NotLocated(
            f"'{key}' of source {source} is not archived", hint="'caf status' shows what is planned, claimed and skipped"
        )
    return Found(location, _checked(store, location, key))


def _checked(store: ChunkStore, location: Location, key: str) -> Iterator[bytes]:
    row = location.row
    digest = hashlib.sha256()
    if row.end_byte > row.start_byte:
        for piece in store.read(location.posting, row.start_byte, row.end_byte):
            digest.update(piece)
            yield piece
    if digest.digest() != row.sha256:
        raise IntegrityError(
            f"'{key}' does not have the SHA-256 of its location row (chunk {location.chunk})",
            hint="the chunk is damaged at the store; do not use these bytes",
        )


def save(found: Found, path: Path) -> None:
    """Write the object to `path`, which appears only when it is whole and compared.

    Raises:
        IntegrityError: nothing was written. UsageError: the path cannot be written.
    """
    try:
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint="name a file in a folder that exists") from error
    try:
        with os.fdopen(fd, "wb") as file:
            for piece in found.pieces:
                file.write(piece)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp made it 0600; the user expects what any program makes
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
        raise
