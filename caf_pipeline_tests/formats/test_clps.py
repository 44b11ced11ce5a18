"""clp-s archives: archives of clp-s, damaged archives, and bounded work for forged ones."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.errors import ArchiveError, ArchiveLimitReached
from caf_pipeline.formats.clps import (
    FIRST_READ_BYTES,
    HEADER_BYTES,
    SECTIONS,
    TIMES_INFLATED_BYTES,
    TIMES_METADATA_BYTES,
    begins_as_archive,
    count_records,
    read_metadata,
    read_times,
)
from caf_pipeline_tests.support.clps_archives import (
    WHOLE,
    archive_info,
    built,
    files,
    frame,
    range_index,
    times,
    wrapped,
)

VECTORS = Path(__file__).parents[1] / "vectors" / "clps"
REAL = json.loads((VECTORS / "manifest.json").read_text())
ODD = json.loads((VECTORS / "corrupt.json").read_text())

READ_AS_METADATA = {"version_0_3_1", "truncate_1696", "packets_no_tsdict"}
"""Archives that clp-s refuses because of their records: their metadata are valid."""


def opened(file: bytes, first_bytes: int = FIRST_READ_BYTES):
    return read_metadata(
        file[:first_bytes], len(file), lambda start, end: file[start:end], name="it"
    )


def records_of(file: bytes) -> int:
    archive = opened(file)
    if archive.records is not None:
        return archive.records
    table = archive.section("/table_metadata")
    return count_records(file[table.offset : table.offset + table.size], name="it")


PLAIN = bytes([len(WHOLE)]) + b"".join(
    struct.pack("<BI", kind, len(payload)) + payload for kind, payload in WHOLE
)

# Archives of clp-s


@pytest.mark.parametrize("vector", REAL, ids=lambda v: v["name"])
def test_metadata_of_real_archives_match_clp_s(vector):
    file, wanted, printed = (
        (VECTORS / vector["file"]).read_bytes(),
        vector["expected"],
        vector["archive_stats_printed_by_clp_s"],
    )
    archive = opened(file)
    header = archive.header
    assert (header.uncompressed_size, header.total_size) == (
        printed["uncompressed_size"],
        printed["size"],
    )
    assert ".".join(map(str, header.version)) == wanted["header"]["version"]
    assert header.metadata_size == wanted["header"]["metadata_size"]
    assert [
        {"name": one.name, "offset": one.offset, "size": one.size} for one in archive.sections
    ] == wanted["sections"]
    assert [
        {"s": one.s, "e": one.e, "f": dict(one.fields)} for one in archive.inputs or ()
    ] == printed["range_index"]
    told = [
        {
            "key": one.key,
            "column_ids": list(one.column_ids),
            "encoding": one.encoding,
            "start": one.begin,
            "end": one.end,
        }
        for one in archive.time_ranges
    ]
    assert told == wanted["timestamp_dictionary"]["ranges"]
    if told:
        assert (int(told[0]["start"]), int(told[0]["end"])) == (
            printed["begin_timestamp"],
            printed["end_timestamp"],
        )
    assert [{"id": one.id, "pattern": one.pattern} for one in archive.patterns] == wanted[
        "timestamp_dictionary"
    ]["patterns"]
    if vector["decompress_0_12"]["rc"] == 0:
        assert records_of(file) == vector["decompress_0_12"]["lines"]


@pytest.mark.parametrize("vector", ODD, ids=lambda v: v["name"])
def test_odd_archive_is_refused_as_clp_s_refuses_it(vector):
    file = (VECTORS / vector["file"]).read_bytes()
    if vector["clp_s_0.12.1b0"]["extract_rc"] == 0 or vector["name"] in READ_AS_METADATA:
        assert [one.name for one in opened(file).sections] == list(SECTIONS)
    else:
        with pytest.raises(ArchiveError, match=r"^it: .*\.$"):
            opened(file)


def test_metadata_take_at_most_two_reads():
    file = (VECTORS / "two_files_0.12.1b0.clps").read_bytes()
    asked = []

    def read(start, end):
        asked.append((start, end))
        return file[start:end]

    for first_bytes in (HEADER_BYTES, 100, HEADER_BYTES + 320, FIRST_READ_BYTES):
        archive = read_metadata(file[:first_bytes], len(file), read, name="it")
        assert [one.fields["_filename"] for one in archive.inputs] == ["a.jsonl", "b.jsonl"]
    assert asked == [(64, 384), (100, 384)]


@pytest.mark.parametrize("vector", REAL, ids=lambda v: v["name"])
def test_the_times_alone_are_those_of_all_the_metadata(vector):
    file, printed = (
        (VECTORS / vector["file"]).read_bytes(),
        vector["archive_stats_printed_by_clp_s"],
    )
    times = read_times(len(file), lambda start, end: file[start:end])
    assert begins_as_archive(file)
    assert times == opened(file).times
    if times is not None:
        assert times == (printed["begin_timestamp"], printed["end_timestamp"])
    else:
        assert all(
            one["encoding"] != 1 for one in vector["expected"]["timestamp_dictionary"]["ranges"]
        )


# Rules


@pytest.mark.parametrize(
    "file",
    [
        built(*WHOLE, trailing=b"more"),
        built(*WHOLE, total=2**64 - 1),
        built((200, bytes(5000)), *reversed(WHOLE), (9, b"")),
        built(WHOLE[0], (1, WHOLE[1][1].replace(b"files", b"other")), *WHOLE[2:]),
        built(
            WHOLE[0],
            files([*({"n": n, "o": 3} for n in SECTIONS), {"n": "/new", "o": 4, "x": [1]}], more=1),
            *WHOLE[2:],
        ),
        built(
            *WHOLE,
            range_index(),
            range_index(
                {"s": 1, "e": 1, "f": {}}, {"s": 0, "e": 2**64 - 1, "f": {"x": None}, "g": 1}
            ),
        ),
        built(files()),
        built(*WHOLE[:3], range_index()),
        built(
            *WHOLE[:2],
            times((b"k", [], 7, b""), (b"", [-1, 2], 1, bytes(16)), patterns=[(0, b"\\E")]),
            WHOLE[3],
        ),
        wrapped(b"".join(frame(bytes([one])) for one in PLAIN)),
    ],
)
def test_archives_that_clp_s_accepts_are_accepted(file):
    assert set(SECTIONS) <= {one.name for one in opened(file).sections}


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (built(*WHOLE, kind=1), "compression"),
        (built(*WHOLE, total=0), "ends at"),
        (built(*WHOLE, sections=0, total=100_000), "begins at"),
        (built(*WHOLE, metadata_size=0), "before what they announce"),
        (built(*WHOLE, metadata_size=2**32 - 1), "more than"),
        (built(*WHOLE, count=255), "announce"),
        (built(*WHOLE)[:-101], "cut off|a file of"),
        (wrapped(frame(b"\x01\x00" + b"\xff" * 4)), "more than"),
        (wrapped(frame(b"\x01\x09" + b"\xff" * 4)), "more than|announce"),
        (built(archive_info(num_segments=1.0), files()), "ArchiveInfo"),
        (built(archive_info(num_segments=0), files()), "segments"),
        (built(archive_info(x=1), files()), "ArchiveInfo"),
        (built((0, b""), files()), "ArchiveInfo"),
        (built(), "sections"),
        (built(files(b"x")), "ArchiveFileInfo"),
        (built((1, b"\x80")), "ArchiveFileInfo"),
        (built((1, b"\xdf\xff\xff\xff\xff")), "ArchiveFileInfo"),
        (built((1, b"\x81\xa5files\xdd\xff\xff\xff\xff")), "ArchiveFileInfo"),
        (built((1, b"\x81\xa1x\x01\xa5files\x90")), "ArchiveFileInfo"),
        (built(files([{"n": name, "o": -1} for name in SECTIONS])), "begins at"),
        (built(files([{"n": name, "o": 1.0} for name in SECTIONS])), "ArchiveFileInfo"),
        (built(files([{"n": name, "o": 9 - at} for at, name in enumerate(SECTIONS)])), "begins at"),
        (built(files([{"n": name, "o": 2**64 - 9} for name in SECTIONS])), "begins at"),
        (built(files([{"n": name, "o": 0} for name in reversed(SECTIONS)])), "sections"),
        (built(files([{"n": name, "o": 0} for name in SECTIONS[1:]])), "sections"),
        (built(files(), (2, b"\xff" * 8)), "lists? more"),
        (built(files(), (2, b"\x01" + bytes(7) + b"\xff" * 8)), "more than"),
        (built(files(), (2, struct.pack("<QQQ", 1, 0, 2**62))), "lists? more"),
        (built(files(), (2, struct.pack("<QQQQ", 1, 0, 0, 1))), "announce"),
        (built(files(), (2, struct.pack("<QQQQ", 0, 1, 0, 2**63))), "more than"),
        (built(files(), range_index({"s": -1, "e": 0, "f": {}})), "records -1 to 0"),
        (built(files(), range_index({"s": 3, "e": 2, "f": {}})), "records 3 to 2"),
        (
            built(
                files(),
                (
                    3,
                    range_index({"s": 0, "e": 0, "f": {"name": 1}})[1].replace(
                        b"name", b"n\xff\xff\xff"
                    ),
                ),
            ),
            "RangeIndex",
        ),
        (built(files(), range_index({"s": 0, "e": True, "f": {}})), "RangeIndex"),
        (built(files(), range_index({"s": 0, "f": {}})), "RangeIndex"),
        (built(files(), range_index({"s": 0, "e": 0})), "RangeIndex"),
        (built(files(), range_index({"s": 0, "e": 0, "f": None})), "RangeIndex"),
        (built(files(), range_index(1)), "RangeIndex"),
        (built(files(), (3, b"\x80")), "RangeIndex"),
        (built(files(), (3, b"\xc0")), "RangeIndex"),
        (built(files(), (3, b"")), "RangeIndex"),
        (built(files(), (3, b"\x90\x90")), "RangeIndex"),
        (built(files(), (3, b"\xdd\xff\xff\xff\xff")), "list more"),
        (built(files(), (3, b"\xdd\x00\x0f\x00\x00")), "RangeIndex"),
        (built(files(), (3, b"\x91" * 2_000_000)), "RangeIndex"),
        (
            built(
                files(), (3, b"\x91\x83\xa1s\x00\xa1e\x00\xa1f" + b"\x81\xa0" * 400_000 + b"\xc0")
            ),
            "RangeIndex",
        ),
        (
            built(files(), range_index({"s": 0, "e": 0, "f": {"x": "y" * (1 << 20)}})),
            "fields of an input",
        ),
    ],
)
def test_archives_that_break_a_rule_are_refused(file, said):
    with pytest.raises(ArchiveError, match=said) as refused:
        opened(file)
    assert str(refused.value).startswith("it: ")


def test_input_fields_and_names_may_be_anything():
    fields = {
        "_filename": "n",
        "_file_split_number": 3,
        "nested": [{}],
        "yes": True,
        "nan": float("nan"),
        "bin": b"x",
    }
    packet = range_index({"s": 0, "e": 1, "f": fields})[1].replace(b"\xa1n", b"\xa1\xe9")
    (one,) = opened(built(files(), (3, packet))).inputs
    assert dict(one.fields) == {"_filename": "\udce9", "_file_split_number": 3, "yes": True}


@pytest.mark.parametrize(("records", "tables"), [(0, []), (70, [60, 10]), (40_000, [1] * 40_000)])
def test_records_are_counted_without_their_metadata(records, tables):
    plain = struct.pack("<QQQQQ", 1, 0, 99, 0, len(tables))
    plain += b"".join(
        struct.pack("<QQiQ", 0, 0, number, count) for number, count in enumerate(tables)
    )
    assert count_records(frame(plain), name="it") == records


@pytest.mark.parametrize(
    "plain", [b"", b"\xff" * 8, struct.pack("<QQ", 0, 1), struct.pack("<QQQ", 0, 0, 2**63)]
)
def test_table_metadata_that_lie_are_refused(plain):
    with pytest.raises(ArchiveError):
        count_records(frame(plain), name="it")


# Forged archives


@settings(max_examples=100)
@given(st.data())
def test_no_input_raises_anything_else(data):
    match data.draw(st.sampled_from(["bytes", "flipped", "packets", "plain"])):
        case "bytes":
            file = data.draw(st.binary(max_size=200))
        case "flipped":
            file = bytearray((VECTORS / "two_files_0.12.1b0.clps").read_bytes())
            for _ in range(data.draw(st.integers(1, 4))):
                file[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
            file = bytes(file[: data.draw(st.integers(0, len(file)))])
        case "packets":
            packet = st.tuples(st.integers(0, 4), st.binary(max_size=60)) | st.sampled_from(WHOLE)
            file = built(*data.draw(st.lists(packet, max_size=6)))
        case _:
            plain = bytearray(PLAIN)
            for _ in range(data.draw(st.integers(1, 3))):
                plain[data.draw(st.integers(0, len(plain) - 1))] = data.draw(st.integers(0, 255))
            file = wrapped(frame(bytes(plain)))
    try:
        archive = opened(file)
        for one in archive.inputs or ():
            assert dict(one.fields) is not None
    except ArchiveError:
        pass


def test_metadata_that_inflate_without_an_end_are_refused():
    with pytest.raises(ArchiveLimitReached, match="inflate"):
        opened(wrapped(frame(PLAIN) + frame(bytes(64 << 20)) * 4))


def milliseconds(first, last) -> bytes:
    return struct.pack("<qq", first, last)


def test_times_are_known_only_if_every_key_has_them():
    told = [
        times((b"a", [1], 1, milliseconds(5, 9)), (b"b", [2], 1, milliseconds(-3, 7))),
        times((b"a", [1], 1, milliseconds(5, 9)), (b"b", [2], 2, struct.pack("<dd", 1.5, 2.5))),
        times((b"a", [1], 1, milliseconds(9, 5))),
        times(),
    ]
    archives = [built(archive_info(), files(), one) for one in told]
    assert [opened(one).times for one in archives] == [(-3, 9), None, None, None]
    assert [
        read_times(len(one), lambda start, end, one=one: one[start:end]) for one in archives
    ] == [(-3, 9), None, None, None]


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"\xfd\x2f\xc5\x30",
        built(*WHOLE, metadata_size=2**32 - 1),
        built(*WHOLE, metadata_size=TIMES_METADATA_BYTES + 1) + bytes(TIMES_METADATA_BYTES),
        built((200, bytes(TIMES_INFLATED_BYTES)), *WHOLE),
        wrapped(frame(bytes([2]) + struct.pack("<BI", 9, 2**32 - 1))),
        built((2, struct.pack("<Q", 2**64 - 1))),
    ],
    ids=[
        "empty",
        "magic alone",
        "past the end",
        "large",
        "inflating",
        "packet of 4 GiB",
        "keys without number",
    ],
)
def test_times_cost_little_whatever_a_file_says(file):
    asked = []

    def read(start, end):
        asked.append(end - start)
        return file[start:end]

    with pytest.raises(ArchiveError):
        read_times(len(file), read)
    assert sum(asked) <= HEADER_BYTES + TIMES_METADATA_BYTES


_HOSTILE = """
import sys
from caf_pipeline.errors import ArchiveError
from caf_pipeline_tests.formats.test_clps import *
from caf_pipeline_tests.support.clps_archives import *
from caf_pipeline_tests.support.peak_memory import peak_bytes
before = peak_bytes()
one = b"\\x83\\xa1s\\x00\\xa1e\\x00\\xa1f\\x80"
forged = [
    lambda: built(files(), (3, b"\\xdd" + (900_000).to_bytes(4, "big") + one * 900_000)),
    lambda: built(files(), (3, b"\\xdd" + (3_000_000).to_bytes(4, "big") + one * 3_000_000)),
    lambda: built(files(), (3, b"\\x91\\x83\\xa1s\\x00\\xa1e\\x00\\xa1f\\x81\\xa1x\\xdc\\xff\\xff" + b"\\x90" * 0xFFFF)),
    lambda: built(files(), (2, struct.pack("<Q", 500_000) + struct.pack("<QQQ", 0, 0, 0) * 500_000 + bytes(8))),
    lambda: built((9, bytes(60 << 20)), files()),
]
for make in forged:
    try:
        opened(make())
    except ArchiveError:
        pass
print(peak_bytes() - before >> 20)
"""  # noqa: E501


@pytest.mark.thorough
def test_memory_is_bounded_for_every_forged_archive():
    done = subprocess.run(
        [sys.executable, "-c", _HOSTILE], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 400  # MiB; making them takes half
