"""The providers on the chain, and the order in which to use them."""

import ipaddress
import random
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from datetime import UTC, datetime, timedelta
from typing import Final

from caf_pipeline.errors import CafError, StoreError
from caf_pipeline.records import ProviderRecords
from caf_pipeline.store.jackal.answers import Provider
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.provider import ProviderClient
from caf_pipeline.store.jackal.provider_http import parse_address

LIST_SECONDS: Final = 300.0
"""Maximum age of the list of providers. Providers change their URL every few months."""

REST_AFTER_FAILURE: Final = timedelta(hours=1)
"""How long a failed provider comes after the others."""

UNMEASURED_UP_TO: Final = 1.2
"""Unmeasured providers get a random rate up to this multiple of the best, to be measured."""

RATE_MARGIN: Final = 0.9
"""The usable part of a measured rate within a provider's time limit."""


class ProviderSelection:
    """The providers and their clients. Safe for several threads."""

    def __init__(
        self,
        chain: Chain,
        records: ProviderRecords,
        *,
        chance: random.Random | None = None,
        allow_private_addresses: bool = False,
    ) -> None:
        self._chain = chain
        self._allow_private_addresses = allow_private_addresses
        self._records = records
        self._chance = chance or random.Random()
        self._lock = threading.Lock()  # of the clients
        self._listing = threading.Lock()  # `close` must not wait for a silent chain
        self._clients: dict[str, ProviderClient] = {}
        self._listed: dict[str, Provider] = {}
        self._active: Set[str] = frozenset()
        self._listed_at = 0.0

    def close(self) -> None:
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def client(self, address: str) -> ProviderClient | None:
        """None if the chain lists no usable URL for the provider."""
        listed = self.listed()
        if address not in listed:
            listed = self.listed(fresh=True)
        provider = listed.get(address)
        if provider is None:
            return None
        with self._lock:
            client = self._clients.get(address)
            if client is None or client.url != provider.url:
                try:
                    client = ProviderClient(
                        provider.url, may_be_private=self._allow_private_addresses
                    )
                except StoreError:
                    return None
                self._clients[address] = client
            return client

    def listed(self, *, fresh: bool = False) -> Mapping[str, Provider]:
        """By address. Uses the last list while no node answers."""
        with self._listing:
            if self._listed and not fresh and time.monotonic() - self._listed_at < LIST_SECONDS:
                return self._listed
            try:
                providers = self._chain.providers()
            except CafError as error:
                if error.permanent or not self._listed:
                    raise
                return self._listed
            self._listed = {provider.address: provider for provider in providers}
            self._listed_at = time.monotonic()
            return self._listed

    def to_upload(self, size_bytes: int, *, after: Collection[str] = ()) -> Sequence[str]:
        """Return the providers to upload to: active and fast ones first, spread over hosts.

        Leaves out providers with less total space than `size_bytes`, unless they registered 0.
        Leaves out the providers in `after`, and avoids their hosts.
        """
        try:
            self._active = self._chain.active_providers()
        except CafError as error:
            if error.permanent or not self._listed:
                raise
        listed = self.listed(fresh=True)
        large_enough = {
            address: provider
            for address, provider in listed.items()
            if address not in after
            and (not provider.total_bytes or provider.total_bytes >= size_bytes)
        }
        ranks = self._ranks("upload_rate", large_enough)
        used = [listed[address].url for address in after if address in listed]
        ordered: list[str] = []
        # Active providers alone would keep newcomers of a young chain out, so the others follow.
        for group in (large_enough.keys() & self._active, large_enough.keys() - self._active):
            ordered += _spread(
                {
                    address: large_enough[address].url
                    for address in sorted(group, key=ranks.__getitem__)
                },
                used,
            )
        return ordered

    def to_read(self, holders: Iterable[str]) -> Sequence[str]:
        """The fastest first, recently failed ones last."""
        ranks = self._ranks("download_rate", holders)
        return sorted(ranks, key=ranks.__getitem__)

    def fitting_bytes(self, copies: int, seconds: float) -> int | None:
        """None if too few providers were measured for so many copies."""
        rates = sorted(
            (record.upload_rate for record in self._records.all().values() if record.upload_rate),
            reverse=True,
        )
        return int(rates[copies - 1] * seconds * RATE_MARGIN) if len(rates) >= copies else None

    def upload_rate(self, address: str) -> float | None:
        record = self._records.all().get(address)
        return record.upload_rate if record else None

    def _ranks(self, rate: str, addresses: Iterable[str]) -> dict[str, tuple[bool, float]]:
        records = self._records.all()
        rates = {address: getattr(records.get(address), rate, None) for address in addresses}
        best = max((value for value in rates.values() if value is not None), default=1.0)
        now = datetime.now(UTC)
        ranks = {}
        for address, value in rates.items():
            record = records.get(address)
            failed_recently = bool(
                record
                and record.failures
                and record.failed_at
                and abs(now - record.failed_at) < REST_AFTER_FAILURE
            )
            likely_rate = (
                self._chance.uniform(0, UNMEASURED_UP_TO) * best if value is None else value
            )
            ranks[address] = failed_recently, -likely_rate
        return ranks


def _spread(urls: Mapping[str, str], used: Iterable[str]) -> list[str]:
    hosts: Counter[str] = Counter()
    sites: Counter[str] = Counter()

    def count(url: str) -> None:
        host, site = _host_and_site(url)
        hosts[host] += 1
        sites[site] += 1

    def uses(address: str) -> tuple[int, int]:
        host, site = _host_and_site(urls[address])
        return hosts[host], sites[site]

    for url in used:
        count(url)
    remaining, ordered = list(urls), []
    while remaining:
        address = min(remaining, key=uses)
        remaining.remove(address)
        count(urls[address])
        ordered.append(address)
    return ordered


def _host_and_site(url: str) -> tuple[str, str]:
    """A site is a domain or network of probably one operator."""
    try:
        host = parse_address(url).host
    except StoreError:
        return "", ""
    try:
        network = 24 if ipaddress.ip_address(host).version == 4 else 48
        return host, str(ipaddress.ip_network(f"{host}/{network}", strict=False))
    except ValueError:
        return host, ".".join(host.split(".")[-2:])
