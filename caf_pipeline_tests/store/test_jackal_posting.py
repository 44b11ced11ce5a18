"""A post is paid for once, whatever breaks. Each test checks what the network charged."""

import contextlib
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import (
    ChainBehind,
    ChainHalted,
    ChainUnreachable,
    EmptyWallet,
    HeldByOther,
    LeaseLost,
    NoStoragePlan,
    PlanExpired,
    PlanTooSmall,
    SpendCapReached,
    StoreError,
    StoreUnreachable,
    TransactionRefused,
)
from caf_pipeline.ledger.transactions import TransactionLog
from caf_pipeline.records import Copy
from caf_pipeline.store.jackal import nodes as nodes_module
from caf_pipeline.store.jackal import posting as posting_module
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.messages import POST_FILE, post_file, transaction_messages
from caf_pipeline.store.jackal.names import archive_note
from caf_pipeline.system.processes import this_process
from caf_pipeline_tests.support.kills import KILLED, Fatal, call
from caf_pipeline_tests.support.ledger_rows import bring_to, register
from caf_pipeline_tests.support.memory_log import MemoryLog
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.payers import (
    ARCHIVE,
    CHARGED,
    COPIES,
    SIZE,
    Payer,
    chunk,
    start_payment,
    then,
)

GB = 10**9


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def payer(network, stack):
    return Payer.new(network, stack)


@pytest.fixture
def log():
    return MemoryLog()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(12) as threads:
        yield threads


def ask(log, payer, name, **changes):
    """Queue a chunk of another run."""
    to_store = chunk(name)
    fields = {"copies": COPIES, "proof_type": 3, "note": archive_note(ARCHIVE)}
    size_bytes = changes.pop("size_bytes", SIZE)
    message = post_file(payer.address, to_store.merkle_root, size_bytes, **fields | changes).value
    log.ask(payer.account, name, message, size_bytes * COPIES)


def in_posting(ledger, count):
    """Return names of the ledger's chunks in state posting."""
    names = register(ledger, *[[f"key-{number}"] for number in range(count)])
    for name in names:
        bring_to(ledger, name, ChunkState.POSTING)
    return names


def outcomes(log):
    return [entry.outcome for entry in log.entries]


# --- a post ---


def test_post_is_charged_once_and_starts_at_its_block(payer, log):
    posting = payer.poster(log).post(chunk("a"), log)
    assert [posting.start] == payer.starts("a")
    assert (posting.owner, posting.stored_size_bytes) == (payer.address, SIZE)
    assert payer.charged() == CHARGED
    assert log.pending(payer.account) == []
    assert log.start_of(payer.account, "a") == posting.start
    (file,) = [file for file in payer.network.state()["files"] if file["owner"] == payer.address]
    assert file["note"] == '{"caf_pipeline":"archive-1"}'
    assert (file["max_proofs"], file["proof_type"]) == (COPIES, 3)


def test_posting_again_is_free(payer, log):
    poster = payer.poster(log)
    first, balance = poster.post(chunk("a"), log), payer.balance()
    assert poster.post(chunk("a"), log) == first
    other = MemoryLog()  # for a lost ledger
    assert payer.poster(other).post(chunk("a"), other) == first
    assert other.entries == []
    assert payer.balance() == balance
    assert payer.starts("a") == [first.start]


def test_a_root_that_somebody_else_posted_is_not_ours(payer, log, network, stack):
    other, others = Payer.new(network, stack), MemoryLog()
    other.poster(others).post(chunk("a"), others)
    posting = payer.poster(log).post(chunk("a"), log)
    assert posting.owner == payer.address
    assert payer.starts("a") == [posting.start]


@pytest.mark.parametrize(
    ("copies", "size", "detail"),
    [(1, SIZE, "1 copy of 1000"), (COPIES, SIZE - 1, f"{COPIES} copies of 999")],
)
def test_unsuitable_post_of_a_root_is_not_repeated(payer, log, copies, size, detail):
    payer.poster(log, copies=copies).post(chunk("a", stored_size_bytes=size), log)
    with pytest.raises(StoreError, match=detail) as refused:
        payer.poster(MemoryLog()).post(chunk("a"), MemoryLog())
    assert refused.value.permanent
    assert len(payer.starts("a")) == 1


def test_post_with_the_required_copies_is_reused(payer, log):
    first = payer.poster(log, copies=2).post(chunk("a"), log)
    assert payer.poster(log, copies=3, required_copies=2).post(chunk("a"), log) == first


def test_post_missing_from_the_chain_does_not_count(payer, log):
    log.start_of = lambda account, chunk: 1  # the start of a deleted post
    assert payer.poster(log).post(chunk("a"), log).start == payer.starts("a")[0] != 1


@pytest.mark.thorough
def test_damaged_chunk_without_a_post_is_posted_again(payer, ledger, network):
    (name,) = in_posting(ledger, 1)
    log = ledger.transactions(this_process("run-1"))
    poster = payer.poster(log)
    sealed = chunk(
        name,
        merkle_root=ledger.chunks.get(name).merkle_root,
        stored_size_bytes=ledger.chunks.get(name).stored_size_bytes,
    )
    first = poster.post(sealed, log)
    with ledger.leases.hold(f"chunk/{name}", this_process("run-1")) as lease:
        ledger.moves.record_posting(lease, name, first)
        ledger.moves.move(lease, name, ChunkState.POSTED, ChunkState.UPLOADING)
        ledger.replicas.record_verified(lease, name, [Copy("provider", "proof")])
        ledger.moves.load_locations(lease, name)
        ledger.moves.move(
            lease, name, ChunkState.LOCATED, ChunkState.DAMAGED, reason="a copy is gone"
        )
    assert poster.post(sealed, log) == first  # while the chain has it
    payer.delete(first)
    again = poster.post(sealed, log)
    assert again.start > first.start
    assert payer.charged() == COPIES * sealed.stored_size_bytes


# --- batches ---


def test_posts_that_wait_together_go_in_one_transaction(payer, log):
    for name in "bcd":
        ask(log, payer, name)
    poster = payer.poster(log)
    posting = poster.post(chunk("a"), log)
    assert [payer.starts(name) for name in "abcd"] == [[posting.start]] * 4
    assert [log.start_of(payer.account, name) for name in "bcd"] == [posting.start] * 3
    assert poster.post(chunk("c"), log).start == posting.start
    assert payer.transactions() == 1
    assert payer.charged() == 4 * CHARGED


def test_transaction_has_eight_posts_including_our_own(payer, log):
    names = [f"w{number}" for number in range(10)]
    for name in names:
        ask(log, payer, name)
    payer.poster(log).post(chunk("last"), log)
    assert len(payer.starts("last")) == 1
    assert [len(payer.starts(name)) for name in names] == [1] * 7 + [0] * 3


def test_post_too_large_for_the_batch_keeps_waiting(payer, log, network):
    network.grant(payer.address, 3 * CHARGED)
    ask(log, payer, "large", size_bytes=2 * SIZE + 1)
    ask(log, payer, "small")
    payer.poster(log).post(chunk("a"), log)
    assert [len(payer.starts(name)) for name in ("a", "small", "large")] == [1, 1, 0]
    assert [post.chunk for post in log.waiting(payer.account)] == ["large"]


def test_queued_root_on_the_chain_is_not_posted_again(payer, log):
    others = MemoryLog()
    payer.poster(others).post(chunk("b"), others)
    ask(log, payer, "b")
    payer.poster(log).post(chunk("a"), log)
    assert [len(payer.starts(name)) for name in "ab"] == [1, 1]


def test_post_goes_alone_after_a_failed_batch(payer, log):
    ask(log, payer, "bad", note="{")
    posting = payer.poster(log).post(chunk("a"), log)
    assert payer.starts("a") == [posting.start]
    assert outcomes(log) == ["failed", "included"]
    assert payer.charged() == CHARGED


def test_chunk_withdrawn_during_signing_does_not_block_our_post(payer, ledger):
    mine, withdrawn = in_posting(ledger, 2)
    log = ledger.transactions(this_process("run-1"))
    ask(log, payer, withdrawn)

    def withdraw():
        with ledger.leases.hold(f"chunk/{withdrawn}", this_process("run-2")) as lease:
            ledger.moves.move(lease, withdrawn, ChunkState.POSTING, ChunkState.WITHDRAWN)

    then(log, "commit", withdraw, before=True)
    payer.poster(log).post(chunk(mine), log)
    assert [len(payer.starts(name)) for name in (mine, withdrawn)] == [1, 0]


def test_threads_that_share_a_wallet_pay_for_each_root_once(payer, log, threads):
    names = [f"t{number}" for number in range(12)]
    chain = payer.chain(log)
    with log.lease(payer.account):
        posting = [
            threads.submit(payer.poster(log, chain=chain).post, chunk(name), log) for name in names
        ]
        while len(log.waiting(payer.account)) < len(names):
            time.sleep(0.01)
    starts = [future.result(PATIENCE_SECONDS).start for future in posting]
    assert [payer.starts(name) for name in names] == [[start] for start in starts]
    assert payer.charged() == 12 * CHARGED
    assert payer.transactions() == 2


def test_a_run_waits_while_another_has_the_sequence(payer, log, threads):
    with log.lease(payer.account):
        waiting = threads.submit(payer.poster(log).post, chunk("a"), log)
        payer.network.advance(3)
        assert payer.starts("a") == []
    assert [waiting.result(PATIENCE_SECONDS).start] == payer.starts("a")


# --- refusals ---


def refused(error, poster, log, payer, name="a"):
    with pytest.raises(error) as raised:
        poster.post(chunk(name), log)
    assert raised.value.permanent
    assert raised.value.hint
    assert payer.starts(name) == []
    return str(raised.value)


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (lambda network, payer: network.expire(payer), PlanExpired, "ended on"),
        (
            lambda network, payer: network.grant(payer, CHARGED - 1),
            PlanTooSmall,
            f"need {CHARGED} bytes, {CHARGED - 1} are free",
        ),
    ],
)
def test_without_a_sufficient_plan_nothing_is_signed(payer, log, spoil, error, words):
    spoil(payer.network, payer.address)
    message = refused(error, payer.poster(log), log, payer)
    assert all(word in message for word in words.split(", "))
    assert log.entries == []


def test_without_a_plan_nothing_is_signed(network, stack, log):
    payer = Payer.new(network, stack, space=0)
    assert payer.address in refused(NoStoragePlan, payer.poster(log), log, payer)
    assert log.entries == []


def test_a_wallet_without_coins_is_empty(network, stack, log):
    payer = Payer.new(network, stack, coins=0)
    assert "0 ujkl" in refused(EmptyWallet, payer.poster(log), log, payer)
    network.fund(payer.address, 1)
    assert "1 ujkl" in refused(EmptyWallet, payer.poster(log), log, payer)
    assert log.entries == []


def test_the_spend_cap_is_kept_with_its_numbers(payer, log):
    payer.poster(log).post(chunk("a"), log)
    spent = log.spent(payer.account)
    message = refused(SpendCapReached, payer.poster(log, cap=spent + 5), log, payer, "b")
    assert all(f"{number:,} ujkl" in message for number in (spent, spent + 5, 2 * spent))
    payer.poster(log, cap=2 * spent).post(chunk("b"), log)
    assert 10**9 - payer.balance() == 2 * spent


def test_too_low_fee_names_gas_price_and_recovers(payer, log):
    cheap = payer.poster(log, gas_price=0.0001, timeout_blocks=5)
    with pytest.raises(TransactionRefused, match="insufficient fees") as raised:
        cheap.post(chunk("a"), log)
    assert raised.value.code == 13
    assert "gas_price" in raised.value.hint
    assert payer.poster(log).post(chunk("a"), log).start == payer.starts("a")[0]
    assert outcomes(log) == ["expired", "included"]
    assert payer.charged() == CHARGED


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda payer: payer.network.expire(payer.address), PlanExpired),
        (lambda payer: payer.network.grant(payer.address, CHARGED - 1), PlanTooSmall),
    ],
)
def test_plan_changed_after_its_check_is_reported_by_code(payer, log, spoil, error):
    then(log, "commit", lambda: spoil(payer))
    refused(error, payer.poster(log), log, payer)
    assert outcomes(log) == ["failed"]


def test_note_without_json_is_refused_by_code(payer, log, monkeypatch):
    monkeypatch.setattr(posting_module, "archive_note", lambda *_: "{")
    with pytest.raises(TransactionRefused, match="not valid json") as raised:
        payer.poster(log).post(chunk("a"), log)
    assert raised.value.code == 17
    assert payer.starts("a") == []


@pytest.mark.parametrize(
    ("code", "error"), [(22, NoStoragePlan), (4, PlanTooSmall), (5, EmptyWallet), (9, EmptyWallet)]
)
def test_a_code_of_the_chain_has_its_error(code, error):
    assert type(posting_module._failure(code, "sdk", "told")) is error


def test_coins_spent_after_the_check_are_reported_by_code(network, stack, log):
    payer = Payer.new(network, stack, coins=5_000)
    then(log, "commit", lambda: network.fund(payer.address, -4_999))
    assert "smaller than" in refused(EmptyWallet, payer.poster(log), log, payer)


def test_out_of_gas_is_signed_again_with_more(payer, log, monkeypatch):
    monkeypatch.setattr(posting_module, "GAS_BASE", 100)
    monkeypatch.setattr(posting_module, "GAS_POST", 50_000)
    posting = payer.poster(log).post(chunk("a"), log)
    assert payer.starts("a") == [posting.start]
    assert outcomes(log) == ["failed", "included"]


# --- failures on the way ---


@pytest.mark.parametrize(
    "conduct",
    [
        {"swallow_broadcast": True},
        {"cut_broadcast": "accept"},
        {"cut_broadcast": "drop"},
        {"mempool_full": True},
    ],
)
def test_broadcast_that_may_be_lost_is_sent_again(payer, log, network, threads, conduct):
    network.misbehave(**conduct)
    broadcasts = network.state()["broadcasts"]
    posting = threads.submit(payer.poster(log).post, chunk("a"), log)
    network.wait_for(lambda state: state["broadcasts"] > broadcasts + 1)
    network.well_behaved()
    assert [posting.result(PATIENCE_SECONDS).start] == payer.starts("a")
    assert (outcomes(log), payer.transactions()) == (["included"], 1)


def test_node_with_a_lost_mempool_gets_the_same_bytes(payer, log, network):
    network.misbehave(halted=True, forget_mempool=True)

    def restart():
        assert len(network.state()["mempool"]) == 1
        network.kill()
        network.start()
        assert network.state()["mempool"] == []
        network.well_behaved()

    chain = payer.chain(log, attempts=20)
    then(chain, "broadcast", restart)
    posting = payer.poster(log, chain=chain).post(chunk("a"), log)
    assert payer.starts("a") == [posting.start]
    assert (outcomes(log), payer.transactions()) == (["included"], 1)


def test_next_run_finds_a_late_inclusion(payer, log, network):
    network.misbehave(delay_inclusion=10)
    chain = payer.chain(log, attempts=1)

    def cut():
        network.misbehave(lcd=0, refuse=True)
        network.misbehave(lcd=1, refuse=True)

    then(chain, "broadcast", cut)
    with pytest.raises(ChainUnreachable) as unreachable:
        payer.poster(log, chain=chain).post(chunk("a"), log)
    assert not unreachable.value.permanent
    network.wait_for(lambda state: any(file["owner"] == payer.address for file in state["files"]))
    network.well_behaved()
    posting = payer.poster(log).post(chunk("a"), log)
    assert payer.starts("a") == [posting.start]
    assert (outcomes(log), payer.transactions()) == (["included"], 1)


def test_on_a_chain_that_stands_still_nothing_is_signed(payer, log, network, monkeypatch):
    monkeypatch.setattr(nodes_module, "HALTED_BLOCKS", 1)
    network.misbehave(halted=True)
    chain = payer.chain(log, attempts=1, halted_seconds=0.5)

    def ask_until_the_newest_block_is_old():
        while True:
            chain.height()

    with pytest.raises(ChainHalted):
        ask_until_the_newest_block_is_old()
    with pytest.raises(ChainHalted) as halted:
        payer.poster(log, chain=chain).post(chunk("a"), log)
    assert not halted.value.permanent
    assert log.entries == []
    network.well_behaved()
    assert [payer.poster(log).post(chunk("a"), log).start] == payer.starts("a")


def test_another_program_that_takes_the_sequence_is_signed_around(payer, log, network):
    def spend():
        network.spend_sequence(payer.address)
        network.advance(1)

    then(log, "commit", spend)
    posting = payer.poster(log).post(chunk("a"), log)
    assert payer.starts("a") == [posting.start]
    assert outcomes(log) == ["superseded", "included"]
    assert [entry.transaction.sequence for entry in log.entries] == [0, 1]
    assert payer.charged() == CHARGED


def test_sequence_taken_by_another_program_is_signed_again(payer, log, network):
    network.misbehave(halted=True)
    chain = payer.chain(log)

    def spend():
        network.spend_sequence(payer.address)
        network.well_behaved()

    then(chain, "broadcast", spend)
    posting = payer.poster(log, chain=chain).post(chunk("a"), log)
    assert payer.starts("a") == [posting.start]
    assert outcomes(log) == ["superseded", "included"]


def test_transaction_is_signed_again_only_after_its_timeout(payer, log, network, threads):
    network.misbehave(swallow_broadcast=True)
    chain = payer.chain(log)
    broadcasts = network.state()["broadcasts"]
    posting = threads.submit(payer.poster(log, chain=chain, timeout_blocks=5).post, chunk("a"), log)
    network.wait_for(lambda state: state["broadcasts"] > broadcasts)
    first = log.entries[0].transaction
    network.wait_for(lambda _: len(log.entries) > 1)
    assert chain.height() > first.timeout_height
    network.well_behaved()
    assert [posting.result(PATIENCE_SECONDS).start] == payer.starts("a")
    assert set(outcomes(log)) == {"expired", "included"}
    assert payer.charged() == CHARGED


def test_roots_on_the_chain_replace_a_missing_index(payer, log, network):
    for index in (0, 1):
        network.misbehave(lcd=index, index_off=True)
    ask(log, payer, "b")
    posting = payer.poster(log).post(chunk("a"), log)
    assert payer.starts("a") == payer.starts("b") == [posting.start]
    assert log.start_of(payer.account, "b") == posting.start
    assert (outcomes(log), payer.transactions()) == (["included"], 1)


def test_failed_transaction_without_an_index_ends(payer, log, network, monkeypatch):
    monkeypatch.setattr(posting_module, "archive_note", lambda *_: "{")
    monkeypatch.setattr(posting_module, "SIGNINGS", 2)
    for index in (0, 1):
        network.misbehave(lcd=index, index_off=True)
    with pytest.raises(StoreError, match=r"2 transactions of"):
        payer.poster(log).post(chunk("a"), log)
    assert payer.starts("a") == []
    assert payer.transactions() == 2


def test_a_node_that_lags_leads_to_no_second_payment(payer, log, network):
    payer.poster(log).post(chunk("a"), log)
    network.misbehave(lcd=0, lag=50)
    network.misbehave(lcd=1, lag=50)
    with pytest.raises(ChainBehind) as behind:
        payer.poster(log).post(chunk("a"), log)
    assert not behind.value.permanent
    network.misbehave(lcd=1, lag=0)
    assert [payer.poster(log).post(chunk("a"), log).start] == payer.starts("a")
    assert payer.transactions() == 1


def test_lagging_node_does_not_expire_a_pending_transaction(payer, log, network):
    chain = payer.chain(log, attempts=1)

    def fall_behind():
        network.wait_for(
            lambda state: any(file["owner"] == payer.address for file in state["files"])
        )
        log.see_height(network.chain_id, network.advance(20))
        network.misbehave(lcd=0, lag=15)
        network.misbehave(lcd=1, lag=15)

    then(chain, "broadcast", fall_behind)
    with pytest.raises(ChainBehind):
        payer.poster(log, chain=chain, timeout_blocks=5).post(chunk("a"), log)
    network.well_behaved()
    payer.poster(log).settle(log)
    assert outcomes(log) == ["included"]
    assert [payer.poster(log).post(chunk("a"), log).start] == payer.starts("a")


def test_process_without_its_lease_sends_only_committed_transactions(payer, log, network):
    chain = payer.chain(log)
    then(log, "commit", lambda: log.take_over(payer.account), before=True)
    broadcasts = network.state()["broadcasts"]
    with pytest.raises(LeaseLost):
        payer.poster(log, chain=chain).post(chunk("a"), log)
    assert network.state()["broadcasts"] == broadcasts
    then(chain, "broadcast", lambda: log.take_over(payer.account))
    with pytest.raises(LeaseLost):
        payer.poster(log, chain=chain).post(chunk("a"), log)
    assert [payer.poster(log).post(chunk("a"), log).start] == payer.starts("a")
    assert payer.transactions() == 1


def test_settling_raises_if_another_run_settles(payer, log):
    poster = payer.poster(log)
    with log.lease(payer.account), pytest.raises(HeldByOther):
        poster.settle(log)


# --- purchases ---


def test_a_purchase_is_paid_once_and_names_its_cost(network, stack, log):
    payer = Payer.new(network, stack, space=0)
    poster = payer.poster(log)
    purchase = poster.buy(3 * GB, 30, log)
    assert network.state()["plans"][payer.address]["space_bytes"] == 3 * GB
    assert 10**9 - payer.balance() == purchase.cost == log.spent(payer.account)
    assert not purchase.earlier
    poster.post(chunk("a"), log)
    assert payer.charged() == CHARGED


def test_purchase_during_a_plan_counts_the_amount_charged(network, stack, log):
    payer = Payer.new(network, stack, space=0)
    poster = payer.poster(log)
    poster.buy(3 * GB, 30, log)
    balance = payer.balance()
    second = poster.buy(4 * GB, 30, log)
    assert second.cost_told
    assert second.cost == balance - payer.balance() < poster._chain.price(30, 4 * GB)
    assert log.spent(payer.account) == 10**9 - payer.balance()
    assert log.at_list_price(payer.account) == 0


def test_spend_cap_applies_to_the_list_price(network, stack, log):
    payer = Payer.new(network, stack, space=0)
    spent = payer.poster(log).buy(3 * GB, 30, log).cost
    with pytest.raises(SpendCapReached):
        payer.poster(log, cap=spent + 90_000).buy(4 * GB, 30, log)
    assert log.spent(payer.account) == spent


def test_list_price_counts_if_the_charge_is_unknown(network, stack, log):
    payer = Payer.new(network, stack, space=0)
    payer.poster(log).buy(3 * GB, 30, log)
    for index in (0, 1):
        network.misbehave(lcd=index, index_off=True)
    second = payer.poster(log).buy(4 * GB, 30, log)
    assert not second.cost_told
    assert second.cost >= payer.chain(log).price(30, 4 * GB)
    assert log.spent(payer.account) > 10**9 - payer.balance()
    assert log.at_list_price(payer.account) == 1


def test_a_purchase_obeys_the_spend_cap_and_the_balance(network, stack, log):
    payer = Payer.new(network, stack, space=0, coins=10_000)
    with pytest.raises(SpendCapReached):
        payer.poster(log, cap=9_000).buy(3 * GB, 30, log)
    with pytest.raises(EmptyWallet, match="has 10,000 ujkl"):
        payer.poster(log).buy(3 * GB, 30, log)
    assert payer.balance() == 10_000


@pytest.mark.parametrize("index_off", [False, True])
def test_purchase_with_unknown_outcome_is_not_repeated(network, stack, log, index_off):
    payer = Payer.new(network, stack, space=0)
    chain = payer.chain(log, attempts=1)

    def cut():
        network.wait_for(lambda state: payer.address in state["plans"])
        for index in (0, 1):
            network.misbehave(lcd=index, refuse=True)

    then(chain, "broadcast", cut)
    with pytest.raises(StoreUnreachable):
        payer.poster(log, chain=chain).buy(3 * GB, 30, log)
    for index in (0, 1):
        network.misbehave(lcd=index, refuse=False, index_off=index_off)
    again = payer.poster(log).buy(3 * GB, 30, log)
    assert again.earlier
    assert again.hash == log.entries[0].transaction.hash
    assert 10**9 - payer.balance() == again.cost
    assert payer.transactions() == 1


def test_a_purchase_that_never_came_into_a_block_is_made(network, stack, log):
    payer = Payer.new(network, stack, space=0)
    chain = payer.chain(log, attempts=1)
    then(chain, "broadcast", lambda: payer.network.misbehave(lcd=0, refuse=True), before=True)
    then(log, "commit", lambda: payer.network.misbehave(lcd=1, refuse=True))
    with pytest.raises(StoreUnreachable):
        payer.poster(log, chain=chain, timeout_blocks=5).buy(3 * GB, 30, log)
    network.spend_sequence(payer.address)
    network.advance(1)
    network.well_behaved()
    assert not payer.poster(log).buy(3 * GB, 30, log).earlier
    assert outcomes(log) == ["superseded", "included"]


# --- processes ---


EVERY = 4
"""One kill per this many moments."""


@pytest.mark.thorough
def test_killed_at_any_moment_a_post_is_paid_once(payer, ledger, database_url):
    log = ledger.transactions(this_process("run-2"))
    for count, name in enumerate(in_posting(ledger, 40), 1):
        run = start_payment(payer, database_url, name, fatal=Fatal("", EVERY * count))
        status = run.wait()
        posting = payer.poster(log).post(chunk(name), log)
        assert payer.starts(name) == [posting.start], f"killed at moment {EVERY * count}"
        assert log.pending(payer.account) == []
        if status == 0:
            assert run.answer.result == posting.start
            break
        assert status == KILLED
    assert count > 5
    assert payer.charged() == count * CHARGED
    assert payer.transactions() == count


@pytest.mark.thorough
def test_killed_at_any_moment_a_purchase_is_paid_once(network, stack, ledger, database_url):
    log = ledger.transactions(this_process("run-2"))
    for count in itertools.count(1):
        payer = Payer.new(network, stack, space=0)
        status = start_payment(payer, database_url, buy=GB, fatal=Fatal("", EVERY * count)).wait()
        signed = log.spent(payer.account) > 0
        if signed and not log.pending(payer.account):  # the next call buys again
            break
        assert status == KILLED
        assert payer.poster(log).buy(GB, 30, log).earlier == signed
        assert 10**9 - payer.balance() == log.spent(payer.account)
        assert payer.transactions() == 1
    assert count > 5


@pytest.mark.thorough
def test_processes_sharing_a_wallet_pay_each_root_once(payer, ledger, database_url):
    names = in_posting(ledger, 4)
    log = ledger.transactions(this_process("run-1"))
    with log.lease(payer.account):  # until all posts wait
        runs = [start_payment(payer, database_url, name) for name in names]
        while len(log.waiting(payer.account)) < len(names):
            assert all(run.runs for run in runs)
            time.sleep(0.05)
    starts = [run.answer.result for run in runs]
    assert [payer.starts(name) for name in names] == [[start] for start in starts]
    assert payer.charged() == 4 * CHARGED
    assert payer.transactions() == 1


COMMIT = call(TransactionLog.commit)
BROADCAST = call(Chain.broadcast)


@pytest.mark.thorough
@pytest.mark.parametrize(("at", "moment"), [(COMMIT, 1), (COMMIT, 2), (BROADCAST, 2)])
def test_killed_leaseholder_is_followed_by_another_run(payer, ledger, database_url, at, moment):
    first, second = in_posting(ledger, 2)
    run = start_payment(payer, database_url, first, fatal=Fatal(at, moment))
    assert run.wait() == KILLED
    log = ledger.transactions(this_process("run-2"))
    posting = payer.poster(log).post(chunk(second), log)
    assert [payer.starts(name) for name in (first, second)] == [
        [log.start_of(payer.account, first)],
        [posting.start],
    ]
    assert payer.charged() == 2 * CHARGED
    assert log.pending(payer.account) == []


def test_the_messages_of_a_transaction_are_the_posts_in_order(payer, log):
    for name in "bc":
        ask(log, payer, name)
    payer.poster(log).post(chunk("a"), log)
    (entry,) = log.entries
    messages = transaction_messages(entry.transaction.body)
    assert entry.chunks == ("a", "b", "c")
    assert [posting_module._root_of(message.value) for message in messages] == [
        chunk(name).merkle_root for name in "abc"
    ]
    assert {message.type_url for message in messages} == {POST_FILE}


def test_no_thread_outlives_a_post(payer, log):
    before = threading.active_count()
    payer.poster(log).post(chunk("a"), log)
    assert threading.active_count() == before
