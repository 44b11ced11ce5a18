"""Moments of a run: before and after each call that leaves a trace or talks to another machine.

Files: writes, fsyncs, renames, cuts, removals, locks. Ledger: before a transaction, before its
commit, after it. HTTP: each request to S3, chain or provider, and each packed or uploaded piece.
"""

import fcntl
import functools
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

_FILE_CALLS: Final = (
    "write",
    "writev",
    "pwrite",
    "fsync",
    "fdatasync",
    "replace",
    "rename",
    "ftruncate",
    "truncate",
    "posix_fallocate",
    "unlink",
    "copy_file_range",
)
AT_ITS_END: Final = -1

_write = os.write


@dataclass(frozen=True)
class Fatal:
    """The moment at which a run gets a signal.

    Attributes:
        step: a step's name; "" for the whole run.
        moment: number of the moment; 0 before the first. A step with fewer moments gets it at its
            end.
        signal: SIGKILL, or SIGSTOP for a pause.
    """

    step: str
    moment: int
    signal: int = signal.SIGKILL


@dataclass
class Moments:
    """Counts a run's moments, reports them to a listener, and sends the fatal signal."""

    fatal: Fatal | None = None
    listener: int | None = None
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._whole = itertools.count(1)
        self._step = ""
        self._in_step = itertools.count(1)

    def passing(self) -> None:
        number, in_step = next(self._whole), next(self._in_step)
        self.counts[self._step] = max(self.counts.get(self._step, 0), in_step)
        if self.listener is not None:
            try:
                _write(self.listener, b".")
            except BrokenPipeError:  # the listener is gone
                self.listener = None
        if (
            self.fatal
            and self.fatal.step in ("", self._step)
            and self.fatal.moment == (in_step if self.fatal.step else number)
        ):
            self._strike()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Count the moments of a step separately."""
        self._step, self._in_step = name, itertools.count(1)
        mine = self.fatal is not None and self.fatal.step == name
        if mine and self.fatal and self.fatal.moment == 0:
            self._strike()
        yield
        self._step = ""
        if (
            mine
            and self.fatal
            and (self.fatal.moment == AT_ITS_END or self.fatal.moment > self.counts.get(name, 0))
        ):
            self._strike()

    def _strike(self) -> None:
        assert self.fatal
        os.kill(os.getpid(), self.fatal.signal)

    def watch(self) -> None:
        """Count the calls of this process from now on. The process ends with its run."""
        for name in _FILE_CALLS:
            if hasattr(os, name):
                self._watch(os, name)
        self._watch(fcntl, "flock")
        self._watch_the_ledger()
        self._watch_http()

    def _watch(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def counted(*arguments: Any, **named: Any) -> Any:
            self.passing()
            result = original(*arguments, **named)
            self.passing()
            return result

        setattr(owner, name, counted)

    def _watch_the_ledger(self) -> None:
        from caf_pipeline.ledger.engine import LedgerEngine

        original = LedgerEngine.begin

        @contextmanager
        def counted(engine: LedgerEngine) -> Iterator[Any]:
            self.passing()
            with original(engine) as connection:
                yield connection
                self.passing()
            self.passing()

        LedgerEngine.begin = counted  # type: ignore[method-assign]

    def _watch_http(self) -> None:
        import botocore.httpsession
        import httpx

        from caf_pipeline.source.s3.source import S3Source

        self._watch(httpx.Client, "send")
        self._watch(botocore.httpsession.URLLib3Session, "send")
        self._watch(S3Source, "read")
