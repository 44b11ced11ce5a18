"""Connections to the ledger's Postgres, and the one place that translates its errors.

A transaction-pooling pgbouncer may be in between: nothing uses session locks or settings, and only
`read_connections` prepares statements, without one. Source: "Error Codes" in the PostgreSQL 18
manual; pgbouncer's feature table.
"""

import contextlib
import re
import shlex
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
from caf_pipeline.ledger.sql_files import is_current, make_tables
from caf_pipeline.setting_values import ENCODE_IN_URL, is_database_url
from caf_pipeline.settings import Settings
from caf_pipeline.waits import UNANSWERED_SECONDS, Waits

CONNECT_SECONDS: Final = 10

_CONNECT: Final[dict[str, Any]] = {
    "connect_timeout": CONNECT_SECONDS,
    "application_name": "caf-pipeline",
    # Notices a server that vanished within a lease's time, not after the kernel's two hours.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,  # milliseconds
}

_ALWAYS: Final = {"client_encoding": "utf8"}
"""Overrides PGCLIENTENCODING and the address: text is loaded in binary form."""

_HINTS: Final = {
    "28": "check the user and the password in CAF_DATABASE_URL, and the server's pg_hba.conf",
    "3D": "create the database, or correct its name in CAF_DATABASE_URL",
    "closed": "open it by ALTER DATABASE … ALLOW_CONNECTIONS true, or name another database in "
    "CAF_DATABASE_URL",
    "42501": "grant the user of CAF_DATABASE_URL a role of sql/roles.sql; the user that creates "
    "the tables needs CREATE on the schema",
    "25006": "CAF_DATABASE_URL must name the primary server, not a standby",
    "53100": "make room on the database's disk",
}
"""The key "closed" is a case of 55000, which has other meanings, too."""

_TRANSIENT: Final = ("08", "25P03", "40", "53", "55", "57", "58")
"""Classes of SQLSTATEs that a retry may solve.

Connection, idle transaction, rollback (deadlock), resources, object in use (lock timeout), operator
intervention, system error.
"""

# For a refused connection libpq has no SQLSTATE, only text. A server in another language gets no
# hint. These are patterns.
_REFUSALS: Final = (
    ("password authentication failed", "28"),
    ("no password supplied", "28"),
    ("no pg_hba.conf entry", "28"),
    ("role ", "28"),
    (r'database ".*" is not currently accepting connections', "closed"),
    ("database ", "3D"),
)

_UNREACHABLE: Final = (
    *(
        (words, "its host name does not resolve", "check the host name in CAF_DATABASE_URL")
        for words in ("resolve host", "translate host name")
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
    *(
        (words, "no route to it", "check the host in CAF_DATABASE_URL, and the network")
        for words in ("No route to host", "Network is unreachable")
    ),
    *(
        (
            words,
            "it does not answer in time",
            "check host and port in CAF_DATABASE_URL, and firewalls on the way",
        )
        for words in ("timeout expired", "timed out")
    ),
    *(
        (
            words,
            "another program than Postgres listens there",
            "check host and port in CAF_DATABASE_URL",
        )
        for words in ("invalid response to SSL", "expected authentication request")
    ),
    (
        "server does not support SSL",
        "it does not support TLS",
        "remove sslmode from CAF_DATABASE_URL, or set the server up for TLS",
    ),
    (
        "certificate verify failed",
        "its certificate is not trusted",
        "name a trusted root certificate as sslrootcert in CAF_DATABASE_URL",
    ),
    (
        "does not match host name",
        "its certificate is for another host",
        "use the certificate's host name in CAF_DATABASE_URL",
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
"""Words of libpq, their meaning ("": libpq's text), and a hint."""


class Database:
    """Connects to one database. Safe in threads.

    `name` may be "". `description` has neither user nor password.
    """

    def __init__(self, url: str, server: EmbeddedServer | None = None) -> None:
        """Does not connect. `connect` restarts a dead embedded `server`."""
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
        """In autocommit mode, without prepared statements."""
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
        if is_current(connection, hint=self._new_ledger()):
            return
        with waits.waiting(
            f"{self.description} while its tables are created",
            ends_by="it takes a moment; if you stop it, nothing is changed",
            grace=UNANSWERED_SECONDS,
        ):
            make_tables(connection, hint=self._new_ledger())

    def _new_ledger(self) -> str:
        if self._server is not None:
            home = shlex.quote(str(self._server.folder.parent))
            return f"make a new ledger: mv {home} {home}.old"
        return "make a new ledger: createdb NAME, and write that name into CAF_DATABASE_URL"

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise self.translate(error) from error

    def translate(self, error: psycopg.Error) -> BaseException:
        """Return our error, without the password.

        If an interrupt ended the statement, return it: the step must not be retried.
        """
        interrupt = interrupt_behind(error)
        if interrupt is not None:
            return interrupt
        translated = self._as_ledger_error(error)
        if self._server is not None and "CAF_DATABASE_URL" in translated.hint:
            translated.hint = f"see {self._server.log}"
        return translated

    def _as_ledger_error(self, error: psycopg.Error) -> LedgerError:
        diagnosis = error.diag
        text = diagnosis.message_primary or first_line(error).removeprefix("connection failed: ")
        if self._password:
            text = text.replace(str(self._password), "***")
        code = error.sqlstate or ""
        if not code and isinstance(error, psycopg.OperationalError):
            for words, meaning, hint in _UNREACHABLE:
                if words in str(error) and "FATAL:" not in str(error):
                    return LedgerUnreachable(
                        f"{self.description} cannot be used: {meaning or text}", hint=hint
                    )
            code = next(
                (code for words, code in _REFUSALS if re.search(f"FATAL:  {words}", str(error))),
                "08",
            )
        hint = _HINTS.get(code) or _HINTS.get(code[:2], "")
        if code == "23514" and diagnosis.table_name in ("caf_files", "chunk_copies"):
            return IllegalMove(
                f"the database refuses the state: {text}", hint="run the earlier steps first"
            )
        if hint:
            return LedgerError(f"{self.description}: {text}", hint=hint)
        if code.startswith(_TRANSIENT):
            return LedgerUnreachable(
                f"{self.description} cannot be used: {text}",
                hint="check that it runs and can be reached from here",
            )
        return LedgerError(f"{self.description} refused a statement: {text}")


def has_own_server(settings: Settings) -> bool:
    """Return whether the settings name a server."""
    return bool(settings.database_url and settings.database_url.get_secret_value())


def database_of(settings: Settings) -> Database:
    """Return the database of the settings, embedded if they name none."""
    if settings.database_url is not None and has_own_server(settings):
        return Database(parse_url(settings.database_url.get_secret_value()))
    return Database(embedded_url(settings), embedded_server(settings.home / "postgres"))


def embedded_url(settings: Settings) -> str:
    """Start the embedded server if needed; return its address."""
    server = embedded_server(settings.home / "postgres")
    # Names everything that libpq would take from the environment, as PGPORT.
    folder = quote(str(server.socket_folder), safe="")
    return f"postgresql://{SUPERUSER}@/{SUPERUSER}?host={folder}&port={PORT}"


def parse_url(text: str) -> str:
    """Return an address for libpq, whatever driver the text names.

    Source: "Connection URIs" in the PostgreSQL 18 manual.
    """
    url = re.sub(r"\Apostgres(ql)?(\+\w+)?://", "postgresql://", text)
    names = [name for name, _ in parse_qsl(url.partition("?")[2])]
    try:
        # If a parameter comes twice, libpq takes the last.
        if is_database_url(url) and len(names) == len(set(names)):
            conninfo_to_dict(url)
            return url
    except (psycopg.Error, ValueError):  # the message may quote the password
        pass
    raise LedgerError(
        "CAF_DATABASE_URL is not an address of the form "
        "postgresql://user:password@host:port/database",
        hint=f"{ENCODE_IN_URL}; libpq's own parameters may follow '?', each once",
    )


def waiting_for_database(
    settings: Settings, waits: Waits
) -> contextlib.AbstractContextManager[object]:
    """Show a wait while the database does not answer."""
    return waits.waiting(
        describe_database(settings),
        ends_by="its answer, or the timeout of a connection, ends the wait",
        grace=UNANSWERED_SECONDS,
    )


def describe_database(settings: Settings) -> str:
    """Return the database's place, without user and password."""
    url = settings.database_url.get_secret_value() if settings.database_url else ""
    return (
        _describe(conninfo_to_dict(parse_url(url)))
        if url
        else f"the embedded database in {settings.home / 'postgres'}"
    )


def _describe(address: Mapping[str, Any]) -> str:
    hosts = str(address.get("host") or "the local socket").split(",")
    ports = str(address.get("port") or "").split(",")
    if len(ports) == 1:  # libpq uses one port for all hosts
        ports *= len(hosts)
    places = (
        f"{host}:{port}" if port and not host.startswith("/") else host
        for host, port in zip(hosts, ports, strict=False)
    )
    return f"the database '{address.get('dbname', '')}' at {','.join(places)}"
