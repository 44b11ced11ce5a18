"""Forecasts when the bought space ends or is full. No clock, no chain, no ledger."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from caf_pipeline.ledger.records import Chunk
from caf_pipeline.store.jackal import LEAST_BYTES, LEAST_DAYS
from caf_pipeline.store.jackal.answers import StoragePlan

RATE_PERIOD: Final = timedelta(days=7)
"""The archiving rate is measured over a week, which includes quiet nights and weekends."""

DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class StorageForecast:
    """How long the plan lasts.

    Attributes:
        days_left: days until the first of both events, at least 0.
        fills_in_days: days at the recent rate. None if nothing was charged recently.
        charged_per_day: bytes per day; every copy counts.
    """

    days_left: float
    first: Literal["ends", "fills"]
    ends_in_days: float
    fills_in_days: float | None
    charged_per_day: float

    def warning(self, plan: StoragePlan, warn_days: int, waiting_bytes: int) -> str:
        """Return what is wrong with the plan, or "". Every copy counts in `waiting_bytes`."""
        if self.ends_in_days <= 0:
            return f"The bought space ended on {plan.ends_at:%Y-%m-%d}."
        if waiting_bytes > plan.free_bytes:
            return (
                f"The planned chunks need {waiting_bytes:,} bytes for all copies, but only "
                f"{plan.free_bytes:,} bytes are free."
            )
        if self.days_left > warn_days:
            return ""
        if self.first == "fills":
            return f"The bought space is full in {self.days_left:.1f} days at last week's rate."
        return f"The bought space ends on {plan.ends_at:%Y-%m-%d}, in {self.days_left:.1f} days."


def end_warning(
    plan: StoragePlan, latest_end: datetime | None, now: datetime, warn_days: int
) -> str:
    """Return a sentence if the space ends soon or its end moved to an earlier time, otherwise "".

    `latest_end` is the latest that was read since the last purchase.
    """
    if plan.ends_at <= now:
        return f"The bought space ended on {plan.ends_at:%Y-%m-%d}."
    if latest_end is not None and plan.ends_at < latest_end:
        return (
            f"The bought space ends on {plan.ends_at:%Y-%m-%d}. Its end was {latest_end:%Y-%m-%d}, "
            "and no purchase of this ledger moved it."
        )
    days = (plan.ends_at - now) / DAY
    return (
        f"The bought space ends on {plan.ends_at:%Y-%m-%d}, in {days:.1f} days."
        if days < warn_days
        else ""
    )


def to_buy(
    needed_bytes: int, space_bytes: int, latest_end: datetime | None, now: datetime, warn_days: int
) -> str:
    """Return the command that buys the space again.

    It lasts until `latest_end`, and at least twice `warn_days`.
    """
    days_to_latest_end = math.ceil((latest_end - now) / DAY) if latest_end is not None else 0
    days = max(LEAST_DAYS, 2 * warn_days, days_to_latest_end)
    return f"caf jackal buy --bytes {max(needed_bytes, space_bytes, LEAST_BYTES)} --days {days}"


def charged_per_day(chunks: Iterable[Chunk], copies: int, now: datetime) -> float:
    """Return the bytes per day of recently located chunks. Every copy counts."""
    since = now - RATE_PERIOD
    stored = sum(
        chunk.stored_size_bytes
        for chunk in chunks
        if chunk.located_at is not None and chunk.located_at >= since
    )
    return stored * copies / (RATE_PERIOD / DAY)


def forecast_storage(plan: StoragePlan, per_day: float, now: datetime) -> StorageForecast:
    """Return how long the plan lasts at so many charged bytes per day."""
    ends_in = max(0.0, (plan.ends_at - now) / DAY)
    fills_in = None if per_day <= 0 else max(0, plan.free_bytes) / per_day
    if plan.free_bytes <= 0:
        fills_in = 0.0
    if fills_in is not None and fills_in < ends_in:
        return StorageForecast(fills_in, "fills", ends_in, fills_in, per_day)
    return StorageForecast(ends_in, "ends", ends_in, fills_in, per_day)
