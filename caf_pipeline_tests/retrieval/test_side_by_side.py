"""Concurrent work and its results when an error ends it."""

import inspect
import os
import threading

import pytest

from caf_pipeline.errors import LedgerUnreachable, SourceDenied
from caf_pipeline.retrieval import bulk, check
from caf_pipeline.retrieval.listing import list_objects
from caf_pipeline.retrieval.side_by_side import side_by_side, take_all
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything


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


@pytest.mark.parametrize(
    "begin",
    [
        lambda lookup, store, keys: bulk.read_many(lookup, store, "src", keys),
        lambda lookup, store, keys: bulk.read_located(store, list_objects(lookup, "src")),
        lambda lookup, store, keys: check.check_objects(list_objects(lookup, "src"), store),
    ],
    ids=["read_many", "read_located", "check_objects"],
)
def test_closed_reads_close_their_threads(tmp_path, ledger, monkeypatch, begin):
    bodies = {f"{number:03}": os.urandom(1000) for number in range(20)}
    context = a_run_context(tmp_path, MemorySource(bodies), ledger)
    archive_everything(context)
    opened = []

    def recorded(*arguments, **options):
        opened.append(side_by_side(*arguments, **options))  # another reference, as a traceback has
        return opened[-1]

    for module in (bulk, check):
        monkeypatch.setattr(module, "side_by_side", recorded)
    reads = begin(context.ledger.lookup, context.store, sorted(bodies))
    next(reads)
    reads.close()
    assert {inspect.getgeneratorstate(results) for results in opened} == {inspect.GEN_CLOSED}
