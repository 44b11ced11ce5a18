"""Which objects of a snapshot are not yet archived: those that the ledger tells nothing of, and
that no filter leaves out.

Files in, files out, in memory that is bounded by a budget and not by the number of objects.
Source: "Which objects are to be archived" in docs/explanation/design.md.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from caf_pipeline.inventory.filters import NO_FILTER, ObjectFilter
from caf_pipeline.inventory.key_windows import WINDOW_ROWS
from caf_pipeline.inventory.snapshot import (
    SNAPSHOT_SCHEMA,
    has_rows,
    inventory_query,
    opened_parquet,
    supported_keys,
)
from caf_pipeline.system.ahead import one_ahead
from caf_pipeline.system.parquet import (
    DEFAULT_BUDGET,
    Query,
    QueryBudget,
    WholeParquet,
    sum_of,
    translate_errors,
    write_whole,
)


@dataclass(frozen=True, slots=True)
class Delta:
    """The objects of a snapshot that are to be planned, sorted by key, then last modified
    (SNAPSHOT_SCHEMA).

    Attributes: unsupported: a file of those that are to be recorded as skipped for their key, in
        the same form. left_out: numbers of objects that are neither located nor claimed, and that a
        filter leaves out, by the filter.
    """

    path: Path
    object_count: int
    object_bytes: int
    unsupported: Path
    unsupported_count: int
    left_out: Mapping[str, int]


# A key that holds a percent sign may equal the encoded form of another one, so that the reason
# tells which of them a row means.
_BLOCKED: Final = """EXISTS (SELECT 1 FROM whole_standing AS known
    WHERE known.key = {key} AND known.object_version = listed.object_version AND {within}
    AND (known.standing <> 'skipped' OR {skipped}) AND (known.reason IS NOT DISTINCT FROM
        'unsupported_key') = {encoded})"""

_UNSUPPORTED: Final = f"""SELECT * FROM (SELECT *, encode(percent_encode(key)) AS encoded_key FROM
    refused) AS listed
    WHERE NOT
        {_BLOCKED.format(key="listed.encoded_key", encoded="true", within="true", skipped="NOT known.due")}
    ORDER BY key, last_modified, object_version"""  # noqa: E501

_STANDING_SKIPS: Final = """SELECT key, object_version, reason = 'unsupported_key' AS encoded FROM
    whole_standing
    WHERE standing = 'skipped' AND NOT due"""
# Keys are encoded one by one in Python: only those that are unsupported, and only where such a skip
# stands.
_ENDED_SKIPS: Final = """WITH listed AS (
        SELECT key, object_version, false AS encoded FROM whole_snapshot SEMI JOIN skips USING (key,
            object_version)
            WHERE NOT is_delete_marker AND is_supported(key) AND {left_out} IS NULL
        UNION ALL SELECT encode(percent_encode(key)), object_version, true FROM whole_snapshot
            WHERE NOT is_delete_marker AND (SELECT bool_or(encoded) FROM skips) AND NOT
                is_supported(key))
    SELECT key, object_version FROM skips ANTI JOIN listed USING (key, object_version, encoded)
        ORDER BY ALL"""


def not_yet_archived(
    snapshot: Path,
    standing: Path,
    out: Path,
    *,
    filters: ObjectFilter = NO_FILTER,
    budget: QueryBudget = DEFAULT_BUDGET,
) -> Delta:
    """Write the objects of `snapshot` that are neither located, nor claimed, nor skipped without
    being due again.

    Args: snapshot: a Parquet file of SNAPSHOT_SCHEMA, sorted by key, then last modified. standing:
        one of STANDING_SCHEMA; several rows of one object block it where any of them does. out:
        gets the objects whose key is supported, `<its stem>.unsupported.parquet` beside it the
        others. Both are
            replaced where they exist, and each is whole or not there at all.
        filters: leave objects out.
        budget: bounds the memory.

    Raises:
        StagingError: a file cannot be written. IntegrityError: a file cannot be read.
    """
    unsupported, refused = (
        out.with_name(f"{out.stem}.{kind}.parquet") for kind in ("unsupported", "refused")
    )
    if not has_rows(snapshot):  # as where nothing is new
        with translate_errors(out):
            for path in (out, unsupported):
                write_whole((), path, SNAPSHOT_SCHEMA)
        return Delta(out, 0, 0, unsupported, 0, {})
    object_bytes = 0
    left_out: Counter[str] = Counter()
    with translate_errors(out), inventory_query(out, budget) as query:
        query.table("whole_standing", standing)
        apart = WholeParquet(refused, SNAPSHOT_SCHEMA, durable=False)

        def wanted() -> Iterator[pa.RecordBatch]:
            nonlocal object_bytes
            for rows in _windows_of_rows(snapshot):
                supported = supported_keys(rows["key"])
                for batch in rows.filter(pc.invert(supported)).to_batches():
                    apart.write(batch)
                kept = _not_left_out(query, rows.filter(supported), filters, left_out)
                for batch in kept.filter(
                    _not_blocked(query, kept, skipped="NOT known.due")
                ).to_batches():
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


def ended_skips(
    snapshot: Path, standing: Path, *, filters: ObjectFilter = NO_FILTER
) -> list[tuple[str, str]]:
    """Return key and object version of the skips that are not due and are none any more by a whole
    snapshot.

    It does not list the object, or a filter leaves that out.

    Args: snapshot: a Parquet file of SNAPSHOT_SCHEMA, with all objects but those of settled keys;
        spills go beside it. standing: one of STANDING_SCHEMA. The keys are as there: encoded where
        they are unsupported. filters: what leaves objects out, which are then not skipped.

    Raises:
        IntegrityError: a file cannot be read. StagingError: there is no room to spill.
    """
    with translate_errors(snapshot), inventory_query(snapshot, DEFAULT_BUDGET) as query:
        query.table("whole_standing", standing)
        if not query.hold("skips", _STANDING_SKIPS):
            return []
        query.table("whole_snapshot", snapshot)
        return [
            (bytes(key).decode(), version)
            for key, version in query.rows(_ENDED_SKIPS.replace("{left_out}", filters.sql))
        ]


def _not_left_out(
    query: Query, rows: pa.Table, filters: ObjectFilter, left_out: Counter[str]
) -> pa.Table:
    """Return the rows that no filter leaves out, and count those of the others that are neither
    located nor claimed.
    """
    if filters == NO_FILTER or not len(rows):
        return rows
    query.rows_of("unfiltered", rows)
    by = pa.Table.from_batches(
        query.batches(f"SELECT {filters.sql} AS left_out_by FROM unfiltered")
    )["left_out_by"]
    others = rows.append_column("left_out_by", by).filter(pc.is_valid(by))
    free = others.filter(_not_blocked(query, others, skipped="false"))
    left_out.update(
        {one["values"]: one["counts"] for one in pc.value_counts(free["left_out_by"]).to_pylist()}
    )
    return rows.filter(pc.is_null(by))


def _windows_of_rows(snapshot: Path) -> Iterator[pa.Table]:
    """Yield the objects of a snapshot, in its order, WINDOW_ROWS at once and at most a row group
    more.
    """
    with opened_parquet(snapshot) as file:
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
    """Return rows of a snapshot without delete markers."""
    return (
        rows.filter(pc.invert(rows["is_delete_marker"]))
        if pc.any(rows["is_delete_marker"]).as_py()
        else rows
    )


def _not_blocked(query: Query, rows: pa.Table, *, skipped: str) -> pa.ChunkedArray:
    """Tell of each row whether it is neither located nor claimed, nor skipped where this is
    `skipped`; by its key as it is.
    """
    if not len(rows):
        return pa.chunked_array([], pa.bool_())
    keys = pc.min_max(rows["key"]).as_py()
    within = (
        f"known.key BETWEEN from_hex('{keys['min'].hex()}') AND from_hex('{keys['max'].hex()}')"
    )
    query.rows_of(
        "listed",
        rows.select(["key", "object_version"]).append_column("row", pa.array(np.arange(len(rows)))),
    )
    blocked = _BLOCKED.format(key="listed.key", encoded="false", within=within, skipped=skipped)
    free = np.ones(len(rows), np.bool_)
    for batch in query.batches(f"SELECT row FROM listed WHERE {blocked}"):
        free[batch["row"].to_numpy()] = False
    return pa.chunked_array([pa.array(free)])
