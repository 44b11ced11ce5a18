"""Notice Ctrl-C, SIGTERM and SIGHUP, whichever handler received the signal.

Dagster holds interrupts back while it works between steps, and drops one that is still held when a
run ends. The number of every signal is also written, by the interpreter itself, to the descriptor
set here. An interrupt that is raised where nothing can raise, e.g. in a callback of the garbage
collector, is seen the same way, and Python prints no traceback of it. Source:
`signal.set_wakeup_fd` in Python's documentation; `capture_interrupts` in Dagster 1.13.27.
"""

import os
import signal
import sys
import threading
from types import TracebackType
from typing import Final, Self

from dagster import DagsterExecutionInterruptedError

from caf_pipeline.system.ending import ENDING, received

_INTERRUPTS: Final = (KeyboardInterrupt, DagsterExecutionInterruptedError)


class InterruptWatch:
    """Notices each SIGINT, SIGTERM and SIGHUP in its context.

    Outside the main thread it notices none, as no handler would.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._before = -1
        self._terminate = signal.getsignal(signal.SIGTERM)
        self._hook = sys.unraisablehook

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._terminate = signal.getsignal(
                signal.SIGTERM
            )  # Dagster leaves SIGINT's handler in its place
            self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._before)
            signal.signal(signal.SIGTERM, self._terminate)
        self._seen()
        sys.unraisablehook = self._hook
        os.close(self._read)
        os.close(self._write)

    def raise_seen(self) -> None:
        """Raise KeyboardInterrupt if one of these signals came since the last call."""
        if self._seen():
            raise KeyboardInterrupt

    def _seen(self) -> bool:
        """Return whether a signal came since the last call. The first signal sets the exit
        status.
        """
        try:
            numbers = os.read(self._read, 4096)
        except BlockingIOError:
            return False
        for number in numbers:
            if number in ENDING:
                received(number)
        return not {signal.SIGINT, *ENDING}.isdisjoint(numbers)

    def _unraisable(self, lost: "sys.UnraisableHookArgs") -> None:
        if not isinstance(lost.exc_value, _INTERRUPTS):
            self._hook(lost)
