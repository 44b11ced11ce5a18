"""The steps of one chunk, from its plan to its location rows.

    load_batch → pack_chunk → seal_chunk → post_file → upload_chunk → verify_stored → load_locations → release_staging

Each step takes the chunk's lease, looks at the ledger, does what is not yet done, and moves the chunk. Each may be run
again at any time, also after a crash in its middle: what is done already is left as it is.
In staging a chunk is `<chunk>.<epoch>.part` while it is packed, `<chunk>.<epoch>.packed` with `<chunk>.packed.json` until
it is sealed, and `<chunk>.caf` from then on.

Not here: cutting plans (`planning`), bodies (`pack`), checks of what was done (`accounts`), Dagster (`defs`).
"""

import hashlib
import heapq
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from caf_pipeline.chunk_file import ChunkFile, StagedSource, StoredSource
from caf_pipeline.durable import sync_folder
from caf_pipeline.errors import CafError, IntegrityError, ObjectReadFailed, StagingError, StoredChunkMissing, StoreError
from caf_pipeline.interfaces import Chunk, ChunkToStore, Copy, Lease, LocationRow, Posting, Sample, Seal, Skip
from caf_pipeline.inventory import SkipReason, object_version
from caf_pipeline.lifecycle import ChunkState, has_reached
from caf_pipeline.manifest import ChunkIdentity
from caf_pipeline.pack import Packed, Packer, remove_staged
from caf_pipeline.plan import PlannedObject, read_chunk_objects, read_chunk_plan, read_terms
from caf_pipeline.stored_bytes import staging_error
from caf_pipeline.workplace import Workplace

SAMPLE_COUNT: Final = 16
"""Read-back samples of a chunk: its first and last bytes and 14 places between, about 1 MiB in all."""

SAMPLE_BYTES: Final = 64 * 1024

LARGEST_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class SealReport:
    """A sealed (or empty) chunk. `fill` is its size over the source's target; rates in bytes a second of packing."""

    chunk: Chunk
    fill: float
    seconds: float
    bytes_per_second: float
    skipped: Mapping[SkipReason, int]
    largest: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class UploadReport:
    """An uploaded chunk; 0 seconds where it was there already."""

    chunk: Chunk
    seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A verified chunk, who has it, and how many samples were compared with each."""

    chunk: Chunk
    copies: Sequence[Copy]
    samples: int


# --- caf_chunk -----------------------------------------------------------------------------------------------------


def load_batch(work: Workplace, name: str) -> Chunk:
    """Take the chunk's part of the plan: planned → packing, after the plan's files were found to hold what was claimed."""
    with _working_on(work, name) as lease:
        chunk = _workable(work, name)
        if chunk.state not in (ChunkState.PLANNED, ChunkState.PACKING):
            return chunk
        planned = sum(1 for _ in read_chunk_objects(Path(chunk.plan_folder), chunk.number))
        if planned != chunk.object_count:
            raise CafError(
                f"the plan of chunk {name} lists {planned} objects, the ledger {chunk.object_count}",
                hint=f"the folder {chunk.plan_folder} is not the one that was written; restore it or withdraw the chunk",
            )
        work.ledger.move(lease, name, chunk.state, ChunkState.PACKING)
        return work.ledger.chunk(name)


def pack_chunk(work: Workplace, name: str) -> Chunk:
    """Pack the chunk into a staged file, unless that is done; what was lost from staging since is packed again."""
    with _working_on(work, name) as lease:
        chunk = _workable(work, name)
        if chunk.state is ChunkState.PLANNED:
            raise CafError(f"chunk {name} was not loaded yet", hint="run the partition from its first step")
        if chunk.state is ChunkState.PACKING and _read_packed(work, name) is None:
            _pack(work, lease, chunk)
        return _restored(work, lease, chunk)


def seal_chunk(work: Workplace, name: str) -> SealReport:
    """Check the packed file, take its samples, give it its final name: packing → sealed, or → empty."""
    with _working_on(work, name) as lease:
        chunk = _workable(work, name)
        if chunk.state is ChunkState.PACKING:
            packed = _read_packed(work, name) or _pack(work, lease, chunk)
            _seal(work, lease, chunk, packed)
        return _seal_report(work, work.ledger.chunk(name))


def _pack(work: Workplace, lease: Lease, chunk: Chunk) -> Packed:
    """Pack into files of this lease's epoch, so that a run that lost its lease cannot write into them."""
    folder, staging = Path(chunk.plan_folder), work.staging()
    plan = read_chunk_plan(folder, chunk.number)
    limit_bytes = max(work.source_settings.target_size, plan.expected_size_bytes)
    _remove_unsealed(staging, chunk.name)
    packing = work.settings.packing
    work.ledger.reserve_staging(lease, chunk.name, str(staging), plan.expected_size_bytes, packing.staging_limit)
    part, spool = staging / f"{chunk.name}.{lease.epoch}.part", staging / f"{chunk.name}.{lease.epoch}.manifest"
    packer = Packer(
        plan,
        _identity(chunk, folder),
        work.objects,
        packing,
        proof_type=work.store.proof_type,
        limit_bytes=limit_bytes,
        give_up_on=lambda planned, error: _give_up_on(work, chunk, planned, error),
        progress=work.progress,
    )
    try:
        packed = packer.pack(read_chunk_objects(folder, chunk.number), part, spool)
        lease.check()
        _write_packed(work, chunk.name, lease.epoch, part, packed)
    except BaseException:
        remove_staged(part)
        work.ledger.release_staging(chunk.name)
        raise
    finally:
        remove_staged(spool)
    return packed


def _identity(chunk: Chunk, folder: Path) -> ChunkIdentity:
    terms = read_terms(folder)
    return ChunkIdentity(
        archive_id=terms["archive"],
        source=terms["source"],
        chunk=chunk.name,
        plan=chunk.plan,
        snapshot=terms["snapshot"],
        inventory_time=datetime.fromisoformat(terms["inventory_time"]),
    )


def _give_up_on(work: Workplace, chunk: Chunk, planned: PlannedObject, error: ObjectReadFailed) -> bool:
    """Count a run that failed on this object; True once enough of them did. A source that is down counts for nothing."""
    next(iter(work.objects.list_pages(max_pages=1)), None)
    obj = planned.object
    failures = work.ledger.count_read_failure(chunk.name, obj.key.decode(), obj.object_version, work.holder.run)
    return failures >= work.settings.packing.unreadable_after


def _packed_path(work: Workplace, name: str) -> Path:
    return work.staging() / f"{name}.packed.json"


def _write_packed(work: Workplace, name: str, epoch: int, part: Path, packed: Packed) -> None:
    """Make a finished packing durable: first the file under its new name, then the record that points to it."""
    final, record = part.with_name(f"{name}.{epoch}.packed"), _packed_path(work, name)
    described = asdict(packed) | {"merkle_root": packed.merkle_root.hex(), "file": final.name}
    temporary = record.with_name(f"{name}.{epoch}.json")
    try:
        os.replace(part, final)
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(described, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, record)
        sync_folder(record.parent)
    except OSError as error:
        remove_staged(final, temporary)
        raise staging_error(final, error) from error


def _read_record(work: Workplace, name: str) -> dict[str, Any] | None:
    try:
        described: dict[str, Any] = json.loads(_packed_path(work, name).read_bytes())
    except FileNotFoundError:
        return None
    return described


def _read_packed(work: Workplace, name: str) -> Packed | None:
    """Return the finished packing of a chunk that is not sealed, if its file is there in full."""
    described = _read_record(work, name)
    if described is None:
        return None
    file = work.staging() / described.pop("file")
    if not file.exists() or file.stat().st_size != described["caf_size_bytes"]:
        return None
    return Packed(**(described | {"merkle_root": bytes.fromhex(described["merkle_root"])}))


def _seal(work: Workplace, lease: Lease, chunk: Chunk, packed: Packed) -> None:
    staging, record = work.staging(), _read_record(work, chunk.name)
    if record is None:
        raise StagingError(f"the packed file of chunk {chunk.name} is gone", hint="run the partition again: it is packed anew")
    file = staging / record["file"]
    chunk_file = ChunkFile(StagedSource(file), file.name)
    samples = _take_samples(file, packed) if packed.member_count else []
    seal = Seal(
        caf_size_bytes=packed.caf_size_bytes,
        stored_size_bytes=packed.caf_size_bytes,
        member_count=packed.member_count,
        member_bytes=packed.member_bytes,
        skipped_count=packed.skipped_count,
        released_count=packed.released_count,
        merkle_root=packed.merkle_root,
        proof_type=work.store.proof_type,
        samples=samples,
    )
    lease.check()
    if packed.member_count:
        os.replace(file, staged_path(work, chunk.name))
        sync_folder(staging)
        chunk_file = ChunkFile(StagedSource(staged_path(work, chunk.name)), chunk.name)
    work.ledger.seal(lease, chunk.name, seal, _skips(chunk_file), _released(chunk, packed))
    if not packed.member_count:
        _remove_unsealed(staging, chunk.name)
        work.ledger.release_staging(chunk.name)


def _take_samples(file: Path, packed: Packed) -> list[Sample]:
    """Read the samples from the staged file. Their places are a function of the root, so that a new seal takes the same."""
    size_bytes = packed.caf_size_bytes
    length = min(SAMPLE_BYTES, size_bytes)
    offsets = {0, size_bytes - length}
    for number in range(SAMPLE_COUNT - len(offsets)):
        seed = hashlib.sha256(packed.merkle_root + number.to_bytes(4, "big")).digest()
        offsets.add(int.from_bytes(seed[:8], "big") % (size_bytes - length + 1))
    source = StagedSource(file)
    return [Sample(offset, length, hashlib.sha256(source.read(offset, offset + length)).digest()) for offset in sorted(offsets)]


def _skips(chunk_file: ChunkFile) -> Iterator[Skip]:
    columns = ("key", "version_id", "etag", "size_bytes", "skip_reason", "skip_detail")
    for row in chunk_file.manifest_rows(columns):
        if row["skip_reason"] is not None:
            version = object_version(row["version_id"], row["etag"], row["size_bytes"])
            reason = SkipReason(row["skip_reason"])
            yield Skip(row["key"], version, reason, row["skip_detail"], row["etag"], row["size_bytes"])


def _released(chunk: Chunk, packed: Packed) -> Iterator[tuple[str, str]]:
    """Yield the end of the chunk's plan, from the first object that did not fit."""
    done = packed.member_count + packed.skipped_count
    for number, planned in enumerate(read_chunk_objects(Path(chunk.plan_folder), chunk.number)):
        if number >= done:
            yield planned.object.key.decode(), planned.object.object_version


def _seal_report(work: Workplace, chunk: Chunk) -> SealReport:
    record = _read_record(work, chunk.name) or {"seconds": 0.0, "fetched_bytes": 0}
    largest: list[tuple[int, str]] = []
    skipped: Counter[SkipReason] = Counter()
    if has_reached(chunk.state, ChunkState.SEALED):
        for row in open_chunk(work, chunk).manifest_rows(("key", "size_bytes", "skip_reason")):
            if row["skip_reason"] is not None:
                skipped[SkipReason(row["skip_reason"])] += 1
            elif len(largest) < LARGEST_SHOWN:
                heapq.heappush(largest, (row["size_bytes"], row["key"]))
            else:
                heapq.heappushpop(largest, (row["size_bytes"], row["key"]))
    seconds = float(record["seconds"])
    return SealReport(
        chunk=chunk,
        fill=chunk.caf_size_bytes / work.source_settings.target_size if chunk.member_count else 0.0,
        seconds=seconds,
        bytes_per_second=record["fetched_bytes"] / seconds if seconds else 0.0,
        skipped=skipped,
        largest=[(key, size_bytes) for size_bytes, key in sorted(largest, reverse=True)],
    )


# --- jackal_chunk --------------------------------------------------------------------------------------------------


def post_file(work: Workplace, name: str) -> Chunk:
    """Announce the chunk to the store: sealed → posting → posted."""
    with _working_on(work, name) as lease:
        chunk = _restored(work, lease, _workable(work, name))
        if chunk.state is ChunkState.SEALED:
            work.ledger.move(lease, name, ChunkState.SEALED, ChunkState.POSTING)
            chunk = work.ledger.chunk(name)
        if chunk.state is ChunkState.POSTING:
            return _post(work, lease, chunk)
        return chunk


def _post(work: Workplace, lease: Lease, chunk: Chunk) -> Chunk:
    posting = work.store.post(_to_store(work, chunk), work.ledger.transactions(chunk.name))
    work.ledger.record_posting(lease, chunk.name, posting)
    return work.ledger.chunk(chunk.name)


def upload_chunk(work: Workplace, name: str) -> UploadReport:
    """Bring the stored bytes to the store: posted → uploading."""
    with _working_on(work, name) as lease:
        chunk = _restored(work, lease, _workable(work, name))
        seconds = 0.0
        if chunk.state in (ChunkState.POSTED, ChunkState.UPLOADING):
            work.ledger.move(lease, name, chunk.state, ChunkState.UPLOADING)
            started = time.monotonic()
            work.store.put(posting_of(chunk), staged_path(work, name), lambda _: lease.check())
            seconds = time.monotonic() - started
        chunk = work.ledger.chunk(name)
        return UploadReport(chunk, seconds, chunk.stored_size_bytes / seconds if seconds else 0.0)


def verify_stored(work: Workplace, name: str) -> VerifyReport:
    """Believe the store only now: enough copies, and each gives the samples back: uploading → verified.

    Raises:
        StoredChunkMissing: fewer copies than required. IntegrityError: a copy gives other bytes.
    """
    with _working_on(work, name) as lease:
        chunk = _workable(work, name)
        if chunk.state is ChunkState.EMPTY:
            return VerifyReport(chunk, [], 0)
        copies = work.store.copies(posting_of(chunk))
        if chunk.state is ChunkState.UPLOADING:
            if len(copies) < work.store.required_copies:
                raise StoredChunkMissing(
                    f"chunk {name} has {len(copies)} of {work.store.required_copies} copies",
                    hint="run the partition again: it is uploaded to whoever does not have it",
                )
            for copy in copies:
                compare_samples(work, chunk, copy)
            work.ledger.record_copies(lease, name, copies)
        return VerifyReport(work.ledger.chunk(name), copies, len(chunk.samples))


def compare_samples(work: Workplace, chunk: Chunk, copy: Copy) -> None:
    """Read the chunk's samples from one copy; raise IntegrityError for the first that differs."""
    for sample in chunk.samples:
        end = sample.offset + sample.length
        read = b"".join(work.store.read(posting_of(chunk), sample.offset, end, provider=copy.provider))
        if hashlib.sha256(read).digest() != sample.sha256:
            raise IntegrityError(
                f"chunk {chunk.name} differs at bytes {sample.offset} to {end} of the copy at {copy.provider}",
                hint="do not use that copy; run the partition again to upload it anew",
            )


def _to_store(work: Workplace, chunk: Chunk) -> ChunkToStore:
    if chunk.merkle_root is None or chunk.proof_type is None:
        raise CafError(f"chunk {chunk.name} is '{chunk.state}' but has no Merkle root", hint="withdraw it; it is planned again")
    return ChunkToStore(
        name=chunk.name,
        archive_id=chunk.archive_id,
        public=work.source_settings.public,
        stored_size_bytes=chunk.stored_size_bytes,
        proof_type=chunk.proof_type,
        merkle_root=chunk.merkle_root,
    )


def _staged_is_whole(work: Workplace, chunk: Chunk) -> bool:
    """Tell whether the sealed file is there with its length and samples."""
    path = staged_path(work, chunk.name)
    try:
        if path.stat().st_size != chunk.stored_size_bytes:
            return False
        source = StagedSource(path)
        return all(
            hashlib.sha256(source.read(sample.offset, sample.offset + sample.length)).digest() == sample.sha256
            for sample in chunk.samples
        )
    except FileNotFoundError:
        return False


def _restored(work: Workplace, lease: Lease, chunk: Chunk) -> Chunk:
    """Return the chunk with its staged file whole, where the file is still needed; what was lost is packed again.

    Before the post it may come out with other members. After it a plain chunk repeats itself, unless the source has
    changed; then it cannot be completed, and is abandoned.
    """
    needed = (ChunkState.SEALED, ChunkState.POSTING, ChunkState.POSTED, ChunkState.UPLOADING)
    if chunk.state not in needed or _staged_is_whole(work, chunk):
        return chunk
    remove_staged(staged_path(work, chunk.name))
    if chunk.state is ChunkState.SEALED:
        work.ledger.move(lease, chunk.name, ChunkState.SEALED, ChunkState.PACKING)
        _seal(work, lease, chunk, _pack(work, lease, chunk))
        return work.ledger.chunk(chunk.name)
    if chunk.state is ChunkState.POSTING:
        chunk = _post(work, lease, chunk)
    packed = _pack(work, lease, chunk)
    record = _read_record(work, chunk.name)
    if packed.merkle_root != chunk.merkle_root or record is None:
        _remove_unsealed(work.staging(), chunk.name)
        work.ledger.move(lease, chunk.name, chunk.state, ChunkState.ABANDONED)
        work.ledger.release_staging(chunk.name)
        raise StoreError(
            f"chunk {chunk.name} was posted, its staged file is gone, and its objects have changed since",
            hint="it is abandoned; its objects are planned again by the next plan",
        )
    os.replace(work.staging() / record["file"], staged_path(work, chunk.name))
    sync_folder(work.staging())
    return chunk


# --- file_locations ------------------------------------------------------------------------------------------------


def load_locations(work: Workplace, name: str) -> Chunk:
    """Write one location row for each object: verified → located."""
    with _working_on(work, name) as lease:
        chunk = _workable(work, name)
        if chunk.state is ChunkState.VERIFIED:
            work.ledger.load_locations(lease, name, _location_rows(open_chunk(work, chunk)))
        return work.ledger.chunk(name)


def _location_rows(chunk_file: ChunkFile) -> Iterator[LocationRow]:
    columns = ("key", "version_id", "etag", "size_bytes", "start_byte", "end_byte", "sha256", "last_modified", "skip_reason")
    for row in chunk_file.manifest_rows(columns):
        if row["skip_reason"] is None:
            yield LocationRow(
                key=row["key"],
                object_version=object_version(row["version_id"], row["etag"], row["size_bytes"]),
                version_id=row["version_id"],
                start_byte=row["start_byte"],
                end_byte=row["end_byte"],
                etag=row["etag"],
                last_modified=row["last_modified"],
                sha256=row["sha256"],
            )


def release_staging(work: Workplace, name: str) -> Chunk:
    """Remove what a located or empty chunk still has in staging."""
    with _working_on(work, name):
        chunk = _workable(work, name)
        if chunk.state in (ChunkState.LOCATED, ChunkState.EMPTY):
            _remove_unsealed(work.staging(), name)
            remove_staged(staged_path(work, name))
            work.ledger.release_staging(name)
        return chunk


# --- an operator's turn --------------------------------------------------------------------------------------------


def park(work: Workplace, name: str, reason: str) -> Chunk:
    """Give a chunk up until an operator looks at it; its objects stay claimed."""
    with _working_on(work, name) as lease:
        chunk = work.ledger.chunk(name)
        work.ledger.move(lease, name, chunk.state, ChunkState.PARKED, reason=reason)
        return work.ledger.chunk(name)


def unpark(work: Workplace, name: str) -> Chunk:
    """Let runs work on a parked chunk again, from the last state that its row proves."""
    with _working_on(work, name) as lease:
        chunk = work.ledger.chunk(name)
        if chunk.start is not None:
            after = ChunkState.POSTED
        elif chunk.merkle_root is not None:
            after = ChunkState.POSTING  # whether a post was sent is the store's to find out
        else:
            after = ChunkState.PLANNED
        work.ledger.move(lease, name, ChunkState.PARKED, after)
        return work.ledger.chunk(name)


def withdraw(work: Workplace, name: str) -> Chunk:
    """Give a chunk up for good, before it is posted; its objects are planned again."""
    with _working_on(work, name) as lease:
        chunk = work.ledger.chunk(name)
        work.ledger.move(lease, name, chunk.state, ChunkState.WITHDRAWN)
        _remove_unsealed(work.staging(), name)
        remove_staged(staged_path(work, name))
        work.ledger.release_staging(name)
        return work.ledger.chunk(name)


# --- what the steps share ------------------------------------------------------------------------------------------


def lease_name(name: str) -> str:
    """Return the name of a chunk's lease."""
    return f"chunk/{name}"


def staged_path(work: Workplace, name: str) -> Path:
    """Return where a sealed chunk stands."""
    return work.staging() / f"{name}.caf"


def posting_of(chunk: Chunk) -> Posting:
    """Return where the store keeps a posted chunk."""
    if chunk.merkle_root is None or chunk.owner is None or chunk.start is None:
        raise StoredChunkMissing(f"chunk {chunk.name} is '{chunk.state}' and was not posted")
    return Posting(chunk.merkle_root, chunk.owner, chunk.start, chunk.stored_size_bytes)


def open_chunk(work: Workplace, chunk: Chunk) -> ChunkFile:
    """Open a chunk that is sealed or further: the staged file where it is whole, else the stored one by range reads."""
    path = staged_path(work, chunk.name)
    if path.exists() and path.stat().st_size == chunk.stored_size_bytes:
        return ChunkFile(StagedSource(path), chunk.name)
    return ChunkFile(StoredSource(work.store, posting_of(chunk)), chunk.name)


@contextmanager
def _working_on(work: Workplace, name: str) -> Iterator[Lease]:
    """Hold the chunk's lease for a step. What the operating system refuses in a step, it refuses in staging."""
    with work.ledger.lease(lease_name(name), work.holder) as lease:
        try:
            yield lease
        except OSError as error:
            raise staging_error(Path(error.filename or staged_path(work, name)), error) from error


def _workable(work: Workplace, name: str) -> Chunk:
    """Return the chunk's row, unless no run has any business with it."""
    chunk = work.ledger.chunk(name)
    if chunk.state is ChunkState.PARKED:
        raise CafError(f"chunk {name} is parked: {chunk.parked_reason}", hint=f"mend the cause, then 'caf unpark {name}'")
    if chunk.state in (ChunkState.WITHDRAWN, ChunkState.ABANDONED):
        raise CafError(f"chunk {name} is {chunk.state}", hint="its objects are planned again by the next plan")
    return chunk


def _remove_unsealed(staging: Path, name: str) -> None:
    """Remove what a packing left; the sealed file stays."""
    remove_staged(staging / f"{name}.packed.json")
    for suffix in ("part", "manifest", "packed", "json"):
        remove_staged(*staging.glob(f"{name}.*.{suffix}"))
