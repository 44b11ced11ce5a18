"""`caf keys`."""

import json

import pytest

from caf_pipeline.encryption.identities import parse_identities
from caf_pipeline.formats import age
from caf_pipeline.settings import load_settings
from caf_pipeline_tests.support.command_line import CAF, CommandLine, expect_error
from caf_pipeline_tests.support.terminal_prompts import run_on_terminal


@pytest.fixture
def caf(tmp_path):
    command_line = CommandLine(tmp_path, {})
    command_line.settings("")
    return command_line


def identity_in(path, passphrase=None):
    (identity,) = parse_identities(path.read_bytes(), "x", lambda: passphrase)
    return identity


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ([], "identity.txt"),
        (["--recovery"], "recovery-identity.txt"),
        (["-o", "other"], "other"),
        (["--classic"], "identity.txt"),
    ],
)
def test_a_new_key_prints_its_recipient_alone(caf, options, name):
    done = caf("keys", "new", *options)
    assert done.status == 0, done.err
    path = caf.folder / name
    identity = identity_in(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert done.out.decode() == f"{identity.recipient}\n"
    assert identity.recipient.is_hybrid is ("--classic" not in options)
    assert "SECRET" not in done.err
    assert name in done.err


def test_recovery_key_is_to_be_kept_offline(caf):
    done = caf("keys", "new", "--recovery")
    assert "offline" in done.err
    assert "identity_file" not in done.err


def test_a_named_file_needs_no_settings(caf):
    (caf.folder / "caf.toml").unlink()
    assert caf("keys", "new", "-o", "key").status == 0
    expect_error(caf("keys", "new"), 3, "caf.toml")


def test_the_passphrase_of_the_environment_encrypts_the_identity(caf):
    done = caf("keys", "new", "--passphrase", CAF_PASSPHRASE="hush")
    path = caf.folder / "identity.txt"
    assert "hush" not in done.err
    assert b"SECRET" not in path.read_bytes()
    assert str(identity_in(path, "hush").recipient) == done.out.decode().strip()


def test_a_passphrase_needs_a_terminal(caf):
    expect_error(caf("keys", "new", "--passphrase"), 2, "CAF_PASSPHRASE")
    assert not (caf.folder / "identity.txt").exists()


def test_a_passphrase_is_asked_twice_on_a_terminal(caf):
    command = [CAF, "keys", "new", "--passphrase"]
    out = run_on_terminal(command, ["hush", "hush"], folder=caf.folder, environment=caf.variables())
    recipient = identity_in(caf.folder / "identity.txt", "hush").recipient
    assert str(recipient) == out.decode().strip()


def test_what_new_prints_becomes_the_settings(caf):
    recipients = [caf("keys", "new", *more).out.decode().strip() for more in ([], ["--recovery"])]
    with_key(caf, recipients)
    (source, *_) = shown(caf)["sources"]
    assert (source["recipients"], source["can_read"]) == (recipients, True)


def with_key(caf, recipients):
    caf.settings(
        f'[encryption]\nrecipients = {json.dumps(recipients)}\nidentity_file = "identity.txt"\n'
        '[sources.private]\nbucket = "b"\n'
        '[sources.public]\nbucket = "b"\nprefix = "p/"\npublic = true\n'
    )


def shown(caf, **more):
    done = caf("keys", "show", "--json", **more)
    assert done.status == 0, done.err
    return json.loads(done.out)


def test_show_lists_recipients_of_sources_and_identities(caf):
    recipient = caf("keys", "new").out.decode().strip()
    other = str(age.new_identity().recipient)
    with_key(caf, [other])
    private, public = shown(caf)["sources"]
    assert (private["public"], private["recipients"], private["can_read"]) == (
        False,
        [other],
        False,
    )
    assert (public["public"], public["recipients"], public["can_read"]) == (True, [], True)
    assert shown(caf)["identities"] == [recipient]


def test_show_never_prints_the_identity(caf):
    with_key(caf, [caf("keys", "new").out.decode().strip()])
    for done in (caf("keys", "show"), caf("keys", "show", "--json")):
        assert done.status == 0
        assert "SECRET" not in done.out.decode() + done.err


def test_show_works_without_an_identity(caf):
    caf.settings('[sources.src]\nbucket = "b"\n')
    done = caf("keys", "show")
    assert done.status == 0
    assert "caf keys new" in done.out.decode()


def test_show_refuses_an_identity_that_cannot_be_read(caf):
    with_key(caf, [str(age.new_identity().recipient)])
    expect_error(caf("keys", "show"), 3, "identity.txt")


def test_a_worker_key_is_a_valid_setting(caf):
    keys = [caf("keys", "worker").out.decode().strip() for _ in range(2)]
    assert keys[0] != keys[1]
    with caf.surroundings(CAF_WORKER_KEY=keys[0]):
        assert load_settings().worker_key.get_secret_value() == keys[0]
