"""Chunks that a rebuild restored count as unread until their whole Merkle root was compared."""

import os

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import IntegrityError, StoreUnreachable
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.maintenance.full_read import OTHER_ROWS
from caf_pipeline.maintenance.rebuild import rebuild
from caf_pipeline.maintenance.repair import repair_chunk
from caf_pipeline.maintenance.scrub import prove_chunk, prove_oldest
from caf_pipeline.records import posting_of
from caf_pipeline_tests.support.forged_chunks import Forgery, put
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.new_ledgers import new_ledger  # noqa: F401 - a fixture
from caf_pipeline_tests.support.private_contexts import (
    IDENTITY,
    a_private_context,
    encrypt,
    sealed_again,
)
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything, object_bytes
from caf_pipeline_tests.support.several_folders import SeveralFolders

RIGHT = {"a": os.urandom(100_000), "b": os.urandom(100_000)}
FORGED = {"a": os.urandom(100_000), "b": os.urandom(100_000)}
SWAPPED = {"a": RIGHT["b"], "b": RIGHT["a"]}


class Liars(SeveralFolders):
    """Providers that return other bytes for a range than for the whole file."""

    for_ranges: bytes | None = None
    whole_reads = 0

    def read(self, posting, start_byte, end_byte, *, provider=None):
        is_whole = (start_byte, end_byte) == (0, posting.stored_size_bytes)
        self.whole_reads += is_whole
        if self.for_ranges is None or is_whole:
            return super().read(posting, start_byte, end_byte, provider=provider)
        return iter([self.for_ranges[start_byte:end_byte]])


@pytest.fixture
def store(tmp_path):
    return Liars(tmp_path / "store")


@pytest.fixture
def lost(tmp_path, ledger, store):
    """A context with an identity and a ledger that has lost its chunks."""
    return a_private_context(tmp_path, MemorySource(RIGHT), ledger, identity=IDENTITY, store=store)


@pytest.fixture
def posted(lost, store, tmp_path):
    """The stored bytes of a chunk of the lost ledger."""
    path = Forgery(lost.archive_id, RIGHT).write(tmp_path / "chunk")
    posting = put(store, path, lost.archive_id, header_sha256=encrypt(path))
    assert posting.stored_size_bytes == path.stat().st_size
    return path.read_bytes()


def forged(lost, posted, bodies, folder):
    content = Forgery(lost.archive_id, bodies).write(folder / "forged").read_bytes()
    stored = sealed_again(posted, content)
    assert len(stored) == len(posted)
    return stored


def replace_copies(store, content, *providers):
    (posting,) = store.posts.values()
    for provider in providers or store.folders:
        store.file(provider, posting).write_bytes(content)


def restored(context):
    (outcome,) = rebuild(context)
    return context.ledger.chunks.get(outcome.finding.name)


# --- the attack


def test_a_chunk_forged_at_every_provider_is_never_proven(lost, store, posted, tmp_path):
    replace_copies(store, forged(lost, posted, FORGED, tmp_path))
    chunk = restored(lost)
    assert object_bytes(lost, "a") == FORGED["a"]
    assert lost.ledger.lookup.unread_chunks("src") == {chunk.name: ""}
    (report,) = prove_oldest(lost, 10)
    assert (report.verdict, report.chunk.state) == ("damaged", ChunkState.DAMAGED)
    assert all("Merkle root" in check.fault for check in report.checks)
    assert report.chunk.unread


@pytest.mark.parametrize("bodies", [FORGED, SWAPPED])
def test_rows_of_bytes_forged_for_the_rebuild_alone_are_detected(
    lost, store, posted, tmp_path, bodies
):
    store.for_ranges = forged(lost, posted, bodies, tmp_path)
    chunk = restored(lost)
    assert object_bytes(lost, "a") == bodies["a"]
    (report,) = prove_oldest(lost, 10)
    assert (report.verdict, report.explanation) == ("damaged", OTHER_ROWS)
    assert report.chunk.unread
    assert [copy.fault for copy in lost.ledger.replicas.list(chunk.name)] == ["", "", ""]
    with pytest.raises(IntegrityError):
        repair_chunk(lost, chunk.name)
    assert lost.ledger.chunks.get(chunk.name).state is ChunkState.DAMAGED


def test_a_public_chunk_forged_at_every_provider_is_never_proven(tmp_path, ledger, store):
    context = a_run_context(tmp_path, MemorySource(RIGHT), ledger, store=store)
    put(store, Forgery(context.archive_id, RIGHT).write(tmp_path / "chunk"), context.archive_id)
    content = Forgery(context.archive_id, FORGED).write(tmp_path / "forged").read_bytes()
    replace_copies(store, content)
    restored(context)
    (report,) = prove_oldest(context, 10)
    assert report.verdict == "damaged"


# --- reading whole, once


def test_one_right_copy_is_read_whole_once(lost, store, posted):
    chunk = restored(lost)
    assert prove_chunk(lost, chunk.name).verdict == "unread"
    assert store.whole_reads == 0
    (report,) = prove_oldest(lost, 10)
    assert (report.verdict, store.whole_reads) == ("proven", 1)
    assert not report.chunk.unread
    assert lost.ledger.lookup.unread_chunks("src") == {}
    (report,) = prove_oldest(lost, 10)
    assert (report.verdict, store.whole_reads) == ("proven", 1)


def test_a_chunk_is_read_whole_without_an_identity(lost, store, posted, tmp_path, ledger):
    restored(lost)
    worker = a_private_context(tmp_path, MemorySource(RIGHT), ledger, store=store)
    (report,) = prove_oldest(worker, 10)
    assert report.verdict == "proven"


def test_a_wrong_copy_leaves_the_reading_to_the_next(lost, store, posted):
    chunk = restored(lost)
    replace_copies(store, bytes(len(posted)), "anna")
    report = prove_chunk(lost, chunk.name, whole=True)
    assert report.verdict == "damaged"
    assert [bool(check.fault) for check in report.checks] == [True, False, False]
    assert not report.chunk.unread


def test_a_silent_store_leaves_the_chunk_unread(lost, store, posted):
    chunk = restored(lost)
    store.away = set(store.folders)
    with pytest.raises(StoreUnreachable):
        list(prove_oldest(lost, 10))
    assert lost.ledger.chunks.get(chunk.name).unread
    store.away = set()
    (report,) = prove_oldest(lost, 10)
    assert report.verdict == "proven"


def test_an_interrupted_read_leaves_the_chunk_unread(lost, store, posted, monkeypatch):
    chunk = restored(lost)

    def interrupt(posting, start_byte, end_byte, **named):
        yield posted[: end_byte // 2]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store, "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prove_chunk(lost, chunk.name, whole=True)
    assert lost.ledger.chunks.get(chunk.name).unread


def test_a_short_watch_reads_one_chunk_whole(lost, store, tmp_path):
    for number in (1, 2, 3):
        forgery = Forgery(lost.archive_id, {f"key-{number}": os.urandom(50_000)}, number=number)
        path = forgery.write(tmp_path / str(number))
        put(store, path, lost.archive_id, header_sha256=encrypt(path))
    list(rebuild(lost))
    verdicts = [report.verdict for report in prove_oldest(lost, 10, whole_bytes=1)]
    assert sorted(verdicts) == ["proven", "unread", "unread"]
    assert len(lost.ledger.lookup.unread_chunks("src")) == 2


def test_other_looks_are_kept_for_other_chunks(lost, store, tmp_path):
    for number in (1, 2, 3, 4):
        forgery = Forgery(lost.archive_id, {f"key-{number}": os.urandom(50_000)}, number=number)
        path = forgery.write(tmp_path / str(number))
        put(store, path, lost.archive_id, header_sha256=encrypt(path))
    list(rebuild(lost))
    reports = list(prove_oldest(lost, 4, whole_bytes=1 << 30))
    assert [report.verdict for report in reports].count("proven") == 3


# --- what counts as read


def test_a_rebuild_that_compared_the_root_leaves_nothing_unread(lost, store, posted, tmp_path):
    path = Forgery(lost.archive_id, {"c": b"other"}).write(tmp_path / "of the same name")
    put(store, path, lost.archive_id, header_sha256=encrypt(path))
    list(rebuild(lost))
    assert len(lost.ledger.chunks.list("src", [ChunkState.LOCATED])) == 2
    assert lost.ledger.lookup.unread_chunks("src") == {}


def test_a_packed_chunk_is_not_unread(lost):
    archive_everything(lost)
    assert lost.ledger.lookup.unread_chunks("src") == {}


def test_a_repair_leaves_the_chunk_unread(lost, store, posted):
    chunk = restored(lost)
    store.file("anna", posting_of(chunk)).unlink()
    prove_chunk(lost, chunk.name)
    assert repair_chunk(lost, chunk.name).chunk.state is ChunkState.LOCATED
    assert lost.ledger.chunks.get(chunk.name).unread


def test_a_full_read_before_a_deletion_counts(lost, store, posted, ledger):
    chunk = restored(lost)
    with lost.lease(chunk_lease(chunk.name)) as lease:
        ledger.replicas.record_full_read(lease, chunk.name, "anna")
    assert not ledger.chunks.get(chunk.name).unread
