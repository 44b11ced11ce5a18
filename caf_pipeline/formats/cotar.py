"""cotar, version 2: an index of a tar archive, with which a file is read by its name without
reading the tar.

    0 … 8          header: "COT", the version (a byte), the number of slots S 8 … 8+16·S     slots:
    hash of the name (8 bytes), block of 512 bytes at which its bytes begin (4), its size (4) … +8
    the header again

Integers are little-endian. A slot whose 16 bytes are zero is empty. A name's slot is the one of its
hash modulo S, or the next free one behind it, around the end. The index stands in a file of its own
(`.tar.index`), or behind its tar (`.tar.co`).

Neither names nor checksums stand in it. So whoever reads a file by it looks at the tar's own header
before the file, too.

Source: github.com/linz/cotar at 365c6a5; vectors of @cotar/core and @cotar/builder 6.0.1 in the
tests.
"""

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Self

from typing_extensions import Buffer

from caf_pipeline.errors import MalformedArchive
from caf_pipeline.formats.tar import BLOCK_BYTES

VERSION: Final = 2
HEADER_BYTES: Final = 8
SLOT_BYTES: Final = 16

SUFFIX_BYTES: Final = 64 * 1024
"""The first read of an index: holds 4,095 slots, and a small archive whole."""

MAX_PASSED: Final = 256  # occupied slots before a free one, of the original's library
_MAX_SEARCHED: Final = (
    1 << 20
)  # slots that a look-up reads: 16 MiB. A table of more that has no free slot is nobody's
_MAX_HELD_BYTES: Final = 1 << 30  # an index of 50 million files
HEADER: Final = struct.Struct("<3sBI")
_SLOT: Final = struct.Struct("<QII")
FNV_OFFSET: Final = 0xCBF29CE484222325  # FNV-1a of 64 bits: draft-eastlake-fnv, section 5
FNV_PRIME: Final = 0x100000001B3
_WORD: Final = (1 << 64) - 1

Read = Callable[[int, int], Buffer]
"""Returns exactly the bytes `[start, end)` of the file that the index is in, or raises."""


def hash_of(name: bytes) -> int:
    """Return FNV-1a, 64 bits."""
    value = FNV_OFFSET
    for byte in name:
        value = (value ^ byte) * FNV_PRIME & _WORD
    return value


class Slot(NamedTuple):
    """Where an index says that a file's bytes are: `[start_byte, start_byte + size_bytes)` of the
    tar.
    """

    start_byte: int
    size_bytes: int


class CotarIndex:
    """An opened index; a look-up is one read at most, unless the table is fuller than any writer
    makes it.

    Attributes:
        slot_count: as its header says.
        size_bytes: of the index, both headers included.
    """

    def __init__(
        self,
        read: Read,
        tail: bytes,
        size_bytes: int,
        first_byte: int,
        slot_count: int,
        *,
        name: str,
    ) -> None:
        self._read = read
        self._tail, self._tail_start = tail, size_bytes - len(tail)
        self._first_slot = first_byte + HEADER_BYTES
        self._name = name
        self.slot_count = slot_count
        self.size_bytes = 2 * HEADER_BYTES + SLOT_BYTES * slot_count
        self._headers_agree: bool | None = True  # None: the first one is not read yet
        self._has_last_header = True

    @classmethod
    def open_embedded(cls, read: Read, tail: bytes, size_bytes: int, *, name: str) -> Self:
        """Open the index at the end of a file of `size_bytes`, of which `tail` are the last bytes,
        `SUFFIX_BYTES` or all.

        Raises:
            MalformedArchive: there is none, of version 2, or it is not as long as it says.
        """
        if size_bytes < 2 * HEADER_BYTES + SLOT_BYTES:
            raise MalformedArchive(
                f"{name} has {size_bytes} bytes, which is less than an index has.",
                hint=_NOT_EMBEDDED,
            )
        slot_count = _slot_count(tail[-HEADER_BYTES:], name, _NOT_EMBEDDED)
        first_byte = size_bytes - 2 * HEADER_BYTES - SLOT_BYTES * slot_count
        if first_byte < 0:
            raise MalformedArchive(
                f"{name} ends with the header of an index of {slot_count} slots, for which it is "
                "too short."
            )
        index = cls(read, tail, size_bytes, first_byte, slot_count, name=name)
        index._headers_agree = None
        if first_byte >= index._tail_start:
            index._compare_headers()
        return index

    @classmethod
    def open_separate(cls, read: Read, tail: bytes, size_bytes: int, *, name: str) -> Self:
        """Open an index that is a file of its own; its last header may be damaged or missing.

        Raises:
            MalformedArchive: it is none, of version 2, or it is not as long as it says.
        """
        last = tail[-HEADER_BYTES:]
        # The header behind the slots saves a read, where it is one of an index of this size.
        slots = (size_bytes - 2 * HEADER_BYTES) // SLOT_BYTES
        by_last = (
            len(tail) < size_bytes
            and len(last) == HEADER_BYTES
            and HEADER.unpack(last) == (b"COT", VERSION, slots)
        )
        head = (
            last
            if by_last
            else tail[:HEADER_BYTES]
            if len(tail) == size_bytes
            else bytes(read(0, HEADER_BYTES))
        )
        slot_count = _slot_count(
            head,
            name,
            "Give the .tar.index that belongs to the tar, or a .tar.co without an index.",
        )
        without_last = HEADER_BYTES + SLOT_BYTES * slot_count
        if size_bytes not in (without_last, without_last + HEADER_BYTES):
            raise MalformedArchive(
                f"{name} is the index of {slot_count} slots, {without_last + HEADER_BYTES} bytes, "
                f"and has {size_bytes}.",
                hint=_DAMAGED,
            )
        index = cls(read, tail, size_bytes, 0, slot_count, name=name)
        index._has_last_header = size_bytes > without_last and last == head
        index._headers_agree = None if by_last else True
        return index

    def find(self, name: bytes) -> Slot | None:
        """Return where a file's bytes are; None where the index has no such name.

        The original builder takes the bytes of a name for Latin-1, and hashes that in UTF-8: such a
        name is found, too.

        Raises:
            MalformedArchive: the index is damaged where the name belongs.
        """
        found = self._find(hash_of(name))
        if found is None and not name.isascii():
            found = self._find(hash_of(name.decode("latin-1").encode()))
        if found is None:
            self._compare_headers()
            if not self._headers_agree:
                raise MalformedArchive(
                    f"{self._name}: the index is damaged, so that it cannot tell what is not "
                    "there.",
                    hint=_DAMAGED,
                )
        return found

    def hold(self) -> None:
        """Read what of the index is not in memory yet, by one read, so that look-ups need none.

        Raises:
            MalformedArchive: that is more than 1 GiB.
        """
        first_byte = self._first_slot - HEADER_BYTES
        if self.size_bytes > _MAX_HELD_BYTES:
            raise MalformedArchive(
                f"{self._name}: an index of {self.size_bytes} bytes is not read whole."
            )
        if first_byte < self._tail_start:
            # Its end is read again: to join both would take the memory twice.
            self._tail = bytes(self._read(first_byte, self._tail_start + len(self._tail)))
            self._tail_start = first_byte

    def has_both_headers(self) -> bool:
        """Say whether the same header stands before the slots and behind them; the index may be
        read where it does not.

        Raises:
            MalformedArchive: two headers stand there, and do not agree.
        """
        self._compare_headers()
        return bool(self._headers_agree) and self._has_last_header

    def slots(self) -> Iterator[Slot]:
        """Yield what is in the table, in its order, by reads of `SUFFIX_BYTES`; also of a slot that
        has all but its hash.
        """
        at_once = SUFFIX_BYTES // SLOT_BYTES
        for first in range(0, self.slot_count, at_once):
            for value, block, size in self._slots(first, min(at_once, self.slot_count - first)):
                if value or block or size:
                    yield Slot(block * BLOCK_BYTES, size)

    def _find(self, value: int) -> Slot | None:
        if not value:
            return None  # the format cannot hold it
        position, searched = value % self.slot_count, 0
        at_once = MAX_PASSED + 1
        while searched < self.slot_count:
            count = min(at_once, self.slot_count - position, self.slot_count - searched)
            for held, block, size in self._slots(position, count):
                if held == value:
                    return Slot(block * BLOCK_BYTES, size)
                if not held:
                    if block or size:
                        raise MalformedArchive(
                            f"{self._name}: the index is damaged where this file belongs.",
                            hint=_DAMAGED,
                        )
                    return None
            position, searched = (position + count) % self.slot_count, searched + count
            if searched > _MAX_SEARCHED:
                raise MalformedArchive(
                    f"{self._name}: the index has no free slot among {searched}.", hint=_DAMAGED
                )
            at_once = SUFFIX_BYTES // SLOT_BYTES
        return None

    def _compare_headers(self) -> None:
        """Look at the header before the slots, where that was not done yet.

        The original never does. One that is no header at all leaves what is found good: the tar
        itself is compared.
        """
        if self._headers_agree is None:
            head = bytes(self._bytes(self._first_slot - HEADER_BYTES, self._first_slot))
            self._headers_agree = head == HEADER.pack(b"COT", VERSION, self.slot_count)
            if head[:3] == b"COT" and not self._headers_agree:
                raise MalformedArchive(
                    f"{self._name}: the two headers of its index do not agree.", hint=_DAMAGED
                )

    def _slots(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        start = self._first_slot + SLOT_BYTES * first
        return _SLOT.iter_unpack(self._bytes(start, start + SLOT_BYTES * count))

    def _bytes(self, start: int, end: int) -> Buffer:
        if start >= self._tail_start:
            return memoryview(self._tail)[start - self._tail_start : end - self._tail_start]
        return self._read(start, end)


_DAMAGED: Final = "It is damaged: make it again with `caf cotar index`."
_NOT_EMBEDDED: Final = (
    "`caf cotar index` makes one of the tar; `caf cotar` commands take one in "
    "a "
    "file of its own by --index."
)


def _slot_count(header: bytes, name: str, hint: str) -> int:
    if len(header) < HEADER_BYTES or header[:3] != b"COT":
        raise MalformedArchive(f"{name} has no cotar index where one would be.", hint=hint)
    _, version, slot_count = HEADER.unpack(header)
    if version != VERSION:
        raise MalformedArchive(
            f"{name} has a cotar index of version {version}; version {VERSION} is read.",
            hint=_DAMAGED,
        )
    if not slot_count:
        raise MalformedArchive(f"{name} has a cotar index without a slot.", hint=_DAMAGED)
    return int(slot_count)
