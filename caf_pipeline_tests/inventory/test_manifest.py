"""The two members that are ours."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.errors import MalformedArchive
from caf_pipeline.inventory import manifest as manifest_module
from caf_pipeline.inventory.manifest import (
    HEAD_SIZE_BYTES,
    LOGS_KEY,
    ChunkIdentity,
    LogTimes,
    ManifestWriter,
    head_bytes,
    open_manifest,
)
from caf_pipeline_tests.support.plans import MOMENT

IDENTITY = ChunkIdentity("a" * 32, "src", "src-00000000-00001", "00000000", "snap", MOMENT)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def a_row(number: int, **more):
    return {
        "member": f"m{number}",
        "key": f"k{number}",
        "etag": "e",
        "size_bytes": number,
        "start_byte": 0,
        "end_byte": number,
        "sha256": bytes(32),
        "last_modified": MOMENT,
        "storage_class": "STANDARD",
    } | more


def written(path, rows):
    with ManifestWriter(path, IDENTITY) as manifest:
        for row in rows:
            manifest.add(dict(row))
    return manifest


def test_the_head_has_a_fixed_length_and_names_the_chunk():
    head = head_bytes(IDENTITY)
    assert len(head) == HEAD_SIZE_BYTES
    assert json.loads(head) == {
        "format": "caf-pipeline/6",
        "archive": "a" * 32,
        "chunk": "src-00000000-00001",
    }


def test_the_head_of_the_longest_names_fits():
    assert (
        len(head_bytes(ChunkIdentity("a" * 32, "s" * 30, "s" * 50, "0" * 12, "x", MOMENT)))
        == HEAD_SIZE_BYTES
    )


def test_rows_survive_any_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest_module, "MANIFEST_GROUP_ROWS", 3)
    rows = [
        a_row(number, user_metadata={"b": "2", "a": "1"}, content_type="text/plain")
        for number in range(8)
    ]
    written(tmp_path / "m.parquet", rows)
    read = list(
        open_manifest(tmp_path / "m.parquet").rows(
            ("key", "user_metadata", "content_type", "inventory_time")
        )
    )
    assert [row["key"] for row in read] == [row["key"] for row in rows]
    assert read[0]["user_metadata"] == [("a", "1"), ("b", "2")]
    assert read[0]["inventory_time"] == MOMENT
    assert pq.ParquetFile(tmp_path / "m.parquet").num_row_groups == 3


@settings(max_examples=30)
@given(st.lists(st.tuples(texts, texts, st.dictionaries(texts, texts, max_size=4)), max_size=40))
def test_the_bound_is_never_below_the_files_size(tmp_path_factory, described):
    path = tmp_path_factory.mktemp("manifest") / "m.parquet"
    rows = [
        a_row(number, key=key, member=key, content_type=content_type, user_metadata=metadata)
        for number, (key, content_type, metadata) in enumerate(described)
    ]
    manifest = written(path, rows)
    assert path.stat().st_size <= manifest.bound_bytes


def test_the_same_rows_make_the_same_bytes(tmp_path):
    rows = [a_row(number) for number in range(20)]
    written(tmp_path / "1", rows)
    written(tmp_path / "2", rows)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


@pytest.mark.parametrize("data", [b"", b"PAR1", b"no parquet at all" * 10])
def test_an_invalid_manifest_is_refused(data):
    with pytest.raises(MalformedArchive):
        list(open_manifest(io.BytesIO(data)).rows())


def with_logs(path, logs, rows):
    with ManifestWriter(path, IDENTITY) as manifest:
        for number in range(rows):
            manifest.add(a_row(number))
        for log in logs:
            manifest.add_log(log)
    return manifest


_times = st.none() | st.tuples(
    st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-(1 << 63), (1 << 63) - 1)
)


@settings(max_examples=20)
@given(st.dictionaries(st.integers(0, 1 << 35), _times, max_size=30))
def test_log_times_read_back_within_the_bound(tmp_path_factory, times):
    path = tmp_path_factory.mktemp("manifest") / "m.parquet"
    logs = [
        LogTimes(start, *(first_and_last or (None, None)))
        for start, first_and_last in times.items()
    ]
    manifest = with_logs(path, logs, rows=len(logs))
    opened = open_manifest(path)
    assert opened.logs() == logs
    assert opened.row_count == len(logs)
    assert path.stat().st_size <= manifest.bound_bytes


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"[",
        b"{}",
        b"[[1]]",
        b"[[1,2]]",
        b"[[1,2,null]]",
        b"[[1,null,null],[1,null,null]]",
        b"[[1,2,9223372036854775808]]",
        b'[["1",2,3]]',
        b"[" + b"[1,2,3]," * 1000 + b"[1,2,3]]",
        b"[" * 100_000,
    ],
)
def test_invalid_log_times_are_refused(tmp_path, encoded):
    described = {manifest_module.METADATA_KEY: json.dumps({"format": manifest_module.CHUNK_FORMAT})}
    schema = manifest_module.MANIFEST_SCHEMA.with_metadata(described | {LOGS_KEY: encoded})
    rows = [a_row(number, inventory_time=MOMENT) for number in range(3)]
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "m")
    opened = open_manifest(tmp_path / "m")
    with pytest.raises(MalformedArchive):
        opened.logs()
