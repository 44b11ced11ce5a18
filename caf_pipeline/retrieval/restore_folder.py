"""Archived objects as files below a folder, each at its key; what becomes of the key's name is
`file_names`.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import IO, Final

from caf_pipeline.errors import IntegrityError, StoreError
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.bulk import ObjectRead, in_order, read_located
from caf_pipeline.retrieval.file_names import path_of
from caf_pipeline.retrieval.object_file import IN_MEMORY_BYTES
from caf_pipeline.retrieval.reader import PIECE_BYTES, Found
from caf_pipeline.retrieval.restore import RestoredObject, RestoreOutcome
from caf_pipeline.retrieval.side_by_side import side_by_side
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.system.files_below import FilesBelow, NameRefused, NotRestored, UnfinishedFile

BATCH_BYTES: Final = 64 << 20
"""Of objects that are read at once: as many requests as are under way side by side."""

BATCH_OBJECTS: Final = 10_000
"""Objects that are listed, and looked for in the folder, before any of them is written."""

MOST_NAMES: Final = 4
"""Of a part of a key, tried one after the other: one key's file, other keys' folder, and two that
something else may have.
"""

LARGE_AT_ONCE: Final = 4
"""Objects too large for memory that are fetched side by side: three threads and 12 MiB each, that
wait or go to the disk.
"""


class RestoreFolder:
    """A `RestoreTarget`: each file appears when it is whole and compared, with the object's
    LastModified as its mtime.
    """

    def __init__(
        self, files: FilesBelow | None, store: ChunkReader, *, force: bool, dry_run: bool
    ) -> None:
        """Take the folder, which no other process restores into; None in a dry run where there is
        no such folder.
        """
        self._files = files
        self._store = store
        self._force = force
        self._dry_run = dry_run

    def restore(self, listed: Iterable[Location]) -> Iterator[RestoredObject]:
        """See `RestoreTarget.restore`.

        Files get their names in the order of the listing: which of two keys has a name does not
        change by itself. Memory: objects of up to `IN_MEMORY_BYTES`, `BATCH_BYTES` and one more of
        them, and the requests for them. Of larger ones, up to twice `LARGE_AT_ONCE` have their
        bytes in unfinished files before their turn.
        """
        batch, batch_bytes = list[Location](), 0
        for one in listed:
            if known := self._begin(one):
                yield known
                continue
            batch.append(one)
            batch_bytes += one.size_bytes if _fits_memory(one) else 0
            if batch_bytes >= BATCH_BYTES or len(batch) == BATCH_OBJECTS:
                yield from self._write_all(batch)
                batch, batch_bytes = [], 0
        yield from self._write_all(batch)

    def _begin(self, one: Location) -> RestoredObject | None:
        """Return what is known already of an object; None of one that is to be written."""
        try:
            names, file = _place(self._files, one) if self._files else (path_of(one.row.key), None)
            place = "/".join(names)
            if self._files and file:
                with file:
                    if _is_equal(file, one):
                        if not self._dry_run:
                            self._files.take(one.row.key, file)
                        return RestoredObject(one, RestoreOutcome.EQUAL, place)
                if not self._force:
                    return RestoredObject(one, RestoreOutcome.DIFFERENT, place)
        except NotRestored as error:
            return RestoredObject(one, RestoreOutcome.FAILED, error=error)
        return RestoredObject(one, RestoreOutcome.RESTORED, place) if self._dry_run else None

    def _write_all(self, batch: Sequence[Location]) -> Iterator[RestoredObject]:
        small = in_order(read_located(self._store, filter(_fits_memory, batch)))
        begun = deque[UnfinishedFile]()
        with closing(side_by_side(self._begun(batch, begun), self._fetch, LARGE_AT_ONCE)) as large:
            try:
                for one in batch:
                    if _fits_memory(one):
                        yield self._write(one, next(small))
                    else:
                        with next(large) as fetched:
                            begun.popleft()
                            yield self._write(one, fetched)
            finally:
                for each in begun:
                    each.remove()

    def _begun(
        self, batch: Iterable[Location], begun: deque[UnfinishedFile]
    ) -> Iterator[tuple[Location, UnfinishedFile]]:
        """Yield each large object with the file that it is fetched to."""
        assert self._files
        for one in batch:
            if not _fits_memory(one):
                begun.append(self._files.begin())
                yield one, begun[-1]

    def _fetch(self, given: tuple[Location, UnfinishedFile]) -> UnfinishedFile:
        one, unfinished = given
        unfinished.fill(Found(one, self._store).write_to)
        return unfinished

    def _write(self, one: Location, read: ObjectRead | UnfinishedFile) -> RestoredObject:
        """Give an object its file, as it was read."""
        assert self._files
        key, modified_ns = one.row.key, _mtime_ns(one)
        try:
            names, file = _place(self._files, one)  # again: another key may have its name by now
            if file:
                file.close()
            if isinstance(read, UnfinishedFile):
                self._files.finish(read, key, _encoded(names), modified_ns)
            else:
                self._files.fill(key, _encoded(names), partial(_write, read.body), modified_ns)
        except (NotRestored, StoreError, IntegrityError) as error:
            return RestoredObject(one, RestoreOutcome.FAILED, error=error)
        return RestoredObject(one, RestoreOutcome.RESTORED, "/".join(names))


def _fits_memory(one: Location) -> bool:
    """Tell whether an object is read with others, by one request at most; larger ones are fetched
    to files.
    """
    return one.size_bytes <= IN_MEMORY_BYTES and not one.parts


def _place(files: FilesBelow, one: Location) -> tuple[Sequence[str], IO[bytes] | None]:
    """Return the names of an object's file, and the open file that is there; None where none is.

    Raises:
        NotRestored: no file can be there, or the one that is there cannot be read.
    """
    key, names = one.row.key, path_of(one.row.key)
    try:
        return names, files.open(key, _encoded(names))
    except NameRefused as error:
        refused = error
    parts, escaped = key.split("/"), dict[int, int]()
    for number in range(len(parts) - 1):
        begin = "/".join(parts[: number + 1])
        tried = ({**escaped, number: times} for times in range(MOST_NAMES))
        escaped = next(
            (each for each in tried if files.may_be_folder(key, _encoded(path_of(begin, each)))),
            escaped,
        )
    for times in range(MOST_NAMES):
        names = path_of(key, {**escaped, len(parts) - 1: times})
        with suppress(NameRefused):
            return names, files.open(key, _encoded(names))
    raise refused


def _is_equal(file: IO[bytes], one: Location) -> bool:
    """Compare a file with the SHA-256 of an object, of one in parts with that of each part."""
    if os.fstat(file.fileno()).st_size != one.size_bytes:
        return False
    for each in one.ranges:
        digest, left = hashlib.sha256(), each.end_byte - each.start_byte
        while left and (piece := file.read(min(left, PIECE_BYTES))):
            digest.update(piece)
            left -= len(piece)
        if digest.digest() != each.sha256:
            return False
    return True


def _write(body: bytes, file: IO[bytes]) -> None:
    file.write(body)


def _mtime_ns(one: Location) -> int:
    since = one.row.last_modified - datetime(1970, 1, 1, tzinfo=UTC)
    return (since // timedelta(microseconds=1)) * 1000


def _encoded(names: Sequence[str]) -> list[bytes]:
    return [name.encode() for name in names]
