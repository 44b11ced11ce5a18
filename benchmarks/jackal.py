"""Measures the Merkle root against `openssl dgst -sha256`, and an upload against `curl` sending the same form.

The upload goes to one provider of the loopback network, on the same machine; both clients meet the same server, in turn.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from caf_pipeline.caf.merkle import merkle_root
from caf_pipeline.settings import JackalSettings
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.posting import Poster
from caf_pipeline.store.jackal.provider import ProviderClient, Sending
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline.store.protocol import ChunkToStore, Posting
from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.support.memory_log import MemoryLog

ROUNDS = 3
GIB = 1 << 30
MIB = 1 << 20
MERKLE_BYTES = 4 * GIB
UPLOADS = (256 * MIB, 2 * GIB)  # two sizes, to see that memory does not follow
WORDS = "legal winner thank year wave sausage worth useful legal winner thank yellow"
PATTERN = bytes(range(256)) * 4096


def _file(path: Path, size_bytes: int, first: int) -> Path:
    """Write a file of this size whose blocks differ; `first` makes its root differ from those of other files."""
    with path.open("wb") as file:
        written = 0
        while written < size_bytes:
            piece = (written + first).to_bytes(8, "big") + PATTERN[8:]
            written += file.write(piece[: size_bytes - written])
    return path


def _seconds(command: list[str]) -> float:
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    return time.monotonic() - started


def merkle(folder: Path) -> list[str]:
    """Return the table of roots of a 4 GiB file beside openssl's SHA-256 of it, in turn."""
    path = _file(folder / "merkle", MERKLE_BYTES, 0)
    lines = ["| Merkle root of 4 GiB | root, s | openssl SHA-256, s | ratio: median (lowest to highest) of 3 |"]
    lines.append("|---|---|---|---|")
    for proof_type in (0, 3):
        rounds = []
        for _ in range(ROUNDS):
            bare = _seconds(["openssl", "dgst", "-sha256", str(path)])
            started = time.monotonic()
            merkle_root(path, proof_type)
            rounds.append((time.monotonic() - started, bare))
        lines.append(f"| type {proof_type} | {_row(rounds)} |")
    path.unlink()
    return lines


def uploads(folder: Path) -> list[str]:
    """Return the table of uploads beside curl's, and of the client's peak memory."""
    wallet = Wallet(WORDS)
    lines = ["| upload | ours, s | curl, s | ratio: median (lowest to highest) of 3 | peak memory, MiB |"]
    lines.append("|---|---|---|---|---|")
    with LoopbackNetwork(
        folder / "network", providers=1, block_seconds=0.2, fund={wallet.address: 10**10}, space={wallet.address: 10**12}
    ) as network:
        for size_bytes in UPLOADS:
            rounds, peak = [], 0
            for number in range(ROUNDS):
                ours = _file(folder / "ours", size_bytes, 2 * number + 1)
                theirs = _file(folder / "theirs", size_bytes, 2 * number + 2)
                done = _measured(network, wallet, ours)
                rounds.append((done["seconds"], _curl(network, wallet, theirs)))
                peak = max(peak, done["peak_bytes"])
            lines.append(f"| {size_bytes // MIB:,} MiB | {_row(rounds)} | {peak / MIB:,.0f} |")
    return lines


def _row(rounds: list[tuple[float, float]]) -> str:
    ratios = [ours / theirs for ours, theirs in rounds]
    ours, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
    return f"{ours:.2f} | {theirs:.2f} | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _measured(network: LoopbackNetwork, wallet: Wallet, path: Path) -> dict[str, Any]:
    """Upload in a process of its own, so that its peak memory is its own."""
    posting = _post(network, wallet, path)
    place = [network.providers[0], str(path), posting.merkle_root.hex(), posting.owner, str(posting.start)]
    command = [sys.executable, "-m", "benchmarks.measured", "upload", *place]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _curl(network: LoopbackNetwork, wallet: Wallet, path: Path) -> float:
    """Send the same form with curl; return the seconds to the answer, which comes when the file is hashed and stored."""
    posting = _post(network, wallet, path)
    fields = {"sender": posting.owner, "merkle": posting.merkle_root.hex(), "start": str(posting.start)}
    form = [part for name, value in fields.items() for part in ("-F", f"{name}={value}")]
    address = f"{network.providers[0]}/v2/upload"
    return _seconds(["curl", "-sS", "--fail", "-o", "/dev/null", *form, "-F", f"file=@{path}", address])


def _post(network: LoopbackNetwork, wallet: Wallet, path: Path) -> Posting:
    heights = [0]
    chain = Chain(
        network.lcds,
        network.chain_id,
        seen_height=lambda: heights[0],
        see_height=lambda height: heights.__setitem__(0, height),
    )
    settings = JackalSettings(lcd=tuple(network.lcds), chain_id=network.chain_id, copies=1)
    chunk = ChunkToStore(path.name, "0" * 32, True, path.stat().st_size, 3, merkle_root(path, 3))
    try:
        return Poster(chain, wallet, settings, spend_cap=lambda: None).post(chunk, MemoryLog())
    finally:
        chain.close()


class _Unhurried:
    """Watches an upload and lets it run."""

    def check(self) -> None:
        """Let it go on."""

    def piece_bytes(self) -> int:
        """Return as much as uploads send at once."""
        return 1 << 20

    def sent(self, size_bytes: int) -> None:
        """Let it go on."""


def upload(address: str, path: str, root: str, owner: str, start: str) -> dict[str, Any]:
    """Upload a posted file to one provider, up to its answer."""
    file = Path(path)
    posting = Posting(bytes.fromhex(root), owner, int(start), file.stat().st_size)
    client = ProviderClient(address, may_be_private=True)
    started = time.monotonic()
    job = client.upload(Sending(posting, file, _Unhurried(), proof_type=3, answer_seconds=600))
    seconds = time.monotonic() - started
    client.close()
    return {"seconds": seconds, "bytes": posting.stored_size_bytes, "status": job.status}
