"""A file that is whole or not there."""

import errno
import fcntl
import gc
import io
import mmap
import os
import random
import resource
import stat
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caf_pipeline.system import atomic_files
from caf_pipeline.system.atomic_files import (
    BEGIN_BYTES,
    BLOCK_BYTES,
    WRITE_BYTES,
    DirectFile,
    WholeFile,
    give_rights,
)


def test_complete_file_replaces_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with WholeFile(path) as whole:
        whole.file.write(b"after")
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"after"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o666, 0o7755])
def test_replacement_never_has_wider_permissions(tmp_path, mode):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    path.chmod(mode)
    with WholeFile(path) as whole:
        assert stat.S_IMODE(whole.temporary.stat().st_mode) == 0o600
        whole.file.write(b"after")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"after", mode & 0o777)


def test_replacement_in_another_group_has_no_group_permissions(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chown", refused)
    (new := tmp_path / "new").touch()
    status = new.stat()
    for mode, left in ((0o640, 0o600), (0o664, 0o644), (0o644, 0o644), (0o751, 0o711)):
        give_rights(os.stat_result((mode, *status[1:5], status.st_gid + 1, *status[6:])), str(new))
        assert stat.S_IMODE(new.stat().st_mode) == left


def write_half(path):
    with WholeFile(path) as whole:
        whole.file.write(b"after")
        raise KeyboardInterrupt


def test_error_leaves_the_old_file_and_no_temporary_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        write_half(path)
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["file"]


def test_read_only_file_system_raises_only_its_error(tmp_path, monkeypatch):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    monkeypatch.setattr(atomic_files, "PiecewiseFile", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(OSError, match="Read-only"):
        WholeFile(tmp_path / "file")
    gc.collect()
    assert said == []


def test_a_name_that_cannot_be_given_leaves_nothing(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="directory"), WholeFile(tmp_path / "file"):
        pass
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_writer_that_is_let_go_of_leaves_nothing(tmp_path):
    whole = WholeFile(tmp_path / "file")
    del whole
    gc.collect()
    assert not os.listdir(tmp_path)


def test_a_sealed_file_has_no_name_until_it_is_published(tmp_path):
    whole = WholeFile(tmp_path / "file", tmp_path / "part")
    whole.file.write(b"bytes")
    whole.seal()
    assert (os.listdir(tmp_path), (tmp_path / "part").read_bytes()) == (["part"], b"bytes")
    whole.publish()
    assert (tmp_path / "file").read_bytes() == b"bytes"
    whole.abort()
    assert os.listdir(tmp_path) == ["file"]


def test_what_is_written_in_large_pieces_is_all_there(tmp_path):
    pieces = [
        os.urandom(size) for size in (1, 3 * WRITE_BYTES + 5, WRITE_BYTES - 1, WRITE_BYTES, 0, 7)
    ]
    with WholeFile(tmp_path / "file") as whole:
        for piece in pieces:
            assert whole.file.write(piece) == len(piece)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system cannot be told")
def test_large_file_starts_to_reach_the_disk_early(tmp_path, monkeypatch):
    told = []
    advise = os.posix_fadvise
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _, *given: (told.append(given[:2]), advise(_, *given))
    )
    monkeypatch.setattr(atomic_files, "BEGIN_BYTES", 2 * WRITE_BYTES)
    body = os.urandom(5 * WRITE_BYTES + 1)
    with WholeFile(tmp_path / "file") as whole:
        whole.file.write(body[:100])
        whole.file.write(body[100:])
    assert (tmp_path / "file").read_bytes() == body
    assert [start for start, _ in told] == [0, told[0][1]]
    assert sum(size for _, size in told) >= 4 * WRITE_BYTES


def test_what_is_no_regular_file_is_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(OSError, match="regular file"):
            WholeFile(path, tmp_path / "temporary")
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("durable", [True, False])
def test_only_durable_files_wait_for_the_disk(durable, tmp_path, monkeypatch):
    moments = []
    monkeypatch.setattr(
        os,
        "fsync",
        lambda descriptor: moments.append(
            os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        ),
    )
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: (moments.append("named"), replace(*names)))
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: moments.append("begun"), raising=False)

    with WholeFile(tmp_path / "file", tmp_path / "temporary", durable=durable) as whole:
        whole.file.write(bytes(BEGIN_BYTES))

    assert moments == (["begun", "temporary", "named", tmp_path.name] if durable else ["named"])
    assert (tmp_path / "file").read_bytes() == bytes(BEGIN_BYTES)
    assert os.listdir(tmp_path) == ["file"]


STEPS = st.tuples(
    st.sampled_from(["write", "write", "write", "seek", "truncate", "flush"]),
    st.integers(0, 3 * mmap.PAGESIZE),
)


@patch.object(atomic_files, "BLOCK_BYTES", mmap.PAGESIZE)
@given(steps=st.lists(STEPS, max_size=255))
def test_direct_file_equals_a_buffer_after_any_operations(steps):
    with tempfile.NamedTemporaryFile() as named:
        with DirectFile(Path(named.name), "w") as file, io.BytesIO() as expected:
            for number, (what, size) in enumerate(steps):
                length = len(
                    expected.getvalue()
                )  # what is in memory is not made longer by `truncate`
                said = {
                    "write": (bytes([number]) * size,),
                    "seek": (size,),
                    "truncate": (min(size, length),),
                    "flush": (),
                }
                for each in (file, expected):
                    getattr(each, what)(*said[what])
                assert file.tell() == expected.tell()
            content = expected.getvalue()
        assert Path(named.name).read_bytes() == content


@pytest.mark.parametrize("refused", [False, True])
def test_direct_file_bypasses_the_page_cache(tmp_path, monkeypatch, refused):
    asked = list[bool]()
    real = fcntl.fcntl

    def seen(file, what, flags=0):
        if what == fcntl.F_SETFL:
            asked.append(bool(flags & os.O_DIRECT))
            if refused and asked[-1]:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, what, flags)

    monkeypatch.setattr(fcntl, "fcntl", seen)
    content = random.Random(1).randbytes(2 * BLOCK_BYTES + 1)
    with WholeFile(tmp_path / "file", direct=True) as whole:
        for start in range(0, len(content), BLOCK_BYTES // 3):
            whole.file.write(content[start : start + BLOCK_BYTES // 3])
    assert (tmp_path / "file").read_bytes() == content
    assert asked == [True, False] * 2


def test_direct_file_on_a_full_disk_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES + 5, limits[1]))
    try:
        with (
            pytest.raises(OSError, match=os.strerror(errno.EFBIG)),
            WholeFile(tmp_path / "file", direct=True) as whole,
        ):
            whole.file.write(bytes(3 * BLOCK_BYTES))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []
