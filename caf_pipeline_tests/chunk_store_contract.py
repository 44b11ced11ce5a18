"""What every ChunkStore does. A test class of an implementation inherits it and gives the fixture `store`."""

import hashlib
import os
from pathlib import Path

import pytest

from caf_pipeline.errors import IntegrityError, StoredChunkMissing
from caf_pipeline.interfaces import ChunkToStore, Posting, SignedTransaction
from caf_pipeline.merkle import merkle_root


class MemoryLog:
    """A transaction log that forgets when the test ends."""

    def __init__(self) -> None:
        self.transactions: dict[str, SignedTransaction] = {}

    def pending(self):
        return list(self.transactions.values())

    def commit(self, transaction):
        self.transactions[transaction.hash] = transaction

    def settle(self, hash, outcome):
        del self.transactions[hash]


def staged_file(folder: Path, data: bytes) -> Path:
    path = folder / "staged.caf"
    path.write_bytes(data)
    return path


def to_store(store, path: Path) -> ChunkToStore:
    root = merkle_root(path, store.proof_type)
    return ChunkToStore("src-00000000-00001", "0" * 32, True, path.stat().st_size, store.proof_type, root)


def stored(store, path: Path) -> Posting:
    posting = store.post(to_store(store, path), MemoryLog())
    store.put(posting, path, lambda _: None)
    return posting


class ChunkStoreContract:
    """The contract: see `interfaces.ChunkStore`."""

    def test_what_was_put_reads_back_in_any_range(self, store, tmp_path):
        data = os.urandom(3 << 20)
        posting = stored(store, staged_file(tmp_path, data))
        for start, end in [(0, len(data)), (0, 1), (5, 2_000_000), (len(data) - 1, len(data)), (7, 7)]:
            assert b"".join(store.read(posting, start, end)) == data[start:end]

    def test_pieces_are_at_most_one_mebibyte(self, store, tmp_path):
        posting = stored(store, staged_file(tmp_path, os.urandom(3 << 20)))
        assert max(len(piece) for piece in store.read(posting, 0, 3 << 20)) <= 1 << 20

    def test_an_uploaded_chunk_has_the_required_copies_and_each_reads_the_same(self, store, tmp_path):
        data = os.urandom(100_000)
        posting = stored(store, staged_file(tmp_path, data))
        copies = store.copies(posting)
        assert len(copies) >= store.required_copies
        for copy in copies:
            read = b"".join(store.read(posting, 0, len(data), provider=copy.provider))
            assert hashlib.sha256(read).digest() == hashlib.sha256(data).digest()

    def test_a_posted_chunk_that_was_not_uploaded_has_no_copy(self, store, tmp_path):
        posting = store.post(to_store(store, staged_file(tmp_path, b"x" * 1000)), MemoryLog())
        assert list(store.copies(posting)) == []

    def test_posting_the_same_root_again_gives_the_same_posting(self, store, tmp_path):
        chunk = to_store(store, staged_file(tmp_path, b"y" * 1000))
        assert store.post(chunk, MemoryLog()) == store.post(chunk, MemoryLog())

    def test_uploading_again_changes_nothing(self, store, tmp_path):
        path = staged_file(tmp_path, b"z" * 1000)
        posting = stored(store, path)
        store.put(posting, path, lambda _: None)
        assert len(store.copies(posting)) >= store.required_copies

    def test_progress_adds_up_to_the_chunk(self, store, tmp_path):
        path = staged_file(tmp_path, os.urandom(2_500_000))
        told = []
        store.put(store.post(to_store(store, path), MemoryLog()), path, told.append)
        assert sum(told) == 2_500_000

    def test_an_unknown_chunk_is_missing(self, store):
        unknown = Posting(b"\1" * 32, "nobody", 1, 10)
        assert list(store.copies(unknown)) == []
        with pytest.raises(StoredChunkMissing):
            list(store.read(unknown, 0, 10))

    def test_a_read_past_the_end_is_an_error_and_not_a_short_answer(self, store, tmp_path):
        posting = stored(store, staged_file(tmp_path, b"w" * 1000))
        with pytest.raises(IntegrityError):
            list(store.read(posting, 0, 1001))

    def test_the_cost_counts_every_byte(self, store):
        assert store.cost(1000).charged_bytes >= 1000
