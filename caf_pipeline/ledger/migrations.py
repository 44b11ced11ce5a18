"""Brings the database's schema to that of the files in `sql/`, each of which is run once, in the order of their names.

All that is missing is run in one transaction, under a lock that ends with it: a process that is killed leaves nothing, and a
transaction-pooling pgbouncer may be between.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import psycopg

from caf_pipeline.errors import LedgerError, LedgerUnreachable

_LOCK: Final = 0x6361665F73716C  # any number that no other user of the database takes: "caf_sql"
_LOCK_TIMEOUT: Final = "60s"  # processes that start during a longer migration end with an error, and may be started again

_APPLIED: Final = "_yoyo_migration"
"""The table of what was run, keyed by the SHA-256 of a file's name; yoyo-migrations, which ran the files in 0.3.0, named it."""

_HERE: Final = Path(__file__).resolve().parents[1]


def sql_folder() -> Path:
    """Return where the migrations are: inside the package of a wheel, beside it in the repository."""
    for folder in (_HERE / "sql", _HERE.parent / "sql"):
        if folder.is_dir():
            return folder
    raise LedgerError(f"there are no migrations beside {_HERE}", hint="install caf-pipeline again")


def applied_migrations(connection: psycopg.Connection[Any]) -> set[str]:
    """Return the names of the migrations that the database has."""
    if connection.execute("SELECT to_regclass(%s)", (_APPLIED,)).fetchone() == (None,):
        return set()
    rows = connection.execute(f"SELECT migration_id FROM {_APPLIED}").fetchall()
    return {name for (name,) in rows}


def is_current(connection: psycopg.Connection[Any]) -> bool:
    """Tell whether the database has all migrations.

    Raises:
        LedgerError: as `migrate`.
    """
    return not _missing(connection, _files(sql_folder()))


def migrate(connection: psycopg.Connection[Any], folder: Path | None = None) -> list[str]:
    """Apply the migrations that the database lacks; return their names. Two processes may do so at once.

    Args:
        connection: in autocommit mode and outside of a transaction.
        folder: of the SQL files, by default `sql_folder()`.

    Raises:
        LedgerError: the database has a migration that the folder lacks, so newer software made it.
        LedgerUnreachable: another process is at it for longer than a minute.
        psycopg.Error: a statement failed; nothing was applied.
    """
    files = _files(folder or sql_folder())
    if not _missing(connection, files):
        return []
    with connection.transaction():
        connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
        try:
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        except psycopg.errors.LockNotAvailable as error:
            raise LedgerUnreachable(
                "another process brings the database's tables up to this version", hint="start this again when it is done"
            ) from error
        connection.execute(
            f"CREATE TABLE IF NOT EXISTS {_APPLIED}"
            " (migration_hash varchar(64) PRIMARY KEY, migration_id varchar(255), applied_at_utc timestamp)"
        )
        missing = _missing(connection, files)  # again: another process may have been here before the lock was ours
        for name in missing:
            connection.execute(files[name].read_bytes())
            key = hashlib.sha256(name.encode()).hexdigest()
            connection.execute(f"INSERT INTO {_APPLIED} VALUES (%s, %s, timezone('utc', now()))", (key, name))
    return missing


def _files(folder: Path) -> Mapping[str, Path]:
    """Return the migrations by their names, in their order."""
    return {path.stem: path for path in sorted(folder.glob("*.sql"))}


def _missing(connection: psycopg.Connection[Any], names: Iterable[str]) -> list[str]:
    theirs = applied_migrations(connection)
    unknown = sorted(theirs.difference(names))
    if unknown:
        raise LedgerError(
            f"the database has the migration {unknown[-1]}, which this software does not know",
            hint="update caf-pipeline to the version that last used this database",
        )
    return [name for name in names if name not in theirs]
