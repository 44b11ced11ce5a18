"""Headers and user metadata of objects; equal sets share a record, named by a hash."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

HEADERS: Final = (
    "content_type",
    "content_encoding",
    "content_language",
    "content_disposition",
    "cache_control",
    "expires",
)

ID_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class ObjectHeaders:
    """A missing header is an empty string."""

    content_type: str = ""
    content_encoding: str = ""
    content_language: str = ""
    content_disposition: str = ""
    cache_control: str = ""
    expires: str = ""
    user_metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> bytes:
        """The first `ID_BYTES` of the SHA-256 of all values, each followed by a NUL.

        `HEADERS` come first, then user metadata's names and values, sorted by name. No value has a
        NUL.
        """
        values = [getattr(self, name) for name in HEADERS]
        values += [text for pair in sorted(self.user_metadata.items()) for text in pair]
        content = "".join(f"{value}\0" for value in values).encode()
        return hashlib.sha256(content).digest()[:ID_BYTES]


def headers_of(row: Mapping[str, Any]) -> ObjectHeaders:
    """Return the headers in a row with `HEADERS` and `user_metadata`."""
    metadata = {name: value or "" for name, value in row["user_metadata"] or ()}
    return ObjectHeaders(**{name: row[name] or "" for name in HEADERS}, user_metadata=metadata)
