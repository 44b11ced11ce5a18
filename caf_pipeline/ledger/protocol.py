"""The ledger's lookups that retrieval needs."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.location_row import LocationRow
from caf_pipeline.ledger.records import Location, NotArchived


class LocationLookups(Protocol):
    """Finds archived objects by source and key. `Lookup` implements it and documents the errors."""

    def sources(self) -> Sequence[str]:
        """Return the names of all sources ever registered."""

    def locate(
        self,
        source: str,
        key: str,
        object_version: str | None = None,
        *,
        as_of: datetime | None = None,
    ) -> Location | None:
        """Return the current location of a key, or the location of one version."""

    def locate_many(
        self,
        source: str,
        keys: Iterable[str],
        *,
        last_seen: bool = False,
        as_of: datetime | None = None,
    ) -> Mapping[str, Location]:
        """Return the current location of each archived key."""

    def locate_versions(self, source: str, keys: Iterable[str]) -> Mapping[str, Sequence[Location]]:
        """Return the located versions of each key, the current version first, then newest first."""

    def versions(self, source: str, key: str, limit: int) -> tuple[Sequence[LocationRow], int]:
        """Return up to `limit` located versions of a key, latest first, and their total number."""

    def not_archived(self, source: str, key: str) -> Sequence[NotArchived]:
        """Return the identities of a key that are claimed, skipped, or in a lost chunk."""

    def archived_keys(self, source: str, start: str, end: str | None, limit: int) -> Sequence[str]:
        """Return up to `limit` keys in `[start, end)` in byte order. `end` None: no upper bound."""

    def count_not_archived(
        self, source: str, plain: tuple[str, str | None], encoded: tuple[str, str | None]
    ) -> tuple[int, int]:
        """Return how many objects are still to be archived, and how many were skipped."""

    def header_sets(self, names: Collection[bytes]) -> Mapping[bytes, ObjectHeaders]:
        """Return the header sets with these names."""

    def chunks_with_log_times(self, chunks: Collection[str]) -> Collection[str]:
        """Return the chunks whose packing looked for logs."""

    def log_times(
        self, locations: Sequence[Location]
    ) -> Mapping[int, tuple[int | None, int | None]]:
        """Return the first and last time of each log, by its position in `locations`."""
