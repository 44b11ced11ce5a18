"""ChunkIO: an append-only log whose undamaged entries are found again after any crash or damage.

What ChunkIO calls a chunk is an *entry* here, since a chunk is something else in this project. An
entry is 16 bytes of the caller's own (`user_data`) and any content. It lies in the file as a header
of 40 bytes and the content; wherever its bytes meet a multiple of 65,536, 16 bytes are left out for
a *meter*, which names the entry that was being written there, so that a reader finds its way again
behind damage. Position 0 holds the file's header in the place of a meter. Integers and hashes are
little-endian, the hash is SipHash-2-4 with a fixed key: it finds damage, and is no protection
against a forger.

The reader takes the entries that the original's forward scan by `begin + 1` finds, and its look-ups
choose among them: the original's backward walks find entries that nobody wrote, and miss some.
Salvage, which also tries every position at which an entry may begin, stands apart, since it takes
logs that are stored as contents for entries.

Source: github.com/romkatv/ChunkIO at 9715ce1; vectors of the original in the tests.
"""

import heapq
import io
import struct
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import IO, Final

import numpy as np
from siphash24 import siphash24
from typing_extensions import Buffer

from caf_pipeline.errors import MalformedArchive, UsageError

BLOCK_BYTES: Final = 65_536  # the grid of the meters
METER_BYTES: Final = 16
HEADER_BYTES: Final = 40
USER_DATA_BYTES: Final = 16
MAX_CONTENT_BYTES: Final = 2**31 - 57  # the original's limit: the largest array of .NET
MAX_POSITION: Final = 2**63 - 1  # positions are signed 64-bit numbers in the original

FILE_HEADER: Final = b"romkatv/chunkio\n"  # written, never checked: the original does the same
_KEY: Final = b"romkatv/chunkio1"
_METER: Final = struct.Struct("<Q8s")  # begin of the named entry, hash of these 8 bytes
_HEADER: Final = struct.Struct(
    "<16sQ8s8s"
)  # user data, content size, hash of the content, hash of the 32 bytes before
_HASHED_HEADER_BYTES: Final = 32
_NO_BEGIN: Final = -1

_PIECE_BYTES: Final = 4 * BLOCK_BYTES  # read at once of a content: larger ones measured no faster
_HASHED_FILE_SIZES: Final = 4
"""A scan hashes contents of at most this many times the file's size.

Writing leaves entries that overlap only where one was torn, so one file's size is what a scan of a
file without meters takes; a forged file could claim overlapping contents from every block and make
the scan quadratic. A check and a salvage hash as much again.
"""

_SALVAGED_BLOCKS: Final = 16  # looked through at once, 1 MiB
_BLOCK_PAYLOAD_BYTES: Final = BLOCK_BYTES - METER_BYTES

Read = Callable[[int, int], Buffer]
"""Returns the file's bytes from the first position to the second, exclusive one; fewer only where
the file ends before.
"""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An entry whose header is right; its content may be damaged or missing.

    Attributes: begin: the position that names it; on a multiple of 65,536 its bytes start behind
        the meter there. end: the position behind its last byte, and the next entry's begin where
        one follows without padding. user_data: 16 bytes. content_size_bytes: as the header says.
    """

    begin: int
    end: int
    user_data: bytes
    content_size_bytes: int


@dataclass(frozen=True, slots=True)
class LogDamage:
    """Bytes `[begin, end)` of a log that are not as a writer leaves them.

    Attributes: what: "file header", "meter", "content" (of the entry that begins there), or "no
        entry", for bytes that belong to none.
    """

    begin: int
    end: int
    what: str


@dataclass(frozen=True, slots=True)
class SalvagedEntry:
    """An entry that was found by its header's hash alone.

    Attributes: entry: the entry. content_hash: as its header says. reachable: `LogReader.entries`
        has it, too. content_right: all of its content is there and agrees with its hash. inside:
        the begin of an entry with a right content of which this one is a part, as a log stored in a
        log is; else None.
    """

    entry: LogEntry
    content_hash: bytes
    reachable: bool
    content_right: bool
    inside: int | None


class LogWriter:
    """Makes the bytes to append to a log, byte for byte those of the original writer.

    `position` is the file's size once everything that was returned is appended. A file that was
    closed, or that a crash left, is continued by a new writer at its size: the first entry then
    begins on the grid, behind zeros.
    """

    def __init__(self, position: int = 0) -> None:
        """Go on at the end of a file of `position` bytes; raises UsageError where that is no size
        of a file.
        """
        if not 0 <= position <= MAX_POSITION:
            raise UsageError(
                f"A log cannot have {position} bytes.", hint="Give the size of the file."
            )
        self._position = position
        self._torn = True

    @property
    def position(self) -> int:
        """The file's size with all that was returned."""
        return self._position

    def entry(self, user_data: bytes, content: Buffer) -> bytes:
        """Return all that is to be appended for one entry: padding where the log was torn, meters,
        header and content.

        Raises: UsageError: user data of another length than 16 bytes, a content of more than
            2,147,483,591 bytes, or an end past
                2**63 - 1. The writer is as it was before.
        """
        view = memoryview(content)
        _check_sizes(user_data, view.nbytes)
        self._end_of(view.nbytes)
        view = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
        return b"".join(self.copy(user_data, view.nbytes, _hash(view), (view,)))

    def copy(
        self,
        user_data: bytes,
        content_size_bytes: int,
        content_hash: bytes,
        content: Iterable[memoryview],
    ) -> Iterator[Buffer]:
        """Yield what `entry` returns, of a content whose hash is known and that comes in pieces;
        `position` is behind it at once.

        Raises: as `entry`.
        """
        _check_sizes(user_data, content_size_bytes)
        before, (begin, end) = self._position, self._end_of(content_size_bytes)
        self._position, self._torn = end, False
        header = user_data + content_size_bytes.to_bytes(8, "little") + content_hash
        return chain(
            (bytes(begin - before),),
            _laid_out(begin, chain((memoryview(header + _hash(header)),), content)),
        )

    def _end_of(self, content_size_bytes: int) -> tuple[int, int]:
        """Return where the next entry begins and ends."""
        begin = -(-self._position // BLOCK_BYTES) * BLOCK_BYTES if self._torn else self._position
        end = end_of(begin, content_size_bytes)
        if end > MAX_POSITION:
            raise UsageError(
                f"An entry at {begin} of {content_size_bytes} bytes would end past {MAX_POSITION}.",
                hint="Begin another log.",
            )
        return begin, end


class LogReader:
    """Finds the entries of a log, whatever became of it.

    Every call reads the file again, so that its answer depends on the file alone. Memory holds two
    blocks, the positions that the meters name (less than a 500th of the file's size), and the
    content that is asked for. No byte at or past `size_bytes` is read. Only what `read` raises is
    raised.
    """

    def __init__(self, read: Read, size_bytes: int) -> None:
        """Read a file of `size_bytes` through `read(start, end)`, which returns fewer bytes only at
        the file's end.
        """
        self._read = read
        self._size_bytes = size_bytes

    def entries(self) -> Iterator[LogEntry]:
        """Yield every entry that can be reached, by begin.

        Reached are those on the ways from position 0 and from the entry that each valid meter
        names. A way goes on at an entry's end, and ends at a header that is not right or at an
        entry that may not be stepped past, because nothing proves that it was written whole. The
        time is linear in the file's size, also for a forged file.
        """
        return (entry for entry, _ in _Scan(self._read, self._size_bytes).entries())

    def first(self, start: int = 0, end: int = MAX_POSITION) -> LogEntry | None:
        """Return the first entry that begins in `[start, end)`, or None; any numbers will do.

        The time is that of `entries`.
        """
        return next(self._between(start, end), None)

    def last(self, start: int = 0, end: int = MAX_POSITION) -> LogEntry | None:
        """Return the last entry that begins in `[start, end)`, or None."""
        return next(iter(deque(self._between(start, end), maxlen=1)), None)

    def middle(self, start: int = 0, end: int = MAX_POSITION) -> LogEntry | None:
        """Return that of the entries in `[start, end)` whose begin is nearest the middle of what
        the file has of the range.

        None where there is none; of two the first.
        """
        twice = max(start, 0) + min(end, self._size_bytes)
        return min(
            self._between(start, end), key=lambda entry: abs(2 * entry.begin - twice), default=None
        )

    def entry_at(self, begin: int) -> LogEntry | None:
        """Return the entry whose header lies at a position, reachable or not, by one read; None
        where there is none.
        """
        found = _header_at(self._read, begin, self._size_bytes) if is_begin(begin) else None
        return found and found[0]

    def check(self) -> Iterator[LogEntry | LogDamage]:
        """Yield each entry, and what is not as a writer leaves it: every byte of the log is read
        and accounted for.

        An unfinished write at the end is bytes of no entry. Nothing tells of entries that are cut
        off the end, or of zeros in the place of all that lay before the grid. Time and memory are
        those of `entries`, with all contents read.
        """
        header = (
            bytes(self._read(0, min(METER_BYTES, self._size_bytes))) if self._size_bytes else b""
        )
        if header and header != FILE_HEADER:
            yield LogDamage(0, len(header), "file header")
        covered = len(header)  # up to here all bytes are accounted for
        budget = _HashBudget(self._size_bytes)
        for entry, digest in _Scan(self._read, self._size_bytes).entries():
            if entry.begin > covered:
                yield from self._no_entry(covered, entry.begin)
            yield entry
            if budget.allows(entry) and _content_is(digest, self._read, entry):
                yield from self._wrong_meters(entry)
            else:
                yield LogDamage(entry.begin, min(entry.end, self._size_bytes), "content")
            covered = max(covered, min(entry.end, self._size_bytes))
        yield from self._no_entry(covered, self._size_bytes)

    def salvage(self) -> Iterator[SalvagedEntry]:
        """Yield every entry with a right header, wherever it begins, reachable or not, by begin.

        Memory is 20 MB, and the time linear in the file's size: contents of at most four times that
        are compared; those of further entries, which no writer leaves, are not called right.
        """
        reachable = _Scan(self._read, self._size_bytes).entries()
        next_reached = next(reachable, None)
        outer: LogEntry | None = None
        budget = _HashBudget(self._size_bytes)
        for entry, digest in self._headers():
            while next_reached and next_reached[0].begin < entry.begin:
                next_reached = next(reachable, None)
            right = budget.allows(entry) and _content_is(digest, self._read, entry)
            inside = outer.begin if outer and entry.begin < outer.end else None
            if right and inside is None:
                outer = entry
            yield SalvagedEntry(
                entry, digest, next_reached is not None and next_reached[0] == entry, right, inside
            )

    def pieces(self, entry: LogEntry) -> Iterator[memoryview]:
        """Yield an entry's content as the file has it; nothing is compared."""
        return _payload(self._read, end_of(entry.begin, 0), entry.end, _PIECE_BYTES)

    def copy_content(self, entry: LogEntry, into: IO[bytes]) -> bool:
        """Write an entry's content to a file, by pieces; return whether it is all there and agrees
        with its hash.

        False also for an entry that the file does not have. What was written is void then.
        """
        if not is_begin(entry.begin) or entry.end > self._size_bytes:
            return False
        found = _header_at(self._read, entry.begin, self._size_bytes)
        return (
            found is not None
            and found[0] == entry
            and _content_is(found[1], self._read, entry, into)
        )

    def content(self, entry: LogEntry) -> bytes | None:
        """Return an entry's content where all of it lies in the file and agrees with its hash, else
        None.

        Without reading where the entry ends past the file. None also for an entry that the file
        does not have.
        """
        content = io.BytesIO()
        return content.getvalue() if self.copy_content(entry, content) else None

    def _between(self, start: int, end: int) -> Iterator[LogEntry]:
        for entry in self.entries():
            if entry.begin >= end:
                return
            if entry.begin >= start:
                yield entry

    def _no_entry(self, start: int, end: int) -> Iterator[LogDamage]:
        """Yield what lies between entries, unless it is padding, which ends on the grid where an
        entry begins.
        """
        is_padding = end % BLOCK_BYTES == 0 and end - start < BLOCK_BYTES and end < self._size_bytes
        if start < end and not (is_padding and not any(bytes(self._read(start, end)))):
            yield LogDamage(start, end, "no entry")

    def _wrong_meters(self, entry: LogEntry) -> Iterator[LogDamage]:
        meter = _meter(entry.begin)
        first = max(-(-entry.begin // BLOCK_BYTES), 1) * BLOCK_BYTES  # at 0 is the file's header
        for line in range(first, entry.end, BLOCK_BYTES):
            if bytes(self._read(line, line + METER_BYTES)) != meter:
                yield LogDamage(line, line + METER_BYTES, "meter")

    def _headers(self) -> Iterator[tuple[LogEntry, bytes]]:
        """Yield what has a right header at any legal begin: the file without its meters is one run
        of bytes to look through.
        """
        before, run_at = b"", 0  # the end of what was looked through, and where it lies in the run
        for start in range(0, self._size_bytes, _SALVAGED_BLOCKS * BLOCK_BYTES):
            data = memoryview(
                self._read(start, min(start + _SALVAGED_BLOCKS * BLOCK_BYTES, self._size_bytes))
            )
            blocks = (
                data[at + METER_BYTES : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)
            )
            run = b"".join((before, *blocks))
            for offset in _possible_headers(run):
                if found := _header_in(
                    run[offset : offset + HEADER_BYTES], _begin_of(run_at + offset)
                ):
                    yield found
            before = run[-(HEADER_BYTES - 1) :]
            run_at += len(run) - len(before)


def inflated(pieces: Iterable[Buffer]) -> Iterator[bytes]:
    """Yield the data of a content that the original's buffered writer wrote: raw DEFLATE, or
    nothing for no data.

    In pieces of at most 1 MiB, whatever they inflate to.

    Raises:
        MalformedArchive: the content is something else, or goes on behind the end of the data.
    """
    inflater, empty = zlib.decompressobj(wbits=-zlib.MAX_WBITS), True
    for piece in pieces:
        waiting: Buffer = piece
        while memoryview(waiting).nbytes:
            empty = False
            if inflater.eof:
                raise MalformedArchive("The content goes on behind its end as DEFLATE data.")
            try:
                yield inflater.decompress(waiting, 1 << 20)
            except zlib.error as error:
                raise MalformedArchive(f"The content is not raw DEFLATE data: {error}.") from error
            waiting = inflater.unconsumed_tail or inflater.unused_data
    while not inflater.eof and not empty:
        data = inflater.decompress(inflater.unconsumed_tail, 1 << 20)
        if not data and not inflater.eof:
            raise MalformedArchive("The content ends before its end as DEFLATE data.")
        yield data


def is_begin(position: int) -> bool:
    """Say whether an entry may begin there: not in the bytes of a meter, save on its first, which
    tells its end.
    """
    return 0 <= position <= MAX_POSITION and not 1 <= position % BLOCK_BYTES <= METER_BYTES


def end_of(begin: int, content_size_bytes: int) -> int:
    """Return where an entry ends that begins at `begin`, with the meters inside it."""
    payload_bytes = HEADER_BYTES + content_size_bytes
    full_blocks, rest = divmod(payload_bytes, BLOCK_BYTES - METER_BYTES)
    offset = begin % BLOCK_BYTES
    one_more = (offset == 0 and rest > 0) or offset + rest > BLOCK_BYTES
    return begin + payload_bytes + METER_BYTES * (full_blocks + one_more)


class _Scan:
    """One pass over the entries, with all that it remembers: what another pass saw plays no
    part.
    """

    def __init__(self, read: Read, size_bytes: int) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._block = lru_cache(maxsize=2)(
            self._read_block
        )  # headers are read going forward, and one spans two at most
        self._named = array(
            "q"
        )  # by meter, from position 0 on: the begin that it names, or _NO_BEGIN
        self._budget = _HashBudget(size_bytes)

    def entries(self) -> Iterator[tuple[LogEntry, bytes]]:
        """Yield the reachable entries, each with the hash of its content.

        All ways are walked at once, so that each position is looked at once, in order.
        """
        self._read_meters()
        waiting = sorted({0, *self._named} - {_NO_BEGIN})  # a sorted list is a heap
        last = _NO_BEGIN
        while waiting:
            begin = heapq.heappop(waiting)
            if begin == last:
                continue
            last = begin
            found = _header_at(self._read_in_block, begin, self._size_bytes)
            if found is None:
                continue
            yield found
            if self._may_step_past(*found):
                heapq.heappush(waiting, found[0].end)

    def _read_in_block(self, start: int, end: int) -> bytes:
        number, offset = divmod(start, BLOCK_BYTES)
        return self._block(number)[offset : offset + end - start]

    def _read_block(self, number: int) -> bytes:
        start = number * BLOCK_BYTES
        return bytes(self._read(start, min(start + BLOCK_BYTES, self._size_bytes)))

    def _read_meters(self) -> None:
        self._named.append(_NO_BEGIN)  # the file's header is no meter
        for position in range(BLOCK_BYTES, self._size_bytes - METER_BYTES + 1, BLOCK_BYTES):
            meter = bytes(self._read(position, position + METER_BYTES))
            if len(meter) < METER_BYTES:
                # the file is shorter than was said: the meters that follow are not there either
                return
            begin, digest = _METER.unpack_from(meter)
            right = begin <= position and is_begin(begin) and _hash(meter[:8]) == digest
            self._named.append(begin if right else _NO_BEGIN)

    def _may_step_past(self, entry: LogEntry, digest: bytes) -> bool:
        if entry.end + HEADER_BYTES > self._size_bytes:
            return False  # nothing follows
        last_meter = (entry.end - 1) // BLOCK_BYTES
        if last_meter == entry.begin // BLOCK_BYTES:
            return True  # no writer begins again within a block
        named = self._named[last_meter] if last_meter < len(self._named) else _NO_BEGIN
        if named != _NO_BEGIN:
            return named == entry.begin
        return self._budget.allows(entry) and _content_is(digest, self._read, entry)


class _HashBudget:
    """What may still be hashed of contents."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._left = _HASHED_FILE_SIZES * size_bytes

    def allows(self, entry: LogEntry) -> bool:
        """Say whether a content lies in the file and may be hashed, and count it where it may."""
        if entry.end > self._size_bytes or entry.content_size_bytes > self._left:
            return False
        self._left -= entry.content_size_bytes
        return True


def _header_at(read: Read, begin: int, size_bytes: int) -> tuple[LogEntry, bytes] | None:
    """Return the entry at a legal begin and the hash of its content, or None where no right header
    lies in the file.
    """
    header_end = end_of(begin, 0)
    if header_end > size_bytes:
        return None
    header = b"".join(_payload(read, begin, header_end, BLOCK_BYTES))
    if len(header) < HEADER_BYTES:
        return None
    return _header_in(header, begin)


def _header_in(header: bytes, begin: int) -> tuple[LogEntry, bytes] | None:
    """Return the entry that 40 bytes are the header of, and the hash of its content; None where
    they are none.
    """
    user_data, content_size_bytes, content_digest, header_digest = _HEADER.unpack(header)
    if (
        content_size_bytes > MAX_CONTENT_BYTES
        or _hash(header[:_HASHED_HEADER_BYTES]) != header_digest
    ):
        return None
    end = end_of(begin, content_size_bytes)
    return (
        (LogEntry(begin, end, user_data, content_size_bytes), content_digest)
        if end <= MAX_POSITION
        else None
    )


def _possible_headers(run: bytes) -> Iterator[int]:
    """Yield the offsets at which 40 bytes may be a header: a size below 2**31, and a hash that is
    not 0, as in a run of zeros.
    """
    count = len(run) - HEADER_BYTES + 1
    if count <= 0:
        return
    data = np.frombuffer(run, dtype=np.uint8)
    zero = data == 0
    possible = data[19 : 19 + count] < 0x80  # the size is bytes 16 to 24, its largest last
    for at in range(20, 24):
        possible &= zero[at : at + count]
    no_hash = np.ones(count, dtype=bool)
    for at in range(_HASHED_HEADER_BYTES, HEADER_BYTES):
        no_hash &= zero[at : at + count]
    yield from np.flatnonzero(possible & ~no_hash).tolist()


def _begin_of(run_offset: int) -> int:
    """Return the begin of an entry whose bytes start at an offset of the file without its
    meters.
    """
    block, offset = divmod(run_offset, _BLOCK_PAYLOAD_BYTES)
    return block * BLOCK_BYTES + (METER_BYTES + offset if offset else 0)


def _content_is(digest: bytes, read: Read, entry: LogEntry, into: IO[bytes] | None = None) -> bool:
    """Say whether the content of an entry inside the file has this hash, copying it on the way
    where asked to.
    """
    running = siphash24(key=_KEY)
    missing_bytes = entry.content_size_bytes
    for piece in _payload(read, end_of(entry.begin, 0), entry.end, _PIECE_BYTES):
        running.update(piece)
        missing_bytes -= len(piece)
        if into is not None:
            into.write(piece)
    return missing_bytes == 0 and bytes(running.digest()) == digest


def _payload(read: Read, start: int, end: int, piece_bytes: int) -> Iterator[memoryview]:
    """Yield what lies in `[start, end)` without the meters, reading to the next multiple of
    `piece_bytes` at a time.

    Ends early where `read` returns less than asked for.
    """
    place = start
    while place < end:
        stop = min(end, (place // piece_bytes + 1) * piece_bytes)
        data = memoryview(read(place, stop))[: stop - place]
        offset = 0
        while offset < len(data):
            in_block = (place + offset) % BLOCK_BYTES
            yield data[
                offset + (METER_BYTES if in_block == 0 else 0) : offset + BLOCK_BYTES - in_block
            ]
            offset += BLOCK_BYTES - in_block
        if len(data) < stop - place:
            return
        place = stop


def _laid_out(begin: int, payload: Iterable[memoryview]) -> Iterator[Buffer]:
    """Yield the payload from `begin` on with a meter at each line of the grid that it meets."""
    place = begin
    for part in payload:
        taken = 0
        while taken < len(part):
            if place % BLOCK_BYTES == 0:
                yield _meter(begin) if place else FILE_HEADER
                place += METER_BYTES
            piece = part[taken : taken + BLOCK_BYTES - place % BLOCK_BYTES]
            yield piece
            taken += len(piece)
            place += len(piece)


def _meter(begin: int) -> bytes:
    named = begin.to_bytes(8, "little")
    return named + _hash(named)


def _hash(data: Buffer) -> bytes:
    return bytes(siphash24(data, key=_KEY).digest())


def _check_sizes(user_data: bytes, content_size_bytes: int) -> None:
    if len(user_data) != USER_DATA_BYTES:
        raise UsageError(
            f"An entry's user data has {USER_DATA_BYTES} bytes, not {len(user_data)}.",
            hint="Pad or shorten it.",
        )
    if content_size_bytes > MAX_CONTENT_BYTES:
        raise UsageError(
            f"An entry's content has at most {MAX_CONTENT_BYTES} bytes, not {content_size_bytes}.",
            hint="Write it as several entries.",
        )
