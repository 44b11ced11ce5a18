"""One object read back: verified before the first byte, with fail-over between providers."""

import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import (
    IntegrityError,
    NotLocated,
    ObjectMissing,
    PrivateAddress,
    StoredChunkMissing,
    StoreUnreachable,
    UsageError,
)
from caf_pipeline.inventory.location_row import LocationRow
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.records import Location
from caf_pipeline.records import PostRecord
from caf_pipeline.retrieval import holders, reader
from caf_pipeline.retrieval.reader import ArchivedObject, save
from caf_pipeline_tests.contracts import chunk_store
from caf_pipeline_tests.contracts.chunk_store import corrupt, staged_file
from caf_pipeline_tests.support.ledger_rows import SOURCE, VERSION, archive, end, register, skip
from caf_pipeline_tests.support.plans import MOMENT
from caf_pipeline_tests.support.several_folders import SeveralFolders

CHUNK = os.urandom(3 << 20)


@pytest.fixture(params=[holders.ALONE_BYTES, 64 << 10], ids=["one-thread", "threads"])
def store(tmp_path, monkeypatch, request):
    """Returns a store; larger ranges than the parameter are read and written by several threads."""
    monkeypatch.setattr(holders, "ALONE_BYTES", request.param)
    return SeveralFolders(tmp_path / "store")


@pytest.fixture
def posting(store, tmp_path) -> PostRecord:
    return chunk_store.stored(store, staged_file(tmp_path, CHUNK))


def found(store, posting, start=1000, end=2_000_000, *, sha256=None):
    sha256 = sha256 or hashlib.sha256(CHUNK[start:end]).digest()
    row = LocationRow("a/key", "v1", "v1", start, end, "etag", MOMENT, sha256)
    return ArchivedObject(Location(row, "src-1-1", posting), store)


def test_pieces_have_at_most_one_mebibyte(store, posting):
    pieces = list(found(store, posting).pieces)
    assert b"".join(pieces) == CHUNK[1000:2_000_000]
    assert max(map(len, pieces)) <= 1 << 20


def test_next_provider_is_asked_after_wrong_bytes(store, posting):
    corrupt(store.file("anna", posting), at=1500)
    assert b"".join(found(store, posting).pieces) == CHUNK[1000:2_000_000]


def test_next_provider_is_asked_after_short_or_no_answer(store, posting):
    store.away = {"anna"}
    store.file("bert", posting).write_bytes(CHUNK[:5000])
    assert b"".join(found(store, posting).pieces) == CHUNK[1000:2_000_000]


def test_no_byte_is_returned_if_the_last_is_wrong(store, posting):
    for provider in store.folders:
        corrupt(store.file(provider, posting), at=1_999_999)
    with pytest.raises(IntegrityError, match=r"(?s)anna: .*bert: .*carl: "):
        next(found(store, posting).pieces)


def test_failed_save_leaves_no_file(store, posting, tmp_path):
    for provider in store.folders:
        corrupt(store.file(provider, posting), at=1_999_999)
    (folder := tmp_path / "out").mkdir()
    with pytest.raises(IntegrityError):
        save(found(store, posting), folder / "file")
    assert list(folder.iterdir()) == []


def test_a_holder_that_is_away_may_still_have_it_right(store, posting):
    store.away = {"anna"}
    for provider in ("bert", "carl"):
        corrupt(store.file(provider, posting), at=1500)
    with pytest.raises(StoreUnreachable, match="anna is away"):
        next(found(store, posting).pieces)


def test_chunk_without_providers_is_missing(store, posting):
    store.forget(posting)
    with pytest.raises(StoredChunkMissing):
        next(found(store, posting).pieces)


def test_saved_file_has_only_bytes_of_the_right_provider(store, posting, tmp_path):
    corrupt(store.file("anna", posting), at=1_500_000)
    save(found(store, posting), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == CHUNK[1000:2_000_000]


def test_failed_write_keeps_earlier_content_of_the_file(store, posting, tmp_path):
    with (tmp_path / "out").open("ab") as file:
        file.write(b"before")
        corrupt(store.file("anna", posting), at=1_500_000)
        found(store, posting).write_to(file)
        for provider in ("bert", "carl"):
            corrupt(store.file(provider, posting), at=1_999_999)
        with pytest.raises(IntegrityError):
            found(store, posting).write_to(file)
    assert (tmp_path / "out").read_bytes() == b"before" + CHUNK[1000:2_000_000]


def test_unseekable_file_receives_no_byte(store, posting):
    reads, writes = os.pipe()
    with open(reads, "rb") as pipe:
        with open(writes, "wb") as file, pytest.raises(OSError, match="Illegal seek"):
            found(store, posting, 1000, 2000).write_to(file)
        assert pipe.read() == b""


def test_link_target_is_written_and_the_link_stays(store, posting, tmp_path):
    for name in ("there", "missing"):
        (tmp_path / f"to-{name}").symlink_to(tmp_path / name)
    (tmp_path / "there").write_bytes(b"older")
    for name in ("there", "missing"):
        save(found(store, posting), tmp_path / f"to-{name}")
        assert (tmp_path / name).read_bytes() == CHUNK[1000:2_000_000]
        assert (tmp_path / f"to-{name}").is_symlink()


def test_a_private_file_that_is_replaced_stays_private(store, posting, tmp_path):
    (tmp_path / "out").touch(0o600)
    (tmp_path / "new").touch()
    (tmp_path / "link").symlink_to("out")
    for path in ("out", "link"):
        save(found(store, posting), tmp_path / path)
        assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o600
    save(found(store, posting), tmp_path / "newer")
    assert (tmp_path / "newer").stat().st_mode == (tmp_path / "new").stat().st_mode


def test_a_pipe_is_given_the_bytes_and_stays_a_pipe(store, posting, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as threads:
        read = threads.submit((tmp_path / "pipe").read_bytes)
        save(found(store, posting), tmp_path / "pipe")
        assert read.result() == CHUNK[1000:2_000_000]
    assert (tmp_path / "pipe").is_fifo()


def test_a_pipe_is_given_no_byte_of_a_wrong_object(store, posting, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(IntegrityError):  # the pipe, which has no reader, is not opened
        save(found(store, posting, sha256=b"\0" * 32), tmp_path / "pipe")


@pytest.mark.parametrize("path", ["", "/", "folder"])
def test_folder_as_target_is_refused_before_reading(store, posting, tmp_path, path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    store.forget(posting)
    with pytest.raises(UsageError, match="Is a directory"):
        save(found(store, posting), Path(path))


def test_an_empty_object_needs_no_holder(store, posting):
    store.forget(posting)
    assert list(found(store, posting, 5, 5).pieces) == []


def test_empty_object_with_another_sha256_is_refused(store, posting):
    with pytest.raises(IntegrityError):
        list(found(store, posting, 5, 5, sha256=b"\0" * 32).pieces)


def test_an_object_larger_than_memory_allows_is_compared_on_disk(store, posting, monkeypatch):
    monkeypatch.setattr(reader, "IN_MEMORY_BYTES", 64 << 10)
    assert b"".join(found(store, posting, 0, len(CHUNK)).pieces) == CHUNK


def test_a_disk_without_room_for_the_comparison_is_one_sentence(
    store, posting, small_disk, monkeypatch
):
    monkeypatch.setattr(reader, "IN_MEMORY_BYTES", 64 << 10)
    archived = ArchivedObject(found(store, posting, 0, len(CHUNK)).location, store, small_disk)
    with pytest.raises(UsageError, match="No space left"):
        next(archived.pieces)


SILENT, PRIVATE = StoreUnreachable("silent"), PrivateAddress("private")
WRONG, LOST = IntegrityError("wrong"), ObjectMissing("lost")


@pytest.mark.parametrize(
    ("errors", "first", "status"),
    [
        ([PRIVATE, PRIVATE], PRIVATE, 3),
        ([LOST, WRONG, PRIVATE], PRIVATE, 3),
        ([PRIVATE, WRONG, SILENT], SILENT, 7),
        ([LOST, WRONG], WRONG, 9),
        ([LOST, LOST], LOST, 9),
    ],
)
def test_read_error_names_its_cause_first(errors, first, status):
    error = holders.unreadable("it", dict(zip("abc", errors, strict=False)))
    assert (error.exit_code, isinstance(error, type(first))) == (status, True)
    assert str(first) in str(error)
    assert len(error.__notes__) == len(errors) - 1
    assert ("jackal.allow_private_addresses" in error.hint) == (first is PRIVATE)


def why(ledger, key, version=None):
    """Return message and hint of the error for a key that is not archived."""
    with pytest.raises(NotLocated) as raised:
        reader.fetch(ledger.lookup, None, SOURCE, key, version)
    return str(raised.value), raised.value.hint


def test_error_names_the_chunk_in_progress(ledger):
    (chunk,) = register(ledger, ["key"])
    for state in (ChunkState.PACKING, ChunkState.PARKED):
        end(ledger, chunk, state)
        message, hint = why(ledger, "key")
        assert f"{chunk} is '{state}'" in message
        assert ("caf unpark" in hint) == (state is ChunkState.PARKED)


def test_error_names_the_skip_reason_and_next_attempt(ledger):
    register(
        ledger,
        ["other"],
        skips=[
            skip("cold"),
            skip("a%FFb", SkipReason.UNSUPPORTED_KEY),
            skip("late", SkipReason.WAITING),
        ],
    )
    message, hint = why(ledger, "cold")
    assert "cold_storage (as S3 said)" in message
    assert " from 20" in hint
    assert " from 20" not in why(ledger, "a\udcffb")[1]
    assert "waits" in why(ledger, "late")[0]


@pytest.mark.parametrize("now", [SkipReason.COLD_STORAGE, SkipReason.WAITING])
@pytest.mark.parametrize("versions", [("v1", "v2"), ("v2", "v1")])
def test_latest_skipped_version_explains_the_error(ledger, now, versions):
    first, last = versions
    skips = [
        replace(skip("key", SkipReason.CHANGED), object_version=first, last_modified=MOMENT),
        replace(skip("key", now), object_version=last, last_modified=MOMENT + timedelta(days=1)),
    ]
    register(ledger, ["other"], skips=skips)
    assert ("waits" if now is SkipReason.WAITING else "cold_storage") in why(ledger, "key")[0]
    assert "as changed" in why(ledger, "key", first)[0]


def test_error_names_the_lost_chunk(ledger):
    chunk = archive(ledger, ["key"])
    end(ledger, chunk, ChunkState.DAMAGED, ChunkState.WITHDRAWN)
    assert f"{chunk}, which is 'withdrawn'" in why(ledger, "key")[0]
    (later,) = register(ledger, ["key"])
    assert later in why(ledger, "key")[0]


def test_error_explains_a_missing_version(ledger):
    archive(ledger, ["key"])
    ledger.skips.record(SOURCE, [replace(skip("key"), object_version="v2")])
    skipped = why(ledger, "key", "v2")[0]
    assert "'v2'" in skipped
    assert "cold_storage" in skipped
    message, hint = why(ledger, "key", "v3")
    assert "'v3'" in message
    assert VERSION in hint


def test_error_names_an_unknown_source_or_key(ledger):
    archive(ledger, ["key"], source="other")
    message, hint = why(ledger, "key")
    assert "source 'src'" in message
    assert "other" in hint
    archive(ledger, ["key"])
    assert "'kee'" in why(ledger, "kee")[0]


def test_error_for_an_empty_ledger_names_its_rebuild(ledger):
    register(ledger, ["key"])
    hint = why(ledger, "other")[1]
    assert "caf rebuild src" in hint
    assert "caf run" not in hint
