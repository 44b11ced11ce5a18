"""Where the rest of a listing is split in two, from nothing but the keys that were seen of it.

No delimiter is assumed. A split need not be right: what it costs where nothing lies behind it is
one request, which tells that a listing ends earlier. Characters stand for bytes: by code points
they have the order that UTF-8 has by bytes, and where a listing starts must be text.
"""

from collections.abc import Iterable
from os.path import commonprefix
from typing import Final

from caf_pipeline.inventory.objects import MAX_KEY_BYTES

LAST: Final = "\U0010fffd"
"""Greater than any character of nearly every key; the two after it are no characters, which a
server may refuse.
"""

_UNASKABLE: Final = frozenset(
    "\ufffe\uffff"
)  # as control characters, not to be written in XML, in which servers repeat them
_FIRST_ASKABLE: Final = "\x20"


def text_of(key: bytes) -> str:
    """Return a key as text, of one that is none the part before."""
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        return key[: error.start].decode()


def just_before(key: bytes) -> bytes:
    """Return a key, or what a listing takes for one, that is less than this key, with hardly any
    other between the two.
    """
    text = text_of(key)
    if text.encode() != key:
        return text.encode()  # what a key begins with is less than the key
    if text[-1:] <= _FIRST_ASKABLE:
        return text[:-1].encode()
    before = (
        "\ud7ff" if text[-1] == "\ue000" else chr(ord(text[-1]) - 1)
    )  # between them are code points of no character
    found = (text[:-1] + ("\ufffd" if before in _UNASKABLE else before) + LAST).encode()
    return found if len(found) <= MAX_KEY_BYTES else text[:-1].encode()


def split_key(
    first: bytes,
    last: bytes,
    until: bytes | None,
    *,
    alphabet: Iterable[str],
    prefix: str = "",
    jump: bool = False,
) -> bytes | None:
    """Return a key between the last key that was seen of a range and its end, at which the range is
    split; None for none.

    Args: first: the first key that was seen of the range. last: the last one. until: the end of the
        range, None where it has none. alphabet: the characters of keys seen so far. prefix: what
        all keys begin with. jump: split behind a beginning that all seen keys have, rather than
        between the last key and the end: where nothing
            was found there, since the range may lie deep under one beginning.
    """
    low, high = text_of(last), None if until is None else text_of(until)
    fixed = len(prefix) if high is None else _common(low, high)
    common = _common(text_of(first), low)
    if jump and common > fixed:
        split = low[: (fixed + common + 1) // 2] + LAST
    else:
        split = _between(low, high, fixed, sorted(set(alphabet)))
    found = split.encode()
    within = last < found and (until is None or found < until)
    askable = not any(char < _FIRST_ASKABLE or char in _UNASKABLE for char in split)
    return found if within and askable else None


def _common(one: str, other: str) -> int:
    return len(commonprefix([one, other]))  # noqa: RUF071 - characters are what is meant


def _between(low: str, high: str | None, fixed: int, alphabet: list[str]) -> str:
    """Return the middle of what the alphabet has between two keys at the first character where it
    has something, "" for none.
    """
    for level in range(fixed, len(low) + 1):
        least = low[level : level + 1]
        most = high[level : level + 1] if high is not None and level == fixed else LAST
        between = [char for char in alphabet if least < char < most]
        if between:
            return low[:level] + between[len(between) // 2]
    return ""
