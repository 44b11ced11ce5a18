"""What a run waits for now: whatever waits says for what, since when and what ends it, and
listeners show it.

A wait that is over within its grace is not told.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

BRIEF_SECONDS: Final = 1.0
"""Grace of what is waited for as a matter of course, such as the next block: a fast network would
fill the terminal.
"""

UNANSWERED_SECONDS: Final = 4.0
"""Grace of a question to a server: longer than an answer takes, and soon enough to say that it is
asked again.
"""

RENEW_SECONDS: Final = 10.0
"""How often listeners are told again of waits that go on, so that a process which died no longer
seems to wait.
"""

LINE_SECONDS: Final = 60.0
"""Between two lines that say how far a command is, where there is no terminal."""

_LOOK_SECONDS: Final = 0.25
# after which the thread that looks ends; a fetch of many objects begins a wait a thousand times a
# second
_IDLE_LOOKS: Final = 20


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that is waited for.

    Attributes:
        what: as in "waiting for <what>".
        ends_by: a clause that says what ends it.
        since: aware, in UTC.
        chunk: the chunk that the run works on; "" where it works on none.
    """

    what: str
    ends_by: str
    since: datetime
    chunk: str = ""

    @property
    def sentence(self) -> str:
        """Say all of it in one line."""
        chunk = f"chunk {self.chunk}: " if self.chunk else ""
        return f"{chunk}waiting since {self.since:%H:%M:%S} UTC for {self.what}; {self.ends_by}"

    def seconds(self) -> float:
        """Return how long it has lasted."""
        return (datetime.now(UTC) - self.since).total_seconds()


Listener = Callable[[Sequence[Wait]], None]
"""Takes all waits that are told now: at each change, and every `RENEW_SECONDS` while there are
any.
"""


class OpenWait:
    """A wait under way; several threads may have the same."""

    def __init__(self, waits: "Waits", wait: Wait, now: float) -> None:
        self._waits = waits
        self._wait = wait
        self._since = now  # when `_wait` began
        self.began = now
        self.graces: list[float] = []

    def moved(self) -> None:
        """Restart the time of the wait: there was progress, e.g. bytes of an answer, but it goes
        on.
        """
        self._waits._begin_again(self)

    def wait(self) -> Wait:
        """Return the wait as listeners are shown it, with the time since which it lasts."""
        if self._since != self.began:
            since = datetime.now(UTC) - timedelta(seconds=time.monotonic() - self.began)
            self._wait, self._since = replace(self._wait, since=since), self.began
        return self._wait

    def due(self) -> float:
        """Return the time from which it is reported, by the monotonic clock."""
        return self.began + min(self.graces)


class Waits:
    """The waits of one run. Safe for several threads."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners
        self._open: dict[tuple[str, str], OpenWait] = {}
        self._lock = threading.Lock()
        self._telling = threading.RLock()
        self._told: tuple[Wait, ...] = ()
        self._looking = False
        self._chunk = ""

    @contextmanager
    def on(self, chunk: str) -> Iterator[None]:
        """Name the chunk that the run works on while the context lasts."""
        before, self._chunk = self._chunk, chunk
        try:
            yield
        finally:
            self._chunk = before

    @contextmanager
    def waiting(self, what: str, *, ends_by: str, grace: float = 0.0) -> Iterator[OpenWait]:
        """Say that the caller waits while the context lasts.

        Args:
            what: as in "waiting for <what>". The same words in several threads are one wait.
            ends_by: a clause that says what ends it.
            grace: seconds for which it is not told; 0 tells it before this returns.
        """
        key = (what, ends_by)
        with self._lock:
            one = self._open.get(key)
            if one is None:
                one = self._open[key] = OpenWait(
                    self, Wait(what, ends_by, datetime.now(UTC), self._chunk), time.monotonic()
                )
            one.graces.append(grace)
            self._look_on()
        try:
            if grace <= 0:
                self._tell()
            yield one
        finally:
            with self._lock:
                one.graces.remove(grace)
                if not one.graces:
                    del self._open[key]
                told = any((wait.what, wait.ends_by) == key for wait in self._told)
            if told:
                self._tell()

    @contextmanager
    def lease(self, name: str, run: str) -> Iterator[None]:
        """Say that the caller waits for a lease that a run holds."""
        with self.waiting(
            f"the lease on {name}, which run {run} holds",
            ends_by="it ends when that run gives the lease back, or is dead",
        ):
            yield

    def _begin_again(self, one: OpenWait) -> None:
        with self._lock:
            one.began = time.monotonic()

    def _tell(self, *, again: bool = False) -> None:
        """Tell the listeners what is due, where that has changed."""
        with self._telling:
            with self._lock:
                now = time.monotonic()
                due = tuple(one.wait() for one in self._open.values() if one.due() <= now)
                news = due != self._told or bool(again and due)
                # while it is locked: who ends a wait sees whether it is being told, and waits until
                # it was
                self._told = due
            if news:
                for listener in self._listeners:
                    listener(due)

    def _look_on(self) -> None:
        """See to it that a thread looks for waits that become due."""
        if self._listeners and not self._looking:
            self._looking = True
            threading.Thread(target=self._look, name="waits", daemon=True).start()

    def _look(self) -> None:
        idle, told_at = 0, time.monotonic()
        while True:
            time.sleep(_LOOK_SECONDS)
            with self._lock:
                idle = 0 if self._open else idle + 1
                if idle > _IDLE_LOOKS:
                    self._looking = False
                    return
            again = time.monotonic() - told_at >= RENEW_SECONDS
            self._tell(again=again)
            if again:
                told_at = time.monotonic()


class Announcer:
    """A listener that says each wait once when it begins, and once when it is over.

    Attributes:
        waits: those that go on.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.waits: tuple[Wait, ...] = ()

    def __call__(self, waits: Sequence[Wait]) -> None:
        """Take the waits that go on."""
        before, self.waits = self.waits, tuple(waits)
        for wait in before:
            if wait not in self.waits:
                self._say(f"waited {wait.seconds():.0f} s for {wait.what}")
        for wait in self.waits:
            if wait not in before:
                self._say(wait.sentence)
