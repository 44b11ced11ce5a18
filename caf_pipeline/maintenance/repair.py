"""Repairs a damaged chunk: finds its bytes somewhere, and stores them again until enough copies are
right.

The bytes come from staging, else from a provider that still has them, else from the source, packed
once more; wherever from, only with the Merkle root that was sealed. Nothing is ever deleted at the
store: a post that goes takes along what other chunks share with it.

Source: "Promises" 3 and 4 in docs/explanation/design.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import (
    CafError,
    LedgerError,
    NoChainAnswer,
    NotProven,
    StagingError,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.ledger.records import Chunk, CopyCheck, posting_of
from caf_pipeline.maintenance.full_read import look_at_whole_copy
from caf_pipeline.maintenance.scrub import (
    WHOLE_COPY,
    checks_of,
    is_small,
    located_or_damaged,
    look_at_copies,
    unverified_copies,
)
from caf_pipeline.packing.packer import remove_staged
from caf_pipeline.packing.samples import CopyFinding, described, too_few_copies
from caf_pipeline.packing.staging import download, let_go, staged_has_root, staged_path
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.chunk_steps import lease_chunk, put_staged, repeat_packing, to_store
from caf_pipeline.store.protocol import Copy, Lease, PostRecord

Origin = Literal["staging", "provider", "source", "none needed"]


@dataclass(frozen=True, slots=True)
class RepairReport:
    """A repaired chunk.

    Attributes: chunk: the chunk as it is now. origin: where its bytes came from. copies: those that
        are right now. posted_again: whether its post was gone, so that it was posted again; that is
        charged like the first. explanation: what every listed copy gives, in words.
    """

    chunk: Chunk
    origin: Origin
    copies: Sequence[Copy]
    posted_again: bool
    explanation: str


def repair_chunk(context: RunContext, name: str) -> RepairReport:
    """Bring a damaged chunk, or a located one that lacks copies, back to enough right copies:
    damaged → located.

    May be run again after any failure; what is right already is left as it is.

    Raises: StoreError: its bytes are nowhere to be had; the message says what was tried. NotProven,
        IntegrityError: the store
            did not come to enough right copies. What `ChunkStore.post` and `put` raise. The chunk
            stays damaged.
    """
    with lease_chunk(context, name) as lease:
        chunk = located_or_damaged(context, name)
        posting = posting_of(chunk)
        findings = _look(context, lease, chunk, posting)
        if (
            not any(finding.fault for finding in findings)
            and len(findings) >= context.store.required_copies
        ):
            if any(finding.unanswered for finding in findings):
                raise StoreUnreachable(
                    f"chunk {name} cannot be checked: providers do not answer "
                    f"({described(findings)})",
                    hint="try again later",
                )
            return _finish(context, lease, chunk, posting, findings, origin="none needed")
        if chunk.state is ChunkState.LOCATED:
            context.ledger.moves.move(
                lease, name, ChunkState.LOCATED, ChunkState.DAMAGED, reason=described(findings)
            )
            chunk = context.ledger.chunks.get(name)
        # Before anything is mended: a copy that was found wrong has to be proven again, in windows
        # of its own.
        context.ledger.replicas.record_checks(
            lease, name, checks_of(context, chunk, posting, findings)
        )
        try:
            origin = _find_bytes(context, lease, chunk, posting, findings)
            now = _posted(context, lease, chunk, posting) if not findings else posting
            put_staged(
                context,
                lease,
                chunk,
                now,
                wrong=[finding.copy.provider for finding in findings if finding.fault],
            )
            findings = _look(context, lease, chunk, now)
            return _finish(
                context, lease, chunk, now, findings, origin=origin, posted_again=now != posting
            )
        finally:
            context.ledger.staging.release(name)


def concerns_one_chunk(error: CafError) -> bool:
    """Return whether the error of a repair concerns this chunk only, so that the next chunk may
    still be repaired.
    """
    return error.permanent or (
        isinstance(error, NotProven | StoreUnreachable) and not isinstance(error, NoChainAnswer)
    )


def _look(
    context: RunContext, lease: Lease, chunk: Chunk, posting: PostRecord
) -> Sequence[CopyFinding]:
    """Ask every copy for all samples, and those once found wrong as a whole for all of their
    bytes.
    """
    wrong = {
        copy.provider
        for copy in context.ledger.replicas.list(chunk.name)
        if copy.listed and copy.fault.startswith(WHOLE_COPY)
    }
    findings = look_at_copies(context, lease, chunk, posting, chunk.samples)
    return [
        look_at_whole_copy(context, lease, chunk, posting, finding.copy)
        if finding.good and finding.copy.provider in wrong
        else finding
        for finding in findings
    ]


def _finish(
    context: RunContext,
    lease: Lease,
    chunk: Chunk,
    posting: PostRecord,
    findings: Sequence[CopyFinding],
    *,
    origin: Origin,
    posted_again: bool = False,
) -> RepairReport:
    """Record what the copies gave; the chunk is located again only where enough of them are right,
    and known to be proven.
    """
    copies = [finding.copy for finding in findings if finding.good]
    checks = checks_of(context, chunk, posting, findings)
    context.ledger.replicas.record_checks(lease, chunk.name, checks)
    if len(copies) < context.store.required_copies:
        raise too_few_copies(chunk, findings, context.store.required_copies)
    if chunk.state is ChunkState.DAMAGED:
        _require_proven(context, chunk, posting, checks)
        context.ledger.moves.move(lease, chunk.name, ChunkState.DAMAGED, ChunkState.LOCATED)
    let_go(context, chunk.name)  # also of what a repair left that broke off after its last move
    return RepairReport(
        context.ledger.chunks.get(chunk.name), origin, copies, posted_again, described(findings)
    )


def _require_proven(
    context: RunContext, chunk: Chunk, posting: PostRecord, checks: Sequence[CopyCheck]
) -> None:
    """Raise NotProven where a damaged chunk is listed and right by its pieces, and the chain
    verified too few of its copies.

    A provider that was dropped since its proofs failed joins again within seconds, and is listed
    like any other.
    """
    right = sum(1 for check in checks if not check.fault)
    read_whole = is_small(chunk) and right >= context.store.required_copies
    unverified = "" if read_whole else unverified_copies(context, chunk, posting, checks)
    if unverified:
        raise NotProven(
            f"chunk {chunk.name} stays damaged: {unverified}",
            hint="repair it again in the next proof window; before 5.1.0 the chain verifies no "
            "proof of type 3, and such a chunk"
            " is to be withdrawn and archived again with jackal.proof_type = 0",
        )


def _posted(context: RunContext, lease: Lease, chunk: Chunk, posting: PostRecord) -> PostRecord:
    """Return the chunk's post: the one that the store still has, which costs nothing, or a new one,
    which is charged.
    """
    now = context.store.post(to_store(context, chunk), context.ledger.transactions(context.holder))
    if now != posting:
        context.ledger.moves.record_repost(lease, chunk.name, now)
    return now


# --- where the bytes are
# ------------------------------------------------------------------------------------------


def _find_bytes(
    context: RunContext,
    lease: Lease,
    chunk: Chunk,
    posting: PostRecord,
    findings: Sequence[CopyFinding],
) -> Origin:
    """Bring the chunk's stored bytes into its place in staging, compared with its root; return
    where they came from.
    """
    if staged_has_root(context, chunk):
        return "staging"
    tried = ["they are not in staging"]
    remove_staged(staged_path(context, chunk.name))
    limit = context.settings.packing.staging_limit
    context.ledger.staging.reserve(
        lease, chunk.name, str(context.staging()), chunk.stored_size_bytes, limit
    )
    downloaded, said = download(
        context, lease, chunk, posting, _providers(context, chunk, posting, findings)
    )
    if downloaded:
        return "provider"
    tried += said
    try:
        if chunk.adopted:
            raise CafError("another program made the file")
        if repeat_packing(context, lease, chunk):
            return "source"
    except CafError as error:
        if not error.permanent or isinstance(error, LedgerError | StagingError):
            raise  # these say nothing of the source
        tried.append(f"they cannot be packed again: {error}")
    else:
        tried.append("the source's objects have changed since they were packed")
    raise StoreError(
        f"chunk {chunk.name} cannot be repaired, since no copy of its bytes is available: "
        f"{'; '.join(tried)}",
        hint="make one of these available and repair again, or 'caf withdraw' the chunk: what the "
        "source still has is planned"
        " again",
    )


def _providers(
    context: RunContext, chunk: Chunk, posting: PostRecord, findings: Sequence[CopyFinding]
) -> Iterator[str]:
    """Yield the providers to ask: right copies, other holders that were not found wrong, and
    providers that once had it.
    """
    wrong = {finding.copy.provider for finding in findings if finding.fault}
    right = {finding.copy.provider for finding in findings if finding.good}
    holders = sorted(context.store.holders(posting), key=lambda provider: provider not in right)
    seen = set(wrong)
    for provider in [
        *holders,
        *(copy.provider for copy in context.ledger.replicas.list(chunk.name)),
    ]:
        if provider not in seen:
            seen.add(provider)
            yield provider
