"""Notices Ctrl-C, SIGTERM and SIGHUP even if Dagster drops the interrupt.

Dagster drops an interrupt between steps when a run ends. The interpreter also writes each signal to
a descriptor, which is read here. `ending.repeat_dropped` repeats what Python drops. Source:
`signal.set_wakeup_fd` in Python's documentation; `capture_interrupts` in Dagster 1.13.27.
"""

import os
import signal
import threading
from types import TracebackType
from typing import Self

from caf_pipeline.system.ending import ENDING, received


class InterruptWatch:
    """Notices each signal, if entered in the main thread."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._before = -1
        self._terminate = signal.getsignal(signal.SIGTERM)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # Dagster replaces the handler of SIGTERM by that of SIGINT.
            self._terminate = signal.getsignal(signal.SIGTERM)
            self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
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
        self.has_signal()
        os.close(self._read)
        os.close(self._write)

    def raise_seen(self) -> None:
        """Raise KeyboardInterrupt if a signal arrived since the last call."""
        if self.has_signal():
            raise KeyboardInterrupt

    def has_signal(self) -> bool:
        """Return whether a signal arrived since the last call."""
        # The first signal determines the exit status.
        try:
            numbers = os.read(self._read, 4096)
        except BlockingIOError:
            return False
        for number in numbers:
            if number in ENDING:
                received(number)
        return not {signal.SIGINT, *ENDING}.isdisjoint(numbers)
