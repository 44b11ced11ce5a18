"""Inputs from a seeded generator.

Sizes are equal or log-normal, and the bytes do not compress. Inputs are kept below `.caf/bench`.
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
    """Return `count` equal sizes."""
    return [size_bytes] * count


def log_normal(total_bytes: int, median_bytes: int, sigma: float = 1.5) -> list[int]:
    """Return log-normal sizes that add up to `total_bytes`.

    Object stores hold such sizes: many small objects and few large ones.
    """
    generator = random.Random(SEED)
    sizes, remaining = [], total_bytes
    while remaining > 0:
        size_bytes = min(
            remaining, max(1, round(generator.lognormvariate(math.log(median_bytes), sigma)))
        )
        sizes.append(size_bytes)
        remaining -= size_bytes
    return sizes


def bodies(sizes: Sequence[int]) -> Iterator[tuple[str, bytes]]:
    """Yield names in byte order and different bodies, one for each size."""
    noise = memoryview(random.Random(SEED).randbytes(_NOISE_BYTES) * 2)
    for number, size_bytes in enumerate(sizes):
        start = number * 4099 % _NOISE_BYTES  # a prime, so that bodies begin at different offsets
        head = number.to_bytes(8, "big")[: min(8, size_bytes)]
        body = bytearray(head)
        while len(body) < size_bytes:
            body += noise[start : start + min(_NOISE_BYTES, size_bytes - len(body))]
        yield f"{number // 1000:05}/{number:08}", bytes(body)


def files(name: str, sizes: Sequence[int]) -> Path:
    """Return a folder of files with these sizes. Create it if it is missing or incomplete."""
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
    """Return a file of this size."""
    [path] = [path for path in files(name, [size_bytes]).rglob("*") if path.is_file()]
    return path
