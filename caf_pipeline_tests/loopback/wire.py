"""Protobuf without a schema, independent of the code that clients write it with.

Source: protobuf.dev, "Encoding". Groups and packed fields do not occur here.
"""

from collections.abc import Iterator, Sequence
from typing import Final

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5

Value = int | bytes


class WireError(ValueError):
    """The bytes are not a protobuf message."""


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Yield number and value of each field in order. Raises WireError."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise WireError("invalid field number")
        if kind == VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise WireError(f"wire type {kind}")
        if at + size > len(data):
            raise WireError("unexpected EOF")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise WireError("unexpected EOF")
        if shift > 63:
            raise WireError("integer overflow")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & (1 << 64) - 1, at


class Fields:
    """A message's fields by number. The last value of a number counts."""

    def __init__(self, data: bytes) -> None:
        self._values: dict[int, list[Value]] = {}
        for number, value in fields(data):
            self._values.setdefault(number, []).append(value)

    def all_bytes(self, number: int) -> Sequence[bytes]:
        """Return every value of a repeated field."""
        values = self._values.get(number, [])
        if not all(isinstance(value, bytes) for value in values):
            raise WireError(f"field {number} has another wire type")
        return [value for value in values if isinstance(value, bytes)]

    def bytes(self, number: int) -> bytes:
        """Return the value, or b""."""
        values = self.all_bytes(number)
        return values[-1] if values else b""

    def text(self, number: int) -> str:
        """Return the value as text."""
        try:
            return self.bytes(number).decode()
        except UnicodeDecodeError as error:
            raise WireError(f"string field {number} contains invalid UTF-8") from error

    def unsigned(self, number: int) -> int:
        """Return the value as uint64."""
        value = self._values.get(number, [0])[-1]
        if not isinstance(value, int):
            raise WireError(f"field {number} has another wire type")
        return value

    def signed(self, number: int) -> int:
        """Return the value as int64."""
        value = self.unsigned(number)
        return value - (1 << 64) if value >> 63 else value


def varint(value: int) -> bytes:
    """Return an unsigned integer's bytes."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, value: Value) -> bytes:
    """Return a field's bytes. As in proto3, a default value gives none."""
    if not value:
        return b""
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value & (1 << 64) - 1)
    return varint(number << 3 | BYTES) + varint(len(value)) + value
