"""Transactions on the ledger's database, through SQLAlchemy's engine and pool.

Source: "Connection Pooling" and "Working with Transactions and the DBAPI" in SQLAlchemy 2.0's
documentation.
"""

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Final, cast

import psycopg
from sqlalchemy import (
    Connection,
    CursorResult,
    Executable,
    Row,
    bindparam,
    create_engine,
    event,
    select,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoFreeConnection

from caf_pipeline.errors import LedgerUnreachable, NotLocated
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.tables import SOURCES
from caf_pipeline.waits import Waits

KEPT_IDLE: Final = 2  # a step's statement and the renewal of its lease
MOST_CONNECTIONS: Final = 10  # steps in threads
POOL_SECONDS: Final = 30  # for a free connection

STILL_SECONDS: Final = 30  # as long as a lease
"""Seconds, as long as a lease, after which the server ends an idle transaction.

A COPY in progress does not count: its locks last until it goes on or its machine is gone.
"""

# One round trip. The settings last for this transaction only, since a pooler shares sessions.
BEGIN: Final = (
    f"BEGIN; SET LOCAL idle_in_transaction_session_timeout = {STILL_SECONDS * 1000}; "
    "SET LOCAL TIME ZONE 'UTC'"
)

_engines: Final = weakref.WeakSet["LedgerEngine"]()


class LedgerEngine:
    """Transactions on one database. Safe in threads and after a fork."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._engine = create_engine(
            "postgresql+psycopg://",
            creator=database.connect,
            pool_pre_ping=True,
            pool_size=KEPT_IDLE,
            max_overflow=MOST_CONNECTIONS - KEPT_IDLE,
            pool_timeout=POOL_SECONDS,
            pool_use_lifo=True,
            # `_reset` does it: SQLAlchemy would log a traceback if a rollback fails
            pool_reset_on_return=None,
            use_native_hstore=False,  # saves a query for each first connection
        )
        event.listen(self._engine, "begin", lambda conn: driver_connection(conn).execute(BEGIN))
        event.listen(self._engine, "reset", _reset)
        _engines.add(self)

    @contextlib.contextmanager
    def begin(self) -> Iterator[Connection]:
        """LedgerUnreachable during a commit leaves open whether the commit succeeded."""
        with self._translated(), self._engine.begin() as connection:
            try:
                yield connection
            except Exception:
                raise
            except BaseException:  # a statement may be under way, and cannot be rolled back
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
        with self._translated(), self._engine.connect() as connection:
            self.database.bring_up(driver_connection(connection), waits)

    def close(self) -> None:
        self._engine.dispose()

    def after_fork(self) -> None:
        self._engine.dispose(close=False)


def _reset(connection: psycopg.Connection, record: object, state: object) -> None:
    try:
        connection.rollback()
    # An interrupt left a statement under way, or the connection broke. The pool opens another.
    except psycopg.Error:
        connection.close()


def _after_fork() -> None:
    for engine in list(_engines):
        engine.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def driver_connection(connection: Connection) -> psycopg.Connection:
    """Return psycopg's connection."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    return driver


class Lock(Enum):
    """How a row is locked until the transaction ends."""

    UPDATE = "against all other locks"
    NO_KEY_UPDATE = "other transactions may write rows that refer to it"


def execute(
    connection: Connection, statement: Executable | str, values: Mapping[str, Any]
) -> CursorResult[Any]:
    """Execute a statement of SQLAlchemy, or text with psycopg's placeholders."""
    if isinstance(statement, str):
        return connection.exec_driver_sql(statement, dict(values))
    return cast(CursorResult[Any], connection.execute(statement, dict(values)))


SOURCE_ID: Final = select(SOURCES.c.source_id).where(SOURCES.c.name == bindparam("name"))


class LedgerPart:
    """The ledger's methods on one topic. Each is one transaction."""

    def __init__(self, engine: LedgerEngine) -> None:
        self._engine = engine

    def _rows(self, statement: Executable | str, **values: object) -> Sequence[Row[Any]]:
        with self._engine.begin() as connection:
            return execute(connection, statement, values).all()

    def _scalar(self, statement: Executable | str, **values: object) -> Any:  # noqa: ANN401
        with self._engine.begin() as connection:
            return execute(connection, statement, values).scalar_one_or_none()

    def _execute(self, statement: Executable | str, **values: object) -> None:
        with self._engine.begin() as connection:
            execute(connection, statement, values)

    @contextlib.contextmanager
    def _of_source(
        self, source: str, *, lock: Lock | None = None
    ) -> Iterator[tuple[Connection, int]]:
        with self._engine.begin() as connection:
            yield connection, source_id_of(connection, source, lock=lock)


def source_id_of(connection: Connection, source: str, *, lock: Lock | None = None) -> int:
    """Return a source's id, and lock its row if `lock` is set. Raises NotLocated."""
    statement = SOURCE_ID
    if lock is not None:
        statement = statement.with_for_update(key_share=lock is Lock.NO_KEY_UPDATE)
    source_id = connection.execute(statement, {"name": source}).scalar_one_or_none()
    if source_id is None:
        raise NotLocated(
            f"the ledger has no source '{source}'", hint="take an inventory of it first"
        )
    return int(source_id)
