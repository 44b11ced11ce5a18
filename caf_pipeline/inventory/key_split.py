"""Splits the rest of a listing in two, using only the keys listed so far.

No delimiter is assumed. A bad split costs one request. Listings start at text, and code points have
the order of UTF-8 bytes.
"""

from collections.abc import Iterable
from os.path import commonprefix
from typing import Final

from caf_pipeline.inventory.objects import MAX_KEY_BYTES

LAST: Final = "\U0010fffd"
"""Greater than nearly every character. Servers may refuse the two noncharacters after it."""

# XML cannot contain these or control characters, and servers repeat the start of a listing in XML.
_NOT_XML: Final = frozenset("\ufffe\uffff")
_FIRST_ALLOWED: Final = "\x20"


def text_of(key: bytes) -> str:
    """Return a key up to its first byte that is not UTF-8."""
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        return key[: error.start].decode()


def just_before(key: bytes) -> bytes:
    """Return a slightly smaller start for a listing."""
    text = text_of(key)
    if text.encode() != key:
        return text.encode()  # a prefix of a key is less than the key
    if text[-1:] <= _FIRST_ALLOWED:
        return text[:-1].encode()
    # The code points between U+D7FF and U+E000 are surrogates.
    last = "\ud7ff" if text[-1] == "\ue000" else chr(ord(text[-1]) - 1)
    start = (text[:-1] + ("\ufffd" if last in _NOT_XML else last) + LAST).encode()
    return start if len(start) <= MAX_KEY_BYTES else text[:-1].encode()


def split_key(
    first: bytes,
    last: bytes,
    until: bytes | None,
    *,
    alphabet: Iterable[str],
    prefix: str = "",
    jump: bool = False,
) -> bytes | None:
    """Return a key that splits the rest of a range, if any.

    The range was listed from `first` to `last`, and ends at `until`. The split is after `last`, or
    with `jump` after the common prefix of the listed keys, if the last split found nothing.
    `alphabet` has the characters of all keys so far.
    """
    low, high = text_of(last), None if until is None else text_of(until)
    fixed = len(prefix) if high is None else _common_length(low, high)
    common = _common_length(text_of(first), low)
    if jump and common > fixed:
        split = low[: (fixed + common + 1) // 2] + LAST
    else:
        # The middle character of the alphabet, at the first position that has one in between.
        split, characters = "", sorted(set(alphabet))
        for level in range(fixed, len(low) + 1):
            least = low[level : level + 1]
            most = high[level : level + 1] if high is not None and level == fixed else LAST
            between = [char for char in characters if least < char < most]
            if between:
                split = low[:level] + between[len(between) // 2]
                break
    key = split.encode()
    is_within = last < key and (until is None or key < until)
    is_allowed = not any(char < _FIRST_ALLOWED or char in _NOT_XML for char in split)
    return key if is_within and is_allowed else None


def _common_length(first: str, second: str) -> int:
    return len(commonprefix([first, second]))  # noqa: RUF071 - compares characters
