"""Parallel listings of a versioned bucket have each version once, as sequential ones."""

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.errors import SourceDenied, SourceUnreachable
from caf_pipeline.inventory.objects import VersionCounts
from caf_pipeline.inventory.snapshot import read_objects
from caf_pipeline.source.protocol import ObjectEvent, QueueMessage
from caf_pipeline.steps import chunk_steps, inventories, list_source, planning
from caf_pipeline.steps.inventories import take_inventory
from caf_pipeline.steps.notices import scan_noticed
from caf_pipeline_tests.support.listing_contexts import a_listing_context, left_in
from caf_pipeline_tests.support.listing_server import ListedKeys
from caf_pipeline_tests.support.run_contexts import a_run_context as with_ledger
from caf_pipeline_tests.support.s3_server import s3_error
from caf_pipeline_tests.support.tiers import sampled

CHANCE = random.Random("versions")


def some_versions(count: int, *, deleted: float = 0.0) -> list[str]:
    """Return version ids; about this many are delete markers."""
    return [
        f"{'d' if CHANCE.random() < deleted else 'v'}{CHANCE.getrandbits(48):012x}"
        for _ in range(count)
    ]


KEYS = [f"{CHANCE.getrandbits(40):010x}".encode() for _ in range(60)]
HISTORIES = {
    "one version each": {key: some_versions(1) for key in KEYS},
    "some versions each": {key: some_versions(CHANCE.randint(1, 9), deleted=0.2) for key in KEYS},
    "one key of hundreds": {key: some_versions(600 if key == KEYS[9] else 1) for key in KEYS},
    "nothing but one key": {b"k": some_versions(500, deleted=0.1)},
    "pages that end with each key": {key: some_versions(10) for key in KEYS},
    "pages that end within each key": {key: some_versions(7) for key in KEYS},
    "markers first": {key: ["d1", *some_versions(4)] for key in KEYS},
    "markers last": {key: [*some_versions(4), "d1"] for key in KEYS},
    "markers alone": {key: some_versions(CHANCE.randint(1, 4), deleted=1.0) for key in KEYS},
    "beginnings of each other": {
        b"a" * length: some_versions(4, deleted=0.3) for length in range(1, 60)
    },
    "with spaces and signs": {
        b"+% /" * (number % 3) + key: some_versions(5, deleted=0.3)
        for number, key in enumerate(KEYS)
    },
}


def expected(history) -> list[tuple[bytes, str, bool, bool]]:
    """Return key, version id and both flags of all versions, as a snapshot has them."""
    rows = [
        (key, version, at == 0, version.startswith("d"))
        for key, versions in history.items()
        for at, version in enumerate(versions)
    ]
    return sorted(rows)


def rows_of(snapshot) -> list[tuple[bytes, str, bool, bool]]:
    return [
        (obj.key, obj.version_id, obj.is_latest, obj.is_delete_marker)
        for obj in read_objects(snapshot.path)
    ]


def counts_of(history) -> VersionCounts:
    rows = expected(history)
    return VersionCounts(
        older=sum(not latest and not marker for *_, latest, marker in rows),
        markers=sum(marker for *_, marker in rows),
        deleted_keys=sum(latest and marker for *_, latest, marker in rows),
    )


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(list_source, "PIECE_OBJECTS", 20)


@pytest.fixture
def listing(shape, repeats, versions, threads):
    """Return the history that is listed, and how."""
    return HISTORIES[shape], repeats, versions, threads


@pytest.mark.parametrize("threads", sampled([1, 8], every=2))
@pytest.mark.parametrize("versions", ["all", "current"])
@pytest.mark.parametrize("repeats", [False, True], ids=["", "the last comes again"])
@pytest.mark.parametrize("shape", sampled(HISTORIES, every=3))
def test_each_version_and_delete_marker_is_listed_once(
    scripted_s3, tmp_path, small_pieces, listing
):
    history, repeats, versions, threads = listing
    objects = ListedKeys((), history=history, repeats=repeats).serve(scripted_s3, page_keys=10)
    context = a_listing_context(tmp_path, objects, versions=versions, listing_threads=threads)
    snapshot = take_inventory(context)
    is_listed = [row for row in expected(history) if versions == "all" or (row[2] and not row[3])]
    assert rows_of(snapshot) == is_listed
    assert snapshot.object_count == sum(not marker for *_, marker in is_listed)
    assert (snapshot.all_versions, snapshot.beside) == (versions == "all", counts_of(history))


@pytest.mark.thorough
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("versions", sampled(["all", "current"], every=2))
@pytest.mark.parametrize("pages", sampled([3, 12, 25, 33], every=4))
@pytest.mark.parametrize(
    "shape",
    sampled(
        [
            "some versions each",
            "one key of hundreds",
            "pages that end within each key",
            "markers last",
        ],
        every=2,
    ),
)
def test_interrupted_listing_resumes_at_key_boundaries(
    scripted_s3, tmp_path, shape, pages, versions
):
    history = HISTORIES[shape]
    listed = ListedKeys((), history=history)
    objects = listed.serve(scripted_s3, page_keys=10)
    context = a_listing_context(tmp_path, objects, versions=versions)
    scripted_s3.answer = lambda asked: (
        s3_error(403, "ExpiredToken") if len(listed.pages) >= pages else listed(asked)
    )
    with pytest.raises(SourceDenied):
        take_inventory(context)
    scripted_s3.answer = listed
    snapshot = take_inventory(context)
    complete = expected(history)
    assert rows_of(snapshot) == [
        row for row in complete if versions == "all" or (row[2] and not row[3])
    ]
    assert snapshot.beside == counts_of(history)
    assert left_in(tmp_path) == []


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize("is_refused_first", [False, True])
def test_whole_listing_has_version_ids_or_none(
    scripted_s3, tmp_path, is_refused_first, is_interrupted
):
    """Permission to read the versioning may come and go during a listing."""
    with_ids, without = ListedKeys((), history=HISTORIES["one version each"]), ListedKeys(KEYS)
    objects = with_ids.serve(scripted_s3, page_keys=10)
    context = a_listing_context(tmp_path, objects)
    asked_for_versioning = []

    def answer(asked):
        if "versioning" in asked.query:
            asked_for_versioning.append(asked)
            begins = len(asked_for_versioning) <= 2  # the clock's request counts, too
            return s3_error(403, "AccessDenied") if begins == is_refused_first else with_ids(asked)
        return with_ids(asked) if "versions" in asked.query else without(asked)

    scripted_s3.answer = answer
    if is_interrupted:
        scripted_s3.answer = lambda asked: (
            s3_error(403, "ExpiredToken")
            if len(with_ids.pages + without.pages) >= 6
            else answer(asked)
        )
        with pytest.raises(SourceDenied):
            take_inventory(context)
        scripted_s3.answer = answer
    listed = [
        (key, version_id is not None) for key, version_id, *_ in rows_of(take_inventory(context))
    ]
    assert listed == [(key, not is_refused_first) for key in sorted(KEYS)]
    assert len(asked_for_versioning) == 2


@pytest.mark.thorough
def test_a_listing_of_other_versions_is_not_gone_on_with(scripted_s3, tmp_path, small_pieces):
    history = HISTORIES["some versions each"]
    listed = ListedKeys((), history=history)
    objects = listed.serve(scripted_s3, page_keys=10)
    scripted_s3.answer = lambda asked: (
        s3_error(403, "ExpiredToken") if len(listed.pages) >= 25 else listed(asked)
    )
    with pytest.raises(SourceDenied):
        take_inventory(a_listing_context(tmp_path, objects))
    scripted_s3.answer = listed
    assert rows_of(
        take_inventory(a_listing_context(tmp_path, objects, versions="all"))
    ) == expected(history)


VERSIONS = st.lists(st.sampled_from("dv"), min_size=1, max_size=7).map(
    lambda kinds: [f"{kind}{number}" for number, kind in enumerate(kinds)]
)


@pytest.mark.thorough
@given(
    st.dictionaries(st.text("ab/é", min_size=1, max_size=3).map(str.encode), VERSIONS, max_size=8),
    st.integers(1, 4),
    st.tuples(
        st.sampled_from([b"", b"a", b"ab", b"b"]),
        st.none() | st.sampled_from([b"a", b"ab", b"b/", b"\xc3\xa9"]),
    ),
)
@settings(max_examples=30)
def test_any_versions_between_any_bounds_are_listed(scripted_s3, history, size, bounds):
    after, until = bounds
    listed = ListedKeys((), history=history)
    with tempfile.TemporaryDirectory() as folder:
        context = a_listing_context(
            Path(folder), listed.serve(scripted_s3, page_keys=size), versions="all"
        )
        assert rows_of(take_inventory(context)) == expected(history)
        part = take_inventory(context, after=after, until=until)
        within = {
            key: history[key] for key in history if key > after and (until is None or key <= until)
        }
        assert (rows_of(part), part.beside) == (expected(within), counts_of(within))


def test_key_with_too_many_versions_is_sorted_on_disk(scripted_s3, tmp_path, monkeypatch):
    monkeypatch.setattr("caf_pipeline.inventory.snapshot.MAX_HELD_ROWS", 100)
    history = HISTORIES["one key of hundreds"]
    objects = ListedKeys((), history=history).serve(scripted_s3, page_keys=200)
    snapshot = take_inventory(a_listing_context(tmp_path, objects, versions="all"))
    assert (rows_of(snapshot), snapshot.beside) == (expected(history), counts_of(history))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shape",
    sampled(
        [
            "one key of hundreds",
            "some versions each",
            "pages that end within each key",
            "markers alone",
        ],
        every=2,
    ),
)
def test_bounded_looks_come_round_and_cut_no_key(scripted_s3, tmp_path, ledger, shape):
    """The next scan begins where one ends, so no version of a key may be behind it."""
    history = HISTORIES[shape]
    objects = ListedKeys((), history=history).serve(scripted_s3, page_keys=10)
    source = {"bucket": "b", "public": True, "versions": "all"}
    context = with_ledger(tmp_path, objects, ledger, sources={"src": source})
    new_objects, after = 0, b""
    for _ in range(len(history) + 1):
        look = inventories.scan_for_new(context, after=after, max_pages=2)
        new_objects += look.new_objects
        assert look.all_new == bool(look.new_objects)  # delete markers are never archived
        if look.next_after is None:
            break
        assert look.next_after > after
        after = look.next_after
    assert (look.next_after, new_objects) == (
        None,
        sum(not marker for *_, marker in expected(history)),
    )


DELETED = {f"{number:03}".encode(): ["d2", "v1"] for number in range(50)} | {b"z": ["v1"]}


def test_scan_of_deleted_keys_ends_in_time_and_continues(scripted_s3, tmp_path, ledger):
    objects = ListedKeys((), history=DELETED).serve(scripted_s3, page_keys=10)
    context = with_ledger(tmp_path, objects, ledger)
    after, looks = b"", []
    while after is not None:
        looks.append(
            inventories.scan_for_new(context, after=after, max_pages=1, enough=lambda: True)
        )
        assert looks[-1].next_after is None or looks[-1].next_after > after
        after = looks[-1].next_after
    assert [look.new_objects for look in looks] == [0] * (len(looks) - 1) + [1]
    assert len(looks) > 10


def test_one_scan_passes_deleted_keys_if_time_allows(scripted_s3, tmp_path, ledger):
    objects = ListedKeys((), history=DELETED).serve(scripted_s3, page_keys=10)
    look = inventories.scan_for_new(with_ledger(tmp_path, objects, ledger), after=b"", max_pages=1)
    assert (look.new_objects, look.next_after, look.pages, look.all_new) == (1, None, 1, True)


def test_scan_of_noticed_keys_ends_in_time_at_deleted_keys(scripted_s3, tmp_path, ledger):
    listed = ListedKeys((), history=DELETED)
    context = with_ledger(tmp_path, listed.serve(scripted_s3, page_keys=10), ledger)
    named = [ObjectEvent(key, "") for key in (b"001", b"z")]
    ledger.notices.take_messages("src", [QueueMessage("m", "", b"", named, "")])
    scan = scan_noticed(context, after=b"", max_pages=20, enough=lambda: True)
    assert (scan.to_plan, scan.until, len(listed.pages)) == (True, b"001", 1)


@pytest.mark.thorough
def test_reachability_of_bucket_with_deleted_keys_costs_one_request(scripted_s3, tmp_path, ledger):
    listed = ListedKeys((), history=DELETED)
    context = with_ledger(tmp_path, listed.serve(scripted_s3, page_keys=10), ledger)
    (chunk,) = planning.cut_plan(context, take_inventory(context)).chunks
    chunk_steps.load_batch(context, chunk.name)
    listed.pages.clear()
    with pytest.raises(SourceUnreachable):  # the script answers only listings
        chunk_steps.pack_chunk(context, chunk.name)
    assert sum("versions" in request.query for request in listed.pages) == 1
