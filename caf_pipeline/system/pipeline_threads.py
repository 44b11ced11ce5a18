"""Threads that prepare the next piece while the last one is used."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Thread
from typing import Final, TypeVar

BACKLOG_PIECES: Final = 8
"""Pieces that wait for a consumer. Without a backlog, threads waited a fifth of the time."""

_Piece = TypeVar("_Piece")


def prefetch_next(pieces: Iterator[_Piece]) -> Iterator[_Piece]:
    """Yield pieces while a thread prepares the next one."""
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        following = thread.submit(next, pieces, None)
        while (piece := following.result()) is not None:
            following = thread.submit(next, pieces, None)
            yield piece


def consume_concurrently(pieces: Iterable[_Piece], *consumers: Callable[[_Piece], object]) -> None:
    """Pass each piece to all consumers, in a thread for each, while the next pieces are made.

    Each consumer has a backlog of up to BACKLOG_PIECES pieces. The first error of `pieces` or of a
    consumer stops all and is raised.
    """
    queues = [Queue[_Piece | None](BACKLOG_PIECES) for _ in consumers]
    failed: list[BaseException] = []

    def consume(consumer: Callable[[_Piece], object], queue: Queue[_Piece | None]) -> None:
        # After a failure it empties the queue, since the producer may wait for room.
        while (piece := queue.get()) is not None:
            try:
                if not failed:
                    consumer(piece)
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)

    threads: list[Thread] = []
    try:
        for consumer, queue in zip(consumers, queues, strict=True):
            # A daemon: after a second Ctrl-C the queue gets no end, and must not block the exit.
            thread = Thread(target=consume, args=(consumer, queue), name="consumer", daemon=True)
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
