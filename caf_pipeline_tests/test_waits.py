"""What is waited for is told: when it begins, again while it goes on, and when it is over; what is
brief is not.
"""

import threading

import pytest

from caf_pipeline import waits as module
from caf_pipeline.waits import Announcer, Waits, Work
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS


class Told:
    """A listener that keeps what it is told, and can be waited for."""

    def __init__(self):
        self.all = []
        self._changed = threading.Condition()

    def __call__(self, waits):
        with self._changed:
            self.all.append([wait.what for wait in waits])
            self._changed.notify_all()

    def until(self, what):
        with self._changed:
            assert self._changed.wait_for(lambda: what in self.all, timeout=PATIENCE_SECONDS), (
                self.all
            )


@pytest.fixture
def told():
    return Told()


def test_wait_without_grace_is_reported_immediately(told):
    with Waits(told).waiting("rain", ends_by="June ends it"):
        assert told.all == [["rain"]]
    assert told.all == [["rain"], []]


def test_wait_that_ends_within_its_grace_is_not_reported(told):
    with Waits(told).waiting("rain", ends_by="June ends it", grace=60):
        pass
    assert told.all == []


def test_a_wait_is_told_once_its_grace_is_over(told):
    with Waits(told).waiting("rain", ends_by="June ends it", grace=0.05):
        told.until(["rain"])
    assert told.all[-1] == []


def test_a_wait_that_goes_on_is_told_again(told, monkeypatch):
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.0)
    with Waits(told).waiting("rain", ends_by="June ends it"):
        told.all.clear()
        told.until(["rain"])


def test_progress_restarts_a_wait_and_withdraws_its_report(told):
    with Waits(told).waiting("rain", ends_by="June ends it", grace=1.0) as wait:
        told.until(["rain"])
        wait.moved()
        told.until([])


def test_threads_share_a_wait_until_the_last_ends(told):
    waits = Waits(told)
    with waits.waiting("rain", ends_by="June ends it"):
        with waits.waiting("rain", ends_by="June ends it"):
            pass
        assert told.all == [["rain"]]
    assert told.all[-1] == []


def test_announced_wait_names_reason_start_end_and_chunk():
    said = []
    waits = Waits(Announcer(said.append))
    with waits.on("src-1-1"), waits.waiting("rain", ends_by="June ends it"):
        (line,) = said
        assert line.startswith("chunk src-1-1: waiting since ")
        assert line.endswith(" UTC for rain; June ends it")
    assert "for rain" in said[1]
    assert "waited" in said[1]
    assert len(said) == 2


def test_work_is_recorded_again_until_it_succeeds():
    answers, records, done = iter([False, True]), [], threading.Event()

    def record(work):
        records.append(work)
        if len(records) == 2:
            done.set()
        return next(answers, True)

    waits = Waits(record=record)
    with waits.on("src-1-1"):
        waits.packed(0, 300, 300)
        waits.packed(1, 700, 0)
        waits.sent(50)
        assert done.wait(PATIENCE_SECONDS)
    waits.close()
    assert records == [*[Work("src-1-1", 1, 1000, 300, 50)] * 2, Work()]


def test_nothing_is_recorded_after_the_end(monkeypatch):
    monkeypatch.setattr("caf_pipeline.waits._POLL_SECONDS", 0.01)
    monkeypatch.setattr("caf_pipeline.waits.RECORD_SECONDS", 0.0)
    records, begun = [], threading.Event()

    def record(work):
        records.append(work)
        begun.set()
        return True

    waits = Waits(record=record)
    with waits.waiting("rain", ends_by="June ends it"):  # as a thread that hangs
        assert begun.wait(PATIENCE_SECONDS)
        waits.close()
    with waits.on("src-1-1"):
        waits.packed(1, 700, 0)
        waits._record_work(again=True)
    assert records[-1] == Work()
