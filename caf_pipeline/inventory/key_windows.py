"""Windows of keys: a snapshot is worked on some rows at once, so that memory does not grow with the
source.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.system.parquet import files_of

KeyWindow = tuple[bytes | None, bytes | None]
"""Keys greater than the first, up to and including the second; None: no bound."""

ALL_KEYS: Final[KeyWindow] = (None, None)

WINDOW_ROWS: Final = 262_144
"""Rows of a snapshot that a query works on at once: some 100 MB with all that a join needs.

A join over all of them would take whatever its budget allows, so that memory grew with the source
until there.
"""


def key_windows(
    snapshot: Path, within: KeyWindow = ALL_KEYS, *, known: Path | None = None
) -> Iterator[KeyWindow]:
    """Yield windows that cover the keys `within`, each about WINDOW_ROWS of the snapshot where that
    is sorted.

    `known`: a file, or a folder of them, whose rows they are to bound as well, of each file that is
    sorted.
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
    """Return the least and the greatest key of a row group that has rows.

    Pyarrow writes both beside it, unless one is longer than 4,096 bytes, as a key of another server
    than S3 may be: then the keys are read.

    Raises:
        ValueError: it has none: the file is damaged.
    """
    told = (
        file.metadata.row_group(group).column(file.schema_arrow.get_field_index("key")).statistics
    )
    if told is not None and told.has_min_max:
        return told.min, told.max
    read = pc.min_max(file.read_row_group(group, columns=["key"])["key"])
    if not read["min"].is_valid:
        raise ValueError("it has rows without a key")
    return read["min"].as_py(), read["max"].as_py()


def bounded(window: KeyWindow) -> str:
    """Return the condition that a key is in a window."""
    after, until = window
    bounds = ["true" if after is None else f"key > from_hex('{after.hex()}')"]
    bounds.append("true" if until is None else f"key <= from_hex('{until.hex()}')")
    return " AND ".join(bounds)
