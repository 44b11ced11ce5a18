"""`caf restore` into a bucket: results, kills, lost answers, and what it must never do."""

import base64
import hashlib
import json
import os
import signal
from dataclasses import replace
from itertools import islice

import pytest

from caf_pipeline.errors import LedgerUnreachable
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.retrieval import listing, restore_bucket
from caf_pipeline.source.s3 import target
from caf_pipeline.source.s3.target import BucketTarget
from caf_pipeline.system.files_below import NotRestored
from caf_pipeline_tests.support.command_line import (
    KEYS,
    CommandLine,
    archive_source,
    expect_error,
    source_text,
)
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.unruly_s3 import with_header

PREFIX = "back/"
BODIES = {
    **{f"some/key-{number:02}": os.urandom(1_000 + number) for number in range(20)},
    "large": os.urandom(17 << 20),  # three parts
    "empty": b"",
    "a": b"1",
    "a/b": b"2",
    "folder/": b"",
    "/absolute": b"3",
    "x//y": b"4",
    "../../outside": b"5",
    "ü+ %\t&": b"6",
    "n" * 1024: b"7",
}
FULL = ObjectHeaders(
    "text/x-odd; charset=klingon",
    "gzip",
    "de",
    'attachment; filename="a b.txt"',
    "max-age=7",
    "whenever it is done",
    {"owner": "team a", "odd-name": "=?UTF-8?B?w7w=?="},
)
READ_UE = "ü".encode().decode("iso-8859-1")  # as botocore decodes it
NOT_ASCII = ObjectHeaders(
    content_disposition=f'attachment; filename="{READ_UE}.txt"',
    user_metadata={"by": READ_UE, "to": "x"},
)
HEADERS = {
    "some/key-03": FULL,
    "large": FULL,
    "a": ObjectHeaders("text/plain"),
    "ü+ %\t&": NOT_ASCII,
}
FITTING = {key: body for key, body in BODIES.items() if len(key) < 1000}


@pytest.fixture(scope="module")
def archived(tmp_path_factory, databases):
    caf = CommandLine(
        tmp_path_factory.mktemp("archived"), KEYS | {"CAF_DATABASE_URL": databases.take().url}
    )
    caf.settings(source_text("http://127.0.0.1:9", "b", target_size="12MiB"))
    archive_source(caf, objects=MemorySource(BODIES, HEADERS))
    return caf


@pytest.fixture
def restore(archived, new_bucket):
    """Restore into the new bucket of this server, with these options."""

    def run(
        *options, prefix="", endpoint=new_bucket.endpoint, to=f"s3://{new_bucket.name}/{PREFIX}"
    ):
        return archived("restore", "src", prefix, to, "--endpoint-url", endpoint, *options)

    return run


def objects(bucket):
    """Return the bodies below a prefix, by the rest of their keys."""
    pages = bucket.client.get_paginator("list_objects_v2").paginate(Bucket=bucket.name)
    keys = [row["Key"] for page in pages for row in page.get("Contents", ())]
    assert all(key.startswith(PREFIX) for key in keys)
    return {
        key.removeprefix(PREFIX): bucket.client.get_object(Bucket=bucket.name, Key=key)[
            "Body"
        ].read()
        for key in keys
    }


def sums(done):
    return json.loads(done.out.splitlines()[-1])


def uploads(bucket):
    return bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads", [])


@pytest.mark.thorough
def test_every_object_is_restored_with_its_headers(restore, new_bucket):
    expect_error(restore(), 1, "longer than 1,024 bytes", f"1 object of {len(BODIES)}")
    assert objects(new_bucket) == FITTING
    for key in ("some/key-03", "large"):
        head = new_bucket.client.head_object(Bucket=new_bucket.name, Key=PREFIX + key)
        assert head["Metadata"] == FULL.user_metadata
        assert (head["ContentType"], head["ContentEncoding"]) == (
            FULL.content_type,
            FULL.content_encoding,
        )
        assert (head["ContentLanguage"], head["CacheControl"]) == (
            FULL.content_language,
            FULL.cache_control,
        )
        assert (head["ContentDisposition"], head["ExpiresString"]) == (
            FULL.content_disposition,
            FULL.expires,
        )


def test_headers_beyond_ascii_keep_their_bytes(restore, new_bucket):
    for outcome in ("restored", "equal"):
        assert sums(restore("--json", prefix="ü"))[outcome] == 1
    head = new_bucket.client.head_object(Bucket=new_bucket.name, Key=f"{PREFIX}ü+ %\t&")
    assert (head["ContentDisposition"], head["Metadata"]) == (
        NOT_ASCII.content_disposition,
        NOT_ASCII.user_metadata,
    )
    with pytest.raises(NotRestored, match=f"s3://{new_bucket.name}/odd .* CacheControl"):
        BucketTarget(new_bucket.client, new_bucket.name).put(
            "odd", b"", b"", ObjectHeaders(cache_control="ü"), replace=False
        )


def test_a_second_restore_writes_only_missing_objects(restore, new_bucket):
    assert restore(prefix="some/").status == 0
    before = new_bucket.client.head_object(Bucket=new_bucket.name, Key=f"{PREFIX}some/key-03")[
        "LastModified"
    ]
    new_bucket.delete(f"{PREFIX}some/key-07")
    done = sums(restore("--json", prefix="some/"))
    assert (done["restored"], done["equal"], done["different"], done["failed"]) == (1, 19, 0, 0)
    assert (
        new_bucket.client.head_object(Bucket=new_bucket.name, Key=f"{PREFIX}some/key-03")[
            "LastModified"
        ]
        == before
    )


def test_a_lost_database_still_counts_written_objects(restore, new_bucket, monkeypatch):
    def breaking_off(*given, **more):
        yield from islice(list_objects(*given, **more), 18)
        raise LedgerUnreachable("the database is away")

    list_objects = listing.list_objects
    monkeypatch.setattr("caf_pipeline.cli.restore.list_objects", breaking_off)
    monkeypatch.setattr(restore_bucket, "OBJECTS_AT_ONCE", 2)
    done = restore("--json", prefix="some/")
    expect_error(done, 6, "database")
    assert sums(done)["restored"] == len(objects(new_bucket)) > 2


@pytest.mark.thorough
def test_an_existing_multipart_object_is_compared_by_reading(restore, new_bucket, unruly_s3):
    assert restore(prefix="large").status == 0
    assert sums(restore("--json", prefix="large"))["equal"] == 1
    unruly_s3.other_bytes(kind="object")
    assert sums(restore("--json", prefix="large", endpoint=unruly_s3.endpoint))["different"] == 1


@pytest.mark.thorough
def test_a_comparison_continues_after_a_broken_connection(
    restore, new_bucket, unruly_s3, monkeypatch
):
    assert restore(prefix="large").status == 0
    unruly_s3.cut_body(5 << 20, honest=False, kind="object", times=2)
    assert sums(restore("--json", prefix="large", endpoint=unruly_s3.endpoint))["equal"] == 1
    assert unruly_s3.struck == 2
    monkeypatch.setattr(target, "ATTEMPTS", 2)
    unruly_s3.cut_body(5 << 20, honest=False, kind="object", times=1)
    unruly_s3.say(BODIES["large"], kind="object")  # for every range
    expect_error(restore(prefix="large", endpoint=unruly_s3.endpoint), 5, "from byte")


@pytest.mark.thorough
@pytest.mark.parametrize("key", ["some/key-03", "large"])
def test_a_different_object_is_replaced_only_by_force(restore, new_bucket, key):
    mine, same_bytes = bytes(len(BODIES[key])), {"ContentType": "text/mine"}
    for body, options in ((mine, {}), (BODIES[key], same_bytes)):
        new_bucket.put(PREFIX + key, body, **options)
        expect_error(restore(prefix=key), 1, "1 object of 1", "--force")
        assert objects(new_bucket) == {key: body}
    assert restore("--force", prefix=key).status == 0
    assert objects(new_bucket) == {key: BODIES[key]}
    assert sums(restore("--json", prefix=key))["equal"] == 1


def test_an_object_that_appears_meanwhile_is_not_replaced(restore, new_bucket, unruly_s3):

    def appears(asked, answer):
        new_bucket.put(f"{PREFIX}a", b"another's")
        return answer

    unruly_s3.order(appears, kind="head", key=f"{PREFIX}a", times=1)
    expect_error(restore(prefix="a", endpoint=unruly_s3.endpoint), 1, "1 object of 2")
    assert objects(new_bucket) == {"a": b"another's", "a/b": b"2"}


def test_an_unlisted_object_is_found_when_writing(restore, new_bucket, unruly_s3):
    """An unlisted newer object of a stranger, and an equal one."""
    new_bucket.put(f"{PREFIX}some/key-05", b"another's")
    assert restore(prefix="some/key-07").status == 0
    unruly_s3.say(
        b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>", kind="listing"
    )
    done = restore("--json", prefix="some/", endpoint=unruly_s3.endpoint)
    expect_error(done, 1, "1 object of 20")
    assert (sums(done)["restored"], sums(done)["equal"], sums(done)["different"]) == (18, 1, 1)
    assert objects(new_bucket)["some/key-05"] == b"another's"


def test_an_object_in_cold_storage_stops_no_other(restore, new_bucket, unruly_s3):
    new_bucket.put(
        f"{PREFIX}some/key-05", BODIES["some/key-05"]
    )  # without a checksum, so that the restore reads it
    unruly_s3.fail(403, "InvalidObjectState", kind="object", key=f"{PREFIX}some/key-05")
    done = restore(prefix="some/", endpoint=unruly_s3.endpoint)
    expect_error(done, 1, "InvalidObjectState", "1 object of 20")
    assert len(objects(new_bucket)) == 20


def test_a_key_that_the_server_refuses_stops_no_other(restore, new_bucket, unruly_s3):
    unruly_s3.fail(
        404, "404", kind="object", key=f"{PREFIX}some/key-05"
    )  # moto's answer to a line feed in a key
    done = restore(prefix="some/", endpoint=unruly_s3.endpoint)
    expect_error(done, 1, "404", "1 object of 20")
    assert set(objects(new_bucket)) >= {key for key in BODIES if key.startswith("some/")} - {
        "some/key-05"
    }


def test_a_restore_works_without_permission_to_list(restore, new_bucket, unruly_s3):
    unruly_s3.fail(403, "AccessDenied", kind="listing")
    assert restore(prefix="some/", endpoint=unruly_s3.endpoint).status == 0
    assert len(objects(new_bucket)) == 20


def test_a_dry_run_writes_nothing(restore, new_bucket):
    done = restore("--dry-run")
    assert (done.status, objects(new_bucket), len(done.out.splitlines())) == (1, {}, len(FITTING))
    assert f"{len(FITTING)} would be written" in done.err


@pytest.mark.thorough
def test_a_killed_restore_to_a_bucket_continues(archived, new_bucket, tmp_path):
    to = (
        "restore",
        "src",
        f"s3://{new_bucket.name}/{PREFIX}",
        "--json",
        "--endpoint-url",
        new_bucket.endpoint,
    )
    for at_least in (1, 12):
        with archived.start(*to, TMPDIR=str(tmp_path)) as process:
            for _ in range(at_least):
                if not process.stdout.readline():
                    break
            process.send_signal(signal.SIGKILL)
        assert all(BODIES[key] == body for key, body in objects(new_bucket).items())
    assert (
        sums(archived.process(*to, TMPDIR=str(tmp_path)))["failed"] == 1
    )  # a key that is too long with the prefix
    assert not list(tmp_path.iterdir())
    assert objects(new_bucket) == FITTING


@pytest.mark.parametrize("key", ["some/key-03", "large"])
def test_a_write_with_a_lost_answer_counts_as_done(restore, new_bucket, unruly_s3, key):
    finishes = {
        "some/key-03": lambda asked: "x-amz-checksum-sha256" in map(str.lower, asked.headers)
    }
    completes = lambda asked: "uploadId" in asked.query and "partNumber" not in asked.query  # noqa: E731
    unruly_s3.fail(500, kind="object", times=1, when=finishes.get(key, completes))
    assert restore(prefix=key, endpoint=unruly_s3.endpoint).status == 0
    assert unruly_s3.struck == 1
    assert objects(new_bucket) == {key: BODIES[key]}


def test_a_server_without_checksums_is_read_back(restore, new_bucket, unruly_s3):
    def without_checksum(asked, answer):
        return with_header(answer, "x-amz-checksum-sha256", "")

    unruly_s3.order(without_checksum, kind="head")
    unruly_s3.order(without_checksum, kind="object", times=1)
    assert restore(prefix="some/key-03", endpoint=unruly_s3.endpoint).status == 0
    new_bucket.delete(f"{PREFIX}some/key-03")
    unruly_s3.well_behaved()
    unruly_s3.order(without_checksum, kind="head")
    unruly_s3.order(without_checksum, kind="object", times=1)
    unruly_s3.other_bytes(kind="object")
    expect_error(restore(prefix="some/key-03", endpoint=unruly_s3.endpoint), 9, "sent")


def test_a_server_with_incomplete_listings_is_understood(restore, new_bucket, unruly_s3):
    def without_etag(asked, answer):
        return replace(
            answer,
            headers={
                name: value for name, value in answer.headers.items() if name.lower() != "etag"
            },
        )

    new_bucket.put(
        f"{PREFIX}some/key-05", BODIES["some/key-05"]
    )  # without a checksum, so that the restore reads it
    unruly_s3.say(b"<ListBucketResult></ListBucketResult>", kind="listing")
    unruly_s3.order(without_etag, kind="head")
    done = sums(restore("--json", prefix="some/key-05", endpoint=unruly_s3.endpoint))
    assert (done["equal"], done["listed"]) == (1, 1)
    unruly_s3.order(without_etag, kind="object")
    expect_error(restore(prefix="large", endpoint=unruly_s3.endpoint), 5, "ETag")
    assert (set(objects(new_bucket)), uploads(new_bucket)) == ({"some/key-05"}, [])


def test_a_multipart_upload_without_an_id_is_one_sentence(restore, new_bucket, unruly_s3):
    unruly_s3.say(
        b"<InitiateMultipartUploadResult/>",
        kind="object",
        when=lambda asked: "uploads" in asked.query,
    )
    expect_error(restore(prefix="large", endpoint=unruly_s3.endpoint), 5, "in parts")
    assert objects(new_bucket) == {}


def test_an_object_of_unknown_size_is_compared_by_reading(restore, new_bucket, unruly_s3):
    def without_length(asked, answer):
        return replace(with_header(answer, "x-amz-checksum-sha256", ""), length=-1)

    body = BODIES["some/key-05"]
    for there, outcome in (
        (body, "equal"),
        (body + b"more", "different"),
        (body[:-1], "different"),
    ):
        new_bucket.put(f"{PREFIX}some/key-05", there)
        unruly_s3.order(without_length, kind="head")
        done = sums(restore("--json", prefix="some/key-05", endpoint=unruly_s3.endpoint))
        assert (done[outcome], done["listed"]) == (1, 1)


def test_wrong_bytes_never_become_an_object(archived, restore, new_bucket):
    spoilt = {}
    wrong = {"some/key-03", "large"}
    for file in archived.folder.glob(".caf/store/chunks/*.caf"):
        data = spoilt[file] = file.read_bytes()
        for key in wrong:
            data = data.replace(BODIES[key][-1000:], BODIES[key][-1000:][::-1])
        file.write_bytes(data)
    try:
        expect_error(restore(), 9, f"3 objects of {len(BODIES)} ")
    finally:
        for file, data in spoilt.items():
            file.write_bytes(data)
    assert objects(new_bucket) == {key: body for key, body in FITTING.items() if key not in wrong}
    assert uploads(new_bucket) == []


def test_headers_are_restored_without_a_manifest(archived, restore, new_bucket):
    kept = {file: file.read_bytes() for file in archived.folder.glob(".caf/store/chunks/*.caf")}
    for file, data in kept.items():
        file.write_bytes(data[:-3000] + bytes(3000))
    try:
        assert restore(prefix="a").status == 0
    finally:
        for file, data in kept.items():
            file.write_bytes(data)
    assert objects(new_bucket) == {"a": b"1", "a/b": b"2"}
    assert (
        new_bucket.client.head_object(Bucket=new_bucket.name, Key=f"{PREFIX}a")["ContentType"]
        == "text/plain"
    )


@pytest.mark.thorough
def test_an_unusable_destination_is_refused(restore, unruly_s3):
    expect_error(restore(endpoint="http://127.0.0.1:1"), 5, "connection refused", "--endpoint-url")
    for kind, done in (("head", "read"), ("object", "written")):
        unruly_s3.well_behaved()
        unruly_s3.fail(403, "AccessDenied", kind=kind)
        expect_error(
            restore(prefix="a", endpoint=unruly_s3.endpoint),
            5,
            f"may not be {done}",
            "grant s3:ListBucket",
        )
    unruly_s3.well_behaved()
    unruly_s3.fail(507, "XMinioStorageFull", kind="object")
    expect_error(
        restore(prefix="x", endpoint=unruly_s3.endpoint), 5, "takes no more", "XMinioStorageFull"
    )


_ENDPOINT_FROM = (
    "--endpoint-url (of the job: `endpoint_url`), AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL"
)


def test_unusable_addresses_and_options_are_named(restore, new_bucket):
    expect_error(restore(to=f"s3://{new_bucket.name}/\udcff"), 2, "UTF-8")
    for endpoint, must in (
        ("127.0.0.1:9000", "must begin with http"),
        ("http://me:secret@host", "must not hold a user"),
    ):
        wrong = restore(endpoint=endpoint)
        expect_error(wrong, 2, f"server cannot be used: it {must}", f"correct {_ENDPOINT_FROM}")
        assert not any(word in wrong.err for word in ("s3://", "secret"))
    expect_error(
        restore(to="s3://no-such-bucket"), 5, "there is no bucket", f"and {_ENDPOINT_FROM}"
    )
    expect_error(restore("--profile", "nobody"), 3, "no profile 'nobody'", "--profile")
    assert objects(new_bucket) == {}


def test_the_environment_names_the_server_as_for_the_aws_tools(archived, new_bucket):
    to = f"s3://{new_bucket.name}/back"
    assert archived("restore", "src", "x", to, AWS_ENDPOINT_URL=new_bucket.endpoint).status == 0
    assert objects(new_bucket) == {"x//y": b"4"}
    head = new_bucket.client.head_object(
        Bucket=new_bucket.name, Key=f"{PREFIX}x//y", ChecksumMode="ENABLED"
    )
    assert base64.b64decode(head["ChecksumSHA256"]) == hashlib.sha256(b"4").digest()
