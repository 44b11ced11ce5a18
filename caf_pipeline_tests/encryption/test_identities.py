"""Recipients and identities as the settings configure them."""

import os
import shlex
import shutil
import subprocess
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
from bech32 import bech32_encode

from caf_pipeline.encryption.identities import (
    Identities,
    encrypt_identity,
    has_single_recipient,
    require_recipients,
)
from caf_pipeline.errors import IdentityMissing, KeyRefused, NotPublic
from caf_pipeline.formats import age
from caf_pipeline.settings import PASSPHRASE_VARIABLE, EncryptionSettings, Settings
from caf_pipeline.system.secret_files import write_secret
from caf_pipeline_tests.support.command_line import CAF
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.terminal_prompts import run_on_terminal

HYBRID, CLASSIC = age.new_identity(), age.new_identity(hybrid=False)
PASSPHRASE = "correct horse"


@pytest.fixture(autouse=True)
def _no_passphrase(monkeypatch):
    monkeypatch.delenv(PASSPHRASE_VARIABLE, raising=False)


@pytest.fixture
def identity_file(tmp_path):
    """A function that makes an identity file, and returns the identities read from it."""

    def read(content, **options):
        path = tmp_path / "identity.txt"
        path.unlink(missing_ok=True)
        write_secret(path, content if isinstance(content, bytes) else content.encode())
        return Identities(EncryptionSettings(identity_file=path), **options)

    return read


def of_command(*words):
    return Identities(EncryptionSettings(identity_command=shlex.join(words)))


def test_a_file_has_comments_blank_lines_and_several_identities(identity_file):
    text = f"# created: now\n# public key: age1\n{HYBRID.reveal()}\r\n\n  {CLASSIC.reveal()} \n"
    assert identity_file(text).get() == (HYBRID, CLASSIC)


def test_the_environment_may_have_an_identity_file():
    settings = EncryptionSettings(identity=f"# mine\n{HYBRID.reveal()}\n")
    assert Identities(settings).get() == (HYBRID,)


def test_missing_identity_names_the_settings():
    with pytest.raises(IdentityMissing) as missing:
        Identities(EncryptionSettings()).get()
    assert "encryption.identity_file" in missing.value.hint
    assert "CAF_ENCRYPTION__IDENTITY" in missing.value.hint


def test_identities_are_loaded_once_for_all_threads(tmp_path):
    script = f"echo x >> {shlex.quote(str(tmp_path / 'calls'))}; echo {HYBRID.reveal()}"
    identities, together = of_command("sh", "-c", script), threading.Barrier(4)

    def get(_):
        together.wait(PATIENCE_SECONDS)
        return identities.get()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(get, range(4))) == [(HYBRID,)] * 4
    assert (tmp_path / "calls").read_text() == "x\n"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"# only a comment\n",
        str(HYBRID.recipient),
        HYBRID.reveal()[:-1],
        f"{CLASSIC.reveal()}\n{HYBRID.reveal()}x",
        b"\xff\xfe",
        b"age-encryption.org/v1\n-> X25519 x\n",
        b"-----BEGIN AGE ENCRYPTED FILE-----\n",
        age.make_header([HYBRID.recipient], bytes(16)) + bytes(48),
    ],
    ids=range(9),
)
def test_wrong_files_are_refused_without_showing_a_secret(identity_file, content):
    with pytest.raises(KeyRefused) as refused:
        identity_file(content).get()
    shown = "".join(traceback.format_exception(refused.value)) + refused.value.hint
    assert "identity.txt" in shown
    assert not any(identity.reveal()[20:-1] in shown for identity in (HYBRID, CLASSIC))


@pytest.mark.parametrize(
    "content", [HYBRID.reveal(), f"# created: now\n{HYBRID.reveal()}\n"], ids=["key", "comment"]
)
def test_a_byte_order_mark_is_skipped(identity_file, content):
    assert identity_file(b"\xef\xbb\xbf" + content.encode()).get() == (HYBRID,)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("AGE-PLUGIN-YUBIKEY-1QGQQZQVZQ9XXXX", "plugin"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaA==", "SSH"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE", "SSH"),
        ("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 me@here", "SSH"),
    ],
)
def test_plugin_and_ssh_identities_are_named_as_unsupported(identity_file, line, kind):
    with pytest.raises(KeyRefused, match=f"line 2.*{kind}.*not supported") as refused:
        identity_file(f"# mine\n{line}\n").get()
    assert "caf keys new" in refused.value.hint


@pytest.mark.parametrize(
    ("recipient", "kind"),
    [
        (bech32_encode("age1yubikey", [0] * 53), "plugin"),
        ("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5", "SSH"),
    ],
)
def test_plugin_and_ssh_recipients_are_named_as_unsupported(recipient, kind):
    with pytest.raises(KeyRefused, match=f"{kind}.*not supported"):
        age.parse_recipient(recipient)


def padded(size_bytes):
    return f"{HYBRID.reveal()}\n".encode().ljust(size_bytes, b"#")


def test_a_file_above_1_mib_is_refused(identity_file, tmp_path):
    assert identity_file(padded(1 << 20)).get() == (HYBRID,)
    with pytest.raises(KeyRefused, match="1048576 bytes"):
        identity_file(padded((1 << 20) + 1)).get()


def test_output_of_a_command_above_1_mib_is_refused(tmp_path):
    (tmp_path / "output").write_bytes(padded(1 << 20))
    assert of_command("cat", str(tmp_path / "output")).get() == (HYBRID,)
    with pytest.raises(KeyRefused, match="1048576 bytes"):
        of_command("cat", "/dev/zero").get()


def test_a_file_that_others_can_read_is_refused(identity_file, tmp_path):
    identities = identity_file(HYBRID.reveal())
    (tmp_path / "identity.txt").chmod(0o640)
    with pytest.raises(KeyRefused) as refused:
        identities.get()
    assert "chmod 600" in refused.value.hint


# --- passphrases


@pytest.fixture(scope="module")
def encrypted():
    return encrypt_identity(HYBRID.reveal(), PASSPHRASE)


def test_a_passphrase_comes_from_the_environment(identity_file, encrypted, monkeypatch):
    monkeypatch.setenv(PASSPHRASE_VARIABLE, PASSPHRASE)
    assert identity_file(encrypted).get() == (HYBRID,)


def test_missing_passphrase_names_the_variable(identity_file, encrypted):
    with pytest.raises(KeyRefused) as refused:
        identity_file(encrypted).get()
    assert PASSPHRASE_VARIABLE in refused.value.hint


def test_wrong_passphrase_is_refused_without_being_shown(identity_file, encrypted):
    with pytest.raises(KeyRefused, match="passphrase is wrong") as refused:
        identity_file(encrypted, ask_passphrase=lambda: "hush").get()
    assert "hush" not in str(refused.value) + refused.value.hint


def test_damaged_encrypted_file_is_refused(identity_file, encrypted):
    with pytest.raises(KeyRefused, match="cannot be decrypted"):
        identity_file(encrypted[:-1], ask_passphrase=lambda: PASSPHRASE).get()


# --- commands


def test_a_command_runs_without_a_shell():
    with pytest.raises(KeyRefused):
        Identities(EncryptionSettings(identity_command=f"echo {HYBRID.reveal()} | cat")).get()


@pytest.mark.parametrize(
    "script", ["echo hush; echo hush >&2; exit 3", "echo hush", "kill -9 $$"], ids=range(3)
)
def test_failure_of_a_command_hides_the_output(script, capfd):
    with pytest.raises(KeyRefused, match="identity_command") as refused:
        of_command("sh", "-c", script).get()
    assert "hush" not in "".join(traceback.format_exception(refused.value)) + refused.value.hint
    assert "hush" not in "".join(capfd.readouterr())


def test_a_command_that_does_not_exist_is_refused():
    with pytest.raises(KeyRefused, match="No such file"):
        of_command("/nowhere/manager").get()


def test_a_command_that_waits_forever_is_refused(monkeypatch):
    monkeypatch.setattr("caf_pipeline.encryption.identities.COMMAND_SECONDS", 0.2)
    with pytest.raises(KeyRefused, match="did not end"):
        of_command("sleep", "60").get()


def test_a_command_gets_none_of_our_secrets(monkeypatch, tmp_path):
    monkeypatch.setenv("CAF_DATABASE_URL", "a secret")
    monkeypatch.setenv("JACKAL_MNEMONIC", "a secret")
    monkeypatch.setenv("VAULT_TOKEN", "of the manager")
    output = shlex.quote(str(tmp_path / "output"))
    of_command("sh", "-c", f"env > {output}; echo {HYBRID.reveal()}").get()
    text = (tmp_path / "output").read_text()
    assert "a secret" not in text
    assert "of the manager" in text


# --- recipients


def with_source(recipients=(), /, **source):
    return Settings(
        encryption={"recipients": recipients}, sources={"src": {"bucket": "b", **source}}
    )


RECIPIENTS = tuple(str(age.new_identity().recipient) for _ in range(2))


def test_recipients_of_a_source_override_the_others():
    settings = with_source(RECIPIENTS[:1], recipients=RECIPIENTS[1:])
    assert list(map(str, require_recipients(settings, "src"))) == [RECIPIENTS[1]]
    settings = with_source(RECIPIENTS)
    assert tuple(map(str, require_recipients(settings, "src"))) == RECIPIENTS


def test_public_source_has_no_recipients():
    assert require_recipients(with_source(RECIPIENTS, public=True), "src") == ()


def test_source_without_recipients_is_refused_unless_public():
    with pytest.raises(NotPublic, match="src") as refused:
        require_recipients(with_source(), "src")
    assert "caf keys new" in refused.value.hint


@pytest.mark.parametrize(
    ("recipients", "single"),
    [((), False), (RECIPIENTS[:1], True), (RECIPIENTS[:1] * 2, True), (RECIPIENTS, False)],
)
def test_equal_recipients_count_once(recipients, single):
    assert has_single_recipient(with_source(recipients), "src") is single


# --- the age tool


@pytest.fixture(scope="module")
def age_tools(tmp_path_factory):
    """The folder of age and age-keygen 1.3.2, built by Go."""
    if not shutil.which("go"):
        pytest.skip("Go builds the age tool, and is missing")
    folder = tmp_path_factory.mktemp("age")
    subprocess.run(
        ["go", "install", "filippo.io/age/cmd/...@v1.3.2"],
        env={**os.environ, "GOBIN": str(folder)},
        check=True,
        timeout=300,
    )
    return folder


def run(*command, **options):
    return subprocess.run(command, capture_output=True, check=True, timeout=60, **options).stdout


@pytest.mark.thorough
@pytest.mark.parametrize("option", ["-pq", None])
def test_identity_files_of_age_keygen_are_read(age_tools, identity_file, option):
    text = run(age_tools / "age-keygen", *filter(None, [option]))
    (identity,) = identity_file(text).get()
    assert str(identity.recipient) in text.decode()


@pytest.mark.thorough
def test_identity_files_that_age_encrypts_are_read(age_tools, tmp_path, identity_file):
    plain, sealed = tmp_path / "plain", tmp_path / "sealed"
    plain.write_text(HYBRID.reveal())
    command = [age_tools / "age", "-p", "-o", sealed, plain]
    run_on_terminal(command, [PASSPHRASE] * 2, folder=tmp_path)
    identities = identity_file(sealed.read_bytes(), ask_passphrase=lambda: PASSPHRASE)
    assert identities.get() == (HYBRID,)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [[], ["--classic"], ["--passphrase"]])
def test_age_reads_our_identity_files(age_tools, tmp_path, monkeypatch, options):
    monkeypatch.setenv(PASSPHRASE_VARIABLE, PASSPHRASE)
    key, sealed, opened = tmp_path / "key", tmp_path / "sealed", tmp_path / "opened"
    recipient = run(CAF, "keys", "new", "-o", key, *options, text=True).strip()
    run(age_tools / "age", "-r", recipient, "-o", sealed, input=b"x")
    answers = [PASSPHRASE] if "--passphrase" in options else []
    command = [age_tools / "age", "-d", "-i", key, "-o", opened, sealed]
    run_on_terminal(command, answers, folder=tmp_path)
    assert opened.read_bytes() == b"x"
