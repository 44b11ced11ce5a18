"""Two homes with empty ledgers and one wallet, or one folder, never archive the same twice."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import StoredAlready
from caf_pipeline.ledger.transactions import TransactionLog
from caf_pipeline.maintenance.rebuild import rebuild
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.steps.first_plan import accept_new_archive
from caf_pipeline.store.directory import DirectoryStore
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline_tests.support.doctors import mended
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.new_ledgers import new_ledger  # noqa: F401 - a fixture
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_chunk


@pytest.fixture
def new_home(tmp_path, wallet, new_ledger, jackal_context):
    """Open a home with an empty ledger. All homes have the same objects and the same wallet."""
    objects = MemorySource({f"key-{number}": os.urandom(5_000) for number in range(3)})
    numbers = itertools.count()

    def make(source=objects, ledger=None):
        number = next(numbers)
        return jackal_context(
            source,
            ledger or new_ledger(),
            folder=tmp_path / f"home-{number}",
            run=f"run-{number}",
            jackal={"mnemonic": wallet.words},
        )

    return make


@pytest.fixture
def new_folder_home(tmp_path, new_ledger):
    """Open a home with an empty ledger and the same folder for chunks."""
    objects, homes = MemorySource({"key": os.urandom(5_000)}), []

    def make():
        ledger, number = new_ledger(), len(homes)
        store = DirectoryStore(tmp_path / "store", ledger.folder_store)
        homes.append(
            a_run_context(
                tmp_path / f"home-{number}", objects, ledger, run=f"run-{number}", store=store
            )
        )
        return homes[-1]

    return make


def sealed(home):
    """Plan as the first run of a home does, and pack the chunk."""
    (chunk,) = planning.cut_plan(home, inventories.take_inventory(home)).chunks
    archive_chunk(home, chunk.name, until=chunk_steps.seal_chunk)
    return chunk.name


def run(home):
    """Plan and archive as `caf run` does; return the names of the chunks."""
    planned = planning.cut_plan(home, inventories.take_inventory(home)).chunks
    for chunk in planned:
        archive_chunk(home, chunk.name)
    return [chunk.name for chunk in planned]


def posts_of(home):
    """Return the posts of the wallet, by archive."""
    return {archive: files.count for archive, files in home.store.archives().items()}


def commit_then(monkeypatch, home, action):
    """Run an action after the home's first commit, before it sends the transaction."""
    commit, actions = TransactionLog.commit, [action]

    def commit_and_act(log, *args):
        commit(log, *args)
        if log._holder == home.holder and actions:
            actions.pop()()

    monkeypatch.setattr(TransactionLog, "commit", commit_and_act)


# --- the first post -------------------------------------------------------------------------------


def test_of_two_homes_that_begin_at_once_one_is_refused(new_home):
    first, second = new_home(), new_home()
    names = [sealed(home) for home in (first, second)]
    archive_chunk(first, names[0])
    for _ in range(2):
        with pytest.raises(StoredAlready, match=first.archive_id) as refused:
            chunk_steps.post_file(second, names[1])
    assert "caf withdraw" in refused.value.hint
    assert "caf rebuild" in refused.value.hint
    assert posts_of(first) == {first.archive_id: 1}


@pytest.mark.thorough
def test_two_homes_that_run_side_by_side_pay_once(new_home):
    homes = [new_home(), new_home()]
    names = [sealed(home) for home in homes]

    def archive(home, name):
        try:
            archive_chunk(home, name)
        except StoredAlready:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(archive, homes, names)) == [False, True]
    assert [*posts_of(homes[0]).values()] == [1]


def test_after_a_withdrawal_and_a_rebuild_both_homes_go_on(new_home, monkeypatch):
    first, second = new_home(), new_home()
    names = [sealed(home) for home in (first, second)]
    commit_then(monkeypatch, second, lambda: archive_chunk(first, names[0]))
    with pytest.raises(StoredAlready):  # the second signature of a sequence is not repeated
        chunk_steps.post_file(second, names[1])
    log = second.ledger.transactions(second.holder)
    assert log.pending(second.store.poster.account) == []
    assert posts_of(first) == {first.archive_id: 1}

    chunk_steps.withdraw_all(second, names[1:], reason="")
    with pytest.raises(StoredAlready):  # withdrawing alone plans nothing
        run(second)
    assert all(outcome.complete for outcome in rebuild(second))
    second = new_home(ledger=second.ledger)
    assert second.archive_id == first.archive_id
    assert run(second) == []

    first.objects.bodies["new"] = os.urandom(5_000)
    assert len(run(first)) == 1
    with pytest.raises(StoredAlready, match="does not know"):
        run(second)
    assert posts_of(first) == {first.archive_id: 2}


def test_another_archive_can_be_set_aside(new_home):
    first, second = new_home(), new_home()
    names = [sealed(home) for home in (first, second)]
    archive_chunk(first, names[0])
    with pytest.raises(StoredAlready):
        chunk_steps.post_file(second, names[1])
    accept_new_archive(second)
    archive_chunk(second, names[1])
    assert posts_of(first) == {first.archive_id: 1, second.archive_id: 1}


# --- after the first post -------------------------------------------------------------------------


def test_homes_with_different_sources_do_not_stop_each_other(new_home):
    first = new_home()
    run(first)
    second = new_home(MemorySource({"other": os.urandom(5_000)}))
    accept_new_archive(second)
    run(second)
    for number in range(2):
        for home in (first, second):
            home.objects.bodies[f"new-{number}"] = os.urandom(5_000)
            assert len(run(home)) == 1
    assert posts_of(first) == {first.archive_id: 3, second.archive_id: 3}


def test_another_ledger_is_a_condition_until_set_aside(new_home):
    first = new_home()
    run(first)
    assert first.ledger.progress.foreign_use().sentence == ""
    second = new_home(MemorySource({"other": os.urandom(5_000)}))
    accept_new_archive(second)
    run(second)
    first.objects.bodies["new"] = os.urandom(5_000)
    run(first)
    foreign = first.ledger.progress.foreign_use()
    assert (foreign.transactions, foreign.archives) == (1, [])

    account = first.store.poster.account
    assert any(name == account and second.archive_id in done for _, name, done in mended(first))
    foreign = first.ledger.progress.foreign_use()
    assert (foreign.transactions, foreign.archives) == (0, [second.archive_id])
    accept_new_archive(first)
    assert first.ledger.progress.foreign_use().sentence == ""


def test_a_wallet_of_one_ledger_is_read_once(new_home, network, wallet, monkeypatch):
    network.spend_sequence(wallet.address)  # bought space with another program
    network.advance(1)
    home, lists = new_home(), []
    list_archives = Chain.archives_of
    monkeypatch.setattr(
        Chain, "archives_of", lambda *args: (lists.append(args), list_archives(*args))[1]
    )
    run(home)
    assert len(lists) == 1  # by the first plan
    for number in range(3):
        home.objects.bodies[f"new-{number}"] = os.urandom(5_000)
        run(home)
    assert len(lists) == 1


# --- a folder -------------------------------------------------------------------------------------


def test_of_two_homes_with_one_folder_one_is_refused(new_folder_home):
    first, second = new_folder_home(), new_folder_home()
    names = [sealed(home) for home in (first, second)]
    archive_chunk(first, names[0])
    with pytest.raises(StoredAlready, match=first.archive_id):
        chunk_steps.post_file(second, names[1])
    assert posts_of(first) == {first.archive_id: 1}
    chunk_steps.withdraw_all(second, names[1:], reason="")
    assert all(outcome.complete for outcome in rebuild(second))
    assert second.ledger.sources.archive_id("src") == first.archive_id
    assert run(second) == []


@pytest.mark.thorough
def test_first_posts_into_one_folder_at_once_are_one(new_folder_home):
    homes = [new_folder_home() for _ in range(4)]
    names = [sealed(home) for home in homes]

    def post(home, name):
        try:
            chunk_steps.post_file(home, name)
        except StoredAlready:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(post, homes, names)) == 1
    assert [*posts_of(homes[0]).values()] == [1]
    assert [
        home.ledger.chunks.get(name).state for home, name in zip(homes, names, strict=True)
    ].count(ChunkState.POSTED) == 1
