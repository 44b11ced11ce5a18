"""Conditions of a source that an operator should know, from the ledger alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from caf_pipeline.chunk_state import CLAIMING, IN_GOOD_STANDING, UNDER_WAY, ChunkState
from caf_pipeline.ledger.records import SourceProgress
from caf_pipeline.settings import AlertSettings, SourceSettings
from caf_pipeline.system.quantities import counted, show_age

MAX_REPORT_AGE: Final = timedelta(days=9)
"""A week between two inventory reports, plus the 48 hours that S3 takes for one."""


class ConditionKind(StrEnum):
    """The kinds, by their names in alerts. A source has at most one condition of each kind.

    `automation.alerting` finds the last three, which are not in the ledger.
    """

    DAMAGED = "damaged"
    PARKED = "parked"
    UNKNOWN_POSTS = "unknown_posts"
    STALLED = "stalled"
    LATE = "late"
    NO_INVENTORY = "no_inventory"
    QUEUE_UNREAD = "queue_unread"
    UNLISTED_EVENTS = "unlisted_events"
    UNWATCHED = "unwatched"
    MESSAGES_SET_APART = "messages_set_apart"
    SKIPPED = "skipped"
    SPACE_ENDS = "space_ends"
    UNACCOUNTED = "unaccounted"
    LEDGER_AWAY = "ledger_away"


DELAYS: Final = frozenset(
    {
        ConditionKind.STALLED,
        ConditionKind.LATE,
        ConditionKind.NO_INVENTORY,
        ConditionKind.QUEUE_UNREAD,
        ConditionKind.UNLISTED_EVENTS,
        ConditionKind.UNWATCHED,
    }
)
"""Conditions that a pause explains."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that is wrong with a source. It is `severe` if it lasts until someone acts."""

    kind: ConditionKind
    severe: bool
    sentence: str
    hint: str

    @property
    def text(self) -> str:
        return f"{self.sentence}: {self.hint}"


def find_conditions(
    progress: SourceProgress,
    settings: SourceSettings,
    alerts: AlertSettings,
    *,
    paused: bool,
    on_jackal: bool,
) -> Iterator[Condition]:
    """Yield the conditions of a source, without delays while everything is paused.

    `on_jackal` means that stored chunks should be checked regularly.
    """
    name = progress.source
    if damaged := progress.sums([ChunkState.DAMAGED]).chunks:
        yield Condition(
            ConditionKind.DAMAGED,
            True,
            f"{counted(damaged, 'chunk')} of {name} damaged",
            f"`caf repair {name}`, or its repair job, stores them again from intact copies",
        )
    if parked := progress.sums([ChunkState.PARKED]).chunks:
        yield Condition(
            ConditionKind.PARKED,
            True,
            f"{counted(parked, 'chunk')} of {name} parked",
            f"`caf status {name}` shows why; fix it, then `caf unpark` or `caf withdraw` each",
        )
    if progress.unknown_posts:
        yield Condition(
            ConditionKind.UNKNOWN_POSTS,
            True,
            f"{counted(progress.unknown_posts, 'post')} of {name} missing from the ledger: nothing "
            "is packed or posted",
            "`caf doctor` adds them to the ledger, or shows what to do",
        )
    if not paused:
        yield from _delays(progress, settings, alerts, on_jackal=on_jackal)
    if progress.messages_set_apart:
        yield Condition(
            ConditionKind.MESSAGES_SET_APART,
            False,
            f"{counted(progress.messages_set_apart, 'message')} of the queue of {name} set apart",
            f"`caf queue {name}` shows why",
        )
    objects = progress.skipped_objects + progress.sums([*IN_GOOD_STANDING, *CLAIMING]).objects
    if progress.skipped_objects > objects * alerts.skipped_share:
        yield Condition(
            ConditionKind.SKIPPED,
            False,
            f"{progress.skipped_objects:,} of {counted(objects, 'object')} of {name} skipped",
            f"`caf status {name}` shows the reasons; most objects are retried automatically",
        )


def _delays(
    progress: SourceProgress, settings: SourceSettings, alerts: AlertSettings, *, on_jackal: bool
) -> Iterator[Condition]:
    name, under_way = progress.source, counted(progress.sums(UNDER_WAY).chunks, "chunk")
    moved, oldest, inventory = progress.moved_at, progress.oldest_planned_at, progress.inventory_at
    if inventory is None and settings.automatic:  # otherwise, no plan is due
        inventory = progress.registered_at
    late = timedelta(seconds=alerts.late_after)
    still = max(oldest, moved or oldest) if oldest else progress.at
    if progress.at - still > timedelta(seconds=alerts.stalled_after):
        yield Condition(
            ConditionKind.STALLED,
            True,
            f"{name} is stalled: {under_way} under way, and the last change was "
            f"{_ago(still, progress)}",
            f"`caf runs {name}` shows running and failed runs; check that Dagster's daemon and "
            "sensors run",
        )
    if oldest and progress.at - oldest > timedelta(seconds=settings.max_wait) + late:
        yield Condition(
            ConditionKind.LATE,
            False,
            f"{name} is late: {under_way} under way, the oldest planned {_ago(oldest, progress)}",
            f"`caf status {name} --watch` shows the remaining time; raise runs.max_in_flight or "
            "alerts.late_after",
        )
    inventory_late = max(late, MAX_REPORT_AGE) if settings.inventory else late
    if inventory and progress.at - inventory > inventory_late:
        ago = _ago(inventory, progress)
        yield Condition(
            ConditionKind.NO_INVENTORY,
            False,
            f"the last planned whole inventory of {name} was taken {ago}"
            if progress.inventory_at
            else f"{name} was added {ago}, but no whole inventory of it was planned",
            f"check its daily schedule, and `caf runs {name}` for the runs of its plan"
            if settings.automatic
            else f"run `caf run {name}`, or set automatic = true in [sources.{name}]",
        )
    if inventory and inventory - progress.at > late:
        yield Condition(
            ConditionKind.NO_INVENTORY,
            False,
            f"the last planned whole inventory of {name} has a time in the future, "
            f"{inventory.astimezone(UTC):%Y-%m-%d %H:%M} UTC",
            "until then it supersedes all others: correct the clock of the S3 server or of this "
            "machine",
        )
    if progress.noticed_at and progress.at - progress.noticed_at > late:
        yield Condition(
            ConditionKind.UNLISTED_EVENTS,
            False,
            f"{counted(progress.noticed_keys, 'key')} of {name} named by events but not listed "
            f"since, the first {_ago(progress.noticed_at, progress)}",
            f"check the ticks of the sensor for new objects of {name}, and `caf runs {name}`",
        )
    if settings.queue and progress.queue_read_at and progress.at - progress.queue_read_at > late:
        ago = _ago(progress.queue_read_at, progress)
        yield Condition(
            ConditionKind.QUEUE_UNREAD,
            False,
            f"the queue of {name} was last read {ago}: only inventories find new objects",
            f"check the ticks of the sensor for new objects of {name}, and that it is on",
        )
    looked_at = progress.looked_at or progress.located_at
    if on_jackal and looked_at and progress.at - looked_at > late:
        yield Condition(
            ConditionKind.UNWATCHED,
            False,
            f"the stored chunks of {name} were last checked {_ago(looked_at, progress)}",
            "`caf runs` shows why runs of caf_look failed; check that caf_look_at_sources is on, "
            "that jackal.lcd and a wallet are set, and that the chain answers",
        )


def _ago(moment: datetime, progress: SourceProgress) -> str:
    return show_age(progress.at - moment)
