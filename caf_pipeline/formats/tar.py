"""Tar archives: locates the bytes of each file, and writes headers.

It reads headers of v7, ustar, GNU (long names, base-256 numbers, sparse files), and PAX. Archives
that are cut off or damaged are refused. Python's `tarfile` takes 5 s for 100,000 members.

Source: POSIX.1-2024, pax, "ustar Interchange Format" and "pax Extended Header"; GNU tar's manual,
"Basic Tar Format" and "Storing Sparse Files".
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple
from zlib import adler32

from typing_extensions import Buffer

from caf_pipeline.errors import MalformedArchive, MemberRefused

BLOCK_BYTES: Final = 512
RECORD_BYTES: Final = 20 * BLOCK_BYTES  # tar programs fill the last record
MAX_USTAR_BYTES: Final = 8**11 - 1  # of a member, in eleven octal digits

# Limit for a long name or a set of PAX records: 256 times the longest path of Linux.
_MAX_NAME_BYTES: Final = 1 << 20
_WINDOW_BYTES: Final = 64 * 1024  # size of a read if members are small
_SMALL_BYTES: Final = 16 * 1024
_UNLIMITED: Final = 1 << 63  # size of an archive whose end is not read
_ZEROS: Final = bytes(BLOCK_BYTES)
_OCTAL: Final = re.compile(rb" *([0-7]*)(?:[ \0].*)?", re.DOTALL)
_FULL: Final = re.compile(rb"[0-7]+[ \0]")  # the most frequent form
_RECORD: Final = re.compile(rb"([1-9][0-9]{0,7}) ")
_DIGITS: Final = re.compile(rb"[0-9]{1,18}")
_USTAR: Final = b"ustar\0"
_SPARSE: Final = b"GNU.sparse."
_KEYS: Final = frozenset((b"path", b"linkpath", b"size", b"GNU.sparse.name"))
_RECORD_LETTERS: Final = b"LKxXg"  # of headers that describe the next member
_NO_TAR: Final = "It is damaged, compressed, or no tar archive."

Read = Callable[[int, int], Buffer]
"""Returns exactly the bytes `[start, end)` of the archive, or raises.

If only headers are read, each start is behind the end before.
"""


class TarMember(NamedTuple):
    """A member of a tar archive.

    `kind` is the type letter: `0` for a regular file, `S` for a sparse file, of any variant.
    `name_field` is the first field of the header, which is part of a long name.
    """

    name: bytes
    kind: str
    start_byte: int
    size_bytes: int
    link: bytes
    name_field: bytes


class FileRange(NamedTuple):
    """A file in a tar archive."""

    name: bytes
    start_byte: int
    size_bytes: int


# --- walking


def walk(read: Read, size_bytes: int, *, ignore_zeros: bool = False) -> Iterator[TarMember]:
    """Yield the members in order, in bounded memory, up to two blocks of zeros.

    Raises MalformedArchive for a damaged or incomplete archive.
    """
    take = _Window(read, size_bytes).take
    ahead = _WINDOW_BYTES
    position = zero_blocks = 0
    pending: dict[bytes, bytes] = {}  # PAX records for the next member
    # GNU records for the next member, by PAX names. PAX overrides them, as in GNU tar.
    long: dict[bytes, bytes] = {}
    always: dict[bytes, bytes] = {}  # global PAX records
    while position < size_bytes:
        block = take(position, min(position + BLOCK_BYTES, size_bytes), ahead)
        if len(block) < BLOCK_BYTES and any(block):
            raise MalformedArchive(
                f"The tar archive is cut off: its last header has {len(block)} of {BLOCK_BYTES} "
                "bytes.",
                hint=_NO_TAR,
            )
        if not any(block) if len(block) < BLOCK_BYTES else block == _ZEROS:
            position += BLOCK_BYTES
            zero_blocks += 1
            if zero_blocks > 1 and not ignore_zeros:
                break
            continue
        zero_blocks = 0
        length = _size_in(block, position)
        letter, start_byte = block[156:157], position + BLOCK_BYTES
        if letter in _RECORD_LETTERS:
            if length > _MAX_NAME_BYTES:
                raise MalformedArchive(
                    f"The tar archive has names of {length} bytes at byte {start_byte}; at most 1 "
                    "MiB is read."
                )
            _require_whole(b"the name of a member", start_byte, length, size_bytes)
            text = take(start_byte, start_byte + length, ahead)
            if letter in b"LK":
                long[b"path" if letter == b"L" else b"linkpath"] = text.partition(b"\0")[0]
            else:
                (always if letter == b"g" else pending).update(_pax(text, position))
            position = start_byte + _padded(length)
            continue
        records = always | long | pending if always or long else pending
        pending, long = {}, {}
        name, kind, length, link = _described(block, letter, length, records, position)
        continues = block[482] if letter == b"S" else 0
        while continues:  # the map of a sparse file continues in blocks before its body
            _require_whole(name, start_byte, BLOCK_BYTES, size_bytes)
            continues = any(take(start_byte, start_byte + BLOCK_BYTES, ahead)[504:505])
            start_byte += BLOCK_BYTES
        _require_whole(name, start_byte, length, size_bytes)
        yield TarMember(name, kind, start_byte, length, link, _text_in(block[:100]))
        ahead = _WINDOW_BYTES if length < _SMALL_BYTES else BLOCK_BYTES
        position = start_byte + _padded(length)
    if pending or long:
        raise MalformedArchive(
            "The tar archive is cut off: it ends with the name of a missing member."
        )


def _described(
    block: bytes, letter: bytes, length: int, records: Mapping[bytes, bytes], position: int
) -> tuple[bytes, str, int, bytes]:
    name, link = _text_in(block[:100]), _text_in(block[157:257])
    if block[257:263] == _USTAR and (prefix := _text_in(block[345:500])):
        name = prefix + b"/" + name
    kind = "0" if letter in b"\x007" else letter.decode("latin-1")
    if records:
        name = records.get(b"GNU.sparse.name") or records.get(b"path") or name
        link = records.get(b"linkpath") or link
        length = _pax_size(records[b"size"], position) if records.get(b"size") else length
        if kind == "0" and (_SPARSE in records or b"GNU.sparse.name" in records):
            kind = "S"
    if letter == b"\0" and name.endswith(b"/"):
        kind = "5"  # v7 has no letter for folders
    # The size of a member without a body concerns something outside of the archive.
    return name, kind, 0 if kind in "123456" else length, link


def _size_in(header: bytes, position: int) -> int:
    """Return the size in a header block; raises MalformedArchive."""
    total = _sum_of(header)
    if header[148:156] != b"%06o\0 " % total:  # the most frequent form
        stored = _number(header[148:156], "checksum", position)
        # Some programs summed the bytes as signed numbers.
        high_bytes = sum(byte > 127 for byte in header[:148] + header[156:])
        if stored not in (total, total - 256 * high_bytes):
            raise MalformedArchive(
                f"There is no header of a tar archive at byte {position}: its checksum is "
                f"{stored}, but its bytes have {total}.",
                hint=_NO_TAR,
            )
    return _number(header[124:136], "size", position)


def member_behind(blocks: bytes) -> TarMember | None:
    """Return the member whose body begins behind `blocks`, by its header and the records before.

    None if the last block is no header. Records that begin before `blocks` are not seen.
    """
    first = len(blocks) - BLOCK_BYTES
    while (record := _record_before(blocks, first)) is not None:
        first = record
    with suppress(MalformedArchive):
        for member in walk(lambda start, end: blocks[first + start : first + end], _UNLIMITED):
            return member._replace(start_byte=first + member.start_byte)
    return None


def _record_before(blocks: bytes, end: int) -> int | None:
    for at in range(end - BLOCK_BYTES, -1, -BLOCK_BYTES):
        if blocks[at + 156] in _RECORD_LETTERS:
            with suppress(MalformedArchive):
                if at + BLOCK_BYTES + _padded(_size_in(blocks[at : at + BLOCK_BYTES], at)) == end:
                    return at
    return None


class _Window:
    def __init__(self, read: Read, size_bytes: int) -> None:
        self._read, self._size_bytes = read, size_bytes
        self._bytes, self._start = b"", 0

    def take(self, start: int, end: int, ahead: int) -> bytes:
        """A read takes at least `ahead` bytes, if there are as many."""
        read_end = self._start + len(self._bytes)
        if end > read_end:
            begin = max(start, read_end)
            more = bytes(self._read(begin, min(max(end, begin + ahead), self._size_bytes)))
            self._bytes = self._bytes[start - self._start :] + more if start < read_end else more
            self._start = start
        return self._bytes[start - self._start : end - self._start]


def _sum_of(block: bytes) -> int:
    """Adler-32 of up to 256 bytes contains their sum, in a twentieth of the time of `sum`."""
    text = block[:148] + b"        " + block[156:]
    return (adler32(text[:256]) & 0xFFFF) + (adler32(text[256:]) & 0xFFFF) - 2


def _number(field: bytes, what: str, position: int) -> int:
    if _FULL.fullmatch(field):
        return int(field[:-1], 8)
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
        if field[0] & 0x40 or value >= 1 << 63:
            raise MalformedArchive(
                f"The header at byte {position} of the tar archive has an impossible {what}."
            )
        return value
    if not (match := _OCTAL.fullmatch(field)):
        raise MalformedArchive(
            f"The header at byte {position} of the tar archive has a {what} that is not a number.",
            hint=_NO_TAR,
        )
    return int(match[1] or b"0", 8)


def _pax(text: bytes, position: int) -> dict[bytes, bytes]:
    records, start = {}, 0
    while start < len(text):
        match = _RECORD.match(text, start)
        end = start + int(match[1]) if match else 0
        if (
            not match
            or end > len(text)
            or text[end - 1 : end] != b"\n"
            or b"=" not in text[match.end() : end]
        ):
            raise MalformedArchive(
                f"The PAX header at byte {position} of the tar archive has an invalid record."
            )
        key, _, value = text[match.end() : end - 1].partition(b"=")
        if key in _KEYS:
            records[key] = value
        elif key.startswith(_SPARSE):
            records[_SPARSE] = b""
        start = end
    return records


def _pax_size(text: bytes, position: int) -> int:
    if not _DIGITS.fullmatch(text):
        raise MalformedArchive(
            f"The PAX header before byte {position} of the tar archive has a size that is not a "
            "number."
        )
    return int(text)


def _text_in(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _padded(length: int) -> int:
    return -(-length // BLOCK_BYTES) * BLOCK_BYTES


def _require_whole(name: bytes, start_byte: int, length: int, size_bytes: int) -> None:
    if start_byte + length > size_bytes:
        raise MalformedArchive(
            f"The tar archive is cut off: {name.decode(errors='backslashreplace')!r} has {length} "
            f"bytes from byte {start_byte} on, but the archive only {size_bytes} in total."
        )


# --- files


@dataclass(frozen=True, slots=True)
class TarFiles:
    """The last file of each name, and counts of other members.

    A name occurs twice if hard links give it the same bytes again.
    """

    files: list[FileRange]
    left_out: dict[str, int]


KINDS: Final = {
    "2": "symbolic link",
    "3": "device",
    "4": "device",
    "5": "folder",
    "6": "pipe",
    "S": "sparse file",
}


_Target = tuple[int, int] | bytes | str
"""Start and size of a file, the target of a hard link, or the kind of a member without bytes."""


def files_of(members: Iterable[TarMember]) -> TarFiles:
    """Return the regular files among members, with hard links resolved.

    A link refers to the last file of its name before it, or else behind it. Raises MalformedArchive
    without one.
    """
    entries: list[tuple[bytes, _Target]] = []
    latest: dict[bytes, _Target] = {}
    left_out: dict[str, int] = {}
    for member in members:
        target: _Target
        if member.kind == "0":
            target = (member.start_byte, member.size_bytes)
        elif member.kind == "1":
            target = latest.get(member.link, member.link)
        else:
            target = KINDS.get(member.kind, "member of an unknown kind")
        if isinstance(target, str):
            left_out[target] = left_out.get(target, 0) + 1
            if target != "folder":
                latest[member.name] = target  # it replaces a file
            continue
        latest[member.name] = target
        entries.append((member.name, target))
    files = []
    ends: dict[bytes, tuple[int, int] | str] = {}
    for name, target in entries:
        end = target if isinstance(target, tuple) else _resolve(name, target, latest, ends)
        last = latest[name]
        if end != (last if isinstance(last, tuple) else _resolve(name, last, latest, ends)):
            continue
        if isinstance(end, str):
            left_out[end] = left_out.get(end, 0) + 1
        else:
            files.append(FileRange(name, *end))
    return TarFiles(files, left_out)


def _resolve(
    name: bytes,
    target: _Target,
    latest: Mapping[bytes, _Target],
    ends: dict[bytes, tuple[int, int] | str],
) -> tuple[int, int] | str:
    """The cache `ends` avoids walking a chain of links twice."""
    links = []
    while isinstance(target, bytes):
        links.append(target)
        following = ends.get(target) or latest.get(target)
        if following is None or len(links) > len(latest):
            raise MalformedArchive(
                f"The tar archive has a hard link {name.decode(errors='backslashreplace')!r} to "
                f"{target.decode(errors='backslashreplace')!r}, which does not exist."
            )
        target = following
    ends.update(dict.fromkeys(links, target))
    return target


# --- writing


def header(name: bytes, size_bytes: int) -> bytes:
    """Return the header of a regular file: a ustar block, with PAX records if it needs them.

    Owner and time are 0, the mode is 644. Raises MemberRefused if the name exceeds 1 MiB, the limit
    of `walk`.
    """
    prefix, short = b"", name
    if len(name) > 100:
        cut = name.rfind(b"/", 0, 156)
        prefix, short = (name[:cut], name[cut + 1 :]) if cut > 0 else (b"", name)
    records = b""
    if name and (not name.isascii() or b"\0" in name or not 0 < len(short) <= 100):
        prefix, short, records = b"", b"././@PaxHeader", _record(b"path", name)
    if size_bytes > MAX_USTAR_BYTES:
        records += _record(b"size", b"%d" % size_bytes)
    if len(records) > _MAX_NAME_BYTES:
        raise MemberRefused(
            f"A name of {len(name)} bytes is too long: headers of a tar archive are limited to 1 "
            "MiB."
        )
    before = b""
    if records:
        before = (
            _ustar(b"././@PaxHeader", b"", len(records), b"x") + records + padding(len(records))
        )
    return before + _ustar(short, prefix, min(size_bytes, MAX_USTAR_BYTES), b"0")


def padding(size_bytes: int) -> bytes:
    """Return the zeros behind a body."""
    return bytes(-size_bytes % BLOCK_BYTES)


def end_of(size_bytes: int) -> bytes:
    """Return the zeros that complete an archive of `size_bytes`."""
    return bytes(2 * BLOCK_BYTES + -(size_bytes + 2 * BLOCK_BYTES) % RECORD_BYTES)


def _record(key: bytes, value: bytes) -> bytes:
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))  # one digit more if the length passes a power of ten
    return b"%d %s=%s\n" % (length, key, value)


def _ustar(name: bytes, prefix: bytes, size_bytes: int, letter: bytes) -> bytes:
    owner = b"0000000\0"
    size, prefix = b"%011o\0" % size_bytes, prefix.ljust(155, b"\0")
    fields = (
        name.ljust(100, b"\0"),
        b"0000644\0",
        owner,
        owner,
        size,
        b"00000000000\0",
        bytes(8),
        letter,
        bytes(100),
    )
    block = b"".join((*fields, b"ustar\x0000", bytes(64), owner, owner, prefix, bytes(12)))
    return block[:148] + b"%06o\0 " % _sum_of(block) + block[156:]
