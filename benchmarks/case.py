"""A benchmark case: the two commands that are compared, and the goal for their ratio."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.pairs import Command, put_aside, run
from benchmarks.server import BUCKET, COPY, TRANSFERS, S3Server, running

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
        round_trip_ms: Latency of the network before the S3 server.
        server: Name of the S3 server's program, "" if the case used no S3 server.
    """

    folder: Path
    scale: str
    stack: contextlib.ExitStack
    share: float = 1.0
    round_trip_ms: int = 0
    server: str = ""
    _s3: dict[int, S3Server] = field(default_factory=dict)

    def pick(self, full: int, quick: int, tiny: int) -> int:
        """Return the number for this run's scale, multiplied by its share."""
        return max(
            1, round(self.share * dict(zip(SCALES, (full, quick, tiny), strict=True))[self.scale])
        )

    def s3(self) -> S3Server:
        """Return the S3 server behind this network. The first call starts it."""
        servers, latency = self._s3, self.round_trip_ms
        if not servers:
            servers[0] = self.stack.enter_context(running())
        if latency not in servers:
            servers[latency] = self.stack.enter_context(servers[0].behind_network(latency))
        self.server = servers[latency].name
        return servers[latency]


@dataclass(frozen=True)
class Case:
    """A comparison of a caf command with a peer.

    Attributes:
        name: The name for `make bench CASE=name`.
        work: The work of caf's command, for the page.
        against: The work of the peer's command, for the page.
        goal: Upper limit for the ratio.
        sides: Prepares the inputs, yields the two commands once (caf's first), and cleans up.
        cpu_goal: Upper limit for the ratio of CPU seconds.
        peak_goal: Upper limit for the ratio of peak memory.
        ratio_of: The field of `Usage` that the ratio compares.
        round_trip_ms: Latency of the network that the case crosses.
        base: Name without the latency.
    """

    name: str
    work: str
    against: str
    goal: float | None
    sides: Callable[[Bench], Iterator[tuple[Command, Command]]]
    cpu_goal: float | None = None
    peak_goal: float | None = None
    ratio_of: str = "seconds"
    round_trip_ms: int = 0
    base: str = ""

    def over_network(self, round_trip_ms: int, goal: float | None) -> "Case":
        """Return the case behind a network with latency, with `-NUMBERms` after its name."""
        return replace(
            self,
            name=f"{self.name}-{round_trip_ms}ms",
            goal=goal,
            cpu_goal=None,
            round_trip_ms=round_trip_ms,
            base=self.name,
        )


def ours(function: str, *arguments: object, **options: Any) -> Command:
    """Return a command that runs a function of `benchmarks.work` in its own process."""
    return Command(
        [sys.executable, "-m", "benchmarks.work", function, *map(str, arguments)], **options
    )


def shell(script: str, *arguments: object, **options: Any) -> Command:
    """Return a command that runs a shell script with the arguments `$1`, `$2` and so on."""
    return Command(["sh", "-ec", script, "sh", *map(str, arguments)], **options)


def best_transfers(script: str, bench: Bench, prefix: str) -> str:
    """Return a script with rclone's fastest number of transfers for a prefix.

    It is 16 without latency. Else rclone copies the prefix once with each of `TRANSFERS`.
    """
    if not bench.round_trip_ms:
        return script
    folder, server = bench.folder / "tried", bench.s3()

    def seconds(option: str) -> float:
        copy = shell(
            COPY.replace(TRANSFERS[0], option),
            f"bench:{BUCKET}/{prefix}",
            folder,
            environment=server.rclone(),
            removed=[folder],
        )
        return run(copy).seconds

    fastest = min(TRANSFERS, key=seconds)
    put_aside(folder)
    return script.replace(TRANSFERS[0], fastest)
