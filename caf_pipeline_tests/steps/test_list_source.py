"""Parallel listings give the same snapshot as sequential ones, after any crash."""

import json
import multiprocessing
import os
import random
import signal
import tempfile
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.errors import IntegrityError, SourceDenied, SourceUnreachable, StagingError
from caf_pipeline.inventory.key_split import LAST, split_key, text_of
from caf_pipeline.inventory.snapshot import read_objects, read_snapshot
from caf_pipeline.source.s3.listing import RequestRate
from caf_pipeline.steps import list_source
from caf_pipeline.steps.inventories import take_inventory
from caf_pipeline.waits import Waits
from caf_pipeline_tests.contracts.object_source import KEYS
from caf_pipeline_tests.support.listing_contexts import a_listing_context, left_in
from caf_pipeline_tests.support.listing_server import (
    ListedKeys,
    by_component,
    by_utf16,
    listing_source,
)
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.s3_server import s3_error
from caf_pipeline_tests.support.snapshots import damage_page
from caf_pipeline_tests.support.tiers import sampled


def keys_of(snapshot) -> list[bytes]:
    return [obj.key for obj in read_objects(snapshot.path)]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(list_source, "PIECE_OBJECTS", 20)


CHANCE = random.Random("listing")
HEX = [f"{CHANCE.getrandbits(64):016x}".encode() for _ in range(400)]
SHAPES = {
    "none": [],
    "one": [b"a"],
    "a page": [b"%02d" % number for number in range(10)],
    "in sequence": [b"data/%06d" % number for number in range(400)],
    "random": HEX,
    "deep under one beginning": [b"a/very/deep/beginning/" * 5 + key for key in HEX],
    "by days": [
        b"logs/2026/%02d/%02d/%d" % (month, day, n)
        for month in range(1, 13)
        for day in range(1, 29)
        for n in (1, 2)
    ],
    "beginnings of each other": [b"a" * length for length in range(1, 400)],
    "long": [b"x" * 1008 + key for key in HEX],
    "beyond ASCII": [
        "".join(CHANCE.choices("日本語éü\U0001f600\U0010ffff\ue000", k=8)).encode()
        for _ in range(400)
    ],
    "no UTF-8": [bytes(CHANCE.choices(range(1, 256), k=6)) for _ in range(400)],
    "control characters": [bytes(CHANCE.choices(range(1, 33), k=6)) for _ in range(400)],
    "folders": [b"/".join(CHANCE.choices([b"", b"a", b"-", b"b"], k=7)) + b"/" for _ in range(400)],
    "of every kind": [key.encode() for key in KEYS]
    + [key.encode() + b"/" + more for key in KEYS[:50] for more in HEX[:5]],
}


@pytest.mark.thorough
@pytest.mark.parametrize("versioned", sampled([False, True], every=2))
@pytest.mark.parametrize("shape", sampled(SHAPES, every=2))
def test_parallel_listing_has_each_object_once_in_order(
    scripted_s3, tmp_path, small_pieces, shape, versioned
):
    keys = set(SHAPES[shape])
    if versioned and shape == "no UTF-8":
        pytest.skip("a listing of versions cannot be asked to go on at such a key, and says so")
    objects = ListedKeys(keys, versioned=versioned).serve(scripted_s3, page_keys=10)
    snapshot = take_inventory(a_listing_context(tmp_path, objects))
    assert keys_of(snapshot) == sorted(keys)
    assert (snapshot.object_count, snapshot.object_bytes) == (len(keys), 3 * len(keys))
    assert left_in(tmp_path) == []


@pytest.mark.thorough
@pytest.mark.parametrize("shape", ["in sequence", "random", "deep under one beginning", "by days"])
def test_parallel_listing_needs_few_extra_pages(scripted_s3, tmp_path, shape):
    """A split may cost one useless page."""
    keys = set(SHAPES[shape])
    listed = ListedKeys(keys)
    starts = lambda: {request.query.get("start-after") for request in listed.pages}  # noqa: E731
    take_inventory(
        a_listing_context(
            tmp_path / "one", listed.serve(scripted_s3, page_keys=5), listing_threads=1
        )
    )
    assert starts() == {None}
    serial = len(listed.pages)
    listed.pages.clear()
    take_inventory(
        a_listing_context(
            tmp_path / "eight", listed.serve(scripted_s3, page_keys=5), listing_threads=8
        )
    )
    assert len(starts()) > 4
    assert len(listed.pages) < 2 * serial


@pytest.mark.thorough
def test_two_pages_are_listed_by_one_thread(scripted_s3, tmp_path):
    for attempt in range(40):  # another thread may come too late
        listed = ListedKeys([b"%03d" % key for key in range(11 + attempt % 10)])
        take_inventory(
            a_listing_context(
                tmp_path / f"{attempt}", listed.serve(scripted_s3, page_keys=10), listing_threads=8
            )
        )
        assert [request.query.get("start-after") for request in listed.pages] == [None, None]


@pytest.mark.thorough
@pytest.mark.parametrize("versioned", [False, True])
def test_real_server_gives_same_listing_in_parts(new_bucket, tmp_path, versioned):
    keys = KEYS
    if versioned:
        new_bucket.keep_versions()
        keys = [
            key for key in KEYS if key.isprintable()
        ]  # moto cannot resume a listing of versions at another key
    for key in keys:
        new_bucket.put(key, key.encode())
    for key in keys[::3] if versioned else ():
        new_bucket.put(key, b"newer")
        new_bucket.delete(key + "deleted")
    parts = take_inventory(a_listing_context(tmp_path / "parts", new_bucket.source(page_keys=3)))
    serial = take_inventory(
        a_listing_context(tmp_path / "serial", new_bucket.source(page_keys=1000), listing_threads=1)
    )
    assert list(read_objects(parts.path)) == list(read_objects(serial.path))
    assert keys_of(parts) == sorted(key.encode() for key in keys)


TEXT = st.text(min_size=1, max_size=4).map(lambda text: text.encode("utf-8", "replace"))


@pytest.mark.thorough
@given(
    st.sets(st.binary(min_size=1, max_size=4) | TEXT),
    st.integers(1, 4),
    st.tuples(st.binary(max_size=3), st.none() | st.binary(min_size=1, max_size=3)),
    st.tuples(st.sampled_from([bytes, by_component]), st.booleans()),
)
@settings(max_examples=30)
def test_any_keys_in_any_server_order_are_listed_completely(
    scripted_s3, keys, size, bounds, server
):
    (after, until), (order, starts) = bounds, server
    scripted_s3.requests.clear()
    listed = ListedKeys({key for key in keys if b"\0" not in key}, order=order, starts=starts)
    with tempfile.TemporaryDirectory() as folder:
        context = a_listing_context(Path(folder), listed.serve(scripted_s3, page_keys=size))
        whole = keys_of(take_inventory(context))
        assert whole == sorted(listed.keys)
        if order is bytes:
            part = keys_of(take_inventory(context, after=after, until=until))
            assert part == [key for key in whole if key > after and (until is None or key <= until)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "server",
    [
        {"order": by_component},
        {"order": by_utf16},
        {"order": lambda key: key[::-1]},
        {"starts": False},
    ],
)
@pytest.mark.parametrize(
    "shape", sampled(["folders", "beyond ASCII", "random", "in sequence"], every=4)
)
def test_a_server_with_an_order_of_its_own_loses_nothing(
    scripted_s3, tmp_path, small_pieces, shape, server
):
    keys = set(SHAPES[shape])
    objects = ListedKeys(keys, **server).serve(scripted_s3, page_keys=10)
    assert keys_of(take_inventory(a_listing_context(tmp_path, objects))) == sorted(keys)
    assert left_in(tmp_path) == []


def test_disorder_only_where_ranges_meet_loses_nothing(scripted_s3, tmp_path):
    """Each page is in order, but the keys of the first half are listed last."""
    keys = [b"%04d" % number for number in range(200)]
    listed = ListedKeys(
        keys,
        order=lambda key: (b"0100" <= key < b"0105", key) if key != b"0150" else (False, b"0099x"),
    )
    assert keys_of(
        take_inventory(a_listing_context(tmp_path, listed.serve(scripted_s3, page_keys=5)))
    ) == sorted(keys)


def test_server_without_start_after_is_listed_from_start(scripted_s3, tmp_path):
    listed = ListedKeys(HEX)
    objects = listed.serve(scripted_s3, page_keys=10)
    scripted_s3.answer = lambda asked: (
        s3_error(400, "InvalidArgument") if "start-after" in asked.query else listed(asked)
    )
    assert keys_of(take_inventory(a_listing_context(tmp_path, objects))) == sorted(HEX)


def test_object_created_where_ranges_meet_is_no_disorder(scripted_s3, tmp_path):
    keys = set(HEX)

    def grow(number: int) -> None:
        keys.update(key + b"-%d" % number for key in CHANCE.sample(HEX, 3))

    listed = ListedKeys(keys, on_page=grow)
    snapshot = take_inventory(a_listing_context(tmp_path, listed.serve(scripted_s3, page_keys=10)))
    listed_keys = keys_of(snapshot)
    assert set(HEX) <= set(listed_keys) <= keys
    assert all(first < second for first, second in pairwise(listed_keys))
    assert any("start-after" in request.query for request in listed.pages[: len(listed.pages) // 2])


# --- interrupted ----------------------------------------------------------------------------------


def _list_and_die(endpoint: str, folder: str) -> None:
    list_source.PIECE_OBJECTS = 20
    take_inventory(a_listing_context(Path(folder), listing_source(endpoint, 10)))


@pytest.mark.thorough
@pytest.mark.parametrize("versioned", [False, True])
def test_a_listing_whose_process_was_killed_is_gone_on_with(
    scripted_s3, tmp_path, small_pieces, versioned
):
    process = multiprocessing.get_context("forkserver").Process(
        target=_list_and_die, args=(scripted_s3.endpoint, str(tmp_path))
    )
    fatal = 120 if versioned else 30
    listed = ListedKeys(
        HEX,
        versioned=versioned,
        on_page=lambda number: number == fatal and os.kill(process.pid, signal.SIGKILL),
    )
    objects = listed.serve(scripted_s3, page_keys=10)
    before = datetime.now(UTC)
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == -signal.SIGKILL
    between = datetime.now(UTC)
    [folder] = left_in(tmp_path)
    listed.pages.clear()
    listed.on_page = lambda number: None
    snapshot = take_inventory(a_listing_context(tmp_path, objects))
    assert keys_of(snapshot) == sorted(HEX)
    assert before <= snapshot.listed_at <= between
    assert (snapshot.taken_at, snapshot.listed_at) == (
        read_snapshot(snapshot.path).taken_at,
        snapshot.listed_at,
    )
    resumed = len(listed.pages)
    listed.pages.clear()
    again = take_inventory(a_listing_context(tmp_path / "new", objects))
    assert keys_of(again) == keys_of(snapshot)
    assert resumed < len(listed.pages)
    assert left_in(tmp_path) == [], folder


@pytest.fixture
def interrupted(scripted_s3, tmp_path, small_pieces):
    """A listing that failed half-way, and its server, which works again."""
    listed = ListedKeys(HEX)
    objects = listed.serve(scripted_s3, page_keys=10)
    scripted_s3.answer = lambda asked: (
        s3_error(403, "ExpiredToken") if len(listed.pages) >= 25 else listed(asked)
    )
    with pytest.raises(SourceDenied, match="refuses the credentials"):
        take_inventory(a_listing_context(tmp_path, objects))
    scripted_s3.answer = listed
    listed.pages.clear()
    return listed, objects


def test_failed_listing_leaves_no_snapshot_and_is_resumed(interrupted, tmp_path):
    listed, objects = interrupted
    assert list(tmp_path.glob("inventories/src/*.parquet")) == []
    assert len(left_in(tmp_path)) == 1
    assert keys_of(take_inventory(a_listing_context(tmp_path, objects))) == sorted(HEX)
    assert len(listed.pages) < 35
    assert left_in(tmp_path) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changed", [{"prefix": "0"}, {"endpoint_url": "http://elsewhere"}, {"bucket": "another"}]
)
def test_a_listing_of_something_else_is_not_gone_on_with(interrupted, tmp_path, changed):
    listed, objects = interrupted
    snapshot = take_inventory(a_listing_context(tmp_path, objects, **changed))
    assert keys_of(snapshot) == sorted(HEX)
    assert len(listed.pages) >= 40


def test_bounds_are_part_of_what_is_listed(interrupted, tmp_path):
    _, objects = interrupted
    assert keys_of(take_inventory(a_listing_context(tmp_path, objects), after=b"8")) == sorted(
        key for key in HEX if key > b"8"
    )
    assert len(left_in(tmp_path)) == 1  # the other listing may still be resumed


def from_the_future(tmp_path):
    """Change the time of the listing that was begun."""
    (record,) = tmp_path.glob("inventories/src/.listing-*/listing.json")
    listed_at = (datetime.now(UTC) + timedelta(days=300)).isoformat()
    record.write_text(json.dumps(json.loads(record.read_text()) | {"listed_at": listed_at}))


@pytest.mark.parametrize("why", ["too old", "future clock", "older than a whole inventory"])
def test_outdated_listing_is_removed_and_begun_anew(interrupted, tmp_path, monkeypatch, why):
    listed, objects = interrupted
    context = a_listing_context(tmp_path, objects)
    if why == "too old":
        monkeypatch.setattr(list_source, "MAX_RESUMED_AGE", timedelta(0))
    elif why == "future clock":
        from_the_future(tmp_path)
    else:
        take_inventory(context, resume=False)
        assert len(listed.pages) >= 40
        listed.pages.clear()
    take_inventory(context)
    assert len(listed.pages) >= 40
    assert left_in(tmp_path) == []


def test_listing_of_another_process_is_left_alone(interrupted, tmp_path):
    listed, objects = interrupted
    folder = tmp_path / "inventories" / "src"
    [name] = left_in(tmp_path)
    with list_source.alone_in(folder / name) as alone:
        assert alone
        take_inventory(a_listing_context(tmp_path, objects))
    assert len(listed.pages) >= 40
    assert left_in(tmp_path) == [name]


def test_folder_removed_before_lock_is_created_again(scripted_s3, tmp_path, monkeypatch):
    made = []

    def mkdtemp(**where):
        made.append(tempfile.mkdtemp(**where))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(list_source, "mkdtemp", mkdtemp)
    objects = ListedKeys({b"a", b"b"}).serve(scripted_s3, page_keys=10)
    assert keys_of(take_inventory(a_listing_context(tmp_path, objects))) == [b"a", b"b"]
    assert len(made) == 2
    assert left_in(tmp_path) == []


def test_a_damaged_piece_is_no_reason_to_fail(interrupted, tmp_path):
    _, objects = interrupted
    for piece in tmp_path.glob("inventories/src/.listing-*/*.parquet"):
        piece.write_bytes(piece.read_bytes()[:-9])
    assert keys_of(take_inventory(a_listing_context(tmp_path, objects))) == sorted(HEX)


def damage_name(piece: Path) -> None:
    """Rename a column."""
    piece.write_bytes(piece.read_bytes().replace(b"is_delete_marker", b"is_delete_markes"))


@pytest.mark.thorough
@pytest.mark.parametrize("damage", [lambda piece: damage_page(piece, "key"), damage_name])
def test_damaged_piece_is_named_and_listed_again(interrupted, tmp_path, damage):
    listed, objects = interrupted
    piece, *_ = sorted(tmp_path.glob("inventories/src/.listing-*/*.parquet"))
    damage(piece)
    context = a_listing_context(tmp_path, objects)
    with pytest.raises(IntegrityError, match=piece.name):
        take_inventory(context)
    listed.pages.clear()
    assert keys_of(take_inventory(context)) == sorted(HEX)
    assert len(listed.pages) < 10
    assert left_in(tmp_path) == []


def test_piece_with_changed_range_is_not_accepted(scripted_s3, tmp_path, small_pieces):
    """Otherwise its keys would be missing and count as deleted."""
    listed = ListedKeys(HEX)
    context = a_listing_context(
        tmp_path, listed.serve(scripted_s3, page_keys=10), listing_threads=1
    )
    scripted_s3.answer = lambda asked: (
        s3_error(403, "ExpiredToken") if len(listed.pages) >= 25 else listed(asked)
    )
    with pytest.raises(SourceDenied):
        take_inventory(context)
    scripted_s3.answer = listed
    *_, last = sorted(tmp_path.glob("inventories/src/.listing-*/*.parquet"))
    content = last.read_bytes()
    at = content.index(b'"through": "') + len(b'"through": "')
    last.write_bytes(content[:at] + b"f" + content[at + 1 :])  # a hexadecimal digit, the greatest
    assert keys_of(take_inventory(context)) == sorted(HEX)


def test_a_short_listing_that_failed_begins_anew(scripted_s3, tmp_path):
    """It has an object that was put meanwhile, and leaves no folder."""
    keys = set(HEX[:30])
    listed = ListedKeys(keys)
    objects = listed.serve(scripted_s3, page_keys=10)
    scripted_s3.answer = lambda asked: (
        s3_error(503, "SlowDown") if len(listed.pages) >= 2 else listed(asked)
    )
    with pytest.raises(SourceUnreachable):
        take_inventory(a_listing_context(tmp_path, objects))
    assert left_in(tmp_path) == []
    keys.add(b"0")
    scripted_s3.answer = listed
    assert b"0" in keys_of(take_inventory(a_listing_context(tmp_path, objects)))


def test_full_disk_ends_listing_with_one_error(scripted_s3, tmp_path, monkeypatch):
    def full(self, *_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(list_source.WholeParquet, "write", full)
    with pytest.raises(StagingError, match="No space left"):
        take_inventory(
            a_listing_context(tmp_path, ListedKeys(HEX).serve(scripted_s3, page_keys=10))
        )
    assert list(tmp_path.glob("inventories/src/*.parquet")) == []


# --- the rate and progress messages ---------------------------------------------------------------


def test_requests_are_spaced_out_over_all_threads(monkeypatch):
    slept = []
    monkeypatch.setattr("caf_pipeline.source.s3.listing.time.monotonic", lambda: 100.0)
    monkeypatch.setattr("caf_pipeline.source.s3.listing.time.sleep", slept.append)
    rate = RequestRate(4)
    for _ in range(4):
        rate.wait()
    assert slept == [0, 0.25, 0.5, 0.75]


def test_each_request_counts_also_one_that_is_sent_again(scripted_s3, tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(RequestRate, "wait", lambda self: waited.append(1))
    listed = ListedKeys(HEX)
    objects = listed.serve(scripted_s3, page_keys=100)
    failing = [s3_error(503, "SlowDown")]
    scripted_s3.answer = lambda asked: (
        failing.pop() if failing and "versioning" not in asked.query else listed(asked)
    )
    take_inventory(a_listing_context(tmp_path, objects))
    assert len(waited) == len(scripted_s3.requests) > len(listed.pages) + 1


def test_a_long_listing_says_how_many_objects_it_has(scripted_s3, tmp_path, monkeypatch):
    sentences = []
    monkeypatch.setattr(list_source, "PROGRESS_SECONDS", 0.0)
    waits = Waits(lambda waits: sentences.extend(wait.sentence for wait in waits))
    take_inventory(
        a_listing_context(tmp_path, ListedKeys(HEX).serve(scripted_s3, page_keys=10), waits=waits)
    )
    assert any("'src'" in sentence and " 2" in sentence for sentence in sentences)


# --- where a range is split -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "until", "prefix", "jump", "split"),
    [
        ((b"a0", b"a1"), None, "", False, b"c"),
        ((b"a0", b"a1"), b"c", "", False, b"b"),
        ((b"a0", b"a1"), b"b", "", False, b"ab"),
        ((b"p/a", b"p/b"), None, "p/", False, b"p/c"),
        ((b"a0", b"a1"), None, "", True, ("a" + LAST).encode()),
        ((b"abcd0", b"abcd1"), None, "", True, ("ab" + LAST).encode()),
        ((b"abcd0", b"abcd1"), b"abd", "", True, ("abc" + LAST).encode()),
        ((b"\x01c0", b"\x01c1"), b"\x01d", "", False, None),
        ((b"c", b"c\xff"), b"c\xff\x01", "", False, None),
    ],
)
def test_range_is_split_where_more_keys_are_likely(seen, until, prefix, jump, split):
    assert split_key(*seen, until, alphabet="abc01", prefix=prefix, jump=jump) == split


@given(st.binary(min_size=1, max_size=5), st.binary(max_size=5), st.text(), st.booleans())
def test_split_key_is_text_between_last_key_and_end(last, more, alphabet, jump):
    alphabet = text_of(alphabet.encode("utf-8", "surrogatepass"))
    split = split_key(last, last, last + more if more else None, alphabet=alphabet, jump=jump)
    assert split is None or last < text_of(split).encode() == split
    assert split is None or not more or split < last + more
