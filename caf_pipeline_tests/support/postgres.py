"""Fixtures of a real Postgres: one embedded server for the session, an empty database with the
tables for each test.
"""

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
from caf_pipeline.ledger.schema_files import make_tables
from caf_pipeline.settings import Settings

_TEMPLATE = "caf_template"


class Rows(psycopg.Cursor[Any]):
    """A cursor that returns named tuples, and columns of them."""

    def one(self) -> Any:
        """Return the next row, which there is."""
        row = self.fetchone()
        assert row is not None
        return row

    def scalar_one(self) -> Any:
        """Return the first column of the next row, which there is."""
        return self.one()[0]

    def scalar_one_or_none(self) -> Any:
        """Return the first column of the next row, None if there is none."""
        row = self.fetchone()
        return None if row is None else row[0]

    def scalars(self) -> list[Any]:
        """Return the first column of all rows."""
        return [row[0] for row in self]


class OpenDatabase(Database):
    """A database that closes at the end of a test what the test's ledgers opened."""

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
    """Return a connection, whose context is a transaction, and which is closed at the end of it."""
    return psycopg.connect(database.url, row_factory=namedtuple_row, cursor_factory=Rows)


_numbers = itertools.count(1)

_KEPT_BYTES = 8 << 20
"""By how much a database may have grown that is kept: nothing removes what deleted rows took of its
files.
"""

# Rows go without a look at what refers to them. Ids begin at 1 again.
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

# What a test may have changed of a database beside its rows. What is made again has another oid.
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


def database_at(server_url: str, name: str) -> str:
    """Return the address of another database of a server."""
    return urlsplit(server_url)._replace(path=f"/{name}").geturl()


class Databases:
    """Databases with the tables, of one server, as many as are asked for: one that was given back
    serves again.

    A copy of the template and its end take 60 to 200 ms of CPU time, the more the more files the
    disk has lately removed; to empty a database takes 10.
    """

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._free: list[OpenDatabase] = []
        _administer(server_url, f"CREATE DATABASE {_TEMPLATE}")
        template = Database(database_at(server_url, _TEMPLATE))
        with template.connect() as connection:
            make_tables(connection)
        self._schema, self._bytes = self._looked_at(template)

    def take(self) -> OpenDatabase:
        """Return a database without a row."""
        if self._free:
            return self._free.pop()
        name = f"test_{next(_numbers)}"
        # FILE_COPY makes a checkpoint, but where no disk is waited for it takes half of the time of
        # WAL_LOG.
        _administer(
            self._server_url, f"CREATE DATABASE {name} TEMPLATE {_TEMPLATE} STRATEGY file_copy"
        )
        return OpenDatabase(database_at(self._server_url, name))

    def give_back(self, database: OpenDatabase) -> None:
        """Empty a database for the next one that asks, or drop it where it has grown, or is not
        what the template is.
        """
        database.close()
        database = OpenDatabase(
            database_at(self._server_url, database.name)
        )  # a test may have changed it
        try:
            _administer(database.url, _EMPTY)
            schema, size_bytes = self._looked_at(database)
            if schema == self._schema and size_bytes < self._bytes + _KEPT_BYTES:
                self._free.append(database)
                return
        except psycopg.Error:  # the test let nobody in, or renamed a table
            pass
        _administer(self._server_url, f"DROP DATABASE {database.name} WITH (FORCE)")

    @contextlib.contextmanager
    def taken(self) -> Iterator[Database]:
        """Give a database without a row for as long as the context lasts."""
        database = self.take()
        try:
            yield database
        finally:
            self.give_back(database)

    @staticmethod
    def _looked_at(database: Database) -> tuple[str, int]:
        """Return all of a database's schema, to be compared, and its size."""
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
        # What a test wrote need not outlive a power cut. Rows stand in the order in which they were
        # written, also in a database that serves again: nothing makes room between them.
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
    """The databases of the session's server."""
    return Databases(postgres_url)


@pytest.fixture
def empty_database_url(postgres_url: str) -> Iterator[str]:
    """The address of a new database without a schema."""
    name = f"empty_{next(_numbers)}"
    _administer(postgres_url, f"CREATE DATABASE {name}")
    yield database_at(postgres_url, name)
    _administer(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database(databases: Databases) -> Iterator[Database]:
    """A database with the tables and without a row."""
    with databases.taken() as database:
        yield database


@pytest.fixture
def database_url(database: Database) -> str:
    """The address of a database with the tables and without a row, `postgresql://…`."""
    return database.url


@pytest.fixture
def ledger(database: Database) -> Ledger:
    """A ledger in a new database."""
    return Ledger(database)
