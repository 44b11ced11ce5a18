"""Faults of the chain, its nodes and the providers that a test may order.

They survive a restart.

An order addresses a `provider`, an `lcd`, or neither for the chain, and lists the faults:

    {"provider": 0, "drop_upload_after": 100000, "times": 1}
    {"lcd": 1, "lag": 5}
    {"halted": true}

Orders for the same address add up.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from caf_pipeline_tests.loopback.chain_state import Database


@dataclass(frozen=True, slots=True)
class ProviderConduct:
    """The behaviour of a provider.

    Attributes:
        drop_upload_after: cut the connection after so many bytes of an upload, and store nothing.
        drop_reply: store and prove an upload, and cut the connection instead of answering.
        never_prove: report success, but prove nothing, not even renewals.
        leaves: prove only the first so many leaves of each file, but serve all bytes, as a provider
            that fetches them from another one.
        flip_byte: serve downloads with this byte of the file inverted; -1 inverts all.
        upload_rate: the bytes a second that it reads.
        download_rate: the bytes a second that it sends.
        fail: answer every request with this status.
        full: have no space, but do not report it.
        room: report so many free bytes.
        refuse: accept no connections.
        hang_seconds: wait so long before each answer.
        lose_jobs: know no job.
        error_status: fail every upload with this text.
        cut_download_after: cut each download after so many bytes without an error.
        closes_lost: cut a download that touches a lost range, instead of sending nothing.
        nonsense: answer every request with "html", "huge" (64 MiB of JSON) or "short" (fewer bytes
            than announced).
        times: behave well after so many spoiled uploads; 0 means never.
    """

    drop_upload_after: int | None = None
    drop_reply: bool = False
    never_prove: bool = False
    leaves: int | None = None
    flip_byte: int | None = None
    upload_rate: float = 0
    download_rate: float = 0
    fail: int = 0
    full: bool = False
    room: int | None = None
    refuse: bool = False
    hang_seconds: float = 0
    lose_jobs: bool = False
    error_status: str = ""
    cut_download_after: int | None = None
    closes_lost: bool = False
    nonsense: str = ""
    times: int = 0

    @property
    def spoils_uploads(self) -> bool:
        """Counts down `times`."""
        return bool(
            self.drop_upload_after is not None or self.drop_reply or self.error_status or self.full
        )


@dataclass(frozen=True, slots=True)
class NodeConduct:
    """The behaviour of one LCD.

    Attributes:
        lag: how many blocks it is behind.
        refuse: accept no connections.
        fail: answer every request with this status.
        hang_seconds: wait so long before each answer.
        nonsense: as for a provider.
        chain_id: the reported network.
        index_off: know no transaction.
        version: the reported version of the chain's software.
    """

    lag: int = 0
    refuse: bool = False
    fail: int = 0
    hang_seconds: float = 0
    nonsense: str = ""
    chain_id: str = ""
    index_off: bool = False
    version: str | None = None


@dataclass(frozen=True, slots=True)
class ChainConduct:
    """The behaviour of the chain.

    Attributes:
        halted: make no blocks except ordered ones.
        delay_inclusion: blocks that a new transaction waits in the mempool.
        swallow_broadcast: report success, but forget the transaction.
        cut_broadcast: cut the connection of a broadcast without an answer. "accept" takes the
            transaction, "drop" does not.
        forget_mempool: lose waiting transactions at a restart.
        mempool_full: accept no transaction.
    """

    halted: bool = False
    delay_inclusion: int = 0
    swallow_broadcast: bool = False
    cut_broadcast: str = ""
    forget_mempool: bool = False
    mempool_full: bool = False


_PROVIDER: Final[type[Any]] = ProviderConduct
_NODE: Final[type[Any]] = NodeConduct
_CHAIN: Final[type[Any]] = ChainConduct


class Orders:
    """The present orders. Safe for several threads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._kept: dict[str, dict[str, Any]] = database.load("conduct", dict)

    def provider(self, index: int) -> ProviderConduct:
        """Return a provider's behaviour."""
        return ProviderConduct(**self._kept.get(f"provider {index}", {}))

    def node(self, index: int) -> NodeConduct:
        """Return an LCD's behaviour."""
        return NodeConduct(**self._kept.get(f"lcd {index}", {}))

    def chain(self) -> ChainConduct:
        """Return the chain's behaviour."""
        return ChainConduct(**self._kept.get("chain", {}))

    def order(self, order: Mapping[str, Any]) -> None:
        """Add an order. Raises ValueError if it is invalid."""
        changes = dict(order)
        name, kind = "chain", _CHAIN
        if "provider" in changes:
            name, kind = f"provider {int(changes.pop('provider'))}", _PROVIDER
        elif "lcd" in changes:
            name, kind = f"lcd {int(changes.pop('lcd'))}", _NODE
        names = {field.name for field in fields(kind)}
        if wrong := changes.keys() - names:
            raise ValueError(
                f"{name} has no {', '.join(sorted(wrong))}, only {', '.join(sorted(names))}"
            )
        with self._lock:
            merged = self._kept.get(name, {}) | changes
            replace(kind(), **merged)
            self._set(name, merged)

    def clear(self) -> None:
        """Remove all orders."""
        with self._lock:
            for name in list(self._kept):
                self._set(name, None)

    def spoiled(self, index: int) -> None:
        """Count down a provider's `times`."""
        with self._lock:
            conduct = self._kept.get(f"provider {index}", {})
            times = conduct.get("times", 0)
            if times == 1:
                self._set(f"provider {index}", None)
            elif times > 1:
                self._set(f"provider {index}", conduct | {"times": times - 1})

    def _set(self, name: str, value: dict[str, Any] | None) -> None:
        kept = dict(self._kept)
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = value
        self._database.save({("conduct", name): value})
        self._kept = kept
