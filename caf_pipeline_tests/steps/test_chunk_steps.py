"""The steps of a chunk: what each leaves, what a crash or another run leaves, and that running again ends right."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import (
    CafError,
    HeldByOther,
    IntegrityError,
    NotLocated,
    ObjectReadFailed,
    SourceUnreachable,
    StagingError,
)
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.postgres import Ledger
from caf_pipeline.ledger.processes import this_process
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.packing.staging import staged_path
from caf_pipeline.retrieval.reader import fetch, save
from caf_pipeline.source.protocol import ObjectHeaders
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.steps.audit import account_for_chunk, fetch_members
from caf_pipeline.store.directory import DirectoryStore
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.plans import limit_to_target
from caf_pipeline_tests.support.tiers import sampled
from caf_pipeline_tests.support.workplaces import (
    CHUNK_STEPS,
    a_workplace,
    account_for_plan,
    archive_chunk,
    archive_everything,
    plan,
)


@pytest.fixture
def source():
    return MemorySource({f"key-{number:03d}": os.urandom(40_000) for number in range(40)} | {"empty": b"", "dir/": b""})


@pytest.fixture
def work(tmp_path, source, ledger):
    return a_workplace(tmp_path, source, ledger)


def states(work):
    return {chunk.name: chunk.state for chunk in work.ledger.chunks(source="src")}


def staged_files(work):
    return sorted(path.name for path in work.staging().iterdir())


def every_object_reads_back(work):
    for key, body in work.objects.bodies.items():
        assert b"".join(fetch(work.ledger, work.store, "src", key).pieces) == body


def test_every_object_ends_up_located_and_reads_back(work):
    names = archive_everything(work)
    assert len(names) > 1
    assert set(states(work).values()) == {ChunkState.LOCATED}
    every_object_reads_back(work)
    assert staged_files(work) == []


def test_the_accounts_agree_and_members_read_back(work):
    for name in archive_everything(work):
        account = account_for_chunk(work, name)
        assert (account.agrees, account.explanation) == (True, "")
        assert fetch_members(work, name).mismatched == []


def test_a_member_that_the_store_gives_back_with_other_bytes_is_named(work):
    archive_everything(work)
    location = work.ledger.locate("src", "key-003")
    file = work.store.folder / "chunks" / f"{location.posting.merkle_root.hex()}.caf"
    data = bytearray(file.read_bytes())
    data[location.row.start_byte] ^= 1
    file.write_bytes(data)
    found = fetch_members(work, location.chunk, members=100)
    assert found.tried == work.ledger.chunk(location.chunk).member_count
    assert [said.partition(" ")[0] for said in found.mismatched] == ["key-003"]


def test_a_second_plan_of_the_same_source_finds_nothing_new(work):
    archive_everything(work)
    report = plan(work)
    assert (report.plan, list(report.chunks)) == (None, [])
    assert account_for_plan(work, report).located == len(work.objects.bodies)


def test_only_new_objects_are_planned_again(work, source):
    archive_everything(work)
    source.bodies["new"] = b"new"
    report = plan(work)
    assert [chunk.object_count for chunk in report.chunks] == [1]


@pytest.mark.parametrize("last", sampled(CHUNK_STEPS, every=4), ids=lambda step: step.__name__)
def test_running_a_partition_again_from_the_start_ends_right_after_any_step(work, last):
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    archive_chunk(work, name, until=last)
    archive_chunk(work, name)
    assert states(work)[name] is ChunkState.LOCATED
    assert account_for_chunk(work, name).agrees


@pytest.mark.parametrize("step", sampled(CHUNK_STEPS, every=4), ids=lambda step: step.__name__)
def test_each_step_may_be_repeated(work, step):
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    archive_chunk(work, name, until=step)
    step(work, name)
    archive_chunk(work, name)
    assert states(work)[name] is ChunkState.LOCATED


def test_no_location_exists_before_the_store_was_verified(work):
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    archive_chunk(work, name, until=chunk_steps.upload_chunk)
    assert work.ledger.locate("src", "empty") is None
    archive_chunk(work, name, until=chunk_steps.verify_stored)
    assert work.ledger.locate("src", "empty") is None
    chunk_steps.load_locations(work, name)
    assert work.ledger.locate("src", "empty") is not None


def test_locations_are_loaded_without_reading_the_index(work, monkeypatch):
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    archive_chunk(work, name, until=chunk_steps.verify_stored)
    monkeypatch.setattr("caf_pipeline.packing.chunk_reader.CafReader.open", lambda *_, **__: pytest.fail("the index was read"))
    assert chunk_steps.load_locations(work, name).state is ChunkState.LOCATED


def test_a_copy_with_other_bytes_is_not_verified(work):
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    archive_chunk(work, name, until=chunk_steps.upload_chunk)
    (file,) = (work.store.folder / "chunks").iterdir()
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match="differs at bytes 0"):
        chunk_steps.verify_stored(work, name)
    assert states(work)[name] is ChunkState.UPLOADING


def test_what_was_lost_from_staging_before_the_post_is_packed_again(work):
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    archive_chunk(work, name, until=chunk_steps.seal_chunk)
    chunk_steps.staged_path(work, name).unlink()
    archive_chunk(work, name)
    assert account_for_chunk(work, name).agrees


def test_what_was_lost_from_staging_after_the_post_is_packed_to_the_same_root(work):
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    archive_chunk(work, name, until=chunk_steps.post_file)
    root = work.ledger.chunk(name).merkle_root
    chunk_steps.staged_path(work, name).unlink()
    archive_chunk(work, name)
    assert (states(work)[name], work.ledger.chunk(name).merkle_root) == (ChunkState.LOCATED, root)


def test_a_posted_chunk_that_cannot_be_packed_to_the_same_root_is_abandoned_and_planned_again(work, source):
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    archive_chunk(work, name, until=chunk_steps.post_file)
    chunk_steps.staged_path(work, name).unlink()
    source.unavailable["key-000"] = (SkipReason.CHANGED, -1)
    with pytest.raises(CafError, match="have changed since"):
        chunk_steps.upload_chunk(work, name)
    assert states(work)[name] is ChunkState.ABANDONED
    del source.unavailable["key-000"]
    archive_everything(work)
    assert work.ledger.locate("src", "key-000") is not None


def test_a_damaged_staged_file_is_not_posted(work):
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    archive_chunk(work, name, until=chunk_steps.seal_chunk)
    root = work.ledger.chunk(name).merkle_root
    path = chunk_steps.staged_path(work, name)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    archive_chunk(work, name)
    assert work.ledger.chunk(name).merkle_root == root
    assert fetch_members(work, name, members=100).mismatched == []


def test_a_run_of_a_chunk_that_another_live_run_holds_ends_as_held(tmp_path, source, database):
    ledger = Ledger(database, lease_seconds=1.5)
    work = a_workplace(tmp_path, source, ledger)
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    other = a_workplace(tmp_path, source, ledger, run="run-2")
    with work.ledger.lease(chunk_lease(name), work.holder), pytest.raises(HeldByOther) as caught:
        chunk_steps.load_batch(other, name)
    assert caught.value.holder == "run-1"


def test_skipped_objects_end_their_claim_and_are_recorded_with_their_reason(work, source):
    source.unavailable = {"key-001": (SkipReason.COLD_STORAGE, -1)}
    archive_everything(work)
    account = work.ledger.account("src")
    assert (account.skipped[SkipReason.COLD_STORAGE], account.claimed_objects) == (1, 0)
    assert work.ledger.locate("src", "key-001") is None
    assert account_for_plan(work, plan(work)).unaccounted == 0


def test_a_skipped_object_is_not_planned_again_at_once(work, source):
    source.unavailable = {"key-001": (SkipReason.COLD_STORAGE, -1)}
    archive_everything(work)
    assert plan(work).plan is None


def test_a_chunk_of_which_every_object_is_skipped_ends_empty(work, source):
    source.unavailable = {key: (SkipReason.ACCESS_DENIED, -1) for key in source.bodies}
    names = archive_everything(work)
    assert set(states(work).values()) == {ChunkState.EMPTY}
    assert all(account_for_chunk(work, name).agrees for name in names)
    assert staged_files(work) == []
    assert account_for_plan(work, plan(work)).unaccounted == 0


def test_an_object_is_skipped_as_unreadable_only_after_several_runs(tmp_path, source, ledger):
    source.failing = {"key-001": 0}
    (name, *_) = [chunk.name for chunk in plan(a_workplace(tmp_path, source, ledger)).chunks]
    for number in (1, 2):
        work = a_workplace(tmp_path, source, ledger, run=f"run-{number}")
        chunk_steps.load_batch(work, name)
        for _ in range(2):  # a run's own retries count once
            with pytest.raises(ObjectReadFailed):
                chunk_steps.pack_chunk(work, name)
    work = a_workplace(tmp_path, source, ledger, run="run-3")
    archive_chunk(work, name)
    assert work.ledger.account("src").skipped[SkipReason.UNREADABLE] == 1


def test_unreadable_objects_of_a_chunk_are_skipped_together(tmp_path, source, ledger):
    unreadable = ["key-001", "key-002", "key-005", "key-011", "key-017"]
    source.failing = dict.fromkeys(unreadable, 0)
    (name, *_) = [chunk.name for chunk in plan(a_workplace(tmp_path, source, ledger)).chunks]
    for number in (1, 2):
        work = a_workplace(tmp_path, source, ledger, run=f"run-{number}")
        chunk_steps.load_batch(work, name)
        with pytest.raises(ObjectReadFailed, match=r"^5 objects .*key-001"):
            chunk_steps.pack_chunk(work, name)
    work = a_workplace(tmp_path, source, ledger, run="run-3")
    archive_chunk(work, name)
    assert work.ledger.account("src").skipped[SkipReason.UNREADABLE] == len(unreadable)
    assert account_for_chunk(work, name).agrees


def test_a_later_run_reads_only_what_failed_before(tmp_path, source, ledger):
    source.failing = {"key-001": 0, "key-005": 0}
    (name, *_) = [chunk.name for chunk in plan(a_workplace(tmp_path, source, ledger)).chunks]
    read_times = []
    for number in (1, 2):
        work = a_workplace(tmp_path, source, ledger, run=f"run-{number}")
        chunk_steps.load_batch(work, name)
        source.reads.clear()
        with pytest.raises(ObjectReadFailed):
            chunk_steps.pack_chunk(work, name)
        read_times.append([key for key, _, _ in source.reads].count("key-011"))
    assert read_times == [2, 1]  # the window of the packing reads it once each time


def test_an_object_that_can_be_read_again_keeps_its_place(tmp_path, source, ledger):
    (name, *_) = [chunk.name for chunk in plan(a_workplace(tmp_path, source, ledger)).chunks]
    source.failing = {"key-001": 0, "key-005": 0}
    work = a_workplace(tmp_path, source, ledger)
    chunk_steps.load_batch(work, name)
    with pytest.raises(ObjectReadFailed):
        chunk_steps.pack_chunk(work, name)
    source.failing = {}
    resumed = chunk_steps.seal_chunk(work, chunk_steps.pack_chunk(work, name).name).chunk
    assert not work.ledger.account("src").skipped
    staged_path(work, name).unlink()
    assert chunk_steps.pack_chunk(work, name).merkle_root == resumed.merkle_root


def test_a_source_that_lists_but_gives_nothing_makes_no_object_unreadable(tmp_path, source, ledger):
    source.failing = dict.fromkeys(source.bodies, -1)
    (name, *_) = [chunk.name for chunk in plan(a_workplace(tmp_path, source, ledger)).chunks]
    for number in range(4):
        work = a_workplace(tmp_path, source, ledger, run=f"run-{number}")
        chunk_steps.load_batch(work, name)
        with pytest.raises(SourceUnreachable):
            chunk_steps.pack_chunk(work, name)
    assert not work.ledger.read_failures(name)


def test_a_source_that_is_down_makes_no_object_unreadable(tmp_path, source, ledger):
    source.failing = {key: 0 for key in source.bodies}
    (name, *_) = [chunk.name for chunk in plan(a_workplace(tmp_path, source, ledger)).chunks]
    source.down = SourceUnreachable("nobody answers")
    for number in range(5):
        work = a_workplace(tmp_path, source, ledger, run=f"run-{number}")
        chunk_steps.load_batch(work, name)
        with pytest.raises(SourceUnreachable):
            chunk_steps.pack_chunk(work, name)
    source.failing, source.down = {}, None
    archive_chunk(work, name)
    assert not work.ledger.account("src").skipped


def test_a_failed_packing_leaves_what_is_safe_by_its_journal_and_reserves_no_more(work, source):
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    source.failing = {"key-003": 0}
    chunk_steps.load_batch(work, name)
    with pytest.raises(ObjectReadFailed):
        chunk_steps.pack_chunk(work, name)
    kept = {path.suffix: path.stat().st_size for path in work.staging().iterdir()}
    assert (sorted(kept), kept[".part"]) == ([".journal", ".part"], 512 + 3 * 40_000)
    (reserved,) = work.ledger.reservations()
    assert reserved.size_bytes == kept[".part"] + kept[".journal"]


def test_a_packing_that_fails_at_its_first_object_leaves_nothing(work, source):
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    source.failing = {"dir/": -1}
    chunk_steps.load_batch(work, name)
    with pytest.raises(ObjectReadFailed):
        chunk_steps.pack_chunk(work, name)
    assert staged_files(work) == []
    assert work.ledger.reservations() == []


def test_staging_beyond_its_limit_is_refused_before_a_byte_is_fetched(tmp_path, source, ledger):
    work = a_workplace(tmp_path, source, ledger, packing={"staging_limit": "100KiB"})
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    chunk_steps.load_batch(work, name)
    with pytest.raises(StagingError):
        chunk_steps.pack_chunk(work, name)
    assert (source.reads, staged_files(work)) == ([], [])


def test_a_withdrawn_chunks_objects_are_planned_again_into_another_chunk(work):
    first = [chunk.name for chunk in plan(work).chunks]
    for name in first:
        chunk_steps.withdraw(work, name)
    second = [chunk.name for chunk in plan(work).chunks]
    assert len(second) == len(first)
    assert not set(first) & set(second)


def test_a_parked_chunk_is_not_worked_on_until_it_is_unparked(work):
    (name, *_) = [chunk.name for chunk in plan(work).chunks]
    archive_chunk(work, name, until=chunk_steps.seal_chunk)
    chunk_steps.park(work, name, "five runs failed")
    with pytest.raises(CafError, match="is parked: five runs failed"):
        chunk_steps.post_file(work, name)
    chunk_steps.unpark(work, name)
    archive_chunk(work, name)
    assert states(work)[name] is ChunkState.LOCATED


def fat_headers(source):
    """Let each object have more user metadata than a plan reserves room for."""
    source.headers = {key: ObjectHeaders(user_metadata={"m": "x" * 30_000}) for key in source.bodies}


def test_metadata_that_the_plan_did_not_know_of_closes_no_chunk_early(work, source):
    fat_headers(source)
    archive_everything(work)
    chunks = work.ledger.chunks(source="src")
    assert [chunk.released_count for chunk in chunks] == [0] * len(chunks)
    assert len(chunks) > 1
    every_object_reads_back(work)


def test_objects_that_an_early_close_released_are_in_the_next_plan(work, source):
    fat_headers(source)
    for chunk in plan(work).chunks:
        limit_to_target(Path(chunk.plan_folder))
        archive_chunk(work, chunk.name)
    released = sum(chunk.released_count for chunk in work.ledger.chunks(source="src"))
    assert released > 0
    while plan(work).plan:
        for chunk in work.ledger.chunks(source="src", states=[ChunkState.PLANNED]):
            archive_chunk(work, chunk.name)
    every_object_reads_back(work)


class SlowStore(DirectoryStore):
    """A store that was measured to take so many bytes in time."""

    def largest_chunk_bytes(self):
        return 500_000


@pytest.mark.thorough
def test_after_a_chunk_was_too_large_the_next_ones_fit_with_their_manifests(tmp_path, source, ledger):
    work = a_workplace(tmp_path, source, ledger, store=SlowStore(tmp_path / "store"))
    fat_headers(source)
    for chunk in plan(work).chunks:
        chunk_steps.withdraw(work, chunk.name)
    while (report := plan(work)).plan:
        for chunk in report.chunks:
            archive_chunk(work, chunk.name)
    located = ledger.chunks(source="src", states=[ChunkState.LOCATED])
    assert max(chunk.stored_size_bytes for chunk in located) <= 500_000
    every_object_reads_back(work)


def test_an_older_version_loaded_later_does_not_become_the_current_one(tmp_path, ledger):
    from datetime import timedelta

    source = MemorySource({"a": b"old"})
    work = a_workplace(tmp_path, source, ledger)
    old = [chunk.name for chunk in plan(work).chunks]
    source.bodies["a"] = b"new!"
    original = source.object
    source.object = lambda key: replace(original(key), last_modified=original(key).last_modified + timedelta(days=1))
    new = [chunk.name for chunk in plan(work).chunks]
    for name in new:
        archive_chunk(work, name)
    source.bodies["a"] = b"old"
    for name in old:
        archive_chunk(work, name)
    assert b"".join(fetch(ledger, work.store, "src", "a").pieces) == b"new!"


def test_wrong_bytes_in_the_store_are_never_handed_out_as_right(work, tmp_path):
    archive_everything(work)
    location = work.ledger.locate("src", "key-000")
    file = work.store.folder / "chunks" / f"{location.posting.merkle_root.hex()}.caf"
    data = bytearray(file.read_bytes())
    data[location.row.start_byte] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError):
        save(fetch(work.ledger, work.store, "src", "key-000"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_plan_accounts_for_unsupported_and_too_large_objects(tmp_path, ledger):
    class Odd(MemorySource):
        def objects(self):
            huge = replace(super().object("a"), key=b"huge", size_bytes=1 << 52)
            broken = replace(super().object("a"), key=b"bad\xff")
            return [super().object("a"), broken, huge]

    work = a_workplace(tmp_path, Odd({"a": b"a"}), ledger)
    report = plan(work)
    assert [chunk.object_count for chunk in report.chunks] == [1]
    skipped = {str(reason): count for reason, count in account_for_plan(work, report).skipped.items() if count}
    assert skipped == {"too_large": 1, "unsupported_key": 1}
    assert account_for_plan(work, report).holds


def test_a_skipped_object_that_a_whole_inventory_lists_no_longer_is_history_until_it_is_listed_again(tmp_path, ledger):
    class Odd(MemorySource):
        listed = (b"bad\xff", b"huge", b"other\xff")

        def objects(self):
            one = super().object("a")
            sizes = {b"huge": 1 << 52}
            return [one, *(replace(one, key=key, size_bytes=sizes.get(key, 1)) for key in sorted(self.listed))]

    def skipped():
        return {str(reason): count for reason, count in ledger.account("src").skipped.items()}

    source = Odd({"a": b"a"})
    work = a_workplace(tmp_path, source, ledger)
    plan(work)
    assert skipped() == {"too_large": 1, "unsupported_key": 2}
    source.listed = (b"other\xff",)
    planning.cut_plan(work, inventories.take_inventory(work, after=b"a"), new_archive=True)
    assert skipped() == {"too_large": 1, "unsupported_key": 2}  # of a part of the source nothing ends
    plan(work)
    assert skipped() == {"unsupported_key": 1}
    assert account_for_plan(work, plan(work)).skipped == {"unsupported_key": 1}
    source.listed = Odd.listed
    plan(work)
    assert skipped() == {"too_large": 1, "unsupported_key": 2}


def test_a_bounded_look_counts_only_what_a_plan_would_take(work, source):
    archive_everything(work)
    source.bodies["zz"] = b"12345"
    look = inventories.look_for_new(work, after=b"", max_pages=5)
    assert (look.new_objects, look.next_after) == (1, None)


def test_a_window_of_keys_makes_a_snapshot_that_is_not_complete(work):
    snapshot = inventories.take_inventory(work, after=b"key-010", until=b"key-019")
    assert (snapshot.object_count, snapshot.complete) == (9, False)
    report = planning.cut_plan(work, snapshot)
    assert sum(chunk.object_count for chunk in report.chunks) == 9


def test_a_run_plans_the_snapshot_that_it_took_though_another_took_a_later_one(tmp_path, source, ledger):
    one, other, third = (a_workplace(tmp_path, source, ledger, run=run) for run in ("run-1", "run-2", "run-3"))
    own = inventories.take_inventory(one, after=b"key-010", until=b"key-019")
    later = inventories.take_inventory(other, after=b"key-020", until=b"key-029")
    assert inventories.snapshot_to_plan(one).name == own.name
    assert inventories.snapshot_to_plan(third).name == later.name


def test_without_a_snapshot_there_is_nothing_to_plan(work):
    with pytest.raises(NotLocated, match="no inventory of 'src' yet"):
        inventories.snapshot_to_plan(work)


def test_two_plans_at_once_claim_each_object_once(tmp_path, source, ledger):
    from concurrent.futures import ThreadPoolExecutor

    def plan_as(run):
        work = a_workplace(tmp_path, source, ledger, run=run)
        try:
            return sum(chunk.object_count for chunk in plan(work).chunks)
        except HeldByOther:
            return 0

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(plan_as, ["run-1", "run-2"])) == len(source.bodies)


def test_this_process_is_named_in_the_lease():
    holder = this_process("run-1")
    assert (holder.run, holder.pid) == ("run-1", os.getpid())
