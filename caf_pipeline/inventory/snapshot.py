"""Snapshots: the content of a source at one time, as a Parquet file sorted by key.

Source: "Which objects are archived" in docs/explanation/design.md.
"""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from itertools import pairwise, starmap
from operator import le
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote_from_bytes, unquote_to_bytes

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.errors import IntegrityError, first_line
from caf_pipeline.inventory.key_windows import ALL_KEYS, KeyWindow, bounded
from caf_pipeline.inventory.objects import (
    MAX_KEY_BYTES,
    S3Object,
    VersionCounts,
    is_supported,
    object_version,
    versions_as_json,
)
from caf_pipeline.system.parquet import (
    DEFAULT_BUDGET,
    ROWS_PER_GROUP,
    Query,
    QueryBudget,
    WholeParquet,
    stated,
    sum_of,
    translate_errors,
)


def object_versions(batch: pa.RecordBatch) -> pa.Array:
    """Return `object_version` of each row."""
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
"""Sorted by key (bytes), then last_modified. Fields as in `S3Object`."""

_SNAPSHOT_KEY: Final = "caf.snapshot"

SORT_BUDGET: Final = QueryBudget(memory_bytes=1 << 30)
"""More memory means fewer passes."""

SORTED_BY_MEMORY: Final = 2
"""Bytes sorted for each byte of memory. DuckDB 2.0 sorted 4 times its 256 MiB, and failed at 20
times; the factor is smaller with less memory.
"""

MAX_HELD_ROWS: Final = ROWS_PER_GROUP
"""A key's versions sorted in memory. A listing with more is sorted on disk."""

_ORDER: Final = ("key", "last_modified", "object_version")

ROW_BYTES: Final = 200
"""DuckDB's memory for a row, without its key."""

SAMPLED_FOR_A_WINDOW: Final = 1000
"""Window sizes then differ by some per cent."""

REPORT_LAG: Final = timedelta(hours=12)
"""A report may lack changes before its time; S3 states no limit. Half the time between two daily
reports, so that the next one has them.
"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The content of a source at one time, as a Parquet file of SNAPSHOT_SCHEMA.

    Attributes:
        listed_at: when the listing began, by this machine's clock, or the report's time.
        taken_at: the same by S3's clock.
        after: exclusive lower bound of the keys.
        until: inclusive upper bound; None: no bound.
        object_count: without delete markers.
        beside: versions that are not current, in the file or left out of it.
        run: the lease holder in the ledger that took the snapshot.
        report: the inventory report's address; "" for a listing.
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
        return self.object_count + (self.beside.markers if self.all_versions else 0)

    def versions_as_json(self) -> dict[str, str | int | None]:
        return versions_as_json(self.beside, all_versions=self.all_versions)

    @property
    def silent_from(self) -> datetime | None:
        """Keys written from this time on may be missing. None for a listing."""
        return self.taken_at - REPORT_LAG if self.report else None

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def keys(self) -> KeyWindow:
        return self.after or None, self.until

    @property
    def complete(self) -> bool:
        return self.keys == ALL_KEYS


class SnapshotWriter:
    """Writes a snapshot from a listing's pages or a report's files.

    The context manager removes an unfinished file. Memory holds a row group. Files, and listings
    whose keys do not ascend, are sorted on disk within the budget. A key's versions may come in any
    order. Methods raise StagingError if the file cannot be written.
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
        self._description = Snapshot(
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
        self._held: pa.RecordBatch | None = None  # rows of the last key, whose versions may go on
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
        self.add_batch(snapshot_batch(page))

    def add_batch(self, batch: pa.RecordBatch) -> None:
        keys = batch["key"].to_pylist()
        self._ascending = self._ascending and all(starmap(le, pairwise([self._last, *keys])))
        self._last = keys[-1] if keys else self._last
        rows = batch if self._held is None else pa.concat_batches([self._held, batch])
        begin = rows.num_rows
        if self._ascending and begin:
            begin = pc.index(rows["key"], rows["key"][-1]).as_py()
        self._ascending = self._ascending and rows.num_rows - begin <= MAX_HELD_ROWS
        self._held = rows.slice(begin) if self._ascending else None
        with translate_errors(self._path):
            self._write_ordered(rows.slice(0, begin) if self._ascending else rows)

    def add_files(self, files: Sequence[Path]) -> None:
        """Let `finish` read files of SNAPSHOT_SCHEMA in any order instead of pages."""
        self._files = files

    def leave_out(self, counts: VersionCounts) -> None:
        self._left_out += counts

    def finish(self) -> Snapshot:
        """Sort if needed, keep each (key, object version) once, and publish."""
        with translate_errors(self._path):
            if self._held is not None:
                self._write_ordered(self._held)
            if self._files:
                self._sort(self._files)
            elif not self._ascending:
                listed = self._path.with_name(f".{self._path.name}.listed")
                self._file.whole.path = listed
                self._file.close({})
                self._file.publish()
                try:
                    self._sort([listed])
                finally:
                    listed.unlink(missing_ok=True)
            snapshot = replace(
                self._description,
                object_count=self._object_count,
                object_bytes=self._object_bytes,
                unsupported_count=self._unsupported_count,
                beside=self._beside + self._left_out,
            )
            description = {
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
            }
            self._file.close({_SNAPSHOT_KEY: json.dumps(description, sort_keys=True)})
            self._file.publish()
        return snapshot

    def _write_ordered(self, rows: pa.RecordBatch) -> None:
        if _repeats_keys(rows):
            rows = _without_repeated(rows.sort_by([(name, "ascending") for name in _ORDER]))
        keys = pa.chunked_array([rows["key"].filter(pc.invert(rows["is_delete_marker"]))])
        unsupported = pc.sum(pc.invert(supported_keys(keys))).as_py() if len(keys) else 0
        self._write(rows, unsupported=unsupported)

    def _write(self, rows: pa.RecordBatch, *, unsupported: int) -> None:
        beside = versions_beside(rows["is_latest"], rows["is_delete_marker"])
        self._object_count += rows.num_rows - beside.markers
        self._object_bytes += sum_of(rows, "size_bytes")
        self._unsupported_count += unsupported
        self._beside += beside
        self._file.write(rows)

    def _sort(self, files: Sequence[Path]) -> None:
        self._file.abort()
        with inventory_query(self._path, self._budget) as query:
            query.table("listed", *files)
            self._file = WholeParquet(self._path, SNAPSHOT_SCHEMA)
            self._object_count = self._object_bytes = self._unsupported_count = 0
            self._beside = VersionCounts()
            for batch in distinct_identities(sorted_by_key(query, self._budget)):
                unsupported = pc.and_not(pc.invert(batch["supported"]), batch["is_delete_marker"])
                self._write(
                    batch.drop_columns("supported").cast(SNAPSHOT_SCHEMA),
                    unsupported=pc.sum(unsupported).as_py() or 0,
                )


def sorted_by_key(query: Query, budget: QueryBudget) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `listed` in the order of snapshots, with `supported`.

    DuckDB cannot sort many times its memory, so windows of keys are sorted.
    """
    rows, key_bytes = query.rows(
        "SELECT count(*), coalesce(sum(octet_length(key)), 0) FROM listed"
    )[0]
    size_bytes = int(key_bytes) + rows * ROW_BYTES
    count = math.ceil(size_bytes / (SORTED_BY_MEMORY * budget.memory_bytes))
    ends: set[bytes] = set()
    if count > 1:
        size = SAMPLED_FOR_A_WINDOW * count
        sampled = query.rows(
            f"SELECT key FROM listed USING SAMPLE reservoir({size} ROWS) REPEATABLE (1)"
        )
        sample = sorted(bytes(key) for (key,) in sampled)
        ends = {sample[len(sample) * number // count] for number in range(1, count)}
    for window in pairwise([None, *sorted(ends), None]):
        yield from query.batches(
            f"""SELECT *, is_supported(key) AS supported
            FROM listed
            WHERE {bounded(window)}
            ORDER BY key, last_modified, object_version"""
        )


def distinct_identities(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the last row of each (key, object version)."""
    held: pa.RecordBatch | None = None  # rows of the last key, which the next batch may continue
    for batch in batches:
        rows = _without_repeated(batch if held is None else pa.concat_batches([held, batch]))
        begin = pc.index(rows["key"], rows["key"][-1]).as_py()
        yield rows.slice(0, begin)
        held = rows.slice(begin)
    if held is not None:
        yield held


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
    """Count versions that are not current."""
    older = pc.and_not(pc.invert(latest), markers)
    return VersionCounts(
        *(int(pc.sum(flags).as_py() or 0) for flags in (older, markers, pc.and_(latest, markers)))
    )


def supported_keys(keys: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return `is_supported` of each key."""
    lengths = pc.min_max(pc.binary_length(keys)).as_py()
    if lengths["min"] > 0 and lengths["max"] <= MAX_KEY_BYTES:
        with contextlib.suppress(pa.ArrowInvalid):  # some keys are not UTF-8
            if not pc.any(pc.match_substring(keys.cast(pa.string()), "\0")).as_py():
                return pa.chunked_array([pa.repeat(True, len(keys))])
    return pa.chunked_array([pa.array(map(is_supported, keys.to_pylist()), pa.bool_())])


def inventory_query(path: Path, budget: QueryBudget = DEFAULT_BUDGET) -> Query:
    """Return a query with `is_supported` and `percent_encode`."""
    return Query(
        path,
        budget,
        functions={"percent_encode": lambda key: quote_from_bytes(key)},  # noqa: PLW0108 - DuckDB needs a signature
        macros=(
            f"is_supported(key) AS octet_length(key) BETWEEN 1 AND {MAX_KEY_BYTES}"
            " AND coalesce(NOT contains(TRY(decode(key)), chr(0)), false)",
        ),
    )


def snapshot_batch(page: Sequence[S3Object]) -> pa.RecordBatch:
    """Return objects as rows of SNAPSHOT_SCHEMA."""
    columns = [[getattr(obj, name) for obj in page] for name in SNAPSHOT_SCHEMA.names]
    arrays = [
        pa.array(column, field.type) for column, field in zip(columns, SNAPSHOT_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SNAPSHOT_SCHEMA)


RETAKE_HINT: Final = "take the inventory again"


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot's description, not its rows; raises IntegrityError."""
    with open_parquet(path) as file:
        schema, metadata = file.schema_arrow, file.metadata
    try:
        described = json.loads(stated(metadata, _SNAPSHOT_KEY))
        until = described["until"]
        snapshot = Snapshot(
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
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"{path} is not a snapshot: its metadata is missing or damaged", hint=RETAKE_HINT
        ) from error
    if schema.remove_metadata() != SNAPSHOT_SCHEMA:
        raise IntegrityError(f"the columns of {path} are not those of a snapshot", hint=RETAKE_HINT)
    if metadata.num_rows != snapshot.row_count:
        raise IntegrityError(
            f"{path} has {metadata.num_rows} rows and declares {snapshot.row_count}",
            hint=RETAKE_HINT,
        )
    return snapshot


def read_objects(path: Path) -> Iterator[S3Object]:
    """Yield a file's objects in order, in bounded memory."""
    with open_parquet(path) as file:
        for batch in file.iter_batches(batch_size=8192):
            yield from map(s3_object, batch.to_pylist())


def s3_object(row: dict[str, Any]) -> S3Object:
    """Return a row's object; changes the row."""
    identity = row.pop("object_version")
    version = object_version(row["version_id"], row["etag"], row["size_bytes"])
    rewritten_at = None
    if identity != version:
        rewritten_at = datetime.fromisoformat(identity.removeprefix(f"{version}:"))
    return S3Object(**row, rewritten_at=rewritten_at)


def verify_snapshot(path: Path) -> None:
    """Compare every page with its checksum, which DuckDB does not do; raises IntegrityError.

    Compares the counts, too, since the checksums do not cover page headers.
    """
    snapshot = read_snapshot(path)
    row_count = object_bytes = 0
    beside = VersionCounts()
    with open_parquet(path) as file:
        for batch in file.iter_batches():
            row_count += batch.num_rows
            object_bytes += sum_of(batch, "size_bytes")
            if snapshot.all_versions:
                beside += versions_beside(batch["is_latest"], batch["is_delete_marker"])
    object_count = row_count - beside.markers
    if (object_count, object_bytes) != (snapshot.object_count, snapshot.object_bytes):
        raise IntegrityError(
            f"{path} declares {snapshot.object_count} objects of {snapshot.object_bytes} bytes, "
            f"and has {object_count} of {object_bytes}",
            hint=RETAKE_HINT,
        )
    if snapshot.all_versions and beside != snapshot.beside:
        raise IntegrityError(
            f"{path} declares {snapshot.beside}, and has {beside}", hint=RETAKE_HINT
        )


@contextlib.contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a file; damage found while reading raises IntegrityError."""
    with translate_read_errors(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        yield file


def has_rows(path: Path) -> bool:
    """Return whether a file has rows."""
    with open_parquet(path) as file:
        return bool(file.metadata.num_rows)


@contextlib.contextmanager
def translate_read_errors(path: Path) -> Iterator[None]:
    """Translate pyarrow's errors while only this file is read."""
    try:
        yield
    except FileNotFoundError as error:
        raise IntegrityError(f"the file {path} is missing", hint=RETAKE_HINT) from error
    except (OSError, pa.ArrowException, ValueError) as error:
        raise IntegrityError(
            f"{path} cannot be read as Parquet: {first_line(error)}", hint=RETAKE_HINT
        ) from error
