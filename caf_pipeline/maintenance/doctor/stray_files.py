"""What crashes leave in folders: the staging folder and its reservations, inventories, plans, a
folder store's half copies.

A file is removed only under the lease of the chunk or plan that it is of, after a second look; one
that is not ours by its name is told and left.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from caf_pipeline.chunk_state import CLAIMING, ChunkState
from caf_pipeline.errors import NotLocated, StagingError, StoreError
from caf_pipeline.inventory.chunk_id import PLAN_NAME, ChunkId
from caf_pipeline.ledger.records import Chunk, Reservation, chunk_lease, plan_lease
from caf_pipeline.maintenance.doctor.findings import (
    NO_LONGER_THERE,
    Actor,
    Examination,
    Finding,
    Kind,
    Mended,
    mendable,
    not_checked,
)
from caf_pipeline.packing.staging import StagedFile, leftovers
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.list_source import FOLDER, read_record
from caf_pipeline.system.folder_lock import alone_in

_S = ChunkState

_OVER: Final = frozenset({_S.EMPTY, _S.WITHDRAWN, _S.ABANDONED, _S.EXPIRED})
"""States of chunks that no run packs, posts or repairs any more."""

_STAGED_SEALED: Final = frozenset(
    {_S.SEALED, _S.POSTING, _S.POSTED, _S.UPLOADING, _S.VERIFIED, _S.DAMAGED}
)
"""States in which the sealed file is wanted, and what it was made of is not."""

_WHOLE: Final = frozenset({"sealed", "packed", "record"})
"""Files with every byte of a chunk's objects, which the source may have in another version by now;
and what points to one.
"""

_DISPOSABLE: Final = frozenset({"copy", "manifest", "json", "download"})
"""Of use to the run that wrote them only."""

_PLAN_NAME: Final = re.compile(PLAN_NAME)
_INVENTORY_LEFT: Final = re.compile(
    r"\..+\.parquet\.(tmp|listed)|\.caf-spill-.+|" + re.escape(FOLDER) + ".+"
)
_SPOOL_LEFT: Final = re.compile(
    r"\.(restoring|adopting|searching)-.+"
)  # as `rebuild`, `adopt` and `log_search` name them
_WORKSPACE: Final = re.compile(r"\.(cutting|accounting)-.+")


@runtime_checkable
class CopiesFiles(Protocol):
    """A ChunkStore that copies chunks into a folder, where a killed copy stays."""

    def half_copies(self) -> Sequence[tuple[bytes, Path]]:
        """Return the files that copies under way, or killed, have there, each with the Merkle root
        that it is of.
        """
        ...


# --- the staging folder
# ------------------------------------------------------------------------------------------


def staged_files(examination: Examination) -> Iterator[Finding]:
    """Find files that nothing needs any more, of this source's chunks; and files that are not
    ours.
    """
    context = examination.context
    if not context.settings.staging_folder.is_dir():
        return
    files = _listed(context)
    known = {chunk.name: chunk for chunk in context.ledger.chunks.list()}
    hold = timedelta.max
    if any(
        file.kind == "sealed" and file.chunk in known and known[file.chunk].state is _S.LOCATED
        for file in files
    ):
        try:
            hold = timedelta(seconds=context.store.staging_hold_seconds())
        except StoreError as error:
            yield not_checked("how long located chunks are kept in staging", error)
    unneeded = []
    for file in files:
        chunk = known.get(file.chunk)
        if chunk is None:
            yield from _unknown(examination, file)
        elif chunk.source == context.source and (why := _unneeded(chunk, file, files, hold)):
            unneeded.append((file, why))
    left = {
        chunk.name
        for chunk in examination.without_run(
            list({file.chunk: known[file.chunk] for file, _ in unneeded}.values())
        )
    }
    for file, why in unneeded:
        if file.chunk in left:
            # A look at proofs removes what was kept for as long as it should be: every archive has
            # some of it now and then.
            kept = known[file.chunk].state is _S.LOCATED and file.kind == "sealed"
            actor = Actor.RUN if kept else Actor.DOCTOR
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
            hint="mend its permissions",
        ) from error


def _unknown(examination: Examination, file: StagedFile) -> Iterator[Finding]:
    """Tell of a file whose chunk the ledger does not know, or that is not a chunk's."""
    named = ChunkId.parse(file.chunk)
    if _SPOOL_LEFT.fullmatch(file.path.name):
        if file.path in _left_in(file.path.parent, _SPOOL_LEFT):
            found = "a rebuild, an adoption or a search that was not finished left it"
            yield mendable(
                Kind.LEFTOVER, str(file.path), found, "removed", partial(_remove_alone, file.path)
            )
    elif named is None:
        yield Finding(
            Kind.STAGED, file.path.name, "it is not the pipeline's", "left as it is", Actor.NOBODY
        )
    elif named.source != examination.context.source:
        if named.source not in {
            *examination.context.settings.sources,
            *examination.context.ledger.lookup.sources(),
        }:
            found = "neither the ledger nor caf.toml has its source"
            yield Finding(Kind.STAGED, file.path.name, found, "left as it is", Actor.NOBODY)
    elif file.kind in _WHOLE:
        # It may be all that there is of a chunk whose ledger was lost: posted, and not yet
        # uploaded.
        remedy = "'caf rebuild' if the ledger was lost, else remove the file"
        yield Finding(
            Kind.STAGED,
            file.path.name,
            "the ledger has no chunk of this name",
            remedy,
            Actor.OPERATOR,
        )
    else:
        found = "the ledger has no chunk of this name"
        yield mendable(
            Kind.STAGED,
            file.path.name,
            found,
            "removed",
            partial(_remove_unknown, examination, file),
        )


def _unneeded(chunk: Chunk, file: StagedFile, files: Sequence[StagedFile], hold: timedelta) -> str:
    """Say why a file of a chunk that no run holds is no longer needed; "" where it may be."""
    state = chunk.state
    if state in _OVER:
        return f"its chunk is '{state}'"
    if state is _S.LOCATED:
        if file.kind != "sealed":
            return "its chunk is located"
        located_at = chunk.located_at or chunk.updated_at
        return (
            "its chunk is located, and the store wants it no longer"
            if datetime.now(UTC) - located_at >= hold
            else ""
        )
    if file.kind in _DISPOSABLE:
        return "the run that wrote it is gone, and no other can use it"
    if state in _STAGED_SEALED and file.kind in ("part", "journal", "packed"):
        sealed = any(
            (one.chunk, one.kind, one.size_bytes) == (chunk.name, "sealed", chunk.stored_size_bytes)
            for one in files
        )
        return f"its chunk is '{state}', and the sealed file is there" if sealed else ""
    return ""


def _remove(examination: Examination, file: StagedFile, hold: timedelta) -> Mended:
    with examination.lease(chunk_lease(file.chunk)):
        chunk = examination.context.ledger.chunks.get(file.chunk)
        files = _listed(examination.context, file.chunk)
        if file.path not in {one.path for one in files} or not _unneeded(chunk, file, files, hold):
            return NO_LONGER_THERE
        return _removed(file.path)


def _remove_unknown(examination: Examination, file: StagedFile) -> Mended:
    """Remove a file of no chunk. Plans, which make chunks, wait meanwhile."""
    with examination.lease(plan_lease(examination.context.source)):
        try:
            examination.context.ledger.chunks.get(file.chunk)
        except NotLocated:
            return _removed(file.path)
        return NO_LONGER_THERE


def _removed(path: Path) -> Mended:
    is_folder = path.is_dir() and not path.is_symlink()
    try:
        shutil.rmtree(path) if is_folder else path.unlink()
    except FileNotFoundError:
        return NO_LONGER_THERE
    except OSError as error:
        whose = "its" if is_folder else "the folder's"
        raise StagingError(
            f"{path} cannot be removed: {error.strerror}", hint=f"mend {whose} permissions"
        ) from error
    return Mended("removed")


# --- reservations
# ------------------------------------------------------------------------------------------


def reservations(examination: Examination) -> Iterator[Finding]:
    """Find room that is reserved for chunks which claim nothing, or of which nothing is there."""
    mine = {
        chunk.name: chunk
        for chunk in examination.context.ledger.chunks.list(examination.context.source)
    }
    unused = [
        (one, why)
        for one in examination.context.ledger.staging.list()
        if one.chunk in mine and (why := _unused(one))
    ]
    left = {chunk.name for chunk in examination.without_run([mine[one.chunk] for one, _ in unused])}
    for one, why in unused:
        if one.chunk in left:
            yield mendable(
                Kind.RESERVATION, one.chunk, why, "given back", partial(_release, examination, one)
            )


def _unused(one: Reservation) -> str:
    if one.state not in CLAIMING:
        return (
            f"{one.size_bytes} bytes of {one.folder} are reserved, and the chunk is '{one.state}'"
        )
    # A folder that is not there may be another machine's.
    folder = Path(one.folder)
    if folder.is_dir() and not any(folder.glob(f"{one.chunk}.*")):
        return (
            f"{one.size_bytes} bytes of {one.folder} are reserved, and nothing of the chunk is "
            "there"
        )
    return ""


def _release(examination: Examination, one: Reservation) -> Mended:
    with examination.lease(chunk_lease(one.chunk)):
        now = next(
            (each for each in examination.context.ledger.staging.list() if each.chunk == one.chunk),
            None,
        )
        if now is None or not _unused(now):
            return NO_LONGER_THERE
        examination.context.ledger.staging.release(one.chunk)
        return Mended("given back")


# --- inventories and plans
# ------------------------------------------------------------------------------------------


def home_leftovers(examination: Examination, *, all_known: bool) -> Iterator[Finding]:
    """Find what killed inventories and plans of the source left under `home`.

    Args: examination: of the source. all_known: whether the ledger has every chunk that the store
        may have. If not, a plan that the ledger does not have
            may be that of a lost ledger: once its chunks are restored, they are packed again from
            it where no copy is left.
    """
    home, source = examination.context.settings.home, examination.context.source
    inventories, plans = home / "inventories" / source, home / "plans" / source
    for path in _left_in(inventories, _INVENTORY_LEFT):
        if path.name.startswith(FOLDER) and read_record(path, None):
            continue  # the next listing goes on with it
        found = "an inventory that was not finished left it"
        yield mendable(Kind.LEFTOVER, str(path), found, "removed", partial(_remove_alone, path))
    if plan_lease(examination.context.source) in examination.leases_of_live_runs():
        return
    for path in _left_in(plans, _WORKSPACE):
        found = "a plan that was not finished left it"
        yield mendable(
            Kind.LEFTOVER, str(path), found, "removed", partial(_remove_plan, examination, path)
        )
    for path in _left_in(plans, _PLAN_NAME):
        if examination.context.ledger.plans.is_name_taken(source, path.name):
            continue
        found = "the ledger has no such plan"
        if not all_known:
            remedy = "left as it is: the store may have chunks of it"
            yield Finding(Kind.LEFTOVER, str(path), found, remedy, Actor.NOBODY)
        else:
            yield mendable(
                Kind.LEFTOVER, str(path), found, "removed", partial(_remove_plan, examination, path)
            )


def _left_in(folder: Path, names: re.Pattern[str]) -> Sequence[Path]:
    """Return what has such a name in a folder that no process writes into."""
    if not folder.is_dir():
        return []
    with alone_in(folder) as alone:
        return (
            sorted(path for path in folder.iterdir() if names.fullmatch(path.name)) if alone else []
        )


def _remove_plan(examination: Examination, path: Path) -> Mended:
    with examination.lease(plan_lease(examination.context.source)):
        if examination.context.ledger.plans.is_name_taken(examination.context.source, path.name):
            return NO_LONGER_THERE
        return _remove_alone(path)


def _remove_alone(path: Path) -> Mended:
    """Remove a file or folder while no process writes beside it."""
    with alone_in(path.parent) as alone:
        if not alone:
            return Mended("left: a run writes there now", Actor.NOBODY)
        return _removed(path)


# --- a store that is a folder
# ----------------------------------------------------------------------------------------


def half_copies(examination: Examination) -> Iterator[Finding]:
    """Find what killed uploads of this source's chunks left in the store's folder; what is of other
    roots is reported only.
    """
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
                "a copy into the store that is of no chunk of the ledger",
                remedy,
                Actor.OPERATOR,
            )
        elif chunk.source == context.source and chunk_lease(chunk.name) not in held:
            found = f"a copy of chunk {chunk.name} that was not finished"
            yield mendable(
                Kind.LEFTOVER,
                str(path),
                found,
                "removed",
                partial(_remove_half, examination, chunk.name, path),
            )


def _remove_half(examination: Examination, chunk: str, path: Path) -> Mended:
    with examination.lease(chunk_lease(chunk)):
        return _removed(path)
