"""The ledger's lookups that retrieval needs."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.location_row import LocationRow
from caf_pipeline.ledger.records import ChunkHeader, Location, NotArchived


class LocationLookups(Protocol):
    """Finds archived objects by source and key.

    `Lookup` implements and documents it.
    """

    def sources(self) -> Sequence[str]: ...

    def locate(
        self,
        source: str,
        key: str,
        object_version: str | None = None,
        *,
        as_of: datetime | None = None,
    ) -> Location | None: ...

    def locate_many(
        self,
        source: str,
        keys: Iterable[str],
        *,
        last_seen: bool = False,
        as_of: datetime | None = None,
    ) -> Mapping[str, Location]: ...

    def locate_versions(
        self, source: str, keys: Iterable[str]
    ) -> Mapping[str, Sequence[Location]]: ...

    def versions(self, source: str, key: str, limit: int) -> tuple[Sequence[LocationRow], int]: ...

    def not_archived(self, source: str, key: str) -> Sequence[NotArchived]: ...

    def archived_keys(
        self, source: str, start: str, end: str | None, limit: int
    ) -> Sequence[str]: ...

    def count_not_archived(
        self, source: str, plain: tuple[str, str | None], encoded: tuple[str, str | None]
    ) -> tuple[int, int]: ...

    def header_sets(self, names: Collection[bytes]) -> Mapping[bytes, ObjectHeaders]: ...

    def chunk_header(self, merkle_root: bytes) -> ChunkHeader | None: ...

    def encrypted_chunk(self, source: str) -> str | None: ...

    def chunks_with_log_times(self, chunks: Collection[str]) -> Collection[str]: ...

    def log_times(
        self, locations: Sequence[Location]
    ) -> Mapping[int, tuple[int | None, int | None]]: ...
