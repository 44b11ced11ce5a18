"""The location of an object's bytes in a chunk."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class LocationRow:
    """The location of an object, or of a part: `[start_byte, end_byte)` in CAF coordinates.

    For an object in parts, the range is the object's own bytes, from 0, and the SHA-256 is empty:
    each part has one (`Location.parts`).
    """

    key: str
    object_version: str
    version_id: str | None
    start_byte: int
    end_byte: int
    etag: str
    last_modified: datetime
    sha256: bytes
    header_set: bytes | None = None
