"""Checks whether identities open the chunks of a source, by their headers alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from caf_pipeline.encryption.identities import Identity
from caf_pipeline.encryption.opened import OpenedChunk
from caf_pipeline.errors import ArchiveError, IntegrityError, StoreError
from caf_pipeline.ledger.records import EncryptedChunk
from caf_pipeline.store.protocol import ChunkReader


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
    """Compare each stored header with the ledger's, and open it.

    A header that differs is not opened: anyone who knows a recipient could have made it. Raises
    StoreUnreachable.
    """
    for chunk in lookup.encrypted_chunks(source):
        header, problem = chunk.header, ""
        try:
            if chunk.posting:
                pieces = stored.read(chunk.posting, 0, header.payload_start)
                if b"".join(pieces) != header.header + header.nonce:
                    problem = "its stored header is not that of the ledger"
            if not problem:
                OpenedChunk.open(header, identities)
        except (ArchiveError, IntegrityError, StoreError) as error:
            if not error.permanent:
                raise
            problem = str(error)
        yield KeyCheck(chunk.name, problem)
