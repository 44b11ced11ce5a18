"""Benchmarks of retrieval from the loopback network.

The cases read one object, many small objects, and a large object. The peers need no look-up. `caf
run` archives the objects before, which is not timed. The database's server runs while the case
lasts.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from benchmarks import inputs
from benchmarks.case import CAF, Bench, best_transfers, ours, shell
from benchmarks.inputs import MIB
from benchmarks.jackal import GIB, WORDS, DistantNetwork
from benchmarks.ledgers import SELECTED, psql
from benchmarks.pairs import Command, run
from benchmarks.pipeline import SETTINGS
from benchmarks.server import BUCKET, COPY, SOURCE_KEYS
from caf_pipeline.formats import age
from caf_pipeline.ledger.database import embedded_url
from caf_pipeline.ledger.embedded import embedded_server
from caf_pipeline.settings import Settings

TARGET_BYTES = 16 * GIB  # all objects of a case fit one chunk
SMALL_BYTES = 64 << 10
SMALL = f"read-{SMALL_BYTES}"  # the prefix; at tiny scale, it is also the large object's
ALLOWED_SECONDS = 0.002  # the goal: a look-up and a comparison may add this much to a GET
ALLOWED_OPENING_SECONDS = 0.001  # the goal: what an encrypted object may take longer

GET_AND_SELECT = """curl -sS --fail -r "$1" -o "$3" "$2"
"$4" -q "$5" -c "$6"
sleep 0.35 """  # the goal: what a new process of caf may take longer

GETS = f"""import http.client, json, statistics, sys, time, urllib.parse
url, start, size, count = sys.argv[1], *map(int, sys.argv[2:])
address, seconds = urllib.parse.urlsplit(url), []
connection = http.client.HTTPConnection(address.netloc)
headers = {{"Range": f"bytes={{start}}-{{start + size - 1}}"}}
for _ in range(count):
    started = time.perf_counter()
    connection.request("GET", address.path, headers=headers)
    answer = connection.getresponse()
    assert (answer.status, len(answer.read())) == (206, size)
    time.sleep({ALLOWED_SECONDS})
    seconds.append(time.perf_counter() - started)
print(json.dumps({{"p50_ms": 1000 * statistics.median(seconds)}}))"""


@dataclass(frozen=True)
class ArchivedObjects:
    """Archived objects of a source.

    Attributes:
        environment: The environment of `caf`: source, network and database.
        references: A row for each object: `key`, and the URL (`path`), `offset` and `size` that
            other programs read.
    """

    environment: Mapping[str, str]
    references: Sequence[Mapping[str, Any]]


@contextmanager
def archived(
    bench: Bench, prefix: str, sizes: Sequence[int], identity: age.HybridIdentity | None = None
) -> Iterator[ArchivedObjects]:
    """Archive objects of these sizes with one provider, while the context lasts.

    Later calls with this prefix use the same archive, perhaps behind another network.
    If there is an identity, chunks are encrypted to it, and there are no references.
    """
    server, folder = bench.s3(), bench.folder / prefix
    server.fill(prefix, sizes)
    folder.mkdir(exist_ok=True)
    references = folder / "references.parquet"
    with DistantNetwork(folder / "network", bench.round_trip_ms) as network:
        values = {
            "bucket": BUCKET,
            "prefix": prefix,
            "endpoint": server.endpoint,
            "target_size": TARGET_BYTES,
        }
        text = SETTINGS.format(**values, lcds=network.lcds, chain_id=network.chain_id)
        if identity:
            text = text.replace("public = true", f"recipients = ['{identity.recipient}']")
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
                **({"CAF_ENCRYPTION__IDENTITY": identity.reveal()} if identity else {}),
            }
            if not (folder / "archived").exists():
                run(Command([CAF, "run", "--source", "bench"], environment=environment))
                (folder / "archived").touch()
            if identity:
                yield ArchivedObjects(environment, [])
                return
            run(
                Command(
                    [CAF, "export-references", "bench", "-o", str(references)],
                    environment=environment,
                    removed=[references],
                )
            )
            yield ArchivedObjects(environment, pq.read_table(references).to_pylist())
        finally:
            embedded_server(home / "postgres").close()


def read_one(bench: Bench) -> Iterator[tuple[Command, Command]]:
    """Read one object of 64 KiB 5,000 times, or 300 times over a network with latency."""
    count = bench.pick(300, 50, 5) if bench.round_trip_ms else bench.pick(5_000, 500, 20)
    with archived(bench, SMALL, [SMALL_BYTES]) as objects:
        [reference] = objects.references
        arguments = [
            reference["path"],
            str(reference["offset"]),
            str(reference["size"]),
            str(count),
        ]
        yield (
            ours("read-one", reference["key"], count, environment=objects.environment),
            Command([sys.executable, "-c", GETS, *arguments]),
        )


def read_encrypted(bench: Bench) -> Iterator[tuple[Command, Command]]:
    """Read an encrypted and a plain object of 64 KiB 5,000 times."""
    count = bench.pick(5_000, 500, 20)
    with (
        archived(bench, SMALL, [SMALL_BYTES]) as plain,
        archived(bench, "read-encrypted", [SMALL_BYTES], age.new_identity()) as encrypted,
    ):
        plain_key = plain.references[0]["key"]
        encrypted_key = plain_key.replace(SMALL, "read-encrypted")
        yield (
            ours("read-one", encrypted_key, count, environment=encrypted.environment),
            ours(
                "read-one", plain_key, count, ALLOWED_OPENING_SECONDS, environment=plain.environment
            ),
        )


def get_one(bench: Bench) -> Iterator[tuple[Command, Command]]:
    """Get one object of 64 KiB in a new process."""
    our_output, their_output = bench.folder / "got", bench.folder / "curled"
    removed = [our_output, their_output]
    with archived(bench, SMALL, [SMALL_BYTES]) as objects:
        [reference] = objects.references
        key, start = reference["key"], reference["offset"]
        select = (
            f"SELECT {SELECTED} FROM file_locations WHERE source_id = 1 AND file_path = '{key}'"
        )
        yield (
            Command(
                [CAF, "get", "bench", key, "-o", str(our_output)],
                environment=objects.environment,
                removed=removed,
            ),
            shell(
                GET_AND_SELECT,
                f"{start}-{start + reference['size'] - 1}",
                reference["path"],
                their_output,
                psql(),
                objects.environment["CAF_DATABASE_URL"],
                select,
                removed=removed,
            ),
        )


def restore_small(bench: Bench) -> Iterator[tuple[Command, Command]]:
    """Restore 10,000 objects of 16 KiB."""
    count, server = bench.pick(10_000, 1_000, 1), bench.s3()
    prefix, sizes = f"restored-{count}", inputs.fixed(count, 16 << 10)
    if bench.scale == "tiny":
        prefix, sizes = SMALL, [SMALL_BYTES]  # saves a run of caf
    our_output, their_output = bench.folder / "restored", bench.folder / "copied"
    with archived(bench, prefix, sizes) as objects:
        yield (
            Command(
                [CAF, "restore", "bench", str(our_output)],
                environment=objects.environment,
                removed=[our_output, their_output],
            ),
            shell(
                best_transfers(COPY, bench, prefix),
                f"bench:{BUCKET}/{prefix}",
                their_output,
                environment=server.rclone(),
                removed=[our_output, their_output],
            ),
        )


def read_large(bench: Bench) -> Iterator[tuple[Command, Command]]:
    """Read one object of 4 GiB."""
    size_bytes = bench.pick(4 * GIB, 128 * MIB, SMALL_BYTES)
    our_output, their_output = bench.folder / "got", bench.folder / "curled"
    with archived(bench, f"read-{size_bytes}", [size_bytes]) as objects:
        [reference] = objects.references
        byte_range = f"{reference['offset']}-{reference['offset'] + size_bytes - 1}"
        yield (
            Command(
                [CAF, "get", "bench", reference["key"], "-o", str(our_output)],
                environment=objects.environment,
                removed=[our_output, their_output],
            ),
            Command(
                [
                    "curl",
                    "-sS",
                    "--fail",
                    "-r",
                    byte_range,
                    "-o",
                    str(their_output),
                    reference["path"],
                ],
                removed=[our_output, their_output],
            ),
        )
