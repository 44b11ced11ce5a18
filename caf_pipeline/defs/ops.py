"""The ops of a chunk's run, one for each asset, in flow order.

An op calls the steps of its asset. Each step is idempotent: the ledger holds the chunk's state. If
another live run holds the chunk, an op yields no output: Dagster skips the later ops and the run
succeeds.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from dagster import (
    AssetCheckEvaluation,
    AssetObservation,
    DataVersion,
    In,
    MaterializeResult,
    Nothing,
    OpExecutionContext,
    Out,
    Output,
    op,
)

from caf_pipeline.asset_keys import AssetKeys
from caf_pipeline.chunk_state import CLAIMING
from caf_pipeline.dagster_private import SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION
from caf_pipeline.defs import metadata
from caf_pipeline.defs.asset_checks import ChunkCheck, evaluate
from caf_pipeline.defs.evaluations import latest_materialization, partition_evaluation
from caf_pipeline.defs.failures import RETRY_TRANSIENT, as_failure
from caf_pipeline.defs.resources import EVERY_STEP, attempt_step
from caf_pipeline.errors import CafError, HeldByOther, UsageError
from caf_pipeline.naming import (
    BACKFILL_TAG,
    DATA_VERSION_TAG,
    PACK,
    S3_POOL,
    UPLOAD_POOL,
    op_name,
    s3_key,
    source_of,
)
from caf_pipeline.records import Chunk, posting_of
from caf_pipeline.run_context import RunContext

Op = Any
"""Dagster exports no type for the result of `alias`."""

Call = Callable[[Callable[[RunContext, str], Any]], Any]
"""Calls a step of the chunk, logs the chunk's state, and returns the step's result."""

Work = Callable[[RunContext, Call, AssetKeys], metadata.Metadata]
"""Calls the steps of an op, and describes the chunk."""

Event = Output[None] | MaterializeResult[Any] | AssetObservation | AssetCheckEvaluation

RESULT: Final = "result"
CHECK: Final = "check"


def pack_op(source: str, check: ChunkCheck) -> Op:
    """Return the op of `caf_chunk`."""
    return _chunk_op(
        source,
        PACK,
        "Check that the chunk can be packed, read its objects from S3 into one CAF file in "
        "staging, and record its Merkle root.",
        _pack,
        check,
        pool=S3_POOL,
        resources=EVERY_STEP | {s3_key(source)},
    )


def store_op(source: str, check: ChunkCheck) -> Op:
    """Return the op of `stored_chunk`."""
    return _chunk_op(
        source,
        "caf_store_chunk",
        "Announce the chunk to the store, which is free if the store already has its root from "
        "us. Send the staged file to one provider for each copy. Then compare bytes read back "
        "with the samples taken at the seal.",
        _store,
        check,
        pool=UPLOAD_POOL,
    )


def locate_op(source: str, check: ChunkCheck) -> Op:
    """Return the op of `file_locations`."""
    return _chunk_op(
        source,
        "caf_locate_chunk",
        "Write one location row for each object and mark the chunk `located`, in one transaction. "
        "Then remove the staged file.",
        _locate,
        check,
    )


def _chunk_op(
    source: str,
    name: str,
    description: str,
    work: Work,
    check: ChunkCheck,
    *,
    pool: str | None = None,
    resources: set[str] = EVERY_STEP,
) -> Op:
    # In its graph, the op is called `name`.
    @op(
        name=op_name(source, name),
        description=description,
        ins={"before": In(Nothing)},
        out={name: Out(Nothing, is_required=False) for name in (RESULT, CHECK)},
        retry_policy=RETRY_TRANSIENT,
        required_resource_keys=resources,
        pool=pool,
    )
    def step(context: OpExecutionContext) -> Iterator[Event]:
        chunk = context.partition_key
        _require_source(chunk, source)
        selected = context.selected_output_names
        if RESULT in selected:
            events = attempt_step(
                context, source, lambda run_context: _archive(context, run_context, work)
            )
            if events is None:
                return
            yield from events
        if CHECK in selected and (RESULT not in selected or not check.later):
            result = evaluate(
                context, source, check.name, lambda run_context: check.function(run_context, chunk)
            )
            key = context.resources.caf_run.asset_keys.check_key(source, check.asset, check.name)
            yield Output(None, CHECK)
            yield partition_evaluation(
                context.instance, key, chunk, result, blocking=check.blocking
            )

    return step.alias(name)


def _require_source(chunk: str, source: str) -> None:
    try:
        chunk_source = source_of(chunk)
        if chunk_source != source:
            raise UsageError(
                f"partition '{chunk}' is a chunk of source '{chunk_source}', not of '{source}'",
                hint="`caf doctor` removes a partition that no plan made",
            )
    except UsageError as error:  # someone added the partition by hand
        raise as_failure(error) from error


def _archive(context: OpExecutionContext, run_context: RunContext, work: Work) -> list[Event]:
    name = context.partition_key
    was_finished = run_context.ledger.chunks.get(name).state not in CLAIMING

    def call(step: Callable[[RunContext, str], Any]) -> Any:  # noqa: ANN401 - of any step
        result = step(run_context, name)
        chunk: Chunk = getattr(result, "chunk", result)
        context.log.info(f"{step.__name__}: the chunk is {chunk.state}")
        return result

    shown = work(run_context, call, context.resources.caf_run.asset_keys)
    chunk = run_context.ledger.chunks.get(name)
    version = chunk.merkle_root.hex() if chunk.merkle_root else chunk.state.value
    key = context.asset_key_for_output(RESULT)
    last = latest_materialization(context.instance, key, name)
    is_known = (
        last is not None
        and last.asset_materialization is not None
        and (last.asset_materialization.tags or {}).get(DATA_VERSION_TAG) == version
        and (was_finished or last.run_id == context.run.run_id)  # of an earlier attempt
    )
    # An asset backfill fails unless its own runs materialize all of its partitions.
    of_assets = BACKFILL_TAG in context.run.tags and context.run.asset_selection
    if is_known and not of_assets:
        observation = AssetObservation(key, partition=name, metadata=shown)
        return [
            observation,
            Output(None, RESULT, metadata={SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION: True}),
        ]
    return [MaterializeResult(metadata=shown, data_version=DataVersion(version))]


def _pack(run_context: RunContext, call: Call, _: AssetKeys) -> metadata.Metadata:
    from caf_pipeline.steps import chunk_steps

    call(chunk_steps.load_batch)
    call(chunk_steps.pack_chunk)
    report = call(chunk_steps.seal_chunk)
    recipients = run_context.ledger.chunks.recipients(report.chunk.name)
    return metadata.seal_metadata(report, recipients)


def _store(run_context: RunContext, call: Call, _: AssetKeys) -> metadata.Metadata:
    from caf_pipeline.steps import chunk_steps

    call(chunk_steps.post_file)
    upload = call(chunk_steps.upload_chunk)
    report = call(chunk_steps.verify_stored)
    urls: Mapping[str, str] = {}
    with suppress(CafError):  # the chunk is verified, and the link is only for people
        urls = run_context.store.urls(posting_of(report.chunk))
    recipients = run_context.ledger.chunks.recipients(report.chunk.name)
    return metadata.verify_metadata(report, upload, recipients, urls)


def _locate(run_context: RunContext, call: Call, keys: AssetKeys) -> metadata.Metadata:
    from caf_pipeline.steps import chunk_steps

    located = call(chunk_steps.load_locations)
    with suppress(HeldByOther):  # the other run releases it
        located = call(chunk_steps.release_staging)
    chunks = run_context.ledger.chunks
    source = run_context.source
    recipients, account = chunks.recipients(located.name), chunks.account(source)
    return metadata.locations_metadata(located, recipients, account) | metadata.locations_lineage(
        keys.key(source, "chunk_plan")
    )
