"""One object back: compared before a byte is handed out, from the next holder where one is wrong or away."""

import hashlib
import os

import pytest

from caf_pipeline.errors import IntegrityError, NotLocated, StoredChunkMissing, StoreUnreachable, UsageError
from caf_pipeline.ledger.records import Location, LocationRow
from caf_pipeline.retrieval import reader
from caf_pipeline.retrieval.reader import Found, save
from caf_pipeline.store.protocol import Posting
from caf_pipeline_tests.contracts.chunk_store import MemoryLog, corrupt, staged_file, to_store
from caf_pipeline_tests.support.plans import MOMENT
from caf_pipeline_tests.support.several_folders import SeveralFolders
from caf_pipeline_tests.support.workplaces import a_workplace, archive_everything

CHUNK = os.urandom(3 << 20)


@pytest.fixture
def store(tmp_path):
    return SeveralFolders(tmp_path / "store")


@pytest.fixture
def posting(store, tmp_path) -> Posting:
    path = staged_file(tmp_path, CHUNK)
    posting = store.post(to_store(store, path), MemoryLog())
    store.put(posting, path, lambda _: None)
    return posting


def found(store, posting, start=1000, end=2_000_000, *, sha256=None):
    sha256 = sha256 or hashlib.sha256(CHUNK[start:end]).digest()
    row = LocationRow("a/key", "v1", "v1", start, end, "etag", MOMENT, sha256)
    return Found(Location(row, "src-1-1", posting), store)


def test_an_object_comes_back_in_pieces_of_at_most_a_mebibyte(store, posting):
    pieces = list(found(store, posting).pieces)
    assert b"".join(pieces) == CHUNK[1000:2_000_000]
    assert max(map(len, pieces)) <= 1 << 20


def test_the_next_holder_is_asked_where_one_gives_wrong_bytes(store, posting):
    corrupt(store.file("anna", posting), at=1500)
    assert b"".join(found(store, posting).pieces) == CHUNK[1000:2_000_000]


def test_the_next_holder_is_asked_where_one_is_away_or_gives_too_little(store, posting):
    store.away = {"anna"}
    store.file("bert", posting).write_bytes(CHUNK[:5000])
    assert b"".join(found(store, posting).pieces) == CHUNK[1000:2_000_000]


def test_no_byte_of_an_object_is_handed_out_where_its_last_one_is_wrong(store, posting):
    for provider in store.folders:
        corrupt(store.file(provider, posting), at=1_999_999)
    with pytest.raises(IntegrityError, match=r"anna: .*bert: .*carl: "):
        next(found(store, posting).pieces)


def test_nothing_is_left_of_an_object_that_nobody_gives_right(store, posting, tmp_path):
    for provider in store.folders:
        corrupt(store.file(provider, posting), at=1_999_999)
    (folder := tmp_path / "out").mkdir()
    with pytest.raises(IntegrityError):
        save(found(store, posting), folder / "file")
    assert list(folder.iterdir()) == []


def test_a_holder_that_is_away_may_still_have_it_right(store, posting):
    store.away = {"anna"}
    for provider in ("bert", "carl"):
        corrupt(store.file(provider, posting), at=1500)
    with pytest.raises(StoreUnreachable, match="anna is away"):
        next(found(store, posting).pieces)


def test_a_chunk_that_nobody_holds_is_missing(store, posting):
    store.forget(posting)
    with pytest.raises(StoredChunkMissing):
        next(found(store, posting).pieces)


def test_a_file_is_saved_from_the_next_holder_and_holds_nothing_of_the_first(store, posting, tmp_path):
    corrupt(store.file("anna", posting), at=1_500_000)
    save(found(store, posting), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == CHUNK[1000:2_000_000]


def test_an_empty_object_needs_no_holder(store, posting):
    store.forget(posting)
    assert list(found(store, posting, 5, 5).pieces) == []


def test_an_empty_object_of_which_the_row_says_otherwise_is_refused(store, posting):
    with pytest.raises(IntegrityError):
        list(found(store, posting, 5, 5, sha256=b"\0" * 32).pieces)


def test_an_object_larger_than_memory_allows_is_compared_on_disk(store, posting, monkeypatch):
    monkeypatch.setattr(reader, "IN_MEMORY_BYTES", 64 << 10)
    assert b"".join(found(store, posting, 0, len(CHUNK)).pieces) == CHUNK


def test_a_disk_without_room_for_the_comparison_is_one_sentence(store, posting, small_disk, monkeypatch):
    monkeypatch.setattr(reader, "IN_MEMORY_BYTES", 64 << 10)
    one = Found(found(store, posting, 0, len(CHUNK)).location, store, small_disk)
    with pytest.raises(UsageError, match="No space left"):
        next(one.pieces)


def test_what_is_not_archived_is_not_located(tmp_path, ledger):
    from caf_pipeline_tests.support.memory_source import MemorySource

    work = a_workplace(tmp_path, MemorySource({"a": b"a"}), ledger)
    archive_everything(work)
    with pytest.raises(NotLocated):
        reader.fetch(ledger, work.store, "src", "b")
