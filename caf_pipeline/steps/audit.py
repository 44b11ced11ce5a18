"""Checks of what was done, each from other evidence than the step that did it.

`account_for_chunk` holds a chunk's index and manifest against its part of the plan; `read_back` fetches members through the
store and compares them with the rows. Both only read.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.context import Workplace
from caf_pipeline.errors import CafError
from caf_pipeline.inventory.manifest import IDENTITY_COLUMNS, row_identity
from caf_pipeline.inventory.plan import read_chunk_objects
from caf_pipeline.ledger.records import Chunk
from caf_pipeline.packing.chunk_reader import ChunkFile
from caf_pipeline.retrieval.reader import fetch
from caf_pipeline.steps.chunk_steps import open_chunk
from caf_pipeline.system.plurals import counted

_MANIFEST_COLUMNS = ("member", "key", *IDENTITY_COLUMNS, "start_byte", "end_byte", "skip_reason")


@dataclass(frozen=True, slots=True)
class ChunkAccount:
    """What became of the objects that the plan put into a chunk; `explanation` says where it does not agree."""

    planned: int
    members: int
    skipped: int
    released: int
    explanation: str

    @property
    def agrees(self) -> bool:
        """Whether each planned object is a member, skipped or released, exactly once."""
        return not self.explanation


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Members that were fetched through the store, and the keys of those whose bytes differ."""

    tried: int
    mismatched: Sequence[str]


def account_for_chunk(work: Workplace, name: str) -> ChunkAccount:
    """Hold the chunk against its part of the plan: the same objects in the same order, each at the range that it claims."""
    chunk = work.ledger.chunk(name)
    if chunk.state is ChunkState.EMPTY:
        return _account_for_empty(chunk)
    chunk_file = open_chunk(work, chunk)
    planned = read_chunk_objects(Path(chunk.plan_folder), chunk.number)
    members = skipped = 0
    for row in chunk_file.manifest_rows(_MANIFEST_COLUMNS):
        wanted = next(planned, None)
        if wanted is None:
            return ChunkAccount(chunk.object_count, members, skipped, 0, f"{row['key']!r} is in the chunk and not in the plan")
        identity = row["key"].encode(), row_identity(row)
        if identity != (wanted.object.key, wanted.object.object_version):
            explanation = f"the plan has {wanted.object.key!r} where the chunk has {row['key']!r}"
            return ChunkAccount(chunk.object_count, members, skipped, 0, explanation)
        if row["skip_reason"] is not None:
            skipped += 1
            continue
        members += 1
        if explanation := _misplaced(chunk_file, row["member"], row["start_byte"], row["end_byte"], row["size_bytes"]):
            return ChunkAccount(chunk.object_count, members, skipped, 0, explanation)
    released = sum(1 for _ in planned)
    return ChunkAccount(
        chunk.object_count, members, skipped, released, _differs_from_ledger(chunk, chunk_file, members, skipped, released)
    )


def _account_for_empty(chunk: Chunk) -> ChunkAccount:
    agrees = chunk.skipped_count + chunk.released_count == chunk.object_count
    explanation = "" if agrees else f"{counted(chunk.object_count, 'object')} planned, {chunk.skipped_count} skipped"
    return ChunkAccount(chunk.object_count, 0, chunk.skipped_count, chunk.released_count, explanation)


def _misplaced(chunk_file: ChunkFile, member: str, start_byte: int, end_byte: int, size_bytes: int) -> str:
    if member not in chunk_file.reader:
        return f"the manifest names member {member!r}, which the index does not have"
    found = chunk_file.reader[member]
    if (found.start_byte, found.end_byte) != (start_byte, end_byte) or end_byte - start_byte != size_bytes:
        return f"the index has member {member!r} at another range than the manifest"
    return ""


def _differs_from_ledger(chunk: Chunk, chunk_file: ChunkFile, members: int, skipped: int, released: int) -> str:
    if members + skipped + released != chunk.object_count:
        return f"{counted(chunk.object_count, 'object')} planned, {members + skipped + released} accounted for"
    if (members, skipped, released) != (chunk.member_count, chunk.skipped_count, chunk.released_count):
        return (
            f"the ledger has {counted(chunk.member_count, 'member')}, {chunk.skipped_count} skipped and {chunk.released_count}"
            " released, "
            f"the chunk {members}, {skipped} and {released}"
        )
    ours = 2  # the head and the manifest
    if len(chunk_file.reader) != members + ours:
        return f"the index has {counted(len(chunk_file.reader), 'member')}, the manifest {members} and our own two"
    return ""


def read_back(work: Workplace, name: str, *, members: int = 20) -> ReadBack:
    """Fetch this many members (or all of fewer), chosen again each time, as a user would, and compare their SHA-256."""
    chunk = work.ledger.chunk(name)
    if not chunk.member_count:
        return ReadBack(0, [])
    choice = random.SystemRandom().sample(range(chunk.member_count), min(members, chunk.member_count))
    chosen = set(choice)
    rows = (
        row
        for row in open_chunk(work, chunk).manifest_rows(("key", *IDENTITY_COLUMNS, "sha256", "skip_reason"))
        if row["skip_reason"] is None
    )
    mismatched = []
    for number, row in enumerate(rows):
        if number in chosen:
            version = row_identity(row)
            try:
                found = fetch(work.ledger, work.store, work.source, row["key"], version, folder=work.staging())
                digest = hashlib.sha256()
                for piece in found.pieces:
                    digest.update(piece)
                if digest.digest() != row["sha256"]:
                    mismatched.append(row["key"])
            except CafError as error:
                if not error.permanent:
                    raise
                mismatched.append(f"{row['key']} ({error})")
    return ReadBack(len(chosen), mismatched)
