"""A provider's time limits, scaled down.

It reads an upload for 4 s, and can reply for 2 s after a request's start.
"""

import os

import pytest

from caf_pipeline.errors import ChunkTooLarge
from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.support.jackal_network import ADDRESS, FUNDS, SPACE
from caf_pipeline_tests.support.jackal_stores import open_store

MIB = 1 << 20
SIZE = 8 * MIB


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jackal")
    limits = {"upload_seconds": 4, "reply_seconds": 2}
    wealth = {"fund": {ADDRESS: FUNDS}, "space": {ADDRESS: SPACE}}
    with LoopbackNetwork(folder, providers=2, block_seconds=0.1, **wealth, **limits) as network:
        yield network


@pytest.fixture
def opened(network):
    network.well_behaved()
    opened = open_store(network, copies=2, upload_seconds=4, proof_seconds=5)
    yield opened
    opened.store.close()


@pytest.fixture
def staged(tmp_path):
    path = tmp_path / "chunk.caf"
    path.write_bytes(os.urandom(SIZE))
    return path


def slow_down(network, **rate):
    for number in range(2):
        network.misbehave(provider=number, **rate)


@pytest.mark.thorough
def test_upload_with_a_late_answer_is_not_repeated(opened, network, staged):
    slow_down(network, upload_rate=SIZE / 3)
    before = opened.begun()
    assert opened.providers_of(opened.stored(staged)) == {0, 1}
    assert {number: count - before[number] for number, count in opened.begun().items()} == {
        0: 1,
        1: 1,
    }


@pytest.mark.thorough
def test_download_cut_by_a_timeout_is_completed(opened, network, staged):
    posting = opened.stored(staged)
    slow_down(network, download_rate=SIZE / 5)
    assert b"".join(opened.store.read(posting, 0, SIZE)) == staged.read_bytes()


@pytest.mark.thorough
def test_upload_cut_for_slowness_reports_a_fitting_size(opened, network, staged):
    slow_down(network, upload_rate=1.2 * MIB)
    posting = opened.posted(staged)
    with pytest.raises(ChunkTooLarge) as raised:
        opened.store.put(posting, staged, lambda _: None)
    assert 0 < raised.value.fitting_bytes < SIZE
    assert opened.store.largest_chunk_bytes() == raised.value.fitting_bytes
    before = opened.begun()
    with pytest.raises(ChunkTooLarge):
        opened.store.put(posting, staged, lambda _: None)
    assert opened.begun() == before
