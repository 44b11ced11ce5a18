"""Packs a chunk's part of its plan into staging: whose files it goes into, the room for them, and
what stays of a failure.

What an earlier run has packed of the chunk is resumed. Source: "Promises" 2 and 4 in
docs/explanation/design.md; docs/decisions/0010-the-packing-journal.md.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from caf_pipeline.caf.archive import DEFAULT_LIMITS
from caf_pipeline.caf.merkle import type_of_root
from caf_pipeline.errors import LedgerError, ObjectReadFailed
from caf_pipeline.inventory.manifest import ChunkIdentity
from caf_pipeline.inventory.plan import (
    ChunkPlan,
    plan_hash,
    read_chunk_objects,
    read_chunk_plan,
    read_terms,
)
from caf_pipeline.ledger.records import Chunk
from caf_pipeline.packing.journal.format import Journal
from caf_pipeline.packing.journal.takeover import find_left, take_over
from caf_pipeline.packing.packer import PackedChunk, Packer, remove_staged
from caf_pipeline.packing.sink import PartFile
from caf_pipeline.packing.staging import leftovers, make_room, write_packed
from caf_pipeline.packing.unreadable import give_up_on, named_together
from caf_pipeline.run_context import RunContext
from caf_pipeline.store.protocol import Lease
from caf_pipeline.system.atomic_files import sync_folder


def pack_again(context: RunContext, lease: Lease, chunk: Chunk) -> PackedChunk:
    """Pack into files of this lease's epoch, so that a run that lost its lease cannot write into
    them.

    What an earlier run has packed of the chunk is resumed; the rest of it in staging is removed.
    Where room is short, kept files of located chunks are removed first.

    Raises: StagingError: no room. SourceError: the run cannot go on. What is safe by the journal
        stays, and the next run goes on
            with it. ObjectReadFailed: at least one object cannot be read, and too few runs have
            failed on it to skip it.
    """
    staging, folder = context.staging(), Path(chunk.plan_folder)
    plan = read_chunk_plan(folder, chunk.number)
    packer = packer_of(context, lease, chunk, plan)
    part_path, journal_path, spool = (
        staging / f"{chunk.name}.{lease.epoch}.{kind}" for kind in ("part", "journal", "manifest")
    )
    part, journal, why = _files_to_pack_into(
        context, lease, chunk, packer, plan.expected_size_bytes
    )
    try:
        try:
            packed = packer.pack(read_chunk_objects(folder, chunk.number), part, spool, journal)
        except ObjectReadFailed as error:
            raise named_together(context, chunk, error) from error
        finally:
            journal.close()
        lease.check()
        write_packed(
            context,
            chunk.name,
            lease.epoch,
            part_path,
            replace(packed, not_resumed=packed.not_resumed or why),
        )
    except BaseException:
        if not packer.kept_bytes:
            remove_staged(part_path, journal_path)
        _reserve_what_stays(
            context, lease, chunk.name, packer.kept_bytes and packer.kept_bytes + journal.size_bytes
        )
        raise
    finally:
        remove_staged(spool)
    return packed


def packer_of(context: RunContext, lease: Lease, chunk: Chunk, plan: ChunkPlan) -> Packer:
    """Return what packs this chunk, under this lease."""
    terms = read_terms(Path(chunk.plan_folder))
    # Headers, which the plan did not know, must not keep out an object that is larger than the
    # limit and has its chunk to itself.
    least_limit = DEFAULT_LIMITS.max_bytes if plan.object_count == 1 else plan.expected_size_bytes
    packer = Packer(
        plan,
        _identity(chunk, terms),
        context.objects,
        context.settings.packing,
        # What was sealed is packed once more to come out the same, whatever is set by now.
        proof_type=context.store.proof_type
        if chunk.merkle_root is None
        else type_of_root(chunk.merkle_root),
        limit_bytes=max(int(terms["limit_size"]), least_limit),
        give_up_on=lambda planned: give_up_on(context, chunk, packer, planned),
        progress=_held_progress(context, lease),
    )
    return packer


def _files_to_pack_into(
    context: RunContext, lease: Lease, chunk: Chunk, packer: Packer, size_bytes: int
) -> tuple[PartFile, Journal, str]:
    """Return part and journal of this lease, reserved for: those of an earlier run, or new ones and
    why they are new.
    """
    name, staging = chunk.name, context.staging()
    part_path, journal_path = (
        staging / f"{name}.{lease.epoch}.{kind}" for kind in ("part", "journal")
    )
    # What is to be removed is listed before the reservation, which a lost lease does not get: what
    # a later lease makes is not in the list, however long this process sleeps before it removes.
    files = leftovers(context, name)
    left, why = find_left(files)
    try:
        make_room(
            context,
            name,
            size_bytes,
            held_bytes=left.allocated_bytes if left and left.locked else 0,
        )
        context.ledger.staging.reserve(
            lease, name, str(staging), size_bytes, context.settings.packing.staging_limit
        )
    except BaseException:
        if left:
            left.close()
        raise
    part = (
        take_over(left, part_path, packer.opening, lambda: context.wait_while_paused(lease.check))
        if left
        else None
    )
    remove_staged(
        *(file.path for file in files if file.kind != "sealed" and file.epoch != lease.epoch)
    )
    if part is None:
        remove_staged(part_path, journal_path)
        part = PartFile.create(part_path)
    try:
        journal = Journal.open(journal_path, packer.opening)
        sync_folder(staging)
    except BaseException:
        part.close()
        raise
    return part, journal, why


def _reserve_what_stays(context: RunContext, lease: Lease, name: str, size_bytes: int) -> None:
    """After a packing that failed, reserve no more than it left.

    The error that ended it is the one to tell.
    """
    with contextlib.suppress(
        LedgerError
    ):  # another run's by now, or the database is away: the next run reserves again
        context.ledger.staging.reserve(lease, name, str(context.staging()), size_bytes, 0)
        if not size_bytes:
            context.ledger.staging.release(name)


def _held_progress(context: RunContext, lease: Lease) -> Callable[[int, int], None]:
    """Return a `progress` that ends the packing where the lease is lost, and waits while everything
    is paused.
    """

    def told(objects: int, size_bytes: int) -> None:
        context.wait_while_paused(lease.check)
        context.progress(objects, size_bytes)

    return told


def _identity(chunk: Chunk, terms: Mapping[str, str]) -> ChunkIdentity:
    return ChunkIdentity(
        archive_id=terms["archive"],
        source=terms["source"],
        chunk=chunk.name,
        plan=chunk.plan,
        snapshot=terms["snapshot"],
        inventory_time=datetime.fromisoformat(terms["inventory_time"]),
        plan_sha256=plan_hash(terms, chunk.plan),
        planned_objects=chunk.object_count,
        planned_bytes=chunk.object_bytes,
    )
