"""Takes over the files of an earlier run, so that no other run writes to them.

The journal is copied to a name of this lease's epoch, then the part is renamed, so a complete pair
always exists. A writer that may be alive keeps its part, and the journaled bytes are copied.
Encrypted files are not taken over: they are read, and sealed again.

Source: docs/decisions/0010-the-packing-journal.md.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from caf_pipeline.encryption.entry_cipher import EntryCipher
from caf_pipeline.packing.journal.earlier import EarlierPacking, open_earlier
from caf_pipeline.packing.journal.format import Journal, Opening
from caf_pipeline.packing.packer import remove_staged
from caf_pipeline.packing.sink import PartFile, staging_error
from caf_pipeline.packing.staging import StagedFile
from caf_pipeline.system.atomic_files import sync_file, sync_folder

_COPY_BYTES: Final = 4 << 20
"""Bytes copied between two checks of the lease."""


def find_resumable_part(files: Sequence[StagedFile]) -> tuple[PartFile | None, str]:
    """Open the part of the newest pair, or return why there is none."""
    regular = [file for file in files if not file.path.is_symlink()]
    journaled = {file.epoch for file in regular if file.kind == "journal"}
    # A finished packing without a record is a part, too.
    parts = [file for file in regular if file.kind in ("part", "packed")]
    for file in sorted(parts, key=lambda file: file.epoch or 0, reverse=True):
        if file.epoch in journaled:
            try:
                return PartFile.open(file.path), ""
            except FileNotFoundError:  # its writer is alive and has just renamed it
                continue
    return None, "its part has no journal" if parts else ""


def find_earlier(
    files: Sequence[StagedFile], opening: Opening, cipher: EntryCipher
) -> tuple[EarlierPacking | None, str]:
    """Open the newest part whose journal opens, or return why there is none."""
    why = ""
    for part, journal in _encrypted_pairs(files):
        earlier, fault = open_earlier(part, journal, opening, cipher)
        if earlier:
            return earlier, ""
        why = why or fault
    has_part = any(file.kind in ("part", "packed") for file in files)
    return None, why or ("its part has no journal" if has_part else "")


def _encrypted_pairs(files: Sequence[StagedFile]) -> Iterator[tuple[Path, Path]]:
    """A run that was killed during the seal may have given its file the final name."""
    regular = [file for file in files if not file.path.is_symlink()]
    journals = [file for file in regular if file.kind == "journal"]
    for journal in sorted(journals, key=lambda file: file.epoch or 0, reverse=True):
        for file in regular:
            is_pair = file.kind in ("part", "packed") and file.epoch == journal.epoch
            if is_pair or file.kind == "sealed":
                yield file.path, journal.path


def take_over(
    old_part: PartFile, part: Path, opening: Opening, check: Callable[[], None]
) -> PartFile | None:
    """Rename or copy a part and its journal to this lease's epoch; None if the part is gone.

    `old_part` is closed, or returned. `check` is called while bytes are copied, and may raise.
    After a StagingError, the old files are unchanged.
    """
    journal, copy = part.with_suffix(".journal"), part.with_suffix(".copy")
    taken = old_part
    try:
        if old_part.path.with_suffix(".journal") != journal:
            shutil.copyfile(old_part.path.with_suffix(".journal"), journal)
            sync_file(journal)
        if not old_part.locked:
            remove_staged(copy)
            taken = PartFile.create(copy)
            safe_bytes = 0
            with contextlib.closing(Journal.open(journal, opening)) as entries:
                for _, checkpoint in entries.checkpoints():
                    safe_bytes = checkpoint.durable_bytes
            _copy(old_part.descriptor, taken.descriptor, safe_bytes, check)
            os.fsync(taken.descriptor)
        sync_folder(part.parent)
        if not taken.is_named():
            raise FileNotFoundError(errno.ENOENT, "it was renamed")
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
        if taken is not old_part:
            old_part.close()
    return taken


def _copy(source: int, target: int, size_bytes: int, check: Callable[[], None]) -> None:
    position = 0
    while position < size_bytes:
        check()
        piece = os.pread(source, min(_COPY_BYTES, size_bytes - position), position)
        if not piece:  # its writer has cut it; the replay notices the missing bytes
            return
        position += os.pwrite(target, piece, position)
