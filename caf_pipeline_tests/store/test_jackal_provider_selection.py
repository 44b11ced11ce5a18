"""The order in which providers are used."""

import random
from datetime import UTC, datetime, timedelta

import pytest

from caf_pipeline.errors import ChainUnreachable, NoStoragePlan
from caf_pipeline.store.jackal.answers import Provider
from caf_pipeline.store.jackal.provider_selection import ProviderSelection
from caf_pipeline_tests.support.jackal_stores import MemoryRecords


class Lists:
    """A chain with the given lists."""

    def __init__(self, *providers, active=()):
        self.everyone, self.active, self.fault, self.looks = list(providers), set(active), None, 0

    def providers(self):
        self.looks += 1
        if self.fault:
            raise self.fault
        return self.everyone

    def active_providers(self):
        self.providers()
        return self.active


def provider(address, url="", total_bytes=0):
    return Provider(address, url or f"https://{address}.{address}-example", total_bytes)


def selection(*providers, active=(), seed=1, **rates):
    records = MemoryRecords()
    for address, rate in rates.items():
        records.set(address, upload_rate=rate, download_rate=rate)
    return ProviderSelection(
        Lists(*providers, active=active), records, chance=random.Random(seed)
    ), records


def test_fast_providers_come_first():
    providers, _ = selection(*map(provider, "abc"), a=1.0, b=3.0, c=2.0)
    assert list(providers.to_upload(1)) == ["b", "c", "a"]
    assert list(providers.to_read("abc")) == ["b", "c", "a"]


def test_unmeasured_provider_sometimes_comes_first():
    first = [
        selection(*map(provider, "ab"), seed=seed, a=5.0)[0].to_upload(1)[0] for seed in range(200)
    ]
    assert 0 < first.count("b") < first.count("a")


def test_recently_failed_providers_come_last_for_a_while():
    providers, records = selection(*map(provider, "abc"), a=3.0, b=2.0, c=1.0)
    records.failed("a")
    assert list(providers.to_upload(1)) == ["b", "c", "a"]
    records.set("a", failed_at=datetime.now(UTC) - timedelta(hours=2))
    assert list(providers.to_upload(1)) == ["a", "b", "c"]


def test_active_providers_come_first_and_others_follow():
    providers, _ = selection(*map(provider, "abc"), active="c", a=3.0, b=2.0, c=1.0)
    assert list(providers.to_upload(1)) == ["c", "a", "b"]


def test_hosts_are_spread_before_one_is_taken_twice():
    same = [
        provider(address, f"http://10.0.0.1:{port}") for port, address in enumerate("abc", 3333)
    ]
    providers, _ = selection(
        *same, provider("d", "http://10.9.9.9:3333"), a=9.0, b=8.0, c=7.0, d=1.0
    )
    assert list(providers.to_upload(1)) == ["a", "d", "b", "c"]


def test_hosts_of_one_operator_come_after_those_of_others():
    providers, _ = selection(
        provider("a", "https://one.big.example"),
        provider("b", "https://two.big.example"),
        provider("c", "https://small.other"),
        a=9.0,
        b=8.0,
        c=1.0,
    )
    assert list(providers.to_upload(1)) == ["a", "c", "b"]


def test_hosts_that_have_the_file_already_are_avoided():
    providers, _ = selection(
        provider("a", "http://10.0.0.1:1"),
        provider("b", "http://10.0.0.1:2"),
        provider("c", "http://10.2.0.1"),
        b=9.0,
        c=1.0,
    )
    assert list(providers.to_upload(1, after=["a"])) == ["c", "b"]


def test_those_that_are_smaller_than_the_file_are_left_out():
    providers, _ = selection(
        provider("a", total_bytes=99), provider("b", total_bytes=100), provider("c")
    )
    assert set(providers.to_upload(100)) == {"b", "c"}


def test_slowest_required_copy_limits_the_size():
    providers, _ = selection(a=100.0, b=50.0, c=10.0)
    assert [providers.fitting_bytes(copies, 10) for copies in (1, 2, 3, 4)] == [900, 450, 90, None]


def test_invalid_address_has_no_client():
    providers, _ = selection(provider("a", "ftp://a.example"), provider("b"))
    assert providers.client("a") is None
    assert providers.client("nobody") is None
    assert providers.client("b").url == "https://b.b-example"
    assert providers.client("b") is providers.client("b")


def test_the_list_is_kept_while_the_chain_is_away():
    providers, _ = selection(*map(provider, "ab"))
    providers.listed()
    providers._chain.fault = ChainUnreachable("away")
    assert set(providers.listed(fresh=True)) == {"a", "b"}
    assert set(providers.to_upload(1)) == {"a", "b"}


def test_missing_provider_list_or_permanent_fault_raises():
    providers, _ = selection(*map(provider, "ab"))
    providers._chain.fault = ChainUnreachable("away")
    with pytest.raises(ChainUnreachable):
        providers.listed()
    providers._chain.fault = None
    providers.listed()
    providers._chain.fault = NoStoragePlan("for good")
    with pytest.raises(NoStoragePlan):
        providers.listed(fresh=True)


def test_provider_list_is_cached_and_active_ones_only_uploaded():
    providers, _ = selection(*map(provider, "ab"))
    for _ in range(5):
        providers.client("a")
    assert providers._chain.looks == 1
    providers.to_upload(1)
    assert providers._chain.looks == 3
