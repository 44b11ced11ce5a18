"""Objects restored to a bucket: how many are written concurrently."""

import os
import threading

import pytest

from caf_pipeline.retrieval.bulk import SMALL_BYTES
from caf_pipeline.retrieval.listing import list_objects
from caf_pipeline.retrieval.restore import RestoreOutcome
from caf_pipeline.retrieval.restore_bucket import WRITES, RestoreBucket
from caf_pipeline.retrieval.side_by_side import THREADS
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS, wait_for
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything


class MeetingTarget:
    """An empty bucket. Each `put` waits until `meeting` has all its parties."""

    def __init__(self, parties):
        self.meeting = threading.Barrier(parties, timeout=PATIENCE_SECONDS)
        self.lock = threading.Lock()
        self.current = self.most = 0
        self.bodies = {}

    def place(self, key):
        return key

    def keys_between(self, first, last):
        return frozenset()

    def find(self, key):
        return None

    def put(self, key, body, sha256, headers, *, replace):
        with self.lock:
            self.current += 1
            self.most = max(self.most, self.current)
        self.meeting.wait()
        with self.lock:
            self.current -= 1
            self.bodies[key] = bytes(body)
        return True


@pytest.fixture
def restoring(tmp_path, ledger):
    """Return a function that archives bodies, and begins to restore them to a target."""

    def begin(bodies, target):
        context = a_run_context(tmp_path, MemorySource(bodies), ledger, target="32MiB")
        archive_everything(context)
        lookup = context.ledger.lookup
        to_bucket = RestoreBucket(target, context.store, lookup, force=False, dry_run=False)
        return to_bucket.restore(list_objects(lookup, "src"))

    return begin


@pytest.fixture
def restored(restoring):
    """Return a function that archives bodies, and restores them to a target."""

    def run(bodies, target):
        done = list(restoring(bodies, target))
        assert {result.outcome for result in done} == {RestoreOutcome.RESTORED}
        assert target.bodies == bodies

    return run


def test_small_objects_use_all_connections(restored):
    bodies = {f"{number:03}": os.urandom(100 + number) for number in range(WRITES)}
    restored(bodies, MeetingTarget(WRITES))


def test_few_objects_are_read_while_they_are_written(restored):
    bodies = {f"{number:03}": os.urandom(SMALL_BYTES + 1) for number in range(2 * THREADS)}
    target = MeetingTarget(THREADS)
    restored(bodies, target)
    assert target.most == THREADS


def test_an_interrupted_restore_begins_no_other_copy(restoring):
    bodies = {f"{number:03}": os.urandom(SMALL_BYTES + 1) for number in range(3 * THREADS)}
    target = MeetingTarget(THREADS + 1)
    put = target.put

    def put_first_at_once(key, *arguments, **options):
        return key == "000" or put(key, *arguments, **options)

    target.put = put_first_at_once
    before = set(threading.enumerate())
    results = restoring(bodies, target)
    assert next(results).outcome == RestoreOutcome.RESTORED
    wait_for(lambda: target.current == THREADS)
    results.close()
    target.meeting.wait()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("reading"):
            thread.join(PATIENCE_SECONDS)
    assert len(target.bodies) == THREADS
