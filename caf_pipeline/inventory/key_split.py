"""Splits the rest of a listing in two, using only the keys listed so far.

No delimiter is assumed. A bad split costs one request. Listings start at text, and code points have
the order of UTF-8 bytes.
"""

import re
from collections.abc import Iterable
from os.path import commonprefix
from typing import Final

from caf_pipeline.inventory.objects import MAX_KEY_BYTES

LAST: Final = "\U0010fffd"
"""Greater than nearly every character. Servers may refuse the two noncharacters after it."""

# Servers repeat the start of a listing in XML, which can contain few of these characters.
_NOT_IN_STARTS: Final = re.compile("[\x00-\x1f\ufffe\uffff]")


def text_of(key: bytes) -> str:
    """Return a start for a listing, up to `key` and close to it.

    It is cut before the first byte that is not UTF-8, and before the first character that XML
    cannot contain.
    """
    try:
        text = key.decode()
    except UnicodeDecodeError as error:
        text = key[: error.start].decode()
    refused = _NOT_IN_STARTS.search(text)
    if not refused:
        return text
    before = text[: refused.start()]
    if refused[0] < " ":  # few keys are between this start and the key
        return before
    start = before + "\ufffd" + LAST
    return start if len(start.encode()) <= MAX_KEY_BYTES else before + "\ufffd"


def just_before(key: bytes) -> bytes:
    """Return a slightly smaller start for a listing."""
    text = text_of(key)
    if text.encode() != key:
        return text.encode()  # it is less than the key
    if text[-1:] <= " ":
        return text[:-1].encode()
    # The code points between U+D7FF and U+E000 are surrogates.
    last = "\ud7ff" if text[-1] == "\ue000" else chr(ord(text[-1]) - 1)
    start = text_of((text[:-1] + last + LAST).encode()).encode()
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
    `alphabet` has the characters of all keys so far, each cut by `text_of`.
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
    return key if last < key and (until is None or key < until) else None


def _common_length(first: str, second: str) -> int:
    return len(commonprefix([first, second]))  # noqa: RUF071 - compares characters
