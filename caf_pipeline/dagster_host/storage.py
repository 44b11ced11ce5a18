"""Dagster's own storage: SQLite in DAGSTER_HOME, or Postgres if CAF_DAGSTER_DATABASE_URL is set.

dagster.yaml cannot select, since `{env: X}` fails if X is not set.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dagster import DagsterInstance
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from caf_pipeline.dagster_host import postgres_storage
from caf_pipeline.dagster_host.home import dagster_home
from caf_pipeline.dagster_host.logging_filters import add_logging_filters
from caf_pipeline.dagster_host.team_project import HOME_VARIABLE
from caf_pipeline.dagster_private import (
    ConfigurableClass,
    ConfigurableClassData,
    DagsterSqliteStorage,
    DagsterStorage,
)
from caf_pipeline.errors import SettingsError, first_line
from caf_pipeline.setting_values import ENCODE_IN_URL, is_database_url
from caf_pipeline.settings import Settings, load_settings
from caf_pipeline.system.atomic_files import opened_folder

URL_VARIABLE: Final = "CAF_DAGSTER_DATABASE_URL"

_CONNECT_SECONDS: Final = 10

_DRIVER: Final = "postgresql+psycopg2://"
"""SQLAlchemy 2.1's psycopg 3 breaks NOTIFY and large statements of dagster-postgres."""


def with_driver(url: str) -> str:
    """Add the driver that dagster-postgres needs, or raise a SettingsError.

    The message does not repeat the URL, which may contain a password.
    """
    changed = _DRIVER + url.partition("://")[2]
    try:
        if is_database_url(url):
            make_url(changed)  # fails for a list of hosts
            return changed
    except (SQLAlchemyError, ValueError):  # their messages may quote the password
        pass
    raise SettingsError(
        f"{URL_VARIABLE} is not the URL of a Postgres database",
        hint=f"write postgresql://user:password@host:5432/name; {ENCODE_IN_URL}",
    ) from None


def may_have_state(settings: Settings) -> bool:
    """Return whether Dagster may have runs and partitions."""
    return dagster_home(settings).is_dir() or bool(os.environ.get(URL_VARIABLE))


def require_database() -> None:
    """Connect once to a configured database, or raise a SettingsError.

    Dagster tries six times, without naming the reason.
    """
    url = os.environ.get(URL_VARIABLE)
    if not url:
        return
    plain = with_driver(url).replace(_DRIVER, "postgresql://", 1)
    with _extra_host():
        import psycopg2  # noqa: PLC0415
        from psycopg2.extensions import parse_dsn  # noqa: PLC0415
    try:
        password = parse_dsn(plain).get("password")
    except psycopg2.Error:  # its message quotes the parameter
        raise SettingsError(
            f"{URL_VARIABLE} has a parameter after '?' that libpq does not support",
            hint="correct or remove the parameter",
        ) from None
    try:
        psycopg2.connect(plain, connect_timeout=_CONNECT_SECONDS).close()
    except psycopg2.Error as error:
        reason = first_line(error)
        raise SettingsError(
            "Dagster's database cannot be used: "
            f"{reason.replace(password, '***') if password else reason}",
            hint=f"check that it runs, and check {URL_VARIABLE}",
        ) from error


@contextlib.contextmanager
def _extra_host() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"{URL_VARIABLE} is set, but the package {error.name} is not installed",
            hint="run: pip install 'caf-pipeline[host]'",
        ) from error


def storage_folder() -> Path:
    """Return the folder of the SQLite files."""
    home = os.environ.get(HOME_VARIABLE)
    return Path(home) if home else dagster_home(load_settings())


add_logging_filters()


class ChosenStorage(DagsterStorage[DagsterInstance], ConfigurableClass):
    """Never instantiated: `from_config_value` returns one of Dagster's storages."""

    @classmethod
    def config_type(cls) -> Mapping[str, Any]:
        return {}

    @classmethod
    def from_config_value(  # type: ignore[override]  # Dagster asks for a DagsterStorage, not for this class
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> DagsterStorage[DagsterInstance]:
        url = os.environ.get(URL_VARIABLE)
        if not url:
            folder = storage_folder()
            folder.mkdir(parents=True, exist_ok=True)
            # Dagster fails if two processes create its tables at the same time.
            with opened_folder(folder) as descriptor:
                with contextlib.suppress(OSError):  # a file system without such locks
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                return DagsterSqliteStorage.from_local(str(folder), inst_data=inst_data)
        with _extra_host():
            from dagster_postgres.storage import DagsterPostgresStorage  # noqa: PLC0415

        storage = DagsterPostgresStorage(with_driver(url), inst_data=inst_data)
        postgres_storage.make_default_limits_idempotent(storage.event_log_storage)
        return storage
