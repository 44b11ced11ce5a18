"""Backs the ledger up to a file in pg_dump's custom format, and restores it in one transaction.

Other programs' tables stay. The password reaches Postgres' programs through the environment, never
on a command line. Source: "pg_dump", "pg_restore" and "psql" in the PostgreSQL 18 manual.
"""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import scalar_row

from caf_pipeline.errors import HeldByOther, LedgerError, SettingsError, StagingError, UsageError
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.embedded import wheel_programs
from caf_pipeline.ledger.query_files import query
from caf_pipeline.ledger.schema_files import APPLIED, made_by, schema_files
from caf_pipeline.ledger.tables import PACKING_SECRETS
from caf_pipeline.system.atomic_files import PRIVATE, sync_file, sync_folder
from caf_pipeline.system.child_environment import Need, child_environment

_MAGIC: Final = b"PGDMP"  # of pg_dump's custom format
_HELD: Final = "a run holds a lease"  # as _BEFORE raises it
_DISK_FULL: Final = "could not write to output file"  # of pg_dump
_CREATED: Final = re.compile(
    r"(?im)^\s*CREATE (?:OR REPLACE )?(?:UNIQUE )?(TABLE|VIEW|FUNCTION|INDEX) (?:IF NOT EXISTS "
    r")?(\w+)"
)
_ENTRY: Final = re.compile(
    r"\d+; \d+ \d+ (?P<what>[A-Z][A-Z ]*[A-Z]) (?P<schema>\S+) (?P<tag>.*) \S+"
)
_IGNORED: Final = frozenset({"SCHEMA", "EXTENSION", "COMMENT", "DATABASE PROPERTIES", "DATABASE"})

_BEFORE: Final = r"""
\set ON_ERROR_STOP on
BEGIN;
SET LOCAL lock_timeout = '20s';
SELECT quote_ident(current_schema()) AS schema \gset
SET LOCAL search_path = :schema;
SELECT format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', oid::regclass) FROM pg_class
WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p')
    AND relname = ANY (:'names') \gexec
DO $$ BEGIN
    IF EXISTS (SELECT FROM leases WHERE expires_at > clock_timestamp()) THEN
        RAISE EXCEPTION 'a run holds a lease';
    END IF;
END $$;
SELECT 'DROP VIEW ' || string_agg(oid::regclass::text, ', ') FROM pg_class
WHERE relnamespace = current_schema()::regnamespace AND relkind = 'v'
    AND relname = ANY (:'names') \gexec
SELECT 'DROP TABLE ' || string_agg(oid::regclass::text, ', ') FROM pg_class
WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p')
    AND relname = ANY (:'names') \gexec
SELECT 'DROP FUNCTION ' || string_agg(oid::regprocedure::text, ', ') FROM pg_proc
WHERE pronamespace = current_schema()::regnamespace AND proname = ANY (:'names') \gexec
"""
r"""A script for psql. It waits up to 20 seconds for other statements.

`\gexec` runs the text that the server returns, and nothing if it is NULL.
"""

# The server's clock gave the earlier epochs, so only this clock may set times and epochs.
_AFTERWARDS: Final = """
SET search_path = :schema;
UPDATE leases SET expires_at = to_timestamp(0),
    epoch = greatest(epoch, CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)) + 1;
UPDATE caf_files SET
    epoch = greatest(epoch, CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)) + 1;
INSERT INTO orders (name, value) VALUES ('paused', :'reason')
    ON CONFLICT (name) DO UPDATE SET value = excluded.value, ordered_at = now();
COMMIT;
"""


@dataclass(frozen=True, slots=True)
class BackupContents:
    """Each source's address, by name."""

    sources: Mapping[str, str]


class Programs:
    """pg_dump, pg_restore and psql, for one database."""

    def __init__(self, database: Database, *, embedded: bool) -> None:
        address = conninfo_to_dict(database.url)
        if "sslpassword" in address:
            raise SettingsError(
                "CAF_DATABASE_URL has an sslpassword, which pg_dump accepts only on its command "
                "line, visible to other users",
                hint="use a key without a password, or the server's own backup tools",
            )
        self._environment = child_environment(Need.NOTHING if embedded else Need.POSTGRES)
        password = address.pop("password", None)
        if password is not None:
            self._environment["PGPASSWORD"] = str(password)
        self._secret = str(password or "")
        self._address = make_conninfo("", **{name: str(value) for name, value in address.items()})
        with database.translated(), database.connect() as connection:
            major = connection.info.server_version // 10_000
        on_path = shutil.which("pg_dump")
        folders = [] if embedded or on_path is None else [Path(on_path).parent]
        with contextlib.suppress(LedgerError):  # no wheel for this platform
            folders.append(wheel_programs())
        for folder in folders:
            command = [str(folder / "pg_dump"), "--version"]
            with contextlib.suppress(OSError):
                version = subprocess.run(
                    command, env=child_environment(), capture_output=True, text=True, check=False
                ).stdout
                if re.search(rf"\) {major}[. \n]", version):
                    self._folder = folder
                    return
        raise LedgerError(
            f"the server runs Postgres {major}, but PATH has no pg_dump of this version",
            hint=f"install the client programs of Postgres {major} (postgresql-client-{major})",
        )

    @contextlib.contextmanager
    def started(
        self,
        program: str,
        *arguments: str,
        connects: bool = False,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
    ) -> Iterator["subprocess.Popen[bytes]"]:
        database = [f"--dbname={self._address}"] if connects else []
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [str(self._folder / program), *database, *arguments],
                env=self._environment,
                stdin=stdin,
                stdout=stdout,
                stderr=errors,
            )
            try:
                yield process
                process.wait()
            finally:
                process.kill()
                process.wait()
                for stream in (process.stdin, process.stdout):
                    with contextlib.suppress(BrokenPipeError):
                        if stream is not None:
                            stream.close()
            if process.returncode:
                errors.seek(0)
                text = errors.read().decode(errors="replace")
                text = text.replace(self._secret, "***") if self._secret else text
                lines = [line.strip() for line in text.splitlines() if line.strip()]
                reason = next(
                    (line for line in lines if "error" in line.lower() or "fatal" in line.lower()),
                    lines[-1] if lines else str(process.returncode),
                )
                raise LedgerError(
                    f"{program} failed: {reason[:300]}", hint="the ledger is unchanged"
                )


def names_of_ledger() -> Sequence[str]:
    """Return the tables, views, functions and indexes of the SQL files."""
    created = {name for file in schema_files() for _, name in _CREATED.findall(file.text.decode())}
    return sorted({*created, APPLIED})


def back_up(database: Database, path: Path, *, embedded: bool) -> int:
    """Write a backup of one moment, readable only by its owner; return its size in bytes.

    Raises UsageError if the path exists, StagingError if it cannot be written.
    """
    exists = UsageError(f"{str(path)!r} exists, and is not replaced.", hint="Name a new file.")
    if os.path.lexists(path):
        raise exists
    programs = Programs(database, embedded=embedded)
    with database.translated(), database.connect() as connection:
        cursor = connection.cursor(row_factory=scalar_row)
        values = {"ours": list(names_of_ledger())}
        foreign = cursor.execute(query("foreign_tables"), values).fetchall()
    temporary = path.with_name(f".caf-{secrets.token_hex(8)}.partial")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE))
        try:
            # A secret must not outlive the seal, in a backup neither.
            excluded = [f"--exclude-table-data={PACKING_SECRETS.name}"]
            excluded += [f"--exclude-table={name}" for name in foreign]
            # pg_dump would write its table of contents to standard output twice.
            with programs.started(
                "pg_dump",
                "--format=custom",
                "--no-password",
                f"--file={temporary}",
                *excluded,
                connects=True,
            ):
                pass
            sync_file(temporary)
            size_bytes = temporary.stat().st_size
            try:
                os.link(temporary, path)  # unlike a rename, it replaces nothing
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links, as on many USB disks
                if os.path.lexists(path):
                    raise exists from None
                temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.absolute().parent)
    except FileExistsError as error:
        raise exists from error
    except OSError as error:
        raise StagingError(
            f"{str(path)!r} cannot be written: {error.strerror}",
            hint="name a file in a folder that exists and has room",
        ) from error
    except LedgerError as error:
        if _DISK_FULL not in str(error):
            raise
        raise StagingError(
            f"{str(path)!r} cannot be written: {error}", hint="name a file in a folder with room"
        ) from error
    return size_bytes


def read_backup(programs: Programs, path: Path) -> BackupContents:
    """Raises UsageError if the backup is not of this version."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    no_backup = f"{str(path)!r} is not a backup of a ledger."
    if magic != _MAGIC:
        raise UsageError(
            no_backup, hint="Give a file that 'caf backup' or 'pg_dump --format=custom' wrote."
        )
    applied = {row["name"]: row["sha256"] for row in _rows(programs, path, APPLIED)}
    if not applied:
        raise UsageError(no_backup, hint="It has no ledger of version 0.5.0 or later.")
    if not made_by(applied, schema_files()):
        raise UsageError(
            f"{str(path)!r} is a backup of another version's ledger; nothing was restored.",
            hint="Restore it with the version that made it.",
        )
    return BackupContents({row["name"]: row["address"] for row in _rows(programs, path, "sources")})


def _rows(programs: Programs, path: Path, table: str) -> list[dict[str, str]]:
    with programs.started(
        "pg_restore",
        "--data-only",
        f"--table={table}",
        "--file=-",
        str(path),
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout
        script = process.stdout.read().decode()
    copy = re.search(
        r"(?ms)^COPY \S+ \((?P<columns>[^)]*)\) FROM stdin;\n(?P<rows>.*?)^\\\.$", script
    )
    if copy is None:
        return []
    columns = copy["columns"].replace('"', "").split(", ")
    return [
        dict(zip(columns, line.split("\t"), strict=False)) for line in copy["rows"].splitlines()
    ]


def restore(programs: Programs, path: Path, *, reason: str) -> None:
    """Replace the ledger by a backup in one transaction, pause everything, and end all leases.

    Opening it then creates a later version's tables. If an error is raised, the ledger is
    unchanged. Raises HeldByOther if a run holds a lease.
    """
    names = names_of_ledger()
    try:
        with contextlib.ExitStack() as stack:
            entries = stack.enter_context(tempfile.NamedTemporaryFile("w", encoding="utf-8"))
            entries.write(_entries(programs, path, names))
            entries.flush()
            options = ("--no-psqlrc", "--quiet", "--no-password", "--output=/dev/null")
            variables = (f"--set=names={{{','.join(names)}}}", f"--set=reason={reason}")
            psql = stack.enter_context(
                programs.started("psql", *options, *variables, connects=True, stdin=subprocess.PIPE)
            )
            assert psql.stdin
            _send(psql.stdin, _BEFORE)
            options = ("--no-owner", "--exit-on-error", f"--use-list={entries.name}", "--file=-")
            with programs.started(
                "pg_restore", *options, str(path), stdout=subprocess.PIPE
            ) as script:
                assert script.stdout
                with contextlib.suppress(BrokenPipeError):  # psql reports why it ended
                    shutil.copyfileobj(script.stdout, psql.stdin, 1 << 20)
            # Only now: if the script or this process ends early, psql ends without a commit.
            _send(psql.stdin, _AFTERWARDS)
            with contextlib.suppress(BrokenPipeError):
                psql.stdin.close()
    except LedgerError as error:
        if _HELD in str(error):
            raise HeldByOther(
                "a run works on this ledger now; nothing was restored",
                holder="",
                hint="end it first",
            ) from error
        raise


def _send(stream: IO[bytes], text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        stream.write(text.encode())
        stream.flush()


def _entries(programs: Programs, path: Path, names: Sequence[str]) -> str:
    with programs.started("pg_restore", "--list", str(path), stdout=subprocess.PIPE) as process:
        assert process.stdout
        listed = process.stdout.read().decode().splitlines()
    kept = []
    for line in listed:
        entry = _ENTRY.match(line)
        if entry is None or entry["what"] in _IGNORED:
            continue
        words = re.split(r"[ (]", entry["tag"])
        if "SEQUENCE" in entry["what"]:  # named after table and column
            is_ours = any(words[0].startswith(f"{name}_") for name in names)
        else:
            is_ours = any(word in names for word in words)
        if is_ours:
            kept.append(line)
    return "\n".join(kept) + "\n"
