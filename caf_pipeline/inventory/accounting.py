"""Recomputes from the files alone what became of each object of a snapshot.

Source: promise 2 in docs/explanation/design.md.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from caf_pipeline.inventory.filters import NO_FILTER, ObjectFilter
from caf_pipeline.inventory.key_windows import ALL_KEYS, KeyWindow, bounded, key_windows
from caf_pipeline.inventory.snapshot import inventory_query, show_objects
from caf_pipeline.system.parquet import DEFAULT_BUDGET, Query, QueryBudget, translate_errors

EXAMPLES: Final = 10


@dataclass(frozen=True, slots=True)
class Accounting:
    """The outcome of each object of a snapshot.

    `objects` are `located + claimed + all skipped + all left out + unaccounted`.

    Attributes:
        claimed: by a chunk under way, or in the plan.
        skipped: by reason; neither located, claimed nor left out.
        left_out: by filter; neither located nor claimed.
        in_two_places: located and claimed; they count as located.
        examples: some unaccounted keys, percent-encoded if unsupported.
        older: located objects whose key has another content now.
        gone: located objects whose key was deleted or is not listed. Like `older`, without objects
            that the snapshot may lack (`silent_from`).
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
        """True if every object is in exactly one place, and the plan has no others."""
        return not (
            self.unaccounted or self.in_two_places or self.planned_twice or self.planned_unlisted
        )


# One pass with one aggregate over all facts. Joins took more than twice as long.
_PLACES: Final = f"""
    WITH facts AS (
        SELECT
            CASE WHEN is_supported(key) THEN key ELSE encode(percent_encode(key)) END AS key,
            object_version,
            NOT is_supported(key) AS encoded,
            'listed' AS fact,
            NULL AS reason,
            false AS is_late,
            {{left_out}} AS left_out,
            is_latest
        FROM snapshot
        UNION ALL
        SELECT
            key,
            object_version,
            reason IS NOT DISTINCT FROM 'unsupported_key',
            standing,
            reason,
            is_late,
            NULL,
            false
        FROM standing
        UNION ALL
        SELECT key, object_version, false, 'planned', NULL, false, NULL, false
        FROM plan
    ),
    objects AS (
        SELECT
            key,
            count(*) FILTER (fact = 'listed') AS listed,
            bool_or(fact = 'located') AS located,
            bool_or(fact IN ('claimed', 'planned')) AS claimed,
            count(*) FILTER (fact = 'planned') AS planned,
            max(reason) FILTER (fact = 'skipped') AS reason,
            bool_and(is_late) FILTER (fact = 'located') AS is_late,
            max(left_out) AS left_out,
            bool_or(is_latest) AS is_latest
        FROM facts
        GROUP BY key, object_version, encoded
    )
    SELECT
        listed > 0,
        located AND (listed > 0 OR NOT is_late),
        is_latest,
        claimed,
        reason,
        left_out,
        sum(listed),
        count(*) FILTER (planned > 0),
        count(*) FILTER (planned > 1),
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
            OR key IN (SELECT key FROM marker WHERE is_latest)
            AND key NOT IN (SELECT key FROM snapshot WHERE is_latest)
        )"""

# A late location is replaced if the snapshot lists something newer under its key.
_LATE: Final = """
    SELECT key, object_version, last_modified
    FROM window_standing
    WHERE standing = 'located'
        AND is_late"""
_REPLACED: Final = """
    SELECT DISTINCT key, late.object_version
    FROM late
    JOIN whole_snapshot AS listed USING (key)
    WHERE {within}
        AND listed.last_modified > late.last_modified"""
_WITHOUT_REPLACED: Final = """
    SELECT * REPLACE (
        is_late AND (key, object_version) NOT IN (SELECT (key, object_version) FROM replaced)
            AS is_late
    )
    FROM window_standing"""

_NO_PLAN: Final = "SELECT key, object_version FROM whole_snapshot WHERE false"


def account_for_files(
    snapshot: Path,
    standing: Path,
    plan: Path | None = None,
    *,
    settled_count: int = 0,
    unsettled_keys: Path | None = None,
    within: KeyWindow = ALL_KEYS,
    silent_from: datetime | None = None,
    filters: ObjectFilter = NO_FILTER,
    due_skips: bool = True,
    budget: QueryBudget = DEFAULT_BUDGET,
) -> Accounting:
    """Recompute what became of each object of a snapshot. Spills go beside the snapshot.

    `standing` has STANDING_SCHEMA, and may lack the `plan`, a file with `key` and `object_version`.
    `snapshot` lacks `settled_count` objects, whose listed content is located. Only `unsettled_keys`
    of `standing` are read; None: all. `due_skips` counts due skips, which a plan would take. Raises
    IntegrityError and StagingError.
    """
    with translate_errors(snapshot), inventory_query(snapshot, budget) as query:
        query.table("whole_snapshot", snapshot)
        query.table("standing_rows", standing)
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
        if plan:
            query.table("whole_plan", plan)
        else:
            query.view("whole_plan", _NO_PLAN)
        if unsettled_keys:
            query.table("whole_unsettled", unsettled_keys)
        rows: list[tuple[Any, ...]] = []
        gone = 0
        places = _PLACES.replace("{left_out}", filters.sql)
        for window in key_windows(unsettled_keys or snapshot, within):
            if _show_window(query, window, unsettled_keys):
                window_rows = query.rows(places)
                if any(
                    located and not (listed and is_latest)
                    for listed, located, is_latest, *_ in window_rows
                ):
                    gone += query.rows(_GONE)[0][0]
                rows += window_rows
        # Unsupported keys are few, and their encoded form has another order.
        show_objects(query, "NOT is_supported(key)")
        query.view("standing", "SELECT * FROM whole_standing WHERE reason = 'unsupported_key'")
        query.view("plan", _NO_PLAN)
        rows += query.rows(places)
        return _accounting(rows, gone, settled_count)


def _accounting(rows: Iterable[tuple[Any, ...]], gone: int, settled_count: int) -> Accounting:
    numbers = dict.fromkeys(("claimed", "unaccounted", "in_two_places", "planned_twice"), 0)
    numbers |= dict.fromkeys(("objects", "located", "current"), settled_count)
    planned_unlisted = not_current = 0
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
        planned,
        planned_twice,
        unaccounted,
        identities,
    ) in rows:
        if located:
            is_current = listed and is_latest
            numbers["current"] += identities if is_current else 0
            not_current += 0 if is_current else identities
        if not listed:
            planned_unlisted += planned
            continue
        numbers["objects"] += objects
        numbers["planned_twice"] += planned_twice
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
        planned_unlisted=int(planned_unlisted),
        examples=sorted(examples, key=str.encode)[:EXAMPLES],
        older=not_current - gone,
        gone=gone,
        left_out=dict(left_out),
    )


def _show_window(query: Query, window: KeyWindow, unsettled_keys: Path | None) -> bool:
    within = bounded(window)
    show_objects(query, f"{within} AND is_supported(key)")
    query.view("plan", f"SELECT * FROM whole_plan WHERE {within}")
    condition = f"{within} AND reason IS DISTINCT FROM 'unsupported_key'"
    if unsettled_keys:
        if not query.hold(
            "unsettled",
            f"SELECT key FROM whole_unsettled WHERE {within} UNION SELECT key FROM plan",
        ):
            return False
        condition += " AND key IN (FROM unsettled)"
    query.view("window_standing", f"SELECT * FROM whole_standing WHERE {condition}")
    replaced = query.hold("late", _LATE) and query.hold(
        "replaced", _REPLACED.replace("{within}", within)
    )
    query.view("standing", _WITHOUT_REPLACED if replaced else "FROM window_standing")
    return True
