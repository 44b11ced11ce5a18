"""Small files found and read at once: the compiled way beside the one in Python."""

import hashlib
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.system.small_files import (
    list_folder,
    list_folder_reference,
    read_files,
    read_files_reference,
    write_files,
    write_files_reference,
)
from caf_pipeline_tests.support.disks import files_of_at_most

SOME_BODIES = st.lists(st.binary(max_size=40), max_size=8)
NAMES = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=5
).filter(lambda name: name not in (".", ".."))
LISTERS = pytest.mark.parametrize("list_in", [list_folder, list_folder_reference])
WRITERS = pytest.mark.parametrize("write_with", [write_files, write_files_reference])
READERS = pytest.mark.parametrize("read", [read_files, read_files_reference])


def columns(folder, bodies):
    """Write files with these bodies; return their paths, sizes and times."""
    paths = [str(folder / f"{number} ü") for number in range(len(bodies))]
    for path, body in zip(paths, bodies, strict=True):
        with open(path, "wb") as file:
            file.write(body)
    return paths, [len(body) for body in bodies], [os.stat(path).st_mtime_ns for path in paths]


@READERS
@settings(max_examples=30)
@given(bodies=SOME_BODIES, hashed=st.booleans())
def test_bodies_come_back_to_back_with_the_digest_of_each(tmp_path_factory, read, bodies, hashed):
    together = b"".join(bodies)
    buffer = bytearray(len(together) + 1)
    found = read(buffer, *columns(tmp_path_factory.mktemp("files"), bodies), hashed)
    assert found == (
        len(bodies),
        [hashlib.sha256(body).digest() for body in bodies] if hashed else [],
    )
    assert buffer[:-1] == together


@READERS
@pytest.mark.parametrize("change", ["longer", "shorter", "touched", "gone", "folder", "pipe"])
def test_reading_stops_before_a_changed_file(tmp_path, read, change):
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
def test_mtimes_of_the_file_system_can_be_compared(tmp_path, read, modified_ns):
    paths, sizes, _ = columns(tmp_path, [b"body"])
    os.utime(paths[0], ns=(0, modified_ns))
    held = os.stat(paths[0]).st_mtime_ns  # a file system that ends earlier may hold another one
    assert read(bytearray(5), paths, sizes, [held], False) == (1, [])
    assert read(bytearray(5), paths, sizes, [held + 1], False) == (0, [])


@LISTERS
@settings(max_examples=30)
@given(entries=st.dictionaries(NAMES, st.none() | st.binary(max_size=40), max_size=8))
def test_folder_is_listed_in_path_order_with_sizes_and_mtimes(tmp_path_factory, list_in, entries):
    folder = tmp_path_factory.mktemp("files")
    for name, body in entries.items():
        if body is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(body)
    in_order = sorted(entries, key=lambda name: name.encode() + b"/" * (entries[name] is None))
    status = {name: os.stat(folder / name) for name in entries}
    plain = {name: entries[name] is not None for name in entries}
    assert list_in(str(folder)) == [
        (name, status[name].st_size, status[name].st_mtime_ns) if plain[name] else (name, -1, 0)
        for name in in_order
    ]


@LISTERS
def test_what_is_not_plainly_a_file_has_no_size(tmp_path, list_in):
    (tmp_path / "file").write_bytes(b"body")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, target in {
        "broken": "nowhere",
        "loop": "loop",
        "to a file": "file",
        "to a folder": "folder",
    }.items():
        (tmp_path / name).symlink_to(target)
    (tmp_path / "to a folder.x").write_bytes(b"")
    open(os.fsencode(tmp_path) + b"/\xff", "wb").close()
    sizes = {name: size_bytes for name, size_bytes, _ in list_in(str(tmp_path))}
    assert {name for name, size_bytes in sizes.items() if size_bytes >= 0} == {
        "file",
        "to a folder.x",
    }
    in_order = [
        "broken",
        "file",
        "folder",
        "loop",
        "pipe",
        "to a file",
        "to a folder.x",
        "to a folder",
        "\udcff",
    ]
    assert list(sizes) == in_order


@LISTERS
@pytest.mark.parametrize("modified_ns", [-(10**18), 2**63 + 10**9], ids=["1938", "2262"])
def test_mtime_is_exact_or_the_file_is_examined_alone(tmp_path, list_in, modified_ns):
    (tmp_path / "file").write_bytes(b"")
    os.utime(tmp_path / "file", ns=(0, modified_ns))
    held = os.stat(tmp_path / "file").st_mtime_ns
    assert list_in(str(tmp_path)) == [("file", 0, held) if held < 2**63 else ("file", -1, 0)]


@LISTERS
def test_large_folder_is_listed_completely_in_order(tmp_path, list_in):
    names = sorted(f"{number:04}" for number in range(1001))
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * int(name))
    assert [(name, size_bytes) for name, size_bytes, _ in list_in(str(tmp_path))] == [
        (name, 4 * int(name)) for name in names
    ]


@LISTERS
@pytest.mark.parametrize(
    ("name", "error"), [("missing", FileNotFoundError), ("file", NotADirectoryError)]
)
def test_unlistable_folder_raises_the_systems_error(tmp_path, list_in, name, error):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(error) as refused:
        list_in(str(tmp_path / name))
    assert refused.value.strerror == os.strerror(refused.value.errno)


def write_into(folder, write_with, files, first=7):
    """Write files by their names; return which of them are told to be there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        bodies = [memoryview(body) for body in files.values()]
        told = write_with(descriptor, first, [os.fsencode(name) for name in files], bodies)
    finally:
        os.close(descriptor)
    return [name for name, is_there in zip(files, told, strict=True) if is_there]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@WRITERS
@settings(max_examples=40)
@given(
    files=st.dictionaries(NAMES, st.binary(max_size=40), max_size=40),
    first=st.integers(0, (1 << 64) - 1),
)
def test_files_are_there_with_their_bytes_under_one_name_each(
    tmp_path_factory, write_with, files, first
):
    folder = tmp_path_factory.mktemp("files")
    assert write_into(folder, write_with, files, first) == list(files)
    assert contents(folder) == files
    assert all(path.stat().st_nlink == 1 for path in folder.iterdir())


@WRITERS
@pytest.mark.parametrize("place", [0, 10, 39], ids=["first", "in the middle", "last"])
@pytest.mark.parametrize(
    "what",
    [
        "file",
        "folder",
        "link",
        "dangling link",
        "its unfinished name",
        "too long",
        "NUL",
        "a folder away",
    ],
)
def test_failed_file_does_not_affect_the_others(tmp_path, write_with, what, place):
    taken = {"too long": "n" * 300, "NUL": "a\0b", "a folder away": "gone/name"}.get(
        what, f"{place}"
    )
    files = {f"{number}": b"new" for number in range(40)}
    files = {taken if name == f"{place}" else name: body for name, body in files.items()}
    before = {}
    if what == "file":
        before = {taken: b"mine"}
    elif what == "folder":
        (tmp_path / taken).mkdir()
    elif what == "link":
        before = {"mine": b"mine", taken: b"mine"}
    elif what == "dangling link":
        (tmp_path / taken).symlink_to("nowhere")
    elif what == "its unfinished name":
        before = {f".caf-{7 + place:016x}.partial": b"another process fills it"}
    for name, body in before.items():
        (tmp_path / name).symlink_to("mine") if what == "link" and name == taken else (
            tmp_path / name
        ).write_bytes(body)

    assert write_into(tmp_path, write_with, files) == [name for name in files if name != taken]
    assert (
        contents(tmp_path) == {name: body for name, body in files.items() if name != taken} | before
    )
    assert not (tmp_path / "nowhere").exists()


@WRITERS
def test_file_without_room_leaves_nothing_behind(tmp_path, write_with):
    files = {f"{number}": bytes(8192 if number % 3 else 4096) for number in range(40)}
    with files_of_at_most(4096):
        assert write_into(tmp_path, write_with, files) == [
            name for name, body in files.items() if len(body) == 4096
        ]
    assert contents(tmp_path) == {name: body for name, body in files.items() if len(body) == 4096}


@WRITERS
def test_files_have_the_mode_of_any_other_new_file(tmp_path, write_with):
    before = os.umask(0o027)
    try:
        write_into(tmp_path, write_with, {"name": b""})
    finally:
        os.umask(before)
    assert (tmp_path / "name").stat().st_mode & 0o777 == 0o640
