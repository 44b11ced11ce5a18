"""Restoring by a job, and reading archived objects in another project's assets."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from dagster import AssetKey, Definitions, RetryPolicy, asset, build_resources, define_asset_job

from caf_pipeline import wiring
from caf_pipeline.automation import restoring
from caf_pipeline.defs import restore_job
from caf_pipeline.defs.object_reader import ObjectReader
from caf_pipeline.errors import StoreUnreachable
from caf_pipeline.retrieval import check, restore_folder
from caf_pipeline.store.directory import DirectoryStore
from caf_pipeline_tests.support.command_line import source_text
from caf_pipeline_tests.support.run_contexts import archive_everything, plan

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

SOURCE = "my-source"


@pytest.fixture
def archived(pipeline):
    pipeline.put(9)
    archive_everything(pipeline.run_context())
    return pipeline


def restore(pipeline, **config):
    """Execute the job; return the result, the metadata and the error message."""
    run_config = {"ops": {"caf_restore_objects": {"config": {"source": SOURCE, **config}}}}
    result = pipeline.execute("caf_restore", run_config=run_config)
    step = [
        event for event in result.all_events if event.is_step_failure or event.is_successful_output
    ]
    data = (
        step[0].step_failure_data.user_failure_data
        if step[0].is_step_failure
        else step[0].step_output_data
    )
    return (
        result,
        {name: value.value for name, value in data.metadata.items()},
        getattr(data, "description", ""),
    )


def test_a_run_restores_a_prefix_and_counts_what_it_did(archived, tmp_path):
    result, shown, _ = restore(archived, prefix="key-00", destination=str(tmp_path / "out"))
    assert result.success
    counts = {"there_already": 0, "different": 0, "failed": 0, "not_yet_archived": 0, "skipped": 0}
    assert shown == {"objects": 9, "bytes": 27_000, **counts}
    assert (tmp_path / "out" / "key-003").read_bytes().startswith(b"key-3.")
    (tmp_path / "out" / "key-003").unlink()
    result, shown, _ = restore(archived, destination=str(tmp_path / "out"))
    assert (shown["objects"], shown["there_already"]) == (1, 8)


def test_a_restore_reports_objects_that_are_not_archived(archived, tmp_path):
    # New keys: S3's times have seconds only, so a key that is written again might not be planned.
    for number in range(9, 12):
        archived.bucket.put(f"key-{number:03}", b"new")
    plan(archived.run_context())
    result, shown, _ = restore(archived, prefix="key-0", destination=str(tmp_path / "out"))
    assert (shown["objects"], shown["not_yet_archived"], shown["skipped"]) == (9, 3, 0)
    messages = [entry.user_message for entry in archived.instance.all_logs(result.run_id)]
    assert any("9 objects listed" in message for message in messages)
    _, shown, _ = restore(archived, prefix="key-004", destination=str(tmp_path / "out"))
    assert (shown["there_already"], shown["not_yet_archived"]) == (1, 0)


def test_a_restore_is_observed_on_the_locations(archived, tmp_path, monkeypatch):
    monkeypatch.setattr(restoring, "LINE_SECONDS", 0)
    result, _, _ = restore(archived, destination=str(tmp_path / "out"))
    observed = result.get_asset_observation_events()
    shown = [event.asset_observation_data.asset_observation.metadata for event in observed]
    restored = [metadata["restore_objects"].value for metadata in shown]
    assert {tuple(event.asset_key.path) for event in observed} == {(SOURCE, "file_locations")}
    assert restored == sorted(set(restored))
    assert set(restored) <= set(range(1, 10))
    assert {metadata["run"].value for metadata in shown} == {result.run_id}


def test_an_incomplete_restore_fails_the_run(archived, tmp_path):
    (tmp_path / "key-003").write_text("mine")
    result, shown, message = restore(archived, destination=str(tmp_path))
    assert not result.success
    assert "1 object of 9" in message
    assert (shown["objects"], shown["different"], shown["exit_code"]) == (8, 1, 1)
    assert restore(archived, destination=str(tmp_path), force=True)[0].success
    _, shown, message = restore(archived, prefix="none/", destination=str(tmp_path))
    assert (shown["error"], "'none/'" in message) == ("NotLocated", True)
    _, shown, message = restore(archived, source="other", destination=str(tmp_path))
    assert (shown["error"], "'other'" in message) == ("NotLocated", True)
    for destination in ("~/out", "out", "", "/a\0b", "file:///out"):
        _, shown, message = restore(archived, destination=destination)
        assert (shown["error"], repr(destination) in message) == ("UsageError", True)
    for option in ({"profile": "ops"}, {"endpoint_url": "http://127.0.0.1:9"}):
        _, shown, message = restore(archived, destination=str(tmp_path / "restored"), **option)
        assert (shown["error"], "`profile`" in message) == ("UsageError", True)
    assert not (tmp_path / "restored").exists()


def test_a_bucket_error_names_the_config_field(archived):
    _, shown, message = restore(archived, destination="s3://bucket/x", profile="nobody")
    assert "'nobody'" in message
    assert "`profile`" in shown["hint"]
    _, shown, _ = restore(archived, destination="s3://bucket/x", endpoint_url="127.0.0.1:9000")
    assert "`endpoint_url`" in shown["hint"]


def test_a_restore_logs_the_first_different_objects(archived, tmp_path, monkeypatch):
    monkeypatch.setattr(restoring, "MAX_LOGGED", 2)
    for number in range(3):
        (tmp_path / f"key-{number:03}").write_text("mine")
    result, shown, _ = restore(archived, destination=str(tmp_path))
    messages = [entry.user_message for entry in archived.instance.all_logs(result.run_id)]
    logged = [message for message in messages if "not written" in message]
    assert [message.partition(" ")[0] for message in logged] == ["'key-000'", "'key-001'"]
    assert shown["different"] == 3
    assert "`force`" in shown["hint"]


def test_a_lost_store_fails_the_restore_and_keeps_its_files(archived, tmp_path, monkeypatch):
    class Leaving(DirectoryStore):
        reads = 0

        def read(self, *given, **options):
            self.reads += 1
            if self.reads > 2:
                raise StoreUnreachable("the line is cut")
            yield from super().read(*given, **options)

    store = Leaving(archived.settings.store.folder)
    monkeypatch.setattr(wiring, "open_store", lambda *_: store)
    monkeypatch.setattr(restore_folder, "BATCH_OBJECTS", 2)
    monkeypatch.setattr(check, "UNREAD_IN_A_ROW", 3)
    monkeypatch.setattr(
        restore_job.restore_archived, "_retry_policy", RetryPolicy(max_retries=1)
    )  # at once
    result, shown, message = restore(archived, destination=str(tmp_path / "out"))
    assert not result.success
    assert message.startswith("3 objects in a row")
    assert (shown["objects"], shown["there_already"], shown["failed"], shown["exit_code"]) == (
        0,
        4,
        3,
        7,
    )
    observed = archived.instance.fetch_observations(
        AssetKey([SOURCE, "file_locations"]), limit=9
    ).records
    assert [item.asset_observation.metadata["restore_objects"].value for item in observed] == [0, 4]
    assert len(list((tmp_path / "out").iterdir())) == 4


@pytest.fixture
def settings_file(archived, tmp_path, database_url, monkeypatch):
    """A settings file for reading the archived objects."""
    for name, value in (("CAF_DATABASE_URL", database_url), ("CAF_STORE__KIND", "directory")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CAF_STORE__FOLDER", str(archived.settings.store.folder))
    settings = tmp_path / "caf.toml"
    settings.write_text(
        source_text("http://127.0.0.1:1", "b").replace("sources.src", f"sources.{SOURCE}")
    )
    return settings


def test_an_asset_of_another_project_reads_archived_objects(settings_file, tmp_path):
    @asset
    def report(archive: ObjectReader) -> None:
        with archive.open(SOURCE, "key-003") as file:
            file.seek(4)
            tail = file.read(2)
        assert (archive.read(SOURCE, "key-007")[:6], tail) == (b"key-7.", b"3.")
        (tmp_path / "report").write_text(
            "\n".join(item.row.key for item in archive.archive.ls(SOURCE))
        )

    other = Definitions(
        assets=[report], jobs=[define_asset_job("theirs")], resources={"archive": ObjectReader()}
    )
    run_config = {"resources": {"archive": {"config": {"settings_file": str(settings_file)}}}}
    assert other.resolve_job_def("theirs").execute_in_process(run_config=run_config).success
    assert len((tmp_path / "report").read_text().splitlines()) == 9


def test_concurrent_threads_share_one_archive(settings_file):
    begin = threading.Barrier(8)

    def opened(reader):
        begin.wait()
        return reader.archive

    with (
        build_resources({"archive": ObjectReader(settings_file=str(settings_file))}) as resources,
        ThreadPoolExecutor(begin.parties) as pool,
    ):
        assert len(set(pool.map(opened, [resources.archive] * begin.parties))) == 1


def test_a_forked_process_opens_its_own_archive(settings_file):
    with build_resources({"archive": ObjectReader(settings_file=str(settings_file))}) as resources:
        reader = resources.archive
        mine = reader.archive
        child = os.fork()
        if child == 0:
            is_own = False
            try:
                is_own = (
                    reader.archive is not mine and reader.read(SOURCE, "key-003")[:6] == b"key-3."
                )
            finally:
                os._exit(not is_own)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (reader.archive, reader.read(SOURCE, "key-004")[:6]) == (mine, b"key-4.")
