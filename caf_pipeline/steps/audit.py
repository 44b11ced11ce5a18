"""Checks of what was done, each from other evidence than the step that did it.

`account_for_chunk` holds a chunk's index and manifest against its part of the plan; `fetch_members` fetches some through the
store and compares them with the rows. Both only read.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from caf_pipeline.chunk_state import CLAIMING, ChunkState
from caf_pipeline.errors import CafError
from caf_pipeline.inventory.manifest import PartLocation
from caf_pipeline.ledger.records import Chunk, Location, LocationRow, posting_of
from caf_pipeline.retrieval.reader import Found, fetch
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.account import ACCOUNT_COLUMNS, ChunkAccount, ChunkAuditor
from caf_pipeline.steps.chunk_steps import open_chunk
from caf_pipeline.system.quantities import counted


@dataclass(frozen=True, slots=True)
class FetchedMembers:
    """Members that were fetched through the store, and the keys of those whose bytes differ."""

    tried: int
    mismatched: Sequence[str]


def account_for_chunk(context: RunContext, name: str) -> ChunkAccount:
    """Hold the chunk against its part of the plan: the same objects in the same order, each at the range that it claims."""
    chunk = context.ledger.chunk(name)
    if chunk.state is ChunkState.EMPTY:
        return _account_for_empty(chunk)
    if chunk.state is ChunkState.WITHDRAWN:
        return ChunkAccount(chunk.object_count, 0, 0, chunk.object_count, "")
    try:
        chunk_file = open_chunk(context, chunk)
        account = ChunkAuditor(chunk, chunk_file)
        for batch in chunk_file.manifest().batches(ACCOUNT_COLUMNS):
            account.take(batch)
    except CafError as error:
        if not error.permanent:
            raise
        return ChunkAccount(chunk.object_count, 0, 0, 0, f"it cannot be read: {error}")
    return account.finish(members=chunk.member_count, skipped=chunk.skipped_count, released=chunk.released_count)


def _account_for_empty(chunk: Chunk) -> ChunkAccount:
    agrees = chunk.skipped_count + chunk.released_count == chunk.object_count
    explanation = "" if agrees else f"{counted(chunk.object_count, 'object')} planned, {chunk.skipped_count} skipped"
    return ChunkAccount(chunk.object_count, 0, chunk.skipped_count, chunk.released_count, explanation)


def fetch_members(context: RunContext, name: str, *, members: int = 20) -> FetchedMembers:
    """Fetch this many members (or all of fewer), chosen again each time, as a user would, and compare their SHA-256."""
    chunk = context.ledger.chunk(name)
    if chunk.state in CLAIMING:
        return FetchedMembers(0, [f"none: the chunk is {chunk.state}, and not located"])
    if not chunk.member_count or chunk.state is ChunkState.WITHDRAWN:
        return FetchedMembers(0, [])
    try:
        return _fetch_members(context, chunk, members)
    except CafError as error:
        if not error.permanent:
            raise
        return FetchedMembers(min(members, chunk.member_count), [f"all of {name} ({error})"])


def _fetch_members(context: RunContext, chunk: Chunk, members: int) -> FetchedMembers:
    chosen = random.SystemRandom().sample(range(chunk.member_count), min(members, chunk.member_count))
    mismatched = []
    first = 0  # of the batch, among the members
    manifest = open_chunk(context, chunk).manifest()
    if part := manifest.part():
        return FetchedMembers(1, _mismatched_part(context, chunk, part))
    for batch in manifest.locations():
        here = sorted(number - first for number in chosen if first <= number < first + batch.num_rows)
        first += batch.num_rows
        for row in batch.take(pa.array(here, pa.int64())).to_pylist():
            try:
                found = fetch(
                    context.ledger, context.store, context.source, row["key"], row["object_version"], folder=context.staging()
                )
                digest = hashlib.sha256()
                for piece in found.pieces:
                    digest.update(piece)
                if digest.digest() != row["sha256"]:
                    mismatched.append(row["key"])
            except CafError as error:
                if not error.permanent:
                    raise
                mismatched.append(f"{row['key']} ({error})")
    return FetchedMembers(len(chosen), mismatched)


def _mismatched_part(context: RunContext, chunk: Chunk, part: PartLocation) -> Sequence[str]:
    """Read the part that a chunk has through the store; return its key where the bytes differ."""
    row = LocationRow(
        part.key, part.object_version, part.version_id, part.start_byte, part.end_byte, part.etag, part.last_modified, part.sha256
    )
    try:
        Found(Location(row, chunk.name, posting_of(chunk)), context.store).compare()
    except CafError as error:
        if not error.permanent:
            raise
        return [f"part {part.part.number} of {part.key} ({error})"]
    return []
