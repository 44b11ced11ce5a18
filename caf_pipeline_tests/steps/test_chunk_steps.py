"""The steps of a chunk: their results, crashes, concurrent runs, and repeated runs."""

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
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.packing.staging import staged_path
from caf_pipeline.retrieval.reader import fetch, save
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.steps.audit import account_for_chunk, fetch_members
from caf_pipeline.store.directory import DirectoryStore
from caf_pipeline_tests.contracts.chunk_store import corrupt
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.plans import limit_to_target
from caf_pipeline_tests.support.run_contexts import (
    CHUNK_STEPS,
    a_run_context,
    account_for_plan,
    archive_chunk,
    archive_everything,
    every_object_reads_back,
    first_chunk,
    plan,
)
from caf_pipeline_tests.support.tiers import sampled


@pytest.fixture
def source():
    return MemorySource(
        {f"key-{number:03d}": os.urandom(40_000) for number in range(40)}
        | {"empty": b"", "dir/": b""}
    )


@pytest.fixture
def context(tmp_path, source, ledger):
    return a_run_context(tmp_path, source, ledger)


def states(context):
    return {chunk.name: chunk.state for chunk in context.ledger.chunks.list(source="src")}


def staged_files(context):
    return sorted(path.name for path in context.staging().iterdir())


def test_every_object_ends_up_located_and_reads_back(context):
    names = archive_everything(context)
    assert len(names) > 1
    assert set(states(context).values()) == {ChunkState.LOCATED}
    every_object_reads_back(context)
    assert staged_files(context) == []


def test_the_accounts_agree_and_members_read_back(context):
    for name in archive_everything(context):
        account = account_for_chunk(context, name)
        assert (account.agrees, account.explanation) == (True, "")
        assert fetch_members(context, name).mismatched == []


def test_member_with_other_bytes_in_store_is_named(context):
    archive_everything(context)
    location = context.ledger.lookup.locate("src", "key-003")
    file = context.store.folder / "chunks" / f"{location.posting.merkle_root.hex()}.caf"
    corrupt(file, location.row.start_byte)
    fetched = fetch_members(context, location.chunk, members=100)
    assert fetched.tried == context.ledger.chunks.get(location.chunk).member_count
    assert [text.partition(" ")[0] for text in fetched.mismatched] == ["key-003"]


def test_members_are_fetched_without_the_manifest(context):
    archive_everything(context)
    location = context.ledger.lookup.locate("src", "key-003")
    file = context.store.folder / "chunks" / f"{location.posting.merkle_root.hex()}.caf"
    file.write_bytes(file.read_bytes()[:-1000] + bytes(1000))
    assert fetch_members(context, location.chunk).mismatched == []


def test_a_second_plan_of_the_same_source_finds_nothing_new(context):
    archive_everything(context)
    report = plan(context)
    assert (report.plan, list(report.chunks)) == (None, [])
    assert account_for_plan(context, report).located == len(context.objects.bodies)


@pytest.mark.thorough
def test_only_new_objects_are_planned_again(context, source):
    archive_everything(context)
    source.bodies["new"] = b"new"
    report = plan(context)
    assert [chunk.object_count for chunk in report.chunks] == [1]


@pytest.mark.thorough
@pytest.mark.parametrize("step", sampled(CHUNK_STEPS, every=4), ids=lambda step: step.__name__)
def test_each_step_may_be_repeated(context, step):
    name = first_chunk(context, until=step)
    step(context, name)
    archive_chunk(context, name)
    assert states(context)[name] is ChunkState.LOCATED
    assert account_for_chunk(context, name).agrees


def test_no_location_exists_before_the_store_was_verified(context):
    name = first_chunk(context, until=chunk_steps.upload_chunk)
    assert context.ledger.lookup.locate("src", "empty") is None
    archive_chunk(context, name, until=chunk_steps.verify_stored)
    assert context.ledger.lookup.locate("src", "empty") is None
    chunk_steps.load_locations(context, name)
    assert context.ledger.lookup.locate("src", "empty") is not None


def test_an_object_is_located_with_its_headers(context, source):
    source.headers["empty"] = ObjectHeaders(
        "text/plain", cache_control="no-store", user_metadata={"owner": "ü", "a": ""}
    )
    archive_everything(context)
    location = context.ledger.lookup.locate("src", "empty")
    sets = context.ledger.lookup.header_sets([location.row.header_set])
    assert sets == {location.row.header_set: source.headers["empty"]}


def test_a_copy_with_other_bytes_is_not_verified(context):
    name = first_chunk(context, until=chunk_steps.upload_chunk)
    (file,) = (context.store.folder / "chunks").iterdir()
    corrupt(file, 0)
    with pytest.raises(IntegrityError, match="differs at bytes 0"):
        chunk_steps.verify_stored(context, name)
    assert states(context)[name] is ChunkState.UPLOADING


def test_file_lost_before_post_is_packed_again(context):
    name = first_chunk(context, until=chunk_steps.seal_chunk)
    chunk_steps.staged_path(context, name).unlink()
    archive_chunk(context, name)
    assert account_for_chunk(context, name).agrees


def test_file_lost_after_post_is_packed_to_same_root(context):
    name = first_chunk(context, until=chunk_steps.post_file)
    root = context.ledger.chunks.get(name).merkle_root
    chunk_steps.staged_path(context, name).unlink()
    archive_chunk(context, name)
    assert (states(context)[name], context.ledger.chunks.get(name).merkle_root) == (
        ChunkState.LOCATED,
        root,
    )


@pytest.mark.thorough
def test_posted_chunk_with_changed_objects_is_abandoned_and_planned_again(context, source):
    name = first_chunk(context, until=chunk_steps.post_file)
    chunk_steps.staged_path(context, name).unlink()
    source.unavailable["key-000"] = (SkipReason.CHANGED, -1)
    with pytest.raises(CafError, match="have changed since"):
        chunk_steps.upload_chunk(context, name)
    assert states(context)[name] is ChunkState.ABANDONED
    del source.unavailable["key-000"]
    archive_everything(context)
    assert context.ledger.lookup.locate("src", "key-000") is not None


def test_a_damaged_staged_file_is_not_posted(context):
    name = first_chunk(context, until=chunk_steps.seal_chunk)
    root = context.ledger.chunks.get(name).merkle_root
    path = chunk_steps.staged_path(context, name)
    corrupt(path, path.stat().st_size - 1)
    archive_chunk(context, name)
    assert context.ledger.chunks.get(name).merkle_root == root
    assert fetch_members(context, name, members=100).mismatched == []


def test_run_of_chunk_held_by_live_run_ends_as_held(tmp_path, source, database):
    ledger = Ledger(database, lease_seconds=1.5)
    context = a_run_context(tmp_path, source, ledger)
    name = first_chunk(context)
    other = a_run_context(tmp_path, source, ledger, run="run-2")
    with (
        context.ledger.leases.hold(chunk_lease(name), context.holder),
        pytest.raises(HeldByOther) as caught,
    ):
        chunk_steps.load_batch(other, name)
    assert caught.value.holder == "run-1"


@pytest.mark.thorough
def test_skipped_objects_end_their_claim_and_record_reason(context, source):
    source.unavailable = {"key-001": (SkipReason.COLD_STORAGE, -1)}
    archive_everything(context)
    account = context.ledger.chunks.account("src")
    assert (account.skipped[SkipReason.COLD_STORAGE], account.claimed_objects) == (1, 0)
    assert context.ledger.lookup.locate("src", "key-001") is None
    report = plan(context)
    assert report.plan is None  # not planned again at once
    assert account_for_plan(context, report).unaccounted == 0


def test_a_chunk_of_which_every_object_is_skipped_ends_empty(context, source):
    source.unavailable = {key: (SkipReason.ACCESS_DENIED, -1) for key in source.bodies}
    names = archive_everything(context)
    assert set(states(context).values()) == {ChunkState.EMPTY}
    assert all(account_for_chunk(context, name).agrees for name in names)
    assert staged_files(context) == []
    assert account_for_plan(context, plan(context)).unaccounted == 0


def test_an_object_is_skipped_as_unreadable_only_after_several_runs(tmp_path, source, ledger):
    source.failing = {"key-001": 0}
    name = first_chunk(a_run_context(tmp_path, source, ledger))
    for number in (1, 2):
        context = a_run_context(tmp_path, source, ledger, run=f"run-{number}")
        chunk_steps.load_batch(context, name)
        for _ in range(2):  # retries of one run count once
            with pytest.raises(ObjectReadFailed):
                chunk_steps.pack_chunk(context, name)
    context = a_run_context(tmp_path, source, ledger, run="run-3")
    archive_chunk(context, name)
    assert context.ledger.chunks.account("src").skipped[SkipReason.UNREADABLE] == 1


def test_unreadable_objects_of_a_chunk_are_skipped_together(tmp_path, source, ledger):
    unreadable = ["key-001", "key-002", "key-005", "key-011", "key-017"]
    source.failing = dict.fromkeys(unreadable, 0)
    name = first_chunk(a_run_context(tmp_path, source, ledger))
    for number in (1, 2):
        context = a_run_context(tmp_path, source, ledger, run=f"run-{number}")
        chunk_steps.load_batch(context, name)
        with pytest.raises(ObjectReadFailed, match=r"^5 objects .*key-001"):
            chunk_steps.pack_chunk(context, name)
    context = a_run_context(tmp_path, source, ledger, run="run-3")
    archive_chunk(context, name)
    assert context.ledger.chunks.account("src").skipped[SkipReason.UNREADABLE] == len(unreadable)
    assert account_for_chunk(context, name).agrees


def test_a_later_run_reads_only_what_failed_before(tmp_path, source, ledger):
    source.failing = {"key-001": 0, "key-005": 0}
    name = first_chunk(a_run_context(tmp_path, source, ledger))
    read_times = []
    for number in (1, 2):
        context = a_run_context(tmp_path, source, ledger, run=f"run-{number}")
        chunk_steps.load_batch(context, name)
        source.reads.clear()
        with pytest.raises(ObjectReadFailed):
            chunk_steps.pack_chunk(context, name)
        read_times.append([key for key, _, _ in source.reads].count("key-011"))
    assert read_times == [2, 1]  # each packing reads it once in its window


def test_an_object_that_can_be_read_again_keeps_its_place(tmp_path, source, ledger):
    name = first_chunk(a_run_context(tmp_path, source, ledger))
    source.failing = {"key-001": 0, "key-005": 0}
    context = a_run_context(tmp_path, source, ledger)
    chunk_steps.load_batch(context, name)
    with pytest.raises(ObjectReadFailed):
        chunk_steps.pack_chunk(context, name)
    source.failing = {}
    resumed = chunk_steps.seal_chunk(context, chunk_steps.pack_chunk(context, name).name).chunk
    assert not context.ledger.chunks.account("src").skipped
    staged_path(context, name).unlink()
    assert chunk_steps.pack_chunk(context, name).merkle_root == resumed.merkle_root


def test_source_that_only_lists_makes_no_object_unreadable(tmp_path, source, ledger):
    source.failing = dict.fromkeys(source.bodies, -1)
    name = first_chunk(a_run_context(tmp_path, source, ledger))
    for number in range(4):
        context = a_run_context(tmp_path, source, ledger, run=f"run-{number}")
        chunk_steps.load_batch(context, name)
        with pytest.raises(SourceUnreachable):
            chunk_steps.pack_chunk(context, name)
    assert not context.ledger.read_failures.list(name)


def test_a_source_that_is_down_makes_no_object_unreadable(tmp_path, source, ledger):
    source.failing = {key: 0 for key in source.bodies}
    name = first_chunk(a_run_context(tmp_path, source, ledger))
    source.down = SourceUnreachable("nobody answers")
    for number in range(5):
        context = a_run_context(tmp_path, source, ledger, run=f"run-{number}")
        chunk_steps.load_batch(context, name)
        with pytest.raises(SourceUnreachable):
            chunk_steps.pack_chunk(context, name)
    source.failing, source.down = {}, None
    archive_chunk(context, name)
    assert not context.ledger.chunks.account("src").skipped


def test_failed_packing_keeps_and_reserves_only_journaled_bytes(context, source):
    name = first_chunk(context)
    source.failing = {"key-003": 0}
    chunk_steps.load_batch(context, name)
    with pytest.raises(ObjectReadFailed):
        chunk_steps.pack_chunk(context, name)
    kept = {path.suffix: path.stat().st_size for path in context.staging().iterdir()}
    assert (sorted(kept), kept[".part"]) == ([".journal", ".part"], 512 + 3 * 40_000)
    (reserved,) = context.ledger.staging.list()
    assert reserved.size_bytes == kept[".part"] + kept[".journal"]


def test_a_packing_that_fails_at_its_first_object_leaves_nothing(context, source):
    name = first_chunk(context)
    source.failing = {"dir/": -1}
    chunk_steps.load_batch(context, name)
    with pytest.raises(ObjectReadFailed):
        chunk_steps.pack_chunk(context, name)
    assert staged_files(context) == []
    assert context.ledger.staging.list() == []


def test_staging_over_limit_is_refused_before_any_fetch(tmp_path, source, ledger):
    context = a_run_context(tmp_path, source, ledger, packing={"staging_limit": "100KiB"})
    name = first_chunk(context)
    chunk_steps.load_batch(context, name)
    with pytest.raises(StagingError):
        chunk_steps.pack_chunk(context, name)
    assert (source.reads, staged_files(context)) == ([], [])


def test_a_withdrawn_chunks_objects_are_planned_again_into_another_chunk(context):
    first = [chunk.name for chunk in plan(context).chunks]
    for name in first:
        chunk_steps.withdraw(context, name)
    second = [chunk.name for chunk in plan(context).chunks]
    assert len(second) == len(first)
    assert not set(first) & set(second)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "step", ["pack_chunk", "seal_chunk", "post_file", "upload_chunk", "verify_stored"]
)
def test_parked_chunk_is_refused_until_unparked(context, step):
    name = first_chunk(context)
    archive_chunk(context, name, until=getattr(chunk_steps, step))
    chunk_steps.park(context, name, "five runs failed")
    with pytest.raises(CafError, match="parked: five runs failed"):
        chunk_steps.post_file(context, name)
    chunk_steps.unpark(context, name)
    archive_chunk(context, name)
    assert states(context)[name] is ChunkState.LOCATED


def fat_headers(source):
    """Give each object more user metadata than a plan reserves space for."""
    source.headers = {
        key: ObjectHeaders(user_metadata={"m": "x" * 30_000}) for key in source.bodies
    }


@pytest.mark.thorough
def test_unplanned_metadata_closes_no_chunk_early(context, source):
    fat_headers(source)
    archive_everything(context)
    chunks = context.ledger.chunks.list(source="src")
    assert [chunk.released_count for chunk in chunks] == [0] * len(chunks)
    assert len(chunks) > 1
    every_object_reads_back(context)


@pytest.mark.thorough
def test_objects_released_by_early_close_are_in_next_plan(context, source):
    fat_headers(source)
    for chunk in plan(context).chunks:
        limit_to_target(Path(chunk.plan_folder))
        archive_chunk(context, chunk.name)
    released = sum(chunk.released_count for chunk in context.ledger.chunks.list(source="src"))
    assert released > 0
    while plan(context).plan:
        for chunk in context.ledger.chunks.list(source="src", states=[ChunkState.PLANNED]):
            archive_chunk(context, chunk.name)
    every_object_reads_back(context)


class SlowStore(DirectoryStore):
    """A store with a measured limit of bytes that it takes in time."""

    def largest_chunk_bytes(self):
        return 500_000


@pytest.mark.thorough
def test_chunks_after_a_too_large_one_fit_with_manifests(tmp_path, source, ledger):
    context = a_run_context(tmp_path, source, ledger, store=SlowStore(tmp_path / "store"))
    fat_headers(source)
    for chunk in plan(context).chunks:
        chunk_steps.withdraw(context, chunk.name)
    while (report := plan(context)).plan:
        for chunk in report.chunks:
            archive_chunk(context, chunk.name)
    located = ledger.chunks.list(source="src", states=[ChunkState.LOCATED])
    assert max(chunk.stored_size_bytes for chunk in located) <= 500_000
    every_object_reads_back(context)


def test_wrong_bytes_in_store_are_never_returned(context, tmp_path):
    archive_everything(context)
    location = context.ledger.lookup.locate("src", "key-000")
    file = context.store.folder / "chunks" / f"{location.posting.merkle_root.hex()}.caf"
    corrupt(file, location.row.start_byte)
    with pytest.raises(IntegrityError):
        save(fetch(context.ledger.lookup, context.store, "src", "key-000"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_plan_accounts_for_unsupported_and_too_large_objects(tmp_path, ledger):
    class Odd(MemorySource):
        def objects(self):
            huge = replace(super().object("a"), key=b"huge", size_bytes=1 << 52)
            broken = replace(super().object("a"), key=b"bad\xff")
            return [super().object("a"), broken, huge]

    context = a_run_context(tmp_path, Odd({"a": b"a"}), ledger)
    report = plan(context)
    assert [chunk.object_count for chunk in report.chunks] == [1]
    skipped = {
        str(reason): count
        for reason, count in account_for_plan(context, report).skipped.items()
        if count
    }
    assert skipped == {"too_large": 1, "unsupported_key": 1}
    assert account_for_plan(context, report).holds


@pytest.mark.thorough
def test_unlisted_skipped_object_is_history_until_listed_again(tmp_path, ledger):
    class Odd(MemorySource):
        listed = (b"bad\xff", b"huge", b"other\xff")

        def objects(self):
            obj = super().object("a")
            sizes = {b"huge": 1 << 52}
            return [
                obj,
                *(
                    replace(obj, key=key, size_bytes=sizes.get(key, 1))
                    for key in sorted(self.listed)
                ),
            ]

    def skipped():
        return {
            str(reason): count for reason, count in ledger.chunks.account("src").skipped.items()
        }

    source = Odd({"a": b"a"})
    context = a_run_context(tmp_path, source, ledger)
    plan(context)
    assert skipped() == {"too_large": 1, "unsupported_key": 2}
    source.listed = (b"other\xff",)
    planning.cut_plan(context, inventories.take_inventory(context, after=b"a"), new_archive=True)
    assert skipped() == {
        "too_large": 1,
        "unsupported_key": 2,
    }  # a partial inventory ends no skip
    plan(context)
    assert skipped() == {"unsupported_key": 1}
    assert account_for_plan(context, plan(context)).skipped == {"unsupported_key": 1}
    source.listed = Odd.listed
    plan(context)
    assert skipped() == {"too_large": 1, "unsupported_key": 2}


def test_a_bounded_look_counts_only_what_a_plan_would_take(context, source):
    archive_everything(context)
    source.bodies["zz"] = b"12345"
    look = inventories.scan_for_new(context, after=b"", max_pages=5)
    assert (look.new_objects, look.next_after) == (1, None)


def test_window_of_keys_makes_incomplete_snapshot(context):
    snapshot = inventories.take_inventory(context, after=b"key-010", until=b"key-019")
    assert (snapshot.object_count, snapshot.complete) == (9, False)
    report = planning.cut_plan(context, snapshot)
    assert sum(chunk.object_count for chunk in report.chunks) == 9


def test_run_plans_its_own_snapshot_despite_a_later_one(tmp_path, source, ledger):
    first, other, third = (
        a_run_context(tmp_path, source, ledger, run=run) for run in ("run-1", "run-2", "run-3")
    )
    own_snapshot = inventories.take_inventory(first, after=b"key-010", until=b"key-019")
    later = inventories.take_inventory(other, after=b"key-020", until=b"key-029")
    assert inventories.snapshot_to_plan(first).name == own_snapshot.name
    assert inventories.snapshot_to_plan(third).name == later.name


def test_without_a_snapshot_there_is_nothing_to_plan(context):
    with pytest.raises(NotLocated, match="'src'"):
        inventories.snapshot_to_plan(context)


def test_two_plans_at_once_claim_each_object_once(tmp_path, source, ledger):
    from concurrent.futures import ThreadPoolExecutor

    def plan_as(run):
        context = a_run_context(tmp_path, source, ledger, run=run)
        try:
            return sum(chunk.object_count for chunk in plan(context).chunks)
        except HeldByOther:
            return 0

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(plan_as, ["run-1", "run-2"])) == len(source.bodies)
