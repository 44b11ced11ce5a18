"""A chain that verifies no type 3 proof refuses chunks before payment, and never calls them proven.

Also a stranger who makes providers delete bytes whose post stays listed.
"""

import os

import httpx
import pytest
from pydantic import SecretStr

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import IntegrityError, NotProven, SettingsError
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.maintenance.deletion.safe_to_delete import find_deletable
from caf_pipeline.maintenance.repair import repair_chunk
from caf_pipeline.maintenance.scrub import prove_chunk
from caf_pipeline.steps import chunk_steps
from caf_pipeline_tests.contracts.chunk_store import corrupt, place_between
from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.support.chain_user import ChainUser
from caf_pipeline_tests.support.jackal_network import ADDRESS, FUNDS, SPACE, WORDS, jackal_settings
from caf_pipeline_tests.support.jackal_stores import open_jackal_store
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.run_contexts import (
    a_run_context,
    archive_chunk,
    archive_everything,
    every_object_reads_back,
    first_chunk,
)

WINDOW = 20


@pytest.fixture(scope="module")
def old_network(tmp_path_factory):
    """A chain of version 5.0.1 with two nodes. It makes blocks only on order."""
    folder = tmp_path_factory.mktemp("old")
    options = {
        "providers": 4,
        "lcds": 2,
        "block_seconds": 0.1,
        "proof_window": WINDOW,
        "no_zero_draws": 1,
    }
    with LoopbackNetwork(
        folder, version="5.0.1", fund={ADDRESS: FUNDS}, space={ADDRESS: SPACE}, **options
    ) as network:
        yield network


@pytest.fixture
def make_context(tmp_path, ledger, old_network):
    """Makes run contexts of one source and one ledger with different settings."""
    old_network.well_behaved()
    opened, source = (
        [],
        MemorySource({f"key-{number:03d}": os.urandom(90_000) for number in range(10)}),
    )

    def make(proof_type, run="run-1"):
        jackal = jackal_settings(
            old_network, proof_seconds=20, proof_type=proof_type, mnemonic=SecretStr(WORDS)
        )
        context = a_run_context(
            tmp_path, source, ledger, run=run, store=open_jackal_store, jackal=jackal
        )
        opened.append(context.store)
        return context

    yield make
    for store in opened:
        store.close()


def say(network, version):
    """Let all nodes report a version. The chain's own version stays the same."""
    for number in range(2):
        network.misbehave(lcd=number, version=version)


@pytest.fixture
def sealed(make_context, old_network):
    """A run context of type 3 and its chunk, sealed while the nodes accepted the type."""
    say(old_network, "5.1.0")
    context = make_context(3)
    name = first_chunk(context, until=chunk_steps.seal_chunk)
    return context, name


def let_it_be_posted(context, name):
    """Put the chunk into the state after a run was killed while posting it."""
    with context.ledger.leases.hold(chunk_lease(name), context.holder) as lease:
        context.ledger.moves.move(lease, name, ChunkState.SEALED, ChunkState.POSTING)


def paid(network):
    return network.state()["broadcasts"], network.state()["accounts"][ADDRESS]["balance"]


@pytest.mark.thorough
def test_type_3_is_refused_before_fetching_and_paying(make_context, old_network):
    context, before = make_context(3), paid(old_network)
    name = first_chunk(context)
    with pytest.raises(SettingsError, match="proof_type is 3"):
        archive_chunk(context, name)
    with pytest.raises(SettingsError, match="proof_type is 3"):
        context.store.poster.buy(10**13, 30, context.ledger.transactions(context.holder))
    assert (context.objects.reads, paid(old_network)) == ([], before)


def test_sealed_chunk_needs_every_node_to_verify_its_type(sealed, old_network):
    context, name = sealed
    old_network.misbehave(lcd=1, version="5.0.1")
    before = paid(old_network)
    with pytest.raises(SettingsError):
        chunk_steps.post_file(context, name)
    assert context.ledger.chunks.get(name).state is ChunkState.SEALED
    let_it_be_posted(context, name)
    with pytest.raises(SettingsError):
        chunk_steps.post_file(context, name)
    assert paid(old_network) == before


@pytest.mark.thorough
@pytest.mark.parametrize("state", [ChunkState.SEALED, ChunkState.POSTING])
def test_sealed_chunk_of_refused_type_gets_new_root_from_staging(
    sealed, make_context, old_network, state
):
    context, name = sealed
    if state is ChunkState.POSTING:
        let_it_be_posted(context, name)
    before, reads = context.ledger.chunks.get(name), len(context.objects.reads)
    old_network.well_behaved()
    context = make_context(0)
    archive_chunk(context, name)
    chunk = context.ledger.chunks.get(name)
    assert (before.proof_type, chunk.proof_type, len(chunk.merkle_root)) == (3, 0, 64)
    assert (chunk.state, chunk.member_count, len(context.objects.reads)) == (
        ChunkState.LOCATED,
        10,
        reads,
    )
    every_object_reads_back(context)


@pytest.mark.thorough
def test_staged_file_unlike_its_seal_is_packed_again(sealed, make_context, old_network):
    context, name = sealed
    chunk = context.ledger.chunks.get(name)
    corrupt(chunk_steps.staged_path(context, name), at=place_between(chunk.samples))
    old_network.well_behaved()
    with pytest.raises(IntegrityError, match=name):
        chunk_steps.post_file(make_context(0), name)
    assert context.ledger.chunks.get(name).merkle_root == chunk.merkle_root
    archive_chunk(make_context(0, run="run-2"), name)
    every_object_reads_back(context)


@pytest.mark.thorough
@pytest.mark.parametrize("is_lost", [True, False])
def test_bad_file_of_unposted_chunk_is_packed_to_its_root(
    sealed, make_context, old_network, is_lost
):
    context, name = sealed
    let_it_be_posted(context, name)
    chunk, path = context.ledger.chunks.get(name), chunk_steps.staged_path(context, name)
    if is_lost:
        path.unlink()
    else:
        corrupt(path, at=place_between(chunk.samples))
    old_network.well_behaved()
    context = make_context(0, run="run-2")
    archive_chunk(context, name)
    after = context.ledger.chunks.get(name)
    assert (after.proof_type, after.state, after.attempts) == (
        0,
        ChunkState.LOCATED,
        chunk.attempts,
    )
    every_object_reads_back(context)


@pytest.mark.thorough
def test_posted_chunk_ignores_later_settings(sealed, make_context, old_network):
    context, name = sealed
    let_it_be_posted(context, name)
    with chunk_steps.lease_chunk(context, name) as lease:
        context.store.post(
            chunk_steps.to_store(context, lease, context.ledger.chunks.get(name)),
            context.ledger.transactions(context.holder),
        )
    before = context.ledger.chunks.get(name)
    chunk_steps.staged_path(context, name).unlink()
    archive_chunk(make_context(0), name)
    chunk = context.ledger.chunks.get(name)
    assert (chunk.merkle_root, chunk.proof_type, chunk.state) == (
        before.merkle_root,
        3,
        ChunkState.LOCATED,
    )
    assert old_network.state()["posts_by_root"][chunk.merkle_root.hex()] == 1


@pytest.mark.thorough
def test_finished_packing_is_sealed_with_its_own_proof_type(make_context, old_network):
    say(old_network, "5.1.0")
    context = make_context(3)
    name = first_chunk(context, until=chunk_steps.pack_chunk)
    reads = len(context.objects.reads)
    old_network.well_behaved()
    context = make_context(0)
    archive_chunk(context, name)
    assert (context.ledger.chunks.get(name).proof_type, len(context.objects.reads)) == (
        0,
        reads,
    )


def window_after(context, network, name):
    """Make blocks until the middle of the chunk's next window."""
    at = chunk_steps.posting_of(context.ledger.chunks.get(name))
    height = network.state()["height"]
    network.advance(WINDOW - (height - at.start) % WINDOW + WINDOW // 2)


@pytest.mark.thorough
def test_unverifiable_proofs_are_neither_proven_nor_safe(sealed, old_network, tmp_path):
    context, name = sealed
    archive_chunk(context, name)
    old_network.misbehave(halted=True)
    verdicts = []
    for _ in range(6):
        window_after(context, old_network, name)
        verdicts.append(prove_chunk(context, name).verdict)
        if verdicts[-1] == "damaged":
            with pytest.raises(NotProven, match="stays damaged"):
                repair_chunk(context, name)
        assert find_deletable(context, tmp_path / "list.csv").safe_objects == 0
    assert set(verdicts) <= {"unverified", "damaged"}
    assert "unverified" in verdicts
    assert {copy.windows for copy in context.ledger.replicas.list(name)} == {0}


@pytest.mark.thorough
def test_provider_rejoining_with_one_leaf_is_never_safe(make_context, old_network, tmp_path):
    context = make_context(0)
    (name,) = archive_everything(context)
    old_network.misbehave(halted=True)
    for number in range(4):
        old_network.misbehave(provider=number, leaves=1)
    counted = set()
    for _ in range(10):
        window_after(context, old_network, name)
        if prove_chunk(context, name).chunk.state is ChunkState.DAMAGED:
            break
        counted |= {copy.windows for copy in context.ledger.replicas.list(name) if copy.listed}
        assert find_deletable(context, tmp_path / "list.csv").safe_objects == 0
    assert counted <= {0, 1}


@pytest.mark.thorough
def test_type_0_proofs_make_safe_after_two_consecutive_windows(make_context, old_network, tmp_path):
    context = make_context(0)
    (name,) = archive_everything(context)
    old_network.misbehave(halted=True)
    window_after(context, old_network, name)
    assert find_deletable(context, tmp_path / "list.csv").safe_objects == 0
    window_after(context, old_network, name)
    assert prove_chunk(context, name).proven
    assert find_deletable(context, tmp_path / "list.csv").everything_is_safe


# --- a stranger ---

STRANGER = "legal winner thank year wave sausage worth useful legal winner thank yellow"


def deleted_by_a_stranger(context, network, name):
    """Let another wallet post the chunk's root, have its providers claim that post, and delete it.

    Returns the providers.
    """
    chunk = context.ledger.chunks.get(name)
    content = b"".join(
        context.store.read(chunk_steps.posting_of(chunk), 0, chunk.stored_size_bytes)
    )
    holders = context.store.holders(chunk_steps.posting_of(chunk))
    with httpx.Client(timeout=30) as client:
        stranger = ChainUser(network, client, STRANGER)
        network.fund(stranger.address, 10**9)
        network.grant(stranger.address, 10**9)
        other_post = stranger.post(content, proof_type=0)
        assert other_post.root == chunk.merkle_root
        for holder in holders:
            stranger.upload(other_post, network.provider_addresses.index(holder))
        network.advance(1)
        assert stranger.do(stranger.delete_message(other_post))["code"] == 0
    return holders


@pytest.mark.thorough
def test_deletion_by_a_stranger_is_found_and_repaired(make_context, old_network, tmp_path):
    context = make_context(0)
    (name,) = archive_everything(context)
    assert prove_chunk(context, name).proven
    chunk_steps.staged_path(context, name).unlink()
    holders = deleted_by_a_stranger(context, old_network, name)
    posting = chunk_steps.posting_of(context.ledger.chunks.get(name))
    assert {copy.provider for copy in context.store.copies(posting)} == set(holders)
    report = prove_chunk(context, name)
    assert (report.chunk.state, list(report.read_back)) == (ChunkState.DAMAGED, [])
    assert find_deletable(context, tmp_path / "list.csv").safe_objects == 0
    assert repair_chunk(context, name).origin == "source"
    assert (context.ledger.chunks.get(name).state, context.ledger.chunks.get(name).start) == (
        ChunkState.LOCATED,
        posting.start,
    )
    every_object_reads_back(context)
