"""Our side of the cases, each in a process of its own: `python -m benchmarks.work WHAT …`.

Each function imports what it needs, as a command of `caf` does: what a process loads counts.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from caf_pipeline.entry import block_unused_modules, collect_garbage_rarely

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
LIMIT_BYTES = 32 << 30


def pack(
    endpoint: str, prefix: str, folder: str, compared: str = "compared", checkpoints: str = "kept"
) -> dict[str, Any]:
    """Pack objects from S3 into one chunk on the disk, as a run does: listing, plan, journal,
    SHA-256, root.

    `compared` is "left" where S3's own checksums are not to be compared; `checkpoints` is "none"
    where the journal is to have none but the last.
    """
    from benchmarks.server import BUCKET, KEY
    from caf_pipeline.inventory.cutting import write_plan
    from caf_pipeline.inventory.manifest import ChunkIdentity
    from caf_pipeline.inventory.plan import PlanTerms, read_chunk_objects
    from caf_pipeline.inventory.snapshot import SnapshotWriter
    from caf_pipeline.packing.journal.format import Journal
    from caf_pipeline.packing.journal.writer import CheckpointPace
    from caf_pipeline.packing.packer import Packer
    from caf_pipeline.packing.sink import PartFile
    from caf_pipeline.settings import PackingSettings, SourceSettings
    from caf_pipeline.source.s3.source import open_s3_source

    endless = 1 << 62
    no_checkpoints = CheckpointPace(
        due_bytes=endless,
        due_seconds=endless,
        due_outcomes=endless,
        due_outcomes_bytes=endless,
        ahead_bytes=endless,
        ahead_seconds=endless,
    )
    place = Path(folder)
    (place / "plan").mkdir(parents=True, exist_ok=True)
    settings = SourceSettings.model_validate(
        {
            "bucket": BUCKET,
            "prefix": prefix,
            "endpoint_url": endpoint,
            "access_key_id": KEY,
            "secret_access_key": KEY,
        }
    )
    source = open_s3_source("bench", settings, attempts=3, connections=16)
    with SnapshotWriter(place / "snapshot.parquet", source="bench", listed_at=MOMENT) as writer:
        for page in source.list_pages():
            writer.add(page)
        snapshot = writer.finish()
    plan = write_plan(
        snapshot.path, place / "plan", PlanTerms("bench", "0" * 32, LIMIT_BYTES, "snapshot", MOMENT)
    )
    packer = Packer(
        plan.chunks[0],
        ChunkIdentity("0" * 32, "bench", "bench-00000000-00001", "00000000", "snapshot", MOMENT),
        source,
        PackingSettings(compare_checksums=compared == "compared"),
        proof_type=3,
        limit_bytes=LIMIT_BYTES,
        give_up_on=lambda planned: False,
        progress=lambda objects, size_bytes: None,
        pace=no_checkpoints if checkpoints == "none" else None,
    )
    path = place / "chunk.part"
    part = PartFile.open(path) if path.exists() else PartFile.create(path)
    journal = Journal.open(place / "chunk.journal", packer.opening)
    (place / "manifest.part").unlink(missing_ok=True)
    packed = packer.pack(
        read_chunk_objects(place / "plan", 1), part, place / "manifest.part", journal
    )
    journal.close()
    return {
        "objects": packed.member_count,
        "bytes": packed.member_bytes,
        "resumed_bytes": packed.resumed_bytes,
        "fetched_bytes": packed.fetched_bytes,
        "root": packed.merkle_root.hex(),
    }


def plan(inventory: str, folder: str) -> dict[str, Any]:
    """Cut a large inventory into chunks, half of it known to the ledger already."""
    from caf_pipeline.inventory.cutting import write_plan
    from caf_pipeline.inventory.plan import PlanTerms
    from caf_pipeline.inventory.remaining import not_yet_archived

    place = Path(folder)
    (place / "plan").mkdir(parents=True)
    known = Path(inventory).with_suffix(".known")
    delta = not_yet_archived(Path(inventory), known, place / "delta.parquet")
    made = write_plan(
        delta.path, place / "plan", PlanTerms("bench", "0" * 32, 30 << 30, "snapshot", MOMENT)
    )
    return {"objects": made.object_count, "bytes": made.object_bytes}


def plan_again(inventory: str, folder: str) -> dict[str, Any]:
    """Find that an inventory has nothing new: the identities, what is to be stated, what is to be
    planned, skips that ended.
    """
    from caf_pipeline.inventory.current import find_exceptions, identify
    from caf_pipeline.inventory.remaining import ended_skips, not_yet_archived
    from caf_pipeline.inventory.snapshot import read_snapshot

    place, snapshot = Path(folder), read_snapshot(Path(inventory))
    place.mkdir()
    files = Path(inventory).with_suffix(".known"), Path(inventory).with_suffix(".stated")
    found = identify(snapshot, *files, place / "identified.parquet")
    stated = find_exceptions(snapshot, found, *files, place / "found.parquet")
    delta = not_yet_archived(found.unsettled, files[0], place / "delta.parquet")
    return {
        "settled": found.settled_count,
        "objects": delta.object_count + stated + len(ended_skips(delta.path, files[0])),
    }


def report(endpoint: str, inventory: str, folder: str) -> dict[str, Any]:
    """Make a snapshot of S3's report of a bucket, as a run does."""
    from benchmarks.server import BUCKET, KEY
    from caf_pipeline.inventory.snapshot import SnapshotWriter
    from caf_pipeline.settings import SourceSettings
    from caf_pipeline.source.s3.source import open_s3_source

    place = Path(folder)
    (place / "files").mkdir(parents=True)
    keys = {"access_key_id": KEY, "secret_access_key": KEY}
    settings = SourceSettings.model_validate(
        {"bucket": BUCKET, "endpoint_url": endpoint, "inventory": inventory} | keys
    )
    found = open_s3_source("bench", settings, attempts=3, connections=16).open_report()
    with SnapshotWriter(
        place / "snapshot.parquet", source="bench", listed_at=found.taken_at, report=found.url
    ) as writer:
        writer.add_files([file for file, _ in found.fetch(place / "files")])
        snapshot = writer.finish()
    return {"objects": snapshot.object_count}


def claim(url: str, rows: str, chunks: str, objects: str) -> dict[str, Any]:
    """Register a plan of so many chunks of so many objects, with their claims, as a plan's last
    step does.
    """
    import pyarrow.parquet as pq

    from caf_pipeline.inventory.plan import ChunkPlan
    from caf_pipeline.ledger.database import Database
    from caf_pipeline.ledger.ledger import Ledger
    from caf_pipeline.ledger.processes import this_process
    from caf_pipeline.ledger.records import PlanRecord, plan_lease

    ledger, count, size = Ledger(Database(url)), int(objects), int(objects)
    record = PlanRecord(
        "src", bytes(32), "00000000", "snapshot", "plan", int(chunks) * count, int(chunks) * size
    )
    planned = [
        ChunkPlan(one, count, size, size, ".caf/chunk", ".caf/manifest.parquet")
        for one in range(1, int(chunks) + 1)
    ]
    with (
        pq.ParquetFile(rows) as file,
        ledger.leases.hold(plan_lease("src"), this_process("bench")) as lease,
    ):
        ledger.plans.register(lease, record, planned, file.iter_batches())
    claimed = ledger.chunks.account("src").claimed_objects
    ledger.close()
    return {"claimed": claimed}


def load(url: str, manifest: str, chunk: str) -> dict[str, Any]:
    """Seal a packed chunk with its rows, and locate it, as a run does."""
    from caf_pipeline.chunk_state import ChunkState
    from caf_pipeline.inventory.manifest import open_manifest
    from caf_pipeline.ledger.database import Database
    from caf_pipeline.ledger.ledger import Ledger
    from caf_pipeline.ledger.processes import this_process
    from caf_pipeline.ledger.records import SealRecord
    from caf_pipeline.store.protocol import Copy, PostRecord

    ledger, opened = Ledger(Database(url)), open_manifest(Path(manifest))
    with ledger.leases.hold(f"chunk/{chunk}", this_process("bench")) as lease:
        began = time.monotonic()
        seal = SealRecord(
            1000, 1000, opened.row_count, 1000, 0, 0, bytes(32), 3, [], 900, bytes(32)
        )
        ledger.moves.seal(lease, chunk, seal, [], [], rows=opened.locations)
        sealed = time.monotonic()
        ledger.moves.move(lease, chunk, ChunkState.SEALED, ChunkState.POSTING)
        ledger.moves.record_posting(lease, chunk, PostRecord(bytes(32), "jkl1", 1, 1000))
        ledger.moves.move(lease, chunk, ChunkState.POSTED, ChunkState.UPLOADING)
        ledger.replicas.record_verified(lease, chunk, [Copy("provider", "proof")])
        verified = time.monotonic()
        count = ledger.moves.load_locations(lease, chunk)
    ledger.close()
    return {
        "locations": count,
        "seal_seconds": sealed - began,
        "locate_seconds": time.monotonic() - verified,
    }


def look_up(url: str, keys: str, at_once: str) -> dict[str, Any]:
    """Look up keys, so many at once, as one process that stays connected does."""
    from caf_pipeline.ledger.database import Database
    from caf_pipeline.ledger.lookup import Lookup

    lookup, wanted, count = Lookup(Database(url)), Path(keys).read_text().split(), 0
    for first in range(0, len(wanted), int(at_once)):
        some = wanted[first : first + int(at_once)]
        count += len(lookup.locate_many("src", some))
    lookup.close()
    return {"looked_up": len(wanted), "located": count}


def list_pages(url: str, prefix: str, level: str, pages: str) -> dict[str, Any]:
    """List what is below a prefix, so many pages of it, as `caf ls` does."""
    from caf_pipeline.ledger.database import Database
    from caf_pipeline.ledger.lookup import Lookup
    from caf_pipeline.retrieval.listing import list_level, list_objects

    lookup = Lookup(Database(url))
    pages_read = _of_pages(
        (list_level if int(level) else list_objects)(lookup, "src", prefix), int(pages)
    )
    lookup.close()
    return pages_read


def select_pages(url: str, prefix: str, level: str, pages: str) -> dict[str, Any]:
    """Select the keys below a prefix alone, 1,000 at a time: the peer of `list_pages`."""
    import psycopg

    def keys(connection: psycopg.Connection[Any]) -> Iterator[str]:
        last = prefix
        while found := connection.execute(
            "SELECT file_path FROM file_locations WHERE source_id = 1 AND file_path > %s AND "
            "file_path < %s"
            " ORDER BY file_path LIMIT 1000",
            [last, prefix + chr(0x10FFFF)],
        ).fetchall():
            yield from (one for (one,) in found)
            last = found[-1][0]

    with psycopg.connect(url, autocommit=True) as connection:
        entries = keys(connection)
        if int(level):
            entries = (
                folder
                for folder, _ in groupby(entries, lambda one: one[: one.index("/", len(prefix))])
            )
        return _of_pages(entries, int(pages))


def _of_pages(entries: Iterator[Any], pages: int) -> dict[str, Any]:
    """Take pages of 1,000 entries; return how many entries there were, and how long a page took."""
    import statistics
    import time

    count, seconds = 0, list[float]()
    while len(seconds) < pages:
        begun = time.perf_counter()
        taken = sum(1 for _ in islice(entries, 1000))
        if not taken:
            break
        count += taken
        seconds.append(time.perf_counter() - begun)
    return {"entries": count, "p50_ms": 1000 * statistics.median(seconds)}


def read_one(key: str, count: str) -> dict[str, Any]:
    """Read an object again and again, as a program does that keeps the archive open; each time it
    is looked up and compared.
    """
    import statistics
    import time

    from caf_pipeline.wiring import open_archive

    seconds = []
    with open_archive() as archive:
        for _ in range(int(count)):
            begun = time.perf_counter()
            with archive.open("bench", key) as file:
                size_bytes = len(file.read())
            seconds.append(time.perf_counter() - begun)
    return {"bytes": size_bytes, "p50_ms": 1000 * statistics.median(seconds)}


def upload(*arguments: str) -> dict[str, Any]:
    """Upload a posted file to one provider, up to its answer."""
    from benchmarks.jackal import send

    return send(*arguments)


WORK: dict[str, Callable[..., dict[str, Any]]] = {
    "pack": pack,
    "plan": plan,
    "plan-again": plan_again,
    "claim": claim,
    "report": report,
    "load": load,
    "look-up": look_up,
    "list-pages": list_pages,
    "select-pages": select_pages,
    "read-one": read_one,
    "upload": upload,
}


def main() -> None:
    """Do the work that the arguments name, as a process of ours that does such work; print what
    came of it.
    """
    collect_garbage_rarely()
    block_unused_modules()
    what, *arguments = sys.argv[1:]
    print(json.dumps(WORK[what](*arguments)))


if __name__ == "__main__":
    main()
