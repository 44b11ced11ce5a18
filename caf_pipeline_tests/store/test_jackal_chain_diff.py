"""The difference between the chain's list and the ledger: nothing goes unnoticed."""

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.store.jackal.answers import ChainFile
from caf_pipeline.store.jackal.chain_diff import compare
from caf_pipeline_tests.support.chunk_rows import a_chunk

OWNER = "jkl1owner"


def a_file(
    root: bytes = b"r" * 32,
    *,
    start: int = 7,
    expires: int = 0,
    owner: str = OWNER,
    copies: int = 3,
) -> ChainFile:
    proofs = tuple(
        f"jkl1provider{number}/{owner}/{root.hex()}/{start}/" for number in range(copies)
    )
    return ChainFile(root, owner, start, expires, 1_000, 3, 3, "{}", proofs)


def compared(files, chunks):
    return compare(files, chunks, owner=OWNER, required_copies=3, expiring_at=500)


def test_listed_chunk_is_held_without_a_fault():
    difference = compared([a_file()], [a_chunk()])
    assert [chunk.name for chunk, _ in difference.listed] == [a_chunk().name]
    assert (difference.missing, difference.foreign, difference.expiring, difference.short) == (
        [],
        [],
        set(),
        set(),
    )


def test_a_chunk_that_the_chain_does_not_list_is_missing():
    assert compared([], [a_chunk()]).missing == [a_chunk()]


def test_files_without_their_own_end_expire_with_the_plan():
    files = [a_file(), a_file(b"s" * 32, expires=600)]
    chunks = [a_chunk(), a_chunk(name="src-00000000-00002", merkle_root=b"s" * 32)]
    difference = compare(
        files, chunks, owner=OWNER, required_copies=3, expiring_at=500, plan_ends=True
    )
    assert difference.expiring == {chunks[0].name}


def test_other_post_of_the_root_is_not_the_chunk():
    difference = compared([a_file(start=8)], [a_chunk()])
    assert (len(difference.missing), len(difference.foreign)) == (1, 1)


@pytest.mark.parametrize("state", [ChunkState.PLANNED, ChunkState.SEALED, ChunkState.POSTING])
def test_a_chunk_that_was_not_posted_yet_is_not_missed(state):
    assert compared([], [a_chunk(state=state, start=None)]).missing == []


def test_the_file_of_an_abandoned_chunk_is_foreign():
    assert compared([a_file()], [a_chunk(state=ChunkState.ABANDONED)]).foreign == [a_file()]


def test_files_of_other_owners_are_left_out():
    assert compared([a_file(owner="jkl1other")], []).foreign == []


def test_file_of_another_wallet_outlives_our_plan():
    file, chunk = a_file(owner="jkl1before"), a_chunk(owner="jkl1before")
    difference = compare(
        [file], [chunk], owner=OWNER, required_copies=3, expiring_at=500, plan_ends=True
    )
    assert (difference.listed, difference.missing, difference.foreign, difference.expiring) == (
        [(chunk, file)],
        [],
        [],
        set(),
    )
    assert compared([a_file()], [chunk]).missing == [chunk]


@pytest.mark.parametrize(("expires", "expiring"), [(0, 0), (500, 1), (501, 0)])
def test_file_with_its_own_end_expires_by_the_given_height(expires, expiring):
    assert len(compared([a_file(expires=expires)], [a_chunk()]).expiring) == expiring


@pytest.mark.parametrize(("state", "short"), [(ChunkState.LOCATED, 1), (ChunkState.UPLOADING, 0)])
def test_only_what_should_have_all_copies_is_short_of_them(state, short):
    assert len(compared([a_file(copies=2)], [a_chunk(state=state)]).short) == short
