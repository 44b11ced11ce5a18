"""`AsyncArchive`: an `Archive` for asyncio, which runs each call in a thread."""

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.archive import Archive
from caf_pipeline.retrieval.bulk import ObjectRead, ReadRequest
from caf_pipeline.retrieval.reader import ArchivedObject

_Item = TypeVar("_Item")
_END: Final = object()


class AsyncArchive:
    """An `Archive` whose methods are coroutines or asynchronous iterators.

    Arguments, results and errors are those of `Archive`. Cancelling a call does not interrupt its
    thread.
    """

    def __init__(self, archive: Archive) -> None:
        self.archive = archive

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.to_thread(self.archive.close)

    async def sources(self) -> Sequence[str]:
        return await asyncio.to_thread(self.archive.sources)

    async def find(
        self, source: str, key: str, version: str | None = None, *, as_of: datetime | None = None
    ) -> ArchivedObject:
        """Look up one object. Run the methods of the result with `asyncio.to_thread`."""
        return await asyncio.to_thread(self.archive.find, source, key, version, as_of=as_of)

    async def save(
        self, source: str, key: str, path: str | Path, version: str | None = None
    ) -> None:
        await asyncio.to_thread(self.archive.save, source, key, path, version)

    async def open(
        self, source: str, key: str, version: str | None = None, *, as_of: datetime | None = None
    ) -> io.BufferedReader:
        """Open an object as a file. Run its methods with `asyncio.to_thread`."""
        return await asyncio.to_thread(self.archive.open, source, key, version, as_of=as_of)

    async def read(
        self, source: str, key: str, version: str | None = None, *, as_of: datetime | None = None
    ) -> bytes:
        return await asyncio.to_thread(self.archive.read, source, key, version, as_of=as_of)

    def read_many(self, source: str, requests: Iterable[ReadRequest]) -> AsyncIterator[ObjectRead]:
        return _iterate_in_threads(self.archive.read_many(source, requests))

    def ls(
        self,
        source: str,
        prefix: str = "",
        *,
        recursive: bool = False,
        as_of: datetime | None = None,
    ) -> AsyncIterator[Location | str]:
        return _iterate_in_threads(
            self.archive.ls(source, prefix, recursive=recursive, as_of=as_of)
        )


async def _iterate_in_threads(items: Iterator[_Item]) -> AsyncIterator[_Item]:
    # A cancelled step goes on in its thread, and a running generator cannot be closed.
    lock = threading.Lock()

    def step() -> _Item | object:
        with lock:
            return next(items, _END)

    def close() -> None:
        with lock:
            items.close()  # type: ignore[attr-defined]  # it is a generator

    try:
        while (item := await asyncio.to_thread(step)) is not _END:
            yield item  # type: ignore[misc]
    finally:
        await asyncio.to_thread(close)
