"""The steps of a chunk and a store of several providers: what is asked before packing, what counts as a copy, what is kept."""

import os

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import (
    CafError,
    ChunkTooLarge,
    IllegalMove,
    IntegrityError,
    LeaseLost,
    NotProven,
    StagingError,
    StoreError,
)
from caf_pipeline.ledger.records import OperatorControls, chunk_lease
from caf_pipeline.retrieval.reader import fetch
from caf_pipeline.steps import chunk_steps
from caf_pipeline.throttle import Throttle
from caf_pipeline_tests.contracts.chunk_store import corrupt
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.several_folders import SeveralFolders
from caf_pipeline_tests.support.workplaces import a_workplace, archive_chunk, archive_everything, plan


@pytest.fixture
def source():
    return MemorySource({f"key-{number:03d}": os.urandom(40_000) for number in range(40)})


@pytest.fixture
def store(tmp_path):
    return SeveralFolders(tmp_path / "several")


@pytest.fixture
def work(tmp_path, source, ledger, store):
    return a_workplace(tmp_path, source, ledger, store=store)


def staged_files(work):
    return sorted(path.name for path in work.staging().iterdir())


def uploaded_chunk(work):
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    archive_chunk(work, name, until=chunk_steps.upload_chunk)
    return work.ledger.chunk(name)


# --- before it is packed, and before it is posted ---


def test_a_chunk_that_the_store_has_no_room_for_fails_before_a_byte_is_fetched(work, source, store):
    (chunk, *_) = plan(work).chunks
    store.free_bytes = 1000
    with pytest.raises(StoreError, match=f"1000 bytes are free, {chunk.expected_size_bytes} are needed"):
        archive_chunk(work, chunk.name)
    assert (source.reads, work.ledger.chunk(chunk.name).state) == ([], ChunkState.PLANNED)


def test_what_other_chunks_are_about_to_post_counts_before_packing(work, store):
    first, second = plan(work).chunks
    archive_chunk(work, first.name, until=chunk_steps.load_batch)
    archive_chunk(work, second.name, until=chunk_steps.load_batch)
    assert store.admitted == [(first.expected_size_bytes, 0), (second.expected_size_bytes, first.expected_size_bytes)]
    archive_chunk(work, first.name, until=chunk_steps.seal_chunk)
    chunk_steps.load_batch(work, second.name)
    assert store.admitted[-1] == (second.expected_size_bytes, work.ledger.chunk(first.name).stored_size_bytes)


def test_a_sealed_chunk_is_asked_for_again_with_its_size_and_beside_posts_only(work, store):
    first, second = plan(work).chunks
    for chunk in (first, second):
        archive_chunk(work, chunk.name, until=chunk_steps.seal_chunk)
    store.admitted.clear()
    chunk_steps.post_file(work, first.name)
    assert store.admitted[0] == (work.ledger.chunk(first.name).stored_size_bytes, 0)


def test_a_sealed_chunk_that_no_provider_takes_is_withdrawn_and_its_objects_are_cut_again(work, store):
    names = [chunk.name for chunk in plan(work).chunks]
    archive_chunk(work, names[0], until=chunk_steps.seal_chunk)
    store.largest = 300_000
    with pytest.raises(ChunkTooLarge, match=r"is withdrawn: .* take too long") as caught:
        chunk_steps.post_file(work, names[0])
    assert (caught.value.fitting_bytes, "in chunks that fit" in caught.value.hint) == (300_000, True)
    assert (work.ledger.chunk(names[0]).state, staged_files(work)) == (ChunkState.WITHDRAWN, [])
    report = plan(work)
    assert len(report.chunks) > 1
    assert all(chunk.expected_size_bytes <= 300_000 for chunk in report.chunks)
    assert "this plan is cut at 300000 bytes" in report.warning
    for chunk in report.chunks:
        archive_chunk(work, chunk.name)
    assert work.ledger.locate("src", "key-000") is not None


def test_a_withdrawn_chunk_says_why_to_whoever_runs_it(work, store):
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    archive_chunk(work, name, until=chunk_steps.seal_chunk)
    store.largest = 1000
    with pytest.raises(ChunkTooLarge):
        chunk_steps.post_file(work, name)
    with pytest.raises(CafError, match=r"is withdrawn: .* take too long"):
        chunk_steps.post_file(work, name)


def test_a_target_size_that_cannot_be_uploaded_in_time_is_warned_about_in_the_plan(work, store):
    store.largest = 300_000
    report = plan(work)
    assert "only 300000 bytes" in report.warning
    assert max(chunk.expected_size_bytes for chunk in report.chunks) > 300_000


def test_a_target_size_that_fits_is_not_warned_about(work, store):
    store.largest = 64 << 20
    assert plan(work).warning == ""


def test_a_chunk_stays_under_the_target_that_its_plan_was_cut_at(work, store, source):
    from caf_pipeline.source.protocol import ObjectHeaders

    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    archive_chunk(work, name, until=chunk_steps.seal_chunk)
    store.largest = 300_000
    with pytest.raises(ChunkTooLarge):
        chunk_steps.post_file(work, name)
    source.headers = {key: ObjectHeaders(user_metadata={"m": "x" * 2000}) for key in source.bodies}
    for chunk in plan(work).chunks:
        archive_chunk(work, chunk.name)
        assert work.ledger.chunk(chunk.name).stored_size_bytes <= 300_000


def test_a_posted_chunk_is_not_withdrawn(work):
    chunk = uploaded_chunk(work)
    with pytest.raises(IllegalMove):
        chunk_steps.withdraw(work, chunk.name)
    assert staged_files(work) != []


# --- what counts as a copy ---


def test_enough_right_copies_are_recorded_and_a_wrong_one_is_not(tmp_path, source, ledger):
    work = a_workplace(tmp_path, source, ledger, store=SeveralFolders(tmp_path / "several", required=2))
    chunk = uploaded_chunk(work)
    corrupt(work.store.file("bert", chunk_steps.posting_of(chunk)))
    report = chunk_steps.verify_stored(work, chunk.name)
    assert [copy.provider for copy in report.copies] == ["anna", "carl"]
    assert [copy.provider for copy in ledger.known_copies(chunk.name)] == ["anna", "carl"]


def test_too_few_right_copies_are_refused_naming_who_has_it_right_and_who_differs(work, store):
    chunk = uploaded_chunk(work)
    corrupt(store.file("bert", chunk_steps.posting_of(chunk)))
    with pytest.raises(IntegrityError, match=r"2 of 3 copies .*right at anna, carl; bert: differs at bytes 0 to"):
        chunk_steps.verify_stored(work, chunk.name)
    assert work.ledger.chunk(chunk.name).state is ChunkState.UPLOADING


def test_a_copy_that_is_not_listed_or_does_not_answer_is_said_to_be_missing(work, store):
    chunk = uploaded_chunk(work)
    store.unlisted, store.away = {"anna"}, {"bert"}
    with pytest.raises(NotProven, match=r"1 of 3 copies .*right at carl; bert does not answer: bert is away"):
        chunk_steps.verify_stored(work, chunk.name)
    store.away = set()
    archive_chunk(work, chunk.name)
    assert work.ledger.chunk(chunk.name).state is ChunkState.LOCATED


def test_what_is_sent_is_told_of(work):
    told = []
    object.__setattr__(work, "upload_progress", told.append)
    chunk = uploaded_chunk(work)
    assert sum(told) == 3 * chunk.stored_size_bytes


def test_rows_come_from_bytes_with_the_chunks_root_where_its_staged_file_is_gone(work, store):
    chunk = uploaded_chunk(work)
    chunk_steps.verify_stored(work, chunk.name)
    chunk_steps.staged_path(work, chunk.name).unlink()
    store.file("anna", chunk_steps.posting_of(chunk)).write_bytes(os.urandom(chunk.stored_size_bytes))
    chunk_steps.load_locations(work, chunk.name)
    found = fetch(work.ledger, store, "src", "key-000")
    assert b"".join(found.pieces) == work.objects.bodies["key-000"]


def test_no_row_is_written_where_nobody_gives_a_verified_chunk_back_right(work, store):
    chunk = uploaded_chunk(work)
    chunk_steps.verify_stored(work, chunk.name)
    chunk_steps.staged_path(work, chunk.name).unlink()
    for provider in store.folders:
        corrupt(store.file(provider, chunk_steps.posting_of(chunk)))
    with pytest.raises(NotProven, match=r"anna: .*bert: .*carl: "):
        chunk_steps.load_locations(work, chunk.name)
    assert work.ledger.locate("src", "key-000") is None
    assert staged_files(work) == []


# --- what is kept in staging ---


def test_a_located_chunk_stays_in_staging_for_as_long_as_the_store_wants(work, store):
    store.hold = 3600
    names = archive_everything(work)
    assert staged_files(work) == [f"{name}.caf" for name in sorted(names)]


def test_kept_files_make_room_for_a_chunk_that_is_packed_those_located_first_before_the_others(tmp_path, ledger, store):
    source = MemorySource({f"key-{number:03d}": os.urandom(40_000) for number in range(60)})
    work = a_workplace(tmp_path, source, ledger, store=store, target="500KiB", packing={"staging_limit": "1600KiB"})
    store.hold = 3600
    names = archive_everything(work)
    assert len(names) > 4
    assert staged_files(work) == [f"{name}.caf" for name in names[-3:]]


def test_a_kept_file_that_a_run_works_with_is_not_removed(tmp_path, database, store):
    from caf_pipeline.ledger.postgres import Ledger

    ledger = Ledger(database, lease_seconds=1.5)
    source = MemorySource({f"key-{number:03d}": os.urandom(40_000) for number in range(20)})
    work = a_workplace(tmp_path, source, ledger, store=store, target="500KiB", packing={"staging_limit": "550KiB"})
    other = a_workplace(tmp_path, source, ledger, store=store, run="run-2", target="500KiB")
    store.hold = 3600
    first, second = [chunk.name for chunk in plan(work).chunks][:2]
    archive_chunk(work, first)
    with ledger.lease(chunk_lease(first), other.holder):
        chunk_steps.load_batch(work, second)
        chunk_steps.pack_chunk(work, second)  # kept files are no reason to refuse: they are not reserved
        assert f"{first}.caf" in staged_files(work)


def test_kept_files_are_not_counted_against_the_limit(tmp_path, source, ledger, store):
    work = a_workplace(tmp_path, source, ledger, store=store, packing={"staging_limit": "1100KiB"})
    store.hold = 3600
    for name in archive_everything(work):
        assert work.ledger.chunk(name).state is ChunkState.LOCATED


def test_a_chunk_that_does_not_fit_even_without_kept_files_is_refused(tmp_path, source, ledger, store):
    work = a_workplace(tmp_path, source, ledger, store=store, packing={"staging_limit": "100KiB"})
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    with pytest.raises(StagingError):
        archive_chunk(work, name)


# --- reading the index, and the throttle ---


def test_the_index_is_opened_once_while_sealing(work, monkeypatch):
    opened = []

    def counted(source, name, original=chunk_steps.ChunkFile):
        opened.append(name)
        return original(source, name)

    monkeypatch.setattr(chunk_steps, "ChunkFile", counted)
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    archive_chunk(work, name, until=chunk_steps.seal_chunk)
    assert opened == [name]


class Pausing:
    """Controls whose pause ends when the throttle has waited so often; `looks` has what `look` saw at each wait."""

    def __init__(self, look, *, waits=1):
        self.paused, self.waits, self.looks, self.now = "", waits, [], 0.0
        self.look = look
        self.throttle = Throttle(self, clock=lambda: self.now, sleep=self.sleep)

    def current(self):
        return OperatorControls(paused=self.paused)

    def sleep(self, seconds):
        self.now += 10
        self.looks.append(self.look())
        if len(self.looks) >= self.waits:
            self.paused = ""


@pytest.mark.parametrize("state", ["planned", "sealed", "uploading", "verified"])
def test_a_step_does_not_begin_while_everything_is_paused(tmp_path, source, ledger, store, state):
    work = a_workplace(tmp_path, source, ledger, store=store)
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    steps = {"sealed": chunk_steps.seal_chunk, "uploading": chunk_steps.upload_chunk, "verified": chunk_steps.verify_stored}
    if state in steps:
        archive_chunk(work, name, until=steps[state])
    pausing = Pausing(lambda: str(ledger.chunk(name).state), waits=3)
    pausing.paused = "the chain is being upgraded"
    throttled = a_workplace(tmp_path, source, ledger, store=store, throttle=pausing.throttle)
    archive_chunk(throttled, name)
    assert pausing.looks == [state] * 3
    assert ledger.chunk(name).state is ChunkState.LOCATED


def test_a_packing_under_way_obeys_a_pause_in_the_middle_of_a_large_object(tmp_path, ledger, store):
    class Ordered(MemorySource):
        def read(self, obj, start_byte, end_byte):
            if len(self.reads) == 3:
                pausing.paused = "wait"
                pausing.now += 10
            return super().read(obj, start_byte, end_byte)

    source = Ordered({"large": os.urandom(40 * 65_536)})
    pausing = Pausing(lambda: str(ledger.chunk(name).state))
    packing = {"part_size": "64KiB", "window_size": "1MiB", "fetch_threads": 1}
    work = a_workplace(tmp_path, source, ledger, store=store, target="8MiB", throttle=pausing.throttle, packing=packing)
    (name,) = [chunk.name for chunk in plan(work).chunks]
    archive_chunk(work, name)
    assert pausing.looks == ["packing"]


def test_a_lost_lease_ends_a_packing(work, monkeypatch):
    from caf_pipeline.ledger.leases import HeldLease

    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    chunk_steps.load_batch(work, name)
    checks = []

    def lost(self):
        checks.append(self.name)
        if len(checks) == 5:
            raise LeaseLost("another run took it over")

    monkeypatch.setattr(HeldLease, "check", lost)
    with pytest.raises(LeaseLost):
        chunk_steps.pack_chunk(work, name)
    assert staged_files(work) == []
