"""The operator's pause, bandwidth limit and spend cap. Runs apply changes within seconds."""

import threading
import time
from collections.abc import Callable
from typing import Final

from caf_pipeline.errors import CafError
from caf_pipeline.ledger.records import OperatorControls
from caf_pipeline.settings import JackalSettings
from caf_pipeline.waits import UNANSWERED_SECONDS, Waits

CONTROLS_SECONDS: Final = 2.0
"""Seconds between two reads of the controls from the ledger."""

TICK_SECONDS: Final = 0.5
"""Seconds between two calls of `check` while work is held up. A lost lease ends the wait."""

PIECES_PER_SECOND: Final = 4
"""Pieces into which a second's bytes are cut at least.

A piece is not held up once it is being sent.
"""

LEAST_PIECE_BYTES: Final = 16 << 10


def _no_check() -> None: ...


class Throttle:
    """Holds work up while the operator has paused it, and limits the bandwidth.

    Thread-safe: threads share the bandwidth in the order of their calls. If the controls cannot be
    read, the last known controls apply. If they were never read, the error is raised.
    """

    def __init__(
        self,
        controls: Callable[[], OperatorControls],
        *,
        bandwidth: int = 0,
        spend_cap: int | None = None,
        waits: Waits | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Set the defaults, which apply unless the operator has changed them.

        `bandwidth` is in bytes a second of all uploads (0: no limit), `spend_cap` in ujkl (None: no
        limit). `clock` is monotonic, in seconds.
        """
        self._controls = controls
        self._bandwidth = bandwidth
        self._spend_cap = spend_cap
        self._waits = waits or Waits()
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._last: OperatorControls | None = None
        self._read_at = 0.0
        self._requested = 0  # bytes of all calls of `sent`
        self._granted = 0.0  # bytes of these that the bandwidth had allowed at `_granted_at`
        self._granted_at = clock()

    def paused(self) -> str:
        """The reason; "" if nothing is paused."""
        return self._current().paused

    def spend_cap(self) -> int | None:
        """In ujkl, for all transactions. None: no limit."""
        cap = self._current().spend_cap
        if cap is None:
            return self._spend_cap
        return cap if cap >= 0 else None

    def limit(self) -> int:
        """Bytes a second for all uploads. 0: no limit."""
        bandwidth = self._current().bandwidth
        return self._bandwidth if bandwidth is None else bandwidth

    def bandwidth(self) -> float:
        """This run's share, in bytes a second. 0: no limit."""
        return self.limit() / max(self._current().uploads, 1)

    def piece_bytes(self, most: int) -> int:
        """`most`, or fewer if the bandwidth is low."""
        rate = self.bandwidth()
        return min(most, max(LEAST_PIECE_BYTES, int(rate / PIECES_PER_SECOND))) if rate else most

    def wait_while_paused(self, check: Callable[[], None] = _no_check) -> bool:
        """Return whether there was a pause.

        Calls `check` before and about every second. It may raise to end the wait.
        """
        check()
        if not (reason := self.paused()):
            return False
        with self._waits.waiting(f"the end of a pause ({reason})", ends_by="'caf resume' ends it"):
            while self.paused():
                self._sleep(TICK_SECONDS)
                check()
        return True

    def sent(self, size_bytes: int, check: Callable[[], None] = _no_check) -> bool:
        """Count sent bytes, and wait until the limit allows more and nothing is paused.

        Returns whether a pause or the limit held up the caller, not counting time to read the
        controls.
        """
        with self._lock:
            self._requested += size_bytes
            total = self._requested
        if limited := self._missing(total) > 0:
            with self._waits.waiting(
                "the bandwidth limit to allow more",
                ends_by="'caf limit' raises it",
                grace=UNANSWERED_SECONDS,
            ):
                while (missing := self._missing(total)) > 0:
                    self._sleep(min(missing, TICK_SECONDS))
                    check()
        paused = self.wait_while_paused(check)
        return limited or paused

    def _missing(self, total: int) -> float:
        rate = self.bandwidth()
        with self._lock:
            now = self._clock()
            grown = self._granted + rate * (now - self._granted_at)
            # Unused bandwidth is not saved up.
            self._granted = min(grown, self._requested) if rate else float(self._requested)
            self._granted_at = now
            return (total - self._granted) / rate if rate and total > self._granted else 0.0

    def _current(self) -> OperatorControls:
        with self._lock:
            now = self._clock()
            if self._last is None or now - self._read_at >= CONTROLS_SECONDS:
                self._last = self._read()
                self._read_at = now
            return self._last

    def _read(self) -> OperatorControls:
        try:
            return self._controls()
        except CafError as error:
            if error.permanent or self._last is None:
                raise
            return self._last


def open_throttle(
    settings: JackalSettings, controls: Callable[[], OperatorControls], waits: Waits | None = None
) -> Throttle:
    """Return a throttle whose defaults are the settings."""
    return Throttle(
        controls, bandwidth=settings.bandwidth, spend_cap=settings.spend_cap, waits=waits
    )
