"""Keeps Dagster's SQLite from waiting for the disk: tests need not survive a power cut."""

import sys
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(scope="session", autouse=True)
def _storage_without_waits() -> Iterator[None]:
    if "dagster" not in sys.modules:  # no test of this session uses it
        yield
        return
    from caf_pipeline.dagster_host import sqlite_storage

    sqlite_storage.cache_engines()
    with mock.patch.object(sqlite_storage, "SYNCHRONOUS", "OFF"):
        yield
