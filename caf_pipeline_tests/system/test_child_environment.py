"""What processes that we start find in their environment.

The secrets are marked, and everything that is started is looked at.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from pydantic import BaseModel, SecretStr

from caf_pipeline.encryption.identities import IDENTITY_VARIABLE
from caf_pipeline.formats import age
from caf_pipeline.ledger.embedded import PLACE_VARIABLE
from caf_pipeline.settings import PASSPHRASE_VARIABLE, Settings
from caf_pipeline.store.jackal.wallet import MNEMONIC_VARIABLE
from caf_pipeline.system.child_environment import Need, child_environment
from caf_pipeline_tests.support.command_line import CAF, FOREIGN
from caf_pipeline_tests.support.free_ports import free_port
from caf_pipeline_tests.support.jackal_command_line import new_wallet
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.s3_server import make_bucket
from caf_pipeline_tests.support.started_processes import Seen, started

DEMO = Path(__file__).parents[2] / "demo"
EVERYTHING = (
    Need.SETTINGS
    | Need.NETWORK
    | Need.S3
    | Need.WALLET
    | Need.IDENTITY
    | Need.WORKER_KEY
    | Need.LEDGER
    | Need.STORAGE
    | Need.POSTGRES
)

SECRETS = {
    MNEMONIC_VARIABLE: Need.WALLET,
    "CAF_JACKAL__MNEMONIC": Need.WALLET,
    "caf_jackal__mnemonic": Need.WALLET,
    "CAF_ENCRYPTION__IDENTITY": Need.IDENTITY,
    "CAF_PASSPHRASE": Need.IDENTITY,
    "CAF_WORKER_KEY": Need.WORKER_KEY,
    "AWS_SECRET_ACCESS_KEY": Need.S3,
    "AWS_SESSION_TOKEN": Need.S3,
    "CAF_SOURCES__A__ACCESS_KEY_ID": Need.S3,
    "CAF_SOURCES__A__SECRET_ACCESS_KEY": Need.S3,
    "CAF_DATABASE_URL": Need.LEDGER,
    "CAF_DAGSTER_DATABASE_URL": Need.STORAGE,
    "PGPASSWORD": Need.POSTGRES,
    "https_proxy": Need.NETWORK,
}


@pytest.mark.parametrize(("name", "need"), SECRETS.items())
def test_a_secret_is_given_to_who_needs_it_alone(monkeypatch, name, need):
    monkeypatch.setenv(name, "a secret")
    assert child_environment(need)[name] == "a secret"
    assert name not in child_environment(EVERYTHING & ~need)


def test_section_with_secrets_needs_all_of_their_scopes(monkeypatch):
    monkeypatch.setenv("CAF_SOURCES", '{"a": {"bucket": "b", "secret_access_key": "s"}}')
    assert "CAF_SOURCES" in child_environment(Need.SETTINGS | Need.S3)
    assert "CAF_SOURCES" not in child_environment(Need.SETTINGS)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["PATH", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR"]
)
def test_what_any_program_may_need_is_given_to_all(monkeypatch, name):
    monkeypatch.setenv(name, "here")
    assert child_environment()[name] == "here"


def test_what_no_list_names_is_given_to_no_child(monkeypatch):
    monkeypatch.setenv("GITHUB_TOKEN", "a secret")
    assert "GITHUB_TOKEN" not in child_environment(EVERYTHING)


def secret_settings(model: type[BaseModel], name: str) -> list[str]:
    """Return the variables of all settings that are secret."""
    found = []
    for field, info in model.model_fields.items():
        kinds = [info.annotation, *getattr(info.annotation, "__args__", ())]
        if SecretStr in kinds:
            found.append(f"{name}{field}".upper())
        found += [
            one
            for kind in kinds
            if isinstance(kind, type) and issubclass(kind, BaseModel)
            for one in secret_settings(kind, f"{name}{field}__")
        ]
    return found


def test_every_setting_that_is_secret_is_known_as_one(monkeypatch):
    names = secret_settings(Settings, "CAF_")
    assert {"CAF_DATABASE_URL", "CAF_JACKAL__MNEMONIC", "CAF_SOURCES__SECRET_ACCESS_KEY"} <= set(
        names
    )
    for name in names:
        monkeypatch.setenv(name, "a secret")
        assert name not in child_environment(Need.SETTINGS)


# --- processes ---

MARKS = {
    "words": new_wallet().words,
    "access_key": "AKIAMARKMARKMARKMARK",
    "secret_key": "mark-secret-key",
    "source_key": "mark-source-key",
    "identity": age.new_identity().reveal(),
    "passphrase": "mark-of-passphrase",
    "worker_key": "0a1b2c3d" * 8,
    "libpq": "mark-of-libpq",
    "unlisted": "mark-of-no-list",
}
S3 = {"access_key", "secret_key", "source_key"}
LIBPQ = {"libpq"}

# By what stands in the command; the first that fits. All others may have nothing.
ROLES: dict[str, set[str]] = {
    "dagster_webserver": LIBPQ,
    "dagster._daemon": LIBPQ,
    "demo/dg.py dev": LIBPQ,
    "code-server start": S3 | LIBPQ,
    "api grpc": S3 | LIBPQ,
    "spawn_main": S3 | LIBPQ,  # a run
    "resource_tracker": S3 | LIBPQ,  # which Python starts beside it
    "file -b ": set(
        MARKS
        # by which Python's `platform` looks at its own program: it has what its parent has, for an
        # instant
    ),
    "demo/server.py": set(),
    "caf_pipeline_tests.loopback": set(),
    "bin/postgres ": set(),
    "bin/initdb ": set(),
    "bin/pg_ctl ": set(),
}


def role_of(seen: Seen) -> str:
    return next((role for role in ROLES if role in seen.command), seen.command)


def assert_each_has_its_own(seen: list[Seen], *roles: str, own: str) -> None:
    """Assert that all roles were seen, and had no secret of another; `own` is in commands that were
    given everything.
    """
    others = [one for one in seen if own not in one.command]
    assert set(roles) <= {role_of(one) for one in others}
    for one in others:
        assert one.marks <= ROLES.get(role_of(one), set()), one.command


@pytest.fixture
def environment(tmp_path):
    """A user's environment, with every secret that there is, and the settings of a demo in a
    folder.
    """
    (tmp_path / "caf.toml").write_text(
        '[store]\nkind = "directory"\n[jackal]\nchain_id = "loopback-1"\nmnemonic_file = '
        '".caf/demo-wallet"\n'
        'allow_private_addresses = true\n[encryption]\nidentity_file = ".caf/demo-identity"\n'
        '[sources.demo]\nbucket = "demo"\npublic = '
        "true\nwatch_interval_seconds = 0\n"
    )
    return {
        name: value
        for name, value in os.environ.items()
        if name == PLACE_VARIABLE or not name.startswith(FOREIGN)
    } | {
        "CAF_STORE__KIND": "jackal",
        "CAF_JACKAL__LCD": json.dumps([f"http://127.0.0.1:{free_port()}"]),
        "CAF_SOURCES__DEMO__ENDPOINT_URL": f"http://127.0.0.1:{free_port()}",
        "CAF_SOURCES__DEMO__ACCESS_KEY_ID": MARKS["access_key"],
        "CAF_SOURCES__DEMO__SECRET_ACCESS_KEY": MARKS["source_key"],
        "AWS_ACCESS_KEY_ID": MARKS["access_key"],
        "AWS_SECRET_ACCESS_KEY": MARKS["secret_key"],
        "AWS_CONFIG_FILE": os.devnull,
        "JACKAL_MNEMONIC": MARKS["words"],
        IDENTITY_VARIABLE: MARKS["identity"],
        PASSPHRASE_VARIABLE: MARKS["passphrase"],
        "CAF_WORKER_KEY": MARKS["worker_key"],
        "PGAPPNAME": MARKS["libpq"],
        "A_TOKEN": MARKS["unlisted"],
    }


@pytest.fixture
def filled(s3_server):
    bucket = make_bucket(s3_server)
    bucket.put("one", b"1")
    return bucket


@pytest.mark.thorough
def test_the_embedded_postgres_of_a_run_has_no_secret(tmp_path, environment, filled):
    place = {
        "CAF_SOURCES__DEMO__BUCKET": filled.name,
        "CAF_SOURCES__DEMO__ENDPOINT_URL": filled.endpoint,
    }
    place |= {"CAF_STORE__KIND": "directory"}
    with started([CAF, "run"], MARKS, folder=tmp_path, environment=environment | place) as run:
        assert "the source is complete" in run.wait(PATIENCE_SECONDS)
    assert_each_has_its_own(run.seen, "bin/postgres ", "bin/initdb ", own="bin/caf run")
    assert Seen(f"{sys.executable} {CAF} run", frozenset(MARKS)) in run.seen


@pytest.mark.thorough
def test_what_the_demo_starts_has_no_secret_of_the_user(tmp_path, environment):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "one").write_bytes(b"1")
    command = [sys.executable, str(DEMO / "run.py"), "--folder", str(tmp_path / "files")]
    del environment["PGAPPNAME"]  # it is libpq's, so that every command of ours may have it
    with started(command, MARKS, folder=tmp_path, environment=environment) as demo:
        assert "identical: " in demo.wait(PATIENCE_SECONDS)
    assert_each_has_its_own(
        demo.seen,
        "demo/server.py",
        "caf_pipeline_tests.loopback",
        "bin/postgres ",
        own="demo/run.py",
    )
    assert any("bin/caf run" in one.command for one in demo.seen)


@pytest.mark.thorough
def test_only_processes_that_run_our_code_have_keys(tmp_path, environment, filled):
    source = f"CAF_SOURCES__{filled.name.upper()}__"
    place = {
        "AWS_ENDPOINT_URL": filled.endpoint,
        f"{source}BUCKET": filled.name,
        f"{source}WATCH_INTERVAL_SECONDS": "1",
        f"{source}AUTOMATIC": "true",
    }
    place |= {
        f"{source}ACCESS_KEY_ID": MARKS["access_key"],
        f"{source}SECRET_ACCESS_KEY": MARKS["source_key"],
    }
    command = [
        sys.executable,
        str(DEMO / "ui.py"),
        "--bucket",
        filled.name,
        "--port",
        str(free_port()),
    ]
    roles = (
        "dagster_webserver",
        "dagster._daemon",
        "demo/dg.py dev",
        "caf_pipeline_tests.loopback",
        "bin/postgres ",
    )
    with started(command, MARKS, folder=tmp_path, environment=environment | place) as ui:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not {*roles, "spawn_main"} <= {role_of(one) for one in ui.seen}:
            assert time.monotonic() < deadline, ui.output.read_text()
            assert ui.process.poll() is None, ui.output.read_text()
            time.sleep(0.5)
    assert_each_has_its_own(ui.seen, *roles, own="demo/ui.py")
    assert {one.marks for one in ui.seen if role_of(one) == "spawn_main"} == {frozenset(S3 | LIBPQ)}
