"""Inputs by a seeded generator: sizes fixed or log-normal, bytes that do not compress, made once
and kept below `.caf/bench`.
"""

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

KEPT = Path(".caf/bench")
SEED = 20261121
MIB = 1 << 20
_NOISE_BYTES = 8 * MIB


def fixed(count: int, size_bytes: int) -> list[int]:
    """Return sizes that are all the same."""
    return [size_bytes] * count


def log_normal(total_bytes: int, median_bytes: int, sigma: float = 1.5) -> list[int]:
    """Return sizes that add up to `total_bytes`, as object stores hold them: many small ones, few
    large ones.
    """
    chance = random.Random(SEED)
    sizes, left = [], total_bytes
    while left > 0:
        size_bytes = min(left, max(1, round(chance.lognormvariate(math.log(median_bytes), sigma))))
        sizes.append(size_bytes)
        left -= size_bytes
    return sizes


def bodies(sizes: Sequence[int]) -> Iterator[tuple[str, bytes]]:
    """Yield names in byte order and bodies of these sizes, no two alike."""
    noise = memoryview(random.Random(SEED).randbytes(_NOISE_BYTES) * 2)
    for number, size_bytes in enumerate(sizes):
        start = number * 4099 % _NOISE_BYTES  # a prime: bodies begin at other places of the noise
        head = number.to_bytes(8, "big")[: min(8, size_bytes)]
        body = bytearray(head)
        while len(body) < size_bytes:
            body += noise[start : start + min(_NOISE_BYTES, size_bytes - len(body))]
        yield f"{number // 1000:05}/{number:08}", bytes(body)


def files(name: str, sizes: Sequence[int]) -> Path:
    """Return a folder of files of these sizes; made where it is not there whole."""
    folder, done = KEPT / name, KEPT / f"{name}.done"
    described = f"{len(sizes)} {sum(sizes)}"
    if not done.exists() or done.read_text() != described:
        folder.mkdir(parents=True, exist_ok=True)
        for key, body in bodies(sizes):
            path = folder / key
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(body)
        done.write_text(described)
    return folder


def one_file(name: str, size_bytes: int) -> Path:
    """Return one file of this size."""
    [path] = [path for path in files(name, [size_bytes]).rglob("*") if path.is_file()]
    return path
