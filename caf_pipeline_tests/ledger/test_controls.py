"""Runs share staging space, rates of providers, and orders of the operator."""

import contextlib
from datetime import UTC

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import StagingError, UsageError
from caf_pipeline.ledger.records import OperatorControls, Reservation
from caf_pipeline_tests.support.ledger_rows import bring_to, end, held, holder, register


def test_reservations_of_all_chunks_together_stay_under_the_limit(ledger):
    chunk, other = register(ledger, ["a"], ["b"])
    with (
        held(ledger, chunk) as first,
        held(ledger, other) as second,
    ):
        ledger.staging.reserve(first, chunk, "/s", 60, 100)
        ledger.staging.reserve(first, chunk, "/s", 70, 100)
        with pytest.raises(StagingError, match="70 B of 100 B"):
            ledger.staging.reserve(second, other, "/s", 31, 100)
        ledger.staging.reserve(second, other, "/another", 31, 100)
        ledger.staging.reserve(second, other, "/s", 31, 0)
        ledger.staging.release(chunk)
        ledger.staging.reserve(second, other, "/s", 100, 100)


def test_a_chunk_that_is_done_holds_no_staging(ledger):
    chunk, other = register(ledger, ["a"], ["b"])
    with held(ledger, chunk) as lease:
        ledger.staging.reserve(lease, chunk, "/s", 100, 100)
    end(ledger, chunk, ChunkState.WITHDRAWN)
    with held(ledger, other) as lease:
        ledger.staging.reserve(lease, other, "/s", 100, 100)


def test_one_log_is_shared_by_all_holders(ledger):
    ledger.transactions(holder("run-1")).see_height("chain-1", 5)
    assert ledger.transactions(holder("run-2")).seen_height("chain-1") == 5


def test_a_new_rate_is_the_mean_with_the_old(ledger):
    providers = ledger.providers
    providers.uploaded("p", 1000, 10)
    providers.uploaded("p", 1000, 5)
    providers.downloaded("p", 300, 1)
    providers.uploaded("p", 1000, 0)  # too short to be measured
    record = ledger.providers.all()["p"]
    assert (record.upload_rate, record.download_rate, record.failures, record.failed_at) == (
        150,
        300,
        0,
        None,
    )


def test_failures_are_counted_in_a_row(ledger):
    providers = ledger.providers
    for _ in range(2):
        providers.failed("p")
    record = providers.all()["p"]
    assert (record.failures, record.upload_rate, record.failed_at.tzinfo) == (2, None, UTC)
    providers.downloaded("p", 1, 1)
    assert (providers.all()["p"].failures, providers.all()["p"].failed_at) == (0, record.failed_at)
    assert set(providers.all()) == {"p"}


def test_orders_hold_until_they_are_taken_back(ledger):
    board = ledger.controls
    assert board.current() == OperatorControls()
    board.set("paused", "the bill")
    board.set("bandwidth", "1000")
    board.set("bandwidth", "0")
    board.set("spend_cap", "-1")
    assert ledger.controls.current() == OperatorControls("the bill", 0, -1)
    for name in ("paused", "bandwidth", "spend_cap"):
        board.set(name, None)
    assert board.current() == OperatorControls()


@pytest.mark.parametrize(
    ("name", "value"),
    [("speed", "1"), ("speed", None), ("paused", " "), ("bandwidth", "-1"), ("spend_cap", "a few")],
)
def test_an_order_that_makes_no_sense_is_refused(ledger, name, value):
    with pytest.raises(UsageError):
        ledger.controls.set(name, value)
    assert ledger.controls.current() == OperatorControls()


def test_only_chunks_that_a_live_run_uploads_share_the_bandwidth(ledger):
    names = register(ledger, ["a"], ["b"], ["c"], ["d"])
    for name in names[:3]:
        bring_to(ledger, name, ChunkState.UPLOADING)
    assert ledger.controls.current().uploads == 1
    with contextlib.ExitStack() as stack:
        for name in (*names[1:3], names[3]):
            stack.enter_context(held(ledger, name))
        assert ledger.controls.current().uploads == 2


def test_reservations_are_listed_with_their_chunks_state(ledger):
    (chunk,) = register(ledger, ["a"])
    with held(ledger, chunk) as lease:
        ledger.staging.reserve(lease, chunk, "/staging", 1000, 0)
    assert ledger.staging.list() == [Reservation(chunk, ChunkState.PLANNED, "/staging", 1000)]
    ledger.staging.release(chunk)
    assert ledger.staging.list() == []
