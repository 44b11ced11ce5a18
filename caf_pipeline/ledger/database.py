"""The connection to the ledger's Postgres: opening it, transactions, and the one place where its errors become ours.

Transactions share nothing of a session: no prepared statements, no session locks, no session settings. So a transaction-pooling
pgbouncer may be between.
Source: "Error Codes" in the PostgreSQL 18 manual for the SQLSTATEs; pgbouncer's feature table for what pooling forbids.
"""

import contextlib
import os
import re
import select
import shlex
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, quote

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import namedtuple_row

from caf_pipeline.errors import IllegalMove, LedgerError, LedgerUnreachable, NotLocated, first_line, interrupt_behind
from caf_pipeline.ledger.embedded import PORT, SUPERUSER, EmbeddedServer, embedded_server
from caf_pipeline.ledger.schema_files import is_current, make_tables
from caf_pipeline.setting_values import ENCODE_IN_URL, is_database_url
from caf_pipeline.settings import Settings
from caf_pipeline.waits import UNANSWERED_SECONDS, Waits

KEPT_IDLE: Final = 2  # a step's statement and the renewal of its lease
MOST_CONNECTIONS: Final = 10  # steps in threads
POOL_SECONDS: Final = 30  # for which one that is free is waited for
CONNECT_SECONDS: Final = 10
UNASKED_SECONDS: Final = 1.0  # for which an idle connection is taken to live, unless it has something to say

STILL_SECONDS: Final = 30  # as long as a lease
"""After which the server ends a transaction in whose middle its process does nothing, suspended or swapped out: the locks that
it holds would keep every other run waiting, for as long as its machine answers for it. Not in the middle of a COPY, which to the
server is no standstill: that of claims or locations holds its locks until the process goes on or its machine is gone."""

# One round trip. The settings are of this transaction only: a session's do not belong to us behind a pooler. Times come in the
# zone that is set here.
_BEGIN: Final = f"BEGIN; SET LOCAL idle_in_transaction_session_timeout = {STILL_SECONDS * 1000}; SET LOCAL TIME ZONE 'UTC'"

_CONNECT: Final[dict[str, Any]] = {
    "connect_timeout": CONNECT_SECONDS,
    "application_name": "caf-pipeline",
    # A server that went away without a word is noticed within a lease's time, not after the kernel's two hours.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,  # milliseconds
}

_ALWAYS: Final = {"client_encoding": "utf8"}
"""Of what is loaded in binary form, whatever PGCLIENTENCODING and the address say."""

_HINTS: Final = {
    "28": "check the user and the password in CAF_DATABASE_URL, and the server's pg_hba.conf",
    "3D": "create the database, or correct its name in CAF_DATABASE_URL",
    "closed": "open it by ALTER DATABASE … ALLOW_CONNECTIONS true, or name another one in CAF_DATABASE_URL",
    "42501": "grant the user of CAF_DATABASE_URL a role of sql/roles.sql; whoever makes the tables needs CREATE on the schema",
    "25006": "CAF_DATABASE_URL must name the primary server, not a standby",
    "53100": "make room on the database's disk",
}
"""What to do, by SQLSTATE or its class; "closed" has one (55000) that says other things, too."""

_TRANSIENT: Final = ("08", "25P03", "40", "53", "55", "57", "58")
"""Classes: connection, rollback (deadlock), resources, object in use (lock timeout), operator intervention, system error. Of
class 25 only the end of a transaction that stood still."""

# A connection that is refused has no SQLSTATE in libpq, only words; a server that speaks another language gets no hint. These are
# patterns.
_REFUSALS: Final = (
    ("password authentication failed", "28"),
    ("no password supplied", "28"),
    ("no pg_hba.conf entry", "28"),
    ("role ", "28"),
    (r'database ".*" is not currently accepting connections', "closed"),
    ("database ", "3D"),
)

_UNREACHABLE: Final = (
    ("resolve host", "its host name does not resolve", "check the host name in CAF_DATABASE_URL"),
    ("translate host name", "its host name does not resolve", "check the host name in CAF_DATABASE_URL"),
    ("Connection refused", "connection refused", "check host and port in CAF_DATABASE_URL, and that the server runs"),
    (
        "No such file or directory",
        "there is no socket of a server",
        "check the host in CAF_DATABASE_URL, and that the server runs",
    ),
    ("No route to host", "there is no route to it", "check the host in CAF_DATABASE_URL, and the network"),
    ("Network is unreachable", "there is no route to it", "check the host in CAF_DATABASE_URL, and the network"),
    ("timeout expired", "it does not answer in time", "check host and port in CAF_DATABASE_URL, and firewalls on the way"),
    ("timed out", "it does not answer in time", "check host and port in CAF_DATABASE_URL, and firewalls on the way"),
    ("invalid response to SSL", "what listens there is not Postgres", "check host and port in CAF_DATABASE_URL"),
    ("expected authentication request", "what listens there is not Postgres", "check host and port in CAF_DATABASE_URL"),
    (
        "server does not support SSL",
        "it does not speak TLS",
        "take sslmode out of CAF_DATABASE_URL, or set the server up for TLS",
    ),
    ("certificate verify failed", "its certificate is not valid here", "sslrootcert in CAF_DATABASE_URL names whom to trust"),
    ("does not match host name", "its certificate is of another host", "name it in CAF_DATABASE_URL as the certificate does"),
    ("certificate file", "", "check sslrootcert, sslcert and sslkey in CAF_DATABASE_URL"),
    ("private key file", "", "check sslcert and sslkey in CAF_DATABASE_URL"),
    ("closed the connection unexpectedly", "it closed the connection", "check that it runs, and is Postgres"),
    ("connection is bad", "", "correct the parameters after '?' in CAF_DATABASE_URL"),
)
"""Of libpq's words for a connection that cannot be made: what they mean, "" where they say it best, and what to do."""


Row = Any
"""A named tuple of a statement's columns."""


class Rows(psycopg.Cursor[Row]):
    """What a statement returned."""

    def one(self) -> Row:
        """Return the next row, which there is."""
        row = self.fetchone()
        assert row is not None
        return row

    def scalar_one(self) -> Any:  # noqa: ANN401 - of any type, as the column is
        """Return the first column of the next row, which there is."""
        return self.one()[0]

    def scalar_one_or_none(self) -> Any:  # noqa: ANN401 - as above
        """Return the first column of the next row, None where there is none."""
        row = self.fetchone()
        return None if row is None else row[0]

    def scalars(self) -> list[Any]:
        """Return the first column of all rows."""
        return [row[0] for row in self]


class Connection(psycopg.Connection[Row]):
    """A connection of the ledger: each statement is a transaction of its own unless one was begun."""

    idle_since = 0.0
    """Of the monotonic clock; 0 before it was given back for the first time."""

    def execute(self, query: str, params: Mapping[str, Any] | Sequence[Any] | None = None, *, binary: bool = False) -> Rows:  # type: ignore[override]
        """As psycopg's."""
        rows = super().execute(query, params, binary=binary)
        assert isinstance(rows, Rows)
        return rows


class Database:
    """A small pool of connections to one database. Safe in threads; a fork connects anew.

    Not psycopg_pool's, which connects in threads of its own: where the server refuses, whoever waits is told nothing of it until
    his time is over.

    Attributes:
        url: its address, for libpq.
        name: the database's, "" where the address has none.
        description: where it is, without user and password.
    """

    def __init__(self, url: str, server: EmbeddedServer | None = None) -> None:
        """Connect to nothing yet. `server`: the embedded one, if it is that; a connection starts it again if it is dead."""
        self.url = url
        self._server = server
        address = conninfo_to_dict(url)
        self.name = str(address.get("dbname", ""))
        self.description = _describe(address)
        self._password = address.get("password")
        self._options = {name: value for name, value in _CONNECT.items() if name not in address} | _ALWAYS
        self._begin_pool()

    def _begin_pool(self) -> None:
        self._process = os.getpid()
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._idle: list[Connection] = []  # the one that was used last is taken first; append and pop are atomic

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Commit at the end of the context, or roll back on any exception.

        Raises:
            LedgerUnreachable: the database is away; whether a commit under way was made is then unknown.
            LedgerError: it refused a statement.
        """
        with self._translated(), self._connected() as connection:
            connection.execute(_BEGIN)
            yield connection
            connection.commit()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """Give a connection for questions alone, each of which is a transaction of its own where none is begun.

        Raises: as `transaction`.
        """
        with self._translated(), self._connected() as connection:
            yield connection

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connection]:
        """Give a connection outside of a transaction; what is open at the end, or on an exception, is rolled back."""
        if self._process != os.getpid():  # a fork: two processes on one connection would read each other's answers
            self._begin_pool()
        if not self._free.acquire(timeout=POOL_SECONDS):
            raise LedgerUnreachable(f"all connections to {self.description} are in use")
        try:
            connection = self._take()
            try:
                yield connection
            except Exception:
                raise
            except BaseException:  # a statement may be under way, which cannot be rolled back
                connection.close()
                raise
            finally:
                self._give_back(connection)
        finally:
            self._free.release()

    def _take(self) -> Connection:
        """Return an idle connection, or a new one. Where an idle one broke, none of them is taken again.

        The end of a connection, and a server's last words, wait to be read, which is seen without asking. Of a server that went
        away without a word nothing is seen: a connection that was idle for longer than a moment is asked.
        """
        with contextlib.suppress(IndexError):
            connection = self._idle.pop()
            try:
                if time.monotonic() - connection.idle_since > UNASKED_SECONDS or _has_something_to_read(connection):
                    connection.execute("SELECT 1")
                return connection
            except psycopg.Error:
                connection.close()
                self.close()
        try:
            return self._connect()
        except psycopg.OperationalError:
            if self._server is None:
                raise
            self._server.revive()
            return self._connect()

    def _connect(self) -> Connection:
        connection = Connection.connect(
            self.url, **self._options, autocommit=True, prepare_threshold=None, row_factory=namedtuple_row
        )
        connection.cursor_factory = Rows
        return connection

    def _give_back(self, connection: Connection) -> None:
        try:
            connection.rollback()
        except psycopg.Error:  # it is broken, which whoever used it was told
            connection.close()
        if connection.closed or len(self._idle) >= KEPT_IDLE:
            connection.close()
        else:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)

    def is_current(self) -> bool:
        """Return whether the database has all tables; raises as `make_tables`."""
        with self.reading() as connection:
            return is_current(connection, hint=self._new_ledger())

    def make_tables(self) -> list[str]:
        """Make the tables that the database lacks; return the names of the SQL files that ran.

        Raises:
            LedgerError: another version made the tables. Nothing was changed.
        """
        with self.reading() as connection:
            return make_tables(connection, hint=self._new_ledger())

    def _new_ledger(self) -> str:
        """Return how to make a new ledger."""
        if self._server is not None:
            home = shlex.quote(str(self._server.folder.parent))
            return f"make a new ledger: mv {home} {home}.old"
        return "make a new ledger: createdb NAME, and write that name into CAF_DATABASE_URL"

    def close(self) -> None:
        """Close the idle connections."""
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            if interrupt := interrupt_behind(error):  # else a step would be tried again, and the interrupt be lost
                raise interrupt from None
            raise self._translate(error) from error

    def _translate(self, error: psycopg.Error) -> LedgerError:
        translated = self._as_ours(error)
        if self._server is not None and "CAF_DATABASE_URL" in translated.hint:
            translated.hint = f"see {self._server.log}"
        return translated

    def _as_ours(self, error: psycopg.Error) -> LedgerError:
        """Return our error for what the driver or the server reported, by SQLSTATE; never with the password."""
        diagnosis = error.diag
        said = diagnosis.message_primary or first_line(error).removeprefix("connection failed: ")
        if self._password:
            said = said.replace(str(self._password), "***")
        code = error.sqlstate or ""
        if not code and isinstance(error, psycopg.OperationalError):
            for words, meaning, hint in _UNREACHABLE:
                if words in str(error) and "FATAL:" not in str(error):
                    return LedgerUnreachable(f"{self.description} cannot be used: {meaning or said}", hint=hint)
            code = next((code for words, code in _REFUSALS if re.search(f"FATAL:  {words}", str(error))), "08")
        hint = _HINTS.get(code) or _HINTS.get(code[:2], "")
        if code == "23514" and diagnosis.table_name in ("caf_files", "chunk_copies"):
            return IllegalMove(f"the database refuses the state: {said}", hint="do the steps before it first")
        if hint:
            return LedgerError(f"{self.description}: {said}", hint=hint)
        if code.startswith(_TRANSIENT):
            return LedgerUnreachable(
                f"{self.description} cannot be used: {said}",
                hint="check that it runs and can be reached from here",
            )
        return LedgerError(f"{self.description} refused a statement: {said}")


def _has_something_to_read(connection: Connection) -> bool:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


class LedgerPart:
    """The methods of the ledger on one topic: `Ledger` inherits all parts. Each method is one transaction.

    `_store` is the name that the ledger gives the store: its kind in the settings.
    """

    _database: Database
    _store: str

    @contextlib.contextmanager
    def _of_source(self, source: str, *, lock: str = "") -> Iterator[tuple[Connection, int]]:
        """Give a transaction, and in it the source's id.

        Raises:
            NotLocated: there is no such source.
        """
        with self._database.transaction() as connection:
            yield connection, source_id_of(connection, source, lock=lock)


def source_id_of(connection: Connection, source: str, *, lock: str = "") -> int:
    """Return the id of a source; raises NotLocated where there is no such source."""
    found = connection.execute(f"SELECT source_id FROM sources WHERE name = %(name)s {lock}", {"name": source})
    source_id = found.scalar_one_or_none()
    if source_id is None:
        raise NotLocated(f"the ledger has no source '{source}'", hint="take an inventory of it first")
    return int(source_id)


def open_database(settings: Settings, waits: Waits | None = None) -> Database:
    """Return the database of the settings, with its tables: `database_url`, or the embedded server under `home`.

    `waits` says it while the database does not answer, and while its tables are made.

    Raises:
        LedgerUnreachable, LedgerError: it cannot be used; the message says where it is, without the password.
    """
    waits = waits or Waits()
    with contextlib.ExitStack() as opened:
        with waits.waiting(
            describe_database(settings), ends_by="its answer ends it, or the time limit of a connection", grace=UNANSWERED_SECONDS
        ):
            database = _database(settings)
            opened.callback(database.close)
            current = database.is_current()
        if not current:
            with waits.waiting(
                f"{database.description}, whose tables are made",
                ends_by="it takes a moment; if you stop it, nothing is changed",
                grace=UNANSWERED_SECONDS,
            ):
                database.make_tables()
        opened.pop_all()
    return database


def has_own_server(settings: Settings) -> bool:
    """Return whether the settings name a server; else the embedded server is used."""
    return bool(settings.database_url and settings.database_url.get_secret_value())


def _database(settings: Settings) -> Database:
    if settings.database_url is not None and settings.database_url.get_secret_value():
        return Database(parse_url(settings.database_url.get_secret_value()))
    return Database(embedded_url(settings), embedded_server(settings.home / "postgres"))


def embedded_url(settings: Settings) -> str:
    """Return the address of the embedded server under `home`, started where it does not run."""
    server = embedded_server(settings.home / "postgres")
    # All is named that libpq would else take from the environment, as PGPORT.
    return f"postgresql://{SUPERUSER}@/{SUPERUSER}?host={quote(str(server.socket_folder), safe='')}&port={PORT}"


def parse_url(text: str) -> str:
    """Return `postgresql://…` as an address for libpq, whatever driver it names.

    Source: "Connection URIs" in the PostgreSQL 18 manual.
    """
    url = re.sub(r"\Apostgres(ql)?(\+\w+)?://", "postgresql://", text)
    try:
        named = Counter(name for name, _ in parse_qsl(url.partition("?")[2]))  # of two, libpq would take the last
        if is_database_url(url) and max(named.values(), default=1) == 1:
            conninfo_to_dict(url)
            return url
    except (psycopg.Error, ValueError):  # what they say may quote the password
        pass
    raise LedgerError(
        "CAF_DATABASE_URL is not an address of the form postgresql://user:password@host:port/database",
        hint=f"{ENCODE_IN_URL}; after '?' libpq's own parameters may follow, each once",
    )


def describe_database(settings: Settings) -> str:
    """Return where the database of the settings is, without user and password."""
    url = settings.database_url.get_secret_value() if settings.database_url else ""
    return _describe(conninfo_to_dict(parse_url(url))) if url else f"the embedded database in {settings.home / 'postgres'}"


def _describe(address: Mapping[str, Any]) -> str:
    hosts, ports = str(address.get("host") or "the local socket").split(","), str(address.get("port") or "").split(",")
    if len(ports) == 1:  # libpq takes one for all
        ports *= len(hosts)
    at = (f"{host}:{port}" if port and not host.startswith("/") else host for host, port in zip(hosts, ports, strict=False))
    return f"the database '{address.get('dbname', '')}' at {','.join(at)}"
