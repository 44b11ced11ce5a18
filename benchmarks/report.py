"""Writes docs/reference/benchmarks.md and its plot from the history.

The page shows the newest line of each case.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.cases import CASES

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
    replace_between(PAGE, _tables(shown))
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
        goals, ours, theirs = line["goals"], line["ours"], line["theirs"]
        reached = all(line[name] <= goal for name, goal in goals.items())
        texts = ", ".join(f"{_GOALS[name]}{goal}" for name, goal in goals.items())
        rows.append(
            f"| {line['case']} | **{line['ratio']:.2f}** | {line['lowest']:.2f}–"
            f"{line['highest']:.2f} | {texts}: {'reached' if reached else 'not reached'} | "
            f"{line['cpu_ratio']:.2f} | {ours['seconds']:.2f}, {theirs['seconds']:.2f} | "
            f"{ours['peak_bytes'] / MIB:,.0f}, {theirs['peak_bytes'] / MIB:,.0f} |"
        )
    rows += ["", "| case | what caf does | against |", "|---|---|---|"]
    rows += [
        f"| {case.name} | {case.work} | {case.against} |"
        for case in (CASES[line["case"]] for line in lines)
    ]
    days = sorted(line["at"][:10] for line in lines)
    return "\n".join([*rows, "", f"Measured from {days[0]} to {days[-1]}."])


def _plot(lines: Sequence[dict[str, Any]]) -> str:
    """Return an SVG of the ratios as bars, with a line at each goal."""
    height = _ROW * (len(lines) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_LEFT + _WIDTH}" height="{height}" fill="white"/>',
        f'<line x1="{_LEFT + _SCALE}" x2="{_LEFT + _SCALE}" y1="0" y2="{height - _ROW}" '
        'stroke="#999"/>',
        f'<text x="{_LEFT + _SCALE}" y="{height - 8}" text-anchor="middle">equal times</text>',
    ]
    for number, line in enumerate(lines):
        top, end = number * _ROW, min(line["ratio"] * _SCALE, _WIDTH - 60)
        goal = _LEFT + line["goals"]["ratio"] * _SCALE
        colour = "#4a8" if line["ratio"] <= line["goals"]["ratio"] else "#c74"
        parts += [
            f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end">{line["case"]}</text>',
            f'<rect x="{_LEFT}" y="{top + 4}" width="{end:.0f}" height="{_ROW - 8}" '
            f'fill="{colour}"/>',
            f'<line x1="{goal:.0f}" x2="{goal:.0f}" y1="{top + 1}" y2="{top + _ROW - 1}" '
            'stroke="black" stroke-width="2"/>',
            f'<text x="{_LEFT + end + 6:.0f}" y="{top + 16}">{line["ratio"]:.2f}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
