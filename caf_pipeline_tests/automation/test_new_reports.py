"""The sensor with inventory reports: each report is planned once, and no object is missed."""

from datetime import UTC, datetime, timedelta

import pytest
from dagster import DagsterEvent, DagsterEventType, DagsterRunStatus

from caf_pipeline.automation import launching
from caf_pipeline.naming import REPORT_TAG
from caf_pipeline.steps import inventories, planning
from caf_pipeline_tests.support.inventory_reports import ReportWriter
from caf_pipeline_tests.support.pipeline_runs import SOURCE, failure_of, start_run, with_source
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.s3_server import make_bucket
from caf_pipeline_tests.support.ticks import evaluate_tick

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

DAY = timedelta(days=1)
NOW = datetime.now(UTC).replace(microsecond=0)
YESTERDAY = NOW - DAY
PLAN = "caf_plan_my_source"


@pytest.fixture
def reported(pipeline):
    """The pipeline with an object and inventory reports."""
    pipeline.put(1)
    reports = ReportWriter(
        pipeline.bucket.client, pipeline.bucket.name, make_bucket(pipeline.bucket.endpoint).name
    )
    return with_source(pipeline, inventory=reports.folder), reports


def tick(pipeline, cursor=None, **options):
    """Evaluate a tick; return (report, request).

    The report is "" for a part of the bucket; without a request it is None, with the reason.
    """
    data = evaluate_tick(pipeline, "caf_new_objects_my_source", cursor, **options)
    if not data.run_requests:
        return None, data.skip_message
    (request,) = data.run_requests
    assert request.run_key is None
    return request.run_config["ops"]["caf_my_source__s3_inventory"]["config"].get(
        "report", ""
    ), request


def execute(pipeline, request):
    return pipeline.execute(PLAN, run_config=dict(request.run_config), tags=dict(request.tags))


def fail_plan(pipeline, report: str) -> str:
    run_id = start_run(pipeline, PLAN, DagsterRunStatus.STARTING, **{REPORT_TAG: report})
    pipeline.instance.report_dagster_event(
        DagsterEvent(DagsterEventType.RUN_START.value, PLAN), run_id
    )
    pipeline.instance.report_run_failed(pipeline.instance.get_run_by_id(run_id))
    return run_id


def test_a_new_report_is_planned_once(reported):
    pipeline, reports = reported
    name = reports.write(YESTERDAY)
    result, request = tick(pipeline)
    assert result == name
    assert execute(pipeline, request).success
    assert pipeline.ledger.content.last_inventory(SOURCE) == YESTERDAY
    assert pipeline.ledger.chunks.account(SOURCE).claimed_objects == 1
    assert tick(pipeline) == (None, "Nothing new.")
    pipeline.put(2)  # written since
    assert tick(pipeline)[0] == ""


def test_planning_a_report_keeps_the_cursor(reported):
    pipeline, reports = reported
    reports.write(YESTERDAY)
    cursor = '{"after": "key-000"}'
    data = evaluate_tick(pipeline, "caf_new_objects_my_source", cursor)
    assert (len(data.run_requests), data.cursor) == (1, cursor)


@pytest.mark.parametrize("missing", ["manifest.json", "manifest.checksum"])
def test_an_unfinished_report_is_not_planned(reported, missing):
    pipeline, reports = reported
    name = reports.write(YESTERDAY)
    key = f"{reports.prefix}{name}/{missing}"
    body = reports.client.get_object(Bucket=reports.destination, Key=key)["Body"].read()
    reports.client.delete_object(Bucket=reports.destination, Key=key)
    assert tick(pipeline)[0] == ""
    reports.put(key, body)
    assert tick(pipeline)[0] == name


def test_a_report_older_than_a_listing_is_not_planned(reported):
    pipeline, reports = reported
    reports.write(YESTERDAY)
    planning.cut_plan(pipeline.run_context(), inventories.take_inventory(pipeline.run_context()))
    assert tick(pipeline) == (None, "Nothing new.")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["2026-13-45T99-99Z", f"{NOW + 900 * DAY:%Y-%m-%dT%H-%MZ}"], ids=["no date", "to come"]
)
def test_a_misnamed_report_folder_hides_no_report(reported, name):
    pipeline, reports = reported
    old = reports.write(YESTERDAY - DAY)
    assert execute(pipeline, tick(pipeline)[1]).success
    read = lambda file: reports.client.get_object(  # noqa: E731
        Bucket=reports.destination, Key=f"{reports.prefix}{old}/{file}"
    )
    reports.write_manifest(name, read("manifest.json")["Body"].read())
    assert tick(pipeline) == (None, "Nothing new.")
    assert tick(pipeline)[0] is None
    new = reports.write(YESTERDAY)
    assert tick(pipeline)[0] == new


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sourceBucket": "another"}, "is of bucket 'another'"),
        ({"fileSchema": ""}, "has no column Bucket, Key, Size, LastModifiedDate, ETag"),
        ({"creationTimestamp": str(int((NOW + 9 * DAY).timestamp() * 1000))}, "is still to come"),
    ],
)
def test_an_unusable_report_does_not_stop_the_listing(reported, changes, why):
    pipeline, reports = reported
    reports.write(YESTERDAY, **changes)
    assert tick(pipeline)[0] == ""
    planning.cut_plan(
        pipeline.run_context(), inventories.take_inventory(pipeline.run_context(), until=b"z")
    )
    name, reason = tick(pipeline)
    assert name is None
    assert "inventory report s3://" in reason
    assert why in reason


def test_a_missing_report_bucket_does_not_stop_the_listing(reported):
    pipeline, _ = reported
    pipeline = with_source(pipeline, inventory=f"s3://no-such-bucket/{pipeline.bucket.name}/daily/")
    assert tick(pipeline)[0] == ""
    planning.cut_plan(
        pipeline.run_context(), inventories.take_inventory(pipeline.run_context(), until=b"z")
    )
    assert "'no-such-bucket'" in tick(pipeline)[1]


@pytest.mark.parametrize("status", [DagsterRunStatus.QUEUED, DagsterRunStatus.STARTED])
def test_a_new_report_waits_for_an_unfinished_plan(reported, status):
    pipeline, reports = reported
    reports.write(YESTERDAY)
    run_id = start_run(pipeline, PLAN, status)
    name, reason = tick(pipeline)
    assert name is None
    assert f"Run {run_id} is planning" in reason


def test_a_failed_report_is_retried_then_left_to_the_schedule(reported, monkeypatch):
    pipeline, reports = reported
    name = reports.write(YESTERDAY)
    attempts = pipeline.settings.runs.attempts
    run_id = fail_plan(pipeline, name)
    monkeypatch.setattr(
        launching, "FIRST_WAIT_SECONDS", launching.LONGEST_WAIT_SECONDS
    )  # longer than this test takes
    assert tick(pipeline)[0] == ""
    planning.cut_plan(
        pipeline.run_context(), inventories.take_inventory(pipeline.run_context(), until=b"z")
    )
    reason = tick(pipeline)[1]
    assert f"Run {run_id}" in reason
    assert name in reason
    monkeypatch.setattr(launching, "FIRST_WAIT_SECONDS", 0)
    for _ in range(attempts - 1):
        assert tick(pipeline)[0] == name
        fail_plan(pipeline, name)
    assert "daily schedule" in tick(pipeline)[1]
    new = reports.write(NOW)
    assert tick(pipeline)[0] == new


def test_a_report_is_planned_again_after_a_ledger_restore(reported, monkeypatch):
    pipeline, reports = reported
    name = reports.write(YESTERDAY)
    assert execute(pipeline, tick(pipeline)[1]).success
    with connected(pipeline.ledger.database) as connection:
        connection.execute("DELETE FROM inventories")
    monkeypatch.setattr(launching, "FIRST_WAIT_SECONDS", 0)
    assert tick(pipeline)[0] == name


def test_a_damaged_report_file_fails_its_run(reported):
    pipeline, reports = reported
    name = reports.write(YESTERDAY)
    reports.put(reports.written[0], b"damaged")
    report, request = tick(pipeline)
    assert report == name
    result = execute(pipeline, request)
    assert "manifest" in failure_of(result).description
    assert tick(pipeline)[0] == ""  # after a pause


def through(pipeline, unruly_s3):
    """Return the pipeline with its S3 behind the proxy, and the list of its listings."""
    requests = []
    unruly_s3.order(
        lambda _, answer: answer,
        kind="listing",
        when=lambda one: requests.append(one.query) is not None,
    )
    return with_source(pipeline, endpoint_url=unruly_s3.endpoint), requests


def test_finding_a_new_report_takes_one_request(reported, unruly_s3):
    pipeline, requests = through(reported[0], unruly_s3)
    reports = reported[1]
    unruly_s3.page_keys = 30
    names = [reports.write(NOW - days * DAY) for days in range(12)]
    for number in range(40):
        reports.put(f"{reports.prefix}data/{number}.parquet", b"")
    source = pipeline.run_context().objects
    assert source.find_reports(None) == names
    assert source.find_reports(NOW - 3 * DAY) == names[:3]
    assert source.find_reports(NOW) == []
    assert len(requests) == 3


@pytest.mark.thorough
def test_a_hanging_report_bucket_does_not_stop_the_listing(reported, unruly_s3):
    pipeline, _ = through(reported[0], unruly_s3)
    unruly_s3.hang(
        5, kind="listing", when=lambda one: one.query.get("prefix") == reported[1].prefix
    )
    result, request = tick(pipeline, tick_seconds=10)
    assert (result, len(request.run_config)) == ("", 1)
