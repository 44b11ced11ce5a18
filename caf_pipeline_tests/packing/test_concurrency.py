"""The limit on concurrent requests, against simulated servers."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caf_pipeline.packing.concurrency import (
    BAD_IN_A_ROW,
    MAX_HOLD,
    MINIMUM,
    START,
    TRIES,
    ConcurrencyLimit,
)

KIB = 1 << 10


class Server:
    """Answers after `latency` seconds, and at most `capacity` requests a second.

    `refused` is the share of refusals among every 100 requests. If it `fails`, no request succeeds.
    """

    def __init__(self, maximum=256, latency=0.03, capacity=1600.0, refused=0):
        self.limit = ConcurrencyLimit(maximum)
        self.latency, self.capacity, self.refused = latency, capacity, refused
        self.fails = False
        self.now = 100.0
        self.count = 0
        self.seen = []

    def serve_all(self, seconds):
        """Return the limit at each answer of the next seconds."""
        before = len(self.seen)
        self.serve(seconds)
        return self.seen[before:]

    def serve(self, seconds):
        until = self.now + seconds
        while self.now < until:
            self.now += 1 / min(self.limit.requests / self.latency, self.capacity)
            self.count += 1
            refused = self.count * self.refused % 100 < self.refused
            failed = refused or self.fails
            self.limit.ended(self.now, None if failed else 16 * KIB, refused=refused)
            self.seen.append(self.limit.requests)
        return self.limit.requests


@pytest.mark.parametrize(
    ("latency", "capacity", "expected"),
    [(0.001, 2000, 64), (0.03, 1600, 64), (0.03, 100_000, 256), (0.1, 1600, 256)],
)
def test_requests_suit_the_latency_after_three_seconds(latency, capacity, expected):
    server = Server(latency=latency, capacity=capacity)
    server.serve(3)
    assert statistics.mode(server.serve_all(5)) == expected


def test_higher_latency_raises_the_requests():
    server = Server(latency=0.001)
    server.serve(10)
    server.latency = 0.1
    assert server.serve(60) == 256


def test_requests_that_gain_nothing_are_given_up():
    server = Server(latency=0.1)
    server.serve(10)
    server.latency = 0.001
    assert server.serve(120) == START


def test_trials_become_rare():
    server = Server(latency=0.001)
    server.serve(200)
    assert sum(requests != START for requests in server.seen) < len(server.seen) / (
        MAX_HOLD / TRIES
    )


def test_a_few_refusals_change_nothing():
    assert Server(latency=0.1, refused=14).serve(10) == 256


def test_many_refusals_halve_the_requests():
    server = Server(latency=0.1)
    server.serve(10)
    server.refused = 60
    assert server.serve(0.4 * BAD_IN_A_ROW) == 128
    assert server.serve(60) <= 2 * MINIMUM


def test_a_burst_of_refusals_is_survived():
    server = Server(latency=0.1)
    server.serve(10)
    server.refused = 100
    server.serve(0.1)
    server.refused = 0
    assert min(server.seen[-2000:]) == server.serve(2) == 256


def test_fast_failures_raise_no_limit():
    server = Server(latency=0.001, capacity=2000)
    server.serve(10)
    before = server.limit.requests
    server.fails, server.capacity = True, 100_000
    assert server.serve(20) == before
    server.fails, server.capacity = False, 2000
    assert statistics.mode(server.serve_all(10)) == START


@given(
    maximum=st.integers(1, 256),
    ends=st.lists(
        st.tuples(st.floats(0, 10), st.integers(0, 1 << 30), st.booleans()), max_size=300
    ),
)
def test_the_limit_stays_between_minimum_and_maximum(maximum, ends):
    limit, now = ConcurrencyLimit(maximum), 0.0
    for seconds, size_bytes, refused in ends:
        now += seconds
        limit.ended(now, None if refused else size_bytes, refused=refused)
        assert min(MINIMUM, maximum) <= limit.requests <= maximum


@given(ends=st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=300))
def test_equal_times_give_equal_limits(ends):
    first, second = ConcurrencyLimit(256), ConcurrencyLimit(256)
    for limit, start in ((first, 0.0), (second, 1024.0)):
        for number, (_, refused) in enumerate(ends):
            limit.ended(start + number / 128, None if refused else 0, refused=refused)
    assert first.requests == second.requests
