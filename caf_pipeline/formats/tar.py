"""Tar archives: where the bytes of each file stand, and the headers of archives that we write.

Read is every variant in use: v7, ustar, GNU (long names, base-256 numbers, sparse files), PAX
(local and global records). A member is told by its header; its body is not read. An archive that is
cut off, or has a header whose checksum is wrong, is refused, not read as far as it goes.

Python's `tarfile` takes 5 s to walk 100,000 members, and yields text where names are bytes.

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
RECORD_BYTES: Final = 20 * BLOCK_BYTES  # what tar programs fill the last one up to
MAX_USTAR_BYTES: Final = 8**11 - 1  # of a member whose size is eleven octal digits

_MAX_NAME_BYTES: Final = (
    1 << 20
)  # a long name or a set of PAX records: 256 times the longest path of Linux
_WINDOW_BYTES: Final = 64 * 1024  # read at once where members are small
_SMALL_BYTES: Final = 16 * 1024
_ZEROS: Final = bytes(BLOCK_BYTES)
_OCTAL: Final = re.compile(rb" *([0-7]*)(?:[ \0].*)?", re.DOTALL)
_FULL: Final = re.compile(rb"[0-7]+[ \0]")  # as nearly all write it
_RECORD: Final = re.compile(rb"([1-9][0-9]{0,7}) ")
_DIGITS: Final = re.compile(rb"[0-9]{1,18}")
_USTAR: Final = b"ustar\0"
_SPARSE: Final = b"GNU.sparse."
_KEYS: Final = frozenset((b"path", b"linkpath", b"size", b"GNU.sparse.name"))
"""The PAX records that are read: what else an archive has of them is not kept."""
_NO_TAR: Final = "It is damaged, or it is not a tar archive, or one that is compressed."

Read = Callable[[int, int], Buffer]
"""Returns exactly the bytes `[start, end)` of the archive, or raises.

Where it is asked for the headers alone, each start is behind the end before.
"""


class TarMember(NamedTuple):
    """A member of a tar archive.

    Attributes: name: as it stands in the archive, bytes. kind: the type letter of the header, `0`
        for a regular file of any variant, `S` for a sparse one of any variant. start_byte: where
        its body begins. size_bytes: of its body; 0 where the kind has none. link: the name that a
        hard link has in the archive, or what a symbolic link says.
    """

    name: bytes
    kind: str
    start_byte: int
    size_bytes: int
    link: bytes = b""


class FileRange(NamedTuple):
    """A file in a tar archive: its bytes are `[start_byte, start_byte + size_bytes)`."""

    name: bytes
    start_byte: int
    size_bytes: int


# --- walking
# ------------------------------------------------------------------------------------------


def walk(read: Read, size_bytes: int, *, ignore_zeros: bool = False) -> Iterator[TarMember]:
    """Yield the members of an archive of `size_bytes`, in its order, in bounded memory.

    The archive ends at two blocks of zeros, or at its end; with `ignore_zeros` no zeros end it, as
    where archives were concatenated.

    Raises:
        MalformedArchive: a wrong checksum, a number that is none, a body or header that is cut off.
    """
    take = _Window(read, size_bytes).take
    ahead = _WINDOW_BYTES
    position = zero_blocks = 0
    pending: dict[bytes, bytes] = {}  # what PAX headers before a member say of it
    long: dict[
        bytes, bytes
    ] = {}  # what GNU's headers say of it, by the PAX names; PAX counts, as GNU tar has it
    always: dict[bytes, bytes] = {}  # what they say of all members that follow
    while position < size_bytes:
        block = take(position, min(position + BLOCK_BYTES, size_bytes), ahead)
        if len(block) < BLOCK_BYTES and any(block):
            raise MalformedArchive(
                f"The tar archive is cut off: its last header has {len(block)} of {BLOCK_BYTES} "
                "bytes."
            )
        if not any(block) if len(block) < BLOCK_BYTES else block == _ZEROS:
            position += BLOCK_BYTES
            zero_blocks += 1
            if zero_blocks > 1 and not ignore_zeros:
                break
            continue
        zero_blocks = 0
        length = size_in(block, position)
        letter, start_byte = block[156:157], position + BLOCK_BYTES
        if letter in b"LKxXg":
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
        said = always | long | pending if always or long else pending
        pending, long = {}, {}
        name, kind, length, link = _described(block, letter, length, said, position)
        more = block[482] if letter == b"S" else 0
        while more:  # the map of a sparse file goes on in blocks before its body
            _require_whole(name, start_byte, BLOCK_BYTES, size_bytes)
            more = take(start_byte, start_byte + BLOCK_BYTES, ahead)[504]
            start_byte += BLOCK_BYTES
        _require_whole(name, start_byte, length, size_bytes)
        yield TarMember(name, kind, start_byte, length, link)
        ahead = _WINDOW_BYTES if length < _SMALL_BYTES else BLOCK_BYTES
        position = start_byte + _padded(length)
    if pending or long:
        raise MalformedArchive(
            "The tar archive is cut off: it ends with the name of a member that is missing."
        )


def _described(
    block: bytes, letter: bytes, length: int, said: Mapping[bytes, bytes], position: int
) -> tuple[bytes, str, int, bytes]:
    """Return a member's name, kind, size and link by its header and what headers before it said."""
    name, link = _name(block), block[157:257].partition(b"\0")[0]
    kind = "0" if letter in b"\x007" else letter.decode("latin-1")
    if said:
        name = said.get(b"GNU.sparse.name") or said.get(b"path") or name
        link = said.get(b"linkpath") or link
        length = _pax_size(said[b"size"], position) if said.get(b"size") else length
        if kind == "0" and (_SPARSE in said or b"GNU.sparse.name" in said):
            kind = "S"
    if letter == b"\0" and name.endswith(b"/"):
        kind = "5"  # v7 has no letter for a folder
    # A size of what has no body is of something that is not in the archive.
    return name, kind, 0 if kind in "123456" else length, link


def size_in(header: bytes, position: int) -> int:
    """Return the size that a header of one block says; raises MalformedArchive, with its
    `position`, where it is none.
    """
    _compare_checksum(header, position)
    return _number(header[124:136], "size", position)


def pax_size_in(headers: bytes) -> int | None:
    """Return the size that a PAX header says which stands right before the last block of these;
    None where there is none.
    """
    last = len(headers) - BLOCK_BYTES
    for at in range(last - 2 * BLOCK_BYTES, -1, -BLOCK_BYTES):
        if headers[at + 156] not in b"xX":
            continue
        with suppress(MalformedArchive):
            start, length = at + BLOCK_BYTES, size_in(headers[at : at + BLOCK_BYTES], at)
            if start + _padded(length) == last and (
                size := _pax(headers[start : start + length], at).get(b"size")
            ):
                return _pax_size(size, at)
    return None


class _Window:
    """Bytes of which each is read at most once, and from the archive's beginning to its end."""

    def __init__(self, read: Read, size_bytes: int) -> None:
        self._read, self._size_bytes = read, size_bytes
        self._bytes, self._start = b"", 0

    def take(self, start: int, end: int, ahead: int) -> bytes:
        """Return `[start, end)`; where something is read, at least `ahead` bytes as far as there
        are.
        """
        held = self._start + len(self._bytes)
        if end > held:
            behind = max(start, held)
            more = bytes(self._read(behind, min(max(end, behind + ahead), self._size_bytes)))
            self._bytes, self._start = (
                self._bytes[start - self._start :] + more if start < held else more,
                start,
            )
        return self._bytes[start - self._start : end - self._start]


def _compare_checksum(block: bytes, position: int) -> None:
    """Raise MalformedArchive where a header's checksum is wrong, with its bytes taken as unsigned
    or, as some did, as signed.
    """
    found = _sum_of(block)
    if block[148:156] == b"%06o\0 " % found:  # as nearly all write it
        return
    stored = _number(block[148:156], "checksum", position)
    if stored != found and stored != found - 256 * sum(
        byte > 127 for byte in block[:148] + block[156:]
    ):
        raise MalformedArchive(
            f"There is no header of a tar archive at byte {position}: it has the checksum "
            f"{stored}, and its bytes have {found}.",
            hint=_NO_TAR,
        )


def _sum_of(block: bytes) -> int:
    """Return the sum of a header's bytes, those of the checksum taken as spaces.

    Adler-32 holds the sum of up to 256 bytes, which is below its modulus, in a twentieth of the
    time of `sum`.
    """
    text = block[:148] + b"        " + block[156:]
    return (adler32(text[:256]) & 0xFFFF) + (adler32(text[256:]) & 0xFFFF) - 2


def _number(field: bytes, what: str, position: int) -> int:
    """Read octal digits, or GNU's base-256 number."""
    if _FULL.fullmatch(field):
        return int(field[:-1], 8)
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
        if field[0] & 0x40 or value >= 1 << 63:
            raise MalformedArchive(
                f"The header at byte {position} of the tar archive has a {what} that no file can "
                "have."
            )
        return value
    if not (match := _OCTAL.fullmatch(field)):
        raise MalformedArchive(
            f"The header at byte {position} of the tar archive has a {what} that is not a number.",
            hint=_NO_TAR,
        )
    return int(match[1] or b"0", 8)


def _name(block: bytes) -> bytes:
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == _USTAR and (prefix := block[345:500].partition(b"\0")[0]):
        return prefix + b"/" + name
    return name


def _pax(text: bytes, position: int) -> dict[bytes, bytes]:
    r"""Read records, each `LENGTH KEY=VALUE\n` where LENGTH counts all of it."""
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
                f"The PAX header at byte {position} of the tar archive has a record that is none."
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


def _padded(length: int) -> int:
    return -(-length // BLOCK_BYTES) * BLOCK_BYTES


def _require_whole(name: bytes, start_byte: int, length: int, size_bytes: int) -> None:
    if start_byte + length > size_bytes:
        raise MalformedArchive(
            f"The tar archive is cut off: {name.decode(errors='backslashreplace')!r} has {length} "
            "bytes "
            f"from byte {start_byte} on, and the archive {size_bytes} in all."
        )


# --- what is where
# ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TarFiles:
    """The files of an archive as they are after everything was extracted.

    Attributes: files: where each file's bytes stand, in the order of the archive; of members of one
        name the last one. A name stands
            twice where hard links give it the same bytes again.
        left_out: how many members are not files, by kind.
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
"""What has no range of bytes of its own, in words."""


_Place = tuple[int, int] | bytes | str
"""Start and size in bytes of a file, the name that a link waits for, or the kind of what has no
range.
"""


def files_of(members: Iterable[TarMember]) -> TarFiles:
    """Return the regular files among members, hard links resolved to the bytes of what they link
    to.

    A link means the file of its name that stands before it, else the one behind it. One to what is
    left out is left out, too.

    Raises:
        MalformedArchive: a hard link to a name that no file has.
    """
    found: list[tuple[bytes, _Place]] = []
    now: dict[bytes, _Place] = {}
    left_out: dict[str, int] = {}
    for member in members:
        place: _Place
        if member.kind == "0":
            place = (member.start_byte, member.size_bytes)
        elif member.kind == "1":
            place = now.get(member.link, member.link)
        else:
            place = KINDS.get(member.kind, "member of an unknown kind")
        if isinstance(place, str):
            left_out[place] = left_out.get(place, 0) + 1
            if place != "folder":
                now[member.name] = place  # it takes the place of a file
            continue
        now[member.name] = place
        found.append((member.name, place))
    files = []
    ends: dict[bytes, tuple[int, int] | str] = {}
    for name, place in found:
        end = place if isinstance(place, tuple) else _resolved(name, place, now, ends)
        last = now[name]
        if end != (last if isinstance(last, tuple) else _resolved(name, last, now, ends)):
            continue
        if isinstance(end, str):
            left_out[end] = left_out.get(end, 0) + 1
        else:
            files.append(FileRange(name, *end))
    return TarFiles(files, left_out)


def _resolved(
    name: bytes,
    place: _Place,
    now: Mapping[bytes, _Place],
    ends: dict[bytes, tuple[int, int] | str],
) -> tuple[int, int] | str:
    """Return what a place leads to; `ends` keeps it for each link on the way, so that a chain is
    walked once.
    """
    passed = []
    while isinstance(place, bytes):
        passed.append(place)
        following = ends.get(place) or now.get(place)
        if following is None or len(passed) > len(now):
            raise MalformedArchive(
                f"The tar archive has a hard link {name.decode(errors='backslashreplace')!r} to "
                f"{place.decode(errors='backslashreplace')!r}, and no file of that name."
            )
        place = following
    ends.update(dict.fromkeys(passed, place))
    return place


# --- writing
# ------------------------------------------------------------------------------------------


def header(name: bytes, size_bytes: int) -> bytes:
    """Return the header of a regular file: one block of ustar, or with PAX records before it what
    ustar cannot hold.

    Owner and time are 0, the mode is 644. ustar holds names of ASCII without NUL, of up to 100
    bytes, or of 256 where a `/` stands right, and sizes below 8 GiB. An empty name stays empty: an
    empty PAX record would mean that there is none.

    Raises:
        MemberRefused: a name of more than 1 MiB, which `walk` would refuse.
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
            f"A name of {len(name)} bytes is too long: of a tar archive's headers at most 1 MiB is "
            "read."
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
    """Return the zeros that end an archive of `size_bytes`, up to a whole record."""
    return bytes(2 * BLOCK_BYTES + -(size_bytes + 2 * BLOCK_BYTES) % RECORD_BYTES)


def _record(key: bytes, value: bytes) -> bytes:
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))  # a digit more where the length itself passes a power of ten
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
