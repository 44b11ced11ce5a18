"""Processes that run a chunk's steps, or a whole source, and are killed or paused meanwhile.

`python -m caf_pipeline_tests.faults.runner ORDER.json` performs one order. If it has no argument,
it imports everything, then forks a process for each order's path on standard input. It reports
each start and end as a line of JSON. `Template` is the other end.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, Final, Self

from caf_pipeline.errors import CafError
from caf_pipeline_tests.faults.moments import Fatal, Moments
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS

WITH_TRACEBACK: Final = 70
"""Exit status of a run that ended by an error other than CafError, whose own are lower."""


@dataclass(frozen=True)
class Order:
    """The work of a process.

    Attributes:
        settings: values of `Settings`, secrets included.
        source: the source's name.
        chunk: whose steps to run; "" for inventory, plan and all chunks under way.
        run: the holder's name.
        lease_seconds: of every lease.
        fatal: when to kill or pause the process.
        told: a FIFO that gets a byte for each moment, or "".
        answer: the file for the result.
    """

    settings: dict[str, Any]
    source: str
    chunk: str
    run: str
    lease_seconds: float
    answer: str
    fatal: Fatal | None = None
    told: str = ""

    @classmethod
    def read(cls, path: Path) -> Self:
        values = json.loads(path.read_text())
        values["fatal"] = Fatal(**values["fatal"]) if values["fatal"] else None
        return cls(**values)


@dataclass(frozen=True)
class Answer:
    """The result of an order: the error's class and sentence, and the moments of each step."""

    error: str = ""
    sentence: str = ""
    moments: dict[str, int] = field(default_factory=dict)


# --- the process ----------------------------------------------------------------------------------


def perform(order: Order) -> int:
    """Perform an order in this process; return its exit status."""
    listener = os.open(order.told, os.O_WRONLY) if order.told else None
    moments = Moments(order.fatal, listener)
    moments.watch()
    status, answer = 0, Answer()
    try:
        _perform(order, moments)
    except CafError as error:
        status, answer = error.exit_code, Answer(type(error).__name__, str(error))
    Path(order.answer).write_text(json.dumps(asdict(answer) | {"moments": moments.counts}))
    return status


def _perform(order: Order, moments: Moments) -> None:
    from caf_pipeline.chunk_state import UNDER_WAY
    from caf_pipeline.ledger.database import database_of
    from caf_pipeline.ledger.ledger import Ledger
    from caf_pipeline.packing import packer
    from caf_pipeline.packing.journal.writer import CheckpointPace
    from caf_pipeline.settings import Settings
    from caf_pipeline.steps import inventories, planning
    from caf_pipeline.waits import Waits
    from caf_pipeline.wiring import open_run_context
    from caf_pipeline_tests.support.run_contexts import CHUNK_STEPS
    from caf_pipeline_tests.support.s3_server import client_for

    # Checkpoints of the packing journal as often as objects this small need, so that kills fall
    # before, in and behind them.
    packer.pace_of = lambda settings: CheckpointPace(
        due_bytes=60_000, due_outcomes=4, ahead_bytes=120_000
    )
    settings = Settings.model_validate(order.settings)
    ledger = Ledger(database_of(settings), lease_seconds=order.lease_seconds)
    ledger.bring_up(Waits())
    endpoint = settings.source(order.source).endpoint_url
    context = open_run_context(
        settings,
        order.source,
        run=order.run,
        ledger=ledger,
        client=client_for(endpoint),
    )
    context.waits.packed = lambda objects, size_bytes: moments.passing()
    context.waits.sent = lambda size_bytes: moments.passing()
    with contextlib.closing(ledger), contextlib.ExitStack() as stack:
        stack.callback(context.close)
        names = [order.chunk]
        if not order.chunk:
            with moments.step("take_inventory"):
                snapshot = inventories.take_inventory(context)
            with moments.step("cut_plan"):
                planning.cut_plan(context, snapshot)
            names = [chunk.name for chunk in ledger.chunks.list(order.source, UNDER_WAY)]
        for name in names:
            for step in CHUNK_STEPS:
                with moments.step(step.__name__):
                    step(context, name)


def _warm_up() -> None:
    """Import once what every fork needs."""
    from mnemonic import Mnemonic

    import caf_pipeline.source.s3.source
    import caf_pipeline.steps.chunk_steps
    import caf_pipeline.steps.planning
    import caf_pipeline.store.directory
    import caf_pipeline.store.jackal.write
    import caf_pipeline.wiring  # noqa: F401
    import caf_pipeline_tests.support.run_contexts
    from caf_pipeline.store.jackal.wallet import Wallet

    Wallet(Mnemonic("english").generate())  # loads what derives keys
    import caf_pipeline_tests.support.process_template  # noqa: F401


def _begin(path: str) -> int:
    order = Order.read(Path(path))
    from caf_pipeline_tests.support.s3_server import client_for

    client_for(order.settings["sources"][order.source]["endpoint_url"])  # 0.1 s; sends nothing
    child = os.fork()
    if child:
        return child
    status = WITH_TRACEBACK
    try:
        errors = os.open(f"{order.answer}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(errors, 2)
        os.dup2(errors, 1)
        os.close(0)
        status = perform(order)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stderr.flush()
        os._exit(status)


def _serve() -> None:
    """Fork a process for each line of standard input; report its end."""
    _warm_up()
    waking, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    print(json.dumps({"ready": True}), flush=True)
    unread = b""
    while True:
        ready = connection.wait([0, waking])
        if waking in ready:
            os.read(waking, 4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    print(
                        json.dumps(
                            {"ended": ended[0], "status": os.waitstatus_to_exitcode(ended[1])}
                        ),
                        flush=True,
                    )
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                print(json.dumps({"begun": _begin(line.decode())}), flush=True)


# --- the other end --------------------------------------------------------------------------------


class Template:
    """The process that forks one for each order."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "caf_pipeline_tests.faults.runner"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._statuses: dict[int, int] = {}
        self._unread = b""
        self._next(lambda line: "ready" in line)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def begin(self, path: Path) -> int:
        """Start a process for the order in this file; return its pid."""
        assert self._process.stdin
        self._process.stdin.write(f"{path}\n".encode())
        self._process.stdin.flush()
        return int(self._next(lambda line: "begun" in line)["begun"])

    def status(self, pid: int, *, wait: bool = True) -> int | None:
        """Return a process's exit status, negative for a signal; None while it runs."""
        while pid not in self._statuses:
            if wait:
                self._next(lambda line: line.get("ended") == pid)
            elif self._read(0) is None:
                break
        return self._statuses.get(pid)

    def _next(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            line = self._read(max(0.0, deadline - time.monotonic()))
            assert line is not None, "a run does not end"
            if wanted(line):
                return line

    def _read(self, seconds: float) -> dict[str, Any] | None:
        assert self._process.stdout
        while b"\n" not in self._unread:
            if not connection.wait([self._process.stdout], seconds):
                return None
            data = os.read(self._process.stdout.fileno(), 65536)
            assert data, "the process that begins runs has ended"
            self._unread += data
        first, _, self._unread = self._unread.partition(b"\n")
        line: dict[str, Any] = json.loads(first)
        if "begun" in line:
            self._statuses.pop(
                line["begun"], None
            )  # of an earlier run with this pid: a long session reuses pids
        if "ended" in line:
            self._statuses[line["ended"]] = line["status"]
        return line


@dataclass
class Run:
    """A process that performs an order, under the test's control."""

    template: Template
    order: Order
    pid: int
    listener: int | None = None
    seen: int = 0

    def __str__(self) -> str:
        """Describe the order, so that it can be repeated."""
        what = f"{self.order.run} of {self.order.chunk or 'everything'}"
        return (
            f"{what}, {self.order.fatal or f'left alone after {self.seen} moments'}, ended "
            "with "
            f"{self.wait()},"
        )

    def kill(self) -> int:
        """Kill it; return its exit status, which differs if it had ended before."""
        self._signal(signal.SIGKILL)
        return self.wait()

    def pause(self) -> None:
        """Suspend it; return when it stands still."""
        self._signal(signal.SIGSTOP)
        self.wait_until_paused()

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def wait(self) -> int:
        """Wait for its end; return its exit status, negative for a signal."""
        status = self.template.status(self.pid)
        assert status is not None
        if self.listener is not None:
            os.close(self.listener)
            self.listener = None
        return status

    @property
    def ended_in_order(self) -> bool:
        """Wait for a result or a CafError; after a signal or a traceback, raise."""
        assert 0 <= self.wait() < WITH_TRACEBACK, f"{self} having said: {self.said}"
        return True

    def wait_until_paused(self) -> None:
        """Wait until it stands still or has ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.runs and _state_of(self.pid) not in "Tt":
            assert time.monotonic() < deadline, "it was not paused"
            time.sleep(0.005)

    @property
    def runs(self) -> bool:
        return self.template.status(self.pid, wait=False) is None

    def wait_for_moments(self, count: int) -> int:
        """Wait for so many more moments, or the end; return the total."""
        assert self.listener is not None, "start it with told=True"
        wanted = self.seen + count
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.seen < wanted and time.monotonic() < deadline:
            if connection.wait([self.listener], 0.05):
                data = os.read(self.listener, wanted - self.seen)
                self.seen += len(data)
                if data:
                    continue
            if not self.runs:
                break
        return self.seen

    @property
    def answer(self) -> Answer:
        """Return the result of a run that was not killed."""
        return Answer(**json.loads(Path(self.order.answer).read_text()))

    @property
    def said(self) -> str:
        """Return its standard error, which is empty in a normal run."""
        return Path(f"{self.order.answer}.err").read_text()

    def _signal(self, number: int) -> None:
        if self.runs:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    # The second is raised if the process ends between open and read.
    except (FileNotFoundError, ProcessLookupError):
        return "T"  # gone; the caller asks whether it runs


def start(
    template: Template, order: Order, folder: Path, number: int, *, told: bool = False
) -> Run:
    """Write an order and start its process."""
    listener = None
    if told:
        fifo = folder / f"{number}.fifo"
        os.mkfifo(fifo)
        listener = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        order = replace(order, told=str(fifo))
    path = folder / f"{number}.json"
    path.write_text(json.dumps(asdict(order)))
    return Run(template, order, template.begin(path), listener)


@contextlib.contextmanager
def running_template() -> Iterator[Template]:
    with Template() as template:
        yield template


def main() -> None:
    if len(sys.argv) > 1:
        sys.exit(perform(Order.read(Path(sys.argv[1]))))
    _serve()


if __name__ == "__main__":
    main()
