"""Makes the ledger's tables: runs each file of `sql/` once, in the order of the names, and refuses
a ledger of other files.

The ledger records the SHA-256 of each file that it ran. All files that are missing run in one
transaction, under a lock that ends with it: a process that is killed leaves nothing, and a
transaction-pooling pgbouncer may be between.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg

from caf_pipeline.errors import LedgerError, LedgerUnreachable

_LOCK: Final = 0x6361665F73716C  # any number that no other user of the database takes: "caf_sql"
# processes that start while another one makes the tables end with an error, and may be started
# again
_LOCK_TIMEOUT: Final = "60s"

APPLIED: Final = "schema_files"
"""The table of what was run, in every ledger."""

_MADE: Final = """
    CREATE TABLE IF NOT EXISTS schema_files (
        name text COLLATE "C" PRIMARY KEY, sha256 text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())
"""  # noqa: E501
# One statement: another process may make both tables meanwhile.
_PRESENT: Final = """
    SELECT to_regclass('schema_files') IS NOT NULL AS is_recorded, to_regclass('caf_files') IS NOT
        NULL AS has_chunks
"""
_HERE: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class SchemaFile:
    """A file of `sql/`: its name without ".sql", its text, and the SHA-256 of it in hexadecimal
    digits.
    """

    name: str
    text: bytes
    sha256: str


def sql_folder() -> Path:
    """Return the folder of the SQL files: inside the package of a wheel, beside it in the
    repository.
    """
    for folder in (_HERE / "sql", _HERE.parent / "sql"):
        if folder.is_dir():
            return folder
    raise LedgerError(f"there are no SQL files beside {_HERE}", hint="install caf-pipeline again")


def schema_files(folder: Path | None = None) -> list[SchemaFile]:
    """Return the numbered files of a folder, by default of `sql_folder()`, in the order of their
    names.
    """
    paths = sorted((folder or sql_folder()).glob("[0-9]*.sql"))
    return [
        SchemaFile(path.stem, text := path.read_bytes(), hashlib.sha256(text).hexdigest())
        for path in paths
    ]


def is_current(connection: psycopg.Connection[Any], *, hint: str = "") -> bool:
    """Return whether the database has the tables of all files; arguments as of `make_tables`.

    Raises:
        LedgerError: as `make_tables`.
    """
    return not _missing(connection, schema_files(), hint)


def make_tables(
    connection: psycopg.Connection[Any], folder: Path | None = None, *, hint: str = ""
) -> list[str]:
    """Run the files that the database lacks; return their names. Two processes may do so at once.

    Args:
        connection: in autocommit mode and outside of a transaction.
        folder: of the SQL files, by default `sql_folder()`.
        hint: of the error, says how to make a new ledger.

    Raises:
        LedgerError: other files made the database's tables. Nothing was changed.
        LedgerUnreachable: another process makes the tables for longer than a minute.
        psycopg.Error: a statement failed. Nothing was changed.
    """
    files = schema_files(folder)
    if not _missing(connection, files, hint):
        return []
    with connection.transaction():
        connection.execute("SELECT set_config('lock_timeout', %s, true)", (_LOCK_TIMEOUT,))
        try:
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        except psycopg.errors.LockNotAvailable as error:
            raise LedgerUnreachable(
                "another process makes the tables of the database",
                hint="start this again when that process has ended",
            ) from error
        connection.execute(_MADE)
        missing = _missing(
            connection, files, hint
        )  # again: another process may have been here before the lock was ours
        for file in missing:
            connection.execute(file.text)
            connection.execute(
                "INSERT INTO schema_files (name, sha256) VALUES (%s, %s)", (file.name, file.sha256)
            )
    return [file.name for file in missing]


def made_by(applied: Mapping[str, str], files: list[SchemaFile]) -> bool:
    """Return whether these files made a ledger, or the first of them did.

    Args:
        applied: the SHA-256 of each file that the ledger recorded, by its name.
        files: as `schema_files` returns them.
    """
    recorded = sorted(applied.items())
    return recorded == [(file.name, file.sha256) for file in files[: len(recorded)]]


def _missing(
    connection: psycopg.Connection[Any], files: list[SchemaFile], hint: str
) -> list[SchemaFile]:
    applied = _applied(connection)
    if not made_by(applied, files):
        raise LedgerError(
            "the database has the tables of another version of caf-pipeline, and was not changed",
            hint=hint,
        )
    return [file for file in files if file.name not in applied]


def _applied(connection: psycopg.Connection[Any]) -> Mapping[str, str]:
    """Return the SHA-256 of each file that made the database's tables, by its name."""
    is_recorded, has_chunks = connection.execute(_PRESENT).fetchone() or (False, False)
    if is_recorded:
        return dict(connection.execute("SELECT name, sha256 FROM schema_files").fetchall())
    return (
        {"": ""} if has_chunks else {}
    )  # versions before 0.5.0 recorded names alone, in a table of another name
