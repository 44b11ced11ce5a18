"""Caches engines and migration scripts of Dagster's SQLite storage, which halves a small run's CPU.

Dagster reads all migration scripts for each run's file, creates an engine for each event, and
connects for each statement. Source: `SqliteEventLogStorage`, `SqliteRunStorage` and
`SqliteScheduleStorage` of Dagster 1.13.27.
"""

from functools import lru_cache
from typing import Any, Final

from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, QueuePool, event

from caf_pipeline.dagster_host.dagster_private import (
    create_engine,
    sqlite_event_log,
    sqlite_run_storage,
    sqlite_schedule_storage,
)

ENGINES_KEPT: Final = 64
"""A run writes to four; the UI reads those of all shown runs."""

SYNCHRONOUS = "NORMAL"
"""FULL would wait for the disk at each event.

In WAL mode a power cut may lose the last events, but damages nothing: the ledger has the chunks'
state. Source: "PRAGMA synchronous" in SQLite's documentation.
"""

_read_scripts = ScriptDirectory.from_config
_scripts: dict[tuple[str | None, str | None], ScriptDirectory] = {}


def cache_engines() -> None:
    """Patch this process's SQLite storages. Idempotent."""

    def scripts(config: Config) -> ScriptDirectory:
        name = (config.config_file_name, config.get_main_option("script_location"))
        if name not in _scripts:
            _scripts[name] = _read_scripts(config)
        return _scripts[name]

    def engine(url: str, *, poolclass: type, connect_args: dict[str, Any] | None = None) -> Engine:
        return _cached_engine(url, tuple((connect_args or {}).items()))

    ScriptDirectory.from_config = staticmethod(scripts)  # type: ignore[method-assign]
    for module in (sqlite_event_log, sqlite_run_storage, sqlite_schedule_storage):
        module.create_engine = engine  # type: ignore[attr-defined]


@lru_cache(maxsize=ENGINES_KEPT)
def _cached_engine(url: str, connect_args: tuple[tuple[str, object], ...]) -> Engine:
    engine: Engine = create_engine(
        url, poolclass=QueuePool, pool_size=1, max_overflow=-1, connect_args=dict(connect_args)
    )
    # The event log disposes of the engine after each statement.
    engine.dispose = lambda close=True: None  # type: ignore[method-assign]
    event.listen(
        engine,
        "connect",
        lambda connection, _: connection.execute(f"PRAGMA synchronous = {SYNCHRONOUS}").close(),
    )
    return engine
