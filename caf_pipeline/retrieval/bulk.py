"""Reads many objects, or ranges of objects, with few requests: neighbours in a chunk share one."""

import hashlib
import io
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby, islice, zip_longest
from typing import Final

from caf_pipeline.errors import CafError, IntegrityError, StoreError
from caf_pipeline.ledger.records import LocatedRange, Location, LocationLookups
from caf_pipeline.records import PostRecord
from caf_pipeline.retrieval.holders import RangeHolders, holders_of, pieces_between
from caf_pipeline.retrieval.object_file import IN_MEMORY_BYTES
from caf_pipeline.retrieval.reader import ArchivedObject, not_located
from caf_pipeline.retrieval.side_by_side import side_by_side
from caf_pipeline.store.protocol import ChunkReader

MERGE_GAP_BYTES: Final = 256 << 10
"""The largest gap between two ranges that one request reads.

A provider at 50 MB/s sends it in 5 ms, less than most round trips.
"""

REQUEST_BYTES: Final = IN_MEMORY_BYTES

SMALL_BYTES: Final = 1 << 20
"""Larger objects gain little from sharing requests."""

LOOKUP_KEYS: Final = 1000
"""Keys per look-up, as in a page of a listing."""

ReadRequest = str | tuple[str, int | None, int | None]
"""A key, or (key, start, end) with the meaning of a slice of the object's bytes."""


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """The result for one request, whose position `number` counts from 0.

    `location` is None if the object is not archived. `end_byte` is exclusive. `compared` means
    verified. `failed` has the errors of replaced providers.
    """

    number: int
    key: str
    location: Location | None = None
    start_byte: int = 0
    end_byte: int = 0
    compared: bool = False
    error: CafError | None = None
    content: bytes = b""
    failed: Mapping[str, CafError] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        """Raises `error` if the bytes could not be read."""
        if self.error:
            raise self.error
        return self.content


@dataclass(frozen=True)
class _Part:
    number: int
    location: Location
    start_byte: int
    end_byte: int

    @property
    def is_whole(self) -> bool:
        return self.end_byte - self.start_byte == self.location.size_bytes

    @cached_property
    def is_compared(self) -> bool:
        return self.is_whole or self.location.size_bytes <= IN_MEMORY_BYTES

    @cached_property
    def span(self) -> tuple[int, int]:
        row = self.location.row
        if self.is_compared:
            return row.start_byte, row.end_byte
        return row.start_byte + self.start_byte, row.start_byte + self.end_byte

    def read(self, body: bytes, failed: Mapping[str, CafError], *, compared: bool) -> ObjectRead:
        key = self.location.row.key
        return ObjectRead(
            self.number,
            key,
            self.location,
            self.start_byte,
            self.end_byte,
            compared,
            None,
            body,
            failed,
        )

    def failed(self, error: CafError) -> ObjectRead:
        return ObjectRead(
            self.number,
            self.location.row.key,
            self.location,
            self.start_byte,
            self.end_byte,
            error=error,
        )


@dataclass(frozen=True, slots=True)
class _Request:
    start_byte: int
    end_byte: int
    parts: Sequence[_Part]


def is_small(location: Location) -> bool:
    """Return whether an object shares requests."""
    return location.size_bytes <= SMALL_BYTES and not location.parts


def read_many(
    lookup: LocationLookups, store: ChunkReader, source: str, requests: Iterable[ReadRequest]
) -> Generator[ObjectRead, None, None]:
    """Read objects and ranges in an order that suits the store.

    Several chunks are read concurrently. Bytes are verified as by `ObjectFile`. Memory: 16 requests
    of 8 MiB with their results, or the largest single request. Raises LedgerError or TypeError.
    """
    if isinstance(requests, str):  # each of its characters would be a key
        raise TypeError(f"expected keys and ranges, not one text: use [{requests!r}]")
    yield from _read(store, _looked_up(lookup, source, requests))


def read_located(
    store: ChunkReader, locations: Iterable[Location]
) -> Generator[ObjectRead, None, None]:
    """Read whole objects whose locations are known; `number` is the position in `locations`."""

    def retry(read: ObjectRead) -> ObjectRead:
        assert read.location
        return _read_alone(store, _Part(read.number, read.location, read.start_byte, read.end_byte))

    parts = (
        _Part(number, location, 0, location.size_bytes) for number, location in enumerate(locations)
    )
    with closing(_read(store, _requests(parts))) as all_reads:
        for is_unread, reads in groupby(
            all_reads, lambda read: read.error is not None and not read.error.permanent
        ):
            if is_unread:
                yield from side_by_side(reads, retry)
            else:
                yield from reads


def in_order(reads: Iterable[ObjectRead]) -> Iterator[ObjectRead]:
    """Yield results by number, from 0. Memory: early ones."""
    early = dict[int, ObjectRead]()
    number = 0
    for read in reads:
        early[read.number] = read
        while number in early:
            yield early.pop(number)
            number += 1


def _read(
    store: ChunkReader, requests: Iterable[_Request | ObjectRead]
) -> Generator[ObjectRead, None, None]:
    def get_small(
        request: _Request | ObjectRead,
    ) -> tuple[_Request | ObjectRead, Sequence[ObjectRead] | None]:
        if isinstance(request, ObjectRead) or request.end_byte - request.start_byte > REQUEST_BYTES:
            return request, None
        return request, _get(store, request)

    with closing(side_by_side(requests, get_small)) as results:
        for request, reads in results:
            if isinstance(request, ObjectRead):
                yield request
            else:
                yield from reads if reads is not None else _get(store, request)


def _looked_up(
    lookup: LocationLookups, source: str, requests: Iterable[ReadRequest]
) -> Iterator[_Request | ObjectRead]:
    numbered = enumerate(requests)
    while page := list(islice(numbered, LOOKUP_KEYS)):
        ranges = [(number, *_key_and_range(request)) for number, request in page]
        locations = lookup.locate_many(source, {key for _, key, _, _ in ranges})
        parts = list[_Part]()
        for number, key, start, end in ranges:
            if (location := locations.get(key)) is None:
                yield ObjectRead(number, key, error=not_located(lookup, source, key))
                continue
            begin, stop, _ = slice(start, end).indices(location.size_bytes)
            parts.append(_Part(number, location, begin, max(begin, stop)))
        yield from _requests(parts)


def _key_and_range(request: ReadRequest) -> tuple[str, int | None, int | None]:
    if isinstance(request, str):
        return request, None, None
    with suppress(TypeError, ValueError):
        key, start, end = request
        if isinstance(key, str) and all(
            edge is None or hasattr(edge, "__index__") for edge in (start, end)
        ):
            return key, start, end
    raise TypeError(f"{request!r} is neither a key nor (key, start, end)")


def _requests(parts: Iterable[_Part]) -> Iterator[_Request | ObjectRead]:
    by_chunk = defaultdict[PostRecord, list[_Part]](list)
    for part in parts:
        if part.start_byte == part.end_byte and not part.is_whole:
            yield part.read(b"", {}, compared=True)
        elif part.location.parts or not part.location.size_bytes:
            yield _Request(0, part.location.size_bytes, [part])
        else:
            by_chunk[part.location.posting].append(part)
    merged = zip_longest(*(_merged(chunk_parts) for chunk_parts in by_chunk.values()))
    yield from filter(None, chain.from_iterable(merged))


def _merged(parts: Iterable[_Part]) -> Iterator[_Request]:
    start_byte = end_byte = 0
    merged: list[_Part] = []
    for part in sorted(parts, key=lambda part: part.span):
        begin, stop = part.span
        if merged and (
            begin - end_byte > MERGE_GAP_BYTES or max(stop, end_byte) - start_byte > REQUEST_BYTES
        ):
            yield _Request(start_byte, end_byte, merged)
            merged = []
        if not merged:
            start_byte, end_byte = begin, stop
        merged.append(part)
        end_byte = max(end_byte, stop)
    if merged:
        yield _Request(start_byte, end_byte, merged)


def _get(store: ChunkReader, request: _Request) -> Sequence[ObjectRead]:
    """A provider with a wrong object provides no unverifiable bytes."""
    first, last = request.parts[0].location, request.parts[-1].location
    located = LocatedRange(request.start_byte, request.end_byte, b"", first.chunk, first.posting)
    holders = RangeHolders(located, store, f"{first.row.key}' to '{last.row.key}")
    reads, unread, is_first = list[ObjectRead](), list(request.parts), True
    while len(unread) > 1:
        body, replaced, error = _read_available(holders)
        view, end_byte = memoryview(body), request.start_byte + len(body)
        wrong = {
            part.span
            for part in unread
            if part.is_compared
            and part.span[1] <= end_byte
            and hashlib.sha256(
                view[part.span[0] - request.start_byte : part.span[1] - request.start_byte]
            ).digest()
            != part.location.row.sha256
        }
        others = list[_Part]()
        for part in unread:
            begin, end = (byte - request.start_byte for byte in part.span)
            if part.span[1] > end_byte and error and not error.permanent and is_first:
                # Another request for each of a thousand objects would only take longer.
                reads.append(part.failed(error))
            elif part.span[1] > end_byte or part.span in wrong or (wrong and not part.is_compared):
                others.append(part)
            else:
                begin += part.start_byte if part.is_compared else 0
                content = bytes(view[begin : begin + part.end_byte - part.start_byte])
                failed = {
                    provider: holders.failed[provider]
                    for provider, since in replaced.items()
                    if since < end
                }
                reads.append(part.read(content, failed, compared=part.is_compared))
        unread = others
        if error or not unread:
            break
        holders.refuse()
        is_first = False
    return [*reads, *(_read_alone(store, part) for part in unread)]


def _read_available(holders: RangeHolders) -> tuple[bytearray, Mapping[str, int], CafError | None]:
    """Return the bytes, where failed providers were replaced, and the final error."""
    body, replaced = bytearray(), dict.fromkeys(holders.failed, 0)
    try:
        for piece in holders.pieces(0, holders.size_bytes):
            for provider in holders.failed:
                replaced.setdefault(provider, len(body))
            body += piece
    except (StoreError, IntegrityError) as error:
        return body, replaced, error
    return body, replaced, None


def _read_alone(store: ChunkReader, part: _Part) -> ObjectRead:
    location, begin, end = part.location, part.start_byte, part.end_byte
    try:
        if part.is_compared:
            whole = io.BytesIO()
            failed = ArchivedObject(location, store).write_to(whole)
            content = whole.getvalue() if part.is_whole else bytes(whole.getbuffer()[begin:end])
            return part.read(content, failed, compared=True)
        ranges = holders_of(location, store)
        content = b"".join(pieces_between(ranges, begin, end))
        errors = {
            provider: error for holders in ranges for provider, error in holders.failed.items()
        }
        return part.read(content, errors, compared=False)
    except (StoreError, IntegrityError) as error:
        return part.failed(error)
