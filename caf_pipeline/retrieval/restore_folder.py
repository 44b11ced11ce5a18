"""Restores archived objects as files below a folder; `file_names` maps their keys to paths."""

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from typing import IO, Final

from caf_pipeline.errors import IntegrityError, StoreError
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.bulk import ObjectRead, in_order, read_located
from caf_pipeline.retrieval.file_names import path_of
from caf_pipeline.retrieval.object_file import IN_MEMORY_BYTES
from caf_pipeline.retrieval.reader import PIECE_BYTES, ArchivedObject
from caf_pipeline.retrieval.restore import RestoredObject, RestoreOutcome
from caf_pipeline.retrieval.side_by_side import side_by_side
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.system.files_below import FilesBelow, NameRefused, NotRestored, UnfinishedFile

BATCH_BYTES: Final = 64 << 20
"""Bytes of small objects read as one batch: enough for all requests."""

BATCH_OBJECTS: Final = 10_000

MOST_NAMES: Final = 4
"""Names tried for each part: the file's, one beside a folder, and two that may be taken."""

LARGE_AT_ONCE: Final = 4
"""Each large object takes three threads, which mostly wait, and 12 MiB."""


class RestoreFolder:
    """Writes files, which appear when complete. Mtime: LastModified."""

    def __init__(
        self, files: FilesBelow | None, store: ChunkReader, *, force: bool, dry_run: bool
    ) -> None:
        """There must be no other writers. `files` is None in a dry run without a folder."""
        self._files = files
        self._store = store
        self._force = force
        self._dry_run = dry_run

    def restore(self, listed: Iterable[Location]) -> Iterator[RestoredObject]:
        """Files are named in the order of the listing.

        Memory: `BATCH_BYTES` and one object of `IN_MEMORY_BYTES`, and the requests for them. Up to
        twice `LARGE_AT_ONCE` larger objects are in files.
        """
        batch, batch_bytes = list[Location](), 0
        for location in listed:
            if result := self._existing(location):
                yield result
                continue
            batch.append(location)
            batch_bytes += location.size_bytes if _fits_memory(location) else 0
            if batch_bytes >= BATCH_BYTES or len(batch) == BATCH_OBJECTS:
                yield from self._write_batch(batch)
                batch, batch_bytes = [], 0
        yield from self._write_batch(batch)

    def _existing(self, location: Location) -> RestoredObject | None:
        key = location.row.key
        try:
            names, file = _place(self._files, location) if self._files else (path_of(key), None)
            place = "/".join(names)
            if self._files and file:
                with file:
                    if _is_equal(file, location):
                        if not self._dry_run:
                            self._files.take(key, file)
                        return RestoredObject(location, RestoreOutcome.EQUAL, place)
                if not self._force:
                    return RestoredObject(location, RestoreOutcome.DIFFERENT, place)
        except NotRestored as error:
            return RestoredObject(location, RestoreOutcome.FAILED, error=error)
        return RestoredObject(location, RestoreOutcome.RESTORED, place) if self._dry_run else None

    def _write_batch(self, batch: Sequence[Location]) -> Iterator[RestoredObject]:
        unfinished = deque[UnfinishedFile]()

        def begin_large() -> Iterator[tuple[Location, UnfinishedFile]]:
            assert self._files
            for location in batch:
                if not _fits_memory(location):
                    unfinished.append(self._files.begin())
                    yield location, unfinished[-1]

        def fetch(large: tuple[Location, UnfinishedFile]) -> UnfinishedFile:
            location, file = large
            file.fill(ArchivedObject(location, self._store).write_to)
            return file

        with (
            closing(read_located(self._store, filter(_fits_memory, batch))) as reads,
            closing(side_by_side(begin_large(), fetch, LARGE_AT_ONCE)) as large,
        ):
            small = in_order(reads)
            try:
                for location in batch:
                    if _fits_memory(location):
                        yield self._write(location, next(small))
                    else:
                        with next(large) as fetched:
                            unfinished.popleft()
                            yield self._write(location, fetched)
            finally:
                for file in unfinished:
                    file.remove()

    def _write(self, location: Location, read: ObjectRead | UnfinishedFile) -> RestoredObject:
        assert self._files
        key = location.row.key
        since = location.row.last_modified - datetime(1970, 1, 1, tzinfo=UTC)
        modified_ns = (since // timedelta(microseconds=1)) * 1000
        try:
            # Look for the place again: another key may have taken the name.
            names, existing = _place(self._files, location)
            if existing:
                existing.close()
            if isinstance(read, UnfinishedFile):
                self._files.finish(read, key, _encoded(names), modified_ns)
            else:
                body = read.body
                self._files.fill(key, _encoded(names), lambda file: file.write(body), modified_ns)
        except (NotRestored, StoreError, IntegrityError) as error:
            return RestoredObject(location, RestoreOutcome.FAILED, error=error)
        return RestoredObject(location, RestoreOutcome.RESTORED, "/".join(names))


def _fits_memory(location: Location) -> bool:
    return location.size_bytes <= IN_MEMORY_BYTES and not location.parts


def _place(files: FilesBelow, location: Location) -> tuple[Sequence[str], IO[bytes] | None]:
    key, names = location.row.key, path_of(location.row.key)
    try:
        return names, files.open(key, _encoded(names))
    except NameRefused as error:
        refused = error
    parts, escaped = key.split("/"), dict[int, int]()
    for number in range(len(parts) - 1):
        begin = "/".join(parts[: number + 1])
        options = ({**escaped, number: times} for times in range(MOST_NAMES))
        escaped = next(
            (
                option
                for option in options
                if files.may_be_folder(key, _encoded(path_of(begin, option)))
            ),
            escaped,
        )
    for times in range(MOST_NAMES):
        names = path_of(key, {**escaped, len(parts) - 1: times})
        with suppress(NameRefused):
            return names, files.open(key, _encoded(names))
    raise refused


def _is_equal(file: IO[bytes], location: Location) -> bool:
    if os.fstat(file.fileno()).st_size != location.size_bytes:
        return False
    for part in location.ranges:
        digest, remaining = hashlib.sha256(), part.end_byte - part.start_byte
        while remaining and (piece := file.read(min(remaining, PIECE_BYTES))):
            digest.update(piece)
            remaining -= len(piece)
        if digest.digest() != part.sha256:
            return False
    return True


def _encoded(names: Sequence[str]) -> list[bytes]:
    return [name.encode() for name in names]
