"""The sensor that tells an operator what is wrong with any source: as checks on its assets' pages, by a webhook and by e-mail.

Its cursor holds what was told, a time for each source and kind of condition, and is written only once all of it was sent: where
something could not be sent, the next tick sends all of it. To lose the cursor tells what goes on once more.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
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
    DagsterInstance,
    DefaultSensorStatus,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    sensor,
)

from caf_pipeline.defs.dagster_private import AssetCheckExecutionRecordStatus
from caf_pipeline.defs.naming import (
    ALERT_SENSOR,
    FEW_OBJECTS_ARE_SKIPPED,
    LEDGER,
    NO_CHUNK_IS_PARKED,
    SOURCE_KEEPS_UP,
    STORE,
    asset_key,
)
from caf_pipeline.defs.resources import ask_in_time
from caf_pipeline.ledger.database import describe_database
from caf_pipeline.ledger.postgres import Ledger
from caf_pipeline.settings import AlertSettings, Settings
from caf_pipeline.steps.conditions import Condition, ConditionKind, find_conditions
from caf_pipeline.system.deadline import Deadline
from caf_pipeline.system.notify import post_json, send_mail
from caf_pipeline.system.quantities import counted

ALERT_SECONDS: Final = 300
"""Between two looks. Each reads the rows of all chunks; what it tells of lasts for hours."""

CHECKED_ASSET: Final = "chunk_plan"
"""The asset whose checks the conditions are: it has no partitions."""

CHECKS: Final = {
    NO_CHUNK_IS_PARKED: (ConditionKind.PARKED,),
    SOURCE_KEEPS_UP: (
        ConditionKind.STALLED,
        ConditionKind.LATE,
        ConditionKind.NO_INVENTORY,
        ConditionKind.UNLISTED_EVENTS,
        ConditionKind.MESSAGES_SET_APART,
    ),
    FEW_OBJECTS_ARE_SKIPPED: (ConditionKind.SKIPPED,),
}
"""Which conditions fail a check."""


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
        return f"{self.condition.sentence}: {self.condition.hint}"

    def as_json(self) -> Mapping[str, Any]:
        """As programs read it."""
        severity = None if self.condition is None else "error" if self.condition.severe else "warning"
        return {"source": self.source, "condition": self.kind, "status": self.status, "severity": severity, "text": self.sentence}


def conditions_of(ledger: Ledger, settings: Settings, sources: Iterable[str]) -> dict[str, list[Condition]]:
    """Return what is so of each of these sources and should not be."""
    paused = bool(ledger.controls().orders().paused)
    return {
        one.source: list(find_conditions(one, settings.sources[one.source], settings.alerts, paused=paused))
        for one in ledger.progress(list(sources))
    }


def check_result(conditions: Sequence[Condition], check: str) -> AssetCheckResult:
    """Return what a check comes to, of all conditions of its source."""
    found = [one for one in conditions if one.kind in CHECKS[check]]
    return AssetCheckResult(
        passed=not found,
        severity=AssetCheckSeverity.ERROR if any(one.severe for one in found) else AssetCheckSeverity.WARN,
        description="; ".join(f"{one.sentence}: {one.hint}" for one in found) or None,
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
            "[alerts]. A tick fails where something could not be sent; the next one sends it again."
        ),
    )
    def watch_sources(context: SensorEvaluationContext) -> SensorResult:
        deadline = Deadline(tick_seconds)
        found = ask_in_time(
            context,
            deadline,
            describe_database(settings),
            lambda: conditions_of(context.resources.ledger.get(), settings, settings.sources),
        )
        _report(context.instance, found)
        alerts, told = due_alerts(found, json.loads(context.cursor or "{}"), datetime.now(UTC), settings.alerts)
        said = _send(alerts, settings, deadline)
        counts = f"{counted(sum(map(len, found.values())), 'condition')} in {counted(len(found), 'source')}"
        return SensorResult(skip_reason=f"{counts}; {said}.", cursor=json.dumps(told))

    return watch_sources


def due_alerts(
    found: Mapping[str, Sequence[Condition]], told: Mapping[str, Mapping[str, str]], now: datetime, settings: AlertSettings
) -> tuple[list[Alert], dict[str, dict[str, str]]]:
    """Return what is to be sent, and what is told once it was: by source and kind of condition, when."""
    alerts: list[Alert] = []
    then: dict[str, dict[str, str]] = {}
    for source, conditions in found.items():
        before = told.get(source, {})
        for one in conditions:
            last = before.get(one.kind)
            again = (
                settings.repeat_after and last and now - datetime.fromisoformat(last) >= timedelta(seconds=settings.repeat_after)
            )
            if not last or again:
                alerts.append(Alert(source, one.kind, "goes on" if last else "begun", one))
            then.setdefault(source, {})[one.kind] = now.isoformat() if not last or again else last
        ended = before.keys() - {one.kind for one in conditions}
        alerts += [Alert(source, kind, "ended") for kind in sorted(ended)]
    return alerts, then


def _send(alerts: Sequence[Alert], settings: Settings, deadline: Deadline) -> str:
    """Send alerts to all that the settings name; return what to say of it.

    Raises:
        AlertNotSent: one of them was not reached. Overdue: likewise, in time.
    """
    its, text = settings.alerts, "\n".join(one.sentence for one in alerts)
    to = [name for name, there in (("the webhook", its.webhook), (", ".join(its.mail_to), its.mail_to)) if there]
    if not alerts or not to:
        return "nothing to send" if to else "[alerts] names nobody to send it to"
    if its.webhook:
        body = {"text": text, "alerts": [one.as_json() for one in alerts]}
        url = its.webhook.get_secret_value()
        deadline.ask("the webhook", partial(post_json, url, body, seconds=deadline.left()))
    if its.mail_to:
        subject = f"caf-pipeline: {alerts[0].sentence}" if len(alerts) == 1 else f"caf-pipeline: {len(alerts)} alerts"
        login = (its.smtp_user, its.smtp_password.get_secret_value()) if its.smtp_password else None
        mail = partial(
            send_mail,
            subject,
            text,
            sender=its.mail_from,
            to=its.mail_to,
            host=its.smtp_host,
            port=its.smtp_port,
            security=its.smtp_security,
            login=login,
            seconds=deadline.left(),
        )
        deadline.ask(f"the mail server {its.smtp_host}:{its.smtp_port}", mail)
    return f"{counted(len(alerts), 'alert')} sent to {' and '.join(to)}"


def _report(instance: DagsterInstance, found: Mapping[str, Sequence[Condition]]) -> None:
    """Report the checks whose result is another than their last one, so that a look that finds nothing new writes no event."""
    keys = {
        AssetCheckKey(AssetKey(asset_key(source, CHECKED_ASSET)), name): (source, name) for source in found for name in CHECKS
    }
    last = instance.event_log_storage.get_latest_asset_check_execution_by_key(list(keys))
    for key, (source, name) in keys.items():
        result, before = check_result(found[source], name), last.get(key)
        if before is not None and (before.status is AssetCheckExecutionRecordStatus.SUCCEEDED) is result.passed:
            continue
        evaluation = AssetCheckEvaluation(
            asset_key=key.asset_key,
            check_name=name,
            passed=result.passed,
            severity=result.severity,
            description=result.description,
            metadata={},
        )
        instance.report_runless_asset_event(evaluation)
