"""Checks of what was done, each from other evidence than the step that did it.

`account_for_chunk` holds a chunk's index and manifest against its part of the plan; `fetch_members`
fetches some through the store and compares them with the rows. Both only read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from caf_pipeline.chunk_state import CLAIMING, ChunkState
from caf_pipeline.errors import CafError
from caf_pipeline.ledger.records import Chunk, Location, posting_of
from caf_pipeline.retrieval.reader import ArchivedObject, fetch
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
    """Hold the chunk against its part of the plan: the same objects in the same order, each at the
    range that it claims.
    """
    chunk = context.ledger.chunks.get(name)
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
    return account.finish(
        members=chunk.member_count, skipped=chunk.skipped_count, released=chunk.released_count
    )


def _account_for_empty(chunk: Chunk) -> ChunkAccount:
    agrees = chunk.skipped_count + chunk.released_count == chunk.object_count
    explanation = (
        ""
        if agrees
        else f"{counted(chunk.object_count, 'object')} planned, {chunk.skipped_count} skipped"
    )
    return ChunkAccount(
        chunk.object_count, 0, chunk.skipped_count, chunk.released_count, explanation
    )


def fetch_members(context: RunContext, name: str, *, members: int = 20) -> FetchedMembers:
    """Fetch this many members (or all of fewer), chosen again each time, as a user would, and
    compare their SHA-256.
    """
    chunk = context.ledger.chunks.get(name)
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
    rows = context.ledger.chunks.some_members(chunk.name, members)
    if not rows:
        return FetchedMembers(0, [f"none: chunk {chunk.name} has no location"])
    mismatched = []
    for row in rows:
        try:
            if chunk.part:
                found = ArchivedObject(Location(row, chunk.name, posting_of(chunk)), context.store)
            else:
                found = fetch(
                    context.ledger.lookup,
                    context.store,
                    context.source,
                    row.key,
                    row.object_version,
                )
            found.compare()
        except CafError as error:
            if not error.permanent:
                raise
            mismatched.append(
                f"part {chunk.part} of {row.key} ({error})"
                if chunk.part
                else f"{row.key} ({error})"
            )
    return FetchedMembers(len(rows), mismatched)
