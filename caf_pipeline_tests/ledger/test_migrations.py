"""Migrations: applied once, whole or not at all, by one of many, and not by older software."""

import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from caf_pipeline.errors import LedgerError, LedgerUnreachable
from caf_pipeline.ledger import database as database_module
from caf_pipeline.ledger import migrations
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.migrations import applied_migrations, migrate, sql_folder
from caf_pipeline.ledger.postgres import Ledger
from caf_pipeline.settings import Settings
from caf_pipeline.waits import Waits

MIGRATE = """
import sys, psycopg
from pathlib import Path
from caf_pipeline.ledger.migrations import migrate
print(migrate(psycopg.connect(sys.argv[1], autocommit=True), Path(sys.argv[2])))
"""

SLEEP = "DO $$ BEGIN PERFORM 1; PERFORM pg_sleep({}); END $$;"


@pytest.fixture
def connection(empty_database_url):
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        yield connection


def write(folder: Path, **files: str) -> Path:
    for name, sql in files.items():
        (folder / f"{name}.sql").write_text(sql)
    return folder


def tables(connection):
    query = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public' AND table_name NOT LIKE '\\_yoyo%'"
    return {name for (name,) in connection.execute(query)}


def start(url, folder):
    return subprocess.Popen(
        [sys.executable, "-c", MIGRATE, url, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_an_empty_database_gets_every_migration_once(empty_database_url):
    database = Database(empty_database_url)
    assert database.migrate() == sorted(path.stem for path in sql_folder().glob("*.sql"))
    assert database.migrate() == []
    database.close()


def test_the_migrations_are_ascii_since_they_are_read_in_any_locale():
    assert all(path.read_bytes().isascii() for path in sql_folder().glob("*.sql"))


def test_a_later_migration_is_applied_alone(connection, tmp_path):
    migrate(connection, write(tmp_path, a="CREATE TABLE a ()"))
    assert migrate(connection, write(tmp_path, b="CREATE TABLE b ()")) == ["b"]
    assert tables(connection) == {"a", "b"}


def test_a_migration_that_fails_leaves_nothing(connection, tmp_path):
    folder = write(tmp_path, a="CREATE TABLE a (); CREATE TABLE oops (", b="CREATE TABLE b ()")
    with pytest.raises(psycopg.errors.SyntaxError):
        migrate(connection, folder)
    assert tables(connection) == set()
    assert applied_migrations(connection) == set()


def test_a_database_of_newer_software_is_refused_with_a_hint(connection, tmp_path):
    migrate(connection, write(tmp_path, a="CREATE TABLE a ()", b="CREATE TABLE b ()"))
    (tmp_path / "b.sql").unlink()
    with pytest.raises(LedgerError, match="the migration b,") as refused:
        migrate(connection, tmp_path)
    assert "update" in refused.value.hint


# As yoyo-migrations 9.0.0 made them; it ran the migrations up to version 0.3.0.
YOYO = """
    CREATE TABLE _yoyo_migration (migration_hash varchar(64), migration_id varchar(255), applied_at_utc timestamp,
        PRIMARY KEY (migration_hash));
    CREATE TABLE _yoyo_version (version int NOT NULL PRIMARY KEY, installed_at_utc timestamp);
    INSERT INTO _yoyo_version VALUES (2, now());
    INSERT INTO _yoyo_migration VALUES ('ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb', 'a', now())
"""


def test_what_yoyo_applied_is_not_applied_again_and_what_is_applied_now_is_read_by_yoyo(connection, tmp_path):
    connection.execute(YOYO)
    assert migrate(connection, write(tmp_path, a="CREATE TABLE a ()", b="CREATE TABLE b ()")) == ["b"]
    assert tables(connection) == {"b"}
    query = "SELECT migration_id FROM _yoyo_migration WHERE migration_hash = encode(sha256(migration_id::bytea), 'hex')"
    assert {name for (name,) in connection.execute(query)} == {"a", "b"}


def test_of_two_processes_that_migrate_at_once_one_does_it_and_both_end_right(connection, empty_database_url, tmp_path):
    folder = write(tmp_path, a=f"CREATE TABLE a (); {SLEEP.format(0.5)}", b="CREATE TABLE b ()")
    both = [start(empty_database_url, folder) for _ in range(2)]
    outputs = sorted(process.communicate()[0].strip() for process in both)
    assert outputs == ["['a', 'b']", "[]"]
    assert tables(connection) == {"a", "b"}


def test_who_waits_long_for_another_process_that_migrates_ends_and_says_so(connection, empty_database_url, tmp_path, monkeypatch):
    monkeypatch.setattr(migrations, "_LOCK_TIMEOUT", "1s")
    with psycopg.connect(empty_database_url) as other:  # in a transaction, as one that migrates is
        other.execute("SELECT pg_advisory_xact_lock(%s)", (migrations._LOCK,))
        with pytest.raises(LedgerUnreachable, match="another process brings the database's tables up to this version"):
            migrate(connection, write(tmp_path, a="CREATE TABLE a ()"))
    assert tables(connection) == set()


def test_while_the_database_is_migrated_it_is_said(empty_database_url, monkeypatch):
    monkeypatch.setattr(database_module, "UNANSWERED_SECONDS", 0)
    told = []
    settings = Settings(database_url=empty_database_url)
    for _ in range(2):
        database_module.open_database(settings, Waits(lambda waits: told.extend(wait.sentence for wait in waits))).close()
    assert (
        len([sentence for sentence in told if "tables are brought up to this version; it takes longer the more" in sentence]) == 1
    )


def test_a_process_killed_while_it_migrates_is_in_nobodys_way(connection, empty_database_url, tmp_path):
    folder = write(tmp_path, a=f"CREATE TABLE a (); {SLEEP.format(600)}")
    with start(empty_database_url, folder) as process:
        query = "SELECT pid FROM pg_stat_activity WHERE query LIKE '%pg_sleep(600)%' AND pid <> pg_backend_pid()"
        while not (sleeping := connection.execute(query).fetchone()):
            assert process.poll() is None, process.stderr.read()
        process.kill()
    # The server notices a vanished client when its statement ends.
    connection.execute("SELECT pg_terminate_backend(%s)", sleeping)
    assert migrate(connection, write(tmp_path, a="CREATE TABLE a ()")) == ["a"]
    assert tables(connection) == {"a"}


def names_of_migrations():
    return sorted(path.stem for path in sql_folder().glob("*.sql"))


def test_windows_that_were_counted_before_they_were_known_to_be_proven_are_counted_again(connection, tmp_path):
    before = {name: (sql_folder() / f"{name}.sql").read_text() for name in ("0001.ledger", "0002.jackal", "0003.care")}
    migrate(connection, write(tmp_path, **before))
    connection.execute(
        "INSERT INTO sources (name, archive_id, address) VALUES ('s', 'a', 's3://s');"
        "INSERT INTO plans (source_id, name, sha256, snapshot, folder, object_count, object_bytes)"
        " VALUES (1, '01234567', '\\x01', 'snapshot', 'folder', 1, 10);"
        "INSERT INTO caf_files (name, source_id, plan_id, number, object_count, object_bytes, expected_size_bytes, read_back_at)"
        " VALUES ('s-1', 1, 1, 1, 1, 10, 100, now());"
        "INSERT INTO copies (caf_file_id, provider, proof, last_proven, last_window, windows) VALUES (1, 'p', 'q', 99, 9, 7)"
    )
    migrate(connection)
    assert connection.execute("SELECT windows, last_window, last_proven FROM copies").fetchall() == [(0, None, 99)]
    assert connection.execute("SELECT read_back_at IS NULL, read_back_from FROM caf_files").fetchall() == [(False, None)]


def test_a_ledger_of_before_jackal_keeps_its_rows(connection, empty_database_url, tmp_path):
    migrate(connection, write(tmp_path, **{"0001.ledger": (sql_folder() / "0001.ledger.sql").read_text()}))
    connection.execute(
        "INSERT INTO sources (name, archive_id, address) VALUES ('s', 'a', 's3://s');"
        "INSERT INTO plans (source_id, name, sha256, snapshot, folder, object_count, object_bytes)"
        " VALUES (1, '01234567', '\\x01', 'snapshot', 'folder', 1, 10);"
        "INSERT INTO caf_files (name, source_id, plan_id, number, state, parked_reason, object_count, object_bytes,"
        " expected_size_bytes) VALUES ('s-1', 1, 1, 1, 'parked', 'no money', 1, 10, 100);"
        "INSERT INTO copies (caf_file_id, provider, proof) VALUES (1, 'p', 'q')"
    )
    assert migrate(connection) == [name for name in names_of_migrations() if name > "0001.ledger"]
    database = Database(empty_database_url)
    ledger = Ledger(database)
    assert (ledger.chunk("s-1").state, ledger.chunk("s-1").reason) == ("parked", "no money")
    assert [(copy.provider, copy.listed, copy.windows) for copy in ledger.known_copies("s-1")] == [("p", True, 0)]
    database.close()
