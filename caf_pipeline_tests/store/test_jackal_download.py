"""Stored bytes from their providers, on the loopback network."""

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest

from caf_pipeline.errors import IntegrityError, StoredChunkMissing, StoreUnreachable
from caf_pipeline.store.jackal import provider
from caf_pipeline.store.jackal.names import root_in_path
from caf_pipeline_tests.support.jackal_stores import open_store, store_once
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.scripted_lcd import NOT_FOUND, ScriptedAnswer, ScriptedLcd

MIB = 1 << 20
DATA = os.urandom(3 * MIB)
SIZE = len(DATA)


@pytest.fixture(scope="module")
def kept(network, tmp_path_factory):
    """A file with copies at three of the four providers: its posting, and their sorted numbers."""
    path = tmp_path_factory.mktemp("reading") / "chunk.caf"
    path.write_bytes(DATA)
    return store_once(network, path)


@pytest.fixture
def opened(network):
    opened = open_store(network)
    yield opened
    opened.store.close()


def read(opened, posting, start=0, end=SIZE, **options):
    return b"".join(opened.store.read(posting, start, end, **options))


def rank(opened, numbers):
    """Record measured rates, the fastest first."""
    for place, number in enumerate(numbers):
        opened.records.set(
            opened.network.provider_addresses[number], download_rate=1e9 / (place + 1)
        )


def providers_used(opened, before):
    return {number for number, count in opened.downloads().items() if count > before[number]}


def chain_away(network):
    for lcd in range(2):
        network.misbehave(lcd=lcd, refuse=True)


def test_the_fastest_holder_is_asked(opened, kept):
    posting, (first, second, third) = kept
    rank(opened, (second, third, first))
    before = opened.downloads()
    assert read(opened, posting, 5, 500_000) == DATA[5:500_000]
    assert providers_used(opened, before) == {second}


def test_recently_failed_holders_come_last(opened, kept):
    posting, (first, second, third) = kept
    rank(opened, (first, second, third))
    opened.records.failed(opened.network.provider_addresses[first])
    addresses = opened.network.provider_addresses
    assert opened.store.holders(posting) == [addresses[number] for number in (second, third, first)]


def test_file_and_providers_are_requested_side_by_side(kept):
    posting, _ = kept
    both_requested = Barrier(2, timeout=PATIENCE_SECONDS)

    def once_both_requested(answer):
        return lambda _: both_requested.wait() is not None and answer

    path = f"files/{root_in_path(posting.merkle_root)}/{posting.owner}/{posting.start}"
    with ScriptedLcd() as node:
        node.answers[path] = once_both_requested(NOT_FOUND)
        node.answers[f"files/merkle/{root_in_path(posting.merkle_root)}"] = NOT_FOUND
        node.answers["providers"] = once_both_requested(ScriptedAnswer({"providers": []}))
        opened = open_store(SimpleNamespace(lcds=[node.url], chain_id=node.chain_id))
        assert not opened.store.holders(posting)
        assert node.asked.count("providers") == 1
        opened.store.close()


@pytest.mark.parametrize(
    "conduct", [{"refuse": True}, {"fail": 500}, {"nonsense": "html"}, {"nonsense": "short"}]
)
def test_next_holder_is_used_after_a_failure(opened, kept, network, conduct):
    posting, (first, second, third) = kept
    rank(opened, (first, second, third))
    network.misbehave(provider=first, **conduct)
    assert read(opened, posting, 10, 1_500_000) == DATA[10:1_500_000]
    assert opened.records.all()[network.provider_addresses[first]].failures == 1


@pytest.mark.parametrize(
    "direct_from_bytes", [1, provider.DIRECT_FROM_BYTES], ids=["past httpcore", "by httpcore"]
)
def test_cut_download_resumes_at_the_same_provider(
    opened, kept, network, monkeypatch, direct_from_bytes
):
    monkeypatch.setattr(provider, "DIRECT_FROM_BYTES", direct_from_bytes)
    posting, (first, second, third) = kept
    rank(opened, (first, second, third))
    network.misbehave(provider=first, cut_download_after=700_000)
    before = opened.downloads()
    assert read(opened, posting) == DATA
    assert providers_used(opened, before) == {first}


def test_next_holder_continues_a_broken_read(opened, kept, network):
    posting, (first, second, third) = kept
    rank(opened, (first, second, third))
    network.misbehave(provider=first, cut_download_after=MIB)
    pieces = opened.store.read(posting, 0, len(DATA))
    taken = [next(pieces)]
    network.misbehave(provider=first, fail=503)
    before = opened.downloads()
    assert b"".join([*taken, *pieces]) == DATA
    assert providers_used(opened, before) == {second}


def test_a_read_from_one_provider_asks_no_other(opened, kept, network):
    posting, (first, second, _) = kept
    network.misbehave(provider=first, fail=503)
    with pytest.raises(StoreUnreachable):
        read(opened, posting, provider=network.provider_addresses[first])
    assert read(opened, posting, provider=network.provider_addresses[second]) == DATA


def test_provider_without_the_file_reports_it_missing(opened, kept, network):
    posting, holders = kept
    (other,) = set(range(4)) - set(holders)
    with pytest.raises(StoredChunkMissing):
        read(opened, posting, provider=network.provider_addresses[other])


def test_unlisted_provider_is_not_contacted(opened, kept):
    with pytest.raises(StoreUnreachable, match="no usable address"):
        read(opened, kept[0], provider="jkl1nobody")


@pytest.mark.thorough
def test_all_away_is_not_all_missing(opened, kept, network):
    for number in range(4):
        network.misbehave(provider=number, refuse=True)
    with pytest.raises(StoreUnreachable):
        read(opened, kept[0])


def test_a_file_that_all_holders_lost_is_missing(opened, network, tmp_path):
    path = tmp_path / "chunk.caf"
    path.write_bytes(os.urandom(1000))
    posting = opened.stored(path)
    for number in opened.providers_of(posting):
        network.delete_blob(number, posting.merkle_root)
    with pytest.raises(StoredChunkMissing):
        read(opened, posting, 0, 1000)


def test_past_the_end_nothing_is_asked(opened, kept):
    before = opened.downloads()
    with pytest.raises(IntegrityError):
        read(opened, kept[0], 0, len(DATA) + 1)
    assert not providers_used(opened, before)


def test_known_file_is_readable_while_the_chain_is_away(opened, kept, network):
    posting, _ = kept
    read(opened, posting, 0, 10)
    chain_away(network)
    assert read(opened, posting) == DATA


def test_file_without_known_holders_is_read_from_any_provider(opened, kept, network):
    posting, _ = kept
    opened.store._selection.listed()
    chain_away(network)
    assert read(opened, posting) == DATA


def test_with_nothing_known_a_chain_that_is_away_is_unreachable(opened, kept, network):
    chain_away(network)
    with pytest.raises(StoreUnreachable):
        read(opened, kept[0])


def test_rates_of_long_reads_are_kept(opened, network, tmp_path):
    path = tmp_path / "chunk.caf"
    path.write_bytes(os.urandom(5 * MIB))
    posting = opened.stored(path)
    read(opened, posting, 0, 5 * MIB)
    read(opened, posting, 0, 100)
    assert sum(record.download_rate is not None for record in opened.records.all().values()) == 1


def test_many_threads_read_at_once(opened, kept):
    posting, _ = kept
    with ThreadPoolExecutor(8) as pool:
        starts = range(0, 2 * MIB, 50_000)
        pieces = list(pool.map(lambda start: read(opened, posting, start, start + 1000), starts))
    assert pieces == [DATA[start : start + 1000] for start in starts]
