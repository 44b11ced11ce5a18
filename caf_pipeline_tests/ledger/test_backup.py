"""Backups of a ledger are written whole and restored whole, or not at all."""

import errno
import os
import random
import signal
import subprocess
import sys
import time

import psycopg
import pytest

from caf_pipeline.errors import (
    HeldByOther,
    IntegrityError,
    LedgerError,
    SettingsError,
    StagingError,
    UsageError,
)
from caf_pipeline.ledger import backup
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.embedded import wheel_programs
from caf_pipeline.ledger.sql_files import make_tables
from caf_pipeline.waits import Waits
from caf_pipeline_tests.support.ledger_rows import holder, register
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
def backup_after(tmp_path, empty_database_url):
    """Return a function that backs up another ledger after a statement."""

    def back_up(statement):
        with psycopg.connect(empty_database_url, autocommit=True) as connection:
            make_tables(connection)
            connection.execute(statement)
        path = tmp_path / "other.dump"
        backup.back_up(Database(empty_database_url), path, embedded=True)
        return path

    return back_up


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


def test_a_restored_table_has_its_comments(programs, dump, execute):
    backup.restore(programs, dump, reason="a test")
    comments = execute(
        "SELECT obj_description('plans'::regclass), col_description('plans'::regclass, 1)"
    )
    assert all(comments.fetchone())


def test_a_backup_is_private_and_replaces_nothing(ledger, dump):
    assert dump.stat().st_mode & 0o777 == 0o600
    before = dump.read_bytes()
    with pytest.raises(UsageError, match="exists"):
        backup.back_up(ledger.database, dump, embedded=True)
    assert dump.read_bytes() == before
    assert list(dump.parent.glob(".caf-*")) == []


def test_all_bytes_of_a_backup_are_reported(ledger, programs, tmp_path):
    written, compared, passed_on = [], [], []
    path = tmp_path / "ledger.dump"
    size_bytes = backup.back_up(ledger.database, path, embedded=True, advance=written.append)
    backup.read_backup(programs, path, advance=compared.append)
    backup.restore(programs, path, reason="a test", advance=passed_on.append)
    dumped_bytes = size_bytes - backup._HASH_LINE_BYTES
    assert [sum(written), sum(compared), sum(passed_on)] == [dumped_bytes] * 3


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


def test_a_refused_restore_of_a_large_backup_ends(ledger, programs, tmp_path, execute):
    execute("INSERT INTO providers (provider) SELECT 'jkl' || n FROM generate_series(1, 99999) n")
    path = tmp_path / "large.dump"
    backup.back_up(ledger.database, path, embedded=True)
    with ledger.leases.hold("plan/src", holder("run-1")), pytest.raises(HeldByOther):
        backup.restore(programs, path, reason="a test")


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def without_hash(path):
    """Cut the file to what pg_dump wrote."""
    path.write_bytes(path.read_bytes()[: -backup._HASH_LINE_BYTES])
    return path


def test_a_backup_with_a_flipped_bit_is_refused(ledger, programs, dump):
    register(ledger, ["b"])
    before, whole = rows_of(ledger), dump.read_bytes()
    bits = range(len(whole) * 8)
    last = bits[-8 * backup._HASH_LINE_BYTES :]
    for bit in [*random.Random(1).sample(bits, 30), *random.Random(1).sample(last, 10)]:
        dump.write_bytes(flipped(whole, bit))
        with pytest.raises((IntegrityError, UsageError)):
            backup.read_backup(programs, dump)
        with pytest.raises((IntegrityError, UsageError, LedgerError)):
            backup.restore(programs, dump, reason="a test")
    assert rows_of(ledger) == before


def test_a_backup_that_is_cut_off_is_refused(ledger, programs, dump):
    register(ledger, ["b"])
    before, whole = rows_of(ledger), dump.read_bytes()
    for size in (len(whole) // 2, len(whole) - 100, len(whole) - 1):
        dump.write_bytes(whole[:size])
        with pytest.raises(UsageError):
            backup.restore(programs, dump, reason="a test")
    assert rows_of(ledger) == before
    assert ledger.controls.current().paused == ""


def test_wrong_bytes_are_refused_as_unverified_too(ledger, programs, dump):
    dump.write_bytes(flipped(dump.read_bytes(), 8000))
    with pytest.raises(IntegrityError):
        backup.read_backup(programs, dump, unverified=True)


def test_a_file_that_changes_after_its_check_restores_nothing(ledger, programs, dump, monkeypatch):
    register(ledger, ["b"])
    before, read_entries = rows_of(ledger), backup._entries

    def change(*arguments):
        entries = read_entries(*arguments)
        whole = dump.read_bytes()
        dump.write_bytes(whole.replace(b"SQLAlchemy", b"SQLalchemy").replace(b"18.", b"17.", 1))
        assert dump.read_bytes() != whole
        return entries

    monkeypatch.setattr(backup, "_entries", change)
    backup.read_backup(programs, dump)
    with pytest.raises(IntegrityError):
        backup.restore(programs, dump, reason="a test")
    assert rows_of(ledger) == before


def test_a_backup_without_a_hash_is_restored_only_as_unverified(ledger, programs, dump):
    before = rows_of(ledger)
    without_hash(dump)
    with pytest.raises(UsageError) as refused:
        backup.read_backup(programs, dump)
    assert "--unverified" in refused.value.hint
    with pytest.raises(UsageError):
        backup.restore(programs, dump, reason="a test")
    register(ledger, ["b"])
    assert backup.read_backup(programs, dump, unverified=True).sources
    backup.restore(programs, dump, reason="a test", unverified=True)
    assert rows_of(ledger) == before


def test_a_backup_without_the_rows_of_a_table_is_refused(ledger, programs, dump, tmp_path):
    before, path = rows_of(ledger), tmp_path / "part.dump"
    options = ("--format=custom", "--exclude-table-data=claims", f"--file={path}")
    with programs.started("pg_dump", *options, connects=True):
        pass
    with pytest.raises(UsageError, match="claims"):
        backup.restore(programs, path, reason="a test", unverified=True)
    assert rows_of(ledger) == before


def test_pg_restore_reads_a_backup(ledger, dump, empty_database_url):
    before = rows_of(ledger)
    command = [str(wheel_programs() / "pg_restore"), "--no-owner", "--exit-on-error"]
    subprocess.run([*command, f"--dbname={empty_database_url}", str(dump)], check=True)
    other = type(ledger)(Database(empty_database_url))
    assert rows_of(other) == before


def test_a_restored_ledger_can_be_backed_up_and_restored(ledger, programs, dump, tmp_path):
    before = rows_of(ledger)
    for name in ("second.dump", "third.dump"):
        backup.restore(programs, dump, reason="a test")
        dump = tmp_path / name
        backup.back_up(ledger.database, dump, embedded=True)
    assert rows_of(ledger) == before


_VIEW = "CREATE OR REPLACE VIEW last_whole_inventories AS SELECT source_id, max(taken_at) AS "


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        (f"{_VIEW} taken_at FROM inventories GROUP BY 1", "view last_whole_inventories"),
        ("DROP VIEW newer_claims", "newer_claims"),
        ("ALTER FUNCTION look_up SET enable_seqscan = on", "function look_up"),
        ("DROP TRIGGER has_its_copies ON caf_files", "caf_files.has_its_copies"),
        ("ALTER TABLE caf_files DISABLE TRIGGER has_its_copies", "has_its_copies"),
        ("ALTER TABLE caf_files DROP CONSTRAINT sealed_before", "caf_files.sealed_before"),
        ("ALTER TABLE orders ADD CHECK (value <> 'x')", "orders_value_check1"),
        ("ALTER TABLE claims DROP CONSTRAINT claims_pkey", "claims_pkey"),
        ("ALTER TABLE full_reads DROP CONSTRAINT full_reads_caf_file_id_store_fkey", "full_reads"),
        ("DROP INDEX transaction_posts_live", "transaction_posts_live"),
        ('ALTER TABLE run_progress ALTER run TYPE text COLLATE "C"', "column run_progress.run"),
        ("ALTER TABLE caf_files ALTER reason DROP NOT NULL", "column caf_files.reason"),
        ("ALTER TABLE caf_files ALTER state SET DEFAULT 'located'", "column caf_files.state"),
        ("ALTER TABLE run_progress ADD extra int", "column run_progress.extra"),
        ("CREATE RULE none AS ON INSERT TO claims DO INSTEAD NOTHING", "rule claims"),
        ("ALTER TABLE claims ENABLE ROW LEVEL SECURITY", "claims"),
    ],
)
def test_a_backup_of_another_definition_is_refused(
    programs, ledger, backup_after, change, differing
):
    before, path = rows_of(ledger), backup_after(change)
    backup.read_backup(programs, path)
    with pytest.raises(LedgerError, match=differing):
        backup.restore(programs, path, reason="a test")
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
def test_a_backup_of_another_versions_ledger_is_refused(programs, backup_after, change):
    with pytest.raises(UsageError, match="another version"):
        backup.read_backup(programs, backup_after(change))


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
from caf_pipeline.ledger.embedded import wheel_programs
from caf_pipeline.ledger.sql_files import make_tables
from caf_pipeline.waits import Waits
from pathlib import Path
database = Database(sys.argv[1])
programs = backup.Programs(database, embedded=True)
print("begins", flush=True)
backup.restore(programs, Path(sys.argv[2]), reason="a test")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [0.05, 0.2])
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
