"""Plans of a source: several of one inventory, and objects that wait for the next plan."""

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count

import pyarrow.parquet as pq
import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import HeldByOther, IntegrityError, LeaseLost
from caf_pipeline.inventory import cutting
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.records import Skip
from caf_pipeline.maintenance import rebuild
from caf_pipeline.retrieval.listing import count_not_archived
from caf_pipeline.retrieval.reader import not_located
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.steps.preview import preview_plan
from caf_pipeline.system.parquet import DEFAULT_BUDGET, Query
from caf_pipeline.system.processes import this_process
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.plans import MOMENT
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import (
    a_run_context,
    account_for_plan,
    archive_chunk,
    archive_everything,
    plan,
)

AGE = datetime.now(UTC) - MOMENT
"""Age of the objects of a memory source."""

LONG = int((AGE + timedelta(days=30)).total_seconds())
OVER = int((AGE - timedelta(days=30)).total_seconds())


@pytest.fixture
def source():
    return MemorySource({f"key-{number:03d}": os.urandom(40_000) for number in range(30)})


@pytest.fixture
def run_context(tmp_path, source, ledger):
    """Return a run context with changed settings of the source."""

    def opened(**settings):
        described = {"bucket": "b", "target_size": "1MiB", "public": True, **settings}
        return a_run_context(tmp_path, source, ledger, sources={"src": described})

    return opened


def waiting_keys(context):
    path = context.plans() / "standing.parquet"
    context.ledger.exports.standing("src", path)
    rows = cutting.pq.read_table(path).to_pylist()
    path.unlink()
    return [row["key"].decode() for row in rows if row["reason"] == "waiting"]


@pytest.mark.thorough
@pytest.mark.parametrize("year", [1, 999, 9999])
def test_rewritten_object_is_archived_whatever_its_listed_time(
    run_context, source, monkeypatch, year
):
    archive_everything(context := run_context())
    source.headers["key-000"] = ObjectHeaders(content_type="text/plain")
    first, *others = source.objects()
    listed = [replace(first, last_modified=datetime(year, 2, 3, tzinfo=UTC)), *others]
    monkeypatch.setattr(source, "objects", lambda: listed)
    assert len(archive_everything(context)) == 1
    (location,) = [
        version
        for version in context.ledger.lookup.versions("src", "key-000", 5)[0]
        if version.object_version != first.object_version
    ]
    assert location.object_version == f"{first.object_version}:{year:04}-02-03T00:00:00.000000Z"
    assert context.ledger.chunks.account("src").located_objects == 31


@pytest.mark.thorough
def test_a_plan_that_would_have_too_many_chunks_becomes_several(run_context, source, monkeypatch):
    for module in (cutting, planning):
        monkeypatch.setattr(module, "MAX_CHUNKS", 2)
    context = run_context(target_size=100_000)
    report = plan(context)
    assert [
        len([chunk for chunk in report.chunks if chunk.plan == plan_record.name])
        for plan_record in report.plans
    ] == [2] * 7 + [1]
    assert max(chunk.number for chunk in report.chunks) == 2
    last = planning.last_plan(context)
    assert (last.record.name, last.record.object_count) == (
        ", ".join(plan_record.name for plan_record in report.plans),
        30,
    )
    assert (last.record.object_bytes, last.chunks) == (30 * 40_000, {ChunkState.PLANNED: 15})
    assert (account_for_plan(context, report).claimed, account_for_plan(context, report).holds) == (
        30,
        True,
    )
    for chunk in report.chunks:
        archive_chunk(context, chunk.name)
    assert context.ledger.chunks.account("src").located_objects == 30


def test_check_finds_what_planning_lost(run_context, source, monkeypatch):
    context, identify = run_context(), planning.identify
    archive_everything(context)
    source.bodies |= {"new": b"1", "too new": b"2"}

    def lose_an_object(*args, **options):
        identified = identify(*args, **options)
        pq.write_table(pq.read_table(identified.unsettled).slice(1), identified.unsettled)
        return identified

    monkeypatch.setattr(planning, "identify", lose_an_object)
    account = account_for_plan(context, plan(context))
    assert (account.holds, account.unaccounted, account.examples) == (False, 1, ["new"])


def test_last_plan_after_second_planning_has_each_object_once(run_context):
    context = run_context()
    snapshot = inventories.take_inventory(context)
    chunk, *_ = planning.cut_plan(context, snapshot).chunks
    chunk_steps.withdraw(context, chunk.name)
    again = planning.cut_plan(context, snapshot)
    last = planning.last_plan(context)
    assert (last.record.name, last.record.object_count) == (again.plan.name, chunk.object_count)
    assert last.chunks == {ChunkState.PLANNED: 1}


def test_small_tail_waits_for_next_plan(run_context, source):
    context = run_context(min_chunk_size="512KiB", max_wait=LONG)
    report = plan(context)
    assert [chunk.object_count for chunk in report.chunks] == [26]
    assert waiting_keys(context) == [f"key-{number:03d}" for number in range(26, 30)]
    until = MOMENT + timedelta(seconds=LONG)
    assert (report.waiting.objects, report.waiting.size_bytes, report.waiting.until) == (
        4,
        160_000,
        until,
    )
    assert context.ledger.chunks.account("src").waiting == report.waiting


def test_what_waits_is_accounted_for_and_is_no_skip(run_context, source):
    context = run_context(min_chunk_size="512KiB", max_wait=LONG)
    account = account_for_plan(context, plan(context))
    assert (account.claimed, account.skipped, account.holds) == (26, {"waiting": 4}, True)
    assert context.ledger.chunks.account("src").skipped == {}


@pytest.mark.thorough
def test_what_waits_is_planned_once_there_is_enough(run_context, source):
    context = run_context(min_chunk_size="512KiB", max_wait=LONG)
    plan(context)
    source.bodies |= {f"new-{number}": os.urandom(40_000) for number in range(10)}
    report = plan(context)
    assert ([chunk.object_count for chunk in report.chunks], report.waiting) == ([14], None)
    assert context.ledger.chunks.account("src").waiting is None
    for chunk in context.ledger.chunks.list("src"):
        archive_chunk(context, chunk.name)
    assert (waiting_keys(context), context.ledger.chunks.account("src").located_objects) == ([], 40)


def test_tail_is_planned_after_max_wait_at_any_size(run_context, source):
    context = run_context(min_chunk_size="512KiB", max_wait=LONG)
    plan(context)
    report = plan(run_context(min_chunk_size="512KiB", max_wait=OVER))
    assert ([chunk.object_count for chunk in report.chunks], report.waiting) == ([4], None)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "listed_at", [datetime.max.replace(tzinfo=UTC), datetime.now(UTC) + timedelta(days=3)]
)
def test_future_object_waits_max_wait_from_first_plan(
    run_context, source, monkeypatch, ledger, listed_at
):
    def let_pass(**days):
        with connected(ledger.database) as connection:
            connection.execute(
                "UPDATE skipped_objects SET first_at = first_at - make_interval(days => %(days)s)",
                days,
            )

    listed = [replace(obj, last_modified=listed_at) for obj in source.objects()[:2]]
    monkeypatch.setattr(source, "objects", lambda: listed)
    context = run_context(min_chunk_size="512KiB", max_wait="7d")
    until, soon = datetime.now(UTC) + timedelta(days=7), timedelta(minutes=5)
    assert (
        abs(preview_plan(context, inventories.take_inventory(context)).waiting.until - until) < soon
    )
    assert abs(plan(context).waiting.until - until) < soon
    let_pass(days=6)
    assert abs(plan(context).waiting.until - (until - timedelta(days=6))) < soon
    let_pass(days=1)
    preview = preview_plan(context, inventories.take_inventory(context))
    assert (preview.estimate.chunks, preview.waiting) == (1, None)
    assert [archive_chunk(context, chunk.name) for chunk in plan(context).chunks]
    assert (ledger.chunks.account("src").located_objects, ledger.chunks.account("src").waiting) == (
        2,
        None,
    )


def test_by_default_nothing_waits(run_context, source):
    context = run_context(max_wait=LONG)
    assert [chunk.object_count for chunk in plan(context).chunks] == [26, 4]


def test_small_source_has_no_plan_yet(run_context, source):
    source.bodies = {"a": b"1", "b": b"2"}
    context = run_context(min_chunk_size="512KiB", max_wait=LONG)
    report = plan(context)
    assert (list(report.plans), report.waiting.objects) == ([], 2)
    assert account_for_plan(context, report).holds
    assert [path.name for path in context.plans().iterdir()] == []


def test_sensor_ignores_waiting_objects_until_their_time(run_context, source):
    context = run_context(min_chunk_size="512KiB", max_wait=LONG)
    plan(context)
    assert inventories.scan_for_new(context, after=b"", max_pages=5).new_objects == 0
    skips = [Skip.of(source.object("key-029"), SkipReason.WAITING, "")]
    context.ledger.skips.record_waiting(
        "src", skips, datetime.now(UTC) - timedelta(seconds=1), whole=False
    )
    assert inventories.scan_for_new(context, after=b"", max_pages=5).new_objects == 1


def test_deleted_object_stops_waiting_after_whole_inventory(run_context, source):
    context = run_context(min_chunk_size="512KiB", max_wait=LONG)
    plan(context)
    del source.bodies["key-029"]
    plan(context)
    assert waiting_keys(context) == ["key-026", "key-027", "key-028"]


def test_a_plan_of_some_keys_leaves_what_waits_of_others(run_context, source):
    context = run_context(min_chunk_size="512KiB", max_wait=LONG)
    plan(context)
    source.bodies["zzz"] = b"new"
    planning.cut_plan(context, inventories.take_inventory(context, after=b"x"), new_archive=True)
    assert len(waiting_keys(context)) == 5


@pytest.mark.thorough
def test_waiting_does_not_count_as_skip_later(run_context, source):
    context = run_context(min_chunk_size="512KiB", max_wait=LONG)
    plan(context)
    plan(context)
    source.unavailable = {"key-029": (SkipReason.COLD_STORAGE, -1)}
    for chunk in plan(run_context()).chunks:
        archive_chunk(context, chunk.name)
    (state,) = {
        chunk.state for chunk in context.ledger.chunks.list("src") if chunk.object_count == 4
    }
    assert (state, context.ledger.chunks.account("src").skipped) == (
        ChunkState.LOCATED,
        {SkipReason.COLD_STORAGE: 1},
    )
    assert due_again(context, "key-029") == pytest.approx(24 * 3600, abs=600)


def due_again(context, key):
    """Return the seconds until a skipped object may be planned again."""
    with connected(context.ledger.database) as connection:
        seconds = connection.execute(
            "SELECT extract(epoch FROM retry_at - now()) FROM skipped_objects WHERE file_path = "
            "%(key)s",
            {"key": key},
        )
        return float(seconds.scalar_one())


@pytest.mark.thorough
def test_a_snapshot_of_some_keys_says_nothing_of_the_others(run_context, source):
    context = run_context()
    archive_everything(context)
    for key in ("key-002", "key-003", "key-010", "key-011"):
        del source.bodies[key]
    source.bodies["key-004"] = b"another content"
    snapshot = inventories.take_inventory(context, after=b"key-002", until=b"key-010")
    accounting = planning.account_for(context, snapshot)
    assert (accounting.objects, accounting.current, accounting.older, accounting.gone) == (
        6,
        5,
        1,
        2,
    )


def test_fewer_whole_than_partial_snapshots_are_kept(run_context, source, monkeypatch):
    monkeypatch.setattr(inventories, "PARTIAL_KEPT", 2)
    context = run_context()
    whole = [inventories.take_inventory(context).path for _ in range(inventories.WHOLE_KEPT + 2)]
    some = [inventories.take_inventory(context, until=b"key-001").path for _ in range(4)]
    assert sorted(context.inventories().glob("*.parquet")) == whole[2:] + some[2:]
    some[-1].write_bytes(b"damaged")
    some.append(inventories.take_inventory(context, until=b"key-001").path)
    assert sorted(context.inventories().glob("*.parquet")) == whole[2:] + some[3:]


@pytest.mark.thorough
def test_previews_of_other_prefix_displace_no_inventory(run_context):
    context = run_context()
    archive_everything(context)  # the first chunk fixes the source's address
    snapshot = inventories.take_inventory(context)
    before = sorted(context.inventories().glob("*.parquet"))
    source = context.source_settings.model_copy(update={"prefix": "key-00"})
    other = replace(
        context, settings=context.settings.model_copy(update={"sources": {"src": source}})
    )
    for _ in range(inventories.WHOLE_KEPT + 1):
        last = inventories.take_inventory(other, to_plan=False).path
    assert inventories.latest_snapshot(context, complete=True) == snapshot
    assert sorted(context.inventories().glob("*.parquet")) == [*before, last]


@pytest.mark.thorough
def test_overwritten_object_counts_as_skipped_until_unlisted(run_context, source):
    context = run_context()
    source.unavailable = {
        "key-003": (SkipReason.CHANGED, 0),
        "key-004": (SkipReason.ACCESS_DENIED, 0),
    }
    archive_everything(context)

    def counted():
        (progress,) = context.ledger.progress.of(["src"])
        return (
            context.ledger.chunks.account("src").skipped,
            progress.skipped_objects,
            count_not_archived(context.ledger.lookup, "src", "key-00"),
        )

    skipped = {SkipReason.CHANGED: 1, SkipReason.ACCESS_DENIED: 1}, 2, (0, 2)
    assert counted() == skipped
    with connected(context.ledger.database) as connection:  # hours pass
        connection.execute("UPDATE inventories SET taken_at = taken_at - interval '2 hours'")
        connection.execute("UPDATE skipped_objects SET retry_at = now() - interval '1 hour'")
    assert counted() == skipped
    source.bodies["key-003"] = b"another content"
    planning.cut_plan(context, inventories.take_inventory(context, until=b"key-002"))
    assert counted() == skipped  # a partial inventory shows nothing about other keys
    del source.unavailable["key-003"]
    (chunk,) = planning.cut_plan(context, inventories.take_inventory(context)).chunks
    assert counted() == ({}, 0, (2, 0))
    archive_chunk(context, chunk.name)
    assert counted() == ({SkipReason.ACCESS_DENIED: 1}, 1, (0, 1))


@pytest.mark.thorough
def test_deleted_skipped_key_has_no_retry_time(run_context, source):
    context = run_context()
    source.unavailable = {"key-004": (SkipReason.ACCESS_DENIED, 0)}
    archive_everything(context)
    assert "from 20" in not_located(context.ledger.lookup, "src", "key-004").hint  # a year
    del source.bodies["key-004"]
    planning.cut_plan(context, inventories.take_inventory(context))
    error = not_located(context.ledger.lookup, "src", "key-004")
    assert "access_denied" in str(error)
    assert "from 20" not in error.hint


def test_due_skip_counts_without_planned_whole_inventory(run_context, source):
    context = run_context()
    source.unavailable = {"key-003": (SkipReason.CHANGED, 0)}
    for chunk in planning.cut_plan(
        context, inventories.take_inventory(context, until=b"key-999")
    ).chunks:
        archive_chunk(context, chunk.name)
    with connected(context.ledger.database) as connection:  # hours pass
        connection.execute("UPDATE skipped_objects SET retry_at = now() - interval '1 hour'")
    (progress,) = context.ledger.progress.of(["src"])
    assert (context.ledger.chunks.account("src").skipped, progress.skipped_objects) == (
        {SkipReason.CHANGED: 1},
        1,
    )
    assert count_not_archived(context.ledger.lookup, "src", "key-00") == (0, 1)


class Throttle:
    """Pauses once, before the named work."""

    def __init__(self, context):
        self.context, self.claimed_when_asked = context, []

    def wait_while_paused(self, check):
        check()
        self.claimed_when_asked.append(self.context.ledger.chunks.account("src").claimed_objects)


def test_pause_holds_plan_before_start_and_before_claims(run_context):
    context = run_context(target_size=100_000)
    throttle = Throttle(context)
    snapshot = inventories.take_inventory(context)
    planning.cut_plan(replace(context, throttle=throttle), snapshot)
    assert throttle.claimed_when_asked == [0, 0]
    assert context.ledger.chunks.account("src").claimed_objects == 30


@pytest.mark.thorough
def test_plan_suspended_during_claims_writes_nothing_after_losing_lease(run_context, monkeypatch):
    context, read = run_context(), planning.read_identities

    def suspended(folder):
        yield from read(folder)
        monkeypatch.setattr(planning, "read_identities", read)
        with connected(context.ledger.database) as connection:
            connection.execute(
                "UPDATE leases SET expires_at = now() - interval '1 second' WHERE name = 'plan/src'"
            )
        with context.ledger.leases.hold("plan/src", this_process("another")):
            planning._remove_unregistered(context)  # as the other one's plan begins

    monkeypatch.setattr(planning, "read_identities", suspended)
    with pytest.raises(LeaseLost, match="plan/src"):
        planning.cut_plan(context, inventories.take_inventory(context))
    assert context.ledger.chunks.list("src") == []
    for chunk in planning.cut_plan(context, inventories.take_inventory(context)).chunks:
        archive_chunk(context, chunk.name)
    assert context.ledger.chunks.account("src").located_objects == 30


def test_a_plan_removes_temporary_files_of_killed_processes(run_context):
    context = run_context()
    snapshot = inventories.take_inventory(context)
    temporary = [
        context.inventories() / ".src-1.parquet.tmp",
        context.plans() / ".accounting-x",
        context.staging() / ".restoring-x",
    ]
    kept = [context.staging() / f"src-00000000-00001{end}" for end in (".1.journal", ".caf")]
    for path in (*temporary, *kept):
        path.touch()
    query = Query(context.inventories() / "any", DEFAULT_BUDGET, functions={}, macros=[])
    with query, planning.temporary_folder(context), rebuild._spool(context, encrypted=False):
        planning.remove_temporary(context)
        assert all(path.exists() for path in temporary)
    planning.cut_plan(context, snapshot)
    assert [path.exists() for path in (*temporary, *kept)] == [False, False, False, True, True]


def test_patient_plan_waits_for_another_and_keeps_its_inventory(run_context, monkeypatch):
    context, held, lease = run_context(), [], RunContext.lease

    def held_twice(self, name):
        held.append(name)
        for _ in range(inventories.WHOLE_KEPT + 1):
            # a preview of another process, which removes older snapshots
            inventories.take_inventory(context, to_plan=False)
        if len(held) < 3:
            raise HeldByOther(f"{name} is held by run another", holder="another")
        return lease(self, name)

    snapshot = inventories.take_inventory(context)
    monkeypatch.setattr(RunContext, "lease", held_twice)
    with pytest.raises(HeldByOther):
        planning.cut_plan(context, snapshot)
    snapshot = inventories.take_inventory(context, to_plan=False)
    assert planning.cut_plan(context, snapshot, patience_seconds=3600).chunks
    assert held == ["plan/src"] * 3


def named_in_a_time_to_come(snapshot):
    """Rename a snapshot as if the clock had been ahead."""
    return snapshot.path.rename(
        snapshot.path.with_name(f"src-2099{snapshot.name.removeprefix('src-')[4:]}.parquet")
    )


def test_snapshots_from_future_clock_do_not_hide_later_ones(run_context, source, monkeypatch):
    monkeypatch.setattr(inventories, "PARTIAL_KEPT", 2)
    moments = (MOMENT + timedelta(hours=hours) for hours in count())
    monkeypatch.setattr(source.__class__, "clock", lambda _: next(moments))
    context = run_context()
    for _ in range(inventories.WHOLE_KEPT):
        named_in_a_time_to_come(inventories.take_inventory(context))
        named_in_a_time_to_come(inventories.take_inventory(context, until=b"key-001"))
    source.bodies["new"] = b"new"
    context = replace(context, holder=this_process("run-2"))
    part = inventories.take_inventory(context, after=b"key")
    assert inventories.snapshot_to_plan(context) == part
    whole = inventories.take_inventory(context)
    assert part.path.exists()
    assert inventories.latest_snapshot(context, complete=True) == whole
    for _ in range(inventories.WHOLE_KEPT):
        inventories.take_inventory(context)
        inventories.take_inventory(context, until=b"key-001")
    assert list(context.inventories().glob("*-2099*")) == []


@pytest.mark.thorough
@pytest.mark.parametrize("read", [planning.cut_plan, planning.account_for, preview_plan])
def test_snapshot_in_use_is_kept_despite_newer_ones(run_context, monkeypatch, read):
    context = run_context()
    snapshot = inventories.take_inventory(context)
    export = planning.export_state

    def export_slowly(*args, **known):
        for _ in range(inventories.WHOLE_KEPT):
            inventories.take_inventory(context, to_plan=False)
        return export(*args, **known)

    monkeypatch.setattr(planning, "export_state", export_slowly)
    assert read(context, snapshot)
    inventories.take_inventory(context)
    assert not snapshot.path.exists()


def test_a_damaged_snapshot_is_taken_again_and_refused_until_then(run_context, source):
    context = run_context()
    damaged = inventories.take_inventory(context)
    with damaged.path.open("r+b") as file:
        file.truncate(damaged.path.stat().st_size - 1)
    other = replace(context, holder=this_process("run-2"))
    with pytest.raises(IntegrityError, match=damaged.path.name):
        inventories.snapshot_to_plan(other)
    taken = inventories.take_inventory(context)
    assert (inventories.snapshot_to_plan(context), inventories.snapshot_to_plan(other)) == (
        taken,
        taken,
    )
    assert inventories.latest_snapshot(context, complete=True) == taken
