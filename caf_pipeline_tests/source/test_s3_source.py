"""S3Source on a real server, with versions and without, and what else S3 keeps of an object."""

import hashlib
import zlib
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.errors import ObjectUnavailable
from caf_pipeline.inventory.objects import S3Object, SkipReason
from caf_pipeline.source.s3.errors import BucketAddress, RequestPolicy
from caf_pipeline.source.s3.source import open_s3_source
from caf_pipeline.waits import Waits
from caf_pipeline_tests.contracts.object_source import KEYS, ObjectSourceContract, listed, whole
from caf_pipeline_tests.support.s3_server import make_bucket


class TestWithoutVersions(ObjectSourceContract):
    @pytest.fixture
    def bucket(self, new_bucket):
        return new_bucket


class TestWithVersions(ObjectSourceContract):
    @pytest.fixture
    def bucket(self, new_bucket):
        new_bucket.keep_versions()
        return new_bucket

    # moto does not encode keys in a listing of versions, and XML cannot hold control characters.
    @pytest.mark.thorough
    @pytest.mark.parametrize(
        "key", [key for key in KEYS if min(key) >= " " and key not in ("\uffff",)]
    )
    def test_every_key_is_listed_and_read_as_itself(self, bucket, key):
        super().test_every_key_is_listed_and_read_as_itself(bucket, key)


# Versions.


def test_a_replaced_version_still_reads_as_listed(new_bucket):
    new_bucket.keep_versions()
    for key in ("a", "a/"):
        new_bucket.put(key, b"first")
    source = new_bucket.source()
    objects = listed(source)
    new_bucket.put("a", b"second")
    new_bucket.delete("a/")
    assert [whole(source, obj) for obj in objects] == [b"first", b"first"]
    assert all(obj.version_id == obj.object_version for obj in objects)


def test_the_null_version_is_pinned_by_its_etag(new_bucket):
    new_bucket.put("a", b"before")
    new_bucket.keep_versions()
    source = new_bucket.source()
    [obj] = listed(source)
    assert (obj.version_id, obj.object_version) == (None, f"etag:{obj.etag}:6")
    new_bucket.put("a", b"after")
    with pytest.raises(ObjectUnavailable) as caught:
        whole(source, obj)
    assert caught.value.reason == SkipReason.CHANGED


def test_a_bucket_whose_versions_are_suspended_is_listed_by_versions(new_bucket):
    new_bucket.keep_versions()
    version_id = new_bucket.put("a", b"1")["VersionId"]
    new_bucket.keep_versions("Suspended")
    assert [obj.version_id for obj in listed(new_bucket.source())] == [version_id]


@pytest.mark.parametrize("key", ["a", "a/"])
def test_a_version_that_was_removed_for_good_is_deleted(new_bucket, key):
    new_bucket.keep_versions()
    version_id = new_bucket.put(key, b"1")["VersionId"]
    source = new_bucket.source()
    [obj] = listed(source)
    new_bucket.client.delete_object(Bucket=new_bucket.name, Key=key, VersionId=version_id)
    with pytest.raises(ObjectUnavailable) as caught:
        whole(source, obj)
    assert caught.value.reason == SkipReason.DELETED


# Keys.


pieces = st.one_of(
    st.sampled_from(
        ["/", "//", ".", "..", "%2F", "%2E", "%", "+", " ", "?", "#", "\\", "\x01", "~", "a"]
    ),
    st.text(
        st.characters(exclude_characters="\0\n", exclude_categories=["Cs"]), min_size=1, max_size=3
    ),
)


@pytest.mark.thorough
@given(st.lists(pieces, min_size=1, max_size=6).map("".join))
@settings(max_examples=50)
def test_any_key_is_read_as_itself(s3_server, key):
    bucket = make_bucket(s3_server, "bucket-of-keys")
    bucket.put(key, key.encode())
    answer = bucket.client.head_object(Bucket=bucket.name, Key=key)
    obj = S3Object(
        key.encode(),
        None,
        answer["ETag"].strip('"'),
        answer["ContentLength"],
        answer["LastModified"],
    )
    assert whole(bucket.source(), obj) == key.encode()


# Headers.


def test_get_and_head_return_the_same_headers(new_bucket):
    metadata = {
        "content-type": "mine",
        "cache-control": "mine too",
        "storage-class": "x",
        "a": "=?UTF-8?B?w6k=?=",
    }
    headers = {
        "ContentType": "text/x; charset=utf-8",
        "ContentEncoding": "gzip",
        "ContentLanguage": "de",
        "ContentDisposition": 'attachment; filename="a"',
        "CacheControl": "no-store",
        "Expires": datetime(2030, 1, 1),  # noqa: DTZ001 - boto3 wants it so
        "Metadata": {"One": "1", **metadata},
        "StorageClass": "STANDARD_IA",
    }
    new_bucket.put("a", b"not really gzip", **headers)
    source = new_bucket.source()
    [obj] = listed(source)
    plain = source.read(obj, 0, obj.size_bytes)
    assert plain.headers == source.read(obj, 1, 2).headers == source.read_headers(obj).headers
    assert plain.headers.content_type == "text/x; charset=utf-8"
    assert plain.headers.content_disposition == 'attachment; filename="a"'
    assert (plain.headers.content_encoding, plain.headers.content_language) == ("gzip", "de")
    assert (plain.headers.cache_control, plain.headers.expires) == (
        "no-store",
        "Tue, 01 Jan 2030 00:00:00 GMT",
    )
    assert plain.headers.user_metadata == {"one": "1", **metadata}
    assert bytes(plain.body) == b"not really gzip"
    assert {obj.storage_class for obj in listed(source)} == {"STANDARD_IA"}


# Checksums.


@pytest.mark.parametrize("key", ["a", "a//"])
@pytest.mark.parametrize(
    ("algorithm", "digest"),
    [
        ("SHA256", hashlib.sha256(b"x").digest()),
        ("SHA1", hashlib.sha1(b"x").digest()),
        ("CRC32", zlib.crc32(b"x").to_bytes(4)),
    ],
)
def test_the_checksum_of_a_full_object_is_its_raw_digest(new_bucket, algorithm, digest, key):
    new_bucket.put(key, b"x", ChecksumAlgorithm=algorithm)
    source = new_bucket.source()
    [obj] = listed(source)
    checksum = source.full_object_checksum(obj)
    assert (checksum.algorithm, checksum.digest) == (algorithm.lower(), digest)
    assert source.read(obj, 0, 1).checksum == checksum


def test_an_object_without_a_listed_checksum_has_none(new_bucket):
    new_bucket.put("a", b"x")
    source = new_bucket.source()
    assert listed(source)[0].checksum == ""
    assert source.full_object_checksum(listed(source)[0]) is None


def test_a_changed_object_has_no_checksum(new_bucket):
    new_bucket.put("a", b"x", ChecksumAlgorithm="SHA256")
    source = new_bucket.source()
    [obj] = listed(source)
    new_bucket.put("a", b"y", ChecksumAlgorithm="SHA256")
    with pytest.raises(ObjectUnavailable) as caught:
        source.full_object_checksum(obj)
    assert caught.value.reason == SkipReason.CHANGED


# Skips that moto knows.


@pytest.mark.parametrize("key", ["a", "a/"])
def test_cold_storage_is_decided_by_the_get(new_bucket, key):
    new_bucket.put(key, b"x", StorageClass="GLACIER")
    source = new_bucket.source()
    [obj] = listed(source)
    with pytest.raises(ObjectUnavailable, match="cold storage") as caught:
        whole(source, obj)
    assert caught.value.reason == SkipReason.COLD_STORAGE
    restore = {"Bucket": new_bucket.name, "Key": key, "RestoreRequest": {"Days": 1}}
    new_bucket.client.restore_object(**restore)
    assert obj.storage_class == "GLACIER"
    assert whole(source, obj) == b"x"


# Opening.


def test_a_source_opens_from_settings_or_a_client(new_bucket):
    new_bucket.put("p/a", b"x")
    opened = open_s3_source("demo", new_bucket.settings(prefix="p/"), attempts=2)
    with_client = open_s3_source(
        "demo", new_bucket.settings(prefix="p/"), attempts=2, client=new_bucket.client
    )
    assert listed(opened) == listed(with_client)
    assert whole(opened, listed(opened)[0]) == whole(with_client, listed(with_client)[0]) == b"x"


def test_gets_ignore_other_endpoints_and_keys_in_the_environment(new_bucket, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ENDPOINT": "http://127.0.0.1:1",
        "AWS_ACCESS_KEY_ID": "other",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
        "AWS_BUCKET": "other",
    }.items():
        monkeypatch.setenv(name, value)
    new_bucket.put("a", b"x")
    source = open_s3_source("demo", new_bucket.settings(), attempts=1)
    [obj] = listed(source)
    assert whole(source, obj) == b"x"


def test_answers_to_one_thread_end_the_reported_wait():
    """They wait by the same words, so that one of many threads is always within a request."""
    asking = RequestPolicy(BucketAddress("demo", "b", "http://127.0.0.1:1"), 1, Waits())
    with asking.waiting(60) as others:
        before = others.began
        assert asking.attempt(lambda: "answer") == "answer"
        assert others.began > before
