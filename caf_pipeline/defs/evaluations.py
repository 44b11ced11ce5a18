"""Results of checks, and observations, that no step of a run makes: of conditions in the ledger,
and how far a source is.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import NoneType
from typing import Any, Final, get_args, get_type_hints

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

from caf_pipeline.automation.alerting import last_evaluations
from caf_pipeline.defs import metadata
from caf_pipeline.defs.naming import (
    CHECKED_ASSET,
    FEW_OBJECTS_ARE_SKIPPED,
    NO_CHUNK_IS_DAMAGED,
    NO_CHUNK_IS_PARKED,
    SOURCE_KEEPS_UP,
    STORAGE_PLAN_LASTS,
    asset_key,
)
from caf_pipeline.ledger.records import SourceProgress
from caf_pipeline.steps.conditions import Condition, ConditionKind

_CONDITIONS: Final = "conditions"

OBSERVED_ASSET: Final = "s3_inventory"
"""The asset whose observations say how far a source is: it has no partitions, so that its plots are
over time; and what is in the bucket is plotted beside what of it is archived.
"""

OBSERVE_SECONDS: Final = 3600
"""Between two observations of a source at least: rates are those of the last hour, and the UI plots
the last 100 events.
"""

OBSERVATIONS_READ: Final = 20
"""Of a source, the latest. Where all are of waits, the source is observed once more."""

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
"""Which conditions fail a check."""


(_TARGET,) = set(get_args(get_type_hints(AssetCheckEvaluation)["target_materialization_data"])) - {
    NoneType
}
"""The type that names the materialization a result is of.

Dagster (1.13.27) exports it nowhere; without it a partition does not show the result.
"""


def evaluation_target(made: EventLogRecord) -> Any:  # noqa: ANN401 - see `_TARGET`
    """Return what names a materialization as the one that a check's result is of."""
    return _TARGET(storage_id=made.storage_id, run_id=made.run_id, timestamp=made.timestamp)


def check_result(conditions: Sequence[Condition], check: str) -> AssetCheckResult:
    """Return what a check comes to, of all conditions of its source."""
    found = [one for one in conditions if one.kind in CHECKS[check]]
    return AssetCheckResult(
        passed=not found,
        severity=AssetCheckSeverity.ERROR
        if any(one.severe for one in found)
        else AssetCheckSeverity.WARN,
        description="; ".join(one.text for one in found) or None,
        metadata={_CONDITIONS: ", ".join(one.kind for one in found) or "none"},
    )


def report_conditions(instance: DagsterInstance, found: Mapping[str, Sequence[Condition]]) -> None:
    """Report the checks whose result, or its reasons, are others than last time: what goes on
    writes no event.

    A new plan is told again, since the UI takes no result of an older materialization for one of
    the asset; so is what the daily look at the bought space found, which runs without the plan.
    """
    assets = {source: AssetKey(asset_key(source, CHECKED_ASSET)) for source in found}
    keys = {
        AssetCheckKey(key, name): (source, name)
        for source, key in assets.items()
        for name in CHECKS
    }
    daily = {AssetCheckKey(key, STORAGE_PLAN_LASTS) for key in assets.values()}
    last, unevaluated = last_evaluations(instance, [*keys, *daily])
    entries = [record.asset_entry for record in instance.get_asset_records(list(assets.values()))]
    targets = {
        entry.asset_key: evaluation_target(made)
        for entry in entries
        if (made := entry.last_materialization_record)
    }
    for key, (source, name) in keys.items():
        result, before = check_result(found[source], name), last.get(key)
        evaluation = _evaluation_of(result, key, targets.get(key.asset_key))
        if before is None or key in unevaluated or _reasons(before) != _reasons(evaluation):
            instance.report_runless_asset_event(evaluation)
    for key in daily & last.keys() - unevaluated:
        told = _evaluation_of(last[key], key, targets.get(key.asset_key))
        if _reasons(last[key]) != _reasons(told):
            instance.report_runless_asset_event(told)


def _evaluation_of(
    result: AssetCheckResult | AssetCheckEvaluation,
    key: AssetCheckKey,
    target: Any,  # noqa: ANN401 - see `_TARGET`
) -> AssetCheckEvaluation:
    return AssetCheckEvaluation(
        asset_key=key.asset_key,
        check_name=key.name,
        passed=bool(result.passed),
        severity=result.severity,
        description=result.description,
        metadata=result.metadata,
        target_materialization_data=target,
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
    instance: DagsterInstance, sources: Iterable[str]
) -> dict[str, AssetObservation | None]:
    """Return the sources that were not observed for `OBSERVE_SECONDS`, each with its last
    observation.

    Waits of runs are observed on the same asset, and tell nothing of how far the source is.
    """
    due: dict[str, AssetObservation | None] = {}
    now = datetime.now(UTC).timestamp()
    for source in sources:
        its = AssetRecordsFilter(AssetKey(asset_key(source, OBSERVED_ASSET)))
        records = instance.fetch_observations(its, limit=OBSERVATIONS_READ).records
        found = ((one.timestamp, one.asset_observation) for one in records if one.asset_observation)
        at, last = next(
            ((at, its) for at, its in found if metadata.OF_PROGRESS in its.metadata), (0.0, None)
        )
        if not 0 <= now - at < OBSERVE_SECONDS:  # a time to come is that of a wrong clock
            due[source] = last
    return due


def observe(
    instance: DagsterInstance,
    progress: SourceProgress,
    copies: Mapping[tuple[str, str], int],
    last: AssetObservation | None,
) -> None:
    """Write how far a source is, where any number is another than last time: a source that rests
    writes no event.
    """
    key = AssetKey(asset_key(progress.source, OBSERVED_ASSET))
    observation = AssetObservation(
        asset_key=key, metadata=metadata.progress_metadata(progress, copies)
    )
    if last is None or last.metadata != observation.metadata:
        instance.report_runless_asset_event(observation)
