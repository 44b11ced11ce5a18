"""The loopback network behind a network with latency, and uploads of one chunk.

The peer is curl, which sends the same form. Both sides use the same server on the same machine.
Each run posts a new file, because a provider accepts each file only once.
"""

import itertools
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.case import Bench
from benchmarks.network import distant
from benchmarks.pairs import Command
from caf_pipeline.caf.merkle import merkle_root
from caf_pipeline.ledger.records import OperatorControls
from caf_pipeline.records import PostRecord, ProviderRecord
from caf_pipeline.settings import JackalSettings
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.nodes import Nodes
from caf_pipeline.store.jackal.posting import Poster
from caf_pipeline.store.jackal.provider import ProviderClient, Sending
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline.store.jackal.write import open_jackal_store
from caf_pipeline.store.protocol import ChunkToStore
from caf_pipeline.throttle import Throttle
from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.support.memory_log import MemoryLog

MIB = 1 << 20
GIB = 1 << 30
# A test vector of BIP-39. No wallet uses these words.
WORDS = "legal winner thank year wave sausage worth useful legal winner thank yellow"
PATTERN = bytes(range(256)) * 4096


class DistantNetwork(LoopbackNetwork):
    """A loopback network for the wallet of `WORDS`, whose servers are behind the proxy."""

    def __init__(self, folder: Path, round_trip_ms: int, *, providers: int = 1) -> None:
        address = Wallet(WORDS).address
        super().__init__(
            folder,
            providers=providers,
            block_seconds=0.2,
            fund={address: 10**12},
            space={address: 10**13},
            no_zero_draws=1,
        )
        self._round_trip_ms = round_trip_ms
        self._proxies = ExitStack()

    def start(self) -> None:
        super().start()
        self.lcds = [self._behind_proxy(url) for url in self.lcds]
        self.providers = [self._behind_proxy(url) for url in self.providers]
        for number, url in enumerate(self.providers):
            self.move_provider(number, url)

    def stop(self) -> None:
        self._proxies.close()
        super().stop()

    def _behind_proxy(self, url: str) -> str:
        return self._proxies.enter_context(distant(url, self._round_trip_ms))


def upload(bench: Bench, copies: int = 1) -> Iterator[tuple[Command, Command]]:
    """Upload a chunk of 4 GiB to one provider or several.

    One copy is only sent. Several are stored as a run stores them, until the chain lists each.
    """
    size_bytes = bench.pick(4 * GIB, 256 * MIB, MIB)
    wallet, numbers, path = Wallet(WORDS), itertools.count(1), bench.folder / "upload"
    folder = bench.folder / f"network-{copies}-at-{bench.round_trip_ms}ms"
    with DistantNetwork(folder, bench.round_trip_ms, providers=copies) as network:
        address = network.providers[0]

        def post_new_file() -> PostRecord:
            for stored in folder.rglob("*"):
                if stored.is_file() and stored.stat().st_size == size_bytes:
                    # Saves disk space: nothing reads the file of the previous run again.
                    stored.unlink()
            _write(path, size_bytes, next(numbers))
            return post(network, wallet, size_bytes, merkle_root(path, 3), copies)

        def our_arguments() -> Sequence[str]:
            posting = post_new_file()
            posted = [str(path), posting.merkle_root.hex(), posting.owner, str(posting.start)]
            function, *options = (
                ["upload", address]
                if copies == 1
                else ["store", network.lcd, network.chain_id, str(copies)]
            )
            return [sys.executable, "-m", "benchmarks.work", function, *options, *posted]

        def their_arguments() -> Sequence[str]:
            posting = post_new_file()
            uploads = [shlex.join(curl(url, posting, path)) for url in network.providers]
            started = [f"{upload} & upload{number}=$!" for number, upload in enumerate(uploads)]
            ended = [f"wait $upload{number}" for number in range(copies)]
            return ["sh", "-ec", "\n".join([*started, *ended])]

        yield Command(our_arguments), Command(their_arguments)
    path.unlink(missing_ok=True)


def _write(path: Path, size_bytes: int, first: int) -> None:
    """Write a file whose blocks all differ.

    Files with different values of `first` have different roots.
    """
    with path.open("wb") as file:
        written = 0
        while written < size_bytes:
            piece = (written + first).to_bytes(8, "big") + PATTERN[8:]
            written += file.write(piece[: size_bytes - written])


def curl(address: str, posting: PostRecord, path: Path) -> list[str]:
    """Return the command that uploads a posted file to a provider."""
    fields = {
        "sender": posting.owner,
        "merkle": posting.merkle_root.hex(),
        "start": str(posting.start),
    }
    form = [part for name, value in fields.items() for part in ("-F", f"{name}={value}")]
    return [
        "curl",
        "-sS",
        "--fail",
        "-o",
        "/dev/null",
        *form,
        "-F",
        f"file=@{path}",
        f"{address}/v2/upload",
    ]


def post(
    network: LoopbackNetwork, wallet: Wallet, size_bytes: int, root: bytes, copies: int = 1
) -> PostRecord:
    """Post a file of this size and type 3 root."""
    heights = [0]
    chain = Chain(
        Nodes(
            network.lcds,
            network.chain_id,
            seen_height=lambda: heights[0],
            see_height=lambda height: heights.__setitem__(0, height),
        )
    )
    settings = JackalSettings(lcd=tuple(network.lcds), chain_id=network.chain_id, copies=copies)
    chunk = ChunkToStore("bench", "0" * 32, size_bytes, 3, root)
    try:
        return Poster(chain, wallet, settings, spend_cap=lambda: None).post(chunk, MemoryLog())
    finally:
        chain.close()


class _UnlimitedUpload:
    def check(self) -> None:
        """Never stop the upload."""

    def piece_bytes(self) -> int:
        """Return the usual size of a piece."""
        return 1 << 20

    def sent(self, size_bytes: int) -> None:
        """Ignore the progress."""


def send(address: str, *posted: str) -> dict[str, Any]:
    """Upload a posted file to one provider and wait for the answer."""
    path, posting = _posted(*posted)
    client = ProviderClient(address, may_be_private=True)
    job = client.upload(
        Sending(posting, path, _UnlimitedUpload(), proof_type=3, answer_seconds=600)
    )
    client.close()
    return {"bytes": posting.stored_size_bytes, "status": job.status}


class _NoRecords:
    def all(self) -> Mapping[str, ProviderRecord]:
        return {}

    def uploaded(self, provider: str, size_bytes: int, seconds: float) -> None:
        """Ignore the rate."""

    downloaded = uploaded

    def failed(self, provider: str) -> None:
        """Ignore the failure."""


def store(lcd: str, chain_id: str, copies: str, *posted: str) -> dict[str, Any]:
    """Upload a posted file to several providers, and wait until the chain lists each copy."""
    settings = JackalSettings(
        lcd=(lcd,), chain_id=chain_id, copies=int(copies), allow_private_addresses=True
    )
    path, posting = _posted(*posted)
    opened = open_jackal_store(settings, MemoryLog(), _NoRecords(), Throttle(OperatorControls))
    opened.put(posting, path, lambda size_bytes: None)
    listed = len(opened.copies(posting))
    opened.close()
    return {"bytes": posting.stored_size_bytes, "copies": listed}


def _posted(path: str, root: str, owner: str, start: str) -> tuple[Path, PostRecord]:
    size_bytes = Path(path).stat().st_size
    return Path(path), PostRecord(bytes.fromhex(root), owner, int(start), size_bytes)
