"""Lists of deletable objects, and the proof windows before them."""

import csv
import io
from pathlib import Path
from urllib.parse import unquote_to_bytes

import pyarrow.parquet as pq

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.maintenance.deletion import assessment
from caf_pipeline.maintenance.deletion.safe_to_delete import find_deletable
from caf_pipeline.maintenance.scrub import prove_chunk
from caf_pipeline.steps import chunk_steps


def pass_window(context, store):
    """Prove every located chunk in a window, and begin the next window."""
    store.window = store.now = (store.now or 0) + 1
    for chunk in context.ledger.chunks.list("src", [ChunkState.LOCATED]):
        assert prove_chunk(context, chunk.name).proven
    store.window = store.now = store.now + 1


class Answer:
    """The result of `find_deletable`: the report, and the lists as another program reads them."""

    def __init__(self, context, folder, **options):
        self.file, self.report_file = folder / "list.csv", folder / "rest.parquet"
        self.notes: list[str] = []
        reporter = assessment.ProgressReporter(note=self.notes.append)
        self.found = find_deletable(
            context, self.file, report=self.report_file, reporter=reporter, **options
        )
        self.listed = read_list(self.file) if self.file.exists() else []
        self.rest = pq.read_table(self.report_file).to_pylist()
        assert len(self.listed) == self.found.safe_objects
        assert len(self.listed) + len(self.rest) == self.found.snapshot.object_count
        assert (self.found.manifest is None) == (not self.listed)

    @property
    def keys(self) -> list[str]:
        return [key.decode() for _, key, *_ in self.listed]

    @property
    def reasons(self) -> dict[str, str]:
        return {row["key"].decode(): row["reason"] for row in self.rest}

    @property
    def details(self) -> set[str]:
        return {row["detail"] for row in self.rest}


def next_window(context, network):
    """Make blocks until every chunk was proven in its next window."""
    postings = [
        chunk_steps.posting_of(chunk)
        for chunk in context.ledger.chunks.list("src", [ChunkState.LOCATED])
    ]
    # All at once, before any block: the chunks' windows begin a few blocks apart, and none may be
    # led past its next one.
    following = [(at, context.store.current_window(at) + 1) for at in postings]
    for at, window in following:
        while context.store.current_window(at) < window:
            network.advance(10)
        network.wait_for(
            lambda _, at=at, window=window: all(
                context.store.proof_window(at, copy) == window for copy in context.store.copies(at)
            )
        )


def read_list(file: Path) -> list[tuple]:
    lines = csv.reader(io.StringIO(file.read_text(encoding="ascii"), newline=""))
    return [(bucket, unquote_to_bytes(key), *version) for bucket, key, *version in lines]
