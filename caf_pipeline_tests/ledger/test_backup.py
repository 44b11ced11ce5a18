"""Backups of a ledger are written whole and restored whole, or not at all."""

import errno
import os
import signal
import subprocess
import sys
import time

import psycopg
import pytest

from caf_pipeline.errors import HeldByOther, LedgerError, SettingsError, StagingError, UsageError
from caf_pipeline.ledger import backup
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.schema_files import make_tables
from caf_pipeline.waits import Waits
from caf_pipeline_tests.contracts.ledger import holder, register
from caf_pipeline_tests.support.new_ledgers import rows_of


@pytest.fixture
def programs(database):
    return backup.Programs(database, embedded=True)


@pytest.fixture
def dump(tmp_path, ledger):
    register(ledger, ["a"])
    path = tmp_path / "ledger.dump"
    backup.back_up(ledger.database, path, embedded=True)
    return path


@pytest.fixture
def execute(database_url):
    """Execute a statement in the ledger's database, as another program would."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection.execute


def test_a_backup_brings_every_row_back(ledger, programs, dump):
    before = rows_of(ledger)
    register(ledger, ["b"])
    backup.restore(programs, dump, reason="a test")
    assert rows_of(ledger) == before
    ledger.bring_up(Waits())
    register(ledger, ["b"])


def test_a_backup_is_private_and_replaces_nothing(ledger, dump):
    assert dump.stat().st_mode & 0o777 == 0o600
    before = dump.read_bytes()
    with pytest.raises(UsageError, match="exists"):
        backup.back_up(ledger.database, dump, embedded=True)
    assert dump.read_bytes() == before
    assert list(dump.parent.glob(".caf-*")) == []


def test_a_full_disk_takes_no_backup(ledger, new_disk):
    disk = new_disk(40 << 10)
    with pytest.raises(StagingError, match="No space left"):
        backup.back_up(ledger.database, disk.folder / "ledger.dump", embedded=True)
    assert list(disk.folder.iterdir()) == []


def test_a_backup_needs_no_hard_links(ledger, tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "ledger.dump"
    size_bytes = backup.back_up(ledger.database, path, embedded=True)
    assert [file.stat().st_size for file in tmp_path.glob("*.dump")] == [size_bytes]
    path.write_bytes(b"there")
    with pytest.raises(UsageError, match="exists"):
        backup.back_up(ledger.database, path, embedded=True)
    assert path.read_bytes() == b"there"


def test_tables_of_other_programs_are_left_alone(ledger, programs, tmp_path, execute):
    execute("CREATE TABLE event_logs (id int); INSERT INTO event_logs VALUES (1)")
    path = tmp_path / "beside.dump"
    backup.back_up(ledger.database, path, embedded=True)
    execute("INSERT INTO event_logs VALUES (2)")
    backup.restore(programs, path, reason="a test")
    assert execute("SELECT count(*) FROM event_logs").fetchone() == (2,)


def test_a_restore_is_refused_while_a_lease_is_held(ledger, programs, dump):
    register(ledger, ["b"])
    before = rows_of(ledger)
    with ledger.leases.hold("plan/src", holder("run-1")), pytest.raises(HeldByOther):
        backup.restore(programs, dump, reason="a test")
    assert rows_of(ledger) == before


def test_a_damaged_backup_changes_nothing(ledger, programs, dump):
    register(ledger, ["b"])
    before = rows_of(ledger)
    whole = dump.read_bytes()
    for size in (len(whole) // 2, len(whole) - 100):
        dump.write_bytes(whole[:size])
        with pytest.raises(LedgerError):
            backup.restore(programs, dump, reason="a test")
    assert rows_of(ledger) == before
    assert ledger.controls.current().paused == ""


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE schema_files SET sha256 = '0' WHERE name = '0001.tables'",
        "INSERT INTO schema_files (name, sha256) VALUES ('9999.later', '0')",
        "DELETE FROM schema_files WHERE name = '0001.tables'",
    ],
)
def test_a_backup_of_another_versions_ledger_is_refused(
    programs, tmp_path, empty_database_url, change
):
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        make_tables(connection)
        connection.execute(change)
    path = tmp_path / "other.dump"
    other = Database(empty_database_url)
    backup.back_up(other, path, embedded=True)
    with pytest.raises(UsageError, match="another version"):
        backup.read_backup(programs, path)


def test_a_file_that_is_no_backup_is_refused(programs, tmp_path):
    path = tmp_path / "no.dump"
    path.write_bytes(b"hello")
    with pytest.raises(UsageError, match="not a backup"):
        backup.read_backup(programs, path)


def test_the_password_is_in_no_command_line(database_url):
    password = "sesame-" + os.urandom(4).hex()
    programs = backup.Programs(Database(f"{database_url}&password={password}"), embedded=True)
    assert password not in programs._address
    assert programs._environment["PGPASSWORD"] == password
    with pytest.raises(SettingsError) as refused:
        backup.Programs(Database(f"{database_url}&sslpassword={password}"), embedded=True)
    assert password not in str(refused.value)


def test_pg_dump_is_asked_for_its_version_without_secrets(monkeypatch, tmp_path, database):
    environment = tmp_path / "environment"
    pg_dump = tmp_path / "pg_dump"
    pg_dump.write_text(f"#!/bin/sh\nenv > {environment}\necho 'pg_dump (PostgreSQL) 1.0'\n")
    pg_dump.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("JACKAL_MNEMONIC", "secret words")
    backup.Programs(database, embedded=False)
    assert environment.exists()
    assert "secret words" not in environment.read_text()


_RESTORE = """
import sys
from caf_pipeline.ledger import backup
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.schema_files import make_tables
from caf_pipeline.waits import Waits
from pathlib import Path
database = Database(sys.argv[1])
programs = backup.Programs(database, embedded=True)
print("begins", flush=True)
backup.restore(programs, Path(sys.argv[2]), reason="a test")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [0.02, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_a_killed_restore_leaves_the_old_ledger_or_the_new(ledger, dump, database_url, seconds):
    old = rows_of(ledger)
    register(ledger, ["b"])
    newer = rows_of(ledger)
    process = subprocess.Popen(
        [sys.executable, "-c", _RESTORE, database_url, str(dump)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "begins\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # psql sees the end of its input
        with psycopg.connect(database_url, autocommit=True) as connection:
            others = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND "
                "application_name = 'psql'"
            )
            if connection.execute(others).fetchone() == (0,):
                break
        time.sleep(0.05)
    assert rows_of(ledger) in (old, newer)
    assert bool(ledger.controls.current().paused) == (rows_of(ledger) == old)
