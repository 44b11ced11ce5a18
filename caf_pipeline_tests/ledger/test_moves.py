"""Moves of chunks, their seal, and their pending rows."""

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import (
    ClaimConflict,
    IllegalMove,
    IntegrityError,
    LeaseLost,
    LedgerError,
    NotLocated,
)
from caf_pipeline.inventory.manifest import LogTimes
from caf_pipeline.records import PostRecord, Sample
from caf_pipeline_tests.support.ledger_rows import (
    ROOT,
    SOURCE,
    VERSION,
    archive,
    batches,
    bring_to,
    chunk_in,
    end,
    held,
    located,
    location,
    pending,
    register,
    seal,
    seal_facts,
    skip,
    standing,
)


def test_a_parked_chunk_keeps_its_claims_and_its_reason(ledger):
    (chunk,) = register(ledger, ["a"])
    with held(ledger, chunk) as lease:
        ledger.moves.move(
            lease, chunk, ChunkState.PLANNED, ChunkState.PARKED, reason="no more money"
        )
    assert ledger.chunks.get(chunk).reason == "no more money"
    with pytest.raises(ClaimConflict):
        register(ledger, ["a"])


def test_damage_reason_stays_until_the_chunk_is_repaired(ledger):
    chunk = archive(ledger, ["a"])
    with held(ledger, chunk) as lease:
        ledger.moves.move(lease, chunk, ChunkState.LOCATED, ChunkState.DAMAGED, reason="one copy")
        assert ledger.chunks.get(chunk).reason == "one copy"
        ledger.moves.move(lease, chunk, ChunkState.DAMAGED, ChunkState.LOCATED)
        assert ledger.chunks.get(chunk).reason == ""


def test_an_unknown_chunk_is_not_located(ledger):
    with pytest.raises(NotLocated, match="src-none"):
        ledger.chunks.get("src-none")


def test_packing_counts_attempts(ledger):
    (chunk,) = register(ledger, ["a"])
    end(ledger, chunk, ChunkState.PACKING, ChunkState.PACKING)
    assert ledger.chunks.get(chunk).attempts == 2


def test_move_from_another_state_names_that_state(ledger):
    chunk = chunk_in(ledger, ChunkState.PACKING)
    with held(ledger, chunk) as lease, pytest.raises(IllegalMove, match="it is 'packing'"):
        ledger.moves.move(lease, chunk, ChunkState.SEALED, ChunkState.POSTING)


def test_no_bare_move_makes_a_chunk_located(ledger):
    chunk = chunk_in(ledger, ChunkState.VERIFIED)
    with held(ledger, chunk) as lease, pytest.raises(IllegalMove, match="load_locations"):
        ledger.moves.move(lease, chunk, ChunkState.VERIFIED, ChunkState.LOCATED)


def test_the_lease_of_another_chunk_moves_nothing(ledger):
    first, second = register(ledger, ["a"], ["b"])
    with held(ledger, first) as lease, pytest.raises(LeaseLost):
        ledger.moves.move(lease, second, ChunkState.PLANNED, ChunkState.PACKING)


def test_a_seal_keeps_its_facts(ledger):
    chunk = chunk_in(ledger, ChunkState.SEALED, ["a", "b"])
    row = ledger.chunks.get(chunk)
    assert (row.state, row.merkle_root, row.proof_type, row.caf_size_bytes) == (
        ChunkState.SEALED,
        ROOT,
        3,
        1000,
    )
    assert row.samples == (Sample(0, 100, b"\x02" * 32), Sample(900, 100, b"\x03" * 32))


def test_a_seal_ends_the_claims_of_skipped_and_released_objects(ledger, tmp_path):
    chunk = chunk_in(ledger, ChunkState.PACKING, ["a", "b", "c"])
    with held(ledger, chunk) as lease:
        seal(ledger, lease, chunk, [skip("b")], [("c", VERSION)])
    assert standing(ledger, tmp_path / "s") == {
        ("a", "claimed", None, False),
        ("b", "skipped", "cold_storage", False),
    }
    assert ledger.chunks.account(SOURCE).claimed_objects == 1


def test_a_chunk_without_members_is_empty_and_claims_nothing(ledger):
    chunk = chunk_in(ledger, ChunkState.PACKING, ["a", "b"])
    with held(ledger, chunk) as lease:
        seal(ledger, lease, chunk, [skip("a"), skip("b")])
    assert ledger.chunks.get(chunk).state is ChunkState.EMPTY
    register(ledger, ["a", "b"])


def test_a_seal_must_account_for_every_claim(ledger):
    chunk = chunk_in(ledger, ChunkState.PACKING, ["a", "b", "c"])
    with held(ledger, chunk) as lease, pytest.raises(LedgerError, match="claims 2"):
        seal(ledger, lease, chunk, [skip("b")], rows=[location("a")])
    assert ledger.chunks.get(chunk).state is ChunkState.PACKING
    assert ledger.chunks.account(SOURCE).skipped == {}


def test_a_chunk_packed_again_may_archive_what_it_skipped_before(ledger):
    chunk = chunk_in(ledger, ChunkState.PACKING, ["a", "b"])
    with held(ledger, chunk) as lease:
        seal(ledger, lease, chunk, [skip("b")])
        ledger.moves.move(lease, chunk, ChunkState.SEALED, ChunkState.PACKING)
        seal(ledger, lease, chunk)
    assert ledger.chunks.account(SOURCE).claimed_objects == 2


def test_a_chunk_packed_again_cannot_archive_what_another_chunk_took(ledger):
    chunk = chunk_in(ledger, ChunkState.PACKING, ["a", "b"])
    with held(ledger, chunk) as lease:
        seal(ledger, lease, chunk, [skip("b")])
        register(ledger, ["b"])
        ledger.moves.move(lease, chunk, ChunkState.SEALED, ChunkState.PACKING)
        with pytest.raises(LedgerError, match="claims 1"):
            seal(ledger, lease, chunk, rows=[location("a"), location("b")])


def test_a_posting_of_other_bytes_is_refused(ledger):
    chunk = chunk_in(ledger, ChunkState.POSTING)
    other = PostRecord(b"\xff" * 32, "jkl1owner", 42, 1000)
    with held(ledger, chunk) as lease, pytest.raises(IntegrityError):
        ledger.moves.record_posting(lease, chunk, other)
    assert ledger.chunks.get(chunk).state is ChunkState.POSTING


def test_a_posted_chunk_knows_its_place(ledger):
    chunk = chunk_in(ledger, ChunkState.POSTED)
    assert (ledger.chunks.get(chunk).owner, ledger.chunks.get(chunk).start) == ("jkl1owner", 42)


def test_a_seal_with_too_few_rows_writes_nothing(ledger):
    chunk = chunk_in(ledger, ChunkState.PACKING, ["a", "b"])
    with held(ledger, chunk) as lease, pytest.raises(LedgerError, match="2 members"):
        seal(ledger, lease, chunk, rows=[location("a")], facts=seal_facts(2))
    assert ledger.chunks.get(chunk).state is ChunkState.PACKING
    assert pending(ledger, chunk) == 0


def test_an_interrupted_seal_writes_nothing_and_can_be_repeated(ledger):
    chunk = chunk_in(ledger, ChunkState.PACKING, ["a", "b"])

    def broken():
        yield from batches([location("a")])
        raise ConnectionError("the cable")

    with held(ledger, chunk) as lease:
        with pytest.raises(ConnectionError):
            ledger.moves.seal(lease, chunk, seal_facts(2), [], [], rows=broken)
        assert pending(ledger, chunk) == 0
        seal(ledger, lease, chunk)
    assert pending(ledger, chunk) == 2


def test_no_look_up_finds_sealed_rows_before_they_are_located(ledger, tmp_path):
    chunk = chunk_in(ledger, ChunkState.VERIFIED)
    assert pending(ledger, chunk) == 1
    assert ledger.lookup.locate(SOURCE, "a") is None
    assert (
        ledger.content.located_versions(SOURCE, ["a"]),
        located(ledger, tmp_path / "located.parquet"),
    ) == ([], [])
    with held(ledger, chunk) as lease:
        assert ledger.moves.load_locations(lease, chunk) == 1
    assert pending(ledger, chunk) == 0
    assert ledger.lookup.locate(SOURCE, "a").chunk == chunk


@pytest.mark.parametrize(
    "states",
    [
        [ChunkState.PACKING],
        [ChunkState.WITHDRAWN],
        [ChunkState.PARKED, ChunkState.WITHDRAWN],
        [ChunkState.PARKED, ChunkState.SEALED, ChunkState.PACKING],
        [ChunkState.POSTING, ChunkState.ABANDONED],
    ],
    ids="-".join,
)
def test_pending_rows_go_when_a_chunk_goes_back(ledger, states):
    chunk, other = register(ledger, ["log"], ["another"])
    bring_to(ledger, other, ChunkState.SEALED)
    end(ledger, chunk, ChunkState.PACKING)
    with held(ledger, chunk) as lease:
        ledger.moves.seal(
            lease,
            chunk,
            seal_facts(1),
            [],
            [],
            rows=lambda: batches([location("log")]),
            logs=[LogTimes(0, 1, 2)],
        )
    assert (pending(ledger, chunk), ledger.lookup.chunks_with_log_times([chunk])) == (1, {chunk})
    end(ledger, chunk, *states)
    assert (pending(ledger, chunk), pending(ledger, other)) == (0, 1)
    assert ledger.lookup.chunks_with_log_times([chunk]) == set()


def test_a_parked_chunk_keeps_its_pending_rows(ledger):
    chunk = chunk_in(ledger, ChunkState.UPLOADING)
    end(ledger, chunk, ChunkState.PARKED)
    assert pending(ledger, chunk) == 1
