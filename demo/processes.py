"""Ends all processes that the demo started.

This happens at the demo's end, at Ctrl-C, SIGTERM and SIGHUP, and on Linux also after SIGKILL. The
embedded Postgres runs in its own session, and its last user stops it. If that user was killed, this
module stops Postgres.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from caf_pipeline.ledger.embedded import embedded_server

ORDERLY_SECONDS = 15  # for Dagster's processes to end by themselves
TERMINATED_SECONDS = 10  # for the remaining processes, before and after they are killed
STOP_SECONDS = 3  # for the embedded Postgres: a killed process may still count as a user

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when its parent ends. Only on Linux."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, number)


@contextmanager
def ending_all(home: Path) -> Iterator[None]:
    """End this session's processes and the embedded Postgres below `home` when the context ends."""
    _prctl(_SET_CHILD_SUBREAPER, 1)  # orphans become our children
    # A shell starts background processes with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # already ending
        _terminate(_session_processes())
        _stop_postgres(home / "postgres")


def _stop_postgres(folder: Path) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    while (folder / "data" / "postmaster.pid").exists() and time.monotonic() < deadline:
        embedded_server(folder).close()


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _session_processes() -> list[psutil.Process]:
    processes = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == os.getsid(0):
                processes.append(process)
    return processes


def _terminate(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, remaining = psutil.wait_procs(processes, TERMINATED_SECONDS)
    killed = {*remaining, *_session_processes()}  # including processes that were started meanwhile
    for process in killed:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(killed, TERMINATED_SECONDS)


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program and return its exit status. A signal to this process ends the program, too."""
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait()
    finally:
        # Send SIGINT to all, like Ctrl-C in a terminal. After SIGTERM, Dagster's children live on.
        if process.poll() is None:
            for running in _session_processes():
                with suppress(psutil.NoSuchProcess):
                    running.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(ORDERLY_SECONDS)
