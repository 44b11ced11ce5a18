"""The CAF reader: few reads, strictness, lenience, unused bytes, bounded memory."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.caf import index as index_module
from caf_pipeline.caf.archive import SUFFIX_BYTES, CafReader
from caf_pipeline.errors import ArchiveError, ArchiveLimitReached, MalformedArchive, MemberNotFound
from caf_pipeline_tests.support.memory_ranges import MemoryRanges, caf_bytes, index_of

MEMBER = '{"start_byte":0,"end_byte":4}'


def opened(content: bytes, *, lenient: bool = False) -> CafReader:
    return CafReader.open(MemoryRanges(content), name="x.caf", lenient=lenient)


def with_files(files: str) -> bytes:
    return caf_bytes(b"0123456789", f'{{"format_version":"1.0","files":{{{files}}}}}'.encode())


def test_a_small_archive_takes_one_read():
    source = MemoryRanges(caf_bytes(b"0123", index_of(("a", 0, 4))))
    reader = CafReader.open(source)
    assert (reader.read("a"), b"".join(reader.stream("a", 3)), source.reads) == (
        b"0123",
        b"0123",
        1,
    )


def test_a_member_of_a_large_archive_takes_two_reads():
    source = MemoryRanges(caf_bytes(b"head" + bytes(1 << 20), index_of(("a", 0, 4))))
    assert CafReader.open(source).read("a") == b"head"
    assert source.reads == 2


def test_a_member_beside_a_long_index_takes_three_reads():
    members = [(f"{n:06}", n, n + 1) for n in range(5000)]
    source = MemoryRanges(caf_bytes(bytes(5000), index_of(*members)))
    reader = CafReader.open(source)
    assert len(reader) == 5000
    assert reader.read("000007") == b"\0"
    assert source.reads == 3


@settings(max_examples=40)
@given(st.lists(st.integers(0, 40_000), max_size=12), st.integers(1, SUFFIX_BYTES))
def test_every_member_is_read_right_wherever_the_first_read_cuts(sizes, piece_bytes):
    bodies = {str(n): bytes([n]) * size for n, size in enumerate(sizes)}
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    index = index_of(*((str(n), start, start + sizes[n]) for n, start in enumerate(starts)))
    reader = opened(caf_bytes(b"".join(bodies.values()), index))
    assert {key: reader.read(key) for key in bodies} == bodies
    assert {key: b"".join(reader.stream(key, piece_bytes)) for key in bodies} == bodies
    assert {
        member.key: b"".join(body) for member, body in reader.read_many(reader.members)
    } == bodies


def test_small_neighbours_share_a_read():
    source = MemoryRanges(
        caf_bytes(
            bytes(1 << 20), index_of(*((str(n), n * 100, n * 100 + 100) for n in range(1000)))
        )
    )
    reader = CafReader.open(source)
    before = source.reads
    assert sum(len(b"".join(body)) for _, body in reader.read_many(reader.members)) == 100_000
    assert source.reads == before + 1


@pytest.mark.parametrize(
    "files",
    [
        f'"a":{MEMBER},"b":{MEMBER},"a":{MEMBER}',
        f'"a":{MEMBER},"\\u0061":{MEMBER}',
        '"a":{"start_byte":0,"end_byte":4,"end_byte":4}',
        '"a":{"start_byte":0,"end_byte":4,"st\\u0061rt_byte":0}',
        # A duplicate key and an escaped field name: there are as many plain names as members.
        f'"a":{MEMBER},"b":{MEMBER},"a":{{"st\\u0061rt_byte":0,"end\\u005fbyte":4}}',
        f'"a":{{"start_byte":0,"start_byte":0,"end_byte":4}},"\\u0022start_byte":{MEMBER}',
        '"a":{"Start_byte":0,"end_byte":4}',
        '"a":{"start_byte":0.0,"end_byte":4}',
        '"a":{"start_byte":0,"end_byte":4e0}',
        '"a":{"start_byte":"0","end_byte":"4"}',
        '"a":{"start_byte":false,"end_byte":true}',
        '"a":{"start_byte":null,"end_byte":4}',
        '"a":{"start_byte":0,"end_byte":NaN}',
        '"a":{"start_byte":4,"end_byte":3}',
        '"a":{"start_byte":0,"end_byte":11}',
        f'"a":{{"start_byte":0,"end_byte":{"9" * 5000}}}',
        f'"a":{MEMBER},',
        '"a":{"start_byte":0,"end_byte":4,"x":' + "[" * 20_000 + "]" * 20_000 + "}",
    ],
)
def test_ambiguous_index_is_refused(files):
    with pytest.raises(MalformedArchive) as refused:
        opened(with_files(files))
    assert "sys." not in str(refused.value)  # Python's own advice on numbers of many digits


@pytest.mark.parametrize(
    "order", [("files", "files", "format_version"), ("format_version", "files", "format_version")]
)
def test_duplicate_top_level_field_is_always_refused(order):
    values = {"files": "{}", "format_version": '"1.0"'}
    raw = "{" + ",".join(f'"{name}":{values[name]}' for name in order) + "}"
    for lenient in (False, True):
        with pytest.raises(MalformedArchive):
            opened(caf_bytes(b"", raw.encode()), lenient=lenient)


@pytest.mark.parametrize(
    "key", ["files", "start_byte", "format_version", 'a"start_byte":1', "\\u0061"]
)
def test_keys_that_look_like_fields_are_only_keys(key):
    reader = opened(caf_bytes(b"0123", index_of((key, 0, 4), ("b", 0, 0))))
    assert reader.read(key) == b"0123"


@pytest.mark.parametrize(
    ("files", "key"),
    [
        (f'"\\u0061":{MEMBER}', "a"),
        (f'"\\\\u0061":{MEMBER}', "\\u0061"),
        (f'"files":{MEMBER}', "files"),
        (f'"b\\\\\\"files":{MEMBER}', 'b\\"files'),
        (f'"\\u0066iles":{MEMBER},"a\\"start_byte":{MEMBER}', 'a"start_byte'),
        ('"a":{"\\u0073tart_byte":0,"end\\u005Fb\\u0079te":4}', "a"),
    ],
)
def test_a_long_index_with_escaped_letters_is_read(files, key, monkeypatch):
    monkeypatch.setattr(index_module, "MAX_SLOW_INDEX_BYTES", 0)
    assert opened(with_files(files)).read(key) == b"0123"


@pytest.mark.parametrize(
    "files",
    [
        f'"a":{MEMBER},"\\u0061":{MEMBER}',
        '"a":{"start_byte":0,"end_byte":4,"\\u0073tart_byte":0}',
        f'"a":{MEMBER},',
    ],
)
@pytest.mark.thorough
def test_a_long_index_with_faults_is_refused(files):
    for lenient in (False, True):
        with pytest.raises(MalformedArchive, match=str(index_module.MAX_SLOW_INDEX_BYTES)[:5]):
            opened(with_files(files + " " * index_module.MAX_SLOW_INDEX_BYTES), lenient=lenient)


def test_white_space_and_unknown_fields_of_any_shape_are_accepted():
    index = {"x": [{"start_byte": 1, "end_byte": 2}], **index_of(("a", 0, 4)), "y": None}
    index["files"]["a"]["more"] = {"deep": [1.5, "é"]}
    assert opened(caf_bytes(b"0123", json.dumps(index, indent=3).encode())).read("a") == b"0123"


@pytest.mark.parametrize("version", ['"format_version":"2.0",', ""])
def test_another_version_is_read_only_when_asked(version):
    content = caf_bytes(b"0123", f'{{{version}"files":{{"a":{MEMBER}}}}}'.encode())
    with pytest.raises(MalformedArchive):
        opened(content)
    reader = opened(content, lenient=True)
    assert (reader.read("a"), len(reader.warnings)) == (b"0123", 1)


def test_lenient_reading_warns_of_replaced_bytes():
    content = caf_bytes(
        b"0123", b'{"format_version":"1.0","files":{"\xe2\x80\xff":' + MEMBER.encode() + b"}}"
    )
    reader = opened(content, lenient=True)
    assert [member.key for member in reader.members] == ["\ufffd\ufffd\ufffd"]
    assert "UTF-8" in reader.warnings[0]


def test_lenient_reading_warns_of_duplicate_keys():
    reader = opened(
        with_files('"a":{"start_byte":0,"end_byte":1},"a":{"start_byte":1,"end_byte":3}'),
        lenient=True,
    )
    assert reader.read("a") == b"12"
    assert len(reader.warnings) == 1


@pytest.mark.parametrize(
    ("footer", "error"),
    [(0, MalformedArchive), (4000, MalformedArchive), (0xFFFFFFFF, MalformedArchive)],
)
def test_footer_beyond_the_file_is_refused_without_another_read(footer, error):
    source = MemoryRanges(caf_bytes(b"0123", index_of(("a", 0, 4)), footer=footer))
    with pytest.raises(error):
        CafReader.open(source)
    assert source.reads == 1


def test_an_index_of_gigabytes_is_refused_before_it_is_read():
    class Sparse:
        def read(self, start_byte, end_byte):
            raise AssertionError("the index was read")

        def read_suffix(self, size_bytes):
            return bytes(size_bytes - 4) + struct.pack("<I", 3 << 30), 4 << 30

    with pytest.raises(ArchiveLimitReached):
        CafReader.open(Sparse())


def test_a_source_that_sends_too_little_is_an_error():
    class Short(MemoryRanges):
        def read(self, start_byte, end_byte):
            return super().read(start_byte, end_byte)[:-1]

    reader = CafReader.open(Short(caf_bytes(bytes(1 << 20), index_of(("a", 0, 4)))))
    with pytest.raises(ArchiveError):
        reader.read("a")


def test_a_missing_member_is_named():
    with pytest.raises(MemberNotFound, match="'nope'"):
        opened(with_files(f'"a":{MEMBER}')).read("nope")


def test_unused_bytes_and_overlaps_are_reported():
    index = index_of(("a", 2, 4), ("b", 3, 5), ("empty", 4, 4), ("c", 7, 9), ("d", 7, 9))
    reader = opened(caf_bytes(bytes(10), index))
    assert list(reader.gaps()) == [(0, 2), (5, 7), (9, 10)]
    assert reader.overlap_count() == 2


def program(text: str, path: Path) -> list[int]:
    """Run a Python program, and return the numbers that it prints."""
    command = [sys.executable, "-c", text, str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [int(number) for number in printed.split()]


OPEN = """
import sys
from pathlib import Path
from caf_pipeline_tests.support.peak_memory import peak_bytes
from caf_pipeline.caf.archive import CafReader
from caf_pipeline.system.ranges import LocalFile
before = peak_bytes()
reader = CafReader.open(LocalFile(Path(sys.argv[1])))
print(len(reader), peak_bytes() - before)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("files", "before"),
    [
        ("".join(f'"{n:x}":{{"start_byte":400,"end_byte":400}},' for n in range(200_000)), ""),
        ("".join(f'"{n:4}{"x" * 900}\U0001f600":{MEMBER},' for n in range(9_999)), ""),
        (f'"\\u0061":{MEMBER},', f'"x":[{"[]," * 4_000_000}[]],'),
    ],
    ids=["short keys", "keys of four bytes a letter", "unknown lists beside an escape"],
)
def test_opening_takes_seven_times_the_index_at_most(tmp_path, files, before):
    index = f'{{{before}"format_version":"1.0","files":{{{files[:-1]}}}}}'
    content = caf_bytes(bytes(400), index.encode())
    (tmp_path / "x.caf").write_bytes(content)
    _, peak_bytes = program(OPEN, tmp_path / "x.caf")
    assert peak_bytes < 7 * len(content)


BUILD_MILLION = """
import sys
from caf_pipeline_tests.support.peak_memory import peak_bytes
from caf_pipeline.caf.index import IndexBuilder
before = peak_bytes()
index = IndexBuilder()
for n in range(1_000_000):
    index.add(f"objects/of/a/prefix/{n:011}.bin", n, n + 1)
with open(sys.argv[1], "wb") as file:
    file.truncate(1_000_000)
    file.seek(1_000_000)
    for piece in index.iter_index():
        file.write(piece)
    file.write(index.footer())
print(index.member_count, peak_bytes() - before)
"""


@pytest.mark.thorough
def test_a_million_members_are_indexed_and_opened_in_bounded_memory(tmp_path):
    for text, limit_mib in ((BUILD_MILLION, 256), (OPEN, 320)):
        count, peak_bytes = program(text, tmp_path / "million.caf")
        assert count == 1_000_000
        assert peak_bytes < limit_mib << 20
