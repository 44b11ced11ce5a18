"""Plans, the claims of their chunks, and what lists them."""

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import ClaimConflict
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline_tests.support.ledger_rows import (
    SOURCE,
    VERSION,
    archive,
    claims,
    end,
    plan_record,
    planned,
    register,
    register_plan,
    settled,
    skip,
)


def test_a_plan_is_found_by_hash_and_name(ledger):
    ledger.sources.register(SOURCE, "s3://a/")
    plan = plan_record()
    assert ledger.plans.find(plan.sha256) is None
    register_plan(ledger, plan, [planned(1, ["a"])], claims((1, "a")))
    assert ledger.plans.find(plan.sha256) == plan
    assert ledger.plans.is_name_taken(SOURCE, plan.name)
    assert not ledger.plans.is_name_taken("another", plan.name)


def test_a_plan_makes_planned_chunks(ledger):
    names = register(ledger, ["a", "b"], ["c"])
    chunks = ledger.chunks.list(SOURCE)
    assert [chunk.name for chunk in chunks] == names
    assert [(chunk.state, chunk.number, chunk.object_count) for chunk in chunks] == [
        ("planned", 1, 2),
        ("planned", 2, 1),
    ]
    assert {chunk.archive_id for chunk in chunks} == {ledger.sources.archive_id(SOURCE)}


def test_a_plan_registered_twice_changes_nothing(ledger):
    ledger.sources.register(SOURCE, "s3://a/")
    plan = plan_record()
    for _ in range(2):
        register_plan(ledger, plan, [planned(1, ["a"])], claims((1, "a")))
    assert len(ledger.chunks.list(SOURCE)) == 1
    assert ledger.chunks.account(SOURCE).claimed_objects == 1


def test_conflicting_claim_names_the_object_and_writes_nothing(ledger):
    register(ledger, ["a", "b, c"])
    with pytest.raises(ClaimConflict, match="'b, c"):
        register(ledger, ["d", "b, c"])
    assert len(ledger.chunks.list(SOURCE)) == 1
    assert settled(ledger, [("d", VERSION)]) == set()


def test_a_located_object_cannot_be_claimed(ledger):
    archive(ledger, ["a"])
    with pytest.raises(ClaimConflict, match="'a'"):
        register(ledger, ["a"])


def test_the_same_key_in_another_source_is_another_object(ledger):
    archive(ledger, ["a"])
    archive(ledger, ["a"], source="other")
    assert ledger.lookup.sources() == ["other", SOURCE]


def test_plans_are_listed_latest_first_with_chunk_states(ledger):
    (first,) = register(ledger, ["a", "b"])
    (second,) = register(ledger, ["c"])
    end(ledger, first, ChunkState.PACKING)
    assert [row.chunks for row in ledger.plans.list(SOURCE)] == [
        {ChunkState.PLANNED: 1},
        {ChunkState.PACKING: 1},
    ]
    (latest,) = ledger.plans.list(limit=1)
    assert latest.record.name == ledger.chunks.get(second).plan
    assert ledger.plans.list("another") == []


def test_the_account_adds_up(ledger):
    archive(ledger, ["a", "b"])
    _, two = register(ledger, ["c", "d", "e"], ["f"], skips=[skip("g")])
    end(ledger, two, ChunkState.WITHDRAWN)
    account = ledger.chunks.account(SOURCE)
    assert (account.located_objects, account.located_bytes, account.claimed_objects) == (2, 20, 3)
    assert account.chunks == {ChunkState.LOCATED: 1, ChunkState.PLANNED: 1, ChunkState.WITHDRAWN: 1}
    assert account.skipped == {SkipReason.COLD_STORAGE: 1}


def test_chunks_are_listed_by_source_and_state(ledger):
    done = archive(ledger, ["a"])
    (open_,) = register(ledger, ["b"])
    register(ledger, ["b"], source="other")
    assert [chunk.name for chunk in ledger.chunks.list(SOURCE, [ChunkState.LOCATED])] == [done]
    assert {chunk.name for chunk in ledger.chunks.list(SOURCE)} == {done, open_}
    assert len(ledger.chunks.list()) == 3
    assert ledger.chunks.list(states=[]) == []


def test_dropping_stray_rows_keeps_rows_that_a_chunk_needs(ledger):
    located = archive(ledger, ["a", "b"])
    (claiming,) = register(ledger, ["c"])
    counted = {rows.chunk: rows for rows in ledger.stray_rows.by_chunk(SOURCE)}
    assert (counted[located].locations, counted[located].claims, counted[located].member_count) == (
        2,
        0,
        2,
    )
    assert (counted[claiming].locations, counted[claiming].claims, counted[claiming].state) == (
        0,
        1,
        ChunkState.PLANNED,
    )
    assert [ledger.stray_rows.drop(rows.caf_file_id) for rows in counted.values()] == [0, 0]
    assert settled(ledger, [(key, VERSION) for key in "abc"]) == {(key, VERSION) for key in "abc"}


def test_an_unknown_source_and_an_unknown_chunk_have_no_rows(ledger):
    assert ledger.stray_rows.by_chunk("nobody") == []
    assert ledger.stray_rows.drop(999) == 0
