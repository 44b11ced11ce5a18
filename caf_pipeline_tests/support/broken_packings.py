"""Packings that fail, for tests that resume them."""

import pytest

from caf_pipeline.errors import ObjectReadFailed
from caf_pipeline.inventory.plan import ChunkPlan
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps import chunk_steps
from caf_pipeline_tests.support.run_contexts import plan


def broken_chunk(context: RunContext) -> ChunkPlan:
    """Return a chunk whose packing failed near its end."""
    (chunk,) = plan(context).chunks
    chunk_steps.load_batch(context, chunk.name)
    context.objects.failing = {"key-050": 0}
    with pytest.raises(ObjectReadFailed):
        chunk_steps.pack_chunk(context, chunk.name)
    context.objects.failing = {}
    context.objects.reads.clear()
    return chunk
