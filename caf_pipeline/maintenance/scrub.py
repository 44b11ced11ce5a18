"""The proof watch: checks located chunks and marks damaged ones.

The first look at a chunk asks each listed copy for all samples of the seal; later looks ask for one
sample and one object at unforeseeable places. Too few right copies, or a wrong one, make a chunk
`damaged`; too few verified proofs make it `unverified`. A wrong copy is recorded when it is found,
so that a look that is cut loses no fault. Only a whole look judges by the number of copies.

Source: docs/explanation/jackal.md (a listed proof may have failed).
"""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import Final

from caf_pipeline.caf.merkle_hashes import BLOCK_BYTES
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import (
    ArchiveError,
    CafError,
    HeldByOther,
    IdentityMissing,
    KeyRefused,
    NoChainAnswer,
    PrivateAddress,
    StoreUnreachable,
)
from caf_pipeline.ledger.records import CopyCheck
from caf_pipeline.maintenance.full_read import check_whole_copy
from caf_pipeline.reading.samples import CopyFinding, check_copy, described
from caf_pipeline.records import Chunk, Copy, Lease, PostRecord, Sample, posting_of
from caf_pipeline.retrieval.side_by_side import side_by_side
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.chunk_steps import lease_chunk

WINDOWS_BEHIND: Final = 2
"""Windows that the last proof of a listed copy may lag behind.

The chain drops a provider only at its first check after a missed whole window.
"""

WHOLE_COPY: Final = "read as a whole: "
"""Prefix of a fault that a full read found: samples cannot clear it."""

SMALL_BYTES: Final = 2 * BLOCK_BYTES
"""Files of up to two leaves: the chain only asks for their first leaf."""

OBJECT_BYTES: Final = 1 << 20
"""The largest object that a look reads. Foreseeable requests would permit dropping the rest."""

_ONLY_JOINED: Final = "the listed proof may be that of its joining alone"

CHUNKS_AT_ONCE: Final = 4
"""A look is mostly waiting: 120 s for a copy that lost a range."""

READ_WHOLE_BYTES: Final = 32 << 30
"""Bytes of unread chunks that a look of the hourly watch reads: one chunk of the largest size."""

NOT_READ_WHOLE: Final = (
    "a rebuild restored it, and its bytes were not compared with its Merkle root since"
)

MOST_UNANSWERED: Final = 1000
"""More silent chunks than this are an outage."""


@dataclass(frozen=True, slots=True)
class ProofReport:
    """The result of one look at a chunk.

    `read_back` providers returned the requested bytes correctly. `unverified` says why too few
    copies are known to be proven.
    """

    chunk: Chunk
    checks: Sequence[CopyCheck]
    read_back: Sequence[str]
    explanation: str
    unverified: str = ""
    unanswered: str = ""

    @property
    def proven(self) -> bool:
        return self.verdict == "proven"

    @property
    def is_right(self) -> bool:
        """True if proven, or right at each copy and too small for the chain's proofs."""
        return self.proven or (self.verdict == "unverified" and is_small(self.chunk))

    @property
    def verdict(self) -> str:
        if self.explanation:
            return "damaged"
        if self.unanswered:
            return "unanswered"
        if self.chunk.unread:
            return "unread"
        return "unverified" if self.unverified else "proven"

    @property
    def reason(self) -> str:
        """Why the chunk is not proven, or ""."""
        unread = NOT_READ_WHOLE if self.chunk.unread else ""
        return self.explanation or self.unanswered or unread or self.unverified


class OneRequestEach:
    """Lets several threads ask providers, but each provider by one thread at a time."""

    def __init__(self) -> None:
        self._busy: set[str] = set()
        self._freed = threading.Condition()

    @contextmanager
    def any_of(self, copies: Sequence[Copy]) -> Iterator[Copy]:
        """Yield the first copy whose provider is free, and keep others away from the provider."""
        with self._freed:
            while not (free := [copy for copy in copies if copy.provider not in self._busy]):
                self._freed.wait()
            copy = free[0]
            self._busy.add(copy.provider)
        try:
            yield copy
        finally:
            with self._freed:
                self._busy.remove(copy.provider)
                self._freed.notify_all()


def prove_chunk(
    context: RunContext,
    name: str,
    *,
    an_object: Sample | None = None,
    whole: bool = False,
    requests: OneRequestEach | None = None,
) -> ProofReport:
    """Look at a located or damaged chunk and record the result.

    `whole` reads all bytes of a chunk that is `unread`, from one copy that has its Merkle root.
    `requests` are shared with looks at other chunks.

    A located chunk that fails becomes `damaged`. Only `repair` ends that. Raises StoreUnreachable.
    """
    with lease_chunk(context, name) as lease:
        chunk = located_or_damaged(context, name)
        posting = posting_of(chunk)
        if chunk.encrypted and not _opens(context, posting):
            an_object = None
        elif an_object is None:
            an_object = context.ledger.chunks.any_object(name, OBJECT_BYTES)
        # The places of samples follow from the root, and the first look has revealed them all.
        samples = chunk.samples
        if not (
            chunk.checked_at is None
            or chunk.unanswered_at is not None
            or chunk.state is ChunkState.DAMAGED
        ):
            samples = [random.SystemRandom().choice(samples)]
        findings = check_copies(
            context,
            lease,
            chunk,
            posting,
            samples,
            an_object=an_object,
            whole=whole,
            requests=requests,
        )
        contradiction = next((finding.contradiction for finding in findings if finding.whole), "")
        if contradiction:
            mark_damaged(context, lease, name, contradiction)
            return ProofReport(context.ledger.chunks.get(name), (), (), contradiction)
        if chunk.unread and any(finding.whole and finding.good for finding in findings):
            context.ledger.replicas.record_whole(lease, name)
        right = [finding.copy.provider for finding in findings if finding.good]
        if findings and all(finding.unanswered for finding in findings):
            context.ledger.replicas.record_unanswered(lease, name)
            message = f"no provider of chunk {name} answers: {described(findings)}"
            if all(finding.private for finding in findings):
                raise PrivateAddress(message, hint=PrivateAddress.remedy)
            raise StoreUnreachable(message, hint="try again later")
        checks = checks_of(context, chunk, posting, findings)
        explanation = _explanation(checks, context.store.required_copies)
        if chunk.state is ChunkState.DAMAGED:
            explanation = (
                explanation
                or f"its copies are right now, but it was damaged before: {chunk.reason}"
            )
        elif explanation:
            # Before the checks: if only they were written, a sample at another place could pass
            # the next time.
            mark_damaged(context, lease, name, explanation)
        now = context.store.current_window(posting)
        if now is not None and any(
            check.window is not None and check.window < now for check in checks
        ):
            again_in: float | None = 0.0  # another look can already see the current window
        else:
            again_in = context.store.window_ends_in(posting)
        context.ledger.replicas.record_checks(
            lease, name, checks, again_in=again_in, enough=context.store.required_copies
        )
        unverified = "" if explanation else unverified_copies(context, chunk, posting, checks)
        silent = [] if explanation else [finding for finding in findings if finding.unanswered]
        unanswered = described(silent) if silent else ""
        return ProofReport(
            context.ledger.chunks.get(name), checks, right, explanation, unverified, unanswered
        )


def mark_damaged(
    context: RunContext, lease: Lease, name: str, reason: str, *, fault: CopyCheck | None = None
) -> None:
    """Mark a located chunk as damaged, or replace the reason of this look."""
    before = context.ledger.chunks.get(name).state
    context.ledger.moves.move(lease, name, before, ChunkState.DAMAGED, reason=reason, fault=fault)


def mark_wrong(
    context: RunContext, lease: Lease, chunk: Chunk, findings: Sequence[CopyFinding]
) -> str:
    """Mark a located chunk as damaged; return the reason."""
    posting = posting_of(chunk)
    by_provider = {finding.copy.provider: finding for finding in findings}
    listed = [
        by_provider.get(copy.provider, CopyFinding(copy, unanswered="not asked"))
        for copy in context.store.copies(posting)
    ]
    checks = checks_of(context, chunk, posting, listed)
    explanation = _explanation(checks, context.store.required_copies) or described(findings)
    mark_damaged(context, lease, chunk.name, explanation)
    context.ledger.replicas.record_checks(lease, chunk.name, checks)
    return explanation


def prove_oldest(
    context: RunContext, limit: int, *, whole_bytes: int | None = None
) -> Iterator[ProofReport]:
    """Look at up to `limit` chunks, the least recently checked first.

    Unread chunks come first, and are read whole: at least one, and up to `whole_bytes`, if given.
    Then come silent chunks, until a quarter of the looks (at least one) had no answer again. Then
    come suspect chunks (`check_chain_listing`). One look in four is kept for other chunks. Up to
    half of these are for chunks that wait for their next proof window, so that two windows in a row
    can be seen. Silent chunks do not use up a look.

    Raises StoreUnreachable immediately for the chain, and at the end for silent chunks.
    """
    silent: list[StoreUnreachable] = []
    requests = OneRequestEach()

    def look(chunk: Chunk, *, whole: bool) -> ProofReport | None:
        try:
            return prove_chunk(context, chunk.name, whole=whole, requests=requests)
        except HeldByOther:
            return None
        except NoChainAnswer:
            raise
        except StoreUnreachable as error:
            silent.append(error)
            return ProofReport(chunk, (), (), "", unanswered=str(error))

    tried: set[str] = set()
    looked_at = 0
    for group in ("unread", "unanswered", "suspected", "oldest"):
        end = limit if group == "oldest" else limit - limit // 4
        most = limit + MOST_UNANSWERED
        if group == "unread":
            chunks = _unread(context, whole_bytes)
        elif group == "unanswered":
            chunks = context.ledger.chunks.unanswered(context.source)
        elif group == "suspected":
            chunks = context.ledger.chunks.suspected(context.source, most)
        else:
            chunks = context.ledger.chunks.to_prove(
                context.source, most, waiting=-(-(limit - looked_at) // 2)
            )
        again = 0
        remaining = iter([chunk for chunk in chunks if chunk.name not in tried])
        while True:
            looks = end - looked_at
            if group == "unanswered":
                looks = min(looks, max(1, limit // 4) - again)
            if not (batch := list(islice(remaining, max(looks, 0)))):
                break
            is_whole = whole_bytes is None or group == "unread"
            tried.update(chunk.name for chunk in batch)
            work = partial(look, whole=is_whole)
            with closing(side_by_side(batch, work, CHUNKS_AT_ONCE, drains=True)) as reports:
                for report in filter(None, reports):
                    is_silent = bool(report.unanswered) and (
                        group == "unanswered" or not report.checks
                    )
                    again += is_silent
                    looked_at += not is_silent
                    yield report
    if silent:
        raise silent[0]


def _unread(context: RunContext, whole_bytes: int | None) -> Sequence[Chunk]:
    chunks = context.ledger.chunks.unread(context.source)
    if whole_bytes is None:
        return chunks
    sums = accumulate(chunk.stored_size_bytes for chunk in chunks)
    return chunks[: max(1, sum(size_bytes <= whole_bytes for size_bytes in sums))]


def located_or_damaged(context: RunContext, name: str) -> Chunk:
    """Return a chunk; raises CafError in any other state."""
    chunk = context.ledger.chunks.get(name)
    if chunk.state not in (ChunkState.LOCATED, ChunkState.DAMAGED):
        raise CafError(
            f"chunk {name} is '{chunk.state}': only located or damaged chunks are proven and "
            "repaired",
            hint="'caf status' shows the state of each chunk; the run of an unfinished chunk "
            "verifies it",
        )
    return chunk


def check_copies(
    context: RunContext,
    lease: Lease,
    chunk: Chunk,
    posting: PostRecord,
    samples: Sequence[Sample],
    *,
    an_object: Sample | None = None,
    whole: bool = False,
    requests: OneRequestEach | None = None,
) -> Sequence[CopyFinding]:
    """Ask every copy for samples and an object, or for all of a small file.

    If an object differs from the ledger's row, the copy is read whole to see which is wrong.
    `whole` reads copies of an unread chunk until one is right. A contradiction ends the check. A
    copy that has lost bytes, or has wrong ones, is recorded at once; a located chunk becomes
    `damaged`.
    """
    requests = requests or OneRequestEach()
    copies = context.store.copies(posting)
    findings: dict[str, CopyFinding] = {}
    while remaining := [copy for copy in copies if copy.provider not in findings]:
        was_read = any(finding.whole and finding.good for finding in findings.values())
        with requests.any_of(remaining) as copy:
            context.wait_while_paused(lease.check)
            if is_small(chunk) or (whole and chunk.unread and not was_read):
                finding = check_whole_copy(context, lease, chunk, posting, copy)
            else:
                finding = check_copy(context.store, posting, copy, samples)
                if finding.good and an_object is not None:
                    finding = check_copy(context.opened, posting, copy, [an_object])
                    if finding.fault:
                        finding = check_whole_copy(context, lease, chunk, posting, copy)
        findings[copy.provider] = finding
        if finding.fault:
            _record_fault(context, lease, chunk, list(findings.values()))
        if finding.contradiction:
            return [finding]
    return [findings[copy.provider] for copy in copies]


def _record_fault(
    context: RunContext, lease: Lease, chunk: Chunk, findings: Sequence[CopyFinding]
) -> None:
    """Record the fault of the last finding."""
    last = findings[-1]
    check = CopyCheck(last.copy, None, _fault(last), apart=is_small(chunk))
    if chunk.state is ChunkState.LOCATED:
        mark_damaged(context, lease, chunk.name, described(findings), fault=check)
    else:
        context.ledger.replicas.record_fault(lease, chunk.name, check)


def _fault(finding: CopyFinding) -> str:
    return f"{WHOLE_COPY}{finding.fault}" if finding.fault and finding.whole else finding.fault


def _opens(context: RunContext, posting: PostRecord) -> bool:
    try:
        context.opened.open(posting)
    except (IdentityMissing, KeyRefused, ArchiveError):
        return False
    return True


def is_small(chunk: Chunk) -> bool:
    """Return whether a chunk is too small for the chain's proofs."""
    return chunk.stored_size_bytes <= SMALL_BYTES


def checks_of(
    context: RunContext, chunk: Chunk, posting: PostRecord, findings: Sequence[CopyFinding]
) -> Sequence[CopyCheck]:
    """Return the checks to record. The last fault persists while a provider does not answer.

    A full read's fault persists until another one.
    """
    before = {copy.provider: copy for copy in context.ledger.replicas.list(chunk.name)}
    now = context.store.current_window(posting)
    checks = []
    for finding in findings:
        copy = finding.copy
        proven = context.store.proof_window(posting, copy)
        if proven is not None and now is not None and now - proven > WINDOWS_BEHIND:
            # Reading the copies may have taken longer than the window in which they were listed.
            copy = next(
                (
                    listed
                    for listed in context.store.copies(posting)
                    if listed.provider == copy.provider
                ),
                copy,
            )
            proven = context.store.proof_window(posting, copy)
        fault, last = _fault(finding), before.get(copy.provider)
        beyond_samples = (
            last is not None
            and last.listed
            and last.fault.startswith(WHOLE_COPY)
            and not finding.whole
        )
        if last is not None and (finding.unanswered or (finding.good and beyond_samples)):
            fault = last.fault
        if not fault and proven is not None and now is not None and now - proven > WINDOWS_BEHIND:
            fault = f"listed, but last proven in window {proven}; the current window is {now}"
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
    """Explain that too few copies are proven."""
    verified = [check for check in checks if not check.fault and check.copy.verified]
    required = context.store.required_copies
    if len(verified) >= required or context.store.current_window(posting) is None:
        return ""
    if is_small(chunk):
        return (
            "the chain never has a verified proof of so small a file "
            f"({chunk.stored_size_bytes} bytes); all of it was read"
        )
    others = "; ".join(
        f"{check.copy.provider}: {check.fault or _ONLY_JOINED}"
        for check in checks
        if check.fault or not check.copy.verified
    )
    return (
        f"{len(verified)} of {required} copies have a verified proof ({others}); the next proof "
        "window may show more"
    )


def _explanation(checks: Sequence[CopyCheck], required: int) -> str:
    if not checks:
        return "the store no longer lists the chunk, or any copy of it"
    faulty = [check for check in checks if check.fault]
    right = len(checks) - len(faulty)
    if right >= required and not faulty:
        return ""
    faults = "".join(f"; {check.copy.provider}: {check.fault}" for check in faulty)
    listed = ", ".join(check.copy.provider for check in checks)
    return f"{right} of {required} copies are right (listed: {listed}{faults})"
