"""What stands in the staging folder: names, the record of a finished packing, what is brought back, room, what is kept.

A chunk is `<chunk>.<epoch>.part` while it is packed, `<chunk>.<epoch>.packed` with `<chunk>.packed.json` until it is
sealed, and `<chunk>.caf` from then on: until it is located, and after that for as long as the store wants it and nobody
needs the room.

Not here: writing a chunk (`pack`, `stored_bytes`), reservations (the ledger), when a step needs which file (`archive`).
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from caf_pipeline.durable import sync_folder
from caf_pipeline.errors import CafError, HeldByOther, IntegrityError, NotLocated, StoreError
from caf_pipeline.interfaces import Chunk, Lease, Posting
from caf_pipeline.lifecycle import ChunkState
from caf_pipeline.merkle import MerkleTree
from caf_pipeline.pack import Packed, remove_staged
from caf_pipeline.sampling import staged_matches
from caf_pipeline.stored_bytes import staging_error
from caf_pipeline.workplace import Workplace

_SEALED = ".caf"


def lease_name(name: str) -> str:
    """Return the name of a chunk's lease."""
    return f"chunk/{name}"


def staged_path(work: Workplace, name: str) -> Path:
    """Return where a sealed chunk stands."""
    return work.staging() / f"{name}{_SEALED}"


def staged_is_whole(work: Workplace, chunk: Chunk) -> bool:
    """Tell whether the sealed file is there with its length and samples."""
    path = staged_path(work, chunk.name)
    try:
        return path.stat().st_size == chunk.stored_size_bytes and staged_matches(path, chunk.samples)
    except FileNotFoundError:
        return False


# --- a finished packing --------------------------------------------------------------------------------------------


def write_packed(work: Workplace, name: str, epoch: int, part: Path, packed: Packed) -> None:
    """Make a finished packing durable: first the file under its new name, then the record that points to it."""
    final, record = part.with_name(f"{name}.{epoch}.packed"), _record_path(work, name)
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


def read_record(work: Workplace, name: str) -> dict[str, Any] | None:
    """Return the record of a finished packing as it was written; None where there is none."""
    try:
        described: dict[str, Any] = json.loads(_record_path(work, name).read_bytes())
    except FileNotFoundError:
        return None
    return described


def read_packed(work: Workplace, name: str) -> Packed | None:
    """Return the finished packing of a chunk that is not sealed, if its file is there in full."""
    described = read_record(work, name)
    if described is None:
        return None
    file = work.staging() / described.pop("file")
    if not file.exists() or file.stat().st_size != described["caf_size_bytes"]:
        return None
    return Packed(**(described | {"merkle_root": bytes.fromhex(described["merkle_root"])}))


def give_final_name(work: Workplace, name: str, file: Path) -> Path:
    """Let a whole file stand as the sealed chunk, in place of any that stood there; durable when this returns."""
    path = staged_path(work, name)
    os.replace(file, path)
    sync_folder(path.parent)
    return path


def remove_unsealed(work: Workplace, name: str) -> None:
    """Remove what a packing or a download left; the sealed file stays."""
    staging = work.staging()
    remove_staged(_record_path(work, name))
    for suffix in ("part", "manifest", "packed", "json"):
        remove_staged(*staging.glob(f"{name}.*.{suffix}"))


def remove_all(work: Workplace, name: str) -> None:
    """Remove everything of a chunk and give its reservation back."""
    remove_unsealed(work, name)
    remove_staged(staged_path(work, name))
    work.ledger.release_staging(name)


def _record_path(work: Workplace, name: str) -> Path:
    return work.staging() / f"{name}.packed.json"


# --- back from the store -------------------------------------------------------------------------------------------


def download(
    work: Workplace, lease: Lease, chunk: Chunk, posting: Posting, providers: Iterable[str]
) -> tuple[bool, Sequence[str]]:
    """Bring a stored chunk back as its sealed file, from the first provider whose bytes have its Merkle root.

    Returns whether one had them, and what each of those said that had not. Room is made first.
    """
    remove_unsealed(work, chunk.name)
    make_room(work, chunk.name, chunk.stored_size_bytes)
    said = []
    for provider in providers:
        try:
            _download(work, lease, chunk, posting, provider)
        except (StoreError, IntegrityError) as error:
            said.append(f"{provider}: {error}")
        else:
            return True, said
    return False, said


def _download(work: Workplace, lease: Lease, chunk: Chunk, posting: Posting, provider: str) -> None:
    part = work.staging() / f"{chunk.name}.{lease.epoch}.part"
    tree = MerkleTree(proof_type_of(chunk))
    try:
        with part.open("wb") as file:
            for piece in work.store.read(posting, 0, chunk.stored_size_bytes, provider=provider):
                work.hold(lease.check)
                tree.update(piece)
                file.write(piece)
        if tree.size_bytes != chunk.stored_size_bytes or tree.root() != chunk.merkle_root:
            raise IntegrityError("it gives other bytes than the chunk's Merkle root says")
        give_final_name(work, chunk.name, part)
    finally:
        remove_staged(part)


def proof_type_of(chunk: Chunk) -> int:
    """Return which Merkle tree a sealed chunk's root is of."""
    if chunk.proof_type is None:
        raise CafError(f"chunk {chunk.name} is '{chunk.state}' and was not sealed")
    return chunk.proof_type


# --- what is kept, and room ----------------------------------------------------------------------------------------


def let_go(work: Workplace, name: str) -> None:
    """End a located chunk's business in staging: its reservation at once, its sealed file when the store's hold is over."""
    if work.store.staging_hold_seconds() > 0:
        remove_unsealed(work, name)
        work.ledger.release_staging(name)
    else:
        remove_all(work, name)


def make_room(work: Workplace, name: str, size_bytes: int) -> None:
    """Remove kept files, that of the chunk located first before the others, until this many bytes fit or none is left.

    What then still does not fit is for the reservation, or the disk itself, to refuse.
    """
    if _has_room(work, name, size_bytes):
        return
    for kept in _kept(work):
        if kept.name != name and _remove_kept(work, kept.name) and _has_room(work, name, size_bytes):
            return


def sweep(work: Workplace) -> Iterator[str]:
    """Remove the kept files whose hold is over; yield the names of their chunks."""
    hold = timedelta(seconds=work.store.staging_hold_seconds())
    now = datetime.now(UTC)
    for kept in _kept(work):
        if _located_at(kept) + hold <= now and _remove_kept(work, kept.name):
            yield kept.name


def _kept(work: Workplace) -> list[Chunk]:
    """Return the chunks of any source that are located and still have a sealed file here, the one located first before."""
    kept = []
    for path in work.staging().glob(f"*{_SEALED}"):
        try:
            chunk = work.ledger.chunk(path.name.removesuffix(_SEALED))
        except NotLocated:  # not ours: another ledger's, or put there by hand
            continue
        if chunk.state is ChunkState.LOCATED:
            kept.append(chunk)
    return sorted(kept, key=_located_at)


def _located_at(chunk: Chunk) -> datetime:
    return chunk.located_at or chunk.updated_at


def _remove_kept(work: Workplace, name: str) -> bool:
    """Remove a kept file, unless a run works with it."""
    try:
        with work.ledger.lease(lease_name(name), work.holder):
            if work.ledger.chunk(name).state is not ChunkState.LOCATED:
                return False
            remove_staged(staged_path(work, name))
            return True
    except HeldByOther:
        return False


def _has_room(work: Workplace, name: str, size_bytes: int) -> bool:
    """Tell whether the disk and the limit have this many bytes for the chunk, beside all that stands there of others."""
    staging = work.staging()
    disk = os.statvfs(staging)
    if disk.f_bavail * disk.f_frsize < size_bytes:
        return False
    limit_bytes = work.settings.packing.staging_limit
    if not limit_bytes:
        return True
    others = sum(_size(path) for path in staging.iterdir() if not path.name.startswith(f"{name}."))
    return others + size_bytes <= limit_bytes


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # another run has just removed it
        return 0
