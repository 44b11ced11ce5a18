"""The ops of a chunk's run, in flow order.

Each is idempotent: the ledger holds the chunk's state. If another live run holds the chunk, an op
yields no output: Dagster skips the later ops and the run succeeds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dagster import In, Nothing, OpExecutionContext, Out, Output, op

from caf_pipeline.asset_keys import AssetKeys
from caf_pipeline.defs import metadata
from caf_pipeline.defs.failures import RETRY_TRANSIENT, as_failure
from caf_pipeline.defs.resources import EVERY_STEP, attempt_step
from caf_pipeline.errors import CafError, UsageError
from caf_pipeline.naming import PACK, S3_POOL, SEAL, UPLOAD_POOL, op_name, s3_key, source_of
from caf_pipeline.records import posting_of
from caf_pipeline.run_context import RunContext

Op = Any
"""Dagster exports no type for the result of `alias`."""


def packing_ops(source: str) -> Sequence[Op]:
    """Return the ops of `caf_chunk`."""
    return (
        _step(
            source,
            "caf_load_batch",
            "Read the chunk's part of the plan and check that the chunk can be packed.",
            _load,
        ),
        _step(
            source,
            PACK,
            "Read the objects from S3 into one CAF file in staging.",
            _pack,
            pool=S3_POOL,
            resources=EVERY_STEP | {s3_key(source)},
        ),
        _step(
            source,
            SEAL,
            "Record the packed and skipped objects, and the chunk's Merkle root.",
            _seal,
            lambda shown, _: shown,
        ),
    )


def storing_ops(source: str) -> Sequence[Op]:
    """Return the ops of `stored_chunk`."""
    return (
        _step(
            source,
            "caf_post_file",
            "Announce the chunk to the store. If the store already has its root from us, this is "
            "free.",
            _post,
        ),
        _step(
            source,
            "caf_upload_chunk",
            "Send the staged file to one provider for each copy.",
            _upload,
            lambda report, _: metadata.upload_metadata(report),
            pool=UPLOAD_POOL,
        ),
        _step(
            source,
            "caf_verify_stored",
            "Check the store's proofs, and compare bytes read back with the samples taken at the "
            "seal.",
            _verify,
            lambda shown, _: shown,
        ),
    )


def locating_ops(source: str) -> Sequence[Op]:
    """Return the ops of `file_locations`."""
    return (
        _step(
            source,
            "caf_load_locations",
            "Write one location row for each object and mark the chunk `located`, in one "
            "transaction.",
            _locate,
        ),
        _step(
            source,
            "caf_release_staging",
            "Remove the staged file and release its reservation.",
            _release,
            lambda shown, keys: shown | metadata.locations_lineage(keys.key(source, "chunk_plan")),
        ),
    )


def _step(
    source: str,
    name: str,
    description: str,
    call: Callable[[RunContext, str], Any],
    shown: Callable[[Any, AssetKeys], metadata.Metadata] | None = None,
    *,
    pool: str | None = None,
    resources: set[str] = EVERY_STEP,
) -> Op:
    # `shown` converts the result of `call`, and the keys of the assets, to metadata. In its graph,
    # the op is called `name`.
    @op(
        name=op_name(source, name),
        description=description,
        ins={"before": In(Nothing)},
        out=Out(Nothing, is_required=False),
        retry_policy=RETRY_TRANSIENT,
        required_resource_keys=resources,
        pool=pool,
    )
    def step(context: OpExecutionContext) -> Iterator[Output[None]]:
        chunk = context.partition_key
        try:
            chunk_source = source_of(chunk)
            if chunk_source != source:
                raise UsageError(
                    f"partition '{chunk}' is a chunk of source '{chunk_source}', not of '{source}'",
                    hint="`caf doctor` removes a partition that no plan made",
                )
        except UsageError as error:  # someone added the partition by hand
            raise as_failure(error) from error
        result = attempt_step(context, source, lambda run_context: call(run_context, chunk))
        if result is not None:
            keys = context.resources.caf_run.asset_keys
            yield Output(None, metadata=shown(result, keys) if shown else None)

    return step.alias(name)


def _load(run_context: RunContext, chunk: str) -> object:
    from caf_pipeline.steps import chunk_steps

    return chunk_steps.load_batch(run_context, chunk)


def _pack(run_context: RunContext, chunk: str) -> object:
    from caf_pipeline.steps import chunk_steps

    return chunk_steps.pack_chunk(run_context, chunk)


def _post(run_context: RunContext, chunk: str) -> object:
    from caf_pipeline.steps import chunk_steps

    return chunk_steps.post_file(run_context, chunk)


def _upload(run_context: RunContext, chunk: str) -> object:
    from caf_pipeline.steps import chunk_steps

    return chunk_steps.upload_chunk(run_context, chunk)


def _locate(run_context: RunContext, chunk: str) -> object:
    from caf_pipeline.steps import chunk_steps

    return chunk_steps.load_locations(run_context, chunk)


def _seal(run_context: RunContext, chunk: str) -> metadata.Metadata:
    from caf_pipeline.steps import chunk_steps

    report = chunk_steps.seal_chunk(run_context, chunk)
    return metadata.seal_metadata(report, run_context.ledger.chunks.recipients(chunk))


def _verify(run_context: RunContext, chunk: str) -> metadata.Metadata:
    from caf_pipeline.steps import chunk_steps

    report = chunk_steps.verify_stored(run_context, chunk)
    urls: Mapping[str, str] = {}
    with suppress(CafError):  # the chunk is verified, and the link is only for people
        urls = run_context.store.urls(posting_of(report.chunk))
    return metadata.verify_metadata(report, run_context.ledger.chunks.recipients(chunk), urls)


def _release(run_context: RunContext, chunk: str) -> metadata.Metadata:
    from caf_pipeline.steps import chunk_steps

    released = chunk_steps.release_staging(run_context, chunk)
    chunks = run_context.ledger.chunks
    return metadata.locations_metadata(
        released, chunks.recipients(chunk), chunks.account(run_context.source)
    )
