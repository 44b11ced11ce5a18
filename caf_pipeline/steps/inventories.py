"""Snapshots of a source, from a listing or an S3 report, and scans for new objects."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from urllib.parse import quote_from_bytes

from caf_pipeline.errors import (
    HeldByOther,
    IntegrityError,
    ListingUnordered,
    NotLocated,
    ReportRefused,
    SourceDenied,
)
from caf_pipeline.inventory.filters import ObjectFilter
from caf_pipeline.inventory.objects import S3Object, is_supported
from caf_pipeline.inventory.snapshot import Snapshot, SnapshotWriter, read_snapshot
from caf_pipeline.ledger.records import (
    InventoryRecord,
    plan_lease,
    recorded_key,
)
from caf_pipeline.records import Lease
from caf_pipeline.run_context import RunContext
from caf_pipeline.source.protocol import InventoryReport, LastPage, ReportCounts
from caf_pipeline.steps.conditions import MAX_REPORT_AGE
from caf_pipeline.steps.list_source import (
    ListingStart,
    ListingTerms,
    ParallelListing,
    drop_old_versions,
    listing_folder,
)
from caf_pipeline.system.folder_lock import remove_unread, writing_into
from caf_pipeline.system.parquet import translate_errors
from caf_pipeline.system.quantities import counted, show_time

WHOLE_KEPT: Final = 3
"""Snapshots of a whole source: the planned one, and two to compare. 10⁸ objects take 6 GB."""

PARTIAL_KEPT: Final = 20
"""Partial or damaged snapshots; a sensor may take many."""

REPORTS_TRIED: Final = 3
"""Reports opened to find a new one, since folders may have other times."""


@dataclass(frozen=True, slots=True)
class TakenReport:
    """An inventory report, what the snapshot left out, and its age then."""

    report: InventoryReport
    counts: ReportCounts
    age: timedelta

    @property
    def warning(self) -> str:
        if self.age <= MAX_REPORT_AGE:
            return ""
        return (
            f"the inventory report {self.report.url} is {counted(self.age.days, 'day')} old, but "
            "S3 writes one every day or week: check the inventory's configuration"
        )


@dataclass(frozen=True, slots=True)
class NewObjectScan:
    """The result of a bounded scan of a listing.

    Attributes:
        new_objects: objects that a plan would take.
        next_after: where the next scan begins, exclusive; None at the end.
        all_new: whether there are new objects and no others.
    """

    new_objects: int
    next_after: bytes | None
    pages: int
    all_new: bool


def take_inventory(
    context: RunContext,
    *,
    after: bytes = b"",
    until: bytes | None = None,
    resume: bool = True,
    to_plan: bool = True,
    patience_seconds: float = 0.0,
) -> Snapshot:
    """List the source into a snapshot with several threads, or resume an interrupted listing.

    Keys are greater than `after`, up to and including `until`; a snapshot with `until` is not
    complete. If the server does not list in byte order, the source is listed again, page by page,
    and sorted. `resume` reuses an interrupted listing and its `taken_at`.

    `to_plan`: a plan of the snapshot ends the wait of noticed keys. The inventory holds the plan's
    lease, which prevents a removal of the source. It waits `patience_seconds` for another run's.

    Raises HeldByOther: another run takes an inventory to plan, or plans.
    """
    with _lease_to_plan(context, patience_seconds) if to_plan else nullcontext():
        return _list_into_snapshot(context, after, until, resume=resume, to_plan=to_plan)


@contextmanager
def lease_on_plan(context: RunContext, patience_seconds: float) -> Iterator[Lease]:
    """Hold the plan's lease. Another run's is awaited for `patience_seconds`."""
    ends_at = time.monotonic() + patience_seconds
    with ExitStack() as stack:
        while True:
            try:
                lease = stack.enter_context(context.lease(plan_lease(context.source)))
                break
            except HeldByOther:
                if time.monotonic() >= ends_at:
                    raise
        yield lease


@contextmanager
def _lease_to_plan(context: RunContext, patience_seconds: float) -> Iterator[None]:
    with lease_on_plan(context, patience_seconds) as lease:
        # The source may have been removed since this run began.
        context.ledger.sources.register(context.source, context.address, lease=lease)
        yield


def _list_into_snapshot(
    context: RunContext, after: bytes, until: bytes | None, *, resume: bool, to_plan: bool
) -> Snapshot:
    home = context.inventories()
    bounds = quote_from_bytes(after), None if until is None else quote_from_bytes(until)
    terms = ListingTerms(context.address, *bounds, context.all_versions)
    whole = latest_snapshot(context, complete=True, skip_damaged=True)
    newest = whole.listed_at if whole else None
    with writing_into(home), listing_folder(home, terms, newest, resume=resume) as folder:
        start = folder.start or folder.begin(_start_listing(context, after, until, to_plan=to_plan))
        try:
            ParallelListing(
                context,
                folder,
                start.by_version,
                after,
                until,
                context.source_settings.listing_threads,
            ).run()
            with _listed_into(context, start, after, until) as writer:
                for batch in folder.rows():
                    writer.add_batch(batch)
                writer.leave_out(folder.left_out())
                snapshot = writer.finish()
        except ListingUnordered:
            start = _start_listing(context, after, until, to_plan=to_plan)
            with _listed_into(context, start, after, until) as writer:
                for page in context.objects.list_pages(
                    after=after, versions=True, by_version=start.by_version
                ):
                    within = page if until is None else [obj for obj in page if obj.key <= until]
                    kept, left_out = drop_old_versions(within, all_versions=context.all_versions)
                    writer.add(kept)
                    writer.leave_out(left_out)
                snapshot = writer.finish()
    _prune(context, snapshot)
    return snapshot


def _start_listing(
    context: RunContext, after: bytes, until: bytes | None, *, to_plan: bool
) -> ListingStart:
    start = ListingStart(
        datetime.now(UTC),
        context.objects.clock(),
        by_version(context, context.objects.keeps_versions()),
    )
    if to_plan:
        context.ledger.notices.mark_noticed(
            context.source, _snapshot_path(context, start.listed_at).stem, after, until
        )
    return start


def by_version(context: RunContext, keeps: bool | None) -> bool:
    """Return whether objects have version ids, given `ObjectSource.keeps_versions`.

    Raises SourceDenied if the bucket no longer answers: without version ids, all would be archived
    again.
    """
    if keeps is None and context.ledger.chunks.has_version_ids(context.source):
        raise SourceDenied(
            f"cannot read the versioning of source '{context.source}'. Its objects were archived "
            "with version ids, and would all be archived again",
            hint="grant s3:GetBucketVersioning",
        )
    return bool(keeps)


def _listed_into(
    context: RunContext, start: ListingStart, after: bytes, until: bytes | None
) -> SnapshotWriter:
    return SnapshotWriter(
        _snapshot_path(context, start.listed_at),
        source=context.source,
        listed_at=start.listed_at,
        taken_at=start.taken_at,
        after=after,
        until=until,
        run=context.holder.run,
        address=context.address,
        all_versions=context.all_versions,
    )


def take_report(
    context: RunContext, name: str = "", *, to_plan: bool = True, patience_seconds: float = 0.0
) -> tuple[Snapshot, TakenReport]:
    """Make a snapshot of the newest complete inventory report whose name starts with `name`.

    For `to_plan` see `take_inventory`. Raises like `by_version` and `ObjectSource.open_report`, and
    ReportRefused for a report older than a planned whole inventory: objects archived since would
    look deleted.
    """
    with _lease_to_plan(context, patience_seconds) if to_plan else nullcontext():
        return _report_into_snapshot(context, name)


def _report_into_snapshot(context: RunContext, name: str) -> tuple[Snapshot, TakenReport]:
    report = context.objects.open_report(name)
    by_version(context, report.keeps_versions)
    moment = datetime.now(UTC)
    path = _snapshot_path(context, moment)
    whole = (b"", None)
    if context.source in context.ledger.lookup.sources():  # a preview may be of an unknown source
        record = InventoryRecord(context.source, path.stem, report.taken_at, *whole)
        if whole in context.ledger.content.later_inventories(record):
            raise ReportRefused(
                f"the inventory report {report.url} of {show_time(report.taken_at)} is "
                "older than a whole inventory that is already planned",
                hint="wait for the next report, or list the bucket",
            )
    counts = ReportCounts()
    with (
        writing_into(path.parent),
        SnapshotWriter(
            path,
            source=context.source,
            listed_at=report.taken_at,
            taken_at=report.taken_at,
            run=context.holder.run,
            report=report.url,
            address=context.address,
            all_versions=context.all_versions,
        ) as writer,
        translate_errors(path),
        tempfile.TemporaryDirectory(dir=path.parent, prefix=".caf-spill-") as folder,
    ):
        files = []
        for file, counted_in_file in report.fetch(Path(folder)):
            files.append(file)
            counts.add(counted_in_file)
        writer.add_files(files)
        writer.leave_out(counts.left_out)
        snapshot = writer.finish()
    _prune(context, snapshot)
    age = max(moment - report.taken_at, timedelta(0))  # S3's clock may be ahead
    return snapshot, TakenReport(report, counts, age)


def find_new_report(context: RunContext) -> str:
    """Return the newest complete report's name, or "" if it is not newer than what is planned."""
    planned = context.ledger.content.last_inventory(context.source)
    for name in context.objects.find_reports(planned)[:REPORTS_TRIED]:
        taken_at = context.objects.open_report(name).taken_at
        if planned is None or taken_at > planned:
            return name
    return ""


def _snapshot_path(context: RunContext, moment: datetime) -> Path:
    return context.inventories() / f"{context.source}-{moment:%Y%m%dT%H%M%S%fZ}.parquet"


def empty_inventory_warning(context: RunContext, snapshot: Snapshot) -> str:
    """Return a warning if a whole inventory has no object, else ""."""
    if not snapshot.complete or snapshot.object_count or snapshot.unsupported_count:
        return ""
    settings = context.source_settings
    at = settings.endpoint_url or "AWS"
    if not settings.prefix:
        return f"bucket '{settings.bucket}' at {at} has no objects"
    slash = " (few keys begin with '/')" if settings.prefix.startswith("/") else ""
    return (
        f"bucket '{settings.bucket}' at {at} has no key that begins with '{settings.prefix}': "
        f"check sources.{context.source}.prefix{slash}"
    )


def snapshot_to_plan(context: RunContext) -> Snapshot:
    """Return the snapshot that this run took, or else the latest.

    Raises NotLocated if there is none, or the setting `versions` has changed.
    """
    snapshot = latest_snapshot(
        context, run=context.holder.run, skip_damaged=True
    ) or latest_snapshot(context)
    if snapshot is None:
        raise NotLocated(
            f"there is no inventory of '{context.source}' yet",
            hint="materialize s3_inventory first",
        )
    _require_versions(context, snapshot, hint="materialize s3_inventory first")
    return snapshot


def latest_whole_snapshot(context: RunContext, *, hint: str) -> Snapshot:
    """Return the latest whole snapshot. Raises like `snapshot_to_plan`."""
    snapshot = latest_snapshot(context, complete=True)
    if snapshot is None:
        raise NotLocated(f"there is no whole inventory of '{context.source}' yet", hint=hint)
    _require_versions(context, snapshot, hint=hint)
    return snapshot


def _require_versions(context: RunContext, snapshot: Snapshot, *, hint: str) -> None:
    if snapshot.all_versions == context.all_versions:
        return
    old, new = ("all", "current") if snapshot.all_versions else ("current", "all")
    raise NotLocated(
        f"the latest inventory of '{context.source}' was taken with versions = \"{old}\","
        f' and sources.{context.source}.versions is now "{new}"',
        hint=hint,
    )


def latest_snapshot(
    context: RunContext,
    *,
    complete: bool = False,
    run: str | None = None,
    skip_damaged: bool = False,
    planned: bool = False,
) -> Snapshot | None:
    """Return the last snapshot of the source's bucket and prefix; None if there is none.

    `complete` means whole ones, and the latest by S3's clock: names have this machine's time, which
    may have been wrong. Raises IntegrityError if a damaged one may be the latest, unless
    `skip_damaged`.
    """
    latest: Snapshot | None = None
    for path in sorted(context.inventories().glob("*.parquet"), reverse=True):
        try:
            snapshot = read_snapshot(path)
        except IntegrityError:
            if skip_damaged or latest:
                continue
            raise
        if run not in (None, snapshot.run) or (complete and not snapshot.complete):
            continue
        if snapshot.address != context.address or (
            planned and not context.ledger.content.is_planned(context.source, snapshot.name)
        ):
            continue
        if not complete:
            return snapshot
        if latest is None or snapshot.taken_at > latest.taken_at:
            latest = snapshot
    return latest


def open_snapshot(context: RunContext, name: str) -> Snapshot:
    """Return the snapshot of this name; raise NotLocated if it is gone."""
    path = context.inventories() / f"{name}.parquet"
    if not path.exists():
        raise NotLocated(
            f"there is no snapshot '{name}' in {path.parent}", hint="take a new inventory"
        )
    return read_snapshot(path)


def _prune(context: RunContext, taken: Snapshot) -> None:
    """Snapshots of another bucket or prefix do not displace the source's own."""
    address = context.ledger.sources.address(context.source) or context.address
    whole, partial, foreign = (list[tuple[datetime, Path]]() for _ in range(3))
    for path in context.inventories().glob("*.parquet"):
        try:
            snapshot = read_snapshot(path)
        except IntegrityError:
            with suppress(FileNotFoundError):
                partial.append((datetime.fromtimestamp(path.stat().st_mtime, UTC), path))
        else:
            kept = (
                foreign if snapshot.address != address else whole if snapshot.complete else partial
            )
            kept.append((snapshot.taken_at, path))
    for _, path in (
        *sorted(whole)[:-WHOLE_KEPT],
        *sorted(partial)[:-PARTIAL_KEPT],
        *sorted(foreign)[:-1],
    ):
        if path != taken.path:
            remove_unread(path)


def scan_for_new(
    context: RunContext, *, after: bytes, max_pages: int, enough: Callable[[], bool] = lambda: False
) -> NewObjectScan:
    """List up to `max_pages` pages and count the objects that a plan would take.

    Stops after a page for which `enough` returns True. Pages without objects for a snapshot do not
    count.
    """
    new_objects = listed = pages = 0
    next_after: bytes | None = None
    filters = current_filters(context)
    # If all versions are listed, the source itself stops after the last version of a key.
    bound = max_pages if context.all_versions else None
    for page in context.objects.list_pages(after=after, max_pages=bound, versions=True):
        objects, _ = drop_old_versions(page, all_versions=context.all_versions)
        pages += bool(objects)
        listed += sum(not obj.is_delete_marker for obj in objects)
        new_objects += len(unsettled_objects(context, objects, filters))
        next_after = None
        if objects and not isinstance(page, LastPage):
            next_after = objects[-1].key
        elif not isinstance(page, LastPage):  # the next page may have more of the last key
            last = page[-1].key
            next_after = next((obj.key for obj in reversed(page) if obj.key != last), last)
        if enough() or (bound is None and pages == max_pages):
            break
    else:
        if pages < max_pages:
            next_after = None
    return NewObjectScan(new_objects, next_after, pages, all_new=0 < listed == new_objects)


def current_filters(context: RunContext) -> ObjectFilter:
    """Return the filters of a plan made now. Ages count by S3's clock."""
    settings = context.source_settings
    now = context.objects.clock() if settings.min_age else datetime.now(UTC)
    return ObjectFilter.of(settings, now)


def unsettled_objects(
    context: RunContext, listed: Sequence[S3Object], filters: ObjectFilter
) -> Sequence[S3Object]:
    """Return the listed objects that a plan would take."""
    objects = [obj for obj in listed if not obj.is_delete_marker]
    settled = context.ledger.content.settled_objects(context.source, objects)
    unsettled = (obj for obj in objects if (recorded_key(obj), obj.object_version) not in settled)
    return [
        obj for obj in unsettled if not is_supported(obj.key) or filters.left_out_by(obj) is None
    ]
