"""Filters: excluded objects are counted once, and planned after the filter is removed."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from caf_pipeline.steps import inventories, planning
from caf_pipeline.steps.preview import preview_plan
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.run_contexts import (
    a_run_context,
    account_for_plan,
    archive_everything,
    plan,
)

KEYS = ["cache/1", "cache/2", "photos/a.jpg", "photos/b.jpg", "photos/b.tmp", "readme"]


@pytest.fixture
def source():
    return MemorySource({key: key.encode() for key in KEYS} | {"large": b"x" * 5000})


@pytest.fixture
def run_context(tmp_path, source, ledger):
    def opened(**settings):
        return a_run_context(
            tmp_path, source, ledger, sources={"src": {"bucket": "b", "public": True, **settings}}
        )

    return opened


FILTERS = {"exclude": ["cache/*", "*.tmp"], "max_size": 1000}
LEFT_OUT = {"exclude": 3, "max_size": 1}


def located(context) -> int:
    return context.ledger.chunks.account("src").located_objects


def test_filtered_objects_are_counted_by_filter_and_not_planned(run_context):
    context = run_context(**FILTERS)
    preview = preview_plan(context, inventories.take_inventory(context))
    assert (preview.left_out, preview.estimate.statistics.objects) == (LEFT_OUT, 3)
    assert preview.as_json()["left_out"] == LEFT_OUT
    report = plan(context)
    account = account_for_plan(context, report)
    assert report.left_out == LEFT_OUT
    assert (account.objects, account.claimed, account.left_out, account.holds) == (
        7,
        3,
        LEFT_OUT,
        True,
    )


def test_what_a_filter_no_longer_leaves_out_is_planned(run_context):
    archive_everything(run_context(**FILTERS))
    context = run_context(exclude=["*.tmp"])
    assert located(context) == 3
    archive_everything(context)
    account = planning.account_for(context, inventories.latest_snapshot(context))
    assert (account.located, account.left_out, account.holds) == (6, {"exclude": 1}, True)


def test_located_object_stays_current_despite_later_filter(run_context):
    archive_everything(run_context())
    context = run_context(include=["readme"])
    report = plan(context)
    account = account_for_plan(context, report)
    assert (account.located, account.left_out, account.older, account.gone) == (7, {}, 0, 0)
    assert (report.plans, report.left_out) == ([], {})


def test_skipped_object_left_out_later_counts_once(run_context, source):
    source.unavailable["cache/1"] = (planning.SkipReason.COLD_STORAGE, 0)
    archive_everything(run_context())
    context = run_context(**FILTERS)
    report = plan(context)
    account = account_for_plan(context, report)
    assert (account.located, account.left_out, account.skipped, account.holds) == (
        6,
        {"exclude": 1},
        {},
        True,
    )
    assert report.left_out == preview_plan(context, report.snapshot).left_out == account.left_out
    sums = context.ledger.chunks.account("src")
    assert (sums.skipped, sums.content.left_out) == ({}, {"exclude": 1})
    context = run_context()
    assert [chunk.object_count for chunk in plan(context).chunks] == [1]


def test_an_age_is_that_at_the_time_of_the_inventory(run_context):
    context = run_context(min_age="3660d")
    report = plan(context)
    assert (report.plans, report.left_out) == ([], {"min_age": 7})
    assert account_for_plan(context, report).holds


def test_a_sensor_sees_nothing_new_in_what_is_left_out(run_context):
    assert (
        inventories.scan_for_new(
            run_context(include=["photos/*"]), after=b"", max_pages=5
        ).new_objects
        == 3
    )
    assert inventories.scan_for_new(run_context(), after=b"", max_pages=5).new_objects == 7


@pytest.mark.parametrize("ahead", [timedelta(hours=2), timedelta(hours=-2)])
def test_sensor_and_plan_count_ages_by_same_clock(run_context, source, monkeypatch, ahead):
    now = datetime.now(UTC)
    listed = [
        replace(obj, last_modified=now + ahead - timedelta(hours=number))
        for number, obj in enumerate(source.objects())
    ]
    monkeypatch.setattr(source, "objects", lambda: listed)
    monkeypatch.setattr(source, "clock", lambda: now + ahead)
    context = run_context(min_age="90m")
    assert inventories.scan_for_new(context, after=b"", max_pages=5).new_objects == 5
    assert plan(context).left_out == {"min_age": 2}


def test_keys_that_cannot_be_archived_stay_skipped_for_that(run_context, source):
    source.bodies["a\0b"] = b"x"
    context = run_context(include=["none"])
    account = account_for_plan(context, plan(context))
    assert (account.left_out, account.skipped, account.holds) == (
        {"include": 7},
        {"unsupported_key": 1},
        True,
    )
