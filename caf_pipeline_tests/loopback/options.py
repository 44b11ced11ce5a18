"""What a network is made of.

The first start writes it into the folder; later ones take it from there.
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
    """A network.

    Attributes: chain_id: of its chain. providers: how many. lcds: REST servers of the chain, all
        over the same state. port: of the first LCD; 0 for a free one. All other ports are free
        ones; all stay as they are over a restart. block_seconds: between two blocks. fund: ujkl by
        address, at genesis. space: bytes by address that are bought at genesis. space_days: for how
        long. version: of the chain's software, as its nodes name it: before 5.1 it verifies proofs
        of type 0 only. proof_window: blocks in which a provider proves a file once. no_zero_draws:
        whether the chain never draws leaf 0, as it does once in all leaves but one: for tests that
        look once. min_gas_price: ujkl, below which a node takes no transaction. price: ujkl for a
        GB (10^9 bytes) and 30 days. provider_space: bytes that each provider has. upload_seconds:
        for which a provider reads one request; then it cuts it and has nothing. reply_seconds:
        after a request's beginning, when a provider's reply can no longer be written. clock_days:
        how far the chain's clock is ahead of this machine's; negative if it is behind. job_seconds:
        for which a provider remembers an upload that went well.
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
        """Tell whether the chain can verify proofs of a type."""
        numbers = re.match(r"v?(\d+)\.(\d+)", self.version)
        return proof_type == 0 or bool(numbers and tuple(map(int, numbers.groups())) >= (5, 1))

    def price_of(self, size_bytes: int, days: float) -> int:
        """Return what space costs in ujkl; megabytes are rounded down, and less than one counts as
        one.
        """
        return int(self.price * max(1, size_bytes // 10**6) * days // (1000 * 30))

    @classmethod
    def open(cls, folder: Path, given: Mapping[str, Any]) -> Self:
        """Return the folder's options with those that are given now on top, and write them down at
        the first start.
        """
        file = folder / FILE
        known = json.loads(file.read_text()) if file.exists() else {}
        merged = known | {name: value for name, value in given.items() if value is not None}
        options = cls(**{one.name: merged[one.name] for one in fields(cls) if one.name in merged})
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(".new")
            temporary.write_text(json.dumps(asdict(options), indent=2) + "\n")
            temporary.replace(file)
        return options
