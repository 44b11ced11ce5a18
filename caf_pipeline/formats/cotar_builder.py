"""The cotar index of a tar archive's files, as the original builder makes it.

Apart from `cotar`, which reads it, since numpy takes longer to load than most look-ups.

Source: github.com/linz/cotar at 365c6a5, packages/builder; vectors of @cotar/builder 6.0.1 in the
tests.
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
_PACKING: Final = 1.25  # slots a file, of the original's library
_SLOTS: Final = np.dtype([("hash", "<u8"), ("block", "<u4"), ("size", "<u4")])


def index_of(files: Sequence[FileRange]) -> bytes:
    """Return the index of a tar's files, byte for byte the original builder's where that knows the
    same files.

    Raises:
        MemberRefused: the format cannot hold a file, which is named.
    """
    for file in files:
        require_fits(file)
    hashes = _hashes([file.name for file in files])
    _require_distinct(files, hashes)
    starts = np.fromiter((file.start_byte // BLOCK_BYTES for file in files), np.uint64, len(files))
    sizes = np.fromiter((file.size_bytes for file in files), np.uint64, len(files))
    slot_count = max(1, math.ceil(len(files) * _PACKING))
    while (placed := _places(hashes, starts, slot_count)) is None:  # where the original gives up
        slot_count = math.ceil(slot_count * _PACKING)
        if slot_count > 64 * len(files):
            raise MemberRefused(
                "The names of these files have hashes that a cotar index cannot hold; only names "
                "made on purpose do."
            )
    order, places = placed
    slots = np.zeros(slot_count, _SLOTS)
    slots["hash"][places] = hashes[order]
    slots["block"][places] = starts[order]
    slots["size"][places] = sizes[order]
    header = HEADER.pack(b"COT", VERSION, slot_count)
    return header + slots.tobytes() + header


def require_fits(file: FileRange) -> None:
    """Raise MemberRefused where an index cannot hold a file, for its size or its place."""
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


def _hashes(names: Sequence[bytes]) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Return the hash of each name; those of one length at once."""
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


def _require_distinct(
    files: Sequence[FileRange], hashes: "np.ndarray[tuple[int], np.dtype[np.uint64]]"
) -> None:
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    for place in np.flatnonzero(ordered[1:] == ordered[:-1]):
        one, other = files[order[place]].name, files[order[place + 1]].name
        if one != other:
            raise MemberRefused(
                f"{_shown(one)} and {_shown(other)} have one hash, so that a cotar index cannot "
                "tell them apart."
            )
    if len(ordered) and not ordered[0]:
        raise MemberRefused(
            f"{_shown(files[order[0]].name)} has the hash 0, by which a cotar index means an empty "
            "slot."
        )


def _places(
    hashes: "np.ndarray[tuple[int], np.dtype[np.uint64]]",
    starts: "np.ndarray[tuple[int], np.dtype[np.uint64]]",
    slot_count: int,
) -> (
    "tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], "
    "np.dtype[np.int64]]] | None"
):
    """Return in which order the files are put into slots, and into which; None where one would
    stand too far from its own.

    The original puts them one by one into the first free slot from their own on, in the order of
    that slot, the block and the hash. So each stands in its own slot or right behind the one
    before, and those that pass the end fill what is free.
    """
    own = (hashes % np.uint64(slot_count)).astype(np.int64)
    order = np.lexsort((hashes, starts, own))
    own = own[order]
    steps = np.arange(len(own))
    places = np.maximum.accumulate(own - steps) + steps
    past = places >= slot_count
    if past.any():
        taken = np.zeros(slot_count, bool)
        taken[places[~past]] = True
        places[past] = np.flatnonzero(~taken)[: int(past.sum())]
    if len(own) and int(((places - own) % slot_count).max()) > MAX_PASSED:
        return None
    return order, places


def _shown(name: bytes) -> str:
    return repr(name.decode(errors="backslashreplace"))
