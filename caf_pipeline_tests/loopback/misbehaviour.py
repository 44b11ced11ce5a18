"""What a test may order: how the chain, its nodes and the providers go wrong.

All of it outlives a restart.

An order names whom it is for (`provider`, `lcd`, or neither for the chain) and what differs from
good behaviour:

    {"provider": 0, "drop_upload_after": 100000, "times": 1}      {"lcd": 1, "lag": 5}
    {"halted": true}

Orders for the same one add up.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from caf_pipeline_tests.loopback.chain_state import Database


@dataclass(frozen=True, slots=True)
class ProviderConduct:
    """How a provider behaves.

    Attributes: drop_upload_after: cut the connection after so many bytes of an upload's body;
        nothing is stored. drop_reply: take an upload, store and prove it, and cut the connection
        instead of answering. never_prove: say that all is done, and prove nothing, also nothing
        again. leaves: of each file only so many can be proven, from the first on; it serves all the
        same what it is asked for, as one
            does that fetches it from another provider.
        flip_byte: serve downloads with this byte of the file inverted; -1 for all of them.
        upload_rate: bytes a second that it reads.
        download_rate: bytes a second that it sends.
        fail: answer this status to everything.
        full: have no space, and say nothing of it.
        room: say that so many bytes are free, whatever is.
        refuse: take no connections.
        hang_seconds: wait so long before each answer.
        lose_jobs: know no job, ever.
        error_status: fail every upload with this text.
        cut_download_after: cut each download's connection after so many bytes of body, without any
        error.
        closes_lost: close the connection of a download that touches a lost range, instead of saying
        nothing.
        nonsense: answer everything with "html", "huge" (64 MiB of JSON) or "short" (less than was
        announced).
        times: after so many uploads that it spoiled, behave; 0 for ever.
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
        """Whether `times` counts."""
        return bool(
            self.drop_upload_after is not None or self.drop_reply or self.error_status or self.full
        )


@dataclass(frozen=True, slots=True)
class NodeConduct:
    """How one LCD behaves.

    Attributes:
        lag: blocks that it is behind.
        refuse: take no connections.
        fail: answer this status to everything.
        hang_seconds: wait so long before each answer.
        nonsense: as for a provider.
        chain_id: the network that it says it is of.
        index_off: know no transaction.
        version: what it says of the chain's software instead of the truth.
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
    """How the chain behaves.

    Attributes: halted: make no blocks; those that are ordered are made all the same.
        delay_inclusion: blocks that a new transaction waits in the mempool. swallow_broadcast:
        answer that all is well, and forget the transaction. cut_broadcast: cut the connection of a
        broadcast without an answer: "accept" takes the transaction, "drop" does not.
        forget_mempool: lose what waits when the network is started again. mempool_full: take no
        transaction.
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
    """The orders in force. Safe to call from several threads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._kept: dict[str, dict[str, Any]] = database.load("conduct", dict)

    def provider(self, index: int) -> ProviderConduct:
        """Return how a provider is to behave."""
        return ProviderConduct(**self._kept.get(f"provider {index}", {}))

    def node(self, index: int) -> NodeConduct:
        """Return how an LCD is to behave."""
        return NodeConduct(**self._kept.get(f"lcd {index}", {}))

    def chain(self) -> ChainConduct:
        """Return how the chain is to behave."""
        return ChainConduct(**self._kept.get("chain", {}))

    def order(self, order: Mapping[str, Any]) -> None:
        """Take an order; raises ValueError where it makes no sense."""
        changes = dict(order)
        name, kind = "chain", _CHAIN
        if "provider" in changes:
            name, kind = f"provider {int(changes.pop('provider'))}", _PROVIDER
        elif "lcd" in changes:
            name, kind = f"lcd {int(changes.pop('lcd'))}", _NODE
        known = {one.name for one in fields(kind)}
        if wrong := changes.keys() - known:
            raise ValueError(
                f"{name} knows no {', '.join(sorted(wrong))}; it knows {', '.join(sorted(known))}"
            )
        with self._lock:
            merged = self._kept.get(name, {}) | changes
            replace(kind(), **merged)
            self._set(name, merged)

    def clear(self) -> None:
        """Let everybody behave."""
        with self._lock:
            for name in list(self._kept):
                self._set(name, None)

    def spoiled(self, index: int) -> None:
        """Count down a provider's `times`."""
        with self._lock:
            conduct = self._kept.get(f"provider {index}", {})
            left = conduct.get("times", 0)
            if left == 1:
                self._set(f"provider {index}", None)
            elif left > 1:
                self._set(f"provider {index}", conduct | {"times": left - 1})

    def _set(self, name: str, value: dict[str, Any] | None) -> None:
        kept = dict(self._kept)
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = value
        self._database.save({("conduct", name): value})
        self._kept = kept
