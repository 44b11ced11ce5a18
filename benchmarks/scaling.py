"""Estimates the costs of an archive: docs/explanation/scaling.md.

`make bench` and `make bench-scaling` measured the coefficients.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.report import HISTORY, replace_between
from caf_pipeline.steps.preview import EGRESS_PRICE, GET_PRICE

PAGE = Path("docs/explanation/scaling.md")

KIB, MIB, GIB, TIB = (1 << shift for shift in (10, 20, 30, 40))

# --- assumptions ---

CORES: Final = 8
NETWORK: Final = 1.25e9  # bytes a second each way: 10 Gbit/s
GETS: Final = 256  # packing.max_requests
GET_SECONDS: Final = 0.03  # until S3 sends the first byte
PREFIXES: Final = 16
PREFIX_GETS: Final = 5_500
"""GETs a second for each prefix: "Best practices design patterns" in the Amazon S3 User Guide."""
COPIES: Final = 3
BLOCK_SECONDS: Final = 6.0
POSTS: Final = 8  # files that one transaction posts: docs/how-to/connect-jackal.md
TARGET: Final = 30 * GIB
MEMBERS: Final = 1_000_000  # the maximum of a chunk

WORKLOADS: Final = (
    ("10⁶ objects of 128 KiB", 10**6, 128 * KIB),
    ("10⁹ objects of 128 KiB", 10**9, 128 * KIB),
    ("1 PiB in objects of 8 MiB", 1024 * TIB // (8 * MIB), 8 * MIB),
)
WORKERS: Final = (1, 10, 100)


@dataclass(frozen=True)
class Coefficients:
    """Measured costs in seconds.

    Attributes:
        object_cpu: CPU time to pack a small object: GET, checksum, SHA-256, manifest, index,
            journal.
        byte_cpu: CPU time to pack a byte of a large object: fetch, SHA-256, root.
        plan_object: CPU time to plan an object of an inventory.
        load_row: Wall time to load a location row, including the database's work.
        chunk_moves: Wall time of the ledger to move a chunk through its states, with the number of
            workers that the ledger serves best.
    """

    object_cpu: float
    byte_cpu: float
    plan_object: float
    load_row: float
    chunk_moves: float

    @classmethod
    def measured(cls, lines: list[dict[str, Any]]) -> "Coefficients":
        """Compute the coefficients from the newest line of each case."""
        newest = {(line["case"], line["scale"]): line for line in lines}
        rates = [line["chunks_per_second"] for line in lines if line["case"] == "workers"]
        # Wall time, because the database does most of the work.
        loading = newest["load-in-order", "slopes-full"]
        return cls(
            object_cpu=newest["packing-small", "slopes-full"]["slope"] / 20_000,
            byte_cpu=newest["packing-large", "slopes-full"]["slope"] / (8 * 256 * MIB),
            plan_object=newest["planning", "slopes-full"]["slope"] / 4_000_000,
            load_row=(loading["seconds"][-1] - loading["seconds"][0])
            / (loading["shares"][-1] - loading["shares"][0])
            / 5_000_000,
            chunk_moves=1 / max(rates),
        )


def stages(
    measured: Coefficients, objects: int, object_bytes: int, workers: int
) -> dict[str, float]:
    """Return the seconds that each stage alone takes. Stages overlap, so the slowest counts."""
    size_bytes = objects * object_bytes
    chunks = max(size_bytes / TARGET, objects / MEMBERS)
    return {
        "GETs in flight": objects * GET_SECONDS / (GETS * workers),
        "S3's rate": objects / (PREFIX_GETS * PREFIXES),
        "CPU": (objects * measured.object_cpu + size_bytes * measured.byte_cpu) / (CORES * workers),
        "network in": size_bytes / (NETWORK * workers),
        "network out": COPIES * size_bytes / (NETWORK * workers),
        "chain": chunks / POSTS * BLOCK_SECONDS,
        "location rows": objects * measured.load_row,
        "states": chunks * measured.chunk_moves,
    }


def write(history: Path) -> None:
    """Replace the tables between the marks of the page."""
    lines = [json.loads(line) for line in history.read_text(encoding="utf-8").splitlines()]
    replace_between(PAGE, _tables(lines))


def _tables(lines: list[dict[str, Any]]) -> str:
    measured = Coefficients.measured(lines)
    rows = [
        "| coefficient | measured | by |",
        "|---|---|---|",
        f"| CPU of a small object | {measured.object_cpu * 1e6:.0f} µs | slope of packing-small |",
        f"| CPU of a GiB | {measured.byte_cpu * GIB:.2f} s | slope of packing-large |",
        f"| planning an object | {measured.plan_object * 1e6:.1f} µs | slope of planning |",
        f"| a location row | {measured.load_row * 1e6:.1f} µs | load-in-order, by the clock |",
        f"| the states of a chunk | {measured.chunk_moves * 1e3:.1f} ms | workers, below |",
        "",
        "| archive | workers | plan | the slowest stage alone | the next | GETs, USD | egress, "
        f"USD | on Jackal, × {COPIES} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, objects, object_bytes in WORKLOADS:
        size_bytes = objects * object_bytes
        for workers in WORKERS:
            seconds = stages(measured, objects, object_bytes, workers)
            first, second = sorted(seconds.items(), key=lambda stage: -stage[1])[:2]
            rows.append(
                f"| {name} | {workers} | {_time(objects * measured.plan_object)} | "
                f"**{_time(first[1])}**: {first[0]} "
                f"| {_time(second[1])}: {second[0]} | {objects / 1000 * GET_PRICE:,.2f} "
                f"| {size_bytes / GIB * EGRESS_PRICE:,.0f} | {COPIES * size_bytes / TIB:,.1f} TiB |"
            )
    rows += [
        "",
        "| workers | chunks a second | moves a second | median of a chunk, s | slowest, s |",
        "|---|---|---|---|---|",
    ]
    last = {line["workers"]: line for line in lines if line["case"] == "workers"}
    rows += [
        f"| {count} | {line['chunks_per_second']:.1f} | {line['moves_per_second']:.0f} | "
        f"{line['median_chunk_seconds']:.2f} "
        f"| {line['slowest_chunk_seconds']:.2f} |"
        for count, line in sorted(last.items())
    ]
    slopes = {line["case"]: line for line in lines if line["scale"] == "slopes-full"}
    curves = [(line["curve"], case) for case, line in slopes.items()]
    steep = [f"{case} ({curve:.1f})" for curve, case in sorted(curves, reverse=True) if curve > 1.3]
    rows += ["", f"Curves above 1.3, of {len(curves)} cases: {', '.join(steep) or 'none'}."]
    return "\n".join(rows)


def _time(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.0f} s"


if __name__ == "__main__":
    write(HISTORY)
