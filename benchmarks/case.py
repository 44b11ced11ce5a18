"""A benchmark case: the two commands that are compared, and the goal for their ratio."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pairs import Command
from benchmarks.server import S3Server, running

CAF = str(Path(sys.executable).with_name("caf"))

SCALES = ("full", "quick", "tiny")
"""Sizes of the inputs.

`full` is the size for which the goals are set. `quick` is a tenth of it or less, for `make
bench-quick`. `tiny` only checks that the benchmarks run.
"""


@dataclass
class Bench:
    """The resources of a benchmark run.

    Attributes:
        folder: The working folder of the cases.
        scale: One of `SCALES`.
        stack: Stops the servers at the end.
        share: Factor on the scale's numbers, to measure how costs grow.
        server: Name of the S3 server's program, "" if the case used no S3 server.
    """

    folder: Path
    scale: str
    stack: contextlib.ExitStack
    share: float = 1.0
    server: str = ""
    _s3: S3Server | None = None

    def pick(self, full: int, quick: int, tiny: int) -> int:
        """Return the number for this run's scale, multiplied by its share."""
        return max(
            1, round(self.share * dict(zip(SCALES, (full, quick, tiny), strict=True))[self.scale])
        )

    def s3(self) -> S3Server:
        """Return the S3 server. The first call starts it."""
        self._s3 = self._s3 or self.stack.enter_context(running())
        self.server = self._s3.name
        return self._s3


@dataclass(frozen=True)
class Case:
    """A comparison of a caf command with a peer.

    Attributes:
        name: The name for `make bench CASE=name`.
        work: The work of caf's command, for the page.
        against: The work of the peer's command, for the page.
        goal: Upper limit for the ratio of wall times.
        sides: Prepares the inputs, yields the two commands once (caf's first), and cleans up.
        cpu_goal: Upper limit for the ratio of CPU seconds.
        peak_goal: Upper limit for the ratio of peak memory.
    """

    name: str
    work: str
    against: str
    goal: float
    sides: Callable[[Bench], Iterator[tuple[Command, Command]]]
    cpu_goal: float | None = None
    peak_goal: float | None = None


def ours(function: str, *arguments: object, **options: Any) -> Command:
    """Return a command that runs a function of `benchmarks.work` in its own process."""
    return Command(
        [sys.executable, "-m", "benchmarks.work", function, *map(str, arguments)], **options
    )


def shell(script: str, *arguments: object, **options: Any) -> Command:
    """Return a command that runs a shell script with the arguments `$1`, `$2` and so on."""
    return Command(["sh", "-ec", script, "sh", *map(str, arguments)], **options)
