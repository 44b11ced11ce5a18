"""Listings: each key once, with the object that `caf get` reads, for any keys and page sizes."""

import os
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import NotLocated, UsageError
from caf_pipeline.inventory.objects import CurrentException, SkipReason
from caf_pipeline.ledger.records import InventoryRecord, ListedObject, Location
from caf_pipeline.retrieval import listing
from caf_pipeline.retrieval.listing import is_current, list_level, list_objects, list_rows
from caf_pipeline.retrieval.reader import fetch
from caf_pipeline_tests.support.ledger_rows import (
    EARLY,
    ODD_KEYS,
    SOURCE,
    VERSION,
    archive,
    bring_to,
    claims,
    end,
    plan_record,
    planned,
    register,
    register_plan,
    skip,
)
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.tiers import sampled

LATER = EARLY + timedelta(days=1)


@pytest.fixture(params=[1, 3, 1000])
def _page(request, monkeypatch):
    monkeypatch.setattr(listing, "PAGE_KEYS", request.param)
    monkeypatch.setattr(listing, "PAGE_ROWS", request.param)


def keys_of(ledger, prefix="", **more):
    """Return the keys of `list_objects`, which `list_rows` also lists, with the same facts."""
    located = list(list_objects(ledger.lookup, SOURCE, prefix, **more))
    rows = list(list_rows(ledger.lookup, SOURCE, prefix, **more))
    assert rows == [ListedObject.of(location) for location in located]
    return [row.key for row in rows]


def level_of(ledger, prefix="", **more):
    """Return keys, and common prefixes in brackets."""
    return [
        location.row.key if isinstance(location, Location) else [location]
        for location in list_level(ledger.lookup, SOURCE, prefix, **more)
    ]


def in_order(keys):
    return sorted(keys, key=str.encode)


def level_by_hand(keys, prefix):
    """Return what S3 lists with a delimiter."""
    below = [(key, key[len(prefix) :]) for key in in_order(keys) if key.startswith(prefix)]
    return list(
        {
            str(one): one
            for key, rest in below
            for one in [[prefix + rest[: rest.index("/") + 1]] if "/" in rest else key]
        }.values()
    )


@pytest.mark.usefixtures("_page")
def test_each_key_is_listed_once_in_byte_order(ledger):
    keys = [
        *ODD_KEYS,
        *(f"dir/{number}" for number in range(7)),
        "dir/",
        "dir",
        "dir0",
        "a%b_c",
        "\ue000",
        "\U0010ffff",
        "\ud7ff",
    ]
    archive(ledger, keys)
    archive(ledger, ["dir/not mine"], source="other")
    listed = list(list_objects(ledger.lookup, SOURCE))
    assert [location.row.key for location in listed] == in_order(keys)
    assert all(location == ledger.lookup.locate(SOURCE, location.row.key) for location in listed)
    assert keys_of(ledger) == in_order(keys)


@pytest.mark.usefixtures("_page")
def test_a_page_follows_its_start_in_byte_order(ledger):
    keys = ["a", "dir", "dir/1", "dir/2", "dir0", "z/1", "\ud7ff", "\ue000", "\U0010ffff" * 256]
    archive(ledger, keys)
    for prefix in ("", "dir", "dir/", "z"):
        for start in [*keys, "dir/", "dir/1x", "z/", "zz", "b"]:
            below = [key for key in in_order(keys) if key.startswith(prefix)]
            assert keys_of(ledger, prefix, start_after=start) == [
                key for key in below if key.encode() > start.encode()
            ]
            assert level_of(ledger, prefix, start_after=start) == [
                entry
                for entry in level_by_hand(keys, prefix)
                if "".join(entry).encode() > start.encode()
            ]


@pytest.mark.usefixtures("_page")
@pytest.mark.parametrize(
    "prefix",
    sampled(
        [
            "",
            "a",
            "a/",
            "a/b",
            "a//",
            "a%",
            "a_",
            "a\\",
            "\ud7ff",
            "\U0010ffff",
            "a\U0010ffff",
            "nothing",
        ],
        every=3,
    ),
)
def test_a_prefix_is_bytes_and_no_pattern(ledger, prefix):
    keys = [
        "a",
        "a/",
        "a//",
        "a/b",
        "a/b/c",
        "a/b/d",
        "a0",
        "a%/x",
        "a_x",
        "a\\x",
        "axx",
        "b",
        "\ud7ff",
        "\ue000",
        "a\U0010ffff/",
        "\U0010ffff\U0010ffff",
    ]
    archive(ledger, keys)
    assert keys_of(ledger, prefix) == [key for key in in_order(keys) if key.startswith(prefix)]
    assert level_of(ledger, prefix) == level_by_hand(keys, prefix)


parts_of_keys = st.lists(
    st.sampled_from(["a", "/", "b", "\x01", "\ud7ff", "\ue000", "\U0010ffff", "%", "_", "\\"]),
    min_size=1,
    max_size=6,
)


@pytest.mark.thorough
@settings(max_examples=40)
@given(
    keys=st.lists(parts_of_keys.map("".join), min_size=1, max_size=12, unique=True),
    prefix=parts_of_keys.map("".join) | st.just(""),
)
def test_listing_matches_s3_for_any_keys_and_prefix(ledger, monkeypatch, keys, prefix):
    monkeypatch.setattr(listing, "PAGE_KEYS", 2)
    source = os.urandom(4).hex()
    archive(ledger, keys, source=source)
    assert [location.row.key for location in list_objects(ledger.lookup, source, prefix)] == [
        key for key in in_order(keys) if key.startswith(prefix)
    ]
    level = [
        location.row.key if isinstance(location, Location) else [location]
        for location in list_level(ledger.lookup, source, prefix)
    ]
    assert level == level_by_hand(keys, prefix)


@pytest.mark.parametrize("prefix", ["\ud800", "a\0", "k" * 1025])
def test_impossible_prefix_lists_nothing(ledger, prefix):
    archive(ledger, ["a"])
    assert keys_of(ledger, prefix) == level_of(ledger, prefix) == []


@pytest.mark.usefixtures("_page")
@pytest.mark.parametrize(
    ("prefix", "count"),
    [
        ("my dir/", 1),
        ("my%20dir/", 1),
        ("my dir/\udcff", 1),
        ("my dir/\udcfe", 0),
        ("my", 2),
        ("", 2),
        ("\0", 0),
        ("\ud800", 0),
        ("\U0010ffff", 0),
    ],
)
def test_unsupported_skipped_keys_are_counted_below_their_prefix(ledger, prefix, count):
    register(
        ledger, [], skips=[skip("my%20dir/%FF", SkipReason.UNSUPPORTED_KEY), skip("my%20dir/x")]
    )
    assert listing.count_not_archived(ledger.lookup, SOURCE, prefix) == (0, count)


def test_lost_objects_and_their_folders_are_not_listed(ledger):
    end(ledger, archive(ledger, ["lost/a", "lost/b", "half/a", "gone"]), ChunkState.EXPIRED)
    archive(ledger, ["half/b", "kept"])
    assert keys_of(ledger) == ["half/b", "kept"]
    assert level_of(ledger) == [["half/"], "kept"]


@pytest.mark.usefixtures("_page")
def test_gone_and_older_objects_are_listed_with_their_status(
    ledger,
):
    archive(ledger, ["a/gone", "a/kept", "b/gone", "older"])
    register_plan(
        ledger, plan_record(), [planned(1, ["older"])], claims((1, "older"), version="newer")
    )
    stated = [
        CurrentException(*one)
        for one in (("a/gone", LATER, None), ("b/gone", LATER, None), ("older", LATER, "newer"))
    ]
    ledger.content.record_planned(
        InventoryRecord(SOURCE, "src-20240102T000000000000Z", LATER), stated
    )
    listed = {location.row.key: location.status for location in list_objects(ledger.lookup, SOURCE)}
    assert listed == {"a/gone": "gone", "a/kept": "current", "b/gone": "gone", "older": "older"}
    assert keys_of(ledger) == list(listed)
    assert keys_of(ledger, include=is_current) == ["a/kept"]
    assert level_of(ledger, include=is_current) == [["a/"]]


def test_a_folder_costs_one_page_however_many_keys_it_has(ledger, monkeypatch):
    monkeypatch.setattr(listing, "PAGE_KEYS", 10)
    archive(ledger, [f"{folder}/{number:03}" for folder in "abc" for number in range(200)])
    pages = []
    ask = ledger.lookup.archived_keys
    monkeypatch.setattr(
        ledger.lookup, "archived_keys", lambda *args: pages.append(args) or ask(*args)
    )
    assert level_of(ledger) == [["a/"], ["b/"], ["c/"]]
    assert len(pages) == 4


# --- as of a time
# ------------------------------------------------------------------------------------------

DAY = timedelta(days=1)


def version(ledger, key, number, day):
    """Archive a version of a key that was last modified on a day."""
    plan = plan_record()
    register_plan(ledger, plan, [planned(1, [key])], claims((1, key), version=f"v{number}"))
    chunk = f"{SOURCE}-{plan.name}-00001"
    bring_to(ledger, chunk, ChunkState.LOCATED, modified=EARLY + day * DAY)
    return chunk


def state(ledger, day, *exceptions):
    """Record an inventory: (key, current version), or (key, None) if the key is gone."""
    at = EARLY + day * DAY
    stated = [CurrentException(key, at, named) for key, named in exceptions]
    ledger.content.record_planned(
        InventoryRecord(SOURCE, f"src-{at:%Y%m%dT%H%M%S}000000Z", at), stated
    )


def as_of(ledger, day, prefix=""):
    return {
        location.row.key: (location.row.object_version, location.status)
        for location in list_objects(ledger.lookup, SOURCE, prefix, as_of=EARLY + day * DAY)
    }


@pytest.mark.usefixtures("_page")
def test_as_of_lists_the_last_version_modified_before(ledger):
    register(ledger, ["x"])
    for number, day in ((2, 2), (1, 1), (3, 4)):  # in any order of archiving
        version(ledger, "a", number, day)
    version(ledger, "dir/b", 1, 2)
    assert as_of(ledger, 0.99) == {}
    assert as_of(ledger, 1) == as_of(ledger, 1.99) == {"a": ("v1", "archived")}
    assert (
        as_of(ledger, 2)
        == as_of(ledger, 3)
        == {"a": ("v2", "archived"), "dir/b": ("v1", "archived")}
    )
    assert as_of(ledger, 9)["a"] == ("v3", "archived")
    level = [
        location if isinstance(location, str) else location.row.key
        for location in list_level(ledger.lookup, SOURCE, as_of=EARLY + DAY)
    ]
    assert level == ["a"]


def test_as_of_key_is_gone_until_it_comes_back(
    ledger,
):
    register(ledger, ["x"])
    version(ledger, "a", 1, 1)
    state(ledger, 3, ("a", None))
    version(ledger, "a", 2, 5)
    found = {day: as_of(ledger, day)["a"] for day in (2, 3, 4, 5, 6)}
    gone, back = ("v1", "gone"), ("v2", "archived")
    assert found == {2: ("v1", "archived"), 3: gone, 4: gone, 5: back, 6: back}
    state(ledger, 8, ("a", None))  # a later inventory does not change the past
    assert {day: as_of(ledger, day)["a"] for day in (2, 3, 4, 5, 6)} == found
    assert as_of(ledger, 8)["a"] == ("v2", "gone")


def test_as_of_counts_a_version_that_became_current_again(ledger):
    register(ledger, ["x"])
    version(ledger, "a", 1, 1)
    version(ledger, "a", 2, 2)
    state(ledger, 4, ("a", "v1"))
    assert [as_of(ledger, day)["a"][0] for day in (1, 2, 3, 4, 5)] == ["v1", "v2", "v2", "v1", "v1"]


def test_as_of_and_now_choose_the_same_version(ledger):
    register(ledger, ["x"])
    version(ledger, "a", 1, 1)
    version(ledger, "a", 2, 1)
    assert keys_of(ledger) == ["a"]
    assert as_of(ledger, 1)["a"][0] == ledger.lookup.locate(SOURCE, "a").row.object_version
    state(ledger, 3, ("a", "v1"))
    state(ledger, 5, ("a", "v2"))
    assert [as_of(ledger, day)["a"][0] for day in (1, 2, 3, 4, 5)] == ["v1", "v1", "v1", "v1", "v2"]
    assert as_of(ledger, 1 - 1e-9) == {}


def test_as_of_reports_a_newer_skipped_version(ledger):
    register(ledger, ["x"])
    version(ledger, "a", 1, 1)
    newer = replace(skip("a"), object_version="v9", last_modified=EARLY + 3 * DAY)
    ledger.skips.record(SOURCE, [newer])
    assert [as_of(ledger, day)["a"] for day in (2, 3)] == [("v1", "archived"), ("v1", "older")]


def test_as_of_error_names_the_archived_versions(ledger):
    register(ledger, ["x"])
    version(ledger, "a", 1, 1)
    assert (
        fetch(ledger.lookup, None, SOURCE, "a", as_of=EARLY + DAY).location.row.object_version
        == "v1"
    )
    with pytest.raises(NotLocated, match=r"'a'.* 2024-01-01 00:00:00 UTC") as raised:
        fetch(ledger.lookup, None, SOURCE, "a", as_of=EARLY)
    assert "v1 (2024-01-02 00:00:00 UTC)" in raised.value.hint
    with pytest.raises(UsageError, match="exclude"):
        fetch(ledger.lookup, None, SOURCE, "a", "v1", as_of=EARLY)


@pytest.mark.thorough
def test_as_of_listing_scans_no_table(ledger, database, monkeypatch):
    monkeypatch.setattr(listing, "PAGE_KEYS", 100)
    keys = [f"k{number:05}" for number in range(5000)]
    archive(ledger, keys)
    state(ledger, 1, *((key, None) for key in keys))
    with connected(database) as connection:
        connection.execute("ANALYZE current_exceptions")

    def read_from_the_beginning():
        with connected(database) as connection:
            connection.execute("SELECT pg_stat_force_next_flush()")
        with connected(database) as connection:
            read = connection.execute(
                "SELECT relname, seq_scan FROM pg_stat_user_tables WHERE relname <> 'sources'"
            )
            return dict(map(tuple, read))

    before = read_from_the_beginning()
    assert set(as_of(ledger, 2, "k000").values()) == {(VERSION, "gone")}
    assert set(as_of(ledger, 0.5, "k000").values()) == {(VERSION, "archived")}
    assert read_from_the_beginning() == before
