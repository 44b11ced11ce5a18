"""Measures cases and writes docs/reference/benchmarks.md: `make bench`, `make bench CASE=name`,
`make bench-quick`.
"""

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.case import SCALES, Bench, Case
from benchmarks.cases import CASES
from benchmarks.inputs import KEPT
from benchmarks.pairs import PAIRS, compare

PEERS = ("rclone", "openssl", "tar")


def measure(case: Case, bench: Bench, pairs: int) -> dict[str, Any]:
    """Return one line of the history: what was measured, on what."""
    bench.server = ""
    with contextlib.contextmanager(case.sides)(bench) as (one, other):
        found = compare(one, other, pairs=pairs).summary()
        goals = {"ratio": case.goal, "cpu_ratio": case.cpu_goal, "peak_ratio": case.peak_goal}
        return {
            "case": case.name,
            "scale": bench.scale,
            **found,
            "goals": {name: goal for name, goal in goals.items() if goal is not None},
            **({"server": bench.server} if bench.server else {}),
            **report.about(),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases that are named, or all; a line of JSON for each on standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; none: all"
    )
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument(
        "--keep",
        action="store_true",
        help="add what was measured to benchmarks/history.jsonl, and write the page",
    )
    asked = parser.parse_args(arguments)
    if unknown := set(asked.cases) - set(CASES):
        parser.error(f"there is no case {sorted(unknown)[0]!r}; there are {', '.join(CASES)}")
    if missing := [program for program in PEERS if not shutil.which(program)]:
        parser.error(
            f"{', '.join(missing)} must be installed: what is measured is compared with them"
        )
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as folder, contextlib.ExitStack() as stack:
        bench = Bench(Path(folder).resolve(), asked.scale, stack)
        for name in asked.cases or CASES:
            report.tell(measure(CASES[name], bench, asked.pairs), keep=asked.keep)
    if asked.keep:
        report.write(report.HISTORY)


if __name__ == "__main__":
    main()
