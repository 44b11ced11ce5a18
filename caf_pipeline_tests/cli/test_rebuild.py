"""`caf rebuild` of a lost ledger, from a Jackal network and from a folder."""

import dataclasses
import json
import os

import httpx
import pytest

from caf_pipeline.maintenance import rebuild
from caf_pipeline.store.directory import DirectoryStore
from caf_pipeline.store.jackal.names import archive_note
from caf_pipeline.system.quantities import counted
from caf_pipeline_tests.support.chain_user import ChainUser, random_content
from caf_pipeline_tests.support.command_line import (
    CommandLine,
    archive_source,
    expect_error,
    source_text,
)
from caf_pipeline_tests.support.jackal_command_line import (
    jackal_command_line,
    new_wallet,
    wallet_with_space,
    with_wallet,
)
from caf_pipeline_tests.support.jackal_network import ADDRESS
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.new_ledgers import new_ledger, rows_of  # noqa: F401 - a fixture
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything

pytestmark = pytest.mark.thorough

NOWHERE = "http://127.0.0.1:9"


def lines_of(done):
    return [json.loads(line) for line in done.out.splitlines()]


@pytest.fixture
def wallet(network):
    """Return a wallet without files of other tests."""
    return wallet_with_space(network)


@pytest.fixture
def archived(caf, s3_server, new_bucket):
    """A command line with an archived source."""
    for number in range(20):
        new_bucket.put(f"key-{number:02d}", os.urandom(100_000))
    caf.settings(source_text(s3_server, new_bucket.name))
    archive_source(caf)
    return caf


def on(caf: CommandLine, ledger, **more: str) -> CommandLine:
    """The same command line with another database and no wallet."""
    environment = {
        name: value for name, value in caf.environment.items() if name != "JACKAL_MNEMONIC"
    }
    return dataclasses.replace(
        caf, environment=environment | {"CAF_DATABASE_URL": ledger.url} | more
    )


def test_a_rebuilt_ledger_plans_and_pays_nothing_again(
    archived, ledger, new_ledger, network, wallet
):
    fresh = new_ledger()
    caf = on(archived, fresh)
    keys = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    preview = caf("rebuild", "src", "--owner", wallet.address, "--dry-run", "--json", **keys)
    kinds = [(line["kind"], line.get("restored")) for line in lines_of(preview)[:-1]]
    count = len(ledger.chunks.list())
    assert kinds == [("listed", None)] * count + [("chunk", False)] * count
    assert fresh.lookup.sources() == []
    refused = caf("rebuild", "src", "--owner", wallet.address, **keys)
    expect_error(refused, 2, "--yes")
    assert all(f"block {chunk.start}, about 20" in refused.err for chunk in ledger.chunks.list())
    assert fresh.chunks.list() == []
    done = caf("rebuild", "src", "--owner", wallet.address, "--yes", "--json", **keys)
    assert done.status == 0, done.err
    *chunks, end = lines_of(done)[count:]
    assert {line["chunk"] for line in chunks} == {chunk.name for chunk in ledger.chunks.list()}
    assert end["files"] == {"chunk": len(chunks)}
    assert "transactions" in end["not_known"]
    before = rows_of(ledger)
    assert rows_of(fresh) == before
    charged = network.state()["charged"][wallet.address]
    again = with_wallet(caf, wallet.words)
    done = again("run")
    assert done.status == 0, done.err
    assert rows_of(fresh)["file_locations"] == before["file_locations"]
    assert network.state()["charged"][wallet.address] == charged
    assert len(fresh.chunks.list()) == len(chunks)
    assert again("prove", "src").status == 0
    assert len(again("get", "src", "key-03").out) == 100_000


def test_a_dry_rebuild_lists_losses_only_with_restorable_chunks(archived, new_ledger, wallet):
    lost = on(archived, new_ledger())("rebuild", "--owner", wallet.address, "--dry-run")
    assert all(f"  {name}: " in lost.out.decode() for name in rebuild.NOT_KNOWN)
    assert "50 blocks" in lost.err
    second = archived("rebuild", "--owner", wallet.address, "--dry-run")
    assert (second.status, second.out.decode().splitlines()) == (0, ["src: 2 known"])
    assert "50 blocks" not in second.err


@pytest.fixture
def caf(tmp_path, network, wallet, database_url):
    caf = jackal_command_line(tmp_path, network, wallet.words, CAF_DATABASE_URL=database_url)
    caf.settings(source_text(NOWHERE, "never-archived"))
    return caf


def test_nothing_listed_is_nothing_to_restore(caf):
    caf.settings(source_text(NOWHERE, "of-no-other-test"))
    done = caf("rebuild", "src")
    assert done.status == 0, done.err
    assert "nothing is listed" in done.out.decode()


@pytest.mark.parametrize(
    "address",
    [
        "jkl1",
        ADDRESS[:-1] + ("q" if ADDRESS[-1] != "q" else "p"),
        ADDRESS.upper(),
        "cosmos1" + ADDRESS[4:],
        "",
    ],
)
def test_an_invalid_address_is_refused(caf, address):
    expect_error(caf("rebuild", "src", "--owner", address), 2, "address")


def test_a_rebuild_without_wallet_and_owner_is_refused(caf):
    expect_error(caf("rebuild", "src", JACKAL_MNEMONIC=""), 3, "--owner")


def test_archive_without_uploads_exits_with_1(caf, network, wallet):
    with httpx.Client() as client:
        user = ChainUser(network, client, wallet.words)
        post = user.post(random_content(1000), note=archive_note("a" * 32))
    done = caf("rebuild", "src", "--json")
    expect_error(done, 1, "1 listed file")
    assert lines_of(done)[0]["kind"] == "undecided"
    assert lines_of(done)[0]["start"] == post.start


def test_a_wallet_without_files_is_reported(caf):
    done = caf("rebuild", "src", "--owner", new_wallet().address)
    assert "src: nothing is listed" in done.out.decode()
    assert "--owner" in done.err


def test_an_archive_in_a_folder_is_rebuilt(tmp_path, ledger, new_ledger):
    context = a_run_context(
        tmp_path, MemorySource({f"key-{number}": os.urandom(1000) for number in range(9)}), ledger
    )
    archive_everything(context)
    fresh = new_ledger()
    caf = CommandLine(
        tmp_path, {"CAF_DATABASE_URL": fresh.url, "CAF_STORE__FOLDER": str(tmp_path / "store")}
    )
    caf.settings('[sources.src]\nbucket = "b"\n')
    done = caf("rebuild", "--yes")
    assert done.status == 0, done.err
    assert f"src: {counted(len(fresh.chunks.list()), 'chunk')}\n" in done.out.decode()
    assert "9 objects, 0 skipped, read from 1 of 1 listed copy" in done.out.decode()
    assert rows_of(fresh) == rows_of(ledger)
    assert lines_of(caf("rebuild", "--json"))[0]["kind"] == "known"


def test_far_fewer_bytes_are_read_than_the_chunk_has(tmp_path, ledger, new_ledger, monkeypatch):
    bodies = {f"key-{number}": os.urandom(8 << 20) for number in range(3)}
    archive_everything(a_run_context(tmp_path, MemorySource(bodies), ledger, target="64MiB"))
    read, whole = [], DirectoryStore.read

    def counted(self, posting, start_byte, end_byte, **more):
        read.append(end_byte - start_byte)
        return whole(self, posting, start_byte, end_byte, **more)

    monkeypatch.setattr(DirectoryStore, "read", counted)
    (outcome,) = rebuild.rebuild(a_run_context(tmp_path, MemorySource({}), new_ledger()))
    assert outcome.rows == 3
    assert 0 < sum(read) < outcome.finding.file.posting.stored_size_bytes / 10


def test_a_folder_refuses_the_option_owner(caf):
    expect_error(
        caf("rebuild", "src", "--owner", ADDRESS, CAF_STORE__KIND="directory"), 2, "--owner"
    )
