"""Objects read back and verified, and the providers blamed for wrong ones."""

import os

import pytest

from caf_pipeline.errors import IntegrityError, StoreUnreachable
from caf_pipeline.formats import age
from caf_pipeline.retrieval import check
from caf_pipeline.retrieval.bulk import SMALL_BYTES
from caf_pipeline.retrieval.check import Openable, check_objects, sampled
from caf_pipeline.retrieval.listing import list_objects
from caf_pipeline_tests.contracts.chunk_store import corrupt
from caf_pipeline_tests.support.breaking_folders import BreakingFolders
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.private_contexts import IDENTITY, a_private_context
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
    """Corrupt an object at some providers."""
    location = context.ledger.lookup.locate("src", key)
    for provider in providers:
        corrupt(context.store.file(provider, location.posting), at=location.row.start_byte + 5)


def checked(context):
    return list(check_objects(list_objects(context.ledger.lookup, "src"), context.store))


@pytest.mark.parametrize("batch_objects", [check.BATCH_OBJECTS, 15])
def test_objects_are_checked_in_order_with_few_requests(context, monkeypatch, batch_objects):
    monkeypatch.setattr(check, "BATCH_OBJECTS", batch_objects)
    found = checked(context)
    assert [one.location.row.key for one in found] == sorted(BODIES)
    assert not any(one.error or one.failed for one in found)
    assert len(context.store.asked) <= 6 < len(BODIES) / 6


def test_failing_provider_is_named_for_the_affected_objects_only(context):
    # The first 20 objects and a half lie together, before the large object.
    context.store.breaks["anna"] = 20_500
    found = checked(context)
    assert [one.location.row.key for one in found if one.failed] == ["key-20", "key-20-large"]
    assert not any(one.error for one in found)


def test_only_the_object_without_a_right_copy_is_wrong(context):
    spoil(context, "key-07", "anna", "bert", "carl")
    (wrong,) = [result for result in checked(context) if result.error]
    assert wrong.location.row.key == "key-07"
    assert isinstance(wrong.error, IntegrityError)


def test_lying_provider_is_named_when_another_is_right(context):
    spoil(context, "key-07", "anna")
    found = {
        result.location.row.key: list(result.failed) for result in checked(context) if result.failed
    }
    assert found == {"key-07": ["anna"]}


def test_a_provider_that_is_away_makes_nothing_wrong(context):
    spoil(context, "key-07", "bert", "carl")
    context.store.away = {"anna"}
    (unread,) = [result for result in checked(context) if result.error]
    assert not unread.error.permanent


def test_check_ends_when_nothing_is_readable(context, monkeypatch):
    monkeypatch.setattr(check, "UNREAD_IN_A_ROW", 10)
    context.store.away = set(context.store.folders)
    found = []
    with pytest.raises(StoreUnreachable, match=r"^10 objects"):
        found.extend(check_objects(list_objects(context.ledger.lookup, "src"), context.store))
    assert all(not one.error.permanent for one in found)


def test_a_sample_has_no_object_twice_and_at_least_one(context):
    located = list(list_objects(context.ledger.lookup, "src"))
    for seed in range(20):
        chosen = [location.row.key for location in sampled(located, 0.01, seed)]
        assert 1 <= len(chosen) == len(set(chosen)) < len(BODIES)
        assert list(sampled([], 0.5, seed)) == []
        assert list(sampled(located, 1.0, seed)) == located


@pytest.mark.parametrize(
    ("identity", "closed"),
    [(None, len(BODIES)), (age.new_identity(), len(BODIES)), (IDENTITY, 0)],
)
def test_only_what_an_identity_opens_is_compared(tmp_path, ledger, identity, closed):
    source = MemorySource(BODIES)
    archive_everything(a_private_context(tmp_path, source, ledger))
    context = a_private_context(tmp_path, source, ledger, identity=identity)
    openable = Openable(list_objects(ledger.lookup, "src"), context.opened)
    results = list(check_objects(openable, context.opened))
    assert len(results) == len(BODIES) - closed
    assert not any(result.error for result in results)
    assert openable.closed_count == closed
