"""Small real file systems for tests of full disks, if the machine can mount them."""

import os
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SMALL_DISK_BYTES = 1 << 20
_FILLER = "filler"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "small-disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root on Linux")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@dataclass(frozen=True)
class Disk:
    """A file system that can be filled and made read-only. Tests use a folder beside the filler."""

    folder: Path

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def fill(self, *, leave_bytes: int = 0) -> None:
        """Use all space but so many bytes, in whole pages."""
        self.make_room()
        taken = self.free_bytes - leave_bytes
        if taken > 0:
            with (self.folder / _FILLER).open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, taken)

    def make_room(self) -> None:
        (self.folder / _FILLER).unlink(missing_ok=True)

    def read_only(self) -> None:
        """Deny all writes, even to root; no file may be open for writing."""
        subprocess.run(["mount", "-o", "remount,ro", str(self.folder)], check=True)

    def writable(self) -> None:
        subprocess.run(["mount", "-o", "remount,rw", str(self.folder)], check=True)


@contextmanager
def a_disk(size_bytes: int) -> Iterator[Disk]:
    """Mount a file system in memory, or skip the test.

    It is outside of pytest's folders: a killed session leaves a mount, which pytest could not
    remove.
    """
    folder = Path(tempfile.mkdtemp(prefix="caf-disk-"))
    folder.chmod(0o755)  # Postgres has a user of its own
    options = f"size={size_bytes},mode=755"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        folder.rmdir()
        pytest.skip("mounting a small file system needs root on Linux")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


@pytest.fixture
def new_disk() -> Iterator[Callable[[int], Disk]]:
    with ExitStack() as stack:
        yield lambda size_bytes: stack.enter_context(a_disk(size_bytes))


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Limit the size of this process's files, as a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
