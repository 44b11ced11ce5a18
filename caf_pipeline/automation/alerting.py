"""One tick of the sensor that tells an operator what is wrong with any source, by a webhook and by
e-mail.

Its cursor holds what the webhook and the mailboxes were told, each for itself, since one may be
away while the other is not: a time for each source and kind of condition. What could not be sent
the next tick sends. To lose the cursor tells what goes on once more.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

from dagster import (
    AssetCheckEvaluation,
    AssetCheckKey,
    AssetCheckSeverity,
    AssetKey,
    DagsterInstance,
    SensorEvaluationContext,
    SensorResult,
)

from caf_pipeline.automation.tick import ask_in_time
from caf_pipeline.defs.naming import CHECKED_ASSET, PLAN_ACCOUNTS, STORAGE_PLAN_LASTS, asset_key
from caf_pipeline.errors import AlertNotSent, LedgerError, with_hint
from caf_pipeline.ledger.database import describe_database
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import SourceProgress
from caf_pipeline.settings import AlertSettings, Settings
from caf_pipeline.steps.conditions import DELAYS, Condition, ConditionKind, find_conditions
from caf_pipeline.system.deadline import Deadline, Overdue
from caf_pipeline.system.notify import post_json, send_mail
from caf_pipeline.system.quantities import counted

_EVALUATED: Final = {"SUCCEEDED", "FAILED"}
"""Statuses of a check's record that has a result."""

_TOLD: Final = "told by each way"  # no source has such a name

TOLD_CHECKS: Final = {
    STORAGE_PLAN_LASTS: (
        ConditionKind.SPACE_ENDS,
        "`caf jackal buy` buys space; `caf jackal price` says what it costs",
    ),
    PLAN_ACCOUNTS: (
        ConditionKind.UNACCOUNTED,
        "the check's page has the numbers; nothing of the source may be deleted from S3",
    ),
}
"""Checks of other runs whose failure is a condition, and what to do then."""

OF_ALL: Final = "(all sources)"
"""Whose condition it is that the ledger is away; no source has such a name."""

LOOK_SHARE: Final = 0.5
"""Of a tick's time, for the ledger: where it is silent, the rest is for telling it."""


@dataclass(frozen=True, slots=True)
class Alert:
    """What is sent of a condition.

    `status` is `begun`, `goes on` or `ended`; of one that ended only its kind is known.
    """

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


Told = dict[str, dict[str, str]]
"""When an alert was last sent, by source and kind of condition.

A space and "warning" follow if it was not an error.
"""

_WARNING: Final = "warning"


def is_paused(ledger: Ledger) -> bool:
    """Tell whether an operator has everything paused."""
    return bool(ledger.controls.current().paused)


def conditions_of(
    progress: Iterable[SourceProgress], settings: Settings, *, paused: bool
) -> dict[str, list[Condition]]:
    """Return what is wrong with each source."""
    on_jackal = settings.store.kind == "jackal"
    return {
        one.source: list(
            find_conditions(
                one,
                settings.sources[one.source],
                settings.alerts,
                paused=paused,
                on_jackal=on_jackal,
            )
        )
        for one in progress
    }


@dataclass(frozen=True)
class AlertCursor:
    """When each alert was last sent, by the way that it was sent.

    One that was written by hand and is none is empty.
    """

    told: dict[str, Told] = field(default_factory=dict)

    @classmethod
    def read(cls, written: str | None) -> "AlertCursor":
        """Return the cursor of the tick before."""
        try:
            told: dict[str, Told] = json.loads(written or "{}").get(_TOLD, {})
            times = [
                at
                for sources in told.values()
                for kinds in sources.values()
                for at in kinds.values()
            ]
            return (
                cls(told)
                if all(datetime.fromisoformat(at.partition(" ")[0]).tzinfo for at in times)
                else cls()
            )
        except (ValueError, TypeError, AttributeError):
            return cls()

    def written(self) -> str:
        """Return the cursor for the next tick."""
        return json.dumps({_TOLD: self.told})


@dataclass(frozen=True)
class SourcesSeen:
    """What a tick read in the ledger.

    Attributes:
        paused: an operator has everything paused.
        progress: of all sources.
        copies: of the observed sources; see `Progress.copy_counts`.
        conditions: what is wrong with each source.
    """

    paused: bool
    progress: Sequence[SourceProgress]
    copies: Mapping[tuple[str, str], int]
    conditions: Mapping[str, list[Condition]]


class AlertTick:
    """One tick for all sources: what is wrong, and whom to tell."""

    def __init__(
        self, context: SensorEvaluationContext, settings: Settings, tick_seconds: float
    ) -> None:
        self._context = context
        self._settings = settings
        self._tick_seconds = tick_seconds
        self._deadline = Deadline(tick_seconds)
        self._cursor = AlertCursor.read(context.cursor)

    def look(self, observed: Sequence[str]) -> SourcesSeen:
        """Read what is wrong with each source; copies are counted for the `observed` ones.

        Raises:
            Overdue: the ledger did not answer in time. LedgerError.
        """

        def read() -> tuple[bool, Sequence[SourceProgress], Mapping[tuple[str, str], int]]:
            ledger: Ledger = self._context.resources.ledger.get()
            return (
                is_paused(ledger),
                ledger.progress.of(list(sources)),
                ledger.progress.copy_counts(list(observed)) if observed else {},
            )

        sources, deadline = self._settings.sources, Deadline(self._tick_seconds * LOOK_SHARE)
        paused, progress, copies = ask_in_time(
            self._context, deadline, describe_database(self._settings), read
        )
        return SourcesSeen(
            paused, progress, copies, conditions_of(progress, self._settings, paused=paused)
        )

    def result(self, seen: SourcesSeen) -> SensorResult:
        """Send what is due."""
        found = {source: list(conditions) for source, conditions in seen.conditions.items()}
        for source, condition in failed_checks(self._context.instance, list(found)):
            found[source].append(condition)
        counts = (
            f"{counted(sum(map(len, found.values())), 'condition')} in "
            f"{counted(len(found), 'source')}"
        )
        said = self._send({**found, OF_ALL: []}, DELAYS if seen.paused else frozenset())
        return SensorResult(skip_reason=f"{counts}; {said}.", cursor=self._cursor.written())

    def result_without_ledger(self, error: Overdue | LedgerError) -> SensorResult:
        """Send that the ledger is away, or raise the error if nobody is ever told anything."""
        away = Condition(
            ConditionKind.LEDGER_AWAY,
            True,
            str(error),
            "nothing is planned, archived or looked up without it",
        )
        unknown: dict[str, list[Condition]] = {source: [] for source in self._settings.sources}
        said = self._send({**unknown, OF_ALL: [away]}, frozenset(ConditionKind))
        if not self._cursor.told:
            raise error
        return SensorResult(skip_reason=f"{error}; {said}.", cursor=self._cursor.written())

    def _send(self, found: Mapping[str, Sequence[Condition]], explained: Collection[str]) -> str:
        return _send_due(found, self._cursor.told, explained, self._settings, self._deadline)


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
            again = settings.repeat_after and not timedelta() <= age < timedelta(
                seconds=settings.repeat_after
            )
            if not last or again or escalated:
                last_sent = now.isoformat()
                alerts.append(Alert(source, one.kind, "goes on" if last else "begun", one))
            else:
                last_sent = last
            then.setdefault(source, {})[one.kind] = (
                last_sent if one.severe else f"{last_sent} {_WARNING}"
            )
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
    """Send what is due to each that the settings name, and write what it was told into `told`;
    return what to say of it.

    Raises: AlertNotSent: one of them was not reached, and no other one was told anything, so that
        `told` is as it was.
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
        alerts, then = due_alerts(
            found, told.get(name, {}), datetime.now(UTC), its, explained=explained
        )
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
    deadline.ask(
        "the webhook",
        partial(post_json, its.webhook.get_secret_value(), body, seconds=deadline.left()),
    )
    return ""


def _mail(alerts: Sequence[Alert], its: AlertSettings, deadline: Deadline) -> str:
    """Send an e-mail; return what to add where not all got it: it is not sent again, since the
    others would get it again.
    """
    subject = (
        f"caf-pipeline: {alerts[0].sentence}"
        if len(alerts) == 1
        else f"caf-pipeline: {len(alerts)} alerts"
    )
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


def last_evaluations(
    instance: DagsterInstance, keys: Sequence[AssetCheckKey]
) -> tuple[Mapping[AssetCheckKey, AssetCheckEvaluation], Collection[AssetCheckKey]]:
    """Return the last evaluation of each check that has any, and the checks that a later run is to
    evaluate, or did not.
    """
    storage = instance.event_log_storage
    latest = storage.get_latest_asset_check_execution_by_key(keys)
    unevaluated = {key for key, record in latest.items() if record.status.value not in _EVALUATED}
    records = [record for key, record in latest.items() if key not in unevaluated]
    for key in unevaluated:
        # Dagster exports the type of a status nowhere; a record has it.
        evaluated = {status for status in type(latest[key].status) if status.value in _EVALUATED}
        records += storage.get_asset_check_execution_history(key, limit=1, status=evaluated)
    return {record.key: record.evaluation for record in records if record.evaluation}, unevaluated


def failed_checks(
    instance: DagsterInstance, sources: Sequence[str]
) -> Iterator[tuple[str, Condition]]:
    """Yield a condition of a source for each of `TOLD_CHECKS` that failed when it was last
    evaluated.
    """
    keys = {
        AssetCheckKey(AssetKey(asset_key(source, CHECKED_ASSET)), name): (source, name)
        for source in sources
        for name in TOLD_CHECKS
    }
    last, _ = last_evaluations(instance, list(keys))
    for key, (source, name) in keys.items():
        evaluation = last.get(key)
        if evaluation and not evaluation.passed:
            kind, hint = TOLD_CHECKS[name]
            said = f"the check {name} of {source} failed" + (
                f", {evaluation.description}" if evaluation.description else ""
            )
            yield (
                source,
                Condition(
                    kind, evaluation.severity is AssetCheckSeverity.ERROR, said.rstrip("."), hint
                ),
            )
