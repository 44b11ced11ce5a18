"""What `caf run` came to for a source: in numbers, as an exit status, and in a sentence."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from caf_pipeline.errors import CafError
from caf_pipeline.inventory.objects import SkipReason, VersionCounts, versions_as_json
from caf_pipeline.ledger.records import WaitingObjects
from caf_pipeline.system.quantities import counted, show_size

CHUNKS_FAILED: Final = 12
HELD_BY_OTHERS: Final = 13
TO_BE_TRIED_AGAIN: Final = 14
WAITING: Final = 15
DAMAGED: Final = 18
NOTHING_LISTED: Final = 19
"""Exit statuses of a command that came to its end, where not everything is located; the first that
applies.
"""

NOT_ARCHIVABLE: Final = frozenset({SkipReason.UNSUPPORTED_KEY, SkipReason.TOO_LARGE})
"""Reasons of skips that no later run could do anything about."""


@dataclass(frozen=True, slots=True)
class InventoryTotals:
    """How many objects of one inventory are located, claimed or skipped in the ledger.

    Attributes: snapshot: the inventory's name. unaccounted: objects that are neither located, nor
        claimed by a chunk, nor skipped: no plan has them yet. skipped: numbers by reason. left_out:
        numbers by the filter that leaves the objects out. all_versions, beside: of the inventory's
        snapshot.
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
        """How many objects wait for more, so that their chunk is not too small."""
        return self.skipped.get(SkipReason.WAITING, 0)

    @property
    def again(self) -> int:
        """How many objects a later run tries again, or for the first time; those that wait are not
        among them.
        """
        left = {SkipReason.WAITING, *NOT_ARCHIVABLE}
        return self.unaccounted + sum(
            count for reason, count in self.skipped.items() if reason not in left
        )

    @property
    def only_waits(self) -> bool:
        """Whether nothing but objects that wait keeps the source from being complete."""
        return bool(self.waiting) and not self.claimed and not self.again

    @property
    def complete(self) -> bool:
        """Whether everything is located that can be."""
        not_archivable = sum(
            count for reason, count in self.skipped.items() if reason in NOT_ARCHIVABLE
        )
        located = self.located + not_archivable + sum(self.left_out.values())
        return not self.claimed and not self.again and not self.waiting and located == self.objects


@dataclass(slots=True)
class Summary:
    """What the command came to for one source.

    Attributes: chunks: names of those that had work to do and were tried. failed: those of them
        that failed, with the error of each. held: those that another live run works on. archived:
        how many of them this command archived; what another run archived meanwhile is not among
        them. empty: those of which this command skipped every object. not_tried: those that were
        left alone, since the same error would have met them. planning: the live run that plans this
        source; "" where this command planned it. parked: how many chunks wait for an operator.
        damaged: how many stored chunks have fewer right copies than they are to have, or none.
        objects: located by this command; one in parts by whose run was the last of them.
        size_bytes: of what the chunks that it archived have of objects, also of those that have
        parts elsewhere. totals: of this command's own whole inventory, asked for at the end.
        waiting: what of the source waits for the next plan; None where nothing does. ever_planned:
        whether any chunk of the source was ever planned.
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
    ever_planned: bool = True

    @property
    def nothing_listed(self) -> bool:
        """True if the inventory lists no object, and no object was ever planned: bucket or prefix
        may be wrong.
        """
        return self.totals is not None and not self.totals.objects and not self.ever_planned

    @property
    def complete(self) -> bool:
        """Whether everything that the inventory has is located, but for what can never be, and no
        chunk is damaged.
        """
        return self.all_located and not self.damaged

    @property
    def all_located(self) -> bool:
        """Whether everything that the inventory has is located, but for what can never be."""
        return self.totals is not None and self.totals.complete and not self.nothing_listed

    @property
    def exit_status(self) -> int:
        """0 only where everything is located that can be, nothing failed, and no chunk is
        damaged.
        """
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
        """Return all of it in numbers, and the errors in words."""
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
            "errors": [
                {"chunk": name, "error": str(error), "hint": error.hint or None}
                for name, error in self.failed.items()
            ],
        }


def exit_status(summaries: Sequence[Summary]) -> int:
    """Return the exit status of the command: of all its sources, the first that applies."""
    return min((summary.exit_status for summary in summaries if summary.exit_status), default=0)


def sentence(summary: Summary) -> str:
    """Return it in one line."""
    located = show_size(summary.size_bytes)
    done = (
        f"{summary.source}: {counted(summary.archived, 'chunk')} archived, "
        f"{counted(summary.objects, 'object')}, {located}"
    )
    if not summary.chunks:
        done = f"{summary.source}: nothing {'new' if summary.all_located else 'to do now'}"
    counts = [
        f"{summary.empty} empty, since every object was skipped" if summary.empty else "",
        f"{len(summary.failed)} failed" if summary.failed else "",
        f"{len(summary.held)} held by other runs" if summary.held else "",
        f"{len(summary.not_tried)} not tried" if summary.not_tried else "",
        f"{summary.parked} parked ('caf status' says why)" if summary.parked else "",
        _where_all_is(summary),
        f"but {summary.damaged} damaged ('caf repair {summary.source}' mends that)"
        if summary.damaged
        else "",
    ]
    return "; ".join([done, *(count for count in counts if count)])


def _where_all_is(summary: Summary) -> str:
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
    said = [f"{count:,} left out by {name}" for name, count in totals.left_out.items()]
    if totals.beside.older and not totals.all_versions:
        said.append(f"{counted(totals.beside.older, 'older version')} left out by versions")
    skipped = ", ".join(said + [f"{count:,} skipped as {reason}" for reason, count in skips])
    if totals.complete:
        whole = "everything is located" if summary.damaged else "the source is complete"
        return f"{whole} but for {skipped}" if skipped else whole
    claimed = f"{totals.claimed:,} claimed by chunks" if totals.claimed else ""
    unaccounted = f"{totals.unaccounted:,} not planned" if totals.unaccounted else ""
    waiting = _who_waits(summary.waiting) if totals.waiting and summary.waiting else ""
    return (
        "not everything is located yet: "
        f"{', '.join(part for part in (claimed, skipped, unaccounted, waiting) if part)}"
    )


def _who_waits(waiting: WaitingObjects) -> str:
    return (
        f"{counted(waiting.objects, 'object')} ({show_size(waiting.size_bytes)}) wait until the "
        "source has more for a chunk of"
        f" min_chunk_size; the first plan after {waiting.until:%Y-%m-%d %H:%M:%S} UTC takes what "
        "waits in any case"
    )
