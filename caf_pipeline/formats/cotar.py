"""cotar, version 2: an index that locates a file of a tar archive by name.

    0 … 8          header: "COT", the version (1 byte), the number of slots S (4)
    8 … 8+16·S     slots: hash of the name (8), first block of 512 bytes (4), size (4)
    … +8           the header again

Integers are little-endian. An empty slot is zero. A name is in the slot of its hash modulo S, or in
the next free slot, wrapping around. The index is a file (`.tar.index`), or follows its tar
(`.tar.co`). It has neither names nor checksums: check the tar header, too.

Source: github.com/linz/cotar at 365c6a5; vectors of @cotar 6.0.1 in the tests.
"""

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Self

from typing_extensions import Buffer

from caf_pipeline.errors import MalformedArchive
from caf_pipeline.formats.tar import BLOCK_BYTES, TarMember

VERSION: Final = 2
HEADER_BYTES: Final = 8
SLOT_BYTES: Final = 16

SUFFIX_BYTES: Final = 64 * 1024
"""Size of the first read: 4,095 slots, or a whole small archive."""

MAX_PASSED: Final = 256  # occupied slots before a free slot, in the original's library
_MAX_SEARCHED: Final = 1 << 20  # slots that a look-up reads: 16 MiB
_MAX_HELD_BYTES: Final = 1 << 30  # an index of 50 million files
HEADER: Final = struct.Struct("<3sBI")
_SLOT: Final = struct.Struct("<QII")
FNV_OFFSET: Final = 0xCBF29CE484222325  # FNV-1a of 64 bits: draft-eastlake-fnv, section 5
FNV_PRIME: Final = 0x100000001B3
_WORD: Final = (1 << 64) - 1

Read = Callable[[int, int], Buffer]
"""Returns exactly the bytes `[start, end)` of the file with the index, or raises."""


def hash_of(name: bytes) -> int:
    """Return the FNV-1a hash of 64 bits."""
    value = FNV_OFFSET
    for byte in name:
        value = (value ^ byte) * FNV_PRIME & _WORD
    return value


class Slot(NamedTuple):
    """The place of a file in the tar."""

    start_byte: int
    size_bytes: int


class CotarIndex:
    """An open index. A look-up takes at most one read, unless the table is unusually full."""

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
        self._headers_agree: bool | None = True  # None: the first header was not read yet
        self._has_last_header = True

    @classmethod
    def open_embedded(cls, read: Read, tail: bytes, size_bytes: int, *, name: str) -> Self:
        """Open the index at the end of a file; `tail` is its last `SUFFIX_BYTES`, or all of it.

        Raises MalformedArchive for another version or a wrong size.
        """
        if size_bytes < 2 * HEADER_BYTES + SLOT_BYTES:
            raise MalformedArchive(
                f"{name} has {size_bytes} bytes, fewer than any index.",
                hint=_NOT_EMBEDDED,
            )
        slot_count = _slot_count(tail[-HEADER_BYTES:], name, _NOT_EMBEDDED)
        first_byte = size_bytes - 2 * HEADER_BYTES - SLOT_BYTES * slot_count
        if first_byte < 0:
            raise MalformedArchive(
                f"{name} ends with the header of an index of {slot_count} slots, but is too short "
                "for it."
            )
        index = cls(read, tail, size_bytes, first_byte, slot_count, name=name)
        index._headers_agree = None
        if first_byte >= index._tail_start:
            index._compare_headers()
        return index

    @classmethod
    def open_separate(cls, read: Read, tail: bytes, size_bytes: int, *, name: str) -> Self:
        """Open an index in a file of its own; the last header may be damaged. Raises the same."""
        last = tail[-HEADER_BYTES:]
        # The header behind the slots saves a read, if it fits the size of the file.
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
                f"{name} is an index of {slot_count} slots, so that it should have "
                f"{without_last + HEADER_BYTES} bytes, but it has {size_bytes}.",
                hint=_DAMAGED,
            )
        index = cls(read, tail, size_bytes, 0, slot_count, name=name)
        index._has_last_header = size_bytes > without_last and last == head
        index._headers_agree = None if by_last else True
        return index

    def find(self, name: bytes) -> Slot | None:
        """Raises MalformedArchive if the place is damaged.

        Names that the original builder decoded as Latin-1 are found, too.
        """
        slot = self._find(hash_of(name))
        if slot is None and not name.isascii():
            slot = self._find(hash_of(name.decode("latin-1").encode()))
        if slot is None:
            self._compare_headers()
            if not self._headers_agree:
                raise MalformedArchive(
                    f"{self._name}: the index is damaged, so that missing names cannot be trusted.",
                    hint=_DAMAGED,
                )
        return slot

    def has_name_of(self, member: TarMember, name: bytes) -> bool:
        """Return whether the index's writer took `name` for the name of a member.

        The original builder takes the header's name field alone, and decodes it as Latin-1.
        """
        field = member.name_field
        return name == member.name or (
            name in (field, field.decode("latin-1").encode())
            and self._find(hash_of(member.name)) is None
        )

    def hold(self) -> None:
        """Read the whole index into memory; raises MalformedArchive above 1 GiB."""
        first_byte = self._first_slot - HEADER_BYTES
        if self.size_bytes > _MAX_HELD_BYTES:
            raise MalformedArchive(
                f"{self._name}: an index of {self.size_bytes} bytes is too large for memory."
            )
        if first_byte < self._tail_start:
            # The tail is read again: joining both parts would need twice the memory.
            self._tail = bytes(self._read(first_byte, self._tail_start + len(self._tail)))
            self._tail_start = first_byte

    def has_both_headers(self) -> bool:
        """Return whether headers surround the slots; raises if they differ."""
        self._compare_headers()
        return bool(self._headers_agree) and self._has_last_header

    def slots(self) -> Iterator[Slot]:
        slots_per_read = SUFFIX_BYTES // SLOT_BYTES
        for first in range(0, self.slot_count, slots_per_read):
            count = min(slots_per_read, self.slot_count - first)
            for value, block, size in self._slots(first, count):
                if value or block or size:
                    yield Slot(block * BLOCK_BYTES, size)

    def _find(self, value: int) -> Slot | None:
        if not value:
            return None  # the format cannot store this hash
        position, searched = value % self.slot_count, 0
        slots_per_read = MAX_PASSED + 1
        while searched < self.slot_count:
            count = min(slots_per_read, self.slot_count - position, self.slot_count - searched)
            for slot_hash, block, size in self._slots(position, count):
                if slot_hash == value:
                    return Slot(block * BLOCK_BYTES, size)
                if not slot_hash:
                    if block or size:
                        raise MalformedArchive(
                            f"{self._name}: the index is damaged at the place of this file.",
                            hint=_DAMAGED,
                        )
                    return None
            position, searched = (position + count) % self.slot_count, searched + count
            if searched > _MAX_SEARCHED:
                raise MalformedArchive(
                    f"{self._name}: the index has no free slot among {searched}.", hint=_DAMAGED
                )
            slots_per_read = SUFFIX_BYTES // SLOT_BYTES
        return None

    def _compare_headers(self) -> None:
        """A missing first header is no error: the tar has headers, too."""
        if self._headers_agree is None:
            head = bytes(self._bytes(self._first_slot - HEADER_BYTES, self._first_slot))
            self._headers_agree = head == HEADER.pack(b"COT", VERSION, self.slot_count)
            if head[:3] == b"COT" and not self._headers_agree:
                raise MalformedArchive(
                    f"{self._name}: the two headers of its index differ.", hint=_DAMAGED
                )

    def _slots(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        start = self._first_slot + SLOT_BYTES * first
        return _SLOT.iter_unpack(self._bytes(start, start + SLOT_BYTES * count))

    def _bytes(self, start: int, end: int) -> Buffer:
        if start >= self._tail_start:
            return memoryview(self._tail)[start - self._tail_start : end - self._tail_start]
        return self._read(start, end)


_DAMAGED: Final = "It is damaged: `caf cotar index` makes a new one."
_NOT_EMBEDDED: Final = (
    "`caf cotar index` makes an index of the tar; the option --index of `caf cotar` commands reads "
    "it from a file of its own."
)


def _slot_count(header: bytes, name: str, hint: str) -> int:
    if len(header) < HEADER_BYTES or header[:3] != b"COT":
        raise MalformedArchive(f"{name} has no cotar index at the expected place.", hint=hint)
    _, version, slot_count = HEADER.unpack(header)
    if version != VERSION:
        raise MalformedArchive(
            f"{name} has a cotar index of version {version}; only version {VERSION} is supported.",
            hint=_DAMAGED,
        )
    if not slot_count:
        raise MalformedArchive(f"{name} has a cotar index without slots.", hint=_DAMAGED)
    return int(slot_count)
