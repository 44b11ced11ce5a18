"""Windows of keys, which bound the memory of queries over a snapshot of any size."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.system.parquet import files_of

KeyWindow = tuple[bytes | None, bytes | None]
"""Keys greater than the first, up to and including the second. None: no bound."""

ALL_KEYS: Final[KeyWindow] = (None, None)

WINDOW_ROWS: Final = 262_144
"""Rows in one query: some 100 MB with a join."""


def key_windows(
    snapshot: Path, within: KeyWindow = ALL_KEYS, *, known: Path | None = None
) -> Iterator[KeyWindow]:
    """Yield windows of about WINDOW_ROWS rows that together cover the keys `within`.

    They bound the sorted rows of `known`, a file or folder, as well.
    """
    ends: set[bytes] = set()
    for path in (snapshot, *(files_of(known) if known else ())):
        rows = 0
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                rows += file.metadata.row_group(group).num_rows
                if rows >= WINDOW_ROWS:
                    ends.add(key_bounds(file, group)[1])
                    rows = 0
    after, last = within
    inside = sorted(
        end for end in ends if (after is None or end > after) and (last is None or end < last)
    )
    yield from pairwise([after, *inside, last])


def key_bounds(file: pq.ParquetFile, group: int) -> tuple[bytes, bytes]:
    """Return the least and the greatest key of a row group with rows.

    Statistics lack keys over 4,096 bytes; then reads the keys. Raises ValueError if rows have no
    key.
    """
    column = file.schema_arrow.get_field_index("key")
    statistics = file.metadata.row_group(group).column(column).statistics
    if statistics is not None and statistics.has_min_max:
        return statistics.min, statistics.max
    bounds = pc.min_max(file.read_row_group(group, columns=["key"])["key"])
    if not bounds["min"].is_valid:
        raise ValueError("it has rows without a key")
    return bounds["min"].as_py(), bounds["max"].as_py()


def bounded(window: KeyWindow) -> str:
    """Return the SQL condition for a window."""
    after, until = window
    bounds = ["true" if after is None else f"key > from_hex('{after.hex()}')"]
    bounds.append("true" if until is None else f"key <= from_hex('{until.hex()}')")
    return " AND ".join(bounds)
