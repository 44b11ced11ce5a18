"""An object as a file, from providers that lie or fail: bytes, verification and requests."""

import io
import os
import random
import zipfile
from dataclasses import replace

import pytest

from caf_pipeline.errors import IntegrityError, StoredChunkMissing, StoreUnreachable
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval import object_file
from caf_pipeline.retrieval.object_file import ObjectFile
from caf_pipeline.retrieval.reader import ArchivedObject
from caf_pipeline_tests.contracts import chunk_store
from caf_pipeline_tests.contracts.chunk_store import corrupt, staged_file
from caf_pipeline_tests.support.breaking_folders import BreakingFolders
from caf_pipeline_tests.support.located_object import BODY, CHUNK, END, START, in_parts, whole


@pytest.fixture
def store(tmp_path):
    return BreakingFolders(tmp_path / "store")


@pytest.fixture
def posting(store, tmp_path):
    return chunk_store.stored(store, staged_file(tmp_path, CHUNK))


@pytest.fixture
def streamed(monkeypatch):
    """Stream objects of any size."""
    monkeypatch.setattr(object_file, "IN_MEMORY_BYTES", -1)
    monkeypatch.setattr(object_file, "BLOCK_BYTES", 1000)


@pytest.fixture(params=["whole", "in parts"])
def location(request, posting):
    return whole(posting) if request.param == "whole" else in_parts(posting, 50_000, 2_500_000)


@pytest.fixture(params=["in memory", "streamed"])
def _sized(request):
    if request.param == "streamed":
        request.getfixturevalue("streamed")


@pytest.mark.usefixtures("_sized")
def test_an_object_is_a_file_like_any_other(store, location):
    dice = random.Random(4)
    known = io.BytesIO(BODY)
    with ObjectFile(location, store) as file:
        for _ in range(60):
            match dice.randrange(4):
                case 0:
                    where = dice.choice(
                        [
                            0,
                            49_000,
                            len(BODY) - 10,
                            len(BODY),
                            len(BODY) + 5,
                            dice.randrange(len(BODY)),
                        ]
                    )
                    assert file.seek(where) == known.seek(where)
                case 1:
                    step = dice.randrange(-30, 30) if known.tell() > 30 else 3
                    assert file.seek(step, os.SEEK_CUR) == known.seek(step, os.SEEK_CUR)
                case 2:
                    assert file.seek(-7, os.SEEK_END) == known.seek(-7, os.SEEK_END)
                case 3:
                    size = dice.choice([0, 1, 100, 70_000, 1_500_000])
                    got = file.read(size)
                    assert got == known.read(len(got))
                    assert bool(got) == bool(size and file.tell() - len(got) < len(BODY))
        file.seek(0)
        assert (file.read(), file.compared) == (BODY, True)
        assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
    buffered = io.BufferedReader(ObjectFile(location, store))
    buffered.close()
    for closed in (
        lambda: file.read(1),
        lambda: file.seek(0),
        file.tell,
        file.readable,
        file.seekable,
        buffered.tell,
    ):
        with pytest.raises(ValueError, match="closed"):
            closed()


@pytest.mark.usefixtures("_sized")
def test_it_is_read_through_pythons_own_buffer(store, location):
    with io.BufferedReader(ObjectFile(location, store), 1 << 16) as file:
        assert (file.read(10), file.seek(3_000_000), file.read(10)) == (
            BODY[:10],
            3_000_000,
            BODY[3_000_000:3_000_010],
        )


def test_a_place_between_two_bytes_is_refused(store, location):
    with ObjectFile(location, store) as file, pytest.raises(TypeError, match="float"):
        file.seek(1.5)


def test_a_place_before_the_beginning_is_refused(store, location):
    file = ObjectFile(location, store)
    for arguments in [(-1,), (-1, os.SEEK_CUR), (0, 7)]:
        with pytest.raises(ValueError, match="no byte"):
            file.seek(*arguments)


def test_too_short_object_is_no_zip_file(store, posting):
    short = whole(posting, BODY[:9])
    with io.BufferedReader(
        ObjectFile(replace(short, row=replace(short.row, end_byte=START + 9)), store)
    ) as file:
        assert not zipfile.is_zipfile(file)
        file.seek(0)
        assert file.read() == BODY[:9]


def test_first_read_is_one_request_for_the_whole_object(store, posting):
    file = ObjectFile(whole(posting), store)
    file.seek(10)
    assert store.asked == []
    file.read(5)
    file.seek(0)
    file.read()
    assert store.asked == [("anna", START, END)]


@pytest.mark.usefixtures("streamed")
def test_stream_is_one_request_and_a_seek_another(store, posting):
    with ObjectFile(whole(posting), store) as file:
        assert file.read() == BODY
        assert file.seek(500_000) == 500_000
        assert len(file.read(10)) == 10
        assert len(file.read(10)) == 10
        assert store.asked == [("anna", START, END), ("anna", START + 500_000, START + 501_000)]


@pytest.mark.usefixtures("_sized")
def test_next_provider_continues_at_the_same_byte(store, location):
    store.breaks = {"anna": 10_000, "bert": 20_000}
    file = ObjectFile(location, store)
    assert (file.read(), file.compared) == (BODY, True)
    assert [request[:2] for request in store.asked[:3]] == [
        ("anna", START),
        ("bert", START + 10_000),
        ("carl", START + 30_000),
    ]


# --- verification
# ------------------------------------------------------------------------------------------


def test_small_object_never_returns_a_wrong_byte(store, location, posting):
    for provider in store.folders:
        corrupt(store.file(provider, posting), at=END - 1)
    file = ObjectFile(location, store)
    for place in (0, 5):
        file.seek(place)
        with pytest.raises(IntegrityError, match=r"(?s)anna: .*bert: .*carl: "):
            file.read(1)


def test_range_of_a_small_object_is_verified(store, location, posting):
    corrupt(store.file("anna", posting), at=END - 1)
    file = ObjectFile(location, store)
    file.seek(100)
    assert (file.read(50), file.compared) == (BODY[100:150], True)


@pytest.mark.usefixtures("streamed")
def test_wrong_stream_fails_and_is_readable_from_another_provider(store, posting):
    corrupt(store.file("anna", posting), at=START + 5)
    file = ObjectFile(whole(posting), store)
    got = iter(lambda: file.read(100_000), b"")
    with pytest.raises(IntegrityError, match="'a/key'"):
        list(got)
    assert 0 < file.tell() < len(BODY)
    assert not file.compared
    with pytest.raises(IntegrityError):  # the error is repeated
        file.read(1)
    file.seek(0)
    assert (file.read(), file.compared) == (BODY, True)
    assert store.asked == [("anna", START, END), ("bert", START, END)]


@pytest.mark.usefixtures("streamed")
def test_stream_without_a_right_provider_always_fails(store, posting):
    for provider in store.folders:
        corrupt(store.file(provider, posting), at=START)
    file = ObjectFile(whole(posting), store)
    for _ in range(4):
        with pytest.raises(IntegrityError):
            file.read()
        file.seek(0)
    with pytest.raises(IntegrityError, match=r"(?s)anna: .*bert: .*carl: "):
        file.read()


@pytest.mark.usefixtures("streamed")
def test_broken_stream_fails_until_a_seek(store, posting):
    store.breaks = dict.fromkeys(store.folders, 1_000_000)
    file = ObjectFile(whole(posting), store)
    with pytest.raises(StoreUnreachable, match="broke off"):
        file.read()
    store.breaks = {}
    with pytest.raises(StoreUnreachable):
        file.read(1)
    file.seek(0)
    assert file.read() == BODY


@pytest.mark.usefixtures("streamed")
def test_range_after_a_seek_is_not_verified(store, posting):
    corrupt(store.file("anna", posting), at=START + 600_000)
    file = ObjectFile(whole(posting), store)
    file.seek(600_000)
    assert file.read(1) != BODY[600_000:600_001]
    assert not file.compared
    file.seek(600_001)
    assert (file.read(1), file.compared) == (BODY[600_001:600_002], False)


@pytest.mark.usefixtures("streamed")
def test_each_part_is_verified_before_its_end(store, posting):
    corrupt(store.file("anna", posting), at=3_000_000)
    file = ObjectFile(in_parts(posting, 50_000, 2_500_000), store)
    first = file.read(49_000)
    assert (first, file.compared) == (BODY[:49_000], True)  # within the first piece
    with pytest.raises(IntegrityError):
        file.read()
    file.seek(0)
    assert (file.read(), file.compared) == (BODY, True)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("liar", ["anna", "bert"])
def test_right_provider_is_found_after_mixed_wrong_bytes(
    store, posting, monkeypatch, streams, liar
):
    if streams:
        monkeypatch.setattr(object_file, "IN_MEMORY_BYTES", -1)
    store.breaks = {"anna": 2_000_000}
    corrupt(store.file(liar, posting), at=START + (100 if liar == "anna" else 3_000_000))
    file = ObjectFile(whole(posting), store)
    for _ in range(4):
        try:
            assert file.read() == BODY
        except (IntegrityError, StoreUnreachable):
            assert streams
            file.seek(0)
        else:
            break
    else:
        pytest.fail("no provider was right")


def test_parts_that_do_not_make_up_the_object_are_refused(store, posting):
    location = in_parts(posting, 50_000)
    short = Location(location.row, location.chunk, posting, None, location.parts[:1])
    with pytest.raises(IntegrityError, match="have 49000 bytes of"):
        ObjectFile(short, store)


def test_chunk_without_providers_is_missing(store, posting):
    store.forget(posting)
    with pytest.raises(StoredChunkMissing):
        ObjectFile(whole(posting), store).read(1)


def test_compare_names_the_lying_provider(store, location, posting):
    corrupt(store.file("anna", posting), at=END - 1)
    found = ArchivedObject(location, store)
    assert list(found.compare()) == ["anna"]
    for provider in ("bert", "carl"):
        corrupt(store.file(provider, posting), at=END - 1)
    with pytest.raises(IntegrityError):
        found.compare()
