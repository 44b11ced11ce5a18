"""Pieces that are used while the next is made."""

import itertools
import threading

import pytest

from caf_pipeline.system import pipeline_threads
from caf_pipeline.system.pipeline_threads import consume_concurrently
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS


def test_every_use_is_given_every_piece_in_order():
    one, other = list[int](), list[int]()
    consume_concurrently(iter(range(100)), one.append, other.append)
    assert one == other == list(range(100))


def test_a_piece_is_made_while_the_one_before_is_used():
    is_made = threading.Event()

    def pieces():
        yield 0
        is_made.set()
        yield 1

    def use(piece):
        assert piece or is_made.wait(PATIENCE_SECONDS)

    consume_concurrently(pieces(), use)


def test_a_use_that_fails_ends_them_all():
    tried, other = list[int](), list[int]()

    def use(piece):
        tried.append(piece)
        if piece == 3:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        consume_concurrently(itertools.count(), use, other.append)
    assert tried == [0, 1, 2, 3]
    assert other == list(range(len(other)))


def test_pieces_that_break_off_are_used_up_to_there():
    def pieces():
        yield from (1, 2)
        raise ConnectionError("gone")

    used = list[int]()
    with pytest.raises(ConnectionError):
        consume_concurrently(pieces(), used.append)
    assert used == [1, 2]


def test_failed_thread_start_leaves_no_waiting_thread(monkeypatch):
    class Second(threading.Thread):
        left = 1

        def start(self):
            if not Second.left:
                raise RuntimeError("can't start new thread")
            Second.left -= 1
            super().start()

    monkeypatch.setattr(pipeline_threads, "Thread", Second)
    with pytest.raises(RuntimeError, match="new thread"):
        consume_concurrently(iter(range(100)), id, id)
    assert "behind" not in [each.name for each in threading.enumerate()]


def test_interrupt_waits_only_for_the_current_piece(monkeypatch):
    is_left = threading.Event()

    class Left(threading.Thread):
        def join(self, timeout=None):
            is_left.set()
            super().join(timeout)

    def pieces():
        yield from range(pipeline_threads.BACKLOG_PIECES)
        raise KeyboardInterrupt

    def use(piece):
        used.append((piece, threading.current_thread().daemon))
        assert is_left.wait(PATIENCE_SECONDS)

    used = list[tuple[int, bool]]()
    monkeypatch.setattr(pipeline_threads, "Thread", Left)
    with pytest.raises(KeyboardInterrupt):
        consume_concurrently(pieces(), use)
    assert used in ([], [(0, True)])
