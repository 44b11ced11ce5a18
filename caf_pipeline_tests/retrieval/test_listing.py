"""What is archived, listed: each key once, what `caf get` gives, whatever the keys are and wherever pages end."""

import os
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.inventory.objects import CurrentException
from caf_pipeline.ledger.records import InventoryRecord, Location
from caf_pipeline.retrieval import listing
from caf_pipeline.retrieval.listing import is_current, list_level, list_objects
from caf_pipeline_tests.contracts.ledger import EARLY, ODD_KEYS, SOURCE, archive, claims, end, plan_record, planned

LATER = EARLY + timedelta(days=1)


@pytest.fixture(params=[1, 3, 1000])
def _page(request, monkeypatch):
    monkeypatch.setattr(listing, "PAGE_KEYS", request.param)


def keys_of(ledger, prefix="", **more):
    return [one.row.key for one in list_objects(ledger, SOURCE, prefix, **more)]


def level_of(ledger, prefix="", **more):
    """Return keys, and common prefixes in brackets."""
    return [one.row.key if isinstance(one, Location) else [one] for one in list_level(ledger, SOURCE, prefix, **more)]


def in_order(keys):
    return sorted(keys, key=str.encode)


def level_by_hand(keys, prefix):
    """What S3 lists with a delimiter."""
    below = [(key, key[len(prefix) :]) for key in in_order(keys) if key.startswith(prefix)]
    return list(
        {
            str(one): one for key, rest in below for one in [[prefix + rest[: rest.index("/") + 1]] if "/" in rest else key]
        }.values()
    )


@pytest.mark.usefixtures("_page")
def test_every_key_comes_once_in_the_order_of_bytes_as_a_look_up_gives_it(ledger):
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
    listed = list(list_objects(ledger, SOURCE))
    assert [one.row.key for one in listed] == in_order(keys)
    assert all(one == ledger.locate(SOURCE, one.row.key) for one in listed)


@pytest.mark.usefixtures("_page")
@pytest.mark.parametrize(
    "prefix", ["", "a", "a/", "a/b", "a//", "a%", "a_", "a\\", "\ud7ff", "\U0010ffff", "a\U0010ffff", "nothing"]
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
    st.sampled_from(["a", "/", "b", "\x01", "\ud7ff", "\ue000", "\U0010ffff", "%", "_", "\\"]), min_size=1, max_size=6
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keys=st.lists(parts_of_keys.map("".join), min_size=1, max_size=12, unique=True),
    prefix=parts_of_keys.map("".join) | st.just(""),
)
def test_any_keys_are_listed_by_any_prefix_as_s3_lists_them(ledger, monkeypatch, keys, prefix):
    monkeypatch.setattr(listing, "PAGE_KEYS", 2)
    source = os.urandom(4).hex()
    archive(ledger, keys, source=source)
    assert [one.row.key for one in list_objects(ledger, source, prefix)] == [
        key for key in in_order(keys) if key.startswith(prefix)
    ]
    level = [one.row.key if isinstance(one, Location) else [one] for one in list_level(ledger, source, prefix)]
    assert level == level_by_hand(keys, prefix)


@pytest.mark.parametrize("prefix", ["\ud800", "a\0", "k" * 1025])
def test_what_no_key_begins_with_finds_nothing(ledger, prefix):
    archive(ledger, ["a"])
    assert keys_of(ledger, prefix) == level_of(ledger, prefix) == []


@pytest.mark.usefixtures("_page")
def test_what_is_out_of_good_standing_is_not_listed_and_no_folder_of_it_either(ledger):
    end(ledger, archive(ledger, ["lost/a", "lost/b", "half/a", "gone"]), ChunkState.EXPIRED)
    archive(ledger, ["half/b", "kept"])
    assert keys_of(ledger) == ["half/b", "kept"]
    assert level_of(ledger) == [["half/"], "kept"]


@pytest.mark.usefixtures("_page")
def test_what_is_gone_or_older_is_listed_as_such_and_left_out_where_only_the_current_is_wanted(ledger):
    archive(ledger, ["a/gone", "a/kept", "b/gone", "older"])
    ledger.register_plan(plan_record(), [planned(1, ["older"])], claims((1, "older"), version="newer"))
    stated = [CurrentException(*one) for one in (("a/gone", LATER, None), ("b/gone", LATER, None), ("older", LATER, "newer"))]
    ledger.record_planned(InventoryRecord(SOURCE, "src-20240102T000000000000Z", LATER), stated)
    listed = {one.row.key: one.status for one in list_objects(ledger, SOURCE)}
    assert listed == {"a/gone": "gone", "a/kept": "current", "b/gone": "gone", "older": "older"}
    assert keys_of(ledger, wanted=is_current) == ["a/kept"]
    assert level_of(ledger, wanted=is_current) == [["a/"]]


def test_a_folder_costs_one_page_however_many_keys_it_has(ledger, monkeypatch):
    monkeypatch.setattr(listing, "PAGE_KEYS", 10)
    archive(ledger, [f"{folder}/{number:03}" for folder in "abc" for number in range(200)])
    pages = []
    ask = ledger.archived_keys
    monkeypatch.setattr(ledger, "archived_keys", lambda *args: pages.append(args) or ask(*args))
    assert level_of(ledger) == [["a/"], ["b/"], ["c/"]]
    assert len(pages) == 4
