"""Snapshots of a source's objects, and which of them are not yet archived.

Holds the Parquet schemas of snapshots and standings, and the set arithmetic between them: what is to be archived, and where each
object of a snapshot has ended. All of it is files in, files out, in memory that is bounded by
a budget and not by the number of objects.
Source: "Which objects are to be archived" in docs/design.md.
"""

import contextlib
import json
import math
from collections import Counter
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
from caf_pipeline.inventory.filters import NO_FILTER, ObjectFilter
from caf_pipeline.inventory.objects import MAX_KEY_BYTES, S3Object, VersionCounts, is_supported, object_version, versions_as_json
from caf_pipeline.system.ahead import one_ahead
from caf_pipeline.system.parquet import (
    DEFAULT_BUDGET,
    ROWS_PER_GROUP,
    Query,
    QueryBudget,
    WholeParquet,
    files_of,
    sum_of,
    translate_errors,
    write_whole,
)


def object_versions(batch: pa.RecordBatch) -> pa.Array:
    """Return `object_version` of each row of a batch with the columns `version_id`, `etag` and `size_bytes`."""
    by_etag = pc.binary_join_element_wise("etag", batch["etag"], batch["size_bytes"].cast(pa.string()), ":")
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

_EARLIER_SCHEMA: Final = pa.schema(list(SNAPSHOT_SCHEMA)[:-2])
"""Of the snapshots of earlier versions, which have current objects only."""


STANDING_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("object_version", pa.string(), nullable=False),
        pa.field("standing", pa.string(), nullable=False),  # "located", "claimed", "skipped"
        pa.field("reason", pa.string()),  # of a skip
        pa.field("due", pa.bool_(), nullable=False),  # a skip that may be planned again now; False for the others
        pa.field("last_modified", pa.timestamp("us", tz="UTC")),  # null where an earlier version wrote the row
    ]
)
"""What the ledger knows of a source's objects. For an unsupported key, `key` holds its percent-encoded form."""

LOCATED_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("object_version", pa.string(), nullable=False),
        pa.field("part", pa.int32(), nullable=False),
        pa.field("part_count", pa.int32(), nullable=False),
        pa.field("caf_file_id", pa.int64(), nullable=False),
        pa.field("start_byte", pa.int64(), nullable=False),  # CAF coordinates
        pa.field("end_byte", pa.int64(), nullable=False),  # exclusive
        pa.field("version_id", pa.string()),
        pa.field("etag", pa.string(), nullable=False),
        pa.field("sha256", pa.binary(), nullable=False),
        pa.field("last_modified", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""The locations of a source's objects, as the ledger has them. A whole object has `part` and `part_count` 0; parts count
from 1."""

EXCEPTION_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("stated_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("object_version", pa.string()),  # null: the key was gone
        pa.field("last_modified", pa.timestamp("us", tz="UTC")),  # the headers of this LastModified are those archived
    ]
)
"""What the bucket had as current, where the locations' LastModified tell otherwise (`current`)."""


# --- snapshots -------------------------------------------------------------------------------------------------------

_SNAPSHOT_KEY: Final = b"caf.snapshot"

SORT_BUDGET: Final = QueryBudget(memory_bytes=1 << 30)
"""Of a snapshot that is sorted: with more memory it is read less often, once for each window of keys."""

SORTED_BY_MEMORY: Final = 2
"""Bytes of rows for one of memory. DuckDB 2.0 sorted 4 times its memory of 256 MiB, and not 20 times; less of less memory."""

MOST_HELD: Final = ROWS_PER_GROUP
"""Versions of one key that are put in order in memory; a listing with a key of more is sorted on disk."""

_ORDER: Final = ("key", "last_modified", "object_version")

ROW_BYTES: Final = 200  # of a row but its key, as DuckDB has it: two identities of 32 to 48 characters, and the rest
SAMPLED_FOR_A_WINDOW: Final = 1000  # keys by which windows are cut: they differ in size by some per cent

KeyWindow = tuple[bytes | None, bytes | None]
"""Keys greater than the first, up to and including the second; None: no bound."""

EVERY_KEY: Final[KeyWindow] = (None, None)

REPORT_LAG: Final = timedelta(hours=12)
"""An inventory report may lack what was written or deleted shortly before its time, and S3 names no limit. Half of the time
between two daily reports: what one is silent about, the next one tells."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a source held at one time, by a listing or an inventory report, as a Parquet file of SNAPSHOT_SCHEMA.

    Attributes:
        listed_at: when the listing began, by this machine's clock; aware. The report's own time where it is of one.
        taken_at: the same by S3's clock; by this machine's where an earlier version took it.
        after: the listing holds keys greater than this; b"" for all.
        until: the listing holds keys up to and including this; None for all.
        object_count: delete markers are not objects.
        unsupported_count: of the objects, those whose key cannot be archived.
        all_versions: whether it has every version and delete marker; where not, the current versions only.
        beside: what keys had beside their current versions, in the file or left out of it; None where an earlier version took it.
        run: who took it, as the ledger names holders; "" where an earlier version took it.
        report: the address of the inventory report that it is of; "" where it is of a listing.
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
    beside: VersionCounts | None = None

    @property
    def row_count(self) -> int:
        """How many rows the file has."""
        return self.object_count + (self.beside.markers if self.all_versions and self.beside else 0)

    def versions_as_json(self) -> dict[str, str | int | None]:
        """Return which versions its objects are, and what keys had beside the current ones, as a program reads it."""
        return versions_as_json(self.beside, all_versions=self.all_versions)

    @property
    def silent_from(self) -> datetime | None:
        """Of a key that was written at this time or later it tells nothing by not having it; None where it tells of all."""
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
    """Takes the pages of a listing, or the files of a report, and makes a snapshot, which has its name only when it is finished.

    As a context manager it removes what it wrote unless `finish` was reached. Memory holds a row group; files, and a listing
    whose keys do not ascend, are sorted on disk at the end, within the budget. The versions of a key may come in any order.
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
        all_versions: bool = False,
        budget: QueryBudget = SORT_BUDGET,
    ) -> None:
        taken_at = taken_at or listed_at
        self._path = path
        self._begun = Snapshot(path, source, listed_at, after, until, 0, 0, 0, taken_at, run, report, all_versions)
        self._budget = budget
        self._last = b""
        self._ascending = True
        self._held: pa.RecordBatch | None = None  # the rows of the last key, which may have further versions
        self._object_count = self._object_bytes = self._unsupported_count = 0
        self._beside = VersionCounts()
        self._left_out = VersionCounts()
        self._files: Sequence[Path] = ()
        with translate_errors(path):
            self._file = WholeParquet(path, SNAPSHOT_SCHEMA)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
        self._ascending = self._ascending and all(one <= two for one, two in pairwise([self._last, *keys]))
        self._last = keys[-1] if keys else self._last
        rows = batch if self._held is None else pa.concat_batches([self._held, batch])
        begin = pc.index(rows["key"], rows["key"][-1]).as_py() if self._ascending and rows.num_rows else rows.num_rows
        self._ascending = self._ascending and rows.num_rows - begin <= MOST_HELD
        self._held = rows.slice(begin) if self._ascending else None
        with translate_errors(self._path):
            self._write_ordered(rows.slice(0, begin) if self._ascending else rows)

    def add_files(self, files: Sequence[Path]) -> None:
        """Take Parquet files of SNAPSHOT_SCHEMA instead of pages, in any order; `finish` reads them."""
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
            self._file.close({_SNAPSHOT_KEY.decode(): _described(snapshot)})
            self._file.publish()
        return snapshot

    def _write_ordered(self, rows: pa.RecordBatch) -> None:
        """Write rows whose keys ascend, the versions of each in the order of a snapshot."""
        if _repeats_keys(rows):
            rows = _without_repeated(rows.sort_by([(name, "ascending") for name in _ORDER]))
        keys = pa.chunked_array([rows["key"].filter(pc.invert(rows["is_delete_marker"]))])
        self._write(rows, unsupported=pc.sum(pc.invert(_supported(keys))).as_py() if len(keys) else 0)

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
                self._write(batch.drop_columns("supported").cast(SNAPSHOT_SCHEMA), unsupported=pc.sum(unsupported).as_py() or 0)


def sorted_by_key(query: Query, budget: QueryBudget) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `listed` by key, last_modified, object_version, and whether the key is `supported`.

    They are sorted in windows of keys: DuckDB's sort fails on what is many times its memory.
    """
    for window in _windows_of_size(query, SORTED_BY_MEMORY * budget.memory_bytes):
        yield from query.batches(
            f"SELECT *, is_supported(key) AS supported FROM listed WHERE {bounded(window)}"
            " ORDER BY key, last_modified, object_version"
        )


def _windows_of_size(query: Query, size_bytes: int) -> Iterator[KeyWindow]:
    """Yield windows that cover all keys of `listed`, each with about so many bytes of rows, or fewer."""
    rows, key_bytes = query.rows("SELECT count(*), coalesce(sum(octet_length(key)), 0) FROM listed")[0]
    count = math.ceil((int(key_bytes) + rows * ROW_BYTES) / size_bytes)
    ends: set[bytes] = set()
    if count > 1:
        sampled = f"SELECT key FROM listed USING SAMPLE reservoir({SAMPLED_FOR_A_WINDOW * count} ROWS) REPEATABLE (1)"
        sample = sorted(bytes(key) for (key,) in query.rows(sampled))
        ends = {sample[len(sample) * number // count] for number in range(1, count)}
    yield from pairwise([None, *sorted(ends), None])


def _each_once(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield sorted rows, of each (key, object version) only the last: the same bytes, so one time is as good as another."""
    kept: pa.RecordBatch | None = None  # the rows of the last key, which the next batch may go on with
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
    numbered = pa.table({"key": rows["key"], "version": rows["object_version"], "row": np.arange(rows.num_rows)})
    last = numbered.group_by(["key", "version"]).aggregate([("row", "max")])["row_max"]
    return rows if len(last) == rows.num_rows else rows.take(last.combine_chunks().sort())


def _repeats_keys(rows: pa.RecordBatch) -> bool:
    keys = rows["key"]
    return bool(pc.any(pc.equal(keys.slice(1), keys.slice(0, max(0, len(keys) - 1)))).as_py())


def versions_beside(latest: pa.Array, markers: pa.Array) -> VersionCounts:
    """Return what there is beside current objects, by the flags of its rows."""
    older = pc.and_not(pc.invert(latest), markers)
    return VersionCounts(*(int(pc.sum(flags).as_py() or 0) for flags in (older, markers, pc.and_(latest, markers))))


def inventory_query(path: Path, budget: QueryBudget) -> Query:
    """Return a query that knows `is_supported`, which a test holds to that of this module, and `percent_encode`."""
    return Query(
        path,
        budget,
        functions={"percent_encode": lambda key: quote_from_bytes(key)},  # noqa: PLW0108 - DuckDB counts its parameters
        macros=(
            f"is_supported(key) AS octet_length(key) BETWEEN 1 AND {MAX_KEY_BYTES}"
            " AND coalesce(NOT contains(TRY(decode(key)), chr(0)), false)",
        ),
    )


def show_snapshot(query: Query, name: str, path: Path) -> None:
    """Give the rows of a snapshot, which an earlier version may have taken, a name."""
    query.table(f"{name}_rows", path)
    old = "is_latest" not in pq.read_schema(path).names
    query.view(name, f"SELECT *{', true AS is_latest, false AS is_delete_marker' if old else ''} FROM {name}_rows")


def snapshot_batch(page: Sequence[S3Object]) -> pa.RecordBatch:
    """Return objects as rows of SNAPSHOT_SCHEMA."""
    columns = [[getattr(obj, name) for obj in page] for name in SNAPSHOT_SCHEMA.names]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SNAPSHOT_SCHEMA, strict=True)]
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
            "all_versions": snapshot.all_versions,
            "beside": snapshot.beside and asdict(snapshot.beside),
        },
        sort_keys=True,
    )


_AGAIN: Final = "take the inventory again"


def read_snapshot(path: Path) -> Snapshot:
    """Return what a snapshot's file says of itself; its rows are not read.

    Raises:
        IntegrityError: there is no such file, or it is not a snapshot.
    """
    with _opened(path) as file:
        schema, metadata = file.schema_arrow, file.metadata
    try:
        snapshot = _parsed(path, json.loads((metadata.metadata or {})[_SNAPSHOT_KEY]))
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"{path} is not a snapshot: its description is missing or damaged", hint=_AGAIN) from error
    if schema.remove_metadata() not in (SNAPSHOT_SCHEMA, _EARLIER_SCHEMA):
        raise IntegrityError(f"the columns of {path} are not those of a snapshot", hint=_AGAIN)
    if metadata.num_rows != snapshot.row_count:
        raise IntegrityError(f"{path} has {metadata.num_rows} rows and declares {snapshot.row_count}", hint=_AGAIN)
    return snapshot


def read_objects(path: Path) -> Iterator[S3Object]:
    """Yield the objects of a Parquet file of SNAPSHOT_SCHEMA in its order, a part of a row group in memory.

    Raises:
        IntegrityError: there is no such file, or it cannot be read.
    """
    with _opened(path) as file:
        for batch in file.iter_batches(batch_size=8192):
            yield from map(s3_object, batch.to_pylist())


def s3_object(row: dict[str, Any]) -> S3Object:
    """Return the object of a row of SNAPSHOT_SCHEMA."""
    identity = row.pop("object_version")
    return S3Object(**row, rewritten=identity != object_version(row["version_id"], row["etag"], row["size_bytes"]))


def require_whole(path: Path) -> None:
    """Read every page of a snapshot and compare its checksum; DuckDB, which reads it for a plan, does not.

    The checksums say nothing of the pages' headers: of a page that is passed over, the counts tell.

    Raises:
        IntegrityError: there is no such file, or it is damaged.
    """
    said = read_snapshot(path)
    row_count = object_bytes = 0
    beside = VersionCounts()
    with _opened(path) as file:
        for batch in file.iter_batches():
            row_count += batch.num_rows
            object_bytes += sum_of(batch, "size_bytes")
            if said.all_versions:
                beside += versions_beside(batch["is_latest"], batch["is_delete_marker"])
    if (row_count - beside.markers, object_bytes) != (said.object_count, said.object_bytes):
        raise IntegrityError(
            f"{path} declares {said.object_count} objects of {said.object_bytes} bytes, and has"
            f" {row_count - beside.markers} of {object_bytes}",
            hint=_AGAIN,
        )
    if said.all_versions and beside != said.beside:
        raise IntegrityError(f"{path} declares {said.beside}, and has {beside}", hint=_AGAIN)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a file; damage found while it is read raises an error that names the file."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except FileNotFoundError as error:
        raise IntegrityError(f"there is no file {path}", hint=_AGAIN) from error
    except (OSError, pa.ArrowException, ValueError) as error:
        raise IntegrityError(f"{path} cannot be read as Parquet: {first_line(error)}", hint=_AGAIN) from error


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
        taken_at=datetime.fromisoformat(described.get("taken_at", described["listed_at"])),
        run=str(described.get("run", "")),
        report=str(described.get("report", "")),
        all_versions=bool(described.get("all_versions", False)),
        beside=VersionCounts(**described["beside"]) if described.get("beside") else None,
    )


# --- what is not yet archived ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delta:
    """The objects of a snapshot that are to be planned, sorted by key, then last modified (SNAPSHOT_SCHEMA).

    Attributes:
        unsupported: a file of those that are to be recorded as skipped for their key, in the same form.
        left_out: numbers of objects that are neither located nor claimed, and that a filter leaves out, by the filter.
    """

    path: Path
    object_count: int
    object_bytes: int
    unsupported: Path
    unsupported_count: int
    left_out: Mapping[str, int]


# A key that holds a percent sign may equal the encoded form of another one, so that the reason tells which of them a row means.
_BLOCKED: Final = """EXISTS (SELECT 1 FROM whole_standing AS known
    WHERE known.key = {key} AND known.object_version = listed.object_version AND {within}
    AND (known.standing <> 'skipped' OR {skipped}) AND (known.reason IS NOT DISTINCT FROM 'unsupported_key') = {encoded})"""

_UNSUPPORTED: Final = f"""SELECT * FROM (SELECT *, encode(percent_encode(key)) AS encoded_key FROM refused) AS listed
    WHERE NOT {_BLOCKED.format(key="listed.encoded_key", encoded="true", within="true", skipped="NOT known.due")}
    ORDER BY key, last_modified, object_version"""


def not_yet_archived(
    snapshot: Path, standing: Path, out: Path, *, filters: ObjectFilter = NO_FILTER, budget: QueryBudget = DEFAULT_BUDGET
) -> Delta:
    """Write the objects of `snapshot` that are neither located, nor claimed, nor skipped without being due again.

    Args:
        snapshot: a Parquet file of SNAPSHOT_SCHEMA, sorted by key, then last modified.
        standing: one of STANDING_SCHEMA; several rows of one object block it where any of them does.
        out: gets the objects whose key is supported, `<its stem>.unsupported.parquet` beside it the others. Both are
            replaced where they exist, and each is whole or not there at all.
        filters: leave objects out.
        budget: bounds the memory.

    Raises:
        StagingError: a file cannot be written. IntegrityError: a file cannot be read.
    """
    unsupported, refused = (out.with_name(f"{out.stem}.{kind}.parquet") for kind in ("unsupported", "refused"))
    object_bytes = 0
    left_out: Counter[str] = Counter()
    with translate_errors(out), inventory_query(out, budget) as query:
        query.table("whole_standing", standing)
        apart = WholeParquet(refused, SNAPSHOT_SCHEMA)

        def wanted() -> Iterator[pa.RecordBatch]:
            nonlocal object_bytes
            for rows in _windows_of_rows(snapshot):
                supported = _supported(rows["key"])
                for batch in rows.filter(pc.invert(supported)).to_batches():
                    apart.write(batch)
                kept = _not_left_out(query, rows.filter(supported), filters, left_out)
                for batch in kept.filter(_not_blocked(query, kept, skipped="NOT known.due")).to_batches():
                    object_bytes += sum_of(batch, "size_bytes")
                    yield batch

        try:
            found = write_whole(one_ahead(wanted()), out, SNAPSHOT_SCHEMA)
            apart.close({})
            apart.publish()
            query.table("refused", refused)
            skipped = write_whole(query.batches(_UNSUPPORTED), unsupported, SNAPSHOT_SCHEMA)
        finally:
            apart.abort()
            refused.unlink(missing_ok=True)
    return Delta(out, found.row_count, object_bytes, unsupported, skipped.row_count, left_out)


def _not_left_out(query: Query, rows: pa.Table, filters: ObjectFilter, left_out: Counter[str]) -> pa.Table:
    """Return the rows that no filter leaves out, and count those of the others that are neither located nor claimed."""
    if filters == NO_FILTER or not len(rows):
        return rows
    query.rows_of("unfiltered", rows)
    by = pa.Table.from_batches(query.batches(f"SELECT {filters.sql} AS left_out_by FROM unfiltered"))["left_out_by"]
    others = rows.append_column("left_out_by", by).filter(pc.is_valid(by))
    free = others.filter(_not_blocked(query, others, skipped="false"))
    left_out.update({one["values"]: one["counts"] for one in pc.value_counts(free["left_out_by"]).to_pylist()})
    return rows.filter(pc.is_null(by))


def _windows_of_rows(snapshot: Path) -> Iterator[pa.Table]:
    """Yield the objects of a snapshot, in its order, WINDOW_ROWS at once and at most a row group more."""
    with _opened(snapshot) as file:
        groups: list[int] = []
        for group in range(file.num_row_groups):
            groups.append(group)
            rows = sum(file.metadata.row_group(one).num_rows for one in groups)
            if rows and (rows >= WINDOW_ROWS or group == file.num_row_groups - 1):
                objects = _objects_of(file.read_row_groups(groups))
                groups = []
                if len(objects):
                    yield objects


def _objects_of(rows: pa.Table) -> pa.Table:
    """Return rows of a snapshot, which an earlier version may have taken, without delete markers."""
    if "is_latest" not in rows.column_names:
        for name, value in (("is_latest", True), ("is_delete_marker", False)):
            rows = rows.append_column(SNAPSHOT_SCHEMA.field(name), pa.repeat(value, len(rows)))
    elif pc.any(rows["is_delete_marker"]).as_py():
        rows = rows.filter(pc.invert(rows["is_delete_marker"]))
    return rows


def _supported(keys: pa.ChunkedArray) -> pa.ChunkedArray:
    """Tell which keys can be archived, as `is_supported` does: of keys that all are, without looking at each."""
    lengths = pc.min_max(pc.binary_length(keys)).as_py()
    if lengths["min"] > 0 and lengths["max"] <= MAX_KEY_BYTES:
        with contextlib.suppress(pa.ArrowInvalid):  # not UTF-8: each is looked at
            if not pc.any(pc.match_substring(keys.cast(pa.string()), "\0")).as_py():
                return pa.chunked_array([pa.repeat(True, len(keys))])
    return pa.chunked_array([pa.array(map(is_supported, keys.to_pylist()), pa.bool_())])


def _not_blocked(query: Query, rows: pa.Table, *, skipped: str) -> pa.ChunkedArray:
    """Tell of each row whether it is neither located nor claimed, nor skipped where this is `skipped`; by its key as it is."""
    if not len(rows):
        return pa.chunked_array([], pa.bool_())
    keys = pc.min_max(rows["key"]).as_py()
    within = f"known.key BETWEEN from_hex('{keys['min'].hex()}') AND from_hex('{keys['max'].hex()}')"
    query.rows_of("listed", rows.select(["key", "object_version"]).append_column("row", pa.array(np.arange(len(rows)))))
    blocked = _BLOCKED.format(key="listed.key", encoded="false", within=within, skipped=skipped)
    free = np.ones(len(rows), np.bool_)
    for batch in query.batches(f"SELECT row FROM listed WHERE {blocked}"):
        free[batch["row"].to_numpy()] = False
    return pa.chunked_array([pa.array(free)])


# --- windows of keys ---------------------------------------------------------------------------------------------------

WINDOW_ROWS: Final = 262_144
"""Rows of a snapshot that a query works on at once: some 100 MB with all that a join needs. A join over all of them would take
whatever its budget allows, so that memory grew with the source until there."""


def key_windows(snapshot: Path, within: KeyWindow = EVERY_KEY, *, known: Path | None = None) -> Iterator[KeyWindow]:
    """Yield windows that cover the keys `within`, each about WINDOW_ROWS of the snapshot where that is sorted.

    `known`: a file, or a folder of them, whose rows they are to bound as well, of each file that is sorted.
    """
    ends: set[bytes] = set()
    for path in (snapshot, *(files_of(known) if known else ())):
        rows = 0
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                rows += file.metadata.row_group(group).num_rows
                if rows >= WINDOW_ROWS:
                    ends.add(file.read_row_group(group, columns=["key"])["key"][-1].as_py())
                    rows = 0
    after, last = within
    inside = sorted(end for end in ends if (after is None or end > after) and (last is None or end < last))
    yield from pairwise([after, *inside, last])


def bounded(window: KeyWindow) -> str:
    """Return the condition that a key is in a window."""
    after, until = window
    bounds = ["true" if after is None else f"key > from_hex('{after.hex()}')"]
    bounds.append("true" if until is None else f"key <= from_hex('{until.hex()}')")
    return " AND ".join(bounds)


def _show_window(query: Query, window: KeyWindow) -> None:
    """Let `snapshot`, `marker`, `standing` and `plan` stand for the supported keys of a window."""
    within = bounded(window)
    show_objects(query, f"{within} AND is_supported(key)")
    query.view("plan", f"SELECT * FROM whole_plan WHERE {within}")
    query.view("standing", f"SELECT * FROM whole_standing WHERE {within} AND reason IS DISTINCT FROM 'unsupported_key'")


def show_objects(query: Query, within: str) -> None:
    """Let `snapshot` stand for the objects of `whole_snapshot` that meet a condition, `marker` for the delete markers."""
    query.view("snapshot", f"SELECT * FROM whole_snapshot WHERE NOT is_delete_marker AND {within}")
    query.view("marker", f"SELECT * FROM whole_snapshot WHERE is_delete_marker AND {within}")


def _show_unsupported(query: Query) -> None:
    """Let `snapshot` and `standing` stand for the unsupported keys: few, and in another order where they are encoded."""
    show_objects(query, "NOT is_supported(key)")
    query.view("standing", "SELECT * FROM whole_standing WHERE reason = 'unsupported_key'")


# --- accounting ------------------------------------------------------------------------------------------------------

EXAMPLES: Final = 10
"""Unaccounted keys that an accounting names."""


@dataclass(frozen=True, slots=True)
class Accounting:
    """Where each object of a snapshot has ended: `located + claimed + all skipped + all left out + unaccounted` are its objects.

    Attributes:
        claimed: by a chunk under way, or in the plan that was asked about.
        skipped: by reason; only objects that are neither located nor claimed, nor left out.
        left_out: by the filter of the source's settings; only objects that are neither located nor claimed.
        in_two_places: objects both located and claimed (counted as located).
        planned_twice: objects that the plan names more than once.
        planned_unlisted: objects of the plan that the snapshot does not have.
        examples: some unaccounted keys, percent-encoded where they are not supported.
        current: of the located objects of the snapshot, those that are what their key has now.
        older: located objects that are not, and whose key has another content now.
        gone: located objects whose key has none: a snapshot that covers the key does not list it, or lists a delete marker as
            its latest. Neither counts those that it is silent about.
    """

    objects: int
    located: int
    claimed: int
    skipped: Mapping[str, int]
    unaccounted: int
    in_two_places: int
    planned_twice: int
    planned_unlisted: int
    examples: Sequence[str]
    current: int = 0
    older: int = 0
    gone: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether every object is in exactly one place, and the plan names nothing else."""
        return not (self.unaccounted or self.in_two_places or self.planned_twice or self.planned_unlisted)


# One pass and one aggregate over everything that is said of an object; joins took more than twice as long.
_PLACES: Final = f"""WITH facts AS (
        SELECT CASE WHEN is_supported(key) THEN key ELSE encode(percent_encode(key)) END AS key, object_version,
            NOT is_supported(key) AS encoded, 'listed' AS fact, NULL AS reason, false AS untold, {{left_out}} AS left_out,
            is_latest
        FROM snapshot
        UNION ALL
        SELECT key, object_version, reason IS NOT DISTINCT FROM 'unsupported_key', standing, reason, untold, NULL, false
        FROM standing
        UNION ALL
        SELECT key, object_version, false, 'planned', NULL, false, NULL, false FROM plan
    ), places AS (
        SELECT key, count(*) FILTER (fact = 'listed') AS listed, bool_or(fact = 'located') AS located,
            bool_or(fact IN ('claimed', 'planned')) AS claimed, count(*) FILTER (fact = 'planned') AS planned,
            max(reason) FILTER (fact = 'skipped') AS reason, bool_or(untold) AS untold, max(left_out) AS left_out,
            bool_or(is_latest) AS is_latest
        FROM facts GROUP BY key, object_version, encoded
    )
    SELECT listed > 0, located AND (listed > 0 OR NOT untold), is_latest, claimed, reason, left_out, sum(listed),
        count(*) FILTER (planned > 0), count(*) FILTER (planned > 1),
        min(key, {EXAMPLES}) FILTER (listed > 0 AND NOT located AND NOT claimed AND reason IS NULL AND left_out IS NULL), count(*)
    FROM places GROUP BY ALL"""

# A key that has versions, and none of which is said to be its latest, is not gone: what it has now is not known.
_GONE: Final = """SELECT count(DISTINCT (key, object_version)) FROM standing WHERE standing = 'located'
    AND (NOT untold OR (key, object_version) IN (SELECT (key, object_version) FROM snapshot))
    AND (key NOT IN (SELECT key FROM snapshot)
        OR key IN (SELECT key FROM marker WHERE is_latest) AND key NOT IN (SELECT key FROM snapshot WHERE is_latest))"""

_NO_PLAN: Final = "SELECT key, object_version FROM whole_snapshot WHERE false"


def account_for(
    snapshot: Path,
    standing: Path,
    plan: Path | None = None,
    *,
    within: KeyWindow = EVERY_KEY,
    silent_from: datetime | None = None,
    filters: ObjectFilter = NO_FILTER,
    budget: QueryBudget = DEFAULT_BUDGET,
) -> Accounting:
    """Find the place of each object of a snapshot again from the files, whatever was counted when they were written.

    Args:
        snapshot: a Parquet file of SNAPSHOT_SCHEMA; spills go beside it.
        standing: one of STANDING_SCHEMA.
        plan: one with the columns `key` and `object_version`, for a plan that the standing may not know yet.
        within: the keys that the snapshot covers; of others it tells nothing.
        silent_from: see `Snapshot`.
        filters: what leaves objects out.
        budget: bounds the memory.

    Raises:
        IntegrityError: a file cannot be read. StagingError: there is no room to spill.
    """
    with translate_errors(snapshot), inventory_query(snapshot, budget) as query:
        show_snapshot(query, "whole_snapshot", snapshot)
        query.table("standing_rows", standing)
        untold = f"coalesce(last_modified >= TIMESTAMPTZ '{silent_from.isoformat()}', false)" if silent_from else "false"
        query.view("whole_standing", f"SELECT *, {untold} AS untold FROM standing_rows")
        if plan:
            query.table("whole_plan", plan)
        else:
            query.view("whole_plan", _NO_PLAN)
        rows: list[tuple[Any, ...]] = []
        gone = 0
        places = _PLACES.replace("{left_out}", filters.sql)
        for window in key_windows(snapshot, within):
            _show_window(query, window)
            found = query.rows(places)
            if any(located and not (listed and is_latest) for listed, located, is_latest, *_ in found):
                gone += query.rows(_GONE)[0][0]
            rows += found
        _show_unsupported(query)
        query.view("plan", _NO_PLAN)
        rows += query.rows(places)
        return _counted(rows, gone)


def _counted(rows: Iterable[tuple[Any, ...]], gone: int) -> Accounting:
    numbers = dict.fromkeys(("objects", "located", "current", "claimed", "unaccounted", "in_two_places", "planned_twice"), 0)
    planned_unlisted = beside = 0
    skipped: dict[str, int] = {}
    left_out: dict[str, int] = {}
    examples: list[str] = []
    for listed, located, is_latest, claimed, reason, left_out_by, objects, planned, planned_twice, nowhere, places in rows:
        beside += places if located and not (listed and is_latest) else 0
        numbers["current"] += places if located and listed and is_latest else 0
        if not listed:
            planned_unlisted += planned
            continue
        numbers["objects"] += objects
        numbers["planned_twice"] += planned_twice
        numbers["in_two_places"] += objects if located and claimed else 0
        if left_out_by is not None and not located and not claimed:
            left_out[left_out_by] = left_out.get(left_out_by, 0) + int(objects)
        elif reason is not None and not located and not claimed:
            skipped[reason] = skipped.get(reason, 0) + objects
        else:
            numbers["located" if located else "claimed" if claimed else "unaccounted"] += objects
        examples += [bytes(key).decode() for key in nowhere or ()]
    return Accounting(
        **{name: int(number) for name, number in numbers.items()},
        skipped={reason: int(skipped[reason]) for reason in sorted(skipped)},
        planned_unlisted=int(planned_unlisted),
        examples=sorted(examples, key=str.encode)[:EXAMPLES],
        older=beside - gone,
        gone=gone,
        left_out=left_out,
    )
