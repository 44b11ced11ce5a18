"""Brings the database's schema to that of the files in `sql/`, by yoyo-migrations.

yoyo reads and orders the files, runs their statements and remembers which it ran. Two of its ways do not outlive a killed
process, so `_OneTransaction` changes them: it marks a migration as applied in a second transaction, after which a half-done
step cannot be repeated, and it keeps other processes out by a row that a killed process leaves behind. Here everything
(yoyo's own tables too) is one transaction under a lock that ends with it, which a transaction-pooling pgbouncer allows.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import psycopg
from yoyo import default_migration_table, internalmigrations, read_migrations
from yoyo.backends.core.postgresql import PostgresqlPsycopgBackend
from yoyo.connections import parse_uri
from yoyo.migrations import Migration

from caf_pipeline.errors import LedgerError

_LOCK: Final = 0x6361665F73716C  # any number that no other user of the database takes: "caf_sql"
_LOCK_TIMEOUT: Final = "60s"  # a migration of the ledger's largest tables should be written to need less

_HERE: Final = Path(__file__).resolve().parents[1]


def sql_folder() -> Path:
    """Return where the migrations are: inside the package of a wheel, beside it in the repository."""
    for folder in (_HERE / "sql", _HERE.parent / "sql"):
        if folder.is_dir():
            return folder
    raise LedgerError(f"there are no migrations beside {_HERE}", hint="install caf-pipeline again")


class _OneTransaction(PostgresqlPsycopgBackend):  # type: ignore[misc]  # yoyo is not typed
    """yoyo's backend on a connection that it is given, in autocommit mode, for use inside one transaction of it."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._given = connection
        super().__init__(parse_uri("postgresql+psycopg:///"), default_migration_table)

    def connect(self, dburi: object) -> psycopg.Connection[Any]:
        """Return the connection; yoyo's own way would open others, outside of the transaction."""
        return self._given

    def ensure_internal_schema_updated(self) -> None:
        """Make yoyo's own tables, without its lock row."""
        if internalmigrations.needs_upgrading(self):
            internalmigrations.upgrade(self)

    def apply_one(self, migration: Migration, force: bool = False, mark: bool = True) -> None:
        """Run a migration and mark it. It is not logged as well: that asks for a user name and the host's address."""
        migration.process_steps(self, "apply", force=force)
        self.mark_one(migration, log=False)


def applied_migrations(connection: psycopg.Connection[Any]) -> set[str]:
    """Return the names of the migrations that the database has."""
    if connection.execute("SELECT to_regclass(%s)", (default_migration_table,)).fetchone() == (None,):
        return set()
    rows = connection.execute(f"SELECT migration_id FROM {default_migration_table}").fetchall()
    return {name for (name,) in rows}


def migrate(connection: psycopg.Connection[Any], folder: Path | None = None) -> list[str]:
    """Apply the migrations that the database lacks; return their names. Two processes may do so at once.

    Args:
        connection: in autocommit mode and outside of a transaction.
        folder: of the SQL files, by default `sql_folder()`.

    Raises:
        LedgerError: the database has a migration that the folder lacks, so newer software made it.
        psycopg.Error: a statement failed; nothing was applied.
    """
    migrations = read_migrations(str(folder or sql_folder()))
    if not _missing(connection, migrations):
        return []
    backend = _OneTransaction(connection)
    with backend.transaction():
        backend.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
        backend.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
        backend.ensure_internal_schema_updated()
        missing = _missing(connection, migrations)  # again: another process may have been here before the lock was ours
        backend.apply_migrations(backend.to_apply(migrations))
    return missing


def _missing(connection: psycopg.Connection[Any], migrations: Iterable[Migration]) -> list[str]:
    ours = [migration.id for migration in migrations]
    theirs = applied_migrations(connection)
    unknown = sorted(theirs.difference(ours))
    if unknown:
        raise LedgerError(
            f"the database has the migration {unknown[-1]}, which this software does not know",
            hint="update caf-pipeline to the version that last used this database",
        )
    return [name for name in ours if name not in theirs]
