"""`caf run`, `get`, `status` and an operator's commands, especially with bad input."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass

import pytest

from caf_pipeline.cli.terminal import write_bytes
from caf_pipeline.dagster_host import run_source
from caf_pipeline.errors import LedgerError, UsageError
from caf_pipeline_tests.support.command_line import (
    KEYS,
    CommandLine,
    Done,
    expect_error,
    source_text,
)
from caf_pipeline_tests.support.s3_server import Bucket, make_bucket, s3_error
from caf_pipeline_tests.support.tiers import sampled

pytestmark = pytest.mark.thorough


def fill(bucket):
    """Put some objects into a bucket; return their bodies."""
    bodies = {f"some/key-{number:02d}": os.urandom(100_000) for number in range(25)} | {
        "empty": b"",
        "a/": b"",
    }
    for key, body in bodies.items():
        bucket.put(key, body)
    return bodies


@pytest.fixture
def caf(tmp_path, database_url):
    return CommandLine(tmp_path, KEYS | {"CAF_DATABASE_URL": database_url})


@pytest.fixture
def filled(caf, s3_server, new_bucket):
    """A command line whose source has some objects, and their bodies."""
    bodies = fill(new_bucket)
    caf.settings(source_text(s3_server, new_bucket.name))
    return caf, bodies


@dataclass(frozen=True)
class Archived:
    """An archived source, and the output of `caf run`."""

    caf: CommandLine
    bucket: Bucket
    bodies: dict[str, bytes]
    result: Done


@pytest.fixture(scope="module")
def archived(tmp_path_factory, s3_server, databases):
    caf = CommandLine(
        tmp_path_factory.mktemp("archived"), KEYS | {"CAF_DATABASE_URL": databases.take().url}
    )
    bucket = make_bucket(s3_server)
    bodies = fill(bucket)
    caf.settings(source_text(s3_server, bucket.name))
    return Archived(caf, bucket, bodies, caf("run", "--source", "src"))


def test_a_run_reports_its_work_and_no_secret(archived):
    assert archived.result.status == 0, archived.result.err
    assert "27 objects" in archived.result.err
    assert "hush" not in archived.result.err + archived.result.out.decode()


def test_archived_objects_can_be_fetched(archived):
    for key in ("some/key-07", "empty", "a/"):
        assert archived.caf("get", "src", key).out == archived.bodies[key]
    assert archived.caf("get", "src", "some/key-00", "-o", "out").status == 0
    assert (archived.caf.folder / "out").read_bytes() == archived.bodies["some/key-00"]
    got = archived.caf("get", "src", "some/key-00", "-o", "-")
    assert (got.out, (archived.caf.folder / "-").exists()) == (
        archived.bodies["some/key-00"],
        False,
    )


def test_an_existing_file_is_replaced_only_with_force(archived):
    path = archived.caf.folder / "existing"
    path.write_text("mine")
    get = ("get", "src", "some/key-00", "-o", "existing")
    expect_error(archived.caf(*get), 2, "existing", "--force")
    assert path.read_text() == "mine"
    assert archived.caf(*get, "--force").status == 0
    assert path.read_bytes() == archived.bodies["some/key-00"]


@pytest.mark.parametrize(
    ("pieces", "is_written"),
    [
        ([b"text ", "ä€".encode()], True),
        (["ä€".encode()[:1], "ä€".encode()[1:]], True),
        ([b"\xff\xd8\xff"], False),
        ([b"a\0b"], False),
    ],
)
def test_a_terminal_receives_only_text(monkeypatch, pieces, is_written):
    reading, writing = os.openpty()
    with os.fdopen(writing, "w") as terminal, os.fdopen(reading, "rb") as shown:
        monkeypatch.setattr("sys.stdout", terminal)
        if is_written:
            write_bytes(pieces)
            assert os.read(shown.fileno(), 100) == b"".join(pieces)
        else:
            with pytest.raises(UsageError):
                write_bytes(pieces)


def test_the_status_shows_the_source_and_every_chunk(archived):
    source, *chunks = [
        json.loads(line) for line in archived.caf("status", "--json").out.splitlines()
    ]
    assert source["located_objects"] == len(archived.bodies)
    assert {chunk["state"] for chunk in chunks} == {"located"}
    shown = archived.caf("status").out.decode()
    assert all(chunk["chunk"] in shown for chunk in chunks)


def status_of(caf):
    """Return the status of the only source as text and as JSON."""
    return caf("status").out.decode(), json.loads(caf("status", "--json").out.splitlines()[0])


def test_the_status_counts_filtered_objects_and_older_versions(caf, s3_server, new_bucket):
    new_bucket.keep_versions()
    new_bucket.put("k", b"first")
    new_bucket.put("k", b"second")
    new_bucket.put("gone", b"third")
    new_bucket.delete("gone")
    new_bucket.put("a.tmp", b"fourth, longer")
    beside = {"older_versions": 2, "delete_markers": 1, "deleted_keys": 1}
    caf.settings(source_text(s3_server, new_bucket.name, max_size="8"))
    done = caf("run", "--source", "src")
    assert done.status == 0
    notes = " ".join(done.err.split())
    for count in ("1 left out", "2 older versions"):
        assert count in notes
    text, source = status_of(caf)
    assert "1 current, 0 older, 0 gone, " in text
    for count in ("1 by max_size", "2 older versions", "1 delete marker", "1 key deleted"):
        assert count in text
    assert source["left_out"] == {"max_size": 1}
    assert {name: source[name] for name in ("versions", *beside)} == {
        "versions": "current",
        **beside,
    }
    caf.settings(source_text(s3_server, new_bucket.name, max_size="8", versions="all"))
    preview = caf("plan", "src", "--dry-run").out.decode()
    assert re.search("versions +2 older versions .*, 1 delete marker, 1 key deleted", preview)
    summary = json.loads(caf("run", "--source", "src", "--json").out)["sources"][0]
    assert {name: summary[name] for name in ("versions", *beside)} == {"versions": "all", **beside}
    assert "1 current, 1 older, 1 gone, " in status_of(caf)[0]


def test_only_the_owner_enters_home_and_its_folders(archived):
    home = archived.caf.folder / ".caf"
    folders = [home, *(path for path in home.iterdir() if path.is_dir())]
    assert {path.name for path in folders} >= {".caf", "dagster", "inventories", "plans", "staging"}
    assert {path.name for path in folders if path.stat().st_mode & 0o077} == set()


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("broken"), 1), (OSError(errno.ENOSPC, "full"), 8)]
)
def test_a_foreign_error_has_its_exit_status_in_json(filled, monkeypatch, error, status):
    def fail(_):
        raise error

    monkeypatch.setattr(run_source, "reap_dead_runs", fail)
    ended = filled[0]("run", "--json")
    report = json.loads(ended.out.splitlines()[-1])
    assert (report["exit_status"], ended.status) == (status, status)
    assert type(error).__name__ in report["error"]


def test_all_versions_need_a_bucket_with_versions(filled, s3_server, new_bucket):
    caf, _ = filled
    caf.settings(source_text(s3_server, new_bucket.name, versions="all"))
    expect_error(
        caf("plan", "src", "--dry-run"),
        3,
        "keeps no versions",
        "set sources.src.versions to 'current'",
    )
    caf.settings(source_text(s3_server, new_bucket.name, versions="every"))
    expect_error(caf("status"), 3, "sources.src.versions", "'current'", "'all'")


def test_a_report_needs_a_setting(filled):
    caf, _ = filled
    expect_error(
        caf("run", "--source", "src", "--report", "2026-11-21"),
        3,
        "sources.src.inventory",
        "docs/how-to/inventory-reports.md",
    )


HEAVY = (
    *(
        "dagster",
        "boto3",
        "botocore",
        "awscrt",
        "pyarrow",
        "duckdb",
        "numpy",
        "cffi",
        "Crypto",
        "google.protobuf",
        "pygments",
        "rich",
    ),
    *(
        "caf_pipeline.caf.merkle_reference",
        "caf_pipeline.cli.archives",
        "caf_pipeline.packing.packer",
    ),
    *(
        "caf_pipeline.caf.archive",
        "caf_pipeline.run_context",
        "caf_pipeline.source.protocol",
        "psutil",
        "sqlalchemy",
    ),
)
"""Modules that a look-up must not load; each takes 10 ms or more."""

LOOK_UPS = [
    ["get", "src", "some/key-03", "-o", "fetched"],
    ["ls", "src"],
    ["find", "src", "*"],
    ["du", "src"],
    ["check", "src"],
]


@pytest.mark.parametrize(
    "arguments", sampled(LOOK_UPS, every=3), ids=[arguments[0] for arguments in LOOK_UPS]
)
def test_looking_something_up_loads_nothing_heavy(archived, arguments):
    program = (
        "import sys; from caf_pipeline.entry import main; status = main();"
        f"print([name for name in {HEAVY} if sys.modules.get(name)]); sys.exit(status)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=archived.caf.folder,
        env=archived.caf.variables(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout.splitlines()[-1]) == (0, "[]"), run.stderr


PAYING = tuple(
    f"caf_pipeline.store.jackal.{name}"
    for name in ("wallet", "messages", "posting", "upload", "write")
)


def test_reading_from_jackal_loads_nothing_that_signs_or_packs():
    opened = "caf_pipeline.wiring, caf_pipeline.store.jackal.read, caf_pipeline.retrieval.reader"
    program = (
        "import sys; from caf_pipeline.entry import block_unused_modules as block; block(); import "
        f"{opened};"
        f"print([name for name in {HEAVY + PAYING} if sys.modules.get(name)])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_an_error_caused_by_an_interrupt_counts_as_interrupt(caf, monkeypatch):
    def interrupted(*_):
        try:
            raise KeyboardInterrupt
        finally:
            raise LedgerError("the statement under way was broken off")

    monkeypatch.setattr("caf_pipeline.wiring.open_ledger", interrupted)
    caf.settings("")
    done = caf("status")
    assert done.status == 130
    assert re.fullmatch("caf: interrupted; [^\n]*\n", done.err)


def test_wrong_credentials(caf, scripted_s3):
    scripted_s3.answer = lambda request: s3_error(403, "InvalidAccessKeyId")
    caf.settings(source_text(scripted_s3.endpoint, "b"))
    expect_error(caf("run", "--source", "src"), 5)


def test_waiting_for_a_silent_database_is_reported(caf, monkeypatch):
    monkeypatch.setattr("caf_pipeline.ledger.database.UNANSWERED_SECONDS", 0.1)
    caf.settings('[sources.src]\nbucket = "b"\n')
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        done = caf("status", CAF_DATABASE_URL=f"postgresql://u:hush@{at}/d?connect_timeout=2")
    expect_error(done, 6, f"database 'd' at {at}", "in time")
    assert done.err.startswith("caf: waiting since ")


def test_commands_on_local_files_need_no_settings(tmp_path):
    (tmp_path / "file").write_bytes(b"bytes")
    caf = CommandLine(tmp_path, KEYS)
    assert caf("create", "archive.caf", "file").status == 0
    assert b"file" in caf("list", "archive.caf").out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive.caf", "file"]


def test_a_missing_version_error_names_the_archived_version(archived):
    (version,) = archived.bucket.client.list_objects_v2(
        Bucket=archived.bucket.name, Prefix="some/key-07"
    )["Contents"]
    done = archived.caf("get", "src", "some/key-07", "--object-version", "v0")
    etag = version["ETag"].strip('"')
    expect_error(
        done,
        11,
        "version 'v0'",
        f"etag:{etag}:100000 ({version['LastModified']:%Y-%m-%d %H:%M:%S} UTC)",
    )
    expect_error(archived.caf("get", "src", "nowhere", "--object-version", "v0"), 11, "'nowhere'")
    expect_error(
        archived.caf("get", "src", "caf\udce9.txt", "--object-version", "v0"), 11, "source src"
    )


def test_a_prefix_without_keys_warns(filled, s3_server, new_bucket):
    caf, _bodies = filled
    caf.settings(source_text(s3_server, new_bucket.name, prefix="/some"))
    done = caf("run", "--source", "src")
    for fact in (new_bucket.name, s3_server, "'/some'", "sources.src.prefix"):
        assert fact in done.err
    assert "is complete" not in done.err
    assert done.status == 19


def test_a_full_staging_disk_leaves_it_as_it_was(filled, small_disk, s3_server, new_bucket):
    caf, _bodies = filled
    caf.settings(
        f'staging = "{small_disk}"\n' + source_text(s3_server, new_bucket.name, target_size="3MiB")
    )
    done = caf("run", "--source", "src")
    assert done.status == 12
    assert str(small_disk) in done.err
    assert "make room" in done.err
    assert list(small_disk.iterdir()) == []
    caf.settings(source_text(s3_server, new_bucket.name, target_size="3MiB"))
    assert caf("run", "--source", "src").status == 0


def test_the_status_shows_a_pause(filled):
    caf, _ = filled
    assert b"paused" not in caf("status").out
    caf("pause", "maintenance")
    assert caf("status").out.startswith(b"paused: maintenance ('caf resume'")
    assert [json.loads(line)["paused"] for line in caf("status", "--json").out.splitlines()] == [
        "maintenance"
    ]
    caf("resume")
    assert b"paused" not in caf("status").out
