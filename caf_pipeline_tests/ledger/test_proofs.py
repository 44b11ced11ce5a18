"""Copies of chunks: their checks, proofs and full reads."""

from dataclasses import replace

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import IllegalMove, IntegrityError, LeaseLost
from caf_pipeline.ledger.records import CopyCheck
from caf_pipeline.records import Copy, Sample
from caf_pipeline_tests.support.ledger_rows import (
    POSTING,
    ROOT,
    SOURCE,
    archive,
    bring_to,
    chunk_in,
    end,
    held,
    location,
    look,
    read_back,
    register,
    seen,
)
from caf_pipeline_tests.support.postgres import connected


def windows_after(ledger, chunk, *windows, apart=False):
    """Return how many windows count after checks that found the copy proven in these windows."""
    for window in windows:
        look(ledger, chunk, CopyCheck(Copy("provider", "proof", 1), window, apart=apart))
    (copy,) = ledger.replicas.list(chunk)
    return int(copy.windows)


def test_the_copies_that_verified_a_chunk_are_known(ledger):
    (chunk,) = register(ledger, ["a"])
    assert ledger.replicas.list(chunk) == []
    bring_to(ledger, chunk, ChunkState.UPLOADING)
    with held(ledger, chunk) as lease:
        ledger.replicas.record_verified(
            lease, chunk, [Copy("p2", "proof 2", 9), Copy("p1", "proof 1")]
        )
    assert seen(ledger, chunk) == [("p1", True, None, 0, ""), ("p2", True, 9, 0, "")]
    assert [copy.proof for copy in ledger.replicas.list(chunk)] == ["proof 1", "proof 2"]


def test_copies_of_a_repeated_upload_replace_the_first(ledger):
    chunk = chunk_in(ledger, ChunkState.VERIFIED)
    end(ledger, chunk, ChunkState.UPLOADING)
    with held(ledger, chunk) as lease:
        ledger.replicas.record_verified(lease, chunk, [Copy("another", "proof", 9)])
    assert seen(ledger, chunk) == [("another", True, 9, 0, ""), ("provider", False, None, 0, "")]


def test_each_proof_window_counts_once(ledger):
    chunk = archive(ledger, ["a"])
    for last_proven, window in [(100, 1), (110, 1), (None, None), (205, 2), (120, 1), (305, 3)]:
        look(ledger, chunk, CopyCheck(Copy("provider", "proof", last_proven), window))
    assert seen(ledger, chunk) == [("provider", True, 305, 3, "")]
    assert ledger.replicas.list(chunk)[0].last_window == 3


def test_a_gap_between_proof_windows_restarts_the_count(ledger):
    chunk = archive(ledger, ["a"])
    assert windows_after(ledger, chunk, 1, 2) == 2
    assert windows_after(ledger, chunk, 5) == 1
    assert windows_after(ledger, chunk, None, 7) == 1
    assert windows_after(ledger, chunk, None, 8) == 2


def test_windows_that_count_apart_need_not_follow_each_other(ledger):
    chunk = archive(ledger, ["a"])
    assert windows_after(ledger, chunk, 1, 1, None, 5, apart=True) == 2


def test_a_limited_number_of_waiting_chunks_come_first(ledger):
    names = [archive(ledger, [key]) for key in "abcd"]
    for chunk, again_in, enough in zip(names[1:], (0, 0, 3600), (1, 1, 1), strict=True):
        look(
            ledger,
            chunk,
            CopyCheck(Copy("provider", "proof", 1), 1),
            again_in=again_in,
            enough=enough,
        )
    assert [chunk.name for chunk in ledger.chunks.to_prove(SOURCE, 9)] == names
    assert [chunk.name for chunk in ledger.chunks.to_prove(SOURCE, 9, waiting=1)] == [
        names[1],
        names[0],
        names[2],
        names[3],
    ]
    assert [chunk.name for chunk in ledger.chunks.to_prove(SOURCE, 9, waiting=9)] == [
        names[1],
        names[2],
        names[0],
        names[3],
    ]


def test_a_chunk_with_enough_windows_waits_for_none(ledger):
    first, second = (archive(ledger, [key]) for key in "ab")
    for window in (1, 2):
        look(ledger, second, CopyCheck(Copy("provider", "proof", 1), window), again_in=0, enough=1)
    assert [chunk.name for chunk in ledger.chunks.to_prove(SOURCE, 9, waiting=9)] == [first, second]


def test_a_random_object_of_limited_size_is_chosen(ledger):
    rows = [location(f"key-{number}") for number in range(9)]
    chunk = archive(ledger, [row.key for row in rows])
    archive(ledger, ["elsewhere"], source="other")
    size = rows[0].end_byte - rows[0].start_byte
    assert ledger.chunks.any_object(chunk, size) in [
        Sample(row.start_byte, size, row.sha256) for row in rows
    ]
    assert ledger.chunks.any_object(chunk, size - 1) is None


def test_only_a_chunk_without_post_gets_another_root(ledger):
    *unposted, posted = register(ledger, ["a"], ["b"], ["c"])
    bring_to(ledger, posted, ChunkState.POSTED)
    other = [Sample(0, 3, b"\1" * 32)]
    for chunk, state in zip(unposted, (ChunkState.SEALED, ChunkState.POSTING), strict=True):
        bring_to(ledger, chunk, state)
        with held(ledger, chunk) as lease:
            ledger.moves.record_root(lease, chunk, b"\2" * 64, 0, other)
        row = ledger.chunks.get(chunk)
        assert (row.merkle_root, row.proof_type, list(row.samples), row.state) == (
            b"\2" * 64,
            0,
            other,
            state,
        )
    with held(ledger, posted) as lease, pytest.raises(IllegalMove, match="'posted'"):
        ledger.moves.record_root(lease, posted, b"\2" * 64, 0, other)
    assert ledger.chunks.get(posted).merkle_root == ROOT


def test_a_copy_missing_from_a_check_is_unlisted(ledger):
    chunk = archive(ledger, ["a"])
    look(ledger, chunk, CopyCheck(Copy("new", "proof", 7), 0, "wrong bytes at 100"))
    assert seen(ledger, chunk) == [
        ("new", True, 7, 0, "wrong bytes at 100"),
        ("provider", False, None, 0, ""),
    ]
    look(ledger, chunk, CopyCheck(Copy("new", "proof", 7), 0))
    assert ledger.replicas.list(chunk)[0].fault == ""


def test_only_a_located_or_damaged_chunk_is_checked(ledger):
    chunk = chunk_in(ledger, ChunkState.VERIFIED)
    with pytest.raises(IllegalMove, match="'verified'"):
        look(ledger, chunk)
    assert ledger.replicas.list(chunk)[0].listed


def test_a_check_without_the_lease_writes_nothing(ledger):
    chunk = archive(ledger, ["a"])
    with held(ledger, chunk) as old:
        pass
    with held(ledger, chunk, "run-2"), pytest.raises(LeaseLost):
        ledger.replicas.record_checks(old, chunk, [])
    assert ledger.replicas.list(chunk)[0].listed
    assert ledger.chunks.get(chunk).checked_at is None


def test_chunks_are_checked_in_turn_new_ones_by_age(ledger):
    names = [archive(ledger, [key]) for key in "abc"]
    register(ledger, ["d"])
    archive(ledger, ["a"], source="other")
    for chunk in (names[1], names[0]):
        look(ledger, chunk, CopyCheck(Copy("provider", "proof"), None))
    assert [chunk.name for chunk in ledger.chunks.to_prove(SOURCE, 9)] == [
        names[2],
        names[1],
        names[0],
    ]
    first, *_ = ledger.chunks.to_prove(SOURCE, 1)
    assert first == ledger.chunks.get(names[2])
    assert (
        ledger.chunks.get(names[0]).checked_at
        > ledger.chunks.get(names[1]).checked_at
        > first.located_at
    )


def test_a_damaged_chunk_is_not_proven_but_repaired(ledger):
    end(ledger, archive(ledger, ["a"]), ChunkState.DAMAGED)
    assert ledger.chunks.to_prove(SOURCE, 9) == []


def test_a_repaired_chunk_needs_a_right_copy(ledger):
    chunk = archive(ledger, ["a"])
    end(ledger, chunk, ChunkState.DAMAGED)
    for checks in ([], [CopyCheck(Copy("provider", "proof"), None, "wrong bytes")]):
        look(ledger, chunk, *checks)
        with pytest.raises(IllegalMove, match=chunk):
            end(ledger, chunk, ChunkState.LOCATED)
    look(ledger, chunk, CopyCheck(Copy("provider", "proof"), 3))
    end(ledger, chunk, ChunkState.LOCATED)
    assert ledger.lookup.locate(SOURCE, "a").chunk == chunk


def test_a_reposted_chunk_is_read_from_its_new_place(ledger):
    chunk = archive(ledger, ["a"])
    end(ledger, chunk, ChunkState.DAMAGED)
    again = replace(POSTING, start=99)
    with held(ledger, chunk) as lease:
        ledger.moves.record_repost(lease, chunk, again)
    assert ledger.lookup.locate(SOURCE, "a").posting == again
    assert [copy.listed for copy in ledger.replicas.list(chunk)] == [False]


def test_other_bytes_do_not_repair_a_chunk(ledger):
    chunk = archive(ledger, ["a"])
    with held(ledger, chunk) as lease:
        with pytest.raises(IllegalMove, match="'located'"):
            ledger.moves.record_repost(lease, chunk, POSTING)
        ledger.moves.move(lease, chunk, ChunkState.LOCATED, ChunkState.DAMAGED)
        with pytest.raises(IntegrityError):
            ledger.moves.record_repost(
                lease, chunk, replace(POSTING, merkle_root=b"\xff" * 32, start=99)
            )
    assert ledger.chunks.get(chunk).start == POSTING.start


def test_proofs_before_a_fault_no_longer_count(ledger):
    chunk = archive(ledger, ["a"])
    for window, fault in [(1, ""), (2, ""), (3, "wrong bytes"), (3, ""), (3, "")]:
        look(ledger, chunk, CopyCheck(Copy("provider", "proof", window), window, fault))
    assert ledger.replicas.list(chunk)[0].windows == 1
    look(ledger, chunk, CopyCheck(Copy("provider", "proof", 4), 4))
    assert ledger.replicas.list(chunk)[0].windows == 2


def test_proofs_before_an_unlisting_no_longer_count(ledger):
    chunk = archive(ledger, ["a"])
    for window in (1, 2):
        look(ledger, chunk, CopyCheck(Copy("provider", "proof", window), window))
    look(ledger, chunk)
    assert ledger.replicas.list(chunk)[0].windows == 0
    look(ledger, chunk, CopyCheck(Copy("provider", "proof", 2), 2))
    assert ledger.replicas.list(chunk)[0].windows == 1


def test_windows_of_a_new_post_are_counted_again(ledger):
    chunk = archive(ledger, ["a"])
    for window in (7, 8):
        look(ledger, chunk, CopyCheck(Copy("provider", "proof", window), window))
    end(ledger, chunk, ChunkState.DAMAGED)
    with held(ledger, chunk) as lease:
        ledger.moves.record_repost(lease, chunk, replace(POSTING, start=99))
    for window in (0, 1):
        look(ledger, chunk, CopyCheck(Copy("provider", "proof", window), window))
        assert ledger.replicas.list(chunk)[0].windows == window + 1


def test_a_chunk_knows_when_it_was_read_back(ledger):
    chunk = archive(ledger, ["a"])
    assert ledger.chunks.get(chunk).read_back_at is None
    read_back(ledger, chunk)
    assert ledger.chunks.get(chunk).read_back_at > ledger.chunks.get(chunk).located_at
    assert [row.read_back_at for row in ledger.chunks.list()] == [
        ledger.chunks.get(chunk).read_back_at
    ]


def test_only_a_located_or_damaged_chunk_is_read_back(ledger):
    chunk = chunk_in(ledger, ChunkState.VERIFIED)
    with pytest.raises(IllegalMove, match="'verified'"):
        read_back(ledger, chunk)


def test_a_run_that_lost_the_chunk_records_no_read_back(ledger):
    chunk = archive(ledger, ["a"])
    with held(ledger, chunk) as old:
        pass
    with held(ledger, chunk, "run-2"), pytest.raises(LeaseLost):
        ledger.replicas.record_full_read(old, chunk, "provider")
    assert ledger.chunks.get(chunk).read_back_at is None


def test_a_full_read_counts_while_its_copy_does(ledger):
    chunk = archive(ledger, ["a"])
    right, other = CopyCheck(Copy("provider", "proof"), 3), CopyCheck(Copy("other", "proof"), 3)
    read_back(ledger, chunk)
    look(ledger, chunk, right, other)
    assert ledger.chunks.get(chunk).read_back_at is not None
    look(ledger, chunk, other)
    assert ledger.chunks.get(chunk).read_back_at is None


def test_the_last_full_read_says_what_opened_it(ledger):
    chunk = archive(ledger, ["a"])
    for opened_with in (None, "age1recipient", None):
        read_back(ledger, chunk, opened_with)
        assert ledger.chunks.get(chunk).opened_with == opened_with
    read_back(ledger, chunk, "age1recipient")
    end(ledger, chunk, ChunkState.DAMAGED)
    assert ledger.chunks.get(chunk).opened_with is None


def test_an_agreement_ends_with_its_full_read(ledger):
    chunk = archive(ledger, ["a"])
    read_back(ledger, chunk)
    before = ledger.chunks.get(chunk)
    ledger.replicas.record_agreement(before, b"a" * 32)
    assert ledger.chunks.get(chunk).agreed_sha256 == b"a" * 32
    read_back(ledger, chunk)
    ledger.replicas.record_agreement(before, b"b" * 32)
    assert ledger.chunks.get(chunk).agreed_sha256 is None
    ledger.replicas.record_agreement(ledger.chunks.get(chunk), b"c" * 32)
    with connected(ledger.database) as connection:
        connection.execute("UPDATE chunk_copies SET merkle_root = sha256('x')")
    assert ledger.chunks.get(chunk).read_back_at is None


def test_damage_repost_or_repair_ends_the_full_read(ledger):
    chunk = archive(ledger, ["a"])
    read_back(ledger, chunk)
    end(ledger, chunk, ChunkState.DAMAGED)
    assert ledger.chunks.get(chunk).read_back_at is None
    read_back(ledger, chunk)
    with held(ledger, chunk) as lease:
        ledger.moves.record_repost(lease, chunk, replace(POSTING, start=99))
    assert ledger.chunks.get(chunk).read_back_at is None
    read_back(ledger, chunk)
    look(ledger, chunk, CopyCheck(Copy("provider", "proof"), 3))
    end(ledger, chunk, ChunkState.LOCATED)
    assert ledger.chunks.get(chunk).read_back_at is None
