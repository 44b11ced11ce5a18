"""Files below a folder: what appears or is there already, what may not be written, and names that are one file."""

import contextlib
import errno
import os

import pytest

from caf_pipeline.errors import StagingError
from caf_pipeline.system import files_below
from caf_pipeline.system.files_below import FilesBelow, NameRefused, NotRestored


@contextlib.contextmanager
def ordinary_user():
    """Have no more rights than the files' modes give."""
    own = os.geteuid()
    os.seteuid(own or 65534)
    try:
        yield
    finally:
        os.seteuid(own)


def test_a_folder_that_may_not_be_written_is_told_before_anything_is_read(tmp_path):
    tmp_path.chmod(0o555)
    denied = pytest.raises(StagingError, match=r"cannot be written to: Permission denied\.")
    with FilesBelow(tmp_path, force=True) as files, ordinary_user(), denied:
        files.own()
    assert not list(tmp_path.iterdir())


def test_what_may_not_be_read_is_no_reason_to_try_another_name(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "mine").write_bytes(b"1")
    (tmp_path / "mine").chmod(0)
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "folder").mkdir()
    with FilesBelow(tmp_path, force=True) as files, ordinary_user():
        with pytest.raises(NotRestored, match="Permission denied") as refused:
            files.open("mine", [b"mine"])
        assert not isinstance(refused.value, NameRefused)
        for names in ([b"folder"], [b"n" * 300], [b"a", b"b"]):
            with pytest.raises(NameRefused):
                files.open("key", names)


@pytest.mark.parametrize("links", [True, False], ids=["with links", "without links"])
def test_a_file_that_appears_while_another_is_filled_is_not_replaced(tmp_path, monkeypatch, links):
    def no_link(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(files_below.os, "link", no_link)

    def fill(file):
        file.write(b"archived")
        (tmp_path / "name").write_bytes(b"mine")

    with FilesBelow(tmp_path, force=False) as files:
        with pytest.raises(NotRestored, match="exists already"):
            files.fill("name", [b"name"], fill)
        files.fill("other", [b"other"], lambda file: file.write(b"archived"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"name": b"mine", "other": b"archived"}
    assert os.stat(tmp_path / "other").st_nlink == 1


def test_a_filled_file_gets_its_name_on_another_disk_too(tmp_path, small_disk):
    with FilesBelow(tmp_path, force=False) as files:
        for names in ([b"here"], [small_disk.name.encode(), b"folder", b"there"]):
            with files.begin() as unfinished:
                unfinished.fill(lambda file: file.write(b"archived" * 100_000))
                files.finish(unfinished, "key", names, 10**18)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(path.name for path in found) == ["here", "there"]
    assert {(path.read_bytes(), path.stat().st_mtime_ns) for path in found} == {(b"archived" * 100_000, 10**18)}
