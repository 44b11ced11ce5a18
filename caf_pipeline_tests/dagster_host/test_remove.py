"""`caf remove`: what it removes and keeps, and that the name can be used again."""

import os
import shutil
from functools import partial

import pytest
from dagster import DagsterInstance, DagsterRunStatus

from caf_pipeline.automation.dead_runs import process_tags
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host import remove
from caf_pipeline.dagster_host.remove import remove_command
from caf_pipeline.errors import HeldByOther, IllegalMove, NotLocated, SettingsError, StagingError
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.naming import SOURCE_TAG, partitions_name
from caf_pipeline.settings import Settings
from caf_pipeline.steps import chunk_steps, inventories
from caf_pipeline.system.folder_lock import writing_into
from caf_pipeline.system.processes import this_process
from caf_pipeline.wiring import open_run_context
from caf_pipeline_tests.support.command_line import KEYS, CommandLine, opened_context, source_text
from caf_pipeline_tests.support.pipeline_runs import SOURCE, start_run
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import archive_chunk, plan

pytestmark = pytest.mark.thorough

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]


@pytest.fixture
def removing(pipeline):
    """Remove the source; `removing.lines` has the lines that the user confirms."""

    def command(source: str = SOURCE) -> int:
        return remove_command(
            source,
            settings=pipeline.settings,
            run="remover",
            confirm=partial(setattr, command, "lines"),
        )

    return command


@pytest.fixture
def packed(pipeline):
    """Five planned chunks of a source. Two chunks are packed."""
    pipeline.put(25)
    names = pipeline.plan()
    context = pipeline.run_context()
    archive_chunk(context, names[0], until=chunk_steps.seal_chunk)
    archive_chunk(context, names[1], until=chunk_steps.pack_chunk)
    return pipeline


def left_of(pipeline) -> list[str]:
    """Return the source's folders and partitions."""
    home = pipeline.settings.home
    folders = [home / name / SOURCE for name in ("plans", "inventories", "located")]
    staged = (home / "staging").glob(f"{SOURCE}-*")
    partitions = pipeline.instance.get_dynamic_partitions(partitions_name(SOURCE))
    return [
        *(str(path) for path in folders if os.path.lexists(path)),
        *(path.name for path in staged),
        *partitions,
    ]


def test_a_removed_source_is_archived_anew_under_its_name(packed, removing, capsys):
    names = packed.chunks()
    assert removing() == 0
    assert f"source '{SOURCE}' is removed" in capsys.readouterr().out
    assert any("1 plan, 5 chunks" in line for line in removing.lines)
    assert (packed.ledger.lookup.sources(), left_of(packed)) == ([], [])

    again = packed.plan()
    for name in again:
        assert packed.execute("caf_archive_my_source", partition_key=name).success
    assert packed.chunks(ChunkState.LOCATED) == again
    assert len(names) == len(again)
    with pytest.raises(IllegalMove):
        removing()
    assert packed.chunks(ChunkState.LOCATED) == again


@pytest.mark.parametrize(
    "killed_in", [(remove, "remove_leftovers"), (DagsterInstance, "delete_dynamic_partition")]
)
def test_the_next_removal_completes_a_killed_one(packed, removing, monkeypatch, killed_in):
    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(*killed_in, kill)
        with pytest.raises(KeyboardInterrupt):
            removing()
    assert packed.ledger.lookup.sources() == []
    assert left_of(packed)
    assert removing() == 0
    assert "no longer" in removing.lines[0]
    assert left_of(packed) == []
    with pytest.raises(NotLocated):
        removing()


def test_files_of_a_lost_ledger_stay(packed, removing, database):
    with connected(database) as connection:  # as in a new database
        connection.execute("TRUNCATE sources, leases CASCADE")
    before = left_of(packed)
    with pytest.raises(NotLocated, match="lost ledger"):
        removing()
    packed.run_context()  # makes the source known again, as any run does
    assert removing() == 0
    staged = [name for name in before if name.endswith((".caf", ".packed", ".json"))]
    assert staged
    assert set(staged) <= set(left_of(packed))


def test_another_sources_files_stay(packed, removing):
    other = packed.settings.home / "plans" / f"{SOURCE}-2"
    other.mkdir()
    staged = packed.settings.home / "staging" / f"{SOURCE}-2-0a0b0c0d-00001.caf"
    staged.write_bytes(b"")
    removing()
    assert other.is_dir()
    assert staged.exists()


def test_a_link_is_removed_and_not_what_it_leads_to(packed, removing, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_bytes(b"kept")
    link = packed.settings.home / "located" / SOURCE
    shutil.rmtree(link, ignore_errors=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(elsewhere)
    removing()
    assert (elsewhere / "file").read_bytes() == b"kept"
    assert left_of(packed) == []


def test_a_link_out_of_home_is_not_followed(packed, removing, tmp_path):
    plans, elsewhere = packed.settings.home / "plans", tmp_path / "elsewhere"
    plans.rename(elsewhere)
    plans.symlink_to(elsewhere)
    with pytest.raises(StagingError):
        removing()
    assert (elsewhere / SOURCE).is_dir()
    assert packed.ledger.lookup.sources() == [SOURCE]


def test_a_source_that_is_being_listed_stays(packed, removing):
    with writing_into(packed.settings.home / "inventories" / SOURCE), pytest.raises(HeldByOther):
        removing()
    assert packed.ledger.lookup.sources() == [SOURCE]


class Stopped(Exception):
    """Ends an inventory."""


@pytest.mark.parametrize("inventory", ["listing", "report"])
def test_a_source_stays_during_its_inventory(packed, removing, monkeypatch, inventory):
    context = packed.run_context()

    def remove_now(*_):
        with pytest.raises(HeldByOther):
            removing()
        raise Stopped

    if inventory == "listing":
        monkeypatch.setattr(inventories.ParallelListing, "run", remove_now)
        take = inventories.take_inventory
    else:
        monkeypatch.setattr(type(context.objects), "open_report", remove_now)
        take = inventories.take_report
    with pytest.raises(Stopped):
        take(context)
    assert packed.ledger.lookup.sources() == [SOURCE]
    assert context.inventories().exists()
    assert removing() == 0


def test_a_source_stays_between_two_steps_of_its_run(packed, removing):
    run = start_run(packed, "caf_plan_my_source", DagsterRunStatus.STARTED, **{SOURCE_TAG: SOURCE})
    packed.instance.add_run_tags(run, process_tags(this_process(run)))
    with pytest.raises(HeldByOther, match=run):
        removing()
    assert packed.ledger.lookup.sources() == [SOURCE]
    packed.instance.report_run_failed(packed.instance.get_run_by_id(run))
    assert removing() == 0


def test_an_inventory_registers_a_source_removed_before_it(packed, removing):
    context = packed.run_context()
    removing()
    snapshot = inventories.take_inventory(context)
    assert packed.ledger.lookup.sources() == [SOURCE]
    assert snapshot.object_count == 25


def test_a_preview_does_not_make_a_lost_source_removable(packed, removing, database):
    with connected(database) as connection:  # as in a new database
        connection.execute("TRUNCATE sources, leases CASCADE")
    context = open_run_context(
        packed.settings, SOURCE, run="run-1", ledger=packed.ledger, register=False
    )
    inventories.take_inventory(context, to_plan=False)
    context.close()
    with pytest.raises(NotLocated, match="lost ledger"):
        removing()


@pytest.mark.parametrize("name", ["other", "../plans", ".", "a/b", ""])
def test_an_unknown_source_is_refused(packed, removing, name):
    with pytest.raises(SettingsError):
        removing(name)
    assert packed.ledger.lookup.sources() == [SOURCE]


def test_a_source_that_the_settings_lack_is_removed(packed, removing):
    settings = Settings(**{**dict(packed.settings), "sources": {}})
    assert remove_command(SOURCE, settings=settings, run="remover", confirm=lambda _: None) == 0
    assert left_of(packed) == []


# --- the command
# ------------------------------------------------------------------------------------------


@pytest.fixture
def caf(tmp_path, database_url, s3_server, new_bucket):
    new_bucket.put("key", b"body" * 10_000)
    caf = CommandLine(tmp_path, KEYS | {"CAF_DATABASE_URL": database_url})
    caf.settings(source_text(s3_server, new_bucket.name))
    return caf


def planned_by_mistake(caf: CommandLine, s3_server: str, bucket: str) -> None:
    """Plan the bucket's root, then set a prefix."""
    with opened_context(caf) as context:
        plan(context)
    caf.settings(source_text(s3_server, bucket, prefix="right/"))


def test_a_planned_typo_is_corrected_and_then_archived(caf, s3_server, new_bucket):
    planned_by_mistake(caf, s3_server, new_bucket.name)
    new_bucket.put("right/key", b"right" * 10_000)
    assert caf("remove", "src").status == 2
    done = caf("remove", "src", "--yes")
    assert (done.status, b"is removed" in done.out) == (0, True)
    assert caf("run", "src").status == 0
    assert caf("get", "src", "right/key").out == b"right" * 10_000
    assert caf("remove", "src", "--yes").status == 6


def test_a_run_takes_a_corrected_prefix(caf, s3_server, new_bucket):
    planned_by_mistake(caf, s3_server, new_bucket.name)
    new_bucket.put("right/key", b"right" * 10_000)
    assert caf("run", "src").status == 0
    assert caf("get", "src", "right/key").out == b"right" * 10_000
    assert caf("get", "src", "key").status == 11
    caf.settings(source_text(s3_server, new_bucket.name))  # something is stored now
    assert caf("run", "src").status == 6


def intend(caf: CommandLine, *, posted: bool) -> str:
    """Plan and pack a chunk. Its run is killed after it wanted to post, or posted, the chunk."""
    with opened_context(caf) as context:
        (chunk,) = plan(context).chunks
        archive_chunk(context, chunk.name, until=chunk_steps.seal_chunk)
        with context.lease(chunk_lease(chunk.name)) as lease:
            ledger = context.ledger
            ledger.moves.move(lease, chunk.name, ChunkState.SEALED, ChunkState.POSTING)
            if posted:
                to_store = chunk_steps.to_store(context, lease, ledger.chunks.get(chunk.name))
                context.store.post(to_store, ledger.transactions(context.holder))
        return chunk.name


@pytest.mark.parametrize("posted", [False, True])
@pytest.mark.parametrize("way", ["run src", "withdraw src", "withdraw CHUNK", "remove src --yes"])
def test_an_unposted_intention_leaves_the_name_usable(caf, s3_server, new_bucket, way, posted):
    new_bucket.put("right/key", b"right" * 10_000)
    chunk = intend(caf, posted=posted)
    caf.settings(source_text(s3_server, new_bucket.name, prefix="right/"))
    done = caf(*way.replace("CHUNK", chunk).split())
    assert done.status == (6 if posted else 0), done.err
    if posted:
        caf.settings(source_text(s3_server, new_bucket.name))
        assert caf("run", "src").status == 0
        assert caf("get", "src", "key").out == b"body" * 10_000
    else:
        assert caf("run", "src").status == 0
        assert caf("get", "src", "right/key").out == b"right" * 10_000


def test_a_failed_first_run_with_a_typo_is_corrected(caf, s3_server, new_bucket):
    caf.settings(source_text(s3_server, "no-such-bucket"))
    assert caf("run", "src").status == 5
    caf.settings(source_text(s3_server, new_bucket.name))
    assert caf("run", "src").status == 0
    assert caf("get", "src", "key").out == b"body" * 10_000


def test_a_source_that_was_never_used_has_nothing_to_remove(caf):
    assert caf("remove", "src", "--yes").status == 11
    assert caf("remove", "other", "--yes").status == 3


def test_the_ledger_keeps_a_source_whose_removal_is_not_confirmed(packed):
    class Refused(Exception):
        pass

    def refuse(_: object) -> None:
        raise Refused

    with pytest.raises(Refused):
        remove_command(SOURCE, settings=packed.settings, run="remover", confirm=refuse)
    assert packed.ledger.lookup.sources() == [SOURCE]
    assert left_of(packed)
