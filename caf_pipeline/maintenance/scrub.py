"""The proof watch: looks at located chunks again and again, and says where one is no longer what it
was.

A look asks the store who is listed, and each of them for pieces: all that were sealed the first
time, later one of them and an object, at places that no provider can foresee; all of a file that is
no larger than two leaves. A chunk with fewer right copies than required, or with a wrong one,
becomes `damaged`; one whose copies are right and show no verified proof is `unverified`.

Source: docs/explanation/jackal.md (a listed proof may have failed), promise 1 in
docs/explanation/design.md.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from caf_pipeline.caf.merkle_hashes import BLOCK_BYTES
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import CafError, HeldByOther, NoChainAnswer, StoreUnreachable
from caf_pipeline.ledger.records import Chunk, CopyCheck, posting_of
from caf_pipeline.maintenance.full_read import look_at_whole_copy
from caf_pipeline.packing.samples import CopyFinding, described, look_at_copy
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.chunk_steps import lease_chunk
from caf_pipeline.store.protocol import Lease, PostRecord, Sample

WINDOWS_BEHIND: Final = 2
"""A listed copy may be this far behind: the chain drops a provider only at the first of its checks
after a whole window that was missed. One further behind is listed by a chain that does not check,
as v5.0.1 does with type 3.
"""

WHOLE_COPY: Final = "read as a whole: "
"""What the ledger's word on a copy begins with that was found wrong when all of it was read: no
sample can take it back.
"""

SMALL_BYTES: Final = 2 * BLOCK_BYTES
"""Of a file of up to two leaves the chain never asks for any but the first, so that its proofs
cannot be told from a provider's joining. Such a copy is read as a whole instead; the window in
which that was done counts.
"""

OBJECT_BYTES: Final = 1 << 20
"""The largest object that a look asks each copy for.

Who could foresee what is asked for could keep only that.
"""

_JOINED: Final = "what the chain shows may be of its joining alone"

MOST_UNANSWERED: Final = 1000
"""Chunks that a run of the watch passes over because no provider answers; more of them are an
outage, which ends it anyhow.
"""


@dataclass(frozen=True, slots=True)
class ProofReport:
    """What one look at a chunk found.

    Attributes: chunk: the chunk as it is after the look. checks: of each copy that is listed.
        read_back: the providers that gave the pieces they were asked for as they were sealed.
        explanation: what is wrong, or was when the chunk was found damaged; "" where nothing is.
        unverified: why it is not known whether enough copies were proven; "" where it is, or where
        the store proves nothing
            over time.
        unanswered: which copies did not answer, and why; "" if all answered.
    """

    chunk: Chunk
    checks: Sequence[CopyCheck]
    read_back: Sequence[str]
    explanation: str
    unverified: str = ""
    unanswered: str = ""

    @property
    def proven(self) -> bool:
        """Whether enough copies are listed and known to be proven, none of them gave anything
        wrong, and no repair is due.
        """
        return self.verdict == "proven"

    @property
    def verdict(self) -> str:
        """The result of the look: "damaged", "unanswered", "unverified" or "proven"."""
        if self.explanation:
            return "damaged"
        if self.unanswered:
            return "unanswered"
        return "unverified" if self.unverified else "proven"


def prove_chunk(context: RunContext, name: str, *, an_object: Sample | None = None) -> ProofReport:
    """Look at a located or damaged chunk and record what was found; a located one that is not
    proven becomes `damaged`.

    A damaged chunk stays damaged, whatever is found: `repair` ends that. Each copy is asked for
    `an_object`, or for one that is chosen at random.

    Raises: StoreUnreachable: the chain, or every provider, is out of reach. That says nothing of
        the chunk; it is recorded that no
            provider answered. CafError: the chunk is neither located nor damaged.
    """
    with lease_chunk(context, name) as lease:
        chunk = located_or_damaged(context, name)
        posting = posting_of(chunk)
        an_object = an_object or context.ledger.chunks.any_object(name, OBJECT_BYTES)
        findings = look_at_copies(
            context, lease, chunk, posting, _pieces(chunk), an_object=an_object
        )
        right = [finding.copy.provider for finding in findings if finding.good]
        if findings and all(finding.unanswered for finding in findings):
            context.ledger.replicas.record_unanswered(lease, name)
            raise StoreUnreachable(
                f"no provider of chunk {name} answers: {described(findings)}",
                hint="try again later",
            )
        checks = checks_of(context, chunk, posting, findings)
        explanation = _explanation(checks, context.store.required_copies)
        if chunk.state is ChunkState.DAMAGED:
            explanation = (
                explanation
                or f"its copies are right now, but it was found damaged before: {chunk.reason}"
            )
        elif explanation:
            # Before the checks: were they written alone, a piece at another place might be right
            # the next time.
            context.ledger.moves.move(
                lease, name, ChunkState.LOCATED, ChunkState.DAMAGED, reason=explanation
            )
        context.ledger.replicas.record_checks(
            lease,
            name,
            checks,
            again_in=_again_in(context, posting, checks),
            enough=context.store.required_copies,
        )
        unverified = "" if explanation else unverified_copies(context, chunk, posting, checks)
        silent = [] if explanation else [finding for finding in findings if finding.unanswered]
        unanswered = described(silent) if silent else ""
        return ProofReport(
            context.ledger.chunks.get(name), checks, right, explanation, unverified, unanswered
        )


def mark_wrong(
    context: RunContext, lease: Lease, chunk: Chunk, findings: Sequence[CopyFinding]
) -> str:
    """Let a located chunk be damaged, since copies that were read as a whole gave other bytes;
    return what is wrong.
    """
    posting = posting_of(chunk)
    found = {finding.copy.provider: finding for finding in findings}
    unasked = (CopyFinding(copy, unanswered="not asked") for copy in context.store.copies(posting))
    checks = checks_of(
        context, chunk, posting, [found.get(finding.copy.provider, finding) for finding in unasked]
    )
    explanation = _explanation(checks, context.store.required_copies) or described(findings)
    context.ledger.moves.move(
        lease, chunk.name, ChunkState.LOCATED, ChunkState.DAMAGED, reason=explanation
    )
    context.ledger.replicas.record_checks(lease, chunk.name, checks)
    return explanation


def prove_oldest(context: RunContext, limit: int) -> Iterator[ProofReport]:
    """Look at this many located chunks of the source, those first that were looked at longest ago.

    First come chunks with a copy that did not answer the last time. This group ends when a quarter
    of the looks, and at least one look, had no answer again; these looks do not count. Then come
    chunks that the store's lists made suspect (`look_in_bulk`). One look in four is kept for the
    remaining chunks, so that none of them waits for ever. Up to half of these looks are for chunks
    that wait for their next proof window: two windows in a row can be seen even if there are more
    chunks than looks in a window.

    A chunk that another run holds is left for the next time. A chunk whose providers do not answer
    is reported as unanswered, and another chunk is looked at in its place.

    Raises: StoreUnreachable: at the end, if no provider of some chunk answered; at once if the
        chain is out of reach.
    """
    unanswered: StoreUnreachable | None = None
    tried: set[str] = set()
    looked_at = 0
    for group in ("unanswered", "suspected", "oldest"):
        end = limit if group == "oldest" else limit - limit // 4
        most = limit + MOST_UNANSWERED
        if group == "unanswered":
            chunks = context.ledger.chunks.unanswered(context.source)
        elif group == "suspected":
            chunks = context.ledger.chunks.suspected(context.source, most)
        else:
            chunks = context.ledger.chunks.to_prove(
                context.source, most, waiting=-(-(limit - looked_at) // 2)
            )
        again = 0
        for chunk in chunks:
            if looked_at == end or (group == "unanswered" and again == max(1, limit // 4)):
                break
            if chunk.name in tried:
                continue
            tried.add(chunk.name)
            try:
                report = prove_chunk(context, chunk.name)
            except HeldByOther:
                continue
            except NoChainAnswer:
                raise
            except StoreUnreachable as error:
                unanswered = unanswered or error
                again += 1
                yield ProofReport(chunk, (), (), "", unanswered=str(error))
                continue
            is_silent_again = group == "unanswered" and bool(report.unanswered)
            again += is_silent_again
            looked_at += not is_silent_again
            yield report
    if unanswered:
        raise unanswered


def located_or_damaged(context: RunContext, name: str) -> Chunk:
    """Return the chunk's row, or raise CafError where it is neither located nor damaged."""
    chunk = context.ledger.chunks.get(name)
    if chunk.state not in (ChunkState.LOCATED, ChunkState.DAMAGED):
        raise CafError(
            f"chunk {name} is '{chunk.state}': only a located or damaged chunk is proven and "
            "repaired",
            hint="'caf status' shows each chunk's state; a chunk under way is verified by its own "
            "run",
        )
    return chunk


def look_at_copies(
    context: RunContext,
    lease: Lease,
    chunk: Chunk,
    posting: PostRecord,
    samples: Sequence[Sample],
    *,
    an_object: Sample | None = None,
) -> Sequence[CopyFinding]:
    """Ask every copy that the store lists for these samples and the bytes of an object, or for all
    of a small file.

    A copy that gives another object than the ledger's row says is read as a whole: its Merkle root
    tells which of them is wrong.
    """
    findings = []
    for copy in context.store.copies(posting):
        context.wait_while_paused(lease.check)
        if is_small(chunk):
            findings.append(look_at_whole_copy(context, lease, chunk, posting, copy))
            continue
        finding = look_at_copy(context.store, posting, copy, samples)
        if finding.good and an_object is not None:
            finding = look_at_copy(context.store, posting, copy, [an_object])
            if finding.fault:
                finding = look_at_whole_copy(context, lease, chunk, posting, copy)
        findings.append(finding)
    return findings


def is_small(chunk: Chunk) -> bool:
    """Tell whether the chain's proofs of a chunk say nothing, so that its copies are read as a
    whole instead.
    """
    return chunk.stored_size_bytes <= SMALL_BYTES


def checks_of(
    context: RunContext, chunk: Chunk, posting: PostRecord, findings: Sequence[CopyFinding]
) -> Sequence[CopyCheck]:
    """Return what to record of copies.

    Of a provider that does not answer, what was known before still holds; so does, while it stays
    listed, what only reading all of its bytes can tell.
    """
    before = {copy.provider: copy for copy in context.ledger.replicas.list(chunk.name)}
    now = context.store.current_window(posting)
    checks = []
    for finding in findings:
        copy = finding.copy
        proven = context.store.proof_window(posting, copy)
        if proven is not None and now is not None and now - proven > WINDOWS_BEHIND:
            # Reading the copies may have outlasted the window in which they were listed.
            copy = next(
                (
                    listed
                    for listed in context.store.copies(posting)
                    if listed.provider == copy.provider
                ),
                copy,
            )
            proven = context.store.proof_window(posting, copy)
        fault, known = finding.fault, before.get(copy.provider)
        beyond_samples = (
            known is not None
            and known.listed
            and known.fault.startswith(WHOLE_COPY)
            and not finding.whole
        )
        if known is not None and (finding.unanswered or (finding.good and beyond_samples)):
            fault = known.fault
        elif fault and finding.whole:
            fault = f"{WHOLE_COPY}{fault}"
        if not fault and proven is not None and now is not None and now - proven > WINDOWS_BEHIND:
            fault = f"listed, but not proven since window {proven}; it is window {now} now"
        if is_small(chunk):
            window = now if finding.whole and finding.good else None
        else:
            window = (
                proven
                if copy.verified and proven is not None and (now is None or proven <= now)
                else None
            )
        window = None if fault else window
        checks.append(
            CopyCheck(copy, window, fault, apart=is_small(chunk), unanswered=finding.unanswered)
        )
    return checks


def unverified_copies(
    context: RunContext, chunk: Chunk, posting: PostRecord, checks: Sequence[CopyCheck]
) -> str:
    """Say that fewer copies than required are known to be proven; "" where enough are, or where the
    store has no windows.
    """
    verified = [check for check in checks if not check.fault and check.copy.verified]
    required = context.store.required_copies
    if len(verified) >= required or context.store.current_window(posting) is None:
        return ""
    if is_small(chunk):
        return (
            "the chain never shows a verified proof of so small a file "
            f"({chunk.stored_size_bytes} bytes); all of it was read"
        )
    others = "; ".join(
        f"{one.copy.provider}: {one.fault or _JOINED}"
        for one in checks
        if one.fault or not one.copy.verified
    )
    return (
        f"{len(verified)} of {required} copies show a verified proof ({others}); the next "
        "proof "
        "window may tell more"
    )


def _again_in(
    context: RunContext, posting: PostRecord, checks: Sequence[CopyCheck]
) -> float | None:
    """Return after how many seconds a look can see another window than the checks count; None where
    there are no windows.
    """
    now = context.store.current_window(posting)
    if now is not None and any(check.window is not None and check.window < now for check in checks):
        return 0.0
    return context.store.window_ends_in(posting)


def _pieces(chunk: Chunk) -> Sequence[Sample]:
    """Choose samples to ask for.

    Their places follow from the root, and a provider has seen them all in the first look.
    """
    if (
        chunk.checked_at is None
        or chunk.unanswered_at is not None
        or chunk.state is ChunkState.DAMAGED
    ):
        return chunk.samples
    return [random.SystemRandom().choice(chunk.samples)]


def _explanation(checks: Sequence[CopyCheck], required: int) -> str:
    """Say what is wrong; a copy whose provider does not answer now counts as the chain lists it."""
    if not checks:
        return "the store no longer lists the chunk, or any copy of it"
    faulty = [check for check in checks if check.fault]
    right = len(checks) - len(faulty)
    if right >= required and not faulty:
        return ""
    faults = "".join(f"; {check.copy.provider}: {check.fault}" for check in faulty)
    listed = ", ".join(check.copy.provider for check in checks)
    return f"{right} of {required} copies are right (listed: {listed}{faults})"
