"""The providers that the chain lists, and the order in which they are used."""

import ipaddress
import random
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from caf_pipeline.errors import CafError, StoreError
from caf_pipeline.store.jackal.answers import Provider
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.provider import ProviderClient
from caf_pipeline.store.jackal.provider_http import parse_address
from caf_pipeline.store.protocol import ProviderRecord, ProviderRecords

LIST_SECONDS: Final = 300.0
"""How old the list of providers may be.

A provider changes its address by a transaction, months apart.
"""

REST_AFTER_FAILURE: Final = timedelta(hours=1)
"""How long a provider that failed stands behind the others."""

UNMEASURED_UP_TO: Final = 1.2
"""An unmeasured provider counts as a rate drawn between none and so many times the best: now and
then it comes first, and is measured.
"""

RATE_MARGIN: Final = 0.9
"""Of what a measured rate would move in the time that providers give an upload, what is counted
on.
"""


class ProviderSelection:
    """The providers, with a client for each. Safe for several threads."""

    def __init__(
        self,
        chain: Chain,
        records: ProviderRecords,
        *,
        chance: random.Random | None = None,
        allow_private_addresses: bool = False,
    ) -> None:
        """Make one from chain and records; no request is sent yet.

        Args:
            chain: lists the providers.
            records: what was measured of them.
            chance: in which unmeasured providers are drawn.
            allow_private_addresses: see the setting.
        """
        self._chain = chain
        self._allow_private_addresses = allow_private_addresses
        self._records = records
        self._chance = chance or random.Random()
        self._lock = threading.Lock()
        self._clients: dict[str, ProviderClient] = {}
        self._listed: dict[str, Provider] = {}
        self._active: frozenset[str] = frozenset()
        self._listed_at = 0.0

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def client(self, address: str) -> ProviderClient | None:
        """Return the client of a provider; None where the chain lists none of this name, or no
        usable URL of it.

        Raises: StoreUnreachable: the chain is asked and does not answer, and the provider is not
            known from before.
        """
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
        """Return the chain's providers by address; those known from before while no chain node
        answers.
        """
        with self._lock:
            if self._listed and not fresh and time.monotonic() - self._listed_at < LIST_SECONDS:
                return self._listed
            try:
                everyone = self._chain.providers()
            except CafError as error:
                if error.permanent or not self._listed:
                    raise
                return self._listed
            self._listed = {provider.address: provider for provider in everyone}
            self._listed_at = time.monotonic()
            return self._listed

    def to_upload(self, size_bytes: int, *, after: Collection[str] = ()) -> Sequence[str]:
        """Return the providers that may take a file of this size, in order: active ones first,
        spread over hosts, fast first.

        Args: size_bytes: of the file. A provider that the chain says to be smaller is left out; 0
            is no statement. after: providers that have the file or will; they are left out, and
            their hosts are avoided.
        """
        active, listed = self._active_now(), self.listed(fresh=True)
        fit = {
            address: provider
            for address, provider in listed.items()
            if address not in after
            and (not provider.total_bytes or provider.total_bytes >= size_bytes)
        }
        rates = self._ranks("upload_rate", fit)
        used = [listed[address].url for address in after if address in listed]
        ordered: list[str] = []
        for group in (fit.keys() & active, fit.keys() - active):
            # Active ones only would leave a young chain with whoever came first, so that the others
            # come after them.
            ordered += _spread(
                {address: fit[address].url for address in sorted(group, key=rates.__getitem__)},
                used,
            )
        return ordered

    def _active_now(self) -> frozenset[str]:
        """Return which providers prove files, those known from before while no chain node answers:
        only uploads ask for it.
        """
        try:
            self._active = frozenset(
                provider.address for provider in self._chain.active_providers()
            )
        except CafError as error:
            if error.permanent or not self._listed:
                raise
        return self._active

    def to_read(self, holders: Iterable[str]) -> Sequence[str]:
        """Return these providers, fastest first, those that failed of late last."""
        ranks = self._ranks("download_rate", holders)
        return sorted(ranks, key=ranks.__getitem__)

    def fitting_bytes(self, copies: int, seconds: float) -> int | None:
        """Return what so many providers take within so many seconds each; None where fewer are
        measured.
        """
        rates = sorted(
            (one.upload_rate for one in self._records.all().values() if one.upload_rate),
            reverse=True,
        )
        return int(rates[copies - 1] * seconds * RATE_MARGIN) if len(rates) >= copies else None

    def upload_rate(self, address: str) -> float | None:
        """Return the measured rate in bytes a second."""
        record = self._records.all().get(address)
        return record.upload_rate if record else None

    def _ranks(self, rate: str, addresses: Iterable[str]) -> dict[str, tuple[bool, float]]:
        """Return a sort key for each: the smaller, the sooner."""
        records = self._records.all()
        wanted = list(addresses)
        measured = {
            one: value
            for one in wanted
            if (value := getattr(records.get(one), rate, None)) is not None
        }
        best = max(measured.values(), default=1.0)
        now = datetime.now(UTC)
        return {
            address: (
                _failed_lately(records.get(address), now),
                -(
                    measured[address]
                    if address in measured
                    else self._chance.uniform(0, UNMEASURED_UP_TO) * best
                ),
            )
            for address in wanted
        }


def _failed_lately(record: ProviderRecord | None, now: datetime) -> bool:
    return bool(
        record
        and record.failures
        and record.failed_at
        and abs(now - record.failed_at) < REST_AFTER_FAILURE
    )


def _spread(urls: Mapping[str, str], used: Iterable[str]) -> list[str]:
    """Return the addresses so that those come first whose host, then whose site, was taken least
    often before.
    """
    hosts: Counter[str] = Counter()
    sites: Counter[str] = Counter()

    def take(url: str) -> None:
        host, site = _place(url)
        hosts[host] += 1
        sites[site] += 1

    for url in used:
        take(url)
    left, ordered = dict(urls), []
    while left:
        address = min(
            left, key=lambda one: (hosts[_place(left[one])[0]], sites[_place(left[one])[1]])
        )
        take(left.pop(address))
        ordered.append(address)
    return ordered


def _place(url: str) -> tuple[str, str]:
    """Return a provider's host, and its site: the domain or network that likely is one
    operator's.
    """
    try:
        host = parse_address(url).host
    except StoreError:
        return "", ""
    try:
        network = 24 if ipaddress.ip_address(host).version == 4 else 48
        return host, str(ipaddress.ip_network(f"{host}/{network}", strict=False))
    except ValueError:
        return host, ".".join(host.split(".")[-2:])
