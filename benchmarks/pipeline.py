"""The whole pipeline, from the objects of a bucket to their locations.

The peer is a series of programs that do the same work one after the other. Each run starts with a
new network. Each run of caf has a new home and a new ledger, too. The peer's file is posted before
its run, and the table for its rows exists already. Neither is timed.
"""

import shutil
from collections.abc import Iterator, Sequence

from benchmarks import inputs
from benchmarks.case import CAF, Bench
from benchmarks.inputs import MIB
from benchmarks.jackal import WORDS, DistantNetwork, curl, post
from benchmarks.ledgers import packed
from benchmarks.pairs import Command
from benchmarks.server import BUCKET, KEY, SOURCE_KEYS
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
    our_folder, copies, whole, network_folder = (
        bench.folder / name for name in ("ours", "copies", "whole", "network")
    )
    network = DistantNetwork(network_folder, bench.round_trip_ms)

    def new_network() -> None:
        network.stop()
        shutil.rmtree(network_folder)
        network.start()

    def our_arguments() -> Sequence[str]:
        new_network()
        shutil.rmtree(our_folder, ignore_errors=True)
        our_folder.mkdir()
        values = {
            "bucket": BUCKET,
            "prefix": prefix,
            "endpoint": server.endpoint,
            "key": KEY,
            "target_size": max(total // chunks, 4096),
        }
        text = SETTINGS.format(**values, lcds=network.lcds, chain_id=network.chain_id)
        (our_folder / "caf.toml").write_text(text.replace("'", '"'), encoding="utf-8")
        return [CAF, "run", "--source", "bench"]

    with network, packed(bench, len(sizes), in_order=True) as chunk:

        def their_arguments() -> Sequence[str]:
            new_network()
            chunk.renew()
            upload_command = curl(network.providers[0], post(network, wallet, total, root), whole)
            script = ["sh", "-ec", f'{STEPS}; {{ "$@"; }}; {{ {chunk.copy[-1]}; }}', "sh"]
            return [*script, f"bench:{BUCKET}/{prefix}", str(copies), str(whole), *upload_command]

        environment = {
            **SOURCE_KEYS,
            "CAF_CONFIG": str(our_folder / "caf.toml"),
            "CAF_HOME": str(our_folder / "home"),
            "JACKAL_MNEMONIC": WORDS,
        }
        yield (
            Command(our_arguments, environment=environment, removed=[copies, whole]),
            Command(
                their_arguments, environment=server.rclone(), removed=[copies, whole, our_folder]
            ),
        )
