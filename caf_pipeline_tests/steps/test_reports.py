"""Archives from inventory reports, alone or in turn with listings."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from caf_pipeline.cli import plans
from caf_pipeline.errors import ReportRefused
from caf_pipeline.inventory.snapshot import REPORT_LAG, read_objects, read_snapshot
from caf_pipeline.source.s3.listing import Listing
from caf_pipeline.steps import inventories, planning
from caf_pipeline.steps.preview import preview_plan
from caf_pipeline.wiring import open_run_context
from caf_pipeline_tests.support.current_content import A, B, current, next_second, packed
from caf_pipeline_tests.support.inventory_reports import FORMATS, ReportWriter, listed_rows
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import (
    a_run_context,
    account_for_plan,
    archive_chunk,
    archive_everything,
)
from caf_pipeline_tests.support.s3_server import make_bucket

LONG_AGO = datetime(2026, 1, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)


@pytest.fixture
def reports(s3_server, new_bucket):
    return ReportWriter(new_bucket.client, new_bucket.name, make_bucket(s3_server).name)


@pytest.fixture
def context(tmp_path, new_bucket, reports, ledger):
    return a_run_context(tmp_path, new_bucket.source(inventory=reports.folder), ledger)


def plan_report(context, name=""):
    return planning.cut_plan(context, inventories.take_report(context, name)[0], new_archive=True)


def archive_report(context, name=""):
    """Archive what is new in a report; return the plan."""
    report = plan_report(context, name)
    for chunk in report.chunks:
        archive_chunk(context, chunk.name)
    return report


def written(reports, moment: datetime, **keys: datetime):
    """Write a report of this time with these keys and their times."""
    rows = {row["key"]: row for row in listed_rows(reports.client, reports.name)}
    return reports.write(
        moment,
        rows=[rows[key] | {"last_modified_date": modified} for key, modified in keys.items()],
    )


@pytest.mark.thorough
@pytest.mark.parametrize("versions", [True, False], ids=["versions", "no versions"])
@pytest.mark.parametrize("file_format", FORMATS)
def test_report_and_listing_in_turn_find_nothing_new(
    context, new_bucket, reports, file_format, versions
):
    if versions:
        new_bucket.keep_versions()
    for key, body in (("a", A), ("a", B), ("b c+d/é", A), ("e", b"")):
        new_bucket.put(key, body)
    reports.file_format = file_format
    reports.write(datetime.now(UTC).replace(microsecond=0) - DAY)
    assert archive_report(context).chunks
    next_second()
    listing = planning.cut_plan(context, inventories.take_inventory(context))
    assert (listing.chunks, listing.exceptions, listing.comparison.requests) == ([], 0, 0)
    next_second()
    reports.write()
    again = plan_report(context)
    assert (again.chunks, again.exceptions, again.comparison.requests, packed(context)) == (
        [],
        0,
        0,
        3,
    )
    accounting = account_for_plan(context, again)
    assert (accounting.located, accounting.older, accounting.gone) == (3, 0, 0)


def test_snapshot_names_its_report_and_has_its_time(context, new_bucket, reports):
    new_bucket.put("a", A)
    name = reports.write(LONG_AGO)
    snapshot, taken = inventories.take_report(context)
    assert read_snapshot(snapshot.path) == snapshot
    assert (snapshot.taken_at, snapshot.listed_at, snapshot.complete) == (LONG_AGO, LONG_AGO, True)
    assert (snapshot.report, taken.report.file_count) == (f"{reports.folder}{name}/", 3)
    assert "days old" in taken.warning
    reports.write()
    assert inventories.take_report(context)[1].warning == ""


def test_report_from_future_clock_has_no_age(context, new_bucket, reports, monkeypatch, capsys):
    new_bucket.put("a", A)
    monkeypatch.setattr(Listing, "clock", lambda self: datetime.now(UTC) + DAY)
    reports.write(datetime.now(UTC).replace(microsecond=0) + timedelta(hours=2))
    snapshot, taken = inventories.take_report(context)
    assert taken.age == timedelta(0)
    plans._print_preview(preview_plan(context, snapshot), public=True)
    assert f"of {snapshot.taken_at:%Y-%m-%d %H:%M:%S} UTC, 0 seconds old" in capsys.readouterr().out


def test_unplanned_source_is_previewed_from_its_report(context, new_bucket, reports, ledger):
    new_bucket.put("a", A)
    reports.write()
    settings = context.settings.model_copy(update={"sources": {"new": context.source_settings}})
    new = open_run_context(
        settings, "new", run="a preview", ledger=ledger, objects=context.objects, register=False
    )
    snapshot, _ = inventories.take_report(new, to_plan=False)
    assert preview_plan(new, snapshot).estimate.statistics.objects == 1
    assert ledger.lookup.sources() == ["src"]


def test_bucket_of_report_is_asked_once_for_versioning(context, new_bucket, reports, monkeypatch):
    calls, keeps_versions = [], Listing.keeps_versions
    monkeypatch.setattr(
        Listing, "keeps_versions", lambda listing: calls.append(1) or keeps_versions(listing)
    )
    new_bucket.put("a", A)
    reports.write()
    inventories.take_report(context)
    assert calls == [1]


def test_nothing_but_the_snapshot_is_left_on_the_disk(context, new_bucket, reports):
    new_bucket.put("a", A)
    reports.write()
    snapshot, _ = inventories.take_report(context)
    assert list(context.inventories().iterdir()) == [snapshot.path]


def test_old_report_does_not_prolong_max_wait(context, new_bucket, reports):
    new_bucket.put("k", A)
    now = datetime.now(UTC).replace(microsecond=0)
    written(reports, now - 3 * DAY, k=now - 9 * DAY)
    terms = {"min_chunk_size": 1 << 20, "max_wait": 7 * 24 * 3600}
    sources = {"src": context.source_settings.model_copy(update=terms)}
    waiting = replace(context, settings=context.settings.model_copy(update={"sources": sources}))
    snapshot, _ = inventories.take_report(waiting)
    assert preview_plan(waiting, snapshot).waiting is None
    assert [chunk.object_count for chunk in planning.cut_plan(waiting, snapshot).chunks] == [1]


# --- what a report tells, and what not ------------------------------------------------------------


@pytest.mark.thorough
def test_key_missing_in_later_report_is_gone(context, new_bucket, reports):
    new_bucket.put("kept", A)
    new_bucket.put("k", B)
    written(reports, LONG_AGO, kept=LONG_AGO - DAY, k=LONG_AGO - DAY)
    archive_report(context)
    written(reports, LONG_AGO + DAY, kept=LONG_AGO - DAY)
    assert archive_report(context).exceptions == 1
    currency = current(context)[1]
    assert (currency.is_current, currency.gone_at, currency.last_seen) == (
        False,
        LONG_AGO + DAY,
        LONG_AGO,
    )
    assert current(context, "kept")[1].is_current


@pytest.mark.thorough
def test_what_was_archived_since_a_report_is_not_gone(context, new_bucket, reports):
    new_bucket.put("a", A)
    written(reports, datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1), a=LONG_AGO)
    new_bucket.put("k", B)  # as the sensor lists a part of the bucket
    planned = planning.cut_plan(
        context, inventories.take_inventory(context, after=b"b"), new_archive=True
    )
    archive_chunk(context, planned.chunks[0].name)
    report = archive_report(context)
    assert report.exceptions == 0
    assert current(context)[1].is_current
    accounting = account_for_plan(context, report)
    assert (accounting.located, accounting.older, accounting.gone) == (1, 0, 0)


@pytest.mark.thorough
def test_object_archived_since_is_not_gone_after_restore(context, new_bucket, reports, ledger):
    new_bucket.put("k", B)
    archive_everything(context)
    with connected(ledger.database) as connection:
        connection.execute("DELETE FROM inventories")  # as after a rebuild
    reports.write(datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1), rows=[])
    assert archive_report(context).exceptions == 0
    assert current(context)[1].is_current


@pytest.mark.thorough
@pytest.mark.parametrize(("before", "gone"), [(REPORT_LAG / 2, False), (REPORT_LAG * 2, True)])
def test_absence_of_recent_object_in_report_proves_nothing(
    context, new_bucket, reports, before, gone
):
    new_bucket.put("k", A)
    written(reports, LONG_AGO, k=LONG_AGO + DAY - before)
    archive_report(context)
    reports.write(LONG_AGO + DAY, rows=[])
    report = archive_report(context)
    assert (current(context)[1].gone_at is not None) == gone
    assert account_for_plan(context, report).gone == gone


@pytest.mark.thorough
def test_content_replaced_just_before_report_is_older(context, new_bucket, reports):
    for body, moment in (
        (A, LONG_AGO + DAY - REPORT_LAG / 2),
        (B, LONG_AGO + DAY - REPORT_LAG / 3),
    ):
        new_bucket.put("k", body)
        written(reports, moment, k=moment)
        report = archive_report(context)
    account_for_plan(context, report)
    content = context.ledger.chunks.account("src").content
    assert (content.current_objects, content.older_objects, content.uncounted_objects) == (1, 1, 0)


@pytest.mark.thorough
def test_older_content_in_report_does_not_supersede_newer(context, new_bucket, reports):
    new_bucket.keep_versions()
    new_bucket.put("k", A)
    rows = listed_rows(reports.client, reports.name)
    reports.write(datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1), rows=rows)
    next_second()
    new_bucket.put("k", B)
    new_bucket.put("l", B)
    planned = planning.cut_plan(
        context, inventories.take_inventory(context, until=b"k"), new_archive=True
    )
    archive_chunk(context, planned.chunks[0].name)
    report = archive_report(context)
    assert (current(context)[0], current(context)[1].is_current) == (B, True)
    assert account_for_plan(context, report).older == 0


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("later", ["a listing", "a report"])
def test_outdated_report_is_refused_and_changes_nothing(context, new_bucket, reports, later):
    new_bucket.put("k", A)
    name = reports.write(LONG_AGO, rows=[])
    if later == "a listing":
        archive_everything(context)
    else:
        reports.write(LONG_AGO + DAY)
        archive_report(context)
    before = state_of(context)
    with pytest.raises(ReportRefused, match=f"{LONG_AGO:%Y-%m-%d %H:%M:%S}"):
        inventories.take_report(context, name)
    assert state_of(context) == before
    assert current(context)[1].is_current


def state_of(context):
    """Return the state that a refused report must not change."""
    files = {path.name: path.read_bytes() for path in context.inventories().iterdir()}
    return (
        files,
        context.ledger.chunks.account("src"),
        [chunk.name for chunk in context.ledger.chunks.list("src")],
    )


def test_the_same_report_may_be_planned_again(context, new_bucket, reports):
    new_bucket.put("k", A)
    reports.write()
    assert archive_report(context).chunks
    again = archive_report(context)
    assert (again.chunks, again.exceptions, packed(context)) == ([], 0, 1)


def test_damaged_report_leaves_old_state_unchanged(context, new_bucket, reports):
    new_bucket.put("k", A)
    reports.write(LONG_AGO)
    archive_report(context)
    before = state_of(context)
    reports.write(LONG_AGO + DAY)
    reports.put(reports.written[-1], b"damaged")
    with pytest.raises(ReportRefused, match="has 7 bytes"):
        inventories.take_report(context)
    assert state_of(context) == before


def test_two_rows_of_the_same_object_are_one(context, new_bucket, reports):
    new_bucket.put("k", A)
    rows = listed_rows(reports.client, reports.name)
    reports.write(rows=rows * 5)
    snapshot, _ = inventories.take_report(context)
    assert [obj.key for obj in read_objects(snapshot.path)] == [b"k"]
    assert (snapshot.object_count, snapshot.object_bytes) == (1, len(A))
