"""Selects the objects of a snapshot to plan, in bounded memory.

Source: "Which objects are archived" in docs/explanation/design.md.
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
    open_parquet,
    supported_keys,
)
from caf_pipeline.system.parquet import (
    Query,
    WholeParquet,
    sum_of,
    translate_errors,
    write_whole,
)
from caf_pipeline.system.pipeline_threads import prefetch_next


@dataclass(frozen=True, slots=True)
class Delta:
    """The objects of a snapshot to plan (SNAPSHOT_SCHEMA), sorted by key, then last modified.

    `unsupported` is a file of objects to skip for their key. `left_out` counts objects by filter
    that are neither located nor claimed.
    """

    path: Path
    object_count: int
    object_bytes: int
    unsupported: Path
    unsupported_count: int
    left_out: Mapping[str, int]


# The reason tells an encoded key apart from an equal key that has a percent sign itself.
_BLOCKED: Final = """EXISTS (
        SELECT 1
        FROM whole_standing AS standing
        WHERE standing.key = {key}
            AND standing.object_version = listed.object_version
            AND {within}
            AND (standing.standing <> 'skipped' OR {skipped})
            AND (standing.reason IS NOT DISTINCT FROM 'unsupported_key') = {encoded}
    )"""

_NOT_DUE: Final = "NOT standing.due"
_ENCODED_BLOCKED: Final = _BLOCKED.format(
    key="listed.encoded_key", encoded="true", within="true", skipped=_NOT_DUE
)
_UNSUPPORTED: Final = f"""
    SELECT *
    FROM (SELECT *, encode(percent_encode(key)) AS encoded_key FROM unsupported) AS listed
    WHERE NOT {_ENCODED_BLOCKED}
    ORDER BY key, last_modified, object_version"""

_SKIPS_NOT_DUE: Final = """
    SELECT key, object_version, reason = 'unsupported_key' AS encoded
    FROM whole_standing
    WHERE standing = 'skipped'
        AND NOT due"""

# Python encodes keys one by one: only unsupported keys, and only if such a skip exists.
_ENDED_SKIPS: Final = """
    WITH listed AS (
        SELECT key, object_version, false AS encoded
        FROM whole_snapshot
        SEMI JOIN skips USING (key, object_version)
        WHERE NOT is_delete_marker
            AND is_supported(key)
            AND {left_out} IS NULL
        UNION ALL
        SELECT encode(percent_encode(key)), object_version, true
        FROM whole_snapshot
        WHERE NOT is_delete_marker
            AND (SELECT bool_or(encoded) FROM skips)
            AND NOT is_supported(key)
    )
    SELECT key, object_version
    FROM skips
    ANTI JOIN listed USING (key, object_version, encoded)
    ORDER BY ALL"""


def not_yet_archived(
    snapshot: Path,
    standing: Path,
    out: Path,
    *,
    filters: ObjectFilter = NO_FILTER,
) -> Delta:
    """Write the objects of a snapshot that are neither located, claimed nor skipped to `out`.

    Due skips are planned again. Any of an object's rows in `standing` may block it. The files
    replace existing ones, and are complete or missing. Raises StagingError and IntegrityError.
    """
    unsupported, candidates = (
        out.with_name(f"{out.stem}.{kind}.parquet") for kind in ("unsupported", "candidates")
    )
    if not has_rows(snapshot):
        with translate_errors(out):
            for path in (out, unsupported):
                write_whole((), path, SNAPSHOT_SCHEMA)
        return Delta(out, 0, 0, unsupported, 0, {})
    object_bytes = 0
    left_out: Counter[str] = Counter()
    with translate_errors(out), inventory_query(out) as query:
        query.table("whole_standing", standing)
        unsupported_rows = WholeParquet(candidates, SNAPSHOT_SCHEMA, durable=False)

        def planned() -> Iterator[pa.RecordBatch]:
            nonlocal object_bytes
            for rows in _windows_of_rows(snapshot):
                supported = supported_keys(rows["key"])
                for batch in rows.filter(pc.invert(supported)).to_batches():
                    unsupported_rows.write(batch)
                kept = _not_left_out(query, rows.filter(supported), filters, left_out)
                unblocked = kept.filter(_not_blocked(query, kept, skipped=_NOT_DUE))
                for batch in unblocked.to_batches():
                    object_bytes += sum_of(batch, "size_bytes")
                    yield batch

        try:
            objects = write_whole(prefetch_next(planned()), out, SNAPSHOT_SCHEMA)
            unsupported_rows.close({})
            unsupported_rows.publish()
            query.table("unsupported", candidates)
            skipped = write_whole(query.batches(_UNSUPPORTED), unsupported, SNAPSHOT_SCHEMA)
        finally:
            unsupported_rows.abort()
            candidates.unlink(missing_ok=True)
    return Delta(out, objects.row_count, object_bytes, unsupported, skipped.row_count, left_out)


def ended_skips(
    snapshot: Path, standing: Path, *, filters: ObjectFilter = NO_FILTER
) -> list[tuple[str, str]]:
    """Return key and object version of the skips that a complete snapshot ends.

    They are not due, and their objects are not listed, or a filter leaves them out. The snapshot's
    file may lack settled keys. Unsupported keys are percent-encoded. Raises as `not_yet_archived`.
    """
    with translate_errors(snapshot), inventory_query(snapshot) as query:
        query.table("whole_standing", standing)
        if not query.hold("skips", _SKIPS_NOT_DUE):
            return []
        query.table("whole_snapshot", snapshot)
        return [
            (bytes(key).decode(), version)
            for key, version in query.rows(_ENDED_SKIPS.replace("{left_out}", filters.sql))
        ]


def _not_left_out(
    query: Query, rows: pa.Table, filters: ObjectFilter, left_out: Counter[str]
) -> pa.Table:
    if filters == NO_FILTER or not len(rows):
        return rows
    query.rows_of("unfiltered", rows)
    batches = query.batches(f"SELECT {filters.sql} AS left_out_by FROM unfiltered")
    left_out_by = pa.Table.from_batches(batches)["left_out_by"]
    others = rows.append_column("left_out_by", left_out_by).filter(pc.is_valid(left_out_by))
    unblocked = others.filter(_not_blocked(query, others, skipped="false"))
    counts = pc.value_counts(unblocked["left_out_by"]).to_pylist()
    left_out.update({row["values"]: row["counts"] for row in counts})
    return rows.filter(pc.is_null(left_out_by))


def _windows_of_rows(snapshot: Path) -> Iterator[pa.Table]:
    with open_parquet(snapshot) as file:
        groups: list[int] = []
        for group in range(file.num_row_groups):
            groups.append(group)
            count = sum(file.metadata.row_group(group).num_rows for group in groups)
            if count and (count >= WINDOW_ROWS or group == file.num_row_groups - 1):
                rows = file.read_row_groups(groups)
                groups = []
                if pc.any(rows["is_delete_marker"]).as_py():
                    rows = rows.filter(pc.invert(rows["is_delete_marker"]))
                if len(rows):
                    yield rows


def _not_blocked(query: Query, rows: pa.Table, *, skipped: str) -> pa.ChunkedArray:
    if not len(rows):
        return pa.chunked_array([], pa.bool_())
    keys = pc.min_max(rows["key"]).as_py()
    first, last = keys["min"].hex(), keys["max"].hex()
    within = f"standing.key BETWEEN from_hex('{first}') AND from_hex('{last}')"
    numbers = pa.array(np.arange(len(rows)))
    query.rows_of("listed", rows.select(["key", "object_version"]).append_column("row", numbers))
    blocked = _BLOCKED.format(key="listed.key", encoded="false", within=within, skipped=skipped)
    unblocked = np.ones(len(rows), np.bool_)
    for batch in query.batches(f"SELECT row FROM listed WHERE {blocked}"):
        unblocked[batch["row"].to_numpy()] = False
    return pa.chunked_array([pa.array(unblocked)])
