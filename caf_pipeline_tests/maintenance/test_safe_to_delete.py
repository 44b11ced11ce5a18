"""Safe deletion: with a store of several folders, with Jackal, and with a real S3 server."""

import ast
import hashlib
import os
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

import caf_pipeline
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import (
    ChainUnreachable,
    HeldByOther,
    IntegrityError,
    LeaseLost,
    LedgerError,
    StagingError,
    StoreUnreachable,
    UsageError,
)
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.engine import LedgerEngine
from caf_pipeline.ledger.leases import HeldLease
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.maintenance.deletion import assessment
from caf_pipeline.maintenance.deletion import safe_to_delete as deletion
from caf_pipeline.maintenance.deletion.files import BatchManifest
from caf_pipeline.maintenance.deletion.safe_to_delete import find_deletable
from caf_pipeline.maintenance.repair import repair_chunk
from caf_pipeline.maintenance.scrub import WHOLE_COPY, prove_chunk
from caf_pipeline.source.protocol import Checksum
from caf_pipeline.steps import chunk_steps, inventories
from caf_pipeline.steps.compare_headers import OTHER_BYTES, WITHOUT_CHECKSUM
from caf_pipeline.system.processes import this_process
from caf_pipeline_tests.contracts.chunk_store import corrupt, place_between
from caf_pipeline_tests.support.current_content import next_second
from caf_pipeline_tests.support.deletion_lists import Answer, next_window, pass_window
from caf_pipeline_tests.support.jackal_network import ADDRESS, SPACE
from caf_pipeline_tests.support.md5_collision import FIRST, SECOND
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.plans import MOMENT
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import (
    a_run_context,
    archive_chunk,
    archive_everything,
    object_bytes,
    plan,
)
from caf_pipeline_tests.support.tiers import sampled

BODIES = {f"key-{number:03d}": os.urandom(100_000) for number in range(30)}


@pytest.fixture
def context(tmp_path, ledger, store):
    """Return a source of three chunks and a store of three providers."""
    return a_run_context(tmp_path, MemorySource(dict(BODIES)), ledger, store=store)


@pytest.fixture
def names(context):
    return archive_everything(context)


@pytest.fixture
def proven(context, store, names):
    """Return the names of the chunks, which were proven in the window before the current one."""
    pass_window(context, store)
    return names


def posting(context, name):
    return chunk_steps.posting_of(context.ledger.chunks.get(name))


def keys_of(context, name) -> set[str]:
    return {
        key
        for key in BODIES
        if (found := context.ledger.lookup.locate("src", key)) and found.chunk == name
    }


A_BYTE_LESS = "end_byte = end_byte - 1"


def tamper(database, change: str, key: str = "key-000") -> None:
    with connected(database) as connection:
        connection.execute(
            f"UPDATE file_locations SET {change} WHERE file_path = %(key)s", {"key": key}
        )


def flip_between_samples(context, name, provider) -> None:
    """Change a byte outside of the chunk's samples."""
    place = place_between(context.ledger.chunks.get(name).samples)
    corrupt(context.store.file(provider, posting(context, name)), at=place)


# --- what is safe
# ------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_objects_are_safe_after_two_proofs_and_a_full_read(context, tmp_path, proven):
    answer = Answer(context, tmp_path)
    assert answer.keys == sorted(BODIES)
    assert {bucket for bucket, *_ in answer.listed} == {"b"}
    assert (answer.found.everything_is_safe, answer.found.safe_bytes) == (
        True,
        sum(map(len, BODIES.values())),
    )
    assert answer.found.read_back[0] == len(proven)
    assert all(context.ledger.chunks.get(name).read_back_at for name in proven)


@pytest.mark.thorough
def test_list_inventory_outlives_later_inventories(context, tmp_path, proven, monkeypatch):
    recheck = assessment.ChunkAssessor.recheck

    def recheck_slowly(*args):
        for _ in range(inventories.WHOLE_KEPT):
            inventories.take_inventory(context)
        return recheck(*args)

    monkeypatch.setattr(assessment.ChunkAssessor, "recheck", recheck_slowly)
    assert Answer(context, tmp_path).found.safe_objects == len(BODIES)


@pytest.mark.thorough
def test_a_chunk_is_read_back_once(context, store, tmp_path, proven, monkeypatch):
    Answer(context, tmp_path)
    whole = []
    original = store.read

    def counted(at, start, end, **named):
        whole.append(end - start == at.stored_size_bytes)
        return original(at, start, end, **named)

    monkeypatch.setattr(store, "read", counted)
    assert Answer(context, tmp_path).keys == sorted(BODIES)
    assert whole
    assert not any(whole)


@pytest.mark.thorough
def test_a_source_without_objects_has_nothing_to_delete(context, tmp_path, proven):
    context.objects.bodies.clear()
    answer = Answer(context, tmp_path)
    assert (answer.found.everything_is_safe, answer.found.manifest, answer.found.gone) == (
        True,
        None,
        len(BODIES),
    )


# --- why something is not safe
# ---------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_one_proof_window_is_not_enough(context, store, tmp_path, names):
    store.window = store.now = 4
    answer = Answer(context, tmp_path)
    assert set(answer.reasons.values()) == {"one_window"}
    (detail,) = answer.details
    assert "1 of 2" in detail
    assert "60 minutes" in detail
    assert answer.found.manifest is None
    store.window = store.now = 5
    assert Answer(context, tmp_path).keys == sorted(BODIES)


@pytest.mark.thorough
@pytest.mark.parametrize("between", sampled([1, 2, 40], every=3))
def test_two_windows_count_only_if_they_follow_each_other(
    context, store, tmp_path, proven, between
):
    store.window = store.now = store.now + between
    answer = Answer(context, tmp_path)
    assert set(answer.reasons.values()) == {"one_window"}
    assert all("1 of 2" in detail for detail in answer.details)
    store.window = store.now = store.now + 1
    assert Answer(context, tmp_path).keys == sorted(BODIES)


@pytest.mark.thorough
def test_unverified_proof_window_does_not_count(context, store, tmp_path, proven):
    store.unverified = {"bert"}
    answer = Answer(context, tmp_path)
    assert set(answer.reasons.values()) == {"one_window"}
    assert context.ledger.chunks.get(proven[0]).state is ChunkState.LOCATED


@pytest.mark.thorough
def test_two_windows_count_for_one_more_window(context, store, tmp_path, proven):
    assert Answer(context, tmp_path).keys == sorted(BODIES)
    store.unverified = {"anna", "bert", "carl"}
    store.window = store.now = store.now + 1
    assert Answer(context, tmp_path).keys == sorted(BODIES)
    store.window = store.now = store.now + 1  # they may have been dropped and have joined again
    assert set(Answer(context, tmp_path).reasons.values()) == {"one_window"}


@pytest.mark.thorough
def test_full_read_of_a_lost_copy_is_repeated_from_another(context, store, tmp_path, proven):
    store.required_copies = 2
    assert Answer(context, tmp_path).keys == sorted(BODIES)
    store.unlisted = {"anna"}
    assert set(Answer(context, tmp_path).reasons.values()) == {"not_read_back"}
    answer = Answer(context, tmp_path)
    assert (answer.keys, answer.found.read_back[0]) == (sorted(BODIES), len(proven))


@pytest.fixture
def small(tmp_path, ledger, store):
    """Return a run context and the name of its small chunk, without verified proofs."""
    context = a_run_context(tmp_path, MemorySource({"key": b"body"}), ledger, store=store)
    store.unverified = {"anna", "bert", "carl"}
    (name,) = archive_everything(context)
    assert context.ledger.chunks.get(name).stored_size_bytes <= 20_480
    return context, name


@pytest.mark.thorough
def test_small_file_needs_full_reads_in_two_windows(small, store, tmp_path):
    context, _ = small
    store.window = store.now = 3
    answer = Answer(context, tmp_path)
    assert answer.reasons == {"key": "one_window"}
    assert all("1 of 2" in detail for detail in answer.details)
    assert Answer(context, tmp_path).reasons == {"key": "one_window"}
    store.window = store.now = 9
    assert Answer(context, tmp_path).keys == ["key"]


@pytest.mark.thorough
def test_small_file_with_one_unread_copy_is_not_safe(small, store, tmp_path):
    context, _ = small
    store.window = store.now = 3
    Answer(context, tmp_path)
    store.window = store.now = 4
    store.away = {"bert"}
    assert Answer(context, tmp_path).reasons == {"key": "one_window"}
    store.away = set()
    assert Answer(context, tmp_path).keys == ["key"]


def test_every_look_at_a_small_file_finds_wrong_bytes(small, store, tmp_path):
    context, name = small
    store.window = store.now = 3
    assert prove_chunk(context, name).verdict == "unverified"
    corrupt(
        store.file("carl", posting(context, name)),
        at=context.ledger.chunks.get(name).stored_size_bytes // 2,
    )
    assert prove_chunk(context, name).chunk.state is ChunkState.DAMAGED


@pytest.mark.thorough
def test_objects_of_a_damaged_chunk_are_not_safe(context, store, tmp_path, proven):
    store.file("anna", posting(context, proven[0])).write_bytes(
        b"x" * context.ledger.chunks.get(proven[0]).stored_size_bytes
    )
    answer = Answer(context, tmp_path)
    assert answer.reasons == dict.fromkeys(keys_of(context, proven[0]), "damaged")
    assert answer.keys == sorted(BODIES.keys() - keys_of(context, proven[0]))


@pytest.mark.thorough
def test_without_reading_back_nothing_new_is_safe(context, tmp_path, proven):
    answer = Answer(context, tmp_path, reads_back=False)
    assert set(answer.reasons.values()) == {"not_read_back"}
    assert answer.found.read_back == (0, 0)


@pytest.mark.thorough
def test_new_replaced_and_deleted_objects_have_their_reasons(context, tmp_path, proven):
    bodies = context.objects.bodies
    bodies["key-007"], bodies["new"] = bytes(len(BODIES["key-007"])), b"n"
    del bodies["key-001"]
    answer = Answer(context, tmp_path)
    assert answer.reasons == {"key-007": "changed", "new": "not_planned"}
    assert answer.keys == sorted(BODIES.keys() - {"key-007", "key-001"})
    assert (answer.found.gone, list(answer.found.gone_examples)) == (1, ["key-001"])
    for chunk in plan(context).chunks:
        archive_chunk(context, chunk.name, until=chunk_steps.verify_stored)
    assert Answer(context, tmp_path).reasons == {"key-007": "claimed", "new": "claimed"}


@pytest.mark.thorough
@pytest.mark.usefixtures("proven")
def test_rewritten_object_is_compared_despite_a_filter(context, ledger, store, tmp_path):
    class WrittenAgain(MemorySource):
        def object(self, key):
            return replace(
                super().object(key),
                last_modified=MOMENT + timedelta(days=key in ("key-000", "key-001")),
            )

    checksums = {
        key: Checksum("sha256", hashlib.sha256(BODIES[key]).digest())
        for key in ("key-000", "key-001")
    }
    objects = WrittenAgain(
        context.objects.bodies, headers={"key-001": ObjectHeaders("text/html")}, checksums=checksums
    )
    sources = {"src": {"bucket": "b", "public": True, "exclude": ["key-00*"]}}
    answer = Answer(
        a_run_context(tmp_path, objects, ledger, store=store, sources=sources), tmp_path
    )
    assert (answer.found.safe_objects, answer.reasons) == (29, {"key-001": "metadata_changed"})


@pytest.mark.thorough
@pytest.mark.parametrize("has_checksum", [False, True])
def test_other_bytes_with_the_same_etag_are_safe_once_archived(
    ledger, store, new_bucket, tmp_path, has_checksum
):
    checksum, detail = (
        ({"ChecksumAlgorithm": "SHA256"}, OTHER_BYTES) if has_checksum else ({}, WITHOUT_CHECKSUM)
    )
    context = a_run_context(tmp_path, new_bucket.source(), ledger, store=store)
    new_bucket.put("k", FIRST, **checksum)
    archive_everything(context)
    pass_window(context, store)
    assert Answer(context, tmp_path).keys == ["k"]
    next_second()
    new_bucket.put("k", SECOND, **checksum)
    for _ in range(2):
        answer = Answer(context, tmp_path)
        assert (answer.keys, answer.reasons, answer.details) == ([], {"k": "rewritten"}, {detail})
        pass_window(context, store)
    archive_everything(context)
    assert object_bytes(context, "k") == SECOND
    assert Answer(context, tmp_path).reasons == {"k": "one_window"}
    pass_window(context, store)
    assert Answer(context, tmp_path).keys == ["k"]
    assert plan(context).chunks == []


@pytest.mark.thorough
def test_skipped_object_has_its_reason(context, tmp_path, store):
    context.objects.unavailable["key-003"] = (SkipReason.COLD_STORAGE, 0)
    archive_everything(context)
    pass_window(context, store)
    answer = Answer(context, tmp_path)
    assert answer.reasons == {"key-003": "skipped"}
    (told,) = answer.found.not_safe
    assert (told.skip, told.objects, told.size_bytes, list(told.examples)) == (
        "cold_storage",
        1,
        100_000,
        [("key-003", "")],
    )


@pytest.mark.thorough
def test_chunk_without_answers_affects_only_its_objects(context, store, tmp_path, proven):
    Answer(context, tmp_path)
    root = posting(context, proven[0]).merkle_root
    original = store.read

    def read(at, *arguments, **named):
        if at.merkle_root == root:
            raise StoreUnreachable("nobody answers")
        return original(at, *arguments, **named)

    store.read = read
    assert Answer(context, tmp_path).reasons == dict.fromkeys(
        keys_of(context, proven[0]), "not_looked_at"
    )
    assert context.ledger.chunks.get(proven[0]).state is ChunkState.LOCATED


@pytest.mark.thorough
def test_chunk_held_by_another_run_is_skipped(tmp_path, database, store):
    ledger = Ledger(database, lease_seconds=1.5)
    context = a_run_context(tmp_path, MemorySource(dict(BODIES)), ledger, store=store)
    first, *_ = archive_everything(context)
    pass_window(context, store)
    with ledger.leases.hold(chunk_lease(first), this_process("run-2")):
        answer = Answer(context, tmp_path)
    assert answer.reasons == dict.fromkeys(keys_of(context, first), "not_looked_at")
    assert Answer(context, tmp_path).found.everything_is_safe


@pytest.mark.thorough
@pytest.mark.parametrize("change", ["sha256 = sha256('x')", "start_byte = start_byte + 1"])
def test_wrong_row_is_detected_by_a_full_read(context, tmp_path, proven, database, change):
    tamper(database, change)
    answer = Answer(context, tmp_path)
    chunk = context.ledger.lookup.locate("src", "key-000").chunk
    assert answer.reasons == dict.fromkeys(keys_of(context, chunk), "disagrees")
    assert context.ledger.chunks.get(chunk).read_back_at is None
    assert Answer(context, tmp_path).reasons == answer.reasons


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change",
    [
        "sha256 = sha256('x')",
        "start_byte = start_byte + 1",
        A_BYTE_LESS,
        "header_set = NULL",
        "last_modified = last_modified - interval '1 day'",
        "s3_checksum = 'crc32:00000000'",
        "crc64nvme = '12345678'",
    ],
)
def test_row_changed_after_the_full_read_is_detected(context, tmp_path, proven, database, change):
    for _ in range(2):  # the second run compares no manifest
        assert Answer(context, tmp_path).found.everything_is_safe
    tamper(database, change)
    answer = Answer(context, tmp_path)
    assert answer.reasons == dict.fromkeys(
        keys_of(context, context.ledger.lookup.locate("src", "key-000").chunk), "disagrees"
    )


@pytest.mark.thorough
def test_header_set_with_other_texts_is_not_safe(context, tmp_path, proven, database):
    assert Answer(context, tmp_path).found.everything_is_safe
    with connected(database) as connection:
        connection.execute("UPDATE header_sets SET cache_control = 'no-store'")
    assert Answer(context, tmp_path).reasons == dict.fromkeys(BODIES, "disagrees")


@pytest.mark.thorough
def test_row_with_a_newer_identity_is_not_safe(context, tmp_path, proven, database):
    context.objects.bodies["key-000"] = bytes(len(BODIES["key-000"]))
    assert Answer(context, tmp_path).reasons == {"key-000": "changed"}
    now = context.objects.object("key-000")
    tamper(database, f"etag = '{now.etag}'")
    assert "key-000" not in Answer(context, tmp_path).keys


@pytest.mark.thorough
def test_wrong_manifest_is_read_from_the_next_provider(
    context, store, tmp_path, proven, monkeypatch
):
    original = assessment.LocatedRows.differing
    compared = []

    def differing(rows, caf_file_id, manifest):
        compared.append(caf_file_id)
        if compared.count(caf_file_id) == 1:  # the first provider of each chunk
            manifest.write_bytes(b"nonsense")
        return original(rows, caf_file_id, manifest)

    monkeypatch.setattr(assessment.LocatedRows, "differing", differing)
    assert Answer(context, tmp_path).found.everything_is_safe
    assert len(compared) == 2 * len(proven)
    assert Answer(context, tmp_path).found.everything_is_safe
    assert len(compared) == 2 * len(proven)


@pytest.mark.thorough
def test_a_manifest_from_outside_the_chunk_is_not_believed(
    context, store, tmp_path, proven, monkeypatch
):
    tails = []

    @contextmanager
    def tail(assessor, chunk, provider, opened):
        with original(assessor, chunk, provider, opened) as ((start, end, sha256), manifest):
            tails.append(chunk.name)
            yield (start, end, hashlib.sha256(sha256).digest()), manifest

    original = assessment.ChunkAssessor._tail
    with monkeypatch.context() as patch:
        patch.setattr(assessment.ChunkAssessor, "_tail", tail)
        answer = Answer(context, tmp_path)
    assert set(tails) == set(proven)
    assert set(answer.reasons.values()) == {"disagrees"}
    assert not any(context.ledger.chunks.get(name).agreed_sha256 for name in proven)
    assert Answer(context, tmp_path).found.everything_is_safe


@pytest.mark.thorough
def test_a_chunk_without_a_look_is_not_safe(context, tmp_path, proven, monkeypatch):
    Answer(context, tmp_path)
    monkeypatch.setattr(assessment.ChunkAssessor, "_prove", lambda *_: {})
    assert set(Answer(context, tmp_path).reasons.values()) == {"not_looked_at"}


@pytest.mark.thorough
def test_an_error_of_one_chunk_ends_the_question(context, tmp_path, proven, monkeypatch):
    original = assessment.prove_chunk

    def prove(run_context, name, **options):
        if name == proven[1]:
            raise IntegrityError("no answer that was foreseen")
        return original(run_context, name, **options)

    monkeypatch.setattr(assessment, "prove_chunk", prove)
    leaves(context, tmp_path, IntegrityError)


# --- reading back
# ------------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path, ledger, store, monkeypatch):
    """Return a run context and the name of its chunk, which no look reads completely."""
    monkeypatch.setattr(type(ledger.chunks), "any_object", lambda *_: None)
    bodies = {f"key-{number:03d}": os.urandom(300_000) for number in range(20)}
    context = a_run_context(tmp_path, MemorySource(bodies), ledger, store=store, target="8MiB")
    (name,) = archive_everything(context)
    pass_window(context, store)
    return context, name


def test_full_read_finds_bytes_that_samples_miss(large, tmp_path):
    context, name = large
    flip_between_samples(context, name, "anna")
    assert prove_chunk(context, name).proven
    answer = Answer(context, tmp_path)
    chunk = context.ledger.chunks.get(name)
    assert set(answer.reasons.values()) == {"damaged"}
    assert (chunk.state, chunk.read_back_at) == (ChunkState.DAMAGED, None)
    assert f"anna: {WHOLE_COPY}" in chunk.reason
    assert any("anna" in sentence for sentence in answer.notes)
    for _ in range(2):  # samples do not override the full read
        copies = context.ledger.replicas.list(name)
        assert [copy.provider for copy in copies if copy.fault] == ["anna"]
        assert not prove_chunk(context, name).proven


@pytest.mark.thorough
def test_repaired_chunk_needs_new_windows_and_a_full_read(large, store, tmp_path):
    context, name = large
    flip_between_samples(context, name, "anna")
    Answer(context, tmp_path)
    repair_chunk(context, name)
    assert context.ledger.chunks.get(name).state is ChunkState.LOCATED
    answer = Answer(context, tmp_path)
    assert set(answer.reasons.values()) == {"one_window"}
    assert context.ledger.chunks.get(name).read_back_at
    store.window = store.now = store.now + 1
    assert Answer(context, tmp_path).found.everything_is_safe


@pytest.mark.thorough
def test_chunk_added_during_export_is_not_read_without_rows(
    context, store, tmp_path, proven, monkeypatch
):
    original = context.ledger.exports.located

    def export(source, path):
        original(source, path)
        if "late" not in context.objects.bodies:
            context.objects.bodies["late"] = os.urandom(1000)
            (chunk,) = plan(context).chunks
            archive_chunk(context, chunk.name)

    monkeypatch.setattr(context.ledger.exports, "located", export)
    answer = Answer(context, tmp_path)
    assert "late" in answer.reasons
    assert (
        context.ledger.chunks.get(context.ledger.lookup.locate("src", "late").chunk).read_back_at
        is None
    )


@pytest.mark.thorough
def test_repair_that_keeps_the_wrong_byte_fails(large, store, tmp_path, monkeypatch):
    context, name = large
    flip_between_samples(context, name, "anna")
    Answer(context, tmp_path)
    monkeypatch.setattr(store, "put", lambda *_, **__: None)
    with pytest.raises(IntegrityError, match="2 of 3 copies"):
        repair_chunk(context, name)
    assert context.ledger.chunks.get(name).state is ChunkState.DAMAGED


@pytest.mark.thorough
def test_silent_provider_is_passed_over_without_damage(large, store, tmp_path):
    context, name = large
    store.away = {"anna"}
    assert Answer(context, tmp_path).found.everything_is_safe
    assert context.ledger.chunks.get(name).state is ChunkState.LOCATED


def test_unreadable_chunk_is_not_read_back(large, store, tmp_path, monkeypatch):
    context, _ = large
    monkeypatch.setattr(
        assessment,
        "read_back",
        lambda *_, **__: (_ for _ in ()).throw(StoreUnreachable("line down")),
    )
    answer = Answer(context, tmp_path)
    assert set(answer.reasons.values()) == {"not_read_back"}
    assert all("line down" in detail for detail in answer.details)


def test_a_broken_export_is_no_fault_of_a_provider(large, tmp_path, monkeypatch):
    context, name = large

    def broken(self, caf_file_id):
        raise IntegrityError("the export is torn")
        yield

    monkeypatch.setattr(assessment.LocatedRows, "ranges", broken)
    with pytest.raises(StagingError, match="torn"):
        Answer(context, tmp_path)
    assert context.ledger.chunks.get(name).state is ChunkState.LOCATED


@pytest.mark.thorough
def test_progress_adds_up_to_the_bytes_read(context, tmp_path, proven):
    done, totals = Counter(), {}

    class Bar:
        def __init__(self, title, total):
            self.title = title
            totals[title] = total

        def __enter__(self):
            return lambda size_bytes: done.update({self.title: size_bytes})

        def __exit__(self, *_):
            pass

    find_deletable(context, tmp_path / "l.csv", reporter=assessment.ProgressReporter(progress=Bar))
    stored = sum(context.ledger.chunks.get(name).stored_size_bytes for name in proven)
    titles = ["reading back", "proving", "comparing"]
    assert dict(done) == totals == dict.fromkeys(titles, stored)


# --- nothing half-done
# ------------------------------------------------------------------------------------------


def leaves(context, folder, error, match=None, **options):
    """Check that the command fails with this error and keeps the old list."""
    file = folder / "list.csv"
    file.write_text("b,old\n")
    before = sorted(folder.iterdir())
    with pytest.raises(error, match=match):
        find_deletable(context, file, report=folder / "rest.csv", **options)
    assert file.read_text() == "b,old\n"
    assert sorted(folder.iterdir()) == before


@pytest.mark.thorough
def test_a_chain_that_is_away_ends_the_question(context, store, tmp_path, proven, monkeypatch):
    def away(*_):
        raise ChainUnreachable("no LCD answers")

    monkeypatch.setattr(store, "copies", away)
    leaves(context, tmp_path, ChainUnreachable)
    assert {context.ledger.chunks.get(name).state for name in proven} == {ChunkState.LOCATED}


@pytest.mark.thorough
@pytest.mark.parametrize("change", [lambda batch: [batch.slice(1)], lambda batch: [batch] * 2])
def test_each_object_is_decided_on_once_or_nothing_is_listed(
    context, tmp_path, proven, monkeypatch, change
):
    original = deletion.Decisions.batches
    monkeypatch.setattr(
        deletion.Decisions,
        "batches",
        lambda self, **named: (b for batch in original(self, **named) for b in change(batch)),
    )
    leaves(context, tmp_path, IntegrityError, match="30 objects .* but (29|60)")


@pytest.mark.thorough
def test_the_list_and_the_report_are_two_files(context, tmp_path, proven):
    with pytest.raises(UsageError, match=r"list[.]csv"):
        find_deletable(context, tmp_path / "list.csv", report=tmp_path / "work" / ".." / "list.csv")
    assert not (tmp_path / "list.csv").exists()


@pytest.mark.thorough
def test_list_is_removed_when_nothing_is_safe(context, store, tmp_path, proven):
    Answer(context, tmp_path)
    store.unlisted = {"bert"}
    answer = Answer(context, tmp_path)
    assert set(answer.reasons.values()) == {"too_few_copies"}
    assert all("2 of 3 copies" in detail for detail in answer.details)
    assert not (tmp_path / "list.csv").exists()


@pytest.mark.thorough
def test_the_same_question_asked_twice_at_once_is_asked_once(context, tmp_path, proven):
    with context.ledger.leases.hold("deletion/src", this_process("run-2")):
        leaves(context, tmp_path, HeldByOther)


@pytest.mark.thorough
def test_a_question_whose_lease_was_taken_over_writes_nothing(
    tmp_path, database, proven, context, monkeypatch
):
    lease = HeldLease(LedgerEngine(database), "deletion/src", context.holder, seconds=0.5)
    others = context.ledger.leases.hold
    monkeypatch.setattr(
        context.ledger.leases,
        "hold",
        lambda name, holder, **more: lease if name == lease.name else others(name, holder, **more),
    )
    original = context.objects.list_pages

    def listing(**named):
        """Let another run take the lease, as from a paused run."""
        with connected(database) as connection:
            connection.execute("UPDATE leases SET epoch = epoch + 1 WHERE name = 'deletion/src'")
        noticed = False
        while not noticed:
            try:
                lease.check()
            except LeaseLost:
                noticed = True
        yield from original(**named)

    monkeypatch.setattr(context.objects, "list_pages", listing)
    leaves(context, tmp_path, LeaseLost)


@pytest.mark.thorough
def test_chunk_damaged_during_the_listing_is_not_safe(context, tmp_path, proven, monkeypatch):
    original = context.objects.list_pages

    def listing(**named):
        with context.ledger.leases.hold(chunk_lease(proven[0]), this_process("the watch")) as lease:
            context.ledger.moves.move(
                lease, proven[0], ChunkState.LOCATED, ChunkState.DAMAGED, reason="seen by the watch"
            )
        yield from original(**named)

    monkeypatch.setattr(context.objects, "list_pages", listing)
    assert Answer(context, tmp_path).reasons == dict.fromkeys(
        keys_of(context, proven[0]), "not_looked_at"
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM file_locations WHERE file_path = 'key-000'",
        "UPDATE file_locations SET caf_file_id = (SELECT max(caf_file_id) FROM caf_files) WHERE "
        "file_path = 'key-000'",
    ],
)
def test_rows_lost_or_moved_during_the_listing_are_not_safe(
    context, tmp_path, proven, database, change
):
    original, kept = context.objects.list_pages, keys_of(context, proven[1])

    def listing(**named):
        with connected(database) as connection:
            connection.execute(change)
        yield from original(**named)

    context.objects.list_pages = listing
    answer = Answer(context, tmp_path)
    assert answer.reasons["key-000"] == "not_looked_at"
    assert kept <= set(answer.keys)


@pytest.mark.thorough
def test_windows_that_end_during_the_listing_do_not_count(context, store, tmp_path, proven):
    original = context.objects.list_pages

    def listing(**named):
        store.window = store.now = store.now + 2
        yield from original(**named)

    context.objects.list_pages = listing
    answer = Answer(context, tmp_path)
    assert answer.reasons == dict.fromkeys(BODIES, "one_window")


@pytest.mark.thorough
def test_windows_that_end_during_the_write_end_it(context, store, tmp_path, proven, monkeypatch):
    original = deletion.Decisions.batches

    def batches(self, **named):
        yield from original(self, **named)
        store.window = store.now = store.now + 2

    monkeypatch.setattr(deletion.Decisions, "batches", batches)
    leaves(context, tmp_path, LedgerError, match="one_window")


@pytest.mark.thorough
def test_chunk_damaged_during_the_write_ends_it(context, tmp_path, proven, monkeypatch):
    original = deletion.Decisions.batches

    def batches(self, **named):
        yield from original(self, **named)
        with context.ledger.leases.hold(chunk_lease(proven[0]), this_process("the watch")) as lease:
            context.ledger.moves.move(
                lease, proven[0], ChunkState.LOCATED, ChunkState.DAMAGED, reason="seen by the watch"
            )

    monkeypatch.setattr(deletion.Decisions, "batches", batches)
    leaves(context, tmp_path, LedgerError, match="chunk")


@pytest.mark.thorough
def test_an_object_that_changes_while_chunks_are_read_is_seen(
    context, store, tmp_path, proven, monkeypatch
):
    original = store.read

    def read(at, *arguments, **named):
        context.objects.bodies["key-009"] = b"changed meanwhile"
        return original(at, *arguments, **named)

    monkeypatch.setattr(store, "read", read)
    assert Answer(context, tmp_path).reasons == {"key-009": "changed"}


@pytest.mark.thorough
def test_nothing_is_left_beside_the_two_files(context, tmp_path, proven):
    folder = tmp_path / "out"
    folder.mkdir()
    Answer(context, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["list.csv", "rest.parquet"]
    assert not list(context.plans().glob(".*"))


@pytest.mark.thorough
def test_two_ledgers_with_one_home_do_not_share_files(context, databases, tmp_path, proven):
    original = context.objects.list_pages

    def listing(**named):
        with databases.taken() as database:
            other = a_run_context(tmp_path, MemorySource({}), Ledger(database), store=context.store)
            assert find_deletable(other, tmp_path / "other.csv").manifest is None
        yield from original(**named)

    context.objects.list_pages = listing
    assert Answer(context, tmp_path).found.everything_is_safe


@pytest.mark.thorough
def test_a_kill_between_the_files_leaves_no_older_list(context, tmp_path, proven, monkeypatch):
    Answer(context, tmp_path)

    def kill(report):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(deletion.Report, "publish", kill)
        with pytest.raises(KeyboardInterrupt):
            Answer(context, tmp_path)
    assert not (tmp_path / "list.csv").exists()
    assert Answer(context, tmp_path).found.everything_is_safe


def test_a_new_list_has_the_permissions_of_the_older(tmp_path):
    path = tmp_path / "list.csv"
    path.touch()
    path.chmod(0o640)
    manifest = BatchManifest(path, "tag", bucket="b", with_versions=False)
    manifest.add(pa.record_batch({"encoded_key": ["key"]}))
    manifest.remove_older()
    assert not path.exists()
    manifest.publish()
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("b,key\n", 0o640)


@pytest.mark.thorough
def test_an_interrupt_waits_for_the_chunks_under_way(context, tmp_path, proven, monkeypatch):
    begun, ended, interrupted = [], [], threading.Event()
    original = assessment.LocatedRows.differing

    def differing(rows, caf_file_id, manifest):
        begun.append(caf_file_id)
        if len(begun) > 1:
            interrupted.wait(10)
            time.sleep(0.2)
        manifest.write_bytes(manifest.read_bytes())  # its folder is still there
        ended.append(original(rows, caf_file_id, manifest))
        return ended[-1]

    @contextmanager
    def progress(title, total_bytes):
        def advance(size_bytes):
            if title == "comparing":
                interrupted.set()
                raise KeyboardInterrupt

        yield advance

    monkeypatch.setattr(assessment.LocatedRows, "differing", differing)
    leaves(
        context,
        tmp_path,
        KeyboardInterrupt,
        reporter=assessment.ProgressReporter(progress=progress),
    )
    assert len(ended) == len(begun) > 1


# --- real Jackal and S3
# ---------------------------------------------------------------------------------------


@pytest.fixture
def on_jackal(ledger, network, new_bucket, jackal_context):
    """Return a function that makes a run context of the bucket on the loopback network."""

    def make():
        sources = {"src": {"bucket": new_bucket.name, "target_size": "1MiB", "public": True}}
        return jackal_context(new_bucket.source(), ledger, jackal={}, sources=sources)

    network.grant(ADDRESS, SPACE)
    return make


@pytest.mark.thorough
@pytest.mark.parametrize("versions", [False, True])
def test_two_real_windows_make_a_bucket_safe_to_delete(
    on_jackal, network, new_bucket, tmp_path, versions
):
    if versions:
        new_bucket.keep_versions()
    put = {
        key: new_bucket.put(key, os.urandom(50_000))
        for key in ("a, b", 'q"', "100%", "p+q", "é/ü", "plain")
    }
    context = on_jackal()
    (name,) = archive_everything(context)
    first = Answer(context, tmp_path)
    assert set(first.reasons.values()) == {"one_window"}
    assert all("next window" in detail for detail in first.details)
    assert context.ledger.chunks.get(name).read_back_at
    next_window(context, network)
    answer = Answer(context, tmp_path)
    assert answer.found.everything_is_safe, answer.rest
    ids = {key: (done["VersionId"],) if versions else () for key, done in put.items()}
    assert answer.listed == [
        (new_bucket.name, key.encode(), *ids[key]) for key in sorted(put, key=str.encode)
    ]
    kept = new_bucket.client.list_objects_v2(Bucket=new_bucket.name)["Contents"]
    assert {location["Key"] for location in kept} == put.keys()


@pytest.mark.thorough
def test_new_version_excludes_the_old_one(on_jackal, network, new_bucket, tmp_path):
    new_bucket.put("null", b"before versions")
    new_bucket.keep_versions()
    for key in ("kept", "replaced", "deleted"):
        new_bucket.put(key, key.encode() * 1000)
    context = on_jackal()
    archive_everything(context)
    prove_chunk(context, context.ledger.chunks.list("src")[0].name)
    next_window(context, network)
    new_bucket.put("replaced", b"REPLACED" * 1000)
    new_bucket.delete("deleted")
    answer = Answer(context, tmp_path)
    assert answer.reasons == {"replaced": "changed"}
    assert [(key, version) for _, key, version in answer.listed if key == b"null"] == [
        (b"null", "null")
    ]
    assert answer.keys == ["kept", "null"]
    assert answer.found.gone_examples == ["deleted"]


def test_changed_headers_are_unsafe_until_archived_again(on_jackal, network, new_bucket, tmp_path):
    sha256 = {"ChecksumAlgorithm": "SHA256"}
    for key in ("same", "rewritten", "changed"):
        new_bucket.put(key, key.encode() * 10_000, Metadata={"a": "1"})
    context = on_jackal()
    archive_everything(context)
    prove_chunk(context, context.ledger.chunks.list("src")[0].name)
    next_window(context, network)
    next_second()
    new_bucket.put("rewritten", b"rewritten" * 10_000, Metadata={"a": "1"}, **sha256)
    new_bucket.put("changed", b"changed" * 10_000, Metadata={"a": "2"}, **sha256)
    answer = Answer(context, tmp_path)
    assert (answer.keys, answer.reasons) == (["rewritten", "same"], {"changed": "metadata_changed"})
    archive_everything(context)
    again = Answer(context, tmp_path)
    assert set(again.reasons.values()) <= {
        "one_window"
    }  # of the new chunk; windows of the two pass at different blocks


# --- nothing here deletes
# ------------------------------------------------------------------------------------------

ASKED_OF_SOURCES = {
    "list_objects_v2",
    "list_object_versions",
    "get_bucket_versioning",
    "get_bucket_inventory_configuration",
    "get_paginator",
    "head_bucket",
    "head_object",
    "get_object",
}
"""All S3 calls of this project, none of which changes anything."""

NO_REQUESTS = {"meta", "_get_credentials", "_endpoint", "exceptions", "close"}
PACKAGE = Path(caf_pipeline.__file__).parent
OF_S3 = sorted((PACKAGE / "source" / "s3").glob("*.py"))


def attributes_of(module: Path, *owners: str) -> set[str]:
    """Return the attributes that a module uses of objects with these names."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            owner = (
                node.value.attr
                if isinstance(node.value, ast.Attribute)
                else getattr(node.value, "id", "")
            )
            if owner in owners:
                found.add(node.attr)
    return found


WRITES = {
    "target.py": {
        "put_object",
        "create_multipart_upload",
        "upload_part",
        "complete_multipart_upload",
        "abort_multipart_upload",
    },
    "queue.py": {"receive_message", "delete_message_batch"},
}
"""Further calls of two modules: writing a restore, and reading the queue of events."""


def test_only_requests_that_change_nothing_are_sent_to_sources():
    used = {module.name: attributes_of(module, "client", "_client") for module in OF_S3}
    assert {"list_objects_v2", "get_object"} <= set().union(
        *used.values()
    )  # or this looks in the wrong place
    for name, asked in used.items():
        assert asked <= ASKED_OF_SOURCES | NO_REQUESTS | WRITES.get(name, set()), name


def test_bucket_writer_is_for_restores_only():
    importers = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if "s3.target" in path.read_text(encoding="utf-8")
    }
    assert importers == {"wiring.py"}


def test_gets_are_all_that_awscrt_is_asked_for():
    [module] = [module for module in OF_S3 if module.name == "get_client.py"]
    calls = [
        node
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]
    named = [
        (getattr(call.func, "attr", "") or getattr(call.func, "id", ""), call) for call in calls
    ]
    assert [ast.unparse(call.args[0]) for name, call in named if name == "HttpRequest"] == ["'GET'"]
    [asked] = [call for name, call in named if name == "make_request"]
    assert {word.arg: word.value for word in asked.keywords}["operation_name"].value == "GetObject"


@pytest.mark.thorough
def test_no_module_but_these_has_a_client_of_s3():
    clients = {
        "boto3",
        "botocore",
        "dagster_aws",
        "aiobotocore",
        "s3fs",
        "awscrt.s3",
        "awscrt.http",
    }
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        if names & clients or {name.split(".")[0] for name in names} & clients:
            assert path in {
                *OF_S3,
                PACKAGE / "defs" / "source_resource.py",
                PACKAGE / "defs" / "source_s3.py",
                PACKAGE / "system" / "ranges.py",
            }, path
            text_ = path.read_text(encoding="utf-8")
            writes = () if path.name == "target.py" else ("put_object", "upload_file", "PUT_OBJECT")
            for word in ("delete_object", "delete_bucket", "put_bucket", "copy_object", *writes):
                assert word not in text_, f"{path} names {word}"
