"""The objects of a snapshot to plan, compared with a few lines of Python."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from caf_pipeline.errors import IntegrityError, StagingError
from caf_pipeline.inventory.accounting import account_for_files
from caf_pipeline.inventory.objects import is_supported
from caf_pipeline.inventory.remaining import ended_skips, not_yet_archived
from caf_pipeline.inventory.snapshot import read_objects
from caf_pipeline_tests.support.disks import files_of_at_most
from caf_pipeline_tests.support.snapshots import (
    ODD_KEYS,
    StandingRow,
    rows_about,
    sources,
    thing,
    use_small_windows,
    write_exceptions,
    write_snapshot,
    write_standing,
)


@pytest.mark.thorough
@given(sources())
@settings(max_examples=30)
def test_an_object_is_planned_unless_its_standing_blocks_it(source):
    objects, rows = source
    expected = [
        obj
        for obj in objects
        if not any(row.standing != "skipped" or not row.due for row in rows_about(obj, rows))
    ]
    with tempfile.TemporaryDirectory() as folder:
        snapshot = write_snapshot(Path(folder) / "s.parquet", objects).path
        delta = not_yet_archived(
            snapshot, write_standing(Path(folder) / "k.parquet", rows), Path(folder) / "out.parquet"
        )
        planned, unsupported = list(read_objects(delta.path)), list(read_objects(delta.unsupported))
    assert planned == [obj for obj in expected if is_supported(obj.key)]
    assert unsupported == [obj for obj in expected if not is_supported(obj.key)]
    assert (delta.object_count, delta.unsupported_count) == (len(planned), len(unsupported))
    assert delta.object_bytes == sum(obj.size_bytes for obj in planned)


@pytest.mark.parametrize(
    "path_name", ["plain", "it's", "a*b?[c]", 'quo"te', "back\\slash", "{x,y}", "ü %41"]
)
def test_files_are_found_under_any_name(tmp_path, path_name):
    folder = tmp_path / path_name
    folder.mkdir()
    snapshot = write_snapshot(folder / "s.parquet", [thing(b"b")], [thing(b"a")])
    standing = write_standing(folder / "k.parquet", [StandingRow(b"a", "etag:e:1", "located")])
    delta = not_yet_archived(snapshot.path, standing, folder / "out.parquet")
    assert [obj.key for obj in read_objects(delta.path)] == [b"b"]


@pytest.mark.parametrize("key", ODD_KEYS)
def test_every_hostile_key_is_planned_or_unsupported(tmp_path, key):
    snapshot = write_snapshot(tmp_path / "s.parquet", [thing(key)])
    delta = not_yet_archived(
        snapshot.path, write_standing(tmp_path / "k.parquet", []), tmp_path / "out.parquet"
    )
    assert [
        obj.key for obj in read_objects(delta.path if is_supported(key) else delta.unsupported)
    ] == [key]
    assert delta.object_count + delta.unsupported_count == 1


def test_a_key_equal_to_an_encoded_key_is_distinct(tmp_path):
    snapshot = write_snapshot(tmp_path / "s.parquet", [thing(b"%FF"), thing(b"\xff")])
    standing = write_standing(
        tmp_path / "k.parquet", [StandingRow(b"%FF", "etag:e:1", "skipped", "unsupported_key")]
    )
    delta = not_yet_archived(snapshot.path, standing, tmp_path / "out.parquet")
    assert [obj.key for obj in read_objects(delta.path)] == [b"%FF"]
    assert delta.unsupported_count == 0
    account = account_for_files(snapshot.path, standing, write_exceptions(tmp_path / "e.parquet"))
    assert (account.unaccounted, account.skipped, account.examples) == (
        1,
        {"unsupported_key": 1},
        ["%FF"],
    )


def test_skips_end_when_the_snapshot_lacks_the_object(tmp_path):
    listed = [thing(key) for key in (b"%FF", b"a", b"b", b"\xfe")]
    snapshot = write_snapshot(tmp_path / "s.parquet", listed)
    listed_skips = [
        StandingRow(key, "etag:e:1", "skipped", "cold_storage") for key in (b"%FF", b"a")
    ]
    listed_skips += [
        StandingRow(b"%FE", "etag:e:1", "skipped", "unsupported_key"),
        StandingRow(b"z", "etag:e:1", "located"),
    ]
    listed_skips += [StandingRow(b"y", "etag:e:1", "skipped", "cold_storage", due=True)]
    assert ended_skips(snapshot.path, write_standing(tmp_path / "k.parquet", listed_skips)) == []
    ended = [
        StandingRow(b"%FF", "etag:e:1", "skipped", "unsupported_key"),
        StandingRow(b"b", "etag:other:1", "skipped", "access_denied"),
    ]
    ended += [
        StandingRow(b"%FE", "etag:e:1", "skipped", "cold_storage"),
        StandingRow("ü".encode(), "etag:e:1", "skipped", "too_large"),
    ]
    result = ended_skips(
        snapshot.path, write_standing(tmp_path / "k2.parquet", listed_skips + ended)
    )
    assert result == sorted((row.key.decode(), row.object_version) for row in ended)


@pytest.mark.parametrize("which", ["snapshot", "standing"])
def test_a_bad_input_is_an_integrity_error(tmp_path, which):
    paths = {
        "snapshot": write_snapshot(tmp_path / "s.parquet", [thing(b"a")]).path,
        "standing": write_standing(tmp_path / "k.parquet", []),
    }
    paths[which].unlink()
    with pytest.raises(IntegrityError, match="missing"):
        not_yet_archived(**paths, out=tmp_path / "out.parquet")
    paths[which].write_bytes(b"not Parquet at all")
    with pytest.raises(IntegrityError):
        not_yet_archived(**paths, out=tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_a_full_disk_leaves_no_delta(tmp_path):
    objects = [
        thing(f"{number:06d}".encode(), etag=f"{number * 7919:032x}") for number in range(80_000)
    ]
    snapshot = write_snapshot(tmp_path / "s.parquet", objects)
    standing = write_standing(tmp_path / "k.parquet", [])
    out = tmp_path / "out"
    out.mkdir()
    with files_of_at_most(50_000), pytest.raises(StagingError, match="cannot be written"):
        not_yet_archived(snapshot.path, standing, out / "wanted.parquet")
    assert list(out.iterdir()) == []


def test_windows_of_keys_make_the_delta_of_the_whole(tmp_path, monkeypatch):
    use_small_windows(monkeypatch)
    objects = [thing(b"%02d" % number) for number in range(25)] + [
        thing(b"bad\xff"),
        thing(b"\xfe"),
    ]
    snapshot = write_snapshot(tmp_path / "s.parquet", *[[obj] for obj in objects]).path
    rows = [
        StandingRow(obj.key, obj.object_version, "located", None, False) for obj in objects[:25:3]
    ]
    delta = not_yet_archived(
        snapshot, write_standing(tmp_path / "k.parquet", rows), tmp_path / "d.parquet"
    )
    expected = [obj for number, obj in enumerate(objects[:25]) if number % 3]
    assert list(read_objects(delta.path)) == expected
    assert sorted(obj.key for obj in read_objects(delta.unsupported)) == [b"bad\xff", b"\xfe"]
