"""Exports references (URL, offset, length) into stored chunks, which others read without our code.

A .json file is for fsspec's ReferenceFileSystem (version 1 of kerchunk's format). A .parquet file
has a row for each object or part of an object, with kerchunk's column names. fsspec's lazy Parquet
folders work for Zarr alone.

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

from caf_pipeline.errors import CafError, IntegrityError, StoreError, UsageError
from caf_pipeline.ledger.records import LocatedRange, Location, LocationLookups
from caf_pipeline.records import PostRecord
from caf_pipeline.retrieval.holders import unreadable
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.system.atomic_files import WholeFile
from caf_pipeline.system.parquet import ROWS_PER_GROUP, translate_errors, write_whole

SCHEMA: Final = pa.schema(
    [
        ("key", pa.string()),
        ("part", pa.int32()),  # from 0, of a split object
        ("parts", pa.int32()),  # 1 if the object is not split
        ("path", pa.string()),  # the URL
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("sha256", pa.binary()),  # of the part
        ("last_modified", pa.timestamp("us", "UTC")),
    ]
)


COMPARED_BYTES: Final = 64 << 10
"""Larger objects are tested by one byte, which takes as long."""


@dataclass
class ReferenceSums:
    """Counts of objects and chunks.

    JSON lacks split objects (`in_parts`). fsspec strips the '/' at the end of keys
    (`end_in_slash`).
    """

    objects: int = 0
    chunks: int = 0
    in_parts: int = 0
    end_in_slash: int = 0


@dataclass(frozen=True, slots=True)
class Reference:
    """The place of an object, or of one part."""

    key: str
    part: int
    parts: int
    path: str
    offset: int
    size: int
    sha256: bytes
    last_modified: datetime


def require_plain(lookup: LocationLookups, source: str) -> None:
    """Raise UsageError if a chunk is encrypted."""
    if chunk := lookup.encrypted_chunk(source):
        raise UsageError(
            f"references are URLs of plain bytes, and chunk {chunk} of source '{source}' is "
            "encrypted",
            hint="'caf restore' writes the objects of an encrypted chunk",
        )


def write_references(
    locations: Iterable[Location], store: ChunkReader, path: Path
) -> ReferenceSums:
    """Write a JSON or Parquet file, by its suffix; it appears when complete.

    A chunk's URL is that of its best provider that just returned an object of it correctly. Memory
    is constant. Raises StagingError, or a chunk's error.
    """
    sums, file = ReferenceSums(), Path(os.path.realpath(path))
    with translate_errors(path):
        is_parquet = path.suffix == ".parquet"
        references = _references(locations, store, sums, has_parts=is_parquet)
        if is_parquet:
            batches = (
                pa.RecordBatch.from_pylist(
                    [{name: getattr(row, name) for name in SCHEMA.names} for row in rows], SCHEMA
                )
                for rows in iter(lambda: list(islice(references, ROWS_PER_GROUP)), [])
            )
            write_whole(batches, file, SCHEMA, durable=True)
        else:
            with WholeFile(file) as whole:
                separator = b'{"version":1,"refs":{\n'
                for reference in references:
                    # An HTTP range cannot be empty.
                    target: Any = (
                        [reference.path, reference.offset, reference.size] if reference.size else ""
                    )
                    key = json.dumps(reference.key).encode()
                    whole.file.write(separator + key + b":" + json.dumps(target).encode())
                    separator = b",\n"
                whole.file.write((separator if separator.startswith(b"{") else b"") + b"\n}}\n")
    return sums


def _references(
    locations: Iterable[Location], store: ChunkReader, sums: ReferenceSums, *, has_parts: bool
) -> Iterator[Reference]:
    urls: dict[PostRecord, str] = {}
    for location in locations:
        row, ranges = location.row, location.ranges
        sums.objects += 1
        if not has_parts:
            if len(ranges) > 1:
                sums.in_parts += 1
                continue
            sums.end_in_slash += row.key.endswith("/")
        for part, located in enumerate(ranges):
            url = urls.get(located.posting)
            if url is None:
                url = urls[located.posting] = _url(located, store)
                sums.chunks += 1
            yield Reference(
                row.key,
                part,
                len(ranges),
                url,
                located.start_byte,
                located.end_byte - located.start_byte,
                located.sha256,
                row.last_modified,
            )


def _url(located: LocatedRange, store: ChunkReader) -> str:
    failed: dict[str, CafError] = {}
    size_bytes, urls = located.end_byte - located.start_byte, store.urls(located.posting)
    for provider in store.holders(located.posting):
        try:
            is_compared = 0 < size_bytes <= COMPARED_BYTES
            start_byte, end_byte = (located.start_byte, located.end_byte) if is_compared else (0, 1)
            body = b"".join(store.read(located.posting, start_byte, end_byte, provider=provider))
            if is_compared and hashlib.sha256(body).digest() != located.sha256:
                raise IntegrityError("its bytes are not the archived bytes")
            if provider in urls:
                return urls[provider]
        except (StoreError, IntegrityError) as error:
            failed[provider] = error
    raise unreadable(f"an object of chunk {located.chunk}", failed)
