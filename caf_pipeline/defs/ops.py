"""The ops of a chunk's run, in flow order.

Each is idempotent: the ledger holds the chunk's state. If another live run holds the chunk, an op
yields no output: Dagster skips the later ops and the run succeeds.
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


def _step(
    name: str,
    description: str,
    call: Callable[[RunContext, str], Any],
    shown: Callable[[Any], metadata.Metadata] | None = None,
    *,
    pool: str | None = None,
    resources: set[str] = EVERY_STEP,
) -> OpDefinition:
    # `shown` converts the result of `call` to metadata.
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
        chunk, asset_source = context.partition_key, context.assets_def.key.path[0]
        try:
            source = source_of(chunk)
            if source != asset_source:
                raise UsageError(
                    f"partition '{chunk}' is a chunk of source '{source}', not of '{asset_source}'",
                    hint="`caf doctor` removes a partition that no plan made",
                )
        except UsageError as error:  # someone added the partition by hand
            raise as_failure(error) from error
        result = attempt_step(context, source, lambda run_context: call(run_context, chunk))
        if result is not None:
            yield Output(None, metadata=shown(result) if shown else None)

    return step


def _seal(run_context: RunContext, chunk: str) -> metadata.Metadata:
    report = chunk_steps.seal_chunk(run_context, chunk)
    return metadata.seal_metadata(report, run_context.ledger.chunks.recipients(chunk))


def _verify(run_context: RunContext, chunk: str) -> metadata.Metadata:
    report = chunk_steps.verify_stored(run_context, chunk)
    return metadata.verify_metadata(report, run_context.ledger.chunks.recipients(chunk))


def _release(run_context: RunContext, chunk: str) -> metadata.Metadata:
    released = chunk_steps.release_staging(run_context, chunk)
    # The chunk is archived. The daily check counts again, and reports a damaged inventory.
    with suppress(CafError):
        planning.count_again(run_context)
    chunks = run_context.ledger.chunks
    return metadata.locations_metadata(
        released, chunks.recipients(chunk), chunks.account(run_context.source)
    )


load_batch = _step(
    "load_batch",
    "Read the chunk's part of the plan and check that the chunk can be packed.",
    chunk_steps.load_batch,
)


def pack_chunk(source: str) -> Any:  # noqa: ANN401 - Dagster exports no type for the result of `alias`
    """Return the op that reads the bucket with the source's own S3 resource."""
    return _step(
        op_name(source, "pack_chunk"),
        "Read the objects from S3 into one CAF file in staging.",
        chunk_steps.pack_chunk,
        pool=S3_POOL,
        resources=EVERY_STEP | {s3_key(source)},
    ).alias(PACK)


seal_chunk = _step(
    "seal_chunk",
    "Record the packed and skipped objects, and the chunk's Merkle root.",
    _seal,
    dict,
)
post_file = _step(
    "post_file",
    "Announce the chunk to the store. If the store already has its root from us, this is free.",
    chunk_steps.post_file,
)
upload_chunk = _step(
    "upload_chunk",
    "Send the staged file to one provider for each copy.",
    chunk_steps.upload_chunk,
    metadata.upload_metadata,
    pool=UPLOAD_POOL,
)
verify_stored = _step(
    "verify_stored",
    "Check the store's proofs, and compare bytes read back with the samples taken at the seal.",
    _verify,
    dict,
)
load_locations = _step(
    "load_locations",
    "Write one location row for each object and mark the chunk `located`, in one transaction.",
    chunk_steps.load_locations,
)
release_staging = _step(
    "release_staging",
    "Remove the staged file and release its reservation. After the last chunk, count the "
    "inventory again if necessary.",
    _release,
    dict,
)
