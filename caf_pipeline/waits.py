"""The waits and the work of a run: listeners show the waits, the ledger records both.

A wait that ends within its grace period is not reported.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

BRIEF_SECONDS: Final = 1.0
"""Grace period of usual waits, such as for the next block. On a fast network they end sooner."""

UNANSWERED_SECONDS: Final = 4.0
"""Grace period of a request: longer than an answer takes."""

RENEW_SECONDS: Final = 10.0
"""Seconds after which unchanged waits and work are reported again.

Otherwise a dead process would seem to wait.
"""

RECORD_SECONDS: Final = 1.0
"""Minimum between two records of the work: thousands of objects are packed per second."""

LINE_SECONDS: Final = 60.0
"""Seconds between two progress lines of a command without a terminal."""

_POLL_SECONDS: Final = 0.25
_IDLE_POLLS: Final = 20
"""Polls without a wait or a chunk after which the thread ends.

A fetch of many objects begins a thousand waits a second, which must not start a thread each.
"""


@dataclass(frozen=True, slots=True)
class Wait:
    """One reason for waiting.

    Attributes:
        what: The words after "waiting for".
        ends_by: A clause on what ends the wait.
        since: Start, aware, in UTC.
        chunk: The run's chunk, or "".
    """

    what: str
    ends_by: str
    since: datetime
    chunk: str = ""

    @property
    def sentence(self) -> str:
        chunk = f"chunk {self.chunk}: " if self.chunk else ""
        return f"{chunk}waiting since {self.since:%H:%M:%S} UTC for {self.what}; {self.ends_by}"

    def seconds(self) -> float:
        return (datetime.now(UTC) - self.since).total_seconds()


Listener = Callable[[Sequence[Wait]], None]
"""Receives all reported waits: at each change, and every RENEW_SECONDS while there are any."""


Advance = Callable[[int], object]
"""Receives the number of bytes or rows that were done since its last call."""


def ignore(count: int) -> None:
    """Report no progress."""


@dataclass(frozen=True, slots=True)
class Work:
    """How far a process is with its chunk, and what it waits for.

    Attributes:
        packed_objects, packed_bytes: packed or skipped, also by an earlier run.
        read_bytes: bytes of these that this process read.
        sent_bytes: uploaded bytes of the chunk. Copies sent side by side count once.
    """

    chunk: str = ""
    packed_objects: int = 0
    packed_bytes: int = 0
    read_bytes: int = 0
    sent_bytes: int = 0
    waits: tuple[Wait, ...] = ()

    @classmethod
    def total(cls, works: Iterable["Work"]) -> "Work":
        """Sum the objects and bytes."""
        works = list(works)
        return cls(
            packed_objects=sum(work.packed_objects for work in works),
            packed_bytes=sum(work.packed_bytes for work in works),
            read_bytes=sum(work.read_bytes for work in works),
            sent_bytes=sum(work.sent_bytes for work in works),
        )

    @property
    def is_empty(self) -> bool:
        return not (self.packed_objects or self.packed_bytes or self.sent_bytes or self.waits)


Recorder = Callable[[Work], bool]
"""Receives changed work, at most once a second, and returns whether it is recorded."""


class OpenWait:
    """A current wait. Several threads may share it."""

    def __init__(self, waits: "Waits", wait: Wait, now: float) -> None:
        self._waits = waits
        self._wait = wait
        self._since = now  # start of `_wait`
        self.began = now
        self.graces: list[float] = []

    def moved(self) -> None:
        """Restart the wait's clock after progress, e.g. after bytes of an answer."""
        self._waits._restart(self)

    def wait(self) -> Wait:
        if self._since != self.began:
            since = datetime.now(UTC) - timedelta(seconds=time.monotonic() - self.began)
            self._wait, self._since = replace(self._wait, since=since), self.began
        return self._wait

    def due(self) -> float:
        """Return the monotonic time from which the wait is reported."""
        return self.began + min(self.graces)


class Waits:
    """The waits and the work of a run. Thread-safe."""

    def __init__(self, *listeners: Listener, record: Recorder | None = None) -> None:
        self._listeners = listeners
        self._record = record
        self._recording = threading.Lock()
        self._work = self._recorded = Work()
        self._open: dict[tuple[str, str], OpenWait] = {}
        self._lock = threading.Lock()
        self._reporting = threading.RLock()
        self._reported: tuple[Wait, ...] = ()
        self._polling = False
        self._chunks: list[str] = []

    @contextmanager
    def on(self, chunk: str) -> Iterator[None]:
        """Name the chunk that waits while the context lasts; none if there are several."""
        with self._lock:
            self._chunks.append(chunk)
            if chunk != self._work.chunk:
                self._work = Work(chunk)
            self._start_polling()
        try:
            yield
        finally:
            with self._lock:
                self._chunks.remove(chunk)

    @contextmanager
    def waiting(self, what: str, *, ends_by: str, grace: float = 0.0) -> Iterator[OpenWait]:
        """Report a wait while the context lasts. Threads with the same `what` share one wait.

        `what` and `ends_by` are as in `Wait`. The wait is reported after `grace` seconds; 0: before
        this returns.
        """
        key = (what, ends_by)
        with self._lock:
            open_wait = self._open.get(key)
            if open_wait is None:
                chunk = self._chunks[0] if len(self._chunks) == 1 else ""
                wait = Wait(what, ends_by, datetime.now(UTC), chunk)
                open_wait = self._open[key] = OpenWait(self, wait, time.monotonic())
            open_wait.graces.append(grace)
            self._start_polling()
        try:
            if grace <= 0:
                self._report()
            yield open_wait
        finally:
            with self._lock:
                open_wait.graces.remove(grace)
                if not open_wait.graces:
                    del self._open[key]
                reported = any((wait.what, wait.ends_by) == key for wait in self._reported)
            if reported:
                self._report()

    def begin_packing(self) -> None:
        with self._lock:
            self._work = replace(self._work, packed_objects=0, packed_bytes=0)

    def packed(self, objects: int, size_bytes: int, read_bytes: int) -> None:
        """Count packed objects and bytes, and the bytes of these that this process read."""
        with self._lock:
            work = self._work
            self._work = replace(
                work,
                packed_objects=work.packed_objects + objects,
                packed_bytes=work.packed_bytes + size_bytes,
                read_bytes=work.read_bytes + read_bytes,
            )

    def sent(self, size_bytes: int) -> None:
        with self._lock:
            self._work = replace(self._work, sent_bytes=self._work.sent_bytes + size_bytes)

    def close(self) -> None:
        """Record that the run has ended, and nothing afterwards."""
        with self._recording:
            if self._record and not self._recorded.is_empty:
                self._record(Work())
            self._record = None

    @contextmanager
    def lease(self, name: str, run: str) -> Iterator[None]:
        with self.waiting(
            f"the lease on {name}, which run {run} holds",
            ends_by="it ends when that run releases the lease, or dies",
        ):
            yield

    def _restart(self, open_wait: OpenWait) -> None:
        with self._lock:
            open_wait.began = time.monotonic()

    def _report(self, *, again: bool = False) -> None:
        with self._reporting:
            with self._lock:
                now = time.monotonic()
                due = tuple(
                    open_wait.wait() for open_wait in self._open.values() if open_wait.due() <= now
                )
                changed = due != self._reported or bool(again and due)
                # Set under the lock: the end of a wait sees that it is being reported, and waits.
                self._reported = due
            if changed:
                for listener in self._listeners:
                    listener(due)

    def _record_work(self, *, again: bool = False) -> None:
        with self._recording:
            if self._record is None:
                return
            with self._lock:
                work = replace(self._work, waits=self._reported)
            if work.is_empty:
                work = Work()
            if (work != self._recorded or (again and not work.is_empty)) and self._record(work):
                self._recorded = work

    def _start_polling(self) -> None:
        if (self._listeners or self._record) and not self._polling:
            self._polling = True
            threading.Thread(target=self._poll, name="waits", daemon=True).start()

    def _poll(self) -> None:
        idle, reported_at, recorded_at = 0, time.monotonic(), 0.0
        while True:
            time.sleep(_POLL_SECONDS)
            with self._lock:
                is_busy = bool(self._open or self._chunks)
                idle = 0 if is_busy else idle + 1
                if idle > _IDLE_POLLS:
                    self._polling = False
                    return
            now = time.monotonic()
            again = now - reported_at >= RENEW_SECONDS
            self._report(again=again)
            if again:
                reported_at = now
            # The ledger may be closed when no chunk is under way and nothing waits.
            is_due = is_busy or bool(self._recorded.waits)
            if is_due and (again or now - recorded_at >= RECORD_SECONDS):
                self._record_work(again=again)
                recorded_at = now


class Announcer:
    """A listener that announces each wait when it begins and when it ends."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.waits: tuple[Wait, ...] = ()

    def __call__(self, waits: Sequence[Wait]) -> None:
        before, self.waits = self.waits, tuple(waits)
        for wait in before:
            if wait not in self.waits:
                self._say(f"waited {wait.seconds():.0f} s for {wait.what}")
        for wait in self.waits:
            if wait not in before:
                self._say(wait.sentence)
