"""One chunk packed with a journal in this process: whole, interrupted, or resumed."""

import random
from dataclasses import dataclass, field
from pathlib import Path

from caf_pipeline.inventory.manifest import ChunkIdentity
from caf_pipeline.inventory.plan import read_chunk_objects
from caf_pipeline.packing.journal.format import Journal
from caf_pipeline.packing.journal.writer import CheckpointPace
from caf_pipeline.packing.packer import PackedChunk, Packer
from caf_pipeline.packing.sink import PartFile
from caf_pipeline.settings import PackingSettings
from caf_pipeline_tests.support.plans import MOMENT, plan_of
from caf_pipeline_tests.support.steady_source import SteadySource

PART = 64 * 1024
SETTINGS = PackingSettings.model_validate(
    {"part_size": PART, "window_size": 1 << 20, "max_requests": 4}
)
IDENTITY = ChunkIdentity("0" * 32, "src", "src-00000000-00001", "00000000", "snapshot", MOMENT)
EACH = CheckpointPace(due_bytes=1, due_outcomes=1, ahead_bytes=-1)
"""A checkpoint after each object and part; packing waits for it."""


class Broken(Exception):
    """Interrupts a packing."""


def a_source(small=12, large=5, seed=3) -> SteadySource:
    """Return a source of small objects, a large one, and small ones again."""
    chance = random.Random(seed)
    bodies = {f"a{number:03d}": chance.randbytes(chance.randrange(3000)) for number in range(small)}
    bodies |= {"b-large": chance.randbytes(large * PART + 17)} if large else {}
    return SteadySource(bodies | {f"c{number:03d}": chance.randbytes(900) for number in range(3)})


@dataclass
class Packing:
    """A chunk of a source in a folder. With another packing's `plan`, both are the same chunk."""

    folder: Path
    source: SteadySource
    pace: CheckpointPace = EACH
    settings: PackingSettings = SETTINGS
    identity: ChunkIdentity = IDENTITY
    proof_type: int = 3
    give_up: bool = False
    told: list = field(default_factory=list)

    def __post_init__(self):
        self.folder.mkdir(exist_ok=True)
        objects = SteadySource(dict(self.source.bodies)).objects()
        self.plan = plan_of(self.folder / "plan", objects, target_size_bytes=32 << 30)

    @property
    def part(self) -> Path:
        return self.folder / "chunk.part"

    @property
    def journal(self) -> Path:
        return self.folder / "chunk.journal"

    def files(self) -> tuple[bytes, bytes]:
        return self.part.read_bytes(), self.journal.read_bytes()

    def put(self, part: bytes, journal: bytes) -> None:
        self.part.write_bytes(part)
        self.journal.write_bytes(journal)

    def packer(self, break_after: int | None = None) -> Packer:
        def progress(objects, size_bytes, read_bytes):
            self.told.append((objects, size_bytes))
            if break_after is not None and len(self.told) > break_after:
                raise Broken

        return Packer(
            self.plan.chunks[0],
            self.identity,
            self.source,
            self.settings,
            proof_type=self.proof_type,
            limit_bytes=64 << 20,
            give_up_on=lambda planned: self.give_up,
            progress=progress,
            pace=self.pace,
        )

    def run(self, *, break_after: int | None = None) -> PackedChunk:
        """Pack, or resume from existing files."""
        self.told, self.source.reads = [], []
        spool = self.folder / "chunk.manifest"
        spool.unlink(missing_ok=True)
        part = PartFile.open(self.part) if self.part.exists() else PartFile.create(self.part)
        packer = self.packer(break_after)
        journal = Journal.open(self.journal, packer.opening)
        try:
            return packer.pack(read_chunk_objects(self.plan.folder, 1), part, spool, journal)
        finally:
            journal.close()

    def read_bytes(self) -> int:
        """Return the bytes that the last run read from the source."""
        return sum(end - start for _, start, end in self.source.reads)
