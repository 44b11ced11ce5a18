"""The operator's throttle, on a clock of its own."""

import pytest

from caf_pipeline.errors import LeaseLost, LedgerUnreachable
from caf_pipeline.ledger.records import OperatorControls
from caf_pipeline.throttle import LEAST_PIECE_BYTES, Throttle

MIB = 1 << 20


class Board:
    """Controls whose orders a test sets, and a clock that only sleeping moves on."""

    def __init__(self):
        self.given = OperatorControls()
        self.away = False
        self.looks = 0
        self.now = 0.0
        self.at = {}

    def current(self):
        self.looks += 1
        if self.away:
            raise LedgerUnreachable("away")
        return self.given

    def sleep(self, seconds):
        self.now += seconds
        for time in [time for time in self.at if time <= self.now]:
            self.given = self.at.pop(time)

    def throttle(self, **settings):
        return Throttle(self.current, clock=lambda: self.now, sleep=self.sleep, **settings)


@pytest.fixture
def board():
    return Board()


def test_nothing_is_held_up_where_nothing_is_ordered(board):
    board.throttle().sent(1 << 40)
    assert board.now == 0


def test_it_tells_whether_an_order_held_it_up(board):
    assert not board.throttle().sent(1 << 40)
    assert not board.throttle(bandwidth=MIB).sent(0)
    assert board.throttle(bandwidth=MIB).sent(MIB)
    board.given, board.at = OperatorControls(paused="the line is needed"), {100: OperatorControls()}
    assert board.throttle().sent(1)


def test_a_pause_holds_until_it_is_taken_back(board):
    board.given, board.at = OperatorControls(paused="the line is needed"), {100: OperatorControls()}
    board.throttle().wait_while_paused()
    assert 100 <= board.now <= 103


def test_a_pause_is_noticed_while_bytes_are_sent(board):
    throttle, board.at = (
        board.throttle(bandwidth=MIB),
        {5: OperatorControls(paused="stop"), 50: OperatorControls()},
    )
    for _ in range(10):
        throttle.sent(MIB)
    assert 50 <= board.now < 60


def test_what_is_held_up_notices_a_lost_lease(board):
    board.given, looks = OperatorControls(paused="for ever"), []

    def check():
        looks.append(1)
        if len(looks) > 3:
            raise LeaseLost("gone")

    with pytest.raises(LeaseLost):
        board.throttle().wait_while_paused(check)
    board.given, looks[:] = OperatorControls(bandwidth=1), []
    with pytest.raises(LeaseLost):
        board.throttle().sent(MIB, check)


def test_bytes_take_as_long_as_the_bandwidth_says(board):
    throttle = board.throttle(bandwidth=2 * MIB)
    for _ in range(20):
        throttle.sent(MIB)
    assert board.now == pytest.approx(10)


def test_uploads_share_the_bandwidth(board):
    board.given = OperatorControls(bandwidth=4 * MIB, uploads=4)
    throttle = board.throttle()
    for _ in range(5):
        throttle.sent(MIB)
    assert board.now == pytest.approx(5)


def test_operators_controls_win_over_settings_even_no_limit(board):
    board.given = OperatorControls(bandwidth=0, spend_cap=-1)
    throttle = board.throttle(bandwidth=1, spend_cap=5)
    throttle.sent(MIB)
    assert (board.now, throttle.spend_cap()) == (0, None)


def test_the_settings_hold_where_nothing_is_ordered(board):
    assert board.throttle(spend_cap=5).spend_cap() == 5
    assert board.throttle(bandwidth=7).bandwidth() == 7


def test_a_limit_that_is_lifted_lets_what_waits_go_on(board):
    board.given, board.at = OperatorControls(bandwidth=1), {10: OperatorControls(bandwidth=0)}
    board.throttle().sent(MIB)
    assert 10 <= board.now <= 13


def test_time_without_bytes_is_not_saved_up(board):
    throttle = board.throttle(bandwidth=MIB)
    throttle.sent(MIB)
    board.now += 1000
    before = board.now
    for _ in range(4):
        throttle.sent(MIB)
    assert board.now - before == pytest.approx(3, abs=1.1)


def test_pieces_are_small_under_a_small_bandwidth(board):
    assert board.throttle().piece_bytes(MIB) == MIB
    assert board.throttle(bandwidth=400_000).piece_bytes(MIB) == 100_000
    assert board.throttle(bandwidth=1).piece_bytes(MIB) == LEAST_PIECE_BYTES


def test_orders_are_read_at_most_every_two_seconds(board):
    throttle = board.throttle(bandwidth=MIB)
    for _ in range(10):
        throttle.sent(MIB)
    assert board.looks <= 6


def test_the_last_orders_hold_while_the_ledger_is_away(board):
    throttle, board.given = board.throttle(), OperatorControls(paused="stop")
    assert throttle.paused() == "stop"
    board.away, board.now = True, 1000
    assert throttle.paused() == "stop"


def test_orders_that_were_never_read_are_not_made_up(board):
    board.away = True
    with pytest.raises(LedgerUnreachable):
        board.throttle().paused()
