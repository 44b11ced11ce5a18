"""An archived object read by ranges: requests and verification."""

import os

import pytest

from caf_pipeline.errors import IntegrityError
from caf_pipeline.formats.clps import FIRST_READ_BYTES, read_metadata
from caf_pipeline.retrieval.object_file import IN_MEMORY_BYTES
from caf_pipeline.retrieval.object_ranges import ObjectRanges
from caf_pipeline.retrieval.reader import fetch
from caf_pipeline_tests.contracts.chunk_store import corrupt
from caf_pipeline_tests.support.breaking_folders import BreakingFolders
from caf_pipeline_tests.support.clps_archives import WHOLE, built
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything

LARGE = built((9, os.urandom(200_000)), *WHOLE, sections=IN_MEMORY_BYTES)
SMALL = os.urandom(1000)


@pytest.fixture
def context(tmp_path, ledger):
    source = MemorySource({"large": LARGE, "small": SMALL})
    context = a_run_context(tmp_path, source, ledger, store=BreakingFolders(tmp_path / "store"))
    archive_everything(context)
    context.store.asked.clear()
    return context


def test_the_metadata_of_a_large_archive_are_two_range_reads(context):
    ranges = ObjectRanges(fetch(context.ledger.lookup, context.store, "src", "large"))
    first, size_bytes = ranges.read_prefix(FIRST_READ_BYTES)
    archive = read_metadata(first, size_bytes, ranges.read, name=ranges.name)
    assert (archive.records, size_bytes) == (2, len(LARGE))
    assert [end - start for _, start, end in context.store.asked] == [
        FIRST_READ_BYTES,
        archive.header.metadata_end - FIRST_READ_BYTES,
    ]
    assert ranges.read_suffix(10) == (LARGE[-10:], len(LARGE))
    assert b"".join(ranges.stream(5, 300_000, 1000)) == LARGE[5:300_000]


def test_small_object_is_read_once_and_verified(context):
    found = fetch(context.ledger.lookup, context.store, "src", "small")
    ranges = ObjectRanges(found)
    assert (ranges.read(10, 20), ranges.read_prefix(5)[0], ranges.read_suffix(5)[0]) == (
        SMALL[10:20],
        SMALL[:5],
        SMALL[-5:],
    )
    assert len(context.store.asked) == 1
    for provider in context.store.folders:
        corrupt(
            context.store.file(provider, found.location.posting), at=found.location.row.start_byte
        )
    with pytest.raises(IntegrityError):
        ObjectRanges(found).read(10, 20)
