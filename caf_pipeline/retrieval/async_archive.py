"""The archive for programs that await: each call of `Archive` in a thread, so that an event loop
goes on meanwhile.
"""

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
from caf_pipeline.retrieval.bulk import ObjectRead, Wanted
from caf_pipeline.retrieval.reader import Found

_Given = TypeVar("_Given")
_END: Final = object()


class AsyncArchive:
    """An `Archive` whose methods are awaited; they take, give and raise the same.

    What is cancelled ends in its thread.
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
        """Close its connections, where it opened them, and files that it opened.

        It refuses to read then, and so do they.
        """
        await asyncio.to_thread(self.archive.close)

    async def sources(self) -> Sequence[str]:
        """Return the names of the sources."""
        return await asyncio.to_thread(self.archive.sources)

    async def find(
        self, source: str, key: str, version: str | None = None, *, as_of: datetime | None = None
    ) -> Found:
        """Look an object up; what it gives waits for providers, so give its methods to
        `asyncio.to_thread`.
        """
        return await asyncio.to_thread(self.archive.find, source, key, version, as_of=as_of)

    async def save(
        self, source: str, key: str, path: str | Path, version: str | None = None
    ) -> None:
        """Write an object to a file."""
        await asyncio.to_thread(self.archive.save, source, key, path, version)

    async def open(
        self, source: str, key: str, version: str | None = None, *, as_of: datetime | None = None
    ) -> io.BufferedReader:
        """Look an object up; the file's own methods wait for providers, so give them to
        `asyncio.to_thread`.
        """
        return await asyncio.to_thread(self.archive.open, source, key, version, as_of=as_of)

    async def read(
        self, source: str, key: str, version: str | None = None, *, as_of: datetime | None = None
    ) -> bytes:
        """Return an object's bytes, which were compared."""
        return await asyncio.to_thread(self.archive.read, source, key, version, as_of=as_of)

    def read_many(self, source: str, wanted: Iterable[Wanted]) -> AsyncIterator[ObjectRead]:
        """Yield objects, or ranges of them."""
        return _stepwise(self.archive.read_many(source, wanted))

    def ls(
        self,
        source: str,
        prefix: str = "",
        *,
        recursive: bool = False,
        as_of: datetime | None = None,
    ) -> AsyncIterator[Location | str]:
        """Yield what begins with a prefix."""
        return _stepwise(self.archive.ls(source, prefix, recursive=recursive, as_of=as_of))


async def _stepwise(given: Iterator[_Given]) -> AsyncIterator[_Given]:
    """Yield what an iterator gives, each step in a thread."""
    lock = (
        threading.Lock()
    )  # a step that is cancelled goes on in its thread, and an iterator that runs cannot be closed

    def step() -> _Given | object:
        with lock:
            return next(given, _END)

    def close() -> None:
        with lock:
            given.close()  # type: ignore[attr-defined]  # it is a generator

    try:
        while (one := await asyncio.to_thread(step)) is not _END:
            yield one  # type: ignore[misc]
    finally:
        await asyncio.to_thread(close)
