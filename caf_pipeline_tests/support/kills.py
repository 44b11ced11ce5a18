"""Processes that are killed or paused at a moment: before or after a call that leaves a trace.

Files: writes, fsyncs, renames, cuts, removals, locks. Ledger: before a transaction, before its
commit, after it. HTTP: each request to S3, chain or provider, and each packed or uploaded piece.
"""

import contextlib
import fcntl
import functools
import itertools
import multiprocessing
import os
import pkgutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, Self

import botocore.httpsession
import httpx

from caf_pipeline.errors import CafError
from caf_pipeline.ledger.engine import LedgerEngine
from caf_pipeline.source.s3.source import S3Source
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS

KILLED: Final = -signal.SIGKILL
WITH_TRACEBACK: Final = 70
"""Exit status of a process that ended by an error other than CafError, whose own are lower."""

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    [
        "__main__",
        *(
            f"caf_pipeline_tests.{module}"
            for module in (
                "faults.world",
                "support.doctors",
                "support.payers",
                "support.process_template",
            )
        ),
    ]
)

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
AT_ITS_END: Final = sys.maxsize

_write = os.write


@dataclass(frozen=True)
class Fatal:
    """The moment at which a process gets a signal.

    Attributes:
        step: a step's name, or "" for the whole process. "module:Class.function" is a call, whose
            moments are 1 before it and 2 after it.
        moment: number of the moment; 0 before the first. A step with fewer moments gets it at its
            end.
        signal: SIGKILL, or SIGSTOP for a pause.
    """

    step: str
    moment: int
    signal: int = signal.SIGKILL


def call(function: Callable[..., Any]) -> str:
    """Return the step of `Fatal` that is a call of a function of a class."""
    return f"{function.__module__}:{function.__qualname__}"


@dataclass
class Moments:
    """Counts a process's moments, reports them to a listener, and sends the fatal signal."""

    fatal: Fatal | None
    listener: Connection | None
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
                _write(self.listener.fileno(), b".")
            except BrokenPipeError:  # the listener is gone
                self.listener = None
        if self.fatal and self.fatal.step in ("", self._step):
            self._strike_if(in_step if self.fatal.step else number)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Count the moments of a step separately."""
        self._step, self._in_step = name, itertools.count(1)
        mine = self.fatal is not None and self.fatal.step == name
        if mine:
            self._strike_if(0)
        yield
        self._step = ""
        if mine and self.fatal and self.fatal.moment > self.counts.get(name, 0):
            self._strike_if(self.fatal.moment)

    def _strike_if(self, moment: int) -> None:
        if self.fatal and self.fatal.moment == moment:
            os.kill(os.getpid(), self.fatal.signal)

    def watch(self) -> None:
        """Count the calls of this process from now on."""
        for name in _FILE_CALLS:
            if hasattr(os, name):
                self._watch(os, name, self.passing)
        self._watch(fcntl, "flock", self.passing)
        self._watch_the_ledger()
        self._watch(httpx.Client, "send", self.passing)
        self._watch(botocore.httpsession.URLLib3Session, "send", self.passing)
        self._watch(S3Source, "read", self.passing)
        if self.fatal and ":" in self.fatal.step:
            module, _, path = self.fatal.step.partition(":")
            owner, _, name = path.rpartition(".")
            calls = itertools.count(1)
            self._watch(
                pkgutil.resolve_name(f"{module}:{owner}"),
                name,
                lambda: self._strike_if(next(calls)),
            )

    def _watch(self, owner: Any, name: str, passing: Callable[[], None]) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def counted(*arguments: Any, **named: Any) -> Any:
            passing()
            result = original(*arguments, **named)
            passing()
            return result

        setattr(owner, name, counted)

    def _watch_the_ledger(self) -> None:
        original = LedgerEngine.begin

        @contextmanager
        def counted(engine: LedgerEngine) -> Iterator[Any]:
            self.passing()
            with original(engine) as connection:
                yield connection
                self.passing()
            self.passing()

        LedgerEngine.begin = counted  # type: ignore[method-assign]


@dataclass(frozen=True)
class Answer:
    """A process's result, or the class and sentence of its CafError, and each step's moments."""

    result: Any
    error: str
    sentence: str
    moments: dict[str, int]


def _perform(
    action: Callable[[Moments], Any],
    fatal: Fatal | None,
    listener: Connection | None,
    answers: Connection,
    printed: Path | None,
) -> None:
    if printed:
        descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    moments = Moments(fatal, listener)
    moments.watch()
    status, result, error = 0, None, ("", "")
    try:
        result = action(moments)
    except CafError as raised:
        status, error = raised.exit_code, (type(raised).__name__, str(raised))
    except Exception:  # noqa: BLE001 - as the interpreter itself ends
        status = WITH_TRACEBACK
        traceback.print_exc()
    sys.stderr.flush()
    with contextlib.suppress(BrokenPipeError):  # the test has closed the pipe
        answers.send(Answer(result, *error, moments.counts))
    os._exit(status)


class Process:
    """A process that performs an action, under the test's control.

    The action is a function at the top of a module, or a `partial` of one.

    Args:
        fatal: when the process is killed or paused.
        counted: let `wait_for_moments` count.
        printed: a file for its output.
    """

    def __init__(
        self,
        action: Callable[[Moments], Any],
        *,
        fatal: Fatal | None = None,
        counted: bool = False,
        printed: Path | None = None,
    ) -> None:
        self.fatal = fatal
        self.seen = 0
        self._answer: Answer | None = None
        self._answers, answers = _PROCESSES.Pipe(duplex=False)
        self._listener, listener = _PROCESSES.Pipe(duplex=False)
        passed = listener if counted else None
        self._process = _PROCESSES.Process(
            target=_perform, args=(action, fatal, passed, answers, printed)
        )
        self._process.start()
        answers.close()
        listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> int:
        """Kill it; return its exit status, which differs if it had ended before."""
        self._process.kill()
        return self.wait()

    def pause(self) -> None:
        """Suspend it; return when it stands still."""
        self._signal(signal.SIGSTOP)
        self.wait_until_paused()

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process.pid
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self._process.pid, number)

    @property
    def runs(self) -> bool:
        return self._process.exitcode is None

    def wait(self) -> int:
        """Wait for its end; return its exit status, negative for a signal."""
        self._process.join(PATIENCE_SECONDS)
        assert self._process.exitcode is not None, "it does not end"
        return self._process.exitcode

    @property
    def ended_in_order(self) -> bool:
        """Wait for a result or a CafError; after a signal or a traceback, raise."""
        assert 0 <= self.wait() < WITH_TRACEBACK, str(self)
        return True

    @property
    def answer(self) -> Answer:
        """Wait for the answer of a process that is not killed."""
        if self._answer is None:
            self._answer = self._answers.recv()
        return self._answer

    def wait_until_paused(self) -> None:
        """Wait until it stands still or has ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.runs and _state_of(self._process.pid) not in "Tt":
            assert time.monotonic() < deadline, "it was not paused"
            time.sleep(0.005)

    def wait_for_moments(self, count: int) -> int:
        """Wait for so many more moments, or the end; return the total."""
        total = self.seen + count
        while self.seen < total and wait([self._listener], PATIENCE_SECONDS):
            data = os.read(self._listener.fileno(), total - self.seen)
            if not data:  # it has ended
                break
            self.seen += len(data)
        return self.seen


def _state_of(pid: int | None) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    # The second is raised if the process ends between open and read.
    except (FileNotFoundError, ProcessLookupError):
        return "T"  # gone; the caller asks whether it runs
