"""The ledger on Postgres: cases that need two connections or a broken one, or a pooler."""

import contextlib
import math
import os
import re
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import (
    ClaimConflict,
    HeldByOther,
    IllegalMove,
    LedgerError,
    LedgerUnreachable,
    StagingError,
)
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.objects import MAX_RETRY_AFTER, RETRY_AFTER, SkipReason
from caf_pipeline.ledger.database import Database, embedded_url
from caf_pipeline.ledger.embedded import embedded_server
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.lookup import PREPARED_FROM, Lookup, ReadConnections
from caf_pipeline.ledger.records import CopyCheck, plan_lease
from caf_pipeline.ledger.sources import OF_A_CHUNK, OF_AN_ADDRESS
from caf_pipeline.records import Copy
from caf_pipeline.settings import Settings
from caf_pipeline.wiring import open_ledger
from caf_pipeline_tests.contracts.transaction_log import ACCOUNT, ask, commit, settle, signed
from caf_pipeline_tests.support.chunk_rows import set_state
from caf_pipeline_tests.support.ledger_rows import (
    POSTING,
    SOURCE,
    VERSION,
    archive,
    batches,
    chunk_in,
    claimed,
    claims,
    end,
    held,
    holder,
    location,
    look,
    pending,
    plan_record,
    planned,
    register,
    remove,
    seal,
    seal_facts,
    settled,
    skip,
    standing,
)
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS, wait_for
from caf_pipeline_tests.support.pgbouncer import running_pooler
from caf_pipeline_tests.support.postgres import DEADLOCK, connected, end_connections

REPEATED = "INSERT INTO pending_locations SELECT * FROM pending_locations"
INSERTED = "INSERT INTO header_sets VALUES (%s, '', '', '', '', '', '', '{}')"
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND "
    "wait_event_type = 'Lock'"
)


def test_a_removal_knows_every_table_with_rows_of_a_source(database, ledger):
    statement = (
        "SELECT DISTINCT columns.table_name FROM information_schema.columns JOIN "
        "information_schema.tables"
        " USING (table_schema, table_name) WHERE table_schema = current_schema() AND table_type = "
        "'BASE TABLE'"
        " AND column_name IN ('source_id', 'caf_file_id', 'plan_id')"
    )
    with connected(database) as connection:
        tables = set(connection.execute(statement).scalars())
    forbidding = {"posts", "file_locations"}
    assert (
        tables
        == {*OF_A_CHUNK, *OF_AN_ADDRESS, "claims", "caf_files", "plans", "post_keys", "sources"}
        | forbidding
    )


def test_a_source_with_a_post_that_may_be_included_stays(ledger):
    chunk = chunk_in(ledger, ChunkState.POSTING)
    log = ledger.transactions(holder())
    ask(log, chunk)
    end(ledger, chunk, ChunkState.PARKED)
    with pytest.raises(IllegalMove, match=chunk):
        remove(ledger)
    end(ledger, chunk, ChunkState.POSTING)
    post = commit(log, signed(1), chunk)
    end(ledger, chunk, ChunkState.PARKED)
    with pytest.raises(IllegalMove, match=chunk):
        remove(ledger)
    settle(log, post, "expired")
    with pytest.raises(IllegalMove, match=chunk):
        remove(ledger)


def test_a_move_under_way_keeps_its_source(database, ledger):
    (chunk,) = register(ledger, ["a"])
    with connected(database) as connection:
        connection.execute("UPDATE caf_files SET epoch = 1 WHERE name = %(name)s", {"name": chunk})
        with pytest.raises(HeldByOther):
            remove(ledger)
    assert ledger.lookup.sources() == [SOURCE]


@pytest.mark.thorough
def test_one_of_two_concurrent_plans_of_an_object_wins(ledger):
    ledger.sources.register(SOURCE, "s3://src")
    gate = threading.Barrier(2)

    def plan(number):
        keys = [f"{number}-{i}" for i in range(2000)] + ["shared"]

        gate.wait(PATIENCE_SECONDS)
        try:
            ledger.plans.register(
                lease, plan_record(), [planned(1, keys)], claims(*((1, key) for key in keys))
            )
        except ClaimConflict:
            return "conflict"
        return "registered"

    with ledger.leases.hold(plan_lease(SOURCE), holder()) as lease, ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(plan, [1, 2])) == ["conflict", "registered"]
    assert len(ledger.chunks.list(SOURCE)) == 1
    assert ledger.chunks.account(SOURCE).claimed_objects == 2001


def test_concurrent_runs_cannot_both_take_the_last_room(ledger):
    names = register(ledger, *[[f"k{n}"] for n in range(4)])

    def reserve(name):
        with held(ledger, name, name) as lease:
            try:
                ledger.staging.reserve(lease, name, "/s", 60, 100)
            except StagingError:
                return 0
            return 60

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(reserve, names)) == 60


def test_an_object_located_twice_is_refused(ledger):
    kept = archive(ledger, ["a"])
    chunk = chunk_in(ledger, ChunkState.PACKING, ["b"])
    with held(ledger, chunk) as lease:
        seal(ledger, lease, chunk, rows=[location("a")])
        bring_on(ledger, lease, chunk)
        with pytest.raises(LedgerError, match="0 objects"):
            ledger.moves.load_locations(lease, chunk)
    assert (ledger.chunks.get(chunk).state, pending(ledger, chunk)) == (ChunkState.VERIFIED, 1)
    assert ledger.lookup.locate(SOURCE, "a").chunk == kept


def bring_on(ledger, lease, chunk):
    """Bring a sealed chunk to `verified`."""
    ledger.moves.move(lease, chunk, ChunkState.SEALED, ChunkState.POSTING)
    ledger.moves.record_posting(lease, chunk, POSTING)
    ledger.moves.move(lease, chunk, ChunkState.POSTED, ChunkState.UPLOADING)
    ledger.replicas.record_verified(lease, chunk, [Copy("provider", "proof")])


@pytest.mark.parametrize(
    "change",
    ["DELETE FROM pending_locations WHERE file_path = 'a'", REPEATED],
    ids=["too few", "too many"],
)
def test_locating_writes_exactly_the_members_or_nothing(ledger, database_url, change):
    chunk = chunk_in(ledger, ChunkState.VERIFIED, ["a", "b"])
    with psycopg.connect(database_url) as connection:
        connection.execute(change)
    with held(ledger, chunk) as lease, pytest.raises(LedgerError):
        ledger.moves.load_locations(lease, chunk)
    assert ledger.chunks.get(chunk).state is ChunkState.VERIFIED
    assert ledger.lookup.locate(SOURCE, "b") is None


def test_locations_are_one_insert(ledger, database_url):
    chunk_in(ledger, ChunkState.LOCATED, ["b", "a"])
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(
            "SELECT file_path, xmin FROM file_locations ORDER BY ctid"
        ).fetchall()
    assert [key for key, _ in rows] == ["a", "b"]
    assert len({transaction for _, transaction in rows}) == 1


def test_concurrent_seals_of_the_same_header_sets_succeed(ledger, database_url):
    """Both have three sets in opposite orders, and wait at the second.

    Inserted in that order, each would wait for the other.
    """
    sets = sorted(
        (ObjectHeaders(user_metadata={"mtime": str(number)}) for number in range(3)),
        key=lambda headers: headers.id,
    )
    names = register(ledger, ["a1", "a2", "a3"], ["b1", "b2", "b3"])
    orders = dict(zip(names, (sets, sets[::-1]), strict=True))

    def pack(name):
        rows_of_chunk = [
            batch
            for row, headers in zip(claimed(ledger, name), orders[name], strict=True)
            for batch in batches([row], headers)
        ]
        with held(ledger, name, name) as lease:
            ledger.moves.move(lease, name, ChunkState.PLANNED, ChunkState.PACKING)
            ledger.moves.seal(lease, name, seal_facts(3), [], [], rows=lambda: rows_of_chunk)

    with (
        psycopg.connect(database_url) as first,
        psycopg.connect(database_url, autocommit=True) as watch,
        ThreadPoolExecutor(2) as pool,
    ):
        first.execute(INSERTED, [sets[1].id])
        sealing = [pool.submit(pack, name) for name in names]
        wait_for(lambda: watch.execute(WAITING).fetchone() == (2,))
        first.rollback()
        for future in sealing:
            future.result(PATIENCE_SECONDS)
    assert ledger.chunks.account(SOURCE).chunks == {ChunkState.SEALED: 2}


def test_a_seal_can_be_repeated_after_a_deadlock(ledger, database_url):
    chunk = chunk_in(ledger, ChunkState.PACKING)
    with psycopg.connect(database_url) as connection:
        connection.execute(DEADLOCK)
    with held(ledger, chunk) as lease:
        with pytest.raises(LedgerUnreachable) as deadlock:
            seal(ledger, lease, chunk, headers=ObjectHeaders("text/plain"))
        assert not deadlock.value.permanent
        assert (ledger.chunks.get(chunk).state, pending(ledger, chunk)) == (ChunkState.PACKING, 0)
        seal(ledger, lease, chunk, headers=ObjectHeaders("text/plain"))
    assert pending(ledger, chunk) == 1


def test_stray_pending_rows_are_counted_and_dropped(ledger, database_url):
    chunk = chunk_in(ledger, ChunkState.SEALED)
    with psycopg.connect(database_url) as connection:
        set_state(connection, "packing")
        (caf_file_id,) = connection.execute("SELECT caf_file_id FROM caf_files").fetchone()
    assert pending(ledger, chunk) == 1
    assert ledger.stray_rows.drop(caf_file_id) == 1
    assert pending(ledger, chunk) == 0


def test_a_removed_source_leaves_no_pending_rows(ledger, database_url):
    chunk_in(ledger, ChunkState.SEALED)
    remove(ledger)
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM pending_locations").fetchone() == (0,)


@pytest.mark.parametrize("reason", list(SkipReason))
def test_the_wait_after_a_skip_doubles_up_to_the_cap(ledger, database_url, reason):
    ledger.sources.register(SOURCE, "s3://src")
    first = RETRY_AFTER[reason]
    for times in range(8):
        ledger.skips.record(SOURCE, [skip("a", reason)])
        with psycopg.connect(database_url) as connection:
            query = (
                "SELECT CASE WHEN isfinite(retry_at) THEN retry_at - last_at END, times FROM "
                "skipped_objects"
            )
            row = connection.execute(query).fetchone()
        expected = None if first is None else min(first * 2**times, MAX_RETRY_AFTER)
        assert row == (expected, times + 1)


def test_a_skip_becomes_due(ledger, database_url, tmp_path):
    ledger.sources.register(SOURCE, "s3://src")
    ledger.skips.record(SOURCE, [skip("a", SkipReason.CHANGED)])
    assert standing(ledger, tmp_path / "s") == {("a", "skipped", "changed", False)}
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE skipped_objects SET retry_at = now() - interval '1 second'")
    assert standing(ledger, tmp_path / "s") == {("a", "skipped", "changed", True)}
    assert settled(ledger, [("a", VERSION)]) == set()


key_text = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=200
)


@pytest.mark.thorough
@settings(max_examples=25)
@given(keys=st.lists(key_text, min_size=1, max_size=30, unique=True))
def test_any_keys_survive_claim_location_and_export(ledger, tmp_path, keys):
    source = os.urandom(4).hex()
    archive(ledger, keys, source=source)
    assert {key for key, *_ in standing(ledger, tmp_path / "s", source)} == set(keys)
    assert all(ledger.lookup.locate(source, key).row.key == key for key in keys)


def test_a_key_with_a_nul_writes_nothing(ledger):
    chunk = chunk_in(ledger, ChunkState.PACKING, ["a", "b"])
    with held(ledger, chunk) as lease, pytest.raises(LedgerError):
        seal(ledger, lease, chunk, rows=[location("a"), location("b\0")])
    assert (ledger.chunks.get(chunk).state, pending(ledger, chunk)) == (ChunkState.PACKING, 0)


def test_an_export_that_cannot_be_written_is_a_staging_error(ledger, tmp_path):
    register(ledger, ["a"])
    with pytest.raises(StagingError, match="nowhere"):
        ledger.exports.standing(SOURCE, tmp_path / "nowhere" / "s.parquet")


def test_a_lost_connection_is_transient_and_writes_nothing(ledger, postgres_url, database_url):
    chunk = chunk_in(ledger, ChunkState.PACKING, ["a", "b"])
    name = database_url.rpartition("/")[2].partition("?")[0]

    def rows():
        yield from batches([location("a")])
        with psycopg.connect(postgres_url, autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,)
            )
        yield from batches([location("b")])

    with held(ledger, chunk) as lease:
        with pytest.raises(LedgerUnreachable) as broken:
            ledger.moves.seal(lease, chunk, seal_facts(2), [], [], rows=rows)
        assert not broken.value.permanent
        assert pending(ledger, chunk) == 0
        seal(ledger, lease, chunk)
    assert pending(ledger, chunk) == 2


def test_a_lookup_after_a_lost_connection_gets_another(ledger, database, postgres_url, caplog):
    chunk = archive(ledger, ["a"])

    def lose_the_connection():
        with ledger.lookup._connections.connection() as connection:
            with psycopg.connect(postgres_url, autocommit=True) as admin:
                name = database.name
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                    (name,),
                )
            connection.execute("SELECT 1").fetchone()

    with pytest.raises(LedgerUnreachable):
        lose_the_connection()
    assert ledger.lookup.locate(SOURCE, "a").chunk == chunk
    assert caplog.records == []


@pytest.mark.thorough
def test_a_server_restart_between_lookups_is_invisible():
    home = Path(
        tempfile.mkdtemp(prefix="caf-pg-")
    )  # short: pytest's own folders would be too long for a socket
    try:
        ledger = open_ledger(Settings(home=home))
        chunk = archive(ledger, ["a"])
        assert ledger.lookup.locate(SOURCE, "a").chunk == chunk
        embedded_server(home / "postgres").close()
        embedded_url(Settings(home=home))
        assert ledger.lookup.locate(SOURCE, "a").chunk == chunk
        ledger.close()
    finally:
        embedded_server(home / "postgres").close()
        shutil.rmtree(home)


def test_a_look_up_is_one_round_trip(ledger, database_url, tmp_path, monkeypatch):
    archive(ledger, ["a", "b"])
    monkeypatch.setattr("caf_pipeline.ledger.lookup.UNTESTED_SECONDS", math.inf)
    lookup = Lookup(Database(database_url))
    for _ in range(2):  # the second query of a connection detects a pooler
        lookup.sources()
    sent = tmp_path / "sent"
    with sent.open("w") as file, lookup._connections.connection() as connection:
        connection.pgconn.trace(os.dup(file.fileno()))
    assert lookup.locate(SOURCE, "a")
    assert len(lookup.locate_many(SOURCE, ["a", "b"])) == 2
    lookup.close()
    assert [
        kind
        for kind in re.findall(r"\tF\t\d+\t(\w+)", sent.read_text())
        if kind in {"Sync", "Query"}
    ] == ["Sync"] * 2


def test_a_full_database_disk_is_a_permanent_error(ledger, database):
    with (
        pytest.raises(LedgerError, match="could not extend") as full,
        ledger._engine.begin() as connection,
    ):
        connection.exec_driver_sql(
            "DO $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END "
            "$$"
        )
    assert full.value.permanent
    assert "disk" in full.value.hint


# --- behind a transaction-pooling pgbouncer ---


@pytest.mark.thorough
def test_a_lookup_planned_on_empty_tables_uses_indexes(ledger, database):
    """A connection as old as the ledger must still answer quickly when many objects were added."""

    def read_from_the_beginning():
        with connected(database) as connection:
            connection.execute("SELECT pg_stat_force_next_flush()")
        with connected(database) as connection:
            rows = connection.execute(
                "SELECT relname, seq_scan FROM pg_stat_user_tables WHERE relname <> 'sources'"
            )
            return {name: count for name, count in rows}

    ledger.sources.register(SOURCE, "s3://src")
    assert ledger.lookup.locate_many(SOURCE, ["k00001"]) == {}
    keys = [f"k{number:05}" for number in range(5000)]
    archive(ledger, keys)
    before = read_from_the_beginning()
    assert set(ledger.lookup.locate_many(SOURCE, keys[:2000])) == set(keys[:2000])
    assert ledger.lookup.locate(SOURCE, keys[-1]).row.key == keys[-1]
    assert read_from_the_beginning() == before


def prepared_statements(database):
    """Repeat a query; return how many statements the server has prepared."""
    connections = ReadConnections(database)
    for _ in range(2 * PREPARED_FROM):
        with connections.connection() as connection:
            connection.execute("SELECT 1")
    with connections.connection() as connection:
        (count,) = connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone()
    connections.close()
    return count


def test_repeated_queries_of_readers_are_prepared(database):
    assert prepared_statements(database) >= 1


@pytest.fixture
def pooler(database_url):
    """A pooler with two connections to the server."""
    with running_pooler(database_url) as pooler:
        yield pooler


@pytest.fixture
def pooled_ledger(pooler):
    """A ledger whose statements share the pooler's connections with other clients."""
    with contextlib.closing(Ledger(Database(pooler.url), lease_seconds=1.0)) as ledger:
        yield ledger


def test_restarts_behind_a_pooler_are_invisible(pooled_ledger, pooler, postgres_url, database):
    chunk = archive(pooled_ledger, ["a"])
    pooler.kill()
    pooler.start()
    assert pooled_ledger.lookup.locate(SOURCE, "a").chunk == chunk
    end_connections(database, postgres_url)
    assert pooled_ledger.lookup.locate(SOURCE, "a").chunk == chunk


def test_nothing_is_prepared_behind_a_pooler(pooler):
    assert prepared_statements(Database(pooler.url)) == 0


def test_the_whole_flow_works_behind_a_pooler(pooled_ledger, tmp_path):
    end(pooled_ledger, archive(pooled_ledger, ["a", "b"]), ChunkState.EXPIRED)
    new = archive(pooled_ledger, ["a", "c"])
    assert pooled_ledger.lookup.locate(SOURCE, "a").chunk == new
    assert {key for key, *_ in standing(pooled_ledger, tmp_path / "s")} == {"a", "c"}


def test_transactions_orders_and_looks_work_behind_a_pooler(pooled_ledger):
    chunk = chunk_in(pooled_ledger, ChunkState.POSTING)
    log = pooled_ledger.transactions(holder())
    ask(log, chunk)
    settle(log, commit(log, signed(1), chunk), "included", 7)
    assert (log.start_of(ACCOUNT, chunk), log.spent(ACCOUNT), log.waiting(ACCOUNT)) == (7, 10, [])
    pooled_ledger.controls.set("bandwidth", "5")
    assert pooled_ledger.controls.current().bandwidth == 5
    done = archive(pooled_ledger, ["b"])
    look(pooled_ledger, done, CopyCheck(Copy("provider", "proof", 9), 1))
    assert pooled_ledger.replicas.list(done)[0].windows == 1


def test_many_threads_share_the_poolers_two_connections(pooled_ledger):
    names = register(pooled_ledger, *[[f"k{n}", f"s{n}"] for n in range(8)])

    def pack(name):
        number = names.index(name)
        with held(pooled_ledger, name, name) as lease:
            pooled_ledger.moves.move(lease, name, ChunkState.PLANNED, ChunkState.PACKING)
            seal(pooled_ledger, lease, name, [skip(f"s{number}")])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(pack, names))
    assert pooled_ledger.chunks.account(SOURCE).chunks == {ChunkState.SEALED: 8}
