"""When the bought space will end or be full: what comes first, and in how many days.

Pure: no clock, no chain, no ledger.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from caf_pipeline.ledger.records import Chunk
from caf_pipeline.store.jackal import LEAST_BYTES, LEAST_DAYS
from caf_pipeline.store.jackal.answers import StoragePlan

LATELY: Final = timedelta(days=7)
"""Over which the rate of archiving is taken: a week, so that quiet nights and weekends count as
what they are.
"""

DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class StorageForecast:
    """How long the plan lasts.

    Attributes:
        days_left: until it ends or is full, whichever comes first; 0 where it is over.
        first: what comes first: "ends" or "fills".
        ends_in_days: until its end.
        fills_in_days: until it is full, at the rate of late; None where nothing was charged lately.
        charged_per_day: bytes a day, every copy counted.
    """

    days_left: float
    first: Literal["ends", "fills"]
    ends_in_days: float
    fills_in_days: float | None
    charged_per_day: float

    def warning(self, plan: StoragePlan, warn_days: int, waiting_bytes: int) -> str:
        """Return what is wrong with the plan in one sentence; "" where it lasts.

        Args:
            plan: that was looked at.
            warn_days: it should neither end nor fill within so many days.
            waiting_bytes: planned and not yet posted, every copy counted.
        """
        if self.ends_in_days <= 0:
            return f"The bought space ended on {plan.ends_at:%Y-%m-%d}."
        if waiting_bytes > plan.free_bytes:
            return (
                f"What is planned takes {waiting_bytes:,} bytes, copies included; "
                f"{plan.free_bytes:,} are free."
            )
        if self.days_left > warn_days:
            return ""
        if self.first == "fills":
            return (
                f"The bought space is full in {self.days_left:.1f} days at the rate of the "
                "last "
                "week."
            )
        return f"The bought space ends on {plan.ends_at:%Y-%m-%d}, in {self.days_left:.1f} days."


def end_warning(
    plan: StoragePlan, latest_end: datetime | None, now: datetime, warn_days: int
) -> str:
    """Return a sentence if the space ends soon, or if its end moved to an earlier time; ""
    otherwise.

    Args:
        plan: as the chain has it.
        latest_end: the latest end that was read since the last purchase; None if it is not known.
        now: by the chain.
        warn_days: fewer days than these are soon.
    """
    if plan.ends_at <= now:
        return f"The bought space ended on {plan.ends_at:%Y-%m-%d}."
    if latest_end is not None and plan.ends_at < latest_end:
        return (
            f"The bought space ends on {plan.ends_at:%Y-%m-%d}. Its end was {latest_end:%Y-%m-%d}, "
            "and no purchase of this"
            " ledger moved it."
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
    """Return the command that buys the space again: until the latest end that was seen, or twice
    `warn_days` at least.
    """
    days_to_latest_end = math.ceil((latest_end - now) / DAY) if latest_end is not None else 0
    days = max(LEAST_DAYS, 2 * warn_days, days_to_latest_end)
    return f"caf jackal buy --bytes {max(needed_bytes, space_bytes, LEAST_BYTES)} --days {days}"


def charged_per_day(chunks: Iterable[Chunk], copies: int, now: datetime) -> float:
    """Return the bytes a day, every copy counted, of the chunks that were located lately."""
    since = now - LATELY
    stored = sum(
        chunk.stored_size_bytes
        for chunk in chunks
        if chunk.located_at is not None and chunk.located_at >= since
    )
    return stored * copies / (LATELY / DAY)


def look_ahead(plan: StoragePlan, per_day: float, now: datetime) -> StorageForecast:
    """Return how long the plan lasts.

    Args:
        plan: as the chain has it.
        per_day: bytes charged a day, every copy counted.
        now: aware.
    """
    ends_in = max(0.0, (plan.ends_at - now) / DAY)
    fills_in = None if per_day <= 0 else max(0, plan.free_bytes) / per_day
    if plan.free_bytes <= 0:
        fills_in = 0.0
    if fills_in is not None and fills_in < ends_in:
        return StorageForecast(fills_in, "fills", ends_in, fills_in, per_day)
    return StorageForecast(ends_in, "ends", ends_in, fills_in, per_day)
