"""Processes several items concurrently and yields the results in order."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from caf_pipeline.errors import CafError

THREADS: Final = 8
"""Reading a small object is mostly waiting for the round trip."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def side_by_side(
    items: Iterable[_Item],
    work: Callable[[_Item], _Result],
    threads: int = THREADS,
    *,
    drains: bool = False,
    waits: bool = False,
) -> Generator[_Result, None, None]:
    """Yield results in order; at most `2 * threads` are under way.

    Results before an error are yielded first. `drains` also yields those of started items. `waits`
    ends only when no item is under way, even after an interrupt.
    """
    under_way: deque[Future[_Result]] = deque()
    pool = ThreadPoolExecutor(threads, "reading")
    try:
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) == 2 * threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except Exception:
        if drains:
            started = [future for future in under_way if not future.cancel()]
            # Only the first error is raised.
            yield from (future.result() for future in started if not future.exception())
        raise
    finally:
        # By default an interrupted command does not wait for objects of any size.
        pool.shutdown(wait=waits, cancel_futures=True)


def take_all(results: Iterable[_Result], take: Callable[[_Result], None]) -> CafError | None:
    """Call `take` for each result; return an error, but raise it if it came first."""
    is_empty = True
    try:
        for result in results:
            take(result)
            is_empty = False
    except CafError as error:
        if is_empty:
            raise
        return error
    return None
