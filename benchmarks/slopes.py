"""Measure how costs grow with size.

`python -m benchmarks.slopes` runs caf's side of cases at three sizes. It fits a straight line to
the CPU seconds and reports the peak memory of each size.
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
)
"""One case for each stage. All cases take hours: three runs at each of three sizes."""
RUNS = 3  # of each size; the fastest counts, because disturbances only slow a run down


def measure(name: str, scale: str) -> dict[str, Any]:
    """Return the costs of caf's side of a case at each share of its size, and the fitted line.

    `curve` is the slope between the two largest sizes divided by that between the two smallest. It
    is 1 if the costs grow linearly.
    """
    usages = [_fastest_run(name, scale, share) for share in SHARES]
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


def _fastest_run(name: str, scale: str, share: float) -> Usage:
    with tempfile.TemporaryDirectory(dir=KEPT) as folder, contextlib.ExitStack() as stack:
        bench = Bench(Path(folder).resolve(), scale, stack, share)
        with contextlib.contextmanager(CASES[name].sides)(bench) as (ours, _):
            return min((run(ours) for _ in range(RUNS)), key=lambda usage: usage.cpu_seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure cases and print a line of JSON for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slopes", description=__doc__)
    parser.add_argument(
        "cases",
        nargs="*",
        choices=[*CASES, []],
        metavar="CASE",
        help=f"cases to measure (default: {', '.join(STAGES)})",
    )
    parser.add_argument("--scale", choices=SCALES, default="full", help="size of the inputs")
    parser.add_argument(
        "--keep", action="store_true", help="append the results to benchmarks/history.jsonl"
    )
    options = parser.parse_args(arguments)
    KEPT.mkdir(parents=True, exist_ok=True)
    about = report.about()
    for name in options.cases or STAGES:
        report.publish(
            {
                "case": name,
                "scale": f"slopes-{options.scale}",
                **measure(name, options.scale),
                **about,
            },
            keep=options.keep,
        )


if __name__ == "__main__":
    main()
