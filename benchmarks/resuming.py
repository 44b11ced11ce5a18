"""What the packing journal costs, and what it saves: packing with its checkpoints and without, and going on after a kill.

Source: docs/decisions/0010-the-packing-journal.md.
"""

import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import server

COST_ROUNDS = 5
RESUME_ROUNDS = 3
SMALL = ("journal-small", 20_000, 16 << 10)
LARGE = ("journal-large", 8, 256 << 20)
RESUMED = ("journal-resumed", 64, 64 << 20)
KILLED_AT = 0.9
MIB = 1 << 20


def cost(endpoint: str) -> list[str]:
    """Measure packing with the journal's checkpoints and with none but the last, in turn."""
    lines = [
        "| objects | without checkpoints, s | with them, s | ratio: median (lowest to highest) of 5 |",
        "|---|---|---|---|",
    ]
    for prefix, count, size_bytes in (SMALL, LARGE):
        server.fill(server.open_store(endpoint), prefix, count=count, size_bytes=size_bytes)
        arguments = ("pack", endpoint, f"{prefix}/", "left")
        _measure(*arguments, "none")  # warms the server's page cache for both
        bare, kept = [], []
        for number in range(COST_ROUNDS):
            turns = [(bare, "none"), (kept, "kept")]
            for seconds, journal in turns if number % 2 else turns[::-1]:  # who goes second finds the disk busier
                seconds.append(_measure(*arguments, journal)["seconds"])
        ratios = [with_it / without for without, with_it in zip(bare, kept, strict=True)]
        shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        described = f"{count:,} × {size_bytes // 1024:,} KiB"
        lines.append(f"| {described} | {statistics.median(bare):.2f} | {statistics.median(kept):.2f} | {shown} |")
    return lines


def resuming(endpoint: str) -> list[str]:
    """Measure how long a chunk of 4 GiB takes that is killed at nine tenths: to be finished, and to be packed again."""
    prefix, count, size_bytes = RESUMED
    server.fill(server.open_store(endpoint), prefix, count=count, size_bytes=size_bytes)
    again, after, fetched = [], [], []
    for _ in range(RESUME_ROUNDS):
        with tempfile.TemporaryDirectory(dir=".caf") as whole, tempfile.TemporaryDirectory(dir=".caf") as broken:
            packed = _measure("resume", endpoint, f"{prefix}/", whole, "0")
            _measure("resume", endpoint, f"{prefix}/", broken, str(int(count * size_bytes * KILLED_AT)), killed=True)
            resumed = _measure("resume", endpoint, f"{prefix}/", broken, "0")
            if resumed["root"] != packed["root"]:
                raise SystemExit("the resumed chunk is another one")
        again.append(packed["seconds"])
        after.append(resumed["seconds"])
        missing_bytes = (count - math.ceil(KILLED_AT * count)) * size_bytes  # progress counts whole objects
        fetched.append((resumed["fetched_bytes"] - missing_bytes) / MIB)
    ratios = [short / long for short, long in zip(after, again, strict=True)]
    shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return [
        "| chunk | packed again, s | finished after a kill, s | ratio: median (lowest to highest) of 3 | fetched twice, MiB |",
        "|---|---|---|---|---|",
        f"| {count * size_bytes >> 30} GiB | {statistics.median(again):.2f} | {statistics.median(after):.2f} | {shown} |"
        f" {min(fetched):,.0f} to {max(fetched):,.0f} |",
    ]


def _measure(*arguments: str, killed: bool = False) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "benchmarks.measured", *arguments], capture_output=True, text=True, check=False)
    if killed and done.returncode == -signal.SIGKILL:
        return {}
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(*arguments, result, file=sys.stderr)
    return result


def main() -> None:
    """Measure the journal alone: `python -m benchmarks.resuming`."""
    Path(".caf").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=".caf") as name, server.running(Path(name), Path(".caf/tools")) as (endpoint, _):
        print("\n".join([*cost(endpoint), "", *resuming(endpoint)]))


if __name__ == "__main__":
    main()
