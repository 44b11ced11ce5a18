"""The contract of every ChunkReader and ChunkStore.

A test class of an implementation inherits it and defines the fixture `store`. It may also define
`log`, the transaction log for the store's posts. The default log is in memory.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from caf_pipeline.caf.merkle import merkle_root
from caf_pipeline.errors import (
    IntegrityError,
    LeaseLost,
    StoredChunkMissing,
    StoreError,
)
from caf_pipeline.records import PostRecord, Sample
from caf_pipeline.store.protocol import ChunkToStore
from caf_pipeline_tests.support.memory_log import MemoryLog


def staged_file(folder: Path, data: bytes) -> Path:
    path = folder / "staged.caf"
    path.write_bytes(data)
    return path


def to_store(store, path: Path, *, name="src-00000000-00001") -> ChunkToStore:
    root = merkle_root(path, store.proof_type)
    return ChunkToStore(name, "0" * 32, path.stat().st_size, store.proof_type, root)


def stored(store, path: Path, log=None) -> PostRecord:
    posting = store.post(to_store(store, path), log or MemoryLog())
    store.put(posting, path, lambda _: None)
    return posting


class ChunkReaderContract:
    """The contract of `ChunkReader`. The fixture `reader` reads from `store`.

    Bytes are random, because a store may outlive a test and never forgets a root.
    """

    @pytest.fixture
    def log(self):
        return MemoryLog()

    @pytest.fixture
    def reader(self, store):
        return store

    def test_stored_chunk_reads_back_in_any_range(self, reader, store, log, tmp_path):
        data = os.urandom(3 << 20)
        posting = stored(store, staged_file(tmp_path, data), log)
        for start, end in [
            (0, len(data)),
            (0, 1),
            (5, 2_000_000),
            (len(data) - 1, len(data)),
            (7, 7),
        ]:
            assert b"".join(reader.read(posting, start, end)) == data[start:end]

    def test_pieces_are_at_most_one_mebibyte(self, reader, store, log, tmp_path):
        posting = stored(store, staged_file(tmp_path, os.urandom(3 << 20)), log)
        assert max(len(piece) for piece in reader.read(posting, 0, 3 << 20)) <= 1 << 20

    def test_uploaded_chunk_has_equal_copies_as_required(self, reader, store, log, tmp_path):
        data = os.urandom(100_000)
        posting = stored(store, staged_file(tmp_path, data), log)
        copies = reader.copies(posting)
        assert len({copy.provider for copy in copies}) >= reader.required_copies
        for copy in copies:
            read = b"".join(reader.read(posting, 0, len(data), provider=copy.provider))
            assert hashlib.sha256(read).digest() == hashlib.sha256(data).digest()

    def test_each_holder_gives_the_bytes(self, reader, store, log, tmp_path):
        data = os.urandom(50_000)
        posting = stored(store, staged_file(tmp_path, data), log)
        holders = reader.holders(posting)
        assert len(set(holders)) == len(holders) >= reader.required_copies
        for provider in holders:
            assert b"".join(reader.read(posting, 10, 40_000, provider=provider)) == data[10:40_000]

    def test_an_unknown_chunk_is_missing(self, reader):
        unknown = PostRecord(b"\1" * 32, "nobody", 1, 10)
        assert list(reader.copies(unknown)) == []
        assert list(reader.holders(unknown)) == []
        with pytest.raises(StoredChunkMissing):
            list(reader.read(unknown, 0, 10))

    def test_read_past_the_end_is_an_error(self, reader, store, log, tmp_path):
        posting = stored(store, staged_file(tmp_path, os.urandom(1000)), log)
        with pytest.raises(IntegrityError):
            list(reader.read(posting, 0, 1001))

    def test_urls_are_of_holders(self, reader, store, log, tmp_path):
        posting = stored(store, staged_file(tmp_path, os.urandom(1000)), log)
        assert set(reader.urls(posting)) <= set(reader.holders(posting))

    def test_a_range_that_a_holder_gives_is_not_lost(self, reader, store, log, tmp_path):
        posting = stored(store, staged_file(tmp_path, os.urandom(1000)), log)
        assert not any(
            reader.has_lost(posting, 0, 1000, provider=provider)
            for provider in reader.holders(posting)
        )

    def test_closing_twice_is_closing_once(self, reader):
        reader.close()
        reader.close()


class ChunkStoreContract(ChunkReaderContract):
    """The contract of `ChunkStore`, which is also a reader."""

    def test_a_posted_chunk_that_was_not_uploaded_has_no_copy(self, store, log, tmp_path):
        posting = store.post(to_store(store, staged_file(tmp_path, os.urandom(1000))), log)
        assert list(store.copies(posting)) == []
        assert list(store.holders(posting)) == []

    def test_posting_the_same_root_again_gives_the_same_posting(self, store, log, tmp_path):
        chunk = to_store(store, staged_file(tmp_path, os.urandom(1000)))
        assert store.post(chunk, log) == store.post(chunk, log)

    def test_uploading_again_changes_nothing(self, store, log, tmp_path):
        path = staged_file(tmp_path, os.urandom(1000))
        posting = stored(store, path, log)
        copies = {copy.provider for copy in store.copies(posting)}
        store.put(posting, path, lambda _: None)
        assert {copy.provider for copy in store.copies(posting)} == copies

    def test_progress_counts_every_byte(self, store, log, tmp_path):
        path = staged_file(tmp_path, os.urandom(2_500_000))
        sizes = []
        store.put(store.post(to_store(store, path), log), path, sizes.append)
        assert sum(sizes) >= 2_500_000

    def test_error_from_progress_ends_the_upload(self, store, log, tmp_path):
        path = staged_file(tmp_path, os.urandom(2_500_000))
        posting = store.post(to_store(store, path), log)

        def lost(size_bytes):
            raise LeaseLost("another run took it over")

        with pytest.raises(LeaseLost):
            store.put(posting, path, lost)

    def test_post_is_listed_only_under_its_archive(self, store, log, tmp_path):
        chunk = to_store(store, staged_file(tmp_path, os.urandom(1000)))
        posting = store.post(chunk, log)
        (listed,) = [
            listed
            for listed in store.posted(chunk.archive_id)
            if listed.posting.merkle_root == chunk.merkle_root
        ]
        assert (listed.posting, listed.proof_type) == (posting, chunk.proof_type)
        assert posting.owner == store.owner()
        assert list(store.posted("f" * 32)) == []

    def test_post_is_listed_by_root_and_by_owner(self, store, log, tmp_path):
        chunk = to_store(store, staged_file(tmp_path, os.urandom(1000)))
        posting = store.post(chunk, log)
        assert [
            (listed.posting, listed.proof_type) for listed in store.posted_as(chunk.merkle_root)
        ] == [(posting, chunk.proof_type)]
        assert posting in [listed.posting for listed in store.posted_by(store.owner())]
        assert list(store.posted_as(bytes(32))) == list(store.posted_by("nobody")) == []

    def test_posts_of_the_owner_are_counted_by_archive(self, store, log, tmp_path):
        before = {archive: files.count for archive, files in store.archives().items()}
        chunk = replace(
            to_store(store, staged_file(tmp_path, os.urandom(1000))),
            archive_id=os.urandom(16).hex(),
        )
        store.post(chunk, log)
        store.post(chunk, log)
        after = {archive: files.count for archive, files in store.archives().items()}
        assert after == {**before, chunk.archive_id: 1}

    def test_only_fitting_chunks_are_admitted(self, store):
        store.admit(stored_size_bytes=1000, waiting_bytes=0)
        with pytest.raises(StoreError):
            store.admit(stored_size_bytes=1000, waiting_bytes=1 << 62)

    def test_properties_of_a_store_are_valid(self, store):
        largest = store.largest_chunk_bytes()
        assert largest is None or largest > 0
        assert store.staging_hold_seconds() >= 0
        assert store.required_copies >= 1

    def test_proof_windows_are_numbers_or_none(self, store, log, tmp_path):
        posting = stored(store, staged_file(tmp_path, os.urandom(1000)), log)
        windows = [store.proof_window(posting, copy) for copy in store.copies(posting)]
        now = store.current_window(posting)
        assert all(window is None or (now is not None and 0 <= window <= now) for window in windows)


def corrupt(path: Path, at: int = 0) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def place_between(samples: Iterable[Sample]) -> int:
    """Return the first place of a chunk that is in none of its samples."""
    place = 0
    for sample in sorted(samples, key=lambda sample: sample.offset):
        if sample.offset <= place:
            place = max(place, sample.offset + sample.length)
    return place
