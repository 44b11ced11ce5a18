"""clp-s single-file archives: what their metadata tells of the logs inside.

Records are neither read nor written.

An archive is a header of 64 bytes, the metadata (a zstd stream of packets), and seven sections with
the records. Header and metadata lie at the file's beginning, so that two range reads tell what
there is: inputs and their records, timestamp keys with the first and the last time, sections.
Integers are little-endian. Versions 0.3 to 0.5 are the same here; like clp-s, this refuses no other
version.

What clp-s 0.12.1b0 reads is read, and what it calls corrupt is refused, save that nothing is
inflated without an end.

Source: github.com/y-scope/clp; archives of three of its versions, and damaged ones with its
verdict, in the tests.
"""

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import msgspec
import pyarrow as pa
from typing_extensions import Buffer

from caf_pipeline.errors import ArchiveError, ArchiveLimitReached, MalformedArchive

HEADER_BYTES: Final = 64
FIRST_READ_BYTES: Final = 64 << 10
"""The header and, of an archive of some thousand inputs, the metadata: one read where two would be
asked for.
"""

MAX_METADATA_BYTES: Final = 64 << 20
"""Of compressed metadata, and of each packet that is kept; that of 10,000 inputs has 104,385 bytes,
and 1.4 MB inflated.
"""

MAX_INFLATED_BYTES: Final = 256 << 20
MAX_ITEMS: Final = 1_000_000
"""Inputs, timestamp keys, patterns and column ids together: each costs 150 bytes of memory, in a
file it may cost ten.
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
"""The encoding of a time range whose values are milliseconds since 1970."""

TIMES_METADATA_BYTES: Final = 1 << 20
"""Of compressed metadata of which `read_times` reads the times: ten times those of an archive of
10,000 inputs.
"""

TIMES_INFLATED_BYTES: Final = 4 << 20
TIMES_ITEMS: Final = 10_000
"""Timestamp keys, patterns and column ids of which `read_times` reads: a few milliseconds of work,
whatever the file says.
"""

_MAGIC: Final = b"\xfd\x2f\xc5\x30"
MAGIC_BYTES: Final = len(_MAGIC)

_HEADER: Final = struct.Struct("<4sHBBQQ32xIH2x")
_PACKET: Final = struct.Struct("<BI")
_U64: Final = struct.Struct("<Q")
_TABLE: Final = struct.Struct("<QQiQ")  # stream, offset, schema id, records
_ZSTD: Final = 0
_CUT_OFF: Final = "The file is cut off, or is none that clp-s wrote."
_MAX_TABLE_PACKET_BYTES: Final = (
    1 << 20
)  # of ArchiveInfo and ArchiveFileInfo, which have 15 and 140 bytes
_MAX_FIELDS_BYTES: Final = 1 << 20  # what one input says of itself
_PIECE_BYTES: Final = 1 << 20
_RANGE_SIZES: Final = {
    EPOCH_MILLISECONDS: struct.Struct("<qq"),
    2: struct.Struct("<dd"),
}  # by encoding; none else has values
_MSGPACK_STRINGS: Final = {
    0xD9: 2,
    0xDA: 3,
    0xDB: 5,
}  # the type byte, and the bytes before the text
_PLAIN_FIELDS: Final = msgspec.msgpack.Decoder(
    dict[str, str | int | bool | None]
)  # floats may not be finite

Decoded = TypeVar("Decoded")


@dataclass(frozen=True, slots=True)
class Header:
    """The first 64 bytes.

    Attributes:
        version: of the format: major, minor, patch.
        uncompressed_size: bytes that were given to clp-s.
        total_size: the archive's bytes, which the file may exceed; nothing checks it.
        metadata_size: compressed.
        compression: 0, zstd.
    """

    version: tuple[int, int, int]
    uncompressed_size: int
    total_size: int
    metadata_size: int
    compression: int

    @property
    def metadata_end(self) -> int:
        """The position behind the metadata, where the sections begin."""
        return HEADER_BYTES + self.metadata_size


@dataclass(frozen=True, slots=True)
class Section:
    """One section: its position in the file, and its bytes, which may not all be there."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class TimeRange:
    """The first and the last time of one timestamp key; None where the archive does not tell.

    Times are milliseconds since 1970 with encoding 1. With encoding 2 they are floating-point
    numbers whose unit is not known: version 0.4.1 mixes seconds and milliseconds there.
    """

    key: str
    column_ids: Sequence[int]
    encoding: int
    begin: float | None
    end: float | None


@dataclass(frozen=True, slots=True)
class TimestampPattern:
    """How timestamps are written in the logs."""

    id: int
    pattern: str


class Times(NamedTuple):
    """The first and the last time in an archive, in milliseconds since 1970: both inclusive, each
    with its whole millisecond.
    """

    first_ms: int
    last_ms: int


class InputRange(msgspec.Struct, frozen=True, gc=False):
    """The records `[s, e)` of one input file, or of a part of it, and what is said of it.

    The same file given twice has two ranges, of the same name; an empty one has an empty range.
    """

    s: int
    e: int
    f: msgspec.Raw

    @property
    def fields(self) -> Mapping[str, object]:
        """What `f` says in text, whole and finite numbers, booleans and None; a text that is not
        UTF-8 has lone surrogates.

        clp-s writes `_filename`, `_file_split_number` and `_archive_creator_id`.
        """
        return _fields_of(self.f)


@dataclass(frozen=True, slots=True)
class ArchiveMetadata:
    """What header and metadata tell.

    Attributes: header: the first 64 bytes. num_segments: 1, or None where the archive does not
        tell. sections: in the order of their positions. time_ranges: one of each timestamp key;
        none where there is no such key, or it is in no record. patterns: of the timestamps. inputs:
        None where clp-s was told to keep no order of the records.
    """

    header: Header
    num_segments: int | None
    sections: Sequence[Section]
    time_ranges: Sequence[TimeRange]
    patterns: Sequence[TimestampPattern]
    inputs: Sequence[InputRange] | None

    @property
    def records(self) -> int | None:
        """The records of all inputs; None where only `/table_metadata` tells, which `count_records`
        reads.
        """
        return sum(one.e - one.s for one in self.inputs) if self.inputs else None

    @property
    def times(self) -> "Times | None":
        """The first and the last time of all records; None where the archive does not tell it of
        every timestamp key.
        """
        return _times(self.time_ranges)

    def section(self, name: str) -> Section:
        """Return one of `SECTIONS`."""
        return next(one for one in self.sections if one.name == name)


def read_metadata(
    first: Buffer, file_size: int, read: Callable[[int, int], Buffer], *, name: str
) -> ArchiveMetadata:
    """Read header and metadata by at most one more range.

    Memory is bounded by 500 MB for any file, and is a few times the inflated metadata of one that
    clp-s wrote.

    Args:
        first: the first FIRST_READ_BYTES of the file, or all of a shorter one.
        file_size: of the file, in bytes.
        read: returns the bytes from a first position to an exclusive second one.
        name: of the file, for messages.

    Raises: MalformedArchive: it is no clp-s archive, or its header or metadata are damaged.
        ArchiveLimitReached: the metadata
            inflate to more than 256 MiB, or list more than is read. ArchiveError: its kind is not
            supported.
    """
    known = memoryview(first)
    try:
        header = _parse_header(bytes(known[:HEADER_BYTES]))
        if header.metadata_end > file_size:
            raise MalformedArchive(
                f"the metadata end at byte {header.metadata_end} of a file of {file_size}.",
                hint=_CUT_OFF,
            )
        metadata = known[HEADER_BYTES : header.metadata_end]
        if missing := header.metadata_size - metadata.nbytes:
            metadata = memoryview(
                b"".join((metadata, read(header.metadata_end - missing, header.metadata_end)))
            )
        return _parse_metadata(header, metadata, file_size)
    except ArchiveError as error:
        raise type(error)(f"{name}: {error}", hint=error.hint) from error


def begins_as_archive(first: Buffer) -> bool:
    """Tell whether a file's first bytes are those of a clp-s archive.

    The rest of the header may still be none.
    """
    return bytes(memoryview(first)[:MAGIC_BYTES]) == _MAGIC


def read_times(file_size: int, read: Callable[[int, int], Buffer]) -> Times | None:
    """Read the first and the last time of all records, at little cost for any file; None where the
    archive does not tell.

    At most 1 MiB is read by two ranges, and 4 MiB are inflated. Inputs and sections are not looked
    at.

    Args:
        file_size: of the file, in bytes.
        read: returns the bytes from a first position to an exclusive second one.

    Raises: ArchiveError: as `read_metadata`, without the file's name; and where the metadata are
        larger.
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
    """Sum up the records in the section `/table_metadata`; raises as `read_metadata`."""
    try:
        return _sum_tables(_Inflated(memoryview(table_metadata)))
    except ArchiveError as error:
        raise type(error)(f"{name}: {error}", hint=error.hint) from error


def _parse_header(first: bytes) -> Header:
    if not first.startswith(_MAGIC):
        raise MalformedArchive(
            "this does not begin as a clp-s archive.", hint="Only single-file archives are read."
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
            f"the compression is of kind {compression}; only {_ZSTD} is supported, zstd."
        )
    if metadata_size > MAX_METADATA_BYTES:
        raise ArchiveLimitReached(
            f"the metadata have {metadata_size} bytes, more than {MAX_METADATA_BYTES}."
        )
    return header


def _parse_metadata(header: Header, metadata: memoryview, file_size: int) -> ArchiveMetadata:
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


def _sum_tables(inflated: "_Inflated") -> int:
    inflated.skip(16 * inflated.u64())  # position and size of each stream
    if inflated.u64():
        raise MalformedArchive("the table metadata are of a kind that is not known.")
    records, left = 0, inflated.u64()
    while left:
        tables = min(left, _PIECE_BYTES // _TABLE.size)
        records += sum(row[3] for row in _TABLE.iter_unpack(inflated.take(tables * _TABLE.size)))
        left -= tables
    return records


class _Inflated:
    """A zstd stream of one or more frames, read from its beginning on; ends in MAX_INFLATED_BYTES
    or an error.
    """

    def __init__(self, compressed: memoryview, most_bytes: int = MAX_INFLATED_BYTES) -> None:
        self._stream = pa.input_stream(pa.py_buffer(compressed), compression="zstd")
        self._most_bytes = self._left = most_bytes

    def take(self, size_bytes: int) -> bytes:
        """Return exactly so many bytes."""
        data = self._read(size_bytes)
        if len(data) < size_bytes:
            raise MalformedArchive("the metadata end before what they announce.")
        return data

    def skip(self, size_bytes: int) -> None:
        """Pass over so many bytes."""
        while size_bytes:
            size_bytes -= len(self.take(min(size_bytes, _PIECE_BYTES)))

    def u64(self) -> int:
        """Return the next 8 bytes as a number."""
        number: int = _U64.unpack(self.take(8))[0]
        return number

    def finish(self) -> None:
        """Pass over what is left, so that damage there is found; what it says does not matter."""
        while self._read(min(_PIECE_BYTES, self._left + 1)):
            pass

    def _read(self, size_bytes: int) -> bytes:
        if size_bytes > self._left:
            raise ArchiveLimitReached(
                f"the metadata inflate to more than {self._most_bytes} bytes."
            )
        try:
            data: bytes = self._stream.read(size_bytes)
        except (OSError, pa.ArrowException) as error:
            raise MalformedArchive(f"the metadata cannot be inflated: {error}.") from error
        self._left -= len(data)
        return data


class _FileEntry(msgspec.Struct, gc=False):
    n: str
    o: int


class _ArchiveInfo(msgspec.Struct):
    num_segments: int


class _Packets:
    """The packets of the metadata. One that comes again adds to what was there, as clp-s takes
    it.
    """

    def __init__(self, inflated: _Inflated, most_items: int = MAX_ITEMS) -> None:
        self._inflated = inflated
        self._most_items = self._items_left = most_items
        self.num_segments: int | None = None
        self.files: list[_FileEntry] = []
        self.time_ranges: list[TimeRange] = []
        self.patterns: list[TimestampPattern] = []
        self.inputs: list[InputRange] = []
        self.has_range_index = False

    def read(self) -> None:
        """Read them all; what follows the last one is ignored."""
        self._read(
            {
                0: self._archive_info,
                1: self._archive_file_info,
                2: self._timestamp_dictionary,
                3: self._range_index,
            }
        )

    def read_times(self) -> None:
        """Read the timestamp dictionaries, and pass over the other packets."""
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
        # The first value is the list, whatever its name: so clp-s reads it.
        lists = _decode(packet, dict[str, msgspec.Raw], "ArchiveFileInfo")
        self.files += _decode(
            next(iter(lists.values()), msgspec.Raw(b"\xc0")), list[_FileEntry], "ArchiveFileInfo"
        )

    def _timestamp_dictionary(self, _: int) -> None:
        """Without the packet's size, which clp-s does not use here either."""
        inflated = self._inflated
        for _ in range(self._count(inflated.u64())):
            key = self._text()
            columns = self._count(inflated.u64())
            column_ids = struct.unpack(f"<{columns}i", inflated.take(4 * columns))
            encoding = inflated.u64()
            begin, end = None, None
            if values := _RANGE_SIZES.get(encoding):
                begin, end = (
                    one if math.isfinite(one) else None
                    for one in values.unpack(inflated.take(values.size))
                )
            self.time_ranges.append(TimeRange(key, column_ids, encoding, begin, end))
        for _ in range(self._count(inflated.u64())):
            self.patterns.append(TimestampPattern(inflated.u64(), self._text()))

    def _range_index(self, size_bytes: int) -> None:
        packet = self._packet(size_bytes)
        self._count(_array_length(packet))
        inputs = _decode(packet, list[InputRange], "RangeIndex")
        for one in inputs:
            if not 0 <= one.s <= one.e:
                raise MalformedArchive(f"an input has the records {one.s} to {one.e}.")
            if (size := memoryview(one.f).nbytes) > _MAX_FIELDS_BYTES:
                raise ArchiveLimitReached(
                    f"the fields of an input have {size} bytes, more than {_MAX_FIELDS_BYTES}."
                )
            _fields_of(one.f)
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
        self._items_left -= items
        if self._items_left < 0:
            raise ArchiveLimitReached(
                f"the metadata list more than {self._most_items} inputs, timestamp keys and "
                "patterns."
            )
        return items


def _times(ranges: Sequence[TimeRange]) -> Times | None:
    """Return what all ranges span; None where there is none, or one is not in milliseconds or ends
    before it begins.
    """
    spans = [
        Times(int(one.begin), int(one.end))
        for one in ranges
        if one.encoding == EPOCH_MILLISECONDS and one.begin is not None and one.end is not None
    ]
    if not spans or len(spans) < len(ranges) or any(one.first_ms > one.last_ms for one in spans):
        return None
    return Times(min(one.first_ms for one in spans), max(one.last_ms for one in spans))


def _sections(files: Sequence[_FileEntry], header: Header, file_size: int) -> Iterator[Section]:
    """Yield the sections: each ends where the next begins, the last where the header says that the
    archive does.
    """
    if tuple(one.n for one in files if one.n in SECTIONS) != SECTIONS:
        raise MalformedArchive(f"the sections are not {', '.join(SECTIONS)}.")
    begins = [header.metadata_end + one.o for one in files]
    for one, begin, end in zip(files, begins, [*begins[1:], header.total_size], strict=True):
        if not header.metadata_end <= begin <= end:
            raise MalformedArchive(f"the section {one.n!r} begins at {begin} and ends at {end}.")
        if begin > file_size:
            raise MalformedArchive(
                f"the section {one.n!r} begins at byte {begin} of a file of {file_size}.",
                hint=_CUT_OFF,
            )
        yield Section(one.n, begin, end - begin)


def _decode(packet: Buffer, kind: type[Decoded], what: str) -> Decoded:
    try:
        return msgspec.msgpack.decode(packet, type=kind)
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
    ) as error:  # msgspec lets the second pass
        raise MalformedArchive(f"in the metadata, {what} is damaged: {error}.") from error


def _fields_of(raw: msgspec.Raw) -> Mapping[str, object]:
    try:
        return _PLAIN_FIELDS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        values = _decode(raw, dict[str, msgspec.Raw], "what the RangeIndex says of an input")
        plain = ((name, _scalar(value)) for name, value in values.items())
        return {name: value for name, value in plain if value is not ...}


def _array_length(packet: bytes) -> int:
    """Return the length that a msgpack array claims, 0 where the packet is none."""
    first = packet[:1]
    if b"\x90" <= first <= b"\x9f":
        return first[0] & 0x0F
    return int.from_bytes(packet[1 : {b"\xdc": 3, b"\xdd": 5}.get(first, 1)], "big")


def _scalar(raw: msgspec.Raw) -> object:
    """Return a text, number, boolean or None; ... where the value is something else."""
    view = memoryview(raw)
    before = 1 if view[0] & 0xE0 == 0xA0 else _MSGPACK_STRINGS.get(view[0])
    if before:
        return bytes(view[before:]).decode("utf-8", "surrogateescape")
    try:
        value = msgspec.msgpack.decode(raw, type=int | float | bool | None)
    except msgspec.DecodeError:  # no scalar
        return ...
    return value if not isinstance(value, float) or math.isfinite(value) else ...
