"""Manifests that contradict the plan or the index are reported and not sealed."""

import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import IntegrityError
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.inventory.plan import OBJECTS_FILE, write_sums
from caf_pipeline.steps import chunk_steps
from caf_pipeline.steps.audit import account_for_chunk
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_chunk, plan

KEYS = [f"key-{number:02d}" for number in range(12)]


@pytest.fixture
def source():
    return MemorySource({key: os.urandom(1000 + number) for number, key in enumerate(KEYS)})


@pytest.fixture
def context(tmp_path, source, ledger):
    return a_run_context(tmp_path, source, ledger)


@pytest.fixture
def name(context):
    (chunk,) = plan(context).chunks
    return chunk.name


def renamed(rows):
    rows[7]["key"] = b"key-x"


def other_version(rows):
    rows[7]["object_version"] = "etag:other:1"


def one_less(rows):
    del rows[7]


def last_missing(rows):
    del rows[11]


def one_more(rows):
    rows.append(rows[11] | {"key": b"key-later"})


def in_another_order(rows):
    rows[2], rows[3] = rows[3], rows[2]


def with_plan(context, name, change):
    """Replace the chunk's plan by one with changed rows."""
    path = Path(context.ledger.chunks.get(name).plan_folder) / OBJECTS_FILE
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    write_sums(path.parent)


CHANGES = [renamed, other_version, one_less, last_missing, one_more, in_another_order]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_packed_file_that_contradicts_its_plan_is_not_sealed(context, name, change):
    archive_chunk(context, name, until=chunk_steps.pack_chunk)
    with_plan(context, name, change)
    with pytest.raises(IntegrityError, match=name):
        chunk_steps.seal_chunk(context, name)
    assert context.ledger.chunks.get(name).state is ChunkState.PACKING


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_account_of_stored_chunk_names_difference_from_plan(context, name, change):
    archive_chunk(context, name)
    with_plan(context, name, change)
    account = account_for_chunk(context, name)
    assert not account.agrees
    assert ("7" in account.explanation) == (change in (renamed, other_version, one_less))


@pytest.mark.parametrize(
    "changes",
    [
        {
            "range_fault": lambda self, *row: (
                "" if row[0] != "key-05" else f"the index has {row[0]} elsewhere"
            )
        },
        {"member_count_fault": lambda self, members: f"the index has more than {members} members"},
    ],
    ids=["a member elsewhere", "a member more"],
)
def test_an_index_that_contradicts_the_manifest_is_not_sealed(context, name, monkeypatch, changes):
    archive_chunk(context, name, until=chunk_steps.pack_chunk)
    for method, value in changes.items():
        monkeypatch.setattr(chunk_steps.ChunkFile, method, value)
    with pytest.raises(IntegrityError, match="the index has"):
        chunk_steps.seal_chunk(context, name)


def test_a_ledger_with_other_counts_is_told_apart(context, name, monkeypatch):
    archive_chunk(context, name)
    original = context.ledger.chunks.get
    monkeypatch.setattr(
        context.ledger.chunks,
        "get",
        lambda name: replace(original(name), member_count=11, skipped_count=1),
    )
    assert "11 members, 1 skipped" in account_for_chunk(context, name).explanation


def test_the_manifest_is_opened_once_while_sealing(context, name, monkeypatch):
    archive_chunk(context, name, until=chunk_steps.pack_chunk)
    opened = []
    original = chunk_steps.ChunkFile.manifest
    monkeypatch.setattr(
        chunk_steps.ChunkFile, "manifest", lambda self: opened.append(self.name) or original(self)
    )
    chunk_steps.seal_chunk(context, name)
    assert opened == [name]


@pytest.mark.parametrize("rows", [1, 5, 2048])
def test_seal_report_counts_skips_and_names_largest_members(
    context, source, name, monkeypatch, rows
):
    monkeypatch.setattr("caf_pipeline.inventory.manifest.MANIFEST_GROUP_ROWS", rows)
    monkeypatch.setattr("caf_pipeline.inventory.plan.OBJECTS_PER_BATCH", 3)
    monkeypatch.setattr(chunk_steps, "LARGEST_SHOWN", 3)
    source.unavailable = dict.fromkeys(["key-11", "key-03"], ("deleted", 0))
    archive_chunk(context, name, until=chunk_steps.pack_chunk)
    report = chunk_steps.seal_chunk(context, name)
    assert report.skipped == {SkipReason.DELETED: 2}
    assert report.largest == [("key-10", 1010), ("key-09", 1009), ("key-08", 1008)]
    again = chunk_steps.seal_chunk(context, name)
    assert (again.skipped, again.largest) == (report.skipped, report.largest)


def test_seal_report_counts_skips_of_chunk_without_members(context, source, name):
    source.unavailable = dict.fromkeys(KEYS, ("deleted", 0))
    archive_chunk(context, name, until=chunk_steps.pack_chunk)
    report = chunk_steps.seal_chunk(context, name)
    assert (report.chunk.state, report.skipped, report.largest) == (
        ChunkState.EMPTY,
        {SkipReason.DELETED: 12},
        [],
    )
