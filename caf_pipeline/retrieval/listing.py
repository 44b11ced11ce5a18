"""Lists what is archived of a source: for each key the object that `caf get` gives, read from the
ledger in pages.

Keys come in the order of their bytes. Each page is of one moment: what becomes located meanwhile
may be missing. Memory is a page, however many keys there are.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from itertools import groupby, islice
from typing import Final
from urllib.parse import quote_from_bytes

from caf_pipeline.inventory.objects import VERSION_MARK, can_be_stored, is_supported
from caf_pipeline.ledger.protocol import LocationLookups
from caf_pipeline.ledger.records import Location

PAGE_KEYS: Final = 1000
"""Of one question; S3 lists as many."""

DELIMITER: Final = "/"

_NO_KEYS: Final = ("", "")

Wanted = Callable[[Location], bool]


def every(location: Location) -> bool:
    """Want each object."""
    return True


def is_current(location: Location) -> bool:
    """Want what the bucket had at the last inventory."""
    return location.status == "current"


def list_objects(
    lookup: LocationLookups,
    source: str,
    prefix: str = "",
    *,
    wanted: Wanted = every,
    as_of: datetime | None = None,
) -> Iterator[Location]:
    """Yield the object of each key that begins with `prefix`, where it is `wanted`; as of a time,
    what is known up to it.

    A prefix is of whole characters: one that ends inside a character begins no key.
    """
    pages = _Pages(lookup, source, prefix)
    while keys := pages.next():
        found = lookup.locate_many(source, keys, as_of=as_of)
        yield from (found[key] for key in keys if key in found and wanted(found[key]))


def list_level(
    lookup: LocationLookups,
    source: str,
    prefix: str = "",
    *,
    wanted: Wanted = every,
    as_of: datetime | None = None,
) -> Iterator[Location | str]:
    """Yield what is below `prefix` up to the next '/', as S3 lists with a delimiter: objects, and
    common prefixes as text.

    A common prefix has at least one object that is wanted. It costs one question, however many
    objects it has.
    """

    def found(keys: list[str]) -> dict[str, Location]:
        return {
            key: one
            for key, one in lookup.locate_many(source, keys, as_of=as_of).items()
            if wanted(one)
        }

    pages = _Pages(lookup, source, prefix)
    while keys := pages.next():
        groups = [
            (group, list(members))
            for group, members in groupby(keys, lambda key: common_prefix(prefix, key) or key)
        ]
        located = found([members[0] for _, members in groups])
        for group, members in groups:
            if not common_prefix(prefix, members[0]):
                yield from (located[key] for key in members if key in located)
            elif members[0] in located or found(members[1:]):
                yield group
                if members[-1] == keys[-1]:
                    pages.skip(group)


def list_versions(
    lookup: LocationLookups, source: str, entries: Iterable[Location | str]
) -> Iterator[Location | str]:
    """Yield what `list_level` or `list_objects` yields, and behind each object the older versions
    of its key, newer first.
    """
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
    """Yield every version of each key below a prefix under its own key, as members of a chunk are
    named.

    An older version of `key` is `key~caf-v-<version>`; `~` is appended while an archived key has
    that name.
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
    """Return how many objects below a prefix are still to be archived, and how many were skipped:
    what no listing has.
    """
    try:
        raw = prefix.encode("utf-8", "surrogateescape")  # as names of the operating system are
    except UnicodeEncodeError:
        return 0, 0
    plain = (prefix, _behind(prefix)) if not prefix or is_supported(raw) else _NO_KEYS
    encoded = quote_from_bytes(raw)
    return lookup.count_not_archived(source, plain, (encoded, _behind(encoded)))


class _Pages:
    """The keys of a source that begin with a prefix, a page at a time."""

    def __init__(self, lookup: LocationLookups, source: str, prefix: str) -> None:
        self._lookup = lookup
        self._source = source
        self._start: str | None = prefix if not prefix or can_be_stored(prefix) else None
        self._end = _behind(prefix)

    def next(self) -> list[str]:
        """Return the next keys, none at the end."""
        if self._start is None:
            return []
        keys = list(self._lookup.archived_keys(self._source, self._start, self._end, PAGE_KEYS))
        if keys:
            self._start = f"{keys[-1]}\x01"  # the least text behind a key: no key has a NUL
        return keys

    def skip(self, prefix: str) -> None:
        """Go on behind all keys that begin with a prefix."""
        self._start = _behind(prefix)


def common_prefix(prefix: str, key: str) -> str:
    """Return a key up to and including the first '/' behind the prefix, "" where there is none."""
    at = key.find(DELIMITER, len(prefix))
    return key[: at + 1] if at >= 0 else ""


def _behind(prefix: str) -> str | None:
    """Return the least text that is greater than all that begins with a prefix; None where there is
    none.

    UTF-8 has the order of code points, but for surrogates, which are not text.
    """
    least = prefix.rstrip("\U0010ffff")
    if not least:
        return None
    point = ord(least[-1]) + 1
    return least[:-1] + chr(0xE000 if point == 0xD800 else point)
