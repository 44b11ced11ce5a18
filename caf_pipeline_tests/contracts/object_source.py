"""The contract of every ObjectSource.

A test class of an implementation inherits it and defines the fixture `bucket`. A bucket has
`put(key, body, **headers)`, `delete(key)` and `source(prefix, page_keys=…)`, which opens it as a
source.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise

import pytest

from caf_pipeline.errors import ObjectUnavailable
from caf_pipeline.inventory.objects import S3Object, SkipReason
from caf_pipeline.source.protocol import LastPage
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.tiers import sampled

# Clients and servers change some of them. moto cannot store a key with a line feed.
KEYS = [
    "/abs", "a/", "a//b", "//", "///", "/", "a//", ".", "..", "./x", "../x", "a/.", "a/..",
    "a/./b", "a/../b",
    "http://x/y", "\x01", "a\tb", "a\rb", "a\x0bb", "a\x1fb", "a\x7fb",
    "a", "a/b", "...", "..x", "x..", ".x", "a/.b/c", "%", "%zz", "a%", "a%2Fb", "a%20b", "a%25b",
    "+", "a+b", " ", " a", "a ",
    "a b", "~", "*", "\\", "a\\b", "?", "a?b=c", "?versionId=x", "#", "a#b", "&", "&amp;",
    "<Key>", "a&b=c", "[x]", "{x}", "|",
    "^", "`", "\"", "'", "=", ";", ":", "@", "!", "$", "(", ")", ",", "C:\\x", "é", "e\u0301",
    "日本", "\U0001f600", "\x80",
    "\u0085", "\u00a0", "\u2028", "\u200d", "\ufeff", "\uffff", "x" * 1024, "é" * 512,
]  # fmt: skip


def listed(source, **bounds) -> list[S3Object]:
    return [obj for page in source.list_pages(**bounds) for obj in page]


def whole(source, obj: S3Object) -> bytes:
    """Return an object's bytes, after comparing `read` with `begin`."""
    ended = threading.Event()
    pending = source.begin(obj, 0, obj.size_bytes, ended.set)
    part = source.read(obj, 0, obj.size_bytes)
    assert pending is None or (pending.part() == part and ended.wait(PATIENCE_SECONDS))
    return bytes(part.body)


def body_or_reason(source, obj: S3Object, start_byte: int, end_byte: int) -> bytes | str:
    try:
        return bytes(source.read(obj, start_byte, end_byte).body)
    except ObjectUnavailable as error:
        return error.reason


class ObjectSourceContract:
    """The contract: see `ObjectSource`."""

    def test_a_begun_range_equals_a_read(self, bucket):
        bucket.put("a", b"0123456789")
        source = bucket.source()
        [obj] = listed(source)
        pending = source.begin(obj, 2, 5, lambda: None)
        assert pending is None or pending.part() == source.read(obj, 2, 5)

    def test_an_empty_bucket_lists_nothing(self, bucket):
        assert listed(bucket.source()) == []

    def test_objects_are_listed_in_byte_order(self, bucket):
        for key in ("b", "a/b", "é", "a", "Z", "a-"):
            bucket.put(key, key.encode() * 3)
        objects = listed(bucket.source())
        assert [obj.key for obj in objects] == sorted(
            key.encode() for key in ("b", "a/b", "é", "a", "Z", "a-")
        )
        assert listed(bucket.source(page_keys=1), in_order=True) == objects
        assert [obj.size_bytes for obj in objects] == [3 * len(obj.key) for obj in objects]
        assert all(obj.last_modified.utcoffset() == timedelta(0) for obj in objects)
        assert all(obj.etag and '"' not in obj.etag for obj in objects)

    @pytest.mark.parametrize("page_keys", [1, 2, 3, 7, 1000])
    def test_pages_of_any_size_hold_each_object_once(self, bucket, page_keys):
        keys = [f"k{number}".encode() for number in range(7)]
        for key in keys:
            bucket.put(key)
        assert [obj.key for obj in listed(bucket.source(page_keys=page_keys))] == keys

    def test_a_bounded_listing_continues_after_its_last_key(self, bucket):
        keys = [f"k {number}+%".encode() for number in range(5)]
        for key in keys:
            bucket.put(key)
        source = bucket.source(page_keys=2)
        first = listed(source, max_pages=1)
        assert 0 < len(first) < 5
        assert [obj.key for obj in first + listed(source, after=first[-1].key)] == keys

    def test_only_the_last_page_is_marked_as_last(self, bucket):
        for number in range(4):
            bucket.put(f"k{number}")
        source = bucket.source(page_keys=2)
        assert [isinstance(page, LastPage) for page in source.list_pages()] == [False, True]
        assert [isinstance(page, LastPage) for page in source.list_pages(max_pages=1)] == [False]
        assert [
            isinstance(page, LastPage) for page in source.list_pages(after=b"k1", max_pages=1)
        ] == [True]

    @pytest.mark.parametrize(
        "after",
        [b"", b"b", b"b\xff", b"\xff", "bé".encode()[:-1], b"\0nul", b"b\x1f"],
    )
    def test_after_is_an_exclusive_bound_of_any_bytes(self, bucket, after):
        keys = [b"a", b"b", b"b1", "bé".encode(), b"c", "é".encode()]
        for key in keys:
            bucket.put(key)
        assert [obj.key for obj in listed(bucket.source(), after=after)] == sorted(
            key for key in keys if key > after
        )

    @pytest.mark.parametrize(
        ("prefix", "keys"),
        [("a/", [b"a/b", b"a/c d"]), ("a/c ", [b"a/c d"]), ("x", []), ("é/", ["é/x".encode()])],
    )
    def test_a_prefix_bounds_the_listing_and_stays_in_the_keys(self, bucket, prefix, keys):
        for key in ("a", "a/b", "a/c d", "ab", "é/x"):
            bucket.put(key)
        assert [obj.key for obj in listed(bucket.source(prefix))] == keys

    def test_overwritten_objects_are_listed_once_and_deleted_ones_never(self, bucket):
        for key, body in (("a", b"old"), ("a", b"newer"), ("b", b""), ("c", b"")):
            bucket.put(key, body)
        bucket.delete("b")
        source = bucket.source()
        assert [(obj.key, obj.size_bytes) for obj in listed(source)] == [(b"a", 5), (b"c", 0)]
        assert whole(source, listed(source)[0]) == b"newer"

    @pytest.mark.parametrize("size_bytes", [0, 1, 1000, 3_000_000])
    def test_an_object_reads_back_as_it_was_put(self, bucket, size_bytes):
        body = (b"0123456789abcdef" * (size_bytes // 16 + 1))[:size_bytes]
        bucket.put("some/key", body)
        source = bucket.source()
        assert whole(source, listed(source)[0]) == body

    def test_ranges_add_up_to_the_object(self, bucket):
        bucket.put("a", bytes(range(256)))
        source = bucket.source()
        [obj] = listed(source)
        ends = [0, 1, 100, 255, 256]
        assert b"".join(source.read(obj, *bounds).body for bounds in pairwise(ends)) == bytes(
            range(256)
        )

    @pytest.mark.parametrize("bounds", [(-1, 2), (0, 4), (2, 1), (3, 3), (0, 0)])
    def test_an_invalid_range_is_refused(self, bucket, bounds):
        bucket.put("a", b"123")
        source = bucket.source()
        with pytest.raises(ValueError, match="no range of 3 bytes"):
            source.read(listed(source)[0], *bounds)

    @pytest.mark.parametrize("key", sampled(KEYS, every=4))
    def test_every_key_is_listed_and_read_as_itself(self, bucket, key):
        # The keys that a client might request instead exist, too.
        for other in {key.strip("/"), "a", "abs", "b", "x"} - {key, ""}:
            bucket.put(other, b"another one")
        bucket.put(key, b"the right one")
        source = bucket.source()
        [obj] = [obj for obj in listed(source) if obj.key == key.encode()]
        assert whole(source, obj) == b"the right one"
        assert bytes(source.read(obj, 4, 9).body) == b"right"

    def test_a_changed_object_is_never_read(self, bucket):
        bucket.put("a", b"old bytes")
        source = bucket.source()
        [obj] = listed(source)
        bucket.put("a", b"new bytes")
        for bounds in ((0, 9), (2, 5)):
            assert body_or_reason(source, obj, *bounds) in (
                b"old bytes"[slice(*bounds)],
                SkipReason.CHANGED,
            )

    def test_a_deleted_object_is_reported(self, bucket):
        for key in ("a", "b/"):
            bucket.put(key, b"bytes")
        source = bucket.source()
        for obj in listed(source):
            bucket.delete(obj.key)
            assert body_or_reason(source, obj, 0, 5) in (b"bytes", SkipReason.DELETED)

    @pytest.mark.parametrize("key", [b"\xff", b"a\0b", b"", b"x" * 1025])
    def test_an_unsupported_key_is_not_requested(self, bucket, key):
        bucket.put("a", b"1")
        source = bucket.source()
        obj = S3Object(key, None, "e", 1, listed(source)[0].last_modified)
        for ask in (lambda: source.read(obj, 0, 1), lambda: source.full_object_checksum(obj)):
            with pytest.raises(ObjectUnavailable) as caught:
                ask()
            assert caught.value.reason == SkipReason.UNSUPPORTED_KEY

    def test_objects_are_read_from_several_threads(self, bucket):
        for number in range(40):
            bucket.put(f"k{number:02d}" + "/" * (number % 2), b"%d" % number * 100)
        source = bucket.source()
        with ThreadPoolExecutor(8) as pool:
            bodies = list(pool.map(lambda obj: whole(source, obj), listed(source)))
        assert bodies == [b"%d" % number * 100 for number in range(40)]
