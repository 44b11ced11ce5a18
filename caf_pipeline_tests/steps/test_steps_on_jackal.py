"""The steps on the loopback Jackal network: archive, prove, damage, repair."""

import os
import re

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import NotProven, PlanTooSmall
from caf_pipeline.maintenance import scrub
from caf_pipeline.maintenance.repair import repair_chunk
from caf_pipeline.maintenance.scrub import prove_chunk
from caf_pipeline.packing import staging
from caf_pipeline.steps import chunk_steps, inventories
from caf_pipeline.steps.preview import preview_plan
from caf_pipeline.store.jackal import LEAST_BYTES, LEAST_DAYS, provider
from caf_pipeline.system.quantities import show_size
from caf_pipeline_tests.support.jackal_network import ADDRESS, SPACE
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.run_contexts import (
    archive_chunk,
    archive_everything,
    every_object_reads_back,
    plan,
)

pytestmark = pytest.mark.thorough


@pytest.fixture
def context(ledger, network, jackal_context):
    network.grant(ADDRESS, SPACE)
    source = MemorySource({f"key-{number:03d}": os.urandom(40_000) for number in range(10)})
    return jackal_context(source, ledger, jackal={"proof_seconds": 8})


@pytest.fixture
def name(context):
    (name,) = archive_everything(context)
    return name


def test_preview_gives_price_of_all_copies_before_post(context):
    estimate = preview_plan(context, inventories.take_inventory(context)).estimate
    assert estimate.storage.charged_bytes == 3 * estimate.expected_bytes > 3 * 400_000
    assert (estimate.storage.days, estimate.storage.price_ujkl) == (
        LEAST_DAYS,
        context.store.chain.price(LEAST_DAYS, LEAST_BYTES),
    )
    assert "1,000,000,000 bytes" in estimate.storage.price_sentence
    assert estimate.storage.fees_ujkl > 0
    assert context.ledger.chunks.list("src") == []


def test_chunk_is_located_with_three_proven_copies_and_kept(context, name):
    assert context.ledger.chunks.get(name).state is ChunkState.LOCATED
    assert len([copy for copy in context.ledger.replicas.list(name) if copy.listed]) == 3
    assert chunk_steps.staged_path(context, name).exists()
    assert list(staging.sweep(context)) == []
    every_object_reads_back(context)
    report = prove_chunk(context, name)
    assert (report.proven, len(report.read_back)) == (True, 3)
    assert all(check.window is not None for check in report.checks)


def test_damaged_chunk_is_uploaded_elsewhere_without_second_post(context, name, network):
    chunk = context.ledger.chunks.get(name)
    gone = context.store.copies(chunk_steps.posting_of(chunk))[0].provider
    network.drop_proofs(chunk.merkle_root, network.provider_addresses.index(gone))
    assert prove_chunk(context, name).chunk.state is ChunkState.DAMAGED
    report = repair_chunk(context, name)
    assert (report.origin, report.posted_again, len(report.copies)) == ("staging", False, 3)
    assert (report.chunk.state, report.chunk.start) == (ChunkState.LOCATED, chunk.start)
    assert gone not in {copy.provider for copy in report.copies}
    every_object_reads_back(context)


@pytest.fixture
def impatient(monkeypatch):
    """Wait only a second for silent providers."""
    monkeypatch.setattr(provider, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(provider, "PROBE_SECONDS", 1.0)


def holders(context, name, network):
    copies = context.store.copies(chunk_steps.posting_of(context.ledger.chunks.get(name)))
    return [network.provider_addresses.index(copy.provider) for copy in copies]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("closes", [False, True])
def test_a_copy_that_lost_a_range_is_repaired(context, name, network, closes):
    chunk = context.ledger.chunks.get(name)
    first = holders(context, name, network)[0]
    network.misbehave(provider=first, closes_lost=closes)
    network.lose_range(first, chunk.merkle_root, 0, chunk.stored_size_bytes // 2)
    report = prove_chunk(context, name)
    assert report.chunk.state is ChunkState.DAMAGED
    assert [check.copy.provider for check in report.checks if check.fault] == [
        network.provider_addresses[first]
    ]
    assert repair_chunk(context, name).chunk.state is ChunkState.LOCATED
    assert network.state()["posts_by_root"][chunk.merkle_root.hex()] == 1
    assert prove_chunk(context, name).proven


@pytest.mark.usefixtures("impatient")
def test_range_lost_by_every_copy_is_repaired_from_source(context, name, network):
    chunk = context.ledger.chunks.get(name)
    chunk_steps.staged_path(context, name).unlink()
    sample = chunk.samples[5]
    for index in holders(context, name, network):
        network.lose_range(index, chunk.merkle_root, sample.offset, sample.offset + 1)
    report = repair_chunk(context, name)
    assert (report.origin, report.posted_again, len(report.copies)) == ("source", False, 3)
    every_object_reads_back(context)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("conduct", [{"hang_seconds": 3}, {"fail": 503}, {"refuse": True}])
def test_a_provider_that_answers_nothing_has_lost_nothing(context, name, network, conduct):
    network.misbehave(provider=holders(context, name, network)[0], **conduct)
    report = prove_chunk(context, name)
    assert report.chunk.state is ChunkState.LOCATED
    assert not any(check.fault for check in report.checks)


@pytest.mark.usefixtures("impatient")
def test_a_silent_copy_does_not_keep_another_from_repair(context, name, network):
    chunk = context.ledger.chunks.get(name)
    chunk_steps.staged_path(context, name).unlink()
    silent, lost, _ = holders(context, name, network)
    network.misbehave(provider=silent, hang_seconds=3)
    network.lose_range(lost, chunk.merkle_root, 0, 1)
    with pytest.raises(NotProven):
        repair_chunk(context, name)
    network.well_behaved()
    assert repair_chunk(context, name).origin == "none needed"


def test_a_look_that_outlasts_proof_windows_damages_nothing(context, name, network, monkeypatch):
    look, window = scrub.check_copy, context.store.chain.proof_window()

    def slow(*arguments, **options):
        network.advance(2 * window)
        return look(*arguments, **options)

    monkeypatch.setattr(scrub, "check_copy", slow)
    report = prove_chunk(context, name)
    assert report.chunk.state is ChunkState.LOCATED
    assert not any(check.fault for check in report.checks)


def test_run_beyond_bought_space_fails_before_any_fetch(context, network):
    network.grant(ADDRESS, 100_000)
    (chunk,) = plan(context).chunks
    with pytest.raises(
        PlanTooSmall, match=f"need {re.escape(show_size(3 * chunk.expected_size_bytes))}"
    ):
        archive_chunk(context, chunk.name)
    assert context.objects.reads == []
