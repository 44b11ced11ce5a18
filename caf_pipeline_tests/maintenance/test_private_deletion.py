"""Safe deletion of encrypted chunks: only an identity knows that a chunk opens."""

import os
from hashlib import sha256

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.encryption.sealing import SegmentWriter
from caf_pipeline.formats import age
from caf_pipeline.maintenance.repair import repair_chunk
from caf_pipeline.maintenance.scrub import prove_chunk
from caf_pipeline.records import Sample, posting_of
from caf_pipeline_tests.contracts.chunk_store import corrupt
from caf_pipeline_tests.support.deletion_lists import Answer, pass_window
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.private_contexts import IDENTITY, RECIPIENT, a_private_context
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything

BODIES = {f"key-{number}": os.urandom(150_000) for number in range(5)}


@pytest.fixture
def contexts(tmp_path, ledger, store):
    """Make a run context with an identity, or without one."""

    def make(identity=None):
        return a_private_context(
            tmp_path, MemorySource(dict(BODIES)), ledger, identity=identity, store=store
        )

    return make


@pytest.fixture
def archived(contexts, store):
    """Return the name of the only chunk, proven in the window before the current one."""
    worker = contexts()
    (name,) = archive_everything(worker)
    pass_window(worker, store)
    return name


def reasons(context, folder, **options) -> set[str]:
    return set(Answer(context, folder, **options).reasons.values())


def forge(recipient, size_bytes: int) -> bytes:
    """Return a valid file of this size, made from the recipient alone."""
    key, nonce = os.urandom(age.FILE_KEY_BYTES), os.urandom(age.NONCE_BYTES)
    begin = age.make_header([recipient], key) + nonce
    plain = bytes(age.plain_size(size_bytes - len(begin)))
    return begin + age.Payload(key, nonce).seal(0, plain, is_end=True)


def test_objects_are_safe_after_an_identity_opened_them(contexts, ledger, tmp_path, archived):
    answer = Answer(contexts(IDENTITY), tmp_path)
    assert answer.keys == sorted(BODIES)
    assert ledger.chunks.get(archived).opened_with == RECIPIENT
    for stranger in (contexts(), contexts(age.new_identity())):
        assert reasons(stranger, tmp_path) == {"not_opened"}


def test_without_an_identity_nothing_is_safe(contexts, ledger, tmp_path, archived):
    assert reasons(contexts(), tmp_path) == {"not_opened"}
    chunk = ledger.chunks.get(archived)
    assert chunk.state is ChunkState.LOCATED
    assert chunk.read_back_at
    assert chunk.opened_with is None


@pytest.mark.thorough
def test_a_chunk_is_read_again_with_the_identity(contexts, tmp_path, archived):
    assert Answer(contexts(), tmp_path).found.read_back[0] == 1
    assert Answer(contexts(), tmp_path).found.read_back[0] == 0
    answer = Answer(contexts(IDENTITY), tmp_path)
    assert answer.found.everything_is_safe
    assert answer.found.read_back[0] == 1
    assert Answer(contexts(IDENTITY), tmp_path).found.read_back[0] == 0


def test_an_identity_that_reads_nothing_back_opens_nothing(contexts, tmp_path, archived):
    Answer(contexts(), tmp_path)
    assert reasons(contexts(IDENTITY), tmp_path, reads_back=False) == {"not_opened"}


def test_another_identity_is_no_damage(contexts, ledger, tmp_path, archived):
    another = contexts(age.new_identity())
    for chunks in (1, 0):
        answer = Answer(another, tmp_path)
        assert set(answer.reasons.values()) == {"not_opened"}
        assert answer.found.read_back[0] == chunks
    assert ledger.chunks.get(archived).state is ChunkState.LOCATED


def test_an_unreadable_identity_does_not_stop_proofs(ledger, store, tmp_path, archived):
    reader = a_run_context(
        tmp_path,
        MemorySource(dict(BODIES)),
        ledger,
        public=False,
        encryption={"identity_file": tmp_path / "absent"},
        store=store,
    )
    assert prove_chunk(reader, archived, an_object=Sample(512, 4, sha256(b"else").digest())).proven
    assert reasons(reader, tmp_path) == {"not_opened"}


@pytest.mark.parametrize("reads_before", [False, True])
def test_a_forged_header_in_the_ledger_is_noticed(
    contexts, ledger, tmp_path, archived, reads_before
):
    if reads_before:
        assert Answer(contexts(IDENTITY), tmp_path).found.everything_is_safe
    header = age.make_header([IDENTITY.recipient], os.urandom(age.FILE_KEY_BYTES))
    with connected(ledger.database) as connection:
        connection.execute("UPDATE caf_files SET header = %(header)s", {"header": header})
    assert reasons(contexts(IDENTITY), tmp_path) == {"disagrees"}
    chunk = ledger.chunks.get(archived)
    assert chunk.state is ChunkState.LOCATED
    assert (chunk.opened_with is None) is not reads_before


def test_a_damaged_header_in_the_ledger_opens_nothing(contexts, database, tmp_path, archived):
    with connected(database) as connection:
        connection.execute("UPDATE caf_files SET header = 'x'")
    assert reasons(contexts(IDENTITY), tmp_path) == {"not_opened"}


def test_a_size_that_was_not_sealed_is_noticed(contexts, ledger, database, tmp_path, archived):
    with connected(database) as connection:
        connection.execute("UPDATE caf_files SET caf_size_bytes = caf_size_bytes - 1")
    assert reasons(contexts(IDENTITY), tmp_path) == {"disagrees"}
    assert ledger.chunks.get(archived).opened_with is None


def test_a_forged_file_is_damage(contexts, ledger, store, tmp_path, archived):
    chunk = ledger.chunks.get(archived)
    forged = forge(IDENTITY.recipient, chunk.stored_size_bytes)
    store.file("anna", posting_of(chunk)).write_bytes(forged)
    assert reasons(contexts(IDENTITY), tmp_path) == {"damaged"}
    assert [copy.provider for copy in ledger.replicas.list(archived) if copy.fault] == ["anna"]


def test_a_chunk_that_was_sealed_wrong_is_not_safe(contexts, ledger, store, tmp_path, monkeypatch):
    seal = SegmentWriter.write

    def seal_wrong(self, plaintext):
        before = self.position[0]
        for sealed in seal(self, plaintext):
            if before <= 4 < self.position[0]:
                sealed[(4 - before) * age.SEALED_SEGMENT_BYTES] ^= 1
            before = self.position[0]
            yield sealed

    monkeypatch.setattr(SegmentWriter, "write", seal_wrong)
    worker = contexts()
    (name,) = archive_everything(worker)
    pass_window(worker, store)
    answer = Answer(contexts(IDENTITY), tmp_path)
    assert set(answer.reasons.values()) == {"disagrees"}
    assert all("segment 4" in detail for detail in answer.details)
    chunk = ledger.chunks.get(name)
    assert chunk.state is ChunkState.LOCATED
    assert chunk.opened_with is None


@pytest.mark.thorough
def test_a_repaired_chunk_must_be_opened_again(contexts, ledger, store, tmp_path, archived):
    reader = contexts(IDENTITY)
    assert Answer(reader, tmp_path).found.everything_is_safe
    corrupt(store.file("anna", posting_of(ledger.chunks.get(archived))), at=0)
    store.window = store.now = store.now + 1
    while prove_chunk(reader, archived).proven:
        pass  # another sample each time
    repair_chunk(reader, archived)
    assert ledger.chunks.get(archived).opened_with is None
    store.window = store.now = store.now + 1
    assert prove_chunk(reader, archived).proven
    assert reasons(contexts(), tmp_path) == {"not_opened"}
    assert Answer(reader, tmp_path).found.everything_is_safe


def test_no_plaintext_stays(contexts, tmp_path, archived):
    context = contexts(IDENTITY)
    assert Answer(context, tmp_path).found.everything_is_safe
    assert not list(context.settings.home.rglob("manifest.parquet"))
