"""A deadline: answers and errors come back, what hangs is left behind, and is not asked a second
time meanwhile.
"""

import threading

import pytest

from caf_pipeline.system.deadline import Deadline, Overdue

LONG = 60


def test_an_answer_and_an_error_come_back():
    deadline = Deadline(LONG)
    assert deadline.ask("a server", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        deadline.ask("a server", lambda: 1 // 0)
    assert deadline.ask("a server", lambda: 8) == 8


def test_hanging_request_is_abandoned_and_not_repeated():
    ended, given_back = threading.Event(), threading.Event()
    with pytest.raises(Overdue, match=r"the server .* 0\.05 s"):
        Deadline(0.05).ask("the server", lambda: ended.wait(LONG), late=given_back.set)
    with pytest.raises(Overdue, match=r"the server .* earlier"):
        Deadline(LONG).ask("the server", lambda: 1)
    assert Deadline(LONG).ask("another server", lambda: 1) == 1
    assert not given_back.is_set()
    ended.set()
    assert given_back.wait(LONG)
    (hung,) = [
        thread for thread in threading.enumerate() if thread.name == "overdue: the server"
    ] or [None]
    if hung:
        hung.join()
    assert Deadline(LONG).ask("the server", lambda: 2) == 2


def test_concurrent_ticks_do_not_count_as_overdue():
    asked, ended = threading.Event(), threading.Event()

    def first():
        return Deadline(LONG).ask("one server", lambda: (asked.set(), ended.wait(LONG)))

    thread = threading.Thread(target=first)
    thread.start()
    asked.wait(LONG)
    assert Deadline(LONG).ask("one server", lambda: 3) == 3
    ended.set()
    thread.join()
