"""`caf init`: the first caf.toml."""

import filecmp
import os
import pty
import stat
import subprocess
from pathlib import Path

import pytest

from caf_pipeline.errors import UsageError
from caf_pipeline.settings import load_settings
from caf_pipeline_tests.support.command_line import CAF, CommandLine

ROOT = Path(__file__).parents[2]
BUCKET = ("--bucket", "my-photos", "--yes")


@pytest.fixture
def caf(tmp_path):
    return CommandLine(tmp_path, {"CAF_CONFIG": ""})


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_private_source_gets_a_key(caf, tmp_path):
    assert caf("init", *BUCKET, "--store", "directory").status == 0
    assert files(tmp_path) == ["caf.toml", "identity.txt"]
    assert stat.S_IMODE((tmp_path / "identity.txt").stat().st_mode) == 0o600
    settings = load_settings(tmp_path / "caf.toml")
    assert settings.source("my-photos").bucket == "my-photos"
    assert settings.store.kind == "directory"
    assert len(settings.recipients_of("my-photos")) == 1
    assert b"identity here" in caf("keys", "show").out
    assert (tmp_path / "identity.txt").read_text().split()[-1] not in (
        tmp_path / "caf.toml"
    ).read_text()


def test_options_become_settings(caf, tmp_path):
    options = ("--source", "pics", "--prefix", 'a"b/', "--endpoint-url", "http://s3.example:9000")
    assert caf("init", *BUCKET, "--store", "jackal", "--public", *options).status == 0
    settings = load_settings(tmp_path / "caf.toml")
    source = settings.source("pics")
    assert (source.prefix, source.endpoint_url) == ('a"b/', "http://s3.example:9000")
    assert (source.public, settings.store.kind) == (True, "jackal")
    assert files(tmp_path) == ["caf.toml", "jackal-wallet"]
    assert settings.jackal.mnemonic_file == tmp_path / "jackal-wallet"


@pytest.mark.parametrize("place", ["celery", "kubernetes"])
def test_files_of_deploy_are_written_and_not_replaced(caf, tmp_path, place):
    assert caf("init", f"--{place}").status == 0
    assert files(tmp_path) == ["deploy"]
    written = tmp_path / "deploy" / place
    assert not filecmp.dircmp(written, ROOT / "deploy" / place).diff_files
    assert files(written) == files(ROOT / "deploy" / place)
    assert caf("init", f"--{place}").status == UsageError.exit_code


def test_a_bucket_and_files_of_deploy_are_written_at_once(caf, tmp_path):
    assert caf("init", *BUCKET, "--store", "directory", "--public", "--celery").status == 0
    assert files(tmp_path) == ["caf.toml", "deploy"]


def test_given_wallet_is_kept(caf, tmp_path):
    caf("jackal", "wallet", "new", "-o", "mine")
    words = (tmp_path / "mine").read_text()
    store = ("--store", "jackal", "--mnemonic-file", "mine", "--public")
    assert caf("init", *BUCKET, *store).status == 0
    assert files(tmp_path) == ["caf.toml", "mine"]
    assert (tmp_path / "mine").read_text() == words


def test_given_recipients_need_no_new_key(caf, tmp_path):
    recipient = caf("keys", "new", "-o", "key.txt").out.decode().strip()
    assert caf("init", *BUCKET, "--store", "directory", "--recipient", recipient).status == 0
    assert load_settings(tmp_path / "caf.toml").recipients_of("my-photos") == (recipient,)
    assert files(tmp_path) == ["caf.toml", "key.txt"]


@pytest.mark.parametrize("name", ["caf.toml", "caf.toml.new", "identity.txt", "jackal-wallet"])
def test_nothing_is_overwritten(caf, tmp_path, name):
    (tmp_path / name).write_text("mine")
    assert caf("init", *BUCKET, "--store", "jackal").status == 2
    assert files(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("--store", "directory"), 2),
        (("--bucket", "b"), 2),
        (("--bucket", "b", "--store", "directory", "--public", "--recipient", "age1x"), 2),
    ],
    ids=["no bucket", "no store", "public and recipient"],
)
def test_wrong_options_leave_nothing(caf, tmp_path, arguments, status):
    assert caf("init", *arguments).status == status
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--source", "my photos"),
        ("--source", "x" * 31),
        ("--bucket", "s3://b/"),
        ("--prefix", "p" * 1025),
        ("--endpoint-url", "localhost:9000"),
        ("--recipient", "age1x"),
        ("--mnemonic-file", "word " * 12),
    ],
)
def test_a_wrong_value_is_refused_by_its_option(caf, tmp_path, option, value):
    ran = caf("init", "--bucket", "b", "--store", "directory", option, value)
    assert ran.status == 3
    assert ran.err.startswith(f"caf: error: {option} ")
    assert "caf.toml.new" not in ran.err
    assert files(tmp_path) == []


def test_a_terminal_is_asked(caf, tmp_path):
    terminal_end, process_end = pty.openpty()
    with open(terminal_end, "wb", buffering=0) as terminal:
        process = subprocess.Popen(
            [CAF, "init"],
            stdin=process_end,
            cwd=tmp_path,
            env=caf.variables({}),
            stderr=subprocess.PIPE,
        )
        os.close(process_end)
        terminal.write(b"my.photos\n2024/\n\ny\n")
        assert process.communicate()[1]
    assert process.returncode == 0
    settings = load_settings(tmp_path / "caf.toml")
    assert (settings.source("my-photos").prefix, settings.store.kind) == ("2024/", "directory")
