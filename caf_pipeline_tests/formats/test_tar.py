"""Tar archives: members of every variant as tarfile reads them, and written headers."""

import io
import subprocess
import tarfile

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from caf_pipeline.errors import MalformedArchive, MemberRefused
from caf_pipeline.formats.tar import BLOCK_BYTES, FileRange, end_of, files_of, header, padding, walk
from caf_pipeline_tests.support.tar_archives import LONG, info, made

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300
).filter(lambda name: not name.endswith("/") and name.strip("/"))


PAX = info(LONG, tarfile.REGTYPE).tobuf(tarfile.PAX_FORMAT)
GNU = info("g" * 120, tarfile.REGTYPE).tobuf(tarfile.GNU_FORMAT)
NAMED_TWICE = PAX[:-512] + GNU[:-512] + PAX[-512:]
"""Return a member with a PAX header and then a long name of GNU."""


def members_of(tar: bytes, **more):
    """Walk an archive with a reader that only moves forward, and refuses missing bytes."""
    read_to = 0

    def read(start, end):
        nonlocal read_to
        assert read_to <= start <= end <= len(tar)
        read_to = end
        return tar[start:end]

    return list(walk(read, len(tar), **more))


def bodies_of(tar: bytes, **more) -> dict[str, bytes]:
    found = files_of(members_of(tar, **more)).files
    return {name.decode(): tar[start : start + size] for name, start, size in found}


@pytest.mark.parametrize("tar_format", FORMATS.values(), ids=FORMATS)
@given(bodies=st.dictionaries(NAMES, st.binary(max_size=2000), max_size=6))
@example(bodies={LONG: b"long", "ü/日本": b"", "a": b"x" * BLOCK_BYTES})
@settings(max_examples=30)
def test_members_are_those_that_tarfile_finds(tar_format, bodies):
    if tar_format == tarfile.USTAR_FORMAT:
        bodies = {name: body for name, body in bodies.items() if len(name.encode()) <= 100}
    tar = made(bodies.items(), tar_format)
    assert bodies_of(tar) == bodies
    with tarfile.open(fileobj=io.BytesIO(tar)) as other:
        places = [(member.offset_data, member.size) for member in other.getmembers()]
    assert [
        (file.start_byte, file.size_bytes) for file in files_of(members_of(tar)).files
    ] == places


@given(bodies=st.dictionaries(NAMES | st.just("a/"), st.binary(max_size=2000), max_size=6))
@example(
    bodies={
        "p" * 150 + "/" + "n" * 100: b"in two fields",
        "p" * 156 + "/n": b"in none",
        LONG: b"",
        "x" * 100: b"1",
    }
)
@example(bodies={"": b"no name"})
@settings(max_examples=30)
def test_written_tar_is_readable_by_tarfile_and_us(bodies):
    tar = b"".join(
        header(name.encode(), len(body)) + body + padding(len(body))
        for name, body in bodies.items()
    )
    tar += end_of(len(tar))
    assert len(tar) % 10_240 == 0
    assert bodies_of(tar) == bodies
    with tarfile.open(fileobj=io.BytesIO(tar)) as other:
        found = [(member.name, member.size) for member in other.getmembers()]
    assert [size for _, size in found] == [len(body) for body in bodies.values()]
    assert [name.rstrip("/") for name, _ in found] == [name.rstrip("/") for name in bodies]


def test_gnu_tar_extracts_written_archives(tmp_path):
    bodies = {"a": b"1", "ü": b"2" * 600, LONG: b"3", "p" * 150 + "/" + "n" * 100: b"4"}
    tar = b"".join(
        header(name.encode(), len(body)) + body + padding(len(body))
        for name, body in bodies.items()
    )
    (tmp_path / "t.tar").write_bytes(tar + end_of(len(tar)))
    subprocess.run(["tar", "-xf", "t.tar"], cwd=tmp_path, check=True)
    assert {name: (tmp_path / name).read_bytes() for name in bodies} == bodies


def test_large_size_is_in_a_pax_header():
    head = header(b"huge", 8 << 30)
    with tarfile.open(fileobj=io.BytesIO(head + bytes(1024))) as tar:
        assert tar.next().size == 8 << 30
    (member,) = walk(lambda start, end: (head + bytes(1024))[start:end], len(head) + (8 << 30))
    assert member == (b"huge", "0", len(head), 8 << 30, b"", b"huge")


@pytest.mark.parametrize(
    ("tar", "bodies"),
    [
        (made([("a", b"1"), ("a", b"2")]), {"a": b"2"}),
        (made([("a", b"1"), info("l", tarfile.LNKTYPE, "a")]), {"a": b"1", "l": b"1"}),
        (
            made([("a", b"1"), info("l", tarfile.LNKTYPE, "a"), info("m", tarfile.LNKTYPE, "l")]),
            {"a": b"1", "l": b"1", "m": b"1"},
        ),
        (made([info("l", tarfile.LNKTYPE, "a"), ("a", b"1")]), {"a": b"1", "l": b"1"}),
        (made([("a", b"1"), info("l", tarfile.LNKTYPE, "a"), ("a", b"2")]), {"a": b"2", "l": b"1"}),
        (made([("a", b"1"), ("b", b"2"), info("a", tarfile.LNKTYPE, "b")]), {"a": b"2", "b": b"2"}),
        (made([("a", b"1"), info("a", tarfile.SYMTYPE, "b")]), {}),
        (
            made([("a", b"1"), info("s", tarfile.SYMTYPE, "a"), info("l", tarfile.LNKTYPE, "s")]),
            {"a": b"1"},
        ),
        (made([("l", b"1"), info("l", tarfile.LNKTYPE, "s"), info("s", tarfile.SYMTYPE, "a")]), {}),
        (made([("a", b"1"), info("d", tarfile.DIRTYPE), info("p", tarfile.FIFOTYPE)]), {"a": b"1"}),
        (made([("a", b"1")], pax_headers={"path": "all"}), {"all": b"1"}),
        (NAMED_TWICE, {LONG: b""}),
        (made([("a", b"1")]).rstrip(b"\0").ljust(1024, b"\0"), {"a": b"1"}),
        (b"", {}),
        (bytes(BLOCK_BYTES), {}),
    ],
    ids=lambda given: None if isinstance(given, bytes) else " ".join(given) or "none",
)
def test_last_member_of_a_name_counts(tar, bodies):
    assert bodies_of(tar) == bodies


def test_repeated_link_counts_once_for_each_target():
    tar = made([("a", b"1"), info("l", tarfile.LNKTYPE, "a"), info("l", tarfile.LNKTYPE, "a")])
    assert [file.name for file in files_of(members_of(tar)).files] == [b"a", b"l", b"l"]


@pytest.mark.parametrize("target", ["nobody", "l"])
def test_a_link_to_no_file_is_refused(target):
    with pytest.raises(MalformedArchive, match="hard link"):
        files_of(members_of(made([info("l", tarfile.LNKTYPE, target)])))


def test_long_link_chains_and_pax_headers_are_linear():
    links = [info(f"l{number}", tarfile.LNKTYPE, f"l{number + 1}") for number in range(10_000)]
    records = {f"user.{number}": "" for number in range(20_000)}
    found = files_of(members_of(made([*links, ("l10000", b"1")], pax_headers=records))).files
    assert len(found) == 10_001
    assert len({file.start_byte for file in found}) == 1


def test_unreadable_name_is_not_written():
    with pytest.raises(MemberRefused):
        header(b"n" * (1 << 20), 0)


def test_two_zero_blocks_end_an_archive_by_default():
    one, other = made([("a", b"1")]), made([("b", b"2")])
    assert bodies_of(one + other) == {"a": b"1"}
    assert bodies_of(one + other, ignore_zeros=True) == {"a": b"1", "b": b"2"}
    first = one[: 2 * BLOCK_BYTES]
    assert bodies_of(first + bytes(BLOCK_BYTES) + other) == {"a": b"1", "b": b"2"}


def test_numbers_are_read_in_base_256_too():
    tar = bytearray(made([("a", b"12345"), ("b", b"6")]))
    tar[124:136] = b"\x80" + (5).to_bytes(11, "big")
    tar[148:156] = b"        "
    tar[148:156] = b"%06o\0 " % sum(tar[:BLOCK_BYTES])
    assert bodies_of(bytes(tar)) == {"a": b"12345", "b": b"6"}


def test_a_checksum_of_signed_bytes_is_right_too():
    tar = bytearray(made([("ü", b"1")], tarfile.GNU_FORMAT))
    tar[148:156] = b"        "
    tar[148:156] = b"%06o\0 " % (sum(tar[:BLOCK_BYTES]) - 256 * 2)
    assert bodies_of(bytes(tar)) == {"ü": b"1"}


def test_sparse_file_has_no_range(tmp_path):
    with (tmp_path / "s").open("wb") as file:
        for position in range(0, 100 << 20, 4 << 20):  # more holes than the header holds
            file.seek(position)
            file.write(b"x")
    (tmp_path / "a").write_bytes(b"1")
    for variant in ("gnu", "pax"):
        subprocess.run(
            ["tar", f"--format={variant}", "-Scf", "t.tar", "s", "a"], cwd=tmp_path, check=True
        )
        tar = (tmp_path / "t.tar").read_bytes()
        found = files_of(members_of(tar))
        assert found.left_out == {"sparse file": 1}
        assert [file.name for file in found.files] == [b"a"]


@pytest.mark.parametrize("cut", [1, 511, 513, 1023, 1024, 1100, 1211, 1537])
def test_an_archive_that_is_cut_off_is_refused(cut):
    tar = made([("a", b"x" * 700), ("b", b"y")])[: BLOCK_BYTES + 1024 + 2 * BLOCK_BYTES]
    with pytest.raises(MalformedArchive, match="cut off"):
        members_of(tar[:cut])


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (148, b"0000000\0"),
        (124, b"00000000009\0"),
        (124, b"+0000000001\0"),
        (124, b"0000000_001\0"),
        (124, b"\xff" * 12),
        (0, b"B"),
    ],
)
def test_a_header_that_is_wrong_is_refused(place, text):
    tar = bytearray(made([("a", b"1")]))
    tar[place : place + len(text)] = text
    if place == 124:
        tar[148:156] = b"        "
        tar[148:156] = b"%06o\0 " % sum(tar[:BLOCK_BYTES])
    with pytest.raises(MalformedArchive):
        members_of(bytes(tar))


@pytest.mark.parametrize(
    "records",
    [
        b"8 path=a\n",
        b"12 path=a\n",
        b"path=a\n",
        b"10 path=ab",
        b"8 patha\n",
        b"0 path=a\n",
        b"99999999 a=b\n",
    ],
)
def test_pax_records_that_are_none_are_refused(records):
    tar = bytearray(made([("ü", b"1")]))
    tar[124:136] = b"%011o\0" % len(records)
    tar[148:156] = b"        "
    tar[148:156] = b"%06o\0 " % sum(tar[:BLOCK_BYTES])
    tar[BLOCK_BYTES : 2 * BLOCK_BYTES] = records.ljust(BLOCK_BYTES, b"\0")
    with pytest.raises(MalformedArchive):
        members_of(bytes(tar))


def test_oversized_name_is_refused_before_reading():
    tar = bytearray(made([(LONG, b"1")], tarfile.GNU_FORMAT))
    tar[124:136] = b"%011o\0" % (1 << 30)
    tar[148:156] = b"        "
    tar[148:156] = b"%06o\0 " % sum(tar[:BLOCK_BYTES])
    with pytest.raises(MalformedArchive, match="1 MiB"):
        list(walk(lambda start, end: bytes(tar[start:end]), 2 << 30))


BASE = made(
    [
        ("a", b"1" * 600),
        (LONG, b"2"),
        info("l", tarfile.LNKTYPE, "a"),
        info("d", tarfile.DIRTYPE),
        ("ü", b"3"),
    ]
)


@given(
    st.lists(st.tuples(st.integers(0, len(BASE) - 1), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, len(BASE)),
)
@settings(max_examples=100)
def test_ranges_of_any_bytes_lie_inside_the_file(edits, cut):
    tar = bytearray(BASE)
    for place, value in edits:
        tar[place] = value
    tar = bytes(tar[:cut])
    try:
        found = files_of(members_of(tar)).files
    except MalformedArchive:
        return
    assert all(
        isinstance(file, FileRange) and file.start_byte + file.size_bytes <= len(tar)
        for file in found
    )
