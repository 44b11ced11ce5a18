"""The store on Jackal over real sockets: the contract and its admission checks."""

import os
from contextlib import closing
from unittest.mock import Mock

import pytest

from caf_pipeline.errors import (
    ChainUnreachable,
    ChunkTooLarge,
    EmptyWallet,
    MnemonicRefused,
    NoStoragePlan,
    PlanExpired,
    PlanTooSmall,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.records import Copy, PostRecord
from caf_pipeline.settings import Settings
from caf_pipeline.store.jackal.posting import Poster
from caf_pipeline.store.jackal.read import open_jackal_reader
from caf_pipeline.store.jackal.upload import Uploads
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline.system.processes import this_process
from caf_pipeline.wiring import open_reader
from caf_pipeline_tests.contracts.chunk_store import (
    ChunkReaderContract,
    ChunkStoreContract,
    staged_file,
    to_store,
)
from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.support.jackal_command_line import new_wallet
from caf_pipeline_tests.support.jackal_network import ADDRESS, SPACE, jackal_settings
from caf_pipeline_tests.support.jackal_stores import open_jackal_store, open_store
from caf_pipeline_tests.support.memory_log import MemoryLog

TB = 10**12


@pytest.fixture
def log():
    return MemoryLog()


@pytest.fixture
def opened(network, log):
    network.grant(ADDRESS, SPACE)
    opened = open_store(network, log)
    yield opened
    opened.store.close()


@pytest.fixture
def store(opened):
    return opened.store


@pytest.fixture
def stranger(network):
    """A store with an empty wallet that no other test pays."""
    opened = open_store(network, words=new_wallet().words)
    yield opened.store
    opened.store.close()


class TestJackalStore(ChunkStoreContract):
    """Passes the contract."""


class TestJackalReader(ChunkReaderContract):
    """Passes the contract of readers."""

    @pytest.fixture
    def reader(self, opened):
        with closing(
            open_jackal_reader(opened.store.settings, opened.log.seen_height, opened.records.all)
        ) as reader:
            yield reader


def admit(store, size_bytes=1000, *, waiting_bytes=0):
    store.admit(stored_size_bytes=size_bytes, waiting_bytes=waiting_bytes)


# --- admission ---


def test_wallet_without_space_gets_the_purchase_command(stranger):
    with pytest.raises(NoStoragePlan) as raised:
        admit(stranger, 1000, waiting_bytes=500)
    assert not isinstance(raised.value, PlanExpired)
    assert "4.4 KiB are needed" in str(raised.value)


def test_space_that_has_ended_admits_nothing(opened):
    opened.network.expire(ADDRESS)
    with pytest.raises(PlanExpired):
        admit(opened.store)


@pytest.mark.parametrize("clock_days", [40, -40])
def test_times_are_by_the_clock_of_the_chain(tmp_path, log, clock_days):
    options = {"fund": {ADDRESS: 10**12}, "space": {ADDRESS: 10**12}}
    with (
        LoopbackNetwork(
            tmp_path / "network", block_seconds=0.1, clock_days=clock_days, **options
        ) as elsewhere,
        closing(open_store(elsewhere, log).store) as store,
    ):
        posting = store.post(
            to_store(store, path := staged_file(tmp_path, os.urandom(300_000))), log
        )
        store.put(posting, path, lambda _: None)
        elsewhere.wait_for(lambda _: all(copy.verified for copy in store.copies(posting)))
        assert len(store.copies(posting)) == 3
        elsewhere.expire(ADDRESS)
        with pytest.raises(PlanExpired):
            admit(store)


def test_plan_must_fit_all_copies_of_waiting_chunks(opened):
    used = opened.store.chain.plan(ADDRESS).used_bytes
    opened.network.grant(ADDRESS, used + 3 * 10_000)
    admit(opened.store, 6000, waiting_bytes=4000)
    with pytest.raises(PlanTooSmall, match=r"need 29\.3 KiB"):
        admit(opened.store, 6001, waiting_bytes=4000)


def test_a_wallet_that_cannot_pay_a_fee_is_empty(network, stranger):
    network.grant(stranger.wallet.address, 10**9)
    with pytest.raises(EmptyWallet):
        admit(stranger)


def test_chunk_too_large_for_enough_providers_is_not_admitted(opened):
    for provider, rate in zip(
        opened.network.provider_addresses, (100.0, 200.0, 50.0), strict=False
    ):
        opened.records.set(provider, upload_rate=rate)
    assert opened.store.largest_chunk_bytes() == 50 * 60 * 0.9
    admit(opened.store, 2700)
    with pytest.raises(ChunkTooLarge) as raised:
        admit(opened.store, 2701)
    assert raised.value.fitting_bytes == 2700


def test_largest_chunk_needs_enough_measured_providers(opened):
    opened.records.set(opened.network.provider_addresses[0], upload_rate=1.0)
    assert opened.store.largest_chunk_bytes() is None


def test_fewer_required_copies_need_fewer_measured_providers(network):
    opened = open_store(network, required_copies=1)
    opened.records.set(network.provider_addresses[0], upload_rate=1000.0)
    opened.records.set(network.provider_addresses[1], upload_rate=10.0)
    assert opened.store.largest_chunk_bytes() == 1000 * 60 * 0.9
    opened.store.close()


def test_unreachable_chain_does_not_mean_a_missing_plan(opened):
    for lcd in range(2):
        opened.network.misbehave(lcd=lcd, refuse=True)
    with pytest.raises(StoreUnreachable):
        admit(opened.store)


# --- prices and windows ---


@pytest.mark.parametrize(
    ("size_bytes", "days", "usd", "ujkl"),
    [
        (10 * TB, 0, 150, 750_000_000),
        (10 * TB, 60, 300, 1_500_000_000),
        (1, 30, 0.005, 25_000),  # of a GB, the least that is sold
        (0, 30, 0, 0),
    ],
)
def test_space_costs_coins_and_at_most_the_list_price(store, size_bytes, days, usd, ujkl):
    cost = store.cost(size_bytes, 0, days)
    assert (cost.list_usd, cost.price_ujkl) == (pytest.approx(usd), ujkl)


@pytest.mark.parametrize("answer", [Mock(return_value=0), Mock(side_effect=ChainUnreachable("?"))])
def test_cost_in_dollars_is_unknown_without_a_list_price(store, monkeypatch, answer):
    monkeypatch.setattr(store.chain, "list_price", answer)
    cost = store.cost(TB, 0)
    assert (cost.list_usd, cost.price_ujkl) == (None, 75_000_000)


def test_chunk_stays_staged_for_the_configured_windows(network, store):
    seconds = store.chain.block_seconds()
    assert store.staging_hold_seconds() == pytest.approx(2 * 100 * seconds, rel=0.5)
    opened = open_store(network, keep_staged_windows=0)
    assert opened.store.staging_hold_seconds() == 0
    opened.store.close()


def test_proof_windows_are_counted_from_the_post(store):
    posting = PostRecord(b"\1" * 32, "o", 1000, 5)
    windows = [
        store.proof_window(posting, Copy("p", "", height))
        for height in (1000, 1099, 1100, 1350, None)
    ]
    assert windows == [0, 0, 1, 3, None]


def test_the_window_of_a_file_is_asked_for_once(opened, tmp_path, monkeypatch):
    posting = opened.stored(staged_file(tmp_path, os.urandom(5000)))
    queries, ask = [], opened.store.chain.file
    monkeypatch.setattr(
        opened.store.chain, "file", lambda *which: queries.append(which) or ask(*which)
    )
    copies = opened.store.copies(posting)
    windows = {opened.store.proof_window(posting, copy) for copy in copies}
    assert windows | {opened.store.current_window(posting)} == {0}
    assert opened.store.window_ends_in(posting) > 0
    assert len(queries) == 2  # for the copies, and for the window


def test_a_window_at_a_known_height_needs_no_query(opened, tmp_path, monkeypatch):
    posting = opened.stored(staged_file(tmp_path, os.urandom(5000)))
    height = opened.store.listed_at()
    assert opened.store.window_ends_in(posting, height) > 0
    monkeypatch.setattr(opened.store.chain, "height", Mock(side_effect=AssertionError))
    assert opened.store.current_window(posting, height) == 0
    assert opened.store.window_ends_in(posting, height) > 0


def test_copies_tell_when_they_were_last_proven(opened, tmp_path):
    posting = opened.stored(staged_file(tmp_path, os.urandom(5000)))
    assert all(copy.last_proven >= posting.start for copy in opened.store.copies(posting))


def test_neither_the_store_nor_its_errors_show_the_mnemonic(opened, stranger):
    shown = (
        f"{opened.store!r} {vars(opened.store)!r} {opened.store.settings!r} {opened.store.wallet!r}"
    )
    with pytest.raises(StoreError) as raised:
        admit(stranger)
    assert "abandon" not in shown
    assert "winner" not in f"{raised.value!r} {raised.value.hint}"


# --- opened by the pipeline ---


def opened_by_settings(network, ledger, **changes):
    jackal = jackal_settings(network, **changes)
    return open_jackal_store(Settings(jackal=jackal), ledger, this_process("run-1"))


def test_store_is_opened_with_its_ledger(network, ledger):
    network.grant(ADDRESS, SPACE)
    store = opened_by_settings(network, ledger)
    admit(store)
    assert ledger.transactions(this_process("run-2")).seen_height(network.chain_id) > 0
    assert (store.name, store.required_copies, store.proof_type, store.wallet.address) == (
        "jackal",
        3,
        3,
        ADDRESS,
    )
    store.close()


@pytest.mark.parametrize("part", [Wallet, Poster, Uploads])
def test_reader_builds_no_paying_or_sending_parts(ledger, opened, tmp_path, monkeypatch, part):
    posting = opened.stored(staged_file(tmp_path, b"x" * 1000))
    monkeypatch.setattr(
        part, "__init__", lambda *_, **__: pytest.fail(f"a {part.__name__} was made")
    )
    settings = Settings(store={"kind": "jackal"}, jackal=opened.store.settings)
    with closing(open_reader(settings, ledger.lookup)) as reader:
        assert b"".join(reader.read(posting, 0, 1000)) == b"x" * 1000


def test_without_a_wallet_it_reads_and_admits_nothing(network, ledger, monkeypatch):
    monkeypatch.delenv("JACKAL_MNEMONIC", raising=False)
    store = opened_by_settings(network, ledger, mnemonic=None)
    assert store.holders(PostRecord(b"\1" * 32, ADDRESS, 1, 10)) == []
    with pytest.raises(MnemonicRefused):
        admit(store)
    store.close()
