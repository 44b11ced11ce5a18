"""Maps keys to file names below a folder, and back.

Each part of a key between '/' is a name. Parts that a file system cannot hold, or that have a
special meaning, are escaped:

    "", ".", "..", and parts that begin with ".caf"    .caf~<part>; an empty part is .caf~
    more than 200 bytes                                .caf+<some>/.caf+<some>/.caf~<rest>

Any other part may be escaped, too, with any number of `.caf+` before it: if a file has the name of
a folder (`a` and `a/b`), or if the name is taken.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

MAX_NAME_BYTES: Final = 200
"""File systems allow names of 255 bytes or 255 UTF-16 units."""

_ESCAPE: Final = ".caf"
_LAST_NAME: Final = ".caf~"
_EARLIER_NAME: Final = ".caf+"
_NO_ESCAPES: Final[Mapping[int, int]] = MappingProxyType({})


def path_of(key: str, escaped: Mapping[int, int] = _NO_ESCAPES) -> Sequence[str]:
    """Return the names that lead to a key's file, each of at most 255 bytes.

    `escaped` maps the number of a part, from 0, to how often it is escaped.
    """
    path: list[str] = []
    for number, part in enumerate(key.split("/")):
        times, rest = escaped.get(number, 0), part
        if not (
            part in ("", ".", "..")
            or part.startswith(_ESCAPE)
            or len(part.encode()) > MAX_NAME_BYTES
        ):
            path += [*[_EARLIER_NAME] * (times - 1), _LAST_NAME + part] if times else [part]
            continue
        path += [_EARLIER_NAME] * times
        while len(rest.encode()) > MAX_NAME_BYTES:
            piece = rest.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
            path.append(_EARLIER_NAME + piece)
            rest = rest[len(piece) :]
        path.append(_LAST_NAME + rest)
    return path


def key_of(names: Sequence[str]) -> str:
    """Return the key whose file has these names."""
    parts, beginning = [], ""
    for name in names:
        if name.startswith(_EARLIER_NAME):
            beginning += name.removeprefix(_EARLIER_NAME)
        else:
            parts.append(beginning + name.removeprefix(_LAST_NAME))
            beginning = ""
    return "/".join(parts)
