"""The index of a CAF 1.0 file: its exact bytes and sizes, and a strict parser.

    {"format_version":"1.0","files":{"<key>":{"start_byte":<n>,"end_byte":<n>},…}}

The writer's bytes equal gocaf's: compact, keys in the order of their UTF-8 bytes, Go's escapes. The
parser accepts any JSON of the same meaning, and refuses what two readers could understand
differently.

Source: gocaf 4e5f21e; the tests' vectors show how gocaf and jackal-js-worker 5841af4 read it.
"""

import codecs
import json
import re
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from caf_pipeline.errors import ArchiveLimitReached, MalformedArchive, MemberRefused
from caf_pipeline.system.quantities import counted

FORMAT_VERSION: Final = "1.0"

_HEAD: Final = b'{"format_version":"1.0","files":{'
_TAIL: Final = b"}}"
_ENTRY: Final = b'"%b":{"start_byte":%d,"end_byte":%d}'

EMPTY_INDEX_SIZE_BYTES: Final = len(_HEAD + _TAIL)
FOOTER_SIZE_BYTES: Final = 4
"""The footer: the index's length, without itself, as unsigned 32-bit little-endian."""

_FOOTER: Final = struct.Struct("<I")
_ENTRY_PUNCTUATION_BYTES: Final = len(_ENTRY.replace(b"%b", b"").replace(b"%d", b""))
MAX_SLOW_INDEX_BYTES: Final = 32 << 20
"""Longest index for the standard library's parser, which takes up to 1.4 GiB for it."""

_PIECE_MEMBERS: Final = 8192  # about 0.5–1 MiB of index per piece

# As encoding/json of Go 1.22 and later, with HTML escapes. 0x7f, C1 controls and U+FEFF stay.
_SHORT_ESCAPES: Final = {
    b"\b": b"\\b",
    b"\f": b"\\f",
    b"\n": b"\\n",
    b"\r": b"\\r",
    b"\t": b"\\t",
    b'"': b'\\"',
    b"\\": b"\\\\",
}
_LONG_ESCAPES: Final = {bytes([code]): b"\\u%04x" % code for code in (*range(0x20), *b"<>&")}
_LINE_SEPARATORS: Final = {"\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}
_ESCAPES: Final = _LONG_ESCAPES | _LINE_SEPARATORS | _SHORT_ESCAPES
# In valid UTF-8, 0xe2 always begins a character, so the pattern matches whole characters.
_ESCAPED: Final = re.compile(rb'[\x00-\x1f"\\<>&]|\xe2\x80[\xa8\xa9]')
_ESCAPED_BYTES: Final = bytes(range(0x20)) + b'"\\<>&'


def encode_key(key: str | bytes) -> bytes:
    """Return the key's UTF-8 bytes. Raises MemberRefused, e.g. for a lone surrogate."""
    try:
        if isinstance(key, str):
            return key.encode()
        key.decode()
    except UnicodeError as error:
        raise MemberRefused(
            f"The key {key!r} is not valid UTF-8.",
            hint="Rename it: a CAF index only holds UTF-8 names.",
        ) from error
    return key


def escape_key(key: bytes) -> bytes:
    """Return a UTF-8 key as it appears inside a JSON string."""
    if len(key.translate(None, _ESCAPED_BYTES)) == len(key) and b"\xe2\x80" not in key:
        return key  # the usual case, five times as fast as the pattern
    return _ESCAPED.sub(lambda match: _ESCAPES[match[0]], key)


def index_entry_size_bytes(key: str | bytes, start_byte: int, end_byte: int) -> int:
    """Return the length of an index entry without the separating comma."""
    return (
        len(escape_key(encode_key(key))) + len(f"{start_byte}{end_byte}") + _ENTRY_PUNCTUATION_BYTES
    )


class Neighbours(NamedTuple):
    """Contiguous members, and the exact length of the index with them.

    Member n covers `bounds[n]` to `bounds[n + 1]`, exclusive.
    """

    keys: Mapping[bytes, None]
    bounds: Sequence[int]
    index_size_bytes: int


class IndexBuilder:
    """Collects the ranges of members and writes the index.

    Memory is about 100 bytes per member plus its key. Members in byte order need no sort.
    """

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}  # in the order of the ranges
        self._starts = array("Q")
        self._ends = array("Q")
        self._size_bytes = EMPTY_INDEX_SIZE_BYTES
        self._last_key = b""
        self._ascending = True

    @property
    def member_count(self) -> int:
        return len(self._keys)

    @property
    def index_size_bytes(self) -> int:
        return self._size_bytes

    def __contains__(self, key: str | bytes) -> bool:
        return encode_key(key) in self._keys

    def size_with(self, key: str | bytes, start_byte: int, end_byte: int) -> int:
        return (
            self._size_bytes + index_entry_size_bytes(key, start_byte, end_byte) + bool(self._keys)
        )

    def add(self, key: str | bytes, start_byte: int, end_byte: int) -> None:
        """Add a member. On MemberRefused nothing was added."""
        encoded = encode_key(key)
        if encoded in self._keys:
            raise MemberRefused(f"The key {encoded.decode()!r} is in the archive already.")
        if not 0 <= start_byte <= end_byte:
            raise MemberRefused(
                f"The member {encoded.decode()!r} cannot have the range {start_byte} to {end_byte}."
            )
        self._size_bytes += index_entry_size_bytes(encoded, start_byte, end_byte) + bool(self._keys)
        self._ascending = self._ascending and encoded >= self._last_key
        self._last_key = encoded
        self._keys[encoded] = None
        self._starts.append(start_byte)
        self._ends.append(end_byte)

    def with_neighbours(self, keys: Sequence[str], bounds: Sequence[int]) -> Neighbours | None:
        """Check contiguous members fast. Adds nothing. None if `add` refuses one."""
        try:
            encoded = dict.fromkeys(map(str.encode, keys))
        except UnicodeEncodeError:
            return None
        if len(encoded) < len(keys) or not self._keys.keys().isdisjoint(encoded):
            return None
        digits = [*map(len, map(str, bounds))]
        size_bytes = len(escape_key(b"".join(encoded))) + len(encoded) * (
            _ENTRY_PUNCTUATION_BYTES + 1
        )
        size_bytes += 2 * sum(digits) - digits[0] - digits[-1] - (not self._keys)
        return Neighbours(encoded, bounds, self._size_bytes + size_bytes)

    def add_neighbours(self, members: Neighbours) -> None:
        """Nothing may have been added since `with_neighbours`."""
        in_order = [self._last_key, *members.keys]
        self._ascending = self._ascending and in_order == sorted(in_order)
        self._last_key = in_order[-1]
        self._keys.update(members.keys)
        self._starts.extend(members.bounds[:-1])
        self._ends.extend(members.bounds[1:])
        self._size_bytes = members.index_size_bytes

    def iter_index(self) -> Iterator[bytes]:
        """Nothing may be added meanwhile."""
        keys = list(self._keys)
        order = (
            range(len(keys)) if self._ascending else sorted(range(len(keys)), key=keys.__getitem__)
        )
        yield _HEAD
        for first in range(0, len(keys), _PIECE_MEMBERS):
            numbers = order[first : first + _PIECE_MEMBERS]
            piece = [keys[n] for n in numbers]
            joined = b"".join(piece)
            escaped: Iterable[bytes] = (
                piece if escape_key(joined) is joined else map(escape_key, piece)
            )
            starts, ends = ([column[n] for n in numbers] for column in (self._starts, self._ends))
            yield (b"," if first else b"") + b",".join(
                map(_ENTRY.__mod__, zip(escaped, starts, ends, strict=True))
            )
        yield _TAIL

    def footer(self) -> bytes:
        """Raises ArchiveLimitReached."""
        if self._size_bytes >= 1 << 32:
            raise ArchiveLimitReached(
                f"An index of {self._size_bytes} bytes is too long for a CAF footer."
            )
        return _FOOTER.pack(self._size_bytes)


def parse_footer(footer: bytes) -> int:
    """Return the index's length from a CAF file's last four bytes."""
    return int(_FOOTER.unpack(footer)[0])


class ByteRange(msgspec.Struct, frozen=True, gc=False):
    """`[start_byte, end_byte)` of the file. A Struct: a million would otherwise need half a GB."""

    start_byte: int
    end_byte: int


class _Index(msgspec.Struct):
    format_version: str
    files: dict[str, ByteRange]


@dataclass(frozen=True, slots=True)
class DecodedIndex:
    """The ranges in the index's own order, and a warning for each kind of tolerated fault."""

    ranges: dict[str, ByteRange]
    warnings: tuple[str, ...]


def decode_index(
    index: bytes, data_size_bytes: int, *, name: str, lenient: bool = False
) -> DecodedIndex:
    """Parse an index strictly. Every range lies in `[0, data_size_bytes]`.

    `name` is for messages. `lenient` accepts any version, the last of equal keys, and U+FFFD for
    invalid UTF-8, each with a warning.

    Memory is at most seven times the index, four times for a million usual members. A parser that
    explains and tolerates faults takes up to 45 times an index of `MAX_SLOW_INDEX_BYTES` at most.

    Raises:
        MalformedArchive: the index breaks a rule. Ambiguous indexes are refused even if lenient.
    """
    warnings: list[str] = []
    ranges = _decode_fast(index, name, lenient, warnings.append)
    if ranges is None:
        ranges = _decode_any(index, name, lenient, warnings.append)
    for key, member in ranges.items():
        if not 0 <= member.start_byte <= member.end_byte <= data_size_bytes:
            raise MalformedArchive(
                f"{name}: the member {key!r} has the range {member.start_byte} to "
                f"{member.end_byte}, outside the {data_size_bytes} bytes of bodies."
            )
    return DecodedIndex(ranges, tuple(warnings))


_decoder: Final = msgspec.json.Decoder(_Index)
# \u005f, \u006x and \u007x: the only way to write a field name without its plain bytes.
_ESCAPED_LETTER: Final = re.compile(rb"\\u00[5-7]")
_BACKSLASH: Final = ord("\\")


def _in_any_spelling(field: bytes) -> re.Pattern[bytes]:
    letters = (rb"(?:%c|\\u00(?:%02x|%02X))" % (code, code, code) for code in field)
    return re.compile(b'"%b"' % b"".join(letters))


_FIELDS: Final = {
    field: _in_any_spelling(field.encode())
    for field in ("format_version", "files", "start_byte", "end_byte")
}


def _decode_fast(
    index: bytes, name: str, lenient: bool, warn: Callable[[str], None]
) -> dict[str, ByteRange] | None:
    """Parse an index fast and in little memory. None if there may be duplicate names.

    msgspec silently takes the last of equal names, and skips unknown fields. Every entry must have
    both its fields. If each name occurs as often as the result has it, none was dropped.
    """
    try:
        decoded = _decoder.decode(index)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _require_short(index, name, str(error))
        return None
    has_escapes = _ESCAPED_LETTER.search(index) is not None
    for field, pattern in _FIELDS.items():
        expected = len(decoded.files) if field.endswith("_byte") else 1
        expected += field in decoded.files
        # Behind a backslash, the quotation mark belongs to a longer key.
        if has_escapes:
            occurrences = sum(
                index[match.start() - 1] != _BACKSLASH for match in pattern.finditer(index)
            )
        else:
            name_bytes = b'"%b"' % field.encode()
            occurrences = index.count(name_bytes)
            if occurrences != expected:
                occurrences -= index.count(b"\\" + name_bytes)
        if occurrences != expected:
            _require_short(index, name, f"{field!r} occurs {occurrences} times")
            return None
    _check_version([decoded.format_version], name, lenient, warn)
    return decoded.files


def _require_short(index: bytes, name: str, fault: str) -> None:
    if len(index) > MAX_SLOW_INDEX_BYTES:
        raise MalformedArchive(
            f"{name}: the index of {len(index)} bytes cannot be read: {fault}.",
            hint=f"Faults are only tolerated up to {MAX_SLOW_INDEX_BYTES >> 20} MiB.",
        )


_MAX_DIGITS: Final = 4000  # Python's own limit is 4300
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class _Object(list[tuple[str, Any]]):
    """Pairs in order, duplicates included."""

    __slots__ = ()

    def only(self, name: str) -> object:
        """Raises ValueError if the value is missing or a duplicate."""
        values = [value for key, value in self if key == name]
        if len(values) != 1:
            raise ValueError(f"the field {name!r} {'occurs twice' if values else 'is missing'}")
        return values[0]


def _range_or_object(pairs: list[tuple[str, Any]]) -> ByteRange | _Object:
    if len(pairs) == 2:
        (first, start), (second, end) = pairs
        if (
            first == "start_byte"
            and second == "end_byte"
            and type(start) is int
            and type(end) is int
        ):
            return ByteRange(start, end)
    return _Object(pairs)


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    # Go replaces every byte of an invalid sequence by a U+FFFD; Python's own "replace" replaces
    # several bytes by one.
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("caf-each-byte", _replace_each_byte)


def _decode_any(
    index: bytes, name: str, lenient: bool, warn: Callable[[str], None]
) -> dict[str, ByteRange]:
    """Use the standard library, which keeps duplicates. Slow."""
    text = _decode_text(index, name, lenient, warn)

    def parse_int(digits: str) -> int:
        if len(digits) > _MAX_DIGITS:
            raise ValueError(f"a number has {len(digits)} digits")
        return int(digits)

    def refuse_constant(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        root = json.loads(
            text,
            object_pairs_hook=_range_or_object,
            parse_int=parse_int,
            parse_constant=refuse_constant,
        )
        if not isinstance(root, _Object):
            raise ValueError("it is not an object with 'format_version' and 'files'")
        versions = [value for key, value in root if key == "format_version"]
        _check_version(versions, name, lenient, warn)
        files = root.only("files")
        if not isinstance(files, _Object):
            raise ValueError("'files' is not an object of members")
    except RecursionError as error:
        raise MalformedArchive(f"{name}: the index is nested too deeply.") from error
    except ValueError as error:
        raise MalformedArchive(f"{name}: the index cannot be read: {error}.") from error
    return _collect(files, name, lenient, warn)


def _decode_text(index: bytes, name: str, lenient: bool, warn: Callable[[str], None]) -> str:
    try:
        return index.decode()
    except UnicodeDecodeError as error:
        if not lenient:
            raise MalformedArchive(
                f"{name}: the index is not valid UTF-8 at its byte {error.start}.",
                hint="--lenient reads it with U+FFFD instead.",
            ) from error
        warn(
            f"{name}: the index is not valid UTF-8 at its byte {error.start}; U+FFFD replaces "
            "each invalid byte."
        )
        return index.decode(errors="caf-each-byte")


def _check_version(
    versions: Sequence[object], name: str, lenient: bool, warn: Callable[[str], None]
) -> None:
    if versions == [FORMAT_VERSION]:
        return
    if len(versions) > 1 or not all(isinstance(version, str) for version in versions):
        raise ValueError("'format_version' is not one string")
    fault = f"has the format version {versions[0]!r}" if versions else "has no format version"
    if not lenient:
        raise MalformedArchive(
            f"{name}: the archive {fault}, but only {FORMAT_VERSION!r} is supported.",
            hint="--lenient reads it as 1.0.",
        )
    warn(f"{name}: the archive {fault}; it was read as {FORMAT_VERSION}.")


def _collect(
    files: _Object, name: str, lenient: bool, warn: Callable[[str], None]
) -> dict[str, ByteRange]:
    ranges: dict[str, ByteRange] = {}
    repeated, surrogates = 0, 0
    for raw_key, value in files:
        key = raw_key
        if not key.isascii() and _SURROGATE.search(key):
            if not lenient:
                raise MalformedArchive(
                    f"{name}: the key {key!r} has a lone surrogate.",
                    hint="--lenient reads it with U+FFFD instead.",
                )
            key = _SURROGATE.sub("\ufffd", key)
            surrogates += 1
        if key in ranges:
            if not lenient:
                raise MalformedArchive(
                    f"{name}: the key {key!r} occurs twice.", hint="--lenient takes the last."
                )
            repeated += 1
        ranges[key] = value if isinstance(value, ByteRange) else _range_of(value, key, name)
    if surrogates:
        warn(f"{name}: {counted(surrogates, 'key')} with lone surrogates; U+FFFD replaces each.")
    if repeated:
        warn(
            f"{name}: {counted(repeated, 'entry', 'entries')} with a key that occurs again later; "
            "the last entry of each key was taken."
        )
    return ranges


def _range_of(value: object, key: str, name: str) -> ByteRange:
    try:
        if not isinstance(value, _Object):
            raise ValueError("it is not an object")
        start_byte, end_byte = value.only("start_byte"), value.only("end_byte")
    except ValueError as error:
        raise MalformedArchive(f"{name}: the entry of {key!r} cannot be read: {error}.") from error
    if type(start_byte) is not int or type(end_byte) is not int:  # isinstance would accept a bool
        raise MalformedArchive(f"{name}: the range of {key!r} is not in whole numbers.")
    return ByteRange(start_byte, end_byte)
