"""Wallets, logs and posters on the loopback network, and a run that can be killed at any call.

`python -m caf_pipeline_tests.support.paying_runs` reads one line of JSON from its standard input;
see `main`.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from mnemonic import Mnemonic

from caf_pipeline.ledger.processes import this_process
from caf_pipeline.ledger.transactions import TransactionLog
from caf_pipeline.settings import JackalSettings
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.messages import ChainMessage, TransactionTerms, sign_transaction
from caf_pipeline.store.jackal.nodes import Nodes
from caf_pipeline.store.jackal.posting import Poster
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline.store.protocol import ChunkToStore, PostRecord
from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.loopback.wire import field
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


class FileLog(MemoryLog):
    """A log that outlives its process: each change is in the file before the call returns.

    For one process at a time.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        if path.exists():
            self.entries, self.queued, self.heights = pickle.loads(path.read_bytes())

    def _save(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_bytes(pickle.dumps((self.entries, self.queued, self.heights)))
        new.replace(self._path)

    def ask(self, *args: Any, **options: Any) -> None:
        super().ask(*args, **options)
        self._save()

    def commit(self, *args: Any) -> None:
        super().commit(*args)
        self._save()

    def settle(self, *args: Any, **named: Any) -> None:
        super().settle(*args, **named)
        self._save()

    def see_height(self, *args: Any) -> None:
        super().see_height(*args)
        self._save()


@contextlib.contextmanager
def open_log(where: str) -> Iterator[TransactionLog]:
    """Return the ledger's log at a database's address, or one in a file."""
    if where.startswith("postgresql"):
        # Imported here: a run with a log in a file starts four times as fast.
        from caf_pipeline.ledger.database import Database
        from caf_pipeline.ledger.ledger import Ledger

        with contextlib.closing(Ledger(Database(where))) as ledger:
            yield ledger.transactions(this_process("run-child"))
    else:
        yield FileLog(Path(where))


KILLED_AT = (
    "ask",
    "own",
    "waiting",
    "pending",
    "commit",
    "settle",
    "start_of",
    "spent",
    "broadcast",
    "transaction",
    "account",
)
"""Calls of a log and a chain that a run can be killed before and after."""


def _kill_at(moment: int, *targets: object) -> None:
    """Kill this process at a moment. Each call above has one moment before it and one after it."""
    moments = itertools.count(1)

    def passing() -> None:
        if next(moments) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **named: Any) -> Any:
            passing()
            result = original(*args, **named)
            passing()
            return result

        return call

    for target in targets:
        for name in KILLED_AT:
            if hasattr(target, name):
                setattr(target, name, watched(getattr(target, name)))


def _order(payer: Payer, where: str, name: str, moment: int, **what: Any) -> str:
    order = {
        "settings": payer.settings().model_dump(mode="json"),
        "words": payer.words,
        "log": where,
        "chunk": name,
        "moment": moment,
    }
    return json.dumps(order | what) + "\n"


def start_run(payer: Payer, where: str, name: str, *, moment: int = 0) -> "subprocess.Popen[str]":
    """Start a process that posts a chunk once its standard input ends, and prints the start.

    It is killed at `moment`; 0 means never.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "caf_pipeline_tests.support.paying_runs"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    process.stdin.write(_order(payer, where, name, moment))
    process.stdin.flush()
    return process


@dataclass
class Run:
    """How a process ended: its output and its exit status, negative for a signal."""

    status: int
    output: str


class ManyRuns:
    """A process with all imports done that forks a process for each run in turn."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "caf_pipeline_tests.support.paying_runs", "many"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def run(self, payer: Payer, where: Path, name: str, *, moment: int, buy: int = 0) -> Run:
        """Post a chunk, or buy space, and be killed at `moment`.

        Returns when the process has ended.
        """
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(_order(payer, str(where), name, moment, buy=buy))
        self._process.stdin.flush()
        return Run(**json.loads(self._process.stdout.readline()))


def _do(order: dict[str, Any]) -> str:
    settings = JackalSettings(**order["settings"])
    with open_log(order["log"]) as log, open_chain(settings, log) as chain:
        poster = Poster(chain, Wallet(order["words"]), settings, spend_cap=lambda: None)
        _kill_at(order["moment"], log, chain)
        if order.get("buy"):
            return poster.buy(order["buy"], 30, log).hash
        return str(poster.post(chunk(order["chunk"]), log).start)


def _do_apart(order: dict[str, Any]) -> Run:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, _do(order).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        output = file.read()
    return Run(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output)


def main() -> None:
    """Execute the order in standard input once it ends. With "many", execute one order per line."""
    if sys.argv[1:] == ["many"]:
        import caf_pipeline_tests.support.process_template  # noqa: F401

        for line in sys.stdin:
            print(json.dumps(asdict(_do_apart(json.loads(line)))), flush=True)
        return
    order = json.loads(sys.stdin.readline())
    sys.stdin.read()
    print(_do(order))


if __name__ == "__main__":
    main()
