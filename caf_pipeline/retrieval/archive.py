"""The Python API for reading archived objects.

`wiring.open_archive` opens an `Archive` from the settings. See docs/how-to/restore.md.
"""

import io
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from weakref import WeakSet

from caf_pipeline.errors import IntegrityError, StoreError, UsageError
from caf_pipeline.ledger.records import Location, LocationLookups, require_zone
from caf_pipeline.retrieval.bulk import ObjectRead, ReadRequest, read_many
from caf_pipeline.retrieval.listing import list_level, list_objects
from caf_pipeline.retrieval.object_file import BLOCK_BYTES
from caf_pipeline.retrieval.reader import ArchivedObject, fetch, no_source, save
from caf_pipeline.store.protocol import ChunkReader

LOOKUP_SECONDS: Final = 5.0
"""Seconds for which `Archive.read` reuses a location.

Only an inventory changes which version is current, and inventories are minutes apart.
"""

MAX_LOOKUPS: Final = 4096
"""Locations in the cache, of about 1 KB each."""


class Archive:
    """Reads archived objects by source and key.

    One archive may be used by several threads. A forked process must open its own. Use the archive
    as a context manager, or call `close`.

    Any method that reads may raise these errors:

    - NotLocated: the source, key or version is not archived. The message gives a known reason.
    - StoreUnreachable: no provider returned the bytes. Try again later.
    - ObjectMissing: no provider has the bytes.
    - IntegrityError: the bytes that providers returned are not the archived bytes.
    - LedgerUnreachable, LedgerError: the database did not answer, or refused the query.
    - UsageError: the archive is closed, `as_of` has no time zone or comes with a version, or a file
      cannot be written.
    - TypeError: an argument has the wrong type.
    """

    def __init__(
        self, lookup: LocationLookups, store: ChunkReader, *closing: Callable[[], object]
    ) -> None:
        """Read from an open ledger and an open store. `close` calls the functions in `closing`."""
        self.lookup = lookup
        self.store = store
        self._closing = closing
        self._is_closed = False
        self._files = WeakSet[io.BufferedReader]()
        self._lock = threading.Lock()
        self._locations = _LocationCache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the archive's connections and every file that `open` returned.

        Do not read from results of `find` afterwards: they would open new connections.
        """
        self._is_closed = True
        with self._lock:
            files = list(self._files)
        for file in files:
            file.close()
        for close in self._closing:
            close()

    def _require_open(self) -> None:
        if self._is_closed:  # the ledger and the store would open new connections
            raise UsageError("the archive is closed", hint="open another archive")

    def sources(self) -> Sequence[str]:
        self._require_open()
        return self.lookup.sources()

    def find(
        self, source: str, key: str, version: str | None = None, *, as_of: datetime | None = None
    ) -> ArchivedObject:
        """Look up one object in the ledger, without reading its bytes.

        Args:
            source: Name of the source.
            key: Key of the object.
            version: Version id. The default is the current version.
            as_of: Return the archived version that was current at this time, which needs a time
                zone. `location.status` of the result says how certain that is.
        """
        self._require_open()
        _require_text(source, key, "" if version is None else version)
        return fetch(self.lookup, self.store, source, key, version, as_of=as_of)

    def open(
        self, source: str, key: str, version: str | None = None, *, as_of: datetime | None = None
    ) -> io.BufferedReader:
        """Open an object as a seekable binary file.

        The object is looked up now and read later. Its `raw` is an `ObjectFile`, which documents
        which bytes are verified when. Do not share the file between threads. The arguments are
        those of `find`.
        """
        file: io.BufferedReader = io.BufferedReader(
            self.find(source, key, version, as_of=as_of).open(), BLOCK_BYTES
        )
        with self._lock:
            self._files.add(file)
        return file

    def read(
        self, source: str, key: str, version: str | None = None, *, as_of: datetime | None = None
    ) -> bytes:
        """Return all bytes of an object, verified by the SHA-256 in the ledger.

        The location of a current version is cached for `LOOKUP_SECONDS`. The result may therefore
        be a version that was current that long ago, but never other bytes. If a cached location
        cannot be read, the object is looked up again. The arguments are those of `find`.
        """
        self._require_open()
        _require_text(source, key, "" if version is None else version)
        is_cached = version is None and as_of is None
        location = self._locations.get(source, key) if is_cached else None
        if location:
            try:
                return _read_whole(ArchivedObject(location, self.store))
            except (StoreError, IntegrityError):
                self._locations.forget(source, key)
                archived = self.find(source, key)
                if archived.location == location:
                    raise
        else:
            archived = self.find(source, key, version, as_of=as_of)
        body = _read_whole(archived)
        if is_cached:
            self._locations.remember(source, archived.location)
        return body

    def save(self, source: str, key: str, path: str | Path, version: str | None = None) -> None:
        """Write an object to a file. Memory use does not depend on the object's size.

        The file appears at `path` only when the object is complete and verified.
        """
        save(self.find(source, key, version), Path(path))

    def read_many(
        self, source: str, requests: Iterable[ReadRequest]
    ) -> Generator[ObjectRead, None, None]:
        """Read many objects, or byte ranges of objects, with few requests to the store.

        Results come in any order: `number` is the position in `requests`. If an object cannot be
        read, its result has an `error`, which `body` raises.

        Args:
            source: Name of the source.
            requests: Keys, or tuples `(key, start, end)` with the meaning of a slice.
        """
        self._require_open()
        _require_text(source)
        return self._while_open(read_many(self.lookup, self.store, source, requests))

    def _while_open(
        self, reads: Generator[ObjectRead, None, None]
    ) -> Generator[ObjectRead, None, None]:
        with closing(reads):
            self._require_open()
            for read in reads:
                yield read
                self._require_open()

    def ls(
        self,
        source: str,
        prefix: str = "",
        *,
        recursive: bool = False,
        as_of: datetime | None = None,
    ) -> Iterator[Location | str]:
        """List archived objects in the byte order of their keys.

        Yields the location that `read` would use for each key, with its `status`. Memory use is
        bounded by one page of the listing.

        Args:
            source: Name of the source.
            prefix: List only keys that begin with this text.
            recursive: If False, keys with a further "/" behind the prefix are grouped: each group
                is one string that ends in "/".
            as_of: List what was archived as of this time, which needs a time zone.
        """
        self._require_open()
        _require_text(source, prefix)
        require_zone(as_of)  # even if nothing is listed
        empty = True
        for entry in (list_objects if recursive else list_level)(
            self.lookup, source, prefix, as_of=as_of
        ):
            empty = False
            yield entry
            self._require_open()
        if empty and (unknown := no_source(self.lookup, source)):
            raise unknown


def _require_text(*names: str) -> None:
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"source, key and version must be text, not {name!r}")


def _read_whole(archived: ArchivedObject) -> bytes:
    body = io.BytesIO()
    archived.write_to(body)
    return body.getvalue()


class _LocationCache:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locations: OrderedDict[tuple[str, str], tuple[float, Location]] = OrderedDict()

    def get(self, source: str, key: str) -> Location | None:
        with self._lock:
            since, location = self._locations.get((source, key), (0.0, None))
        return location if location and time.monotonic() - since < LOOKUP_SECONDS else None

    def remember(self, source: str, location: Location) -> None:
        with self._lock:
            self._locations[source, location.row.key] = time.monotonic(), location
            self._locations.move_to_end((source, location.row.key))
            if len(self._locations) > MAX_LOOKUPS:
                self._locations.popitem(last=False)

    def forget(self, source: str, key: str) -> None:
        with self._lock:
            self._locations.pop((source, key), None)
