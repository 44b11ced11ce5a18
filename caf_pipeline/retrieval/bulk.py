"""Many objects, or ranges of them, by fewer requests than objects: what lies close together in a
chunk is read at once.

One object is `reader`; which keys there are is `listing`.
"""

import hashlib
import io
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, groupby, islice, zip_longest
from typing import Final

from caf_pipeline.errors import CafError, IntegrityError, StoreError
from caf_pipeline.ledger.protocol import LocationLookups
from caf_pipeline.ledger.records import LocatedRange, Location
from caf_pipeline.retrieval.holders import RangeHolders, holders_of, pieces_between
from caf_pipeline.retrieval.object_file import IN_MEMORY_BYTES
from caf_pipeline.retrieval.reader import Found, not_located
from caf_pipeline.retrieval.side_by_side import side_by_side
from caf_pipeline.store.protocol import ChunkReader, PostRecord

MERGE_GAP_BYTES: Final = 256 << 10
"""Between two ranges that are read by one request, and thrown away.

A provider at 50 MB/s gives that in 5 ms, which is less than the way there and back to most of them.
"""

REQUEST_BYTES: Final = IN_MEMORY_BYTES
"""Of a request for several ranges; a range that is larger has a request of its own."""

SMALL_BYTES: Final = 1 << 20
"""Up to this size a whole object is read together with its neighbours; a larger one would gain
little.
"""

LOOKUP_KEYS: Final = 1000
"""Of one look-up: a listing's page has as many."""

Wanted = str | tuple[str, int | None, int | None]
"""A key, or a key with the start and the end of a range, which mean what they mean in a slice of
the object's bytes.
"""


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """What came of one of the things that were asked for.

    Attributes: number: which of them, counted from 0. key: the object's. location: where it is;
        None where it is not archived. start_byte: of the range, of the object's bytes. end_byte:
        exclusive. compared: whether these bytes were compared with the SHA-256 that was taken when
        the object was archived. error: why there are no bytes; None where there are. failed: what
        is wrong with providers that others stood in for.
    """

    number: int
    key: str
    location: Location | None = None
    start_byte: int = 0
    end_byte: int = 0
    compared: bool = False
    error: CafError | None = None
    given: bytes = b""
    failed: Mapping[str, CafError] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        """The bytes; raises `error` where there are none."""
        if self.error:
            raise self.error
        return self.given


@dataclass(frozen=True)
class _Part:
    """One of the things asked for: `[start_byte, end_byte)` of an object.

    What follows from that is asked for many times.
    """

    number: int
    location: Location
    start_byte: int
    end_byte: int

    @property
    def is_whole(self) -> bool:
        return self.end_byte - self.start_byte == self.location.size_bytes

    @cached_property
    def is_compared(self) -> bool:
        """Whether all of the object is read for it, so that its SHA-256 tells whether it is right:
        as `ObjectFile` does.
        """
        return self.is_whole or self.location.size_bytes <= IN_MEMORY_BYTES

    @cached_property
    def span(self) -> tuple[int, int]:
        """What is read of the chunk."""
        row = self.location.row
        if self.is_compared:
            return row.start_byte, row.end_byte
        return row.start_byte + self.start_byte, row.start_byte + self.end_byte

    def read(self, body: bytes, failed: Mapping[str, CafError], *, compared: bool) -> ObjectRead:
        """Return it with the bytes of its range."""
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
        """Return it without bytes."""
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
    """Bytes of a stored chunk that are read at once, and what is made of them."""

    start_byte: int
    end_byte: int
    parts: Sequence[_Part]


def is_small(one: Location) -> bool:
    """Tell whether an object is read together with its neighbours."""
    return one.size_bytes <= SMALL_BYTES and not one.parts


def read_many(
    lookup: LocationLookups, store: ChunkReader, source: str, wanted: Iterable[Wanted]
) -> Generator[ObjectRead, None, None]:
    """Yield what comes of each thing that is asked for, in an order that is good for reading; its
    `number` says which it is.

    A look-up is for 1,000 keys. Ranges of one chunk that are at most `MERGE_GAP_BYTES` apart are
    one request; requests go in the order of their offsets, those of several chunks side by side.
    What is compared, and who is asked where a provider fails, is as for a single object
    (`ObjectFile`, `Found`): also a range of an object of up to 8 MiB is compared. An object that
    cannot be read keeps no other from being read.

    Memory: 16 requests of 8 MiB and what was made of them, or the largest thing that is asked for.

    Raises: LedgerUnreachable, LedgerError. TypeError: something is neither a key nor a range of
        one. All else is the `error` of what
            it is about.
    """
    if isinstance(wanted, str):  # each of its characters is a key, too
        raise TypeError(
            f"what is wanted is several keys and ranges, and not one text: [{wanted!r}]"
        )
    yield from _read(store, _looked_up(lookup, source, wanted))


def read_located(store: ChunkReader, locations: Iterable[Location]) -> Iterator[ObjectRead]:
    """Yield what comes of each whole object, as `read_many`, for who knows all their locations;
    `number` counts these.

    An object that is not had with its neighbours, since providers do not answer, is read alone
    before that is its error.
    """
    parts = (_Part(number, one, 0, one.size_bytes) for number, one in enumerate(locations))
    for is_unread, some in groupby(_read(store, _requests(parts)), _is_unread):
        if is_unread:
            yield from side_by_side(some, partial(_again, store))
        else:
            yield from some


def in_order(reads: Iterable[ObjectRead]) -> Iterator[ObjectRead]:
    """Yield them by number, from 0. Those that come early are held until then."""
    early = dict[int, ObjectRead]()
    number = 0
    for read in reads:
        early[read.number] = read
        while number in early:
            yield early.pop(number)
            number += 1


def _read(store: ChunkReader, requests: Iterable[_Request | ObjectRead]) -> Iterator[ObjectRead]:
    """Yield what requests give, and what needed none."""
    for request, done in side_by_side(requests, partial(_try_small, store)):
        if isinstance(request, ObjectRead):
            yield request
        else:
            yield from done if done is not None else _get(store, request)


def _looked_up(
    lookup: LocationLookups, source: str, wanted: Iterable[Wanted]
) -> Iterator[_Request | ObjectRead]:
    """Look up what is wanted, and yield what to read; what needs no reading is yielded as it is."""
    numbered = enumerate(wanted)
    while some := list(islice(numbered, LOOKUP_KEYS)):
        asked = [
            (number, *((one, None, None) if isinstance(one, str) else _range(one)))
            for number, one in some
        ]
        found = lookup.locate_many(source, {key for _, key, _, _ in asked})
        parts = list[_Part]()
        for number, key, start, end in asked:
            if (location := found.get(key)) is None:
                yield ObjectRead(number, key, error=not_located(lookup, source, key))
                continue
            begin, stop, _ = slice(start, end).indices(location.size_bytes)
            parts.append(_Part(number, location, begin, max(begin, stop)))
        yield from _requests(parts)


def _range(one: tuple[str, int | None, int | None]) -> tuple[str, int | None, int | None]:
    """Return it where it is a key with a start and an end; raise TypeError else."""
    try:
        key, start, end = one
        is_one = isinstance(key, str) and all(
            edge is None or hasattr(edge, "__index__") for edge in (start, end)
        )
    except (TypeError, ValueError):
        is_one = False
    if not is_one:
        raise TypeError(f"{one!r} is neither a key nor (key, start, end)")
    return key, start, end


def _requests(parts: Iterable[_Part]) -> Iterator[_Request | ObjectRead]:
    """Yield what to read for all of these, chunks in turn; what needs no reading is yielded as it
    is.
    """
    by_chunk = defaultdict[PostRecord, list[_Part]](list)
    for part in parts:
        if part.start_byte == part.end_byte and not part.is_whole:
            yield part.read(b"", {}, compared=True)
        elif part.location.parts or not part.location.size_bytes:
            yield _Request(0, part.location.size_bytes, [part])
        else:
            by_chunk[part.location.posting].append(part)
    merged = zip_longest(*(_merged(some) for some in by_chunk.values()))
    yield from filter(None, chain.from_iterable(merged))


def _merged(parts: Iterable[_Part]) -> Iterator[_Request]:
    """Yield the requests for ranges of one chunk, in order."""
    start_byte = end_byte = 0
    taken: list[_Part] = []
    for part in sorted(parts, key=lambda one: one.span):
        begin, stop = part.span
        if taken and (
            begin - end_byte > MERGE_GAP_BYTES or max(stop, end_byte) - start_byte > REQUEST_BYTES
        ):
            yield _Request(start_byte, end_byte, taken)
            taken = []
        if not taken:
            start_byte, end_byte = begin, stop
        taken.append(part)
        end_byte = max(end_byte, stop)
    if taken:
        yield _Request(start_byte, end_byte, taken)


def _try_small(
    store: ChunkReader, request: _Request | ObjectRead
) -> tuple[_Request | ObjectRead, Sequence[ObjectRead] | None]:
    """Return what a request gives; None where it is so large that memory would not hold several at
    once.
    """
    if isinstance(request, ObjectRead) or request.end_byte - request.start_byte > REQUEST_BYTES:
        return request, None
    return request, _get(store, request)


def _get(store: ChunkReader, request: _Request) -> Sequence[ObjectRead]:
    """Return what a request gives.

    A provider that gives some object wrong is believed nothing that cannot be compared.
    """
    first, last = request.parts[0].location, request.parts[-1].location
    one = LocatedRange(request.start_byte, request.end_byte, b"", first.chunk, first.posting)
    holders = RangeHolders(one, store, f"{first.row.key}' to '{last.row.key}")
    reads, left, is_first = list[ObjectRead](), list(request.parts), True
    while len(left) > 1:
        body, passed, failed = _all_of(holders)
        end_byte = request.start_byte + len(body)
        wrong = _wrong(
            (part for part in left if part.span[1] <= end_byte), body, request.start_byte
        )
        others = list[_Part]()
        for part in left:
            if part.span[1] > end_byte and failed and not failed.permanent and is_first:
                reads.append(
                    part.failed(failed)
                )  # to ask again for each of a thousand objects would only take longer
            elif part.span[1] > end_byte or part.span in wrong or (wrong and not part.is_compared):
                others.append(part)
            else:
                end = part.span[1] - request.start_byte
                stood_in = {
                    provider: holders.failed[provider]
                    for provider, since in passed.items()
                    if since < end
                }
                reads.append(_cut_out(part, body, request.start_byte, stood_in))
        left = others
        if failed or not left:
            break
        holders.refuse()
        is_first = False
    return [*reads, *(_alone(store, part) for part in left)]


def _all_of(holders: RangeHolders) -> tuple[bytearray, Mapping[str, int], CafError | None]:
    """Return the bytes of a range, from its beginning as far as they are to be had, and why they
    end before it does.

    Between them, from which byte on others stood in for which providers.
    """
    body, passed = bytearray(), dict.fromkeys(holders.failed, 0)
    try:
        for piece in holders.pieces(0, holders.size_bytes):
            for provider in holders.failed:
                passed.setdefault(provider, len(body))
            body += piece
    except (StoreError, IntegrityError) as error:
        return body, passed, error
    return body, passed, None


def _wrong(parts: Iterable[_Part], body: bytearray, at: int) -> set[tuple[int, int]]:
    """Return which spans of the chunk, whose bytes from `at` on these are, do not have the SHA-256
    of their object.
    """
    known = {part.span: part.location.row.sha256 for part in parts if part.is_compared}
    view = memoryview(body)
    return {
        span
        for span, sha256 in known.items()
        if hashlib.sha256(view[span[0] - at : span[1] - at]).digest() != sha256
    }


def _cut_out(part: _Part, body: bytearray, at: int, failed: Mapping[str, CafError]) -> ObjectRead:
    begin = part.span[0] - at + (part.start_byte if part.is_compared else 0)
    its = bytes(memoryview(body)[begin : begin + part.end_byte - part.start_byte])
    return part.read(its, failed, compared=part.is_compared)


def _alone(store: ChunkReader, part: _Part) -> ObjectRead:
    """Read one object or range as if it alone were asked for."""
    location, begin, end = part.location, part.start_byte, part.end_byte
    try:
        if part.is_compared:
            whole = io.BytesIO()
            failed = Found(location, store).write_to(whole)
            return part.read(
                whole.getvalue() if part.is_whole else bytes(whole.getbuffer()[begin:end]),
                failed,
                compared=True,
            )
        ranges = holders_of(location, store)
        its = b"".join(pieces_between(ranges, begin, end))
        return part.read(
            its, {who: error for one in ranges for who, error in one.failed.items()}, compared=False
        )
    except (StoreError, IntegrityError) as error:
        return part.failed(error)


def _is_unread(read: ObjectRead) -> bool:
    return read.error is not None and not read.error.permanent


def _again(store: ChunkReader, read: ObjectRead) -> ObjectRead:
    """Read alone what could not be read with its neighbours."""
    assert read.location
    return _alone(store, _Part(read.number, read.location, read.start_byte, read.end_byte))
