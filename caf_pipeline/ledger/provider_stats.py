"""What was measured of providers, in the ledger: rates and failures, shared by all runs.

Each count is one statement, so that runs that count at once lose none. Source: "Server limits" in
the notes on Jackal's protocol: what fits an upload follows from the rate.
"""

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Column, func, select
from sqlalchemy.dialects.postgresql import Insert, insert

from caf_pipeline.ledger.engine import LedgerEngine
from caf_pipeline.ledger.tables import PROVIDERS
from caf_pipeline.store.protocol import ProviderRecord

_RECORDS: Final = select(PROVIDERS).order_by(PROVIDERS.c.provider)


def _transferred(rate: Column[Any]) -> Insert:
    """Return the statement that counts a transfer with its `rate`.

    The new rate is half of the old one and half of this one: a provider that became slow is known
    after two or three uploads.
    """
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


class ProviderRecords:
    """Measured rates and failures by provider, kept over runs. Safe in threads."""

    def __init__(self, engine: LedgerEngine) -> None:
        self._engine = engine

    def all(self) -> Mapping[str, ProviderRecord]:
        """Return what is known, by provider."""
        with self._engine.begin() as connection:
            rows = connection.execute(_RECORDS).all()
        return {row.provider: ProviderRecord(**row._asdict()) for row in rows}

    def uploaded(self, provider: str, size_bytes: int, seconds: float) -> None:
        """Count a finished upload: its rate weighs as much as all before together; failures begin
        again at 0.
        """
        with self._engine.begin() as connection:
            connection.execute(
                _UPLOADED, {"provider": provider, "upload_rate": _rate(size_bytes, seconds)}
            )

    def downloaded(self, provider: str, size_bytes: int, seconds: float) -> None:
        """Count a finished download in the same way."""
        with self._engine.begin() as connection:
            connection.execute(
                _DOWNLOADED, {"provider": provider, "download_rate": _rate(size_bytes, seconds)}
            )

    def failed(self, provider: str) -> None:
        """Count a failure."""
        with self._engine.begin() as connection:
            connection.execute(_FAILED, {"provider": provider})


def _rate(size_bytes: int, seconds: float) -> float | None:
    """Return bytes a second; None where there was nothing to measure, which changes no rate."""
    return size_bytes / seconds if size_bytes > 0 and seconds > 0 else None
