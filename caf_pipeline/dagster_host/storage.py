"""Dagster's own storage: SQLite under DAGSTER_HOME, or Postgres where CAF_DAGSTER_DATABASE_URL
names one.

dagster.yaml cannot choose between the two by the environment: `{env: X}` fails where X is not set.
It names this class instead, which becomes the one or the other.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psycopg2
from dagster import DagsterInstance
from psycopg2.extensions import parse_dsn
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from caf_pipeline.dagster_host import postgres_storage, sqlite_storage
from caf_pipeline.dagster_host.dagster_private import (
    ConfigurableClass,
    ConfigurableClassData,
    DagsterSqliteStorage,
    DagsterStorage,
)
from caf_pipeline.dagster_host.home import HOME_VARIABLE, dagster_home
from caf_pipeline.dagster_host.logging_filters import add_logging_filters
from caf_pipeline.errors import SettingsError, first_line
from caf_pipeline.setting_values import ENCODE_IN_URL, is_database_url
from caf_pipeline.settings import Settings, load_settings
from caf_pipeline.system.atomic_files import opened_folder

URL_VARIABLE: Final = "CAF_DAGSTER_DATABASE_URL"

_CONNECT_SECONDS: Final = 10

_DRIVER: Final = "postgresql+psycopg2://"
"""dagster-postgres speaks through psycopg2 only.

SQLAlchemy 2.1 reads a plain `postgresql://` as psycopg 3, with which its NOTIFY and its large
statements break.
"""


def with_driver(url: str) -> str:
    """Return the URL with the driver that dagster-postgres needs, whichever it names.

    Raises: SettingsError: it is not the URL of a Postgres database; the message repeats nothing of
        it, since it may hold a password.
    """
    changed = _DRIVER + url.partition("://")[2]
    try:
        if is_database_url(url):
            make_url(changed)  # takes no list of hosts and ports before the path
            return changed
    except (SQLAlchemyError, ValueError):  # their messages may quote the password
        pass
    raise SettingsError(
        f"{URL_VARIABLE} is not the URL of a Postgres database",
        hint=f"write postgresql://user:password@host:5432/name; {ENCODE_IN_URL}",
    ) from None


def may_have_state(settings: Settings) -> bool:
    """Return whether Dagster may have runs and partitions: in its folder on this machine, or in a
    database.
    """
    return dagster_home(settings).is_dir() or bool(os.environ.get(URL_VARIABLE))


def require_database() -> None:
    """Connect once to the database that the environment names, if any.

    Dagster itself tries six times, warns each time, and ends with an error that does not say why.

    Raises:
        SettingsError: it cannot be reached or refuses.
    """
    url = os.environ.get(URL_VARIABLE)
    if not url:
        return
    plain = with_driver(url).replace(_DRIVER, "postgresql://", 1)
    try:
        password = parse_dsn(plain).get("password")
    except psycopg2.Error:  # its message quotes the parameter
        raise SettingsError(
            f"{URL_VARIABLE} has a parameter after '?' that libpq does not know",
            hint="correct it, or remove it",
        ) from None
    try:
        psycopg2.connect(plain, connect_timeout=_CONNECT_SECONDS).close()
    except psycopg2.Error as error:
        reason = first_line(error)
        raise SettingsError(
            "Dagster's database cannot be used: "
            f"{reason.replace(password, '***') if password else reason}",
            hint=f"check that it runs, and what {URL_VARIABLE} names",
        ) from error


def storage_folder() -> Path:
    """Return where SQLite's files are: DAGSTER_HOME, or our usual folder where it is not set, as
    under a bare `dagster dev`.
    """
    home = os.environ.get(HOME_VARIABLE)
    return Path(home) if home else dagster_home(load_settings())


@contextlib.contextmanager
def _creating(folder: Path) -> Iterator[Path]:
    """Keep other processes from opening the storage: Dagster fails if two create its tables at the
    same time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with opened_folder(folder) as descriptor:
        with contextlib.suppress(OSError):  # a file system without such locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder


add_logging_filters()
sqlite_storage.make_once()


class ChosenStorage(DagsterStorage[DagsterInstance], ConfigurableClass):
    """Named in dagster.yaml; never itself made, since configuring it returns one of Dagster's own
    storages.
    """

    @classmethod
    def config_type(cls) -> Mapping[str, Any]:
        """Return the config's schema: it has none, the environment decides."""
        return {}

    @classmethod
    def from_config_value(  # type: ignore[override]  # Dagster asks for a DagsterStorage, not for this class
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> DagsterStorage[DagsterInstance]:
        """Return the storage that the environment asks for."""
        url = os.environ.get(URL_VARIABLE)
        if not url:
            with _creating(storage_folder()) as folder:
                return DagsterSqliteStorage.from_local(str(folder), inst_data=inst_data)
        from dagster_postgres.storage import DagsterPostgresStorage  # noqa: PLC0415 - not needed, and slow, with SQLite

        storage = DagsterPostgresStorage(with_driver(url), inst_data=inst_data)
        postgres_storage.mend(storage.event_log_storage)
        return storage
