"""Snapshots, what is not yet archived, and where each object has ended, each against a few lines of plain Python."""

import json
import random
import resource
import tempfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote_from_bytes

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.errors import IntegrityError, StagingError
from caf_pipeline.inventory import snapshot as inventory
from caf_pipeline.inventory.objects import S3Object, SkipReason, is_supported
from caf_pipeline.inventory.snapshot import (
    SNAPSHOT_SCHEMA,
    STANDING_SCHEMA,
    Snapshot,
    SnapshotWriter,
    account_for,
    not_yet_archived,
    read_objects,
    read_snapshot,
)
from caf_pipeline.system import parquet
from caf_pipeline.system.parquet import ROWS_PER_GROUP, QueryBudget

MOMENT = datetime(2026, 11, 1, 12, 30, 15, 123456, UTC)

ODD_KEYS = [
    b"\xff", b"%FF", b"a\xffb", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xf5", b"\xe2\x82", b"a\0b", b"\0",
    b"x" * 1024, b"x" * 1025, "é".encode() * 512, "é".encode() * 513, "\U0001f600".encode(), b"\xef\xbf\xbf",
    b"'", b"\\", b"\\xff", b"\\x41", b'"', b"`", b"$$", b";--", b"\n", b" ", b"%", b"%25", b"a/", b"/", b"..", b"NULL",
]  # fmt: skip


@dataclass(frozen=True)
class Known:
    """A row of a standing."""

    key: bytes
    object_version: str
    standing: str
    reason: str | None = None
    due: bool = False
    last_modified: datetime | None = MOMENT


def thing(key: bytes, *, etag: str = "e", size: int = 1, version: str | None = None, minute: int = 0) -> S3Object:
    return S3Object(key, version, etag, size, MOMENT + timedelta(minutes=minute))


def write_standing(path: Path, rows: list[Known]) -> Path:
    columns = {name: [getattr(row, name) for row in rows] for name in STANDING_SCHEMA.names}
    pq.write_table(pa.table(columns, schema=STANDING_SCHEMA), path)
    return path


def write_snapshot(path: Path, *pages: list[S3Object], **bounds: bytes) -> Snapshot:
    with SnapshotWriter(path, source="demo", listed_at=MOMENT, **bounds) as writer:
        for page in pages:
            writer.add(page)
        return writer.finish()


def recorded_key(obj: S3Object) -> bytes:
    return obj.key if is_supported(obj.key) else quote_from_bytes(obj.key).encode()


@contextmanager
def files_of_at_most(size_bytes: int):
    """Make writing more than that fail, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- snapshots -----------------------------------------------------------------------------------------------------


def test_a_snapshot_reads_back_as_it_was_listed(tmp_path):
    objects = [thing(b"a", size=0), S3Object(b"a/\xff", "v1", "e-2", 5 << 40, MOMENT, "GLACIER", "SHA256/COMPOSITE"), thing(b"b")]
    written = write_snapshot(tmp_path / "s.parquet", objects[:1], [], objects[1:])
    assert list(read_objects(tmp_path / "s.parquet")) == objects
    assert read_snapshot(tmp_path / "s.parquet") == written
    assert (written.name, written.object_count, written.object_bytes, written.unsupported_count) == ("s", 3, (5 << 40) + 1, 1)


def test_an_empty_source_has_an_empty_snapshot(tmp_path):
    snapshot = write_snapshot(tmp_path / "s.parquet")
    assert read_snapshot(snapshot.path) == snapshot
    assert (snapshot.object_count, list(read_objects(snapshot.path)), snapshot.complete) == (0, [], True)


@pytest.mark.parametrize("bounds", [{"after": b"\xff'"}, {"until": b"m"}, {"after": b"a", "until": b"m"}, {"until": b""}])
def test_a_bounded_snapshot_keeps_its_bounds_and_is_not_complete(tmp_path, bounds):
    snapshot = read_snapshot(write_snapshot(tmp_path / "s.parquet", [thing(b"b")], **bounds).path)
    assert not snapshot.complete
    assert {"after": snapshot.after, "until": snapshot.until} == {"after": b"", "until": None} | bounds


@given(st.lists(st.tuples(st.sampled_from(ODD_KEYS), st.sampled_from("ef"), st.integers(0, 3)), max_size=12))
@settings(max_examples=40)
def test_a_listing_in_any_order_becomes_a_sorted_snapshot_with_each_object_once(listed):
    objects = [thing(key, etag=etag, minute=minute) for key, etag, minute in listed]
    latest = {(obj.key, obj.object_version): obj for obj in sorted(objects, key=lambda obj: obj.last_modified)}
    with tempfile.TemporaryDirectory() as folder:
        snapshot = write_snapshot(Path(folder) / "s.parquet", objects[:5], objects[5:])
        assert [path.name for path in Path(folder).iterdir()] == ["s.parquet"]
        found = list(read_objects(snapshot.path))
        assert found == sorted(latest.values(), key=lambda obj: (obj.key, obj.last_modified, obj.object_version))
        assert read_snapshot(snapshot.path).object_bytes == len(found)
        assert snapshot.unsupported_count == sum(not is_supported(obj.key) for obj in found)


@pytest.mark.thorough
def test_a_long_listing_out_of_order_is_sorted_across_row_groups(tmp_path):
    keys = [f"{number:06d}".encode() for number in range(150_000)]
    snapshot = write_snapshot(
        tmp_path / "s.parquet", [thing(key) for key in keys[70_000:]], [thing(key) for key in keys[:70_001]]
    )
    assert pq.read_table(snapshot.path)["key"].to_pylist() == keys
    assert pq.ParquetFile(snapshot.path).metadata.num_row_groups > 1


def test_files_that_are_sorted_in_windows_of_keys_become_one_sorted_snapshot_with_each_object_once(tmp_path, monkeypatch):
    monkeypatch.setattr(inventory, "SORTED_BY_MEMORY", 0.03)  # four windows
    budget = QueryBudget(memory_bytes=256 << 20)
    generator = random.Random(7)
    keys = [f"{'long/' * 20}{number:06d}".encode() for number in range(100_000)]
    generator.shuffle(keys)
    files = [tmp_path / f"{number}.parquet" for number in range(4)]
    for number, file in enumerate(files):
        some = keys[number * 25_000 - 10 * bool(number) : (number + 1) * 25_000]  # ten are in two files
        columns = {name: [getattr(thing(b"k"), name)] * len(some) for name in SNAPSHOT_SCHEMA.names} | {"key": some}
        pq.write_table(pa.table(columns, schema=SNAPSHOT_SCHEMA), file, row_group_size=ROWS_PER_GROUP)
    path = tmp_path / "s" / "s.parquet"
    path.parent.mkdir()
    with SnapshotWriter(path, source="demo", listed_at=MOMENT, budget=budget) as writer:
        writer.add_files(files)
        snapshot = writer.finish()
    assert pq.read_table(path)["key"].to_pylist() == sorted(keys)
    assert (snapshot.object_count, snapshot.object_bytes, snapshot.unsupported_count) == (100_000, 100_000, 0)
    assert list(path.parent.iterdir()) == [path]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("ef"), st.integers(0, 2)), min_size=1), st.integers(1, 4))
def test_an_identity_that_comes_again_is_taken_once_however_batches_divide_its_rows(rows, size):
    objects = sorted((thing(key.encode(), etag=etag, minute=minute) for key, etag, minute in rows), key=order_of)
    columns = {name: [getattr(obj, name) for obj in objects] for name in SNAPSHOT_SCHEMA.names}
    batches = pa.table(columns, schema=SNAPSHOT_SCHEMA).to_batches(max_chunksize=size)
    latest = {(obj.key, obj.object_version): obj for obj in objects}
    found = [inventory.s3_object(row) for batch in inventory._each_once(batches) for row in batch.to_pylist()]
    assert found == sorted(latest.values(), key=order_of)


def order_of(obj: S3Object):
    return obj.key, obj.last_modified, obj.object_version


def test_a_snapshot_that_was_not_finished_leaves_nothing(tmp_path):
    with SnapshotWriter(tmp_path / "s.parquet", source="demo", listed_at=MOMENT) as writer:
        writer.add([thing(b"a")])
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path):
    objects = [thing(f"{number:06d}".encode(), etag=f"{number * 7919:032x}") for number in range(80_000)]
    with files_of_at_most(50_000), pytest.raises(StagingError, match=r"s\.parquet cannot be written"):
        write_snapshot(tmp_path / "s.parquet", objects)
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_told(tmp_path):
    with pytest.raises(StagingError, match="No such file or directory"):
        write_snapshot(tmp_path / "nowhere" / "s.parquet")


def not_parquet(path: Path) -> None:
    path.write_bytes(b"PAR1 and then nothing PAR1")


def without_metadata(path: Path) -> None:
    pq.write_table(SNAPSHOT_SCHEMA.empty_table(), path)


def with_metadata(text: str, schema: pa.Schema = SNAPSHOT_SCHEMA):
    return lambda path: pq.write_table(schema.empty_table().replace_schema_metadata({"caf.snapshot": text}), path)


GOOD = {"source": "d", "listed_at": MOMENT.isoformat(), "after": "", "until": None} | dict.fromkeys(
    ("object_count", "object_bytes", "unsupported_count"), 0
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no file"),
        (lambda path: path.mkdir(), "cannot be read"),
        (not_parquet, "cannot be read as Parquet"),
        (without_metadata, "is not a snapshot"),
        (with_metadata("{"), "is not a snapshot"),
        (with_metadata("[]"), "is not a snapshot"),
        (with_metadata(json.dumps(GOOD | {"listed_at": "yesterday"})), "is not a snapshot"),
        (with_metadata(json.dumps(GOOD | {"object_count": 3})), "has 0 rows and declares 3"),
        (with_metadata(json.dumps(GOOD), STANDING_SCHEMA), "columns"),
    ],
)
def test_what_is_not_a_snapshot_is_refused(tmp_path, make, message):
    make(tmp_path / "s.parquet")
    with pytest.raises(IntegrityError, match=message):
        read_snapshot(tmp_path / "s.parquet")


# --- what is not yet archived --------------------------------------------------------------------------------------

some_keys = st.one_of(st.sampled_from(ODD_KEYS), st.binary(min_size=1, max_size=4))
versions = st.sampled_from([None, "v1", "v'2"])


@st.composite
def sources(draw: st.DrawFn) -> tuple[list[S3Object], list[Known]]:
    """Objects of a snapshot, each once, and rows of a standing about some of them and about others."""
    keys = draw(st.lists(some_keys, max_size=10, unique=True))
    objects = [thing(key, version=draw(versions), size=draw(st.integers(0, 3))) for key in sorted(keys)]
    rows = []
    for obj in [*objects, thing(b"elsewhere")]:
        for standing in draw(
            st.lists(st.sampled_from(["located", "claimed", "skipped", "skipped due", "other version"]), max_size=2)
        ):
            if not is_supported(obj.key):
                rows.append(Known(recorded_key(obj), obj.object_version, "skipped", "unsupported_key"))
            elif standing == "other version":
                rows.append(Known(obj.key, "v9", "located"))
            elif standing.startswith("skipped"):
                reason = draw(st.sampled_from(["deleted", "cold_storage", "too_large"]))
                rows.append(Known(obj.key, obj.object_version, "skipped", reason, due=standing == "skipped due"))
            else:
                rows.append(Known(obj.key, obj.object_version, standing))
    return objects, rows


def rows_about(obj: S3Object, rows: list[Known]) -> list[Known]:
    encoded = not is_supported(obj.key)
    return [
        row
        for row in rows
        if (row.key, row.object_version) == (recorded_key(obj), obj.object_version)
        and (row.reason == SkipReason.UNSUPPORTED_KEY) == encoded
    ]


@pytest.mark.thorough
@given(sources())
@settings(max_examples=60)
def test_an_object_is_wanted_unless_something_in_the_standing_blocks_it(source):
    objects, rows = source
    free = [obj for obj in objects if not any(row.standing != "skipped" or not row.due for row in rows_about(obj, rows))]
    with tempfile.TemporaryDirectory() as folder:
        snapshot = write_snapshot(Path(folder) / "s.parquet", objects).path
        delta = not_yet_archived(snapshot, write_standing(Path(folder) / "k.parquet", rows), Path(folder) / "out.parquet")
        wanted, unsupported = list(read_objects(delta.path)), list(read_objects(delta.unsupported))
    assert wanted == [obj for obj in free if is_supported(obj.key)]
    assert unsupported == [obj for obj in free if not is_supported(obj.key)]
    assert (delta.object_count, delta.unsupported_count) == (len(wanted), len(unsupported))
    assert delta.object_bytes == sum(obj.size_bytes for obj in wanted)


@pytest.mark.parametrize("path_name", ["plain", "it's", "a*b?[c]", 'quo"te', "back\\slash", "{x,y}", "ü %41"])
def test_files_are_found_under_any_name(tmp_path, path_name):
    folder = tmp_path / path_name
    folder.mkdir()
    snapshot = write_snapshot(folder / "s.parquet", [thing(b"b")], [thing(b"a")])
    standing = write_standing(folder / "k.parquet", [Known(b"a", "etag:e:1", "located")])
    delta = not_yet_archived(snapshot.path, standing, folder / "out.parquet")
    assert [obj.key for obj in read_objects(delta.path)] == [b"b"]


@pytest.mark.parametrize("key", ODD_KEYS)
def test_every_odd_key_is_either_wanted_or_listed_as_unsupported(tmp_path, key):
    snapshot = write_snapshot(tmp_path / "s.parquet", [thing(key)])
    delta = not_yet_archived(snapshot.path, write_standing(tmp_path / "k.parquet", []), tmp_path / "out.parquet")
    assert [obj.key for obj in read_objects(delta.path if is_supported(key) else delta.unsupported)] == [key]
    assert delta.object_count + delta.unsupported_count == 1


def test_a_key_that_equals_another_ones_encoded_form_is_not_taken_for_it(tmp_path):
    snapshot = write_snapshot(tmp_path / "s.parquet", [thing(b"%FF"), thing(b"\xff")])
    standing = write_standing(tmp_path / "k.parquet", [Known(b"%FF", "etag:e:1", "skipped", "unsupported_key")])
    delta = not_yet_archived(snapshot.path, standing, tmp_path / "out.parquet")
    assert [obj.key for obj in read_objects(delta.path)] == [b"%FF"]
    assert delta.unsupported_count == 0
    account = account_for(snapshot.path, standing)
    assert (account.unaccounted, account.skipped, account.examples) == (1, {"unsupported_key": 1}, ["%FF"])


@pytest.mark.thorough
def test_a_budget_far_below_the_data_gives_the_same_answer_in_order(tmp_path):
    keys = [f"{number * 7919 % 200_000:06d}-{'x' * 100}".encode() for number in range(200_000)]
    snapshot = write_snapshot(tmp_path / "s.parquet", [thing(key) for key in keys])
    standing = write_standing(tmp_path / "k.parquet", [Known(key, "etag:e:1", "located") for key in keys[::2]])
    delta = not_yet_archived(snapshot.path, standing, tmp_path / "out.parquet", budget=QueryBudget(memory_bytes=64 << 20))
    assert pq.read_table(delta.path)["key"].to_pylist() == sorted(keys[1::2])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "k.parquet", "out.parquet", "out.unsupported.parquet", "s.parquet",
    ]  # fmt: skip


@pytest.mark.parametrize("which", ["snapshot", "standing"])
def test_an_input_that_is_missing_or_broken_is_an_integrity_error(tmp_path, which):
    paths = {
        "snapshot": write_snapshot(tmp_path / "s.parquet").path,
        "standing": write_standing(tmp_path / "k.parquet", []),
    }
    paths[which].unlink()
    with pytest.raises(IntegrityError, match="missing"):
        not_yet_archived(**paths, out=tmp_path / "out.parquet")
    paths[which].write_bytes(b"not Parquet at all")
    with pytest.raises(IntegrityError):
        not_yet_archived(**paths, out=tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_a_delta_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path):
    objects = [thing(f"{number:06d}".encode(), etag=f"{number * 7919:032x}") for number in range(80_000)]
    snapshot = write_snapshot(tmp_path / "s.parquet", objects)
    standing = write_standing(tmp_path / "k.parquet", [])
    out = tmp_path / "out"
    out.mkdir()
    with files_of_at_most(50_000), pytest.raises(StagingError, match="cannot be written"):
        not_yet_archived(snapshot.path, standing, out / "wanted.parquet")
    assert list(out.iterdir()) == []


# --- accounting ----------------------------------------------------------------------------------------------------


def place_of(obj: S3Object, rows: list[Known], planned: set[tuple[bytes, str]]) -> str:
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
@settings(max_examples=60)
def test_each_object_is_in_exactly_one_place(source, data):
    objects, rows = source
    identities = [(obj.key, obj.object_version) for obj in objects if is_supported(obj.key)]
    planned = data.draw(st.lists(st.sampled_from(identities), max_size=6) if identities else st.just([]))
    with tempfile.TemporaryDirectory() as folder:
        snapshot = write_snapshot(Path(folder) / "s.parquet", objects).path
        standing = write_standing(Path(folder) / "k.parquet", rows)
        account = account_for(snapshot, standing, write_plan(Path(folder) / "p.parquet", planned))
    places = Counter(place_of(obj, rows, set(planned)) for obj in objects)
    assert (
        account.objects == len(objects) == account.located + account.claimed + sum(account.skipped.values()) + account.unaccounted
    )
    assert (account.located, account.claimed) == (places.pop("located", 0), places.pop("claimed", 0))
    assert account.unaccounted == places.pop("unaccounted", 0)
    assert dict(account.skipped) == places
    assert account.planned_twice == sum(count > 1 for count in Counter(planned).values())
    assert account.planned_unlisted == 0


@pytest.mark.thorough
@given(sources())
@settings(max_examples=40)
def test_planning_the_delta_and_skipping_the_unsupported_accounts_for_every_object(source):
    objects, rows = source
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        snapshot = write_snapshot(path / "s.parquet", objects).path
        delta = not_yet_archived(snapshot, write_standing(path / "k.parquet", rows), path / "out.parquet")
        skips = [
            Known(recorded_key(obj), obj.object_version, "skipped", "unsupported_key") for obj in read_objects(delta.unsupported)
        ]
        account = account_for(snapshot, write_standing(path / "k2.parquet", rows + skips), delta.path)
    both = sum({"located", "claimed"} <= {row.standing for row in rows_about(obj, rows)} for obj in objects)
    assert (account.unaccounted, account.in_two_places, account.planned_twice, account.planned_unlisted) == (0, both, 0, 0)
    assert account.holds == (both == 0)


@pytest.mark.parametrize(
    ("rows", "planned", "field"),
    [
        ([], [], "unaccounted"),
        ([Known(b"a", "etag:e:1", "located"), Known(b"a", "etag:e:1", "claimed")], [], "in_two_places"),
        ([Known(b"a", "etag:e:1", "located")], [(b"a", "etag:e:1")], "in_two_places"),
        ([], [(b"a", "etag:e:1")] * 2, "planned_twice"),
        ([], [(b"a", "etag:e:1"), (b"b", "etag:e:1")], "planned_unlisted"),
        ([Known(b"a", "etag:e:1", "claimed")], [(b"a", "etag:e:2")], "planned_unlisted"),
        ([Known(b"a", "etag:f:1", "located")], [], "unaccounted"),
    ],
)
def test_an_accounting_that_does_not_hold_says_why(tmp_path, rows, planned, field):
    snapshot = write_snapshot(tmp_path / "s.parquet", [thing(b"a")]).path
    standing = write_standing(tmp_path / "k.parquet", rows)
    account = account_for(snapshot, standing, write_plan(tmp_path / "p.parquet", planned))
    assert not account.holds
    assert getattr(account, field) == 1


def test_a_few_unaccounted_keys_are_named_as_text(tmp_path):
    snapshot = write_snapshot(tmp_path / "s.parquet", [thing(b"%03d" % number) for number in range(30)] + [thing(b"\xff")]).path
    account = account_for(snapshot, write_standing(tmp_path / "k.parquet", []))
    assert account.unaccounted == 31
    assert account.examples == ["%FF", *(f"{number:03d}" for number in range(9))]


@pytest.fixture
def small_windows(monkeypatch):
    """Row groups of two rows and windows of four, so that a short snapshot has several."""
    monkeypatch.setattr(parquet, "ROWS_PER_GROUP", 2)
    monkeypatch.setattr(inventory, "WINDOW_ROWS", 4)


def test_windows_of_keys_make_the_delta_of_the_whole(tmp_path, small_windows):
    things = [thing(b"%02d" % number) for number in range(25)] + [thing(b"bad\xff"), thing(b"\xfe")]
    snapshot = write_snapshot(tmp_path / "s.parquet", *[[each] for each in things]).path
    known = [Known(each.key, each.object_version, "located", None, False) for each in things[:25:3]]
    delta = not_yet_archived(snapshot, write_standing(tmp_path / "k.parquet", known), tmp_path / "d.parquet")
    wanted = [each for number, each in enumerate(things[:25]) if number % 3]
    assert list(read_objects(delta.path)) == wanted
    assert sorted(obj.key for obj in read_objects(delta.unsupported)) == [b"bad\xff", b"\xfe"]


def test_windows_of_keys_account_for_each_object_once(tmp_path, small_windows):
    things = [thing(b"%02d" % number) for number in range(25)] + [thing(b"bad\xff")]
    snapshot = write_snapshot(tmp_path / "s.parquet", *[[each] for each in things]).path
    known = [Known(each.key, each.object_version, "claimed", None, False) for each in things[:25:5]]
    known.append(Known(b"zz-not-listed", "etag:e:1", "located", None, False))
    account = account_for(snapshot, write_standing(tmp_path / "k.parquet", known))
    assert (account.objects, account.claimed, account.located, account.unaccounted) == (26, 5, 0, 21)


@pytest.mark.parametrize(
    ("after", "until", "expected"),
    [
        (b"", b"03", [(None, b"03")]),
        (b"02", None, [(b"02", b"06"), (b"06", b"10"), (b"10", None)]),
        (b"02", b"09", [(b"02", b"06"), (b"06", b"09")]),
        (b"02", b"06", [(b"02", b"06")]),
        (b"50", b"60", [(b"50", b"60")]),
    ],
)
def test_windows_of_a_snapshot_cover_the_keys_that_it_covers_and_no_others(tmp_path, small_windows, after, until, expected):
    keys = [key for key in (b"%02d" % number for number in range(13)) if key > after and (until is None or key <= until)]
    path = tmp_path / "s.parquet"
    with inventory.SnapshotWriter(path, source="src", listed_at=MOMENT, after=after, until=until) as writer:
        for key in keys:
            writer.add([thing(key)])
        snapshot = writer.finish()
    assert list(inventory.key_windows(path, snapshot.keys)) == expected
