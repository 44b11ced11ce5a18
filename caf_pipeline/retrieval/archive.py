"""What is archived, for other programs: objects by source and key, as files, as bytes, listed, and
many at once.

`wiring.open_archive` opens it from the settings. Its page is docs/how-to/read-from-programs.md.
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
from caf_pipeline.ledger.protocol import LocationLookups
from caf_pipeline.ledger.records import Location, require_zone
from caf_pipeline.retrieval.bulk import ObjectRead, Wanted, read_many
from caf_pipeline.retrieval.listing import list_level, list_objects
from caf_pipeline.retrieval.object_file import BLOCK_BYTES
from caf_pipeline.retrieval.reader import Found, fetch, no_source, save
from caf_pipeline.store.protocol import ChunkReader

LOOKUP_SECONDS: Final = 5.0
"""How long a look-up is used again.

Inventories, which alone change what is current, are minutes apart at least.
"""

MAX_LOOKUPS: Final = 4096
"""Of about 1 KB each."""


class Archive:
    """The objects that are archived.

    Safe for several threads; a process that is forked off opens its own.

    Its methods raise: NotLocated: the source, the key or its version is not archived; it says why,
        where that is known. StoreUnreachable: no provider gives the bytes now. ObjectMissing: none
        has them. IntegrityError: what providers give is not what was archived. LedgerUnreachable,
        LedgerError: the database is away, or refuses. UsageError: `as_of` has no zone, or comes
        with a version; a file, or the temporary one of a large object, is not written;
            it was closed. TypeError: a name is not text, `as_of` no datetime.
    """

    def __init__(
        self, lookup: LocationLookups, store: ChunkReader, *closing: Callable[[], object]
    ) -> None:
        """Read by open look-ups of the ledger and an open store; `closing` is called when it is
        closed.
        """
        self.lookup = lookup
        self.store = store
        self._closing = closing
        self._is_closed = False
        self._files = WeakSet[io.BufferedReader]()
        self._lock = threading.Lock()
        self._lookups = _Lookups()

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
        """Close its connections, where it opened them, and files that it opened.

        It refuses to read then, and so do they.

        What `find` gave is not to be read then: it would connect anew.
        """
        self._is_closed = True
        with self._lock:
            files = list(self._files)
        for file in files:
            file.close()
        for each in self._closing:
            each()

    def _require_open(self) -> None:
        if self._is_closed:  # its look-ups and its store would connect anew
            raise UsageError(
                "the archive is closed, and reads nothing any more", hint="open another one"
            )

    def sources(self) -> Sequence[str]:
        """Return the names of the sources of which something was archived, or planned."""
        self._require_open()
        return self.lookup.sources()

    def find(
        self, source: str, key: str, version: str | None = None, *, as_of: datetime | None = None
    ) -> Found:
        """Look one object up, always in the ledger: its location, and what reads it.

        Args: source: the source's name. key: the object's key. version: the id of one version; the
            current one where None. as_of: what is archived of the key as of this time, which has a
            zone; its `location.status` says what is known of it.
        """
        self._require_open()
        _require_text(source, key, "" if version is None else version)
        return fetch(self.lookup, self.store, source, key, version, as_of=as_of)

    def open(
        self, source: str, key: str, version: str | None = None, *, as_of: datetime | None = None
    ) -> io.BufferedReader:
        """Return an object as a binary file that can be sought; what is compared when, its `raw`
        says (`ObjectFile`).

        It is looked up now; nothing of it is read yet. Not for several threads at once.
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
        """Return an object's bytes, which were compared with its SHA-256.

        Its location is remembered for `LOOKUP_SECONDS`, so that what the key had so long ago may be
        given, and nothing else: bytes by a remembered location are compared, too, and where they
        cannot be had, the object is looked up again.
        """
        self._require_open()
        _require_text(source, key, "" if version is None else version)
        is_remembered = version is None and as_of is None
        known = self._lookups.get(source, key) if is_remembered else None
        if known:
            try:
                return _whole(Found(known, self.store))
            except (StoreError, IntegrityError):
                self._lookups.forget(source, key)
                if (found := self.find(source, key)).location == known:
                    raise
        else:
            found = self.find(source, key, version, as_of=as_of)
        body = _whole(found)
        if is_remembered:
            self._lookups.remember(source, found.location)
        return body

    def save(self, source: str, key: str, path: str | Path, version: str | None = None) -> None:
        """Write an object to a file, which appears when it is whole and was compared; memory is
        bounded.

        Raises:
            UsageError: the file cannot be written.
        """
        save(self.find(source, key, version), Path(path))

    def read_many(self, source: str, wanted: Iterable[Wanted]) -> Iterator[ObjectRead]:
        """Yield objects, or ranges `(key, start, end)` of them, as `bulk.read_many` reads them, by
        few requests.

        They come in another order than they were asked for: `number` says which it is. One that
        cannot be read is yielded with its `error`, which its `body` raises.
        """
        self._require_open()
        _require_text(source)
        return self._while_open(read_many(self.lookup, self.store, source, wanted))

    def _while_open(self, reads: Generator[ObjectRead, None, None]) -> Iterator[ObjectRead]:
        with closing(reads):
            self._require_open()
            for one in reads:
                yield one
                self._require_open()

    def ls(
        self,
        source: str,
        prefix: str = "",
        *,
        recursive: bool = False,
        as_of: datetime | None = None,
    ) -> Iterator[Location | str]:
        """Yield what begins with a prefix, in the order of the bytes of keys: of each key what
        `read` gives, with its `status`.

        A prefix is of whole characters. Where not `recursive`, what has a further '/' behind it is
        one text that ends in '/'. Memory is a page.
        """
        self._require_open()
        _require_text(source, prefix)
        require_zone(as_of)  # also where nothing is listed
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
            raise TypeError(f"a source, a key and a version are text, and not {name!r}")


def _whole(found: Found) -> bytes:
    whole = io.BytesIO()
    found.write_to(whole)
    return whole.getvalue()


class _Lookups:
    """Where objects were a moment ago; a key that was not archived is not remembered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], tuple[float, Location]] = OrderedDict()

    def get(self, source: str, key: str) -> Location | None:
        with self._lock:
            since, location = self._known.get((source, key), (0.0, None))
        return location if location and time.monotonic() - since < LOOKUP_SECONDS else None

    def remember(self, source: str, location: Location) -> None:
        with self._lock:
            self._known[source, location.row.key] = time.monotonic(), location
            self._known.move_to_end((source, location.row.key))
            if len(self._known) > MAX_LOOKUPS:
                self._known.popitem(last=False)

    def forget(self, source: str, key: str) -> None:
        with self._lock:
            self._known.pop((source, key), None)
