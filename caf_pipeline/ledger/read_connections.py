"""Read-only connections, by psycopg alone: loading SQLAlchemy takes longer than reading an object.

Decision 30 (docs/decisions/) has the figures.
"""

import contextlib
import os
import select
import time
from collections.abc import Iterator
from typing import Final

import psycopg

from caf_pipeline.ledger.database import Database

KEPT_IDLE: Final = 2
UNTESTED_SECONDS: Final = 1.0
"""Seconds for which an idle connection needs no test."""
PREPARED_FROM: Final = 3
"""Executions of a statement after which the server keeps its plan."""


class ReadConnections:
    """A pool of connections in autocommit mode. Safe in threads and after a fork.

    Not psycopg_pool: its waiting callers do not learn that the server refuses.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._has_pooler = False
        self._forget_connections()

    def _forget_connections(self) -> None:
        self._process = os.getpid()
        # Last in, first out. `append` and `pop` are atomic.
        self._idle: list[tuple[float, psycopg.Connection]] = []

    @contextlib.contextmanager
    def connection(self) -> Iterator[psycopg.Connection]:
        if self._process != os.getpid():
            # After a fork, two processes on one connection would read each other's answers.
            self._forget_connections()
        with self.database.translated():
            connection = self._idle_connection() or self.database.connect()
            try:
                yield connection
            except BaseException:  # a statement may be under way
                connection.close()
                raise
            if len(self._idle) >= KEPT_IDLE:
                connection.close()
            else:
                self._idle.append((time.monotonic(), connection))

    def _idle_connection(self) -> psycopg.Connection | None:
        """If a connection is broken, close all of them."""
        with contextlib.suppress(IndexError):
            idle_since, connection = self._idle.pop()
            try:
                # A closed connection has something to read. A server that vanished sends nothing,
                # so a connection that was idle for longer is tested.
                is_long_idle = time.monotonic() - idle_since > UNTESTED_SECONDS
                if connection.prepare_threshold is None and not self._has_pooler:
                    self._prepare_statements(connection)
                elif is_long_idle or _has_something_to_read(connection):
                    connection.execute("SELECT 1")
                return connection
            except psycopg.Error:
                connection.close()
                self.close()
        return None

    def _prepare_statements(self, connection: psycopg.Connection) -> None:
        # A pooler may execute each transaction on another backend, which lacks the statement. A
        # pooler states a process id that is not the backend's.
        backend = connection.execute("SELECT pg_backend_pid()").fetchone()
        if backend == (connection.info.backend_pid,):
            connection.prepare_threshold = PREPARED_FROM
        else:
            self._has_pooler = True

    def close(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop()[1].close()


def _has_something_to_read(connection: psycopg.Connection) -> bool:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))
