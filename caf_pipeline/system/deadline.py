"""One deadline for several requests, whose own timeouts may add up to hours.

Each request runs in its own thread, which is abandoned at the deadline and ends at the request's
own timeout. Until then that server gets no further request: a silent server would fill the process
with threads.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Overdue(Exception):
    """A server did not answer by the deadline."""


class Deadline:
    """A time limit for all requests together."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends = time.monotonic() + seconds

    def left(self) -> float:
        return max(self._ends - time.monotonic(), 0.0)

    def ask(
        self, whom: str, question: Callable[[], T], *, late: Callable[[], None] = lambda: None
    ) -> T:
        """Errors name the server `whom`.

        If the request ends after the deadline, its thread calls `late` to free resources.

        Raises:
            Overdue: There is no answer in time, or an earlier request still waits.
        """
        overdue = f"overdue: {whom}"
        if any(thread.name == overdue for thread in threading.enumerate()):
            raise Overdue(f"{whom} has not answered an earlier request yet")
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
    try:
        result = question()
    except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
        raised = error

        def fail() -> T:
            raise raised

        return fail
    return lambda: result
