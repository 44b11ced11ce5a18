"""Tells an altered row of the ledger from a damaged chunk, by the chunk's own manifest."""

import hashlib
import threading
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

from caf_pipeline.caf.archive import RangeSource
from caf_pipeline.encryption.opened_chunk import OpenedSource
from caf_pipeline.encryption.opening_reader import OpeningReader
from caf_pipeline.errors import CafError
from caf_pipeline.inventory.manifest import (
    IDENTITY_COLUMNS,
    OpenedManifest,
    open_manifest,
    row_identity,
)
from caf_pipeline.ledger.records import LocatedRange
from caf_pipeline.reading.chunk_reader import ChunkFile
from caf_pipeline.records import PostRecord
from caf_pipeline.retrieval.remote_chunk import PIECE_BYTES, AgreedSource, fetch_manifest
from caf_pipeline.store.protocol import ChunkReader

_COLUMNS: Final = ("key", "member", *IDENTITY_COLUMNS, "start_byte", "end_byte", "sha256")

_reading: Final = threading.Lock()  # of the cached manifest and its copies


def is_altered(store: ChunkReader, located: LocatedRange, key: str, object_version: str) -> bool:
    """Return whether a chunk's manifest and bytes contradict the ledger's row of an object.

    False also if the manifest cannot be read, or if its copies differ.
    """
    try:
        with _reading:
            # A reader is hashed by its identity.
            caf, manifest = _opened(store, located.posting, located.chunk)  # type: ignore[arg-type]
            rows = [
                row
                for row in manifest.rows(_COLUMNS, between=(key, key))
                if row["member"] is not None
                and (row["key"], row_identity(row)) == (key, object_version)
            ]
            if not rows:
                return True
            row = rows[0]
            place = row["start_byte"], row["end_byte"], row["sha256"]
            return place != (located.start_byte, located.end_byte, located.sha256) and (
                _sha256_of(caf, row["start_byte"], row["end_byte"]) == row["sha256"]
            )
    except CafError:
        return False


@lru_cache(maxsize=1)  # wrong objects are often neighbours
def _opened(
    store: ChunkReader, posting: PostRecord, chunk: str
) -> tuple[RangeSource, OpenedManifest]:
    opened = None
    if isinstance(store, OpeningReader):
        opened, store = store.open(posting), store.stored
    caf: RangeSource = AgreedSource(store, posting, store.holders(posting))
    if opened:
        caf = OpenedSource(caf, opened)
    with NamedTemporaryFile(prefix="caf-manifest-") as file:
        path = Path(file.name)
        fetch_manifest(caf, ChunkFile(caf, chunk).manifest_member(), path)
        return caf, open_manifest(path)


def _sha256_of(caf: RangeSource, start_byte: int, end_byte: int) -> bytes:
    digest = hashlib.sha256()
    for begin in range(start_byte, end_byte, PIECE_BYTES):
        digest.update(caf.read(begin, min(begin + PIECE_BYTES, end_byte)))
    return digest.digest()
