"""Check results and observations that a sensor writes, outside of any run."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from dagster import (
    AssetCheckEvaluation,
    AssetCheckKey,
    AssetCheckResult,
    AssetCheckSeverity,
    AssetKey,
    AssetObservation,
    AssetRecordsFilter,
    DagsterInstance,
    EventLogRecord,
)

from caf_pipeline.asset_keys import AssetKeys
from caf_pipeline.automation.alerting import last_evaluations
from caf_pipeline.dagster_private import AssetCheckEvaluationTargetMaterializationData
from caf_pipeline.defs import metadata
from caf_pipeline.ledger.records import SourceProgress
from caf_pipeline.naming import (
    CHECKED_ASSET,
    FEW_OBJECTS_ARE_SKIPPED,
    NO_CHUNK_IS_DAMAGED,
    NO_CHUNK_IS_PARKED,
    SOURCE_KEEPS_UP,
    STORAGE_PLAN_LASTS,
)
from caf_pipeline.steps.conditions import Condition, ConditionKind

_CONDITIONS: Final = "conditions"

OBSERVED_ASSET: Final = "s3_inventory"
"""Its observations show progress over time, since it has no partitions."""

OBSERVE_SECONDS: Final = 3600
"""Minimum between two observations. Rates cover an hour; the UI plots the last 100 events."""

OBSERVATIONS_READ: Final = 20
"""If none of these latest observations shows progress, the source is observed."""

CHECKS: Final = {
    NO_CHUNK_IS_DAMAGED: (ConditionKind.DAMAGED,),
    NO_CHUNK_IS_PARKED: (ConditionKind.PARKED,),
    SOURCE_KEEPS_UP: (
        ConditionKind.UNKNOWN_POSTS,
        ConditionKind.STALLED,
        ConditionKind.LATE,
        ConditionKind.NO_INVENTORY,
        ConditionKind.QUEUE_UNREAD,
        ConditionKind.UNLISTED_EVENTS,
        ConditionKind.UNWATCHED,
        ConditionKind.MESSAGES_SET_APART,
    ),
    FEW_OBJECTS_ARE_SKIPPED: (ConditionKind.SKIPPED,),
}


def evaluation_target(
    materialization: EventLogRecord,
) -> AssetCheckEvaluationTargetMaterializationData:
    """Refer to a materialization in a check result."""
    return AssetCheckEvaluationTargetMaterializationData(
        storage_id=materialization.storage_id,
        run_id=materialization.run_id,
        timestamp=materialization.timestamp,
    )


def latest_materialization(
    instance: DagsterInstance, key: AssetKey, partition: str
) -> EventLogRecord | None:
    """Return a partition's latest materialization."""
    filters = AssetRecordsFilter(asset_key=key, asset_partitions=[partition])
    records = instance.fetch_materializations(filters, limit=1).records
    return records[0] if records else None


def check_result(conditions: Sequence[Condition], check: str) -> AssetCheckResult:
    """Return a check's result, given its source's conditions."""
    failures = [condition for condition in conditions if condition.kind in CHECKS[check]]
    severe = any(condition.severe for condition in failures)
    return AssetCheckResult(
        passed=not failures,
        severity=AssetCheckSeverity.ERROR if severe else AssetCheckSeverity.WARN,
        description="; ".join(condition.text for condition in failures) or None,
        metadata={_CONDITIONS: ", ".join(condition.kind for condition in failures) or "none"},
    )


def report_conditions(
    instance: DagsterInstance, conditions: Mapping[str, Sequence[Condition]], keys: AssetKeys
) -> None:
    """Write each changed result, and all results after a new plan.

    The UI ignores results for an older materialization.
    """
    assets = {source: keys.key(source, CHECKED_ASSET) for source in conditions}
    checks = {
        AssetCheckKey(key, name): (source, name)
        for source, key in assets.items()
        for name in CHECKS
    }
    space = {AssetCheckKey(key, STORAGE_PLAN_LASTS) for key in assets.values()}
    last, unevaluated = last_evaluations(instance, [*checks, *space])
    entries = [record.asset_entry for record in instance.get_asset_records(list(assets.values()))]
    targets = {
        entry.asset_key: evaluation_target(materialization)
        for entry in entries
        if (materialization := entry.last_materialization_record)
    }
    for key, (source, name) in checks.items():
        result, before = check_result(conditions[source], name), last.get(key)
        evaluation = evaluation_of(result, key, targets.get(key.asset_key))
        if before is None or key in unevaluated or _reasons(before) != _reasons(evaluation):
            instance.report_runless_asset_event(evaluation)
    for key in space & last.keys() - unevaluated:
        evaluation = evaluation_of(last[key], key, targets.get(key.asset_key))
        if _reasons(last[key]) != _reasons(evaluation):
            instance.report_runless_asset_event(evaluation)


def partition_evaluation(
    instance: DagsterInstance,
    key: AssetCheckKey,
    partition: str,
    result: AssetCheckResult,
    *,
    blocking: bool = False,
) -> AssetCheckEvaluation:
    """Return a result that refers to the partition's latest materialization.

    Dagster's own conversion (1.12) refers to the latest one of any partition.
    """
    latest = latest_materialization(instance, key.asset_key, partition)
    target = evaluation_target(latest) if latest else None
    return evaluation_of(result, key, target, partition=partition, blocking=blocking)


def evaluation_of(
    result: AssetCheckResult | AssetCheckEvaluation,
    key: AssetCheckKey,
    target: AssetCheckEvaluationTargetMaterializationData | None,
    *,
    partition: str | None = None,
    blocking: bool = False,
) -> AssetCheckEvaluation:
    """Return the evaluation of a check's result, for a materialization of its asset."""
    return AssetCheckEvaluation(
        asset_key=key.asset_key,
        check_name=key.name,
        passed=bool(result.passed),
        severity=result.severity,
        description=result.description,
        metadata=result.metadata,
        target_materialization_data=target,
        partition=partition,
        blocking=blocking,
    )


def _reasons(evaluation: AssetCheckEvaluation) -> tuple[object, ...]:
    target = evaluation.target_materialization_data
    return (
        evaluation.passed,
        evaluation.severity,
        evaluation.metadata.get(_CONDITIONS),
        target and target.storage_id,
    )


def due_observations(
    instance: DagsterInstance, sources: Iterable[str], keys: AssetKeys
) -> dict[str, AssetObservation | None]:
    """Return sources due for an observation, each with its last."""
    due: dict[str, AssetObservation | None] = {}
    now = datetime.now(UTC).timestamp()
    for source in sources:
        key = keys.key(source, OBSERVED_ASSET)
        records = instance.fetch_observations(key, limit=OBSERVATIONS_READ).records
        at, last = 0.0, None
        for record in records:
            observation = record.asset_observation
            if observation and metadata.OF_PROGRESS in observation.metadata:
                at, last = record.timestamp, observation
                break
        if not 0 <= now - at < OBSERVE_SECONDS:  # a future time was written by a wrong clock
            due[source] = last
    return due


def observe(
    instance: DagsterInstance,
    progress: SourceProgress,
    copies: Mapping[tuple[str, str], int],
    last: AssetObservation | None,
    keys: AssetKeys,
) -> None:
    """Observe a source's progress if it changed."""
    observation = AssetObservation(
        asset_key=keys.key(progress.source, OBSERVED_ASSET),
        metadata=metadata.progress_metadata(progress, copies),
    )
    if last is None or last.metadata != observation.metadata:
        instance.report_runless_asset_event(observation)
