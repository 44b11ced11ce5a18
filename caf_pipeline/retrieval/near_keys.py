"""Suggests what a key that is not archived may stand for: a prefix, or another spelling."""

import re
import shlex
from itertools import islice
from typing import Final

from caf_pipeline.inventory.objects import can_be_stored
from caf_pipeline.ledger.records import LocationLookups
from caf_pipeline.retrieval.listing import DELIMITER, PAGE_ROWS, list_objects, list_rows
from caf_pipeline.settings_errors import nearest

NEIGHBOURS: Final = 100
"""Keys with the same beginning that are compared with a mistyped key."""

LIKE: Final = 0.8
"""Similarity of a mistyped key, as `nearest` counts."""


def suggestion(lookup: LocationLookups, source: str, key: str) -> str:
    """Return a hint for a key without any record, or "".

    Reads at most a page of keys for each of a few spellings.
    """
    in_bucket = re.sub(r"^s3://[^/]+/", "", key)
    spellings = [key, in_bucket, in_bucket.lstrip(DELIMITER), in_bucket.strip(DELIMITER)]
    beginnings: list[str] = []
    if can_be_stored(spellings[-1]):
        beginnings = [*lookup.spelled_in_any_case(source, spellings[-1])]
    cases = [beginning for beginning in beginnings if len(beginning) == len(spellings[-1])]
    for spelling in dict.fromkeys([*spellings, *cases]):
        if can_be_stored(spelling) and (hint := _suggested(lookup, source, spelling)):
            return hint
    for beginning in beginnings:
        keys = [
            location.row.key
            for location in islice(list_objects(lookup, source, beginning), NEIGHBOURS)
        ]
        if near := nearest(spellings[-1], keys, LIKE):
            return (
                f"did you mean '{near}'? Otherwise no planned inventory has the key, or a filter "
                "leaves it out: see 'caf status'"
            )
    return ""


def _suggested(lookup: LocationLookups, source: str, spelling: str) -> str:
    for prefix in dict.fromkeys([spelling.rstrip(DELIMITER) + DELIMITER, spelling]):
        rows = list(islice(list_rows(lookup, source, prefix), PAGE_ROWS + 1))
        if prefix == spelling and any(row.key == spelling for row in rows[:1]):
            return f"did you mean '{spelling}'?"
        if len(rows) == 1:
            return f"did you mean '{rows[0].key}'?"
        if rows:
            more = "more than " * (len(rows) > PAGE_ROWS)
            count = min(len(rows), PAGE_ROWS)
            return (
                f"{more}{count:,} archived keys begin with '{prefix}': 'caf restore {source} "
                f"{shlex.quote(prefix)} DIR' restores them"
            )
    return ""
