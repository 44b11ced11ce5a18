"""Metadata of a whole archive: one entry for each fact, a description for each column."""

import shutil
import subprocess
from pathlib import Path

import pytest
from dagster import AssetKey, TableMetadataValue

from caf_pipeline.defs.build import build_defs
from caf_pipeline.defs.metadata import INVENTORY_COLUMNS, PLAN_COLUMNS
from caf_pipeline.formats import age
from caf_pipeline.inventory.plan import PLAN_SCHEMA
from caf_pipeline.inventory.snapshot import SNAPSHOT_SCHEMA
from caf_pipeline.ledger.sql_files import described_columns
from caf_pipeline.ledger.tables import FILE_LOCATIONS
from caf_pipeline.naming import ASSETS
from caf_pipeline.settings import EncryptionSettings, Settings, SourceSettings
from caf_pipeline_tests.support.pipeline_runs import SOURCE, with_settings, with_source
from caf_pipeline_tests.support.ticks import evaluate_tick

pytestmark = pytest.mark.thorough

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

IDENTITY = age.new_identity(hybrid=False)


def of_store(kind):
    settings = Settings(sources={SOURCE: SourceSettings(bucket="b")})
    return build_defs(
        settings.model_copy(update={"store": settings.store.model_copy(update={"kind": kind})})
    ).resolve_asset_graph()


@pytest.mark.parametrize("name", ["s3_inventory", "chunk_plan", "file_locations"])
def test_every_column_has_a_description(name):
    shown = of_store("jackal").get(AssetKey([SOURCE, name])).metadata
    assert all(column.description for column in shown["dagster/column_schema"].columns)


@pytest.mark.parametrize(
    ("columns", "schema"), [(INVENTORY_COLUMNS, SNAPSHOT_SCHEMA), (PLAN_COLUMNS, PLAN_SCHEMA)]
)
def test_described_columns_are_those_of_the_file(columns, schema):
    assert {name: type for name, (type, _) in columns.items()} == {
        field.name: str(field.type) for field in schema
    }
    nullable = [field.name for field in schema if field.nullable]
    assert [name for name, (_, text) in columns.items() if "NULL" in text] == nullable


def test_described_columns_are_those_of_the_table():
    assert list(described_columns("file_locations")) == FILE_LOCATIONS.columns.keys()


@pytest.mark.parametrize(("store", "kind"), [("jackal", "jackal"), ("directory", "file")])
def test_a_stored_chunk_is_of_the_stores_kind(store, kind):
    assert of_store(store).get(AssetKey([SOURCE, "stored_chunk"])).kinds == {kind}


def archive(pipeline):
    pipeline.put(3)
    (chunk,) = pipeline.plan()
    assert pipeline.execute("caf_archive_my_source", partition_key=chunk).success
    return pipeline, chunk


@pytest.fixture
def archived(pipeline):
    return archive(pipeline)


def materialized(pipeline, name):
    record = pipeline.instance.fetch_materializations(AssetKey([SOURCE, name]), limit=1).records[0]
    return record.asset_materialization.metadata


def test_no_size_is_shown_twice(archived):
    pipeline, _ = archived
    evaluate_tick(pipeline, "caf_watch_sources")
    observed = pipeline.instance.fetch_observations(AssetKey([SOURCE, "s3_inventory"]), limit=1)
    (check,) = pipeline.execute("caf_audit_my_source").get_asset_check_evaluations()
    pages = [materialized(pipeline, name) for name in ASSETS]
    for shown in [*pages, observed.records[0].asset_observation.metadata, check.metadata]:
        tables = [value for value in shown.values() if isinstance(value, TableMetadataValue)]
        columns = [column.name for value in tables for column in value.schema.columns]
        in_bytes = [name for name in [*shown, *columns] if name.endswith("_bytes")]
        assert in_bytes in ([], ["dagster/size_bytes"])


def test_column_lineage_names_existing_columns(archived):
    pipeline, _ = archived
    graph = pipeline.defs.resolve_asset_graph()

    def columns(key):
        schema = graph.get(key).metadata["dagster/column_schema"]
        return {column.name for column in schema.columns}

    for name in ("chunk_plan", "file_locations"):
        lineage = materialized(pipeline, name)["dagster/column_lineage"].lineage.deps_by_column
        assert lineage.keys() <= columns(AssetKey([SOURCE, name]))
        for (dep,) in lineage.values():
            assert dep.column_name in columns(dep.asset_key)


def test_lineage_has_translated_keys(pipeline):
    pipeline.put(1)
    defs = build_defs(
        pipeline.settings,
        translate=lambda spec, asset: spec.replace_attributes(key=["lake", asset.name]),
    )
    job = defs.resolve_job_def("caf_plan_my_source")
    assert job.execute_in_process(instance=pipeline.instance).success
    key = AssetKey(["lake", "chunk_plan"])
    (record,) = pipeline.instance.fetch_materializations(key, limit=1).records
    lineage = record.asset_materialization.metadata["dagster/column_lineage"].lineage
    (dep,) = lineage.deps_by_column["key"]
    assert dep.asset_key == AssetKey(["lake", "s3_inventory"])


def fetched(pipeline, chunk, folder):
    """Run the command of a chunk's page in a folder; return the file."""
    shown = materialized(pipeline, "stored_chunk")
    subprocess.run(["sh", "-c", shown["fetch"].value], cwd=folder, check=True)
    return (folder / f"{chunk}.caf").read_bytes()


def test_command_on_the_page_fetches_the_chunk(archived, tmp_path):
    pipeline, chunk = archived
    stored = Path(materialized(pipeline, "stored_chunk")["download"].path)
    assert fetched(pipeline, chunk, tmp_path) == stored.read_bytes()


@pytest.mark.skipif(not shutil.which("age"), reason="age is not installed")
def test_command_of_a_private_chunk_decrypts(pipeline, tmp_path):
    encryption = EncryptionSettings(recipients=(str(IDENTITY.recipient),))
    private = with_settings(with_source(pipeline, public=False), encryption=encryption)
    pipeline, chunk = archive(private)
    (tmp_path / "identity.txt").write_text(IDENTITY.reveal())
    assert b"key-2".ljust(3_000, b".") in fetched(pipeline, chunk, tmp_path)
    assert "download_encrypted" in materialized(pipeline, "stored_chunk")
