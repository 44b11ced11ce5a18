"""`caf run`: all of it in one process, on the jobs' own pages, its first error kept for the end."""

import io
from dataclasses import replace

import pytest
from dagster import AssetKey, RunsFilter
from pydantic import ByteSize
from rich.console import Console
from sqlalchemy import text

from caf_pipeline import archive
from caf_pipeline.defs.command import run_source
from caf_pipeline.errors import BucketMissing, CafError, SettingsError, UsageError
from caf_pipeline.lifecycle import ChunkState
from caf_pipeline.settings import Settings, StoreSettings
from caf_pipeline_tests.jackal_network import jackal_settings
from caf_pipeline_tests.workplaces import archive_chunk

pytest_plugins = ["caf_pipeline_tests.dagster_home", "caf_pipeline_tests.jackal_network"]

SOURCE = "my-source"


@pytest.fixture
def run(pipeline):
    """Run the command; what it prints is kept in `run.printed`."""

    def command(source: str | None = SOURCE):
        command.printed = io.StringIO()
        return run_source(source, settings=pipeline.settings, console=Console(file=command.printed, width=200))

    return command


def test_everything_ends_located_and_a_second_run_finds_nothing_new(pipeline, run):
    pipeline.put(12)
    (summary,) = run()
    assert (summary.objects, summary.size_bytes, summary.complete) == (12, 36_000, True)
    assert set(pipeline.chunks(ChunkState.LOCATED)) == set(summary.chunks)
    assert "12/12 objects" in run.printed.getvalue()
    (again,) = run()
    assert again.chunks == []
    assert "nothing new; the source is complete" in run.printed.getvalue()


def test_what_a_run_that_died_in_its_last_step_left_in_staging_is_removed(pipeline, run):
    pipeline.put(12)
    chunk = pipeline.plan()[0]
    archive_chunk(pipeline.workplace(), chunk, until=archive.load_locations)
    (summary,) = run()
    assert chunk in summary.chunks
    assert summary.objects == 12 - pipeline.ledger.chunk(chunk).member_count
    assert pipeline.ledger.reservations() == []
    assert list(pipeline.settings.staging_folder.iterdir()) == []


def test_its_runs_stand_on_their_jobs_pages(pipeline, run):
    pipeline.put(1)
    run(None)
    runs = pipeline.instance.get_runs()
    assert [each.job_name for each in runs] == ["audit_my_source", "archive_my_source", "plan_my_source"]
    ours = RunsFilter(tags={".dagster/repository": "__repository__@caf-pipeline"})
    assert pipeline.instance.get_runs(ours) == runs
    assert runs[1].tags["dagster/partition"] == pipeline.chunks()[0]


def test_a_failed_chunk_lets_the_others_go_on_and_its_error_is_raised_at_the_end(pipeline, run, database):
    pipeline.put(12)
    first, *others = pipeline.plan()
    with database.transaction() as connection:
        connection.execute(text("UPDATE caf_files SET object_count = 99 WHERE name = :name"), {"name": first})
    with pytest.raises(CafError, match=f"the plan of chunk {first}"):
        run()
    assert f"chunk {first} failed" in run.printed.getvalue()
    assert pipeline.chunks(ChunkState.LOCATED) == others


def test_the_error_behind_a_failure_is_the_one_that_is_raised(pipeline, run):
    pipeline.bucket.client.delete_bucket(Bucket=pipeline.bucket.name)
    with pytest.raises(BucketMissing) as failed:
        run()
    assert failed.value.exit_code == 5


def test_an_unknown_source_and_none_at_all_are_refused(pipeline, run, tmp_path):
    with pytest.raises(SettingsError, match="there is no source 'other'"):
        run("other")
    with pytest.raises(UsageError, match="there is no source"):
        run_source(None, settings=Settings(home=tmp_path))


def test_a_sealed_chunk_that_no_provider_takes_in_time_is_cut_again(pipeline, network):
    store, jackal = StoreSettings(kind="jackal"), jackal_settings(network, upload_seconds=2)
    sources = {SOURCE: pipeline.settings.sources[SOURCE].model_copy(update={"target_size": ByteSize(1_000_000)})}
    changes = {"store": store, "jackal": jackal, "sources": sources}
    mine = replace(pipeline, settings=pipeline.settings.model_copy(update=changes))
    mine.put(8, size_bytes=100_000)
    (large,) = mine.plan()
    sealing = mine.execute("archive_my_source", partition_key=large, asset_selection=[AssetKey([SOURCE, "caf_chunk"])])
    assert sealing.success
    for provider in network.provider_addresses:
        mine.ledger.providers().uploaded(provider, 280_000, 1.0)
    printed = io.StringIO()
    (summary,) = run_source(SOURCE, settings=mine.settings, console=Console(file=printed, width=200))
    assert summary.complete
    assert mine.chunks(ChunkState.WITHDRAWN) == [large]
    assert len(mine.chunks(ChunkState.LOCATED)) > 1
    assert "target size" in printed.getvalue()
