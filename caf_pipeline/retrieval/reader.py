"""Looks up one object and reads it, verified by its SHA-256."""

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
from caf_pipeline.inventory.objects import BEHIND_ALL, SkipReason
from caf_pipeline.ledger.records import Location, LocationLookups, NotArchived
from caf_pipeline.retrieval.holders import holders_of
from caf_pipeline.retrieval.object_file import IN_MEMORY_BYTES, ObjectFile, cut
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.system.atomic_files import WholeFile
from caf_pipeline.system.quantities import show_size

PIECE_BYTES: Final = 1 << 20

_TIME: Final = "%Y-%m-%d %H:%M:%S UTC"

VERSIONS_NAMED: Final = 10


@dataclass(frozen=True, slots=True)
class ArchivedObject:
    """A located object. A large one is verified in a temporary file in `folder`."""

    location: Location
    store: ChunkReader
    folder: Path | None = None

    @property
    def pieces(self) -> Iterator[bytes]:
        """The object's bytes in pieces of at most 1 MiB, all verified before the first.

        An object of more than 8 MiB needs a temporary file; UsageError if that cannot be written.
        Raises as `write_to`.
        """
        with tempfile.SpooledTemporaryFile(
            max_size=IN_MEMORY_BYTES, dir=str(self.folder) if self.folder else None
        ) as spool:
            try:
                self.write_to(spool)
            except OSError as error:
                raise UsageError(
                    f"no room to verify the object's {show_size(self.location.size_bytes)}: "
                    f"{error.strerror}",
                    hint="set TMPDIR to a folder with room, or let 'caf get' write to a file",
                ) from error
            spool.seek(0)
            while piece := spool.read(PIECE_BYTES):
                yield piece

    def write_to(self, file: IO[bytes]) -> Mapping[str, CafError]:
        """Write the object to a seekable file, from the file's position on.

        After an error the file has its old content.

        Returns:
            The errors of providers that failed and were replaced by others.

        Raises:
            IntegrityError: The providers that have the object return other bytes.
            ObjectMissing: No provider has the object.
            StoreUnreachable: No provider that answered has the right bytes, and one did not answer.
            OSError: The file cannot be written, or is not seekable.
        """
        start_byte = begin = file.tell()
        failed = dict[str, CafError]()
        try:
            for part in holders_of(self.location, self.store):
                part.copy(file.write, partial(cut, file, begin))
                begin += part.size_bytes
                failed |= part.failed
        except CafError:
            cut(file, start_byte)
            raise
        return failed

    def compare(self) -> Mapping[str, CafError]:
        """Verify the whole object without keeping it. Returns and raises as `write_to`."""
        failed: dict[str, CafError] = {}
        for part in holders_of(self.location, self.store):
            part.copy(lambda piece: None, lambda: None)
            failed |= part.failed
        return failed

    def open(self) -> ObjectFile:
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
    suggest: bool = False,
) -> ArchivedObject:
    """Look up one object, without reading its bytes.

    `as_of` chooses the version that was modified last before or at this time, or that an inventory
    up to this time found to be current. `suggest` lets the error for an unknown key name similar
    keys. Raises NotLocated, or UsageError for a version with a time.
    """
    if object_version is not None and as_of:
        raise UsageError("a version and a time exclude each other", hint="give one of them")
    location = lookup.locate(source, key, object_version, as_of=as_of)
    if location is None:
        raise not_located(lookup, source, key, object_version, as_of=as_of, suggest=suggest)
    return ArchivedObject(location, store, folder)


def not_located(
    lookup: LocationLookups,
    source: str,
    key: str,
    object_version: str | None = None,
    *,
    as_of: datetime | None = None,
    suggest: bool = False,
) -> NotLocated:
    """Return the error for a missing location. `suggest` looks for similar keys."""
    records = lookup.not_archived(source, key)
    of_version = [record for record in records if record.object_version == object_version]
    is_specific = object_version is not None or as_of
    versions, count = lookup.versions(source, key, VERSIONS_NAMED) if is_specific else ([], 0)
    if versions and not of_version:
        named = ", ".join(
            f"{version.object_version} ({version.last_modified:{_TIME}})" for version in versions
        )
        more = f" and {count - len(versions):,} older" if count > len(versions) else ""
        if as_of:
            try:
                moment = f"{as_of.astimezone(UTC):{_TIME}}"
            except OverflowError:  # in UTC it is before the year 1, or after 9999
                moment = as_of.isoformat(" ")
            which = f"as it was at {moment}"
        else:
            which = f"as version '{object_version}'"
        return NotLocated(
            f"'{key}' of source {source} is not archived {which}",
            hint=f"archived versions, with their LastModified: {named}{more}",
        )
    what = f"'{key}' of source {source}" + (f", version '{object_version}'," if of_version else "")
    if records:
        return _explained(min(of_version or records, key=_priority), what, source)
    if unknown := no_source(lookup, source):
        return unknown
    if not lookup.archived_keys(source, "", BEHIND_ALL, 1):
        return nothing_archived(source)
    hint = "no planned inventory has it, or a filter leaves it out: see 'caf status'"
    if suggest:
        # Loaded here because most look-ups find their key.
        from caf_pipeline.retrieval.near_keys import suggestion  # noqa: PLC0415

        hint = suggestion(lookup, source, key) or hint
    return NotLocated(f"{what} is not archived", hint=hint)


def nothing_archived(source: str) -> NotLocated:
    """Return the error for a source without a location, which a new or a lost ledger lacks."""
    return NotLocated(
        f"the ledger has no archived object of source '{source}'",
        hint=f"if it was archived before, and the ledger was lost, 'caf rebuild {source}' restores "
        f"the ledger; 'caf plan {source}' shows what a first run would archive",
    )


def no_source(lookup: LocationLookups, source: str) -> NotLocated | None:
    """Return the error for an unknown source."""
    if source in (sources := lookup.sources()):
        return None
    return NotLocated(
        f"the ledger has no source '{source}'", hint=f"sources: {', '.join(sources) or 'none'}"
    )


def _priority(record: NotArchived) -> int:
    if record.chunk is None:
        return 3 if record.is_over else 1
    return 0 if record.state in CLAIMING else 2


def _explained(record: NotArchived, what: str, source: str) -> NotLocated:
    if record.chunk and record.state in CLAIMING:
        return NotLocated(
            f"{what} is not archived yet: its chunk {record.chunk} is '{record.state}'",
            hint=f"'caf unpark {record.chunk}' lets runs continue it"
            if record.state == "parked"
            else f"'caf run {source}' continues it",
        )
    if record.chunk:
        return NotLocated(
            f"{what} was archived in chunk {record.chunk}, which is '{record.state}' and is not "
            "read any more",
            hint=f"if S3 still has the object, 'caf run {source}' archives it again",
        )
    if record.is_over:
        hint = (
            "no inventory lists it any more, a filter leaves it out, or its chunk was abandoned: "
            f"'caf run {source}' checks again"
        )
    elif record.retry_at:
        hint = f"it may be planned again from {record.retry_at.astimezone(UTC):{_TIME}} on"
    else:
        hint = "it is not planned again automatically"
    if record.state == SkipReason.WAITING:
        return NotLocated(
            f"{what} is not archived yet: it waits until its chunk is full",
            hint=f"{hint}, by any plan",
        )
    return NotLocated(
        f"{what} is not archived: it was skipped as {record.state} ({record.detail})", hint=hint
    )


def save(archived: ArchivedObject, path: Path) -> None:
    """Write an object to `path`, which appears when complete and verified."""
    write_whole(path, archived.write_to)


def write_whole(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Let `fill` write a file that appears when complete.

    The target of a link is written. A pipe or a device receives the complete bytes. Raises
    UsageError, or BrokenPipeError.
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
            hint="choose a file in an existing folder that has room",
        ) from error
