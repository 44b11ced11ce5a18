"""The sensor that tells an operator what is wrong with any source: as checks on its assets' pages, by a webhook and by e-mail.

It also observes how far each source is, for the plots of its page: the numbers are those that it reads anyway.

Its cursor holds what the webhook and the mailboxes were told, each for itself, since one may be away while the other is not: a
time for each source and kind of condition. What could not be sent the next tick sends. To lose the cursor tells what goes on once
more.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

from dagster import (
    AssetCheckEvaluation,
    AssetCheckKey,
    AssetCheckResult,
    AssetCheckSeverity,
    AssetKey,
    AssetObservation,
    AssetRecordsFilter,
    DagsterInstance,
    DefaultSensorStatus,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    sensor,
)

from caf_pipeline.defs import metadata
from caf_pipeline.defs.dagster_private import AssetCheckEvaluationTargetMaterializationData
from caf_pipeline.defs.dagster_private import AssetCheckExecutionRecordStatus as CheckStatus
from caf_pipeline.defs.naming import (
    ALERT_SENSOR,
    FEW_OBJECTS_ARE_SKIPPED,
    LEDGER,
    NO_CHUNK_IS_DAMAGED,
    NO_CHUNK_IS_PARKED,
    PLAN_ACCOUNTS,
    SOURCE_KEEPS_UP,
    STORAGE_PLAN_LASTS,
    STORE,
    asset_key,
)
from caf_pipeline.defs.resources import ask_in_time
from caf_pipeline.errors import AlertNotSent, LedgerError, with_hint
from caf_pipeline.ledger.database import describe_database
from caf_pipeline.ledger.postgres import Ledger
from caf_pipeline.ledger.records import SourceProgress
from caf_pipeline.settings import AlertSettings, Settings
from caf_pipeline.steps.conditions import DELAYS, Condition, ConditionKind, find_conditions
from caf_pipeline.system.deadline import Deadline, Overdue
from caf_pipeline.system.notify import post_json, send_mail
from caf_pipeline.system.quantities import counted

ALERT_SECONDS: Final = 300
"""Between two looks. Each reads the rows of all chunks; what it tells of lasts for hours."""

_TOLD: Final = "told by each way"  # no source has such a name
_CONDITIONS: Final = "conditions"

CHECKED_ASSET: Final = "chunk_plan"
"""The asset whose checks the conditions are: it has no partitions."""

OBSERVED_ASSET: Final = "s3_inventory"
"""The asset whose observations say how far a source is: it has no partitions, so that its plots are over time; and what is in the
bucket is plotted beside what of it is archived."""

OBSERVE_SECONDS: Final = 3600
"""Between two observations of a source at least: rates are those of the last hour, and the UI plots the last 100 events."""

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

TOLD_CHECKS: Final = {
    STORAGE_PLAN_LASTS: (ConditionKind.SPACE_ENDS, "`caf jackal buy` buys space; `caf jackal price` says what it costs"),
    PLAN_ACCOUNTS: (ConditionKind.UNACCOUNTED, "the check's page has the numbers; nothing of the source may be deleted from S3"),
}
"""Checks of other runs whose failure is a condition, and what to do then."""

OF_ALL: Final = "(all sources)"
"""Whose condition it is that the ledger is away; no source has such a name."""

LOOK_SHARE: Final = 0.5
"""Of a tick's time, for the ledger: where it is silent, the rest is for telling it."""


@dataclass(frozen=True, slots=True)
class Alert:
    """What is sent of a condition. `status` is `begun`, `goes on` or `ended`; of one that ended only its kind is known."""

    source: str
    kind: str
    status: str
    condition: Condition | None = None

    @property
    def sentence(self) -> str:
        """As people read it."""
        if self.condition is None:
            return f"{self.source}: '{self.kind}' has ended"
        return self.condition.text

    def as_json(self) -> Mapping[str, Any]:
        """As programs read it."""
        severity = None if self.condition is None else "error" if self.condition.severe else "warning"
        return {"source": self.source, "condition": self.kind, "status": self.status, "severity": severity, "text": self.sentence}


Told = dict[str, dict[str, str]]
"""When an alert was last sent, by source and kind of condition. A space and "warning" follow if it was not an error."""

_WARNING: Final = "warning"


def is_paused(ledger: Ledger) -> bool:
    """Tell whether an operator has everything paused."""
    return bool(ledger.controls().current().paused)


def conditions_of(progress: Iterable[SourceProgress], settings: Settings, *, paused: bool) -> dict[str, list[Condition]]:
    """Return what is wrong with each source."""
    on_jackal = settings.store.kind == "jackal"
    return {
        one.source: list(find_conditions(one, settings.sources[one.source], settings.alerts, paused=paused, on_jackal=on_jackal))
        for one in progress
    }


def check_result(conditions: Sequence[Condition], check: str) -> AssetCheckResult:
    """Return what a check comes to, of all conditions of its source."""
    found = [one for one in conditions if one.kind in CHECKS[check]]
    return AssetCheckResult(
        passed=not found,
        severity=AssetCheckSeverity.ERROR if any(one.severe for one in found) else AssetCheckSeverity.WARN,
        description="; ".join(one.text for one in found) or None,
        metadata={_CONDITIONS: ", ".join(one.kind for one in found) or "none"},
    )


def alert_sensor(settings: Settings, tick_seconds: float) -> SensorDefinition:
    """Return the sensor that looks at all sources."""

    @sensor(
        name=ALERT_SENSOR,
        minimum_interval_seconds=ALERT_SECONDS,
        required_resource_keys={LEDGER, STORE},
        default_status=DefaultSensorStatus.RUNNING,
        description=(
            "Looks in the ledger for what an operator is to know: parked chunks, sources that stand still or are late, many "
            "skipped objects. It reports each as a check of the source's plan, and sends it to the webhook and the addresses in "
            "[alerts]. Hourly, where a number has changed, it observes how far a source is: see the plots on the page of its "
            "`s3_inventory`. A tick fails where none of them could be notified; the next one sends it again."
        ),
    )
    def watch_sources(context: SensorEvaluationContext) -> SensorResult:
        deadline = Deadline(tick_seconds)

        due = _due_observations(context.instance, settings.sources)

        def look() -> tuple[bool, Sequence[SourceProgress], Mapping[tuple[str, str], int]]:
            ledger = context.resources.ledger.get()
            return is_paused(ledger), ledger.progress(list(settings.sources)), ledger.copy_counts(list(due)) if due else {}

        told = _read_cursor(context.cursor)
        try:
            paused, progress, copies = ask_in_time(
                context, Deadline(tick_seconds * LOOK_SHARE), describe_database(settings), look
            )
        except (Overdue, LedgerError) as error:
            away = Condition(ConditionKind.LEDGER_AWAY, True, str(error), "nothing is planned, archived or looked up without it")
            unknown: dict[str, list[Condition]] = {source: [] for source in settings.sources}
            said = _send_due({**unknown, OF_ALL: [away]}, told, frozenset(ConditionKind), settings, deadline)
            if not told:
                raise
            return SensorResult(skip_reason=f"{error}; {said}.", cursor=json.dumps({_TOLD: told}))
        found = conditions_of(progress, settings, paused=paused)
        _report(context.instance, found)
        for one in progress:
            if one.source in due:
                _observe(context.instance, one, copies, due[one.source])
        for source, condition in _failed_checks(context.instance, list(found)):
            found[source].append(condition)
        counts = f"{counted(sum(map(len, found.values())), 'condition')} in {counted(len(found), 'source')}"
        said = _send_due({**found, OF_ALL: []}, told, DELAYS if paused else frozenset(), settings, deadline)
        return SensorResult(skip_reason=f"{counts}; {said}.", cursor=json.dumps({_TOLD: told}))

    return watch_sources


def _read_cursor(written: str | None) -> dict[str, Told]:
    """Return what each was told: nothing where the cursor is empty, or was written by hand and is none."""
    try:
        said: dict[str, Told] = json.loads(written or "{}").get(_TOLD, {})
        times = [at for each in said.values() for kinds in each.values() for at in kinds.values()]
        return said if all(datetime.fromisoformat(at.partition(" ")[0]).tzinfo for at in times) else {}
    except (ValueError, TypeError, AttributeError):
        return {}


def due_alerts(
    found: Mapping[str, Sequence[Condition]],
    told: Mapping[str, Mapping[str, str]],
    now: datetime,
    settings: AlertSettings,
    *,
    explained: Collection[str] = (),
) -> tuple[list[Alert], Told]:
    """Return the alerts to send, and what to write into the cursor once they are sent.

    Nothing is said to have ended of the kinds in `explained`: whether they did is not known.
    """
    alerts: list[Alert] = []
    then: Told = {}
    for source, conditions in found.items():
        before = told.get(source, {})
        for one in conditions:
            last, _, severity = before.get(one.kind, "").partition(" ")
            age = now - datetime.fromisoformat(last) if last else timedelta()
            escalated = one.severe and severity == _WARNING
            # A time to come is that of a clock that was wrong.
            again = settings.repeat_after and not timedelta() <= age < timedelta(seconds=settings.repeat_after)
            if not last or again or escalated:
                last_sent = now.isoformat()
                alerts.append(Alert(source, one.kind, "goes on" if last else "begun", one))
            else:
                last_sent = last
            then.setdefault(source, {})[one.kind] = last_sent if one.severe else f"{last_sent} {_WARNING}"
        missing = before.keys() - {one.kind for one in conditions}
        if kept := {kind: before[kind] for kind in missing & {*explained}}:
            then.setdefault(source, {}).update(kept)
        ended = missing - {*explained}
        alerts += [Alert(source, kind, "ended") for kind in sorted(ended)]
    return alerts, then


def _send_due(
    found: Mapping[str, Sequence[Condition]],
    told: dict[str, Told],
    explained: Collection[str],
    settings: Settings,
    deadline: Deadline,
) -> str:
    """Send what is due to each that the settings name, and write what it was told into `told`; return what to say of it.

    Raises:
        AlertNotSent: one of them was not reached, and no other one was told anything, so that `told` is as it was.
    """
    its = settings.alerts
    ways = {
        name: way
        for name, there, way in (
            ("webhook", its.webhook, ("the webhook", _post)),
            ("mail", its.mail_to, (", ".join(its.mail_to), _mail)),
        )
        if there
    }
    if not ways:
        told.clear()
        return "[alerts] has neither webhook nor mail_to"
    said, failed = list[str](), list[str]()
    for number, (name, (whom, send)) in enumerate(ways.items()):
        alerts, then = due_alerts(found, told.get(name, {}), datetime.now(UTC), its, explained=explained)
        if not alerts:
            continue
        try:
            but = send(alerts, its, Deadline(deadline.left() / (len(ways) - number)))
        except (AlertNotSent, Overdue) as error:
            failed.append(with_hint(error))
        else:
            told[name] = then
            said.append(f"{counted(len(alerts), 'alert')} sent to {whom}{but}")
    if failed and not said:
        raise AlertNotSent("; ".join(failed), hint="the next tick sends it again")
    return "; ".join([*said, *failed]) or "nothing to send"


def _post(alerts: Sequence[Alert], its: AlertSettings, deadline: Deadline) -> str:
    assert its.webhook
    body = {"text": _text(alerts), "alerts": [one.as_json() for one in alerts]}
    deadline.ask("the webhook", partial(post_json, its.webhook.get_secret_value(), body, seconds=deadline.left()))
    return ""


def _mail(alerts: Sequence[Alert], its: AlertSettings, deadline: Deadline) -> str:
    """Send an e-mail; return what to add where not all got it: it is not sent again, since the others would get it again."""
    subject = f"caf-pipeline: {alerts[0].sentence}" if len(alerts) == 1 else f"caf-pipeline: {len(alerts)} alerts"
    mail = partial(
        send_mail,
        subject,
        _text(alerts),
        sender=its.mail_from,
        to=its.mail_to,
        host=its.smtp_host,
        port=its.smtp_port,
        security=its.smtp_security,
        login=(its.smtp_user, its.smtp_password.get_secret_value()) if its.smtp_password else None,
        seconds=deadline.left(),
    )
    server = f"the mail server {its.smtp_host}:{its.smtp_port}"
    refused = deadline.ask(server, mail)
    return f", but {server} refuses {', '.join(refused)}: check alerts.mail_to" if refused else ""


def _text(alerts: Sequence[Alert]) -> str:
    return "\n".join(one.sentence for one in alerts)


def _report(instance: DagsterInstance, found: Mapping[str, Sequence[Condition]]) -> None:
    """Report the checks whose result, or its reasons, are others than last time: what goes on writes no event.

    A new plan is told again, since the UI takes no result of an older materialization for one of the asset; so is what the daily
    look at the bought space found, which runs without the plan.
    """
    assets = {source: AssetKey(asset_key(source, CHECKED_ASSET)) for source in found}
    keys = {AssetCheckKey(key, name): (source, name) for source, key in assets.items() for name in CHECKS}
    daily = {AssetCheckKey(key, STORAGE_PLAN_LASTS) for key in assets.values()}
    last, unevaluated = _last_evaluations(instance, [*keys, *daily])
    entries = [record.asset_entry for record in instance.get_asset_records(list(assets.values()))]
    targets = {
        entry.asset_key: AssetCheckEvaluationTargetMaterializationData(
            storage_id=made.storage_id, run_id=made.run_id, timestamp=made.timestamp
        )
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


def _last_evaluations(
    instance: DagsterInstance, keys: Sequence[AssetCheckKey]
) -> tuple[Mapping[AssetCheckKey, AssetCheckEvaluation], Collection[AssetCheckKey]]:
    """Return the last evaluation of each check that has any, and the checks that a later run is to evaluate, or did not."""
    storage, evaluated = instance.event_log_storage, {CheckStatus.SUCCEEDED, CheckStatus.FAILED}
    latest = storage.get_latest_asset_check_execution_by_key(keys)
    unevaluated = {key for key, record in latest.items() if record.status not in evaluated}
    records = [record for key, record in latest.items() if key not in unevaluated]
    for key in unevaluated:
        records += storage.get_asset_check_execution_history(key, limit=1, status=evaluated)
    return {record.key: record.evaluation for record in records if record.evaluation}, unevaluated


def _failed_checks(instance: DagsterInstance, sources: Sequence[str]) -> Iterator[tuple[str, Condition]]:
    """Yield a condition of a source for each of `TOLD_CHECKS` that failed when it was last evaluated."""
    keys = {
        AssetCheckKey(AssetKey(asset_key(source, CHECKED_ASSET)), name): (source, name)
        for source in sources
        for name in TOLD_CHECKS
    }
    last, _ = _last_evaluations(instance, list(keys))
    for key, (source, name) in keys.items():
        evaluation = last.get(key)
        if evaluation and not evaluation.passed:
            kind, hint = TOLD_CHECKS[name]
            said = f"the check {name} of {source} failed" + (f", {evaluation.description}" if evaluation.description else "")
            yield source, Condition(kind, evaluation.severity is AssetCheckSeverity.ERROR, said.rstrip("."), hint)


def _evaluation_of(
    result: AssetCheckResult | AssetCheckEvaluation,
    key: AssetCheckKey,
    target: AssetCheckEvaluationTargetMaterializationData | None,
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
    return evaluation.passed, evaluation.severity, evaluation.metadata.get(_CONDITIONS), target and target.storage_id


def _due_observations(instance: DagsterInstance, sources: Iterable[str]) -> dict[str, AssetObservation | None]:
    """Return the sources that were not observed for `OBSERVE_SECONDS`, each with its last observation.

    Waits of runs are observed on the same asset, and tell nothing of how far the source is.
    """
    due: dict[str, AssetObservation | None] = {}
    now = datetime.now(UTC).timestamp()
    for source in sources:
        its = AssetRecordsFilter(AssetKey(asset_key(source, OBSERVED_ASSET)))
        records = instance.fetch_observations(its, limit=OBSERVATIONS_READ).records
        found = ((one.timestamp, one.asset_observation) for one in records if one.asset_observation)
        at, last = next(((at, its) for at, its in found if metadata.OF_PROGRESS in its.metadata), (0.0, None))
        if not 0 <= now - at < OBSERVE_SECONDS:  # a time to come is that of a wrong clock
            due[source] = last
    return due


def _observe(
    instance: DagsterInstance,
    progress: SourceProgress,
    copies: Mapping[tuple[str, str], int],
    last: AssetObservation | None,
) -> None:
    """Write how far a source is, where any number is another than last time: a source that rests writes no event."""
    key = AssetKey(asset_key(progress.source, OBSERVED_ASSET))
    observation = AssetObservation(asset_key=key, metadata=metadata.progress_metadata(progress, copies))
    if last is None or last.metadata != observation.metadata:
        instance.report_runless_asset_event(observation)
