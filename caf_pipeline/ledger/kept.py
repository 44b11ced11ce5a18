"""What the ledger has located of a source, kept as Parquet files, so that a plan asks the database
only for what changed.

    <sha256>.parquet    the locations of some chunks, sorted by key; which chunks, its footer says

The database decides each time: it names the chunks in good standing, when each was located and how
many rows it has, at the same moment as what is claimed and skipped. The rows of such a chunk never
change: they come with the move to `located`, and nothing takes them while the chunk is in good
standing. What a file has of a chunk that the database describes otherwise is left out, and asked
for again; so is what was in a file that is gone, or whose bytes do not have the hash of its name.
The files may be removed at any time.

A new file takes over those that are not much larger, so that there are few, however many chunks
there are.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from caf_pipeline.errors import StagingError
from caf_pipeline.inventory.ledger_rows import STANDING_SCHEMA
from caf_pipeline.inventory.snapshot import SORT_BUDGET, inventory_query, sorted_by_key
from caf_pipeline.system.atomic_files import rename_durably
from caf_pipeline.system.parquet import Query, WholeParquet, translate_errors

KEPT_SCHEMA: Final = STANDING_SCHEMA.append(pa.field("caf_file_id", pa.int64(), nullable=False))

_CHUNKS: Final = "caf.chunks"
_TAKEN_OVER: Final = 2
"""A new file takes over others of up to so many times its rows: a row is written again about log₂
of all rows times.
"""

Chunks = Mapping[int, tuple[str, int]]
"""By `caf_file_id`: what tells a chunk from any other, and its rows."""


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    chunks: Chunks
    rows: int


class KeptLocations:
    """The files of one source, in a folder of their own.

    One process at a time has them: see `open_kept`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[_File] = []
        self._live: dict[Path, list[int]] = {}
        for path in sorted(folder.iterdir()):
            file = _sound(path)
            if file is not None:
                self._files.append(file)
            elif path.name != _LOCK:
                _remove(path)
        self._files.sort(key=lambda file: file.rows)

    def missing(self, chunks: Chunks) -> list[int]:
        """Return which of these chunks, all that are in good standing, no file has; the files'
        other chunks count no more.
        """
        wanted = dict(chunks)
        for file in reversed(self._files):
            self._live[file.path] = [
                one for one, said in file.chunks.items() if wanted.get(one) == said
            ]
            for one in self._live[file.path]:
                del wanted[one]
        return list(wanted)

    def add(self, exported: Path, added: Sequence[int], chunks: Chunks) -> None:
        """Keep what `missing` named, exported as KEPT_SCHEMA; drop what counts no more.

        Raises:
            StagingError: the disk has no room.
        """
        total = sum(chunks[one][1] for one in added)
        old = []
        for file in self._files:
            live = self._live[file.path]
            if len(live) < len(file.chunks) or (total and file.rows <= _TAKEN_OVER * total):
                old.append(file)
                total += sum(chunks[one][1] for one in live)
        if total:
            names = [*added, *(one for file in old for one in self._live[file.path])]
            self._merge(exported, old, {one: chunks[one] for one in names})
        for file in old:
            file.path.unlink(missing_ok=True)
            self._files.remove(file)

    def _merge(self, exported: Path, old: Sequence[_File], chunks: Chunks) -> None:
        new = self._folder / ".new.parquet"
        with translate_errors(new), inventory_query(new, SORT_BUDGET) as query:
            query.table("exported", exported)
            query.view("listed", " UNION ALL ".join(["FROM exported", *self._shown(query, old)]))
            written = WholeParquet(new, KEPT_SCHEMA)
            try:
                for batch in sorted_by_key(query, SORT_BUDGET):
                    written.write(batch.select(KEPT_SCHEMA.names).cast(KEPT_SCHEMA))
                written.close(
                    {_CHUNKS: json.dumps({str(one): said for one, said in chunks.items()})}
                )
                written.publish()
            finally:
                written.abort()
            path = self._folder / f"{_sha256(new)}.parquet"
            rename_durably(new, path)
        self._files.append(_File(path, chunks, written.row_count))

    def _shown(self, query: Query, files: Sequence[_File]) -> Iterator[str]:
        """Let a query have files; yield the query of what counts in each."""
        for number, file in enumerate(files):
            query.table(f"kept_{number}", file.path)
            query.rows_of(
                f"live_{number}",
                pa.table({"caf_file_id": pa.array(self._live[file.path], pa.int64())}),
            )
            yield f"FROM kept_{number} WHERE caf_file_id IN (SELECT caf_file_id FROM live_{number})"

    def count_differing(self, exported: Path) -> int:
        """Return how many rows are only in these files or only in what was exported of the chunks
        that `missing` did not name.
        """
        with translate_errors(exported), inventory_query(exported, SORT_BUDGET) as query:
            query.table("exported", exported)
            query.view(
                "kept",
                " UNION ALL ".join(
                    ["SELECT * FROM exported WHERE false", *self._shown(query, self._files)]
                ),
            )
            (more,), (less,) = (
                query.rows(f"SELECT count(*) FROM (FROM {one} EXCEPT ALL FROM {other})")[0]
                for one, other in (("kept", "exported"), ("exported", "kept"))
            )
        return int(more + less)

    def link_into(self, folder: Path) -> None:
        """Let a folder have the files, which stay there when they are replaced here."""
        for file in self._files:
            link = folder / file.path.name
            try:
                os.link(file.path, link)
            except OSError:  # another disk, or one without hard links
                with translate_errors(link):
                    shutil.copyfile(file.path, link)


_LOCK: Final = ".lock"


@contextlib.contextmanager
def open_kept(folder: Path) -> Iterator[KeptLocations]:
    """Give the files in a folder, which is made where it is missing; another process that wants
    them waits meanwhile.

    Files are read whole, and those that are not as they were written are removed.

    Raises:
        StagingError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / _LOCK, "ab") as lock:
            # Where a file system has no such locks, two plans at once may each export what the
            # other does: more work, no harm.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield KeptLocations(folder)
    except OSError as error:
        raise StagingError(
            f"the folder {folder} cannot be used: {error.strerror or error}",
            hint="make room there, or mend its permissions",
        ) from error


def _sound(path: Path) -> _File | None:
    """Return a file that is as it was written; None for anything else, as what another version
    wrote.
    """
    try:
        if path.suffix != ".parquet" or _sha256(path) != path.stem:
            return None
        with pq.ParquetFile(path) as file:
            described = json.loads((file.metadata.metadata or {})[_CHUNKS.encode()])
            rows, schema = file.metadata.num_rows, file.schema_arrow.remove_metadata()
        chunks = {int(one): (str(name), int(count)) for one, (name, count) in described.items()}
    except (OSError, pa.ArrowException, KeyError, ValueError, TypeError, AttributeError):
        return None
    is_whole = schema == KEPT_SCHEMA and sum(count for _, count in chunks.values()) == rows
    return _File(path, chunks, rows) if is_whole else None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
