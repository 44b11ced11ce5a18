"""Repairs a damaged chunk: finds its bytes and stores them until enough copies are right.

The bytes come from staging, a provider, or the source, and must have the seal's Merkle root.
Nothing is deleted at the store: other chunks may share data with a deleted post.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import (
    CafError,
    IntegrityError,
    LedgerError,
    NoChainAnswer,
    NotProven,
    StagingError,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.maintenance.full_read import OTHER_ROWS, check_whole_copy
from caf_pipeline.maintenance.scrub import (
    WHOLE_COPY,
    check_copies,
    checks_of,
    is_small,
    located_or_damaged,
    mark_damaged,
    unverified_copies,
)
from caf_pipeline.packing.packer import remove_staged
from caf_pipeline.packing.staging import download, release_located, staged_has_root, staged_path
from caf_pipeline.reading.samples import CopyFinding, described, too_few_copies
from caf_pipeline.records import Chunk, Copy, Lease, PostRecord, posting_of
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.chunk_steps import lease_chunk, put_staged, repeat_packing, to_store

Origin = Literal["staging", "provider", "source", "none needed"]


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The result of a repair; `posted_again` means that a new post was paid."""

    chunk: Chunk
    origin: Origin
    copies: Sequence[Copy]
    posted_again: bool
    explanation: str


def repair_chunk(context: RunContext, name: str) -> RepairReport:
    """Repair a damaged chunk, or a located one that lacks copies.

    May be repeated after any failure. Right copies are left alone. Raises StoreError, NotProven or
    IntegrityError.
    """
    with lease_chunk(context, name) as lease:
        chunk = located_or_damaged(context, name)
        posting = posting_of(chunk)
        findings = [] if chunk.reason == OTHER_ROWS else _look(context, lease, chunk, posting)
        if chunk.reason == OTHER_ROWS or any(finding.contradiction for finding in findings):
            raise IntegrityError(
                f"chunk {name} cannot be repaired: {OTHER_ROWS}",
                hint="'caf rebuild' into an empty ledger makes its rows from the bytes that the "
                "store has now; 'caf withdraw' gives the chunk up, and S3's objects are planned "
                "again",
            )
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
            mark_damaged(context, lease, name, described(findings))
            chunk = context.ledger.chunks.get(name)
        # Before the upload: a wrong copy must be proven again, in new windows.
        context.ledger.replicas.record_checks(
            lease, name, checks_of(context, chunk, posting, findings)
        )
        try:
            origin = _find_bytes(context, lease, chunk, posting, findings)
            now = posting
            if not findings:
                # A post that the store still has costs nothing; a new one is charged.
                now = context.store.post(
                    to_store(context, lease, chunk), context.ledger.transactions(context.holder)
                )
                if now != posting:
                    context.ledger.moves.record_repost(lease, chunk.name, now)
            wrong = [finding.copy.provider for finding in findings if finding.fault]
            put_staged(context, lease, chunk, now, wrong=wrong)
            findings = _look(context, lease, chunk, now)
            return _finish(
                context, lease, chunk, now, findings, origin=origin, posted_again=now != posting
            )
        finally:
            context.ledger.staging.release(name)


def concerns_one_chunk(error: CafError) -> bool:
    """Return whether other chunks can still be repaired."""
    return error.permanent or (
        isinstance(error, NotProven | StoreUnreachable) and not isinstance(error, NoChainAnswer)
    )


def _look(
    context: RunContext, lease: Lease, chunk: Chunk, posting: PostRecord
) -> Sequence[CopyFinding]:
    wrong = {
        copy.provider
        for copy in context.ledger.replicas.list(chunk.name)
        if copy.listed and copy.fault.startswith(WHOLE_COPY)
    }
    findings = check_copies(context, lease, chunk, posting, chunk.samples, whole=True)
    return [
        check_whole_copy(context, lease, chunk, posting, finding.copy)
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
    copies = [finding.copy for finding in findings if finding.good]
    checks = checks_of(context, chunk, posting, findings)
    context.ledger.replicas.record_checks(lease, chunk.name, checks)
    if len(copies) < context.store.required_copies:
        raise too_few_copies(chunk, findings, context.store.required_copies)
    if chunk.state is ChunkState.DAMAGED:
        # A provider dropped for failed proofs can join again within seconds, and is listed again.
        # Right samples are therefore not enough.
        right = sum(1 for check in checks if not check.fault)
        is_read_whole = is_small(chunk) and right >= context.store.required_copies
        unverified = "" if is_read_whole else unverified_copies(context, chunk, posting, checks)
        if unverified:
            raise NotProven(
                f"chunk {chunk.name} stays damaged: {unverified}",
                hint="repair it again in the next proof window; a chain before 5.1.0 verifies no "
                "proof of type 3: there, withdraw the chunk and archive it again with "
                "jackal.proof_type = 0",
            )
        context.ledger.moves.move(lease, chunk.name, ChunkState.DAMAGED, ChunkState.LOCATED)
    release_located(context, chunk.name)  # including leftovers of an interrupted repair
    return RepairReport(
        context.ledger.chunks.get(chunk.name), origin, copies, posted_again, described(findings)
    )


def _find_bytes(
    context: RunContext,
    lease: Lease,
    chunk: Chunk,
    posting: PostRecord,
    findings: Sequence[CopyFinding],
) -> Origin:
    if staged_has_root(context, chunk):
        return "staging"
    attempts = ["they are not in staging"]
    remove_staged(staged_path(context, chunk.name))
    limit = context.settings.packing.staging_limit
    context.ledger.staging.reserve(
        lease, chunk.name, str(context.staging()), chunk.stored_size_bytes, limit
    )
    # Right copies first, then other holders that are not wrong, and former holders.
    right = {finding.copy.provider for finding in findings if finding.good}
    wrong = {finding.copy.provider for finding in findings if finding.fault}
    holders = sorted(context.store.holders(posting), key=lambda provider: provider not in right)
    former = (copy.provider for copy in context.ledger.replicas.list(chunk.name))
    providers = [
        provider for provider in dict.fromkeys([*holders, *former]) if provider not in wrong
    ]
    is_downloaded, failures = download(context, lease, chunk, posting, providers)
    if is_downloaded:
        return "provider"
    attempts += [f"{provider}: {error}" for provider, error in failures.items()]
    if chunk.encrypted:
        attempts.append("an encrypted chunk cannot be packed again to the same bytes")
    try:
        if chunk.adopted:
            raise CafError("another program wrote the file")
        if repeat_packing(context, lease, chunk):
            return "source"
    except CafError as error:
        if not error.permanent or isinstance(error, LedgerError | StagingError):
            raise  # the source is not to blame
        attempts.append(f"they cannot be packed again: {error}")
    else:
        if not chunk.encrypted:
            attempts.append("the source's objects have changed since they were packed")
    raise StoreError(
        f"chunk {chunk.name} cannot be repaired, because no copy of its bytes is available: "
        f"{'; '.join(attempts)}",
        hint="make one of these available and repair again, or 'caf withdraw' the chunk to plan "
        "again what the source still has",
    )
