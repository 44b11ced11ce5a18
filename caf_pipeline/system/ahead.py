"""Work that goes on while its last piece is used: what is native code on both sides keeps two cores busy."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Piece = TypeVar("_Piece")


def one_ahead(pieces: Iterator[_Piece]) -> Iterator[_Piece]:
    """Yield pieces, each made by a thread while the one before it is used; at most two are there at once."""
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        following = thread.submit(next, pieces, None)
        while (piece := following.result()) is not None:
            following = thread.submit(next, pieces, None)
            yield piece
