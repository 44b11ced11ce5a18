"""References into the chunks of a folder, in JSON and Parquet."""

import asyncio
import json
import os
from dataclasses import replace
from itertools import repeat

import fsspec
import pyarrow.parquet as pq
import pytest

from caf_pipeline.errors import IntegrityError, ObjectMissing, StagingError, StoreUnreachable
from caf_pipeline.retrieval.references import write_references
from caf_pipeline.store.directory import DirectoryStore
from caf_pipeline_tests.contracts import chunk_store
from caf_pipeline_tests.contracts.chunk_store import corrupt, staged_file
from caf_pipeline_tests.support.located_object import BODY, CHUNK, END, START, in_parts, whole
from caf_pipeline_tests.support.several_folders import SeveralFolders

AS_ZARR = {"asynchronous": True}
"""The option of docs/how-to/read-from-programs.md. zarr's store awaits every request."""


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "a store")


@pytest.fixture
def posting(store, tmp_path):
    return chunk_store.stored(store, staged_file(tmp_path, CHUNK))


def test_reference_into_a_folder_store_is_readable(store, posting, tmp_path):
    sums = write_references([whole(posting)], store, tmp_path / "refs.json")
    assert (sums.objects, sums.chunks, sums.in_parts) == (1, 1, 0)
    place = {"fo": str(tmp_path / "refs.json"), "skip_instance_cache": True}
    assert fsspec.filesystem("reference", **place).cat("a/key") == BODY
    fs = fsspec.filesystem("reference", asynchronous=True, remote_options=AS_ZARR, **place)
    assert asyncio.run(fs._cat_file("a/key")) == BODY


def test_split_objects_are_in_parquet_but_not_json(store, posting, tmp_path):
    location = in_parts(posting, 50_000, 2_500_000)
    sums = write_references([location], store, tmp_path / "refs.json")
    assert (sums.objects, sums.in_parts, sums.chunks) == (1, 1, 0)
    assert (tmp_path / "refs.json").read_text() == '{"version":1,"refs":{\n\n}}\n'
    write_references([location], store, tmp_path / "refs.parquet")
    rows = pq.read_table(tmp_path / "refs.parquet").to_pylist()
    assert [(row["part"], row["parts"]) for row in rows] == [(0, 3), (1, 3), (2, 3)]
    assert (
        b"".join(CHUNK[row["offset"] : row["offset"] + row["size"]] for row in rows)
        == CHUNK[START:END]
    )


@pytest.mark.parametrize(("name", "counted"), [("refs.json", 1), ("refs.parquet", 0)])
def test_keys_that_fsspec_does_not_read_by_json_are_counted(
    store, posting, tmp_path, name, counted
):
    without = whole(posting)
    folder = replace(without, row=replace(without.row, key="a/key/"))
    sums = write_references([without, folder], store, tmp_path / name)
    assert (sums.objects, sums.end_in_slash) == (2, counted)


@pytest.mark.parametrize("name", ["refs.json", "refs.parquet"])
def test_link_target_is_written_and_the_link_stays(store, posting, tmp_path, name):
    (target := tmp_path / "of no kind").write_bytes(b"before")
    (link := tmp_path / name).symlink_to(target)
    write_references([whole(posting)], store, link)
    write_references([whole(posting)], store, tmp_path / f"2-{name}")
    assert link.is_symlink()
    assert target.read_bytes() == (tmp_path / f"2-{name}").read_bytes()


@pytest.mark.parametrize("name", ["refs.json", "refs.parquet"])
def test_references_are_on_the_disk_before_they_have_their_name(
    store, posting, tmp_path, monkeypatch, name
):
    synced, replace_file = [], os.replace
    before_named = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))

    def named(one, other):
        before_named.append((os.stat(one).st_ino, list(synced)))
        replace_file(one, other)

    monkeypatch.setattr(os, "replace", named)
    write_references([whole(posting)], store, tmp_path / name)
    inode, folder = (tmp_path / name).stat().st_ino, tmp_path.stat().st_ino
    assert before_named == [(inode, [inode])]
    assert synced == [inode, folder]


def test_lying_provider_gets_no_reference(tmp_path):
    store = SeveralFolders(tmp_path / "several")
    posting = chunk_store.stored(store, staged_file(tmp_path, CHUNK))
    location = whole(posting, CHUNK[START : START + 100])
    location = replace(location, row=replace(location.row, end_byte=START + 100))
    first, *others = store.urls(posting)
    corrupt(store.file(first, posting), START)
    write_references([location], store, tmp_path / "refs.json")
    (url, *_) = json.loads((tmp_path / "refs.json").read_text())["refs"]["a/key"]
    assert url == store.urls(posting)[others[0]]
    for provider in others:
        corrupt(store.file(provider, posting), START)
    with pytest.raises(IntegrityError, match="archived bytes"):
        write_references([location], store, tmp_path / "refs.json")
    store.away.add(first)
    with pytest.raises(StoreUnreachable, match=f"{first} is away"):
        write_references([location], store, tmp_path / "refs.json")


@pytest.mark.thorough
def test_failed_export_keeps_the_old_file(store, posting, tmp_path, small_disk):
    with pytest.raises(StagingError, match="cannot be written"):
        write_references(repeat(whole(posting), 200_000), store, small_disk / "refs.json")
    assert not [path for path in small_disk.iterdir() if path.suffix in (".json", ".partial")]
    (tmp_path / "refs.json").write_text("before")
    (store.folder / "chunks" / f"{posting.merkle_root.hex()}.caf").unlink()
    with pytest.raises(ObjectMissing, match="src-1-1"):
        write_references([whole(posting)], store, tmp_path / "refs.json")
    assert (tmp_path / "refs.json").read_text() == "before"
