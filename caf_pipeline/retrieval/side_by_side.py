"""Reads several objects at a time and yields the results in the objects' order, also those before
an error.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from caf_pipeline.errors import CafError

THREADS: Final = 8
"""Most of a small object's time is the way there and back."""

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


def side_by_side(
    given: Iterable[_Given],
    work: Callable[[_Given], _Made],
    threads: int = THREADS,
    *,
    drains: bool = False,
) -> Generator[_Made, None, None]:
    """Yield what the work makes of each, in order.

    At most `2 * threads` are begun and not taken yet.

    An error of the work, or of `given`, ends it. With `drains`, the items under way are finished
    and yielded before the error is raised, so that each write is reported, and none happens after
    the end.
    """
    under_way: deque[Future[_Made]] = deque()
    pool = ThreadPoolExecutor(threads, "reading")
    try:
        for one in given:
            under_way.append(pool.submit(work, one))
            if len(under_way) == 2 * threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except Exception:
        if drains:
            yield from _drained(under_way)
        raise
    finally:
        pool.shutdown(
            wait=False, cancel_futures=True
        )  # who is interrupted does not wait for objects of any size


def _drained(under_way: Iterable[Future[_Made]]) -> Iterator[_Made]:
    """Cancel what is not begun, and yield the results of the rest.

    Their errors are dropped: the first one is raised.
    """
    begun = [one for one in under_way if not one.cancel()]
    for one in begun:
        if not one.exception():
            yield one.result()


def take_all(found: Iterable[_Made], take: Callable[[_Made], None]) -> CafError | None:
    """Take each until an error ends them, and return that error; one that comes before any was
    taken is raised.
    """
    taken = False
    try:
        for one in found:
            take(one)
            taken = True
    except CafError as error:
        if not taken:
            raise
        return error
    return None
