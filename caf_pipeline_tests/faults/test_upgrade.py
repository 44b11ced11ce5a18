"""An upgrade with runs in flight: a ledger of version 0.2.0, chunks in every state, staging as that version left it.

The states are those of real runs; then the schema is taken back to what that version had, and staging to its files.
"""

import json
import subprocess
import sys
import threading

import psycopg
import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import LedgerError, LedgerUnreachable, ObjectReadFailed
from caf_pipeline.ledger import migrations
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.migrations import applied_migrations, migrate, sql_folder
from caf_pipeline.packing.journal import format as journal
from caf_pipeline.steps import chunk_steps
from caf_pipeline_tests.support.paying_runs import then
from caf_pipeline_tests.support.run_contexts import CHUNK_STEPS, archive_chunk

GROUP = "An upgrade with runs in flight"
OLD = ("0001.ledger", "0002.jackal")
"""The migrations of version 0.2.0."""

NEW_FUNCTIONS = (
    "look_up",
    "location_content",
    "location_identity",
    "location_version_id",
    "location_version",
    "location_part",
    "location_etag",
    "location_size",
)
NEW_VIEWS = ("objects_in_parts",)
LOCATIONS_OF_BEFORE = """
    ALTER VIEW file_locations RENAME TO locations_now;
    CREATE TABLE file_locations (source_id integer NOT NULL, file_path text COLLATE "C" NOT NULL,
        object_version text COLLATE "C" NOT NULL, part integer NOT NULL DEFAULT 0, caf_file_id bigint NOT NULL,
        start_byte bigint NOT NULL, end_byte bigint NOT NULL, version_id text, etag text NOT NULL,
        last_modified timestamptz NOT NULL, sha256 bytea NOT NULL, PRIMARY KEY (source_id, file_path, object_version, part));
    INSERT INTO file_locations SELECT source_id, file_path, object_version, part, caf_file_id, start_byte, end_byte, version_id,
        etag, last_modified, sha256 FROM locations_now;
    CREATE INDEX file_locations_by_chunk ON file_locations USING brin (caf_file_id);
    DROP VIEW locations_now;
    DROP TABLE locations;
"""
NEW_INDEXES = ("caf_files_under_way", "caf_files_by_located", "caf_files_suspected", "caf_files_unanswered")
NEW_TABLES = (
    "inventories",
    "current_exceptions",
    "waits",
    "object_parts",
    "noticed_keys",
    "messages_set_apart",
    "log_times",
    "bulk_looks",
    "queue_reads",
    "rebuilds",
    "folder_store",
    "storage_plans",
    "store_looks",
    "left_posts",
)
NEW_COLUMNS = {
    "caf_files": (
        "read_back_at",
        "restored_at",
        "read_back_from",
        "look_again_at",
        "tail_start",
        "tail_sha256",
        "adopted_at",
        "has_log_times",
        "suspected_at",
        "unanswered_at",
    ),
    "claims": ("last_modified",),
    "skipped_objects": ("last_modified",),
    "transactions": ("cost_told",),
}
"""What later ones added; a test holds all of these to the files."""

OLD_RECORD = (
    "caf_size_bytes",
    "merkle_root",
    "member_count",
    "member_bytes",
    "skipped_count",
    "released_count",
    "fetched_bytes",
    "seconds",
    "file",
)
"""What version 0.2.0 wrote of a finished packing."""

MIGRATE = """
import sys, psycopg
from caf_pipeline.ledger.migrations import migrate
print(migrate(psycopg.connect(sys.argv[1], autocommit=True)))
"""


def take_back(url):
    """Take a database's schema back to that of version 0.2.0; its rows stay."""
    with psycopg.connect(url, autocommit=True) as connection:
        for view in NEW_VIEWS:
            connection.execute(f"DROP VIEW {view}")
        connection.execute(LOCATIONS_OF_BEFORE)
        for function in NEW_FUNCTIONS:
            connection.execute(f"DROP FUNCTION {function}")
        for index in NEW_INDEXES:
            connection.execute(f"DROP INDEX {index}")
        for table in NEW_TABLES:
            connection.execute(f"DROP TABLE {table}")
        for table, columns in NEW_COLUMNS.items():
            for column in columns:
                connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        connection.execute("DELETE FROM _yoyo_migration WHERE migration_id <> ALL(%s)", [list(OLD)])
        assert applied_migrations(connection) == set(OLD)


def schema_of(url):
    query = (
        "SELECT table_name, column_name, data_type, is_nullable FROM information_schema.columns"
        " WHERE table_schema = 'public' AND table_name NOT LIKE '\\_yoyo%'"
    )
    with psycopg.connect(url) as connection:
        return set(connection.execute(query))


@pytest.fixture
def old_database_url(empty_database_url, tmp_path):
    """An empty ledger of version 0.2.0."""
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        folder = tmp_path / "sql"
        folder.mkdir()
        for name in OLD:
            (folder / f"{name}.sql").write_bytes((sql_folder() / f"{name}.sql").read_bytes())
        migrate(connection, folder)
    return empty_database_url


def test_a_ledger_that_is_taken_back_has_the_schema_of_its_version(old_database_url, database_url):
    take_back(database_url)
    assert schema_of(database_url) == schema_of(old_database_url)


# --- chunks in every state ---------------------------------------------------------------------------------------------


class HaltedError(Exception):
    """Ends a run in the middle of a step."""


def halt():
    raise HaltedError


HALTED_BEFORE = ("record_posting", "record_copies", "load_locations")


@pytest.fixture
def make_old_world(new_world, unruly_s3, new_bucket):
    """Makes a world of some chunks, of three objects each."""

    def make(chunks):
        world = new_world(
            bucket=unruly_s3.in_front_of(new_bucket),
            source={"target_size": 70_000},
            packing={"fetch_threads": 1, "request_attempts": 1},
        )
        for number in range(chunks):
            for part in range(3):
                world.put(f"chunk-{number:02d}/{part}", bytes([number, part]) * 10_000)
        return world

    return make


@pytest.fixture
def old_world(make_old_world):
    """A chunk for each step that a run may have ended after, or in."""
    return make_old_world(len(CHUNK_STEPS) + len(HALTED_BEFORE) + 2)


@pytest.fixture
def small_world(make_old_world):
    """Two chunks."""
    return make_old_world(2)


def leave_in_every_state(world, unruly_s3):
    """Run chunks up to each place that a run may end at; return the states."""
    names = world.plan()
    assert len(names) > len(CHUNK_STEPS) + len(HALTED_BEFORE)
    with world.run_context() as context:
        left = iter(names[1:])  # the first is not begun
        for step in CHUNK_STEPS:
            archive_chunk(context, next(left), until=step)
        for method in HALTED_BEFORE:
            then(context.ledger, method, halt, before=True)
            with pytest.raises(HaltedError):
                archive_chunk(context, next(left))
        last = next(left)
        (key,) = world.query("SELECT max(file_path) FROM claims JOIN caf_files USING (caf_file_id) WHERE name = %s", last)[0]
        unruly_s3.fail(500, "InternalError", key=key)
        with pytest.raises(ObjectReadFailed):
            archive_chunk(context, last)
        unruly_s3.well_behaved()
        return {context.ledger.chunk(name).state for name in names}


def leave_staging_as_before(world):
    """No journals; records with the fields that there were; the manifest of a packing that was killed."""
    parts = list(world.staging.glob("*.part"))
    assert parts
    for path in parts:
        path.with_suffix(".manifest").write_bytes(b"PAR1")
    for path in world.staging.glob("*.journal"):
        path.unlink()
    for path in world.staging.glob("*.packed.json"):
        record = json.loads(path.read_bytes())
        assert set(OLD_RECORD) <= set(record)
        path.write_text(json.dumps({name: record[name] for name in OLD_RECORD}))


def test_chunks_in_every_state_of_an_older_ledger_are_finished(fault, old_world, unruly_s3):
    states = leave_in_every_state(old_world, unruly_s3)
    wanted = {"planned", "packing", "sealed", "posting", "posted", "uploading", "verified", "located"}
    assert {str(state) for state in states} == wanted
    leave_staging_as_before(old_world)
    take_back(old_world.database_url)
    with fault(GROUP, "a ledger and staging of version 0.2.0, chunks in every state") as case:
        case.tried = len(old_world.chunks())
        with old_world.run_context() as context:
            for chunk in context.ledger.chunks():
                archive_chunk(context, chunk.name)
        old_world.finish()
        case.check(old_world)


# --- journals of other versions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, journal.JOURNAL_FORMAT + 1, 2**63])
def test_a_journal_of_another_format_is_not_resumed_and_the_chunk_ends_right(fault, small_world, unruly_s3, monkeypatch, version):
    (name, *_) = small_world.plan()
    with fault(GROUP, "a journal of another format") as case:
        unruly_s3.fail(500, "InternalError", key="chunk-00/2")
        with monkeypatch.context() as patched, small_world.run_context() as context:
            patched.setattr(journal, "JOURNAL_FORMAT", version)
            with pytest.raises(ObjectReadFailed):
                archive_chunk(context, name)
        assert list(small_world.staging.glob("*.journal"))
        unruly_s3.well_behaved()
        with small_world.run_context() as context:
            archive_chunk(context, name, until=chunk_steps.load_batch)
            chunk_steps.pack_chunk(context, name)
            report = chunk_steps.seal_chunk(context, name)
            assert report.resumed_bytes == 0
            assert report.not_resumed
        small_world.finish()
        case.check(small_world)


# --- the migration itself ------------------------------------------------------------------------------------------------


def waits_for_a_lock(connection):
    return connection.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone() != (0,)


def test_a_migration_waits_for_a_run_in_a_transaction_and_both_go_on(fault, small_world):
    (name, *_) = small_world.plan()
    take_back(small_world.database_url)
    with fault(GROUP, "a run of the old schema in a transaction while the migration runs") as case:
        with psycopg.connect(small_world.database_url) as run:
            run.execute("UPDATE caf_files SET state = 'packing', attempts = 1 WHERE name = %s", [name])
            applied = []
            migrating = threading.Thread(target=lambda: applied.extend(migrated(small_world.database_url)))
            migrating.start()
            with psycopg.connect(small_world.database_url, autocommit=True) as watching:
                while not waits_for_a_lock(watching):
                    assert migrating.is_alive()
            assert applied == []
            run.execute("UPDATE caf_files SET reason = '' WHERE name = %s", [name])
            run.commit()
            migrating.join()
            assert applied
            run.execute("UPDATE caf_files SET updated_at = now() WHERE name = %s", [name])  # and a statement of its own after it
            run.commit()
        assert [chunk.state for chunk in small_world.chunks() if chunk.name == name] == [ChunkState.PACKING]
        small_world.finish()
        case.check(small_world)


def migrated(url):
    database = Database(url)
    try:
        return database.migrate()
    finally:
        database.close()


def test_a_migration_that_may_not_wait_any_longer_says_so_and_has_changed_nothing(fault, small_world, monkeypatch):
    (name, *_) = small_world.plan()
    take_back(small_world.database_url)
    with fault(GROUP, "a migration that a run's transaction outlasts") as case:
        monkeypatch.setattr(migrations, "_LOCK_TIMEOUT", "50ms")
        before = schema_of(small_world.database_url)
        with psycopg.connect(small_world.database_url) as run:
            run.execute("UPDATE caf_files SET state = 'packing' WHERE name = %s", [name])
            with pytest.raises(LedgerUnreachable) as refused:
                migrated(small_world.database_url)
            assert refused.value.exit_code == LedgerError.exit_code
            assert "\n" not in str(refused.value)
            assert schema_of(small_world.database_url) == before
        small_world.finish()
        case.check(small_world)


def test_processes_that_migrate_at_once_apply_each_migration_once(fault, small_world):
    small_world.plan()
    take_back(small_world.database_url)
    with fault(GROUP, "several processes migrating at once") as case:
        case.tried = 4
        command = [sys.executable, "-c", MIGRATE, small_world.database_url]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(case.tried)]
        said = [process.communicate()[0].strip() for process in processes]
        assert [process.returncode for process in processes] == [0] * case.tried
        new = sorted(path.stem for path in sql_folder().glob("*.sql") if path.stem not in OLD)
        assert sorted(said) == sorted(["[]"] * (case.tried - 1) + [str(new)])
        small_world.finish()
        case.check(small_world)
