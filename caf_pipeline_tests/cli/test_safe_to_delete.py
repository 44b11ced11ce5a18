"""`caf safe-to-delete`: output, exit statuses, and what a kill leaves."""

import csv
import json
import os
import re
import signal
import time
from dataclasses import dataclass

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.maintenance.scrub import prove_chunk
from caf_pipeline.run_context import RunContext
from caf_pipeline.settings import load_settings
from caf_pipeline.wiring import open_run_context
from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.support.command_line import CommandLine, expect_error, source_text
from caf_pipeline_tests.support.deletion_lists import next_window
from caf_pipeline_tests.support.jackal_command_line import jackal_command_line
from caf_pipeline_tests.support.jackal_network import ADDRESS, BLOCK_SECONDS, FUNDS, SPACE, WORDS
from caf_pipeline_tests.support.run_contexts import archive_everything
from caf_pipeline_tests.support.s3_server import Bucket

pytestmark = pytest.mark.thorough

KEYS = [f"some/key-{number:02d}" for number in range(12)]


@dataclass
class Archived:
    """A bucket of two chunks on Jackal, and its command line."""

    caf: CommandLine
    bucket: Bucket
    network: LoopbackNetwork
    context: RunContext

    def __call__(self, *arguments, **more):
        return self.caf("safe-to-delete", *arguments, **more)

    @property
    def ledger(self):
        return self.context.ledger

    def pass_window(self) -> None:
        """Prove the chunks, then wait for the next window."""
        for chunk in self.ledger.chunks.list("src", [ChunkState.LOCATED]):
            assert prove_chunk(self.context, chunk.name).proven
        next_window(self.context, self.network)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """A network whose windows are longer than several commands take on a busy machine."""
    folder = tmp_path_factory.mktemp("jackal")
    options = {
        "providers": 4,
        "lcds": 2,
        "block_seconds": BLOCK_SECONDS,
        "proof_window": 1200,
        "no_zero_draws": 1,
    }
    with LoopbackNetwork(
        folder, fund={ADDRESS: FUNDS}, space={ADDRESS: SPACE}, **options
    ) as running:
        yield running


@pytest.fixture
def caf(tmp_path, network, database_url, s3_server, new_bucket) -> CommandLine:
    """A command line with an empty source `src`."""
    caf = jackal_command_line(tmp_path, network, WORDS, CAF_DATABASE_URL=database_url)
    caf.settings(source_text(s3_server, new_bucket.name))
    return caf


@pytest.fixture
def archived(caf, network, ledger, new_bucket, monkeypatch):
    for key in KEYS:
        new_bucket.put(key, os.urandom(100_000))
    for name, value in caf.environment.items():
        monkeypatch.setenv(name, value)
    context = open_run_context(
        load_settings(caf.folder / "caf.toml"), "src", run="test", ledger=ledger
    )
    try:
        archive_everything(context)
        yield Archived(caf, new_bucket, network, context)
    finally:
        context.close()


@pytest.fixture
def safe(archived) -> Archived:
    archived.pass_window()
    return archived


def listed(file) -> list[list[str]]:
    with file.open(encoding="ascii", newline="") as opened:
        return list(csv.reader(opened))


def test_a_list_is_written_when_everything_is_safe(safe):
    done = safe("src")
    assert done.status == 0, done.err
    assert listed(safe.caf.folder / "src-safe-to-delete.csv") == [
        [safe.bucket.name, key] for key in KEYS
    ]
    out = done.out.decode()
    assert "src: 12 of 12 objects" in out
    assert "(1.1 MiB of 1.1 MiB)" in out
    assert "src-safe-to-delete.csv, columns Bucket,Key" in out
    assert "reading back 2 chunks" in done.err
    again = safe("src", "--json", "--no-read-back", "-o", "again.csv")
    assert again.status == 0, again.err
    shown = json.loads(again.out)
    assert (shown["safe_objects"], shown["objects"], shown["chunks_read_back"], shown["list"]) == (
        12,
        12,
        0,
        "again.csv",
    )
    assert shown["columns"] == ["Bucket", "Key"]
    assert "stranger" in shown["caution"]


def test_unsafe_objects_are_printed_by_reason(safe):
    safe.bucket.put(KEYS[3], bytes(100_000))
    safe.bucket.put("new\x1b[31m", b"new")
    safe.bucket.delete(KEYS[5])
    done = safe("src", "--report", "rest.csv")
    expect_error(done, 1, "2 of 12 objects", "caf run src")
    assert len(listed(safe.caf.folder / "src-safe-to-delete.csv")) == 10
    out = done.out.decode()
    assert re.search(r"1 object \(97.7 KiB\) changed .*:\n  some/key-03", out)
    assert re.search(r"1 object \(3 B\) not archived: .*:\n  new\\x1b\[31m", out)
    assert re.search("1 archived key .*: some/key-05", out)
    header, *rest = listed(safe.caf.folder / "rest.csv")
    assert [(line[0], line[header.index("reason")]) for line in rest] == [
        ("new%1B%5B31m", "not_planned"),
        (KEYS[3], "changed"),
    ]
    lines = [json.loads(line) for line in safe("src", "--json").out.splitlines()]
    assert [line.get("reason") for line in lines] == [None, "changed", "not_planned"]
    assert lines[1]["examples"] == [{"key": KEYS[3], "detail": None}]


def test_nothing_is_listed_before_the_second_window(archived):
    done = archived("src")
    expect_error(done, 1, "12 of 12 objects", "next proof window")
    out = done.out.decode()
    assert "none of 12 objects" in out
    assert re.search(r" 1 of 2 proof windows .* in about \d+ (s|minutes)", out)
    assert "… and 7 more" in out
    assert not (archived.caf.folder / "src-safe-to-delete.csv").exists()


def test_unusable_output_files_are_refused(archived):
    foreign = archived.caf.folder / "theirs.csv"
    foreign.write_text("name,age\n")
    expect_error(archived("src", "-o", "theirs.csv"), 2, "theirs.csv exists")
    expect_error(archived("src", "--report", "theirs.csv"), 2, "theirs.csv exists")
    expect_error(archived("src", "--report", "rest.txt"), 2, "Parquet or CSV")
    expect_error(archived("src", "-o", "no/such/list.csv"), 2, "no/such/list.csv")
    assert foreign.read_text() == "name,age\n"


def test_nothing_is_safe_before_anything_is_archived(caf, new_bucket):
    done = caf("safe-to-delete", "src")
    assert done.status == 0, done.err
    assert "nothing to delete" in done.out.decode()
    new_bucket.put("a", b"a")
    expect_error(caf("safe-to-delete", "src"), 1, "1 of 1 object", "caf run src")


def test_a_killed_read_back_continues_with_the_next_chunk(safe):
    first, second = safe.ledger.chunks.list("src", [ChunkState.LOCATED])
    (safe.caf.folder / "src-safe-to-delete.csv").write_text(f"{safe.bucket.name},old\n")
    for number in range(4):
        safe.network.misbehave(provider=number, download_rate=400_000)
    process = safe.caf.start("safe-to-delete", "src")
    while not safe.ledger.chunks.get(first.name).read_back_at:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert safe.ledger.chunks.get(second.name).read_back_at is None
    assert listed(safe.caf.folder / "src-safe-to-delete.csv") == [[safe.bucket.name, "old"]]
    read_at = safe.ledger.chunks.get(first.name).read_back_at
    safe.network.well_behaved()
    done = safe("src")
    assert done.status == 0, done.err
    assert "reading back 1 chunk," in done.err
    assert safe.ledger.chunks.get(first.name).read_back_at == read_at
    assert len(listed(safe.caf.folder / "src-safe-to-delete.csv")) == len(KEYS)
    partial = {path.name for path in safe.caf.folder.iterdir() if path.name.endswith(".part")}
    assert partial == set()
