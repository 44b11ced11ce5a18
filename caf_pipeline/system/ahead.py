"""Work that goes on while its last piece is used: what is native code on both sides keeps two cores busy."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Piece = TypeVar("_Piece")


def one_ahead(pieces: Iterator[_Piece]) -> Iterator[_Piece]:
    """Yield pieces, each made by a thread while the one before it is used; at most two are there at once."""
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        following = thread.submit(next, pieces, None)
        while (piece := following.result()) is not None:
            following = thread.submit(next, pieces, None)
            yield piece


def use_behind(pieces: Iterable[_Piece], *uses: Callable[[_Piece], object]) -> None:
    """Give each piece to all uses, a thread for each of them, while the next piece is made; at most two are there at once.

    Raises: what making a piece or a use of it raises; then no use goes on.
    """
    with ThreadPoolExecutor(len(uses), thread_name_prefix="behind") as threads:
        under_way: Sequence[Future[object]] = ()
        for piece in pieces:
            _end(under_way)
            under_way = [threads.submit(use, piece) for use in uses]
        _end(under_way)


def _end(under_way: Iterable[Future[object]]) -> None:
    for one in under_way:
        one.result()
