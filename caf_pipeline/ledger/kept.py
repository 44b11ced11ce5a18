"""A source's located rows, kept as Parquet files, so that a plan exports only what changed.

    <sha256>.parquet    locations of some chunks, sorted by key; the footer names the chunks

A plan exports again the rows of a chunk whose state changed, or of a missing or damaged file. The
files may be removed at any time.
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
from caf_pipeline.system.secret_files import make_private

KEPT_SCHEMA: Final = STANDING_SCHEMA.append(pa.field("caf_file_id", pa.int64(), nullable=False))

_CHUNKS: Final = "caf.chunks"
_TAKEN_OVER: Final = 2
"""A new file takes over files with up to this many times its rows.

A row is then written about log₂(all rows) times.
"""

Chunks = Mapping[int, tuple[str, int]]
"""By `caf_file_id`: a text that identifies the chunk's state, and its rows."""


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    chunks: Chunks
    rows: int


class KeptLocations:
    """The files of one source, for one process at a time: see `open_kept`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[_File] = []
        self._live: dict[Path, list[int]] = {}
        for path in sorted(folder.iterdir()):
            file = _intact(path)
            if file is not None:
                self._files.append(file)
            elif path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink(missing_ok=True)
        self._files.sort(key=lambda file: file.rows)

    def missing(self, chunks: Chunks) -> list[int]:
        """Return the `chunks` in good standing that no file has. Others no longer count."""
        missing = dict(chunks)
        for file in reversed(self._files):
            self._live[file.path] = [
                chunk for chunk, state in file.chunks.items() if missing.get(chunk) == state
            ]
            for chunk in self._live[file.path]:
                del missing[chunk]
        return list(missing)

    def add(self, exported: Path, added: Sequence[int], chunks: Chunks) -> None:
        """Keep the exported rows of the `added` chunks; drop rows that no longer count."""
        total = sum(chunks[chunk][1] for chunk in added)
        old = []
        for file in self._files:
            live = self._live[file.path]
            if len(live) < len(file.chunks) or (total and file.rows <= _TAKEN_OVER * total):
                old.append(file)
                total += sum(chunks[chunk][1] for chunk in live)
        if total:
            ids = [*added, *(chunk for file in old for chunk in self._live[file.path])]
            self._merge(exported, old, {chunk: chunks[chunk] for chunk in ids})
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
                written.close({_CHUNKS: json.dumps({str(id): chunks[id] for id in chunks})})
                written.publish()
            finally:
                written.abort()
            path = self._folder / f"{_sha256(new)}.parquet"
            rename_durably(new, path)
        self._files.append(_File(path, chunks, written.row_count))

    def _shown(self, query: Query, files: Sequence[_File]) -> Iterator[str]:
        for number, file in enumerate(files):
            query.table(f"kept_{number}", file.path)
            live = pa.array(self._live[file.path], pa.int64())
            query.rows_of(f"live_{number}", pa.table({"caf_file_id": live}))
            yield f"FROM kept_{number} WHERE caf_file_id IN (SELECT caf_file_id FROM live_{number})"

    def count_differing(self, exported: Path) -> int:
        """Return how many rows are only here, or only in `exported`.

        `exported` has the chunks that `missing` did not return.
        """
        with translate_errors(exported), inventory_query(exported, SORT_BUDGET) as query:
            query.table("exported", exported)
            parts = ["SELECT * FROM exported WHERE false", *self._shown(query, self._files)]
            query.view("kept", " UNION ALL ".join(parts))
            count = 0
            for table, other in (("kept", "exported"), ("exported", "kept")):
                rows = query.rows(f"SELECT count(*) FROM (FROM {table} EXCEPT ALL FROM {other})")
                count += int(rows[0][0])
        return count

    def link_into(self, folder: Path) -> None:
        """The links outlive replaced files."""
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
    """Open the files in a folder, which is made if missing. Other processes wait.

    Damaged files are removed. Raises StagingError if the folder cannot be written.
    """
    try:
        make_private(folder)
        with open(folder / _LOCK, "ab") as lock:
            # If a file system has no such locks, two concurrent plans may each export the same
            # rows: more work, no harm.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield KeptLocations(folder)
    except OSError as error:
        raise StagingError(
            f"the folder {folder} cannot be used: {error.strerror or error}",
            hint="make room there, or correct its permissions",
        ) from error


def _intact(path: Path) -> _File | None:
    try:
        if path.suffix != ".parquet" or _sha256(path) != path.stem:
            return None
        with pq.ParquetFile(path) as file:
            described = json.loads((file.metadata.metadata or {})[_CHUNKS.encode()])
            rows, schema = file.metadata.num_rows, file.schema_arrow.remove_metadata()
        chunks = {int(id): (str(name), int(count)) for id, (name, count) in described.items()}
    except (OSError, pa.ArrowException, KeyError, ValueError, TypeError, AttributeError):
        return None
    is_whole = schema == KEPT_SCHEMA and sum(count for _, count in chunks.values()) == rows
    return _File(path, chunks, rows) if is_whole else None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
