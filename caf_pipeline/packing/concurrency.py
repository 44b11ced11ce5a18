"""The number of concurrent requests, adapted to the latency and the load of a server."""

from typing import Final

START: Final = 64
"""Requests at the beginning. On loopback, 16 took more CPU time, and 256 took longer."""

MINIMUM: Final = 16
"""Requests of a server that refuses more. Only refusals lead below `START`."""

MIN_SECONDS: Final = 0.2
"""Seconds of one measurement. A flush of the disk would distort a shorter one."""

MIN_TURNS: Final = 2
"""Turns of all requests in one measurement. On a slow network, 0.2 s would have only one."""

MIN_GAIN: Final = 1.1
"""Factor of throughput from which twice the requests are kept. Half of them need a factor of 1."""

TRIES: Final = 2
"""Measurements without a gain that end a trial: a busy machine spoils single ones."""

NEW_SHARE: Final = 0.3
"""Weight of a new measurement in the average throughput of the kept limit."""

MAX_HOLD: Final = 64
"""Measurements between two trials. Each trial without a gain doubles them up to this number."""

MAX_REFUSED: Final = 0.25
"""Share of refusals from which a measurement is bad.

128 requests with 14 % of refusals had five times the throughput of a limit that each refusal
halves.
"""

BAD_IN_A_ROW: Final = 3
"""Bad measurements after which the limit is halved."""

LATENCY_BYTES: Final = 1 << 20
"""Bytes whose transfer takes about as long as the latency of a request."""


class ConcurrencyLimit:
    """Doubles while throughput grows, then holds, and sometimes tries twice or half as many.

    Throughput counts the requests that succeeded, weighted by size. Not thread-safe.

    Attributes:
        requests: Requests that may be under way.
    """

    def __init__(self, maximum: int) -> None:
        self.requests = min(START, maximum)
        self._minimum, self._maximum = min(MINIMUM, maximum), maximum
        self._kept = self.requests
        self._kept_rate = 0.0
        self._doubles = True  # the next trial; otherwise it halves
        self._hold = 1
        self._held = 0
        self._tries = 0
        self._bad = 0
        self._settling = self.requests
        self._measure_from(0.0)

    def ended(self, now: float, size_bytes: int | None, *, refused: bool = False) -> None:
        """Count a request that ended at `now`, a monotonic time in seconds.

        `size_bytes` is None if the request failed, and `refused` if the server was too busy.
        """
        if self._settling:  # it began under another limit
            self._settling -= 1
            self._measure_from(now)
            return
        self._ended += 1
        self._refused += refused
        self._work += 0 if size_bytes is None else 1 + size_bytes / LATENCY_BYTES
        seconds = now - self._since
        if self._ended < MIN_TURNS * self.requests or seconds < MIN_SECONDS:
            return
        before = self.requests
        if self._refused > MAX_REFUSED * self._ended:
            self._refuse()
        elif self._work:  # if all failed, nothing can be compared
            self._bad = 0
            self._judge(self._work / seconds)
        self._settling = 0 if self.requests == before else before
        self._measure_from(now)

    def _measure_from(self, now: float) -> None:
        self._since = now
        self._ended = self._refused = 0
        self._work = 0.0

    def _refuse(self) -> None:
        self._bad += 1
        if self._bad == BAD_IN_A_ROW:
            self._bad = 0
            self._kept = self.requests = max(self.requests // 2, self._minimum)
            self._kept_rate = 0.0
            self._pause()

    def _judge(self, rate: float) -> None:
        if self.requests == self._kept:
            share = NEW_SHARE if self._kept_rate else 1.0
            self._kept_rate += share * (rate - self._kept_rate)
            self._held += 1
            if self._held < self._hold:
                return
        elif rate < self._kept_rate * (MIN_GAIN if self._doubles else 1):
            self._tries += 1
            if self._tries == TRIES:
                self.requests = self._kept
                self._pause()
            return
        else:
            self._kept, self._kept_rate = self.requests, rate
        self._tries = 0
        twice = min(2 * self._kept, self._maximum)
        half = max(self._kept // 2, min(self._kept, START))
        self.requests = twice if self._doubles else half
        if self.requests == self._kept:
            self._pause()

    def _pause(self) -> None:
        """Hold the limit, and then try the other direction."""
        self._doubles = not self._doubles
        self._hold = min(2 * self._hold, MAX_HOLD)
        self._held = 0
