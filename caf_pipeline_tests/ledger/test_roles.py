"""The roles of sql/roles.sql: which may read, work, and record a full read of a chunk."""

import contextlib

import pytest
from psycopg.errors import InsufficientPrivilege

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import LedgerError
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.waits import Waits
from caf_pipeline_tests.support.ledger_rows import SOURCE, chunk_in, held
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.roles import granted_roles


@pytest.fixture
def ledger_as(database_url):
    """Open the ledger with the rights of a role."""
    with granted_roles(database_url) as url_as, contextlib.ExitStack() as opened:

        def open_as(role):
            return opened.enter_context(contextlib.closing(Ledger(Database(url_as(role)))))

        yield open_as


@pytest.fixture
def located(ledger_as):
    """A located chunk that a worker archived."""
    worker = ledger_as("caf_worker")
    chunk = chunk_in(worker, ChunkState.LOCATED)
    return chunk


def read_back(ledger, chunk):
    with held(ledger, chunk) as lease:
        ledger.replicas.record_full_read(lease, chunk, "provider")


def test_a_reader_finds_what_a_worker_archived(ledger_as, located):
    reader = ledger_as("caf_reader")
    reader.bring_up(Waits())
    assert reader.lookup.locate(SOURCE, "a").chunk == located
    assert reader.chunks.get(located).state is ChunkState.LOCATED


def test_a_reader_reads_no_secret_of_a_packing(ledger_as):
    database = ledger_as("caf_reader").database
    with pytest.raises(InsufficientPrivilege), connected(database) as connection:
        connection.execute("SELECT secret FROM packing_secrets")


@pytest.mark.parametrize(
    "table", ["sources", "leases", "file_locations", "full_reads", "schema_files"]
)
def test_a_reader_writes_nothing(ledger_as, located, table):
    database = ledger_as("caf_reader").database
    for statement in (f"DELETE FROM {table}", f"TRUNCATE {table}"):
        with pytest.raises(InsufficientPrivilege), connected(database) as connection:
            connection.execute(statement)


def test_a_reader_cannot_read_the_keys_of_posts(ledger_as, located):
    assert len(ledger_as("caf_worker").sources.post_key(SOURCE)) == 32
    with pytest.raises(LedgerError, match="permission denied"):
        ledger_as("caf_reader").sources.post_key(SOURCE)


def test_only_a_verifier_records_a_full_read(ledger_as, located):
    worker, verifier = ledger_as("caf_worker"), ledger_as("caf_verifier")
    with pytest.raises(LedgerError, match="permission denied"):
        read_back(worker, located)
    assert worker.chunks.get(located).read_back_at is None
    read_back(verifier, located)
    assert worker.chunks.get(located).read_back_at is not None


def test_a_worker_cannot_change_a_full_read_but_ends_it(ledger_as, located):
    worker = ledger_as("caf_worker")
    read_back(ledger_as("caf_verifier"), located)
    with pytest.raises(InsufficientPrivilege), connected(worker.database) as connection:
        connection.execute("UPDATE full_reads SET agreed_sha256 = NULL")
    with held(worker, located) as lease:
        worker.moves.move(lease, located, ChunkState.LOCATED, ChunkState.DAMAGED, reason="lost")
    assert worker.chunks.get(located).read_back_at is None


def test_a_worker_cannot_change_the_recorded_schema_files(ledger_as):
    with (
        pytest.raises(InsufficientPrivilege),
        connected(ledger_as("caf_worker").database) as connection,
    ):
        connection.execute("UPDATE schema_files SET sha256 = 'x'")
