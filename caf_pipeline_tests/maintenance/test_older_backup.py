"""A ledger restored from an older backup: later posts are neither paid twice nor lost."""

import dataclasses
import itertools
import os
import shutil

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import StoredAlready
from caf_pipeline.ledger import backup
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.transactions import TransactionLog
from caf_pipeline.maintenance import rebuild
from caf_pipeline.maintenance.doctor.findings import Kind
from caf_pipeline.maintenance.rebuild import FileKind
from caf_pipeline.run_context import Lazy
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.steps.preview import preview_plan
from caf_pipeline_tests.contracts.chunk_store import corrupt
from caf_pipeline_tests.support.doctors import mended
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.new_ledgers import new_ledger  # noqa: F401 - a fixture
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import (
    a_run_context,
    archive_chunk,
    archive_everything,
    every_object_reads_back,
    first_chunk,
    object_bytes,
    plan,
)
from caf_pipeline_tests.support.several_folders import SeveralFolders

_numbers = itertools.count(1)


def bodies():
    return {f"key-{number}": os.urandom(5_000) for number in range(5)}


@pytest.fixture
def open_context(tmp_path, wallet, jackal_context):
    """Return a function that opens a new source with a ledger."""

    def make(name, ledger):
        source = {"bucket": f"older-{next(_numbers)}", "target_size": "8MiB", "public": True}
        return jackal_context(
            MemorySource(bodies()),
            ledger,
            folder=tmp_path / name,
            jackal={"mnemonic": wallet.words},
            sources={"src": source},
        )

    return make


@pytest.fixture
def context(open_context, ledger):
    return open_context("first", ledger)


@pytest.fixture
def in_folders(tmp_path, ledger):
    return a_run_context(
        tmp_path / "first", MemorySource(bodies()), ledger, store=SeveralFolders(tmp_path / "store")
    )


@pytest.fixture
def in_a_folder(tmp_path, ledger):
    return a_run_context(tmp_path / "first", MemorySource(bodies()), ledger)


def backed_up(context, tmp_path):
    path = tmp_path / f"{next(_numbers)}.dump"
    backup.back_up(context.ledger.database, path, embedded=True)
    return path


def restored(context, path):
    """Restore the ledger, and end the pause. Staging is empty, as on another machine."""
    database = context.ledger.database
    backup.restore(backup.Programs(database, embedded=True), path, reason="a test")
    context.ledger.controls.set("paused", None)
    shutil.rmtree(context.staging())


def run(context):
    """Plan and archive as `caf run` does."""
    planning.cut_plan(context, inventories.take_inventory(context))
    for chunk in context.ledger.chunks.list(
        "src", [ChunkState.PLANNED, ChunkState.PACKING, ChunkState.SEALED, ChunkState.POSTING]
    ):
        archive_chunk(context, chunk.name)


def posts_of(context):
    return sorted(file.posting.start for file in context.store.posted(context.archive_id))


def a_chunk_archived_since(context, tmp_path, *, until=None):
    """Back up with an unfinished chunk, archive it, overwrite an object, and restore the backup."""
    name = first_chunk(context)
    if until:
        archive_chunk(context, name, until=until)
    path = backed_up(context, tmp_path)
    archive_chunk(context, name)
    context.objects.bodies["key-1"] = os.urandom(5_000)
    restored(context, path)
    return name


@pytest.mark.thorough
@pytest.mark.parametrize("until", [None, chunk_steps.load_batch, chunk_steps.seal_chunk])
@pytest.mark.parametrize("store", ["context", "in_folders", "in_a_folder"])
def test_a_chunk_archived_since_the_backup_is_never_posted_twice(request, tmp_path, store, until):
    context = request.getfixturevalue(store)
    name = a_chunk_archived_since(context, tmp_path, until=until)
    for _ in range(2):
        with pytest.raises(StoredAlready, match="does not know") as refused:
            run(context)
        assert "caf doctor" in refused.value.hint
    assert len(posts_of(context)) == 1
    assert (Kind.FILE, name, "restored, with 5 locations") in mended(context)
    assert context.ledger.chunks.get(name).state is ChunkState.LOCATED
    run(context)
    assert len(posts_of(context)) == 2  # the second chunk has the overwritten object
    every_object_reads_back(context)


def test_preview_warns_of_unknown_posts(in_a_folder, tmp_path):
    a_chunk_archived_since(in_a_folder, tmp_path)
    preview = preview_plan(in_a_folder, inventories.take_inventory(in_a_folder))
    assert "caf doctor" in preview.warning


@pytest.mark.thorough
def test_planned_chunk_is_not_packed_before_the_doctor_came(context, tmp_path):
    name = a_chunk_archived_since(context, tmp_path)
    with pytest.raises(StoredAlready):
        chunk_steps.load_batch(context, name)
    assert context.ledger.chunks.get(name).state is ChunkState.PLANNED
    assert context.ledger.rebuilds.unknown_posts("src") == 1
    mended(context)
    assert context.ledger.rebuilds.unknown_posts("src") == 0


@pytest.mark.thorough
def test_new_archive_archives_unknown_objects_again(context, tmp_path):
    name = a_chunk_archived_since(context, tmp_path)
    planning.cut_plan(context, inventories.take_inventory(context), new_archive=True)
    archive_chunk(context, name)
    assert len(posts_of(context)) == 2


@pytest.mark.thorough
def test_posts_of_another_archive_cost_one_look(context, open_context, new_ledger, monkeypatch):
    archive_everything(context)
    archive_everything(open_context("other", new_ledger()))
    looks, record = [], TransactionLog.record_look
    monkeypatch.setattr(
        TransactionLog, "record_look", lambda *args: (looks.append(args[3]), record(*args))
    )
    for number in range(2):
        context.objects.bodies[f"new-{number}"] = b"new"
        run(context)
    assert len(looks) == 1
    every_object_reads_back(context)


@pytest.mark.thorough
def test_false_sequence_is_checked_and_forgotten(context, monkeypatch):
    archive_everything(context)
    log = context.ledger.transactions(context.holder)
    account = context.store.poster.account
    assert log.explains(account, context.archive_id, 1)
    log.record_look(account, context.archive_id, 10**17, 0)
    assert not log.explains(account, context.archive_id, 1)
    assert context.store.unknown_posts(context.archive_id, log) == []
    assert log.explains(account, context.archive_id, 1)
    assert not log.explains(account, context.archive_id, 2)


def test_file_of_a_liar_is_not_taken_for_a_chunk(in_folders, tmp_path):
    context = in_folders
    name = a_chunk_archived_since(context, tmp_path)
    posting = next(iter(context.store.posts.values()))
    for provider in context.store.folders:
        file = context.store.file(provider, posting)
        corrupt(file, file.stat().st_size // 2)
    assert not any(
        kind is Kind.FILE and "restored, with" in done for kind, _, done in mended(context)
    )
    assert context.ledger.chunks.get(name).state is ChunkState.PLANNED
    with pytest.raises(StoredAlready):
        run(context)


@pytest.mark.thorough
def test_rebuild_keeps_both_of_two_files_of_one_name(in_folders, tmp_path, new_ledger):
    context = in_folders
    old = context.objects.bodies["key-1"]
    name = a_chunk_archived_since(context, tmp_path)
    plan(context)  # an operator orders a second copy
    archive_chunk(context, name)
    assert len(posts_of(context)) == 2
    lost = dataclasses.replace(context, lazy_ledger=Lazy.of(new_ledger()))
    lost.ledger.sources.register(lost.source, lost.address)
    outcomes = list(rebuild.rebuild(lost))
    assert [outcome.finding.kind for outcome in outcomes].count(FileKind.CHUNK) >= 1
    assert all(outcome.complete for outcome in outcomes)
    assert old in (object_bytes(lost, "key-1"), old)
    run(lost)
    every_object_reads_back(lost)


def test_restore_pauses_and_no_old_lease_is_good(in_a_folder, tmp_path, database):
    context = in_a_folder
    (chunk,) = plan(context).chunks
    path = backed_up(context, tmp_path)
    archive_chunk(context, chunk.name)
    with connected(database) as connection:
        before = connection.execute("SELECT max(epoch) FROM leases").scalar_one()
    backup.restore(backup.Programs(database, embedded=True), path, reason="it's a test")
    assert context.ledger.controls.current().paused == "it's a test"
    assert context.ledger.chunks.get(chunk.name).epoch > before
    with Ledger(database).leases.hold("chunk/" + chunk.name, context.holder) as lease:
        assert lease.epoch > before
