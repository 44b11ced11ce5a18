"""Inventories of a source: what it has, of a listing or of a report of S3, as a snapshot in the
home; and looks at what is new.

A snapshot is whole or not there at all. Old ones are removed as new ones come.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from urllib.parse import quote_from_bytes

from caf_pipeline.errors import (
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
    recorded_key,
)
from caf_pipeline.run_context import RunContext
from caf_pipeline.source.protocol import InventoryReport, LastPage, ReportCounts
from caf_pipeline.steps.list_source import (
    Begun,
    ListingTerms,
    ParallelListing,
    drop_old_versions,
    listing_folder,
)
from caf_pipeline.system.folder_lock import remove_unread, writing_into
from caf_pipeline.system.parquet import translate_errors
from caf_pipeline.system.quantities import counted

WHOLE_KEPT: Final = 3
"""Snapshots of a whole source: the one that is planned, and two for whoever wants to compare.

One of 10⁸ objects takes 6 GB.
"""

PARTIAL_KEPT: Final = 20
"""Snapshots of a part of a source, or damaged: a sensor that looks every few minutes would fill the
disk.
"""

MAX_REPORT_AGE: Final = timedelta(days=9)
"""A week between two reports, and 48 hours, the longest that S3 says a report takes."""

REPORTS_TRIED: Final = 3
"""Of those that look new: a folder may be named after another time than its report has."""


@dataclass(frozen=True, slots=True)
class TakenReport:
    """The inventory report that a snapshot was made of, what else was in it, and how old it was
    then.
    """

    report: InventoryReport
    counts: ReportCounts
    age: timedelta

    @property
    def warning(self) -> str:
        """Say where it is older than the newest of a weekly inventory can be; "" where it is
        not.
        """
        if self.age <= MAX_REPORT_AGE:
            return ""
        return (
            f"the inventory report {self.report.url} is {counted(self.age.days, 'day')} old: S3 "
            "writes one every day or week;"
            " check the inventory's configuration"
        )


@dataclass(frozen=True, slots=True)
class Look:
    """A bounded look at a listing.

    Attributes:
        new_objects: what a plan would take.
        next_after: where the next look begins; None where the listing's end was reached.
        pages: that were listed.
        all_new: whether they have such objects, and beside them delete markers alone.
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
) -> Snapshot:
    """List the source into a snapshot, by several threads, or go on with a listing that was
    interrupted.

    A source that does not list keys in the order of their bytes is listed again, one page after
    another, and sorted.

    Args: context: the source. after: only keys greater than this. until: only keys up to and
        including this; such a snapshot is not complete. resume: whether a part may be what an
        interrupted listing found. Its `taken_at` is that of the interrupted one. to_plan: whether
        its plan is to end the wait of the keys that events named before it began, which the ledger
        then notes.
    """
    home = context.inventories()
    bounds = quote_from_bytes(after), None if until is None else quote_from_bytes(until)
    terms = ListingTerms(context.address, *bounds, context.all_versions)
    whole = latest_snapshot(context, complete=True, skip_damaged=True)
    newest = whole.listed_at if whole else None
    with writing_into(home), listing_folder(home, terms, newest, resume=resume) as folder:
        begun = folder.begun or folder.begin(_begin(context, after, until, to_plan=to_plan))
        try:
            ParallelListing(
                context,
                folder,
                begun.by_version,
                after,
                until,
                context.source_settings.listing_threads,
            ).run()
            with _listed_into(context, begun, after, until) as writer:
                for batch in folder.rows():
                    writer.add_batch(batch)
                writer.leave_out(folder.left_out())
                snapshot = writer.finish()
        except ListingUnordered:
            begun = _begin(context, after, until, to_plan=to_plan)
            with _listed_into(context, begun, after, until) as writer:
                for page in context.objects.list_pages(
                    after=after, versions=True, by_version=begun.by_version
                ):
                    within = page if until is None else [obj for obj in page if obj.key <= until]
                    kept, left_out = drop_old_versions(within, all_versions=context.all_versions)
                    writer.add(kept)
                    writer.leave_out(left_out)
                snapshot = writer.finish()
    _prune(context, snapshot)
    return snapshot


def _begin(context: RunContext, after: bytes, until: bytes | None, *, to_plan: bool) -> Begun:
    """Return the time before the first page, what a listing says was so at this time or later; and
    how it is listed.
    """
    begun = Begun(
        datetime.now(UTC),
        context.objects.clock(),
        by_version(context, context.objects.keeps_versions()),
    )
    if to_plan:
        context.ledger.notices.mark_noticed(
            context.source, _snapshot_path(context, begun.listed_at).stem, after, until
        )
    return begun


def by_version(context: RunContext, keeps: bool | None) -> bool:
    """Tell whether objects have version ids, by what `ObjectSource.keeps_versions` told.

    Raises: SourceDenied: the bucket may not be asked any more. Without its version id each object
        would have another identity than
            it was archived under, and would be archived once more.
    """
    if keeps is None and context.ledger.chunks.has_version_ids(context.source):
        raise SourceDenied(
            f"the bucket of source '{context.source}' does not say whether it keeps versions, and "
            "its objects were archived by"
            " their version ids: each would be archived once more",
            hint="grant s3:GetBucketVersioning",
        )
    return bool(keeps)


def _listed_into(
    context: RunContext, begun: Begun, after: bytes, until: bytes | None
) -> SnapshotWriter:
    return SnapshotWriter(
        _snapshot_path(context, begun.listed_at),
        source=context.source,
        listed_at=begun.listed_at,
        taken_at=begun.taken_at,
        after=after,
        until=until,
        run=context.holder.run,
        address=context.address,
        all_versions=context.all_versions,
    )


def take_report(context: RunContext, name: str = "") -> tuple[Snapshot, TakenReport]:
    """Make a snapshot of the newest complete inventory report whose name begins so, as
    `take_inventory` makes one of a listing.

    Raises: ReportRefused: it cannot be used, or is older than a whole inventory that is planned:
        what was archived since would look
            as if it were gone. What `by_version`, `ObjectSource.open_report` and
            `InventoryReport.fetch` raise. No snapshot is there then.
    """
    report = context.objects.open_report(name)
    by_version(context, report.keeps_versions)
    moment = datetime.now(UTC)
    path = _snapshot_path(context, moment)
    _refuse_superseded(context, report, path.stem)
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
        _report_folder(path) as folder,
    ):
        files = []
        for file, counted_in_file in report.fetch(folder):
            files.append(file)
            counts.add(counted_in_file)
        writer.add_files(files)
        writer.leave_out(counts.left_out)
        snapshot = writer.finish()
    _prune(context, snapshot)
    age = max(moment - report.taken_at, timedelta(0))  # S3's clock may be ahead of this machine's
    return snapshot, TakenReport(report, counts, age)


def find_new_report(context: RunContext) -> str:
    """Return the name of the newest complete inventory report, where it is newer than the whole
    inventories that are planned.

    "" where none is. Of those that are named after a later time, the first whose manifest says so,
    too, counts.

    Raises:
        What `ObjectSource.open_report` raises of one that cannot be used.
    """
    planned = context.ledger.content.last_inventory(context.source)
    for name in context.objects.find_reports(planned)[:REPORTS_TRIED]:
        taken_at = context.objects.open_report(name).taken_at
        if planned is None or taken_at > planned:
            return name
    return ""


def _snapshot_path(context: RunContext, moment: datetime) -> Path:
    return context.inventories() / f"{context.source}-{moment:%Y%m%dT%H%M%S%fZ}.parquet"


def _refuse_superseded(context: RunContext, report: InventoryReport, name: str) -> None:
    whole = (b"", None)
    if (
        context.source not in context.ledger.lookup.sources()
    ):  # a preview of a source that was never planned
        return
    if whole in context.ledger.content.later_inventories(
        InventoryRecord(context.source, name, report.taken_at, *whole)
    ):
        raise ReportRefused(
            f"the inventory report {report.url} is older than what was already archived: it was "
            "taken at"
            f" {report.taken_at:%Y-%m-%d %H:%M:%S} UTC, and a later whole inventory is planned "
            "already",
            hint="wait for the next report, or list the bucket",
        )


@contextmanager
def _report_folder(path: Path) -> Iterator[Path]:
    """Give a folder for the files of a report, beside the snapshot that is made of them."""
    with (
        translate_errors(path),
        tempfile.TemporaryDirectory(dir=path.parent, prefix=".caf-spill-") as folder,
    ):
        yield Path(folder)


def empty_inventory_warning(context: RunContext, snapshot: Snapshot) -> str:
    """Return a warning where an inventory of the whole source has no object, "" where it has
    some.
    """
    if not snapshot.complete or snapshot.object_count or snapshot.unsupported_count:
        return ""
    settings = context.source_settings
    at = settings.endpoint_url or "AWS"
    if not settings.prefix:
        return f"bucket '{settings.bucket}' at {at} has no objects"
    slash = " (few keys begin with '/')" if settings.prefix.startswith("/") else ""
    return (
        f"bucket '{settings.bucket}' at {at} has no object whose key begins with "
        f"'{settings.prefix}':"
        f" check sources.{context.source}.prefix{slash}"
    )


def snapshot_to_plan(context: RunContext) -> Snapshot:
    """Return the snapshot that this run took, or the latest where it took none.

    Another run may have taken a later one of other keys, which is that run's to plan.

    Raises: NotLocated: there is no snapshot yet, or it has other versions than the settings ask for
        now. IntegrityError: the latest is damaged.
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
    """Return the latest whole snapshot of the source, for what is to be archived of it; `hint` says
    how one is taken.

    Raises: NotLocated: there is none yet, or it has other versions than the settings ask for now.
        IntegrityError: it is damaged.
    """
    snapshot = latest_snapshot(context, complete=True)
    if snapshot is None:
        raise NotLocated(f"there is no whole inventory of '{context.source}' yet", hint=hint)
    _require_versions(context, snapshot, hint=hint)
    return snapshot


def _require_versions(context: RunContext, snapshot: Snapshot, *, hint: str) -> None:
    if snapshot.all_versions == context.all_versions:
        return
    taken, asked = ("all", "current") if snapshot.all_versions else ("current", "all")
    raise NotLocated(
        f"the latest inventory of '{context.source}' was taken with versions = \"{taken}\","
        f' and sources.{context.source}.versions is "{asked}" now',
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
    """Return the snapshot of the source that was made last, or that a run took, or that is planned;
    None where there is none.

    With `complete` it is the one of the whole source of the latest time by S3's clock, as the
    ledger tells which is later: names have the time of this machine's, which may have been wrong.
    One that was taken when the settings named another bucket or prefix, as a preview may be, is
    none of the source.

    Raises: IntegrityError: one that was made as late, or later, is damaged, and `skip_damaged` is
        False.
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
    """Return the snapshot of this name; raises NotLocated where it is gone."""
    path = context.inventories() / f"{name}.parquet"
    if not path.exists():
        raise NotLocated(
            f"there is no snapshot '{name}' in {path.parent}", hint="take a new inventory"
        )
    return read_snapshot(path)


def _prune(context: RunContext, taken: Snapshot) -> None:
    """Remove all snapshots but the latest, the one just taken, and those that a process reads:
    plans may take hours.

    What a dry run listed under another bucket or prefix pushes none of the source's own out.
    """
    ours = context.ledger.sources.address(context.source) or context.address
    whole, partial, foreign = (list[tuple[datetime, Path]]() for _ in range(3))
    for path in context.inventories().glob("*.parquet"):
        try:
            snapshot = read_snapshot(path)
        except IntegrityError:
            with suppress(FileNotFoundError):  # another process has removed it
                partial.append((datetime.fromtimestamp(path.stat().st_mtime, UTC), path))
        else:
            kept = foreign if snapshot.address != ours else whole if snapshot.complete else partial
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
) -> Look:
    """List at most `max_pages` pages and count the objects that a plan would take.

    It ends after a page where `enough` says so; the next look then goes on there, as after the last
    of the pages. Pages with nothing but older versions and delete markers, which are left out, do
    not count as pages: a look passes many.
    """
    new_objects = listed = pages = 0
    next_after: bytes | None = None
    filters = current_filters(context)
    bound = (
        max_pages if context.all_versions else None
    )  # in versions the source itself ends with the last one of a key
    for page in context.objects.list_pages(after=after, max_pages=bound, versions=True):
        objects, _ = drop_old_versions(page, all_versions=context.all_versions)
        pages += bool(objects)
        listed += sum(not obj.is_delete_marker for obj in objects)
        new_objects += len(unsettled_objects(context, objects, filters))
        next_after = None if isinstance(page, LastPage) else _passed(page, objects)
        if enough() or (bound is None and pages == max_pages):
            break
    else:
        if pages < max_pages:
            next_after = None
    return Look(new_objects, next_after, pages, all_new=0 < listed == new_objects)


def _passed(page: Sequence[S3Object], kept: Sequence[S3Object]) -> bytes:
    """Return behind which key of a page the next look begins: of the last one, the next page may
    have the latest version.
    """
    if kept:
        return kept[-1].key
    last = page[-1].key
    return next((obj.key for obj in reversed(page) if obj.key != last), last)


def current_filters(context: RunContext) -> ObjectFilter:
    """Return what would leave objects out of a plan of a listing that is taken now; where ages
    count, by S3's clock like that.
    """
    its = context.source_settings
    return ObjectFilter.of(its, context.objects.clock() if its.min_age else datetime.now(UTC))


def unsettled_objects(
    context: RunContext, listed: Sequence[S3Object], filters: ObjectFilter
) -> Sequence[S3Object]:
    """Return what a plan would take of what is listed."""
    objects = [obj for obj in listed if not obj.is_delete_marker]
    settled = context.ledger.content.settled_objects(context.source, objects)
    unsettled = (obj for obj in objects if (recorded_key(obj), obj.object_version) not in settled)
    return [
        obj for obj in unsettled if not is_supported(obj.key) or filters.left_out_by(obj) is None
    ]
