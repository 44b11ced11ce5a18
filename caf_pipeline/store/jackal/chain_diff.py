"""The difference between the chain's files of an archive and the ledger's chunks. Pure.

(root, owner, start) identifies both.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from caf_pipeline.chunk_state import IN_GOOD_STANDING, ChunkState
from caf_pipeline.records import Chunk
from caf_pipeline.store.jackal.answers import ChainFile

ON_CHAIN: Final = frozenset(
    {
        ChunkState.POSTED,
        ChunkState.UPLOADING,
        ChunkState.VERIFIED,
        ChunkState.LOCATED,
        ChunkState.DAMAGED,
    }
)
"""States in which the chain should have the chunk's file."""


@dataclass(frozen=True, slots=True)
class ChainDiff:
    """The difference between the chain and the ledger.

    Attributes:
        missing: posted chunks that the chain does not list.
        foreign: the wallet's files without a chunk, e.g. of an abandoned chunk.
        expiring: names of listed chunks whose file ends by the requested height.
        short: names of located chunks whose file has too few providers.
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
    """Compare the archive's files, of any owner, with the ledger's chunks in any state.

    Files that end at or before `expiring_at` are expiring; those without their own end, if
    `plan_ends`.
    """
    files_by_post = {(file.merkle_root, file.owner, file.start): file for file in files}
    listed: list[tuple[Chunk, ChainFile]] = []
    missing: list[Chunk] = []
    for chunk in chunks:
        if (
            chunk.state not in ON_CHAIN
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
