"""Read-only checks of finished steps, each from evidence other than the step itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from caf_pipeline.chunk_state import CLAIMING, ChunkState
from caf_pipeline.errors import CafError
from caf_pipeline.ledger.records import Location, posting_of
from caf_pipeline.retrieval.reader import ArchivedObject, fetch
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.account import ACCOUNT_COLUMNS, ChunkAccount, ChunkAuditor
from caf_pipeline.steps.chunk_steps import open_chunk
from caf_pipeline.system.quantities import counted


@dataclass(frozen=True, slots=True)
class FetchedMembers:
    """The number of members fetched, and the keys whose bytes differ."""

    tried: int
    mismatched: Sequence[str]


def account_for_chunk(context: RunContext, name: str) -> ChunkAccount:
    """Compare the chunk with its part of the plan."""
    chunk = context.ledger.chunks.get(name)
    if chunk.state is ChunkState.EMPTY:
        skipped, released = chunk.skipped_count, chunk.released_count
        planned = counted(chunk.object_count, "object")
        agrees = skipped + released == chunk.object_count
        explanation = "" if agrees else f"{planned} planned, {skipped} skipped"
        return ChunkAccount(chunk.object_count, 0, skipped, released, explanation)
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


def fetch_members(context: RunContext, name: str, *, members: int = 20) -> FetchedMembers:
    """Fetch random members through the store, and compare their SHA-256."""
    chunk = context.ledger.chunks.get(name)
    if chunk.state in CLAIMING:
        return FetchedMembers(0, [f"none: the chunk is {chunk.state}, not located"])
    if not chunk.member_count or chunk.state is ChunkState.WITHDRAWN:
        return FetchedMembers(0, [])
    rows = context.ledger.chunks.some_members(name, members)
    if not rows:
        return FetchedMembers(0, [f"none: chunk {name} has no location"])
    mismatched = []
    for row in rows:
        try:
            if chunk.part:
                reader = ArchivedObject(Location(row, chunk.name, posting_of(chunk)), context.store)
            else:
                reader = fetch(
                    context.ledger.lookup,
                    context.store,
                    context.source,
                    row.key,
                    row.object_version,
                )
            reader.compare()
        except CafError as error:
            if not error.permanent:
                raise
            part = f"part {chunk.part} of " if chunk.part else ""
            mismatched.append(f"{part}{row.key} ({error})")
    return FetchedMembers(len(rows), mismatched)
