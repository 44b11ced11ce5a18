"""Sealed segments: written in any pieces, read in any range, rolled back under a new key."""

import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caf_pipeline.caf.merkle import merkle_root
from caf_pipeline.encryption.opened_chunk import OpenedChunk, OpenedSource
from caf_pipeline.encryption.sealing import (
    MAX_PRIVATE_CAF_BYTES,
    SealedSpool,
    SegmentWriter,
)
from caf_pipeline.errors import IntegrityError
from caf_pipeline.formats import age
from caf_pipeline.ledger.records import ChunkHeader
from caf_pipeline.packing.sink import PartFile, StagingSink
from caf_pipeline.reading.chunk_reader import StagedSource

IDENTITY = age.new_identity(hybrid=False)
BORDER = age.SEGMENT_BYTES
SIZES = [0, 1, BORDER - 1, BORDER, BORDER + 1, 2 * BORDER, 3 * BORDER + 7, 34 * BORDER + 1]


class MemoryRanges:
    def __init__(self, content):
        self.content = content

    def read(self, start_byte, end_byte):
        return self.content[start_byte:end_byte]


def sealed_chunk(plaintext, cuts=()):
    """Seal plaintext that arrives in pieces."""
    writer = SegmentWriter()
    header = age.make_header([IDENTITY.recipient], writer.file_key)
    borders = sorted({0, len(plaintext), *cuts})
    payload = bytearray()
    for start, end in pairwise(borders):
        payload += b"".join(writer.write(plaintext[start:end]))
    payload += writer.finish()
    chunk_header = ChunkHeader(header, writer.nonce, len(plaintext))
    return chunk_header, header + writer.nonce + bytes(payload)


@pytest.mark.parametrize("size", SIZES)
def test_any_pieces_give_a_file_that_opens(size):
    plaintext = os.urandom(size)
    for cuts in ([], [1], [BORDER], range(0, size, 10_000)):
        header, stored = sealed_chunk(plaintext, [cut for cut in cuts if cut < size])
        assert len(stored) == header.payload_start + age.sealed_size(size)
        opened = OpenedChunk.open(header, [IDENTITY])
        assert OpenedSource(MemoryRanges(stored), opened).read(0, size) == plaintext


@given(st.data())
def test_any_range_reads_in_any_pieces(data):
    size = data.draw(st.sampled_from(SIZES[1:-1]))
    plaintext = bytes(number * 7 % 251 for number in range(size))
    start = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(start + 1, size))
    header, stored = sealed_chunk(plaintext)
    opened = OpenedChunk.open(header, [IDENTITY])
    begin, stop = opened.stored_range(start, end)
    sealed, pieces = stored[begin:stop], []
    while sealed:
        length = data.draw(st.integers(1, len(sealed)))
        pieces.append(sealed[:length])
        sealed = sealed[length:]
    assert b"".join(opened.pieces(pieces, start, end)) == plaintext[start:end]


@given(st.data())
def test_written_bytes_read_back_before_the_end(data):
    plaintext = os.urandom(data.draw(st.sampled_from(SIZES[1:])))
    writer = SegmentWriter()
    payload = b"".join(writer.write(plaintext))
    start = data.draw(st.integers(0, len(plaintext)))
    end = data.draw(st.integers(start, len(plaintext)))
    assert writer.read(lambda begin, stop: payload[begin:stop], start, end) == plaintext[start:end]


@pytest.mark.parametrize("fault", ["flip", "truncate", "swap", "other attempt"])
def test_a_wrong_segment_is_never_returned(fault):
    plaintext = os.urandom(3 * BORDER)
    header, stored = sealed_chunk(plaintext)
    content = bytearray(stored)
    first = header.payload_start
    second = first + age.SEALED_SEGMENT_BYTES
    if fault == "flip":
        content[first + 100] ^= 1
    elif fault == "truncate":
        del content[-age.SEALED_SEGMENT_BYTES :]
    elif fault == "swap":
        content[first:second], content[second : second + age.SEALED_SEGMENT_BYTES] = (
            content[second : second + age.SEALED_SEGMENT_BYTES],
            content[first:second],
        )
    else:
        content = bytearray(sealed_chunk(plaintext)[1])
    opened = OpenedChunk.open(header, [IDENTITY])
    source = OpenedSource(MemoryRanges(bytes(content)), opened)
    with pytest.raises(IntegrityError):
        source.read(0, len(plaintext))


def test_the_largest_private_caf_fits_a_chunk():
    stored = age.MAX_HEADER_BYTES + 16 + age.sealed_size(MAX_PRIVATE_CAF_BYTES)
    assert stored == 32 << 30


def test_a_spool_holds_no_plaintext(tmp_path):
    path = tmp_path / "spool"
    with SealedSpool(path) as spool:
        for _ in range(30):
            spool.write(b"plaintext!" * 1000)
        assert b"".join(spool.pieces(50_000)) == b"plaintext!" * 30_000
    assert b"plaintext!" not in path.read_bytes()


# --- the staging sink


def segments_of(path, start):
    content = path.read_bytes()[start:]
    step = age.SEALED_SEGMENT_BYTES
    return [content[at : at + step] for at in range(0, len(content), step)]


@pytest.mark.parametrize("kept", [10, BORDER, 2 * BORDER + 5])
def test_a_rollback_seals_the_prefix_under_a_new_key(tmp_path, kept):
    path = tmp_path / "chunk.1.part"
    prefix, dropped, rest = os.urandom(kept), os.urandom(3 * BORDER), os.urandom(3 * BORDER)
    with StagingSink(PartFile.create(path), proof_type=3, recipients=[IDENTITY.recipient]) as sink:
        sink.write(prefix)
        mark = sink.mark()
        sink.write(dropped)
        sink.flush()
        start = len(sink.header) + age.NONCE_BYTES
        before, old_nonce = segments_of(path, start), sink.segments.nonce
        sink.roll_back(mark)
        sink.publish()
        assert sink.segments.nonce != old_nonce
        sink.write(rest)
        root = sink.finish()
        header = ChunkHeader(sink.header, sink.segments.nonce, sink.size_bytes)
        assert sink.stored_size_bytes == path.stat().st_size
    after = segments_of(path, header.payload_start)
    assert not set(before) & set(after)
    assert merkle_root(path, 3) == root
    opened = OpenedChunk.open(header, [IDENTITY])
    source = OpenedSource(StagedSource(path), opened)
    assert source.read(0, header.caf_size_bytes) == prefix + rest
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_rollback_inside_the_open_segment_keeps_the_key(tmp_path):
    path = tmp_path / "chunk.1.part"
    with StagingSink(PartFile.create(path), proof_type=3, recipients=[IDENTITY.recipient]) as sink:
        sink.write(b"kept")
        mark, nonce = sink.mark(), sink.segments.nonce
        sink.write(b"dropped")
        sink.roll_back(mark)
        assert sink.segments.nonce == nonce
        sink.write(b" and more")
        sink.finish()
        header = ChunkHeader(sink.header, nonce, sink.size_bytes)
    opened = OpenedChunk.open(header, [IDENTITY])
    assert OpenedSource(StagedSource(path), opened).read(0, 99) == b"kept and more"


def test_staged_bytes_read_back_while_sealing(tmp_path):
    content = os.urandom(5 * BORDER + 3)
    with StagingSink(
        PartFile.create(tmp_path / "part"), proof_type=3, recipients=[IDENTITY.recipient]
    ) as sink:
        sink.write(content)
        for start, end in [(0, 5), (BORDER - 2, BORDER + 2), (5 * BORDER, len(content))]:
            assert sink.read_staged(start, end) == content[start:end]
