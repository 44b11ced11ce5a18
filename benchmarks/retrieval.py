"""Getting it back from the loopback network: one object, many small ones, a large one, beside
programs that need no look-up.

What is read is archived before by `caf run`, which is not timed. The database's server runs while
the case lasts.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from benchmarks import inputs
from benchmarks.case import CAF, Bench, ours, shell
from benchmarks.inputs import MIB
from benchmarks.jackal import GIB, WORDS
from benchmarks.pairs import Command, run
from benchmarks.pipeline import SETTINGS
from benchmarks.server import BUCKET, COPY, KEY, SOURCE_KEYS
from caf_pipeline.ledger.database import embedded_url
from caf_pipeline.ledger.embedded import embedded_server
from caf_pipeline.settings import Settings
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline_tests.loopback.network import LoopbackNetwork

TARGET_BYTES = 16 * GIB  # one chunk has all that a case archives
ALLOWED_SECONDS = 0.002  # that a look-up and a comparison may add to a GET: its goal is stated so

GETS = f"""import http.client, json, statistics, sys, time, urllib.parse
url, start, size, count = sys.argv[1], *map(int, sys.argv[2:])
place, seconds = urllib.parse.urlsplit(url), []
connection = http.client.HTTPConnection(place.netloc)
for _ in range(count):
    begun = time.perf_counter()
    connection.request("GET", place.path, headers={{"Range": f"bytes={{start}}-{{start + size - 1}}"}})
    answer = connection.getresponse()
    assert (answer.status, len(answer.read())) == (206, size)
    seconds.append(time.perf_counter() - begun)
    time.sleep({ALLOWED_SECONDS})
print(json.dumps({{"p50_ms": 1000 * statistics.median(seconds)}}))"""  # noqa: E501


@dataclass(frozen=True)
class Archived:
    """Objects of a source that are located on a network.

    Attributes: environment: of `caf`, which knows source, network and database. references: of each
        object its `key`, and by which URL, from which `offset` on (`path`, `offset`, `size`) others
        read it.
    """

    environment: Mapping[str, str]
    references: Sequence[Mapping[str, Any]]


@contextmanager
def archived(bench: Bench, prefix: str, sizes: Sequence[int]) -> Iterator[Archived]:
    """Archive objects of these sizes below a prefix of the S3 server, by one provider, while the
    context lasts.
    """
    server, wallet, folder = bench.s3(), Wallet(WORDS), bench.folder / prefix
    server.fill(prefix, sizes)
    folder.mkdir(exist_ok=True)
    references = folder / "references.parquet"
    space = {"fund": {wallet.address: 10**12}, "space": {wallet.address: 10**13}}
    with LoopbackNetwork(
        folder / "network", providers=1, block_seconds=0.2, no_zero_draws=1, **space
    ) as network:
        about = {
            "bucket": BUCKET,
            "prefix": prefix,
            "endpoint": server.endpoint,
            "key": KEY,
            "target_size": TARGET_BYTES,
        }
        text = SETTINGS.format(**about, lcds=network.lcds, chain_id=network.chain_id)
        (folder / "caf.toml").write_text(text.replace("'", '"'), encoding="utf-8")
        home = folder / "home"
        try:
            url = embedded_url(Settings(home=home))
            environment = {
                **SOURCE_KEYS,
                "CAF_CONFIG": str(folder / "caf.toml"),
                "CAF_HOME": str(home),
                "CAF_DATABASE_URL": url,
                "JACKAL_MNEMONIC": WORDS,
            }
            run(Command([CAF, "run", "--source", "bench"], environment=environment))
            run(
                Command(
                    [CAF, "export-references", "bench", "-o", str(references)],
                    environment=environment,
                )
            )
            yield Archived(environment, pq.read_table(references).to_pylist())
        finally:
            embedded_server(home / "postgres").close()


def read_one(bench: Bench) -> Iterator[tuple[Command, Command]]:
    """One object of 64 KiB, 5,000 times."""
    count = bench.pick(5_000, 500, 20)
    with archived(bench, "read-one", [64 << 10]) as found:
        [one] = found.references
        place = [one["path"], str(one["offset"]), str(one["size"]), str(count)]
        yield (
            ours("read-one", one["key"], count, environment=found.environment),
            Command([sys.executable, "-c", GETS, *place]),
        )


def restore_small(bench: Bench) -> Iterator[tuple[Command, Command]]:
    """10,000 objects of 16 KiB."""
    count = bench.pick(10_000, 1_000, 20)
    server, prefix = bench.s3(), f"restored-{count}"
    one, other = bench.folder / "restored", bench.folder / "copied"
    with archived(bench, prefix, inputs.fixed(count, 16 << 10)) as found:
        yield (
            Command(
                [CAF, "restore", "bench", str(one)],
                environment=found.environment,
                removed=[one, other],
            ),
            shell(
                COPY,
                f"bench:{BUCKET}/{prefix}",
                other,
                environment=server.rclone(),
                removed=[one, other],
            ),
        )


def read_large(bench: Bench) -> Iterator[tuple[Command, Command]]:
    """One object of 4 GiB."""
    size_bytes = bench.pick(4 * GIB, 128 * MIB, MIB)
    mine, theirs = bench.folder / "got", bench.folder / "curled"
    with archived(bench, f"read-{size_bytes}", [size_bytes]) as found:
        [one] = found.references
        wanted = f"{one['offset']}-{one['offset'] + size_bytes - 1}"
        yield (
            Command(
                [CAF, "get", "bench", one["key"], "-o", str(mine)],
                environment=found.environment,
                removed=[mine, theirs],
            ),
            Command(
                ["curl", "-sS", "--fail", "-r", wanted, "-o", str(theirs), one["path"]],
                removed=[mine, theirs],
            ),
        )
