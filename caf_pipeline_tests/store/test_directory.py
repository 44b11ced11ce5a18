"""The store in a folder."""

import contextlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from caf_pipeline.errors import StoreAway, StoreError, StoreUnreachable
from caf_pipeline.store.directory import MARKER, DirectoryReader, DirectoryStore
from caf_pipeline_tests.contracts.chunk_store import (
    ChunkReaderContract,
    ChunkStoreContract,
    staged_file,
    stored,
    to_store,
)
from caf_pipeline_tests.support.memory_log import MemoryLog
from caf_pipeline_tests.support.ordinary_user import ordinary_user


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "store")


class TestDirectoryStore(ChunkStoreContract):
    """Passes the contract."""


class TestDirectoryReader(ChunkReaderContract):
    """Passes the contract of readers."""

    @pytest.fixture
    def reader(self, store):
        return DirectoryReader(store.folder)


def test_an_upload_that_breaks_leaves_no_copy(store, tmp_path):
    path = staged_file(tmp_path, os.urandom(3 << 20))
    posting = store.post(to_store(store, path), MemoryLog())

    def break_off(sent):
        raise ConnectionError("the cable")

    with pytest.raises(StoreError):
        store.put(posting, path, break_off)
    assert list(store.copies(posting)) == []
    assert [name for name in os.listdir(store.folder / "chunks")] == []


def test_copy_of_another_length_does_not_count(store, tmp_path):
    posting = stored(store, staged_file(tmp_path, b"x" * 1000))
    (file,) = (store.folder / "chunks").iterdir()
    file.write_bytes(b"x" * 999)
    assert list(store.copies(posting)) == []


def test_unreadable_copy_is_not_reported_lost(tmp_path):
    tmp_path.chmod(0o755)
    with contextlib.chdir(tmp_path):  # its parents may not be searchable
        store = DirectoryStore(Path("store"))
        posting = stored(store, staged_file(tmp_path, b"x" * 1000))
        (file,) = Path("store/chunks").iterdir()
        for path, ask in (
            (file, lambda: list(store.read(posting, 0, 1))),
            (file.parent, lambda: store.copies(posting)),
        ):
            mode = path.stat().st_mode
            path.chmod(0)
            with (
                ordinary_user(),
                pytest.raises(StoreUnreachable, match="Permission denied") as refused,
            ):
                ask()
            path.chmod(mode)
            assert refused.value.hint


def test_missing_staged_file_is_reported(store, tmp_path):
    posting = store.post(to_store(store, staged_file(tmp_path, b"x")), MemoryLog())
    with pytest.raises(StoreError, match="nowhere"):
        store.put(posting, tmp_path / "nowhere", lambda _: None)


def test_folder_that_cannot_be_created_raises(tmp_path):
    Path(tmp_path / "file").write_text("in the way")
    store = DirectoryStore(tmp_path / "file" / "store")
    with pytest.raises(StoreError, match="file/store"):
        store.admit(stored_size_bytes=1, waiting_bytes=0)
    with pytest.raises(StoreError, match="file/store"):
        store.post(to_store(store, staged_file(tmp_path, b"x")), MemoryLog())


# --- the folder's id ---


class FolderMemory:
    """A ledger's memory of the folder."""

    def __init__(self) -> None:
        self.folder_id = None

    def folder_store(self):
        return self.folder_id

    def mark_folder_store(self, folder_id):
        self.folder_id = self.folder_id or folder_id
        return self.folder_id


@pytest.fixture
def kept(tmp_path):
    """A store with a chunk, its ledger's memory, and the chunk's posting."""
    ledger = FolderMemory()
    store = DirectoryStore(tmp_path / "store", ledger)
    posting = stored(store, staged_file(tmp_path, b"x" * 1000))
    return store, ledger, posting


def questions(store, posting, staged):
    return (
        lambda: store.copies(posting),
        lambda: store.holders(posting),
        lambda: list(store.read(posting, 0, 1)),
        lambda: list(store.posted("0" * 32)),
        store.archives,
        store.half_copies,
        lambda: store.admit(stored_size_bytes=1, waiting_bytes=0),
        lambda: store.post(to_store(store, staged), MemoryLog()),
        lambda: store.posted_already(to_store(store, staged), MemoryLog()),
        lambda: store.put(posting, staged, lambda _: None),
        store.bind,
    )


def test_first_post_writes_the_id_into_folder_and_ledger(tmp_path):
    ledger = FolderMemory()
    store = DirectoryStore(tmp_path / "store", ledger)
    store.admit(stored_size_bytes=1, waiting_bytes=0)
    assert list(store.archives()) == []
    assert not store.folder.exists()
    assert ledger.folder_id is None
    store.post(to_store(store, staged_file(tmp_path, b"x")), MemoryLog())
    assert (store.folder / MARKER).read_text() == f"{ledger.folder_id}\n"


@pytest.mark.parametrize("place", ["missing", "empty", "another store"])
@pytest.mark.parametrize("opened", ["before", "after"])
def test_without_its_marker_the_store_is_away(kept, tmp_path, place, opened):
    store, ledger, posting = kept
    store.folder.rename(tmp_path / "disk")
    if place != "missing":
        store.folder.mkdir()
    if place == "another store":
        (store.folder / MARKER).write_text("0" * 32)
    if opened == "after":
        store = DirectoryStore(store.folder, ledger)
    before = sorted(tmp_path.rglob("*"))
    for ask in questions(store, posting, tmp_path / "staged.caf"):
        with pytest.raises(StoreAway) as away:
            ask()
        assert (away.value.exit_code, away.value.permanent) == (7, False)
        assert ledger.folder_id in away.value.hint
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_comes_back_is_the_store_again(kept, tmp_path):
    store, _, posting = kept
    store.folder.rename(tmp_path / "disk")
    with pytest.raises(StoreAway):
        store.copies(posting)
    (tmp_path / "disk").rename(store.folder)
    assert len(store.copies(posting)) == 1


def test_a_disk_that_goes_during_an_upload_gets_nothing(kept, tmp_path):
    store, _, _ = kept
    path = staged_file(tmp_path, os.urandom(3 << 20))
    posting = store.post(to_store(store, path), MemoryLog())

    def unmount(sent):
        if not (tmp_path / "disk").exists():
            store.folder.rename(tmp_path / "disk")
            store.folder.mkdir()

    with pytest.raises(StoreAway):
        store.put(posting, path, unmount)
    assert list(store.folder.iterdir()) == []


def test_the_hint_makes_an_empty_folder_the_store(kept, tmp_path):
    store, ledger, posting = kept
    store.folder.rename(tmp_path / "lost")
    with pytest.raises(StoreAway) as away:
        store.copies(posting)
    subprocess.run(away.value.hint.partition(": ")[2], shell=True, check=True)
    again = DirectoryStore(store.folder, ledger)
    assert list(again.copies(posting)) == []
    assert stored(again, tmp_path / "staged.caf") == posting


def test_two_homes_share_the_id_of_one_folder(kept, tmp_path):
    store, ledger, posting = kept
    other = FolderMemory()
    second = DirectoryStore(store.folder, other)
    assert len(second.copies(posting)) == 1
    assert other.folder_id is None  # reading decides nothing
    second.post(to_store(second, staged_file(tmp_path, b"y")), MemoryLog())
    assert other.folder_id == ledger.folder_id


@pytest.mark.parametrize("links", [True, False])
def test_first_posts_side_by_side_write_one_id(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(
            os, "link", lambda *_: (_ for _ in ()).throw(PermissionError("no hard links"))
        )
    ledgers = [FolderMemory() for _ in range(8)]
    stores = [DirectoryStore(tmp_path / "store", ledger) for ledger in ledgers]

    def bind(store):
        while True:
            with contextlib.suppress(
                StoreAway
            ):  # while another process writes the marker without links
                store.bind()
                return

    with ThreadPoolExecutor() as pool:
        list(pool.map(bind, stores))
    assert {ledger.folder_id for ledger in ledgers} == {
        (tmp_path / "store" / MARKER).read_text().strip()
    }
    assert [path.name for path in (tmp_path / "store").iterdir()] == [MARKER]


def test_a_marker_without_an_id_is_away(kept):
    store, _, posting = kept
    (store.folder / MARKER).write_bytes(b"\xff" * 5000)
    with pytest.raises(StoreAway, match=MARKER):
        store.copies(posting)


def test_unreadable_marker_is_not_judged(kept, tmp_path):
    store, _, posting = kept
    tmp_path.chmod(0o755)
    store.folder.chmod(0)
    try:
        with (
            contextlib.chdir(tmp_path),
            ordinary_user(),
            pytest.raises(StoreUnreachable, match="cannot be read"),
        ):
            DirectoryStore(Path("store")).copies(posting)
    finally:
        store.folder.chmod(0o755)


def test_chunk_too_large_for_the_disk_is_refused_with_sizes(small_disk):
    store = DirectoryStore(small_disk / "store")
    with pytest.raises(StoreError, match=r"1\.9 MiB and 5 B"):
        store.admit(stored_size_bytes=2_000_000, waiting_bytes=5)


def test_a_copy_of_other_bytes_is_replaced(store, tmp_path):
    path = staged_file(tmp_path, b"x" * 1000)
    posting = stored(store, path)
    (file,) = (store.folder / "chunks").iterdir()
    file.write_bytes(b"y" * 1000)
    store.put(posting, path, lambda _: None)
    assert file.read_bytes() == b"x" * 1000
