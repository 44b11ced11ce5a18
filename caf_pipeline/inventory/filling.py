"""How large a chunk gets, object by object, exactly: computed for many rows at once, as columns.

    Rows        some objects in plan order: the names they would have, and what each adds to a chunk
    Filling     a chunk while it is filled: its sizes, and how many of the next rows it takes
    EqualNames  which of the next rows must not follow what it has

Which chunk a row goes to, and what a plan is, is in `plan`. Memory is a batch of rows, and for the
chunk under way the names of older versions. Source: "A chunk" in docs/explanation/design.md; an
entry's size in the index is that of `caf.index`, which a test compares.
"""

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

MOST_HEADERS_BYTES: Final = 16 << 10
"""More than the headers of an object add to a manifest: S3 takes 8 KiB of them.

An object, or a part, that did not fit in its chunk for headers that no listing shows would never be
archived.
"""


_TENS: Final = 10 ** np.arange(1, 19, dtype=np.int64)
_LONGER: Final = bytes(
    len(escape_key(bytes([code]))) - 1 if code < 0x80 else 0 for code in range(0x100)
)
"""By how many bytes the escape of each byte is longer than the byte."""

_SEPARATORS: Final = (
    "\u2028".encode(),
    "\u2029".encode(),
)  # escaped, too; both begin with the same two bytes
_SEPARATOR: Final = re.compile(b"|".join(_SEPARATORS))
_SEPARATOR_LONGER: Final = len(escape_key(_SEPARATORS[0])) - len(_SEPARATORS[0])
_ENTRY_BYTES: Final = (
    index_entry_size_bytes("", 0, 0) - 2
)  # of an entry without its name and the digits of its range
_ROW_BYTES: Final = manifest_row_bound(b"", None, "")


def is_like_ours(member: str) -> bool:
    """Tell whether a name is that of one of our own two members, or one that they may give way
    to.
    """
    return member.startswith(".caf/") and member.rstrip("~") in (HEAD_MEMBER, MANIFEST_MEMBER)


class Rows:
    """Objects in plan order, and what each of them adds to a chunk.

    Attributes: members: the name that each gets in a chunk that has a newer version of the key,
        too; of a key's newest version the key. older: which rows have a next version. size_bytes:
        of the objects.
    """

    def __init__(self, batch: pa.RecordBatch, next_key: bytes | None, most_bytes: int) -> None:
        """Take a batch of SNAPSHOT_SCHEMA, which `next_key` follows; no chunk takes an object
        larger than `most_bytes`.
        """
        self.count = batch.num_rows
        self._batch = batch
        self.keys = batch["key"].cast(pa.string())
        self.older = pc.equal(
            batch["key"],
            pa.concat_arrays([batch["key"].slice(1), pa.array([next_key], pa.binary())]),
        )
        self.older = self.older.fill_null(False)
        self.members = self._named()
        self.size_bytes: _Numbers = batch["size_bytes"].to_numpy()
        # A sum of sizes past any limit must not overflow; an object of such a size is alone in its
        # chunk or in none.
        self.body_bytes = np.minimum(self.size_bytes, most_bytes + 1)
        self.ours = self._like_ours()
        self.entry_bytes = _ENTRY_BYTES + _escaped_bytes(self.members) + 1
        named = [at for at, name in self.ours if name == self.members[at].as_py()]
        self.entry_bytes[named] += 2  # our own names may have to give way, by a character each
        self.manifest_bytes = self._manifest_bytes()

    def of(self, rows: _Numbers) -> list[dict[str, Any]]:
        """Return these rows as of SNAPSHOT_SCHEMA."""
        found: list[dict[str, Any]] = self._batch.take(pa.array(rows)).to_pylist()
        return found

    def _named(self) -> pa.Array:
        if not pc.any(self.older).as_py():
            return self.keys
        version_ids = self._batch["version_id"]
        versions = pc.if_else(
            pc.equal(version_ids, "").fill_null(True), self._batch["etag"], version_ids
        )
        return pc.if_else(
            self.older, pc.binary_join_element_wise(self.keys, versions, VERSION_MARK), self.keys
        )

    def _like_ours(self) -> list[tuple[int, str]]:
        """Return the names like our own that rows may have, with their rows: without its next
        version, a version has the key.
        """
        found = np.flatnonzero(
            pc.starts_with(self.keys, ".caf/").to_numpy(zero_copy_only=False)
        ).tolist()
        return [
            (at, name)
            for at in found
            for name in {self.keys[at].as_py(), self.members[at].as_py()}
            if is_like_ours(name)
        ]

    def _manifest_bytes(self) -> _Numbers:
        batch = self._batch
        sizes: _Numbers = _ROW_BYTES + 2 * _lengths(batch["key"])
        sizes += _characters(batch["version_id"]) + _characters(batch["etag"])
        rewritten = pc.not_equal(batch["object_version"], object_versions(batch)).to_numpy(
            zero_copy_only=False
        )
        sizes += REWRITTEN_BYTES * rewritten
        return sizes

    @cached_property
    def entry_bytes_alone(self) -> _Numbers:
        """As `entry_bytes`, of each row in a chunk of its own, where it has the key."""
        if not pc.any(self.older).as_py():
            return self.entry_bytes
        alone: _Numbers = _ENTRY_BYTES + _escaped_bytes(self.keys) + 1
        alone[[at for at, _ in self.ours]] += 2
        return alone

    @cached_property
    def hashed(self) -> tuple[_Numbers, memoryview]:
        """What of the rows is hashed, `<key> NUL <identity> NUL <size> NUL` of each, and where each
        begins and ends.
        """
        sizes = self._batch["size_bytes"].cast(pa.string()).cast(pa.binary())
        identities = self._batch["object_version"].cast(pa.binary())
        joined = pc.binary_join_element_wise(self._batch["key"], identities, sizes, b"", b"\0")
        return _ends(joined), memoryview(joined.buffers()[2])

    @cached_property
    def older_names(self) -> tuple[_Numbers, pa.Array]:
        """The rows that have a next version, and their names in a chunk that has a newer one."""
        return np.flatnonzero(self.older.to_numpy(zero_copy_only=False)), self.members.filter(
            self.older
        )

    @cached_property
    def marked_keys(self) -> tuple[_Numbers, pa.Array]:
        """The rows whose keys could be the name of an older version of another key, and these
        keys.
        """
        marked = pc.match_substring(self.keys, VERSION_MARK)
        return np.flatnonzero(marked.to_numpy(zero_copy_only=False)), self.keys.filter(marked)


def _ends(texts: pa.Array) -> _Numbers:
    """Return where each text ends in the buffer, and before all where the first one begins."""
    offsets = np.frombuffer(texts.buffers()[1], np.int32)
    return offsets[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)


def _lengths(texts: pa.Array) -> _Numbers:
    lengths: _Numbers = pc.binary_length(texts).to_numpy().astype(np.int64)
    return lengths


def _characters(texts: pa.Array) -> _Numbers:
    lengths: _Numbers = pc.utf8_length(texts).fill_null(0).to_numpy().astype(np.int64)
    return lengths


def _escaped_bytes(texts: pa.Array) -> _Numbers:
    """Return the length of each text as the index escapes it."""
    ends = _ends(texts)
    lengths = np.diff(ends)
    data = memoryview(texts.buffers()[2] or b"")[ends[0] : ends[-1]].tobytes()
    longer = np.frombuffer(bytearray(data.translate(_LONGER)), np.uint8)
    if _SEPARATORS[0][:2] in data:
        begun = np.array([match.start() for match in _SEPARATOR.finditer(data)], np.int64)
        longer[begun] = _SEPARATOR_LONGER
    if longer.any():
        sums = np.concatenate([[0], np.cumsum(longer, dtype=np.int64)])
        lengths += np.diff(sums[ends - ends[0]])
    return lengths


def _digits(numbers: _Numbers) -> _Numbers:
    return np.searchsorted(_TENS, numbers, side="right") + 1


@dataclass(frozen=True, slots=True)
class _Grown:
    """Sizes of a chunk as they would be with a row, for each of some rows: with all rows before it,
    too, or with it alone.
    """

    end: _Numbers  # of the bodies
    index: _Numbers
    manifest: _Numbers


@dataclass(slots=True)
class Filling:
    """A chunk while it is filled: its exact size so far, and what the next objects would make of
    it.
    """

    limits: Limits
    object_count: int = 0
    object_bytes: int = 0
    taken: set[str] = field(default_factory=set)  # names like our own two
    position: int = HEAD_SIZE_BYTES
    manifest: int = MANIFEST_FIXED_BYTES
    index: int = 0

    def __post_init__(self) -> None:
        most = self.limits.max_bytes
        ours = (
            index_entry_size_bytes(HEAD_MEMBER, 0, HEAD_SIZE_BYTES)
            + 1
            + index_entry_size_bytes(MANIFEST_MEMBER, most, most)
        )
        self.index = EMPTY_INDEX_SIZE_BYTES + ours

    @property
    def size_bytes(self) -> int:
        """Bodies, index and footer: what counts towards a target."""
        return self.position + self.index + FOOTER_SIZE_BYTES

    def grown(self, rows: Rows, first: int, stop: int) -> _Grown:
        """Return the sizes with each of these rows and all before it."""
        end = self.position + np.cumsum(rows.body_bytes[first:stop])
        digits = _digits(end)
        begins = np.empty_like(digits)
        begins[:1] = _digits(np.array([self.position]))
        begins[1:] = digits[:-1]
        manifest = rows.manifest_bytes[first:stop].copy()
        manifest[-self.object_count % MANIFEST_GROUP_ROWS :: MANIFEST_GROUP_ROWS] += (
            MANIFEST_GROUP_BYTES
        )
        return _Grown(
            end,
            self.index + np.cumsum(rows.entry_bytes[first:stop] + digits + begins),
            self.manifest + np.cumsum(manifest),
        )

    def fitting(self, grown: _Grown, target_bytes: int, most_bytes: int) -> int:
        """Return how many of the rows stay within the target, but for the manifest, within
        `most_bytes`, and the limits.
        """
        without = grown.end + grown.index + FOOTER_SIZE_BYTES
        room = (
            np.searchsorted(without, target_bytes, side="right"),
            np.searchsorted(without + grown.manifest, most_bytes, side="right"),
            np.searchsorted(grown.index, self.limits.max_index_bytes, side="right"),
        )
        return min(
            len(without),
            max(0, self.limits.max_members - 2 - self.object_count),
            *(int(count) for count in room),
        )

    def take(self, grown: _Grown, rows: Rows, first: int, count: int) -> None:
        """Count in the first rows of those that it would have grown by."""
        last = count - 1
        self.position, self.index, self.manifest = (
            int(sizes[last]) for sizes in (grown.end, grown.index, grown.manifest)
        )
        self.object_count += count
        self.object_bytes += int(rows.size_bytes[first : first + count].sum())
        self.taken.update(name for at, name in rows.ours if first <= at < first + count)


def fit_alone(rows: Rows, limits: Limits) -> _Flags:
    """Tell of each row whether a chunk of nothing else could hold it, whatever its headers are."""
    empty = Filling(limits)
    end = empty.position + rows.body_bytes
    index = (
        empty.index + rows.entry_bytes_alone + _digits(np.array([empty.position])) + _digits(end)
    )
    manifest = empty.manifest + MANIFEST_GROUP_BYTES + rows.manifest_bytes + MOST_HEADERS_BYTES
    whole = end + index + manifest + FOOTER_SIZE_BYTES
    fits: _Flags = (
        (whole <= limits.max_bytes) & (index <= limits.max_index_bytes) & (limits.max_members >= 3)
    )
    return fits


class EqualNames:
    """Notices objects that would have the name of an older version of another key, or of the same,
    in one chunk.

    A key is a name in each chunk that has a version of it, whichever is the newest there. Hardly
    any inventory has equal names: they are compared as columns, and one by one only those that are
    there twice.
    """

    def __init__(self) -> None:
        self._kept: list[
            pa.Array
        ] = []  # names of older versions in the chunk under way, but for those of the batch
        self._equal: list[int] = []  # rows of the batch whose names are there twice
        self._taken: set[str] = set()  # by older versions in the chunk under way, of such names

    def look_at(self, rows: Rows) -> None:
        """Take the next batch of rows."""
        (of_older, older), (of_marked, marked) = rows.older_names, rows.marked_keys
        names = pa.concat_arrays([older, marked])
        counts = pc.value_counts(pa.concat_arrays([older, marked.unique()]))
        often = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
        earlier = pc.is_in(names, pa.chunked_array(self._kept, pa.string()).combine_chunks())
        self._taken.update(names.filter(earlier).to_pylist())
        equal = pc.or_(pc.is_in(names, often), earlier).to_numpy(zero_copy_only=False)
        self._equal = np.unique(np.concatenate([of_older, of_marked])[equal]).tolist()

    def next_after(self, at: int, otherwise: int) -> int:
        """Return the next row after this one that may meet its like; `otherwise` where there is
        none before it.
        """
        place = bisect_right(self._equal, at)
        return min(otherwise, self._equal[place]) if place < len(self._equal) else otherwise

    def meets(self, rows: Rows, at: int) -> bool:
        """Tell whether an older version in the chunk under way has the name that this row, or its
        key's newest, would have.
        """
        return self._is_equal(at) and not self._taken.isdisjoint(
            (rows.keys[at].as_py(), rows.members[at].as_py())
        )

    def take(self, rows: Rows, at: int) -> None:
        """Let the chunk under way have this row; those that follow up to `next_after` have no
        like.
        """
        if self._is_equal(at) and rows.older[at].as_py():
            self._taken.add(rows.members[at].as_py())

    def _is_equal(self, at: int) -> bool:
        return self.next_after(at - 1, at + 1) == at

    def keep(self, rows: Rows, taken: _Flags) -> None:
        """Remember the names of the older versions of this batch that the chunk under way took."""
        of_older, older = rows.older_names
        if len(older):
            self._kept.append(older.filter(pa.array(taken[of_older])))

    def clear(self) -> None:
        """Begin the next chunk."""
        self._kept.clear()
        self._taken.clear()
