"""Small disks for tests of full ones: real file systems, mounted where the machine lets us."""

import subprocess

import pytest

SMALL_DISK_BYTES = 1 << 20


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "small-disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root on Linux")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
