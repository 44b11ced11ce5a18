"""Creates the tables of the ledger from `sql/`, and reads the statements of `queries/`.

Each file of `sql/` runs once, in the order of their names.
The ledger records each file's SHA-256; a ledger made by other files is refused. All missing files
and their lock are one transaction: a killed process leaves nothing, and a transaction-pooling
pgbouncer may be in between.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from caf_pipeline.errors import LedgerError, LedgerUnreachable
from caf_pipeline.system.package_files import package_file

if TYPE_CHECKING:
    import psycopg

_LOCK: Final = 0x6361665F73716C  # any number that no other user of the database takes: "caf_sql"

APPLIED: Final = "schema_files"

MAKE_APPLIED: Final = """
    CREATE TABLE IF NOT EXISTS schema_files (
        name text COLLATE "C" PRIMARY KEY,
        sha256 text NOT NULL,
        applied_at timestamptz NOT NULL DEFAULT now()
    )
"""
# One statement: another process may create both tables meanwhile.
_PRESENT: Final = """
    SELECT to_regclass('schema_files') IS NOT NULL AS is_recorded,
        to_regclass('caf_files') IS NOT NULL AS has_chunks
"""
_TYPES: Final = {"timestamptz": "timestamp with time zone"}
"""Names of types in Postgres' information_schema."""


@dataclass(frozen=True, slots=True)
class SchemaFile:
    """A file of `sql/`; its name lacks ".sql"."""

    name: str
    text: bytes
    sha256: str


def schema_files(folder: Path | None = None) -> list[SchemaFile]:
    """Return a folder's numbered files (default: those of `sql/`), by name."""
    paths = sorted((folder or package_file("sql")).glob("[0-9]*.sql"))
    return [
        SchemaFile(path.stem, text := path.read_bytes(), hashlib.sha256(text).hexdigest())
        for path in paths
    ]


def described_columns(table: str) -> dict[str, tuple[str, str]]:
    """Return type and comment of a table's columns, as far as each is on one line of `sql/`."""
    text = "".join(file.text.decode() for file in schema_files())
    (created,) = re.findall(rf"CREATE TABLE {table} \(\n(.*?)^\);", text, re.MULTILINE | re.DOTALL)
    comments = re.findall(rf"COMMENT ON COLUMN {table}\.(\w+) IS\s+'(.*)';", text)
    types: dict[str, str] = dict(re.findall(r"^    ([a-z]\w*) +([a-z]+)", created, re.MULTILINE))
    return {
        name: (_TYPES.get(types[name], types[name]), comment.replace("''", "'"))
        for name, comment in comments
    }


def is_current(connection: psycopg.Connection[Any], *, hint: str = "") -> bool:
    """Return whether no file is missing."""
    return not _missing(connection, schema_files(), hint)


def make_tables(
    connection: psycopg.Connection[Any],
    folder: Path | None = None,
    *,
    hint: str = "",
    lock_timeout: str = "60s",
) -> list[str]:
    """Run the missing files and return their names. Safe in concurrent processes.

    `connection` is in autocommit mode. `hint` says how to make a new ledger. If an error is raised,
    nothing was changed.

    Raises:
        LedgerError: other files made the tables.
        LedgerUnreachable: another process needs longer than `lock_timeout`.
    """
    from psycopg.errors import LockNotAvailable

    files = schema_files(folder)
    if not _missing(connection, files, hint):
        return []
    with connection.transaction():
        connection.execute("SELECT set_config('lock_timeout', %s, true)", (lock_timeout,))
        try:
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        except LockNotAvailable as error:
            raise LedgerUnreachable(
                "another process makes the tables of the database",
                hint="start this again when that process has ended",
            ) from error
        connection.execute(MAKE_APPLIED)
        # Another process may have created them before this process got the lock.
        missing = _missing(connection, files, hint)
        for file in missing:
            connection.execute(file.text)
            connection.execute(
                "INSERT INTO schema_files (name, sha256) VALUES (%s, %s)", (file.name, file.sha256)
            )
    return [file.name for file in missing]


def made_by(applied: Mapping[str, str], files: list[SchemaFile]) -> bool:
    """Return whether these files, or the first of them, made a ledger."""
    recorded = sorted(applied.items())
    return recorded == [(file.name, file.sha256) for file in files[: len(recorded)]]


def _missing(
    connection: psycopg.Connection[Any], files: list[SchemaFile], hint: str
) -> list[SchemaFile]:
    is_recorded, has_chunks = connection.execute(_PRESENT).fetchone() or (False, False)
    applied: Mapping[str, str] = {}
    if is_recorded:
        applied = dict(connection.execute("SELECT name, sha256 FROM schema_files").fetchall())
    elif has_chunks:  # made before 0.5.0, which recorded the names in another table
        applied = {"": ""}
    if not made_by(applied, files):
        raise LedgerError(
            "the database has the tables of another version of caf-pipeline, and was not changed",
            hint=hint,
        )
    return [file for file in files if file.name not in applied]


_QUERIES: Final = Path(__file__).with_name("queries")


@cache
def query(name: str) -> str:
    """Return the statement of `queries/<name>.sql`."""
    return (_QUERIES / f"{name}.sql").read_text("utf-8")
