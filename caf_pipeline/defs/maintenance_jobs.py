"""Jobs that prove and repair stored chunks, and the job that prunes events.

Dagster (1.13.27) stores a check result for any partition that an op names, even in an unpartitioned
job.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Final

from dagster import (
    AssetCheckEvaluation,
    AssetCheckResult,
    AssetCheckSeverity,
    Config,
    GraphDefinition,
    JobDefinition,
    MetadataValue,
    Nothing,
    OpDefinition,
    OpExecutionContext,
    Out,
    Output,
    PartitionsDefinition,
    in_process_executor,
    op,
)
from pydantic import Field

from caf_pipeline.automation.alerting import EVALUATED
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.defs import metadata
from caf_pipeline.defs.asset_checks import (
    look_at_completeness,
    look_at_space,
    proof_description,
    proof_severity,
)
from caf_pipeline.defs.evaluations import evaluation_of, evaluation_target, partition_evaluation
from caf_pipeline.defs.failures import RETRY_TRANSIENT, as_failure
from caf_pipeline.defs.partitions import chunk_partitions
from caf_pipeline.defs.resources import EVERY_STEP, attempt_step
from caf_pipeline.errors import HITS_EVERY_CHUNK, CafError, HeldByOther, UsageError, with_hint
from caf_pipeline.naming import (
    BEFORE_BACKFILLS,
    CHUNK_IS_PROVEN,
    LOOK_JOB,
    PRUNE_JOB,
    SOURCE_IS_COMPLETE,
    SOURCE_TAG,
    STORAGE_PLAN_LASTS,
    UPLOAD_POOL,
    JobKind,
    job_name,
    op_name,
    s3_key,
)
from caf_pipeline.run_context import RunContext

if TYPE_CHECKING:
    from caf_pipeline.maintenance.repair import RepairReport

Reports = Iterator[AssetCheckEvaluation | Output[None]]


COMPLETENESS_SECONDS: Final = 20 * 3600
"""A look counts the whole inventory. Less than a day, since looks do not begin to the second."""


class RepairConfig(Config):
    """Options of a repair run."""

    limit: int = Field(
        default=10,
        description="Maximum number of chunks to repair, at least 1. Each repair is an upload.",
    )


def source_maintenance_jobs(source: str) -> list[JobDefinition]:
    """Return the jobs of one source."""

    def job(
        what: JobKind,
        op: OpDefinition,
        description: str,
        partitions: PartitionsDefinition | None = None,
    ) -> JobDefinition:
        graph = GraphDefinition(name=job_name(source, what), node_defs=[op])
        return graph.to_job(
            tags={SOURCE_TAG: source, **BEFORE_BACKFILLS},
            description=description,
            partitions_def=partitions,
            executor_def=in_process_executor,
        )

    return [
        job(
            "prove",
            _prove_op(source),
            "Check stored chunks again: the store's proofs, and samples read back from each copy. "
            "Chunks that look wrong in the store's listings come first, then those checked longest "
            f"ago. The job {LOOK_JOB} does the same on Jackal. The check {CHUNK_IS_PROVEN} of each "
            "partition shows the results.",
        ),
        job(
            "repair",
            _repair_op(source),
            "Store damaged chunks again: from staging, from another provider, or packed again from "
            "S3. A run repairs at most 'limit' chunks; the next run continues.",
        ),
        job(
            "repair_chunk",
            _repair_chunk_op(source),
            "Repair one chunk (a partition): store its missing copies again.",
            chunk_partitions(source),
        ),
    ]


def look_job(sources: Sequence[str], *, has_wallet: bool) -> JobDefinition:
    """Return the job that looks at what all sources have stored."""
    ops = [_completeness_op(source) for source in sources]
    if has_wallet:
        ops += [look(source) for source in sources for look in (_prove_op, _space_op)]
    also = ", proofs and samples of stored chunks, and the bought space" if has_wallet else ""
    return GraphDefinition(name=LOOK_JOB, node_defs=ops).to_job(
        tags=BEFORE_BACKFILLS,
        description=f"Check for all sources, once a day, whether every object is located{also}. "
        "The results are checks of the assets. Nothing is planned, archived or paid.",
        executor_def=in_process_executor,
    )


def _completeness_op(source: str) -> OpDefinition:
    return _check_op(
        source,
        "look_at_completeness",
        "Check whether all objects of the latest whole inventory are located, if no run checked it "
        "today.",
        ("s3_inventory", SOURCE_IS_COMPLETE),
        look_at_completeness,
        at_most_every=COMPLETENESS_SECONDS,
    )


def _space_op(source: str) -> OpDefinition:
    return _check_op(
        source,
        "look_at_space",
        "Check whether the bought space expires or fills up within jackal.warn_days.",
        ("chunk_plan", STORAGE_PLAN_LASTS),
        look_at_space,
    )


def _check_op(
    source: str,
    name: str,
    description: str,
    check: tuple[str, str],
    look: Callable[[RunContext], AssetCheckResult],
    *,
    at_most_every: float = 0,
) -> OpDefinition:
    # `check` is the asset and the name of the check that shows the result.
    @_op(source, name, description)
    def look_at_source(context: OpExecutionContext) -> Reports:
        key = context.resources.caf_run.asset_keys.check_key(source, *check)
        # A failed run may have planned the check and never evaluated it.
        history = context.instance.event_log_storage.get_asset_check_execution_history(
            key, limit=1, status=EVALUATED
        )
        if history and time.time() - history[0].create_timestamp < at_most_every:
            yield Output(None)
            return
        result = attempt_step(context, source, look)
        if result is not None:
            latest = context.instance.fetch_materializations(key.asset_key, limit=1).records
            yield evaluation_of(result, key, evaluation_target(latest[0]) if latest else None)
            yield Output(None)

    return look_at_source


def _op(
    source: str, name: str, description: str, *, repairs: bool = False
) -> Callable[[Callable[..., Reports]], OpDefinition]:
    return op(
        name=op_name(source, name),
        description=description,
        out=Out(Nothing, is_required=False),
        retry_policy=RETRY_TRANSIENT,
        required_resource_keys=EVERY_STEP | {s3_key(source)} if repairs else EVERY_STEP,
        pool=UPLOAD_POOL if repairs else None,
    )


@cache  # two jobs have it
def _prove_op(source: str) -> OpDefinition:
    @_op(
        source,
        "prove_chunks",
        "Prove some located chunks, oldest first, and remove files from staging that no run needs.",
    )
    def prove_chunks(context: OpExecutionContext) -> Reports:
        from caf_pipeline.maintenance import scrub
        from caf_pipeline.packing import staging

        def begin(run_context: RunContext) -> RunContext | None:
            if reason := run_context.ledger.controls.current().paused:
                context.log.info(f"paused: {reason}")
                return None
            list(staging.sweep(run_context))
            return run_context

        run_context = attempt_step(context, source, begin)
        if run_context is None:
            return
        listing = attempt_step(context, source, partial(_read_chain_listing, context))
        reports = iter(
            scrub.prove_oldest(
                run_context,
                run_context.settings.jackal.prove_per_run,
                whole_bytes=scrub.READ_WHOLE_BYTES,
            )
        )
        chunks: dict[str, list[str]] = {
            "damaged": [],
            "unanswered": [],
            "unread": [],
            "unverified": [],
            "proven": [],
        }
        while (report := attempt_step(context, source, lambda _: next(reports, None))) is not None:
            chunks[report.verdict].append(report.chunk.name)
            yield _evaluation(
                context,
                report.chunk.name,
                source,
                passed=report.is_right,
                description=proof_description(report),
                shown=metadata.proof_metadata(report),
                severity=proof_severity(report),
            )
        numbers = {"looked_at": sum(map(len, chunks.values()))} | {
            kind: len(names) for kind, names in chunks.items() if kind != "proven"
        }
        names = {
            "chunks": _names(chunks["damaged"]),
            "unanswered_chunks": _names(chunks["unanswered"]),
            "unread_chunks": _names(chunks["unread"]),
            "unverified_chunks": _names(chunks["unverified"]),
        }
        yield Output(None, metadata={**numbers, **names, **(listing or {})})

    return prove_chunks


def _read_chain_listing(context: OpExecutionContext, run_context: RunContext) -> metadata.Metadata:
    from caf_pipeline.maintenance import chain_listing

    report = chain_listing.check_chain_listing(run_context)  # None if it is not due
    whole_at, suspected = run_context.ledger.chain_listings.suspicions(
        run_context.store.name, run_context.source
    )
    shown: metadata.Metadata = {"suspected": suspected}
    if whole_at is not None:
        shown["last_whole_bulk_look"] = MetadataValue.timestamp(whole_at)
    if report is not None:
        (context.log.warning if report.trouble else context.log.info)(report.described())
        shown |= {
            "bulk_look": report.described(),
            "listed_in_bulk": report.listed,
            "copies_in_bulk": report.copies,
        }
    return shown


def _repair_op(source: str) -> OpDefinition:
    @_op(
        source,
        "repair_chunks",
        "Repair damaged chunks, starting with the chunk that was found damaged first.",
        repairs=True,
    )
    def repair_chunks(context: OpExecutionContext, config: RepairConfig) -> Reports:
        if config.limit < 1:  # checked here, since pydantic's message is hard to read in the UI
            raise as_failure(UsageError(f"'limit' is {config.limit}, but must be at least 1"))
        run_context = attempt_step(context, source, lambda run_context: run_context)
        if run_context is None:
            return
        damaged = sorted(
            run_context.ledger.chunks.list(source, [ChunkState.DAMAGED]),
            key=lambda chunk: chunk.updated_at,
        )
        failed, repaired = list[CafError](), 0
        for chunk in damaged[: config.limit]:
            outcome = attempt_step(context, source, partial(_repair, name=chunk.name))
            if isinstance(outcome, HeldByOther):
                context.log.info(str(outcome))
            elif isinstance(outcome, CafError):
                context.log.error(with_hint(outcome))
                failed.append(outcome)
            elif outcome is not None:
                repaired += outcome.chunk.state is ChunkState.LOCATED
                yield _repaired(context, source, outcome)
        if failed:
            raise as_failure(failed[0])
        yield Output(None, metadata={"repaired": repaired, "left": len(damaged) - repaired})

    return repair_chunks


def _repair(run_context: RunContext, name: str) -> "RepairReport | CafError":
    # Returns an error that concerns this chunk alone, and raises an error that would hit the next
    # chunk, too.
    from caf_pipeline.maintenance import repair

    try:
        return repair.repair_chunk(run_context, name)
    except HITS_EVERY_CHUNK:
        raise
    except CafError as error:
        if not repair.concerns_one_chunk(error):
            raise
        return error


def _repair_chunk_op(source: str) -> OpDefinition:
    @_op(source, "repair_chunk", "Repair the chunk of this partition.", repairs=True)
    def repair_chunk(context: OpExecutionContext) -> Reports:
        from caf_pipeline.maintenance import repair

        report = attempt_step(
            context,
            source,
            lambda run_context: repair.repair_chunk(run_context, context.partition_key),
        )
        if report is not None:
            yield _repaired(context, source, report)
            yield Output(None, metadata=metadata.repair_metadata(report))

    return repair_chunk


def _repaired(
    context: OpExecutionContext, source: str, report: "RepairReport"
) -> AssetCheckEvaluation:
    return _evaluation(
        context,
        report.chunk.name,
        source,
        passed=report.chunk.state is ChunkState.LOCATED,
        description="" if report.origin == "none needed" else f"repaired from {report.origin}",
        shown=metadata.repair_metadata(report),
    )


def _evaluation(
    context: OpExecutionContext,
    chunk: str,
    source: str,
    *,
    passed: bool,
    description: str,
    shown: metadata.Metadata,
    severity: AssetCheckSeverity = AssetCheckSeverity.ERROR,
) -> AssetCheckEvaluation:
    result = AssetCheckResult(
        passed=passed, description=description or None, metadata=shown, severity=severity
    )
    key = context.resources.caf_run.asset_keys.check_key(source, "stored_chunk", CHUNK_IS_PROVEN)
    return partition_evaluation(context.instance, key, chunk, result)


def _names(chunks: Sequence[str]) -> str:
    return ", ".join(chunks[: metadata.MAX_ROWS]) or "none"


def prune_job(days: int, sources: Sequence[str]) -> JobDefinition:
    """Return the job that keeps events of `days` days (0: all)."""

    @op(name="caf_remove_old_events", out=Out(Nothing))
    def remove_old_events(context: OpExecutionContext) -> Output[None]:
        from caf_pipeline.automation import pruning

        if not days:
            context.log.info("runs.keep_events_days is 0: nothing is removed")
            return Output(None)
        runs, events = pruning.prune(
            context.instance, datetime.now(UTC) - timedelta(days=days), sources
        )
        return Output(None, metadata={"runs": runs, "events": events})

    return GraphDefinition(name=PRUNE_JOB, node_defs=[remove_old_events]).to_job(
        tags=BEFORE_BACKFILLS,
        executor_def=in_process_executor,
        description="Remove events and output of old runs from Dagster's storage. Runs, "
        "partitions, materializations, checks and failures stay. runs.keep_events_days sets the "
        "age; if it is 0, nothing is removed.",
    )
