"""Ctrl-C is noticed, whichever handler receives it."""

import os
import signal
import sys
import weakref

import pytest
from dagster import DagsterExecutionInterruptedError

from caf_pipeline.dagster_host.sigint import InterruptWatch
from caf_pipeline.system import ending
from caf_pipeline_tests.support.dagster_private import capture_interrupts
from caf_pipeline_tests.support.patience import wait_for


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_process_is_seen(monkeypatch, number):
    monkeypatch.setattr(ending, "_received", [])
    before = signal.signal(number, lambda *_: None)
    try:
        with InterruptWatch() as watch:
            os.kill(os.getpid(), number)
            with pytest.raises(KeyboardInterrupt):
                watch.raise_seen()
    finally:
        signal.signal(number, before)
    assert ending.interrupted_status() == 128 + number


def test_an_interrupt_that_dagster_held_back_and_dropped_is_seen():
    with InterruptWatch() as watch:
        with capture_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            watch.raise_seen()


def test_an_interrupt_is_raised_once():
    with InterruptWatch() as watch:
        watch.raise_seen()
        with capture_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            watch.raise_seen()
        watch.raise_seen()


def test_the_descriptor_that_was_set_before_is_set_again():
    before = signal.set_wakeup_fd(-1)
    with InterruptWatch():
        pass
    assert signal.set_wakeup_fd(before) == -1


@pytest.mark.parametrize(
    ("error", "printed"),
    [(DagsterExecutionInterruptedError, 0), (KeyboardInterrupt, 0), (ValueError, 1)],
)
def test_an_interrupt_that_python_drops_is_repeated(monkeypatch, error, printed):
    tracebacks, signals = [], []
    monkeypatch.setattr(sys, "unraisablehook", tracebacks.append)
    before = signal.signal(signal.SIGINT, lambda *_: signals.append(error))

    def collected(reference):
        raise error

    try:
        ending.repeat_dropped()
        reference = weakref.ref(item := type("One", (), {})(), collected)
        del item
        assert reference() is None
        if not printed:
            wait_for(lambda: signals)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(tracebacks) == printed
