"""What an archive takes, on paper: docs/explanation/scaling.md from coefficients that `make bench`
and `make bench-scaling` measured.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.report import HISTORY, replace_between
from caf_pipeline.steps.preview import EGRESS_PRICE, GET_PRICE

PAGE = Path("docs/explanation/scaling.md")

KIB, MIB, GIB, TIB = (1 << shift for shift in (10, 20, 30, 40))

# --- what is assumed ---

CORES: Final = 8
NETWORK: Final = 1.25e9  # bytes a second each way: 10 Gbit/s
GETS: Final = 64  # packing.fetch_threads
GET_SECONDS: Final = 0.03  # of S3 to its first byte
PREFIXES: Final = 16
PREFIX_GETS: Final = (
    5_500  # a second and prefix: "Best practices design patterns" in the Amazon S3 User Guide
)
COPIES: Final = 3
BLOCK_SECONDS: Final = 6.0
POSTS: Final = 8  # in one transaction: docs/how-to/connect-jackal.md
TARGET: Final = 30 * GIB
MEMBERS: Final = 1_000_000  # of a chunk at most

WORKLOADS: Final = (
    ("10⁶ objects of 128 KiB", 10**6, 128 * KIB),
    ("10⁹ objects of 128 KiB", 10**9, 128 * KIB),
    ("1 PiB in objects of 8 MiB", 1024 * TIB // (8 * MIB), 8 * MIB),
)
WORKERS: Final = (1, 10, 100)


@dataclass(frozen=True)
class Coefficients:
    """What was measured; seconds.

    Attributes:
        object_cpu: of packing one small object: GET, checksum, SHA-256, manifest, index, journal.
        byte_cpu: of packing one more byte of a large one: fetch, SHA-256, root.
        plan_object: of one object of an inventory that is cut into chunks.
        load_row: of one location row, the database's work included.
        chunk_moves: of the ledger for one chunk's states, with as many workers as it serves best.
    """

    object_cpu: float
    byte_cpu: float
    plan_object: float
    load_row: float
    chunk_moves: float

    @classmethod
    def measured(cls, lines: list[dict[str, Any]]) -> "Coefficients":
        """Take the newest line of each case."""
        newest = {(line["case"], line["scale"]): line for line in lines}
        rates = [line["chunks_per_second"] for line in lines if line["case"] == "workers"]
        loading = newest[
            "load-in-order", "slopes-full"
        ]  # by the clock: most of it is the server's work
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
    """Return the seconds that each stage alone would take; side by side the slowest one counts."""
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
    """Write the tables between the marks of the page; the words around stay."""
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
            first, second = sorted(
                stages(measured, objects, object_bytes, workers).items(), key=lambda one: -one[1]
            )[:2]
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
