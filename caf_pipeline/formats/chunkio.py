"""ChunkIO: an append-only log whose undamaged entries are found after any crash or damage.

An *entry* (ChunkIO's chunk) has a header of 40 bytes, which includes 16 bytes of `user_data`, and
any content. At each multiple of 65,536 it is interrupted by a *meter* of 16 bytes, which names the
entry, so that a reader can resume after damage. At position 0 the file's header replaces the meter.
Integers and hashes are little-endian. SipHash-2-4 with a fixed key detects damage, but no forgery.

Salvage tries every position, and may take logs inside of contents for entries.

Source: github.com/romkatv/ChunkIO at 9715ce1; vectors of the original in the tests.
"""

import heapq
import io
import struct
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import IO, Any, Final

import numpy as np
from siphash24 import siphash24
from typing_extensions import Buffer

from caf_pipeline.errors import MalformedArchive, UsageError

BLOCK_BYTES: Final = 65_536  # distance of the meters
METER_BYTES: Final = 16
HEADER_BYTES: Final = 40
USER_DATA_BYTES: Final = 16
MAX_CONTENT_BYTES: Final = 2**31 - 57  # the original's limit: the largest array of .NET
MAX_POSITION: Final = 2**63 - 1  # positions are signed 64-bit numbers in the original

FILE_HEADER: Final = b"romkatv/chunkio\n"  # written but never checked, as in the original
_KEY: Final = b"romkatv/chunkio1"
_METER: Final = struct.Struct("<Q8s")  # begin of the named entry, hash of these 8 bytes
# User data, content size, hash of the content, hash of these 32 bytes.
_HEADER: Final = struct.Struct("<16sQ8s8s")
_HASHED_HEADER_BYTES: Final = 32
_NO_BEGIN: Final = -1

_PIECE_BYTES: Final = 4 * BLOCK_BYTES  # of a content; larger pieces measured no faster
_HASHED_FILE_SIZES: Final = 4
"""A scan hashes contents of at most this many times the file's size.

A forged file could claim overlapping contents and make the scan quadratic.
"""

_SALVAGED_BLOCKS: Final = 16  # searched at a time, 1 MiB
_HASHED_HEADERS: Final = 16_384  # at a time, so that they stay in the processor's cache

_SIPHASH: Final = tuple(struct.unpack(">4Q", b"somepseudorandomlygeneratedbytes"))

_Words = np.ndarray[Any, np.dtype[np.uint64]]

Read = Callable[[int, int], Buffer]
"""Returns the file's bytes between two positions, the second exclusive; fewer only at its end."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An entry with a valid header. Its content may be damaged or missing.

    `begin` names the entry. `end` is the next entry's begin, unless there is padding.
    """

    begin: int
    end: int
    user_data: bytes
    content_size_bytes: int


@dataclass(frozen=True, slots=True)
class LogDamage:
    """Bytes `[begin, end)` of a log that a writer would not leave.

    `what` is "file header", "meter", "content", or "no entry".
    """

    begin: int
    end: int
    what: str


@dataclass(frozen=True, slots=True)
class SalvagedEntry:
    """An entry that was located by the hash of its header alone.

    It is `reachable` if `LogReader.entries` yields it, too. `inside` is the begin of the right
    entry whose content contains this entry.
    """

    entry: LogEntry
    content_hash: bytes
    reachable: bool
    content_right: bool
    inside: int | None


class LogWriter:
    """Produces the bytes to append to a log, equal to those of the original writer.

    A new writer continues a closed or torn file at the next multiple of 65,536.
    """

    def __init__(self, position: int = 0) -> None:
        if not 0 <= position <= MAX_POSITION:
            raise UsageError(
                f"A log cannot have {position} bytes.", hint="Give the size of the file."
            )
        self._position = position
        self._torn = True

    @property
    def position(self) -> int:
        return self._position

    def entry(self, user_data: bytes, content: Buffer) -> bytes:
        """Return the bytes of one entry. After a UsageError, the writer is unchanged."""
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
        """Yield the bytes of an entry with a known hash. `position` advances immediately."""
        _check_sizes(user_data, content_size_bytes)
        before, (begin, end) = self._position, self._end_of(content_size_bytes)
        self._position, self._torn = end, False
        header = user_data + content_size_bytes.to_bytes(8, "little") + content_hash
        return chain(
            (bytes(begin - before),),
            _with_meters(begin, chain((memoryview(header + _hash(header)),), content)),
        )

    def _end_of(self, content_size_bytes: int) -> tuple[int, int]:
        begin = -(-self._position // BLOCK_BYTES) * BLOCK_BYTES if self._torn else self._position
        end = end_of(begin, content_size_bytes)
        if end > MAX_POSITION:
            raise UsageError(
                f"An entry at {begin} of {content_size_bytes} bytes would end past {MAX_POSITION}.",
                hint="Begin another log.",
            )
        return begin, end


class LogReader:
    """Reads the entries of a log in any condition.

    Every call reads the file again. Memory: two blocks, the positions that the meters name (less
    than 1/500 of the file), and the requested content. Only errors of `read` are raised.
    """

    def __init__(self, read: Read, size_bytes: int) -> None:
        self._read = read
        self._size_bytes = size_bytes

    def entries(self) -> Iterator[LogEntry]:
        """Yield every reachable entry, ordered by begin, in linear time even for a forged file.

        Chains start at position 0 and at the entry that each valid meter names. They end at an
        invalid header, or at an entry that may be incomplete.
        """
        return (entry for entry, _ in _Scan(self._read, self._size_bytes).entries())

    def first(self, start: int = 0, end: int = MAX_POSITION) -> LogEntry | None:
        """Return the first entry beginning in `[start, end)`. Takes as long as `entries`."""
        return next(self._between(start, end), None)

    def last(self, start: int = 0, end: int = MAX_POSITION) -> LogEntry | None:
        return next(iter(deque(self._between(start, end), maxlen=1)), None)

    def middle(self, start: int = 0, end: int = MAX_POSITION) -> LogEntry | None:
        twice = max(start, 0) + min(end, self._size_bytes)
        return min(
            self._between(start, end), key=lambda entry: abs(2 * entry.begin - twice), default=None
        )

    def entry_at(self, begin: int) -> LogEntry | None:
        """Return the entry here, reachable or not, by one read."""
        located = _header_at(self._read, begin, self._size_bytes) if is_begin(begin) else None
        return located and located[0]

    def check(self) -> Iterator[LogEntry | LogDamage]:
        """Read every byte of the log, and yield the entries and all damage.

        An unfinished write is "no entry". Entries missing at the end cannot be detected, nor zeros
        that replace all before a multiple of 65,536.
        """
        header = (
            bytes(self._read(0, min(METER_BYTES, self._size_bytes))) if self._size_bytes else b""
        )
        if header and header != FILE_HEADER:
            yield LogDamage(0, len(header), "file header")
        covered = len(header)  # all bytes before are accounted for
        budget = _HashBudget(self._size_bytes)
        for entry, digest in _Scan(self._read, self._size_bytes).entries():
            if entry.begin > covered:
                yield from self._no_entry(covered, entry.begin)
            yield entry
            if budget.allows(entry) and _content_is(digest, self._read, entry):
                meter = _meter(entry.begin)
                # The file's header is at 0.
                first = max(-(-entry.begin // BLOCK_BYTES), 1) * BLOCK_BYTES
                for line in range(first, entry.end, BLOCK_BYTES):
                    if bytes(self._read(line, line + METER_BYTES)) != meter:
                        yield LogDamage(line, line + METER_BYTES, "meter")
            else:
                yield LogDamage(entry.begin, min(entry.end, self._size_bytes), "content")
            covered = max(covered, min(entry.end, self._size_bytes))
        yield from self._no_entry(covered, self._size_bytes)

    def salvage(self) -> Iterator[SalvagedEntry]:
        """Yield every entry with a valid header, ordered by begin, in 20 MB and linear time.

        Contents beyond four times the file's size do not count as right.
        """
        reachable = _Scan(self._read, self._size_bytes).entries()
        next_reached = next(reachable, None)
        outer: LogEntry | None = None
        budget = _HashBudget(self._size_bytes)
        for entry, digest in self._headers():
            while next_reached and next_reached[0].begin < entry.begin:
                next_reached = next(reachable, None)
            is_right = budget.allows(entry) and _content_is(digest, self._read, entry)
            inside = outer.begin if outer and entry.begin < outer.end else None
            if is_right and inside is None:
                outer = entry
            is_reachable = next_reached is not None and next_reached[0] == entry
            yield SalvagedEntry(entry, digest, is_reachable, is_right, inside)

    def pieces(self, entry: LogEntry) -> Iterator[memoryview]:
        """The content is not verified."""
        return _payload(self._read, end_of(entry.begin, 0), entry.end, _PIECE_BYTES)

    def copy_content(self, entry: LogEntry, into: IO[bytes]) -> bool:
        """Return whether the content is complete and verified."""
        if not is_begin(entry.begin) or entry.end > self._size_bytes:
            return False
        located = _header_at(self._read, entry.begin, self._size_bytes)
        return (
            located is not None
            and located[0] == entry
            and _content_is(located[1], self._read, entry, into)
        )

    def content(self, entry: LogEntry) -> bytes | None:
        """None if the content is incomplete, damaged, or not in the file."""
        content = io.BytesIO()
        return content.getvalue() if self.copy_content(entry, content) else None

    def _between(self, start: int, end: int) -> Iterator[LogEntry]:
        for entry in self.entries():
            if entry.begin >= end:
                return
            if entry.begin >= start:
                yield entry

    def _no_entry(self, start: int, end: int) -> Iterator[LogDamage]:
        is_padding = end % BLOCK_BYTES == 0 and end - start < BLOCK_BYTES and end < self._size_bytes
        if start < end and not (is_padding and not any(bytes(self._read(start, end)))):
            yield LogDamage(start, end, "no entry")

    def _headers(self) -> Iterator[tuple[LogEntry, bytes]]:
        before, run_at = b"", 0  # the end of what was searched, and its offset in the run
        for start in range(0, self._size_bytes, _SALVAGED_BLOCKS * BLOCK_BYTES):
            data = memoryview(
                self._read(start, min(start + _SALVAGED_BLOCKS * BLOCK_BYTES, self._size_bytes))
            )
            blocks = (
                data[at + METER_BYTES : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)
            )
            run = b"".join((before, *blocks))
            for offset in _right_headers(run):
                block, in_block = divmod(run_at + offset, BLOCK_BYTES - METER_BYTES)
                begin = block * BLOCK_BYTES + (METER_BYTES + in_block if in_block else 0)
                if located := _header_in(run[offset : offset + HEADER_BYTES], begin):
                    yield located
            before = run[-(HEADER_BYTES - 1) :]
            run_at += len(run) - len(before)


def inflated(pieces: Iterable[Buffer]) -> Iterator[bytes]:
    """Inflate raw DEFLATE in pieces of at most 1 MiB.

    Raises MalformedArchive, also for content behind the data.
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
    """Return whether an entry may begin here: a meter's start, or outside one."""
    return 0 <= position <= MAX_POSITION and not 1 <= position % BLOCK_BYTES <= METER_BYTES


def end_of(begin: int, content_size_bytes: int) -> int:
    """Return an entry's end, including meters."""
    payload_bytes = HEADER_BYTES + content_size_bytes
    full_blocks, rest = divmod(payload_bytes, BLOCK_BYTES - METER_BYTES)
    offset = begin % BLOCK_BYTES
    has_further_meter = (offset == 0 and rest > 0) or offset + rest > BLOCK_BYTES
    return begin + payload_bytes + METER_BYTES * (full_blocks + has_further_meter)


class _Scan:
    def __init__(self, read: Read, size_bytes: int) -> None:
        self._read = read
        self._size_bytes = size_bytes

        @lru_cache(maxsize=2)  # a header spans at most two blocks
        def block(number: int) -> bytes:
            start = number * BLOCK_BYTES
            return bytes(read(start, min(start + BLOCK_BYTES, size_bytes)))

        self._block = block
        self._named = array("q")  # by meter, from position 0: the begin it names, or _NO_BEGIN
        self._budget = _HashBudget(size_bytes)

    def entries(self) -> Iterator[tuple[LogEntry, bytes]]:
        self._named.append(_NO_BEGIN)  # the file's header is no meter
        for position in range(BLOCK_BYTES, self._size_bytes - METER_BYTES + 1, BLOCK_BYTES):
            meter = bytes(self._read(position, position + METER_BYTES))
            if len(meter) < METER_BYTES:
                break  # the file is shorter than it should be
            begin, digest = _METER.unpack_from(meter)
            is_right = begin <= position and is_begin(begin) and _hash(meter[:8]) == digest
            self._named.append(begin if is_right else _NO_BEGIN)
        waiting = sorted({0, *self._named} - {_NO_BEGIN})  # a sorted list is a heap
        last = _NO_BEGIN
        while waiting:
            begin = heapq.heappop(waiting)
            if begin == last:
                continue
            last = begin
            located = _header_at(self._read_in_block, begin, self._size_bytes)
            if located is None:
                continue
            yield located
            if self._may_step_past(*located):
                heapq.heappush(waiting, located[0].end)

    def _read_in_block(self, start: int, end: int) -> bytes:
        number, offset = divmod(start, BLOCK_BYTES)
        return self._block(number)[offset : offset + end - start]

    def _may_step_past(self, entry: LogEntry, digest: bytes) -> bool:
        if entry.end + HEADER_BYTES > self._size_bytes:
            return False  # nothing follows
        last_meter = (entry.end - 1) // BLOCK_BYTES
        if last_meter == entry.begin // BLOCK_BYTES:
            return True  # no writer starts again within a block
        named = self._named[last_meter] if last_meter < len(self._named) else _NO_BEGIN
        if named != _NO_BEGIN:
            return named == entry.begin
        return self._budget.allows(entry) and _content_is(digest, self._read, entry)


class _HashBudget:
    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._remaining_bytes = _HASHED_FILE_SIZES * size_bytes

    def allows(self, entry: LogEntry) -> bool:
        if entry.end > self._size_bytes or entry.content_size_bytes > self._remaining_bytes:
            return False
        self._remaining_bytes -= entry.content_size_bytes
        return True


def _header_at(read: Read, begin: int, size_bytes: int) -> tuple[LogEntry, bytes] | None:
    header_end = end_of(begin, 0)
    if header_end > size_bytes:
        return None
    header = b"".join(_payload(read, begin, header_end, BLOCK_BYTES))
    if len(header) < HEADER_BYTES:
        return None
    return _header_in(header, begin)


def _header_in(header: bytes, begin: int) -> tuple[LogEntry, bytes] | None:
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


def _right_headers(run: bytes) -> Iterator[int]:
    """Yield where a header with a right hash begins.

    A size is below 2**31, and a hash is not 0, as in a run of zeros.
    """
    count = len(run) - HEADER_BYTES + 1
    if count <= 0:
        return
    data = np.frombuffer(run, dtype=np.uint8)
    zero = data == 0
    possible = data[19 : 19 + count] < 0x80  # the size is in bytes 16 to 24, last byte highest
    for at in range(20, 24):
        possible &= zero[at : at + count]
    no_hash = np.ones(count, dtype=bool)
    for at in range(_HASHED_HEADER_BYTES, HEADER_BYTES):
        no_hash &= zero[at : at + count]
    offsets = np.flatnonzero(possible & ~no_hash)
    windows = np.lib.stride_tricks.sliding_window_view(data, HEADER_BYTES)
    for first in range(0, len(offsets), _HASHED_HEADERS):
        some = offsets[first : first + _HASHED_HEADERS]
        *message, digest = windows[some].view("<u8").T
        yield from some[_hashes(message) == digest].tolist()


def _hashes(message: Sequence[_Words]) -> _Words:
    """SipHash-2-4 of many messages of 32 bytes, ten times as fast as one after the other."""
    keys = struct.unpack("<QQ", _KEY)
    v0, v1, v2, v3 = (
        np.full_like(message[0], key ^ constant)
        for key, constant in zip(2 * keys, _SIPHASH, strict=True)
    )
    length = np.full_like(message[0], _HASHED_HEADER_BYTES << 56)
    for word in (*message, length, None):
        if word is None:
            v2 ^= np.uint64(0xFF)
        else:
            v3 ^= word
        for _ in range(4 if word is None else 2):
            v0 += v1
            v2 += v3
            v1, v3 = _rotated(v1, 13) ^ v0, _rotated(v3, 16) ^ v2
            v0, v2 = _rotated(v0, 32) + v3, v2 + v1
            v1, v3 = _rotated(v1, 17) ^ v2, _rotated(v3, 21) ^ v0
            v2 = _rotated(v2, 32)
        if word is not None:
            v0 ^= word
    return v0 ^ v1 ^ v2 ^ v3


def _rotated(words: _Words, bits: int) -> _Words:
    return (words << np.uint64(bits)) | (words >> np.uint64(64 - bits))


def _content_is(digest: bytes, read: Read, entry: LogEntry, into: IO[bytes] | None = None) -> bool:
    running = siphash24(key=_KEY)
    missing_bytes = entry.content_size_bytes
    for piece in _payload(read, end_of(entry.begin, 0), entry.end, _PIECE_BYTES):
        running.update(piece)
        missing_bytes -= len(piece)
        if into is not None:
            into.write(piece)
    return missing_bytes == 0 and bytes(running.digest()) == digest


def _payload(read: Read, start: int, end: int, piece_bytes: int) -> Iterator[memoryview]:
    position = start
    while position < end:
        stop = min(end, (position // piece_bytes + 1) * piece_bytes)
        data = memoryview(read(position, stop))[: stop - position]
        offset = 0
        while offset < len(data):
            in_block = (position + offset) % BLOCK_BYTES
            yield data[
                offset + (METER_BYTES if in_block == 0 else 0) : offset + BLOCK_BYTES - in_block
            ]
            offset += BLOCK_BYTES - in_block
        if len(data) < stop - position:
            return
        position = stop


def _with_meters(begin: int, payload: Iterable[memoryview]) -> Iterator[Buffer]:
    position = begin
    for part in payload:
        offset = 0
        while offset < len(part):
            if position % BLOCK_BYTES == 0:
                yield _meter(begin) if position else FILE_HEADER
                position += METER_BYTES
            piece = part[offset : offset + BLOCK_BYTES - position % BLOCK_BYTES]
            yield piece
            offset += len(piece)
            position += len(piece)


def _meter(begin: int) -> bytes:
    position = begin.to_bytes(8, "little")
    return position + _hash(position)


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
