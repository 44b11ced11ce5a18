"""A deadline for questions to servers: each has time limits of its own, and what they come to
together may be hours.

A thread that waits for a server cannot be ended from outside. So each question is asked in a thread
of its own, which is left behind when the deadline passes, and ends by the question's own limits.
Until then that server is asked nothing more by this way: one that is silent for days must not fill
the process with threads.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Overdue(Exception):
    """What was asked has not answered by the deadline."""


class Deadline:
    """So many seconds from now on, for all questions together."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends = time.monotonic() + seconds

    def left(self) -> float:
        """Return how many seconds are left, 0 where it has passed."""
        return max(self._ends - time.monotonic(), 0.0)

    def ask(
        self, whom: str, question: Callable[[], T], *, late: Callable[[], None] = lambda: None
    ) -> T:
        """Return what the question returns, or raise what it raises.

        Args: whom: who is asked, as errors name it. question: is asked in another thread, and goes
            on there where no answer comes in time. late: is called in that thread when the question
            ends after the deadline, to give back what nobody else will.

        Raises:
            Overdue: no answer came in time, or one that was asked for earlier has not come yet.
        """
        overdue = f"overdue: {whom}"
        if any(thread.name == overdue for thread in threading.enumerate()):
            raise Overdue(f"{whom} has not answered an earlier question yet")
        answers: list[Callable[[], T]] = []
        lock, is_late = threading.Lock(), False

        def ask() -> None:
            answer = _answer(question)
            with lock:
                answers.append(answer)
            if is_late:
                late()

        asking = threading.Thread(target=ask, name=f"asks {whom}", daemon=True)
        asking.start()
        asking.join(self.left())
        with lock:
            is_late = not answers
        if is_late:
            asking.name = overdue
            raise Overdue(f"{whom} did not answer within {self.seconds:g} s")
        return answers[0]()


def _answer(question: Callable[[], T]) -> Callable[[], T]:
    """Return what gives the answer: it returns what the question returned, or raises what it
    raised.
    """
    try:
        found = question()
    except BaseException as error:  # noqa: BLE001 - raised where it was asked
        raised = error

        def fail() -> T:
            raise raised

        return fail
    return lambda: found
