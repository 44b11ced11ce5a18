"""Takes over what an earlier run left of a chunk's packing, so that no other run writes where this one resumes.

A part whose lock is free has no writer any more: part and journal get names of this lease's epoch, and packing goes on in
place. Where its writer still lives, asleep or not yet aware that its lease is lost, what is safe by the journal is copied
into files of this epoch, and the old names are removed; the old writer's file is then its own alone.

A crash in between leaves files that the next run finds: a part and a journal belong together where the journal's hashes
are those of the part's bytes (`replay`), whatever they are called.

Source: docs/decisions/0010-the-packing-journal.md.
"""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

from caf_pipeline.context import Workplace
from caf_pipeline.errors import StagingError
from caf_pipeline.packing.journal.format import Journal, Opening, Place
from caf_pipeline.packing.packer import remove_staged
from caf_pipeline.packing.sink import PartFile, staging_error
from caf_pipeline.packing.staging import StagedFile, leftovers
from caf_pipeline.system.atomic_files import sync_folder

_COPY_BYTES: Final = 64 << 20
"""Copied at once, so that a lost lease ends a copy within a second."""

_NOT_COPIED_BY_THE_KERNEL: Final = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)


@dataclass(frozen=True, slots=True)
class Left:
    """What an earlier run left and this one may resume; the part is open.

    Attributes:
        part: open; `locked` tells whether its writer is gone.
        journal: its file.
        end: behind the journal's last entry that holds by itself.
        safe_bytes: of the part, by that entry.
    """

    part: PartFile
    journal: Path
    end: Place
    safe_bytes: int

    @property
    def held_bytes(self) -> int:
        """What is on the disk already of the space that the chunk needs."""
        return self.part.allocated_bytes if self.part.locked else 0


@dataclass(frozen=True, slots=True)
class Claim:
    """A pair of files and how far its journal goes."""

    part: Path
    journal: Path
    end: Place
    safe_bytes: int


def find_left(work: Workplace, name: str, opening: Opening) -> tuple[Left | None, str]:
    """Return the best of what earlier runs left of the chunk's packing, and why it is nothing though something is there."""
    found = leftovers(work, name)
    claims, why = _claims(found, opening)
    for claim in sorted(claims, key=_worth, reverse=True):
        try:
            part = PartFile.open(claim.part)
        except FileNotFoundError:  # its writer lives, and has just given it another name
            why = "its part was renamed meanwhile"
            continue
        return Left(part, claim.journal, claim.end, claim.safe_bytes), ""
    return None, why


def _worth(claim: Claim) -> tuple[int, bool]:
    """Order claims: by bytes; then those of one epoch, for a part without a journal may be a copy that is not on the disk yet."""
    return claim.safe_bytes, claim.part.stem == claim.journal.stem


def _claims(found: Sequence[StagedFile], opening: Opening) -> tuple[list[Claim], str]:
    # A packing that was finished and not recorded is a part like any other.
    parts = [file for file in found if file.kind in ("part", "packed") and not file.path.is_symlink()]
    journals = [file for file in found if file.kind == "journal" and not file.path.is_symlink()]
    epochs = {file.epoch for file in parts} & {file.epoch for file in journals}
    pairs = [(part, journal) for part, journal in product(parts, journals) if part.epoch == journal.epoch]
    # A crash between two renames, or in a copy, leaves files without their counterpart.
    pairs += [
        (part, journal)
        for part, journal in product(parts, journals)
        if part.epoch != journal.epoch and not (part.epoch in epochs and journal.epoch in epochs)
    ]
    claims, why = [], "its part has no journal" if parts and not journals else ""
    for part, journal in pairs:
        claim, broken = _claim(part, journal.path, opening)
        if claim:
            claims.append(claim)
        else:
            why = broken
    return claims, why


def _claim(part: StagedFile, path: Path, opening: Opening) -> tuple[Claim | None, str]:
    try:
        journal = Journal.open(path, opening)
    except StagingError:
        if path.exists():
            raise
        return None, ""  # its writer has just given it another name
    try:
        best = None
        for place, said in journal.checkpoints():
            if said.durable_bytes <= part.size_bytes and (said.outcomes or said.open or best):
                best = Claim(part.path, path, place, said.durable_bytes)
        return best, journal.broken
    finally:
        journal.close()


def take_over(
    work: Workplace, name: str, left: Left, opening: Opening, *, attempt: int, check: Callable[[], None]
) -> tuple[PartFile, Journal] | None:
    """Make part and journal this lease's own; None where they went away meanwhile.

    Args:
        work: the workplace.
        name: of the chunk.
        left: what `find_left` found; its part is this function's to close, or is returned.
        opening: of the packing.
        attempt: the lease's epoch.
        check: called while bytes are copied; may raise to end it.

    Raises:
        StagingError: the disk is full, or the folder cannot be written; what was left is as it was.
    """
    part, journal = work.staging() / f"{name}.{attempt}.part", work.staging() / f"{name}.{attempt}.journal"
    if left.part.locked:
        return _renamed(left, part, journal, opening)
    try:
        return _copied(left, part, journal, opening, check)
    finally:
        left.part.close()


def _renamed(left: Left, part: Path, journal: Path, opening: Opening) -> tuple[PartFile, Journal] | None:
    try:
        if not left.part.is_named():
            raise FileNotFoundError(errno.ENOENT, "it has another name now")
        left.part.rename(part)
        os.rename(left.journal, journal)
        sync_folder(part.parent)
        return left.part, Journal.open(journal, opening)
    except FileNotFoundError:
        left.part.close()
        return None
    except OSError as error:
        left.part.close()
        raise staging_error(part, error) from error
    except BaseException:
        left.part.close()
        raise


def _copied(
    left: Left, part: Path, journal: Path, opening: Opening, check: Callable[[], None]
) -> tuple[PartFile, Journal] | None:
    remove_staged(part, journal)  # of this very lease, from a packing that ended before
    copy = PartFile.create(part)
    try:
        _copy(left.part.descriptor, copy.descriptor, left.safe_bytes, check)
        os.fsync(copy.descriptor)
        with left.journal.open("rb") as source, journal.open("xb") as target:
            _copy(source.fileno(), target.fileno(), left.end.end, check)
            os.fsync(target.fileno())
        sync_folder(part.parent)
        return copy, Journal.open(journal, opening)
    except FileNotFoundError:
        copy.close()
        return None
    except BaseException as error:
        copy.close()
        remove_staged(part, journal)
        if isinstance(error, OSError):
            raise staging_error(part, error) from error
        raise


def _copy(source: int, target: int, size_bytes: int, check: Callable[[], None]) -> None:
    """Copy the first bytes of a file, by the kernel where it can: it shares them between the files where these can be shared."""
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


def left_by_others(work: Workplace, name: str, *, attempt: int) -> Sequence[Path]:
    """Return the files of the chunk's packing under other leases, to be removed once this lease is known to hold.

    To be called before the ledger is asked whether it holds: what a later lease makes is then not among it, however long
    this process sleeps before it removes.
    """
    return [file.path for file in leftovers(work, name) if file.kind != "sealed" and file.epoch != attempt]
