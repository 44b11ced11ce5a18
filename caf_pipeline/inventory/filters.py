"""Which objects of an inventory the settings of a source leave out.

An object is left out by the first filter that applies, in the order of FILTERS. It stays in the
inventory, and is planned once no filter leaves it out any more. Said twice, in SQL for inventories
and in Python for the pages of a sensor; a test holds one to the other.
"""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Final, Self

from caf_pipeline.inventory.objects import MAX_SIZE_BYTES, S3Object
from caf_pipeline.settings import SourceSettings

FILTERS: Final = ("include", "exclude", "storage_classes", "max_size", "min_age")
"""Names of the settings."""


@dataclass(frozen=True, slots=True)
class ObjectFilter:
    """The filters of a source at one time; an empty one leaves nothing out.

    Attributes:
        include: patterns of keys, of which one must match; none: all keys.
        exclude: patterns of keys, of which none may match.
        storage_classes: those that are archived; none: all.
        max_size_bytes: larger objects are left out; 0: none are.
        newest: objects modified later are left out.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    storage_classes: tuple[str, ...] = ()
    max_size_bytes: int = 0
    newest: datetime | None = None

    @classmethod
    def of(cls, settings: SourceSettings, at: datetime) -> Self:
        """Return the filters that the settings name; ages are those at a time."""
        newest = at - timedelta(seconds=settings.min_age) if settings.min_age else None
        largest = min(
            settings.max_size, MAX_SIZE_BYTES
        )  # no inventory has a larger one, and DuckDB has no number of any size
        return cls(settings.include, settings.exclude, settings.storage_classes, largest, newest)

    def left_out_by(self, obj: S3Object) -> str | None:
        """Return the name of the filter that leaves out an object whose key is supported; None
        where none does.
        """
        key = obj.key.decode()
        by = (
            bool(self.include) and not re.fullmatch(regex_of(self.include), key),
            bool(self.exclude) and bool(re.fullmatch(regex_of(self.exclude), key)),
            bool(self.storage_classes) and obj.storage_class not in self.storage_classes,
            bool(self.max_size_bytes) and obj.size_bytes > self.max_size_bytes,
            self.newest is not None and obj.last_modified > self.newest,
        )
        return next((name for name, applies in zip(FILTERS, by, strict=True) if applies), None)

    @property
    def sql(self) -> str:
        """The same as an expression over the columns of SNAPSHOT_SCHEMA; NULL also for a key that
        is not supported.
        """
        cases = []
        if self.include:
            cases.append(
                (
                    "include",
                    f"NOT regexp_full_match(TRY(decode(key)), {_quoted(regex_of(self.include))})",
                )
            )
        if self.exclude:
            cases.append(
                (
                    "exclude",
                    f"regexp_full_match(TRY(decode(key)), {_quoted(regex_of(self.exclude))})",
                )
            )
        if self.storage_classes:
            cases.append(
                (
                    "storage_classes",
                    f"storage_class NOT IN ({', '.join(map(_quoted, self.storage_classes))})",
                )
            )
        if self.max_size_bytes:
            cases.append(("max_size", f"size_bytes > {self.max_size_bytes}"))
        if self.newest is not None:
            cases.append(("min_age", f"last_modified > TIMESTAMPTZ '{self.newest.isoformat()}'"))
        if not cases:
            return "CAST(NULL AS VARCHAR)"
        whens = " ".join(f"WHEN {condition} THEN '{name}'" for name, condition in cases)
        return f"CASE WHEN NOT is_supported(key) THEN NULL {whens} END"


NO_FILTER: Final = ObjectFilter()


# asked for with each object of a page, and a setting may have tens of thousands of patterns
@lru_cache
def regex_of(patterns: tuple[str, ...]) -> str:
    """Return one expression for whole keys, alike in Python and in RE2, which DuckDB has.

    `*` is any text, '/' too, and `?` any character.
    """
    wild = {"*": ".*", "?": "."}
    return (
        "(?s:"
        + "|".join(
            "".join(wild.get(char) or re.escape(char) for char in pattern) for pattern in patterns
        )
        + ")"
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
