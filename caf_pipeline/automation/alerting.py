"""One tick of the sensor that alerts operators by a webhook and by mail.

The cursor has alert times by channel, since one may fail. A lost cursor repeats alerts.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any, Final

from dagster import (
    AssetCheckEvaluation,
    AssetCheckKey,
    AssetCheckSeverity,
    DagsterInstance,
    SensorEvaluationContext,
    SensorResult,
)

from caf_pipeline.asset_keys import AssetKeys
from caf_pipeline.automation.notify import post_json, send_mail
from caf_pipeline.automation.tick import ask_in_time
from caf_pipeline.dagster_private import AssetCheckExecutionRecordStatus
from caf_pipeline.errors import AlertNotSent, LedgerError, with_hint
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import SourceProgress
from caf_pipeline.naming import CHECKED_ASSET, PLAN_ACCOUNTS, STORAGE_PLAN_LASTS
from caf_pipeline.records import Chunk
from caf_pipeline.settings import AlertSettings, Settings
from caf_pipeline.steps.conditions import DELAYS, Condition, ConditionKind, find_conditions
from caf_pipeline.system.deadline import Deadline, Overdue
from caf_pipeline.system.quantities import counted

EVALUATED: Final = {
    AssetCheckExecutionRecordStatus.SUCCEEDED,
    AssetCheckExecutionRecordStatus.FAILED,
}

_SENT_KEY: Final = "told by each way"  # in the cursor; older cursors have names of sources there

CHECKS_WITH_ALERTS: Final = {
    STORAGE_PLAN_LASTS: (
        ConditionKind.SPACE_ENDS,
        "`caf jackal buy` buys space; `caf jackal price` shows the price",
    ),
    PLAN_ACCOUNTS: (
        ConditionKind.UNACCOUNTED,
        "the check's page shows the numbers; delete nothing of the source from S3",
    ),
}

ALL_SOURCES: Final = "(all sources)"
"""Not a valid name of a source."""

LOCATED_READ: Final = 100
"""Located chunks per tick that Dagster shows as failed."""

LEDGER_SHARE: Final = 0.5
"""Share of a tick's time; the rest is for sending."""


@dataclass(frozen=True, slots=True)
class Alert:
    """A message that a condition has `begun`, `goes on` or has `ended` (None)."""

    source: str
    kind: str
    status: str
    condition: Condition | None = None

    @property
    def sentence(self) -> str:
        if self.condition is None:
            return f"{self.source}: '{self.kind}' has ended"
        return self.condition.text

    def as_json(self) -> Mapping[str, Any]:
        severity = (
            None if self.condition is None else "error" if self.condition.severe else "warning"
        )
        return {
            "source": self.source,
            "condition": self.kind,
            "status": self.status,
            "severity": severity,
            "text": self.sentence,
        }


SentTimes = dict[str, dict[str, str]]
"""By source and kind (ISO 8601). A space and one of these marks may follow."""

_WARNING: Final = "warning"  # the alert was a warning
_LOWERED: Final = "lowered"  # the alert was an error, and the condition is a warning now

ESCALATION_PAUSE: Final = timedelta(hours=1)
"""After an alert about an error, a condition that changes to and fro escalates again this late."""


def is_paused(ledger: Ledger) -> bool:
    """Return whether an operator has paused everything."""
    return bool(ledger.controls.current().paused)


def conditions_of(
    progress: Iterable[SourceProgress], settings: Settings, *, paused: bool
) -> dict[str, list[Condition]]:
    """Return the conditions of each source."""
    on_jackal = settings.store.kind == "jackal"
    conditions = {}
    for item in progress:
        source_settings = settings.sources[item.source]
        conditions[item.source] = list(
            find_conditions(
                item, source_settings, settings.alerts, paused=paused, on_jackal=on_jackal
            )
        )
    return conditions


@dataclass(frozen=True)
class AlertCursor:
    """By channel: `webhook` or `mail`."""

    sent: dict[str, SentTimes] = field(default_factory=dict)

    @classmethod
    def read(cls, written: str | None) -> "AlertCursor":
        """An invalid cursor is empty."""
        try:
            sent: dict[str, SentTimes] = json.loads(written or "{}").get(_SENT_KEY, {})
            times = [
                time.partition(" ")[0]
                for sources in sent.values()
                for kinds in sources.values()
                for time in kinds.values()
            ]
            is_valid = all(datetime.fromisoformat(time).tzinfo for time in times)
            return cls(sent) if is_valid else cls()
        except (ValueError, TypeError, AttributeError):
            return cls()

    def written(self) -> str:
        return json.dumps({_SENT_KEY: self.sent})


@dataclass(frozen=True)
class LedgerState:
    """The state of all sources; `copies` only of the observed ones.

    `located` has the located chunks among the failed ones, with their recipients.
    """

    paused: bool
    progress: Sequence[SourceProgress]
    copies: Mapping[tuple[str, str], int]
    conditions: Mapping[str, list[Condition]]
    located: Sequence[tuple[Chunk, Sequence[str]]]


class AlertTick:
    """One tick for all sources."""

    def __init__(
        self,
        context: SensorEvaluationContext,
        settings: Settings,
        *,
        keys: AssetKeys,
        tick_seconds: float,
    ) -> None:
        self._context = context
        self._settings = settings
        self._keys = keys
        self._tick_seconds = tick_seconds
        self._deadline = Deadline(tick_seconds)
        self._cursor = AlertCursor.read(context.cursor)

    def read_ledger(
        self, observed: Sequence[str], failed: Mapping[str, Collection[str]]
    ) -> LedgerState:
        """Raises Overdue or LedgerError. `failed` has chunks by source, which may be located."""
        from caf_pipeline.ledger.database import describe_database

        def read() -> LedgerState:
            ledger: Ledger = self._context.resources.caf_ledger.get()
            paused, progress = is_paused(ledger), ledger.progress.of(list(self._settings.sources))
            return LedgerState(
                paused,
                progress,
                ledger.progress.copy_counts(list(observed)) if observed else {},
                conditions_of(progress, self._settings, paused=paused),
                [*islice(_located(ledger, failed), LOCATED_READ)],
            )

        deadline = Deadline(self._tick_seconds * LEDGER_SHARE)
        return ask_in_time(self._context, deadline, describe_database(self._settings), read)

    def result(self, state: LedgerState) -> SensorResult:
        conditions = {source: list(items) for source, items in state.conditions.items()}
        checks = failed_checks(self._context.instance, list(conditions), self._keys)
        for source, condition in checks:
            conditions[source].append(condition)
        number = sum(map(len, conditions.values()))
        counts = f"{counted(number, 'condition')} in {counted(len(conditions), 'source')}"
        report = self._send_due(
            {**conditions, ALL_SOURCES: []}, DELAYS if state.paused else frozenset()
        )
        return SensorResult(skip_reason=f"{counts}; {report}.", cursor=self._cursor.written())

    def result_without_ledger(self, error: Overdue | LedgerError) -> SensorResult:
        """Send an alert that the ledger is away; raise the error if no channel is configured."""
        away = Condition(
            ConditionKind.LEDGER_AWAY,
            True,
            str(error),
            "without it nothing can be planned, archived or looked up",
        )
        unknown: dict[str, list[Condition]] = {source: [] for source in self._settings.sources}
        report = self._send_due({**unknown, ALL_SOURCES: [away]}, frozenset(ConditionKind))
        if not self._cursor.sent:
            raise error
        return SensorResult(skip_reason=f"{error}; {report}.", cursor=self._cursor.written())

    def _send_due(
        self, conditions: Mapping[str, Sequence[Condition]], undecided: Collection[str]
    ) -> str:
        # Raises AlertNotSent if a channel failed and no other channel sent anything; the cursor is
        # then unchanged.
        settings, sent = self._settings.alerts, self._cursor.sent
        channels = {}
        if settings.webhook:
            channels["webhook"] = ("the webhook", _post)
        if settings.mail_to:
            channels["mail"] = (", ".join(settings.mail_to), _mail)
        if not channels:
            sent.clear()
            return "[alerts] has neither webhook nor mail_to"
        succeeded, failed = list[str](), list[str]()
        for number, (channel, (recipient, send)) in enumerate(channels.items()):
            alerts, then = due_alerts(
                conditions, sent.get(channel, {}), datetime.now(UTC), settings, undecided=undecided
            )
            if not alerts:
                sent[channel] = then
                continue
            seconds = self._deadline.left() / (len(channels) - number)
            try:
                note = send(alerts, settings, Deadline(seconds))
            except (AlertNotSent, Overdue) as error:
                failed.append(with_hint(error))
            else:
                sent[channel] = then
                succeeded.append(f"{counted(len(alerts), 'alert')} sent to {recipient}{note}")
        if failed and not succeeded:
            raise AlertNotSent("; ".join(failed), hint="the next tick sends it again")
        return "; ".join([*succeeded, *failed]) or "nothing to send"


def _located(
    ledger: Ledger, failed: Mapping[str, Collection[str]]
) -> Iterator[tuple[Chunk, Sequence[str]]]:
    for source, names in failed.items():
        for chunk in ledger.chunks.located_among(source, names, LOCATED_READ) if names else ():
            yield chunk, ledger.chunks.recipients(chunk.name)


def due_alerts(
    conditions: Mapping[str, Sequence[Condition]],
    sent: Mapping[str, Mapping[str, str]],
    now: datetime,
    settings: AlertSettings,
    *,
    undecided: Collection[str] = (),
) -> tuple[list[Alert], SentTimes]:
    """Return the alerts to send, and the times to record once they are sent.

    Kinds in `undecided` do not count as ended if `conditions` lacks them.
    """
    alerts: list[Alert] = []
    then: SentTimes = {}
    for source, source_conditions in conditions.items():
        before = sent.get(source, {})
        for condition in source_conditions:
            last, _, mark = before.get(condition.kind, "").partition(" ")
            age = now - datetime.fromisoformat(last) if last else timedelta()
            # A future time was written by a wrong clock.
            again = settings.repeat_after and not timedelta() <= age < timedelta(
                seconds=settings.repeat_after
            )
            escalated = condition.severe and (
                mark == _WARNING or (mark == _LOWERED and not timedelta() <= age < ESCALATION_PAUSE)
            )
            if not last or again or escalated:
                status = "goes on" if last else "begun"
                alerts.append(Alert(source, condition.kind, status, condition))
                last, mark = now.isoformat(), "" if condition.severe else _WARNING
            elif not condition.severe:
                mark = mark or _LOWERED
            then.setdefault(source, {})[condition.kind] = f"{last} {mark}".rstrip()
        missing = before.keys() - {condition.kind for condition in source_conditions}
        if kept := {kind: before[kind] for kind in missing & {*undecided}}:
            then.setdefault(source, {}).update(kept)
        ended = missing - {*undecided}
        alerts += [Alert(source, kind, "ended") for kind in sorted(ended)]
    return alerts, then


def _post(alerts: Sequence[Alert], settings: AlertSettings, deadline: Deadline) -> str:
    assert settings.webhook
    body = {"text": _text(alerts), "alerts": [alert.as_json() for alert in alerts]}
    deadline.ask(
        "the webhook",
        partial(post_json, settings.webhook.get_secret_value(), body, seconds=deadline.left()),
    )
    return ""


def _mail(alerts: Sequence[Alert], settings: AlertSettings, deadline: Deadline) -> str:
    # If the server refuses some recipients, the result names them. The mail is not sent again,
    # since the other recipients would get it twice.
    subject = (
        f"caf-pipeline: {alerts[0].sentence}"
        if len(alerts) == 1
        else f"caf-pipeline: {len(alerts)} alerts"
    )
    mail = partial(
        send_mail,
        subject,
        _text(alerts),
        sender=settings.mail_from,
        to=settings.mail_to,
        host=settings.smtp_host,
        port=settings.smtp_port,
        security=settings.smtp_security,
        login=(settings.smtp_user, settings.smtp_password.get_secret_value())
        if settings.smtp_password
        else None,
        seconds=deadline.left(),
    )
    server = f"the mail server {settings.smtp_host}:{settings.smtp_port}"
    refused = deadline.ask(server, mail)
    return f", but {server} refuses {', '.join(refused)}: check alerts.mail_to" if refused else ""


def _text(alerts: Sequence[Alert]) -> str:
    return "\n".join(alert.sentence for alert in alerts)


def last_evaluations(
    instance: DagsterInstance, keys: Sequence[AssetCheckKey]
) -> tuple[Mapping[AssetCheckKey, AssetCheckEvaluation], Collection[AssetCheckKey]]:
    """Return the last evaluation of each check, and the checks without a current one.

    A later run has yet to evaluate those, or ended before it did.
    """
    log = instance.event_log_storage
    latest = log.get_latest_asset_check_execution_by_key(keys)
    unevaluated = {key for key, record in latest.items() if record.status not in EVALUATED}
    records = [record for key, record in latest.items() if key not in unevaluated]
    for key in unevaluated:
        records += log.get_asset_check_execution_history(key, limit=1, status=EVALUATED)
    return {record.key: record.evaluation for record in records if record.evaluation}, unevaluated


def failed_checks(
    instance: DagsterInstance, sources: Sequence[str], keys: AssetKeys
) -> Iterator[tuple[str, Condition]]:
    """Yield a condition for each of `CHECKS_WITH_ALERTS` that failed last."""
    checks = {
        keys.check_key(source, CHECKED_ASSET, name): (source, name)
        for source in sources
        for name in CHECKS_WITH_ALERTS
    }
    last, _ = last_evaluations(instance, list(checks))
    for key, (source, name) in checks.items():
        evaluation = last.get(key)
        if evaluation and not evaluation.passed:
            kind, hint = CHECKS_WITH_ALERTS[name]
            sentence = f"the check {name} of {source} failed"
            if evaluation.description:
                sentence += f", {evaluation.description.rstrip('.')}"
            severe = evaluation.severity is AssetCheckSeverity.ERROR
            yield source, Condition(kind, severe, sentence, hint)
