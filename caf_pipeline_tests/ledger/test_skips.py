"""Skipped objects and objects that could not be read."""

from dataclasses import replace
from datetime import timedelta

from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline_tests.support.ledger_rows import (
    EARLY,
    SOURCE,
    VERSION,
    archive,
    register,
    skip,
    standing,
)


def test_a_skip_seen_again_replaces_the_older_one(ledger):
    ledger.sources.register(SOURCE, "s3://a/")
    ledger.skips.record(
        SOURCE, [skip("a", SkipReason.TOO_LARGE), skip("b", SkipReason.UNSUPPORTED_KEY)]
    )
    ledger.skips.record(SOURCE, [skip("a", SkipReason.COLD_STORAGE)])
    assert ledger.chunks.account(SOURCE).skipped == {
        SkipReason.COLD_STORAGE: 1,
        SkipReason.UNSUPPORTED_KEY: 1,
    }


def test_skips_end_only_for_objects_the_inventory_covers(ledger, tmp_path):
    ledger.sources.register(SOURCE, "s3://a/")
    listed_at = EARLY + timedelta(days=2)
    old, new = EARLY, listed_at - timedelta(hours=1)
    modified = {"gone": old, "listed": old, "just put": new}
    skips = [
        replace(skip(key, SkipReason.UNSUPPORTED_KEY), last_modified=at)
        for key, at in modified.items()
    ]
    ledger.skips.record(SOURCE, skips)
    unlisted = [
        ("gone", VERSION),
        ("just put", VERSION),
        ("listed", "another"),
        ("never seen", VERSION),
    ]
    ledger.skips.end(SOURCE, unlisted, listed_at=listed_at, silent_from=new)
    due = {key: is_due for key, _, _, is_due in standing(ledger, tmp_path / "s")}
    assert due == {"gone": True, "listed": False, "just put": False}


def test_an_object_that_is_located_is_no_longer_skipped(ledger, tmp_path):
    ledger.sources.register(SOURCE, f"s3://{SOURCE}")
    ledger.skips.record(SOURCE, [skip("a"), skip("b")])
    archive(ledger, ["a"])
    assert standing(ledger, tmp_path / "s") == {
        ("a", "located", None, False),
        ("b", "skipped", "cold_storage", False),
    }


def test_a_run_that_fails_on_an_object_twice_counts_once(ledger):
    (chunk,) = register(ledger, ["a"])
    for run in ("r1", "r1", "r2"):
        ledger.read_failures.count(chunk, [("a", VERSION)], run)
    ledger.read_failures.count(chunk, [("b", VERSION), ("a", VERSION)], "r3")
    failures = {
        key: (failure.times, failure.last_run)
        for (key, _), failure in ledger.read_failures.list(chunk).items()
    }
    assert failures == {"a": (3, "r3"), "b": (1, "r3")}
