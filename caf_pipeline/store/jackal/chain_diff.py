"""The difference between what the chain lists for an archive and what the ledger says of its chunks. Pure, over records.

A file of the chain is (root, owner, start); a chunk of the ledger has the same three once it is posted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.ledger.records import Chunk
from caf_pipeline.store.jackal.messages import ChainFile

KEPT: Final = frozenset({ChunkState.POSTED, ChunkState.UPLOADING, ChunkState.VERIFIED, ChunkState.LOCATED, ChunkState.DAMAGED})
"""States in which the ledger says that the chain has the chunk's file."""

STORED: Final = frozenset({ChunkState.LOCATED, ChunkState.DAMAGED})
"""States in which it should have all its copies, too."""


@dataclass(frozen=True, slots=True)
class Held:
    """A chunk and the chain's file of it; None where the chain does not list one."""

    chunk: Chunk
    file: ChainFile | None


@dataclass(frozen=True, slots=True)
class Holdings:
    """An archive on the chain beside the ledger.

    Attributes:
        held: chunks that the chain has.
        missing: chunks that the ledger says are posted, and the chain does not list.
        foreign: files of this owner and archive that no kept chunk names, e.g. of an abandoned one.
        expiring: held ones whose file ends at or before the height asked about.
        short: located ones whose file has fewer providers than copies are required.
    """

    held: Sequence[Held]
    missing: Sequence[Held]
    foreign: Sequence[ChainFile]
    expiring: Sequence[Held]
    short: Sequence[Held]


def compare(
    files: Iterable[ChainFile],
    chunks: Iterable[Chunk],
    *,
    owner: str,
    required_copies: int,
    expiring_at: int,
    plan_ends: bool = False,
) -> Holdings:
    """Hold the chain's files against the ledger's chunks.

    Args:
        files: what the chain lists for the archive; of other owners, too, which are left out.
        chunks: the ledger's, of any state.
        owner: the wallet's address.
        required_copies: providers that a located chunk should have.
        expiring_at: a block height; a file with an end of its own at or before it is expiring.
        plan_ends: the bought space ends by then, and with it every file that has no end of its own.
    """
    listed = {(file.merkle_root, file.start): file for file in files if file.owner == owner}
    held: list[Held] = []
    missing: list[Held] = []
    for chunk in chunks:
        if chunk.state not in KEPT or chunk.merkle_root is None or chunk.start is None:
            continue
        file = listed.pop((chunk.merkle_root, chunk.start), None)
        (missing if file is None else held).append(Held(chunk, file))
    return Holdings(
        held=held,
        missing=missing,
        foreign=[listed[key] for key in sorted(listed)],
        expiring=[each for each in held if each.file and (each.file.expires <= expiring_at if each.file.expires else plan_ends)],
        short=[
            each for each in held if each.file and each.chunk.state in STORED and len(set(each.file.providers)) < required_copies
        ],
    )
