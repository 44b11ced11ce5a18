"""The outcome of each object of a snapshot, compared with a few lines of Python."""

import tempfile
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.inventory import key_windows
from caf_pipeline.inventory.accounting import account_for_files
from caf_pipeline.inventory.objects import S3Object, is_supported
from caf_pipeline.inventory.remaining import not_yet_archived
from caf_pipeline.inventory.snapshot import SNAPSHOT_SCHEMA, SnapshotWriter, read_objects
from caf_pipeline_tests.support.snapshots import (
    MOMENT,
    StandingRow,
    recorded_key,
    rows_about,
    sources,
    thing,
    use_small_windows,
    write_snapshot,
    write_standing,
)


def place_of(obj: S3Object, rows: list[StandingRow], planned: set[tuple[bytes, str]]) -> str:
    standings = {row.standing for row in rows_about(obj, rows)}
    if "located" in standings:
        return "located"
    if "claimed" in standings or (obj.key, obj.object_version) in planned:
        return "claimed"
    reasons = sorted(row.reason for row in rows_about(obj, rows) if row.reason)
    return reasons[-1] if reasons else "unaccounted"


def write_plan(path: Path, identities: list[tuple[bytes, str]]) -> Path:
    schema = pa.schema([SNAPSHOT_SCHEMA.field("key"), SNAPSHOT_SCHEMA.field("object_version")])
    keys, object_versions = [key for key, _ in identities], [version for _, version in identities]
    pq.write_table(pa.table({"key": keys, "object_version": object_versions}, schema=schema), path)
    return path


@pytest.mark.thorough
@given(sources(), st.data())
@settings(max_examples=30)
def test_each_object_is_in_exactly_one_place(source, data):
    objects, rows = source
    identities = [(obj.key, obj.object_version) for obj in objects if is_supported(obj.key)]
    planned = data.draw(
        st.lists(st.sampled_from(identities), max_size=6) if identities else st.just([])
    )
    with tempfile.TemporaryDirectory() as folder:
        snapshot = write_snapshot(Path(folder) / "s.parquet", objects).path
        standing = write_standing(Path(folder) / "k.parquet", rows)
        account = account_for_files(
            snapshot, standing, write_plan(Path(folder) / "p.parquet", planned)
        )
    places = Counter(place_of(obj, rows, set(planned)) for obj in objects)
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
    assert account.planned_twice == sum(count > 1 for count in Counter(planned).values())
    assert account.planned_unlisted == 0


@pytest.mark.thorough
@given(sources())
@settings(max_examples=40)
def test_delta_and_unsupported_keys_account_for_every_object(source):
    objects, rows = source
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        snapshot = write_snapshot(path / "s.parquet", objects).path
        delta = not_yet_archived(
            snapshot, write_standing(path / "k.parquet", rows), path / "out.parquet"
        )
        skips = [
            StandingRow(recorded_key(obj), obj.object_version, "skipped", "unsupported_key")
            for obj in read_objects(delta.unsupported)
        ]
        account = account_for_files(
            snapshot, write_standing(path / "k2.parquet", rows + skips), delta.path
        )
    both = sum(
        {"located", "claimed"} <= {row.standing for row in rows_about(obj, rows)} for obj in objects
    )
    assert (
        account.unaccounted,
        account.in_two_places,
        account.planned_twice,
        account.planned_unlisted,
    ) == (0, both, 0, 0)
    assert account.holds == (both == 0)


@pytest.mark.parametrize(
    ("rows", "planned", "field"),
    [
        ([], [], "unaccounted"),
        (
            [StandingRow(b"a", "etag:e:1", "located"), StandingRow(b"a", "etag:e:1", "claimed")],
            [],
            "in_two_places",
        ),
        ([StandingRow(b"a", "etag:e:1", "located")], [(b"a", "etag:e:1")], "in_two_places"),
        ([], [(b"a", "etag:e:1")] * 2, "planned_twice"),
        ([], [(b"a", "etag:e:1"), (b"b", "etag:e:1")], "planned_unlisted"),
        ([StandingRow(b"a", "etag:e:1", "claimed")], [(b"a", "etag:e:2")], "planned_unlisted"),
        ([StandingRow(b"a", "etag:f:1", "located")], [], "unaccounted"),
    ],
)
def test_a_failing_accounting_names_its_causes(tmp_path, rows, planned, field):
    snapshot = write_snapshot(tmp_path / "s.parquet", [thing(b"a")]).path
    standing = write_standing(tmp_path / "k.parquet", rows)
    account = account_for_files(snapshot, standing, write_plan(tmp_path / "p.parquet", planned))
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
    standing = write_standing(tmp_path / "k.parquet", rows)
    for silent_from, counts in ((MOMENT, (2, 1, 1)), (MOMENT + 2 * minute, (2, 2, 2))):
        account = account_for_files(snapshot.path, standing, silent_from=silent_from)
        assert (account.current, account.older, account.gone) == counts


def test_a_few_unaccounted_keys_are_named_as_text(tmp_path):
    snapshot = write_snapshot(
        tmp_path / "s.parquet", [thing(b"%03d" % number) for number in range(30)] + [thing(b"\xff")]
    ).path
    account = account_for_files(snapshot, write_standing(tmp_path / "k.parquet", []))
    assert account.unaccounted == 31
    assert account.examples == ["%FF", *(f"{number:03d}" for number in range(9))]


def test_windows_of_keys_account_for_each_object_once(tmp_path, monkeypatch):
    use_small_windows(monkeypatch)
    objects = [thing(b"%02d" % number) for number in range(25)] + [thing(b"bad\xff")]
    snapshot = write_snapshot(tmp_path / "s.parquet", *[[obj] for obj in objects]).path
    rows = [
        StandingRow(obj.key, obj.object_version, "claimed", None, False) for obj in objects[:25:5]
    ]
    rows.append(StandingRow(b"zz-not-listed", "etag:e:1", "located", None, False))
    account = account_for_files(snapshot, write_standing(tmp_path / "k.parquet", rows))
    assert (account.objects, account.claimed, account.located, account.unaccounted) == (
        26,
        5,
        0,
        21,
    )


def test_key_bounds_are_read_if_statistics_are_missing(tmp_path, monkeypatch):
    snapshot = write_snapshot(tmp_path / "s.parquet", [thing(b"a"), thing(b"b")])
    pq.write_table(pq.read_table(snapshot.path), snapshot.path, write_statistics=False)
    monkeypatch.setattr(key_windows, "WINDOW_ROWS", 1)
    assert (
        account_for_files(snapshot.path, write_standing(tmp_path / "k.parquet", [])).unaccounted
        == 2
    )
