"""The steps of a chunk with a store of several providers: admission, copies, kept files."""

import os

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import (
    CafError,
    ChunkTooLarge,
    IntegrityError,
    LeaseLost,
    NotProven,
    StoreError,
)
from caf_pipeline.ledger.records import OperatorControls, chunk_lease
from caf_pipeline.steps import chunk_steps
from caf_pipeline.throttle import Throttle
from caf_pipeline_tests.contracts.chunk_store import corrupt
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.run_contexts import (
    a_run_context,
    archive_chunk,
    archive_everything,
    first_chunk,
    plan,
)
from caf_pipeline_tests.support.several_folders import SeveralFolders


@pytest.fixture
def source():
    return MemorySource({f"key-{number:03d}": os.urandom(40_000) for number in range(40)})


@pytest.fixture
def store(tmp_path):
    return SeveralFolders(tmp_path / "several")


@pytest.fixture
def context(tmp_path, source, ledger, store):
    return a_run_context(tmp_path, source, ledger, store=store)


def staged_files(context):
    return sorted(path.name for path in context.staging().iterdir())


def uploaded_chunk(context):
    name = first_chunk(context, until=chunk_steps.upload_chunk)
    return context.ledger.chunks.get(name)


# --- before it is packed, and before it is posted ---


def test_chunk_without_room_in_store_fails_before_any_fetch(context, source, store):
    (chunk, *_) = plan(context).chunks
    store.free_bytes = 1000
    with pytest.raises(
        StoreError, match=f"1000 bytes are free, {chunk.expected_size_bytes} are needed"
    ):
        archive_chunk(context, chunk.name)
    assert (source.reads, context.ledger.chunks.get(chunk.name).state) == ([], ChunkState.PLANNED)


def test_what_other_chunks_are_about_to_post_counts_before_packing(context, store):
    first, second = plan(context).chunks
    archive_chunk(context, first.name, until=chunk_steps.load_batch)
    archive_chunk(context, second.name, until=chunk_steps.load_batch)
    assert store.admitted == [
        (first.expected_size_bytes, 0),
        (second.expected_size_bytes, first.expected_size_bytes),
    ]
    archive_chunk(context, first.name, until=chunk_steps.seal_chunk)
    chunk_steps.load_batch(context, second.name)
    assert store.admitted[-1] == (
        second.expected_size_bytes,
        context.ledger.chunks.get(first.name).stored_size_bytes,
    )


def test_sealed_chunk_is_admitted_with_its_size_beside_posts(context, store):
    first, second = plan(context).chunks
    for chunk in (first, second):
        archive_chunk(context, chunk.name, until=chunk_steps.seal_chunk)
    store.admitted.clear()
    chunk_steps.post_file(context, first.name)
    assert store.admitted[0] == (context.ledger.chunks.get(first.name).stored_size_bytes, 0)


def test_sealed_chunk_refused_by_all_providers_is_withdrawn_and_recut(context, store):
    names = [chunk.name for chunk in plan(context).chunks]
    archive_chunk(context, names[0], until=chunk_steps.seal_chunk)
    store.largest = 300_000
    with pytest.raises(ChunkTooLarge, match="withdrawn") as caught:
        chunk_steps.post_file(context, names[0])
    assert caught.value.fitting_bytes == 300_000
    assert (context.ledger.chunks.get(names[0]).state, staged_files(context)) == (
        ChunkState.WITHDRAWN,
        [],
    )
    with pytest.raises(CafError, match=r"withdrawn: .* too long"):
        chunk_steps.post_file(context, names[0])
    report = plan(context)
    assert len(report.chunks) > 1
    assert all(chunk.expected_size_bytes <= 300_000 for chunk in report.chunks)
    assert "300000" in report.warning
    for chunk in report.chunks:
        archive_chunk(context, chunk.name)
    assert context.ledger.lookup.locate("src", "key-000") is not None


def test_plan_warns_of_target_size_too_slow_to_upload(context, store):
    store.largest = 300_000
    report = plan(context)
    assert "only 300000 bytes" in report.warning
    assert max(chunk.expected_size_bytes for chunk in report.chunks) > 300_000


def test_a_target_size_that_fits_is_not_warned_about(context, store):
    store.largest = 64 << 20
    assert plan(context).warning == ""


def test_chunk_stays_under_target_of_its_plan(context, store, source):
    from caf_pipeline.inventory.headers import ObjectHeaders

    name = first_chunk(context, until=chunk_steps.seal_chunk)
    store.largest = 300_000
    with pytest.raises(ChunkTooLarge):
        chunk_steps.post_file(context, name)
    source.headers = {key: ObjectHeaders(user_metadata={"m": "x" * 2000}) for key in source.bodies}
    for chunk in plan(context).chunks:
        archive_chunk(context, chunk.name)
        assert context.ledger.chunks.get(chunk.name).stored_size_bytes <= 300_000


# --- what counts as a copy ---


def test_right_copies_are_recorded_and_wrong_one_is_not(tmp_path, source, ledger):
    context = a_run_context(
        tmp_path, source, ledger, store=SeveralFolders(tmp_path / "several", required=2)
    )
    chunk = uploaded_chunk(context)
    corrupt(context.store.file("bert", chunk_steps.posting_of(chunk)))
    report = chunk_steps.verify_stored(context, chunk.name)
    assert [copy.provider for copy in report.copies] == ["anna", "carl"]
    assert [copy.provider for copy in ledger.replicas.list(chunk.name)] == ["anna", "carl"]


def test_too_few_copies_name_right_and_wrong_providers(context, store):
    chunk = uploaded_chunk(context)
    corrupt(store.file("bert", chunk_steps.posting_of(chunk)))
    with pytest.raises(IntegrityError, match=r"2 of 3 .*anna, carl; bert: differs"):
        chunk_steps.verify_stored(context, chunk.name)
    assert context.ledger.chunks.get(chunk.name).state is ChunkState.UPLOADING


def test_unlisted_or_silent_copy_counts_as_missing(context, store):
    chunk = uploaded_chunk(context)
    store.unlisted, store.away = {"anna"}, {"bert"}
    with pytest.raises(NotProven, match=r"1 of 3 .*right at carl; bert .*away"):
        chunk_steps.verify_stored(context, chunk.name)
    store.away = set()
    archive_chunk(context, chunk.name)
    assert context.ledger.chunks.get(chunk.name).state is ChunkState.LOCATED


def test_what_is_sent_is_told_of(context):
    sizes = []
    context.waits.sent = sizes.append
    chunk = uploaded_chunk(context)
    assert sum(sizes) == 3 * chunk.stored_size_bytes


def test_verified_chunk_is_located_without_file_and_store(context, store):
    chunk = uploaded_chunk(context)
    chunk_steps.verify_stored(context, chunk.name)
    chunk_steps.staged_path(context, chunk.name).unlink()
    for provider in store.folders:
        corrupt(store.file(provider, chunk_steps.posting_of(chunk)))
    chunk_steps.load_locations(context, chunk.name)
    assert context.ledger.lookup.locate("src", "key-000").chunk == chunk.name


# --- what is kept in staging ---


def test_located_chunk_stays_staged_while_store_wants_it(context, store):
    store.hold = 3600
    names = archive_everything(context)
    assert staged_files(context) == [f"{name}.caf" for name in sorted(names)]


def test_kept_files_make_room_in_order_of_location(tmp_path, ledger, store):
    source = MemorySource({f"key-{number:03d}": os.urandom(40_000) for number in range(60)})
    context = a_run_context(
        tmp_path, source, ledger, store=store, target="500KiB", packing={"staging_limit": "1600KiB"}
    )
    store.hold = 3600
    names = archive_everything(context)
    assert len(names) > 4
    assert staged_files(context) == [f"{name}.caf" for name in names[-3:]]


def test_kept_file_in_use_is_not_removed(tmp_path, database, store):
    from caf_pipeline.ledger.ledger import Ledger

    ledger = Ledger(database, lease_seconds=1.5)
    source = MemorySource({f"key-{number:03d}": os.urandom(40_000) for number in range(20)})
    context = a_run_context(
        tmp_path, source, ledger, store=store, target="500KiB", packing={"staging_limit": "550KiB"}
    )
    other = a_run_context(tmp_path, source, ledger, store=store, run="run-2", target="500KiB")
    store.hold = 3600
    first, second = [chunk.name for chunk in plan(context).chunks][:2]
    archive_chunk(context, first)
    with ledger.leases.hold(chunk_lease(first), other.holder):
        chunk_steps.load_batch(context, second)
        chunk_steps.pack_chunk(context, second)  # kept files do not count: they are not reserved
        assert f"{first}.caf" in staged_files(context)


def test_kept_files_are_not_counted_against_the_limit(tmp_path, source, ledger, store):
    context = a_run_context(
        tmp_path, source, ledger, store=store, packing={"staging_limit": "1100KiB"}
    )
    store.hold = 3600
    for name in archive_everything(context):
        assert context.ledger.chunks.get(name).state is ChunkState.LOCATED


# --- reading the index, and the throttle ---


def test_the_index_is_opened_once_while_sealing(context, monkeypatch):
    opened = []

    def counted(source, name, original=chunk_steps.ChunkFile):
        opened.append(name)
        return original(source, name)

    monkeypatch.setattr(chunk_steps, "ChunkFile", counted)
    name = first_chunk(context, until=chunk_steps.seal_chunk)
    assert opened == [name]


class Pausing:
    """Controls whose pause ends after a number of waits; `looks` has what `look` returned."""

    def __init__(self, look, *, waits=1):
        self.paused, self.waits, self.looks, self.now = "", waits, [], 0.0
        self.look = look
        self.throttle = Throttle(self.current, clock=lambda: self.now, sleep=self.sleep)

    def current(self):
        return OperatorControls(paused=self.paused)

    def sleep(self, seconds):
        self.now += 10
        self.looks.append(self.look())
        if len(self.looks) >= self.waits:
            self.paused = ""


@pytest.mark.parametrize("state", ["planned", "sealed", "uploading", "verified"])
def test_a_step_does_not_begin_while_everything_is_paused(tmp_path, source, ledger, store, state):
    context = a_run_context(tmp_path, source, ledger, store=store)
    name = first_chunk(context)
    steps = {
        "sealed": chunk_steps.seal_chunk,
        "uploading": chunk_steps.upload_chunk,
        "verified": chunk_steps.verify_stored,
    }
    if state in steps:
        archive_chunk(context, name, until=steps[state])
    pausing = Pausing(lambda: str(ledger.chunks.get(name).state), waits=3)
    pausing.paused = "the chain is being upgraded"
    throttled = a_run_context(tmp_path, source, ledger, store=store, throttle=pausing.throttle)
    archive_chunk(throttled, name)
    assert pausing.looks == [state] * 3
    assert ledger.chunks.get(name).state is ChunkState.LOCATED


def test_pause_stops_packing_in_middle_of_large_object(tmp_path, ledger, store):
    class Ordered(MemorySource):
        def read(self, obj, start_byte, end_byte):
            if len(self.reads) == 3:
                pausing.paused = "wait"
                pausing.now += 10
            return super().read(obj, start_byte, end_byte)

    source = Ordered({"large": os.urandom(40 * 65_536)})
    pausing = Pausing(lambda: str(ledger.chunks.get(name).state))
    packing = {"part_size": "64KiB", "window_size": "1MiB", "max_requests": 1}
    context = a_run_context(
        tmp_path,
        source,
        ledger,
        store=store,
        target="8MiB",
        throttle=pausing.throttle,
        packing=packing,
    )
    name = first_chunk(context)
    archive_chunk(context, name)
    assert pausing.looks == ["packing"]


def test_a_lost_lease_ends_a_packing(context, monkeypatch):
    from caf_pipeline.ledger.leases import HeldLease

    name = first_chunk(context)
    chunk_steps.load_batch(context, name)
    checks = []

    def lost(self):
        checks.append(self.name)
        if len(checks) == 5:
            raise LeaseLost("another run took it over")

    monkeypatch.setattr(HeldLease, "check", lost)
    with pytest.raises(LeaseLost):
        chunk_steps.pack_chunk(context, name)
    assert staged_files(context) == []
