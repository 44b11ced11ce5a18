"""Snapshots: what a source held at one time, as a Parquet file that is sorted by key.

Listings and inventory reports are written as one, whatever order they come in, and it is read back
here. Memory is bounded by a budget and not by the number of objects. Source: "Which objects are to
be archived" in docs/explanation/design.md.
"""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote_from_bytes, unquote_to_bytes

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.errors import IntegrityError, first_line
from caf_pipeline.inventory.key_windows import EVERY_KEY, KeyWindow, bounded
from caf_pipeline.inventory.objects import (
    MAX_KEY_BYTES,
    S3Object,
    VersionCounts,
    is_supported,
    object_version,
    versions_as_json,
)
from caf_pipeline.system.parquet import (
    ROWS_PER_GROUP,
    Query,
    QueryBudget,
    WholeParquet,
    stated,
    sum_of,
    translate_errors,
)


def object_versions(batch: pa.RecordBatch) -> pa.Array:
    """Return `object_version` of each row of a batch with the columns `version_id`, `etag` and
    `size_bytes`.
    """
    by_etag = pc.binary_join_element_wise(
        "etag", batch["etag"], batch["size_bytes"].cast(pa.string()), ":"
    )
    return pc.coalesce(batch["version_id"], by_etag)


SNAPSHOT_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("version_id", pa.string()),
        pa.field("etag", pa.string(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("last_modified", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("storage_class", pa.string(), nullable=False),
        pa.field("checksum", pa.string(), nullable=False),
        pa.field("object_version", pa.string(), nullable=False),
        pa.field("is_latest", pa.bool_(), nullable=False),
        pa.field("is_delete_marker", pa.bool_(), nullable=False),
    ]
)
"""A snapshot: sorted by key (bytes), then last_modified. Fields as in `S3Object`."""

_SNAPSHOT_KEY: Final = "caf.snapshot"

SORT_BUDGET: Final = QueryBudget(memory_bytes=1 << 30)
"""Of a snapshot that is sorted: with more memory it is read less often, once for each window of
keys.
"""

SORTED_BY_MEMORY: Final = 2
"""Bytes of rows for one of memory.

DuckDB 2.0 sorted 4 times its memory of 256 MiB, and not 20 times; less of less memory.
"""

MOST_HELD: Final = ROWS_PER_GROUP
"""Versions of one key that are put in order in memory; a listing with a key of more is sorted on
disk.
"""

_ORDER: Final = ("key", "last_modified", "object_version")

# of a row but its key, as DuckDB has it: two identities of 32 to 48 characters, and the rest
ROW_BYTES: Final = 200
SAMPLED_FOR_A_WINDOW: Final = (
    1000  # keys by which windows are cut: they differ in size by some per cent
)

REPORT_LAG: Final = timedelta(hours=12)
"""An inventory report may lack what was written or deleted shortly before its time, and S3 names no
limit. Half of the time between two daily reports: what one is silent about, the next one tells.
"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a source held at one time, by a listing or an inventory report, as a Parquet file of
    SNAPSHOT_SCHEMA.

    Attributes: listed_at: when the listing began, by this machine's clock; aware. The report's own
        time where it is of one. taken_at: the same by S3's clock. after: the listing holds keys
        greater than this; b"" for all. until: the listing holds keys up to and including this; None
        for all. object_count: delete markers are not objects. unsupported_count: of the objects,
        those whose key cannot be archived. all_versions: whether it has every version and delete
        marker; where not, the current versions only. beside: what keys had beside their current
        versions, in the file or left out of it. run: who took it, as the ledger names holders.
        report: the address of the inventory report that it is of; "" where it is of a listing.
        address: which bucket and prefix it is of.
    """

    path: Path
    source: str
    listed_at: datetime
    after: bytes
    until: bytes | None
    object_count: int
    object_bytes: int
    unsupported_count: int
    taken_at: datetime
    run: str = ""
    report: str = ""
    all_versions: bool = False
    beside: VersionCounts = field(default_factory=VersionCounts)
    address: str = ""

    @property
    def row_count(self) -> int:
        """How many rows the file has."""
        return self.object_count + (self.beside.markers if self.all_versions else 0)

    def versions_as_json(self) -> dict[str, str | int | None]:
        """Return which versions its objects are, and what keys had beside the current ones, as a
        program reads it.
        """
        return versions_as_json(self.beside, all_versions=self.all_versions)

    @property
    def silent_from(self) -> datetime | None:
        """Of a key that was written at this time or later it tells nothing by not having it; None
        where it tells of all.
        """
        return self.taken_at - REPORT_LAG if self.report else None

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.path.stem

    @property
    def keys(self) -> KeyWindow:
        """Which keys the listing covers."""
        return self.after or None, self.until

    @property
    def complete(self) -> bool:
        """Whether the listing covers the whole source."""
        return self.keys == EVERY_KEY


class SnapshotWriter:
    """Takes the pages of a listing, or the files of a report, and makes a snapshot, which has its
    name only when it is finished.

    As a context manager it removes what it wrote unless `finish` was reached. Memory holds a row
    group; files, and a listing whose keys do not ascend, are sorted on disk at the end, within the
    budget. The versions of a key may come in any order.
    """

    def __init__(
        self,
        path: Path,
        *,
        source: str,
        listed_at: datetime,
        taken_at: datetime | None = None,
        after: bytes = b"",
        until: bytes | None = None,
        run: str = "",
        report: str = "",
        address: str = "",
        all_versions: bool = False,
        budget: QueryBudget = SORT_BUDGET,
    ) -> None:
        taken_at = taken_at or listed_at
        self._path = path
        self._begun = Snapshot(
            path,
            source,
            listed_at,
            after,
            until,
            0,
            0,
            0,
            taken_at,
            run,
            report,
            all_versions,
            address=address,
        )
        self._budget = budget
        self._last = b""
        self._ascending = True
        self._held: pa.RecordBatch | None = (
            None  # the rows of the last key, which may have further versions
        )
        self._object_count = self._object_bytes = self._unsupported_count = 0
        self._beside = VersionCounts()
        self._left_out = VersionCounts()
        self._files: Sequence[Path] = ()
        with translate_errors(path):
            self._file = WholeParquet(path, SNAPSHOT_SCHEMA)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.abort()

    def add(self, page: Sequence[S3Object]) -> None:
        """Take a page.

        Raises:
            StagingError: it cannot be written.
        """
        self.add_batch(snapshot_batch(page))

    def add_batch(self, batch: pa.RecordBatch) -> None:
        """Take rows of SNAPSHOT_SCHEMA, as `add` takes objects."""
        keys = batch["key"].to_pylist()
        self._ascending = self._ascending and all(
            one <= two for one, two in pairwise([self._last, *keys])
        )
        self._last = keys[-1] if keys else self._last
        rows = batch if self._held is None else pa.concat_batches([self._held, batch])
        begin = (
            pc.index(rows["key"], rows["key"][-1]).as_py()
            if self._ascending and rows.num_rows
            else rows.num_rows
        )
        self._ascending = self._ascending and rows.num_rows - begin <= MOST_HELD
        self._held = rows.slice(begin) if self._ascending else None
        with translate_errors(self._path):
            self._write_ordered(rows.slice(0, begin) if self._ascending else rows)

    def add_files(self, files: Sequence[Path]) -> None:
        """Take Parquet files of SNAPSHOT_SCHEMA instead of pages, in any order; `finish` reads
        them.
        """
        self._files = files

    def leave_out(self, counts: VersionCounts) -> None:
        """Count what was listed and is not to be in the snapshot."""
        self._left_out += counts

    def finish(self) -> Snapshot:
        """Sort where that is needed, keep each (key, object version) once, and publish.

        Raises:
            StagingError: it cannot be written; there is no snapshot then.
        """
        with translate_errors(self._path):
            if self._held is not None:
                self._write_ordered(self._held)
            if self._files:
                self._sort(self._files)
            elif not self._ascending:
                self._sort_listed()
            snapshot = replace(
                self._begun,
                object_count=self._object_count,
                object_bytes=self._object_bytes,
                unsupported_count=self._unsupported_count,
                beside=self._beside + self._left_out,
            )
            self._file.close({_SNAPSHOT_KEY: _described(snapshot)})
            self._file.publish()
        return snapshot

    def _write_ordered(self, rows: pa.RecordBatch) -> None:
        """Write rows whose keys ascend, the versions of each in the order of a snapshot."""
        if _repeats_keys(rows):
            rows = _without_repeated(rows.sort_by([(name, "ascending") for name in _ORDER]))
        keys = pa.chunked_array([rows["key"].filter(pc.invert(rows["is_delete_marker"]))])
        self._write(
            rows, unsupported=pc.sum(pc.invert(supported_keys(keys))).as_py() if len(keys) else 0
        )

    def _write(self, rows: pa.RecordBatch, *, unsupported: int) -> None:
        beside = versions_beside(rows["is_latest"], rows["is_delete_marker"])
        self._object_count += rows.num_rows - beside.markers
        self._object_bytes += sum_of(rows, "size_bytes")
        self._unsupported_count += unsupported
        self._beside += beside
        self._file.write(rows)

    def _sort_listed(self) -> None:
        listed = self._path.with_name(f".{self._path.name}.listed")
        self._file.whole.path = listed
        self._file.close({})
        self._file.publish()
        try:
            self._sort([listed])
        finally:
            listed.unlink(missing_ok=True)

    def _sort(self, files: Sequence[Path]) -> None:
        self._file.abort()
        with inventory_query(self._path, self._budget) as query:
            query.table("listed", *files)
            self._file = WholeParquet(self._path, SNAPSHOT_SCHEMA)
            self._object_count = self._object_bytes = self._unsupported_count = 0
            self._beside = VersionCounts()
            for batch in _each_once(sorted_by_key(query, self._budget)):
                unsupported = pc.and_not(pc.invert(batch["supported"]), batch["is_delete_marker"])
                self._write(
                    batch.drop_columns("supported").cast(SNAPSHOT_SCHEMA),
                    unsupported=pc.sum(unsupported).as_py() or 0,
                )


def sorted_by_key(query: Query, budget: QueryBudget) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `listed` by key, last_modified, object_version, and whether the key is
    `supported`.

    They are sorted in windows of keys: DuckDB's sort fails on what is many times its memory.
    """
    for window in _windows_of_size(query, SORTED_BY_MEMORY * budget.memory_bytes):
        yield from query.batches(
            f"SELECT *, is_supported(key) AS supported FROM listed WHERE {bounded(window)}"
            " ORDER BY key, last_modified, object_version"
        )


def _windows_of_size(query: Query, size_bytes: int) -> Iterator[KeyWindow]:
    """Yield windows that cover all keys of `listed`, each with about so many bytes of rows, or
    fewer.
    """
    rows, key_bytes = query.rows(
        "SELECT count(*), coalesce(sum(octet_length(key)), 0) FROM listed"
    )[0]
    count = math.ceil((int(key_bytes) + rows * ROW_BYTES) / size_bytes)
    ends: set[bytes] = set()
    if count > 1:
        sampled = (
            f"SELECT key FROM listed USING SAMPLE reservoir({SAMPLED_FOR_A_WINDOW * count} "
            "ROWS) REPEATABLE (1)"
        )
        sample = sorted(bytes(key) for (key,) in query.rows(sampled))
        ends = {sample[len(sample) * number // count] for number in range(1, count)}
    yield from pairwise([None, *sorted(ends), None])


def _each_once(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield sorted rows, of each (key, object version) only the last: the same bytes, so one time
    is as good as another.
    """
    kept: pa.RecordBatch | None = (
        None  # the rows of the last key, which the next batch may go on with
    )
    for batch in batches:
        rows = _without_repeated(batch if kept is None else pa.concat_batches([kept, batch]))
        begin = pc.index(rows["key"], rows["key"][-1]).as_py()
        yield rows.slice(0, begin)
        kept = rows.slice(begin)
    if kept is not None:
        yield kept


def _without_repeated(rows: pa.RecordBatch) -> pa.RecordBatch:
    if not _repeats_keys(rows):
        return rows
    numbered = pa.table(
        {"key": rows["key"], "version": rows["object_version"], "row": np.arange(rows.num_rows)}
    )
    last = numbered.group_by(["key", "version"]).aggregate([("row", "max")])["row_max"]
    return rows if len(last) == rows.num_rows else rows.take(last.combine_chunks().sort())


def _repeats_keys(rows: pa.RecordBatch) -> bool:
    keys = rows["key"]
    return bool(pc.any(pc.equal(keys.slice(1), keys.slice(0, max(0, len(keys) - 1)))).as_py())


def versions_beside(latest: pa.Array, markers: pa.Array) -> VersionCounts:
    """Return what there is beside current objects, by the flags of its rows."""
    older = pc.and_not(pc.invert(latest), markers)
    return VersionCounts(
        *(int(pc.sum(flags).as_py() or 0) for flags in (older, markers, pc.and_(latest, markers)))
    )


def supported_keys(keys: pa.ChunkedArray) -> pa.ChunkedArray:
    """Tell which keys can be archived, as `is_supported` does: of keys that all are, without
    looking at each.
    """
    lengths = pc.min_max(pc.binary_length(keys)).as_py()
    if lengths["min"] > 0 and lengths["max"] <= MAX_KEY_BYTES:
        with contextlib.suppress(pa.ArrowInvalid):  # not UTF-8: each is looked at
            if not pc.any(pc.match_substring(keys.cast(pa.string()), "\0")).as_py():
                return pa.chunked_array([pa.repeat(True, len(keys))])
    return pa.chunked_array([pa.array(map(is_supported, keys.to_pylist()), pa.bool_())])


def inventory_query(path: Path, budget: QueryBudget) -> Query:
    """Return a query that knows `is_supported`, which tests hold to that of `objects`, and
    `percent_encode`.
    """
    return Query(
        path,
        budget,
        functions={"percent_encode": lambda key: quote_from_bytes(key)},  # noqa: PLW0108 - DuckDB counts its parameters
        macros=(
            f"is_supported(key) AS octet_length(key) BETWEEN 1 AND {MAX_KEY_BYTES}"
            " AND coalesce(NOT contains(TRY(decode(key)), chr(0)), false)",
        ),
    )


def show_objects(query: Query, within: str) -> None:
    """Let `snapshot` stand for the objects of `whole_snapshot` that meet a condition, `marker` for
    the delete markers.
    """
    query.view("snapshot", f"SELECT * FROM whole_snapshot WHERE NOT is_delete_marker AND {within}")
    query.view("marker", f"SELECT * FROM whole_snapshot WHERE is_delete_marker AND {within}")


def snapshot_batch(page: Sequence[S3Object]) -> pa.RecordBatch:
    """Return objects as rows of SNAPSHOT_SCHEMA."""
    columns = [[getattr(obj, name) for obj in page] for name in SNAPSHOT_SCHEMA.names]
    arrays = [
        pa.array(column, field.type) for column, field in zip(columns, SNAPSHOT_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SNAPSHOT_SCHEMA)


def _described(snapshot: Snapshot) -> str:
    return json.dumps(
        {
            "source": snapshot.source,
            "listed_at": snapshot.listed_at.isoformat(),
            "taken_at": snapshot.taken_at.isoformat(),
            "after": quote_from_bytes(snapshot.after),
            "until": None if snapshot.until is None else quote_from_bytes(snapshot.until),
            "complete": snapshot.complete,
            "object_count": snapshot.object_count,
            "object_bytes": snapshot.object_bytes,
            "unsupported_count": snapshot.unsupported_count,
            "run": snapshot.run,
            "report": snapshot.report,
            "address": snapshot.address,
            "all_versions": snapshot.all_versions,
            "beside": asdict(snapshot.beside),
        },
        sort_keys=True,
    )


TAKE_AGAIN: Final = "take the inventory again"


def read_snapshot(path: Path) -> Snapshot:
    """Return what a snapshot's file says of itself; its rows are not read.

    Raises:
        IntegrityError: there is no such file, or it is not a snapshot.
    """
    with opened_parquet(path) as file:
        schema, metadata = file.schema_arrow, file.metadata
    try:
        snapshot = _parsed(path, json.loads(stated(metadata, _SNAPSHOT_KEY)))
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"{path} is not a snapshot: its description is missing or damaged", hint=TAKE_AGAIN
        ) from error
    if schema.remove_metadata() != SNAPSHOT_SCHEMA:
        raise IntegrityError(f"the columns of {path} are not those of a snapshot", hint=TAKE_AGAIN)
    if metadata.num_rows != snapshot.row_count:
        raise IntegrityError(
            f"{path} has {metadata.num_rows} rows and declares {snapshot.row_count}",
            hint=TAKE_AGAIN,
        )
    return snapshot


def read_objects(path: Path) -> Iterator[S3Object]:
    """Yield the objects of a Parquet file of SNAPSHOT_SCHEMA in its order, a part of a row group in
    memory.

    Raises:
        IntegrityError: there is no such file, or it cannot be read.
    """
    with opened_parquet(path) as file:
        for batch in file.iter_batches(batch_size=8192):
            yield from map(s3_object, batch.to_pylist())


def s3_object(row: dict[str, Any]) -> S3Object:
    """Return the object of a row of SNAPSHOT_SCHEMA."""
    identity = row.pop("object_version")
    version = object_version(row["version_id"], row["etag"], row["size_bytes"])
    rewritten_at = (
        datetime.fromisoformat(identity.removeprefix(f"{version}:"))
        if identity != version
        else None
    )
    return S3Object(**row, rewritten_at=rewritten_at)


def require_whole(path: Path) -> None:
    """Read every page of a snapshot and compare its checksum; DuckDB, which reads it for a plan,
    does not.

    The checksums say nothing of the pages' headers: of a page that is passed over, the counts tell.

    Raises:
        IntegrityError: there is no such file, or it is damaged.
    """
    said = read_snapshot(path)
    row_count = object_bytes = 0
    beside = VersionCounts()
    with opened_parquet(path) as file:
        for batch in file.iter_batches():
            row_count += batch.num_rows
            object_bytes += sum_of(batch, "size_bytes")
            if said.all_versions:
                beside += versions_beside(batch["is_latest"], batch["is_delete_marker"])
    if (row_count - beside.markers, object_bytes) != (said.object_count, said.object_bytes):
        raise IntegrityError(
            f"{path} declares {said.object_count} objects of {said.object_bytes} bytes, and has"
            f" {row_count - beside.markers} of {object_bytes}",
            hint=TAKE_AGAIN,
        )
    if said.all_versions and beside != said.beside:
        raise IntegrityError(f"{path} declares {said.beside}, and has {beside}", hint=TAKE_AGAIN)


@contextlib.contextmanager
def opened_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a file; damage found while it is read raises an error that names the file."""
    with reading_parquet(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        yield file


def has_rows(path: Path) -> bool:
    """Tell whether a file has any; raises IntegrityError where it cannot be read."""
    with opened_parquet(path) as file:
        return bool(file.metadata.num_rows)


@contextlib.contextmanager
def reading_parquet(path: Path) -> Iterator[None]:
    """Translate what pyarrow raises while this file, and no other, is read: IntegrityError, which
    names it.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise IntegrityError(f"there is no file {path}", hint=TAKE_AGAIN) from error
    except (OSError, pa.ArrowException, ValueError) as error:
        raise IntegrityError(
            f"{path} cannot be read as Parquet: {first_line(error)}", hint=TAKE_AGAIN
        ) from error


def _parsed(path: Path, described: Mapping[str, Any]) -> Snapshot:
    until = described["until"]
    return Snapshot(
        path=path,
        source=str(described["source"]),
        listed_at=datetime.fromisoformat(described["listed_at"]),
        after=unquote_to_bytes(described["after"]),
        until=None if until is None else unquote_to_bytes(until),
        object_count=int(described["object_count"]),
        object_bytes=int(described["object_bytes"]),
        unsupported_count=int(described["unsupported_count"]),
        taken_at=datetime.fromisoformat(described["taken_at"]),
        run=str(described["run"]),
        report=str(described["report"]),
        address=str(described["address"]),
        all_versions=bool(described["all_versions"]),
        beside=VersionCounts(**described["beside"]),
    )
