"""CAF 1.0 files: a writer, and a reader over any source of ranges.

    0 … D        bodies in the order of adding, without gaps
    D … D+N      the index, JSON (`index`)
    D+N … +4     N

Source: docs/reference/chunk-format.md.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self, runtime_checkable

import msgspec
from typing_extensions import Buffer

from caf_pipeline.caf.index import (
    FOOTER_SIZE_BYTES,
    ByteRange,
    IndexBuilder,
    decode_index,
    parse_footer,
)
from caf_pipeline.errors import (
    ArchiveError,
    ArchiveLimitReached,
    MalformedArchive,
    MemberNotFound,
    MemberRefused,
)
from caf_pipeline.system.atomic_files import WholeFile
from caf_pipeline.system.quantities import counted
from caf_pipeline.system.ranges import LocalRange, write_piece

SUFFIX_BYTES: Final = 64 * 1024
"""The first read. It holds the index of about a thousand members."""

MAX_READ_INDEX_BYTES: Final = 1 << 30
"""Longer indexes are refused: four times the writer's limit."""

PIECE_BYTES: Final = 1 << 20
WINDOW_BYTES: Final = 8 << 20  # the largest read that several members share
_MAX_DEAD_RUN_BYTES: Final = 64 * 1024  # unused bytes that cost less than another request


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_bytes` counts bodies, index and footer."""

    max_members: int = 1_000_000
    max_index_bytes: int = 256 << 20
    max_bytes: int = 32 << 30

    def reason_against(self, member_count: int, index_size_bytes: int, size_bytes: int) -> str:
        """Return the limit that such an archive would exceed, or ""."""
        if member_count > self.max_members:
            return f"an archive holds at most {counted(self.max_members, 'member')}"
        if index_size_bytes > self.max_index_bytes:
            return (
                f"its index would have {index_size_bytes} bytes of at most {self.max_index_bytes}"
            )
        if size_bytes > self.max_bytes:
            return f"the archive would have {size_bytes} bytes of at most {self.max_bytes}"
        return ""


DEFAULT_LIMITS: Final = Limits()


class CafWriter:
    """Writes one archive under a temporary name next to `path`. It appears complete, or not at all.

    A context manager: without `publish()`, or on an exception, it removes the temporary file. After
    an OSError (a full disk), the writer is unusable. After any CafError, the archive is as before
    the call.
    """

    def __init__(self, path: Path, *, limits: Limits = DEFAULT_LIMITS) -> None:
        self.path = path
        self._limits = limits
        self._index = IndexBuilder()
        self._position = 0
        self._whole = WholeFile(path)
        self._file = self._whole.file

    @property
    def temporary(self) -> Path:
        return self._whole.temporary

    @property
    def member_count(self) -> int:
        return self._index.member_count

    @property
    def size_bytes(self) -> int:
        return self._position + self._index.index_size_bytes + FOOTER_SIZE_BYTES

    def add(
        self, key: str, size_bytes: int, chunks: Iterable[Buffer | LocalRange]
    ) -> tuple[int, int]:
        """Append a member and return its range, with an exclusive end.

        Each chunk of the body is written before the next is requested.

        Raises:
            MemberRefused: the key exists or is not UTF-8 (no chunk was requested); the size is
                wrong.
            ArchiveLimitReached: the member does not fit; no chunk was requested.
        """
        if key in self._index:
            raise MemberRefused(f"The key {key!r} is in the archive already.")
        start_byte, end_byte = self._position, self._position + size_bytes
        index_size_bytes = self._index.size_with(key, start_byte, end_byte)
        if reason := self._reason_against(1, index_size_bytes, end_byte):
            raise ArchiveLimitReached(
                f"The member {key!r} of {size_bytes} bytes does not fit: {reason}."
            )
        with self._rollback_on_error():
            written = 0
            for chunk in chunks:
                length = chunk.nbytes if isinstance(chunk, LocalRange) else memoryview(chunk).nbytes
                if written + length > size_bytes:
                    raise MemberRefused(
                        f"The member {key!r} was declared with {size_bytes} bytes but has more."
                    )
                written += write_piece(self._file, chunk)
                if isinstance(chunk, LocalRange):
                    self._whole.raw.begin_writing_back(self._position + written)
            if written < size_bytes:
                raise MemberRefused(
                    f"The member {key!r} was declared with {size_bytes} bytes but has {written}."
                )
        self._index.add(key, start_byte, end_byte)
        self._position = end_byte
        return start_byte, end_byte

    def add_neighbours(
        self, keys: Sequence[str], sizes: Sequence[int], bodies: "memoryview[int]"
    ) -> None:
        """Append at least one member with contiguous bodies, like repeated `add`.

        On an error of `add`, the members before the refused one are in the archive.
        """
        bounds = [*accumulate(sizes, initial=self._position)]
        members = self._index.with_neighbours(keys, bounds)
        if members is None or self._reason_against(len(keys), members.index_size_bytes, bounds[-1]):
            for key, size_bytes, (start_byte, end_byte) in zip(
                keys, sizes, pairwise(bounds), strict=True
            ):
                self.add(key, size_bytes, (bodies[start_byte - bounds[0] : end_byte - bounds[0]],))
            return
        if len(bodies) != bounds[-1] - bounds[0]:
            raise MemberRefused(
                f"{len(keys)} members were declared with {bounds[-1] - bounds[0]} bytes but have "
                f"{len(bodies)}."
            )
        with self._rollback_on_error():
            self._file.write(bodies)
        self._index.add_neighbours(members)
        self._position = bounds[-1]

    def seal(self) -> None:
        """Write index and footer durably, without the final name. Ends adding."""
        for piece in self._index.iter_index():
            self._file.write(piece)
        self._file.write(self._index.footer())
        self._whole.seal()

    def publish(self) -> None:
        self._whole.publish()

    def abort(self) -> None:
        self._whole.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def _reason_against(self, more_members: int, index_size_bytes: int, end_byte: int) -> str:
        size_bytes = end_byte + index_size_bytes + FOOTER_SIZE_BYTES
        return self._limits.reason_against(
            self._index.member_count + more_members, index_size_bytes, size_bytes
        )

    @contextlib.contextmanager
    def _rollback_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._file.seek(self._position)
            self._file.truncate()
            raise


class RangeSource(Protocol):
    """A file that can be read by ranges. It must not change between reads."""

    def read(self, start_byte: int, end_byte: int) -> bytes:
        """Return exactly `[start_byte, end_byte)`, or raise."""

    def read_suffix(self, size_bytes: int) -> tuple[bytes, int]:
        """Return at most the last `size_bytes` of the file, and its size."""


@runtime_checkable
class StreamingSource(RangeSource, Protocol):
    """A source that streams a long range from one request."""

    def stream(self, start_byte: int, end_byte: int, piece_bytes: int) -> Iterator[bytes]:
        """Yield exactly `[start_byte, end_byte)` in pieces of at most `piece_bytes`, or raise."""


class Member(msgspec.Struct, frozen=True, gc=False):
    """A member of an archive at `[start_byte, end_byte)`. A Struct is made four times as fast."""

    key: str
    start_byte: int
    end_byte: int

    @property
    def size_bytes(self) -> int:
        return self.end_byte - self.start_byte


class CafReader:
    """An open archive: its index in memory, each body one range read away.

    Attributes:
        data_size_bytes: the bodies, unused bytes included; the index begins there.
        warnings: one sentence for each kind of tolerated fault.
    """

    def __init__(
        self,
        source: RangeSource,
        ranges: dict[str, ByteRange],
        *,
        size_bytes: int,
        data_size_bytes: int,
        name: str,
    ) -> None:
        self.size_bytes = size_bytes
        self.data_size_bytes = data_size_bytes
        self.warnings: tuple[str, ...] = ()
        self._source = source
        self._ranges = ranges
        self._name = name
        self._cached = b""  # the last bodies, if the first read included them
        self._cached_from = data_size_bytes

    @classmethod
    def open(cls, source: RangeSource, *, name: str = "the archive", lenient: bool = False) -> Self:
        """Read the index, with one read if the last 64 KiB hold it, otherwise with two.

        Members in those 64 KiB need no other read. Memory is bounded as by `decode_index`.

        Raises:
            MalformedArchive: it breaks a rule of CAF 1.0.
            ArchiveLimitReached: the index is longer than `MAX_READ_INDEX_BYTES`.
        """
        tail, size_bytes = source.read_suffix(SUFFIX_BYTES)
        index_start = _locate_index(tail, size_bytes, name)
        tail_start = size_bytes - len(tail)
        if index_start >= tail_start:
            index = tail[index_start - tail_start : -FOOTER_SIZE_BYTES]
        else:
            index = _read_exactly(source, index_start, size_bytes - FOOTER_SIZE_BYTES, name)
        decoded = decode_index(index, index_start, name=name, lenient=lenient)
        reader = cls(
            source,
            decoded.ranges,
            size_bytes=size_bytes,
            data_size_bytes=index_start,
            name=name,
        )
        reader.warnings = decoded.warnings
        if index_start > tail_start:
            reader._cached, reader._cached_from = tail[: index_start - tail_start], tail_start
        return reader

    def __len__(self) -> int:
        return len(self._ranges)

    def __contains__(self, key: str) -> bool:
        return key in self._ranges

    def __getitem__(self, key: str) -> Member:
        """Raises MemberNotFound."""
        byte_range = self._ranges.get(key)
        if byte_range is None:
            raise MemberNotFound(
                f"{self._name} has no member {key!r}.", hint="`caf list` shows the keys."
            )
        return Member(key, byte_range.start_byte, byte_range.end_byte)

    @property
    def members(self) -> Iterator[Member]:
        """In the order of the index."""
        return (Member(key, item.start_byte, item.end_byte) for key, item in self._ranges.items())

    def read(self, key: str) -> bytes:
        """Use at most one read."""
        member = self[key]
        return self._read_range(member.start_byte, member.end_byte)

    def stream(self, key: str, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        """In constant memory."""
        member = self[key]
        return self.stream_range(member.start_byte, member.end_byte, piece_bytes)

    def stream_range(
        self, start_byte: int, end_byte: int, piece_bytes: int = PIECE_BYTES
    ) -> Iterator[bytes]:
        """Use one request if the source can stream."""
        if self._cached_from <= start_byte or not isinstance(self._source, StreamingSource):
            for piece_start in range(start_byte, end_byte, piece_bytes):
                yield self._read_range(piece_start, min(piece_start + piece_bytes, end_byte))
        else:
            yield from self._source.stream(start_byte, end_byte, piece_bytes)

    def read_many(
        self, members: Iterable[Member]
    ) -> Iterator[tuple[Member, tuple[Buffer] | Iterator[Buffer]]]:
        """Yield each member with its body, in the order of the bytes.

        Neighbouring small members share a read of up to 8 MiB. Exhaust an iterator before the next
        member.
        """
        for group in _neighbours(
            sorted(members, key=lambda member: (member.start_byte, member.end_byte))
        ):
            start_byte, end_byte = group[0].start_byte, max(member.end_byte for member in group)
            if end_byte - start_byte > WINDOW_BYTES:
                yield group[0], self.stream_range(start_byte, end_byte)
                continue
            window = memoryview(self._read_range(start_byte, end_byte))
            for member in group:
                yield (
                    member,
                    (window[member.start_byte - start_byte : member.end_byte - start_byte],),
                )

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges that belong to no member, in order."""
        covered = 0
        for byte_range in self._ranges_in_order():
            if byte_range.start_byte > covered:
                yield covered, byte_range.start_byte
            covered = max(covered, byte_range.end_byte)
        if covered < self.data_size_bytes:
            yield covered, self.data_size_bytes

    def overlap_count(self) -> int:
        """Count members that share bytes with an earlier member."""
        count = covered = 0
        for byte_range in self._ranges_in_order():
            count += byte_range.start_byte < min(covered, byte_range.end_byte)
            covered = max(covered, byte_range.end_byte)
        return count

    def _ranges_in_order(self) -> Sequence[ByteRange]:
        return sorted(self._ranges.values(), key=attrgetter("start_byte"))

    def _read_range(self, start_byte: int, end_byte: int) -> bytes:
        if start_byte == end_byte:
            return b""
        if start_byte >= self._cached_from:
            return self._cached[start_byte - self._cached_from : end_byte - self._cached_from]
        return _read_exactly(self._source, start_byte, end_byte, self._name)


def _locate_index(tail: bytes, size_bytes: int, name: str) -> int:
    if len(tail) != min(size_bytes, SUFFIX_BYTES):
        raise ArchiveError(
            f"{name}: the last {SUFFIX_BYTES} bytes were requested, but {len(tail)} of a file of "
            f"{size_bytes} were returned."
        )
    if size_bytes < FOOTER_SIZE_BYTES:
        raise MalformedArchive(
            f"{name}: a file of {size_bytes} bytes is too short for a CAF footer."
        )
    index_size_bytes = parse_footer(tail[-FOOTER_SIZE_BYTES:])
    if not 0 < index_size_bytes <= size_bytes - FOOTER_SIZE_BYTES:
        raise MalformedArchive(
            f"{name}: its last four bytes announce an index of {index_size_bytes} bytes, but the "
            f"file has {size_bytes}.",
            hint="It is truncated, has additional bytes, or is not a CAF file.",
        )
    if index_size_bytes > MAX_READ_INDEX_BYTES:
        raise ArchiveLimitReached(
            f"{name}: its index of {index_size_bytes} bytes is longer than {MAX_READ_INDEX_BYTES}."
        )
    return size_bytes - FOOTER_SIZE_BYTES - index_size_bytes


def _read_exactly(source: RangeSource, start_byte: int, end_byte: int, name: str) -> bytes:
    piece = source.read(start_byte, end_byte)
    if len(piece) != end_byte - start_byte:
        raise ArchiveError(
            f"{name}: bytes {start_byte} to {end_byte} were requested, but {len(piece)} bytes "
            "were returned."
        )
    return piece


def _neighbours(members: Iterable[Member]) -> Iterator[list[Member]]:
    group: list[Member] = []
    first_byte = last_byte = 0
    for member in members:
        reach = max(last_byte, member.end_byte)
        if group and (
            reach - first_byte > WINDOW_BYTES or member.start_byte - last_byte > _MAX_DEAD_RUN_BYTES
        ):
            yield group
            group = []
        if not group:
            first_byte, reach = member.start_byte, member.end_byte
        group.append(member)
        last_byte = reach
    if group:
        yield group
