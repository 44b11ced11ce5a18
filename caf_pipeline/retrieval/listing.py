"""Lists archived objects of a source from the ledger: for each key the object that `caf get` reads.

Keys come in byte order. Memory holds one page. Objects located meanwhile may be missing.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from itertools import groupby, islice
from typing import Final
from urllib.parse import quote_from_bytes

from caf_pipeline.inventory.objects import (
    BEHIND_ALL,
    LEAST,
    VERSION_MARK,
    can_be_stored,
    is_supported,
)
from caf_pipeline.ledger.records import ListedObject, Location, LocationLookups

PAGE_KEYS: Final = 1000
"""Keys per query; S3 lists as many."""

PAGE_ROWS: Final = 10_000
"""Rows per query of `list_rows`: a third of the CPU time of pages of 1,000, and about 10 MB."""

DELIMITER: Final = "/"

_NO_KEYS: Final = ("", "")

LocationFilter = Callable[[Location], bool]
RowFilter = Callable[[ListedObject], bool]


def every(location: Location | ListedObject) -> bool:
    """Include every object."""
    return True


def is_current(location: Location | ListedObject) -> bool:
    """Include objects that were in the bucket at the last inventory."""
    return location.status == "current"


def list_objects(
    lookup: LocationLookups,
    source: str,
    prefix: str = "",
    *,
    include: LocationFilter = every,
    as_of: datetime | None = None,
    start_after: str = "",
) -> Iterator[Location]:
    """Yield the included object of each key behind `start_after`, as known at `as_of`.

    A prefix that ends inside a character matches no key.
    """
    pages = _Pages(lookup, source, prefix, start_after)
    while keys := pages.next():
        located = lookup.locate_many(source, keys, as_of=as_of)
        yield from (located[key] for key in keys if key in located and include(located[key]))


def list_rows(
    lookup: LocationLookups,
    source: str,
    prefix: str = "",
    *,
    include: RowFilter = every,
    as_of: datetime | None = None,
    start_after: str = "",
) -> Iterator[ListedObject]:
    """Yield what `list_objects` yields, without the place of the bytes, in less CPU time."""
    if as_of:
        for location in list_objects(lookup, source, prefix, as_of=as_of, start_after=start_after):
            if include(listed := ListedObject.of(location)):
                yield listed
        return
    pages = _Pages(lookup, source, prefix, start_after)
    start = pages.start
    while start is not None:
        rows, start = lookup.list_page(source, start, pages.end, PAGE_ROWS)
        yield from filter(include, rows)


def list_level(
    lookup: LocationLookups,
    source: str,
    prefix: str = "",
    *,
    include: LocationFilter = every,
    as_of: datetime | None = None,
    start_after: str = "",
) -> Iterator[Location | str]:
    """Yield one level below `prefix`, as S3 does with a delimiter.

    A common prefix is text, has an included object, and costs one query. It is left out if it is
    not greater than `start_after`.
    """

    def locate(keys: list[str]) -> dict[str, Location]:
        return {
            key: location
            for key, location in lookup.locate_many(source, keys, as_of=as_of).items()
            if include(location)
        }

    pages = _Pages(lookup, source, prefix, start_after)
    if start_after.startswith(prefix) and (group := common_prefix(prefix, start_after)):
        pages.skip(group)
    while keys := pages.next():
        groups = [
            (group, list(members))
            for group, members in groupby(keys, lambda key: common_prefix(prefix, key) or key)
        ]
        located = locate([members[0] for _, members in groups])
        for group, members in groups:
            if not common_prefix(prefix, members[0]):
                yield from (located[key] for key in members if key in located)
            elif members[0] in located or locate(members[1:]):
                yield group
                if members[-1] == keys[-1]:
                    pages.skip(group)


def list_versions(
    lookup: LocationLookups, source: str, entries: Iterable[Location | str]
) -> Iterator[Location | str]:
    """Yield the entries, each object followed by its older versions, newest first."""
    listed = iter(entries)
    while page := list(islice(listed, PAGE_KEYS)):
        versions = lookup.locate_versions(
            source, [entry.row.key for entry in page if isinstance(entry, Location)]
        )
        for entry in page:
            if isinstance(entry, Location):
                yield from versions.get(entry.row.key, [entry])
            else:
                yield entry


def list_named_versions(
    lookup: LocationLookups, source: str, prefix: str = ""
) -> Iterator[Location]:
    """Yield every version of each key, under a key of its own.

    An older version is named `key~caf-v-<version>`. `~` is appended while an archived key has that
    name.
    """
    listed = list_objects(lookup, source, prefix)
    while page := list(islice(listed, PAGE_KEYS)):
        versions = lookup.locate_versions(source, [location.row.key for location in page])
        older = [location for locations in versions.values() for location in locations[1:]]
        names = [
            f"{location.row.key}{VERSION_MARK}{location.row.version_id or location.row.etag}"
            for location in older
        ]
        taken = set(lookup.locate_many(source, names))
        for number, name in enumerate(names):
            free = name
            while free in taken or (free != name and lookup.locate(source, free)):
                free += "~"
            taken.add(free)
            names[number] = free
        named = iter(names)
        for first, *others in versions.values():
            yield first
            for location in others:
                yield replace(location, row=replace(location.row, key=next(named)))


def count_not_archived(lookup: LocationLookups, source: str, prefix: str) -> tuple[int, int]:
    """Count objects that are not archived yet, and skipped ones."""
    try:
        raw = prefix.encode("utf-8", "surrogateescape")  # as in names from the operating system
    except UnicodeEncodeError:
        return 0, 0
    plain = (prefix, _behind(prefix)) if not prefix or is_supported(raw) else _NO_KEYS
    encoded = quote_from_bytes(raw)
    return lookup.count_not_archived(source, plain, (encoded, _behind(encoded)))


class _Pages:
    def __init__(self, lookup: LocationLookups, source: str, prefix: str, start_after: str) -> None:
        self._lookup = lookup
        self._source = source
        self.start: str | None = prefix if not prefix or can_be_stored(prefix) else None
        self.end = _behind(prefix) or BEHIND_ALL
        if self.start is not None and start_after:
            self.start = max(self.start, f"{start_after}{LEAST}")

    def next(self) -> list[str]:
        if self.start is None:
            return []
        keys = list(self._lookup.archived_keys(self._source, self.start, self.end, PAGE_KEYS))
        if keys:
            self.start = f"{keys[-1]}{LEAST}"
        return keys

    def skip(self, prefix: str) -> None:
        self.start = _behind(prefix)


def common_prefix(prefix: str, key: str) -> str:
    """Return the key up to the first '/' after the prefix; or ""."""
    at = key.find(DELIMITER, len(prefix))
    return key[: at + 1] if at >= 0 else ""


def _behind(prefix: str) -> str | None:
    """Return the least text that is greater than every text with this prefix, or None.

    UTF-8 sorts like code points, except for surrogates.
    """
    least = prefix.rstrip("\U0010ffff")
    if not least:
        return None
    point = ord(least[-1]) + 1
    return least[:-1] + chr(0xE000 if point == 0xD800 else point)
