"""The exact size of a chunk after each object, computed for many rows as columns."""

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from caf_pipeline.caf.archive import Limits
from caf_pipeline.caf.index import (
    EMPTY_INDEX_SIZE_BYTES,
    FOOTER_SIZE_BYTES,
    escape_key,
    index_entry_size_bytes,
)
from caf_pipeline.inventory.manifest import (
    HEAD_MEMBER,
    HEAD_SIZE_BYTES,
    MANIFEST_FIXED_BYTES,
    MANIFEST_GROUP_BYTES,
    MANIFEST_GROUP_ROWS,
    MANIFEST_MEMBER,
    REWRITTEN_BYTES,
    manifest_row_bound,
)
from caf_pipeline.inventory.objects import VERSION_MARK
from caf_pipeline.inventory.snapshot import object_versions

_Numbers = np.ndarray[Any, np.dtype[np.int64]]
_Flags = np.ndarray[Any, np.dtype[np.bool_]]

MAX_HEADERS_BYTES: Final = 16 << 10
"""Reserved so that an object with long headers fits its chunk. S3 accepts 8 KiB."""


_TENS: Final = 10 ** np.arange(1, 19, dtype=np.int64)
_ESCAPE_BYTES: Final = bytes(
    len(escape_key(bytes([code]))) - 1 if code < 0x80 else 0 for code in range(0x100)
)

# Escaped, too. Both begin with the same two bytes.
_SEPARATORS: Final = ("\u2028".encode(), "\u2029".encode())
_SEPARATOR: Final = re.compile(b"|".join(_SEPARATORS))
_SEPARATOR_LONGER: Final = len(escape_key(_SEPARATORS[0])) - len(_SEPARATORS[0])
_ENTRY_BYTES: Final = index_entry_size_bytes("", 0, 0) - 2  # without name and digits of the range
_ROW_BYTES: Final = manifest_row_bound(b"", None, "")


def is_reserved_name(member: str) -> bool:
    """Return whether our members have this name, or may change to it."""
    return member.startswith(".caf/") and member.rstrip("~") in (HEAD_MEMBER, MANIFEST_MEMBER)


class PlanRows:
    """Objects in plan order, and what each adds to a chunk.

    `older` rows are followed by a newer version. `members` are the names in a chunk with one.
    """

    def __init__(self, batch: pa.RecordBatch, next_key: bytes | None, max_bytes: int) -> None:
        """No chunk holds an object over `max_bytes`."""
        self.count = batch.num_rows
        self._batch = batch
        self.keys = batch["key"].cast(pa.string())
        next_keys = pa.concat_arrays([batch["key"].slice(1), pa.array([next_key], pa.binary())])
        self.older = pc.equal(batch["key"], next_keys).fill_null(False)
        self.members = self.keys
        if pc.any(self.older).as_py():
            ids = batch["version_id"]
            versions = pc.if_else(pc.equal(ids, "").fill_null(True), batch["etag"], ids)
            names = pc.binary_join_element_wise(self.keys, versions, VERSION_MARK)
            self.members = pc.if_else(self.older, names, self.keys)
        self.size_bytes: _Numbers = batch["size_bytes"].to_numpy()
        # Capped, so that sums do not overflow. A larger object is alone in its chunk, or in none.
        self.body_bytes = np.minimum(self.size_bytes, max_bytes + 1)
        # Reserved names that rows may have. In a chunk without a newer version, a row has its key.
        begins_like_ours = pc.starts_with(self.keys, ".caf/").to_numpy(zero_copy_only=False)
        self.reserved: list[tuple[int, str]] = [
            (row, name)
            for row in np.flatnonzero(begins_like_ours).tolist()
            for name in {self.keys[row].as_py(), self.members[row].as_py()}
            if is_reserved_name(name)
        ]
        self.entry_bytes = _ENTRY_BYTES + _escaped_bytes(self.members) + 1
        taken = [row for row, name in self.reserved if name == self.members[row].as_py()]
        self.entry_bytes[taken] += 2  # the names of our two members may grow by a character each
        lengths = pc.binary_length(batch["key"]).to_numpy().astype(np.int64)
        rewritten = pc.not_equal(batch["object_version"], object_versions(batch))
        self.manifest_bytes: _Numbers = _ROW_BYTES + 2 * lengths
        for name in ("version_id", "etag"):
            self.manifest_bytes += pc.utf8_length(batch[name]).fill_null(0).to_numpy()
        self.manifest_bytes += REWRITTEN_BYTES * rewritten.to_numpy(zero_copy_only=False)

    def of(self, rows: _Numbers) -> list[dict[str, Any]]:
        dicts: list[dict[str, Any]] = self._batch.take(pa.array(rows)).to_pylist()
        return dicts

    @cached_property
    def entry_bytes_alone(self) -> _Numbers:
        """In a chunk of its own, where the name is the key."""
        if not pc.any(self.older).as_py():
            return self.entry_bytes
        alone: _Numbers = _ENTRY_BYTES + _escaped_bytes(self.keys) + 1
        alone[[row for row, _ in self.reserved]] += 2
        return alone

    @cached_property
    def hashed(self) -> tuple[_Numbers, memoryview]:
        """The rows' bounds in the bytes, `<key> NUL <identity> NUL <size> NUL` for each row."""
        sizes = self._batch["size_bytes"].cast(pa.string()).cast(pa.binary())
        identities = self._batch["object_version"].cast(pa.binary())
        joined = pc.binary_join_element_wise(self._batch["key"], identities, sizes, b"", b"\0")
        return _ends(joined), memoryview(joined.buffers()[2])

    @cached_property
    def older_names(self) -> tuple[_Numbers, pa.Array]:
        return np.flatnonzero(self.older.to_numpy(zero_copy_only=False)), self.members.filter(
            self.older
        )

    @cached_property
    def marked_keys(self) -> tuple[_Numbers, pa.Array]:
        """Rows and keys that could have the name of an older version."""
        marked = pc.match_substring(self.keys, VERSION_MARK)
        return np.flatnonzero(marked.to_numpy(zero_copy_only=False)), self.keys.filter(marked)


def _ends(texts: pa.Array) -> _Numbers:
    offsets = np.frombuffer(texts.buffers()[1], np.int32)
    return offsets[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)


def _escaped_bytes(texts: pa.Array) -> _Numbers:
    ends = _ends(texts)
    lengths = np.diff(ends)
    data = memoryview(texts.buffers()[2] or b"")[ends[0] : ends[-1]].tobytes()
    longer = np.frombuffer(bytearray(data.translate(_ESCAPE_BYTES)), np.uint8)
    if _SEPARATORS[0][:2] in data:
        starts = np.array([match.start() for match in _SEPARATOR.finditer(data)], np.int64)
        longer[starts] = _SEPARATOR_LONGER
    if longer.any():
        sums = np.concatenate([[0], np.cumsum(longer, dtype=np.int64)])
        lengths += np.diff(sums[ends - ends[0]])
    return lengths


def _digits(numbers: _Numbers) -> _Numbers:
    return np.searchsorted(_TENS, numbers, side="right") + 1


@dataclass(frozen=True, slots=True)
class _Sizes:
    end: _Numbers  # the end of the bodies
    index: _Numbers
    manifest: _Numbers


@dataclass(slots=True)
class OpenChunk:
    """A chunk that is being filled."""

    limits: Limits
    object_count: int = 0
    object_bytes: int = 0
    taken: set[str] = field(default_factory=set)  # reserved names that objects have
    position: int = HEAD_SIZE_BYTES
    manifest: int = MANIFEST_FIXED_BYTES
    index: int = 0

    def __post_init__(self) -> None:
        limit = self.limits.max_bytes
        head = index_entry_size_bytes(HEAD_MEMBER, 0, HEAD_SIZE_BYTES) + 1
        manifest = index_entry_size_bytes(MANIFEST_MEMBER, limit, limit)
        self.index = EMPTY_INDEX_SIZE_BYTES + head + manifest

    @property
    def size_bytes(self) -> int:
        """Bodies, index and footer, which count towards the target."""
        return self.position + self.index + FOOTER_SIZE_BYTES

    def sizes_with(self, rows: PlanRows, first: int, stop: int) -> _Sizes:
        end = self.position + np.cumsum(rows.body_bytes[first:stop])
        digits = _digits(end)
        begins = np.empty_like(digits)
        begins[:1] = _digits(np.array([self.position]))
        begins[1:] = digits[:-1]
        manifest = rows.manifest_bytes[first:stop].copy()
        manifest[-self.object_count % MANIFEST_GROUP_ROWS :: MANIFEST_GROUP_ROWS] += (
            MANIFEST_GROUP_BYTES
        )
        return _Sizes(
            end,
            self.index + np.cumsum(rows.entry_bytes[first:stop] + digits + begins),
            self.manifest + np.cumsum(manifest),
        )

    def fitting(self, sizes: _Sizes, target_bytes: int, max_bytes: int) -> int:
        """Return how many rows fit. Only `max_bytes` includes the manifest."""
        without = sizes.end + sizes.index + FOOTER_SIZE_BYTES
        room = (
            np.searchsorted(without, target_bytes, side="right"),
            np.searchsorted(without + sizes.manifest, max_bytes, side="right"),
            np.searchsorted(sizes.index, self.limits.max_index_bytes, side="right"),
        )
        return min(
            len(without),
            max(0, self.limits.max_members - 2 - self.object_count),
            *(int(count) for count in room),
        )

    def take(self, sizes: _Sizes, rows: PlanRows, first: int, count: int) -> None:
        last = count - 1
        self.position, self.index = int(sizes.end[last]), int(sizes.index[last])
        self.manifest = int(sizes.manifest[last])
        self.object_count += count
        self.object_bytes += int(rows.size_bytes[first : first + count].sum())
        self.taken.update(name for row, name in rows.reserved if first <= row < first + count)


def fit_alone(rows: PlanRows, limits: Limits) -> _Flags:
    """Return which rows fit in their own chunk, with headers of any length."""
    empty = OpenChunk(limits)
    end = empty.position + rows.body_bytes
    digits = _digits(np.array([empty.position])) + _digits(end)
    index = empty.index + rows.entry_bytes_alone + digits
    manifest = empty.manifest + MANIFEST_GROUP_BYTES + rows.manifest_bytes + MAX_HEADERS_BYTES
    whole = end + index + manifest + FOOTER_SIZE_BYTES
    fits: _Flags = (
        (whole <= limits.max_bytes) & (index <= limits.max_index_bytes) & (limits.max_members >= 3)
    )
    return fits


class NameCollisions:
    """Detects objects whose name an older version in the same chunk already has.

    It may be of another key.
    """

    def __init__(self) -> None:
        # Names of older versions in the open chunk, from earlier batches.
        self._earlier: list[pa.Array] = []
        self._repeated: list[int] = []  # rows of the batch with a repeated name
        self._taken: set[str] = set()  # repeated names of older versions in the open chunk

    def add_batch(self, rows: PlanRows) -> None:
        (older_rows, older), (marked_rows, marked) = rows.older_names, rows.marked_keys
        names = pa.concat_arrays([older, marked])
        counts = pc.value_counts(pa.concat_arrays([older, marked.unique()]))
        repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
        is_earlier = pc.is_in(names, pa.chunked_array(self._earlier, pa.string()).combine_chunks())
        self._taken.update(names.filter(is_earlier).to_pylist())
        flags = pc.or_(pc.is_in(names, repeated), is_earlier).to_numpy(zero_copy_only=False)
        self._repeated = np.unique(np.concatenate([older_rows, marked_rows])[flags]).tolist()

    def next_after(self, row: int, otherwise: int) -> int:
        index = bisect_right(self._repeated, row)
        return min([otherwise, *self._repeated[index : index + 1]])

    def collides(self, rows: PlanRows, row: int) -> bool:
        names = (rows.keys[row].as_py(), rows.members[row].as_py())
        return self._is_repeated(row) and not self._taken.isdisjoint(names)

    def take(self, rows: PlanRows, row: int) -> None:
        if self._is_repeated(row) and rows.older[row].as_py():
            self._taken.add(rows.members[row].as_py())

    def _is_repeated(self, row: int) -> bool:
        return self.next_after(row - 1, row + 1) == row

    def keep(self, rows: PlanRows, taken: _Flags) -> None:
        older_rows, older = rows.older_names
        if len(older):
            self._earlier.append(older.filter(pa.array(taken[older_rows])))

    def clear(self) -> None:
        self._earlier.clear()
        self._taken.clear()
