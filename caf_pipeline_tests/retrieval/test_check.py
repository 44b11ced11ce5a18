"""Objects read back and compared: what is right, what is not, and who gave it wrong."""

import os

import pytest

from caf_pipeline.errors import IntegrityError, StoreUnreachable
from caf_pipeline.retrieval import check
from caf_pipeline.retrieval.bulk import SMALL_BYTES
from caf_pipeline.retrieval.check import check_objects, sampled
from caf_pipeline.retrieval.listing import list_objects
from caf_pipeline_tests.contracts.chunk_store import corrupt
from caf_pipeline_tests.retrieval.test_object_file import BreakingFolders
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything

BODIES = {f"key-{number:02}": os.urandom(1000) for number in range(40)} | {
    "key-20-large": os.urandom(SMALL_BYTES + 1)
}


@pytest.fixture
def context(tmp_path, ledger):
    context = a_run_context(
        tmp_path, MemorySource(BODIES), ledger, store=BreakingFolders(tmp_path / "folders")
    )
    archive_everything(context)
    context.store.asked.clear()
    return context


def spoil(context, key, *providers):
    """Let providers have other bytes of an object."""
    location = context.ledger.lookup.locate("src", key)
    for provider in providers:
        corrupt(context.store.file(provider, location.posting), at=location.row.start_byte + 5)


def checked(context):
    return list(check_objects(list_objects(context.ledger.lookup, "src"), context.store))


@pytest.mark.parametrize("batch_objects", [check.BATCH_OBJECTS, 15])
def test_every_object_is_read_and_told_in_order_by_few_requests(
    context, monkeypatch, batch_objects
):
    monkeypatch.setattr(check, "BATCH_OBJECTS", batch_objects)
    found = checked(context)
    assert [one.location.row.key for one in found] == sorted(BODIES)
    assert not any(one.error or one.failed for one in found)
    assert len(context.store.asked) <= 6 < len(BODIES) / 6


def test_who_breaks_off_is_named_with_what_others_had_to_give_and_no_more(context):
    context.store.breaks["anna"] = (
        20_500  # the first 20 and a half of them lie together, before the large one
    )
    found = checked(context)
    assert [one.location.row.key for one in found if one.failed] == ["key-20", "key-20-large"]
    assert not any(one.error for one in found)


def test_an_object_that_no_provider_gives_right_is_wrong_and_the_others_are_not(context):
    spoil(context, "key-07", "anna", "bert", "carl")
    (wrong,) = [one for one in checked(context) if one.error]
    assert wrong.location.row.key == "key-07"
    assert isinstance(wrong.error, IntegrityError)


def test_an_object_that_another_provider_gives_right_is_right_and_the_liar_is_named(context):
    spoil(context, "key-07", "anna")
    found = {one.location.row.key: list(one.failed) for one in checked(context) if one.failed}
    assert found == {"key-07": ["anna"]}


def test_a_provider_that_is_away_makes_nothing_wrong(context):
    spoil(context, "key-07", "bert", "carl")
    context.store.away = {"anna"}
    (unread,) = [one for one in checked(context) if one.error]
    assert not unread.error.permanent


def test_a_check_ends_where_nothing_can_be_read_any_more(context, monkeypatch):
    monkeypatch.setattr(check, "UNREAD_IN_A_ROW", 10)
    context.store.away = set(context.store.folders)
    found = []
    with pytest.raises(StoreUnreachable, match="10 objects in a row could not be read"):
        found.extend(check_objects(list_objects(context.ledger.lookup, "src"), context.store))
    assert all(not one.error.permanent for one in found)


def test_a_sample_has_no_object_twice_and_at_least_one(context):
    located = list(list_objects(context.ledger.lookup, "src"))
    for seed in range(20):
        chosen = [one.row.key for one in sampled(located, 0.01, seed)]
        assert 1 <= len(chosen) == len(set(chosen)) < len(BODIES)
        assert list(sampled([], 0.5, seed)) == []
        assert list(sampled(located, 1.0, seed)) == located
