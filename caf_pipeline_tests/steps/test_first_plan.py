"""The first plan of a source: an empty home never archives and pays again."""

import dataclasses
import os
import shutil
from datetime import UTC, datetime

import httpx
import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import (
    MnemonicRefused,
    NotLocated,
    StoredAlready,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.maintenance import rebuild
from caf_pipeline.run_context import Lazy
from caf_pipeline.settings import SourceSettings
from caf_pipeline.steps import inventories, planning
from caf_pipeline.steps.preview import preview_plan
from caf_pipeline.store.jackal.names import archive_note
from caf_pipeline_tests.support.chain_user import ChainUser, random_content
from caf_pipeline_tests.support.command_line import expect_error, source_text
from caf_pipeline_tests.support.forged_chunks import Forgery, put
from caf_pipeline_tests.support.jackal_command_line import jackal_command_line, wallet_with_space
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.new_ledgers import new_ledger  # noqa: F401 - a fixture
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

BODIES = {f"key-{number}": os.urandom(5_000) for number in range(9)}


def first_plan(context, **options):
    return planning.cut_plan(context, inventories.take_inventory(context), **options)


def renamed(context, name, **changes):
    """Return the context with a renamed or moved source, the only one in its settings."""
    settings = context.settings.model_copy(
        update={"sources": {name: SourceSettings(bucket="b", **changes)}}
    )
    context = dataclasses.replace(context, source=name, settings=settings)
    context.ledger.sources.register(name, context.address)
    return context


# --- a store in a folder --------------------------------------------------------------------------


@pytest.fixture
def archived(tmp_path, ledger):
    """A run context whose source is archived."""
    context = a_run_context(tmp_path, MemorySource(dict(BODIES)), ledger)
    archive_everything(context)
    return context


@pytest.fixture
def emptied(archived, new_ledger):
    """The same with an empty ledger."""
    return dataclasses.replace(archived, lazy_ledger=Lazy.of(new_ledger()))


def registered(context):
    context.ledger.sources.register(context.source, context.address)
    return context


def test_a_preview_says_that_its_plan_would_be_refused(archived, emptied):
    assert preview_plan(archived, inventories.take_inventory(archived)).warning == ""
    preview = preview_plan(emptied, inventories.take_inventory(emptied))
    assert "'caf rebuild src'" in preview.warning
    assert preview.as_json()["warning"] == preview.warning


def test_empty_ledger_beside_full_store_plans_nothing_and_gives_remedies(emptied):
    context = registered(emptied)
    with pytest.raises(StoredAlready) as refused:
        first_plan(context)
    assert "1 file " in str(refused.value)
    assert "'caf rebuild src'" in refused.value.hint
    assert "src --new-archive" in refused.value.hint
    assert context.ledger.chunks.list() == []
    assert context.ledger.chunks.account("src").claimed_objects == 0
    assert [*context.plans().iterdir()]  # of the lost ledger; a rebuild refers to them


def test_a_refusal_names_the_archives_with_chunks_and_dates(emptied, archived):
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    with pytest.raises(StoredAlready) as refused:
        first_plan(renamed(emptied, "photos", prefix="photos/"))
    assert f"{archived.archive_id} with 1 chunk, {today} to {today}" in str(refused.value)
    assert "photos --new-archive" in refused.value.hint
    registered(emptied).ledger.sources.restore_archive_id("src", archived.archive_id)
    with pytest.raises(StoredAlready) as refused:
        first_plan(emptied)
    assert f"{archived.archive_id} (source 'src') with 1 chunk, " in str(refused.value)


@pytest.mark.thorough
def test_once_it_is_rebuilt_it_is_planned_as_ever(emptied):
    context = registered(emptied)
    list(rebuild.rebuild(context))
    assert first_plan(context).chunks == []
    context.objects.bodies["new"] = b"new"
    assert len(first_plan(context).chunks) == 1


@pytest.mark.thorough
def test_interrupted_rebuild_blocks_plans_until_continued(emptied, archived):
    archived.objects.bodies["second"] = b"second"
    archive_everything(archived)
    context = registered(emptied)
    run = rebuild.rebuild(context)
    next(run)
    run.close()
    assert len(context.ledger.chunks.list()) == 1
    with pytest.raises(StoredAlready, match="incomplete") as refused:
        first_plan(context)
    assert "'caf rebuild src'" in refused.value.hint
    assert "incomplete" in preview_plan(context, inventories.take_inventory(context)).warning
    list(rebuild.rebuild(context, dry_run=True))
    with pytest.raises(StoredAlready):
        first_plan(context)
    list(rebuild.rebuild(context))
    assert first_plan(context).chunks == []


def test_unknown_post_blocks_plans_also_after_a_rebuild(archived):
    (post,) = (archived.store.folder / "posts").iterdir()
    shutil.copy(post, post.with_stem("ab" * 32))
    kinds = {outcome.finding.kind for outcome in rebuild.rebuild(archived)}
    assert kinds == {rebuild.FileKind.KNOWN, rebuild.FileKind.UNKNOWN_POST}
    archived.objects.bodies["new"] = b"new"
    with pytest.raises(StoredAlready):
        first_plan(archived)


def test_rebuild_without_new_chunks_blocks_plans_if_incomplete(archived, tmp_path):
    lost = Forgery(archived.archive_id).write(tmp_path / "lost")
    key = archived.ledger.sources.post_key("src")
    put(archived.store, lost, archived.archive_id, upload=False, key=key)
    assert not all(outcome.complete for outcome in rebuild.rebuild(archived))
    archived.objects.bodies["new"] = b"new"
    with pytest.raises(StoredAlready):
        first_plan(archived)
    assert len(first_plan(archived, new_archive=True).chunks) == 1
    assert first_plan(archived).chunks == []


def test_ordered_new_archive_is_planned_after_incomplete_rebuild(emptied):
    context = registered(emptied)
    context.ledger.rebuilds.begin("src")
    assert len(first_plan(context, new_archive=True).chunks) == 1
    context.objects.bodies["new"] = b"new"
    assert len(first_plan(context).chunks) == 1


def test_archives_set_aside_are_not_asked_about_again(emptied, archived):
    context = registered(emptied)
    context.objects.bodies.clear()
    assert first_plan(context, new_archive=True).chunks == []
    assert context.ledger.sources.ids_set_aside("src") == {archived.archive_id}
    context.objects.bodies |= BODIES
    assert len(first_plan(context).chunks) == 1


def test_archive_that_appears_later_is_asked_about(emptied, tmp_path):
    context = registered(emptied)
    context.objects.bodies.clear()
    first_plan(context, new_archive=True)
    put(context.store, Forgery("a" * 32).write(tmp_path / "x"), "a" * 32)
    context.objects.bodies |= BODIES
    with pytest.raises(StoredAlready, match="a" * 32):
        first_plan(context)


def test_archive_id_does_not_depend_on_name_and_bucket(archived, emptied):
    assert registered(emptied).archive_id != archived.archive_id


def test_unregistered_source_has_no_archive_id(emptied):
    with pytest.raises(NotLocated):
        _ = emptied.archive_id


def test_ordered_new_archive_is_planned_and_not_asked_again(emptied, monkeypatch):
    context = registered(emptied)
    assert len(first_plan(context, new_archive=True).chunks) == 1
    monkeypatch.setattr(type(context.store), "archives", None)  # not asked: the ledger has chunks
    assert first_plan(context).chunks == []


def test_renamed_source_at_same_address_counts_as_same(emptied, archived):
    with pytest.raises(StoredAlready):
        first_plan(renamed(emptied, "photos"))
    beside = renamed(archived, "photos")
    with pytest.raises(StoredAlready, match="source 'src' has the same bucket") as refused:
        first_plan(beside)
    assert "caf rebuild" in refused.value.hint
    assert "--new-archive" in refused.value.hint


def test_a_source_whose_address_changed_counts_as_the_same(emptied):
    with pytest.raises(StoredAlready):
        first_plan(renamed(emptied, "src", endpoint_url="http://moved.example"))


def test_files_of_sources_known_elsewhere_do_not_count(archived, emptied):
    assert len(first_plan(renamed(archived, "photos", prefix="photos/")).chunks) == 1
    context = renamed(emptied, "photos", prefix="photos/")
    with pytest.raises(StoredAlready):
        first_plan(context)
    list(rebuild.rebuild(emptied))
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
def test_launchpad_plans_new_archive_only_if_ordered(pipeline, new_ledger):
    pipeline.put(5)
    (chunk,) = pipeline.plan()
    assert pipeline.execute("caf_archive_my_source", partition_key=chunk).success
    with connected(pipeline.ledger.database) as connection:
        connection.execute("TRUNCATE sources CASCADE")
    refused = pipeline.execute("caf_plan_my_source")
    assert not refused.success
    assert "caf rebuild" in str(refused.events_for_node("caf_my_source__chunk_plan"))
    assert pipeline.chunks() == []
    config = {"ops": {"caf_my_source__chunk_plan": {"config": {"new_archive": True}}}}
    assert pipeline.execute("caf_plan_my_source", run_config=config).success
    assert len(pipeline.chunks()) == 1


# --- Jackal ---------------------------------------------------------------------------------------


@pytest.fixture
def context(ledger, wallet, jackal_context):
    return jackal_context(MemorySource(dict(BODIES)), ledger, jackal={"mnemonic": wallet.words})


def post(network, words, note):
    with httpx.Client() as client:
        ChainUser(network, client, words).post(random_content(1000), note=note)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "note", ["[]", '"text"', "5", '{"caf_pipeline":5}', archive_note("f" * 32)]
)
def test_unreadable_note_or_unknown_archive_of_wallet_counts(context, network, wallet, note):
    post(network, wallet.words, note)
    with pytest.raises(StoredAlready):
        first_plan(context)


def test_files_of_other_programs_or_wallets_do_not_count(context, network, wallet):
    post(network, wallet.words, '{"album":"holidays"}')
    post(network, wallet.words, "{}")
    stranger = wallet_with_space(network)
    post(network, stranger.words, archive_note(context.archive_id))
    assert len(first_plan(context).chunks) == 1


@pytest.mark.thorough
def test_unreachable_chain_does_not_count_as_empty(context, network):
    for lcd in range(2):
        network.misbehave(lcd=lcd, refuse=True)
    with pytest.raises(StoreUnreachable):
        first_plan(context)
    assert context.ledger.chunks.list() == []
    network.well_behaved()
    assert len(first_plan(context).chunks) == 1


def test_missing_wallet_leaves_owner_of_files_unknown(ledger, jackal_context):
    context = jackal_context(MemorySource(dict(BODIES)), ledger, jackal={"mnemonic": None})
    with pytest.raises(MnemonicRefused):
        first_plan(context)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def make_home(tmp_path, network, wallet, s3_server, new_bucket):
    """Makes a home with the same settings and wallet, but another ledger."""
    new_bucket.put("key", os.urandom(100_000))

    def make(name, ledger):
        (tmp_path / name).mkdir()
        caf = jackal_command_line(
            tmp_path / name, network, wallet.words, CAF_DATABASE_URL=ledger.url
        )
        caf.settings(source_text(s3_server, new_bucket.name))
        return caf

    return make


@pytest.mark.thorough
def test_same_settings_and_wallet_in_new_folder_pay_nothing(
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
    assert second("rebuild", "--yes").status == 0
    assert second("run").status == 0
    assert {chunk.state for chunk in fresh.chunks.list()} == {ChunkState.LOCATED}
    assert network.state()["charged"][wallet.address] == charged


@pytest.mark.thorough
def test_ordered_new_archive_of_one_source_is_paid(
    make_home,
    new_ledger,
    network,
    wallet,
):
    caf = make_home("home", ledger := new_ledger())
    post(network, wallet.words, archive_note("f" * 32))
    assert caf("run", "--source", "src", "--new-archive").status == 0
    assert {chunk.state for chunk in ledger.chunks.list()} == {ChunkState.LOCATED}
