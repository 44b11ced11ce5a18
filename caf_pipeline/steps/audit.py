"""Read-only checks of finished steps, each from evidence other than the step itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from caf_pipeline.chunk_state import CLAIMING, ChunkState
from caf_pipeline.errors import CafError, KeyRefused, NoMatchingIdentity
from caf_pipeline.inventory.plan import count_chunk_objects
from caf_pipeline.ledger.records import Location
from caf_pipeline.records import Chunk, posting_of
from caf_pipeline.retrieval.reader import ArchivedObject, fetch
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.account import ACCOUNT_COLUMNS, ChunkAccount, ChunkAuditor
from caf_pipeline.steps.chunk_steps import open_chunk
from caf_pipeline.system.quantities import counted


@dataclass(frozen=True, slots=True)
class FetchedMembers:
    """The number of members fetched, the keys whose bytes differ, and why none were fetched."""

    tried: int
    mismatched: Sequence[str]
    not_run: str = ""


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
    if chunk.encrypted:
        return _account_by_rows(context, chunk)
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


def _account_by_rows(context: RunContext, chunk: Chunk) -> ChunkAccount:
    """Only an identity could open the manifest, so the plan is compared with the ledger's rows."""
    planned = count_chunk_objects(Path(chunk.plan_folder), chunk.number)
    rows = context.ledger.chunks.count_rows(chunk.name)
    explanation = ""
    if planned != chunk.member_count + chunk.skipped_count + chunk.released_count:
        explanation = (
            f"{counted(planned, 'object')} planned, {chunk.member_count} sealed, "
            f"{chunk.skipped_count} skipped and {chunk.released_count} released"
        )
    elif rows != chunk.member_count:
        explanation = f"{counted(chunk.member_count, 'member')}, but {counted(rows, 'row')}"
    return ChunkAccount(
        planned, chunk.member_count, chunk.skipped_count, chunk.released_count, explanation
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
    if chunk.encrypted and not context.settings.encryption.has_identity:
        return FetchedMembers(0, [], "the chunk is encrypted, and this process has no identity")
    mismatched = []
    for row in rows:
        try:
            if chunk.part:
                reader = ArchivedObject(
                    Location(row, chunk.name, posting_of(chunk)), context.opened
                )
            else:
                reader = fetch(
                    context.ledger.lookup,
                    context.opened,
                    context.source,
                    row.key,
                    row.object_version,
                )
            reader.compare()
        except (KeyRefused, NoMatchingIdentity) as error:
            return FetchedMembers(0, [], f"the chunk is encrypted, and {error}")
        except CafError as error:
            if not error.permanent:
                raise
            part = f"part {chunk.part} of " if chunk.part else ""
            mismatched.append(f"{part}{row.key} ({error})")
    return FetchedMembers(len(rows), mismatched)
