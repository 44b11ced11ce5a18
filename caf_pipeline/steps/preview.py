"""What a plan would do and cost, before it is made: estimates, each with what it assumes.

Nothing is written to the ledger.

Source: docs/explanation/planning.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

from caf_pipeline.chunk_state import NOT_POSTED
from caf_pipeline.errors import MnemonicRefused, SettingsError, StoredAlready, StoreError, with_hint
from caf_pipeline.inventory.accounting import account_for_files
from caf_pipeline.inventory.cutting import MAX_CHUNKS
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.inventory.plan import OBJECTS_FILE, ChunkPlan, PlanTerms, WaitingTail
from caf_pipeline.inventory.plan_statistics import PlanStatistics, plan_statistics
from caf_pipeline.inventory.remaining import not_yet_archived
from caf_pipeline.inventory.snapshot import Snapshot
from caf_pipeline.ledger.records import ArchiveRate, PlanRow, WaitingObjects
from caf_pipeline.packing.journal.writer import part_of
from caf_pipeline.run_context import RunContext
from caf_pipeline.settings import SourceSettings
from caf_pipeline.steps import planning
from caf_pipeline.steps.chunk_steps import bytes_to_post
from caf_pipeline.steps.first_plan import refuse_new_archive, refuse_unknown
from caf_pipeline.store.protocol import StorageCost
from caf_pipeline.system.folder_lock import reading

GET_PRICE: Final = 0.0004
"""US dollars for 1,000 GET or HEAD requests: S3 Standard in us-east-1, as it has been for years;
the present price stands at https://aws.amazon.com/s3/pricing/. Other classes and regions cost more,
and retrieval from cold classes comes on top.
"""

EGRESS_PRICE: Final = 0.09
"""US dollars for 1 GiB to the internet, of the first 10 TB in a month, likewise ("Data transfer").

Nothing where the pipeline runs in the bucket's own region.
"""

GIB: Final = 1 << 30

_UNCOUNTED: Final = 1 << 62  # chunks: one plan stands for all, however many real ones it would be


class PlannedChunk(Protocol):
    """A chunk as plans and the ledger have it."""

    @property
    def object_bytes(self) -> int:
        """Bytes of its objects."""

    @property
    def expected_size_bytes(self) -> int:
        """Of the whole file."""


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """What archiving a plan takes, as far as it can be told before.

    Attributes: target_bytes: the size at which chunks are cut. fill: bytes of objects as a share of
        the target, of all chunks but the last of whole objects, or of the only one; 0
            without any.
        expected_bytes: of all chunks, manifests estimated.
        requests: GETs and HEADs at the source. request_usd, egress_usd: their price; None where it
        is not known: an endpoint is set, and no price.
        at_aws: whether no endpoint is set, so that AWS's list prices stand for those that are not
        set.
        storage: what the store asks; None where it asks nothing, or is not known.
        storage_unknown: why it is not known; "" where it is.
        rate: at which the source's chunks were archived of late; None where that was not measured
        yet.
    """

    statistics: PlanStatistics
    chunks: int
    target_bytes: int
    fill: float
    expected_bytes: int
    requests: int
    request_usd: float | None
    egress_usd: float | None
    at_aws: bool
    storage: StorageCost | None
    storage_unknown: str
    rate: ArchiveRate | None

    @property
    def seconds(self) -> float | None:
        """About how long it takes; None where nothing was measured yet."""
        return self.statistics.size_bytes / self.rate.bytes_per_second if self.rate else None

    def as_json(self) -> dict[str, object]:
        """Return all of it as a program reads it."""
        seen, storage = self.statistics, self.storage
        return {
            "objects": seen.objects,
            "bytes": seen.size_bytes,
            "chunks": self.chunks,
            "target_bytes": self.target_bytes,
            "fill": round(self.fill, 4),
            "expected_bytes": self.expected_bytes,
            **seen.as_json(),
            "requests": self.requests,
            "request_usd": self.request_usd,
            "egress_usd": self.egress_usd,
            "copies": storage.copies if storage else None,
            "charged_bytes": storage.charged_bytes if storage else None,
            "storage_days": storage.days if storage else None,
            "storage_ujkl": storage.price_ujkl if storage else None,
            "fees_ujkl": storage.fees_ujkl if storage else None,
            "storage_unknown": self.storage_unknown or None,
            "seconds": self.seconds,
            "measured_chunks": self.rate.chunks if self.rate else 0,
        }


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """How a plan differs from an earlier one, which has this name and time: more is positive."""

    plan: str
    planned_at: datetime
    objects: int
    size_bytes: int
    chunks: int


@dataclass(frozen=True, slots=True)
class PlanPreview:
    """What a plan of a snapshot would do.

    Attributes: located, claimed: objects of the snapshot that a chunk has, or one under way will
        have. left_out: objects that the filters of the source leave out, by the filter. skipped:
        objects that the plan would skip, by reason. waiting: the tail that would wait for the next
        plan. to_compare: objects that were written again with the same ETag and size. They count as
        planned here. The plan leaves out
            those with the archived checksum and headers.
        plans: how many plans it would be; at least so many where several objects are split, each of
        which has its parts in one.
        warning: as of `PlanReport`; that the plan would be refused, since the store may have the
            source already; and what would keep the store from taking all of its chunks.
        previous: the source's last plan.
    """

    snapshot: Snapshot
    located: int
    claimed: int
    left_out: Mapping[str, int]
    skipped: Mapping[str, int]
    waiting: WaitingObjects | None
    to_compare: int
    plans: int
    warning: str
    estimate: PlanEstimate
    previous: PlanRow | None

    @property
    def difference(self) -> PlanDifference | None:
        """How this plan differs from the source's last one; None where there was none."""
        return (
            difference(self.estimate.statistics, self.estimate.chunks, self.previous)
            if self.previous
            else None
        )

    def as_json(self) -> dict[str, object]:
        """Return all of it as a program reads it."""
        last = self.difference
        return {
            "source": self.snapshot.source,
            "inventory": self.snapshot.name,
            "inventory_objects": self.snapshot.object_count,
            "inventory_taken_at": self.snapshot.taken_at.isoformat(),
            "report": self.snapshot.report or None,
            **self.snapshot.versions_as_json(),
            "located": self.located,
            "claimed": self.claimed,
            "left_out": dict(self.left_out),
            "skipped": dict(self.skipped),
            "waiting": self.waiting.as_json() if self.waiting else None,
            "to_compare": self.to_compare,
            "plans": self.plans,
            "warning": self.warning or None,
            **self.estimate.as_json(),
            "last_plan": None
            if last is None
            else {
                "plan": last.plan,
                "planned_at": last.planned_at.isoformat(),
                "objects_more": last.objects,
                "bytes_more": last.size_bytes,
                "chunks_more": last.chunks,
            },
        }


def difference(statistics: PlanStatistics, chunks: int, previous: PlanRow) -> PlanDifference:
    """Return how a plan differs from an earlier one."""
    return PlanDifference(
        plan=previous.record.name,
        planned_at=previous.created_at,
        objects=statistics.objects - previous.record.object_count,
        size_bytes=statistics.size_bytes - previous.record.object_bytes,
        chunks=chunks - sum(previous.chunks.values()),
    )


def preview_plan(context: RunContext, snapshot: Snapshot) -> PlanPreview:
    """Return what a plan of this snapshot would be; the ledger may not know the source yet, and
    learns nothing.

    Raises:
        IntegrityError: the snapshot is damaged. StagingError: there is no room for temporary files.
    """
    known = context.source in context.ledger.lookup.sources()
    with planning.temporary_folder(context) as folder, reading(snapshot.path):
        filters = planning.filters_of(context, snapshot)
        (standing, _), identified = planning.identify_objects(
            context, snapshot, folder, known=known, filters=filters
        )
        delta = not_yet_archived(
            identified.unsettled, standing, folder / "wanted.parquet", filters=filters
        )
        files = folder / "plan"
        files.mkdir()
        sizes, warning = (
            planning.chunk_sizes(context)
            if known
            else (planning.ChunkSizes(int(context.source_settings.target_size)), "")
        )
        terms = planning.plan_terms(context, snapshot, sizes)
        plan = planning.write_plan_of(
            context, snapshot, delta.path, files, _as_one(terms), known=known
        )
        account = account_for_files(
            identified.unsettled,
            standing,
            files / OBJECTS_FILE,
            settled_count=identified.settled_count,
            unsettled_keys=identified.unsettled_keys,
            within=snapshot.keys,
            filters=filters,
            due_skips=False,
        )
        statistics = plan_statistics([files], part_bytes=part_of(context.settings.packing))
        tail = plan.waiting
        in_plan = plan.object_count + (tail.chunk.object_count if tail else 0)
        return PlanPreview(
            snapshot=snapshot,
            located=account.located,
            claimed=account.claimed - in_plan,
            left_out=account.left_out,
            skipped=_skipped(
                account.skipped, unsupported=delta.unsupported_count, too_large=plan.too_large_count
            ),
            waiting=_waiting(context.source_settings, tail),
            to_compare=identified.to_compare_count,
            plans=-(-len(plan.chunks) // MAX_CHUNKS),
            warning="; ".join(
                filter(
                    None,
                    [
                        warning,
                        _refusal(context) if snapshot.object_count else "",
                        _not_posted(context, plan.chunks),
                    ],
                )
            ),
            estimate=estimate_plan(
                context,
                statistics,
                plan.chunks,
                sizes.target_bytes,
                heads=identified.to_compare_count,
            ),
            previous=planning.last_plan(context),
        )


def _refusal(context: RunContext) -> str:
    """Say why a plan would be refused; "" where it would not, or the store cannot be asked."""
    known = context.ledger.sources.address(context.source)
    if known not in (None, context.address):
        addresses = f"{known} in the ledger, and {context.address} in the settings"
        return f"this plan would be refused: source '{context.source}' is {addresses}"
    try:
        refuse_new_archive(context)
        refuse_unknown(context)
    except StoredAlready as error:
        return f"this plan would be refused: {with_hint(error)}"
    except (StoreError, MnemonicRefused):  # an estimate without it is better than none
        pass
    return ""


def _not_posted(context: RunContext, chunks: Sequence[ChunkPlan]) -> str:
    """Say what would keep the store from taking all chunks, as things are; "" where nothing would,
    or it cannot be asked.
    """
    if not chunks:
        return ""
    sizes = [chunk.expected_size_bytes for chunk in chunks]
    largest, others = max(sizes), bytes_to_post(context.ledger, NOT_POSTED)
    try:
        context.store.admit(
            public=context.source_settings.public,
            stored_size_bytes=largest,
            waiting_bytes=others + sum(sizes) - largest,
        )
    except (StoreError, SettingsError) as error:
        return (
            f"as things are, not all of it would be stored: {with_hint(error)}"
            if error.permanent
            else ""
        )
    return ""


def _as_one(terms: PlanTerms) -> PlanTerms:
    return replace(terms, max_chunks=_UNCOUNTED)


def _skipped(skipped: Mapping[str, int], *, unsupported: int, too_large: int) -> dict[str, int]:
    """Return skips by reason, those that this plan would add among them. What waits is told
    apart.
    """
    new = {SkipReason.UNSUPPORTED_KEY: unsupported, SkipReason.TOO_LARGE: too_large}
    both = {
        reason: skipped.get(reason, 0) + new.get(reason, 0)
        for reason in SkipReason
        if reason is not SkipReason.WAITING
    }
    return {str(reason): count for reason, count in both.items() if count}


def _waiting(settings: SourceSettings, tail: WaitingTail | None) -> WaitingObjects | None:
    if tail is None:
        return None
    return WaitingObjects(
        tail.chunk.object_count,
        tail.chunk.object_bytes,
        planning.waits_until(settings, tail.oldest),
    )


def estimate_plan(
    context: RunContext,
    statistics: PlanStatistics,
    chunks: Sequence[PlannedChunk],
    target_bytes: int,
    *,
    heads: int,
) -> PlanEstimate:
    """Return what archiving these chunks takes, which were cut at this size; `heads` requests
    compare headers before.

    `chunks` are in the order in which they were cut, but for those of parts, which come first.
    """
    settings = context.source_settings
    closed = chunks if statistics.parts == len(chunks) else chunks[:-1] or chunks
    checksums = statistics.checksum_requests if context.settings.packing.compare_checksums else 0
    requests = statistics.get_requests + checksums + heads
    expected = sum(chunk.expected_size_bytes for chunk in chunks)
    storage, unknown = _storage(context, expected, len(chunks))
    get_price, egress_price = prices(settings)
    return PlanEstimate(
        statistics=statistics,
        chunks=len(chunks),
        target_bytes=target_bytes,
        fill=sum(chunk.object_bytes for chunk in closed) / (len(closed) * target_bytes)
        if closed
        else 0.0,
        expected_bytes=expected,
        requests=requests,
        request_usd=None if get_price is None else requests / 1000 * get_price,
        egress_usd=None if egress_price is None else statistics.size_bytes / GIB * egress_price,
        at_aws=not settings.endpoint_url,
        storage=storage,
        storage_unknown=unknown,
        rate=context.ledger.chunks.archive_rate(context.source),
    )


def prices(settings: SourceSettings) -> tuple[float | None, float | None]:
    """Return the price of 1,000 GETs and of 1 GiB of egress, as set or as AWS lists them; None:
    another server, and not set.
    """
    at_aws = not settings.endpoint_url
    listed: Iterable[tuple[float | None, float]] = (
        (settings.get_price, GET_PRICE),
        (settings.egress_price, EGRESS_PRICE),
    )
    get_price, egress_price = (
        price if set_price is None and at_aws else set_price for set_price, price in listed
    )
    return get_price, egress_price


def _storage(
    context: RunContext, expected_bytes: int, chunks: int
) -> tuple[StorageCost | None, str]:
    """Return what the store asks, and why that is not known."""
    try:
        return context.store.cost(expected_bytes, chunks), ""
    except (StoreError, MnemonicRefused) as error:  # an estimate without it is better than none
        return None, str(error)


def estimate_report(context: RunContext, report: planning.PlanReport) -> PlanEstimate:
    """Return what archiving the plans of a report takes."""
    folders = [Path(plan.folder) for plan in report.plans]
    statistics = plan_statistics(folders, part_bytes=part_of(context.settings.packing))
    order = [plan.name for plan in report.plans]
    chunks = sorted(report.chunks, key=lambda chunk: (not chunk.part, order.index(chunk.plan)))
    return estimate_plan(
        context, statistics, chunks, report.target_bytes, heads=report.comparison.requests
    )
