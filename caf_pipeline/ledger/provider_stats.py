"""What was measured of providers, in the ledger: rates and failures, shared by all runs.

Each count is one statement, so that runs that count at once lose none.
Source: "Server limits" in the notes on Jackal's protocol: what fits an upload follows from the rate.
"""

from collections.abc import Mapping

from caf_pipeline.ledger.engine import LedgerEngine
from caf_pipeline.store.protocol import ProviderRecord

# Half of what it was, half of what it is: a provider that became slow is known after two or three uploads.
_TRANSFERRED = """
    INSERT INTO providers AS old (provider, {rate}) VALUES (%(provider)s, %(rate)s)
    ON CONFLICT (provider) DO UPDATE SET failures = 0,
        {rate} = coalesce((old.{rate} + excluded.{rate}) / 2, excluded.{rate}, old.{rate})
"""
_UPLOADED = _TRANSFERRED.format(rate="upload_rate")
_DOWNLOADED = _TRANSFERRED.format(rate="download_rate")
_FAILED = (
    "INSERT INTO providers AS old (provider, failures, failed_at) VALUES (%(provider)s, 1, clock_timestamp())"
    " ON CONFLICT (provider) DO UPDATE SET failures = old.failures + 1, failed_at = excluded.failed_at"
)


class ProviderRecords:
    """Measured rates and failures by provider, kept over runs. Safe in threads."""

    def __init__(self, engine: LedgerEngine) -> None:
        self._engine = engine

    def all(self) -> Mapping[str, ProviderRecord]:
        """Return what is known, by provider."""
        with self._engine.begin() as connection:
            rows = connection.exec_driver_sql(
                "SELECT provider, upload_rate, download_rate, failures, failed_at FROM providers ORDER BY provider"
            ).fetchall()
        return {row.provider: ProviderRecord(**row._asdict()) for row in rows}

    def uploaded(self, provider: str, size_bytes: int, seconds: float) -> None:
        """Count a finished upload: its rate weighs as much as all before together; failures begin again at 0."""
        with self._engine.begin() as connection:
            connection.exec_driver_sql(_UPLOADED, {"provider": provider, "rate": _rate(size_bytes, seconds)})

    def downloaded(self, provider: str, size_bytes: int, seconds: float) -> None:
        """Count a finished download in the same way."""
        with self._engine.begin() as connection:
            connection.exec_driver_sql(_DOWNLOADED, {"provider": provider, "rate": _rate(size_bytes, seconds)})

    def failed(self, provider: str) -> None:
        """Count a failure."""
        with self._engine.begin() as connection:
            connection.exec_driver_sql(_FAILED, {"provider": provider})


def _rate(size_bytes: int, seconds: float) -> float | None:
    """Return bytes a second; None where there was nothing to measure, which changes no rate."""
    return size_bytes / seconds if size_bytes > 0 and seconds > 0 else None
