"""`caf adopt` on a Jackal network: files of other programs, lies, a lost ledger."""

import dataclasses
import json
import os

import httpx
import pytest

from caf_pipeline.caf.archive import CafWriter
from caf_pipeline_tests.support.chain_user import ChainUser
from caf_pipeline_tests.support.command_line import (
    CommandLine,
    archive_source,
    expect_error,
    source_text,
)
from caf_pipeline_tests.support.jackal_command_line import jackal_command_line, wallet_with_space
from caf_pipeline_tests.support.new_ledgers import new_ledger, rows_of  # noqa: F401 - a fixture

pytest_plugins = ["caf_pipeline_tests.support.jackal_network"]


def lines_of(done):
    return [json.loads(line) for line in done.out.splitlines()]


@dataclasses.dataclass
class OtherProgram:
    """Posts CAF files without `caf`, from the same wallet or another."""

    folder: object
    network: object
    client: httpx.Client
    words: str

    def post(self, name, members, words=None):
        """Write and store a CAF file; return its path."""
        path = self.folder / name
        with CafWriter(path) as writer:
            for key, body in members.items():
                writer.add(key, len(body), [body])
            writer.seal()
            writer.publish()
        user = ChainUser(self.network, self.client, words or self.words)
        posted = user.post(path.read_bytes(), note='{"description":"caf"}')
        for provider in range(3):
            user.upload(posted, provider)
        self.network.wait_for(
            lambda state: any(
                (file["start"], len(file["providers"])) == (posted.start, 3)
                for file in state["files"]
            )
        )
        return path


@pytest.fixture
def caf(tmp_path, network, database_url, s3_server, new_bucket) -> CommandLine:
    caf = jackal_command_line(
        tmp_path, network, wallet_with_space(network).words, CAF_DATABASE_URL=database_url
    )
    caf.settings(source_text(s3_server, new_bucket.name))
    return caf


@pytest.fixture
def other(caf, tmp_path, network):
    with httpx.Client() as client:
        yield OtherProgram(tmp_path, network, client, caf.environment["JACKAL_MNEMONIC"])


@pytest.fixture
def bodies(caf, new_bucket):
    """A bucket with an inventory and nothing archived."""
    bodies = {f"a/key-{number}": os.urandom(40_000) for number in range(6)}
    for key, body in bodies.items():
        new_bucket.put(key, body, ContentType="text/odd")
    assert caf("plan", "src", "--dry-run").status == 0
    return bodies


def part(bodies, *numbers):
    return {f"a/key-{number}": bodies[f"a/key-{number}"] for number in numbers}


@pytest.fixture
def posted(other, bodies):
    """Return the path of the first of two files, which hold three of the six objects."""
    first = other.post("1.caf", {f"task/{key}": body for key, body in part(bodies, 0, 1).items()})
    other.post(
        "2.caf",
        {f"task/{key}": body for key, body in part(bodies, 1, 2).items()} | {"task/unknown": b"x"},
    )
    return first


def test_posted_files_are_adopted_once_and_never_paid_again(caf, posted, network, ledger):
    charged = network.state()["charged"]
    dry = caf("adopt", "src", str(posted), "--strip", "1", "--dry-run", "--json")
    file, sums = lines_of(dry)
    assert (dry.status, file["kind"], file["would_adopt"]) == (0, "would_adopt", 2)
    assert (sums["files"], sums["would_adopt"], ledger.chunks.list()) == ({"would_adopt": 1}, 2, [])
    done = caf("adopt", "src", str(posted), "--strip", "1")
    assert done.status == 0, done.err
    assert "2 objects of 2 members" in done.out.decode()
    *_, sums = lines = lines_of(caf("adopt", "src", "--from-chain", "--strip", "1", "--json"))
    assert (sums["files"], sums["adopted"]) == ({"adopted": 1, "known": 1}, 1)
    assert {line["member"]: line["left_out"] for line in lines if "member" in line} == {
        "task/a/key-1": "archived_already",
        "task/unknown": "not_in_inventory",
    }
    adopted = rows_of(ledger)
    assert lines_of(caf("adopt", "src", "--from-chain", "--strip", "1", "--json"))[-1]["files"] == {
        "known": 2
    }
    assert rows_of(ledger) == adopted
    assert network.state()["charged"] == charged
    expect_error(
        caf("adopt", "src", "--from-chain", str(posted)), 2, "takes files, or --from-chain"
    )


@pytest.mark.thorough
def test_every_command_works_with_adopted_chunks(caf, posted, bodies, ledger):
    assert caf("adopt", "src", "--from-chain", "--strip", "1").status == 0
    adopted = {chunk.name for chunk in ledger.chunks.list()}
    archive_source(caf)
    rows = rows_of(ledger)["file_locations"]
    assert len(rows) == 6
    assert {row["file_path"] for row in rows if row["chunk"] in adopted} == set(
        part(bodies, 0, 1, 2)
    )
    assert caf("get", "src", "a/key-0").out == bodies["a/key-0"]
    assert len(caf("ls", "src", "a/", "--recursive").out.splitlines()) >= 6
    assert b"a/key-2" in caf("find", "src", "a/key-2").out
    assert caf("ls", "src", "--recursive", "--as-of", "2099-01-01T00:00:00Z").status == 0
    assert b"6 objects" in caf("du", "src").out
    name = min(adopted)
    assert lines_of(caf("plans", "chunk", name, "--json"))[0]["adopted"]
    assert b"not planned" in caf("plans", "chunk", name).out
    assert len(lines_of(caf("plans", "src", "--json"))) == 1
    for command in (
        ("check", "src", "--full"),
        ("jackal", "files", "src"),
        ("prove", "src"),
        ("status",),
        ("doctor",),
    ):
        shown = caf(*command)
        assert shown.status == 0, (command, shown.out, shown.err)
    assert b"0 missing" in caf("jackal", "files", "src").out
    assert caf("export-references", "src", "-o", "references.json").status == 0
    unsafe = {
        line["reason"]: line["objects"]
        for line in lines_of(caf("safe-to-delete", "src", "--json"))
        if "reason" in line
    }
    assert unsafe["adopted"] == 3


@pytest.mark.thorough
def test_adopted_objects_restore_without_headers_and_survive_a_rebuild(  # noqa: PLR0917 - fixtures
    caf, posted, bodies, ledger, new_ledger, new_bucket
):
    assert caf("adopt", "src", "--from-chain", "--strip", "1").status == 0
    archive_source(caf)
    to = f"s3://{new_bucket.name}-back"
    new_bucket.client.create_bucket(Bucket=f"{new_bucket.name}-back")
    restored = caf("restore", "src", to, "--endpoint-url", new_bucket.endpoint)
    assert restored.status == 0, restored.err
    assert "3 objects" in restored.err
    for key, kind in (("a/key-0", "binary/octet-stream"), ("a/key-5", "text/odd")):
        there = new_bucket.client.get_object(Bucket=f"{new_bucket.name}-back", Key=key)
        assert (there["Body"].read(), there["ContentType"]) == (bodies[key], kind)
    assert "6 there already" in caf("restore", "src", to, "--endpoint-url", new_bucket.endpoint).err

    fresh = new_ledger()
    lost = dataclasses.replace(caf, environment=caf.environment | {"CAF_DATABASE_URL": fresh.url})
    rebuilt = lost("rebuild", "src", "--yes")
    assert rebuilt.status == 0, rebuilt.err
    assert "caf adopt SOURCE --from-chain" in rebuilt.out.decode()
    assert lines_of(lost("adopt", "src", "--from-chain", "--strip", "1", "--json"))[-1][
        "files"
    ] == {"adopted": 2, "known": 1}
    assert {row["file_path"]: row["sha256"] for row in rows_of(fresh)["file_locations"]} == {
        row["file_path"]: row["sha256"] for row in rows_of(ledger)["file_locations"]
    }
    assert len(fresh.chunks.list()) == 3


@pytest.mark.thorough
def test_strangers_and_lying_providers_are_not_trusted(caf, other, bodies, network, ledger):
    strange = other.post("strange.caf", part(bodies, 0), wallet_with_space(network).words)
    expect_error(caf("adopt", "src", str(strange)), 7, "on the chain")
    path = other.post("ours.caf", part(bodies, 1))
    network.misbehave(provider=0, flip_byte=30_000)
    for arguments in ((str(path),), ("--from-chain",)):
        lied = caf("adopt", "src", *arguments)
        expect_error(lied, 7, "2 of 3 copies", network.provider_addresses[0])
    assert ledger.chunks.list() == []
    network.well_behaved()
    assert caf("adopt", "src", str(path), str(strange)).status == 7
    assert [row["file_path"] for row in rows_of(ledger)["file_locations"]] == ["a/key-1"]
