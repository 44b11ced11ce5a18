"""The steps after an inventory: find what is current, cut chunks, account for all objects.

    inventories.take_inventory → record_current → cut_plan → account_for

A plan is written to a folder, then registered with its claims in one transaction.
"""

import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from caf_pipeline.caf.archive import DEFAULT_LIMITS
from caf_pipeline.chunk_state import ChunkState, has_reached
from caf_pipeline.encryption.sealing import PRIVATE_LIMITS
from caf_pipeline.errors import StagingError
from caf_pipeline.inventory.accounting import Accounting, account_for_files
from caf_pipeline.inventory.current import (
    find_exceptions,
    identify,
    read_exceptions,
)
from caf_pipeline.inventory.cutting import MAX_CHUNKS, write_plan
from caf_pipeline.inventory.filters import NO_FILTER, ObjectFilter
from caf_pipeline.inventory.key_windows import ALL_KEYS, KeyWindow
from caf_pipeline.inventory.ledger_rows import EXCEPTION_SCHEMA, STANDING_SCHEMA
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.inventory.plan import (
    TOO_LARGE_FILE,
    Plan,
    PlanTerms,
    read_identities,
    read_parts,
    read_waiting,
)
from caf_pipeline.inventory.remaining import ended_skips, not_yet_archived
from caf_pipeline.inventory.snapshot import Snapshot, read_objects
from caf_pipeline.ledger.records import InventoryRecord, PlanRecord, PlanRow, Skip, WaitingObjects
from caf_pipeline.records import Chunk, Lease
from caf_pipeline.run_context import RunContext
from caf_pipeline.settings import SourceSettings
from caf_pipeline.steps import inventories
from caf_pipeline.steps.compare_headers import REWRITTEN_SCHEMA, Comparison, compare_headers
from caf_pipeline.steps.first_plan import (
    accept_new_archive,
    refuse_lost,
    refuse_new_archive,
    refuse_unknown,
)
from caf_pipeline.system.atomic_files import rename_durably, sync_file
from caf_pipeline.system.folder_lock import alone_in, reading, writing_into
from caf_pipeline.system.parquet import write_whole
from caf_pipeline.system.quantities import counted, show_size

SHORT_NAME: Final = 8  # hex digits of a plan's hash in the ids of its chunks
LONG_NAME: Final = 12  # if another plan of the source has the short name

MIN_TARGET_BYTES: Final = 4096
"""The smallest target size. A chunk's own two members take some of it."""

MAX_PLANS_OF_INVENTORY: Final = 100
"""Plans that may belong to one inventory: ten million chunks."""

_UNSUPPORTED: Final = "the key is not UTF-8, contains a NUL, or is longer than 1,024 bytes"
_CUTTING: Final = ".cutting-"
_ACCOUNTING: Final = ".accounting-"

TEMPORARY: Final = re.compile(
    r"\..+\.parquet\.(tmp|listed)|\.(caf-spill|accounting|restoring|adopting|searching)-.+"
)
"""Files of a process that locks their folder by `writing_into`."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The result of planning a snapshot.

    Attributes:
        plans: empty if nothing is new; several if a plan was full.
        waiting: objects left for the next plan, by `min_chunk_size`.
        warning: of chunks too large for the store, or of another proof type.
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
        return self.plans[0] if self.plans else None


# --- what is current ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CurrentContent:
    """A snapshot's objects with their identities, in files.

    `rewritten` are objects with unproven bytes. `exceptions` are keys whose LastModified does not
    show what is current.
    """

    identified: Path
    unsettled: Path
    standing: Path
    comparison: Comparison
    rewritten: Path
    exceptions: int


def record_current(
    context: RunContext,
    lease: Lease,
    snapshot: Snapshot,
    folder: Path,
    *,
    compares_left_out: bool = False,
) -> CurrentContent:
    """Record what is current by this inventory, unless a later one covers the same keys.

    The caller removes the files in `folder`. `compares_left_out` compares filtered objects, too.
    """
    inventory = _record_of(snapshot)
    comparison, rewritten = Comparison(), folder / "not_proven.parquet"
    filters = filters_of(context, snapshot)
    compared = NO_FILTER if compares_left_out else filters
    files, output = export_state(context, folder, snapshot.keys), folder / "identified.parquet"
    identified = identify(snapshot, *files, output, filters=compared)
    if identified.to_compare_count:
        comparison = compare_headers(
            context, lease, inventory, identified.to_compare, rewritten=rewritten
        )
        files = export_state(context, folder, snapshot.keys)
        identified = identify(snapshot, *files, output, filters=compared)
    else:
        write_whole((), rewritten, REWRITTEN_SCHEMA)
    exceptions = folder / "found.parquet"
    superseded = context.ledger.content.later_inventories(inventory)
    count = find_exceptions(
        snapshot, identified, *files, exceptions, superseded=superseded, filters=filters
    )
    context.ledger.content.record_planned(inventory, read_exceptions(exceptions))
    return CurrentContent(
        identified.path, identified.unsettled, files[0], comparison, rewritten, count
    )


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


def export_state(
    context: RunContext, folder: Path, within: KeyWindow, *, in_ledger: bool = True
) -> tuple[Path, Path]:
    """Export standings and exceptions; none if the ledger lacks the source."""
    standing, exceptions = folder / "standing", folder / "exceptions.parquet"
    if in_ledger:
        export_standing(context, standing, within)
        context.ledger.exports.exceptions(context.source, exceptions, within)
    else:
        write_whole((), standing, STANDING_SCHEMA)
        write_whole((), exceptions, EXCEPTION_SCHEMA)
    return standing, exceptions


def export_standing(context: RunContext, folder: Path, within: KeyWindow = ALL_KEYS) -> None:
    """Export what the ledger has of the objects `within`, and maybe of others, to a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    if within == ALL_KEYS:
        context.ledger.exports.changes(context.source, folder, context.kept_locations())
    else:  # a sensor's few keys: looking them up costs less than reading the kept files
        folder.mkdir()
        context.ledger.exports.standing(context.source, folder / "0.parquet", within)


# --- plans ----------------------------------------------------------------------------------------


def cut_plan(
    context: RunContext,
    snapshot: Snapshot,
    *,
    new_archive: bool = False,
    patience_seconds: float = 0.0,
) -> PlanReport:
    """Plan and claim objects of the snapshot that are new to the ledger. Plans only add.

    Chunks have the source's target size, however slow the store was when last measured. They get
    smaller only after a chunk that did not fit is withdrawn.

    `new_archive` plans even if the store may have objects that the ledger lacks, and ends later
    checks of that. Another run's plan is awaited for `patience_seconds`.

    Raises:
        StoredAlready: see `refuse_new_archive`.
        HeldByOther: another run plans this source.
        IntegrityError: the snapshot is damaged.
    """
    plans: list[PlanRecord] = []
    waiting = None
    # The lease keeps another process from replacing the source's address.
    with reading(snapshot.path), inventories.lease_on_plan(context, patience_seconds) as lease:
        context.wait_while_paused(lease.check)
        context.ledger.sources.register(context.source, context.address, lease=lease)
        if new_archive:
            accept_new_archive(context)
        elif snapshot.object_count:
            refuse_new_archive(context, remember=True)
        sizes, warning = chunk_sizes(context)
        _remove_unregistered(context)
        remove_temporary(context)
        previous = last_plan(context)
        with _workspace(context, _CUTTING) as outer:
            current = record_current(context, lease, snapshot, outer)
            more = True
            while more:
                with _workspace(context, _CUTTING) as folder:
                    plan, left_out = _write_plan(context, snapshot, current, folder, sizes)
                    more = plan.leftover_count > 0
                    if plan.chunks:
                        context.wait_while_paused(lease.check)
                        (refuse_lost if new_archive else refuse_unknown)(context)
                        plans.append(_register(context, lease, snapshot, plan))
                        plan = replace(plan, folder=Path(plans[-1].folder))
                    if more:
                        # with what was just claimed
                        export_standing(context, current.standing, snapshot.keys)
                    else:
                        waiting = _record_waiting(context, snapshot, plan)
            filters = filters_of(context, snapshot)
            if snapshot.complete and (
                ended := ended_skips(current.unsettled, current.standing, filters=filters)
            ):
                silent_from = snapshot.silent_from or snapshot.taken_at
                context.ledger.skips.end(
                    context.source, ended, listed_at=snapshot.taken_at, silent_from=silent_from
                )
        if snapshot.silent_from is None:  # a report may lack what was written before it
            context.ledger.notices.forget_noticed(
                context.source, snapshot.name, snapshot.listed_at, snapshot.after, snapshot.until
            )
    names = {plan.name for plan in plans}
    chunks = (
        [chunk for chunk in context.ledger.chunks.list(context.source) if chunk.plan in names]
        if plans
        else []
    )
    warnings = "; ".join(filter(None, [warning, _other_proof_type(context)]))
    return PlanReport(
        snapshot,
        plans,
        chunks,
        sizes.target_bytes,
        previous,
        waiting,
        warnings,
        current.comparison,
        current.exceptions,
        left_out,
    )


def last_plan(context: RunContext) -> PlanRow | None:
    """Return the source's last plan; consecutive plans of one inventory become one row.

    If an inventory was planned again, only the last planning counts.
    """
    plans = context.ledger.plans.list(context.source, limit=MAX_PLANS_OF_INVENTORY)
    if not plans:
        return None
    merged = [plans[0]]
    for row in plans[1:]:
        # An inventory becomes several plans only if one plan cannot hold the chunks of two.
        together = sum(row.chunks.values()) + sum(merged[-1].chunks.values())
        if row.record.snapshot != plans[0].record.snapshot or together <= MAX_CHUNKS:
            break
        merged.append(row)
    records, chunks = [row.record for row in merged], Counter[ChunkState]()
    for row in merged:
        chunks.update(row.chunks)
    whole = replace(
        records[0],
        name=", ".join(record.name for record in reversed(records)),
        object_count=sum(record.object_count for record in records),
        object_bytes=sum(record.object_bytes for record in records),
    )
    return PlanRow(whole, merged[0].created_at, chunks)


def _record_waiting(context: RunContext, snapshot: Snapshot, plan: Plan) -> WaitingObjects | None:
    settings, tail = context.source_settings, plan.waiting
    if tail is None:
        context.ledger.skips.record_waiting(context.source, (), None, whole=snapshot.complete)
        return None
    until = waits_until(settings, tail.oldest)
    detail = (
        f"waits until {until:%Y-%m-%d %H:%M} UTC for more objects: min_chunk_size is "
        f"{show_size(settings.min_chunk_size)}"
    )
    context.ledger.skips.record_waiting(
        context.source, _waiting(plan, detail), until, whole=snapshot.complete
    )
    return WaitingObjects(tail.chunk.object_count, tail.chunk.object_bytes, until)


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """The size at which chunks are cut, and their limit with the manifest (0: the hard limit)."""

    target_bytes: int
    limit_bytes: int = 0


def chunk_sizes(context: RunContext) -> tuple[ChunkSizes, str]:
    """Return the sizes of the next chunks, and a warning if the store is too slow."""
    target_size = int(context.source_settings.target_size)
    fitting = context.store.largest_chunk_bytes()
    if fitting is None:
        return ChunkSizes(target_size), ""
    withdrawn = context.ledger.chunks.list(source=context.source, states=[ChunkState.WITHDRAWN])
    refused = any(
        (chunk.stored_size_bytes or chunk.expected_size_bytes) > fitting for chunk in withdrawn
    )
    limit_size = max(fitting, MIN_TARGET_BYTES)
    sizes = (
        ChunkSizes(min(target_size, limit_size), limit_size) if refused else ChunkSizes(target_size)
    )
    if fitting >= target_size:
        return sizes, ""
    remedy = (
        f"this plan is cut at {sizes.target_bytes} bytes"
        if refused
        else "set target_size to that or less"
    )
    return sizes, (
        f"source {context.source} has a target size of {target_size} bytes, but at the measured "
        f"rates only {fitting} bytes are uploaded before the providers' deadline; {remedy}"
    )


def _other_proof_type(context: RunContext) -> str:
    posted = [
        chunk
        for chunk in context.ledger.chunks.list(context.source)
        if has_reached(chunk.state, ChunkState.POSTED)
    ]
    others = sum(chunk.proof_type != context.store.proof_type for chunk in posted)
    if not others:
        return ""
    keep = "keeps it" if others == 1 else "keep it"
    return (
        f"new chunks have proof type {context.store.proof_type}; {counted(others, 'chunk')} "
        f"posted with another {keep}"
    )


def account_for(context: RunContext, snapshot: Snapshot) -> Accounting:
    """Count each object of the snapshot once: located, claimed, left out, skipped or unaccounted.

    The ledger stores it if the snapshot is complete.
    """
    with temporary_folder(context) as folder, reading(snapshot.path):
        accounting = account_for_files(
            snapshot.path,
            *export_state(context, folder, snapshot.keys),
            within=snapshot.keys,
            # A sensor's plan may have archived later objects.
            silent_from=snapshot.silent_from or snapshot.taken_at,
            filters=filters_of(context, snapshot),
        )
    if snapshot.complete:
        context.ledger.content.record_content(
            _record_of(snapshot),
            current=accounting.current,
            older=accounting.older,
            gone=accounting.gone,
            left_out=accounting.left_out,
        )
    return accounting


def plan_terms(context: RunContext, snapshot: Snapshot, sizes: ChunkSizes) -> PlanTerms:
    """Return everything that a plan depends on, besides its objects."""
    settings = context.source_settings
    return PlanTerms(
        source=context.source,
        archive_id=context.ledger.sources.archive_id(context.source) or "",  # a preview has none
        target_size_bytes=sizes.target_bytes,
        snapshot=snapshot.name,
        inventory_time=snapshot.listed_at,
        limits=DEFAULT_LIMITS if settings.public else PRIVATE_LIMITS,
        limit_size_bytes=sizes.limit_bytes,
        min_chunk_size_bytes=settings.min_chunk_size,
        waits_since=_moment_of(snapshot) - timedelta(seconds=settings.max_wait),
    )


def _moment_of(snapshot: Snapshot) -> datetime:
    return max(snapshot.taken_at, datetime.now(UTC))


def write_plan_of(
    context: RunContext,
    snapshot: Snapshot,
    delta: Path,
    folder: Path,
    terms: PlanTerms,
    *,
    in_ledger: bool = True,
) -> Plan:
    """Write a plan to an empty folder.

    A LastModified in the future counts as the time of the first plan with it.
    """
    plan = write_plan(delta, folder, terms)
    if plan.waiting is None:
        return plan
    moment = _moment_of(snapshot)
    first_seen = (
        context.ledger.skips.waiting_since(context.source, _waiting(plan)) if in_ledger else None
    )
    oldest = min(plan.waiting.oldest, moment, first_seen or moment)
    if waits_until(context.source_settings, oldest) > moment:
        return replace(plan, waiting=replace(plan.waiting, oldest=oldest))
    for file in folder.iterdir():
        file.unlink()
    return write_plan(delta, folder, replace(terms, min_chunk_size_bytes=0))


def _waiting(plan: Plan, detail: str = "") -> Iterator[Skip]:
    return (Skip.of(obj, SkipReason.WAITING, detail) for obj in read_waiting(plan))


def waits_until(settings: SourceSettings, oldest: datetime) -> datetime:
    """Return when objects stop waiting, if the oldest has this time."""
    wait = timedelta(seconds=settings.max_wait)
    return min(oldest, datetime.max.replace(tzinfo=UTC) - wait) + wait


def _write_plan(
    context: RunContext,
    snapshot: Snapshot,
    current: CurrentContent,
    folder: Path,
    sizes: ChunkSizes,
) -> tuple[Plan, Mapping[str, int]]:
    filters = filters_of(context, snapshot)
    delta = not_yet_archived(
        current.unsettled, current.standing, folder / "wanted.parquet", filters=filters
    )
    context.ledger.skips.record(
        context.source,
        (
            Skip.of(obj, SkipReason.UNSUPPORTED_KEY, _UNSUPPORTED)
            for obj in read_objects(delta.unsupported)
        ),
    )
    files = folder / "plan"
    files.mkdir()
    plan = write_plan_of(context, snapshot, delta.path, files, plan_terms(context, snapshot, sizes))
    context.ledger.skips.record(
        context.source,
        (
            Skip.of(
                obj, SkipReason.TOO_LARGE, f"{obj.size_bytes} bytes exceed the chunks of a plan"
            )
            for obj in read_objects(files / TOO_LARGE_FILE)
        ),
    )
    return plan, delta.left_out


def filters_of(context: RunContext, snapshot: Snapshot) -> ObjectFilter:
    """Return the filters for a plan of this snapshot."""
    return ObjectFilter.of(context.source_settings, snapshot.taken_at)


def _register(context: RunContext, lease: Lease, snapshot: Snapshot, plan: Plan) -> PlanRecord:
    generation = 0
    while context.ledger.plans.find(plan.sha256(generation)):
        generation += 1
    sha256 = plan.sha256(generation)
    name = sha256.hex()[:SHORT_NAME]
    if context.ledger.plans.is_name_taken(context.source, name):
        name = sha256.hex()[:LONG_NAME]
    folder = context.plans() / name
    for file in plan.folder.iterdir():
        sync_file(file)
    rename_durably(plan.folder, folder)
    record = PlanRecord(
        source=context.source,
        sha256=sha256,
        name=name,
        snapshot=snapshot.name,
        folder=str(folder),
        object_count=plan.object_count,
        object_bytes=plan.object_bytes,
    )
    context.ledger.plans.register(
        lease, record, plan.chunks, read_identities(folder), read_parts(folder)
    )
    return record


def temporary_folder(context: RunContext) -> AbstractContextManager[Path]:
    """Return a folder for work without a lease. A later plan removes it after a kill."""
    return _workspace(context, _ACCOUNTING)


@contextmanager
def _workspace(context: RunContext, prefix: str) -> Iterator[Path]:
    try:
        with (
            writing_into(context.plans()),
            tempfile.TemporaryDirectory(dir=context.plans(), prefix=prefix) as folder,
        ):
            yield Path(folder)
    except OSError as error:
        raise StagingError(
            f"the folder {context.plans()} cannot take temporary files: {error.strerror}",
            hint="make room there, or set 'home' elsewhere",
        ) from error


def _remove_unregistered(context: RunContext) -> None:
    """The caller holds the plan's lease."""
    for path in context.plans().iterdir():
        if path.name.startswith(_CUTTING) or (
            not path.name.startswith(_ACCOUNTING)
            and not context.ledger.plans.is_name_taken(context.source, path.name)
        ):
            shutil.rmtree(path, ignore_errors=True)


def remove_temporary(context: RunContext) -> None:
    """Remove temporary files of killed processes from folders into which none writes now."""
    staging = context.settings.staging_folder
    for folder in (
        context.inventories(),
        context.plans(),
        *([staging] if staging.is_dir() else []),
    ):
        with alone_in(folder) as is_alone:
            for path in folder.iterdir() if is_alone else ():
                if TEMPORARY.fullmatch(path.name):
                    with suppress(OSError):
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
