"""Gives one object back: one look-up, one range read, and its SHA-256 compared before any of its bytes are handed out.

An object in parts is one range read and one SHA-256 a part.

Source: promise 5 in docs/design.md.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from caf_pipeline.errors import CafError, IntegrityError, NotLocated, StoredChunkMissing, StoreError, StoreUnreachable, UsageError
from caf_pipeline.ledger.records import LocatedRange, Location
from caf_pipeline.store.protocol import ChunkStore
from caf_pipeline.system.atomic_files import WholeFile

if TYPE_CHECKING:
    from caf_pipeline.ledger.postgres import Ledger

IN_MEMORY_BYTES: Final = 8 << 20
"""An object is compared in memory up to this size, in a temporary file beyond it."""

PIECE_BYTES: Final = 1 << 20

VERSIONS_NAMED: Final = 10
"""Of an object, where another was asked for: the latest."""


@dataclass(frozen=True, slots=True)
class Found:
    """A located object.

    Attributes:
        location: its row, and the chunk that it is in.
        store: where that chunk is kept.
        folder: where an object too large for memory is compared; the system's folder for temporary files where None.
    """

    location: Location
    store: ChunkStore
    folder: Path | None = None

    @property
    def size_bytes(self) -> int:
        """The object's length."""
        return self.location.row.end_byte - self.location.row.start_byte

    @property
    def pieces(self) -> Iterator[bytes]:
        """The object's bytes, read and compared as a whole when the first piece is taken.

        Pieces have at most 1 MiB. Memory is bounded; the temporary file of a large object is as large as the object.

        Raises:
            As `write_to`; no byte was yielded. UsageError: the temporary file cannot be written.
        """
        with tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES, dir=str(self.folder) if self.folder else None) as spool:
            try:
                self.write_to(spool)
            except OSError as error:
                raise UsageError(
                    f"the object's {self.size_bytes} bytes cannot be kept while they are compared: {error.strerror}",
                    hint="set TMPDIR to a folder with room, or let 'caf get' write to a file",
                ) from error
            spool.seek(0)
            while piece := spool.read(PIECE_BYTES):
                yield piece

    def write_to(self, file: IO[bytes]) -> None:
        """Write the object to an empty file that can be sought and cut, from the first holder that gives it right.

        Raises:
            IntegrityError: the providers that have it give other bytes; the message names them. StoredChunkMissing: none has it.
            StoreUnreachable: no provider that answers gives it right, and one did not answer.
            After any of them the file holds nothing.
        """
        if not self.size_bytes:
            if self.location.row.sha256 != hashlib.sha256().digest():
                raise self._refused([], [IntegrityError("its row has the SHA-256 of other bytes")])
            return
        begin = 0
        for one in self.location.ranges:
            self._write_range(one, file, begin)
            begin += one.end_byte - one.start_byte
        if begin != self.size_bytes:
            _cut(file, 0)
            raise self._refused([], [IntegrityError(f"its parts have {begin} bytes of {self.size_bytes}")])

    def _write_range(self, one: LocatedRange, file: IO[bytes], begin: int) -> None:
        """Write a range to a file of so many bytes, as `write_to`."""
        providers, errors = [], []
        for provider in self.store.holders(one.posting):
            try:
                self._copy_from(provider, one, file)
            except (StoreError, IntegrityError) as error:
                providers.append(provider)
                errors.append(error)
                _cut(file, begin)
            else:
                return
        _cut(file, 0)
        raise self._refused(providers, errors, one.chunk)

    def _copy_from(self, provider: str, one: LocatedRange, file: IO[bytes]) -> None:
        digest = hashlib.sha256()
        for piece in self.store.read(one.posting, one.start_byte, one.end_byte, provider=provider):
            digest.update(piece)
            file.write(piece)
        if digest.digest() != one.sha256:
            raise IntegrityError("its bytes do not match the SHA-256 in the ledger")

    def _refused(self, providers: list[str], errors: list[StoreError | IntegrityError], chunk: str = "") -> CafError:
        """Return the error of an object that no holder gave right: the kind that says whether another try can help."""
        what = f"'{self.location.row.key}' (chunk {chunk or self.location.chunk})"
        if not errors:
            return StoredChunkMissing(f"no provider has {what}", hint="'caf jackal repair' stores its chunk again")
        said = "; ".join(f"{provider}: {error}" for provider, error in zip(providers, errors, strict=False)) or str(errors[0])
        message = f"no provider gives {what} as it was archived: {said}"
        if any(not error.permanent for error in errors):
            return StoreUnreachable(message, hint="try again later")
        if any(isinstance(error, IntegrityError) for error in errors):
            return IntegrityError(message, hint="the chunk is damaged at the store: 'caf jackal repair' stores it again")
        return StoredChunkMissing(message, hint="'caf jackal repair' stores its chunk again")


def _cut(file: IO[bytes], size_bytes: int) -> None:
    file.seek(size_bytes)
    file.truncate()


def fetch(
    ledger: "Ledger", store: ChunkStore, source: str, key: str, object_version: str | None = None, *, folder: Path | None = None
) -> Found:
    """Look one object up; its bytes are read when the first piece is taken.

    Args:
        ledger: where its location is looked up.
        store: where its chunk is kept.
        source: the source's name.
        key: the object's key.
        object_version: the version id (or object version) of one version; the current one where None.
        folder: see `Found`.

    Raises:
        NotLocated: there is no row for it; where there are other versions, the hint names the latest.
    """
    location = ledger.locate(source, key, object_version)
    if location is None:
        raise _not_located(ledger, source, key, object_version)
    return Found(location, store, folder)


def _not_located(ledger: "Ledger", source: str, key: str, object_version: str | None) -> NotLocated:
    versions, count = ledger.versions(source, key, VERSIONS_NAMED) if object_version is not None else ([], 0)
    if not versions:
        return NotLocated(
            f"'{key}' of source {source} is not archived", hint="'caf status' shows what is planned, claimed and skipped"
        )
    named = ", ".join(f"{each.object_version} ({each.last_modified:%Y-%m-%d %H:%M:%S} UTC)" for each in versions)
    more = f" and {count - len(versions):,} older" if count > len(versions) else ""
    return NotLocated(
        f"'{key}' of source {source} is not archived as version '{object_version}'",
        hint=f"its versions, with their LastModified: {named}{more}",
    )


def save(found: Found, path: Path) -> None:
    """Write the object to `path`, which appears only when it is whole and compared.

    Raises:
        As `Found.write_to`; nothing was written. UsageError: the path cannot be written.
    """
    try:
        with WholeFile(path) as whole:
            found.write_to(whole.file)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint="name a file in a folder that exists, where there is room"
        ) from error
