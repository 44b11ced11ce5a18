"""How long the bought space lasts: it ends or is full."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from caf_pipeline.store.jackal.answers import StoragePlan
from caf_pipeline.store.jackal.storage_forecast import (
    charged_per_day,
    end_warning,
    forecast_storage,
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
    ("days", "rate", "waiting", "said"),
    [
        (50, 0, 0, ""),
        (50, 0, 1_000, ""),
        (-1, 0, 0, "ended on 2026-02-28"),
        (50, 0, 1_001, "1,001 bytes"),
        (50, 100, 0, "full in 10.0 days"),
        (20, 0, 0, "ends on 2026-03-21, in 20.0 days"),
    ],
)
def test_warning_explains_the_fault_or_is_empty(days, rate, waiting, said):
    looked_at = plan(1_000, days)
    warning = forecast_storage(looked_at, rate, NOW).warning(looked_at, 30, waiting)
    assert said in warning
    assert bool(warning) == bool(said)


@pytest.mark.parametrize(
    ("days", "latest_days", "fact"),
    [
        (60, None, ""),
        (60, 60, ""),
        (60, 90, "no purchase of this ledger"),
        (10, None, "in 10.0 days"),
        (-1, None, "ended on"),
    ],
)
def test_an_end_that_is_near_or_earlier_is_reported(days, latest_days, fact):
    latest_end = None if latest_days is None else NOW + timedelta(days=latest_days)
    warning = end_warning(plan(0, days), latest_end, NOW, 30)
    assert fact in warning
    assert bool(warning) == bool(fact)
