"""The connection to the ledger's Postgres: opening it, transactions, and the one place where its errors become ours.

Transactions share nothing of a session: no prepared statements, no session locks, no session settings. So a transaction-pooling
pgbouncer may be between.
Source: "Error Codes" in the PostgreSQL 18 manual for the SQLSTATEs; pgbouncer's feature table for what pooling forbids.
"""

import contextlib
import select
import time
from collections.abc import Iterator
from typing import Any, Final

import psycopg
import sqlalchemy.exc
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from caf_pipeline.errors import IllegalMove, LedgerError, LedgerUnreachable, NotLocated, first_line, interrupt_behind
from caf_pipeline.ledger.embedded import SUPERUSER, embedded_server
from caf_pipeline.ledger.migrations import is_current, migrate
from caf_pipeline.settings import Settings
from caf_pipeline.waits import UNANSWERED_SECONDS, Waits

POOL_SIZE: Final = 2  # a step's statement and the renewal of its lease
MAX_OVERFLOW: Final = 8  # steps in threads
CONNECT_SECONDS: Final = 10
UNASKED_SECONDS: Final = 1.0  # for which an idle connection is taken to live, unless it has something to say

STILL_SECONDS: Final = 30  # as long as a lease
"""After which the server ends a transaction in whose middle its process does nothing, suspended or swapped out: the locks that
it holds would keep every other run waiting, for as long as its machine answers for it."""

# For this transaction only: a session's settings do not belong to us behind a pooler. Times come in the zone that is set here.
_SETTINGS: Final = text(f"SET LOCAL idle_in_transaction_session_timeout = {STILL_SECONDS * 1000}; SET LOCAL TIME ZONE 'UTC'")

_CONNECT: Final[dict[str, Any]] = {
    "connect_timeout": CONNECT_SECONDS,
    "application_name": "caf-pipeline",
    "client_encoding": "utf8",  # of what is loaded in binary form, whatever PGCLIENTENCODING says
    # A server that went away without a word is noticed within a lease's time, not after the kernel's two hours.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,  # milliseconds
}

_HINTS: Final = {
    "28": "check the user and the password in CAF_DATABASE_URL, and the server's pg_hba.conf",
    "3D": "create the database, or correct its name in CAF_DATABASE_URL",
    "42501": "grant the user of CAF_DATABASE_URL CREATE on the schema and all rights on the ledger's tables",
    "25006": "CAF_DATABASE_URL must name the primary server, not a standby",
    "53100": "make room on the database's disk",
}
"""What to do, by SQLSTATE or its class."""

_TRANSIENT: Final = ("08", "25P03", "40", "53", "55", "57", "58")
"""Classes: connection, rollback (deadlock), resources, object in use (lock timeout), operator intervention, system error. Of
class 25 only the end of a transaction that stood still."""

# A connection that is refused has no SQLSTATE in libpq, only words; a server that speaks another language gets no hint.
_REFUSALS: Final = (
    ("password authentication failed", "28"),
    ("no password supplied", "28"),
    ("no pg_hba.conf entry", "28"),
    ("role ", "28"),
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
    ("closed the connection unexpectedly", "it closed the connection", "check that it runs, and is Postgres"),
)
"""Of libpq's words for a connection that cannot be made: what they mean, and what to do."""


class Database:
    """A small pool of connections to one database. Safe in threads; a fork needs one of its own.

    Attributes:
        description: where it is, without user and password.
    """

    def __init__(self, url: URL) -> None:
        self.url = url
        self.description = _describe(url)
        with self._translated():
            self.engine = create_engine(
                url,
                pool_size=POOL_SIZE,
                max_overflow=MAX_OVERFLOW,
                hide_parameters=True,  # keys of objects do not belong in errors and logs
                connect_args={key: value for key, value in _CONNECT.items() if key not in url.query}
                | {"prepare_threshold": None},
            )
        event.listen(self.engine, "checkin", _note_time)
        event.listen(self.engine, "checkout", self._require_alive)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Commit at the end of the context, or roll back on any exception.

        Raises:
            LedgerUnreachable: the database is away; whether a commit under way was made is then unknown.
            LedgerError: it refused a statement.
        """
        with self._translated(), self.engine.begin() as connection:
            connection.execute(_SETTINGS)
            try:
                yield connection
            except Exception:
                raise
            except BaseException:  # a statement may be under way, so that a roll-back fails and the pool logs a traceback
                connection.invalidate()
                raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[psycopg.Connection[Any]]:
        """Give the driver's connection, for questions alone: each statement is a transaction of its own where none is begun.

        Raises: as `transaction`.
        """
        with self._translated(), contextlib.closing(self.engine.raw_connection()) as pooled:
            connection = pooled.driver_connection
            assert isinstance(connection, psycopg.Connection)
            try:
                connection.autocommit = True
                yield connection
                connection.autocommit = False
            except BaseException:  # the pool does not see what the driver raises, and would reset a connection that is broken
                pooled.invalidate()
                raise

    def is_current(self) -> bool:
        """Tell whether the schema is up to date."""
        with self.reading() as connection:
            return is_current(connection)

    def migrate(self) -> list[str]:
        """Bring the schema up to date; return the names of the migrations that were applied."""
        with self.reading() as connection:
            return migrate(connection)

    def close(self) -> None:
        """Close the idle connections."""
        self.engine.dispose()

    def _require_alive(self, connection: DBAPIConnection, entry: ConnectionPoolEntry, _: PoolProxiedConnection) -> None:
        """Have the pool open another connection where this one broke while it was idle.

        The end of a connection, and a server's last words, wait to be read, which is seen without asking. Of a server that went
        away without a word nothing is seen: a connection that was idle for longer than a moment is asked.
        """
        idle_since = entry.info.get(_IDLE_SINCE)
        if idle_since is None:  # it was opened just now
            return
        try:
            if time.monotonic() - idle_since > UNASKED_SECONDS or _has_something_to_read(connection):
                self.engine.dialect.do_ping(connection)
        except psycopg.Error as error:
            raise sqlalchemy.exc.InvalidatePoolError from error  # then no idle one is taken again

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlalchemy.exc.DBAPIError, psycopg.Error) as error:
            if interrupt := interrupt_behind(error):  # else a step would be tried again, and the interrupt be lost
                raise interrupt from None
            cause = error.orig if isinstance(error, sqlalchemy.exc.DBAPIError) else error
            raise self._translate(cause) from error
        except sqlalchemy.exc.TimeoutError as error:
            raise LedgerUnreachable(f"all connections to {self.description} are in use") from error

    def _translate(self, error: BaseException | None) -> LedgerError:
        """Return our error for what the driver or the server reported, by SQLSTATE; never with the password."""
        diagnosis = error.diag if isinstance(error, psycopg.Error) else None
        said = (diagnosis and diagnosis.message_primary) or first_line(error).removeprefix("connection failed: ")
        if self.url.password:
            said = said.replace(str(self.url.password), "***")
        code = (error.sqlstate if isinstance(error, psycopg.Error) else None) or ""
        if not code and isinstance(error, psycopg.OperationalError):
            for words, meaning, hint in _UNREACHABLE:
                if words in str(error) and "FATAL:" not in str(error):
                    return LedgerUnreachable(f"{self.description} cannot be used: {meaning}", hint=hint)
            code = next((code for words, code in _REFUSALS if f"FATAL:  {words}" in str(error)), "08")
        hint = _HINTS.get(code) or _HINTS.get(code[:2], "")
        if code == "23514" and diagnosis and diagnosis.table_name == "caf_files":
            return IllegalMove(f"the database refuses the state: {said}", hint="do the steps before it first")
        if hint:
            return LedgerError(f"{self.description}: {said}", hint=hint)
        if code.startswith(_TRANSIENT):
            return LedgerUnreachable(
                f"{self.description} cannot be used: {said}",
                hint="check that it runs and can be reached from here",
            )
        return LedgerError(f"{self.description} refused a statement: {said}")


_IDLE_SINCE: Final = "idle since"


def _note_time(_: object, entry: ConnectionPoolEntry) -> None:
    entry.info[_IDLE_SINCE] = time.monotonic()


def _has_something_to_read(connection: DBAPIConnection) -> bool:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


class LedgerPart:
    """The methods of the ledger on one topic: `Ledger` inherits all parts. Each method is one transaction."""

    _database: Database

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
    found = connection.execute(text(f"SELECT source_id FROM sources WHERE name = :name {lock}"), {"name": source})
    source_id = found.scalar_one_or_none()
    if source_id is None:
        raise NotLocated(f"the ledger has no source '{source}'", hint="take an inventory of it first")
    return int(source_id)


def open_database(settings: Settings, waits: Waits | None = None) -> Database:
    """Return the database of the settings, migrated: `database_url`, or the embedded server under `home`.

    `waits` says it while the database does not answer, and while it is migrated.

    Raises:
        LedgerUnreachable, LedgerError: it cannot be used; the message says where it is, without the password.
    """
    waits = waits or Waits()
    with contextlib.ExitStack() as opened:
        with waits.waiting(
            describe_database(settings), ends_by="its answer ends it, or the time limit of a connection", grace=UNANSWERED_SECONDS
        ):
            database = Database(_url(settings))
            opened.callback(database.close)
            current = database.is_current()
        if not current:
            with waits.waiting(
                f"{database.description}, whose tables are brought up to this version",
                ends_by="it takes longer the more objects are archived; where it is stopped, nothing is changed",
                grace=UNANSWERED_SECONDS,
            ):
                database.migrate()
        opened.pop_all()
    return database


def _url(settings: Settings) -> URL:
    if settings.database_url is not None and settings.database_url.get_secret_value():
        return parse_url(settings.database_url.get_secret_value())
    return embedded_url(settings)


def embedded_url(settings: Settings) -> URL:
    """Return the address of the embedded server under `home`, started where it does not run."""
    server = embedded_server(settings.home / "postgres")
    return URL.create("postgresql+psycopg", username=SUPERUSER, database=SUPERUSER, query={"host": str(server.socket_folder)})


def parse_url(text: str) -> URL:
    """Read `postgresql://…` as an address for psycopg 3, whatever driver it names."""
    try:
        url = make_url(text)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        # What the parser says may quote the password.
        raise LedgerError(
            "CAF_DATABASE_URL is not an address of the form postgresql://user:password@host:port/database",
            hint="percent-encode '@', '/', ':' and '%' in the password",
        ) from None
    return url.set(drivername="postgresql+psycopg")


def driver_connection(connection: Connection) -> psycopg.Connection[Any]:
    """Return psycopg's connection, in the same transaction, for COPY and server-side cursors."""
    raw = connection.connection.driver_connection
    assert isinstance(raw, psycopg.Connection)
    return raw


def describe_database(settings: Settings) -> str:
    """Return where the database of the settings is, without user and password."""
    url = settings.database_url.get_secret_value() if settings.database_url else ""
    return _describe(parse_url(url)) if url else f"the embedded database in {settings.home / 'postgres'}"


def _describe(url: URL) -> str:
    host = url.host or url.query.get("host") or "the local socket"
    where = host if isinstance(host, str) else ",".join(host)
    port = f":{url.port}" if url.port else ""
    return f"the database '{url.database or ''}' at {where}{port}"
