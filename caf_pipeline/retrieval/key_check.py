"""Checks whether identities open the chunks of a source, by their headers alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from caf_pipeline.encryption.identities import Identity
from caf_pipeline.encryption.opened_chunk import OpenedChunk
from caf_pipeline.errors import ArchiveError, IntegrityError, NoMatchingIdentity, StoreError
from caf_pipeline.ledger.records import ChunkHeader, EncryptedChunk
from caf_pipeline.records import PostRecord
from caf_pipeline.store.protocol import ChunkReader


class EncryptedChunks(Protocol):
    """The ledger's encrypted chunks. `Lookup` implements it."""

    def encrypted_chunks(self, source: str) -> Sequence[EncryptedChunk]: ...


@dataclass(frozen=True, slots=True)
class KeyCheck:
    """A chunk, and what is wrong, or "".

    Attributes:
        identity_problem: why the identities do not open a header that is right.
        header_problem: how a header differs from that of the seal. No other identity helps.
    """

    chunk: str
    identity_problem: str = ""
    header_problem: str = ""


def check_keys(
    lookup: EncryptedChunks,
    stored: ChunkReader,
    identities: Sequence[Identity],
    source: str,
) -> Iterator[KeyCheck]:
    """Open each header of the ledger, and look for the same bytes at the providers.

    A provider's header that differs is not opened: anyone who knows a recipient could have made it.
    Raises StoreUnreachable if no provider has it and some do not answer.
    """
    for chunk in lookup.encrypted_chunks(source):
        identity_problem = header_problem = ""
        try:
            OpenedChunk.open(chunk.header, identities)
        except NoMatchingIdentity:
            recipients = {str(identity.recipient) for identity in identities}
            if recipients.isdisjoint(chunk.header.recipients):
                identity_problem = "these identities are none of its recipients'"
            else:
                header_problem = "the ledger's header is foreign: its recipients do not open it"
        except ArchiveError as error:
            header_problem = f"the ledger's header is damaged: {error}"
        if chunk.posting and not header_problem:
            header_problem = _stored_problem(stored, chunk.posting, chunk.header)
        yield KeyCheck(chunk.name, identity_problem, header_problem)


def _stored_problem(stored: ChunkReader, posting: PostRecord, header: ChunkHeader) -> str:
    problem, silent = "no copy has its header", None
    try:
        for provider in stored.holders(posting):
            try:
                pieces = stored.read(posting, 0, header.payload_start, provider=provider)
                if b"".join(pieces) == header.header + header.nonce:
                    return ""
                problem = "the stored header is foreign: the ledger has another"
            except IntegrityError:
                continue
            except StoreError as error:
                silent = silent if error.permanent else error
    except StoreError as error:
        if error.permanent:
            return str(error)
        raise
    if silent:
        raise silent
    return problem
