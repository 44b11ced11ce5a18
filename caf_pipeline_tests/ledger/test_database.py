"""Opening the database, and what its errors become."""

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
from caf_pipeline.ledger.database import KEPT_IDLE, Database, open_database, parse_url
from caf_pipeline.settings import Settings
from caf_pipeline_tests.support.postgres import database_at
from caf_pipeline_tests.system.test_unreachable import answer_once

PASSWORD = "s3cr3t-p4ss"


def settings(url):
    return Settings(database_url=SecretStr(url))


@pytest.mark.parametrize(
    "text", ["postgresql://u@h/d", "postgres://u@h/d", "postgresql+psycopg2://u@h/d", "postgresql+psycopg://u@h/d"]
)
def test_any_postgres_address_is_for_psycopg_3(text):
    assert parse_url(text) == "postgresql://u@h/d"


def test_a_configured_database_is_opened_with_its_tables(empty_database_url):
    database = open_database(settings(empty_database_url))
    with database.transaction() as connection:
        assert connection.execute("SELECT count(*) FROM sources").scalar_one() == 0
    database.close()


def test_a_transaction_that_fails_writes_nothing(database):
    def insert_and_fail():
        with database.transaction() as connection:
            connection.execute("INSERT INTO sources (name, archive_id, address) VALUES ('a', 'b', 'c')")
            raise ConnectionError("the cable")

    with pytest.raises(ConnectionError):
        insert_and_fail()
    with database.transaction() as connection:
        assert connection.execute("SELECT count(*) FROM sources").scalar_one() == 0


def test_an_interrupt_in_the_middle_of_a_statement_stays_one(database, caplog):
    def interrupted():
        with database.transaction() as connection:
            connection.pgconn.send_query(b"SELECT pg_sleep(0.1)")
            raise KeyboardInterrupt  # the roll-back then fails: a command is in progress

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not caplog.records
    with database.transaction() as connection:
        assert connection.execute("SELECT 1").scalar_one() == 1


def test_no_statement_is_prepared(database):
    with database.transaction() as connection:
        for _ in range(20):
            connection.execute("SELECT 1")
        assert connection.execute("SELECT count(*) FROM pg_prepared_statements").scalar_one() == 0


def answers(database):
    """Whether the database answers in a transaction, and a question."""
    with database.transaction() as connection:
        in_transaction = connection.execute("SELECT 1").scalar_one()
    return (in_transaction, asked(database)) == (1, 1)


def asked(database):
    with database.reading() as connection:
        return connection.execute("SELECT 1").fetchone()[0]


def end_connections(database, admin_url):
    """End the server's side of all connections to the database, as its restart does; return when they are gone."""
    of_database = "FROM pg_stat_activity WHERE datname = %s"
    with psycopg.connect(admin_url, autocommit=True) as admin:
        admin.execute(f"SELECT pg_terminate_backend(pid) {of_database}", [database.name])
        while admin.execute(f"SELECT count(*) {of_database}", [database.name]).fetchone() != (0,):
            pass


@pytest.mark.parametrize("again", [answers, asked])
def test_a_connection_that_broke_while_idle_is_replaced_unseen(database, postgres_url, again):
    assert answers(database)
    end_connections(database, postgres_url)
    assert again(database)


def test_connections_that_all_broke_while_idle_are_replaced_unseen(database, postgres_url):
    with database.reading(), database.reading(), database.reading():
        pass
    end_connections(database, postgres_url)
    with database.reading() as one, database.reading() as other:
        assert one.execute("SELECT 1").fetchone() == other.execute("SELECT 1").fetchone() == (1,)


def test_a_server_that_went_away_without_a_word_is_noticed_by_a_connection_that_was_idle_for_long(
    database, postgres_url, monkeypatch
):
    assert answers(database)
    end_connections(database, postgres_url)
    monkeypatch.setattr("caf_pipeline.ledger.database._has_something_to_read", lambda connection: False)
    monkeypatch.setattr("caf_pipeline.ledger.database.UNASKED_SECONDS", 0)
    assert asked(database) == 1


def test_what_is_left_open_on_a_connection_is_rolled_back(database):
    with database.reading() as connection:
        connection.execute("BEGIN; INSERT INTO sources (name, archive_id, address) VALUES ('a', 'b', 'c')")
    with database.reading() as again:
        assert again is connection
        assert again.execute("SELECT count(*) FROM sources").scalar_one() == 0


def test_no_more_connections_are_kept_than_a_step_uses(database):
    with contextlib.ExitStack() as stack:
        used = [stack.enter_context(database.reading()) for _ in range(KEPT_IDLE + 3)]
    assert sum(not connection.closed for connection in used) == KEPT_IDLE
    database.close()
    assert all(connection.closed for connection in used)


# --- errors ---

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
def test_what_the_server_says_becomes_an_error_of_the_tree(database, code, kind):
    with pytest.raises(LedgerError, match="the server's words") as raised, database.transaction() as connection:
        connection.execute(f"DO $$ BEGIN RAISE EXCEPTION 'the server''s words' USING ERRCODE = '{code}'; END $$")
    assert type(raised.value) is kind
    assert raised.value.permanent is (kind is LedgerError)
    assert isinstance(raised.value.__cause__, psycopg.Error)


def shown(error):
    """Everything of an error that may reach a log."""
    return "".join(traceback.format_exception(error)) + error.hint


@pytest.fixture
def password_url(postgres_url):
    """The address of a database by way of a user that has a password, over a server that asks for it."""
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
        open_database(settings(password_url.format("wrong-" + PASSWORD)))
    assert refused.value.permanent
    assert "CAF_DATABASE_URL" in refused.value.hint
    assert PASSWORD not in shown(refused.value)


def test_a_right_password_without_rights_is_told_what_to_grant(password_url):
    with pytest.raises(LedgerError, match="permission denied") as refused:
        open_database(settings(password_url.format(PASSWORD)))
    assert "grant" in refused.value.hint
    assert PASSWORD not in shown(refused.value)


def test_an_unknown_database_is_permanent_and_named(postgres_url):
    url = database_at(postgres_url, "nowhere")
    with pytest.raises(LedgerError, match="'nowhere'") as refused:
        open_database(settings(url))
    assert refused.value.permanent
    assert "create the database" in refused.value.hint


def test_a_database_that_takes_no_connections_is_not_said_to_be_missing(postgres_url, empty_database_url):
    name = conninfo_to_dict(empty_database_url)["dbname"]
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        try:
            with pytest.raises(LedgerError, match="is not currently accepting connections") as refused:
                open_database(settings(empty_database_url))
        finally:
            admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
    assert refused.value.permanent
    assert refused.value.hint.startswith("open it by ALTER DATABASE … ALLOW_CONNECTIONS true")


def test_a_server_that_is_away_is_transient_and_named():
    with pytest.raises(LedgerUnreachable, match=r"'d' at 127\.0\.0\.1:1 cannot") as away:
        open_database(settings(f"postgresql://u:{PASSWORD}@127.0.0.1:1/d"))
    assert PASSWORD not in shown(away.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://127.0.0.1:1/d", "connection refused"),
        ("postgresql://no-such-host.invalid/d", "its host name does not resolve"),
        ("postgresql:///d?host=/nowhere", "there is no socket of a server"),
    ],
)
def test_why_a_server_is_away_is_told_apart(url, words):
    with pytest.raises(LedgerUnreachable, match=words) as away:
        open_database(settings(url))
    assert "CAF_DATABASE_URL" in away.value.hint


@pytest.mark.parametrize(
    ("said", "words"), [(None, "it does not answer in time"), (b"SSH-2.0-x\r\n", "what listens there is not Postgres")]
)
def test_a_server_that_is_silent_and_one_of_something_else_are_told_apart(said, words):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"postgresql://127.0.0.1:{server.getsockname()[1]}/d?connect_timeout=2"
        answering = threading.Thread(target=answer_once, args=(server, said))
        if said:
            answering.start()
        with pytest.raises(LedgerUnreachable, match=words):
            open_database(settings(url))
        server.shutdown(socket.SHUT_RDWR)
        if said:
            answering.join()


@pytest.mark.parametrize(
    ("parameters", "words", "hint"),
    [
        ("sslmode=verify-full&sslrootcert={certificate}&host=db.example", "its certificate is of another host", "certificate"),
        ("sslmode=verify-full&sslrootcert=/nowhere.pem&host=localhost", '"/nowhere.pem" does not exist', "check sslrootcert"),
        ("sslmode=verify-full&sslrootcert={key}&host=localhost", "could not read root certificate file", "check sslrootcert"),
        ("sslmode=require&sslcert={certificate}&sslkey=/nowhere&host=localhost", 'private key file "/nowhere"', "sslkey"),
        ("sslmode=none-such&host=localhost", 'invalid sslmode value: "none-such"', "correct the parameters"),
    ],
)
def test_what_tls_wants_of_the_address_is_told_and_not_that_the_server_is_away(tls, certificate, parameters, words, hint):
    with socket.create_server(("127.0.0.1", 0)) as server:
        told = parameters.format(certificate=certificate, key=certificate.with_name("key.pem"))
        address = f"hostaddr=127.0.0.1&port={server.getsockname()[1]}&connect_timeout=30"
        threading.Thread(target=speak_tls_once, args=(server, tls), daemon=True).start()
        with pytest.raises(LedgerUnreachable, match=words) as refused:
            open_database(settings(f"postgresql:///d?{address}&{told}"))
        assert hint in refused.value.hint
        assert "CAF_DATABASE_URL" in refused.value.hint


def speak_tls_once(server: socket.socket, tls: ssl.SSLContext) -> None:
    """Speak with one client as far as a Postgres does by TLS."""
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
        open_database(settings(url))
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


def test_keys_are_themselves_whatever_encoding_the_address_asks_for(database):
    other = Database(f"{database.url}{'&' if '?' in database.url else '?'}client_encoding=latin1")
    with other.transaction() as connection:
        assert connection.execute("SELECT %(key)s", {"key": "日"}).scalar_one() == "日"
        assert connection.execute("SHOW client_encoding").scalar_one() == "UTF8"
    other.close()


def test_a_fork_uses_no_connection_of_its_parent(database):
    def server_process():
        with database.reading() as connection:
            return connection.execute("SELECT pg_backend_pid()").scalar_one()

    ours = server_process()
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(there, str(server_process()).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(there)
    with open(here) as said:
        assert int(said.read()) != ours
    assert server_process() == ours


def test_a_password_in_the_query_is_not_part_of_the_description():
    database = Database(parse_url(f"postgresql:///d?host=h1,h2&password={PASSWORD}"))
    assert database.description == "the database 'd' at h1,h2"


def test_the_number_of_connections_is_bounded(database, monkeypatch):
    monkeypatch.setattr("caf_pipeline.ledger.database.POOL_SECONDS", 0.1)
    with pytest.raises(LedgerUnreachable, match="in use"):
        exhaust(database, 30)


def test_a_transaction_that_stands_still_is_ended_and_its_locks_with_it(database, monkeypatch):
    monkeypatch.setattr("caf_pipeline.ledger.database._BEGIN", "BEGIN; SET LOCAL idle_in_transaction_session_timeout = 50")
    with pytest.raises(LedgerUnreachable):
        stand_still(database)


def stand_still(database):
    """Hold a lock until another has it."""
    with database.transaction() as connection, psycopg.connect(database.url) as other:
        connection.execute("LOCK TABLE leases")
        other.execute("LOCK TABLE leases")
        connection.execute("SELECT 1")


def exhaust(database, depth):
    with database.transaction():
        if depth:
            exhaust(database, depth - 1)


def test_the_environment_of_libpq_does_not_redirect_the_embedded_server(tmp_path, monkeypatch, postgres_url):
    monkeypatch.setitem(os.environ, "PGHOST", "nowhere.invalid")
    monkeypatch.setitem(os.environ, "PGDATABASE", "nowhere")
    monkeypatch.setitem(os.environ, "PGPORT", "1")
    database = Database(postgres_url)
    with database.transaction() as connection:
        assert connection.execute("SELECT current_database()").scalar_one() == "postgres"
    database.close()
