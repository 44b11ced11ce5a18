"""Keeps Dagster's SQLite from waiting for the disk: tests need not survive a power cut."""

import sqlite3
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, event


def _do_not_wait(connection: object, _: object) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")


@pytest.fixture(scope="session", autouse=True)
def _storage_without_waits() -> Iterator[None]:
    event.listen(Engine, "connect", _do_not_wait)
    yield
    event.remove(Engine, "connect", _do_not_wait)
