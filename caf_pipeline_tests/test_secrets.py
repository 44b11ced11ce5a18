"""No secret is found anywhere: not in a file, not in a database, not in what a command says,
whatever went wrong. Neither is the plaintext of a private source.
"""

import base64
import os
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mnemonic import Mnemonic

from caf_pipeline.dagster_host.storage import URL_VARIABLE, require_database
from caf_pipeline.errors import SettingsError
from caf_pipeline.formats import age
from caf_pipeline.settings import PASSPHRASE_VARIABLE
from caf_pipeline.steps import chunk_steps
from caf_pipeline.store.jackal.wallet import KEY_PATH, MNEMONIC_VARIABLE, derive_key
from caf_pipeline_tests.support.command_line import CommandLine, Done, source_text
from caf_pipeline_tests.support.jackal_command_line import (
    S3_KEYS,
    jackal_command_line,
    new_wallet,
    with_wallet,
)
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.private_source import IDENTITY, WITH_IDENTITY, private_text

pytest_plugins = ["caf_pipeline_tests.support.jackal_network"]

WORDS_THAT_TELL = 3  # in a row: fewer stand in any English text


def traces(words: str) -> "re.Pattern[bytes]":
    """Return what finds the wallet of these words in bytes: three of them in a row, as text or as
    hex, or its private key.
    """
    listed = words.split()
    runs = [
        listed[start : start + WORDS_THAT_TELL]
        for start in range(len(listed) - WORDS_THAT_TELL + 1)
    ]
    key = derive_key(Mnemonic.to_seed(words), KEY_PATH).to_bytes(32)
    found = [r"\W+".join(run).encode() for run in runs]
    found += [" ".join(run).encode().hex().encode() for run in runs]
    found += [key.hex().encode(), re.escape(key)]
    return re.compile(b"|".join(found), re.IGNORECASE | re.DOTALL)


def left_behind(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every file of a folder, its own name included."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield str(path), str(path).encode() + path.read_bytes()


def rows(database) -> Iterator[tuple[str, bytes]]:
    """Yield every row of every table as text, bytes in it as hex."""
    with connected(database) as connection:
        tables = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
        ).scalars()
        assert "transactions" in tables
        for table in tables:
            for row in connection.execute(f'SELECT each::text FROM "{table}" AS each').scalars():
                yield table, row.encode()


def assert_clean(places: Iterable[tuple[str, bytes]], *wallets: str) -> None:
    patterns = [traces(words) for words in wallets]
    for name, data in places:
        for pattern in patterns:
            assert not pattern.search(data), f"a wallet stands in {name}"


MARKED_BODY = b"a marked body! "
MARKED_KEY = "a-marked-key"
WORKER_KEY = "0a1b2c3d" * 8


def encodings(secret: bytes) -> list[bytes]:
    """Return a secret in three encodings."""
    return [secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"=")]


@pytest.fixture
def private(tmp_path, database_url, s3_server, new_bucket) -> CommandLine:
    """A command line with all secrets and a private source in a folder store."""
    for number in range(5):
        new_bucket.put(f"{MARKED_KEY}-{number}", MARKED_BODY * 5_000)
    secrets = WITH_IDENTITY | {"CAF_WORKER_KEY": WORKER_KEY, PASSPHRASE_VARIABLE: "open-sesame"}
    caf = CommandLine(tmp_path, S3_KEYS | secrets | {"CAF_DATABASE_URL": database_url})
    caf.settings(private_text(s3_server, new_bucket.name))
    return caf


def file_keys(database) -> Iterator[bytes]:
    with connected(database) as connection:
        for row in connection.execute("SELECT header FROM caf_files WHERE header IS NOT NULL"):
            yield age.open_header(age.parse_header(row.header), [IDENTITY])


@pytest.mark.thorough
def test_a_private_run_leaves_no_secret_and_no_plaintext(private, database, monkeypatch):
    staged = []
    before_post = chunk_steps.to_store

    def look_at_staging(context, *given):
        staged.extend(left_behind(context.staging()))
        return before_post(context, *given)

    monkeypatch.setattr(chunk_steps, "to_store", look_at_staging)
    spoken = []
    for arguments in (("run",), ("status", "--json"), ("prove", "src"), ("repair", "src")):
        done = private(*arguments)
        assert done.status == 0, done.err
        spoken += said(done)
    assert staged
    (file_key,) = file_keys(database)
    secrets = [IDENTITY.reveal().encode(), IDENTITY.reveal().lower().encode(), MARKED_BODY]
    secrets += [WORKER_KEY.encode(), b"open-sesame"]
    for secret in (IDENTITY.seed, file_key, bytes.fromhex(WORKER_KEY)):
        secrets += encodings(secret)
    left = [*spoken, *staged, *left_behind(private.folder), *rows(database)]
    # The search reaches Dagster's storage, which shows the largest members.
    assert any("dagster" in name and MARKED_KEY.encode() in data for name, data in left)
    found = [(name, secret) for name, data in left for secret in secrets if secret in data]
    assert not found
    kept = [*staged, *left_behind(private.folder / ".caf" / "store")]
    assert len(kept) > len(staged)
    assert not [name for name, data in kept if MARKED_KEY.encode() in data]


def said(done: Done) -> list[tuple[str, bytes]]:
    return [("stdout", done.out), ("stderr", done.err.encode())]


@pytest.fixture
def caf(tmp_path, network, database_url, s3_server, new_bucket) -> CommandLine:
    """A command line with a wallet of its own, and a source with some objects."""
    wallet = new_wallet()
    network.fund(wallet.address, 10**9)
    network.grant(wallet.address, 10**9)
    for number in range(5):
        new_bucket.put(f"key-{number}", os.urandom(50_000))
    caf = jackal_command_line(tmp_path, network, wallet.words, CAF_DATABASE_URL=database_url)
    caf.settings(source_text(s3_server, new_bucket.name))
    return caf


def test_the_traces_would_be_found():
    words = new_wallet().words
    pattern, listed = traces(words), words.split()
    for data in (words, "\n".join(listed[2:5]), repr(listed), " ".join(listed[-3:]).encode().hex()):
        assert pattern.search(data.encode())
    assert not pattern.search(" ".join(listed[:2]).encode())


@pytest.mark.thorough
def test_runs_and_commands_leave_no_trace_of_the_wallet(caf, database):
    words = caf.environment[MNEMONIC_VARIABLE]
    spoken = []
    for arguments in (
        ("run",),
        ("status",),
        ("get", "src", "key-1"),
        ("jackal", "wallet", "--json"),
        ("jackal", "buy", "--bytes", "2GB", "--days", "30", "--yes"),
        ("jackal", "files", "--json"),
        ("prove", "src", "--json"),
        ("repair", "src"),
    ):
        done = caf(*arguments)
        assert done.status == 0, done.err
        spoken += said(done)
    assert_clean([*spoken, *left_behind(caf.folder), *rows(database)], words)


WALLETS = {
    "out of order": lambda words: " ".join(reversed(words.split())),
    "without coins": lambda words: new_wallet().words,
    "misspelt": lambda words: words.replace(words.split()[4], "caffeine"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("wallet", WALLETS)
def test_a_wallet_that_cannot_pay_leaves_no_trace(caf, database, wallet):
    words = caf.environment[MNEMONIC_VARIABLE]
    broken = WALLETS[wallet](words)
    spoken = []
    for arguments in (
        ("run",),
        ("jackal", "wallet"),
        ("jackal", "buy", "--bytes", "1GB", "--days", "30", "--yes"),
    ):
        spoken += said(with_wallet(caf, broken)(*arguments, CAF_TRACEBACK="1"))
    assert_clean([*spoken, *left_behind(caf.folder), *rows(database)], words, broken)


@pytest.mark.thorough
def test_a_run_that_fails_leaves_no_trace_of_the_wallet(caf, database):
    words = caf.environment[MNEMONIC_VARIABLE]
    spoken = said(caf("run", CAF_JACKAL__LCD='["http://127.0.0.1:9"]', CAF_TRACEBACK="1"))
    spoken += said(caf("run", CAF_JACKAL__COPIES="three", CAF_TRACEBACK="1"))
    spoken += said(caf("run", CAF_JACKAL__SPEND_CAP="1", CAF_TRACEBACK="1"))
    spoken += said(
        caf("run", CAF_JACKAL__MNEMONIC=words, CAF_JACKAL__CHAIN_ID="another", CAF_TRACEBACK="1")
    )
    assert_clean([*spoken, *left_behind(caf.folder), *rows(database)], words)


@pytest.mark.thorough
def test_a_mnemonic_file_is_read_and_copied_nowhere(caf, tmp_path_factory, database):
    words = caf.environment[MNEMONIC_VARIABLE]
    file = tmp_path_factory.mktemp("wallet") / "words"
    file.write_text(words)
    file.chmod(0o600)
    caf = with_wallet(caf, "")
    done = caf("run", CAF_JACKAL__MNEMONIC_FILE=str(file))
    assert done.status == 0, done.err
    shown = caf("jackal", "wallet", CAF_JACKAL__MNEMONIC_FILE=str(file))
    assert shown.status == 0, shown.err
    file.chmod(0o644)
    refused = caf("jackal", "wallet", CAF_JACKAL__MNEMONIC_FILE=str(file))
    assert refused.status == 3
    assert "chmod 600" in refused.err
    assert_clean(
        [*said(done), *said(shown), *said(refused), *left_behind(caf.folder), *rows(database)],
        words,
    )


def test_mnemonic_in_the_settings_file_is_refused_unshown(caf):
    words = caf.environment[MNEMONIC_VARIABLE]
    caf.settings(f'[jackal]\nmnemonic = "{words}"\n')
    done = caf("status")
    assert done.status == 3
    assert_clean(said(done), words)


MARK = "Zq7x"  # in each password, and in no other text
NASTY = st.text(st.sampled_from("@:/?#[]\\%&=+,;!'\"^{} \t\n1a.é"), max_size=6)
PLACES = (
    "postgresql://u:{}@127.0.0.1:1/d",
    "postgresql://u:{}@[::1]:1/d",
    "postgresql://:{}@127.0.0.1:1,127.0.0.1:2/d",
    "postgres://u:{}@/d?host=/nowhere",
    "postgresql://127.0.0.1:1/d?password={}",
    "postgresql+psycopg://u:{}@127.0.0.1:1/d?sslmode=disable",
    "host=127.0.0.1 port=1 password={}",
)


@pytest.mark.thorough
@pytest.mark.parametrize("place", PLACES)
@given(before=NASTY, after=NASTY)
def test_a_raw_password_of_a_database_is_never_shown(tmp_path, place, before, after):
    caf = CommandLine(tmp_path, {})
    caf.settings('[sources.src]\nbucket = "b"\n')
    url = place.format(before + MARK + after)
    done = caf("status", CAF_DATABASE_URL=url, CAF_TRACEBACK="1")
    assert done.status in (3, 6)
    assert MARK not in done.out.decode() + done.err
    with mock.patch.dict(os.environ, {URL_VARIABLE: url}), pytest.raises(SettingsError) as refused:
        require_database()
    assert MARK not in "".join(traceback.format_exception(refused.value)) + refused.value.hint
