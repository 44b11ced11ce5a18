"""Chunks opened from all of their stored bytes."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caf_pipeline.encryption.opened_chunk import OpenedChunk
from caf_pipeline.errors import IntegrityError, NoMatchingIdentity
from caf_pipeline.formats import age
from caf_pipeline.ledger.records import ChunkHeader

IDENTITY = age.new_identity(hybrid=False)


def seal(plain: bytes) -> tuple[OpenedChunk, bytes]:
    """Return a chunk and its stored bytes."""
    key, nonce = os.urandom(age.FILE_KEY_BYTES), os.urandom(age.NONCE_BYTES)
    header = ChunkHeader(age.make_header([IDENTITY.recipient], key), nonce, len(plain))
    stored = header.header + nonce + age.Payload(key, nonce).seal(0, plain, is_end=True)
    return OpenedChunk.open(header, [age.new_identity(), IDENTITY]), stored


def test_the_identity_that_opened_a_chunk_is_known():
    chunk, _ = seal(b"x")
    assert chunk.opened_with == str(IDENTITY.recipient)


def test_another_identity_does_not_open_a_chunk():
    header = age.make_header([IDENTITY.recipient], os.urandom(16))
    with pytest.raises(NoMatchingIdentity):
        OpenedChunk.open(ChunkHeader(header, os.urandom(16), 1), [age.new_identity()])


@given(
    st.sampled_from([1, 65_535, 65_536, 65_537, 200_000]),
    st.lists(st.integers(0, 70_000), max_size=6),
)
def test_a_chunk_opens_from_pieces_of_any_size(size_bytes, sizes):
    plain = os.urandom(size_bytes)
    chunk, stored = seal(plain)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(stored[at : at + size])
        at += size
    assert b"".join(chunk.whole([*pieces, stored[at:]])) == plain


@pytest.mark.parametrize("size_bytes", [1, 65_536, 65_537, 131_072])
@pytest.mark.parametrize("change", [-65_552, -1, 1, 65_552])
def test_a_file_of_another_size_does_not_open(size_bytes, change):
    chunk, stored = seal(os.urandom(size_bytes))
    other = stored[:change] if change < 0 else stored + bytes(change)
    for pieces in ([other], [stored[: len(other)], other[len(stored) :]]):
        with pytest.raises(IntegrityError):
            b"".join(chunk.whole(pieces))


def test_another_header_does_not_open():
    chunk, stored = seal(b"x" * 100)
    _, other = seal(b"x" * 100)
    for wrong in (other, other[: -100 - age.TAG_BYTES] + stored[-100 - age.TAG_BYTES :], b""):
        with pytest.raises(IntegrityError):
            b"".join(chunk.whole([wrong]))
