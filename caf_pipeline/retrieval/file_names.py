"""Where a key's file is below a folder: names that any key has, that lead nowhere else, and from
which the key can be read again.

A key is a path of its parts between '/', each as it is, but for those that a file system cannot
hold or that mean something else:

    "", ".", "..", and all that begin with ".caf"     .caf~<part>       an empty part is .caf~
    more than 200 bytes                               .caf+<some>/.caf+<some>/.caf~<rest>

Any part may be written so, and one that is already may have any number of `.caf+` before it; that
is done where the name of one key is the folder of another (`a` and `a/b`), or something else has
the name.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

MAX_NAME_BYTES: Final = 200
"""What file systems hold is 255 bytes of a name, or 255 UTF-16 units."""

_OWN: Final = ".caf"
_WHOLE: Final = ".caf~"
_BEGUN: Final = ".caf+"
_AS_IT_IS: Final[Mapping[int, int]] = MappingProxyType({})


def path_of(key: str, escaped: Mapping[int, int] = _AS_IT_IS) -> Sequence[str]:
    """Return the names that lead to a key's file, each of at most 255 bytes; `escaped` says how
    often, by a part's number.
    """
    return [
        name
        for number, part in enumerate(key.split("/"))
        for name in _names(part, escaped.get(number, 0))
    ]


def key_of(names: Sequence[str]) -> str:
    """Return the key whose file is at these names."""
    parts, begun = [], ""
    for name in names:
        if name.startswith(_BEGUN):
            begun += name.removeprefix(_BEGUN)
        else:
            parts.append(begun + name.removeprefix(_WHOLE))
            begun = ""
    return "/".join(parts)


def _names(part: str, times: int) -> list[str]:
    if not (
        part in ("", ".", "..") or part.startswith(_OWN) or len(part.encode()) > MAX_NAME_BYTES
    ):
        return [*[_BEGUN] * (times - 1), _WHOLE + part] if times else [part]
    names, rest = [_BEGUN] * times, part
    while len(rest.encode()) > MAX_NAME_BYTES:
        taken = rest.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
        names.append(_BEGUN + taken)
        rest = rest[len(taken) :]
    return [*names, _WHOLE + rest]
