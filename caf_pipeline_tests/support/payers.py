"""Wallets and posters on the loopback network, and processes that pay."""

import contextlib
import functools
import hashlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mnemonic import Mnemonic

from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.transactions import TransactionLog
from caf_pipeline.records import PostRecord
from caf_pipeline.settings import JackalSettings
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.messages import ChainMessage, TransactionTerms, sign_transaction
from caf_pipeline.store.jackal.nodes import Nodes
from caf_pipeline.store.jackal.posting import Poster
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline.store.protocol import ChunkToStore
from caf_pipeline.system.processes import this_process
from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.loopback.wire import field
from caf_pipeline_tests.support.kills import Fatal, Moments, Process
from caf_pipeline_tests.support.memory_log import MemoryLog

ARCHIVE = "archive-1"
SIZE = 1_000
COPIES = 3
CHARGED = SIZE * COPIES
QUICK = {"attempts": 3, "first_wait_seconds": 0.01}
"""Retries of a chain in tests, whose blocks take 0.1 s."""

_wallets = itertools.count(1)


def chunk(name: str, **changes: Any) -> ChunkToStore:
    """A chunk whose root follows from its name."""
    root = hashlib.sha256(name.encode()).digest()
    facts = {
        "archive_id": ARCHIVE,
        "stored_size_bytes": SIZE,
        "proof_type": 3,
        "merkle_root": root,
    }
    return ChunkToStore(name=name, **facts | changes)


@dataclass
class Payer:
    """A wallet with coins and space on a network, and its posters."""

    network: LoopbackNetwork
    words: str
    stack: contextlib.ExitStack

    def __post_init__(self) -> None:
        self.wallet = Wallet(self.words)
        self.address = self.wallet.address
        self.account = f"{self.network.chain_id}/{self.address}"

    @classmethod
    def new(
        cls,
        network: LoopbackNetwork,
        stack: contextlib.ExitStack,
        *,
        coins: int = 10**9,
        space: int = 10**9,
    ) -> "Payer":
        number = (next(_wallets) << 32 | os.getpid()).to_bytes(16, "big")
        payer = cls(network, Mnemonic("english").to_mnemonic(number), stack)
        if coins:
            network.fund(payer.address, coins)
        if space:
            network.grant(payer.address, space)
        return payer

    def settings(self, **changes: Any) -> JackalSettings:
        fields = {
            "lcd": tuple(self.network.lcds),
            "chain_id": self.network.chain_id,
            "copies": COPIES,
            "timeout_blocks": 50,
        }
        return JackalSettings(**fields | {"allow_private_addresses": True} | changes)

    def chain(self, log: TransactionLog, *urls: str, **changes: Any) -> Chain:
        return self.stack.enter_context(open_chain(self.settings(), log, *urls, **changes))

    def poster(
        self,
        log: TransactionLog,
        *,
        chain: Chain | None = None,
        cap: int | None = None,
        **settings: Any,
    ) -> Poster:
        return Poster(
            chain or self.chain(log), self.wallet, self.settings(**settings), spend_cap=lambda: cap
        )

    def delete(self, posting: PostRecord) -> None:
        """Delete a file, which our programs never do."""
        fields = ((1, self.address.encode()), (2, posting.merkle_root), (3, posting.start))
        message = ChainMessage(
            "/canine_chain.storage.MsgDeleteFile", b"".join(field(*pair) for pair in fields)
        )
        chain = self.chain(MemoryLog())
        account = chain.account(self.address)
        terms = TransactionTerms(
            chain.chain_id, account.number, account.sequence, chain.height() + 50, 200_000, 4_000
        )
        assert chain.broadcast(sign_transaction(self.wallet, [message], terms)).code == 0
        self.network.wait_for(
            lambda state: all(file["start"] != posting.start for file in state["files"])
        )

    # what the network took

    def starts(self, name: str) -> list[int]:
        """Return the starts of all posts of a chunk by this wallet."""
        root = chunk(name).merkle_root.hex()
        return [
            file["start"]
            for file in self.network.state()["files"]
            if (file["merkle"], file["owner"]) == (root, self.address)
        ]

    def charged(self) -> int:
        """Return the bytes of space that the network charged this wallet."""
        return int(self.network.state()["plans"][self.address]["used_bytes"])

    def transactions(self) -> int:
        """Return how many transactions used a sequence of this wallet."""
        return int(self.network.state()["accounts"][self.address]["sequence"])

    def balance(self) -> int:
        return int(self.network.state()["accounts"][self.address]["balance"])


def open_chain(settings: JackalSettings, log: TransactionLog, *urls: str, **changes: Any) -> Chain:
    return Chain(
        Nodes(
            urls or settings.lcd,
            settings.chain_id,
            seen_height=lambda: log.seen_height(settings.chain_id),
            see_height=lambda height: log.see_height(settings.chain_id, height),
            **QUICK | changes,
        )
    )


def then(
    target: object, method: str, action: Callable[[], object], *, before: bool = False
) -> None:
    """Run an action after, or before, the next call of a method."""
    original = getattr(target, method)

    @functools.wraps(original)
    def once(*args: Any, **named: Any) -> Any:
        setattr(target, method, original)
        if before:
            action()
        result = original(*args, **named)
        if not before:
            action()
        return result

    setattr(target, method, once)


def _pay(
    moments: Moments, *, settings: JackalSettings, words: str, url: str, name: str, buy: int
) -> int | str:
    log = Ledger(Database(url)).transactions(this_process("run-child"))
    with open_chain(settings, log) as chain:
        poster = Poster(chain, Wallet(words), settings, spend_cap=lambda: None)
        if buy:
            return poster.buy(buy, 30, log).hash
        return poster.post(chunk(name), log).start


def start_payment(
    payer: Payer, url: str, name: str = "", *, buy: int = 0, fatal: Fatal | None = None
) -> Process:
    """Start a process that posts a chunk and returns its start, or buys space."""
    named = {"settings": payer.settings(), "words": payer.words, "name": name, "buy": buy}
    return Process(functools.partial(_pay, url=url, **named), fatal=fatal)
