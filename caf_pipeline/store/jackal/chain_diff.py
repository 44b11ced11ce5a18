"""The difference between what the chain lists for an archive and what the ledger says of its
chunks. Pure, over records.

A file of the chain is (root, owner, start); a chunk of the ledger has the same three once it is
posted.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from caf_pipeline.chunk_state import IN_GOOD_STANDING, ChunkState
from caf_pipeline.ledger.records import Chunk
from caf_pipeline.store.jackal.answers import ChainFile

KEPT: Final = frozenset(
    {
        ChunkState.POSTED,
        ChunkState.UPLOADING,
        ChunkState.VERIFIED,
        ChunkState.LOCATED,
        ChunkState.DAMAGED,
    }
)
"""States in which the ledger says that the chain has the chunk's file."""


@dataclass(frozen=True, slots=True)
class ChainDiff:
    """An archive on the chain beside the ledger.

    Attributes:
        listed: chunks that the chain has, each with its file.
        missing: chunks that the ledger says are posted, and the chain does not list.
        foreign: files of the wallet and archive that no kept chunk names, e.g. of an abandoned one.
        expiring: names of listed ones whose file ends at or before the height asked about.
        short: names of located ones whose file has fewer providers than copies are required.
    """

    listed: Sequence[tuple[Chunk, ChainFile]]
    missing: Sequence[Chunk]
    foreign: Sequence[ChainFile]
    expiring: Collection[str]
    short: Collection[str]


def compare(
    files: Iterable[ChainFile],
    chunks: Iterable[Chunk],
    *,
    owner: str,
    required_copies: int,
    expiring_at: int,
    plan_ends: bool = False,
) -> ChainDiff:
    """Hold the chain's files against the ledger's chunks.

    Args: files: what the chain lists for the archive, of the wallet and of those that the chunks
        were posted by. chunks: the ledger's, of any state. owner: the wallet's address.
        required_copies: providers that a located chunk should have. expiring_at: a block height; a
        file with an end of its own at or before it is expiring. plan_ends: the wallet's space ends
        by then, and with it each of its files that has no end of its own.
    """
    files_by_post = {(file.merkle_root, file.owner, file.start): file for file in files}
    listed: list[tuple[Chunk, ChainFile]] = []
    missing: list[Chunk] = []
    for chunk in chunks:
        if (
            chunk.state not in KEPT
            or chunk.merkle_root is None
            or chunk.owner is None
            or chunk.start is None
        ):
            continue
        file = files_by_post.pop((chunk.merkle_root, chunk.owner, chunk.start), None)
        if file is None:
            missing.append(chunk)
        else:
            listed.append((chunk, file))
    return ChainDiff(
        listed=listed,
        missing=missing,
        foreign=[
            files_by_post[key] for key in sorted(files_by_post) if files_by_post[key].owner == owner
        ],
        expiring={
            chunk.name
            for chunk, file in listed
            if (file.expires <= expiring_at if file.expires else plan_ends and file.owner == owner)
        },
        short={
            chunk.name
            for chunk, file in listed
            if chunk.state in IN_GOOD_STANDING and len(set(file.providers)) < required_copies
        },
    )
