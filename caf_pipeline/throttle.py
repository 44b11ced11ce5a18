"""The operator's pause, bandwidth limit and spend cap, which runs apply within seconds."""

import threading
import time
from collections.abc import Callable
from typing import Final

from caf_pipeline.errors import CafError
from caf_pipeline.ledger.records import OperatorControls
from caf_pipeline.settings import JackalSettings
from caf_pipeline.waits import UNANSWERED_SECONDS, Waits

CONTROLS_SECONDS: Final = 2.0
"""How old what is known of the controls may be: they are obeyed within seconds, and a look is a
query to the ledger.
"""

TICK_SECONDS: Final = 0.5
"""Between two looks while work is held up.

Each calls `check`, so that a lost lease ends the wait within a second.
"""

PIECES_PER_SECOND: Final = 4
"""Under a bandwidth, how many pieces a second's bytes are cut into at least: a piece is not held up
once it is on its way.
"""

LEAST_PIECE_BYTES: Final = 16 << 10


def _no_check() -> None:
    """Find nothing wrong."""


class Throttle:
    """Holds work up as the operator ordered.

    Safe for several threads, which share the bandwidth in the order they come.

    Controls that cannot be read now are those last read; where none ever were, the error is raised.
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
        """Take what holds while the operator has set nothing.

        Args:
            controls: returns what the operator has set.
            bandwidth: bytes a second of all uploads together, 0 for no limit.
            spend_cap: ujkl, None for no cap.
            waits: where it is said while work is held up.
            clock: seconds that only grow.
            sleep: waits for so many of them.
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
        self._asked = 0  # bytes that were sent and asked for, since the beginning
        self._granted = 0.0  # of these, what the bandwidth allowed up to `_granted_at`
        self._granted_at = clock()

    def paused(self) -> str:
        """Return why everything is paused; "" where it is not."""
        return self._known().paused

    def spend_cap(self) -> int | None:
        """Return what all transactions may come to in ujkl; None for no cap."""
        given = self._known().spend_cap
        if given is None:
            return self._spend_cap
        return given if given >= 0 else None

    def limit(self) -> int:
        """Return the bandwidth of all uploads together in bytes a second; 0 for no limit."""
        given = self._known().bandwidth
        return self._bandwidth if given is None else given

    def bandwidth(self) -> float:
        """Return this run's share of the bandwidth in bytes a second; 0 for no limit."""
        return self.limit() / max(self._known().uploads, 1)

    def piece_bytes(self, most: int) -> int:
        """Return how many bytes to send at once: `most`, or less under a small bandwidth."""
        rate = self.bandwidth()
        return min(most, max(LEAST_PIECE_BYTES, int(rate / PIECES_PER_SECOND))) if rate else most

    def wait_while_paused(self, check: Callable[[], None] = _no_check) -> bool:
        """Return once nothing is paused, and whether anything was.

        `check` is called about every second meanwhile, and may raise to end the wait.
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
        """Count bytes that were sent, and return once the bandwidth allows further ones and nothing
        is paused.

        Returns: Whether a pause or a limit held it up; that reading the controls takes time does
            not count.
        """
        with self._lock:
            self._asked += size_bytes
            mine = self._asked
        if limited := self._missing(mine) > 0:
            with self._waits.waiting(
                "the bandwidth limit to allow more",
                ends_by="'caf limit' raises it",
                grace=UNANSWERED_SECONDS,
            ):
                while (missing := self._missing(mine)) > 0:
                    self._sleep(min(missing, TICK_SECONDS))
                    check()
        paused = self.wait_while_paused(check)
        return limited or paused

    def _missing(self, mine: int) -> float:
        """Return the seconds until the bandwidth has granted this many bytes, at the rate that
        holds now.
        """
        rate = self.bandwidth()
        with self._lock:
            now = self._clock()
            grown = self._granted + rate * (now - self._granted_at)
            # What was not used is not saved up: a limit is also one for the next second.
            self._granted = min(grown, self._asked) if rate else float(self._asked)
            self._granted_at = now
            return (mine - self._granted) / rate if rate and mine > self._granted else 0.0

    def _known(self) -> OperatorControls:
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
    """Return what holds work back as the operator has set it, and as the settings say where nothing
    is set.
    """
    return Throttle(
        controls, bandwidth=settings.bandwidth, spend_cap=settings.spend_cap, waits=waits
    )
