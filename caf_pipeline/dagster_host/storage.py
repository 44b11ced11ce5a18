"""Dagster's own storage: SQLite under DAGSTER_HOME, or Postgres where CAF_DAGSTER_DATABASE_URL names one.

dagster.yaml cannot choose between the two by the environment: `{env: X}` fails where X is not set. It names this class instead,
which becomes the one or the other.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psycopg2
from dagster import DagsterInstance

from caf_pipeline.dagster_host import postgres_storage, sqlite_storage
from caf_pipeline.dagster_host.home import HOME_VARIABLE, dagster_home
from caf_pipeline.dagster_host.quiet import hush
from caf_pipeline.defs.dagster_private import ConfigurableClass, ConfigurableClassData, DagsterSqliteStorage, DagsterStorage
from caf_pipeline.errors import SettingsError, first_line
from caf_pipeline.settings import load_settings

URL_VARIABLE: Final = "CAF_DAGSTER_DATABASE_URL"

_CONNECT_SECONDS: Final = 10

_DRIVER: Final = "postgresql+psycopg2://"
"""dagster-postgres speaks through psycopg2 only. SQLAlchemy 2.1 reads a plain `postgresql://` as psycopg 3, with which
its NOTIFY and its large statements break."""


def with_driver(url: str) -> str:
    """Return the URL with the driver that dagster-postgres needs, whichever it names.

    Raises:
        SettingsError: it is no URL of a Postgres database; the message does not repeat it, since it may hold a password.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.partition("+")[0] not in ("postgresql", "postgres"):
        raise SettingsError(
            f"{URL_VARIABLE} is not the URL of a Postgres database", hint="write postgresql://user:password@host:5432/name"
        )
    return _DRIVER + rest


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
        psycopg2.connect(plain, connect_timeout=_CONNECT_SECONDS).close()
    except psycopg2.Error as error:
        raise SettingsError(
            f"Dagster's database cannot be used: {first_line(error)}", hint=f"check that it runs, and what {URL_VARIABLE} names"
        ) from error


def storage_folder() -> Path:
    """Return where SQLite's files are: DAGSTER_HOME, or our usual folder where it is not set, as under a bare `dagster dev`."""
    home = os.environ.get(HOME_VARIABLE)
    return Path(home) if home else dagster_home(load_settings())


hush()
sqlite_storage.make_once()


class ChosenStorage(DagsterStorage[DagsterInstance], ConfigurableClass):
    """Named in dagster.yaml; never itself made, since configuring it returns one of Dagster's own storages."""

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
            return DagsterSqliteStorage.from_local(str(storage_folder()), inst_data=inst_data)
        from dagster_postgres.storage import DagsterPostgresStorage  # noqa: PLC0415 - not needed, and slow, with SQLite

        storage = DagsterPostgresStorage(with_driver(url), inst_data=inst_data)
        postgres_storage.mend(storage.event_log_storage)
        return storage
