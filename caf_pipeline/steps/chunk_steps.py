"""The steps of one chunk, from its plan to its location rows.

    load_batch → pack_chunk → seal_chunk → post_file → upload_chunk → verify_stored
    → load_locations → release_staging

Each step takes the chunk's lease, does what is left to do, and moves the chunk. It is idempotent.
During a pause, it waits and keeps its lease.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from caf_pipeline.caf.archive import RangeSource
from caf_pipeline.caf.merkle import merkle_roots
from caf_pipeline.chunk_state import (
    BEGUN_NOT_POSTED,
    CLAIMING,
    ChunkState,
    CopyState,
    has_reached,
    unparked_state,
)
from caf_pipeline.encryption.identities import require_recipients
from caf_pipeline.encryption.opened_chunk import OpenedChunk, OpenedSource
from caf_pipeline.errors import (
    CafError,
    ChunkTooLarge,
    IllegalMove,
    IntegrityError,
    NotPublic,
    RootRefused,
    StagingError,
    StoredAlready,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.inventory.manifest import OpenedManifest
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.inventory.plan import count_chunk_objects
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import Reservation, SealRecord, Skip, chunk_lease, plan_lease
from caf_pipeline.packing.pack_chunk import pack_or_resume
from caf_pipeline.packing.packer import PackedChunk, remove_staged
from caf_pipeline.packing.sink import staging_error
from caf_pipeline.packing.staging import (
    download,
    give_final_name,
    packed_path,
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
from caf_pipeline.reading.chunk_reader import (
    SKIP_COLUMNS,
    ChunkFile,
    RemoteSource,
    StagedSource,
    skips_of,
)
from caf_pipeline.reading.samples import check_copy, samples_of, staged_matches, too_few_copies
from caf_pipeline.records import Chunk, Copy, Lease, PostRecord, posting_of
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.account import ACCOUNT_COLUMNS, LARGEST_SHOWN, ChunkAuditor
from caf_pipeline.steps.first_plan import refuse_unknown
from caf_pipeline.store.protocol import ChunkToStore, post_mac
from caf_pipeline.system.quantities import counted


@dataclass(frozen=True, slots=True)
class SealReport:
    """A sealed or empty chunk. `fill` is its share of the source's target size."""

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
    """An uploaded chunk. `seconds` is 0 if an earlier run uploaded it."""

    chunk: Chunk
    seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A verified chunk, its correct copies, and the samples compared with each."""

    chunk: Chunk
    copies: Sequence[Copy]
    samples: int


# --- caf_chunk ------------------------------------------------------------------------------------


def load_batch(context: RunContext, name: str) -> Chunk:
    """Compare the chunk's plan with the ledger, then move it from planned to packing."""
    with lease_chunk(context, name) as lease:
        chunk = _workable_or_withdrawn(context, lease, name)
        if chunk.state not in (ChunkState.PLANNED, ChunkState.PACKING):
            return chunk
        refuse_unknown(context)
        planned = count_chunk_objects(Path(chunk.plan_folder), chunk.number)
        if planned != chunk.object_count:
            raise CafError(
                f"the plan of chunk {name} lists {counted(planned, 'object')}, the ledger "
                f"{chunk.object_count}",
                hint=f"the files in {chunk.plan_folder} have changed; restore them, or withdraw "
                "the chunk",
            )
        require_recipients(context.settings, context.source)
        if read_packed(context, name) is None:
            _require_admitted(
                context, lease, chunk, chunk.expected_size_bytes, waiting_in=BEGUN_NOT_POSTED
            )
        return _move(context, lease, chunk, ChunkState.PACKING)


def pack_chunk(context: RunContext, name: str) -> Chunk:
    """Pack the chunk, unless its packed file is still there."""
    with lease_chunk(context, name) as lease:
        chunk = _workable_or_withdrawn(context, lease, name)
        if chunk.state is ChunkState.PLANNED:
            raise CafError(
                f"chunk {name} is not loaded yet", hint="run the partition from its first step"
            )
        if chunk.state is ChunkState.PACKING and read_packed(context, name) is None:
            chunk = _pack(context, lease, chunk)
        return _pack_again_if_lost(context, lease, chunk)


def _pack(context: RunContext, lease: Lease, chunk: Chunk) -> Chunk:
    """An encrypted chunk is sealed, too: only this process has its file key."""
    packed, opened = pack_or_resume(context, lease, chunk)
    if opened:
        file = packed_path(context, chunk.name, lease.epoch)
        _seal(context, lease, chunk, packed, file, opened=opened)
        remove_packing(context, chunk.name)
    return context.ledger.chunks.get(chunk.name)


def seal_chunk(context: RunContext, name: str) -> SealReport:
    """Check and sample the packed file, and move the chunk from packing to sealed or empty."""
    with lease_chunk(context, name) as lease:
        chunk = _workable_or_withdrawn(context, lease, name)
        if chunk.state is ChunkState.PACKING and read_packed(context, name) is None:
            chunk = _pack(context, lease, chunk)
        chunk = _seal_packed(context, lease, chunk)
    record = read_record(context, name) or {}
    seconds = float(record.get("seconds", 0))
    return SealReport(
        chunk=chunk,
        fill=chunk.caf_size_bytes / context.source_settings.target_size
        if chunk.member_count
        else 0.0,
        seconds=seconds,
        bytes_per_second=record["fetched_bytes"] / seconds if seconds else 0.0,
        skipped=context.ledger.chunks.skipped(name),
        largest=context.ledger.chunks.largest(name, LARGEST_SHOWN),
        resumed_bytes=record.get("resumed_bytes", 0),
        not_resumed=record.get("not_resumed", ""),
    )


def _seal_packed(context: RunContext, lease: Lease, chunk: Chunk) -> Chunk:
    if chunk.state is ChunkState.PACKING:
        _seal(context, lease, chunk, *_packed_or_raise(context, chunk.name))
    remove_packing(context, chunk.name)  # even if a run was killed right after the seal
    return context.ledger.chunks.get(chunk.name)


def _require_admitted(
    context: RunContext,
    lease: Lease,
    chunk: Chunk,
    size_bytes: int,
    *,
    waiting_in: Sequence[ChunkState],
) -> None:
    try:
        context.store.admit(
            stored_size_bytes=size_bytes,
            waiting_bytes=one_copy_bytes(context.ledger, waiting_in, beside={chunk.name}),
        )
    except ChunkTooLarge as error:
        _withdraw(context, lease, chunk, reason=str(error))
        raise ChunkTooLarge(
            f"chunk {chunk.name} is withdrawn: {error}",
            fitting_bytes=error.fitting_bytes,
            hint=f"the next plan has its objects in chunks that fit ({error.fitting_bytes} bytes)",
        ) from error


def one_copy_bytes(
    ledger: Ledger,
    states: Iterable[ChunkState],
    beside: Collection[str] = (),
    *,
    source: str | None = None,
) -> int:
    """Return the size of one copy of a source's or all chunks in these states, without `beside`."""
    chunks = ledger.chunks.list(source, states)
    return sum(
        chunk.stored_size_bytes or chunk.expected_size_bytes
        for chunk in chunks
        if chunk.name not in beside
    )


def _packed_or_raise(context: RunContext, name: str) -> tuple[PackedChunk, Path]:
    finished = read_packed(context, name)
    if finished is None:
        raise StagingError(
            f"the packed file of chunk {name} is missing or damaged",
            hint="run the partition again to pack it",
        )
    return finished


def _seal(
    context: RunContext,
    lease: Lease,
    chunk: Chunk,
    packed: PackedChunk,
    file: Path,
    *,
    opened: OpenedChunk | None = None,
) -> None:
    samples = (
        samples_of(StagedSource(file), packed.stored_size_bytes, packed.merkle_root)
        if packed.member_count
        else []
    )
    seal = replace(packed, samples=samples)
    lease.check()
    if packed.member_count:
        file = give_final_name(context, chunk.name, file)
    source: RangeSource = StagedSource(file)
    if opened:
        source = OpenedSource(source, opened)
    chunk_file = ChunkFile(source, chunk.name)
    account = ChunkAuditor(chunk, chunk_file)
    manifest = chunk_file.manifest()
    skips = _accounted_skips(chunk.name, manifest, seal, account)
    released = account.released() if packed.released_count else ()
    context.ledger.moves.seal(
        lease,
        chunk.name,
        seal,
        skips,
        released,
        rows=manifest.locations,
        part=manifest.part(),
        logs=manifest.logs(),
    )
    if not packed.member_count:
        context.ended(ChunkState.EMPTY)
        remove_unsealed(context, chunk.name)
        context.ledger.staging.release(chunk.name)


def _accounted_skips(
    chunk: str, manifest: OpenedManifest, seal: SealRecord, account: ChunkAuditor
) -> Iterator[Skip]:
    for batch in manifest.batches({*ACCOUNT_COLUMNS, *SKIP_COLUMNS}):
        account.take(batch)
        yield from skips_of(batch)
    result = account.finish(
        members=seal.member_count, skipped=seal.skipped_count, released=seal.released_count
    )
    if not result.agrees:
        raise IntegrityError(
            f"the packed file of chunk {chunk} does not account for its part of the plan: "
            f"{result.explanation}",
            hint="withdraw the chunk; the next plan has its objects",
        )


# --- stored_chunk ---------------------------------------------------------------------------------


def post_file(context: RunContext, name: str) -> Chunk:
    """Post the chunk, which moves it from sealed to posting and posted.

    Raises ChunkTooLarge, after withdrawing the chunk, if no provider takes it.
    """
    with lease_chunk(context, name) as lease:
        chunk = _pack_again_if_lost(
            context, lease, _workable_or_withdrawn(context, lease, name), before_post=True
        )
        chunk = _require_reached(chunk, ChunkState.SEALED)
        if chunk.state in (ChunkState.SEALED, ChunkState.POSTING):
            refuse_unknown(context)
        if chunk.state is ChunkState.SEALED:
            chunk = _with_root_of_type(context, lease, chunk, context.store.proof_type)
            # Chunks that are still packed do not count, or each would wait for the others.
            _require_admitted(
                context, lease, chunk, chunk.stored_size_bytes, waiting_in=[ChunkState.POSTING]
            )
            chunk = _move(context, lease, chunk, ChunkState.POSTING)
        if chunk.state is ChunkState.POSTING:
            return _post(context, lease, chunk)
        return chunk


def _with_root_of_type(context: RunContext, lease: Lease, chunk: Chunk, proof_type: int) -> Chunk:
    if chunk.proof_type == proof_type:
        return chunk
    path = staged_path(context, chunk.name)
    sealed, root = merkle_roots(path, proof_type_of(chunk), proof_type)
    if sealed != chunk.merkle_root:
        raise IntegrityError(
            f"the staged file of chunk {chunk.name} does not match its seal",
            hint="run the partition again to pack it",
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
    """Change the root of a never posted chunk to the store's proof type."""
    if chunk.state is not ChunkState.POSTING or chunk.proof_type == context.store.proof_type:
        return chunk
    if (
        context.store.posted_already(
            to_store(context, lease, chunk), context.ledger.transactions(context.holder)
        )
        is not None
    ):
        return chunk
    refuse_unknown(context)  # the chunk gets another root
    if not staged_has_root(context, chunk):
        if chunk.encrypted:
            return chunk  # its file is lost
        remove_staged(staged_path(context, chunk.name))
        if not repeat_packing(context, lease, chunk):
            return chunk
    return _with_root_of_type(context, lease, chunk, context.store.proof_type)


def _post(context: RunContext, lease: Lease, chunk: Chunk) -> Chunk:
    log = context.ledger.transactions(context.holder)
    try:
        posting = context.store.post(to_store(context, lease, chunk), log)
    except StoredAlready:
        log.end_requests(lease, chunk.name)  # so that no other run's batch is refused for it
        raise
    context.ledger.moves.record_posting(lease, chunk.name, posting)
    return context.ledger.chunks.get(chunk.name)


def upload_chunk(context: RunContext, name: str) -> UploadReport:
    """Upload the chunk, which moves it from posted to uploading."""
    with lease_chunk(context, name) as lease:
        chunk = _require_reached(
            _pack_again_if_lost(context, lease, _require_workable(context, name)), ChunkState.POSTED
        )
        seconds = 0.0
        if chunk.state in (ChunkState.POSTED, ChunkState.UPLOADING):
            chunk = _move(context, lease, chunk, ChunkState.UPLOADING)
            started = time.monotonic()
            put_staged(context, lease, chunk, posting_of(chunk))
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
    """Upload the chunk's staged file; providers in `wrong` get it in any case.

    If providers refuse the file and its root is wrong, it is packed again.
    """
    _require_encrypted_or_public(context, chunk)

    def progress(size_bytes: int) -> None:
        lease.check()
        context.waits.sent(size_bytes)

    try:
        context.store.put(posting, staged_path(context, chunk.name), progress, wrong=wrong)
    except RootRefused as error:
        if staged_has_root(context, chunk):
            hint = "the staged file has the posted root; run the chunk again later"
            raise RootRefused(str(error), hint=hint) from error
        if chunk.encrypted:
            _find_lost_file(context, lease, chunk)
        else:
            remove_staged(staged_path(context, chunk.name))
            _repeat_or_abandon(context, lease, chunk)
        context.store.put(posting, staged_path(context, chunk.name), progress, wrong=wrong)


def verify_stored(context: RunContext, name: str) -> VerifyReport:
    """Move a chunk to verified, once the required copies are listed and return all samples.

    Raises NotProven if there are fewer, or IntegrityError if a copy has other bytes.
    """
    with lease_chunk(context, name) as lease:
        chunk = _require_workable(context, name)
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


def to_store(context: RunContext, lease: Lease, chunk: Chunk) -> ChunkToStore:
    """Return a sealed chunk as a store sees it.

    Raises NotPublic for a plain chunk of a private source.
    """
    _require_encrypted_or_public(context, chunk)
    return _as_store_sees(context, lease, chunk)


def _as_store_sees(context: RunContext, lease: Lease, chunk: Chunk) -> ChunkToStore:
    if chunk.merkle_root is None or chunk.proof_type is None:
        raise CafError(
            f"chunk {chunk.name} is '{chunk.state}' but has no Merkle root",
            hint="withdraw the chunk; the next plan has its objects",
        )
    header = context.ledger.lookup.chunk_header(chunk.merkle_root) if chunk.encrypted else None
    header_sha256, mac = header.sha256 if header else None, None
    key = context.ledger.sources.post_key(chunk.source)
    # A repair must not vouch for a chunk that somebody else may have packed.
    if key and not chunk.from_unknown_post and not chunk.adopted:
        mac = post_mac(
            key,
            archive_id=chunk.archive_id,
            merkle_root=chunk.merkle_root,
            stored_size_bytes=chunk.stored_size_bytes,
            proof_type=chunk.proof_type,
            header_sha256=header_sha256,
        )
    return ChunkToStore(
        name=chunk.name,
        epoch=lease.epoch,
        archive_id=chunk.archive_id,
        header_sha256=header_sha256,
        mac=mac,
        stored_size_bytes=chunk.stored_size_bytes,
        proof_type=chunk.proof_type,
        merkle_root=chunk.merkle_root,
    )


def _require_encrypted_or_public(context: RunContext, chunk: Chunk) -> None:
    if not chunk.encrypted and not context.source_settings.public:
        raise NotPublic(
            f"chunk {chunk.name} is not encrypted, and source {context.source} is not public",
            hint="withdraw the chunk, so that the next plan encrypts its objects, or set "
            "public = true for the source",
        )


def _pack_again_if_lost(
    context: RunContext, lease: Lease, chunk: Chunk, *, before_post: bool = False
) -> Chunk:
    """Pack a chunk again if it needs its staged file, and that is not whole.

    Before the post, it may get other members, and a plain chunk of a private source is encrypted.
    Later, it is abandoned if its objects have changed; an encrypted one goes to `_find_lost_file`.
    """
    chunk = _with_type_set_now(context, lease, chunk)
    is_sealed = chunk.state is ChunkState.SEALED
    needed = (ChunkState.SEALED, ChunkState.POSTING, ChunkState.POSTED, ChunkState.UPLOADING)
    if chunk.state not in needed or _is_usable(context, chunk, before_post=before_post):
        return chunk
    if chunk.encrypted and not is_sealed:
        return _find_lost_file(context, lease, chunk)
    lease.check()
    if is_sealed or chunk.state is ChunkState.POSTING:
        refuse_unknown(context)  # packing may give another root
    remove_staged(staged_path(context, chunk.name))
    if is_sealed:
        chunk = _move(context, lease, chunk, ChunkState.PACKING)
        return _seal_packed(context, lease, _pack(context, lease, chunk))
    if chunk.state is ChunkState.POSTING:
        chunk = _post(context, lease, chunk)
    _repeat_or_abandon(context, lease, chunk)
    return chunk


def _is_usable(context: RunContext, chunk: Chunk, *, before_post: bool) -> bool:
    if not staged_is_whole(context, chunk):
        return False
    if chunk.state is not ChunkState.SEALED:
        return True
    if not chunk.encrypted and not context.source_settings.public:
        return False
    # A post costs money: first read a file that another run packed. Later, providers check it.
    return (
        not before_post
        or packing_run(context, chunk) == context.holder.run
        or staged_has_root(context, chunk)
    )


def _repeat_or_abandon(context: RunContext, lease: Lease, chunk: Chunk) -> None:
    """Abandon a posted chunk whose objects changed, unless another machine may have its file."""
    elsewhere = _staged_elsewhere(context, chunk)
    if repeat_packing(context, lease, chunk):
        path = staged_path(context, chunk.name)
        if chunk.merkle_root is not None and not staged_matches(path, chunk.samples):
            # The file was damaged between packing and seal, and so were the samples.
            samples = samples_of(StagedSource(path), chunk.stored_size_bytes, chunk.merkle_root)
            context.ledger.moves.record_samples(lease, chunk.name, samples)
        return
    if elsewhere:
        context.ledger.staging.reserve(lease, chunk.name, elsewhere.folder, elsewhere.size_bytes, 0)
        raise StoreError(
            f"chunk {chunk.name} was posted, and its objects have changed since; its file is in "
            f"{elsewhere.folder}, but this run's staging folder is {context.staging()}",
            hint="run the chunk on the machine with that folder; if it is lost, run once with "
            "`staging` set to it, which abandons the chunk",
        )
    message = (
        f"chunk {chunk.name} was posted, its staged file is missing or damaged, and its objects "
        "have changed since"
    )
    if chunk.state not in (ChunkState.POSTED, ChunkState.UPLOADING):
        raise StoreError(message, hint="restore the staged file or the old objects")
    _move(context, lease, chunk, ChunkState.ABANDONED)
    context.ledger.staging.release(chunk.name)
    raise StoreError(message, hint="the chunk is abandoned; the next plan has its objects")


def repeat_packing(context: RunContext, lease: Lease, chunk: Chunk) -> bool:
    """Pack a sealed chunk again; return False, without a file, if it gets another root.

    An encrypted chunk always does, a plain one if its objects have changed.
    """
    if chunk.encrypted:
        return False
    packed, _ = pack_or_resume(context, lease, chunk)
    if packed.merkle_root != chunk.merkle_root:
        remove_unsealed(context, chunk.name)
        return False
    give_final_name(context, chunk.name, packed_path(context, chunk.name, lease.epoch))
    remove_packing(context, chunk.name)
    return True


def _find_lost_file(context: RunContext, lease: Lease, chunk: Chunk) -> Chunk:
    """Get an encrypted chunk, which may be posted, back from a provider, or abandon it.

    Signs nothing. Raises StagingError if another staging folder may have the file. Raises
    StoreUnreachable while a possible provider is silent, StoreError if it abandons the chunk.
    """
    if elsewhere := _staged_elsewhere(context, chunk):
        raise StagingError(
            f"chunk {chunk.name} was packed into {elsewhere.folder}, but this run's staging "
            f"folder is {context.staging()}",
            hint="run the chunk on the machine with that folder; if it is lost, run once with "
            "`staging` set to it",
        )
    if chunk.state is ChunkState.POSTING:
        log = context.ledger.transactions(context.holder)
        log.end_requests(lease, chunk.name)
        posting = context.store.posted_already(to_store(context, lease, chunk), log)
        if posting is None:
            return _abandon(context, lease, chunk, "it was not posted")
        context.ledger.moves.record_posting(lease, chunk.name, posting)
        chunk = context.ledger.chunks.get(chunk.name)
    posting = posting_of(chunk)
    is_back, errors = download(
        context, lease, chunk, posting, context.store.possible_holders(posting)
    )
    if is_back:
        return chunk
    reasons = "; ".join(f"{provider}: {error}" for provider, error in errors.items())
    if any(not error.permanent for error in errors.values()):
        raise StoreUnreachable(
            f"the staged file of chunk {chunk.name} is lost, and a provider that may have the "
            f"chunk does not answer ({reasons})",
            hint="run the chunk again later, or restore the file into the staging folder",
        )
    return _abandon(context, lease, chunk, f"no provider has it ({reasons or 'none is listed'})")


def _staged_elsewhere(context: RunContext, chunk: Chunk) -> Reservation | None:
    """Return the reservation in another staging folder, which may have the chunk's file."""
    folder = str(context.staging())
    return next(
        (
            staged
            for staged in context.ledger.staging.list()
            if staged.chunk == chunk.name and staged.folder != folder
        ),
        None,
    )


def _abandon(context: RunContext, lease: Lease, chunk: Chunk, why: str) -> Chunk:
    _move(context, lease, chunk, ChunkState.ABANDONED)
    remove_all(context, chunk.name)
    raise StoreError(
        f"the staged file of encrypted chunk {chunk.name} is lost, and {why}: the chunk is "
        "abandoned",
        hint="the next plan has its objects",
    )


# --- file_locations -------------------------------------------------------------------------------


def load_locations(context: RunContext, name: str) -> Chunk:
    """Make the seal's rows locations, and move the chunk from verified to located."""
    with lease_chunk(context, name) as lease:
        chunk = _require_reached(_require_workable(context, name), ChunkState.VERIFIED)
        if chunk.state is ChunkState.VERIFIED:
            context.ledger.moves.load_locations(lease, name)
            context.ended(ChunkState.LOCATED)
        return context.ledger.chunks.get(name)


def release_staging(context: RunContext, name: str) -> Chunk:
    """Remove a located or empty chunk from staging, unless the store wants it kept."""
    with lease_chunk(context, name):
        chunk = _require_reached(_require_workable(context, name), ChunkState.VERIFIED)
        if chunk.state is ChunkState.LOCATED:
            release_located(context, name)
        elif chunk.state is ChunkState.EMPTY:
            remove_all(context, name)
        return chunk


# --- an operator's turn ---------------------------------------------------------------------------


def park(context: RunContext, name: str, reason: str) -> Chunk:
    """Set a chunk aside; its objects stay claimed."""
    with lease_chunk(context, name, though_paused=True) as lease:
        chunk = context.ledger.chunks.get(name)
        return _move(context, lease, chunk, ChunkState.PARKED, reason=reason)


def unpark(context: RunContext, name: str) -> Chunk:
    """Return a parked chunk to the state that its copy has."""
    with lease_chunk(context, name, though_paused=True) as lease:
        chunk = context.ledger.chunks.get(name)
        context.ledger.moves.move(lease, name, ChunkState.PARKED, unparked_state(chunk.copy_state))
        return context.ledger.chunks.get(name)


def withdraw(context: RunContext, name: str, *, reason: str = "") -> Chunk:
    """Give up a chunk for good; its objects are planned again.

    If a run wanted to post the chunk, the store is asked first. Raises IllegalMove if it was or may
    be posted.
    """
    with lease_chunk(context, name, though_paused=True) as lease:
        return _withdraw(context, lease, context.ledger.chunks.get(name), reason=reason)


def withdraw_all(context: RunContext, names: Collection[str], *, reason: str = "") -> None:
    """Withdraw chunks. Nothing is withdrawn if the store has a post of one, or does not answer."""
    for name in names:
        if context.ledger.chunks.get(name).copy_state is CopyState.POSTING:
            with lease_chunk(context, name, though_paused=True) as lease:
                _require_no_post(context, lease, context.ledger.chunks.get(name))
    for name in names:
        withdraw(context, name, reason=reason)


def correct_address(context: RunContext) -> Sequence[str]:
    """Let a corrected address replace the ledger's, if nothing of the source is or may be stored.

    Withdraws the chunks that were planned under the old address; returns their names. Raises
    HeldByOther if a run works on the source.
    """
    if context.ledger.sources.address(context.source) in (None, context.address):
        return []
    try:
        context.ledger.removal.removable(context.source)
    except IllegalMove:
        return []  # the old address stays, and registering the new one raises
    with context.lease(plan_lease(context.source)) as lease:
        chunks = context.ledger.chunks.list(context.source, states=CLAIMING)
        names = [chunk.name for chunk in chunks]
        withdraw_all(context, names, reason="the address of its source was corrected")
        context.ledger.sources.register(context.source, context.address, lease=lease)
    return names


def _withdraw(context: RunContext, lease: Lease, chunk: Chunk, *, reason: str) -> Chunk:
    _require_no_post(context, lease, chunk)
    chunk = _move(context, lease, chunk, ChunkState.WITHDRAWN, reason=reason)
    remove_all(context, chunk.name)
    return chunk


def _require_no_post(context: RunContext, lease: Lease, chunk: Chunk) -> None:
    """Ask the store about a chunk that a run wanted to post.

    A backup lacks later posts, and a folder's ledger that of a killed run.
    """
    if chunk.copy_state is not CopyState.POSTING or chunk.merkle_root is None:
        return
    log = context.ledger.transactions(context.holder)
    posting = context.store.posted_already(_as_store_sees(context, lease, chunk), log)
    unparks = f"'caf unpark {chunk.name}', then " if chunk.state is ChunkState.PARKED else ""
    hint = f"{unparks}'caf run {chunk.source}' continues it"
    if posting is None:  # a backup may also lack transactions of an earlier wallet
        posting = next((file.posting for file in context.store.posted_as(chunk.merkle_root)), None)
        hint = "if that is an earlier wallet of yours, continue the chunk with it"
    if posting is not None:
        raise IllegalMove(
            f"chunk {chunk.name} cannot be withdrawn: the store has a post of it by "
            f"{posting.owner}, of block {posting.start}",
            hint=hint,
        )


# --- what the steps share -------------------------------------------------------------------------


def open_chunk(context: RunContext, chunk: Chunk) -> ChunkFile:
    """Open a sealed chunk: the staged file if it is whole, else the stored one."""
    path = staged_path(context, chunk.name)
    if path.exists() and path.stat().st_size == chunk.stored_size_bytes:
        return ChunkFile(StagedSource(path), chunk.name)
    return ChunkFile(RemoteSource(context.store, posting_of(chunk)), chunk.name)


def _move(
    context: RunContext, lease: Lease, chunk: Chunk, state: ChunkState, *, reason: str = ""
) -> Chunk:
    context.ledger.moves.move(lease, chunk.name, chunk.state, state, reason=reason)
    return context.ledger.chunks.get(chunk.name)


@contextmanager
def lease_chunk(context: RunContext, name: str, *, though_paused: bool = False) -> Iterator[Lease]:
    """Hold the chunk's lease for an attempt of the run, and wait while paused.

    `though_paused`, it does not wait and is no attempt. An OSError becomes a StagingError.
    """
    attempt = not though_paused
    with context.waits.on(name), context.lease(chunk_lease(name), attempt=attempt) as lease:
        try:
            if not though_paused:
                context.wait_while_paused(lease.check)
            yield lease
        except (OSError, StagingError) as error:
            lease.check()  # after a lost lease, another run may have removed files
            if isinstance(error, StagingError):
                raise
            raise staging_error(
                Path(error.filename or staged_path(context, name)), error
            ) from error


def _workable_or_withdrawn(context: RunContext, lease: Lease, name: str) -> Chunk:
    chunk = _require_workable(context, name)
    if chunk.part_abandoned and chunk.state in (
        ChunkState.PLANNED,
        ChunkState.PACKING,
        ChunkState.SEALED,
    ):
        reason = "another part of its object cannot be archived"
        return _withdraw(context, lease, chunk, reason=reason)
    return chunk


def _require_workable(context: RunContext, name: str) -> Chunk:
    """A withdrawn part passes."""
    chunk = context.ledger.chunks.get(name)
    if chunk.state is ChunkState.PARKED:
        raise CafError(
            f"chunk {name} is parked: {chunk.reason}",
            hint=f"fix the cause, then run 'caf unpark {name}'",
        )
    if chunk.state is ChunkState.DAMAGED:
        raise CafError(
            f"chunk {name} is damaged",
            hint=f"run 'caf repair {chunk.source}' or the source's repair job",
        )
    if chunk.state is ChunkState.WITHDRAWN and chunk.part:
        return chunk
    if chunk.state in (ChunkState.WITHDRAWN, ChunkState.ABANDONED):
        why = f": {chunk.reason}" if chunk.reason else ""
        raise CafError(
            f"chunk {name} is {chunk.state}{why}",
            hint="the next plan has its objects",
        )
    return chunk


def _require_reached(chunk: Chunk, milestone: ChunkState) -> Chunk:
    if chunk.state in CLAIMING and not has_reached(chunk.state, milestone):
        raise CafError(
            f"chunk {chunk.name} is {chunk.state}, and not {milestone} yet",
            hint="run its partition from caf_chunk on",
        )
    return chunk
