"""The ops of a chunk's run, in flow order. Each calls one step; the ledger says where the chunk stands.

They are joined by `Nothing`, so nothing passes through an IO manager, and each may be run again at any time. An op yields no
output where another live run holds the chunk: all that comes after it is then skipped and the run ends well. The same ops serve
every source: a partition's key is the chunk's id, which begins with the source.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from dagster import In, Nothing, OpExecutionContext, Out, Output, op

from caf_pipeline.context import Workplace
from caf_pipeline.defs import metadata
from caf_pipeline.defs.failures import RETRY_TRANSIENT, attempt
from caf_pipeline.defs.naming import S3_POOL, UPLOAD_POOL, source_of
from caf_pipeline.defs.resources import Pipeline
from caf_pipeline.packing.staging import staged_path
from caf_pipeline.steps import chunk_steps

T = TypeVar("T")
Done = Iterator[Output[None]]

_OUT = Out(Nothing, is_required=False)
_AFTER = {"before": In(Nothing)}


def _step(context: OpExecutionContext, pipeline: Pipeline, call: Callable[[Workplace, str], T]) -> T | None:
    def work() -> T:
        chunk = context.partition_key
        return call(pipeline.open_in(context, source_of(chunk)), chunk)

    return attempt(context, work, pipeline.on_error)


def _done(result: object, shown: Callable[[Any], metadata.Metadata] | None = None) -> Done:
    if result is not None:
        yield Output(None, metadata=shown(result) if shown else None)


@op(ins=_AFTER, out=_OUT, retry_policy=RETRY_TRANSIENT)
def load_batch(context: OpExecutionContext, pipeline: Pipeline) -> Done:
    """Read the chunk's part of the plan and see that it can be worked on."""
    yield from _done(_step(context, pipeline, chunk_steps.load_batch))


@op(ins=_AFTER, out=_OUT, retry_policy=RETRY_TRANSIENT, pool=S3_POOL)
def pack_chunk(context: OpExecutionContext, pipeline: Pipeline) -> Done:
    """Read the objects from S3 into one CAF file in staging."""
    yield from _done(_step(context, pipeline, chunk_steps.pack_chunk))


@op(ins=_AFTER, out=_OUT, retry_policy=RETRY_TRANSIENT)
def seal_chunk(context: OpExecutionContext, pipeline: Pipeline) -> Done:
    """Record what was packed and skipped, and the Merkle root of the chunk."""

    def seal(work: Workplace, chunk: str) -> metadata.Metadata:
        return metadata.seal_metadata(chunk_steps.seal_chunk(work, chunk), staged_path(work, chunk))

    yield from _done(_step(context, pipeline, seal), lambda shown: shown)


@op(ins=_AFTER, out=_OUT, retry_policy=RETRY_TRANSIENT)
def post_file(context: OpExecutionContext, pipeline: Pipeline) -> Done:
    """Announce the chunk to the store; a root that it already has from us costs nothing."""
    yield from _done(_step(context, pipeline, chunk_steps.post_file))


@op(ins=_AFTER, out=_OUT, retry_policy=RETRY_TRANSIENT, pool=UPLOAD_POOL)
def upload_chunk(context: OpExecutionContext, pipeline: Pipeline) -> Done:
    """Send the staged file to as many providers as copies are asked for."""
    yield from _done(_step(context, pipeline, chunk_steps.upload_chunk), metadata.upload_metadata)


@op(ins=_AFTER, out=_OUT, retry_policy=RETRY_TRANSIENT)
def verify_stored(context: OpExecutionContext, pipeline: Pipeline) -> Done:
    """See the store's proofs, and compare pieces read back with the samples taken when the chunk was sealed."""
    yield from _done(_step(context, pipeline, chunk_steps.verify_stored), metadata.verify_metadata)


@op(ins=_AFTER, out=_OUT, retry_policy=RETRY_TRANSIENT)
def load_locations(context: OpExecutionContext, pipeline: Pipeline) -> Done:
    """Write one location row for each object, in the transaction that makes the chunk `located`."""
    yield from _done(_step(context, pipeline, chunk_steps.load_locations))


@op(ins=_AFTER, out=_OUT, retry_policy=RETRY_TRANSIENT)
def release_staging(context: OpExecutionContext, pipeline: Pipeline) -> Done:
    """Remove the staged file and give its reservation back."""

    def release(work: Workplace, chunk: str) -> metadata.Metadata:
        return metadata.locations_metadata(chunk_steps.release_staging(work, chunk), work.ledger.account(work.source))

    yield from _done(_step(context, pipeline, release), lambda shown: shown)
