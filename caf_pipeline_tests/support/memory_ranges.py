"""A range source in memory that counts its reads, and handmade CAF files."""

import json
import struct


class MemoryRanges:
    """Counts reads. Refuses ranges outside of the file, as a strict server does."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.reads = 0

    def read(self, start_byte: int, end_byte: int) -> bytes:
        assert 0 <= start_byte < end_byte <= len(self.content)
        self.reads += 1
        return self.content[start_byte:end_byte]

    def read_suffix(self, size_bytes: int) -> tuple[bytes, int]:
        self.reads += 1
        return self.content[max(0, len(self.content) - size_bytes) :], len(self.content)


def caf_bytes(bodies: bytes, index: bytes | dict, footer: int | None = None) -> bytes:
    """Return bodies, index and footer. A dict becomes JSON; the default footer is correct."""
    raw = index if isinstance(index, bytes) else json.dumps(index).encode()
    return bodies + raw + struct.pack("<I", len(raw) if footer is None else footer)


def index_of(*members: tuple[str, object, object]) -> dict:
    """Return an index as a dict."""
    return {
        "format_version": "1.0",
        "files": {key: {"start_byte": s, "end_byte": e} for key, s, e in members},
    }
