"""Takes over what an earlier run left of a chunk's packing, so that no other run writes where this
one resumes.

A part and a journal of one epoch belong together. They get names of this lease's epoch in an order
by which such a pair is there at every moment: first the journal is copied, then the part gets its
new name. A part whose lock is free has no writer any more, and packing goes on in it. Where its
writer still lives, asleep or not yet aware that its lease is lost, what is safe by the journal is
copied, and the copy gets the name; the old writer's file is then its own alone.

Source: docs/decisions/0010-the-packing-journal.md.
"""

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from caf_pipeline.packing.journal.format import Journal, Opening
from caf_pipeline.packing.packer import remove_staged
from caf_pipeline.packing.sink import PartFile, staging_error
from caf_pipeline.packing.staging import StagedFile
from caf_pipeline.system.atomic_files import sync_file, sync_folder

_COPY_BYTES: Final = 64 << 20
"""Copied at once, so that a lost lease ends a copy within a second."""

_NOT_COPIED_BY_THE_KERNEL: Final = (
    errno.EXDEV,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EINVAL,
    errno.EPERM,
)


def find_left(files: Sequence[StagedFile]) -> tuple[PartFile | None, str]:
    """Open the part of the newest pair among a chunk's files; None, and why, where none of its
    parts is to be resumed.
    """
    found = [file for file in files if not file.path.is_symlink()]
    journaled = {file.epoch for file in found if file.kind == "journal"}
    # A packing that was finished and not recorded is a part like any other.
    parts = [file for file in found if file.kind in ("part", "packed")]
    for file in sorted(parts, key=lambda file: file.epoch or 0, reverse=True):
        if file.epoch in journaled:
            try:
                return PartFile.open(file.path), ""
            except FileNotFoundError:  # its writer lives, and has just given it another name
                continue
    return None, "its part has no journal" if parts else ""


def take_over(
    left: PartFile, part: Path, opening: Opening, check: Callable[[], None]
) -> PartFile | None:
    """Make a part that was left, and its journal, this lease's own; return it, or None where it
    went away meanwhile.

    Args:
        left: what `find_left` found; this function's to close, or is returned.
        part: the path that it gets; its journal is beside it.
        opening: of the packing.
        check: called while bytes are copied; may raise to end it.

    Raises:
        StagingError: the disk is full, or the folder cannot be written; what was left is as it was.
    """
    journal, copy = part.with_suffix(".journal"), part.with_suffix(".copy")
    taken = left
    try:
        if left.path.with_suffix(".journal") != journal:
            shutil.copyfile(left.path.with_suffix(".journal"), journal)
            sync_file(journal)
        if not left.locked:
            remove_staged(copy)
            taken = PartFile.create(copy)
            _copy(left.descriptor, taken.descriptor, _safe_bytes(journal, opening), check)
            os.fsync(taken.descriptor)
        sync_folder(part.parent)
        if not taken.is_named():
            raise FileNotFoundError(errno.ENOENT, "it has another name now")
        taken.rename(part)
        sync_folder(part.parent)
    except BaseException as error:
        taken.close()
        remove_staged(copy)
        if isinstance(error, FileNotFoundError):
            return None
        if isinstance(error, OSError):
            raise staging_error(part, error) from error
        raise
    finally:
        if taken is not left:
            left.close()
    return taken


def _safe_bytes(path: Path, opening: Opening) -> int:
    """Return how much of its part is safe by a journal."""
    journal = Journal.open(path, opening)
    try:
        safe_bytes = 0
        for _, said in journal.checkpoints():
            safe_bytes = said.durable_bytes
        return safe_bytes
    finally:
        journal.close()


def _copy(source: int, target: int, size_bytes: int, check: Callable[[], None]) -> None:
    """Copy the first bytes of a file, by the kernel where it can: it shares them between the files
    where these can be shared.
    """
    position = 0
    by_kernel = hasattr(os, "copy_file_range")
    while position < size_bytes:
        check()
        wanted = min(_COPY_BYTES, size_bytes - position)
        copied = 0
        if by_kernel:
            try:
                copied = os.copy_file_range(source, target, wanted, position, position)
            except OSError as error:
                if error.errno not in _NOT_COPIED_BY_THE_KERNEL:
                    raise
        if not copied:
            by_kernel = False
            piece = os.pread(source, min(wanted, 1 << 20), position)
            copied = os.pwrite(target, piece, position) if piece else 0
        if not copied:  # its writer has cut it: what is missing is not believed
            return
        position += copied
