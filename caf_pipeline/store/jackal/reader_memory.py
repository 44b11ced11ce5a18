"""A reader's memory of nodes and providers.

It starts with the ledger's records and writes nothing there.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from caf_pipeline.records import ProviderRecord

RECORDS_SECONDS: Final = 60.0
"""Maximum age of the ledger's records, so that most reads do not query the database."""


class ReaderHeights:
    """The greatest block heights seen by this process or recorded in the ledger."""

    def __init__(self, recorded: Callable[[str], int]) -> None:
        self._recorded = recorded
        self._seen = dict[str, int]()

    def seen_height(self, chain_id: str) -> int:
        return max(self._seen.get(chain_id, 0), self._recorded(chain_id))

    def see_height(self, chain_id: str, height: int) -> None:
        self._seen[chain_id] = max(height, self._seen.get(chain_id, 0))


class ReaderRecords:
    """The ledger's records of providers and this process's downloads. Safe for several threads."""

    def __init__(self, recorded: Callable[[], Mapping[str, ProviderRecord]]) -> None:
        self._recorded = recorded
        self._cached: tuple[float, Mapping[str, ProviderRecord]] | None = None
        self._measured = dict[str, ProviderRecord]()

    def all(self) -> Mapping[str, ProviderRecord]:
        cached = self._cached
        if cached is None or time.monotonic() - cached[0] >= RECORDS_SECONDS:
            cached = self._cached = time.monotonic(), self._recorded()
        return {**cached[1], **self._measured}

    def uploaded(self, provider: str, size_bytes: int, seconds: float) -> None:
        """Do nothing: a reader uploads nothing."""

    def downloaded(self, provider: str, size_bytes: int, seconds: float) -> None:
        """Also reset the failures. The rate weighs as much as all earlier ones together."""
        record = self._record(provider)
        rate = size_bytes / seconds if size_bytes > 0 and seconds > 0 else record.download_rate
        if rate is not None and record.download_rate is not None:
            rate = (rate + record.download_rate) / 2
        self._measured[provider] = replace(record, download_rate=rate, failures=0)

    def failed(self, provider: str) -> None:
        record = self._record(provider)
        self._measured[provider] = replace(
            record, failures=record.failures + 1, failed_at=datetime.now(UTC)
        )

    def _record(self, provider: str) -> ProviderRecord:
        return self.all().get(provider) or ProviderRecord(provider, None, None, 0, None)
