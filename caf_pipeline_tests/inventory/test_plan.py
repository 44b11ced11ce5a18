"""Reading a plan's files."""

import pytest

from caf_pipeline.errors import CafError
from caf_pipeline.inventory import cutting
from caf_pipeline.inventory.plan import (
    SUMS_FILE,
    count_chunk_objects,
    read_chunk_objects,
    read_chunk_plan,
    read_terms,
    verify_plan,
)
from caf_pipeline_tests.support.plans import an_object, chunks_of, plan_of

TARGET = 1 << 20


def test_a_plan_reads_back(tmp_path, monkeypatch):
    monkeypatch.setattr(cutting, "ROWS_PER_BATCH", 3)  # several row groups, chunks across them
    objects = [an_object(f"k{n}", 400_000, version_id=f"v{n}", etag=f"e{n}") for n in range(8)]
    plan = plan_of(tmp_path, objects, target_size_bytes=TARGET)
    assert [planned.object for chunk in chunks_of(plan) for planned in chunk] == objects
    assert [read_chunk_plan(tmp_path, chunk.chunk_number) for chunk in plan.chunks] == list(
        plan.chunks
    )
    assert read_terms(tmp_path)["snapshot"] == "snapshot"


def test_a_chunks_objects_are_counted_from_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(cutting, "ROWS_PER_BATCH", 4)
    objects = [an_object(f"key-{number:02d}", 1000) for number in range(30)]
    plan = plan_of(tmp_path, objects, target_size_bytes=12_000)
    counts = [count_chunk_objects(plan.folder, chunk.chunk_number) for chunk in plan.chunks]
    assert (
        counts
        == [chunk.object_count for chunk in plan.chunks]
        == [len(chunk) for chunk in chunks_of(plan)]
    )
    assert len(counts) > 2
    assert count_chunk_objects(plan.folder, len(counts) + 1) == 0


def test_a_plan_without_files_is_refused(tmp_path):
    with pytest.raises(CafError, match=r"objects\.parquet"):
        list(read_chunk_objects(tmp_path, 1))


@pytest.mark.parametrize("name", ["objects.parquet", "chunks.parquet", "parts.parquet", SUMS_FILE])
def test_a_flipped_byte_of_a_plan_is_damage(tmp_path, name):
    plan_of(
        tmp_path,
        [an_object("a", 40 << 30), *(an_object(f"k{n}", n) for n in range(20))],
        target_size_bytes=TARGET,
    )
    whole = (tmp_path / name).read_bytes()
    for offset in range(0, 80) if name == SUMS_FILE else range(0, len(whole), len(whole) // 10):
        (tmp_path / name).write_bytes(
            whole[:offset] + bytes([whole[offset] ^ 0x10]) + whole[offset + 1 :]
        )
        with pytest.raises(CafError, match="cannot be read"):
            verify_plan(tmp_path)
    (tmp_path / name).write_bytes(whole)
    verify_plan(tmp_path)
