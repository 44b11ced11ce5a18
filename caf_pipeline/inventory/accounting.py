"""Recomputes from the files alone what became of each object of a snapshot.

It takes nothing from planning, so it counts what planning lost or took twice. Source: promise 2 in
docs/explanation/design.md.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from caf_pipeline.inventory.filters import NO_FILTER, ObjectFilter
from caf_pipeline.inventory.key_windows import ALL_KEYS, KeyWindow, bounded, key_windows
from caf_pipeline.inventory.objects import TIME_FORMAT
from caf_pipeline.inventory.snapshot import inventory_query, verify_snapshot
from caf_pipeline.system.parquet import Query, translate_errors

EXAMPLES: Final = 10


@dataclass(frozen=True, slots=True)
class Accounting:
    """The outcome of each object of a snapshot.

    `objects` are `located + claimed + all skipped + all left out + unaccounted`.

    Attributes:
        claimed: by a chunk under way.
        skipped: by reason; neither located, claimed nor left out.
        left_out: by filter; neither located nor claimed.
        in_two_places: located and claimed; they count as located.
        examples: some unaccounted keys, percent-encoded if unsupported.
        older: located objects whose key has another content now.
        gone: located objects whose key was deleted or is not listed. Neither number includes
            objects that the snapshot may lack: those written at `silent_from` or later, and not
            before everything that it lists of the key.
    """

    objects: int
    located: int
    claimed: int
    skipped: Mapping[str, int]
    unaccounted: int
    in_two_places: int
    examples: Sequence[str]
    current: int = 0
    older: int = 0
    gone: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """True if every object is in exactly one place."""
        return not (self.unaccounted or self.in_two_places)


# One pass with one aggregate over all facts. Joins took more than twice as long.
_PLACES: Final = f"""
    WITH facts AS (
        SELECT
            recorded_key AS key,
            object_version,
            'listed' AS fact,
            NULL AS reason,
            false AS is_late,
            left_out,
            is_latest
        FROM snapshot
        UNION ALL
        SELECT
            key,
            object_version,
            standing,
            reason,
            is_late,
            NULL,
            false
        FROM standing
    ),
    objects AS (
        SELECT
            key,
            count(*) FILTER (fact = 'listed') AS listed,
            bool_or(fact = 'located') AS located,
            bool_or(fact = 'claimed') AS claimed,
            max(reason) FILTER (fact = 'skipped') AS reason,
            bool_and(is_late) FILTER (fact = 'located') AS is_late,
            max(left_out) AS left_out,
            bool_or(is_latest) AS is_latest
        FROM facts
        GROUP BY key, object_version
    )
    SELECT
        listed > 0,
        located AND (listed > 0 OR NOT is_late),
        is_latest,
        claimed,
        reason,
        left_out,
        sum(listed),
        min(key, {EXAMPLES}) FILTER (
            listed > 0
            AND NOT located
            AND NOT claimed
            AND reason IS NULL
            AND left_out IS NULL
        ),
        count(*)
    FROM objects
    GROUP BY ALL"""

# A key with versions but without a latest one is not gone: its current content is unknown.
_GONE: Final = """
    SELECT count(DISTINCT (key, object_version))
    FROM standing
    WHERE standing = 'located'
        AND (NOT is_late OR (key, object_version) IN (SELECT (key, object_version) FROM snapshot))
        AND (
            key NOT IN (SELECT key FROM snapshot)
            OR key IN (SELECT key FROM listed WHERE is_delete_marker AND is_latest)
            AND key NOT IN (SELECT key FROM snapshot WHERE is_latest)
        )"""

# A late location is replaced if the snapshot lists something newer under its key.
_REPLACED: Final = """
    SELECT DISTINCT key, late.object_version
    FROM window_standing AS late
    JOIN listed USING (key)
    WHERE late.standing = 'located'
        AND late.is_late
        AND listed.last_modified > late.last_modified"""
_WITHOUT_REPLACED: Final = """
    SELECT * REPLACE (
        is_late AND (key, object_version) NOT IN (SELECT (key, object_version) FROM replaced)
            AS is_late
    )
    FROM window_standing"""

# Objects with located bytes that were written again: see docs/decisions/0014-what-is-current.md.
_WRITTEN_AGAIN: Final = """
    WITH located AS (FROM window_standing WHERE standing = 'located'),
    claimed AS (FROM window_standing WHERE standing = 'claimed')
    SELECT key, object_version, last_modified, object_version || ':' AS bytes
    FROM objects
    ANTI JOIN located USING (key, object_version, last_modified)
    ANTI JOIN claimed USING (key, object_version)
    SEMI JOIN located AS earlier
        ON earlier.key = objects.key
        AND starts_with(earlier.object_version || ':', objects.object_version || ':')
    WHERE version_id IS NULL"""
_REWRITTEN: Final = f"""
    WITH compared AS (
        SELECT
            again.*,
            bytes || strftime(make_timestamp(epoch_us(again.last_modified)), '{TIME_FORMAT}')
                AS with_time,
            arg_max(exception.object_version, stated_at) AS equal
        FROM written_again AS again
        LEFT JOIN whole_exception AS exception
            ON exception.key = again.key
            AND exception.last_modified = again.last_modified
            AND starts_with(exception.object_version || ':', bytes)
        GROUP BY ALL
    ),
    recorded AS (SELECT (key, object_version) AS object, standing FROM window_standing)
    SELECT
        key,
        object_version,
        CASE
            WHEN (key, with_time) NOT IN (SELECT object FROM recorded WHERE standing <> 'skipped')
                AND (key, equal) IN (SELECT object FROM recorded WHERE standing = 'located')
                THEN equal
            ELSE with_time
        END AS identity
    FROM compared"""
_IDENTIFIED: Final = """
    SELECT * EXCLUDE (identity) REPLACE (coalesce(identity, object_version) AS object_version)
    FROM objects
    LEFT JOIN rewritten USING (key, object_version)"""


def account_for_files(
    snapshot: Path,
    standing: Path,
    exceptions: Path,
    *,
    within: KeyWindow = ALL_KEYS,
    silent_from: datetime | None = None,
    filters: ObjectFilter = NO_FILTER,
    due_skips: bool = True,
) -> Accounting:
    """Recompute what became of each object of a snapshot. Spills go beside the snapshot.

    `standing` has STANDING_SCHEMA, `exceptions` EXCEPTION_SCHEMA. `due_skips` counts due skips,
    which a plan would take. Raises IntegrityError and StagingError.
    """
    verify_snapshot(snapshot)
    with translate_errors(snapshot), inventory_query(snapshot) as query:
        query.table("whole_snapshot", snapshot)
        query.table("standing_rows", standing)
        query.table("whole_exception", exceptions)
        is_late = "false"
        if silent_from:
            time = silent_from.isoformat()
            is_late = f"coalesce(last_modified >= TIMESTAMPTZ '{time}', false)"
        query.view(
            "whole_standing",
            f"""SELECT *, {is_late} AS is_late
            FROM standing_rows
            WHERE {"true" if due_skips else "NOT due"}""",
        )
        rows: list[tuple[Any, ...]] = []
        gone = 0
        for window in key_windows(snapshot, within, known=standing):
            _show_window(query, window, filters)
            window_rows = query.rows(_PLACES)
            if any(
                located and not (listed and is_latest)
                for listed, located, is_latest, *_ in window_rows
            ):
                gone += query.rows(_GONE)[0][0]
            rows += window_rows
        # Unsupported keys are few, and their encoded form has another order.
        query.view(
            "snapshot",
            f"""SELECT
                *,
                encode(percent_encode(key)) AS recorded_key,
                {filters.sql} AS left_out
            FROM whole_snapshot
            WHERE NOT is_delete_marker
                AND NOT is_supported(key)""",
        )
        query.view("standing", "SELECT * FROM whole_standing WHERE reason = 'unsupported_key'")
        rows += query.rows(_PLACES)
        return _accounting(rows, gone)


def _accounting(rows: Iterable[tuple[Any, ...]], gone: int) -> Accounting:
    numbers = dict.fromkeys(
        ("objects", "located", "claimed", "unaccounted", "in_two_places", "current"), 0
    )
    not_current = 0
    skipped: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    examples: list[str] = []
    for (
        listed,
        located,
        is_latest,
        claimed,
        reason,
        left_out_by,
        objects,
        unaccounted,
        identities,
    ) in rows:
        if located:
            is_current = listed and is_latest
            numbers["current"] += identities if is_current else 0
            not_current += 0 if is_current else identities
        if not listed:
            continue
        numbers["objects"] += objects
        numbers["in_two_places"] += objects if located and claimed else 0
        if left_out_by is not None and not located and not claimed:
            left_out[left_out_by] += int(objects)
        elif reason is not None and not located and not claimed:
            skipped[reason] += int(objects)
        else:
            numbers["located" if located else "claimed" if claimed else "unaccounted"] += objects
        examples += [bytes(key).decode() for key in unaccounted or ()]
    return Accounting(
        **{name: int(number) for name, number in numbers.items()},
        skipped={reason: skipped[reason] for reason in sorted(skipped)},
        examples=sorted(examples, key=str.encode)[:EXAMPLES],
        older=not_current - gone,
        gone=gone,
        left_out=dict(left_out),
    )


def _show_window(query: Query, window: KeyWindow, filters: ObjectFilter) -> None:
    within = bounded(window)
    query.view(
        "listed",
        f"""SELECT
            *,
            key AS recorded_key,
            {filters.sql} AS left_out
        FROM whole_snapshot
        WHERE {within}""",
    )
    query.view(
        "window_standing",
        f"""SELECT *
        FROM whole_standing
        WHERE {within}
            AND reason IS DISTINCT FROM 'unsupported_key'""",
    )
    query.view("objects", "FROM listed WHERE NOT is_delete_marker AND is_supported(key)")
    rewritten = query.hold("written_again", _WRITTEN_AGAIN) and query.hold("rewritten", _REWRITTEN)
    query.hold("replaced", _REPLACED)
    query.view("snapshot", _IDENTIFIED if rewritten else "FROM objects")
    query.view("standing", _WITHOUT_REPLACED)
