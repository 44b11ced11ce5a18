"""The store in a folder."""

import contextlib
import os
from pathlib import Path

import pytest

from caf_pipeline.errors import StoreError, StoreUnreachable
from caf_pipeline.store.directory import DirectoryStore
from caf_pipeline_tests.contracts.chunk_store import ChunkStoreContract, MemoryLog, staged_file, stored, to_store
from caf_pipeline_tests.system.test_files_below import ordinary_user


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "store")


class TestDirectoryStore(ChunkStoreContract):
    """Passes the contract."""


def test_an_upload_that_breaks_leaves_no_copy(store, tmp_path):
    path = staged_file(tmp_path, os.urandom(3 << 20))
    posting = store.post(to_store(store, path), MemoryLog())

    def break_off(sent):
        raise ConnectionError("the cable")

    with pytest.raises(StoreError):
        store.put(posting, path, break_off)
    assert list(store.copies(posting)) == []
    assert [name for name in os.listdir(store.folder / "chunks")] == []


def test_a_copy_of_another_length_is_no_copy(store, tmp_path):
    posting = stored(store, staged_file(tmp_path, b"x" * 1000))
    (file,) = (store.folder / "chunks").iterdir()
    file.write_bytes(b"x" * 999)
    assert list(store.copies(posting)) == []


def test_a_copy_that_this_user_may_not_read_is_not_lost(tmp_path):
    tmp_path.chmod(0o755)
    with contextlib.chdir(tmp_path):  # what is above it may not be searched
        store = DirectoryStore(Path("store"))
        posting = stored(store, staged_file(tmp_path, b"x" * 1000))
        (file,) = Path("store/chunks").iterdir()
        for path, ask in ((file, lambda: list(store.read(posting, 0, 1))), (file.parent, lambda: store.copies(posting))):
            mode = path.stat().st_mode
            path.chmod(0)
            with ordinary_user(), pytest.raises(StoreUnreachable, match="cannot be read: Permission denied") as refused:
                ask()
            path.chmod(mode)
            assert "this user may read it" in refused.value.hint


def test_a_staged_file_that_is_gone_is_said_to_be_gone(store, tmp_path):
    posting = store.post(to_store(store, staged_file(tmp_path, b"x")), MemoryLog())
    with pytest.raises(StoreError, match="is gone"):
        store.put(posting, tmp_path / "nowhere", lambda _: None)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    Path(tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be made"):
        DirectoryStore(tmp_path / "file" / "store")


@pytest.mark.parametrize("mounted", [False, True])
def test_a_folder_that_has_nothing_of_what_was_stored_is_not_made_anew(tmp_path, mounted):
    folder = tmp_path / "store"
    if mounted:
        folder.mkdir()
    with pytest.raises(StoreError, match="has nothing of the chunks that were stored") as refused:
        DirectoryStore(folder, is_used=lambda: True)
    assert "is mounted" in refused.value.hint
    assert list(tmp_path.rglob("*")) == [folder][: int(mounted)]


def test_a_folder_with_posts_is_used_without_asking(tmp_path):
    DirectoryStore(tmp_path / "store")
    DirectoryStore(tmp_path / "store", is_used=lambda: pytest.fail("it was asked"))


def test_a_chunk_that_the_disk_has_no_room_for_is_refused_with_the_numbers(small_disk):
    store = DirectoryStore(small_disk / "store")
    with pytest.raises(StoreError, match=r"too little for a chunk of 1\.9 MiB beside 5 B"):
        store.admit(public=False, stored_size_bytes=2_000_000, waiting_bytes=5)


def test_a_copy_of_other_bytes_is_replaced(store, tmp_path):
    path = staged_file(tmp_path, b"x" * 1000)
    posting = stored(store, path)
    (file,) = (store.folder / "chunks").iterdir()
    file.write_bytes(b"y" * 1000)
    store.put(posting, path, lambda _: None)
    assert file.read_bytes() == b"x" * 1000
