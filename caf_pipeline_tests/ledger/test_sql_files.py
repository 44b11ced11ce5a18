"""The SQL files run once, completely or not at all, in one of many processes."""

import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from caf_pipeline.errors import LedgerError, LedgerUnreachable
from caf_pipeline.ledger import database as database_module
from caf_pipeline.ledger import sql_files as schema_files
from caf_pipeline.ledger.sql_files import make_tables
from caf_pipeline.settings import Settings
from caf_pipeline.system.package_files import package_file
from caf_pipeline.waits import Waits
from caf_pipeline.wiring import open_ledger

MAKE = """
import sys, psycopg
from pathlib import Path
from caf_pipeline.ledger.sql_files import make_tables
print(make_tables(psycopg.connect(sys.argv[1], autocommit=True), Path(sys.argv[2])))
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
    query = (
        "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public' AND "
        "table_name <> 'schema_files'"
    )
    return {name for (name,) in connection.execute(query)}


def start(url, folder):
    return subprocess.Popen(
        [sys.executable, "-c", MAKE, url, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_each_file_runs_once(connection):
    assert make_tables(connection) == sorted(
        path.stem for path in package_file("sql").glob("0*.sql")
    )
    assert make_tables(connection) == []


def test_the_files_are_ascii_for_any_locale():
    assert all(path.read_bytes().isascii() for path in package_file("sql").glob("*.sql"))


def test_a_later_file_runs_alone(connection, tmp_path):
    make_tables(connection, write(tmp_path, **{"1": "CREATE TABLE a ()"}))
    assert make_tables(connection, write(tmp_path, **{"2": "CREATE TABLE b ()"})) == ["2"]
    assert tables(connection) == {"a", "b"}


def test_a_file_that_fails_leaves_nothing(connection, tmp_path):
    folder = write(
        tmp_path, **{"1": "CREATE TABLE a (); CREATE TABLE oops (", "2": "CREATE TABLE b ()"}
    )
    with pytest.raises(psycopg.errors.SyntaxError):
        make_tables(connection, folder)
    assert tables(connection) == set()


def test_a_ledger_of_newer_software_is_refused(connection, tmp_path):
    make_tables(connection, write(tmp_path, **{"1": "CREATE TABLE a ()", "2": "CREATE TABLE b ()"}))
    (tmp_path / "2.sql").unlink()
    with pytest.raises(LedgerError, match="another version"):
        make_tables(connection, tmp_path)


def test_a_ledger_of_an_edited_file_is_refused_and_unchanged(connection, tmp_path):
    make_tables(connection, write(tmp_path, **{"1": "CREATE TABLE a ()"}))
    with pytest.raises(LedgerError, match="another version"):
        make_tables(
            connection,
            write(
                tmp_path,
                **{"1": "CREATE TABLE a (); CREATE TABLE more ()", "2": "CREATE TABLE b ()"},
            ),
        )
    assert tables(connection) == {"a"}


def test_files_without_a_number_do_not_run(connection, tmp_path):
    assert make_tables(connection, write(tmp_path, roles="CREATE ROLE anybody")) == []


def test_a_ledger_of_0_4_0_is_refused_and_unchanged(connection):
    connection.execute("CREATE TABLE _yoyo_migration (); CREATE TABLE caf_files ()")
    with pytest.raises(LedgerError, match="another version") as refused:
        make_tables(connection, hint="a hint")
    assert refused.value.hint == "a hint"
    assert tables(connection) == {"_yoyo_migration", "caf_files"}


def test_tables_of_other_programs_do_not_matter(connection, tmp_path):
    connection.execute("CREATE TABLE _yoyo_migration (); CREATE TABLE theirs ()")
    assert make_tables(connection, write(tmp_path, **{"1": "CREATE TABLE a ()"})) == ["1"]


def test_the_hint_for_an_edited_file_makes_a_ledger(tmp_path, monkeypatch):
    home = tmp_path / "a home"
    files = schema_files.schema_files
    with (
        contextlib.closing(open_ledger(Settings(home=home))) as ledger,
        monkeypatch.context() as patched,
    ):
        edited = [replace(file, sha256="0") for file in files()]
        patched.setattr(schema_files, "schema_files", lambda folder=None: edited)
        with pytest.raises(LedgerError) as refused:
            ledger.bring_up(Waits())
    _, _, command = refused.value.hint.partition(": ")
    subprocess.run(command, shell=True, check=True)
    assert not home.exists()
    assert (tmp_path / "a home.old" / "postgres").exists()


def test_one_of_two_processes_makes_the_tables(connection, empty_database_url, tmp_path):
    folder = write(
        tmp_path, **{"1": f"CREATE TABLE a (); {SLEEP.format(0.5)}", "2": "CREATE TABLE b ()"}
    )
    both = [start(empty_database_url, folder) for _ in range(2)]
    outputs = [process.communicate() for process in both]
    assert sorted(output.strip() for output, _ in outputs) == ["['1', '2']", "[]"], outputs
    assert tables(connection) == {"a", "b"}


def test_a_process_that_waits_long_for_another_ends(connection, empty_database_url, tmp_path):
    folder = write(tmp_path, **{"1": "CREATE TABLE a ()"})
    with psycopg.connect(empty_database_url) as other:  # in a transaction
        other.execute("SELECT pg_advisory_xact_lock(%s)", (schema_files._LOCK,))
        with pytest.raises(LedgerUnreachable):
            make_tables(connection, folder, lock_timeout="1s")
    assert tables(connection) == set()


def test_a_process_that_creates_the_tables_shows_a_wait(empty_database_url, monkeypatch):
    monkeypatch.setattr(database_module, "UNANSWERED_SECONDS", 0)
    sentences = []
    settings = Settings(database_url=empty_database_url)
    for _ in range(2):
        waits = Waits(lambda waits: sentences.extend(wait.sentence for wait in waits))
        open_ledger(settings, waits).close()
    assert len([sentence for sentence in sentences if "tables are created" in sentence]) == 1


def test_a_process_killed_while_creating_tables_blocks_no_other(
    connection, empty_database_url, tmp_path
):
    folder = write(tmp_path, **{"1": f"CREATE TABLE a (); {SLEEP.format(600)}"})
    with start(empty_database_url, folder) as process:
        query = (
            "SELECT pid FROM pg_stat_activity WHERE query LIKE '%pg_sleep(600)%' AND pid <> "
            "pg_backend_pid()"
        )
        while not (sleeping := connection.execute(query).fetchone()):
            assert process.poll() is None, process.stderr.read()
        process.kill()
    # The server notices a vanished client when its statement ends.
    connection.execute("SELECT pg_terminate_backend(%s)", sleeping)
    assert make_tables(connection, write(tmp_path, **{"1": "CREATE TABLE a ()"})) == ["1"]
    assert tables(connection) == {"a"}
