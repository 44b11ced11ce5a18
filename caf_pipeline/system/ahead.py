"""Makes the next piece while the last one is used: where both are native code, two cores are
busy.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Thread
from typing import Final, TypeVar

PIECES_BEHIND: Final = 8
"""That wait for a use: threads that go in step wait for each other, a fifth of the time of an
object (docs/decisions/0030-measured-limits.md).
"""

_Piece = TypeVar("_Piece")


def one_ahead(pieces: Iterator[_Piece]) -> Iterator[_Piece]:
    """Yield pieces, each made by a thread while the one before it is used; at most two are there at
    once.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        following = thread.submit(next, pieces, None)
        while (piece := following.result()) is not None:
            following = thread.submit(next, pieces, None)
            yield piece


def use_behind(pieces: Iterable[_Piece], *uses: Callable[[_Piece], object]) -> None:
    """Give each piece to all uses, a thread for each of them, while the next ones are made; a use
    has `PIECES_BEHIND` waiting.

    Raises: what making a piece or a use of it raises; then no use goes on. Of what waits when it is
    interrupted, nothing is used.
    """
    queues = [Queue[_Piece | None](PIECES_BEHIND) for _ in uses]
    failed: list[BaseException] = []

    def use_each(use: Callable[[_Piece], object], given: Queue[_Piece | None]) -> None:
        while (
            piece := given.get()
        ) is not None:  # to the end also after a failure: who makes pieces may wait for room
            try:
                if not failed:
                    use(piece)
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)

    threads: list[Thread] = []
    try:
        for each in zip(uses, queues, strict=True):
            # No exit waits for it: after a second Ctrl-C it is not told that there are no more.
            thread = Thread(target=use_each, args=each, name="behind", daemon=True)
            thread.start()
            threads.append(thread)
        for piece in pieces:
            if failed:
                break
            for queue in queues:
                queue.put(piece)
    except (KeyboardInterrupt, SystemExit) as error:
        failed.append(error)
        raise
    finally:
        for queue in queues:
            queue.put(None)
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]
