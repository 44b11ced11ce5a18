"""DuckDB's databases are kept for a test process's next query: opening one takes 20 to 40 ms of
CPU, and a plan opens six.

A query finds an empty catalog of its own, and the settings that it asks for. A database is closed
where a result of it was not read to its end, and where it has spilled: DuckDB does not take another
folder for that then. Read in DuckDB 2.0.0.
"""

import contextlib
from collections.abc import Iterator
from threading import Lock
from typing import Any, Final
from unittest import mock

import duckdb
import pytest

from caf_pipeline.system import parquet

KEPT: Final = 4  # at most; a test queries in fewer threads


class OwnCatalog:
    """A connection with a new catalog, which is dropped at the end with the functions and tables
    that were registered.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self._functions: set[str] = set()
        self._tables: set[str] = set()
        connection.execute("ATTACH ':memory:' AS query; USE query")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def create_function(self, name: str, *arguments: Any) -> None:
        self._connection.create_function(name, *arguments)
        self._functions.add(name)

    def register(self, name: str, table: object) -> None:
        self._connection.register(name, table)
        self._tables.add(name)

    def drop(self) -> None:
        for name in self._tables:
            self._connection.unregister(name)
        self._connection.execute("USE memory; DETACH query")
        for name in self._functions:
            self._connection.remove_function(name)


@pytest.fixture(scope="session", autouse=True)
def _databases_kept() -> Iterator[None]:
    open_database = duckdb.connect
    kept: list[duckdb.DuckDBPyConnection] = []
    lock = Lock()

    def take(config: dict[str, Any]) -> duckdb.DuckDBPyConnection:
        with lock:
            connection = kept.pop() if kept else None
        if connection:
            try:
                for name, value in config.items():
                    connection.execute(f"SET {name} = '{value}'")
            except duckdb.Error:
                connection.close()
            else:
                return connection
        # What was read of a file would be believed of the next one of that name, size and time.
        return open_database(":memory:", config=config | {"enable_external_file_cache": False})

    @contextlib.contextmanager
    def connect(name: str, config: dict[str, Any]) -> Iterator[OwnCatalog]:
        assert name == ":memory:"
        with contextlib.ExitStack() as stack:
            connection = take(config)
            stack.callback(connection.close)
            catalog = OwnCatalog(connection)
            yield catalog
            try:
                catalog.drop()
            except duckdb.Error:  # a result is open
                return
            with lock:
                if len(kept) < KEPT:
                    kept.append(connection)
                    stack.pop_all()

    with mock.patch.object(parquet.duckdb, "connect", connect):
        yield
    for connection in kept:
        connection.close()
