"""Two commands as whole processes, in turn: wall time, CPU seconds and peak memory as the operating
system counts them.
"""

import json
import os
import re
import secrets
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAIRS = 5
TIMED = str(Path(__file__).with_name("timed.py"))


@dataclass(frozen=True)
class Command:
    """One side of a comparison.

    Attributes: argv: the program and its arguments, or what makes them before each run, which is
        not timed. environment: of it, over this process's own; None takes a variable out. removed:
        files and folders that it makes; they are taken out of the way before each run, which is not
        timed.
    """

    argv: Sequence[str] | Callable[[], Sequence[str]]
    environment: Mapping[str, str | None] = field(default_factory=dict)
    removed: Sequence[Path] = ()


@dataclass(frozen=True)
class Usage:
    """What one run took, by which command: wall and CPU seconds of all its processes, the largest
    resident set in bytes.

    `p50_ms` is what a command that does the same many times tells of one time; None of others.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    argv: Sequence[str]
    p50_ms: float | None = None


def run(command: Command) -> Usage:
    """Run a command to its end; raises SystemExit with what it said where it fails."""
    argv = command.argv() if callable(command.argv) else command.argv
    for path in command.removed:
        _put_aside(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.sync()  # what the run before left to be written is not charged to this one
    environment = {
        name: value
        for name, value in {**os.environ, **command.environment}.items()
        if value is not None
    }
    done = subprocess.run(
        [sys.executable, "-IS", TIMED, *argv], capture_output=True, env=environment, check=False
    )
    *said, told = done.stderr.decode(errors="replace").splitlines() or [""]
    used = json.loads(told) if told.startswith("{") else {"exit": done.returncode}
    if used.pop("exit"):
        raise SystemExit("\n".join([f"{shlex.join(argv)} failed:", *said[-20:]]))
    told_p50 = re.search(rb'"p50_ms": ([0-9.]+)', done.stdout)
    return Usage(**used, argv=argv, p50_ms=float(told_p50[1]) if told_p50 else None)


def _put_aside(folder: Path) -> None:
    """Empty a folder's files and give it another name: the bench's end removes it.

    ext4 looks past each number of a file that was removed in the minute before when it makes one
    (recently_deleted in Linux' fs/ext4/ialloc.c): 20,000 small files took 0.8 s, and 11 s just
    after as many had been removed.
    """
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.truncate(path, 0)
    folder.rename(folder.with_name(f"{folder.name}.aside-{secrets.token_hex(4)}"))


@dataclass(frozen=True)
class Compared:
    """The runs of both sides, pair by pair."""

    ours: Sequence[Usage]
    theirs: Sequence[Usage]

    def ratios(self, name: str = "seconds") -> list[float]:
        """Return ours over theirs of each pair."""
        return [
            getattr(one, name) / getattr(other, name)
            for one, other in zip(self.ours, self.theirs, strict=True)
        ]

    def summary(self) -> dict[str, Any]:
        """Return medians, and the ratios with their spread."""
        names = ("seconds", "cpu_seconds", "peak_bytes")
        sides = {
            side: {
                name: statistics.median(getattr(usage, name) for usage in usages) for name in names
            }
            for side, usages in (("ours", self.ours), ("theirs", self.theirs))
        }
        for side, usages in (("ours", self.ours), ("theirs", self.theirs)):
            if told := [usage.p50_ms for usage in usages if usage.p50_ms is not None]:
                sides[side]["p50_ms"] = statistics.median(told)
        return {
            **sides,
            "ratio": statistics.median(self.ratios()),
            "lowest": min(self.ratios()),
            "highest": max(self.ratios()),
            "cpu_ratio": statistics.median(self.ratios("cpu_seconds")),
            "peak_ratio": statistics.median(self.ratios("peak_bytes")),
            "pairs": len(self.ours),
            "commands": [shlex.join(usages[-1].argv) for usages in (self.ours, self.theirs)],
        }


def compare(ours: Command, theirs: Command, *, pairs: int = PAIRS) -> Compared:
    """Run both in turn; who begins changes with each pair.

    Before three pairs and more, both run once, to warm up.
    """
    if pairs > 2:
        run(ours)
        run(theirs)
    found: dict[str, list[Usage]] = {"ours": [], "theirs": []}
    for number in range(pairs):
        turn = [("ours", ours), ("theirs", theirs)]
        for side, command in turn if number % 2 == 0 else reversed(turn):
            found[side].append(run(command))
    return Compared(found["ours"], found["theirs"])
