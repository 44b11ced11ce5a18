"""The result of `caf run` for a source."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from caf_pipeline.errors import CafError
from caf_pipeline.inventory.objects import SkipReason, VersionCounts, versions_as_json
from caf_pipeline.ledger.records import WaitingObjects
from caf_pipeline.system.quantities import counted, show_size, show_time

CHUNKS_FAILED: Final = 12
HELD_BY_OTHERS: Final = 13
TO_BE_TRIED_AGAIN: Final = 14
WAITING: Final = 15
DAMAGED: Final = 18
NOTHING_LISTED: Final = 19

NOT_ARCHIVABLE: Final = frozenset({SkipReason.UNSUPPORTED_KEY, SkipReason.TOO_LARGE})


@dataclass(frozen=True, slots=True)
class InventoryTotals:
    """Counts of one inventory's objects.

    Attributes:
        unaccounted: not planned yet.
        beside: older versions and delete markers of the inventory's keys.
    """

    snapshot: str
    objects: int
    located: int
    claimed: int
    unaccounted: int
    skipped: dict[str, int]
    left_out: dict[str, int] = field(default_factory=dict)
    all_versions: bool = False
    beside: VersionCounts = field(default_factory=VersionCounts)

    @property
    def waiting(self) -> int:
        """Objects whose chunk would be too small."""
        return self.skipped.get(SkipReason.WAITING, 0)

    @property
    def again(self) -> int:
        """Objects that a later run will try, apart from those that wait."""
        excluded = {SkipReason.WAITING, *NOT_ARCHIVABLE}
        return self.unaccounted + sum(
            count for reason, count in self.skipped.items() if reason not in excluded
        )

    @property
    def only_waits(self) -> bool:
        return bool(self.waiting) and not self.claimed and not self.again

    @property
    def complete(self) -> bool:
        not_archivable = sum(
            count for reason, count in self.skipped.items() if reason in NOT_ARCHIVABLE
        )
        located = self.located + not_archivable + sum(self.left_out.values())
        return not self.claimed and not self.again and not self.waiting and located == self.objects


@dataclass(slots=True)
class Summary:
    """The result for one source.

    Attributes:
        empty: chunks whose every object this command skipped.
        not_tried: chunks that would fail with the same error.
        planning: another live run that lists or plans this source.
        damaged: stored chunks with too few intact copies.
        objects: archived by this command. An object in parts counts with its last part.
        size_bytes: of all objects and parts in the archived chunks.
        retried_at: when the first skipped object may be planned again.
        space_warning: the space on Jackal ends soon, or earlier than before.
        totals: of this command's own inventory, counted at the end; None if another run kept it
            from taking one.
    """

    source: str
    chunks: list[str] = field(default_factory=list)
    failed: dict[str, CafError] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    archived: int = 0
    empty: int = 0
    not_tried: list[str] = field(default_factory=list)
    planning: str = ""
    parked: int = 0
    damaged: int = 0
    objects: int = 0
    size_bytes: int = 0
    totals: InventoryTotals | None = None
    waiting: WaitingObjects | None = None
    retried_at: datetime | None = None
    ever_planned: bool = True
    space_warning: str = ""

    @property
    def nothing_listed(self) -> bool:
        """Bucket or prefix may be wrong: there never was an object."""
        return self.totals is not None and not self.totals.objects and not self.ever_planned

    @property
    def complete(self) -> bool:
        return self.all_located and not self.damaged

    @property
    def all_located(self) -> bool:
        return self.totals is not None and self.totals.complete and not self.nothing_listed

    @property
    def exit_status(self) -> int:
        """0 only if all objects are located, no chunk failed, and no chunk is damaged."""
        if self.failed:
            return CHUNKS_FAILED
        if self.nothing_listed:
            return NOTHING_LISTED
        if self.all_located:
            return DAMAGED if self.damaged else 0
        if self.held or self.planning:
            return HELD_BY_OTHERS
        return WAITING if self.totals and self.totals.only_waits else TO_BE_TRIED_AGAIN

    def as_json(self) -> dict[str, object]:
        totals = self.totals
        return {
            "source": self.source,
            "exit_status": self.exit_status,
            "complete": self.complete,
            "inventory": totals.snapshot if totals else None,
            "objects": totals.objects if totals else None,
            "located": totals.located if totals else None,
            "claimed": totals.claimed if totals else None,
            "to_be_tried_again": totals.again if totals else None,
            "skipped": totals.skipped if totals else {},
            "left_out": totals.left_out if totals else {},
            **(versions_as_json(totals.beside, all_versions=totals.all_versions) if totals else {}),
            "retried_at": self.retried_at and self.retried_at.isoformat(),
            "waiting": self.waiting and self.waiting.as_json(),
            "archived_objects": self.objects,
            "archived_bytes": self.size_bytes,
            "chunks": {
                "archived": self.archived,
                "empty": self.empty,
                "failed": len(self.failed),
                "held": len(self.held),
                "not_tried": len(self.not_tried),
                "parked": self.parked,
                "damaged": self.damaged,
            },
            "planned_by": self.planning or None,
            "space_warning": self.space_warning or None,
            "errors": [
                {"chunk": name, "error": str(error), "hint": error.hint or None}
                for name, error in self.failed.items()
            ],
        }


def exit_status(summaries: Sequence[Summary]) -> int:
    """Return the lowest exit status that is not 0."""
    return min((summary.exit_status for summary in summaries if summary.exit_status), default=0)


def sentence(summary: Summary) -> str:
    """Return the summary as one line."""
    located = show_size(summary.size_bytes)
    done = (
        f"{summary.source}: {counted(summary.archived, 'chunk')} archived, "
        f"{counted(summary.objects, 'object')}, {located}"
    )
    if not summary.chunks:
        done = f"{summary.source}: nothing {'new' if summary.all_located else 'to do now'}"
    counts = [
        f"{summary.empty} empty, because every object was skipped" if summary.empty else "",
        f"{len(summary.failed)} failed" if summary.failed else "",
        f"{len(summary.held)} held by other runs" if summary.held else "",
        f"{len(summary.not_tried)} not tried" if summary.not_tried else "",
        f"{summary.parked} parked ('caf status' shows why)" if summary.parked else "",
        _completeness(summary),
        f"but {summary.damaged} damaged ('caf repair {summary.source}' repairs them)"
        if summary.damaged
        else "",
    ]
    return "; ".join([done, *(count for count in counts if count)])


def _completeness(summary: Summary) -> str:
    totals = summary.totals
    if totals is None:
        return "not everything is located yet"
    if summary.nothing_listed:
        return (
            f"the inventory lists no object: check bucket and prefix in [sources.{summary.source}]"
        )
    skips = sorted(
        (reason, count)
        for reason, count in totals.skipped.items()
        if count and reason != SkipReason.WAITING
    )
    left_out = [f"{count:,} left out by {name}" for name, count in totals.left_out.items()]
    if totals.beside.older and not totals.all_versions:
        left_out.append(f"{counted(totals.beside.older, 'older version')} left out by versions")
    skipped = ", ".join([*left_out, *(f"{count:,} skipped as {reason}" for reason, count in skips)])
    if skips and summary.retried_at:
        skipped += f" (the first plan after {show_time(summary.retried_at)} tries again)"
    if totals.complete:
        whole = "everything is located" if summary.damaged else "the source is complete"
        return f"{whole} except for {skipped}" if skipped else whole
    parts = [
        f"{totals.claimed:,} claimed by chunks" if totals.claimed else "",
        skipped,
        f"{totals.unaccounted:,} not planned" if totals.unaccounted else "",
    ]
    if totals.waiting and summary.waiting:
        waiting = summary.waiting
        parts.append(
            f"{counted(waiting.objects, 'object')} ({show_size(waiting.size_bytes)}) wait until "
            "there are enough for a chunk of min_chunk_size, or for the first plan after "
            f"{show_time(waiting.until)}"
        )
    return f"not everything is located yet: {', '.join(filter(None, parts))}"
