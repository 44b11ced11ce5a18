"""The ledger's rows as Arrow batches: to COPY's binary format, and from rows to Parquet.

Lookups do not import this module: pyarrow loads as slowly as the rest of the ledger. Source: COPY
in the PostgreSQL 18 manual.

A source's located rows are kept as Parquet files, so that the plan of a whole inventory exports
only what changed:

    <sha256>.parquet    locations of some chunks, sorted by key; the footer names the chunks

A plan exports again the rows of a chunk that lost or got rows, or of a missing or damaged
file. The files may be removed at any time.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.errors import StagingError
from caf_pipeline.inventory.headers import HEADERS, ID_BYTES, ObjectHeaders
from caf_pipeline.inventory.ledger_rows import EXCEPTION_SCHEMA, LOCATED_SCHEMA, STANDING_SCHEMA
from caf_pipeline.inventory.snapshot import (
    SORT_BUDGET,
    inventory_query,
    object_versions,
    sorted_by_key,
)
from caf_pipeline.system.atomic_files import rename_durably
from caf_pipeline.system.parquet import Query, WholeParquet, translate_errors
from caf_pipeline.system.secret_files import make_private

_IDENTITY: Final = ("version_id", "etag", "size_bytes", "rewritten_at")

CLAIM: Final = ("caf_file_id", "file_path", *_IDENTITY, "last_modified")

_UNCHANGED: Final = (
    "start_byte",
    "end_byte",
    "last_modified",
    "sha256",
    "crc64nvme",
    "s3_checksum",
)

LOCATION: Final = ("file_path", *_IDENTITY, *_UNCHANGED, "header_set")

HEADER_SET: Final = ("header_set", *HEADERS, "user_metadata")
"""User metadata is JSON text."""

SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
"""Signature, no flags, no extension."""

TRAILER: Final = b"\xff\xff"

_NULL: Final = b"\xff" * 4
_POSTGRES_EPOCH_MICROSECONDS: Final = 946_684_800_000_000  # 2000-01-01 UTC, since 1970
_NEVER: Final = -(2**63)
"""'-infinity' in COPY's binary format. Source: timestamp.h of Postgres."""

_GATHERED_BYTES: Final = 4 << 20
"""4,000 rows took 10 % longer; larger batches gained nothing."""

KEPT_SCHEMA: Final = STANDING_SCHEMA.append(pa.field("caf_file_id", pa.int64(), nullable=False))

_EXPORTS: Final = {
    "standing": (STANDING_SCHEMA, ["standing", "reason"]),
    "kept": (KEPT_SCHEMA, ["standing", "caf_file_id"]),
    "exceptions": (EXCEPTION_SCHEMA, ["object_version"]),
    "located": (LOCATED_SCHEMA, ["object_version"]),
}


def as_rows(same: Sequence[bytes], batch: pa.RecordBatch) -> pa.Buffer:
    """Return rows in COPY's binary format, each beginning with the fields `same`.

    Integers become `int8`, timestamps in microseconds `timestamptz`.
    """
    count = (len(same) + batch.num_columns).to_bytes(2, "big")
    begin = count + b"".join(len(value).to_bytes(4, "big") + value for value in same)
    fields = [piece for column in batch.columns for piece in _as_fields(column)]
    rows = pc.binary_join_element_wise(
        pa.scalar(begin), *fields, b"", null_handling="replace", null_replacement=_NULL
    )
    return pc.binary_join(pa.ListArray.from_arrays([0, len(rows)], rows), b"")[0].as_buffer()


def _as_fields(values: pa.Array) -> Iterator[pa.Array]:
    if pa.types.is_integer(values.type) or pa.types.is_timestamp(values.type):
        begins = _POSTGRES_EPOCH_MICROSECONDS if pa.types.is_timestamp(values.type) else 0
        field = np.empty(len(values), [("length", ">i4"), ("value", ">i8")])
        field["length"] = field["value"].itemsize
        field["value"] = values.cast(pa.int64()).fill_null(0).to_numpy() - begins
        yield _null_as_in(values, field)
    else:
        texts = values.cast(pa.binary())
        yield _null_as_in(values, pc.binary_length(texts).fill_null(0).to_numpy().astype(">i4"))
        yield texts.fill_null(b"")


def _null_as_in(values: pa.Array, fields: "np.ndarray[Any, Any]") -> pa.Array:
    ends = np.arange(len(fields) + 1, dtype=np.int32) * np.int32(fields.itemsize)
    whole = pa.Array.from_buffers(
        pa.binary(), len(fields), [None, pa.py_buffer(ends), pa.py_buffer(fields)]
    )
    return pc.if_else(values.is_valid(), whole, None) if values.null_count else whole


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    gathered: list[pa.RecordBatch] = []
    size_bytes = 0
    for batch in batches:
        gathered.append(batch)
        size_bytes += batch.nbytes
        if size_bytes >= _GATHERED_BYTES:
            yield pa.concat_batches(gathered)
            gathered, size_bytes = [], 0
    if gathered:
        yield pa.concat_batches(gathered)


def claim_batches(
    chunks: Mapping[int, int], identities: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield rows of `CLAIM`. `chunks` maps chunk numbers to `caf_file_id`."""
    numbers, ids = pa.array(list(chunks), pa.int32()), pa.array(list(chunks.values()), pa.int64())
    for batch in _gathered(identities):
        is_rewritten = pc.not_equal(batch["object_version"], object_versions(batch))
        rewritten_at = pc.if_else(is_rewritten, batch["last_modified"], None)
        columns = [
            ids.take(pc.index_in(batch["chunk_number"], numbers)),
            batch["key"].cast(pa.string()),
            batch["version_id"].fill_null(""),
            batch["etag"],
            batch["size_bytes"],
            _or_never(rewritten_at),
            batch["last_modified"],
        ]
        yield pa.record_batch(columns, names=CLAIM)


def location_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield rows of `LOCATION`, without object parts."""
    for batch in _gathered(batches):
        columns = [
            batch["key"],
            batch["version_id"].fill_null(""),
            batch["etag"],
            pc.subtract(batch["end_byte"], batch["start_byte"]),
            _or_never(batch["rewritten_at"]),
            *(batch[name] for name in _UNCHANGED),
            header_set_ids(batch)[0],
        ]
        yield pa.record_batch(columns, names=LOCATION)


def _or_never(rewritten_at: pa.Array) -> pa.Array:
    return pc.subtract(rewritten_at.cast(pa.int64()), _POSTGRES_EPOCH_MICROSECONDS).fill_null(
        _NEVER
    )


def header_set_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield rows of `HEADER_SET`, each set once a batch."""
    for batch in _gathered(batches):
        ids, firsts = header_set_ids(batch)
        rows = batch.select([*HEADERS, "user_metadata"]).take(firsts)
        metadata = [
            json.dumps({name: value or "" for name, value in pairs})
            for pairs in rows["user_metadata"].to_pylist()
        ]
        texts = [rows[name].fill_null("") for name in HEADERS]
        yield pa.record_batch(
            [ids.take(firsts), *texts, pa.array(metadata, pa.string())], names=HEADER_SET
        )


def header_set_ids(batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
    """Return each row's header set id (null without metadata), and each set's first row.

    A manifest sorts user metadata like `ObjectHeaders.id`.
    """
    metadata = batch["user_metadata"]
    pairs = pc.binary_join_element_wise(metadata.keys, metadata.items.fill_null(""), "", "\0")
    joined_pairs = pc.binary_join(pa.ListArray.from_arrays(metadata.offsets, pairs), "")
    joined = pc.binary_join_element_wise(
        *(batch[name].fill_null("") for name in HEADERS), joined_pairs, "\0"
    )
    encoded = pc.if_else(metadata.is_valid(), joined, None).dictionary_encode()
    distinct = len(encoded.dictionary)
    _, firsts = np.unique(encoded.indices.fill_null(distinct).to_numpy(), return_index=True)
    digests = [
        hashlib.sha256(text).digest()[:ID_BYTES]
        for text in encoded.dictionary.cast(pa.binary()).to_pylist()
    ]
    return pa.array(digests, pa.binary()).take(encoded.indices), pa.array(firsts[:distinct])


def batch_of_headers(headers: ObjectHeaders) -> pa.RecordBatch:
    """Return a batch of one row, with user metadata."""
    columns = [pa.array([getattr(headers, name)]) for name in HEADERS]
    metadata = pa.array([sorted(headers.user_metadata.items())], pa.map_(pa.string(), pa.string()))
    return pa.record_batch([*columns, metadata], names=[*HEADERS, "user_metadata"])


def write_export(
    what: str, path: Path, fetched: Iterable[tuple[Mapping[str, Any], Sequence[tuple[Any, ...]]]]
) -> int:
    """Write an export as Parquet, replacing an older file; return the number of rows.

    `what` is a key of `_EXPORTS`. `fetched` yields rows with the values of the columns that they
    lack.
    """
    schema, dictionaries = _EXPORTS[what]
    # No `WholeFile`: only this run reads the file, so a sync of gigabytes is not needed.
    part = path.with_name(path.name + ".part")
    count = 0
    try:
        with closing(pq.ParquetWriter(part, schema, use_dictionary=dictionaries)) as writer:
            for same, rows in fetched:
                values = zip(*rows, strict=True)
                columns = [
                    pa.repeat(pa.scalar(same[field.name], field.type), len(rows))
                    if field.name in same
                    else pa.array(next(values), field.type)
                    for field in schema
                ]
                writer.write_batch(pa.record_batch(columns, schema=schema))
                count += len(rows)
        part.replace(path)
    except OSError as error:
        raise StagingError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="check that its folder exists and is writable, and that the disk has room",
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return count


_CHUNKS: Final = "caf.chunks"


_TAKEN_OVER: Final = 2
"""A new file takes over files with up to this many times its rows.

A row is then written about log₂(all rows) times.
"""


Chunks = Mapping[int, tuple[str, int]]
"""By `caf_file_id`: the name of the chunk's set of rows, and their number."""


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
                chunk for chunk, rows in file.chunks.items() if missing.get(chunk) == rows
            ]
            for chunk in self._live[file.path]:
                del missing[chunk]
        return list(missing)

    def add(self, exported: Path, chunks: Chunks) -> None:
        """Keep the exported rows of `chunks`; drop rows that no longer count.

        The new file has each chunk's number of exported rows, whatever `chunks` says.
        """
        added = _count_by_chunk(exported)
        total = sum(added.values())
        old = []
        for file in self._files:
            live = self._live[file.path]
            if len(live) < len(file.chunks) or (total and file.rows <= _TAKEN_OVER * total):
                old.append(file)
                total += sum(chunks[chunk][1] for chunk in live)
        if total:
            kept = {chunk: (chunks[chunk][0], rows) for chunk, rows in added.items()}
            kept |= {chunk: chunks[chunk] for file in old for chunk in self._live[file.path]}
            self._merge(exported, old, kept)
        for file in old:
            self._files.remove(file)
            if file.path not in {new.path for new in self._files}:  # the same rows again
                file.path.unlink(missing_ok=True)

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


def _count_by_chunk(exported: Path) -> Counter[int]:
    counts: Counter[int] = Counter()
    with pq.ParquetFile(exported) as file:
        for batch in file.iter_batches(columns=["caf_file_id"]):
            for chunk in pc.value_counts(batch["caf_file_id"]).to_pylist():
                counts[chunk["values"]] += chunk["counts"]
    return counts


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
