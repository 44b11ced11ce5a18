"""The steps of a whole source: take an inventory, cut what is new into chunks, account for every object.

    take_inventory → state_current → cut_plan → account_for

A plan is written to a folder first and then registered in one transaction of the ledger, with its claims; a crash between the
two leaves a folder that no plan names, which the next plan removes.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from urllib.parse import quote_from_bytes

from caf_pipeline.chunk_state import ChunkState, has_reached
from caf_pipeline.context import Workplace
from caf_pipeline.errors import IntegrityError, ListingUnordered, NotLocated, ReportRefused, StagingError
from caf_pipeline.inventory.accounting import Accounting, account_for_files
from caf_pipeline.inventory.current import Identified, find_exceptions, identify, read_exceptions
from caf_pipeline.inventory.cutting import write_plan
from caf_pipeline.inventory.filters import ObjectFilter
from caf_pipeline.inventory.ledger_rows import EXCEPTION_SCHEMA, STANDING_SCHEMA
from caf_pipeline.inventory.objects import S3Object, SkipReason, is_supported
from caf_pipeline.inventory.plan import TOO_LARGE_FILE, Plan, PlanTerms, WaitingTail, read_identities, read_parts, read_waiting
from caf_pipeline.inventory.remaining import not_yet_archived, unlisted_skips
from caf_pipeline.inventory.snapshot import Snapshot, SnapshotWriter, read_objects, read_snapshot, require_whole
from caf_pipeline.ledger.records import (
    Chunk,
    InventoryRecord,
    PlanRecord,
    PlanRow,
    Skip,
    WaitingObjects,
    plan_lease,
    recorded_key,
)
from caf_pipeline.settings import SourceSettings
from caf_pipeline.source.protocol import InventoryReport, ReportCounts
from caf_pipeline.steps.compare_headers import Comparison, compare_headers
from caf_pipeline.steps.first_plan import refuse_second_copy
from caf_pipeline.steps.list_source import Begun, ListingTerms, ParallelListing, kept_of, listing_folder
from caf_pipeline.store.protocol import Lease
from caf_pipeline.system.atomic_files import rename_durably, sync_file
from caf_pipeline.system.folder_lock import reading, remove_unread, writing_into
from caf_pipeline.system.parquet import translate_errors, write_whole
from caf_pipeline.system.quantities import counted, show_size

WHOLE_KEPT: Final = 3
"""Snapshots of a whole source: the one that is planned, and two for whoever wants to compare. One of 10⁸ objects takes 6 GB."""

PARTIAL_KEPT: Final = 20
"""Snapshots of a part of a source, or damaged: a sensor that looks every few minutes would fill the disk."""

MAX_REPORT_AGE: Final = timedelta(days=9)
"""A week between two reports, and 48 hours, the longest that S3 says a report takes."""

REPORTS_LOOKED_AT: Final = 3
"""Of those that look new: a folder may be named after another time than its report has."""

SHORT_NAME: Final = 8  # hex digits of a plan's hash in the ids of its chunks
LONG_NAME: Final = 12  # where another plan of the source has those

LEAST_TARGET_BYTES: Final = 4096
"""The least target size that the settings allow, too: a chunk's own members take some of it."""

_CUTTING: Final = ".cutting-"
_ACCOUNTING: Final = ".accounting-"
_ABANDONED_SECONDS: Final = 24 * 3600  # an accounting takes minutes; a folder of that age is a killed run's


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What became of a snapshot. `plans` is empty where nothing was new; more than one where a plan was full.

    `target_bytes` is the size at which chunks were cut. `previous` is the source's last plan before. `waiting` is the tail that
    is left for the next plan, since its chunk would be smaller than the source's `min_chunk_size`.

    `warning` says where chunks of the source's target size are too large for the store as it was measured, and where posted
    ones have another proof type than new ones get; "" where neither is so. `comparison` and `exceptions` are those of `Current`,
    `left_out` is that of `Delta`.
    """

    snapshot: Snapshot
    plans: Sequence[PlanRecord]
    chunks: Sequence[Chunk]
    target_bytes: int
    previous: PlanRow | None = None
    waiting: WaitingObjects | None = None
    warning: str = ""
    comparison: Comparison = field(default_factory=Comparison)
    exceptions: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def plan(self) -> PlanRecord | None:
        """The plan, or the first of several."""
        return self.plans[0] if self.plans else None


@dataclass(frozen=True, slots=True)
class Look:
    """A bounded look at a listing. `next_after` is where the next look begins; None where the listing's end was reached."""

    new_objects: int
    next_after: bytes | None


@dataclass(frozen=True, slots=True)
class TakenReport:
    """The inventory report that a snapshot was made of, what else was in it, and how old it was then."""

    report: InventoryReport
    counts: ReportCounts
    age: timedelta

    @property
    def warning(self) -> str:
        """Say where it is older than the newest of a weekly inventory can be; "" where it is not."""
        if self.age <= MAX_REPORT_AGE:
            return ""
        return (
            f"the inventory report {self.report.url} is {counted(self.age.days, 'day')} old: S3 writes one every day or week;"
            " check the inventory's configuration"
        )


# --- inventories ---------------------------------------------------------------------------------------------------


def take_inventory(work: Workplace, *, after: bytes = b"", until: bytes | None = None, resume: bool = True) -> Snapshot:
    """List the source into a snapshot, by several threads, or go on with a listing that was interrupted.

    A source that does not list keys in the order of their bytes is listed again, one page after another, and sorted.

    Args:
        work: the source.
        after: only keys greater than this.
        until: only keys up to and including this; such a snapshot is not complete.
        resume: whether a part may be what an interrupted listing found. Its `taken_at` is that of the interrupted one.
    """
    home = work.inventories()
    bounds = quote_from_bytes(after), None if until is None else quote_from_bytes(until)
    terms = ListingTerms(work.address, *bounds, work.all_versions)
    whole = latest_snapshot(work, complete=True, skip_damaged=True)
    newest = whole.listed_at if whole else None
    with writing_into(home), listing_folder(home, terms, newest, resume=resume) as folder:
        if folder.begun is None:
            folder.begin(_begin(work, after, until))
        try:
            ParallelListing(work, folder, after, until, work.source_settings.listing_threads).run()
            with _listed_into(work, folder.begun, after, until) as writer:
                for batch in folder.rows():
                    writer.add_batch(batch)
                writer.leave_out(folder.left_out())
                snapshot = writer.finish()
        except ListingUnordered:
            with _listed_into(work, _begin(work, after, until), after, until) as writer:
                for page in work.objects.list_pages(after=after, versions=True):
                    within = page if until is None else [obj for obj in page if obj.key <= until]
                    kept, left_out = kept_of(within, all_versions=work.all_versions)
                    writer.add(kept)
                    writer.leave_out(left_out)
                snapshot = writer.finish()
    _prune(work, snapshot)
    return snapshot


def _begin(work: Workplace, after: bytes, until: bytes | None) -> Begun:
    """Return the time before the first page: what a listing says was so at this time or later."""
    begun = Begun(listed_at=datetime.now(UTC), taken_at=work.objects.clock())
    work.ledger.mark_noticed(work.source, _snapshot_path(work, begun.listed_at).stem, after, until)
    return begun


def _listed_into(work: Workplace, begun: Begun | None, after: bytes, until: bytes | None) -> SnapshotWriter:
    assert begun is not None
    return SnapshotWriter(
        _snapshot_path(work, begun.listed_at),
        source=work.source,
        listed_at=begun.listed_at,
        taken_at=begun.taken_at,
        after=after,
        until=until,
        run=work.holder.run,
        all_versions=work.all_versions,
    )


def take_report(work: Workplace, name: str = "") -> tuple[Snapshot, TakenReport]:
    """Make a snapshot of the newest complete inventory report whose name begins so, as `take_inventory` makes one of a listing.

    Raises:
        ReportRefused: it cannot be used, or is older than a whole inventory that is planned: what was archived since would look
            as if it were gone. What `ObjectSource.open_report` and `InventoryReport.fetch` raise. No snapshot is there then.
    """
    report = work.objects.open_report(name)
    moment = datetime.now(UTC)
    path = _snapshot_path(work, moment)
    _refuse_superseded(work, report, path.stem)
    counts = ReportCounts()
    with (
        writing_into(path.parent),
        SnapshotWriter(
            path,
            source=work.source,
            listed_at=report.taken_at,
            taken_at=report.taken_at,
            run=work.holder.run,
            report=report.url,
            all_versions=work.all_versions,
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
    _prune(work, snapshot)
    return snapshot, TakenReport(report, counts, age=moment - report.taken_at)


def find_new_report(work: Workplace) -> str:
    """Return the name of the newest complete inventory report, where it is newer than the whole inventories that are planned.

    "" where none is. Of those that are named after a later time, the first whose manifest says so, too, counts.

    Raises:
        What `ObjectSource.open_report` raises of one that cannot be used.
    """
    planned = work.ledger.last_inventory(work.source)
    for name in work.objects.find_reports(planned)[:REPORTS_LOOKED_AT]:
        taken_at = work.objects.open_report(name).taken_at
        if planned is None or taken_at > planned:
            return name
    return ""


def _snapshot_path(work: Workplace, moment: datetime) -> Path:
    return work.inventories() / f"{work.source}-{moment:%Y%m%dT%H%M%S%fZ}.parquet"


def _refuse_superseded(work: Workplace, report: InventoryReport, name: str) -> None:
    whole = (b"", None)
    if work.source not in work.ledger.sources():  # a preview of a source that was never planned
        return
    if whole in work.ledger.later_inventories(InventoryRecord(work.source, name, report.taken_at, *whole)):
        raise ReportRefused(
            f"the inventory report {report.url} is older than what was already archived: it was taken at"
            f" {report.taken_at:%Y-%m-%d %H:%M:%S} UTC, and a later whole inventory is planned already",
            hint="wait for the next report, or list the bucket",
        )


@contextmanager
def _report_folder(path: Path) -> Iterator[Path]:
    """Give a folder for the files of a report, beside the snapshot that is made of them."""
    with translate_errors(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=".caf-spill-") as folder:
        yield Path(folder)


def nothing_found(work: Workplace, snapshot: Snapshot) -> str:
    """Return a warning where an inventory of the whole source has no object, "" where it has some."""
    if not snapshot.complete or snapshot.object_count or snapshot.unsupported_count:
        return ""
    settings = work.source_settings
    at = settings.endpoint_url or "AWS"
    if not settings.prefix:
        return f"bucket '{settings.bucket}' at {at} has no objects"
    slash = " (few keys begin with '/')" if settings.prefix.startswith("/") else ""
    return (
        f"bucket '{settings.bucket}' at {at} has no object whose key begins with '{settings.prefix}':"
        f" check sources.{work.source}.prefix{slash}"
    )


def snapshot_to_plan(work: Workplace) -> Snapshot:
    """Return the snapshot that this run took, or the latest where it took none.

    Another run may have taken a later one of other keys, which is that run's to plan.

    Raises:
        NotLocated: there is no snapshot yet. IntegrityError: the latest is damaged.
    """
    snapshot = latest_snapshot(work, run=work.holder.run, skip_damaged=True) or latest_snapshot(work)
    if snapshot is None:
        raise NotLocated(f"there is no inventory of '{work.source}' yet", hint="materialize s3_inventory first")
    return snapshot


def latest_snapshot(
    work: Workplace, *, complete: bool = False, run: str | None = None, skip_damaged: bool = False
) -> Snapshot | None:
    """Return the snapshot of the source that was made last, or that a run took; None where there is none.

    With `complete` it is the one of the whole source of the latest time by S3's clock, as the ledger tells which is later: names
    have the time of this machine's, which may have been wrong.

    Raises:
        IntegrityError: one that was made as late, or later, is damaged, and `skip_damaged` is False.
    """
    latest: Snapshot | None = None
    for path in sorted(work.inventories().glob("*.parquet"), reverse=True):
        try:
            snapshot = read_snapshot(path)
        except IntegrityError:
            if skip_damaged or latest:
                continue
            raise
        if run not in (None, snapshot.run) or (complete and not snapshot.complete):
            continue
        if not complete:
            return snapshot
        if latest is None or snapshot.taken_at > latest.taken_at:
            latest = snapshot
    return latest


def open_snapshot(work: Workplace, name: str) -> Snapshot:
    """Return the snapshot of this name; raises NotLocated where it is gone."""
    path = work.inventories() / f"{name}.parquet"
    if not path.exists():
        raise NotLocated(f"there is no snapshot '{name}' in {path.parent}", hint="take a new inventory")
    return read_snapshot(path)


def _prune(work: Workplace, taken: Snapshot) -> None:
    """Remove all snapshots but the latest, the one just taken, and those that a process reads: plans may take hours."""
    whole, partial = list[tuple[datetime, Path]](), list[tuple[datetime, Path]]()
    for path in work.inventories().glob("*.parquet"):
        try:
            snapshot = read_snapshot(path)
        except IntegrityError:
            with suppress(FileNotFoundError):  # another process has removed it
                partial.append((datetime.fromtimestamp(path.stat().st_mtime, UTC), path))
        else:
            (whole if snapshot.complete else partial).append((snapshot.taken_at, path))
    for _, path in (*sorted(whole)[:-WHOLE_KEPT], *sorted(partial)[:-PARTIAL_KEPT]):
        if path != taken.path:
            remove_unread(path)


def look_for_new(work: Workplace, *, after: bytes, max_pages: int, enough: Callable[[], bool] = lambda: False) -> Look:
    """List at most `max_pages` pages and count the objects that a plan would take.

    It ends after a page where `enough` says so; the next look then goes on there, as after the last of the pages.
    """
    new_objects = pages = 0
    last = after
    filters = ObjectFilter.of(work.source_settings, datetime.now(UTC))
    for page in work.objects.list_pages(after=after, max_pages=max_pages, versions=work.all_versions):
        if not page:  # the end of a listing may be an empty page, which must not pass for one more of many
            continue
        pages += 1
        last = page[-1].key
        new_objects += len(unsettled_objects(work, page, filters))
        if enough():
            return Look(new_objects, last)
    return Look(new_objects, last if pages >= max_pages else None)


def unsettled_objects(work: Workplace, listed: Sequence[S3Object], filters: ObjectFilter) -> Sequence[S3Object]:
    """Return what a plan would take of what is listed."""
    objects = [obj for obj in listed if not obj.is_delete_marker]
    settled = work.ledger.settled_objects(work.source, objects)
    unsettled = (obj for obj in objects if (recorded_key(obj), obj.object_version) not in settled)
    return [obj for obj in unsettled if not is_supported(obj.key) or filters.left_out_by(obj) is None]


# --- what is current -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Current:
    """A snapshot's objects under their identities, and what was found out for it.

    Attributes:
        identified: a file of `inventory.SNAPSHOT_SCHEMA`.
        unplanned: another, see `inventory.current.Identified`.
        standing: a file or folder of `inventory.STANDING_SCHEMA`, as it was when the identities were found.
        comparison: of the headers of objects that were written again.
        exceptions: keys of which the ledger learnt that LastModified does not tell what is current.
    """

    identified: Path
    unplanned: Path
    standing: Path
    comparison: Comparison
    exceptions: int


def state_current(work: Workplace, lease: Lease, snapshot: Snapshot, folder: Path) -> Current:
    """Let the ledger know what is current by this inventory, unless a later one covers the same keys.

    Args:
        work: the source.
        lease: on its plan.
        snapshot: of the inventory.
        folder: takes the files, which are the caller's to remove.

    Raises:
        What `compare_headers.compare_headers` raises.
    """
    inventory = _record_of(snapshot)
    comparison = Comparison()
    files, identified = identify_objects(work, snapshot, folder)
    if identified.to_compare_count:
        comparison = compare_headers(work, lease, inventory, identified.to_compare, folder)
        files, identified = identify_objects(work, snapshot, folder)
    found = folder / "found.parquet"
    superseded, filters = work.ledger.later_inventories(inventory), filters_of(work, snapshot)
    count = find_exceptions(snapshot, identified, *files, found, superseded=superseded, filters=filters)
    work.ledger.record_planned(inventory, read_exceptions(found))
    return Current(identified.path, identified.unplanned, files[0], comparison, count)


def _record_of(snapshot: Snapshot) -> InventoryRecord:
    return InventoryRecord(
        source=snapshot.source,
        name=snapshot.name,
        taken_at=snapshot.taken_at,
        after=snapshot.after,
        until=snapshot.until,
        all_versions=snapshot.all_versions,
        beside=snapshot.beside,
    )


def identify_objects(
    work: Workplace, snapshot: Snapshot, folder: Path, *, known: bool = True
) -> tuple[tuple[Path, Path], Identified]:
    """Export what the ledger knows, standings and exceptions, and find the identities of the snapshot's objects by it.

    `known` False: the ledger does not have the source.
    """
    standing, exceptions = folder / "standing", folder / "exceptions.parquet"
    if known:
        export_standing(work, standing)
        work.ledger.export_exceptions(work.source, exceptions)
    else:
        write_whole((), standing, STANDING_SCHEMA)
        write_whole((), exceptions, EXCEPTION_SCHEMA)
    return (standing, exceptions), identify(snapshot, standing, exceptions, folder / "identified.parquet")


def export_standing(work: Workplace, folder: Path) -> None:
    """Let a folder, in place of an older one, have what the ledger knows of the objects (`inventory.STANDING_SCHEMA`)."""
    shutil.rmtree(folder, ignore_errors=True)
    work.ledger.export_changes(work.source, folder, work.kept_locations())


# --- plans ---------------------------------------------------------------------------------------------------------


def cut_plan(work: Workplace, snapshot: Snapshot, *, second_copy: bool = False) -> PlanReport:
    """Plan what the snapshot has and the ledger does not know, and claim it. Plans only add.

    `second_copy`: also where the ledger has nothing of the source, and the store has files that may hold its objects.

    Chunks have the source's target size, also where the store was too slow for it when last measured: rates change. Once a
    chunk was withdrawn that was larger than what fits now, they are no larger than what fits, manifest included.

    Raises:
        StoredAlready: see `refuse_second_copy`; and what the store raises when it is asked.
        HeldByOther: another run plans this source. ClaimConflict: see the ledger. IntegrityError: the snapshot is damaged.
    """
    plans: list[PlanRecord] = []
    waiting = None
    with work.lease(plan_lease(work.source)) as lease, reading(snapshot.path):
        require_whole(snapshot.path)
        if snapshot.object_count and not second_copy:
            refuse_second_copy(work)
        sizes, warning = chunk_sizes(work)
        _remove_unnamed(work)
        previous = next(iter(work.ledger.plans(work.source, limit=1)), None)
        with _workspace(work, _CUTTING) as outer:
            current = state_current(work, lease, snapshot, outer)
            more = True
            while more:
                with _workspace(work, _CUTTING) as folder:
                    plan, left_out = _write_plan(work, snapshot, current, folder, sizes)
                    more = plan.leftover_count > 0
                    if plan.chunks:
                        plans.append(_register(work, snapshot, plan))
                        plan = replace(plan, folder=Path(plans[-1].folder))
                    if more:
                        export_standing(work, current.standing)  # with what was just claimed
                    else:
                        waiting = _let_wait(work, snapshot, plan)
            if snapshot.complete and (gone := unlisted_skips(current.identified, current.standing)):
                silent_from = snapshot.silent_from or snapshot.taken_at
                work.ledger.end_skips(work.source, gone, listed_at=snapshot.taken_at, silent_from=silent_from)
        if snapshot.silent_from is None:  # a report may lack what was written before it
            work.ledger.forget_noticed(work.source, snapshot.name, snapshot.listed_at, snapshot.after, snapshot.until)
    names = {plan.name for plan in plans}
    chunks = [chunk for chunk in work.ledger.chunks(work.source) if chunk.plan in names] if plans else []
    warnings = "; ".join(filter(None, [warning, _other_proof_type(work)]))
    found = (warnings, current.comparison, current.exceptions, left_out)
    return PlanReport(snapshot, plans, chunks, sizes.target_bytes, previous, waiting, *found)


def _let_wait(work: Workplace, snapshot: Snapshot, plan: Plan) -> WaitingObjects | None:
    """Write to the ledger what waits for the next plan, and nothing else where the snapshot is of the whole source."""
    settings, tail = work.source_settings, plan.waiting
    if tail is None:
        work.ledger.record_waiting(work.source, (), None, whole=snapshot.complete)
        return None
    until = waits_until(settings, tail)
    detail = f"waits until {until:%Y-%m-%d %H:%M} UTC for more objects: min_chunk_size is {show_size(settings.min_chunk_size)}"
    skips = (Skip.of(obj, SkipReason.WAITING, detail) for obj in read_waiting(plan))
    work.ledger.record_waiting(work.source, skips, until, whole=snapshot.complete)
    return WaitingObjects(tail.chunk.object_count, tail.chunk.object_bytes, until)


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """At which size chunks are cut, and their limit with the manifest (0: the hard one)."""

    target_bytes: int
    limit_bytes: int = 0


def chunk_sizes(work: Workplace) -> tuple[ChunkSizes, str]:
    """Return the sizes of the source's next chunks, and what to say where the store is slow, "" where it is not."""
    target_size, fitting = int(work.source_settings.target_size), work.store.largest_chunk_bytes()
    if fitting is None:
        return ChunkSizes(target_size), ""
    withdrawn = work.ledger.chunks(source=work.source, states=[ChunkState.WITHDRAWN])
    refused = any((chunk.stored_size_bytes or chunk.expected_size_bytes) > fitting for chunk in withdrawn)
    limit_size = max(fitting, LEAST_TARGET_BYTES)
    sizes = ChunkSizes(min(target_size, limit_size), limit_size) if refused else ChunkSizes(target_size)
    if fitting >= target_size:
        return sizes, ""
    return sizes, (
        f"source {work.source} has a target size of {target_size} bytes, but at the rates measured only {fitting} bytes are"
        f" uploaded in the time that providers give; "
        + (f"this plan is cut at {sizes.target_bytes} bytes" if refused else "set target_size to that or less")
    )


def _other_proof_type(work: Workplace) -> str:
    """Say what becomes of chunks that were posted with another proof type than new ones get; "" where there are none."""
    posted = [chunk for chunk in work.ledger.chunks(work.source) if has_reached(chunk.state, ChunkState.POSTED)]
    others = sum(chunk.proof_type != work.store.proof_type for chunk in posted)
    if not others:
        return ""
    goes_on = "goes on as it is" if others == 1 else "go on as they are"
    return f"new chunks have proof type {work.store.proof_type}; {counted(others, 'chunk')} posted with another {goes_on}"


def account_for(work: Workplace, snapshot: Snapshot) -> Accounting:
    """Put each object of the snapshot into exactly one of located, claimed, left out, skipped, unaccounted, as the ledger is now.

    Of a whole snapshot that was planned, the ledger keeps how many located objects are current, older and gone, and how many
    objects each filter leaves out.
    """
    with temporary_folder(work) as folder, reading(snapshot.path):
        (standing, _), identified = identify_objects(work, snapshot, folder)
        accounting = account_for_files(
            identified.path,
            standing,
            within=snapshot.keys,
            silent_from=snapshot.silent_from or snapshot.taken_at,  # a sensor's plan may have archived what was written since
            filters=filters_of(work, snapshot),
        )
    if snapshot.complete:
        work.ledger.record_content(
            _record_of(snapshot),
            current=accounting.current,
            older=accounting.older,
            gone=accounting.gone,
            left_out=accounting.left_out,
        )
    return accounting


def plan_terms(work: Workplace, snapshot: Snapshot, sizes: ChunkSizes) -> PlanTerms:
    """Return what a plan of this snapshot depends on, beside its objects."""
    settings = work.source_settings
    return PlanTerms(
        source=work.source,
        archive_id=work.archive_id,
        target_size_bytes=sizes.target_bytes,
        snapshot=snapshot.name,
        inventory_time=snapshot.listed_at,
        limit_size_bytes=sizes.limit_bytes,
        min_chunk_size_bytes=settings.min_chunk_size,
        waits_since=snapshot.taken_at - timedelta(seconds=settings.max_wait),
    )


def waits_until(settings: SourceSettings, tail: WaitingTail) -> datetime:
    """Return when the wait of a tail is over."""
    return tail.oldest + timedelta(seconds=settings.max_wait)


def _write_plan(
    work: Workplace, snapshot: Snapshot, current: Current, folder: Path, sizes: ChunkSizes
) -> tuple[Plan, Mapping[str, int]]:
    """Write a plan; return it, and how many objects each filter leaves out."""
    filters = filters_of(work, snapshot)
    delta = not_yet_archived(current.unplanned, current.standing, folder / "wanted.parquet", filters=filters)
    work.ledger.record_skips(work.source, map(_unsupported, read_objects(delta.unsupported)))
    files = folder / "plan"
    files.mkdir()
    plan = write_plan(delta.path, files, plan_terms(work, snapshot, sizes))
    work.ledger.record_skips(work.source, map(_too_large, read_objects(files / TOO_LARGE_FILE)))
    return plan, delta.left_out


def filters_of(work: Workplace, snapshot: Snapshot) -> ObjectFilter:
    """Return what leaves objects of this snapshot out of its plan."""
    return ObjectFilter.of(work.source_settings, snapshot.taken_at)


def _register(work: Workplace, snapshot: Snapshot, plan: Plan) -> PlanRecord:
    """Give the plan its name and its place, then write it to the ledger with its claims."""
    generation = 0
    while work.ledger.find_plan(plan.sha256(generation)):
        generation += 1
    sha256 = plan.sha256(generation)
    name = sha256.hex()[:SHORT_NAME]
    if work.ledger.plan_name_taken(work.source, name):
        name = sha256.hex()[:LONG_NAME]
    folder = work.plans() / name
    for file in plan.folder.iterdir():
        sync_file(file)
    rename_durably(plan.folder, folder)
    record = PlanRecord(
        source=work.source,
        sha256=sha256,
        name=name,
        snapshot=snapshot.name,
        folder=str(folder),
        object_count=plan.object_count,
        object_bytes=plan.object_bytes,
    )
    work.ledger.register_plan(record, plan.chunks, read_identities(folder), read_parts(folder))
    return record


def _unsupported(obj: S3Object) -> Skip:
    return Skip.of(obj, SkipReason.UNSUPPORTED_KEY, "the key is not UTF-8, holds a NUL, or is longer than 1,024 bytes")


def _too_large(obj: S3Object) -> Skip:
    return Skip.of(obj, SkipReason.TOO_LARGE, f"{obj.size_bytes} bytes are more than the chunks of one plan can hold")


def temporary_folder(work: Workplace) -> AbstractContextManager[Path]:
    """Give a folder for files of one that holds no lease; a later plan removes it where this process is killed."""
    return _workspace(work, _ACCOUNTING)


@contextmanager
def _workspace(work: Workplace, prefix: str) -> Iterator[Path]:
    """Give a folder for temporary files, on the disk of the plans so that a plan can be moved there."""
    try:
        with writing_into(work.plans()), tempfile.TemporaryDirectory(dir=work.plans(), prefix=prefix) as folder:
            yield Path(folder)
    except OSError as error:
        raise StagingError(
            f"the folder {work.plans()} cannot take the plan: {error.strerror}", hint="make room there, or set 'home' elsewhere"
        ) from error


def _remove_unnamed(work: Workplace) -> None:
    """Remove what a crash left: folders of plans that were never registered. The caller holds the plan's lease."""
    for path in work.plans().iterdir():
        if path.name.startswith(_ACCOUNTING):
            left = _is_abandoned(path)
        else:
            left = path.name.startswith(_CUTTING) or not work.ledger.plan_name_taken(work.source, path.name)
        if left:
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    try:
        return datetime.now(UTC).timestamp() - path.stat().st_mtime > _ABANDONED_SECONDS
    except FileNotFoundError:  # the run that accounted there has just ended
        return False
