"""Checks whether identities open the chunks of a source, by their headers alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from caf_pipeline.encryption.identities import Identity
from caf_pipeline.encryption.opened import OpenedChunk
from caf_pipeline.errors import ArchiveError, IntegrityError, StoreError
from caf_pipeline.ledger.records import ChunkHeader, EncryptedChunk
from caf_pipeline.store.protocol import ChunkReader, PostRecord


class EncryptedChunks(Protocol):
    """The ledger's encrypted chunks. `Lookup` implements it."""

    def encrypted_chunks(self, source: str) -> Sequence[EncryptedChunk]: ...


@dataclass(frozen=True, slots=True)
class KeyCheck:
    """A chunk, and why the identities do not open it, or ""."""

    chunk: str
    problem: str = ""


def check_keys(
    lookup: EncryptedChunks,
    stored: ChunkReader,
    identities: Sequence[Identity],
    source: str,
) -> Iterator[KeyCheck]:
    """Open each header of the ledger, and look for the same bytes at the providers.

    A header that differs is not opened: anyone who knows a recipient could have made it. Raises
    StoreUnreachable if no provider has it and some do not answer.
    """
    for chunk in lookup.encrypted_chunks(source):
        header, problem = chunk.header, ""
        try:
            OpenedChunk.open(header, identities)
            if chunk.posting and not _is_stored(stored, chunk.posting, header):
                problem = "no provider has the header of the ledger"
        except (ArchiveError, IntegrityError, StoreError) as error:
            if not error.permanent:
                raise
            problem = str(error)
        yield KeyCheck(chunk.name, problem)


def _is_stored(stored: ChunkReader, posting: PostRecord, header: ChunkHeader) -> bool:
    silent: StoreError | None = None
    for provider in stored.holders(posting):
        try:
            pieces = stored.read(posting, 0, header.payload_start, provider=provider)
            if b"".join(pieces) == header.header + header.nonce:
                return True
        except IntegrityError:
            continue
        except StoreError as error:
            silent = silent if error.permanent else error
    if silent:
        raise silent
    return False
