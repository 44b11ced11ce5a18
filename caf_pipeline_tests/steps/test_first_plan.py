"""The first plan of a source in a ledger that has nothing of it: an empty home never archives, and
pays, again.
"""

import dataclasses
import os
import shutil
from datetime import UTC, datetime

import httpx
import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import MnemonicRefused, StoredAlready, StoreError, StoreUnreachable
from caf_pipeline.maintenance import rebuild
from caf_pipeline.run_context import Lazy
from caf_pipeline.settings import SourceSettings
from caf_pipeline.steps import inventories, planning
from caf_pipeline.steps.preview import preview_plan
from caf_pipeline.store.jackal.names import archive_note
from caf_pipeline_tests.support.chain_user import ChainUser, random_content
from caf_pipeline_tests.support.command_line import expect_error, source_text
from caf_pipeline_tests.support.jackal_command_line import jackal_command_line, wallet_with_space
from caf_pipeline_tests.support.jackal_network import jackal_settings
from caf_pipeline_tests.support.jackal_stores import open_jackal_store
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.new_ledgers import new_ledger  # noqa: F401 - a fixture
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

BODIES = {f"key-{number}": os.urandom(5_000) for number in range(9)}


def first_plan(context, **options):
    return planning.cut_plan(context, inventories.take_inventory(context), **options)


def renamed(context, name, **changes):
    """The same run context with the source renamed or moved; the settings then have no other
    source.
    """
    settings = context.settings.model_copy(
        update={"sources": {name: SourceSettings(bucket="b", **changes)}}
    )
    context = dataclasses.replace(context, source=name, settings=settings)
    context.ledger.sources.register(name, context.archive_id, context.address)
    return context


# --- a store in a folder
# ------------------------------------------------------------------------------------------


@pytest.fixture
def archived(tmp_path, ledger):
    """A run context whose source is archived."""
    context = a_run_context(tmp_path, MemorySource(dict(BODIES)), ledger)
    archive_everything(context)
    return context


@pytest.fixture
def emptied(archived, new_ledger):
    """The same with a ledger that knows nothing."""
    return dataclasses.replace(archived, lazy_ledger=Lazy.of(new_ledger()))


def registered(context):
    context.ledger.sources.register(context.source, context.archive_id, context.address)
    return context


def test_a_preview_says_that_its_plan_would_be_refused(archived, emptied):
    assert preview_plan(archived, inventories.take_inventory(archived)).warning == ""
    found = preview_plan(emptied, inventories.take_inventory(emptied))
    assert "this plan would be refused: the ledger has no chunk of 'src'" in found.warning
    assert "'caf rebuild src' restores them" in found.as_json()["warning"]


def test_an_empty_ledger_plans_nothing_of_what_the_store_has_and_says_both_ways_on(emptied):
    context = registered(emptied)
    with pytest.raises(StoredAlready) as refused:
        first_plan(context)
    assert "1 file that may hold its objects" in str(refused.value)
    assert "'caf rebuild src'" in refused.value.hint
    assert "'caf run src --new-archive'" in refused.value.hint
    assert context.ledger.chunks.list() == []
    assert context.ledger.chunks.account("src").claimed_objects == 0


def test_a_refusal_names_the_archives_with_chunks_and_dates(emptied, archived):
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    with pytest.raises(StoredAlready) as refused:
        first_plan(renamed(emptied, "photos", prefix="photos/"))
    assert f"{archived.archive_id} with 1 chunk, {today} to {today}" in str(refused.value)
    assert "'caf run photos --new-archive'" in refused.value.hint
    with pytest.raises(StoredAlready) as refused:
        first_plan(registered(emptied))
    assert f"{archived.archive_id} (source 'src') with 1 chunk, " in str(refused.value)


def test_once_it_is_rebuilt_it_is_planned_as_ever(emptied):
    context = registered(emptied)
    list(rebuild.rebuild(context))
    assert first_plan(context).chunks == []
    context.objects.bodies["new"] = b"new"
    assert len(first_plan(context).chunks) == 1


def test_until_a_rebuild_that_was_ended_in_its_middle_is_gone_on_with_nothing_is_planned(
    emptied, archived
):
    archived.objects.bodies["second"] = b"second"
    archive_everything(archived)
    context = registered(emptied)
    run = rebuild.rebuild(context)
    next(run)
    run.close()
    assert len(context.ledger.chunks.list()) == 1
    with pytest.raises(StoredAlready, match="has not restored all") as refused:
        first_plan(context)
    assert "'caf rebuild src' goes on with it" in refused.value.hint
    assert (
        "has not restored all" in preview_plan(context, inventories.take_inventory(context)).warning
    )
    list(rebuild.rebuild(context, dry_run=True))
    with pytest.raises(StoredAlready):
        first_plan(context)
    list(rebuild.rebuild(context))
    assert first_plan(context).chunks == []


def test_after_a_rebuild_that_left_a_chunk_out_nothing_is_planned_until_one_leaves_none_out(
    emptied, archived
):
    archived.objects.bodies["second"] = b"second"
    archive_everything(archived)
    context = registered(emptied)
    file, _ = (archived.store.folder / "chunks").iterdir()
    away = file.rename(file.with_suffix(".away"))
    for _ in range(2):  # the second one restores nothing, and still leaves it out
        assert sorted(outcome.complete for outcome in rebuild.rebuild(context)) == [False, True]
        with pytest.raises(StoredAlready, match="has not restored all"):
            first_plan(context)
    away.rename(file)
    list(rebuild.rebuild(context))
    assert first_plan(context).chunks == []


def test_a_rebuild_that_restores_nothing_beside_what_is_known_holds_plans_where_it_leaves_a_file_out(  # noqa: E501
    archived,
):
    (post,) = (archived.store.folder / "posts").iterdir()
    shutil.copy(post, post.with_stem("ab" * 32))
    assert not all(outcome.complete for outcome in rebuild.rebuild(archived))
    archived.objects.bodies["new"] = b"new"
    with pytest.raises(StoredAlready, match="has not restored all"):
        first_plan(archived)
    assert len(first_plan(archived, new_archive=True).chunks) == 1
    assert first_plan(archived).chunks == []


def test_a_new_archive_of_a_source_that_was_rebuilt_in_part_is_planned_where_it_is_meant(emptied):
    context = registered(emptied)
    context.ledger.rebuilds.begin("src")
    assert len(first_plan(context, new_archive=True).chunks) == 1
    context.objects.bodies["new"] = b"new"
    assert len(first_plan(context).chunks) == 1


def test_a_new_archive_that_is_meant_is_planned_and_never_asked_about_again(emptied, monkeypatch):
    context = registered(emptied)
    assert len(first_plan(context, new_archive=True).chunks) == 1
    monkeypatch.setattr(type(context.store), "archives", None)  # not asked: the ledger has chunks
    assert first_plan(context).chunks == []


def test_a_source_of_another_name_at_the_same_address_counts_as_the_same(emptied, archived):
    with pytest.raises(StoredAlready, match="had another name"):
        first_plan(renamed(emptied, "photos"))
    beside = renamed(archived, "photos")
    with pytest.raises(
        StoredAlready, match="those of source 'src', which has the same bucket and prefix"
    ) as refused:
        first_plan(beside)
    assert "caf rebuild" in refused.value.hint
    assert "--new-archive" in refused.value.hint


def test_a_source_whose_address_changed_counts_as_the_same(emptied):
    with pytest.raises(StoredAlready):
        first_plan(renamed(emptied, "src", endpoint_url="http://moved.example"))


@pytest.mark.thorough
def test_files_of_a_source_that_the_ledger_or_the_settings_have_elsewhere_are_no_reason_to_refuse(
    archived, emptied
):
    assert len(first_plan(renamed(archived, "photos", prefix="photos/")).chunks) == 1
    context = renamed(emptied, "photos", prefix="photos/")
    with pytest.raises(StoredAlready):
        first_plan(context)
    both = {**context.settings.sources, **archived.settings.sources}
    context = dataclasses.replace(
        context, settings=context.settings.model_copy(update={"sources": both})
    )
    assert len(first_plan(context).chunks) == 1


def test_a_post_that_names_no_archive_ends_the_plan(emptied):
    (post,) = (emptied.store.folder / "posts").iterdir()
    post.write_text(post.read_text().replace('"archive"', '"other"'))
    with pytest.raises(StoreError):
        first_plan(registered(emptied))


def test_a_source_with_nothing_in_it_asks_nothing(emptied, monkeypatch):
    context = registered(emptied)
    context.objects.bodies.clear()
    monkeypatch.setattr(type(context.store), "archives", None)
    assert first_plan(context).chunks == []


@pytest.mark.thorough
def test_the_launchpad_plans_a_new_archive_only_where_it_is_ordered(pipeline, new_ledger):
    pipeline.put(5)
    (chunk,) = pipeline.plan()
    assert pipeline.execute("archive_my_source", partition_key=chunk).success
    with connected(pipeline.ledger.database) as connection:
        connection.execute("TRUNCATE sources CASCADE")
    refused = pipeline.execute("plan_my_source")
    assert not refused.success
    assert "caf rebuild" in str(refused.events_for_node("my_source__chunk_plan"))
    assert pipeline.chunks() == []
    config = {"ops": {"my_source__chunk_plan": {"config": {"new_archive": True}}}}
    assert pipeline.execute("plan_my_source", run_config=config).success
    assert len(pipeline.chunks()) == 1


# --- Jackal
# ------------------------------------------------------------------------------------------


@pytest.fixture
def wallet(network):
    return wallet_with_space(network)


@pytest.fixture
def context(tmp_path, ledger, network, wallet):
    settings = jackal_settings(network, mnemonic=wallet.words)
    context = a_run_context(
        tmp_path, MemorySource(dict(BODIES)), ledger, store=open_jackal_store, jackal=settings
    )
    yield context
    context.store.close()


def post(network, words, note):
    with httpx.Client() as client:
        ChainUser(network, client, words).post(random_content(1000), note=note)


@pytest.mark.parametrize(
    "note", ["[]", '"text"', "5", '{"caf_pipeline":5}', archive_note("f" * 32)]
)
def test_a_file_of_this_wallet_whose_note_cannot_be_read_or_names_an_unknown_archive_counts(
    context, network, wallet, note
):
    post(network, wallet.words, note)
    with pytest.raises(StoredAlready):
        first_plan(context)


def test_files_of_other_programs_and_of_other_wallets_do_not_count(context, network, wallet):
    post(network, wallet.words, '{"album":"holidays"}')
    post(network, wallet.words, "{}")
    stranger = wallet_with_space(network)
    post(network, stranger.words, archive_note(context.archive_id))
    assert len(first_plan(context).chunks) == 1


@pytest.mark.thorough
def test_a_chain_that_is_away_is_not_taken_for_one_that_has_nothing(context, network):
    for lcd in range(2):
        network.misbehave(lcd=lcd, refuse=True)
    with pytest.raises(StoreUnreachable):
        first_plan(context)
    assert context.ledger.chunks.list() == []
    network.well_behaved()
    assert len(first_plan(context).chunks) == 1


def test_without_a_wallet_it_is_not_known_whose_files_to_ask_for(tmp_path, ledger, network):
    settings = jackal_settings(network, mnemonic=None)
    context = a_run_context(
        tmp_path, MemorySource(dict(BODIES)), ledger, store=open_jackal_store, jackal=settings
    )
    with pytest.raises(MnemonicRefused):
        first_plan(context)
    context.store.close()


# --- the command
# ------------------------------------------------------------------------------------------


@pytest.fixture
def make_home(tmp_path, network, wallet, s3_server, new_bucket):
    """Makes a folder of its own with the same settings and wallet, on another ledger."""
    new_bucket.put("key", os.urandom(100_000))

    def make(name, ledger):
        (tmp_path / name).mkdir()
        caf = jackal_command_line(
            tmp_path / name, network, wallet.words, CAF_DATABASE_URL=ledger.url
        )
        caf.settings(source_text(s3_server, new_bucket.name) + "public = true\n")
        return caf

    return make


def test_the_settings_and_the_wallet_in_a_new_folder_pay_for_nothing(
    make_home,
    new_ledger,
    network,
    wallet,
):
    first, second = make_home("first", new_ledger()), make_home("second", fresh := new_ledger())
    assert first("run").status == 0
    charged = network.state()["charged"][wallet.address]
    expect_error(second("run"), 7, "caf rebuild src", "caf run src --new-archive")
    assert fresh.chunks.list() == []
    assert second("rebuild").status == 0
    assert second("run").status == 0
    assert {chunk.state for chunk in fresh.chunks.list()} == {ChunkState.LOCATED}
    assert network.state()["charged"][wallet.address] == charged


@pytest.mark.thorough
def test_the_doctor_leaves_a_first_copy_as_it_is_beside_the_second(make_home, new_ledger):
    first, second = make_home("first", new_ledger()), make_home("second", new_ledger())
    assert first("run").status == 0
    assert second("run", "--source", "src", "--new-archive").status == 0
    looked = second("doctor", "--dry-run")
    assert looked.status == 0
    assert b"left as they are" in looked.out
    assert b"caf run --new-archive" in looked.out
    assert b"until the bought space ends" in looked.out


@pytest.mark.thorough
def test_a_new_archive_is_paid_for_where_it_is_ordered_for_one_source(
    make_home,
    new_ledger,
    network,
    wallet,
):
    caf = make_home("home", ledger := new_ledger())
    post(network, wallet.words, archive_note("f" * 32))
    expect_error(caf("run", "--new-archive"), 2, "SOURCE")
    assert caf("run", "--source", "src", "--new-archive").status == 0
    assert {chunk.state for chunk in ledger.chunks.list()} == {ChunkState.LOCATED}
