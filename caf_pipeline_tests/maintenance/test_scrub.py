"""The proof watch: results, records and changes of a look at a located chunk."""

import os
import threading

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import CafError, PrivateAddress, StoreAway, StoreUnreachable
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.maintenance.repair import repair_chunk
from caf_pipeline.maintenance.scrub import CHUNKS_AT_ONCE, prove_chunk, prove_oldest
from caf_pipeline.packing import staging
from caf_pipeline.steps import chunk_steps
from caf_pipeline.system.processes import this_process
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import (
    a_run_context,
    archive_everything,
    first_chunk,
)
from caf_pipeline_tests.support.several_folders import SeveralFolders


@pytest.fixture
def context(tmp_path, ledger, store):
    source = MemorySource({f"key-{number:03d}": os.urandom(40_000) for number in range(40)})
    return a_run_context(tmp_path, source, ledger, store=store)


@pytest.fixture
def name(context):
    return archive_everything(context)[0]


def posting(context, name):
    return chunk_steps.posting_of(context.ledger.chunks.get(name))


def overwrite(path):
    """Change every piece of a file, so that every look detects it."""
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def test_chunk_with_right_copies_stays_located(context, name):
    report = prove_chunk(context, name)
    assert (report.proven, report.chunk.state) == (True, ChunkState.LOCATED)
    assert list(report.read_back) == ["anna", "bert", "carl"]
    assert report.chunk.checked_at is not None


def test_result_for_each_copy_is_recorded(context, store, name):
    for store.window in (4, 5, 5):
        prove_chunk(context, name)
    copies = context.ledger.replicas.list(name)
    assert [(copy.provider, copy.listed, copy.fault, copy.windows) for copy in copies] == [
        (provider, True, "", 2) for provider in ("anna", "bert", "carl")
    ]


def test_chunk_with_too_few_proofs_is_unverified(context, store, name):
    store.window = store.now = 4
    store.unverified = {"bert"}
    report = prove_chunk(context, name)
    assert (report.verdict, report.proven, report.chunk.state) == (
        "unverified",
        False,
        ChunkState.LOCATED,
    )
    assert "2 of 3 copies" in report.unverified
    assert "bert: " in report.unverified
    assert {copy.provider: copy.windows for copy in context.ledger.replicas.list(name)} == {
        "anna": 1,
        "bert": 0,
        "carl": 1,
    }
    store.unverified = set()
    assert prove_chunk(context, name).verdict == "proven"


def test_a_store_without_windows_has_nothing_to_verify(context, store, name):
    store.unverified = {"anna", "bert", "carl"}
    assert prove_chunk(context, name).proven


@pytest.mark.thorough
def test_unverified_chunk_is_looked_at_first_next_window(context, store):
    first, second = archive_everything(context)
    store.window = store.now = 4
    store.window_ends_in = lambda posting: 0.0  # the next window has begun before the next look
    store.unverified = {"bert"}
    prove_chunk(context, first)
    store.unverified = set()
    prove_chunk(context, second)
    for window in (5, 6):
        store.window = store.now = window
        prove_chunk(context, second)
    assert [report.chunk.name for report in prove_oldest(context, 1)] == [first]


def test_proof_of_a_future_window_does_not_count(context, store, name):
    store.window, store.now = 9, 4
    prove_chunk(context, name)
    assert {copy.windows for copy in context.ledger.replicas.list(name)} == {0}


class Forgetful:
    """A store whose provider keeps only what was requested before `stop`."""

    def __init__(self, store, provider):
        self.asked, self.learns, honest = [], True, store.read

        def read(at, start, end, **named):
            right = b"".join(honest(at, start, end, **named))
            if named.get("provider") == provider and self.learns:
                self.asked.append((start, end))
            elif named.get("provider") == provider and not any(
                begin <= start and end <= until for begin, until in self.asked
            ):
                right = bytes(len(right))
            return iter([right])

        store.read = read

    def stop(self):
        self.learns = False


def test_provider_without_the_unforeseen_object_is_detected(tmp_path, ledger, store):
    bodies = {f"key-{number:04d}": os.urandom(4_000) for number in range(1500)}
    context = a_run_context(tmp_path, MemorySource(bodies), ledger, store=store, target="8MiB")
    bert = Forgetful(store, "bert")
    (name,) = archive_everything(context)
    assert prove_chunk(context, name).proven
    bert.stop()
    looks = 0
    while prove_chunk(
        context, name
    ).proven:  # samples are a sixth of the chunk, and may contain an object
        looks += 1
        assert looks < 50
    assert "bert: read as a whole: " in context.ledger.chunks.get(name).reason


def test_wrong_row_is_no_fault_of_the_copies(context, name, database):
    with connected(database) as connection:
        connection.execute("UPDATE file_locations SET sha256 = sha256('x')")
    report = prove_chunk(context, name)
    assert (report.proven, list(report.read_back)) == (True, ["anna", "bert", "carl"])


def test_a_listed_copy_that_is_proven_no_more_is_damage(context, store, name):
    store.window, store.now = 4, 6
    assert prove_chunk(context, name).proven
    store.now = 7
    report = prove_chunk(context, name)
    assert (report.proven, report.chunk.state) == (False, ChunkState.DAMAGED)
    assert "window 4" in report.explanation


def test_first_look_compares_all_samples_and_later_looks_two(context, store, name, monkeypatch):
    asked = []
    original = store.read

    def counted(*arguments, **named):
        asked.append(arguments[1])
        return original(*arguments, **named)

    monkeypatch.setattr(store, "read", counted)
    prove_chunk(context, name)
    assert len(asked) == 3 * (len(context.ledger.chunks.get(name).samples) + 1)
    asked.clear()
    prove_chunk(context, name)
    assert len(asked) == 3 * 2


@pytest.mark.thorough
def test_fewer_copies_than_required_make_a_chunk_damaged(context, store, name):
    store.unlisted = {"bert"}
    report = prove_chunk(context, name)
    assert (report.proven, report.chunk.state) == (False, ChunkState.DAMAGED)
    assert report.chunk.reason == report.explanation
    assert "2 of 3" in report.explanation
    assert {copy.provider for copy in context.ledger.replicas.list(name) if not copy.listed} == {
        "bert"
    }
    store.unlisted = set()
    again = prove_chunk(context, name)  # it is not repaired
    assert (again.proven, again.chunk.state) == (False, ChunkState.DAMAGED)


@pytest.mark.thorough
def test_lying_provider_makes_a_chunk_damaged(context, store, name):
    prove_chunk(context, name)
    overwrite(store.file("carl", posting(context, name)))
    report = prove_chunk(context, name)
    assert report.chunk.state is ChunkState.DAMAGED
    assert "carl: " in report.chunk.reason
    assert list(report.read_back) == ["anna", "bert"]


@pytest.mark.thorough
def test_wrong_copy_damages_a_chunk_with_enough_copies(context, store, name):
    store.required_copies = 2
    overwrite(store.file("carl", posting(context, name)))
    assert prove_chunk(context, name).chunk.state is ChunkState.DAMAGED


def test_a_provider_that_has_lost_the_bytes_is_no_copy(context, store, name):
    store.file("anna", posting(context, name)).unlink()
    assert prove_chunk(context, name).chunk.state is ChunkState.DAMAGED


def test_a_chunk_that_is_no_longer_listed_is_damaged(context, store, name):
    store.forget(posting(context, name))
    report = prove_chunk(context, name)
    assert report.chunk.state is ChunkState.DAMAGED
    assert "no longer lists" in report.explanation


def test_unreachable_store_is_an_error_but_no_damage(context, store, name):
    store.away = {"anna", "bert", "carl"}
    with pytest.raises(StoreUnreachable, match="anna is away"):
        prove_chunk(context, name)
    chunk = context.ledger.chunks.get(name)
    assert (chunk.state, chunk.checked_at) == (ChunkState.LOCATED, None)


def test_unreachable_listed_provider_is_no_damage(context, store, name):
    store.away = {"bert"}
    report = prove_chunk(context, name)
    assert (report.verdict, list(report.read_back)) == ("unanswered", ["anna", "carl"])
    assert report.chunk.state is ChunkState.LOCATED


@pytest.mark.thorough
def test_fault_persists_while_its_provider_is_silent(context, store, name):
    overwrite(store.file("bert", posting(context, name)))
    prove_chunk(context, name)
    store.away = {"bert"}
    assert not prove_chunk(context, name).proven
    assert [copy.provider for copy in context.ledger.replicas.list(name) if copy.fault] == ["bert"]


def test_a_chunk_under_way_is_not_proven(context):
    name = first_chunk(context)
    with pytest.raises(CafError, match="is 'planned'"):
        prove_chunk(context, name)


def test_chunk_held_by_another_run_is_skipped(tmp_path, database, store):
    from caf_pipeline.ledger.ledger import Ledger

    ledger = Ledger(database, lease_seconds=1.5)
    context = a_run_context(tmp_path, MemorySource({"a": b"a"}), ledger, store=store)
    (name,) = archive_everything(context)
    with ledger.leases.hold(chunk_lease(name), this_process("run-2")):
        assert list(prove_oldest(context, 10)) == []


def test_kept_files_are_swept_when_their_hold_is_over(context, store):
    store.hold = 3600
    names = archive_everything(context)
    assert list(staging.sweep(context)) == []
    store.hold = 1e-6
    assert sorted(staging.sweep(context)) == sorted(names)
    assert list(context.staging().iterdir()) == []


def test_a_file_that_is_not_ours_is_not_swept(context, store, name):
    (context.staging() / "somebody.caf").write_bytes(b"theirs")
    (context.staging() / f"{name}.caf").write_bytes(b"ours")
    assert list(staging.sweep(context)) == [name]


@pytest.mark.parametrize("error", [StoreUnreachable, PrivateAddress])
def test_chunk_without_answers_does_not_delay_others(context, store, error):
    first, *others = archive_everything(context)
    roots = posting(context, first).merkle_root
    asked = store.read

    def read(at, *arguments, **named):
        if at.merkle_root == roots:
            raise error("nobody answers")
        return asked(at, *arguments, **named)

    store.read = read
    reports = prove_oldest(context, 1)
    assert (silent := next(reports)).verdict == "unanswered"
    assert (silent.chunk.name, next(reports).chunk.name) == (first, others[0])
    with pytest.raises(StoreUnreachable) as raised:
        next(reports)
    assert raised.type is error
    assert context.ledger.chunks.get(first).state is ChunkState.LOCATED


# --- looks that are cut


def cut_at(store, provider):
    """Interrupt every look when it reads from a provider."""
    read_stored = store.read

    def read(*arguments, **named):
        if named["provider"] == provider:
            raise KeyboardInterrupt
        return read_stored(*arguments, **named)

    store.read = read


def damage(store, at, provider, how):
    if how == "lost":
        store.lost[provider] = (0, 1)
    else:
        overwrite(store.file(provider, at))


@pytest.mark.parametrize("how", ["lost", "wrong"])
def test_a_cut_look_records_the_fault_that_it_found(context, store, name, how):
    damage(store, posting(context, name), "anna", how)
    cut_at(store, "bert")
    with pytest.raises(KeyboardInterrupt):
        prove_chunk(context, name)
    chunk, copies = context.ledger.chunks.get(name), context.ledger.replicas.list(name)
    assert (chunk.state, "anna: " in chunk.reason) == (ChunkState.DAMAGED, True)
    assert [copy.provider for copy in copies if copy.fault] == ["anna"]
    assert all(copy.listed for copy in copies)
    assert chunk.checked_at is None
    del store.read
    assert repair_chunk(context, name).chunk.state is ChunkState.LOCATED


def test_a_cut_look_judges_by_no_number_of_copies(context, store, name):
    store.unlisted = {"carl"}
    store.away = {"anna"}
    cut_at(store, "bert")
    with pytest.raises(KeyboardInterrupt):
        prove_chunk(context, name)
    assert context.ledger.chunks.get(name).state is ChunkState.LOCATED
    assert [copy.listed for copy in context.ledger.replicas.list(name)] == [True] * 3


def test_a_whole_look_keeps_the_whole_reason(context, store, name):
    overwrite(store.file("anna", posting(context, name)))
    store.unlisted = {"carl"}
    report = prove_chunk(context, name)
    assert report.chunk.reason == report.explanation
    assert "0 of 3" not in report.explanation
    assert "1 of 3" in report.explanation


# --- side by side


def test_four_chunks_are_looked_at_by_one_request_a_provider(tmp_path, ledger):
    providers = ("anna", "bert", "carl", "dora", "emil")
    store = SeveralFolders(tmp_path / "several", providers)
    source = MemorySource({f"key-{number:03d}": os.urandom(40_000) for number in range(120)})
    context = a_run_context(tmp_path, source, ledger, store=store)
    names = archive_everything(context)
    assert len(names) > CHUNKS_AT_ONCE
    together, lock = threading.Barrier(CHUNKS_AT_ONCE), threading.Lock()
    read_stored, reading, most = store.read, [], set()

    def read(at, *arguments, **named):
        with lock:
            is_first = len(most) < CHUNKS_AT_ONCE
            most.add(at.merkle_root)
            reading.append((at.merkle_root, named["provider"]))
            assert len({provider for _, provider in reading}) == len(reading)
            assert len({root for root, _ in reading}) <= CHUNKS_AT_ONCE
        if is_first:
            together.wait(PATIENCE_SECONDS)
        pieces = list(read_stored(at, *arguments, **named))
        with lock:
            reading.remove((at.merkle_root, named["provider"]))
        return iter(pieces)

    store.read = read
    reports = list(prove_oldest(context, 100))
    assert [report.chunk.name for report in reports] == sorted(names)
    assert all(report.checks and not report.explanation for report in reports)


def test_the_limit_holds_for_looks_side_by_side(context):
    names = archive_everything(context)
    assert len(list(prove_oldest(context, len(names) - 1))) == len(names) - 1


def test_a_chunk_that_did_not_answer_is_looked_at_first(context, store):
    *_, last = archive_everything(context)
    list(prove_oldest(context, 10))
    store.away = {"bert"}
    prove_chunk(context, last)
    store.away = set()
    assert [report.chunk.name for report in prove_oldest(context, 1)] == [last]
    assert context.ledger.chunks.get(last).unanswered_at is None


def test_a_missing_answer_asks_for_every_sample_the_next_time(context, store, name, monkeypatch):
    prove_chunk(context, name)
    store.away = {*store.folders}
    with pytest.raises(StoreUnreachable):
        prove_chunk(context, name)
    assert context.ledger.chunks.get(name).unanswered_at is not None
    store.away = set()
    sample = context.ledger.chunks.get(name).samples[7]
    store.lost["anna"] = (sample.offset, sample.offset + 1)
    assert prove_chunk(context, name).chunk.state is ChunkState.DAMAGED


def test_a_silent_chunk_keeps_no_other_waiting(context, store):
    *others, last = archive_everything(context)
    store.away = {"bert"}
    prove_chunk(context, last)
    assert [report.chunk.name for report in prove_oldest(context, 1)] == [last, others[0]]


def test_silent_chunks_take_a_quarter_of_the_looks(context, store):
    names = archive_everything(context)
    store.away = {"bert"}
    for name in names:
        prove_chunk(context, name)
    assert len(list(prove_oldest(context, 4))) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("look", [prove_chunk, repair_chunk])
def test_an_unmounted_folder_marks_no_chunk_as_damaged(tmp_path, ledger, look):
    context = a_run_context(tmp_path, MemorySource({"key": b"x" * 40_000}), ledger)
    (name,) = archive_everything(context)
    context.store.folder.rename(tmp_path / "disk")
    context.store.folder.mkdir()
    with pytest.raises(StoreAway):
        look(context, name)
    assert ledger.chunks.get(name).state is ChunkState.LOCATED
    assert list(context.store.folder.iterdir()) == []
