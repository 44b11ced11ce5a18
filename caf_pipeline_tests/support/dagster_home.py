"""Fixtures: a real Dagster instance (our dagster.yaml, SQLite) and a whole pipeline on it."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterInstance, Definitions, ExecuteInProcessResult
from pydantic import SecretStr

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host.home import dagster_home
from caf_pipeline.dagster_host.run_source import open_instance
from caf_pipeline.dagster_host.team_project import HOME_VARIABLE
from caf_pipeline.defs.build import build_own_defs
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.run_context import RunContext
from caf_pipeline.settings import Settings, StoreSettings
from caf_pipeline.wiring import open_run_context
from caf_pipeline_tests.support.s3_server import Bucket


@pytest.fixture
def home_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings without a source, at home in the test's folder. DAGSTER_HOME is restored later."""
    monkeypatch.setenv(HOME_VARIABLE, "to be put back")
    return Settings(home=tmp_path / "home")


@pytest.fixture(scope="session")
def empty_dagster_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new instance's folder to copy, since creating its databases takes half a second."""
    home = tmp_path_factory.mktemp("dagster")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(HOME_VARIABLE, "to be put back")
        with open_instance(Settings(home=home)):
            return dagster_home(Settings(home=home))


@pytest.fixture
def instance(home_settings: Settings, empty_dagster_home: Path) -> Iterator[DagsterInstance]:
    """An instance as `caf run` opens it."""
    shutil.copytree(empty_dagster_home, dagster_home(home_settings), symlinks=True)
    with open_instance(home_settings) as instance:
        yield instance


@dataclass(frozen=True)
class Pipeline:
    """A source on a real S3 server with a ledger on a real Postgres, executed like `caf run`."""

    settings: Settings
    bucket: Bucket
    instance: DagsterInstance
    ledger: Ledger

    def put(self, count: int, *, size_bytes: int = 3_000, prefix: str = "key") -> None:
        """Put objects; a chunk of the target size takes six of 3,000 bytes."""
        for number in range(count):
            self.bucket.put(
                f"{prefix}-{number:03}", f"{prefix}-{number}".encode().ljust(size_bytes, b".")
            )

    @cached_property
    def defs(self) -> Definitions:
        return build_own_defs(self.settings)

    def write_settings(self, file: Path) -> None:
        """Write a caf.toml for other processes, which get the ledger's URL by their environment."""
        settings, source = self.settings, self.settings.sources[SOURCE]
        file.write_text(
            f"""home = "{settings.home}"
[store]
kind = "directory"
folder = "{settings.store.folder}"
[sources.{SOURCE}]
bucket = "{source.bucket}"
endpoint_url = "{source.endpoint_url}"
target_size = {int(source.target_size)}
public = true
"""
        )

    def execute(self, job: str, **options: Any) -> ExecuteInProcessResult:
        """Execute a job in this process; a failure is not raised."""
        options = {
            "run_config": {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
        } | options
        return self.defs.resolve_job_def(job).execute_in_process(
            instance=self.instance, raise_on_error=False, **options
        )

    def plan(self) -> list[str]:
        """Execute the job of the plan; return all chunks of the source."""
        assert self.execute("caf_plan_my_source").success
        return self.chunks()

    def chunks(self, *states: ChunkState) -> list[str]:
        return [chunk.name for chunk in self.ledger.chunks.list(SOURCE, states or None)]

    def run_context(self, run: str = "a test") -> RunContext:
        return open_run_context(self.settings, SOURCE, run=run, ledger=self.ledger)

    def events(self, result: ExecuteInProcessResult) -> list[tuple[str, str | None]]:
        return [(event.event_type_value, event.step_key) for event in result.all_events]


SOURCE = "my-source"


@pytest.fixture
def pipeline_settings(home_settings: Settings, new_bucket: Bucket, database_url: str) -> Settings:
    """Settings of one source with small chunks and no interval between plans."""
    home = home_settings.home
    return Settings(
        home=home,
        database_url=SecretStr(database_url),
        store=StoreSettings(kind="directory", folder=home / "store"),
        sources={
            SOURCE: new_bucket.settings(target_size=20_000, public=True, watch_interval_seconds=0)
        },
    )


@pytest.fixture
def pipeline(
    pipeline_settings: Settings, new_bucket: Bucket, instance: DagsterInstance, ledger: Ledger
) -> Pipeline:
    return Pipeline(pipeline_settings, new_bucket, instance, ledger)
