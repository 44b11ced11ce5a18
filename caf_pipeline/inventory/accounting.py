"""Where each object of a snapshot has ended, found again from the files, whatever was counted when
they were written.

Source: promise 2 in docs/explanation/design.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from caf_pipeline.inventory.filters import NO_FILTER, ObjectFilter
from caf_pipeline.inventory.key_windows import EVERY_KEY, KeyWindow, bounded, key_windows
from caf_pipeline.inventory.snapshot import inventory_query, show_objects
from caf_pipeline.system.parquet import DEFAULT_BUDGET, Query, QueryBudget, translate_errors

EXAMPLES: Final = 10
"""Unaccounted keys that an accounting names."""


@dataclass(frozen=True, slots=True)
class Accounting:
    """Where each object of a snapshot has ended: `located + claimed + all skipped + all left out +
    unaccounted` are its objects.

    Attributes: claimed: by a chunk under way, or in the plan that was asked about. skipped: by
        reason; only objects that are neither located nor claimed, nor left out. left_out: by the
        filter of the source's settings; only objects that are neither located nor claimed.
        in_two_places: objects both located and claimed (counted as located). planned_twice: objects
        that the plan names more than once. planned_unlisted: objects of the plan that the snapshot
        does not have. examples: some unaccounted keys, percent-encoded where they are not
        supported. current: of the located objects of the snapshot, those that are what their key
        has now. older: located objects that are not, and whose key has another content now. gone:
        located objects whose key has none: a snapshot that covers the key does not list it, or
        lists a delete marker as
            its latest. Neither counts those that it is silent about: written later than what it may
            have, and than all that it lists of the key.
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
        return not (
            self.unaccounted or self.in_two_places or self.planned_twice or self.planned_unlisted
        )


# One pass and one aggregate over everything that is said of an object; joins took more than twice
# as long.
_PLACES: Final = f"""WITH facts AS (
        SELECT CASE WHEN is_supported(key) THEN key ELSE encode(percent_encode(key)) END AS key,
            object_version,
            NOT is_supported(key) AS encoded, 'listed' AS fact, NULL AS reason, false AS untold,
                {{left_out}} AS left_out,
            is_latest
        FROM snapshot
        UNION ALL
        SELECT key, object_version, reason IS NOT DISTINCT FROM 'unsupported_key', standing, reason,
            untold, NULL, false
        FROM standing
        UNION ALL
        SELECT key, object_version, false, 'planned', NULL, false, NULL, false FROM plan
    ), places AS (
        SELECT key, count(*) FILTER (fact = 'listed') AS listed, bool_or(fact = 'located') AS
            located,
            bool_or(fact IN ('claimed', 'planned')) AS claimed, count(*) FILTER (fact = 'planned')
                AS planned,
            max(reason) FILTER (fact = 'skipped') AS reason, bool_and(untold) FILTER (fact =
                'located') AS untold,
            max(left_out) AS left_out, bool_or(is_latest) AS is_latest
        FROM facts GROUP BY key, object_version, encoded
    )
    SELECT listed > 0, located AND (listed > 0 OR NOT untold), is_latest, claimed, reason, left_out,
        sum(listed),
        count(*) FILTER (planned > 0), count(*) FILTER (planned > 1),
        min(key, {EXAMPLES}) FILTER (listed > 0 AND NOT located AND NOT claimed AND reason IS NULL
            AND left_out IS NULL), count(*)
    FROM places GROUP BY ALL"""

# A key that has versions, and none of which is said to be its latest, is not gone: what it has now
# is not known.
_GONE: Final = """SELECT count(DISTINCT (key, object_version)) FROM standing WHERE standing =
    'located'
    AND (NOT untold OR (key, object_version) IN (SELECT (key, object_version) FROM snapshot))
    AND (key NOT IN (SELECT key FROM snapshot)
        OR key IN (SELECT key FROM marker WHERE is_latest) AND key NOT IN (SELECT key FROM snapshot
            WHERE is_latest))"""

# What a key had before what is listed of it was written is no longer what it has, however late it
# was written itself.
_UNTOLD: Final = (
    """SELECT key, object_version, last_modified FROM known WHERE standing = 'located' AND untold"""
)
_REPLACED: Final = """SELECT DISTINCT key, object_version FROM late
    JOIN (SELECT key, last_modified AS listed FROM whole_snapshot WHERE {within}) USING (key) WHERE
        listed > last_modified"""
_WITHOUT_REPLACED: Final = """SELECT * REPLACE (untold
    AND (key, object_version) NOT IN (SELECT (key, object_version) FROM replaced) AS untold) FROM
        known"""

_NO_PLAN: Final = "SELECT key, object_version FROM whole_snapshot WHERE false"


def account_for_files(
    snapshot: Path,
    standing: Path,
    plan: Path | None = None,
    *,
    settled_count: int = 0,
    unsettled_keys: Path | None = None,
    within: KeyWindow = EVERY_KEY,
    silent_from: datetime | None = None,
    filters: ObjectFilter = NO_FILTER,
    due_skips: bool = True,
    budget: QueryBudget = DEFAULT_BUDGET,
) -> Accounting:
    """Find the place of each object of a snapshot again from the files, whatever was counted when
    they were written.

    Args: snapshot: a Parquet file of SNAPSHOT_SCHEMA; spills go beside it. standing: one of
        STANDING_SCHEMA. plan: one with the columns `key` and `object_version`, for a plan that the
        standing may not know yet. settled_count: objects that the snapshot's file does not have,
        since each was seen to be located as it is listed. unsettled_keys: a file of all other keys,
        with a column `key`: of the standing no others are looked at; None: all are. within: the
        keys that the snapshot covers; of others it tells nothing. silent_from: see `Snapshot`.
        filters: what leaves objects out. due_skips: whether a skip counts that is due; a plan takes
        its object, and says itself what it skips again. budget: bounds the memory.

    Raises:
        IntegrityError: a file cannot be read. StagingError: there is no room to spill.
    """
    with translate_errors(snapshot), inventory_query(snapshot, budget) as query:
        query.table("whole_snapshot", snapshot)
        query.table("standing_rows", standing)
        untold = (
            f"coalesce(last_modified >= TIMESTAMPTZ '{silent_from.isoformat()}', false)"
            if silent_from
            else "false"
        )
        counted = "true" if due_skips else "NOT due"
        query.view(
            "whole_standing", f"SELECT *, {untold} AS untold FROM standing_rows WHERE {counted}"
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
                found = query.rows(places)
                if any(
                    located and not (listed and is_latest)
                    for listed, located, is_latest, *_ in found
                ):
                    gone += query.rows(_GONE)[0][0]
                rows += found
        _show_unsupported(query)
        query.view("plan", _NO_PLAN)
        rows += query.rows(places)
        return _counted(rows, gone, settled_count)


def _counted(rows: Iterable[tuple[Any, ...]], gone: int, settled_count: int) -> Accounting:
    numbers = dict.fromkeys(("claimed", "unaccounted", "in_two_places", "planned_twice"), 0)
    numbers |= dict.fromkeys(("objects", "located", "current"), settled_count)
    planned_unlisted = beside = 0
    skipped: dict[str, int] = {}
    left_out: dict[str, int] = {}
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
        nowhere,
        places,
    ) in rows:
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


def _show_window(query: Query, window: KeyWindow, unsettled_keys: Path | None) -> bool:
    """Let `snapshot`, `marker`, `standing` and `plan` stand for the supported keys of a window;
    tell whether there may be any.
    """
    within = bounded(window)
    show_objects(query, f"{within} AND is_supported(key)")
    query.view("plan", f"SELECT * FROM whole_plan WHERE {within}")
    known = f"{within} AND reason IS DISTINCT FROM 'unsupported_key'"
    if unsettled_keys:
        if not query.hold(
            "unsettled",
            f"SELECT key FROM whole_unsettled WHERE {within} UNION SELECT key FROM plan",
        ):
            return False
        known += " AND key IN (FROM unsettled)"
    query.view("known", f"SELECT * FROM whole_standing WHERE {known}")
    replaced = query.hold("late", _UNTOLD) and query.hold(
        "replaced", _REPLACED.replace("{within}", within)
    )
    query.view("standing", _WITHOUT_REPLACED if replaced else "FROM known")
    return True


def _show_unsupported(query: Query) -> None:
    """Let `snapshot` and `standing` stand for the unsupported keys: few, and in another order where
    they are encoded.
    """
    show_objects(query, "NOT is_supported(key)")
    query.view("standing", "SELECT * FROM whole_standing WHERE reason = 'unsupported_key'")
