"""Concurrent work and its results when an error ends it."""

import threading

import pytest

from caf_pipeline.errors import LedgerUnreachable, SourceDenied
from caf_pipeline.retrieval.side_by_side import side_by_side, take_all


@pytest.mark.parametrize("threads", [1, 3])
def test_running_work_is_yielded_before_a_listing_error(threads):
    begun, written, taken = threading.Semaphore(0), [], []

    def given():
        yield from range(threads)
        for _ in range(threads):
            begun.acquire()
        raise LedgerUnreachable("the database is away")

    def write(one):
        begun.release()
        written.append(one)
        return one

    ended = take_all(side_by_side(given(), write, threads, drains=True), taken.append)
    assert isinstance(ended, LedgerUnreachable)
    assert taken == sorted(written) == list(range(threads))


def test_all_written_items_are_yielded_before_the_error():
    meeting, written, taken = threading.Barrier(3), [], []

    def write(one):
        if one < 3:
            meeting.wait()
        if one == 0:
            raise SourceDenied("no more")
        written.append(one)
        return one

    assert isinstance(
        take_all(side_by_side(range(100), write, 3, drains=True), taken.append), SourceDenied
    )
    assert taken == sorted(written)
    assert {1, 2} <= set(taken)
