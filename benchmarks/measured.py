"""One measurement in a process of its own, so that its peak memory is its own: `python -m benchmarks.measured WHAT …`.

Prints one JSON object: seconds, bytes, objects, peak memory.
"""

import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import obstore

from benchmarks import jackal, server
from caf_pipeline.inventory.manifest import ChunkIdentity
from caf_pipeline.inventory.plan import PlanTerms, read_chunk_objects, write_plan
from caf_pipeline.inventory.snapshot import SnapshotWriter, not_yet_archived
from caf_pipeline.packing.journal.format import Journal
from caf_pipeline.packing.journal.writer import CheckpointPace
from caf_pipeline.packing.packer import Packer
from caf_pipeline.packing.sink import PartFile
from caf_pipeline.settings import PackingSettings, SourceSettings
from caf_pipeline.source.s3.source import open_s3_source
from caf_pipeline_tests.support.peak_memory import peak_bytes

THREADS = 16  # as the packer's default
NO_CHECKPOINTS = CheckpointPace(
    due_bytes=1 << 62,
    due_seconds=math.inf,
    due_outcomes=1 << 62,
    due_outcomes_bytes=1 << 62,
    ahead_bytes=1 << 62,
    ahead_seconds=math.inf,
)
"""None but the one at the end, when all bytes are fsynced anyhow."""
MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


def read_bare(endpoint: str, prefix: str) -> dict[str, Any]:
    """Read the objects with obstore and drop the bytes: what any packing must at least do."""
    store = server.open_store(endpoint)
    paths = [entry["path"] for page in obstore.list(store, prefix) for entry in page]
    started = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        size_bytes = sum(pool.map(lambda path: len(obstore.get(store, path).bytes()), paths))
    return {"seconds": time.monotonic() - started, "bytes": size_bytes, "objects": len(paths)}


def pack(endpoint: str, prefix: str, checksums: str, journal: str = "kept") -> dict[str, Any]:
    """Pack the same objects into one chunk on the disk, with SHA-256 and Merkle root, as a run does.

    `checksums` is "compared" where S3's own are asked for, as by default, or "left"; `journal` is "kept", as by default, or
    "none": then a kill would lose everything.
    """
    with tempfile.TemporaryDirectory(dir=".caf") as name:
        folder = Path(name)
        (folder / "plan").mkdir()
        return _pack_in(folder, endpoint, prefix, checksums=checksums, journaled=journal == "kept")


def resume(endpoint: str, prefix: str, folder: str, kill_at: str) -> dict[str, Any]:
    """Pack into a folder that stays, going on with what is there; die by SIGKILL once so many bytes are packed (0: never)."""
    left_bytes = int(kill_at)

    def progress(objects: int, size_bytes: int) -> None:
        nonlocal left_bytes
        left_bytes -= size_bytes
        if int(kill_at) and left_bytes <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    (Path(folder) / "plan").mkdir(exist_ok=True)
    return _pack_in(Path(folder), endpoint, prefix, checksums="left", journaled=True, progress=progress)


def _pack_in(
    folder: Path,
    endpoint: str,
    prefix: str,
    *,
    checksums: str,
    journaled: bool,
    progress: Callable[[int, int], None] = lambda objects, size_bytes: None,
) -> dict[str, Any]:
    place = {"bucket": "bench", "prefix": prefix, "endpoint_url": endpoint, "region": "us-east-1"}
    keys = {"access_key_id": server.KEY, "secret_access_key": server.KEY}
    settings = SourceSettings.model_validate(place | keys)
    source = open_s3_source("bench", settings, attempts=3)
    plan = _plan_of(source.list_pages(), folder)
    packer = Packer(
        plan.chunks[0],
        ChunkIdentity("0" * 32, "bench", "bench-00000000-00001", "00000000", "snapshot", MOMENT),
        source,
        PackingSettings(compare_checksums=checksums == "compared"),
        proof_type=3,
        limit_bytes=32 << 30,
        give_up_on=lambda planned, error: False,
        progress=progress,
        pace=None if journaled else NO_CHECKPOINTS,
    )
    path, journal_path = folder / "chunk.part", folder / "chunk.journal"
    objects = read_chunk_objects(folder / "plan", 1)
    (folder / "manifest.part").unlink(missing_ok=True)
    started = time.monotonic()
    part = PartFile.open(path) if path.exists() else PartFile.create(path)
    journal = Journal.open(journal_path, packer.opening)
    packed = packer.pack(objects, part, folder / "manifest.part", journal)
    journal.close()
    return {
        "seconds": time.monotonic() - started,
        "bytes": packed.member_bytes,
        "objects": packed.member_count,
        "resumed_bytes": packed.resumed_bytes,
        "fetched_bytes": packed.fetched_bytes,
        "root": packed.merkle_root.hex(),
    }


def _plan_of(pages: Any, folder: Path) -> Any:
    with SnapshotWriter(folder / "snapshot.parquet", source="bench", listed_at=MOMENT) as writer:
        for page in pages:
            writer.add(page)
        snapshot = writer.finish()
    return write_plan(snapshot.path, folder / "plan", PlanTerms("bench", "0" * 32, 32 << 30, "snapshot", MOMENT))


def plan(inventory: str) -> dict[str, Any]:
    """Cut a large inventory into chunks, half of it known to the ledger already."""
    with tempfile.TemporaryDirectory(dir=".caf") as name:
        folder = Path(name)
        started = time.monotonic()
        known = Path(inventory).with_suffix(".known")
        delta = not_yet_archived(Path(inventory), known, folder / "delta.parquet")
        terms = PlanTerms("bench", "0" * 32, 30 << 30, "snapshot", MOMENT)
        (folder / "plan").mkdir()
        made = write_plan(delta.path, folder / "plan", terms)
    return {"seconds": time.monotonic() - started, "objects": made.object_count, "bytes": made.object_bytes}


def main() -> None:
    """Run the measurement that the arguments name."""
    what, *arguments = sys.argv[1:]
    result = {"read": read_bare, "pack": pack, "resume": resume, "plan": plan, "upload": jackal.upload}[what](*arguments)
    print(json.dumps(result | {"peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
