"""`caf check`: a right archive, wrong bytes, a lost chunk."""

import json
import os
import queue
import re

import psycopg
import pytest

from caf_pipeline.cli import terminal
from caf_pipeline.errors import IntegrityError, StoreUnreachable
from caf_pipeline.retrieval import check
from caf_pipeline.retrieval.check import CheckedObject
from caf_pipeline.store.directory import MARKER, DirectoryReader
from caf_pipeline_tests.support.command_line import (
    KEYS,
    CommandLine,
    archive_source,
    expect_error,
    source_text,
)
from caf_pipeline_tests.support.private_contexts import IDENTITY, RECIPIENT

BODIES = {f"{folder}/{number}": os.urandom(10_000) for folder in "ab" for number in range(4)} | {
    "empty": b""
}


@pytest.fixture
def caf(tmp_path, database_url, s3_server, new_bucket):
    caf = CommandLine(tmp_path, KEYS | {"CAF_DATABASE_URL": database_url})
    for key, body in BODIES.items():
        new_bucket.put(key, body)
    caf.settings(source_text(s3_server, new_bucket.name))
    archive_source(caf)
    return caf


def spoil(caf, key):
    """Replace the bytes of an object in the store."""
    (file,) = caf.folder.glob(".caf/store/chunks/*.caf")
    data = file.read_bytes()
    file.write_bytes(data.replace(BODIES[key], BODIES[key][::-1]))


def records(done):
    return [json.loads(line) for line in done.out.splitlines()]


def change(database_url, statement):
    with psycopg.connect(database_url) as connection:
        connection.execute(statement)


def test_an_altered_row_is_told_from_a_damaged_store(caf, database_url):
    change(database_url, "UPDATE file_locations SET sha256 = sha256('x') WHERE file_path = 'a/1'")
    refused = caf("get", "src", "a/1")
    assert (refused.status, refused.out) == (9, b"")
    assert "altered" in refused.err
    assert "caf repair" not in refused.err
    done = caf("check", "src", "--full", "--json")
    wrong, sums = records(done)
    assert (wrong["key"], wrong["result"]) == ("a/1", "altered")
    assert (done.status, sums["wrong"], sums["altered"]) == (9, 0, 1)
    assert "caf repair" not in done.err
    assert b"damaged" not in caf("status").out
    change(database_url, "DELETE FROM file_locations WHERE file_path IN ('a/1', 'a/2')")
    assert caf("rebuild", "src").status == 0
    assert caf("check", "src", "--full").status == 0


def test_right_objects_are_counted(caf):
    done = caf("check", "src", "--full")
    assert (done.status, done.err) == (0, "")
    assert "9 objects of 9 read, 0 wrong, 0 " in done.out.decode()
    (sums,) = records(caf("check", "src", "a/", "--full", "--json"))
    assert (
        sums["objects_checked"],
        sums["objects_listed"],
        sums["bytes_right"],
        sums["wrong"],
    ) == (4, 4, 40_000, 0)


def test_a_sample_reads_at_least_one_object(caf):
    (sums,) = records(caf("check", "src", "--json"))
    assert (sums["objects_listed"], 1 <= sums["objects_checked"] <= 9) == (9, True)
    (sums,) = records(caf("check", "src", "--sample", "100%", "--json"))
    assert sums["objects_checked"] == 9


def test_wrong_bytes_name_the_key_and_exit_with_9(caf):
    spoil(caf, "b/2")
    done = caf("check", "src", "--full")
    expect_error(done, 9, "1 object of 'src'", "caf repair")
    assert done.out.decode().startswith("wrong   b/2: ")
    assert "9 objects of 9 read, 1 wrong, 0 " in done.out.decode()
    wrong, sums = records(caf("check", "src", "--full", "--json"))
    assert (wrong["key"], wrong["result"], sums["wrong"], sums["unread"]) == ("b/2", "wrong", 1, 0)
    assert caf("check", "src", "a/", "--full").status == 0


def test_results_before_a_network_failure_are_printed(caf, tmp_path, monkeypatch):
    def read(self, posting, start_byte, end_byte, *, provider=None):
        for piece in read_original(self, posting, start_byte, end_byte, provider=provider):
            yield piece[: max(0, away_from - start_byte)]
            start_byte += len(piece)
            if start_byte > away_from:
                raise StoreUnreachable("the network is away")

    spoil(caf, "a/2")
    (file,) = caf.folder.glob(".caf/store/chunks/*.caf")
    away_from, read_original = file.read_bytes().find(BODIES["b/0"]), DirectoryReader.read
    monkeypatch.setattr(DirectoryReader, "read", read)
    monkeypatch.setattr(check, "UNREAD_IN_A_ROW", 2)

    done = caf("check", "src", "--full", "--json")
    expect_error(done, 9, "1 object of 'src'", "2 objects in a row")
    assert (records(done)[-1]["wrong"], records(done)[-1]["unread"]) == (1, 2)
    done = caf("check", "src", "b/", "--full")
    expect_error(done, 7, "2 objects in a row")
    assert "2 objects of 4 read, 0 wrong, 2 " in done.out.decode()

    done = caf("restore", "src", str(tmp_path / "out"), "--json")
    expect_error(done, 9, "3 objects of 6", "2 objects in a row")
    assert (records(done)[-1]["restored"], records(done)[-1]["failed"]) == (3, 3)
    done = caf("restore", "src", "b/", str(tmp_path / "out"))
    expect_error(done, 7, "2 objects in a row")
    assert "of 2 objects 0 written" in done.err


def test_a_lost_chunk_is_a_permanent_error(caf, tmp_path):
    (file,) = caf.folder.glob(".caf/store/chunks/*.caf")
    file.unlink()
    done = caf("check", "src", "a/", "--full")
    expect_error(done, 9, "4 objects")
    assert done.out.count(b"no copy has 'a/") == 4
    expect_error(caf("get", "src", "a/0"), 9, "no copy has 'a/0'", "'caf repair'")
    done = caf("restore", "src", "a/", str(tmp_path / "out"))
    expect_error(done, 9, "4 objects of 4", "'caf repair'")
    assert "goes on" not in done.err


def test_a_lost_chunk_file_is_recorded_and_repaired(caf):
    (file,) = caf.folder.glob(".caf/store/chunks/*.caf")
    file.unlink()
    expect_error(caf("check", "src", "a/", "--full"), 9, "'caf repair src'")
    states = [
        json.loads(line).get("state") for line in caf("status", "src", "--json").out.splitlines()
    ]
    assert "damaged" in states
    assert caf("prove", "src").status == 1
    assert caf("repair", "src").status == 0
    assert caf("check", "src", "--full").status == 0


def test_a_folder_that_is_away_is_named_in_the_hint(caf):
    (caf.folder / ".caf" / "store" / MARKER).unlink()
    expect_error(
        caf("check", "src", "--full"), 7, "8 objects", "mount its disk"
    )  # the empty object needs no store


def test_wrong_bytes_mark_the_chunk_as_damaged(caf):
    spoil(caf, "b/2")
    assert caf("check", "src", "--full").status == 9
    expect_error(caf("prove", "src"), 1, "1 damaged")


def test_one_wrong_copy_marks_the_chunk_as_damaged(caf, monkeypatch):
    def one_copy_is_wrong(locations, store):
        for location in locations:
            failed = (
                {"provider": IntegrityError("other bytes")} if location.row.key == "b/2" else {}
            )
            yield CheckedObject(location, failed=failed)

    spoil(caf, "b/2")
    monkeypatch.setattr("caf_pipeline.cli.check.check_objects", one_copy_is_wrong)
    assert caf("check", "src", "--full").status == 0
    assert "damaged" in [
        json.loads(line).get("state") for line in caf("status", "src", "--json").out.splitlines()
    ]


@pytest.mark.parametrize(
    ("total_bytes", "line"),
    [(None, "2 objects, 2.0 KiB, .*/s$"), (4096, "2 objects, 2.0 KiB of 4.0 KiB, .*/s, .* left$")],
)
def test_without_a_terminal_progress_is_printed_as_lines(monkeypatch, total_bytes, line):
    notes = queue.SimpleQueue()
    monkeypatch.setattr(terminal, "note", notes.put)
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.001)
    with terminal.object_progress("checking src", total_bytes) as advance:
        advance(1024)
        advance(1024)
        while not re.match(f"checking src: {line}", notes.get()):
            pass


def test_encrypted_objects_are_compared_with_an_identity(
    tmp_path, database_url, s3_server, new_bucket
):
    caf = CommandLine(tmp_path, KEYS | {"CAF_DATABASE_URL": database_url})
    new_bucket.put("a", b"body")
    caf.settings(
        f'[encryption]\nrecipients = ["{RECIPIENT}"]\n'
        f'[sources.src]\nbucket = "{new_bucket.name}"\nendpoint_url = "{s3_server}"\n'
    )
    archive_source(caf)
    expect_error(caf("check", "src"), 3, "1 object of 'src'", "identity")
    (sums,) = records(caf("check", "src", "--json"))
    assert (sums["objects_checked"], sums["not_opened"]) == (0, 1)
    done = caf("check", "src", CAF_ENCRYPTION__IDENTITY=IDENTITY.reveal())
    assert (done.status, done.err) == (0, "")
