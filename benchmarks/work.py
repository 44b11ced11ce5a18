"""caf's side of the cases: `python -m benchmarks.work FUNCTION …` runs a function in a new process.

Each function imports what it needs, as the commands of `caf` do, because imports cost time.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caf_pipeline.entry import block_unused_modules, collect_garbage_rarely

if TYPE_CHECKING:
    from caf_pipeline.run_context import RunContext

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
LIMIT_BYTES = 32 << 30


def pack(
    endpoint: str,
    prefix: str,
    folder: str,
    compared: str = "compared",
    checkpoints: str = "kept",
    *recipients: str,
) -> dict[str, Any]:
    """Pack objects from S3 into one chunk on disk, as a run does.

    Args:
        endpoint: Address of the S3 server.
        prefix: Prefix of the objects.
        folder: Folder of the chunk.
        compared: "compared" to compare S3's checksums, "left" to ignore them.
        checkpoints: "kept" for all checkpoints of the journal, "none" for only the last one.
        recipients: Whose identities open the chunk; none for a plain chunk.
    """
    from benchmarks.server import BUCKET, KEY
    from caf_pipeline.formats.age import parse_recipient
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

    unlimited = 1 << 62
    no_checkpoints = CheckpointPace(
        due_bytes=unlimited,
        due_seconds=unlimited,
        due_outcomes=unlimited,
        due_outcomes_bytes=unlimited,
        ahead_bytes=unlimited,
        ahead_seconds=unlimited,
    )
    work_folder = Path(folder)
    (work_folder / "plan").mkdir(parents=True, exist_ok=True)
    settings = SourceSettings.model_validate(
        {
            "bucket": BUCKET,
            "prefix": prefix,
            "endpoint_url": endpoint,
            "access_key_id": KEY,
            "secret_access_key": KEY,
        }
    )
    connections = PackingSettings().max_requests
    source = open_s3_source("bench", settings, attempts=3, connections=connections)
    with SnapshotWriter(
        work_folder / "snapshot.parquet", source="bench", listed_at=MOMENT
    ) as writer:
        for page in source.list_pages():
            writer.add(page)
        snapshot = writer.finish()
    plan = write_plan(
        snapshot.path,
        work_folder / "plan",
        PlanTerms("bench", "0" * 32, LIMIT_BYTES, "snapshot", MOMENT),
    )
    packer = Packer(
        plan.chunks[0],
        ChunkIdentity("0" * 32, "bench", "bench-00000000-00001", "00000000", "snapshot", MOMENT),
        source,
        PackingSettings(compare_checksums=compared == "compared"),
        proof_type=3,
        limit_bytes=LIMIT_BYTES,
        give_up_on=lambda planned: False,
        progress=lambda *_: None,
        pace=no_checkpoints if checkpoints == "none" else None,
        recipients=[parse_recipient(recipient) for recipient in recipients],
    )
    path = work_folder / "chunk.part"
    part = PartFile.open(path) if path.exists() else PartFile.create(path)
    journal = None
    if not recipients:
        journal = Journal.open(work_folder / "chunk.journal", packer.opening)
    (work_folder / "manifest.part").unlink(missing_ok=True)
    packed = packer.pack(
        read_chunk_objects(work_folder / "plan", 1), part, work_folder / "manifest.part", journal
    )
    if journal:
        journal.close()
    return {
        "objects": packed.member_count,
        "bytes": packed.member_bytes,
        "resumed_bytes": packed.resumed_bytes,
        "fetched_bytes": packed.fetched_bytes,
        "root": packed.merkle_root.hex(),
    }


def _in_two_threads(
    path: str, start: int, piece_bytes: int, work: "Callable[[int, bytes, bool], bytearray]"
) -> dict[str, Any]:
    import os
    from concurrent.futures import ThreadPoolExecutor

    source, target = os.open(path, os.O_RDONLY), os.open(os.devnull, os.O_WRONLY)
    size_bytes = os.fstat(source).st_size

    def one_piece(at: int) -> int:
        piece = os.pread(source, piece_bytes, at)
        result = work((at - start) // piece_bytes * 16, piece, at + piece_bytes >= size_bytes)
        return os.write(target, result)

    with ThreadPoolExecutor(2) as threads:
        return {"bytes": sum(threads.map(one_piece, range(start, size_bytes, piece_bytes)))}


def seal(path: str, recipient: str) -> dict[str, Any]:
    """Encrypt a file to /dev/null."""
    import secrets

    from caf_pipeline.formats import age

    file_key, nonce = secrets.token_bytes(16), secrets.token_bytes(16)
    age.make_header([age.parse_recipient(recipient)], file_key)
    payload = age.Payload(file_key, nonce)
    return _in_two_threads(
        path,
        0,
        16 * age.SEGMENT_BYTES,
        lambda number, piece, is_end: payload.seal(number, piece, is_end=is_end),
    )


def open_file(path: str, identity: str) -> dict[str, Any]:
    """Decrypt a file to /dev/null."""
    from caf_pipeline.formats import age

    with Path(path).open("rb") as file:
        prefix = file.read(age.MAX_HEADER_BYTES)
    payload, start = age.open_file(prefix, [age.parse_identity(Path(identity).read_text())])
    return _in_two_threads(
        path,
        start,
        16 * age.SEALED_SEGMENT_BYTES,
        lambda number, piece, is_end: payload.open(number, piece, is_end=is_end),
    )


def plan(inventory: str, folder: str) -> dict[str, Any]:
    """Plan a large inventory. Half of its objects are located."""
    from caf_pipeline.inventory.cutting import write_plan
    from caf_pipeline.inventory.plan import PlanTerms
    from caf_pipeline.inventory.remaining import not_yet_archived

    work_folder = Path(folder)
    (work_folder / "plan").mkdir(parents=True)
    standings = Path(inventory).with_suffix(".known")
    delta = not_yet_archived(Path(inventory), standings, work_folder / "delta.parquet")
    result = write_plan(
        delta.path, work_folder / "plan", PlanTerms("bench", "0" * 32, 30 << 30, "snapshot", MOMENT)
    )
    return {"objects": result.object_count, "bytes": result.object_bytes}


def plan_again(inventory: str, folder: str) -> dict[str, Any]:
    """Plan an inventory without new objects: versions, exceptions, delta, ended skips."""
    from caf_pipeline.inventory.current import find_exceptions, identify
    from caf_pipeline.inventory.remaining import ended_skips, not_yet_archived
    from caf_pipeline.inventory.snapshot import read_snapshot

    work_folder, snapshot = Path(folder), read_snapshot(Path(inventory))
    work_folder.mkdir()
    files = Path(inventory).with_suffix(".known"), Path(inventory).with_suffix(".stated")
    identified = identify(snapshot, *files, work_folder / "identified.parquet")
    exception_count = find_exceptions(snapshot, identified, *files, work_folder / "found.parquet")
    delta = not_yet_archived(identified.unsettled, files[0], work_folder / "delta.parquet")
    return {
        "objects": delta.object_count + exception_count + len(ended_skips(delta.path, files[0]))
    }


def report(endpoint: str, inventory: str, folder: str) -> dict[str, Any]:
    """Make a snapshot of an S3 Inventory report, as a run does."""
    from benchmarks.server import BUCKET, KEY
    from caf_pipeline.inventory.snapshot import SnapshotWriter
    from caf_pipeline.settings import SourceSettings
    from caf_pipeline.source.s3.source import open_s3_source

    work_folder = Path(folder)
    (work_folder / "files").mkdir(parents=True)
    keys = {"access_key_id": KEY, "secret_access_key": KEY}
    settings = SourceSettings.model_validate(
        {"bucket": BUCKET, "endpoint_url": endpoint, "inventory": inventory} | keys
    )
    inventory_report = open_s3_source("bench", settings, attempts=3, connections=16).open_report()
    with SnapshotWriter(
        work_folder / "snapshot.parquet",
        source="bench",
        listed_at=inventory_report.taken_at,
        report=inventory_report.url,
    ) as writer:
        writer.add_files([file for file, _ in inventory_report.fetch(work_folder / "files")])
        snapshot = writer.finish()
    return {"objects": snapshot.object_count}


def claim(url: str, rows: str, chunks: str, objects: str) -> dict[str, Any]:
    """Register a plan with its claims, as the last step of planning does."""
    import pyarrow.parquet as pq

    from caf_pipeline.inventory.plan import ChunkPlan
    from caf_pipeline.ledger.database import Database
    from caf_pipeline.ledger.ledger import Ledger
    from caf_pipeline.ledger.records import PlanRecord, plan_lease
    from caf_pipeline.system.processes import this_process

    ledger, count, size = Ledger(Database(url)), int(objects), int(objects)
    record = PlanRecord(
        "src", bytes(32), "00000000", "snapshot", "plan", int(chunks) * count, int(chunks) * size
    )
    planned = [
        ChunkPlan(number, count, size, size, ".caf/chunk", ".caf/manifest.parquet")
        for number in range(1, int(chunks) + 1)
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
    """Seal a packed chunk with its rows and locate it, as a run does."""
    from caf_pipeline.chunk_state import ChunkState
    from caf_pipeline.inventory.manifest import open_manifest
    from caf_pipeline.ledger.database import Database
    from caf_pipeline.ledger.ledger import Ledger
    from caf_pipeline.ledger.records import SealRecord
    from caf_pipeline.records import Copy, PostRecord
    from caf_pipeline.system.processes import this_process

    ledger, opened = Ledger(Database(url)), open_manifest(Path(manifest))
    with ledger.leases.hold(f"chunk/{chunk}", this_process("bench")) as lease:
        started = time.monotonic()
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
        "seal_seconds": sealed - started,
        "locate_seconds": time.monotonic() - verified,
    }


def _context() -> "RunContext":
    from caf_pipeline.settings import load_settings
    from caf_pipeline.wiring import open_run_context

    return open_run_context(load_settings(), "src", run="bench")


def plan_located(snapshot: str) -> dict[str, Any]:
    """Plan and account for an inventory of objects that the ledger has, as a run does."""
    from caf_pipeline.inventory.snapshot import read_snapshot
    from caf_pipeline.steps.planning import account_for, cut_plan

    context, inventory = _context(), read_snapshot(Path(snapshot))
    report = cut_plan(context, inventory)
    accounting = account_for(context, inventory)
    context.close()
    if report.plans or accounting.current != inventory.object_count:
        raise SystemExit(f"{len(report.plans)} plans, and {accounting}")
    return {"objects": inventory.object_count}


def compare_rows(folder: str) -> dict[str, Any]:
    """Count the ledger's rows and compare them with those that plans keep, as `caf doctor` does."""
    import shutil

    context = _context()
    chunks = sum(1 for _ in context.ledger.stray_rows.by_chunk("src"))
    Path(folder).mkdir()
    differing = context.ledger.exports.compare_kept("src", Path(folder), context.kept_locations())
    shutil.rmtree(folder)
    context.close()
    return {"chunks": chunks, "differing": differing}


def export_located(path: str) -> dict[str, Any]:
    """Export all locations, as `caf safe-to-delete` does."""
    context = _context()
    objects = context.ledger.exports.located("src", Path(path))
    context.close()
    return {"objects": objects}


def look_up(url: str, keys: str, at_once: str) -> dict[str, Any]:
    """Look up keys in batches of `at_once`, as a process with an open connection does."""
    from caf_pipeline.ledger.database import Database
    from caf_pipeline.ledger.lookup import Lookup

    lookup, all_keys, count = Lookup(Database(url)), Path(keys).read_text().split(), 0
    for first in range(0, len(all_keys), int(at_once)):
        batch = all_keys[first : first + int(at_once)]
        count += len(lookup.locate_many("src", batch))
    lookup.close()
    return {"looked_up": len(all_keys), "located": count}


def list_pages(url: str, prefix: str, level: str, pages: str) -> dict[str, Any]:
    """List pages of entries below a prefix, as `caf ls` does."""
    from caf_pipeline.ledger.database import Database
    from caf_pipeline.ledger.lookup import Lookup
    from caf_pipeline.retrieval.listing import list_level, list_objects

    lookup = Lookup(Database(url))
    pages_read = _time_pages(
        (list_level if int(level) else list_objects)(lookup, "src", prefix), int(pages)
    )
    lookup.close()
    return pages_read


def select_pages(url: str, prefix: str, level: str, pages: str) -> dict[str, Any]:
    """Select only the keys below a prefix, 1,000 at a time: the peer of `list_pages`."""
    import psycopg

    def keys(connection: psycopg.Connection[Any]) -> Iterator[str]:
        last = prefix
        while rows := connection.execute(
            "SELECT file_path FROM file_locations "
            "WHERE source_id = 1 AND file_path > %s AND file_path < %s "
            "ORDER BY file_path LIMIT 1000",
            [last, prefix + chr(0x10FFFF)],
        ).fetchall():
            yield from (key for (key,) in rows)
            last = rows[-1][0]

    with psycopg.connect(url, autocommit=True) as connection:
        entries = keys(connection)
        if int(level):
            entries = (
                folder
                for folder, _ in groupby(entries, lambda key: key[: key.index("/", len(prefix))])
            )
        return _time_pages(entries, int(pages))


def _time_pages(entries: Iterator[Any], pages: int) -> dict[str, Any]:
    """Read pages of 1,000 entries. Return the number of entries and a page's median time."""
    import statistics
    import time

    count, seconds = 0, list[float]()
    while len(seconds) < pages:
        started = time.perf_counter()
        page_size = sum(1 for _ in islice(entries, 1000))
        if not page_size:
            break
        count += page_size
        seconds.append(time.perf_counter() - started)
    return {"entries": count, "p50_ms": 1000 * statistics.median(seconds)}


def read_one(key: str, count: str, pause_seconds: str = "0") -> dict[str, Any]:
    """Read and compare an object repeatedly, as a program with an open archive does."""
    import statistics
    import time

    from caf_pipeline.wiring import open_archive

    seconds = []
    with open_archive() as archive:
        for _ in range(int(count)):
            started = time.perf_counter()
            size_bytes = len(archive.read("bench", key))
            time.sleep(float(pause_seconds))
            seconds.append(time.perf_counter() - started)
    return {"bytes": size_bytes, "p50_ms": 1000 * statistics.median(seconds)}


def store(*arguments: str) -> dict[str, Any]:
    """Upload a posted file to several providers as a run does."""
    from benchmarks import jackal

    return jackal.store(*arguments)


def upload(*arguments: str) -> dict[str, Any]:
    """Upload a posted file to one provider and wait for the answer."""
    from benchmarks.jackal import send

    return send(*arguments)


WORK: dict[str, Callable[..., dict[str, Any]]] = {
    "pack": pack,
    "seal": seal,
    "open-file": open_file,
    "plan": plan,
    "plan-again": plan_again,
    "claim": claim,
    "report": report,
    "load": load,
    "plan-located": plan_located,
    "compare-rows": compare_rows,
    "export-located": export_located,
    "look-up": look_up,
    "list-pages": list_pages,
    "select-pages": select_pages,
    "read-one": read_one,
    "upload": upload,
    "store": store,
}


def main() -> None:
    """Run the function that the arguments name, as a caf process does, and print its result."""
    collect_garbage_rarely()
    block_unused_modules()
    function, *arguments = sys.argv[1:]
    print(json.dumps(WORK[function](*arguments)))


if __name__ == "__main__":
    main()
