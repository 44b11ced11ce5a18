"""The staging folder: names, the record of a finished packing, what is brought back, room, what is
kept.

    <chunk>.<epoch>.part        the chunk while it is packed; locked by who writes it        } both
    outlive a kill and a <chunk>.<epoch>.journal     what of the part is safe (`journal/`)
    } failed run, to be resumed <chunk>.<epoch>.copy        what is safe of a part whose writer
    still lives, while it is copied to become this epoch's part <chunk>.<epoch>.manifest    the
    manifest while it is written; of no use to another run <chunk>.<epoch>.packed      the whole
    chunk until it is sealed, and <chunk>.packed.json         the record that points to it; written
    as <chunk>.<epoch>.json <chunk>.<epoch>.download    a stored chunk on its way back <chunk>.caf
    the sealed chunk: until it is located, and after that for as long as the store wants it
                                and the room is not needed

The epoch is that of the lease under which a file was made or taken over, so that a run which lost
its lease and does not know it yet can neither write into another's file nor remove it. A sealed
chunk has neither part nor journal.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

from caf_pipeline.caf.merkle import MerkleTree, merkle_root, type_of_root
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import CafError, HeldByOther, IntegrityError, NotLocated, StoreError
from caf_pipeline.ledger.records import Chunk, chunk_lease
from caf_pipeline.packing.packer import PackedChunk, remove_staged
from caf_pipeline.packing.samples import staged_matches
from caf_pipeline.packing.sink import staging_error
from caf_pipeline.run_context import RunContext
from caf_pipeline.store.protocol import Lease, PostRecord
from caf_pipeline.system.atomic_files import WholeFile, rename_durably

_SEALED: Final = ".caf"
_CHECK: Final = "check"
_PIECE_BYTES: Final = 1 << 20

StagedKind = Literal[
    "part",
    "journal",
    "copy",
    "manifest",
    "packed",
    "json",
    "download",
    "record",
    "sealed",
    "foreign",
]

_OF_AN_EPOCH: Final = ("part", "journal", "copy", "manifest", "packed", "json", "download")
_NAMES: Final = re.compile(
    rf"(?P<chunk>[a-z0-9-]{{1,50}})\.(?:(?P<epoch>[0-9]{{1,19}})\.(?P<kind>{'|'.join(_OF_AN_EPOCH)})"
    r"|(?P<record>packed\.json)|(?P<sealed>caf))"
)


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One file of the staging folder.

    `chunk` is "" for a foreign one; `epoch` is None where the name has none.
    """

    path: Path
    kind: StagedKind
    chunk: str
    epoch: int | None
    size_bytes: int


def leftovers(context: RunContext, chunk: str | None = None) -> Sequence[StagedFile]:
    """Return every file of the run context's staging folder, or those of one chunk: see
    `files_in`.
    """
    return files_in(context.staging(), chunk)


def files_in(folder: Path, chunk: str | None = None) -> Sequence[StagedFile]:
    """Return every file of a staging folder, or those of one chunk, by name; what has no name of
    ours is "foreign".

    A file that is removed meanwhile is left out. Folders are foreign, and of size 0.
    """
    found = []
    for path in sorted(folder.iterdir()):
        is_folder = path.is_dir() and not path.is_symlink()
        named = None if is_folder else _NAMES.fullmatch(path.name)
        if chunk is not None and (named is None or named["chunk"] != chunk):
            continue
        try:
            size_bytes = 0 if is_folder else path.lstat().st_size
        except FileNotFoundError:  # another run has just removed it
            continue
        if named is None:
            found.append(StagedFile(path, "foreign", "", None, size_bytes))
        elif named["epoch"]:
            kind: StagedKind = named["kind"]  # type: ignore[assignment]  # the pattern names them
            found.append(StagedFile(path, kind, named["chunk"], int(named["epoch"]), size_bytes))
        else:
            found.append(
                StagedFile(
                    path,
                    "sealed" if named["sealed"] else "record",
                    named["chunk"],
                    None,
                    size_bytes,
                )
            )
    return found


def staged_path(context: RunContext, name: str) -> Path:
    """Return the path of a sealed chunk."""
    return context.staging() / f"{name}{_SEALED}"


def staged_is_whole(context: RunContext, chunk: Chunk) -> bool:
    """Tell whether the sealed file is there with its length and samples."""
    path = staged_path(context, chunk.name)
    try:
        return path.stat().st_size == chunk.stored_size_bytes and staged_matches(
            path, chunk.samples
        )
    except FileNotFoundError:
        return False


# --- a finished packing
# ------------------------------------------------------------------------------------------


def write_packed(
    context: RunContext, name: str, epoch: int, part: Path, packed: PackedChunk
) -> None:
    """Make a finished packing durable: first the file under its new name, then the record that
    points to it.
    """
    final, record = part.with_name(f"{name}.{epoch}.packed"), _record_path(context, name)
    described = {
        name: value for name, value in asdict(packed).items() if name not in _NOT_RECORDED
    } | {
        "merkle_root": packed.merkle_root.hex(),
        "tail_sha256": packed.tail_sha256.hex(),
        "file": final.name,
        "run": context.holder.run,
    }
    try:
        os.replace(part, final)
        with WholeFile(record, record.with_name(f"{name}.{epoch}.json")) as whole:
            whole.file.write(json.dumps(described | {_CHECK: _check_of(described)}).encode())
    except OSError as error:
        raise staging_error(final, error) from error


def read_record(context: RunContext, name: str) -> dict[str, Any] | None:
    """Return the record of a finished packing as it was written; None where there is none, or only
    a damaged one.
    """
    try:
        described = json.loads(_record_path(context, name).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(described, dict) or described.pop(_CHECK, "") != _check_of(described):
        return None
    return (
        described if described.keys() == {*_RECORDED, "file", "run"} else None
    )  # another version's


_NOT_RECORDED: Final = {"stored_size_bytes", "proof_type", "samples"}
"""Fields of `PackedChunk` that follow from the others, or are known only when the chunk is
sealed.
"""

_RECORDED: Final = {field.name for field in fields(PackedChunk)} - _NOT_RECORDED


def _check_of(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def read_packed(context: RunContext, name: str) -> tuple[PackedChunk, Path] | None:
    """Return the finished packing of a chunk that is not sealed, and its file, if that is there in
    full.

    Its manifest and index are what was written; the rest of its bytes is not looked at.
    """
    record = read_record(context, name)
    if record is None:
        return None
    packed = _packed_of(record)
    # Under its final name already, where a run was killed while it sealed.
    for file in (context.staging() / record["file"], staged_path(context, name)):
        if (
            file.exists()
            and file.stat().st_size == packed.caf_size_bytes
            and _has_tail(file, packed)
        ):
            return packed, file
    return None


def _packed_of(record: Mapping[str, Any]) -> PackedChunk:
    root = bytes.fromhex(record["merkle_root"])
    told = {name: record[name] for name in _RECORDED} | {
        "merkle_root": root,
        "tail_sha256": bytes.fromhex(record["tail_sha256"]),
        "stored_size_bytes": record["caf_size_bytes"],
        "proof_type": type_of_root(root),  # of the packing: the setting may have changed since
        "samples": (),
    }
    return PackedChunk(**told)


def _has_tail(file: Path, packed: PackedChunk) -> bool:
    """Tell whether manifest, index and footer are still what they were before they went to the
    disk.
    """
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        stream.seek(packed.tail_start)
        while piece := stream.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.digest() == packed.tail_sha256


def was_packed_by(context: RunContext, chunk: Chunk) -> str:
    """Return the run that packed the chunk that is in staging; "" where that is not known."""
    record = read_record(context, chunk.name)
    if record is None or bytes.fromhex(record["merkle_root"]) != chunk.merkle_root:
        return ""
    return str(record["run"])


def staged_has_root(context: RunContext, chunk: Chunk) -> bool:
    """Tell whether the sealed file is there with its length and Merkle root: all of it is read, at
    some 500 MiB/s.
    """
    path = staged_path(context, chunk.name)
    try:
        return (
            path.stat().st_size == chunk.stored_size_bytes
            and merkle_root(path, proof_type_of(chunk)) == chunk.merkle_root
        )
    except FileNotFoundError:
        return False


def give_final_name(context: RunContext, name: str, file: Path) -> Path:
    """Give a whole file the name of the sealed chunk, in place of any file of that name; durable
    when this returns.
    """
    path = staged_path(context, name)
    rename_durably(file, path)
    return path


def remove_packing(context: RunContext, name: str) -> None:
    """Remove what is of use only until the chunk is sealed; the record stays with the sealed
    file.
    """
    remove_staged(
        *(file.path for file in leftovers(context, name) if file.kind not in ("sealed", "record"))
    )


def remove_unsealed(context: RunContext, name: str) -> None:
    """Remove what a packing or a download left; the sealed file stays."""
    remove_staged(_record_path(context, name))
    remove_packing(context, name)


def remove_all(context: RunContext, name: str) -> None:
    """Remove everything of a chunk and give its reservation back."""
    remove_unsealed(context, name)
    remove_staged(staged_path(context, name))
    context.ledger.staging.release(name)


def _record_path(context: RunContext, name: str) -> Path:
    return context.staging() / f"{name}.packed.json"


# --- back from the store
# ------------------------------------------------------------------------------------------


def download(
    context: RunContext, lease: Lease, chunk: Chunk, posting: PostRecord, providers: Iterable[str]
) -> tuple[bool, Sequence[str]]:
    """Bring a stored chunk back as its sealed file, from the first provider whose bytes have its
    Merkle root.

    Returns whether one had them, and what each of those said that had not. Room is made first.
    """
    remove_staged(
        *(
            file.path
            for file in leftovers(context, chunk.name)
            if file.kind in ("download", "record")
        )
    )
    make_room(context, chunk.name, chunk.stored_size_bytes)
    said = []
    for provider in providers:
        try:
            _download(context, lease, chunk, posting, provider)
        except (StoreError, IntegrityError) as error:
            said.append(f"{provider}: {error}")
        else:
            return True, said
    return False, said


def _download(
    context: RunContext, lease: Lease, chunk: Chunk, posting: PostRecord, provider: str
) -> None:
    part = context.staging() / f"{chunk.name}.{lease.epoch}.download"
    try:
        download_from(context, lease, posting, proof_type_of(chunk), provider=provider, path=part)
        give_final_name(context, chunk.name, part)
    finally:
        remove_staged(part)


def download_from(
    context: RunContext,
    lease: Lease,
    posting: PostRecord,
    proof_type: int,
    *,
    provider: str,
    path: Path,
) -> None:
    """Write a posted file, as one provider gives it.

    Raises: IntegrityError: its bytes do not have the Merkle root; they are in the file all the
        same. What `ChunkStore.read` raises.
    """
    tree = MerkleTree(proof_type)
    with path.open("wb") as file:
        for piece in context.store.read(posting, 0, posting.stored_size_bytes, provider=provider):
            context.wait_while_paused(lease.check)
            tree.update(piece)
            file.write(piece)
    if tree.size_bytes != posting.stored_size_bytes or tree.root() != posting.merkle_root:
        raise IntegrityError("it gives other bytes than its Merkle root says")


def proof_type_of(chunk: Chunk) -> int:
    """Return which Merkle tree a sealed chunk's root is of."""
    if chunk.proof_type is None:
        raise CafError(f"chunk {chunk.name} is '{chunk.state}' and was not sealed")
    return chunk.proof_type


# --- what is kept, and room
# ----------------------------------------------------------------------------------------


def let_go(context: RunContext, name: str) -> None:
    """Remove what a located chunk has in staging: its reservation at once, its sealed file once the
    store no longer needs it.
    """
    if context.store.staging_hold_seconds() > 0:
        remove_unsealed(context, name)
        context.ledger.staging.release(name)
    else:
        remove_all(context, name)


def make_room(context: RunContext, name: str, size_bytes: int, *, held_bytes: int = 0) -> None:
    """Remove kept files, that of the chunk located first before the others, until this many bytes
    fit or none is left.

    `held_bytes` of them the chunk has on the disk already. What then still does not fit is for the
    reservation, or the disk itself, to refuse.
    """
    if _has_room(context, name, size_bytes, held_bytes):
        return
    for kept in _kept(context):
        if (
            kept.name != name
            and _remove_kept(context, kept.name)
            and _has_room(context, name, size_bytes, held_bytes)
        ):
            return


def sweep(context: RunContext) -> Iterator[str]:
    """Remove the kept files whose hold is over; yield the names of their chunks."""
    hold = timedelta(seconds=context.store.staging_hold_seconds())
    now = datetime.now(UTC)
    for kept in _kept(context):
        if _located_at(kept) + hold <= now and _remove_kept(context, kept.name):
            yield kept.name


def _kept(context: RunContext) -> list[Chunk]:
    """Return the chunks of any source that are located and still have a sealed file here, the one
    located first before.
    """
    kept = []
    for path in context.staging().glob(f"*{_SEALED}"):
        try:
            chunk = context.ledger.chunks.get(path.name.removesuffix(_SEALED))
        except NotLocated:  # not ours: another ledger's, or put there by hand
            continue
        if chunk.state is ChunkState.LOCATED:
            kept.append(chunk)
    return sorted(kept, key=_located_at)


def _located_at(chunk: Chunk) -> datetime:
    return chunk.located_at or chunk.updated_at


def _remove_kept(context: RunContext, name: str) -> bool:
    """Remove a kept file, unless a run works with it."""
    try:
        with context.ledger.leases.hold(chunk_lease(name), context.holder):
            if context.ledger.chunks.get(name).state is not ChunkState.LOCATED:
                return False
            remove_staged(staged_path(context, name))
            return True
    except HeldByOther:
        return False


def _has_room(context: RunContext, name: str, size_bytes: int, held_bytes: int) -> bool:
    """Tell whether the disk and the limit have this many bytes for the chunk, beside the files of
    other chunks.
    """
    staging = context.staging()
    disk = os.statvfs(staging)
    if disk.f_bavail * disk.f_frsize < size_bytes - held_bytes:
        return False
    limit_bytes = context.settings.packing.staging_limit
    if not limit_bytes:
        return True
    others = sum(_size(path) for path in staging.iterdir() if not path.name.startswith(f"{name}."))
    return others + size_bytes <= limit_bytes


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # another run has just removed it
        return 0
