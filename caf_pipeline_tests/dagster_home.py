"""Fixtures of a real Dagster instance: our dagster.yaml, SQLite, in a home of the test's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import DagsterInstance

from caf_pipeline.defs.command import open_instance
from caf_pipeline.defs.home import HOME_VARIABLE
from caf_pipeline.settings import Settings


@pytest.fixture
def home_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings without a source, whose home is the test's folder; DAGSTER_HOME is put back afterwards."""
    monkeypatch.setenv(HOME_VARIABLE, "to be put back")
    return Settings(home=tmp_path / "home")


@pytest.fixture
def instance(home_settings: Settings) -> Iterator[DagsterInstance]:
    """An instance as `caf run` opens it."""
    with open_instance(home_settings) as instance:
        yield instance
