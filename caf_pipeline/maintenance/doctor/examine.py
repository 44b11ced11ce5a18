"""The doctor: finds what a crash can leave of one source, says it, and mends what can be mended
without a run.

May be run at any moment, beside live runs and another doctor, and killed at any point: what a live
run may hold is left alone, and each mend looks again under the lease of what it mends. Nothing is
ever sent that spends again, and nothing is deleted at a store.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from caf_pipeline.chunk_state import (
    CLAIMING,
    EVER_LOCATED,
    IN_GOOD_STANDING,
    MAY_BE_PENDING,
    UNDER_WAY,
    ChunkState,
)
from caf_pipeline.errors import CafError, StoreError
from caf_pipeline.ledger.records import (
    Chunk,
    ChunkRows,
    Holder,
    LeaseRecord,
    account_lease,
    chunk_lease,
    plan_lease,
    posting_of,
)
from caf_pipeline.maintenance.doctor.findings import (
    NO_LONGER_THERE,
    Actor,
    Examination,
    Finding,
    Kind,
    Mended,
    mendable,
    not_checked,
)
from caf_pipeline.maintenance.doctor.stray_chunks import listed_files
from caf_pipeline.maintenance.doctor.stray_files import (
    half_copies,
    home_leftovers,
    reservations,
    staged_files,
)
from caf_pipeline.maintenance.scrub import prove_chunk
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.planning import temporary_folder
from caf_pipeline.store.protocol import SignedTransaction
from caf_pipeline.system.quantities import counted

_S = ChunkState

_GOES_ON: Final[Mapping[ChunkState, str]] = {
    _S.PACKING: "goes on packing where the journal ends",
    _S.SEALED: "posts it",
    _S.POSTING: "finds out whether its post is in a block, and sends it again if not",
    _S.POSTED: "uploads it",
    _S.UPLOADING: "uploads what is missing",
    _S.VERIFIED: "loads its locations",
}
"""What the next run does with a chunk that the last one left in this state."""


_Place = tuple[bytes | None, str | None, int | None]
"""A file's Merkle root, owner and start."""


@dataclass(frozen=True, slots=True)
class Settler:
    """What settles the transactions that a store signed.

    Attributes: account: returns the account as the ledger names it; raises MnemonicRefused where
        there is no wallet. settle: waits until the fate of each of the account's transactions is
        known, and writes it; nothing new is signed.
            Raises HeldByOther where a live run does that already, and StoreError.
    """

    account: Callable[[], str]
    settle: Callable[[], None]


def examine(
    context: RunContext, *, alive: Callable[[Holder], bool | None], settler: Settler | None = None
) -> Iterator[Finding]:
    """Yield what is found of one source, and of what all sources share; the order is that in which
    it is to be mended.

    Nothing is changed by looking. `context.objects` is never asked. Where the store is away, what
    needs it is yielded as not looked at.

    Args:
        context: the source's parts. Work that the operator paused is looked at all the same.
        alive: tells whether a holder's process runs; None where that cannot be told from here.
        settler: settles transactions; None where the store signs none.

    Raises:
        LedgerError: nothing can be said without the ledger. StagingError: a folder cannot be read.
    """
    examination = Examination(replace(context, throttle=None), alive)
    yield from _leases(examination)
    yield from _transactions(examination, settler)
    yield from _rows(examination)
    yield from _kept(examination)
    all_known = True  # the ledger has every chunk that the store may have
    for finding in listed_files(examination):
        all_known = (
            all_known
            and finding.actor in (Actor.NOBODY, Actor.RUN)
            and finding.kind is not Kind.UNSEEN
        )
        yield finding
    yield from _unlisted(examination)
    yield from staged_files(examination)
    yield from reservations(examination)
    yield from home_leftovers(examination, all_known=all_known)
    yield from half_copies(examination)
    yield from _chunks(examination)


# --- leases
# ------------------------------------------------------------------------------------------


def _leases(examination: Examination) -> Iterator[Finding]:
    ledger, source = examination.context.ledger, examination.context.source
    others = {chunk_lease(chunk.name) for chunk in ledger.chunks.list() if chunk.source != source}
    others |= {plan_lease(name) for name in ledger.lookup.sources() if name != source}
    for lease in ledger.leases.list():
        if lease.name in others:
            continue
        who = f"run {lease.holder.run} (process {lease.holder.pid})"
        if not examination.may_be_held(lease):
            dead = examination.alive(lease.holder) is False
            found = (
                f"{who} is dead and did not give it back"
                if dead
                else f"{who} let it run out at {_when(lease)}"
            )
            yield mendable(
                Kind.LEASE, lease.name, found, "given back", partial(_end_lease, examination, lease)
            )
        elif not lease.live:
            found = f"{who} let it run out at {_when(lease)}, but lives: it may be paused"
            yield Finding(
                Kind.LEASE,
                lease.name,
                found,
                "left to it; the next run takes it over",
                Actor.NOBODY,
            )


def _when(lease: LeaseRecord) -> str:
    return f"{lease.expires_at:%Y-%m-%d %H:%M:%S} UTC"


def _end_lease(examination: Examination, lease: LeaseRecord) -> Mended:
    return (
        Mended("given back")
        if examination.context.ledger.leases.end(lease.name, lease.epoch)
        else NO_LONGER_THERE
    )


# --- transactions
# ------------------------------------------------------------------------------------------


def _transactions(examination: Examination, settler: Settler | None) -> Iterator[Finding]:
    held = examination.leases_of_live_runs()
    left = [
        one
        for one in examination.context.ledger.stray_rows.unsettled()
        if account_lease(one.account) not in held
    ]
    if not left:
        return
    account = ""
    try:
        account = settler.account() if settler else ""
    except CafError as error:
        yield not_checked("transactions that are not settled", error)
    for one in left:
        what = "a purchase of space" if one.purpose == "buy" else "a post"
        found = (
            f"{what} was signed and is not settled; block {one.timeout_height} is the last "
            "that may include it"
        )
        if settler is not None and one.account == account:
            yield mendable(
                Kind.TRANSACTION,
                one.hash,
                found,
                "settled",
                partial(_settle, examination, settler, one),
            )
        else:
            remedy = f"run this with the wallet and chain of account {one.account}"
            yield Finding(Kind.TRANSACTION, one.hash, found, remedy, Actor.OPERATOR)


def _settle(examination: Examination, settler: Settler, one: SignedTransaction) -> Mended:
    if _is_settled(examination, one):  # together with an earlier one
        return Mended("settled")
    examination.require_free(account_lease(one.account))
    settler.settle()
    return Mended("settled") if _is_settled(examination, one) else NO_LONGER_THERE


def _is_settled(examination: Examination, one: SignedTransaction) -> bool:
    return one.hash not in {each.hash for each in examination.context.ledger.stray_rows.unsettled()}


# --- rows
# ------------------------------------------------------------------------------------------


def _rows(examination: Examination) -> Iterator[Finding]:
    source = examination.context.source
    found = examination.context.ledger.stray_rows.by_chunk(source)
    held = examination.leases_of_live_runs()
    for rows in found:
        if rows.chunk is not None and chunk_lease(rows.chunk) in held:
            continue
        if stray := _stray(rows):
            name = rows.chunk or f"{source}, chunk number {rows.caf_file_id} of the table"
            yield mendable(
                Kind.ROWS, name, stray, "removed", partial(_drop_rows, examination, rows)
            )
        if rows.chunk is not None and (amiss := _amiss(rows)):
            yield Finding(Kind.ROWS, rows.chunk, *amiss, Actor.OPERATOR)


def _stray(rows: ChunkRows) -> str:
    """Say which rows a chunk in this state cannot have; "" where there are none."""
    locations = rows.locations if rows.state not in EVER_LOCATED else 0
    claims = rows.claims if rows.state not in CLAIMING else 0
    pending = rows.pending if rows.state not in MAY_BE_PENDING else 0
    found = ((locations, "location"), (pending, "pending location"), (claims, "claim"))
    counts = " and ".join(counted(count, what) for count, what in found if count)
    if not counts:
        return ""
    return (
        f"{counts} of a chunk that is '{rows.state}'"
        if rows.state
        else f"{counts} of a chunk that the ledger does not have"
    )


def _amiss(rows: ChunkRows) -> tuple[str, str] | None:
    """Say what is wrong with a chunk's counts, and what to do; None where they agree."""
    if rows.state in IN_GOOD_STANDING and rows.locations != rows.member_count:
        if rows.restored and rows.locations < rows.member_count:
            return None  # other chunks had the others already
        found = f"{counted(rows.locations, 'location')} of {counted(rows.member_count, 'member')}"
        return (
            found,
            "the next plan archives the objects without a location again; report it, since no "
            "crash does this",
        )
    sealed = rows.state in UNDER_WAY[UNDER_WAY.index(_S.SEALED) :]
    if sealed and rows.claims != rows.member_count:
        return (
            f"{counted(rows.claims, 'claim')} of {counted(rows.member_count, 'member')}",
            "report it, since no crash does this",
        )
    if sealed and rows.pending != rows.member_count:
        found = (
            f"{counted(rows.pending, 'pending location')} of {counted(rows.member_count, 'member')}"
        )
        return found, "report it, since no crash does this"
    return None


def _drop_rows(examination: Examination, rows: ChunkRows) -> Mended:
    # Without a chunk there is no lease of one; plans, which read these rows, wait meanwhile.
    with examination.lease(
        plan_lease(examination.context.source) if rows.chunk is None else chunk_lease(rows.chunk)
    ):
        return (
            Mended("removed")
            if examination.context.ledger.stray_rows.drop(rows.caf_file_id)
            else NO_LONGER_THERE
        )


def _kept(examination: Examination) -> Iterator[Finding]:
    """Find kept locations that are not those of the ledger; a plan compares only how many each
    chunk has.
    """
    context = examination.context
    folder = context.kept_locations()
    if not folder.is_dir() or context.source not in context.ledger.lookup.sources():
        return
    with temporary_folder(context) as temporary:
        differing = context.ledger.exports.compare_kept(context.source, temporary, folder)
    if differing:
        found = f"{counted(differing, 'location')} kept there or in the ledger, and not in both"
        yield mendable(
            Kind.ROWS,
            str(folder),
            found,
            "removed; the next plan exports it again",
            partial(_drop_kept, examination, folder),
        )


def _drop_kept(examination: Examination, folder: Path) -> Mended:
    with examination.lease(plan_lease(examination.context.source)):
        shutil.rmtree(folder, ignore_errors=True)
    return Mended("removed")


# --- located chunks
# ------------------------------------------------------------------------------------------


def _unlisted(examination: Examination) -> Iterator[Finding]:
    """Find located chunks that the store no longer lists, or with too few copies; and damaged ones,
    which wait for a repair.
    """
    context = examination.context
    for chunk in context.ledger.chunks.list(context.source, [_S.DAMAGED]):
        if chunk_lease(chunk.name) not in examination.leases_of_live_runs():
            yield Finding(
                Kind.COPIES, chunk.name, f"damaged: {chunk.reason}", _repair(chunk), Actor.OPERATOR
            )
    required = context.store.required_copies
    enough: Set[_Place] | None = None
    located = context.ledger.chunks.list(context.source, [_S.LOCATED])
    for chunk in located:
        try:
            enough = _with_enough_copies(context, located) if enough is None else enough
            if (chunk.merkle_root, chunk.owner, chunk.start) in enough:
                continue
            listed = len({copy.provider for copy in context.store.copies(posting_of(chunk))})
        except StoreError as error:
            yield not_checked(f"copies of the located chunks of {context.source}", error)
            return
        if listed < required and chunk_lease(chunk.name) not in examination.leases_of_live_runs():
            found = (
                f"{listed} of {counted(required, 'copy', 'copies')} listed"
                if listed
                else "the store no longer lists it, or any copy of it"
            )
            remedy = f"marked as damaged; {_repair(chunk)}"
            yield mendable(
                Kind.COPIES, chunk.name, found, remedy, partial(_prove, examination, chunk, remedy)
            )


def _with_enough_copies(context: RunContext, located: Sequence[Chunk]) -> Set[_Place]:
    """Return the chunks that the store's list has with enough copies, read by pages; others are to
    be asked for one by one.
    """
    if context.store.listed_at() is None:
        return frozenset()
    places = {(chunk.merkle_root, chunk.owner, chunk.start) for chunk in located}
    return {
        (file.merkle_root, file.owner, file.start)
        for page in context.store.file_pages(located[0].archive_id)
        for file in page
        if (file.merkle_root, file.owner, file.start) in places
        and len(set(file.providers)) >= context.store.required_copies
    }


def _repair(chunk: Chunk) -> str:
    return f"'caf repair {chunk.name}' stores it again"


def _prove(examination: Examination, chunk: Chunk, remedy: str) -> Mended:
    examination.require_free(chunk_lease(chunk.name))
    return (
        NO_LONGER_THERE
        if not prove_chunk(examination.context, chunk.name).explanation
        else Mended(remedy, Actor.OPERATOR)
    )


# --- chunks under way
# ------------------------------------------------------------------------------------------


def _chunks(examination: Examination) -> Iterator[Finding]:
    """Tell of chunks under way that no run has, and of those that wait for an operator."""
    context = examination.context
    chunks = context.ledger.chunks.list(context.source, CLAIMING)
    next_run = f"'caf run {context.source}'"
    for chunk in chunks:
        if chunk.state is _S.PARKED:
            remedy = (
                f"mend the cause, then 'caf unpark {chunk.name}': the next run goes on with "
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
        found = f"{counted(planned, 'chunk')} planned and not begun"
        yield Finding(
            Kind.CHUNK,
            context.source,
            found,
            f"{next_run} archives {'it' if planned == 1 else 'them'}",
            Actor.RUN,
        )
    for chunk in examination.without_run([chunk for chunk in chunks if chunk.state in _GOES_ON]):
        found = f"a run left it as '{chunk.state}'"
        yield Finding(
            Kind.CHUNK, chunk.name, found, f"{next_run} {_GOES_ON[chunk.state]}", Actor.RUN
        )
