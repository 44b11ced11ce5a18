"""Objects as references (URL, offset, length) into the stored chunks, by which others read them
with no code of ours.

A file that ends in .json is what fsspec's ReferenceFileSystem reads (version 1 of kerchunk's
specification); one that ends in .parquet has a row for each object, or for each part of one, in
kerchunk's words (path, offset, size). Folders of Parquet files that fsspec reads lazily are for
Zarr alone: a name in them is the number of an array's chunk, so that no key of ours has one.

Source: kerchunk's reference specification; fsspec.implementations.reference.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from caf_pipeline.errors import CafError, IntegrityError, StoreError
from caf_pipeline.ledger.records import LocatedRange, Location
from caf_pipeline.retrieval.holders import not_given
from caf_pipeline.store.protocol import ChunkReader, PostRecord
from caf_pipeline.system.atomic_files import WholeFile
from caf_pipeline.system.parquet import ROWS_PER_GROUP, translate_errors, write_whole

SCHEMA: Final = pa.schema(
    [
        ("key", pa.string()),
        ("part", pa.int32()),  # from 0, of an object larger than a chunk
        ("parts", pa.int32()),  # how many there are; 1 of any other object
        ("path", pa.string()),  # the URL
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("sha256", pa.binary()),  # of the part
        ("last_modified", pa.timestamp("us", "UTC")),
    ]
)


COMPARED_BYTES: Final = 64 << 10
"""The largest object that is read, and compared, to try a provider: a request takes as long.

Of a larger one it is a byte.
"""


@dataclass
class ReferenceSums:
    """What was written: objects and chunks.

    Of JSON beside them: objects in several parts, which it has no reference for, and references to
    keys that end in '/', which fsspec does not read, since it cuts the '/' off.
    """

    objects: int = 0
    chunks: int = 0
    in_parts: int = 0
    end_in_slash: int = 0


@dataclass(frozen=True, slots=True)
class Reference:
    """Where the bytes of an object, or of a part of one, are."""

    key: str
    part: int
    parts: int
    path: str
    offset: int
    size: int
    sha256: bytes
    last_modified: datetime


def write_references(
    locations: Iterable[Location], store: ChunkReader, path: Path
) -> ReferenceSums:
    """Write references to a file, JSON or Parquet by its name; it appears when it is whole.

    Memory does not grow with objects.

    Where a link is, what it leads to is written.

    The URL of a chunk is that of the best of its providers that gave an object of it right when it
    was asked.

    Raises: StoreUnreachable: no provider gives anything of some chunk now. ObjectMissing: none has
        it. IntegrityError: those that
            have it give other bytes. StagingError: the file cannot be written. StoreError. Then
            there is no new file.
    """
    sums, file = ReferenceSums(), Path(os.path.realpath(path))
    with translate_errors(path):
        if path.suffix == ".parquet":
            write_whole(_batches(_references(locations, store, sums)), file, SCHEMA, durable=True)
        else:
            whole = _without_parts(locations, sums)
            _write_json(_references(whole, store, sums), file)
    return sums


def _without_parts(locations: Iterable[Location], sums: ReferenceSums) -> Iterator[Location]:
    """Yield what one reference can name, and count the other objects."""
    for location in locations:
        if len(location.ranges) == 1:
            sums.end_in_slash += location.row.key.endswith("/")
            yield location
        else:
            sums.objects += 1
            sums.in_parts += 1


def _references(
    locations: Iterable[Location], store: ChunkReader, sums: ReferenceSums
) -> Iterator[Reference]:
    urls: dict[PostRecord, str] = {}
    for location in locations:
        row, ranges = location.row, location.ranges
        sums.objects += 1
        for part, one in enumerate(ranges):
            url = urls.get(one.posting)
            if url is None:
                url = urls[one.posting] = _url(one, store)
                sums.chunks += 1
            size = one.end_byte - one.start_byte
            yield Reference(
                row.key, part, len(ranges), url, one.start_byte, size, one.sha256, row.last_modified
            )


def _url(one: LocatedRange, store: ChunkReader) -> str:
    """Return where a chunk can be read: at a provider that gives this object of it right now, or a
    byte of a larger one.
    """
    failed: dict[str, CafError] = {}
    size_bytes, urls = one.end_byte - one.start_byte, store.urls(one.posting)
    for provider in store.holders(one.posting):
        try:
            is_compared = 0 < size_bytes <= COMPARED_BYTES
            read = (one.start_byte, one.end_byte) if is_compared else (0, 1)
            body = b"".join(store.read(one.posting, *read, provider=provider))
            if is_compared and hashlib.sha256(body).digest() != one.sha256:
                raise IntegrityError("it gives other bytes than those that were archived")
            if provider in urls:
                return urls[provider]
        except (StoreError, IntegrityError) as error:
            failed[provider] = error
    raise not_given(f"an object of chunk {one.chunk}", failed)


def _batches(references: Iterable[Reference]) -> Iterator[pa.RecordBatch]:
    left = iter(references)
    while some := list(islice(left, ROWS_PER_GROUP)):
        yield pa.RecordBatch.from_pylist(
            [{name: getattr(one, name) for name in SCHEMA.names} for one in some], SCHEMA
        )


def _write_json(references: Iterable[Reference], path: Path) -> None:
    with WholeFile(path) as whole:
        before = b'{"version":1,"refs":{\n'
        for one in references:
            where: Any = (
                [one.path, one.offset, one.size] if one.size else ""
            )  # no HTTP range has no bytes
            whole.file.write(
                before + json.dumps(one.key).encode() + b":" + json.dumps(where).encode()
            )
            before = b",\n"
        whole.file.write((before if before.startswith(b"{") else b"") + b"\n}}\n")
