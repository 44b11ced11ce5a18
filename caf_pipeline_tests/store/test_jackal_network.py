"""Archives to the Jackal network that the environment names, and reads back: `make test-jackal`.

    JACKAL_LCD         REST servers of chain nodes, separated by commas; default: a new loopback
                       network
    JACKAL_MNEMONIC    the wallet, with coins for fees and space for some MiB
    JACKAL_CHAIN_ID    as the setting of this name
    JACKAL_PROOF_TYPE  as the setting of this name
    JACKAL_COPIES      as the setting of this name; default: the number of providers
    JACKAL_BUY         bytes to buy first if the wallet has no space; default: buy nothing

Only the first fixture knows which network it is.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.nodes import Nodes
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.support.command_line import CommandLine, source_text
from caf_pipeline_tests.support.s3_server import make_bucket

pytestmark = (
    pytest.mark.thorough
)  # on a loopback network: other tests cover the same with faster blocks

KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
MOST_COPIES = 3
LEAST_PURCHASE = 1_000_000_000  # the smallest on sale
WORDS = "legal winner thank year wave sausage worth useful legal winner thank yellow"
STORING = {"posting", "posted", "uploading", "verified", "located"}
SECONDS = 900  # for one command: a real network has blocks of six seconds


@dataclass(frozen=True)
class Named:
    """The network of the suite, by the environment's names."""

    lcd: str
    mnemonic: str
    chain_id: str
    proof_type: str
    buy: str


def _of_environment() -> Named:
    return Named(
        lcd=os.environ["JACKAL_LCD"],
        mnemonic=os.environ["JACKAL_MNEMONIC"],
        chain_id=os.environ.get("JACKAL_CHAIN_ID", "jackal-1"),
        proof_type=os.environ.get("JACKAL_PROOF_TYPE", "3"),
        buy=os.environ.get("JACKAL_BUY", ""),
    )


@pytest.fixture(scope="module")
def named(tmp_path_factory) -> Iterator[Named]:
    if os.environ.get("JACKAL_LCD"):
        if not os.environ.get("JACKAL_MNEMONIC"):
            pytest.fail("JACKAL_LCD names a network, but JACKAL_MNEMONIC no wallet")
        yield _of_environment()
        return
    address = Wallet(WORDS).address
    folder = tmp_path_factory.mktemp("network")
    with LoopbackNetwork(
        folder, providers=4, fund={address: 10_000_000_000}, no_zero_draws=1
    ) as network:
        yield Named(network.lcd, WORDS, network.chain_id, "3", str(LEAST_PURCHASE))


@pytest.fixture(scope="module")
def chain(named) -> Iterator[Chain]:
    heights = [0]
    chain = Chain(
        Nodes(
            named.lcd.split(","),
            named.chain_id,
            seen_height=lambda: heights[0],
            see_height=lambda height: heights.__setitem__(0, max(height, heights[0])),
        )
    )
    yield chain
    chain.close()


@dataclass(frozen=True)
class Archive:
    """A command line with the source `src`, and its objects' bodies."""

    caf: CommandLine
    bodies: dict[str, bytes]
    copies: int

    def chunks(self) -> list[dict[str, object]]:
        lines = [json.loads(line) for line in self.caf("status", "src", "--json").out.splitlines()]
        return [line for line in lines if "chunk" in line]


def _environment(named: Named, copies: int) -> dict[str, str]:
    return KEYS | {
        "CAF_STORE__KIND": "jackal",
        "CAF_JACKAL__LCD": json.dumps(named.lcd.split(",")),
        "CAF_JACKAL__CHAIN_ID": named.chain_id,
        "CAF_JACKAL__PROOF_TYPE": named.proof_type,
        "CAF_JACKAL__COPIES": str(copies),
        "CAF_JACKAL__ALLOW_PRIVATE_ADDRESSES": "true",
        "JACKAL_MNEMONIC": named.mnemonic,
    }


@pytest.fixture(scope="module")
def archive(tmp_path_factory, named, chain, s3_server) -> Archive:
    """A source on the S3 server and a wallet with space, before archiving."""
    copies = int(os.environ.get("JACKAL_COPIES") or min(MOST_COPIES, len(chain.providers())))
    caf = CommandLine(tmp_path_factory.mktemp("archive"), _environment(named, copies))
    bucket = make_bucket(s3_server)
    bodies = {f"some/key-{number:02d}": os.urandom(150_000) for number in range(25)} | {
        "empty": b"",
        "a/": b"",
        "é": b"\0",
    }
    for key, body in bodies.items():
        bucket.put(key, body)
    caf.settings(source_text(s3_server, bucket.name))
    if chain.plan(Wallet(named.mnemonic).address) is None:
        if not named.buy:
            pytest.fail(
                "this wallet has no space: buy some, or let the suite do it with "
                "JACKAL_BUY=1000000000"
            )
        bought = caf("jackal", "buy", "--bytes", named.buy, "--days", "30", "--yes")
        assert bought.status == 0, bought.err
    return Archive(caf, bodies, copies)


@pytest.fixture(scope="module")
def used_before(archive, named, chain) -> int:
    return chain.plan(Wallet(named.mnemonic).address).used_bytes


@pytest.fixture(scope="module")
def archived(archive, used_before) -> Archive:
    """The source after a run that was killed while it stored chunks, and a complete run."""
    first = archive.caf.start(
        "run", "--source", "src", "--new-archive"
    )  # the wallet may have archives of other tests
    while first.poll() is None and not any(chunk["state"] in STORING for chunk in archive.chunks()):
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    done = archive.caf.start("run", "--source", "src")
    _, err = done.communicate(timeout=SECONDS)
    assert done.returncode == 0, err.decode()
    return archive


def test_every_chunk_is_located(archived):
    assert {chunk["state"] for chunk in archived.chunks()} == {"located"}


def test_every_object_reads_back(archived):
    for key in ("some/key-00", "some/key-24", "empty", "a/", "é"):
        done = archived.caf("get", "src", key)
        assert done.status == 0, done.err
        assert done.out == archived.bodies[key]


def test_chain_lists_each_chunk_once_with_all_copies(archived, named, chain):
    address = Wallet(named.mnemonic).address
    for chunk in archived.chunks():
        files = [
            file
            for file in chain.files_of_root(bytes.fromhex(str(chunk["merkle_root"])))
            if file.owner == address
        ]
        assert len(files) == 1
        assert len(set(files[0].providers)) == archived.copies


def test_the_space_is_charged_once(archived, used_before, named, chain):
    used = chain.plan(Wallet(named.mnemonic).address).used_bytes - used_before
    stored = sum(int(str(chunk["size_bytes"])) for chunk in archived.chunks())
    # From the next window on, a chain may count each file once instead of once per copy. It must
    # never count twice.
    assert stored <= used <= archived.copies * stored


def test_a_second_run_archives_nothing(archived, named, chain):
    used = chain.plan(Wallet(named.mnemonic).address).used_bytes
    done = archived.caf("run", "--source", "src")
    assert done.status == 0, done.err
    assert "nothing new" in done.err
    assert chain.plan(Wallet(named.mnemonic).address).used_bytes == used


def test_the_account_shows_the_wallet_and_its_plan(archived, named):
    done = archived.caf("jackal", "wallet", "--json")
    assert done.status == 0, done.err
    assert Wallet(named.mnemonic).address in done.out.decode()


def test_the_chain_and_the_ledger_name_the_same_files(archived):
    done = archived.caf("jackal", "files", "src")
    assert done.status == 0, done.out.decode() + done.err


def test_every_chunk_is_proven_again(archived):
    done = archived.caf("prove", "src")
    assert done.status == 0, done.out.decode() + done.err
    assert {chunk["state"] for chunk in archived.chunks()} == {"located"}


def test_no_word_of_the_mnemonic_is_left_behind(archived, named):
    words = named.mnemonic.encode()
    for path in Path(archived.caf.folder).rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert words not in path.read_bytes(), path
