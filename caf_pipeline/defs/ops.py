"""The ops of a chunk's run, in flow order. Each calls one step; the ledger has the state of the chunk.

They are joined by `Nothing`, so nothing passes through an IO manager, and each may be run again at any time. An op yields no
output where another live run holds the chunk: all that comes after it is then skipped and the run ends well. All but
`pack_chunk` serve every source: a partition's key is the chunk's id, which begins with the source.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from dagster import In, Nothing, OpExecutionContext, Out, Output, op

from caf_pipeline.context import Workplace
from caf_pipeline.defs import metadata
from caf_pipeline.defs.failures import RETRY_TRANSIENT
from caf_pipeline.defs.naming import S3_POOL, UPLOAD_POOL, identifier, s3_key, source_of
from caf_pipeline.defs.resources import EVERY_STEP, attempt_step
from caf_pipeline.packing.staging import staged_path
from caf_pipeline.steps import chunk_steps

T = TypeVar("T")
Done = Iterator[Output[None]]

_step_op = partial(
    op,
    ins={"before": In(Nothing)},
    out=Out(Nothing, is_required=False),
    retry_policy=RETRY_TRANSIENT,
    required_resource_keys=EVERY_STEP,
)


def _step(context: OpExecutionContext, call: Callable[[Workplace, str], T]) -> T | None:
    chunk = context.partition_key
    return attempt_step(context, source_of(chunk), lambda work: call(work, chunk))


def _done(result: object, shown: Callable[[Any], metadata.Metadata] | None = None) -> Done:
    if result is not None:
        yield Output(None, metadata=shown(result) if shown else None)


@_step_op()
def load_batch(context: OpExecutionContext) -> Done:
    """Read the chunk's part of the plan and see that it can be worked on."""
    yield from _done(_step(context, chunk_steps.load_batch))


def pack_chunk(source: str) -> Any:  # noqa: ANN401 - what `alias` returns has no public type
    """Return the op that reads the source's bucket: one for each source, since each has an S3 of its own."""

    @_step_op(name=f"{identifier(source)}__pack_chunk", pool=S3_POOL, required_resource_keys=EVERY_STEP | {s3_key(source)})
    def pack_chunk(context: OpExecutionContext) -> Done:
        """Read the objects from S3 into one CAF file in staging."""
        yield from _done(_step(context, chunk_steps.pack_chunk))

    return pack_chunk.alias("pack_chunk")


@_step_op()
def seal_chunk(context: OpExecutionContext) -> Done:
    """Record what was packed and skipped, and the Merkle root of the chunk."""

    def seal(work: Workplace, chunk: str) -> metadata.Metadata:
        return metadata.seal_metadata(chunk_steps.seal_chunk(work, chunk), staged_path(work, chunk))

    yield from _done(_step(context, seal), lambda shown: shown)


@_step_op()
def post_file(context: OpExecutionContext) -> Done:
    """Announce the chunk to the store; a root that it already has from us costs nothing."""
    yield from _done(_step(context, chunk_steps.post_file))


@_step_op(pool=UPLOAD_POOL)
def upload_chunk(context: OpExecutionContext) -> Done:
    """Send the staged file to as many providers as the chunk has copies."""
    yield from _done(_step(context, chunk_steps.upload_chunk), metadata.upload_metadata)


@_step_op()
def verify_stored(context: OpExecutionContext) -> Done:
    """See the store's proofs, and compare pieces read back with the samples taken when the chunk was sealed."""
    yield from _done(_step(context, chunk_steps.verify_stored), metadata.verify_metadata)


@_step_op()
def load_locations(context: OpExecutionContext) -> Done:
    """Write one location row for each object, in the transaction that makes the chunk `located`."""
    yield from _done(_step(context, chunk_steps.load_locations))


@_step_op()
def release_staging(context: OpExecutionContext) -> Done:
    """Remove the staged file and give its reservation back."""

    def release(work: Workplace, chunk: str) -> metadata.Metadata:
        return metadata.locations_metadata(chunk_steps.release_staging(work, chunk), work.ledger.account(work.source))

    yield from _done(_step(context, release), lambda shown: shown)
