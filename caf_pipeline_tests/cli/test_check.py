"""`caf check`, as a user meets it: a right archive, bytes that are wrong, a chunk that is gone."""

import json
import os
import queue

import pytest

from caf_pipeline.cli import terminal
from caf_pipeline.errors import IntegrityError, StoreUnreachable
from caf_pipeline.retrieval import check, restore
from caf_pipeline.retrieval.check import CheckedObject
from caf_pipeline.store.directory import MARKER, DirectoryReader
from caf_pipeline_tests.cli.test_pipeline import KEYS, one_sentence
from caf_pipeline_tests.support.command_line import CommandLine, archive_source, source_text

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
    """Let the store have other bytes of an object."""
    (file,) = caf.folder.glob(".caf/store/chunks/*.caf")
    data = file.read_bytes()
    file.write_bytes(data.replace(BODIES[key], BODIES[key][::-1]))


def records(done):
    return [json.loads(line) for line in done.out.splitlines()]


def test_what_is_right_is_said_to_be(caf):
    done = caf("check", "src", "--full")
    assert (done.status, done.err) == (0, "")
    assert "9 objects of 9 read, 0 wrong, 0 could not be read" in done.out.decode()
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


def test_wrong_bytes_are_exit_status_9_and_the_key_is_named(caf):
    spoil(caf, "b/2")
    done = caf("check", "src", "--full")
    one_sentence(done, 9, "no provider gives 1 object of 'src' as archived", "caf repair")
    assert done.out.decode().startswith("wrong   b/2: ")
    assert "9 objects of 9 read, 1 wrong, 0 could not be read" in done.out.decode()
    wrong, sums = records(caf("check", "src", "--full", "--json"))
    assert (wrong["key"], wrong["result"], sums["wrong"], sums["unread"]) == ("b/2", "wrong", 1, 0)
    assert caf("check", "src", "a/", "--full").status == 0


def test_what_was_found_until_the_network_went_away_is_told(caf, tmp_path, monkeypatch):
    def read(self, posting, start_byte, end_byte, *, provider=None):
        for piece in given(self, posting, start_byte, end_byte, provider=provider):
            yield piece[: max(0, away_from - start_byte)]
            start_byte += len(piece)
            if start_byte > away_from:
                raise StoreUnreachable("the network is away")

    spoil(caf, "a/2")
    (file,) = caf.folder.glob(".caf/store/chunks/*.caf")
    away_from, given = file.read_bytes().find(BODIES["b/0"]), DirectoryReader.read
    monkeypatch.setattr(DirectoryReader, "read", read)
    monkeypatch.setattr(check, "UNREAD_IN_A_ROW", 2)
    monkeypatch.setattr(restore, "UNREAD_IN_A_ROW", 2)

    done = caf("check", "src", "--full", "--json")
    one_sentence(
        done,
        9,
        "no provider gives 1 object of 'src' as archived",
        "2 objects in a row could not be read",
    )
    assert (records(done)[-1]["wrong"], records(done)[-1]["unread"]) == (1, 2)
    done = caf("check", "src", "b/", "--full")
    one_sentence(done, 7, "2 objects in a row could not be read")
    assert "2 objects of 4 read, 0 wrong, 2 could not be read" in done.out.decode()

    done = caf("restore", "src", str(tmp_path / "out"), "--json")
    one_sentence(
        done, 9, "3 objects of 6 could not be restored", "2 objects in a row could not be read"
    )
    assert (records(done)[-1]["restored"], records(done)[-1]["failed"]) == (3, 3)
    done = caf("restore", "src", "b/", str(tmp_path / "out"))
    one_sentence(done, 7, "2 objects in a row could not be read")
    assert "of 2 objects 0 written" in done.err


def test_a_chunk_that_is_gone_is_said_to_be_and_that_no_other_try_gives_it(caf, tmp_path):
    (file,) = caf.folder.glob(".caf/store/chunks/*.caf")
    file.unlink()
    done = caf("check", "src", "a/", "--full")
    one_sentence(done, 9, "no provider gives 4 objects")
    assert done.out.count(b"no provider has 'a/") == 4
    one_sentence(
        caf("get", "src", "a/0"), 9, "no provider has 'a/0'", "'caf repair' stores its chunk again"
    )
    done = caf("restore", "src", "a/", str(tmp_path / "out"))
    one_sentence(done, 9, "4 objects of 4", "'caf repair'")
    assert "resumes" not in done.err


def test_a_lost_chunk_file_is_recorded_and_repaired(caf):
    (file,) = caf.folder.glob(".caf/store/chunks/*.caf")
    file.unlink()
    one_sentence(caf("check", "src", "a/", "--full"), 9, "'caf repair src'")
    states = [
        json.loads(line).get("state") for line in caf("status", "src", "--json").out.splitlines()
    ]
    assert "damaged" in states
    assert caf("prove", "src").status == 1
    assert caf("repair", "src").status == 0
    assert caf("check", "src", "--full").status == 0


def test_a_folder_that_is_away_is_named_in_the_hint(caf):
    (caf.folder / ".caf" / "store" / MARKER).unlink()
    one_sentence(
        caf("check", "src", "--full"), 7, "8 objects", "mount its disk"
    )  # the empty one needs no store


def test_wrong_bytes_of_an_object_mark_its_chunk_as_damaged(caf):
    spoil(caf, "b/2")
    assert caf("check", "src", "--full").status == 9
    one_sentence(caf("prove", "src"), 1, "1 damaged")


def test_a_wrong_copy_marks_the_chunk_though_another_copy_is_right(caf, monkeypatch):
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


def test_without_a_terminal_a_line_says_how_far_it_is(monkeypatch):
    said = queue.SimpleQueue()
    monkeypatch.setattr(terminal, "note", said.put)
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.001)
    with terminal.object_progress("checking src") as advance:
        advance(1024)
        advance(1024)
        while "checking src: 2 objects, 2.0 KiB, " not in said.get():
            pass


def test_what_cannot_be_checked_is_said(caf):
    one_sentence(
        caf("check", "src", "c/"), 11, "no key of source 'src' is archived and begins with 'c/'"
    )
    one_sentence(caf("check", "src", "--sample", "5"), 2, "'5' is not a share", "0.1%")
    one_sentence(caf("check", "src", "--sample", "0%"), 2, "is not a share")
    one_sentence(caf("check", "src", "--sample", ""), 2, "'' is not a share", "0.1%")
    for share in ("5%", ""):
        one_sentence(caf("check", "src", "--sample", share, "--full"), 2, "exclude each other")
