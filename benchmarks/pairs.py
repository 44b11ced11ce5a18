"""Compares two commands, which run in turn as whole processes.

The operating system reports wall time, CPU seconds and peak memory.
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

    Attributes:
        argv: The program and its arguments, or a function that returns them. The function is called
            before each run, and its time does not count.
        environment: Changes to this process's environment. None removes a variable.
        removed: Files and folders to remove before each run. The removal is not timed.
    """

    argv: Sequence[str] | Callable[[], Sequence[str]]
    environment: Mapping[str, str | None] = field(default_factory=dict)
    removed: Sequence[Path] = ()


@dataclass(frozen=True)
class Usage:
    """The costs of one run.

    Attributes:
        seconds: Wall time.
        cpu_seconds: CPU time of all processes of the command.
        peak_bytes: The largest resident set of a process.
        argv: The command.
        p50_ms: Median time of a repeated operation, if the command reports it.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    argv: Sequence[str]
    p50_ms: float | None = None


def run(command: Command) -> Usage:
    """Run a command to its end and return its costs.

    Raises:
        SystemExit: The command failed. The message has the end of its standard error.
    """
    argv = command.argv() if callable(command.argv) else command.argv
    for path in command.removed:
        put_aside(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.sync()  # flush the writes of the previous run, so that this run does not pay for them
    environment = {
        name: value
        for name, value in {**os.environ, **command.environment}.items()
        if value is not None
    }
    done = subprocess.run(
        [sys.executable, "-IS", TIMED, *argv], capture_output=True, env=environment, check=False
    )
    *messages, last_line = done.stderr.decode(errors="replace").splitlines() or [""]
    usage = json.loads(last_line) if last_line.startswith("{") else {"exit": done.returncode}
    if usage.pop("exit"):
        raise SystemExit("\n".join([f"{shlex.join(argv)} failed:", *messages[-20:]]))
    p50 = re.search(rb'"p50_ms": ([0-9.]+)', done.stdout)
    return Usage(**usage, argv=argv, p50_ms=float(p50[1]) if p50 else None)


def best(commands: Sequence[Command]) -> Command:
    """Return the command that takes the least time, by one run of each if there are several."""
    if len(commands) == 1:
        return commands[0]
    return min(commands, key=lambda command: run(command).seconds)


def put_aside(folder: Path) -> None:
    """Truncate a folder's files and rename the folder. The working folder's end removes it.

    When ext4 creates a file, it skips inodes that were freed in the last minute (recently_deleted
    in fs/ext4/ialloc.c of Linux). Creating 20,000 small files took 0.8 s, but 11
    s directly after as many had been removed.
    """
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.truncate(path, 0)
    folder.rename(folder.with_name(f"{folder.name}.aside-{secrets.token_hex(4)}"))


@dataclass(frozen=True)
class Comparison:
    """The runs of both sides, pair by pair."""

    ours: Sequence[Usage]
    theirs: Sequence[Usage]

    def ratios(self, name: str) -> list[float]:
        """Return ours divided by theirs for each pair."""
        return [
            getattr(our_run, name) / getattr(their_run, name)
            for our_run, their_run in zip(self.ours, self.theirs, strict=True)
        ]

    def summary(self, ratio_of: str = "seconds") -> dict[str, Any]:
        """Return the medians of both sides, and the ratios of a field with their range."""
        names = ("seconds", "cpu_seconds", "peak_bytes")
        sides = {
            side: {
                name: statistics.median(getattr(usage, name) for usage in usages) for name in names
            }
            for side, usages in (("ours", self.ours), ("theirs", self.theirs))
        }
        for side, usages in (("ours", self.ours), ("theirs", self.theirs)):
            if p50s := [usage.p50_ms for usage in usages if usage.p50_ms is not None]:
                sides[side]["p50_ms"] = statistics.median(p50s)
        return {
            **sides,
            "ratio": statistics.median(self.ratios(ratio_of)),
            "lowest": min(self.ratios(ratio_of)),
            "highest": max(self.ratios(ratio_of)),
            "cpu_ratio": statistics.median(self.ratios("cpu_seconds")),
            "peak_ratio": statistics.median(self.ratios("peak_bytes")),
            "pairs": len(self.ours),
            "commands": [shlex.join(usages[-1].argv) for usages in (self.ours, self.theirs)],
        }


def compare(ours: Command, theirs: Command, *, pairs: int = PAIRS) -> Comparison:
    """Run both commands in turn. The side that runs first changes with each pair.

    Both commands first run once to warm up, if there are three or more pairs.
    """
    if pairs > 2:
        run(ours)
        run(theirs)
    runs: dict[str, list[Usage]] = {"ours": [], "theirs": []}
    for number in range(pairs):
        turn = [("ours", ours), ("theirs", theirs)]
        for side, command in turn if number % 2 == 0 else reversed(turn):
            runs[side].append(run(command))
    return Comparison(runs["ours"], runs["theirs"])
