"""Connections to the database, and the translation of its errors."""

import contextlib
import os
import socket
import ssl
import threading
import traceback
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from pydantic import SecretStr

from caf_pipeline.errors import LedgerError, LedgerUnreachable
from caf_pipeline.ledger.database import Database, parse_url
from caf_pipeline.ledger.engine import MOST_CONNECTIONS, LedgerEngine, driver_connection
from caf_pipeline.ledger.lookup import ReadConnections
from caf_pipeline.settings import Settings
from caf_pipeline.wiring import open_ledger, open_lookup
from caf_pipeline_tests.support.postgres import database_at, end_connections

PASSWORD = "s3cr3t-p4ss"


def settings(url):
    return Settings(database_url=SecretStr(url))


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://u@h/d",
        "postgres://u@h/d",
        "postgresql+psycopg2://u@h/d",
        "postgresql+psycopg://u@h/d",
    ],
)
def test_any_postgres_address_is_for_psycopg_3(text):
    assert parse_url(text) == "postgresql://u@h/d"


@pytest.fixture
def engine(database):
    with contextlib.closing(LedgerEngine(database)) as engine:
        yield engine


@pytest.fixture
def connections(database):
    with contextlib.closing(ReadConnections(database)) as connections:
        yield connections


@pytest.fixture(params=["engine", "connections"])
def ask(request):
    """Return a statement's first value, through each of the two connection pools."""
    opened = request.getfixturevalue(request.param)

    def ask(statement):
        if isinstance(opened, LedgerEngine):
            with opened.begin() as connection:
                return connection.exec_driver_sql(statement).scalar_one()
        with opened.connection() as connection:
            return connection.execute(statement).fetchone()[0]

    return ask


def count_sources(engine):
    with engine.begin() as connection:
        return connection.exec_driver_sql("SELECT count(*) FROM sources").scalar_one()


@pytest.mark.parametrize("opened", [open_ledger, open_lookup])
def test_a_configured_database_is_opened_with_its_tables(empty_database_url, opened):
    opened(settings(empty_database_url)).close()
    engine = LedgerEngine(Database(empty_database_url))
    assert count_sources(engine) == 0
    engine.close()


def test_a_transaction_that_fails_writes_nothing(engine):
    def insert_and_fail():
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "INSERT INTO sources (name, archive_id, address) VALUES ('a', 'b', 'c')"
            )
            raise ConnectionError("the cable")

    with pytest.raises(ConnectionError):
        insert_and_fail()
    assert count_sources(engine) == 0


def test_an_interrupt_during_a_statement_is_not_translated(engine, caplog, capfd):
    def interrupted():
        with engine.begin() as connection:
            driver_connection(connection).pgconn.send_query(b"SELECT pg_sleep(0.1)")
            raise KeyboardInterrupt  # the roll-back then fails: a command is in progress

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not caplog.records
    assert capfd.readouterr().err == ""
    assert count_sources(engine) == 0


def test_an_interrupted_statement_ends_with_its_connection(engine, caplog, capfd):
    with engine._engine.connect() as connection:
        driver_connection(connection).pgconn.send_query(b"SELECT pg_sleep(0.1)")
    assert not caplog.records
    assert capfd.readouterr().err == ""
    assert count_sources(engine) == 0


def test_an_interrupt_of_a_lookup_is_not_translated(connections, ask):
    def interrupted():
        with connections.connection() as connection:
            connection.pgconn.send_query(b"SELECT pg_sleep(0.1)")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert ask("SELECT 1") == 1


def test_no_statement_of_a_transaction_is_prepared(engine):
    def ask(statement):
        with engine.begin() as connection:
            return connection.exec_driver_sql(statement).scalar()

    for _ in range(20):
        ask("SELECT 1")
    assert ask("SELECT count(*) FROM pg_prepared_statements") == 0


def test_a_broken_idle_connection_is_replaced(database, postgres_url, ask):
    assert ask("SELECT 1") == 1
    end_connections(database, postgres_url)
    assert ask("SELECT 1") == 1


def test_all_broken_idle_connections_are_replaced(database, postgres_url, connections):
    with connections.connection(), connections.connection(), connections.connection():
        pass
    end_connections(database, postgres_url)
    with connections.connection() as first, connections.connection() as second:
        assert first.execute("SELECT 1").fetchone() == second.execute("SELECT 1").fetchone() == (1,)


def test_a_long_idle_connection_is_tested(database, postgres_url, connections, monkeypatch):
    with connections.connection():
        pass
    end_connections(database, postgres_url)
    monkeypatch.setattr(
        "caf_pipeline.ledger.lookup._has_something_to_read", lambda connection: False
    )
    monkeypatch.setattr("caf_pipeline.ledger.lookup.UNTESTED_SECONDS", 0)
    with connections.connection() as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_no_more_connections_are_kept_than_a_reader_uses(connections):
    with contextlib.ExitStack() as stack:
        used = [stack.enter_context(connections.connection()) for _ in range(5)]
    assert sum(not connection.closed for connection in used) == 2
    connections.close()
    assert all(connection.closed for connection in used)


def test_a_closed_engine_leaves_no_connection(engine, database, postgres_url):
    with engine.begin(), engine.begin():
        pass
    engine.close()
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        while admin.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = %s", [database.name]
        ).fetchone() != (0,):
            pass


STATES = [
    ("08006", LedgerUnreachable),  # connection failure
    ("40P01", LedgerUnreachable),  # deadlock
    ("53300", LedgerUnreachable),  # too many connections
    ("55P03", LedgerUnreachable),  # lock timeout
    ("57P01", LedgerUnreachable),  # the server is shut down
    ("53100", LedgerError),  # disk full
    ("42501", LedgerError),  # no privilege
    ("25006", LedgerError),  # a standby
    ("22021", LedgerError),  # anything else
]


@pytest.mark.parametrize(("code", "kind"), STATES)
def test_server_errors_become_ledger_errors(ask, code, kind):
    with pytest.raises(LedgerError, match="the server's words") as raised:
        ask(f"DO $$ BEGIN RAISE EXCEPTION 'the server''s words' USING ERRCODE = '{code}'; END $$")
    assert type(raised.value) is kind
    assert raised.value.permanent is (kind is LedgerError)
    assert isinstance(raised.value.__cause__, psycopg.Error)


def shown(error):
    """Return all text of an error that may reach a log."""
    return "".join(traceback.format_exception(error)) + error.hint


@pytest.fixture
def password_url(postgres_url):
    """The address of a database with a user's password, on a server that requires it."""
    folder = conninfo_to_dict(postgres_url)["host"]
    hba = Path(folder) / "pg_hba.conf"
    before = hba.read_text()
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE guarded LOGIN PASSWORD '{PASSWORD}'")
        hba.write_text(f"local all guarded scram-sha-256\n{before}")
        admin.execute("SELECT pg_reload_conf()")
        yield f"postgresql://guarded:{{}}@/postgres?host={folder}"
        hba.write_text(before)
        admin.execute("SELECT pg_reload_conf()")
        admin.execute("DROP ROLE guarded")


def test_a_wrong_password_is_permanent_and_never_shown(password_url):
    with pytest.raises(LedgerError, match="password authentication failed") as refused:
        open_ledger(settings(password_url.format("wrong-" + PASSWORD)))
    assert refused.value.permanent
    assert "CAF_DATABASE_URL" in refused.value.hint
    assert PASSWORD not in shown(refused.value)


def test_missing_rights_have_a_hint_to_grant_them(password_url):
    with pytest.raises(LedgerError, match="permission denied") as refused:
        open_ledger(settings(password_url.format(PASSWORD)))
    assert "grant" in refused.value.hint
    assert PASSWORD not in shown(refused.value)


def test_an_unknown_database_is_permanent_and_named(postgres_url):
    url = database_at(postgres_url, "nowhere")
    with pytest.raises(LedgerError, match="'nowhere'") as refused:
        open_ledger(settings(url))
    assert refused.value.permanent
    assert "create the database" in refused.value.hint


def test_a_database_without_connections_is_not_called_missing(postgres_url, empty_database_url):
    name = conninfo_to_dict(empty_database_url)["dbname"]
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        try:
            with pytest.raises(LedgerError) as refused:
                open_ledger(settings(empty_database_url))
        finally:
            admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
    assert refused.value.permanent
    assert "ALLOW_CONNECTIONS" in refused.value.hint


def test_a_server_that_is_away_is_transient_and_named():
    with pytest.raises(LedgerUnreachable, match=r"'d' at 127\.0\.0\.1:1 cannot") as away:
        open_ledger(settings(f"postgresql://u:{PASSWORD}@127.0.0.1:1/d"))
    assert PASSWORD not in shown(away.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://127.0.0.1:1/d", "connection refused"),
        ("postgresql://no-such-host.invalid/d", "not resolve"),
        ("postgresql:///d?host=/nowhere", "no socket"),
    ],
)
def test_reasons_for_an_unreachable_server_are_distinguished(url, words):
    with pytest.raises(LedgerUnreachable, match=words) as away:
        open_ledger(settings(url))
    assert "CAF_DATABASE_URL" in away.value.hint


def answer(server: socket.socket, greeting: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(greeting)


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (None, "in time"),
        (b"SSH-2.0-x\r\n", "than Postgres"),
    ],
)
def test_a_silent_server_differs_from_a_foreign_server(greeting, words):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"postgresql://127.0.0.1:{server.getsockname()[1]}/d?connect_timeout=2"
        answering = threading.Thread(target=answer, args=(server, greeting))
        if greeting:
            answering.start()
        with pytest.raises(LedgerUnreachable, match=words):
            open_ledger(settings(url))
        server.shutdown(socket.SHUT_RDWR)
        if greeting:
            answering.join()


@pytest.mark.parametrize(
    ("parameters", "words", "hint"),
    [
        (
            "sslmode=verify-full&sslrootcert={certificate}&host=db.example",
            "another host",
            "certificate",
        ),
        (
            "sslmode=verify-full&sslrootcert=/nowhere.pem&host=localhost",
            '"/nowhere.pem" does not exist',
            "check sslrootcert",
        ),
        (
            "sslmode=verify-full&sslrootcert={key}&host=localhost",
            "root certificate file",
            "check sslrootcert",
        ),
        (
            "sslmode=require&sslcert={certificate}&sslkey=/nowhere&host=localhost",
            'private key file "/nowhere"',
            "sslkey",
        ),
        (
            "sslmode=none-such&host=localhost",
            'invalid sslmode value: "none-such"',
            "correct the parameters",
        ),
    ],
)
def test_tls_errors_name_the_parameter_to_correct(tls, certificate, parameters, words, hint):
    with socket.create_server(("127.0.0.1", 0)) as server:
        query = parameters.format(certificate=certificate, key=certificate.with_name("key.pem"))
        address = f"hostaddr=127.0.0.1&port={server.getsockname()[1]}&connect_timeout=30"
        threading.Thread(target=speak_tls_once, args=(server, tls), daemon=True).start()
        with pytest.raises(LedgerUnreachable, match=words) as refused:
            open_ledger(settings(f"postgresql:///d?{address}&{query}"))
        assert hint in refused.value.hint
        assert "CAF_DATABASE_URL" in refused.value.hint


def speak_tls_once(server: socket.socket, tls: ssl.SSLContext) -> None:
    """Answer one client up to the TLS handshake, as Postgres does."""
    with contextlib.suppress(OSError), server.accept()[0] as client:
        client.recv(8)
        client.sendall(b"S")
        tls.wrap_socket(client, server_side=True).close()


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://u:{PASSWORD}@127.0.0.1:1/d?nonsense=1",
        f"postgresql://u:{PASSWORD}@127.0.0.1:1/d?connect_timeout=soon",
        f"postgresql://127.0.0.1:1/d?password={PASSWORD}&nonsense=1",
        f"postgresql://u:{PASSWORD}@/d?host=h1&host=h2",
    ],
)
def test_a_bad_address_is_refused_without_its_password(url):
    with pytest.raises(LedgerError) as refused:
        open_ledger(settings(url))
    assert PASSWORD not in shown(refused.value)


@pytest.mark.parametrize(
    ("hosts", "at"),
    [
        ("h", "h"),
        ("h:5433", "h:5433"),
        ("h1:1,h2:2", "h1:1,h2:2"),
        ("h1,h2:5433", "h1,h2:5433"),
        ("/d?host=h1,h2&port=7", "h1:7,h2:7"),
        ("/d?host=/run/postgres&port=7", "/run/postgres"),
        ("", "the local socket"),
    ],
)
def test_a_database_is_shown_with_its_hosts_and_ports(hosts, at):
    url = f"postgresql://{hosts}" if "?" in hosts else f"postgresql://{hosts}/d"
    assert Database(parse_url(url)).description == f"the database 'd' at {at}"


def test_keys_survive_any_client_encoding(database):
    other = Database(f"{database.url}{'&' if '?' in database.url else '?'}client_encoding=latin1")
    with other.connect() as connection:
        assert connection.execute("SELECT %(key)s", {"key": "日"}).fetchone() == ("日",)
        assert connection.execute("SHOW client_encoding").fetchone() == ("UTF8",)


def test_a_fork_opens_its_own_connections(ask):
    pid = ask("SELECT pg_backend_pid()")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(ask("SELECT pg_backend_pid()")).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader) as output:
        assert int(output.read()) != pid
    assert ask("SELECT pg_backend_pid()") == pid


def test_a_failed_copy_is_a_ledger_error(engine):
    def copy():
        with (
            engine.begin() as connection,
            driver_connection(connection).cursor().copy("COPY sources FROM STDIN") as rows,
        ):
            rows.write(b"no row\n")

    with pytest.raises(LedgerError, match="invalid input"):
        copy()
    assert count_sources(engine) == 0


def test_a_server_that_goes_away_during_a_copy_is_transient(
    engine, database, postgres_url, caplog, capfd
):
    def copy():
        with (
            engine.begin() as connection,
            driver_connection(connection).cursor().copy("COPY sources FROM STDIN") as rows,
        ):
            end_connections(database, postgres_url)
            rows.write(b"no row\n")

    with pytest.raises(LedgerUnreachable):
        copy()
    assert count_sources(engine) == 0
    assert not caplog.records
    assert capfd.readouterr().err == ""


def test_description_omits_a_password_in_the_query():
    database = Database(parse_url(f"postgresql:///d?host=h1,h2&password={PASSWORD}"))
    assert database.description == "the database 'd' at h1,h2"


def test_the_number_of_connections_is_bounded(database, monkeypatch):
    monkeypatch.setattr("caf_pipeline.ledger.engine.POOL_SECONDS", 0.1)
    with contextlib.closing(LedgerEngine(database)) as engine, contextlib.ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            stack.enter_context(engine.begin())
        with pytest.raises(LedgerUnreachable, match="in use"):
            stack.enter_context(engine.begin())


def test_an_idle_transaction_is_ended_with_its_locks(engine, database, monkeypatch):
    monkeypatch.setattr(
        "caf_pipeline.ledger.engine.BEGIN",
        "BEGIN; SET LOCAL idle_in_transaction_session_timeout = 50",
    )
    with pytest.raises(LedgerUnreachable):
        stand_still(engine, database)


def stand_still(engine, database):
    """Hold a lock until another session has it."""
    with engine.begin() as connection, psycopg.connect(database.url) as other:
        connection.exec_driver_sql("LOCK TABLE leases")
        other.execute("LOCK TABLE leases")
        connection.exec_driver_sql("SELECT 1")


def test_the_environment_of_libpq_does_not_redirect_the_embedded_server(
    tmp_path, monkeypatch, postgres_url
):
    monkeypatch.setitem(os.environ, "PGHOST", "nowhere.invalid")
    monkeypatch.setitem(os.environ, "PGDATABASE", "nowhere")
    monkeypatch.setitem(os.environ, "PGPORT", "1")
    database = Database(postgres_url)
    with database.connect() as connection:
        assert connection.execute("SELECT current_database()").fetchone() == ("postgres",)
