"""Asset checks. They only report; `verify_stored` and the ledger's guarded moves enforce."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from dagster import (
    AssetCheckExecutionContext,
    AssetCheckResult,
    AssetChecksDefinition,
    AssetCheckSeverity,
    AssetCheckSpec,
    MetadataValue,
    PreviewWarning,
    multi_asset_check,
)

from caf_pipeline import wiring
from caf_pipeline.asset_keys import AssetKeys
from caf_pipeline.chunk_state import IN_GOOD_STANDING, NOT_POSTED, ChunkState
from caf_pipeline.defs import metadata
from caf_pipeline.defs.evaluations import CHECKS, check_result
from caf_pipeline.defs.failures import RETRY_TRANSIENT, Context, as_failure
from caf_pipeline.defs.partitions import chunk_partitions
from caf_pipeline.defs.resources import EVERY_STEP, attempt_step
from caf_pipeline.errors import HeldByOther, StoreAway, StoreUnreachable
from caf_pipeline.naming import (
    ALERT_SENSOR,
    CHECKED_ASSET,
    CHUNK_ACCOUNTS,
    CHUNK_IS_PROVEN,
    CHUNK_READS_BACK,
    FEW_OBJECTS_ARE_SKIPPED,
    LOOK_JOB,
    NO_CHUNK_IS_DAMAGED,
    NO_CHUNK_IS_PARKED,
    PLAN_ACCOUNTS,
    SOURCE_IS_COMPLETE,
    SOURCE_KEEPS_UP,
    STORAGE_PLAN_LASTS,
    asset_key,
    job_name,
    op_name,
)
from caf_pipeline.run_context import RunContext
from caf_pipeline.store.jackal.storage_forecast import (
    charged_per_day,
    end_warning,
    forecast_storage,
    plan_of,
    space_warning,
    to_buy,
)
from caf_pipeline.system.quantities import counted, show_time

if TYPE_CHECKING:
    from caf_pipeline.inventory.accounting import Accounting
    from caf_pipeline.inventory.snapshot import Snapshot
    from caf_pipeline.maintenance.scrub import ProofReport

CheckFunction = Callable[[RunContext], AssetCheckResult]

Count = Callable[[RunContext, "Snapshot"], "Accounting"]

CONDITION_DESCRIPTIONS: Final = {
    NO_CHUNK_IS_DAMAGED: (
        "No chunk is marked as damaged. As long as a damaged chunk has intact copies, its "
        f"objects are read from them. The sensor {ALERT_SENSOR} sends an alert."
    ),
    NO_CHUNK_IS_PARKED: (
        "No chunk failed so often that it waits for an operator. The sensor "
        f"{ALERT_SENSOR} checks this every five minutes and sends alerts, also for "
        f"{SOURCE_KEEPS_UP} and {FEW_OBJECTS_ARE_SKIPPED}."
    ),
    SOURCE_KEEPS_UP: (
        "Chunks under way make progress (alerts.stalled_after). No chunk has waited longer than "
        "max_wait and alerts.late_after since it was planned. The last whole inventory is not "
        "older than alerts.late_after; on Jackal, the same holds for the last check of a stored "
        "chunk. Warns if the source is late, and fails if nothing moves."
    ),
    FEW_OBJECTS_ARE_SKIPPED: (
        "At most alerts.skipped_share of the source's objects are skipped. Warns otherwise."
    ),
}


@dataclass(frozen=True)
class ChunkCheck:
    """The check of one of a chunk's assets, which the asset's op evaluates.

    If `later`, a run of the asset does not evaluate it.
    """

    asset: str
    name: str
    function: Callable[[RunContext, str], AssetCheckResult]
    description: str
    blocking: bool = False
    later: bool = False

    def spec(self, source: str) -> AssetCheckSpec:
        with warnings.catch_warnings():
            # Partitioned checks are a preview feature of Dagster 1.13.27. Tests cover what is used
            # here, and users of this package cannot act on the warning.
            warnings.simplefilter("ignore", PreviewWarning)
            return AssetCheckSpec(
                self.name,
                asset=asset_key(source, self.asset),
                description=self.description,
                partitions_def=chunk_partitions(source),
                blocking=self.blocking,
            )


def chunk_checks(source: str, *, on_jackal: bool) -> tuple[ChunkCheck, ChunkCheck, ChunkCheck]:
    """Return the checks of a chunk's assets, in flow order."""
    proven, unverified = (
        "The store's folder has the chunk, and samples read back from it are correct.",
        "",
    )
    if on_jackal:
        proven = (
            "The chain shows a verified proof for each required copy, and samples read back from "
            "each copy are correct."
        )
        unverified = (
            " Warns with 'unverified' if the samples are correct but the chain shows no verified "
            "proof: its entry may only record that the provider joined. The next proof window may "
            "bring one. The chain proves no chunk of up to 20,480 bytes: it passes if each copy, "
            "read whole, is correct."
        )
    return (
        ChunkCheck(
            "caf_chunk",
            CHUNK_ACCOUNTS,
            _chunk_accounts,
            "Members, skipped objects and objects released for a later plan add up to the chunk's "
            "part of the plan. Members are those of the manifest, or the ledger's rows if the "
            "chunk is encrypted.",
            blocking=True,
        ),
        ChunkCheck(
            "stored_chunk",
            CHUNK_IS_PROVEN,
            _chunk_is_proven,
            f"{proven} A run of the asset does not evaluate it. The job "
            f"{job_name(source, 'prove')} does, and with a wallet {LOOK_JOB} every hour. A chunk "
            "that fails is marked as damaged; "
            f"{job_name(source, 'repair')} or 'caf repair' repairs it.{unverified}",
            later=True,
        ),
        ChunkCheck(
            "file_locations",
            CHUNK_READS_BACK,
            _chunk_reads_back,
            "Some of the chunk's objects, read the way an application reads them, have the SHA-256 "
            "of their location rows. Without an identity, objects of an encrypted chunk cannot be "
            "read, and the check says that it was not run.",
        ),
    )


def source_checks(source: str, keys: AssetKeys, *, on_jackal: bool) -> list[AssetChecksDefinition]:
    """Return a source's checks that have ops of their own, in flow order."""
    checks = [
        _inventory_checks(
            source,
            AssetCheckSpec(
                PLAN_ACCOUNTS,
                asset=keys.key(source, "chunk_plan"),
                description="Every object of the last planned inventory is located, claimed by "
                "a chunk, left out by a filter, or skipped with a reason. No object is counted "
                "twice.",
                blocking=True,
            ),
            AssetCheckSpec(
                SOURCE_IS_COMPLETE,
                asset=keys.key(source, "s3_inventory"),
                description="Every object of the latest whole inventory is located, except "
                "those that the source's filters leave out. Their number is shown, and the "
                "number of older versions, which count as objects only with versions = "
                '"all". Warns while chunks are under way or damaged, objects are skipped (the '
                "reasons are shown), or the store's folder is missing. Delete only located "
                "objects from S3.",
                additional_deps=[keys.key(source, "chunk_plan")],
            ),
        ),
        *(
            _check(source, keys, name, partial(_conditions, name), CONDITION_DESCRIPTIONS[name])
            for name in CHECKS
        ),
    ]
    if on_jackal:
        checks.append(
            _check(
                source,
                keys,
                STORAGE_PLAN_LASTS,
                look_at_space,
                "The space bought on Jackal has room for all planned chunks. At the rate of "
                "the last week, it neither expires nor fills up soon, by jackal.warn_days. All "
                "sources share this space; 'caf jackal buy' buys more.",
            )
        )
    return checks


def _check(
    source: str, keys: AssetKeys, name: str, function: CheckFunction, description: str
) -> AssetChecksDefinition:
    key = keys.key(source, CHECKED_ASSET)

    # `multi_asset_check` allows a name for the op. `asset_check` names it after the asset's key.
    @multi_asset_check(
        name=op_name(source, name),
        specs=[AssetCheckSpec(name, asset=key, description=description)],
        retry_policy=RETRY_TRANSIENT,
        required_resource_keys=EVERY_STEP,
    )
    def check(context: AssetCheckExecutionContext) -> Iterator[AssetCheckResult]:
        yield evaluate(context, source, name, function)

    return check


def _inventory_checks(
    source: str, accounts: AssetCheckSpec, complete: AssetCheckSpec
) -> AssetChecksDefinition:
    """Return both checks as one op: the run of a plan counts its inventory once for both."""

    @multi_asset_check(
        name=op_name(source, "caf_count_inventory"),
        specs=[accounts, complete],
        can_subset=True,
        retry_policy=RETRY_TRANSIENT,
        required_resource_keys=EVERY_STEP,
    )
    def check(context: AssetCheckExecutionContext) -> Iterator[AssetCheckResult]:
        counts: dict[str, Accounting] = {}

        def count(run_context: RunContext, snapshot: "Snapshot") -> "Accounting":
            from caf_pipeline.steps import planning

            if snapshot.name not in counts:
                counts[snapshot.name] = planning.account_for(run_context, snapshot)
            return counts[snapshot.name]

        for spec, function in ((accounts, _plan_accounts), (complete, _source_is_complete)):
            if spec.key in context.selected_asset_check_keys:
                result = evaluate(context, source, spec.name, partial(function, count=count))
                yield result._replace(asset_key=spec.asset_key, check_name=spec.name)

    return check


def evaluate(
    context: Context, source: str, name: str, function: Callable[[RunContext], AssetCheckResult]
) -> AssetCheckResult:
    """Return the result of a check. Raises Failure if it could not be evaluated."""
    result = attempt_step(context, source, function)
    if result is None:
        raise as_failure(
            HeldByOther(
                f"the check '{name}' of '{source}' was skipped: another run holds its lease",
                holder="another run",
            )
        )
    return result


def _warning(description: str) -> AssetCheckResult:
    return AssetCheckResult(passed=False, severity=AssetCheckSeverity.WARN, description=description)


def _plan_accounts(run_context: RunContext, count: Count) -> AssetCheckResult:
    from caf_pipeline.steps import inventories

    snapshot = inventories.latest_snapshot(
        run_context, run=run_context.holder.run, skip_damaged=True, planned=True
    )
    snapshot = snapshot or inventories.latest_snapshot(run_context, planned=True)
    if snapshot is None:
        inventories.snapshot_to_plan(run_context)  # raises if there is no inventory at all
        return _warning("No inventory is planned yet: materialize chunk_plan.")
    result = count(run_context, snapshot)
    shown = metadata.versions_beside(snapshot) | metadata.accounting_metadata(result)
    return AssetCheckResult(passed=result.holds, metadata=shown)


def _chunk_accounts(run_context: RunContext, chunk: str) -> AssetCheckResult:
    from caf_pipeline.steps import audit

    result = audit.account_for_chunk(run_context, chunk)
    numbers: metadata.Metadata = {
        "planned": result.planned,
        "members": result.members,
        "skipped": result.skipped,
        "released": result.released,
    }
    return AssetCheckResult(
        passed=result.agrees, description=result.explanation or None, metadata=numbers
    )


def _chunk_is_proven(run_context: RunContext, chunk: str) -> AssetCheckResult:
    from caf_pipeline.maintenance import scrub

    state = run_context.ledger.chunks.get(chunk).state
    if state in (ChunkState.EMPTY, ChunkState.WITHDRAWN):
        return AssetCheckResult(
            passed=True, description=f"The chunk is {state}: no object is located in it."
        )
    report = scrub.prove_chunk(run_context, chunk)
    return AssetCheckResult(
        passed=report.is_right,
        severity=proof_severity(report),
        description=proof_description(report) or None,
        metadata=metadata.proof_metadata(report),
    )


def proof_severity(report: "ProofReport") -> AssetCheckSeverity:
    """Return an unproven chunk's severity: an error only if damaged."""
    return AssetCheckSeverity.ERROR if report.explanation else AssetCheckSeverity.WARN


def proof_description(report: "ProofReport") -> str:
    """Return why a chunk is not proven, or ""."""
    reason = report.reason
    return metadata.shorten_hashes(
        reason if not reason or report.explanation else f"{report.verdict}: {reason}"
    )


def _chunk_reads_back(run_context: RunContext, chunk: str) -> AssetCheckResult:
    from caf_pipeline.steps import audit

    result = audit.fetch_members(run_context, chunk)
    if result.not_run:
        return AssetCheckResult(
            passed=True,
            severity=AssetCheckSeverity.WARN,
            description=f"Not run: {result.not_run}. No object was compared.",
        )
    return AssetCheckResult(
        passed=not result.mismatched, metadata=metadata.read_back_metadata(result)
    )


def look_at_completeness(run_context: RunContext) -> AssetCheckResult:
    """Check whether all objects of the latest whole inventory are located."""
    from caf_pipeline.steps import planning

    return _source_is_complete(run_context, planning.account_for)


def _source_is_complete(run_context: RunContext, count: Count) -> AssetCheckResult:
    from caf_pipeline.steps import inventories

    snapshot = inventories.latest_snapshot(run_context, complete=True)
    planned = run_context.ledger.content.last_inventory(run_context.source)
    if planned and (snapshot is None or snapshot.taken_at < planned):
        return _warning(
            f"The last whole inventory, of {show_time(planned)}, is not on this machine."
        )
    if snapshot is None:
        return _warning("There is no whole inventory yet.")
    result = count(run_context, snapshot)
    left_out = sum(result.left_out.values())
    older = 0 if snapshot.all_versions else snapshot.beside.older
    only_current = run_context.all_versions and not snapshot.all_versions
    damaged = len(run_context.ledger.chunks.list(run_context.source, [ChunkState.DAMAGED]))
    away = ""
    try:
        run_context.store.require_here()
    except StoreAway as error:
        away = f"{error}."
    notes = [
        (away, away),
        (
            damaged,
            f"{counted(damaged, 'chunk')} damaged: their objects may be unreadable until a repair.",
        ),
        (left_out, f"The source's filters leave out {counted(left_out, 'object')}."),
        (
            only_current,
            "The latest whole inventory has only current versions, but the setting 'versions' is "
            "'all'.",
        ),
        (
            older and not only_current,
            f"The setting 'versions' leaves out {counted(older, 'older version')}.",
        ),
    ]
    return AssetCheckResult(
        passed=result.located + left_out == result.objects
        and not only_current
        and not damaged
        and not away,
        severity=AssetCheckSeverity.WARN,
        description=" ".join(note for applies, note in notes if applies) or None,
        metadata={
            metadata.SNAPSHOT: snapshot.name,
            **metadata.versions_beside(snapshot),
            **metadata.accounting_metadata(result),
        },
    )


def _conditions(check: str, run_context: RunContext) -> AssetCheckResult:
    from caf_pipeline.automation.alerting import conditions_of, is_paused

    conditions = conditions_of(
        run_context.ledger.progress.of([run_context.source]),
        run_context.settings,
        paused=is_paused(run_context.ledger),
    )
    return check_result(conditions[run_context.source], check)


def _last_known_end(
    run_context: RunContext, account: str, error: StoreUnreachable
) -> AssetCheckResult | None:
    last = run_context.ledger.storage_plans.last(account)
    if last is None:
        return None
    now = max(last.read_at, datetime.now(UTC))
    warning = space_warning(last, now, run_context.settings.jackal.warn_days)
    if not warning:
        return None
    return AssetCheckResult(
        passed=False,
        severity=AssetCheckSeverity.ERROR,
        description=f"{warning}. This was read at {last.read_at:%Y-%m-%d %H:%M} UTC; the chain "
        f"cannot be read now ({error}).",
    )


def look_at_space(run_context: RunContext) -> AssetCheckResult:
    """Check how long the bought space lasts."""
    from caf_pipeline.steps import chunk_steps

    store = wiring.jackal_of(run_context)
    try:
        reading = wiring.read_space(run_context.ledger, store)
    except StoreUnreachable as error:
        if result := _last_known_end(run_context, store.poster.account, error):
            return result
        raise
    plan, now, address = plan_of(reading), reading.read_at, store.wallet.address
    copies, warn_days = run_context.settings.jackal.copies, run_context.settings.jackal.warn_days
    waiting = copies * chunk_steps.one_copy_bytes(run_context.ledger, NOT_POSTED)
    chunks = run_context.ledger.chunks.list(states=IN_GOOD_STANDING)
    used = (
        plan.used_bytes
        if plan
        else sum(chunk.stored_size_bytes for chunk in chunks if chunk.owner == address) * copies
    )
    buy = to_buy(used + waiting, reading.latest_end_space or 0, reading.latest_end, now, warn_days)
    if plan is None:
        stored = sum(chunk.owner == address for chunk in chunks)
        reason = (
            f"No space is bought, and {counted(stored, 'chunk')} stored"
            if stored
            else "No space was bought yet"
        )
        severity = AssetCheckSeverity.ERROR if stored else AssetCheckSeverity.WARN
        return AssetCheckResult(passed=False, severity=severity, description=f"{reason}: {buy}.")
    forecast = forecast_storage(plan, charged_per_day(chunks, copies, now), now)
    warning = forecast.warning(plan, warn_days, waiting)
    ends = end_warning(reading, now, warn_days)
    warning = ends or warning
    return AssetCheckResult(
        passed=not warning,
        severity=AssetCheckSeverity.ERROR if ends else AssetCheckSeverity.WARN,
        description=f"{warning.rstrip('.')}: {buy}." if warning else None,
        metadata={
            "looked_at": MetadataValue.timestamp(now),
            **metadata.forecast_metadata(plan, forecast, waiting),
        },
    )
