"""The outcome of each object of a snapshot, compared with a few lines of Python."""

import tempfile
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings

from caf_pipeline.inventory.accounting import Accounting, account_for_files
from caf_pipeline.inventory.objects import S3Object
from caf_pipeline.inventory.remaining import not_yet_archived
from caf_pipeline.inventory.snapshot import Snapshot, SnapshotWriter, read_objects
from caf_pipeline_tests.support.snapshots import (
    MOMENT,
    StandingRow,
    recorded_key,
    rows_about,
    sources,
    thing,
    use_small_windows,
    write_exceptions,
    write_snapshot,
    write_standing,
)


def place_of(obj: S3Object, rows: list[StandingRow]) -> str:
    standings = {row.standing for row in rows_about(obj, rows)}
    if "located" in standings:
        return "located"
    if "claimed" in standings:
        return "claimed"
    reasons = sorted(row.reason for row in rows_about(obj, rows) if row.reason)
    return reasons[-1] if reasons else "unaccounted"


def account_for_rows(
    folder: Path,
    snapshot: Snapshot,
    rows: list[StandingRow],
    **options,
) -> Accounting:
    standing = write_standing(folder / "k.parquet", rows)
    exceptions = write_exceptions(folder / "e.parquet")
    return account_for_files(snapshot.path, standing, exceptions, **options)


@pytest.mark.thorough
@given(sources())
@settings(max_examples=30)
def test_each_object_is_in_exactly_one_place(source):
    objects, rows = source
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        snapshot = write_snapshot(path / "s.parquet", objects)
        account = account_for_rows(path, snapshot, rows)
    places = Counter(place_of(obj, rows) for obj in objects)
    assert (
        account.objects
        == len(objects)
        == account.located + account.claimed + sum(account.skipped.values()) + account.unaccounted
    )
    assert (account.located, account.claimed) == (
        places.pop("located", 0),
        places.pop("claimed", 0),
    )
    assert account.unaccounted == places.pop("unaccounted", 0)
    assert dict(account.skipped) == places


@pytest.mark.thorough
@given(sources())
@settings(max_examples=40)
def test_delta_and_unsupported_keys_account_for_every_object(source):
    objects, rows = source
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        snapshot = write_snapshot(path / "s.parquet", objects)
        delta = not_yet_archived(
            snapshot.path, write_standing(path / "k.parquet", rows), path / "out.parquet"
        )
        skips = [
            StandingRow(recorded_key(obj), obj.object_version, "skipped", "unsupported_key")
            for obj in read_objects(delta.unsupported)
        ]
        claims = [
            StandingRow(obj.key, obj.object_version, "claimed") for obj in read_objects(delta.path)
        ]
        account = account_for_rows(path, snapshot, rows + skips + claims)
    both = sum(
        {"located", "claimed"} <= {row.standing for row in rows_about(obj, rows)} for obj in objects
    )
    assert (account.unaccounted, account.in_two_places) == (0, both)
    assert account.holds == (both == 0)


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ([], "unaccounted"),
        (
            [StandingRow(b"a", "etag:e:1", "located"), StandingRow(b"a", "etag:e:1", "claimed")],
            "in_two_places",
        ),
        ([StandingRow(b"a", "etag:f:1", "located")], "unaccounted"),
        ([StandingRow(b"a", "etag:e:1", "located", None, False, None)], "unaccounted"),
    ],
)
def test_a_failing_accounting_names_its_causes(tmp_path, rows, field):
    snapshot = write_snapshot(tmp_path / "s.parquet", [thing(b"a")])
    account = account_for_rows(tmp_path, snapshot, rows)
    assert not account.holds
    assert getattr(account, field) == 1


def test_late_locations_are_older_if_newer_content_is_listed(tmp_path):
    """Listed: `a` and `c`, written in minutes 2 and 1, and a deletion of `b` in minute 2."""
    listed = [
        thing(b"a", minute=2),
        replace(thing(b"b", version="m", minute=2), is_delete_marker=True),
        thing(b"c", minute=1),
    ]
    with SnapshotWriter(
        tmp_path / "s.parquet", source="demo", listed_at=MOMENT, all_versions=True
    ) as writer:
        writer.add(listed)
        snapshot = writer.finish()
    minute = timedelta(minutes=1)
    rows = [
        StandingRow(key, "v0", "located", last_modified=MOMENT + minute)
        for key in (b"a", b"b", b"c", b"d")
    ]
    rows += [
        StandingRow(obj.key, obj.object_version, "located", last_modified=obj.last_modified)
        for obj in (listed[0], listed[2])
    ]
    for silent_from, counts in ((MOMENT, (2, 1, 1)), (MOMENT + 2 * minute, (2, 2, 2))):
        account = account_for_rows(tmp_path, snapshot, rows, silent_from=silent_from)
        assert (account.current, account.older, account.gone) == counts


def test_a_few_unaccounted_keys_are_named_as_text(tmp_path):
    snapshot = write_snapshot(
        tmp_path / "s.parquet", [thing(b"%03d" % number) for number in range(30)] + [thing(b"\xff")]
    )
    account = account_for_rows(tmp_path, snapshot, [])
    assert account.unaccounted == 31
    assert account.examples == ["%FF", *(f"{number:03d}" for number in range(9))]


def test_windows_of_keys_account_for_each_object_once(tmp_path, monkeypatch):
    use_small_windows(monkeypatch)
    objects = [thing(b"%02d" % number) for number in range(25)] + [thing(b"bad\xff")]
    snapshot = write_snapshot(tmp_path / "s.parquet", *[[obj] for obj in objects])
    rows = [
        StandingRow(obj.key, obj.object_version, "claimed", None, False) for obj in objects[:25:5]
    ]
    rows.append(StandingRow(b"zz-not-listed", "etag:e:1", "located", None, False))
    account = account_for_rows(tmp_path, snapshot, rows)
    assert (account.objects, account.claimed, account.located, account.unaccounted) == (
        26,
        5,
        0,
        21,
    )
