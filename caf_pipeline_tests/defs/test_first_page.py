"""The first pages of the UI after a `caf run`, queried from a real webserver."""

import io
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from dagster import DagsterRunStatus
from rich.console import Console

from caf_pipeline.dagster_host.run_source import run_source
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.webserver import metadata_of, webserver

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

SOURCE = "my-source"

# Like the timeline's query in the UI (`CompletedRunTimelineQuery`), which omits a run without a
# repository.
TIMELINE = """
query ($filter: RunsFilter!) { runsOrError(filter: $filter) { ... on Runs { results {
    id jobName status hasReExecutePermission
    repositoryOrigin { repositoryName repositoryLocationName }
} } } }"""
JOBS = """
{ workspaceOrError { ... on Workspace { locationEntries { name locationOrLoadError {
    __typename ... on RepositoryLocation { repositories { name pipelines { name } } }
} } } } }"""
RUN_AGAIN = """
mutation ($parameters: ReexecutionParams!) { launchRunReexecution(reexecutionParams: $parameters) {
    __typename ... on LaunchRunSuccess { run { id } } ... on PythonError { message } } }"""


@pytest.fixture
def ui(pipeline, tmp_path, monkeypatch):
    """A webserver whose code server loads the pipeline's settings from a caf.toml."""
    settings, source = pipeline.settings, pipeline.settings.sources[SOURCE]
    (tmp_path / "caf.toml").write_text(
        f'home = "{settings.home}"\n[store]\nkind = "directory"\nfolder = '
        f'"{settings.store.folder}"\n[sources.my-source]\n'
        f'bucket = "{source.bucket}"\nendpoint_url = "{source.endpoint_url}"\ntarget_size = '
        f"{int(source.target_size)}\npublic = true\n"
    )
    monkeypatch.setenv("CAF_CONFIG", str(tmp_path / "caf.toml"))
    monkeypatch.setenv("CAF_DATABASE_URL", settings.database_url.get_secret_value())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", source.access_key_id.get_secret_value())
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", source.secret_access_key.get_secret_value())
    with webserver(pipeline.instance) as server:
        yield server


@pytest.mark.thorough
def test_the_ui_shows_runs_and_assets_of_caf_run(pipeline, ui, database):
    pipeline.put(3)
    run_source(SOURCE, settings=pipeline.settings, console=Console(file=io.StringIO()))
    assert_assets_are_shown(ui, database)
    assert_runs_are_shown_and_reexecuted(pipeline, ui)


def assert_runs_are_shown_and_reexecuted(pipeline, ui):
    (entry,) = ui.ask(JOBS)["workspaceOrError"]["locationEntries"]
    (repository,) = entry["locationOrLoadError"]["repositories"]
    served = {job["name"] for job in repository["pipelines"]}

    runs = ui.ask(TIMELINE, filter={"statuses": ["SUCCESS"]})["runsOrError"]["results"]
    assert [run["jobName"] for run in runs] == [
        "caf_audit_my_source",
        "caf_archive_my_source",
        "caf_plan_my_source",
    ]
    for run in runs:
        assert run["repositoryOrigin"] == {
            "repositoryName": repository["name"],
            "repositoryLocationName": entry["name"],
        }
        assert run["jobName"] in served
        assert run["hasReExecutePermission"]

    for parent in runs:
        launched = ui.ask(
            RUN_AGAIN, parameters={"parentRunId": parent["id"], "strategy": "ALL_STEPS"}
        )["launchRunReexecution"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        again = pipeline.instance.get_run_by_id(launched["run"]["id"])
        first = pipeline.instance.get_run_by_id(parent["id"])
        assert (again.status, again.job_name) == (DagsterRunStatus.QUEUED, first.job_name)
        assert again.tags.get("dagster/partition") == first.tags.get("dagster/partition")


ENTRIES = "metadataEntries { label ... on IntMetadataEntry { intValue } \
    ... on TextMetadataEntry { text } \
    ... on TableMetadataEntry { table { schema { columns { name } } records } } \
    ... on TableSchemaMetadataEntry { schema { columns { name type constraints { nullable } } } } }"
ASSETS = f"""
{{ assetNodes {{
    assetKey {{ path }} {ENTRIES} assetMaterializations(limit: 1) {{ {ENTRIES} }}
}} }}"""


def assert_assets_are_shown(ui, database):
    """Rows, columns, places and sizes."""
    always, made = {}, {}
    for node in ui.ask(ASSETS)["assetNodes"]:
        name = node["assetKey"]["path"][1]
        always[name] = metadata_of(node["metadataEntries"])
        made[name] = metadata_of(node["assetMaterializations"][0]["metadataEntries"])

    for name in ("s3_inventory", "chunk_plan"):
        file = Path(made[name]["dagster/uri"]["text"].removeprefix("file://"))
        assert pq.read_metadata(file).num_rows == made[name]["dagster/row_count"]["intValue"] == 3
        columns = always[name]["dagster/column_schema"]["schema"]["columns"]
        assert [column["name"] for column in columns] == pq.read_schema(file).names
    assert "dagster/uri" not in made["caf_chunk"]  # its file is gone from staging
    assert always["file_locations"]["dagster/table_name"]["text"] == "public.file_locations"
    assert made["file_locations"]["dagster/row_count"]["intValue"] == 3
    assert made["file_locations"]["dagster/partition_row_count"]["intValue"] == 3
    for name in ("s3_inventory", "chunk_plan"):
        assert made[name]["dagster/size_bytes"]["intValue"] == 9_000
    for name in ("caf_chunk", "stored_chunk", "file_locations"):
        assert made[name]["size"]["text"] == "8.8 KiB"

    columns = always["file_locations"]["dagster/column_schema"]["schema"]["columns"]
    nullable = [column["name"] for column in columns if column["constraints"]["nullable"]]
    assert nullable == ["crc64nvme", "s3_checksum", "header_set"]
    with connected(database) as connection:
        named = (
            "SELECT column_name, data_type FROM information_schema.columns"
            " WHERE table_name = 'file_locations' ORDER BY ordinal_position"
        )
        shown = [(column["name"], column["type"]) for column in columns]
        assert shown == [tuple(row) for row in connection.execute(named)]
