"""Fixtures of a real Postgres: a server for the session, and an empty database for each test."""

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg.rows import namedtuple_row

from caf_pipeline.ledger.database import Database, embedded_url
from caf_pipeline.ledger.embedded import embedded_server
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.sql_files import make_tables
from caf_pipeline.settings import Settings

_TEMPLATE = "caf_template"


class Rows(psycopg.Cursor[Any]):
    """A cursor that returns named tuples, and columns of them."""

    def one(self) -> Any:
        """Return the next row, which must exist."""
        row = self.fetchone()
        assert row is not None
        return row

    def scalar_one(self) -> Any:
        """Return the first column of the next row, which must exist."""
        return self.one()[0]

    def scalar_one_or_none(self) -> Any:
        """Return the first column of the next row; None without a row."""
        row = self.fetchone()
        return None if row is None else row[0]

    def scalars(self) -> list[Any]:
        """Return the first column of all rows."""
        return [row[0] for row in self]


class OpenDatabase(Database):
    """A database that closes all its connections at the end of a test."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._connections: list[psycopg.Connection] = []

    def connect(self) -> psycopg.Connection:
        """Return a new connection."""
        self._connections.append(super().connect())
        return self._connections[-1]

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.close()


def connected(database: Database) -> psycopg.Connection[Any]:
    """Return a connection whose context is a transaction, and which then closes."""
    return psycopg.connect(database.url, row_factory=namedtuple_row, cursor_factory=Rows)


_numbers = itertools.count(1)

_KEPT_BYTES = 8 << 20
"""Growth up to which a database is reused: files keep the space of deleted rows."""

# Deletes rows without checks of references. Ids begin at 1 again.
_EMPTY = """
    SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = current_database()
        AND pid <> pg_backend_pid();
    SET lock_timeout = '10s'; SET session_replication_role = replica;
    DO $$ DECLARE found text; BEGIN
        FOR found IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <>
            'schema_files' LOOP
            EXECUTE format('DELETE FROM %I', found);
        END LOOP;
    END $$;
    SELECT setval(seqrelid::regclass, 1, false) FROM pg_sequence
    """

# Parts of a database, besides rows, that a test may have changed. A new object has another oid.
_SCHEMA = """SELECT concat_ws(E'\n',
    (SELECT string_agg(concat_ws(' ', oid, relname, relowner, relacl, relnatts, relchecks), E'\n'
        ORDER BY oid)
        FROM pg_class WHERE relnamespace NOT IN ('pg_catalog'::regnamespace,
            'pg_toast'::regnamespace)
        AND relnamespace <> 'information_schema'::regnamespace),
    (SELECT string_agg(concat_ws(' ', oid, tgname, tgenabled), E'\n' ORDER BY oid) FROM pg_trigger),
    (SELECT string_agg(concat_ws(' ', oid, proname), E'\n' ORDER BY oid) FROM pg_proc WHERE oid >=
        16384),
    (SELECT string_agg(concat_ws(' ', oid, nspname, nspacl), E'\n' ORDER BY oid) FROM pg_namespace
        WHERE nspname !~ '^pg_'),
    (SELECT string_agg(concat_ws(' ', attrelid, attname, atttypid, attnotnull, attisdropped), E'\n'
        ORDER BY attrelid, attnum)
        FROM pg_attribute WHERE attrelid >= 16384),
    (SELECT count(*) FROM pg_statistic WHERE starelid >= 16384),
    (SELECT string_agg(setconfig::text, E'\n') FROM pg_db_role_setting JOIN pg_database ON
        setdatabase = pg_database.oid
        WHERE datname = current_database()),
    (SELECT string_agg(name || sha256, E'\n' ORDER BY name) FROM schema_files))"""


def _administer(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def end_connections(database: Database, admin_url: str) -> None:
    """End the server's side of all connections to the database, as its restart does."""
    of_database = "FROM pg_stat_activity WHERE datname = %s"
    with psycopg.connect(admin_url, autocommit=True) as admin:
        admin.execute(f"SELECT pg_terminate_backend(pid) {of_database}", [database.name])
        while admin.execute(f"SELECT count(*) {of_database}", [database.name]).fetchone() != (0,):
            pass


def database_at(server_url: str, name: str) -> str:
    """Return the address of another database of a server."""
    return urlsplit(server_url)._replace(path=f"/{name}").geturl()


class Databases:
    """Databases with the tables on one server. A database that was given back is reused.

    Copying the template and dropping the copy take 60 to 200 ms of CPU time. Emptying a database
    takes 10 ms.
    """

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._free: list[OpenDatabase] = []
        _administer(server_url, f"CREATE DATABASE {_TEMPLATE}")
        template = Database(database_at(server_url, _TEMPLATE))
        with template.connect() as connection:
            make_tables(connection)
        self._schema, self._bytes = self._schema_and_size(template)

    def take(self) -> OpenDatabase:
        """Return a database without rows."""
        if self._free:
            return self._free.pop()
        name = f"test_{next(_numbers)}"
        # FILE_COPY makes a checkpoint, but without waiting for a disk takes half the time of
        # WAL_LOG.
        _administer(
            self._server_url, f"CREATE DATABASE {name} TEMPLATE {_TEMPLATE} STRATEGY file_copy"
        )
        return OpenDatabase(database_at(self._server_url, name))

    def give_back(self, database: OpenDatabase) -> None:
        """Empty a database for reuse, or drop it if it has grown or differs from the template."""
        database.close()
        database = OpenDatabase(
            database_at(self._server_url, database.name)
        )  # a test may have changed it
        try:
            _administer(database.url, _EMPTY)
            schema, size_bytes = self._schema_and_size(database)
            if schema == self._schema and size_bytes < self._bytes + _KEPT_BYTES:
                self._free.append(database)
                return
        except psycopg.Error:  # the test refused connections, or renamed a table
            pass
        _administer(self._server_url, f"DROP DATABASE {database.name} WITH (FORCE)")

    @contextlib.contextmanager
    def taken(self) -> Iterator[Database]:
        """Yield a database without rows for the duration of the context."""
        database = self.take()
        try:
            yield database
        finally:
            self.give_back(database)

    @staticmethod
    def _schema_and_size(database: Database) -> tuple[str, int]:
        """Return a database's schema, for a comparison, and its size."""
        with connected(database) as connection:
            return tuple(
                connection.execute(f"{_SCHEMA}, pg_database_size(current_database())").one()
            )


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The address of a server's `postgres` database; the server ends with the session."""
    home = Path(tempfile.mkdtemp(prefix="caf-tests-"))
    try:
        url = embedded_url(Settings(home=home))
        # A test's data need not survive a power cut. Without vacuum, rows keep the order of
        # insertion, even in a reused database.
        settings = ("fsync", "full_page_writes", "autovacuum")
        _administer(
            url, *(f"ALTER SYSTEM SET {name} = off" for name in settings), "SELECT pg_reload_conf()"
        )
        yield url
    finally:
        embedded_server(home / "postgres").close()
        shutil.rmtree(home)


@pytest.fixture(scope="session")
def databases(postgres_url: str) -> Databases:
    return Databases(postgres_url)


@pytest.fixture
def empty_database_url(postgres_url: str) -> Iterator[str]:
    """The address of a new database without tables."""
    name = f"empty_{next(_numbers)}"
    _administer(postgres_url, f"CREATE DATABASE {name}")
    yield database_at(postgres_url, name)
    _administer(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database(databases: Databases) -> Iterator[Database]:
    """A database with the tables and without rows."""
    with databases.taken() as database:
        yield database


@pytest.fixture
def database_url(database: Database) -> str:
    """The address of a database with the tables and without rows, `postgresql://…`."""
    return database.url


@pytest.fixture
def ledger(database: Database) -> Ledger:
    """A ledger in a new database."""
    return Ledger(database)


DEADLOCK = """
    CREATE SEQUENCE deadlocks;
    CREATE FUNCTION deadlock_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF nextval('deadlocks') = 1 THEN
            RAISE EXCEPTION 'deadlock detected' USING ERRCODE = 'deadlock_detected';
        END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER deadlock_once BEFORE INSERT ON header_sets
        FOR EACH ROW EXECUTE FUNCTION deadlock_once()
    """
