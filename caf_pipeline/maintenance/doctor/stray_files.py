"""Finds what crashes leave in folders: staging, reservations, half copies.

A file is removed only after a second look, under the lease of its chunk or plan. Foreign files are
left alone.
"""

import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from caf_pipeline.chunk_state import CLAIMING, ChunkState
from caf_pipeline.errors import NotLocated, StagingError, StoreError
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.ledger.records import Reservation, chunk_lease, plan_lease
from caf_pipeline.maintenance.doctor.findings import (
    ALREADY_GONE,
    Actor,
    Examination,
    Finding,
    Kind,
    MendResult,
    mendable,
    not_checked,
)
from caf_pipeline.packing.packer import remove_staged
from caf_pipeline.packing.staging import StagedFile, leftovers
from caf_pipeline.records import Chunk
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.planning import TEMPORARY
from caf_pipeline.system.quantities import show_size

_S = ChunkState

_OVER: Final = frozenset({_S.EMPTY, _S.WITHDRAWN, _S.ABANDONED, _S.EXPIRED})

_STAGED_SEALED: Final = frozenset(
    {_S.SEALED, _S.POSTING, _S.POSTED, _S.UPLOADING, _S.VERIFIED, _S.DAMAGED}
)

_WHOLE: Final = frozenset({"sealed", "packed", "record"})

_DISPOSABLE: Final = frozenset({"copy", "manifest", "json", "download"})


@runtime_checkable
class CopiesFiles(Protocol):
    """A store in a folder, where a killed copy leaves a file."""

    def half_copies(self) -> Sequence[tuple[bytes, Path]]:
        """Each file comes with its Merkle root."""
        ...


# --- the staging folder


def staged_files(examination: Examination) -> Iterator[Finding]:
    """Find staged files that are not needed, and foreign files."""
    context = examination.context
    if not context.settings.staging_folder.is_dir():
        return
    files = _listed(context)
    chunks = {chunk.name: chunk for chunk in context.ledger.chunks.list()}
    hold = timedelta.max
    if any(
        file.kind == "sealed" and file.chunk in chunks and chunks[file.chunk].state is _S.LOCATED
        for file in files
    ):
        try:
            hold = timedelta(seconds=context.store.staging_hold_seconds())
        except StoreError as error:
            yield not_checked("how long located chunks are kept in staging", error)
    unneeded = []
    for file in files:
        chunk = chunks.get(file.chunk)
        if chunk is None:
            yield from _unknown_file(examination, file)
        elif chunk.source == context.source and (why := _unneeded(chunk, file, files, hold)):
            unneeded.append((file, why))
    free = {
        chunk.name
        for chunk in examination.without_run(
            list({file.chunk: chunks[file.chunk] for file, _ in unneeded}.values())
        )
    }
    for file, why in unneeded:
        if file.chunk in free:
            # The proof watch removes files whose hold has ended; every archive has some of them.
            is_held = chunks[file.chunk].state is _S.LOCATED and file.kind == "sealed"
            actor = Actor.RUN if is_held else Actor.DOCTOR
            yield Finding(
                Kind.STAGED,
                file.path.name,
                why,
                "removed",
                actor,
                partial(_remove, examination, file, hold),
            )


def _listed(context: RunContext, chunk: str | None = None) -> Sequence[StagedFile]:
    try:
        return leftovers(context, chunk)
    except OSError as error:
        raise StagingError(
            f"the folder {context.staging()} cannot be read: {error.strerror}",
            hint="correct its permissions",
        ) from error


def _unknown_file(examination: Examination, file: StagedFile) -> Iterator[Finding]:
    name, chunk_id = file.path.name, ChunkId.parse(file.chunk)
    if TEMPORARY.fullmatch(name):  # the next plan removes it
        return
    if chunk_id is None:
        problem = "it is not the pipeline's"
        yield Finding(Kind.STAGED, name, problem, "left alone", Actor.NOBODY)
    elif chunk_id.source != examination.context.source:
        if chunk_id.source not in {
            *examination.context.settings.sources,
            *examination.context.ledger.lookup.sources(),
        }:
            problem = "neither the ledger nor caf.toml has its source"
            yield Finding(Kind.STAGED, name, problem, "left alone", Actor.NOBODY)
    else:
        problem = "the ledger has no chunk of this name"
        if file.kind in _WHOLE:
            # It may be all that is left of a chunk that a lost ledger posted and did not upload.
            remedy = "'caf rebuild' if the ledger was lost, else remove the file"
            yield Finding(Kind.STAGED, name, problem, remedy, Actor.OPERATOR)
        else:
            mend = partial(_remove_unknown, examination, file)
            yield mendable(Kind.STAGED, name, problem, "removed", mend)


def _unneeded(chunk: Chunk, file: StagedFile, files: Sequence[StagedFile], hold: timedelta) -> str:
    state = chunk.state
    if state in _OVER:
        return f"its chunk is '{state}'"
    if state is _S.LOCATED:
        if file.kind != "sealed":
            return "its chunk is located"
        located_at = chunk.located_at or chunk.updated_at
        return (
            "its chunk is located, and the store does not need it any more"
            if datetime.now(UTC) - located_at >= hold
            else ""
        )
    if file.kind in _DISPOSABLE:
        return "the run that wrote it is gone, and no other can use it"
    if state in _STAGED_SEALED and file.kind in ("part", "journal", "packed"):
        has_sealed_file = any(
            (other.chunk, other.kind, other.size_bytes)
            == (chunk.name, "sealed", chunk.stored_size_bytes)
            for other in files
        )
        return f"its chunk is '{state}', and the sealed file is there" if has_sealed_file else ""
    return ""


def _remove(examination: Examination, file: StagedFile, hold: timedelta) -> MendResult:
    with examination.lease(chunk_lease(file.chunk)):
        chunk = examination.context.ledger.chunks.get(file.chunk)
        files = _listed(examination.context, file.chunk)
        if file.path not in {other.path for other in files}:
            return ALREADY_GONE
        return _removed(file.path) if _unneeded(chunk, file, files, hold) else ALREADY_GONE


def _remove_unknown(examination: Examination, file: StagedFile) -> MendResult:
    with examination.lease(plan_lease(examination.context.source)):
        try:
            examination.context.ledger.chunks.get(file.chunk)
        except NotLocated:
            return _removed(file.path)
        return ALREADY_GONE


def _removed(path: Path) -> MendResult:
    is_folder = path.is_dir() and not path.is_symlink()
    try:
        path.lstat()  # raises FileNotFoundError
        shutil.rmtree(path) if is_folder else remove_staged(path)
    except FileNotFoundError:
        return ALREADY_GONE
    except OSError as error:
        whose = "its" if is_folder else "the folder's"
        raise StagingError(
            f"{path} cannot be removed: {error.strerror}", hint=f"correct {whose} permissions"
        ) from error
    return MendResult("removed")


# --- reservations


def reservations(examination: Examination) -> Iterator[Finding]:
    """Find reservations of chunks that claim or stage nothing."""
    mine = {
        chunk.name: chunk
        for chunk in examination.context.ledger.chunks.list(examination.context.source)
    }
    unused = [
        (reservation, why)
        for reservation in examination.context.ledger.staging.list()
        if reservation.chunk in mine and (why := _unused(reservation))
    ]
    free = {
        chunk.name
        for chunk in examination.without_run([mine[reservation.chunk] for reservation, _ in unused])
    }
    for reservation, why in unused:
        if reservation.chunk in free:
            yield mendable(
                Kind.RESERVATION,
                reservation.chunk,
                why,
                "given back",
                partial(_release, examination, reservation.chunk),
            )


def _unused(reservation: Reservation) -> str:
    reserved = f"{show_size(reservation.size_bytes)} of {reservation.folder} are reserved"
    if reservation.state not in CLAIMING:
        return f"{reserved}, and the chunk is '{reservation.state}'"
    # A missing folder may be that of another machine.
    folder = Path(reservation.folder)
    if folder.is_dir() and not any(folder.glob(f"{reservation.chunk}.*")):
        return f"{reserved}, and nothing of the chunk is there"
    return ""


def _release(examination: Examination, chunk: str) -> MendResult:
    with examination.lease(chunk_lease(chunk)):
        staging = examination.context.ledger.staging
        if not any(_unused(entry) for entry in staging.list() if entry.chunk == chunk):
            return ALREADY_GONE
        staging.release(chunk)
        return MendResult("given back")


# --- a store that is a folder


def half_copies(examination: Examination) -> Iterator[Finding]:
    """Find remains of killed uploads in the store's folder."""
    context = examination.context
    if not isinstance(context.store, CopiesFiles):
        return
    copies = context.store.half_copies()
    if not copies:
        return
    by_root = {chunk.merkle_root: chunk for chunk in context.ledger.chunks.list()}
    held = examination.leases_of_live_runs()
    for root, path in copies:
        chunk = by_root.get(root)
        if chunk is None:
            remedy = "remove it, unless another ledger keeps chunks in this folder"
            yield Finding(
                Kind.LEFTOVER,
                str(path),
                "an unfinished copy into the store that belongs to no chunk of the ledger",
                remedy,
                Actor.OPERATOR,
            )
        elif chunk.source == context.source and chunk_lease(chunk.name) not in held:
            problem = f"an unfinished copy of chunk {chunk.name}"
            mend = partial(_remove_half_copy, examination, chunk.name, path)
            yield mendable(Kind.LEFTOVER, str(path), problem, "removed", mend)


def _remove_half_copy(examination: Examination, chunk: str, path: Path) -> MendResult:
    with examination.lease(chunk_lease(chunk)):
        return _removed(path)
