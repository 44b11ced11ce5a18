"""Providers are asked before a post is paid for: nothing is posted that no provider would take."""

import os
import threading
from dataclasses import replace

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import NoProvider, UploadsRefused
from caf_pipeline.ledger.records import OperatorControls
from caf_pipeline.run_context import Lazy
from caf_pipeline.steps import chunk_steps
from caf_pipeline.store.jackal.provider import ProviderClient
from caf_pipeline_tests.contracts.chunk_store import to_store
from caf_pipeline_tests.support.command_line import source_text
from caf_pipeline_tests.support.jackal_command_line import jackal_command_line, wallet_with_space
from caf_pipeline_tests.support.jackal_network import ADDRESS, SPACE
from caf_pipeline_tests.support.jackal_stores import open_jackal_store, open_store
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.run_contexts import archive_chunk, first_chunk

SIZE = 300_000


@pytest.fixture
def open_with(network):
    made = []
    network.grant(ADDRESS, SPACE)

    def make(**changes):
        made.append(open_store(network, **changes))
        return made[-1]

    yield make
    for opened in made:
        opened.store.close()


@pytest.fixture
def opened(open_with):
    return open_with()


@pytest.fixture
def staged(tmp_path):
    path = tmp_path / "chunk.caf"
    path.write_bytes(os.urandom(SIZE))
    return path


def all_of(network, **conduct):
    for number in range(4):
        network.misbehave(provider=number, **conduct)


def refused(opened, staged, error, match):
    """Assert that the chunk is refused before and at posting, and nothing is broadcast."""
    before = opened.network.state()["broadcasts"]
    with pytest.raises(error, match=match):
        opened.store.admit(stored_size_bytes=SIZE, waiting_bytes=0)
    with pytest.raises(error, match=match) as raised:
        opened.posted(staged)
    assert opened.network.state()["broadcasts"] == before
    assert raised.value.hint
    return raised.value


def test_post_waits_until_providers_answer(opened, network, staged):
    all_of(network, refuse=True)
    error = refused(
        opened,
        staged,
        NoProvider,
        "3 copies of 293.0 KiB .* 0 providers",
    )
    assert not error.permanent
    network.well_behaved()
    assert opened.posted(staged).start


@pytest.mark.parametrize(
    ("conduct", "match"),
    [
        ({"refuse": True}, "2 providers would take one now"),
        ({"fail": 502}, "answers with 502"),
        ({"room": SIZE - 1}, "has 293.0 KiB free"),
    ],
)
def test_too_few_accepting_providers_are_refused(opened, network, staged, conduct, match):
    for number in (0, 1):
        network.misbehave(provider=number, **conduct)
    refused(opened, staged, NoProvider, match)


def test_unreachable_provider_is_harmless_if_others_suffice(opened, network, staged):
    network.misbehave(provider=2, refuse=True)
    assert opened.posted(staged).start


def test_forbidden_private_addresses_are_a_permanent_error(open_with, staged):
    opened = open_with(allow_private_addresses=False)
    error = refused(opened, staged, UploadsRefused, "4 of 4 providers")
    assert error.permanent
    assert "jackal.allow_private_addresses" in error.hint


def test_too_few_listed_providers_are_reported_with_numbers(open_with, staged):
    error = refused(
        open_with(copies=5),
        staged,
        UploadsRefused,
        "4 providers, .* 5 copies",
    )
    assert "required_copies" in error.hint


def test_fewer_required_copies_need_fewer_takers(open_with, staged):
    assert open_with(copies=5, required_copies=2).posted(staged).start


def test_too_low_bandwidth_limit_is_refused_with_a_sufficient_one(open_with, staged):
    error = refused(
        open_with(bandwidth=1000),
        staged,
        UploadsRefused,
        "limit is 1000 B/s",
    )
    assert "--bandwidth 5556" in error.hint
    assert open_with(bandwidth=5556).posted(staged).start


def test_too_low_share_of_the_limit_is_retryable(opened, staged):
    opened.board.controls = OperatorControls(bandwidth=6000, uploads=2)
    assert not refused(opened, staged, NoProvider, "other runs").permanent


def test_one_that_was_measured_as_too_slow_is_not_counted(opened, network, staged):
    for address in network.provider_addresses[:2]:
        opened.records.set(address, upload_rate=1000.0)
    refused(opened, staged, NoProvider, "too slow .* 1000 bytes")


def test_no_thread_that_may_outlive_the_question_reads_the_ledger(opened, monkeypatch):
    readers = set()
    all_records = opened.records.all
    monkeypatch.setattr(
        opened.records, "all", lambda: readers.add(threading.current_thread()) or all_records()
    )
    opened.store.admit(stored_size_bytes=SIZE, waiting_bytes=0)
    assert readers == {threading.current_thread()}


def test_existing_post_needs_no_answering_provider(opened, network, staged):
    posting = opened.posted(staged)
    opened.store._accepting._room.clear()
    all_of(network, refuse=True)
    assert opened.posted(staged) == posting


def test_many_chunks_ask_a_provider_once(opened, staged, monkeypatch):
    urls, version = [], ProviderClient.version
    monkeypatch.setattr(
        ProviderClient,
        "version",
        lambda self, *given: urls.append(self.url) or version(self, *given),
    )
    for number in range(5):
        staged.write_bytes(os.urandom(SIZE))
        opened.store.post(
            to_store(opened.store, staged, name=f"src-00000000-{number:05d}"), opened.log
        )
    assert len(urls) == len(set(urls))


# --- the steps, and the command ---


@pytest.fixture
def context(ledger, network, jackal_context):
    network.grant(ADDRESS, SPACE)
    source = MemorySource({f"key-{number}": os.urandom(40_000) for number in range(5)})
    return jackal_context(source, ledger, jackal={"proof_seconds": 8})


def test_chunk_without_an_accepting_provider_is_not_packed(context, network):
    name = first_chunk(context)
    all_of(network, refuse=True)
    with pytest.raises(NoProvider):
        archive_chunk(context, name)
    assert context.objects.reads == []


def test_a_sealed_chunk_waits_unpaid_until_providers_are_back(context, network):
    name = first_chunk(context, until=chunk_steps.seal_chunk)
    context.store._accepting._room.clear()
    all_of(network, refuse=True)
    before = network.state()["broadcasts"]
    with pytest.raises(NoProvider):
        chunk_steps.post_file(context, name)
    assert context.ledger.chunks.get(name).state is ChunkState.SEALED
    assert network.state()["broadcasts"] == before
    network.well_behaved()
    archive_chunk(context, name)
    assert context.ledger.chunks.get(name).state is ChunkState.LOCATED


@pytest.mark.thorough
def test_posted_chunk_keeps_its_proof_type(tmp_path, context, network, ledger):
    name = first_chunk(context, until=chunk_steps.post_file)
    jackal = context.settings.jackal.model_copy(update={"proof_type": 0})
    store = open_jackal_store(
        context.settings.model_copy(update={"jackal": jackal}), ledger, context.holder
    )
    all_of(network, lose_jobs=True)
    archive_chunk(replace(context, lazy_store=Lazy.of(store)), name)
    assert context.ledger.chunks.get(name).state is ChunkState.LOCATED
    assert context.ledger.chunks.get(name).proof_type == 3
    store.close()


def test_run_without_usable_providers_pays_nothing(
    tmp_path, network, database_url, s3_server, new_bucket
):
    new_bucket.put("key", os.urandom(100_000))
    wallet = wallet_with_space(network)
    caf = jackal_command_line(tmp_path, network, wallet.words, CAF_DATABASE_URL=database_url)
    caf.settings(source_text(s3_server, new_bucket.name))
    done = caf("run", CAF_JACKAL__ALLOW_PRIVATE_ADDRESSES="false")
    assert done.status == 12, done.err
    assert "4 of 4 providers" in done.err
    assert "allow_private_addresses" in done.err
    assert network.state()["charged"][wallet.address] == 0
    assert caf("run").status == 0
