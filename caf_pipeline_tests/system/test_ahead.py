"""Pieces that are used while the next is made."""

import itertools
import threading

import pytest

from caf_pipeline.system import ahead
from caf_pipeline.system.ahead import use_behind
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS


def test_every_use_is_given_every_piece_in_order():
    one, other = list[int](), list[int]()
    use_behind(iter(range(100)), one.append, other.append)
    assert one == other == list(range(100))


def test_a_piece_is_made_while_the_one_before_is_used():
    is_made = threading.Event()

    def pieces():
        yield 0
        is_made.set()
        yield 1

    def use(piece):
        assert piece or is_made.wait(PATIENCE_SECONDS)

    use_behind(pieces(), use)


def test_a_use_that_fails_ends_them_all():
    tried, other = list[int](), list[int]()

    def use(piece):
        tried.append(piece)
        if piece == 3:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        use_behind(itertools.count(), use, other.append)
    assert tried == [0, 1, 2, 3]
    assert other == list(range(len(other)))


def test_pieces_that_break_off_are_used_up_to_there():
    def pieces():
        yield from (1, 2)
        raise ConnectionError("gone")

    used = list[int]()
    with pytest.raises(ConnectionError):
        use_behind(pieces(), used.append)
    assert used == [1, 2]


def test_a_thread_that_cannot_start_leaves_none_that_waits_for_pieces(monkeypatch):
    class Second(threading.Thread):
        left = 1

        def start(self):
            if not Second.left:
                raise RuntimeError("can't start new thread")
            Second.left -= 1
            super().start()

    monkeypatch.setattr(ahead, "Thread", Second)
    with pytest.raises(RuntimeError, match="new thread"):
        use_behind(iter(range(100)), id, id)
    assert "behind" not in [each.name for each in threading.enumerate()]


def test_an_interrupt_waits_for_the_piece_in_use_alone_and_an_exit_for_none(monkeypatch):
    is_left = threading.Event()

    class Left(threading.Thread):
        def join(self, timeout=None):
            is_left.set()
            super().join(timeout)

    def pieces():
        yield from range(ahead.PIECES_BEHIND)
        raise KeyboardInterrupt

    def use(piece):
        used.append((piece, threading.current_thread().daemon))
        assert is_left.wait(PATIENCE_SECONDS)

    used = list[tuple[int, bool]]()
    monkeypatch.setattr(ahead, "Thread", Left)
    with pytest.raises(KeyboardInterrupt):
        use_behind(pieces(), use)
    assert used in ([], [(0, True)])
