"""Removes the files of a source on this machine.

A staged file is only removed if this ledger once had its chunk: others may belong to a lost ledger,
posted, but not uploaded yet.
"""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from caf_pipeline.errors import HeldByOther, StagingError
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.packing.packer import remove_staged
from caf_pipeline.packing.staging import StagedFile, files_in
from caf_pipeline.settings import Settings
from caf_pipeline.system.folder_lock import alone_in

INVENTORIES: Final = "inventories"
_SOURCE_FOLDERS: Final = ("plans", INVENTORIES, "located")


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The files of a source; `kept` are those of chunks that this ledger never had."""

    folders: Sequence[Path]
    staged: Sequence[StagedFile]
    kept: Sequence[StagedFile]

    @property
    def snapshots(self) -> int:
        return sum(
            len([*folder.glob("*.parquet")])
            for folder in self.folders
            if folder.parent.name == INVENTORIES
        )

    @property
    def staged_bytes(self) -> int:
        return sum(file.size_bytes for file in self.staged)


def find_leftovers(settings: Settings, ledger: Ledger, source: str) -> Leftovers:
    """Return the files of a source with a valid name."""
    candidates = [settings.home / folder / source for folder in _SOURCE_FOLDERS]
    try:
        folders = [path for path in candidates if path.is_symlink() or path.exists()]
        files = files_in(settings.staging_folder) if settings.staging_folder.is_dir() else []
    except OSError as error:
        raise StagingError(
            f"{error.filename} cannot be read: {error.strerror}", hint="correct its permissions"
        ) from error
    for path in folders:
        if path.parent.resolve() != settings.home.resolve() / path.parent.name:
            raise StagingError(
                f"{path.parent} is a link to another folder", hint=f"remove {path} yourself"
            )
    staged = [
        file for file in files if (chunk := ChunkId.parse(file.chunk)) and chunk.source == source
    ]
    held = ledger.leases.ever_held({chunk_lease(file.chunk) for file in staged})
    return Leftovers(
        folders=folders,
        staged=[file for file in staged if chunk_lease(file.chunk) in held],
        kept=[file for file in staged if chunk_lease(file.chunk) not in held],
    )


@contextlib.contextmanager
def no_writers(leftovers: Leftovers) -> Iterator[None]:
    """Keep other processes out; raises HeldByOther."""
    with contextlib.ExitStack() as stack:
        for folder in leftovers.folders:
            if not _is_folder(folder):
                continue
            with _as_staging_error(folder):
                is_alone = stack.enter_context(alone_in(folder))
            if not is_alone:
                raise HeldByOther(
                    f"a run is writing into {folder}",
                    holder="",
                    hint="wait for that run, or end it first",
                )
        yield


def remove_leftovers(leftovers: Leftovers) -> None:
    """Remove the files, not the targets of links. Idempotent."""
    for path in [*leftovers.folders, *(file.path for file in leftovers.staged)]:
        with _as_staging_error(path), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path) if _is_folder(path) else remove_staged(path)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


@contextlib.contextmanager
def _as_staging_error(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StagingError(
            f"{path} cannot be removed: {error.strerror}",
            hint="correct its permissions, then repeat the command",
        ) from error
