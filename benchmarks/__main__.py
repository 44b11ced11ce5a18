"""Runs all measurements and writes docs/benchmarks.md: `make bench`."""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import inventories, jackal, machine, resuming, server

ROUNDS = 3
SMALL = ("small", 20_000, 16 << 10)
SMALL_TENTH = ("small-tenth", 2_000, 16 << 10)
LARGE = ("large", 8, 256 << 20)
LARGE_QUARTER = ("large-quarter", 2, 256 << 20)
INVENTORIES = (1_000_000, 4_000_000)
MIB = 1 << 20
REPORT = Path("docs/benchmarks.md")


def measure(what: str, *arguments: str) -> dict[str, Any]:
    """Run one measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.measured", what, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(what, *arguments, result, file=sys.stderr)
    return result


def compare(endpoint: str, prefix: str, checksums: str) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """Alternate bare reading and packing; return the median of each and the ratios of the rounds."""
    measure("read", endpoint, prefix)  # warms the server's page cache for both
    reads, packs = [], []
    for _ in range(ROUNDS):
        reads.append(measure("read", endpoint, prefix))
        packs.append(measure("pack", endpoint, prefix, checksums))
    ratios = [packed["seconds"] / bare["seconds"] for bare, packed in zip(reads, packs, strict=True)]
    by_time = [sorted(results, key=lambda result: result["seconds"])[ROUNDS // 2] for results in (reads, packs)]
    return by_time[0], by_time[1], ratios


def packing(endpoint: str) -> list[str]:
    """Measure packing against bare reading, and its memory at two sizes."""
    store = server.open_store(endpoint)
    for prefix, count, size_bytes in (SMALL, SMALL_TENTH, LARGE, LARGE_QUARTER):
        server.fill(store, prefix, count=count, size_bytes=size_bytes)
    lines = [
        "| objects | checksums of S3 | bare reading, s | packing, s | ratio: median (lowest to highest) of 3 | packing, MiB/s |",
        "|---|---|---|---|---|---|",
    ]
    for (prefix, count, size_bytes), checksums in itertools.product((SMALL, LARGE), ("left", "compared")):
        bare, packed, ratios = compare(endpoint, f"{prefix}/", checksums)
        shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rate = packed["bytes"] / MIB / packed["seconds"]
        described = f"{count:,} × {size_bytes // 1024:,} KiB"
        lines.append(f"| {described} | {checksums} | {bare['seconds']:.2f} | {packed['seconds']:.2f} | {shown} | {rate:,.0f} |")
    lines += ["", "| packing | peak memory, MiB |", "|---|---|"]
    for prefix, count, size_bytes in (SMALL_TENTH, SMALL, LARGE_QUARTER, LARGE):
        peak = measure("pack", endpoint, f"{prefix}/", "left")["peak_bytes"] / MIB
        lines.append(f"| {count:,} × {size_bytes // 1024:,} KiB | {peak:,.0f} |")
    return lines


def planning(folder: Path) -> list[str]:
    """Measure the memory of planning at two sizes of inventory."""
    lines = ["| objects in the inventory, half of them new | planning, s | peak memory, MiB |", "|---|---|---|"]
    for count in INVENTORIES:
        path = folder / f"inventory-{count}.parquet"
        inventories.make(path, count)
        planned = measure("plan", str(path))
        lines.append(f"| {count:,} | {planned['seconds']:.1f} | {planned['peak_bytes'] / MIB:,.0f} |")
    return lines


def main() -> None:
    """Measure everything and write the report."""
    Path(".caf").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=".caf") as name:
        folder = Path(name)
        with server.running(folder, Path(".caf/tools")) as (endpoint, server_name):
            packed = packing(endpoint)
            journal, resumed = resuming.cost(endpoint), resuming.resuming(endpoint)
        planned = planning(folder)
        roots = jackal.merkle(folder)
        uploads = jackal.uploads(folder)
    text = [
        "# Benchmarks",
        "",
        f"Written by `make bench` on {datetime.now(UTC):%Y-%m-%d}. {machine.describe()}.",
        f"S3 server: {server_name}, on the same cores; use the ratios, not the seconds.",
        "",
        "Packing does what bare reading does, and writes the chunk, takes SHA-256 of each member and the Merkle root (type 3).",
        "",
        *packed,
        "",
        "Packing keeps a journal; in turn, the same is packed without one.",
        "",
        *journal,
        "",
        "A chunk whose run is killed at nine tenths is finished by the next: what is staged is hashed again, the rest fetched.",
        "",
        *resumed,
        "",
        "Planning reads the inventory, leaves out what the ledger knows, and cuts the rest into chunks.",
        "",
        *planned,
        "",
        "The Merkle root is taken in Python, with hashes from libraries; openssl reads the same file for SHA-256, in turn.",
        "",
        *roots,
        "",
        "An upload goes to one provider of the loopback network, which hashes it first; curl sends the same form, in turn.",
        "Peak memory is that of the uploading process.",
        "",
        *uploads,
        "",
    ]
    REPORT.write_text("\n".join(text), encoding="utf-8")
    print(REPORT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
