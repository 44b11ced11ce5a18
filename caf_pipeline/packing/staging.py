"""The staging folder: file names, the record of a finished packing, downloads, free space.

    <chunk>.<epoch>.part      the chunk while it is packed, locked by its writer
    <chunk>.<epoch>.journal   which bytes of the part are safe (`journal/`)
    <chunk>.<epoch>.copy      a copy of the safe bytes, if the old writer is still alive, or of
                              an encrypted part under another key
    <chunk>.<epoch>.manifest  the manifest while it is written
    <chunk>.<epoch>.packed    the whole chunk until it is sealed
    <chunk>.packed.json       the record of that file; written as <chunk>.<epoch>.json
    <chunk>.<epoch>.download  a stored chunk while it is downloaded
    <chunk>.caf               the sealed chunk, until the store releases it and space is needed

The epoch is that of the lease under which a file was made, so a run that lost its lease cannot
write or remove another run's files.
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
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.packing.packer import PackedChunk, remove_staged
from caf_pipeline.packing.sink import staging_errors
from caf_pipeline.reading.samples import staged_matches
from caf_pipeline.records import Chunk, Lease, PostRecord
from caf_pipeline.run_context import RunContext
from caf_pipeline.system.atomic_files import WholeFile, rename_durably, sync_file

_SEALED: Final = ".caf"
_CHECK: Final = "check"

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
    r"(?P<chunk>[a-z0-9-]{1,50})\."
    rf"(?:(?P<epoch>[0-9]{{1,19}})\.(?P<kind>{'|'.join(_OF_AN_EPOCH)})"
    r"|(?P<record>packed\.json)|(?P<sealed>caf))"
)


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One file; `chunk` is "" if it is foreign, `epoch` None if its name has none."""

    path: Path
    kind: StagedKind
    chunk: str
    epoch: int | None
    size_bytes: int


def leftovers(context: RunContext, chunk: str | None = None) -> Sequence[StagedFile]:
    """Return the staged files, or those of one chunk."""
    return files_in(context.staging(), chunk)


def files_in(folder: Path, chunk: str | None = None) -> Sequence[StagedFile]:
    """Return a staging folder's files, or a chunk's, sorted by name.

    Files with other names, and folders, are "foreign".
    """
    files = []
    for path in sorted(folder.iterdir()):
        is_folder = path.is_dir() and not path.is_symlink()
        named = None if is_folder else _NAMES.fullmatch(path.name)
        if chunk is not None and (named is None or named["chunk"] != chunk):
            continue
        try:
            size_bytes = 0 if is_folder else path.lstat().st_size
        except FileNotFoundError:  # another run has just removed it
            continue
        kind: Any = "foreign"  # the pattern has the names of `StagedKind`
        if named:
            kind = named["kind"] or ("sealed" if named["sealed"] else "record")
        epoch = int(named["epoch"]) if named and named["epoch"] else None
        files.append(StagedFile(path, kind, named["chunk"] if named else "", epoch, size_bytes))
    return files


def staged_path(context: RunContext, name: str) -> Path:
    """Return a sealed chunk's path."""
    return context.staging() / f"{name}{_SEALED}"


def packed_path(context: RunContext, name: str, epoch: int) -> Path:
    """Return the path of a packed, unsealed chunk."""
    return context.staging() / f"{name}.{epoch}.packed"


def staged_is_whole(context: RunContext, chunk: Chunk) -> bool:
    """Return whether the sealed file exists with its length and samples."""
    path = staged_path(context, chunk.name)
    try:
        return path.stat().st_size == chunk.stored_size_bytes and staged_matches(
            path, chunk.samples
        )
    except FileNotFoundError:
        return False


# --- a finished packing ---------------------------------------------------------------------------


def write_packed(
    context: RunContext, name: str, epoch: int, part: Path, packed: PackedChunk
) -> None:
    """Rename a packing, then write its record, durably."""
    final, record = packed_path(context, name, epoch), _record_path(context, name)
    described = {
        name: value for name, value in asdict(packed).items() if name not in _NOT_RECORDED
    } | {
        "merkle_root": packed.merkle_root.hex(),
        # No hash of plaintext stays beside an encrypted chunk.
        "tail_sha256": "" if packed.header else packed.tail_sha256.hex(),
        "encrypted": packed.header is not None,
        "file": final.name,
        "run": context.holder.run,
    }
    with staging_errors(final):
        os.replace(part, final)
        with WholeFile(record, record.with_name(f"{name}.{epoch}.json")) as whole:
            whole.file.write(json.dumps(described | {_CHECK: _check_of(described)}).encode())


def read_record(context: RunContext, name: str) -> dict[str, Any] | None:
    """Return a finished packing's record; None if missing or damaged."""
    try:
        described = json.loads(_record_path(context, name).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(described, dict) or described.pop(_CHECK, "") != _check_of(described):
        return None
    # Another version may have recorded other fields.
    return described if described.keys() == {*_RECORDED, "encrypted", "file", "run"} else None


_NOT_RECORDED: Final = {"stored_size_bytes", "proof_type", "samples", "header", "recipients"}

_RECORDED: Final = {field.name for field in fields(PackedChunk)} - _NOT_RECORDED


def _check_of(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def read_packed(context: RunContext, name: str) -> tuple[PackedChunk, Path] | None:
    """Return an unsealed chunk's packing and file; None if incomplete.

    Checks the file's length, manifest and index, but not its other bytes. An encrypted file that
    was not sealed cannot be read, and a plain file of a private source must not be stored.
    """
    record = read_record(context, name)
    if record is None or record["encrypted"] or not context.source_settings.public:
        return None
    root = bytes.fromhex(record["merkle_root"])
    fields_of_packed = {field: record[field] for field in _RECORDED} | {
        "merkle_root": root,
        "tail_sha256": bytes.fromhex(record["tail_sha256"]),
        "stored_size_bytes": record["caf_size_bytes"],
        "proof_type": type_of_root(root),  # the setting may have changed since
        "samples": (),
    }
    packed = PackedChunk(**fields_of_packed)
    # A run killed during the seal may have given the file its final name already.
    for path in (context.staging() / record["file"], staged_path(context, name)):
        if not path.exists() or path.stat().st_size != packed.caf_size_bytes:
            continue
        with path.open("rb") as file:
            file.seek(packed.tail_start)
            if hashlib.file_digest(file, "sha256").digest() == packed.tail_sha256:
                return packed, path
    return None


def packing_run(context: RunContext, chunk: Chunk) -> str:
    """Return the run that packed the staged chunk; "" if unknown."""
    record = read_record(context, chunk.name)
    if record is None or bytes.fromhex(record["merkle_root"]) != chunk.merkle_root:
        return ""
    return str(record["run"])


def staged_has_root(context: RunContext, chunk: Chunk) -> bool:
    """Return whether the sealed file has its root. Reads it all."""
    path = staged_path(context, chunk.name)
    try:
        return (
            path.stat().st_size == chunk.stored_size_bytes
            and merkle_root(path, proof_type_of(chunk)) == chunk.merkle_root
        )
    except FileNotFoundError:
        return False


def give_final_name(context: RunContext, name: str, file: Path) -> Path:
    """Make a file durable as the sealed chunk, replacing an older one."""
    path = staged_path(context, name)
    sync_file(file)
    rename_durably(file, path)
    return path


def remove_packing(context: RunContext, name: str) -> None:
    """Remove all files but the sealed one and the record."""
    remove_staged(
        *(file.path for file in leftovers(context, name) if file.kind not in ("sealed", "record"))
    )


def remove_unsealed(context: RunContext, name: str) -> None:
    """Remove all files but the sealed one."""
    remove_staged(_record_path(context, name))
    remove_packing(context, name)


def remove_all(context: RunContext, name: str) -> None:
    """Remove a chunk's files and reservation."""
    remove_unsealed(context, name)
    remove_staged(staged_path(context, name))
    context.ledger.staging.release(name)


def _record_path(context: RunContext, name: str) -> Path:
    return context.staging() / f"{name}.packed.json"


# --- back from the store --------------------------------------------------------------------------


def download(
    context: RunContext, lease: Lease, chunk: Chunk, posting: PostRecord, providers: Iterable[str]
) -> tuple[bool, Mapping[str, CafError]]:
    """Download a stored chunk as its sealed file.

    Returns whether any provider succeeded, and the errors of the others.
    """
    remove_staged(
        *(
            file.path
            for file in leftovers(context, chunk.name)
            if file.kind in ("download", "record")
        )
    )
    make_room(context, chunk.name, chunk.stored_size_bytes)
    errors: dict[str, CafError] = {}
    path = context.staging() / f"{chunk.name}.{lease.epoch}.download"
    for provider in providers:
        try:
            download_from(
                context, lease, posting, proof_type_of(chunk), provider=provider, path=path
            )
            give_final_name(context, chunk.name, path)
        except (StoreError, IntegrityError) as error:
            errors[provider] = error
        else:
            return True, errors
        finally:
            remove_staged(path)
    return False, errors


def download_from(
    context: RunContext,
    lease: Lease,
    posting: PostRecord,
    proof_type: int,
    *,
    provider: str,
    path: Path,
) -> None:
    """Write a file from one provider to `path`.

    An IntegrityError leaves the wrong bytes there.
    """
    tree = MerkleTree(proof_type)
    with path.open("wb") as file:
        for piece in context.store.read(posting, 0, posting.stored_size_bytes, provider=provider):
            context.wait_while_paused(lease.check)
            tree.update(piece)
            file.write(piece)
    if tree.size_bytes != posting.stored_size_bytes or tree.root() != posting.merkle_root:
        raise IntegrityError("the bytes do not match the Merkle root")


def proof_type_of(chunk: Chunk) -> int:
    """Return a sealed chunk's proof type, or raise CafError."""
    if chunk.proof_type is None:
        raise CafError(f"chunk {chunk.name} is '{chunk.state}', not sealed")
    return chunk.proof_type


# --- what is kept, and room -----------------------------------------------------------------------


def release_located(context: RunContext, name: str) -> None:
    """Release a located chunk's reservation, and its file if the store allows."""
    if context.store.staging_hold_seconds() > 0:
        remove_unsealed(context, name)
        context.ledger.staging.release(name)
    else:
        remove_all(context, name)


def make_room(context: RunContext, name: str, size_bytes: int, *, held_bytes: int = 0) -> bool:
    """Remove kept files, first located first; return whether `size_bytes` fit.

    `held_bytes` of them are already on the disk.
    """
    if _has_room(context, name, size_bytes, held_bytes):
        return True
    for kept in _kept(context):
        if (
            kept.name != name
            and _remove_kept(context, kept.name)
            and _has_room(context, name, size_bytes, held_bytes)
        ):
            return True
    return False


def sweep(context: RunContext) -> Iterator[str]:
    """Remove kept files whose hold is over; yield chunk names."""
    hold = timedelta(seconds=context.store.staging_hold_seconds())
    now = datetime.now(UTC)
    for kept in _kept(context):
        if _located_at(kept) + hold <= now and _remove_kept(context, kept.name):
            yield kept.name


def _kept(context: RunContext) -> list[Chunk]:
    """The first located first."""
    kept = []
    for path in context.staging().glob(f"*{_SEALED}"):
        try:
            chunk = context.ledger.chunks.get(path.name.removesuffix(_SEALED))
        except NotLocated:  # of another ledger, or put there by hand
            continue
        if chunk.state is ChunkState.LOCATED:
            kept.append(chunk)
    return sorted(kept, key=_located_at)


def _located_at(chunk: Chunk) -> datetime:
    return chunk.located_at or chunk.updated_at


def _remove_kept(context: RunContext, name: str) -> bool:
    try:
        with context.ledger.leases.hold(chunk_lease(name), context.holder):
            if context.ledger.chunks.get(name).state is not ChunkState.LOCATED:
                return False
            remove_staged(staged_path(context, name))
            return True
    except HeldByOther:
        return False


def _has_room(context: RunContext, name: str, size_bytes: int, held_bytes: int) -> bool:
    staging = context.staging()
    disk = os.statvfs(staging)
    if disk.f_bavail * disk.f_frsize < size_bytes - held_bytes:
        return False
    limit_bytes = context.settings.packing.staging_limit
    if not limit_bytes:
        return True
    others = sum(file.size_bytes for file in files_in(staging) if file.chunk != name)
    return others + size_bytes <= limit_bytes
