"""The identities of an inventory's objects, and which content of a key is current.

LastModified orders a key's locations. An exception states that a key had an identity at a time, or
was deleted. The latest location or exception is current. Source:
docs/decisions/0014-what-is-current.md.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.errors import IntegrityError
from caf_pipeline.inventory.filters import NO_FILTER, ObjectFilter
from caf_pipeline.inventory.key_windows import KeyWindow, bounded, key_windows
from caf_pipeline.inventory.keyed_rows import KeyedRows
from caf_pipeline.inventory.ledger_rows import EXCEPTION_SCHEMA
from caf_pipeline.inventory.objects import TIME_FORMAT, CurrentException
from caf_pipeline.inventory.snapshot import (
    RETAKE_HINT,
    SNAPSHOT_SCHEMA,
    Snapshot,
    has_rows,
    inventory_query,
    verify_snapshot,
)
from caf_pipeline.system.parquet import (
    Query,
    WholeParquet,
    files_of,
    translate_errors,
    write_whole,
)
from caf_pipeline.system.pipeline_threads import prefetch_next

_Flags = np.ndarray[Any, np.dtype[np.bool_]]

KeyRange = tuple[bytes, bytes | None]
"""Keys greater than the first, up to and including the second; None: no bound."""

ROWS_READ: Final = 8_192

_WITH_TIME: Final = (
    "listed.object_version || ':' || "
    f"strftime(make_timestamp(epoch_us(listed.last_modified)), '{TIME_FORMAT}')"
)

_WITHOUT_TIME: Final = (
    r"regexp_replace(object_version, ':\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$', '')"
)

# Objects with located bytes that were written again: listed without a version id, and with another
# LastModified. Claimed objects are compared once they are located, and skipped ones once the skip
# is due. `compared` has the results of earlier comparisons of headers.
_REWRITTEN: Final = f"""
    WITH archived AS (
        SELECT DISTINCT key, {_WITHOUT_TIME} AS bytes
        FROM standing
        WHERE standing = 'located'
    ),
    identities AS (
        SELECT
            key,
            object_version,
            bool_or(standing = 'located') AS located,
            bool_or(standing = 'claimed') AS claimed,
            bool_or(standing = 'skipped' AND NOT due) AS skipped,
            max(last_modified) FILTER (standing = 'located') AS last_modified
        FROM standing
        GROUP BY key, object_version
    ),
    compared AS (
        SELECT
            key,
            last_modified,
            {_WITHOUT_TIME} AS bytes,
            arg_max(object_version, stated_at) AS object_version
        FROM exception
        WHERE last_modified IS NOT NULL
            AND object_version IS NOT NULL
        GROUP BY ALL
    ),
    rewritten AS (
        SELECT listed.*, {_WITH_TIME} AS with_time
        FROM snapshot AS listed
        JOIN archived
            ON archived.key = listed.key
            AND archived.bytes = listed.object_version
        LEFT JOIN identities AS first
            ON first.key = listed.key
            AND first.object_version = listed.object_version
        WHERE listed.version_id IS NULL
            AND NOT coalesce(first.claimed, false)
            AND first.last_modified IS DISTINCT FROM listed.last_modified
    )
    SELECT
        rewritten.* EXCLUDE (object_version, with_time),
        rewritten.object_version AS bytes,
        CASE
            WHEN equal.located AND NOT coalesce(timed.located OR timed.claimed, false)
                THEN equal.object_version
            ELSE with_time
        END AS object_version,
        NOT coalesce(timed.located OR timed.claimed OR timed.skipped, false)
            AND NOT coalesce(equal.located, false) AS to_compare
    FROM rewritten
    LEFT JOIN identities AS timed
        ON timed.key = rewritten.key
        AND timed.object_version = with_time
    LEFT JOIN compared
        ON compared.key = rewritten.key
        AND compared.last_modified = rewritten.last_modified
        AND compared.bytes = rewritten.object_version
    LEFT JOIN identities AS equal
        ON equal.key = rewritten.key
        AND equal.object_version = compared.object_version
    ORDER BY rewritten.key, rewritten.last_modified"""

_REWRITTEN_SCHEMA: Final = SNAPSHOT_SCHEMA.append(
    pa.field("bytes", pa.string(), nullable=False)
).append(pa.field("to_compare", pa.bool_(), nullable=False))

_KEYS: Final = pa.schema([SNAPSHOT_SCHEMA.field("key")])

_FACTS: Final = pa.schema(
    [
        SNAPSHOT_SCHEMA.field("key"),
        pa.field("object_version", pa.string()),
        pa.field("last_modified", pa.timestamp("us", tz="UTC")),
        pa.field("can_settle", pa.bool_(), nullable=False),  # listed as current, or located
    ]
)

_FACT_COLUMNS: Final = ("key", "object_version", "last_modified")

_WindowFacts = tuple[KeyWindow, pa.Table, pa.Table]

_IDENTIFIED: Final = """
    SELECT listed.* REPLACE (
        coalesce(rewritten.object_version, listed.object_version) AS object_version
    )
    FROM listed
    LEFT JOIN rewritten
        ON rewritten.key = listed.key
        AND rewritten.bytes = listed.object_version
        AND rewritten.last_modified = listed.last_modified
        AND listed.version_id IS NULL
        AND NOT listed.is_delete_marker
    ORDER BY listed.key, listed.last_modified, object_version"""


@dataclass(frozen=True, slots=True)
class IdentifiedSnapshot:
    """A snapshot's objects under their identities (SNAPSHOT_SCHEMA).

    Attributes:
        path: the snapshot's own file if no identity differs.
        to_compare: objects whose headers must be compared with the archived ones. Until then they
            have a new identity, like those that filters leave out, which the file lacks.
        unsettled: objects of keys that are not settled; see `_write_unsettled`.
        unsettled_keys: None if any key may be unsettled.
    """

    path: Path
    to_compare: Path
    to_compare_count: int
    unsettled: Path
    unsettled_keys: Path | None = None


def identify(
    snapshot: Snapshot,
    standing: Path,
    exceptions: Path,
    out: Path,
    *,
    filters: ObjectFilter = NO_FILTER,
) -> IdentifiedSnapshot:
    """Find the identity of each object of a snapshot, and write `out` if any differs.

    An object without a version id may have been written again with the same ETag and size. It keeps
    its identity if an exception states that bytes and headers are the archived ones. Otherwise its
    LastModified becomes part of the identity. Verifies the snapshot's checksums unless every key is
    settled. Raises StagingError and IntegrityError.
    """
    rewritten, to_compare = (
        out.with_name(f"{out.stem}.{kind}.parquet") for kind in ("rewritten", "to_compare")
    )
    unsettled, unsettled_keys = snapshot.path, None
    with _query(snapshot.path, standing, exceptions, out) as query:

        def rewritten_rows() -> Iterator[pa.RecordBatch]:
            for window in key_windows(snapshot.path, snapshot.keys):
                if _hold(query, window):
                    yield from query.batches(_REWRITTEN)

        located = "SELECT EXISTS (SELECT 1 FROM whole_standing WHERE standing = 'located')"
        if query.rows(located)[0][0]:
            unsettled, unsettled_keys = (
                out.with_name(f"{out.stem}.{kind}.parquet")
                for kind in ("unsettled", "unsettled_keys")
            )
            _write_unsettled(query, snapshot, (standing, exceptions), unsettled, unsettled_keys)
            query.table("whole_unsettled", unsettled_keys)
        else:
            verify_snapshot(snapshot.path)
        changed = write_whole(
            rewritten_rows() if unsettled_keys else (), rewritten, _REWRITTEN_SCHEMA
        )
        query.table("whole_rewritten", rewritten)
        comparing = f"""
            SELECT *
            FROM whole_rewritten
            WHERE to_compare
                AND {filters.sql} IS NULL"""
        waiting = write_whole(query.batches(comparing), to_compare, SNAPSHOT_SCHEMA)
        if not changed.row_count:
            return IdentifiedSnapshot(snapshot.path, to_compare, 0, unsettled, unsettled_keys)

        def identified(path: Path) -> Iterator[pa.RecordBatch]:
            query.table("whole_listed", path)
            for window in key_windows(path):
                query.view("listed", f"SELECT * FROM whole_listed WHERE {bounded(window)}")
                query.view("rewritten", f"SELECT * FROM whole_rewritten WHERE {bounded(window)}")
                yield from query.batches(_IDENTIFIED)

        write_whole(identified(snapshot.path), out, SNAPSHOT_SCHEMA)
        write_whole(identified(unsettled), unsettled, SNAPSHOT_SCHEMA)
    return IdentifiedSnapshot(out, to_compare, waiting.row_count, unsettled, unsettled_keys)


# A key that is not listed, or whose latest version is a delete marker, is deleted: ''. Only a
# statement orders two identities with equal LastModified. LastModified alone does not order
# versions either, since a multipart upload has the time of its beginning. So `identities` includes
# every version that this inventory may plan. It excludes versions that a filter leaves out: while
# one of these is the latest, no location is current.
_COMPARED: Final = """
    WITH listed AS (
        SELECT
            key,
            arg_max(object_version, last_modified) FILTER (is_latest) AS object_version,
            max(last_modified) FILTER (is_latest) AS last_modified
        FROM snapshot
        GROUP BY key
    ),
    identities AS (
        SELECT key, object_version, last_modified
        FROM standing
        WHERE standing <> 'skipped'
        UNION
        SELECT key, object_version, last_modified
        FROM planned
        WHERE NOT EXISTS (
            SELECT 1
            FROM standing
            WHERE standing.key = planned.key
                AND standing.object_version = planned.object_version
                AND standing <> 'skipped'
        )
    ),
    latest AS (
        SELECT
            key,
            max(last_modified) AS last_modified,
            arg_max(object_version, last_modified) AS object_version
        FROM identities
        GROUP BY key
    ),
    ties AS (
        SELECT key
        FROM identities
        JOIN latest USING (key, last_modified)
        GROUP BY key
        HAVING count(DISTINCT identities.object_version) > 1
    ),
    statements AS (
        SELECT
            key,
            max(stated_at) AS stated_at,
            arg_max(coalesce(object_version, ''), stated_at) AS object_version
        FROM exception
        GROUP BY key
    )
    SELECT
        latest.key,
        latest.last_modified AS latest_modified,
        statements.stated_at,
        listed.last_modified,
        coalesce(listed.object_version, '') AS object_version,
        listed.key IS NOT NULL AND listed.object_version IS NULL AS without_latest,
        CASE
            WHEN statements.stated_at >= latest.last_modified THEN statements.object_version
            WHEN ties.key IS NULL THEN latest.object_version
        END AS previous
    FROM latest
    LEFT JOIN listed USING (key)
    LEFT JOIN statements USING (key)
    LEFT JOIN ties USING (key)"""


def find_exceptions(
    snapshot: Snapshot,
    identified: IdentifiedSnapshot,
    standing: Path,
    exceptions: Path,
    out: Path,
    *,
    superseded: Sequence[KeyRange] = (),
    filters: ObjectFilter = NO_FILTER,
) -> int:
    """Write the exceptions that this inventory adds (EXCEPTION_SCHEMA); return their number.

    `standing` and `exceptions` are those of `identified`. An exception is never earlier than a
    LastModified known of its key. A report adds none for a key with a location or exception as late
    as the report. Claimed objects count as located, since they may be at any time. Later
    inventories cover the `superseded` keys, which get none. Raises as `identify`.
    """
    if identified.unsettled_keys and not has_rows(identified.unsettled_keys):
        with translate_errors(out):
            return write_whole((), out, EXCEPTION_SCHEMA).row_count
    within = "".join(f" AND NOT ({bounded((after, until))})" for after, until in superseded)
    with _query(identified.path, standing, exceptions, out) as query:
        if identified.unsettled_keys:
            query.table("whole_unsettled", identified.unsettled_keys)
        else:
            query.view(
                "whole_unsettled",
                "SELECT key FROM whole_snapshot UNION ALL SELECT key FROM whole_standing",
            )

        def new_exceptions() -> Iterator[pa.RecordBatch]:
            for window in key_windows(identified.path, snapshot.keys):
                if _hold(query, window, f"AND is_supported(key){within}"):
                    query.view("planned", f"SELECT * FROM snapshot WHERE {filters.sql} IS NULL")
                    query.view("compared", _COMPARED)
                    yield from query.batches(_exceptions_of(snapshot))

        # An exception needs a location, an earlier exception, or an older version in the snapshot.
        may_have_any = query.rows(
            """SELECT
                EXISTS (SELECT 1 FROM whole_standing WHERE standing <> 'skipped')
                OR EXISTS (SELECT 1 FROM whole_exception)
                OR EXISTS (
                    SELECT 1
                    FROM whole_snapshot
                    WHERE NOT is_latest
                        AND NOT is_delete_marker
                )"""
        )[0][0]
        return write_whole(
            new_exceptions() if may_have_any else (), out, EXCEPTION_SCHEMA
        ).row_count


def _exceptions_of(snapshot: Snapshot) -> str:
    unless = ""
    if snapshot.silent_from:
        # A report may lack changes shortly before its time, and statements made since. It has what
        # it lists.
        silent_from = f"TIMESTAMPTZ '{snapshot.silent_from.isoformat()}'"
        unless = f"""
        AND key NOT IN (
            SELECT key
            FROM standing
            ANTI JOIN snapshot USING (key, object_version)
            WHERE standing <> 'skipped'
                AND standing.last_modified >= {silent_from}
        )
        AND coalesce(compared.stated_at < {silent_from}, true)"""
    return f"""
    SELECT
        key,
        greatest(
            TIMESTAMPTZ '{snapshot.taken_at.isoformat()}',
            latest_modified,
            compared.stated_at,
            last_modified
        ) AS stated_at,
        nullif(object_version, '') AS object_version,
        NULL AS last_modified
    FROM compared
    WHERE object_version IS DISTINCT FROM previous
        AND (NOT without_latest OR key IN (SELECT key FROM marker WHERE is_latest))
        {unless}
    ORDER BY key"""


def read_exceptions(path: Path) -> Iterator[CurrentException]:
    """Yield what `find_exceptions` wrote, in bounded memory."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS_READ):
            for row in batch.to_pylist():
                yield CurrentException(**{**row, "key": row["key"].decode()})


@contextmanager
def _query(snapshot: Path, standing: Path, exceptions: Path, out: Path) -> Iterator[Query]:
    with translate_errors(out), inventory_query(out) as query:
        query.table("whole_snapshot", snapshot)
        query.table("whole_standing", standing)
        query.table("whole_exception", exceptions)
        yield query


def _write_unsettled(
    query: Query,
    snapshot: Snapshot,
    files: tuple[Path, Path],
    unsettled: Path,
    unsettled_keys: Path,
) -> None:
    """Write the unsettled objects and keys.

    A key is settled if one listed object and one ledger row agree, and it has no exception. Their
    columns are read here with checksums, which DuckDB does not compare.
    """
    objects = WholeParquet(unsettled, SNAPSHOT_SCHEMA, durable=False)
    listed_count = 0

    def keys() -> Iterator[pa.RecordBatch]:
        nonlocal listed_count
        is_verified = False
        for window, listed, recorded in prefetch_next(_facts(snapshot, *files)):
            listed_count += len(listed)
            window_keys = pa.table({"key": _unsettled_keys(listed, recorded)})
            if not len(window_keys):
                continue
            if not is_verified:
                verify_snapshot(snapshot.path)
                is_verified = True
            query.rows_of("window_keys", window_keys)
            for batch in query.batches(
                f"""SELECT *
                FROM whole_snapshot
                WHERE {bounded(window)}
                    AND key IN (FROM window_keys)
                ORDER BY key, last_modified, object_version"""
            ):
                objects.write(batch.select(SNAPSHOT_SCHEMA.names).cast(SNAPSHOT_SCHEMA))
            yield from query.batches("SELECT key FROM window_keys WHERE is_supported(key)")
        if listed_count != snapshot.row_count:
            raise IntegrityError(
                f"{snapshot.path} declares {snapshot.row_count} rows, and has {listed_count}",
                hint=RETAKE_HINT,
            )

    try:
        write_whole(keys(), unsettled_keys, _KEYS)
        objects.close({})
        objects.publish()
    finally:
        objects.abort()


def _facts(snapshot: Snapshot, standing: Path, exceptions: Path) -> Iterator[_WindowFacts]:
    with ExitStack() as stack:
        snapshot_rows = stack.enter_context(
            KeyedRows(snapshot.path, (*_FACT_COLUMNS, "is_latest", "is_delete_marker"))
        )
        exception_rows = stack.enter_context(KeyedRows(exceptions, ("key",)))
        standing_rows = [
            stack.enter_context(KeyedRows(path, (*_FACT_COLUMNS, "standing")))
            for path in files_of(standing)
        ]
        for window in key_windows(snapshot.path, snapshot.keys, known=standing):
            listed, stated = snapshot_rows.read(window), exception_rows.read(window)["key"]
            is_current = pc.and_not(listed["is_latest"], listed["is_delete_marker"])
            recorded = []
            for file in standing_rows:
                rows = file.read(window)
                recorded.append(_as_facts(rows, pc.equal(rows["standing"], "located")))
            nulls, no_flags = pa.nulls(len(stated)), pa.repeat(False, len(stated))
            exception_facts = pa.table([stated, nulls, nulls, no_flags], _FACTS.names).cast(_FACTS)
            yield (
                window,
                _as_facts(listed, is_current),
                pa.concat_tables([*recorded, exception_facts]),
            )


def _as_facts(rows: pa.Table, can_settle: pa.ChunkedArray) -> pa.Table:
    return rows.select(_FACT_COLUMNS).append_column("can_settle", can_settle).cast(_FACTS)


def _unsettled_keys(listed: pa.Table, recorded: pa.Table) -> pa.ChunkedArray:
    if (
        listed["key"].equals(recorded["key"])
        and pc.all(pc.less(listed["key"][:-1], listed["key"][1:]), min_count=0).as_py()
    ):
        return listed["key"].filter(pa.array(~_agree(listed, recorded)))
    order = pc.sort_indices(pa.concat_tables([listed, recorded]), [("key", "ascending")])
    facts = pa.concat_tables([listed, recorded]).take(order)
    is_listed = order.to_numpy() < len(listed)
    first, second = facts[:-1], facts[1:]
    # True if the previous fact has the same key.
    follows = np.concatenate([[False], pc.equal(first["key"], second["key"]).to_numpy(), [False]])
    is_pair = ~follows[:-2] & ~follows[2:]
    pairs = is_pair & _agree(first, second) & (is_listed[:-1] != is_listed[1:])
    settled = np.concatenate([pairs, [False]]) | np.concatenate([[False], pairs])
    return facts["key"].filter(pa.array(~settled & ~follows[:-1]))


def _agree(first: pa.Table, second: pa.Table) -> _Flags:
    agree = pc.and_(first["can_settle"], second["can_settle"])
    for name in _FACT_COLUMNS:
        # Comparing whole columns takes a fraction of the time.
        if first[name].null_count or not first[name].equals(second[name]):
            agree = pc.and_(agree, pc.fill_null(pc.equal(first[name], second[name]), False))
    flags: _Flags = agree.to_numpy()
    return flags


def _hold(query: Query, window: KeyWindow, condition: str = "") -> bool:
    within = f"{bounded(window)} {condition}"
    if not query.hold("unsettled", f"SELECT DISTINCT key FROM whole_unsettled WHERE {within}"):
        return False
    within = f"{bounded(window)} AND key IN (FROM unsettled)"
    for name, kind in (("snapshot", "NOT is_delete_marker"), ("marker", "is_delete_marker")):
        query.hold(name, f"SELECT * FROM whole_snapshot WHERE {kind} AND {within}")
    query.hold(
        "standing",
        f"""SELECT *
        FROM whole_standing
        WHERE {within}
            AND reason IS DISTINCT FROM 'unsupported_key'""",
    )
    query.hold("exception", f"SELECT * FROM whole_exception WHERE {within}")
    return True
