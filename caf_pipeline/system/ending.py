"""SIGTERM and SIGHUP end a command like Ctrl-C does, so that an unused embedded Postgres stops."""

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Final

from caf_pipeline.errors import INTERRUPTED

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
REPEAT_SECONDS: Final = 0.05
_INTERRUPTS: Final = {"KeyboardInterrupt", "DagsterExecutionInterruptedError"}
"""By name, since loading Dagster would slow every command."""

_received: list[int] = []


def end_in_order() -> None:
    """Interrupt the process at these signals. Ignored ones (as by nohup) stay ignored."""
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)


def repeat_dropped() -> None:
    """Repeat each Ctrl-C that Python drops in a callback that cannot raise, as while it imports."""
    report = sys.unraisablehook

    def repeat(dropped: "UnraisableHookArgs") -> None:
        if dropped.exc_type.__name__ in _INTERRUPTS:
            timer = threading.Timer(REPEAT_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
            timer.daemon = True
            timer.start()
        else:
            report(dropped)

    sys.unraisablehook = repeat


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
