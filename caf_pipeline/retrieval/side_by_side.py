"""Objects read several at a time, and what came of each in their order, also where an error ends them."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from caf_pipeline.errors import CafError

THREADS: Final = 8
"""Most of a small object's time is the way there and back."""

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


def side_by_side(
    given: Iterable[_Given], work: Callable[[_Given], _Made], threads: int = THREADS
) -> Generator[_Made, None, None]:
    """Yield what the work makes of each, in order. At most `2 * threads` are begun and not taken yet."""
    under_way: deque[Future[_Made]] = deque()
    pool = ThreadPoolExecutor(threads, "reading")
    try:
        for one in given:
            under_way.append(pool.submit(work, one))
            if len(under_way) == 2 * threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # who is interrupted does not wait for objects of any size


def take_all(found: Iterable[_Made], take: Callable[[_Made], None]) -> CafError | None:
    """Take each until an error ends them, and return that error; one that comes before any was taken is raised."""
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
