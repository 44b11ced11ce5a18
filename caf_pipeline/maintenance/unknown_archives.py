"""Finds the sources of unknown archives, by one chunk of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from caf_pipeline.errors import (
    ArchiveError,
    IntegrityError,
    MalformedArchive,
    NoChainAnswer,
    StoredChunkMissing,
    StoreUnreachable,
)
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.inventory.manifest import ARCHIVE_ID
from caf_pipeline.records import Copy, PostedFile
from caf_pipeline.retrieval.remote_chunk import AgreedSource, open_file, read_head
from caf_pipeline.run_context import RunContext

MOST_OPENED: Final = 3
"""Chunks of an archive that are tried, the newest first. A lost chunk must not hide the others."""


@dataclass(frozen=True, slots=True)
class UnknownArchive:
    """An archive that no source of the ledger has.

    `source` is the name in `file`. It is "" if no chunk could be opened, and `why` has the reason.
    """

    archive_id: str
    source: str
    file: PostedFile
    why: str = ""


def possible_archive_ids(context: RunContext, owner: str | None) -> Sequence[str]:
    """Return ids that may be the source's, the newest last.

    Ids of other sources are left out, and those that were set aside. None stands for the store's
    owner; then the ledger remembers the owner's archives.
    """
    archives = context.ledger.sources.archives()
    left_out = {archive.archive_id for archive in archives}
    left_out |= context.ledger.sources.ids_set_aside(context.source)
    left_out -= context.ledger.sources.archive_ids(context.source)
    log = context.ledger.transactions(context.holder)
    times = {
        archive_id: files.last_at
        for archive_id, files in context.store.archives(owner, log=log).items()
        if archive_id and ARCHIVE_ID.fullmatch(archive_id) and archive_id not in left_out
    }
    return sorted(times, key=lambda archive_id: (times[archive_id], archive_id))


def open_archive(
    context: RunContext, owner: str, archive_id: str, *, whole: bool = False
) -> UnknownArchive | None:
    """Open chunks until one names its source. None if the store no longer lists the archive.

    `whole` trusts copies that differ if they have the Merkle root. Raises IdentityMissing or
    KeyRefused if a chunk is encrypted.
    """
    files = [file for file in context.store.posted(archive_id) if file.posting.owner == owner]
    archive, opened = None, 0
    for file in sorted(files, key=lambda file: -file.posting.start):
        copies = context.store.copies(file.posting)
        if not copies:
            archive = archive or UnknownArchive(archive_id, "", file, "no provider is listed")
            continue
        try:
            named_id, source = open_unknown_chunk(context, file, copies, whole=whole)
            if named_id == archive_id:
                return UnknownArchive(archive_id, source, file)
            why = f"its head names the archive {named_id[:40]!r}"
        except NoChainAnswer:
            raise
        except (ArchiveError, IntegrityError, StoredChunkMissing, StoreUnreachable) as error:
            why = str(error)
        archive, opened = UnknownArchive(archive_id, "", file, why), opened + 1
        if opened == MOST_OPENED:
            break
    return archive


def open_unknown_chunk(
    context: RunContext, file: PostedFile, copies: Sequence[Copy], *, whole: bool
) -> tuple[str, str]:
    """Return the archive id and the source's name in a chunk's head.

    Raises IdentityMissing or KeyRefused if the chunk is encrypted.
    """
    providers = [copy.provider for copy in copies]
    stored = AgreedSource(
        context.store, file.posting, providers, proof_type=file.proof_type if whole else None
    )
    opened = open_file(file, stored, context.opened.identities)
    head = read_head(opened.caf, opened.size_bytes)
    chunk_id = ChunkId.parse(head.chunk)
    if chunk_id is None:
        raise MalformedArchive(f"its head names a chunk {head.chunk[:60]!r}")
    return head.archive_id, chunk_id.source
