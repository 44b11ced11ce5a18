"""SIGTERM and SIGHUP end a command like Ctrl-C does, so that an unused embedded Postgres stops."""

import contextlib
import os
import signal
from types import FrameType
from typing import Final

from caf_pipeline.errors import INTERRUPTED

ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
_received: list[int] = []


def end_in_order() -> None:
    """Interrupt the process at these signals. Ignored ones (as by nohup) stay ignored."""
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)


def received(number: int) -> None:
    """Record a signal that ends this process."""
    _received.append(number)


def interrupted_status() -> int:
    """Return the exit status: 128 plus the signal's number."""
    return 128 + _received[0] if _received else INTERRUPTED


def ignore_further() -> None:
    """Ignore these signals during the shutdown."""
    for number in (signal.SIGINT, *ENDING):
        signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    received(number)
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:  # the terminal is closed, so every write would fail
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    handler = signal.getsignal(signal.SIGINT)  # Dagster's own during a run
    if callable(handler):
        handler(number, frame)
