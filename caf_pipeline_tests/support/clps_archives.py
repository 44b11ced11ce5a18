"""Builds clp-s archives from packets of metadata, valid and invalid."""

import struct

import msgspec
import pyarrow as pa

from caf_pipeline.formats.clps import HEADER_BYTES, SECTIONS


def archive_info(**fields) -> tuple[int, bytes]:
    return 0, msgspec.msgpack.encode(fields or {"num_segments": 1})


def files(entries=None, **others) -> tuple[int, bytes]:
    default = [{"n": name, "o": number} for number, name in enumerate(SECTIONS)]
    return 1, msgspec.msgpack.encode({"files": default if entries is None else entries, **others})


def times(*ranges: tuple[bytes, list[int], int, bytes], patterns=()) -> tuple[int, bytes]:
    packet = struct.pack("<Q", len(ranges))
    for key, columns, encoding, values in ranges:
        packet += (
            struct.pack(
                f"<Q{len(key)}sQ{len(columns)}iQ", len(key), key, len(columns), *columns, encoding
            )
            + values
        )
    packet += struct.pack("<Q", len(patterns))
    return 2, packet + b"".join(
        struct.pack(f"<QQ{len(text)}s", number, len(text), text) for number, text in patterns
    )


def range_index(*entries) -> tuple[int, bytes]:
    return 3, msgspec.msgpack.encode(list(entries))


def built(
    *packets: tuple[int, bytes], count: int | None = None, trailing: bytes = b"", **header
) -> bytes:
    """Return an archive with these packets and sections of zeros."""
    plain = bytes([len(packets) if count is None else count])
    plain += (
        b"".join(struct.pack("<BI", kind, len(payload)) + payload for kind, payload in packets)
        + trailing
    )
    return wrapped(frame(plain), **header)


def wrapped(
    metadata: bytes,
    *,
    sections: int = 100,
    total: int | None = None,
    metadata_size: int | None = None,
    kind=0,
) -> bytes:
    size = len(metadata) if metadata_size is None else metadata_size
    total = HEADER_BYTES + len(metadata) + sections if total is None else total
    head = struct.pack("<4sHBBQQ32xIH2x", b"\xfd\x2f\xc5\x30", 0, 5, 0, 12345, total, size, kind)
    return head + metadata + bytes(sections)


def frame(plain: bytes) -> bytes:
    return pa.compress(plain, codec="zstd", asbytes=True)


WHOLE = (archive_info(), files(), times(), range_index({"e": 2, "f": {"_filename": "a"}, "s": 0}))
