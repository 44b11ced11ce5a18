"""Encrypted chunks: what workers store, what an identity reads, and what a lost file costs."""

import os
import shutil
import subprocess
from dataclasses import replace

import pytest

from caf_pipeline.caf.archive import DEFAULT_LIMITS, CafReader
from caf_pipeline.chunk_state import UNDER_WAY, ChunkState
from caf_pipeline.encryption.opened_chunk import OpenedChunk, OpenedSource
from caf_pipeline.encryption.sealing import PRIVATE_LIMITS
from caf_pipeline.errors import (
    IdentityMissing,
    IntegrityError,
    NoMatchingIdentity,
    NotPublic,
    StoreError,
)
from caf_pipeline.formats import age
from caf_pipeline.maintenance.repair import repair_chunk
from caf_pipeline.packing.staging import staged_path
from caf_pipeline.reading.chunk_reader import StagedSource
from caf_pipeline.records import posting_of
from caf_pipeline.retrieval.key_check import KeyCheck, check_keys
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.steps.audit import account_for_chunk, fetch_members
from caf_pipeline.system.processes import this_process
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.private_contexts import IDENTITY, a_private_context
from caf_pipeline_tests.support.run_contexts import (
    CHUNK_STEPS,
    a_run_context,
    account_for_plan,
    archive_chunk,
    archive_everything,
    every_object_reads_back,
    first_chunk,
    object_bytes,
    plan,
)


@pytest.fixture
def source():
    return MemorySource(
        {f"key-{number:03d}": os.urandom(40_000) for number in range(40)}
        | {"empty": b"", "large": os.urandom(300_000)}
    )


@pytest.fixture
def worker(tmp_path, source, ledger):
    """Return a run context without the identity."""
    return a_private_context(tmp_path, source, ledger)


@pytest.fixture
def reader(tmp_path, source, ledger):
    """Return a run context with the identity."""
    return a_private_context(tmp_path, source, ledger, identity=IDENTITY)


def states(context):
    return {chunk.name: chunk.state for chunk in context.ledger.chunks.list(source="src")}


def opened(context, name):
    """The CAF in a staged chunk."""
    chunk = context.ledger.chunks.get(name)
    header = context.ledger.lookup.chunk_header(chunk.merkle_root)
    return OpenedSource(
        StagedSource(staged_path(context, name)), OpenedChunk.open(header, [IDENTITY])
    )


def test_every_object_reads_back_with_the_identity(source, worker, reader):
    report = plan(worker)
    for chunk in report.chunks:
        archive_chunk(worker, chunk.name)
    assert set(states(worker).values()) == {ChunkState.LOCATED}
    assert account_for_plan(worker, report).located == len(source.bodies)
    every_object_reads_back(reader)


def test_a_worker_cannot_read_objects(worker):
    archive_everything(worker)
    with pytest.raises(IdentityMissing):
        object_bytes(worker, "key-000")


def test_another_identity_opens_nothing(tmp_path, source, ledger, worker):
    archive_everything(worker)
    reader = a_private_context(tmp_path, source, ledger, identity=age.new_identity())
    with pytest.raises(NoMatchingIdentity):
        object_bytes(reader, "key-000")


def test_staging_and_store_hold_no_plaintext(tmp_path, worker):
    worker.objects.bodies = {f"secret-key-{number}": b"plaintext!" * 5000 for number in range(9)}
    name = first_chunk(worker)
    for step in CHUNK_STEPS:
        step(worker, name)
        for folder in (worker.staging(), tmp_path / "store"):
            for path in folder.rglob("*"):
                if path.is_file():
                    content = path.read_bytes()
                    assert b"plaintext!" not in content
                    assert b"secret-key" not in content


def test_checks_count_rows_and_need_no_identity(ledger, worker, reader):
    (name, *_) = archive_everything(worker)
    assert account_for_chunk(worker, name).agrees
    assert fetch_members(worker, name).not_run
    fetched = fetch_members(reader, name)
    assert fetched.tried == 20 or fetched.tried == ledger.chunks.get(name).member_count
    assert not fetched.mismatched


def test_a_source_without_recipients_packs_nothing(tmp_path, source, ledger):
    context = a_run_context(tmp_path, source, ledger, public=False)
    name = first_chunk(context)
    with pytest.raises(NotPublic):
        chunk_steps.load_batch(context, name)
    assert not list(context.staging().iterdir())


def test_a_sealed_plain_chunk_is_encrypted_before_the_post(tmp_path, source, ledger, worker):
    public = a_run_context(tmp_path, source, ledger)
    name = first_chunk(public, until=chunk_steps.seal_chunk)
    assert not ledger.chunks.get(name).encrypted
    archive_chunk(worker, name)
    assert ledger.chunks.get(name).encrypted


def test_posted_plain_chunk_of_private_source_is_not_uploaded(tmp_path, source, ledger, worker):
    public = a_run_context(tmp_path, source, ledger)
    name = first_chunk(public, until=chunk_steps.post_file)
    with pytest.raises(NotPublic):
        chunk_steps.upload_chunk(worker, name)


def test_an_encrypted_chunk_of_a_public_source_stays_encrypted(tmp_path, source, ledger, worker):
    name = first_chunk(worker, until=chunk_steps.seal_chunk)
    root = ledger.chunks.get(name).merkle_root
    archive_chunk(a_run_context(tmp_path, source, ledger), name)
    assert ledger.chunks.get(name).merkle_root == root


def test_age_opens_a_stored_chunk(tmp_path, source, age_tool, worker):
    archive_everything(worker)
    identity = tmp_path / "identity"
    identity.write_text(IDENTITY.reveal())
    member_count = 0
    for stored in (tmp_path / "store" / "chunks").glob("*.caf"):
        caf = tmp_path / stored.name
        subprocess.run([age_tool, "-d", "-i", identity, "-o", caf, stored], check=True)
        member_count += len(CafReader.open(StagedSource(caf), name="chunk")) - 2
    assert member_count == len(source.bodies)


def test_a_flipped_bit_is_an_integrity_error(tmp_path, worker, reader):
    archive_everything(worker)
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file() and path.stat().st_size > 100_000:
            content = bytearray(path.read_bytes())
            for at in range(2000, len(content), 65_552):
                content[at] ^= 1
            path.write_bytes(content)
    with pytest.raises(IntegrityError):
        object_bytes(reader, "large")


# --- a lost staged file


def a_lost_chunk(context, until):
    """Archive a chunk up to a step, then lose its staged file."""
    name = first_chunk(context, until=until)
    staged_path(context, name).unlink()
    return name


def test_a_sealed_chunk_is_packed_under_a_new_key(ledger, worker):
    name = a_lost_chunk(worker, chunk_steps.seal_chunk)
    before = ledger.chunks.get(name).merkle_root
    for step in CHUNK_STEPS:
        step(worker, name)
    after = ledger.chunks.get(name)
    assert after.state is ChunkState.LOCATED
    assert after.merkle_root != before


def test_a_chunk_that_nobody_has_is_abandoned(ledger, worker, reader):
    name = a_lost_chunk(worker, chunk_steps.post_file)
    with pytest.raises(StoreError):
        chunk_steps.upload_chunk(worker, name)
    assert ledger.chunks.get(name).state is ChunkState.ABANDONED
    plan(worker)
    for chunk in ledger.chunks.list("src", UNDER_WAY):
        archive_chunk(worker, chunk.name)
    every_object_reads_back(reader)


def test_a_lost_stored_chunk_is_not_repaired_from_the_source(ledger, worker):
    (name, *_) = archive_everything(worker)
    posting = posting_of(ledger.chunks.get(name))
    worker.store._chunk_path(posting).unlink()
    with pytest.raises(StoreError):
        repair_chunk(worker, name)
    assert ledger.chunks.get(name).state is ChunkState.DAMAGED


# --- keys check


def checked(context, identity=IDENTITY):
    return list(check_keys(context.ledger.lookup, context.store, [identity], "src"))


def test_an_identity_opens_every_chunk(worker):
    names = archive_everything(worker)
    assert checked(worker) == [KeyCheck(name) for name in names]
    for result in checked(worker, age.new_identity()):
        assert result.identity_problem
        assert not result.header_problem


@pytest.mark.parametrize("identity", [IDENTITY, age.new_identity()], ids=["right", "wrong"])
def test_a_foreign_stored_header_is_told_from_a_wrong_identity(ledger, identity, worker):
    (name, *_) = archive_everything(worker)
    chunk = ledger.chunks.get(name)
    header = ledger.lookup.chunk_header(chunk.merkle_root)
    forged = age.make_header([IDENTITY.recipient], os.urandom(16))
    assert len(forged) == len(header.header)
    path = worker.store._chunk_path(posting_of(chunk))
    path.write_bytes(forged + path.read_bytes()[len(forged) :])
    results = {result.chunk: result for result in checked(worker, identity)}
    assert [result.chunk for result in results.values() if result.header_problem] == [name]
    for result in results.values():
        assert bool(result.identity_problem) == (identity is not IDENTITY)


def test_a_foreign_header_in_the_ledger_is_told(database, worker):
    (name, *_) = archive_everything(worker)
    forged = age.make_header([age.new_identity().recipient], os.urandom(16))
    with connected(database) as connection:
        connection.execute("UPDATE caf_files SET header = %s WHERE name = %s", (forged, name))
    results = {result.chunk: result for result in checked(worker)}
    assert results[name].header_problem
    assert not any(result.identity_problem for result in results.values())


def test_a_posted_chunk_is_checked_without_its_store(worker):
    names = [chunk.name for chunk in plan(worker).chunks]
    archive_chunk(worker, names[0], until=chunk_steps.post_file)
    assert checked(worker) == [KeyCheck(names[0])]


def test_a_private_plan_keeps_room_for_encryption(tmp_path, source, ledger, worker):
    public = a_run_context(tmp_path / "public", source, ledger)
    snapshot = inventories.take_inventory(worker)
    limits = [
        planning.plan_terms(context, snapshot, planning.ChunkSizes(1 << 20)).limits
        for context in (worker, public)
    ]
    assert limits == [PRIVATE_LIMITS, DEFAULT_LIMITS]


# --- a run that ends after each step


@pytest.mark.thorough
@pytest.mark.parametrize("staging", ["kept", "lost"])
@pytest.mark.parametrize("last", CHUNK_STEPS, ids=lambda step: step.__name__)
def test_another_run_continues_after_each_step(worker, reader, last, staging):
    ledger = worker.ledger
    name = first_chunk(worker, until=last)
    if staging == "lost":
        shutil.rmtree(worker.staging())
    other = replace(worker, holder=this_process("run-2"))
    nobody_has_it = staging == "lost" and last is chunk_steps.post_file
    if nobody_has_it:
        with pytest.raises(StoreError):
            archive_chunk(other, name)
        plan(other)
    for chunk in ledger.chunks.list("src", UNDER_WAY):
        archive_chunk(other, chunk.name)
    ended = ledger.chunks.get(name).state
    assert ended is (ChunkState.ABANDONED if nobody_has_it else ChunkState.LOCATED)
    every_object_reads_back(reader)
