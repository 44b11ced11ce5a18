"""Gives one object back: one look-up, one range read, and its SHA-256.

`Found` hands out nothing before the whole object was compared; `Found.open` gives a file that can
be sought (`object_file`).

Source: promise 5 in docs/explanation/design.md.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Final

from caf_pipeline.chunk_state import CLAIMING
from caf_pipeline.errors import CafError, NotLocated, UsageError
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.protocol import LocationLookups
from caf_pipeline.ledger.records import Location, NotArchived
from caf_pipeline.retrieval.holders import holders_of
from caf_pipeline.retrieval.object_file import IN_MEMORY_BYTES, ObjectFile, cut
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.system.atomic_files import WholeFile

PIECE_BYTES: Final = 1 << 20

_TIME: Final = "%Y-%m-%d %H:%M:%S UTC"

VERSIONS_NAMED: Final = 10
"""Of an object, where another was asked for: the latest."""


@dataclass(frozen=True, slots=True)
class Found:
    """A located object.

    Attributes: location: its row, and the chunk that it is in. store: where that chunk is kept.
        folder: where an object too large for memory is compared; the system's folder for temporary
        files where None.
    """

    location: Location
    store: ChunkReader
    folder: Path | None = None

    @property
    def pieces(self) -> Iterator[bytes]:
        """The object's bytes, read and compared as a whole when the first piece is taken.

        Pieces have at most 1 MiB. Memory is bounded; the temporary file of a large object is as
        large as the object.

        Raises:
            As `write_to`; no byte was yielded. UsageError: the temporary file cannot be written.
        """
        with tempfile.SpooledTemporaryFile(
            max_size=IN_MEMORY_BYTES, dir=str(self.folder) if self.folder else None
        ) as spool:
            try:
                self.write_to(spool)
            except OSError as error:
                raise UsageError(
                    f"the object's {self.location.size_bytes} bytes cannot be kept while they are "
                    f"compared: {error.strerror}",
                    hint="set TMPDIR to a folder with room, or let 'caf get' write to a file",
                ) from error
            spool.seek(0)
            while piece := spool.read(PIECE_BYTES):
                yield piece

    def write_to(self, file: IO[bytes]) -> Mapping[str, CafError]:
        """Write the object to a file that can be sought and cut, from where it is on, from holders
        that give it right.

        Bytes are written as they come, and cut off again where they are wrong. Returns what is
        wrong with providers that others stood in for.

        Raises: IntegrityError: the providers that have it give other bytes; the message names them.
            ObjectMissing: none has it. StoreUnreachable: no provider that answers gives it right,
            and one did not answer. After any of them the file ends where it was. OSError: as the
            file's, also where it cannot be sought.
        """
        start_byte = begin = file.tell()
        failed = dict[str, CafError]()
        try:
            for one in holders_of(self.location, self.store):
                one.copy(file.write, partial(cut, file, begin))
                begin += one.size_bytes
                failed |= one.failed
        except CafError:
            cut(file, start_byte)
            raise
        return failed

    def compare(self) -> Mapping[str, CafError]:
        """Read the whole object and compare it, keeping nothing; return what is wrong with
        providers that others stood in for.

        Raises: as `write_to`.
        """
        failed: dict[str, CafError] = {}
        for one in holders_of(self.location, self.store):
            one.copy(lambda piece: None, lambda: None)
            failed |= one.failed
        return failed

    def open(self) -> ObjectFile:
        """Return the object as a file, of which nothing is read yet; see `ObjectFile` for what is
        compared when.
        """
        return ObjectFile(self.location, self.store)


def fetch(
    lookup: LocationLookups,
    store: ChunkReader,
    source: str,
    key: str,
    object_version: str | None = None,
    *,
    as_of: datetime | None = None,
    folder: Path | None = None,
) -> Found:
    """Look one object up; its bytes are read when the first piece is taken.

    Args: lookup: where its location is looked up. store: where its chunk is kept. source: the
        source's name. key: the object's key. object_version: the version id (or object version) of
        one version; the current one where None. as_of: the version that was last modified latest up
        to this time, or that an inventory up to it found current. folder: see `Found`.

    Raises: NotLocated: there is no row for it. It says why, where that is known: under way,
        skipped, lost. Where other versions are
            located, the hint names the latest. UsageError: both a version and a time are asked for.
    """
    if object_version is not None and as_of:
        raise UsageError("a version and a time exclude each other", hint="give one of them")
    location = lookup.locate(source, key, object_version, as_of=as_of)
    if location is None:
        raise not_located(lookup, source, key, object_version, as_of=as_of)
    return Found(location, store, folder)


def not_located(
    lookup: LocationLookups,
    source: str,
    key: str,
    object_version: str | None = None,
    *,
    as_of: datetime | None = None,
) -> NotLocated:
    """Return the error of a key, or of a version of one, that has no location: it says what is
    known of it.
    """
    known = lookup.not_archived(source, key)
    of_version = [one for one in known if one.object_version == object_version]
    asked = object_version is not None or as_of
    versions, count = lookup.versions(source, key, VERSIONS_NAMED) if asked else ([], 0)
    if versions and not of_version:
        named = ", ".join(
            f"{each.object_version} ({each.last_modified:{_TIME}})" for each in versions
        )
        more = f" and {count - len(versions):,} older" if count > len(versions) else ""
        which = f"as it was at {_shown(as_of)}" if as_of else f"as version '{object_version}'"
        return NotLocated(
            f"'{key}' of source {source} is not archived {which}",
            hint=f"its versions, with their LastModified: {named}{more}",
        )
    what = f"'{key}' of source {source}" + (f", version '{object_version}'," if of_version else "")
    if known:
        return _why(min(of_version or known, key=_order), what, source)
    return no_source(lookup, source) or NotLocated(
        f"{what} is not archived",
        hint="no inventory that was planned had it, or a filter leaves it out: see 'caf status'",
    )


def _shown(moment: datetime) -> str:
    try:
        return f"{moment.astimezone(UTC):{_TIME}}"
    except OverflowError:  # in UTC it is before the year 1, or after 9999
        return moment.isoformat(" ")


def no_source(lookup: LocationLookups, source: str) -> NotLocated | None:
    """Return the error of a source that the ledger does not know; None where it does."""
    if source in (sources := lookup.sources()):
        return None
    return NotLocated(
        f"the ledger has no source '{source}'", hint=f"it has {', '.join(sources) or 'none'}"
    )


def _order(one: NotArchived) -> int:
    """Return what is told first of a key: what is under way, then what is skipped, what is lost,
    and what was skipped once.
    """
    if one.chunk is None:
        return 3 if one.is_over else 1
    return 0 if one.state in CLAIMING else 2


def _why(one: NotArchived, what: str, source: str) -> NotLocated:
    if one.chunk and one.state in CLAIMING:
        hint = (
            f"'caf unpark {one.chunk}' lets runs go on with it"
            if one.state == "parked"
            else f"caf run {source} goes on with it"
        )
        return NotLocated(
            f"{what} is not archived yet: chunk {one.chunk} has it, which is '{one.state}'",
            hint=hint,
        )
    if one.chunk:
        return NotLocated(
            f"{what} was archived in chunk {one.chunk}, which is '{one.state}': its bytes are not "
            "given out any more",
            hint=f"where S3 still has it, caf run {source} archives it again",
        )
    if one.is_over:
        again = (
            "no inventory lists it any more, a filter leaves it out, or a chunk that had it was "
            "given up:"
            f" caf run {source} looks again"
        )
    elif one.retry_at:
        again = f"it may be planned again from {one.retry_at.astimezone(UTC):{_TIME}} on"
    else:
        again = "it is not planned again by itself"
    if one.state == SkipReason.WAITING:
        return NotLocated(
            f"{what} is not archived yet: it waits for a chunk to be filled",
            hint=f"{again}, by any plan",
        )
    return NotLocated(
        f"{what} is not archived: it was skipped as {one.state} ({one.detail})", hint=again
    )


def save(found: Found, path: Path) -> None:
    """Write the object to `path`, which appears only when it is whole and compared.

    Raises:
        As `Found.write_to`; nothing was written. UsageError: the path cannot be written.
    """
    write_whole(path, found.write_to)


def write_whole(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Let `fill` write a file, which appears at `path` only when it is whole; where a link is, what
    it leads to is written.

    What is no regular file, as a pipe or /dev/null, is given the bytes when they are whole, and
    stays what it is.

    Raises: As `fill`; nothing was written. UsageError: the path cannot be written. BrokenPipeError:
        the reader of a pipe left.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():
            with tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES) as spool:
                fill(spool)
                spool.seek(0)
                with path.open("wb") as file:
                    shutil.copyfileobj(spool, file)
            return
        with WholeFile(Path(os.path.realpath(path)), direct=True) as whole:
            fill(whole.file)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}",
            hint="name a file in a folder that exists, where there is room",
        ) from error
