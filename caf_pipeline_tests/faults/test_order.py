"""Repeated events, and events out of order.

The current version of a key never depends on their order: it is the one modified last, and within a
second the one listed last.
"""

import hashlib
from itertools import permutations

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import CafError, IllegalMove, LedgerError
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.records import Skip, chunk_lease
from caf_pipeline.packing.staging import staged_path
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline_tests.faults.world import SOURCE
from caf_pipeline_tests.support.run_contexts import CHUNK_STEPS, archive_chunk

GROUP = "The same events twice, or out of order"
KEY = "changed/twice"


@pytest.fixture
def small_world(new_world, unruly_s3, new_bucket):
    """One chunk of few objects, behind a proxy that can deny and delay."""
    world = new_world(bucket=unruly_s3.in_front_of(new_bucket))
    world.fill(small=4, large=1)
    return world


def current(context, key):
    """Return the SHA-256 of the current version."""
    location = context.ledger.lookup.locate(SOURCE, key)
    return location and location.row.sha256


def digest(body):
    return hashlib.sha256(body).digest()


def chunks_of(report):
    return [chunk.name for chunk in report.chunks]


# --- the same events twice ------------------------------------------------------------------------


@pytest.mark.sample
def test_second_plan_of_same_snapshot_adds_nothing(fault, small_world):
    with (
        fault(
            GROUP,
            "a snapshot planned again: at once, while its chunk is packed, when it is located",
        ) as case,
        small_world.run_context() as context,
    ):
        case.tried = 3
        snapshot = inventories.take_inventory(context)
        (name,) = chunks_of(planning.cut_plan(context, snapshot))
        assert chunks_of(planning.cut_plan(context, snapshot)) == []
        archive_chunk(context, name, until=chunk_steps.pack_chunk)
        assert chunks_of(planning.cut_plan(context, snapshot)) == []
        archive_chunk(context, name)
        assert chunks_of(planning.cut_plan(context, snapshot)) == []
        small_world.finish()
        case.check(small_world)


def test_a_cursor_that_is_replayed_finds_nothing_that_is_known(fault, small_world, unruly_s3):
    with (
        fault(GROUP, "a sensor's cursor replayed over objects claimed and located") as case,
        small_world.run_context() as context,
    ):
        unruly_s3.page_keys = 2
        cursor, looks = b"", []
        while cursor is not None:
            looks.append(cursor)
            look = inventories.scan_for_new(context, after=cursor, max_pages=1)
            planning.cut_plan(
                context, inventories.take_inventory(context, after=cursor, until=look.next_after)
            )
            cursor = look.next_after
        case.tried = 2 * len(looks)
        for after in looks:
            assert inventories.scan_for_new(context, after=after, max_pages=1).new_objects == 0
            assert (
                planning.cut_plan(context, inventories.take_inventory(context, after=after)).chunks
                == []
            )
        small_world.finish()
        for after in looks:
            assert inventories.scan_for_new(context, after=after, max_pages=1).new_objects == 0
        case.check(small_world)


def test_each_step_run_twice_does_what_it_does_once(fault, small_world):
    (name,) = small_world.plan()
    with (
        fault(GROUP, "each step of a chunk twice, then all of them again") as case,
        small_world.run_context() as context,
    ):
        case.tried = 2 * len(CHUNK_STEPS)
        for step in CHUNK_STEPS:
            step(context, name)
            step(context, name)
        archive_chunk(context, name)
        small_world.finish()
        case.check(small_world)


def test_located_partition_run_again_elsewhere_does_nothing(fault, small_world):
    (name,) = small_world.plan()
    with fault(GROUP, "the same partition run again after it is located") as case:
        for _ in range(3):
            small_world.run(name)
            assert small_world.runs[-1].ended_in_order, small_world.runs[-1].printed
        small_world.finish()
        case.check(small_world)


def test_repeated_move_is_refused_and_writes_nothing(fault, small_world):
    (name,) = small_world.plan()
    with (
        fault(GROUP, "posting, copies and locations recorded twice") as case,
        small_world.run_context() as context,
    ):
        case.tried = 3
        archive_chunk(context, name, until=chunk_steps.upload_chunk)
        posting = chunk_steps.posting_of(context.ledger.chunks.get(name))
        copies = context.store.copies(posting)
        with context.ledger.leases.hold(chunk_lease(name), context.holder) as lease:
            with pytest.raises(IllegalMove):
                context.ledger.moves.record_posting(lease, name, posting)
            context.ledger.replicas.record_verified(lease, name, copies)
            with pytest.raises(IllegalMove):
                context.ledger.replicas.record_verified(lease, name, copies)
        archive_chunk(context, name)
        with (
            context.ledger.leases.hold(chunk_lease(name), context.holder) as lease,
            pytest.raises(IllegalMove),
        ):
            context.ledger.moves.load_locations(lease, name)
        small_world.finish()
        case.check(small_world)


def test_a_skip_that_is_told_twice_is_one_skip(fault, small_world):
    with fault(GROUP, "a skip recorded twice") as case, small_world.run_context() as context:
        small_world.finish()
        skip = Skip("%FF", "etag:e:1", SkipReason.UNSUPPORTED_KEY, "not UTF-8", "e", 1)
        for _ in range(2):
            context.ledger.skips.record(SOURCE, [skip])
        assert small_world.query("SELECT count(*), max(times) FROM skipped_objects") == [(1, 2)]
        case.check(small_world)


# --- out of order ---------------------------------------------------------------------------------


def test_late_plan_of_older_snapshot_restores_no_old_version(fault, small_world):
    with (
        fault(GROUP, "an old snapshot planned after a newer one, without versions") as case,
        small_world.run_context() as context,
    ):
        old = inventories.take_inventory(context)
        small_world.put(KEY, b"the newest")
        new = inventories.take_inventory(context)
        newer, older = (
            chunks_of(planning.cut_plan(context, new)),
            chunks_of(planning.cut_plan(context, old)),
        )
        for name in older + newer:
            archive_chunk(context, name)
        assert current(context, KEY) == digest(b"the newest")
        small_world.finish()
        case.check(small_world)


def test_current_version_does_not_depend_on_plan_order(fault, small_world, unruly_s3, soak):
    """All versions are of one second, S3's resolution."""
    small_world.bucket.keep_versions()
    small_world.finish()
    with (
        fault(GROUP, "versions of one second, planned and located in every order") as case,
        small_world.run_context() as context,
    ):
        orders = list(permutations(range(3))) if soak else [(0, 1, 2), (2, 0, 1), (2, 1, 0)]
        case.tried = len(orders)
        unruly_s3.one_time()
        for number, order in enumerate(orders):
            key, snapshots = f"key-{number}", []
            for version in range(3):
                small_world.put(key, f"{key} {version}".encode())
                snapshots.append(inventories.take_inventory(context))
            for index in order:
                for name in chunks_of(planning.cut_plan(context, snapshots[index])):
                    archive_chunk(context, name)
            assert current(context, key) == digest(small_world.objects[key]), order
        small_world.finish()
        case.check(small_world)


@pytest.mark.parametrize("versioned", [False, True], ids=["without versions", "with versions"])
def test_a_later_plan_located_before_an_earlier_one_stays_current(
    fault, small_world, new_bucket, unruly_s3, versioned
):
    if versioned:
        new_bucket.keep_versions()
        small_world.put(KEY, b"the first with an id")
    with (
        fault(GROUP, "a chunk of a later plan located before that of an earlier one") as case,
        small_world.run_context() as context,
    ):
        unruly_s3.one_time()
        (earlier,) = chunks_of(planning.cut_plan(context, inventories.take_inventory(context)))
        archive_chunk(context, earlier, until=chunk_steps.verify_stored)
        small_world.put(KEY, b"the newest")
        (later,) = chunks_of(planning.cut_plan(context, inventories.take_inventory(context)))
        archive_chunk(context, later)
        assert current(context, KEY) == digest(b"the newest")
        archive_chunk(context, earlier)
        assert current(context, KEY) == digest(b"the newest")
        assert small_world.query(
            "SELECT count(*) FROM file_locations WHERE file_path = %s", KEY
        ) == [(2,)]
        small_world.finish()
        case.check(small_world)


def test_chunks_of_one_plan_may_be_located_in_any_order(fault, small_world):
    small_world.fill(seed=8, small=4, large=4)
    names = small_world.plan()
    with (
        fault(GROUP, "the chunks of one plan located last to first") as case,
        small_world.run_context() as context,
    ):
        case.tried = len(names)
        assert len(names) > 1
        for name in names:
            archive_chunk(context, name, until=chunk_steps.verify_stored)
        for name in reversed(names):
            archive_chunk(context, name)
        small_world.finish()
        case.check(small_world)


def test_withdrawn_chunk_is_refused_and_objects_archived_once(fault, small_world):
    (old,) = small_world.plan()
    with fault(
        GROUP, "an old plan's chunk run again after it was withdrawn and planned again"
    ) as case:
        with small_world.run_context() as context:
            archive_chunk(context, old, until=chunk_steps.seal_chunk)
            chunk_steps.withdraw(context, old)
            with pytest.raises(CafError, match="withdrawn"):
                archive_chunk(context, old)
        (new,) = small_world.plan()
        assert new != old
        assert small_world.run(new) == 0
        assert small_world.run(old) == CafError.exit_code
        assert small_world.runs[-1].answer.sentence.startswith(f"chunk {old} is withdrawn")
        small_world.finish()
        case.check(small_world)


def test_object_located_by_another_chunk_is_not_archived_again(fault, small_world, unruly_s3):
    """After a skip, another chunk located it; then the first chunk is lost and packed again."""
    (first,) = small_world.plan()
    denied = "some/key-001"
    with fault(
        GROUP, "a chunk packed again whose skipped object is located elsewhere by now"
    ) as case:
        with small_world.run_context() as context:
            unruly_s3.fail(403, "AccessDenied", key=denied)
            archive_chunk(context, first, until=chunk_steps.seal_chunk)
            unruly_s3.well_behaved()
            small_world.query("UPDATE skipped_objects SET retry_at = now() RETURNING 1")
            (second,) = chunks_of(planning.cut_plan(context, inventories.take_inventory(context)))
            archive_chunk(context, second)
            staged_path(context, first).unlink()
            with pytest.raises(LedgerError, match="claims") as refused:
                archive_chunk(context, first)
            assert "withdraw" in refused.value.hint
            assert context.ledger.chunks.get(first).state in (ChunkState.SEALED, ChunkState.PACKING)
            chunk_steps.withdraw(context, first)
        small_world.finish()
        case.check(small_world)
