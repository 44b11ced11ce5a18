"""Encrypted chunks on the loopback Jackal network: what the chain sees, and lost staged files."""

import json
import os

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import StoreError, StoreUnreachable
from caf_pipeline.formats import age
from caf_pipeline.ledger.chunk_moves import ChunkMoves
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.ledger.transactions import TransactionLog
from caf_pipeline.maintenance.rebuild import rebuild
from caf_pipeline.packing.staging import staged_path
from caf_pipeline.records import posting_of
from caf_pipeline.retrieval.reader import fetch
from caf_pipeline.steps import chunk_steps
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.new_ledgers import new_ledger  # noqa: F401 - a fixture
from caf_pipeline_tests.support.run_contexts import (
    CHUNK_STEPS,
    archive_everything,
    every_object_reads_back,
    first_chunk,
)

IDENTITY = age.new_identity()
ENCRYPTION = {"recipients": [str(IDENTITY.recipient)], "identity": IDENTITY.reveal()}


@pytest.fixture
def source():
    return MemorySource({f"key-{number:03d}": os.urandom(40_000) for number in range(10)})


@pytest.fixture
def context(ledger, source, wallet, jackal_context):
    jackal = {"mnemonic": wallet.words, "proof_seconds": 8}
    return jackal_context(source, ledger, jackal=jackal, public=False, encryption=ENCRYPTION)


def chain_file(context, name):
    posting = posting_of(context.ledger.chunks.get(name))
    return context.store.chain.file(posting.merkle_root, posting.owner, posting.start)


def test_the_chain_sees_archive_header_hash_and_mac_alone(context):
    (name,) = archive_everything(context)
    chunk = context.ledger.chunks.get(name)
    header = context.ledger.lookup.chunk_header(chunk.merkle_root)
    note = json.loads(chain_file(context, name).note)
    assert len(bytes.fromhex(note.pop("mac"))) == 32
    assert note == {"caf_pipeline": chunk.archive_id, "header_sha256": header.sha256.hex()}
    every_object_reads_back(context)


def test_a_ledger_is_rebuilt_from_the_chain(context, wallet, jackal_context, tmp_path, new_ledger):
    (name,) = archive_everything(context)
    lost = jackal_context(
        context.objects,
        new_ledger(),
        folder=tmp_path / "second",
        jackal={"mnemonic": wallet.words},
        public=False,
        encryption=ENCRYPTION,
    )
    assert [outcome.finding.name for outcome in rebuild(lost)] == [name]
    every_object_reads_back(lost)


def test_a_lying_provider_is_blamed_and_replaced(context, network):
    (name,) = archive_everything(context)
    posting = posting_of(context.ledger.chunks.get(name))
    liar = context.store.holders(posting)[0]
    network.misbehave(provider=network.provider_addresses.index(liar), flip_byte=-1)
    archived = fetch(context.ledger.lookup, context.opened, "src", "key-003")
    assert b"".join(archived.pieces) == context.objects.bodies["key-003"]


@pytest.mark.parametrize(
    ("part", "method"),
    [(TransactionLog, "settle"), (ChunkMoves, "record_posting")],
    ids=["sent", "settled"],
)
def test_a_sent_transaction_of_a_lost_chunk_is_settled(context, network, monkeypatch, part, method):
    def die(*given, **options):
        raise KeyboardInterrupt

    name = first_chunk(context, until=chunk_steps.seal_chunk)
    with monkeypatch.context() as patched:
        patched.setattr(part, method, die)
        with pytest.raises(KeyboardInterrupt):
            chunk_steps.post_file(context, name)
    assert context.ledger.chunks.get(name).state is ChunkState.POSTING
    staged_path(context, name).unlink()
    with pytest.raises(StoreError):
        chunk_steps.post_file(context, name)
    chunk = context.ledger.chunks.get(name)
    assert chunk.state is ChunkState.ABANDONED
    assert network.state()["posts_by_root"][chunk.merkle_root.hex()] == 1


def test_a_lost_chunk_waits_for_a_silent_provider(context, network):
    name = first_chunk(context, until=chunk_steps.post_file)
    staged_path(context, name).unlink()
    network.kill_provider(0)
    with pytest.raises(StoreUnreachable):
        chunk_steps.upload_chunk(context, name)
    assert context.ledger.chunks.get(name).state is ChunkState.POSTED
    network.start_provider(0)
    with pytest.raises(StoreError):
        chunk_steps.upload_chunk(context, name)
    assert context.ledger.chunks.get(name).state is ChunkState.ABANDONED


def test_a_posted_chunk_comes_back_from_the_store(context, network):
    name = first_chunk(context, until=chunk_steps.upload_chunk)
    root = context.ledger.chunks.get(name).merkle_root
    staged_path(context, name).unlink()
    for step in CHUNK_STEPS:
        step(context, name)
    chunk = context.ledger.chunks.get(name)
    assert (chunk.state, chunk.merkle_root) == (ChunkState.LOCATED, root)
    assert network.state()["posts_by_root"][root.hex()] == 1


def test_a_message_of_a_dead_run_is_not_signed(context):
    name = first_chunk(context, until=chunk_steps.seal_chunk)
    log = context.ledger.transactions(context.holder)
    with context.lease(chunk_lease(name)) as lease:
        context.ledger.moves.move(lease, name, ChunkState.SEALED, ChunkState.POSTING)
        log.ask("chain/account", name, b"message", 1, epoch=lease.epoch)
        assert [post.chunk for post in log.waiting("chain/account")] == [name]
    assert log.waiting("chain/account") == []
    with context.lease(chunk_lease(name)):  # the next run has not asked
        assert log.waiting("chain/account") == []


def test_a_lost_chunk_that_was_never_signed_is_abandoned(context, network):
    name = first_chunk(context, until=chunk_steps.seal_chunk)
    log = context.ledger.transactions(context.holder)
    account, before = context.store.poster.account, network.state()["broadcasts"]
    with context.lease(chunk_lease(name)) as lease:
        context.ledger.moves.move(lease, name, ChunkState.SEALED, ChunkState.POSTING)
        log.ask(account, name, b"message", 1, epoch=lease.epoch)
    staged_path(context, name).unlink()
    with pytest.raises(StoreError):
        chunk_steps.post_file(context, name)
    assert context.ledger.chunks.get(name).state is ChunkState.ABANDONED
    assert network.state()["broadcasts"] == before
