"""Estimates what a plan would do and cost. Nothing is written to the ledger.

Source: docs/explanation/planning.md.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from caf_pipeline.chunk_state import CLAIMING, IN_GOOD_STANDING, NOT_POSTED
from caf_pipeline.encryption.identities import (
    SECOND_KEY,
    SINGLE_RECIPIENT,
    has_single_recipient,
    require_recipients,
)
from caf_pipeline.errors import (
    MnemonicRefused,
    NotPublic,
    SettingsError,
    StoredAlready,
    StoreError,
    with_hint,
)
from caf_pipeline.inventory.accounting import account_for_files
from caf_pipeline.inventory.current import identify
from caf_pipeline.inventory.cutting import MAX_CHUNKS
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.inventory.plan import ChunkPlan
from caf_pipeline.inventory.plan_statistics import PlanStatistics, plan_statistics
from caf_pipeline.inventory.remaining import not_yet_archived
from caf_pipeline.inventory.snapshot import Snapshot
from caf_pipeline.ledger.records import ArchiveRate, PlanRow, WaitingObjects
from caf_pipeline.packing.journal.writer import part_of
from caf_pipeline.records import Chunk
from caf_pipeline.run_context import RunContext
from caf_pipeline.settings import SourceSettings
from caf_pipeline.steps import planning
from caf_pipeline.steps.chunk_steps import one_copy_bytes
from caf_pipeline.steps.first_plan import refuse_new_archive, refuse_unknown
from caf_pipeline.store.protocol import StorageCost
from caf_pipeline.system.folder_lock import reading

GET_PRICE: Final = 0.0004
"""US dollars for 1,000 GET or HEAD requests of S3 Standard in us-east-1. Cold classes cost more.

Source: https://aws.amazon.com/s3/pricing/.
"""

PRICES_OF: Final = "June 2026"

EGRESS_PRICE: Final = 0.09
"""US dollars for 1 GiB to the internet, up to 10 TB a month. Free within a region."""

GIB: Final = 1 << 30

_UNLIMITED_CHUNKS: Final = 1 << 62  # the preview is one plan, even if there would be several


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """The estimated cost of archiving a plan.

    Attributes:
        fill: object bytes as a share of the target, without the last chunk.
        request_usd, egress_usd: None if unknown.
        at_aws: whether AWS's list prices are the default.
        storage: None if the store is free or its price unknown.
        rate: recent rate of the source; None before the first chunk.
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
        return self.statistics.size_bytes / self.rate.bytes_per_second if self.rate else None

    def as_json(self) -> dict[str, object]:
        statistics, storage = self.statistics, self.storage
        return {
            "objects": statistics.objects,
            "bytes": statistics.size_bytes,
            "chunks": self.chunks,
            "target_bytes": self.target_bytes,
            "fill": round(self.fill, 4),
            "expected_bytes": self.expected_bytes,
            **statistics.as_json(),
            "requests": self.requests,
            "request_usd": self.request_usd,
            "egress_usd": self.egress_usd,
            "copies": storage.copies if storage else None,
            "charged_bytes": storage.charged_bytes if storage else None,
            "storage_days": storage.days if storage else None,
            "storage_ujkl": storage.price_ujkl if storage else None,
            "storage_usd": storage.list_usd if storage else None,
            "fees_ujkl": storage.fees_ujkl if storage else None,
            "storage_unknown": self.storage_unknown or None,
            "seconds": self.seconds,
            "measured_chunks": self.rate.chunks if self.rate else 0,
        }


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """The difference from an earlier plan. Growth is positive."""

    plan: str
    planned_at: datetime
    objects: int
    size_bytes: int
    chunks: int


@dataclass(frozen=True, slots=True)
class PlanPreview:
    """The plan that a snapshot would get.

    Attributes:
        claimed: objects in chunks under way.
        to_compare: rewritten objects. They count as planned, but those with the archived checksum
            and headers will be left out.
        plans: a minimum if several objects are split.
        warning: as in `PlanReport`, or why plan or chunks would be refused.
        archive: the cost of space for the plan and the source's other chunks. None if unknown or if
            the store charges nothing.
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
    archive: StorageCost | None
    previous: PlanRow | None

    @property
    def difference(self) -> PlanDifference | None:
        return (
            difference(self.estimate.statistics, self.estimate.chunks, self.previous)
            if self.previous
            else None
        )

    def as_json(self) -> dict[str, object]:
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
            "archive_bytes": self.archive.charged_bytes if self.archive else None,
            "archive_ujkl": self.archive.price_ujkl if self.archive else None,
            "archive_usd": self.archive.list_usd if self.archive else None,
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
    """Return the difference from an earlier plan."""
    return PlanDifference(
        plan=previous.record.name,
        planned_at=previous.created_at,
        objects=statistics.objects - previous.record.object_count,
        size_bytes=statistics.size_bytes - previous.record.object_bytes,
        chunks=chunks - sum(previous.chunks.values()),
    )


def preview_plan(context: RunContext, snapshot: Snapshot) -> PlanPreview:
    """Return the plan that this snapshot would get. The ledger may lack the source."""
    in_ledger = context.source in context.ledger.lookup.sources()
    with planning.temporary_folder(context) as folder, reading(snapshot.path):
        filters = planning.filters_of(context, snapshot)
        state = planning.export_state(context, folder, snapshot.keys, in_ledger=in_ledger)
        identified = identify(snapshot, *state, folder / "identified.parquet", filters=filters)
        delta = not_yet_archived(
            identified.unsettled, state[0], folder / "wanted.parquet", filters=filters
        )
        files = folder / "plan"
        files.mkdir()
        sizes, warning = (
            planning.chunk_sizes(context)
            if in_ledger
            else (planning.ChunkSizes(int(context.source_settings.target_size)), "")
        )
        terms = planning.plan_terms(context, snapshot, sizes)
        terms = replace(terms, max_chunks=_UNLIMITED_CHUNKS)
        plan = planning.write_plan_of(
            context, snapshot, delta.path, files, terms, in_ledger=in_ledger
        )
        account = account_for_files(
            snapshot.path,
            *state,
            within=snapshot.keys,
            filters=filters,
            due_skips=False,
        )
        statistics = plan_statistics([files], part_bytes=part_of(context.settings.packing))
        tail = plan.waiting
        estimate = estimate_plan(
            context,
            statistics,
            plan.chunks,
            sizes.target_bytes,
            heads=identified.to_compare_count,
        )
        skipped = Counter(account.skipped)
        skipped[SkipReason.UNSUPPORTED_KEY] += delta.unsupported_count
        skipped[SkipReason.TOO_LARGE] += plan.too_large_count
        waiting = None
        if tail:
            until = planning.waits_until(context.source_settings, tail.oldest)
            waiting = WaitingObjects(tail.chunk.object_count, tail.chunk.object_bytes, until)
        return PlanPreview(
            snapshot=snapshot,
            located=account.located,
            claimed=account.claimed,
            left_out=account.left_out,
            skipped={
                str(reason): skipped[reason]
                for reason in SkipReason
                if skipped[reason] and reason is not SkipReason.WAITING  # see `waiting`
            },
            waiting=waiting,
            to_compare=identified.to_compare_count,
            plans=-(-len(plan.chunks) // MAX_CHUNKS),
            warning="; ".join(
                filter(
                    None,
                    [
                        warning,
                        _key_warning(context),
                        _refusal(context) if snapshot.object_count else "",
                        _not_posted(context, plan.chunks),
                    ],
                )
            ),
            estimate=estimate,
            archive=_archive_cost(context, estimate),
            previous=planning.last_plan(context),
        )


def _key_warning(context: RunContext) -> str:
    try:
        require_recipients(context.settings, context.source)
    except NotPublic as error:
        return f"its runs would be refused: {with_hint(error)}"
    if has_single_recipient(context.settings, context.source):
        return f"{SINGLE_RECIPIENT}; {SECOND_KEY}"
    return ""


def _refusal(context: RunContext) -> str:
    address = context.ledger.sources.address(context.source)
    if address not in (None, context.address):
        addresses = f"{address} in the ledger, and {context.address} in the settings"
        return f"this plan would be refused: source '{context.source}' is {addresses}"
    try:
        refuse_new_archive(context)
        if context.source in context.ledger.lookup.sources():
            refuse_unknown(context)
    except StoredAlready as error:
        return f"this plan would be refused: {with_hint(error)}"
    except (StoreError, MnemonicRefused):  # the estimate is useful without the answer
        pass
    return ""


def _not_posted(context: RunContext, chunks: Sequence[ChunkPlan]) -> str:
    if not chunks:
        return ""
    sizes = [chunk.expected_size_bytes for chunk in chunks]
    largest, others = max(sizes), one_copy_bytes(context.ledger, NOT_POSTED)
    try:
        context.store.admit(
            stored_size_bytes=largest,
            waiting_bytes=others + sum(sizes) - largest,
        )
    except (StoreError, SettingsError) as error:
        return (
            f"the store would not take all of it now: {with_hint(error)}" if error.permanent else ""
        )
    return ""


def estimate_plan(
    context: RunContext,
    statistics: PlanStatistics,
    chunks: Sequence[ChunkPlan | Chunk],
    target_bytes: int,
    *,
    heads: int,
) -> PlanEstimate:
    """Return the cost of archiving these chunks, after `heads` requests to compare headers.

    `chunks` are in the order of cutting, but chunks of parts come first.
    """
    settings = context.source_settings
    closed = chunks if statistics.parts == len(chunks) else chunks[:-1] or chunks
    checksums = statistics.checksum_requests if context.settings.packing.compare_checksums else 0
    requests = statistics.get_requests + checksums + heads
    expected = sum(chunk.expected_size_bytes for chunk in chunks)
    storage, storage_unknown = None, ""
    try:
        storage = context.store.cost(expected, len(chunks))
    except (StoreError, MnemonicRefused) as error:  # the estimate is useful without the price
        storage_unknown = str(error)
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
        storage_unknown=storage_unknown,
        rate=context.ledger.chunks.archive_rate(context.source),
    )


def _archive_cost(context: RunContext, estimate: PlanEstimate) -> StorageCost | None:
    if estimate.storage is None:
        return None
    others = one_copy_bytes(context.ledger, CLAIMING | IN_GOOD_STANDING, source=context.source)
    try:
        return context.store.cost(others + estimate.expected_bytes, chunks=0)
    except StoreError:  # the plan's own price is useful without it
        return None


def prices(settings: SourceSettings) -> tuple[float | None, float | None]:
    """Return the prices of 1,000 GETs and of 1 GiB egress: as set, or AWS's, or None."""
    at_aws = not settings.endpoint_url
    listed: Iterable[tuple[float | None, float]] = (
        (settings.get_price, GET_PRICE),
        (settings.egress_price, EGRESS_PRICE),
    )
    get_price, egress_price = (
        price if set_price is None and at_aws else set_price for set_price, price in listed
    )
    return get_price, egress_price


def estimate_report(context: RunContext, report: planning.PlanReport) -> PlanEstimate:
    """Return the cost of archiving a report's plans."""
    folders = [Path(plan.folder) for plan in report.plans]
    statistics = plan_statistics(folders, part_bytes=part_of(context.settings.packing))
    order = [plan.name for plan in report.plans]
    chunks = sorted(report.chunks, key=lambda chunk: (not chunk.part, order.index(chunk.plan)))
    return estimate_plan(
        context, statistics, chunks, report.target_bytes, heads=report.comparison.requests
    )
