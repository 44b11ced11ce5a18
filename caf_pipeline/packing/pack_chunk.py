"""Packs a chunk into staging, or resumes what an earlier run has packed.

Source: promises 2 and 4 in docs/explanation/design.md.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from caf_pipeline.caf.archive import DEFAULT_LIMITS
from caf_pipeline.caf.merkle import type_of_root
from caf_pipeline.encryption.entry_cipher import EntryCipher
from caf_pipeline.encryption.identities import require_recipients
from caf_pipeline.encryption.opened_chunk import OpenedChunk
from caf_pipeline.encryption.sealing import PRIVATE_LIMITS
from caf_pipeline.errors import LedgerError, ObjectReadFailed, StagingError
from caf_pipeline.formats import age
from caf_pipeline.inventory.manifest import ChunkIdentity
from caf_pipeline.inventory.plan import (
    ChunkPlan,
    plan_hash,
    read_chunk_objects,
    read_chunk_plan,
    read_terms,
)
from caf_pipeline.packing.journal.earlier import EarlierPacking
from caf_pipeline.packing.journal.format import Journal
from caf_pipeline.packing.journal.takeover import find_earlier, find_resumable_part, take_over
from caf_pipeline.packing.packer import PackedChunk, Packer, remove_staged
from caf_pipeline.packing.sink import PartFile
from caf_pipeline.packing.staging import leftovers, make_room, write_packed
from caf_pipeline.packing.unreadable import combined_read_failure, give_up_on
from caf_pipeline.records import Chunk, Lease
from caf_pipeline.run_context import RunContext
from caf_pipeline.system.atomic_files import sync_folder


def pack_or_resume(
    context: RunContext, lease: Lease, chunk: Chunk
) -> tuple[PackedChunk, OpenedChunk | None]:
    """Pack a chunk, or resume what an earlier run packed.

    Also returns how to read it if it is encrypted: only this process has its key.

    Raises:
        StagingError: no room, even without kept files of located chunks.
        SourceError: the next run resumes the journaled bytes.
        ObjectReadFailed: too few runs have failed on an object to skip it.
        NotPublic: the source is neither public nor has recipients.
    """
    staging, folder = context.staging(), Path(chunk.plan_folder)
    plan = read_chunk_plan(folder, chunk.number)
    recipients = _recipients_of(context, chunk)
    packer = packer_of(context, lease, chunk, plan, recipients)
    part_path, journal_path, spool = (
        staging / f"{chunk.name}.{lease.epoch}.{kind}" for kind in ("part", "journal", "manifest")
    )
    size_bytes = plan.expected_size_bytes
    journal: Journal | None
    earlier: EarlierPacking | None = None
    if recipients:
        size_bytes = age.MAX_HEADER_BYTES + age.sealed_size(size_bytes)
        part, journal, earlier, why = _files_to_encrypt_into(
            context, lease, chunk, packer, size_bytes
        )
    else:
        part, journal, why = _files_to_pack_into(context, lease, chunk, packer, size_bytes)
    try:
        try:
            objects = read_chunk_objects(folder, chunk.number)
            packed = packer.pack(objects, part, spool, journal, earlier)
        except ObjectReadFailed as error:
            raise combined_read_failure(context, chunk, error) from error
        finally:
            if journal:
                journal.close()
            if earlier:
                earlier.close()
        lease.check()
        packed = replace(packed, not_resumed=packed.not_resumed or why)
        write_packed(context, chunk.name, lease.epoch, part_path, packed)
    except BaseException:
        if not packer.kept_bytes or journal is None:
            remove_staged(part_path, journal_path)
        # What was sealed again and did not replace the older part.
        remove_staged(part_path.with_suffix(".copy"))
        if earlier and not part_path.exists():
            remove_staged(journal_path)
        # If another run has the chunk or the database is down, the next run reserves again.
        with contextlib.suppress(LedgerError):
            kept_bytes = 0
            if journal and packer.kept_bytes:
                kept_bytes = packer.kept_bytes + journal.size_bytes
            context.ledger.staging.reserve(lease, chunk.name, str(staging), kept_bytes, 0)
            if not kept_bytes:
                context.ledger.staging.release(chunk.name)
        raise
    finally:
        remove_staged(spool)
    return packed, packer.opened


def _recipients_of(context: RunContext, chunk: Chunk) -> Sequence[age.Recipient]:
    """A sealed plain chunk must get the same root again."""
    if chunk.merkle_root is not None:
        return ()
    return require_recipients(context.settings, context.source)


def packer_of(
    context: RunContext,
    lease: Lease,
    chunk: Chunk,
    plan: ChunkPlan,
    recipients: Sequence[age.Recipient] = (),
) -> Packer:
    """Return a packer that stops if the lease is lost."""
    terms = read_terms(Path(chunk.plan_folder))
    identity = ChunkIdentity(
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

    def progress(objects: int, size_bytes: int, read_bytes: int) -> None:
        context.wait_while_paused(lease.check)  # raises if the lease is lost
        context.waits.packed(objects, size_bytes, read_bytes)

    context.waits.begin_packing()
    # An object that fills a chunk may exceed the limit by its headers, which the plan did not know.
    limits = PRIVATE_LIMITS if recipients else DEFAULT_LIMITS
    least_limit = limits.max_bytes if plan.object_count == 1 else plan.expected_size_bytes
    packer = Packer(
        plan,
        identity,
        context.objects,
        context.settings.packing,
        # A sealed chunk must get the same root again, even if the setting has changed.
        proof_type=context.store.proof_type
        if chunk.merkle_root is None
        else type_of_root(chunk.merkle_root),
        # A plan may be older than the source's recipients.
        limit_bytes=min(max(int(terms["limit_size"]), least_limit), limits.max_bytes),
        give_up_on=lambda planned: give_up_on(context, chunk, packer, planned),
        progress=progress,
        recipients=recipients,
    )
    return packer


def _files_to_encrypt_into(
    context: RunContext, lease: Lease, chunk: Chunk, packer: Packer, size_bytes: int
) -> tuple[PartFile, Journal | None, EarlierPacking | None, str]:
    """Reserve space; return part, journal, an earlier packing to seal again, or why there is none.

    There is no journal without a worker key. Files that are not sealed again are removed: plain
    bytes must not stay.
    """
    name, staging = chunk.name, context.staging()
    part_path = staging / f"{name}.{lease.epoch}.part"
    journal_path = part_path.with_suffix(".journal")

    def reserve(reserved_bytes: int) -> None:
        limit_bytes = context.settings.packing.staging_limit
        context.ledger.staging.reserve(lease, name, str(staging), reserved_bytes, limit_bytes)

    files = leftovers(context, name)  # before reserving, as in `_files_to_pack_into`
    cipher: EntryCipher | None = None
    earlier: EarlierPacking | None = None
    why = ""
    if key := context.settings.worker_key:
        secret = context.ledger.staging.packing_secret(lease, name)
        cipher = EntryCipher(bytes.fromhex(key.get_secret_value()), secret, name)
        others = [file for file in files if file.epoch != lease.epoch]
        earlier, why = find_earlier(others, packer.opening, cipher)
    elif any(file.kind in ("part", "packed") for file in files):
        why = "without CAF_WORKER_KEY an encrypted chunk is packed from its start"
    try:
        if earlier and not _has_room_beside(context, name, size_bytes, earlier, reserve):
            earlier.close()
            earlier, why = None, "there is no room to encrypt its staged bytes under a new key"
        if earlier is None:
            make_room(context, name, size_bytes)
            reserve(size_bytes)
        kept = earlier.paths if earlier else ()
        unused = [file.path for file in files if file.kind != "foreign" and file.path not in kept]
        remove_staged(*unused)
        # Until its journal has a checkpoint, the new part must not count as the newest.
        part = PartFile.create(part_path.with_suffix(".copy") if earlier else part_path)
        try:
            journal = Journal.open(journal_path, packer.opening, cipher) if cipher else None
            sync_folder(staging)
        except BaseException:
            part.close()
            raise
    except BaseException:
        if earlier:
            earlier.close()
        raise

    def replaced() -> None:
        reserve(size_bytes)  # a run that lost its lease must not remove what another run reads
        remove_staged(*kept)

    if earlier:
        earlier.replaced = replaced
    return part, journal, earlier, why


def _has_room_beside(
    context: RunContext,
    name: str,
    size_bytes: int,
    earlier: EarlierPacking,
    reserve: Callable[[int], None],
) -> bool:
    size_bytes += earlier.stored_bytes
    held_bytes = earlier.part.allocated_bytes if earlier.part.locked else 0
    if not make_room(context, name, size_bytes, held_bytes=held_bytes):
        return False
    try:
        reserve(size_bytes)
    except StagingError:
        return False
    return True


def _files_to_pack_into(
    context: RunContext, lease: Lease, chunk: Chunk, packer: Packer, size_bytes: int
) -> tuple[PartFile, Journal, str]:
    """Also return why nothing is resumed, or ""."""
    name, staging = chunk.name, context.staging()
    part_path, journal_path = (
        staging / f"{name}.{lease.epoch}.{kind}" for kind in ("part", "journal")
    )
    # List before reserving: a run that lost its lease cannot reserve. The list therefore never has
    # files of a later lease, however long this process sleeps before it removes them.
    files = leftovers(context, name)
    part, why = find_resumable_part(files)
    try:
        make_room(
            context,
            name,
            size_bytes,
            held_bytes=part.allocated_bytes if part and part.locked else 0,
        )
        context.ledger.staging.reserve(
            lease, name, str(staging), size_bytes, context.settings.packing.staging_limit
        )
    except BaseException:
        if part:
            part.close()
        raise
    if part:
        part = take_over(
            part, part_path, packer.opening, lambda: context.wait_while_paused(lease.check)
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
