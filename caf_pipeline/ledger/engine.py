"""Transactions on the ledger's database, by SQLAlchemy's engine and pool.

Source: "Connection Pooling" and "Working with Transactions and the DBAPI" in the SQLAlchemy 2.0
documentation.
"""

import contextlib
import os
import weakref
from collections.abc import Iterator
from enum import Enum
from typing import Final

import psycopg
from sqlalchemy import Connection, bindparam, create_engine, event, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoFreeConnection

from caf_pipeline.errors import LedgerUnreachable, NotLocated
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.tables import SOURCES
from caf_pipeline.waits import Waits

KEPT_IDLE: Final = 2  # a step's statement and the renewal of its lease
MOST_CONNECTIONS: Final = 10  # steps in threads
POOL_SECONDS: Final = 30  # for which one that is free is waited for

STILL_SECONDS: Final = 30  # as long as a lease
"""After which the server ends a transaction in whose middle its process does nothing, suspended or
swapped out: the locks that it holds would keep every other run waiting, for as long as its machine
answers for it. Not in the middle of a COPY, which to the server is no standstill: that of claims or
locations holds its locks until the process goes on or its machine is gone.
"""

# One round trip. The settings are of this transaction only: a session's do not belong to us behind
# a pooler. Times come in the zone that is set here.
BEGIN: Final = (
    f"BEGIN; SET LOCAL idle_in_transaction_session_timeout = {STILL_SECONDS * 1000}; "
    "SET LOCAL TIME ZONE 'UTC'"
)

_engines: Final = weakref.WeakSet["LedgerEngine"]()


class LedgerEngine:
    """Transactions on one database. Safe in threads; a fork connects anew.

    Attributes:
        database: that it connects to.
    """

    def __init__(self, database: Database) -> None:
        """Connect to nothing yet."""
        self.database = database
        self._engine = create_engine(
            "postgresql+psycopg://",
            creator=database.connect,
            pool_pre_ping=True,
            pool_size=KEPT_IDLE,
            max_overflow=MOST_CONNECTIONS - KEPT_IDLE,
            pool_timeout=POOL_SECONDS,
            pool_use_lifo=True,
            # `_reset` does it: SQLAlchemy logs a traceback of a connection that cannot be rolled
            # back
            pool_reset_on_return=None,
            use_native_hstore=False,  # else each first connection asks for the type
        )
        event.listen(self._engine, "begin", _begin)
        event.listen(self._engine, "reset", _reset)
        _engines.add(self)

    @contextlib.contextmanager
    def begin(self) -> Iterator[Connection]:
        """Commit at the end of the context, or roll back on any exception.

        Raises: LedgerUnreachable: the database is away; whether a commit under way was made is then
            unknown. LedgerError: it refused a statement.
        """
        with self._translated(), self._engine.begin() as connection:
            try:
                yield connection
            except Exception:
                raise
            except BaseException:  # a statement may be under way, which cannot be rolled back
                connection.invalidate()
                raise

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            if not isinstance(error.orig, psycopg.Error):
                raise
            raise self.database.translate(error.orig) from error.orig
        except psycopg.Error as error:
            raise self.database.translate(error) from error
        except NoFreeConnection as error:
            raise LedgerUnreachable(
                f"all connections to {self.database.description} are in use"
            ) from error

    def bring_up(self, waits: Waits) -> None:
        """Make the tables that the database lacks: see `Database.bring_up`."""
        with self._translated(), self._engine.connect() as connection:
            self.database.bring_up(driver_connection(connection), waits)

    def close(self) -> None:
        """Close the idle connections; a later transaction opens new ones."""
        self._engine.dispose()

    def forget_connections(self) -> None:
        """Leave all connections to the process that was forked."""
        self._engine.dispose(close=False)


def _begin(connection: Connection) -> None:
    driver_connection(connection).execute(BEGIN)


def _reset(connection: psycopg.Connection, record: object, state: object) -> None:
    try:
        connection.rollback()
    # an interrupt left a statement under way, or the connection broke: the pool opens another one
    except psycopg.Error:
        connection.close()


def _forget_connections() -> None:
    for engine in list(_engines):
        engine.forget_connections()


os.register_at_fork(after_in_child=_forget_connections)


def driver_connection(connection: Connection) -> psycopg.Connection:
    """Return psycopg's connection, for COPY and cursors that stay on the server."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    return driver


class Lock(Enum):
    """How a row is locked until the end of the transaction."""

    UPDATE = "against all other locks"
    NO_KEY_UPDATE = "other transactions may write rows that refer to it"


_SOURCE_ID: Final = select(SOURCES.c.source_id).where(SOURCES.c.name == bindparam("name"))


class LedgerPart:
    """The methods of the ledger on one topic, each of which is one transaction."""

    def __init__(self, engine: LedgerEngine) -> None:
        self._engine = engine

    @contextlib.contextmanager
    def _of_source(
        self, source: str, *, lock: Lock | None = None
    ) -> Iterator[tuple[Connection, int]]:
        """Give a transaction, and in it the source's id.

        Raises:
            NotLocated: there is no such source.
        """
        with self._engine.begin() as connection:
            yield connection, source_id_of(connection, source, lock=lock)


def source_id_of(connection: Connection, source: str, *, lock: Lock | None = None) -> int:
    """Return the id of a source, its row locked if a lock is given.

    Raises:
        NotLocated: there is no such source.
    """
    statement = (
        _SOURCE_ID
        if lock is None
        else _SOURCE_ID.with_for_update(key_share=lock is Lock.NO_KEY_UPDATE)
    )
    source_id = connection.execute(statement, {"name": source}).scalar_one_or_none()
    if source_id is None:
        raise NotLocated(
            f"the ledger has no source '{source}'", hint="take an inventory of it first"
        )
    return int(source_id)
