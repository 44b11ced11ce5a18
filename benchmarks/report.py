"""Writes docs/reference/benchmarks.md and its plot from the history.

The page shows the newest line of each case.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import ledger_size, machine
from benchmarks.bounds import BOUNDS
from benchmarks.cases import CASES, ROUND_TRIPS

HISTORY = Path("benchmarks/history.jsonl")
PAGE = Path("docs/reference/benchmarks.md")
PLOT = Path("docs/images/benchmarks.svg")
MIB = 1 << 20
BEGIN, END = "<!-- measured -->", "<!-- end of what is measured -->"

_GOALS = {"ratio": "", "cpu_ratio": "CPU ", "peak_ratio": "memory "}
# Pixels of a row, of the names, of the plot, and of a ratio of 1.
_ROW, _LEFT, _WIDTH, _SCALE = 24, 130, 760, 120


def about() -> dict[str, str]:
    """Return time, commit and machine, which each line of the history has."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "machine": machine.describe(),
    }


def publish(result: Mapping[str, Any], *, keep: bool) -> None:
    """Print a result as a line of JSON.

    If `keep`, also append the line to the history.
    """
    line = json.dumps(result)
    print(line, flush=True)
    if keep:
        with HISTORY.open("a", encoding="utf-8") as history:
            history.write(line + "\n")


def write(history: Path) -> None:
    """Replace the tables between the marks of the page, and write the plot."""
    lines = [json.loads(line) for line in history.read_text(encoding="utf-8").splitlines()]
    newest = {line["case"]: line for line in lines if line["scale"] == "full"}
    shown = [newest[name] for name in CASES if name in newest]
    tables = [_tables(shown), ledger_size.table(lines)]
    replace_between(PAGE, "\n\n".join(filter(None, tables)))
    PLOT.write_text(_plot(shown), encoding="utf-8")


def replace_between(page: Path, text: str) -> None:
    """Replace the text between the marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def _tables(lines: Sequence[dict[str, Any]]) -> str:
    rows = [
        "| case | ratio | range | goal | CPU ratio | seconds | peak memory, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        if CASES[line["case"]].round_trip_ms:
            continue
        peaks = [f"{line[side]['peak_bytes'] / MIB:,.0f}" for side in ("ours", "theirs")]
        rows.append(
            f"| {line['case']} | **{line['ratio']:.2f}** | {line['lowest']:.2f}–"
            f"{line['highest']:.2f} | {_goal(line)} | "
            f"{line['cpu_ratio']:.2f} | {_seconds(line)} | "
            f"{', '.join(peaks)} |"
        )
    rows += _network_table({line["case"]: line for line in lines})
    rows += ["", "| case | what caf does | against | what bounds caf |", "|---|---|---|---|"]
    for case in (CASES[line["case"]] for line in lines):
        base = CASES.get(case.base, case)
        if case is base or (case.work != base.work and case.round_trip_ms == ROUND_TRIPS[0]):
            name = case.name if case is base else f"{base.name} with latency"
            rows.append(f"| {name} | {case.work} | {case.against} | {BOUNDS[name]} |")
    days = sorted(line["at"][:10] for line in lines)
    return "\n".join([*rows, "", f"Measured from {days[0]} to {days[-1]}."])


def _goal(line: Mapping[str, Any]) -> str:
    if not (goals := line["goals"]):
        return "–"
    reached = all(line[name] <= goal for name, goal in goals.items())
    texts = ", ".join(f"{_GOALS[name]}{goal}" for name, goal in goals.items())
    return f"{texts}: {'reached' if reached else 'not reached'}"


def _seconds(line: Mapping[str, Any]) -> str:
    return f"{line['ours']['seconds']:.2f}, {line['theirs']['seconds']:.2f}"


def _network_table(newest: Mapping[str, dict[str, Any]]) -> Sequence[str]:
    """Return a table with a column for each round trip of the network."""
    names = dict.fromkeys(CASES[name].base for name in newest if CASES[name].base)
    if not names:
        return []
    titles = [f"{round_trip} ms | seconds" for round_trip in (0, *ROUND_TRIPS)]
    rows = ["", f"| case | {' | '.join(titles)} | goal |", f"|---{'|---' * 7}|"]
    for name in names:
        suffixes = ["", *(f"-{round_trip}ms" for round_trip in ROUND_TRIPS)]
        measured = [newest.get(name + suffix) for suffix in suffixes]
        cells = [
            f"**{line['ratio']:.2f}** | {_seconds(line)}" if line else "– | –" for line in measured
        ]
        goals = [
            f"at {round_trip} ms {_goal(line)}"
            for round_trip, line in zip(ROUND_TRIPS, measured[1:], strict=True)
            if line and line["goals"]
        ]
        rows.append(f"| {name} | {' | '.join(cells)} | {', '.join(goals) or '–'} |")
    return rows


def _plot(lines: Sequence[dict[str, Any]]) -> str:
    """Return an SVG of the ratios as bars, with a line at each goal.

    A case's bars at 0, 30 and 100 ms follow each other.
    """
    places = {line["case"]: number for number, line in enumerate(lines)}

    def place(line: Mapping[str, Any]) -> tuple[int, int]:
        case = CASES[line["case"]]
        return places.get(case.base, places[case.name]), case.round_trip_ms

    ordered = sorted(lines, key=place)
    height = _ROW * (len(lines) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_LEFT + _WIDTH}" height="{height}" fill="white"/>',
        f'<line x1="{_LEFT + _SCALE}" x2="{_LEFT + _SCALE}" y1="0" y2="{height - _ROW}" '
        'stroke="#999"/>',
        f'<text x="{_LEFT + _SCALE}" y="{height - 8}" text-anchor="middle">equal times</text>',
    ]
    for number, line in enumerate(ordered):
        top, end = number * _ROW, min(line["ratio"] * _SCALE, _WIDTH - 60)
        goal = line["goals"].get("ratio")
        colour = "#888" if goal is None else "#4a8" if line["ratio"] <= goal else "#c74"
        parts += [
            f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end">{line["case"]}</text>',
            f'<rect x="{_LEFT}" y="{top + 4}" width="{end:.0f}" height="{_ROW - 8}" '
            f'fill="{colour}"/>',
            f'<text x="{_LEFT + end + 6:.0f}" y="{top + 16}">{line["ratio"]:.2f}</text>',
        ]
        if goal is not None:
            at = _LEFT + goal * _SCALE
            parts.append(
                f'<line x1="{at:.0f}" x2="{at:.0f}" y1="{top + 1}" y2="{top + _ROW - 1}" '
                'stroke="black" stroke-width="2"/>'
            )
    return "\n".join([*parts, "</svg>", ""])
