"""Examines one source for what crashes left, and mends it.

The doctor may run or be killed at any time. It leaves alone what a live run may hold. It never
spends, and never deletes anything at a store.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from caf_pipeline.chunk_state import (
    CLAIMING,
    EVER_LOCATED,
    IN_GOOD_STANDING,
    MAY_BE_PENDING,
    UNDER_WAY,
    ChunkState,
)
from caf_pipeline.encryption.identities import (
    SECOND_KEY,
    SINGLE_RECIPIENT,
    has_single_recipient,
)
from caf_pipeline.errors import CafError, StoreError
from caf_pipeline.ledger.records import (
    ChunkRows,
    LeaseRecord,
    account_lease,
    chunk_lease,
    plan_lease,
)
from caf_pipeline.maintenance.deletion.assessment import ProgressReporter
from caf_pipeline.maintenance.doctor.findings import (
    ALREADY_GONE,
    Actor,
    Examination,
    Finding,
    Kind,
    MendResult,
    UnknownPosts,
    mendable,
    not_checked,
)
from caf_pipeline.maintenance.doctor.stray_chunks import listed_files
from caf_pipeline.maintenance.doctor.stray_files import (
    half_copies,
    reservations,
    staged_files,
)
from caf_pipeline.maintenance.rebuild import FileKind, own_archives
from caf_pipeline.maintenance.scrub import prove_chunk
from caf_pipeline.records import Chunk, SignedTransaction, posting_of
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.planning import temporary_folder
from caf_pipeline.system.processes import Holder
from caf_pipeline.system.quantities import counted, show_time

_S = ChunkState

_CONTINUES: Final[Mapping[ChunkState, str]] = {
    _S.PACKING: "continues packing where the journal ends",
    _S.SEALED: "posts it",
    _S.POSTING: "checks whether its post is in a block, and sends it again if not",
    _S.POSTED: "uploads it",
    _S.UPLOADING: "uploads what is missing",
    _S.VERIFIED: "loads its locations",
}


_LOST: Final = (
    "it was posted, but its objects are neither claimed nor archived, or the view of chunks shows "
    "them so: nothing of the source is planned, packed or posted"
)
_RESTORE: Final = (
    "restore a backup with 'caf backup --restore', or set an empty database and run 'caf rebuild'"
)

_MANY_OBJECTS: Final = 1_000_000
"""Fewer are counted within a second or two."""

_Place = tuple[bytes | None, str | None, int | None]


@dataclass(frozen=True, slots=True)
class Settler:
    """Settles the signed transactions of the store's account.

    `account` raises MnemonicRefused without a wallet. `settle` signs nothing, and raises
    HeldByOther.
    """

    account: Callable[[], str]
    settle: Callable[[], None]


def examine(
    context: RunContext,
    *,
    alive: Callable[[Holder], bool | None],
    settler: Settler | None = None,
    unknown_posts: UnknownPosts = UnknownPosts.REPORT,
    reporter: ProgressReporter | None = None,
) -> Iterator[Finding]:
    """Yield findings of a source and of everything shared, in the order of mending.

    Examining changes nothing. If the store does not answer, its part is reported as not checked.
    `alive` may return None: unknown. A bar of `reporter` ends before a finding is yielded.
    """
    examination = Examination(
        replace(context, throttle=None), alive, unknown_posts, reporter or ProgressReporter()
    )
    yield from _recipients(examination)
    yield from _leases(examination)
    yield from _transactions(examination, settler)
    yield from _rows(examination)
    yield from _kept_locations(examination)
    yield from listed_files(examination)
    yield from _unknown_archives(examination)
    yield from _located_chunks(examination)
    yield from staged_files(examination)
    yield from reservations(examination)
    yield from half_copies(examination)
    yield from _unfinished_chunks(examination)


# --- keys


def _recipients(examination: Examination) -> Iterator[Finding]:
    context = examination.context
    is_configured = context.source in context.settings.sources  # the ledger may have others
    if is_configured and has_single_recipient(context.settings, context.source):
        yield Finding(Kind.KEYS, context.source, SINGLE_RECIPIENT, SECOND_KEY, Actor.NOBODY)


# --- leases


def _leases(examination: Examination) -> Iterator[Finding]:
    ledger, source = examination.context.ledger, examination.context.source
    others = {chunk_lease(chunk.name) for chunk in ledger.chunks.list() if chunk.source != source}
    others |= {plan_lease(name) for name in ledger.lookup.sources() if name != source}
    for lease in ledger.leases.list():
        if lease.name in others:
            continue
        who = f"run {lease.holder.run} (process {lease.holder.pid})"
        expired = f"{who} let it expire at {show_time(lease.expires_at)}"
        if not examination.may_be_held(lease):
            is_dead = examination.alive(lease.holder) is False
            problem = f"{who} is dead and did not give it back" if is_dead else expired
            yield mendable(
                Kind.LEASE,
                lease.name,
                problem,
                "given back",
                partial(_end_lease, examination, lease),
            )
        elif not lease.live:
            yield Finding(
                Kind.LEASE,
                lease.name,
                f"{expired}, but lives: it may be paused",
                "left to it; the next run takes it over",
                Actor.NOBODY,
            )


def _end_lease(examination: Examination, lease: LeaseRecord) -> MendResult:
    is_ended = examination.context.ledger.leases.end(lease.name, lease.epoch)
    return MendResult("given back") if is_ended else ALREADY_GONE


# --- transactions


def _transactions(examination: Examination, settler: Settler | None) -> Iterator[Finding]:
    held = examination.leases_of_live_runs()
    unsettled = [
        transaction
        for transaction in examination.context.ledger.stray_rows.unsettled()
        if account_lease(transaction.account) not in held
    ]
    if not unsettled:
        return
    account = ""
    try:
        account = settler.account() if settler else ""
    except CafError as error:
        yield not_checked("transactions that are not settled", error)
    for transaction in unsettled:
        what = "a purchase of space" if transaction.purpose == "buy" else "a post"
        problem = (
            f"{what} was signed and is not settled; block {transaction.timeout_height} is the last "
            "that may include it"
        )
        if settler is not None and transaction.account == account:
            yield mendable(
                Kind.TRANSACTION,
                transaction.hash,
                problem,
                "settled",
                partial(_settle, examination, settler, transaction),
            )
        else:
            remedy = f"run this with the wallet and chain of account {transaction.account}"
            yield Finding(Kind.TRANSACTION, transaction.hash, problem, remedy, Actor.OPERATOR)


def _settle(
    examination: Examination, settler: Settler, transaction: SignedTransaction
) -> MendResult:
    if _is_settled(examination, transaction):  # together with an earlier transaction
        return MendResult("settled")
    examination.require_free(account_lease(transaction.account))
    settler.settle()
    return MendResult("settled") if _is_settled(examination, transaction) else ALREADY_GONE


def _is_settled(examination: Examination, transaction: SignedTransaction) -> bool:
    unsettled = examination.context.ledger.stray_rows.unsettled()
    return transaction.hash not in {other.hash for other in unsettled}


# --- rows


def _rows(examination: Examination) -> Iterator[Finding]:
    context, source = examination.context, examination.context.source
    held = examination.leases_of_live_runs()
    archive_id = context.ledger.sources.archive_id(source)
    lost = context.ledger.transactions(context.holder).lost_posts(archive_id or "")
    if (members := _located_members(context)) >= _MANY_OBJECTS:
        examination.reporter.note(f"counting rows of {counted(members, 'object')} of '{source}'")
    for rows in context.ledger.stray_rows.by_chunk(source):
        if rows.chunk is not None and chunk_lease(rows.chunk) in held:
            continue
        if rows.chunk is not None and rows.chunk in lost:
            yield _lost_chunk(examination, rows, rows.chunk)
            continue
        stray = (
            (rows.locations if rows.state not in EVER_LOCATED else 0, "location"),
            (rows.pending if rows.state not in MAY_BE_PENDING else 0, "pending location"),
            (rows.claims if rows.state not in CLAIMING else 0, "claim"),
        )
        if counts := " and ".join(counted(count, kind) for count, kind in stray if count):
            state = f"is '{rows.state}'" if rows.state else "the ledger does not have"
            yield mendable(
                Kind.ROWS,
                rows.chunk or f"{source}, chunk number {rows.caf_file_id} of the table",
                f"{counts} of a chunk that {state}",
                "removed",
                partial(_drop_rows, examination, rows),
            )
        if rows.chunk is not None and (mismatch := count_mismatch(rows)):
            yield Finding(Kind.ROWS, rows.chunk, *mismatch, Actor.OPERATOR)


def _located_members(context: RunContext) -> int:
    chunks = context.ledger.chunks.list(context.source, IN_GOOD_STANDING)
    return sum(chunk.member_count for chunk in chunks)


def _lost_chunk(examination: Examination, rows: ChunkRows, chunk: str) -> Finding:
    if rows.state in MAY_BE_PENDING and rows.pending == rows.member_count:

        def claim() -> MendResult:
            with examination.lease(chunk_lease(chunk)):
                if examination.context.ledger.stray_rows.claim_again(rows.caf_file_id):
                    return MendResult("claimed again")
            return MendResult(f"other chunks claim some of them; {_RESTORE}", Actor.OPERATOR)

        return mendable(Kind.ROWS, chunk, _LOST, "claimed again", claim)
    return Finding(Kind.ROWS, chunk, _LOST, _RESTORE, Actor.OPERATOR)


def count_mismatch(rows: ChunkRows) -> tuple[str, str] | None:
    """Return what is wrong with a chunk's counts and what to do."""
    members, report = counted(rows.member_count, "member"), "report it, since no crash does this"
    if rows.state in IN_GOOD_STANDING and rows.locations != rows.located_count:
        problem = f"{rows.locations:,} of {counted(rows.located_count, 'location')}"
        if rows.locations > rows.located_count:
            return problem, f"rows were altered in the ledger: {_RESTORE}"
        again = "the next plan archives and pays for the objects without a location again"
        if rows.adopted:
            return problem, f"restore a backup: another program wrote this file; {again}"
        return problem, f"'caf rebuild' restores the rows from the stored chunk; otherwise {again}"
    is_sealed = rows.state in UNDER_WAY[UNDER_WAY.index(_S.SEALED) :]
    if is_sealed and rows.claims != rows.member_count:
        return f"{counted(rows.claims, 'claim')} of {members}", report
    if is_sealed and rows.pending != rows.member_count:
        return f"{counted(rows.pending, 'pending location')} of {members}", report
    return None


def _drop_rows(examination: Examination, rows: ChunkRows) -> MendResult:
    # A missing chunk has no lease, so that plans, which read these rows, must wait.
    name = plan_lease(examination.context.source) if rows.chunk is None else chunk_lease(rows.chunk)
    with examination.lease(name):
        is_dropped = examination.context.ledger.stray_rows.drop(rows.caf_file_id)
        return MendResult("removed") if is_dropped else ALREADY_GONE


def _kept_locations(examination: Examination) -> Iterator[Finding]:
    context = examination.context
    folder = context.kept_locations()
    if not folder.is_dir() or context.source not in context.ledger.lookup.sources():
        return
    members, kept_bytes = max(1, _located_members(context)), 0
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # a plan has just replaced it
            kept_bytes += file.stat().st_size
    with (
        temporary_folder(context) as temporary,
        examination.reporter.progress("comparing rows", kept_bytes) as advance,
    ):
        differing = context.ledger.exports.compare_kept(
            context.source,
            temporary,
            folder,
            advance=lambda count: advance(kept_bytes * count // members),
        )
    if differing:

        def drop() -> MendResult:
            with examination.lease(plan_lease(context.source)):
                shutil.rmtree(folder, ignore_errors=True)
            return MendResult("removed")

        problem = f"{counted(differing, 'location')} either there or in the ledger, but not in both"
        yield mendable(
            Kind.ROWS,
            str(folder),
            problem,
            "removed; the next plan exports it again",
            drop,
        )


# --- archives of a ledger that was restored from a backup without a hash


def _unknown_archives(examination: Examination) -> Iterator[Finding]:
    """The ledger's own archive id may be wrong, too."""
    context, source = examination.context, examination.context.source
    if source not in context.settings.sources or not context.ledger.controls.unverified():
        return
    try:
        archive_ids, others = own_archives(context, context.store.owner(), {}, whole=False)
    except CafError as error:
        yield not_checked(f"the archives that may belong to {source}", error)
        return
    for archive_id in set(archive_ids) - context.ledger.sources.archive_ids(source):
        problem = f"its chunks name source '{source}', and the ledger does not have this archive"
        remedy = f"'caf rebuild {source}' adds it"
        yield Finding(Kind.FILE, archive_id, problem, remedy, Actor.OPERATOR)
    for archive in others:
        if archive.kind is FileKind.UNDECIDED:
            yield Finding(Kind.FILE, source, archive.why, "check again later", Actor.OPERATOR)


# --- located chunks


def _located_chunks(examination: Examination) -> Iterator[Finding]:
    context = examination.context
    for chunk in context.ledger.chunks.list(context.source, [_S.DAMAGED]):
        if chunk_lease(chunk.name) not in examination.leases_of_live_runs():
            yield Finding(
                Kind.COPIES, chunk.name, f"damaged: {chunk.reason}", _repair(chunk), Actor.OPERATOR
            )
    required = context.store.required_copies
    located = context.ledger.chunks.list(context.source, [_S.LOCATED])
    if not located:
        return
    listed = list[tuple[Chunk, int]]()
    error: StoreError | None = None
    total = sum(chunk.stored_size_bytes for chunk in located)
    with examination.reporter.progress("looking for copies", total) as advance:
        try:
            enough = _with_enough_copies(context, located)
            for chunk in located:
                if (chunk.merkle_root, chunk.owner, chunk.start) not in enough:
                    copies = context.store.copies(posting_of(chunk))
                    listed.append((chunk, len({copy.provider for copy in copies})))
                advance(chunk.stored_size_bytes)
        except StoreError as failure:
            error = failure
    for chunk, count in listed:
        if count < required and chunk_lease(chunk.name) not in examination.leases_of_live_runs():
            problem = (
                f"{count} of {counted(required, 'copy', 'copies')} listed"
                if count
                else "the store no longer lists it, or any copy of it"
            )
            remedy = f"marked as damaged; {_repair(chunk)}"
            yield mendable(
                Kind.COPIES,
                chunk.name,
                problem,
                remedy,
                partial(_prove, examination, chunk, remedy),
            )
    if error:
        yield not_checked(f"copies of the located chunks of {context.source}", error)


def _with_enough_copies(context: RunContext, located: Sequence[Chunk]) -> Set[_Place]:
    if context.store.listed_at() is None:
        return frozenset()
    places = {(chunk.merkle_root, chunk.owner, chunk.start) for chunk in located}
    return {
        (file.merkle_root, file.owner, file.start)
        for archive_id in {chunk.archive_id for chunk in located}
        for page in context.store.file_pages(archive_id)
        for file in page
        if (file.merkle_root, file.owner, file.start) in places
        and len(set(file.providers)) >= context.store.required_copies
    }


def _repair(chunk: Chunk) -> str:
    return f"'caf repair {chunk.name}' stores it again"


def _prove(examination: Examination, chunk: Chunk, remedy: str) -> MendResult:
    examination.require_free(chunk_lease(chunk.name))
    is_damaged = prove_chunk(examination.context, chunk.name).explanation
    return MendResult(remedy, Actor.OPERATOR) if is_damaged else ALREADY_GONE


# --- unfinished chunks


def _unfinished_chunks(examination: Examination) -> Iterator[Finding]:
    context = examination.context
    chunks = context.ledger.chunks.list(context.source, CLAIMING)
    next_run = f"'caf run {context.source}'"
    for chunk in chunks:
        if chunk.state is _S.PARKED:
            remedy = (
                f"correct the cause, then 'caf unpark {chunk.name}': the next run continues with "
                "what is packed"
            )
            yield Finding(
                Kind.CHUNK,
                chunk.name,
                f"parked: {chunk.reason or 'no reason was given'}",
                remedy,
                Actor.OPERATOR,
            )
    planned = sum(chunk.state is _S.PLANNED for chunk in chunks)
    if planned:
        problem = f"{counted(planned, 'chunk')} planned and not started"
        yield Finding(
            Kind.CHUNK,
            context.source,
            problem,
            f"{next_run} archives {'it' if planned == 1 else 'them'}",
            Actor.RUN,
        )
    for chunk in examination.without_run([chunk for chunk in chunks if chunk.state in _CONTINUES]):
        problem = f"a run left it as '{chunk.state}'"
        remedy = f"{next_run} {_CONTINUES[chunk.state]}"
        yield Finding(Kind.CHUNK, chunk.name, problem, remedy, Actor.RUN)
