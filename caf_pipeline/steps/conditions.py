"""What an operator is to know of a source: conditions that last until somebody or something ends
them, from the ledger alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from caf_pipeline.chunk_state import CLAIMING, IN_GOOD_STANDING, UNDER_WAY, ChunkState
from caf_pipeline.ledger.records import SourceProgress
from caf_pipeline.settings import AlertSettings, SourceSettings
from caf_pipeline.steps.inventories import MAX_REPORT_AGE
from caf_pipeline.system.quantities import counted


class ConditionKind(StrEnum):
    """The kinds, by their names in alerts. A source has at most one condition of each kind.

    The last three are found elsewhere than in the ledger: see `defs.alerting`.
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
"""What a pause explains."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that is wrong with a source.

    Attributes:
        severe: nothing ends it by itself.
        sentence: what is wrong.
        hint: what to do.
    """

    kind: ConditionKind
    severe: bool
    sentence: str
    hint: str

    @property
    def text(self) -> str:
        """Both, as people read them."""
        return f"{self.sentence}: {self.hint}"


def find_conditions(
    progress: SourceProgress,
    settings: SourceSettings,
    alerts: AlertSettings,
    *,
    paused: bool,
    on_jackal: bool,
) -> Iterator[Condition]:
    """Yield the conditions of a source.

    While everything is paused, delays are left out: the pause explains them.

    `on_jackal`: stored chunks are to be looked at all the time.
    """
    name, late = progress.source, timedelta(seconds=alerts.late_after)
    if damaged := progress.sums([ChunkState.DAMAGED]).chunks:
        hint = f"`caf repair {name}`, or its repair job, stores them again from what is left"
        yield Condition(
            ConditionKind.DAMAGED, True, f"{counted(damaged, 'chunk')} of {name} damaged", hint
        )
    if parked := progress.sums([ChunkState.PARKED]).chunks:
        hint = f"`caf status {name}` says why; mend it, then `caf unpark` or `caf withdraw` each"
        yield Condition(
            ConditionKind.PARKED, True, f"{counted(parked, 'chunk')} of {name} parked", hint
        )
    if progress.unknown_posts:
        sentence = (
            f"{counted(progress.unknown_posts, 'post')} of {name} unknown to the ledger: "
            "nothing is packed or posted"
        )
        yield Condition(
            ConditionKind.UNKNOWN_POSTS,
            True,
            sentence,
            "`caf doctor` takes what the store has into the ledger",
        )
    if not paused:
        yield from _delays(progress, settings, alerts)
    if progress.noticed_at and progress.at - progress.noticed_at > late and not paused:
        keys = counted(progress.noticed_keys, "key")
        said = (
            f"{keys} of {name} named by events and not listed since, the first "
            f"{_ago(progress.noticed_at, progress)}"
        )
        hint = f"see the ticks of the sensor for new objects of {name}, and `caf runs {name}`"
        yield Condition(ConditionKind.UNLISTED_EVENTS, False, said, hint)
    if (
        settings.queue
        and progress.queue_read_at
        and progress.at - progress.queue_read_at > late
        and not paused
    ):
        ago = _ago(progress.queue_read_at, progress)
        said = f"the queue of {name} was not read since {ago}: inventories alone see what is new"
        hint = f"the ticks of the sensor for new objects of {name} say why; see that it is on"
        yield Condition(ConditionKind.QUEUE_UNREAD, False, said, hint)
    looked_at = progress.looked_at or progress.located_at
    if on_jackal and looked_at and progress.at - looked_at > late and not paused:
        said = f"no stored chunk of {name} was looked at since {_ago(looked_at, progress)}"
        hint = (
            f"`caf runs {name}` shows why runs of its proof watch failed; see its hourly "
            "schedule, and that the chain answers"
        )
        yield Condition(ConditionKind.UNWATCHED, False, said, hint)
    if progress.messages_set_apart:
        said = f"{counted(progress.messages_set_apart, 'message')} of the queue of {name} set apart"
        yield Condition(
            ConditionKind.MESSAGES_SET_APART, False, said, f"`caf queue {name}` shows why"
        )
    objects = progress.skipped_objects + progress.sums([*IN_GOOD_STANDING, *CLAIMING]).objects
    if progress.skipped_objects > objects * alerts.skipped_share:
        said = f"{progress.skipped_objects:,} of {counted(objects, 'object')} of {name} skipped"
        hint = f"`caf status {name}` has the reasons; most are tried again by themselves"
        yield Condition(ConditionKind.SKIPPED, False, said, hint)


def _delays(
    progress: SourceProgress, settings: SourceSettings, alerts: AlertSettings
) -> Iterator[Condition]:
    name, under_way = progress.source, counted(progress.sums(UNDER_WAY).chunks, "chunk")
    moved, oldest, inventory = progress.moved_at, progress.oldest_planned_at, progress.inventory_at
    if (
        inventory is None and settings.automatic
    ):  # else nothing plans the source by itself, and no plan is late
        inventory = progress.registered_at
    late = timedelta(seconds=alerts.late_after)
    still = max(oldest, moved or oldest) if oldest else progress.at
    if progress.at - still > timedelta(seconds=alerts.stalled_after):
        said = (
            f"nothing moves of {name}: {under_way} under way, and the last change of any was "
            f"{_ago(still, progress)}"
        )
        hint = (
            f"`caf runs {name}` shows what runs and why runs failed; see that Dagster's daemon "
            "and its sensors run"
        )
        yield Condition(ConditionKind.STALLED, True, said, hint)
    if oldest and progress.at - oldest > timedelta(seconds=settings.max_wait) + late:
        said = (
            f"{name} is late: {under_way} under way, of which the oldest was planned "
            f"{_ago(oldest, progress)}"
        )
        hint = (
            f"`caf status {name} --watch` says how long it takes; raise runs.max_in_flight, or "
            "alerts.late_after"
        )
        yield Condition(ConditionKind.LATE, False, said, hint)
    if inventory and progress.at - inventory > (
        max(late, MAX_REPORT_AGE) if settings.inventory else late
    ):
        said = (
            f"the last whole inventory of {name} that was planned is of {_ago(inventory, progress)}"
            if progress.inventory_at
            else f"no whole inventory of {name}, which is known since {_ago(inventory, progress)}, "
            "was ever planned"
        )
        hint = (
            f"see its daily schedule, and `caf runs {name}` for the runs of its plan"
            if settings.automatic
            else f"`caf run {name}` archives what is new, or set automatic = true in "
            f"[sources.{name}]"
        )
        yield Condition(ConditionKind.NO_INVENTORY, False, said, hint)
    if inventory and inventory - progress.at > late:
        to_come = f"{inventory.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        said = (
            f"the last whole inventory of {name} that was planned is of a time to come, {to_come}"
        )
        hint = (
            "until then it counts as later than all others: set the clock of the S3 server "
            "right, or this one's"
        )
        yield Condition(ConditionKind.NO_INVENTORY, False, said, hint)


def _ago(moment: datetime, progress: SourceProgress) -> str:
    hours = (progress.at - moment).total_seconds() / 3600
    return f"{hours:.0f} hours ago" if hours < 48 else f"{hours / 24:.0f} days ago"
