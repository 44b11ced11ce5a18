"""Metadata of clp-s single-file archives. Records are neither read nor written.

An archive has a header of 64 bytes, the metadata (packets in a zstd stream), and seven sections.
Integers are little-endian. Like clp-s 0.12.1b0, this module accepts all versions and refuses what
is corrupt.

Source: github.com/y-scope/clp; archives of three versions, and damaged ones, in the tests.
"""

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import msgspec
import pyarrow as pa
from typing_extensions import Buffer

from caf_pipeline.errors import ArchiveError, ArchiveLimitReached, MalformedArchive

HEADER_BYTES: Final = 64
FIRST_READ_BYTES: Final = 64 << 10
"""The header, and the metadata of some thousand inputs."""

MAX_METADATA_BYTES: Final = 64 << 20
"""Limit of the compressed metadata, and of a packet; 10,000 inputs have 104,385 bytes."""

MAX_INFLATED_BYTES: Final = 256 << 20
MAX_ITEMS: Final = 1_000_000
"""Limit for inputs, timestamp keys, patterns and column ids together.

Each takes 150 bytes of memory, but may take only ten in the file.
"""

SECTIONS: Final = (
    "/schema_tree",
    "/schema_ids",
    "/table_metadata",
    "/var.dict",
    "/log.dict",
    "/array.dict",
    "/0",
)

EPOCH_MILLISECONDS: Final = 1

TIMES_METADATA_BYTES: Final = 1 << 20
"""Limit for `read_times`: ten times the compressed metadata of 10,000 inputs."""

TIMES_INFLATED_BYTES: Final = 4 << 20
TIMES_ITEMS: Final = 10_000
"""Limit for `read_times`: some milliseconds of work."""

_MAGIC: Final = b"\xfd\x2f\xc5\x30"
MAGIC_BYTES: Final = len(_MAGIC)

_HEADER: Final = struct.Struct("<4sHBBQQ32xIH2x")
_PACKET: Final = struct.Struct("<BI")
_U64: Final = struct.Struct("<Q")
_TABLE: Final = struct.Struct("<QQiQ")  # stream, offset, schema id, records
_ZSTD: Final = 0
_CUT_OFF: Final = "The file is cut off, or clp-s did not write it."
_MAX_TABLE_PACKET_BYTES: Final = 1 << 20  # ArchiveInfo and ArchiveFileInfo have 15 and 140 bytes
_MAX_FIELDS_BYTES: Final = 1 << 20  # of one input
_PIECE_BYTES: Final = 1 << 20
# By encoding; no other encoding has values.
_RANGE_SIZES: Final = {EPOCH_MILLISECONDS: struct.Struct("<qq"), 2: struct.Struct("<dd")}
# By type byte: the number of bytes before the text.
_MSGPACK_STRINGS: Final = {0xD9: 2, 0xDA: 3, 0xDB: 5}
# Without floats, which may not be finite.
_PLAIN_FIELDS: Final = msgspec.msgpack.Decoder(dict[str, str | int | bool | None])

Decoded = TypeVar("Decoded")


@dataclass(frozen=True, slots=True)
class Header:
    """The first 64 bytes. `uncompressed_size` counts the bytes given to clp-s."""

    version: tuple[int, int, int]
    uncompressed_size: int
    total_size: int
    metadata_size: int
    compression: int

    @property
    def metadata_end(self) -> int:
        return HEADER_BYTES + self.metadata_size


@dataclass(frozen=True, slots=True)
class Section:
    """A section, which may be cut off."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A timestamp key's times, if known. Encoding 1 is milliseconds since 1970; 2 mixes units."""

    key: str
    column_ids: Sequence[int]
    encoding: int
    begin: float | None
    end: float | None


@dataclass(frozen=True, slots=True)
class TimestampPattern:
    """The format of timestamps in the logs."""

    id: int
    pattern: str


class Times(NamedTuple):
    """First and last time, in whole milliseconds since 1970, both inclusive."""

    first_ms: int
    last_ms: int


class InputRange(msgspec.Struct, frozen=True, gc=False):
    """The records `[s, e)` of an input file or a part of it, and its fields `f`."""

    s: int
    e: int
    f: msgspec.Raw

    @property
    def fields(self) -> Mapping[str, object]:
        """The fields that are text, integers, finite numbers, booleans or None.

        Text that is not UTF-8 has lone surrogates.
        """
        return _fields_of(self.f)


@dataclass(frozen=True, slots=True)
class ArchiveMetadata:
    """Header and metadata. `inputs` is None if clp-s did not keep the order of records."""

    header: Header
    num_segments: int | None
    sections: Sequence[Section]
    time_ranges: Sequence[TimeRange]
    patterns: Sequence[TimestampPattern]
    inputs: Sequence[InputRange] | None

    @property
    def records(self) -> int | None:
        """None if only `/table_metadata` has them; see `count_records`."""
        return sum(entry.e - entry.s for entry in self.inputs) if self.inputs else None

    @property
    def times(self) -> "Times | None":
        """None unless every timestamp key has them."""
        return _times(self.time_ranges)

    def section(self, name: str) -> Section:
        return next(section for section in self.sections if section.name == name)


def read_metadata(
    first: Buffer, file_size: int, read: Callable[[int, int], Buffer], *, name: str
) -> ArchiveMetadata:
    """Read header and metadata: at most one further range, and 500 MB.

    `first` has FIRST_READ_BYTES, or all of a shorter file. The second position of `read` is
    exclusive.

    Raises:
        MalformedArchive: It is no clp-s archive, or its header or metadata are damaged.
        ArchiveLimitReached: The metadata exceed 256 MiB inflated, or another limit.
        ArchiveError: This kind of archive is not supported.
    """
    beginning = memoryview(first)
    try:
        header = _parse_header(bytes(beginning[:HEADER_BYTES]))
        if header.metadata_end > file_size:
            raise MalformedArchive(
                f"the metadata end at byte {header.metadata_end} of a file of {file_size}.",
                hint=_CUT_OFF,
            )
        metadata = beginning[HEADER_BYTES : header.metadata_end]
        if missing := header.metadata_size - metadata.nbytes:
            metadata = memoryview(
                b"".join((metadata, read(header.metadata_end - missing, header.metadata_end)))
            )
        packets = _Packets(_Inflated(metadata))
        packets.read()
        return ArchiveMetadata(
            header,
            packets.num_segments,
            tuple(_sections(packets.files, header, file_size)),
            tuple(packets.time_ranges),
            tuple(packets.patterns),
            tuple(packets.inputs) if packets.has_range_index else None,
        )
    except ArchiveError as error:
        raise type(error)(f"{name}: {error}", hint=error.hint) from error


def begins_as_archive(first: Buffer) -> bool:
    """Return whether a file begins like clp-s archives."""
    return bytes(memoryview(first)[:MAGIC_BYTES]) == _MAGIC


def read_times(file_size: int, read: Callable[[int, int], Buffer]) -> Times | None:
    """Read the first and last time of all records; None if unknown.

    At most 1 MiB is read in two ranges, and 4 MiB are inflated. Raises as `read_metadata`.
    """
    header = _parse_header(bytes(read(0, min(HEADER_BYTES, file_size))))
    if header.metadata_end > file_size:
        raise MalformedArchive(
            f"the metadata end at byte {header.metadata_end} of a file of {file_size}.",
            hint=_CUT_OFF,
        )
    if header.metadata_size > TIMES_METADATA_BYTES:
        raise ArchiveLimitReached(
            f"the metadata have {header.metadata_size} bytes, more than {TIMES_METADATA_BYTES}."
        )
    metadata = memoryview(read(HEADER_BYTES, header.metadata_end))
    packets = _Packets(_Inflated(metadata, TIMES_INFLATED_BYTES), TIMES_ITEMS)
    packets.read_times()
    return _times(packets.time_ranges)


def count_records(table_metadata: Buffer, *, name: str) -> int:
    """Return this section's records. Raises as `read_metadata`."""
    try:
        inflated = _Inflated(memoryview(table_metadata))
        inflated.skip(16 * inflated.u64())  # position and size of each stream
        if inflated.u64():
            raise MalformedArchive("the table metadata have an unknown kind.")
        records, remaining = 0, inflated.u64()
        while remaining:
            tables = min(remaining, _PIECE_BYTES // _TABLE.size)
            rows = _TABLE.iter_unpack(inflated.take(tables * _TABLE.size))
            records += sum(row[3] for row in rows)
            remaining -= tables
        return records
    except ArchiveError as error:
        raise type(error)(f"{name}: {error}", hint=error.hint) from error


def _parse_header(first: bytes) -> Header:
    if not first.startswith(_MAGIC):
        raise MalformedArchive(
            "this does not begin like a clp-s archive.", hint="Only single-file archives are read."
        )
    if len(first) < HEADER_BYTES:
        raise MalformedArchive(
            f"the file has {len(first)} of the {HEADER_BYTES} bytes of a header.", hint=_CUT_OFF
        )
    _, patch, minor, major, uncompressed_size, total_size, metadata_size, compression = (
        _HEADER.unpack(first)
    )
    header = Header(
        (major, minor, patch), uncompressed_size, total_size, metadata_size, compression
    )
    if compression != _ZSTD:
        raise ArchiveError(
            f"the compression is of kind {compression}; only zstd ({_ZSTD}) is supported."
        )
    if metadata_size > MAX_METADATA_BYTES:
        raise ArchiveLimitReached(
            f"the metadata have {metadata_size} bytes, more than {MAX_METADATA_BYTES}."
        )
    return header


class _Inflated:
    def __init__(self, compressed: memoryview, limit_bytes: int = MAX_INFLATED_BYTES) -> None:
        self._stream = pa.input_stream(pa.py_buffer(compressed), compression="zstd")
        self._limit_bytes = self._remaining_bytes = limit_bytes

    def take(self, size_bytes: int) -> bytes:
        data = self._read(size_bytes)
        if len(data) < size_bytes:
            raise MalformedArchive("the metadata end before what they announce.")
        return data

    def skip(self, size_bytes: int) -> None:
        while size_bytes:
            size_bytes -= len(self.take(min(size_bytes, _PIECE_BYTES)))

    def u64(self) -> int:
        number: int = _U64.unpack(self.take(8))[0]
        return number

    def finish(self) -> None:
        while self._read(min(_PIECE_BYTES, self._remaining_bytes + 1)):
            pass

    def _read(self, size_bytes: int) -> bytes:
        if size_bytes > self._remaining_bytes:
            raise ArchiveLimitReached(
                f"the metadata inflate to more than {self._limit_bytes} bytes."
            )
        try:
            data: bytes = self._stream.read(size_bytes)
        except (OSError, pa.ArrowException) as error:
            raise MalformedArchive(f"the metadata cannot be inflated: {error}.") from error
        self._remaining_bytes -= len(data)
        return data


class _FileEntry(msgspec.Struct, gc=False):
    n: str
    o: int


class _ArchiveInfo(msgspec.Struct):
    num_segments: int


class _Packets:
    """Repeated packets add up, as in clp-s."""

    def __init__(self, inflated: _Inflated, max_items: int = MAX_ITEMS) -> None:
        self._inflated = inflated
        self._max_items = self._remaining_items = max_items
        self.num_segments: int | None = None
        self.files: list[_FileEntry] = []
        self.time_ranges: list[TimeRange] = []
        self.patterns: list[TimestampPattern] = []
        self.inputs: list[InputRange] = []
        self.has_range_index = False

    def read(self) -> None:
        self._read(
            {
                0: self._archive_info,
                1: self._archive_file_info,
                2: self._timestamp_dictionary,
                3: self._range_index,
            }
        )

    def read_times(self) -> None:
        self._read({2: self._timestamp_dictionary})

    def _read(self, readers: Mapping[int, Callable[[int], None]]) -> None:
        for _ in range(self._inflated.take(1)[0]):
            kind, size_bytes = _PACKET.unpack(self._inflated.take(_PACKET.size))
            readers.get(kind, self._inflated.skip)(size_bytes)
        self._inflated.finish()

    def _archive_info(self, size_bytes: int) -> None:
        packet = self._packet(size_bytes, _MAX_TABLE_PACKET_BYTES)
        self.num_segments = _decode(packet, _ArchiveInfo, "ArchiveInfo").num_segments
        if self.num_segments != 1:
            raise ArchiveError(
                f"the archive has {self.num_segments} segments; only archives of one are supported."
            )

    def _archive_file_info(self, size_bytes: int) -> None:
        packet = self._packet(size_bytes, _MAX_TABLE_PACKET_BYTES)
        # Like clp-s, take the first value as the list, whatever its name.
        lists = _decode(packet, dict[str, msgspec.Raw], "ArchiveFileInfo")
        self.files += _decode(
            next(iter(lists.values()), msgspec.Raw(b"\xc0")), list[_FileEntry], "ArchiveFileInfo"
        )

    def _timestamp_dictionary(self, _: int) -> None:
        """Ignore the packet's size, as clp-s does."""
        inflated = self._inflated
        for _ in range(self._count(inflated.u64())):
            key = self._text()
            columns = self._count(inflated.u64())
            column_ids = struct.unpack(f"<{columns}i", inflated.take(4 * columns))
            encoding = inflated.u64()
            begin, end = None, None
            if values := _RANGE_SIZES.get(encoding):
                begin, end = (
                    value if math.isfinite(value) else None
                    for value in values.unpack(inflated.take(values.size))
                )
            self.time_ranges.append(TimeRange(key, column_ids, encoding, begin, end))
        for _ in range(self._count(inflated.u64())):
            self.patterns.append(TimestampPattern(inflated.u64(), self._text()))

    def _range_index(self, size_bytes: int) -> None:
        packet = self._packet(size_bytes)
        # The length that the msgpack array claims; 0 if it is no array.
        first = packet[:1]
        if b"\x90" <= first <= b"\x9f":
            length = first[0] & 0x0F
        else:
            length = int.from_bytes(packet[1 : {b"\xdc": 3, b"\xdd": 5}.get(first, 1)], "big")
        self._count(length)
        inputs = _decode(packet, list[InputRange], "RangeIndex")
        for entry in inputs:
            if not 0 <= entry.s <= entry.e:
                raise MalformedArchive(f"an input has the records {entry.s} to {entry.e}.")
            if (size := memoryview(entry.f).nbytes) > _MAX_FIELDS_BYTES:
                raise ArchiveLimitReached(
                    f"the fields of an input have {size} bytes, more than {_MAX_FIELDS_BYTES}."
                )
            _fields_of(entry.f)
        self.inputs += inputs
        self.has_range_index = True

    def _packet(self, size_bytes: int, limit: int = MAX_METADATA_BYTES) -> bytes:
        if size_bytes > limit:
            raise ArchiveLimitReached(
                f"a packet of the metadata has {size_bytes} bytes, more than {limit}."
            )
        return self._inflated.take(size_bytes)

    def _text(self) -> str:
        return self._packet(self._inflated.u64(), _MAX_FIELDS_BYTES).decode(
            "utf-8", "surrogateescape"
        )

    def _count(self, items: int) -> int:
        self._remaining_items -= items
        if self._remaining_items < 0:
            raise ArchiveLimitReached(
                f"the metadata list more than {self._max_items} inputs, timestamp keys and "
                "patterns."
            )
        return items


def _times(ranges: Sequence[TimeRange]) -> Times | None:
    spans = [
        Times(int(entry.begin), int(entry.end))
        for entry in ranges
        if entry.encoding == EPOCH_MILLISECONDS
        and entry.begin is not None
        and entry.end is not None
    ]
    if not spans or len(spans) < len(ranges) or any(span.first_ms > span.last_ms for span in spans):
        return None
    return Times(min(span.first_ms for span in spans), max(span.last_ms for span in spans))


def _sections(files: Sequence[_FileEntry], header: Header, file_size: int) -> Iterator[Section]:
    if tuple(entry.n for entry in files if entry.n in SECTIONS) != SECTIONS:
        raise MalformedArchive(f"the sections are not {', '.join(SECTIONS)}.")
    begins = [header.metadata_end + entry.o for entry in files]
    for entry, begin, end in zip(files, begins, [*begins[1:], header.total_size], strict=True):
        if not header.metadata_end <= begin <= end:
            raise MalformedArchive(f"the section {entry.n!r} begins at {begin} and ends at {end}.")
        if begin > file_size:
            raise MalformedArchive(
                f"the section {entry.n!r} begins at byte {begin} of a file of {file_size}.",
                hint=_CUT_OFF,
            )
        yield Section(entry.n, begin, end - begin)


def _decode(packet: Buffer, kind: type[Decoded], what: str) -> Decoded:
    try:
        return msgspec.msgpack.decode(packet, type=kind)
    # msgspec lets the second error pass.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedArchive(f"in the metadata, {what} is damaged: {error}.") from error


def _fields_of(raw: msgspec.Raw) -> Mapping[str, object]:
    try:
        return _PLAIN_FIELDS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields: dict[str, object] = {}
        values = _decode(raw, dict[str, msgspec.Raw], "an input of the RangeIndex")
        for name, value in values.items():
            view = memoryview(value)
            before = 1 if view[0] & 0xE0 == 0xA0 else _MSGPACK_STRINGS.get(view[0])
            if before:
                fields[name] = bytes(view[before:]).decode("utf-8", "surrogateescape")
                continue
            with suppress(msgspec.DecodeError):
                scalar = msgspec.msgpack.decode(value, type=int | float | bool | None)
                if not isinstance(scalar, float) or math.isfinite(scalar):
                    fields[name] = scalar
        return fields
