"""The ops of a chunk's run, in flow order.

Each calls one step; the ledger has the state of the chunk.

They are joined by `Nothing`, so nothing passes through an IO manager, and each may be run again at
any time. An op yields no output where another live run holds the chunk: all that comes after it is
then skipped and the run ends well. All but `pack_chunk` serve every source: a partition's key is
the chunk's id, which begins with the source.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

from dagster import In, Nothing, OpDefinition, OpExecutionContext, Out, Output, op

from caf_pipeline.defs import metadata
from caf_pipeline.defs.failures import RETRY_TRANSIENT, as_failure
from caf_pipeline.defs.naming import S3_POOL, UPLOAD_POOL, op_name, s3_key, source_of
from caf_pipeline.defs.resources import EVERY_STEP, attempt_step
from caf_pipeline.errors import CafError, UsageError
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps import chunk_steps, planning

PACK: Final = "pack_chunk"
"""How a run names the step that reads S3, of any source."""


def _step(
    name: str,
    description: str,
    call: Callable[[RunContext, str], Any],
    shown: Callable[[Any], metadata.Metadata] | None = None,
    *,
    pool: str | None = None,
    resources: set[str] = EVERY_STEP,
) -> OpDefinition:
    """Return the op that calls a step with the chunk of its partition; `shown` makes metadata of
    what the step returns.
    """

    @op(
        name=name,
        description=description,
        ins={"before": In(Nothing)},
        out=Out(Nothing, is_required=False),
        retry_policy=RETRY_TRANSIENT,
        required_resource_keys=resources,
        pool=pool,
    )
    def step(context: OpExecutionContext) -> Iterator[Output[None]]:
        chunk, own = context.partition_key, context.assets_def.key.path[0]
        try:
            source = source_of(chunk)
            if source != own:
                wrong = f"partition '{chunk}' is a chunk of source '{source}', and not of '{own}'"
                raise UsageError(wrong, hint="`caf doctor` removes a partition that no plan made")
        except UsageError as error:  # a partition that somebody added
            raise as_failure(error) from error
        result = attempt_step(context, source, lambda run_context: call(run_context, chunk))
        if result is not None:
            yield Output(None, metadata=shown(result) if shown else None)

    return step


def _seal(run_context: RunContext, chunk: str) -> metadata.Metadata:
    return metadata.seal_metadata(chunk_steps.seal_chunk(run_context, chunk))


def _release(run_context: RunContext, chunk: str) -> metadata.Metadata:
    released = chunk_steps.release_staging(run_context, chunk)
    with suppress(
        CafError
    ):  # the chunk is archived; the daily check counts again, and reports a damaged inventory
        planning.count_again(run_context)
    return metadata.locations_metadata(
        released, run_context.ledger.chunks.account(run_context.source)
    )


load_batch = _step(
    "load_batch",
    "Read the chunk's part of the plan and see that it can be worked on.",
    chunk_steps.load_batch,
)


def pack_chunk(source: str) -> Any:  # noqa: ANN401 - what `alias` returns has no public type
    """Return the op that reads the source's bucket: one for each source, since each has an S3 of
    its own.
    """
    return _step(
        op_name(source, "pack_chunk"),
        "Read the objects from S3 into one CAF file in staging.",
        chunk_steps.pack_chunk,
        pool=S3_POOL,
        resources=EVERY_STEP | {s3_key(source)},
    ).alias(PACK)


seal_chunk = _step(
    "seal_chunk",
    "Record what was packed and skipped, and the Merkle root of the chunk.",
    _seal,
    dict,
)
post_file = _step(
    "post_file",
    "Announce the chunk to the store; a root that it already has from us costs nothing.",
    chunk_steps.post_file,
)
upload_chunk = _step(
    "upload_chunk",
    "Send the staged file to as many providers as the chunk has copies.",
    chunk_steps.upload_chunk,
    metadata.upload_metadata,
    pool=UPLOAD_POOL,
)
verify_stored = _step(
    "verify_stored",
    "See the store's proofs, and compare pieces read back with the samples taken when the chunk "
    "was sealed.",
    chunk_steps.verify_stored,
    metadata.verify_metadata,
)
load_locations = _step(
    "load_locations",
    "Write one location row for each object, in the transaction that makes the chunk `located`.",
    chunk_steps.load_locations,
)
release_staging = _step(
    "release_staging",
    "Remove the staged file and give its reservation back. After the last chunk, count the "
    "inventory again if need be.",
    _release,
    dict,
)
