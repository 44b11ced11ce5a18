"""What Dagster's storage on SQLite makes again for each event or run is made once a process: half
of a small run's CPU time.

Dagster keeps each run's events in a file of its own. It stamps each with the newest of its
migration scripts, all of which Alembic reads and executes for that; and it makes an engine for each
event, which compiles each statement again, and a connection for each statement, which copies the
log into the database as it is closed. Source: `SqliteEventLogStorage`, `SqliteRunStorage` and
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
"""A run writes to four files; the UI reads those of the runs that it shows."""

SYNCHRONOUS = "NORMAL"
"""SQLite's pragma.

All files are in WAL mode, in which a power cut may then take the last events, and damages nothing.
What became of a chunk is in the ledger, and a run that was cut off is marked as failed by the next
start. With FULL each event waits for the disk. Source: "PRAGMA synchronous" in SQLite's
documentation.
"""


def make_once() -> None:
    """Let all storages of this process do so; may be repeated."""
    ScriptDirectory.from_config = staticmethod(_scripts)  # type: ignore[method-assign]
    for module in (sqlite_event_log, sqlite_run_storage, sqlite_schedule_storage):
        module.create_engine = _engine  # type: ignore[attr-defined]


_read_scripts = ScriptDirectory.from_config
_known_scripts: dict[tuple[str | None, str | None], ScriptDirectory] = {}


def _scripts(config: Config) -> ScriptDirectory:
    name = (config.config_file_name, config.get_main_option("script_location"))
    if name not in _known_scripts:
        _known_scripts[name] = _read_scripts(config)
    return _known_scripts[name]


def _engine(url: str, *, poolclass: type, connect_args: dict[str, Any] | None = None) -> Engine:
    return _kept_engine(url, tuple((connect_args or {}).items()))


@lru_cache(maxsize=ENGINES_KEPT)
def _kept_engine(url: str, connect_args: tuple[tuple[str, object], ...]) -> Engine:
    engine: Engine = create_engine(
        url, poolclass=QueuePool, pool_size=1, max_overflow=-1, connect_args=dict(connect_args)
    )
    engine.dispose = lambda close=True: None  # type: ignore[method-assign]  # which the event log does after each statement
    event.listen(
        engine,
        "connect",
        lambda connection, _: connection.execute(f"PRAGMA synchronous = {SYNCHRONOUS}").close(),
    )
    return engine
