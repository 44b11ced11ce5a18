"""Headers and user metadata of an object: a set that many objects share, named by a hash of its
values.
"""

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
"""The headers that the archive keeps beside user metadata: columns of manifests and of
`header_sets`.
"""

ID_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class ObjectHeaders:
    """Headers and user metadata of an object. A header that S3 does not have is an empty string."""

    content_type: str = ""
    content_encoding: str = ""
    content_language: str = ""
    content_disposition: str = ""
    cache_control: str = ""
    expires: str = ""
    user_metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> bytes:
        """The name of the set: the first `ID_BYTES` of the SHA-256 of its values, each followed by
        a NUL, which no value has.

        First come the values of `HEADERS`, then name and value of the user metadata, sorted by
        name.
        """
        values = [*(getattr(self, name) for name in HEADERS)]
        values += [text for pair in sorted(self.user_metadata.items()) for text in pair]
        return hashlib.sha256("".join(f"{value}\0" for value in values).encode()).digest()[
            :ID_BYTES
        ]


def headers_of(row: Mapping[str, Any]) -> ObjectHeaders:
    """Return the headers of a row with the columns of `HEADERS` and `user_metadata`."""
    metadata = {name: value or "" for name, value in row["user_metadata"] or ()}
    return ObjectHeaders(**{name: row[name] or "" for name in HEADERS}, user_metadata=metadata)
