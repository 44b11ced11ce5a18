"""Chunks that a rebuild restores from a store."""

from dataclasses import replace

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import ClaimConflict, IntegrityError, LedgerError
from caf_pipeline_tests.support.ledger_rows import (
    ROOT,
    SOURCE,
    VERSION,
    archive,
    batches,
    end,
    location,
    register,
    restore,
    restored,
    seal_facts,
    settled,
    skip,
)


def test_a_restored_chunk_has_plan_rows_skips_and_copies(ledger):
    ledger.sources.register(SOURCE, "s3://src")
    assert (
        restore(
            ledger,
            restored(1, ["a", "b"], skipped=1),
            batches(map(location, ["a", "b"])),
            [skip("c")],
        )
        == 2
    )
    chunk = ledger.chunks.get("src-0a0b0c0d-00001")
    assert (chunk.state, chunk.plan, chunk.plan_folder, chunk.number) == (
        ChunkState.LOCATED,
        "0a0b0c0d",
        "plans/x",
        1,
    )
    assert (chunk.merkle_root, chunk.owner, chunk.start, chunk.proof_type) == (
        ROOT,
        "jkl1owner",
        1,
        3,
    )
    assert (chunk.object_count, chunk.member_count, chunk.skipped_count, chunk.released_count) == (
        3,
        2,
        1,
        0,
    )
    assert chunk.samples == tuple(seal_facts(2).samples)
    assert ledger.lookup.locate(SOURCE, "a").row == location("a")
    assert [copy.provider for copy in ledger.replicas.list(chunk.name)] == ["p"]
    assert settled(ledger, [(key, VERSION) for key in "abcd"]) == {(key, VERSION) for key in "abc"}
    assert ledger.chunks.account(SOURCE).located_objects == 2


def test_a_restored_chunk_with_a_fault_is_damaged(ledger):
    ledger.sources.register(SOURCE, "s3://src")
    facts = {"plan_sha256": b"h" * 32, "object_count": 5, "object_bytes": 50}
    restore(
        ledger,
        replace(restored(1, ["a"]), **facts),
        batches([location("a")]),
        [],
        fault="1 of 3 copies",
    )
    chunk = ledger.chunks.get("src-0a0b0c0d-00001")
    assert (chunk.state, chunk.reason) == (ChunkState.DAMAGED, "1 of 3 copies")
    assert (chunk.object_count, chunk.object_bytes, chunk.released_count) == (5, 50, 4)
    assert ledger.plans.find(b"h" * 32).name == "0a0b0c0d"


def test_restored_chunks_share_a_plan_and_give_its_hash(ledger):
    ledger.sources.register(SOURCE, "s3://src")
    restore(ledger, restored(1, ["a"]), batches([location("a")]), [])
    assert ledger.plans.find(b"h" * 32) is None
    restore(
        ledger, replace(restored(2, ["b"]), plan_sha256=b"h" * 32), batches([location("b")]), []
    )
    restore(ledger, restored(3, ["c"]), batches([location("c")]), [])
    plan = ledger.plans.find(b"h" * 32)
    assert (plan.object_count, plan.object_bytes) == (3, 30)
    with pytest.raises(IntegrityError):
        restore(
            ledger, replace(restored(4, ["d"]), plan_sha256=b"i" * 32), batches([location("d")]), []
        )


def test_a_restored_chunk_keeps_a_registered_plans_counts(ledger):
    (name,) = register(ledger, ["a", "b"])
    plan = name.split("-")[1]
    before = ledger.chunks.get(name)
    chunk = replace(restored(2, ["c"]), plan=plan, name=f"src-{plan}-00002")
    assert restore(ledger, chunk, batches([location("c")]), []) == 1
    assert ledger.chunks.get(name) == before
    assert ledger.chunks.get(chunk.name).plan == plan


def test_a_chunk_that_the_ledger_has_is_not_restored(ledger):
    chunk = archive(ledger, ["a"])
    before = ledger.chunks.get(chunk)
    with pytest.raises(LedgerError, match="located"):
        restore(ledger, replace(restored(1, ["b"]), name=chunk), batches([location("b")]), [])
    assert ledger.chunks.get(chunk) == before
    assert ledger.lookup.locate(SOURCE, "b") is None


@pytest.mark.parametrize("keys", [["a"], ["a", "b", "c"], ["a", "a"]])
def test_rows_that_are_not_the_members_restore_nothing(ledger, keys):
    ledger.sources.register(SOURCE, "s3://src")
    with pytest.raises(LedgerError):
        restore(ledger, restored(1, ["a", "b"]), batches(map(location, keys)), [])
    assert ledger.chunks.list() == []
    assert not ledger.plans.is_name_taken(SOURCE, "0a0b0c0d")


def test_an_error_in_the_rows_restores_nothing(ledger):
    ledger.sources.register(SOURCE, "s3://src")

    def rows():
        yield location("a")
        raise IntegrityError("other bytes")

    with pytest.raises(IntegrityError, match="other bytes"):
        restore(ledger, restored(1, ["a", "b"]), batches(rows()), [])
    assert ledger.chunks.list() == []
    assert ledger.lookup.locate(SOURCE, "a") is None


def test_an_object_that_is_claimed_is_not_restored(ledger):
    register(ledger, ["a"])
    with pytest.raises(ClaimConflict, match="'a'"):
        restore(ledger, restored(1, ["a", "b"]), batches(map(location, ["a", "b"])), [])
    assert ledger.lookup.locate(SOURCE, "b") is None


def test_a_superseded_chunk_is_not_restored(ledger):
    chunk = archive(ledger, ["a"])
    assert restore(ledger, restored(1, ["a", "b"]), batches(map(location, ["a", "b"])), []) == 1
    assert (ledger.lookup.locate(SOURCE, "a").chunk, ledger.lookup.locate(SOURCE, "b").chunk) == (
        chunk,
        "src-0a0b0c0d-00001",
    )
    assert restore(ledger, restored(2, ["a"]), batches([location("a")]), []) == 0
    assert len(ledger.chunks.list()) == 2


def test_a_location_in_a_lost_chunk_is_replaced(ledger):
    chunk = archive(ledger, ["a"])
    end(ledger, chunk, ChunkState.DAMAGED, ChunkState.WITHDRAWN)
    assert restore(ledger, restored(1, ["a"]), batches([location("a")]), []) == 1
    assert ledger.lookup.locate(SOURCE, "a").chunk == "src-0a0b0c0d-00001"
