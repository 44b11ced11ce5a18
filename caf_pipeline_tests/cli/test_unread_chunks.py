"""Commands state that a rebuilt chunk was not compared with its Merkle root, until it was."""

import json
import os
from dataclasses import replace

import pytest

from caf_pipeline.errors import IntegrityError, NotProven
from caf_pipeline_tests.support.command_line import KEYS, CommandLine, expect_error, opened_context
from caf_pipeline_tests.support.forged_chunks import Forgery, put
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.private_contexts import encrypt, sealed_again
from caf_pipeline_tests.support.private_source import IDENTITY, WITH_IDENTITY, private_text
from caf_pipeline_tests.support.roles import granted_roles

RIGHT = {key: os.urandom(70_000) for key in "ab"}
FORGED = {key: os.urandom(70_000) for key in "ab"}
UNREAD = "a rebuild restored"


def a_command_line(folder, url, *, is_forged):
    """A rebuilt ledger of one private chunk, which is forged in the whole store or not."""
    caf = CommandLine(folder, KEYS | WITH_IDENTITY | {"CAF_DATABASE_URL": url})
    caf.settings(private_text("http://127.0.0.1:9", "b"))
    with opened_context(caf, objects=MemorySource({})) as context:
        path = Forgery(context.archive_id, RIGHT).write(folder / "chunk")
        begin_sha256 = encrypt(path, IDENTITY.recipient)
        put(context.store, path, context.archive_id, header_sha256=begin_sha256)
        other = Forgery(context.archive_id, FORGED).write(folder / "other").read_bytes()
    if is_forged:
        (file,) = caf.folder.glob(".caf/store/chunks/*.caf")
        file.write_bytes(sealed_again(path.read_bytes(), other, IDENTITY))
    done = caf("rebuild", "src", "--yes")
    assert done.status == 0, done.err
    assert "unread" in done.err
    return caf


@pytest.fixture
def caf(tmp_path, database_url):
    return a_command_line(tmp_path, database_url, is_forged=False)


@pytest.fixture
def forged(tmp_path, database_url):
    return a_command_line(tmp_path, database_url, is_forged=True)


@pytest.mark.parametrize(
    "command", [("prove", "src"), ("check", "src"), ("check", "src", "--full")], ids=" ".join
)
def test_get_notes_an_unread_chunk_until_a_command_read_it(caf, command):
    done = caf("get", "src", "a")
    assert done.out == RIGHT["a"]
    assert UNREAD in done.err
    done = caf(*command)
    assert done.status == 0, done.err
    assert UNREAD in done.err
    for again in (("get", "src", "a"), command):
        assert UNREAD not in caf(*again).err


def test_restore_notes_objects_of_unread_chunks(caf, tmp_path):
    done = caf("restore", "src", str(tmp_path / "out"))
    assert done.status == 0
    assert "2 objects" in done.err
    assert UNREAD in done.err


def test_get_returns_a_forged_chunk_with_a_note(forged):
    done = forged("get", "src", "a")
    assert done.out == FORGED["a"]
    assert UNREAD in done.err


def test_prove_reads_a_forged_chunk_whole_first(forged):
    expect_error(forged("prove", "src"), 1, "damaged")
    done = forged("get", "src", "a")
    assert UNREAD in done.err
    assert "damaged" in done.err


@pytest.mark.parametrize("arguments", [(), ("--full",)], ids=["sample", "full"])
def test_check_finds_no_forged_object_right(forged, arguments):
    done = forged("check", "src", "--json", *arguments)
    assert done.status == IntegrityError.exit_code
    *wrong, sums = [json.loads(line) for line in done.out.splitlines()]
    assert (sums["objects_checked"], sums["bytes_right"]) == (len(wrong), 0)
    assert {line["result"] for line in wrong} == {"wrong"}


def test_check_reads_no_chunk_whole_for_other_objects(caf):
    done = caf("check", "src", "z", "--full")
    assert done.status == 11
    assert UNREAD not in done.err
    assert UNREAD in caf("get", "src", "a").err


def test_a_reader_counts_what_it_cannot_compare(caf, database_url):
    with granted_roles(database_url) as url_as:
        variables = caf.environment | {"CAF_DATABASE_URL": url_as("caf_reader")}
        reader = replace(caf, environment=variables)
        expect_error(reader("check", "src", "--full"), NotProven.exit_code, "Merkle root")
        (sums,) = [json.loads(line) for line in reader("check", "src", "--json").out.splitlines()]
    assert sums["unread_chunks"] == 1
    assert UNREAD in caf("get", "src", "a").err
