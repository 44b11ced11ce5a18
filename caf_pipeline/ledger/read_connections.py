"""Connections that only read. psycopg alone: loading SQLAlchemy takes longer than reading an
object.

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
UNASKED_SECONDS: Final = (
    1.0  # for which an idle connection is taken to live, unless it has something to say
)


class ReadConnections:
    """Connections to one database in autocommit mode, of which some are kept.

    Safe in threads; a fork connects anew.

    Not psycopg_pool's, which connects in threads of its own: while the server refuses, whoever
    waits does not learn of it.

    Attributes:
        database: that they connect to.
    """

    def __init__(self, database: Database) -> None:
        """Connect to nothing yet."""
        self.database = database
        self._forget_connections()

    def _forget_connections(self) -> None:
        self._process = os.getpid()
        self._idle: list[
            tuple[float, psycopg.Connection]
        ] = []  # the one that was used last is taken first; append and pop are atomic

    @contextlib.contextmanager
    def connection(self) -> Iterator[psycopg.Connection]:
        """Give a connection, each of whose statements is a transaction of its own.

        Raises:
            LedgerUnreachable: the database is away. LedgerError: it refused a statement.
        """
        if (
            self._process != os.getpid()
        ):  # a fork: two processes on one connection would read each other's answers
            self._forget_connections()
        with self.database.translated():
            connection = self._take()
            try:
                yield connection
            except BaseException:  # a statement may be under way
                connection.close()
                raise
            self._give_back(connection)

    def _take(self) -> psycopg.Connection:
        """Return an idle connection, or a new one.

        If an idle one broke, none of them is taken again.

        The end of a connection, and a server's last words, wait to be read, which is seen without
        asking. Of a server that went away without a word nothing is seen: a connection that was
        idle for longer than a moment is asked.
        """
        with contextlib.suppress(IndexError):
            idle_since, connection = self._idle.pop()
            try:
                if time.monotonic() - idle_since > UNASKED_SECONDS or _has_something_to_read(
                    connection
                ):
                    connection.execute("SELECT 1")
                return connection
            except psycopg.Error:
                connection.close()
                self.close()
        return self.database.connect()

    def _give_back(self, connection: psycopg.Connection) -> None:
        if len(self._idle) >= KEPT_IDLE:
            connection.close()
        else:
            self._idle.append((time.monotonic(), connection))

    def close(self) -> None:
        """Close the idle connections; a later question opens new ones."""
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop()[1].close()


def _has_something_to_read(connection: psycopg.Connection) -> bool:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))
