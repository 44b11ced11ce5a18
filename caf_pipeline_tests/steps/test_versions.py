"""Archives of all versions: each has a row, and only the bucket's latest is current."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from hashlib import sha256

import pyarrow.parquet as pq
import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import NotLocated, ReportRefused, SettingsError, SourceDenied
from caf_pipeline.inventory.objects import VersionCounts
from caf_pipeline.inventory.snapshot import read_objects, read_snapshot
from caf_pipeline.source.s3.listing import Listing
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.steps.preview import preview_plan
from caf_pipeline_tests.support.current_content import A, B, current, next_second, packed
from caf_pipeline_tests.support.deletion_lists import Answer, pass_window
from caf_pipeline_tests.support.inventory_reports import (
    FORMATS,
    OF_VERSIONS,
    SCHEMA,
    ReportWriter,
    listed_rows,
)
from caf_pipeline_tests.support.ledger_rows import seal_facts
from caf_pipeline_tests.support.listing_entries import version
from caf_pipeline_tests.support.run_contexts import (
    a_run_context,
    account_for_plan,
    archive_chunk,
    archive_everything,
    object_bytes,
    plan,
)
from caf_pipeline_tests.support.s3_server import (
    Bucket,
    ScriptedAnswer,
    client_for,
    make_bucket,
    s3_error,
)
from caf_pipeline_tests.support.several_folders import SeveralFolders
from caf_pipeline_tests.support.tiers import sampled

DAY = timedelta(days=1)


@pytest.fixture
def bucket(new_bucket):
    new_bucket.keep_versions()
    return new_bucket


@pytest.fixture
def reports(s3_server, bucket):
    return ReportWriter(bucket.client, bucket.name, make_bucket(s3_server).name)


@pytest.fixture
def run_context(tmp_path, bucket, reports, ledger):
    """Return a run context with these settings, always with the same ledger and folder."""

    def opened(versions="all", *, store=None, **settings):
        source = {"bucket": "b", "public": True, "versions": versions, **settings}
        objects = bucket.source(all_versions=versions == "all", inventory=reports.folder)
        return a_run_context(tmp_path, objects, ledger, store=store, sources={"src": source})

    return opened


@pytest.fixture
def context(run_context):
    return run_context()


@pytest.mark.thorough
@pytest.mark.parametrize("take", [inventories.take_inventory, inventories.take_report])
@pytest.mark.parametrize("come_to", [plan, archive_everything])
def test_lost_versioning_permission_archives_nothing_again(
    run_context, reports, monkeypatch, take, come_to
):
    for key in "abc":
        reports.client.put_object(Bucket=reports.name, Key=key, Body=b"1")
    come_to(context := run_context("current"))
    reports.write(datetime.now(UTC).replace(microsecond=0))
    next_second()
    monkeypatch.setattr(
        Listing, "_versioning", lambda _: {"ResponseMetadata": {"HTTPStatusCode": 403}}
    )
    with pytest.raises(SourceDenied) as caught:
        take(context)
    assert caught.value.hint == "grant s3:GetBucketVersioning"


def archive_report(context):
    report = planning.cut_plan(context, inventories.take_report(context)[0], new_archive=True)
    for chunk in report.chunks:
        archive_chunk(context, chunk.name)
    return report


def scripted_source(server):
    return Bucket(server.endpoint, "bucket-of-script", client_for(server.endpoint)).source(
        all_versions=True
    )


def delete_all_but_the_marker(bucket, key):
    version_id = bucket.put(key, A)["VersionId"]
    bucket.delete(key)
    bucket.client.delete_object(Bucket=bucket.name, Key=key, VersionId=version_id)


def versions_of(context, key="k"):
    return {row.object_version for row in context.ledger.lookup.versions("src", key, 100)[0]}


@pytest.mark.thorough
@pytest.mark.parametrize("given_back", ["by withdrawing", "by closing early"])
def test_older_version_stays_old_after_latest_claim_is_released(run_context, bucket, given_back):
    """The latest version has a chunk of its own; no inventory follows the release."""
    context = run_context(target_size=4096)
    bucket.put("k", b"a" * 3000)
    next_second()
    latest = bucket.put("k", b"b" * 3000)["VersionId"]
    older, newer = [chunk.name for chunk in plan(context).chunks]
    archive_chunk(context, older)
    assert current(context)[1].chunk == newer
    with chunk_steps.lease_chunk(context, newer) as lease:
        if given_back == "by withdrawing":
            context.ledger.moves.move(lease, newer, ChunkState.PLANNED, ChunkState.WITHDRAWN)
        else:
            context.ledger.moves.move(lease, newer, ChunkState.PLANNED, ChunkState.PACKING)
            context.ledger.moves.seal(lease, newer, seal_facts(0, released=1), [], [("k", latest)])
    body, currency = current(context)
    assert (body, currency.is_current) == (b"a" * 3000, False)
    archive_everything(context)
    assert (current(context)[0], current(context)[1].is_current) == (b"b" * 3000, True)


# --- what is archived -----------------------------------------------------------------------------


def test_every_version_has_row_and_is_read_by_id(context, bucket):
    bodies = {bucket.put("k", body)["VersionId"]: body for body in (b"one", b"two", b"", b"one")}
    archive_everything(context)
    assert {
        version_id: object_bytes(context, "k", version_id) for version_id in versions_of(context)
    } == bodies
    assert current(context) == (b"one", context.ledger.lookup.locate("src", "k").currency)
    assert context.ledger.lookup.locate("src", "k").row.object_version == list(bodies)[-1]


@pytest.mark.thorough
def test_version_without_id_is_read_while_not_latest(tmp_path, new_bucket, ledger):
    """S3 calls it `null`; a request without a version id returns the latest."""
    new_bucket.put("k", A, Metadata={"m": "of null"})
    new_bucket.put("large", b"x" * 200_000)
    new_bucket.keep_versions()
    latest = {key: new_bucket.put(key, B)["VersionId"] for key in ("k", "large")}
    source = {"bucket": "b", "public": True, "versions": "all"}
    context = a_run_context(
        tmp_path, new_bucket.source(all_versions=True), ledger, sources={"src": source}
    )
    report = plan(context)
    for chunk in report.chunks:
        archive_chunk(context, chunk.name)
    account = account_for_plan(context, report)
    assert (account.located, account.skipped, packed(context)) == (4, {}, 4)
    (null,) = versions_of(context) - {latest["k"]}
    assert (object_bytes(context, "k", null), current(context)[0]) == (A, B)
    (large,) = versions_of(context, "large") - {latest["large"]}
    assert object_bytes(context, "large", large) == b"x" * 200_000


def test_overwritten_version_without_id_is_never_archived_as_itself(tmp_path, new_bucket, ledger):
    new_bucket.put("k", A)
    new_bucket.keep_versions()
    new_bucket.put("k", B)
    source = {"bucket": "b", "public": True, "versions": "all"}
    context = a_run_context(
        tmp_path, new_bucket.source(all_versions=True), ledger, sources={"src": source}
    )
    report = plan(context)
    new_bucket.keep_versions("Suspended")
    new_bucket.put("k", b"over null")
    for chunk in report.chunks:
        archive_chunk(context, chunk.name)
    account = account_for_plan(context, report)
    assert account.skipped["changed"] == 1
    assert sha256(A).digest() not in {
        row.sha256 for row in context.ledger.lookup.versions("src", "k", 9)[0]
    }


@pytest.mark.thorough
def test_delete_markers_are_in_the_snapshot_and_never_archived(context, bucket):
    bucket.put("k", A)
    bucket.delete("k")
    bucket.put("k", B)
    bucket.put("gone", A)
    bucket.delete("gone")
    delete_all_but_the_marker(bucket, "alone")
    snapshot = inventories.take_inventory(context)
    rows = [(obj.key, obj.is_latest, obj.is_delete_marker) for obj in read_objects(snapshot.path)]
    assert Counter(rows) == {
        (b"gone", False, False): 1,
        (b"gone", True, True): 1,
        (b"k", False, False): 1,
        (b"k", False, True): 1,
        (b"k", True, False): 1,
        (b"alone", True, True): 1,
    }
    assert (snapshot.object_count, snapshot.object_bytes) == (3, 2 * len(A) + len(B))
    assert snapshot.beside == VersionCounts(older=2, markers=3, deleted_keys=2)
    assert read_snapshot(snapshot.path) == snapshot
    report = planning.cut_plan(context, snapshot, new_archive=True)
    for chunk in report.chunks:
        archive_chunk(context, chunk.name)
    account = account_for_plan(context, report)
    assert (packed(context), account.objects, account.holds) == (3, 3, True)
    assert (account.current, account.older, account.gone) == (1, 1, 1)


@pytest.mark.thorough
def test_deleted_key_is_gone_but_versions_are_readable(context, bucket):
    first = bucket.put("k", A)["VersionId"]
    second = bucket.put("k", B)["VersionId"]
    bucket.delete("k")
    archive_everything(context)
    body, currency = current(context)
    assert (currency.is_current, currency.gone_at is not None) == (False, True)
    assert body in {A, B}
    assert [object_bytes(context, "k", version_id) for version_id in (first, second)] == [A, B]
    account_for_plan(context, plan(context))
    assert context.ledger.chunks.account("src").content.gone_objects == 2


@pytest.mark.thorough
def test_a_key_that_was_deleted_and_undeleted_is_current_again(context, bucket):
    bucket.put("k", A)
    marker = bucket.client.delete_object(Bucket=bucket.name, Key="k")["VersionId"]
    archive_everything(context)
    assert current(context)[1].gone_at
    bucket.client.delete_object(Bucket=bucket.name, Key="k", VersionId=marker)
    archive_everything(context)
    assert (current(context)[0], current(context)[1].is_current, packed(context)) == (A, True, 1)


def test_filters_act_on_each_version(run_context, bucket):
    bucket.put("k", b"x" * 5000)
    bucket.put("k", A)
    bucket.put("other", B)
    bucket.put("other", b"x" * 5000)
    bucket.put("left", A)
    bucket.delete("left")
    context = run_context(max_size=1000, exclude=["left"])
    report = plan(context)
    for chunk in report.chunks:
        archive_chunk(context, chunk.name)
    account = account_for_plan(context, report)
    assert (report.left_out, account.located, account.holds) == (
        {"exclude": 1, "max_size": 2},
        2,
        True,
    )
    assert (current(context)[0], current(context)[1].is_current) == (A, True)
    body, currency = current(context, "other")
    assert (body, currency.is_current, currency.gone_at) == (
        B,
        False,
        None,
    )  # the bucket has what the filter excludes
    with pytest.raises(NotLocated):
        current(context, "left")


# --- what is current ------------------------------------------------------------------------------


@pytest.mark.thorough
def test_older_version_of_same_second_is_not_current(run_context, bucket):
    for _ in range(3):  # some pairs share a second
        bucket.put("k", A)
        latest = bucket.put("k", B)["VersionId"]
    archive_everything(run_context("current"))
    archive_everything(run_context())
    assert packed(run_context()) == 6
    assert (
        run_context().ledger.lookup.locate("src", "k").row.object_version,
        current(run_context())[1].is_current,
    ) == (
        latest,
        True,
    )


def written(reports, moment, **changes):
    """Write a report with these times of versions, by id."""
    rows = listed_rows(reports.client, reports.name)
    return reports.write(moment, rows=[row | changes.get(row["version_id"], {}) for row in rows])


@pytest.mark.thorough
@pytest.mark.parametrize("first", sampled(["current", "all"], every=2))
@pytest.mark.parametrize(
    "since", [DAY, timedelta(minutes=5)], ids=["long ago", "shortly before the report"]
)
def test_an_older_version_whose_time_is_later_is_not_current(
    run_context, bucket, reports, first, since
):
    """A multipart upload has the time of its start, so a version may be later than the next."""
    older, latest = bucket.put("k", A)["VersionId"], bucket.put("k", B)["VersionId"]
    moment = datetime.now(UTC).replace(microsecond=0) - DAY
    times = {
        older: {"last_modified_date": moment - since},
        latest: {"last_modified_date": moment - since - DAY},
    }
    written(reports, moment, **times)
    archive_report(run_context(first))
    archive_report(run_context())
    context = run_context()
    assert (packed(context), versions_of(context)) == (2, {older, latest})
    assert (current(context)[0], current(context)[1].is_current) == (B, True)


@pytest.mark.thorough
def test_unarchived_latest_version_leaves_no_older_one_current(context, bucket):
    bucket.put("k", A)
    next_second()
    latest = bucket.put("k", B)["VersionId"]
    report = plan(context)
    bucket.client.delete_object(Bucket=bucket.name, Key="k", VersionId=latest)
    for chunk in report.chunks:
        archive_chunk(context, chunk.name)
    body, currency = current(context)
    assert (body, currency.is_current) == (A, False)
    next_second()  # the inventory may lack objects of its own second
    archive_everything(context)
    assert (current(context)[0], current(context)[1].is_current) == (A, True)


def test_server_without_latest_flag_makes_no_key_gone(tmp_path, scripted_s3, ledger):
    entries = version("k", "v2", latest=False) + version("k", "v1", latest=False)
    listing = f"<R><IsTruncated>false</IsTruncated>{entries}</R>".encode()
    enabled = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    scripted_s3.answer = lambda asked: ScriptedAnswer(
        200,
        enabled if "versioning" in asked.query else listing,
        {"Content-Type": "application/xml"},
    )
    source = {"bucket": "b", "public": True, "versions": "all"}
    context = a_run_context(tmp_path, scripted_source(scripted_s3), ledger, sources={"src": source})
    report = plan(context)
    account = account_for_plan(context, report)
    assert (report.exceptions, account.claimed, account.current, account.gone) == (0, 2, 0, 0)


# --- switching ------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_switching_versions_plans_only_older_ones_then_nothing(run_context, bucket):
    for body in (b"1", b"22", b"333"):
        bucket.put("k", body)
    bucket.put("other", A)
    archive_everything(run_context("current"))
    assert packed(run_context()) == 2
    preview = preview_plan(run_context(), inventories.take_inventory(run_context()))
    assert (preview.estimate.statistics.objects, preview.located) == (2, 2)
    assert {
        name: preview.as_json()[name]
        for name in ("versions", "older_versions", "delete_markers", "deleted_keys")
    } == {
        "versions": "all",
        "older_versions": 2,
        "delete_markers": 0,
        "deleted_keys": 0,
    }
    archive_everything(run_context())
    assert packed(run_context()) == 4
    next_second()  # an inventory may lack objects of its own second
    again = plan(run_context("current"))
    account = account_for_plan(run_context("current"), again)
    assert (again.plans, again.exceptions, account.current, account.older, account.gone) == (
        [],
        0,
        2,
        2,
        0,
    )
    assert (current(run_context())[0], current(run_context())[1].is_current) == (b"333", True)
    assert plan(run_context()).plans == []


@pytest.mark.thorough
def test_scan_finds_older_versions_once_and_only_objects(run_context, bucket):
    bucket.put("k", A)
    bucket.put("k", B)
    bucket.put("gone", A)
    bucket.delete("gone")
    archive_everything(run_context("current"))
    look = lambda versions: (  # noqa: E731
        inventories.scan_for_new(run_context(versions), after=b"", max_pages=5).new_objects
    )
    assert (look("current"), look("all")) == (0, 2)
    report = plan(run_context())
    assert look("all") == 0  # they are claimed
    for chunk in report.chunks:
        archive_chunk(run_context(), chunk.name)
    assert (look("current"), look("all")) == (0, 0)
    bucket.put("k", b"newer")
    assert (look("current"), look("all")) == (1, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("versions", ["current", "all"])
def test_object_located_after_count_is_not_wrongly_current(run_context, bucket, versions):
    context = run_context(versions)
    bucket.put("k", A)
    bucket.put("k", B)
    archived = plan(context)
    account_for_plan(context, archived)
    for chunk in archived.chunks:
        archive_chunk(context, chunk.name)
    content = context.ledger.chunks.account("src").content
    assert (content.current_objects, content.uncounted_objects) == (
        (1, 0) if versions == "current" else (0, 2)
    )
    account_for_plan(context, archived)
    content = context.ledger.chunks.account("src").content
    assert (content.current_objects, content.older_objects, content.uncounted_objects) == (
        1,
        versions == "all",
        0,
    )


# --- reports --------------------------------------------------------------------------------------


def without_checksum(path):
    """Return the rows of a snapshot without checksum types, which a report lacks."""
    return [{**row, "checksum": None} for row in pq.read_table(path).to_pylist()]


@pytest.mark.thorough
@pytest.mark.parametrize("versions", ["current", "all"])
@pytest.mark.parametrize("file_format", sampled(FORMATS, every=3))
def test_a_report_has_the_same_versions_as_a_listing(
    run_context, bucket, reports, file_format, versions
):
    bucket.keep_versions("Suspended")
    bucket.put("a", b"null")
    bucket.keep_versions()
    for key in ("a", "a b+c/é%", "deleted", "outside"):
        for body in (A, B, b""):
            bucket.put(key, body)
    bucket.delete("deleted")
    delete_all_but_the_marker(bucket, "alone")
    bucket.delete("a")
    bucket.put("a", A)
    bucket.delete("outside")
    reports.file_format = file_format
    reports.write(datetime.now(UTC).replace(microsecond=0))
    context = run_context(versions)
    listed = inventories.take_inventory(context)
    taken, _ = inventories.take_report(context)
    assert without_checksum(taken.path) == without_checksum(listed.path)
    assert (taken.object_count, taken.object_bytes, taken.beside) == (
        listed.object_count,
        listed.object_bytes,
        listed.beside,
    )
    assert listed.beside.markers == 4


def test_a_report_counts_the_versions_under_the_prefix_alone(tmp_path, bucket, reports, ledger):
    for key in ("p/a", "q/a"):
        bucket.put(key, A)
        bucket.put(key, B)
        bucket.delete(key)
    reports.write()
    for versions in ("all", "current"):
        objects = bucket.source("p/", all_versions=versions == "all", inventory=reports.folder)
        source = {"bucket": "b", "prefix": "p/", "versions": versions}
        context = a_run_context(tmp_path / versions, objects, ledger, sources={"src": source})
        snapshot, taken = inventories.take_report(context)
        assert snapshot.beside == VersionCounts(older=2, markers=1, deleted_keys=1)
        assert taken.counts.outside_prefix == 3


def test_report_of_current_versions_is_refused_for_all(context, reports, bucket):
    bucket.put("k", A)
    reports.columns = tuple(name for name in SCHEMA.names if name not in OF_VERSIONS)
    reports.write()
    with pytest.raises(ReportRefused, match="VersionId, IsLatest, IsDeleteMarker"):
        inventories.take_report(context)


# --- what may be deleted --------------------------------------------------------------------------


def decided(context, folder):
    """Return the versions that may be deleted, and why others may not, after two proof windows."""
    for _ in range(2):
        pass_window(context, context.store)
    answer = Answer(context, folder)
    rest = {(row["key"].decode(), row["version_id"]): row["reason"] for row in answer.rest}
    return {(key.decode(), version_id) for _, key, version_id in answer.listed}, rest, answer.found


@pytest.mark.thorough
def test_archived_version_may_be_deleted_by_own_id_only(run_context, bucket, tmp_path):
    store = SeveralFolders(tmp_path / "several")
    older, latest = (bucket.put("k", body)["VersionId"] for body in (A, B))
    gone = bucket.put("gone", A)["VersionId"]
    bucket.delete("gone")
    archive_everything(run_context("current", store=store))
    safe, rest, assessment = decided(run_context("current", store=store), tmp_path)
    assert (safe, rest) == ({("k", latest)}, {})
    assert assessment.snapshot.beside == VersionCounts(older=2, markers=1, deleted_keys=1)
    context = run_context(store=store)
    safe, rest, assessment = decided(context, tmp_path)
    assert (safe, rest) == (
        {("k", latest)},
        {("k", older): "not_planned", ("gone", gone): "not_planned"},
    )
    archive_everything(context)
    newest = bucket.put("k", b"newest")["VersionId"]
    safe, rest, assessment = decided(context, tmp_path)
    assert (safe, rest) == (
        {("k", older), ("k", latest), ("gone", gone)},
        {("k", newest): "changed"},
    )
    assert (assessment.gone, assessment.everything_is_safe) == (0, False)


# --- what is refused ------------------------------------------------------------------------------


def test_bucket_without_versions_is_refused_for_all(tmp_path, new_bucket, ledger):
    new_bucket.put("k", A)
    context = a_run_context(
        tmp_path,
        new_bucket.source(all_versions=True),
        ledger,
        sources={"src": {"bucket": "b", "versions": "all"}},
    )
    for ask in (
        inventories.take_inventory,
        lambda context: inventories.scan_for_new(context, after=b"", max_pages=1),
    ):
        with pytest.raises(SettingsError, match=r"sources\.demo\.versions is 'all'"):
            ask(context)
    assert list((tmp_path / "home").rglob("*.parquet")) == []


def test_unreadable_versioning_is_refused_for_all_versions(
    scripted_s3,
):
    scripted_s3.answer = lambda asked: s3_error(403, "AccessDenied")
    with pytest.raises(SettingsError) as refused:
        next(iter(scripted_source(scripted_s3).list_pages()))
    assert "s3:GetBucketVersioning" in refused.value.hint
