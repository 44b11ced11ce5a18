"""Sensors plan new objects and launch chunks with work, and launch nothing twice."""

import contextlib
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from dagster import (
    AssetKey,
    DagsterRun,
    DagsterRunStatus,
    RetryPolicy,
)

from caf_pipeline import wiring
from caf_pipeline.automation import launching, new_objects_tick
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_private import BulkActionStatus, PartitionBackfill
from caf_pipeline.errors import BucketMissing
from caf_pipeline.ledger.leases import HeldLease
from caf_pipeline.naming import LOOK_JOB, SOURCE_TAG
from caf_pipeline.settings import StoreSettings
from caf_pipeline.steps import chunk_steps
from caf_pipeline_tests.support.current_content import next_second
from caf_pipeline_tests.support.kills import KILLED, Fatal, Process, call
from caf_pipeline_tests.support.new_objects_ticks import NewObjectsTicks
from caf_pipeline_tests.support.pipeline_runs import (
    ARCHIVE,
    SOURCE,
    fail_run,
    start_run,
)
from caf_pipeline_tests.support.run_contexts import archive_chunk
from caf_pipeline_tests.support.ticks import evaluate_tick
from caf_pipeline_tests.support.tiers import sampled

pytestmark = pytest.mark.thorough

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]


@pytest.fixture
def tick(pipeline):
    """Evaluate a sensor; return (run requests, skip reason, cursor)."""

    def evaluate(name: str, cursor: str | None = None):
        data = evaluate_tick(pipeline, name, cursor)
        return data.run_requests, data.skip_message, data.cursor

    return evaluate


def backfill_of_the_job(pipeline, chunks: list[str]) -> None:
    """Create what `dagster job backfill` creates before it submits a run."""
    pipeline.instance.add_backfill(
        PartitionBackfill(
            "a",
            BulkActionStatus.REQUESTED,
            from_failure=False,
            tags={},
            backfill_timestamp=1.0,
            partition_names=chunks,
        )
    )


def test_new_objects_become_one_run_of_the_plan(pipeline, tick):
    pipeline.put(3)
    (request,), _, cursor = tick("caf_new_objects_my_source")
    assert request.run_key is None
    assert cursor == '{"after": ""}'
    assert pipeline.execute("caf_plan_my_source", run_config=request.run_config).success
    assert pipeline.ledger.chunks.account(SOURCE).claimed_objects == 3

    requests, why, _ = tick("caf_new_objects_my_source", cursor)
    assert (requests, why) == ([], "Nothing new.")


def test_a_tick_that_lists_opens_neither_store_nor_wallet(pipeline, monkeypatch):
    monkeypatch.setattr(wiring, "open_store", lambda *_: pytest.fail("the store was opened"))
    pipeline.put(1)
    on_jackal = replace(
        pipeline,
        settings=pipeline.settings.model_copy(update={"store": StoreSettings(kind="jackal")}),
    )
    (request,) = evaluate_tick(on_jackal, "caf_new_objects_my_source").run_requests
    assert request.run_config


@pytest.fixture
def ticks(pipeline, unruly_s3):
    return NewObjectsTicks(pipeline, unruly_s3)


@pytest.mark.parametrize("on_aws", [False, True])
def test_a_tick_lists_one_page_and_checks_versioning(ticks, monkeypatch, on_aws):
    monkeypatch.setattr("caf_pipeline.source.s3.source.is_aws", lambda client: on_aws)
    ticks.put("a b c d e")
    for _ in range(3):
        ticks.next_part()
        assert ticks.requests == ["bucket"] * on_aws + ["versioning", "listing"]
        ticks.requests.clear()


def test_a_new_object_is_planned_with_its_page(ticks):
    ticks.put("a b c e g h")
    ticks.plan({})
    assert ticks.next_part() is None
    assert ticks.cursor == '{"after": "b"}'
    ticks.put("f")
    assert ticks.next_part() is None
    assert ticks.next_part() == {"after": "e", "until": "g"}
    assert ticks.cursor == '{"after": "g"}'
    assert ticks.next_part() is None
    assert ticks.cursor == '{"after": ""}'


def test_several_new_pages_are_one_plan(
    ticks,
):
    ticks.put("a b y z")
    ticks.plan({})
    ticks.put("n0 n1 n2 n3 n4")
    assert [ticks.next_part() for _ in range(3)] == [None] * 3
    part = ticks.next_part()
    assert part == {"after": "b", "until": "y"}
    assert ticks.plan(part) == 9
    assert ticks.next_part() is None
    assert ticks.cursor == '{"after": ""}'


def test_new_pages_at_the_end_are_one_plan(ticks):
    ticks.put("a b c d")
    assert ticks.next_part() is None
    part = ticks.next_part()
    assert part == {"after": ""}
    assert ticks.cursor == '{"after": ""}'
    assert ticks.plan(part) == 4

    ticks.put("e f g h")
    assert [ticks.next_part() for _ in range(3)] == [None] * 3
    ticks.pipeline.bucket.delete("g")  # so that no page comes any more
    ticks.pipeline.bucket.delete("h")
    assert ticks.next_part() == {"after": "d"}


def test_a_new_part_ends_at_its_page_limit(ticks, monkeypatch):
    monkeypatch.setattr(new_objects_tick, "PART_PAGES", 3)
    ticks.put("a b c d e f g h")
    assert [ticks.next_part() for _ in range(3)] == [None, None, {"after": "", "until": "f"}]
    assert ticks.next_part() == {"after": "f"}

    ticks.set(watch_pages=4)  # what is asked for at each look is never more than one plan
    ticks.put("i")
    assert ticks.next_part() == {"after": "", "until": "h"}


def test_a_new_part_waits_for_another_plan(ticks):
    ticks.put("a b c d e")
    assert ticks.next_part() is None
    part = ticks.cursor
    run = start_run(ticks.pipeline, "caf_plan_my_source", DagsterRunStatus.STARTED)
    assert ticks.next_part() is None
    assert ticks.cursor == part
    ticks.pipeline.instance.delete_run(run)
    assert [ticks.next_part(), ticks.next_part()] == [None, {"after": ""}]


def test_an_interrupted_listing_continues_its_part(ticks, monkeypatch):
    ticks.set(watch_pages=10)
    ticks.put("a b c d e")
    monkeypatch.setattr(new_objects_tick, "MIN_TIME_LEFT", 2)  # as if half of the time had passed
    assert [ticks.next_part(), ticks.next_part(), ticks.next_part()] == [None, None, {"after": ""}]


def test_a_reset_cursor_plans_nothing_twice(ticks):
    ticks.put("a b c d e")
    ticks.next_part()
    rewound = ticks.cursor
    ticks.next_part()
    assert ticks.plan(ticks.next_part()) == 5
    ticks.cursor = rewound
    assert ticks.plan(ticks.next_part()) == 5
    assert ticks.next_part() is None
    assert ticks.cursor == '{"after": ""}'


def test_slow_arrivals_are_one_plan_per_interval(ticks, monkeypatch):
    ticks.put("a b d e g h")
    ticks.plan({})
    ticks.set(watch_interval_seconds=300)
    ticks.put("c")
    assert [ticks.next_part(), ticks.next_part()] == [None, None]
    assert ticks.cursor == '{"after": "d", "since": "b", "pages": 1}'
    ticks.put("f")
    assert [ticks.next_part() for _ in range(3)] == [None] * 3  # at the end of the bucket it waits
    assert ticks.cursor == '{"after": "f", "since": "b", "pages": 2}'
    monkeypatch.setattr(new_objects_tick, "time", SimpleNamespace(time=lambda: time.time() + 300))
    assert ticks.next_part() == {"after": "b"}
    assert ticks.cursor == '{"after": ""}'


def test_a_plan_from_the_future_delays_no_other(ticks, monkeypatch):
    ticks.put("a")
    ticks.plan({})
    ticks.set(watch_interval_seconds=300)
    ticks.put("b")
    monkeypatch.setattr(
        new_objects_tick, "time", SimpleNamespace(time=lambda: time.time() - 86_400)
    )
    assert ticks.next_part() == {"after": ""}


def test_a_source_with_reports_plans_its_listing(pipeline, tick):
    settings = pipeline.settings.sources[SOURCE].model_copy(
        update={"inventory": f"s3://d/{pipeline.bucket.name}/daily/"}
    )
    pipeline.settings.sources[SOURCE] = settings
    pipeline.put(1)
    (request,), _, _ = tick("caf_new_objects_my_source")
    assert request.run_config["ops"]["caf_my_source__s3_inventory"]["config"] == {
        "after": "",
        "list_bucket": True,
    }
    assert pipeline.execute("caf_plan_my_source", run_config=dict(request.run_config)).success


def test_a_chunk_is_relaunched_after_dying_in_its_last_step(pipeline, tick):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    archive_chunk(pipeline.run_context(), chunk, until=chunk_steps.load_locations)
    requests, _, _ = tick("caf_launch_chunks")
    assert [request.partition_key for request in requests] == [chunk]
    chunk_steps.release_staging(pipeline.run_context(), chunk)
    requests, _, _ = tick("caf_launch_chunks")
    assert [request.partition_key for request in requests] == [
        None
    ]  # only the question whether the source is complete


@pytest.mark.parametrize("status", [DagsterRunStatus.QUEUED, DagsterRunStatus.STARTED])
def test_nothing_is_planned_while_a_plan_is_queued_or_started(pipeline, tick, status):
    pipeline.put(1)
    run_id = start_run(pipeline, "caf_plan_my_source", status)
    requests, why, _ = tick("caf_new_objects_my_source")
    assert requests == []
    assert f"Run {run_id} is planning" in why


def test_an_unsubmitted_look_ends_after_a_day(pipeline, tick, monkeypatch):
    run_id = start_run(pipeline, LOOK_JOB, DagsterRunStatus.NOT_STARTED)
    tick("caf_launch_chunks")
    assert pipeline.instance.get_run_by_id(run_id).status is DagsterRunStatus.NOT_STARTED
    monkeypatch.setattr(launching, "UNSUBMITTED_SECONDS", -60)
    tick("caf_launch_chunks")
    assert pipeline.instance.get_run_by_id(run_id).status is DagsterRunStatus.FAILURE


def test_an_unsubmitted_plan_blocks_its_source_for_a_day(pipeline, tick, monkeypatch):
    pipeline.put(1)
    plan = "caf_plan_my_source"
    run_id = start_run(pipeline, plan, DagsterRunStatus.NOT_STARTED, **{SOURCE_TAG: SOURCE})
    of_others = start_run(
        pipeline, plan, DagsterRunStatus.NOT_STARTED, **{SOURCE_TAG: "of-another-project"}
    )
    status = lambda run_id=run_id: pipeline.instance.get_run_by_id(run_id).status  # noqa: E731
    tick("caf_launch_chunks")
    assert (
        status() is DagsterRunStatus.NOT_STARTED
    )  # the daemon may still go on with the tick that created it
    assert tick("caf_new_objects_my_source")[0] == []
    monkeypatch.setattr(launching, "UNSUBMITTED_SECONDS", -60)
    tick("caf_launch_chunks")
    assert status() is DagsterRunStatus.FAILURE
    assert status(of_others) is DagsterRunStatus.NOT_STARTED
    pipeline.instance.delete_run(of_others)  # it has the job's name, as no other project's has
    assert len(tick("caf_new_objects_my_source")[0]) == 1


@pytest.mark.parametrize(
    "cursor",
    sampled(
        [
            "{",
            "null",
            "[1]",
            '{"after": {"my-source": 99999999999999999999}, "source": ""}',
            '{"after": {"a": 1e999}, "source": ""}',
            '{"after": 5}',
            '{"after": {"a": "b"}, "source": ""}',
            '{"after": "key-000", "since": 5, "pages": 1}',
            '{"after": "key-000", "since": "z", "pages": 1}',
            '{"after": "key-000", "since": "a", "pages": -1}',
            '{"after": "key-000", "since": "a", "pages": "1"}',
            '{"after": "key-000", "since": "a", "pages": 1e999}',
            '{"after": "key-000", "since": "a"}',
            '{"told by each way": {"mail": {"a": 1}}}',
        ],
        every=3,
    ),
)
def test_an_invalid_cursor_counts_as_empty(pipeline, tick, cursor):
    pipeline.put(1)
    (request,), _, _ = tick("caf_new_objects_my_source", cursor)
    assert request.run_config["ops"]["caf_my_source__s3_inventory"]["config"]["after"] == ""
    (chunk,) = pipeline.plan()
    (request,), _, _ = tick("caf_launch_chunks", cursor)
    assert request.partition_key == chunk
    assert "0 conditions in 1 source" in tick("caf_watch_sources", cursor)[1]


def test_a_missing_bucket_fails_the_tick(pipeline, tick):
    pipeline.bucket.client.delete_bucket(Bucket=pipeline.bucket.name)
    with pytest.raises(BucketMissing, match="no bucket"):
        tick("caf_new_objects_my_source")


def test_planned_chunks_are_launched_up_to_the_limit(pipeline, tick):
    pipeline.put(60)
    chunks = pipeline.plan()
    assert len(chunks) > 4
    requests, _, _ = tick("caf_launch_chunks")
    assert [request.partition_key for request in requests] == chunks[:4]
    assert len({request.run_key for request in requests}) == 4


@pytest.mark.parametrize(
    "status", [DagsterRunStatus.QUEUED, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]
)
def test_a_chunk_that_has_a_run_is_not_launched_again(pipeline, tick, status):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    start_run(pipeline, ARCHIVE, status, **{"dagster/partition": chunk})
    requests, why, _ = tick("caf_launch_chunks")
    assert requests == []
    assert why.startswith("1 under way, 0 waiting")


def test_a_chunk_of_a_backfill_is_not_launched(pipeline, tick):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    backfill_of_the_job(pipeline, [chunk])
    requests, why, _ = tick("caf_launch_chunks")
    assert requests == []
    assert why.startswith("0 under way, 1 waiting")


def test_new_chunks_are_launched_before_a_job_backfill(pipeline, tick):
    pipeline.put(60)
    *planned, new = pipeline.plan()
    backfill_of_the_job(pipeline, planned)
    for chunk in planned:
        start_run(
            pipeline,
            ARCHIVE,
            DagsterRunStatus.QUEUED,
            **{"dagster/partition": chunk, "dagster/backfill": "a"},
        )
    assert len(planned) > pipeline.settings.runs.max_in_flight
    (request,), _, _ = tick("caf_launch_chunks")
    assert (request.partition_key, request.tags["dagster/priority"]) == (new, "1")
    jobs = [
        f"caf_{what}_my_source" for what in ("plan", "audit", "prove", "repair", "repair_chunk")
    ]
    assert {
        pipeline.defs.resolve_job_def(job).tags["dagster/priority"]
        for job in (*jobs, "caf_prune_events", "caf_restore")
    } == {"1"}
    assert (
        "dagster/priority" not in pipeline.defs.resolve_job_def(ARCHIVE).tags
    )  # whose runs may be the backfill's


def test_a_failed_chunk_of_a_backfill_is_launched(pipeline, tick):
    pipeline.put(60)
    failed, *others = pipeline.plan()
    backfill_of_the_job(pipeline, [failed, *others])
    start_run(
        pipeline,
        ARCHIVE,
        DagsterRunStatus.FAILURE,
        **{"dagster/partition": failed, "dagster/backfill": "a"},
    )
    (request,), _, _ = tick("caf_launch_chunks")
    assert request.partition_key == failed


def test_a_lost_retry_does_not_keep_a_backfill_open(pipeline, tick, monkeypatch):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    backfill_of_the_job(pipeline, [chunk])
    lost, retried = (
        {"dagster/backfill": "a", "dagster/will_retry": "true"},
        {"dagster/auto_retry_run_id": "b"},
    )
    runs = [
        start_run(pipeline, ARCHIVE, DagsterRunStatus.FAILURE, **tags)
        for tags in (lost, lost | retried)
    ]
    waiting = lambda: [  # noqa: E731
        pipeline.instance.get_run_by_id(run).tags["dagster/will_retry"] for run in runs
    ]
    tick("caf_launch_chunks")
    assert waiting() == ["true", "true"]  # Dagster may still retry what has just failed
    monkeypatch.setattr(launching, "RETRY_LOST_SECONDS", -60)
    goes_on = start_run(pipeline, ARCHIVE, DagsterRunStatus.STARTED, **{"dagster/backfill": "a"})
    tick("caf_launch_chunks")
    assert waiting() == ["true", "true"]
    pipeline.instance.report_run_failed(pipeline.instance.get_run_by_id(goes_on))
    tick("caf_launch_chunks")
    assert waiting() == ["false", "true"]
    assert not any(
        pipeline.instance.get_run_by_id(run).is_complete_and_waiting_to_retry for run in runs
    )


def test_lost_retries_of_another_project_are_left_alone(pipeline, tick, monkeypatch):
    monkeypatch.setattr(launching, "RETRY_LOST_SECONDS", -60)
    backfill_of_the_job(pipeline, ["a-partition-of-theirs"])
    lost = {"dagster/backfill": "a", "dagster/will_retry": "true"}
    assets = {
        "theirs": AssetKey(["theirs", "caf_chunk"]),
        "ours": AssetKey(["my-source", "caf_chunk"]),
    }
    runs = {
        name: pipeline.instance.add_run(
            DagsterRun(
                job_name="__ASSET_JOB",
                status=DagsterRunStatus.FAILURE,
                tags=lost,
                asset_selection=frozenset({key}),
            )
        ).run_id
        for name, key in assets.items()
    }
    runs["their job"] = pipeline.instance.add_run(
        DagsterRun(job_name="archive_theirs", status=DagsterRunStatus.FAILURE, tags=lost)
    ).run_id
    tick("caf_launch_chunks")
    retries = {
        name: pipeline.instance.get_run_by_id(run).tags["dagster/will_retry"]
        for name, run in runs.items()
    }
    assert retries == {"theirs": "true", "ours": "false", "their job": "true"}


def test_a_failed_chunk_waits_before_its_next_launch(pipeline, tick, monkeypatch):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    fail_run(pipeline, chunk)
    monkeypatch.setattr(
        launching, "FIRST_WAIT_SECONDS", launching.LONGEST_WAIT_SECONDS
    )  # longer than this test takes
    requests, why, _ = tick("caf_launch_chunks")
    assert requests == []
    assert why.startswith("0 under way, 1 waiting")
    with (
        monkeypatch.context() as patched
    ):  # the clock was a day ahead when the run failed, and was set right
        patched.setattr(launching, "time", SimpleNamespace(time=lambda: time.time() - 86_400))
        requests, _, _ = tick("caf_launch_chunks")
        assert [request.partition_key for request in requests] == [chunk]
    monkeypatch.setattr(launching, "FIRST_WAIT_SECONDS", 0)
    requests, _, _ = tick("caf_launch_chunks")
    assert [request.partition_key for request in requests] == [chunk]


def test_a_chunk_is_parked_after_too_many_failures(pipeline, tick, monkeypatch):
    from caf_pipeline.steps.chunk_steps import unpark

    monkeypatch.setattr(launching, "FIRST_WAIT_SECONDS", 0)
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    for _ in range(pipeline.settings.runs.attempts):
        fail_run(pipeline, chunk, begun=False)  # no worker was there
    (request,), _, _ = tick("caf_launch_chunks")
    assert request.partition_key == chunk
    for _ in range(pipeline.settings.runs.attempts):
        fail_run(pipeline, chunk)
    tick("caf_launch_chunks")
    parked = pipeline.ledger.chunks.get(chunk)
    assert parked.state is ChunkState.PARKED
    assert "failed too often" in parked.reason

    unpark(pipeline.run_context(), chunk)
    requests, _, _ = tick("caf_launch_chunks")
    assert [request.partition_key for request in requests] == [chunk]


@pytest.mark.thorough
def test_failures_before_unparking_do_not_park_again(pipeline, tick, monkeypatch):
    monkeypatch.setattr(launching, "FIRST_WAIT_SECONDS", 0)
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    for _ in range(pipeline.settings.runs.attempts):
        fail_run(pipeline, chunk)
    # The sensor's process died right after this move.
    chunk_steps.park(pipeline.run_context(), chunk, "its runs failed too often")
    chunk_steps.unpark(pipeline.run_context(), chunk)
    for _ in range(pipeline.settings.runs.attempts):
        requests, _, _ = tick("caf_launch_chunks")
        assert [request.partition_key for request in requests] == [chunk]
        fail_run(pipeline, chunk)
    assert tick("caf_launch_chunks")[0] == []
    assert pipeline.ledger.chunks.get(chunk).state is ChunkState.PARKED


def test_a_chunk_whose_runs_are_killed_is_parked(pipeline, tick):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    leased = Fatal(call(HeldLease.__enter__), moment=2)
    for number in range(pipeline.settings.runs.attempts):
        requests, _, _ = tick("caf_launch_chunks")
        assert [request.partition_key for request in requests] == [chunk]
        packing = partial(_pack, pipeline.settings, chunk, f"run-{number}")
        with Process(packing, fatal=leased) as process:
            assert process.wait() == KILLED
        (lease,) = pipeline.ledger.leases.list()
        assert pipeline.ledger.leases.end(lease.name, lease.epoch)  # in place of its expiry
    requests, why, _ = tick("caf_launch_chunks")
    assert requests == []
    assert "1 parked now" in why
    assert pipeline.ledger.chunks.get(chunk).state is ChunkState.PARKED


def _pack(settings, chunk, run, moments):
    with contextlib.closing(wiring.open_run_context(settings, SOURCE, run=run)) as context:
        chunk_steps.pack_chunk(context, chunk)


def test_an_outage_parks_no_chunk(pipeline, monkeypatch, unruly_s3):
    source = pipeline.settings.sources[SOURCE].model_copy(
        update={"endpoint_url": unruly_s3.endpoint}
    )
    packing = pipeline.settings.packing.model_copy(update={"request_attempts": 1})
    settings = pipeline.settings.model_copy(
        update={"sources": {SOURCE: source}, "packing": packing}
    )
    pipeline = replace(pipeline, settings=settings)
    monkeypatch.setattr(RetryPolicy, "calculate_delay", lambda *_: 0.0)
    pipeline.put(2)
    (chunk,) = pipeline.plan()
    unruly_s3.fail(503, "SlowDown", kind=None)
    for _ in range(settings.runs.attempts + 1):
        assert not pipeline.execute(ARCHIVE, partition_key=chunk).success
    assert pipeline.ledger.chunks.get(chunk).failures == []
    with monkeypatch.context() as patched:  # outages lengthen the pause, too: 32 minutes now
        patched.setattr(launching, "time", SimpleNamespace(time=lambda: time.time() + 31 * 60))
        reason = evaluate_tick(pipeline, "caf_launch_chunks").skip_message
        assert reason.startswith("0 under way, 1 waiting, 0 parked now")

    monkeypatch.setattr(launching, "FIRST_WAIT_SECONDS", 0)
    for _ in range(settings.runs.attempts - 1):
        fail_run(pipeline, chunk)  # killed, as it were
    (request,) = evaluate_tick(pipeline, "caf_launch_chunks").run_requests
    assert request.partition_key == chunk
    fail_run(pipeline, chunk)
    assert "1 parked now" in evaluate_tick(pipeline, "caf_launch_chunks").skip_message

    chunk_steps.unpark(pipeline.run_context(), chunk)
    unruly_s3.well_behaved()
    assert pipeline.execute(ARCHIVE, partition_key=chunk).success
    assert pipeline.ledger.chunks.get(chunk).state is ChunkState.LOCATED
    assert pipeline.ledger.chunks.account(SOURCE).skipped == {}


def test_a_chunk_without_partition_is_registered_and_launched(pipeline, tick):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    pipeline.instance.delete_dynamic_partition("caf_my-source_chunks", chunk)
    requests, _, _ = tick("caf_launch_chunks")
    assert [request.partition_key for request in requests] == [chunk]
    assert pipeline.instance.has_dynamic_partition("caf_my-source_chunks", chunk)


def test_located_chunks_are_not_launched(pipeline, tick):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    assert pipeline.execute(ARCHIVE, partition_key=chunk).success
    requests, _, _ = tick("caf_launch_chunks")
    assert chunk not in [request.partition_key for request in requests]


def test_completeness_is_checked_once_after_the_last_chunk(pipeline, tick):
    pipeline.put(12)
    first, second = pipeline.plan()
    assert pipeline.execute(ARCHIVE, partition_key=first).success
    (request,), _, _ = tick("caf_launch_chunks")
    assert (request.job_name, request.partition_key) == (ARCHIVE, second)

    assert pipeline.execute(ARCHIVE, partition_key=second).success
    (request,), _, _ = tick("caf_launch_chunks")
    assert request.job_name == "caf_audit_my_source"
    assert pipeline.execute("caf_audit_my_source").success
    assert tick("caf_launch_chunks")[0] == []


def test_an_incomplete_source_is_checked_after_another_located_chunk(pipeline, tick):
    pipeline.put(2)
    (chunk,) = pipeline.plan()
    pipeline.bucket.delete("key-000")  # skipped, so that the source stays incomplete
    assert pipeline.execute(ARCHIVE, partition_key=chunk).success
    (request,), _, _ = tick("caf_launch_chunks")
    # Dagster on SQLite keeps the second of a check: within the one of the chunk it would be asked
    # once more
    next_second()
    (check,) = pipeline.execute(request.job_name).get_asset_check_evaluations()
    assert not check.passed
    assert tick("caf_launch_chunks")[0] == []
