"""Builds the cotar index of a tar. Loading numpy takes longer than most look-ups.

Source: github.com/linz/cotar at 365c6a5, packages/builder; vectors of 6.0.1 in the tests.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from caf_pipeline.errors import MemberRefused
from caf_pipeline.formats.cotar import FNV_OFFSET, FNV_PRIME, HEADER, MAX_PASSED, VERSION
from caf_pipeline.formats.tar import BLOCK_BYTES, FileRange

MAX_FILE_BYTES: Final = (1 << 32) - 1
MAX_START_BYTE: Final = MAX_FILE_BYTES * BLOCK_BYTES
_PACKING: Final = 1.25  # slots for each file, in the original's library
_SLOTS: Final = np.dtype([("hash", "<u8"), ("block", "<u4"), ("size", "<u4")])

_Hashes = np.ndarray[tuple[int], np.dtype[np.uint64]]
_Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


def index_of(files: Sequence[FileRange]) -> bytes:
    """Return the original builder's index. Raises MemberRefused."""
    for file in files:
        require_fits(file)
    hashes = _hashes([file.name for file in files])
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    for place in np.flatnonzero(ordered[1:] == ordered[:-1]):
        name, other = files[order[place]].name, files[order[place + 1]].name
        if name != other:
            raise MemberRefused(
                f"{_shown(name)} and {_shown(other)} have the same hash, so that a cotar index "
                "cannot distinguish them."
            )
    if len(ordered) and not ordered[0]:
        raise MemberRefused(
            f"{_shown(files[order[0]].name)} has the hash 0, which marks an empty slot of a cotar "
            "index."
        )
    starts = np.fromiter((file.start_byte // BLOCK_BYTES for file in files), np.uint64, len(files))
    sizes = np.fromiter((file.size_bytes for file in files), np.uint64, len(files))
    slot_count = max(1, math.ceil(len(files) * _PACKING))
    while (placement := _placement(hashes, starts, slot_count)) is None:  # the original gives up
        slot_count = math.ceil(slot_count * _PACKING)
        if slot_count > 64 * len(files):
            raise MemberRefused(
                "The names of these files have hashes that a cotar index cannot hold; such names "
                "do not occur by chance."
            )
    order, places = placement
    slots = np.zeros(slot_count, _SLOTS)
    slots["hash"][places] = hashes[order]
    slots["block"][places] = starts[order]
    slots["size"][places] = sizes[order]
    header = HEADER.pack(b"COT", VERSION, slot_count)
    return header + slots.tobytes() + header


def require_fits(file: FileRange) -> None:
    """Raise MemberRefused if an index cannot hold a file."""
    if file.size_bytes > MAX_FILE_BYTES:
        raise MemberRefused(
            f"{_shown(file.name)} has {file.size_bytes} bytes; a cotar index holds files of less "
            "than 4 GiB."
        )
    if file.start_byte > MAX_START_BYTE:
        raise MemberRefused(
            f"{_shown(file.name)} begins at byte {file.start_byte}; a cotar index holds the first "
            "2 TiB of a tar."
        )


def _hashes(names: Sequence[bytes]) -> _Hashes:
    hashes = np.empty(len(names), np.uint64)
    by_length: dict[int, list[int]] = {}
    for number, name in enumerate(names):
        by_length.setdefault(len(name), []).append(number)
    for length, numbers in by_length.items():
        letters = np.frombuffer(b"".join(names[number] for number in numbers), np.uint8).reshape(
            len(numbers), length
        )
        value = np.full(len(numbers), FNV_OFFSET, np.uint64)
        for column in range(length):
            value ^= letters[:, column]
            value *= np.uint64(FNV_PRIME)
        hashes[numbers] = value
    return hashes


def _placement(
    hashes: _Hashes, starts: _Hashes, slot_count: int
) -> tuple[_Numbers, _Numbers] | None:
    """Return the order of the files and their slots; None if one is too far from its own.

    Like the original, put files ordered by their own slot, block and hash into the next free slots.
    """
    home = (hashes % np.uint64(slot_count)).astype(np.int64)
    order = np.lexsort((hashes, starts, home))
    home = home[order]
    steps = np.arange(len(home))
    places = np.maximum.accumulate(home - steps) + steps
    past = places >= slot_count
    if past.any():
        is_used = np.zeros(slot_count, bool)
        is_used[places[~past]] = True
        places[past] = np.flatnonzero(~is_used)[: int(past.sum())]
    if len(home) and int(((places - home) % slot_count).max()) > MAX_PASSED:
        return None
    return order, places


def _shown(name: bytes) -> str:
    return repr(name.decode(errors="backslashreplace"))
