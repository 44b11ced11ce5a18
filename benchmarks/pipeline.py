"""The whole pipeline, from the objects of a bucket to their locations.

The peer of `whole_pipeline` is a series of programs that do the same work one after the other. Each
run starts with a new network. Each run of caf has a new home and a new ledger, too. The peer's file
is posted before its run, and the table for its rows exists already. Neither is timed.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import inputs
from benchmarks.case import CAF, Bench, best_transfers, shell
from benchmarks.inputs import MIB
from benchmarks.jackal import WORDS, DistantNetwork, curl, post
from benchmarks.ledgers import packed
from benchmarks.pairs import Command
from benchmarks.server import BUCKET, COPY, SOURCE_KEYS
from caf_pipeline.caf.merkle import MerkleTree
from caf_pipeline.store.jackal.wallet import Wallet

MEAN_OVER_MEDIAN = 3  # of the sizes: exp(sigma² / 2) with sigma = 1.5
STEPS = """rclone copy --transfers 16 "$1" "$2"
cd "$2"; export LC_ALL=C; find . -type f | sort | xargs cat > "$3"
cd /; rm -r "$2"; sha256sum "$3"; shift 3"""
SETTINGS = """[sources.bench]
bucket = "{bucket}"
prefix = "{prefix}/"
endpoint_url = "{endpoint}"
target_size = {target_size}
public = true

[jackal]
lcd = {lcds}
chain_id = "{chain_id}"
copies = 1
proof_type = 3
allow_private_addresses = true
"""


class Pipeline:
    """`caf run` of a prefix. Each run has a new network, a new home and a new ledger.

    Attributes:
        folder: caf's folder, which the next run replaces.
    """

    def __init__(self, bench: Bench, prefix: str, target_bytes: int) -> None:
        self.folder = bench.folder / "ours"
        self.network = DistantNetwork(bench.folder / "network", bench.round_trip_ms)
        self._source = {
            "bucket": BUCKET,
            "prefix": prefix,
            "endpoint": bench.s3().endpoint,
            "target_size": max(target_bytes, 4096),
        }

    def renew_network(self) -> None:
        self.network.stop()
        shutil.rmtree(self.network.folder)
        self.network.start()

    def command(self, removed: Sequence[Path]) -> Command:
        environment = {
            **SOURCE_KEYS,
            "CAF_CONFIG": str(self.folder / "caf.toml"),
            "CAF_HOME": str(self.folder / "home"),
            "JACKAL_MNEMONIC": WORDS,
        }
        return Command(self._arguments, environment=environment, removed=removed)

    def _arguments(self) -> Sequence[str]:
        self.renew_network()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        network = self.network
        text = SETTINGS.format(**self._source, lcds=network.lcds, chain_id=network.chain_id)
        (self.folder / "caf.toml").write_text(text.replace("'", '"'), encoding="utf-8")
        return [CAF, "run", "--source", "bench"]


def run_small(bench: Bench) -> Iterator[tuple[Command, Command]]:
    """Archive 10,000 objects of 16 KiB in one chunk."""
    count, size_bytes = bench.pick(10_000, 1_000, 20), 16 << 10
    server, prefix, copies = bench.s3(), f"small-{count}", bench.folder / "copies"
    server.fill(prefix, inputs.fixed(count, size_bytes))
    pipeline = Pipeline(bench, prefix, 2 * count * size_bytes)
    removed = [copies, pipeline.folder]
    copy = best_transfers(COPY, bench, prefix)
    with pipeline.network:
        yield (
            pipeline.command([copies]),
            shell(
                copy,
                f"bench:{BUCKET}/{prefix}",
                copies,
                environment=server.rclone(),
                removed=removed,
            ),
        )


def whole_pipeline(bench: Bench) -> Iterator[tuple[Command, Command]]:
    """Archive 100,000 objects of log-normal sizes, 10 GiB, in ten chunks."""
    total, count = bench.pick(10_240 * MIB, 64 * MIB, MIB), bench.pick(100_000, 600, 20)
    chunks = 2 if bench.scale == "tiny" else 10
    sizes = inputs.log_normal(total, total // count // MEAN_OVER_MEDIAN)
    server, prefix, wallet = bench.s3(), f"whole-{total}", Wallet(WORDS)
    server.fill(prefix, sizes)
    tree = MerkleTree(3)
    for _, body in inputs.bodies(sizes):
        tree.update(body)
    root = tree.root()
    copies, whole = bench.folder / "copies", bench.folder / "whole"
    pipeline, steps = Pipeline(bench, prefix, total // chunks), best_transfers(STEPS, bench, prefix)
    with pipeline.network as network, packed(bench, len(sizes), in_order=True) as chunk:

        def their_arguments() -> Sequence[str]:
            pipeline.renew_network()
            chunk.renew()
            upload_command = curl(network.providers[0], post(network, wallet, total, root), whole)
            script = ["sh", "-ec", f'{steps}; {{ "$@"; }}; {{ {chunk.copy[-1]}; }}', "sh"]
            return [*script, f"bench:{BUCKET}/{prefix}", str(copies), str(whole), *upload_command]

        yield (
            pipeline.command([copies, whole]),
            Command(
                their_arguments,
                environment=server.rclone(),
                removed=[copies, whole, pipeline.folder],
            ),
        )
