"""The contract of every TransactionLog.

A test class of an implementation inherits it and defines three fixtures. `log` is a new log.
`chunks` are the names of three chunks in state posting. `take_over` is a function that takes an
account's lease from its holder, as another run does after a long pause.
"""

import hashlib
from typing import Any

import pytest

from caf_pipeline.errors import HeldByOther, LeaseLost, LedgerError
from caf_pipeline.records import SignedTransaction, WaitingPost

ACCOUNT = "chain-1/jkl1us"
OTHER = "chain-1/jkl1them"


def signed(
    sequence: int,
    body: bytes = b"",
    *,
    account: str = ACCOUNT,
    cost: int = 10,
    purpose: str = "post",
) -> SignedTransaction:
    body = body or f"{account} {sequence}".encode()
    return SignedTransaction(
        hashlib.sha256(body).hexdigest().upper(), body, account, sequence, 100, purpose, cost
    )


def ask(log: Any, *chunks: str, account: str = ACCOUNT) -> None:
    for chunk in chunks:
        log.ask(account, chunk, chunk.encode(), 30)


def commit(log: Any, transaction: SignedTransaction, *chunks: str) -> SignedTransaction:
    """Commit a transaction under a separate lease."""
    with log.lease(transaction.account) as lease:
        log.commit(lease, transaction, chunks)
    return transaction


def settle(log: Any, transaction: SignedTransaction, outcome: str, *starts: int) -> None:
    with log.lease(transaction.account) as lease:
        log.settle(lease, transaction.hash, outcome, starts=starts)


def names(posts: Any) -> list[str]:
    return [post.chunk for post in posts]


class TransactionLogContract:
    """The contract of `TransactionLog`."""

    # --- queueing ---

    def test_queued_messages_wait_oldest_first(self, log, chunks):
        ask(log, *reversed(chunks))
        assert log.waiting(ACCOUNT) == [
            WaitingPost(chunk, chunk.encode(), 30) for chunk in reversed(chunks)
        ]
        assert log.waiting(OTHER) == []

    def test_the_same_asked_again_waits_once(self, log, chunks):
        ask(log, chunks[0], chunks[1], chunks[0])
        assert names(log.waiting(ACCOUNT)) == [*chunks[:2]]

    def test_new_message_replaces_the_queued_one(self, log, chunks):
        ask(log, chunks[0])
        log.ask(ACCOUNT, chunks[0], b"another", 60)
        assert log.waiting(ACCOUNT) == [WaitingPost(chunks[0], b"another", 60)]

    @pytest.mark.parametrize("included", [False, True])
    def test_possibly_included_chunk_is_not_queued_again(self, log, chunks, included):
        ask(log, chunks[0])
        transaction = commit(log, signed(1), chunks[0])
        if included:
            settle(log, transaction, "included", 7)
        log.ask(ACCOUNT, chunks[0], b"another", 60)
        assert log.waiting(ACCOUNT) == []

    @pytest.mark.parametrize("outcome", ["failed", "expired", "superseded"])
    def test_the_posts_of_a_transaction_that_posted_nothing_wait_again(self, log, chunks, outcome):
        ask(log, *chunks)
        transaction = commit(log, signed(1), chunks[0], chunks[2])
        assert names(log.waiting(ACCOUNT)) == [chunks[1]]
        settle(log, transaction, outcome)
        assert names(log.waiting(ACCOUNT)) == [*chunks]

    # --- committing ---

    @pytest.mark.parametrize("outcome", [None, "included", "expired"])
    def test_another_account_takes_over_a_chunk_with_its_posts(self, log, chunks, outcome):
        ask(log, *chunks)
        transaction = commit(log, signed(1), chunks[0])
        if outcome:
            settle(log, transaction, outcome, *([50] if outcome == "included" else []))
        assert list(log.other_accounts(chunks[0], OTHER)) == (
            [] if outcome == "expired" else [ACCOUNT]
        )
        assert list(log.other_accounts(chunks[1], OTHER)) == []
        assert list(log.other_accounts(chunks[0], ACCOUNT)) == []
        assert names(log.waiting(ACCOUNT)) == [chunks[2]]  # it signs no others

    def test_committed_transactions_are_pending_by_sequence_until_they_are_settled(
        self, log, chunks
    ):
        ask(log, *chunks)
        two = commit(log, signed(2), chunks[0])
        transaction = commit(log, signed(1, purpose="buy", cost=5))
        assert log.pending(ACCOUNT) == [transaction, two]
        settle(log, transaction, "included")
        assert log.pending(ACCOUNT) == [two]
        assert log.pending(OTHER) == []

    @pytest.mark.parametrize(
        ("outcome", "free"),
        [
            (None, False),
            ("included", False),
            ("failed", False),
            ("expired", True),
            ("superseded", True),
        ],
    )
    def test_sequence_is_reused_only_if_no_block_has_it(self, log, outcome, free):
        transaction = commit(log, signed(7))
        if outcome:
            settle(log, transaction, outcome)
        again = signed(7, b"another")
        if free:
            assert log.pending(ACCOUNT) == []
            commit(log, again)
            assert log.pending(ACCOUNT) == [again]
        else:
            with pytest.raises(LedgerError, match="sequence 7"):
                commit(log, again)

    def test_accounts_do_not_share_sequences(self, log):
        commit(log, signed(7))
        commit(log, signed(7, account=OTHER))

    @pytest.mark.parametrize("included", [False, True])
    def test_pending_chunk_keeps_another_transaction_out(self, log, chunks, included):
        ask(log, *chunks)
        transaction = commit(log, signed(1), chunks[0])
        if included:
            settle(log, transaction, "included", 7)
        with pytest.raises(LedgerError, match=chunks[0]):
            commit(log, signed(2), chunks[1], chunks[0])
        assert names(log.waiting(ACCOUNT)) == [*chunks[1:]]
        assert log.pending(ACCOUNT) == ([] if included else [transaction])

    def test_chunk_without_a_queued_message_is_not_committed(self, log, chunks):
        ask(log, chunks[0])
        with pytest.raises(LedgerError, match=chunks[1]):
            commit(log, signed(1), *chunks[:2])
        assert log.pending(ACCOUNT) == []

    def test_run_killed_before_commit_leaves_its_post_queued(self, log, chunks):
        ask(log, chunks[0])
        with pytest.raises(ConnectionError), log.lease(ACCOUNT):
            raise ConnectionError("the cable")
        assert names(log.waiting(ACCOUNT)) == [chunks[0]]
        commit(log, signed(1), chunks[0])

    # --- the owner of the sequence ---

    def test_one_run_at_a_time_holds_an_account(self, log):
        with log.lease(ACCOUNT), log.lease(OTHER), pytest.raises(HeldByOther):
            log.lease(ACCOUNT).__enter__()
        with log.lease(ACCOUNT) as lease:
            lease.check()

    def test_run_without_the_account_cannot_commit_or_settle(self, log, chunks, take_over):
        ask(log, *chunks)
        transaction = commit(log, signed(1), chunks[0])
        with log.lease(ACCOUNT) as lease:
            take_over(ACCOUNT)
            with pytest.raises(LeaseLost):
                log.commit(lease, signed(2), [chunks[1]])
            with pytest.raises(LeaseLost):
                log.settle(lease, transaction.hash, "included", starts=[7])
        assert log.pending(ACCOUNT) == [transaction]
        assert log.start_of(ACCOUNT, chunks[0]) is None

    # --- settling ---

    def test_an_included_transaction_tells_where_each_post_starts(self, log, chunks):
        ask(log, *chunks)
        transaction = commit(log, signed(1), chunks[2], chunks[0])
        assert log.start_of(ACCOUNT, chunks[0]) is None
        settle(log, transaction, "included", 8, 9)
        assert [log.start_of(ACCOUNT, chunk) for chunk in chunks] == [9, None, 8]
        assert log.start_of(OTHER, chunks[0]) is None

    def test_a_post_without_a_start_is_not_included(self, log, chunks):
        ask(log, *chunks)
        transaction = commit(log, signed(1), *chunks)
        with pytest.raises(LedgerError, match="3 posts"):
            settle(log, transaction, "included", 7)
        assert log.pending(ACCOUNT) == [transaction]

    def test_a_transaction_is_closed_once(self, log):
        transaction = commit(log, signed(1))
        settle(log, transaction, "expired")
        settle(log, transaction, "expired")
        with pytest.raises(LedgerError):
            settle(log, transaction, "included")

    def test_an_unknown_transaction_or_outcome_is_refused(self, log):
        transaction = commit(log, signed(1))
        with pytest.raises(LedgerError):
            settle(log, signed(2), "expired")
        with pytest.raises(LedgerError):
            settle(log, transaction, "lost")

    def test_spent_counts_included_and_pending_transactions(self, log):
        for sequence, outcome in enumerate(
            ["included", "failed", "expired", "superseded", None], 1
        ):
            transaction = commit(log, signed(sequence, cost=10**sequence))
            if outcome:
                settle(log, transaction, outcome)
        assert log.spent(ACCOUNT) == 100_110
        assert log.spent(OTHER) == 0

    def test_a_failed_purchase_comes_to_its_fee(self, log):
        transaction = commit(log, signed(1, cost=1_000_000))
        with log.lease(ACCOUNT) as lease:
            log.settle(lease, transaction.hash, "failed", cost=6_000)
        assert log.spent(ACCOUNT) == 6_000

    def test_purchase_counts_at_list_price_until_the_charge_is_known(self, log):
        reported, untold, failed, _pending = (
            commit(log, signed(number, cost=1_000, purpose="buy")) for number in range(1, 5)
        )
        commit(log, signed(5, cost=1))
        with log.lease(ACCOUNT) as lease:
            log.settle(lease, reported.hash, "included", cost=300)
            log.settle(lease, untold.hash, "included")
            log.settle(lease, failed.hash, "failed", cost=7)
        assert (log.spent(ACCOUNT), log.at_list_price(ACCOUNT)) == (300 + 1_000 + 7 + 1_000 + 1, 2)
        assert log.at_list_price(OTHER) == 0

    # --- heights ---

    def test_the_greatest_height_of_a_chain_is_remembered(self, log):
        assert log.seen_height("chain-1") == 0
        for height in (5, 9, 7):
            log.see_height("chain-1", height)
        assert (log.seen_height("chain-1"), log.seen_height("chain-2")) == (9, 0)
