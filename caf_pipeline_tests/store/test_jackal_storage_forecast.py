"""How long the bought space lasts: it ends or is full."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from caf_pipeline.records import StoragePlanRow
from caf_pipeline.store.jackal.answers import StoragePlan
from caf_pipeline.store.jackal.storage_forecast import (
    charged_per_day,
    end_warning,
    forecast_storage,
    warns_from,
)
from caf_pipeline_tests.support.chunk_rows import a_chunk

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def plan(free_bytes: int, days: float) -> StoragePlan:
    return StoragePlan(
        space_bytes=10_000 + free_bytes, used_bytes=10_000, ends_at=NOW + timedelta(days=days)
    )


def test_rate_counts_all_copies_of_last_week():
    chunks = [
        replace(a_chunk(), stored_size_bytes=700, located_at=NOW - timedelta(days=days))
        for days in (1, 6, 8)
    ]
    assert charged_per_day([*chunks, a_chunk()], copies=3, now=NOW) == pytest.approx(600)


def test_a_plan_that_ends_before_it_is_full_ends_first():
    forecast = forecast_storage(plan(1_000, days=5), 100, NOW)
    assert (forecast.first, forecast.days_left, forecast.fills_in_days) == ("ends", 5, 10)


def test_a_plan_that_is_full_before_it_ends_fills_first():
    forecast = forecast_storage(plan(1_000, days=50), 100, NOW)
    assert (forecast.first, forecast.days_left, forecast.ends_in_days) == ("fills", 10, 50)


def test_a_plan_of_which_nothing_is_used_lately_only_ends():
    forecast = forecast_storage(plan(1_000, days=50), 0, NOW)
    assert (forecast.first, forecast.fills_in_days) == ("ends", None)


def test_a_full_plan_has_no_day_left_at_any_rate():
    assert forecast_storage(plan(0, days=50), 0, NOW).days_left == 0


def test_a_plan_that_is_over_has_no_day_left():
    assert forecast_storage(plan(1_000, days=-3), 100, NOW).days_left == 0


@pytest.mark.parametrize(
    ("days", "rate", "waiting", "fact"),
    [
        (50, 0, 0, ""),
        (50, 0, 1_000, ""),
        (50, 0, 1_001, "1,001 bytes"),
        (50, 100, 0, "full in 10.0 days"),
        (50, 25, 0, ""),
        (5, 0, 0, ""),
    ],
)
def test_warning_explains_missing_room_or_is_empty(days, rate, waiting, fact):
    looked_at = plan(1_000, days)
    warning = forecast_storage(looked_at, rate, NOW).warning(looked_at, 30, waiting)
    assert fact in warning
    assert bool(warning) == bool(fact)


def reading(days: float | None, *, length: float | None = None, latest: float | None = None):
    """Return a reading of a plan of so many days' length that ends in `days`."""
    ends_at = None if days is None else NOW + timedelta(days=days)
    return StoragePlanRow(
        account="jackal-1/a",
        read_at=NOW,
        balance=1,
        space_bytes=10**10,
        used_bytes=10,
        starts_at=ends_at - timedelta(days=length) if ends_at and length else None,
        ends_at=ends_at,
        latest_end=ends_at if latest is None else NOW + timedelta(days=latest),
        latest_end_space=10**10,
        purchase_pending=False,
    )


@pytest.mark.parametrize(
    ("last", "fact"),
    [
        (reading(60), ""),
        (reading(29), "in 29.0 days"),
        (reading(31, length=365), ""),
        (reading(29, length=365), "in 29.0 days"),
        (reading(30, length=30), ""),
        (reading(11, length=30), ""),
        (reading(9, length=30), "in 9.0 days"),
        (reading(29, length=-5), "in 29.0 days"),
        (reading(60, latest=60), ""),
        (reading(60, latest=90), "no purchase of this ledger"),
        (replace(reading(60, latest=90), purchase_pending=True), ""),
        (reading(30, length=30, latest=365), "no purchase of this ledger"),
        (reading(-1), "ended on 2026-02-28"),
        (reading(-1, latest=90), "ended on 2026-02-28"),
        (reading(None), ""),
        (reading(None, latest=90), "is gone"),
        (reading(None, latest=-1), "ended on 2026-02-28"),
    ],
)
def test_an_end_that_is_near_or_earlier_is_reported(last, fact):
    warning = end_warning(last, NOW, 30)
    assert fact in warning
    assert bool(warning) == bool(fact)
    begins = warns_from(last, 30)
    assert (begins is not None and begins <= NOW) == bool(fact)
