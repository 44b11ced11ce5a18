"""The definitions in somebody else's project: executors, processes, side effects."""

import json
import os
import subprocess
import sys

import pytest
from dagster import (
    AssetCheckKey,
    AssetKey,
    Definitions,
    asset,
    execute_job,
    in_process_executor,
    multiprocess_executor,
    reconstructable,
)

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.defs.build import build_defs, build_own_defs
from caf_pipeline.naming import ALERT_SENSOR, PROCESS_TAG, SOURCE_KEEPS_UP, SOURCE_TAG
from caf_pipeline.retrieval.reader import fetch
from caf_pipeline.settings import Settings, SourceSettings
from caf_pipeline.system.processes import boot_id
from caf_pipeline_tests.support.multiprocess_job import chunk_job
from caf_pipeline_tests.support.s3_server import KEY_ID, SECRET
from caf_pipeline_tests.support.ticks import evaluate_tick

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

SETTINGS = Settings(sources={"a": SourceSettings(bucket="b"), "b-c": SourceSettings(bucket="b")})


@asset
def mine() -> None: ...


def merged():
    project = Definitions(assets=[mine], executor=multiprocess_executor)
    return Definitions.merge(project, build_defs(SETTINGS))


def test_our_jobs_keep_their_executor_in_a_project():
    jobs = [job.name for job in build_defs(SETTINGS).jobs]
    assert len(jobs) > 10
    executors = {merged().resolve_job_def(job).executor_def for job in jobs}
    assert executors == {in_process_executor}


def test_other_runs_use_the_projects_executor():
    every_asset = "__ASSET_JOB"
    assert merged().resolve_job_def(every_asset).executor_def is multiprocess_executor
    ui_job = build_own_defs(SETTINGS).resolve_job_def(every_asset)
    assert ui_job.executor_def is in_process_executor


def test_a_projects_events_are_never_pruned():
    jobs = {job.name for job in build_own_defs(SETTINGS).jobs}
    assert len(jobs - {job.name for job in build_defs(SETTINGS).jobs}) == 1


SIDE_EFFECTS = """
import gc, logging, os, signal, sys
import dagster, dagster_aws.s3, psycopg

def state():
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return {
        "thresholds": gc.get_threshold(),
        "frozen": gc.get_freeze_count(),
        "callbacks": list(gc.callbacks),
        "enabled": gc.isenabled(),
        "loggers": [
            (logger.name, logger.level, logger.filters, logger.handlers)
            for logger in loggers
            if isinstance(logger, logging.Logger)
            and (logger.filters or logger.handlers or logger.level)
        ],
        "environment": dict(os.environ),
        "import hooks": list(sys.meta_path),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "excepthook": sys.excepthook,
    }

before = state()
from caf_pipeline import ObjectReader, S3ArchiveComponent, build_defs, chunk_partitions
from caf_pipeline.settings import Settings, SourceSettings

build_defs(Settings(sources={"a": SourceSettings(bucket="b")})).get_repository_def()
after = state()
print([name for name in before if before[name] != after[name]])
"""


LOADED = """
import sys
import dagster

before = set(sys.modules)
from caf_pipeline import ObjectReader, S3ArchiveComponent
from caf_pipeline.defs.build import build_own_defs
from caf_pipeline.settings import Settings, SourceSettings

source = SourceSettings(bucket="b", automatic=True)
build_own_defs(Settings(sources={"a": source})).get_repository_def()
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""
SLOW = {
    *("alembic", "awscrt", "boto3", "botocore", "cryptography", "dagster_aws", "duckdb", "fsspec"),
    *("httpx", "msgspec", "numpy", "pandas", "psycopg", "pyarrow", "rich", "sqlalchemy"),
}


def test_loading_the_definitions_loads_no_slow_library():
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "caf_pipeline" in loaded
    assert not loaded & SLOW


def test_importing_the_package_imports_no_library():
    code = "import sys, caf_pipeline; print('dagster' in sys.modules, dir(caf_pipeline))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False")
    assert "'S3ArchiveComponent'" in done.stdout  # `dg` lists components by the names of a module


def test_loading_changes_nothing_in_the_process():
    done = subprocess.run(
        [sys.executable, "-c", SIDE_EFFECTS], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.thorough
def test_steps_in_processes_of_their_own_archive_a_chunk(pipeline, tmp_path, monkeypatch):
    pipeline.put(5)
    (chunk,) = pipeline.plan()
    pipeline.write_settings(tmp_path / "caf.toml")
    monkeypatch.setenv("CAF_CONFIG", str(tmp_path / "caf.toml"))
    monkeypatch.setenv("CAF_DATABASE_URL", pipeline.settings.database_url.get_secret_value())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with execute_job(
        reconstructable(chunk_job), instance=pipeline.instance, tags={"dagster/partition": chunk}
    ) as result:
        assert result.success
        run = pipeline.instance.get_run_by_id(result.run_id)
    assert run.tags[SOURCE_TAG] == "my-source"
    assert json.loads(run.tags[PROCESS_TAG])[:3] == [run.run_id, boot_id(), os.getpid()]
    assert pipeline.ledger.chunks.get(chunk).state is ChunkState.LOCATED
    context = pipeline.run_context()
    pieces = fetch(context.ledger.lookup, context.store, "my-source", "key-003").pieces
    assert b"".join(pieces) == b"key-3".ljust(3_000, b".")
    assert os.listdir(pipeline.settings.staging_folder) == []


def test_execute_is_called_with_each_step(pipeline):
    pipeline.put(1)
    calls = []

    def execute(context, step):
        calls.append(context.run.job_name)
        return step()

    defs = build_defs(pipeline.settings, execute=execute)
    (job,) = [job.name for job in defs.jobs if job.name.endswith("plan_my_source")]
    result = defs.resolve_job_def(job).execute_in_process(instance=pipeline.instance)
    assert result.success
    assert set(calls) == {job}
    assert len(calls) >= 2


def into_lake(spec, asset):
    return spec.replace_attributes(key=["lake", asset.name])


def test_translated_assets_are_planned_and_archived(pipeline):
    pipeline.put(1)
    defs = build_defs(pipeline.settings, translate=into_lake)
    jobs = {job.name: defs.resolve_job_def(job.name) for job in defs.jobs}
    for job in ("plan_my_source", "archive_my_source"):
        (name,) = [name for name in jobs if name.endswith(job)]
        chunks = pipeline.chunks()
        result = jobs[name].execute_in_process(
            instance=pipeline.instance, partition_key=chunks[0] if chunks else None
        )
        assert result.success
        keys = {
            key for event in result.get_asset_materialization_events() if (key := event.asset_key)
        }
        assert {key.path[0] for key in keys} == {"lake"}
        evaluated = result.get_asset_check_evaluations()
        assert {check.asset_key.path[0] for check in evaluated} == {"lake"}
    assert pipeline.ledger.chunks.get(chunks[0]).state is ChunkState.LOCATED


def test_alert_sensor_reports_on_translated_assets(pipeline):
    pipeline.plan()
    evaluate_tick(pipeline, ALERT_SENSOR, translate=into_lake)
    observed = pipeline.instance.fetch_observations(AssetKey(["lake", "s3_inventory"]), limit=1)
    assert len(observed.records) == 1
    check = AssetCheckKey(AssetKey(["lake", "chunk_plan"]), SOURCE_KEEPS_UP)
    assert check in pipeline.instance.event_log_storage.get_latest_asset_check_execution_by_key(
        [check]
    )
