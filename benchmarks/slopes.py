"""How costs grow: our side of cases at three sizes, a straight line through their CPU seconds, and
the peak memory of each.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.case import SCALES, Bench
from benchmarks.cases import CASES
from benchmarks.inputs import KEPT
from benchmarks.pairs import Usage, run

SHARES = (0.1, 0.4, 1.0)
STAGES = (
    "writer-small",
    "writer-large",
    "reader-open",
    "merkle-3",
    "packing-small",
    "packing-mix",
    "packing-large",
    "upload",
    "restore-small",
    "planning",
    "load-in-order",
)  # one case of each stage: all of them take hours, three runs at three sizes
RUNS = 3  # of each size, of which the fastest counts: what disturbs a run only ever makes it slower


def measure(name: str, scale: str) -> dict[str, Any]:
    """Return what our side of a case takes at each share of its size, and the line that fits best.

    `curve` is how much more a share costs at the largest size than at the smallest: 1 where it
    grows linearly.
    """
    usages = [_least(name, scale, share) for share in SHARES]
    seconds = [usage.cpu_seconds for usage in usages]
    slope, start = np.polyfit(SHARES, seconds, 1)
    steps = np.diff(seconds) / np.diff(SHARES)
    return {
        "shares": SHARES,
        "seconds": [usage.seconds for usage in usages],
        "cpu_seconds": seconds,
        "peak_bytes": [usage.peak_bytes for usage in usages],
        "slope": float(slope),
        "start": float(start),
        "curve": float(steps[-1] / steps[0]),
    }


def _least(name: str, scale: str, share: float) -> Usage:
    with tempfile.TemporaryDirectory(dir=KEPT) as folder, contextlib.ExitStack() as stack:
        bench = Bench(Path(folder).resolve(), scale, stack, share)
        with contextlib.contextmanager(CASES[name].sides)(bench) as (ours, _):
            return min((run(ours) for _ in range(RUNS)), key=lambda usage: usage.cpu_seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure cases; a line of JSON for each on standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slopes", description=__doc__)
    parser.add_argument(
        "cases", nargs="*", choices=[*CASES, []], metavar="CASE", help=f"none: {', '.join(STAGES)}"
    )
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument(
        "--keep", action="store_true", help="add what was measured to benchmarks/history.jsonl"
    )
    asked = parser.parse_args(arguments)
    KEPT.mkdir(parents=True, exist_ok=True)
    about = report.about()
    for name in asked.cases or STAGES:
        report.tell(
            {"case": name, "scale": f"slopes-{asked.scale}", **measure(name, asked.scale), **about},
            keep=asked.keep,
        )


if __name__ == "__main__":
    main()
