"""Full subtrees of `caf.merkle` in Python: reference and fallback of the compiled module."""

import sys
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from caf_pipeline.caf.merkle_hashes import BLOCK_BYTES, HASHES

_NUMBER_BYTES: Final = 20  # digits of the largest 64-bit number, before a block's hex
_THREAD: Final = threading.local()


def subtree_root(blocks: memoryview, first_number: int, proof_type: int) -> bytes:
    """Return the root of a power of two of whole blocks, or of the file's short last block.

    Mostly runs without the interpreter's lock.
    """
    if not hasattr(_THREAD, "texts"):
        _THREAD.texts = _HexText()  # kept: some 2.6 MB for batches of 64 blocks
    texts: _HexText = _THREAD.texts
    hashes = HASHES[proof_type]
    level = [hashes.tree(hashes.block(text)) for text in texts.of(blocks, first_number)]
    while len(level) > 1:
        level = [hashes.tree(level[n] + level[n + 1]) for n in range(0, len(level), 2)]
    return level[0]


class _HexText:
    """The input of the leaf hashes: a block's decimal number and its lower-case hex.

    numpy is nearly twice as fast as binascii.hexlify, which holds the interpreter's lock. Number
    and hex are adjacent: one BLAKE3 call takes half the time of two.
    """

    def __init__(self) -> None:
        self._lanes: NDArray[np.uint16] = np.empty((0, 0), np.uint16)
        self._scratch: NDArray[np.uint16] = np.empty((0, 0), np.uint16)

    def of(self, blocks: memoryview, first_number: int) -> Iterator[memoryview]:
        """Yield the text of each block, all whole or a single short one.

        The next call overwrites it.
        """
        count = max(1, len(blocks) // BLOCK_BYTES)
        width = min(len(blocks), BLOCK_BYTES)
        if len(self._lanes) < count:
            self._lanes = np.empty((count, _NUMBER_BYTES // 2 + BLOCK_BYTES), np.uint16)
            self._scratch = np.empty((count, BLOCK_BYTES), np.uint16)
        first_lane = _NUMBER_BYTES // 2
        _to_hex(
            np.frombuffer(blocks, np.uint8).reshape(count, width),
            self._lanes[:count, first_lane : first_lane + width],
            self._scratch[:count, :width],
        )
        text = self._lanes.data.cast("B")
        for n in range(count):
            hex_from = n * (_NUMBER_BYTES + 2 * BLOCK_BYTES) + _NUMBER_BYTES
            number = b"%d" % (first_number + n)
            text[hex_from - len(number) : hex_from] = number
            yield text[hex_from - len(number) : hex_from + 2 * width]


def _to_hex(
    blocks: NDArray[np.uint8], lanes: NDArray[np.uint16], scratch: NDArray[np.uint16]
) -> None:
    np.copyto(lanes, blocks)
    np.left_shift(lanes, 8, out=scratch)
    np.right_shift(lanes, 4, out=lanes)
    np.bitwise_or(lanes, scratch, out=lanes)
    np.bitwise_and(lanes, 0x0F0F, out=lanes)
    # Adding 6 carries digits above 9 into bit 4. These need the offset of ASCII letters.
    np.add(lanes, 0x0606, out=scratch)
    np.right_shift(scratch, 4, out=scratch)
    np.bitwise_and(scratch, 0x0101, out=scratch)
    np.multiply(scratch, ord("a") - ord("9") - 1, out=scratch)
    np.add(lanes, scratch, out=lanes)
    np.add(lanes, 0x3030, out=lanes)
    if sys.byteorder == "big":
        lanes.byteswap(inplace=True)
