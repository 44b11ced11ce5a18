"""ChunkIO: an append-only log whose undamaged entries are found again after any crash or damage.

What ChunkIO calls a chunk is an *entry* here, since a chunk is something else in this project. An entry is 16 bytes of the
caller's own (`user_data`) and any content. It lies in the file as a header of 40 bytes and the content; wherever its bytes
meet a multiple of 65,536, 16 bytes are left out for a *meter*, which names the entry that was being written there, so that
a reader finds its way again behind damage. Position 0 holds the file's header in the place of a meter. Integers and hashes
are little-endian, the hash is SipHash-2-4 with a fixed key: it finds damage, and is no protection against a forger.

The reader takes the entries that the original's forward scan by `begin + 1` finds. It does not have the original's backward
walks and look-ups near a middle.

Source: github.com/romkatv/ChunkIO at 9715ce1; vectors of the original in the tests.
"""

import heapq
import io
import struct
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from siphash24 import siphash24
from typing_extensions import Buffer

from caf_pipeline.errors import UsageError

BLOCK_BYTES: Final = 65_536  # the grid of the meters
METER_BYTES: Final = 16
HEADER_BYTES: Final = 40
USER_DATA_BYTES: Final = 16
MAX_CONTENT_BYTES: Final = 2**31 - 57  # the original's limit: the largest array of .NET
MAX_POSITION: Final = 2**63 - 1  # positions are signed 64-bit numbers in the original

_FILE_HEADER: Final = b"romkatv/chunkio\n"  # written, never checked: the original does the same
_KEY: Final = b"romkatv/chunkio1"
_METER: Final = struct.Struct("<Q8s")  # begin of the named entry, hash of these 8 bytes
_HEADER: Final = struct.Struct("<16sQ8s8s")  # user data, content size, hash of the content, hash of the 32 bytes before
_HASHED_HEADER_BYTES: Final = 32
_NO_BEGIN: Final = -1

_PIECE_BYTES: Final = 4 * BLOCK_BYTES  # read at once of a content: larger ones measured no faster
_HASHED_FILE_SIZES: Final = 4
"""A scan hashes contents of at most this many times the file's size. Writing leaves entries that overlap only where one was
torn, so one file's size is what a scan of a file without meters takes; a forged file could claim overlapping contents from
every block and make the scan quadratic."""

Read = Callable[[int, int], Buffer]
"""Returns the file's bytes from the first position to the second, exclusive one; fewer only where the file ends before."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An entry whose header is right; its content may be damaged or missing.

    Attributes:
        begin: the position that names it; on a multiple of 65,536 its bytes start behind the meter there.
        end: the position behind its last byte, and the next entry's begin where one follows without padding.
        user_data: 16 bytes.
        content_size_bytes: as the header says.
    """

    begin: int
    end: int
    user_data: bytes
    content_size_bytes: int


class LogWriter:
    """Makes the bytes to append to a log, byte for byte those of the original writer.

    `position` is the file's size once everything that was returned is appended. A file that was closed, or that a crash
    left, is continued by a new writer at its size: the first entry then begins on the grid, behind zeros.
    """

    def __init__(self, position: int = 0) -> None:
        """Go on at the end of a file of `position` bytes; raises UsageError where that is no size of a file."""
        if not 0 <= position <= MAX_POSITION:
            raise UsageError(f"A log cannot have {position} bytes.", hint="Give the size of the file.")
        self._position = position
        self._torn = True

    @property
    def position(self) -> int:
        """The file's size with all that was returned."""
        return self._position

    def entry(self, user_data: bytes, content: Buffer) -> bytes:
        """Return all that is to be appended for one entry: padding where the log was torn, meters, header and content.

        Raises:
            UsageError: user data of another length than 16 bytes, a content of more than 2,147,483,591 bytes, or an end past
                2**63 - 1. The writer is as it was before.
        """
        view = memoryview(content)
        _check_sizes(user_data, view.nbytes)
        begin = -(-self._position // BLOCK_BYTES) * BLOCK_BYTES if self._torn else self._position
        end = end_of(begin, view.nbytes)
        if end > MAX_POSITION:
            raise UsageError(
                f"An entry at {begin} of {view.nbytes} bytes would end past {MAX_POSITION}.", hint="Begin another log."
            )
        view = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
        header = user_data + view.nbytes.to_bytes(8, "little") + _hash(view)
        pieces = _laid_out(begin, (memoryview(header + _hash(header)), view))
        data = b"".join((bytes(begin - self._position), *pieces))
        self._position, self._torn = end, False
        return data


class LogReader:
    """Finds the entries of a log, whatever became of it.

    Every call reads again, so an answer depends on the file alone. Memory is two blocks, what notes the meters (below a 500th
    of the file's size), and the one content asked for. Nothing is asked for at or past `size_bytes`. Nothing is raised but
    what `read` raises.
    """

    def __init__(self, read: Read, size_bytes: int) -> None:
        """Read a file of `size_bytes` through `read(start, end)`, which returns fewer bytes only at the file's end."""
        self._read = read
        self._size_bytes = size_bytes

    def entries(self) -> Iterator[LogEntry]:
        """Yield every entry that can be reached, by begin.

        Reached are those on the ways from position 0 and from the entry that each valid meter names. A way goes on at an
        entry's end, and ends at a header that is not right or at an entry that may not be stepped past, because nothing
        proves that it was written whole. The time is linear in the file's size, also for a forged file.
        """
        return _Scan(self._read, self._size_bytes).entries()

    def content(self, entry: LogEntry) -> bytes | None:
        """Return an entry's content where all of it lies in the file and agrees with its hash, else None.

        Without reading where the entry ends past the file. None also for an entry that the file does not have.
        """
        if not is_begin(entry.begin) or entry.end > self._size_bytes:
            return None
        found = _header_at(self._read, entry.begin, self._size_bytes)
        if found is None or found[0] != entry:
            return None
        content = io.BytesIO()
        return content.getvalue() if _content_is(found[1], self._read, entry, content) else None


def is_begin(position: int) -> bool:
    """Say whether an entry may begin there: not in the bytes of a meter, save on its first, which tells its end."""
    return 0 <= position <= MAX_POSITION and not 1 <= position % BLOCK_BYTES <= METER_BYTES


def end_of(begin: int, content_size_bytes: int) -> int:
    """Return where an entry ends that begins at `begin`, with the meters inside it."""
    payload_bytes = HEADER_BYTES + content_size_bytes
    full_blocks, rest = divmod(payload_bytes, BLOCK_BYTES - METER_BYTES)
    offset = begin % BLOCK_BYTES
    one_more = (offset == 0 and rest > 0) or offset + rest > BLOCK_BYTES
    return begin + payload_bytes + METER_BYTES * (full_blocks + one_more)


class _Scan:
    """One pass over the entries, with all that it remembers: what another pass saw plays no part."""

    def __init__(self, read: Read, size_bytes: int) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._block = lru_cache(maxsize=2)(self._read_block)  # headers are read going forward, and one spans two at most
        self._named = array("q")  # by meter, from position 0 on: the begin that it names, or _NO_BEGIN
        self._may_hash_bytes = _HASHED_FILE_SIZES * size_bytes

    def entries(self) -> Iterator[LogEntry]:
        """Yield the reachable entries: all ways are walked at once, so that each position is looked at once, in order."""
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
            yield found[0]
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
                return  # the file is shorter than was said: the meters that follow are not there either
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
        if entry.content_size_bytes > self._may_hash_bytes:
            return False
        self._may_hash_bytes -= entry.content_size_bytes
        return _content_is(digest, self._read, entry)


def _header_at(read: Read, begin: int, size_bytes: int) -> tuple[LogEntry, bytes] | None:
    """Return the entry at a legal begin and the hash of its content, or None where no right header lies in the file."""
    header_end = end_of(begin, 0)
    if header_end > size_bytes:
        return None
    header = b"".join(_payload(read, begin, header_end, BLOCK_BYTES))
    if len(header) < HEADER_BYTES:
        return None
    user_data, content_size_bytes, content_digest, header_digest = _HEADER.unpack(header)
    if content_size_bytes > MAX_CONTENT_BYTES or _hash(header[:_HASHED_HEADER_BYTES]) != header_digest:
        return None
    end = end_of(begin, content_size_bytes)
    return (LogEntry(begin, end, user_data, content_size_bytes), content_digest) if end <= MAX_POSITION else None


def _content_is(digest: bytes, read: Read, entry: LogEntry, into: io.BytesIO | None = None) -> bool:
    """Say whether the content of an entry inside the file has this hash, copying it on the way where asked to."""
    running = siphash24(key=_KEY)
    missing_bytes = entry.content_size_bytes
    for piece in _payload(read, end_of(entry.begin, 0), entry.end, _PIECE_BYTES):
        running.update(piece)
        missing_bytes -= len(piece)
        if into is not None:
            into.write(piece)
    return missing_bytes == 0 and bytes(running.digest()) == digest


def _payload(read: Read, start: int, end: int, piece_bytes: int) -> Iterator[memoryview]:
    """Yield what lies in `[start, end)` without the meters, reading to the next multiple of `piece_bytes` at a time.

    Ends early where `read` returns less than asked for.
    """
    place = start
    while place < end:
        stop = min(end, (place // piece_bytes + 1) * piece_bytes)
        data = memoryview(read(place, stop))[: stop - place]
        offset = 0
        while offset < len(data):
            in_block = (place + offset) % BLOCK_BYTES
            yield data[offset + (METER_BYTES if in_block == 0 else 0) : offset + BLOCK_BYTES - in_block]
            offset += BLOCK_BYTES - in_block
        if len(data) < stop - place:
            return
        place = stop


def _laid_out(begin: int, payload: tuple[memoryview, ...]) -> Iterator[Buffer]:
    """Yield the payload from `begin` on with a meter at each line of the grid that it meets."""
    place = begin
    for part in payload:
        taken = 0
        while taken < len(part):
            if place % BLOCK_BYTES == 0:
                yield _meter(begin) if place else _FILE_HEADER
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
        raise UsageError(f"An entry's user data has {USER_DATA_BYTES} bytes, not {len(user_data)}.", hint="Pad or shorten it.")
    if content_size_bytes > MAX_CONTENT_BYTES:
        raise UsageError(
            f"An entry's content has at most {MAX_CONTENT_BYTES} bytes, not {content_size_bytes}.",
            hint="Write it as several entries.",
        )
