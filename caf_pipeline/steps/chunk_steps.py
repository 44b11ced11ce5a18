"""The steps of one chunk, from its plan to its location rows.

    load_batch → pack_chunk → seal_chunk → post_file → upload_chunk → verify_stored → load_locations
    → release_staging

Each step takes the chunk's lease, looks at the ledger, does what is not yet done, and moves the
chunk. Each may be run again at any time, also after a crash in its middle: what is done already is
left as it is. While the operator has everything paused, a step waits with its lease held.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from caf_pipeline.caf.merkle import merkle_roots
from caf_pipeline.chunk_state import (
    BEGUN_NOT_POSTED,
    CLAIMING,
    ChunkState,
    has_reached,
    unparked_state,
)
from caf_pipeline.errors import (
    CafError,
    ChunkTooLarge,
    IntegrityError,
    RootRefused,
    StagingError,
    StoreError,
)
from caf_pipeline.inventory.manifest import OpenedManifest
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.inventory.plan import count_chunk_objects
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import Chunk, SealRecord, Skip, chunk_lease, posting_of
from caf_pipeline.packing.chunk_reader import (
    SKIP_COLUMNS,
    ChunkFile,
    RemoteSource,
    StagedSource,
    skips_of,
)
from caf_pipeline.packing.pack_chunk import pack_or_resume
from caf_pipeline.packing.packer import remove_staged
from caf_pipeline.packing.samples import check_copy, samples_of, staged_matches, too_few_copies
from caf_pipeline.packing.sink import staging_error
from caf_pipeline.packing.staging import (
    give_final_name,
    packing_run,
    proof_type_of,
    read_packed,
    read_record,
    release_located,
    remove_all,
    remove_packing,
    remove_unsealed,
    staged_has_root,
    staged_is_whole,
    staged_path,
)
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.account import ACCOUNT_COLUMNS, REPORT_COLUMNS, ChunkAuditor, ManifestReport
from caf_pipeline.steps.first_plan import refuse_unknown
from caf_pipeline.store.protocol import ChunkToStore, Copy, Lease, PostRecord
from caf_pipeline.system.quantities import counted


@dataclass(frozen=True, slots=True)
class SealReport:
    """A sealed (or empty) chunk.

    `fill` is its size over the source's target; rates in bytes a second of packing.

    Attributes: resumed_bytes: of the chunk that an earlier run had packed. not_resumed: why
        nothing, or not all, of what an earlier run left was resumed; "" where nothing was wrong
        with it.
    """

    chunk: Chunk
    fill: float
    seconds: float
    bytes_per_second: float
    skipped: Mapping[SkipReason, int]
    largest: Sequence[tuple[str, int]]
    resumed_bytes: int = 0
    not_resumed: str = ""


@dataclass(frozen=True, slots=True)
class UploadReport:
    """An uploaded chunk; 0 seconds where it was there already."""

    chunk: Chunk
    seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A verified chunk, who has it right, and how many samples were compared with each."""

    chunk: Chunk
    copies: Sequence[Copy]
    samples: int


# --- caf_chunk
# ------------------------------------------------------------------------------------------


def load_batch(context: RunContext, name: str) -> Chunk:
    """Take the chunk's part of the plan: planned → packing, after the plan's files were found to
    hold what was claimed.

    Raises: What `ChunkStore.admit` raises: the store would not take a chunk of the expected size,
        so that it is not packed. StoredAlready: the store has posts of the source that the ledger
        does not know.
    """
    with lease_chunk(context, name) as lease:
        chunk = _wanted(context, lease, _workable(context, name))
        if chunk.state not in (ChunkState.PLANNED, ChunkState.PACKING):
            return chunk
        refuse_unknown(context)
        planned = count_chunk_objects(Path(chunk.plan_folder), chunk.number)
        if planned != chunk.object_count:
            raise CafError(
                f"the plan of chunk {name} lists {counted(planned, 'object')}, the ledger "
                f"{chunk.object_count}",
                hint=f"the folder {chunk.plan_folder} is not the one that was written; restore it "
                "or withdraw the chunk",
            )
        if read_packed(context, name) is None:
            try:
                _ask_store(context, chunk, chunk.expected_size_bytes, waiting_in=BEGUN_NOT_POSTED)
            except ChunkTooLarge as error:
                raise _withdrawn_as_too_large(context, lease, chunk, error) from error
        context.ledger.moves.move(lease, name, chunk.state, ChunkState.PACKING)
        return context.ledger.chunks.get(name)


def pack_chunk(context: RunContext, name: str) -> Chunk:
    """Pack the chunk into a staged file, unless that is done; what was lost from staging since is
    packed again.
    """
    with lease_chunk(context, name) as lease:
        chunk = _wanted(context, lease, _workable(context, name))
        if chunk.state is ChunkState.PLANNED:
            raise CafError(
                f"chunk {name} was not loaded yet", hint="run the partition from its first step"
            )
        if chunk.state is ChunkState.PACKING and read_packed(context, name) is None:
            pack_or_resume(context, lease, chunk)
        return _restored(context, lease, chunk)


def seal_chunk(context: RunContext, name: str) -> SealReport:
    """Check the packed file, take its samples, give it its final name: packing → sealed, or →
    empty.
    """
    with lease_chunk(context, name) as lease:
        chunk = _wanted(context, lease, _workable(context, name))
        manifest = ManifestReport()
        if chunk.state is ChunkState.PACKING:
            if read_packed(context, name) is None:
                pack_or_resume(context, lease, chunk)
            manifest = _seal(context, lease, chunk)
        elif has_reached(chunk.state, ChunkState.SEALED):
            for batch in open_chunk(context, chunk).manifest().batches(REPORT_COLUMNS):
                manifest.take(batch)
        remove_packing(context, name)  # also where a run was killed between the seal and this
        return _seal_report(context, context.ledger.chunks.get(name), manifest)


def _ask_store(
    context: RunContext, chunk: Chunk, size_bytes: int, *, waiting_in: Sequence[ChunkState]
) -> None:
    """Raise what would keep the store from taking the chunk, beside the ledger's other chunks in
    these states.
    """
    waiting_bytes = bytes_to_post(context.ledger, waiting_in, beside={chunk.name})
    context.store.admit(
        public=context.source_settings.public,
        stored_size_bytes=size_bytes,
        waiting_bytes=waiting_bytes,
    )


def bytes_to_post(
    ledger: Ledger, states: Sequence[ChunkState], beside: Collection[str] = ()
) -> int:
    """Return the stored bytes, or those expected, of one copy of all sources' chunks in these
    states, but for some.
    """
    chunks = ledger.chunks.list(states=states)
    return sum(
        one.stored_size_bytes or one.expected_size_bytes for one in chunks if one.name not in beside
    )


def _seal(context: RunContext, lease: Lease, chunk: Chunk) -> ManifestReport:
    """Seal what was packed, with the rows of its manifest.

    Raises:
        IntegrityError: the packed file does not account for the plan; nothing was sealed.
    """
    found = read_packed(context, chunk.name)
    if found is None:
        raise StagingError(
            f"the packed file of chunk {chunk.name} is gone or damaged",
            hint="run the partition again: it is packed again",
        )
    packed, file = found
    samples = (
        samples_of(StagedSource(file), packed.caf_size_bytes, packed.merkle_root)
        if packed.member_count
        else []
    )
    seal = replace(packed, samples=samples)
    lease.check()
    if packed.member_count:
        file = give_final_name(context, chunk.name, file)
    chunk_file = ChunkFile(StagedSource(file), chunk.name)
    account, report = ChunkAuditor(chunk, chunk_file), ManifestReport()
    opened = chunk_file.manifest()
    skips = _accounted_skips(chunk.name, opened, seal, account, report)
    released = account.released() if packed.released_count else ()
    context.ledger.moves.seal(
        lease,
        chunk.name,
        seal,
        skips,
        released,
        rows=opened.locations,
        part=opened.part(),
        logs=opened.logs(),
    )
    if not packed.member_count:
        context.ended(ChunkState.EMPTY)
        remove_unsealed(context, chunk.name)
        context.ledger.staging.release(chunk.name)
    return report


def _accounted_skips(
    chunk: str,
    manifest: OpenedManifest,
    seal: SealRecord,
    account: ChunkAuditor,
    report: ManifestReport,
) -> Iterator[Skip]:
    """Yield the skips of a chunk that is to be sealed, while `account` and `report` take its
    manifest.

    Raises:
        IntegrityError: the account does not agree; the ledger then writes nothing.
    """
    for batch in manifest.batches({*ACCOUNT_COLUMNS, *REPORT_COLUMNS, *SKIP_COLUMNS}):
        account.take(batch)
        report.take(batch)
        yield from skips_of(batch)
    found = account.finish(
        members=seal.member_count, skipped=seal.skipped_count, released=seal.released_count
    )
    if not found.agrees:
        raise IntegrityError(
            f"the packed file of chunk {chunk} does not account for its part of the plan: "
            f"{found.explanation}",
            hint="withdraw the chunk; the next plan has its objects again",
        )


def _seal_report(context: RunContext, chunk: Chunk, manifest: ManifestReport) -> SealReport:
    record = read_record(context, chunk.name) or {
        "seconds": 0.0,
        "fetched_bytes": 0,
        "resumed_bytes": 0,
        "not_resumed": "",
    }
    seconds = float(record["seconds"])
    return SealReport(
        chunk=chunk,
        fill=chunk.caf_size_bytes / context.source_settings.target_size
        if chunk.member_count
        else 0.0,
        seconds=seconds,
        bytes_per_second=record["fetched_bytes"] / seconds if seconds else 0.0,
        skipped=manifest.skipped,
        largest=manifest.largest,
        resumed_bytes=record["resumed_bytes"],
        not_resumed=record["not_resumed"],
    )


# --- stored_chunk
# ------------------------------------------------------------------------------------------


def post_file(context: RunContext, name: str) -> Chunk:
    """Announce the chunk to the store: sealed → posting → posted.

    Raises: ChunkTooLarge: no provider takes so much; the chunk is withdrawn, and the next plan has
        its objects in smaller ones. And what else `ChunkStore.post` raises.
    """
    with lease_chunk(context, name) as lease:
        chunk = _reached(
            _restored(
                context, lease, _wanted(context, lease, _workable(context, name)), to_be_posted=True
            ),
            ChunkState.SEALED,
        )
        if chunk.state in (ChunkState.SEALED, ChunkState.POSTING):
            refuse_unknown(context)
        if chunk.state is ChunkState.SEALED:
            chunk = _with_root_of_type(context, lease, chunk, context.store.proof_type)
            try:
                # Not beside those that are still packed: each would then wait for the others, and
                # none be posted.
                _ask_store(context, chunk, chunk.stored_size_bytes, waiting_in=[ChunkState.POSTING])
            except ChunkTooLarge as error:
                raise _withdrawn_as_too_large(context, lease, chunk, error) from error
            context.ledger.moves.move(lease, name, ChunkState.SEALED, ChunkState.POSTING)
            chunk = context.ledger.chunks.get(name)
        if chunk.state is ChunkState.POSTING:
            return _post(context, lease, chunk)
        return chunk


def _with_root_of_type(context: RunContext, lease: Lease, chunk: Chunk, proof_type: int) -> Chunk:
    """Return a sealed chunk with a root of this type, taken of its staged bytes, which stay what
    they are.

    Raises:
        IntegrityError: the bytes are not those that were sealed; the next run packs them again.
    """
    if chunk.proof_type == proof_type:
        return chunk
    path = staged_path(context, chunk.name)
    sealed, root = merkle_roots(path, proof_type_of(chunk), proof_type)
    if sealed != chunk.merkle_root:
        raise IntegrityError(
            f"the staged file of chunk {chunk.name} is not what was sealed",
            hint="run the partition again: it is packed again",
        )
    context.ledger.moves.record_root(
        lease,
        chunk.name,
        root,
        proof_type,
        samples_of(StagedSource(path), chunk.stored_size_bytes, root),
    )
    return context.ledger.chunks.get(chunk.name)


def _with_type_set_now(context: RunContext, lease: Lease, chunk: Chunk) -> Chunk:
    """Return a chunk in `posting` with a root of the type that is set now, if it is known never to
    have been posted.

    What was posted goes on as it is. A staged file that is lost or damaged is packed to its root
    first.
    """
    if chunk.state is not ChunkState.POSTING or chunk.proof_type == context.store.proof_type:
        return chunk
    if (
        context.store.posted_already(
            to_store(context, chunk), context.ledger.transactions(context.holder)
        )
        is not None
    ):
        return chunk
    refuse_unknown(context)  # it gets another root
    if not staged_has_root(context, chunk):
        remove_staged(staged_path(context, chunk.name))
        if not repeat_packing(context, lease, chunk):
            return chunk
    return _with_root_of_type(context, lease, chunk, context.store.proof_type)


def _withdrawn_as_too_large(
    context: RunContext, lease: Lease, chunk: Chunk, error: ChunkTooLarge
) -> ChunkTooLarge:
    """Withdraw a chunk that no provider takes, before it is posted; return the error that says
    so.
    """
    _withdraw(context, lease, chunk, reason=str(error))
    return ChunkTooLarge(
        f"chunk {chunk.name} is withdrawn: {error}",
        fitting_bytes=error.fitting_bytes,
        hint=f"its objects are planned again, in chunks that fit ({error.fitting_bytes} bytes), by "
        "the next plan",
    )


def _post(context: RunContext, lease: Lease, chunk: Chunk) -> Chunk:
    posting = context.store.post(
        to_store(context, chunk), context.ledger.transactions(context.holder)
    )
    context.ledger.moves.record_posting(lease, chunk.name, posting)
    return context.ledger.chunks.get(chunk.name)


def upload_chunk(context: RunContext, name: str) -> UploadReport:
    """Bring the stored bytes to the store: posted → uploading."""
    with lease_chunk(context, name) as lease:
        chunk = _reached(_restored(context, lease, _workable(context, name)), ChunkState.POSTED)
        seconds = 0.0
        if chunk.state in (ChunkState.POSTED, ChunkState.UPLOADING):
            context.ledger.moves.move(lease, name, chunk.state, ChunkState.UPLOADING)
            started = time.monotonic()
            put_staged(context, lease, context.ledger.chunks.get(name), posting_of(chunk))
            seconds = time.monotonic() - started
        chunk = context.ledger.chunks.get(name)
        return UploadReport(chunk, seconds, chunk.stored_size_bytes / seconds if seconds else 0.0)


def put_staged(
    context: RunContext,
    lease: Lease,
    chunk: Chunk,
    posting: PostRecord,
    *,
    wrong: Collection[str] = (),
) -> None:
    """Bring the chunk's staged file to the store, in any case to the providers in `wrong`.

    A lost lease ends the upload.

    Where providers say that it is not what was posted, and it is not, it is packed once more and
    brought then.
    """

    def told(size_bytes: int) -> None:
        lease.check()
        context.upload_progress(size_bytes)

    try:
        context.store.put(posting, staged_path(context, chunk.name), told, wrong=wrong)
    except RootRefused as error:
        if staged_has_root(context, chunk):
            hint = (
                "the staged file has the posted root, so that the providers are at fault; run "
                "the chunk again later"
            )
            raise RootRefused(str(error), hint=hint) from error
        remove_staged(staged_path(context, chunk.name))
        _repeat_or_abandon(context, lease, chunk)
        context.store.put(posting, staged_path(context, chunk.name), told, wrong=wrong)


def verify_stored(context: RunContext, name: str) -> VerifyReport:
    """Move a chunk from uploading to verified, once enough copies are listed and give all samples
    back.

    Raises: NotProven: fewer right copies than required. IntegrityError: fewer, and a copy gives
        other bytes.
    """
    with lease_chunk(context, name) as lease:
        chunk = _workable(context, name)
        if chunk.state in (ChunkState.EMPTY, ChunkState.WITHDRAWN):
            return VerifyReport(chunk, [], 0)
        posting = posting_of(chunk)
        copies = context.store.copies(posting)
        if chunk.state is ChunkState.UPLOADING:
            findings = []
            for copy in copies:
                context.wait_while_paused(lease.check)
                findings.append(check_copy(context.store, posting, copy, chunk.samples))
            copies = [finding.copy for finding in findings if finding.good]
            if len(copies) < context.store.required_copies:
                raise too_few_copies(chunk, findings, context.store.required_copies)
            context.ledger.replicas.record_verified(lease, name, copies)
            return VerifyReport(context.ledger.chunks.get(name), copies, len(chunk.samples))
        return VerifyReport(chunk, copies, 0)


def to_store(context: RunContext, chunk: Chunk) -> ChunkToStore:
    """Return a sealed chunk as a store sees it."""
    if chunk.merkle_root is None or chunk.proof_type is None:
        raise CafError(
            f"chunk {chunk.name} is '{chunk.state}' but has no Merkle root",
            hint="withdraw it; it is planned again",
        )
    return ChunkToStore(
        name=chunk.name,
        archive_id=chunk.archive_id,
        public=context.source_settings.public,
        stored_size_bytes=chunk.stored_size_bytes,
        proof_type=chunk.proof_type,
        merkle_root=chunk.merkle_root,
    )


def _restored(
    context: RunContext, lease: Lease, chunk: Chunk, *, to_be_posted: bool = False
) -> Chunk:
    """Return the chunk with its staged file whole, where the file is still needed; what was lost is
    packed again.

    Before the post it may come out with other members. From then on a plain chunk repeats itself,
    unless the source has changed; then it cannot be completed, and is abandoned.
    """
    chunk = _with_type_set_now(context, lease, chunk)
    needed = (ChunkState.SEALED, ChunkState.POSTING, ChunkState.POSTED, ChunkState.UPLOADING)
    if chunk.state not in needed or (
        staged_is_whole(context, chunk)
        and (not to_be_posted or _is_what_was_packed(context, chunk))
    ):
        return chunk
    if chunk.state in (ChunkState.SEALED, ChunkState.POSTING):
        refuse_unknown(context)  # packed again it may have another root
    remove_staged(staged_path(context, chunk.name))
    if chunk.state is ChunkState.SEALED:
        context.ledger.moves.move(lease, chunk.name, ChunkState.SEALED, ChunkState.PACKING)
        chunk = context.ledger.chunks.get(chunk.name)
        pack_or_resume(context, lease, chunk)
        _seal(context, lease, chunk)
        remove_packing(context, chunk.name)
        return context.ledger.chunks.get(chunk.name)
    if chunk.state is ChunkState.POSTING:
        chunk = _post(context, lease, chunk)
    _repeat_or_abandon(context, lease, chunk)
    return chunk


def _is_what_was_packed(context: RunContext, chunk: Chunk) -> bool:
    """Tell whether the staged file has its root, where it is about to be posted, and paid for, on
    another run's word.

    A run that packed the file itself has just written it; after the post the provider's own root
    says as much.
    """
    return (
        chunk.state is not ChunkState.SEALED
        or packing_run(context, chunk) == context.holder.run
        or staged_has_root(context, chunk)
    )


def _repeat_or_abandon(context: RunContext, lease: Lease, chunk: Chunk) -> None:
    """Pack a posted chunk once more; where that is impossible, it cannot be completed.

    Where it was packed into another folder, its file may still be there, for another machine to go
    on with.
    """
    packed_into = next(
        (one for one in context.ledger.staging.list() if one.chunk == chunk.name), None
    )
    if repeat_packing(context, lease, chunk):
        path = staged_path(context, chunk.name)
        if chunk.merkle_root is not None and not staged_matches(path, chunk.samples):
            # The samples were taken of a file that was damaged between its packing and the seal.
            samples = samples_of(StagedSource(path), chunk.stored_size_bytes, chunk.merkle_root)
            context.ledger.moves.record_samples(lease, chunk.name, samples)
        return
    if packed_into and packed_into.folder != str(context.staging()):
        context.ledger.staging.reserve(
            lease, chunk.name, packed_into.folder, packed_into.size_bytes, 0
        )
        raise StoreError(
            f"chunk {chunk.name} was posted, its objects have changed since, and its file is in "
            f"{packed_into.folder},"
            f" where this run does not look: its staging folder is {context.staging()}",
            hint="go on where that folder is; if it is lost, run once with `staging` set to it, "
            "which abandons the chunk",
        )
    message = (
        f"chunk {chunk.name} was posted, its staged file is gone or damaged, and its "
        "objects "
        "have changed since"
    )
    if chunk.state not in (ChunkState.POSTED, ChunkState.UPLOADING):
        raise StoreError(message, hint="restore its staged file, or the object as it was")
    context.ledger.moves.move(lease, chunk.name, chunk.state, ChunkState.ABANDONED)
    context.ledger.staging.release(chunk.name)
    raise StoreError(
        message, hint="it is abandoned; its objects are planned again by the next plan"
    )


def repeat_packing(context: RunContext, lease: Lease, chunk: Chunk) -> bool:
    """Pack a sealed chunk once more from its source, into its place in staging.

    Returns False, and leaves nothing, where its objects have changed: other bytes have another
    root. Raises as `pack_or_resume`.
    """
    pack_or_resume(context, lease, chunk)
    found = read_packed(context, chunk.name)
    if found is None or found[0].merkle_root != chunk.merkle_root:
        remove_unsealed(context, chunk.name)
        return False
    give_final_name(context, chunk.name, found[1])
    remove_packing(context, chunk.name)
    return True


# --- file_locations
# ------------------------------------------------------------------------------------------


def load_locations(context: RunContext, name: str) -> Chunk:
    """Move the rows that the seal wrote to the locations: verified → located."""
    with lease_chunk(context, name) as lease:
        chunk = _reached(_workable(context, name), ChunkState.VERIFIED)
        if chunk.state is ChunkState.VERIFIED:
            context.ledger.moves.load_locations(lease, name)
            context.ended(ChunkState.LOCATED)
        return context.ledger.chunks.get(name)


def release_staging(context: RunContext, name: str) -> Chunk:
    """Remove what a located or empty chunk still has in staging; what the store wants kept stays
    while there is room.
    """
    with lease_chunk(context, name):
        chunk = _reached(_workable(context, name), ChunkState.VERIFIED)
        if chunk.state is ChunkState.LOCATED:
            release_located(context, name)
        elif chunk.state is ChunkState.EMPTY:
            remove_all(context, name)
        return chunk


# --- an operator's turn
# ------------------------------------------------------------------------------------------


def park(context: RunContext, name: str, reason: str) -> Chunk:
    """Give a chunk up until an operator looks at it; its objects stay claimed."""
    with lease_chunk(context, name, though_paused=True) as lease:
        chunk = context.ledger.chunks.get(name)
        context.ledger.moves.move(lease, name, chunk.state, ChunkState.PARKED, reason=reason)
        return context.ledger.chunks.get(name)


def unpark(context: RunContext, name: str) -> Chunk:
    """Let runs work on a parked chunk again, from the state that its copy has."""
    with lease_chunk(context, name, though_paused=True) as lease:
        chunk = context.ledger.chunks.get(name)
        context.ledger.moves.move(lease, name, ChunkState.PARKED, unparked_state(chunk.copy_state))
        return context.ledger.chunks.get(name)


def withdraw(context: RunContext, name: str, *, reason: str = "") -> Chunk:
    """Give a chunk up for good; its objects are planned again.

    Raises:
        IllegalMove: it was posted, or it is not known yet whether it was.
    """
    with lease_chunk(context, name, though_paused=True) as lease:
        _withdraw(context, lease, context.ledger.chunks.get(name), reason=reason)
        return context.ledger.chunks.get(name)


def _withdraw(context: RunContext, lease: Lease, chunk: Chunk, *, reason: str) -> None:
    context.ledger.moves.move(lease, chunk.name, chunk.state, ChunkState.WITHDRAWN, reason=reason)
    remove_all(context, chunk.name)


# --- what the steps share
# ------------------------------------------------------------------------------------------


def open_chunk(context: RunContext, chunk: Chunk) -> ChunkFile:
    """Open a chunk that is sealed or further: the staged file where it is whole, else the stored
    one by range reads.
    """
    path = staged_path(context, chunk.name)
    if path.exists() and path.stat().st_size == chunk.stored_size_bytes:
        return ChunkFile(StagedSource(path), chunk.name)
    return ChunkFile(RemoteSource(context.store, posting_of(chunk)), chunk.name)


@contextmanager
def lease_chunk(context: RunContext, name: str, *, though_paused: bool = False) -> Iterator[Lease]:
    """Hold the chunk's lease; the context begins when nothing is paused.

    What the operating system refuses meanwhile, it refuses in staging.
    """
    with context.waits.on(name), context.lease(chunk_lease(name)) as lease:
        try:
            if not though_paused:
                context.wait_while_paused(lease.check)
            yield lease
        except (OSError, StagingError) as error:
            lease.check()  # whoever lost it finds files gone that are another run's by now
            if isinstance(error, StagingError):
                raise
            raise staging_error(
                Path(error.filename or staged_path(context, name)), error
            ) from error


def _wanted(context: RunContext, lease: Lease, chunk: Chunk) -> Chunk:
    """Return the chunk; withdrawn where it has a part of an object that another chunk gave up, and
    nothing is posted yet.

    What was posted goes on, since it is paid for, and is never given out.
    """
    if chunk.part_abandoned and chunk.state in (
        ChunkState.PLANNED,
        ChunkState.PACKING,
        ChunkState.SEALED,
    ):
        _withdraw(context, lease, chunk, reason="another part of its object cannot be archived")
        return context.ledger.chunks.get(chunk.name)
    return chunk


def _workable(context: RunContext, name: str) -> Chunk:
    """Return the chunk's row, unless no run has any business with it.

    A part that was withdrawn, with the others of its object, is no failure of its run: every step
    leaves it as it is.
    """
    chunk = context.ledger.chunks.get(name)
    if chunk.state is ChunkState.PARKED:
        raise CafError(
            f"chunk {name} is parked: {chunk.reason}",
            hint=f"mend the cause, then 'caf unpark {name}'",
        )
    if chunk.state is ChunkState.DAMAGED:
        raise CafError(
            f"chunk {name} is damaged",
            hint=f"'caf repair {chunk.source}', or its job repair, mends what can be",
        )
    if chunk.state is ChunkState.WITHDRAWN and chunk.part:
        return chunk
    if chunk.state in (ChunkState.WITHDRAWN, ChunkState.ABANDONED):
        why = f": {chunk.reason}" if chunk.reason else ""
        raise CafError(
            f"chunk {name} is {chunk.state}{why}",
            hint="its objects are planned again by the next plan",
        )
    return chunk


def _reached(chunk: Chunk, milestone: ChunkState) -> Chunk:
    """Return the chunk, unless it is under way and has not come so far: then a step before this one
    was left out.
    """
    if chunk.state in CLAIMING and not has_reached(chunk.state, milestone):
        raise CafError(
            f"chunk {chunk.name} is {chunk.state}, and not {milestone} yet",
            hint="run its partition from caf_chunk on",
        )
    return chunk
