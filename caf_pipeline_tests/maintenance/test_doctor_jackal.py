"""The doctor on Jackal: unsettled transactions, unrecorded posts, unknown and unlisted chunks."""

import itertools

import httpx
import psycopg
import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import StoreUnreachable
from caf_pipeline.ledger.chunk_moves import ChunkMoves
from caf_pipeline.ledger.transactions import TransactionLog
from caf_pipeline.maintenance import rebuild
from caf_pipeline.maintenance.doctor.findings import Actor, Kind
from caf_pipeline.maintenance.rebuild import FileKind
from caf_pipeline.steps import chunk_steps
from caf_pipeline.store.jackal.names import archive_note
from caf_pipeline.system.quantities import show_size
from caf_pipeline_tests.support import steady_source
from caf_pipeline_tests.support.chain_user import ChainUser
from caf_pipeline_tests.support.doctors import (
    everything,
    examined,
    found,
    holding,
    mended,
)
from caf_pipeline_tests.support.jackal_network import ADDRESS, SPACE, jackal_settings
from caf_pipeline_tests.support.jackal_stores import open_jackal_store
from caf_pipeline_tests.support.kills import KILLED, Fatal, call
from caf_pipeline_tests.support.run_contexts import (
    archive_chunk,
    archive_everything,
    every_object_reads_back,
    plan,
)

pytestmark = pytest.mark.thorough

_numbers = itertools.count(1)


@pytest.fixture
def settings(network):
    """Return settings of a source with a bucket and an archive of its own."""
    network.grant(ADDRESS, SPACE)
    source = {"bucket": f"b-{next(_numbers)}", "target_size": "8MiB", "public": True}
    return {"jackal": jackal_settings(network, proof_seconds=20), "sources": {"src": source}}


@pytest.fixture
def context(ledger, settings, jackal_context):
    sources = settings["sources"]
    return jackal_context(steady_source.a_steady_source(), ledger, jackal={}, sources=sources)


@pytest.fixture
def name(context):
    (chunk,) = plan(context).chunks
    return chunk.name


@pytest.fixture
def killed_at(context, name, tmp_path, database_url, settings):
    """Kill a run of the chunk before or after a call to the ledger or its log."""

    def run(function, moment):
        archive_chunk(context, name, until=chunk_steps.seal_chunk)
        named = {"fatal": Fatal(call(function), moment), "store": open_jackal_store}
        assert steady_source.run(tmp_path, database_url, name, **named, **settings) == KILLED

    return run


@pytest.fixture
def unchanged(tmp_path, database_url):
    """Do nothing that changes anything."""

    def check(action):
        before = everything(tmp_path, database_url)
        action()
        assert everything(tmp_path, database_url) == before

    return check


def by_kind(context):
    return {finding.kind: finding for finding in examined(context)}


def posts_of(network, context, name):
    root = context.ledger.chunks.get(name).merkle_root.hex()
    return [file["start"] for file in network.state()["files"] if file["merkle"] == root]


def ends_right(network, context, name):
    archive_chunk(context, name)
    assert context.ledger.chunks.get(name).state is ChunkState.LOCATED
    assert len(posts_of(network, context, name)) == 1
    every_object_reads_back(context)
    assert found(context, reported=True) == []


def test_signed_transaction_of_a_killed_run_is_paid_once(
    killed_at, context, name, network, unchanged
):
    killed_at(TransactionLog.commit, 2)
    (signed,) = context.ledger.stray_rows.unsettled()
    finding = by_kind(context)[Kind.TRANSACTION]
    assert (finding.name, finding.actor) == (signed.hash, Actor.DOCTOR)
    assert f"block {signed.timeout_height} is the last" in finding.problem
    unchanged(lambda: found(context))
    assert (Kind.TRANSACTION, signed.hash, "settled") in mended(context)
    assert context.ledger.stray_rows.unsettled() == []
    assert found(context) == []
    assert len(posts_of(network, context, name)) == 1
    ends_right(network, context, name)


def test_transaction_of_a_live_run_is_left_alone(killed_at, context, database_url):
    killed_at(TransactionLog.commit, 2)
    (signed,) = context.ledger.stray_rows.unsettled()
    with holding(database_url, f"account/{signed.account}"):
        assert Kind.TRANSACTION not in by_kind(context)
        assert Kind.TRANSACTION not in {kind for kind, _, _ in mended(context)}
        assert context.ledger.stray_rows.unsettled() == [signed]


def test_transaction_of_another_wallet_is_reported(killed_at, context, database_url):
    killed_at(TransactionLog.commit, 2)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")  # its posts name the account
        connection.execute("UPDATE transactions SET account = 'jackal-1/jkl1other'")
    finding = by_kind(context)[Kind.TRANSACTION]
    assert (finding.actor, finding.mend) == (Actor.OPERATOR, None)
    assert "jackal-1/jkl1other" in finding.remedy


def test_unreachable_chain_does_not_stop_other_repairs(
    killed_at, context, name, network, database_url
):
    killed_at(TransactionLog.commit, 2)
    (context.staging() / f"{name}.1.download").write_bytes(b"left")
    network.kill()
    unsettled = 0
    for one in examined(context):
        if one.kind is Kind.TRANSACTION:
            with pytest.raises(StoreUnreachable):
                one.mend()
            unsettled += 1
        elif one.mend:
            one.mend()
    assert unsettled == 1
    findings = [finding for finding in examined(context) if finding.kind is Kind.UNSEEN]
    assert findings
    assert all(isinstance(finding.error, StoreUnreachable) for finding in findings)
    assert {kind for kind, _ in found(context)} == {Kind.TRANSACTION}
    network.start()
    assert Kind.TRANSACTION in {kind for kind, _, _ in mended(context)}
    ends_right(network, context, name)


def test_unrecorded_post_is_reported_and_finished_later(killed_at, context, name, network):
    killed_at(ChunkMoves.record_posting, 1)
    mended(context)
    findings = by_kind(context)
    assert (findings[Kind.FILE].name, findings[Kind.FILE].actor) == (name, Actor.RUN)
    assert (findings[Kind.CHUNK].name, findings[Kind.CHUNK].actor) == (name, Actor.RUN)
    ends_right(network, context, name)


def test_abandoned_and_double_posts_are_reported_with_their_size(context, name, network):
    archive_chunk(context, name, until=chunk_steps.post_file)
    with context.ledger.leases.hold(f"chunk/{name}", context.holder) as lease:
        context.ledger.moves.move(lease, name, ChunkState.POSTED, ChunkState.ABANDONED)
    chunk = context.ledger.chunks.get(name)
    with httpx.Client() as client:
        user = ChainUser(network, client)
        user.do(
            user.post_message(
                chunk.merkle_root, chunk.stored_size_bytes, note=archive_note(context.archive_id)
            )
        )
    mended(context)
    findings = [finding for finding in examined(context) if finding.kind is Kind.FILE]
    assert [finding.actor for finding in findings] == [Actor.NOBODY, Actor.NOBODY]
    assert any("abandoned" in finding.problem for finding in findings)
    assert all(show_size(chunk.stored_size_bytes) in finding.remedy for finding in findings)


def test_foreign_posts_are_neither_restored_nor_repeated(context, name, network):
    archive_chunk(context, name)
    words = "legal winner thank year wave sausage worth useful legal winner thank yellow"
    with httpx.Client() as client:
        spoofer = ChainUser(network, client, words)
        network.fund(spoofer.address, 10**9)
        network.grant(spoofer.address, 10**9)
        spoofer.post(b"spoofed", note=archive_note(context.archive_id))
    assert list(examined(context)) == []
    assert FileKind.FOREIGN in {chunk.kind for chunk in rebuild.find_chunks(context)}


def test_kept_staged_chunk_is_no_leftover(context):
    (name,) = archive_everything(context)
    assert chunk_steps.staged_path(context, name).exists()
    assert found(context, reported=True) == []
