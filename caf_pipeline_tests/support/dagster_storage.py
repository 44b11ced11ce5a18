"""What Dagster's storage on SQLite makes again for each event or run is made once a test process: a third of a run's CPU time.

Dagster keeps each run's events in a file of its own. It stamps each with the newest of its migration scripts, all of which
Alembic reads and executes for that; and it makes an engine for each event, which compiles each statement again. Nor does a test
wait for the disk, on which each event is written and checkpointed: it need not outlive a power cut. Read in Dagster 1.13.27.
"""

import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final
from unittest import mock

import pytest
from sqlalchemy import event

ENGINES: Final = 16  # kept at most: a run writes to four files


@pytest.fixture(scope="session", autouse=True)
def _storage_made_once() -> Iterator[None]:
    if "dagster" not in sys.modules:  # no test of this session uses it
        yield
        return
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from dagster._core.storage.event_log.sqlite import sqlite_event_log
    from dagster._core.storage.runs.sqlite import sqlite_run_storage
    from dagster._core.storage.schedules.sqlite import sqlite_schedule_storage
    from dagster._core.storage.sql import create_engine

    read = ScriptDirectory.from_config
    known: dict[tuple[str | None, str | None], ScriptDirectory] = {}

    def from_config(config: Config) -> ScriptDirectory:
        name = (config.config_file_name, config.get_main_option("script_location"))
        if name not in known:
            known[name] = read(config)
        return known[name]

    @lru_cache(maxsize=ENGINES)
    def engine(url: str, poolclass: type, **connect_args: Any) -> Any:
        made = create_engine(url, poolclass=poolclass, connect_args=connect_args)
        event.listen(made, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF").close())
        return made

    def same_engine(url: str, *, poolclass: type, connect_args: dict[str, Any] | None = None) -> Any:
        return engine(url, poolclass, **connect_args or {})

    with (
        mock.patch.object(ScriptDirectory, "from_config", from_config),
        mock.patch.object(sqlite_event_log, "create_engine", same_engine),
        mock.patch.object(sqlite_run_storage, "create_engine", same_engine),
        mock.patch.object(sqlite_schedule_storage, "create_engine", same_engine),
    ):
        yield
