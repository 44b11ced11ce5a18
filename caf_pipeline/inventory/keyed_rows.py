"""Reads the rows of some keys from a Parquet file, from the row groups that may have them."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.inventory.key_windows import KeyWindow, key_bounds
from caf_pipeline.inventory.snapshot import translate_read_errors


class KeyedRows:
    """Some columns of a file with a column `key`, sorted by it or not.

    Missing columns are ignored. Methods raise IntegrityError.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path = path
        with translate_read_errors(path):
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
            groups = range(self._file.num_row_groups)
            self._bounds = {
                group: key_bounds(self._file, group)
                for group in groups
                if self._file.metadata.row_group(group).num_rows
            }
            self._columns = [name for name in columns if name in self._file.schema_arrow.names]
        self._cached: dict[int, pa.Table] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def read(self, window: KeyWindow) -> pa.Table:
        after, until = window
        within = {
            group: (least, most)
            for group, (least, most) in self._bounds.items()
            if (after is None or most > after) and (until is None or least <= until)
        }
        with translate_read_errors(self._path):
            rows = pa.concat_tables(
                [self._cached.pop(group, None) or self._read(group) for group in within]
                or [self._read()]
            )
        if within:
            last = max(within)
            self._cached = {
                last: rows.slice(len(rows) - self._file.metadata.row_group(last).num_rows)
            }
        if after is not None and any(least <= after for least, _ in within.values()):
            rows = _select(rows, pc.greater(rows["key"], after))
        if until is not None and any(most > until for _, most in within.values()):
            rows = _select(rows, pc.less_equal(rows["key"], until))
        return rows

    def _read(self, *groups: int) -> pa.Table:
        return self._file.read_row_groups(groups, columns=self._columns)


def _select(rows: pa.Table, mask: pa.ChunkedArray) -> pa.Table:
    # Rows of sorted files are at the beginning or the end, and need no copy.
    count = pc.sum(mask).as_py() or 0
    for first in (0, len(rows) - count):
        if pc.all(mask.slice(first, count), min_count=0).as_py():
            return rows.slice(first, count)
    return rows.filter(mask)
