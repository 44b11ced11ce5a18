"""Small files read at once: the compiled way beside the one in Python."""

import hashlib
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.system.small_files import read_files, read_files_reference

SOME_BODIES = st.lists(st.binary(max_size=40), max_size=8)
READERS = pytest.mark.parametrize("read", [read_files, read_files_reference])


def columns(folder, bodies):
    """Write files with these bodies; return their paths, sizes and times."""
    paths = [str(folder / f"{number} ü") for number in range(len(bodies))]
    for path, body in zip(paths, bodies, strict=True):
        with open(path, "wb") as file:
            file.write(body)
    return paths, [len(body) for body in bodies], [os.stat(path).st_mtime_ns for path in paths]


@READERS
@settings(max_examples=60)
@given(bodies=SOME_BODIES, hashed=st.booleans())
def test_bodies_come_back_to_back_with_the_digest_of_each(tmp_path_factory, read, bodies, hashed):
    together = b"".join(bodies)
    buffer = bytearray(len(together) + 1)
    found = read(buffer, *columns(tmp_path_factory.mktemp("files"), bodies), hashed)
    assert found == (len(bodies), [hashlib.sha256(body).digest() for body in bodies] if hashed else [])
    assert buffer[:-1] == together


@READERS
@pytest.mark.parametrize("change", ["longer", "shorter", "touched", "gone", "folder", "pipe"])
def test_reading_ends_before_a_file_that_is_not_as_it_was_found(tmp_path, read, change):
    paths, sizes, modified_ns = columns(tmp_path, [b"one", b"two", b"three"])
    if change in ("longer", "shorter"):
        sizes[1] += 1 if change == "shorter" else -1
    elif change == "touched":
        modified_ns[1] -= 1
    else:
        os.unlink(paths[1])
        if change == "folder":
            os.mkdir(paths[1])
        elif change == "pipe":
            os.mkfifo(paths[1])
    buffer = bytearray(20)
    assert read(buffer, paths, sizes, modified_ns, True) == (1, [hashlib.sha256(b"one").digest()])
    assert buffer[:3] == b"one"
    assert read(buffer, paths[1:], sizes[1:], modified_ns[1:], True) == (0, [])


@READERS
@pytest.mark.parametrize(("room", "count"), [(0, 0), (3, 0), (4, 1), (6, 1), (7, 2), (100, 2)])
def test_nothing_is_written_beyond_the_buffer(tmp_path, read, room, count):
    assert read(bytearray(room), *columns(tmp_path, [b"one", b"two"]), False) == (count, [])


@READERS
def test_what_cannot_be_filled_is_refused(tmp_path, read):
    with pytest.raises((ValueError, TypeError, BufferError)):
        read(b"........", *columns(tmp_path, [b"one"]), False)


@READERS
def test_a_path_that_is_no_text_is_read(tmp_path, read):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    with open(path, "wb") as file:
        file.write(b"body")
    assert read(bytearray(5), [path], [4], [os.stat(path).st_mtime_ns], False) == (1, [])


@READERS
@pytest.mark.parametrize("modified_ns", [-(10**18), 0, 2**63 + 10**9], ids=["1938", "1970", "2262"])
def test_a_time_that_a_file_system_holds_is_one_that_can_be_compared(tmp_path, read, modified_ns):
    paths, sizes, _ = columns(tmp_path, [b"body"])
    os.utime(paths[0], ns=(0, modified_ns))
    held = os.stat(paths[0]).st_mtime_ns  # a file system that ends earlier may hold another one
    assert read(bytearray(5), paths, sizes, [held], False) == (1, [])
    assert read(bytearray(5), paths, sizes, [held + 1], False) == (0, [])
