"""Forecasts when the bought space ends or is full. No clock, no chain, no ledger."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from caf_pipeline.records import Chunk, StoragePlanRow
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
        """Return why there is too little room, or "". Every copy counts in `waiting_bytes`."""
        if waiting_bytes > plan.free_bytes:
            return (
                f"The planned chunks need {waiting_bytes:,} bytes for all copies, but only "
                f"{plan.free_bytes:,} bytes are free."
            )
        if self.first == "ends" or self.days_left > warn_period(plan, warn_days) / DAY:
            return ""
        return f"The bought space is full in {self.days_left:.1f} days at last week's rate."


def plan_of(reading: StoragePlanRow) -> StoragePlan | None:
    """Return the plan that was read; None if there was none."""
    if reading.ends_at is None:
        return None
    return StoragePlan(
        reading.space_bytes or 0, reading.used_bytes or 0, reading.ends_at, reading.starts_at
    )


def warn_period(plan: StoragePlan, warn_days: int) -> timedelta:
    """Return how long before the plan's end warnings begin: a third of its length at most."""
    most = timedelta(days=warn_days)
    if plan.starts_at is None or plan.starts_at >= plan.ends_at:
        return most
    return min(most, (plan.ends_at - plan.starts_at) / 3)


def warns_from(reading: StoragePlanRow, warn_days: int) -> datetime | None:
    """Return when warnings about the end begin; None if no plan was ever read.

    That is at once if the end moved to an earlier time, and no purchase of this ledger moved it.
    """
    if _ends_earlier(reading):
        return reading.read_at
    plan = plan_of(reading)
    return plan.ends_at - warn_period(plan, warn_days) if plan else None


def _ends_earlier(reading: StoragePlanRow) -> bool:
    if reading.purchase_pending or reading.latest_end is None:
        return False
    return reading.ends_at is None or reading.ends_at < reading.latest_end


def end_warning(reading: StoragePlanRow, now: datetime, warn_days: int) -> str:
    """Return a sentence if the space ends soon, ended, or ends earlier than before; else ""."""
    begins, ends_at = warns_from(reading, warn_days), reading.ends_at or reading.latest_end
    if begins is None or ends_at is None or now < begins:
        return ""
    if ends_at <= now:
        return f"The bought space ended on {ends_at:%Y-%m-%d}."
    if _ends_earlier(reading):
        ends = f"ends on {ends_at:%Y-%m-%d}" if reading.ends_at else "is gone"
        return (
            f"The bought space {ends}. Its end was {reading.latest_end:%Y-%m-%d}, and no purchase "
            "of this ledger moved it."
        )
    return f"The bought space ends on {ends_at:%Y-%m-%d}, in {(ends_at - now) / DAY:.1f} days."


def space_warning(reading: StoragePlanRow, now: datetime, warn_days: int) -> str:
    """Return the warning about the end, and the command that buys the space again; else ""."""
    warning = end_warning(reading, now, warn_days).rstrip(".")
    if not warning:
        return ""
    needed_bytes = max(reading.used_bytes or 0, reading.space_bytes or 0)
    latest_space, latest_end = reading.latest_end_space or 0, reading.latest_end
    return f"{warning}: {to_buy(needed_bytes, latest_space, latest_end, now, warn_days)}"


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
