"""Assets and checks with a real S3 server, Postgres, a folder store and a Dagster instance."""

import re
import shutil
from datetime import UTC, datetime, timedelta

import pytest
from dagster import (
    AssetCheckKey,
    AssetCheckSeverity,
    AssetKey,
    DagsterEventType,
    Definitions,
    asset,
)

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.defs import asset_checks
from caf_pipeline.defs.assets import InventoryConfig
from caf_pipeline.defs.build import build_defs
from caf_pipeline.defs.partitions import chunk_partitions
from caf_pipeline.errors import HeldByOther, StoreUnreachable, UsageError
from caf_pipeline.inventory import cutting
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.naming import ALL_STEPS, ASSETS, BACKFILL_TAG, RETRY_STRATEGY_TAG
from caf_pipeline.retrieval.reader import fetch
from caf_pipeline.steps import audit as audit_steps
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.steps.chunk_steps import park
from caf_pipeline.store.directory import MARKER
from caf_pipeline_tests.support.chunk_rows import set_state
from caf_pipeline_tests.support.current_content import next_second
from caf_pipeline_tests.support.dagster_private import (
    CachingStaleStatusResolver,
    LoadingContextForTest,
    StaleStatus,
)
from caf_pipeline_tests.support.inventory_reports import ReportWriter
from caf_pipeline_tests.support.pipeline_runs import (
    ARCHIVE,
    SOURCE,
    failure_of,
    with_settings,
    with_source,
)
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import archive_chunk
from caf_pipeline_tests.support.s3_server import make_bucket

pytestmark = pytest.mark.thorough

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

PLAN = "caf_plan_my_source"


def key(name: str) -> AssetKey:
    return AssetKey([SOURCE, name])


def checks(result) -> dict[str, bool]:
    return {check.check_name: check.passed for check in result.get_asset_check_evaluations()}


def materializations(result):
    return [event for event in result.all_events if event.is_step_materialization]


def materialized(pipeline, result) -> list[str]:
    return [event.asset_key.path[1] for event in materializations(result)]


def page(result, asset):
    """Return what the page of an asset shows of its materialization."""
    (made,) = result.asset_materializations_for_node(f"caf_my_source__{asset}")
    return made.metadata


def audit(pipeline):
    """Return the check whether the source is complete."""
    (check,) = pipeline.execute("caf_audit_my_source").get_asset_check_evaluations()
    return check


def retried(result):
    return any(
        event.event_type is DagsterEventType.STEP_UP_FOR_RETRY for event in result.all_events
    )


def test_a_plan_adds_partitions_and_accounts_for_each_object(pipeline):
    pipeline.put(30)
    result = pipeline.execute(PLAN)
    assert materialized(pipeline, result) == ["s3_inventory", "chunk_plan"]
    (check,) = [
        item
        for item in result.get_asset_check_evaluations()
        if item.check_name == "caf_plan_accounts_for_inventory"
    ]
    assert check.passed
    assert check.metadata["claimed"].value == 30
    assert pipeline.instance.get_dynamic_partitions("caf_my-source_chunks") == pipeline.chunks()
    assert len(pipeline.chunks()) > 1


def test_the_plan_shows_its_totals_and_changes(pipeline):
    pipeline.put(30)
    shown = page(pipeline.execute(PLAN), "chunk_plan")
    names = "dagster/row_count", "requests", "estimated_seconds"
    assert [shown[name].value for name in names] == [30, 30, "not known yet"]
    assert re.search("objects +30 .+bytes +88K ", shown["object_sizes"].value)
    assert [record.data["size"] for record in shown["largest_objects"].records] == ["2.9 KiB"] * 5
    assert [record.data["class"] for record in shown["storage_classes"].records] == ["STANDARD"]
    assert "last_plan" not in shown
    pipeline.put(1, prefix="new")
    shown = page(pipeline.execute(PLAN), "chunk_plan")
    assert shown["objects_more_than_last"].value == -29


def test_the_page_of_several_plans_has_the_rows_of_all(pipeline, monkeypatch):
    for module in (cutting, planning):
        monkeypatch.setattr(module, "MAX_CHUNKS", 1)
    pipeline.put(30)
    shown = page(pipeline.execute(PLAN), "chunk_plan")
    assert shown["plan"].value.count(", ") == shown["chunks"].value - 1 > 0
    assert (shown["dagster/row_count"].value, shown["dagster/size_bytes"].value) == (30, 90_000)


def test_the_plans_page_says_what_waits_and_until_when(pipeline):
    mine = with_source(pipeline, min_chunk_size=10_000)
    mine.put(2)
    result = mine.execute(PLAN)
    shown = page(result, "chunk_plan")
    assert shown["waiting_objects"].value == 2
    assert (
        shown["waiting_until"].value == mine.ledger.chunks.account(SOURCE).waiting.until.timestamp()
    )
    assert checks(result) == {
        "caf_plan_accounts_for_inventory": True,
        "caf_source_is_complete": False,
    }


def test_a_chunks_run_ends_with_its_objects_located_and_readable(pipeline):
    pipeline.put(5)
    (chunk,) = pipeline.plan()
    result = pipeline.execute(ARCHIVE, partition_key=chunk)
    assert materialized(pipeline, result) == ["caf_chunk", "stored_chunk", "file_locations"]
    assert checks(result) == {"caf_chunk_accounts_for_plan": True, "caf_chunk_reads_back": True}
    context = pipeline.run_context()
    assert b"".join(
        fetch(context.ledger.lookup, context.store, SOURCE, "key-003").pieces
    ) == b"key-3".ljust(3_000, b".")


def test_a_chunks_run_has_an_op_for_each_asset(pipeline):
    pipeline.put(5)
    (chunk,) = pipeline.plan()
    result = pipeline.execute(ARCHIVE, partition_key=chunk)
    assert [event.step_key for event in result.all_events if event.is_step_success] == [
        "caf_my_source__caf_chunk.caf_pack_chunk",
        "caf_my_source__stored_chunk.caf_store_chunk",
        "caf_my_source__file_locations.caf_locate_chunk",
    ]
    root = pipeline.ledger.chunks.get(chunk).merkle_root.hex()
    made = [event.step_materialization_data.materialization for event in materializations(result)]
    assert {item.tags["dagster/data_version"] for item in made} == {root}
    assert pipeline.instance.get_run_by_id(result.run_id).tags[RETRY_STRATEGY_TAG] == ALL_STEPS


def run_of_assets(pipeline, chunk, *others, **tags):
    """Execute a chunk's assets and others like a run of the UI."""
    defs = Definitions.merge(pipeline.defs, Definitions(assets=others))
    selection = [*map(key, ASSETS[2:]), *(other.key for other in others)]
    return defs.resolve_job_def("__ASSET_JOB").execute_in_process(
        instance=pipeline.instance, partition_key=chunk, asset_selection=selection, tags=tags
    )


@asset(deps=[key("file_locations")], partitions_def=chunk_partitions(SOURCE))
def report() -> None: ...


def test_a_located_chunk_is_observed_and_wakes_nothing(pipeline):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    archive_chunk(pipeline.run_context(), chunk)
    assert materialized(pipeline, run_of_assets(pipeline, chunk)) == list(ASSETS[2:])
    result = run_of_assets(pipeline, chunk, report)
    assert [event.asset_key for event in materializations(result)] == [report.key]
    assert [
        event.asset_key.path[1]
        for event in result.all_events
        if event.event_type is DagsterEventType.ASSET_OBSERVATION
    ] == list(ASSETS[2:])
    assert checks(result) == {"caf_chunk_accounts_for_plan": True, "caf_chunk_reads_back": True}
    run = pipeline.instance.get_run_by_id(result.run_id)
    assert run.tags[RETRY_STRATEGY_TAG] == ALL_STEPS


def test_a_run_of_an_asset_backfill_materializes_each_partition(pipeline):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    for _ in range(2):
        result = run_of_assets(pipeline, chunk, **{BACKFILL_TAG: "abcdefgh"})
        assert materialized(pipeline, result) == list(ASSETS[2:])


def test_a_check_that_is_retried_materializes_once(pipeline, monkeypatch):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    fetch_members, tries = audit_steps.fetch_members, []

    def fails_once(*arguments):
        tries.append(arguments)
        if len(tries) == 1:
            raise StoreUnreachable("it is away for a moment")
        return fetch_members(*arguments)

    monkeypatch.setattr(audit_steps, "fetch_members", fails_once)
    result = pipeline.execute(ARCHIVE, partition_key=chunk)
    assert retried(result)
    assert materialized(pipeline, result) == list(ASSETS[2:])
    assert checks(result)["caf_chunk_reads_back"]


@pytest.mark.parametrize(
    ("asset", "check"),
    [
        ("caf_chunk", "caf_chunk_accounts_for_plan"),
        ("stored_chunk", "caf_chunk_is_proven"),
        ("file_locations", "caf_chunk_reads_back"),
    ],
)
def test_a_check_of_a_chunk_runs_alone(pipeline, asset, check):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    archive_chunk(pipeline.run_context(), chunk)
    job = pipeline.defs.resolve_job_def("__ASSET_JOB").get_subset(
        asset_selection=set(), asset_check_selection={AssetCheckKey(key(asset), check)}
    )
    result = job.execute_in_process(instance=pipeline.instance, tags={"dagster/partition": chunk})
    assert checks(result) == {check: True}
    assert materializations(result) == []


def test_a_chunk_that_another_run_releases_is_materialized(pipeline, monkeypatch):
    pipeline.put(1)
    (chunk,) = pipeline.plan()

    def release_staging(*_):
        raise HeldByOther("another run has it", holder="another run")

    monkeypatch.setattr(chunk_steps, "release_staging", release_staging)
    result = pipeline.execute(ARCHIVE, partition_key=chunk)
    assert materialized(pipeline, result) == list(ASSETS[2:])


def test_the_chunks_page_shows_what_a_person_wants_to_see(pipeline):
    pipeline.put(5)
    (chunk,) = pipeline.plan()
    result = pipeline.execute(ARCHIVE, partition_key=chunk)
    shown = page(result, "caf_chunk")
    assert (shown["objects"].value, shown["size"].value, shown["state"].value) == (
        5,
        "14.6 KiB",
        "sealed",
    )
    assert shown["merkle_root"].value == pipeline.ledger.chunks.get(chunk).merkle_root.hex()
    assert [record.data["size"] for record in shown["largest_members"].records] == ["2.9 KiB"] * 5
    assert {"fill", "mib_per_second", "skipped"} <= shown.keys()


def test_an_object_leaves_no_trace_of_its_own_in_dagster(pipeline):
    pipeline.put(2)
    (few,) = pipeline.plan()
    pipeline.put(12, prefix="other", size_bytes=10)
    pipeline.plan()
    (many,) = pipeline.chunks(ChunkState.PLANNED)[1:]
    counts = [
        len(pipeline.execute(ARCHIVE, partition_key=chunk).all_events) for chunk in (few, many)
    ]
    assert counts[0] == counts[1]


def test_a_chunk_that_comes_out_empty_materializes_all_three(pipeline):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    pipeline.bucket.delete("key-000")
    result = pipeline.execute(ARCHIVE, partition_key=chunk)
    assert materialized(pipeline, result) == ["caf_chunk", "stored_chunk", "file_locations"]
    assert pipeline.ledger.chunks.get(chunk).state is ChunkState.EMPTY


def test_a_backfill_run_of_an_empty_chunk_succeeds(pipeline):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    pipeline.bucket.delete("key-000")
    assets = [AssetKey(["my-source", name]) for name in ASSETS[2:]]
    result = pipeline.execute("__ASSET_JOB", partition_key=chunk, asset_selection=assets)
    assert result.success
    assert "caf_chunk_is_proven" not in checks(result)


def test_a_held_chunk_succeeds_without_a_materialization(pipeline):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    other = pipeline.run_context("another run")
    with other.ledger.leases.hold(chunk_lease(chunk), other.holder):
        result = pipeline.execute(ARCHIVE, partition_key=chunk)
    assert result.success
    assert materialized(pipeline, result) == []
    assert pipeline.instance.get_run_by_id(result.run_id).tags["caf/held_by"] == "another run"


def test_a_chunk_with_missing_objects_is_not_stored(pipeline, database):
    pipeline.put(2)
    (chunk,) = pipeline.plan()
    assert pipeline.execute(
        ARCHIVE, partition_key=chunk, asset_selection=[key("caf_chunk")]
    ).success
    with connected(database) as connection:
        connection.execute("UPDATE caf_files SET member_count = 1")
    result = pipeline.execute(ARCHIVE, partition_key=chunk)
    assert not result.success
    assert materialized(pipeline, result) == ["caf_chunk"]
    assert pipeline.ledger.chunks.get(chunk).state is ChunkState.SEALED


def test_a_parked_chunk_fails_once_and_says_why(pipeline):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    park(pipeline.run_context(), chunk, "it is a test")
    result = pipeline.execute(ARCHIVE, partition_key=chunk)
    assert "parked: it is a test" in failure_of(result).description
    assert not retried(result)


def test_a_new_plan_marks_no_chunk_as_stale(pipeline):

    pipeline.put(1)
    (chunk,) = pipeline.plan()
    assert pipeline.execute(ARCHIVE, partition_key=chunk).success
    pipeline.put(1, prefix="new")
    pipeline.plan()
    graph = pipeline.defs.resolve_asset_graph()
    resolver = CachingStaleStatusResolver(
        pipeline.instance, graph, LoadingContextForTest(pipeline.instance)
    )
    for name in ASSETS[2:]:
        assert resolver.get_status(key(name), chunk) is StaleStatus.FRESH


def test_a_lost_partition_is_added_by_the_next_plan(pipeline):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    pipeline.instance.delete_dynamic_partition("caf_my-source_chunks", chunk)
    pipeline.plan()
    assert pipeline.instance.has_dynamic_partition("caf_my-source_chunks", chunk)


def test_a_window_takes_only_that_part_of_the_listing(pipeline):
    pipeline.put(5)
    config = {
        "ops": {
            "caf_my_source__s3_inventory": {"config": {"after": "key-000", "until": "key-%30%302"}}
        }
    }
    result = pipeline.execute(PLAN, run_config=config)
    shown = page(result, "s3_inventory")
    assert (shown["objects"].value, shown["whole_source"].value) == (2, False)
    assert pipeline.ledger.chunks.account(SOURCE).claimed_objects == 2


@pytest.fixture
def reported(pipeline):
    """The pipeline with inventory reports."""
    reports = ReportWriter(
        pipeline.bucket.client, pipeline.bucket.name, make_bucket(pipeline.bucket.endpoint).name
    )
    return with_source(pipeline, inventory=reports.folder), reports


def inventory_page(pipeline, **config):
    """Execute a plan; return the metadata of the inventory."""
    result = pipeline.execute(
        PLAN, run_config={"ops": {"caf_my_source__s3_inventory": {"config": config}}}
    )
    return result, {
        name: value.value
        for item in result.asset_materializations_for_node("caf_my_source__s3_inventory")
        for name, value in item.metadata.items()
    }


def test_the_inventory_shows_its_report_and_its_age(reported):
    pipeline, reports = reported
    pipeline.put(3)
    moment = datetime.now(UTC).replace(microsecond=0) - timedelta(days=2, hours=3)
    name = reports.write(moment)
    _, shown = inventory_page(pipeline)
    assert shown["inventory_report"] == f"{reports.folder}{name}/"
    assert shown["inventory_report_time"] == moment.timestamp()
    assert shown["inventory_report_age"].startswith("2 days, 3:00:")
    assert [record.data for record in shown["storage_classes"].records] == [
        {"storage class": "STANDARD", "objects": 3}
    ]
    assert (shown["objects"], shown["inventory_report_files"], shown["older_versions"]) == (3, 3, 0)
    assert pipeline.ledger.chunks.account(SOURCE).claimed_objects == 3


def test_a_report_that_is_old_is_warned_about(reported):
    pipeline, reports = reported
    pipeline.put(1)
    reports.write(datetime.now(UTC) - timedelta(days=10))
    assert "is 10 days old" in inventory_page(pipeline)[1]["warning"]


def test_list_bucket_or_a_window_overrides_reports(reported):
    pipeline, reports = reported
    pipeline.put(3)
    reports.write(rows=[])
    for config, objects in (
        ({}, 0),
        ({"list_bucket": True}, 3),
        ({"after": "key-000"}, 2),
        ({"until": "key-000"}, 1),
    ):
        _, shown = inventory_page(pipeline, **config)
        assert (shown["objects"], "inventory_report" in shown) == (objects, not config)


@pytest.mark.parametrize("config", [{"list_bucket": True}, {"after": "a"}, {"until": "a"}])
def test_a_report_is_not_taken_in_part(reported, config):
    pipeline, _ = reported
    result, _ = inventory_page(pipeline, report="2026-11-21", **config)
    assert "'report'" in failure_of(result).description


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"after": "%zz"}, "'after' is not percent-encoded: '%zz'"),
        ({"until": "100%"}, "'until' is not percent-encoded: '100%'"),
        ({"after": "b", "until": "a"}, "'a'"),
        ({"after": "a", "until": "%61"}, "'%61'"),
        ({"until": ""}, "''"),
    ],
)
def test_an_invalid_window_is_refused(config, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        InventoryConfig(**config).window()


def test_a_window_decodes_percent_encoded_keys():
    assert InventoryConfig().window() == (b"", None)
    assert InventoryConfig(after="a+%25", until="%c3%A4").window() == (b"a+%", "ä".encode())


def test_the_source_is_complete_only_when_everything_is_located(pipeline):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    before = pipeline.execute("caf_audit_my_source")
    assert before.success  # a warning, not an error
    assert [check.passed for check in before.get_asset_check_evaluations()] == [False]
    pipeline.execute(ARCHIVE, partition_key=chunk)
    assert audit(pipeline).passed
    (pipeline.settings.store.folder / MARKER).unlink()  # as when its disk is not mounted
    away = audit(pipeline)
    assert not away.passed
    assert MARKER in away.description


def counts(pipeline) -> tuple[int, int]:
    content = pipeline.ledger.chunks.account("my-source").content
    return content.current_objects, content.uncounted_objects


def test_the_audit_counts_chunks_of_an_older_plan(pipeline):
    pipeline.put(12)
    first, last = pipeline.plan()
    assert pipeline.execute(
        "caf_plan_my_source"
    ).success  # a newer inventory is counted, and has nothing to plan
    assert counts(pipeline) == (0, 0)
    pipeline.execute(ARCHIVE, partition_key=first)
    assert counts(pipeline) == (0, pipeline.ledger.chunks.get(first).member_count)
    pipeline.execute(ARCHIVE, partition_key=last)
    assert audit(pipeline).passed
    assert counts(pipeline) == (12, 0)


def test_a_chunk_is_archived_though_its_inventory_is_gone(pipeline):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    assert pipeline.execute("caf_plan_my_source").success
    for file in pipeline.run_context().inventories().iterdir():
        file.unlink()
    assert pipeline.execute(ARCHIVE, partition_key=chunk).success
    assert counts(pipeline) == (0, 1)


def test_a_damaged_chunk_makes_the_source_incomplete(pipeline):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    archive_chunk(pipeline.run_context(), chunk)
    for state, passed in (("damaged", False), ("located", True)):
        with connected(pipeline.ledger.database) as connection:
            set_state(connection, state)
        check = audit(pipeline)
        assert check.passed is passed
        assert ("1 chunk damaged: " in (check.description or "")) is not passed


def test_a_run_of_a_damaged_chunk_fails_with_a_hint(pipeline):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    archive_chunk(pipeline.run_context(), chunk)
    with connected(pipeline.ledger.database) as connection:
        set_state(connection, "damaged")
    result = pipeline.execute(ARCHIVE, partition_key=chunk)
    assert not result.success
    assert materialized(pipeline, result) == []
    assert "is damaged" in failure_of(result).description


@pytest.mark.parametrize(
    ("until", "asset", "said"),
    [
        (chunk_steps.load_batch, "file_locations", "is packing, and not verified yet"),
        (chunk_steps.seal_chunk, "file_locations", "is sealed, and not verified yet"),
        (chunk_steps.load_batch, "stored_chunk", "is packing, and not sealed yet"),
    ],
)
def test_a_later_asset_of_a_planned_chunk_is_not_materialized(pipeline, until, asset, said):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    archive_chunk(pipeline.run_context(), chunk, until=until)
    result = pipeline.execute(ARCHIVE, partition_key=chunk, asset_selection=[key(asset)])
    assert not result.success
    assert materialized(pipeline, result) == []
    assert said in failure_of(result).description


@pytest.mark.parametrize(
    ("partition", "said"),
    [("foo", "partition 'foo'"), ("other-1a2b3c4d-00001", "a chunk of source 'other'")],
)
def test_a_partition_of_no_chunk_fails_without_retry(pipeline, partition, said):
    pipeline.instance.add_dynamic_partitions("caf_my-source_chunks", [partition])
    result = pipeline.execute(ARCHIVE, partition_key=partition)
    assert said in failure_of(result).description
    assert not retried(result)


def test_a_step_without_s3_fails_permanently_if_packing_is_needed(pipeline):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    archive_chunk(pipeline.run_context(), chunk, until=chunk_steps.post_file)
    shutil.rmtree(pipeline.settings.staging_folder)
    result = pipeline.execute(ARCHIVE, partition_key=chunk, asset_selection=[key("stored_chunk")])
    assert not result.success
    assert not retried(result)
    failure = failure_of(result)
    assert "bucket of 'my-source'" in failure.description
    assert str(pipeline.settings.staging_folder) in failure.description
    assert "`staging`" in failure.metadata["hint"].value
    assert pipeline.execute(ARCHIVE, partition_key=chunk).success
    assert pipeline.ledger.chunks.get(chunk).state is ChunkState.LOCATED


def test_the_account_is_of_the_inventory_that_was_planned_last(pipeline):
    pipeline.put(1)
    inventories.take_inventory(pipeline.run_context())
    result = asset_checks._plan_accounts(pipeline.run_context(), planning.account_for)
    assert (result.passed, result.severity) == (False, AssetCheckSeverity.WARN)
    pipeline.plan()
    pipeline.put(2, prefix="new")
    inventories.take_inventory(pipeline.run_context())
    assert asset_checks._plan_accounts(pipeline.run_context(), planning.account_for).passed


def test_missing_and_unlocated_chunks_fail_their_checks(pipeline):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    context = pipeline.run_context()
    assert not asset_checks._chunk_reads_back(context, chunk).passed
    archive_chunk(context, chunk)
    assert asset_checks._chunk_reads_back(context, chunk).passed
    shutil.rmtree(context.store.folder / "chunks")
    assert not asset_checks._chunk_reads_back(context, chunk).passed
    result = asset_checks._chunk_accounts(context, chunk)
    assert not result.passed
    assert "cannot be read" in result.description


@pytest.mark.parametrize("left", ["the one before", "none"])
def test_completeness_needs_the_last_inventory_on_this_machine(pipeline, left):
    before = inventories.take_inventory(pipeline.run_context())
    if left == "none":
        before.path.unlink()
    next_second()
    pipeline.put(1)
    elsewhere = pipeline.settings.home / "another machine"
    context = with_settings(pipeline, home=elsewhere).run_context()
    planning.cut_plan(context, inventories.take_inventory(context))
    check = audit(pipeline)
    assert not check.passed
    assert "this machine" in check.description


def test_each_plan_checks_completeness(pipeline):
    pipeline.put(1)
    assert checks(pipeline.execute(PLAN)) == {
        "caf_plan_accounts_for_inventory": True,
        "caf_source_is_complete": False,
    }
    pipeline.execute(ARCHIVE, partition_key=pipeline.chunks()[0])
    assert checks(pipeline.execute(PLAN)) == {
        "caf_plan_accounts_for_inventory": True,
        "caf_source_is_complete": True,
    }


def test_a_missing_bucket_fails_the_inventory_with_a_hint(pipeline):
    pipeline.bucket.client.delete_bucket(Bucket=pipeline.bucket.name)
    result = pipeline.execute(PLAN)
    failure = failure_of(result)
    shown = failure.metadata
    assert (shown["error"].value, shown["exit_code"].value) == ("BucketMissing", 5)


@pytest.mark.parametrize("source", ["a", "with-dashes-", "x" * 30])
def test_sources_of_any_legal_name_can_be_loaded(pipeline_settings, source):
    source = source.strip("-")
    settings = pipeline_settings.model_copy(
        update={"sources": {source: pipeline_settings.sources[SOURCE]}}
    )
    Definitions.validate_loadable(build_defs(settings))


def test_an_empty_inventory_shows_a_warning(pipeline):
    assert (
        page(pipeline.execute(PLAN), "s3_inventory")["warning"].value
        == f"bucket '{pipeline.bucket.name}' at {pipeline.bucket.endpoint} has no objects"
    )
    pipeline.put(1)
    assert "warning" not in page(pipeline.execute(PLAN), "s3_inventory")


def test_an_inventory_of_current_versions_is_incomplete_for_all_versions(pipeline):
    pipeline.bucket.keep_versions()
    pipeline.put(1)
    pipeline.put(1, size_bytes=2_000)
    (chunk,) = pipeline.plan()
    pipeline.execute(ARCHIVE, partition_key=chunk)
    check = audit(pipeline)
    assert (
        check.passed,
        check.metadata["versions"].value,
        check.metadata["older_versions"].value,
    ) == (True, "current", 1)
    assert "1 older version" in check.description
    everything = with_source(pipeline, versions="all")
    check = audit(everything)
    assert not check.passed
    assert "'versions' is 'all'" in check.description
    _, shown = inventory_page(everything)
    assert {
        name: shown[name]
        for name in ("objects", "versions", "older_versions", "delete_markers", "deleted_keys")
    } == {
        "objects": 2,
        "versions": "all",
        "older_versions": 1,
        "delete_markers": 0,
        "deleted_keys": 0,
    }
    for item in everything.chunks(ChunkState.PLANNED):
        everything.execute(ARCHIVE, partition_key=item)
    check = audit(everything)
    assert (check.passed, check.metadata["current"].value, check.metadata["older"].value) == (
        True,
        1,
        1,
    )
