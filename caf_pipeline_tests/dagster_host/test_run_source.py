"""`caf run`: runs in one process, output, and exit statuses."""

import io
import json
import signal
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from dagster import AssetKey, DagsterInstance
from pydantic import ByteSize
from rich.console import Console

from caf_pipeline.caf.archive import Limits
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host import run_source as run_source_module
from caf_pipeline.dagster_host.run_source import run_command, run_source
from caf_pipeline.dagster_host.summary import (
    NOT_ARCHIVABLE,
    InventoryTotals,
    Summary,
    exit_status,
    sentence,
)
from caf_pipeline.defs import ops
from caf_pipeline.defs.resources import attempt_step
from caf_pipeline.errors import (
    BucketMissing,
    CafError,
    IntegrityError,
    ReportRefused,
    SettingsError,
    StoreAway,
    UsageError,
)
from caf_pipeline.inventory.objects import SkipReason, object_version
from caf_pipeline.ledger.records import Skip
from caf_pipeline.maintenance.scrub import prove_chunk
from caf_pipeline.settings import Settings, StoreSettings
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.store.directory import MARKER
from caf_pipeline.system.processes import this_process
from caf_pipeline.system.quantities import show_time
from caf_pipeline_tests.support.dagster_private import TagType, get_tag_type
from caf_pipeline_tests.support.inventory_reports import ReportWriter
from caf_pipeline_tests.support.jackal_network import jackal_settings
from caf_pipeline_tests.support.pipeline_runs import SOURCE, with_settings, with_source
from caf_pipeline_tests.support.plans import limit_to_target
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import archive_chunk
from caf_pipeline_tests.support.s3_server import make_bucket

pytestmark = pytest.mark.thorough

pytest_plugins = [
    "caf_pipeline_tests.support.dagster_home",
    "caf_pipeline_tests.support.jackal_network",
]


@pytest.fixture
def run(pipeline):
    """Run the command; `run.printed` has its output."""

    def command(source: str | None = SOURCE, **options):
        command.printed = io.StringIO()
        return run_source(
            source,
            settings=pipeline.settings,
            console=Console(file=command.printed, width=200),
            **options,
        )

    return command


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_run_finds_nothing_new(pipeline, run, workers):
    pipeline.put(12)
    (summary,) = run(workers=workers)
    assert (summary.objects, summary.size_bytes, summary.complete) == (12, 36_000, True)
    assert set(pipeline.chunks(ChunkState.LOCATED)) == set(summary.chunks)
    assert "12/12 objects, 2/2 chunks" in run.printed.getvalue()
    (again,) = run()
    assert again.chunks == []
    assert "nothing new;" in run.printed.getvalue()


def test_a_run_counts_an_inventory_once_before_and_after_archiving(pipeline, run, monkeypatch):
    inventories, account_for = [], planning.account_for
    monkeypatch.setattr(
        planning,
        "account_for",
        lambda context, snapshot: inventories.append(snapshot) or account_for(context, snapshot),
    )
    pipeline.put(3)
    run()
    pipeline.put(3, prefix="other")
    pipeline.plan()
    run()  # chunks of an older plan
    run()  # nothing new
    assert list(Counter(snapshot.name for snapshot in inventories).values()) == [2, 1, 2, 1]


def test_a_run_fails_if_its_plan_loses_an_object(pipeline, run, monkeypatch):
    identify = planning.identify

    def lose_an_object(*args, **options):
        identified = identify(*args, **options)
        pq.write_table(pq.read_table(identified.unsettled).slice(1), identified.unsettled)
        return identified

    pipeline.put(3)
    run()
    monkeypatch.setattr(planning, "identify", lose_an_object)
    pipeline.put(2, prefix="new")
    with pytest.raises(IntegrityError, match="caf_plan_accounts_for_inventory"):
        run()


def put_with_metadata(pipeline, count):
    """Put objects with headers, like rclone; listings lack headers, so a plan must guess them."""
    for number in range(count):
        metadata = {"mtime": "1700000000.123456789", "sha256": f"{number:064x}"}
        pipeline.bucket.put(f"key-{number:03}", b"x" * 300, Metadata=metadata)


def test_released_objects_are_archived_by_the_same_run(pipeline):
    mine = with_source(pipeline, target_size=ByteSize(40_000))
    put_with_metadata(mine, 150)
    mine.plan()
    for chunk in mine.ledger.chunks.list(SOURCE):
        limit_to_target(Path(chunk.plan_folder))
    (summary,) = run_source(SOURCE, settings=mine.settings, console=Console(file=io.StringIO()))
    assert sum(chunk.released_count for chunk in mine.ledger.chunks.list(SOURCE)) > 0
    assert (summary.objects, summary.complete, summary.exit_status) == (150, True, 0)


@pytest.fixture
def split(pipeline, monkeypatch):
    """Chunks of at most 60,000 bytes, and an object of several parts between small ones."""
    terms = planning.plan_terms
    monkeypatch.setattr(
        planning, "plan_terms", lambda *args: replace(terms(*args), limits=Limits(max_bytes=60_000))
    )
    pipeline.put(3)
    pipeline.bucket.put("key-x", bytes(range(250)) * 320)
    return pipeline


def test_an_object_in_parts_counts_as_one(split, run, monkeypatch):
    (summary,) = run(workers=1)
    assert (summary.objects, summary.size_bytes, summary.complete, summary.exit_status) == (
        4,
        89_000,
        True,
        0,
    )
    assert len(summary.chunks) > 4
    (again,) = run(workers=1)
    assert again.chunks == []


def test_an_object_in_parts_counts_for_the_locating_command(split, run):
    split.plan()
    context = split.run_context()
    for chunk in split.ledger.chunks.list(SOURCE):
        if chunk.part != 2:
            archive_chunk(context, chunk.name)
    (summary,) = run(workers=1)
    assert (len(summary.chunks), summary.objects, summary.complete) == (1, 1, True)
    assert "1/1 objects" in run.printed.getvalue()


def test_runs_of_parts_whose_object_changed_do_not_fail(split, run, monkeypatch):
    pack = chunk_steps.pack_chunk

    def change_before_the_third(context, name):
        if context.ledger.chunks.get(name).part == 3:
            split.bucket.put("key-x", b"another")
        return pack(context, name)

    monkeypatch.setattr(chunk_steps, "pack_chunk", change_before_the_third)
    (summary,) = run(workers=1)
    assert (summary.failed, summary.objects, summary.totals.located) == ({}, 3, 3)
    assert "3/4 objects" in run.printed.getvalue()
    states = {chunk.part: chunk.state for chunk in split.ledger.chunks.list(SOURCE) if chunk.part}
    assert [states.pop(part) for part in (1, 2, 3)] == [
        ChunkState.LOCATED,
        ChunkState.LOCATED,
        ChunkState.EMPTY,
    ]
    assert set(states.values()) == {ChunkState.WITHDRAWN}
    (summary,) = run(workers=1)
    assert (summary.complete, summary.exit_status) == (True, 0)


def test_a_run_selects_a_report_or_lists(pipeline, run):
    pipeline.put(3)
    reports = ReportWriter(
        pipeline.bucket.client, pipeline.bucket.name, make_bucket(pipeline.bucket.endpoint).name
    )
    moment = datetime.now(UTC).replace(microsecond=0) - timedelta(days=3)
    names = [reports.write(moment, rows=[]), reports.write(moment + timedelta(days=1))]
    source = pipeline.settings.sources[SOURCE].model_copy(update={"inventory": reports.folder})
    pipeline.settings.sources[SOURCE] = source
    (summary,) = run(inventory={"report": names[0][:10]})
    assert (summary.objects, summary.totals.objects) == (0, 0)
    (summary,) = run()
    assert (summary.objects, summary.complete) == (3, True)
    assert f"{reports.folder}{names[1]}/" in run.printed.getvalue()
    assert "2 days, 0:00:" in run.printed.getvalue()
    pipeline.put(1, prefix="new")
    (summary,) = run(inventory={"list_bucket": True})
    assert (summary.objects, summary.complete) == (1, True)
    with pytest.raises(ReportRefused, match="older"):
        run()


def test_staged_files_of_a_dead_run_are_removed(pipeline, run):
    pipeline.put(12)
    chunk = pipeline.plan()[0]
    archive_chunk(pipeline.run_context(), chunk, until=chunk_steps.load_locations)
    (summary,) = run()
    assert chunk in summary.chunks
    assert summary.objects == 12 - pipeline.ledger.chunks.get(chunk).member_count
    assert pipeline.ledger.staging.list() == []
    assert list(pipeline.settings.staging_folder.iterdir()) == []


def test_the_ui_hides_internal_tags(pipeline, run):
    pipeline.put(1)
    run()
    for item in pipeline.instance.get_runs():
        shown = {tag for tag in item.tags if get_tag_type(tag) is TagType.USER_PROVIDED}
        assert shown == {"caf/source", "caf/command"}


def spoil(database, *chunks):
    """Let the plans of chunks differ from the ledger, which is a permanent error."""
    with connected(database) as connection:
        statement = "UPDATE caf_files SET object_count = 99 WHERE name = ANY(%(names)s)"
        connection.execute(statement, {"names": list(chunks)})


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failed_chunk_is_exit_status_12(pipeline, run, database, workers):
    pipeline.put(12)
    first, *others = pipeline.plan()
    spoil(database, first)
    (summary,) = run(workers=workers)
    assert pipeline.chunks(ChunkState.LOCATED) == others
    assert exit_status([summary]) == 12
    assert list(summary.failed) == [first]
    printed = run.printed.getvalue()
    for words in (f"chunk {first} failed: ", "hint: ", "1/2 chunks, 1 failed", "is located"):
        assert words in printed


@pytest.mark.parametrize("workers", [1, 2])
def test_three_equal_permanent_errors_stop_the_run(pipeline, run, database, workers):
    pipeline.put(36)
    chunks = pipeline.plan()
    spoil(database, *chunks)
    (summary,) = run(workers=workers)
    assert sorted([*summary.failed, *summary.not_tried]) == chunks
    assert 3 <= len(summary.failed) < len(chunks)
    assert " more chunk" in run.printed.getvalue()
    assert summary.exit_status == 12


def test_no_untried_chunks_are_reported_if_none_is_left(pipeline, run, database):
    pipeline.put(18)
    chunks = pipeline.plan()
    assert len(chunks) == 3
    spoil(database, *chunks)
    (summary,) = run()
    assert list(summary.failed) == chunks
    assert "not tried" not in run.printed.getvalue()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_held_chunk_is_exit_status_13(pipeline, run, workers):
    pipeline.put(12)
    chunk, other = pipeline.plan()
    with pipeline.ledger.leases.hold(f"chunk/{chunk}", this_process("other-run")):
        (summary,) = run(workers=workers)
    assert (summary.held, summary.exit_status) == ([chunk], 13)
    assert pipeline.chunks(ChunkState.LOCATED) == [other]
    assert "waiting since" in run.printed.getvalue()
    assert f"chunk/{chunk}" in run.printed.getvalue()
    assert "run other-run" in run.printed.getvalue()


def test_chunks_archived_by_another_run_are_not_counted(pipeline, run, monkeypatch):
    pipeline.put(12)
    first, *others = pipeline.plan()
    listed = run_source_module.chunks_with_work

    def then_another_run(ledger, source):
        result = listed(ledger, source)
        for name in others:
            archive_chunk(pipeline.run_context(), name)
        return result

    monkeypatch.setattr(run_source_module, "chunks_with_work", then_another_run)
    (summary,) = run()
    assert summary.chunks == [first, *others]
    assert (summary.archived, summary.objects) == (
        1,
        pipeline.ledger.chunks.get(first).member_count,
    )
    assert (summary.exit_status, summary.as_json()["chunks"]["archived"]) == (0, 1)


@pytest.mark.parametrize(
    ("step", "counted"), [("caf_pack_chunk", (0, 0, 0)), ("caf_locate_chunk", (1, 6, 18_000))]
)
def test_the_run_that_located_a_chunk_counts_it(pipeline, run, monkeypatch, step, counted):
    pipeline.put(6)
    (chunk,) = pipeline.plan()

    def then_another_run(context, *arguments):
        result = attempt_step(context, *arguments)
        if context.op_def.name.endswith(step):
            archive_chunk(pipeline.run_context(), chunk)
        return result

    monkeypatch.setattr(ops, "attempt_step", then_another_run)
    (summary,) = run()
    assert (summary.chunks, summary.exit_status) == ([chunk], 0)
    assert (summary.archived, summary.objects, summary.size_bytes) == counted


def test_a_source_planned_by_another_run_is_exit_status_13(pipeline, run):
    pipeline.put(3)
    pipeline.run_context()
    (first,) = run()
    pipeline.put(2, prefix="new")
    with pipeline.ledger.leases.hold(f"plan/{SOURCE}", this_process("other-run")):
        (summary,) = run()  # it takes no inventory of its own
    assert first.exit_status == 0
    assert (summary.planning, summary.totals, summary.exit_status) == ("other-run", None, 13)


def test_a_retryable_object_is_exit_status_14(pipeline, run):
    pipeline.put(2)
    etag = pipeline.bucket.put("denied", b"x")["ETag"].strip('"')
    pipeline.run_context()  # makes the source known
    skip = Skip(
        "denied", object_version(None, etag, 1), SkipReason.ACCESS_DENIED, "not yet", etag, 1
    )
    pipeline.ledger.skips.record(SOURCE, [skip])
    (summary,) = run()
    assert (summary.objects, summary.exit_status) == (2, 14)
    assert "as access_denied" in run.printed.getvalue()
    in_a_day = datetime.now(UTC) + timedelta(days=1)
    assert in_a_day - timedelta(hours=1) < summary.retried_at < in_a_day + timedelta(hours=1)
    assert show_time(summary.retried_at) in run.printed.getvalue().replace("\n", " ")


def test_a_chunk_with_only_skipped_objects_is_empty(pipeline, run):
    pipeline.put(2)
    (chunk,) = pipeline.plan()
    for number in range(2):
        pipeline.bucket.delete(f"key-{number:03}")
    (summary,) = run()
    assert pipeline.ledger.chunks.get(chunk).state is ChunkState.EMPTY
    assert (summary.chunks, summary.archived, summary.empty, summary.objects) == ([chunk], 0, 1, 0)
    assert f"{SOURCE}: 0 chunks archived, 0 objects, 0 B; 1 empty" in run.printed.getvalue()
    assert (summary.as_json()["chunks"]["archived"], summary.as_json()["chunks"]["empty"]) == (0, 1)


def test_waiting_objects_are_exit_status_15(pipeline, run):
    mine = with_source(pipeline, target_size=ByteSize(20_000), min_chunk_size=ByteSize(10_000))
    mine.put(8)
    printed = io.StringIO()
    (summary,) = run_source(
        SOURCE, settings=mine.settings, console=Console(file=printed, width=200)
    )
    assert (summary.objects, summary.complete, summary.exit_status) == (6, False, 15)
    until = summary.waiting.until
    assert "2 objects (5.9 KiB) wait" in printed.getvalue()
    assert f"{until:%Y-%m-%d %H:%M:%S} UTC" in printed.getvalue()
    assert summary.as_json()["waiting"] == {
        "objects": 2,
        "bytes": 6_000,
        "until": until.isoformat(),
    }
    (again,) = run_source(
        SOURCE, settings=pipeline.settings, console=Console(file=printed, width=200)
    )
    assert (again.objects, again.complete, again.exit_status, again.waiting) == (2, True, 0, None)


def test_a_parked_chunk_is_exit_status_14(pipeline, run):
    pipeline.put(3)
    (chunk,) = pipeline.plan()
    chunk_steps.park(pipeline.run_context(), chunk, "no money")
    (summary,) = run()
    assert (summary.exit_status, summary.parked, summary.totals.claimed) == (14, 1, 3)


def test_a_damaged_chunk_is_exit_status_18(pipeline, run):
    pipeline.put(12)
    run()
    context, (name, *_) = pipeline.run_context(), pipeline.chunks()
    for copy in (context.store.folder / "chunks").iterdir():
        if copy.name.startswith(context.ledger.chunks.get(name).merkle_root.hex()):
            copy.unlink()
    prove_chunk(context, name)
    (summary,) = run()
    assert (summary.exit_status, summary.complete, summary.damaged) == (18, False, 1)
    assert f"1 damaged ('caf repair {SOURCE}'" in sentence(summary)


def test_a_source_is_not_complete_while_its_store_is_away(pipeline, run):
    pipeline.put(2)
    run()
    (pipeline.settings.store.folder / MARKER).unlink()
    with pytest.raises(StoreAway):
        run()
    assert "complete" not in run.printed.getvalue()


def test_unarchivable_objects_do_not_prevent_completeness():
    totals = InventoryTotals("s", 5, 3, 0, 0, {"unsupported_key": 1, "too_large": 1})
    assert totals.complete
    for reason in set(SkipReason) - NOT_ARCHIVABLE:
        assert not InventoryTotals("s", 5, 4, 0, 0, {reason: 1}).complete


def test_filtered_objects_are_reported_and_do_not_prevent_completeness(pipeline, run):
    pipeline.put(3)
    pipeline.put(2, prefix="new")
    filtered = {SOURCE: pipeline.settings.sources[SOURCE].model_copy(update={"exclude": ("new*",)})}
    pipeline.settings.sources.update(filtered)
    (summary,) = run()
    assert (summary.objects, summary.exit_status, summary.totals.left_out) == (3, 0, {"exclude": 2})
    assert "2 left out" in run.printed.getvalue()
    assert summary.as_json()["left_out"] == {"exclude": 2}


def test_of_several_sources_the_first_status_that_applies_counts():
    failed, held, again = (
        Summary("a", failed={"c": CafError("no")}),
        Summary("b", held=["c"]),
        Summary("c"),
    )
    done = Summary("d", totals=InventoryTotals("s", 1, 1, 0, 0, {}))
    assert exit_status([done]) == 0
    assert exit_status([done, again]) == 14
    assert exit_status([again, done, held]) == 13
    assert exit_status([again, held, failed]) == 12
    waits = Summary("e", totals=InventoryTotals("s", 2, 1, 0, 0, {"waiting": 1}))
    assert [exit_status(item) for item in ([done, waits], [waits, again])] == [15, 14]


def test_the_json_summary_is_the_last_line_after_an_error(pipeline, capfd):
    pipeline.put(12)
    assert run_command(SOURCE, settings=pipeline.settings, json=True) == 0
    summary = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert summary["exit_status"] == 0
    (source,) = summary["sources"]
    assert (
        source["objects"],
        source["located"],
        source["claimed"],
        source["to_be_tried_again"],
    ) == (12, 12, 0, 0)
    assert source["chunks"] == {
        "archived": 2,
        "empty": 0,
        "failed": 0,
        "held": 0,
        "not_tried": 0,
        "parked": 0,
        "damaged": 0,
    }
    for number in range(12):
        pipeline.bucket.delete(f"key-{number:03}")
    pipeline.bucket.client.delete_bucket(Bucket=pipeline.bucket.name)
    with pytest.raises(BucketMissing):
        run_command(SOURCE, settings=pipeline.settings, json=True)
    summary = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (summary["exit_status"], summary["sources"]) == (5, [])
    assert pipeline.bucket.name in summary["error"]


def test_an_unknown_or_missing_source_is_refused(pipeline, run, tmp_path):
    with pytest.raises(SettingsError, match="'other'"):
        run("other")
    with pytest.raises(UsageError, match="no source"):
        run_source(None, settings=Settings(home=tmp_path))


def test_a_chunk_too_large_for_providers_is_cut_again(pipeline, network):
    store, jackal = StoreSettings(kind="jackal"), jackal_settings(network, upload_seconds=2)
    wide = with_source(pipeline, target_size=ByteSize(1_000_000))
    mine = with_settings(wide, store=store, jackal=jackal)
    mine.put(8, size_bytes=100_000)
    (large,) = mine.plan()
    sealing = mine.execute(
        "caf_archive_my_source",
        partition_key=large,
        asset_selection=[AssetKey([SOURCE, "caf_chunk"])],
    )
    assert sealing.success
    for provider in network.provider_addresses:
        mine.ledger.providers.uploaded(provider, 280_000, 1.0)
    printed = io.StringIO()
    (summary,) = run_source(
        SOURCE, settings=mine.settings, console=Console(file=printed, width=200)
    )
    assert summary.complete
    assert mine.chunks(ChunkState.WITHDRAWN) == [large]
    assert len(mine.chunks(ChunkState.LOCATED)) > 1
    assert "target size" in printed.getvalue()


def test_a_second_ctrl_c_during_the_first_ends_the_run(pipeline, run, monkeypatch):
    pipeline.put(1)
    attempts = []

    def interrupted(*_, **__):
        attempts.append(1)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(inventories, "take_inventory", interrupted)
    monkeypatch.setattr(
        DagsterInstance,
        "report_run_canceling",
        lambda *_: signal.raise_signal(signal.SIGINT),
    )
    with pytest.raises(KeyboardInterrupt):
        run()
    assert len(attempts) == 1
    (ended,) = pipeline.instance.get_runs()
    assert ended.is_finished
