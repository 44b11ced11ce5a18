"""The options of a network.

The first start writes them into the folder. Later starts read them from there.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

FILE: Final = "options.json"
GB: Final = 10**9  # the unit in which the chain sells space


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a network.

    Attributes:
        lcds: REST servers of the chain, all with the same state.
        port: of the first LCD; 0 for a free one. All other ports are free ones. A restart keeps
            all.
        block_seconds: between two blocks.
        fund: ujkl by address at genesis.
        space: bytes by address, bought at genesis.
        space_days: how long that space lasts.
        version: of the chain's software. Before 5.1 it verifies only proofs of type 0.
        proof_window: blocks in which a provider proves a file once.
        no_zero_draws: never draw leaf 0, for tests that check once. A real chain draws it
            sometimes.
        min_gas_price: ujkl, below which a node refuses a transaction.
        price: ujkl for a GB (10^9 bytes) and 30 days.
        provider_space: bytes of each provider.
        upload_seconds: how long a provider reads a request before it cuts the connection.
        reply_seconds: after a request's start, when a provider can no longer reply.
        job_seconds: how long a provider remembers a successful upload.
        clock_days: how far the chain's clock is ahead of this machine's; negative if behind.
    """

    chain_id: str = "loopback-1"
    providers: int = 3
    lcds: int = 1
    port: int = 0
    block_seconds: float = 1.0
    fund: Mapping[str, int] = field(default_factory=dict)
    space: Mapping[str, int] = field(default_factory=dict)
    space_days: int = 365
    version: str = "5.1.0"
    proof_window: int = 50
    no_zero_draws: bool = False
    min_gas_price: float = 0.002
    price: int = 25_000
    provider_space: int = 1 << 40
    upload_seconds: float = 600
    reply_seconds: float = 300
    job_seconds: float = 600
    clock_days: float = 0

    def verifies(self, proof_type: int) -> bool:
        """Return whether the chain can verify proofs of this type."""
        numbers = re.match(r"v?(\d+)\.(\d+)", self.version)
        return proof_type == 0 or bool(numbers and tuple(map(int, numbers.groups())) >= (5, 1))

    def price_of(self, size_bytes: int, days: float) -> int:
        """Return the price of space in ujkl. Megabytes are rounded down, to at least one."""
        return int(self.price * max(1, size_bytes // 10**6) * days // (1000 * 30))

    @classmethod
    def open(cls, folder: Path, changes: Mapping[str, Any]) -> Self:
        """Return the folder's options updated by `changes`. The first start writes them."""
        file = folder / FILE
        stored = json.loads(file.read_text()) if file.exists() else {}
        merged = stored | {name: value for name, value in changes.items() if value is not None}
        names = {option.name for option in fields(cls)}
        options = cls(**{name: value for name, value in merged.items() if name in names})
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(".new")
            temporary.write_text(json.dumps(asdict(options), indent=2) + "\n")
            temporary.replace(file)
        return options
