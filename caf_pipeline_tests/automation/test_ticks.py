"""Ticks are short: hanging servers end them, and their cost does not grow with the chunks."""

import json
from datetime import UTC, datetime

import pytest
from dagster import AssetCheckEvaluation, AssetKey, SensorDefinition
from sqlalchemy import Engine, event
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from caf_pipeline.automation import launch_tick, launching
from caf_pipeline.automation.launch_tick import MAX_LAUNCHED, refused_chunks
from caf_pipeline.automation.launching import PAGE
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.defs.build import build_defs
from caf_pipeline.errors import ChunkTooLarge, EmptyWallet, PlanTooSmall
from caf_pipeline.ledger import runs
from caf_pipeline.ledger.lookup import ReadConnections
from caf_pipeline.ledger.records import LaunchableChunk, chunk_lease
from caf_pipeline.ledger.runs import Progress
from caf_pipeline.ledger.sql_files import query
from caf_pipeline.run_context import address_of
from caf_pipeline.settings import SourceSettings, StoreSettings
from caf_pipeline.steps import inventories
from caf_pipeline_tests.support.chunk_rows import set_state
from caf_pipeline_tests.support.current_content import next_second
from caf_pipeline_tests.support.jackal_network import jackal_settings
from caf_pipeline_tests.support.pipeline_runs import SOURCE, fail_run, with_settings, with_source
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.ticks import evaluate_tick, silent_server

pytestmark = pytest.mark.thorough

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

MANY = 20_000
TICK_SECONDS = (
    10  # of a tick that waits in vain; half of it is enough for all else, also on a busy machine
)

PLANNED = """
    WITH plan AS (INSERT INTO plans (source_id, name, sha256, snapshot, folder, object_count,
        object_bytes)
        SELECT source_id, 'p' || nextval('plans_plan_id_seq'), sha256(CAST(%(source)s || random() AS
            bytea)), 's', 'f', 1, 1
        FROM sources WHERE name = %(source)s RETURNING *)
    INSERT INTO caf_files (name, source_id, plan_id, number, object_count, object_bytes,
        expected_size_bytes)
    SELECT %(source)s || '-' || to_char(plan_id, 'fm00000000') || '-' || to_char(number,
        'fm000000'), source_id, plan_id, number,
        1, 1, 1000
    FROM plan, generate_series(1, %(count)s) AS number
"""


def plan_chunks(pipeline, source: str, count: int, *, state: str = "planned") -> None:
    """Write planned chunks to the ledger, with the columns that a tick reads."""
    with connected(pipeline.ledger.database) as connection:
        connection.execute(
            (
                "INSERT INTO sources (name, archive_id, address) VALUES (%(source)s, %(source)s, "
                "%(address)s)"
                " ON CONFLICT (name) DO NOTHING"
            ),
            {"source": source, "address": address_of(pipeline.settings.sources[source])},
        )
        connection.execute(PLANNED, {"source": source, "count": count})
        if state != "planned":
            set_state(connection, state, "plan_id = (SELECT max(plan_id) FROM plans)")


def report_incomplete(pipeline, source: str) -> None:
    """Record a failed check `caf_source_is_complete`."""
    failed = AssetCheckEvaluation(
        asset_key=AssetKey([source, "s3_inventory"]),
        check_name="caf_source_is_complete",
        passed=False,
        metadata={},
    )
    pipeline.instance.report_runless_asset_event(failed)
    next_second()


@pytest.fixture
def statements(pipeline, monkeypatch):
    """Collect all SQL statements of a tick, except those of the thread that records progress."""
    monkeypatch.setattr(Progress, "record", lambda *_: None)
    sent: list[str] = []

    def seen(connection, cursor, statement, *_):
        sent.append(statement)

    connection = ReadConnections.connection
    monkeypatch.setattr(
        ReadConnections, "connection", lambda self: sent.append("a look-up") or connection(self)
    )
    event.listen(Engine, "before_cursor_execute", seen)
    yield sent
    event.remove(Engine, "before_cursor_execute", seen)


# --- servers that hang
# ------------------------------------------------------------------------------------------


@pytest.fixture
def on_silent_jackal(pipeline, network):
    """A planned chunk for Jackal, whose only node accepts connections and never answers."""
    pipeline.put(1)
    pipeline.plan()
    with silent_server() as server:
        jackal = jackal_settings(network, lcd=(server.url,))
        yield with_settings(pipeline, store=StoreSettings(kind="jackal"), jackal=jackal), server


def test_a_hanging_chain_skips_the_tick_and_is_named(on_silent_jackal):
    pipeline, server = on_silent_jackal
    tick = evaluate_tick(pipeline, "caf_launch_chunks", tick_seconds=TICK_SECONDS)
    assert tick.run_requests == []
    assert tick.run_requests == []
    assert server.url in tick.skip_message
    assert f"within {TICK_SECONDS} s" in tick.skip_message


def test_a_hanging_chain_does_not_stop_audits(on_silent_jackal):
    pipeline, _ = on_silent_jackal
    plan_chunks(pipeline, SOURCE, 1)
    done = with_settings(
        pipeline, sources={**pipeline.settings.sources, "done": pipeline.settings.sources[SOURCE]}
    )
    report_incomplete(done, "done")
    plan_chunks(done, "done", 1, state="located")
    (request,) = evaluate_tick(done, "caf_launch_chunks", tick_seconds=TICK_SECONDS).run_requests
    assert request.job_name == "caf_audit_done"


@pytest.mark.parametrize(
    "cursor", ['{"after": "key-7"}', '{"after": "key-7", "since": "key-3", "pages": 2}']
)
def test_a_hanging_bucket_skips_the_tick_and_keeps_the_cursor(pipeline, cursor):
    with silent_server() as server:
        silent = with_source(pipeline, endpoint_url=server.url)
        tick = evaluate_tick(silent, "caf_new_objects_my_source", cursor, tick_seconds=TICK_SECONDS)
        bucket = pipeline.bucket.name
        assert tick.run_requests == []
        assert tick.skip_message.startswith(f"bucket '{bucket}' at {server.url}")
        assert f"within {TICK_SECONDS} s" in tick.skip_message
        assert tick.cursor in (None, cursor)
        assert server.asked


def test_a_hanging_bucket_is_not_asked_again_meanwhile(pipeline):
    with silent_server() as server:
        silent = with_source(pipeline, endpoint_url=server.url)
        evaluate_tick(silent, "caf_new_objects_my_source", tick_seconds=TICK_SECONDS)
        requests = len(server.asked)
        tick = evaluate_tick(silent, "caf_new_objects_my_source", tick_seconds=TICK_SECONDS)
        assert "earlier" in tick.skip_message
        assert len(server.asked) == requests


def test_a_slow_bucket_is_listed_one_page_per_tick(pipeline):
    for number in range(1001):
        pipeline.bucket.put(f"k-{number:04}")
    state = inventories.scan_for_new(
        pipeline.run_context(), after=b"", max_pages=20, enough=lambda: True
    )
    assert (state.new_objects, state.next_after) == (1000, b"k-0999")


# --- much of everything
# ------------------------------------------------------------------------------------------


def test_a_tick_is_constant_in_the_number_of_chunks(pipeline, statements):
    plan_chunks(pipeline, SOURCE, 10)
    evaluate_tick(pipeline, "caf_launch_chunks")  # what a process does once
    statements.clear()
    evaluate_tick(pipeline, "caf_launch_chunks")
    few = list(statements)

    plan_chunks(pipeline, SOURCE, MANY)
    plan_chunks(pipeline, SOURCE, MANY, state="located")
    names = pipeline.chunks()
    for start in range(0, len(names), 5_000):
        pipeline.instance.add_dynamic_partitions(
            "caf_my-source_chunks", names[start : start + 5_000]
        )
    statements.clear()
    requests = evaluate_tick(pipeline, "caf_launch_chunks").run_requests
    assert [request.partition_key for request in requests] == names[:4]  # the oldest first
    assert len(statements) == len(few)
    keys = [item for item in statements if "dynamic_partitions" in item and "SELECT" in item]
    assert keys
    assert all(
        "partition IN" in item or "partition =" in item for item in keys
    )  # never all of them


def test_launchable_and_last_located_chunks_come_from_an_index(pipeline):
    plan_chunks(pipeline, SOURCE, 20_000, state="located")
    plan_chunks(pipeline, SOURCE, 20_000)
    facts = {"sources": [SOURCE], "after": [0], "limit": PAGE, "prefix": chunk_lease("")}
    with connected(pipeline.ledger.database) as connection:
        connection.execute("ANALYZE caf_files")
        for statement, index in (
            (query("launchable_chunks"), "caf_files_under_way"),
            (
                str(runs._LAST_LOCATED.compile(dialect=PGDialect_psycopg())),
                "caf_files_by_located",
            ),
        ):
            names = {name for name in facts if f"%({name})s" in statement}
            explained = connection.execute(
                f"EXPLAIN {statement}", {name: facts[name] for name in names}
            )
            plan = "\n".join(explained.scalars())
            assert index in plan, plan
            assert "Seq Scan" not in plan


@pytest.fixture
def of_100_sources(pipeline):
    source_settings = pipeline.settings.sources[SOURCE]
    pipeline = with_settings(
        pipeline, sources={f"s{number:02}": source_settings for number in range(100)}
    )
    for source in pipeline.settings.sources:
        plan_chunks(pipeline, source, 6)
    return pipeline


def test_one_sensor_launches_chunks_of_100_sources(of_100_sources):
    pipeline = of_100_sources
    sensors = [
        item.name
        for item in build_defs(pipeline.settings).sensors
        if isinstance(item, SensorDefinition)
    ]
    assert [name for name in sensors if "launch" in name] == ["caf_launch_chunks"]
    tick = evaluate_tick(pipeline, "caf_launch_chunks")
    launched = [request.partition_key for request in tick.run_requests]
    assert len(launched) == MAX_LAUNCHED
    assert {request.job_name for request in tick.run_requests} == {
        f"caf_archive_s{number:02}" for number in range(25)
    }


def test_the_next_tick_continues_with_the_remaining_sources(of_100_sources, monkeypatch):
    begins = json.dumps({"after": {"s61": 7}, "source": "s60"})
    with monkeypatch.context() as patched:
        patched.setattr(launch_tick, "MIN_TIME_LEFT", 2)  # as if half of the time had passed
        tick = evaluate_tick(of_100_sources, "caf_launch_chunks", begins)
    assert tick.run_requests == []
    assert json.loads(tick.cursor) == json.loads(begins)


def test_chunks_after_a_waiting_page_are_launched_next(pipeline, monkeypatch):
    page = 5
    for module in (launching, launch_tick):
        monkeypatch.setattr(module, "PAGE", page)
    monkeypatch.setattr(
        launching, "FIRST_WAIT_SECONDS", launching.LONGEST_WAIT_SECONDS
    )  # longer than this test takes
    plan_chunks(pipeline, SOURCE, page + 3)
    names = pipeline.chunks()
    for chunk in names[:page]:
        fail_run(pipeline, chunk)
    tick = evaluate_tick(pipeline, "caf_launch_chunks")
    assert tick.run_requests == []
    assert tick.skip_message.startswith(f"0 under way, {page} waiting")
    tick = evaluate_tick(pipeline, "caf_launch_chunks", tick.cursor)
    assert [request.partition_key for request in tick.run_requests] == names[page:]
    assert json.loads(tick.cursor) == {"after": {}, "source": ""}


# --- which sources, and which chunks
# ----------------------------------------------------------------------------------


def test_a_chunk_that_something_works_on_is_not_launched(pipeline):
    plan_chunks(pipeline, SOURCE, 2)
    first, second = pipeline.chunks()
    with pipeline.run_context().lease(chunk_lease(first)):
        requests = evaluate_tick(pipeline, "caf_launch_chunks").run_requests
        assert [request.partition_key for request in requests] == [second]


def test_a_source_with_a_changed_address_is_left_out(pipeline):
    other = SourceSettings(bucket="other", public=True)
    pipeline = with_settings(pipeline, sources={**pipeline.settings.sources, "other": other})
    for source in pipeline.settings.sources:
        plan_chunks(pipeline, source, 1)
    moved = other.model_copy(update={"bucket": "moved"})
    pipeline = with_settings(pipeline, sources=pipeline.settings.sources | {"other": moved})
    (request,) = evaluate_tick(pipeline, "caf_launch_chunks").run_requests
    assert request.job_name == "caf_archive_my_source"
    pipeline = with_settings(pipeline, sources={"other": moved})
    message = evaluate_tick(pipeline, "caf_launch_chunks").skip_message
    assert "aws/other/" in message
    assert "aws/moved/" in message


def test_a_sensor_that_is_on_by_hand_launches_every_source(pipeline):
    plan_chunks(pipeline, SOURCE, 1)
    assert evaluate_tick(with_source(pipeline, automatic=False), "caf_launch_chunks").run_requests


def test_beside_an_automatic_source_the_others_are_left_out(pipeline):
    source = pipeline.settings.sources[SOURCE]
    sources = {
        "by-hand": source,
        "idle": source,
        "automatic": source.model_copy(update={"automatic": True}),
    }
    pipeline = with_settings(pipeline, sources=sources)
    plan_chunks(pipeline, "by-hand", 1)
    tick = evaluate_tick(pipeline, "caf_launch_chunks")
    assert tick.run_requests == []
    assert "'by-hand'" in tick.skip_message
    assert "'idle'" not in tick.skip_message
    plan_chunks(pipeline, "automatic", 1)
    (request,) = evaluate_tick(pipeline, "caf_launch_chunks").run_requests
    assert request.job_name == "caf_archive_automatic"


def requested(pipeline):
    return [
        request.partition_key
        for request in evaluate_tick(pipeline, "caf_launch_chunks").run_requests
    ]


def test_no_more_chunks_are_launched_than_staging_has_room_for(pipeline):
    plan_chunks(pipeline, SOURCE, 4)  # each of 1,000 bytes
    first, second, third, _ = pipeline.chunks()
    narrow = pipeline.settings.packing.model_copy(update={"staging_limit": 2_500})
    pipeline = with_settings(pipeline, packing=narrow)
    assert requested(pipeline) == [first, second]
    folder = str(pipeline.settings.staging_folder)
    with pipeline.run_context().lease(chunk_lease(third)) as lease:
        pipeline.ledger.staging.reserve(lease, third, folder, 1_400, 2_500)
        assert requested(pipeline) == [first]
    assert requested(pipeline) == [first, third]  # which has its room already


def test_refused_chunks_do_not_block_others(pipeline, monkeypatch):
    other = SourceSettings(bucket="other", public=False)
    pipeline = with_settings(pipeline, sources={**pipeline.settings.sources, "other": other})
    plan_chunks(pipeline, "other", 3)
    plan_chunks(pipeline, SOURCE, 1)
    monkeypatch.setattr(launch_tick, "MAX_LAUNCHED", 2)

    (name,) = requested(pipeline)
    assert pipeline.ledger.chunks.get(name).source == SOURCE


class NarrowStore:
    """A store with `room` bytes, whose providers accept files up to `largest` bytes."""

    def __init__(self, room: int, largest: int = 10**9, *, error: Exception | None = None) -> None:
        self.room, self.largest, self.error = room, largest, error
        self.asked: list[int] = []

    def admit(self, *, stored_size_bytes: int, waiting_bytes: int) -> None:
        self.asked.append(stored_size_bytes)
        if self.error:
            raise self.error
        if stored_size_bytes > self.largest:
            raise ChunkTooLarge("too large", fitting_bytes=self.largest)
        if stored_size_bytes + waiting_bytes > self.room:
            raise PlanTooSmall("no room", fitting_bytes=self.room, hint="buy")


def chunks_of(*sizes: int) -> list[LaunchableChunk]:
    now = datetime.now(UTC)
    return [
        LaunchableChunk("s", "a", size, f"c{size}", ChunkState.PLANNED, (), now, size, held=False)
        for size in sizes
    ]


@pytest.mark.parametrize(
    ("store", "waiting", "refused", "why", "asked"),
    [
        (NarrowStore(100), 0, set(), "", [30]),
        (
            NarrowStore(100),
            41,
            {"c30"},
            "no room; buy.",
            [30, 20],
        ),  # others are packed, and not posted yet
        (NarrowStore(60), 0, set(), "", [30]),
        (NarrowStore(59), 0, {"c30"}, "no room; buy.", [30, 20]),  # each alone would fit
        (NarrowStore(20), 0, {"c20", "c30"}, "no room; buy.", [30, 10]),
        (NarrowStore(0), 0, {"c10", "c20", "c30"}, "no room; buy.", [30]),
        (NarrowStore(10), 20, {"c10", "c20", "c30"}, "no room; buy.", [30]),
        (
            NarrowStore(100, largest=20),
            0,
            set(),
            "",
            [30, 20],
        ),  # its own run withdraws what is too large
        (NarrowStore(10, largest=20), 0, {"c20"}, "no room; buy.", [30, 20, 10]),
        (
            NarrowStore(0, error=EmptyWallet("empty", hint="pay")),
            0,
            {"c10", "c20", "c30"},
            "empty; pay.",
            [30],
        ),
    ],
)
def test_smaller_chunks_go_if_the_store_lacks_room(store, waiting, refused, why, asked):
    result = refused_chunks(store, chunks_of(10, 20, 30), waiting_bytes=waiting)
    assert (result, store.asked) == ((refused, why), asked)
