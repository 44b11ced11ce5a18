"""Checks: what the UI reports of the promises. They report; `verify_stored` and the ledger's guarded moves enforce.

A blocking check that fails ends the run before the next asset.
"""

import warnings
from collections.abc import Callable
from datetime import UTC, datetime

from dagster import (
    AssetCheckExecutionContext,
    AssetCheckResult,
    AssetChecksDefinition,
    AssetCheckSeverity,
    AssetKey,
    PreviewWarning,
    asset_check,
)

from caf_pipeline import wiring
from caf_pipeline.chunk_state import IN_GOOD_STANDING, UNDER_WAY, ChunkState
from caf_pipeline.context import Workplace
from caf_pipeline.defs import metadata
from caf_pipeline.defs.failures import RETRY_TRANSIENT, as_failure
from caf_pipeline.defs.naming import CHUNK_IS_PROVEN, SOURCE_IS_COMPLETE, STORAGE_PLAN_LASTS, asset_key, prove_job, repair_job
from caf_pipeline.defs.partitions import chunk_partitions
from caf_pipeline.defs.resources import EVERY_STEP, attempt_step
from caf_pipeline.errors import HeldByOther
from caf_pipeline.maintenance import scrub
from caf_pipeline.steps import audit, planning
from caf_pipeline.store.jackal.storage_forecast import charged_per_day, look_ahead


def source_checks(source: str, *, on_jackal: bool) -> list[AssetChecksDefinition]:
    """Return the checks of one source, in flow order."""
    with warnings.catch_warnings():
        # Partitioned checks are a preview in 1.13.27. They do what is asked of them here, which the tests hold; users of
        # this package can do nothing about the warning.
        warnings.filterwarnings("ignore", message="Specifying a partitions_def on an AssetCheckSpec", category=PreviewWarning)
        checks = [
            _plan_accounts(source),
            _chunk_accounts(source),
            _chunk_is_proven(source),
            _chunk_reads_back(source),
            _source_is_complete(source),
        ]
        return [*checks, _storage_plan_lasts(source)] if on_jackal else checks


def _result(context: AssetCheckExecutionContext, source: str, check: Callable[[Workplace], AssetCheckResult]) -> AssetCheckResult:
    result = attempt_step(context, source, check)
    if result is None:
        skipped = f"a check of '{source}' was skipped: another run holds the lease that it needs"
        raise as_failure(HeldByOther(skipped, holder="another run"))
    return result


def _plan_accounts(source: str) -> AssetChecksDefinition:
    @asset_check(
        asset=AssetKey(asset_key(source, "chunk_plan")),
        name="plan_accounts_for_inventory",
        description="Every object of the inventory is located, claimed by a chunk or skipped with a reason; none twice.",
        blocking=True,
        retry_policy=RETRY_TRANSIENT,
        required_resource_keys=EVERY_STEP,
    )
    def check(context: AssetCheckExecutionContext) -> AssetCheckResult:
        def account(work: Workplace) -> AssetCheckResult:
            result = planning.account_for(work, planning.snapshot_to_plan(work))
            return AssetCheckResult(passed=result.holds, metadata=metadata.accounting_metadata(result))

        return _result(context, source, account)

    return check


def _chunk_accounts(source: str) -> AssetChecksDefinition:
    @asset_check(
        asset=AssetKey(asset_key(source, "caf_chunk")),
        name="chunk_accounts_for_plan",
        description="Members, skips and objects given back to be planned again add up to the chunk's part of the plan.",
        partitions_def=chunk_partitions(source),
        blocking=True,
        retry_policy=RETRY_TRANSIENT,
        required_resource_keys=EVERY_STEP,
    )
    def check(context: AssetCheckExecutionContext) -> AssetCheckResult:
        def account(work: Workplace) -> AssetCheckResult:
            result = audit.account_for_chunk(work, context.op_execution_context.partition_key)
            numbers: metadata.Metadata = {
                "planned": result.planned,
                "members": result.members,
                "skipped": result.skipped,
                "released": result.released,
            }
            return AssetCheckResult(passed=result.agrees, description=result.explanation or None, metadata=numbers)

        return _result(context, source, account)

    return check


def _chunk_is_proven(source: str) -> AssetChecksDefinition:
    @asset_check(
        asset=AssetKey(asset_key(source, "jackal_chunk")),
        name=CHUNK_IS_PROVEN,
        description=(
            "The chain shows a verified proof of the asked number of copies, and pieces read back from each are right. Looked at "
            f"again and again by the job `{prove_job(source)}`; a chunk that fails is marked as `damaged`, and "
            f"`{repair_job(source)}` or `caf jackal repair` mends it. A warning, `unverified`, where the copies are right and "
            "what the chain shows may be of a provider's joining alone: the next proof window may tell more."
        ),
        partitions_def=chunk_partitions(source),
        retry_policy=RETRY_TRANSIENT,
        required_resource_keys=EVERY_STEP,
    )
    def check(context: AssetCheckExecutionContext) -> AssetCheckResult:
        def prove(work: Workplace) -> AssetCheckResult:
            report = scrub.prove_chunk(work, context.op_execution_context.partition_key)
            shown = metadata.proof_metadata(report)
            return AssetCheckResult(
                passed=report.proven,
                severity=proof_severity(report),
                description=proof_description(report) or None,
                metadata=shown,
            )

        return _result(context, source, prove)

    return check


def proof_severity(report: scrub.ProofReport) -> AssetCheckSeverity:
    """Return how bad it is that a chunk is not proven: what is unverified is no damage."""
    return AssetCheckSeverity.ERROR if report.explanation else AssetCheckSeverity.WARN


def proof_description(report: scrub.ProofReport) -> str:
    """Say why a chunk is not proven; "" where it is."""
    return report.explanation or (f"unverified: {report.unverified}" if report.unverified else "")


def _storage_plan_lasts(source: str) -> AssetChecksDefinition:
    @asset_check(
        asset=AssetKey(asset_key(source, "chunk_plan")),
        name=STORAGE_PLAN_LASTS,
        description=(
            "The space that was bought on Jackal neither ends nor fills within `jackal.warn_days`, at the rate of the last week, "
            "and has room for what is planned. All sources share it. `caf jackal buy` buys more."
        ),
        retry_policy=RETRY_TRANSIENT,
        required_resource_keys=EVERY_STEP,
    )
    def check(context: AssetCheckExecutionContext) -> AssetCheckResult:
        return _result(context, source, _storage_plan_result)

    return check


def _storage_plan_result(work: Workplace) -> AssetCheckResult:
    store, warn = wiring.jackal_of(work), AssetCheckSeverity.WARN
    plan, now = store.chain.plan(store.wallet.address), datetime.now(UTC)
    if plan is None:
        return AssetCheckResult(passed=False, severity=warn, description="No space was bought yet: caf jackal buy.")
    copies = work.settings.jackal.copies
    rate = charged_per_day(work.ledger.chunks(states=IN_GOOD_STANDING), copies, now)
    unposted = work.ledger.chunks(states=UNDER_WAY[: UNDER_WAY.index(ChunkState.POSTED)])
    waiting = copies * sum(chunk.stored_size_bytes or chunk.expected_size_bytes for chunk in unposted)
    forecast = look_ahead(plan, rate, now)
    warning = forecast.warning(plan, work.settings.jackal.warn_days, waiting)
    return AssetCheckResult(
        passed=not warning,
        severity=warn,
        description=warning or None,
        metadata=metadata.forecast_metadata(plan, forecast, waiting),
    )


def _chunk_reads_back(source: str) -> AssetChecksDefinition:
    @asset_check(
        asset=AssetKey(asset_key(source, "file_locations")),
        name="chunk_reads_back",
        description="Some of the chunk's objects, fetched the way an application does, have the SHA-256 of their rows.",
        partitions_def=chunk_partitions(source),
        retry_policy=RETRY_TRANSIENT,
        required_resource_keys=EVERY_STEP,
    )
    def check(context: AssetCheckExecutionContext) -> AssetCheckResult:
        def read(work: Workplace) -> AssetCheckResult:
            result = audit.fetch_members(work, context.op_execution_context.partition_key)
            return AssetCheckResult(passed=not result.mismatched, metadata=metadata.read_back_metadata(result))

        return _result(context, source, read)

    return check


def _source_is_complete(source: str) -> AssetChecksDefinition:
    @asset_check(
        asset=AssetKey(asset_key(source, "s3_inventory")),
        name=SOURCE_IS_COMPLETE,
        description=(
            "Every object of the latest whole inventory is located. A warning until it is: chunks are under way, or objects "
            "were skipped, by the reasons shown. Only a complete source may be deleted from S3."
        ),
        additional_deps=[AssetKey(asset_key(source, "chunk_plan"))],
        retry_policy=RETRY_TRANSIENT,
        required_resource_keys=EVERY_STEP,
    )
    def check(context: AssetCheckExecutionContext) -> AssetCheckResult:
        def account(work: Workplace) -> AssetCheckResult:
            snapshot = planning.latest_snapshot(work, complete=True)
            if snapshot is None:
                return AssetCheckResult(passed=False, severity=AssetCheckSeverity.WARN, description="No whole inventory yet.")
            result = planning.account_for(work, snapshot)
            return AssetCheckResult(
                passed=result.located == result.objects,
                severity=AssetCheckSeverity.WARN,
                metadata={metadata.SNAPSHOT: snapshot.name, **metadata.accounting_metadata(result)},
            )

        return _result(context, source, account)

    return check
