"""Commands for a private source: most need no identity, and those that read objects say so."""

import json
import os

import pytest

from caf_pipeline.encryption.identities import IDENTITY_VARIABLE
from caf_pipeline.errors import IdentityMissing, SettingsError
from caf_pipeline.formats import age
from caf_pipeline_tests.support.command_line import archive_source, expect_error
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.private_source import (
    IDENTITY,
    WITH_IDENTITY,
    private_command_line,
    private_text,
)

BODIES = {f"key-{number}": os.urandom(70_000) for number in range(9)}


@pytest.fixture(scope="module")
def database(databases):
    return databases.take()


@pytest.fixture(scope="module")
def caf(tmp_path_factory, database):
    return private_command_line(tmp_path_factory.mktemp("private"), database.url, BODIES)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out"


@pytest.mark.parametrize(
    "arguments",
    [("status",), ("ls", "src"), ("find", "src"), ("prove", "src"), ("repair", "src")],
    ids=lambda arguments: arguments[0],
)
def test_a_command_works_without_an_identity(caf, arguments):
    done = caf(*arguments)
    assert done.status == 0, done.err
    assert done.out or done.err


def test_every_chunk_is_proven_without_an_identity(caf):
    done = caf("prove", "src", "--json")
    chunks = [json.loads(line) for line in done.out.splitlines()]
    assert chunks
    assert {chunk["verdict"] for chunk in chunks} == {"proven"}


def test_get_without_an_identity_writes_nothing(caf, folder):
    done = caf("get", "src", "key-3")
    expect_error(done, IdentityMissing.exit_code, "identity")
    assert not done.out
    folder.mkdir()
    done = caf("get", "src", "key-3", "-o", str(folder / "file"))
    expect_error(done, IdentityMissing.exit_code, "identity")
    assert not list(folder.iterdir())


def test_restore_without_an_identity_writes_nothing(caf, folder):
    done = caf("restore", "src", str(folder))
    expect_error(done, IdentityMissing.exit_code, "identity")
    assert not folder.exists()


@pytest.mark.parametrize("command", ["get src key-3", "restore src out", "check src --full"])
def test_a_wrong_identity_is_named_beside_the_recipients(caf, command):
    other = age.new_identity()
    done = caf(*command.split(), **{IDENTITY_VARIABLE: other.reveal()})
    expect_error(done, SettingsError.exit_code, age.shortened(str(IDENTITY.recipient)))
    assert age.shortened(str(other.recipient)) in done.err
    assert (b"9 not opened" in done.out) == command.startswith("check")


def test_a_preview_of_a_restore_needs_no_identity(caf, folder):
    done = caf("restore", "src", str(folder), "--dry-run")
    assert done.status == 0, done.err
    assert not folder.exists()


def test_get_and_restore_decrypt_with_the_identity(caf, folder):
    done = caf("get", "src", "key-3", **WITH_IDENTITY)
    assert done.out == BODIES["key-3"]
    done = caf("restore", "src", str(folder), **WITH_IDENTITY)
    assert done.status == 0, done.err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == BODIES


@pytest.mark.parametrize("identity", [{}, WITH_IDENTITY], ids=["without", "with"])
@pytest.mark.parametrize("name", ["refs.json", "refs.parquet"])
def test_references_of_encrypted_chunks_are_refused(caf, tmp_path, database, name, identity):
    done = caf("export-references", "src", "-o", str(tmp_path / name), **identity)
    with connected(database) as connection:
        chunk = connection.execute("SELECT min(name) FROM caf_files").scalar_one()
    expect_error(done, 2, chunk)
    assert not (tmp_path / name).exists()


def test_references_of_a_mixed_source_name_the_encrypted_chunk(tmp_path, databases):
    database = databases.take()
    caf = private_command_line(tmp_path, database.url, BODIES)
    caf.settings(private_text("http://127.0.0.1:9", "b").replace('"false"', "true"))
    archive_source(caf, objects=MemorySource({**BODIES, "later": b"plain"}))
    with connected(database) as connection:
        rows = connection.execute("SELECT name, encrypted FROM chunks").fetchall()
    (encrypted,) = [row.name for row in rows if row.encrypted]
    assert len(rows) == 2
    done = caf("export-references", "src", "-o", str(tmp_path / "refs.json"))
    expect_error(done, 2, encrypted)
