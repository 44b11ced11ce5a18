"""The filters in a source's settings that leave out objects.

The first of FILTERS that applies leaves an object out. Filters exist in SQL for inventories, and in
Python for a sensor's pages; a test compares the two.
"""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Final, Self

from caf_pipeline.inventory.objects import MAX_SIZE_BYTES, S3Object
from caf_pipeline.settings import SourceSettings

FILTERS: Final = ("include", "exclude", "storage_classes", "max_size", "min_age")


@dataclass(frozen=True, slots=True)
class ObjectFilter:
    """The filters of a source at one time. Objects modified after `newest` are left out."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    storage_classes: tuple[str, ...] = ()
    max_size_bytes: int = 0
    newest: datetime | None = None

    @classmethod
    def of(cls, settings: SourceSettings, at: datetime) -> Self:
        """Minimum ages count back from `at`."""
        newest = at - timedelta(seconds=settings.min_age) if settings.min_age else None
        largest = min(settings.max_size, MAX_SIZE_BYTES)  # DuckDB's integers are bounded
        return cls(settings.include, settings.exclude, settings.storage_classes, largest, newest)

    def left_out_by(self, obj: S3Object) -> str | None:
        """The object's key must be supported."""
        key = obj.key.decode()
        applies = (
            bool(self.include) and not re.fullmatch(regex_of(self.include), key),
            bool(self.exclude) and bool(re.fullmatch(regex_of(self.exclude), key)),
            bool(self.storage_classes) and obj.storage_class not in self.storage_classes,
            bool(self.max_size_bytes) and obj.size_bytes > self.max_size_bytes,
            self.newest is not None and obj.last_modified > self.newest,
        )
        return next((name for name, hit in zip(FILTERS, applies, strict=True) if hit), None)

    @property
    def sql(self) -> str:
        """`left_out_by` in SQL over SNAPSHOT_SCHEMA; NULL for an unsupported key."""
        cases = []
        if self.include:
            pattern = _quoted(regex_of(self.include))
            cases.append(("include", f"NOT regexp_full_match(TRY(decode(key)), {pattern})"))
        if self.exclude:
            pattern = _quoted(regex_of(self.exclude))
            cases.append(("exclude", f"regexp_full_match(TRY(decode(key)), {pattern})"))
        if self.storage_classes:
            classes = ", ".join(map(_quoted, self.storage_classes))
            cases.append(("storage_classes", f"storage_class NOT IN ({classes})"))
        if self.max_size_bytes:
            cases.append(("max_size", f"size_bytes > {self.max_size_bytes}"))
        if self.newest is not None:
            cases.append(("min_age", f"last_modified > TIMESTAMPTZ '{self.newest.isoformat()}'"))
        if not cases:
            return "CAST(NULL AS VARCHAR)"
        whens = " ".join(f"WHEN {condition} THEN '{name}'" for name, condition in cases)
        return f"CASE WHEN NOT is_supported(key) THEN NULL {whens} END"


NO_FILTER: Final = ObjectFilter()


# Cached because every object of a page needs it, and a setting may have tens of thousands of
# patterns.
@lru_cache
def regex_of(patterns: tuple[str, ...]) -> str:
    """Return one regular expression for whole keys, valid in Python and in DuckDB's RE2.

    `*` matches any text including '/', and `?` any character.
    """
    wildcards = {"*": ".*", "?": "."}
    expressions = (
        "".join(wildcards.get(char) or re.escape(char) for char in pattern) for pattern in patterns
    )
    return f"(?s:{'|'.join(expressions)})"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
