"""Backs the ledger up to a file in pg_dump's custom format, and restores it in one transaction.

The file ends with a line that has the SHA-256 of all bytes before its digits. `pg_restore` ignores
that line. A restore also compares the restored tables, views, functions, triggers and constraints
with those of `sql/` before it commits.

Other programs' tables stay. The password reaches Postgres' programs through the environment, never
on a command line. Source: "pg_dump", "pg_restore" and "psql" in the PostgreSQL 18 manual.
"""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import scalar_row

from caf_pipeline.errors import (
    HeldByOther,
    IntegrityError,
    LedgerError,
    SettingsError,
    StagingError,
    UsageError,
)
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.embedded import wheel_programs
from caf_pipeline.ledger.sql_files import (
    APPLIED,
    MAKE_APPLIED,
    SchemaFile,
    made_by,
    query,
    schema_files,
)
from caf_pipeline.ledger.tables import PACKING_SECRETS
from caf_pipeline.system.atomic_files import PRIVATE, sync_file, sync_folder
from caf_pipeline.system.child_environment import Need, child_environment
from caf_pipeline.waits import Advance, ignore

_MAGIC: Final = b"PGDMP"  # of pg_dump's custom format
_HASH_LINE: Final = re.compile(rb"\ncaf backup sha256 ([0-9a-f]{64})\n")
_HASH_LINE_BYTES: Final = 84
_PIECE_BYTES: Final = 1 << 20
_COMPRESSION: Final = "1"
"""gzip's level: a third of the CPU time of the default, for a file that is 7 % larger.

Versions before 16 do not know `gzip:1`.
"""
_POLL_SECONDS: Final = 0.5
_HELD: Final = "a run holds a lease"  # as _BEFORE raises it
_DISK_FULL: Final = "could not write to output file"  # of pg_dump
_CREATED: Final = re.compile(
    r"(?im)^\s*CREATE (?:OR REPLACE )?(?:UNIQUE )?(TABLE|VIEW|FUNCTION|INDEX) (?:IF NOT EXISTS "
    r")?(\w+)"
)
_ENTRY: Final = re.compile(
    r"\d+; \d+ \d+ (?P<what>[A-Z][A-Z ]*[A-Z]) (?P<schema>\S+) (?P<tag>.*) \S+"
)
_IGNORED: Final = frozenset({"SCHEMA", "EXTENSION", "DATABASE PROPERTIES", "DATABASE"})

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
"""
r"""A script for psql. It waits up to 20 seconds for other statements.

`\gexec` runs the text that the server returns, and nothing if it is NULL.
"""

_DROP: Final = r"""
SELECT 'DROP VIEW ' || string_agg(oid::regclass::text, ', ') FROM pg_class
WHERE relnamespace = current_schema()::regnamespace AND relkind = 'v'
    AND relname = ANY (:'names') \gexec
SELECT 'DROP TABLE ' || string_agg(oid::regclass::text, ', ') FROM pg_class
WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p')
    AND relname = ANY (:'names') \gexec
SELECT 'DROP FUNCTION ' || string_agg(oid::regprocedure::text, ', ') FROM pg_proc
WHERE pronamespace = current_schema()::regnamespace AND proname = ANY (:'names') \gexec
"""

# Names of NOT NULL constraints differ between versions of Postgres, so that only the columns show
# these constraints.
_DEFINITIONS: Final = """
    WITH ours AS (
        SELECT oid, oid::regclass::text AS name, relkind, relpersistence, relrowsecurity
        FROM pg_class
        WHERE relnamespace = current_schema()::regnamespace AND relname = ANY (:'names'))
    SELECT 'relation', name, concat_ws(' ', relkind, relpersistence, relrowsecurity) FROM ours
    UNION ALL
    SELECT 'column', name || '.' || attname, concat_ws(' ', attnum,
        format_type(atttypid, atttypmod), attcollation::regcollation, attnotnull,
        attidentity, attgenerated, pg_get_expr(adbin, adrelid))
    FROM ours JOIN pg_attribute ON attrelid = ours.oid AND attnum > 0 AND NOT attisdropped
        LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
    WHERE relkind <> 'i'
    UNION ALL
    SELECT 'sequence', name, concat_ws(' ', seqtypid::regtype, seqstart, seqincrement, seqmin,
        seqmax, seqcycle)
    FROM ours JOIN pg_depend ON refobjid = ours.oid AND deptype = 'i'
        JOIN pg_sequence ON seqrelid = objid
    UNION ALL
    SELECT 'constraint', name || '.' || conname, pg_get_constraintdef(pg_constraint.oid)
    FROM ours JOIN pg_constraint ON conrelid = ours.oid AND contype <> 'n'
    UNION ALL
    SELECT 'index', indexrelid::regclass::text, pg_get_indexdef(indexrelid)
    FROM ours JOIN pg_index ON indrelid = ours.oid
    UNION ALL
    SELECT 'trigger', name || '.' || tgname, concat(tgenabled, pg_get_triggerdef(pg_trigger.oid))
    FROM ours JOIN pg_trigger ON tgrelid = ours.oid AND NOT tgisinternal
    UNION ALL
    SELECT CASE relkind WHEN 'v' THEN 'view' ELSE 'rule' END, name,
        concat(ev_enabled, pg_get_ruledef(pg_rewrite.oid))
    FROM ours JOIN pg_rewrite ON ev_class = ours.oid
    UNION ALL
    SELECT 'function', oid::regprocedure::text, pg_get_functiondef(oid) FROM pg_proc
    WHERE pronamespace = current_schema()::regnamespace AND proname = ANY (:'names')
"""

_REMEMBER: Final = rf"""
SELECT jsonb_agg(to_jsonb(made)) AS expected FROM ({_DEFINITIONS}) AS made (kind, name, text) \gset
"""

_COMPARE: Final = rf"""
SET search_path = :schema;
WITH expected AS (
        SELECT * FROM jsonb_to_recordset(:'expected') AS (kind text, name text, text text)),
    restored (kind, name, text) AS ({_DEFINITIONS})
SELECT set_config('caf.differing', (SELECT coalesce(min(kind || ' ' || name), '') FROM (
    (TABLE expected EXCEPT TABLE restored) UNION ALL (TABLE restored EXCEPT TABLE expected)
) AS differing), true);
DO $$ BEGIN
    IF current_setting('caf.differing') <> '' THEN
        RAISE EXCEPTION 'the backup has another %', current_setting('caf.differing');
    END IF;
END $$;
"""

# The server's clock gave the earlier epochs, so only this clock may set times and epochs.
_AFTERWARDS: Final = """
UPDATE leases SET expires_at = to_timestamp(0),
    epoch = greatest(epoch, CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)) + 1;
UPDATE caf_files SET
    epoch = greatest(epoch, CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)) + 1;
INSERT INTO orders (name, value) VALUES ('paused', :'reason')
    ON CONFLICT (name) DO UPDATE SET value = excluded.value, ordered_at = now();
ANALYZE file_locations;
"""

_MARK: Final = """
DELETE FROM full_reads;
INSERT INTO orders (name, value)
    VALUES ('unverified', 'a backup without a hash was restored and not compared with the store')
    ON CONFLICT (name) DO NOTHING;
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
    return sorted({APPLIED, *(name for _, name in _created(schema_files()))})


def _created(files: Sequence[SchemaFile]) -> Iterator[tuple[str, str]]:
    for file in files:
        yield from _CREATED.findall(file.text.decode())


def back_up(database: Database, path: Path, *, embedded: bool, advance: Advance = ignore) -> int:
    """Write a backup of one moment, readable only by its owner; return its size in bytes.

    `advance` is called with the number of bytes written since its last call.

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
                f"--compress={_COMPRESSION}",
                "--no-password",
                f"--file={temporary}",
                *excluded,
                connects=True,
            ) as pg_dump:
                _watch(pg_dump, temporary, advance)
            with temporary.open("r+b") as file:  # pg_dump itself goes back to earlier bytes
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                file.write(b"\ncaf backup sha256 %b\n" % digest.encode())
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


def _watch(process: "subprocess.Popen[bytes]", path: Path, advance: Advance) -> None:
    """Report the growth of the file that a process writes, until the process ends."""
    known_bytes = 0
    while process.returncode is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)
        size_bytes = path.stat().st_size
        advance(size_bytes - known_bytes)
        known_bytes = size_bytes


def read_backup(
    programs: Programs, path: Path, *, unverified: bool = False, advance: Advance = ignore
) -> BackupContents:
    """Compare the whole file with its hash, and read its sources.

    `unverified` accepts a file without a hash. `advance` is called with the number of bytes of each
    piece.

    Raises:
        UsageError: the file is no backup of this version, or has no hash.
        IntegrityError: the bytes of the file do not match its hash.
    """
    with _opened(path, unverified=unverified) as dump:
        dump.copy(lambda piece: advance(len(piece)))
    _files_of(programs, path)
    return BackupContents(_pairs(programs, path, "sources", "name address"))


@dataclass(frozen=True, slots=True)
class _Dump:
    """The bytes that pg_dump wrote, and their SHA-256 in hexadecimal, or None."""

    path: Path
    file: IO[bytes]
    size_bytes: int
    sha256: str | None

    def copy(self, write: Callable[[bytes], object]) -> None:
        """Pass all bytes to `write`. Raises IntegrityError after the last if they do not match."""
        digest, unread_bytes = hashlib.sha256(), self.size_bytes
        with _reading(self.path):
            self.file.seek(0)
            while piece := self.file.read(min(_PIECE_BYTES, unread_bytes)):
                digest.update(piece)
                write(piece)
                unread_bytes -= len(piece)
        if unread_bytes or self.sha256 not in (None, digest.hexdigest()):
            raise IntegrityError(
                f"{str(self.path)!r} is damaged: its bytes do not match the SHA-256 at its end",
                hint="nothing was restored; restore another backup",
            )


@contextlib.contextmanager
def _opened(path: Path, *, unverified: bool) -> Iterator[_Dump]:
    with contextlib.ExitStack() as stack:
        with _reading(path):
            file = stack.enter_context(path.open("rb"))
            magic = file.read(len(_MAGIC))
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, size_bytes - _HASH_LINE_BYTES))
            line = _HASH_LINE.fullmatch(file.read())
        if magic != _MAGIC:
            raise UsageError(
                _no_backup(path),
                hint="Give a file of 'caf backup', or one of 'pg_dump --format=custom' with "
                "--unverified.",
            )
        if line is None and not unverified:
            raise UsageError(
                f"{str(path)!r} does not end with the SHA-256 of a backup: it is damaged, or "
                "another program wrote it.",
                hint="Restore another backup. --unverified restores this file, and everything "
                "stays paused until 'caf doctor' has compared it with the store.",
            )
        if line is None:
            yield _Dump(path, file, size_bytes, None)
        else:
            yield _Dump(path, file, size_bytes - _HASH_LINE_BYTES, line[1].decode())


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}") from error


def _no_backup(path: Path) -> str:
    return f"{str(path)!r} is not a backup of a ledger."


def _files_of(programs: Programs, path: Path) -> Sequence[SchemaFile]:
    """Return the files of `sql/` that made the ledger. Raises UsageError for other files."""
    applied = _pairs(programs, path, APPLIED, "name sha256")
    if not applied:
        raise UsageError(_no_backup(path), hint="It has no ledger of version 0.5.0 or later.")
    files = schema_files()
    if not made_by(applied, files):
        raise UsageError(
            f"{str(path)!r} is a backup of another version's ledger; nothing was restored.",
            hint="Restore it with the version that made it.",
        )
    return files[: len(applied)]


def _pairs(programs: Programs, path: Path, table: str, columns: str) -> dict[str, str]:
    """Return two columns of a table's rows; none if the file lacks them."""
    with programs.started(
        "pg_restore",
        "--data-only",
        f"--table={table}",
        "--file=-",
        str(path),
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout
        script = process.stdout.read().decode(errors="replace")
    copy = re.search(
        r"(?ms)^COPY \S+ \((?P<columns>[^)]*)\) FROM stdin;\n(?P<rows>.*?)^\\\.$", script
    )
    names = copy["columns"].replace('"', "").split(", ") if copy else []
    if copy is None or not {*columns.split()} <= {*names}:
        return {}
    key, value = (names.index(name) for name in columns.split())
    rows = (line.split("\t") for line in copy["rows"].splitlines())
    return {row[key]: row[value] for row in rows if len(row) == len(names)}


def restore(
    programs: Programs,
    path: Path,
    *,
    reason: str,
    unverified: bool = False,
    advance: Advance = ignore,
) -> None:
    """Replace the ledger by a backup in one transaction, pause everything, and end all leases.

    Opening it then creates a later version's tables. If an error is raised, the ledger is
    unchanged. A file without a hash is accepted only as `unverified`: then only the doctor permits
    an end of the pause. Raises HeldByOther if a run holds a lease, and as `read_backup`.
    """
    names = names_of_ledger()
    try:
        with contextlib.ExitStack() as stack:
            dump = stack.enter_context(_opened(path, unverified=unverified))
            files = _files_of(programs, path)
            entries = stack.enter_context(tempfile.NamedTemporaryFile("w", encoding="utf-8"))
            entries.write(_entries(programs, path, names, files))
            entries.flush()
            options = ("--no-psqlrc", "--quiet", "--no-password", "--output=/dev/null")
            variables = (f"--set=names={{{','.join(names)}}}", f"--set=reason={reason}")
            psql = stack.enter_context(
                programs.started("psql", *options, *variables, connects=True, stdin=subprocess.PIPE)
            )
            assert psql.stdin
            _send(psql.stdin, _BEFORE, _DROP, MAKE_APPLIED, ";")
            # `\gexec` replaces no variables of psql, such as `:name`, in the file.
            _send(
                psql.stdin,
                *(f"SELECT $caf_sql${file.text.decode()}$caf_sql$ \\gexec\n" for file in files),
            )
            _send(psql.stdin, _REMEMBER, _DROP)
            options = ("--no-owner", "--exit-on-error", f"--use-list={entries.name}", "--file=-")
            failed: LedgerError | None = None
            try:
                with programs.started(
                    "pg_restore", *options, stdin=subprocess.PIPE, stdout=psql.stdin
                ) as pg_restore:
                    assert pg_restore.stdin
                    _pass_on(dump, pg_restore.stdin, advance)
            except LedgerError as error:
                failed = error  # if psql ended first, it reports why
            else:
                # Only now: if the script or this process ends early, psql ends without a commit.
                mark = _MARK if dump.sha256 is None else ""
                _send(psql.stdin, _COMPARE, _AFTERWARDS, mark, "COMMIT;\n")
            _close(psql.stdin)
        if failed:
            raise failed
    except LedgerError as error:
        if _HELD in str(error):
            raise HeldByOther(
                "a run works on this ledger now; nothing was restored",
                holder="",
                hint="end it first",
            ) from error
        raise


def _pass_on(dump: _Dump, stream: IO[bytes], advance: Advance) -> None:
    """pg_restore may end before it has read everything."""
    is_open = True

    def write(piece: bytes) -> None:
        nonlocal is_open
        if is_open:
            try:
                stream.write(piece)
            except BrokenPipeError:
                is_open = False
        advance(len(piece))

    dump.copy(write)
    _close(stream)


def _close(stream: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def _send(stream: IO[bytes], *texts: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        stream.write("".join(texts).encode())
        stream.flush()


def _entries(
    programs: Programs, path: Path, names: Sequence[str], files: Sequence[SchemaFile]
) -> str:
    """Return the ledger's entries. Raises UsageError if those of a table's rows are missing."""
    with programs.started("pg_restore", "--list", str(path), stdout=subprocess.PIPE) as process:
        assert process.stdout
        listed = process.stdout.read().decode(errors="replace").splitlines()
    kept = []
    without_rows = {APPLIED, *(name for kind, name in _created(files) if kind == "TABLE")}
    without_rows.discard(PACKING_SECRETS.name)  # `back_up` leaves them out
    for line in listed:
        entry = _ENTRY.match(line)
        if entry is None or entry["what"] in _IGNORED:
            continue
        words = re.split(r"[ (.]", entry["tag"])[:2]  # e.g. COLUMN sources.name
        if "SEQUENCE" in entry["what"]:  # named after table and column
            is_ours = any(words[0].startswith(f"{name}_") for name in names)
        else:
            is_ours = any(word in names for word in words)
        if is_ours:
            kept.append(line)
        if entry["what"] == "TABLE DATA":
            without_rows.discard(entry["tag"])
    if without_rows:
        raise UsageError(
            f"{str(path)!r} lacks the rows of {', '.join(sorted(without_rows))}.",
            hint="Restore another backup.",
        )
    return "\n".join(kept) + "\n"
