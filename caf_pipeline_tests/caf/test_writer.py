"""The CAF writer: exact sizes, limits, refusals, atomic publishing, Go's escapes."""

import json
import os
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from caf_pipeline.caf.archive import CafReader, CafWriter, Limits
from caf_pipeline.caf.index import (
    EMPTY_INDEX_SIZE_BYTES,
    FOOTER_SIZE_BYTES,
    IndexBuilder,
    index_entry_size_bytes,
)
from caf_pipeline.errors import ArchiveLimitReached, MemberRefused
from caf_pipeline_tests.support.memory_ranges import MemoryRanges

KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def built(ranges: dict[str, tuple[int, int]]) -> tuple[IndexBuilder, bytes]:
    index = IndexBuilder()
    for key, (start_byte, end_byte) in ranges.items():
        index.add(key, start_byte, end_byte)
    return index, b"".join(index.iter_index())


@given(
    st.dictionaries(KEYS, st.tuples(st.integers(0, 1 << 35), st.integers(0, 1 << 35)).map(sorted))
)
@example({"\"\\\b\f\n\r\t\x00\x1f<>&/'\x7f\x80\u2028\u2029\ufeff\U0001f600": (0, 0)})
def test_index_has_the_predicted_size_and_the_members(ranges):
    index, raw = built(ranges)
    entries = sum(index_entry_size_bytes(key, *ends) for key, ends in ranges.items())
    assert (
        len(raw)
        == index.index_size_bytes
        == EMPTY_INDEX_SIZE_BYTES + entries + max(0, len(ranges) - 1)
    )
    assert json.loads(raw) == {
        "format_version": "1.0",
        "files": {
            key: {"start_byte": start, "end_byte": end} for key, (start, end) in ranges.items()
        },
    }
    assert list(json.loads(raw)["files"]) == sorted(ranges, key=str.encode)


@given(st.dictionaries(KEYS, st.binary(max_size=40), max_size=8))
def test_written_archive_reads_back(tmp_path_factory, bodies):
    path = tmp_path_factory.mktemp("archive") / "round.caf"
    with CafWriter(path) as writer:
        for key, body in bodies.items():
            writer.add(key, len(body), [body[:3], memoryview(body)[3:]])
        writer.seal()
        writer.publish()
    assert path.stat().st_size == writer.size_bytes
    reader = CafReader.open(MemoryRanges(path.read_bytes()))
    assert {member.key: reader.read(member.key) for member in reader.members} == bodies


def test_control_characters_are_escaped_as_go_does():
    key = '"\\\b\f\n\r\t\x00\x1f<>&\u2028\u2029' + "/'\x7f\x80\ufeff\U0001f600"
    escaped = (
        rb"\"\\\b\f\n\r\t\u0000\u001f\u003c\u003e\u0026\u2028\u2029"
        + "/'\x7f\x80\ufeff\U0001f600".encode()
    )
    assert b'{"' + escaped + b'":' in built({key: (0, 1)})[1]


@pytest.mark.parametrize("chunks", [[b"abc"], [b"abcde"], [b"ab", b"cd", b"e"], []])
def test_a_wrong_declared_length_leaves_the_archive_as_it_was(tmp_path, chunks):
    with CafWriter(tmp_path / "a.caf") as writer, CafWriter(tmp_path / "b.caf") as untouched:
        for target in (writer, untouched):
            target.add("first", 2, [b"11"])
        with pytest.raises(MemberRefused):
            writer.add("wrong", 4, chunks)
        for target in (writer, untouched):
            target.add("wrong", 3, [b"333"])
            target.seal()
            target.publish()
    assert (tmp_path / "a.caf").read_bytes() == (tmp_path / "b.caf").read_bytes()


def test_broken_body_leaves_the_archive_unchanged(tmp_path):
    def broken():
        yield b"half"
        raise ConnectionError("gone")

    with CafWriter(tmp_path / "a.caf") as writer:
        with pytest.raises(ConnectionError):
            writer.add("broken", 8, broken())
        assert writer.add("whole", 1, [b"x"]) == (0, 1)
        writer.seal()
        writer.publish()
    assert CafReader.open(MemoryRanges((tmp_path / "a.caf").read_bytes())).read("whole") == b"x"


@pytest.mark.parametrize("key", ["twice", "lone \ud800"])
def test_invalid_key_is_refused_before_reading_the_body(tmp_path, key):
    def untouchable():
        raise AssertionError("a byte was asked for")
        yield b""

    with CafWriter(tmp_path / "a.caf") as writer:
        writer.add("twice", 0, [])
        with pytest.raises(MemberRefused):
            writer.add(key, 1, untouchable())


def finished(writer) -> bytes:
    writer.seal()
    writer.publish()
    return writer.path.read_bytes()


@given(st.dictionaries(KEYS, st.binary(max_size=40), min_size=1, max_size=12), st.data())
def test_neighbours_added_together_match_single_adds(tmp_path_factory, bodies, data):
    folder, keys = tmp_path_factory.mktemp("archives"), data.draw(st.permutations(list(bodies)))
    cuts = sorted({0, len(keys), *data.draw(st.lists(st.integers(0, len(keys)), max_size=3))})
    with CafWriter(folder / "singly.caf") as singly, CafWriter(folder / "at once.caf") as at_once:
        for key in keys:
            singly.add(key, len(bodies[key]), [bodies[key]])
        for first, last in pairwise(cuts):
            together = [bodies[key] for key in keys[first:last]]
            at_once.add_neighbours(
                keys[first:last], [*map(len, together)], memoryview(b"".join(together))
            )
        assert (at_once.size_bytes, at_once.member_count) == (
            singly.size_bytes,
            singly.member_count,
        )
        assert finished(at_once) == finished(singly)


def add_singly(writer, keys):
    for key in keys:
        writer.add(key, 2, [b"22"])


def add_at_once(writer, keys):
    writer.add_neighbours(keys, [2] * len(keys), memoryview(b"22" * len(keys)))


@pytest.mark.parametrize(
    "keys", [["b", "there"], ["b", "b"], ["b", "lone \ud800"], ["b", "c", "over the limit"]]
)
def test_neighbours_are_refused_as_they_are_singly(tmp_path, keys):
    pieces = []
    for add in (add_singly, add_at_once):
        with CafWriter(tmp_path / "a.caf", limits=Limits(max_members=3)) as writer:
            writer.add("there", 1, [b"x"])
            with pytest.raises((MemberRefused, ArchiveLimitReached)) as refused:
                add(writer, keys)
            pieces.append((refused.type, str(refused.value), finished(writer)))
    assert pieces[0] == pieces[1]


@pytest.mark.parametrize("bodies", [b"1", b"1223"])
def test_bodies_of_wrong_length_leave_the_archive_unchanged(tmp_path, bodies):
    with CafWriter(tmp_path / "a.caf") as writer:
        before = writer.size_bytes
        with pytest.raises(MemberRefused):
            writer.add_neighbours(["a", "b"], [1, 2], memoryview(bodies))
        assert writer.size_bytes == before
        assert len(CafReader.open(MemoryRanges(finished(writer)))) == 0


def exact_limits(**changed) -> Limits:
    """Return limits that two members of ten bytes exactly reach."""
    index_bytes = (
        EMPTY_INDEX_SIZE_BYTES
        + index_entry_size_bytes("a", 0, 10)
        + 1
        + index_entry_size_bytes("b", 10, 20)
    )
    size_bytes = 20 + index_bytes + FOOTER_SIZE_BYTES
    return Limits(
        **{"max_members": 2, "max_index_bytes": index_bytes, "max_bytes": size_bytes} | changed
    )


def test_an_archive_may_meet_its_limits_exactly(tmp_path):
    with CafWriter(tmp_path / "a.caf", limits=exact_limits()) as writer:
        writer.add("a", 10, [bytes(10)])
        writer.add("b", 10, [bytes(10)])
        writer.seal()
        writer.publish()
    assert (tmp_path / "a.caf").stat().st_size == exact_limits().max_bytes


@pytest.mark.parametrize("limit", ["max_members", "max_index_bytes", "max_bytes"])
def test_member_over_a_limit_is_refused_before_writing(tmp_path, limit):
    limits = exact_limits(**{limit: getattr(exact_limits(), limit) - 1})
    with CafWriter(tmp_path / "a.caf", limits=limits) as writer:
        writer.add("a", 10, [bytes(10)])
        before = writer.size_bytes
        with pytest.raises(ArchiveLimitReached):
            writer.add("b", 10, [bytes(10)])
        assert writer.size_bytes == before


def test_an_exception_leaves_nothing_behind(tmp_path):
    def fail_inside(writer):
        with writer:
            writer.add("a", 1, [b"x"])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_inside(CafWriter(tmp_path / "a.caf"))
    assert os.listdir(tmp_path) == []


def test_the_older_archive_stands_until_the_new_one_is_whole(tmp_path):
    (tmp_path / "a.caf").write_bytes(b"older")
    with CafWriter(tmp_path / "a.caf") as writer:
        writer.add("a", 1, [b"x"])
        writer.seal()
        assert (tmp_path / "a.caf").read_bytes() == b"older"
        writer.publish()
    assert (tmp_path / "a.caf").stat().st_size == writer.size_bytes
    assert os.listdir(tmp_path) == ["a.caf"]


def test_invalid_range_is_refused():
    index = IndexBuilder()
    for start_byte, end_byte in ((2, 1), (-1, 1)):
        with pytest.raises(MemberRefused):
            index.add("a", start_byte, end_byte)
    assert index.member_count == 0
