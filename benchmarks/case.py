"""A case: the work, the peer or limit, both commands, and the goal."""

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
"""Full: as the goals are stated.

Quick: a tenth of it and less, for `make bench-quick`. Tiny: to see that it runs.
"""


@dataclass
class Bench:
    """What cases use.

    Attributes:
        folder: for what runs write.
        scale: of `SCALES`.
        stack: ends what was started.
        share: of the scale's numbers that is wanted.
        server: the program that served S3 to the case, "" where none did.
    """

    folder: Path
    scale: str
    stack: contextlib.ExitStack
    share: float = 1.0
    server: str = ""
    _s3: S3Server | None = None

    def pick(self, full: int, quick: int, tiny: int) -> int:
        """Return the number for this scale and share."""
        return max(
            1, round(self.share * dict(zip(SCALES, (full, quick, tiny), strict=True))[self.scale])
        )

    def s3(self) -> S3Server:
        """Return the S3 server."""
        self._s3 = self._s3 or self.stack.enter_context(running())
        self.server = self._s3.name
        return self._s3


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: as in `make bench CASE=name`.
        context: what ours does.
        against: what theirs does.
        goal: what the ratio of wall times should not exceed.
        sides: yields both commands once, ours first; makes the inputs before and cleans up behind.
        cpu_goal, peak_goal: the same of CPU seconds and of peak memory, where there is one.
    """

    name: str
    work: str
    against: str
    goal: float
    sides: Callable[[Bench], Iterator[tuple[Command, Command]]]
    cpu_goal: float | None = None
    peak_goal: float | None = None


def ours(what: str, *arguments: object, **more: Any) -> Command:
    """Return the command that does our part: `benchmarks.work` in a process of its own."""
    return Command([sys.executable, "-m", "benchmarks.work", what, *map(str, arguments)], **more)


def shell(script: str, *arguments: object, **more: Any) -> Command:
    """Return a command of the shell, whose arguments are `$1` and so on."""
    return Command(["sh", "-ec", script, "sh", *map(str, arguments)], **more)
