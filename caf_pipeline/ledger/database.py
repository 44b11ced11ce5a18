"""The address of the ledger's Postgres, connections to it, and the one place where its errors
become ours.

Statements share nothing of a session: no prepared statements, no session locks, no session
settings. So a transaction-pooling pgbouncer may be between. Source: "Error Codes" in the PostgreSQL
18 manual for the SQLSTATEs; pgbouncer's feature table for what pooling forbids.
"""

import contextlib
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, quote

import psycopg
from psycopg.conninfo import conninfo_to_dict

from caf_pipeline.errors import (
    IllegalMove,
    LedgerError,
    LedgerUnreachable,
    first_line,
    interrupt_behind,
)
from caf_pipeline.ledger.embedded import PORT, SUPERUSER, EmbeddedServer, embedded_server
from caf_pipeline.ledger.schema_files import is_current, make_tables
from caf_pipeline.setting_values import ENCODE_IN_URL, is_database_url
from caf_pipeline.settings import Settings
from caf_pipeline.waits import UNANSWERED_SECONDS, Waits

CONNECT_SECONDS: Final = 10

_CONNECT: Final[dict[str, Any]] = {
    "connect_timeout": CONNECT_SECONDS,
    "application_name": "caf-pipeline",
    # A server that went away without a word is noticed within a lease's time, not after the
    # kernel's two hours.
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
    "closed": "open it by ALTER DATABASE … ALLOW_CONNECTIONS true, or name another one in "
    "CAF_DATABASE_URL",
    "42501": "grant the user of CAF_DATABASE_URL a role of sql/roles.sql; whoever makes the tables "
    "needs CREATE on the schema",
    "25006": "CAF_DATABASE_URL must name the primary server, not a standby",
    "53100": "make room on the database's disk",
}
"""What to do, by SQLSTATE or its class; "closed" has one (55000) that says other things, too."""

_TRANSIENT: Final = ("08", "25P03", "40", "53", "55", "57", "58")
"""Classes: connection, rollback (deadlock), resources, object in use (lock timeout), operator
intervention, system error. Of class 25 only the end of a transaction that stood still.
"""

# A connection that is refused has no SQLSTATE in libpq, only words; a server that speaks another
# language gets no hint. These are patterns.
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
    (
        "translate host name",
        "its host name does not resolve",
        "check the host name in CAF_DATABASE_URL",
    ),
    (
        "Connection refused",
        "connection refused",
        "check host and port in CAF_DATABASE_URL, and that the server runs",
    ),
    (
        "No such file or directory",
        "there is no socket of a server",
        "check the host in CAF_DATABASE_URL, and that the server runs",
    ),
    (
        "No route to host",
        "there is no route to it",
        "check the host in CAF_DATABASE_URL, and the network",
    ),
    (
        "Network is unreachable",
        "there is no route to it",
        "check the host in CAF_DATABASE_URL, and the network",
    ),
    (
        "timeout expired",
        "it does not answer in time",
        "check host and port in CAF_DATABASE_URL, and firewalls on the way",
    ),
    (
        "timed out",
        "it does not answer in time",
        "check host and port in CAF_DATABASE_URL, and firewalls on the way",
    ),
    (
        "invalid response to SSL",
        "what listens there is not Postgres",
        "check host and port in CAF_DATABASE_URL",
    ),
    (
        "expected authentication request",
        "what listens there is not Postgres",
        "check host and port in CAF_DATABASE_URL",
    ),
    (
        "server does not support SSL",
        "it does not speak TLS",
        "take sslmode out of CAF_DATABASE_URL, or set the server up for TLS",
    ),
    (
        "certificate verify failed",
        "its certificate is not valid here",
        "sslrootcert in CAF_DATABASE_URL names whom to trust",
    ),
    (
        "does not match host name",
        "its certificate is of another host",
        "name it in CAF_DATABASE_URL as the certificate does",
    ),
    ("certificate file", "", "check sslrootcert, sslcert and sslkey in CAF_DATABASE_URL"),
    ("private key file", "", "check sslcert and sslkey in CAF_DATABASE_URL"),
    (
        "closed the connection unexpectedly",
        "it closed the connection",
        "check that it runs, and is Postgres",
    ),
    ("connection is bad", "", "correct the parameters after '?' in CAF_DATABASE_URL"),
)
"""Of libpq's words for a connection that cannot be made: what they mean, "" where they say it best,
and what to do.
"""


class Database:
    """One database: it connects, and translates errors. Safe in threads.

    Attributes:
        url: its address, for libpq.
        name: the database's, "" where the address has none.
        description: where it is, without user and password.
    """

    def __init__(self, url: str, server: EmbeddedServer | None = None) -> None:
        """Connect to nothing yet.

        `server`: the embedded one, if it is that; a connection starts it again if it is dead.
        """
        self.url = url
        self._server = server
        address = conninfo_to_dict(url)
        self.name = str(address.get("dbname", ""))
        self.description = _describe(address)
        self._password = address.get("password")
        self._options = {
            name: value for name, value in _CONNECT.items() if name not in address
        } | _ALWAYS

    def connect(self) -> psycopg.Connection:
        """Return a new connection in autocommit mode, which prepares no statement.

        A dead embedded server is started again.

        Raises:
            psycopg.OperationalError: the server refuses, or does not answer.
        """
        try:
            return self._connect()
        except psycopg.OperationalError:
            if self._server is None:
                raise
            self._server.revive()
            return self._connect()

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(self.url, **self._options, autocommit=True, prepare_threshold=None)

    def bring_up(self, connection: psycopg.Connection, waits: Waits) -> None:
        """Make the tables that the database lacks; `waits` says it.

        Raises:
            LedgerError: another version made the tables. Nothing was changed.
        """
        if is_current(connection, hint=self._new_ledger()):
            return
        with waits.waiting(
            f"{self.description}, whose tables are made",
            ends_by="it takes a moment; if you stop it, nothing is changed",
            grace=UNANSWERED_SECONDS,
        ):
            make_tables(connection, hint=self._new_ledger())

    def _new_ledger(self) -> str:
        """Return how to make a new ledger."""
        if self._server is not None:
            home = shlex.quote(str(self._server.folder.parent))
            return f"make a new ledger: mv {home} {home}.old"
        return "make a new ledger: createdb NAME, and write that name into CAF_DATABASE_URL"

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Raise psycopg's errors as ours."""
        try:
            yield
        except psycopg.Error as error:
            raise self.translate(error) from error

    def translate(self, error: psycopg.Error) -> BaseException:
        """Return our error for psycopg's, or the interrupt that broke a statement off: a step must
        not be tried again after that.

        The error never has the password.
        """
        return interrupt_behind(error) or self._translate(error)

    def _translate(self, error: psycopg.Error) -> LedgerError:
        translated = self._as_ours(error)
        if self._server is not None and "CAF_DATABASE_URL" in translated.hint:
            translated.hint = f"see {self._server.log}"
        return translated

    def _as_ours(self, error: psycopg.Error) -> LedgerError:
        """Return our error for what the driver or the server reported, by SQLSTATE; never with the
        password.
        """
        diagnosis = error.diag
        said = diagnosis.message_primary or first_line(error).removeprefix("connection failed: ")
        if self._password:
            said = said.replace(str(self._password), "***")
        code = error.sqlstate or ""
        if not code and isinstance(error, psycopg.OperationalError):
            for words, meaning, hint in _UNREACHABLE:
                if words in str(error) and "FATAL:" not in str(error):
                    return LedgerUnreachable(
                        f"{self.description} cannot be used: {meaning or said}", hint=hint
                    )
            code = next(
                (code for words, code in _REFUSALS if re.search(f"FATAL:  {words}", str(error))),
                "08",
            )
        hint = _HINTS.get(code) or _HINTS.get(code[:2], "")
        if code == "23514" and diagnosis.table_name in ("caf_files", "chunk_copies"):
            return IllegalMove(
                f"the database refuses the state: {said}", hint="do the steps before it first"
            )
        if hint:
            return LedgerError(f"{self.description}: {said}", hint=hint)
        if code.startswith(_TRANSIENT):
            return LedgerUnreachable(
                f"{self.description} cannot be used: {said}",
                hint="check that it runs and can be reached from here",
            )
        return LedgerError(f"{self.description} refused a statement: {said}")


def has_own_server(settings: Settings) -> bool:
    """Return whether the settings name a server; else the embedded server is used."""
    return bool(settings.database_url and settings.database_url.get_secret_value())


def database_of(settings: Settings) -> Database:
    """Return the database of the settings: `database_url`, or the embedded server under `home`,
    which is started.

    Raises:
        LedgerError: `database_url` is no address, or the embedded server does not start.
    """
    if settings.database_url is not None and settings.database_url.get_secret_value():
        return Database(parse_url(settings.database_url.get_secret_value()))
    return Database(embedded_url(settings), embedded_server(settings.home / "postgres"))


def embedded_url(settings: Settings) -> str:
    """Return the address of the embedded server under `home`, started where it does not run."""
    server = embedded_server(settings.home / "postgres")
    # All is named that libpq would else take from the environment, as PGPORT.
    return f"postgresql://{SUPERUSER}@/{SUPERUSER}?host={quote(str(server.socket_folder), safe='')}&port={PORT}"  # noqa: E501


def parse_url(text: str) -> str:
    """Return `postgresql://…` as an address for libpq, whatever driver it names.

    Source: "Connection URIs" in the PostgreSQL 18 manual.
    """
    url = re.sub(r"\Apostgres(ql)?(\+\w+)?://", "postgresql://", text)
    try:
        named = Counter(
            name for name, _ in parse_qsl(url.partition("?")[2])
        )  # of two, libpq would take the last
        if is_database_url(url) and max(named.values(), default=1) == 1:
            conninfo_to_dict(url)
            return url
    except (psycopg.Error, ValueError):  # what they say may quote the password
        pass
    raise LedgerError(
        "CAF_DATABASE_URL is not an address of the form "
        "postgresql://user:password@host:port/database",
        hint=f"{ENCODE_IN_URL}; after '?' libpq's own parameters may follow, each once",
    )


def waiting_for_database(
    settings: Settings, waits: Waits
) -> contextlib.AbstractContextManager[object]:
    """Say while the database does not answer what is waited for."""
    return waits.waiting(
        describe_database(settings),
        ends_by="its answer ends it, or the time limit of a connection",
        grace=UNANSWERED_SECONDS,
    )


def describe_database(settings: Settings) -> str:
    """Return where the database of the settings is, without user and password."""
    url = settings.database_url.get_secret_value() if settings.database_url else ""
    return (
        _describe(conninfo_to_dict(parse_url(url)))
        if url
        else f"the embedded database in {settings.home / 'postgres'}"
    )


def _describe(address: Mapping[str, Any]) -> str:
    hosts, ports = (
        str(address.get("host") or "the local socket").split(","),
        str(address.get("port") or "").split(","),
    )
    if len(ports) == 1:  # libpq takes one for all
        ports *= len(hosts)
    at = (
        f"{host}:{port}" if port and not host.startswith("/") else host
        for host, port in zip(hosts, ports, strict=False)
    )
    return f"the database '{address.get('dbname', '')}' at {','.join(at)}"
