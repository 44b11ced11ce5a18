"""Withdrawals: a chunk is given up only if the store has no post of it."""

import contextlib
import dataclasses
import os
import shutil
import sys

import pytest

from caf_pipeline.chunk_state import CLAIMING, ChunkState
from caf_pipeline.dagster_host.remove import remove_command
from caf_pipeline.errors import (
    EmptyWallet,
    IllegalMove,
    LedgerError,
    PlanExpired,
    SpendCapReached,
    StoreUnreachable,
)
from caf_pipeline.ledger import backup
from caf_pipeline.ledger.transactions import TransactionLog
from caf_pipeline.run_context import Lazy
from caf_pipeline.steps import chunk_steps
from caf_pipeline_tests.support.jackal_command_line import new_wallet, wallet_with_space
from caf_pipeline_tests.support.jackal_network import FUNDS, SPACE
from caf_pipeline_tests.support.jackal_stores import open_jackal_store
from caf_pipeline_tests.support.kills import KILLED, Fatal, call
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.payers import Payer, start_payment
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_chunk, first_chunk, plan


@pytest.fixture
def open_context(ledger, jackal_context):
    """Return a function that opens the source with a wallet."""

    def make(words, *, lcd=None, **settings):
        return jackal_context(
            MemorySource({f"key-{number}": os.urandom(5_000) for number in range(4)}),
            ledger,
            jackal={"mnemonic": words} | ({"lcd": lcd} if lcd else {}),
            **settings,
        )

    return make


@pytest.fixture
def context(open_context, wallet, database_url):
    return open_context(wallet.words, database_url=database_url)


@pytest.fixture
def in_a_folder(tmp_path, ledger):
    return a_run_context(tmp_path, MemorySource({"key": os.urandom(5_000)}), ledger)


def intended(context):
    """Return a chunk whose run was killed after it moved the chunk to `posting`."""
    name = first_chunk(context, until=chunk_steps.seal_chunk)
    with context.lease(f"chunk/{name}") as lease:
        context.ledger.moves.move(lease, name, ChunkState.SEALED, ChunkState.POSTING)
    return name


def requested(context):
    """Return a chunk whose run ended after its request."""
    name = first_chunk(context, until=chunk_steps.seal_chunk)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(context.store.poster, "_sign_posts", lambda *_: sys.exit())
        with pytest.raises(SystemExit):
            chunk_steps.post_file(context, name)
    assert (state_of(context, name), requests(context)) == (ChunkState.POSTING, 1)
    return name


def state_of(context, name):
    return context.ledger.chunks.get(name).state


def requests(context):
    with connected(context.ledger.database) as connection:
        return connection.execute("SELECT count(*) FROM posts").fetchone()[0]


def posts(context):
    return list(context.store.posted(context.archive_id))


def archived_once(context):
    """Plan and archive everything; assert that one post has it."""
    for chunk in plan(context).chunks:
        archive_chunk(context, chunk.name)
    assert len(posts(context)) == 1
    assert len(context.ledger.chunks.list("src", [ChunkState.LOCATED])) == 1


def limit(context, ujkl):
    context.store.poster._spend_cap = lambda: ujkl  # the throttle reads the order later


# --- a refusal leaves no intention ----------------------------------------------------------------


def test_the_spend_cap_refuses_a_chunk_before_it_is_packed(context):
    limit(context, 1)
    name = first_chunk(context)
    with pytest.raises(SpendCapReached):
        chunk_steps.load_batch(context, name)
    assert state_of(context, name) is ChunkState.PLANNED


def test_the_spend_cap_leaves_a_sealed_chunk_sealed(context):
    name = first_chunk(context, until=chunk_steps.seal_chunk)
    limit(context, 1)
    with pytest.raises(SpendCapReached):
        chunk_steps.post_file(context, name)
    assert (state_of(context, name), requests(context)) == (ChunkState.SEALED, 0)
    chunk_steps.withdraw(context, name)
    limit(context, None)
    archived_once(context)


# --- nothing was signed ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SpendCapReached, PlanExpired, EmptyWallet])
def test_what_is_refused_after_its_admission_can_be_withdrawn(
    open_context, network, error, monkeypatch
):
    wallet = new_wallet()
    network.grant(wallet.address, SPACE)
    if error is not EmptyWallet:
        network.fund(wallet.address, FUNDS)
    context = open_context(wallet.words)
    with monkeypatch.context() as patched:
        patched.setattr(context.store, "admit", lambda **_: None)
        name = first_chunk(context, until=chunk_steps.seal_chunk)
        limit(context, 1 if error is SpendCapReached else None)
        if error is PlanExpired:
            network.expire(wallet.address)
        with pytest.raises(error):
            chunk_steps.post_file(context, name)
    assert (state_of(context, name), requests(context)) == (ChunkState.POSTING, 1)

    chunk_steps.withdraw(context, name)
    assert (state_of(context, name), requests(context)) == (ChunkState.WITHDRAWN, 0)
    assert not chunk_steps.staged_path(context, name).exists()
    limit(context, None)
    network.fund(wallet.address, FUNDS)
    network.grant(wallet.address, SPACE)
    archived_once(context)


def test_a_parked_intention_can_be_withdrawn(context):
    name = requested(context)
    chunk_steps.park(context, name, "the spend cap")
    chunk_steps.withdraw(context, name)
    assert (state_of(context, name), requests(context)) == (ChunkState.WITHDRAWN, 0)


@pytest.mark.thorough
def test_a_run_killed_after_its_request_leaves_a_withdrawable_chunk(
    context, network, wallet, database_url, tmp_path
):
    name = intended(context)
    fatal = Fatal(call(TransactionLog.ask), 2)
    run = start_payment(Payer(network, wallet.words, None), database_url, name, fatal=fatal)
    assert (run.wait(), requests(context)) == (KILLED, 1)
    chunk_steps.withdraw(context, name)
    assert (state_of(context, name), requests(context)) == (ChunkState.WITHDRAWN, 0)
    archived_once(context)


def test_a_silent_store_withdraws_nothing(context, open_context, wallet):
    name = requested(context)
    silent = open_context(wallet.words, run="run-2", lcd=("http://127.0.0.1:9",))
    with pytest.raises(StoreUnreachable):
        chunk_steps.withdraw(silent, name)
    assert (state_of(context, name), requests(context)) == (ChunkState.POSTING, 1)


# --- something was signed -------------------------------------------------------------------------


@pytest.fixture
def two_chunks(context):
    """Return a requested chunk, and a sealed one whose run would post both."""
    context.objects.bodies |= {f"large-{number}": os.urandom(900_000) for number in range(2)}
    first = requested(context)
    (second,) = [chunk.name for chunk in context.ledger.chunks.list("src", [ChunkState.PLANNED])]
    archive_chunk(context, second, until=chunk_steps.seal_chunk)
    return first, second


def test_a_chunk_that_another_run_posted_is_not_withdrawn(context, two_chunks):
    first, second = two_chunks
    chunk_steps.post_file(context, second)
    assert (len(posts(context)), requests(context)) == (2, 0)
    with pytest.raises(IllegalMove):
        chunk_steps.withdraw(context, first)
    assert state_of(context, first) is ChunkState.POSTING
    archive_chunk(context, first)
    assert state_of(context, first) is ChunkState.LOCATED
    assert len(posts(context)) == 2


def test_no_batch_posts_a_chunk_that_is_withdrawn_meanwhile(context, two_chunks, monkeypatch):
    first, second = two_chunks
    commit, batches = TransactionLog.commit, []

    def commit_after_withdrawal(log, lease, transaction, chunks):
        batches.append(sorted(chunks))
        if first in chunks:
            chunk_steps.withdraw(context, first)
        commit(log, lease, transaction, chunks)

    monkeypatch.setattr(TransactionLog, "commit", commit_after_withdrawal)
    chunk_steps.post_file(context, second)
    assert batches == [sorted(two_chunks), [second]]
    assert (state_of(context, first), len(posts(context))) == (ChunkState.WITHDRAWN, 1)


def test_a_cap_for_one_post_posts_one_of_two_chunks(context, two_chunks):
    first, second = two_chunks
    limit(context, context.store.cost(1, 1).fees_ujkl)
    with pytest.raises(SpendCapReached):
        chunk_steps.post_file(context, second)
    chunk_steps.post_file(context, first)
    states = [state_of(context, name) for name in two_chunks]
    assert states == [ChunkState.POSTED, ChunkState.SEALED]


def test_a_batch_beyond_the_cap_posts_its_own_chunk(context, two_chunks, monkeypatch):
    limit(context, context.store.cost(1, 1).fees_ujkl)
    monkeypatch.setattr(context.store, "admit", lambda **_: None)
    chunk_steps.post_file(context, two_chunks[1])
    assert (len(posts(context)), requests(context)) == (1, 1)


def test_a_transaction_under_way_keeps_its_chunk(context, network):
    name = requested(context)
    log = context.ledger.transactions(context.holder)
    poster = context.store.poster
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(poster, "_settled", lambda *_, **__: sys.exit())
        with pytest.raises(SystemExit):
            chunk_steps.post_file(context, name)
    assert len(log.pending(poster.account)) == 1
    with context.lease(f"chunk/{name}") as lease, pytest.raises(IllegalMove):
        context.ledger.moves.move(lease, name, ChunkState.POSTING, ChunkState.WITHDRAWN)
    with pytest.raises(IllegalMove):
        chunk_steps.withdraw(context, name)  # which settles the transaction
    assert (log.pending(poster.account), len(posts(context))) == ([], 1)


def archived_since_backup(context, name, folder):
    """Archive a chunk; restore a ledger from before it."""
    path, database = folder / "ledger.dump", context.ledger.database
    backup.back_up(database, path, embedded=True)
    archive_chunk(context, name)
    backup.restore(backup.Programs(database, embedded=True), path, reason="a test")
    context.ledger.controls.set("paused", None)
    assert (state_of(context, name), len(posts(context))) == (ChunkState.POSTING, 1)


def test_a_post_of_an_earlier_wallet_keeps_its_chunk(context, open_context, tmp_path, network):
    name = requested(context)
    archived_since_backup(context, name, tmp_path)
    other = open_context(wallet_with_space(network).words, run="run-2")
    with pytest.raises(IllegalMove, match=context.store.owner()):
        chunk_steps.withdraw(other, name)
    assert state_of(other, name) is ChunkState.POSTING


# --- `caf remove`, and a corrected prefix ---------------------------------------------------------


def removed(context, **changes):
    """Remove the source as `caf remove` does, although the settings lack it."""
    store = context.settings.store.model_copy(update={"kind": "jackal"})
    jackal = context.settings.jackal.model_copy(update=changes)
    settings = context.settings.model_copy(update={"sources": {}, "store": store, "jackal": jackal})
    remove_command("src", settings=settings, run="remover", confirm=lambda _: None)
    assert context.ledger.lookup.sources() == []


def corrected(context, **changes):
    """Correct the prefix as `caf run` does before it plans."""
    source = context.settings.sources["src"].model_copy(update={"prefix": "key"})
    jackal = context.settings.jackal.model_copy(update=changes)
    settings = context.settings.model_copy(update={"sources": {"src": source}, "jackal": jackal})
    store = open_jackal_store(settings, context.ledger, context.holder)
    context = dataclasses.replace(context, settings=settings, lazy_store=Lazy.of(store))
    with contextlib.closing(store):
        chunk_steps.correct_address(context)
        context.ledger.sources.register("src", context.address)
    assert context.ledger.sources.address("src") is None


WAYS = pytest.mark.parametrize("give_up", [removed, corrected])


@WAYS
def test_all_unposted_chunks_go_with_their_source(context, network, wallet, give_up):
    context.objects.bodies |= {f"large-{number}": os.urandom(900_000) for number in range(2)}
    requested(context)
    network.expire(wallet.address)
    give_up(context)
    assert context.ledger.chunks.list("src", CLAIMING) == []
    assert (requests(context), [*context.staging().iterdir()]) == (0, [])


@WAYS
@pytest.mark.parametrize("state", ["posted", "silent", "signed"])
def test_nothing_is_given_up_if_a_chunk_may_be_stored(context, two_chunks, give_up, state):
    second = two_chunks[1]
    error, changes = IllegalMove if give_up is removed else LedgerError, {}
    if state == "posted":
        chunk_steps.post_file(context, second)
    elif state == "signed":
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(context.store.poster, "_settled", lambda *_, **__: sys.exit())
            with pytest.raises(SystemExit):
                chunk_steps.post_file(context, second)
    else:
        error, changes = StoreUnreachable, {"lcd": ("http://127.0.0.1:9",)}
    states = [state_of(context, name) for name in two_chunks]
    with pytest.raises(error):
        give_up(context, **changes)
    assert [state_of(context, name) for name in two_chunks] == states
    assert all(chunk_steps.staged_path(context, name).exists() for name in two_chunks)


def withdrawn(context):
    (chunk,) = context.ledger.chunks.list("src")
    chunk_steps.withdraw(context, chunk.name)


@pytest.mark.parametrize("give_up", [removed, corrected, withdrawn])
def test_what_was_posted_since_the_backup_is_kept(context, tmp_path, give_up):
    name = requested(context)
    archived_since_backup(context, name, tmp_path)
    with pytest.raises(IllegalMove):
        give_up(context)
    assert state_of(context, name) is ChunkState.POSTING


# --- a store in a folder --------------------------------------------------------------------------


def test_a_folder_without_the_post_lets_the_chunk_go(in_a_folder):
    name = intended(in_a_folder)
    chunk_steps.withdraw(in_a_folder, name)
    assert state_of(in_a_folder, name) is ChunkState.WITHDRAWN
    archived_once(in_a_folder)


def test_a_post_file_in_the_folder_keeps_the_chunk(in_a_folder):
    name = intended(in_a_folder)
    with in_a_folder.lease(f"chunk/{name}") as lease:  # killed before the ledger knew
        in_a_folder.store.post(
            chunk_steps.to_store(in_a_folder, lease, in_a_folder.ledger.chunks.get(name)),
            in_a_folder.ledger.transactions(in_a_folder.holder),
        )
    with pytest.raises(IllegalMove):
        chunk_steps.withdraw(in_a_folder, name)
    assert state_of(in_a_folder, name) is ChunkState.POSTING
    archive_chunk(in_a_folder, name)
    archived_once(in_a_folder)


def test_a_folder_that_is_away_withdraws_nothing(in_a_folder, tmp_path):
    in_a_folder.store.bind()
    name = intended(in_a_folder)
    shutil.move(in_a_folder.store.folder, tmp_path / "away")
    with pytest.raises(StoreUnreachable):
        chunk_steps.withdraw(in_a_folder, name)
    assert state_of(in_a_folder, name) is ChunkState.POSTING


def test_another_store_than_the_intended_is_not_asked(in_a_folder):
    name = intended(in_a_folder)
    with connected(in_a_folder.ledger.database) as connection:
        connection.execute("UPDATE chunk_copies SET store = 'another'")
    with pytest.raises(IllegalMove, match="another"):
        chunk_steps.withdraw(in_a_folder, name)
    assert state_of(in_a_folder, name) is ChunkState.POSTING
