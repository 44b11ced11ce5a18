"""Measured rates and failures of providers, shared by all runs.

Each count is one statement, so that concurrent runs lose none. Source: "Server limits" in the notes
on Jackal's protocol.
"""

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Column, func, select
from sqlalchemy.dialects.postgresql import Insert, insert

from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.tables import PROVIDERS
from caf_pipeline.store.protocol import ProviderRecord


def _transferred(rate: Column[Any]) -> Insert:
    """The new rate is the mean of the old and this: three uploads show a slow provider."""
    statement = insert(PROVIDERS)
    measured = statement.excluded[rate.name]
    mean = func.coalesce((rate + measured) / 2, measured, rate)
    return statement.on_conflict_do_update(
        index_elements=[PROVIDERS.c.provider], set_={"failures": 0, rate: mean}
    )


_UPLOADED: Final = _transferred(PROVIDERS.c.upload_rate)
_DOWNLOADED: Final = _transferred(PROVIDERS.c.download_rate)
_FIRST_FAILURE: Final = insert(PROVIDERS).values(failures=1, failed_at=func.clock_timestamp())
_FAILED: Final = _FIRST_FAILURE.on_conflict_do_update(
    index_elements=[PROVIDERS.c.provider],
    set_={"failures": PROVIDERS.c.failures + 1, "failed_at": _FIRST_FAILURE.excluded.failed_at},
)


class ProviderRecords(LedgerPart):
    """Measured rates and failures by provider. Safe in threads."""

    def all(self) -> Mapping[str, ProviderRecord]:
        return {
            row.provider: ProviderRecord(**row._asdict())
            for row in self._rows(select(PROVIDERS).order_by(PROVIDERS.c.provider))
        }

    def uploaded(self, provider: str, size_bytes: int, seconds: float) -> None:
        self._execute(_UPLOADED, provider=provider, upload_rate=_rate(size_bytes, seconds))

    def downloaded(self, provider: str, size_bytes: int, seconds: float) -> None:
        self._execute(_DOWNLOADED, provider=provider, download_rate=_rate(size_bytes, seconds))

    def failed(self, provider: str) -> None:
        self._execute(_FAILED, provider=provider)


def _rate(size_bytes: int, seconds: float) -> float | None:
    return size_bytes / seconds if size_bytes > 0 and seconds > 0 else None
