"""Files with a secret."""

import pytest

from caf_pipeline.errors import KeyRefused
from caf_pipeline.system.secret_files import read_secret, write_secret


def test_a_secret_is_written_for_its_owner_alone(tmp_path):
    write_secret(tmp_path / "key", b"x")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert read_secret(tmp_path / "key", KeyRefused, hint="") == b"x"


@pytest.mark.parametrize("target", ["file", "nowhere"])
def test_neither_files_nor_links_are_overwritten(tmp_path, target):
    (tmp_path / "file").write_bytes(b"kept")
    (tmp_path / "link").symlink_to(target)
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            write_secret(tmp_path / name, b"x")
    assert (tmp_path / "file").read_bytes() == b"kept"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_that_others_can_access_is_refused(tmp_path, mode):
    write_secret(tmp_path / "key", b"x")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(KeyRefused) as refused:
        read_secret(tmp_path / "key", KeyRefused, hint="")
    assert "chmod 600" in refused.value.hint


def test_a_missing_secret_names_its_file_and_hint(tmp_path):
    with pytest.raises(KeyRefused, match="none") as refused:
        read_secret(tmp_path / "none", KeyRefused, hint="set it")
    assert refused.value.hint == "set it"


def test_failed_write_leaves_no_file(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_secret(tmp_path / "key", b"x")
    assert list(tmp_path.iterdir()) == []
