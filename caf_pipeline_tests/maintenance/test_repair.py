"""Repairs: sources of a chunk's bytes, new posts and uploads, and failed repairs."""

import os

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import CafError, NotProven, StoreError, StoreUnreachable
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.maintenance.repair import repair_chunk
from caf_pipeline.maintenance.scrub import prove_chunk
from caf_pipeline.packing.staging import staged_path
from caf_pipeline.steps import chunk_steps
from caf_pipeline_tests.contracts.chunk_store import corrupt, place_between
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.run_contexts import (
    a_run_context,
    archive_everything,
    every_object_reads_back,
    first_chunk,
)
from caf_pipeline_tests.support.tiers import sampled

EVERYBODY = ("anna", "bert", "carl")


@pytest.fixture
def context(tmp_path, ledger, store):
    source = MemorySource({f"key-{number:03d}": os.urandom(40_000) for number in range(10)})
    return a_run_context(tmp_path, source, ledger, store=store)


@pytest.fixture
def name(context):
    (name,) = archive_everything(context)
    return name


def posting(context, name):
    return chunk_steps.posting_of(context.ledger.chunks.get(name))


def damage(context, name, *providers):
    for provider in providers:
        corrupt(context.store.file(provider, posting(context, name)))
    assert prove_chunk(context, name).chunk.state is ChunkState.DAMAGED


def ends_right(context, name):
    assert context.ledger.chunks.get(name).state is ChunkState.LOCATED
    assert prove_chunk(context, name).proven
    assert [
        copy.provider
        for copy in context.ledger.replicas.list(name)
        if copy.listed and not copy.fault
    ] == [*EVERYBODY]
    every_object_reads_back(context)


@pytest.mark.thorough
def test_chunk_is_repaired_from_staging(context, store):
    store.hold = 3600
    (name,) = archive_everything(context)
    damage(context, name, *EVERYBODY)
    context.objects.bodies.clear()
    report = repair_chunk(context, name)
    assert (report.origin, report.posted_again, len(report.copies)) == ("staging", False, 3)
    assert context.ledger.chunks.get(name).state is ChunkState.LOCATED


def test_a_chunk_is_repaired_from_another_provider(context, name):
    damage(context, name, "anna", "bert")
    report = repair_chunk(context, name)
    assert (report.origin, report.posted_again) == ("provider", False)
    ends_right(context, name)
    assert list(context.staging().iterdir()) == []


def test_a_downloaded_chunk_is_durable_before_it_has_its_name(context, name, monkeypatch):
    damage(context, name, "anna", "bert")
    synced, was_durable = set(), []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor):
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def recorded_replace(old, new):
        if new == staged_path(context, name):
            was_durable.append(os.stat(old).st_ino in synced)
        replace(old, new)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    assert repair_chunk(context, name).origin == "provider"
    assert was_durable == [True]


def test_chunk_without_right_copies_is_packed_again(context, name):
    damage(context, name, *EVERYBODY)
    assert repair_chunk(context, name).origin == "source"
    ends_right(context, name)
    assert list(context.staging().iterdir()) == []


def test_a_staged_file_with_another_root_is_not_taken(context, store):
    store.hold = 3600
    (name,) = archive_everything(context)
    damage(context, name, "anna")
    corrupt(staged_path(context, name), at=70_000)
    assert repair_chunk(context, name).origin == "provider"
    ends_right(context, name)


@pytest.mark.thorough
def test_provider_with_wrong_bytes_between_samples_is_not_used(tmp_path, ledger, store):
    context = a_run_context(
        tmp_path, MemorySource({"large": os.urandom(8 << 20)}), ledger, store=store, target="16MiB"
    )
    (name,) = archive_everything(context)
    between = place_between(context.ledger.chunks.get(name).samples)
    corrupt(store.file("bert", posting(context, name)), at=between)
    damage(context, name, "anna")
    store.away = {"carl"}
    store.required_copies = 1
    report = repair_chunk(context, name)
    assert report.origin == "source"


@pytest.mark.thorough
def test_a_located_chunk_that_lacks_a_copy_gets_it(context, store, name):
    store.unlisted = {"bert"}
    store.file("bert", posting(context, name)).unlink()
    assert repair_chunk(context, name).origin == "provider"
    ends_right(context, name)


def test_unproven_damaged_chunk_stays_damaged(context, store, name):
    store.window, store.now = 4, 9
    assert "window 4" in prove_chunk(context, name).chunk.reason
    store.window, store.unverified = 9, {"anna", "bert", "carl"}  # dropped, and joined again
    with pytest.raises(NotProven, match="0 of 3 copies"):
        repair_chunk(context, name)
    assert context.ledger.chunks.get(name).state is ChunkState.DAMAGED
    store.unverified = set()
    assert repair_chunk(context, name).origin == "none needed"
    assert context.ledger.chunks.get(name).state is ChunkState.LOCATED


@pytest.mark.thorough
def test_small_damaged_file_is_located_after_a_full_read(tmp_path, ledger, store):
    context = a_run_context(tmp_path, MemorySource({"key": b"body"}), ledger, store=store)
    (name,) = archive_everything(context)
    store.unverified, store.now, store.window = {*EVERYBODY}, 4, 4
    damage(context, name, "anna")
    assert repair_chunk(context, name).origin == "provider"
    assert context.ledger.chunks.get(name).state is ChunkState.LOCATED


@pytest.mark.thorough
def test_recovered_chunk_is_located_again(context, store, name):
    store.unlisted = {"bert"}
    prove_chunk(context, name)
    store.unlisted = set()
    assert repair_chunk(context, name).origin == "none needed"
    ends_right(context, name)


def test_chunk_without_a_post_is_posted_again(context, store, name):
    before = posting(context, name)
    store.forget(before)
    prove_chunk(context, name)
    report = repair_chunk(context, name)
    assert (report.posted_again, report.origin) == (
        True,
        "provider",
    )  # a former provider still has it
    assert posting(context, name).start > before.start
    ends_right(context, name)


def test_failed_repair_does_not_post_twice(context, store, name):
    store.forget(posting(context, name))
    prove_chunk(context, name)
    store.away = {"anna"}
    with pytest.raises(CafError):
        repair_chunk(context, name)
    start = posting(context, name).start
    store.away = set()
    assert repair_chunk(context, name).posted_again is False
    assert posting(context, name).start == start
    ends_right(context, name)


def test_chunk_without_any_bytes_stays_damaged(context, name):
    damage(context, name, *EVERYBODY)
    context.objects.unavailable["key-003"] = (SkipReason.CHANGED, -1)
    with pytest.raises(StoreError, match=name):
        repair_chunk(context, name)
    assert context.ledger.chunks.get(name).state is ChunkState.DAMAGED
    assert list(context.staging().iterdir()) == []


def test_silent_providers_cause_no_repair(context, store, name):
    store.away = {"anna"}
    with pytest.raises(StoreUnreachable, match="anna"):
        repair_chunk(context, name)
    assert context.ledger.chunks.get(name).state is ChunkState.LOCATED


def test_a_repair_needs_room_and_removes_kept_files_for_it(tmp_path, ledger, store):
    source = MemorySource({f"key-{number:03d}": os.urandom(40_000) for number in range(20)})
    context = a_run_context(
        tmp_path, source, ledger, store=store, target="500KiB", packing={"staging_limit": "600KiB"}
    )
    store.hold = 3600
    first, *_, last = archive_everything(context)
    assert [path.name for path in context.staging().iterdir()] == [f"{last}.caf"]
    store.unlisted = {"bert"}
    assert repair_chunk(context, first).origin == "provider"
    assert [path.name for path in context.staging().iterdir()] == [f"{first}.caf"]


def test_a_chunk_under_way_is_not_repaired(context):
    name = first_chunk(context)
    with pytest.raises(CafError, match="is 'planned'"):
        repair_chunk(context, name)


class BrokenOff(BaseException):
    """The process ends here."""


STORE_CALLS = ("copies", "holders", "post", "put")
MOMENTS = 20
"""Moments of a repair with a new post: before and after each of ten calls."""


def break_off(patch, context, fatal):
    """Kill the repair before or after its n-th call; return the moments that passed."""
    moments = []

    def pass_moment():
        moments.append(len(moments) + 1)
        if len(moments) == fatal:
            raise BrokenOff

    def counted(original):
        def call(*arguments, **named):
            pass_moment()
            result = original(*arguments, **named)
            pass_moment()
            return result

        return call

    ledger = context.ledger
    watched = {
        ledger.staging: ("reserve", "release"),
        ledger.moves: ("record_repost", "move"),
        ledger.replicas: ("record_checks",),
        context.store: STORE_CALLS,
    }
    for owner, calls in watched.items():
        for call in calls:
            patch.setattr(owner, call, counted(getattr(owner, call)))
    return moments


@pytest.mark.thorough
@pytest.mark.parametrize("fatal", sampled(range(1, MOMENTS + 1), every=5))
def test_interrupted_repair_is_finished_by_the_next(context, store, name, monkeypatch, fatal):
    store.forget(posting(context, name))
    prove_chunk(context, name)
    with monkeypatch.context() as patch:
        moments = break_off(patch, context, fatal)
        with pytest.raises(BrokenOff):
            repair_chunk(context, name)
    assert len(moments) >= fatal
    repair_chunk(context, name)
    ends_right(context, name)
    assert list(context.staging().iterdir()) == []
