"""Ends everything that was started: at the end, at Ctrl-C, at SIGTERM and at SIGHUP; on Linux also
after a SIGKILL.

The embedded Postgres is in a session of its own: the last program that uses it stops it. Where that
one was killed, we do.
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

ORDERLY_SECONDS = 15  # for Dagster's programs to end in order
TERMINATED_SECONDS = 10  # for what is left then, before it is killed, and after
STOP_SECONDS = (
    3  # for the embedded Postgres, of which a process that was killed may still count as a user
)

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_with_parent(number: signal.Signals) -> None:
    """Let this process get a signal when the one that started it is gone, however it ended."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, number)


@contextmanager
def ending_all(home: Path) -> Iterator[None]:
    """End all processes of ours, and those that they started, when the context ends; `home` is that
    of the settings.
    """
    _prctl(_SET_CHILD_SUBREAPER, 1)  # who loses its parent becomes our child, and is found
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell starts what is in the background with SIGINT ignored
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # it is ending already
        _end(_ours())
        _stop_postgres(home / "postgres")


def _stop_postgres(folder: Path) -> None:
    """Stop the embedded server of a folder where it was left, unless others use it."""
    deadline = time.monotonic() + STOP_SECONDS
    while (folder / "data" / "postmaster.pid").exists() and time.monotonic() < deadline:
        embedded_server(folder).close()


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _ours() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == os.getsid(0):
                found.append(process)
    return found


def _end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, left = psutil.wait_procs(processes, TERMINATED_SECONDS)
    killed = {*left, *_ours()}  # what was started meanwhile, too
    for process in killed:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(killed, TERMINATED_SECONDS)


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program of Dagster's until it ends or this one is asked to; return its exit status."""
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait()
    finally:
        if (
            process.poll() is None
        ):  # as a terminal does at Ctrl-C; at SIGTERM it would leave behind what it started
            for each in _ours():
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(ORDERLY_SECONDS)
