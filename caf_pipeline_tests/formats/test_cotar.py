"""cotar indexes: those of the real builder, and damaged indexes."""

import contextlib
import hashlib
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from caf_pipeline.errors import MalformedArchive, MemberRefused
from caf_pipeline.formats.cotar import SUFFIX_BYTES, CotarIndex, Slot, hash_of
from caf_pipeline.formats.cotar_builder import index_of
from caf_pipeline.formats.tar import FileRange, files_of, walk
from caf_pipeline_tests.support.tar_archives import SAME, VECTORS, vector

TARS = {each["name"]: each for each in json.loads((VECTORS / "manifest.json").read_text())}
DAMAGED = {each["name"]: each for each in json.loads((VECTORS / "corrupt.json").read_text())}
HASHES = json.loads((VECTORS / "hashes.json").read_text())


OTHERS = {
    "no_files": [],
    "zero_bytes": [],
    "gnu_longname_collide": [f"{'d' * 60}/{'e' * 60}/{end}" for end in ("file.txt", "other.txt")],
    "gnu_utf8_names": ["café.txt", "cafe\u0301.txt", "日本/😀", "ascii"],
    "base256_size": ["big", "after"],
    "pax_longname": [f"{'d' * 60}/{'e' * 60}/file.txt", "short"],
    "pax_global": ["short"],
}
"""Archives that it indexes wrongly or not at all, and their files."""

CUT_OFF = [
    "truncated_data",
    "truncated_header",
    "size_5GiB_header_only",
    "size_4GiB_minus_1_header_only",
]


def files_in(tar: bytes):
    return files_of(walk(lambda start, end: tar[start:end], len(tar))).files


class Counted:
    """A file that counts the reads after that of its end."""

    def __init__(self, content: bytes):
        self.content, self.reads = content, 0

    def read(self, start, end):
        assert 0 <= start <= end <= len(self.content)
        self.reads += 1
        return self.content[start:end]


def opened(index: bytes, tar: bytes | None = None) -> CotarIndex:
    content = index if tar is None else tar + index
    file = Counted(content)
    opening = CotarIndex.open_separate if tar is None else CotarIndex.open_embedded
    found = opening(file.read, content[-SUFFIX_BYTES:], len(content), name="x")
    found.file = file
    return found


@pytest.mark.parametrize(("name", "value"), HASHES)
def test_names_have_the_hashes_that_the_original_gives_them(name, value):
    assert f"{hash_of(name.encode()):016x}" == value


@pytest.mark.parametrize("name", SAME)
def test_an_index_is_byte_for_byte_the_real_builders(name):
    index = index_of(files_in(vector(f"{name}.tar")))
    assert hashlib.sha256(index).hexdigest() == TARS[name]["index_sha256"]
    assert index == vector(f"{name}.tar.index")


@pytest.mark.parametrize(("name", "names"), OTHERS.items(), ids=OTHERS)
def test_files_that_the_real_builder_loses_are_indexed(name, names):
    tar = vector(f"{name}.tar")
    files = files_in(tar)
    index = index_of(files)
    assert [file.name.decode() for file in files] == names
    found = opened(index)
    assert [found.find(file.name) for file in files] == [
        Slot(file.start_byte, file.size_bytes) for file in files
    ]
    assert found.find(b"nope") is None


@pytest.mark.parametrize("name", CUT_OFF)
def test_a_tar_that_is_cut_off_has_no_index(name):
    with pytest.raises(MalformedArchive, match="cut off"):
        files_in(vector(f"{name}.tar"))


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize(
    "name", [name for name in TARS if (VECTORS / f"{name}.tar.index").exists()]
)
def test_names_are_located_as_by_the_real_reader(name, embedded):
    found = opened(vector(f"{name}.tar.index"), vector(f"{name}.tar") if embedded else None)
    for look in TARS[name]["lookup_external"]["results"]:
        expected = look["index"] and (look["index"]["offset"], look["index"]["size"])
        if expected is None and not look["name"].isascii():
            continue  # it cannot locate these by name: see the next test
        assert found.find(look["name"].encode()) == expected


def test_name_taken_for_latin_1_is_located():
    found = opened(vector("gnu_utf8_names.tar.index"))
    assert found.find("café.txt".encode()) == found.find("cafÃ©.txt".encode()) == Slot(512, 3)
    assert found.find("日本/😀".encode()) == Slot(2560, 2)
    assert found.find("nö".encode()) is None


REFUSED = [
    "magic_bad_head",
    "version_1_head",
    "version_3_head",
    "count_bigger",
    "count_smaller",
    "index_empty",
    "index_8_bytes",
]
REFUSED += ["index_truncated_mid"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_index_is_refused(name):
    with pytest.raises(MalformedArchive):
        opened(vector(f"x_{name}.tar.index"))


@pytest.mark.parametrize(
    "name", ["reference_external", "footer_bad_external", "index_no_footer", "rec_offset_past_end"]
)
def test_an_index_whose_damage_does_not_matter_is_read(name):
    found = opened(vector(f"x_{name}.tar.index"))
    for look in DAMAGED[name]["real"]["results"]:
        if "error" not in look:
            assert found.find(look["name"].encode()) == (
                look["index"] and tuple(look["index"].values())
            )


def test_slot_without_hash_is_damage():
    found = opened(vector("x_rec_hash_only_zero.tar.index"))
    with pytest.raises(MalformedArchive, match="damaged"):
        found.find(b"b.txt")
    assert found.find(b"tiles/0/0/0.pbf") == Slot(512, 10)


BASIC, TAR = vector("basic.tar.index"), vector("basic.tar")
SIX = BASIC[:4] + (6).to_bytes(4, "little")


def test_index_behind_a_tar_needs_only_its_last_header():
    found = opened(b"\0" * 8 + BASIC[8:], TAR)
    assert found.find(b"b.txt") == Slot(3584, 512)
    with pytest.raises(MalformedArchive, match="damaged"):
        found.find(b"nope")


@pytest.mark.parametrize(
    "index",
    [
        b"",
        BASIC[:-8],
        BASIC + b"\0",
        BASIC[:-1],
        BASIC[:-8] + SIX,
        SIX + BASIC[8:],
        BASIC[:-4] + b"\xff" * 4,
        BASIC[:-4] + bytes(4),
        BASIC[:-8] + b"COT\1" + BASIC[-4:],
    ],
    ids=[
        "none",
        "no footer",
        "a byte more",
        "a byte less",
        "six in footer",
        "six in header",
        "four billion",
        "no slots",
        "version 1",
    ],
)
def test_damaged_index_behind_a_tar_locates_nothing_wrong(index):
    names = {file.name: Slot(file.start_byte, file.size_bytes) for file in files_in(TAR)}
    try:
        found = opened(index, TAR)
        for name in [*names, b"nope"]:
            assert found.find(name) == names.get(name)
    except MalformedArchive:
        pass
    else:
        pytest.fail("nothing was refused")


def test_last_index_behind_a_tar_counts():
    assert opened(BASIC, TAR + vector("one_file.tar.index")).find(b"b.txt") == Slot(3584, 512)


def test_a_full_table_ends_a_search_after_one_turn():
    slots = b"".join(number.to_bytes(8, "little") + bytes(7) + b"\1" for number in range(1, 1001))
    header = b"COT\2" + (1000).to_bytes(4, "little")
    found = opened(header + slots + header)
    assert found.find(b"nope") is None


def test_search_of_an_oversized_table_is_abandoned():
    count = 1 << 28
    header = b"COT\2" + count.to_bytes(4, "little")
    full = (b"\1" * 16) * (SUFFIX_BYTES // 16)
    reads = []

    def read(start, end):
        reads.append(end - start)
        return header if start == 0 else full[: end - start]

    found = CotarIndex.open_separate(read, full, 16 + 16 * count, name="x")
    with pytest.raises(MalformedArchive, match="no free slot"):
        found.find(b"nope")
    assert sum(reads) < 32 << 20


FILES = st.lists(st.binary(min_size=1, max_size=30), unique=True, max_size=300).map(
    lambda names: [FileRange(name, 512 * (number + 1), number) for number, name in enumerate(names)]
)


@given(FILES, st.booleans())
@example([FileRange(b"%d" % number, 512 * number, 1) for number in range(20_000)], True)
@settings(max_examples=40)
def test_each_file_is_located_with_at_most_one_read(files, embedded):
    found = opened(index_of(files), bytes(1024) if embedded else None)
    found.file.reads = 0
    for file in files[:2000]:
        assert found.find(file.name) == Slot(file.start_byte, file.size_bytes)
    assert found.file.reads <= min(len(files), 2000)
    assert found.find(b"?" * 31) is None


@given(FILES.filter(bool))
@settings(max_examples=50)
def test_slots_are_filled_as_by_one_insertion_after_the_other(files):
    index = index_of(files)
    count = int.from_bytes(index[4:8], "little")
    table = [b""] * count
    for file in sorted(
        files, key=lambda file: (hash_of(file.name) % count, file.start_byte, hash_of(file.name))
    ):
        place = hash_of(file.name) % count
        while table[place]:
            place = (place + 1) % count
        table[place] = hash_of(file.name).to_bytes(8, "little")
    assert [index[at : at + 8].strip(b"\0") for at in range(8, len(index) - 8, 16)] == [
        each.strip(b"\0") for each in table
    ]


@pytest.mark.parametrize("file", [FileRange(b"a", 512, 1 << 32), FileRange(b"a", 1 << 41, 1)])
def test_unindexable_names_are_refused(file):
    with pytest.raises(MemberRefused, match="'a'"):
        index_of([file])


def test_the_largest_that_it_can_hold_is_held():
    file = FileRange(b"a", (1 << 41) - 512, (1 << 32) - 1)
    assert opened(index_of([file])).find(b"a") == file[1:]


@given(st.binary(max_size=400), st.binary(max_size=12), st.booleans())
@settings(max_examples=100)
def test_whatever_the_bytes_are_a_look_up_ends(content, name, embedded):
    for index in (content, BASIC[:8] + content, content + BASIC[-8:]):
        with contextlib.suppress(MalformedArchive):
            opened(index, TAR if embedded else None).find(name)
