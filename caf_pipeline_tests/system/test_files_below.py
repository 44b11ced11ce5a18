"""Files below a folder: what appears or is there already, what may not be written, and names that
are one file.
"""

import errno
import os

import pytest

from caf_pipeline.errors import StagingError
from caf_pipeline.system import files_below
from caf_pipeline.system.atomic_files import WRITE_BYTES
from caf_pipeline.system.files_below import FilesBelow, NameRefused, NotRestored
from caf_pipeline.system.small_files import write_files_reference
from caf_pipeline_tests.support.disks import files_of_at_most
from caf_pipeline_tests.support.ordinary_user import ordinary_user


def test_unwritable_folder_fails_before_anything_is_read(tmp_path):
    tmp_path.chmod(0o555)
    denied = pytest.raises(StagingError, match="Permission denied")
    with FilesBelow(tmp_path, force=True) as files, ordinary_user(), denied:
        files.own()
    assert not list(tmp_path.iterdir())


def test_unreadable_file_is_not_a_refused_name(tmp_path):
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
def test_file_that_appears_meanwhile_is_not_replaced(tmp_path, monkeypatch, links):
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
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "name": b"mine",
        "other": b"archived",
    }
    assert os.stat(tmp_path / "other").st_nlink == 1


def test_a_filled_file_gets_its_name_on_another_disk_too(tmp_path, small_disk):
    with FilesBelow(tmp_path, force=False) as files:
        for names in ([b"here"], [small_disk.name.encode(), b"folder", b"there"]):
            with files.begin() as unfinished:
                unfinished.fill(lambda file: file.write(b"archived" * 100_000))
                files.finish(unfinished, "key", names, 10**18)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(path.name for path in found) == ["here", "there"]
    assert {(path.read_bytes(), path.stat().st_mtime_ns) for path in found} == {
        (b"archived" * 100_000, 10**18)
    }


def written(folder, members, *, force=False):
    """Write members; return what is told of each, and how many bytes were counted."""
    counted = []
    with FilesBelow(folder, force=force) as files:
        told = {key: str(refused or "") for key, refused in files.write(members, counted.append)}
    return told, sum(counted)


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if not path.is_dir()
    }


MEMBERS = {
    f"{folder}{number}": os.urandom(number * 97)
    for folder in ("", "a/", "a/b/", "c/")
    for number in range(30)
}
MEMBERS["a/large"] = os.urandom(300_000)
MEMBERS["z"] = b"last"


def bodies(members, large=WRITE_BYTES):
    """Small ones whole, larger ones as they come, as a reader gives them."""
    for key, body in members.items():
        yield key, (body,) if len(body) <= large else iter([body[:1000], body[1000:]])


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("way", ["at once", "in Python", "without links"])
def test_members_are_written_and_failed_members_are_reported(tmp_path, monkeypatch, way, force):
    def no_link(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if way != "at once":
        monkeypatch.setattr(files_below, "write_files", write_files_reference)
    if way == "without links":
        monkeypatch.setattr(os, "link", no_link)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "7").write_bytes(b"mine")
    (tmp_path / "c").symlink_to(tmp_path / "a")
    (tmp_path / "3").mkdir()
    members = MEMBERS | {"a/../x": b"x", "a//x": b"x"}

    told, counted = written(tmp_path, bodies(members), force=force)

    refused = {
        key
        for key in members
        if key.startswith("c/") or key in ("3", "a/../x", "a//x") or (key == "a/7" and not force)
    }
    assert {key for key, why in told.items() if why} == refused
    assert list(told) == list(members)
    assert ("exists" in told["a/7"]) is not force
    assert "folder" in told["3"]
    assert "is not a folder" in told["c/1"]
    expected = {key: body for key, body in members.items() if key not in refused}
    found = tree(tmp_path)
    found.pop("c", None)
    assert found == ({} if force else {"a/7": b"mine"}) | expected
    assert counted == sum(map(len, expected.values()))


def test_full_disk_stops_and_leaves_only_complete_files(small_disk):
    members = {f"{number}": os.urandom(16_384) for number in range(1 << 10)}
    with pytest.raises(StagingError, match="No space left"):
        written(small_disk, bodies(members))
    found = tree(small_disk)
    assert found
    assert found.items() < members.items()


def test_members_above_a_quota_are_reported_one_by_one(tmp_path):
    members = {f"{number}": bytes(8192 if number % 3 else 4096) for number in range(40)}
    with files_of_at_most(4096):
        told, _ = written(tmp_path, bodies(members))
    assert {key for key, why in told.items() if "File too large" in why} == {
        key for key, body in members.items() if len(body) > 4096
    }
    assert tree(tmp_path) == {key: body for key, body in members.items() if len(body) == 4096}


def test_next_member_is_requested_after_the_previous_is_exhausted(tmp_path):
    taken = []

    def streamed(name):
        yield b"1"
        taken.append(name)

    def asked():
        for number in range(5):
            assert taken == [f"s{before}" for before in range(number)]
            yield f"t{number}", (b"small",)
            yield f"s{number}", streamed(f"s{number}")

    assert set(written(tmp_path, asked())[0].values()) == {""}


def test_each_folder_is_searched_once_for_leftovers(tmp_path, monkeypatch):
    inner = tmp_path / "folder" / "inner"
    inner.mkdir(parents=True)
    left = [folder / ".caf-0123456789abcdef.partial" for folder in (tmp_path, inner.parent, inner)]
    for path in left:
        path.write_bytes(b"half")
    looked, listdir = [], os.listdir
    monkeypatch.setattr(
        files_below.os,
        "listdir",
        lambda folder: looked.append(os.fstat(folder).st_ino) or listdir(folder),
    )
    with FilesBelow(tmp_path, force=False) as files:
        files.own()
        for number in range(3):
            for names in ([b"folder", b"%d" % number], [b"folder", b"inner", b"%d" % number]):
                files.fill(names[-1].decode(), names, lambda file: file.write(b"whole"))
    assert not any(path.exists() for path in left)
    assert sorted(looked) == sorted(
        folder.stat().st_ino for folder in (tmp_path, inner.parent, inner)
    )


def test_own_unfinished_files_in_the_root_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(files_below, "_SWEPT_KEPT", 2)
    with FilesBelow(tmp_path, force=False) as files:
        files.own()
        files.fill("first", [b"first"], lambda file: file.write(b"whole"))
        begun = tmp_path / ".caf-0123456789abcdef.partial"
        begun.write_bytes(b"half")  # as of a large object that is filled before its turn
        for names in (*([b"%d" % number, b"f"] for number in range(9)), [b"last"]):
            files.fill(names[-1].decode(), names, lambda file: file.write(b"whole"))
    assert begun.read_bytes() == b"half"
