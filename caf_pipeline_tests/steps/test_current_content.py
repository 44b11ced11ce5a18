"""The archive returns what is current in the bucket, after any history."""

import hashlib
import random
import shutil
from datetime import timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from caf_pipeline.errors import NotLocated
from caf_pipeline.inventory.manifest import IDENTITY_COLUMNS, row_identity
from caf_pipeline.inventory.objects import SkipReason, VersionCounts
from caf_pipeline.inventory.snapshot import read_snapshot
from caf_pipeline.maintenance.rebuild import rebuild
from caf_pipeline.retrieval.reader import fetch
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.steps.chunk_steps import open_chunk
from caf_pipeline.steps.preview import preview_plan
from caf_pipeline_tests.support.current_content import A, B, current, next_second, packed
from caf_pipeline_tests.support.md5_collision import FIRST, SECOND
from caf_pipeline_tests.support.new_ledgers import rows_of
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import (
    a_run_context,
    account_for_plan,
    archive_chunk,
    archive_everything,
    first_chunk,
    plan,
)
from caf_pipeline_tests.support.s3_server import make_bucket
from caf_pipeline_tests.support.tiers import sampled

SHA256 = {"ChecksumAlgorithm": "SHA256"}


def headers_of(context, key="k"):
    location = fetch(context.ledger.lookup, context.store, "src", key).location
    rows = (
        open_chunk(context, context.ledger.chunks.get(location.chunk))
        .manifest()
        .rows(("key", *IDENTITY_COLUMNS, "content_type", "user_metadata"))
    )
    (row,) = [
        row
        for row in rows
        if row["key"] == key and row_identity(row) == location.row.object_version
    ]
    return row["content_type"], dict(row["user_metadata"])


@pytest.fixture
def bucket(new_bucket):
    return new_bucket


@pytest.fixture
def context(tmp_path, bucket, ledger):
    return a_run_context(tmp_path, bucket.source(), ledger)


def archived(context, bucket, key, body, **options):
    """Put an object and archive it, in a second of its own."""
    bucket.put(key, body, **options)
    archive_everything(context)
    next_second()


# --- a bucket without versions --------------------------------------------------------------------


def put(body, **headers):
    return body, {**SHA256, "Metadata": {}, **headers}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("history", "packed_times"),
    [
        ([put(A), put(B), put(A)], 2),
        ([put(FIRST), put(SECOND), put(FIRST), put(SECOND)], 2),
        ([put(A, ContentType="text/plain", Metadata={"a": "1"})] * 3, 1),
        ([put(A, Metadata={"a": value}) for value in "1212"], 2),
        ([(A, {"Metadata": {}})] * 2, 2),
    ],
    ids=["content", "bytes of one ETag", "nothing new", "headers", "no checksum"],
)
def test_what_returns_is_read_but_not_packed_again(context, bucket, history, packed_times):
    for body, options in history:
        archived(context, bucket, "k", body, **options)
        assert current(context)[0] == body
        assert headers_of(context)[1] == options["Metadata"]
    assert (packed(context), current(context)[1].is_current) == (packed_times, True)
    again = plan(context)
    assert (again.exceptions, again.comparison.requests) == (0, 0)


@pytest.mark.thorough
def test_returning_content_after_deletion_is_read_again(context, bucket):
    bucket.put("k", A, **SHA256)
    archive_everything(context)
    bucket.delete("k")
    archive_everything(context)
    gone = current(context)[1]
    assert (gone.is_current, gone.gone_at is not None) == (False, True)
    bucket.put("k", A, **SHA256)
    archive_everything(context)
    assert (current(context)[0], current(context)[1].is_current, packed(context)) == (A, True, 1)


@pytest.mark.thorough
def test_a_window_finds_deleted_keys_without_the_kept_files(context, bucket):
    for key in ("a", "k", "z"):
        bucket.put(key, A)
    archive_everything(context)
    shutil.rmtree(context.kept_locations())
    bucket.delete("k")
    window = inventories.take_inventory(context, after=b"a", until=b"m")
    assert planning.cut_plan(context, window).exceptions == 1
    assert current(context)[1].gone_at is not None
    assert (planning.account_for(context, window).gone, context.kept_locations().exists()) == (
        1,
        False,
    )


@pytest.mark.thorough
def test_object_archived_since_listing_is_neither_gone_nor_older(context, bucket):
    bucket.put("a", A)
    archive_everything(context)
    whole = inventories.latest_snapshot(context, complete=True)
    next_second()
    bucket.put("a", B)
    bucket.put("k", A, **SHA256)
    planned = planning.cut_plan(
        context, inventories.take_inventory(context, until=b"z")
    )  # as the sensor lists a part of the bucket
    archive_chunk(context, planned.chunks[0].name)
    accounting = planning.account_for(context, whole)
    content = context.ledger.chunks.account("src").content
    assert (accounting.current, accounting.older, accounting.gone, content.uncounted_objects) == (
        1,
        0,
        0,
        2,
    )


@pytest.mark.thorough
def test_deleted_key_reports_when_it_was_last_listed(context, bucket):
    bucket.put("k", A, **SHA256)
    bucket.put("other", B)
    archive_everything(context)
    next_second()  # S3 has whole seconds: an object is never listed before its time
    snapshot = inventories.take_inventory(context)
    planning.cut_plan(context, snapshot)
    next_second()
    bucket.delete("k")
    plan(context)
    assert current(context)[1].last_seen == snapshot.taken_at


@pytest.mark.thorough
def test_inventories_that_are_planned_in_another_order_say_the_same(context, bucket):
    archived(context, bucket, "k", A, **SHA256)
    archived(context, bucket, "k", B, **SHA256)
    bucket.put("k", A, **SHA256)
    early = inventories.take_inventory(context)
    next_second()
    bucket.put("k", B, **SHA256)
    late = inventories.take_inventory(context)
    for snapshot in (late, early):
        planning.cut_plan(context, snapshot)
    assert (current(context)[0], current(context)[1].is_current) == (B, True)


@pytest.mark.thorough
def test_chunk_loaded_late_does_not_make_older_content_current(context, bucket):
    archived(context, bucket, "k", A, **SHA256)
    bucket.put("k", B, **SHA256)
    late = first_chunk(context)
    for step in ("load_batch", "pack_chunk", "seal_chunk"):
        getattr(chunk_steps, step)(context, late)
    next_second()
    bucket.put("k", A, **SHA256)
    plan(context)
    archive_chunk(context, late)
    assert current(context)[0] == A


@pytest.mark.thorough
def test_a_rebuilt_ledger_says_what_is_current_after_an_inventory(
    context, bucket, ledger, tmp_path
):
    for body in (A, B, A):
        archived(context, bucket, "k", body, **SHA256)
    with connected(ledger.database) as connection:
        connection.execute("TRUNCATE current_exceptions, inventories")
    assert current(context)[0] == B
    plan(context)
    assert current(context)[0] == A


@pytest.mark.thorough
def test_rebuilt_ledger_has_objects_archived_again_for_headers(context, bucket, ledger, database):
    for value in ("1", "2"):
        archived(context, bucket, "k", A, **SHA256, Metadata={"a": value})
    rows = rows_of(ledger)["file_locations"]
    with connected(database) as connection:
        connection.execute(
            "TRUNCATE sources, file_locations, current_exceptions, skipped_objects, leases CASCADE"
        )
    ledger.sources.register("src", context.address)
    assert all(outcome.complete for outcome in rebuild(context))
    assert rows_of(ledger)["file_locations"] == rows
    assert (plan(context).chunks, headers_of(context)[1]) == ([], {"a": "2"})


@pytest.mark.thorough
def test_pending_or_skipped_current_content_is_reported(context, bucket):
    archived(context, bucket, "k", A, **SHA256)
    bucket.put("k", B, **SHA256)
    name = first_chunk(context)
    body, currency = current(context)
    assert (body, currency.is_current, currency.chunk, currency.state) == (
        A,
        False,
        name,
        "planned",
    )
    next_second()
    bucket.put("k", b"third", **SHA256)
    archive_chunk(context, name)
    body, currency = current(context)
    assert (body, currency.is_current, currency.chunk, currency.state) == (
        A,
        False,
        None,
        SkipReason.CHANGED,
    )


@pytest.mark.thorough
def test_an_account_tells_current_older_and_gone_apart(context, bucket):
    for key in ("same", "changes", "goes"):
        bucket.put(key, A)
    archive_everything(context)
    next_second()
    bucket.put("changes", B)
    bucket.delete("goes")
    report = plan(context)
    account_for_plan(context, report)
    for chunk in report.chunks:
        archive_chunk(context, chunk.name)
    content = context.ledger.chunks.account("src").content
    assert (content.current_objects, content.older_objects, content.gone_objects) == (2, 1, 1)


# --- headers --------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_look_settles_what_a_plan_has_compared(context, bucket):
    archived(context, bucket, "k", A, **SHA256)
    bucket.put("k", A, **SHA256)
    assert inventories.scan_for_new(context, after=b"", max_pages=5).new_objects == 1
    plan(context)
    assert inventories.scan_for_new(context, after=b"", max_pages=5).new_objects == 0


@pytest.mark.thorough
def test_a_look_finds_content_that_came_back(context, bucket):
    for body in (A, B):
        archived(context, bucket, "k", body)
    bucket.put("k", A, **SHA256)
    assert inventories.scan_for_new(context, after=b"", max_pages=5).new_objects == 1
    plan(context)
    assert inventories.scan_for_new(context, after=b"", max_pages=5).new_objects == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changed",
    sampled(
        [
            {"Metadata": {"a": "2"}},
            {"Metadata": {}},
            {"ContentType": "text/html"},
            {"CacheControl": "no-cache"},
            {"ContentDisposition": "inline"},
            {"ContentLanguage": "de"},
            {"ContentEncoding": "gzip"},
        ],
        every=7,
    ),
    ids=str,
)
def test_the_same_bytes_with_other_headers_are_archived_again_whole(context, bucket, changed):
    first = {"ContentType": "text/plain", "Metadata": {"a": "1"}}
    archived(context, bucket, "k", A, **SHA256, **first)
    bucket.put("k", A, **SHA256, **first | changed)
    archive_everything(context)
    expected = first | changed
    assert (packed(context), headers_of(context)) == (
        2,
        (expected["ContentType"], expected["Metadata"]),
    )
    assert plan(context).comparison.requests == 0


@pytest.mark.thorough
@pytest.mark.parametrize("content_type", ["text/plain", "text/html"])
def test_rewritten_object_is_not_compared_while_left_out(
    tmp_path, context, bucket, ledger, content_type
):
    archived(context, bucket, "k", A, **SHA256, ContentType="text/plain")
    bucket.put("k", A, **SHA256, ContentType=content_type)
    sources = {"src": {"bucket": "b", "public": True, "exclude": ["k"]}}
    filtered = a_run_context(tmp_path, bucket.source(), ledger, sources=sources)
    preview = preview_plan(filtered, inventories.take_inventory(filtered))
    assert (preview.to_compare, preview.estimate.requests, preview.left_out) == (
        0,
        0,
        {"exclude": 1},
    )
    for _ in range(2):
        report = plan(filtered)
        assert (report.comparison.requests, report.plans, report.left_out) == (
            0,
            [],
            {"exclude": 1},
        )
        account = account_for_plan(filtered, report)
        assert (account.holds, account.left_out, current(filtered)[1].is_current) == (
            True,
            {"exclude": 1},
            False,
        )
    report = plan(context)
    for chunk in report.chunks:
        archive_chunk(context, chunk.name)
    assert report.comparison.requests == 1
    assert (
        headers_of(context)[0],
        current(context)[1].is_current,
        plan(context).comparison.requests,
    ) == (content_type, True, 0)
    assert (plan(filtered).comparison.requests, packed(context)) == (
        0,
        1 if content_type == "text/plain" else 2,
    )


@pytest.mark.thorough
def test_comparing_headers_asks_no_provider(context, bucket, monkeypatch):
    archived(context, bucket, "k", A, **SHA256, Metadata={"a": "1"})
    bucket.put("k", A, **SHA256, Metadata={"a": "1"})
    monkeypatch.setattr(
        type(context.store), "holders", lambda *_: pytest.fail("the store was asked")
    )
    assert plan(context).comparison.equal == 1


@pytest.mark.thorough
def test_object_rewritten_during_comparison_waits_for_next_inventory(context, bucket):
    archived(context, bucket, "k", A, **SHA256)
    bucket.put("k", A, **SHA256)
    listed = inventories.take_inventory(context)
    next_second()
    bucket.put("k", A, **SHA256, Metadata={"a": "2"})
    assert account_for_plan(context, planning.cut_plan(context, listed)).skipped == {"changed": 1}
    archive_everything(context)
    assert headers_of(context)[1] == {"a": "2"}


# --- bytes ----------------------------------------------------------------------------------------


def test_the_collision_pair_has_one_md5_and_two_sha256():
    md5s, sha256s = (
        {algorithm(body).digest() for body in (FIRST, SECOND)}
        for algorithm in (hashlib.md5, hashlib.sha256)
    )
    assert (len(FIRST), len(md5s), len(sha256s)) == (len(SECOND), 1, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("checksum", [{}, SHA256], ids=["without", "sha256"])
def test_other_bytes_with_the_same_etag_are_archived(context, bucket, checksum):
    archived(context, bucket, "k", FIRST, **checksum)
    bucket.put("k", SECOND, **checksum)
    preview = preview_plan(context, inventories.take_inventory(context))
    assert (preview.to_compare, preview.estimate.requests) == (1, 2)
    report = plan(context)
    assert (report.comparison.other_bytes, report.comparison.without_checksum) == (
        (1, 0) if checksum else (0, 1)
    )
    for chunk in report.chunks:
        archive_chunk(context, chunk.name)
    assert (current(context)[0], current(context)[1].is_current, packed(context)) == (
        SECOND,
        True,
        2,
    )
    settled = plan(context)
    assert (settled.chunks, settled.comparison.requests) == ([], 0)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", ["CRC32", "CRC64NVME", "SHA1", "SHA256"])
@pytest.mark.parametrize("rest", [b"", bytes(100 << 10)], ids=["whole", "in_ranges"])
def test_bytes_with_an_equal_checksum_are_not_archived_again(context, bucket, algorithm, rest):
    for _ in range(2):
        archived(context, bucket, "k", FIRST + rest, ChecksumAlgorithm=algorithm)
    assert packed(context) == 1
    bucket.put("k", SECOND + rest, ChecksumAlgorithm=algorithm)
    report = plan(context)
    assert (report.comparison.other_bytes, len(report.chunks)) == (1, 1)


@pytest.mark.thorough
def test_a_crc64_that_packing_computed_is_compared(context, bucket):
    archived(context, bucket, "k", FIRST)
    bucket.put("k", FIRST, ChecksumAlgorithm="CRC64NVME")
    assert plan(context).comparison.equal == 1
    next_second()
    bucket.put("k", SECOND, ChecksumAlgorithm="CRC64NVME")
    assert plan(context).comparison.other_bytes == 1


@pytest.mark.thorough
def test_a_checksum_of_another_algorithm_is_not_comparable(context, bucket):
    archived(context, bucket, "k", A, ChecksumAlgorithm="CRC32")
    bucket.put("k", A, ChecksumAlgorithm="SHA1")
    assert plan(context).comparison.without_checksum == 1


# --- versions -------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_version_is_current_again_after_deletion_of_the_next(context, bucket):
    bucket.keep_versions()
    archived(context, bucket, "k", A)
    second = bucket.put("k", B)["VersionId"]
    archive_everything(context)
    bucket.client.delete_object(Bucket=bucket.name, Key="k", VersionId=second)
    archive_everything(context)
    assert (current(context)[0], current(context)[1].is_current, packed(context)) == (A, True, 2)


@pytest.mark.thorough
def test_old_unarchived_version_is_archived_once_current(context, bucket):
    bucket.keep_versions()
    bucket.put("k", A)
    next_second()
    second = bucket.put("k", B)["VersionId"]
    archive_everything(context)
    bucket.client.delete_object(Bucket=bucket.name, Key="k", VersionId=second)
    name = first_chunk(context)
    assert (current(context)[0], current(context)[1].chunk) == (B, name)
    archive_chunk(context, name)
    assert (current(context)[0], current(context)[1].is_current) == (A, True)


def test_an_inventory_is_of_s3s_own_time(context, bucket):
    bucket.put("k", A)
    snapshot = inventories.take_inventory(context)
    assert snapshot.taken_at.microsecond == 0
    assert abs(snapshot.taken_at - snapshot.listed_at) < timedelta(minutes=1)
    assert read_snapshot(snapshot.path).taken_at == snapshot.taken_at


# --- anything, in any order -----------------------------------------------------------------------

KEYS = ["a", "a/b", "ü"]
BODIES = [b"", b"one", b"two, longer"]
METADATA = [{}, {"a": "1"}, {"a": "2"}]


class BucketMachine(RuleBasedStateMachine):
    """Random histories of a bucket: the archive returns its content and packs no bytes twice.

    `switches` changes the setting `versions` now and then. Chunks are small and located in any
    order.
    """

    def __init__(self, s3_server, folder, ledger, kind, *, switches=False):
        super().__init__()
        self.bucket = make_bucket(s3_server)
        self.kind, self.switches = kind, switches
        if kind != "unversioned":
            self.bucket.keep_versions("Enabled")
        home = folder / f"{random.getrandbits(64):x}"
        self.context = a_run_context(home, self.bucket.source(), ledger)
        self.other = self.context
        if switches:
            source = {"bucket": "b", "target_size": "6KiB", "public": True, "versions": "all"}
            self.other = a_run_context(
                home, self.bucket.source(all_versions=True), ledger, sources={"src": source}
            )
        with connected(ledger.database) as connection:
            connection.execute(
                "TRUNCATE sources, claims, file_locations, current_exceptions, skipped_objects, "
                "leases CASCADE"
            )
        ledger.sources.register("src", self.context.address)
        self.written = set()
        self.archived = set()

    @initialize()
    def suspend(self):
        if self.kind == "suspended":
            self.bucket.put("a", b"of before", Metadata={"a": "1"}, **SHA256)
            self.bucket.keep_versions("Suspended")

    @rule(
        key=st.sampled_from(KEYS), body=st.sampled_from(BODIES), metadata=st.sampled_from(METADATA)
    )
    def put(self, key, body, metadata):
        self.bucket.put(key, body, Metadata=metadata, **SHA256)
        self.written.add((key, body, str(metadata)))

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key):
        self.bucket.delete(key)

    @precondition(lambda self: self.kind != "unversioned")
    @rule(which=st.integers(0, 99))
    def delete_a_version(self, which):
        answer = self.bucket.client.list_object_versions(Bucket=self.bucket.name)
        versions = [*answer.get("Versions", []), *answer.get("DeleteMarkers", [])]
        if versions:
            version = versions[which % len(versions)]
            self.bucket.client.delete_object(
                Bucket=self.bucket.name, Key=version["Key"], VersionId=version["VersionId"]
            )

    @precondition(lambda self: self.kind != "unversioned")
    @rule(which=st.integers(0, 99))
    def restore_a_version(self, which):
        versions = self.bucket.client.list_object_versions(Bucket=self.bucket.name).get(
            "Versions", []
        )
        if versions:
            version = versions[which % len(versions)]
            answer = self.bucket.client.get_object(
                Bucket=self.bucket.name, Key=version["Key"], VersionId=version["VersionId"]
            )
            self.put(version["Key"], answer["Body"].read(), answer["Metadata"])

    @precondition(lambda self: self.switches)
    @rule()
    def switch(self):
        self.context, self.other = self.other, self.context

    @rule(which=st.randoms(use_true_random=False))
    def run(self, which=None):
        report = plan(self.context)
        account_for_plan(self.context, report)
        chunks = list(report.chunks)
        if which:
            which.shuffle(chunks)
        for chunk in chunks:
            archive_chunk(self.context, chunk.name)
        account_for_plan(self.context, report)
        if self.context.all_versions:  # even for a key that no inventory listed
            versions = self.bucket.client.list_object_versions(Bucket=self.bucket.name).get(
                "Versions", []
            )
            self.archived |= {version["Key"] for version in versions}
        self.compare()
        if self.context.all_versions:
            self.compare_versions()
        report = plan(self.context)
        assert (report.chunks, report.exceptions, report.comparison.requests) == ([], 0, 0)
        next_second()

    def compare(self):
        listed = {}
        for page in self.bucket.source().list_pages():
            listed.update({obj.key.decode(): obj for obj in page})
        for key in KEYS:
            if key in listed:
                body, currency = current(self.context, key)
                answer = self.bucket.client.get_object(Bucket=self.bucket.name, Key=key)
                assert (body, currency.is_current) == (answer["Body"].read(), True)
                assert headers_of(self.context, key)[1] == answer["Metadata"]
                self.archived.add(key)
            elif key in self.archived:
                assert current(self.context, key)[1].gone_at is not None
            else:
                with pytest.raises(NotLocated):
                    current(self.context, key)
        content = self.context.ledger.chunks.account("src").content
        assert (content is None) == (
            not listed and not self.archived
        ) or content.current_objects == len(listed)
        if self.kind == "unversioned":
            assert packed(self.context) <= len(self.written)

    def compare_versions(self):
        client, name = self.bucket.client, self.bucket.name
        versions = client.list_object_versions(Bucket=name).get("Versions", [])
        for version in versions:
            key, size, etag = version["Key"], version["Size"], version["ETag"].strip('"')
            answer = client.get_object(Bucket=name, Key=key, VersionId=version["VersionId"])
            rows, _ = self.context.ledger.lookup.versions("src", key, 1000)
            if version["VersionId"] == "null":
                (row, *_) = [
                    row for row in rows if (row.etag, row.end_byte - row.start_byte) == (etag, size)
                ]
            else:
                (row,) = [row for row in rows if row.object_version == version["VersionId"]]
            reader = fetch(
                self.context.ledger.lookup, self.context.store, "src", key, row.object_version
            )
            assert b"".join(reader.pieces) == answer["Body"].read()
        account = self.context.ledger.chunks.account("src")
        if account.content:
            content = account.content
            counted = content.current_objects + content.older_objects + content.gone_objects
            assert counted + content.uncounted_objects == account.located_objects
            markers = client.list_object_versions(Bucket=name).get("DeleteMarkers", [])
            older = sum(not version["IsLatest"] for version in versions)
            assert content.beside == VersionCounts(
                older, len(markers), sum(version["IsLatest"] for version in markers)
            )

    def teardown(self):
        self.run()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["versioned", "unversioned", "suspended"])
def test_archive_returns_bucket_content_after_any_history(s3_server, ledger, tmp_path, kind):
    run_state_machine_as_test(
        lambda: BucketMachine(s3_server, tmp_path, ledger, kind),
        settings=settings(max_examples=4, stateful_step_count=12),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["versioned", "suspended"])
def test_archive_of_all_versions_returns_bucket_content(s3_server, ledger, tmp_path, kind):
    run_state_machine_as_test(
        lambda: BucketMachine(s3_server, tmp_path, ledger, kind, switches=True),
        settings=settings(max_examples=5, stateful_step_count=12),
    )
