"""A lost ledger of encrypted chunks rebuilt from the store, with an identity and without one."""

import os

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import IdentityMissing
from caf_pipeline.formats import age
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.maintenance import rebuild
from caf_pipeline.maintenance.adopt import AdoptionKind, AdoptionOptions, adopt_files
from caf_pipeline.maintenance.doctor.examine import examine
from caf_pipeline.maintenance.doctor.findings import Actor, Kind, UnknownPosts
from caf_pipeline.maintenance.rebuild import FileKind
from caf_pipeline.packing.staging import staged_path
from caf_pipeline.records import posting_of
from caf_pipeline.retrieval.remote_chunk import HEADER_BYTES
from caf_pipeline.steps import chunk_steps
from caf_pipeline_tests.support.forged_chunks import Forgery, accepts, put
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.new_ledgers import new_ledger, rows_of  # noqa: F401 - a fixture
from caf_pipeline_tests.support.private_contexts import IDENTITY, a_private_context, encrypt
from caf_pipeline_tests.support.run_contexts import (
    archive_chunk,
    archive_everything,
    every_object_reads_back,
    plan,
)
from caf_pipeline_tests.support.several_folders import SeveralFolders

BODIES = {f"key-{number:02d}": os.urandom(60_000) for number in range(25)} | {"empty": b""}
OTHER = "a" * 32


@pytest.fixture
def store(tmp_path):
    return SeveralFolders(tmp_path / "store")


@pytest.fixture
def worker(tmp_path, ledger, store):
    """Return the run context of a ledger that will be lost. It has public keys alone."""
    return a_private_context(tmp_path / "first", MemorySource(dict(BODIES)), ledger, store=store)


@pytest.fixture
def archived(worker):
    archive_everything(worker)
    return worker


@pytest.fixture
def empty(tmp_path, new_ledger, store):
    """Return a function that makes a run context with an empty ledger."""
    ledger = new_ledger()

    def make(identity=None):
        source = MemorySource(dict(BODIES))
        return a_private_context(
            tmp_path / "second", source, ledger, identity=identity, store=store
        )

    return make


def kinds(context, **options):
    return [outcome.finding.kind for outcome in rebuild.rebuild(context, **options)]


def headers(context):
    return [
        context.ledger.lookup.chunk_header(chunk.merkle_root)
        for chunk in context.ledger.chunks.list()
    ]


def posting_of_first(context):
    return posting_of(context.ledger.chunks.list()[0])


def overwrite(store, posting, begin):
    """Replace the first bytes of all copies."""
    for provider in store.folders:
        path = store.file(provider, posting)
        path.write_bytes(begin + path.read_bytes()[len(begin) :])


def test_rows_and_headers_come_back_with_the_identity(archived, empty):
    lost = empty(IDENTITY)
    assert set(kinds(lost)) == {FileKind.CHUNK}
    assert rows_of(lost.ledger) == rows_of(archived.ledger)
    assert len(headers(archived)) > 1
    assert headers(lost) == headers(archived)
    every_object_reads_back(lost)


def test_without_an_identity_nothing_is_written(archived, empty):
    lost = empty()
    put(lost.store, Forgery(OTHER).write(lost.staging() / "plain"), OTHER)
    before = rows_of(lost.ledger)
    for _ in range(2):
        with pytest.raises(IdentityMissing):
            list(rebuild.rebuild(lost))
        assert rows_of(lost.ledger) == before
        assert lost.ledger.rebuilds.began_at("src") is None
        lost.ledger.sources.restore_archive_id("src", archived.archive_id)
        before = rows_of(lost.ledger)


def test_another_identity_opens_no_archive(archived, empty):
    lost = empty(age.new_identity())
    assert kinds(lost) == [FileKind.UNDECIDED]
    assert lost.ledger.chunks.list() == []


def test_chunk_of_another_recipient_is_unreadable_alone(archived, empty, tmp_path):
    lost, path = empty(IDENTITY), tmp_path / "x"
    Forgery(archived.archive_id).write(path)
    header_sha256 = encrypt(path, age.new_identity().recipient)
    put(lost.store, path, archived.archive_id, header_sha256=header_sha256)
    outcomes = list(rebuild.rebuild(lost))
    assert [outcome.finding.kind for outcome in outcomes if not outcome.complete] == [
        FileKind.UNREADABLE
    ]
    assert len(lost.ledger.chunks.list()) == len(outcomes) - 1
    assert lost.ledger.rebuilds.began_at("src")


def test_manifest_is_never_in_staging(archived, empty):
    lost = empty(IDENTITY)
    lost.ledger.sources.restore_archive_id("src", archived.archive_id)
    findings = []
    for finding in rebuild.find_chunks(lost, ask=accepts):
        assert finding.spool.exists()
        assert list(lost.staging().iterdir()) == []
        findings.append(finding)
    assert not any(finding.spool.parent.exists() for finding in findings)
    for finding in findings:  # fetches the manifest again
        rebuild.import_found_chunk(lost, finding)
    assert rows_of(lost.ledger) == rows_of(archived.ledger)


# --- forgeries and damage


@pytest.mark.thorough
@pytest.mark.parametrize("whole", [False, True])
def test_a_header_with_another_hash_is_refused(archived, empty, whole):
    posting = posting_of_first(archived)
    key = os.urandom(age.FILE_KEY_BYTES)
    overwrite(archived.store, posting, age.make_header([IDENTITY.recipient], key))
    assert kinds(empty(IDENTITY), whole=whole).count(FileKind.DIFFERING) == 1
    assert len(empty().ledger.chunks.list()) == len(archived.ledger.chunks.list()) - 1


@pytest.mark.thorough
def test_a_whole_file_forged_for_our_recipient_is_refused(archived, empty, tmp_path):
    posting = posting_of_first(archived)
    path = tmp_path / "forged"
    path.write_bytes(bytes(1000))
    encrypt(path)
    overwrite(archived.store, posting, path.read_bytes())
    assert kinds(empty(IDENTITY)).count(FileKind.DIFFERING) == 1


@pytest.mark.thorough
def test_plaintext_posted_as_encrypted_is_refused(archived, empty, tmp_path):
    lost, path = empty(IDENTITY), Forgery(archived.archive_id).write(tmp_path / "x")
    put(lost.store, path, archived.archive_id, header_sha256=bytes(32))
    assert kinds(lost).count(FileKind.DIFFERING) == 1


def test_age_file_posted_as_plain_is_no_chunk(archived, empty, tmp_path):
    lost, path = empty(IDENTITY), Forgery(archived.archive_id).write(tmp_path / "x")
    encrypt(path)
    put(lost.store, path, archived.archive_id)
    assert kinds(lost).count(FileKind.NO_CHUNK) == 1


@pytest.mark.thorough
def test_a_long_header_is_read_whole(archived, empty, tmp_path):
    lost, path = empty(IDENTITY), Forgery(archived.archive_id).write(tmp_path / "x")
    others = [age.new_identity().recipient for _ in range(20)]
    header_sha256 = encrypt(path, *others, IDENTITY.recipient)
    put(lost.store, path, archived.archive_id, header_sha256=header_sha256)
    assert set(kinds(lost)) == {FileKind.CHUNK}
    assert max(header.payload_start for header in headers(lost)) > HEADER_BYTES


# --- several archives and chunks of the ledger


def test_plain_chunks_of_a_private_source_are_restored(archived, empty, tmp_path):
    lost = empty(IDENTITY)
    put(lost.store, Forgery(OTHER).write(tmp_path / "x"), OTHER)
    assert set(kinds(lost)) == {FileKind.CHUNK}
    assert lost.ledger.sources.archive_ids("src") == {OTHER, archived.archive_id}
    assert {chunk.encrypted for chunk in lost.ledger.chunks.list()} == {True, False}
    every_object_reads_back(lost)


@pytest.mark.thorough
def test_private_archive_of_another_source_is_left_out(archived, empty, tmp_path):
    lost, path = empty(IDENTITY), tmp_path / "x"
    Forgery(OTHER, source="other").write(path)
    put(lost.store, path, OTHER, header_sha256=encrypt(path))
    assert set(kinds(lost)) == {FileKind.CHUNK, FileKind.OTHER_SOURCE}
    assert rows_of(lost.ledger) == rows_of(archived.ledger)


@pytest.fixture
def reader(tmp_path, worker):
    """Return the worker's run context with an identity."""
    return a_private_context(
        tmp_path / "first", worker.objects, worker.ledger, identity=IDENTITY, store=worker.store
    )


def header_of(context, name):
    return context.ledger.lookup.chunk_header(context.ledger.chunks.get(name).merkle_root)


def a_sealed_chunk(context):
    (name, *_) = [chunk.name for chunk in context.ledger.chunks.list()] or [
        chunk.name for chunk in plan(context).chunks
    ]
    archive_chunk(context, name, until=chunk_steps.seal_chunk)
    return name, header_of(context, name)


def post(context, path, header):
    """Post and upload a file behind the ledger's back."""
    key = context.ledger.sources.post_key("src")
    put(context.store, path, context.archive_id, header_sha256=header.sha256, key=key)


def test_sealed_chunk_is_not_replaced_by_other_bytes(worker, reader, tmp_path):
    name, header = a_sealed_chunk(worker)
    earlier = staged_path(worker, name).rename(tmp_path / "earlier")
    a_sealed_chunk(worker)  # is packed under a new key
    post(worker, earlier, header)
    before = worker.ledger.chunks.get(name)
    assert (before.state, header_of(worker, name) == header) == (ChunkState.SEALED, False)
    (finding,) = [finding for finding in stray_chunks(reader) if finding.mend]
    assert finding.mend().actor is Actor.OPERATOR
    assert kinds(reader) == [FileKind.CONFLICTING]
    assert worker.ledger.chunks.get(name) == before
    assert staged_path(worker, name).exists()


@pytest.mark.thorough
def test_sealed_chunk_is_replaced_by_its_own_file(worker, reader):
    name, header = a_sealed_chunk(worker)
    post(worker, staged_path(worker, name), header)
    assert kinds(reader) == [FileKind.CHUNK]
    assert worker.ledger.chunks.get(name).state is ChunkState.LOCATED
    assert header_of(worker, name) == header
    assert not staged_path(worker, name).exists()


@pytest.mark.thorough
def test_packed_chunk_without_seal_is_replaced(worker, reader):
    name, header = a_sealed_chunk(worker)
    post(worker, staged_path(worker, name), header)
    with worker.lease(chunk_lease(name)) as lease:
        worker.ledger.moves.move(lease, name, ChunkState.SEALED, ChunkState.PACKING)
    assert header_of(worker, name) is None
    assert kinds(reader) == [FileKind.CHUNK]
    assert header_of(worker, name) == header


# --- doctor and adopt


def stray_chunks(context):
    return [
        finding
        for finding in examine(context, alive=lambda holder: None)
        if finding.kind in (Kind.FILE, Kind.UNSEEN)
    ]


@pytest.mark.thorough
def test_doctor_restores_stray_chunks_by_order_with_the_identity(archived, empty):
    lost = empty(IDENTITY)
    lost.ledger.sources.restore_archive_id("src", archived.archive_id)
    assert not any(finding.mend for finding in stray_chunks(lost))
    for finding in examine(lost, alive=lambda holder: None, unknown_posts=UnknownPosts.ADD):
        if finding.mend:
            finding.mend()
    every_object_reads_back(lost)
    assert all(chunk.from_unknown_post for chunk in lost.ledger.chunks.list())


def test_doctor_without_identity_reports_unchecked_files(archived, empty):
    lost = empty()
    lost.ledger.sources.restore_archive_id("src", archived.archive_id)
    unseen = [finding for finding in stray_chunks(lost) if finding.kind is Kind.UNSEEN]
    assert [type(finding.error) for finding in unseen] == [IdentityMissing]
    assert lost.ledger.chunks.list() == []


def test_an_age_file_is_not_adopted(archived):
    path = archived.store.file("anna", posting_of_first(archived))
    (outcome,) = adopt_files(archived, [path], AdoptionOptions())
    assert outcome.kind is AdoptionKind.REFUSED
    assert "is encrypted" in str(outcome.error)
