"""All of it: objects of a bucket until each is located, beside the programs that do the same work
one after the other.

Each run finds a network that is new, and each of ours a home and a ledger, too. What the others
send is posted before, and their rows go into a table that is there: neither is timed.
"""

import shutil
from collections.abc import Iterator, Sequence

from benchmarks import inputs
from benchmarks.case import CAF, Bench
from benchmarks.inputs import MIB
from benchmarks.jackal import WORDS, curl, post
from benchmarks.ledgers import packed
from benchmarks.pairs import Command
from benchmarks.server import BUCKET, KEY, SOURCE_KEYS
from caf_pipeline.caf.merkle import MerkleTree
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline_tests.loopback.network import LoopbackNetwork

MEAN_OVER_MEDIAN = 3  # of the sizes: e to the half of sigma's square, which is 1.5
STEPS = """rclone copy --transfers 16 "$1" "$2"; cd "$2"; export LC_ALL=C; find . -type f | sort | xargs cat > "$3"
cd /; rm -r "$2"; sha256sum "$3"; shift 3"""  # noqa: E501
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
    """100,000 objects of log-normal sizes, 10 GiB, in ten chunks."""
    total, count = bench.pick(10_240 * MIB, 64 * MIB, MIB), bench.pick(100_000, 600, 20)
    chunks = 2 if bench.scale == "tiny" else 10
    sizes = inputs.log_normal(total, total // count // MEAN_OVER_MEDIAN)
    server, prefix, wallet = bench.s3(), f"whole-{total}", Wallet(WORDS)
    server.fill(prefix, sizes)
    tree = MerkleTree(3)
    for _, body in inputs.bodies(sizes):
        tree.update(body)
    root = tree.root()
    ours, copies, whole, kept = (
        bench.folder / name for name in ("ours", "copies", "whole", "network")
    )
    network = LoopbackNetwork(
        kept,
        providers=1,
        block_seconds=0.2,
        fund={wallet.address: 10**12},
        space={wallet.address: 10**13},
        no_zero_draws=1,
    )

    def new_network() -> None:
        network.stop()
        shutil.rmtree(kept)
        network.start()

    def our_arguments() -> Sequence[str]:
        new_network()
        shutil.rmtree(ours, ignore_errors=True)
        ours.mkdir()
        about = {
            "bucket": BUCKET,
            "prefix": prefix,
            "endpoint": server.endpoint,
            "key": KEY,
            "target_size": max(total // chunks, 4096),
        }
        text = SETTINGS.format(**about, lcds=network.lcds, chain_id=network.chain_id)
        (ours / "caf.toml").write_text(text.replace("'", '"'), encoding="utf-8")
        return [CAF, "run", "--source", "bench"]

    with network, packed(bench, len(sizes), in_order=True) as chunk:

        def their_arguments() -> Sequence[str]:
            new_network()
            chunk.renew()
            sending = curl(network.providers[0], post(network, wallet, total, root), whole)
            first = ["sh", "-ec", f'{STEPS}; {{ "$@"; }}; {{ {chunk.copy[-1]}; }}', "sh"]
            return [*first, f"bench:{BUCKET}/{prefix}", str(copies), str(whole), *sending]

        environment = {
            **SOURCE_KEYS,
            "CAF_CONFIG": str(ours / "caf.toml"),
            "CAF_HOME": str(ours / "home"),
            "JACKAL_MNEMONIC": WORDS,
        }
        yield (
            Command(our_arguments, environment=environment, removed=[copies, whole]),
            Command(their_arguments, environment=server.rclone(), removed=[copies, whole, ours]),
        )
