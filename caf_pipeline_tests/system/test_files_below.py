"""Files below a folder: what appears or is there already, what may not be written, and names that are one file."""

import errno
import os

import pytest

from caf_pipeline.system import files_below
from caf_pipeline.system.files_below import FilesBelow, NotRestored


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
