"""Two machines share ledger and store, but not home and staging."""

import shutil

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import CafError, StoreError
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.steps import chunk_steps
from caf_pipeline.store.directory import DirectoryStore
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.run_contexts import (
    CHUNK_STEPS,
    a_run_context,
    archive_chunk,
    archive_everything,
    every_object_reads_back,
    object_bytes,
    plan,
)
from caf_pipeline_tests.support.tiers import sampled

BODIES = {f"key-{number}": b"%d" % number * 5000 for number in range(8)}


@pytest.fixture
def source():
    return MemorySource(dict(BODIES))


@pytest.fixture
def homes(tmp_path, source, ledger):
    """The first has planned one chunk of everything."""
    store = DirectoryStore(tmp_path / "store")
    first, second = (
        a_run_context(tmp_path / name, source, ledger, store=store, run=name)
        for name in ("first", "second")
    )
    plan(first)
    return first, second


def name_of(context):
    (chunk,) = context.ledger.chunks.list("src")
    return chunk.name


@pytest.mark.parametrize("reached", sampled(CHUNK_STEPS, every=4), ids=lambda step: step.__name__)
def test_one_home_finishes_what_the_other_started(homes, reached):
    first, second = homes
    name = name_of(first)
    archive_chunk(first, name, until=reached)
    posted = first.ledger.chunks.get(name).merkle_root
    for context in (second, first):
        archive_chunk(context, name)
        assert not plan(context).chunks
    assert posted in (None, first.ledger.chunks.get(name).merkle_root)
    assert len(list((first.store.folder / "chunks").iterdir())) == 1
    every_object_reads_back(second)


def test_posted_chunk_with_changed_objects_stays_with_its_packer(homes, source):
    first, second = homes
    name = name_of(first)
    archive_chunk(first, name, until=chunk_steps.post_file)
    source.unavailable["key-0"] = (SkipReason.CHANGED, -1)
    for _ in range(2):
        with pytest.raises(StoreError, match=str(first.staging())):
            archive_chunk(second, name)
        assert first.ledger.chunks.get(name).state is ChunkState.POSTED
    archive_chunk(first, name)
    assert object_bytes(second, "key-0") == BODIES["key-0"]


def test_posted_chunk_with_lost_staging_is_abandoned_by_successor(homes, source, tmp_path, ledger):
    first, second = homes
    name = name_of(first)
    archive_chunk(first, name, until=chunk_steps.post_file)
    source.unavailable["key-0"] = (SkipReason.CHANGED, -1)
    shutil.rmtree(first.staging())
    with pytest.raises(StoreError, match=str(first.staging())):
        archive_chunk(second, name)
    staging = str(first.staging())
    at_its_place = a_run_context(
        tmp_path / "second", source, ledger, store=second.store, run="third", staging=staging
    )
    with pytest.raises(StoreError, match=name):
        archive_chunk(at_its_place, name)
    assert ledger.chunks.get(name).state is ChunkState.ABANDONED
    source.unavailable.clear()
    archive_everything(at_its_place)
    assert object_bytes(second, "key-0") == BODIES["key-0"]


@pytest.mark.parametrize(
    "reached", [None, chunk_steps.load_batch, chunk_steps.seal_chunk, chunk_steps.post_file]
)
def test_missing_plans_folder_is_named_and_changes_nothing(homes, reached, tmp_path):
    first, second = homes
    name = name_of(first)
    if reached:
        archive_chunk(first, name, until=reached)
    plans = first.plans()
    plans.rename(tmp_path / "away")
    with pytest.raises(CafError, match=str(plans)):
        archive_chunk(second, name)
    (tmp_path / "away").rename(plans)
    archive_chunk(first, name)
    assert object_bytes(first, "key-7") == BODIES["key-7"]
