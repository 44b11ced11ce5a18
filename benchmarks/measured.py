"""One measurement in a process of its own, so that its peak memory is its own: `python -m benchmarks.measured WHAT …`.

Prints one JSON object: seconds, bytes, objects, peak memory.
"""

import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import obstore

from benchmarks import jackal, server
from caf_pipeline.inventory import SnapshotWriter, not_yet_archived
from caf_pipeline.manifest import ChunkIdentity
from caf_pipeline.pack import Packer
from caf_pipeline.plan import PlanTerms, read_chunk_objects, write_plan
from caf_pipeline.s3 import open_s3_source
from caf_pipeline.settings import PackingSettings, SourceSettings
from caf_pipeline_tests.peak_memory import peak_bytes

THREADS = 16  # as the packer's default
MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


def read_bare(endpoint: str, prefix: str) -> dict[str, Any]:
    """Read the objects with obstore and drop the bytes: what any packing must at least do."""
    store = server.open_store(endpoint)
    paths = [entry["path"] for page in obstore.list(store, prefix) for entry in page]
    started = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        size_bytes = sum(pool.map(lambda path: len(obstore.get(store, path).bytes()), paths))
    return {"seconds": time.monotonic() - started, "bytes": size_bytes, "objects": len(paths)}


def pack(endpoint: str, prefix: str, checksums: str) -> dict[str, Any]:
    """Pack the same objects into one chunk on the disk, with SHA-256 and Merkle root, as a run does.

    `checksums` is "compared" where S3's own are asked for, as by default, or "left".
    """
    place = {"bucket": "bench", "prefix": prefix, "endpoint_url": endpoint, "region": "us-east-1"}
    keys = {"access_key_id": server.KEY, "secret_access_key": server.KEY}
    settings = SourceSettings.model_validate(place | keys)
    source = open_s3_source("bench", settings, attempts=3)
    with tempfile.TemporaryDirectory(dir=".caf") as name:
        folder = Path(name)
        plan = _plan_of(source.list_pages(), folder)
        packer = Packer(
            plan.chunks[0],
            ChunkIdentity("0" * 32, "bench", "bench-00000000-00001", "00000000", "snapshot", MOMENT),
            source,
            PackingSettings(compare_checksums=checksums == "compared"),
            proof_type=3,
            limit_bytes=32 << 30,
            give_up_on=lambda planned, error: False,
            progress=lambda objects, size_bytes: None,
        )
        started = time.monotonic()
        packed = packer.pack(read_chunk_objects(folder / "plan", 1), folder / "chunk.part", folder / "manifest.part")
    return {"seconds": time.monotonic() - started, "bytes": packed.member_bytes, "objects": packed.member_count}


def _plan_of(pages: Any, folder: Path) -> Any:
    with SnapshotWriter(folder / "snapshot.parquet", source="bench", listed_at=MOMENT) as writer:
        for page in pages:
            writer.add(page)
        snapshot = writer.finish()
    (folder / "plan").mkdir()
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
    result = {"read": read_bare, "pack": pack, "plan": plan, "upload": jackal.upload}[what](*arguments)
    print(json.dumps(result | {"peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
