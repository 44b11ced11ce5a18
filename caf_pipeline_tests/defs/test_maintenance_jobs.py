"""Jobs and checks of stored chunks: results in their partitions, damage, repairs."""

import pytest
from dagster import (
    AssetCheckKey,
    AssetCheckSeverity,
    AssetKey,
    DagsterRunStatus,
    build_schedule_context,
)
from pydantic import SecretStr

from caf_pipeline.asset_keys import DEFAULT_KEYS
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_private import AssetCheckExecutionRecordStatus
from caf_pipeline.defs.build import build_defs, build_own_defs
from caf_pipeline.errors import ChainUnreachable
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.maintenance import scrub
from caf_pipeline.naming import SOURCE_IS_COMPLETE, STORAGE_PLAN_LASTS
from caf_pipeline.settings import JackalSettings, Settings, SourceSettings, StoreSettings
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.system.processes import this_process
from caf_pipeline_tests.contracts.transaction_log import commit, signed
from caf_pipeline_tests.support.jackal_command_line import new_wallet
from caf_pipeline_tests.support.jackal_network import jackal_settings
from caf_pipeline_tests.support.pipeline_runs import failure_of, with_settings
from caf_pipeline_tests.support.run_contexts import archive_chunk
from caf_pipeline_tests.support.ticks import evaluate_tick

pytest_plugins = [
    "caf_pipeline_tests.support.dagster_home",
    "caf_pipeline_tests.support.jackal_network",
]

LOOK = "caf_look"
ARCHIVE, PROVE, REPAIR = "caf_archive_my_source", "caf_prove_my_source", "caf_repair_my_source"
CHUNK = AssetKey(["my-source", "stored_chunk"])
PROVEN = AssetCheckKey(CHUNK, "caf_chunk_is_proven")
PASSED, FAILED = AssetCheckExecutionRecordStatus.SUCCEEDED, AssetCheckExecutionRecordStatus.FAILED


@pytest.fixture
def archived(pipeline):
    """A source with several located chunks in a folder, archived without runs to save time."""
    pipeline.put(30)
    for chunk in pipeline.plan():
        archive_chunk(pipeline.run_context(), chunk)
    return pipeline


@pytest.fixture
def on_jackal(pipeline, network):
    """The pipeline on a Jackal network."""
    return with_settings(
        pipeline, store=StoreSettings(kind="jackal"), jackal=jackal_settings(network)
    )


def with_jackal(pipeline, **changes):
    return with_settings(pipeline, jackal=pipeline.settings.jackal.model_copy(update=changes))


def shown(pipeline) -> dict[str, AssetCheckExecutionRecordStatus]:
    """Return what the UI shows of the check for each partition."""
    infos = pipeline.instance.event_log_storage.get_asset_check_partition_info([PROVEN])
    return {info.partition_key: info.latest_execution_status for info in infos}


def stored_file(pipeline, chunk: str):
    """Return the file of a chunk in the folder store."""
    return (
        pipeline.settings.store.folder
        / "chunks"
        / f"{pipeline.ledger.chunks.get(chunk).merkle_root.hex()}.caf"
    )


def lose(pipeline, chunk: str) -> None:
    """Truncate a chunk's file in the folder store."""
    stored_file(pipeline, chunk).write_bytes(b"cut off")


# --- the proof watch
# ------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_one_run_proves_many_chunks_each_in_its_partition(archived):
    result = archived.execute(PROVE)
    assert result.success
    assert shown(archived) == dict.fromkeys(archived.chunks(), PASSED)


@pytest.mark.thorough
def test_a_result_is_tied_to_the_partitions_latest_materialization(pipeline):
    pipeline.put(12)
    chunks = pipeline.plan()
    for chunk in chunks:
        assert pipeline.execute(ARCHIVE, partition_key=chunk).success
    pipeline.execute(PROVE)
    infos = pipeline.instance.event_log_storage.get_asset_check_partition_info([PROVEN])
    assert len(infos) == len(chunks) > 0
    assert all(
        info.latest_target_materialization_storage_id
        == info.latest_materialization_storage_id
        is not None
        for info in infos
    )


@pytest.mark.thorough
def test_a_prove_run_is_limited_and_the_next_continues(archived):
    bounded = with_jackal(archived, prove_per_run=3)
    bounded.execute(PROVE)
    assert len(shown(archived)) == 3
    bounded.execute(PROVE)
    assert set(shown(archived)) == set(archived.chunks())


def test_wrong_bytes_fail_the_check_and_mark_the_chunk(archived):
    first, *others = archived.chunks()
    file = stored_file(archived, first)
    file.write_bytes(bytes(byte ^ 0xFF for byte in file.read_bytes()))
    result = archived.execute(PROVE)
    assert result.success  # the watch did its work; what it found stands at the partition
    assert shown(archived) == dict.fromkeys(others, PASSED) | {first: FAILED}
    assert archived.chunks(ChunkState.DAMAGED) == [first]


@pytest.mark.thorough
def test_an_unverified_chunk_is_a_warning_unless_small(on_jackal, monkeypatch):
    on_jackal.put(1, size_bytes=10)
    (chunk,) = on_jackal.plan()
    assert on_jackal.execute(ARCHIVE, partition_key=chunk).success

    def prove():
        assert on_jackal.execute(PROVE).success
        (record,) = on_jackal.instance.event_log_storage.get_asset_check_execution_history(
            PROVEN, limit=1
        )
        evaluation = record.event.dagster_event.event_specific_data
        assert evaluation.description.startswith("unverified: ")
        return evaluation

    assert prove().passed
    monkeypatch.setattr(scrub, "SMALL_BYTES", 0)
    larger = prove()
    assert (larger.passed, larger.severity) == (False, AssetCheckSeverity.WARN)
    assert on_jackal.chunks(ChunkState.LOCATED) == [chunk]


@pytest.mark.thorough
def test_one_partition_can_be_proven_by_itself(archived):
    first, *_ = archived.chunks()
    job = archived.defs.resolve_job_def("__ASSET_JOB")
    result = job.get_subset(
        asset_selection=set(), asset_check_selection={PROVEN}
    ).execute_in_process(instance=archived.instance, partition_key=first, raise_on_error=False)
    assert result.success
    assert shown(archived) == {first: PASSED}


@pytest.mark.thorough
def test_nothing_is_looked_at_while_everything_is_paused(archived):
    archived.ledger.controls.set("paused", "network maintenance")
    assert archived.execute(PROVE).success
    assert shown(archived) == {}


# --- repairs
# ------------------------------------------------------------------------------------------


def test_damaged_chunks_are_repaired_and_their_partitions_shown_as_sound(archived):
    first, *_ = archived.chunks()
    lose(archived, first)
    archived.execute(PROVE)
    assert archived.execute(REPAIR).success
    assert archived.chunks(ChunkState.DAMAGED) == []
    assert shown(archived)[first] is PASSED


@pytest.mark.thorough
def test_a_run_repairs_at_most_its_limit(archived):
    for chunk in archived.chunks():
        lose(archived, chunk)
    archived.execute(PROVE)
    config = {"ops": {"caf_my_source__repair_chunks": {"config": {"limit": 1}}}}
    quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    assert archived.execute(REPAIR, run_config=config | quiet).success
    assert len(archived.chunks(ChunkState.DAMAGED)) == len(archived.chunks()) - 1


def test_a_repair_limit_of_zero_is_refused(pipeline):
    config = {"ops": {"caf_my_source__repair_chunks": {"config": {"limit": 0}}}}
    failure = failure_of(pipeline.execute(REPAIR, run_config=config))
    assert failure.description.startswith("'limit' is 0")


@pytest.mark.thorough
def test_held_and_unrepairable_chunks_do_not_stop_repairs(archived):
    first, second, *_ = archived.chunks()
    for chunk in (first, second):
        lose(archived, chunk)
    archived.execute(PROVE)
    other = archived.run_context("another run")
    with other.ledger.leases.hold(chunk_lease(first), other.holder):
        result = archived.execute(REPAIR)
    assert result.success
    assert archived.chunks(ChunkState.DAMAGED) == [first]
    (output,) = [
        event.step_output_data for event in result.all_events if event.is_successful_output
    ]
    assert {name: value.value for name, value in output.metadata.items()} == {
        "repaired": 1,
        "left": 1,
    }


@pytest.mark.thorough
def test_one_partition_can_be_repaired_by_itself(archived):
    first, second, *_ = archived.chunks()
    for chunk in (first, second):
        lose(archived, chunk)
    archived.execute(PROVE)
    assert archived.execute("caf_repair_chunk_my_source", partition_key=second).success
    assert archived.chunks(ChunkState.DAMAGED) == [first]


# --- the bought space
# ------------------------------------------------------------------------------------------


def lasting(pipeline):
    result = pipeline.execute("caf_storage_plan_my_source")
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    (check,) = result.get_asset_check_evaluations()
    return check


def test_space_that_lasts_passes_and_its_numbers_are_shown(on_jackal):
    check = lasting(on_jackal)
    assert (check.check_name, check.passed) == ("caf_storage_plan_lasts", True)
    assert check.metadata["free_gib"].value > 0
    assert check.metadata["days_left"].value > 300
    assert (
        check.metadata["looked_at"].value > 0
    )  # shown again of later plans, it says of when it is


@pytest.fixture
def wallet():
    return new_wallet()


@pytest.fixture
def mine(on_jackal, wallet):
    """The pipeline with this new wallet."""
    return with_jackal(on_jackal, mnemonic=SecretStr(wallet.words))


@pytest.mark.parametrize(
    ("bought", "severity"), [({"days": 5, "days_ago": 25}, "ERROR"), ({}, "WARN")]
)
def test_space_that_ends_soon_or_is_missing_is_reported(mine, network, wallet, bought, severity):
    if bought:
        network.grant(wallet.address, 10**9, **bought)
    check = lasting(mine)
    assert (check.passed, check.severity.value) == (False, severity)
    assert "--bytes 1000000000 --days 60" in check.description
    assert ("5.0 days" in check.description) == bool(bought)


def test_a_month_just_bought_does_not_end_soon(mine, network, wallet):
    network.grant(wallet.address, 10**9, days=30)
    assert lasting(mine).passed


def test_a_near_end_is_an_error_without_the_chain(mine, network, monkeypatch, wallet):
    network.grant(wallet.address, 10**9, days=5, days_ago=25)
    lasting(mine)

    def away(*_):
        raise ChainUnreachable("no node answers")

    monkeypatch.setattr(Chain, "confirmed_plan", away)
    check = lasting(mine)
    assert (check.passed, check.severity.value) == (False, "ERROR")
    assert "no node answers" in check.description


def test_an_earlier_end_is_an_error_until_bought_back(mine, network, wallet):
    network.grant(wallet.address, 2 * 10**9, days=365)
    assert lasting(mine).passed
    network.grant(wallet.address, 10**9, days=100)
    for _ in range(2):
        check = lasting(mine)
        assert (check.passed, check.severity.value) == (False, "ERROR")
        assert "--bytes 2000000000 --days 365" in check.description
    network.grant(wallet.address, 2 * 10**9, days=366)
    assert lasting(mine).passed


def test_chunks_stored_without_a_plan_are_an_error(mine, network, monkeypatch, wallet):
    network.fund(wallet.address, 10**9)
    network.grant(wallet.address, 10**9)
    mine.put(1)
    (chunk,) = mine.plan()
    archive_chunk(context := mine.run_context(), chunk)
    context.close()
    monkeypatch.setattr(Chain, "confirmed_plan", lambda chain, _: (None, chain.now()))
    check = lasting(mine)
    assert (check.passed, check.severity.value) == (False, "ERROR")
    assert "1 chunk stored" in check.description
    assert "--bytes 1000000000" in check.description


def test_a_pending_purchase_explains_an_earlier_end(mine, network, wallet):
    network.grant(wallet.address, 2 * 10**9, days=365)
    assert lasting(mine).passed
    network.grant(wallet.address, 2 * 10**9, days=100)
    purchase = signed(50, account=f"{network.chain_id}/{wallet.address}", purpose="buy")
    commit(mine.ledger.transactions(this_process("a test")), purchase)
    assert lasting(mine).passed


@pytest.mark.thorough
def test_what_is_planned_must_fit_the_space(mine, network, wallet):
    network.fund(wallet.address, 10**9)
    network.grant(wallet.address, 100_000)
    mine.put(30)
    mine.plan()
    check = lasting(mine)
    assert not check.passed
    assert "100,000" in check.description


# --- by themselves
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["caf_new_objects_my_source", "caf_launch_chunks"])
def test_a_paused_tick_launches_nothing_and_shows_the_reason(pipeline, name):
    pipeline.put(3)
    pipeline.plan()
    pipeline.put(1, prefix="new")
    pipeline.ledger.controls.set("paused", "network maintenance")
    tick = evaluate_tick(pipeline, name)
    assert tick.run_requests == []
    assert tick.skip_message == "Paused: network maintenance. `caf resume` ends it."


def started(kind: str = "jackal", lcd=("https://lcd.example",), **its) -> dict[str, bool]:
    """Return which sensors and schedules are on by default."""
    defs = build_own_defs(
        Settings(
            store=StoreSettings(kind=kind),
            jackal=JackalSettings(lcd=lcd),
            sources={"a": SourceSettings(bucket="b", **its)},
        )
    )
    return {
        entry.name: entry.default_status.value == "RUNNING"
        for entry in (*defs.sensors, *defs.schedules)
    }


READ_ONLY = {
    "caf_watch_sources": True,
    "caf_end_dead_runs": True,
    "caf_look_at_sources": True,
    "caf_prune_events_daily": False,
}


AUTOMATIC = ("caf_new_objects_a", "caf_launch_chunks", "caf_reconcile_a_daily")


def test_nothing_archives_or_pays_by_itself_by_default():
    assert started() == {**READ_ONLY, **dict.fromkeys(AUTOMATIC, False)}


def test_an_automatic_source_is_planned_and_archived_by_itself():
    assert started(automatic=True) == {**READ_ONLY, **dict.fromkeys(AUTOMATIC, True)}
    assert not started(automatic=True, watch_interval_seconds=0)["caf_new_objects_a"]


WALLET = JackalSettings(lcd=("https://lcd.example",), mnemonic="word " * 12)


@pytest.mark.parametrize(
    ("kind", "jackal", "cron"),
    [
        ("jackal", WALLET, "* * * *"),
        ("jackal", WALLET.model_copy(update={"lcd": ()}), "5 * * *"),
        ("jackal", WALLET.model_copy(update={"mnemonic": None}), "5 * * *"),
        ("directory", WALLET, "5 * * *"),
    ],
    ids=["wallet", "no nodes", "no wallet", "folder"],
)
def test_network_is_looked_at_only_with_a_wallet(kind, jackal, cron):
    sources = {name: SourceSettings(bucket="b") for name in ("a", "b")}
    defs = build_defs(Settings(store=StoreSettings(kind=kind), jackal=jackal, sources=sources))
    schedule = defs.resolve_schedule_def("caf_look_at_sources")
    assert schedule.cron_schedule.partition(" ")[2] == cron
    has_wallet = cron.startswith("*")
    ops = {node.name for node in defs.resolve_job_def("caf_look").nodes}
    assert ("caf_b__prove_chunks" in ops) == ("caf_b__look_at_space" in ops) == has_wallet
    assert {"caf_a__look_at_completeness", "caf_b__look_at_completeness"} <= ops
    assert any("storage_plan" in job.name for job in defs.jobs) == has_wallet


def test_looks_skip_while_a_run_is_under_way(on_jackal):
    schedule = on_jackal.defs.resolve_schedule_def("caf_look_at_sources")
    context = build_schedule_context(on_jackal.instance)
    assert len(schedule.evaluate_tick(context).run_requests) == 1
    run = on_jackal.instance.create_run_for_job(
        on_jackal.defs.resolve_job_def(LOOK), status=DagsterRunStatus.STARTED
    )
    tick = schedule.evaluate_tick(context)
    assert tick.run_requests == []
    assert tick.skip_message == f"Run {run.run_id} of {LOOK} is under way."


def test_look_checks_space_each_time_and_completeness_daily(on_jackal):
    space = DEFAULT_KEYS.check_key("my-source", "chunk_plan", STORAGE_PLAN_LASTS)
    complete = DEFAULT_KEYS.check_key("my-source", "s3_inventory", SOURCE_IS_COMPLETE)

    def look():
        result = on_jackal.execute(LOOK)
        assert result.success
        log = on_jackal.instance.event_log_storage
        latest = log.get_latest_asset_check_execution_by_key([space, complete])
        return result.run_id, latest[space].run_id, latest[complete].run_id

    first, *runs = look()
    assert runs == [first, first]
    second, *runs = look()
    assert runs == [second, first]


def test_the_run_says_what_was_looked_at_in_bulk(mine, network, wallet):
    network.fund(wallet.address, 10**9)
    mine.put(1)
    mine.plan()
    result = mine.execute(PROVE)
    assert result.success
    (output,) = [
        event.step_output_data.metadata for event in result.all_events if event.is_successful_output
    ]
    assert (output["suspected"].value, output["listed_in_bulk"].value) == (0, 0)
    assert "0 of 0 located chunks" in output["bulk_look"].value
    assert output["last_whole_bulk_look"].value > 0


def test_no_chunk_is_launched_only_to_be_refused(mine, network, wallet):
    network.fund(wallet.address, 10**9)
    mine.put(3)
    mine.plan()
    tick = evaluate_tick(mine, "caf_launch_chunks")
    assert tick.run_requests == []
    assert "caf jackal buy" in tick.skip_message
    network.grant(wallet.address, 10**9)
    assert len(evaluate_tick(mine, "caf_launch_chunks").run_requests) == 1
