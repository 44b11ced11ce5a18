"""Measure cases of caf against peer programs.

`make bench` measures all cases, `make bench CASE=name` one case, and `make bench-quick` all cases
at a smaller scale. The option `--keep` updates docs/reference/benchmarks.md.
"""

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import ledger_size, report
from benchmarks.case import SCALES, Bench, Case
from benchmarks.cases import CASES
from benchmarks.inputs import KEPT
from benchmarks.pairs import PAIRS, compare

PEERS = ("rclone", "openssl", "tar", "go")


def measure(case: Case, bench: Bench, pairs: int) -> dict[str, Any]:
    """Measure a case and return its line of the history."""
    bench.server, bench.round_trip_ms = "", case.round_trip_ms
    with contextlib.contextmanager(case.sides)(bench) as (ours, theirs):
        results = compare(ours, theirs, pairs=pairs).summary(case.ratio_of)
        goals = {"ratio": case.goal, "cpu_ratio": case.cpu_goal, "peak_ratio": case.peak_goal}
        return {
            "case": case.name,
            "scale": bench.scale,
            **results,
            "goals": {name: goal for name, goal in goals.items() if goal is not None},
            **({"server": bench.server} if bench.server else {}),
            **report.about(),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the given cases, or all of them, and print a line of JSON for each case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help=f"cases to measure (default: all but the last): {', '.join(CASES)}, "
        f"{ledger_size.NAME}",
    )
    parser.add_argument(
        "--scale", choices=SCALES, default="full", help="size of the inputs (default: full)"
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=PAIRS,
        help=f"how often both sides run (default: {PAIRS})",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="append the results to benchmarks/history.jsonl and update the page",
    )
    options = parser.parse_args(arguments)
    names = options.cases or list(CASES)
    if unknown := set(names) - {*CASES, ledger_size.NAME}:
        parser.error(f"unknown case {sorted(unknown)[0]!r}; choose from {', '.join(CASES)}")
    missing = [program for program in PEERS if not shutil.which(program)]
    if missing and names != [ledger_size.NAME]:
        parser.error(
            f"not installed: {', '.join(missing)}; the benchmarks compare caf with these programs"
        )
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as folder, contextlib.ExitStack() as stack:
        Path(folder).chmod(0o755)  # else root's ledgers are in /var/lib, and stay there
        bench = Bench(Path(folder).resolve(), options.scale, stack)
        for name in names:
            if name == ledger_size.NAME:
                result = ledger_size.measure(bench.folder, options.scale)
                result = {"case": name, "scale": options.scale, **result, **report.about()}
            else:
                result = measure(CASES[name], bench, options.pairs)
            report.publish(result, keep=options.keep)
    if options.keep:
        report.write(report.HISTORY)


if __name__ == "__main__":
    main()
