"""Writing, reading and refusing snapshots, compared with a few lines of Python."""

import json
import random
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.errors import IntegrityError, StagingError
from caf_pipeline.inventory import snapshot as inventory
from caf_pipeline.inventory.ledger_rows import STANDING_SCHEMA
from caf_pipeline.inventory.objects import S3Object, is_supported
from caf_pipeline.inventory.snapshot import (
    SNAPSHOT_SCHEMA,
    SnapshotWriter,
    read_objects,
    read_snapshot,
)
from caf_pipeline.system.parquet import ROWS_PER_GROUP, QueryBudget, WholeParquet
from caf_pipeline_tests.support.disks import files_of_at_most
from caf_pipeline_tests.support.snapshots import (
    MOMENT,
    ODD_KEYS,
    thing,
    write_snapshot,
)


def test_a_snapshot_reads_back_as_it_was_listed(tmp_path):
    objects = [
        thing(b"a", size=0),
        S3Object(b"a/\xff", "v1", "e-2", 5 << 40, MOMENT, "GLACIER", "SHA256/COMPOSITE"),
        thing(b"b"),
    ]
    written = write_snapshot(tmp_path / "s.parquet", objects[:1], [], objects[1:])
    assert list(read_objects(tmp_path / "s.parquet")) == objects
    assert read_snapshot(tmp_path / "s.parquet") == written
    assert (
        written.name,
        written.object_count,
        written.object_bytes,
        written.unsupported_count,
    ) == ("s", 3, (5 << 40) + 1, 1)


def test_an_empty_source_has_an_empty_snapshot(tmp_path):
    snapshot = write_snapshot(tmp_path / "s.parquet")
    assert read_snapshot(snapshot.path) == snapshot
    assert (snapshot.object_count, list(read_objects(snapshot.path)), snapshot.complete) == (
        0,
        [],
        True,
    )


@pytest.mark.parametrize(
    "bounds", [{"after": b"\xff'"}, {"until": b"m"}, {"after": b"a", "until": b"m"}, {"until": b""}]
)
def test_a_bounded_snapshot_keeps_its_bounds_and_is_not_complete(tmp_path, bounds):
    snapshot = read_snapshot(write_snapshot(tmp_path / "s.parquet", [thing(b"b")], **bounds).path)
    assert not snapshot.complete
    assert {"after": snapshot.after, "until": snapshot.until} == {
        "after": b"",
        "until": None,
    } | bounds


@given(
    st.lists(
        st.tuples(st.sampled_from(ODD_KEYS), st.sampled_from("ef"), st.integers(0, 3)), max_size=12
    )
)
@settings(max_examples=40)
def test_a_snapshot_is_sorted_with_each_object_once(listed):
    objects = [thing(key, etag=etag, minute=minute) for key, etag, minute in listed]
    latest = {
        (obj.key, obj.object_version): obj
        for obj in sorted(objects, key=lambda obj: obj.last_modified)
    }
    with tempfile.TemporaryDirectory() as folder:
        snapshot = write_snapshot(Path(folder) / "s.parquet", objects[:5], objects[5:])
        assert [path.name for path in Path(folder).iterdir()] == ["s.parquet"]
        stored = list(read_objects(snapshot.path))
        assert stored == sorted(
            latest.values(), key=lambda obj: (obj.key, obj.last_modified, obj.object_version)
        )
        assert read_snapshot(snapshot.path).object_bytes == len(stored)
        assert snapshot.unsupported_count == sum(not is_supported(obj.key) for obj in stored)


def test_windowed_sorting_keeps_each_object_once(tmp_path, monkeypatch):
    monkeypatch.setattr(inventory, "SORTED_BY_MEMORY", 0.03)  # four windows
    budget = QueryBudget(memory_bytes=256 << 20)
    generator = random.Random(7)
    keys = [f"{'long/' * 20}{number:06d}".encode() for number in range(100_000)]
    generator.shuffle(keys)
    files = [tmp_path / f"{number}.parquet" for number in range(4)]
    for number, file in enumerate(files):
        some = keys[
            number * 25_000 - 10 * bool(number) : (number + 1) * 25_000
        ]  # ten are in two files
        columns = {
            name: [getattr(thing(b"k"), name)] * len(some) for name in SNAPSHOT_SCHEMA.names
        } | {"key": some}
        pq.write_table(
            pa.table(columns, schema=SNAPSHOT_SCHEMA), file, row_group_size=ROWS_PER_GROUP
        )
    path = tmp_path / "s" / "s.parquet"
    path.parent.mkdir()
    with SnapshotWriter(path, source="demo", listed_at=MOMENT, budget=budget) as writer:
        writer.add_files(files)
        snapshot = writer.finish()
    assert pq.read_table(path)["key"].to_pylist() == sorted(keys)
    assert (snapshot.object_count, snapshot.object_bytes, snapshot.unsupported_count) == (
        100_000,
        100_000,
        0,
    )
    assert list(path.parent.iterdir()) == [path]


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from("ef"), st.integers(0, 2)), min_size=1
    ),
    st.integers(1, 4),
)
def test_a_repeated_identity_is_kept_once_across_batches(rows, size):
    objects = sorted(
        (thing(key.encode(), etag=etag, minute=minute) for key, etag, minute in rows), key=order_of
    )
    columns = {name: [getattr(obj, name) for obj in objects] for name in SNAPSHOT_SCHEMA.names}
    batches = pa.table(columns, schema=SNAPSHOT_SCHEMA).to_batches(max_chunksize=size)
    latest = {(obj.key, obj.object_version): obj for obj in objects}
    kept = [
        inventory.s3_object(row)
        for batch in inventory.distinct_identities(batches)
        for row in batch.to_pylist()
    ]
    assert kept == sorted(latest.values(), key=order_of)


def order_of(obj: S3Object):
    return obj.key, obj.last_modified, obj.object_version


def test_a_snapshot_that_was_not_finished_leaves_nothing(tmp_path):
    with SnapshotWriter(tmp_path / "s.parquet", source="demo", listed_at=MOMENT) as writer:
        writer.add([thing(b"a")])
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_snapshot(tmp_path):
    objects = [
        thing(f"{number:06d}".encode(), etag=f"{number * 7919:032x}") for number in range(80_000)
    ]
    with (
        files_of_at_most(50_000),
        pytest.raises(StagingError, match=r"s\.parquet"),
    ):
        write_snapshot(tmp_path / "s.parquet", objects)
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_reported(tmp_path):
    with pytest.raises(StagingError, match=r"nowhere/s\.parquet"):
        write_snapshot(tmp_path / "nowhere" / "s.parquet")


def not_parquet(path: Path) -> None:
    path.write_bytes(b"PAR1 and then nothing PAR1")


def without_metadata(path: Path) -> None:
    pq.write_table(SNAPSHOT_SCHEMA.empty_table(), path)


def with_metadata(text: str, schema: pa.Schema = SNAPSHOT_SCHEMA):
    def write(path: Path) -> None:
        file = WholeParquet(path, schema)
        file.close({"caf.snapshot": text})
        file.publish()

    return write


GOOD = {
    **{
        "source": "d",
        "listed_at": MOMENT.isoformat(),
        "taken_at": MOMENT.isoformat(),
        "after": "",
        "until": None,
    },
    **{
        "run": "",
        "report": "",
        "address": "",
        "all_versions": False,
        "beside": {"older": 0, "markers": 0, "deleted_keys": 0},
    },
    **dict.fromkeys(("object_count", "object_bytes", "unsupported_count"), 0),
}


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda path: None, "missing"),
        (lambda path: path.mkdir(), "cannot be read"),
        (not_parquet, "cannot be read as Parquet"),
        (without_metadata, "is not a snapshot"),
        (with_metadata("{"), "is not a snapshot"),
        (with_metadata("[]"), "is not a snapshot"),
        (with_metadata(json.dumps(GOOD | {"listed_at": "yesterday"})), "is not a snapshot"),
        (
            with_metadata(json.dumps({name: GOOD[name] for name in GOOD if name != "beside"})),
            "is not a snapshot",
        ),
        (with_metadata(json.dumps(GOOD | {"object_count": 3})), "declares 3"),
        (with_metadata(json.dumps(GOOD), STANDING_SCHEMA), "columns"),
    ],
)
def test_an_invalid_snapshot_is_refused(tmp_path, make, fact):
    make(tmp_path / "s.parquet")
    with pytest.raises(IntegrityError, match=fact):
        read_snapshot(tmp_path / "s.parquet")


def test_a_snapshot_with_altered_metadata_is_refused(tmp_path):
    path = write_snapshot(tmp_path / "s.parquet", [thing(b"a")]).path
    path.write_bytes(path.read_bytes().replace(b'"taken_at": "2026', b'"taken_at": "3026'))
    with pytest.raises(IntegrityError, match="metadata"):
        read_snapshot(path)
